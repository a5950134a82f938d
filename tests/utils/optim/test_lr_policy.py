"""Learning rates against tables worked out by hand and against torch's own schedulers."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from utils.config.groups.optimisation import LR_POLICIES, OptimisationSettings
from utils.optim.lr_policy import LRPolicy, build_lr_policy

# step: learning rate, for 12 steps with a highest rate of 0.4
TABLES = {
    "constant": {0: 0.4, 5: 0.4, 11: 0.4},
    # cos of 0, 60, 90, 120 degrees: 1, 1/2, 0, -1/2
    "cosine": {0: 0.4, 4: 0.3, 6: 0.2, 8: 0.1, 3: 0.2 * (1 + math.sqrt(0.5)), 12: 0.0, 20: 0.0},
    # exp(-(3 t)^2 / 2) at t = 1/3, 2/3 and 1 is exp(-1/2), exp(-2) and exp(-9/2)
    "gaussian": {0: 0.4, 4: 0.24261226, 8: 0.05413411, 12: 0.00444360, 6: 0.12986099},
    "multistep": {0: 0.4, 5: 0.4, 6: 0.04, 8: 0.04, 9: 0.004, 11: 0.004},
}

# As above with a warm-up of 4 steps: a quarter more each step, the rest in the remaining 8 steps.
WARM_TABLES = {
    "constant": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 11: 0.4},
    "cosine": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 6: 0.2 * (1 + math.sqrt(0.5)), 8: 0.2, 12: 0.0},
    "gaussian": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 8: 0.12986099, 12: 0.00444360},
    "multistep": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 5: 0.4, 6: 0.04, 9: 0.004},
}


@pytest.mark.parametrize("name", LR_POLICIES)
@pytest.mark.parametrize(("warmup", "tables"), [(0, TABLES), (4, WARM_TABLES)], ids=["cold", "warm"])
def test_learning_rate_is_that_of_the_table(name, warmup, tables):
    policy = LRPolicy(name, 0.4, total_steps=12, warmup_steps=warmup, milestones=(6, 9), gamma=0.1)
    for step, lr in tables[name].items():
        assert policy(step) == pytest.approx(lr, abs=1e-8), step


def torch_rates(make, steps):
    """The rates that a scheduler of torch gives to steps 0, 1, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_cosine_equals_torchs_cosine_annealing():
    policy = LRPolicy("cosine", 0.4, total_steps=37)
    expected = torch_rates(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=37), 38)
    assert [policy(step) for step in range(38)] == pytest.approx(expected, abs=1e-12)


def test_multistep_equals_torchs_multistep():
    policy = LRPolicy("multistep", 0.4, total_steps=40, milestones=(7, 20, 33), gamma=0.3)
    expected = torch_rates(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [7, 20, 33], gamma=0.3), 40)
    assert [policy(step) for step in range(40)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_warm_up_then_cosine_equals_torchs_sequence_of_both():
    def make(optimizer):
        warm = lr_scheduler.LinearLR(optimizer, start_factor=1 / 8, end_factor=1.0, total_iters=7)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
        return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[8])

    policy = LRPolicy("cosine", 0.4, total_steps=40, warmup_steps=8)
    assert [policy(step) for step in range(40)] == pytest.approx(torch_rates(make, 40), abs=1e-12)


@pytest.mark.parametrize("name", LR_POLICIES)
@pytest.mark.parametrize("warmup", [0, 1, 5, 10])
def test_rate_of_every_planned_step_is_positive_and_never_above_the_highest(name, warmup):
    policy = LRPolicy(name, 0.4, total_steps=10, warmup_steps=warmup, milestones=(5, 7))
    rates = [policy(step) for step in range(10)]
    assert all(0 < rate <= 0.4 for rate in rates)
    assert max(rates) == 0.4


def test_of_a_single_planned_step_the_cosine_begins_at_its_highest_and_ends_at_zero_after_it():
    policy = LRPolicy("cosine", 0.4, total_steps=1)
    assert (policy(0), policy(1)) == (0.4, 0.0)


@pytest.mark.parametrize("name", LR_POLICIES)
def test_rate_depends_on_the_step_alone(name):
    policy = LRPolicy(name, 0.4, total_steps=10, warmup_steps=2, milestones=(5, 7))
    forward = [policy(step) for step in range(12)]
    assert [policy(step) for step in reversed(range(12))] == forward[::-1]


def test_epochs_of_the_settings_become_steps():
    settings = OptimisationSettings(
        epochs=8, lr=0.2, lr_policy="multistep", lr_milestones=(2.0, 4.5), lr_gamma=0.5, warmup_epochs=0.3
    )
    policy = build_lr_policy(settings, steps_per_epoch=10)
    assert policy == LRPolicy("multistep", 0.2, total_steps=80, warmup_steps=3, milestones=(20, 45), gamma=0.5)


def test_without_warm_up_the_first_step_has_the_highest_rate():
    policy = build_lr_policy(OptimisationSettings(epochs=3, lr=0.2), steps_per_epoch=7)
    assert (policy.total_steps, policy.warmup_steps, policy(0)) == (21, 0, 0.2)
