"""A weight of each image in the loss: the weighted mean of closed formulas, whatever ranks and forward passes are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from utils.config import arguments
from utils.config.groups.augmentation import AugmentationSettings
from utils.data.formats.readers import MemoryImages
from utils.data.images.unreadable import REPLACE
from utils.data.loaders import TrainLoader, relative_weights, sample_plan
from utils.data.mixing import Mixing
from utils.data.sampling import first_samples
from utils.data.sources import ResidentSource
from utils.data.transforms import BatchTransform
from utils.optim.criterion import CRITERIA, build_criterion, mean_loss

COUNT = 30
CLASSES = 5
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(COUNT, CLASSES, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, CLASSES, (COUNT,), generator=GENERATOR)
SHARES = torch.rand(COUNT, CLASSES, generator=GENERATOR, dtype=torch.float64).softmax(1)
WEIGHTS = torch.rand(COUNT, generator=GENERATOR, dtype=torch.float64) * 3


def settings(*flags):
    return arguments.parse([*flags])


@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
@pytest.mark.parametrize("loss", CRITERIA)
def test_each_loss_is_the_mean_of_single_images_losses_times_their_weights(loss, targets):
    criterion = build_criterion(settings("--loss", loss, "--label-smoothing", "0.1").loss)
    logits = LOGITS.clone().requires_grad_()
    value = mean_loss(criterion, WEIGHTS, logits, targets)
    singly = sum(WEIGHTS[n] * criterion(LOGITS[n : n + 1], targets[n : n + 1]) for n in range(COUNT)) / COUNT
    torch.testing.assert_close(value, singly, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(value, logits)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0


def test_a_users_loss_may_choose_by_a_mask_and_draw(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom utils.plugin import loss\n@loss('mine')\ndef mine(logits, targets):\n"
        "    terms = torch.nn.functional.cross_entropy(logits, targets, reduction='none')\n"
        "    return terms[targets >= 0].mean() + 0 * torch.rand(()) + 0 * terms.sum().item()\n"
    )
    criterion = build_criterion(settings("--plugin", str(tmp_path / "mine.py"), "--loss", "mine").loss)
    expected = (WEIGHTS * functional.cross_entropy(LOGITS, LABELS, reduction="none")).mean()
    torch.testing.assert_close(mean_loss(criterion, WEIGHTS, LOGITS, LABELS), expected)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 30), (1, 7), (2, 15), (2, 4), (3, 10), (3, 3)])
def test_ranks_and_forward_passes_add_up_to_the_mean_of_the_global_batch(ranks, batch_size):
    args = settings("--batch-size", str(COUNT))
    images = MemoryImages(torch.zeros(COUNT, 1, 8, 8, dtype=torch.uint8), LABELS, weights=WEIGHTS)
    relative = relative_weights(images, args).double()
    assert relative.mean().item() == pytest.approx(1, abs=1e-6)
    criterion = build_criterion(args.loss)
    total = 0
    for rank in range(ranks):
        plan = replace(sample_plan(images, args, 0, 1), batch_size=batch_size, rank=rank, world_size=ranks)
        for one in plan.micro_batches(0, 0):
            rows = torch.from_numpy(one.indices[: one.count])
            total += one.weight * mean_loss(criterion, relative[rows], LOGITS[rows], LABELS[rows]) / ranks
    losses = functional.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(total, (WEIGHTS * losses).sum() / WEIGHTS.sum(), rtol=1e-6, atol=0)


def test_the_mean_is_that_of_the_images_to_train_on():
    args = settings("--train-samples", "10")
    images = MemoryImages(torch.zeros(COUNT, 1, 8, 8, dtype=torch.uint8), LABELS, weights=WEIGHTS)
    chosen = first_samples(COUNT, args)
    assert len(chosen) == 10
    assert relative_weights(images, args)[chosen].mean().item() == pytest.approx(1, abs=1e-6)
    assert relative_weights(MemoryImages(images.pixels, LABELS), args) is None


def test_a_batch_has_the_weights_of_the_images_that_it_shows():
    """Also of one that stands in for an unreadable image, and the mean of both of a mixed pair by their shares."""
    args = settings("--batch-size", "10", "--device", "cpu")
    pixels = torch.zeros(COUNT, 1, 8, 8, dtype=torch.uint8)
    images = MemoryImages(pixels, torch.arange(COUNT), {3: "bad.png"}, weights=torch.arange(COUNT).double())
    source = ResidentSource(images, torch.device("cpu"), REPLACE)
    transform = BatchTransform(8, (0.5,), (0.5,), [], 0, False)
    plan = sample_plan(images, args, 0, 1)
    weights = images.weights.float()
    plain = TrainLoader(source, plan, transform, image_weights=weights)
    for batch in plain.batches(0):
        assert batch.image_weights.tolist() == batch.targets.tolist()  # each image's weight is its label here
    mixed = TrainLoader(
        source, plan, transform, Mixing(AugmentationSettings(mixup=0.2), COUNT, 0), image_weights=weights
    )
    for batch in mixed.batches(0):
        torch.testing.assert_close(batch.image_weights, batch.targets @ weights, rtol=1e-5, atol=1e-5)
    assert {batch.image_weights for batch in TrainLoader(source, plan, transform).batches(0)} == {None}
    assert 3 not in np.concatenate([batch.targets.numpy() for batch in plain.batches(0)])
