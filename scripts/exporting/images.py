"""Images on which an export is compared, calibrated and scored."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch.nn import functional

from models.load import Loaded
from scripts.common.choice import Chosen, picture, read_images, settings_of
from scripts.common.image_stream import image_names
from scripts.exporting.subject import Subject
from utils.config.settings import UserError
from utils.data.formats.readers import ImageFiles, Images
from utils.data.images.decoding import UnreadableImage

COUNT = 32  # images to compare on
SEED = 0  # seeds the choice of images, and noise


def to_compare_on(subject: Subject, folder: str | None, datapath: str | None) -> tuple[torch.Tensor, str]:
    """Images, float32 (n, c, h, w), normalised as in validation, and text about their origin.

    They come from ``folder`` if it is given, otherwise from the run's validation split; if that cannot be read, they
    are noise, and the text says why.
    """
    if folder is not None:
        return _of_folder(subject.loaded, folder)
    try:
        images = _split(subject.loaded, "val", datapath)
        return _shown(subject.loaded, images, COUNT), f"validation images of {subject.data}"
    except UserError as error:
        if datapath is not None:
            raise
        return noise(subject.shape), f"noise, because there are no images ({error.mistakes[0]})"


def refuse_missing(loaded: Loaded, splits: Sequence[str], datapath: str | None) -> None:
    """Raise ``UserError`` if one of ``splits`` of the run's data cannot be read for scoring or calibration."""
    for split in splits:
        try:
            _split(loaded, split, datapath)
        except UserError as error:
            raise UserError(f"--quantise needs the run's images: {error.mistakes[0]}") from error


def noise(shape: tuple[int, int, int]) -> torch.Tensor:
    """Noise images made of random spots of all sizes, each with its own colour: float32, variance 1.

    They exercise a network less than photographs do, but more than independent pixels would: the global average of such
    pixels is the same for all images, so that the network's outputs would differ by rounding only.
    """
    random = torch.Generator().manual_seed(SEED)
    grids = [(COUNT, shape[0], min(spots, shape[1]), min(spots, shape[2])) for spots in (1, 2, 4, 8, 16, 32, 64)]
    layers = [functional.interpolate(torch.randn(grid, generator=random), shape[1:]) for grid in grids]
    return torch.stack(layers).sum(0) / math.sqrt(len(layers))


def to_calibrate_on(loaded: Loaded, datapath: str | None, count: int) -> torch.Tensor:
    """Up to ``count`` of the run's training images, float32 (n, c, h, w), preprocessed as in validation.

    None of them is a validation image. Raises ``UserError`` if there are no others.
    """
    training = _split(loaded, "train", datapath)
    validation = _split(loaded, "val", datapath)
    if isinstance(training, ImageFiles) and isinstance(validation, ImageFiles):
        scored = {os.path.realpath(path) for path in validation.paths}
        places = [place for place, path in enumerate(training.paths) if os.path.realpath(path) not in scored]
        if not places:
            raise UserError("--quantise static: all training images are validated on, too; give --datapath")
        paths = [training.paths[place] for place in places]
        training = ImageFiles(paths, training.labels[places], training.colour)
    return _shown(loaded, training, count)


def table_of(loaded: Loaded, datapath: str | None) -> str | None:
    """The run's table of labels if it is where it was, and ``datapath`` says where its images are now; else None."""
    table = loaded.settings.get("labels")
    return table if datapath is not None and table is not None and os.path.isfile(table) else None


def _split(loaded: Loaded, split: str, datapath: str | None) -> Images:
    chosen = Chosen(split=split, datapath=datapath, labels=table_of(loaded, datapath), device="cpu", progress=False)
    return read_images(loaded, settings_of(loaded, chosen), chosen, torch.device("cpu"))[0]


def _shown(loaded: Loaded, images: Images, count: int, where: str = "--datapath") -> torch.Tensor:
    """Up to ``count`` images, drawn at random so that all classes are likely; skips images that cannot be read.

    Raises ``UserError`` that begins with ``where``, usually a flag, if none can be read.
    """
    order = np.random.default_rng(SEED).permutation(len(images))
    shown: list[torch.Tensor] = []
    for number in order:
        with suppress(UnreadableImage):
            shown.append(loaded.preprocessing(picture(images, int(number))))
        if len(shown) == count:
            break
    if not shown:
        raise UserError(f"{where}: holds no image that can be read")
    return torch.stack(shown)


def _of_folder(loaded: Loaded, folder: str) -> tuple[torch.Tensor, str]:
    try:
        paths = list(image_names([folder]))
    except UserError as error:
        raise UserError(f"--images {error.mistakes[0]}") from error
    files = ImageFiles(paths, torch.zeros(len(paths), dtype=torch.int64), loaded.preprocessing.colour)
    return _shown(loaded, files, COUNT, f"--images {folder}"), f"images of {folder}"
