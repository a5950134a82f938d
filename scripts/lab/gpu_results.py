"""Measure everything that needs a GPU, piece by piece, and show it in one table with the aims.

    python scripts/lab/gpu_results.py --cifar10 DIR --imagenette DIR --timm-train FILE --airbench FILE
    python scripts/lab/gpu_results.py --list                         # the pieces, what they need, how long they take
    python scripts/lab/gpu_results.py --only amp resident --seconds-limit 600
    python scripts/lab/gpu_results.py --tiny --output /tmp/tiny      # on a CPU: does everything run?

A piece that is finished leaves pieces/NAME.json in --output and is not measured again: the same command takes up what
is left. Writes table.txt, table.md, results.json and an archive of all that is small; the trained runs are in sweeps/
there, for scripts/lab/collect_results.py. Exit code: 0 all is measured or left out, 1 a piece failed, 75 pieces are
left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import (
    Terminated,
    ToolParser,
    make_folder,
    run_tool,
    seconds,
    table,
    termination_raises,
    whole,
)
from scripts.lab.gpu_table import report
from scripts.lab.gpu_table.job import SAVING_SECONDS, Job, OutOfTime, PieceFailure, machine, nvidia_smi
from scripts.lab.gpu_table.lines import Line
from scripts.lab.gpu_table.pieces import PIECES, Piece
from scripts.lab.gpu_table.tiny import made_up
from utils.config.settings import UserError

NAME = "gpu_results.py"
LEFT = 75  # run me again
LEAST_SECONDS = 60  # with which a piece that resumes is begun
DONE = "done"
FAILED = "failed"
OMITTED = "left out"
WAITING = "waiting"


def main(argv: list[str]) -> int:
    """Run the tool. Returns its exit code."""
    own = read_flags(argv)
    if own.list:
        print(listed(own))
        return 0
    folder = make_folder(own.output).resolve()
    (folder / "pieces").mkdir(exist_ok=True)
    refuse_without_gpu(own)
    deadline = None if own.seconds_limit is None else time.monotonic() + own.seconds_limit
    try:
        with termination_raises(), Job(own, folder, deadline) as job:
            if own.tiny:
                own.cifar10 = own.cifar10 or made_up(job.scratch / "cifar10", "png", 32)
                own.imagenette = own.imagenette or made_up(job.scratch / "imagenette", "jpg", 48)
            return measure(job, machine())
    except Terminated:
        print(f"{NAME}: stopped; the same command goes on", file=sys.stderr)
        return LEFT


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    names = [piece.name for piece in PIECES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PIECE", help="these pieces alone; see --list")
    parser.add_argument("--list", action="store_true", help="print the pieces and measure nothing")
    parser.add_argument(
        "--seconds-limit",
        type=whole(SAVING_SECONDS + 10, 10**6),
        metavar="N",
        help="end before this many seconds have passed, with what is finished by then",
    )
    parser.add_argument("--cifar10", metavar="DIR", help="CIFAR-10 as for main.py")
    parser.add_argument("--imagenette", metavar="DIR", help="JPEG files in class folders below train/ and val/")
    parser.add_argument("--timm-train", metavar="FILE", help="timm's train.py")
    parser.add_argument("--airbench", metavar="FILE", help="a script of cifar10-airbench, such as airbench94_muon.py")
    parser.add_argument("--rounds", type=whole(1, 100), default=2, metavar="N", help="measurements of each side [2]")
    parser.add_argument("--seconds", type=seconds, default=6.0, metavar="X", help="about how long one takes [6]")
    parser.add_argument(
        "--tiny", action="store_true", help="on the CPU with so little work that the figures mean nothing"
    )
    parser.add_argument("--output", default="gpu-results", metavar="DIR", help="folder for the results [gpu-results]")
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The checked flags, paths absolute. Raises ``UserError`` with all mistakes."""
    own = build_parser().parse_args(argv)
    mistakes = []
    for name, exists, kind in (
        ("cifar10", os.path.isdir, "folder"),
        ("imagenette", os.path.isdir, "folder"),
        ("timm_train", os.path.isfile, "file"),
        ("airbench", os.path.isfile, "file"),
    ):
        value = getattr(own, name)
        if value is not None and not exists(value):
            mistakes.append(f"--{name.replace('_', '-')} {value}: no such {kind}")
        elif value is not None:
            setattr(own, name, os.path.abspath(value))
    if not own.output.strip() or "\0" in own.output:
        mistakes.append("--output must not be empty or contain a NUL character")
    if mistakes:
        raise UserError(*mistakes)
    return own


def refuse_without_gpu(own: argparse.Namespace) -> None:
    """Raise ``UserError`` where nothing could be measured."""
    import torch

    if not own.tiny and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no GPU here; --tiny tries everything out on the CPU")


def listed(own: argparse.Namespace) -> str:
    """The pieces as a table."""
    rows = [[piece.name, piece.what, f"{piece.seconds} s", omission(own, piece)] for piece in chosen(own)]
    minutes = sum(piece.seconds for piece in chosen(own)) / 60
    return f"{table(['piece', 'what', 'about', ''], rows)}\nAbout {minutes:.0f} minutes on an H100-class GPU"


def chosen(own: argparse.Namespace) -> list[Piece]:
    return [piece for piece in PIECES if own.only is None or piece.name in own.only]


def omission(own: argparse.Namespace, piece: Piece) -> str:
    """Why ``piece`` is left out; '' if it is not."""
    missing = [f"--{name}" for name in piece.needs if getattr(own, name) is None and not own.tiny]
    if missing:
        return f"left out: {' and '.join(missing)} is not given"
    return "left out: it needs a GPU" if own.tiny and piece.only_gpu else ""


# ------------------------------------------------------------------------------------------ measuring


def measure(job: Job, about: dict[str, str]) -> int:
    """Measure the chosen pieces that are not finished, and write the table after each. Returns the exit code."""
    own = job.own
    print(", ".join(f"{name} {value}" for name, value in about.items() if value), flush=True)
    results = {piece.name: earlier(job, piece) for piece in PIECES}
    for name, one in results.items():
        if one.get("tiny", own.tiny) != own.tiny:
            kind = "of --tiny, which mean nothing" if one["tiny"] else "that were measured, not tried out with --tiny"
            raise UserError(f"--output {job.folder}: holds figures {kind} ({name}); give another folder")
    for piece in chosen(own):
        if results[piece.name]["state"] == DONE:
            print(f"{piece.name}: finished before", flush=True)
            continue
        results[piece.name] = take(job, piece, about)
        report.write(job.folder, about, results)
    print(f"\n{report.as_text(about, results)}\n\nFiles: {job.folder}", flush=True)
    report.write(job.folder, about, results)
    states = [results[piece.name]["state"] for piece in chosen(own)]
    return 1 if FAILED in states else LEFT if WAITING in states else 0


def take(job: Job, piece: Piece, about: dict[str, str]) -> dict[str, Any]:
    """Measure one piece: its result, which is kept in a file if the piece is finished."""
    if why := omission(job.own, piece):
        print(f"{piece.name}: {why}", flush=True)
        return result(piece, OMITTED, why)
    left = job.left()
    if left is not None and left < (LEAST_SECONDS if piece.resumes else piece.seconds) and not job.own.tiny:
        why = f"put off: it takes about {piece.seconds} s, and {left:.0f} s are left"
        print(f"{piece.name}: {why}", flush=True)
        return result(piece, WAITING, why)
    print(f"{piece.name}: {piece.what}, about {piece.seconds} s", flush=True)
    job.name = piece.name
    began = time.monotonic()
    before = nvidia_smi()
    job.log.parent.mkdir(exist_ok=True)
    job.log.unlink(missing_ok=True)
    try:
        lines = piece.measure(job)
    except OutOfTime:
        print(f"{piece.name}: cut by --seconds-limit", flush=True)
        return result(piece, WAITING, "cut by --seconds-limit; the same command takes it up again")
    except Exception as error:  # whatever it is: the other pieces are measured all the same
        if not isinstance(error, PieceFailure | UserError):
            with open(job.log, "a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
        why = f"failed: {str(error) or type(error).__name__}"
        print(f"{piece.name}: {why}", flush=True)
        return result(piece, FAILED, why)
    took = round(time.monotonic() - began, 1)
    done = result(piece, DONE, "", lines) | {
        "seconds": took,
        "tiny": job.own.tiny,
        "gpu before": before,
        "gpu after": nvidia_smi(),
        "machine": about,
    }
    report.replace(job.folder / "pieces" / f"{piece.name}.json", report.as_json(done))
    shown = [report.cells(piece.name, line) for line in lines]
    print("\n".join("    " + "  ".join(filter(None, cells[1:])) for cells in shown), f"  [{took:.0f} s]", flush=True)
    return done


def result(piece: Piece, state: str, why: str, lines: Sequence[Line] = ()) -> dict[str, Any]:
    """What is known of a piece, as its file holds it."""
    return {"what": piece.what, "state": state, "why": why, "lines": [dataclasses.asdict(line) for line in lines]}


def earlier(job: Job, piece: Piece) -> dict[str, Any]:
    """The result of a finished piece from its file; of any other, that it is not measured yet."""
    path = job.folder / "pieces" / f"{piece.name}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return result(piece, WAITING, "not measured yet")
    except ValueError as error:
        raise UserError(f"{path}: is not a whole result ({error}); delete it") from error


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
