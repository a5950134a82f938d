"""How many requests does serve.py answer, and how fast? Together against one image at a time.

    python scripts/benchmark_serve.py RUN cat.jpg dog.jpg                     # 1, 8 and 32 clients, 5 seconds each
    python scripts/benchmark_serve.py RUN photos/ --clients 1,16 --seconds 20

Starts serve.py twice, with --batch-size 1 and as given, on free ports of this machine. Each client sends the next image
when it has its answer. The servers take turns, so that what else the machine does harms both alike. Clients run on the
same machine and take a part of its time. Heavy imports are inside the functions.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, seconds, table, whole
from scripts.common.trained import add_run_arguments, find_run
from utils.config.settings import UserError

NAME = "benchmark_serve.py"
MOST_IMAGES = 256  # that are kept in memory and sent in turn
TURNS = 2  # of each server
TIMEOUT_SECONDS = 60.0
ADDRESS = "http://127.0.0.1:"


class Answers(NamedTuple):
    """What clients saw: ``seconds`` for each answer, how many ran ``together`` with it; all took ``duration``."""

    seconds: list[float]
    together: list[int]
    duration: float

    def cells(self) -> list[str]:
        """Answers a second, median and 99th percentile in milliseconds, mean batch."""
        ordered = sorted(self.seconds)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return [
            f"{len(ordered) / self.duration:,.1f}", f"{1000 * statistics.median(ordered):,.1f}", f"{1000 * p99:,.1f}",
            f"{statistics.mean(self.together):.1f}",
        ]  # fmt: skip


def main(argv: list[str]) -> int:
    """The tool; returns its exit code."""
    own = build_parser().parse_args(argv)
    find_run(own.run)
    from scripts.common.image_stream import list_images

    images = [path.read_bytes() for path in itertools.islice(list_images(own.images), MOST_IMAGES)]
    rows = []
    with ExitStack() as stack:
        servers = {
            "one at a time": stack.enter_context(serving(own, ["--batch-size", "1"])),
            "together": stack.enter_context(serving(own, ["--batch-size", str(own.batch_size or 32)])),
        }
        for clients in own.clients:
            turns: dict[str, list[Answers]] = {name: [] for name in servers}
            for name, port in [*servers.items()] * TURNS:
                turns[name].append(load(port, images, clients, own.seconds / TURNS))
            rows += [[f"{clients} clients, {name}", *joined(answers).cells()] for name, answers in turns.items()]
    print(table(["", "requests/s", "median ms", "p99 ms", "batch"], rows))
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    add_run_arguments(parser)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGES", help=f"as for predict.py; the first {MOST_IMAGES} are sent"
    )
    parser.add_argument(
        "--clients", type=numbers, default=[1, 8, 32], metavar="N,N", help="clients that ask at the same time [1,8,32]"
    )
    parser.add_argument("--seconds", type=seconds, default=5.0, metavar="X", help="for each line of the table [5]")
    return parser


def numbers(text: str) -> list[int]:
    """What argparse takes for ``type``: whole numbers between 1 and 64 with commas between them."""
    return [whole(1, 64)(part) for part in text.split(",")]


@contextmanager
def serving(own: argparse.Namespace, more: Sequence[str]) -> Iterator[int]:
    """The port of a server that runs inside."""
    flags = ["--port", "0", "--device", own.device, *more, *(["--amp", own.amp] if own.amp else [])]
    flags += ["--raw"] * own.raw
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("serve.py")), own.run, *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout:
            if line.startswith(ADDRESS):
                yield int(line[len(ADDRESS) :].partition("/")[0])
                return
        raise UserError(f"{own.run}: serve.py has ended with exit code {process.wait()}")
    finally:
        process.terminate()
        process.wait()


def load(port: int, images: Sequence[bytes], clients: int, duration: float) -> Answers:
    """What ``clients`` threads see that ask for ``duration`` seconds, after one request each that does not count."""
    ready, answers, errors = threading.Barrier(clients + 1), [], []

    def ask(number: int) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
            mine = itertools.cycle(images[number % len(images) :] + images[: number % len(images)])
            answer_of(connection, next(mine))
            ready.wait()
            end = time.perf_counter() + duration
            while (began := time.perf_counter()) < end:
                together = answer_of(connection, next(mine))
                answers.append((time.perf_counter() - began, together))
        except (OSError, http.client.HTTPException, UserError) as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise UserError(f"a request failed: {errors[0]}")
    taken, together = zip(*answers, strict=True)
    return Answers(list(taken), list(together), time.perf_counter() - began)


def answer_of(connection: http.client.HTTPConnection, image: bytes) -> int:
    """Send an image and read the answer; gives the number of images that were run together."""
    connection.request("POST", "/predict", image)
    response = connection.getresponse()
    content = json.loads(response.read())
    if response.status != 200:
        raise UserError(f"status {response.status}: {content.get('error')}")
    return content["batch"]


def joined(turns: Sequence[Answers]) -> Answers:
    """Several turns as one."""
    return Answers(
        [one for turn in turns for one in turn.seconds], [one for turn in turns for one in turn.together],
        sum(turn.duration for turn in turns),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
