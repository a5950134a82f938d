"""What ``--resume-override`` carries over from the middle of an epoch."""

import dataclasses
from pathlib import Path

import pytest

from utils.checkpoint.override import carry_over
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import ResumePoint
from utils.config.arguments import parse

STEPS = 23


def carried(progress, flags, fingerprint="f"):
    """The progress of a default run of two classes that goes on with ``flags``, and the lines about it."""
    state = {"settings": parse([]).values(), "classes": ["a", "b"], "fingerprint": "f", "progress": progress.state()}
    point = ResumePoint(Path("last.pt"), {**state, "optimizer": []}, "digest")
    state, lines = carry_over(point, parse(flags), ("a", "b"), fingerprint, STEPS, [])
    return Progress.from_state(state["progress"]), lines


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
    progress = Progress(epoch=1, step_in_epoch=done, step=STEPS + done)
    progress.add([90.0, 40.0, 60.0, 64.0])
    found, lines = carried(progress, flags)
    nothing = [0.0] * 4
    assert found.epoch_sums == found.window_sums == (progress.epoch_sums if kept else nothing)
    assert [line for line in lines if "another loss" in line] == (
        [] if kept else ["another loss: epoch 2's training figures are of its remaining steps"]
    )
    unchanged = dataclasses.replace(found, epoch_sums=progress.epoch_sums, window_sums=progress.window_sums)
    assert unchanged == progress, "the position is that of the checkpoint"


@pytest.mark.parametrize(
    ("flags", "fingerprint", "kept"),
    [
        ("--lr 0.2 --weight-decay 0.1 --loss focal --augment none --best-metric loss", "f", True),
        *((flags, "f", False) for flags in ("--tta flip", "--mean 0.5", "--crop-pct 0.5", "--max-val-batches 1")),
        *((flags, "f", False) for flags in ("--amp bf16", "--val-image-size 16", "--blur-pool", "--fp32-layers fc")),
        ("", "other", False),
    ],
)
def test_a_validation_stands_for_the_weights_only_while_it_is_of_the_same_settings_and_images(flags, fingerprint, kept):
    progress = Progress(epoch=2, step=2 * STEPS, validated_step=2 * STEPS, last_validation=[0.5, 90.0, 99.0, 360.0])
    found, _ = carried(progress, flags.split(), fingerprint)
    assert (found.validated_step == found.step) is kept
