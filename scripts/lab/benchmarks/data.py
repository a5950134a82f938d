"""Data for the measurements in a layout that both sides read: the user's, or random images."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from utils.config import arguments
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.formats.class_folders import find_splits
from utils.data.formats.readers import ImageFiles, find_idx

IDX_SHAPES = {"train": (60_000, 28, 28), "t10k": (10_000, 28, 28)}
CLASSES = 10
TREE_IMAGES = {"train": 640, "val": 100}  # five training batches of 128; a CPU takes seconds for each
CUT_IMAGES = 256  # pieces cut from each photograph if the user gives no JPEG files


def mnist(given: str | None, scratch: Path) -> Path:
    """Folder that both torchvision's MNIST and main.py read: links to the user's files, or random images."""
    raw = scratch / "mnist" / "MNIST" / "raw"
    if raw.is_dir():
        return raw.parents[1]
    place = find_idx(Path(given), "MNIST") if given else None
    if given and place is None:
        raise UserError(f"--mnist {given}: holds no train-images-idx3-ubyte and its three companions")
    raw.mkdir(parents=True)
    if place:
        from torchvision.datasets.utils import extract_archive

        for path in place.glob("*-ubyte*"):
            if path.suffix != ".gz":
                (raw / path.name).symlink_to(path.resolve())
            elif not (place / path.stem).exists():  # torchvision's MNIST needs the file unpacked
                extract_archive(str(path), str(raw / path.stem))
        return raw.parents[1]
    generator = np.random.default_rng(0)
    for name, shape in IDX_SHAPES.items():
        for kind, dims, low in (("images", shape, 256), ("labels", shape[:1], CLASSES)):
            head = bytes([0, 0, 8, len(dims)]) + np.array(dims, dtype=">i4").tobytes()
            body = generator.integers(low, size=dims, dtype=np.uint8).tobytes()
            (raw / f"{name}-{kind}-idx{len(dims)}-ubyte").write_bytes(head + body)
    return raw.parents[1]


def cifar10_tree(given: str | None, scratch: Path) -> Path:
    """Class folders with ``TREE_IMAGES`` PNG files: the first of each class in the user's data, or random images."""
    root = scratch / "cifar10"
    if root.is_dir():
        return root
    if given is None:
        generator = np.random.default_rng(0)
        parts = [generator.integers(256, size=(count, 3, 32, 32), dtype=np.uint8) for count in TREE_IMAGES.values()]
        labels = [torch.arange(count) % CLASSES for count in TREE_IMAGES.values()]
    else:
        settings = arguments.parse(["--dataname", "cifar10", "--datapath", given]).data
        data = get_data(settings, torch.device("cpu"))
        splits = (data.train, data.validation)
        parts = [split.paths if isinstance(split, ImageFiles) else split.pixels.numpy() for split in splits]
        labels = [split.labels for split in splits]
    for (split, count), images, its_labels in zip(TREE_IMAGES.items(), parts, labels, strict=True):
        for label in range(CLASSES):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for index in (its_labels == label).nonzero().flatten()[: count // CLASSES].tolist():
                place = folder / f"{index}.png"
                image = images[index]
                if isinstance(image, str):
                    shutil.copyfile(image, place)
                else:
                    Image.fromarray(image.transpose(1, 2, 0)).save(place)
    return root


def photographs() -> tuple[str, ...]:
    """Paths of the two photographs that come with scikit-learn, JPEG files of 640 x 427 pixels."""
    import sklearn.datasets

    folder = Path(sklearn.datasets.__file__).parent / "images"
    return str(folder / "china.jpg"), str(folder / "flower.jpg")


def jpeg_tree(given: str | None, scratch: Path) -> Path:
    """Class folders of JPEG files below train/ and val/: the user's, or pieces of the two photographs."""
    if given:
        if find_splits(Path(given)) is None:
            raise UserError(f"--images {given}: holds no train/ beside val/ or test/ with a folder a class")
        return Path(given)
    root = scratch / "photographs"
    if root.is_dir():
        return root
    generator = np.random.default_rng(0)
    for path in map(Path, photographs()):
        with Image.open(path) as photograph:
            for number in range(CUT_IMAGES + 2):
                # pieces of 500 x 375 pixels, a usual size in ImageNet
                left = generator.integers(0, 140)
                top = generator.integers(0, 52)
                folder = root / ("train" if number < CUT_IMAGES else "val") / path.stem
                folder.mkdir(parents=True, exist_ok=True)
                photograph.crop((left, top, left + 500, top + 375)).save(folder / f"{number}.jpg", quality=90)
    return root
