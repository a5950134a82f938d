"""Trainings on the two machines of a network, each on cores of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.links.network import ADDRESSES, DEVICE, Network
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.settings import UserError

PROGRAM = Path(__file__).resolve().parent / "timed_main.py"
PORT = 29500
START_SECONDS, STEP_SECONDS = 1800, 60  # at most: to begin, and to compute a step
STEP_MESSAGES = 100  # one after the other in a step, at most: pieces of the gradient, to and fro
LAST_LINES = 5


class Speed(NamedTuple):
    """Of the timed steps: ``images`` a second over all machines, and ``sent``, bytes a step that left each."""

    images: float
    sent: float


class Lab:
    """Runs main.py with ``flags`` for ``warm_up`` and then ``steps`` timed steps; ``batch``: images of a machine's."""

    def __init__(self, network: Network, flags: Sequence[str], batch: int, warm_up: int, steps: int) -> None:
        self.network, self.batch, self.warm_up, self.steps = network, batch, warm_up, steps
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise UserError("two machines need at least two cores here")
        half = len(cores) // 2
        self.cores = [set(cores[:half]), set(cores[half : 2 * half])]
        self.flags = [
            "--device", "cpu", "--dataname", "synthetic", "--batch-size", str(batch), "--lr", "0.001", "--no-progress",
            "--epochs", "100000", "--val-every-epochs", "100000", "--save-every-epochs", "100000",
            "--max-steps", str(warm_up + steps), "--print-freq", "1000", "--picture-epochs", "off", *flags,
        ]  # fmt: skip

    def alone(self) -> Speed:
        """One machine; the other does nothing."""
        return self._speed(self._run([{}], []))

    def apart(self) -> Speed:
        """Both at the same time, each with a training of its own: what two machines reach here at best."""
        return self._speed(self._run([{}, {}], []))

    def together(self, *flags: str) -> Speed:
        """One training on both, with further ``flags``."""
        common = {
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE,
        }  # fmt: skip
        return self._speed(self._run([{**common, "RANK": str(rank)} for rank in (0, 1)], flags))

    @property
    def longest(self) -> float:
        """Seconds after which a run is given up: no working one takes nearly as long."""
        limits, steps = self.network.limits, self.warm_up + self.steps
        exchange = 2 * limits.seconds(self.gradient_bytes, STEP_MESSAGES) if limits is not None else 0.0
        return START_SECONDS + steps * (STEP_SECONDS + exchange)

    @cached_property
    def gradient_bytes(self) -> int:
        """Of one step, in float32."""
        from models import build_model

        args, spec = arguments.parse(self.flags), SPECS["synthetic"]
        size = args.data.image_size or spec.image_size
        model = build_model(args.model, classes=spec.classes, channels=spec.channels, image_size=size)
        return 4 * sum(parameter.numel() for parameter in model.parameters())

    def _run(self, environments: Sequence[dict[str, str]], flags: Sequence[str]) -> list[list[tuple[float, int]]]:
        """A process on each of the first machines; gives each one's marks (``timed_main.py``)."""
        with TemporaryDirectory(prefix="benchmark_link_") as folder:
            processes = [
                self._start(number, environment, flags, Path(folder)) for number, environment in enumerate(environments)
            ]
            longest = self.longest
            ends = time.monotonic() + longest
            try:
                for number, process in enumerate(processes):
                    if process.wait(max(0.0, ends - time.monotonic())):
                        lines = (Path(folder) / f"{number}.txt").read_text().splitlines()[-LAST_LINES:]
                        raise UserError(f"a training failed: {' | '.join(lines)}")
            except subprocess.TimeoutExpired as error:
                raise UserError(f"a training did not end within {longest:,.0f} s; the link may be too slow") from error
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            return [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(len(processes))]

    def _start(self, number: int, environment: dict[str, str], flags: Sequence[str], folder: Path) -> subprocess.Popen:
        line = ["ip", "netns", "exec", self.network.spaces[number], sys.executable, str(PROGRAM), *self.flags, *flags]
        line += ["--output", str(folder / f"runs{number}" if not environment else folder / "runs")]
        variables = {**os.environ, **environment, "STEP_TIMES": str(folder / f"{number}.json")}
        variables["OMP_NUM_THREADS"] = str(len(self.cores[number]))
        with open(folder / f"{number}.txt", "w", encoding="utf-8") as out:
            process = subprocess.Popen(line, stdout=out, stderr=out, env=variables)
        os.sched_setaffinity(process.pid, self.cores[number])  # its threads begin later, and inherit it
        return process

    def _speed(self, machines: Sequence[Sequence[tuple[float, int]]]) -> Speed:
        rates, sent = [], []
        for marks in machines:
            (began, before), (ended, after) = marks[self.warm_up - 1], marks[self.warm_up + self.steps - 1]
            rates.append(self.batch * self.steps / (ended - began))
            sent.append((after - before) / self.steps)
        return Speed(sum(rates), max(sent))
