"""What TraVal does besides its steps: what is saved and written when, what ends a run, and what a resume takes up."""

import contextlib
import copy
import dataclasses
import math
from pathlib import Path
from signal import SIGTERM

import pytest
import torch
from torch import nn

from tests.utils.test_train_validation import make, parameters
from utils.config.settings import UserError
from utils.loop import step_sums, validation
from utils.loop.hooks import Hooks
from utils.loop.stop_signals import Stopped, StopSignals
from utils.record.metrics import Report
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed
from utils.train_validation import TrainingFailure

THREE_STEPS = ("--arch", "fc", "--batch-size", "480", "--amp", "off")  # an epoch of 480, 480 and 477 images


class Recorder(Writer):
    """Remembers in which order it was told what; bars too."""

    def __init__(self):
        self.told = []

    def __getattribute__(self, name):
        if name in ("told", "of", "bar", "__dict__", "__class__"):
            return super().__getattribute__(name)
        return lambda *arguments, **named: self.told.append((name, arguments))

    def bar(self, total, initial, description, unit, words=None):
        self.told.append(("bar", (total, initial, description, unit)))
        return super().bar(total, initial, description, unit)

    def of(self, name):
        """What it was told by the method ``name``."""
        return [arguments for told, arguments in self.told if told == name]


class Saver:
    """Stands for a ``Checkpointer``: keeps what it is to save, in the order of what the writer is told."""

    def __init__(self, recorder, failed=False):
        self.recorder = recorder
        self.failed = failed
        self.folder = Path("run/checkpoints")
        self.states = []

    def save(self, state, *names):
        self.states.append(copy.deepcopy(state))
        self.recorder.told.append(("saved", names))

    def wait(self):
        self.recorder.told.append(("waited", ()))
        if self.failed:
            raise UserError("the disk is full")


def watched(*flags, failed=False, **more):
    """A TraVal with a recorder and a saver."""
    recorder = Recorder()
    saver = Saver(recorder, failed)
    return make(*flags, writer=recorder, checkpointer=saver, description={"arch": "fc"}, **more), recorder, saver


@pytest.fixture
def results(monkeypatch):
    """Validations have these top-1 and losses instead, one after the other."""
    given = []

    def validate(*_):
        top1, loss = given.pop(0)
        return Report(loss, top1, 100.0, 360)

    monkeypatch.setattr(validation, "validate", validate)
    return given


def test_fit_trains_and_validates_every_epoch_and_gives_the_last_report():
    traval, recorder, saver = watched(*THREE_STEPS, "--epochs", "2")
    report = traval.fit()
    assert (traval.progress.epoch, traval.progress.step, traval.progress.step_in_epoch) == (2, 6, 0)
    assert report.count == 360 and report == Report(*traval.progress.last_validation)
    rows = [row for (row,) in recorder.of("epoch")]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 3), (2, 6)]
    assert (report.loss, report.top1, report.top5) == tuple(
        rows[-1][f"val_{name}"] for name in ("loss", "top1", "top5")
    )
    assert traval.progress.validated_step == 6 and traval.progress.samples_seen == 2 * 1437
    assert recorder.told[-1] == ("waited", ()), "everything is on the disk when the run ends"
    assert recorder.of("bar") == [
        (3, 0, "Epoch 1/2", "step"),
        (1, 0, "Validation", "batch"),
        (3, 0, "Epoch 2/2", "step"),
        (1, 0, "Validation", "batch"),
    ]


def test_the_network_trains_in_training_mode_whatever_mode_it_was_left_in():
    modes = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    traval = make(*THREE_STEPS, model=model)
    model.eval()
    traval.train(0)
    traval.validation(0, report=False)
    assert modes == [True, True, True, False] and model.training


def names(recorder):
    return recorder.of("saved")


def test_the_best_the_due_and_the_final_epoch_are_saved_and_last_comes_last(results):
    results += [(50, 1.0), (50, 1.0), (60, 1.0), (90, math.nan), (55, 1.0)]
    traval, recorder, saver = watched(*THREE_STEPS, "--epochs", "5", "--save-every-epochs", "3")
    traval.fit()
    assert names(recorder) == [("best",), ("best", "last"), ("final", "last")]
    lines = [line for line, *_ in recorder.of("log") if "  validation " in line]
    assert [line.endswith("  best so far") for line in lines] == [True, False, True, False, False]
    assert (traval.progress.best_top1, traval.progress.best_epoch) == (60, 3)
    assert [(state["progress"]["epoch"], state["arch"]) for state in saver.states] == [(1, "fc"), (3, "fc"), (5, "fc")]
    before = [recorder.told[place - 1][0] for place, (told, _) in enumerate(recorder.told) if told == "saved"]
    assert before == ["flush"] * 3, "what a checkpoint relies on is on the disk first"


@pytest.mark.parametrize(
    ("max_steps", "tops", "saved", "best", "epoch"),
    [
        (2, [50], [("final", "best", "last")], (-1.0, 0), 0),  # of the first epoch a part: best.pt until it is whole
        (4, [50, 60], [("best", "last"), ("final", "last")], (50, 1), 1),
        (6, [50, 60], [("best", "last"), ("final", "best", "last")], (60, 2), 2),
    ],
)
def test_a_run_that_is_cut_saves_its_last_part_and_best_stays_with_whole_epochs(
    results, max_steps, tops, saved, best, epoch
):
    results += [(top1, 1.0) for top1 in tops]
    traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "9", "--max-steps", str(max_steps))
    traval.fit()
    assert names(recorder) == saved
    assert (traval.progress.best_top1, traval.progress.best_epoch) == best
    progress = traval.progress
    assert (progress.epoch, progress.step, progress.validated_step) == (epoch, max_steps, max_steps)


def test_within_an_epoch_every_so_many_steps_are_saved_with_all_that_they_have_seen():
    traval, recorder, saver = watched(*THREE_STEPS, "--epochs", "2", "--save-every-steps", "2")
    traval.fit()
    assert [state["progress"]["step"] for state in saver.states] == [2, 3, 4, 6]
    assert names(recorder)[0] == names(recorder)[2] == ("last",)
    within = saver.states[0]["progress"]
    assert (within["samples_seen"], within["epoch_sums"][3], within["step_in_epoch"]) == (960, 960, 2)
    assert [record.step for (records,) in recorder.of("curves") for record in records] == [1, 2, 3, 4, 5, 6]


def test_validation_alone_writes_and_saves_nothing():
    traval, recorder, _ = watched(*THREE_STEPS)
    traval.train(0)
    before = len(recorder.told)
    traval.validation(0, report=False)
    assert [told for told, _ in recorder.told[before:]] == ["bar"]


def test_what_is_saved_has_buffers_that_are_equal_on_all_ranks(monkeypatch):
    equalised = []
    monkeypatch.setattr(Distributed, "broadcast_buffers", lambda self, module: equalised.append(module))
    traval, _, saver = watched(*THREE_STEPS)
    traval.save("last")
    assert equalised == [traval.model] and len(saver.states) == 1


def test_curves_and_log_lines_come_every_print_freq_steps_and_at_the_epochs_end():
    traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "2", "--print-freq", "2")
    traval.fit()
    # The first step of all is read alone, for the line that says that it works.
    assert [[record.step for record in records] for (records,) in recorder.of("curves")] == [[1], [2], [3], [4], [5, 6]]
    points = [(step, values) for values, step in recorder.of("scalars")]
    assert [step for step, values in points if "Loss/Training" in values] == [2, 3, 4, 6]
    assert [step for step, values in points if "Loss/Test" in values] == [3, 6]


def test_the_first_training_batch_is_shown_once_as_pixels():
    traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "2")
    traval.fit()
    ((tag, images),) = recorder.of("images")
    assert tag == "First_Training_Batch" and images.shape[0] == 480
    assert images.min() == 0 and images.max() == 1


def test_a_part_of_an_epoch_that_is_trained_already_is_not_trained_again():
    traval, recorder, _ = watched(*THREE_STEPS, "--max-steps", "2")
    traval.train(0)
    before = parameters(traval.model)
    traval.train(0)
    assert traval.progress.step == 2
    assert all(torch.equal(*pair) for pair in zip(before, parameters(traval.model), strict=True))


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_the_next_step():
    traval, recorder, _ = watched(*THREE_STEPS, failed=True)
    with pytest.raises(UserError, match="the disk is full"):
        traval.fit()
    assert traval.progress.step == 1 and names(recorder) == []


def test_a_stop_signal_saves_last_at_the_next_step_and_the_message_says_after_which():
    signals = StopSignals()

    def arrives(loop):
        if loop.progress.step == 4:
            signals.received = SIGTERM

    hooks = Hooks(after_update=[arrives])
    traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "3", stop_signals=signals, hooks=hooks)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM after step 4 \(epoch 2\)"):
        traval.fit()
    assert names(recorder)[-1] == ("last",) and ("SIGTERM: saving",) in recorder.of("log")


def test_images_that_could_not_be_read_are_listed_again_by_a_run_that_goes_on():
    traval = make(*THREE_STEPS)
    for bad, listed in (([], []), (["/a.jpg", "/b.jpg"], [(["/a.jpg", "/b.jpg"],)])):
        traval.progress.bad_images = bad
        further, recorder, _ = watched(*THREE_STEPS)
        further.load_state(traval.state())
        assert recorder.of("bad_images") == listed


@pytest.mark.parametrize(
    ("flags", "static"),
    [((), True), (("--accumulate", "2", "--global-batch-size", "480"), False), (("--grad-penalty", "0.1"), False)],
)
def test_the_graph_is_static_for_ddp_where_every_backward_pass_is_alike(monkeypatch, flags, static):
    wrapped = []
    monkeypatch.setattr(Distributed, "wrap", lambda self, *arguments: wrapped.append(arguments) or arguments[0])
    traval = make("--arch", "fc", *flags)
    assert wrapped == [(traval.model, (1, 8, 8), static, traval.args.exchange)]


def test_compiling_is_in_place_and_only_where_asked_for(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda network, mode, **_: compiled.append((network, mode)))
    make("--arch", "fc")
    assert compiled == []
    traval = make("--arch", "fc", "--compile")
    assert compiled.pop() == (traval.model, "default")
    traval = make("--arch", "fc", "--compile", "--compile-mode", "reduce-overhead")
    assert compiled == [(traval.model, "reduce-overhead")]


def test_figures_are_the_same_if_each_pass_overwrites_the_output_of_the_one_before_as_cuda_graphs_do(monkeypatch):
    def compile_(network, mode, dynamic):
        outputs = []

        def call(images):
            for output in outputs:
                output.detach().fill_(torch.nan)
            outputs[:] = [network._call_impl(images)]
            return outputs[0]

        network._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", compile_)
    plain, compiled = (
        make("--arch", "fc", *flags) for flags in ((), ("--compile", "--compile-mode", "reduce-overhead"))
    )
    assert compiled.train(0) == plain.train(0)
    assert compiled.validation(0) == plain.validation(0)


@pytest.fixture
def bars(monkeypatch):
    """The bars that writers make, each with how often it was updated."""
    made = []
    real = Writer.bar

    @contextlib.contextmanager
    def bar(*arguments):
        with real(*arguments) as one:
            one.updates = 0
            one.update = lambda: setattr(one, "updates", one.updates + 1)
            made.append(one)
            yield one

    monkeypatch.setattr(Writer, "bar", bar)
    return made


def test_the_bar_counts_every_step_and_shows_each_window(bars, monkeypatch):
    traval, _, _ = watched(*THREE_STEPS, "--print-freq", "2")
    windows = []
    monkeypatch.setattr(traval.reporter, "window", lambda progress, bar: windows.append((progress.step, bar)))
    traval.train(0)
    assert [bar.updates for bar in bars] == [3] and windows == [(2, bars[0]), (3, None)]  # the rest has no bar left


@pytest.mark.parametrize("verb", ["train", "validation"])
def test_training_and_validation_each_find_their_own_pace_of_polling(verb, monkeypatch):
    """What was learned of one's pace must not make a rank wait for long in the other."""
    began = []
    traval, _, _ = watched(*THREE_STEPS)
    if verb == "validation":
        traval.train(0)
    monkeypatch.setattr(traval.consensus, "begin", lambda: began.append(verb))
    getattr(traval, verb)(0)
    assert began == [verb]


def test_log_lines_that_never_come_take_no_memory_and_any_room_gives_the_same_figures(monkeypatch):
    found = []
    for room in (1000, 2):
        monkeypatch.setattr(step_sums, "MOST_PENDING", room)
        traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "2", "--print-freq", "1000000000")
        assert traval.sums.meter.sums.shape[0] == room
        traval.fit()
        records = [record for (records,) in recorder.of("curves") for record in records]
        points = [
            (step, values["Loss/Training"]) for values, step in recorder.of("scalars") if "Loss/Training" in values
        ]
        (first, second) = ({**row, "seconds": 0, "images_per_second": 0} for (row,) in recorder.of("epoch"))
        found.append((records, points, first, second))
    assert found[0] == found[1] and [record.step for record in found[0][0]] == [1, 2, 3, 4, 5, 6]


def test_unreadable_images_of_steps_and_of_validation_are_counted_and_listed(tmp_path):
    traval, recorder, _ = watched(*THREE_STEPS, "--skip-bad-images")
    seen = str(tmp_path / "bad.jpg")
    readable = traval.train_loader.batches
    spoilt = (dataclasses.replace(batch, unreadable=(seen,), replaced=1) for batch in list(readable(0)))
    traval.train_loader.batches = lambda *_: spoilt
    traval.train(0)
    assert traval.progress.bad_images == [seen] and traval.progress.replaced_images == 3
    other = str(tmp_path / "worse.jpg")
    checked = list(traval.validation_loader.batches())
    traval.validation_loader.batches = lambda: iter([dataclasses.replace(one, unreadable=(other,)) for one in checked])
    traval.validation(0, report=False)
    assert traval.progress.bad_images == [seen, other]
    assert [paths for (paths,) in recorder.of("bad_images")] == [[seen], [seen, other]]


def test_gradients_are_added_up_until_the_last_pass_of_a_step(monkeypatch):
    traval, _, _ = watched("--arch", "fc", "--batch-size", "240", "--accumulate", "2", "--amp", "off")
    asked = []
    real = traval.distributed.no_sync

    def no_sync(network, *, more_to_come):
        asked.append((network is traval.network, more_to_come))
        return real(network, more_to_come=more_to_come)

    monkeypatch.setattr(traval.distributed, "no_sync", no_sync)
    traval.train(0)
    assert asked == [(True, True), (True, False)] * 3


@pytest.mark.parametrize("flags", [(), ("--deterministic",)])
def test_algorithms_are_timed_in_the_passes_of_training_alone(flags, monkeypatch):
    traval, *_ = watched("--arch", "fc", "--batch-size", "240", *flags)
    timed = {True: set(), False: set()}
    traval.model.register_forward_pre_hook(lambda model, _: timed[model.training].add(torch.backends.cudnn.benchmark))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    traval.train(0)
    traval.validation(0, report=False)
    assert timed == {True: {not flags}, False: {False}}
    assert not torch.backends.cudnn.benchmark


def test_where_only_compiled_code_overflows_the_log_says_so(monkeypatch):
    """The stand-in for it overflows in the step, and not when the step is repeated."""
    monkeypatch.setattr("utils.train_validation.compile_in_place", lambda *_: None)
    overflows = iter([torch.nan])

    def criterion(output, targets):
        return nn.functional.cross_entropy(output, targets) * next(overflows, 1.0)

    traval, *_ = watched(*THREE_STEPS, "--compile", criterion=criterion)
    with pytest.raises(
        TrainingFailure, match="nothing when the step was repeated uncompiled: perhaps it comes from --compile"
    ):
        traval.train(0)


def test_an_infinite_loss_with_finite_gradients_is_not_stepped_with():
    def criterion(output, targets):
        return nn.functional.cross_entropy(output, targets) + math.inf

    traval, *_ = watched(*THREE_STEPS, criterion=criterion)
    before = parameters(traval.model)
    with pytest.raises(TrainingFailure, match="; last.pt holds the state before this step$"):
        traval.train(0)
    assert all(torch.equal(old, new) for old, new in zip(before, parameters(traval.model), strict=True))


def test_a_steps_random_numbers_depend_on_its_position_and_not_on_what_was_drawn_before():
    def trained(drawn):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
        traval = make(*THREE_STEPS, model=model)
        torch.rand(drawn)
        traval.train(0)
        return parameters(traval.model)

    assert all(torch.equal(one, other) for one, other in zip(trained(0), trained(7), strict=True))


def test_every_second_epoch_is_validated_and_the_last_one_always(results):
    results += [(50, 1.0), (40, 1.0), (60, 1.0)]
    traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "5", "--val-every-epochs", "2")
    report = traval.fit()
    rows = [row for (row,) in recorder.of("epoch")]
    assert [row.get("val_top1") for row in rows] == [None, 50, None, 40, 60]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5] and all("train_loss" in row for row in rows)
    assert recorder.of("saved") == [("last",), ("best", "last"), ("last",), ("last",), ("final", "best", "last")]
    assert report.top1 == 60 and (traval.progress.best_epoch, traval.progress.best_top1) == (5, 60)
    assert sum("not validated" in line for line, *_ in recorder.of("log")) == 2


def test_an_epoch_that_ends_the_run_early_is_validated_too(results):
    results += [(50, 1.0), (40, 1.0)]
    flags = ("--epochs", "9", "--val-every-epochs", "2", "--early-stopping", "1")
    traval, recorder, _ = watched(*THREE_STEPS, *flags)
    traval.fit()
    assert [row.get("val_top1") for (row,) in recorder.of("epoch")] == [50, 40]
    results += [(50, 1.0)]
    cut, recorder, _ = watched(*THREE_STEPS, "--epochs", "9", "--val-every-epochs", "5", "--max-steps", "4")
    cut.fit()
    assert [row.get("val_top1") for (row,) in recorder.of("epoch")] == [None, 50]
