"""Ordinary wrong or unusual data sets, made of real images, and what main.py and check_data.py say of each.

What ``tests/scripts/test_check_data.py`` and ``tests/utils/data/test_class_folders.py`` hold to its last word is left out.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import main
from scripts import check_data
from tests.helpers import class_files, exif_that_turns
from tests.utils.data.deep_files import png, tiff

# images of a class
TRAIN = 9
VAL = 8
QUIET = ""  # right, and nothing to say


class Odd(NamedTuple):
    """``make(folder, photos)`` writes the set.

    ``main`` and ``check``: words of a line that main.py says before it trains, or ends with, and of check_data.py's
    findings; ``QUIET`` where there is nothing to say.
    """

    make: Callable[[Path, Photos], None]
    main: str
    check: str


class Photos:
    """scikit-learn's digits of two classes, uint8 (h, w, 3); each number another one."""

    def __init__(self) -> None:
        digits = load_digits()
        levels = np.kron(np.round(digits.images * 255 / 16), np.ones((3, 3))).astype(np.uint8)
        self.classes = [levels[digits.target == label][..., None].repeat(3, -1) for label in (3, 5)]

    def __call__(self, label: int, number: int) -> np.ndarray:
        return self.classes[label][number]


def written(
    save: Callable[[Path, np.ndarray, int, str], None],
    counts: tuple[int, int] = (TRAIN, VAL),
    names: str = "ab",
    ending: str = "png",
) -> Callable[[Path, Photos], None]:
    """Two classes in train/ and val/, each image written by ``save(path, pixels, label, split)``."""

    def make(root: Path, photos: Photos) -> None:
        of_splits = dict(zip(("train", "val"), counts, strict=True))
        for path, split, label, number in class_files(root, of_splits, names, ending):
            save(path, photos(label, number + (0 if split == "train" else counts[0])), label, split)

    return make


def plainly(path: Path, pixels: np.ndarray, *_: object) -> None:
    Image.fromarray(pixels).save(path)


def as_mode(mode: str, **options: object) -> Callable[..., None]:
    return lambda path, pixels, *_: Image.fromarray(pixels).convert(mode).save(path, **options)


def deep(low: int, high: int, apart: int = 0, kind: Callable[[np.ndarray], bytes] = png) -> Callable[..., None]:
    """16-bit grey from ``low`` to ``high``, in the second class ``apart`` higher."""

    def save(path: Path, pixels: np.ndarray, label: int, _: str) -> None:
        levels = low + pixels[..., 0] * ((high - low) / 255) + apart * label
        path.write_bytes(kind(levels.astype(np.uint16)))

    return save


def with_alpha(levels: Callable[[int], int], kind: str = "RGBA") -> Callable[..., None]:
    def save(path: Path, pixels: np.ndarray, label: int, _: str) -> None:
        image = Image.fromarray(pixels).convert(kind.rstrip("A"))
        image.putalpha(levels(label))
        image.save(path)

    return save


def only_alpha(path: Path, pixels: np.ndarray, *_: object) -> None:
    image = Image.new("RGB", pixels.shape[1::-1])
    image.putalpha(Image.fromarray(pixels[..., 0]))
    image.save(path)


def by(test: Callable[[int, str], bool], one: Callable, other: Callable) -> Callable[..., None]:
    """Written by ``one`` where ``test(label, split)`` holds, otherwise by ``other``."""
    return lambda path, pixels, label, split: (one if test(label, split) else other)(path, pixels, label, split)


def changed(change: Callable[[Path, Photos], None], counts: tuple[int, int] = (TRAIN, VAL), **options: str):
    """An ordinary set, then changed by ``change(root, photos)``."""

    def make(root: Path, photos: Photos) -> None:
        written(plainly, counts, **options)(root, photos)
        change(root, photos)

    return make


def turned(path: Path, pixels: np.ndarray, *_: object) -> None:
    Image.fromarray(pixels).save(path, exif=exif_that_turns())


def floats(path: Path, pixels: np.ndarray, *_: object) -> None:
    path.write_bytes(tiff((pixels[..., 0] / 255).astype(np.float32)))


def palette(path: Path, pixels: np.ndarray, *_: object) -> None:
    Image.fromarray(pixels).quantize(16).save(path, transparency=0)


def pages(path: Path, pixels: np.ndarray, *_: object) -> None:
    Image.fromarray(pixels).save(path, save_all=True, append_images=[Image.fromarray(255 - pixels)])


def further(path: Path, pixels: np.ndarray, label: int, _: str) -> None:
    path.write_bytes(tiff(np.dstack([pixels, np.full_like(pixels[..., :2], 200 * label)]), extra=(0, 0)))


def resized(size: tuple[int, int]) -> Callable[..., None]:
    return lambda path, pixels, *_: Image.fromarray(pixels).resize(size).save(path)


def moved(source: str, target: str, copy: bool = False) -> Callable[[Path, Photos], None]:
    def change(root: Path, _: Photos) -> None:
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copy if copy else shutil.move)(str(root / source), str(root / target))

    return change


def renamed(*pairs: tuple[str, str]) -> Callable[[Path, Photos], None]:
    """Class folders of both splits with other names."""

    def change(root: Path, photos: Photos) -> None:
        for split in ("train", "val"):
            for source, target in pairs:
                moved(f"{split}/{source}", f"{split}/{target}")(root, photos)

    return change


def nested(root: Path, _: Photos) -> None:
    for split in ("train", "val"):
        for name in "ab":
            (root / split / "inner").mkdir(exist_ok=True)
            shutil.move(root / split / name, root / split / "inner" / name)
        shutil.copytree(root / split / "inner", root / split / "other")


def truncated(root: Path, _: Photos) -> None:
    path = root / "train/a/0.png"
    path.write_bytes(path.read_bytes()[:60])


def unbalanced(root: Path, photos: Photos) -> None:
    for number in range(1, TRAIN):
        (root / f"train/b/{number}.png").unlink()
    for number in range(20, 36):
        plainly(root / f"train/a/{number}.png", photos(0, number))


def alike(root: Path, photos: Photos) -> None:
    for split, first in (("train", 30), ("val", 40)):
        (root / split / "A").mkdir()
        for number in range(4):
            plainly(root / split / "A" / f"{number}.png", photos(0, first + number))


def one_colour(root: Path, _: Photos) -> None:
    for path in (root / "train/a").iterdir():
        Image.new("RGB", (24, 24)).save(path)


def animated(root: Path, photos: Photos) -> None:
    frames = [Image.fromarray(photos(0, number)) for number in (30, 31)]
    frames[0].save(root / "train/a/moving.gif", save_all=True, append_images=frames[1:])


SETS: dict[str, Odd] = {
    "plain": Odd(written(plainly), QUIET, QUIET),
    "16 bits, all used": Odd(written(deep(0, 65535)), "seen in 256 levels", "converted"),
    "16 bits, 0 to 199 and 600 to 799": Odd(written(deep(0, 199, 600)), "give --pixel-range 0 1023", "few levels"),
    "16-bit TIFF of 12 bits": Odd(written(deep(0, 4095, 0, tiff), ending="tif"), "--pixel-range 0 4095", "few levels"),
    "16-bit colour of 10 bits": Odd(
        written(lambda path, pixels, *_: path.write_bytes(png(pixels.astype(np.uint16) * 4))),
        "give --pixel-range 0 1023",
        "few levels",
    ),
    "16 bits in one class, 8 in the other": Odd(
        written(by(lambda label, _: label == 0, deep(0, 65535), as_mode("L"))),
        "16-bit, b: 8-bit",
        "bits by class",
    ),
    "float TIFF": Odd(written(floats, ending="tif"), "give --pixel-range", "damaged"),
    "32-bit TIFF of 8 bits": Odd(
        written(lambda path, pixels, *_: path.write_bytes(tiff(pixels[..., 0].astype(np.int32))), ending="tif"),
        QUIET,
        "converted",
    ),
    "1 bit": Odd(written(as_mode("1")), QUIET, "converted"),
    "palette with transparency": Odd(written(palette), "alpha channel", "alpha"),
    "RGBA, alpha always 255": Odd(written(with_alpha(lambda label: 255)), QUIET, "converted"),
    "RGBA, alpha by class": Odd(written(with_alpha(lambda label: 90 * label)), "class a 0, class b 90", "alpha"),
    "RGBA TIFF, alpha by class": Odd(
        written(with_alpha(lambda label: 90 * label), ending="tif"),
        "class a 0, class b 90",
        "alpha",
    ),
    "grey and alpha by class": Odd(written(with_alpha(lambda label: 90 * label, "LA")), "alpha channel", "alpha"),
    "black, with the content in alpha": Odd(written(only_alpha), "below an alpha channel", "only alpha"),
    "TIFF of 5 channels": Odd(written(further, ending="tif"), "further channels", "further channels"),
    "CMYK": Odd(written(as_mode("CMYK"), ending="jpg"), QUIET, "converted"),
    "EXIF turned": Odd(written(turned, ending="jpg"), QUIET, "EXIF rotation"),
    "progressive JPEG": Odd(written(as_mode("RGB", progressive=True), ending="jpg"), QUIET, QUIET),
    "one class grey, one colour": Odd(
        written(by(lambda label, _: label == 0, as_mode("L"), plainly)),
        "a: grey, b: colour",
        "colour by class",
    ),
    "training in colour, validation grey": Odd(
        written(by(lambda _, split: split == "val", as_mode("L"), plainly)),
        "train: colour, val: grey",
        "by split",
    ),
    "one size a class": Odd(
        written(by(lambda label, _: label == 0, resized((20, 20)), resized((40, 40)))),
        "20x20, b: 40x40",
        "size by class",
    ),
    "mixed sizes": Odd(
        written(lambda path, pixels, *_: resized((20 + int(path.stem), 24))(path, pixels)),
        QUIET,
        QUIET,
    ),
    "inverted validation": Odd(
        written(by(lambda _, split: split == "val", lambda path, pixels, *_: plainly(path, 255 - pixels), plainly)),
        "as if one of them were inverted",
        "brightness",
    ),
    "black images": Odd(changed(one_colour), "a single level", "one level"),
    "1 pixel": Odd(written(resized((1, 1))), "of at most 4 pixels a side", "small"),
    "extreme ratio": Odd(written(resized((200, 8))), "times as long as wide", "extreme ratio"),
    "huge": Odd(
        changed(lambda root, _: Image.linear_gradient("L").resize((5200, 4000)).save(root / "train/a/huge.jpg")),
        QUIET,
        "huge",
    ),
    "labels that pandas wrote for missing ones": Odd(
        changed(renamed(("b", "nan"))), "'nan': a class like any other; if it means no label", "missing labels"
    ),
    "names that differ in case": Odd(changed(alike), "differ only by case", "class names alike: classes 'A' and 'a'"),
    "blank after a name": Odd(
        changed(renamed(("b", "a "))),
        "differ only by case, blanks",
        "class names alike",
    ),
    "zeros before a number": Odd(
        changed(renamed(("a", "01"), ("b", "1"))), "the zeros of a number", "class names alike"
    ),
    "a number from a column that lacks some": Odd(
        changed(renamed(("a", "10"), ("b", "10.0"))), "the zeros of a number", "class names alike"
    ),
    "accents of one and of two characters": Odd(
        changed(renamed(("a", "caf\u00e9"), ("b", "cafe\u0301"))), "the characters of an accent", "class names alike"
    ),
    "blank before a name": Odd(
        changed(renamed(("b", " b"))), "blanks around names belong to them: ' b'", "blanks around class names"
    ),
    "several labels in a name": Odd(
        changed(renamed(("a", "cat;dog"), ("b", "dog; cat"))),
        "give --label-separator ';'",
        "joined class names: 2 of 2",
    ),
    "a list of Python as a name": Odd(
        changed(renamed(("a", "['cat', 'dog']"), ("b", "['dog', 'cat', 'cow']"))),
        "give --label-separator ',', and write only the names, without brackets and quotation marks",
        "joined class names: 2 of 2",
    ),
    "a list of Python cut at its commas": Odd(
        changed(renamed(("a", "['cat'"), ("b", "'dog']"))),
        "2 of 2 class names hold a bracket of a list",
        "joined class names: 2 of 2",
    ),
    "brackets as names": Odd(changed(renamed(("a", "["), ("b", "]"))), QUIET, QUIET),
    "numbers as names": Odd(changed(renamed(("a", "10"), ("b", "2"))), QUIET, QUIET),
    "classes one folder too deep": Odd(changed(nested), "holds images itself", "holds images itself"),
    "one image of a class": Odd(changed(unbalanced), "times the training images", "unbalanced"),
    "one image a class in validation": Odd(written(plainly, (TRAIN, 1)), "no class has two images", "few to validate"),
    "PNG named .jpg": Odd(
        written(lambda path, pixels, *_: Image.fromarray(pixels).save(path, "PNG"), ending="jpg"),
        QUIET,
        "other format",
    ),
    "GIF named .png": Odd(
        changed(
            lambda root, photos: (animated(root, photos), moved("train/a/moving.gif", "train/a/0.png")(root, photos))
        ),
        "several pictures",
        "several pictures",
    ),
    "TIFF of two pages": Odd(written(pages, ending="tif"), "several pictures", "several pictures"),
    "truncated": Odd(changed(truncated), "cannot be read", "damaged"),
    "twice in training": Odd(
        changed(moved("train/a/0.png", "train/a/copy.png", copy=True)), "repeats another", "repeated"
    ),
    "in training and validation": Odd(
        changed(moved("train/a/0.png", "val/a/copy.png", copy=True)),
        "trained on, too",
        "in both splits",
    ),
    "in two classes": Odd(
        changed(moved("train/a/0.png", "train/b/copy.png", copy=True)),
        "in more than one class",
        "label conflicts",
    ),
}


def captured(run: Callable[[list[str]], int], line: list[str]) -> list[str]:
    """The lines that a command prints on both streams."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        run(line)
    return text.getvalue().splitlines()


def what_main_says(root: Path, *flags: str) -> list[str]:
    """main.py's warnings and errors."""
    line = "--dataname folder --image-size 16 --arch fc --device cpu --workers 0 --no-progress".split()
    line += ["--datapath", str(root), *flags]
    return [text for text in captured(main.main, line) if text.startswith("main.py:")]


def what_check_data_says(root: Path) -> list[str]:
    """check_data.py's findings and notes."""
    line = "--dataname folder --image-size 16 --workers 0 --no-progress".split()
    line += ["--datapath", str(root), "--output", str(root.parent / "checks")]
    return [text for text in captured(check_data.main, line) if text.startswith("- ")]
