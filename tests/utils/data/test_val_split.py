"""``--val-split``: each image stays on its side, whatever happens to others, to the folder, or to the platform."""

import dataclasses
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.utils.data.loading import CPU, evaluated, read_tree, save
from utils.checkpoint.resume import ResumePoint
from utils.config.arguments import parse
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.data.datasets import get_data, known_to
from utils.data.formats.held_out import held_out, key_of

SHARES = (0.1, 0.25, 0.5, 0.8)
STEMS = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=6)
FILES = st.builds("{}/{}.png".format, st.sampled_from("ab"), STEMS)


def validated(names, share):
    """Of files CLASS/NAME those that are validated, and the classes that had to lend an image to one side."""
    names, classes = sorted(names), sorted({name.split("/")[0] for name in names})
    labels = np.array([classes.index(name.split("/")[0]) for name in names])
    settings = DataSettings(dataname="folder", val_split=share)
    mask, warnings = held_out((key_of(name.encode()) for name in names), labels, classes, settings)
    for label in range(len(classes)):
        assert 0 < mask[labels == label].sum() < (labels == label).sum(), "both sides have an image of each class"
    lent = warnings[0].rpartition(": ")[2].split(", ") if warnings else ()
    return {name for name, chosen in zip(names, mask, strict=True) if chosen}, {*lent}


@given(st.sets(FILES, max_size=40), st.sets(FILES, max_size=40), st.sampled_from(SHARES))
def test_no_image_changes_sides_as_others_are_added_removed_or_renamed(old, more, share):
    always = {f"{label}/{number}.png" for label in "ab" for number in range(4)}
    old = old | always
    before, lent = validated(old, share)
    after, lend = validated(old | more, share)
    for label in "ab":
        ours, theirs = ({name for name in side if name in old and name[0] == label} for side in (before, after))
        if label not in lent | lend:
            assert ours == theirs
        elif len(ours) == 1:  # which the class had lent, perhaps; nothing that was trained on is validated
            assert theirs <= ours


@pytest.mark.parametrize("by", ["name", "draw"])
def test_a_class_without_an_image_is_nobodys_mistake(by):
    settings = DataSettings(dataname="folder", val_split=0.5, val_split_by=by)
    chosen, warnings = held_out((str(number).encode() for number in range(20)), np.full(20, 1), "abc", settings)
    assert 0 < chosen.sum() < 20 and warnings == ()


def test_the_share_is_near_what_was_asked_and_a_larger_one_holds_the_smaller():
    names = [f"{label}/{number}.jpg" for label in "abcdefghij" for number in range(1000)]
    tenth, fifth = (validated(names, share)[0] for share in (0.1, 0.2))
    assert tenth < fifth
    # Each image is validated with probability p: the standard deviation of n is sqrt(n p (1 - p)), 30 and 9.5 here.
    assert abs(len(tenth) - 1000) < 4 * 30
    assert all(abs(sum(name[0] == label for name in tenth) - 100) < 4 * 9.5 for label in "abcdefghij")


def test_a_class_of_two_has_one_image_on_each_side_and_that_is_said():
    settings = DataSettings(dataname="folder", val_split=0.01)
    keys = [b"a/1", b"a/2", *(b"b/%d" % number for number in range(1000))]
    mask, (line,) = held_out(keys, np.array([0, 0] + [1] * 1000), "ab", settings)
    assert mask[:2].sum() == 1
    assert line.startswith("--val-split 0.01: 1 of 2 classes are so small") and line.endswith(": a")
    with pytest.raises(UserError, match=r"class a has 1 image\(s\); it needs one to train on and one to validate on"):
        held_out([b"a/1", b"b/1", b"b/2"], np.array([0, 1, 1]), "ab", settings)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("a/x.jpg", "a/x.png"),  # the same picture in another format
        ("a/X.JPG", "A/x.jpg"),
        ("a/sub.1/x.jpg", "a/Sub.1/x.JPEG"),
        (unicodedata.normalize("NFC", "é/Ångström.png"), unicodedata.normalize("NFD", "é/Ångström.png")),
        ("a/\udcff.png", "a/\udcff.png"),  # a name that is no UTF-8
    ],
)
def test_names_that_a_file_system_may_change_are_one(name, other):
    one, two = (text.encode("utf-8", "surrogateescape") for text in (name, other))
    assert key_of(one) == key_of(two)


@pytest.mark.parametrize("other", ["a/y.jpg", "b/x.jpg", "a/sub/x.jpg", "a/x.1.jpg", "ax.jpg"])
def test_names_of_different_files_differ(other):
    assert key_of(b"a/x.jpg") != key_of(other.encode())


def test_what_a_name_decides_stays_the_same_from_version_to_version():
    """A table, made once: with another one the runs of before could not go on."""
    keys = [key_of(b"class/%03d.png" % number) for number in range(40)]
    mask, _ = held_out(keys, np.zeros(40, dtype=int), ["class"], DataSettings(val_split=0.2))
    assert np.flatnonzero(mask).tolist() == [9, 13, 26, 28, 31, 39]


def test_older_runs_go_on_with_the_draw_that_they_began_with():
    labels = np.repeat([0, 1], 20)
    settings = parse(["--dataname", "folder", "--datapath", ".", "--val-split", "0.2", "--val-split-by", "draw"]).data
    mask, warnings = held_out((), labels, "ab", settings)
    # A table, made by the version before names decided.
    assert (np.flatnonzero(mask).tolist(), warnings) == ([6, 8, 14, 19, 21, 24, 25, 32], ())


# ------------------------------------------------------------------------ images that weights were trained on


@pytest.fixture
def tree(tmp_path):
    for number in range(60):
        save(tmp_path / "tree" / "ab"[number % 2] / f"{number}.png", number)
    return tmp_path / "tree"


SPLIT = ("--val-split", "0.2")
DRAW = ("--val-split-by", "draw")
OTHER = "old.pt was trained on other images than these"


def test_of_the_same_tree_the_validation_images_that_weights_were_trained_on_are_counted(tree):
    drawn, trained = read_tree(tree, *SPLIT, *DRAW)
    named = read_tree(tree, *SPLIT)[0].validation.paths
    seen = len(set(named) & set(drawn.train.paths))
    assert 0 < seen < len(named)
    trained.state["settings"].pop("val_split_by")  # as of an older run
    for flags, line in (
        (DRAW, ""),
        (
            (),
            f"old.pt was trained on {seen} of the {len(named)} validation images; with --val-split 0.2 "
            "--val-split-by draw on none of them",
        ),
    ):
        assert read_tree(tree, *SPLIT, *flags, trained=trained)[0].seen == line
    next_one = read_tree(tree, *SPLIT)[1]
    next_one.state["seen"] = line
    assert read_tree(tree, *SPLIT, trained=next_one)[0].seen == line, "what a run began with had seen these"
    assert read_tree(tree, "--val-split", "0.1", trained=read_tree(tree, *SPLIT)[1])[0].seen == "", "of a fifth a part"


def test_of_a_tree_that_has_grown_names_tell_and_a_draw_does_not(tree):
    (_, named) = read_tree(tree, *SPLIT)
    (_, drawn) = read_tree(tree, *SPLIT, *DRAW)
    save(tree / "a" / "added.png")
    count = len(read_tree(tree, *SPLIT)[0].validation)
    why = "the data have changed since old.pt was trained: by their names,"
    assert read_tree(tree, *SPLIT, trained=named)[0].seen == f"{why} on none of the {count} validation images"
    larger = read_tree(tree, "--val-split", "0.4")[0].validation.paths
    fifth = read_tree(tree, *SPLIT)[0].train.paths
    assert read_tree(tree, "--val-split", "0.4", trained=named)[0].seen == (
        f"{why} perhaps on {len(set(larger) & set(fifth))} of the {len(larger)} validation images"
    )
    for flags in ((), DRAW):
        line = read_tree(tree, *SPLIT, *flags, trained=drawn)[0].seen
        assert line.startswith(f"{OTHER}, perhaps on some of the ") and line.endswith("are added or removed")


def test_weights_of_other_or_unknown_images_are_told_apart(tree):
    data, trained = read_tree(tree, *SPLIT)
    for changed, line in (
        ({"fingerprint": None}, ""),  # another program's
        ({"fingerprint": "other", "settings": {"dataname": "imagenet"}}, f"{OTHER}, perhaps on some of the "),
        ({"fingerprint": "other", "settings": {"dataname": "folder"}}, f"{OTHER}, perhaps on some of the "),
    ):
        other = ResumePoint(Path("old.pt"), trained.state | changed, digest="")
        found = read_tree(tree, *SPLIT, trained=other)[0].seen
        assert found == (line and f"{line}{len(data.validation)} validation images")
    digits = parse([]).data
    imagenet = ResumePoint(Path("old.pt"), {"settings": {"dataname": "imagenet"}, "fingerprint": "other"}, digest="")
    assert known_to(get_data(digits, CPU), imagenet, digits).seen == "", "these are not of ImageNet"


def test_validation_images_that_changed_at_their_place_are_told_when_they_are_evaluated(tree, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(tree, root / "train")
    shutil.copytree(tree, root / "val")
    _, trained = read_tree(root)
    assert evaluated(root, trained=trained).seen == ""
    count = len(list((root / "val").rglob("*.png")))
    for numbers, told in (([0.5, count], False), ([0.5, count + 1], True), ([0.0, 0], False)):
        knowing = dataclasses.replace(trained, state=trained.state | {"progress": {"last_validation": numbers}})
        seen = evaluated(root, trained=knowing).seen
        assert (f": {count} now, {count + 1} then" in seen) is told is bool(seen)
    for number in range(30):
        shutil.copy(root / "train/a/0.png", root / "val/a" / f"0{number}.png")
    line = "the validation images have changed since old.pt was trained, perhaps on some of these"
    assert evaluated(root, trained=trained).seen == line
    shutil.copytree(root / "val", tmp_path / "test")
    assert evaluated(tmp_path / "test", trained=trained).seen == "", "one gives other images to test"
