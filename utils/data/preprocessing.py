"""Preprocessing of an image for a network: size, crop, interpolation, mean and standard deviation."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile

from utils.config.datasets import SPECS, Channels, DatasetSpec
from utils.config.groups.data import CROP_MODES, INTERPOLATIONS, MOST_CHANNELS, DataSettings
from utils.config.image_size import LARGEST_SIDE, Size, enlarged, is_size, size_text
from utils.config.settings import UserError
from utils.data.augmentations import in_range
from utils.data.images.arrays import Header, checked, in_plain_mode, of_colour
from utils.data.images.decoding import LEVELS, open_image, read_pixels, to_tensor
from utils.data.images.levels import Colour, do_not_map, in_colour, is_array, is_deep, raw_mode, refuse_misread
from utils.data.images.view import View, resized
from utils.data.transforms import BatchTransform

AS_SET = "as set"
IMAGENETS = "ImageNet's, the default"
UNMEASURED = "an average over channels; scripts/check_data.py --statistics measures each"


@dataclass(frozen=True)
class Preprocessing(Channels):
    """The way in which images are shown to a network.

    ``image_size``: the size in pixels in training, for which the network is built; ``val_image_size``: in evaluation;
    both the side of a square, or height and width. ``mean`` and ``std``, one number per channel, are for pixel values
    between 0 and 1. For ``crop_pct``, ``crop_mode`` and ``interpolation`` see ``View``. ``stored_size``: the size of
    the data set's images if all have the same, otherwise None. For ``pixel_range`` see ``Colour``. ``levels``: '256'
    or 'all', how many levels are kept of files with more than 8 bits.
    """

    image_size: Size
    val_image_size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    crop_mode: str
    interpolation: str
    stored_size: Size | None = None
    pixel_range: tuple[float, float] | None = None
    levels: str = "256"

    @property
    def colour(self) -> Colour:
        """The mode and range in which files are read."""
        return Colour(super().colour, self.pixel_range, self.levels == "all")

    @classmethod
    def of(cls, spec: DatasetSpec, channels: int | None = None, levels: str = "256") -> Preprocessing:
        """The default for the data set ``spec``: whole images if all have one size, otherwise a central crop.

        With a different number of ``channels``, every channel gets the mean of ``spec``'s means and of its stds.
        ``levels``: see the class.
        """
        return cls(
            spec.image_size,
            spec.image_size,
            for_channels(spec.mean, channels or spec.channels),
            for_channels(spec.std, channels or spec.channels),
            crop_pct=1.0 if spec.fixed_size else View.crop_pct,
            crop_mode=View.crop_mode,
            interpolation=View.interpolation,
            stored_size=spec.image_size if spec.fixed_size else None,
            levels=levels,
        )

    @property
    def resizes(self) -> bool:
        """True if some images are resized."""
        return {self.stored_size} != {self.image_size, self.val_image_size} or self.crop_pct != 1

    @property
    def border(self) -> tuple[int, ...]:
        """Levels of the bars around an image in ``crop_mode`` 'border': those nearest to the mean, 0 to 255."""
        return tuple(min(255, max(0, round(255 * mean))) for mean in self.mean)

    def view(self, size: Size) -> View:
        """The part of an image to read: all of it if images have one size, else what evaluation shows at ``size``."""
        border = self.border if self.crop_mode == "border" else (0,)
        return View(
            self.stored_size or size,
            self.crop_pct,
            self.crop_mode,
            self.interpolation,
            border,
            whole=self.stored_size is not None,
        )

    @property
    def evaluation_transform(self) -> BatchTransform:
        """The transform of images read for evaluation into normalised floats; resizes images stored in one size."""
        return BatchTransform(
            self.val_image_size,
            self.mean,
            self.std,
            interpolation=self.interpolation,
            crop_pct=self.crop_pct if self.stored_size else 1.0,
        )

    def __call__(self, image: Image.Image | np.ndarray | str | os.PathLike[str] | BinaryIO) -> torch.Tensor:
        """Prepare an image for the network as validation does: float32 (channels, h, w) of ``val_image_size``.

        ``image``: Pillow's, an array (h, w) or (h, w, channels), a path or an open file. Raises ``ValueError`` for
        levels without a known range, see ``in_colour``, and ``TypeError`` for anything else.
        """
        if not isinstance(image, Image.Image | np.ndarray | str | os.PathLike) and not hasattr(image, "read"):
            raise TypeError(f"give a path, an image of Pillow or an array, not {type(image).__name__}")
        pixels = self._pixels(os.fspath(image) if isinstance(image, os.PathLike) else image)
        if self.stored_size:
            pixels = resized(pixels, self.stored_size, "bilinear")
        else:
            view = self.view(self.val_image_size)
            place = view.place(*reversed(pixels.shape[1:]))
            left, top, right, bottom = place.box
            pixels = in_range(view.show(pixels[:, top:bottom, left:right], place), self.interpolation)
        return self.evaluation_transform.evaluation(pixels[None])[0]

    def _pixels(self, image: Image.Image | np.ndarray | str | BinaryIO) -> torch.Tensor:
        """The whole image, upright: (channels, h, w)."""
        if isinstance(image, Image.Image):
            return self._of_picture(image)
        if not isinstance(image, np.ndarray):
            return read_pixels(image, self.colour)
        checked(image.shape)
        return self._of_numbers(image)

    def _of_picture(self, image: Image.Image) -> torch.Tensor:
        page = image.tell()
        is_halved = ";16" in raw_mode(image) and not is_deep(image)  # of its 16 bits Pillow loads 8
        if is_halved and page and (self.pixel_range is not None or is_array(self.colour)):
            raise ValueError(f"page {page + 1}: of its 16 bits Pillow reads only 8; save it as a file of its own")
        if not is_array(self.colour):
            refuse_misread(image)
            do_not_map(image)
            if self.pixel_range is not None and is_halved:
                assert isinstance(image, ImageFile) and image.fp is not None  # not loaded yet
                image.fp.seek(0)
                image = open_image(io.BytesIO(image.fp.read()), self.colour)
            return to_tensor(in_colour(ImageOps.exif_transpose(image), self.colour, image.format))
        if LEVELS in image.info:
            return torch.from_numpy(np.array(image.info[LEVELS])).permute(2, 0, 1)
        if not page and (file := getattr(image, "fp", None)) is not None:
            file.seek(0)
            # Pillow would load 8 bits of some files, or not all channels.
            return read_pixels(io.BytesIO(file.read()), self.colour)
        upright = ImageOps.exif_transpose(image)
        return self._of_numbers(np.asarray(upright if is_deep(upright) else in_plain_mode(upright, self.colour)))

    def _of_numbers(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(of_colour(numbers, self.colour))).permute(2, 0, 1)

    def state(self) -> dict[str, Any]:
        """The values as stored in a checkpoint."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        for name, missing in _GOOD_IF_MISSING.items():  # not in older checkpoints
            if values[name] == missing:
                del values[name]
        return {"channels": self.channels, **values}

    @classmethod
    def from_state(cls, state: Any, where: object) -> Preprocessing:
        """Build from what ``state()`` returned; raises ``UserError``, naming its source ``where``, if it is invalid."""
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = (
            {name: state.get(name, _GOOD_IF_MISSING.get(name)) for name in names} if isinstance(state, dict) else {}
        )
        bad = [name for name, good in _GOOD.items() if name not in values or not good(values[name])]
        if not bad and len(values["mean"]) != len(values["std"]):
            bad = ["std"]
        if bad:
            raise UserError(f"{where}: says no usable {bad[0].replace('_', ' ')} of its preprocessing; give another")
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def _are_numbers(values: Any, counts: Sequence[int] = range(1, MOST_CHANNELS + 1), above: float = -math.inf) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) in counts
        and all(isinstance(value, int | float) and math.isfinite(value) and value > above for value in values)
    )


_GOOD_IF_MISSING = {"pixel_range": None, "levels": "256"}
_GOOD: dict[str, Callable[[Any], bool]] = {
    "image_size": is_size,
    "val_image_size": is_size,
    "mean": _are_numbers,
    "std": lambda values: _are_numbers(values, above=0),
    "crop_pct": lambda value: isinstance(value, int | float) and 0.01 <= value < 10,
    "crop_mode": lambda value: value in CROP_MODES,
    "interpolation": lambda value: value in INTERPOLATIONS,
    "stored_size": lambda value: value is None or is_size(value),
    "pixel_range": lambda value: value is None or (_are_numbers(value, (2,)) and value[0] < value[1]),
    "levels": lambda value: value in ("256", "all"),
}


class KnownPreprocessing(NamedTuple):
    """The preprocessing that weights were trained with, and its origin (``source``).

    ``of_this_run``: True if the run to continue or evaluate trained the weights. ``max_shift``: its default reach.
    """

    preprocessing: Preprocessing
    source: str
    of_this_run: bool = False
    max_shift: int | None = None


def resolve(
    settings: DataSettings, known: KnownPreprocessing | None, found: Header | None = None
) -> tuple[Preprocessing, str]:
    """The preprocessing of a run, and a line that describes it with the origin of each value.

    Settings take precedence over what is ``known`` of the weights, which takes precedence over the data set's own
    values. If all images of a data set have one size, they are used whole in that size, even if the weights were
    trained on larger images. If the weights have a different number of channels, their mean and standard deviation are
    averaged: the network then sees grey images nearly as it would see them in colour. ``found``: header of the data's
    first file, if images are read as arrays. Raises ``UserError``.
    """
    spec = SPECS[settings.dataname]
    continued = known.preprocessing.channels if known is not None and known.of_this_run else None
    channels = settings.in_channels or continued or (found.channels if found is not None else spec.channels)
    keeps = channels not in (1, 3) and found is not None and found.bits > 8
    own = Preprocessing.of(spec, channels, "all" if keeps else "256")
    values = asdict(own)
    taken = {}
    origins = dict.fromkeys(values, IMAGENETS if spec.of_the_user else "the data set's own")
    if channels != spec.channels:
        origins |= dict.fromkeys(("mean", "std"), UNMEASURED)
    if keeps:
        origins["levels"] = "as the files have them"
    if known is not None:
        taken = asdict(known.preprocessing)
        del taken["stored_size"]
        if not known.of_this_run:
            del taken["levels"]
        if own.stored_size and not known.of_this_run:
            taken = {name: taken[name] for name in ("mean", "std", "interpolation", "pixel_range")}
        taken |= {name: for_channels(taken[name], own.channels) for name in ("mean", "std")}
        origins |= dict.fromkeys(taken, known.source)
    given = {name: getattr(settings, name) for name in origins if getattr(settings, name, None) is not None}
    given |= {name: _one_each(name, given[name], own.channels) for name in ("mean", "std") if name in given}
    if "image_size" in given:
        given.setdefault("val_image_size", given["image_size"])
    values |= taken | given
    if settings.dataname == "synthetic":  # its images are made in the size asked for
        values["stored_size"] = values["image_size"]
    made = Preprocessing(**values)
    if made.stored_size and (side := max(enlarged(made.val_image_size, made.crop_pct))) > LARGEST_SIDE:
        raise UserError(
            f"--crop-pct {made.crop_pct:g}: crops {size_text(made.val_image_size)} pixels from the middle of images "
            f"enlarged to {side:,} pixels, and no more than {LARGEST_SIDE:,} are possible"
        )
    return made, _described(made, origins | dict.fromkeys(given, AS_SET))


def for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values if len(values) == channels else (sum(values) / len(values),) * channels


def _one_each(name: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise UserError(
            f"--{name}: {len(values)} numbers for images of {channels} channel{'s' * (channels > 1)}; give "
            f"{'one' if channels == 1 else f'1 or {channels}'}"
        )
    return tuple(values) if len(values) == channels else tuple(values) * channels


def _described(made: Preprocessing, origins: dict[str, str]) -> str:
    """One line with all values, grouped by origin."""
    any_size = made.stored_size is None
    texts = {"image_size": f"{size_text(made.image_size)} pixels"}
    if made.val_image_size != made.image_size:
        texts["val_image_size"] = f"{size_text(made.val_image_size)} in evaluation"
    if any_size or made.crop_pct != 1:
        texts["crop_pct"] = f"crop share {made.crop_pct:.4g}"
    if any_size:
        texts["crop_mode"] = made.crop_mode
    if made.resizes:
        texts["interpolation"] = made.interpolation
    texts |= {name: f"{name} {' '.join(f'{value:.4g}' for value in getattr(made, name))}" for name in ("mean", "std")}
    if made.pixel_range is not None:
        texts["pixel_range"] = "pixel range {:g} to {:g}".format(*made.pixel_range)
    if made.levels == "all":
        texts["levels"] = "all levels"
    groups: dict[str, list[str]] = {}
    for name, text in texts.items():
        groups.setdefault(origins[name], []).append(text)
    return "; ".join(f"{', '.join(values)} ({origin})" for origin, values in groups.items())
