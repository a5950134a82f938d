"""Several processes: exact validation, and data that differs between machines."""

import os
from pathlib import Path

import pytest
import torch

from main import main
from tests.end_to_end.forked import _ranks, server
from tests.end_to_end.processes import load, rows, train
from tests.helpers import image_tree, trained


def test_validation_within_training_and_evaluation_of_what_it_saved_agree_on_any_number_of_processes(tmp_path):
    """Batch norm's statistics differ between two ranks after a step; those of rank 0 are validated, and saved."""
    flags = "--arch timm/test_resnet --ema-decay 0.9 --ema-bn-batches 2 --no-progress --picture-epochs off".split()
    few = "--global-batch-size 4 --max-steps 8 --warmup-epochs 0.1".split()
    whole = train(*flags, *few, "--output", tmp_path, processes=2)
    (row,) = rows(whole["run"])
    # Of the raw weights what is kept in the row, of their average the last line.
    raw = tuple(float(row[f"raw_val_{name}"]) for name in ("top1", "top5", "loss"))
    averaged = tuple(map(float, whole.group("top1", "top5", "loss")))
    torch.save(load(whole["run"], "final.pt")["model"], tmp_path / "raw.pt")
    weights = {"--resume": Path(whole["run"], "checkpoints/best.pt"), "--weights": tmp_path / "raw.pt"}
    assert abs(raw[2] - averaged[2]) > 1e-2
    for flag, expected, processes in (("--resume", averaged, 1), ("--weights", raw, 1), ("--weights", raw, 2)):
        again = train("--evaluate", flag, weights[flag], *flags[:2], "--no-progress", processes=processes)
        found = tuple(map(float, again.group("top1", "top5", "loss")))
        # Other batches add up in another order, which may change the last place of four.
        assert found == pytest.approx(expected, rel=0, abs=1.1e-4), (flag, processes)


def test_a_checkpoint_within_an_epoch_is_evaluated_with_a_warning_about_its_average(tmp_path, capsys):
    few = ("--train-samples", "240", "--batch-size", "40")  # six steps an epoch
    flags = (*few, "--ema-decay", "0.9", "--max-steps", "5", "--save-every-steps", "2")
    for arch, warned in (
        ("timm/test_resnet", {"previous": True, "last": False, "initial": False}),
        ("fc", {"previous": False}),
    ):
        folder = trained(tmp_path / arch, *flags, "--arch", arch)
        for name, expected in warned.items():
            assert main(["--device", "cpu", "--evaluate", "--resume", str(folder / f"checkpoints/{name}.pt")]) == 0
            assert ("warning: it was saved between two validations" in capsys.readouterr().out) == expected, name


def rank_in(folder, environment, flags):
    """A process of a run, on a machine whose own disk is ``folder``."""
    os.environ.update(environment)
    os.chdir(folder)
    with open("err.txt", "w") as file:
        os.dup2(file.fileno(), 2)
    os._exit(main(flags))


def on_own_disks(tmp_path, change, *flags):
    """Exit codes and stderr of two processes whose disks hold the same, but for a ``change`` of the second's."""
    for disk in ("0", "1"):
        image_tree(tmp_path / disk / "data", {"train": 3, "val": 3})
        (tmp_path / disk / "own.txt").touch()
    change(tmp_path / "1")
    line = (
        "--dataname folder --datapath data --device cpu --arch timm/test_vit --image-size 32 -w 0 --max-steps 1 "
        "--no-progress --picture-epochs off --timeout 15 --output"
    )
    line = [*line.split(), str(tmp_path / "runs"), *flags]
    ranks = [
        server().Process(target=rank_in, args=(tmp_path / str(number), rank, line))
        for number, rank in enumerate(_ranks(2))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    return [rank.exitcode for rank in ranks], [(tmp_path / disk / "err.txt").read_text() for disk in ("0", "1")]


def mistakes_in(err):
    """What is told to the user, without what says on a busy machine that the process is alive."""
    return [line for line in err.splitlines() if line.startswith("main.py: ")]


@pytest.mark.parametrize("split", ["train", "val", None])
def test_machines_whose_own_disks_hold_other_data_are_told_so_before_training(tmp_path, split):
    def rename(disk):
        if split:
            (disk / "data" / split / "b/2.png").rename(disk / "data" / split / "b/3.png")

    codes, (first, second) = on_own_disks(tmp_path, rename)
    assert (codes, second) == ([2, 2] if split else [0, 0], ""), first
    assert (tmp_path / "runs").exists() == (split is None)
    if split:
        (line,) = mistakes_in(first)
        assert line.startswith("main.py: --datapath: process 1 reads other images or labels (")


OWN_NETWORK = """
from torch import nn
from utils.plugin import network


@network("own")
def own(classes, channels, image_size):
    open("own.txt").close()
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes))
"""


@pytest.mark.parametrize(
    ("lost", "flags", "told"),
    [
        ("data", "--shard-model --amp auto --optimizer adamw", "--datapath data: no such folder"),
        ("own.txt", "--plugin ../own.py --arch own --amp auto", "network own: FileNotFoundError"),
    ],
)
def test_a_mistake_of_one_process_ends_the_others_that_would_go_on_to_exchange_something(tmp_path, lost, flags, told):
    (tmp_path / "own.py").write_text(OWN_NETWORK)
    codes, (first, second) = on_own_disks(tmp_path, lambda disk: (disk / lost).rename(disk / "lost"), *flags.split())
    assert (codes, second) == ([2, 2], ""), first
    assert not list(tmp_path.glob("*/runs")), "nothing is begun"
    (line,) = mistakes_in(first)
    assert told in line
