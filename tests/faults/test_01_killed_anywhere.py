"""A run killed anywhere and continued ends with the bits of one that was not, and the tool that shows it can fail."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from scripts.verification.processes import descendants, processes
from scripts.verification.runs import Timeline, moments
from tests.end_to_end.forked import train_with
from tests.end_to_end.processes import ROOT, curves, differences, points, rows, train

SECONDS = 300
# Several forward passes a step, a first loss scale that skips steps, a moving average, checkpoints within an epoch.
FLAGS = (
    "--device cpu --deterministic --arch fc --epochs 3 --amp fp16 --init-scale 1e9 --ema-decay 0.9 --print-freq 1 "
    "--no-progress"
).split()
STEPS_AN_EPOCH = 23


# ------------------------------------------------------------------------------------ random moments


def verify(*flags, root=ROOT):
    """The tool, started on the program in ``root``."""
    line = [sys.executable, str(root / "scripts/verify_resume.py"), *map(str, flags)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcome(process):
    """Its exit code and output."""
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def test_a_kill_at_a_random_moment_on_3_ranks_and_resume_auto_leave_the_same_bits_metrics_and_samples():
    flags = (*FLAGS, "--batch-size", 12, "--accumulate", 2, "--save-every-steps", 5)
    code, output = outcome(verify("--ranks", 3, "--kills", 1, *flags))
    assert code == 0, output
    assert output.splitlines()[-1] == "verdict: EQUAL after 1 kill on 3 rank(s)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_tool_when_it_is_stopped_takes_its_training_and_its_folder_along(tmp_path, monkeypatch, number):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tool = verify("--ranks", 2, *FLAGS)
    deadline = time.monotonic() + SECONDS
    while len(left := descendants(tool.pid)) < 3 and time.monotonic() < deadline:  # the launcher and both ranks
        time.sleep(0.05)
    assert len(left) >= 3
    tool.send_signal(number)
    code, output = outcome(tool)
    assert (code, output.splitlines()[-1]) == (130, "verify_resume.py: interrupted")
    table = processes()
    assert [pid for pid in left if pid in table and not table[pid].ended] == []
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ chosen points

POINTS = {
    "before the first step": "killall step step=1",
    "between two forward passes of a step": "killall forward step=30 pass=1",
    "before the update": "killall update step=31",
    "after the last step of an epoch": "killall after_step step=46",
    "in validation": "killall validation step=46 batch=3",
    "in the validation of the moving average": "killall validation step=46 batch=8",
    "at an epoch's end": "killall epoch_end epoch=2",
}


# Each of two processes validates 6 batches, and 6 more with the average. One process is killed while it saves in test_02.
POINT_FLAGS = (*FLAGS, *"--global-batch-size 64 --accumulate 2 --save-every-steps 4 --val-batch-size 30".split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of two processes that nothing happens to."""
    return train(*POINT_FLAGS, "--output", tmp_path_factory.mktemp("whole"), processes=2)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_each_kind_of_moment_and_resume_auto_leave_the_same_bits(whole, tmp_path, point):
    flags = (*POINT_FLAGS, "--output", tmp_path, "--resume", "auto")
    assert train_with(POINTS[point], *flags, processes=2) == -signal.SIGKILL
    resumed = train(*flags, processes=2)
    assert resumed.groups()[:-1] == whole.groups()[:-1]
    assert differences(whole["run"], resumed["run"]) == []
    for left in (rows, curves, points):
        assert left(whole["run"]) == left(resumed["run"])


# ------------------------------------------------------------------------ the tool notices what is forgotten

LOOP = "utils/train_validation.py"
OPTIMIZERS = "utils/optim/optimizers.py"
WRITER = "utils/record/writer.py"
CURVES = "utils/record/curves.py"
PROGRESS = 'Progress.from_state(state["progress"])'


def forget(place):
    """Progress restored without ``place``."""
    return LOOP, PROGRESS, PROGRESS.replace('"])', f'"] | {place})')


# What is not restored: the file, its text, the text instead, and what the tool must then say.
FORGOTTEN = {
    "model": (OPTIMIZERS, 'load_state_dict(model, state["model"])', "pass", r"final.pt: model/\S+: \d+ of"),
    "moving average": (LOOP, 'self.ema.load_state(state["ema"])', "pass", r"final.pt: ema/\S+: \d+ of"),
    "optimizer": (
        OPTIMIZERS,
        "optimizer.load_state_dict(with_own_kernels(optimizer, its_state))",
        "pass",
        r"final.pt: model/\S+: \d+ of",
    ),
    "scaler": (
        LOOP,
        'self.scaler.load_state_dict(state["scaler"])',
        "pass",
        r"TensorBoard: .*AMP/scale at step 51: \[1000000000.0\] instead",
    ),
    "position": (*forget('{"step_in_epoch": 0}'), r"samples and images: step 51 on rank 0: other samples or images"),
    "learning rate's position": (*forget('{"skipped_steps": 0}'), r"metrics.csv: row 3 lr: "),
    "running sums": (*forget('{"epoch_sums": [0.0] * 4}'), r"metrics.csv: row 3 train_loss: "),
    "curves": (CURVES, "rows[rows[:, 0] <= steps]", "rows[:0]", r"metrics.npz: .*\(19,\).* instead of .*\(69,\)"),
    "rows": (WRITER, 'if int(row["epoch"]) <= epochs]', "if False]", r"metrics.csv: row 1 epoch: 3 instead of 1"),
    "TensorBoard's last step": (
        WRITER,
        "rewind(folder, steps)",
        "set()",
        r"TensorBoard: \S+ at step 5\d: \[.*, .*\] instead",
    ),
}
# Some can be told apart in one run.
TOGETHER = (
    (("model",), ("optimizer",)),
    (("scaler", "position", "rows"), ("learning rate's position", "curves")),
    (("moving average", "running sums", "TensorBoard's last step"),),
)
KILL_FLAGS = (*FLAGS, *"--batch-size 16 --accumulate 4 --save-every-steps 25 --save-every-epochs 10".split())


def seed_for(steps):
    """A --kill-seed whose only kill comes shortly after one of ``steps``."""
    even = Timeline(1.0, [float(step) for step in range(3 * STEPS_AN_EPOCH)], 3.0 * STEPS_AN_EPOCH)
    for seed in range(10**5):
        step, delay = next(moments(even, 1, random.Random(seed)))
        if step in steps and delay < 0.02:
            return seed
    raise AssertionError


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A straight run of KILL_FLAGS to compare with; the tool has found the program without a fault to be equal."""
    kept = tmp_path_factory.mktemp("straight") / "kept"
    code, output = outcome(verify("--keep", kept, "--kills", 1, "--kill-seed", seed_for(range(5, 60)), *KILL_FLAGS))
    assert code == 0, output
    assert output.splitlines()[-1] == "verdict: EQUAL after 1 kill on 1 rank(s)"
    return kept


def mutant(folder, parts):
    """A copy of the program that forgets ``parts`` when it continues a run."""
    for name in ("models", "utils", "scripts", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("components.py", "main.py"):
        shutil.copy(ROOT / name, folder)
    for file, text, instead, _ in (FORGOTTEN[part] for part in parts):
        source = (folder / file).read_text()
        assert source.count(text) == 1, f"{file} no longer holds {text!r} once"
        (folder / file).write_text(source.replace(text, instead))
    return folder


@pytest.mark.parametrize(
    "groups", [*(pytest.param(groups, marks=pytest.mark.thorough) for groups in TOGETHER[:-1]), TOGETHER[-1]], ids=str
)
def test_the_tool_says_different_and_what_differs_when_a_resume_forgets_something(straight, tmp_path, groups):
    # The kill and the checkpoint before it, that of step 50, come in the third epoch.
    flags = ("--straight-from", straight, "--kills", 1, "--kill-seed", seed_for(range(53, 57)), *KILL_FLAGS)
    start = partial(verify, *flags)
    tools = [start(root=mutant(tmp_path / str(number), parts)) for number, parts in enumerate(groups)]
    for parts, (code, output) in zip(groups, list(map(outcome, tools)), strict=True):
        assert code == 1, output
        assert output.splitlines()[-1].startswith("verdict: DIFFERENT: "), output
        for part in parts:
            assert re.search(FORGOTTEN[part][-1], output), f"{part}: {output}"


def test_every_part_is_forgotten_once():
    assert sorted(part for groups in TOGETHER for parts in groups for part in parts) == sorted(FORGOTTEN)
    for file, text, _, _ in FORGOTTEN.values():  # here too, since most are forgotten in thorough tests alone
        assert (ROOT / file).read_text().count(text) == 1, f"{file} no longer holds {text!r} once"
