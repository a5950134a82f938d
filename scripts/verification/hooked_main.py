"""main.py with hooks that record its steps in the folder HOOK_RECORD; see scripts/verification/records.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import main as program
from scripts.verification.records import DONE
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.process import RankInfo, end_process


def main(argv: list[str]) -> int:
    """main.py's exit code."""
    let_threads_wait_briefly()
    from scripts.verification.hooks import RunRecorder

    recorder = RunRecorder(RankInfo.from_environment().rank, Path(os.environ["HOOK_RECORD"]))
    code = program.main(argv, ends_process=True, hooks=recorder.hooks())
    recorder.marks.set(DONE, 0)
    return code


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
