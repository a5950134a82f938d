"""Losses of several labels an image: against torch and timm, the same for any ranks and passes, missing ones masked."""

import math

import pytest
import timm.loss
import torch
from torch.nn import functional

from utils.config.groups.data import DataSettings
from utils.config.groups.loss import LossSettings
from utils.config.settings import Settings, UserError
from utils.optim.class_weights import class_weights
from utils.optim.criterion import build_criterion

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(24, 5, generator=GENERATOR, dtype=torch.float64) * 2
TARGETS = (torch.rand(24, 5, generator=GENERATOR) < 0.4).double()
MISSING = torch.rand(24, 5, generator=GENERATOR) < 0.3
PARTLY = TARGETS.masked_fill(MISSING, math.nan)
KNOWN = float((~MISSING).sum() / 24)
LOSSES = ["bce", "asymmetric"]


def loss(name="bce", weights=None, known=5.0, **settings):
    return build_criterion(LossSettings(loss=name, **settings), weights, known)


def test_bce_is_torchs_mean_over_images_and_classes():
    expected = functional.binary_cross_entropy_with_logits(LOGITS, TARGETS)
    torch.testing.assert_close(loss()(LOGITS, TARGETS), expected)


@pytest.mark.parametrize("gammas", [(4.0, 0.0), (4.0, 1.0), (2.0, 2.0), (0.5, 0.0)])
@pytest.mark.parametrize("clip", [0.05, 0.0, 0.3])
def test_asymmetric_loss_is_timms_sum_over_the_number_of_cells(gammas, clip):
    timms = timm.loss.AsymmetricLossMultiLabel(gamma_neg=gammas[0], gamma_pos=gammas[1], clip=clip)
    ours = loss("asymmetric", asymmetric_gamma_neg=gammas[0], asymmetric_gamma_pos=gammas[1], asymmetric_clip=clip)
    # Image by image, of which older versions give the sum as well. In float32: 120 terms of a few operations each.
    images = zip(LOGITS.split(1), TARGETS.split(1), strict=True)
    expected = sum(timms(*image).double() for image in images) / LOGITS.numel()
    torch.testing.assert_close(ours(LOGITS, TARGETS), expected, rtol=1e-5, atol=0)
    # Its gradient is finite where a probability is below the clip, and where float32 cannot tell one from 0 or 1.
    logits = torch.tensor([[-200.0, 200.0, -3.0], [200.0, -200.0, 0.0]], requires_grad=True)
    loss("asymmetric", known=3.0, asymmetric_gamma_neg=gammas[0], asymmetric_gamma_pos=gammas[1], asymmetric_clip=clip)(
        logits, torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    ).backward()
    assert logits.grad.isfinite().all()


def test_the_papers_gammas_and_clip_are_the_defaults():
    defaults = LossSettings()
    chosen = (defaults.asymmetric_gamma_neg, defaults.asymmetric_gamma_pos, defaults.asymmetric_clip)
    assert chosen == (4.0, 0.0, 0.05)


@pytest.mark.parametrize("name", LOSSES)
def test_a_missing_label_has_no_term_and_no_gradient_and_the_denominator_is_the_mean_of_known_ones(name):
    logits = LOGITS.clone().requires_grad_()
    found = loss(name, known=KNOWN)(logits, PARTLY)
    each = loss(name, known=1.0)  # of one image and class: the term itself
    terms = [each(LOGITS[i, j].view(1, 1), TARGETS[i, j].view(1, 1)) for i, j in (~MISSING).nonzero().tolist()]
    torch.testing.assert_close(found.detach(), sum(terms) / (~MISSING).sum())  # the mean over known cells
    found.backward()
    assert (logits.grad[MISSING] == 0).all()
    assert name == "asymmetric" or (logits.grad[~MISSING] != 0).all()  # which has none below its clip


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", [(24,), (8, 8, 8), (1, 23), (5, 19)])
def test_the_gradient_is_that_of_one_batch_however_ranks_and_passes_share_it(name, sizes):
    """Each pass counts with its share of the images, as training weighs it."""
    criterion = loss(name, torch.linspace(1, 3, 5), KNOWN)
    whole = LOGITS.clone().requires_grad_()
    criterion(whole, PARTLY).backward()
    parted = LOGITS.clone().requires_grad_()
    for logits, targets in zip(parted.split(sizes), PARTLY.split(sizes), strict=True):
        (criterion(logits, targets) * len(logits) / 24).backward()
    torch.testing.assert_close(parted.grad, whole.grad)


def test_smoothing_moves_targets_towards_a_half_and_weights_are_torchs_pos_weight():
    weights = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    smoothed = TARGETS * 0.8 + 0.1
    expected = functional.binary_cross_entropy_with_logits(LOGITS, smoothed, pos_weight=2 * weights)
    found = loss(weights=weights.float(), label_smoothing=0.2, bce_pos_weight=2.0)(LOGITS, TARGETS)
    torch.testing.assert_close(found, expected)
    summed = loss(bce_sum=True)(LOGITS, TARGETS)
    torch.testing.assert_close(summed, 5 * functional.binary_cross_entropy_with_logits(LOGITS, TARGETS))


def test_balanced_weights_make_both_sides_of_each_class_weigh_the_same_among_known_labels():
    labels = torch.where(MISSING, -1, TARGETS.long()).to(torch.int8)
    weights = class_weights(labels, "abcde", "balanced")
    for number in range(5):
        own = labels[:, number][labels[:, number] >= 0]
        assert weights[number] * (own == 1).sum() == pytest.approx(int((own == 0).sum()))
    assert class_weights(torch.zeros(3, 2, dtype=torch.int8), "ab", "balanced").tolist() == [1, 1]


def test_half_precision_logits_are_computed_in_float32():
    for name in LOSSES:
        found = loss(name)(LOGITS.bfloat16(), TARGETS.float())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, loss(name)(LOGITS.bfloat16().float(), TARGETS.float()))


def test_several_labels_change_two_defaults_and_refuse_what_takes_one():
    changed = Settings(origins=dict.fromkeys(("loss", "best_metric"), "default")).of_several_labels()
    assert (changed.loss.loss, changed.run.best_metric) == ("bce", "map")
    for name in ("cross-entropy", "focal"):
        settings = Settings(loss=LossSettings(loss=name), origins={"loss": "flag", "best_metric": "flag"})
        with pytest.raises(UserError, match=f"^--loss {name} takes one label an image, .*--loss bce or asymmetric$"):
            settings.of_several_labels()
    with pytest.raises(UserError, match="^--teacher t compares the probabilities of classes that exclude each other"):
        Settings(loss=LossSettings(teacher="t"), origins={"best_metric": "flag"}).of_several_labels()
    with pytest.raises(UserError, match="^--tta flip-shift-doubt compares the likeliest classes; the images"):
        Settings(data=DataSettings(tta="flip-shift-doubt"), origins={}).of_several_labels()
    Settings(data=DataSettings(tta="flip-shift"), origins={}).of_several_labels()
