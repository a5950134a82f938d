"""Losses against timm's and torch's own."""

import pytest
import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch.nn import functional

from utils.config.groups.loss import LOSSES, LossSettings
from utils.optim.criterion import CRITERIA, build_criterion


def test_the_flag_offers_what_the_registry_holds():
    assert tuple(CRITERIA) == LOSSES, "CRITERIA and LOSSES (utils/config/groups/loss.py) name the same in one order"


def batch(classes=7, count=20, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(count, classes, dtype=dtype), torch.randint(0, classes, (count,))


# ------------------------------------------------------------------------------------------- soft targets


def soft(classes=7, count=20):
    """Shares of two classes each, as mixing makes them."""
    torch.manual_seed(1)
    kept = torch.rand(count, 1)
    own, other = (functional.one_hot(torch.randint(0, classes, (count,)), classes) for _ in range(2))
    return kept * own + (1 - kept) * other


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_cross_entropy_of_labels_and_of_soft_targets_is_timms_of_smoothed_shares(smoothing):
    logits, labels = batch(dtype=torch.float32)
    criterion = build_criterion(LossSettings(label_smoothing=smoothing))
    for given, shares in ((labels, functional.one_hot(labels, 7)), (soft(), soft())):
        expected = SoftTargetCrossEntropy()(logits, (1 - smoothing) * shares + smoothing / 7)
        assert criterion(logits, given).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("threshold", "summed", "positive"), [(None, False, None), (0.0, True, None), (0.2, False, 3.0), (0.6, True, 3.0)]
)
@pytest.mark.parametrize("targets", ["labels", "soft"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_with_threshold_sum_and_positive_weight_is_timms(threshold, summed, positive, targets, smoothing):
    """timm smooths labels itself and mixed targets when it mixes them."""
    logits, labels = batch(dtype=torch.float32)
    given = labels if targets == "labels" else soft()
    settings = LossSettings(
        loss="bce", label_smoothing=smoothing, bce_target_thresh=threshold, bce_sum=summed, bce_pos_weight=positive
    )
    theirs = BinaryCrossEntropy(smoothing, threshold, sum_classes=summed, pos_weight=positive)
    expected = theirs(logits, given if targets == "labels" else (1 - smoothing) * given + smoothing / 7).item()
    assert build_criterion(settings)(logits, given).item() == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------------------------------- focal


def focal(**more):
    return build_criterion(LossSettings(loss="focal", **more))


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 5.0])
def test_focal_loss_of_labels_is_the_papers_formula(gamma):
    logits, labels = batch()
    p = functional.softmax(logits, 1)[torch.arange(len(labels)), labels]
    expected = (-((1 - p) ** gamma) * p.log()).mean()
    assert focal(focal_gamma=gamma)(logits, labels).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("targets", ["labels", "soft"])
def test_focal_loss_without_its_exponent_is_torchs_cross_entropy(smoothing, targets):
    logits, labels = batch(dtype=torch.float32)
    given = labels if targets == "labels" else soft()
    expected = functional.cross_entropy(logits, given, label_smoothing=smoothing).item()
    assert focal(focal_gamma=0.0, label_smoothing=smoothing)(logits, given).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_focal_loss_of_a_certain_network_has_a_finite_gradient(gamma, smoothing):
    logits = torch.tensor([[200.0, 0.0, 0.0], [0.0, -200.0, 0.0]], requires_grad=True)
    loss = focal(focal_gamma=gamma, label_smoothing=smoothing)(logits, torch.tensor([0, 1]))
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()


# ----------------------------------------------------------------------------------------- class weights

WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 1.5, 1.25, 0.5])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_multiply_the_loss_of_each_image(name, smoothing):
    """By its label's weight, or with bce by the mean over its shares: of another loss, shares keep their own."""
    logits, labels = batch()
    settings = LossSettings(loss=name, label_smoothing=smoothing)
    plain = build_criterion(settings)
    weighted = build_criterion(settings, WEIGHTS)
    for targets in (labels, soft().double()) if name == "bce" else (labels,):
        weights = WEIGHTS.double()[labels] if targets is labels else targets @ WEIGHTS.double()
        each = torch.stack([plain(logits[i : i + 1], targets[i : i + 1]) for i in range(len(labels))])
        assert weighted(logits, targets).item() == pytest.approx((weights * each).mean().item(), rel=1e-12)


@pytest.mark.parametrize("name", ["cross-entropy", "focal"])
def test_weighted_cross_entropy_of_mixed_shares_is_torchs_and_smoothing_that_of_the_images_weights(name):
    logits = batch()[0]
    targets = soft().double()
    weights = WEIGHTS.double()
    expected = functional.cross_entropy(logits, targets, weights)
    settings = LossSettings(loss=name, focal_gamma=0.0)
    assert build_criterion(settings, WEIGHTS)(logits, targets).item() == pytest.approx(expected.item(), rel=1e-12)
    even = -((targets @ weights) * logits.log_softmax(1).mean(1)).mean()
    settings = LossSettings(loss=name, focal_gamma=0.0, label_smoothing=0.1)
    found = build_criterion(settings, WEIGHTS)(logits, targets).item()
    assert found == pytest.approx((0.9 * expected + 0.1 * even).item(), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_parts_of_a_batch_weighted_by_their_sizes_have_its_loss_and_unmixed_shares_that_of_labels(
    name, weights, smoothing
):
    criterion = build_criterion(LossSettings(loss=name, label_smoothing=smoothing), weights)
    logits, labels = batch()
    whole = criterion(logits, labels).item()
    parts = (
        sum(n * criterion(logits[part], labels[part]).item() for n, part in ((3, slice(3)), (17, slice(3, 20)))) / 20
    )
    assert parts == pytest.approx(whole, rel=1e-12)
    assert criterion(logits, functional.one_hot(labels, 7).double()).item() == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_logits_are_computed_in_float32(name, weights, dtype):
    criterion = build_criterion(LossSettings(loss=name), weights)
    logits, labels = batch(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        loss = criterion(logits.to(dtype), labels)
    assert loss.dtype == torch.float32 and loss.item() == criterion(logits.to(dtype).float(), labels).item()


@pytest.mark.parametrize("name", LOSSES)
def test_class_weights_of_mixed_images_are_not_rounded_by_autocast(name):
    criterion = build_criterion(LossSettings(loss=name, label_smoothing=0.1), WEIGHTS)
    logits, _ = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = criterion(logits, soft())
    assert loss.item() == criterion(logits, soft()).item()
