"""main.py with a fault: HOOK_RECORD=DIR HOOK_FAULT="kill forward step=7 rank=1" python tests/faults/faulty_main.py FLAGS."""

import os
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import main as program
from tests.faults.planted import Fault
from utils.loop.hooks import Hooks
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.process import RankInfo, end_process

NOT_STRUCK = 70  # exit code of a training that ended well without reaching its fault


def main(argv):
    """main.py's exit code, or ``NOT_STRUCK``."""
    let_threads_wait_briefly()
    from scripts.verification.hooks import RunRecorder
    from tests.faults.points import Points

    rank = RankInfo.from_environment().rank
    fault = Fault.from_text(os.environ["HOOK_FAULT"])
    concerned = fault.concerns(rank)
    hooks = [RunRecorder(rank, Path(os.environ["HOOK_RECORD"])).hooks()]
    hooks += [Points(fault.reached).hooks()] if concerned else []
    code = program.main(argv, ends_process=True, hooks=joined(hooks))
    if code == 0 and concerned and not fault.struck:
        print(f"HOOK_FAULT={os.environ['HOOK_FAULT']!r} met no such point on rank {rank}", file=sys.stderr)
        return NOT_STRUCK
    return code


def joined(several):
    """All hooks of each point, those of the first first."""
    return Hooks(
        **{point.name: [hook for one in several for hook in getattr(one, point.name)] for point in fields(Hooks)}
    )


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
