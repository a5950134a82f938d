"""A run killed anywhere and continued ends with the bits of one that was not, and the tool that shows it can fail."""

import re
import shutil
import signal
import subprocess
import sys

import pytest

from scripts import verify_resume
from scripts.verification import runs
from scripts.verification.processes import descendants, processes
from tests.end_to_end.forked import Launched, train_with
from tests.end_to_end.processes import ROOT, curves, differences, points, rows, train
from tests.helpers import wait_for

# Several forward passes a step, a first loss scale that skips steps, a moving average, checkpoints within an epoch.
FLAGS = (
    "--device cpu --deterministic --arch fc --train-samples 720 --epochs 3 --amp fp16 --init-scale 1e6 --ema-decay 0.9 "
    "--print-freq 1 --picture-epochs off --no-progress"
).split()

# ------------------------------------------------------------------------------------ random moments

RANKS = ("--ranks", "2", "--kills", "1")
KILL_FLAGS = (*RANKS, *FLAGS, *"--batch-size 16 --accumulate 2 --save-every-steps 13 --save-every-epochs 10".split())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The tool's straight run, the last line that it printed, and its exit code."""
    taken = []
    with pytest.MonkeyPatch.context() as patches:
        run_straight = verify_resume.run_straight
        patches.setattr(verify_resume, "run_straight", lambda *args: taken.append(run_straight(*args)) or taken[0])
        code, output = verified("--keep", tmp_path_factory.mktemp("straight") / "kept", *KILL_FLAGS)
    return taken[0], output.splitlines()[-1], code


def verified(*flags):
    """The exit code and output of the tool, whose trainings are forked; it begins them itself where it is stopped."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(subprocess, "Popen", Launched)
        lines = []
        patches.setattr(verify_resume, "log", lines.append)
        return verify_resume.main([*map(str, flags)]), "\n".join(lines)


def test_a_kill_at_a_random_moment_and_resume_auto_leave_the_same_bits_metrics_and_samples(straight):
    assert straight[1:] == ("verdict: EQUAL after 1 kill on 2 rank(s)", 0)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.thorough),
        (signal.SIGHUP, 143, "ended by SIGTERM"),  # which it is taken for
    ],
)
def test_the_tool_when_it_is_stopped_takes_its_training_and_its_folder_along(tmp_path, monkeypatch, number, code, said):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    hears = ["env", "--default-signal"]  # what nohup starts would ignore SIGHUP
    line = [*hears, sys.executable, str(ROOT / "scripts/verify_resume.py"), *RANKS, *FLAGS]
    tool = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    left = wait_for(lambda: len(found := descendants(tool.pid)) >= 3 and found)  # the launcher and both ranks
    tool.send_signal(number)
    output, _ = tool.communicate(timeout=60)
    assert tool.returncode == code and output.splitlines()[-1].startswith(f"verify_resume.py: {said}")
    assert not left & processes().keys()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ chosen points

# Runs of one process: test_02 kills in the first save and at an epoch's end, test_10 stops in the average's validation.
POINTS = [
    pytest.param("kill step step=1", id="before the first step", marks=pytest.mark.thorough),
    pytest.param("kill forward step=15 pass=1", id="between two forward passes of a step"),
    pytest.param("kill after_step step=11", id="after the last step of an epoch", marks=pytest.mark.thorough),
    pytest.param(
        "kill validation step=11 batch=6", id="in the validation of the moving average", marks=pytest.mark.thorough
    ),
    pytest.param("kill epoch_end epoch=1", id="at an epoch's end", marks=pytest.mark.thorough),
]

# Each of three processes validates 4 batches, and 4 more with the average; with two, a sum has one order alone.
POINT_FLAGS = "--epochs 2 --global-batch-size 66 --accumulate 2 --save-every-steps 4 --val-batch-size 30".split()
POINT_FLAGS = (*FLAGS, *POINT_FLAGS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of three processes that nothing happens to."""
    return train(*POINT_FLAGS, "--output", tmp_path_factory.mktemp("whole"), processes=3)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_each_kind_of_moment_and_resume_auto_leave_the_same_bits(whole, tmp_path, point):
    flags = (*POINT_FLAGS, "--output", tmp_path, "--resume", "auto")
    assert train_with(point, *flags, processes=3) == -signal.SIGKILL
    resumed = train(*flags, processes=3)
    assert {str(path.parents[1]) for path in tmp_path.rglob("checkpoints/*.pt")} == {resumed["run"]}, "it goes on"
    assert resumed.groups()[:-1] == whole.groups()[:-1]
    assert differences(whole["run"], resumed["run"]) == []
    for left in (rows, curves, points):
        assert left(whole["run"]) == left(resumed["run"])


# ------------------------------------------------------------------------ the tool notices what is forgotten

LOOP = "utils/train_validation.py"
WRITER = "utils/record/writer.py"
CURVES = "utils/record/curves.py"
PROGRESS = 'Progress.from_state(state["progress"])'
# What a resume forgets: the file, its text, the text instead, and what the tool must then say.
FORGOTTEN = {
    "moving average": (LOOP, 'self.ema.load_state(state["ema"])', "pass", r"final.pt: .*ema/\S+: \d+ of"),
    "position": (
        LOOP,
        PROGRESS,
        PROGRESS.replace('"])', '"] | {"step_in_epoch": 0})'),
        r"samples and images: step 27 on rank 0: other samples or images",
    ),
    "curves": (CURVES, "rows[rows[:, 0] <= steps]", "rows[:0]", r"metrics.npz: .*\(\d+,\).* instead of .*\(36,\)"),
    "rows": (WRITER, "if _place_of(row)[0] <= epochs]", "if False]", r"metrics.csv: row 1 epoch: 3 instead of 1"),
    "TensorBoard's last step": (
        WRITER,
        "rewind(folder, steps)",
        "set()",
        r"TensorBoard: \S+ at step 2\d: \[.*, .*\] instead",
    ),
}


def test_the_tool_says_different_and_what_differs_when_a_resume_forgets_something(straight, tmp_path, monkeypatch):
    for name in ("models", "utils", "scripts", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with what is compiled
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    # Checkpoints are written at once, not in the background: on a slow disk the kill would come before that of step 26.
    at_once = (LOOP, 'self.save("last")', 'self.save_now("last")', "")
    for file, text, instead, _ in (at_once, *FORGOTTEN.values()):
        source = (tmp_path / file).read_text()
        assert source.count(text) == 1, f"{file} no longer holds {text!r} once"
        (tmp_path / file).write_text(source.replace(text, instead))
    monkeypatch.setattr(runs, "PROGRAM", tmp_path / runs.PROGRAM.relative_to(ROOT))
    monkeypatch.setattr(verify_resume, "run_straight", lambda *_: straight[0])
    # The kill and the checkpoint before it, that of step 26, come in the third epoch.
    monkeypatch.setattr(runs.Timeline, "moments", lambda *_: iter([(29, 0.01)]))
    code, output = verified(*KILL_FLAGS)
    assert code == 1 and output.splitlines()[-1].startswith("verdict: DIFFERENT: "), output
    for part, (*_, said) in FORGOTTEN.items():
        assert re.search(said, output), f"{part}: {output}"
