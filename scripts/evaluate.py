"""What a trained network gets right and wrong: metrics of all images and of each class, calibration, comparison.

    python scripts/evaluate.py auto                                         # the newest run, on its validation images
    python scripts/evaluate.py RUN --split test --output evaluation         # with JSON, CSV and each prediction
    python scripts/evaluate.py RUN --datapath FOLDER --tta flip             # any class folders
    python scripts/evaluate.py RUN --compare RUN2 --output comparison       # which is better, and where
    python scripts/evaluate.py RUN --store calibrated.pt                    # a copy with calibrated probabilities
    python scripts/evaluate.py calibrated.pt --reject-below 0.8             # how many answers are sure, and right
    python scripts/evaluate.py RUN --other-images FOLDER                    # does it notice images of no class?
    python scripts/torchrun.py --nproc-per-node 8 scripts/evaluate.py RUN   # on several GPUs

Top-1, top-5 and loss are the same as with main.py --evaluate (except for the temperature that a copy keeps). Writes
nothing without --output and --store.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, each_of, make_folder, refuse, run_tool, say, warn
from scripts.common.output import wrong_name
from scripts.common.trained import (
    add_images_of_data,
    add_rejection,
    add_run_arguments,
    add_views,
    find_run,
    open_run,
    refuse_rejection,
)
from utils.checkpoint.fingerprint import same_images
from utils.config.settings import Settings, UserError
from utils.runtime.process import RankInfo, end_process

if TYPE_CHECKING:
    from models.load import Loaded
    from scripts.common.choice import Chosen
    from scripts.common.predictions import AnyPredictions
    from scripts.evaluation.comparison import Comparison
    from scripts.evaluation.result import Evaluation
    from scripts.evaluation.several_labels import LabelComparison
    from utils.runtime.distributed import Distributed

NAME = "evaluate.py"


def main(argv: list[str]) -> int:
    own = build_parser().parse_args(argv)
    try:
        refuse_mistakes(own)
        each_of(find_run, filter(None, (own.run, own.compare)))  # before any slow import
        from scripts.common.choice import Chosen, settings_of
        from utils.runtime.distributed import Distributed

        loaded = open_run(own.run, own.raw, "cpu", best=own.best)
        other = open_run(own.compare, own.raw, "cpu", best=own.best) if own.compare else None
        args = settings_of(loaded, Chosen.of(own))
        refuse_rejection(own.reject_below, loaded)
        if other is not None and other.reading.several != loaded.reading.several:
            raise UserError(f"--compare {own.compare}: one of the two gives one label an image, the other several")
        if own.store and loaded.confidence is not None:
            raise UserError(
                f"--store: {loaded.path} is such a copy already; evaluate the checkpoint that it is made of"
            )
    except UserError as error:
        error.on_all_ranks = True  # all ranks read the same
        raise
    with Distributed(RankInfo.from_environment(), args.run, args.precision.tf32) as distributed:
        refuse_other_files(distributed, loaded, *filter(None, [other]))
        if own.output is not None:
            from scripts.evaluation.files import refuse_others

            distributed.run_on_rank0(lambda: refuse_others(make_folder(own.output)))
        found = evaluate(own, loaded, other, distributed)
        if distributed.is_main:
            present(own, loaded, describe(own, loaded, other, args, distributed), found)
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    parser.usage = f"python scripts/{NAME} RUN [flag ...]"
    add_run_arguments(parser)
    add_images_of_data(parser)
    add_views(parser)
    parser.add_argument("--compare", metavar="RUN2", help="another network on the same images: which is better, where")
    parser.add_argument(
        "--store",
        metavar="FILE",
        help="write a copy of the checkpoint there, with the temperature fitted here, by which all tools divide, "
        "and for several labels each class's threshold",
    )
    parser.add_argument(
        "--distance",
        action="store_true",
        help="--store: also keep how far features lie from those of the training images, which are read for that",
    )
    parser.add_argument(
        "--other-images",
        metavar="FOLDER",
        help="images of no class: how well distance and confidence tell them from those evaluated",
    )
    add_rejection(parser)
    parser.add_argument("--output", metavar="DIR", help="write JSON and CSV files there, with each image's prediction")
    parser.add_argument("--workers", metavar="{N,auto}", help="processes that read images, per process [auto]")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no bar")
    return parser


def refuse_mistakes(own: argparse.Namespace) -> None:
    """Raise ``UserError`` for contradictory flags, before any work."""
    mistakes = []
    if own.distance and not own.store:
        mistakes.append("--distance needs --store FILE, which keeps it; --other-images measures it alone")
    if own.store and own.split == "train":
        mistakes.append("--store contradicts --split train: on images that it was trained on a network is too sure")
    if own.store and os.path.lexists(own.store):
        mistakes.append(f"--store {own.store}: exists already; remove it or choose another name")
    elif own.store is not None and (problem := wrong_name("--store", own.store, "a .pt", ".pt")):
        mistakes.append(problem)
    if own.other_images is not None and not os.path.isdir(own.other_images):
        mistakes.append(f"--other-images {own.other_images}: is no folder")
    refuse(mistakes)


def refuse_other_files(distributed: Distributed, *loaded: Loaded) -> None:
    """Raise ``UserError`` if the processes have read different checkpoints, as of a run that goes on meanwhile."""
    read = distributed.gather([(str(one.path), (one.progress or {}).get("step")) for one in loaded])
    if any(its != read[0] for its in read):
        shown = " and ".join(f"{path} of step {step}" for path, step in dict.fromkeys(chain.from_iterable(read)))
        raise UserError(f"the processes have read {shown}; evaluate a copy of the file", on_all_ranks=True)


def evaluate(own: argparse.Namespace, loaded: Loaded, other: Loaded | None, distributed: Distributed) -> Evaluation:
    """Predict with ``loaded``, compare it with ``other`` if given, and measure what the flags ask for."""
    from scripts.common.choice import Chosen
    from scripts.common.predictions import predict_split
    from scripts.evaluation.rejection import Rejection
    from scripts.evaluation.result import Evaluation
    from scripts.evaluation.summary import fit_temperature

    chosen = Chosen.of(own)
    seen = own.distance or own.other_images is not None
    predictions = predict_split(loaded, chosen, distributed, features=seen)
    found = Evaluation(
        predictions,
        fit_temperature(predictions),
        None if other is None else compare_with(other, loaded, chosen, predictions, distributed),
        None if own.reject_below is None else Rejection.of(predictions, own.reject_below),
    )
    return measure_distance(own, loaded, chosen, found, distributed) if seen else found


def compare_with(
    other: Loaded, loaded: Loaded, chosen: Chosen, predictions: AnyPredictions, distributed: Distributed
) -> Comparison | LabelComparison:
    """Compare ``loaded``'s predictions with those of the network ``other`` on the same images."""
    from scripts.common.choice import point_of, seen_before, settings_of
    from scripts.common.predictions import predict_split
    from scripts.evaluation.comparison import Comparison, with_data_settings_of
    from scripts.evaluation.several_labels import LabelComparison
    from utils.data.datasets import seen_in_training

    if chosen.datapath is None and loaded.fingerprint is not None:
        settings = settings_of(loaded, chosen).data
        if line := seen_in_training(predictions.images, loaded.fingerprint, settings, point_of(other)):
            warn(line)
    for line in seen_before(predictions.images, other, chosen) if chosen.may_be_new else ():
        warn(line)
    second = predict_split(with_data_settings_of(other, loaded), chosen, distributed, first=predictions)
    return (LabelComparison if loaded.reading.several else Comparison).of(predictions, second)


def measure_distance(
    own: argparse.Namespace, loaded: Loaded, chosen: Chosen, found: Evaluation, distributed: Distributed
) -> Evaluation:
    """Add to ``found`` the distance (the checkpoint's, or one fitted here) and the results for --other-images."""
    import numpy as np

    from scripts.common.image_stream import image_names
    from scripts.common.predictions import predict_split
    from scripts.evaluation.distance import MOST_FITTED, Others, fit_distance

    distance = loaded.confidence and loaded.confidence.distance
    fitted = len(found.predictions) if own.split == "train" else 0
    if distance is None:
        moved = not os.path.exists(str(loaded.settings.get("datapath") or "."))
        place, labels = (own.datapath, own.labels) if moved else (None, None)  # the run's own
        training = replace(chosen, split="train", datapath=place, labels=labels, most=MOST_FITTED)
        its = predict_split(loaded, training, distributed, features=True)
        distance = fit_distance(its.features, its.labels)
        usual = np.nanquantile(distance(found.predictions.features).numpy(), 0.95)  # 95 % of the images lie within it
        distance = replace(distance, usual=float(usual))
        fitted = len({*map(os.path.realpath, its.ids)} & {*map(os.path.realpath, found.predictions.ids)})
    others = None
    if own.other_images is not None:
        names = tuple(image_names([own.other_images]))
        second = predict_split(loaded, replace(chosen, split="val", files=names), distributed, features=True)
        others = Others.of(own.other_images, distance, found.predictions, second, fitted)
    return replace(found, distance=distance, others=others)


def describe(
    own: argparse.Namespace, loaded: Loaded, other: Loaded | None, args: Settings, distributed: Distributed
) -> dict[str, Any]:
    """Facts for JSON about the network, the images, and how the network was run on them."""
    import torch

    from scripts.common.choice import Chosen, settings_of
    from utils.precision.amp import resolve_amp

    others = other and settings_of(other, Chosen.of(own))  # each network runs as in its training, unless flags differ
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
    """Paths of the checkpoints whose weights were chosen by the images evaluated here."""
    from scripts.common.choice import validated_on

    if not validated_on(own, loaded.settings):
        return []
    of_these = [one for one in (loaded, other) if one is not None and same_images(one.fingerprint, loaded.fingerprint)]
    return [str(one.path) for one in of_these if one.is_favoured]


def present(own: argparse.Namespace, loaded: Loaded, description: dict[str, Any], found: Evaluation) -> None:
    """Print the report, and write the files."""
    from scripts.evaluation.files import save, write_all
    from scripts.evaluation.result import store
    from utils.record.summary import figures as last_line

    predictions = found.predictions
    kept = loaded.confidence
    of_these = kept is not None and same_images(kept.images, predictions.digest)
    if kept is not None:
        fitted = {"fitted": kept.fitted, "fitted_on_some_of_these_images": of_these}
        description["kept"] = {"temperature": kept.temperature, **fitted}
    if predictions.reading.several:
        description["thresholds_of_these_images"] = of_these
    write = partial(write_all, description=description, found=found)
    names = [] if own.output is None else save(Path(own.output), write)
    parts = [*parts_of(own.output, description, found)]
    if names:
        parts.append(f"Files in {own.output}: {', '.join(names)}")
    print("\n\n".join(parts))
    print(last_line(predictions.report).replace("val_", f"{own.split}_"), flush=True)
    if own.store is not None:
        say(f"{own.store} keeps {store(Path(own.store), loaded, found, description)}")


def parts_of(output: str | None, description: dict[str, Any], found: Evaluation) -> Iterator[str]:
    """Yield the parts of the report. ``output``: the folder with the report's files; None if none are written."""
    from scripts.evaluation import as_text, labels_report
    from scripts.evaluation.summary import reliability

    predictions = found.predictions
    kind, pairs = (labels_report, "cooccurrence") if predictions.reading.several else (as_text, "confusions")
    rest = ["", ""] if output is None else [f"; see {output}/{name}.csv" for name in ("classes", pairs)]
    yield as_text.heading(description, predictions.report.count)
    yield kind.overall(predictions, description)
    yield from as_text.doubtful(predictions, description)
    yield kind.classes(predictions, rest[0])
    yield kind.pairs(predictions, rest[1])
    counted = "labels" if predictions.reading.several else "images"
    yield as_text.calibration(reliability(predictions), found.temperature, counted)
    if found.rejection is not None:
        yield as_text.rejection(found.rejection)
    if found.others is not None:
        yield as_text.others(found.others)
    if found.comparison is not None:
        yield kind.compared(found.comparison, as_text.checkpoints(description))


if __name__ == "__main__":
    end_process(run_tool(NAME, main, takes_ranks=True))
