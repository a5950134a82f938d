"""The origin of each part of the preprocessing; one image alone is shown as validation shows it."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.faults.small_run import told
from tests.helpers import exif_that_turns
from tests.utils.data.loading import make, read
from utils.config.arguments import parse
from utils.config.datasets import SPECS
from utils.config.settings import UserError
from utils.data.formats.readers import MemoryImages
from utils.data.preprocessing import KnownPreprocessing, Preprocessing, resolve

WEIGHTS = Preprocessing(224, 288, (0.5, 0.4, 0.3), (0.1, 0.2, 0.3), 0.95, "squash", "bicubic")
PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]


def resolved(dataname, *flags, known=KnownPreprocessing(WEIGHTS, "X's weights")):  # noqa: B008 - it does not change
    settings = parse(["--dataname", dataname, "--datapath", ".", *map(str, flags)]).data
    return resolve(settings, known)


# ------------------------------------------------------------------------------------ where it comes from


def test_images_of_any_size_are_shown_as_to_the_weights():
    for name in ("folder", "imagenet"):
        found, line = resolved(name)
        assert found == WEIGHTS
        assert line == (
            "224 pixels, 288 in evaluation, crop share 0.95, squash, bicubic, mean 0.5 0.4 0.3, std 0.1 0.2 0.3 (X's weights)"
        )


def test_without_weights_images_of_the_users_own_are_shown_as_imagenets():
    found, line = resolved("folder", known=None)
    imagenets = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert found == Preprocessing(224, 224, *imagenets, 0.875, "center", "bilinear")
    assert line.endswith("(ImageNet's, the default)") and line.count("(") == 1


def test_images_of_one_size_keep_it_and_are_shown_whole():
    found, line = resolved("cifar10")
    own = Preprocessing.of(SPECS["cifar10"])
    assert found == dataclasses.replace(own, mean=WEIGHTS.mean, std=WEIGHTS.std, interpolation="bicubic")
    assert (found.image_size, found.crop_pct, found.stored_size) == (32, 1, 32)
    assert line == "32 pixels (the data set's own); mean 0.5 0.4 0.3, std 0.1 0.2 0.3 (X's weights)"
    enlarged, line = resolved("cifar10", "--image-size", 224)
    assert (enlarged.image_size, enlarged.val_image_size, enlarged.stored_size) == (224, 224, 32)
    assert line.startswith("224 pixels (as set); bicubic, mean")


def test_grey_images_get_the_average_of_the_colours():
    found, _ = resolved("mnist")
    assert (found.mean, found.std) == (pytest.approx((0.4,)), pytest.approx((0.2,)))
    grey = KnownPreprocessing(dataclasses.replace(WEIGHTS, mean=(0.3,), std=(0.4,)), "grey weights")
    assert resolved("folder", known=grey)[0].mean == (0.3, 0.3, 0.3)


def test_a_run_that_goes_on_keeps_its_sizes_also_where_images_have_one_size():
    run = KnownPreprocessing(
        Preprocessing(40, 48, (0.5,), (0.2,), 0.9, "center", "bicubic", 28), "runs/last.pt", of_this_run=True
    )
    found, _ = resolved("mnist", known=run)
    assert found == run.preprocessing


@pytest.mark.parametrize(
    ("flag", "value", "name", "expected"),
    [
        ("--image-size", 160, "image_size", 160),
        ("--image-size", 160, "val_image_size", 160),
        ("--val-image-size", 320, "val_image_size", 320),
        ("--val-image-size", 320, "image_size", 224),
        ("--crop-pct", 0.9, "crop_pct", 0.9),
        ("--crop-mode", "border", "crop_mode", "border"),
        ("--interpolation", "bilinear", "interpolation", "bilinear"),
        ("--mean", 0.1, "mean", (0.1,) * 3),
        ("--std", 0.1, "std", (0.1,) * 3),
        ("--pixel-range", (0, 1023), "pixel_range", (0, 1023)),
    ],
)
def test_what_is_set_wins_over_the_weights(flag, value, name, expected):
    found, line = resolved("folder", flag, *(value if isinstance(value, tuple) else (value,)))
    assert getattr(found, name) == expected
    assert "(as set)" in line


@pytest.mark.parametrize(
    ("dataname", "flags", "words"),
    [
        ("folder", ("--mean", 0.5, 0.5), "--mean: 2 numbers for images of 3 channels; give 1 or 3"),
        ("digits", ("--std", 0.5, 0.5, 0.5), "--std: 3 numbers for images of 1 channel; give one"),
        ("digits", ("--crop-pct", 0.01, "--val-image-size", 82), "--crop-pct 0.01: .* enlarged to 8,200 pixels"),
    ],
)
def test_what_does_not_fit_the_data_set_is_one_line(dataname, flags, words):
    with pytest.raises(UserError, match=words):
        resolved(dataname, *flags)


def test_a_network_that_does_not_take_the_size_of_evaluation_is_one_line(capsys):
    code, (line,) = told(capsys, ("--device", "cpu", "--arch", "conv2", "--val-image-size", 16, "--dry-run"))
    assert code == 2 and "does not take 16-pixel images" in line and "try another --val-image-size" in line


# --------------------------------------------------------------------------------------- in a checkpoint


def test_its_state_gives_it_back():
    assert "pixel_range" not in WEIGHTS.state()  # so that older ones, and what is derived from them, stay as they are
    ranged = dataclasses.replace(WEIGHTS, pixel_range=(0.0, 1023.0))
    for made in (WEIGHTS, ranged, Preprocessing.of(SPECS["digits"]), Preprocessing.of(SPECS["folder"])):
        assert Preprocessing.from_state(made.state(), "here") == made


WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)  # by categories: a codec's take seconds to find
JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.lists(st.floats(), max_size=4))


@given(st.sampled_from([name for name in WEIGHTS.state() if name != "channels"]), JUNK)
@example(name="crop_pct", value=8e-308)
def test_a_state_with_anything_else_in_it_is_refused_in_one_line_or_usable(name, value):
    try:
        made = Preprocessing.from_state(WEIGHTS.state() | {name: value}, "some.pt")
    except UserError as error:
        assert str(error).startswith("some.pt: says no usable ")
    else:
        assert made.image_size > 0 and all(made.std) and made.view(made.val_image_size).place(50, 40)


@pytest.mark.parametrize("state", [None, [], {}, "text", {"image_size": 8}, WEIGHTS.state() | {"pixel_range": [9, 0]}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(UserError, match=r"some\.pt: says no usable"):
        Preprocessing.from_state(state, "some.pt")


# ------------------------------------------------------------------ one image as validation shows it, bit for bit


def validation_images(*flags):
    """The data, and what validation shows of all of it."""
    flags = ("--workers", 0, "--val-batch-size", 400, *flags)
    _, loader, _ = make(*flags)
    return read(*flags), torch.cat([batch.images for batch in loader.batches()])


@pytest.mark.parametrize("mode", ["P", "CMYK", "1", "LA", "YCbCr", "RGBA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_in_memory_shows_what_its_file_shows_where_all_levels_are_read(mode, channels, tmp_path):
    shown = Preprocessing(16, 16, (0.5,) * channels, (0.2,) * channels, 1.0, "squash", "bilinear", levels="all")
    ending = {"CMYK": "tif", "YCbCr": "tif"}.get(mode, "png")
    PHOTOGRAPHS[0].resize((40, 30)).convert(mode).save(tmp_path / f"x.{ending}")
    with Image.open(tmp_path / f"x.{ending}") as image:
        try:
            image.load()
        except OSError:
            pytest.skip("this Pillow cannot read back what it writes in this mode")
        copy = image.copy()
    assert torch.equal(shown(copy), shown(str(tmp_path / f"x.{ending}")))


@pytest.fixture
def tree(tmp_path):
    """Photographs of all kinds, as files."""
    kinds = [
        ("a.jpg", "RGB", (300, 200)),
        ("b.png", "RGB", (61, 90)),
        ("c.jpg", "L", (120, 100)),
        ("d.png", "P", (50, 50)),
        ("e.png", "RGBA", (70, 40)),
        ("f.jpg", "CMYK", (80, 200)),
        ("g.png", "I;16", (60, 60)),
        ("h.tif", "F", (9, 9)),
    ]
    for number, (name, mode, size) in enumerate(kinds):
        image = PHOTOGRAPHS[number % 2].resize(size)
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
        if mode == "F":
            image = Image.fromarray(np.asarray(image.convert("L")) / np.float32(255))
        turned = exif_that_turns(6 if name == "f.jpg" else 1)
        for split in ("train", "val"):
            for label in ("x", "y"):
                (tmp_path / split / label).mkdir(parents=True, exist_ok=True)
                (image if mode in ("I;16", "F") else image.convert(mode)).save(
                    tmp_path / split / label / name, exif=turned
                )
    return tmp_path


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--val-image-size 40",
        "--crop-pct 0.7 --interpolation bicubic",
        "--crop-mode squash",
        "--crop-mode border --mean 0.2",
        "--loader resident --augment flip --crop-pct 1",
        "--loader resident --augment flip --pixel-range 0 0.5",
    ],
)
def test_an_image_of_any_kind_and_size_is_shown_as_in_validation(tree, flags):
    if "pixel-range" not in flags:  # floats have none that a file says
        for path in tree.glob("*/*/h.tif"):
            path.unlink()
    cache = ("--cache-dir", tree / "cache") if "resident" in flags else ()
    data, shown = validation_images(
        "--dataname", "folder", "--datapath", tree, "--image-size", 32, *flags.split(), *cache
    )
    for path, expected in zip(data.validation.paths, shown, strict=True):
        with Image.open(path) as image:
            before = image.tobytes()
            assert torch.equal(data.preprocessing(image), expected), path
            assert image.tobytes() == before  # it is the caller's


@pytest.mark.parametrize("given", [torch.zeros(3, 8, 8), b"\xff\xd8", None], ids=lambda given: type(given).__name__)
def test_what_is_neither_path_nor_image_is_refused_by_its_type(given):
    with pytest.raises(TypeError, match=f"or an array, not {type(given).__name__}$"):
        WEIGHTS(given)


@pytest.mark.parametrize(("mean", "level"), [(-0.1, 0), (0.2, 51), (1.3, 255)])
def test_bars_have_the_level_nearest_to_the_mean(mean, level):
    shown = dataclasses.replace(WEIGHTS, val_image_size=8, mean=(mean,) * 3, std=(1.0,) * 3, crop_pct=1.0)
    shown = dataclasses.replace(shown, crop_mode="border")
    bars = shown(Image.new("RGB", (8, 4), (9, 9, 9)))[:, 0]
    assert torch.allclose(bars, torch.full((3, 8), level / 255 - mean))


@pytest.mark.parametrize("flags", ["", "--image-size 20", "--image-size 20 --crop-pct 0.8 --interpolation bicubic"])
def test_an_image_of_a_set_of_one_size_is_shown_as_in_validation(flags):
    data, shown = validation_images(*flags.split())
    assert isinstance(data.validation, MemoryImages)
    for pixels, expected in list(zip(data.validation.pixels, shown, strict=True))[:20]:
        assert torch.equal(data.preprocessing(Image.fromarray(pixels[0].numpy())), expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_images_of_one_size_are_enlarged_as_by_pillow(share, interpolation):
    flags = ("--image-size", 20, "--crop-pct", share, "--interpolation", interpolation, "--mean", 0, "--std", 1)
    data, shown = validation_images(*flags)
    side = int(20 / share)
    method = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    for pixels, found in list(zip(data.validation.pixels, shown, strict=True))[:20]:
        larger = Image.fromarray(pixels[0].numpy()).resize((side, side), method[interpolation])
        first = round((side - 20) / 2)
        expected = np.asarray(larger.crop((first, first, first + 20, first + 20)), dtype=np.float32)
        assert np.abs(found[0].numpy() * 255 - expected).max() < 1.5
