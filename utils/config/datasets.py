"""The data sets: what is known of each before it is read by ``utils/data/formats/readers.py``."""

from __future__ import annotations

import os
from dataclasses import dataclass

# ImageNet's archives, or its first and last class folder, which its excerpts do not have together
SIGNS_OF_IMAGENET = (
    ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"),
    (os.path.join("train", "n01440764"), os.path.join("train", "n15075141")),
)
# the first pools its features, the second does not
LARGE_IMAGES_ARCH = "resnet18"
SMALL_IMAGES_ARCH = "conv2"
SMALL_IMAGES = 32  # pixels a side, at most
FETCHED = "--download fetches it"
OF_PLUGIN = "a file of --plugin gives it"


class Channels:
    """Base class of everything with one ``mean`` per image channel."""

    mean: tuple[float, ...]

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def colour(self) -> str:
        """Pillow's mode, 'L' (grey) or 'RGB'; for any other number of channels, that number as text."""
        return {1: "L", 3: "RGB"}.get(self.channels, str(self.channels))


@dataclass(frozen=True)
class DatasetSpec(Channels):
    """The facts of a data set that are known before it is read.

    ``classes`` is None if only the data tell it. ``image_size`` is the side in pixels that networks see by default;
    with ``fixed_size`` every stored image has it. ``mean`` and ``std``, one number per channel, are of pixel values
    between 0 and 1 over the training images. ``augment`` is the default training augmentation. ``max_shift`` is the
    largest shift, in pixels of the stored image; None means an eighth of the image's side, where stored images differ
    in size. ``source`` says where the data come from. ``needs_datapath``: the user must say where the data lie.
    """

    classes: int | None
    image_size: int
    fixed_size: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...]
    max_shift: int | None
    source: str
    needs_datapath: bool = True

    @property
    def can_be_fetched(self) -> bool:
        return self.source == FETCHED

    @property
    def of_the_user(self) -> bool:
        """True if the user's folder, not the name of the data set, tells which images these are."""
        return self.classes is None and self.needs_datapath

    @property
    def is_told_by_place(self) -> bool:
        """True if --datapath, too, tells which images these are: the user's folder, or one that user's code reads."""
        return self.of_the_user or self.source == OF_PLUGIN

    @property
    def default_arch(self) -> str:
        return SMALL_IMAGES_ARCH if self.image_size <= SMALL_IMAGES else LARGE_IMAGES_ARCH


_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)

# fmt: off
SPECS: dict[str, DatasetSpec] = {
    "digits": DatasetSpec(
        10, 8, True, (0.3055,), (0.3756,), ("shift",), 1, "comes with scikit-learn", needs_datapath=False),
    "mnist": DatasetSpec(
        10, 28, True, (0.1307,), (0.3081,), ("shift",), 2, FETCHED),
    "fashionmnist": DatasetSpec(
        10, 28, True, (0.2860,), (0.3530,), ("shift",), 2, FETCHED),
    "cifar10": DatasetSpec(
        10, 32, True, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), ("shift", "flip"), 4, FETCHED),
    "cifar100": DatasetSpec(
        100, 32, True, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), ("shift", "flip"), 4, FETCHED),
    "imagenet": DatasetSpec(
        1000, 224, False, _IMAGENET_MEAN, _IMAGENET_STD, ("resized-crop", "flip"), None,
        "get ILSVRC2012 from image-net.org and unpack it there"),
    "folder": DatasetSpec(
        None, 224, False, _IMAGENET_MEAN, _IMAGENET_STD, ("resized-crop", "flip"), None,
        "one folder a class below train/ and val/, or below DIR with --val-split 0.2"),
    "shards": DatasetSpec(
        None, 224, False, _IMAGENET_MEAN, _IMAGENET_STD, ("resized-crop", "flip"), None,
        "the folder that scripts/pack.py made, or WebDataset's tar files"),
    "hf": DatasetSpec(
        None, 224, False, _IMAGENET_MEAN, _IMAGENET_STD, ("resized-crop", "flip"), None,
        "a folder that save_to_disk of Hugging Face's datasets wrote, or one with parquet files"),
    "synthetic": DatasetSpec(
        1000, 224, True, (0.5, 0.5, 0.5), (0.289, 0.289, 0.289), ("flip",), None, "made on the device",
        needs_datapath=False),
}
# fmt: on


def name_of_folder(folder: str) -> str:
    """The ``--dataname`` of images in ``folder``: 'imagenet' if it has the signs of ImageNet, otherwise 'folder'."""
    found = any(all(os.path.exists(os.path.join(folder, name)) for name in names) for names in SIGNS_OF_IMAGENET)
    return "imagenet" if found else "folder"
