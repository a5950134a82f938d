"""FashionMNIST's idx files from a package in the npm package's form, read back as torchvision reads them."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.lab import split_fashionmnist
from tests.helpers import answer


def split(package, output, capsys, monkeypatch):
    return answer(split_fashionmnist, [package, output], capsys, monkeypatch)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Seven images of each class, whose first pixel is the class and whose second is their number, and a stray."""
    monkeypatch.setattr(split_fashionmnist, "OF_A_CLASS", 7)
    monkeypatch.setattr(split_fashionmnist, "FOR_TEST", 2)
    folder = tmp_path / "package" / "src" / "clothes"
    folder.mkdir(parents=True)
    for number in range(10):
        rows = [[number, image, *[0] * 782] for image in range(7)]
        (folder / f"{number}.json").write_text(json.dumps({"data": [*rows, [1, 2]][: 7 + (number == 0)]}))
    return tmp_path / "package"


def values(path: Path, header: int):
    return np.frombuffer(path.read_bytes()[header:], np.uint8)


def test_each_image_is_in_one_part_once_with_its_label_and_torchvision_reads_the_files(
    package, tmp_path, capsys, monkeypatch
):
    code, said = split(package, tmp_path / "data", capsys, monkeypatch)
    assert (code, said.err) == (0, "")
    found = []
    for name, count in (("train", 50), ("t10k", 20)):
        images = values(tmp_path / "data" / f"{name}-images-idx3-ubyte", 16).reshape(-1, 784)
        labels = values(tmp_path / "data" / f"{name}-labels-idx1-ubyte", 8)
        assert len(images) == len(labels) == count
        assert (images[:, 0] == labels).all()
        assert set(np.bincount(labels)) == {count // 10}
        assert (np.diff(labels.astype(int)) != 0).any()  # shuffled
        found += [tuple(image[:2]) for image in images]
    assert sorted(found) == [(label, image) for label in range(10) for image in range(7)]
    from torchvision.datasets.mnist import read_image_file, read_label_file

    assert read_image_file(tmp_path / "data" / "t10k-images-idx3-ubyte").shape == (20, 28, 28)
    assert len(read_label_file(tmp_path / "data" / "train-labels-idx1-ubyte")) == 50


def test_files_that_are_there_stay_as_they_are(package, tmp_path, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    own = tmp_path / "data" / "t10k-labels-idx1-ubyte"
    own.write_bytes(b"the data set's own")
    code, said = split(package, tmp_path / "data", capsys, monkeypatch)
    assert (code, said.err) == (2, f"lab/split_fashionmnist.py: {own}: exists; give another folder\n")
    assert own.read_bytes() == b"the data set's own" and len(list(own.parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "is not the package's list"), ('{"data": [[1, 2]]}', "holds 0 images, not 7"), (None, "no such file")],
)
def test_a_package_that_is_not_whole_is_one_line_and_writes_nothing(text, what, package, tmp_path, capsys, monkeypatch):
    path = package / "src" / "clothes" / "9.json"
    path.unlink() if text is None else path.write_text(text)
    code, said = split(package, tmp_path / "data", capsys, monkeypatch)
    assert code == 2 and said.err.count("\n") == 1
    assert said.err.startswith(f"lab/split_fashionmnist.py: {path}: {what}")
    assert not (tmp_path / "data").exists()
