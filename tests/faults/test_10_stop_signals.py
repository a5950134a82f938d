"""Row 10: SIGTERM and SIGUSR1 end a run on all ranks at the same step, with one checkpoint that loses nothing."""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from main import main
from tests.end_to_end.forked import ROOT, Forked, train_with
from tests.end_to_end.processes import FINAL_LINE, curves, differences, load, points, rows, train
from tests.helpers import QUIETLY, trained, wait_for
from utils.checkpoint import checkpoint
from utils.loop.hooks import Hooks
from utils.loop.stop_signals import INTERRUPTED, TRY_AGAIN, StopConsensus, StoppedAtOnce, StopSignals

FLAGS = (
    "--deterministic --arch fc --epochs 2 --ema-decay 0.9 --amp fp16 --init-scale 1e7 --train-samples 720 --accumulate 2 "
    "--batch-size 32 --print-freq 10 --picture-epochs off --no-progress"
).split()
STOPPED = re.compile(
    r"Run \S+ stopped by (?P<signal>\w+) after step (?P<step>\d+) \(epoch \d+\); --resume auto continues"
)


def in_process(capsys, *flags, hooks=None):
    """Exit code and stdout of a run in this process."""
    code = main(["--device", "cpu", *map(str, flags)], hooks=hooks)
    return code, capsys.readouterr().out


def same(run, other):
    """All that two runs leave is equal: checkpoint, rows, per-step curves, TensorBoard points, each step once."""
    assert differences(run, other) == []
    assert rows(run) == rows(other)
    assert curves(run) == curves(other)
    left = points(run)
    right = points(other)
    assert all(len(values) == len(dict(values)) for values in right.values())
    # A stop within a window of the log adds no point and takes none away.
    assert left == right


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    return trained(tmp_path_factory.mktemp("whole"), *FLAGS)


def sending_at(call, numbers, function=lambda *_: None):
    """``function``, whose ``call``-th call first sends this process the signals ``numbers``."""
    calls = iter(range(1, 10**6))

    def called(*arguments):
        if next(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return function(*arguments)

    return called


# Each: a point of training, at which of its calls the signals come, and the step after which the run must stop.
MOMENTS = {
    "within a step": ("before_forward", 41, (signal.SIGUSR1,), None),  # steps that are skipped repeat their passes
    "at the last step of an epoch": ("before_update", 12, (signal.SIGTERM,), 12),
    "in the average's validation": ("before_validation_batch", 12 + 8, (signal.SIGTERM,), 12),
    "while saving": ("sha256", 2, (signal.SIGUSR1,), None),
    "in an update, both": ("before_update", 16, (signal.SIGUSR1, signal.SIGTERM), 16),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_leaves_one_checkpoint_from_which_the_run_ends_as_if_never_stopped(
    moment, whole, tmp_path, capsys, monkeypatch
):
    point, call, numbers, step = MOMENTS[moment]
    hooks = Hooks()
    with monkeypatch.context() as patches:
        if point == "sha256":  # of the file being written
            patches.setattr(checkpoint, point, sending_at(call, numbers, checkpoint.sha256))
        else:
            getattr(hooks, point).append(sending_at(call, numbers))
        code, out = in_process(capsys, *FLAGS, "--output", tmp_path, hooks=hooks)
    assert code == TRY_AGAIN == 75
    stopped = STOPPED.fullmatch(out.splitlines()[-1])
    assert stopped["signal"] == numbers[0].name and (step is None or int(stopped["step"]) == step)
    (run,) = tmp_path.glob("digits/fc/*")
    assert load(run, "last.pt")["progress"]["step"] == int(stopped["step"])
    code, out = in_process(capsys, *FLAGS, "--output", tmp_path, "--resume", "auto")
    assert code == 0 and FINAL_LINE.fullmatch(out.splitlines()[-1])["run"] == str(run)
    same(whole, run)


def test_a_run_that_max_steps_cuts_is_finished_only_when_its_last_step_is_validated_and_saved(tmp_path, capsys):
    flags = (*FLAGS, "--max-steps", 15, "--save-every-steps", 4)
    code, out = in_process(capsys, *flags, "--output", tmp_path / "whole")
    (whole,) = tmp_path.glob("whole/digits/fc/*")
    result = FINAL_LINE.fullmatch(out.splitlines()[-1])
    resumed = (*flags, "--output", tmp_path / "cut", "--resume", "auto")
    # Stopped before the validation, in it, killed in the last save: each time the last step has been taken.
    for fault, code in (
        ("term after_step step=15", TRY_AGAIN),
        ("term validation epoch=2 batch=2", TRY_AGAIN),
        ("kill rename name=final when=after", -signal.SIGKILL),
    ):
        assert train_with(fault, *resumed) == code
        (run,) = tmp_path.glob("cut/digits/fc/*")
        assert load(run, "last.pt")["progress"]["step"] == 15
    for _ in range(2):  # the second one is told that nothing is left to do
        code, out = in_process(capsys, *resumed)
        again = FINAL_LINE.fullmatch(out.splitlines()[-1])
        assert code == 0 and again.groups()[:-1] == result.groups()[:-1] and again["run"] == str(run)
        same(whole, run)
    assert "is finished: 1 epoch, 15 steps" in out


LATE_SIGNALS = """
import os, signal, sys
sys.path.insert(0, {root!r})
import main
from utils.loop.stop_signals import StopSignals
code = main.main(sys.argv[1:], ends_process=True)
for number in StopSignals.HANDLED:
    os.kill(os.getpid(), number)
main.end_process(code)
"""


def test_signals_that_come_when_all_is_said_do_not_change_the_exit_code(tmp_path):
    """The interpreter takes up to seconds to end, in which a signal would kill it."""
    program = tmp_path / "program.py"
    program.write_text(LATE_SIGNALS.format(root=str(ROOT)))
    run = Forked(*FLAGS, "--max-steps", 2, "--output", tmp_path / "runs", program=program)
    printed = run.communicate()
    assert run.returncode == 0 and FINAL_LINE.fullmatch(printed[0].splitlines()[-1]), printed


def test_of_several_signals_after_training_the_first_counts():
    with StopSignals() as signals:
        with pytest.raises(StoppedAtOnce):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # while the end is under way
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGTERM
    with StopSignals() as signals:
        with signals.held():
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # it has saved and says so
        assert signals.received == signal.SIGUSR1


def test_a_process_in_the_background_goes_on_ignoring_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as signals, signals.held():
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert signals.received == 0


def test_ctrl_c_saves_too_and_a_second_one_does_not_wait(tmp_path, capsys):
    hooks = Hooks(before_update=[sending_at(16, (signal.SIGINT,))])
    code, out = in_process(capsys, *FLAGS, "--output", tmp_path, hooks=hooks)
    assert code == INTERRUPTED and "stopped by SIGINT after step 16" in out
    with StopSignals() as signals, signals.held(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_training_ends_at_once_with_the_same_code_and_a_line(number, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("utils.data.datasets.get_data", lambda *_: os.kill(os.getpid(), number))
    code = main(["--device", "cpu", *map(str, FLAGS), "--output", str(tmp_path)])
    output = capsys.readouterr()
    assert code == TRY_AGAIN and list(tmp_path.iterdir()) == [] and output.out == ""
    assert output.err == f"main.py: stopped by {number.name} before or after training; --resume auto continues\n"


# ------------------------------------------------------------------------------------ several ranks


class Rank:
    """What a ``StopConsensus`` needs of ``Distributed``, for two ranks that are threads with clocks of their own."""

    world_size = 2

    def __init__(self, number, together, said):
        self.number = number
        self.together = together
        self.said = said

    def all_reduce_max(self, numbers):
        self.said[self.number] = numbers
        self.together.wait(20)
        found = [max(column) for column in zip(*self.said, strict=True)]
        self.together.wait(20)
        return found


def test_ranks_ask_each_other_at_the_same_calls_and_about_twice_a_second(monkeypatch):
    clock = threading.local()
    together = threading.Barrier(2)
    said = [None, None]
    monkeypatch.setattr("utils.loop.stop_signals.monotonic", lambda: clock.now)

    def live(number, seconds_a_call, signalled_at):
        clock.now = 0.0
        signals = StopSignals()
        exchanges = []
        heard = None
        consensus = StopConsensus(Rank(number, together, said), signals)
        for call in range(1, 2001):
            clock.now += seconds_a_call
            if call == signalled_at:
                with signals.held():
                    signals._note(signal.SIGUSR1, None)
            before = consensus._asked
            number_heard, _ = consensus.poll()
            if consensus._asked != before:
                exchanges.append(call)
            if number_heard and heard is None:
                heard = call, number_heard
        return exchanges, heard

    with ThreadPoolExecutor(2) as pool:
        fast = pool.submit(live, 0, 0.01, None)
        slow = pool.submit(live, 1, 0.02, 1000)
        exchanges, heard = fast.result()
        assert (exchanges, heard) == slow.result()  # in any other case one would wait for the other for ever
    assert len(exchanges) == pytest.approx(2000 * 0.02 / 0.5, rel=0.2)  # by the slowest one's clock
    assert 1000 <= heard[0] <= 1000 + 0.5 / 0.02 and heard[1] == signal.SIGUSR1


def test_all_ranks_stop_at_the_step_at_which_one_of_them_is_told_to_and_go_on(tmp_path):
    flags = "--deterministic --arch fc --epochs 60 --global-batch-size 96 --save-every-epochs 1000".split()
    flags = (*QUIETLY, *flags, "--output", tmp_path, "--resume", "auto")
    process = Forked(*flags, processes=2)
    wait_for(lambda: list(tmp_path.glob("digits/fc/*/checkpoints/best.pt")), 120)
    os.kill(process.ranks[-1].pid, signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    (line,) = [line for line in out.splitlines() if " stopped by " in line]
    assert process.returncode == TRY_AGAIN
    (run,) = tmp_path.glob("digits/fc/*")
    step = load(run, "last.pt")["progress"]["step"]
    assert step == int(STOPPED.fullmatch(line)["step"])
    assert "main.py: " not in err  # no rank had to be told of it by a broken connection
    assert train(*flags, "--max-steps", step + 3, processes=2)["run"] == str(run)
