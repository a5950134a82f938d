"""Learning rates against tables worked out by hand and against torch's own schedulers."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from timm.scheduler import (
    CosineLRScheduler,
    MultiStepLRScheduler,
    PolyLRScheduler,
    StepLRScheduler,
    create_scheduler_v2,
)
from torch.optim import lr_scheduler

from utils.config.arguments import parse
from utils.config.groups.optimisation import LR_POLICIES, RESTARTING_POLICIES, RISING_POLICIES, OptimisationSettings
from utils.optim.lr_policy import POLICIES, LRPolicy, describe

# step: learning rate, for 12 steps with a highest rate of 0.4
TABLES = {
    "constant": {0: 0.4, 5: 0.4, 11: 0.4},
    # cos of 0, 60, 90, 120 degrees: 1, 1/2, 0, -1/2
    "cosine": {0: 0.4, 4: 0.3, 6: 0.2, 8: 0.1, 3: 0.2 * (1 + math.sqrt(0.5)), 12: 0.0, 20: 0.0},
    # exp(-(3 t)^2 / 2) at t = 1/3, 2/3 and 1 is exp(-1/2), exp(-2) and exp(-9/2)
    "gaussian": {0: 0.4, 4: 0.24261226, 8: 0.05413411, 12: 0.00444360, 6: 0.12986099},
    "multistep": {0: 0.4, 5: 0.4, 6: 0.04, 8: 0.04, 9: 0.004, 11: 0.004},
    "step": {0: 0.4, 4: 0.4, 5: 0.04, 9: 0.04, 10: 0.004, 11: 0.004},
    "linear": {0: 0.4, 3: 0.3, 6: 0.2, 9: 0.1, 12: 0.0, 20: 0.0},
    # the square of what is left: 3/4, 1/2, 1/4
    "poly": {0: 0.4, 3: 0.225, 6: 0.1, 9: 0.025, 12: 0.0, 20: 0.0},
    # up over steps 0 to 2 by cosine from a quarter, down over steps 2 to 11 to 1e-4 of the first rate
    "one-cycle": {0: 0.1, 1: 0.25, 2: 0.4, 5: 0.300002500, 8: 0.100007500, 11: 1e-5, 20: 1e-5},
    # a quarter at first, all after 3 of 12 steps, down by a ninth of it each further step
    "triangular": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 6: 0.4 * 6 / 9, 11: 0.4 / 9, 12: 0.0, 20: 0.0},
    "plateau": {0: 0.4, 5: 0.4, 11: 0.4},  # its drops: tests/utils/optim/test_plateau.py
}

# As above with a warm-up of 4 steps: a quarter more each step, the rest in the remaining 8 steps.
WARM_TABLES = {
    "constant": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 11: 0.4},
    "cosine": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 6: 0.2 * (1 + math.sqrt(0.5)), 8: 0.2, 12: 0.0},
    "gaussian": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 8: 0.12986099, 12: 0.00444360},
    "multistep": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 5: 0.4, 6: 0.04, 9: 0.004},
    "step": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 5: 0.04, 10: 0.004},
    "linear": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 6: 0.3, 8: 0.2, 12: 0.0},
    "poly": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 6: 0.225, 8: 0.1, 12: 0.0},
    "plateau": {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 11: 0.4},
}
RISE_BY_THEMSELVES = set(TABLES) - set(WARM_TABLES)  # no warm-up comes before them
RISE = {"lr_pct_start": 0.3, "lr_div_factor": 25.0}  # what the settings fill in for one-cycle
CASES = [(name, warmup) for warmup, tables in ((0, TABLES), (4, WARM_TABLES)) for name in tables]


def policy_of(name, steps, **settings):
    """The policy of a run with one step an epoch, so that settings in epochs are steps."""
    return LRPolicy(OptimisationSettings(lr=0.4, lr_policy=name, epochs=steps, **settings), 1)


def test_every_policy_has_a_table_and_a_function():
    words = "POLICIES and LR_POLICIES (utils/config/groups/optimisation.py) name the same in one order"
    assert tuple(POLICIES) == LR_POLICIES, words
    assert set(TABLES) == set(POLICIES), "TABLES above has rates of each, worked out by hand"


@pytest.mark.parametrize(("name", "warmup"), CASES)
def test_learning_rate_is_that_of_the_table(name, warmup):
    rise = {"lr_pct_start": 0.25, "lr_div_factor": 4}
    policy = policy_of(name, 12, warmup_epochs=warmup, lr_milestones=(6, 9), lr_step_epochs=5, **rise)
    for step, lr in (WARM_TABLES if warmup else TABLES)[name].items():
        assert policy(step) == pytest.approx(lr, abs=1e-8), step


def test_the_policies_that_restart_and_those_that_rise_by_themselves_are_named_as_such():
    def policies_that_heed(**change):
        given = {"lr_milestones": (6, 9), "lr_step_epochs": 5, "lr_pct_start": 0.25, "lr_div_factor": 4}
        pairs = {name: (policy_of(name, 12, **given), policy_of(name, 12, **given | change)) for name in TABLES}
        return {name for name, pair in pairs.items() if any(pair[0](step) != pair[1](step) for step in range(12))}

    assert policies_that_heed(lr_cycle_epochs=4) == set(RESTARTING_POLICIES)
    assert policies_that_heed(lr_div_factor=8) == set(RISING_POLICIES) == RISE_BY_THEMSELVES


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


def by_epoch(epochs, steps=3, **settings):
    """The rates of each epoch of ``steps`` steps, which must be the same within an epoch."""
    settings = OptimisationSettings(lr=0.4, epochs=epochs, lr_per_epoch=True, **settings)
    policy = LRPolicy(settings, steps_per_epoch=steps)
    rates = np.array([policy(step) for step in range(epochs * steps)]).reshape(epochs, steps)
    assert (rates == rates[:, :1]).all()
    return rates[:, 0]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(
    ("after", "epochs", "ours"),
    [
        (partial(lr_scheduler.CosineAnnealingLR, T_max=25), 30, {}),
        (partial(lr_scheduler.StepLR, step_size=30), 90, {"lr_policy": "multistep", "lr_milestones": (35, 65)}),
    ],
    ids=["cosine", "multistep"],
)
def test_a_rate_per_epoch_with_a_warm_up_from_a_hundredth_equals_torchvisions_references(after, epochs, ours):
    """Its steps after the warm-up are later milestones here, as main.py answers."""

    def make(optimizer):
        warm = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
        return lr_scheduler.SequentialLR(optimizer, [warm, after(optimizer)], milestones=[5])

    rates = by_epoch(epochs, warmup_epochs=5.0, warmup_lr=0.004, **ours)
    assert rates == pytest.approx(torch_rates(make, epochs), abs=1e-12)


@pytest.mark.parametrize(
    ("timms", "ours"),
    [
        (
            {"sched": "multistep", "num_epochs": 20, "decay_milestones": [6, 12]},
            {"lr_policy": "multistep", "lr_milestones": (5, 11)},
        ),
        ({"sched": "poly", "num_epochs": 20}, {"lr_policy": "poly", "lr_power": 0.1, "warmup_prefix": False}),
        ({"sched": "cosine", "num_epochs": 20, "min_lr": 1e-6}, {"lr_min": 1e-6, "warmup_prefix": False}),
        ({"sched": "cosine", "num_epochs": 20, "warmup_prefix": True}, {}),
        (
            {"sched": "cosine", "num_epochs": 5, "cycle_limit": 3, "cycle_mul": 2.0, "cycle_decay": 0.5},
            {"lr_cycle_epochs": 5, "lr_cycle_mul": 2.0, "lr_cycle_decay": 0.5, "warmup_prefix": False},
        ),
    ],
    ids=lambda value: value.get("sched"),
)
def test_what_main_py_answers_on_timms_schedules_gives_their_rates(timms, ours):
    """The page on coming from timm: milestones less 1, an exponent of 0.1, longer by a warm-up in front, all cycles."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler, epochs = create_scheduler_v2(optimizer, warmup_lr=1e-5, warmup_epochs=3, **timms)
    assert epochs == {True: 23, False: 35 if "cycle_mul" in timms else 20}["warmup_prefix" in timms]
    expected = []
    for epoch in range(epochs):
        scheduler.step(epoch)
        expected.append(optimizer.param_groups[0]["lr"])
    rates = by_epoch(epochs, warmup_epochs=3.0, warmup_lr=1e-5, **ours)
    assert rates == pytest.approx(expected, abs=1e-12)


def test_timms_milestones_are_ours_with_sched_on_updates_one_step_earlier():
    rates = timm_rates(MultiStepLRScheduler, 60, decay_t=[20, 40], decay_rate=0.1)
    policy = policy_of("multistep", 60, lr_milestones=(20, 40))
    assert rates[:-1] == pytest.approx([policy(step) for step in range(1, 60)], abs=1e-12)


def test_a_rate_per_epoch_warms_up_by_equal_parts_and_never_above_the_highest():
    rates = by_epoch(12, warmup_epochs=4.0)
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4]) and rates[8] == pytest.approx(0.2)
    assert by_epoch(3, warmup_epochs=0.5)[0] == 0.4
    assert list(by_epoch(6, lr_policy="multistep", lr_milestones=(2.5,))) == pytest.approx([0.4] * 3 + [0.04] * 3)


@pytest.mark.parametrize("floor", [0, 0.03])
@pytest.mark.parametrize("div_factor", [25.0, 4.0])
@pytest.mark.parametrize(("total", "share"), [(40, 0.3), (41, 0.2), (1000, 0.23)])
def test_one_cycle_equals_torchs_one_cycle(floor, div_factor, total, share):
    def make(optimizer):
        last = 0.4 / div_factor / floor if floor else 1e4
        return lr_scheduler.OneCycleLR(
            optimizer, 0.4, total, pct_start=share, div_factor=div_factor, final_div_factor=last, cycle_momentum=False
        )

    policy = policy_of("one-cycle", total, lr_pct_start=share, lr_div_factor=div_factor, lr_min=floor)
    expected = [max(floor, rate) for rate in torch_rates(make, total - 1)]  # our floor holds for the first steps too
    assert [policy(step) for step in range(total - 1)] == pytest.approx(expected, abs=1e-12)


def test_triangular_is_numpys_interpolation_as_in_airbench():
    policy = policy_of("triangular", 383, lr_pct_start=0.23, lr_div_factor=5, lr_min=0.4 * 0.07)
    expected = 0.4 * np.interp(np.arange(384), [0, int(0.23 * 383), 383], [0.2, 1, 0.07])
    assert [policy(step) for step in range(384)] == pytest.approx(expected, abs=1e-12)


def timm_rates(kind, steps, **options):
    """The rates that a scheduler of timm, stepped with each update, gives to steps 0, 1, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = kind(optimizer, t_in_epochs=False, **options)
    rates = []
    for step in range(steps):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(("mul", "decay", "floor"), [(1.0, 1.0, 0.0), (1.5, 0.6, 0.01), (2.0, 0.6, 0.0)])
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("cosine", CosineLRScheduler, {}), ("poly", PolyLRScheduler, {"power": 1.7})],
    ids=["cosine", "poly"],
)
def test_restarts_equal_timms(mul, decay, floor, name, kind, options):
    own = {f"lr_{name}": value for name, value in options.items()}
    policy = policy_of(name, 100, lr_min=floor, lr_cycle_epochs=16, lr_cycle_mul=mul, lr_cycle_decay=decay, **own)
    expected = timm_rates(
        kind, 100, t_initial=16, lr_min=floor, cycle_mul=mul, cycle_decay=decay, cycle_limit=99, **options
    )
    assert [policy(step) for step in range(100)] == pytest.approx(expected, abs=1e-12)
    rises = [step for step in range(1, 100) if policy(step) > policy(step - 1)]
    assert policy.restarts() == rises and len(rises) >= 2


@pytest.mark.parametrize("name", ["cosine", "poly", "linear", "gaussian"])
def test_restarts_follow_the_warm_up(name):
    options = {"lr_cycle_epochs": 8, "lr_cycle_mul": 2.0, "lr_cycle_decay": 0.5, "lr_power": 2.0, "lr_min": 0.01}
    cold = policy_of(name, 30, **options)
    warm = policy_of(name, 36, warmup_epochs=6, **options)
    assert [warm(step) for step in range(6, 36)] == [cold(step) for step in range(30)]
    assert warm(5) == pytest.approx(0.4) and warm.restarts() == [14, 30]


@pytest.mark.parametrize(
    ("epochs", "warmup", "cycle"),
    [(10, 0, 2.5), (20, 0, 6.6667), (20, 0, 6.6666), (20, 1, 4.75), (20, 0.5, 6.5), (9, 0, 2.2)],
)
@pytest.mark.parametrize("steps", [7, 23, 25, 37, 1251])
def test_cycles_keep_to_their_epochs_and_none_begins_with_the_last_steps(epochs, warmup, cycle, steps):
    settings = OptimisationSettings(
        epochs=epochs, lr=0.1, lr_policy="cosine", lr_cycle_epochs=cycle, warmup_epochs=warmup
    )
    policy = LRPolicy(settings, steps)
    warm = round(warmup * steps)
    room = epochs * steps - warm - max(1, cycle * steps / 1000)
    begins = [begin for count in range(1, 10) if (begin := count * cycle * steps) <= room]
    assert policy.restarts() == [warm + math.ceil(round(begin, 6)) for begin in begins]
    rates = [policy(step) for step in range(epochs * steps)]
    assert [step for step in range(warm + 1, len(rates)) if rates[step] > rates[step - 1]] == policy.restarts()
    if cycle != 2.2:
        assert rates[-1] < 0.1 * 2.5 / steps, "the last cycle ends with the run"


@pytest.mark.parametrize(("epochs", "steps"), [(20, 23), (20, 25), (10, 7), (100, 1251)])
def test_the_rate_of_step_drops_at_thirds_and_not_before_the_end(epochs, steps):
    policy = LRPolicy(OptimisationSettings(epochs=epochs, lr=0.1, lr_policy="step", lr_step_epochs=epochs / 3), steps)
    rates = [policy(step) for step in range(epochs * steps)]
    drops = [step for step in range(1, len(rates)) if rates[step] < rates[step - 1]]
    assert drops == [round(epochs * steps / 3), round(2 * epochs * steps / 3)]


def test_floor_of_the_smooth_policies_and_of_step_equals_timms():
    cosine = policy_of("cosine", 50, lr_min=0.1)
    expected = timm_rates(CosineLRScheduler, 50, t_initial=50, lr_min=0.1)
    assert [cosine(step) for step in range(50)] == pytest.approx(expected, abs=1e-12)
    step = policy_of("step", 50, lr_step_epochs=10, lr_gamma=0.5, lr_min=0.06)
    expected = [max(0.06, rate) for rate in timm_rates(StepLRScheduler, 50, decay_t=10, decay_rate=0.5)]
    assert [step(n) for n in range(50)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", LR_POLICIES)
def test_rate_of_every_planned_step_is_positive_never_above_the_highest_and_never_below_the_floor(name):
    for warmup in (0, 1, 5, 10):
        policy = policy_of(name, 10, warmup_epochs=warmup, lr_milestones=(5, 7), lr_step_epochs=4, **RISE)
        rates = [policy(step) for step in range(10)]
        assert min(rates) > 0 and max(rates) == 0.4
    policy = policy_of(name, 40, lr_milestones=(5, 7, 9), lr_min=0.05, **RISE)
    lowest = min(policy(step) for step in range(41))
    assert lowest == pytest.approx(0.4 if name in ("constant", "plateau") else 0.05, rel=0.1) and lowest >= 0.05 * (
        1 - 1e-12
    )


def test_epochs_of_the_settings_become_steps():
    settings = {"lr": 0.4, "lr_gamma": 0.5, "lr_milestones": (2.0, 4.5), "lr_step_epochs": 1.5, "lr_cycle_epochs": 2.5}
    settings |= {"epochs": 9, "warmup_epochs": 0.3, "warmup_prefix": False}

    def jumps(name):
        """The steps after the warm-up of 3 at which the rate drops by half or more, or rises."""
        policy = LRPolicy(OptimisationSettings(lr_policy=name, **settings), 10)
        ratios = [policy(step) / policy(step - 1) for step in range(4, 90)]
        return [step for step, ratio in enumerate(ratios, start=4) if ratio > 1 or (name != "cosine" and ratio < 0.6)]

    assert jumps("multistep") == [20, 45] and jumps("step") == [15, 30, 45, 60, 75] and jumps("cosine") == [25, 50, 75]
    assert [LRPolicy(OptimisationSettings(**settings), 10)(step) for step in (0, 2)] == pytest.approx([0.4 / 3, 0.4])


# Of eight epochs or one: rates at their quarters, at the end of the warm-up and in the last step, worked out by hand.
WORDS = {
    "--lr 0.2 --lr-policy multistep": "multistep  epoch 0: 0.2  epoch 2: 0.2  epoch 4: 0.02  epoch 6: 0.002  "
    "epoch 7.9: 0.002; x 0.1 at epochs 4, 6",
    "--lr 0.2 --lr-policy step --lr-step-epochs 3 --lr-min 0.01 --warmup-epochs 1 --warmup-lr 0.02": "step  "
    "epoch 0: 0.02  epoch 1: 0.2  epoch 2: 0.2  epoch 4: 0.02  epoch 6: 0.01  epoch 7.9: 0.01; x 0.1 every 3 epochs; "
    "not below 0.01; warm-up over 1 epoch from 0.02",
    "--lr-base 0.1 --lr-base-size 32 --lr-policy poly --lr-power 2 --swa-start-epoch 5 --swa-lr 0.03": "poly  "
    "epoch 0: 0.2  epoch 2: 0.1125  epoch 4: 0.03  epoch 6: 0.03  epoch 7.9: 0.03; power 2; "
    "constant from epoch 5 on; peak 0.2 = --lr-base 0.1 x 64 / 32",
    "--lr 0.2 --lr-min 0.02 --warmup-epochs 1 --swa-start-epoch 1 --swa-lr 0.01": "cosine  epoch 0: 0.01  "
    "epoch 1: 0.01  epoch 2: 0.01  epoch 4: 0.01  epoch 6: 0.01  epoch 7.9: 0.01; constant from epoch 1 on",
    "--lr-base 0.1 --lr-base-size 16 --lr-base-scale sqrt --lr-cycle-epochs 4 --lr-cycle-decay 0.5": "cosine  "
    "epoch 0: 0.2  epoch 2: 0.1  epoch 4: 0.1  epoch 6: 0.05  epoch 7.9: 0.0001541; restarts at epochs 4 at 0.5 of the "
    "peak before; peak 0.2 = --lr-base 0.1 x sqrt(64 / 16)",
    "--lr 0.2 --lr-policy linear --lr-per-epoch --warmup-epochs 2 --no-warmup-prefix": "linear  epoch 0: 0.1  "
    "epoch 2: 0.15  epoch 4: 0.1  epoch 6: 0.05  epoch 7.9: 0.025; warm-up over 2 epochs, in which the schedule begins; "
    "changes with each epoch",
    "--lr 0.2 --lr-policy linear --epochs 1": "linear  "
    "epoch 0: 0.2  epoch 0.2: 0.16  epoch 0.5: 0.1  epoch 0.7: 0.06  epoch 0.9: 0.02",
}


@pytest.mark.parametrize("flags", WORDS)
def test_the_words_hold_rates_along_the_run_and_what_shapes_them(flags):
    args = parse(["--epochs", "8", *flags.split()])
    policy = LRPolicy(args.optimisation, 10, args.average)
    assert describe(policy, args.data.global_batch_size) == WORDS[flags]


def test_the_rate_of_an_average_begins_with_its_epoch_also_after_skipped_steps():
    args = parse("--lr 0.1 --lr-policy constant --epochs 3 --swa-start-epoch 3 --swa-lr 0.03".split())
    policy = LRPolicy(args.optimisation, 10, args.average)
    assert [policy.at(epoch, updates, 0) for epoch, updates in ((1, 15), (2, 13), (2, 20))] == [0.1, 0.03, 0.03]
