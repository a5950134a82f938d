"""Optimizers against torch's and timm's own, and against closed formulas."""

import copy
import dataclasses
import re
from functools import partial

import pytest
import timm
import timm.optim
import torch
from torch import nn

from tests.helpers import equal, mistakes_of
from utils.config.groups.optimisation import OptimisationSettings
from utils.config.settings import UserError
from utils.optim.groups import parameter_groups
from utils.optim.optimizers import OWN, _one, build_optimizers, has_momentum, load_states, unknown_optimizer


def network():
    """A small network with convolution, norm and linear layer; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def weights_after_steps(model, optimizers, steps=4):
    """All parameters after some steps on the same random gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)  # in its memory format, as autograd's
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_same_steps(settings, make_reference):
    ours = network()
    reference = network()
    found = weights_after_steps(ours, build_optimizers(settings, ours))
    expected = weights_after_steps(reference, [make_reference(reference)])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], next(network().parameters()))


SGD = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01}
ADAM = {"lr": 0.01, "weight_decay": 0.1}
OF_TORCH = {
    "sgd": ({"optimizer": "sgd", **SGD}, partial(torch.optim.SGD, **SGD)),
    "nesterov": ({"optimizer": "sgd", **SGD, "nesterov": True}, partial(torch.optim.SGD, **SGD, nesterov=True)),
    "plain sgd": (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        partial(torch.optim.SGD, lr=0.1),
    ),
    "adam": ({"optimizer": "adam", **ADAM}, partial(torch.optim.Adam, **ADAM)),
    "adamw": ({"optimizer": "adamw", **ADAM}, partial(torch.optim.AdamW, **ADAM)),
}


@pytest.mark.parametrize(("settings", "make"), OF_TORCH.values(), ids=OF_TORCH)
def test_steps_equal_those_of_torchs_optimizer(settings, make):
    """To the bit those of its fused kernel, and those of its plain loop but for the last digits."""
    settings = OptimisationSettings(**settings)
    assert_same_steps(settings, lambda model: make(model.parameters(), fused=True))
    ours = network()
    plain = network()
    found = weights_after_steps(ours, build_optimizers(settings, ours))
    torch.testing.assert_close(found, weights_after_steps(plain, [make(plain.parameters())]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{**SGD, "optimizer": "sgd"}, {**ADAM, "optimizer": "adamw"}])
@pytest.mark.parametrize("formats", [("contiguous", "channels last"), ("channels last", "contiguous")])
def test_a_state_saved_in_one_memory_format_goes_on_in_the_other(formats, settings):
    """The fused kernels would pair each weight with another weight's momentum."""
    known = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
    models = [nn.Sequential(nn.Conv2d(3, 16, 4)).to(memory_format=known[name]) for name in formats]
    optimizers = [build_optimizers(OptimisationSettings(**settings), model) for model in models]
    weights_after_steps(models[0], optimizers[0])
    state = {"model": models[0].state_dict(), "optimizer": optimizers[0][0].state_dict()}
    load_states(models[1], optimizers[1], copy.deepcopy(state))
    same, other = map(weights_after_steps, models, optimizers)
    assert all(torch.equal(a, b) for a, b in zip(same, other, strict=True))


@pytest.mark.parametrize("name", OWN)
def test_momentum_changes_the_steps_of_those_that_are_said_to_use_it_and_of_no_other(name):
    found = []
    for momentum in (0.5, 0.9):
        model = network()
        settings = OptimisationSettings(optimizer=name, lr=0.01, momentum=momentum)
        found.append(weights_after_steps(model, build_optimizers(settings, model)))
    assert equal(*found) is not has_momentum(name)


@pytest.mark.parametrize(
    "kind", [torch.optim.ASGD, torch.optim.NAdam, torch.optim.Rprop], ids=lambda kind: kind.__name__
)
def test_one_of_torchs_without_a_fused_kernel_can_be_entered_and_takes_its_steps(kind, monkeypatch):
    monkeypatch.setitem(OWN, "added", _one(kind))
    settings = OptimisationSettings(optimizer="added", lr=0.01, weight_decay=0.0)
    assert_same_steps(settings, lambda model: kind(model.parameters(), lr=0.01, foreach=True))


@pytest.mark.parametrize("name", ["lamb", "lion", "nadamw", "rmsproptf", "adafactor", "sgdw", "laprop"])
@pytest.mark.parametrize("decay_norm_bias", [True, False], ids=["all", "weights only"])
def test_steps_equal_those_of_timms_factory(name, decay_norm_bias):
    settings = OptimisationSettings(
        optimizer=name, lr=0.01, weight_decay=0.1, momentum=0.9, decay_norm_bias=decay_norm_bias
    )

    def make(model):
        return timm.optim.create_optimizer_v2(
            model, opt=name, lr=0.01, weight_decay=0.1, momentum=0.9, filter_bias_and_bn=not decay_norm_bias
        )

    assert_same_steps(settings, make)


def decaying(decay_norm_bias):
    return OptimisationSettings(weight_decay=0.1, decay_norm_bias=decay_norm_bias)


def names_without_decay(groups, model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)] for group in groups if group["weight_decay"] == 0 for p in group["params"]}


@pytest.mark.parametrize(
    ("patterns", "kinds"),
    [
        (("*bn*",), lambda name: "bn" in name),  # NVIDIA's and FFCV's: not the norms of the shortcuts
        (("*bn*", "*downsample.1*"), lambda name: "bn" in name or "downsample.1" in name),  # torchvision's: all norms
        (("fc.weight",), lambda name: name == "fc.weight"),
    ],
)
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_what_is_named_does_not_decay(patterns, kinds, layer_decay):
    model = timm.create_model("resnet18", num_classes=10)
    settings = OptimisationSettings(weight_decay=0.1, weight_decay_except=patterns, layer_decay=layer_decay)
    expected = {name for name, _ in model.named_parameters() if kinds(name)}
    groups = parameter_groups(settings, model)
    assert names_without_decay(groups, model) == expected
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)]
    of_norms = {f"{norm}.{name}" for norm in norms for name in ("weight", "bias")}
    assert len(patterns) < 2 or expected == of_norms


def test_named_and_one_dimensional_parameters_both_go_without_decay():
    settings = dataclasses.replace(decaying(decay_norm_bias=False), weight_decay_except=("0.weight",))
    model = network()
    biases = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    assert names_without_decay(parameter_groups(settings, model), model) == {"0.weight", *biases}


def test_a_name_that_no_parameter_has_is_a_mistake():
    settings = dataclasses.replace(decaying(True), weight_decay_except=("0.wieght",))
    with pytest.raises(UserError, match=r"--weight-decay-except 0\.wieght: no parameter .* did you mean 0\.weight"):
        parameter_groups(settings, network())


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("adamm", "adam"), ("sdg", "sgd"), ("lambb", "lamb"), ("SGD", "sgd"), ("AdamW", "adamw"), ("RMSprop", "rmsprop")],
)
def test_unknown_optimizer_is_answered_with_the_nearest_names_once_each(wrong, near):
    (line,) = mistakes_of(build_optimizers, OptimisationSettings(optimizer=wrong, lr=0.1), network())
    assert f"--optimizer '{wrong}'" in line
    names = line.split("did you mean ")[1].rstrip("?").split(", ")
    assert near in names and len(set(names)) == len(names)


def test_the_help_of_the_flag_names_each_of_ours():
    (declared,) = (option.metadata for option in dataclasses.fields(OptimisationSettings) if option.name == "optimizer")
    assert set(OWN) - set(re.findall(r"[\w-]+", declared["help"])) == set()


def test_optimizers_of_torch_by_their_class_are_ours_or_said_to_be_none():
    """Every optimizer of torch, and torchvision's sgd_nesterov."""
    offered = {*OWN, *timm.optim.list_optimizers()}
    assert "adamw" in offered and "lbfgs" not in offered
    for name in (name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)):
        line = unknown_optimizer(name)
        if name.lower() in offered:
            assert line == f"--optimizer '{name}': did you mean {name.lower()}?"
        elif name != "Optimizer":
            assert line.startswith(f"--optimizer {name}: is torch's, but")
    assert unknown_optimizer("sgd_nesterov").endswith("write --optimizer sgd --nesterov")
    assert unknown_optimizer("auto").startswith("--optimizer auto: no equivalent")


# ------------------------------------------------------------------------------------------ arguments

ARGUMENTS = {"opt_eps": 1e-3, "opt_betas": (0.8, 0.97)}
GIVEN = {"eps": 1e-3, "betas": (0.8, 0.97)}


WITH_ARGUMENTS = {
    "adamw": (
        {**ARGUMENTS, "opt_kwargs": ("amsgrad=true",)},
        partial(torch.optim.AdamW, lr=0.01, **GIVEN, weight_decay=0.0, amsgrad=True, fused=True),
    ),
    "adam": (ARGUMENTS, partial(torch.optim.Adam, lr=0.01, **GIVEN, fused=True)),
    "sgd": (
        {"opt_kwargs": ("dampening=0.5", "maximize=true")},
        partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5, maximize=True, fused=True),
    ),
    "rmsproptf": (
        {"opt_eps": 1e-3, "opt_kwargs": ("alpha=0.8", "centered=true")},
        partial(timm.optim.RMSpropTF, lr=0.01, eps=1e-3, momentum=0.9, alpha=0.8, centered=True),
    ),
    "adan": (
        {"opt_eps": 1e-3, "opt_betas": (0.9, 0.8, 0.7), "opt_kwargs": ("no_prox=true",)},
        partial(timm.optim.Adan, lr=0.01, eps=1e-3, betas=(0.9, 0.8, 0.7), no_prox=True),
    ),
    "adafactor": (
        {"opt_kwargs": ("clip_threshold=0.01",)},
        partial(timm.optim.create_optimizer_v2, opt="adafactor", lr=0.01, clip_threshold=0.01),
    ),
}


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_steps_with_arguments_are_those_of_an_optimizer_that_was_made_with_them(name):
    settings, make = WITH_ARGUMENTS[name]
    settings = OptimisationSettings(optimizer=name, lr=0.01, weight_decay=0.0, **settings)
    assert_same_steps(settings, lambda model: make(model.parameters()))
    changed = ("opt_eps", "opt_betas", "opt_kwargs")
    plain = network()
    ours = network()
    expected = weights_after_steps(
        plain, build_optimizers(dataclasses.replace(settings, **dict.fromkeys(changed)), plain)
    )
    found = weights_after_steps(ours, build_optimizers(settings, ours))
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_betas_that_timm_would_drop_are_refused(monkeypatch):
    info = dataclasses.replace(timm.optim.get_optimizer_info("lamb"), has_betas=False)
    monkeypatch.setattr(timm.optim, "get_optimizer_info", lambda name: info)
    with pytest.raises(UserError, match=r"--opt-betas 0\.8 0\.9: --optimizer lamb has no betas; remove it"):
        build_optimizers(OptimisationSettings(optimizer="lamb", lr=0.1, opt_betas=(0.8, 0.9)), network())


def test_each_of_several_optimizers_gets_the_arguments_that_it_has(muon_in_bf16):
    settings = OptimisationSettings(
        optimizer="muon", lr=0.01, weight_decay=0.0, **ARGUMENTS, opt_kwargs=("ns_steps=2",)
    )
    muon, adamw = build_optimizers(settings, model := deeper_network())
    matrices = [id(p) for group in muon.param_groups for p in group["params"]]
    found = weights_after_steps(model, [muon, adamw])
    reference = deeper_network()
    split = {True: [], False: []}
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        split[id(ours) in matrices].append(theirs)
    expected = weights_after_steps(
        reference,
        [
            timm.optim.Muon(split[True], 0.01, **GIVEN, ns_steps=2, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(split[False], 0.01, weight_decay=0.0, **GIVEN, fused=True),
        ],
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    muon, sgd = muon_sgd(deeper_network(), opt_eps=1e-3, opt_kwargs=("dampening=0.1", "ns_steps=7"), nesterov=False)
    assert muon.param_groups[0]["eps"] == 1e-3 and muon.param_groups[0]["ns_steps"] == 7
    assert sgd.param_groups[0]["dampening"] == 0.1 and "eps" not in sgd.param_groups[0]


def deeper_network():
    """A network with a hidden convolution and a hidden matrix, which are Muon's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def test_the_schedule_free_adamw_takes_its_betas_and_eps():
    settings = OptimisationSettings(optimizer="schedulefree-adamw", lr=0.01, weight_decay=0.0, **ARGUMENTS)
    model = network()
    start = network()
    found = weights_after_steps(model, build_optimizers(settings, model), steps=1)
    gradients = torch.Generator().manual_seed(1)
    for after, before in zip(found, start.parameters(), strict=True):
        gradient = torch.randn(before.shape, generator=gradients)
        # After one step, x = z and so is y; the bias-corrected square is the gradient's own.
        expected = before.detach() - 0.01 * gradient / (gradient.abs() + 1e-3)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-7)  # a few roundings of a step of 0.01
    (optimizer,) = build_optimizers(settings, network())
    assert optimizer.param_groups[0]["momentum"] == 0.8 and optimizer.beta2 == 0.97


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"opt_betas": (0.9, 0.95)}, "--opt-betas 0.9 0.95: --optimizer sgd has no betas; remove it"),
        ({"opt_eps": 1e-3}, "--opt-eps 0.001: --optimizer sgd has no eps; remove it"),
        ({"optimizer": "muon-sgd", "opt_betas": (0.9, 0.95)}, "--optimizer muon-sgd has no betas"),
        ({"optimizer": "schedulefree-sgd", "opt_betas": (0.9, 0.95)}, "--optimizer schedulefree-sgd has no betas"),
        ({"optimizer": "adamw", "opt_betas": (0.9,)}, "betas of --optimizer adamw must be 2 numbers"),
        ({"optimizer": "adan", "opt_betas": (0.9, 0.9)}, "betas of --optimizer adan must be 3 numbers"),
        ({"optimizer": "adamw", "opt_kwargs": ("amsgrd=true",)}, "takes no amsgrd; did you mean amsgrad?"),
        ({"optimizer": "adamw", "opt_kwargs": ("fused=true",)}, "takes no fused; it takes amsgrad"),
        ({"optimizer": "adamw", "opt_kwargs": ("amsgrad=3",)}, "amsgrad of --optimizer adamw must be true or false"),
        (
            {"optimizer": "lamb", "opt_kwargs": ("max_grad_norm=a",)},
            "max_grad_norm of --optimizer lamb must be a number",
        ),
        ({"optimizer": "rmsprop", "opt_kwargs": ("alpha=null",)}, "alpha of --optimizer rmsprop must have a value"),
        ({"optimizer": "muon", "opt_kwargs": ("ns_steps=2.5",)}, "ns_steps of --optimizer muon must be a whole number"),
        ({"optimizer": "rmsprop", "opt_kwargs": ("alpha=-1",)}, "--optimizer rmsprop: cannot be built (Invalid alpha"),
        ({"optimizer": "adamw", "opt_kwargs": ("lr=1",)}, "lr has a flag of its own; write --lr"),
        ({"optimizer": "adamw", "opt_kwargs": ("weight_decay=1",)}, "write --weight-decay"),
        ({"optimizer": "adamw", "opt_kwargs": ("betas=1",)}, "write --opt-betas"),
        ({"optimizer": "adamw", "opt_kwargs": ("eps=1",)}, "write --opt-eps"),
        ({"opt_kwargs": ("momentum=0.5",)}, "write --momentum"),
        ({"opt_kwargs": ("nesterov=true",)}, "write --nesterov"),
        ({"optimizer": "lamb", "opt_kwargs": ("nesterov",)}, "write NAME=VALUE"),
        ({"opt_kwargs": ("dampening=1", "dampening=0")}, "--opt-kwargs dampening=0: dampening is given twice"),
    ],
)
def test_an_argument_that_an_optimizer_does_not_take_is_one_line(settings, words):
    (line,) = mistakes_of(build_optimizers, OptimisationSettings(lr=0.01, **settings), deeper_network())
    assert words in line


# ------------------------------------------------------------------------------------------ muon-sgd

# Muon's polynomial, three times, brings singular values from 0.05 up to between 0.68 and 1.20; of random matrices of
# these shapes, the root of their mean square was 0.84 to 0.98 for 100 seeds. Without the factor for tall matrices it
# would be 0.73 at most.
MUON_NORM = 0.8, 1.0


def muon_sgd(model, **more):
    more = {"lr": 0.24, "momentum": 0.85, "nesterov": True, "weight_decay": 0.02} | more
    return build_optimizers(OptimisationSettings(optimizer="muon-sgd", **more), model)


def orthogonal(matrix):
    """The matrix with the same singular vectors and all singular values 1."""
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (left @ right).float()


@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (1, 1), (16, 16)])  # of colours, of grey images, depthwise
def test_muon_sgd_takes_steps_of_the_size_of_an_orthogonal_matrix_from_filters_of_fixed_norm(channels, groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 16, 3, groups=groups), nn.Flatten(), nn.Linear(16, 4))
    filters = model[0].weight
    muon, _ = muon_sgd(model)
    filters.grad = torch.randn_like(filters)
    rows, columns = filters.grad.flatten(1).shape
    direction = max(1, rows / columns) ** 0.5 * orthogonal(filters.grad.flatten(1))
    kept = filters.detach() * 4 / filters.detach().norm()  # the norm sqrt(16)
    muon.step()
    step = (kept - filters.detach()).flatten(1) / 0.24
    cosine = nn.functional.cosine_similarity(step.flatten(), direction.flatten(), dim=0)
    assert cosine > 0.97, "three iterations bring the singular values near 1, not to 1"
    assert MUON_NORM[0] < step.norm() / direction.norm() < MUON_NORM[1]


def test_muon_sgd_leaves_filters_that_begin_at_zero_to_their_first_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16, 4))
    filters = nn.init.zeros_(model[0].weight)  # as timm begins the last filters of a residual block
    muon, _ = muon_sgd(model)
    filters.grad = torch.randn_like(filters)
    muon.step()
    assert MUON_NORM[0] < filters.detach().norm() / (0.24 * 4) < MUON_NORM[1], "16 singular values of about 0.24"


def test_muon_sgd_is_nesterov_sgd_for_the_rest_and_decays_it_alike_at_any_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    muon, sgd = muon_sgd(model, lr_scale=("1.weight=10",))
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [id(model[0].weight)]
    assert all(group["weight_decay"] == 0 for group in muon.param_groups)
    head = model[1].weight
    bias = model[1].bias
    reference = {name: p.detach().clone() for name, p in (("head", head), ("bias", bias))}
    buffers = {}
    for _ in range(3):
        for group in sgd.param_groups:
            group["lr"] = 0.24 * group["lr_scale"]
        head.grad = torch.randn_like(head)
        bias.grad = torch.randn_like(bias)
        model[0].bias.grad = torch.zeros(5)
        for name, parameter, scale in (("head", head, 10.0), ("bias", bias, 1.0)):
            gradient = parameter.grad + 0.02 / scale * reference[name]
            buffers[name] = 0.85 * buffers[name] + gradient if name in buffers else gradient.clone()
            reference[name] -= 0.24 * scale * (gradient + 0.85 * buffers[name])
        sgd.step()
    torch.testing.assert_close(head.detach(), reference["head"])
    torch.testing.assert_close(bias.detach(), reference["bias"])


def test_the_first_pattern_that_fits_scales_a_rate_and_one_that_fits_none_is_a_mistake():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    (built,) = build_optimizers(OptimisationSettings(lr=0.1, lr_scale=("1.*=3", "*.bias=2")), model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = {names[id(p)]: group["lr_scale"] for group in built.param_groups for p in group["params"]}
    assert scales == {"0.weight": 1.0, "0.bias": 2.0, "1.weight": 3.0, "1.bias": 3.0}
    with pytest.raises(UserError, match=r"--lr-scale 2\.weight=3: no parameter is left .* did you mean [01]\.weight"):
        build_optimizers(OptimisationSettings(lr=0.1, lr_scale=("2.weight=3",)), model)
