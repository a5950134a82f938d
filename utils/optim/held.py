"""Optimizers that a flag on the device can hold still: the host launches a step without knowing if it moves weights."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from utils.precision.buffers import Vectors
from utils.runtime.devices import runs_ahead
from utils.runtime.sharding import local

# Kron's own random numbers decide on the host what it launches, so a flag on the device cannot hold it still.
# The packages whose optimizers have been tried out on a GPU; others' read the flag on the host.
READ_BY_HOST = ("Kron",)
TRIED = ("torch", "timm", "utils")


class Held(ABC):
    """An optimizer that takes the flag ``found_inf`` from a gradient scaler, and does not move unless the flag is 0.

    ``torch.amp.GradScaler`` gives its flag to an optimizer with ``_step_supports_amp_scaling``; for any other it reads
    the flag on the host, which drains a GPU's queue in every step. Without a scaler, set ``found_inf``, a float32
    tensor (), before each step. ``flag``: its value for the latest step.

    A CUDA graph cannot take a number from the host: after ``rates_on_device``, the optimizer reads each group's
    learning rate from the device, in float32, and ``send_rates`` must copy the rates there before each step.
    ``can_be_recorded``: True if no other number of the host changes from step to step, so that a graph can stand for a
    step.
    """

    _step_supports_amp_scaling = True
    reads_flag = False
    can_be_recorded = False
    rates: Sequence[torch.Tensor] = ()
    found_inf: Any  # where the host has read the flag already, a bool
    flag: torch.Tensor
    was_held: bool  # only if ``reads_flag``

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._put_back: Callable[[], None] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        """Move the parameters and the optimizer's state, unless ``found_inf`` holds them."""
        self.flag = self.found_inf
        self._step(self.flag)

    @abstractmethod
    def _step(self, flag: torch.Tensor) -> None:
        """Move the parameters and the optimizer's state if ``flag`` is 0."""

    def settle(self, held: bool) -> None:
        """Undo what a step that was ``held`` changed on the host. Call it before the next step."""
        if held and self._put_back is not None:
            self._put_back()
        self._put_back = None  # a graph that repeats the step changes nothing on the host

    def rates_on_device(self) -> None:
        """Read learning rates from the device from now on."""
        self.rates = [group["params"][0].new_empty((), dtype=torch.float32) for group in self.param_groups]

    def send_rates(self) -> None:
        """Copy the groups' learning rates to the device."""
        for rate, group in zip(self.rates, self.param_groups, strict=True):
            rate.fill_(group["lr"])

    def _with_rates(self) -> AbstractContextManager[None]:
        """Context in which the groups hold the learning rates on the device, if there are any."""
        return _holding("lr", self.param_groups, self.rates or [group["lr"] for group in self.param_groups])


@contextmanager
def _holding(name: str, groups: Sequence[dict[str, Any]], values: Sequence[Any]) -> Iterator[None]:
    """Context in which each of ``groups`` holds its item of ``values`` under ``name``."""
    before = [group[name] for group in groups]
    for group, value in zip(groups, values, strict=True):
        group[name] = value
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group[name] = value


def _recordable(groups: Sequence[dict[str, Any]], on_gpu: bool) -> AbstractContextManager[None]:
    """Context in which a graph can record the step of a fused optimizer.

    torch records Adam's step only if the groups are ``capturable``, and warns of that in any other step. A fused kernel
    ignores it.
    """
    refused = [group for group in groups if group.get("capturable") is False]
    allowed = on_gpu and torch.cuda.is_current_stream_capturing()
    return _holding("capturable", refused, [allowed] * len(refused))


class HeldByHost(Held):
    """Reads the flag, which may be a bool already, on the host: free on a CPU, elsewhere a synchronisation point.

    ``was_held``: True if the latest step did not move the parameters.
    """

    reads_flag = True

    def _step(self, flag: torch.Tensor | bool) -> None:
        self.was_held = bool(flag)
        if not self.was_held:
            self.optimizer.step()
            copy_kept_gradients(self.optimizer)


class HeldByKernel(Held):
    """One of torch's fused optimizers, whose kernel reads the flag."""

    can_be_recorded = True

    def _step(self, flag: torch.Tensor) -> None:
        self._begin_momentum()
        vars(self.optimizer)["found_inf"] = flag
        try:
            with self._with_rates(), _recordable(self.param_groups, flag.is_cuda):
                self.optimizer.step()
        finally:
            del vars(self.optimizer)["found_inf"]

    def _begin_momentum(self) -> None:
        """Set SGD's momentum to zeros before its first step; a skipped first step would leave it uninitialised.

        The result of the first step is the same: the momentum becomes the gradient.
        """
        for group in self.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                state = self.optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


class HeldBySelection(Held):
    """Any other optimizer: after a step, the flag selects each tensor's old or new value.

    Numbers on the host, and tensors of shape (), are put back when the flag is known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.can_be_recorded = getattr(optimizer, "can_be_recorded", False) and not self._lookahead
        self._seen: list[torch.Tensor] = []
        self._vectors = Vectors(())

    @torch.no_grad()
    def _step(self, flag: torch.Tensor) -> None:
        if self.can_be_recorded:  # a graph must find the state that it moves
            self.optimizer.begin_state()  # type: ignore[attr-defined]
        tensors = [*self._tensors()]
        if len(tensors) != len(self._seen) or any(map(operator.is_not, tensors, self._seen)):
            self._seen = tensors
            self._vectors = Vectors(local(tensor) for tensor in tensors)
        before = self._vectors.copied()
        self._put_back = self._remember()
        self._step_in_place()
        self._vectors.restore_where(flag, before)

    def _step_in_place(self) -> None:
        """Take a step that leaves each state tensor in the memory it had before."""
        tensors = [
            (state, name, value)
            for state in self.optimizer.state.values()
            for name, value in state.items()
            if _is_many(value)
        ]
        with self._with_rates():
            self.optimizer.step()
        for state, name, value in tensors:
            if state[name] is not value:
                state[name] = value.copy_(state[name])
        copy_kept_gradients(self.optimizer)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if _is_many(value))
        yield from self._lookahead.get("slow", ())

    @property
    def _lookahead(self) -> dict[str, Any]:
        return getattr(self.optimizer, "lookahead_state", {})

    def _remember(self) -> Callable[[], None]:
        """Return a function that restores groups and states, except the tensors that ``_step`` restores itself."""
        states = self.optimizer.state
        holders = [*self.param_groups, *states.values(), self._lookahead]
        before = [(holder, set(holder), _numbers(holder)) for holder in holders]
        known = set(states)

        def put_back() -> None:
            for holder, names, numbers in before:
                for name in holder.keys() - names:
                    del holder[name]
                holder.update(numbers)
            for parameter in states.keys() - known:  # whose state began with the step
                del states[parameter]

        return put_back


def copy_kept_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Copy each gradient that a step has kept as state: DDP writes the next gradient into the same memory.

    timm's Mars kept the gradient itself up to timm 1.0.27, and a user's optimizer may.
    """
    for parameter, state in optimizer.state.items():
        gradient = getattr(parameter, "grad", None)
        if gradient is None or not isinstance(state, dict):  # an entry may belong to no parameter
            continue
        memory = _memory(gradient)
        for name, value in state.items():
            if _is_many(value) and _memory(value) == memory != 0:  # the gradient or a view of it
                state[name] = value.clone()


def _memory(tensor: torch.Tensor) -> int:
    """Address of the memory that ``tensor`` is a view of; 0 for one without memory, as on torch's device meta."""
    return local(tensor).untyped_storage().data_ptr()


def _is_many(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _numbers(holder: dict[str, Any]) -> dict[str, Any]:
    selected = ("params", "slow")
    return {
        name: copy.deepcopy(value) for name, value in holder.items() if name not in selected and not _is_many(value)
    }


def held(optimizer: torch.optim.Optimizer, device: torch.device) -> Held:
    """Wrap ``optimizer`` so that a flag can skip its step, in the cheapest way that it allows on ``device``."""
    kind = type(optimizer)
    if not runs_ahead(device) or kind.__name__ in READ_BY_HOST or kind.__module__.partition(".")[0] not in TRIED:
        return HeldByHost(optimizer)
    # Dampening spares the first momentum; after beginning with zeros, that would count as the second.
    fused = all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups)
    by_kernel = fused and not hasattr(optimizer, "lookahead_state")
    return HeldByKernel(optimizer) if by_kernel else HeldBySelection(optimizer)
