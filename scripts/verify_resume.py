"""Does a training that is killed and continued end with the same bits as one that is not? Tried with your flags.

    python scripts/verify_resume.py                                  # the digits, 20 kills
    python scripts/verify_resume.py --kills 50 --ranks 2 --arch conv2 --amp fp16 --ema-decay 0.99
    python scripts/verify_resume.py --workers-cycle 0 2 1 --dataname folder --datapath my_data --epochs 2

Runs the training once straight and once killed (SIGKILL to all its processes) at random moments and continued each time
with --resume auto; compares weights, moving average, optimizer, scaler, metrics, TensorBoard points, and the samples
and images of every step. Exit code 0: equal, 1: different, or a run that began anew beside its checkpoint, 2: a
mistake, or fewer kills than requested.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, make_folder, refuse, run_flags, run_tool, table, whole
from scripts.verification.runs import Failure, Timeline, WatchedRun
from utils.config import arguments
from utils.config.field import DEFAULT, RECIPE
from utils.config.settings import UserError
from utils.config.spelling import counted
from utils.runtime.console import log

NAME = "verify_resume.py"
KILLS = 20
SAVE_EVERY_STEPS = 10
MOST_ROUNDS = 10  # killed runs, should one end before its last kills
SHOWN = 5  # differences of each file


def main(argv: list[str]) -> int:
    own, flags = read_flags(argv)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a terminal that closes ends the training, too
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    with folder_of(own.keep) as folder:
        straight = run_straight(own, flags, Path(folder))
        try:
            killed = run_killed(own, flags, Path(folder), straight.timeline())
        except Failure as error:
            log("\n".join([*error.mistakes, f"verdict: DIFFERENT: {error.mistakes[0].rstrip(':')}"]))
            return 1
        return report(own, straight, killed)


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument("--kills", type=whole(1), default=KILLS, metavar="N", help=f"how often to kill [{KILLS}]")
    parser.add_argument("--ranks", type=whole(1), default=1, metavar="N", help="training processes [1]")
    seed = random.SystemRandom().randrange(10**6)
    parser.add_argument("--kill-seed", type=whole(0), default=seed, metavar="N", help="seed of the moments [a new one]")
    parser.add_argument(
        "--workers-cycle",
        type=whole(0),
        nargs="+",
        metavar="N",
        help="after each kill go on with the next of these numbers of data workers",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep both runs' folders there")
    return parser


def read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tool's flags, and the training flags, checked and completed by those that the comparison needs."""
    own, flags = build_parser().parse_known_args(argv)
    args = arguments.parse(flags, own.ranks)
    mistakes = [f"{flag}: the tool starts and continues the runs itself; remove it" for flag in run_flags(args)]
    if args.origins["output"] != DEFAULT:
        mistakes.append("--output: both runs go to separate folders; remove it, or give --keep DIR")
    refuse(mistakes)
    added = [] if args.run.deterministic else ["--deterministic"]
    if not args.logging.save_every_steps:
        added += ["--save-every-steps", str(SAVE_EVERY_STEPS)]
    if args.logging.progress:
        added.append("--no-progress")
    if args.run.plugin and args.origins["plugin"] == RECIPE:  # to which the tool's own file is added
        added += ["--plugin", *args.run.plugin]
    arguments.parse([*flags, *added], own.ranks)  # what --deterministic contradicts
    return own, [*flags, *added]


def folder_of(keep: str | None) -> AbstractContextManager[str]:
    """Context that gives the folder of both runs: ``keep``, which must be new or empty, or else a temporary one."""
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="verify_resume_", ignore_cleanup_errors=True)
    if any(make_folder(keep, "--keep").iterdir()):
        raise UserError(f"--keep {keep}: is not empty; give a new folder")
    return nullcontext(keep)


# --------------------------------------------------------------------------------------------- runs


def run_straight(own: argparse.Namespace, flags: list[str], folder: Path) -> WatchedRun:
    """Train without kills; return the run, with which the killed ones are compared."""
    log(f"training: {shlex.join(flags)}")
    straight = WatchedRun(folder / "straight", flags, own.ranks)
    straight.train()
    timeline = straight.timeline()
    longest_gap = max(after - before for before, after in pairwise([*timeline.steps, timeline.end]))
    log(
        f"straight run on {own.ranks} rank(s): {len(timeline.steps)} steps in {timeline.end:.1f} s after "
        f"{timeline.start_up:.1f} s to start; longest gap between two steps {longest_gap:.3g} s"
    )
    log(f"kills: {own.kills} at moments drawn by --kill-seed {own.kill_seed}")
    return straight


def run_killed(own: argparse.Namespace, flags: list[str], folder: Path, timeline: Timeline) -> list[WatchedRun]:
    """Train with kills, run after run, until there are enough kills; return the runs, each of which is finished."""
    chance = random.Random(own.kill_seed)
    stall_seconds = 300 + 10 * (timeline.start_up + timeline.end)
    runs: list[WatchedRun] = []
    landed = 0
    while landed < own.kills and len(runs) < MOST_ROUNDS:
        if runs:
            log("the run came to its end before the last kills; they go to another one")
        killed = WatchedRun(folder / f"killed_{len(runs) + 1}", flags, own.ranks)
        runs.append(killed)
        for kill in [*timeline.moments(own.kills - landed, chance), None]:
            cycle = own.workers_cycle
            workers = ["--workers", str(cycle[killed.starts % len(cycle)])] if cycle else []
            if not killed.train("--resume", "auto", *workers, kill=kill, stall_seconds=stall_seconds):
                break
            landed += 1
            log(f"kill {landed} of {own.kills}: {killed.landed[-1]}")
        log("continued to the end")
    return runs


# ------------------------------------------------------------------------------------------ results


def report(own: argparse.Namespace, straight: WatchedRun, killed: Sequence[WatchedRun]) -> int:
    """Compare the runs, print a table and the verdict; return the exit code."""
    from scripts.verification.comparison import compare_runs

    landed = Counter(place.kind for run in killed for place in run.landed)
    log(f"landed: {', '.join(f'{count} {kind}' for kind, count in sorted(landed.items())) or 'none'}\n")
    compared = compare_runs(straight, killed, ["workers"] if own.workers_cycle else [])
    rows = [[what, f"{count:,}", "no" if wrong else "yes"] for what, (count, wrong) in compared.items()]
    log(table(["compared bit for bit", "values", "equal"], rows) + "\n")
    different = {what: wrong for what, (_, wrong) in compared.items() if wrong}
    for what, wrong in different.items():
        # The first of the model's, the first of the optimizer's ..., the first of each column.
        kinds = {re.sub(r"\d+", "", text.partition(":")[0].partition("/")[0]): text for text in reversed(wrong)}
        shown = [*kinds.values()][::-1][:SHOWN]
        more = f"; and {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
        log(f"- {what}: {'; '.join(shown)}{more}")
    kills = landed.total()
    after = f"after {counted(kills, 'kill')} on {own.ranks} rank(s)"
    if different:
        first = "; ".join(f"{what}: {wrong[0]}" for what, wrong in different.items())
        log(f"verdict: DIFFERENT: {first} ({after})")
        return 1
    if kills < own.kills:
        steps = len(straight.timeline().steps)
        log(f"verdict: EQUAL {after}, fewer than the {own.kills} requested: {steps} steps end too soon; train longer")
        return 2
    log(f"verdict: EQUAL {after}")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
