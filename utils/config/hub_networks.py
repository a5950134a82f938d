"""Networks that a repository of the Hugging Face Hub describes, as they were when first asked for.

A checkpoint keeps them, so that what reads it builds the same network without a connection, whatever the repository
holds by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "hub"  # in a checkpoint
PREFIXES = ("hf_hub:", "hf-hub:")  # as timm has them
_known: dict[str, dict[str, Any]] = {}


def is_of_hub(arch: str) -> bool:
    """True for 'hf_hub:ORG/NAME' or 'hf_hub:ORG/NAME@REVISION'."""
    return arch.startswith(PREFIXES)


def known(arch: str) -> dict[str, Any] | None:
    """Facts of a network that was asked for before, or that a checkpoint keeps: see ``models/hub.py``."""
    return _known.get(arch)


def remember(networks: object) -> None:
    """Take networks by name, as ``in_checkpoint`` gives them, in place of those that are known."""
    if isinstance(networks, Mapping):
        _known.update(networks)


def in_checkpoint(*names: str | None) -> dict[str, Any]:
    """The part of a checkpoint that keeps those of ``names`` that are of the hub; {} without any."""
    kept = {name: _known[name] for name in names if name in _known}
    return {KEY: kept} if kept else {}
