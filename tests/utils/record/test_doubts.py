"""A training that has come to nothing is said so after its last epoch; one that has learned something is not."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import main
from models.small import FullyConnected
from utils.data.sets.readers import MemoryImages
from utils.record.class_metrics import ClassReport
from utils.record.metrics import Report
from utils.record.summary import doubts

CLASSES = ("cat", "dog", "cow")


def data_of(labels):
    labels = torch.tensor(labels)
    return SimpleNamespace(classes=CLASSES, validation=MemoryImages(torch.zeros(len(labels), 1, 2, 2), labels))


SEVENTHS = data_of([1, 1, 1, 0, 0, 2, 2])  # 3 of 7 are dogs


def report(top1=90.0, loss=0.5):
    return Report(loss, top1, 100.0, 7)


def test_a_good_result_is_left_uncommented():
    assert doubts(report(), SEVENTHS, 100) == []
    assert doubts(report(top1=100 * 4 / 7), SEVENTHS, 100) == []


def test_the_most_frequent_classs_share_is_that_of_the_images_that_were_counted():
    """Five of the seven: two cats could not be read, or were cut off."""
    counted = ClassReport(np.array([0, 3, 2]), np.array([0, 5, 0]), np.array([0, 3, 0]), ece=0.0)
    (line,) = doubts(Report(0.5, 60.0, 100.0, 5, counted), SEVENTHS, 9)
    assert "always answering dog, the class of 60.00 % of" in line


@pytest.mark.parametrize("correct", [0, 2, 3])
def test_no_more_than_the_most_frequent_classs_share_is_told_with_class_share_and_steps(correct):
    (line,) = doubts(report(top1=100 * correct / 7), SEVENTHS, 1234)
    assert f"val_top1 {100 * correct / 7:.2f} after 1,234 step(s) is no better than always answering dog" in line
    assert "the class of 42.86 % of the validation images" in line and "what usually helps" in line


def test_one_class_alone_says_nothing_of_a_network():
    assert doubts(report(top1=100.0), data_of([1, 1, 1]), 5) == []


@pytest.mark.parametrize(("loss", "told"), [(10 * math.log(3) - 0.01, 0), (10 * math.log(3) + 0.01, 1)])
def test_a_loss_above_ten_times_that_of_guessing_is_told(loss, told):
    lines = doubts(report(loss=loss), SEVENTHS, 7)
    assert len(lines) == told
    assert all("ten times that of guessing (ln 3 = 1.10)" in line and "a lower --lr" in line for line in lines)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_as_such(loss):
    (line,) = doubts(report(loss=loss), SEVENTHS, 7)
    assert line.startswith(f"val_loss is {loss} after 7 step(s): the network's outputs are not finite any more; ")


def test_a_run_that_came_to_nothing_says_so_before_its_last_line_and_in_its_log(tmp_path, capsys):
    weights = FullyConnected(10, 1, 8).state_dict()
    weights["layers.5.weight"].zero_()
    weights["layers.5.bias"].copy_(torch.eye(10)[0] * 1000)  # always the first class, and sure of it
    torch.save(weights, tmp_path / "sure.pt")
    flags = ["--device", "cpu", "--arch", "fc", "--weights", tmp_path / "sure.pt", "--lr", "1e-9", "--max-steps", "1"]
    assert main.main([*map(str, flags), "--output", str(tmp_path), "--no-progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines[:-1] if line.startswith("warning: val_")]
    assert len(told) == 2 and told[0].startswith("warning: val_loss 9") and "after 1 step(s)" in told[1]
    (log,) = tmp_path.rglob("log.txt")
    assert all(line in log.read_text() for line in told)


def test_a_run_that_learns_says_neither(tmp_path, capsys):
    flags = ["--device", "cpu", "--arch", "fc", "--epochs", "1", "--output", str(tmp_path), "--no-progress"]
    assert main.main(flags) == 0
    assert "warning" not in capsys.readouterr().out
