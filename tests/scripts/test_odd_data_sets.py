"""Of each ordinary wrong or unusual data set, main.py and check_data.py say what a user has to know, and no more."""

import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image

from scripts import evaluate, predict
from tests.helpers import image_tree, run_in
from tests.scripts.odd_data_sets import QUIET, SETS, Photos, deep, what_check_data_says, what_main_says, written
from tests.utils.data.deep_files import png
from utils.config.arguments import parse
from utils.data import first_look
from utils.data.datasets import get_data
from utils.data.formats.readers import ImageFiles

CPU = torch.device("cpu")
# The program says about these what it says about another set, so only ``-m thorough`` tries them.
ALIKE = {
    *("16-bit colour of 10 bits", "RGBA TIFF, alpha by class", "grey and alpha by class", "RGBA, alpha always 255"),
    *("palette with transparency", "1 bit", "progressive JPEG", "mixed sizes", "numbers as names"),
    *("a number from a column that lacks some", "GIF named .png"),
}
CASES = [pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in SETS]


@pytest.fixture(scope="module")
def photos():
    return Photos()


@pytest.mark.parametrize("name", CASES)
def test_what_a_user_has_to_know_is_said_and_what_is_right_is_not(name, photos, tmp_path):
    SETS[name].make(tmp_path / "data", photos)
    for words, said in (
        (SETS[name].main, what_main_says(tmp_path / "data", "--dry-run")),
        (SETS[name].check, what_check_data_says(tmp_path / "data")),
    ):
        assert any(words in line for line in said) if words != QUIET else not said, said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("0 1023", None),
        ("0 199", "lie beyond --pixel-range 0 199 (600 to 799) and are cut off: "),
        ("0 65535", "of which the network sees"),
    ],
)
def test_a_pixel_range_that_fits_ends_the_warning(flags, words, photos, tmp_path):
    written(deep(0, 199, 600))(tmp_path / "data", photos)
    said = what_main_says(tmp_path / "data", "--dry-run", "--pixel-range", *flags.split())
    assert any(words in line for line in said) if words is not None else said == []


def test_a_pixel_range_for_images_of_8_bits_is_said_to_do_nothing(photos, tmp_path):
    SETS["plain"].make(tmp_path / "data", photos)
    (line,) = what_main_says(tmp_path / "data", "--dry-run", "--pixel-range", "0", "9")
    assert "--pixel-range 0 9 does nothing: the images have 8 bits" in line


def test_images_of_the_networks_size_that_timms_crop_enlarges_are_told_unless_the_crop_is_given(tmp_path):
    image_tree(tmp_path / "data", {"train": 3, "val": 2}, size=32)
    said = [what_main_says(tmp_path / "data", "--dry-run", *f"--image-size {flags}".split()) for flags in ("32", "48")]
    given = what_main_says(tmp_path / "data", "--dry-run", "--image-size", "32", "--crop-pct", "0.875")
    resize, *_ = timm.data.create_transform(32).transforms
    words = f"have 32 x 32 pixels, and validation shows the middle of them, enlarged to {resize.size} x {resize.size}"
    assert [sum(words in line for line in lines) for lines in (*said, given)] == [1, 0, 0]


def test_data_of_which_nothing_can_be_read_leave_no_run_folder(photos, tmp_path):
    SETS["float TIFF"].make(tmp_path / "data", photos)
    (line,) = what_main_says(tmp_path / "data", "--output", str(tmp_path / "runs"))
    assert "no image to train on that was looked at can be read (train/a/" in line and "give --pixel-range" in line
    assert not (tmp_path / "runs").exists()


def test_a_class_of_which_no_validation_image_can_be_read_is_named(photos, tmp_path, capsys):
    SETS["plain"].make(tmp_path / "data", photos)
    run = trained(tmp_path)
    for path in (tmp_path / "data/val/b").iterdir():
        path.write_bytes(b"no image")
    (line,) = what_main_says(tmp_path / "data", "--dry-run", "--skip-bad-images")[:1]
    assert "no image to validate on that was looked at can be read of these classes: b" in line
    assert evaluate.main([run, "--skip-bad-images", "--no-progress", "--workers", "0"]) == 0
    assert "no image can be read of these classes, of which the figures say nothing: b" in capsys.readouterr().err


def trained(place):
    """The folder of a short run on ``place/data``."""
    line = ("--max-steps", "1", "--picture-epochs", "off", "--output", str(place / "runs"))
    assert what_main_says(place / "data", *line) == []
    return str(run_in(place / "runs"))


def test_a_trained_network_is_not_silently_given_numbers_that_it_hardly_sees(photos, tmp_path, capsys):
    SETS["plain"].make(tmp_path / "data", photos)
    run = trained(tmp_path)
    written(deep(0, 199, 600))(tmp_path / "other", photos)
    capsys.readouterr()
    words = ", of which the network sees 1 of 256"
    line = [run, "--datapath", str(tmp_path / "other/val"), "--no-progress", "--workers", "0"]
    assert evaluate.main(line) == 0
    assert f"16-bit images use few levels of 65535: class a 0 to 199{words}" in capsys.readouterr().err
    assert predict.main([run, str(tmp_path / "other/val/a"), "--output", str(tmp_path / "answers.csv")]) == 0
    err = capsys.readouterr().err
    assert re.search(rf"16-bit images use few levels of 65535: \d+ to \d+{words}; give it images of the levels", err)
    assert predict.main([run, str(tmp_path / "data/val/a"), "--output", str(tmp_path / "answers.csv")]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("inverted", [False, True])
def test_photographs_of_two_classes_that_are_inverted_stand_out_before_a_run(inverted, tmp_path):
    """Their means: 108 of 255 with a deviation of 35, as Imagenette's; inverted ones differ by 39 levels."""
    draw = np.random.default_rng(0)

    def save(path, _, __, split):
        mean = draw.normal(108, 35)
        pixels = np.clip(draw.normal(mean, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(255 - pixels if inverted and split == "val" else pixels).save(path)

    written(save, counts=(40, 40))(tmp_path / "data", lambda label, number: None)
    assert any("inverted" in line for line in what_main_says(tmp_path / "data", "--dry-run")) == inverted


def test_images_that_agree_only_in_what_a_network_sees_are_no_duplicates(tmp_path, photos):
    """Neither 16-bit numbers below one level, nor an alpha channel; the same numbers in another file are."""
    written(deep(0, 199, 30))(tmp_path / "data", photos)
    for split in ("train", "val"):
        for path in (tmp_path / "data" / split).glob("*/*.png"):
            number = np.asarray(Image.open(path))
            path.write_bytes(png((number % 200).astype(np.uint16)))
    lines = what_check_data_says(tmp_path / "data")
    assert not [line for line in lines if line.startswith(("- in both", "- label con", "- repeated"))], lines
    (tmp_path / "data/val/a/again.png").write_bytes((tmp_path / "data/train/a/0.png").read_bytes() + b"\0")
    assert [line for line in what_check_data_says(tmp_path / "data") if line.startswith("- in both splits: 1 image")]


def test_an_opaque_image_is_none_whose_alpha_channel_is_not_read(tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(4)]
    for path, alpha in zip(paths, (255, 90, 255, 255), strict=True):
        Image.new("RGBA", (8, 8), (9, 9, 9, alpha)).save(path)
    files = ImageFiles(paths, torch.tensor([0, 0, 1, 1]), "RGB")
    (line,) = first_look.lost_levels(files, ["a", "b"], None)
    assert line.startswith("the alpha channel of 1 image differs (class a 90) and"), line


def test_the_first_look_is_bounded_whatever_the_number_of_classes_and_pixels(tmp_path, monkeypatch):
    labels = torch.arange(1000).repeat_interleave(3)
    assert len(first_look.sample(labels.numpy())) == first_look.EACH_SPLIT
    assert sorted(first_look.sample(np.repeat([0, *range(2, 12)], [1] + [9] * 10)).tolist())[:5] == [0, 1, 4, 6, 9]
    assert len(first_look.sample(np.repeat([0, 1], 100))) == first_look.OF_FEW_CLASSES
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((600, 700), np.uint16)).save(path)
    looked = []
    monkeypatch.setattr(first_look, "look", lambda *_: looked.append(1))
    files = ImageFiles([str(path)] * 3000, labels, "RGB")
    began = time.perf_counter()
    monkeypatch.setattr(first_look, "remarks", lambda *_: [])
    data = SimpleNamespace(train=files, validation=files, classes=[*map(str, range(1000))], multilabel=False)
    first_look.doubts(data, parse([]))
    assert 0 < len(looked) <= 2 * first_look.PIXELS // (600 * 700) and time.perf_counter() - began < 5


def test_what_is_said_does_not_depend_on_the_rank_and_names_files_below_the_folder(photos, tmp_path):
    SETS["16 bits, 0 to 199 and 600 to 799"].make(tmp_path / "data", photos)
    root = str(tmp_path / "data")
    args = parse(["--dataname", "folder", "--datapath", root])
    data = get_data(args.data, CPU)
    first = first_look.doubts(data, args)
    assert first == first_look.doubts(data, args) and len(first) == 1
    assert first[0].startswith(
        f"--datapath {root}: 16-bit images use few levels of 65535: class a 0 to 199, of which the network sees 1 of "
        "256; class b 600 to 799, of which the network sees 2 of 256; give --pixel-range 0 1023 ("
    )
