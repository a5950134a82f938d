"""Where a trained network looks: a heat map over each image of the evidence for its class, as a picture.

    python scripts/explain.py auto cat.jpg dog.jpg                         # the newest run; writes explain.png
    python scripts/explain.py RUN photos/ --target cat --output cat.png    # the evidence for cat, whatever is predicted

Grad-CAM for convolutional networks, its elementwise form for transformers, the gradient with respect to the pixels for
fully connected ones. Exit code 0: all images explained; 1: some could not be, stderr says why; 2: nothing written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, warn
from scripts.common.output import draw_png, whole_file, wrong_name
from scripts.common.trained import NOT_FINITE, add_images, add_run_arguments, find_run, open_run
from utils.config.settings import UserError
from utils.config.spelling import or_nearest, printable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from scripts.common.image_stream import ImageBatch
    from scripts.common.predictions import Predictor

NAME = "explain.py"
MOST_IMAGES = 64  # in a picture
GREY = "#666666"
LONGEST_NAME = 34  # characters of a file's name
SMALL = 64  # pixels per side up to which images are shown with visible pixels, larger ones smoothly
GAP = 0.04  # between an image and its map, relative to its width


class Explained(NamedTuple):
    """An image ``pixels``, float (channels, h, w) between 0 and 1, its heat map (h, w), and lines about both."""

    name: str
    pixels: torch.Tensor
    heat: np.ndarray
    prediction: str
    target: str


def main(argv: list[str]) -> int:
    own = build_parser().parse_args(argv)
    if mistake := wrong_name("--output", own.output, "a .png", ".png"):
        raise UserError(mistake)
    find_run(own.run)
    from scripts.common.image_stream import image_names, warn_of

    unread: Counter[str] = Counter()
    names = image_names(own.images, unread)
    shown = list(islice(names, MOST_IMAGES))
    more = sum(1 for _ in names)  # to the end, so that all files left out are counted
    warn_of(unread)
    if more:
        warn(f"the picture shows the first {MOST_IMAGES} images; name fewer to choose others")
    if would_replace(own.output, [*own.images, *shown]):
        raise UserError(f"--output {own.output}: is one of the images to explain; choose another name")
    explained, title = explain(own, shown)
    if not explained:
        raise UserError("IMAGES: none of them can be read and explained")
    draw(own.output, title, explained)
    print(f"{title}\nPicture: {own.output}")
    return 1 if len(explained) < len(shown) else 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    add_run_arguments(parser)
    add_images(parser, f"; the first {MOST_IMAGES} are shown")
    parser.add_argument(
        "--target", metavar="CLASS", help="what to explain: a class by its name, or its number from 0 [the prediction]"
    )
    parser.add_argument("--output", metavar="FILE.png", default="explain.png", help="the picture [explain.png]")
    return parser


def would_replace(output: str, images: Sequence[str]) -> bool:
    """True if the file ``output`` exists and is one of the ``images``, or in one that is a folder."""
    place = Path(os.path.realpath(output))
    return os.path.exists(place) and any(place.is_relative_to(os.path.realpath(image)) for image in images)


def explain(own: argparse.Namespace, names: Sequence[str]) -> tuple[list[Explained], str]:
    """Images that can be explained, with their maps, and a line about the method. Prints a line for each image."""
    from scripts.common.heat_map import method
    from scripts.common.image_stream import stream
    from scripts.common.predictions import Predictor, enough_memory

    loaded = open_run(own.run, own.raw, own.device, best=own.best)
    target = None if own.target is None else class_number(own.target, loaded.classes)
    predictor = Predictor(loaded, own)
    explained = []
    title = ""
    together = min(predictor.batch_size, 16)
    with enough_memory(together):
        for batch in stream(names, loaded.preprocessing, together, 0, device=predictor.device):
            explained += explain_batch(predictor, batch, target)
            title = f"{loaded.arch}: {method(loaded, batch.images)}"
    return explained, title


def explain_batch(predictor: Predictor, batch: ImageBatch, target: int | None) -> list[Explained]:
    """Images of a batch with their maps; warns of those that cannot be read or whose outputs are not finite."""
    from scripts.common.heat_map import heat_map

    loaded = predictor.loaded
    classes = [printable(name) for name in loaded.classes]
    names = [printable(path) for path in batch.paths]
    logits = predictor.logits(batch.images)
    shown = []
    for place, (error, is_finite) in enumerate(zip(batch.errors, logits.isfinite().all(1).tolist(), strict=True)):
        if error is None and is_finite:
            shown.append(place)
        else:
            warn(f"{names[place]}: {error or NOT_FINITE}")
    if not shown:
        return []
    images = batch.images[shown]
    shares = loaded.reading.probabilities(logits[shown])
    predicted = logits[shown].argmax(1).tolist()
    maps = heat_map(loaded, images, predicted if target is None else [target] * len(shown))
    pixels = loaded.preprocessing.evaluation_transform.to_pixels(images).cpu()
    explained = []
    for row, place in enumerate(shown):
        said = f"{classes[predicted[row]]} ({100 * shares[row, predicted[row]]:.1f} %)"
        asked = "" if target is None else f"map of {classes[target]} ({100 * shares[row, target]:.1f} %)"
        print(f"{names[place]}  {said}{asked and f', {asked}'}", flush=True)
        explained.append(Explained(Path(batch.paths[place]).name, pixels[row], maps[row], said, asked))
    return explained


def class_number(text: str, classes: Sequence[str]) -> int:
    """Class index that --target means, as a class's name or else as a number. Raises ``UserError`` if there is none."""
    if text in classes:
        return classes.index(text)
    if text.isdecimal() and len(text) < 10 and int(text) < len(classes):  # int refuses thousands of digits
        return int(text)
    hint = or_nearest(text, classes, f"it has {len(classes)}, such as {', '.join(classes[:3])}")
    raise UserError(f"--target '{text[:60]}': the network knows no such class; {hint}")


def draw(output: str, title: str, explained: Sequence[Explained]) -> None:
    """Draw the ``explained`` images in a grid to ``output`` (PNG). Raises ``UserError`` if it cannot be written."""
    from matplotlib.figure import Figure

    columns = min(len(explained), 2 if len(explained) <= 4 else 3 if len(explained) <= 12 else 4)
    rows = -(-len(explained) // columns)
    figure = Figure(figsize=(3.6 * columns, 0.55 + 2.2 * rows), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=9, color=GREY, parse_math=False)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    small = {"color": GREY, "parse_math": False}  # a name may contain dollar signs
    for place in places:
        place.set_axis_off()
    for place, one in zip(places, explained, strict=False):  # the last row may have room left
        both = _side_by_side(one)
        place.imshow(both, interpolation="nearest" if max(one.pixels.shape[1:]) <= SMALL else "antialiased")
        place.set_title(one.prediction, fontsize=10, pad=12 if one.target else 4, parse_math=False)
        if one.target:
            place.text(0.5, 1.015, one.target, transform=place.transAxes, ha="center", fontsize=8, **small)
        name = _shortened(one.name)
        place.text(0.5, -0.02, name, transform=place.transAxes, ha="center", va="top", fontsize=7, **small)
    with whole_file(Path(output), f"--output {output}") as file:
        draw_png(figure, file, dpi=110)


def _side_by_side(one: Explained) -> np.ndarray:
    """Image and overlay side by side, with a white gap: uint8 (h, w, 3)."""
    import numpy as np

    from scripts.common.heat_map import overlay

    image = np.asarray(overlay(one.pixels, np.zeros_like(one.heat)))
    gap = np.full((len(image), max(1, round(GAP * image.shape[1])), 3), 255, np.uint8)
    return np.concatenate([image, gap, np.asarray(overlay(one.pixels, one.heat))], axis=1)


def _shortened(name: str) -> str:
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else f"...{name[-LONGEST_NAME:]}"


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
