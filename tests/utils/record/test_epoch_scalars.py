"""An epoch's row and points, of all that an epoch can have."""

import math

import numpy as np
import pytest
import torch

from utils.record.epoch_scalars import EITHER, EPOCH_SCALARS, ONE, RAW_SCALARS, SEVERAL, points_of, row_of
from utils.record.metrics import BINS, UNIT, ClassReport, Report
from utils.record.multilabel import MultilabelReport

FACTS = {
    "epoch": 2,
    "step": 46,
    "lr": 0.05,
    "max_val_batches": None,
    "images_per_second": 123.5,
    "seconds": 7.654,
    "skipped_steps": 2,
    "partly_skipped_steps": 1,
    "unreadable_images": None,
}
LOSSES = {"criterion": 1.5, "grad_penalty": 0.5}
TRAINING = Report(2.0, 50.0, 100.0, 4)
VALIDATION = Report(0.5, 80.0, 99.0, 360)
ALWAYS = {
    "epoch": 2,
    "step": 46,
    "lr": 0.05,
    "train_loss": 2.0,
    "train_top1": 50.0,
    "train_top5": 100.0,
    "val_loss": 0.5,
    "val_top1": 80.0,
    "val_top5": 99.0,
    "val_count": 360,
    "images_per_second": 123.5,
    "seconds": 7.654,
    "skipped_steps": 2,
    "partly_skipped_steps": 1,
}
NAMED = {"train_criterion": 1.5, "train_grad_penalty": 0.5}
TEST = {"Loss/Test": 0.5, "Top1/Test": 80.0, "Top5/Test": 99.0}


def test_a_plain_epoch_has_these_columns_in_this_order_and_three_points():
    row = row_of(FACTS, TRAINING, VALIDATION, None, LOSSES)
    assert list(row.items()) == list((ALWAYS | NAMED).items())
    assert points_of(row) == TEST


def test_a_loss_with_the_name_of_a_figure_leaves_the_figures_column_alone():
    row = row_of(FACTS, TRAINING, VALIDATION, None, {"loss": 1.5, "top1": 0.4, "aux": 0.1})
    assert list(row.items()) == list((ALWAYS | {"train_aux": 0.1}).items())


def test_a_users_metric_has_its_own_column_and_changes_no_figure():
    validation = Report(0.5, 80.0, 99.0, 360, own={"mine": 3.0, "guessing_loss": 4.0})
    own = {"val_mine": 3.0, "val_guessing_loss": 4.0}
    assert list(row_of(FACTS, TRAINING, validation, None, LOSSES).items()) == list((ALWAYS | own | NAMED).items())


def test_raw_weights_and_unreadable_images_have_columns_where_there_can_be_some():
    row = row_of(FACTS | {"unreadable_images": 3}, TRAINING, VALIDATION, Report(0.0, 70.0, 98.0, 360), LOSSES)
    raw = {"raw_val_loss": 0.0, "raw_val_top1": 70.0, "raw_val_top5": 98.0}
    assert list(row.items()) == list((ALWAYS | {"unreadable_images": 3} | NAMED | raw).items())
    assert points_of(row) == TEST | {"Loss/Test_raw": 0.0, "Top1/Test_raw": 70.0, "Top5/Test_raw": 98.0}


def test_a_validation_that_is_cut_says_so_in_its_row():
    row = row_of(FACTS | {"max_val_batches": 2}, TRAINING, VALIDATION, None, LOSSES)
    assert row.pop("max_val_batches") == 2
    assert row == row_of(FACTS, TRAINING, VALIDATION, None, LOSSES)


def test_a_validation_by_class_has_five_further_columns_and_points_in_percent_and_three_of_what_it_shows():
    bins = np.zeros((3, BINS + 1), dtype=int)
    bins[:, 13] = 8, 8, 7 * UNIT  # of a mean confidence of 7/8, and all right
    by_class = ClassReport(np.array([3, 1]), np.array([2, 2]), np.array([2, 1]), bins)
    row = row_of(FACTS, TRAINING, Report(0.5, 80.0, 99.0, 360, by_class), None, LOSSES)
    expected = {
        "macro_precision": (1 + 1 / 2) / 2, "macro_recall": (2 / 3 + 1) / 2, "macro_f1": (4 / 5 + 2 / 3) / 2,
        "balanced_accuracy": (2 / 3 + 1) / 2, "ece": 0.125,
    }  # fmt: skip
    shown = {"guessing_loss": -0.75 * math.log(0.75) - 0.25 * math.log(0.25), "commonest_answer": 50.0}
    assert list(row) == [
        *ALWAYS,
        *(f"val_{name}" for name in expected),
        "guessing_loss",
        "answers_nats",
        "commonest_answer",
        *NAMED,
    ]
    assert {name: row[name] for name in shown} == pytest.approx(shown, rel=1e-12)
    for name, value in expected.items():
        assert row[f"val_{name}"] == pytest.approx(100 * value, rel=1e-12)
    tags = ("Macro_Precision", "Macro_Recall", "Macro_F1", "Balanced_Accuracy", "Calibration_Error")
    points = {f"{tag}/Test": row[f"val_{name}"] for tag, name in zip(tags, expected, strict=True)}
    assert points_of(row) == TEST | points


@pytest.mark.parametrize(
    ("labels", "training", "validation"),
    [
        (ONE, TRAINING, Report(0.5, 80.0, 99.0, 4, ClassReport.of(torch.eye(4), torch.arange(4)))),
        (SEVERAL, MultilabelReport.of(torch.eye(4), torch.eye(4)), MultilabelReport.of(torch.eye(4), torch.eye(4))),
    ],
)
def test_every_column_has_a_figure(labels, training, validation):
    facts = FACTS | {"max_val_batches": 2, "unreadable_images": 3}
    wanted = {scalar.column for scalar in (*EPOCH_SCALARS, *RAW_SCALARS) if scalar.labels in (labels, EITHER)}
    row = row_of(facts, training, validation, validation, {})
    assert wanted - row.keys() == set(), "neither Reporter.row (utils/record/reporter.py) nor a report has that figure"


def test_a_late_validations_row_has_no_figure_of_the_training_that_was_counted_before():
    row = row_of(FACTS | {"images_per_second": None}, None, VALIDATION, None, {})
    unknown = ("train_loss", "train_top1", "train_top5", "images_per_second")
    assert list(row.items()) == [(name, value) for name, value in ALWAYS.items() if name not in unknown]
    assert points_of(row) == TEST
