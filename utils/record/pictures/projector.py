"""The files of TensorBoard's projector in a run's folder: features of validation images, with their classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from utils.record.pictures.collector import THUMBNAIL, Point
from utils.runtime.files import whole_file

# the first name is TensorBoard's
CONFIG = "projector_config.pbtxt"
FOLDER = "projector"


def write(folder: Path, points: Sequence[Point], classes: Sequence[str]) -> None:
    """Replace the projector's files by those of ``points``; the configuration that TensorBoard looks for comes last."""
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    _replace(place / "features.tsv", _features(points))
    names = [" ".join(name.split()) for name in classes]  # a tab or a line break would be another column or row
    names.append("none")  # for NO_CLASS
    rows = [f"{names[one.target]}\t{names[one.predicted]}\t{one.index}" for one in points]
    _replace(place / "classes.tsv", "\n".join(["class\tpredicted\tnumber", *rows, ""]))
    side = math.ceil(math.sqrt(len(points)))
    sprite = np.zeros((side, side, 3, THUMBNAIL, THUMBNAIL), np.uint8)
    sprite.reshape(-1, *sprite.shape[2:])[: len(points)] = np.stack([one.pixels for one in points])
    with whole_file(place / "images.png") as file:
        pixels = sprite.transpose(0, 3, 1, 4, 2).reshape(side * THUMBNAIL, side * THUMBNAIL, 3)
        Image.fromarray(pixels).save(file, format="PNG", compress_level=1)
    _replace(
        folder / CONFIG,
        "embeddings {\n"
        '  tensor_name: "validation features"\n'
        f'  tensor_path: "{FOLDER}/features.tsv"\n'
        f'  metadata_path: "{FOLDER}/classes.tsv"\n'
        "  sprite {\n"
        f'    image_path: "{FOLDER}/images.png"\n'
        f"    single_image_dim: {THUMBNAIL}\n"
        f"    single_image_dim: {THUMBNAIL}\n"
        "  }\n"
        "}\n",
    )


def _features(points: Sequence[Point]) -> str:
    """A row for each point, with four significant digits."""
    features = np.nan_to_num(np.stack([one.features for one in points]))
    row = "\t".join(["%.4g"] * features.shape[1])
    return "\n".join([*(row % tuple(values) for values in features.tolist()), ""])


def _replace(path: Path, text: str) -> None:
    with whole_file(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
