"""The hooks: when they are called and with what, and that looking on changes no bit."""

import dataclasses
import math

import pytest
import torch

from main import main
from tests.end_to_end.processes import curves, differences, rows
from tests.utils.loop.test_between_steps import watched
from tests.utils.test_train_validation import Overflow, make, steps
from utils.loop.hooks import Hooks

POINTS = [field.name for field in dataclasses.fields(Hooks)]


def recording(seen, numbers=lambda traval, *arguments: ()):
    """Hooks at all points; ``seen`` gets (point, *numbers) of each call."""
    return Hooks(
        **{point: [lambda *arguments, point=point: seen.append((point, *numbers(*arguments)))] for point in POINTS}
    )


def test_a_step_calls_its_points_in_order_for_each_pass_and_counts_itself_last():
    seen = []
    traval = make(
        *"--arch fc --accumulate 2 --batch-size 32".split(),
        hooks=recording(seen, lambda traval, *_: (traval.progress.step,)),
    )
    steps(traval, 2)
    one_pass = ["before_forward", "after_forward", "before_backward", "after_backward"]
    assert seen == [
        *((point, 0) for point in [*one_pass, *one_pass, "before_update"]),
        ("after_update", 1),
        *((point, 1) for point in [*one_pass, *one_pass, "before_update"]),
        ("after_update", 2),
    ]


def test_each_point_of_a_step_has_the_arguments_that_it_promises():
    given = {}
    hooks = Hooks(**{point: [lambda *arguments, point=point: given.update({point: arguments})] for point in POINTS})
    traval = make("--arch", "fc", hooks=hooks)
    hooks.after_forward.append(lambda *_: given.update(gradients=[p.grad for p in traval.model.parameters()]))
    hooks.before_update.append(
        lambda _, norm: given.update(norm=torch.stack([p.grad.norm() for p in traval.model.parameters()]).norm())
    )
    ((batch,),) = steps(traval, 1)
    assert all(arguments[0] is traval for point, arguments in given.items() if point in POINTS)
    _, its_batch, outputs = given["after_forward"]
    assert its_batch is batch and given["before_forward"][1:] == (batch,)
    assert outputs.logits.shape == (len(batch.targets), 10) and outputs.losses == {}
    expected = torch.nn.functional.cross_entropy(outputs.logits, batch.targets)
    assert torch.equal(outputs.loss, expected)
    assert given["before_backward"][2] is given["after_backward"][2] is outputs
    assert given["gradients"] == [None] * len(given["gradients"]), "before the backward pass"
    torch.testing.assert_close(given["before_update"][1], given["norm"])
    assert given["after_update"] == (traval,) and "before_save" not in given and "after_validation" not in given


def test_a_hook_that_makes_a_loss_nan_has_the_step_skipped_and_repeated():
    seen = []
    hooks = Hooks(
        before_forward=[lambda traval, _: seen.append(traval.progress.step)],
        after_forward=[lambda traval, _, outputs: outputs.loss.mul_(math.nan) if traval.progress.step == 1 else None],
        after_update=[lambda traval: seen.append(f"{traval.progress.skipped_steps} skipped")],
    )
    traval = make("--amp", "fp16", "--init-scale", "64", "--arch", "fc", hooks=hooks)
    steps(traval, 3)
    assert seen == [0, "0 skipped", 1, 1, "1 skipped", 2, "1 skipped"]


def test_a_step_that_ends_the_run_is_not_counted_and_calls_no_after_update():
    seen = []
    hooks = Hooks(before_update=[lambda _, norm: seen.append(norm.item())], after_update=[seen.append])
    traval = make("--amp", "off", "--arch", "fc", criterion=Overflow(at=1), hooks=hooks)
    with pytest.raises(RuntimeError, match="the gradient is"):
        steps(traval, 1)
    (norm,) = seen
    assert not math.isfinite(norm)


def test_validation_calls_its_points_for_each_batch_of_the_raw_weights_and_of_the_average():
    seen = []
    hooks = Hooks(
        before_validation_batch=[lambda _, batch: seen.append(len(batch.targets))],
        after_validation=[lambda _, report: seen.append(report)],
    )
    traval = make("--arch", "fc", "--val-batch-size", "100", "--ema-decay", "0.9", "--batch-size", "480", hooks=hooks)
    result = traval.validation(0, report=False)
    assert sum(seen[:4]) == sum(seen[4:8]) == 360 and seen[8:] == [result]


def test_the_end_of_an_epoch_calls_validation_before_the_save_and_the_save_around_its_hand_over():
    hooks = Hooks()
    callers = []
    traval, recorder, _ = watched("--arch", "fc", "--batch-size", "480", "--epochs", "1", hooks=hooks)
    hooks.before_validation_batch = [lambda caller, batch: callers.append(caller)]
    hooks.after_validation = [
        lambda caller, report: recorder.told.append(("validated", report.count)) or callers.append(caller)
    ]
    hooks.before_save = [lambda caller, names: recorder.told.append(("before", names)) or callers.append(caller)]
    hooks.after_save = [lambda caller, names: recorder.told.append(("after", names)) or callers.append(caller)]
    traval.fit()
    names = ("final", "best", "last")
    wanted = ("validated", "epoch", "before", "saved", "after", "waited")
    told = [(name, given) for name, given in recorder.told if name in wanted]
    assert [name for name, _ in told] == list(wanted)
    assert [given for name, given in told if name in ("before", "saved", "after")] == [names] * 3
    assert callers == [traval] * 4  # of a batch, the validation, before and after the save


def test_a_run_that_is_looked_at_has_the_bits_of_one_that_is_not(tmp_path, capsys):
    flags = ["--device", "cpu", "--deterministic", "--arch", "fc", "--epochs", "2", "--train-samples", "96"]
    flags += ["--amp", "fp16", "--ema-decay", "0.9", "--no-progress"]
    seen = []
    assert main([*flags, "--output", str(tmp_path / "plain")]) == 0
    assert main([*flags, "--output", str(tmp_path / "seen")], hooks=recording(seen)) == 0
    (plain,), (looked_at,) = (tmp_path.glob(f"{name}/digits/fc/*") for name in ("plain", "seen"))
    assert {point for (point,) in seen} == set(POINTS)
    assert differences(plain, looked_at) == []
    assert rows(plain) == rows(looked_at) and curves(plain) == curves(looked_at)
