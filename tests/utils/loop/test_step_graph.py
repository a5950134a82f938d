"""Steps as graphs: recorded on a CPU by a stand-in, they give the bits of steps that are launched as they are."""

from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers import equal
from tests.utils.loop.test_between_steps import watched
from tests.utils.loop.test_late_verdict import BATCHES, CASES, FP16, SHORT, SKIPPED_IN_SHORT, Net, told_of
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.loop import step_graph, verdict
from utils.loop.hooks import Hooks
from utils.optim import held
from utils.optim.freezing import build_freezing
from utils.train_validation import TrainingFailure


class Tape(TorchDispatchMode):
    """Does on a CPU what a CUDA graph does: the same operations, on the same memory, and no read by the host."""

    def record(self, function):
        self.operations = []
        with self:
            return function()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "equal"), (
            f"a read: {function}"
        )
        made = function(*args, **(kwargs or {}))
        is_view = all(value.alias_info and not value.alias_info.is_write for value in function._schema.returns)
        if function.namespace != "profiler" and not (is_view and function._schema.returns):
            self.operations.append((function, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, made in self.operations:
            for before, now in zip(tree_leaves(made), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(now, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


@pytest.fixture
def recording(monkeypatch):
    """Steps are recorded as on a GPU; gives the tapes that are made."""
    tapes = []

    class Counted(Tape):
        def __init__(self):
            super().__init__()
            self.replayed = 0
            tapes.append(self)

        def replay(self):
            self.replayed += 1
            super().replay()

    choose = held.held
    monkeypatch.setattr(verdict, "held", lambda optimizer, _: choose(optimizer, torch.device("cuda")))
    monkeypatch.setattr(step_graph, "CudaGraph", Counted)

    def on_a_gpu(decide):
        def decided(step, *reason):
            step.device = torch.device("cuda")
            try:
                return decide(step, *reason)
            finally:
                step.device = torch.device("cpu")

        return decided

    for name in ("reason_against", "go_without"):
        monkeypatch.setattr(step_graph, name, on_a_gpu(getattr(step_graph, name)))
    return tapes


def spoil_images(traval, bad, value):
    """Fill the first image of the steps ``bad``, counted from 0 over all epochs, with ``value``, also when repeated."""
    loader = traval.train_loader
    batches, replay = loader.batches, loader.replay_step

    def spoiled(epoch, batch):
        if epoch * loader.steps_per_epoch + batch.number in bad:
            batch.images[0] = value
        return batch

    loader.batches = lambda epoch, first=0: (spoiled(epoch, batch) for batch in batches(epoch, first))
    loader.replay_step = lambda epoch, step: [spoiled(epoch, batch) for batch in replay(epoch, step)]


class Certain(Net):
    """Draws no random numbers."""

    def __init__(self):
        super().__init__()
        self.apply(lambda layer: setattr(layer, "p", 0.0) if isinstance(layer, torch.nn.Dropout) else None)


class Marked(Net):
    """Where an image holds 100, the gradient of ``mark`` overflows, and no other."""

    def __init__(self):
        super().__init__()
        self.mark = torch.nn.Parameter(torch.zeros(10))

    def forward(self, images):
        return super().forward(images) + self.mark * torch.where(images.amax() > 50, 3e38, 0.0) * 1e6


def built(flags, graph, bad=(), kind=Net, value=torch.inf):
    torch.manual_seed(0)
    model = Certain() if "--sam-rho" in flags else kind()  # SAM's second pass is recorded only if it draws nothing
    freezing = build_freezing(parse(flags.split()).model, model)
    traval, _, saver = watched(*flags.split(), "--cuda-graph", graph, model=model, freezing=freezing)
    spoil_images(traval, bad, value)
    return traval, saver


def loops(*arguments):
    """Two loops with learning rates on the device: one as it is, and one as graphs."""
    plain, graphs = (built(arguments[0], graph, *arguments[1:])[0] for graph in ("off", "auto"))
    for own in plain.active:  # a rate on the device is a float32; a number of the host is not
        if own.can_be_recorded:
            own.rates_on_device()
    plain.launcher = WithRates(plain)
    return plain, graphs


def plain_and_graphs(*arguments):
    """The ``loops``, which have trained through to the same state, log and curves."""
    plain, graphs = loops(*arguments)
    plain.fit()
    graphs.fit()
    for name, value in plain.state().items():
        if name != "progress":
            assert equal(graphs.state()[name], value), name
    assert told_of(graphs) == told_of(plain) and curves(graphs) == curves(plain)
    return plain, graphs


@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_bit_and_no_word(case, recording):
    """An epoch's last step is smaller and launched as it is, so it comes between recorded ones."""
    flags = f"{SHORT} {CASES[case]}"
    _, graphs = plain_and_graphs(flags, SKIPPED_IN_SHORT)
    assert graphs.progress.skipped_steps == len(SKIPPED_IN_SHORT)
    # The case muon has filters for AdamW.
    whole = case in ("sgd", "adamw", "muon-sgd", "accumulation", "sharpness-aware")
    replayed = [tape.replayed for tape in recording]
    assert len(replayed) == 1 + whole, "one for the passes, and one for the update unless it counts steps on the host"
    assert min(replayed) >= 5, "of 14 steps, 3 come before, one records, and 2 are ragged"


@pytest.mark.parametrize("optimizer", ["muon", "muon-sgd"])
def test_of_two_optimizers_a_graph_holds_each_on_its_own(optimizer, recording):
    flags = f"{SHORT} --optimizer {optimizer} --ema-decay 0.9"
    _, graphs = plain_and_graphs(flags, (3, 5, 8, 11), Marked, 100.0)
    assert (graphs.progress.partly_skipped_steps, graphs.progress.skipped_steps) == (4, 0)
    assert all("not finite: gradient of mark" in line for line in told_of(graphs)) and len(told_of(graphs)) == 4


def test_an_update_in_which_the_host_reads_one_of_the_flags_is_launched_as_it_is(recording, monkeypatch):
    monkeypatch.setattr(held, "READ_BY_HOST", ("SGD",))
    _, graphs = plain_and_graphs(f"{SHORT} {CASES['muon-sgd']}", SKIPPED_IN_SHORT)
    assert sorted(own.reads_flag for own in graphs.active) == [False, True]
    (passes,) = recording
    assert passes.replayed >= 5


def test_other_parameters_that_train_are_recorded_anew(recording):
    _, graphs = plain_and_graphs(f"{BATCHES} {FP16} --freeze features --freeze-epoch 1", (5, 17))
    assert not graphs.model.features[0].weight.requires_grad
    assert len(recording) == 4 and all(tape.replayed >= 6 for tape in recording)


def test_a_number_of_the_optimizer_that_a_program_changes_is_recorded_anew(recording):
    plain, graphs = loops(f"{BATCHES} {FP16}")
    for traval in (plain, graphs):
        for epoch, decay in enumerate((0.0, 0.5)):
            traval.optimizers[0].param_groups[0]["weight_decay"] = decay
            traval.train(epoch)
            traval.progress.finish_epoch()
    assert equal(graphs.state()["model"], plain.state()["model"])
    assert len(recording) == 4 and all(tape.replayed >= 6 for tape in recording)


def test_a_hook_may_change_a_number_between_the_passes_and_the_update(recording):
    plain, graphs = loops(f"{BATCHES} {FP16}")

    def change(loop, _):
        loop.optimizers[0].param_groups[0]["weight_decay"] = 0.5 if loop.progress.step >= 9 else 0.0

    for traval in (plain, graphs):
        traval.hooks.before_update.append(change)
        traval.fit()
    assert equal(graphs.state()["model"], plain.state()["model"])
    assert len(recording) == 4 and all(tape.replayed >= 2 for tape in recording)


def test_where_a_number_changes_at_each_step_the_log_says_that_nothing_is_recorded(recording):
    traval, _ = built(f"{BATCHES} {FP16}", "auto")
    (group,) = traval.optimizers[0].param_groups
    traval.hooks.before_update.append(lambda loop, _: group.update(weight_decay=1e-4 * loop.progress.step))
    traval.fit()
    assert recording == []
    assert any("the optimizers' numbers change too often" in line for (line, *_) in traval.writer.of("log"))


def curves(traval):
    """The rows of all steps: loss, top-1, top-5, learning rate, gradient norm and loss scale; NaN as text."""
    return [str(row) for (rows,) in traval.writer.of("curves") for row in rows]


class WithRates:
    """Launches steps as they are, with learning rates on the device."""

    def __init__(self, step):
        self.step = step
        self.launch_passes = step.launch_passes

    def launch_update(self, gradient):
        for own in self.step.active:
            if own.can_be_recorded:
                own.send_rates()
        return self.step.launch_update(gradient)


def saved_after_every_step(*arguments):
    """A run as graphs that is asked to save after every step, as a signal asks, and what it saved first after each."""
    traval, saver = built(*arguments)
    traval.stop_if_requested = lambda: traval.save_now("last")
    traval.fit()
    states = {state["progress"]["step"]: state for state in reversed(saver.states)}
    return [states[step] for step in sorted(states)]


def resumed_ends_alike(flags, bad, *arguments, after=range(1, 25)):
    """Resumed after each of these steps; after the last one of an epoch its validation is still to come."""
    plain, _ = plain_and_graphs(flags, bad, *arguments)
    for last, state in enumerate(saved_after_every_step(flags, "auto", bad, *arguments), start=1):
        if last not in after:
            continue
        resumed, _ = built(flags, "auto", bad, *arguments)
        resumed.load_state(state)
        resumed.fit()
        assert equal(resumed.state(), plain.state()), last
        assert told_of(resumed) == told_of(plain)[sum(step < last for step in bad) :]
        assert curves(resumed) == curves(plain)[last:]
    assert last == plain.progress.step


def test_a_run_that_is_resumed_after_a_step_is_recorded_anew_and_ends_with_the_same_bits(recording):
    six_an_epoch = "--batch-size 16"
    flags = f"{BATCHES} {FP16} {CASES['sgd']} {six_an_epoch}"
    resumed_ends_alike(flags, (0, 3, 5, 6, 8, 11), after=(1, 4, 6, 10))


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_so_is_any_run_after_any_step(case, recording):
    # Not finite: the first, the one that a graph records, some, a row over an epoch's end, the last.
    resumed_ends_alike(f"{BATCHES} {FP16} {CASES[case]}", (0, 3, 4, 7, 9, 10, 11, 12, 23))


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["muon", "muon-sgd"])
def test_so_is_one_whose_two_optimizers_skip_other_steps(optimizer, recording):
    flags = f"{BATCHES} {FP16} --optimizer {optimizer} --ema-decay 0.9"
    resumed_ends_alike(flags, (3, 5, 8, 11, 12, 14), Marked, 100.0)


def test_without_a_scaler_a_graphs_step_that_is_not_finite_leaves_the_state_before_it(recording):
    flags = f"{BATCHES} --amp bf16 --ema-decay 0.9"
    before, saved_before = built(f"{flags} --max-steps 8", "auto")
    before.train(0)
    before.save_now("last")
    traval, saver = built(flags, "auto", (8,))
    with pytest.raises(TrainingFailure, match="at step 9 "):
        traval.fit()
    state, expected = saver.states[-1], saved_before.states[-1]
    assert all(equal(state[name], expected[name]) for name in ("model", "ema"))
    assert equal(state["optimizer"]["state"], expected["optimizer"]["state"]) and state["progress"]["step"] == 8


def test_a_checkpoint_holds_learning_rates_as_numbers(recording):
    traval, _ = built(BATCHES, "auto")
    traval.train(0)
    (group,) = traval.state()["optimizer"]["param_groups"]
    assert type(group["lr"]) is float


REFUSED = {
    "--compile --compile-mode reduce-overhead": "--compile-mode reduce-overhead records graphs of its own",
    "--compile --compile-mode max-autotune": "--compile-mode max-autotune records graphs of its own",
    "--grad-checkpointing --arch timm/test_resnet --image-size 32": "--grad-checkpointing restores random numbers",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_where_no_graph_can_stand_for_a_step_the_log_says_why(flags, recording, monkeypatch):
    monkeypatch.setattr("utils.train_validation.compile_in_place", lambda *_: None)  # which imports for seconds
    traval, *_ = watched(*flags.split(), "--cuda-graph", "auto", model=Net())
    lines = [line for (line, *_) in traval.writer.of("log") if REFUSED[flags] in line]
    assert traval.launcher is traval and len(lines) == 1
    assert lines[0].startswith("--cuda-graph auto: steps are launched one operation at a time: ")


def test_hooks_on_passes_and_a_cpu_are_reasons_too(recording, monkeypatch):
    hooks = Hooks(after_backward=[lambda *_: None])
    traval, *_ = watched("--cuda-graph", "auto", model=Net(), hooks=hooks)
    assert step_graph.reason_against(traval) == "hooks look at the passes"
    monkeypatch.undo()
    assert step_graph.reason_against(traval) == "there is no GPU"


def test_a_network_is_compiled_in_the_steps_that_are_watched_and_not_while_one_is_recorded():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    doubled = torch.compile(lambda images: 2 * images, backend=backend)
    with step_graph.Operations(set()):
        doubled(torch.ones(3))
    assert len(compiled) == 1


def test_sharpness_aware_steps_that_draw_random_numbers_are_not_recorded(recording):
    traval, recorder, _ = watched(*BATCHES.split(), "--sam-rho", "0.05", "--cuda-graph", "auto", model=Net())
    traval.train(0)
    (line,) = [line for (line, *_) in recorder.of("log") if "--cuda-graph" in line]
    assert "--sam-rho seeds the second pass on the host, for aten." in line
    assert recording == []


class Counting(Net):
    """Computes with a number of the host, which a graph would leave as it was."""

    calls = 0

    def forward(self, images):
        self.calls += 1
        return super().forward(images) * (1 + 0.01 * self.calls)


def test_steps_that_do_not_launch_the_same_are_not_recorded(recording):
    traval, recorder, _ = watched(*BATCHES.split(), "--cuda-graph", "auto", model=Counting())
    traval.train(0)
    (line,) = [line for (line, *_) in recorder.of("log") if "--cuda-graph" in line]
    assert "two of them differ, aten.mul.Tensor((8, 10), 1.02) and aten.mul.Tensor((8, 10), 1.03)" in line
    assert recording == []


def failing(traval, part):
    """A class of graphs that cannot record ``part`` of a step of ``traval``.

    As on a GPU, what was launched meanwhile has not been executed, and what the host has done is done.
    """

    class Failing(Tape):
        made = 0

        def record(self, function):
            Failing.made += 1
            if Failing.made != 1 + (part == "update"):
                return super().record(function)
            state = (traval.model.state_dict(), [own.state_dict() for own in traval.optimizers], traval.scaler._scale)
            kept = [(tensor, tensor.clone()) for tensor in tree_leaves(state) if isinstance(tensor, torch.Tensor)]
            with mock.patch.object(traval.scaler, "update", side_effect=InterruptedError), suppress(InterruptedError):
                function()
            for tensor, before in kept:
                tensor.detach().copy_(before)
            raise step_graph.NotRecorded("operation not permitted when stream is capturing")

    return Failing


@pytest.mark.parametrize("part", ["passes", "update"])
def test_what_cannot_be_recorded_is_launched_as_it_is_and_no_bit_changes(part, recording, monkeypatch):
    flags = f"{BATCHES} {FP16} --ema-decay 0.9 --max-skipped-steps 9 --epochs 1"
    whole, _ = built(flags, "auto", (2, 5, 8))
    whole.fit()
    traval, _ = built(flags, "auto", (2, 5, 8))
    monkeypatch.setattr(step_graph, "CudaGraph", failing(traval, part))
    traval.fit()
    assert all(equal(traval.state()[name], value) for name, value in whole.state().items() if name != "progress")
    assert told_of(traval) == told_of(whole) and curves(traval) == curves(whole)
    (line,) = [line for (line, *_) in traval.writer.of("log") if "--cuda-graph" in line]
    assert line.endswith("cannot be recorded: operation not permitted when stream is capturing")
    with pytest.raises(UserError, match="--cuda-graph on: .* not permitted when stream is capturing; auto launches"):
        insisting, _ = built(flags, "on")
        monkeypatch.setattr(step_graph, "CudaGraph", failing(insisting, part))
        insisting.fit()


def test_a_graph_shares_the_memory_of_one_that_lives_and_of_no_other(monkeypatch):
    class Graph:
        def pool(self):
            return self.its_pool

        def replay(self):
            pass

    @contextmanager
    def capture(graph, pool, **_):
        graph.its_pool = pool
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)

    def pool_of(graph):
        assert graph.record(lambda: 3) == 3
        return graph._graph.pool()

    passes, update = step_graph.CudaGraph(), step_graph.CudaGraph()
    first = pool_of(passes)
    assert pool_of(update) is first
    del passes, update
    assert pool_of(step_graph.CudaGraph()) is not first


def test_a_fused_adam_may_be_recorded_and_no_other_step_and_no_checkpoint_differs(monkeypatch):
    seen = []

    class Watched(torch.optim.AdamW):
        def step(self):
            seen.append([group["capturable"] for group in self.param_groups])

    own = held.HeldByKernel(Watched([torch.nn.Parameter(torch.ones(2))]))
    own.found_inf = mock.Mock(is_cuda=True)
    for recording in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda value=recording: value)
        own.step()
    assert seen == [[False], [True]]
    assert own.param_groups[0]["capturable"] is False
