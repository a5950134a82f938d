"""What a trained network gets right and wrong: metrics of all images and of each class, calibration, comparison.

    python scripts/evaluate.py auto                                         # the newest run, on its validation images
    python scripts/evaluate.py RUN --split test --output evaluation         # with JSON, CSV and each prediction
    python scripts/evaluate.py RUN --datapath FOLDER --tta flip             # any class folders
    python scripts/evaluate.py RUN --compare RUN2 --output comparison       # which is better, and where
    python scripts/torchrun.py --nproc-per-node 8 scripts/evaluate.py RUN   # on several GPUs

Its top-1, top-5 and loss are those of main.py --evaluate. Writes nothing without --output. Heavy imports are inside the
functions.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, each_of, make_folder, run_tool, warn
from scripts.common.trained import add_run_arguments, find_run, open_run
from utils.checkpoint.fingerprint import same_images
from utils.config.groups.data import VIEWS
from utils.config.settings import Settings, UserError
from utils.runtime.process import RankInfo, end_process

if TYPE_CHECKING:
    from models.load import Loaded
    from scripts.common.predictions import Predictions
    from scripts.evaluation.comparison import Comparison
    from utils.runtime.distributed import Distributed

NAME = "evaluate.py"
BEST = "best.pt"  # of the run's own validation images


def main(argv: list[str]) -> int:
    own = build_parser().parse_args(argv)
    try:
        each_of(find_run, filter(None, (own.run, own.compare)))  # before any slow import
        from scripts.common.predictions import Chosen, settings_of
        from utils.runtime.distributed import Distributed

        loaded = open_run(own.run, own.raw, "cpu", best=own.best)
        other = open_run(own.compare, own.raw, "cpu", best=own.best) if own.compare else None
        args = settings_of(loaded, Chosen.of(own))
    except UserError as error:
        error.on_all_ranks = True  # they all read the same
        raise
    with Distributed(RankInfo.from_environment(), args.run, args.precision.tf32) as distributed:
        new = distributed.run_on_rank0(lambda: own.output is not None and not os.path.exists(own.output))
        if own.output is not None:
            distributed.run_on_rank0(lambda: make_folder(own.output))
        try:
            predictions, comparison = evaluate(own, loaded, other, distributed)
            if distributed.is_main:
                present(own, describe(own, loaded, other, args, distributed), predictions, comparison)
        finally:
            if new and distributed.is_main:
                with suppress(OSError):  # it holds the files
                    Path(own.output).rmdir()
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    parser.add_plugin()
    parser.usage = f"python scripts/{NAME} RUN [flag ...]"
    add_run_arguments(parser)
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        default="val",
        help="val: what main.py validates on; train: without augmentation; test: a test/ beside val/ [val]",
    )
    parser.add_argument(
        "--datapath",
        metavar="FOLDER",
        help="other images: class folders, or train/, val/, test/ of them; classes are matched by name",
    )
    parser.add_argument(
        "--tta", choices=tuple(VIEWS), help="test-time augmentation: mean logits of several views [as the run]"
    )
    parser.add_argument("--compare", metavar="RUN2", help="another network on the same images: which is better, where")
    parser.add_argument("--output", metavar="DIR", help="write JSON and CSV files there, with each image's prediction")
    parser.add_argument("--workers", metavar="{N,auto}", help="processes that read images, per process [as the run]")
    parser.add_argument("--skip-bad-images", action="store_true", help="leave out unreadable images, and name them")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no bar")
    return parser


def evaluate(
    own: argparse.Namespace, loaded: Loaded, other: Loaded | None, distributed: Distributed
) -> tuple[Predictions, Comparison | None]:
    """The predictions of the one network, and the comparison with the other."""
    from scripts.common.predictions import Chosen, point_of, predict_split, settings_of
    from scripts.evaluation.comparison import compare, with_data_settings_of
    from utils.data.datasets import seen_in_training

    chosen = Chosen.of(own)
    predictions = predict_split(loaded, chosen, distributed)
    if other is None:
        return predictions, None
    if own.datapath is None and loaded.fingerprint is not None:
        settings = settings_of(loaded, chosen).data
        if line := seen_in_training(predictions.images, loaded.fingerprint, settings, point_of(other)):
            warn(line)
    second = predict_split(with_data_settings_of(other, loaded), chosen, distributed)
    return predictions, compare(predictions, second)


def describe(
    own: argparse.Namespace, loaded: Loaded, other: Loaded | None, args: Settings, distributed: Distributed
) -> dict[str, Any]:
    """Facts for JSON: the network, the images, and how it was run on them."""
    import torch

    from scripts.common.predictions import Chosen, settings_of
    from utils.precision.amp import resolve_amp

    others = other and settings_of(other, Chosen.of(own))  # each runs as in its training, where no flag says otherwise
    return {
        "checkpoint": str(loaded.path),
        "step": (loaded.progress or {}).get("step"),
        "arch": loaded.arch,
        "raw_weights": own.raw,
        "dataname": None if own.datapath else args.data.dataname,
        "datapath": args.data.datapath,
        "split": own.split,
        "tta": args.data.tta,
        "amp": resolve_amp(args.precision, distributed.device),
        "device": distributed.device.type,
        "compared_with": other and str(other.path),
        "compared_tta": other and others.data.tta,
        "compared_amp": other and resolve_amp(others.precision, distributed.device),
        "chosen_by_these_images": chosen_by_these_images(own, loaded, other),
        "torch": torch.__version__,
    }


def chosen_by_these_images(own: argparse.Namespace, loaded: Loaded, other: Loaded | None) -> list[str]:
    """The checkpoints that are the best epoch of their run by its result on the images that are evaluated."""
    if not validated_on(own, loaded.settings.get("datapath")):
        return []
    of_these = [one for one in (loaded, other) if one is not None and same_images(one.fingerprint, loaded.fingerprint)]
    return [str(one.path) for one in of_these if one.path.name == BEST]


def validated_on(own: argparse.Namespace, place: object) -> bool:
    """True if the images are those that the run validated on, whose data lie at ``place``; also by another flag."""
    from utils.data.formats.class_folders import test_folder, validation_folder

    if own.datapath is None and own.split == "val":
        return True
    if own.split == "train" or not isinstance(place, str):
        return False
    root = Path(own.datapath or place)
    its_root = Path(place)
    read = test_folder(root) if own.split == "test" else validation_folder(root) or root
    theirs = validation_folder(its_root) or its_root  # test/ where there is no val/
    return read is not None and os.path.realpath(read) == os.path.realpath(theirs)


def present(
    own: argparse.Namespace, description: dict[str, Any], predictions: Predictions, comparison: Comparison | None
) -> None:
    """Print the report, and write the files."""
    from scripts.evaluation import as_text
    from scripts.evaluation.files import save
    from scripts.evaluation.summary import fit_temperature, reliability
    from utils.record.summary import figures as last_line

    temperature = fit_temperature(predictions)
    names = []
    if own.output is not None:
        names = save(Path(own.output), description, predictions, temperature, comparison)
    rest = ["", ""] if own.output is None else [f"; see {own.output}/{name}.csv" for name in ("classes", "confusions")]
    parts = [
        as_text.heading(description, predictions.report.count),
        as_text.overall(predictions),
        *as_text.doubtful(predictions, description),
        as_text.classes(predictions, rest[0]),
        as_text.confusion(predictions, rest[1]),
        as_text.calibration(reliability(predictions), temperature),
    ]
    if comparison is not None:
        parts.append(as_text.compared(comparison, as_text.checkpoints(description)))
    if names:
        parts.append(f"Files in {own.output}: {', '.join(names)}")
    print("\n\n".join(parts))
    print(last_line(predictions.report).replace("val_", f"{own.split}_"))


if __name__ == "__main__":
    end_process(run_tool(NAME, main))
