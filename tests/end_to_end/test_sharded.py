"""--shard-model: the same training with parameters spread over processes, and checkpoints that any number reads."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from main import main
from scripts import join_shards
from tests.end_to_end.forked import server
from tests.end_to_end.processes import FINAL_LINE, differences, flat, train
from utils.checkpoint import checkpoint
from utils.config.rules import contradictions
from utils.config.settings import Settings, UserError

VIT = (
    "--arch", "timm/test_vit", "--image-size", "32", "--optimizer", "adamw", "--lr", "0.001", "--amp", "off",
    "--global-batch-size", "30", "--accumulate", "2", "--clip-grad-norm", "1", "--ema-decay", "0.9", "--no-progress",
    "--print-freq", "1",
)  # fmt: skip


def curves(run):
    with np.load(Path(run) / "metrics.npz") as content:
        return dict(content)


def state(run, name="final.pt"):
    return flat(checkpoint.load(Path(run) / "checkpoints" / name))


def farthest(one, other, part):
    """The largest difference between two states in tensors whose path begins with ``part``."""
    assert one.keys() == other.keys()
    pairs = [(value, other[key]) for key, value in one.items() if key.startswith(part)]
    assert pairs and all(left.dtype == right.dtype for left, right in pairs)
    return max((left.double() - right.double()).abs().max().item() for left, right in pairs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of runs of two processes and eight steps: of a sharded network, and of whole ones."""
    output = tmp_path_factory.mktemp("runs")
    flags = (*VIT, "--max-steps", "8", "--output", output, "--deterministic")
    return {
        name: Path(train(*flags, *more, processes=2)["run"])
        for name, more in {"sharded": ("--shard-model",), "whole": ()}.items()
    }


def test_losses_gradients_weights_and_average_are_those_of_whole_parameters(runs):
    sharded, whole = curves(runs["sharded"]), curves(runs["whole"])
    for name in ("loss", "gradient_norm"):
        assert np.allclose(sharded[name], whole[name], rtol=1e-4, atol=0), name
    assert len(sharded["loss"]) == 8 and (sharded["gradient_norm"] > 1).any(), "something was clipped"
    one, other = state(runs["sharded"]), state(runs["whole"])
    assert farthest(one, other, "/model") < 5e-4 and farthest(one, other, "/ema") < 5e-4


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_weights_arrive_in_the_format_that_autocast_would_cast_them_to(amp, tmp_path):
    """The first gradient differs by less than half precision resolves: norms and residuals are not rounded besides."""
    flags = (*VIT, "--amp", amp, "--max-steps", "3", "--output", tmp_path)
    sharded, whole = (curves(train(*flags, *more, processes=2)["run"]) for more in (("--shard-model",), ()))
    assert np.allclose(sharded["gradient_norm"][0], whole["gradient_norm"][0], rtol=1e-4)
    assert np.allclose(sharded["loss"], whole["loss"], rtol=1e-3)


@pytest.mark.parametrize(("processes", "more"), [(2, ()), (1, ()), (3, ()), (2, ("--no-shard-model",))])
def test_a_run_continues_on_any_number_of_processes_sharded_or_whole(processes, more, runs, tmp_path):
    cut = train(*VIT, "--shard-model", "--deterministic", "--max-steps", "4", "--output", tmp_path, processes=2)["run"]
    continued = train(
        "--resume", cut, "--deterministic", "--max-steps", "8", "--no-progress", *more, processes=processes
    )
    one, other = state(continued["run"]), state(runs["sharded"])
    if processes == 2 and not more:
        assert all(torch.equal(value, other[key]) for key, value in one.items() if isinstance(value, torch.Tensor))
        assert differences(cut, runs["sharded"]) == []
    assert one["/progress/step"] == 8 and one["/progress/samples_seen"] == other["/progress/samples_seen"]
    assert farthest(one, other, "/model") < 5e-4 and farthest(one, other, "/ema") < 5e-4
    assert farthest(one, other, "/optimizer/state") < 1e-3
    (newest,) = {path for path in Path(cut, "checkpoints").glob("final.pt")}
    assert (checkpoint.SHARDS in checkpoint.read_quickly(newest)) == (processes > 1 and not more)


def test_a_whole_run_continues_sharded(runs, tmp_path):
    cut = train(*VIT, "--max-steps", "4", "--output", tmp_path, processes=2)["run"]
    continued = train("--resume", cut, "--shard-model", "--max-steps", "8", "--no-progress", processes=2)
    assert farthest(state(continued["run"]), state(runs["whole"]), "/model") < 5e-4
