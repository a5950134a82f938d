"""Search for where in a network values stop being finite: module hooks for one forward and backward pass.

Autocast rounds to half precision layer by layer, so the trouble begins in the first layer, in the order of
computation, that turns finite values into a non-finite one; all later layers only pass it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from utils.runtime.sharding import local

Seen = Callable[[str, nn.Module, torch.Tensor], None]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in nested tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


@contextmanager
def watching(
    model: nn.Module, *, inputs: Seen | None = None, outputs: Seen | None = None, gradients: Seen | None = None
) -> Iterator[None]:
    """Context in which every module of ``model`` reports its tensors, in the order of computation.

    Each callback takes (name, module, tensor): ``inputs`` before the module runs, ``outputs`` afterwards, and
    ``gradients`` with the gradient of the loss (scaled, if the loss was) with respect to an output. A module
    that holds others reports its outputs after theirs. The network itself has the name ''.
    """

    def before(seen: Seen, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        for tensor in tensors_in(arguments):
            seen(name, module, tensor.detach())

    def after(name: str, module: nn.Module, output: Any) -> None:
        for tensor in tensors_in(output):
            if outputs is not None:
                outputs(name, module, tensor.detach())
            if gradients is not None and tensor.requires_grad:
                # A hook on the tensor, unlike one on the module, also allows the in-place operations that may follow.
                tensor.register_hook(lambda gradient: gradients(name, module, gradient.detach()))

    with ExitStack() as hooks:  # which are removed at its end
        for name, module in model.named_modules():
            if inputs is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, inputs, name)))
            hook = module.register_forward_hook(lambda m, args, output, name=name: after(name, m, output))
            hooks.enter_context(hook)
        yield


@dataclass
class NonFinite:
    """Layers with values that are not finite, in order; empty lists if there are none.

    ``outputs``: modules whose output is not finite. ``gradients``: modules whose output's gradient is not finite, in
    the order of the backward pass, so the network's end comes first. ``parameters``: parameters whose gradient is not
    finite. ``loss``: True if the loss is not finite. ``origin``: where it began, as text.
    """

    outputs: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    loss: bool = False
    origin: str = ""

    def __bool__(self) -> bool:
        return bool(self.outputs or self.gradients or self.parameters or self.loss)


def find_non_finite(
    model: nn.Module, forward: Callable[[], tuple[Any, ...]], backward: Callable[[torch.Tensor], None]
) -> tuple[NonFinite, torch.Tensor]:
    """Run both passes; return the layers of ``model`` that give non-finite values, and the logits.

    ``forward`` returns logits, loss and more; ``backward`` takes the loss. Effects of the passes are not undone: the
    caller restores buffers and gradients. Everything is checked on the device and read once at the end.
    """
    records: list[tuple[str, str, torch.Tensor]] = []

    def seen(kind: str, name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        records.append((kind, name, torch.isfinite(tensor).all()))

    bad: dict[str, list[str]] = {"inputs": [], "outputs": [], "gradients": []}
    with watching(model, **{kind: partial(seen, kind) for kind in bad}):
        logits, loss, *_ = forward()
        backward(loss)
    found = NonFinite(loss=not bool(torch.isfinite(loss.detach()).all()))
    found.parameters = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
    ]
    if not records:
        return found, logits.detach()
    finite = torch.stack([flag for *_, flag in records]).tolist()
    fed: dict[str, bool] = {}  # whether a module's current call got finite inputs
    for (kind, name, _), is_finite in zip(records, finite, strict=True):
        if kind == "inputs":
            fed[name] = fed.get(name, True) and is_finite
        if not is_finite and not bad["outputs"] and kind == "outputs":
            found.origin = _forward_origin(name, fed.get(name, True), not fed.get("", True))
        if kind == "outputs":
            fed.pop(name, None)
        if not is_finite and name not in bad[kind]:
            bad[kind].append(name)
    found.outputs = bad["outputs"]
    found.gradients = bad["gradients"]
    found.origin = found.origin or _backward_origin(found)
    return found, logits.detach()


def _forward_origin(first: str, inputs_finite: bool, images_bad: bool) -> str:
    if inputs_finite:
        return f"output of {first or 'the network'}"
    if images_bad:
        return "the images themselves"
    return f"computation in {first.rpartition('.')[0] or 'the network'} just before {first}"


def _backward_origin(found: NonFinite) -> str:
    if found.loss:
        return "the loss"
    if found.gradients:
        return f"gradient of the output of {found.gradients[0] or 'the network'}"
    return f"gradient of {found.parameters[-1]}" if found.parameters else ""
