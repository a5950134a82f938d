"""Named points of training that others may observe: for measurements, records of a run, fault injection."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from utils.config import plugins
from utils.config.settings import UserError
from utils.config.spelling import or_nearest

if TYPE_CHECKING:
    import torch

    from utils.checkpoint.progress import Progress
    from utils.data.loaders import Batch
    from utils.loop.forward import Outputs
    from utils.record.metrics import Report

__all__ = ["Hooks"]


class Caller(Protocol):
    """The first argument of every hook: the ``TraVal`` that calls it. ``progress`` counts the steps done."""

    model: torch.nn.Module
    progress: Progress
    run_name: str


@dataclass
class Hooks:
    """Callables for each point, called in list order; all lists are empty by default.

    A step calls, for each of its passes, ``before_forward``, ``after_forward``, ``before_backward`` and
    ``after_backward``; then ``before_update`` once the gradients are unscaled and clipped (the norm, a tensor (), is
    from before clipping and may be infinite); and ``after_update`` when the step is counted, even if it was skipped.
    With SAM a step calls the points of its passes twice (``utils/loop/attachments.py``). Repeating a step that was not
    finite calls the two points of a forward pass again. Validation calls ``before_validation`` once;
    ``before_validation_batch`` for each batch of this rank, first for the raw weights, then for their average; and
    ``after_validation`` before the epoch's row and checkpoints. ``before_save`` and ``after_save`` surround handing the
    state to the checkpointer, on rank 0 only.

    A hook may change ``outputs.loss`` in place. It must not change anything else, nor synchronise with other ranks. All
    ranks need hooks on the same points: one on ``after_update`` makes its rank learn, and exchange, a step's outcome
    at once.
    """

    before_forward: list[Callable[[Caller, Batch], Any]] = field(default_factory=list)
    after_forward: list[Callable[[Caller, Batch, Outputs], Any]] = field(default_factory=list)
    before_backward: list[Callable[[Caller, Batch, Outputs], Any]] = field(default_factory=list)
    after_backward: list[Callable[[Caller, Batch, Outputs], Any]] = field(default_factory=list)
    before_update: list[Callable[[Caller, torch.Tensor], Any]] = field(default_factory=list)
    after_update: list[Callable[[Caller], Any]] = field(default_factory=list)
    before_validation: list[Callable[[Caller], Any]] = field(default_factory=list)
    before_validation_batch: list[Callable[[Caller, Batch], Any]] = field(default_factory=list)
    after_validation: list[Callable[[Caller, Report], Any]] = field(default_factory=list)
    before_save: list[Callable[[Caller, tuple[str, ...]], Any]] = field(default_factory=list)
    after_save: list[Callable[[Caller, tuple[str, ...]], Any]] = field(default_factory=list)

    def and_of_plugins(self) -> Hooks:
        """Hooks of this object, then those of users' files.

        Raises ``UserError`` for a point that does not exist, and for a function that cannot take what its point gives.
        """
        points = {point.name: [*getattr(self, point.name)] for point in fields(self)}
        given = {point.name: _arguments(str(point.type)) for point in fields(self)}
        for hook in plugins.hooks():
            if hook.name not in points:
                known = or_nearest(hook.name, list(points), f"there are {', '.join(points)}")
                raise UserError(f"--plugin {hook.file}: there is no point {hook.name} for a hook; {known}")
            plugins.refuse_other_arguments(hook, hook.where, given[hook.name])
            points[hook.name].append(hook)
        return Hooks(**points)


def _arguments(annotation: str) -> list[str]:
    """What a point gives its hooks, from the annotation ``list[Callable[[WHAT], Any]]`` of its field."""
    (callables,) = (node for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.List))
    return [ast.unparse(one) for one in callables.elts]


def call(hooks: Iterable[Callable[..., Any]], *arguments: Any) -> None:
    for hook in hooks:
        hook(*arguments)
