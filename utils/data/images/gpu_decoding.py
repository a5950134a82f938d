"""JPEG decoding on a GPU: workers only read the files; the device decodes (nvJPEG), crops and resizes.

All of it works on a CPU, too, but more slowly than ``decode_crop``. nvJPEG's pixels differ from libjpeg-turbo's by a
few levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import deterministic

from utils.config.image_size import sides
from utils.config.settings import UserError
from utils.data.images.decoding import boxes, cropped, decode_crop, loaded, open_image, read_plain_jpeg, to_tensor
from utils.data.images.levels import channels_of
from utils.data.images.stored import NamedBytes
from utils.data.images.view import Box, Placement, View
from utils.data.worker_pool import in_shared_memory


class MixedBatch(NamedTuple):
    """A batch on its way from a worker to the device: some images in JPEG files, the others decoded.

    ``data``: uint8 (bytes,), the JPEG files concatenated, because each tensor sent takes a file descriptor.
    ``lengths``: for each image of the batch, the bytes of its file, or 0 if it is the next one of ``decoded``, uint8
    (m, channels, h, w). ``files``: each JPEG file's path, and the box and place that ``boxes`` returns.
    """

    data: torch.Tensor
    lengths: list[int]
    decoded: torch.Tensor
    files: list[tuple[str, Box, Placement | None]]
    view: View


def read_for_gpu(paths: Sequence[str], view: View, colour: str, draws: Sequence[np.ndarray | None]) -> MixedBatch:
    """Read plain JPEG files undecoded; decode, crop and resize all other files.

    ``draws``: for each file, ``uniforms`` as in ``decode_crop``. Raises ``UserError`` with the path of a file that
    cannot be read.
    """
    contents = []
    lengths = []
    decoded = []
    files = []
    for path, uniforms in zip(paths, draws, strict=True):
        source = loaded(path)
        plain = read_plain_jpeg(source, colour)
        if plain is None:
            decoded.append(decode_crop(source, view, colour, uniforms))
            lengths.append(0)
        else:
            content, width, height = plain
            contents.append(content)
            lengths.append(len(content))
            files.append((str(path), *boxes(view, width, height, uniforms)))
    data = torch.empty(0, dtype=torch.uint8)
    images = data.view(0, channels_of(colour), *sides(view.size))
    if contents:
        data = in_shared_memory(torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8))
    if decoded:
        images = in_shared_memory(torch.stack(decoded))
    return MixedBatch(data, lengths, images, files, view)


def decode_batch(batch: MixedBatch, device: torch.device) -> torch.Tensor:
    """Decode the images of a batch on ``device``, in order: uint8 (n, channels, h, w).

    Raises ``UserError`` with the path of a damaged file.
    """
    decoded = batch.decoded.to(device, non_blocking=True)
    if not batch.files:
        return decoded
    files = list(batch.data.split([length for length in batch.lengths if length]))
    crops = iter(_crop_and_resize(_decode_files(files, [path for path, *_ in batch.files], device), batch))
    others = iter(decoded)
    return torch.stack([next(crops) if length else next(others) for length in batch.lengths])


def require_decoder(device: torch.device) -> None:
    """Raise ``UserError`` if ``device`` cannot decode JPEG files: torchvision may be built without nvJPEG."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg  # a later torchvision may lack them

        decode_jpeg([encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))], ImageReadMode.RGB, device)
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--decode gpu: torchvision cannot decode on {device} ({reason}); use --decode cpu") from error


def _decode_files(files: list[torch.Tensor], paths: list[str], device: torch.device) -> list[torch.Tensor]:
    """Decode whole JPEG files on ``device``, each to uint8 (3, height, width). Raises ``UserError`` with a path."""
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        with _no_other_use_of_free_memory(device):
            return decode_jpeg(files, ImageReadMode.RGB, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if len(files) > 1:  # torchvision does not say which one failed
            return [_decode_files([file], [path], device)[0] for file, path in zip(files, paths, strict=True)]
        # The file is either damaged, and Pillow raises an error with its path, or of a kind unknown to this decoder.
        return [to_tensor(open_image(NamedBytes(paths[0], files[0].numpy().tobytes()), "RGB")).to(device)]


@contextmanager
def _no_other_use_of_free_memory(device: torch.device) -> Iterator[None]:
    """Context in which any stream may write at once to memory that torch's allocator hands out on ``device``.

    torchvision allocates the images on the current stream, but nvJPEG writes them on its own stream without waiting.
    The current stream may still be reading crops from memory that has been freed since; and with deterministic
    algorithms it fills all new memory, possibly after nvJPEG has written to it.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.current_stream(device).synchronize()
    switch: Any = deterministic  # a module whose property no type checker sees
    fills = switch.fill_uninitialized_memory
    switch.fill_uninitialized_memory = False
    try:
        yield
    finally:
        switch.fill_uninitialized_memory = fills


def _crop_and_resize(images: list[torch.Tensor], batch: MixedBatch) -> torch.Tensor:
    """Crop and resize images to uint8 (n, 3, h, w), in float32 because torch has no such GPU kernel for uint8."""
    crops = [
        _cropped(image[:, top:bottom, left:right].float(), batch.view, place)
        for image, (_, (left, top, right, bottom), place) in zip(images, batch.files, strict=True)
    ]
    return torch.stack(crops).round_().clamp_(0, 255).to(torch.uint8)


def _cropped(pixels: torch.Tensor, view: View, place: Placement | None) -> torch.Tensor:
    """As ``cropped``, on the CPU where a reduction, such as to a hundredth, asks too much of torch's GPU kernel."""
    try:
        return cropped(pixels, view, place)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return cropped(pixels.cpu(), view, place).to(pixels.device)
