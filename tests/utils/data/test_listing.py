"""Lists of class folders: found by threads what one walk finds, kept, and never believed when they no longer hold."""

import hashlib
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from tests.utils.data.loading import read_folder
from utils.checkpoint.fingerprint import listing_of
from utils.config.settings import UserError
from utils.data.formats import class_folders, listing
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.listing import Lister
from utils.data.progress_log import ProgressLog

NAMES = ("ants", "bees", "a wasp", "überall")
LONG_AGO_NS = 10**18


def plant(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


@pytest.fixture
def tree(tmp_path):
    """Class folders with odd names, folders in folders, and files that are no images; all as old as the hills."""
    root = tmp_path / "data" / "train"
    for name in NAMES:
        for number in range(12):
            plant(root / name / f"{number}.JPEG")
    plant(root / "bees" / "deep" / "er" / "7.png")
    plant(root / "bees" / "deep.png")
    plant(root / "ants" / "picture.gif")
    plant(root / "ants" / ".hidden.png")
    plant(root / "ants" / ".ipynb_checkpoints" / "copy.png")
    plant(root / "ants" / "notes.txt")
    (root / "ants" / "dead link.png").symlink_to("nowhere")
    (root / "ants" / "loop").symlink_to(root)
    os.mkfifo(root / "ants" / "pipe.png")
    return root


@pytest.fixture
def slow(monkeypatch):
    """Listing always takes long enough to be worth keeping, and folders have not been changed just now."""
    monkeypatch.setattr(listing, "WORTH_KEEPING_SECONDS", 0)
    monkeypatch.setattr(listing, "SETTLED_NS", -LONG_AGO_NS)


def lister(tree, said=None, **options):
    log = print if said is None else said.append
    return Lister(tree.parent / ".decoded", progress=ProgressLog(log), **{"keeps": True, **options})


def files_of(tree, its_lister=None):
    return class_folders.image_files(tree, class_folders.class_names(tree), its_lister or Lister())


def kept_file(tree):
    (path,) = (tree.parent / ".decoded").iterdir()
    return path


def same(first, second):
    return (
        [*first[0].paths] == [*second[0].paths] and first[0].labels.equal(second[0].labels) and first[1:] == second[1:]
    )


def test_threads_find_what_torchvision_finds_in_the_same_order(tree):
    images, unread = files_of(tree)
    os.unlink(tree / "ants" / "pipe.png")  # torchvision takes it for an image, and follows the loop
    os.unlink(tree / "ants" / "loop")
    os.unlink(tree / "ants" / ".hidden.png")
    shutil.rmtree(tree / "ants" / ".ipynb_checkpoints")
    theirs = ImageFolder(str(tree)).samples
    assert sorted(zip(images.paths, images.labels.tolist(), strict=True)) == sorted(theirs)
    assert images.labels.tolist() == sorted(images.labels.tolist()) and unread == {".gif": 1, listing.LINKED: 1}
    for label in range(len(NAMES)):
        of_class = [path for path, its_label in zip(images.paths, images.labels, strict=True) if its_label == label]
        assert of_class == sorted(of_class)


def test_paths_are_a_sequence_like_the_list_of_them(tree):
    paths = files_of(tree)[0].paths
    expected = [*paths]
    assert isinstance(paths, FilePaths) and len(paths) == len(expected) == 51
    assert [paths[place] for place in range(-51, 51)] == expected * 2
    assert [*paths.take(np.array([50, 0, 7]))] == [expected[50], expected[0], expected[7]]
    for place in (51, -52):
        with pytest.raises(IndexError):
            paths[place]
    assert len(FilePaths.joined(tree, b"")) == 0 and [*FilePaths.joined(tree, b"")] == []
    assert paths.identity.split(b"\0") == [os.fsencode("/".join(Path(path).parts[-2:])) for path in expected]


def test_names_that_are_no_text_are_listed_kept_and_fingerprinted(tree, slow):
    odd = os.fsdecode(b"\xff\xfe.png")
    plant(tree / "bees" / odd)
    assert same(files_of(tree, lister(tree)), files_of(tree, lister(tree)))
    paths = files_of(tree, lister(tree))[0].paths
    assert str(tree / "bees" / odd) in [*paths] and b"bees/\xff\xfe.png" in paths.identity


def test_a_second_start_reads_the_list_and_no_folder(tree, slow, monkeypatch):
    said = []
    first = files_of(tree, lister(tree, said))
    monkeypatch.setattr(listing, "_list_class_folder", None)  # any listing would fail
    second = files_of(tree, lister(tree, said))
    assert same(first, second) and second[0].paths.identity == first[0].paths.identity
    assert "51 files in" in said[-2] and "51 files, read in" in said[-1]
    (tree.parent / ".decoded").rename(tree.parent.parent / "elsewhere")
    assert len([*tree.parent.iterdir()]) == 1, "nothing else is left behind"


def test_a_tree_that_moved_together_with_its_list_needs_no_other(tree, slow):
    files_of(tree, lister(tree))
    moved = tree.parent.rename(tree.parent.parent / "moved") / "train"
    said = []
    assert files_of(moved, lister(moved, said))[0].paths[0].startswith(str(moved))
    assert len(said) == 1 and "read in" in said[0]


CHANGES = {
    "a new file": lambda tree: plant(tree / "ants" / "new.png"),
    "a file less": lambda tree: os.unlink(tree / "bees" / "3.JPEG"),
    "a file below": lambda tree: plant(tree / "bees" / "deep" / "er" / "new.png"),
    "another name": lambda tree: (tree / "ants" / "3.JPEG").rename(tree / "ants" / "x.JPEG"),
    "a new class": lambda tree: plant(tree / "cats" / "1.png"),
    "a class less": lambda tree: (tree / "a wasp").rename(tree.parent / "gone"),
    "a folder less": lambda tree: (tree / "bees" / "deep").rename(tree.parent / "gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_list_that_no_longer_holds_is_noticed_even_where_times_are_set_back(tree, slow, change):
    files_of(tree, lister(tree))
    folders = {path: path.stat() for path in (tree, *tree.rglob("*")) if path.is_dir() and not path.is_symlink()}
    time.sleep(0.01)  # the clock of a file system ticks every 4 ms
    CHANGES[change](tree)
    for path, status in folders.items():
        if path.exists():
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as tar and rsync do
    said = []
    found = files_of(tree, lister(tree, said))
    assert same(found, files_of(tree)), "what is there now"
    assert "since the files were listed" in said[0] and f"listing {tree} again" in said[0]
    said.clear()
    assert same(files_of(tree, lister(tree, said)), found) and "read in" in said[0], "and the new list is kept"


def test_any_damage_to_the_file_is_noticed_and_repaired(tree, slow):
    whole = files_of(tree, lister(tree))
    path = kept_file(tree)
    content = path.read_bytes()
    damaged = [b"", content[:30], content[:-1], content[: len(content) // 2], b"\0" * len(content), b"not ours\n" * 99]
    damaged += [
        content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :] for place in range(0, len(content), 97)
    ]
    for part in damaged:
        path.write_bytes(part)
        said = []
        assert same(files_of(tree, lister(tree, said)), whole)
        assert said[0].startswith(f"{path}: is no whole list of files") and path.read_bytes() == content


def test_a_list_of_other_rules_is_made_again(tree, slow, monkeypatch):
    files_of(tree, lister(tree))
    endings = (*listing.IMAGE_ENDINGS, ".txt")
    monkeypatch.setattr(listing, "IMAGE_ENDINGS", endings)
    said = []
    assert len(files_of(tree, lister(tree, said))[0]) == 52 and "another version" in said[0]


def test_a_folder_that_was_changed_just_now_is_listed_but_not_kept(tree, slow, monkeypatch):
    monkeypatch.setattr(listing, "SETTLED_NS", 3600 * 10**9)
    said = []
    assert len(files_of(tree, lister(tree, said))[0]) == 51
    assert (
        "is not kept" in said[0]
        and "was changed just before" in said[0]
        and [*(tree.parent / ".decoded").iterdir()] == []
    )


def test_a_quick_listing_and_a_dry_run_leave_nothing_behind(tree, slow, monkeypatch):
    files_of(tree, lister(tree, keeps=False))
    monkeypatch.setattr(listing, "WORTH_KEEPING_SECONDS", 60)
    files_of(tree, lister(tree))
    assert [path.name for path in tree.parent.iterdir()] == ["train"]


def test_where_nothing_can_be_kept_a_line_says_so_and_the_files_are_listed(tree, slow):
    (tree.parent / ".decoded").write_text("in the way")
    said = []
    assert len(files_of(tree, lister(tree, said))[0]) == 51
    assert said == [line for line in said if line.startswith("warning: the list of files cannot be kept")]


def test_who_waited_for_another_process_reads_what_that_one_kept(tree, slow, monkeypatch):
    other = lister(tree)
    claimed = listing.claimed

    @contextmanager
    def wait(path, words, log):
        log(words)
        monkeypatch.setattr(listing, "claimed", claimed)
        files_of(tree, other)  # in the other process
        monkeypatch.setattr(listing, "_list_class_folder", None)  # any listing would fail
        yield

    expected = files_of(tree)
    monkeypatch.setattr(listing, "claimed", wait)
    said = []
    assert same(files_of(tree, lister(tree, said)), expected)
    assert said == [f"Waiting until the files below {tree} are listed"]


def test_progress_is_told_while_folders_are_slow(tree, monkeypatch):
    said = []
    real = listing._list_class_folder
    monkeypatch.setattr("utils.data.progress_log.LOG_SECONDS", 0.02)
    monkeypatch.setattr(listing, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(listing, "THREADS", 2)
    monkeypatch.setattr(listing, "_list_class_folder", lambda *a: (time.sleep(0.1), real(*a))[1])
    began = time.monotonic()
    files_of(tree, Lister(progress=ProgressLog(said.append)))
    assert time.monotonic() - began < 0.1 * len(NAMES), "folders are listed at the same time"
    counts = [int(line.split(": ")[1].split()[0]) for line in said]
    assert (
        counts == sorted(counts) and 0 < counts[-1] <= 51 and all(line.startswith(f"Listing {tree}") for line in said)
    )


def test_a_folder_that_cannot_be_read_is_one_clear_line(tree, slow, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(listing.os, "scandir", scandir)
    for its_lister in (Lister(), lister(tree)):
        with pytest.raises(UserError, match=r"bees/deep cannot be read \(Permission denied\)"):
            files_of(tree, its_lister)
    assert [*(tree.parent / ".decoded").iterdir()] == []


def test_evaluating_some_of_the_classes_neither_lists_nor_forgets_the_others(tree, slow, monkeypatch):
    files_of(tree, lister(tree))
    content = kept_file(tree).read_bytes()
    listed = []
    real = listing._list_class_folder
    monkeypatch.setattr(listing, "_list_class_folder", lambda *a: (listed.append(a[1]), real(*a))[1])
    splits = class_folders.read_test_folder(tree, ("bees", "ants"), "it", leave_out_unknown=True, lister=lister(tree))
    assert sorted(listed) == ["ants", "bees"] and kept_file(tree).read_bytes() == content
    assert [Path(path).relative_to(tree).parts[0] for path in splits.validation.paths] == ["bees"] * 14 + ["ants"] * 13


def test_the_fingerprint_of_a_tree_is_that_of_earlier_versions(tree):
    """Otherwise no run that was begun before could be resumed."""
    for name in ("ants", "bees"):
        plant(tree.parent / "val" / name / "1.png")
    data = read_folder(tree.parent)
    digest = hashlib.sha256("\0".join(data.classes).encode())
    for images in (data.train, data.validation):
        digest.update(images.labels.numpy().tobytes())
        digest.update("\0".join("/".join(Path(path).parts[-2:]) for path in images.paths).encode())
    assert listing_of(data.fingerprint) == digest.hexdigest()


def test_a_process_that_looks_at_all_paths_gets_no_memory_of_its_own(tmp_path):
    """The parent's pages stay shared, as they would not with strings, whose reference counts lie beside them."""
    paths = FilePaths.joined(tmp_path, b"\0".join(b"n%08d/ILSVRC_%08d.JPEG" % (n % 1000, n) for n in range(200_000)))
    before, after = os.pipe()
    child = os.fork()
    if child == 0:
        began = private_bytes()
        length = sum(len(paths[place]) for place in range(0, len(paths), 4))
        os.write(after, f"{private_bytes() - began} {length}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    grown, length = map(int, os.read(before, 100).split())
    assert length > 10**6 and grown < 1_000_000


def private_bytes():
    """The memory that this process shares with no other."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith(("Private_Clean", "Private_Dirty")))
