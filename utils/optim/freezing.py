"""Frozen parameters and batch-norm statistics: what does not train, and until when."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config.settings import UserError
from utils.optim.head import head_parameters
from utils.optim.optimizers import Optimizers

BACKBONE = ("all-but-head", "backbone")  # patterns for everything but the last layer


class Freezing:
    """The parameters of a network that ``patterns`` freeze for ``epochs`` epochs (None: for all), by name.

    A pattern is a glob over the names of parameters, the name of a layer, which stands for all in it, or one of
    ``BACKBONE``. A batch norm whose parameters are all frozen also keeps its running statistics and normalises by them,
    as in ``timm.utils.freeze``: a frozen layer computes the same throughout. ``all_statistics`` freezes those of all
    batch norms, and for all epochs. Raises ``UserError`` if a pattern matches nothing or nothing is left to train.
    """

    def __init__(
        self, model: nn.Module, patterns: Sequence[str] = (), epochs: int | None = None, all_statistics: bool = False
    ) -> None:
        self.patterns, self.epochs, self.all_statistics = tuple(patterns), epochs, all_statistics
        names = [name for name, _ in model.named_parameters()]
        self.names = frozenset(name for pattern in patterns for name in _matches(pattern, names, model))
        if len(self.names) == len(names):
            raise UserError(f"--freeze {' '.join(patterns)}: leaves nothing to train")
        norms = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
        norms = [name for name in norms if model.get_submodule(name).running_mean is not None]
        self.norms = frozenset(name for name in norms if all_statistics or self._is_frozen(model, name))
        self.count = sum(parameter.numel() for name, parameter in model.named_parameters() if name in self.names)
        named = dict(model.named_parameters()) if epochs is not None else {}
        self._later = {named[name] for name in self.names if name in named}
        for name in self.norms:
            _keep_statistics(model.get_submodule(name))
        self._epoch_frozen: bool | None = None
        if epochs is None:
            self.set_epoch(0, model)  # at once, so that no optimizer gets them

    def _is_frozen(self, model: nn.Module, norm: str) -> bool:
        own = [f"{norm}.{name}" for name, _ in model.get_submodule(norm).named_parameters()]
        if own:
            return self.names.issuperset(own)
        return any(_fits(f"{norm}.running_mean", pattern) or pattern in BACKBONE for pattern in self.patterns)

    def separate(self, optimizers: Optimizers) -> Optimizers:
        """Give parameters that train later groups of their own: torch's fused SGD begins a whole group's momentum."""
        for optimizer in (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers:
            for group in list(optimizer.param_groups):
                later = [parameter for parameter in group["params"] if parameter in self._later]
                if later and len(later) < len(group["params"]):
                    group["params"] = [parameter for parameter in group["params"] if parameter not in self._later]
                    optimizer.add_param_group({**group, "params": later})
        return optimizers

    def set_epoch(self, epoch: int, model: nn.Module, average: nn.Module | None = None) -> bool:
        """Freeze or release what ``epoch``, from 0, asks for; gives whether that changed which parameters train.

        ``average``: the moving average of the network, whose statistics are frozen and released with the network's.
        """
        frozen = self.epochs is None or epoch < self.epochs
        if not self.patterns or frozen == self._epoch_frozen:
            return False
        self._epoch_frozen = frozen
        for name, parameter in model.named_parameters():
            if name in self.names:
                parameter.requires_grad_(not frozen)
        for network in filter(None, (model, average)):
            for name in self.norms if not self.all_statistics else ():
                layer = network.get_submodule(name)
                layer.keeps_statistics = frozen
                layer.train(network.training)
        return True

    @property
    def releases_statistics(self) -> bool:
        """Whether some batch norms gather statistics later that do not at first."""
        return bool(self.norms) and self.epochs is not None and not self.all_statistics

    def __bool__(self) -> bool:
        return bool(self.names or self.norms)

    def __str__(self) -> str:
        """In words, for log and plan."""
        parts = []
        if self.patterns:
            until = f" until the end of epoch {self.epochs}" if self.epochs is not None else ""
            parts.append(f"{' '.join(self.patterns)} ({self.count:,} parameters) frozen{until}")
        if self.norms:
            whose = "all" if self.all_statistics else "its"
            parts.append(f"{whose} batch-norm statistics frozen ({len(self.norms)} layers)")
        return ", ".join(parts)


def has_trainable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of its parameters trains now."""
    return any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _matches(pattern: str, names: Iterable[str], model: nn.Module) -> list[str]:
    found = [name for name in names if _fits(name, pattern)]
    if not found and pattern in BACKBONE:
        head = head_parameters(model)
        found = [name for name in names if name not in head]
    if found:
        return found
    layers = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
    near = difflib.get_close_matches(pattern, sorted(layers), n=3, cutoff=0.5)
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
    hint = f"did you mean {', '.join(near)}?" if near else f"its parts are {', '.join(tops[:8])}"
    raise UserError(f"--freeze {pattern}: no parameter or layer of the network has such a name; {hint}")


def _keep_statistics(layer: nn.Module) -> None:
    # A subclass, so that it holds for copies too, and whoever calls train() on the network.
    layer.__class__ = type(type(layer).__name__, (_KeepsStatistics, type(layer)), {})
    layer.keeps_statistics = True
    layer.train(layer.training)


class _KeepsStatistics:
    """Mixed into a batch norm's class: stays in evaluation mode while ``keeps_statistics``."""

    keeps_statistics: bool

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(mode and not self.keeps_statistics)
