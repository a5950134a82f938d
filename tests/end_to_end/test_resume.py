"""A run that was stopped and continued equals one that was not, whatever it trains with."""

from unittest.mock import Mock

import pytest

from main import main
from tests.end_to_end.processes import curves, differences, load, points, rows
from tests.helpers import image_tree, trained
from utils.loop.hooks import Hooks

FLAGS = "--device cpu --deterministic --arch fc --picture-epochs off --no-progress".split()
# Each: flags, and the steps after which the run is cut. An epoch has 12 steps, 6 with --accumulate or 360 samples, and 3
# with both or RESNET.
# Scaler, accumulation and average together: tests/faults/test_10_stop_signals.py.
RESNET = (
    "--arch timm/test_resnet --batch-size 64 --train-samples 192 --epochs 3 --val-batch-size 40 --max-val-batches 1"
)
RELEASED = "--freeze all-but-head --unfreeze-epoch 2"
FROZEN = "--freeze all-but-head --freeze-epoch 2"
MIXTURES = {
    "batch norm of the average": (f"{RESNET} --epochs 2 --ema-decay 0.9 --ema-bn-batches 3 --print-freq 2", [5]),
    "schedule-free, SAM, scaler": (
        "--epochs 2 --train-samples 360 --optimizer schedulefree-sgd --lr 0.02 --warmup-epochs 1 --layer-decay 0.7 "
        "--sam-rho 0.05 --accumulate 2 --clip-grad-norm 1 --amp fp16 --init-scale 1e8",
        [4],
    ),
    "muon, penalty": (
        "--epochs 1 --train-samples 360 --optimizer muon --grad-penalty 0.01 --amp fp16 --ema-decay 0.9 "
        "--init-scale 1e7 --save-every-steps 2",
        [3],
    ),
    "lookahead, layers, restarts": (
        "--epochs 2 --lookahead 4 0.5 --layer-decay 0.7 --lr-cycle-epochs 0.4 --lr-cycle-decay 0.8 --lr-min 0.001 "
        "--warmup-epochs 0.2",
        [6, 12],
    ),
    "SAM, accumulation, one cycle, arguments": (
        "--epochs 2 --sam-rho 1 --sam-adaptive --optimizer adamw --accumulate 2 --lr-policy one-cycle --lr-base 0.002 "
        "--clip-grad-norm 1 --opt-eps 0.001 --opt-betas 0.8 0.95 --opt-kwargs amsgrad=true",
        [5],
    ),
    "released, two optimizers": (
        f"{RESNET} {RELEASED} --arch fc --optimizer muon --lr 0.001 --amp fp16 --ema-decay 0.9",
        [2, 7],
    ),
    "frozen, scaler, average, muon": (
        f"{RESNET} {FROZEN} --arch fc --optimizer muon-sgd --lr 0.01 --amp fp16 --ema-decay 0.9",
        [2, 7],
    ),
    "frozen, lookahead, mean of epochs": (
        f"{RESNET} {FROZEN} --batch-size 32 --accumulate 2 --lookahead 2 0.5 --swa-start-epoch 2 --ema-bn-batches 2",
        [2, 7],
    ),
    "frozen in between, schedule-free": (
        f"{RESNET} {RELEASED} --freeze-epoch 1 --arch fc --optimizer schedulefree-adamw",
        [2, 6, 7],
    ),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_cut_run_that_goes_on_leaves_the_same_bits_curves_and_points(mixture, tmp_path):
    flags, stops = MIXTURES[mixture]
    flags = ["--train-samples", "720", *flags.split()]
    whole = trained(tmp_path / "whole", *FLAGS, *flags)
    cut = (tmp_path / "cut", *FLAGS, *flags, "--resume", "auto")
    begun = {trained(*cut, "--max-steps", stop) for stop in stops}
    resumed = trained(*cut)
    assert begun == {resumed}, "a run that begins anew has the same bits, too"
    assert differences(whole, resumed) == [] == differences(whole, resumed, "best.pt")
    assert rows(whole) == rows(resumed)
    assert curves(whole) == curves(resumed)
    found = points(resumed)
    assert all(len(values) == len(dict(values)) for values in found.values()), "a step is there twice"
    assert all(set(values) <= set(found[tag]) for tag, values in points(whole).items())
    assert load(whole, "final.pt")["progress"]["skipped_steps"] > 0 or "--init-scale" not in flags


def test_a_run_that_meets_a_bad_image_goes_on_with_skip_bad_images(tmp_path, capsys):
    tree = image_tree(tmp_path / "tree", {"train": 8, "val": 4}, size=28)
    data = f"--dataname folder --datapath {tree} --image-size 28 --loader stream --workers 0"
    flags = (*FLAGS, *data.split(), "--epochs", "2", "--batch-size", "4", "--resume", "auto")
    run = trained(tmp_path / "runs", *flags, "--max-steps", 2)
    (tree / "train" / "a" / "0.png").write_bytes(b"")
    assert main([*flags, "--output", str(tmp_path / "runs")]) == 2
    assert "skip it with --skip-bad-images" in capsys.readouterr().err
    assert trained(tmp_path / "runs", *flags, "--skip-bad-images") == run
    assert (run / "bad_images.txt").read_text() == f"{tree / 'train' / 'a' / '0.png'}\n"


def test_the_log_says_why_a_run_ended_and_evaluation_says_what_it_evaluates(tmp_path, capsys):
    hooks = Hooks(before_validation_batch=[Mock(side_effect=KeyboardInterrupt)])
    assert main([*FLAGS, "--epochs", "2", "--output", str(tmp_path)], hooks=hooks) == 130
    (run,) = tmp_path.glob("digits/fc/*")
    assert (run / "log.txt").read_text().splitlines()[-1].endswith("Stopped: KeyboardInterrupt")
    capsys.readouterr()
    assert main(["--device", "cpu", "--evaluate", "--resume", str(run), "--no-progress"]) == 0
    assert f"Evaluating {run / 'checkpoints' / 'initial.pt'}, after epoch 0, step 0" in capsys.readouterr().out
