"""Optimizers by name: torch's sgd, adam and adamw, Muon with AdamW or SGD, schedule-free ones, and all of timm's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from utils.config import plugins
from utils.config.groups.optimisation import WITH_NESTEROV, OptimisationSettings
from utils.config.keywords import given_twice, not_accepted, read_keyword
from utils.config.settings import UserError, as_text
from utils.config.spelling import advice_on, or_nearest, reason_of, some
from utils.optim.groups import lr_scales, parameter_groups
from utils.optim.head import output_layers
from utils.optim.lookahead import Lookahead
from utils.optim.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from utils.runtime.state_dicts import load_state_dict

# Muon's settings in ``muon-sgd``
AIRBENCH_MOMENTUM = 0.6
AIRBENCH_ITERATIONS = 3

# Arguments with flags of their own, and those that say how to compute, not what, which the builders choose.
OWN_FLAGS = {"lr": "--lr", "weight_decay": "--weight-decay", "eps": "--opt-eps", "betas": "--opt-betas"}
CHOSEN = {"params", "groups", "foreach", "fused", "capturable", "differentiable"}

Optimizers = tuple[torch.optim.Optimizer, ...]  # each for its own parameters


class OptimizerArguments:
    """The user's arguments besides learning rate, momentum and weight decay, for all optimizers of one --optimizer.

    Each optimizer gets the arguments that its constructor takes (``of``); an argument that no constructor takes is a
    mistake (``refuse_others``). ``has_momentum``: True if --momentum sets the optimizers' momentum.
    """

    def __init__(self, settings: OptimisationSettings, has_momentum: bool) -> None:
        self.subject = f"--optimizer {settings.optimizer}"
        self._values: dict[str, Any] = {}
        self._written: dict[str, str] = {}  # as on the command line, by name
        self._accepted: dict[str, None] = {}
        elsewhere = OWN_FLAGS | ({"momentum": "--momentum"} if has_momentum else {})
        elsewhere |= {"nesterov": "--nesterov"} if settings.optimizer in WITH_NESTEROV else {}
        self._not_kwargs = {*elsewhere, *CHOSEN}
        for name, value in (("eps", settings.opt_eps), ("betas", settings.opt_betas)):
            if value is not None:
                self._values[name] = value
                self._written[name] = f"{OWN_FLAGS[name]} {as_text(value)}"
        for item in settings.opt_kwargs or ():
            name, value = read_keyword("--opt-kwargs", item)
            if name in elsewhere:
                raise UserError(f"--opt-kwargs {item}: {name} has a flag of its own; write {elsewhere[name]}")
            if name in self._values:
                raise given_twice("--opt-kwargs", item)
            self._values[name] = value
            self._written[name] = f"--opt-kwargs {item}"

    def __bool__(self) -> bool:
        return bool(self._values)

    def of(self, kind: Callable[..., Any], without: Collection[str] = ()) -> dict[str, Any]:
        """Arguments that the constructor ``kind`` takes, except ``without``. Raises ``UserError`` for a wrong type."""
        parameters = {
            name: parameter
            for name, parameter in inspect.signature(kind).parameters.items()
            if name not in without and (name in ("eps", "betas") or name not in self._not_kwargs)
        }
        self._accepted |= dict.fromkeys(parameters)
        taken = {name: value for name, value in self._values.items() if name in parameters}
        for name, value in taken.items():
            if isinstance(value, list) and isinstance(parameters[name].default, tuple):  # JSON has lists alone
                value = taken[name] = tuple(value)
            if mistake := _mistake(value, parameters[name]):
                raise UserError(f"{self._written[name]}: {name} of {self.subject} {mistake}")
        return taken

    def refuse_others(self) -> None:
        """Raise ``UserError`` for the first argument that no optimizer has taken."""
        for name in (name for name in self._values if name not in self._accepted):
            if name in OWN_FLAGS:
                raise UserError(
                    f"{self._written[name]}: {self.subject} has no {name}; remove it (a recipe's: "
                    f"{OWN_FLAGS[name]} none)"
                )
            flag, _, item = self._written[name].partition(" ")
            accepted = [other for other in self._accepted if other not in self._not_kwargs]
            raise not_accepted(flag, item, self.subject, accepted)


def _mistake(value: Any, parameter: inspect.Parameter) -> str | None:
    """Text that says what ``parameter`` takes, if ``value`` is of another type; otherwise None."""
    default = parameter.default
    annotation = str(parameter.annotation)
    if value is None:
        return None if default is None or "None" in annotation or "Optional" in annotation else "must have a value"
    if isinstance(default, tuple) or "Tuple[float" in annotation:
        count = len(default) if isinstance(default, tuple) else annotation.count("float")
        return None if isinstance(value, tuple) and len(value) == count else f"must be {count} numbers"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool) or "bool" in annotation:
        return None if isinstance(value, bool) else "must be true or false"
    if parameter.annotation is int or annotation == "int":
        return None if number and isinstance(value, int) else "must be a whole number"
    if isinstance(default, int | float) or "float" in annotation:
        return None if number else "must be a number"
    if isinstance(default, str) or annotation.endswith("[str]"):
        return None if isinstance(value, str) else "must be a text"
    if parameter.annotation is parameter.empty and default in (None, parameter.empty):
        return None  # of a user's optimizer, which says nothing
    return "cannot be given on a command line"


def build_optimizers(settings: OptimisationSettings, model: nn.Module) -> Optimizers:
    """Build the optimizer, or for ``muon`` and ``muon-sgd`` the two, for the trainable parameters of ``model``.

    With ``lookahead`` each has slow weights of its own. Raises ``UserError`` for an unknown name, one that needs a
    package that is not installed, or an argument that the optimizer does not take.
    """
    mistake = unknown_optimizer(settings.optimizer)
    if mistake:
        raise UserError(mistake)
    arguments = OptimizerArguments(settings, has_momentum(settings.optimizer))
    try:
        own = plugins.added("optimizer").get(settings.optimizer)
        build = _of_plugin(own) if own else OWN.get(settings.optimizer, _timm)
        built = build(settings, model, arguments)
    except UserError:
        raise
    except Exception as error:  # a missing package or GPU, or an argument out of range: each raises something else
        if settings.optimizer in OWN and not arguments:
            raise
        reason = reason_of(error, with_file=True)
        raise UserError(f"--optimizer {settings.optimizer}: cannot be built ({reason})") from error
    arguments.refuse_others()
    if settings.lookahead is not None:
        for optimizer in built:
            Lookahead(optimizer, int(settings.lookahead[0]), settings.lookahead[1])
    return built


def _of_plugin(make: plugins.Entry) -> Builder:
    def build(settings: OptimisationSettings, model: nn.Module, arguments: OptimizerArguments) -> Optimizers:
        groups = parameter_groups(settings, model)
        optimizer = make(groups, settings.lr, **arguments.of(make, without=("groups", "lr")))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(f"{make.where} must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UserError(f"{make.where} needs the loss again in its step, which has it once")
        return (optimizer,)

    return build


def left_out(settings: OptimisationSettings, model: nn.Module, optimizers: Optimizers) -> str | None:
    """Warning about parameters of ``model`` that require a gradient and that no optimizer trains; otherwise None."""
    held = {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in held]
    if not names:
        return None
    count = sum(model.get_parameter(name).numel() for name in names)
    return (
        f"--optimizer {settings.optimizer} does not train {some(names)} ({count:,} parameters): they keep their first "
        "values; hand it all groups, or name these in --freeze"
    )


def _fused(kind: Callable[..., Any], groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Build an optimizer of ``kind`` with torch's fused kernel, the fastest on CPU and GPU, where torch has one."""
    sharded = any(hasattr(parameter, "to_local") for group in groups for parameter in group["params"])
    # torch's DTensor, of which a sharded network consists, knows no fused SGD.
    ways = inspect.signature(kind).parameters
    way = "fused" if "fused" in ways and not sharded else "foreach"
    options |= {way: True} if way in ways else {}
    return kind(groups, **options)


Builder = Callable[[OptimisationSettings, nn.Module, OptimizerArguments], Optimizers]


def _one(kind: type[torch.optim.Optimizer], *own: str) -> Builder:
    """Return the builder of a single optimizer, which takes the settings named ``own`` besides the learning rate."""
    make: Callable[..., Any] = partial(_fused, kind) if kind.__module__.startswith("torch.") else kind

    def build(settings: OptimisationSettings, model: nn.Module, arguments: OptimizerArguments) -> Optimizers:
        given = {name: getattr(settings, name) for name in own} | arguments.of(kind)
        return (make(parameter_groups(settings, model), lr=settings.lr, **given),)

    return build


def _muon(settings: OptimisationSettings, model: nn.Module, arguments: OptimizerArguments) -> Optimizers:
    """Build Muon for hidden matrices and convolution filters, AdamW for output layers, norms, biases and embeddings.

    Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; filters are treated as matrices (out,
    in x height x width). Updates are scaled to the size of AdamW's (Liu et al., Muon is scalable for LLM training,
    2025), so one learning rate and one weight decay serve both. Weights that timm's Muon does not treat as matrices,
    such as filters of one channel each, take its own AdamW steps, with Nesterov momentum.
    """
    from utils.optim.muon import Muon

    matrices, others = _matrices_and_others(model, "muon")
    hidden, groups = (parameter_groups(settings, model, only) for only in (matrices, others))
    of_muon = {"adjust_lr_fn": "match_rms_adamw"} | arguments.of(Muon)
    of_adamw = {"betas": (0.9, 0.95)} | arguments.of(torch.optim.AdamW)
    return (
        Muon(hidden, lr=settings.lr, weight_decay=settings.weight_decay, **of_muon),
        _fused(torch.optim.AdamW, groups, lr=settings.lr, **of_adamw),
    )


def _muon_sgd(settings: OptimisationSettings, model: nn.Module, arguments: OptimizerArguments) -> Optimizers:
    """Build Muon for hidden matrices and filters, which keep their norm, and SGD with momentum for everything else.

    As in airbench94 (Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024; the variant with Muon): before each
    step a matrix (out, in) gets the norm sqrt(out), and a step at rate 1 is a matrix whose singular values are all
    about 1; of a tall matrix about sqrt(out / in), as in Jordan's Muon of the same year: airbench94 has no such
    matrix. ``weight_decay`` applies to everything else: a step takes lr x weight_decay off each weight, whatever the
    scale of its own learning rate. Muon's momentum is the source's; ``momentum`` is SGD's.
    """
    from utils.optim.muon import Muon, keep_norms

    matrices, others = _matrices_and_others(model, "muon-sgd")
    hidden = parameter_groups(settings, model, matrices)
    of_muon = {
        "momentum": AIRBENCH_MOMENTUM,
        "nesterov": True,
        "ns_steps": AIRBENCH_ITERATIONS,
        "ns_coefficients": "original",
        "adjust_lr_fn": "original",
        **arguments.of(Muon, without=("betas", "adamw_lr", "fallback_lr_scale")),
    }
    # Otherwise filters of one channel would take AdamW's steps, at a learning rate many times too high for these.
    hidden = [{**group, "weight_decay": 0.0, "use_muon": True} for group in hidden]
    muon = Muon(hidden, lr=settings.lr, **of_muon)
    muon.register_step_pre_hook(keep_norms)
    groups = parameter_groups(settings, model, others)
    groups = [{**group, "weight_decay": group["weight_decay"] / group.get("lr_scale", 1.0)} for group in groups]
    of_sgd = {"momentum": settings.momentum, "nesterov": settings.nesterov} | arguments.of(torch.optim.SGD)
    return muon, _fused(torch.optim.SGD, groups, lr=settings.lr, **of_sgd)


def _matrices_and_others(model: nn.Module, optimizer: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices and filters of ``model``, and all its other parameters. Raises ``UserError`` without a matrix.

    They are the trainable weights of all linear layers and convolutions except output layers.
    """
    last = output_layers(model)
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    layers = [module for module in model.modules() if isinstance(module, kinds) and module not in last]
    weights = (layer.get_parameter("weight") for layer in layers)
    matrices = [weight for weight in weights if weight.requires_grad]
    if not matrices:
        raise UserError(f"--optimizer {optimizer}: {type(model).__name__} has no hidden matrix or filter; use adamw")
    taken = set(matrices)
    return matrices, [parameter for parameter in model.parameters() if parameter not in taken]


def _timm(settings: OptimisationSettings, model: nn.Module, arguments: OptimizerArguments) -> Optimizers:
    import timm.optim

    info = timm.optim.get_optimizer_info(settings.optimizer)
    if info.second_order:
        raise UserError(f"--optimizer {settings.optimizer}: needs second derivatives, which are not computed here")
    # timm silently drops these arguments if its registry says that the optimizer does not have them.
    dropped = [name for name, is_taken in (("eps", info.has_eps), ("betas", info.has_betas)) if not is_taken]
    given = arguments.of(timm.optim.get_optimizer_class(settings.optimizer, bind_defaults=False), without=dropped)
    optimizer = timm.optim.create_optimizer_v2(
        parameter_groups(settings, model),
        opt=settings.optimizer,
        lr=settings.lr,
        weight_decay=0.0,
        momentum=settings.momentum,
        **given,
    )
    return (optimizer,)


# Every other name is timm's. Those that use --momentum stand in MOMENTUM too.
OWN: dict[str, Builder] = {
    "sgd": _one(torch.optim.SGD, "momentum", "nesterov"),
    "adam": _one(torch.optim.Adam),
    "adamw": _one(torch.optim.AdamW),
    "muon": _muon,
    "muon-sgd": _muon_sgd,
    "schedulefree-sgd": _one(ScheduleFreeSGD, "momentum"),
    "schedulefree-adamw": _one(ScheduleFreeAdamW),
}
MOMENTUM = {"sgd", "muon-sgd", "schedulefree-sgd"}


def with_own_kernels(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The stored ``state``, but with ``optimizer``'s present choice of kernels, which differs for a sharded network."""
    own = [{name: group[name] for name in ("fused", "foreach") if name in group} for group in optimizer.param_groups]
    return {**state, "param_groups": [old | new for old, new in zip(state["param_groups"], own, strict=True)]}


def has_momentum(name: str) -> bool:
    """True if the optimizer ``name`` uses ``--momentum``."""
    if name in OWN or name in plugins.added("optimizer"):
        return name in MOMENTUM
    import timm.optim

    return timm.optim.get_optimizer_info(name).has_momentum


def unknown_optimizer(name: str) -> str | None:
    """Error message if there is no optimizer ``name``, or two of them; otherwise None."""
    own = plugins.added("optimizer").get(name)
    if own is None and name in OWN:
        return None
    import timm.optim

    known = [str(other) for other in timm.optim.list_optimizers()]
    if own is not None and name in (*OWN, *known):
        return f"--plugin {own.file}: there is an optimizer {name} already; choose another name"
    if own is not None or name in known:
        return None
    if name.lower() in (*OWN, *known):
        return f"--optimizer '{name}': did you mean {name.lower()}?"
    if name.removeprefix("lookahead_") in (name, *OWN, *known) and (advice := advice_on(name, known)):
        return f"--optimizer {name}{advice.replace(';', ':', 1)}"
    if name.lower() in map(str.lower, dir(torch.optim)):
        return f"--optimizer {name}: is torch's, but not offered here; adamw and sgd are"
    hint = or_nearest(name.lower(), (*OWN, *known), f"some are {', '.join((*OWN, 'lamb', 'lion'))}")
    return f"--optimizer '{name[:60]}': neither torch nor timm has it; {hint}"


def load_states(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Load the ``state`` of a checkpoint into ``model`` and its optimizers; that of several optimizers is a list."""
    load_state_dict(model, state["model"])
    stored = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]
    for optimizer, its_state in zip(optimizers, stored, strict=True):
        optimizer.load_state_dict(with_own_kernels(optimizer, its_state))
        match_strides(optimizer)


def match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give a state's tensors the strides of their parameters, if a run with another memory format has saved them.

    torch's fused kernels walk through the memory of both without looking at strides, and would mix up the elements.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():  # an entry may belong to no parameter
            both = torch.is_tensor(parameter) and torch.is_tensor(value)
            if both and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def describe(settings: OptimisationSettings, optimizers: Optimizers) -> str:
    """Describe the optimizer and what shapes its steps, besides the learning rate."""
    scales = lr_scales(optimizers)
    phrases = [settings.optimizer]
    if has_momentum(settings.optimizer):
        nesterov = " (Nesterov)" if settings.nesterov and settings.optimizer in WITH_NESTEROV else ""
        phrases.append(f"momentum {settings.momentum:g}{nesterov}")
    phrases += [] if settings.opt_eps is None else [f"eps {settings.opt_eps:g}"]
    phrases += [] if settings.opt_betas is None else [f"betas {as_text(settings.opt_betas)}"]
    phrases += settings.opt_kwargs or ()
    without = [*(settings.weight_decay_except or ()), *([] if settings.decay_norm_bias else ["norms and biases"])]
    decay = f" (not on {', '.join(without)})" if without else ""
    phrases.append(f"weight decay {settings.weight_decay:g}{decay}")
    if settings.layer_decay is not None:
        phrases.append(f"layer decay {settings.layer_decay:g} over {len(scales)} layers")
    if settings.lr_scale is not None:
        phrases.append("learning rates " + ", ".join(f"x {scale:.4g} ({name})" for name, scale in scales.items()))
    elif scales:
        phrases.append(f"learning rates x {min(scales.values()):.3g} to {max(scales.values()):.3g}")
    if settings.lookahead is not None:
        phrases.append("lookahead every {:g} steps by {:g}".format(*settings.lookahead))
    if settings.sam_rho:
        adaptive = ", adaptive" if settings.sam_adaptive else ""
        phrases.append(f"sharpness-aware (rho {settings.sam_rho:g}{adaptive}) in two passes a step")
    return ", ".join(phrases)
