"""Heat maps of where a network looks: of the pixels that speak for a class, computed by captum.

Grad-CAM (Selvaraju et al., 2017) weights the channels of a late feature map by the mean gradient of the class's logit
and adds them up. A transformer's patch tokens are laid out as such a map, and each is weighted by its own gradient
(HiResCAM, Draelos and Carin, 2020): where the map is averaged over its cells next, that is the same, but attention
treats each token differently, and the mean gradient then says little. A network without a map (fully connected) gets
the plain gradient with respect to the pixels (Simonyan et al., 2013), which is noisier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from utils.config.settings import UserError
from utils.data.transforms import for_people

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from models.load import Loaded

LEAST_CELLS = 4  # a side of the map, below which it says little about where
# and for images with fewer pixels a side
LEAST_CELLS_OF_SMALL = 2
SMALL = 16
MOST_PREFIX_TOKENS = 8  # class, distillation and register tokens in front of the patches'
PROBES = 2  # images of noise, with which the layer is found


class Layer(NamedTuple):
    """The layer whose output is the feature map, and how that is laid out.

    ``layout``: ``nchw``, ``nhwc``, or ``tokens``: (n, ``prefix`` + rows * columns, channels), laid out in the shape of
    the images, ``height`` to ``width``.
    """

    name: str
    layout: str
    height: int
    width: int
    prefix: int = 0

    def to_map(self, output: torch.Tensor) -> torch.Tensor:
        """The layer's output as (n, channels, h, w)."""
        if self.layout == "tokens":
            patches = output[:, self.prefix :]
            rows = rows_of(patches.shape[1], self.height, self.width)
            return patches.transpose(1, 2).unflatten(2, (rows, -1))
        return output.permute(0, 3, 1, 2) if self.layout == "nhwc" else output

    def from_map(self, seen: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The inverse; what is no part of the map is taken from ``output``."""
        if self.layout == "tokens":
            return torch.cat([output[:, : self.prefix], seen.flatten(2).transpose(1, 2)], dim=1)
        return seen.permute(0, 2, 3, 1) if self.layout == "nhwc" else seen


def rows_of(patches: int, height: int, width: int) -> int:
    """The rows in which so many patches cover an image of this shape; 0 if none do."""
    rows = round(math.sqrt(patches * height / width))
    return rows if rows and patches % rows == 0 and has_shape(rows, patches // rows, height, width) else 0


def has_shape(rows: int, columns: int, height: int, width: int) -> bool:
    """True if a map has the shape of an image, but for what a division by the stride leaves out."""
    return abs(rows * width - columns * height) < max(height, width)


_LAYERS: WeakKeyDictionary[nn.Module, Layer | None] = WeakKeyDictionary()


def heat_map(loaded: Loaded, images: torch.Tensor, class_indices: Sequence[int]) -> np.ndarray:
    """Share of each pixel in what speaks for a class: float32 (n, h, w) between 0 and 1.

    ``images``: preprocessed, float32 (n, channels, h, w). ``class_indices``: the class to explain for each image.
    Each map is scaled by its own largest value, so brightness does not compare between images; where nothing speaks
    for the class, it is all 0. Computed in float32 in the network's present mode, which should be evaluation, with
    gradients whatever the caller's mode. No other pass of the network may run at the same time. Raises ``UserError``
    without captum, or where the network's outputs are not finite.
    """
    need_captum()
    from captum.attr import LayerAttribution, LayerGradCam, LayerGradientXActivation, Saliency

    network = loaded.network
    targets = [int(index) for index in class_indices]
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        images = images.detach().clone().float()  # a leaf that may have a gradient, also if made in inference mode
        layer = explained_layer(network, images)
        if layer is None:
            maps = Saliency(network).attribute(images.requires_grad_(), target=targets).amax(1, keepdim=True)
        else:
            with _exposed(network, layer) as place:
                if layer.layout == "nchw":
                    maps = LayerGradCam(network, place).attribute(images, target=targets)
                else:
                    maps = LayerGradientXActivation(network, place).attribute(images, target=targets)
            maps = maps.sum(1, keepdim=True).relu()
            maps = LayerAttribution.interpolate(maps, tuple(images.shape[2:]), "bilinear")
        maps = maps[:, 0].detach().float()
    if not maps.isfinite().all():
        raise UserError("no heat map: the network's outputs or gradients for this image are not finite")
    largest = maps.amax((1, 2), keepdim=True)
    return (maps / largest.masked_fill(largest == 0, 1)).cpu().numpy()


def method(loaded: Loaded, images: torch.Tensor) -> str:
    """Name of what ``heat_map`` computes for this network and images of this shape, in a few words."""
    layer = explained_layer(loaded.network, images)
    if layer is None:
        return "gradient with respect to the pixels (the network has no feature map)"
    return f"{'Grad-CAM' if layer.layout == 'nchw' else 'HiResCAM of the patch tokens'} at {layer.name}"


def need_captum() -> None:
    """Raise ``UserError`` with the line that installs captum if it is not there."""
    try:
        import captum  # noqa: F401
    except ImportError as error:
        raise UserError("heat maps need captum: python -m pip install -r requirements-tools.txt") from error


def explained_layer(network: nn.Module, images: torch.Tensor) -> Layer | None:
    """The last layer whose output is a map of at least 4 x 4 cells that the logits depend on; None if there is none.

    ``images`` give the shape and the device. Layers inside attention are left out: their maps are of pairs of tokens or
    of one head. In a transformer that classifies by its class token, the logits do not depend on the patch tokens of
    the last block's output, so the layer is the normalisation in front of that block's attention.
    """
    if network not in _LAYERS:
        with torch.inference_mode(False), torch.enable_grad():
            _LAYERS[network] = _find(network, images)
    return _LAYERS[network]


def _find(network: nn.Module, images: torch.Tensor) -> Layer | None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(PROBES, *images.shape[1:], generator=generator).to(images.device)
    outputs, logits = _outputs(network, noise)
    score = logits.max(1).values.sum()
    least = LEAST_CELLS if min(images.shape[2:]) >= SMALL else LEAST_CELLS_OF_SMALL
    prefix = getattr(network, "num_prefix_tokens", None)  # timm's transformers know it
    for name, output in reversed(outputs):
        layer = _layer(name, output, least, prefix if isinstance(prefix, int) else None, *images.shape[2:])
        if layer is None or not output.requires_grad:
            continue
        (gradient,) = torch.autograd.grad(score, output, retain_graph=True, allow_unused=True)
        if gradient is not None and layer.to_map(gradient).any():
            same = [other for other, its_output in outputs if its_output is output]
            return layer._replace(name=min(reversed(same), key=lambda other: other.count(".")))
    return None


def _outputs(network: nn.Module, images: torch.Tensor) -> tuple[list[tuple[str, torch.Tensor]], torch.Tensor]:
    """Outputs of each layer that runs once, by its name, in the order in which they ended; and the logits."""
    ended: list[tuple[str, torch.Tensor]] = []
    handles = []
    hidden = _inside_attention(network)
    try:
        for name, module in network.named_modules():
            if name and name not in hidden and not isinstance(module, nn.Identity):
                hook = module.register_forward_hook(lambda _, __, output, name=name: ended.append((name, output)))
                handles.append(hook)
        logits = network(images)
    finally:
        for handle in handles:
            handle.remove()
    calls = [name for name, _ in ended]
    return [(name, out) for name, out in ended if isinstance(out, torch.Tensor) and calls.count(name) == 1], logits


def _inside_attention(network: nn.Module) -> set[str]:
    """The names of all layers in attention, and of attention itself."""
    modules = dict(network.named_modules())
    tops = tuple(f"{name}." for name, one in modules.items() if name and "attention" in type(one).__name__.lower())
    return {name for name in modules if f"{name}.".startswith(tops) or "attn" in name}


def _layer(name: str, output: torch.Tensor, least: int, prefix: int | None, height: int, width: int) -> Layer | None:
    """The layer, if its output looks like a map of images of this shape, with at least ``least`` cells a side."""
    if output.ndim == 4 and len(output) == PROBES:
        first, second, third = output.shape[1:]
        if has_shape(second, third, height, width) and min(second, third) >= least:
            return Layer(name, "nchw", height, width)
        if has_shape(first, second, height, width) and min(first, second) >= least:
            return Layer(name, "nhwc", height, width)
    if output.ndim == 3 and len(output) == PROBES:
        tokens = output.shape[1]
        for in_front in range(MOST_PREFIX_TOKENS + 1) if prefix is None else [prefix]:
            patches = max(0, tokens - in_front)
            rows = rows_of(patches, height, width)
            if rows and min(rows, patches // rows) >= least and in_front <= MOST_PREFIX_TOKENS:
                return Layer(name, "tokens", height, width, in_front)
    return None


@contextmanager
def _exposed(network: nn.Module, layer: Layer) -> Iterator[nn.Module]:
    """A module through which the feature map passes as (n, channels, h, w), for captum to look at."""
    place = nn.Identity()

    def pass_through(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        seen = place(layer.to_map(output).clone())
        return layer.from_map(seen.clone(), output)  # a copy: the next layer may work in place

    handle = network.get_submodule(layer.name).register_forward_hook(pass_through)
    try:
        yield place
    finally:
        handle.remove()


def overlay(pixels: torch.Tensor, heat: np.ndarray, strength: float = 0.75) -> Image.Image:
    """An image with its heat map laid over it: the hotter, the more of the map's colour.

    ``pixels``: the image as the network sees it, float (channels, h, w) between 0 and 1. ``heat``: float (h, w) between
    0 and 1. The picture has as many pixels.
    """
    from matplotlib import colormaps
    from PIL import Image

    colours = torch.from_numpy(colormaps["inferno"](0.25 + 0.75 * heat)[..., :3]).float()
    share = strength * torch.from_numpy(heat).sqrt()[..., None]
    image = for_people(pixels).detach().cpu().float().clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0)
    return Image.fromarray(((1 - share) * image + share * colours).mul(255).round().byte().numpy())
