"""Linux's network namespaces, by the names that ``ip netns`` gives them."""

from __future__ import annotations

import ctypes

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


def enter(space: str) -> None:
    """Let this thread, and no other, use the network of ``space`` from now on. Raises ``OSError``."""
    with open(f"/run/netns/{space}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
