"""Initialisation of weights by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from utils.config.settings import UserError

SCHEMES = {
    # He et al., Delving deep into rectifiers, 2015: variance 2 / fan_in
    "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    # Glorot and Bengio, Understanding the difficulty of training deep networks, 2010: 2 / (fan_in + fan_out)
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    # as kaiming_normal, and linear layers stay as they are: NVIDIA's ResNet-50 (Deep Learning Examples, ConvNets)
    "kaiming_normal_conv": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}
DRAWING = {"uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_"}  # what initialisers do to a weight
SINCOS_POSITIONS = "sincos_positions"
SLOWEST = 10_000  # radians between patches: the fastest wave turns by 1, the slowest by 1 / SLOWEST


class _NothingDrawn(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", None) in DRAWING:
            return args[0] if args else (kwargs or {})["tensor"]  # as torch.nn.init gives it
        return function(*args, **(kwargs or {}))


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Context in which networks are built on the meta device, without the initialisers, which take most of the time."""
    with torch.device("meta"), _NothingDrawn():
        yield


def initialise(model: nn.Module, scheme: str) -> None:
    """Set the weights of all convolutions and linear layers by ``scheme`` and their biases to zero.

    ``default`` leaves the model as its library made it; a scheme whose name ends in ``_conv`` leaves linear layers as
    they are; none changes norms and embeddings. ``sincos_positions``, however, changes only a transformer's embedding
    of positions; it raises ``UserError`` for a network that learns none.
    """
    if scheme == "default":
        return
    if scheme == SINCOS_POSITIONS:
        _embed_positions(model)
        return
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *(() if scheme.endswith("_conv") else (nn.Linear,)))
    for module in model.modules():
        if isinstance(module, kinds):
            SCHEMES[scheme](module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def sincos_positions(rows: int, columns: int, width: int) -> torch.Tensor:
    """Sines and cosines of each patch's place: float32 (``rows`` * ``columns``, ``width``), row after row.

    The sine and cosine of the column, then of the row, make up a quarter of the features each, at frequencies from 1 to
    1 / ``SLOWEST``. After Chen et al., An empirical study of training self-supervised vision transformers (MoCo v3),
    2021; the frequencies are big_vision's (``posemb_sincos_2d``), which include the slowest.
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    frequencies = SLOWEST ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    across, down = (place.reshape(-1, 1) * frequencies for place in (column, row))
    return torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=1).float()


@torch.no_grad()
def _embed_positions(model: nn.Module) -> None:
    """Replace timm's learned ``pos_embed`` by sines and cosines, with zeros for tokens that are not patches."""
    table = getattr(model, "pos_embed", None)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    rows, columns = grid or (0, 0)
    patches = rows * columns
    if not patches or not isinstance(table, nn.Parameter) or table.ndim != 3 or table.shape[1] < patches:
        raise UserError(
            f"--init {SINCOS_POSITIONS}: needs a network that learns an embedding of each position (timm's vit, deit)"
        )
    if table.shape[2] % 4 or table.shape[2] < 8:
        raise UserError(f"--init {SINCOS_POSITIONS}: the width, {table.shape[2]}, must be a multiple of 4, at least 8")
    table.zero_()
    table[0, table.shape[1] - patches :] = sincos_positions(rows, columns, table.shape[2])
