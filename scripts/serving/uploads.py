"""An image from a request, which nobody has looked at yet: limits first, decoding after."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from PIL import Image

from scripts.common.image_stream import reason
from utils.data.images.decoding import UnreadableImage, open_image

# Decoders written in C that read nothing but the bytes they are given.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


class Refused(Exception):
    """A request that is answered with an HTTP ``status`` and a ``reason`` in words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Limits:
    """What a request may ask for: ``megabytes`` of its file, ``megapixels`` of its image."""

    megabytes: float
    megapixels: float

    @property
    def bytes(self) -> int:
        return round(1e6 * self.megabytes)

    def refuse_bytes(self, count: int) -> None:
        """Raise ``Refused`` if a file of ``count`` bytes is too large."""
        if count > self.bytes:
            raise Refused(413, f"the file has more than {self.megabytes:g} MB, the limit (--max-megabytes)")

    def refuse_pixels(self, width: int, height: int) -> None:
        """Raise ``Refused`` if an image of this size is too large."""
        if width * height > 1e6 * self.megapixels:
            raise Refused(
                413,
                f"the image has {width:,} x {height:,} pixels, more than {self.megapixels:g} million, the limit "
                "(--max-megapixels)",
            )


def decode(data: bytes, colour: str, limits: Limits) -> Image.Image:
    """The image in a file's bytes, upright, in mode ``colour``; its header alone decides whether it is decoded.

    Raises ``Refused``.
    """
    limits.refuse_bytes(len(data))
    if not data:
        raise Refused(400, "the request is empty; send the bytes of an image file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about large images, which the limits are for
            with Image.open(io.BytesIO(data), formats=FORMATS) as header:
                size = header.size
    except Image.DecompressionBombError as error:
        raise Refused(413, f"the image is too large: {reason(error)}") from error
    except Exception as error:  # each of Pillow's readers fails in its own ways on damaged bytes
        raise Refused(400, f"the file {_described(error)}") from error
    limits.refuse_pixels(*size)
    try:
        return open_image(io.BytesIO(data), colour, FORMATS)
    except UnreadableImage as error:
        raise Refused(400, f"the image is damaged: {reason(error)}") from error


def _described(error: Exception) -> str:
    return f"{reason(error)}: send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
