"""Images from requests, not yet trusted: check limits first, then decode."""

from __future__ import annotations

import io
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

from PIL import Image, UnidentifiedImageError
from starlette.exceptions import HTTPException

from scripts.common.image_stream import reason
from utils.config.spelling import either
from utils.data.images.arrays import array_header
from utils.data.images.decoding import UnreadableImage, open_image
from utils.data.images.levels import is_array

# Decoders written in C that read only the bytes they are given.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

# Limits of a form: its fields, a field's own headers, and what RFC 2046 allows as a boundary.
MOST_FIELDS = 20
PART_HEADER_BYTES = 4096
BOUNDARY_BYTES = 70
FORM_BYTES = 65_536  # bytes that a form may have besides its file


class Refused(HTTPException):
    """A request was refused; it is answered with an HTTP status and a reason as text."""


@dataclass(frozen=True)
class Limits:
    """Limits of a request: ``megabytes`` for its file, ``megapixels`` for its image."""

    megabytes: float
    megapixels: float

    def refuse_bytes(self, count: int) -> None:
        """Raise ``Refused`` if a file of ``count`` bytes is too large."""
        if count > round(1e6 * self.megabytes):
            raise Refused(413, f"the file has more than {self.megabytes:g} MB, the limit (--max-megabytes)")

    def refuse_pixels(self, width: int, height: int) -> None:
        """Raise ``Refused`` if an image of this size is too large."""
        if width * height > 1e6 * self.megapixels:
            limit = f"{self.megapixels:g} million, the limit (--max-megapixels)"
            raise Refused(413, f"the image has {width:,} x {height:,} pixels, more than {limit}")


def is_form(content_type: str) -> bool:
    """True if a request with this content type is a form, as ``curl -F image=@x.jpg`` and web pages send it."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def file_in(form: bytes, content_type: str) -> bytes:
    """The only file in a form, whatever its field's name; if the form has no file, its only field.

    Strict (RFC 7578 and 2046, without preamble, epilogue and padding): raises ``Refused`` for incomplete forms.
    Examines each byte once.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = (header.get_boundary() or "").encode("ascii", "replace")
    if not 0 < len(boundary) <= BOUNDARY_BYTES:
        raise Refused(400, "the form is malformed: its Content-Type names no boundary of at most 70 characters")
    delimiter = b"\r\n--" + boundary
    files = []
    fields = []
    begin = len(delimiter) - 2 if form.startswith(delimiter[2:]) else -1
    while begin >= 0 and form[begin : begin + 2] == b"\r\n":
        end = form.find(delimiter, begin + 2)
        head = form.find(b"\r\n\r\n", begin, min(end, begin + PART_HEADER_BYTES))
        part = BytesHeaderParser().parsebytes(form[begin + 2 : max(begin, head)])
        whole = 0 <= head < end and part.get_content_disposition() == "form-data"
        if not whole or len(files) + len(fields) == MOST_FIELDS:
            begin = -1
            break
        is_file = part.get_param("filename", header="content-disposition") is not None
        (files if is_file else fields).append(slice(head + 4, end))
        begin = end + len(delimiter)
    if begin < 0 or form[begin:] not in (b"--", b"--\r\n"):
        raise Refused(400, "the form is malformed: it is cut off, or not as its boundary and RFC 7578 say")
    found = files or fields
    if len(found) != 1:
        raise Refused(400, f"the form holds {len(found) or 'no'} files; send one image")
    return form[found[0]]


def decode(data: bytes, colour: str, limits: Limits) -> Image.Image:
    """Decode a file's bytes to an upright image in mode ``colour``; its header alone decides whether it is decoded.

    Raises ``Refused``.
    """
    limits.refuse_bytes(len(data))
    if not data:
        raise Refused(400, "the request is empty; send an image file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's warnings about large images, for which there are limits
            array = array_header(io.BytesIO(data)) if is_array(colour) else None
            with nullcontext(array) if array is not None else Image.open(io.BytesIO(data), formats=FORMATS) as header:
                size = header.size
    except Image.DecompressionBombError as error:
        raise Refused(413, f"the image is too large: {reason(error)}") from error
    except UnidentifiedImageError as error:
        raise Refused(400, f"the file {reason(error)}: send {either(FORMATS)}") from error
    except Exception as error:  # each of Pillow's readers fails differently on damaged bytes
        raise Refused(400, f"the image cannot be read: {reason(error)}") from error
    limits.refuse_pixels(*size)
    try:
        return open_image(io.BytesIO(data), colour, FORMATS)
    except UnreadableImage as error:
        raise Refused(400, f"the image cannot be read: {reason(error)}") from error
