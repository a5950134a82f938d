"""A folder of shards as a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from utils.config.settings import UserError
from utils.data.formats.class_folders import some
from utils.data.formats.readers import ImageFiles, Splits
from utils.data.formats.shards.foreign import FOREIGN
from utils.data.formats.shards.index import ANEW, CONTENTS, Contents, read_contents
from utils.data.formats.shards.members import Members
from utils.data.images.levels import range_of


def holds_shards(root: Path) -> bool:
    """Whether ``root`` holds an index of shards."""
    return (root / CONTENTS).is_file()


def read_shards(root: Path, colour: str, skip_bad: bool = False) -> Splits:
    """The images of the shards in ``root``, which has an index. Raises ``UserError`` if it does not fit them.

    With ``skip_bad``, samples of foreign tar files that lack an image or a label are left out, with a warning.
    """
    contents = read_contents(root)
    if contents is None:
        raise UserError(f"{root / CONTENTS}: is no index of shards; {ANEW}")
    for name in ("train", "val"):
        if name not in contents.splits or not len(contents.splits[name].records):
            raise UserError(f"--datapath {root}: has no {name} images; {ANEW}")
    packed = contents.made.get("pixel_range")
    if packed is not None and tuple(packed) != range_of(colour):
        words = "{:g} {:g}".format(*packed)
        raise UserError(f"--pixel-range: the shards in {root} were packed with {words}; give --pixel-range {words}")
    problems = contents.made.get("problems", ())
    warnings = ()
    if problems:
        count = contents.made["left_out"]
        told = problems[0] + (f" (and {count - 1:,} more)" if count > 1 else "")
        if not skip_bad:
            raise UserError(f"{told}; repair the tar file, or leave it out with --skip-bad-images")
        warnings = (f"--datapath {root}: left out: {told}",)
    if contents.made.get(FOREIGN) and not contents.made.get("listed"):
        _refuse_classes_of_validation_alone(contents)
    images = (images_of(contents, name, colour) for name in ("train", "val"))
    return Splits(*images, contents.classes, warnings)


def _refuse_classes_of_validation_alone(contents: Contents) -> None:
    """A label written otherwise than in training would be an output of the network that nothing trains."""
    trained, validated = (np.unique(contents.splits[name].records["label"]) for name in ("train", "val"))
    unknown = [contents.classes[label] for label in np.setdiff1d(validated, trained)]
    if unknown:
        raise UserError(
            f"--datapath {contents.folder}: its tar files for val have classes that those for train lack: "
            f"{some(unknown)}; correct the labels, or list all classes in classes.txt"
        )


def images_of(contents: Contents, name: str, colour: str) -> ImageFiles:
    """The images of a split."""
    split = contents.splits[name]
    labels = torch.from_numpy(split.records["label"].astype(np.int64))
    return ImageFiles(Members(contents.folder, split), labels, colour)
