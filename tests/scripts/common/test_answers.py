"""A network's answers against scikit-learn, closed formulas and plain loops."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from scripts.common.answers import Answers


def random_answers(n=400, classes=7, seed=0, margin=1.5):
    """Answers that are better than chance; the last class has no image, but is predicted."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), labels] += margin
    return Answers(logits, labels)


def softmax(answers):
    return answers.logits.double().softmax(1).numpy()


def test_probabilities_are_those_of_the_softmax():
    answers = random_answers()
    shares = softmax(answers)
    assert answers.confidence == pytest.approx(shares.max(1))
    assert -np.log(answers.label_probability).mean() == pytest.approx(log_loss(answers.truth, shares, labels=range(7)))


def test_the_first_of_equal_classes_is_the_prediction():
    answers = Answers(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))
    assert answers.predicted.tolist() == [0, 0, 0, 0] and answers.top1 == 50


def test_mistakes_come_most_confident_first_and_hits_least_confident_first():
    answers = random_answers()
    confidence = softmax(answers).max(1)
    wrong = sorted(np.flatnonzero(~answers.right), key=lambda n: -confidence[n])
    hits = sorted(np.flatnonzero(answers.right), key=lambda n: confidence[n])
    assert answers.most_confident(np.flatnonzero(~answers.right)).tolist() == wrong
    assert answers.least_confident(np.flatnonzero(answers.right)).tolist() == hits
    for cell in answers.cells:
        among = hits if cell.is_right else wrong
        inside = [n for n in among if (answers.truth[n], answers.predicted[n]) == cell[:2]]
        assert answers.images_of(cell).tolist() == inside


def test_classes_that_are_mistaken_for_each_other_stand_together(monkeypatch):
    labels = np.repeat(np.arange(6), 10)
    predicted = labels.copy()
    for one, other in ((0, 3), (1, 5), (2, 4)):  # half of each is taken for its partner
        predicted[(labels == one) & (np.arange(60) % 2 == 0)] = other
        predicted[(labels == other) & (np.arange(60) % 2 == 0)] = one
    answers = Answers(torch.eye(6)[predicted], torch.from_numpy(labels))
    order = answers.order_by_confusion()
    assert sorted(order) == list(range(6))
    assert all(abs(order.index(one) - order.index(other)) == 1 for one, other in ((0, 3), (1, 5), (2, 4)))
    monkeypatch.setattr("scripts.common.answers.ORDERED_CLASSES", 5)
    assert answers.order_by_confusion() == list(range(6)), "too many to be ordered"
