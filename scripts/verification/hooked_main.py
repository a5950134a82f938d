"""main.py with hooks, for tests and verify_resume.py: faults strike at chosen points, steps are recorded.

    HOOK_FAULT="kill forward step=7 rank=1" python -m torch.distributed.run scripts/verification/hooked_main.py FLAGS
    HOOK_RECORD=DIR python scripts/verification/hooked_main.py FLAGS

Takes main.py's flags. HOOK_FAULT: see scripts/verification/faults.py. HOOK_RECORD: see scripts/verification/records.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import main as program
from scripts.verification.faults import Fault
from scripts.verification.records import DONE
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.process import RankInfo, end_process

NOT_STRUCK = 70  # exit code of a training that ended well without reaching its fault


def main(argv: list[str]) -> int:
    """main.py's exit code, or ``NOT_STRUCK``."""
    let_threads_wait_briefly()
    from scripts.verification.hooks import RunRecorder, wrap_saves

    rank = RankInfo.from_environment().rank
    text = os.environ.get("HOOK_FAULT")
    fault = Fault.from_text(text) if text is not None else None
    folder = os.environ.get("HOOK_RECORD")
    recorder = RunRecorder(rank, fault, Path(folder) if folder else None)
    wrap_saves(recorder)
    code = program.main(argv, ends_process=True, hooks=recorder.hooks())
    recorder.mark(DONE, 0)
    if code == 0 and recorder.fault is not None and not recorder.fault.struck:
        print(f"HOOK_FAULT={text!r} met no such point on rank {rank}", file=sys.stderr)
        return NOT_STRUCK
    return code


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
