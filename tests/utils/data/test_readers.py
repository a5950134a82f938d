"""Every layout that a data set comes in is read alike, and missing or wrong data is one clear line."""

import dataclasses
import gzip
import re
import struct
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torchvision
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tests.helpers import mistakes_of
from tests.utils.data.loading import read
from utils.config.arguments import parse
from utils.config.datasets import SPECS
from utils.config.settings import UserError
from utils.data.formats import readers
from utils.data.formats.readers import IN_MEMORY, OWN_FILES
from utils.data.splits import prepare

GENERATOR = np.random.default_rng(0)


def idx(array):
    return struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, train, test, compressed=False):
    folder.mkdir(parents=True)
    for prefix, (images, labels) in (("train", train), ("t10k", test)):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx(array)
            name = f"{prefix}-{kind}-ubyte"
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


def some(count, size=28, classes=10):
    labels = np.arange(count, dtype=np.uint8) % classes
    return GENERATOR.integers(0, 256, (count, size, size), dtype=np.uint8), labels


def write_folders(root, images, labels, names, mode="L"):
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = root / names[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).convert(mode).save(folder / f"{number:05}.png")


def test_what_the_table_says_of_a_data_set_is_what_its_reader_does():
    made = {name for name, spec in SPECS.items() if not spec.needs_datapath}
    assert made == set(IN_MEMORY), "without files: IN_MEMORY, and needs_datapath=False in SPECS"
    fetched = {name for name, spec in SPECS.items() if spec.can_be_fetched}
    of_torchvision = {name for name, own in OWN_FILES.items() if own.download is not None}
    assert fetched == of_torchvision, "with a download in OWN_FILES, and FETCHED as the source in SPECS"
    assert set(OWN_FILES) < set(SPECS)
    assert len({own.folder for own in OWN_FILES.values()}) == len(OWN_FILES)


@pytest.mark.parametrize("file_is_there", [True, False])
def test_digits_are_scikit_learns_in_the_order_of_its_stratified_split(monkeypatch, file_is_there):
    monkeypatch.setattr(readers, "_digits_table", readers._digits_table.__wrapped__)  # read now, not by an earlier test
    if not file_is_there:
        monkeypatch.setattr(readers, "find_spec", lambda name: None)
    data = read()
    digits = load_digits()
    rows = train_test_split(np.arange(1797), test_size=360, stratify=digits.target, random_state=0)
    for images, chosen in zip((data.train, data.validation), rows, strict=True):
        expected = np.round(digits.images[chosen] * 255 / 16)
        np.testing.assert_array_equal(images.pixels[:, 0], expected)
        np.testing.assert_array_equal(images.labels, digits.target[chosen])
    assert (len(data.train), len(data.validation)) == (1437, 360)


@pytest.mark.parametrize("name, folder", [("mnist", "MNIST/raw"), ("mnist", ""), ("fashionmnist", "FashionMNIST/raw")])
@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files_are_read_in_torchvisions_layout_bare_and_compressed(tmp_path, name, folder, compressed):
    train = some(30)
    test = some(20)
    write_idx(tmp_path / "data" / folder if folder else tmp_path / "data", train, test, compressed)
    data = read("--dataname", name, "--datapath", tmp_path / "data")
    np.testing.assert_array_equal(data.train.pixels[:, 0], train[0])
    np.testing.assert_array_equal(data.validation.labels, test[1])
    assert data.classes[8:] == (("8", "9") if name == "mnist" else ("Bag", "Ankle boot")) and len(data.classes) == 10


def test_a_truncated_idx_file_is_named(tmp_path):
    write_idx(tmp_path / "data", some(30), some(20))
    path = tmp_path / "data/train-images-idx3-ubyte"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:10], whole[:3], whole[:4] + b"\xff" * 4 + whole[8:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="train-images-idx3-ubyte: is not a whole idx file"):
            read("--dataname", "mnist", "--datapath", tmp_path / "data")


@pytest.mark.parametrize("validation", ["val", "test"])
def test_class_folders_of_a_named_set_give_what_its_own_files_give(tmp_path, validation):
    train = some(30)
    test = some(20)
    write_idx(tmp_path / "files", train, test)
    names = [str(n) for n in range(10)]
    write_folders(tmp_path / "folders/train", *train, names)
    write_folders(tmp_path / f"folders/{validation}", *test, names)
    files = read("--dataname", "mnist", "--datapath", tmp_path / "files")
    folders = read("--dataname", "mnist", "--datapath", tmp_path / "folders")
    assert files.classes == folders.classes and folders.validation.colour == "L"
    for own, other in ((files.train, folders.train), (files.validation, folders.validation)):
        shown = [np.asarray(Image.open(path)).tobytes() for path in other.paths]
        pixels = [image.numpy().tobytes() for image in own.pixels]
        assert sorted(zip(own.labels.tolist(), pixels, strict=True)) == sorted(
            zip(other.labels.tolist(), shown, strict=True)
        )


def test_val_split_takes_the_classes_below_train_where_there_is_no_validation_folder(tmp_path):
    write_folders(tmp_path / "train", *some(30, 8, 3), ["a", "b", "c"])
    data = read("--dataname", "folder", "--datapath", tmp_path, "--val-split", "0.2")
    assert data.classes == ("a", "b", "c")
    assert (len(data.train), len(data.validation)) == (24, 6) and {*data.train.paths}.isdisjoint(data.validation.paths)
    for images in (data.train, data.validation):
        assert [data.classes[label] for label in images.labels] == [Path(path).parent.name for path in images.paths]


def test_idx_labels_that_do_not_belong_to_the_images_are_refused(tmp_path):
    images, labels = some(30)
    for number, wrong in enumerate((labels[:20], labels + 5)):
        write_idx(tmp_path / str(number), (images, wrong), some(20))
        with pytest.raises(UserError, match="do not belong together"):
            read("--dataname", "mnist", "--datapath", tmp_path / str(number))


def test_synthetic_images_have_the_asked_size_and_repeat():
    data = read("--dataname", "synthetic", "--image-size", "32")
    assert data.train.pixels.shape[1:] == (3, 32, 32)
    assert len(data.train) > len(data.train.pixels)


def test_the_fingerprint_changes_with_one_pixel_one_label_and_one_class_name(tmp_path):
    def written(images, labels):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_idx(folder, (images, labels), some(0))
        return read("--dataname", "mnist", "--datapath", folder)

    images, labels = some(20)
    reference = written(images, labels)
    same = written(images, labels)
    renamed = dataclasses.replace(same, classes=("zero", *same.classes[1:]))
    others = (
        written(images ^ (np.arange(images.size).reshape(images.shape) == 7), labels),
        written(images, np.roll(labels, 1)),
    )
    assert reference.fingerprint == same.fingerprint
    assert all(reference.fingerprint != other.fingerprint for other in (*others, renamed))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """The folder below which all data sets of the next test lie."""
    root = tmp_path_factory.mktemp("wrong")
    (root / "empty").mkdir()
    for name in ("three", "unknown", "upper", "hollow"):
        for split in ("train", "val"):
            write_folders(root / name / split, *some(6, 8, 3), ["a", "b", "c"])
    write_folders(root / "only/train", *some(6, 8, 3), ["a", "b", "c"])
    write_folders(root / "flat/train", *some(6, 8, 3), ["a", "b", "c"])
    write_folders(root / "flat/val", *some(3, 8, 1), ["images"])
    write_folders(root / "unknown/val", *some(1, 8, 1), ["d"])
    write_folders(root / "upper/val", *some(1, 8, 1), ["A"])
    for split, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        write_folders(root / "accents" / split, *some(2, 8, 2), ["a", name])
    (root / "hollow/train/a/other.gif").touch()  # of another class
    for path in [*(root / "hollow/train/b").iterdir()]:
        path.rename(path.with_suffix(".heic"))
    return root


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--dataname", "mnist", "--datapath", "{}/none"), "no such folder.*--download"),
        (("--dataname", "mnist", "--datapath", "{}/empty"), "holds no mnist.*--download"),
        (("--dataname", "cifar10", "--datapath", "{}/empty"), "holds no cifar10"),
        (("--dataname", "imagenet", "--datapath", "{}/empty"), "holds no imagenet.*image-net.org"),
        (("--dataname", "folder", "--datapath", "{}/empty"), "one folder a class"),
        (("--dataname", "folder", "--datapath", "{}/only"), "no val/ or test/ beside train/.*--val-split"),
        (("--dataname", "folder", "--datapath", "{}/empty", "--val-split", "0.1"), "holds no class folders"),
        (("--dataname", "cifar10", "--datapath", "{}/three"), "3 classes where cifar10 has 10"),
        (("--dataname", "folder", "--datapath", "{}/three", "--val-split", "0.1"), "already has val/"),
        (("--dataname", "folder", "--datapath", "{}/unknown"), "classes that .* lacks: d$"),
        (("--dataname", "folder", "--datapath", "{}/flat"), "lacks: images; sort its images into folders named like"),
        (("--dataname", "folder", "--datapath", "{}/upper"), "lacks: A; perhaps A for a"),
        (("--dataname", "folder", "--datapath", "{}/accents"), "perhaps .* whose accents are other characters"),
        (
            ("--dataname", "folder", "--datapath", "{}/hollow"),
            r"hollow/train/b holds no images \(.*\); convert \.heic files to JPEG or PNG",
        ),
    ],
)
def test_missing_and_wrong_data_is_one_line_that_says_what_to_do(wrong, flags, message):
    (line,) = mistakes_of(read, *(flag.format(wrong) for flag in flags))
    assert re.search(message, line)


def test_nothing_is_fetched_without_download_and_a_failed_fetch_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", Mock(side_effect=RuntimeError("no network")))
    prepare(parse(["--dataname", "mnist", "--datapath", str(tmp_path)]).data, print)
    with pytest.raises(UserError, match="--download: mnist could not be fetched .*no network"):
        prepare(parse(["--dataname", "mnist", "--datapath", str(tmp_path), "--download"]).data, print)
