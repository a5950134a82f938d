"""Network and first training batches that the two commands about mixed precision look into."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from utils.config.settings import Settings

if TYPE_CHECKING:
    from components import Components
    from utils.checkpoint.resume import ResumePoint
    from utils.runtime.distributed import Distributed


def build_trained(args: Settings, distributed: Distributed, point: ResumePoint | None) -> tuple[Components, str]:
    """Build the parts of a training run with the weights of ``point``, if any; return also their source, as text."""
    from components import build
    from utils.checkpoint import checkpoint
    from utils.run import Run

    args = dataclasses.replace(args, run=dataclasses.replace(args.run, evaluate=False))  # a training's, in any case
    components = build(Run(args, distributed, resume_point=point))
    if point is not None:
        checkpoint.load_weights(components.model, point.read()["model"], str(point.path))
        return components, f"weights of {point.path}"
    if args.model.weights or args.model.pretrained:
        return components, f"weights of {args.model.weights}" if args.model.weights else "pretrained weights"
    return components, f"weights from --seed {args.run.seed}"
