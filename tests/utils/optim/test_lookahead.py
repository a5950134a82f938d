"""Lookahead against the algorithm of its paper."""

import pytest
import torch
from torch import nn

from tests.helpers import equal
from tests.utils.optim.test_optimizers import network, weights_after_steps
from tests.utils.test_train_validation import make, parameters, steps
from utils.config.groups.optimisation import OptimisationSettings
from utils.optim.optimizers import build_optimizers, unknown_optimizer


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
@pytest.mark.parametrize(("every", "alpha", "count"), [(3, 0.5, 10), (1, 0.8, 4), (5, 1.0, 7)])
def test_steps_are_those_of_the_papers_algorithm(name, every, alpha, count):
    settings = OptimisationSettings(optimizer=name, lr=0.1, lookahead=(float(every), alpha))
    ours = network()
    reference = network()
    found = weights_after_steps(ours, build_optimizers(settings, ours), count)
    (plain,) = build_optimizers(OptimisationSettings(optimizer=name, lr=0.1), reference)
    slow = parameters(reference)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, count + 1):
        for parameter in reference.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        plain.step()
        if step % every == 0:
            slow = [s + alpha * (p.detach() - s) for s, p in zip(slow, reference.parameters(), strict=True)]
            with torch.no_grad():
                for parameter, value in zip(reference.parameters(), slow, strict=True):
                    parameter.copy_(value)
    torch.testing.assert_close(found, parameters(reference), rtol=1e-5, atol=1e-6)
    if alpha < 1:
        without = network()
        weights_after_steps(without, build_optimizers(OptimisationSettings(optimizer=name, lr=0.1), without), count)
        assert not equal(found, parameters(without))


def test_it_begins_and_ends_with_a_state_that_lacks_or_has_it():
    model = network()
    (plain,) = build_optimizers(OptimisationSettings(lr=0.1), model)
    weights_after_steps(model, [plain], 2)
    (ahead,) = build_optimizers(OptimisationSettings(lr=0.1, lookahead=(1.0, 0.5)), network())
    ahead.load_state_dict(plain.state_dict())
    plain.load_state_dict(ahead.state_dict())
    assert "lookahead" in ahead.state_dict() and "lookahead" not in plain.state_dict()
    assert ahead.state_dict()["lookahead"]["steps"] == 0


def test_skipped_steps_do_not_count():
    class Infinite(nn.Module):
        def forward(self, output, targets):
            return nn.functional.cross_entropy(output, targets) * torch.inf

    flags = ("--arch", "fc", "--amp", "fp16", "--init-scale", "1024", "--lookahead", "2", "0.5")
    traval = make(*flags, criterion=Infinite())
    steps(traval, 3)
    assert traval.progress.skipped_steps == 3 and traval.state()["optimizer"]["lookahead"]["steps"] == 0


def test_timms_prefix_is_answered_with_the_flag():
    assert "--optimizer adamw --lookahead 6 0.5" in unknown_optimizer("lookahead_adamw")
    assert "did you mean" in unknown_optimizer("lookahead_adamm")
