"""The windowed order of shards, and tar files that others wrote."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import subprocess
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import pack
from tests.end_to_end.forked import answer_of
from tests.helpers import file_of
from tests.utils.data import loading
from tests.utils.data.loading import make, read_folder
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data.images.decoding import UnreadableImage, open_image
from utils.data.loaders import sample_plan
from utils.data.sampling import WindowedOrder, described
from utils.data.splits import prepare

COUNT = 1000
SHARDS = 20


def order_of(window=4, seed=3, count=COUNT):
    shards = np.random.default_rng(0).permutation(np.arange(count) % SHARDS)
    return WindowedOrder(seed, shards, window, np.arange(count))


# ------------------------------------------------------------------------------------------ windowed order


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    orders = [order_of().epoch(epoch)[0] for epoch in (0, 1, 2)]
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert np.array_equal(orders[1], order_of().epoch(1)[0])
    other = [*orders, order_of(seed=4).epoch(0)[0]]
    assert len({tuple(order) for order in other}) == 4


def test_the_shards_of_a_window_are_read_together_and_no_others():
    order = order_of(window=3)
    samples, _ = order.epoch(5)
    read = order.shards[samples]
    windows = order.windows(5)
    assert [len(window) for window in windows] == [3, 3, 3, 3, 3, 3, 2]
    assert sorted(np.concatenate(windows)) == list(range(SHARDS))
    start = 0
    for window in windows:
        count = int(np.isin(order.shards, window).sum())
        assert set(read[start : start + count]) == set(window)
        start += count
    assert start == COUNT


def test_within_a_window_every_order_is_as_likely():
    """Each place of a window holds each of its shards about as often (chi square over many epochs)."""
    order = order_of(window=SHARDS, count=100)
    firsts = np.array([order.shards[order.epoch(epoch)[0][0]] for epoch in range(2000)])
    counts = np.bincount(firsts, minlength=SHARDS)
    assert ((counts - 100) ** 2 / 100).sum() < 46  # 0.05 % of 19 degrees of freedom lie above
    followed = [np.mean(np.diff(order.epoch(epoch)[0]) == 1) for epoch in range(20)]
    assert max(followed) < 0.1, "an image is seldom followed by its neighbour: on average, one in a hundred is"


def test_shards_that_are_sorted_by_class_are_reported_and_mixed_ones_are_not():
    shards = np.arange(COUNT) // (COUNT // SHARDS)
    for labels, count in ((shards // 2, 90), (np.random.default_rng(0).integers(0, 10, COUNT), None)):
        text = str(WindowedOrder(3, shards, 1, np.arange(COUNT), labels))
        assert ("other classes" in text) == (count is not None)
        assert count is None or f"{count} % of the images would have to be of other classes" in text
        assert "other classes" not in str(WindowedOrder(3, shards, SHARDS, np.arange(COUNT), labels))


# ------------------------------------------------------------------------------------------ foreign tar files


def png(value):
    return file_of(Image.new("RGB", (8, 8), (value, 0, 0)), "PNG")


def write_tar(path, members, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def samples(first, count, prefix="", redder=0):
    for number in range(first, first + count):
        yield f"{prefix}{number:04}.cls", str(number % 2).encode()
        yield f"{prefix}{number:04}.png", png(number + redder)


@pytest.fixture
def foreign(tmp_path):
    write_tar(tmp_path / "my-train-000.tar", samples(0, 5))
    write_tar(
        tmp_path / "my-train-001.tar", samples(5, 5, prefix="deeply/" + "long" * 40 + "/"), format=tarfile.PAX_FORMAT
    )
    write_tar(tmp_path / "validation" / "0.tar", samples(10, 4), format=tarfile.GNU_FORMAT)
    return tmp_path


def read(root, *flags):
    return loading.read("--dataname", "shards", "--datapath", root, *flags)


def told_of_indexing(root, name="shards"):
    """The lines with which a run brings the index of its shards up to date."""
    lines = []
    prepare(parse(["--dataname", name, "--datapath", str(root)]).data, lines.append)
    return lines


def reds(images):
    return [np.asarray(open_image(path, "RGB"))[0, 0, 0] for path in images.paths]


def test_tar_files_that_others_wrote_are_indexed_and_read_by_number(foreign):
    data = read(foreign)
    assert data.classes == ("0", "1")
    assert reds(data.train) == list(range(10)) and reds(data.validation) == list(range(10, 14))
    assert data.train.labels.tolist() == [number % 2 for number in range(10)]
    args = parse(["--dataname", "shards", "--datapath", str(foreign), "--shard-window", "1", "-b", "5"])
    plan = sample_plan(data.train, args, 0, 1)
    assert {frozenset(plan.step_indices(0, step)) for step in (0, 1)} == {frozenset(range(5)), frozenset(range(5, 10))}


def contents(paths, answer):
    image = pickle.loads(pickle.dumps(paths[1]))
    answer.put(([*map(str, paths)], paths.identity, image.content()))


def test_a_process_that_is_sent_the_images_and_was_not_forked_reads_the_same(foreign):
    """It was forked from the server, which knows nothing of them."""
    paths = read(foreign).train.paths.take(np.array([3, 0, 7]))
    assert answer_of(contents, paths) == ([*map(str, paths)], paths.identity, paths[1].content())


def test_verifying_vouches_only_for_what_it_has_compared(foreign, capsys):
    read(foreign)
    image = foreign / "validation/0.tar"
    look = image.stat()
    data = bytearray(image.read_bytes())
    data[data.index(b"IDAT") + 6] ^= 1
    image.write_bytes(data)
    os.utime(image, ns=(look.st_atime_ns, look.st_mtime_ns))
    capsys.readouterr()
    assert pack.main(["--verify", str(foreign), "--no-progress", "--workers", "0"]) == 0
    assert capsys.readouterr().out == (
        f"{foreign}: headers and sizes of 14 images are as indexed; these files have no checksums\n"
    )


def test_tar_files_for_test_are_no_validation_images_where_there_are_some_for_validation(foreign):
    for place in ("my-test-000.tar", "test/0.tar"):
        write_tar(foreign / place, samples(20, 3))
    assert reds(read(foreign).validation) == list(range(10, 14))
    (foreign / "validation" / "0.tar").unlink()
    assert reds(read(foreign).validation) == [*range(20, 23)] * 2


def test_windows_over_fewer_samples_say_so():
    labels = torch.arange(8) % 2
    order = WindowedOrder(0, np.arange(8) // 2, 2, np.arange(5))
    assert described(order, labels, ("cat", "dog")).endswith("; of 5 of the 8 training images: 3 cat, 2 dog")
    assert "of the 8" not in described(WindowedOrder(0, np.arange(8) // 2, 2, np.arange(8)), labels, ("cat", "dog"))


def test_hidden_tar_files_are_left_out(foreign):
    (foreign / "._my-train-000.tar").write_bytes(b"\0\5\x16\7" * 64)  # as macOS leaves it
    write_tar(foreign / ".trash" / "my-train-000.tar", samples(0, 5))
    assert reds(read(foreign).train) == list(range(10))


@pytest.mark.parametrize("name, refused", [("train-more", True), ("lost+found", False)])
def test_a_folder_of_training_images_that_cannot_be_read_is_not_passed_over(foreign, monkeypatch, name, refused):
    write_tar(foreign / name / "0.tar", samples(20, 3))
    scandir = os.scandir

    def forbidden(path="."):
        if os.path.basename(path) == name:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbidden)
    if refused:
        with pytest.raises(UserError, match="train-more cannot be read .Permission denied"):
            read(foreign)
    else:
        assert len(read(foreign).train) == 10


def test_names_of_classes_come_from_the_labels_or_a_file(tmp_path):
    for split in ("train", "val"):
        members = [("a.jpg", png(1)), ("a.json", json.dumps({"label": "wolf"}).encode()), ("b.jpg", png(2))]
        write_tar(tmp_path / "names" / f"{split}.tar", [*members, ("b.cls", b"ape\n")])
        write_tar(tmp_path / "numbers" / f"{split}.tar", samples(0, 2))
    assert read(tmp_path / "names").classes == ("ape", "wolf")
    (tmp_path / "numbers" / "classes.txt").write_text("cat\ndog\neel\n")
    assert read(tmp_path / "numbers").classes == ("cat", "dog", "eel")


def test_a_stale_index_is_made_again_with_a_line_about_it(foreign):
    read(foreign)
    assert told_of_indexing(foreign) == []
    write_tar(foreign / "my-train-000.tar", samples(20, 5))  # of the same size
    told = f"Indexing the tar files in {foreign} again: they or their classes have changed"
    assert told_of_indexing(foreign) == [told]
    assert reds(read(foreign).train)[:5] == list(range(20, 25))
    write_tar(foreign / "my-train-002.tar", samples(30, 1))
    assert len(read(foreign).train) == 11
    (foreign / "val.index.npy").write_bytes(b"damaged")
    assert reds(read(foreign).validation) == list(range(10, 14))


def test_an_index_that_went_stale_is_made_again_by_whatever_name_the_shards_are_read(foreign):
    read(foreign)
    write_tar(foreign / "my-train-002.tar", samples(30, 1))
    assert len(read_folder(foreign).train) == 11
    write_tar(foreign / "my-train-002.tar", samples(30, 2))
    (line,) = told_of_indexing(foreign, "folder")
    assert "again" in line and len(read_folder(foreign).train) == 12


def test_resident_images_are_those_of_the_tar_files_as_they_are_now(foreign, tmp_path):
    """Written again with images of the same names and sizes: nothing but the tar file's time differs."""
    flags = ("--loader", "resident", "--augment", "flip", "--image-size", "8", "--arch", "fc")

    def shown():
        _, validation, _ = make("--dataname", "shards", "--datapath", foreign, "--cache-dir", tmp_path / "c", *flags)
        return validation.source.pixels[:, 0, 0, 0].tolist()

    assert shown() == shown() == list(range(10, 14))
    write_tar(foreign / "validation" / "0.tar", samples(10, 4, redder=10), format=tarfile.GNU_FORMAT)
    assert shown() == list(range(20, 24))


def test_classes_that_a_file_lists_later_or_in_another_order_are_the_classes(foreign):
    for write, classes in (("", ("0", "1")), ("cat dog", ("cat", "dog")), ("dog cat eel", ("dog", "cat", "eel"))):
        (foreign / "classes.txt").write_text("\n".join(write.split()))
        assert read(foreign).classes == classes


OTHER_CLASSES = {
    "another spelling": (["cat", "dog"], ["cat", "Dog"], "Dog"),
    "numbers for names": (["cat", "dog"], ["0", "1"], "0, 1"),
    "names for numbers": (["0", "1"], ["cat"], "cat"),
    "one more": (["00", "1"], ["0", "2"], "2"),
    "one between": (["0", "2"], ["1"], "1"),
}


@pytest.mark.parametrize("train, val, unknown", OTHER_CLASSES.values(), ids=OTHER_CLASSES)
def test_labels_of_validation_that_training_lacks_are_refused_unless_they_are_listed(tmp_path, train, val, unknown):
    for split, labels in (("train", train), ("val", val)):
        members = [((f"{k}.cls", label.encode()), (f"{k}.png", png(k))) for k, label in enumerate(labels)]
        write_tar(tmp_path / f"{split}.tar", [member for sample in members for member in sample])
    for _ in ("an index that is made", "one that was kept"):
        with pytest.raises(UserError, match=f"for val have classes that those for train lack: {unknown}; correct the"):
            read(tmp_path)
    names = sorted({*train, *val}) if any(map(str.isalpha, train + val)) else ["a", "b", "c"]
    (tmp_path / "classes.txt").write_text("\n".join(names))
    assert read(tmp_path).classes == tuple(names)


PROBLEMS = {
    "no label": ([("x.png", png(1))], "/x: has no label"),
    "empty label": ([("x.png", png(1)), ("x.json", b'{"label": " "}')], "/x: has no label"),
    "no image": ([("x.cls", b"1")], "/x: has no image"),
    "unknown": ([("x.png", png(1)), ("x.cls", b"-1")], "/x: has the label -1, which is no class"),
    "repeated": ([*samples(0, 1), *samples(0, 1)], "/0000: has more than one image"),
    "endless": ([("x.png", png(1)), ("x.json", b"[" * 100_000)], "/x: has no label"),
    "two labels": ([*samples(0, 1), ("0000.json", b'{"label": 1}')], "/0000: has two labels, 0 and 1"),
}


@pytest.mark.parametrize("members, message", PROBLEMS.values(), ids=PROBLEMS)
def test_members_that_lack_or_repeat_something_are_told_or_left_out(foreign, members, message):
    write_tar(foreign / "my-train-002.tar", [*members, *samples(7, 2)])
    with pytest.raises(UserError, match=message):
        read(foreign)
    data = read(foreign, "--skip-bad-images")
    assert reds(data.train) == [*range(10), 7, 8]
    assert message in data.warnings[0] and "left out" in data.warnings[0]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE], ids=["hard", "symbolic"])
def test_a_sample_of_links_is_not_passed_over(foreign, kind):
    with tarfile.open(foreign / "my-train-000.tar", "a") as tar:
        for ending in ("png", "cls"):
            info = tarfile.TarInfo(f"x.{ending}")
            info.type, info.linkname = kind, f"0000.{ending}"
            tar.addfile(info)
    with pytest.raises(UserError, match="/x: has no image; it holds links"):
        read(foreign)
    assert len(read(foreign, "--skip-bad-images").train) == 10


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_a_sparse_file_is_refused(foreign, form):
    """GNU tar stores only what lies beside a file's holes: read by position, it would be other bytes."""
    with open(foreign / "x.npy", "wb") as file:  # black, and white at the end
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (512, 512)})
        file.truncate(file.tell() + 512 * 512 - 1)
        file.seek(0, os.SEEK_END)
        file.write(b"\xff")
    (foreign / "x.cls").write_text("1")
    line = ("tar", "-S", f"--format={form}", "-cf", "my-train-002.tar", "x.npy", "x.cls")
    packed = subprocess.run(line, cwd=foreign, check=False).returncode == 0
    if not packed or (foreign / "my-train-002.tar").stat().st_size > 512 * 512:
        pytest.skip("this is not GNU's tar, or the file system keeps no holes")
    with pytest.raises(UserError, match="/x: is stored as a sparse file"):
        read(foreign)
    assert len(read(foreign, "--skip-bad-images").train) == 10


def test_a_damaged_image_of_another_tar_file_is_a_bad_image_with_its_name(foreign):
    write_tar(foreign / "my-train-002.tar", [("bad.cls", b"1"), ("bad.png", png(1)[:40])])
    data = read(foreign)
    assert len(data.train) == 11
    with pytest.raises(UnreadableImage, match="my-train-002.tar/bad.png: cannot be read as an image"):
        open_image(data.train.paths[10], "RGB")


def test_a_tar_file_that_another_one_was_appended_to_is_not_read_by_half(foreign):
    write_tar(foreign / "more.tar", samples(20, 3))
    with open(foreign / "my-train-000.tar", "ab") as file:
        file.write(bytes(20 * 512))  # padding is none of it
    assert len(read(foreign).train) == 10
    with open(foreign / "my-train-000.tar", "ab") as file:
        file.write((foreign / "more.tar").read_bytes())
    with pytest.raises(UserError, match=r"my-train-000.tar: goes on after its end at byte .* joined by cat"):
        read(foreign)
    assert reds(read(foreign, "--skip-bad-images").train) == list(range(10))


LISTS = {
    "an empty line": (b"cat\n\ndog\n", "classes.txt: line 2 is empty"),
    "another encoding": ("cat\ndog\n".encode("utf-16"), "classes.txt: cannot be read .it is no text in UTF-8"),
    "a folder": (None, "classes.txt: cannot be read .Is a directory"),
    "a name twice": (b"cat\ndog\ncat\n", "label 'cat' stands more than once in its classes.txt"),
}


@pytest.mark.parametrize("content, message", LISTS.values(), ids=LISTS)
def test_a_list_of_classes_that_may_give_wrong_ones_is_refused(tmp_path, content, message):
    members = [("a.png", png(1)), ("a.cls", b"cat"), ("b.png", png(2)), ("b.cls", b"dog")]
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", members)
    if content is None:
        (tmp_path / "classes.txt").mkdir()
    else:
        (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path)
    if content is not None:
        (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfdog\r\ncat\r\n\r\n")  # as Windows writes them
        assert read(tmp_path).classes == ("dog", "cat") and read(tmp_path).train.labels.tolist() == [1, 0]


@pytest.mark.parametrize("bytes_left", [512 * 9, 512 * 7 + 50, 512 * 8])
def test_of_a_tar_file_that_was_cut_the_whole_samples_are_left(foreign, bytes_left):
    os.truncate(foreign / "my-train-000.tar", bytes_left)  # a sample takes four blocks
    with pytest.raises(UserError, match=r"my-train-000.tar.* is cut off"):
        read(foreign)
    kept = bytes_left // (4 * 512)
    assert reds(read(foreign, "--skip-bad-images").train) == [*range(kept), *range(5, 10)]


def test_a_compressed_tar_file_is_said_to_be_one(foreign, tmp_path):
    plain = (foreign / "my-train-000.tar").read_bytes()
    for compress in (gzip.compress, bz2.compress, lzma.compress):
        (foreign / "my-train-000.tar").write_bytes(compress(plain))
        with pytest.raises(UserError, match="my-train-000.tar: is compressed, and images are read by position"):
            read(foreign)
    (foreign / "my-train-000.tar").write_bytes(plain)
    (foreign / "my-train-001.tar.gz").write_bytes(gzip.compress(plain))
    with pytest.raises(UserError, match="my-train-001.tar.gz is compressed"):
        read(foreign)
    (foreign / "my-train-001.tar.gz").rename(foreign / "annotations.tar.gz")
    assert len(read(foreign).train) == 10
    (tmp_path / "zipped").mkdir()
    (tmp_path / "zipped" / "train-000.tar.gz").write_bytes(gzip.compress(plain))
    with pytest.raises(UserError, match="zipped: train-000.tar.gz is compressed"):
        read(tmp_path / "zipped")


def test_tar_files_without_a_split_for_validation_are_one_clear_line(tmp_path):
    write_tar(tmp_path / "train.tar", samples(0, 3))
    with pytest.raises(UserError, match="holds tar files for train and none for val"):
        read(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.tar"]
