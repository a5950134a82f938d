"""What millions of files cost at a start: how long class folders are listed, and what the list takes in memory.

    python scripts/benchmark_listing.py --dataname folder --datapath imagenette --files 1331000 --output many
    python scripts/benchmark_listing.py --dataname folder --datapath imagenet

With --files it makes a tree of that many hard links to the images of --datapath, 1,000 classes and a twenty-seventh
for validation, in a new folder --output on the same disk, and removes it at the end. Otherwise it measures the user's
own tree, and writes nothing but the kept list, in a temporary folder. Heavy imports are inside the functions.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, table
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError

NAME = "benchmark_listing.py"
CLASSES = 1000
VALIDATION_SHARE = 27  # of so many images one: 50,000 of ImageNet's 1,331,167
PRIVATE = ("Private_Clean", "Private_Dirty")


def main(argv: list[str]) -> int:
    """Runs the tool; returns its exit code."""
    own, args = build_parser().split(argv)
    if args.data.dataname != "folder" or args.data.datapath is None:
        raise UserError("--dataname folder --datapath DIR is missing: class folders below train/ and val/")
    if own.files is None:
        return report(args.data)
    if own.files < 2 * CLASSES * VALIDATION_SHARE or own.output is None or Path(own.output).exists():
        raise UserError(f"--files needs {2 * CLASSES * VALIDATION_SHARE:,} or more, and --output a folder that is new")
    try:
        make_tree(Path(args.data.datapath), Path(own.output), own.files)
        import dataclasses

        return report(dataclasses.replace(args.data, datapath=own.output))
    finally:
        shutil.rmtree(own.output, ignore_errors=True)


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=True)
    parser.add_argument("--files", type=int, metavar="N", help="make a tree of N hard links [measure --datapath]")
    parser.add_argument("--output", metavar="DIR", help="where that tree is made, on the disk of --datapath")
    return parser


def make_tree(source: Path, root: Path, count: int) -> None:
    """``count`` hard links to the images of ``source``, in turn, as train/ and val/ of ``CLASSES`` folders."""
    images = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not images:
        raise UserError(f"--datapath {source}: holds no JPEG or PNG files")
    turn = itertools.cycle(images)
    validation = count // VALIDATION_SHARE
    try:
        for split, number in (("train", count - validation), ("val", validation)):
            for label in range(CLASSES):
                folder = root / split / f"n{label:08d}"
                folder.mkdir(parents=True)
                for place in range(label * number // CLASSES, (label + 1) * number // CLASSES):
                    os.link(next(turn), folder / f"ILSVRC2012_{split}_{place:08d}.JPEG")
    except OSError as error:
        raise UserError(f"--output {root}: cannot hold hard links to {source} ({error.strerror})") from error
    time.sleep(3)  # a list of folders that were changed just now is not kept


def report(settings: DataSettings) -> int:
    """Measure and print."""
    import dataclasses

    import torch

    from utils.data.sets import kept_listing
    from utils.data.sets.class_folders import class_names, find_splits
    from utils.data.sets.datasets import get_data
    from utils.data.sets.listing import THREADS

    splits = find_splits(Path(settings.datapath))
    if splits is None:
        raise UserError(f"--datapath {settings.datapath}: holds no class folders below train/ and val/")
    classes = class_names(splits[0])
    rows = [
        (f"listed by {count} thread(s)", *timed(lambda n=count: listed(splits[0], classes, n))[:2])
        for count in (1, THREADS)
    ]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(kept_listing, "WORTH_KEEPING_SECONDS", 0):
        settings = dataclasses.replace(settings, cache_dir=folder)
        for name in ("first start: listed and kept", "second start: read, folders looked at"):
            seconds, memory, data = timed(
                lambda: get_data(settings, torch.device("cpu"), kept_listing.Lister(keeps=True))
            )
            rows.append((name, seconds, memory))
    seconds, memory, _ = timed(lambda: data.fingerprint)
    rows.append(("fingerprint for a resume", seconds, memory))
    paths = data.train.paths
    seconds, memory, strings = timed(lambda: list(paths))
    rows.append(("for comparison: a list of strings", seconds, memory))
    rows += [
        (f"a worker that looks at all of {name}", *in_a_worker(held))
        for name, held in (("them", paths), ("the strings", strings))
    ]
    print(f"{len(data.train):,} training and {len(data.validation):,} validation images, {len(classes):,} classes")
    print(table(("", "seconds", "MB of its own"), [(name, f"{s:.2f}", f"{m:,.1f}") for name, s, m in rows]))
    return 0


def listed(tree: Path, classes: Sequence[str], threads: int) -> Any:
    """A listing by so many threads."""
    from utils.data.sets import listing

    usual, listing.THREADS = listing.THREADS, threads
    try:
        scan = listing.Scan(os.fspath(tree), classes)
        scan.run()
        return scan.listing()
    finally:
        listing.THREADS = usual


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, megabytes by which this process's own memory grew, and the result."""
    before, began = own_megabytes(), time.perf_counter()
    result = work()
    return time.perf_counter() - began, own_megabytes() - before, result


def in_a_worker(paths: Sequence[str]) -> tuple[float, float]:
    """Seconds and megabytes of its own that a forked process needs to look at each of ``paths``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        seconds, memory, _ = timed(lambda: sum(len(paths[place]) for place in range(len(paths))))
        os.write(writing, f"{seconds} {memory}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    seconds, memory = map(float, os.read(reading, 100).split())
    return seconds, memory


def own_megabytes() -> float:
    """The memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(PRIVATE)) / 1000


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
