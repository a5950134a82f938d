"""Pictures inside the page: small, each stored once, and within a budget."""

from __future__ import annotations

import io
from collections.abc import Hashable
from dataclasses import dataclass, field

from PIL import Image

from scripts.common.output import data_url

SIDE = 128  # pixels; larger images are made smaller
EXACT_SIDE = 64  # up to this size PNG: JPEG's blocks would show if pixels are enlarged
QUALITY = 82
BUDGET_BYTES = 6_000_000  # of base64 text


@dataclass
class Thumbnails:
    """Pictures of the page as data URIs in ``uris``, each stored once; ``budget``: how many bytes are left."""

    budget: int = BUDGET_BYTES
    uris: list[str] = field(default_factory=list)
    _places: dict[Hashable, int] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """True if there may be no room for another picture."""
        return self.budget < 8_000

    def place(self, key: Hashable) -> int | None:
        """Index of the picture with this key; None if there is none."""
        return self._places.get(key)

    def add(self, key: Hashable, image: Image.Image) -> int | None:
        """Add a picture unless its key is present; return its index, None if there is no room."""
        if key in self._places:
            return self._places[key]
        uri = data_uri(image)
        if len(uri) > self.budget:
            return None
        self.budget -= len(uri)
        self._places[key] = len(self.uris)
        self.uris.append(uri)
        return self._places[key]


def data_uri(image: Image.Image) -> str:
    """Data URI of a picture of any mode and size, as a PNG or JPEG of at most ``SIDE`` x ``SIDE`` pixels."""
    image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    if max(image.size) > SIDE:
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
    if max(image.size) <= EXACT_SIDE:
        return data_url(image, "png", optimize=True)
    return data_url(image, "jpeg", optimize=True, quality=QUALITY)


def picture_uri(content: bytes, largest_bytes: int) -> tuple[str, int]:
    """Data URI of a PNG picture, encoded anew (as JPEG beyond ``largest_bytes``), and the original width in pixels.

    Raises ``ValueError`` or ``OSError`` if ``content`` is not such a picture.
    """
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        if image.width * image.height > 2**26:
            raise ValueError("larger than 67 million pixels")
        image.load()
        pixels = image.convert("RGB")
    width = pixels.width
    uri = data_url(pixels, "png", optimize=True)
    if 3 / 4 * len(uri) > largest_bytes:
        pixels.thumbnail((1400, 1400))
        uri = data_url(pixels, "jpeg", quality=QUALITY)
    return uri, width
