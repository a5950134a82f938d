"""What ``--resume-override`` carries over from the middle of an epoch."""

import dataclasses
from pathlib import Path

import pytest
import timm.optim
import torch

from utils.checkpoint.override import _with_settings_of, carry_over, refuse_impossible
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import ResumePoint, _completed
from utils.config.arguments import parse
from utils.config.groups.optimisation import OptimisationSettings
from utils.config.settings import UserError
from utils.optim.optimizers import build_optimizers

STEPS = 23


def carried(progress, flags, fingerprint="f", **of_run):
    """The progress of a default run of two classes that goes on with ``flags``, and the lines about it."""
    state = {"settings": parse([]).values(), "classes": ["a", "b"], "fingerprint": "f", "progress": progress.state()}
    point = ResumePoint(Path("last.pt"), {**state, "optimizer": [], **of_run}, "digest")
    state, lines = carry_over(point, parse(flags), ("a", "b"), fingerprint, STEPS, [])
    return Progress.from_state(state["progress"]), lines


@pytest.mark.parametrize(
    ("flags", "done", "kept"),
    [
        (("--lr", "0.2"), 7, True),
        (("--grad-penalty", "0.1"), 7, False),
        (("--loss", "focal"), 7, False),
        (("--mixup", "0.2"), 7, False),
        (("--loss", "focal"), STEPS, True),  # only its validation is missing
    ],
)
def test_training_figures_of_an_epoch_do_not_mix_two_losses(flags, done, kept):
    progress = Progress(epoch=1, step_in_epoch=done, step=STEPS + done)
    progress.add([90.0, 40.0, 60.0, 64.0])
    found, lines = carried(progress, flags)
    nothing = [0.0] * 4
    assert found.epoch_sums == found.window_sums == (progress.epoch_sums if kept else nothing)
    assert [line for line in lines if "another loss" in line] == (
        [] if kept else ["another loss: epoch 2's training figures are of its remaining steps"]
    )
    unchanged = dataclasses.replace(found, epoch_sums=progress.epoch_sums, window_sums=progress.window_sums)
    assert unchanged == progress, "the position is that of the checkpoint"


@pytest.mark.parametrize(
    ("flags", "fingerprint", "kept"),
    [
        ("--lr 0.2 --weight-decay 0.1 --loss focal --augment none --best-metric loss", "f", True),
        *((flags, "f", False) for flags in ("--tta flip", "--mean 0.5", "--crop-pct 0.5", "--max-val-batches 1")),
        ("--pixel-range 0 1023", "f", False),
        *(
            (flags, "f", False)
            for flags in ("--amp bf16", "--val-image-size 16", "--blur-pool", "--fp32-layers fc", "--tf32")
        ),
        ("", "other", False),
    ],
)
def test_a_validation_stands_for_the_weights_only_while_it_is_of_the_same_settings_and_images(flags, fingerprint, kept):
    progress = Progress(epoch=2, step=2 * STEPS, validated_step=2 * STEPS, last_validation=[0.5, 90.0, 99.0, 360.0])
    found, _ = carried(progress, flags.split(), fingerprint)
    assert (found.validated_step == found.step) is kept


def test_a_run_of_several_labels_keeps_its_position_and_its_best_where_only_settings_change():
    progress = Progress(epoch=1, step_in_epoch=7, step=STEPS + 7, best_epoch=1, best_value=90.0)
    found, (line,) = carried(progress, ["--lr", "0.2"], multilabel=True)
    assert found == progress and line.startswith("--lr 0.2: ")


def test_the_best_by_a_metric_of_a_file_that_has_changed_is_forgotten(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from utils.plugin import metric\n\n\n@metric('own')\ndef own(logits, targets):\n    return targets\n"
    )
    progress = Progress(epoch=3, step=3 * STEPS, best_epoch=1, best_value=90.0, stopping_epoch=1, stopping_value=90.0)
    for best_metric, kept in (("own", False), ("top1", True)):
        flags = ["--plugin", str(file), "--best-metric", best_metric]
        state = {"settings": parse(flags).values(), "classes": ["a", "b"], "fingerprint": "f", "optimizer": []}
        state |= {"progress": progress.state(), "plugins": {"own.py": "another"}}
        point = ResumePoint(Path("last.pt"), state, "digest")
        after, (line, *_) = carry_over(point, parse(flags), ("a", "b"), "f", STEPS, [])
        assert line.startswith("--plugin own.py: has changed, ")
        found = Progress.from_state(after["progress"])
        assert (found.best_value, found.stopping_epoch) == ((90.0, 1) if kept else (None, 3))


def test_an_epoch_that_begins_again_takes_only_its_own_time():
    """The last epoch, whose steps now have other samples, and whose figures are forgotten."""
    progress = Progress(epoch=19, step_in_epoch=7, step=19 * STEPS + 7, epoch_seconds=500.0)
    progress.add([90.0, 40.0, 60.0, 64.0])
    found, _ = carried(progress, ["--seed", "3"])
    assert (found.epoch, found.step_in_epoch, found.epoch_sums[3], found.epoch_seconds) == (19, 0, 0.0, 0.0)


def test_another_initial_loss_scale_is_the_scale_from_there_on():
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    state = {"settings": parse(["--amp", "fp16"]).values(), "classes": ["a", "b"], "fingerprint": "f"}
    state |= {"progress": Progress().state(), "optimizer": [], "scaler": scaler.state_dict() | {"_growth_tracker": 9}}
    args = parse(["--amp", "fp16", "--init-scale", "64"])
    carried_over, _ = carry_over(ResumePoint(Path("last.pt"), state, "digest"), args, ("a", "b"), "f", STEPS, [])
    scaler.load_state_dict(_completed(carried_over, state)["scaler"])
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (64, 0)


def refused(flags, begun=(), **state):
    """The lines about what a run made with the flags ``begun`` cannot go on with; none if it can go on with all."""
    state = {"ema": None, "progress": Progress().state(), **state}
    point = ResumePoint(Path("last.pt"), {"settings": parse(begun).values(), **state}, "digest")
    try:
        refuse_impossible(point, parse(flags))
    except UserError as error:
        return error.mistakes
    return []


@pytest.mark.parametrize("flags", ["--init xavier_normal", "--pretrained", "--new-head"])
def test_a_run_that_has_begun_takes_no_other_first_weights(flags):
    (line,) = refused(flags.split())
    assert line.startswith(f"{flags}: last.pt was made with ") and "goes on with its own weights" in line


def test_an_average_that_has_begun_does_not_stand_still_until_another_epoch():
    """A fraction of --epochs means another epoch where these change; it is refused as another epoch is."""
    begun = ("--epochs", "4", "--swa-start-epoch", "0.5")  # from epoch 3 on
    (line,) = refused(["--epochs", "12", "--swa-start-epoch", "0.5"], begun, ema={})
    assert line.startswith("--epochs 12: last.pt was made with --epochs 4; --swa-start-epoch 0.5 would mean epoch 7")
    assert line.endswith("has begun in epoch 3; add --swa-start-epoch 3")
    assert not refused(["--epochs", "12", "--swa-start-epoch", "3"], begun, ema={})
    assert not refused(["--epochs", "12", "--swa-start-epoch", "0.5"], begun), "it has not begun"
    (line,) = refused(["--epochs", "4", "--swa-start-epoch", "2"], begun, ema={})
    assert line.endswith("the checkpoint holds an average that has begun")


@pytest.mark.parametrize(("steps", "has_begun"), [(0, False), (1, True)])
def test_a_moving_average_that_has_begun_begins_in_no_other_epoch(steps, has_begun):
    flags = ("--ema-decay", "0.9", "--ema-start-epoch")
    state = {"ema": {}, "progress": Progress(epoch=1, step_in_epoch=steps).state()}
    for other in ("1", "3"):
        lines = refused([*flags, other], [*flags, "2"], **state)
        assert [line.endswith("the checkpoint holds an average that has begun") for line in lines] == [True] * has_begun


def test_weight_decay_relates_to_the_peak_of_the_new_rate():
    """timm's corrected weight decay keeps the peak in the groups, since version 1.0.31."""
    begun, now = (OptimisationSettings(optimizer="lamb", lr=lr) for lr in (0.1, 0.05))
    before, after = (build_optimizers(settings, torch.nn.Linear(4, 3)) for settings in (begun, now))
    (state,) = _with_settings_of(after, [before[0].state_dict()])
    assert {group.get("max_lr_snapshot", 0.05) for group in state["param_groups"]} == {0.05}


WITH_BETAS = pytest.mark.skipif(
    not timm.optim.get_optimizer_info("adafactor").has_betas, reason="this version of timm drops Adafactor's betas"
)


@pytest.mark.parametrize(
    "name", ["adamw", pytest.param("adafactor", marks=WITH_BETAS), "muon", "schedulefree-adamw", "lamb", "mars"]
)
def test_other_betas_and_eps_are_those_that_the_next_step_takes(name):
    """The state from before has the new ones in its groups, and the step is another than with the old ones."""

    def stepped(settings, state=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        optimizers = build_optimizers(settings, model)
        for optimizer, old in zip(optimizers, _with_settings_of(optimizers, state) if state else (), strict=False):
            optimizer.load_state_dict(old)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()], [o.state_dict() for o in optimizers]

    plain = OptimisationSettings(optimizer=name, lr=0.1, opt_betas=(0.5, 0.6))
    other = dataclasses.replace(plain, opt_betas=(0.8, 0.97), opt_eps=0.01)
    _, state = stepped(plain)
    found, after = stepped(other, state)
    kept, _ = stepped(plain, state)
    assert not all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    _, fresh = stepped(other)
    for mine, theirs in zip(after, fresh, strict=True):
        names = [{"eps", "betas", "betas_1d", "beta1"} & group.keys() for group in theirs["param_groups"]]
        for group, wanted, own in zip(mine["param_groups"], theirs["param_groups"], names, strict=True):
            assert all(group[one] == wanted[one] for one in own)


@WITH_BETAS
def test_adafactor_neither_begins_nor_ends_to_keep_a_momentum():
    model = torch.nn.Linear(4, 3)
    without = OptimisationSettings(optimizer="adafactor", lr=0.1)
    built = [build_optimizers(one, model) for one in (without, dataclasses.replace(without, opt_betas=(0.8, 0.9)))]
    for now, begun in (built, built[::-1]):
        with pytest.raises(UserError, match="--opt-betas"):
            _with_settings_of(now, [begun[0].state_dict()])
