"""Batches of steps without a finite gradient, saved for ``scripts/amp_audit.py --batch`` to repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from utils.runtime.files import whole_file

FORMAT = 1
KEYS = (
    "format",
    "arch",
    "settings",
    "classes",
    "image_shape",
    "model",
    "passes",
    "step",
    "epoch",
    "rank",
    "seed",
    "scale",
    "amp",
)
MOST = 10  # files in a run; each holds the network's weights


def save_bad_batch(folder: Path, content: dict[str, Any]) -> Path | None:
    """Write ``content`` into ``folder``, named by its step and rank; return the path.

    ``content`` has all of ``KEYS`` except the format, and ``known``, the mean number of known labels per image of
    multi-label data. Returns None if there are ``MOST`` files already or the write fails, which must not end a run.
    """
    assert {"format", *content} == {*KEYS, "known"}, set(content) ^ set(KEYS)
    try:
        folder.mkdir(exist_ok=True)
        if len(list(folder.glob("*.pt"))) >= MOST:
            return None
        path = folder / f"step{content['step']:08d}_rank{content['rank']}.pt"
        with whole_file(path) as file:
            torch.save({"format": FORMAT, **content}, file)
        return path
    except (OSError, RuntimeError):  # torch reports a full disk as RuntimeError
        return None
