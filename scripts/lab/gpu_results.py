"""Measure everything that needs a GPU, piece by piece, and show it in one table with the aims.

    python scripts/lab/gpu_results.py --cifar10 DIR --imagenette DIR --timm-train FILE --airbench DIR --hiverge DIR
    python scripts/lab/gpu_results.py --list                         # the pieces, what they need, how long they take
    python scripts/lab/gpu_results.py --only amp resident --seconds-limit 600
    python scripts/lab/gpu_results.py --tiny --output /tmp/tiny      # on a CPU: does everything run?

A finished piece leaves pieces/NAME.json in --output and is not measured again, so that the same command continues with
what is left. Writes table.md and results.json. Files made by the commands are in files/NAME of the same folder, among
them trained runs for scripts/lab/collect_results.py. Exit code: 0 if all pieces are measured or left out, 1 if a piece
failed, 75 if pieces are left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from tempfile import TemporaryDirectory
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
from scripts.common.output import whole_file
from scripts.lab.gpu_table.commands import PIECES, RATIO, TESTS, Line, Piece, PieceFailure
from utils.config.settings import UserError

NAME = "lab/gpu_results.py"
ROOT = Path(__file__).resolve().parents[2]
LEFT = 75  # exit code that asks for another call
LEAST_SECONDS = 60  # at least this much time must be left to start a piece that can resume
SAVING_SECONDS = 20  # for a training run to save and end after SIGTERM
STATE = "clocks.sm,temperature.gpu,power.draw,utilization.gpu,memory.used"
HEADERS = ("piece", "what", "against", "ours", "the other", "result", "min - max", "aim", "")
DONE = "done"
FAILED = "failed"
OMITTED = "left out"
WAITING = "waiting"


class OutOfTime(RuntimeError):
    """The time limit was reached during a piece."""


def main(argv: list[str]) -> int:
    """Run the tool and return its exit code."""
    own = read_flags(argv)
    if own.list:
        print(listed(own))
        return 0
    folder = make_folder(own.output).resolve()
    (folder / "pieces").mkdir(exist_ok=True)
    if not own.tiny and not has_gpu():
        raise UserError("torch sees no GPU here; --tiny tries everything out on the CPU")
    deadline = None if own.seconds_limit is None else time.monotonic() + own.seconds_limit
    try:
        # Scratch is below the system's folder, because the sockets that data workers make in it need short paths.
        with termination_raises(), TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
            if own.tiny:
                from scripts.lab.benchmarks import data

                own.cifar10 = own.cifar10 or str(data.cifar10_tree(None, Path(scratch)))
                own.imagenette = own.imagenette or str(data.jpeg_tree(None, Path(scratch)))
            return measure(Job(own, folder, Path(scratch), deadline), machine())
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
    parser.add_argument("--airbench", metavar="DIR", help="a checkout of cifar10-airbench")
    parser.add_argument("--hiverge", metavar="DIR", help="a checkout of Hiverge's cifar10-speedrun")
    parser.add_argument("--rounds", type=whole(1, 100), default=2, metavar="N", help="measurements of each side [2]")
    parser.add_argument("--seconds", type=seconds, default=6.0, metavar="X", help="about how long one takes [6]")
    parser.add_argument(
        "--tiny", action="store_true", help="on the CPU with so little work that the figures mean nothing"
    )
    parser.add_argument("--output", default="gpu-results", metavar="DIR", help="folder for the results [gpu-results]")
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read and check the flags, and make paths absolute. Raises ``UserError`` with all mistakes."""
    own = build_parser().parse_args(argv)
    mistakes = []
    for name in ("cifar10", "imagenette", "timm_train", "airbench", "hiverge"):
        if (value := getattr(own, name)) is not None:
            kind = "file" if name == "timm_train" else "folder"
            if not (os.path.isfile if kind == "file" else os.path.isdir)(value):
                mistakes.append(f"--{name.replace('_', '-')} {value}: no such {kind}")
            setattr(own, name, os.path.abspath(value))
    if mistakes:
        raise UserError(*mistakes)
    return own


def listed(own: argparse.Namespace) -> str:
    """Table of the chosen pieces."""
    rows = [[piece.name, piece.what, f"{piece.seconds} s", omission(own, piece)] for piece in chosen(own)]
    minutes = sum(piece.seconds for piece in chosen(own)) / 60
    return f"{table(['piece', 'what', 'about', ''], rows)}\nAbout {minutes:.0f} minutes on an H100-class GPU"


def chosen(own: argparse.Namespace) -> list[Piece]:
    return [piece for piece in PIECES if own.only is None or piece.name in own.only]


def omission(own: argparse.Namespace, piece: Piece) -> str:
    """Reason why ``piece`` is left out; '' if it is not."""
    missing = [f"--{name}" for name in piece.needs if getattr(own, name) is None and not own.tiny]
    if missing:
        return f"left out: {' and '.join(missing)} is not given"
    return "left out: it needs a GPU" if own.tiny and piece.tiny is None else ""


# ------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Job:
    """What the measurements of all pieces of a table share.

    ``own``: the command line. ``folder``: where results go. ``scratch``: a temporary folder. ``deadline``: the
    ``time.monotonic()`` by which all must have ended, or None.
    """

    own: argparse.Namespace
    folder: Path
    scratch: Path
    deadline: float | None = None

    def left(self) -> float | None:
        """Seconds until the deadline, minus the time to save; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - SAVING_SECONDS - time.monotonic())

    def command(self, piece: Piece, text: str, out: Path) -> list[str]:
        """Arguments of one of the piece's commands. Values are filled in word by word, as a path may hold spaces."""
        own = self.own
        values = {**vars(own), "device": "cpu" if own.tiny else "cuda", "out": out, "fewer": max(1, own.rounds - 1)}
        values |= {"twice": 2 * own.rounds, "four_times": 4 * own.rounds}
        words = [sys.executable]
        for word in [*text.split(), *(piece.tiny or "").split() * own.tiny]:
            if word == "{gpu_tests}":
                words += gpu_tests(own.tiny)
            elif not any(f"{{{name}}}" in word and value is None for name, value in values.items()):
                words.append(word.format(**values))
        return words


def gpu_tests(tiny: bool) -> list[str]:
    """Arguments for pytest: the files of the tests that need a GPU, and if possible several processes.

    Other test files are not even imported: they may need packages that are missing here. Most of these tests start
    processes, each of which uses a core and little of the GPU.
    """
    from utils.runtime.cpu import cores

    several = ["-n", str(min(8, max(1, cores() // 2)))] if util.find_spec("xdist") and not tiny else []
    paths = sorted(TESTS.rglob("test_*.py"))
    return several + [str(path) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]


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
        else:
            results[piece.name] = take(job, piece, about)
            write(job.folder, about, results)
    write(job.folder, about, results)
    print(f"\n{as_markdown(about, results)}\nFiles: {job.folder}", flush=True)
    states = [results[piece.name]["state"] for piece in chosen(own)]
    return 1 if FAILED in states else LEFT if WAITING in states else 0


def take(job: Job, piece: Piece, about: dict[str, str]) -> dict[str, Any]:
    """Measure one piece and print what happens; return the result, saved to a file if finished."""
    left = job.left()
    state, why, lines = OMITTED, omission(job.own, piece), []
    if not why and left is not None and left < (LEAST_SECONDS if piece.resumes else piece.seconds) and not job.own.tiny:
        state, why = WAITING, f"put off: it takes about {piece.seconds} s, and {left:.0f} s are left"
    if not why:
        print(f"{piece.name}: {piece.what}, about {piece.seconds} s", flush=True)
        out = job.folder / "files" / piece.name
        if not piece.resumes:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.txt").unlink(missing_ok=True)
        more = {"tiny": job.own.tiny, "machine": about, "gpu before": nvidia_smi()}
        began = time.monotonic()
        state, why, lines = collect(job, piece, out)
    if why:
        print(f"{piece.name}: {why}", flush=True)
    if state != DONE:
        return result(piece, state, why)
    more |= {"seconds": round(time.monotonic() - began, 1), "gpu after": nvidia_smi()}
    done = result(piece, DONE, "", lines) | more
    write_text(job.folder / "pieces" / f"{piece.name}.json", json.dumps(done, indent=1))
    shown = ["  ".join(filter(None, cells(piece.name, line)[1:])) for line in lines]
    print("\n".join(f"    {text}" for text in shown), f"  [{more['seconds']:.0f} s]", flush=True)
    return done


def collect(job: Job, piece: Piece, out: Path) -> tuple[str, str, list[Line]]:
    """Run the piece's commands and read their files. Returns state, reason if it is not done, and table lines."""
    try:
        for text in piece.commands:
            run(job, job.command(piece, text, out), out / "log.txt", (0, 1) if piece.may_fail else (0,))
        return DONE, "", piece.lines(out)
    except OutOfTime:
        return WAITING, "cut by --seconds-limit; the same command takes it up again", []
    except Exception as error:  # whatever happens, the other pieces are still measured
        if not isinstance(error, PieceFailure):
            with open(out / "log.txt", "a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
        return FAILED, f"failed: {str(error) or type(error).__name__}", []


def run(job: Job, words: Sequence[str], log: Path, codes: Sequence[int]) -> None:
    """Run a program to its end, appending its output to ``log``.

    Raises ``PieceFailure`` with the log's last line if the exit code is not in ``codes``, and ``OutOfTime`` at the
    deadline, after a SIGTERM that lets a training run save.
    """
    with open(log, "a", encoding="utf-8") as file:
        print(f"$ {shlex.join(words)}", file=file, flush=True)
        code = wait(job, words, file)
    if code not in codes:
        lines = [text for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text]
        raise PieceFailure(f"{Path(words[1]).name} ended with exit code {code}: {lines[-1][:200]} (see {log})")


def wait(job: Job, words: Sequence[str], log: Any) -> int:
    """Run a program and return its exit code. It and all it has started end at the deadline, or with this process."""
    environ = {**os.environ, "TMPDIR": str(job.scratch), "PYTHONUNBUFFERED": "1"}
    if job.own.tiny:
        environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    # In a session of its own, so that all its processes can be ended together.
    process = subprocess.Popen(words, cwd=ROOT, env=environ, start_new_session=True, **streams)
    try:
        return process.wait(job.left())
    except subprocess.TimeoutExpired as error:
        raise OutOfTime from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(SAVING_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def result(piece: Piece, state: str, why: str, lines: Sequence[Line] = ()) -> dict[str, Any]:
    """Result of a piece as a dict, as its file holds it."""
    return {"what": piece.what, "state": state, "why": why, "lines": [dataclasses.asdict(line) for line in lines]}


def earlier(job: Job, piece: Piece) -> dict[str, Any]:
    """Result of a finished piece from its file; for any other piece, a result that says it is not measured yet."""
    path = job.folder / "pieces" / f"{piece.name}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return result(piece, WAITING, "not measured yet")
    except ValueError as error:
        raise UserError(f"{path}: is not a whole result ({error}); delete it") from error


# ------------------------------------------------------------------------------------------ the table


def cells(piece: str, line: Line) -> list[str]:
    """Texts of a table row: the piece, then the columns of ``line``."""
    what = f"{line.what} ({line.unit})" if line.unit else line.what
    aim = "" if line.aim is None else f"{'at least' if line.at_least else 'at most'} {line.aim:g}"
    if line.result is None:
        return [piece, what, line.against, "", "", "", "", aim, line.note or "nothing measured"]
    span = "" if line.low is None else f"{outcome(line, line.low)} - {outcome(line, line.high)}"
    met = {True: "met", False: "MISSED", None: ""}[line.met]
    figures = (number(line.ours), number(line.other), outcome(line, line.result))
    return [piece, what, line.against, *figures, span, aim, met]


def number(value: float | None) -> str:
    """``value`` as text with at least three digits; '' for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def outcome(line: Line, value: float) -> str:
    """Text of a line's ``value``: a ratio as a factor, another figure as it is."""
    return f"{value:.3f}x" if line.kind == RATIO else number(value)


def as_rows(about: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the table's rows for ``results``, dicts as made by ``result``, by piece; a piece without lines has one row.

    If an earlier call measured a piece, the last column also names what differed from the present machine, ``about``.
    """
    for name, one in results.items():
        lines = [Line(**fields) for fields in one["lines"]]
        its_own = one.get("machine", about)
        other = ", ".join(f"{key} {value}" for key, value in its_own.items() if value != about.get(key))
        for line in lines or [Line(one["what"], note=one["why"])]:
            *others, last = cells(name, line)
            yield [*others, "; ".join(filter(None, (last, other and f"with {other}")))]


def as_markdown(about: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown text of the machine and of the table, with aligned columns."""
    head = "\n".join(f"- {name}: {value}" for name, value in about.items() if value)
    rows = [list(HEADERS), *([cell.replace("|", "/") for cell in row] for row in as_rows(about, results))]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 3  # notes are long, so the last column is not aligned
    rows.insert(1, ["-" * width for width in widths])
    body = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return f"# GPU results\n\n{head}\n\n" + "\n".join(body) + "\n"


def write(folder: Path, about: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> None:
    write_text(folder / "table.md", as_markdown(about, results))
    write_text(folder / "results.json", json.dumps({"machine": about, "pieces": results}, indent=1))


def write_text(path: Path, text: str) -> None:
    with whole_file(path, f"--output {path}") as file:
        file.write(text.encode())


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def machine() -> dict[str, str]:
    """Description of GPU, driver, processor, versions and commit."""
    import torch

    from utils.record.provenance import commit, processor
    from utils.record.summary import versions
    from utils.runtime.cpu import cores

    return {
        "gpu": torch.cuda.get_device_name() if has_gpu() else "none",
        "memory": nvidia_smi("memory.total"),
        "driver": nvidia_smi("driver_version"),
        "processor": f"{processor()}, {cores()} core(s)",
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        **versions(),
        "commit": commit(),
    }


def nvidia_smi(query: str = STATE) -> str:
    """nvidia-smi's answer to ``query`` for the first GPU, in one line; '' if it fails."""
    line = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
