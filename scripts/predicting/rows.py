"""A line for each image: what the network takes it for, or why it could not be read."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from scripts.common.trained import NOT_FINITE
from utils.config.settings import UserError

if TYPE_CHECKING:
    import torch

    from scripts.common.image_stream import ImageBatch

FORMATS = {"csv": (".csv",), "jsonl": (".jsonl", ".ndjson", ".json")}  # endings of --output


class Row(NamedTuple):
    """An image's ``path`` as it was named, its likeliest classes with their probabilities, or an ``error``."""

    path: str
    top: Sequence[tuple[str, float]]
    error: str | None = None


def rows_of(batch: ImageBatch, logits: torch.Tensor, classes: Sequence[str], count: int) -> Iterator[Row]:
    """A row for each image of ``batch``, with its ``count`` likeliest classes; ``logits`` float32 (n, classes).

    Among equal logits, which are common in bfloat16, the first class comes first, as in validation.
    """
    places = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    probabilities = logits.softmax(1).gather(1, places).tolist()
    finite = logits.isfinite().all(1).tolist()
    columns = zip(batch.paths, batch.errors, finite, places.tolist(), probabilities, strict=True)
    for path, error, is_finite, chosen, shares in columns:
        error = error or (None if is_finite else NOT_FINITE)
        top = [] if error else [(classes[place], share) for place, share in zip(chosen, shares, strict=True)]
        yield Row(path, top, error)


# ------------------------------------------------------------------------------------------ as text


def writer(file: TextIO, form: str, count: int) -> Callable[[Row], None]:
    """A function that writes a row with ``count`` classes to ``file`` as ``form``, 'csv' or 'jsonl'."""
    if form == "jsonl":
        return lambda row: print(_json(row), file=file)
    lines = csv.writer(file, lineterminator="\n")
    numbers = ["", *(f"_{place}" for place in range(2, count + 1))]
    lines.writerow(["path", *(f"{name}{number}" for number in numbers for name in ("class", "probability")), "error"])

    def write(row: Row) -> None:
        cells = [cell for name, share in row.top for cell in (name, _digits(share))]
        lines.writerow([row.path, *(cells or [""] * 2 * count), row.error or ""])

    return write


def _json(row: Row) -> str:
    top = [{"class": name, "probability": float(_digits(share))} for name, share in row.top]
    best = top[0] if top else {"class": None, "probability": None}
    return json.dumps({"path": row.path, **best, "top": top, "error": row.error})


def _digits(share: float) -> str:
    return f"{share:.7g}"  # float32 has no more


# ------------------------------------------------------------------------------------------- where to


def format_of(output: str | None, given: str | None) -> str:
    """The format that --format or the ending of --output names. Raises ``UserError`` for an ending that is neither."""
    if given or output is None:
        return given or "csv"
    for form, endings in FORMATS.items():
        if output.lower().endswith(endings):
            return form
    known = ", ".join(ending for endings in FORMATS.values() for ending in endings)
    raise UserError(f"--output {output}: must end with {known}, or give --format")


@contextmanager
def opened(output: str | None) -> Iterator[TextIO]:
    """A file that becomes ``output`` when all is written, and of which nothing is left otherwise; None: stdout.

    Names in any encoding are written as they are. Raises ``UserError`` if it cannot be written.
    """
    if output is None:
        sys.stdout.reconfigure(errors="surrogateescape")
        yield sys.stdout
        return
    path = Path(os.path.realpath(output))
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"--output {output}: is no file; leave it out to write to stdout")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):  # where nothing could be written
            temporary.unlink()
