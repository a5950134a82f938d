"""What the predictions of some samples rest on, as pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from models.load import Loaded
from scripts.common.heat_map import heat_map, overlay

if TYPE_CHECKING:
    from PIL import Image


def explainer(loaded: Loaded) -> Callable[[Image.Image, int], Image.Image]:
    """A function of an image and a class: what the network sees of it, and over it what speaks for that class."""
    device = next(loaded.network.parameters()).device

    def explain(image: Image.Image, target: int) -> Image.Image:
        seen = loaded.preprocessing(image)[None].to(device)
        heat = heat_map(loaded, seen, [target])[0]
        with torch.no_grad():
            return overlay(loaded.preprocessing.evaluation_transform.to_pixels(seen)[0], heat)

    return explain
