"""Stochastic weight averaging against torch.optim.swa_utils, a written-out mean and the uninterrupted run."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

import main
from tests.end_to_end.processes import load, rows
from tests.helpers import equal, trained
from tests.utils.loop.test_between_steps import THREE_STEPS, results, watched  # noqa: F401 - a fixture
from tests.utils.test_train_validation import make
from utils.checkpoint.checkpoint import average_moved_since_validation
from utils.config.arguments import parse
from utils.optim.ema import build_average
from utils.optim.lr_policy import LRPolicy

SWA = ("--epochs", "4", "--swa-start-epoch", "2", "--swa-lr", "0.02")


def with_batch_norm(*flags):
    """A TraVal of a small network with batch norm."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
    return make(*THREE_STEPS, *flags, model=nn.Sequential(*layers))


def after_each_epoch(traval):
    """The weights at the end of each epoch of a whole run."""
    kept = []
    for epoch in range(traval.args.optimisation.epochs):
        traval.train(epoch)
        kept.append(copy.deepcopy(traval.model))
        traval.validation(epoch)
    return kept


def test_the_average_is_the_mean_over_the_epochs_and_that_of_torch():
    traval, recorder, saver = watched(*THREE_STEPS, *SWA)
    models = after_each_epoch(traval)
    theirs = AveragedModel(models[0])
    for model in models[1:]:
        theirs.update_parameters(model)
    for name, value in saver.states[-1]["ema"]["model"].items():
        mean = sum(model.state_dict()[name].double() for model in models[1:]) / 3
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(value, theirs.module.state_dict()[name])
    assert [state["ema"] is None for state in saver.states] == [True, False, False, False]
    assert traval.progress.averaged_epochs == 3


def test_the_averages_result_counts_beside_that_of_the_raw_weights(results):  # noqa: F811
    # two validations an epoch from the second on: of the raw weights, then of the average
    results += [(50, 1.0), (40, 1.0), (60, 1.0), (99, 1.0), (55, 1.0)]
    traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "3", "--swa-start-epoch", "2")
    traval.fit()
    found = [(row["val_top1"], row["raw_val_top1"]) for (row,) in recorder.of("epoch")]
    assert found == [(50, 50), (60, 40), (55, 99)]
    assert (traval.progress.best_top1, traval.progress.best_epoch) == (60, 2)
    lines = [line for line, *_ in recorder.of("log") if "validation" in line]
    assert ["raw weights" in line for line in lines] == [False, True, True]


@pytest.mark.parametrize("policy", ["cosine", "constant"])
def test_the_rate_is_that_of_torchs_swalr_from_the_first_epoch_of_the_mean_on(policy):
    args = parse(["--epochs", "4", "--swa-start-epoch", "3", "--swa-lr", "0.02", "--lr-policy", policy])
    without = parse(["--epochs", "4", "--lr-policy", policy])
    ours = LRPolicy(args.optimisation, 5, args.average)
    before = LRPolicy(without.optimisation, 5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=before(9))
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=0)
    for step in range(20):
        if step < 10:
            assert ours(step) == before(step)
            continue
        optimizer.step()
        scheduler.step()
        assert ours(step) == optimizer.param_groups[0]["lr"] == 0.02


def test_without_a_rate_of_its_own_the_schedule_goes_on():
    args = parse(["--epochs", "4", "--swa-start-epoch", "3"])
    ours = LRPolicy(args.optimisation, 5, args.average)
    plain = LRPolicy(args.optimisation, 5)
    assert [ours(step) for step in range(20)] == [plain(step) for step in range(20)]


@pytest.mark.parametrize(
    ("given", "epochs", "first"),
    [("16", 20, 16), ("1", 20, 1), ("0.75", 20, 16), ("0.29", 100, 30), ("0.99", 5, 5), ("0.001", 5, 1)],
)
def test_the_first_epoch_is_given_by_its_number_or_as_a_fraction_of_all(given, epochs, first):
    args = parse(["--epochs", str(epochs), "--swa-start-epoch", given])
    assert args.average.first_averaged_epoch(epochs) == first
    assert build_average(nn.Linear(1, 1), args.average, epochs).first_epoch == first


def test_a_run_interrupted_before_the_averages_validation_ends_with_the_same_bits():
    whole, first, second = (with_batch_norm(*SWA) for _ in range(3))
    whole.fit()
    for epoch in range(2):
        first.train(epoch)
        first.validation(epoch)
    first.train(2)
    second.load_state(copy.deepcopy(first.state()))
    assert equal(first.state(), second.state())
    second.fit()
    assert equal(second.state(), whole.state()) and second.progress.averaged_epochs == 3


def test_what_was_saved_between_the_average_and_its_statistics_is_known():
    traval = with_batch_norm(*SWA)
    state = {"settings": {"swa_start_epoch": 2.0, "ema_bn_batches": 16}}
    moved = []
    for epoch in range(3):
        traval.train(epoch)
        moved.append(average_moved_since_validation(state | traval.state()))
        traval.validation(epoch)
        moved.append(average_moved_since_validation(state | traval.state()))
    assert moved == [False, False, True, False, True, False]
    assert not average_moved_since_validation(state | {"ema": {}, "progress": {"averaged_step": "x"}})


def test_a_run_saves_evaluates_and_refuses_to_drop_it(workplace, capsys):
    run = trained(workplace, "--arch", "fc", "--epochs", 2, "--swa-start-epoch", 2, "--batch-size", 240)
    *lines, last = capsys.readouterr().out.splitlines()
    assert "Weight average: mean of the weights after each epoch from epoch 2 on" in lines
    assert "raw_val_top1" in rows(run)[0] and load(run, "final.pt")["ema"] is not None
    assert main.main(["--evaluate", "--resume", f"{run}/checkpoints/final.pt", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last.partition(" val_epoch")[0]
    assert main.main(["--resume", str(run), "--swa-start-epoch", "1", "--device", "cpu"]) == 2
    assert "--swa-start-epoch 1: " in (line := capsys.readouterr().err) and "made with --swa-start-epoch 2; " in line
    assert main.main(["--resume", str(run), "--resume-override", "--swa-start-epoch", "1", "--device", "cpu"]) == 2
    assert "the checkpoint holds an average that has begun" in capsys.readouterr().err


def test_a_run_that_ends_before_its_average_begins_says_so(workplace, capsys):
    trained(workplace, "--arch", "fc", "--swa-start-epoch", 15, "--max-steps", 2)
    assert "warning: no weights were averaged: --swa-start-epoch begins in epoch 15" in capsys.readouterr().out
