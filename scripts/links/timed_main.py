"""main.py with a clock: notes when each step ended, and how many bytes had left the machine by then.

    STEP_TIMES=FILE python scripts/links/timed_main.py FLAGS

FILE: JSON, a list of [seconds, bytes] for each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import main as program
from scripts.links import network, relay
from utils.loop.hooks import Hooks
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.distributed import end_process

SENT = "/sys/class/net/{}/statistics/tx_bytes"


def main(argv: list[str]) -> int:
    """main.py's exit code."""
    let_threads_wait_briefly()
    marks: list[tuple[float, int]] = []

    def note(_: object) -> None:
        marks.append((time.perf_counter(), bytes_sent()))

    code = program.main(argv, ends_process=True, hooks=Hooks(after_update=[note]))
    Path(os.environ["STEP_TIMES"]).write_text(json.dumps(marks), encoding="utf-8")
    return code


def bytes_sent() -> int:
    """Over the link, by either of its devices."""
    counters = [Path(SENT.format(device)) for device in (network.DEVICE, relay.DEVICE)]
    return sum(int(counter.read_text()) for counter in counters if counter.exists())


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
