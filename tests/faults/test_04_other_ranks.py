"""Row 4: another number of ranks at a resume, with the same global batch: the same samples, learning rates and scales."""

import numpy as np
import pytest

from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import load
from tests.helpers import run_in

FLAGS = ("--arch", "fc", "--epochs", 2, "--global-batch-size", 180, "--no-progress", "--deterministic")
FLAGS += ("--picture-epochs", "off")
STEPS_AN_EPOCH = 8


PLUGIN = """
import os

from utils.plugin import hook


@hook("before_forward")
def note(traval, batch):
    with open(f"{os.environ['SAMPLES']}/rank{os.environ.get('RANK')}", "a") as file:
        print(traval.progress.step + 1, *batch.indices, file=file)
"""


def recorded(folder, processes, *flags):
    """Run the program with its samples recorded; gives {step: its samples, over all ranks}."""
    folder.mkdir()
    plugin = folder.parent / "samples.py"
    plugin.write_text(PLUGIN)
    Forked(*flags, "--plugin", plugin, processes=processes, SAMPLES=str(folder)).output()
    found = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            step, *samples = map(int, line.split())
            found.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in found.items()}


def test_a_run_continued_on_three_and_then_two_ranks_sees_the_samples_rates_and_scales_of_one_on_a_single_rank(
    tmp_path,
):
    flags = (*FLAGS, "--amp", "fp16", "--init-scale", 4096, "--ema-decay", "0.9")
    alone = recorded(tmp_path / "a", 1, *flags, "--output", tmp_path / "whole")
    changed = {}
    for processes, until in ((1, 4), (3, STEPS_AN_EPOCH + 3), (2, 2 * STEPS_AN_EPOCH)):
        more = ("--output", tmp_path / "changed", "--resume", "auto", "--max-steps", until)
        changed |= recorded(tmp_path / f"b{processes}", processes, *flags, *more)
    assert changed == alone and len(alone) == 2 * STEPS_AN_EPOCH

    whole, run = (run_in(tmp_path / name) for name in ("whole", "changed"))
    left, right = (dict(np.load(folder / "metrics.npz")) for folder in (whole, run))
    for name in ("step", "epoch", "lr", "loss_scale"):
        np.testing.assert_array_equal(left[name], right[name])
    # A scale that overflows may be met on one number of ranks only: each has gradients of its own part. This one does not.
    # Sums are rounded in another order: the first steps differ in the last digits of half precision, later ones grow apart.
    np.testing.assert_allclose(left["loss"][:6], right["loss"][:6], rtol=5e-3)
    assert np.abs(left["loss"] - right["loss"]).max() < 0.1
    left = load(whole, "final.pt")
    right = load(run, "final.pt")
    assert left["scaler"] == right["scaler"]
    for name in ("epoch", "step", "samples_seen", "skipped_steps"):
        assert left["progress"][name] == right["progress"][name]


# All techniques that allow it: not batch norm and dropout, whose statistics and noise are a rank's own.
TECHNIQUES = {
    "mixing": "--mixup 0.2 --cutmix 1",
    "recipe": "--auto-augment ra --cutout 2 --repeated-augmentation 2 --mixup 0.2 --cutmix 1 --mixup-mode batch --mixup-prob 0.7 --loss bce "
    "--bce-target-thresh 0.2 --class-weights balanced --sam-rho 0.05 --lookahead 2 0.5 --layer-decay 0.8 --ema-decay 0.9 "
    "--clip-grad-norm 1 --optimizer adamw --lr 0.002 --lr-policy poly --warmup-epochs 0.5",
    "fine-tuning": "--auto-augment ta_wide --balanced-sampler --train-samples 1350 --loss focal --label-smoothing 0.1 "
    "--freeze layers.1 --teacher {teacher} --optimizer muon --lr 0.002 --lr-cycle-epochs 1 --lr-min 0.001 --clip-grad-agc 0.1 "
    "--swa-start-epoch 1 --swa-lr 0.001 --backbone-lr-scale 0.5",
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_run_has_the_same_losses_on_one_two_and_three_ranks_and_with_accumulation(name, small_run, tmp_path):
    teacher = small_run("--max-steps", 5) / "checkpoints/final.pt"
    # Six steps are an epoch: the last two share out a remainder, one of them with an odd number of images.
    flags = ("--arch", "fc", *TECHNIQUES[name].format(teacher=teacher).split(), "--global-batch-size", 270)
    flags = (*flags, "--max-steps", 6, "--picture-epochs", "off", "--no-progress")
    more = [(3, 1), (1, 3)] if name == "mixing" else []
    runs = {}
    for processes, passes in [(1, 1), (2, 2), *more]:
        output = tmp_path / f"{processes}_{passes}"
        runs[processes, passes] = Forked(*flags, "--accumulate", passes, "--output", output, processes=processes)
    curves = {}
    for layout, run in runs.items():
        run.output()
        curves[layout] = dict(np.load(run_in(tmp_path / f"{layout[0]}_{layout[1]}") / "metrics.npz"))
    alone = curves[1, 1]
    assert len(alone["loss"]) >= 5
    for layout, other in curves.items():
        np.testing.assert_allclose(other["loss"], alone["loss"], rtol=1e-5, err_msg=str(layout))
        np.testing.assert_array_equal(other["lr"], alone["lr"], err_msg=str(layout))
        # The norm's square adds up some 100,000 float32 products, which other ranks add in another order.
        np.testing.assert_allclose(other["gradient_norm"], alone["gradient_norm"], rtol=1e-3, err_msg=str(layout))
        np.testing.assert_array_equal(other["top1"], alone["top1"], err_msg=str(layout))
