"""Which epoch is the best by any metric, and after which one training stops."""

import math

import pytest

from utils.checkpoint.progress import Progress
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.loop.validation import update_best
from utils.record.epoch_scalars import EPOCH_SCALARS, best_metric, metrics, stopping_metric, strange_metrics

LOWER = {"loss", "ece"}


def judged(rows, *flags):
    """The progress after epochs with these rows, and which of them made best.pt."""
    args = parse(list(flags))
    progress = Progress()
    best = []
    for row in rows:
        if progress.stops_early(args):
            break
        others = {"epoch": progress.epoch + 1, "val_loss": 1.0, "val_top1": 0.0, "val_top5": 0.0}
        best.append(update_best(progress, others | row, args, whole=True))
        progress.drop_lr(progress.epoch + 1, args)
        progress.finish_epoch()
    return progress, best


def tops(*values):
    return [{"val_top1": value} for value in values]


def test_every_figure_of_a_validation_but_its_count_is_a_metric_with_a_direction():
    columns = {scalar.column for scalar in EPOCH_SCALARS if scalar.column.startswith("val_")}
    assert {metric.column for metric in metrics().values()} == columns - {"val_count", "val_counted_classes"}
    assert {"loss", "top1", "top5"} <= set(metrics())
    assert {name for name, metric in metrics().items() if metric.lower_is_better} == LOWER & set(metrics())


@pytest.mark.parametrize("prefix", ["", "val_"])
def test_a_metric_is_named_with_or_without_the_columns_prefix(prefix):
    args = parse(["--best-metric", f"{prefix}loss", "--early-stopping", "3"])
    assert best_metric(args.run) == stopping_metric(args.run) == metrics()["loss"]
    args = parse(["--early-stopping", "3", "--early-stopping-metric", f"{prefix}top5"])
    assert (best_metric(args.run).column, stopping_metric(args.run).column) == ("val_top1", "val_top5")


def test_an_unknown_metric_is_answered_with_the_nearest_names():
    assert strange_metrics(parse([]).run) == []
    (line,) = strange_metrics(parse(["--best-metric", "top-1", "--early-stopping", "3"]).run)
    assert line.startswith("--best-metric 'top-1': no such figure") and "did you mean top1" in line
    lines = strange_metrics(parse(["--best-metric", "count", "--early-stopping-metric", "zzz"]).run)
    assert (
        len(lines) == 2 and lines[1].startswith("--early-stopping-metric 'zzz'") and "there are loss, top1" in lines[1]
    )
    with pytest.raises(UserError, match="--best-metric"):
        best_metric(parse(["--best-metric", "count"]).run)


def test_by_loss_the_lowest_is_the_best_and_best_top1_is_the_top1_of_that_epoch():
    rows = [{"val_loss": loss, "val_top1": top1} for loss, top1 in ((2.0, 80.0), (1.0, 70.0), (1.5, 90.0))]
    progress, best = judged(rows, "--best-metric", "loss")
    assert best == [True, True, False]
    assert (progress.best_epoch, progress.best_top1, progress.best_value) == (2, 70.0, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["loss", "top5"])
def test_what_is_not_finite_never_wins(bad, metric):
    rows = [{f"val_{metric}": value} for value in (bad, 3.0, bad)]
    progress, best = judged(rows, "--best-metric", metric, "--early-stopping", "9")
    assert best == [False, True, False] and progress.best_epoch == progress.stopping_epoch == 2


def test_a_validation_whose_loss_is_not_finite_is_not_the_best_by_another_figure():
    progress, best = judged([{"val_top1": 10.0, "val_loss": math.nan}], "--early-stopping", "2")
    assert best == [False] and progress.best_value is progress.stopping_value is None


def test_a_cut_epoch_makes_the_best_only_until_there_is_a_whole_one():
    args = parse(["--early-stopping", "3"])
    progress = Progress()
    row = {"epoch": 1, "val_loss": 1.0, "val_top1": 90.0}
    assert update_best(progress, row, args, whole=False)
    assert (progress.best_epoch, progress.best_value, progress.stopping_value) == (0, 90.0, None)
    assert update_best(progress, row | {"val_top1": 50.0}, args, whole=True)
    assert (progress.best_epoch, progress.best_value, progress.stopping_value) == (1, 50.0, 50.0)
    progress.finish_epoch()
    assert not update_best(progress, row | {"epoch": 2}, args, whole=False) and progress.best_top1 == 50.0


@pytest.mark.parametrize(
    ("flags", "values", "epochs"),
    [
        ("--early-stopping 2", (50, 60, 55, 60, 70), 4),  # equal is no improvement
        ("--early-stopping 2", (50, 60, 55, 61, 60, 61, 99), 6),
        ("--early-stopping 1", (50, 40, 60), 2),
        ("--early-stopping 3", (math.nan,) * 5, 3),
        ("--early-stopping 2 --early-stopping-delta 5", (50, 54, 55, 99), 3),  # 5 more is not more than 5 more
        ("--early-stopping 2 --early-stopping-delta 5", (50, 54, 55.5, 56, 57, 99), 5),
        ("", (50, 40, 30, 20, 10), 5),
    ],
)
def test_training_stops_after_so_many_epochs_without_improvement(flags, values, epochs):
    progress, _ = judged(tops(*values), *flags.split())
    assert progress.epoch == epochs
    assert progress.is_finished(parse(flags.split())) == bool(flags)


def test_early_stopping_watches_a_metric_of_its_own():
    rows = [{"val_loss": loss, "val_top1": top1} for loss, top1 in ((1.0, 50.0), (2.0, 60.0), (3.0, 70.0), (0.5, 80.0))]
    progress, best = judged(rows, "--early-stopping", "2", "--early-stopping-metric", "loss")
    assert best == [True, True, True] and (progress.stopping_value, progress.stopping_epoch) == (1.0, 1)


def test_a_checkpoint_from_before_goes_on_with_its_best_top1_and_waits_from_there():
    state = Progress(epoch=7, step=70, best_top1=60.0, best_epoch=5).state()
    older = {
        name: value for name, value in state.items() if name not in ("best_value", "stopping_value", "stopping_epoch")
    }
    progress = Progress.from_state(older)
    assert (progress.best_value, progress.stopping_value, progress.stopping_epoch) == (60.0, None, 7)
    none = Progress.from_state(older | {"best_top1": -1.0, "best_epoch": 0})
    assert none.best_value is None
    args = parse(["--early-stopping", "2"])
    assert not progress.is_trained(args)
    assert not update_best(progress, {"epoch": 8, "val_loss": 1.0, "val_top1": 60.0}, args, whole=True), (
        "as good as the best is no better"
    )
