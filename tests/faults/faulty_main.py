"""main.py with a fault: HOOK_FAULT="kill forward step=7 rank=1" python tests/faults/faulty_main.py FLAGS."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import main as program
from tests.faults.planted import Fault
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.process import RankInfo, end_process

NOT_STRUCK = 70  # exit code of a training that ended well without reaching its fault


def main(argv):
    """main.py's exit code, or ``NOT_STRUCK``."""
    let_threads_wait_briefly()
    from tests.faults.points import Points

    rank = RankInfo.from_environment().rank
    fault = Fault.from_text(os.environ["HOOK_FAULT"])
    concerned = fault.concerns(rank)
    points = Points(fault.reached if concerned else lambda *_: False)
    hooks = points.hooks(after_step=fault.point == "after_step")  # on all ranks, so that they settle steps together
    code = program.main(argv, ends_process=True, hooks=hooks)
    if code == 0 and concerned and not fault.struck:
        print(f"HOOK_FAULT={os.environ['HOOK_FAULT']!r} met no such point on rank {rank}", file=sys.stderr)
        return NOT_STRUCK
    return code


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
