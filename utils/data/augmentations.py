"""Augmentations: each draws random numbers for the samples and applies them to a batch on the device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from utils.config import plugins
from utils.config.datasets import DatasetSpec
from utils.config.groups.augmentation import AugmentationSettings
from utils.config.image_size import Size, sides
from utils.config.settings import UserError, flag_of
from utils.data.augment.base import PLUGIN_STREAMS, Augmentation, Numbers, Samples, Stream
from utils.data.augment.colour import ColorJitter, Sometimes
from utils.data.augment.erasing import RandomErasing
from utils.data.augment.geometry import mirrored
from utils.data.augment.libraries import BLUR_SIGMA, build_policy
from utils.data.images.decoding import CROP_RATIO
from utils.data.images.view import LEAST_AREA

ANOTHER_SCALE = 25  # factor between the largest numbers before and after a user's augmentation that is a mistake


@dataclass(frozen=True)
class Flip(Augmentation):
    """A flip, left to right or ``vertical``, with a probability of one half.

    ``alternating`` flips half of the images in one epoch and the other half in the next (Jordan, 94 % on CIFAR-10 in
    3.29 seconds, 2024).
    """

    alternating: bool = False
    vertical: bool = False
    compilable: ClassVar[bool] = True

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Mask of the images to flip: bool (n,)."""
        stream = Stream.VERTICAL_FLIP if self.vertical else Stream.FLIP
        flips = replace(samples, epoch=0 if self.alternating else samples.epoch).uniforms(stream, 1) < 0.5
        return (torch.from_numpy(~flips if self.alternating and samples.epoch % 2 else flips)[:, 0],)

    def apply(self, images: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        (flips,) = numbers
        # Flipping all images and then copying those marked is several times as fast as choosing pixel by pixel.
        both = torch.cat([images, images.flip(2 if self.vertical else 3)])
        return take(both, torch.arange(len(images), device=images.device) + len(images) * flips)

    def __str__(self) -> str:
        return "vertical-flip" if self.vertical else "alternating-flip" if self.alternating else "flip"


@dataclass(frozen=True)
class Shift(Augmentation):
    """A shift by up to ``reach`` pixels of the stored image in each direction; if None, by up to an eighth of its side.

    An eighth is CIFAR's usual 4 of 32 pixels, and 28 of 224. Uncovered pixels are black or, with ``padding``
    'reflect', mirror the image. ``flip`` is done in the same step: one copy of the batch instead of two.
    """

    reach: int | None
    padding: str = "zero"
    flip: Flip | None = None
    compilable: ClassVar[bool] = True

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Draw the offset, down and right, at which to cut the padded image: int64 (n, 2); then ``flip``'s numbers."""
        places = torch.tensor([2 * self.pixels(side) + 1 for side in (height, width)])
        offsets = (torch.from_numpy(samples.uniforms(Stream.SHIFT, 2)) * places).long()
        return offsets, *(self.flip.draw(samples, height, width) if self.flip is not None else ())

    def prepared(self, height: int, width: int, *numbers: torch.Tensor) -> Numbers:
        """Row of the image, padded or mirrored, that each row shows: int64 (n, height); for columns, (n, width).

        Computed on the device: the host has one core per GPU and would take longer than the GPU takes for the images.
        """
        offsets, *flips = numbers
        places = torch.arange(width, device=offsets.device)
        if flips:
            places = torch.where(flips[0][:, None], places.flip(0), places)
        rows = offsets[:, :1] + torch.arange(height, device=offsets.device)
        columns = offsets[:, 1:] + places
        if self.padding == "zero":
            return rows, columns
        down, across = map(self.pixels, (height, width))
        return mirrored(rows - down, height), mirrored(columns - across, width)

    def apply(self, images: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        rows, columns = numbers
        if self.padding == "zero":
            down, across = map(self.pixels, images.shape[-2:])
            images = functional.pad(images, (across, across, down, down))
        images = select_rows(images, rows)
        return images.gather(3, columns[:, None, None, :].expand(*images.shape[:3], -1))

    def pixels(self, side: int) -> int:
        """The reach in pixels along a side of ``side`` pixels; by default an eighth of it, at least 1."""
        return self.reach or max(1, side // 8)

    def __str__(self) -> str:
        reach = "an eighth" if self.reach is None else f"{self.reach} px"
        return f"shift (at most {reach} of the stored image, {self.padding} padding)"


@dataclass(frozen=True)
class ResizedCrop(Augmentation):
    """A box of random aspect ratio and at least ``least_area`` of the image, resized to ``size``.

    With ``while_decoding``, data workers crop the images, and ``draw`` and ``apply`` have nothing to do.
    """

    size: Size
    interpolation: str = "bilinear"
    while_decoding: bool = False
    least_area: float = LEAST_AREA
    compilable: ClassVar[bool] = True

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        return () if self.while_decoding else (torch.from_numpy(samples.uniforms(Stream.CROP, 4)),)

    def apply(self, images: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        (uniforms,) = numbers
        shown = resized_crop(images.float(), uniforms, self.size, self.interpolation, self.least_area)
        return in_range(shown, self.interpolation)

    def __str__(self) -> str:
        area = "" if self.least_area == LEAST_AREA else f" (at least {100 * self.least_area:g} % of the area)"
        return f"resized-crop{area}"


@dataclass(frozen=True)
class Cutout(Augmentation):
    """A square of ``side`` pixels, set to the mean, around a random pixel of an image of ``size``; edges clip it.

    DeVries and Taylor, Improved regularization of convolutional neural networks with cutout, 2017.
    """

    side: int
    size: Size
    normalised: ClassVar[bool] = True
    compilable: ClassVar[bool] = True

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """The centres' row and column: int64 (n, 2)."""
        centres = samples.uniforms(Stream.CUTOUT, 2) * np.array(sides(self.size), dtype=np.float32)
        return (torch.from_numpy(centres.astype(np.int64)),)

    def apply(self, images: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        (centres,) = numbers
        first = centres - self.side // 2
        end = first + self.side
        rows, columns = (inside(first[:, axis], end[:, axis], images.shape[2 + axis]) for axis in (0, 1))
        return images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0)

    def __str__(self) -> str:
        return f"cutout of {self.side} px"


# ----------------------------------------------------------------------------------------- registry


class PluginAugmentation(Augmentation):
    """An augmentation from a user's file: a function of images and of random numbers for each image."""

    def __init__(self, function: plugins.Entry) -> None:
        self.function = function
        self.normalised = function.options["normalised"]  # type: ignore[misc]  # a class attribute in all others
        self.scale_is_known = False

    def __str__(self) -> str:
        return f"{self.function.name} ({self.function.file.name})"

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        stream = PLUGIN_STREAMS + zlib.crc32(self.function.name.encode())
        return (torch.from_numpy(samples.uniforms(stream, self.function.options["numbers"])),)

    def apply(self, images: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        augmented = self.function(images, *numbers)
        if not isinstance(augmented, torch.Tensor) or augmented.shape[:2] != images.shape[:2] or augmented.ndim != 4:
            given = tuple(augmented.shape) if isinstance(augmented, torch.Tensor) else type(augmented).__name__
            raise UserError(f"{self.function.where} must return images of the shape {tuple(images.shape)}, not {given}")
        if self.normalised:  # with memory of its own for each number, for what follows writes into it
            augmented = augmented.to(images.dtype).clone()
        if not self.scale_is_known:
            self._refuse_another_scale(images, augmented)
        return augmented

    def _refuse_another_scale(self, images: torch.Tensor, augmented: torch.Tensor) -> None:
        """Raise ``UserError`` for numbers of another scale, such as levels from 0 to 1. Looks at the first batch alone.

        Noise and contrast may leave the range of the levels; their mean does not.
        """
        before, after = (float(values.abs().max()) for values in (images, augmented))
        apart = 0 < after * ANOTHER_SCALE < before or 0 < before * ANOTHER_SCALE < after
        if not self.normalised:
            apart = apart or before > 1 >= after > 0 or not 0 <= float(augmented.float().mean()) <= 255
        if apart:
            what = "images normalised" if self.normalised else "levels from 0 to 255,"
            raise UserError(
                f"{self.function.where} must return {what} as it is given; its numbers lie between "
                f"{float(augmented.min()):.4g} and {float(augmented.max()):.4g}"
            )
        self.scale_is_known = before > (0 if self.normalised else 1)


class Context(NamedTuple):
    """What augmentations are built from; ``size``, ``interpolation`` and ``mean`` describe the network's images."""

    settings: AugmentationSettings
    max_shift: int | None
    size: Size
    interpolation: str = "bilinear"
    crop_while_decoding: bool = False
    mean: tuple[float, ...] = ()
    keeps_levels: bool = False


# By name in --augment, in the order in which they are applied.
AUGMENTATIONS: dict[str, Callable[[Context], Augmentation]] = {
    "shift": lambda context: Shift(context.max_shift, context.settings.shift_padding),
    "flip": lambda context: Flip(),
    "alternating-flip": lambda context: Flip(alternating=True),
    "vertical-flip": lambda context: Flip(vertical=True),
    "resized-crop": lambda context: ResizedCrop(
        context.size, context.interpolation, context.crop_while_decoding, context.settings.crop_min_area
    ),
}


def _blur(probability: float, context: Context) -> Sometimes:
    text = f"gaussian-blur ({100 * probability:g} % of the images, sigma {BLUR_SIGMA[0]:g} to {BLUR_SIGMA[1]:g} px)"
    return Sometimes(text, "GaussianBlur", Stream.BLUR, probability, *BLUR_SIGMA, context.keeps_levels)


# By the setting that switches each on, whose value they take, in the order of application, after those of --augment.
BY_FLAG: dict[str, Callable[[Any, Context], Augmentation]] = {
    "rotation": lambda degrees, context: Sometimes(
        f"rotation (up to {degrees:g} degrees)", "Rotate", Stream.ROTATION, 1.0, -degrees, degrees, context.keeps_levels
    ),
    "auto_augment": lambda policy, context: build_policy(policy, context.mean),
    "color_jitter": lambda amounts, context: ColorJitter.of(amounts, context.settings.color_jitter_prob),
    "grayscale_prob": lambda probability, context: Sometimes(
        f"grayscale ({100 * probability:g} % of the images)", "Color", Stream.GREY, probability
    ),
    "gaussian_blur_prob": _blur,
    "random_erase": lambda probability, context: RandomErasing(
        probability, context.settings.random_erase_mode, context.settings.random_erase_count
    ),
    "cutout": lambda side, context: Cutout(side, context.size),
}
OFF = (None, "none", 0)


def chosen_names(settings: AugmentationSettings, spec: DatasetSpec) -> tuple[str, ...]:
    """Names of the augmentations in ``--augment``, by default the data set's."""
    names = spec.augment if settings.augment is None else settings.augment
    return tuple(name for name in names if name != "none")


def build_augmentations(names: Sequence[str], context: Context) -> tuple[Augmentation, ...]:
    """Build the augmentations called ``names`` and those with flags of their own, in order of application."""
    chosen = [build(context) for name, build in AUGMENTATIONS.items() if name in names]
    chosen += [PluginAugmentation(own) for name, own in plugins.added("augmentation").items() if name in names]
    chosen.sort(key=lambda one: not (isinstance(one, ResizedCrop) and one.while_decoding))  # the workers come first
    given = {flag: getattr(context.settings, flag) for flag in BY_FLAG}
    return (*chosen, *(BY_FLAG[flag](value, context) for flag, value in given.items() if value not in OFF))


def refuse_colour(settings: AugmentationSettings, channels: int, keeps_levels: bool) -> None:
    """Raise ``UserError`` for augmentations defined only for 8-bit grey or RGB, if the images are different."""
    wanted = [flag for flag in ("auto_augment", "color_jitter", "grayscale_prob") if getattr(settings, flag) not in OFF]
    if wanted and (channels not in (1, 3) or keeps_levels):
        what = "all levels (--levels all)" if channels in (1, 3) else f"{channels} channels"
        flags = ", ".join(flag_of(flag) for flag in wanted)
        raise UserError(f"{flags}: defined for 8 bits of grey or RGB, and the images have {what}; leave it out")


def fused(augmentations: Sequence[Augmentation]) -> tuple[Augmentation, ...]:
    """Fuse a horizontal flip into the shift, if both are present: one copy of the batch instead of two."""
    flip = next((one for one in augmentations if isinstance(one, Flip) and not one.vertical), None)
    if flip is None or not any(isinstance(one, Shift) for one in augmentations):
        return tuple(augmentations)
    return tuple(replace(one, flip=flip) if isinstance(one, Shift) else one for one in augmentations if one is not flip)


# ------------------------------------------------------------------------------- batches of images


def select_rows(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Select ``rows`` (n, k) of images (n, c, h, w): (n, c, k, w). Copies whole rows instead of single pixels."""
    count, channels, height, width = images.shape
    first = torch.arange(0, count * channels * height, height, device=images.device).view(count, channels, 1)
    chosen = (first + rows[:, None, :]).flatten()
    return images.reshape(-1, width).index_select(0, chosen).view(count, channels, rows.shape[1], width)


def take(images: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Select the images at ``places``, int64 (k,), of images (n, c, h, w): (k, c, h, w), in the same memory format."""
    if images.is_contiguous():
        return images.index_select(0, places)
    # index_select copies whole images only if each is contiguous in its view.
    return images.permute(0, 2, 3, 1).index_select(0, places).permute(0, 3, 1, 2)


def inside(first: torch.Tensor, end: torch.Tensor, length: int) -> torch.Tensor:
    """Mask of the places from ``first`` (n,) up to but not including ``end`` (n,): bool (n, length)."""
    place = torch.arange(length, device=first.device)
    return (place >= first[:, None]) & (place < end[:, None])


def resized_crop(
    images: torch.Tensor,
    uniforms: torch.Tensor,
    size: Size,
    interpolation: str = "bilinear",
    least_area: float = LEAST_AREA,
) -> torch.Tensor:
    """Crop a random box from each image of a float batch (n, c, h, w) and resize it to ``size``, without antialiasing.

    ``uniforms`` (n, 4): for area, aspect ratio and place. A box that does not fit is narrowed to the image instead of
    drawn again.
    """
    height, width = images.shape[-2:]
    area = height * width * (least_area + (1.0 - least_area) * uniforms[:, 0])
    low, high = (math.log(ratio) for ratio in CROP_RATIO)
    ratio = torch.exp(low + (high - low) * uniforms[:, 1])
    box_width = (area * ratio).sqrt().clamp(max=width) / width
    box_height = (area / ratio).sqrt().clamp(max=height) / height
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0] = box_width
    theta[:, 1, 1] = box_height
    theta[:, 0, 2] = (2 * uniforms[:, 2] - 1) * (1 - box_width)
    theta[:, 1, 2] = (2 * uniforms[:, 3] - 1) * (1 - box_height)
    grid = functional.affine_grid(theta, [len(images), images.shape[1], *sides(size)], align_corners=False)
    return functional.grid_sample(images, grid, mode=interpolation, padding_mode="border", align_corners=False)


def in_range(images: torch.Tensor, interpolation: str) -> torch.Tensor:
    """Limit float images to levels 0 to 255, in place, after bicubic interpolation, which overshoots at edges."""
    return images.clamp_(0, 255) if interpolation == "bicubic" else images
