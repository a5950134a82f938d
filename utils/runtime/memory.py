"""Lack of memory: how torch reports it on the devices."""

from __future__ import annotations

import re

import torch

# In the messages of RuntimeErrors: by torch's allocator for CPUs, and by cuBLAS and cuDNN for their workspaces.
SIGNS = ("can't allocate memory", "ALLOC_FAILED")


def lacks_memory(error: BaseException) -> bool:
    """True if ``error`` says that the device or the machine has too little memory."""
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)
    return isinstance(error, MemoryError)


def out_of_memory(error: BaseException) -> str:
    """Words for an ``error`` that ``lacks_memory``, such as 'out of memory (tried to allocate 20.00 MiB)'."""
    asked = re.search(r"tried to allocate ([\d.]+) (\w+)", str(error), re.IGNORECASE)
    if not asked:
        return "out of memory"
    amount = f"{int(asked[1]):,}" if asked[1].isdecimal() else asked[1]
    return f"out of memory (tried to allocate {amount} {asked[2]})"
