"""Files that a tool writes: checks of their names, and writing that leaves either a whole file or none."""

from __future__ import annotations

import base64
import csv
import functools
import io
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from utils.config.settings import as_user_error
from utils.runtime import files

if TYPE_CHECKING:
    import jinja2
    import numpy as np
    from matplotlib.figure import Figure
    from PIL import Image


def wrong_name(flag: str, name: str, kind: str, *endings: str) -> str | None:
    """Reason why ``name``, given by ``flag``, cannot name a file of ``kind``; None if it can.

    ``kind``: text such as 'a .csv'. ``endings``: the allowed endings, in lower case.
    """
    path = Path(name)
    if "\0" in name or path.suffix.lower() not in endings:
        return f"{flag} {name}: must be the name of {kind} file"
    if os.path.isdir(path) or not os.path.isdir(path.absolute().parent):
        return f"{flag} {name}: its folder does not exist, or it is a folder itself"
    return None


@contextmanager
def whole_file(path: Path, said: str, advice: str = "", mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """Context that gives a file, which becomes ``path`` once everything is written; an error leaves nothing behind.

    ``mode`` and ``options`` are those of ``open``. ``said``, ``advice``: what ``UserError`` says around the reason why
    the file cannot be written, such as '--output a.csv'.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with (
        as_user_error(f"{said}: cannot be written", advice=advice),
        files.whole_file(path, mode, partial=partial, durable=True, **options) as file,
    ):
        yield file


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Write ``rows`` as CSV. ``columns``: the keys to write; by default the first row's, if ``rows`` is a sequence.

    Raises ``UserError`` if the file cannot be written.
    """
    with whole_file(path, f"--output {path}", mode="w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        lines = csv.DictWriter(file, columns or list(rows[0]))
        lines.writeheader()
        lines.writerows(rows)


def draw_png(figure: Figure, file: Path | IO[bytes], dpi: int = 100) -> None:
    """Draw ``figure`` into a PNG file; letters that its font lacks are boxes, of which matplotlib does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(file, dpi=dpi, format="png")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8. Raises ``UserError`` if the file cannot be written."""
    with whole_file(path, f"--output {path}", mode="w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def filled(template: Path, **values: Any) -> str:
    """Text of the Jinja ``template``, filled with ``values``; it may use others in its folder.

    In a template whose name ends in .html, values are escaped unless they are ``Markup``.
    """
    return _templates(template.parent).get_template(template.name).render(values)


@functools.cache  # compiling them takes longer than filling them
def _templates(folder: Path) -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )


def data_url(picture: Image.Image, kind: str, **options: Any) -> str:
    """``data:`` URL of a picture, as a file of ``kind``, 'png' or 'jpeg', saved with Pillow's ``options``."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def plain(value: Any) -> Any:
    """``value`` for JSON: NaN and infinite numbers are replaced by None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(values: Sequence[float] | np.ndarray, digits: int = 6) -> list[float | int | None]:
    """Numbers for JSON: ``digits`` significant digits, whole numbers without a point, None for values not finite."""
    return [number(value, digits) for value in values]


def number(value: float, digits: int = 6) -> float | int | None:
    """One number for JSON, as in ``numbers``."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}") if abs(value) < 10**digits or value != round(value) else value
    return int(short) if short == int(short) and abs(short) < 2**53 else float(short)
