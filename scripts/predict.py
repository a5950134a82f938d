"""Classify images with a trained network: one line per image, as CSV or JSON lines.

    python scripts/predict.py auto photos/ --output predictions.csv           # the newest run, a folder of images
    python scripts/predict.py RUN cat.jpg 'more/**/*.png' @list.txt --top-k 5
    python scripts/predict.py RUN photos/ --reject-below 0.8                  # no class for what is less likely
    find photos -name '*.jpg' | python scripts/predict.py RUN - --output predictions.jsonl

RUN is a checkpoint file or a run folder. Takes any number of images, in the order given, with the same pixels and
probabilities as in validation. Exit code 0: all images read; 1: some could not be, their lines say why; 2: no file
written.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, say, warn, whole
from scripts.common.output import whole_file
from scripts.common.trained import (
    NOT_FINITE,
    accepted,
    add_images,
    add_rejection,
    add_run_arguments,
    add_views,
    find_run,
    open_run,
    refuse_rejection,
)
from utils.config.settings import UserError
from utils.config.spelling import counted

if TYPE_CHECKING:
    from scripts.common.image_stream import ImageBatch
    from scripts.common.predictions import Predictor

NAME = "predict.py"
FORMATS = {"csv": (".csv",), "jsonl": (".jsonl", ".ndjson", ".json")}  # endings of --output
LOOKED_AT = 16  # images at the start that are checked for lost levels
SEPARATOR = ";"  # between labels in a column


def main(argv: list[str]) -> int:
    own = build_parser().parse_args(argv)
    form = format_of(own.output, own.format)
    find_run(own.run)
    from scripts.common.image_stream import image_names, warn_of

    if own.output is not None and os.path.isfile(own.output):
        refuse_to_replace(own.output, own.images)
    unread: Counter[str] = Counter()
    names = image_names(own.images, unread)
    began = time.monotonic()
    with opened(own.output) as file:
        total, failed = predict(own, names, form, file)
    warn_of(unread)
    seconds = time.monotonic() - began
    bad = f", {failed:,} of them without a prediction (see error)" if failed else ""
    where = f": {own.output}" if own.output else ""
    print(f"{counted(total)} in {seconds:.1f} s{bad}{where}", file=sys.stderr)
    return 1 if failed else 0


def refuse_to_replace(output: str, images: Sequence[str]) -> None:
    """Raise ``UserError`` if the existing file ``output`` is one of ``images``, or a list that one of them names."""
    from scripts.common.image_stream import LIST

    for name in chain.from_iterable((image, image.removeprefix(LIST)) for image in images):
        if os.path.exists(name) and os.path.samefile(name, output):
            raise UserError(f"--output {output}: is one of the images, or lists of them, to read; choose another name")


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    add_run_arguments(parser)
    add_images(parser)
    parser.add_argument("--output", metavar="FILE", help="what to write; appears once all is written [standard output]")
    parser.add_argument("--format", choices=FORMATS, help="[by the ending of --output, otherwise csv]")
    parser.add_argument(
        "--top-k",
        type=whole(1),
        metavar="N",
        help="likeliest classes of each image [1; of a network for several labels none beside the labels]",
    )
    add_rejection(parser)
    add_views(parser)
    parser.add_argument(
        "--workers", metavar="{N,auto}", help="processes that read images; 0: none, auto: one per core [auto]"
    )
    return parser


def predict(own: argparse.Namespace, names: Iterator[str], form: str, file: TextIO) -> tuple[int, int]:
    """Write a row for each image; return how many there are and how many failed. Raises ``UserError``."""
    import torch

    from scripts.common.image_stream import problem_of, stream
    from scripts.common.predictions import Predictor, enough_memory
    from utils.data.first_look import lost_levels
    from utils.data.formats.readers import ImageFiles
    from utils.data.progress_log import ProgressLog
    from utils.runtime.cpu import cores_per_process

    predictor = Predictor(open_run(own.run, own.raw, own.device, best=own.best), own)
    refuse_rejection(own.reject_below, predictor.loaded)
    loaded = predictor.loaded
    count = own.top_k or (0 if loaded.reading.several else 1)
    if count > len(loaded.classes):
        raise UserError(f"--top-k {count}: {loaded.path} knows only {len(loaded.classes)} classes")
    if form == "csv" and loaded.reading.several:
        refuse_separator_in(loaded.classes)
    also = [*["rejected"] * (own.reject_below is not None), *["distance"] * (predictor.distance is not None)]
    workers = cores_per_process(1) if predictor.workers == "auto" else predictor.workers
    say(f"{loaded.path}: {loaded.arch}, {len(loaded.classes)} classes{predictor.temperature}")
    if predictor.distance is not None:
        say(f"distance: at most {predictor.distance.usual:.4g} for 95 % of the images that it was tried on")
    first = list(islice(names, min(predictor.batch_size, LOOKED_AT)))
    there = [path for path in first if problem_of(path) is None]
    files = ImageFiles(there, torch.zeros(len(there), dtype=torch.int64), loaded.preprocessing.colour)
    for line in lost_levels(files, ("",), None) if there else ():
        warn(line)
    batches = stream(
        chain(first, names),
        loaded.preprocessing,
        predictor.batch_size,
        workers,
        device=predictor.device,
        channels_last=predictor.channels_last,
    )
    total = 0
    failed = 0
    shows_lines = own.output is None and sys.stdout.isatty()  # a bar would break up the lines
    progress = ProgressLog(say, bar=not shows_lines)
    with progress.counting("Predicting", None, "images") as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # --workers is the user's choice
        with enough_memory(predictor.batch_size):
            for batch in batches:
                if not total:  # an empty list is a mistake, which leaves no header behind
                    write = writer(file, form, count, loaded.reading.several, also)
                for row in rows_of(batch, predictor, count, own.reject_below):
                    write(row)
                    failed += row.error is not None
                total += len(batch.paths)
                advance(len(batch.paths))
    if not total:
        raise UserError("IMAGES: the list is empty; give at least one image")
    return total, failed


class PredictionRow(NamedTuple):
    """An image's ``path`` as given, its likeliest classes with their probabilities, or an ``error``.

    ``labels``: the labels that a multi-label network gives, perhaps none; None after an error. ``also``: further
    columns. The column 'rejected' has the likeliest class of a rejected image, otherwise None; 'distance' has the
    image's distance.
    """

    path: str
    top: Sequence[tuple[str, float]]
    error: str | None = None
    labels: Sequence[tuple[str, float]] | None = None
    also: Mapping[str, str | float | None] = {}


def rows_of(batch: ImageBatch, predictor: Predictor, count: int, below: float | None) -> Iterator[PredictionRow]:
    """Yield a row for each image of ``batch``, with its ``count`` likeliest classes. ``below``: see --reject-below."""
    logits = predictor.logits(batch.images)
    classes = predictor.loaded.classes
    reading = predictor.loaded.reading
    tops = reading.likeliest(logits, count)
    labels = reading.labels(logits) or [None] * len(tops)
    finite = logits.isfinite().all(1).tolist()
    distances = predictor.distances(len(logits)) or [None] * len(tops)
    rows = zip(batch.paths, batch.errors, finite, distances, tops, labels, strict=True)
    for path, error, is_finite, distance, *answers in rows:
        if error or not is_finite:
            yield PredictionRow(path, [], error or NOT_FINITE)
        else:
            top, given = (one and [(classes[place], share) for place, share in one] for one in answers)
            rejected = top[0][0] if below is not None and not accepted(top[0][1], below) else None
            yield PredictionRow(path, top, labels=given, also={"rejected": rejected, "distance": distance})


def writer(
    file: TextIO, form: str, count: int, several: bool, also: Sequence[str] = ()
) -> Callable[[PredictionRow], None]:
    """A function that writes a row with ``count`` classes to ``file`` in the format ``form``, 'csv' or 'jsonl'.

    ``several``: the network is multi-label; its labels come first. ``also``: names of further columns.
    """
    if form == "jsonl":
        return lambda row: print(_json(row, several, also), file=file)

    def write_cells(cells: Sequence[str]) -> None:
        # Python before 3.13 quotes no carriage return that does not end the line, and readers then see two rows.
        quoting = csv.QUOTE_ALL if any("\r" in cell for cell in cells) else csv.QUOTE_MINIMAL
        csv.writer(file, lineterminator="\n", quoting=quoting).writerow(cells)

    head = ["labels", "probabilities"] * several
    numbers = ["", *(f"_{place}" for place in range(2, count + 1))] if count else []
    head += [f"{name}{number}" for number in numbers for name in ("class", "probability")]
    write_cells(["path", *head, *also, "error"])

    def write(row: PredictionRow) -> None:
        labels = [(name, _digits(share)) for name, share in row.labels or ()]
        cells = [SEPARATOR.join(column) for column in zip(*labels, strict=True)] or [""] * 2 if several else []
        cells += [cell for name, share in row.top for cell in (name, _digits(share))]
        if row.also.get("rejected") is not None:
            cells[0] = ""
        more = (row.also.get(name) for name in also)
        cells += [_digits(one) if isinstance(one, float) else one or "" for one in more]
        write_cells([row.path, *(cells if row.error is None else [""] * len([*head, *also])), row.error or ""])

    return write


def refuse_separator_in(classes: Sequence[str]) -> None:
    """Raise ``UserError`` if a class's name contains the separator of a column of labels."""
    if found := [name for name in classes if SEPARATOR in name]:
        raise UserError(f"--format csv: the class '{found[0]}' holds '{SEPARATOR}', which separates labels; use jsonl")


def _json(row: PredictionRow, several: bool, also: Sequence[str]) -> str:
    top = _as_dicts(row.top)
    more = {name: float(_digits(one)) if isinstance(one := row.also.get(name), float) else one for name in also}
    if several:
        labels = row.labels and _as_dicts(row.labels)
        return json.dumps({"path": row.path, "labels": labels, "top": top, **more, "error": row.error})
    best = top[0] if top else {"class": None, "probability": None}
    if more.get("rejected") is not None:
        best = {**best, "class": None}
    return json.dumps({"path": row.path, **best, "top": top, **more, "error": row.error})


def _as_dicts(classes: Sequence[tuple[str, float]]) -> list[dict[str, str | float]]:
    return [{"class": name, "probability": float(_digits(share))} for name, share in classes]


def _digits(share: float) -> str:
    return f"{share:.7g}"  # float32 has no more digits


def format_of(output: str | None, given: str | None) -> str:
    """Format that --format or the ending of --output names. Raises ``UserError`` for an ending that names none."""
    if given or output is None:
        return given or "csv"
    for form, endings in FORMATS.items():
        if output.lower().endswith(endings):
            return form
    known = ", ".join(ending for endings in FORMATS.values() for ending in endings)
    raise UserError(f"--output {output}: must end with {known}, or give --format")


@contextmanager
def opened(output: str | None) -> Iterator[TextIO]:
    """Context that gives a file, which becomes ``output`` once all is written; after an error there is none.

    If ``output`` is None, the file is stdout. Names are written byte for byte, whatever their encoding. Raises
    ``UserError`` if the file cannot be written.
    """
    if output is None:
        yield sys.stdout
        return
    path = Path(os.path.realpath(output))
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"--output {output}: is no file; leave it out to write to stdout")
    text = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    with whole_file(path, f"--output {output}", mode="w", **text) as file:
        yield file


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
