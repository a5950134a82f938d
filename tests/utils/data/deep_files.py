"""Image files that Pillow reads and does not write: 16-bit colour, and TIFF files of any numbers and channels."""

import struct
import zlib

import numpy as np

from tests.helpers import png_file


def png(numbers):
    """A PNG file of uint8 or uint16 (h, w) or (h, w, channels): grey, grey and alpha, RGB, RGBA."""
    height, width, channels = numbers.reshape(*numbers.shape[:2], -1).shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(numbers.dtype.newbyteorder(">")).tobytes() for row in numbers)
    return png_file(width, height, 8 * numbers.itemsize, kind, rows)


def tiff(numbers, photometric=None, extra=(), deflated=False):
    """A TIFF file of (h, w) or (h, w, channels); ``extra``: what each channel beyond the colours is (2: alpha)."""
    numbers = np.ascontiguousarray(numbers.reshape(*numbers.shape[:2], -1))
    height, width, channels = numbers.shape
    data = numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
    data = zlib.compress(data) if deflated else data
    kind = {"u": 1, "i": 2, "f": 3}[numbers.dtype.kind]
    photometric = (2 if channels >= 3 else 1) if photometric is None else photometric
    tags = [
        (256, [width]),
        (257, [height]),
        (258, [8 * numbers.itemsize] * channels),
        (259, [8 if deflated else 1]),
        (262, [photometric]),
        (273, [0]),
        (277, [channels]),
        (278, [height]),
        (279, [len(data)]),
        *([(338, list(extra))] if extra else []),
        (339, [kind] * channels),
    ]
    longer = sum(2 * len(values) for _, values in tags if len(values) > 2)
    begin = 8 + 2 + 12 * len(tags) + 4
    entries = b""
    beyond = b""
    for tag, values in tags:
        wide = tag in (273, 279)
        values = [begin + longer] if tag == 273 else values
        content = struct.pack(f"<{len(values)}{'I' if wide else 'H'}", *values)
        if len(content) > 4:
            beyond, content = beyond + content, struct.pack("<I", begin + len(beyond))
        entries += struct.pack("<HHI", tag, 4 if wide else 3, len(values)) + content.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + beyond + data
