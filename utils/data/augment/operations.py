"""The operations of augmentation policies, batched: uint8 images (k, c, h, w), each with its own argument.

Names, arguments and pixels are those of torchvision.transforms.v2.functional on uint8 tensors, which treats one image
at a time. An image's result does not depend on the rest of its batch: whole numbers are summed exactly, and floats are
combined by single operations that round the same wherever an image lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from utils.data.augment.geometry import MATRICES, mirrored, warp
from utils.runtime.devices import constant, to_device

# Maps uint8 images (k, c, h, w) and their arguments, float64 (k,) on the host, to levels 0 to 255, which the caller
# truncates to whole ones.
Kernel = Callable[[torch.Tensor, np.ndarray], torch.Tensor]
LEVELS = 255
PIXELS_TOGETHER = 2**16
GREY = (0.2989, 0.587, 0.114)  # weights of red, green and blue
BLUR_REACH = 8  # pixels, four standard deviations of the widest blur
# For red, green and blue, in each sixth of the hue circle: whether it is high (0), low (1), falling (2) or rising (3).
HUE_SIDES = ((0, 2, 1, 1, 3, 0), (3, 0, 0, 2, 1, 1), (1, 1, 3, 0, 0, 2))
IDENTITY = "Identity"
NEED_COLOUR = ("Color", "Desaturate", "Hue")  # these leave grey images as they are, as in torchvision and Pillow


@dataclass(frozen=True)
class Canvas:
    """The rules by which a geometric operation looks up pixels.

    ``interpolation``: 'nearest' or 'bilinear'. ``fill``: the level of each channel outside of an image; () is black.
    """

    interpolation: str = "nearest"
    fill: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.interpolation}, {f'level {self.fill} outside' if self.fill else 'black outside'}"


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Context in which a CPU computes with one thread, as starting threads costs short operations more than it saves.

    With workers that keep all cores busy, it costs even more.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device.type == "cpu":
            torch.set_num_threads(before)


def apply_layers(
    images: torch.Tensor, names: Sequence[str], choices: np.ndarray, arguments: np.ndarray, canvas: Canvas
) -> torch.Tensor:
    """Apply operation ``names[choices[i, 0]]`` with ``arguments[i, 0]`` to image i, then that of column 1, and so on.

    ``images``: uint8 (n, c, h, w). ``choices``: integers (n, layers), negative for none; ``arguments``: float64 of the
    same shape. Both are on the host, which groups the images by operation without waiting for the device.
    """
    with _one_thread(images.device):
        return _layers(images, names, choices, arguments, canvas)


def _layers(
    images: torch.Tensor, names: Sequence[str], choices: np.ndarray, arguments: np.ndarray, canvas: Canvas
) -> torch.Tensor:
    height, width = images.shape[2:]
    kinds = _kinds(names)
    kind = np.where(choices < 0, -1, kinds[choices])
    values = _values(names, choices, arguments, height, width)
    if images.device.type == "cpu" and height * width > PIXELS_TOGETHER // 2:
        return _one_by_one(images, names, kind, values, canvas)
    # As many images as a CPU's cache holds.
    together = PIXELS_TOGETHER // (height * width) if images.device.type == "cpu" else len(images)
    places = np.arange(len(images))  # where each image is in ``images``, which each layer reorders
    images = images.contiguous()
    for layer in range(choices.shape[1]):
        order = np.argsort(kind[:, layer], kind="stable")
        images = _reordered(images, places[order])
        places = np.argsort(order)
        bounds = np.flatnonzero(np.diff(kind[order, layer], prepend=-2, append=-2))
        for first, end in pairwise(bounds):
            for begin in range(first, end, together):
                some = order[begin : min(begin + together, end)]
                _apply(images[begin : begin + len(some)], names, kind[some[0], layer], values[some, layer], canvas)
    return _reordered(images, places)


def _one_by_one(
    images: torch.Tensor, names: Sequence[str], kind: np.ndarray, values: np.ndarray, canvas: Canvas
) -> torch.Tensor:
    """Apply all layers to one image, which stays in the cache, then to the next."""
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    for number, one in enumerate(result.split(1)):
        one.copy_(images[number])
        for layer, own in enumerate(kind[number].tolist()):
            _apply(one, names, own, values[number : number + 1, layer], canvas)
    return result


def _kinds(names: Sequence[str]) -> np.ndarray:
    """Kind of each operation, int64 (names,), as one call applies one kind: the geometric ones share one; -1: none."""
    geometric = len(names)
    kinds = [-1 if name == IDENTITY else geometric if name in MATRICES else k for k, name in enumerate(names)]
    return np.array(kinds)


def _values(names: Sequence[str], choices: np.ndarray, arguments: np.ndarray, height: int, width: int) -> np.ndarray:
    """Each operation's matrix if it is geometric, else its argument and five zeros: float64 (n, layers, 6)."""
    values = np.zeros((*choices.shape, 6))
    values[..., 0] = arguments
    for choice in np.unique(choices[choices >= 0]):
        if names[choice] in MATRICES:
            own = choices == choice
            values[own] = MATRICES[names[choice]](arguments[own], height, width)
    return values


def _reordered(images: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    return images.index_select(0, to_device(torch.from_numpy(places), images.device))


def _apply(images: torch.Tensor, names: Sequence[str], kind: int, values: np.ndarray, canvas: Canvas) -> None:
    """Apply to ``images``, in place, operations that are all of one ``kind``. ``values``: (k, 6), as in ``_values``."""
    if kind < 0:
        return
    if kind == len(names):
        levels = warp(images, values, canvas.interpolation, canvas.fill)
    else:
        levels = KERNELS[names[kind]](images, values[:, 0])
    if levels.is_floating_point() and images.dtype == torch.uint8 and images.device.type == "cpu":
        levels = levels.short()  # several times as fast as straight from floats to bytes
    images.copy_(levels)


def whole_levels(images: torch.Tensor) -> torch.Tensor:
    """Round images of uint8 or float levels to uint8; cut off what an augmentation has left below 0 or above 255."""
    return images if images.dtype == torch.uint8 else images.round().clamp(0, 255).to(torch.uint8)


def per_image(numbers: np.ndarray, images: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Turn ``numbers`` (k,), one per image, into a tensor (k, 1, 1, 1) of ``dtype`` on the images' device."""
    return to_device(torch.from_numpy(numbers).to(dtype), images.device).view(-1, 1, 1, 1)


# --------------------------------------------------------------------------------- levels of pixels


def _blend(levels: torch.Tensor, others: torch.Tensor, ratios: np.ndarray) -> torch.Tensor:
    """Mix float32 ``levels`` with ``others`` (k, 1, h, w), in place; ``ratios`` (k,): the weights of ``levels``."""
    own = per_image(ratios, levels)
    rest = per_image(1.0 - ratios, levels)
    # addcmul rounds once, as torchvision's add with alpha does.
    return levels.mul_(own).addcmul_(others, rest).clamp_(0, LEVELS)


def brightness(images: torch.Tensor, factors: np.ndarray) -> torch.Tensor:
    """Multiply the brightness by ``factors`` (k,): 0 gives black, 1 the same image."""
    return images.float().mul_(per_image(factors, images)).clamp_(0, LEVELS)


def grey_levels(levels: torch.Tensor) -> torch.Tensor:
    """Convert images, float32 of one or three channels, to whole grey levels, float32 (k, 1, h, w)."""
    if levels.shape[1] == 1:
        return levels.clone()
    red, green, blue = levels.split(1, dim=1)
    return red.mul(GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2]).floor_()


def color(images: torch.Tensor, factors: np.ndarray) -> torch.Tensor:
    """Multiply the saturation by ``factors`` (k,): 0 gives grey, 1 the same image."""
    if images.shape[1] == 1:
        return images
    levels = images.float()
    return _blend(levels, grey_levels(levels), factors)


def contrast(images: torch.Tensor, factors: np.ndarray) -> torch.Tensor:
    """Multiply the contrast by ``factors`` (k,): 0 gives the mean grey everywhere, 1 the same image."""
    pixels = images.shape[2] * images.shape[3]
    exact = torch.float32 if pixels * LEVELS <= 2**24 else torch.float64  # sums whole levels without rounding
    levels = images.float()
    grey = grey_levels(levels)
    mean = grey.flatten(1).sum(1, dtype=exact).float().div_(pixels).view(-1, 1, 1, 1)
    return _blend(levels, grey.copy_(mean), factors)


def sharpness(images: torch.Tensor, factors: np.ndarray) -> torch.Tensor:
    """Multiply the sharpness by ``factors`` (k,): 0 blurs, 1 gives the same image. The outermost pixels stay."""
    if min(images.shape[-2:]) <= 2:
        return images
    inner = (..., slice(1, -1), slice(1, -1))
    whole = images.short()
    rows = (whole[:, :, :-2] + whole[:, :, 1:-1]).add_(whole[:, :, 2:])
    sums = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    sums.add_(whole[inner], alpha=4)  # all nine pixels once, the middle one five times
    levels = images[inner].float()
    blurred = sums.float().mul_(1 / 13).round_().sub_(levels)  # no multiple of 1/13 is near a tie
    output = images.clone()
    output[inner] = levels.addcmul_(blurred, per_image(1.0 - factors, images)).clamp_(0, LEVELS).short()
    return output


def posterize(images: torch.Tensor, bits: np.ndarray) -> torch.Tensor:
    """Keep the highest ``bits`` (k,) of each level's eight bits; whole numbers, limited to 0 to 8."""
    kept = np.clip(bits, 0, 8).astype(np.int64)
    return images & per_image(256 - (1 << (8 - kept)), images, torch.uint8)


def solarize(images: torch.Tensor, thresholds: np.ndarray) -> torch.Tensor:
    """Invert levels of at least ``thresholds`` (k,); a threshold above 255 inverts none."""
    least = np.ceil(thresholds.astype(np.float32)).clip(0)
    inverting = per_image(np.where(least <= LEVELS, LEVELS, 0), images, torch.uint8)
    at_least = images.clone().ge_(per_image(least.clip(0, LEVELS), images, torch.uint8))  # 0 or 1, in bytes
    return at_least.mul_(inverting).bitwise_xor_(images)


def solarize_add(images: torch.Tensor, added: np.ndarray) -> torch.Tensor:
    """Add ``added`` (k,), limited to 0 to 128, to levels below 128."""
    return images.clone().lt_(128).mul_(per_image(np.clip(added, 0, 128), images, torch.uint8)).add_(images)


def autocontrast(images: torch.Tensor, _: np.ndarray) -> torch.Tensor:
    """Stretch each channel to the full range of levels."""
    low, high = (edge(images.flatten(2), 2)[..., None, None].float() for edge in (torch.amin, torch.amax))
    flat = low == high
    scale = (high - low).mul_(1.0 / LEVELS).masked_fill_(flat, 1.0)
    return images.float().sub_(low.masked_fill_(flat, 0.0)).div_(scale).clamp_(0, LEVELS)


def equalize(images: torch.Tensor, _: np.ndarray) -> torch.Tensor:
    """Make all levels about equally frequent in each channel, as Pillow does."""
    pixels = images.shape[2] * images.shape[3]
    planes = images.shape[0] * images.shape[1]
    first = torch.arange(0, 256 * planes, 256, dtype=torch.int32, device=images.device).view(planes, 1)
    places = images.view(planes, pixels).int().add_(first).flatten()  # each pixel's level, counted across planes
    counts = _counts(places, 256 * planes).view(planes, 256)
    below = counts.cumsum(1)
    highest = counts.gather(1, below.argmax(1, keepdim=True))  # how many pixels have the highest level that occurs
    step = (pixels - highest).div_(LEVELS, rounding_mode="floor")
    shifted = (below - counts).add_(step // 2).div_(step.clamp(min=1), rounding_mode="floor").clamp_(0, LEVELS)
    table = torch.where(step > 0, shifted, torch.arange(256, device=images.device)).to(torch.uint8)
    return table.flatten().index_select(0, places).view_as(images)


def _counts(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Count how often each number from 0 to ``size`` - 1 occurs in int32 ``numbers`` (n,): (size,)."""
    if numbers.device.type == "cpu":
        return torch.bincount(numbers, minlength=size)
    counts = torch.zeros(size, dtype=torch.int32, device=numbers.device)
    one = torch.ones(1, dtype=torch.int32, device=numbers.device)
    # Unlike bincount, this does not wait for the device.
    return counts.scatter_add_(0, numbers.long(), one.expand(len(numbers)))


def invert(images: torch.Tensor, _: np.ndarray) -> torch.Tensor:
    return ~images


def gaussian_blur(images: torch.Tensor, sigmas: np.ndarray) -> torch.Tensor:
    """Blur by a Gaussian with standard deviation ``sigmas`` (k,), at most 2 pixels; edges mirror the image."""
    distances = np.arange(BLUR_REACH + 1)
    weights = np.exp(-0.5 * (distances / sigmas[:, None]) ** 2)
    weights /= 2 * weights.sum(1, keepdims=True) - 1  # each but the middle one counts on both sides
    columns = [per_image(column, images) for column in weights.T]
    levels = images.float()
    for axis in (2, 3):
        size = levels.shape[axis]
        places = mirrored(torch.arange(-BLUR_REACH, size + BLUR_REACH, device=images.device), size)
        padded = levels.index_select(axis, places)
        levels = levels * columns[0]
        for distance in range(1, BLUR_REACH + 1):
            sides = (padded.narrow(axis, BLUR_REACH + step, size) for step in (-distance, distance))
            levels.add_(torch.add(*sides).mul_(columns[distance]))
    return levels.round_().clamp_(0, LEVELS) if images.dtype == torch.uint8 else levels


def hue(images: torch.Tensor, shifts: np.ndarray) -> torch.Tensor:
    """Turn the hue by ``shifts`` (k,), -0.5 to 0.5 of a full circle, through HSV, step by step like torchvision."""
    if images.shape[1] == 1:
        return images
    colours = images.float().mul_(1.0 / LEVELS)
    high = colours.amax(1)
    span = high - colours.amin(1)
    grey = span == 0
    saturation = span / high.masked_fill(grey, 1.0)
    red, green, blue = ((high[:, None] - colours) / span.masked_fill(grey, 1.0)[:, None]).unbind(1)
    of_green = torch.where(colours[:, 1] == high, red.add(2.0).sub_(blue), green.add(4.0).sub_(red))
    sixths = torch.where(colours[:, 0] == high, blue - green, of_green)
    turned = sixths.mul_(1.0 / 6.0).add_(1.0).fmod_(1.0).add_(per_image(shifts, images)[:, 0]).remainder_(1.0).mul_(6)
    sector = turned.floor()
    falling = saturation * turned.sub_(sector)
    low = 1.0 - saturation
    sides = [high, *(side.mul_(high).clamp_(0.0, 1.0) for side in (low.clone(), 1.0 - falling, falling + low))]
    places = constant(HUE_SIDES, torch.int64, images.device)[:, sector.long() % 6].movedim(0, 1)
    return torch.stack(sides, dim=1).gather(1, places).mul_(LEVELS + 1 - 1e-3)


def _desaturate(images: torch.Tensor, amounts: np.ndarray) -> torch.Tensor:
    """Remove the share ``amounts`` (k,) of the colour: 0 gives the same image, 1 grey."""
    return color(images, np.clip(1.0 - amounts, 0.0, 1.0))


KERNELS: dict[str, Kernel] = {
    "Brightness": brightness,
    "Color": color,
    "Contrast": contrast,
    "Sharpness": sharpness,
    "Posterize": posterize,
    "Solarize": solarize,
    "SolarizeAdd": solarize_add,
    "AutoContrast": autocontrast,
    "Equalize": equalize,
    "Invert": invert,
    "Desaturate": _desaturate,
    "GaussianBlur": gaussian_blur,
    "Hue": hue,
}
