"""Losses against timm's and torch's own."""

import pytest
import torch
from timm.loss import BinaryCrossEntropy
from torch.nn import functional

from utils.config.groups.loss import LOSSES, LossSettings
from utils.config.groups.optimisation import LR_POLICIES
from utils.optim.criterion import CRITERIA, build_criterion
from utils.optim.lr_policy import POLICIES


def test_the_flags_offer_what_the_registries_hold():
    assert tuple(CRITERIA) == LOSSES
    assert tuple(POLICIES) == LR_POLICIES


def batch(classes=7, count=20, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(count, classes, dtype=dtype), torch.randint(0, classes, (count,))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_equals_timms(smoothing):
    logits, targets = batch(dtype=torch.float32)
    loss = build_criterion(LossSettings(loss="bce", label_smoothing=smoothing))(logits, targets)
    assert loss.item() == pytest.approx(BinaryCrossEntropy(smoothing=smoothing)(logits, targets).item(), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_unmixed_shares_have_the_loss_of_their_labels(name, smoothing):
    criterion = build_criterion(LossSettings(loss=name, label_smoothing=smoothing))
    logits, targets = batch()
    shares = functional.one_hot(targets, 7).double()
    assert criterion(logits, shares).item() == pytest.approx(criterion(logits, targets).item(), rel=1e-12)


def test_bce_of_mixed_and_smoothed_shares_is_the_formula():
    logits, _ = batch(classes=4, count=3)
    shares = torch.tensor([[0.3, 0.7, 0, 0], [1, 0, 0, 0], [0, 0.5, 0, 0.5]])
    wanted = 0.9 * shares.double() + 0.1 / 4
    expected = -(wanted * logits.sigmoid().log() + (1 - wanted) * (1 - logits.sigmoid()).log()).mean()
    loss = build_criterion(LossSettings(loss="bce", label_smoothing=0.1))(logits, shares)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-7)  # shares are float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bce_of_half_precision_logits_is_computed_in_float32(dtype):
    logits, targets = batch(dtype=torch.float32)
    criterion = build_criterion(LossSettings(loss="bce", label_smoothing=0.1))
    with torch.autocast("cpu", dtype):
        loss = criterion(logits.to(dtype), targets)
    assert loss.dtype == torch.float32
    assert loss.item() == criterion(logits.to(dtype).float(), targets).item()
