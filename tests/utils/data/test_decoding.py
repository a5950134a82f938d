"""Every way from a file to pixels shows what Pillow and torchvision show, and none of them passes a damaged file."""

import io
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

from tests.helpers import difference, exif_that_turns, file_of
from tests.utils.data.deep_files import png, tiff
from utils.config.settings import UserError
from utils.data.images import decoding, jpeg
from utils.data.images.decoding import UnreadableImage, decode_crop, decoder, open_image, random_box
from utils.data.images.levels import Colour
from utils.data.images.view import View
from utils.data.preprocessing import Preprocessing
from utils.data.sample_plan import sample_uniforms

ROOT = Path(__file__).resolve().parents[3]
WAYS = ("nvimgcodec", "torchvision", "pillow")
PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]
UNIFORMS = sample_uniforms(0, 0, np.arange(6), 3, 22)
CORNER = np.concatenate([np.full(20, 0.01), [0.0, 0.0]])  # draws a small box in the upper left corner
KINDS = [  # size in pixels, options of Pillow's JPEG writer
    ((640, 427), {"quality": 90, "subsampling": "4:2:0"}),
    ((333, 251), {"quality": 60, "subsampling": "4:2:0"}),
    ((427, 640), {"quality": 95, "subsampling": "4:4:4"}),
    ((251, 333), {"quality": 75, "subsampling": "4:2:2", "progressive": True}),
    ((800, 534), {"quality": 85, "subsampling": "4:2:0", "optimize": True}),
]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """One way to decode a plain JPEG, with the faster ones switched off."""
    if request.param == "nvimgcodec" and jpeg.nvimgcodec is None:
        pytest.skip("nvImageCodec is not installed")
    if request.param == "torchvision":
        monkeypatch.setattr(jpeg, "nvimgcodec", None)
    if request.param == "pillow":
        monkeypatch.setattr(decoding, "read_plain_jpeg", lambda path, colour: None)
    return request.param


def written(path, image, **options):
    image.save(path, **options)
    return str(path)


def photographs(folder, size, options):
    return [
        written(folder / f"{number}.jpg", image.resize(size), **options) for number, image in enumerate(PHOTOGRAPHS)
    ]


def pillow_pixels(path, colour="RGB"):
    """Pillow's pixels as a tensor (channels, height, width)."""
    return v2.functional.pil_to_tensor(open_image(path, colour))


def reference_crop(path, box, size, colour="RGB", interpolation=v2.InterpolationMode.BILINEAR):
    left, top, right, bottom = box
    return v2.functional.resized_crop(
        pillow_pixels(path, colour), top, left, bottom - top, right - left, [size, size], interpolation, antialias=True
    )


def reference_middle(path, size, colour="RGB"):
    """torchvision's evaluation transforms, of an image that Pillow has read and resizes."""
    theirs = v2.Compose([v2.Resize(int(size / 0.875)), v2.CenterCrop(size), v2.PILToTensor()])
    return theirs(open_image(path, colour))


def reference_of(path, draw, size, upright, colour="RGB"):
    """The crop of training with the random numbers ``draw``, or that of evaluation without."""
    if draw is None:
        return reference_middle(path, size, colour)
    return reference_crop(path, random_box(*upright, draw), size, colour)


# --------------------------------------------------------------------------------- the same pixels


@pytest.mark.parametrize(("size", "options"), KINDS)
def test_a_crop_is_pillows_decoding_with_torchvisions_crop_and_resize(tmp_path, way, size, options):
    for path in photographs(tmp_path, size, options):
        for uniforms in (None, *UNIFORMS[:4]):
            # No difference on x86-64. A processor on which torch resizes uint8 in floats may round one level apart.
            expected = reference_of(path, uniforms, 224, size)
            assert difference(decode_crop(path, View(224), "RGB", uniforms), expected)[0] <= 1


def test_a_training_crop_is_resized_as_the_view_says(tmp_path, way):
    for path in photographs(tmp_path, (320, 200), {"quality": 90}):
        expected = reference_crop(
            path, random_box(320, 200, UNIFORMS[0]), 96, interpolation=v2.InterpolationMode.BICUBIC
        )
        found = decode_crop(path, View(96, interpolation="bicubic"), "RGB", UNIFORMS[0])
        assert difference(found, expected)[0] <= 1
        assert difference(found, decode_crop(path, View(96), "RGB", UNIFORMS[0]))[0] > 1


@pytest.mark.parametrize(("size", "options"), KINDS)
def test_any_region_has_the_bits_of_pillows_whole_image_up_to_its_border(tmp_path, size, options):
    generator = np.random.default_rng(0)
    for path in photographs(tmp_path, size, options):
        data = Path(path).read_bytes()
        whole = pillow_pixels(path).permute(1, 2, 0)
        for _ in range(15):
            left, right = sorted(generator.choice(size[0] + 1, 2, replace=False).tolist())
            top, bottom = sorted(generator.choice(size[1] + 1, 2, replace=False).tolist())
            found = jpeg.decode_region(data, (left, top, right, bottom))
            assert torch.equal(found, whole[top:bottom, left:right])


def test_crops_lie_in_memory_pixel_by_pixel(tmp_path, way):
    (path, *_) = photographs(tmp_path, (120, 90), {})
    crop = decode_crop(path, View(48), "RGB", UNIFORMS[0])
    assert crop.stride() == decode_crop(path, View(48, whole=True), "RGB").stride() == (1, 3 * 48, 3)
    assert decode_crop(path, View(48), "RGB").stride()[::2] == (1, 3)  # lines of a wider image


def test_what_the_fast_decoder_refuses_is_decoded_by_pillow(tmp_path, monkeypatch):
    (path, *_) = photographs(tmp_path, (100, 80), {})
    monkeypatch.setattr(jpeg, "decode_region", lambda data, box: None)
    assert difference(decode_crop(path, View(32), "RGB"), reference_middle(path, 32))[0] <= 1


@pytest.mark.parametrize("colour", ["RGB", "L"])
@pytest.mark.parametrize("name", ["grey.jpg", "cmyk.jpg", "rgb.jpg", "plain.jpg", "alpha.png", "lossy.webp", "lzw.tif"])
def test_unusual_colours_and_formats_are_pillows(tmp_path, way, name, colour):
    image = PHOTOGRAPHS[0].resize((120, 90))
    image = image.convert({"grey": "L", "cmyk": "CMYK", "alpha": "RGBA"}.get(name.partition(".")[0], "RGB"))
    options = {"rgb.jpg": {"keep_rgb": True}, "lzw.tif": {"compression": "tiff_lzw"}}.get(name, {})
    path = written(tmp_path / name, image, **options)
    assert (jpeg.plain_size(Path(path).read_bytes()) is not None) == (name in ("rgb.jpg", "plain.jpg"))
    for uniforms in (None, UNIFORMS[0]):
        expected = reference_of(path, uniforms, 48, (120, 90), colour)
        assert difference(decode_crop(path, View(48), colour, uniforms), expected)[0] <= 1


@pytest.mark.parametrize("name", ["a.png", "a.pgm", "a.tif"])
def test_sixteen_bits_are_scaled_whatever_pillow_opens_them_as(tmp_path, name):
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    path = written(tmp_path / name, Image.fromarray(levels * 257))
    assert np.array_equal(open_image(path, "L"), levels)
    assert np.array_equal(255 * show(16)(Image.open(path))[0], levels)


def test_levels_of_32_bits_are_those_of_8_bits_or_refused(tmp_path):
    levels = np.arange(256).reshape(16, 16)
    path = written(tmp_path / "a.tif", Image.fromarray(levels.astype(np.int32)))
    assert np.array_equal(open_image(path, "L"), levels)
    assert np.array_equal(255 * show(16)(Image.open(path))[0], levels)
    for number, (odd, found) in enumerate(
        [
            (257 * levels.astype(np.int32), "integers from 0 to 65535"),
            (levels.astype(np.int32) - 1, "integers from -1"),
            (levels.astype(np.float32) / 255, "floats from 0 to 1"),
            (levels.astype(np.float32), "floats from 0 to 255"),
        ]
    ):
        path = written(tmp_path / f"{number}.tif", Image.fromarray(odd))
        with pytest.raises(UnreadableImage, match=f"{number}.tif: .* levels, {found}.* have no known range"):
            decode_crop(path, View(8, whole=True), "RGB")
        with pytest.raises(ValueError, match="have no known range"):
            show(16)(Image.open(path))


DEEP = np.random.default_rng(0).integers(0, 1100, (9, 7, 4)).astype(np.uint16)


@pytest.mark.parametrize(
    ("name", "content", "numbers"),
    [
        ("grey.png", png(DEEP[..., 0]), DEEP[..., :1]),
        ("rgb.png", png(DEEP[..., :3]), DEEP[..., :3]),
        ("rgba.png", png(DEEP), DEEP[..., :3]),
        ("grey.tif", tiff(DEEP[..., 0]), DEEP[..., :1]),
        ("rgb.tif", tiff(DEEP[..., :3]), DEEP[..., :3]),
        ("rgba.tif", tiff(DEEP, extra=(2,)), DEEP[..., :3]),
        ("rgbx.tif", tiff(DEEP, extra=(0,)), DEEP[..., :3]),
        ("deflated.tif", tiff(DEEP[..., :3], deflated=True), DEEP[..., :3]),
        ("int32.tif", tiff(DEEP[..., 0].astype(np.int32)), DEEP[..., :1]),
        ("float.tif", tiff(DEEP[..., 0].astype(np.float32)), DEEP[..., :1]),
    ],
)
@pytest.mark.parametrize("colour", ["L", "RGB"])
def test_a_pixel_range_maps_numbers_of_more_than_8_bits_linearly_rounded_and_cut_off(
    tmp_path, name, content, numbers, colour
):
    (tmp_path / name).write_bytes(content)
    low = 100
    high = 1023
    exact = [[[min(max(Fraction(255 * (int(n) - low), high - low), 0), 255) for n in p] for p in r] for r in numbers]
    levels = np.array(exact, dtype=object).astype(float).round().astype(np.uint8)
    expected = Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels).convert(colour)
    ranged = Colour(colour, (low, high))
    shown = show(9, channels=len(colour), pixel_range=(low, high))
    assert np.array_equal(open_image(str(tmp_path / name), ranged), expected)
    assert np.array_equal(open_image(io.BytesIO(content), pickle.loads(pickle.dumps(ranged))), expected)
    with Image.open(tmp_path / name) as image:  # as a user of load_model gives it
        pixels = shown(image)
    assert torch.equal(pixels, shown(expected))
    plain = written(tmp_path / "plain.png", PHOTOGRAPHS[0].resize((40, 30)).convert(colour))  # 8 bits stay as they are
    assert np.array_equal(open_image(plain, ranged), open_image(plain, colour))


def show(size, channels=1, **more):
    """Images whole, with levels between 0 and 1."""
    zeros, ones = (0.0,) * channels, (1.0,) * channels
    return Preprocessing(size, size, zeros, ones, 1.0, "center", "bilinear", stored_size=size, **more)


def test_files_are_known_by_their_content_not_their_name(tmp_path, way):
    image = PHOTOGRAPHS[0].resize((120, 90))
    png = tmp_path / "png.jpg"
    photo = tmp_path / "photo.png"
    image.save(png, format="PNG")
    image.save(photo, format="JPEG")
    for path in (str(png), str(photo)):
        assert difference(decode_crop(path, View(48), "RGB"), reference_middle(path, 48))[0] <= 1


def test_bytes_after_the_end_of_a_jpeg_change_nothing(tmp_path, way):
    (path, *_) = photographs(tmp_path, (120, 90), {})
    before = decode_crop(path, View(48), "RGB")
    data = Path(path).read_bytes()
    Path(path).write_bytes(data + data + b"\0 more")  # as cameras add a second picture
    assert jpeg.plain_size(Path(path).read_bytes()) == (120, 90)
    assert torch.equal(decode_crop(path, View(48), "RGB"), before)


# ------------------------------------------------------------------------------------ orientation


def exif(orientation, order):
    """An EXIF segment with two tags, in either byte order."""
    values = struct.pack(f"{order}HHHIHHHHIHHI", 2, 0x0103, 3, 1, 6, 0, 0x0112, 3, 1, orientation, 0, 0)
    return b"Exif\0\0" + {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8) + values


@pytest.mark.parametrize(("orientation", "order"), [*((number, "<") for number in range(1, 9)), (6, ">")])
def test_exif_orientation_is_honoured(tmp_path, orientation, order):
    path = written(tmp_path / "a.jpg", PHOTOGRAPHS[0].resize((120, 90)), exif=exif(orientation, order))
    assert Image.open(path).getexif()[0x0112] == orientation
    assert (jpeg.plain_size(Path(path).read_bytes()) is not None) == (orientation == 1)
    upright = (90, 120) if orientation >= 5 else (120, 90)
    expected = reference_crop(path, random_box(*upright, UNIFORMS[0]), 48)
    assert difference(decode_crop(path, View(48), "RGB", UNIFORMS[0]), expected)[0] <= 1


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [(5, np.transpose), (6, lambda image: np.rot90(image, -1)), (7, lambda image: image[::-1, ::-1].T), (8, np.rot90)],
)
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_tiff_file_that_is_not_compressed_is_turned_and_nothing_else(tmp_path, orientation, turned, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70)).astype(np.uint8)
    exif = exif_that_turns(orientation)
    Image.fromarray(pixels.astype(kind) * (1 if kind is np.uint8 else 256)).save(tmp_path / "a.tif", exif=exif)
    np.testing.assert_array_equal(open_image(str(tmp_path / "a.tif"), "L"), turned(pixels))
    shown = Preprocessing(32, 32, (0.0,), (1.0,), 1.0, "squash", "bilinear")
    expected = shown(Image.fromarray(np.ascontiguousarray(turned(pixels))))
    with Image.open(tmp_path / "a.tif") as image:
        assert torch.equal(shown(image), expected)


@pytest.mark.parametrize(("orientation", "upright"), [(1, (120, 90)), (6, (90, 120))])
def test_xmp_orientation_is_honoured(tmp_path, orientation, upright):
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    segment = b"http://ns.adobe.com/xap/1.0/\0" + xmp
    data = file_of(PHOTOGRAPHS[0].resize((120, 90)), "JPEG")
    data = data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]
    (tmp_path / "a.jpg").write_bytes(data)
    path = str(tmp_path / "a.jpg")
    assert open_image(path, "RGB").size == upright
    assert difference(decode_crop(path, View(48), "RGB"), reference_middle(path, 48))[0] <= 1


# ------------------------------------------------------------------------------------ damaged files


@pytest.mark.parametrize(
    ("kept", "progressive"),
    [*((count, False) for count in (0, 1, 2, 100, 0.3, 0.7, -100, -1)), (0.3, True), (-1, True)],
)
def test_a_truncated_file_is_named_even_where_the_box_is_whole(tmp_path, kept, progressive):
    (path, *_) = photographs(tmp_path, (320, 200), {"progressive": progressive})
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: round(kept * len(data)) if isinstance(kept, float) else kept])
    assert jpeg.plain_size(Path(path).read_bytes()) is None
    for uniforms in (None, CORNER):
        with pytest.raises(UserError, match=r"0\.jpg: cannot be read as an image"):
            decode_crop(path, View(32), "RGB", uniforms)


def test_foreign_bytes_below_the_box_are_told_as_pillow_tells_them(tmp_path, way):
    (path, *_) = photographs(tmp_path, (320, 200), {})
    data = bytearray(Path(path).read_bytes())
    data[-300:-296] = b"\xff\xc9\x00\x08"  # the beginning of an arithmetic-coded frame
    Path(path).write_bytes(data)
    with pytest.raises(UserError, match=r"0\.jpg"):
        decode_crop(path, View(32), "RGB", CORNER)


NO_IMAGES = (None, b"", b"not an image", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xda\x00")


@pytest.mark.parametrize("content", [*NO_IMAGES, "a folder"])
def test_what_is_no_image_is_named(tmp_path, content):
    if isinstance(content, bytes):
        (tmp_path / "a.jpg").write_bytes(content)
    elif content is not None:
        (tmp_path / "a.jpg").mkdir()
    with pytest.raises(UserError, match=r"a\.jpg: cannot be read as an image"):
        decode_crop(str(tmp_path / "a.jpg"), View(32), "RGB")


def test_enormous_dimensions_are_refused_on_every_way(tmp_path, way, monkeypatch):
    (path, *_) = photographs(tmp_path, (320, 200), {})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 320 * 200 // 2 - 1)
    with pytest.raises(UserError, match=r"0\.jpg"):
        decode_crop(path, View(32), "RGB")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode_crop(path, View(32), "RGB").shape == (3, 32, 32)


# ------------------------------------------------------------------------------------ whole images


@pytest.mark.parametrize("colour", ["RGB", "L"])
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp"])
def test_a_stored_image_of_the_wanted_size_keeps_its_bits(tmp_path, name, colour):
    path = written(tmp_path / name, PHOTOGRAPHS[1].crop((300, 200, 332, 232)).convert(colour))
    assert torch.equal(decode_crop(path, View(32, whole=True), colour), pillow_pixels(path, colour))


@pytest.mark.parametrize("colour", ["RGB", "L"])
def test_a_stored_image_of_another_size_is_resized_as_by_torchvision(tmp_path, colour):
    path = written(tmp_path / "a.png", PHOTOGRAPHS[1].crop((300, 200, 340, 250)))
    expected = v2.functional.resize(pillow_pixels(path, colour), [32, 32], antialias=True)
    assert difference(decode_crop(path, View(32, whole=True), colour), expected)[0] <= 1


# ------------------------------------------------------------------------- threads, processes, noise


def crop_of(arguments):
    return decode_crop(*arguments).clone()


def test_threads_and_forked_processes_decode_alike(tmp_path, way):
    jobs = [(path, View(64), "RGB", draw) for path in photographs(tmp_path, (320, 200), {}) for draw in UNIFORMS[:6]]
    expected = [crop_of(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(crop_of, jobs))
    assert all(torch.equal(*pair) for pair in zip(threads, expected, strict=True))
    if sys.platform == "linux":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            found = pool.map_async(digest_of, jobs).get(timeout=300)
        assert found == [image.numpy().tobytes() for image in expected]


def digest_of(job):
    torch.set_num_threads(1)
    return crop_of(job).numpy().tobytes()


def test_the_decoder_says_nothing_and_leaves_the_environment_as_it_was(tmp_path):
    (path, *_) = photographs(tmp_path, (320, 200), {})
    program = f"""
import os
before = dict(os.environ)
from utils.data.images.decoding import decode_crop, decoder
from utils.data.images.view import View
decode_crop({path!r}, View(32), "RGB")
assert dict(os.environ) == before
print(decoder())
"""
    environment = {**os.environ, "NVIMGCODEC_EXTENSIONS_PATH": "elsewhere"}
    environment.pop("PYNVIMGCODEC_VERBOSITY", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", decoder())


def test_the_decoder_is_told_by_name_and_version(monkeypatch):
    if jpeg.nvimgcodec is not None:
        assert decoder().startswith(f"nvImageCodec {jpeg.nvimgcodec.__version__}")
    monkeypatch.setattr(jpeg, "nvimgcodec", None)
    assert decoder().startswith("torchvision ")
