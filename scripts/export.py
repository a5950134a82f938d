"""Write a trained network as a file that other programs run, and check that it predicts the same there.

    python scripts/export.py auto --to onnx --output exported                       # the newest run below runs/
    python scripts/export.py RUN --to onnx --with-preprocessing --quantise static --output small.onnx
    python scripts/export.py RUN --to timm --output my_network
    python scripts/export.py RUN --to timm --output my_network --push ORG/NAME      # also to the Hugging Face Hub

RUN is a checkpoint or a run folder. A model card, README.md, is written beside each export. The library that the export
is for loads it again in a fresh process, and the export appears only if it predicts what the network predicts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, refuse, run_tool, whole
from scripts.common.trained import add_run, find_run, open_run
from scripts.exporting.formats import FORMATS, Place, missing_packages
from utils.config.settings import UserError

NAME = "export.py"
CALIBRATION_IMAGES = 256


def main(argv: list[str]) -> int:
    own = build_parser().parse_args(argv)
    refuse_mistakes(own)
    place = Place.of(own.output, own.to)
    find_run(own.run)
    from scripts.exporting import pushing

    if own.push:
        pushing.refuse_mistakes(own.push)
    from scripts.common.choice import Chosen
    from scripts.common.predictions import warn_of_other_views
    from scripts.exporting import steps
    from scripts.exporting.card import card
    from scripts.exporting.checking import ExportFailure
    from scripts.exporting.images import refuse_missing, table_of, to_compare_on
    from scripts.exporting.subject import Subject

    divided = FORMATS[own.to].holds_code  # by the temperature, if there is one, which takes code, not only weights
    loaded = open_run(own.run, own.raw, "cpu", best=own.best, for_autocast=False, calibrated=divided)  # in float32
    subject = Subject.of(loaded, own.raw, own.with_preprocessing, divided)
    steps.refuse_other_networks(own.to, subject)
    if own.with_preprocessing and loaded.preprocessing.levels == "all":
        raise UserError("--with-preprocessing takes 8 bits, and this network sees all levels; leave it out")
    print(f"{loaded.path}: {loaded.arch}, {len(loaded.classes)} classes; {subject.weights}", flush=True)
    warn_of_other_views(loaded, "none")  # an export has one view
    if own.quantise:
        refuse_missing(loaded, ("val", "train") if own.quantise == "static" else ("val",), own.datapath)
    images, source = to_compare_on(subject, own.images, own.datapath)
    quantised: tuple[str, ...] = ()
    try:
        with place.writing() as folder:
            model = folder / place.model
            steps.write(own.to, subject, model, images)
            checked = steps.check(own.to, subject, model, images)
            if own.quantise:
                scored = replace(Chosen.of(own), labels=table_of(loaded, own.datapath))
                quantised = steps.quantise(
                    own.quantise, subject, model, own.calibration_images or CALIBRATION_IMAGES, scored
                )
                checked = steps.check(own.to, subject, model, images, quantised=True)
            text = pushing.FRONT_MATTER if own.push else ""
            text += card(own.to, subject, place.model, f"on {source}: {checked}", quantised)
            # A class has its folder's name, which may not be text in any encoding.
            (folder / place.card).write_text(text, encoding="utf-8", errors="replace")
            files = [
                f"{place.folder / path.name} ({steps.in_words(path.stat().st_size)})"
                for path in sorted(folder.iterdir())
            ]
    except ExportFailure as error:
        print(f"{NAME}: nothing was exported: {error}", file=sys.stderr)
        return 1
    for line in (*quantised, f"Checked on {source}: {checked}", f"Wrote {', '.join(files)}"):
        print(line, flush=True)
    if own.push:
        try:
            print(f"Pushed to {pushing.push(place.folder, own.push, own.private)}")
        except pushing.PushFailure as error:
            print(f"{NAME}: not pushed: {error}", file=sys.stderr)
            return 1
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    add_run(parser)
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), help="the format, named after what loads it")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help="a new folder, or for one with a file ending (.onnx, .pt2, .safetensors, .pth) the file",
    )
    parser.add_argument(
        "--with-preprocessing",
        action="store_true",
        help="onnx, torch-export: takes uint8 images of the network's size and gives probabilities",
    )
    parser.add_argument(
        "--quantise",
        choices=("dynamic", "static"),
        help="onnx: 8 bits; the range of a layer's inputs is measured in each batch, or fixed on training images",
    )
    parser.add_argument(
        "--calibration-images",
        type=whole(1, 10**5),
        metavar="N",
        help=f"--quantise static: how many [{CALIBRATION_IMAGES}]",
    )
    parser.add_argument(
        "--skip-bad-images", action="store_true", help="--quantise: leave out unreadable images, and name them"
    )
    parser.add_argument(
        "--push", metavar="ORG/NAME", help="--to timm: then push the folder to this repository of the Hugging Face Hub"
    )
    parser.add_argument("--private", action="store_true", help="--push: a repository that is made now is private")
    parser.add_argument("--images", metavar="FOLDER", help="compare on these images [on some of the run's validation]")
    parser.add_argument("--datapath", metavar="FOLDER", help="the run's data, if it is elsewhere now")
    return parser


def refuse_mistakes(own: argparse.Namespace) -> None:
    """Raise ``UserError`` for contradictory flags and missing packages, before any work."""
    mistakes = []
    if own.with_preprocessing and not FORMATS[own.to].holds_code:
        mistakes.append(f"--with-preprocessing: --to {own.to} holds weights alone; use onnx or torch-export")
    if own.quantise and own.to != "onnx":
        mistakes.append(f"--quantise {own.quantise} needs --to onnx")
    if own.calibration_images and own.quantise != "static":
        mistakes.append(f"--calibration-images {own.calibration_images} needs --quantise static")
    if own.skip_bad_images and not own.quantise:
        mistakes.append("--skip-bad-images needs --quantise, which reads all images")
    if own.push and own.to != "timm":
        mistakes.append(f"--push {own.push} needs --to timm, the format that timm loads from there")
    if own.private and not own.push:
        mistakes.append("--private needs --push ORG/NAME")
    if mistake := missing_packages(own.to):
        mistakes.append(mistake)
    refuse(mistakes)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
