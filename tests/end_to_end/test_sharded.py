"""--shard-model: the same training with parameters spread over processes, and checkpoints that any number reads."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from main import main
from scripts import join_shards
from tests.end_to_end.forked import _ranks, server, train_with
from tests.end_to_end.processes import FINAL_LINE, flat, rows, train
from tests.faults.small_run import Attack
from utils.checkpoint import checkpoint
from utils.config.settings import UserError
from utils.loop.hooks import Hooks
from utils.runtime.sharding import local

TRAINING = (
    "--optimizer adamw --lr 0.001 --amp off --global-batch-size 30 --accumulate 2 --clip-grad-norm 1 --ema-decay 0.9 "
    "--no-progress --print-freq 1 --val-batch-size 120 --deterministic --picture-epochs off"
).split()
VIT = (*"--arch timm/test_vit --model-kwargs depth=2 --image-size 32".split(), *TRAINING)
FC = ("--arch", "fc", *TRAINING)  # where no more than one unit's parameters are needed
EPOCHS = "--train-samples 90 --epochs 2".split()
STEPS = 6
CUT = 4
HALF = "--amp fp16 --ema-decay none --max-val-batches 1 --val-batch-size 15"  # validation takes a CPU seconds
LR = 0.001
COMPARED = ("/model", "/ema", "/optimizer/state")
# Of a gradient, as a share: each is a chain of up to thirty sums of up to 1,000 float32 products (2**-24 each), which
# other processes add in another order.
ERROR = 1e-5


def curves(run):
    with np.load(Path(run) / "metrics.npz") as content:
        return dict(content)


def state(path):
    return flat(checkpoint.load(Path(path)))


def assert_same_training(one, other):
    """Hold two states after up to ``STEPS`` steps of AdamW to what gradients allow that differ by ``ERROR``.

    Adam divides a gradient g by its own size, so an error e moves a weight by LR * min(2, e / |g|) a step: by 2 LR at
    worst, where g happens to be no larger than e. How often that is, the processor's rounding decides; the mean square
    does not depend on it. Near 0, |g| has the density 0.8 / rms(g), that of a normal distribution, with which the mean
    of min(2, e / |g|)**2 is 4 * 0.8 * e / rms(g). The weights' differences are below 2e-3 of the weights (whose rms is
    0.02); so are those of the gradients that follow, and twice that those of their squares.
    """
    assert one.keys() == other.keys()
    pairs = {key: (value, other[key]) for key, value in one.items() if key.startswith(COMPARED)}
    assert {part for part in COMPARED for key in pairs if key.startswith(part)} == set(COMPARED)
    assert all(left.dtype == right.dtype for left, right in pairs.values())
    for part in ("/model", "/ema"):
        moved = torch.cat(
            [(left.double() - right.double()).flatten() for key, (left, right) in pairs.items() if key.startswith(part)]
        )
        assert moved.abs().max() <= 2 * LR * STEPS and rms(moved) < LR * STEPS * (3.2 * ERROR) ** 0.5
    for key, (left, right) in pairs.items():
        if key.startswith("/optimizer"):
            assert rms(left.double() - right.double()) <= 4e-3 * rms(right), key


def rms(values):
    return values.double().square().mean().sqrt().item()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs of two processes, of a sharded network and of whole ones; previous.pt is of step ``CUT``."""
    output = tmp_path_factory.mktemp("runs")
    flags = (*VIT, *EPOCHS, "--save-every-steps", CUT, "--output", output)
    more = {"sharded": ("--shard-model",), "whole": ()}
    return {name: Path(train(*flags, *flag, processes=2)["run"]) for name, flag in more.items()}


def test_losses_gradients_weights_and_average_are_those_of_whole_parameters(runs):
    sharded = curves(runs["sharded"])
    whole = curves(runs["whole"])
    for name in ("loss", "gradient_norm"):
        assert np.allclose(sharded[name], whole[name], rtol=ERROR, atol=0), name
    assert len(sharded["loss"]) == STEPS and (sharded["gradient_norm"] > 1).any(), "something was clipped"
    one, other = (state(runs[name] / "checkpoints/final.pt") for name in ("sharded", "whole"))
    assert_same_training(one, other)
    validated = [[float(row["val_loss"]) for row in rows(runs[name])] for name in ("sharded", "whole")]
    assert validated[0] == pytest.approx(validated[1], rel=1e-5) and len(validated[0]) == 2, (
        "of the average, which moved"
    )
    assert one["/model/cls_token"].shape == (1, 1, 64), "fewer rows than processes"


def test_half_precision_is_that_of_autocast(tmp_path):
    """The gradient differs by less than half precision resolves: norms and residuals are not rounded besides.

    In all six blocks: in two, rounded residuals differ by less than the tolerance.
    """
    flags = (*VIT, *f"--model-kwargs depth=6 {HALF} --max-steps 2 --output".split(), tmp_path)
    sharded, whole = (curves(train(*flags, *more, processes=2)["run"]) for more in (("--shard-model",), ()))
    assert np.allclose(sharded["gradient_norm"], whole["gradient_norm"], rtol=2e-4)
    assert np.allclose(sharded["loss"], whole["loss"], rtol=2e-5)


@pytest.mark.parametrize(
    ("begun", "processes", "flag"),
    [
        ("sharded", 1, ()),
        ("whole", 2, ("--shard-model",)),
        pytest.param("sharded", 3, (), marks=pytest.mark.thorough),
    ],
)
def test_a_run_continues_on_any_number_of_processes_sharded_or_whole(begun, processes, flag, runs, tmp_path):
    shutil.copytree(runs[begun], tmp_path / "run")
    cut = tmp_path / "run/checkpoints/previous.pt"
    assert state(cut)["/progress/step"] == CUT
    train("--resume", cut, "--no-progress", *flag, processes=processes)
    one, other = (state(run / "checkpoints/final.pt") for run in (tmp_path / "run", runs[begun]))
    for name in ("step", "samples_seen", "epoch"):
        assert one[f"/progress/{name}"] == other[f"/progress/{name}"]
    assert_same_training(one, other)
    file = checkpoint.read_quickly(tmp_path / "run/checkpoints/final.pt")
    assert (checkpoint.SHARDS in file) == (processes > 1)


def test_a_run_killed_while_saving_continues_to_the_same_bits_and_leaves_no_shards_behind(tmp_path):
    alone = Path(train(*FC, *EPOCHS, "--shard-model", "--output", tmp_path / "alone", processes=2)["run"])
    flags = (*FC, *EPOCHS, "--shard-model", "--output", tmp_path / "killed", "--resume", "auto")
    assert train_with("kill write step=5", *flags, "--save-every-steps", 5, processes=2) < 0
    (shards,) = tmp_path.glob("killed/*/*/*/checkpoints/shards")
    assert sorted(folder.name[:8] for folder in shards.iterdir()) == ["00000000", "00000003", "00000005"]
    assert checkpoint.newest(shards.parent, pytest.fail)[1]["progress"]["step"] == 3
    run = Path(train(*flags, processes=2)["run"])
    one, other = (state(folder / "checkpoints/final.pt") for folder in (run, alone))
    assert all(torch.equal(value, other[key]) for key, value in one.items() if isinstance(value, torch.Tensor))
    files = [checkpoint.read_quickly(path) for path in shards.parent.glob("*.pt")]
    assert {folder.name for folder in shards.iterdir()} == {file[checkpoint.SHARDS]["folder"] for file in files}


def test_every_tool_reads_shards_and_one_file_made_of_them(runs, tmp_path, capsys):
    best = runs["sharded"] / "checkpoints/best.pt"
    whole = tmp_path / "whole.pt"
    assert join_shards.main([str(best), "--output", str(whole)]) == 0
    assert checkpoint.SHARDS not in torch.load(whole, weights_only=True)
    joined = state(whole)
    assert all(torch.equal(value, joined[key]) for key, value in state(best).items() if isinstance(value, torch.Tensor))
    told = []
    for path in (best, whole):
        assert main(["--device", "cpu", "--evaluate", "--resume", str(path), "--no-progress"]) == 0
        last_line = capsys.readouterr().out.splitlines()[-1]
        told.append(FINAL_LINE.fullmatch(last_line).group("top1", "loss", "count"))
    row = max(rows(runs["sharded"]), key=lambda row: float(row["val_top1"]))
    assert told[0] == told[1] == (*(f"{float(row[f'val_{name}']):.4f}" for name in ("top1", "loss")), "360")
    with pytest.raises(UserError, match="exists; give another file"):
        join_shards.main([str(best), "--output", str(whole)])


def test_a_damaged_or_missing_shard_is_named_and_the_checkpoint_before_it_taken(runs, tmp_path):
    shutil.copytree(runs["sharded"] / "checkpoints", tmp_path / "checkpoints")
    last = tmp_path / "checkpoints/last.pt"
    shard = next((last.parent / "shards").glob(f"{STEPS:08d}_*/__1_*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=f"{shard.name} is damaged"):
        checkpoint.load(last)
    for metadata in (last.parent / "shards").glob("*/.metadata"):  # a pickle, which is never read
        metadata.write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    warned = []
    path, found = checkpoint.newest(last.parent, warned.append)
    assert path.name == "previous.pt" and found["progress"]["step"] == CUT
    files = [checkpoint.read_quickly(path) for path in last.parent.glob("*.pt")]
    sharing = [file for file in files if file[checkpoint.SHARDS]["folder"] == shard.parent.name]
    assert len(sharing) >= 2, "last and final share their bytes"
    assert sum(f"{shard.name} is damaged" in line for line in warned) == len(sharing)
    assert not (tmp_path / "attacked").exists()
    shutil.copy(last, tmp_path / "alone.pt")
    with pytest.raises(UserError, match="copy the folder shards too"):
        checkpoint.load(tmp_path / "alone.pt")


# ------------------------------------------------------------------------------------ a planted inf


def overflow_on_rank_1(environment, flags):
    """A rank of a run in whose second step one number of rank 1's part of the gradient, and no other, is infinite."""
    os.environ.update(environment)

    def plant(traval, batch, outputs):
        if traval.progress.step == 1 and traval.distributed.rank == 1 and batch.ends_step:
            gradients = [local(p.grad) for p in traval.clip.parameters if p.grad is not None]
            gradients[-3].view(-1)[0] = torch.inf

    os._exit(main(flags, hooks=Hooks(after_backward=[plant])))


def test_an_overflow_in_one_ranks_part_of_the_gradient_skips_the_step_on_all_ranks(tmp_path):
    flags = [*FC, *HALF.split(), *"--shard-model --device cpu --max-steps 3 --output".split(), str(tmp_path)]
    ranks = [server().Process(target=overflow_on_rank_1, args=(rank, flags)) for rank in _ranks(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    (run,) = (path.parent for path in tmp_path.glob("*/*/*/checkpoints"))
    found = state(run / "checkpoints/final.pt")
    assert (found["/progress/step"], found["/progress/skipped_steps"]) == (3, 1)
    assert found["/scaler/scale"] == 65536 / 2
    assert {found[key].item() for key in found if key.endswith("/step") and "optimizer" in key} == {2}
    assert curves(run)["loss_scale"].tolist() == [65536, 65536, 32768]
    assert all(value.isfinite().all() for value in found.values() if isinstance(value, torch.Tensor))
