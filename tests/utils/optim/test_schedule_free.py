"""Schedule-free optimizers against the paper's algorithm and the uninterrupted run."""

import copy

import pytest
import torch
from torch import nn

import main
from models.load import load_model
from tests.end_to_end.processes import load, rows
from tests.helpers import QUIETLY, equal, trained
from tests.utils.loop.test_between_steps import THREE_STEPS, watched
from tests.utils.optim.test_epoch_average import with_batch_norm
from tests.utils.test_train_validation import Overflow, make, parameters, steps
from utils.config.arguments import parse
from utils.config.groups.optimisation import SCHEDULE_FREE, OptimisationSettings
from utils.optim.optimizers import build_optimizers
from utils.optim.schedule_free import ScheduleFreeAdamW

CPU = (*QUIETLY, "--arch", "fc", "--batch-size", "240")
SGD, ADAMW = (("--optimizer", name) for name in SCHEDULE_FREE)
FACTORS = [0.25, 0.5, 0.75] + 7 * [1.0] + 2 * [0.5]  # of the peak learning rate, a step each
DECAY = 0.1


def network():
    """Two linear layers in float64; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def losses(count):
    """The loss of each step, a function of the network."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(3, (8,), generator=generator)
        yield lambda model, images=images, targets=targets: nn.functional.cross_entropy(model(images), targets)


def ours(name, lr, momentum):
    """y, z and x of each parameter after steps at ``FACTORS``, without weight decay of the biases."""
    model = network()
    settings = OptimisationSettings(
        optimizer=name, lr=lr, momentum=momentum, weight_decay=DECAY, decay_norm_bias=False, layer_decay=0.5
    )
    (optimizer,) = build_optimizers(settings, model)
    for factor, loss in zip(FACTORS, losses(len(FACTORS)), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr * factor * group["lr_scale"]
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    states = [optimizer.state[p] for p in model.parameters()]
    return parameters(model), [state["z"] for state in states], [state["x"] for state in states]


def papers(adam, lr, beta):
    """The same by the paper's formulas, number by number. Of the two layers, the first has half of the rate."""
    model = network()
    rates = [0.5, 0.5, 1.0, 1.0]
    start = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    y, z, x = (copy.deepcopy(start) for _ in range(3))
    v = [[0.0] * len(values) for values in start]
    for t, loss in enumerate(losses(len(FACTORS)), 1):
        for parameter, values in zip(model.parameters(), y, strict=True):
            parameter.data = torch.tensor(values, dtype=torch.float64).view_as(parameter)
            parameter.grad = None
        loss(model).backward()
        peaks = [max(FACTORS[: k + 1]) ** 2 for k in range(t)]
        c = peaks[-1] / sum(peaks)
        for n, parameter in enumerate(model.parameters()):
            gamma = lr * FACTORS[t - 1] * rates[n]
            decay = DECAY if parameter.ndim > 1 else 0.0
            for i, g in enumerate(parameter.grad.flatten().tolist()):
                if adam:
                    v[n][i] = 0.999 * v[n][i] + 0.001 * g * g
                    g = g / ((v[n][i] / (1 - 0.999**t)) ** 0.5 + 1e-8)
                z[n][i] -= gamma * (g + decay * y[n][i])
                x[n][i] = (1 - c) * x[n][i] + c * z[n][i]
                y[n][i] = (1 - beta) * z[n][i] + beta * x[n][i]
    shapes = [parameter.shape for parameter in model.parameters()]
    return [[torch.tensor(a, dtype=torch.float64).view(s) for a, s in zip(of, shapes, strict=True)] for of in (y, z, x)]


@pytest.mark.parametrize(
    ("name", "lr", "momentum"),
    [("schedulefree-sgd", 0.5, 0.9), ("schedulefree-sgd", 0.5, 0.0), ("schedulefree-adamw", 0.02, 0.9)],
)
def test_steps_are_those_of_the_papers_algorithm(name, lr, momentum):
    for found, expected in zip(ours(name, lr, momentum), papers("adamw" in name, lr, momentum), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(found, network().parameters(), strict=True))


def test_parameters_without_gradient_stay_and_their_group_begins_when_they_have_one():
    model = network()
    groups = [{"params": [*layer.parameters()]} for layer in (model[0], model[2])]
    optimizer = ScheduleFreeAdamW(groups, lr=0.1)
    before = parameters(model[0])
    for step, loss in enumerate(losses(4)):
        optimizer.zero_grad()
        loss(model).backward()
        if step < 3:
            model[0].weight.grad = model[0].bias.grad = None
        optimizer.step()
        assert equal(parameters(model[0]), before) is (step < 3)
    assert [group["steps"] for group in optimizer.param_groups] == [1, 4]
    for parameter, start in zip(model[0].parameters(), before, strict=True):  # its first step: x = z, of Adam's size
        assert torch.equal(optimizer.state[parameter]["x"], optimizer.state[parameter]["z"])
        torch.testing.assert_close((parameter - start).abs(), torch.full_like(start, 0.1), rtol=1e-3, atol=0)


def x_of(traval):
    """The averaged weights by name."""
    return {name: traval.optimizers[0].state[p]["x"] for name, p in traval.model.named_parameters()}


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_validation_and_checkpoints_have_x_with_batch_norm_statistics_of_its_own(optimizer):
    from utils.loop.validation import validate
    from utils.optim.batch_norm_statistics import recompute

    traval, recorder, saver = watched(
        *THREE_STEPS, "--epochs", "2", *optimizer, "--lr", "0.02", model=with_batch_norm().model
    )
    traval.fit()
    separate = copy.deepcopy(traval.model)
    x = x_of(traval)
    separate.load_state_dict({**traval.model.state_dict(), **x})
    recompute(separate, traval.train_loader, 1, 16, traval.distributed, traval.autocast, lambda: None)
    state = saver.states[-1]
    assert equal(dict(separate.state_dict()), dict(state["ema"]["model"]))
    assert equal(dict(traval.model.state_dict()), dict(state["model"])), "the raw weights are y"
    assert not any(torch.equal(value, state["model"][name]) for name, value in x.items())
    common = (traval.validation_loader, traval.distributed, traval.autocast, traval.writer, traval.bad_images)
    expected, raw = (validate(model, *common, lambda: None) for model in (separate, traval.model))
    (row,) = recorder.of("epoch")[-1]
    assert (row["val_loss"], row["raw_val_loss"]) == (expected.loss, raw.loss) and expected.loss != raw.loss


def test_a_run_interrupted_before_its_validation_ends_with_the_same_bits():
    flags = ("--epochs", "2", *ADAMW, "--lr", "0.02", "--warmup-epochs", "1", "--layer-decay", "0.7")
    whole, first, second = (with_batch_norm(*flags) for _ in range(3))
    whole.fit()
    first.train(0)
    first.validation(0)
    first.train(1)
    state = copy.deepcopy(first.state())
    assert all(torch.equal(state["ema"]["model"][name], value) for name, value in x_of(first).items())
    second.load_state(state)
    assert equal(first.state(), second.state())
    first.fit()  # saving in between changes nothing either
    second.fit()
    assert equal(second.state(), whole.state()) and equal(first.state(), whole.state())


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_a_skipped_step_moves_nothing(optimizer):
    traval = make("--arch", "fc", "--amp", "fp16", "--init-scale", "1024", *optimizer, criterion=Overflow(at=2))
    steps(traval, 1)
    before = {part: copy.deepcopy(value) for part, value in traval.state().items() if part != "progress"}
    steps(traval, 1)
    after = traval.state()
    assert traval.progress.skipped_steps == 1 and after["optimizer"]["param_groups"][0]["steps"] == 1
    assert all(equal(before[part], after[part]) for part in ("model", "ema", "optimizer"))
    steps(traval, 1)
    assert not equal(before["ema"], traval.state()["ema"])


def test_each_parameter_that_is_frozen_at_first_begins_when_it_is_released(tmp_path):
    run = trained(tmp_path, *CPU, *ADAMW, "--epochs", 2, "--freeze", "layers.1", "--unfreeze-epoch", 1)
    first = load(run, "initial.pt")
    last = load(run, "final.pt")
    assert sorted(group["steps"] for group in last["optimizer"]["param_groups"]) == [6, 12]
    assert not equal(first["ema"]["model"]["layers.1.weight"], last["ema"]["model"]["layers.1.weight"])


def test_a_run_evaluates_begins_another_and_continues_with_x(tmp_path, capsys):
    run = trained(tmp_path / "runs", *CPU, *SGD, "--epochs", 1)
    *lines, last = capsys.readouterr().out.splitlines()
    assert "Weight average: that of the schedule-free optimizer" in lines
    state = load(run, "final.pt")
    x = [entry["x"] for entry in state["optimizer"]["state"].values()]
    for name in ("final.pt", "best.pt"):
        path = f"{run}/checkpoints/{name}"
        assert equal([*load(run, name)["ema"]["model"].values()], x)
        assert equal([p.detach() for p in load_model(path).network.parameters()], x)
        assert main.main(["--evaluate", "--weights", path, *CPU]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == last.partition(" val_epoch")[0]
    (row,) = rows(run)
    assert row["val_loss"] != row["raw_val_loss"]
    other = ("--resume", str(run), "--resume-override", "--lr", "0.5", "--momentum", "0.8", "--epochs", "2")
    assert main.main([*CPU, *other]) == 0
    (group,) = load(run, "final.pt")["optimizer"]["param_groups"]
    assert (group["steps"], group["lr_max"], group["lr"], group["momentum"]) == (12, 1.0, 0.5, 0.8)
    more = trained(tmp_path / "more", *CPU, "--weights", run / "checkpoints/best.pt", "--max-steps", 1)
    assert equal(load(more, "initial.pt")["model"], load(run, "best.pt")["ema"]["model"])


def test_the_schedule_is_constant_by_default_and_after_the_warm_up(recipe):
    cosine = [*SGD, "--config", recipe("lr-policy: cosine\n")]
    for args in (parse([*SGD]), parse(cosine), parse([*SGD, "--lr-policy", "constant", "--warmup-epochs", "2"])):
        assert (args.optimisation.lr_policy, args.optimisation.lr) == ("constant", 1.0)
    assert parse([*ADAMW]).optimisation.lr == 0.001
    assert parse([]).optimisation.lr_policy == "cosine"
