"""Decoding on a device gives what decode_crop gives, in order; a damaged file found there is named."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torchvision.io
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader

from tests.helpers import difference, exif_that_turns
from utils.config.settings import UserError
from utils.data.images import gpu_decoding
from utils.data.images.decoding import cropped, decode_crop
from utils.data.images.gpu_decoding import decode_batch, read_for_gpu, require_decoder
from utils.data.images.view import View
from utils.data.sample_plan import sample_uniforms

CPU = torch.device("cpu")
PHOTOGRAPHS = [Image.fromarray(pixels).resize((320, 214)) for pixels in load_sample_images().images]
UNIFORMS = sample_uniforms(0, 0, range(8), 3, 22)
NAMES = ["a.jpg", "b.png", "c.jpg", "grey.jpg", "turned.jpg", "d.jpg", "cmyk.jpg"]


@pytest.fixture
def paths(tmp_path):
    """Files of several kinds; a, c and d are plain JPEG."""
    for number, name in enumerate(NAMES):
        image = PHOTOGRAPHS[number % 2].crop((number, 0, 320, 200))
        image = image.convert({"grey.jpg": "L", "cmyk.jpg": "CMYK"}.get(name, "RGB"))
        image.save(tmp_path / name, **({"exif": exif_that_turns()} if name == "turned.jpg" else {}))
    return [str(tmp_path / name) for name in NAMES]


def read(paths, colour="RGB"):
    return read_for_gpu(paths, View(64), colour, UNIFORMS[: len(paths)])


def on_cpu(paths, colour="RGB"):
    return torch.stack([decode_crop(path, View(64), colour, draw) for path, draw in zip(paths, UNIFORMS, strict=False)])


def test_a_mixed_batch_keeps_its_order_and_agrees_with_decode_crop(paths):
    batch = read(paths)
    assert [length > 0 for length in batch.lengths] == [Path(path).stem in ("a", "c", "d") for path in paths]
    largest, mean = difference(decode_batch(batch, CPU), on_cpu(paths))
    assert largest <= 1 and mean < 0.05  # resized in floats and in integers


def test_an_image_that_the_gpu_cannot_reduce_so_much_is_reduced_on_the_cpu(paths, monkeypatch):
    refused = []

    def refuses_once(pixels, view, place):
        if not refused:
            refused.append(pixels)
            raise RuntimeError("Too much shared memory required: 100000 vs 49152")
        return cropped(pixels, view, place)

    whole = decode_batch(read(paths), CPU)
    monkeypatch.setattr(gpu_decoding, "cropped", refuses_once)
    assert torch.equal(decode_batch(read(paths), CPU), whole) and refused


@pytest.mark.gpu
def test_a_gpu_agrees_with_decode_crop_within_some_levels(paths):
    found = decode_batch(read(paths), torch.device("cuda"))
    assert found.device.type == "cuda"
    assert difference(found.cpu(), on_cpu(paths))[1] < 2  # nvJPEG magnifies colour in another way


def test_grey_images_arrive_decoded(paths):
    batch = read(paths, "L")
    assert not any(batch.lengths)
    assert torch.equal(decode_batch(batch, CPU), on_cpu(paths, "L"))


class Packed(torch.utils.data.Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __getitem__(self, number):
        return read(self.paths)

    def __len__(self):
        return 1


def test_a_batch_passes_through_a_worker_process(paths):
    (batch,) = DataLoader(Packed(paths), batch_size=None, num_workers=1)
    assert torch.equal(decode_batch(batch, CPU), decode_batch(read(paths), CPU))


def test_a_file_found_damaged_on_the_device_is_named(paths):
    data = bytearray(Path(paths[2]).read_bytes())
    table = data.find(b"\xff\xc4")
    data[table + 5 : table + 13] = b"\xff" * 8  # more codes than a Huffman table can have
    Path(paths[2]).write_bytes(data)
    batch = read(paths)
    with pytest.raises(UserError, match=r"c\.jpg: cannot be read as an image"):
        decode_batch(batch, CPU)


def test_what_only_the_device_cannot_decode_is_decoded_by_pillow(paths, monkeypatch):
    expected = decode_batch(read(paths), CPU)
    calls = []
    decode_jpeg = torchvision.io.decode_jpeg

    def picky(files, mode, device):
        calls.append(len(files))
        if len(files) > 1 or len(calls) == 3:
            raise RuntimeError("unsupported")
        return decode_jpeg(files, mode, device)

    monkeypatch.setattr("torchvision.io.decode_jpeg", picky)
    assert torch.equal(decode_batch(read(paths), CPU), expected)
    assert calls == [3, 1, 1, 1]


def test_a_device_that_cannot_decode_at_all_is_a_users_mistake(monkeypatch):
    require_decoder(CPU)

    absent = RuntimeError("not compiled with nvJPEG\nmore")
    monkeypatch.setattr("torchvision.io.decode_jpeg", Mock(side_effect=absent))
    with pytest.raises(UserError, match="--decode gpu: .*not compiled with nvJPEG.*use --decode cpu"):
        require_decoder(CPU)
