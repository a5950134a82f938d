"""Copies of tensors from before a step, such as a network's buffers, and their restoration by a flag on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

ALONE = 2**22  # bytes from which a tensor has its own launch: packing it would take a GPU longer than that
TOGETHER = 2**26  # bytes of tensors that are copied together, which takes that much memory
UNITS = {1: torch.uint8, 2: torch.int16}  # by the bytes of a number; larger numbers are several int32


class Vectors:
    """Tensors seen as vectors of their bits, many tensors per vector: a few launches copy or select them all.

    ``tensors`` must keep their memory while the vectors are in use, and each must be dense, in any order of dimensions.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._parts: list[list[torch.Tensor]] = []
        self.tensors: list[list[torch.Tensor]] = []
        by_unit: dict[torch.dtype, list[torch.Tensor]] = {}
        # The widest numbers first, so that each part of a vector is aligned; of equal width the largest tensors last.
        some = filter(torch.Tensor.numel, tensors)  # of a sharded parameter, a process may hold nothing
        for tensor in sorted(some, key=lambda tensor: (-tensor.itemsize, tensor.numel())):
            by_unit.setdefault(UNITS.get(tensor.itemsize, torch.int32), []).append(tensor)
        for unit, alike in by_unit.items():
            size = TOGETHER
            for tensor in alike:
                own = tensor.numel() * tensor.itemsize
                if size + own > TOGETHER or own > ALONE:
                    self._parts.append([])
                    self.tensors.append([])
                    size = 0
                size = TOGETHER if own > ALONE else size + own
                self._parts[-1].append(tensor.detach().as_strided((tensor.numel(),), (1,)).view(unit))
                self.tensors[-1].append(tensor)
        self._sizes = [[*map(len, parts)] for parts in self._parts]

    def copied(self) -> list[torch.Tensor]:
        """Copies of the vectors as they are now."""
        return [torch.cat(parts) for parts in self._parts]

    def copy_to(self, vectors: list[torch.Tensor]) -> None:
        """Copy the tensors into ``vectors``, which ``copied`` returned."""
        for parts, vector in zip(self._parts, vectors, strict=True):
            torch.cat(parts, out=vector)

    def restore(self, vectors: list[torch.Tensor]) -> None:
        """Set the tensors to their copies in ``vectors``."""
        for parts, sizes, vector in zip(self._parts, self._sizes, vectors, strict=True):
            torch._foreach_copy_(parts, vector.split(sizes))

    def restore_where(self, flag: torch.Tensor, vectors: list[torch.Tensor]) -> None:
        """Set the tensors to their copies in ``vectors`` if ``flag``, a tensor (), is not 0; no host reads it."""
        if not self._parts:
            return
        restored = flag if flag.dtype == torch.bool else flag != 0
        for parts, sizes, before in zip(self._parts, self._sizes, vectors, strict=True):
            if len(parts) == 1:
                torch.where(restored, before, parts[0], out=parts[0])
                continue
            chosen = torch.where(restored, before, torch.cat(parts))
            torch._foreach_copy_(parts, chosen.split(sizes))


def make_dense(model: nn.Module) -> None:
    """Make parameters and buffers dense that are views with gaps, as of the real part of complex numbers."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_lazy(tensor) and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


class BufferCopy:
    """Copy of the buffers of ``model`` (batch-norm statistics), from which they can be restored.

    A forward pass that overflows makes batch norm's running statistics infinite, and no later step
    repairs that: skipping a step must restore them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._live = Vectors(model.buffers())
        self._copies = self._live.copied()
        self._copy_of = {}
        for tensors, vector in zip(self._live.tensors, self._copies, strict=True):
            begin = 0
            for live in tensors:
                end = begin + live.numel() * live.itemsize // vector.itemsize
                self._copy_of[id(live)] = vector[begin:end].view(live.dtype).as_strided(live.shape, live.stride())
                begin = end

    def replaced(self) -> list[str]:
        """Names of the buffers that ``model`` has replaced by new tensors, which neither this nor an average knows."""
        known = {id(tensor) for tensors in self._live.tensors for tensor in tensors}
        return [name for name, one in self._model.named_buffers() if one.numel() and id(one) not in known]

    @property
    def copy_of(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function that returns a buffer's copy, and any other tensor unchanged; None if there are no buffers."""
        return (lambda tensor: self._copy_of.get(id(tensor), tensor)) if self._copy_of else None

    def remember(self) -> None:
        self._live.copy_to(self._copies)

    @torch.no_grad()
    def restore(self) -> None:
        self._live.restore(self._copies)

    @torch.no_grad()
    def restore_where(self, flag: torch.Tensor) -> None:
        """Restore the copied buffers if ``flag``, a tensor (), is not 0; the host does not read it."""
        self._live.restore_where(flag, self._copies)
