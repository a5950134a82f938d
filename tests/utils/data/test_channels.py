"""Images of any number of channels and bits: the same numbers from every kind of file, and none cut unasked."""

import dataclasses
import io
import math
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image, ImageSequence
from scipy.special import ndtri
from timm.models import adapt_input_conv
from torchvision.transforms.v2 import functional

import main
from models.build import build_model
from models.load import load_model
from models.starting_weights import of_other_channels
from scripts import check_data, pack
from scripts.common.choice import picture
from scripts.data_check.survey import _of_pixels
from scripts.exporting.card import preparation
from scripts.packing.encoding import Encoding
from scripts.serving.uploads import Limits, decode
from tests.faults.small_run import told
from tests.helpers import class_files, file_of, trained
from tests.utils.data.deep_files import png, tiff
from tests.utils.data.loading import make, read, same_steps, steps_of
from utils.config.arguments import parse
from utils.config.datasets import SPECS
from utils.config.groups.model import ModelSettings
from utils.config.plugins import Entry
from utils.config.settings import UserError
from utils.data.augment.erasing import normals
from utils.data.augment.operations import Canvas, apply_layers
from utils.data.formats.own import read_own
from utils.data.images.arrays import array_header, of_colour
from utils.data.images.decoding import UnreadableImage, decode_crop, open_image, read_pixels
from utils.data.images.levels import Colour
from utils.data.images.look import header, look
from utils.data.preprocessing import Preprocessing
from utils.data.sample_plan import mixed

FIVE = Colour("5", keeps_levels=True)
BANDS = np.random.default_rng(0).integers(0, 65536, (12, 20, 5)).astype(np.uint16)


def tree(folder, make_file, ending, count=6):
    """Class folders of ``count`` images each for two classes and both splits; gives all the arrays of training."""
    arrays = []
    for path, split, label, number in class_files(folder, {"train": count, "val": count}, ending=ending):
        rng = np.random.default_rng([label, number, split == "val"])
        pixels = rng.integers(0, 10_000, (24, 24, 5)).astype(np.uint16) + np.uint16(9_000 * label)
        path.write_bytes(make_file(pixels))
        arrays += [pixels] if split == "train" else []
    return np.stack(arrays)


def npy(numbers):
    file = io.BytesIO()
    np.save(file, numbers)
    return file.getvalue()


def read_back(folder, name, content, colour=FIVE):
    """The pixels of a file with this content: (h, w, channels)."""
    (folder / name).write_bytes(content)
    return read_pixels(str(folder / name), colour).permute(1, 2, 0)


def levels_of(numbers):
    """The levels that arrays of five channels hold."""
    return torch.from_numpy(of_colour(numbers, FIVE))


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bands")
    return folder, tree(folder, npy, "npy")


def flags(folder, *more):
    line = f"--device cpu --dataname folder --datapath {folder} --arch conv2a --image-size 16 20 --batch-size 4".split()
    return [*line, *map(str, more)]


# ------------------------------------------------------------------------------------------ what a file holds


def test_all_numbers_of_an_array_are_kept_between_0_and_255(tmp_path):
    pixels = read_back(tmp_path, "x.npy", npy(BANDS))
    assert pixels.dtype == torch.float32
    # float32 holds 24 bits of a number below 256, so its error is at most 2^-17
    np.testing.assert_allclose(pixels, BANDS / 257, rtol=0, atol=2**-17)
    assert len(np.unique(pixels)) == len(np.unique(BANDS))


@pytest.mark.parametrize("numbers", [BANDS, (BANDS // 257).astype(np.uint8)], ids=["16 bits", "8 bits"])
def test_a_tiff_file_of_several_bands_holds_what_the_array_does(numbers, tmp_path):
    pixels = read_back(tmp_path, "x.tif", tiff(numbers, photometric=1, extra=(0,) * 4))
    assert torch.equal(pixels, levels_of(numbers))


@pytest.mark.parametrize("kind", ["imagej", "ome"])
def test_channels_that_are_pages_are_read_as_bands_but_no_other_pages(kind, tmp_path):
    path = str(tmp_path / "x.tif")
    pages = np.ascontiguousarray(np.moveaxis(BANDS, -1, 0))
    tifffile.imwrite(path, pages, metadata={"axes": "CYX"}, **{kind: True})
    assert header(path, FIVE).frames == 1 and header(path, "RGB").frames == 5
    assert torch.equal(read_pixels(path, FIVE).permute(1, 2, 0), levels_of(BANDS))
    coloured = np.stack([BANDS[..., :4].astype(np.uint8)] * 4)
    tifffile.imwrite(tmp_path / "four.tif", coloured, photometric="rgb", extrasamples=["unassalpha"])
    assert header(str(tmp_path / "four.tif"), Colour("4")).frames == 4, "of which the first is read"
    tifffile.imwrite(path, pages, metadata={"axes": "TYX"}, **{kind: True})  # five moments
    with pytest.raises(ValueError, match="has 1 channel, and the network takes 5"):
        read_pixels(path, FIVE)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_a_tiff_file_is_turned_upright_in_either_layout(orientation, planes, tmp_path):
    stored = BANDS if planes == "contig" else np.moveaxis(BANDS, -1, 0)
    path = str(tmp_path / "x.tif")
    tag = [(274, "H", 1, orientation, True)]
    tifffile.imwrite(path, stored, photometric="minisblack", planarconfig=planes, extratags=tag)
    Image.fromarray(BANDS[..., 2]).save(tmp_path / "grey.tif", tiffinfo={274: orientation})
    grey = open_image(str(tmp_path / "grey.tif"), Colour("L", (0, 65535)))  # as Pillow turns it
    mine = read_pixels(path, FIVE)[2].round().byte()
    assert mine.shape == np.asarray(grey).shape and np.abs(mine.int() - np.asarray(grey).astype(int)).max() <= 1


def test_without_tifffile_a_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    tree(tmp_path, lambda numbers: tiff(numbers, photometric=1, extra=(0,) * 4), "tif", count=2)
    code, (line,) = told(capsys, flags(tmp_path, "--dry-run", "--in-channels", 5))
    assert code == 2 and ".tif: a TIFF file of several bands needs tifffile: python -m pip install" in line


def test_a_damaged_tiff_file_is_no_case_for_tifffile(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    whole = tiff(np.zeros((9, 9), np.uint8))
    for cut in (8, 9, 40):
        (tmp_path / "x.tif").write_bytes(whole[:cut])
        assert array_header(str(tmp_path / "x.tif")) is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (np.zeros((5, 20, 20), np.uint8)[:, :, :19], r"has 19 channels"),
        (np.zeros((3, 20, 20), np.uint8), r"20 channels if they come last; save \(height, width, channels\)"),
        (np.zeros((1, 24, 20), np.uint8), r"20 channels if they come last"),
        (np.zeros((5, 20, 20), np.uint8), r"20 channels if they come last; save \(height, width, channels\)"),
        (np.zeros((30, 20, 20), np.uint8), r"20 channels if they come last"),
        (np.zeros((5, 20, 24), np.uint8), r"24 channels if they come last; save \(height, width, channels\)"),
        (np.zeros((12, 20, 4), np.uint8), r"has 4 channels, and the network takes 5"),
        (np.zeros((2, 12, 20, 5), np.uint8), r"shape \(2, 12, 20, 5\)"),
        (np.full((12, 20, 5), np.nan), r"no known range; give --pixel-range LOW HIGH"),
        (np.zeros((12, 20, 5), np.complex64), r"complex64"),
    ],
)
def test_an_array_that_is_no_such_image_is_one_line_that_names_the_file(numbers, words, tmp_path):
    with pytest.raises(UnreadableImage, match=rf"odd\.npy: cannot be read as an image \(.*{words}"):
        read_back(tmp_path, "odd.npy", npy(numbers))


def npy_that_states(shape):
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + BANDS.tobytes()


def tiff_that_states(side):
    height, width = (struct.pack("<HHII", tag, 3, 1, length) for tag, length in ((257, 12), (256, 20)))
    content = tiff(BANDS, photometric=1, extra=(0,) * 4).replace(height, struct.pack("<HHII", 257, 4, 1, side))
    return content.replace(width, struct.pack("<HHII", 256, 4, 1, side))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy_that_states((10**8, 10**8, 5)), r"holds fewer numbers than those of shape \(100000000, 100000000, 5\)"),
        (npy_that_states((1, 1, 10**17)), r"holds fewer numbers than those of shape \(1, 1, 100000000000000000\)"),
        (npy_that_states("(12, 20"), "its header is damaged"),
        (npy_that_states("-" * 9000 + "1"), "its header is damaged"),
        (tiff_that_states(10**8), r"holds fewer numbers than those of shape \(100000000, 100000000, 5\)"),
    ],
    ids=("size", "channels", "cut", "nested", "TIFF"),
)
def test_a_damaged_header_of_an_array_is_no_lack_of_memory_but_a_damaged_file(content, words, tmp_path):
    with pytest.raises(UnreadableImage, match=rf"damaged: cannot be read as an image \(.*{words}"):
        read_back(tmp_path, "damaged", content)


@pytest.mark.parametrize("shape", [(3, 9, 5), (4, 7, 9), (4, 9, 9), (12, 9, 9)])
def test_a_tiff_file_of_as_many_bands_as_rows_or_columns_says_itself_which_are_the_bands(shape, tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    content = tiff(numbers, photometric=1, extra=(0,) * (shape[2] - 1))
    assert np.array_equal(read_back(tmp_path, "few.tif", content, Colour(str(shape[2]))), numbers)


def test_a_square_patch_of_many_channels_is_read_as_it_is_saved(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, (9, 9, 200), dtype=np.uint8)
    assert np.array_equal(read_back(tmp_path, "patch.npy", npy(numbers), Colour("200")), numbers)


def test_16_bits_of_which_training_reads_8_are_no_damage(tmp_path):
    (tmp_path / "grey_and_alpha.png").write_bytes(png(np.full((9, 7, 2), 40000, np.uint16)))
    assert look(str(tmp_path / "grey_and_alpha.png"), "L").seen[0] == 40000 >> 8


def test_a_picture_is_as_bright_in_every_format_whatever_its_colour(tmp_path):
    leaves = Image.new("RGB", (64, 64), (20, 200, 20))
    leaves.save(tmp_path / "leaves.png")
    leaves.save(tmp_path / "leaves.jpg")
    np.save(tmp_path / "leaves.npy", np.asarray(leaves))
    for ending in ("png", "jpg", "npy"):
        grey = look(str(tmp_path / f"leaves.{ending}"), "RGB").seen[1]
        assert grey == pytest.approx(0.299 * 20 + 0.587 * 200 + 0.114 * 20, abs=2)


def test_each_page_of_a_deep_file_is_preprocessed_as_itself(tmp_path):
    pages = [Image.fromarray(np.full((8, 8), 1000 * number, np.uint16)) for number in (1, 3)]
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    for colour in ({"pixel_range": (0, 4095)}, {"levels": "all"}):
        preprocessing = Preprocessing(8, 8, (0.0,), (1.0,), 1.0, "squash", "bilinear", **colour)
        with Image.open(tmp_path / "stack.tif") as stack:
            shown = [preprocessing(page).mean().item() for page in ImageSequence.Iterator(stack)]
        assert shown[1] == pytest.approx(3 * shown[0], rel=0.01)
    tifffile.imwrite(tmp_path / "colour.tif", np.full((2, 8, 8, 3), 1000, np.uint16), photometric="rgb")
    preprocessing = Preprocessing(8, 8, (0.0,) * 3, (1.0,) * 3, 1.0, "squash", "bilinear", pixel_range=(0, 4095))
    with Image.open(tmp_path / "colour.tif") as stack:
        stack.seek(1)
        with pytest.raises(ValueError, match="page 2: of its 16 bits Pillow reads only 8"):
            preprocessing(stack)


@pytest.mark.parametrize("colour", ["L", "RGB", Colour("L", (0, 65535)), Colour("RGB", None, True)], ids=repr)
def test_a_tiff_file_whose_numbers_pillow_would_misread_is_refused_and_its_8_bit_twin_is_read(colour, tmp_path):
    shown = Preprocessing(8, 8, (0.5,) * 3, (0.2,) * 3, 1.0, "squash", "bilinear")
    rgb = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    grey = rgb[..., 0]
    deep = 257 * rgb.astype(np.uint16)
    white = {"photometric": "miniswhite"}
    planes = {"photometric": "rgb", "planarconfig": "separate"}
    for numbers, how, words in (
        (65535 - deep[..., 0], white, "level 0 is white"),
        (deep.transpose(2, 0, 1).copy(), planes, "separate planes"),
        ((grey.astype(int) - 128).astype(np.int8), {}, "no known range"),
        (grey.astype(np.float32), {"byteorder": ">", "compression": "zlib"}, "high byte first"),
        (grey.astype(np.int16), {"byteorder": ">", "compression": "zlib"}, "high byte first"),
    ):
        tifffile.imwrite(tmp_path / "odd.tif", numbers, **how)
        with pytest.raises(UnreadableImage, match=words):
            read_pixels(str(tmp_path / "odd.tif"), colour)
        with Image.open(tmp_path / "odd.tif") as image, pytest.raises(ValueError, match=words):
            shown(image)
    for stored, numbers, how in ((grey, 255 - grey, white), (rgb, rgb.transpose(2, 0, 1).copy(), planes)):
        tifffile.imwrite(tmp_path / "even.tif", numbers, **how)
        Image.fromarray(stored).save(tmp_path / "even.png")
        assert torch.equal(*(read_pixels(str(tmp_path / f"even.{ending}"), colour) for ending in ("tif", "png")))


def test_inks_are_no_four_channels(tmp_path):
    Image.new("CMYK", (9, 7), (10, 20, 30, 40)).save(tmp_path / "ink.tif")
    with pytest.raises(UnreadableImage, match="has 3 channels, and the network takes 4"):
        read_pixels(str(tmp_path / "ink.tif"), Colour("4"))
    assert read_pixels(str(tmp_path / "ink.tif"), "RGB").shape == (3, 7, 9)


def test_a_range_leaves_files_alone_that_state_their_own(tmp_path):
    numbers = np.arange(0, 1000, 8, dtype=">u2")
    content = b"P5\n25 5\n1000\n" + numbers.tobytes()
    for pixel_range in (None, (0, 1000), (-50, 200)):
        pixels = read_back(tmp_path, "x.pgm", content, Colour("L", pixel_range, keeps_levels=True))
        # Pillow rounds to 16 bits
        np.testing.assert_allclose(pixels.flatten(), numbers * 0.255, rtol=0, atol=0.51 / 257)


def test_floats_need_a_range_which_cuts_off(tmp_path):
    numbers = np.linspace(-1, 3, 1200).reshape(12, 20, 5)
    pixels = read_back(tmp_path, "x.npy", npy(numbers), Colour("5", (0.0, 2.0), keeps_levels=True))
    np.testing.assert_allclose(pixels, numbers.clip(0, 2) * 127.5, rtol=0, atol=2**-17)


def test_big_endian_numbers_are_the_same_numbers(tmp_path):
    assert torch.equal(read_back(tmp_path, "x.npy", npy(BANDS.astype(">u2"))), levels_of(BANDS))


@pytest.mark.parametrize(("channels", "mode"), [(4, "RGBA"), (2, "LA")])
def test_as_many_channels_as_pillow_has_are_read_from_its_files(channels, mode, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (9, 7, channels)).astype(np.uint8)
    Image.fromarray(pixels, mode).save(tmp_path / "x.png")
    assert np.array_equal(read_pixels(str(tmp_path / "x.png"), Colour(str(channels))).permute(1, 2, 0), pixels)


def test_alpha_of_16_bits_is_kept_for_four_channels_and_left_out_for_three(tmp_path):
    numbers = BANDS[..., :4]
    for channels in (4, 3):
        pixels = read_back(tmp_path, "x.png", png(numbers), Colour(str(channels), keeps_levels=True))
        torch.testing.assert_close(pixels, torch.from_numpy(numbers[..., :channels] / 257).float())


def test_a_picture_for_people_has_three_of_the_channels_and_keeps_them_all(tmp_path):
    (tmp_path / "x.npy").write_bytes(npy(BANDS))
    picture = open_image(str(tmp_path / "x.npy"), FIVE)
    assert np.array_equal(np.asarray(picture), np.rint(BANDS[..., :3] / 257))
    shown = Preprocessing(8, 8, (0.5,) * 5, (0.2,) * 5, 1.0, "squash", "bilinear", levels="all")
    ways = [shown(picture), shown(BANDS), shown(str(tmp_path / "x.npy")), shown(io.BytesIO(npy(BANDS)))]
    ways.append(shown(decode(npy(BANDS), shown.colour, Limits(1, 1))))  # of a server
    assert all(torch.equal(way, ways[0]) for way in ways)
    resized = functional.resize(torch.from_numpy(BANDS / 65535).permute(2, 0, 1).float(), [8, 8], antialias=True)
    torch.testing.assert_close(ways[0], (resized - 0.5) / 0.2, rtol=1e-4, atol=1e-5)
    assert Preprocessing.from_state(shown.state(), "here") == shown


def test_levels_that_bicubic_puts_beyond_0_and_255_are_cut_off_in_one_image_as_in_validation(tmp_path):
    (tmp_path / "x.npy").write_bytes(npy(65535 * (BANDS % 2)))
    shown = Preprocessing(8, 8, (0.0,) * 5, (1.0,) * 5, 1.0, "squash", "bicubic", levels="all")
    validated = decode_crop(str(tmp_path / "x.npy"), shown.view(8), shown.colour)
    assert (validated.min(), validated.max()) == (0, 255)
    assert torch.equal(shown(str(tmp_path / "x.npy")), shown.evaluation_transform.evaluation(validated[None])[0])


# ------------------------------------------------------------------------------------------ training


def test_8_bits_and_as_many_numbers_of_16_train_to_the_same_bits(tmp_path):
    """value * 257 over 65535 is value over 255, exactly in float32."""
    tree(tmp_path / "8", lambda numbers: png((numbers[..., 0] % 256).astype(np.uint8)), "png", count=4)
    tree(tmp_path / "16", lambda numbers: png(numbers[..., 0] % 256 * np.uint16(257)), "png", count=4)
    more = ("--in-channels", 1, "--levels", "all", "--rotation", 20, "--gaussian-blur-prob", 0.5, "--workers", 0)
    assert same_steps(*(steps_of(*flags(tmp_path / name, *more)) for name in ("8", "16")))


def test_channels_and_levels_are_found_and_loaders_agree(bands):
    folder, arrays = bands
    data = read(*flags(folder))
    assert data.preprocessing.channels == 5 and data.preprocessing.levels == "all" and data.image_shape == (5, 16, 20)
    ways = [
        steps_of(*flags(folder, "--augment", "flip", "--crop-pct", 1, "--loader", loader, "--workers", workers))
        for loader, workers in (("stream", 0), ("stream", 2), ("resident", 0))
    ]
    assert all(same_steps(other, ways[0]) for other in ways[1:])
    _, validation, _ = make(*flags(folder, "--workers", 0))
    shown = torch.cat([batch.images for batch in validation.batches()])
    for kind in (str, Path):
        alone = torch.stack([data.preprocessing(kind(path)) for path in data.validation.paths])
        torch.testing.assert_close(shown, alone)


@pytest.mark.parametrize("length", [0, 40])
def test_channels_are_those_of_the_first_file_that_can_be_read(bands, tmp_path, length):
    shutil.copytree(bands[0], tmp_path / "data")
    first = tmp_path / "data" / "train" / "a" / "0.npy"
    first.write_bytes(first.read_bytes()[:length])
    assert read(*flags(tmp_path / "data", "--skip-bad-images")).preprocessing.channels == 5


def test_a_large_first_image_gives_no_warning_of_pillows(tmp_path, monkeypatch, recwarn):
    def png(numbers):
        return file_of(Image.fromarray(numbers[..., :3].astype(np.uint8)), "png")

    tree(tmp_path, png, "png", count=2)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 24 - 1)
    read(*flags(tmp_path))
    assert not recwarn.list


def test_another_number_of_channels_in_one_file_is_one_line_that_names_it(bands, tmp_path, capsys):
    tree(tmp_path, npy, "npy", count=3)
    (tmp_path / "train" / "b" / "2.npy").write_bytes(npy(np.zeros((9, 9, 4), np.uint16)))
    line = flags(tmp_path, "--epochs", 1, "--output", tmp_path / "runs", "--workers", 0, "--no-progress")
    assert main.main(line) == 2
    assert "2.npy: cannot be read as an image (has 4 channels, and the network takes 5" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [("--auto-augment", "rand"), ("--color-jitter", 0.3), ("--grayscale-prob", 0.1)])
def test_augmentations_of_rgb_are_refused_for_other_channels(bands, flag, capsys):
    code, (line,) = told(capsys, flags(bands[0], "--dry-run", *flag))
    assert code == 2 and line.startswith(f"main.py: {flag[0]}: ") and "5 channels" in line


def test_a_rotation_of_floats_moves_them_as_it_moves_bytes():
    whole = torch.randint(0, 256, (6, 5, 12, 20), dtype=torch.uint8)
    choices, degrees = np.zeros((6, 1), int), np.linspace(-40, 40, 6)[:, None]
    moved = apply_layers(whole, ("Rotate",), choices, degrees, Canvas())
    fine = apply_layers(whole.float() + 0.25, ("Rotate",), choices, degrees, Canvas())
    assert torch.equal(fine[fine > 0], moved[fine > 0].float() + 0.25) and not moved[fine == 0].any()


def test_noise_of_many_channels_is_independent_and_that_of_four_as_ever():
    codes = mixed(np.arange(20_000, dtype=np.uint64))
    first = torch.from_numpy(codes.view(np.int64))
    noise = normals(first, torch.zeros_like(first), 9).numpy()
    hashed = mixed(codes + np.uint64(0x9E3779B97F4A7C15)).view(np.uint16).reshape(-1, 4)  # SplitMix64's next number
    assert np.array_equal(noise[:, :4], ndtri((hashed + 0.5) / 2**16).astype(np.float32))
    correlation = np.corrcoef(noise.T) - np.eye(9)
    assert np.abs(correlation).max() < 5 / math.sqrt(20_000)  # five standard errors


def test_a_run_on_five_bands_ends_in_a_checkpoint_that_every_tool_reads(bands, tmp_path):
    folder, _ = bands
    more = ("--epochs", 1, "--random-erase", 0.5, "--workers", 0, "--mixup", 0.2)
    loaded = load_model(trained(tmp_path, *flags(folder, *more)))
    assert loaded.preprocessing.channels == 5 and loaded.preprocessing.levels == "all"
    path = folder / "val" / "a" / "0.npy"
    names = {"np": np, "Image": Image}
    exec(preparation(loaded.preprocessing, False), names)
    ours = loaded.preprocessing(str(path))
    torch.testing.assert_close(torch.from_numpy(names["prepare"](str(path)))[0], ours, rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------ statistics


def test_statistics_are_numpys_over_the_training_images_and_a_run_takes_them(bands, tmp_path, capsys):
    folder, arrays = bands
    line = f"--dataname folder --datapath {folder} --statistics --output {tmp_path} --workers 0"
    assert check_data.main(line.split()) == 0
    said = capsys.readouterr().out
    args = parse(flags(folder, "--config", tmp_path / "statistics.yaml"), 1)
    values = arrays.reshape(-1, 5) / 65535
    np.testing.assert_allclose(args.data.mean, values.mean(0), rtol=1e-5)  # six digits are written
    np.testing.assert_allclose(args.data.std, values.std(0), rtol=1e-5)
    assert "--in-channels 5 --mean " in said and "12 training images, 6,912 pixels of each channel" in said
    assert parse(flags(folder, *said.splitlines()[1].split()), 1).data == dataclasses.replace(
        args.data, datapath=str(folder)
    )


def test_statistics_leave_out_what_a_run_would_leave_out(bands, tmp_path, capsys):
    folder, _ = bands
    shutil.copytree(folder, tmp_path / "data")
    for path in sorted((tmp_path / "data/train").rglob("*.npy"))[1:]:
        path.write_bytes(b"damaged")
    line = f"--dataname folder --datapath {tmp_path}/data --statistics --output {tmp_path} --workers 0"
    with pytest.raises(UserError, match="cannot be read as an image"):
        check_data.main(line.split())
    assert check_data.main([*line.split(), "--skip-bad-images"]) == 0
    assert "1 training images, 576 pixels of each channel" in capsys.readouterr().out


def test_statistics_of_the_digits_are_those_of_the_specification(tmp_path):
    assert check_data.main(["--statistics", "--output", str(tmp_path)]) == 0
    data = parse(["--config", str(tmp_path / "statistics.yaml")], 1).data
    spec = read().spec
    # the specification's are of the 17 levels before these are rounded to bytes, by up to 0.5 of 255
    np.testing.assert_allclose([data.mean, data.std], [spec.mean, spec.std], rtol=0, atol=0.5 / 255)
    assert data.in_channels is None


# ------------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_the_first_layer_of_weights_is_what_timm_makes_of_it(channels):
    whole = timm.create_model("test_resnet", num_classes=3)
    theirs = dict(whole.state_dict())
    mine = timm.create_model("test_resnet", num_classes=3, in_chans=channels)
    weights = of_other_channels(mine, theirs)
    first = next(name for name, value in theirs.items() if value.ndim == 4)
    assert torch.equal(weights[first], adapt_input_conv(channels, theirs[first]))
    assert all(weights[name] is theirs[name] for name in theirs if name != first)
    mine.load_state_dict(weights)


def test_a_network_of_torchvision_takes_five_channels():
    model = build_model(ModelSettings(arch="torchvision/resnet18"), classes=3, channels=5, image_size=64)
    assert model(torch.randn(2, 5, 64, 64)).shape == (2, 3)
    weight = model.conv1.weight
    assert weight.shape[1] == 5 and not torch.equal(weight[:, 0], weight[:, 3])  # not repeated: nothing was trained


def test_channels_of_images_in_memory_become_grey_or_rgb_only():
    data = read("--in-channels", 3)
    assert data.train.pixels.shape == (1437, 3, 8, 8) and data.preprocessing.mean == (0.3055,) * 3
    with pytest.raises(UserError, match="--in-channels 5: the images have 1"):
        read("--in-channels", 5)


def test_images_of_five_channels_in_memory_are_shown_checked_and_refused_by_name_where_files_cannot_hold_them(tmp_path):
    numbers = np.arange(8 * 8 * 5, dtype=np.uint8).reshape(8, 8, 5)
    items = [(npy(numbers), 0), (npy(255 - numbers), 1)]
    entry = Entry("dataset", "five", lambda path: (items, items, ("a", "b")), tmp_path / "mine.py")
    spec = dataclasses.replace(SPECS["digits"], classes=None, mean=(0.5,) * 5, std=(0.3,) * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SPECS, "five", spec)
        images = read_own(entry, parse([]).data).train
    assert np.array_equal(images.pixels[0].permute(1, 2, 0), numbers)
    assert np.array_equal(picture(images, 0), numbers[..., :3])
    shown = Preprocessing(8, 8, (0.0,) * 5, (1.0,) * 5, 1.0, "squash", "bilinear")(picture(images, 0))
    assert np.array_equal((255 * shown).round().permute(1, 2, 0), numbers), "what a heat map and an export see"
    assert set(_of_pixels(images.pixels.numpy())["mode"]) == {b"5x8"}
    encodings = dict.fromkeys(("train", "val"), Encoding("raw", None, 90, "5"))
    with pytest.raises(UserError, match="--format raw: holds grey or RGB, and these have 5 channels"):
        pack.refuse_formats(encodings, SimpleNamespace(train=images, validation=images))
