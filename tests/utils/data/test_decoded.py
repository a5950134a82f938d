"""Decoded images come from one whole file that one process wrote, or are decoded; never from anything else."""

import errno
import os
import re
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data import decoded as cache
from utils.data import progress_log
from utils.data.formats import class_folders
from utils.data.formats.readers import ImageFiles
from utils.data.images.decoding import decode_crop
from utils.data.images.levels import Colour
from utils.data.images.view import View
from utils.data.progress_log import ProgressLog

SIZE = 8
COUNT = 12


def write_tree(root, count=COUNT, seed=0):
    """Two class folders of 8x8 RGB PNG files; their pixels (count, 3, 8, 8) in the order of the reader."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = root / ("cat" if number < count // 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:05}.png")
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())


def files_of(root, colour="RGB"):
    return ImageFiles(sorted(map(str, root.rglob("*.png"))), torch.zeros(len(list(root.rglob("*.png")))), colour)


def decoded(images, folder, size=SIZE, fixed_size=True, workers=0, lines=None, is_main=True):
    log = (lambda line: None) if lines is None else lines.append
    view = View(size, whole=fixed_size)
    progress = ProgressLog(log)
    return cache.decoded(images, view, folder, workers=workers, progress=progress, is_main=is_main).pixels


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def tree(tmp_path):
    write_tree(tmp_path / "data" / "train")
    return tmp_path / "data" / "train"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data" / ".decoded"


@pytest.fixture
def no_decoding(monkeypatch):
    """From its call on, whatever is decoded fails the test."""

    def forbid():
        monkeypatch.setattr(cache, "decode", lambda *_, **__: pytest.fail("decoded what the cache holds"))

    return forbid


# ------------------------------------------------------------------------------------------ pixels


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_are_those_of_the_files_decoded_now_or_read_from_the_cache(tmp_path, folder, workers):
    expected = write_tree(tmp_path / "data" / "train")
    images = files_of(tmp_path / "data" / "train")
    in_memory = decoded(images, None, workers=workers)
    first = decoded(images, folder, workers=workers)
    second = decoded(images, folder, workers=workers)
    for pixels in (in_memory, first, second):
        assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
        assert torch.equal(pixels, expected)


@pytest.mark.parametrize("fixed_size", [True, False])
def test_images_of_other_sizes_are_resampled_as_the_decoder_does(tree, fixed_size):
    images = files_of(tree, "L")
    view = View(5)
    expected = [
        decode_crop(path, View(5, whole=True), "L") if fixed_size else decode_crop(path, view, "L")
        for path in images.paths
    ]
    expected = torch.stack(expected)
    assert torch.equal(decoded(images, None, size=5, fixed_size=fixed_size), expected)


def test_what_is_written_to_the_pixels_reaches_neither_the_file_nor_other_maps(tree, folder):
    decoded(files_of(tree), folder)
    changed = decoded(files_of(tree), folder)
    other = decoded(files_of(tree), folder)
    expected = other.clone()
    changed.fill_(7)
    assert torch.equal(other, expected)
    assert torch.equal(decoded(files_of(tree), folder), expected)
    assert (changed == 7).all()


def test_decoding_draws_no_random_number_that_a_cached_set_would_not_draw(tree, folder):
    before = torch.get_rng_state()
    decoded(files_of(tree), folder, workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_is_told_in_lines_where_no_bar_is_shown(tree, monkeypatch):
    monkeypatch.setattr(cache, "CHUNK_BYTES", 5 * 3 * SIZE * SIZE)
    lines = []
    decoded(files_of(tree), None, lines=lines)
    assert lines == []  # faster than a line is due
    monkeypatch.setattr(progress_log, "LOG_SECONDS", 0)
    decoded(files_of(tree), None, lines=lines)
    assert [line.partition(" (")[0] for line in lines] == [f"Decoding: {done} of 12 images" for done in (5, 10, 12)]
    assert all(re.fullmatch(r".+ \([\d,.]+ images/s\)", line) for line in lines)


# ------------------------------------------------------------------------------------------ hit or miss


def test_a_second_call_decodes_nothing_and_says_where_the_file_is(tree, folder, no_decoding):
    expected = decoded(files_of(tree), folder).clone()
    no_decoding()
    lines = []
    assert torch.equal(decoded(files_of(tree), folder, lines=lines), expected)
    assert len(lines) == 1 and str(folder / names(folder)[0]) in lines[0] and "MB" in lines[0]
    assert torch.equal(decoded(files_of(tree), folder, lines=lines, is_main=False), expected)
    assert len(lines) == 1


def fourth(tree):
    return Path(files_of(tree).paths[3])


def with_time(path, ns):
    os.utime(path, ns=(ns, ns))


CHANGES = {
    "touched": lambda tree: with_time(fourth(tree), fourth(tree).stat().st_mtime_ns + 1),
    "another size": lambda tree: lengthen(fourth(tree), keeps_time=True),
    "another name": lambda tree: fourth(tree).rename(fourth(tree).with_name("other.png")),
    "one more": lambda tree: Image.new("RGB", (SIZE, SIZE), (1, 2, 3)).save(tree / "cat" / "new.png"),
}


def lengthen(path, end=b"\0", keeps_time=False):
    before = path.stat().st_mtime_ns
    with open(path, "ab") as file:
        file.write(end)
    if keeps_time:
        with_time(path, before)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_the_files_is_decoded_anew(tree, folder, change):
    decoded(files_of(tree), folder)
    before = names(folder)
    change(tree)
    images = files_of(tree)
    assert torch.equal(decoded(images, folder), decoded(images, None))
    assert len(set(names(folder)) - set(before)) == 1


@pytest.mark.parametrize("moved", [True, False])
def test_files_of_equal_size_and_time_that_change_places_are_decoded_anew(tree, folder, moved):
    first, second = map(Path, files_of(tree).paths[3:5])
    for path in (first, second):
        path.write_bytes(path.read_bytes().ljust(1000, b"\0"))
        with_time(path, 1)
    before = decoded(files_of(tree), folder).clone()
    if moved:
        first.rename(tree / "aside")
        second.rename(first)
        (tree / "aside").rename(second)
    else:
        for path, content in ((first, second.read_bytes()), (second, first.read_bytes())):
            path.write_bytes(content)
            with_time(path, 1)
    order = [0, 1, 2, 4, 3, *range(5, len(before))]
    assert torch.equal(decoded(files_of(tree), folder), before[order])


def test_other_size_colour_cropping_order_and_decoder_have_other_fingerprints(tree, folder, monkeypatch):
    images = files_of(tree)
    views = [
        View(8),
        View(8, 0.9),
        View(8, crop_mode="squash"),
        View(8, crop_mode="border"),
        View(8, crop_mode="border", border=(9, 9, 9)),
        View(8, interpolation="bicubic"),
    ]
    backwards = ImageFiles(images.paths[::-1], images.labels, "RGB")
    found = [
        cache.fingerprint(images, View(8, whole=True), folder),
        cache.fingerprint(images, View(9, whole=True), folder),
        *(cache.fingerprint(images, view, folder) for view in views),
        cache.fingerprint(files_of(tree, "L"), View(8, whole=True), folder),
        *(cache.fingerprint(files_of(tree, Colour("L", (0, high))), View(8, whole=True), folder) for high in (9, 99)),
        cache.fingerprint(backwards, View(8, whole=True), folder),
    ]
    monkeypatch.setattr(cache, "DECODING_VERSION", cache.DECODING_VERSION + 1)
    found.append(cache.fingerprint(images, View(8, whole=True), folder))
    assert len(set(found)) == len(found)


def test_the_text_that_names_cached_files_is_that_of_caches_that_exist():
    text = "View(size=8, crop_pct=0.875, crop_mode='center', interpolation='bilinear', border=(0,))"
    assert repr(View(8)) == repr(View(8, whole=True)) == text


def test_a_tree_moved_with_its_cache_is_not_decoded_again(tree, folder, tmp_path, no_decoding, monkeypatch):
    expected = decoded(files_of(tree), folder).clone()
    (tmp_path / "data").rename(tmp_path / "moved")
    no_decoding()
    assert torch.equal(decoded(files_of(tmp_path / "moved" / "train"), tmp_path / "moved" / ".decoded"), expected)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(decoded(files_of(Path("moved/train")), Path("moved/.decoded")), expected)


@pytest.mark.parametrize("other", ["data/val", "data2/train"])
def test_two_trees_with_alike_files_do_not_share_a_file(tree, tmp_path, folder, other):
    write_tree(tmp_path / other)
    for path in (*files_of(tree).paths, *files_of(tmp_path / other).paths):
        with_time(path, 0)
    own, others = (cache.fingerprint(files_of(root), View(8, whole=True), folder) for root in (tree, tmp_path / other))
    assert own != others


def test_readers_do_not_see_the_cache_in_the_data_folder(tmp_path):
    write_tree(tmp_path)
    folder = cache.folder_for(parse(["--dataname", "folder", "--datapath", str(tmp_path)]).data)
    before = class_folders.read_tree(tmp_path)
    decoded(before.train, folder)
    assert folder.parent == tmp_path and len(names(folder)) == 1
    after = class_folders.read_tree(tmp_path)
    assert [*before.train.paths] == [*after.train.paths] and before.classes == after.classes


def test_the_folder_is_that_of_the_flag_else_in_the_data_else_none():
    assert cache.folder_for(parse([]).data) is None
    settings = parse(["--dataname", "folder", "--datapath", "d", "--cache-dir", "c"]).data
    assert cache.folder_for(settings) == Path("c")


# ------------------------------------------------------------------------------------------ damage


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lengthen,
    "empty": lambda path: os.truncate(path, 0),
    "an image that is not there": lambda path: lengthen(path, b"[12]"),
    "other shape": lambda path: np.save(path, np.zeros((COUNT, 3, SIZE * SIZE), dtype=np.uint8)),
    "other type": lambda path: np.save(path, np.zeros((COUNT, 3, SIZE, SIZE), dtype=np.int8)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_not_what_it_should_be_is_made_anew_and_that_is_said(tree, folder, damage):
    expected = decoded(files_of(tree), folder).clone()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.unlink()  # the pixels above still map the old one
    path.write_bytes(whole)
    damage(path)
    lines = []
    assert torch.equal(decoded(files_of(tree), folder, lines=lines), expected)
    assert path.read_bytes() == whole and len(names(folder)) == 1
    assert str(path) in lines[0] and "again" in lines[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_damaged_image_is_named_and_nothing_is_left(tree, folder, workers, monkeypatch):
    monkeypatch.setattr(cache, "CHUNK_BYTES", 1)  # an image a chunk, so that workers meet both
    paths = files_of(tree).paths
    for number in (4, 7):
        Path(paths[number]).write_bytes(b"no image")
    with pytest.raises(UserError, match="00004.png: cannot be read") as caught:
        decoded(files_of(tree), folder, workers=workers)
    assert str(caught.value).startswith(paths[4]) and "Traceback" not in str(caught.value)
    assert names(folder) == []


def test_a_file_that_appears_between_the_look_and_the_lock_is_used(tree, folder, monkeypatch, no_decoding):
    expected = decoded(files_of(tree), folder).clone()
    (path,) = folder.iterdir()
    path.rename(folder / "aside")

    @contextmanager
    def claim_late(*_):
        (folder / "aside").rename(path)
        yield

    monkeypatch.setattr(cache, "claimed", claim_late)
    no_decoding()
    assert torch.equal(decoded(files_of(tree), folder), expected)
    assert names(folder) == [path.name]


# ------------------------------------------------------------------------------------------ no place


def assert_decoded_in_memory(tree, folder):
    lines = []
    assert torch.equal(decoded(files_of(tree), folder, lines=lines), decoded(files_of(tree), None))
    assert len(lines) == 1 and "--cache-dir" in lines[0] and str(folder) in lines[0]


def test_a_folder_that_cannot_be_made_is_one_warning_and_the_images_stay_in_memory(tree, folder):
    folder.write_text("a file in its place")
    assert_decoded_in_memory(tree, folder)
    assert folder.read_text() == "a file in its place"


def test_a_full_disk_is_one_warning_and_nothing_half_written_stays(tree, folder, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))  # after decoding; other moments: test_kept.py
    assert_decoded_in_memory(tree, folder)
    assert names(folder) == []
