"""What a trained network takes images for: a line for each image, as CSV or JSON lines.

    python scripts/predict.py auto photos/ --output predictions.csv           # the newest run, a folder of images
    python scripts/predict.py RUN cat.jpg 'more/**/*.png' @list.txt --top-k 5
    find photos -name '*.jpg' | python scripts/predict.py RUN - --output predictions.jsonl

RUN is a checkpoint file or a run folder. Any number of images, in the order given, with the pixels and the
probabilities that validation would see. Exit code 0: all images read; 1: some could not be, their lines say why; 2:
nothing done. Heavy imports are inside the functions.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, whole
from scripts.common.trained import add_run_arguments, find_run, open_run, warn
from scripts.predicting.rows import FORMATS, format_of, opened
from utils.config.groups.data import VIEWS
from utils.config.settings import UserError

NAME = "predict.py"


def main(argv: list[str]) -> int:
    """The tool; returns its exit code."""
    own = build_parser().parse_args(argv)
    form = format_of(own.output, own.format)
    find_run(own.run)
    from scripts.common.image_stream import image_names

    unread: Counter[str] = Counter()
    names = image_names(own.images, unread)
    began = time.monotonic()
    with opened(own.output) as file:
        total, failed = predict(own, names, form, file)
    if unread:
        left_out = ", ".join(f"{count:,} {ending}" for ending, count in sorted(unread.items()))
        warn(f"files are left out: {left_out}; convert them to JPEG or PNG")
    seconds = time.monotonic() - began
    bad = f", {failed:,} of them could not be read (column error)" if failed else ""
    where = f": {own.output}" if own.output else ""
    print(f"{total:,} image{'s' * (total != 1)} in {seconds:.1f} s{bad}{where}", file=sys.stderr)
    return 1 if failed else 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    add_run_arguments(parser)
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="files, folders with all below them, patterns, @FILE for a list with a name on each line, - for standard "
        "input",
    )
    parser.add_argument("--output", metavar="FILE", help="what to write; appears once all is written [standard output]")
    parser.add_argument("--format", choices=FORMATS, help="[by the ending of --output, otherwise csv]")
    parser.add_argument("--top-k", type=whole(1), default=1, metavar="N", help="likeliest classes of each image [1]")
    parser.add_argument(
        "--tta", choices=VIEWS, help="the mean logits of several views, as main.py's --tta [as the run]"
    )
    parser.add_argument(
        "--workers", metavar="{N,auto}", help="processes that read images; 0: none, auto: one per core [auto]"
    )
    return parser


def predict(own: argparse.Namespace, names: Iterator[str], form: str, file: TextIO) -> tuple[int, int]:
    """Write a row for each image; returns how many there are and how many of them failed. Raises ``UserError``."""
    from scripts.common.image_stream import stream
    from scripts.common.predictions import enough_memory
    from scripts.common.predictor import Predictor
    from scripts.predicting.rows import rows_of, writer
    from utils.data.progress_log import ProgressLog
    from utils.runtime.cpu import cores_per_process

    predictor = Predictor(open_run(own.run, own.raw, own.device, best=own.best), own)
    loaded = predictor.loaded
    if own.top_k > len(loaded.classes):
        raise UserError(f"--top-k {own.top_k}: {loaded.path} knows only {len(loaded.classes)} classes")
    workers = cores_per_process(1) if predictor.workers == "auto" else predictor.workers
    log(f"{loaded.path}: {loaded.arch}, {len(loaded.classes)} classes")
    batches = stream(
        names,
        loaded.preprocessing,
        predictor.batch_size,
        workers,
        device=predictor.device,
        channels_last=predictor.channels_last,
    )
    total = 0
    failed = 0
    shows_lines = own.output is None and sys.stdout.isatty()  # which a bar would break up
    progress = ProgressLog(log, bar=not shows_lines)
    with progress.counting("Predicting", None, "images") as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # --workers is the user's choice
        with enough_memory(predictor.batch_size):
            for batch in batches:
                if not total:  # an empty list is a mistake, which leaves no header behind
                    write = writer(file, form, own.top_k)
                for row in rows_of(batch, predictor.logits(batch.images), loaded.classes, own.top_k):
                    write(row)
                    failed += row.error is not None
                total += len(batch.paths)
                advance(len(batch.paths))
    if not total:
        raise UserError("IMAGES: the list is empty; give at least one image")
    return total, failed


def log(line: str) -> None:
    """A line about the progress, if no bar is shown."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
