"""Networks that repositories of the Hugging Face Hub describe, as they were when first asked for.

A checkpoint keeps them, so that the same network can be built without a connection, whatever its repository holds by
then.
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
    """Facts about a network that was asked for before or is kept by a checkpoint (see ``models/hub.py``), or None."""
    return _known.get(arch)


def remember(networks: object) -> None:
    """Store the facts in a checkpoint's ``networks``, by name, over known ones; ignore anything but a mapping."""
    if isinstance(networks, Mapping):
        _known.update(networks)


def in_checkpoint(*names: str | None) -> dict[str, Any]:
    """A checkpoint's entry with the facts of the Hub's networks among ``names``; {} if there are none."""
    kept = {name: _known[name] for name in names if name in _known}
    return {KEY: kept} if kept else {}
