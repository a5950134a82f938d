"""Heat maps of the pixels that support a class.

Grad-CAM (Selvaraju et al., 2017) weights the channels of a late feature map by the mean gradient of the class's logit
and sums them. A transformer's patch tokens are laid out as such a map, each weighted by its own gradient (HiResCAM,
Draelos and Carin, 2020). If the network next averages the map over its cells, the two methods agree, but attention
treats each token differently, which makes the mean gradient say little. A network without a map (fully connected) gets
the size of the gradient with respect to the pixels (Simonyan et al., 2013), which is noisier and has no sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

LEAST_CELLS = 4  # minimum cells per side: a coarser map says little about where
# minimum for images with fewer pixels per side than SMALL
LEAST_CELLS_OF_SMALL = 2
SMALL = 16
MOST_PREFIX_TOKENS = 8  # class, distillation and register tokens before the patch tokens
PROBES = 2  # noise images with which the layer is found
STRENGTH = 0.75  # opacity of a map where it is hottest


class Layer(NamedTuple):
    """Layer whose output is the feature map, and how its output is laid out.

    ``layout``: ``nchw``, ``nhwc``, or ``tokens``: (n, ``prefix`` + rows * columns, channels), with rows and columns in
    the proportion of the images, ``height`` to ``width``.
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


def rows_of(patches: int, height: int, width: int) -> int:
    """Number of rows in which ``patches`` patches cover an image of ``height`` x ``width``; 0 if none fits."""
    rows = round(math.sqrt(patches * height / width))
    return rows if rows and patches % rows == 0 and has_shape(rows, patches // rows, height, width) else 0


def has_shape(rows: int, columns: int, height: int, width: int) -> bool:
    """True if a map of ``rows`` x ``columns`` has the proportions of an image, apart from rounding by the stride."""
    return abs(rows * width - columns * height) < max(height, width)


_LAYERS: WeakKeyDictionary[nn.Module, Layer | None] = WeakKeyDictionary()


def heat_map(loaded: Loaded, images: torch.Tensor, class_indices: Sequence[int]) -> np.ndarray:
    """Evidence of each pixel for a class, relative to the largest: float32 (n, h, w) between 0 and 1.

    For a network without a feature map, a pixel's influence, be it for the class or against it.

    ``images``: preprocessed, float32 (n, channels, h, w). ``class_indices``: the class to explain for each image. Each
    map is scaled by its own maximum, so brightness does not compare between images; it is 0 everywhere if nothing
    supports the class. Computed in float32, with gradients even if the caller has switched them off, and in the
    network's present mode, which should be evaluation mode. No other pass of the network may run at the same time.
    Raises ``UserError`` if outputs or gradients are not finite, or if there are none.
    """
    network = loaded.network
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        leaf, images = _with_gradient(images)
        targets = torch.tensor([int(index) for index in class_indices], device=images.device)[:, None]
        layer = explained_layer(network, images)
        if layer is None:
            score = network(images).gather(1, targets).sum()
            gradient = torch.autograd.grad(score, leaf, allow_unused=True)[0] if score.requires_grad else None
            if gradient is None:
                raise UserError("no heat map: the network passes no gradient on to its images")
            maps = gradient.abs().amax(1)
        else:
            logits, output = _logits_and_output(network, layer.name, images)
            (gradient,) = torch.autograd.grad(logits.gather(1, targets).sum(), output)
            weights = layer.to_map(gradient)
            if layer.layout == "nchw":
                weights = weights.mean((2, 3), keepdim=True)
            maps = (weights * layer.to_map(output)).sum(1, keepdim=True).relu()
            maps = nn.functional.interpolate(maps, images.shape[2:], mode="bilinear")[:, 0]
        maps = maps.detach().float()
    if not maps.isfinite().all():
        raise UserError("no heat map: the network's outputs or gradients for this image are not finite")
    largest = maps.amax((1, 2), keepdim=True)
    return (maps / largest.masked_fill(largest == 0, 1)).cpu().numpy()


def _with_gradient(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 leaf tensor that can have a gradient, even from inference mode; and a copy for a network to change."""
    leaf = images.detach().clone().float().requires_grad_()
    return leaf, leaf.clone()


def method(loaded: Loaded, images: torch.Tensor) -> str:
    """Short name of what ``heat_map`` computes for this network and images of this shape."""
    layer = explained_layer(loaded.network, images)
    if layer is None:
        return "gradient with respect to the pixels, for or against the class (the network has no feature map)"
    return f"{'Grad-CAM' if layer.layout == 'nchw' else 'HiResCAM of the patch tokens'} at {layer.name}"


def explained_layer(network: nn.Module, images: torch.Tensor) -> Layer | None:
    """Last layer whose output is a map of at least 4 x 4 cells that affects the logits; None if there is none.

    ``images`` supply shape and device; small ones need only 2 x 2 cells. Layers inside attention are excluded: their
    maps are of pairs of tokens or of one head. In a transformer that classifies by its class token, the patch tokens of
    the last block's output do not affect the logits, so the layer is the normalisation before that block's attention.
    """
    if network not in _LAYERS:
        with torch.inference_mode(False), torch.enable_grad():
            _LAYERS[network] = _find(network, images)
    return _LAYERS[network]


def _find(network: nn.Module, images: torch.Tensor) -> Layer | None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(PROBES, *images.shape[1:], generator=generator).to(images.device)
    outputs, logits = _outputs(network, _with_gradient(noise)[1])  # even if all layers are frozen
    score = logits.max(1).values.sum()
    if not score.requires_grad:
        return None
    least = LEAST_CELLS if min(images.shape[2:]) >= SMALL else LEAST_CELLS_OF_SMALL
    prefix = getattr(network, "num_prefix_tokens", None)  # timm's transformers have this attribute
    ordered = None
    hiera = next((part for part in network.modules() if hasattr(part, "unroll") and hasattr(part, "q_pool")), None)
    if hiera is not None:  # its tokens come in rows and columns only after a pooling for each time they were unrolled
        tokens = [output.shape[1] for _, output in outputs if output.ndim == 3]
        ordered = tokens[-1] if tokens and hiera.q_pool == len(hiera.unroll.schedule) else 0
    for name, output in reversed(outputs):
        layer = _layer(name, output, least, prefix if isinstance(prefix, int) else None, *images.shape[2:])
        if layer is None or not output.requires_grad:
            continue
        if ordered is not None and layer.layout == "tokens" and output.shape[1] != ordered:
            continue
        (gradient,) = torch.autograd.grad(score, output, retain_graph=True, allow_unused=True)
        if gradient is not None and layer.to_map(gradient).any():
            same = [other for other, its_output in outputs if its_output is output]
            return layer._replace(name=min(reversed(same), key=lambda other: other.count(".")))
    return None


def _outputs(network: nn.Module, images: torch.Tensor) -> tuple[list[tuple[str, torch.Tensor]], torch.Tensor]:
    """Output of each layer that runs once, with its name, in the order of completion; and the logits."""
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
    """Names of attention layers and of all layers inside them."""
    modules = dict(network.named_modules())
    tops = tuple(f"{name}." for name, one in modules.items() if name and "attention" in type(one).__name__.lower())
    return {name for name in modules if f"{name}.".startswith(tops) or "attn" in name}


def _layer(name: str, output: torch.Tensor, least: int, prefix: int | None, height: int, width: int) -> Layer | None:
    """``Layer`` if the output looks like a map of ``height`` x ``width`` images; else None.

    ``least``: smallest number of the map's cells per side. ``prefix``: number of tokens before the patches', if known.
    """
    if output.ndim == 4 and len(output) == PROBES:
        first, second, third = output.shape[1:]
        if has_shape(second, third, height, width) and min(second, third) >= least:
            return Layer(name, "nchw", height, width)
        if has_shape(first, second, height, width) and min(first, second) >= least:
            return Layer(name, "nhwc", height, width)
    if output.ndim == 3 and len(output) == PROBES:
        tokens = output.shape[1]
        # XCiT's tokens come in front in its last blocks alone.
        for in_front in range(MOST_PREFIX_TOKENS + 1) if prefix is None else dict.fromkeys((prefix, 0)):
            patches = max(0, tokens - in_front)
            rows = rows_of(patches, height, width)
            if rows and min(rows, patches // rows) >= least and in_front <= MOST_PREFIX_TOKENS:
                return Layer(name, "tokens", height, width, in_front)
    return None


def _logits_and_output(network: nn.Module, name: str, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the output of the layer ``name``."""
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        kept.append(output)
        return output.clone()  # the next layer may work in place

    handle = network.get_submodule(name).register_forward_hook(keep)
    try:
        return network(images), kept[0]
    finally:
        handle.remove()


def overlay(pixels: torch.Tensor, heat: np.ndarray) -> Image.Image:
    """Picture of an image with its heat map laid over it: hotter pixels show more of the map's colour.

    ``pixels``: the image as the network sees it, float (channels, h, w) between 0 and 1. ``heat``: float (h, w) between
    0 and 1. The picture has the same size.
    """
    from matplotlib import colormaps
    from PIL import Image

    colours = torch.from_numpy(colormaps["inferno"](0.25 + 0.75 * heat)[..., :3]).float()
    share = STRENGTH * torch.from_numpy(heat).sqrt()[..., None]
    image = for_people(pixels).detach().cpu().float().clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0)
    return Image.fromarray(((1 - share) * image + share * colours).mul(255).round().byte().numpy())
