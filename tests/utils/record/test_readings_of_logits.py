"""Readings of logits: probabilities, answers and labels as torch and a plain rule give them."""

from pathlib import Path

import pytest
import torch

from utils.config.settings import UserError
from utils.record.reading import OneLabel, SeveralLabels, reading_of

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [-3.0, -3.0, -2.0], [0.0, 4.0, 0.0]])


def test_a_checkpoint_without_the_keys_is_read_as_of_one_label():
    reading = reading_of({"classes": ["a", "b", "c"]}, 3, Path("old.pt"))
    assert reading == OneLabel() and reading.facts == {"activation": "softmax"} and reading.labels(LOGITS) is None
    torch.testing.assert_close(reading.probabilities(LOGITS), LOGITS.softmax(1), rtol=0, atol=0)
    assert [[place for place, _ in row] for row in reading.likeliest(LOGITS, 2)] == [[0, 2], [2, 0], [1, 0]]


def test_labels_are_those_whose_sigmoid_is_at_least_their_own_threshold_the_likeliest_first():
    reading = reading_of({"multilabel": True, "thresholds": [0.5, 0.9, 0.6]}, 3, Path("new.pt"))
    shares = torch.sigmoid(LOGITS)
    assert [[place for place, _ in row] for row in reading.labels(LOGITS)] == [[0, 2], [], [1, 0]]
    assert reading.labels(LOGITS)[0][1][1] == pytest.approx(float(shares[0, 2]))
    assert reading.facts == {"activation": "sigmoid", "thresholds": [0.5, 0.9, 0.6]}
    assert reading_of({"multilabel": True}, 3, Path("new.pt")) == SeveralLabels((0.5,) * 3)
    assert reading.labels(torch.full((1, 3), float("nan"))) == [[]], "what is no number is at least nothing"


def test_answers_are_the_same_only_if_every_label_is():
    reading = SeveralLabels((0.5, 0.9, 0.6))
    others = LOGITS.clone()
    others[0] += 0.01
    others[2, 1] = 2.0  # 0.88, below its threshold, and still the largest
    assert reading.same(LOGITS, others).tolist() == [True, True, False]
    assert OneLabel().same(LOGITS, others).tolist() == [True, True, True]


@pytest.mark.parametrize("reading", [OneLabel(), SeveralLabels((0.5,) * 3)])
def test_probabilities_give_their_logits_back(reading):
    probabilities = reading.probabilities(LOGITS)
    found = reading.probabilities(reading.logits(probabilities))
    torch.testing.assert_close(found, probabilities, rtol=1e-6, atol=0)  # a few roundings of float32, 6e-8 each
    sure = torch.tensor([[0.0, 1.0, 0.5]])
    assert reading.logits(sure).isfinite().all(), "also of probabilities that float32 has rounded to 0 or 1"


def test_thresholds_for_other_classes_are_one_clear_error():
    with pytest.raises(UserError, match=r"bad.pt: has 2 thresholds for 3 classes"):
        reading_of({"multilabel": True, "thresholds": [0.5, 0.5]}, 3, Path("bad.pt"))
