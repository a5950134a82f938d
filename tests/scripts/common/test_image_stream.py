"""Files of a command line: which, in which order, with which pixels, and what becomes of those that are no image."""

import io
import itertools
import os
import struct
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from scripts.common.image_stream import image_names, stream
from tests.helpers import exif_that_turns, file_of, mistakes_of, png_that_says
from utils.config.settings import UserError
from utils.data.preprocessing import Preprocessing

OF_FILES = Preprocessing(
    24, 32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), crop_pct=0.875, crop_mode="center", interpolation="bicubic"
)
STORED = Preprocessing(
    28, 28, (0.1,), (0.3,), crop_pct=1.0, crop_mode="center", interpolation="bilinear", stored_size=28
)


def picture(width, height, mode="RGB", seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of many sizes, formats and colours, some in folders, and what is not to be read."""
    root = tmp_path_factory.mktemp("images")
    (root / "b").mkdir()
    (root / ".hidden").mkdir()
    picture(60, 40).save(root / "a.jpg", quality=90)
    picture(41, 90, seed=1).save(root / "b" / "tall.jpg", progressive=True)
    picture(33, 33, "L", seed=2).save(root / "b" / "grey.PNG")
    picture(50, 30, "P", seed=3).save(root / "b" / "palette.png")
    picture(64, 48, seed=4).save(root / "c turned.jpeg", exif=exif_that_turns())
    picture(70, 20, "RGBA", seed=5).save(root / "d.webp", lossless=True)
    for name in ("notes.txt", "phone.heic", "b/more.HEIC", "b/nameless", ".hidden/e.jpg", ".f.jpg"):
        (root / name).write_bytes(b"x")
    (root / "loop").symlink_to(root, target_is_directory=True)
    return root


IN_ORDER = ["a.jpg", "b/grey.PNG", "b/palette.png", "b/tall.jpg", "c turned.jpeg", "d.webp"]


def below(root, names):
    return [os.path.relpath(name, root) for name in names]


def test_a_folder_means_all_its_images_by_name_and_what_is_not_read_is_counted(folder):
    unread = Counter()
    assert below(folder, image_names([str(folder)], unread)) == IN_ORDER
    assert unread == {".heic": 2, "without an ending": 1}


def test_class_folders_may_be_links_and_links_that_lead_back_are_left_out(folder, tmp_path):
    (tmp_path / "cat").symlink_to(folder / "b", target_is_directory=True)
    (tmp_path / "dog").mkdir()
    picture(9, 9).save(tmp_path / "dog" / "1.png")
    (tmp_path / "dog" / "deeper").symlink_to(folder, target_is_directory=True)
    (tmp_path / "up").symlink_to("..", target_is_directory=True)
    (tmp_path / "dog" / "up").symlink_to(tmp_path, target_is_directory=True)
    names = ["cat/grey.PNG", "cat/palette.png", "cat/tall.jpg", "dog/1.png"]
    assert below(tmp_path, image_names([str(tmp_path)])) == names


def test_a_pattern_names_an_image_once_though_it_matches_its_folders_too(tmp_path):
    for name in ("a.png", "b/c.png", "b/d/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = list(image_names([f"{tmp_path}/**"]))
    assert sorted(names) == [f"{tmp_path}/{name}" for name in ("a.png", "b/c.png", "b/d/e.png")]


def test_files_patterns_and_lists_keep_their_order_and_spelling(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    (tmp_path / "list.txt").write_bytes(b"./b/../a.jpg\r\n\nno\xff such.png\nb/tall.jpg")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"d.webp\nd.webp\n")))
    with pytest.raises(UserError, match="- stands twice"):
        image_names(["-", "-"])
    names = list(image_names(["d.webp", "**/*a*.[jJpP]*", f"@{tmp_path}/list.txt", "-"]))
    listed = ["./b/../a.jpg", os.fsdecode(b"no\xff such.png"), "b/tall.jpg"]
    assert names[:1] + names[-5:] == ["d.webp", *listed, "d.webp", "d.webp"]
    assert names[1:-5] == sorted(names[1:-5]) and {"a.jpg", "b/palette.png", "b/tall.jpg"} <= set(names[1:-5])


def test_a_file_whose_name_begins_like_a_list_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "@x.jpg").touch()
    assert list(image_names(["@x.jpg"])) == ["@x.jpg"]


def test_arguments_that_mean_nothing_are_named_together(folder, tmp_path):
    (tmp_path / "only.heic").touch()
    os.mkfifo(tmp_path / "pipe")
    bad = ["missing.jpg", f"{folder}/*.gif", "@missing.txt", str(tmp_path), str(tmp_path / "pipe"), "a\0b", ""]
    mistakes = mistakes_of(image_names, [str(folder), *bad])
    assert len(mistakes) == len(bad)
    assert "missing.jpg: no such file" in mistakes[0] and "matches" in mistakes[1]
    assert "convert .heic files" in mistakes[3]


@pytest.mark.parametrize(("preprocessing", "workers"), [(OF_FILES, 0), (STORED, 0), (OF_FILES, 2)])
def test_images_are_those_of_the_preprocessing_in_order(folder, preprocessing, workers):
    names = list(image_names([str(folder)])) * 3
    batches = list(stream(names, preprocessing, 4, workers))
    assert [len(batch.paths) for batch in batches] == [4, 4, 4, 4, 2]
    assert [path for batch in batches for path in batch.paths] == names
    assert {error for batch in batches for error in batch.errors} == {None}
    seen = torch.cat([batch.images for batch in batches])
    for name, image in zip(names, seen, strict=True):
        torch.testing.assert_close(image, preprocessing(Image.open(name)), rtol=0, atol=1e-6)


def test_an_endless_list_is_read_no_further_than_needed(folder):
    taken = itertools.count()

    def endless():
        while True:
            next(taken)
            yield folder / "a.jpg"

    batches = stream(endless(), OF_FILES, 2, 2)
    for _ in range(10):
        assert next(batches).paths == (str(folder / "a.jpg"),) * 2
    batches.close()
    assert next(taken) <= 2 * (10 + 2 * 5)  # batches given, and what two workers read ahead


def jpeg_that_says(width, height):
    data = bytearray(file_of(picture(16, 16), "JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def damaged(root):
    """Files that hold no image, and what the error of each says."""
    contents = {
        "bomb.png": (png_that_says(20_000, 20_000), "bomb"),
        "bomb.jpg": (jpeg_that_says(20_000, 20_000), "bomb"),
        "cut.jpg": (file_of(picture(90, 90), "JPEG")[:-900], "truncated"),
        "empty.png": (b"", "empty"),
        "program.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "PostScript"),
        "text.jpg": (b"no image at all", "not an image in a known format"),
        "too short.png": (png_that_says(300, 300), ""),
    }
    for name, (content, _) in contents.items():
        (root / name).write_bytes(content)
    os.mkfifo(root / "pipe.png")
    said = {name: text for name, (_, text) in contents.items()}
    return said | {"pipe.png": "no file", "missing.png": "No such file", ".": "folder"}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_no_image_is_an_error_in_one_line_and_the_others_come(folder, tmp_path, workers):
    said = damaged(tmp_path)
    good = str(folder / "a.jpg")
    names = [name for bad in said for name in (str(tmp_path / bad), good)]
    batches = list(stream(names, OF_FILES, 3, workers))
    errors = dict(zip(names, itertools.chain.from_iterable(batch.errors for batch in batches), strict=True))
    assert errors.pop(good) is None and all(errors.values()) and len(errors) == len(said)
    for name, text in said.items():
        error = errors[str(tmp_path / name)]
        assert text in error and "\n" not in error and str(tmp_path) not in error
    images = torch.cat([batch.images for batch in batches])
    expected = OF_FILES(Image.open(good))
    for image in images[1::2]:
        torch.testing.assert_close(image, expected, rtol=0, atol=1e-6)
