"""Measure everything that needs a GPU, piece by piece, and show it in one table with the aims.

    python scripts/lab/gpu_results.py --cifar10 DIR --imagenette DIR --timm-train FILE --airbench DIR --hiverge DIR
    python scripts/lab/gpu_results.py --list                         # the pieces, what they need, how long they take
    python scripts/lab/gpu_results.py --only amp resident --seconds-limit 600
    python scripts/lab/gpu_results.py --tiny --output /tmp/tiny      # on a CPU: does everything run?

A finished piece leaves pieces/NAME.json in --output and is not measured again, so that the same command continues with
what is left. Writes table.md. Files made by the commands are in files/NAME of the same folder, among them trained runs
for scripts/lab/collect_results.py. Exit code: 0 if all pieces are measured or left out, 1 if a piece failed, 75 if
pieces are left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, make_folder, refuse, run_tool, table, whole
from scripts.common.output import write_text
from scripts.lab.benchmarks.lines import HEADERS, Line
from scripts.lab.gpu_table.pieces import PIECES, Piece
from utils.config.settings import UserError, as_user_error
from utils.runtime.cpu import cores

NAME = "lab/gpu_results.py"
ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
LEFT = 75  # exit code that asks for another call
LEAST_SECONDS = 60  # at least this much time must be left to start a piece that can resume
SAVING_SECONDS = 20  # for a training run to save and end after SIGTERM


class OutOfTime(RuntimeError):
    """The time limit was reached during a piece."""


def main(argv: list[str]) -> int:
    own = read_flags(argv)
    if own.list:
        rows = [[piece.name, piece.what, f"{piece.seconds} s", omission(own, piece)] for piece in own.pieces]
        print(table(["piece", "what", "about", ""], rows))
        print(f"About {sum(piece.seconds for piece in own.pieces) / 60:.0f} minutes on an H100-class GPU")
        return 0
    own.folder = make_folder(own.output).resolve()
    make_folder(str(own.folder / "pieces"))
    if not own.tiny and not has_gpu():
        raise UserError("torch sees no GPU here; --tiny tries everything out on the CPU")
    # Scratch is below the system's folder, because the sockets that data workers make in it need short paths.
    with TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as own.scratch:
        if own.tiny:
            from scripts.lab.benchmarks.data import cifar10_tree

            own.cifar10 = own.imagenette = str(cifar10_tree(None, Path(own.scratch)))
        return measure(own)


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    names = [piece.name for piece in PIECES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PIECE", help="these pieces alone; see --list")
    parser.add_argument("--list", action="store_true", help="print the pieces and measure nothing")
    parser.add_argument(
        "--seconds-limit",
        type=whole(SAVING_SECONDS + 10, 10**6),
        default=math.inf,
        metavar="N",
        help="end before this many seconds have passed, with what is finished by then",
    )
    parser.add_argument("--cifar10", metavar="DIR", help="CIFAR-10 as for main.py")
    parser.add_argument("--imagenette", metavar="DIR", help="JPEG files in class folders below train/ and val/")
    parser.add_argument("--timm-train", metavar="FILE", help="timm's train.py")
    parser.add_argument("--airbench", metavar="DIR", help="a checkout of cifar10-airbench")
    parser.add_argument("--hiverge", metavar="DIR", help="a checkout of Hiverge's cifar10-speedrun")
    parser.add_argument(
        "--tiny", action="store_true", help="on the CPU with so little work that the figures mean nothing"
    )
    parser.add_argument("--output", default="gpu-results", metavar="DIR", help="folder for the results [gpu-results]")
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read and check the flags, make paths absolute, and add the chosen pieces and when all must have ended.

    Raises ``UserError`` with all mistakes.
    """
    own = build_parser().parse_args(argv)
    mistakes = []
    for name in ("cifar10", "imagenette", "timm_train", "airbench", "hiverge"):
        if (value := getattr(own, name)) is not None:
            kind = "file" if name == "timm_train" else "folder"
            if not (os.path.isfile if kind == "file" else os.path.isdir)(value):
                mistakes.append(f"--{name.replace('_', '-')} {value}: no such {kind}")
            setattr(own, name, os.path.abspath(value))
    refuse(mistakes)
    own.pieces = [piece for piece in PIECES if own.only is None or piece.name in own.only]
    own.deadline = time.monotonic() + own.seconds_limit - SAVING_SECONDS
    return own


def omission(own: argparse.Namespace, piece: Piece) -> str:
    """Reason why ``piece`` is left out; '' if it is not."""
    missing = [f"--{name}" for name in piece.needs if getattr(own, name) is None and not own.tiny]
    if missing:
        return f"left out: {' and '.join(missing)} is not given"
    return "left out: it needs a GPU" if own.tiny and piece.tiny is None else ""


# ------------------------------------------------------------------------------------------ measuring


def measure(own: argparse.Namespace) -> int:
    """Measure the chosen pieces that are not finished, and write the table after each. Returns the exit code."""
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items() if value), flush=True)
    done = earlier(own)
    reasons = dict.fromkeys((piece.name for piece in PIECES), "not measured yet")
    code = 0
    for piece in own.pieces:
        if piece.name in done:
            print(f"{piece.name}: finished before", flush=True)
            continue
        left = own.deadline - time.monotonic()
        why = omission(own, piece)
        if not why and not own.tiny and left < (LEAST_SECONDS if piece.resumes else piece.seconds):
            why = f"put off: it takes about {piece.seconds} s, and {max(0, left):.0f} s are left"
            code = code or LEFT
        if not why:
            try:
                done[piece.name] = take(own, piece, about)
            except OutOfTime:
                why = "cut by --seconds-limit; the same command takes it up again"
                code = code or LEFT
            except Exception as error:  # whatever happens, the other pieces are still measured
                with open(own.folder / "files" / piece.name / "log.txt", "a", encoding="utf-8") as log:
                    traceback.print_exc(file=log)
                why = f"failed: {str(error) or type(error).__name__}"
                code = 1
        if why:
            reasons[piece.name] = why
            print(f"{piece.name}: {why}", flush=True)
        write_text(own.folder / "table.md", page(about, done, reasons))
    print(f"\n{page(about, done, reasons)}\nFiles: {own.folder}", flush=True)
    return code


def earlier(own: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results of the pieces that are finished already, by name. Raises ``UserError``."""
    done = {}
    for path in sorted((own.folder / "pieces").glob("*.json")):
        said = f"{path}: is not a whole result of this version"
        with as_user_error(said, (ValueError, TypeError, KeyError), "; delete it"):
            one = json.loads(path.read_text(encoding="utf-8"))
            done[path.stem] = one | {"lines": [Line(*fields) for fields in one["lines"]]}
            is_tiny = one["tiny"]
        if is_tiny != own.tiny:
            kind = "that were measured, not tried out with --tiny" if own.tiny else "of --tiny, which mean nothing"
            raise UserError(f"--output {own.folder}: holds figures {kind} ({path.stem}); give another folder")
    return done


def take(own: argparse.Namespace, piece: Piece, about: dict[str, str]) -> dict[str, Any]:
    """Run a piece's commands and read their files; return the result, which is also saved."""
    print(f"{piece.name}: {piece.what}, about {piece.seconds} s", flush=True)
    out = own.folder / "files" / piece.name
    if not piece.resumes:
        shutil.rmtree(out, ignore_errors=True)
    make_folder(str(out))
    (out / "log.txt").unlink(missing_ok=True)
    state = nvidia_smi("clocks.sm,temperature.gpu,power.draw,utilization.gpu,memory.used")
    began = time.monotonic()
    for text in piece.commands:
        run(own, command(own, piece, text, out), out / "log.txt", (0, 1) if piece.may_fail else (0,))
    lines = piece.lines(out)
    took = round(time.monotonic() - began, 1)
    result = {"tiny": own.tiny, "machine": about, "gpu before": state, "seconds": took, "lines": lines}
    write_text(own.folder / "pieces" / f"{piece.name}.json", json.dumps(result, indent=1))
    for line in lines:
        print(f"    {'  '.join(filter(None, line.cells()))}", flush=True)
    return result


def command(own: argparse.Namespace, piece: Piece, text: str, out: Path) -> list[str]:
    """Arguments of one of the piece's commands. Values are filled in word by word, as a path may hold spaces."""
    values = {**vars(own), "device": "cpu" if own.tiny else "cuda", "out": out}
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
    several = ["-n", str(min(8, max(1, cores() // 2)))] if util.find_spec("xdist") and not tiny else []
    paths = sorted(TESTS.rglob("test_*.py"))
    return several + [str(path) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]


def run(own: argparse.Namespace, words: Sequence[str], log: Path, codes: Sequence[int]) -> None:
    """Run a program to its end, appending its output to ``log``.

    Raises ``RuntimeError`` with the log's last line if the exit code is not in ``codes``, and ``OutOfTime`` at the
    deadline, after a SIGTERM that lets a training run save.
    """
    with open(log, "a", encoding="utf-8") as file:
        print(f"$ {shlex.join(words)}", file=file, flush=True)
        code = wait(own, words, file)
    if code not in codes:
        lines = [text for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text]
        raise RuntimeError(f"{Path(words[1]).name} ended with exit code {code}: {lines[-1][:200]} (see {log})")


def wait(own: argparse.Namespace, words: Sequence[str], log: IO[str]) -> int:
    """Run a program and return its exit code. It and all it has started end at the deadline, or with this process."""
    environ = {**os.environ, "TMPDIR": own.scratch, "PYTHONUNBUFFERED": "1"}
    if own.tiny:
        environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    # In a session of its own, so that all its processes can be ended together.
    process = subprocess.Popen(words, cwd=ROOT, env=environ, start_new_session=True, **streams)
    left = own.deadline - time.monotonic()
    try:
        return process.wait(max(0.0, left) if math.isfinite(left) else None)
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


# ------------------------------------------------------------------------------------------ the table


def page(about: dict[str, str], done: dict[str, dict[str, Any]], reasons: dict[str, str]) -> str:
    """Markdown text of the machine and of the table; a piece that is not ``done`` has one row with the reason."""
    head = "\n".join(f"- {name}: {value}" for name, value in about.items() if value)
    rows = [["piece", *HEADERS], ["---"] * (1 + len(HEADERS)), *table_rows(about, done, reasons)]
    lines = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return f"# GPU results\n\n{head}\n\n" + "\n".join(lines) + "\n"


def table_rows(about: dict[str, str], done: dict[str, dict[str, Any]], reasons: dict[str, str]) -> Iterator[list[str]]:
    """Yield the table's rows. The last column names what differed from ``about`` when an earlier call measured."""
    for piece in PIECES:
        if piece.name not in done:
            yield [piece.name, *Line(piece.what, note=reasons[piece.name]).cells()]
            continue
        its_own = done[piece.name]["machine"]
        other = ", ".join(f"{key} {value}" for key, value in its_own.items() if value != about.get(key))
        for line in done[piece.name]["lines"]:
            *cells, last = line.cells()
            yield [piece.name, *cells, "; ".join(filter(None, (last, other and f"with {other}")))]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def machine() -> dict[str, str]:
    """Description of GPU, driver, processor, versions and commit."""
    import torch

    from utils.record.provenance import commit, processor
    from utils.record.summary import versions

    return {
        "gpu": torch.cuda.get_device_name() if has_gpu() else "none",
        "memory, driver": nvidia_smi("memory.total,driver_version"),
        "processor": f"{processor()}, {cores()} core(s)",
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        **versions(),
        "commit": commit(),
    }


def nvidia_smi(query: str) -> str:
    """nvidia-smi's answer to ``query`` for the first GPU, in one line; '' if it fails."""
    line = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
