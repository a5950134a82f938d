"""Figures of predictions, held against scikit-learn, the run's own validation and plain loops."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, log_loss, precision_recall_fscore_support

from scripts.reporting.analysis import Analysis, turns
from utils.record.class_metrics import ClassReport
from utils.record.metrics import ValidationMeter


def random_analysis(n=400, classes=7, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes - 1, n)  # the last class has no sample
    logits = generator.normal(size=(n, classes)).astype(np.float32) * 2
    logits[np.arange(n), labels] += 1.5
    return Analysis(logits, labels)


def softmax(analysis):
    return torch.from_numpy(analysis.logits).double().softmax(1).numpy()


def test_cells_are_scikit_learns_confusion_matrix_with_mistakes_first():
    analysis = random_analysis()
    matrix = np.zeros((7, 7), dtype=int)
    for truth, predicted, count in analysis.cells:
        matrix[truth, predicted] = count
    assert (matrix == confusion_matrix(analysis.labels, analysis.predicted, labels=range(7))).all()
    mistakes = [pair.count for pair in analysis.cells if pair.truth != pair.predicted]
    assert mistakes == sorted(mistakes, reverse=True) and analysis.cells[0].count == mistakes[0]
    assert all(len(analysis.samples_of(pair)) == pair.count for pair in analysis.cells)


def test_counts_of_classes_give_scikit_learns_precision_and_recall():
    analysis = random_analysis()
    expected = precision_recall_fscore_support(analysis.labels, analysis.predicted, labels=range(7), zero_division=0)
    assert analysis.hits / np.maximum(1, analysis.taken) == pytest.approx(expected[0])
    assert analysis.hits / np.maximum(1, analysis.support) == pytest.approx(expected[1])
    assert (analysis.support == expected[3]).all()


def test_loss_and_probabilities_are_those_of_the_softmax():
    analysis = random_analysis()
    assert analysis.loss == pytest.approx(log_loss(analysis.labels, softmax(analysis), labels=range(7)))
    assert analysis.confidence == pytest.approx(softmax(analysis).max(1))
    assert analysis.most_likely(3, 7) == [
        (place, pytest.approx(softmax(analysis)[3, place])) for place in np.argsort(-softmax(analysis)[3])
    ]


def test_calibration_and_top1_are_those_of_the_validation():
    analysis = random_analysis(seed=4)
    meter = ValidationMeter(1, torch.device("cpu"))
    logits = torch.from_numpy(analysis.logits)
    labels = torch.from_numpy(analysis.labels)
    meter.update(0, torch.zeros(()), logits, labels)
    report = ClassReport.from_sums(meter.class_sums(analysis.classes))
    assert analysis.calibration_error == pytest.approx(report.ece, rel=1e-5)
    assert (analysis.hits == report.right).all() and (analysis.taken == report.predicted).all()
    assert (
        sum(one.count for one in analysis.bins) == len(analysis.labels) == sum(map(sum, analysis.confidence_counts()))
    )


def test_the_first_of_equal_classes_is_the_prediction():
    analysis = Analysis(np.zeros((4, 3), dtype=np.float32), np.array([0, 1, 2, 0]))
    assert analysis.predicted.tolist() == [0, 0, 0, 0] and analysis.top1 == 50


def test_mistakes_come_surest_first_and_hits_least_sure_first():
    analysis = random_analysis()
    sure = softmax(analysis).max(1)
    right = analysis.logits.argmax(1) == analysis.labels
    wrong = sorted((n for n in range(400) if not right[n]), key=lambda n: -sure[n])
    hits = sorted((n for n in range(400) if right[n]), key=lambda n: sure[n])
    assert analysis.worst_mistakes(9).tolist() == wrong[:9]
    assert analysis.least_certain_hits(9).tolist() == hits[:9]


def test_classes_that_are_mistaken_for_each_other_stand_together():
    labels = np.repeat(np.arange(6), 10)
    predicted = labels.copy()
    for one, other in ((0, 3), (1, 5), (2, 4)):  # half of each is taken for its partner
        predicted[(labels == one) & (np.arange(60) % 2 == 0)] = other
        predicted[(labels == other) & (np.arange(60) % 2 == 0)] = one
    order = Analysis(np.eye(6, dtype=np.float32)[predicted], labels).order_by_confusion()
    assert sorted(order) == list(range(6))
    assert all(abs(order.index(one) - order.index(other)) == 1 for one, other in ((0, 3), (1, 5), (2, 4)))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_outputs_without_probabilities_are_refused_and_an_impossible_class_is_not(number):
    with pytest.raises(ValueError, match="NaN"):
        Analysis(np.array([[0.0, number]], dtype=np.float32), np.array([0]))
    assert Analysis(np.array([[0.0, -np.inf]], dtype=np.float32), np.array([0])).confidence == [1.0]


def test_turns_take_the_first_of_each_before_the_second_of_any():
    assert turns([[1, 2, 3], [4], [], [5, 1]]) == [1, 4, 5, 2, 3]
