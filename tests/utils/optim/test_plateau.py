"""The learning rate of --lr-policy plateau, which falls where a validation metric no longer improves."""

import copy
import random

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.utils.loop.test_between_steps import THREE_STEPS, results, watched  # noqa: F401 - a fixture
from tests.utils.loop.test_selection import judged
from utils.config.arguments import parse
from utils.optim.lr_policy import LRPolicy

FLAGS = (*THREE_STEPS, "--epochs", "7", "--lr", "0.4", "--lr-policy", "plateau", "--lr-patience", "1")
VALUES = [(50, 1.0), (40, 1.0), (60, 1.0), (60, 1.0), (55, 1.0), (70, 1.0), (1, 1.0)]  # drops after epochs 2, 4, 5, 7


@pytest.mark.parametrize(("metric", "mode"), [("top1", "max"), ("loss", "min")])
@pytest.mark.parametrize("patience", [1, 2, 5])
def test_the_rate_falls_as_by_torchs_scheduler_whose_patience_is_one_less(metric, mode, patience):
    draw = random.Random(patience)
    values = [draw.choice([1.0, 2.0, 3.0, 4.0, 4.5]) for _ in range(60)]
    flags = ["--lr-policy", "plateau", "--lr-patience", str(patience), "--lr-gamma", "0.5", "--lr", "0.4"]
    flags += ["--best-metric", metric, "--epochs", "60", "--lr-min", "1e-3"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    reference = ReduceLROnPlateau(optimizer, mode, 0.5, patience - 1, threshold=0, min_lr=1e-3, eps=0)
    policy = LRPolicy(parse(flags).optimisation, 3)
    rates = []
    for epoch, value in enumerate(values, start=1):
        reference.step(value)
        progress, _ = judged([{f"val_{metric}": one} for one in values[:epoch]], *flags)
        rates.append((policy.at(epoch, 3 * epoch, progress.lr_drops), optimizer.param_groups[0]["lr"]))
    ours, theirs = zip(*rates, strict=True)
    assert ours == pytest.approx(theirs) and ours[-1] < 0.4 and len(set(ours)) > 3


def test_no_other_schedule_falls_so_nor_do_the_warm_up_and_the_rate_of_an_average():
    other, _ = judged([{"val_top1": 1.0}] * 30, "--epochs", "30")
    assert other.lr_drops == 0
    flags = "--lr-policy plateau --lr 0.4 --warmup-epochs 2 --epochs 9 --swa-start-epoch 8 --swa-lr 0.05"
    args = parse(flags.split())
    policy = LRPolicy(args.optimisation, 2, args.average)
    assert [policy(step, drops=2) for step in (0, 3, 4, 13, 17)] == pytest.approx([0.1, 0.4, 0.004, 0.004, 0.05])


def test_waiting_begins_with_the_end_of_the_warm_up():
    flags = "--lr-policy plateau --lr-patience 3 --epochs 30".split()
    never = [{"val_top1": 1.0}] * 14
    for warmup, drops in (("0", [4, 7, 10, 13]), ("5", [8, 11, 14]), ("4.5", [8, 11, 14])):
        counts = [judged(never[:n], *flags, "--warmup-epochs", warmup)[0].lr_drops for n in range(1, 15)]
        assert [n + 1 for n in range(14) if counts[n] > (counts[n - 1] if n else 0)] == drops


def test_the_log_names_no_drop_that_a_limit_prevents(results):  # noqa: F811
    results += VALUES
    held, recorder, _ = watched(*FLAGS, "--lr-min", "0.02")
    held.fit()
    said = [line.split(" from")[0] for line, *_ in recorder.of("log") if "Learning rate" in line]
    assert said == ["Learning rate 0.04 instead of 0.4", "Learning rate 0.02 instead of 0.04"]


def test_a_run_that_is_cut_and_goes_on_has_the_same_rates(results):  # noqa: F811
    results += VALUES
    whole, recorder, _ = watched(*FLAGS)
    whole.fit()
    rates = [row["lr"] for (row,) in recorder.of("epoch")]
    assert rates == pytest.approx([0.4, 0.4, 0.04, 0.04, 4e-3, 4e-4, 4e-4]) and whole.progress.lr_drops == 4
    said = [line for line, *_ in recorder.of("log") if "Learning rate" in line]
    falls = ("0.04 instead of 0.4", "0.004 instead of 0.04", "0.0004 instead of 0.004")
    rule = "after 1 epoch(s) in which val_top1 has not improved"
    assert said == [f"Learning rate {fall} from here on, {rule}" for fall in falls]
    first, *_ = watched(*FLAGS)
    for cut in range(1, 7):
        results[:] = VALUES[cut - 1 :]
        first.train(cut - 1)
        first.validation(cut - 1)
        second, recorder, _ = watched(*FLAGS)
        second.load_state(copy.deepcopy(first.state()))
        second.fit()
        assert [row["lr"] for (row,) in recorder.of("epoch")] == rates[cut:]
        assert second.progress.state() == whole.progress.state()


def test_the_validation_of_a_part_of_an_epoch_lowers_nothing(results):  # noqa: F811
    results += VALUES
    traval, *_ = watched(*FLAGS, "--max-steps", "4")
    traval.fit()
    assert (traval.progress.step, traval.progress.last_validation[1], traval.progress.lr_drops) == (4, 40, 0)
