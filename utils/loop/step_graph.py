"""Steps as CUDA graphs, each launched as a whole, however many operations it has.

A step is recorded in two parts: its passes up to the gradient's norm, and its update. Between them the host learns the
outcome of the step before, as it does without graphs. The same operations run on the same numbers, so the result is the
same to the bit, but for one thing: learning rates, and what an update computes with them, are float32 on the device,
where an update without graphs may use the host's doubles. Where float32 rounds them, last digits differ.

PyTorch, CUDA semantics, CUDA graphs: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from utils.config.settings import UserError
from utils.data.loaders import Batch
from utils.loop.attachments import Loop, Passed
from utils.loop.forward import Outputs
from utils.loop.verdict import Gradient
from utils.optim.clipping import Measured
from utils.runtime.sharding import is_sharded

WARM_UP = 3  # steps in a row: the first makes what is made once, the others must launch the same operations
MOST_CHANGES = 10  # of an optimizer's numbers, without a step that a graph repeats


class NotRecorded(Exception):
    """Operations cannot be recorded as a graph; the message names them in a line. None of them has been executed."""


def launcher(loop: Loop) -> Loop | StepGraphs:
    """The launcher of the two parts of each step: ``loop`` itself, or graphs of it if the settings ask for them."""
    if loop.args.model.cuda_graph == "off":
        return loop
    reason = reason_against(loop)
    if reason:
        go_without(loop, reason)
    return loop if reason else StepGraphs(loop)


def go_without(loop: Loop, reason: str) -> None:
    """Log that steps are not recorded; with ``--cuda-graph on`` on a GPU, raise ``UserError`` instead."""
    asked = loop.args.model.cuda_graph
    if asked == "on" and loop.device.type == "cuda":
        raise UserError(f"--cuda-graph on: no graph can stand for a step: {reason}; auto launches it as it is")
    loop.writer.log(f"--cuda-graph {asked}: steps are launched one operation at a time: {reason}")


def reason_against(loop: Loop) -> str | None:
    """The reason why this run's steps cannot be recorded as graphs; None if they can."""
    hooks = loop.hooks
    if loop.device.type != "cuda":
        return "there is no GPU"
    if is_sharded(loop.model):
        return "a sharded network gathers its weights"
    if loop.distributed.world_size > 1 and loop.args.model.cuda_graph == "auto":
        return "several processes exchange gradients, which has not been tried; --cuda-graph on tries it"
    if hooks.before_forward or hooks.after_forward or hooks.before_backward or hooks.after_backward:
        return "hooks look at the passes"
    if loop.args.model.compile and loop.args.model.compile_mode != "default":
        return f"--compile-mode {loop.args.model.compile_mode} records graphs of its own"
    if loop.args.model.grad_checkpointing:
        return "--grad-checkpointing restores random numbers on the host"
    return None


class CudaGraph:
    """Operations on a GPU, recorded once. All graphs share one pool of memory, as they run one after the other.

    torch refuses a pool whose graphs are all gone, as after an epoch from which on other parameters train.
    """

    _alive: ClassVar[WeakSet[CudaGraph]] = WeakSet()
    _graph: torch.cuda.CUDAGraph

    def record(self, function: Callable[[], Any]) -> Any:
        """Record ``function`` and run it; return what it returned, in memory that each replay overwrites.

        Raises ``NotRecorded``. A failed recording leaves torch on the stream of the recording, its random numbers
        waiting for the recording's end and, before torch 2.13, its allocator, too, which would free no batch any more:
        all are set right here.
        """
        pool = next((other._graph.pool() for other in CudaGraph._alive), None) or torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads may use pinned memory meanwhile: the loader's and the checkpointer's.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                made = function()
        except Exception as error:
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError, AttributeError):  # newer versions have done so
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(torch.Generator(stream.device))
            reason = error.__context__ or error  # the cause, rather than the failure to end the recording
            raise NotRecorded(str(reason).partition("\n")[0] or type(reason).__name__) from error
        CudaGraph._alive.add(self)
        self._graph.replay()
        return made

    def replay(self) -> None:
        """Run what was recorded."""
        self._graph.replay()


class StepGraphs:
    """Launches the steps of ``loop``: as they are at first, and as graphs once enough in a row were alike.

    A step of another shape, such as an epoch's last one, is launched as it is. So are all steps once one cannot be
    recorded, or if two of one shape do not launch the same operations with the same numbers: a graph would repeat the
    numbers that an optimizer had computed on the host when the graph was recorded.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._recorded: dict[tuple[Any, ...], Recorded] = {}
        self._now: Recorded | None = None
        self._watched: list[tuple[Any, list[str]]] = []  # shapes and operations of the steps in a row
        self._operations: Operations | None = None
        self._random: set[str] = set()
        self._gives_up = False
        self._rates = [own for own in loop.verdicts.optimizers if own.can_be_recorded]
        for own in self._rates:
            own.rates_on_device()
        self._numbers = tuple(self._of_host())
        self._changes = 0  # of these numbers since a graph was replayed

    def launch_passes(self, batches: Iterable[Batch], passed: Passed) -> Gradient:
        """Launch the passes as ``TraVal.launch_passes`` does."""
        batches = list(batches)
        self._now = self._operations = None
        if not self._gives_up:
            self._changes += self._numbers_change()
            if self._changes > MOST_CHANGES:
                self._give_up("the optimizers' numbers change too often")
        if not self._gives_up:
            self._watch_or_record(tuple(map(_shape, batches)))
        if self._now is not None:
            try:
                return self._now.passes(batches, passed)
            except NotRecorded as error:
                self._give_up(f"one cannot be recorded: {error}")
                for parameter in self._loop.model.parameters():
                    parameter.grad = None
                _noted(self._loop.scaler).clear()
                self._loop.seed_step()
        if self._operations is None:
            return self._loop.launch_passes(batches, passed)
        made: list[Outputs] = []
        with self._operations:
            gradient = self._loop.launch_passes(batches, lambda _, outputs: made.append(outputs.detached()))
        _pass_on(batches, made, passed)
        return gradient

    def launch_update(self, gradient: Gradient) -> torch.Tensor | None:
        """Launch the update as ``TraVal.launch_update`` does."""
        for own in self._rates:
            own.send_rates()
        if self._now is not None and self._loop.hooks.before_update and self._numbers_change():
            self._changes += 1
            self._now = None
        if self._now is not None:
            noted = _noted_by(self._loop.scaler)
            try:
                return self._now.update(gradient)
            except NotRecorded as error:
                self._give_up(f"an update cannot be recorded: {error}")
                _noted(self._loop.scaler).update(noted)
        with (update_can_be_recorded(self._loop) and self._operations) or nullcontext():
            return self._loop.launch_update(gradient)

    def _numbers_change(self) -> bool:
        """True if numbers of the optimizers are others than before: graphs, which would repeat those, are dropped."""
        numbers = tuple(self._of_host())
        if numbers == self._numbers:
            return False
        self._numbers = numbers
        self._recorded.clear()
        self._watched.clear()
        return True

    def _of_host(self) -> Iterator[Any]:
        """The optimizers' numbers on the host, such as weight decay, which a program may change."""
        for own in self._rates:
            for group in own.optimizer.param_groups:
                numbers = (value for name, value in group.items() if name != "lr")
                yield from (value for value in numbers if isinstance(value, int | float | tuple))

    def _watch_or_record(self, shape: tuple[Any, ...]) -> None:
        """Choose the graphs for a step of ``shape``, recorded or due to be; otherwise watch what the step launches."""
        if shape in self._recorded:
            self._now = self._recorded[shape]
            self._changes = 0
            return
        if self._watched and self._watched[-1][0] != shape:
            self._watched.clear()
        if len(self._watched) < WARM_UP:
            self._operations = Operations(self._random)
            self._watched.append((shape, self._operations.seen))
            return
        *_, (_, before), (_, after) = self._watched
        self._watched.clear()
        if self._loop.args.optimisation.sam_rho and self._random:
            self._give_up(f"--sam-rho seeds the second pass on the host, for {', '.join(sorted(self._random))}")
        elif before != after:
            self._give_up(f"two of them differ, {_difference(before, after)}")
        else:
            self._now = self._recorded[shape] = Recorded(self._loop)

    def _give_up(self, reason: str) -> None:
        self._gives_up = True
        self._now = None
        self._recorded.clear()
        go_without(self._loop, reason)


class Recorded:
    """Graphs of the two parts of a step for batches of one shape, and the memory that batches are copied to.

    The update is recorded only if torch's own kernels or our Muon do it; other optimizers compute with numbers on the
    host, such as a count of steps.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._of_passes = CudaGraph()
        self._of_update = CudaGraph() if update_can_be_recorded(loop) else None
        self._made: Gradient | None = None
        self._flags: torch.Tensor | None = None

    def passes(self, batches: Sequence[Batch], passed: Passed) -> Gradient:
        """Launch the passes as ``TraVal.launch_passes`` does. The first call records them or raises ``NotRecorded``."""
        made = self._made
        if made is None:
            made = self._record(batches)
        else:
            for own, batch in zip(self._batches, batches, strict=True):
                for name, kept in own.tensors.items():
                    kept.copy_(batch.tensors[name])
            self._of_passes.replay()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
        # What unscaling has noted on the host, which the scaler forgets after each step.
        _noted(self._loop.scaler).update({key: dict(own) for key, own in self._unscaled.items()})
        # All else is copied: the host reads it, and sums add it up, after further steps have overwritten it.
        _pass_on(batches, tree_map(torch.clone, self._outputs[: len(batches)]), passed)
        measured: Measured = [(parameters, torch.stack([*norms]).unbind()) for parameters, norms in made.measured]
        return Gradient(made.norm.clone(), made.scale.clone(), measured)

    def _record(self, batches: Sequence[Batch]) -> Gradient:
        self._batches = [_copy_of(batch) for batch in batches]
        self._outputs: list[Outputs] = []
        keep = self._outputs.append
        made = self._of_passes.record(
            lambda: self._loop.launch_passes(self._batches, lambda _, outputs: keep(outputs.detached()))
        )
        self._gradients = [(p, p.grad) for p in self._loop.model.parameters() if p.grad is not None]
        self._unscaled = _noted_by(self._loop.scaler)
        self._made = made
        return made

    def update(self, gradient: Gradient) -> torch.Tensor | None:
        """Launch the update as ``TraVal.launch_update`` does. The first call records it or raises ``NotRecorded``."""
        made = self._made
        assert made is not None  # by the passes, before
        if self._of_update is None:
            return self._loop.launch_update(gradient)
        if self._flags is None:
            self._flags = self._of_update.record(lambda: self._loop.launch_update(made))
        else:
            self._of_update.replay()
            _noted(self._loop.scaler).clear()
        return self._flags


class Operations(TorchDispatchMode):
    """Notes the operations launched, with their numbers and shapes; in ``random`` those that draw random numbers."""

    def __init__(self, random: set[str]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._random = random

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that a network is compiled while watched; otherwise the capture would be the first to compile it."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        words = (str(tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves)
        self.seen.append(f"{function}({', '.join(words)})")
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._random.add(str(function))
        return function(*args, **kwargs)


def _difference(before: list[str], after: list[str]) -> str:
    pairs = zip_longest(before, after, fillvalue="the end")
    return " and ".join(next(pair for pair in pairs if pair[0] != pair[1]))


def _pass_on(batches: Sequence[Batch], made: Sequence[Outputs], passed: Passed) -> None:
    """Call ``passed`` for each pass of a step, including the second round that SAM makes."""
    again = [replace(batch, counted=False) for batch in batches]
    for batch, outputs in zip([*batches, *again], made, strict=False):
        passed(batch, outputs)


def update_can_be_recorded(loop: Loop) -> bool:
    """True if a graph can replace the update of a step."""
    return all(own.can_be_recorded for own in loop.verdicts.optimizers)


def _noted(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """The scaler's notes on each optimizer in this step; {} if the scaler is disabled."""
    return scaler._per_optimizer_states if scaler.is_enabled() else {}


def _noted_by(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    return {key: dict(own) for key, own in _noted(scaler).items()}


def _copy_of(batch: Batch) -> Batch:
    """A copy of the batch in its own memory."""
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors.items()}
    return replace(batch, **copies)


def _shape(batch: Batch) -> tuple[Any, ...]:
    """Properties that a batch must share with another to be launched by the same graph."""
    images, targets = batch.images, batch.targets
    layout = images.shape, images.stride(), images.dtype, targets.shape, targets.dtype
    return *layout, batch.weight, batch.ends_step, batch.counted
