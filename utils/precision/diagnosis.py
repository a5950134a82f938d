"""The report on a step whose gradient was not finite: where the trouble began, and with which samples."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.precision.probe import NonFinite, find_non_finite
from utils.runtime.sharding import local

SHOWN_LAYERS = 3
SHOWN_SAMPLES = 16
UNSEEN = "nothing when the step was repeated (a sum over processes overflowed, or the algorithm is not deterministic)"


@dataclass(frozen=True)
class RankFinding:
    """Finding of one rank: the non-finite layers, and the samples whose logits are not finite.

    ``too_large``: text on a gradient whose values are finite but whose norm is not; '' if there is no such gradient.
    """

    rank: int
    layers: NonFinite
    samples: list[int]
    too_large: str = ""


@dataclass(frozen=True)
class BadStep:
    """A step without a finite gradient. ``step`` and ``epoch`` count from one; ``samples`` are data set indices.

    ``rank``: the first affected rank; None if all ranks are affected, or none is known to be.
    """

    step: int
    epoch: int
    scale: float
    origin: str
    rank: int | None
    layers: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    bad_logits: bool = False

    @classmethod
    def from_findings(
        cls, step: int, epoch: int, scale: float, findings: list[RankFinding], all_samples: list[int]
    ) -> BadStep:
        """Combine the findings of all ranks; ``all_samples``: the samples of the whole step."""
        samples = [sample for finding in findings for sample in finding.samples]
        position: dict[str, Any] = {"step": step, "epoch": epoch, "scale": scale}
        seen = next((finding for finding in findings if finding.layers), None)
        if seen is None:
            origin = next((finding.too_large for finding in findings if finding.too_large), UNSEEN)
            return cls(**position, origin=origin, rank=None, samples=all_samples)
        return cls(
            **position,
            origin=seen.layers.origin,
            rank=None if all(finding.layers for finding in findings) else seen.rank,
            layers=[name or "the network" for name in seen.layers.outputs or seen.layers.gradients],
            parameters=seen.layers.parameters,
            samples=samples or all_samples,
            bad_logits=bool(samples),
        )

    def summary(self) -> str:
        """Summarise the step in one line: where it began, the first layers, the loss scale and some samples."""
        where = f" on rank {self.rank}" if self.rank is not None else ""
        layers = f"; first layers: {', '.join(self.layers[:SHOWN_LAYERS])}" if self.layers else ""
        shown = " ".join(map(str, self.samples[:SHOWN_SAMPLES]))
        more = f" and {len(self.samples) - SHOWN_SAMPLES} more" if len(self.samples) > SHOWN_SAMPLES else ""
        kind = "samples with such logits" if self.bad_logits else "samples"
        return f"not finite: {self.origin}{where}{layers}; loss scale {self.scale:g}; {kind} {shown}{more}"

    def details(self, paths: Sequence[str] | None = None) -> str:
        """Describe the step completely, in several lines, for the log file and TensorBoard.

        ``paths``: of all training images; the lines name those of the first samples.
        """
        where = f" on rank {self.rank}" if self.rank is not None else ""
        lines = [
            f"step {self.step}, epoch {self.epoch}, loss scale {self.scale:g}",
            f"not finite: {self.origin}{where}",
            f"layers, first ones first: {', '.join(self.layers)}" if self.layers else "",
            f"parameters with such a gradient: {', '.join(self.parameters)}" if self.parameters else "",
            f"samples{' with such logits' if self.bad_logits else ''}: {' '.join(map(str, self.samples))}",
        ]
        wrap = partial(textwrap.fill, width=100, subsequent_indent="    ", break_long_words=False)
        files = [f"sample {sample}: {paths[sample]}" for sample in self.samples[:SHOWN_SAMPLES]] if paths else []
        return "\n".join([*(wrap(line) for line in lines if line), *files])


def too_many_skips(count: int, step: int, epoch: int, scale: float) -> str:
    """Reason to end after ``count`` skipped steps in a row, and advice; ``scale``: the next step's loss scale."""
    steps = f"{count} steps" if count > 1 else "1 step"
    if scale > 1:
        advice = "begin with a lower --init-scale (65536 is usual), or allow more with --max-skipped-steps"
    else:
        advice = (
            "no scale helps: lower --lr, add --warmup-epochs, see what scripts/amp_audit.py says of the layers that "
            "the log names, or try --amp bf16"
        )
    return (
        f"{steps} in a row without a finite gradient, the last step {step} (epoch {epoch}), and the loss scale is down "
        f"to {scale:g}; {advice}; last.pt holds the state, which the skipped steps left as it was"
    )


def examine(
    model: nn.Module,
    passes: Iterable[Any],
    forward: Callable[[Any], tuple[Any, ...]],
    backward: Callable[[Any, torch.Tensor], None],
    rank: int,
    scaled: bool = False,
) -> RankFinding:
    """Repeat a step's ``passes``, batches with ``indices``: find the layers in the first pass that is not finite.

    ``forward`` returns a pass's logits (n, classes), its loss and more; ``backward`` takes a pass and its loss.
    Gradients are left in place; the caller restores buffers and random state. A compiled network runs uncompiled. All
    passes run, because samples of each may have such logits, and a network that is sharded or has SyncBatchNorm needs
    all ranks in every pass. ``scaled``: a gradient scaler is in use, which skips a step for its gradient's values,
    never for their norm.
    """
    found = NonFinite()
    samples: list[int] = []
    for part in passes:
        with torch.compiler.set_stance("force_eager"):
            finding, logits = find_non_finite(model, partial(forward, part), partial(backward, part))
        found = found or finding
        bad = ~torch.isfinite(logits).all(dim=1)
        samples += [int(index) for index in np.asarray(part.indices)[bad.cpu().numpy()]]
    return RankFinding(rank, found, samples, "" if found or scaled else _too_large(model))


def _too_large(model: nn.Module) -> str:
    """Text on a gradient whose norm overflows, with its largest value; '' if the norm is finite."""
    gradients = {name: local(p.grad).float() for name, p in model.named_parameters() if p.grad is not None}
    if not gradients or torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*gradients.values()]))).isfinite():
        return ""
    largest = {name: float(gradient.abs().max()) for name, gradient in gradients.items() if gradient.numel()}
    name = max(largest, key=lambda one: largest[one])
    return f"the gradient's norm; its values are finite, up to {largest[name]:.1e} in {name}"
