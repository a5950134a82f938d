"""A run killed at any moment of a save has a checkpoint that loads, and goes on from it."""

import hashlib
import json
import signal

import pytest

from main import main
from tests.end_to_end.forked import train_with
from tests.end_to_end.processes import differences, rows
from tests.helpers import QUIETLY, trained
from utils.checkpoint.checkpoint import newest

FLAGS = (*QUIETLY, *"--deterministic --arch fc --epochs 2 --ema-decay 0.9 --save-every-steps 4".split())
LEFT = {"initial.pt", "last.pt", "previous.pt", "best.pt", "final.pt", "manifest.json"}
# Where saves are cut, and the step of the checkpoint that is then the newest one whole. Between any two operations on
# files: tests/utils/checkpoint/test_checkpoint.py; with final.pt there and last.pt not: test_10_stop_signals.py.
KILLS = [
    {"write step=8": 4, "rename step=12 when=before": 8},
    {"rename step=23 name=best when=after": 23},  # best.pt is there, last.pt is not
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of FLAGS that nothing happens to."""
    return trained(tmp_path_factory.mktemp("whole"), *FLAGS)


@pytest.mark.parametrize("kills", KILLS, ids=", ".join)
def test_a_kill_in_each_phase_of_a_save_leaves_a_whole_checkpoint_to_go_on_from(whole, tmp_path, capsys, kills):
    flags = (*FLAGS, "--output", str(tmp_path), "--resume", "auto")
    for point, step in kills.items():
        assert train_with(f"kill {point}", *flags) == -signal.SIGKILL
        folder = next(tmp_path.glob("digits/fc/*"))
        warnings = []
        _, state = newest(folder / "checkpoints", warnings.append)
        assert (state["progress"]["step"], warnings) == (step, [])
        assert "after" in point or {path.name for path in (folder / "checkpoints").iterdir()} - LEFT != set()

    assert main([*flags]) == 0
    assert "is damaged" not in capsys.readouterr().err
    assert list(tmp_path.glob("digits/fc/*")) == [folder]
    assert differences(whole, folder) == []
    assert rows(whole) == rows(folder)
    if len(kills) > 1:  # the saves as last.pt that follow leave nothing of those that were cut
        assert {path.name for path in (folder / "checkpoints").iterdir()} == LEFT
        files = {name: (folder / "checkpoints" / name).read_bytes() for name in LEFT - {"manifest.json"}}
        expected = {name: [hashlib.sha256(content).hexdigest()] for name, content in files.items()}
        assert json.loads((folder / "checkpoints/manifest.json").read_text())["sha256"] == expected


def test_a_run_killed_in_its_very_first_save_is_begun_anew(whole, tmp_path):
    flags = (*FLAGS, "--output", str(tmp_path), "--resume", "auto")
    assert train_with("kill write step=0", *flags) == -signal.SIGKILL
    assert main([*flags]) == 0
    finished = [folder for folder in tmp_path.glob("digits/fc/*") if (folder / "checkpoints/final.pt").is_file()]
    assert len(finished) == 1
    assert differences(whole, finished[0]) == []
