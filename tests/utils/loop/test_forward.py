"""One forward pass: logits, the loss to minimise, its terms; with autocast around network and criterion only."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from utils.config.settings import UserError
from utils.loop.forward import forward

OFF = torch.amp.GradScaler("cpu", enabled=False)
ON = torch.amp.GradScaler("cpu", init_scale=2.0**10)


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def batch_of(count=6, filled=0):
    generator = torch.Generator().manual_seed(1)
    return SimpleNamespace(images=torch.randn(count + filled, 5, generator=generator), targets=torch.arange(count) % 3)


def two_terms(logits, targets):
    return {"entropy": functional.cross_entropy(logits, targets), "size": 0.1 * logits.square().mean()}


def test_the_loss_is_the_criterions_over_the_images_that_count_each_by_its_weight():
    network = linear()
    batch = batch_of(4, filled=2)
    logits, loss, losses = forward(network, batch, functional.cross_entropy, nullcontext())
    assert logits.shape == (4, 3) and torch.equal(logits, network(batch.images)[:4])
    assert torch.equal(loss, functional.cross_entropy(logits, batch.targets)) and losses == {}
    batch.image_weights = torch.tensor([0.5, 0.0, 3.0, 1.0])
    each = functional.cross_entropy(logits, batch.targets, reduction="none")
    weighted = forward(network, batch, functional.cross_entropy, nullcontext()).loss
    torch.testing.assert_close(weighted, (each * batch.image_weights).mean())


@pytest.mark.parametrize("scaler", [OFF, ON], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(
    ("criterion", "names"),
    [
        (functional.cross_entropy, ["criterion", "grad_penalty"]),
        (two_terms, ["entropy", "size", "grad_penalty"]),
    ],
    ids=["one loss", "two"],
)
def test_the_penalty_is_its_factor_times_the_norm_of_the_losss_gradient(criterion, names, scaler):
    """Against the gradient of softmax and cross entropy written out: (p - y) x / n for a row of weights."""
    network = linear()
    batch = batch_of()
    _, loss, losses = forward(network, batch, criterion, nullcontext(), penalty=0.5, scaler=scaler)
    assert list(losses) == names
    torch.testing.assert_close(loss, sum(losses.values()))
    if criterion is two_terms:
        return
    logits = network(batch.images)
    torch.testing.assert_close(losses["criterion"], functional.cross_entropy(logits, batch.targets))
    errors = (logits.softmax(1) - functional.one_hot(batch.targets, 3)) / len(batch.targets)
    norm = torch.sqrt((errors.T @ batch.images).square().sum() + errors.sum(0).square().sum())
    torch.testing.assert_close(losses["grad_penalty"], 0.5 * norm)
    expected = torch.autograd.grad(functional.cross_entropy(logits, batch.targets) + 0.5 * norm, network.weight)
    torch.testing.assert_close(torch.autograd.grad(loss, network.weight), expected)


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_without_images_that_count_the_loss_is_zero_with_zero_gradients(penalty):
    network = linear()
    logits, loss, losses = forward(
        network, batch_of(0, filled=2), functional.cross_entropy, nullcontext(), penalty=penalty, scaler=OFF
    )
    loss.backward()
    assert logits.shape == (0, 3) and loss.item() == 0 and losses == {}
    assert all(parameter.grad.count_nonzero() == 0 for parameter in network.parameters())


def test_autocast_covers_network_and_criterion_and_no_more():
    within = []

    def watched(*arguments):
        within.append(torch.is_autocast_enabled("cpu"))
        return functional.cross_entropy(*arguments)

    class Watched(nn.Linear):
        def forward(self, images):
            within.append(torch.is_autocast_enabled("cpu"))
            return super().forward(images)

    logits, loss, _ = forward(Watched(5, 3), batch_of(), watched, torch.autocast("cpu", torch.bfloat16))
    assert within == [True, True] and not torch.is_autocast_enabled("cpu")
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32


def add_to(changed):
    def loss(logits, targets):
        of = {"logits": logits, "targets": targets}[changed]
        of += 1
        return functional.cross_entropy(logits, targets % 3)

    return loss


@pytest.mark.parametrize("changed", ["logits", "targets"])
def test_a_loss_that_changes_what_top1_is_computed_from_is_refused(changed):
    with pytest.raises(UserError, match="changes its logits or targets in place"):
        forward(linear(), batch_of(), add_to(changed), nullcontext())


def test_validation_needs_no_count_of_changes_which_tensors_of_inference_mode_lack():
    with torch.inference_mode():
        assert forward(linear(), batch_of(), functional.cross_entropy, nullcontext()).loss.isfinite()
