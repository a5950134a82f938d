"""Scores a run's exports as others would: in onnxruntime, and in timm's own validation loop with timm's own transforms.

    python scripts/compare_with_timm.py auto            # the newest run below runs/, of a network of timm's

Prints the top-1 of each on all images that the run validates on, how far their pixels lie from exactly resized ones,
and the images that only one of them gets right. Writes nothing that stays. Heavy imports are inside the functions.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, table
from scripts.common.trained import add_run, find_run, open_run
from scripts.exporting.formats import missing_packages
from utils.config.settings import UserError

if TYPE_CHECKING:
    import torch

    from models.load import Loaded
    from scripts.common.predictions import Predictions
    from scripts.exporting.subject import Subject

NAME = "compare_with_timm.py"
SHOWN = 10  # images
ORIENTATION = 0x0112  # EXIF's tag; 1 is upright
BATCH = 64


class Pixels(NamedTuple):
    """Of an image as validation sees it and as timm's transforms do: levels from 0 to 255.

    ``decoded``: by how much the decoded pixels here and in Pillow differ at most, before anything is resized; NaN if
    the file is turned here, as its EXIF says, and not in timm. ``ours`` and ``theirs``: how far the level that differs
    most from the exactly resized image, each of its own decoded pixels, lies from it. ``changed``: the share of levels
    that differ.
    """

    decoded: float
    ours: float
    theirs: float
    changed: float


def main(argv: list[str]) -> int:
    """The tool; returns its exit code."""
    own = build_parser().parse_args(argv)
    find_run(own.run)
    if mistake := missing_packages("onnx"):
        raise UserError(mistake)
    from scripts.common.predictions import Chosen, predict_split
    from scripts.exporting import images, onnx_files, steps
    from scripts.exporting.subject import Subject

    loaded = open_run(own.run, own.raw, "cpu", best=own.best, for_autocast=False)
    subject = Subject.of(loaded, own.raw, inside=False)
    steps.refuse_other_networks("timm", subject)
    refuse_stored_images(loaded)
    settings = {**loaded.settings, "fp32_layers": None}  # exports compute in float32
    chosen = dataclasses.replace(Chosen.of(own), device="cpu", amp="off", tta="none")
    ours = predict_split(dataclasses.replace(loaded, settings=settings), chosen)
    with tempfile.TemporaryDirectory() as folder:
        timm_file = Path(folder, "model.safetensors")
        onnx_file = Path(folder, "model.onnx")
        steps.write("timm", subject, timm_file, images.noise(subject.shape))
        steps.write("onnx", subject, onnx_file, images.noise(subject.shape))
        network = onnx_files.OnnxNetwork(onnx_file, subject)
        onnx = predict_split(dataclasses.replace(loaded, network=network, settings=settings), chosen)
        theirs, pixels = in_timm(folder, subject, ours)
    rows = {"this repository": ours.logits, "onnxruntime, the same pixels": onnx.logits, "timm, its own pixels": theirs}
    print(report(ours, rows))
    print(pixel_report(pixels))
    print(differences(ours, theirs))
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    add_run(parser)
    parser.add_argument("--datapath", metavar="FOLDER", help="the run's data, if it is elsewhere now")
    parser.add_argument("--skip-bad-images", action="store_true", help="leave out unreadable images, and name them")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no bar")
    return parser


def refuse_stored_images(loaded: Loaded) -> None:
    """Raise ``UserError`` if the images are no files of any size, which timm's transforms are for."""
    if loaded.settings.get("dataname") != "folder" or loaded.preprocessing.stored_size:
        raise UserError(f"{loaded.path}: was not trained on class folders of files, which timm reads")


def in_timm(folder: str, subject: Subject, ours: Predictions) -> tuple[torch.Tensor, list[Pixels]]:
    """timm's logits of the images in the order of ``ours``, float32 (n, classes), and what its transforms make of them.

    As timm's ``validate.py`` does it: the network from the exported ``folder``, transforms from its ``config.json``.
    """
    import timm
    import torch
    from PIL import Image

    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=network))
    logits = []
    pixels = []
    with torch.inference_mode():
        for first in range(0, len(ours), BATCH):
            batch = []
            for path in ours.ids[first : first + BATCH]:
                with Image.open(path) as image:  # like timm's ImageDataset
                    batch.append(transform(image.convert("RGB")))
                pixels.append(compared(path, batch[-1], subject))
            logits.append(network(torch.stack(batch)))
    return torch.cat(logits), pixels


def compared(path: str, theirs: torch.Tensor, subject: Subject) -> Pixels:
    """``theirs``: what timm's transforms make of the file, float32 (3, h, w), normalised."""
    import torch
    from PIL import Image

    from utils.data.images.decoding import decode_box, to_tensor

    shown = subject.loaded.preprocessing
    view = shown.view(shown.val_image_size)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (shown.mean, shown.std))
    with Image.open(path) as image:
        turned = image.getexif().get(ORIENTATION, 1) != 1
        decoded = to_tensor(image.convert("RGB"))
    place = view.place(*reversed(decoded.shape[1:]))
    left, top, right, bottom = place.box
    box = decoded[:, top:bottom, left:right]
    own, own_place = decode_box(path, view, shown.colour)
    ours = view.show(own, own_place)
    levels = (255 * (theirs * std + mean)).round()
    same_way = own.shape == box.shape and not turned
    return Pixels(
        float((own.double() - box.double()).abs().max()) if same_way else math.nan,
        float((ours - view.show(own.double(), own_place)).abs().max()),
        float((levels - view.show(box.double(), place)).abs().max()),
        float((ours != levels).float().mean()),
    )


# ------------------------------------------------------------------------------------------- output


def report(ours: Predictions, rows: dict[str, torch.Tensor]) -> str:
    """How many images each gets right, and how its logits (n, classes) differ from those of ``ours``."""
    lines = []
    for name, logits in rows.items():
        right = int((logits.argmax(1) == ours.labels).sum())
        other = int((logits.argmax(1) != ours.logits.argmax(1)).sum())
        apart = (logits - ours.logits).abs().amax(1)
        lines.append(
            [
                name,
                f"{right:,}",
                f"{100 * right / len(ours):.2f}",
                f"{other:,}",
                f"{apart.median():.1e}",
                f"{apart.max():.1e}",
            ]
        )
    heads = ["", "right", "top-1 %", "other answers", "logits differ: median", "most"]
    return f"{len(ours):,} validation images, in float32\n{table(heads, lines)}"


def pixel_report(pixels: list[Pixels]) -> str:
    """Where the pixels differ, and by how much."""
    count = len(pixels)
    same = sum(one.decoded == 0 for one in pixels)
    turned = sum(math.isnan(one.decoded) for one in pixels)
    ours = max(one.ours for one in pixels)
    theirs = max(one.theirs for one in pixels)
    most = max((one.decoded for one in pixels if one.decoded > 0), default=0)
    decoded = [f"{same:,} of {count:,} files give the same pixels here and in Pillow"]
    decoded += [f"those of {count - same - turned:,} differ by up to {most:.0f} levels"] * (most > 0)
    decoded += [f"{turned:,} are turned as EXIF says here, and not in timm"] * (turned > 0)
    return (
        f"Decoded: {'; '.join(decoded)}\n"
        f"Resized: {100 * sum(one.changed for one in pixels) / count:.1f} % of the levels (0 to 255) differ; from the "
        f"exactly resized image of what each\ndecoded, which has fractions, those of this repository lie at most "
        f"{ours:.2f} levels, timm's (Pillow's) at most {theirs:.2f}"
    )


def differences(ours: Predictions, theirs: torch.Tensor) -> str:
    """The images that get another answer in timm, and how near the two likeliest classes are to each other."""
    places = (ours.logits.argmax(1) != theirs.argmax(1)).nonzero().flatten().tolist()
    if not places:
        return "Each image gets the same answer"
    rows = []
    for place in places[:SHOWN]:
        margin = _margin(ours.logits[place])
        best, other = (ours.classes[int(logits[place].argmax())] for logits in (ours.logits, theirs))
        path = Path(ours.ids[place])
        label = ours.classes[int(ours.labels[place])]
        rows.append([f"{path.parent.name}/{path.name}", label, best, other, f"{margin:.4f}"])
    usual = float(sorted(_margin(row) for row in ours.logits)[len(ours) // 2])
    more = f" (not shown: {len(places) - SHOWN:,} more)" if len(places) > SHOWN else ""
    heads = ["image", "class", "here", "in timm", "logits apart"]
    return (
        f"Other answers in timm{more}; half of all images have their two highest logits more than {usual:.2f} apart\n"
        f"{table(heads, rows)}"
    )


def _margin(logits: torch.Tensor) -> float:
    """By how much the highest exceeds the next."""
    first, second = logits.topk(2).values.tolist()
    return first - second


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
