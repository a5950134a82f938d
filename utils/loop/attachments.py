"""Optional parts of training: they attach to the loop, and a plain step does not notice them.

Gradients in bfloat16 (``Distributed.wrap``), growing images (the loader's) and a teacher (the criterion's) need no
attachment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from utils.checkpoint.checkpoint import Checkpointer
from utils.checkpoint.sharded import Places, write_shards
from utils.config.settings import Settings
from utils.data.loaders import Batch
from utils.loop.forward import Outputs
from utils.loop.hooks import Hooks
from utils.loop.verdict import Gradient, Verdicts
from utils.optim.clipping import GradientClipper
from utils.optim.ema import WeightAverage
from utils.optim.freezing import Freezing
from utils.precision.buffers import BufferCopy
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed
from utils.runtime.sharding import is_sharded

Passed = Callable[[Batch, Outputs], None]


class Loop(Protocol):
    """The members of ``TraVal`` that parts attached to it, and what launches its steps, may use."""

    model: nn.Module
    ema: WeightAverage | None
    optimizers: tuple[torch.optim.Optimizer, ...]
    clip: GradientClipper
    args: Settings
    distributed: Distributed
    device: torch.device
    scaler: torch.amp.GradScaler
    verdicts: Verdicts
    hooks: Hooks
    writer: Writer
    checkpointer: Checkpointer | None
    description: dict[str, Any]

    def launch_passes(self, batches: Iterable[Batch], passed: Passed) -> Gradient: ...
    def launch_update(self, gradient: Gradient) -> torch.Tensor | None: ...
    def loss_scale(self) -> torch.Tensor: ...
    def seed_step(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def wait_for_checkpoint(self) -> None: ...


class Attachment:
    """A part of training that does nothing; subclasses override what they take part in."""

    def begin_epoch(self, loop: Loop, epoch: int) -> bool:
        """Prepare ``epoch``, from 0, before its steps; return True if the set of parameters that train has changed."""
        return False

    def prepare(self, loop: Loop) -> None:
        """Prepare for the parameters that train, at the beginning and whenever these have changed."""

    def passes(self, loop: Loop, batches: Iterable[Batch]) -> Iterable[Batch]:
        """The batches of all forward passes of a step that trains on ``batches``."""
        return batches

    def places(self, loop: Loop) -> Places | None:
        """The part of each state tensor that this process holds; None if it holds all of them whole."""
        return None

    def write(self, loop: Loop) -> dict[str, Any] | None:
        """Write the state's tensors and return the rest for a checkpoint's file; or write nothing and return None."""
        return None


class FrozenLayers(Attachment):
    """Layers that are frozen in some epochs (``utils/optim/freezing.py``)."""

    def __init__(self, freezing: Freezing) -> None:
        self.freezing = freezing

    def begin_epoch(self, loop: Loop, epoch: int) -> bool:
        return self.freezing.set_epoch(epoch, loop.model, loop.ema.module if loop.ema is not None else None)


class TwoPasses(Attachment):
    """Sharpness-aware minimisation: a step's batches, then the same batches again with the weights moved uphill.

    Foret et al., Sharpness-aware minimization for efficiently improving generalization, 2021: with the gradient g of
    the whole step, the second gradient is taken at w + rho x g / |g|, and applied to w; with --sam-adaptive at w + rho
    x w^2 g / |w g|, a distance relative to each weight (Kwon et al., ASAM, 2021).

    The loop adds up the gradient of the batches that it is given. The gradient of the first round, summed over ranks
    and accumulation to that of the whole step, decides where uphill is; only the gradient of the second round remains.
    Batch norm's statistics and the step's figures are from the first round. Keeps a step's batches on the device.
    """

    def prepare(self, loop: Loop) -> None:
        self._parameters: list[torch.Tensor] = [*loop.clip.parameters]
        self._weights = [torch.empty_like(parameter) for parameter in self._parameters]
        self._buffers = BufferCopy(loop.model)

    def passes(self, loop: Loop, batches: Iterable[Batch]) -> Iterable[Batch]:
        kept = []
        for batch in batches:
            kept.append(batch)
            yield batch
        self._climb(loop)
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.remember()
        loop.seed_step()
        for batch in kept:
            yield replace(batch, counted=False)
        self._buffers.restore()
        with torch.no_grad():  # come back, bit for bit
            torch._foreach_copy_(self._parameters, self._weights)

    @torch.no_grad()
    def _climb(self, loop: Loop) -> None:
        """Move the weights uphill along their gradients, which the loss scale has multiplied.

        If the gradient is not finite, all weights become NaN and so does the second gradient; the step is then skipped
        like any step without a finite gradient. The host reads nothing.
        """
        torch._foreach_copy_(self._weights, self._parameters)
        settings = loop.args.optimisation
        scale = loop.loss_scale()
        there = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in there if parameter.grad is not None]
        torch._foreach_mul_(gradients, torch.ones_like(scale) / scale)
        if settings.sam_adaptive:
            torch._foreach_mul_(gradients, torch._foreach_abs(there))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if settings.sam_adaptive:
            torch._foreach_mul_(gradients, torch._foreach_abs(there))
        distance = settings.sam_rho / (norm + 1e-12)  # the constant of the authors' code, for a gradient of zero
        torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), distance, torch.nan))
        torch._foreach_add_(there, gradients)


class Shards(Attachment):
    """A network whose parameters are spread over the processes (``utils/runtime/sharding.py``)."""

    def places(self, loop: Loop) -> Places:
        return Places.of(loop.model, loop.ema.module if loop.ema is not None else None, loop.optimizers[0])

    def write(self, loop: Loop) -> dict[str, Any]:
        assert loop.checkpointer is not None  # nothing is written without one
        if loop.ema is not None:
            loop.distributed.broadcast_buffers(loop.ema.module)
        loop.wait_for_checkpoint()  # which then removes the shards that nothing needs any more
        return write_shards({**loop.description, **loop.state()}, loop.checkpointer.folder, loop.distributed)


def attachments_of(model: nn.Module, args: Settings, freezing: Freezing | None) -> list[Attachment]:
    """The optional parts of a run: ``freezing`` if given, SAM's two passes, shards of a sharded ``model``."""
    parts: list[Attachment] = [] if freezing is None else [FrozenLayers(freezing)]
    if args.optimisation.sam_rho:
        parts.append(TwoPasses())
    if is_sharded(model):
        parts.append(Shards())
    return parts
