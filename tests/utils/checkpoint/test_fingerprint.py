"""Fingerprints tell another set from one in which a file was repaired."""

import os
from pathlib import Path

import pytest

from utils.checkpoint.fingerprint import ends_with, joined, of_all, same_images
from utils.data.data_set import FIRST_BYTES, some_contents
from utils.data.formats.own import LOOKED_AT

OLD = "a" * 64
FILES = [b"one", b"two", b"three", b"four"]
NEW = joined(OLD, FILES)
PROCESSED = joined(OLD, [b"1", b"2", b"3", b"four"])
HALF = joined(OLD, [b"1", b"2", b"three", b"four"])  # as of two splits, one of which was processed
REPAIRED = joined(OLD, [b"one", b"2", b"three", b"four"])
OTHER_LISTING = joined("d" * 64, FILES)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (NEW, NEW, True),
        (OLD, OLD, True),
        (OLD, NEW, True),
        (NEW, REPAIRED, True),
        (NEW, PROCESSED, False),
        (NEW, HALF, False),
        (NEW, "d" * 64, False),
        (NEW, OTHER_LISTING, False),
        (None, NEW, False),
        (None, None, False),
        ("", NEW, False),
        (joined(OLD, []), joined(OLD, []), True),
    ],
)
def test_the_listing_and_most_of_the_contents_tell(one, other, same):
    assert same_images(one, other) is same and same_images(other, one) is same


def test_contents_are_those_of_files_over_the_whole_list(tmp_path):
    paths = [str(tmp_path / f"{number}") for number in range(3 * LOOKED_AT)]
    for number, path in enumerate(paths):
        Path(path).write_text(f"image {number}")
    before = some_contents(paths)

    def changed_by(content, place):
        path = Path(paths[place])
        kept = path.read_bytes()
        path.write_bytes(content)
        differs = some_contents(paths) != before
        path.write_bytes(kept)
        return differs

    assert changed_by(b"other", 0) and changed_by(b"other", -1) and not changed_by(b"other", 1)
    assert some_contents(paths) == before, "times do not count"
    assert changed_by(b"image 0" + bytes(FIRST_BYTES), 0), "a longer file"
    assert sum(changed_by(b"other", place) for place in range(len(paths))) == LOOKED_AT


def test_files_that_cannot_be_read_are_no_hindrance(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "image").write_bytes(b"image")
    found = [some_contents([str(tmp_path / name)]) for name in ("pipe", "missing", "image", ".")]
    assert found[1] == found[3] and len({content for contents in found for content in contents}) == 3


def test_what_several_weights_were_trained_on_is_one_set_or_none_of_theirs():
    one = joined("a", [b"x"])
    two = joined("b", [b"x"])
    assert of_all([one, one]) == one
    assert of_all(["a", one]) == of_all([one, "a"]) == one, "of a version that looked into no file"
    both = of_all([one, two])
    assert both == of_all([two, one, one]) and not same_images(both, one) and not same_images(both, two)


def test_the_last_files_are_those_to_validate_on():
    stored = joined("a", [b"t1", b"t2", b"v1", b"v2"])
    assert ends_with(stored, [b"v1", b"v2"]) and ends_with(stored, [b"v1", b"repaired"])
    assert not ends_with(stored, [b"t1", b"t2"]) and not ends_with(stored, [b"n1", b"n2", b"n3"])
    assert ends_with("of a version that looked into no file", [b"v1"])
