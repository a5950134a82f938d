"""Frozen parameters and batch-norm statistics: what does not train, and in which epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError
from utils.config.spelling import or_nearest
from utils.optim.head import head_parameters
from utils.optim.optimizers import Optimizers

if TYPE_CHECKING:
    from typing_extensions import Self

BACKBONE = ("all-but-head", "backbone")  # patterns for everything but the last layer


def frozen_at_random(settings: ModelSettings) -> str | None:
    """A warning if a new run keeps all layers but the last at random weights; otherwise None."""
    frozen = next((name for name in settings.freeze or () if name in BACKBONE), None)
    if frozen is None or settings.freezing_changes or settings.pretrained or settings.weights:
        return None
    return f"--freeze {frozen}: keeps random layers as they are, for there is neither --pretrained nor --weights"


class Freezing:
    """The parameters that ``patterns`` name, frozen in the epochs ``begin`` <= epoch < ``end``, counted from 0.

    None means from the start, or to the end of the run. A pattern is a glob over parameter names, the name of a layer,
    which stands for all in it, or one of ``BACKBONE``. A batch norm whose parameters are all frozen also keeps its
    running statistics and normalises by them, as in ``timm.utils.freeze``, so that a frozen layer computes the same
    throughout. ``all_statistics`` freezes the statistics of all batch norms, in all epochs. Parameters that the network
    itself does not train are never released. Raises ``UserError`` if a pattern matches nothing or nothing is left to
    train.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str] = (),
        begin: int | None = None,
        end: int | None = None,
        all_statistics: bool = False,
    ) -> None:
        self.patterns = tuple(patterns)
        self.begin = begin or 0
        self.end = end
        self.all_statistics = all_statistics
        named = dict(model.named_parameters())
        self.names = frozenset(name for pattern in patterns for name in _matches(pattern, named, model))
        trained = {name for name, parameter in named.items() if parameter.requires_grad}
        if patterns and trained <= self.names:
            raise UserError(f"--freeze {' '.join(patterns)}: leaves nothing to train")
        self._trained = self.names & trained
        layers = model.named_modules()
        norms = [name for name, one in layers if isinstance(one, _BatchNorm) and one.running_mean is not None]
        of_frozen = {name for name in norms if self._is_frozen(model, name)}
        self.norms = frozenset(norms if all_statistics else of_frozen)
        self.count = sum(named[name].numel() for name in self.names)
        changes = bool(self.begin) or end is not None
        self.freezes_more_norms = all_statistics and (changes or len(of_frozen) < len(norms))
        self._changing = {named[name] for name in self._trained if changes}
        for name in self.norms:
            _keep_statistics(model.get_submodule(name), all_statistics or self._freezes_in(0))
        self._epoch_frozen: bool | None = None
        if not changes:
            self.set_epoch(0, model)  # at once, so that no optimizer gets frozen parameters

    def _freezes_in(self, epoch: int) -> bool:
        return self.begin <= epoch and (self.end is None or epoch < self.end)

    def _is_frozen(self, model: nn.Module, norm: str) -> bool:
        own = [f"{norm}.{name}" for name, _ in model.get_submodule(norm).named_parameters()]
        if own:
            return self.names.issuperset(own)
        return any(_fits(f"{norm}.running_mean", pattern) or pattern in BACKBONE for pattern in self.patterns)

    def separate(self, optimizers: Optimizers) -> Optimizers:
        """Move parameters that train in some epochs only into groups of their own; return ``optimizers``.

        In a common group, torch's fused SGD would begin the momentum of all parameters at once, and other optimizers
        would count the same steps for all.
        """
        for optimizer in optimizers:
            for group in list(optimizer.param_groups):
                changing = [parameter for parameter in group["params"] if parameter in self._changing]
                if changing and len(changing) < len(group["params"]):
                    group["params"] = [parameter for parameter in group["params"] if parameter not in self._changing]
                    optimizer.add_param_group({**group, "params": changing})
        return optimizers

    def set_epoch(self, epoch: int, model: nn.Module, average: nn.Module | None = None) -> bool:
        """Freeze or release what ``epoch``, from 0, asks for; return True if the set of parameters that train changed.

        ``average``: the network with averaged weights. Its statistics are frozen and released with the network's,
        unless these layers have trained before: then its weights differ from the network's and need statistics of their
        own.
        """
        frozen = self._freezes_in(epoch)
        if not self.patterns or frozen == self._epoch_frozen:
            return False
        self._epoch_frozen = frozen
        for name, parameter in model.named_parameters():
            if name in self._trained:
                parameter.requires_grad_(not frozen)
        for network in filter(None, (model, average)):
            for name in self.norms if not self.all_statistics else ():
                layer = network.get_submodule(name)
                assert isinstance(layer, _KeepsStatistics)
                layer.keeps_statistics = frozen and (network is model or not self.begin)
                layer.train(network.training)
        return True

    @property
    def releases_statistics(self) -> bool:
        """True if some batch norms gather no statistics at first, but do later."""
        return bool(self.norms) and self.end is not None and not self.all_statistics

    def __bool__(self) -> bool:
        return bool(self.names or self.norms)

    def __str__(self) -> str:
        """Text for log and plan."""
        parts = []
        if self.patterns:
            since = f" from the end of epoch {self.begin}" if self.begin else ""
            since += " on" if self.begin and self.end is None else ""
            until = f" until the end of epoch {self.end}" if self.end is not None else ""
            parts.append(f"{' '.join(self.patterns)} ({self.count:,} parameters) frozen{since}{until}")
        if self.norms:
            which = "all batch-norm statistics frozen" if self.all_statistics else "with its batch-norm statistics"
            parts.append(f"{which} ({len(self.norms)} layers)")
        return ", ".join(parts)


def has_trainable(optimizer: torch.optim.Optimizer) -> bool:
    """True if any parameter of ``optimizer`` trains now."""
    return any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def build_freezing(settings: ModelSettings, model: nn.Module) -> Freezing:
    """The freezing of ``model`` that ``settings`` ask for. Raises ``UserError``."""
    return Freezing(model, settings.freeze or (), settings.freeze_epoch, settings.unfreeze_epoch, settings.freeze_bn)


def _matches(pattern: str, names: Iterable[str], model: nn.Module) -> list[str]:
    found = [name for name in names if _fits(name, pattern)]
    if not found and pattern in BACKBONE:
        head = head_parameters(model)
        found = [name for name in names if name not in head]
    if found:
        return found
    layers = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
    hint = or_nearest(pattern, sorted(layers), f"its parts are {', '.join(tops[:8])}")
    raise UserError(f"--freeze {pattern}: no parameter or layer of the network has such a name; {hint}")


def _keep_statistics(layer: nn.Module, from_the_start: bool) -> None:
    # A subclass, so that copies keep their statistics too, whoever calls train() on the network.
    layer.__class__ = type(type(layer).__name__, (_KeepsStatistics, type(layer)), {})
    assert isinstance(layer, _KeepsStatistics)
    layer.keeps_statistics = from_the_start
    layer.train(layer.training)


def let_gather_statistics(model: nn.Module, layers: Callable[[str], bool]) -> None:
    """Let the batch norms of ``model`` gather statistics again whose names ``layers`` accepts."""
    for name, layer in model.named_modules():
        if isinstance(layer, _KeepsStatistics) and layers(name):
            layer.keeps_statistics = False


class _KeepsStatistics(nn.Module):
    """Mix-in for a batch norm's class: the layer stays in evaluation mode while ``keeps_statistics`` is True."""

    keeps_statistics: bool

    def train(self, mode: bool = True) -> Self:
        return super().train(mode and not self.keeps_statistics)
