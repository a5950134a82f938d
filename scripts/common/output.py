"""Files that appear whole or not at all."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from utils.config.settings import UserError


@contextmanager
def whole_file(path: Path, said: str, advice: str = "") -> Iterator[Path]:
    """A path beside ``path`` to write to; what is there at the end takes its place, after an error nothing is left.

    Raises ``UserError`` with ``said``, such as '--output a.csv', and ``advice`` if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{said}: cannot be written ({error.strerror or error}){advice}") from error
    finally:
        with suppress(OSError):  # where nothing could be written
            temporary.unlink(missing_ok=True)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rows``, whose keys are the columns. Raises ``UserError`` if that cannot be done."""
    with whole_file(path, f"--output {path}") as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, fieldnames=list(rows[0]))
        out.writeheader()
        out.writerows(rows)
