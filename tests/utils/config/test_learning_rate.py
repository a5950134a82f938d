"""The peak learning rate: given, or for a reference batch as in timm's train.py."""

import math

import pytest

from tests.helpers import mistakes_of
from utils.config.arguments import as_recipe, parse


def timms(optimizer, lr_base, size, batch, scale=""):
    """timm's train.py, from its documentation of --lr-base, --lr-base-size and --lr-base-scale."""
    if not scale:
        scale = "sqrt" if "ada" in optimizer or "lamb" in optimizer else "linear"
    return lr_base * (math.sqrt(batch / size) if scale == "sqrt" else batch / size)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "lamb", "lion", "muon", "nadamw"])
@pytest.mark.parametrize("scale", ["", "linear", "sqrt"])
@pytest.mark.parametrize(("flags", "batch"), [(["-b", "96"], 96), (["-b", "32", "--accumulate", "4"], 128)])
def test_rate_is_timms_for_the_global_batch(optimizer, scale, flags, batch):
    line = [*flags, "-o", optimizer, "--lr-base", "0.3", *(["--lr-base-scale", scale] if scale else [])]
    for processes in (1, 3):
        args = parse(line, world_size=processes)
        assert args.optimisation.lr == pytest.approx(timms(optimizer, 0.3, 256, processes * batch, scale), rel=1e-12)
    assert parse([*line, "--lr-base-size", "64"]).optimisation.lr == pytest.approx(
        timms(optimizer, 0.3, 64, batch, scale), rel=1e-12
    )


def test_with_a_global_batch_the_processes_do_not_matter():
    rates = {parse(["--global-batch-size", "512", "--lr-base", "0.1"], world_size=n).optimisation.lr for n in (1, 2, 3)}
    assert rates == {0.2}


def test_the_flag_of_one_replaces_the_other_in_a_recipe_and_in_the_same_place_they_contradict(recipe):
    assert parse(["--config", recipe("lr: 0.7\n"), "--lr-base", "0.4"]).optimisation.lr == 0.1
    replaced = parse(["--config", recipe("lr-base: 0.7\nbatch-size: 128\n"), "--lr", "0.4"]).optimisation
    assert (replaced.lr, replaced.lr_base) == (0.4, None)
    for line in (("--lr", "0.1", "--lr-base", "0.1"), ("--config", recipe("lr-base: 0.7\nlr: 0.1\n"))):
        (mistake,) = mistakes_of(parse, line)
        assert "--lr and --lr-base" in mistake


def test_the_saved_recipe_gives_the_same_rate_and_follows_another_batch(recipe):
    args = parse(["--lr-base", "0.4", "-b", "64"])
    saved = recipe(as_recipe(args, "a run"))
    again = parse(["--config", saved])
    assert again.values() | {"config": None} == args.values() and args.optimisation.lr == 0.1
    assert "lr-base, linear" in args.origins["lr"]
    other = parse(["--config", saved, "--global-batch-size", "256"])
    assert other.optimisation.lr == 0.4


@pytest.mark.parametrize(
    ("begun", "then", "expected"),
    [
        ("--lr-policy multistep --epochs 4", "--epochs 40", {"lr_milestones": (20, 30)}),
        ("--lr-policy multistep --epochs 4 --lr-milestones 2 3", "--epochs 40", {"lr_milestones": (2, 3)}),
        ("--lr-policy cosine --epochs 4", "--lr-policy multistep", {"lr_milestones": (2, 3)}),
        ("--lr-policy step --epochs 9", "--epochs 90", {"lr_step_epochs": 30}),
        ("--lr-policy one-cycle", "--lr-policy triangular", {"lr_pct_start": 0.23, "lr_div_factor": 5}),
        (
            "--lr-policy one-cycle --lr-pct-start 0.4",
            "--lr-policy triangular",
            {"lr_pct_start": 0.4, "lr_div_factor": 5},
        ),
    ],
)
def test_what_was_left_to_a_schedule_follows_another_one_and_what_was_chosen_stays(begun, then, expected, recipe):
    path = recipe(as_recipe(parse(begun.split()), "a run"))
    again = parse(["--config", path])
    assert again.values() | {"config": None} == parse(begun.split()).values()
    other = parse(["--config", path, *then.split()])
    for args in (other, parse(["--config", recipe(as_recipe(other, "a run with other settings"))])):
        assert {name: getattr(args.optimisation, name) for name in expected} == expected


def test_a_resumed_run_has_the_rate_it_was_begun_with_unless_its_batch_changes():
    begun = parse(["--lr-base", "0.4", "-b", "64"], world_size=2)
    stored = {name: value for name, value in begun.values().items() if name not in ("batch_size", "resume")}
    assert parse([], world_size=1, checkpoint=stored).optimisation.lr == begun.optimisation.lr == 0.2
    assert parse(["--global-batch-size", "32"], checkpoint=stored).optimisation.lr == 0.05
    assert parse(["--lr", "0.3"], checkpoint=stored).optimisation.lr_base is None


def test_what_a_policy_uses_is_saved_with_the_value_that_it_has():
    assert parse(["--lr-policy", "step", "--epochs", "90"]).optimisation.lr_step_epochs == 30
    rising = {name: parse(["--lr-policy", name]).optimisation for name in ("one-cycle", "triangular", "cosine")}
    assert [(o.lr_pct_start, o.lr_div_factor) for o in rising.values()] == [(0.3, 25), (0.23, 5), (None, None)]
