"""Mean and standard deviation of each channel of the training images, in the form that a run takes.

Every pixel of every stored image counts once, before anything is resized, cropped or padded. Sums of 8-bit levels are
integers, so the result depends neither on the order nor on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from scripts.common.output import write_text
from scripts.data_check.survey import CHUNK, Survey
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError, as_flag
from utils.data.formats.readers import ImageFiles, Images, MemoryImages
from utils.data.images.decoding import UnreadableImage, read_pixels
from utils.data.images.levels import keeps_levels
from utils.data.progress_log import ProgressLog
from utils.data.worker_pool import in_chunks

FILE = "statistics.yaml"


class Statistics(NamedTuple):
    """Sums over ``images`` images, with one entry per channel in each array. Levels are 0 to 255."""

    images: int
    pixels: int
    sums: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean of each channel, for pixel values between 0 and 1."""
        return self.sums / self.pixels / 255

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of each channel, for values between 0 and 1, over all pixels (not a sample estimate)."""
        return np.sqrt(np.maximum(self.squares / self.pixels - (self.sums / self.pixels) ** 2, 0)) / 255


def measure(images: Images, *, workers: int, progress: ProgressLog, skips_bad: bool = False) -> Statistics:
    """Statistics of ``images``, read by ``workers`` processes.

    Raises ``UserError`` if one cannot be read, or if none can and ``skips_bad`` leaves such out.
    """
    if isinstance(images, MemoryImages):
        return of_pixels(images.pixels.cpu().numpy())
    work = _Chunk(images, skips_bad)
    chunks = in_chunks(work, len(images), CHUNK, "Measuring", workers=workers, progress=progress)
    parts = [part for _, parts in chunks for part in parts]
    if not parts:
        raise UserError("--statistics: no training image can be read")
    return joined(parts)


class _Chunk(Dataset):
    """A worker's task: the statistics of a range of files, in a list, which is empty if none can be read."""

    def __init__(self, images: ImageFiles, skips_bad: bool) -> None:
        self.images = images
        self.skips_bad = skips_bad

    def __getitem__(self, chunk: range) -> list[Statistics]:
        parts = []
        for index in chunk:
            with suppress(UnreadableImage) if self.skips_bad else nullcontext():
                pixels = read_pixels(self.images.paths[index], self.images.colour)
                parts.append(of_pixels(pixels[None].numpy()))
        return [joined(parts)] if parts else []


def of_pixels(pixels: np.ndarray) -> Statistics:
    """Statistics of images (n, c, h, w), uint8 or levels as floats."""
    by_channel = np.moveaxis(pixels, 1, 0).reshape(pixels.shape[1], -1)
    low, high = by_channel.min(1).astype(float), by_channel.max(1).astype(float)
    if pixels.dtype == np.uint8:
        counts = np.stack([np.bincount(channel, minlength=256) for channel in by_channel])
        levels = np.arange(256)
        return Statistics(len(pixels), by_channel.shape[1], counts @ levels, counts @ levels**2, low, high)
    wide = by_channel.astype(np.float64)
    return Statistics(len(pixels), by_channel.shape[1], wide.sum(1), (wide**2).sum(1), low, high)


def joined(parts: Sequence[Statistics]) -> Statistics:
    """Statistics of all parts' images together."""
    images, pixels, sums, squares, low, high = zip(*parts, strict=True)
    return Statistics(sum(images), sum(pixels), sum(sums), sum(squares), np.min(low, axis=0), np.max(high, axis=0))


def written(statistics: Statistics, survey: Survey, settings: DataSettings, folder: Path) -> list[str]:
    """Write ``statistics.yaml``, which a run accepts as a recipe, and return the report's lines about it."""
    if (statistics.std <= 0).any():
        flat = np.flatnonzero(statistics.std <= 0)
        raise UserError(f"--statistics: channel {flat[0] + 1} has one level in all images, and no standard deviation")
    images = survey.images[0]
    values = {name: [float(f"{value:.6g}") for value in getattr(statistics, name)] for name in ("mean", "std")}
    channels = len(values["mean"])
    chosen = values if channels == survey.spec.channels else {"in_channels": channels, **values}
    given = {name: getattr(settings, name) for name in ("levels", "pixel_range")}
    chosen |= {name: value for name, value in given.items() if value is not None}
    about = f"{statistics.images:,} training images, {statistics.pixels:,} pixels of each channel, levels from 0 to 255"
    ranges = ", ".join(f"{low:.4g} to {high:.4g}" for low, high in zip(statistics.low, statistics.high, strict=True))
    lines = [f"# {about}: {ranges}"]
    for name, value in chosen.items():
        lines.append(f"{name.replace('_', '-')}: {list(value) if isinstance(value, list | tuple) else value}")
    write_text(folder / FILE, "\n".join(lines) + "\n")
    kept = isinstance(images, ImageFiles) and keeps_levels(images.colour)
    return [
        f"Statistics of {about}{', all of them kept' if kept else ''}: {ranges}",
        " ".join(as_flag(name, value) for name, value in chosen.items()),
        f"Give main.py these flags, or --config {folder / FILE}",
    ]
