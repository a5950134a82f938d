"""Check of an export: loaded again in a fresh process, it must predict what the network predicts."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts.exporting.formats import FORMATS
from scripts.exporting.subject import Subject

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = 1e-4  # difference of an output; for outputs above 1, relative to them
SECONDS = 1800


class ExportFailure(Exception):
    """An export is not as it should be: a fault of this program or of a library, not of the user."""


class Check(NamedTuple):
    """Result of a check. ``largest``: the largest difference between an output and that of ``source``.

    ``agree``: how many of ``count`` images have the same ``answer``.
    """

    loader: str
    source: str
    largest: float
    agree: int
    count: int
    answer: str

    def __str__(self) -> str:
        return (
            f"loaded again in a fresh process with {self.loader}: differs from {self.source} by {self.largest:.1e} "
            f"at most ({ALLOWED:g} is allowed), the same {self.answer} for {self.agree} of {self.count} images"
        )


def compare(
    name: str, outputs: np.ndarray | str, expected: np.ndarray, subject: Subject, source: str = "the network"
) -> Check:
    """Compare an export's ``outputs`` with the ``expected`` ones, both float32 (n, classes).

    ``name``: the export's format; ``source``: text naming what gave the expected outputs; ``subject``: what was
    exported. Raises ``ExportFailure`` if they differ by more than is allowed, or if ``outputs`` is the reason why there
    are none.
    """
    loader = f"{FORMATS[name].loader} {metadata.version(FORMATS[name].loader)}"
    if isinstance(outputs, str):
        raise ExportFailure(f"{loader} does not load it ({outputs[:300]})")
    if outputs.shape != expected.shape:
        raise ExportFailure(f"{loader} gives outputs of shape {outputs.shape} where {expected.shape} are expected")
    difference = np.abs(outputs - expected)
    if not (difference <= ALLOWED * np.maximum(1, np.abs(expected))).all():  # NaN also counts as a difference
        largest = float(np.nanmax(difference)) if np.isfinite(difference).any() else math.nan
        raise ExportFailure(f"the outputs of {loader} differ by up to {largest:.1e}; {ALLOWED:g} is allowed")
    agree = subject.same_answers(outputs, expected)
    return Check(loader, source, float(difference.max()), agree, len(outputs), subject.loaded.reading.answer)


def reloaded(program: str, folder: Path, inputs: np.ndarray) -> np.ndarray | str:
    """Outputs of the export in ``folder``, which ``program`` loads in a fresh process, or why there are none."""
    with tempfile.TemporaryDirectory() as place:
        np.save(f"{place}/inputs.npy", inputs, allow_pickle=False)
        Path(place, "load.py").write_text(program, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "scripts.exporting.reload", place],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return np.load(f"{place}/outputs.npy", allow_pickle=False)
