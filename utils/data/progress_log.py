"""Progress of long work on many images: a bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

Log = Callable[[str], None]

LOG_SECONDS = 10  # between two lines


def silent(line: str) -> None:
    """A log that drops its lines."""


@dataclass(frozen=True)
class ProgressLog:
    """Display of progress: lines to ``log`` or, with ``bar`` and if stderr is a terminal, a bar."""

    log: Log = print
    bar: bool = False

    @contextmanager
    def counting(self, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Context that gives a function to call with the number of items just done.

        ``what`` names the work; ``total``: all items, None if unknown; ``unit``: what is counted, in the plural.
        """
        bar = tqdm(
            total=total,
            desc=what,
            unit=f" {unit}",
            leave=False,
            dynamic_ncols=True,
            disable=not (self.bar and sys.stderr.isatty()),
        )
        began = logged = time.monotonic()
        done = 0
        of_all = "" if total is None else f" of {total:,}"

        def advance(count: int) -> None:
            nonlocal done, logged
            done += count
            bar.update(count)
            now = time.monotonic()
            if bar.disable and now - logged >= LOG_SECONDS:
                logged = now
                self.log(f"{what}: {done:,}{of_all} {unit} ({done / (now - began):,.1f} {unit}/s)")

        with bar:
            yield advance
