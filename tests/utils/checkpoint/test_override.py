"""What ``--resume-override`` carries over from the middle of an epoch."""

import dataclasses
from pathlib import Path

import pytest

from utils.checkpoint.override import carry_over
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import ResumePoint
from utils.config.arguments import parse

STEPS = 23


@pytest.mark.parametrize(
    ("flags", "done", "kept"),
    [
        (("--lr", "0.2"), 7, True),
        (("--grad-penalty", "0.1"), 7, False),
        (("--loss", "focal"), 7, False),
        (("--loss", "focal"), STEPS, True),  # only its validation is missing
    ],
)
def test_training_figures_of_an_epoch_do_not_mix_two_losses(flags, done, kept):
    begun = parse([])
    progress = Progress(epoch=1, step_in_epoch=done, step=STEPS + done)
    progress.add([90.0, 40.0, 60.0, 64.0])
    state = {"settings": begun.values(), "classes": ["a", "b"], "fingerprint": "f", "progress": progress.state()}
    point = ResumePoint(Path("last.pt"), {**state, "optimizer": []}, "digest")
    carried, lines = carry_over(point, parse(flags), ("a", "b"), "f", STEPS, [])
    found = Progress.from_state(carried["progress"])
    nothing = [0.0] * 4
    assert found.epoch_sums == found.window_sums == (progress.epoch_sums if kept else nothing)
    assert [line for line in lines if "another loss" in line] == (
        [] if kept else ["another loss: epoch 2's training figures are of its remaining steps"]
    )
    unchanged = dataclasses.replace(found, epoch_sums=progress.epoch_sums, window_sums=progress.window_sums)
    assert unchanged == Progress.from_state(state["progress"]), "the position is that of the checkpoint"
