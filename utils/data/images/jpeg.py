"""JPEG files: reading the header, and decoding a region.

nvImageCodec decodes only the wanted region, without a GPU; if it is not installed, torchvision decodes the whole image.
Both give the same bits as Pillow: all three use libjpeg-turbo with the same settings.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
import threading
import warnings
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image

START = b"\xff\xd8"
END = b"\xff\xd9"

_SCAN = 0xDA
_APP1 = 0xE1
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, all Huffman-coded
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)  # lossless, hierarchical, arithmetic
_PROGRESSIVE = 0xC2
# Within a scan, 0xff is followed by 0, by a restart marker (0xd0 to 0xd7) or by 0xff as padding.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def plain_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of a plain JPEG file; None for any other file, which Pillow reads or refuses.

    Plain: three 8-bit components, Huffman-coded, upright (no rotation by EXIF or XMP) and complete up to the end
    marker. Decoding a region does not reveal what is missing or damaged below it.
    """
    if not data.startswith(START):
        return None
    place = 2
    frame = 0
    size = None
    while place + 10 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        following = place + 2 + length
        if marker == _SCAN:
            return size if _is_whole(data, following, frame) else None
        if marker in _FRAMES:
            precision, height, width, components = struct.unpack_from(">BHHB", data, place + 4)
            if precision != 8 or components != 3 or not (width and height):
                return None
            frame = marker
            size = (width, height)
        elif marker in _OTHER_FRAMES or (marker == _APP1 and not _upright(data[place + 4 : following])):
            return None
        place = following
    return None


def _is_whole(data: bytes, scan: int, frame: int) -> bool:
    """True if the compressed pixels, from byte ``scan`` on, reach the end marker; ``frame``: the frame's marker."""
    if frame == _PROGRESSIVE:  # many scans with markers between them, all of which any region needs
        return data.endswith(END)
    marker = _MARKER.search(data, scan)
    return marker is not None and marker.group() == END


def _upright(segment: bytes) -> bool:
    """True if an APP1 segment, which holds EXIF or XMP, asks for no rotation; False if in doubt."""
    if not segment.startswith(b"Exif\0\0"):
        return all(value == b"1" for value in _XMP_ORIENTATION.findall(segment))
    exif = Image.Exif()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a damaged segment; Pillow also fails in other ways
        try:
            exif.load(segment)
            return exif.get(ExifTags.Base.Orientation, 1) == 1
        except Exception:
            return False


def decode_region(data: bytes, box: tuple[int, int, int, int]) -> torch.Tensor | None:
    """Decode the pixels inside ``box`` (left, top, right, bottom) of a plain JPEG: uint8 (height, width, 3).

    None if the decoder refuses the file.
    """
    left, top, right, bottom = box
    if nvimgcodec is None:
        whole = _decode_by_torchvision(data)
        return None if whole is None else whole[top:bottom, left:right]
    decoder, params = _decoder_of_this_thread()
    try:
        region = nvimgcodec.CodeStream(data).get_sub_code_stream(region=nvimgcodec.Region(top, left, bottom, right))
        image = decoder.decode(region, params=params)
    except RuntimeError:
        return None
    return None if image is None else torch.from_numpy(np.asarray(image))  # a view, which keeps the image alive


def _decode_by_torchvision(data: bytes) -> torch.Tensor | None:
    try:
        from torchvision.io import ImageReadMode, decode_jpeg  # may be missing in later versions

        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB).permute(1, 2, 0)
    except (ImportError, RuntimeError):
        return None


# ------------------------------------------------------------------------------------ nvImageCodec


def _import_nvimgcodec() -> ModuleType | None:
    """Import nvImageCodec with only its libjpeg-turbo plug-in; None if it is not installed.

    On import it loads all plug-ins in a folder, and the CUDA plug-ins write to stderr, from C, if their libraries are
    missing. It is therefore given a folder with a link to the one plug-in needed here.
    """
    names = ("NVIMGCODEC_EXTENSIONS_PATH", "PYNVIMGCODEC_VERBOSITY")
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        with tempfile.TemporaryDirectory() as folder:
            package = util.find_spec("nvidia.nvimgcodec")
            if package is None or package.origin is None:
                return None
            extensions = Path(package.origin).parent / "extensions"
            (plug_in,) = extensions.glob("libjpeg_turbo_ext*")
            (Path(folder) / plug_in.name).symlink_to(plug_in)
            os.environ.update(zip(names, (folder, "0"), strict=True))
            from nvidia import nvimgcodec

            return nvimgcodec if hasattr(nvimgcodec, "NVIMGCODEC_DEVICE_CPU_ONLY") else None  # 0.8 needs a GPU
    except (ImportError, AttributeError, OSError, ValueError):
        return None
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


nvimgcodec = _import_nvimgcodec()
_thread = threading.local()


def _decoder_of_this_thread() -> tuple[Any, Any]:
    """nvImageCodec's decoder and its parameters, made once per thread; it uses the CPU and no further threads."""
    if getattr(_thread, "process", None) != os.getpid():  # a forked process must not use its parent's decoder
        assert nvimgcodec is not None
        decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
        )
        params = nvimgcodec.DecodeParams(color_spec=nvimgcodec.ColorSpec.SRGB, apply_exif_orientation=False)
        _thread.process = os.getpid()
        _thread.tools = (decoder, params)
    return _thread.tools
