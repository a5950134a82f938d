"""Encoding of images in shards."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

from utils.config.spelling import reason_of
from utils.data.formats.readers import Images, MemoryImages
from utils.data.images.decoding import UnreadableImage, open_image
from utils.data.images.jpeg import plain_size
from utils.data.images.stored import RAW, NamedBytes, content_of


@dataclass(frozen=True)
class Encoding:
    """How images are packed: 'keep', 'jpeg', 'png' or 'raw', limit of the shorter side in pixels, JPEG quality.

    ``colour``: Pillow's mode of images that are encoded anew, 'L' or 'RGB'. ``check``: also decode images whose bytes
    are kept, to find damaged ones.
    """

    format: str
    resize: int | None
    quality: int
    colour: str
    check: bool = False

    def encode(self, images: Images, number: int) -> tuple[str, bytes]:
        """Ending and bytes of an image. Raises ``UnreadableImage``."""
        if isinstance(images, MemoryImages):
            pixels = images.pixels[number % len(images.pixels)].cpu().numpy()
            return self._made(Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0).copy()))
        path = images.paths[number]
        try:
            data = content_of(path)
        except OSError as error:
            raise UnreadableImage(path, reason_of(error)) from error
        if self._keeps(data):
            if self.check:
                open_image(NamedBytes(path, data), self.colour)
            return _ending_of(path, data), data
        return self._made(open_image(NamedBytes(path, data), self.colour))

    def _keeps(self, data: bytes) -> bool:
        """True if the file's bytes are kept: encoding a small enough JPEG file anew would only lose quality."""
        if self.format == "keep":
            return True
        if self.format != "jpeg" or self.resize is None or self.colour != "RGB":
            return False
        size = plain_size(data)
        return size is not None and min(size) <= self.resize

    def _made(self, image: Image.Image) -> tuple[str, bytes]:
        """Ending and bytes of an upright image in training's mode, shrunk if it is too large, never enlarged."""
        if self.resize is not None and min(image.size) > self.resize:
            scale = self.resize / min(image.size)
            image = image.resize(tuple(max(1, round(side * scale)) for side in image.size), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        if self.format == "jpeg":
            image.save(file, "JPEG", quality=self.quality)
            return "jpg", file.getvalue()
        if self.format == "png":
            image.save(file, "PNG")
            return "png", file.getvalue()
        np.lib.format.write_array(file, np.ascontiguousarray(image), version=(1, 0), allow_pickle=False)
        return "npy", file.getvalue()


def _ending_of(path: str, data: bytes) -> str:
    """Ending in lower case, by which WebDataset chooses the decoder."""
    if data.startswith(RAW):
        return "npy"
    ending = os.path.splitext(path)[1][1:].lower()
    if not ending:  # a table's row has none
        try:
            with Image.open(NamedBytes(path, data)) as image:
                ending = image.format.lower()
        except Exception as error:  # each of Pillow's readers fails differently on a damaged file
            raise UnreadableImage(path, reason_of(error)) from error
    return {"jpeg": "jpg", "mpo": "jpg", "tif": "tiff"}.get(ending, ending)
