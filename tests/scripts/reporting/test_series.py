"""Curves are shortened without hiding what matters, and the settings are those of the run."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from scripts.common.output import number
from scripts.reporting import run_parts, run_record, series
from tests.end_to_end.processes import FINAL_LINE
from tests.helpers import trained
from utils.config import arguments


def test_points_are_means_and_extremes_of_equal_parts_at_the_last_step_of_each():
    x = np.arange(1.0, 1001.0)
    y = np.random.default_rng(0).normal(size=1000)
    short = series.summarised(x, y, 50, "mean")
    parts = y.reshape(50, 20)
    assert short["y"] == pytest.approx(parts.mean(1), rel=1e-5)
    assert short["low"] == pytest.approx(parts.min(1), rel=1e-5)
    assert short["high"] == pytest.approx(parts.max(1), rel=1e-5)
    assert short["x"] == list(range(20, 1001, 20))
    assert series.summarised(x, y, 50, "last")["y"] == pytest.approx(parts[:, -1], rel=1e-5)
    validated = series.summarised(x, np.where(x % 15 == 0, x, math.nan), 50, "last")  # not in every epoch
    assert validated["x"] == validated["y"] and len(validated["x"]) == 50


def test_a_short_curve_stays_as_it_is_and_what_is_not_finite_is_a_gap():
    curve = series.summarised(np.arange(3.0), np.array([1.5, math.nan, math.inf]), 10, "mean")
    assert curve == {"x": [0, 1, 2], "y": [1.5, None, None]}
    long = series.summarised(np.arange(40.0), np.where(np.arange(40) < 4, math.nan, 2.0), 10, "mean")
    assert long["y"] == [None] + [2] * 9
    json.dumps([curve, long], allow_nan=False)


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 123456.0, 1234567.0, 1e-12, 0.1 + 0.2, 1e300, 65536.0])
def test_numbers_keep_six_digits(value):
    assert number(value) == pytest.approx(value, rel=5e-6)
    assert isinstance(number(65536.0), int)


def test_the_points_of_many_runs_stay_within_the_budget():
    steps = {name: np.arange(1.0, 10_001.0) for name in ("step", "loss", "top1", "top5", "lr", "gradient_norm")}
    steps["loss_scale"] = np.ones(10_000)
    runs = [run_record.RunRecord(f"run {n}", None, steps=steps) for n in range(64)]
    charts = series.charts(runs)
    assert {chart["title"] for chart in charts} >= {"Loss", "Gradient norm"}
    assert "Loss scale" not in {chart["title"] for chart in charts}, "nothing was scaled"
    assert len(json.dumps(charts)) < 2_000_000


def test_settings_are_read_with_their_values_origins_and_groups(digits_run):
    record = run_record.read(Path(digits_run), "run")
    args = arguments.parse(["--config", f"{digits_run}/config.yaml"])
    values = {name.replace("_", "-"): arguments.in_yaml(value) for name, value in args.values().items()}
    assert {name: setting.value for name, setting in record.settings.items()}.items() <= values.items()
    assert len(record.settings) > 100
    assert record.settings["arch"] == ("fc", "flag", "model") and record.settings["lr"].origin == "default"
    assert record.header["command"].startswith("main.py --device cpu") and "torch" in record.header["versions"]
    assert record.steps["step"].tolist() == list(range(1, 31)) and record.epochs["step"].tolist() == [30]
    assert record.first_batch[:4] == b"\x89PNG" and "Speed/data_wait_percent" in record.scalars
    assert record.missing == ["The end of the training: 1 of 2 epochs are there; --max-steps ended it"]


def test_warnings_of_the_log_are_each_there_once_and_without_notes(tmp_path):
    lines = [
        "warning: careful",
        "Run x",
        "warning: --resume auto: begins a new run; the nearest, y, has --lr 1",
        "warning: careful",
    ]
    (tmp_path / "log.txt").write_text("".join(f"2026-01-31 23:59:59 {line}\n" for line in lines))
    assert run_record.warnings_in(run_record.read_log(tmp_path / "log.txt")) == ["careful"]


def test_a_damaged_or_missing_file_is_named_and_the_rest_is_read(digits_run, tmp_path):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    (folder / "metrics.npz").write_bytes((folder / "metrics.npz").read_bytes()[:300])
    (folder / "class_metrics.csv").write_text("a,b\n1,2\n")
    (folder / "log.txt").unlink()
    record = run_record.read(folder, "run")
    named = [line.partition(":")[0] for line in record.missing]
    assert named == ["Curves of the steps", "Figures of each class", "Warnings"]
    assert record.settings and len(record.epochs["val_top1"]) == 1


@pytest.mark.parametrize(
    ("epochs", "ends", "cut", "places"),
    [
        ([1, 2, 3], [30, 60, 90], None, {15: 0.5, 60: 2, 99: 3.3}),
        ([6, 7], [600, 700], None, {50: 0.5, 650: 6.5}),  # earlier rows are lost
        ([1, 2, 3], [30, 45, 60], None, {15: 0.5, 30: 1, 45: 2, 55: 2 + 2 / 3}),  # a larger batch from epoch 2 on
        ([1, 2, 3], [30, 60, 70], 3, {60: 2, 70: 2 + 1 / 3}),  # cut by --max-steps
        ([1], [20], 1, {20: 1}),
        ([], [], None, {}),
    ],
)
def test_a_step_lies_in_its_own_epoch(epochs, ends, cut, places):
    columns = {"epoch": np.array(epochs, float), "step": np.array(ends, float), "seconds": np.full(len(ends), 36.0)}
    axis = series.time_axis(run_record.RunRecord("run", None, epochs=columns, cut_epoch=cut))
    steps = list(places)
    # as the page does: evenly between two ends, and on after the last
    slope = np.diff(axis["epoch"])[-1:] / np.diff(axis["ends"])[-1:]
    beyond = [slope.sum() * max(0, step - axis["ends"][-1]) for step in steps]
    assert np.interp(steps, axis["ends"], axis["epoch"]) + beyond == pytest.approx(list(places.values()), rel=1e-5)
    assert axis["hours"] == pytest.approx(0.01 * np.arange(len(ends) + 1))


@pytest.mark.parametrize("steps", [1, 28, 46])
def test_the_best_epoch_is_that_of_the_runs_last_line_also_where_max_steps_cuts_a_better_one(steps, tmp_path, capsys):
    folder = trained(tmp_path, "--arch", "fc", "--epochs", 3, "--max-steps", steps)
    line = FINAL_LINE.fullmatch(capsys.readouterr().out.splitlines()[-1])
    best = run_parts.of_training(run_record.read(folder, "run"))[0]
    assert (best.name, best.value) == ("Highest top-1", f"{float(line['best_top1']):.2f} %")
    assert best.small == f"epoch {line['best_epoch']} of {min(2, 1 + steps // 24)}"
