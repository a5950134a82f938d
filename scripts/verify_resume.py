"""Does a training that is killed and continued end with the same bits as one that is not? Tried with your flags.

    python scripts/verify_resume.py                                  # the digits, 20 kills
    python scripts/verify_resume.py --kills 50 --ranks 2 --arch conv2 --amp fp16 --ema-decay 0.99
    python scripts/verify_resume.py --workers-cycle 0 2 1 --dataname folder --datapath my_data --epochs 2

Runs the training once straight and once killed (SIGKILL to all its processes) at random moments and continued each time
with --resume auto; compares weights, moving average, optimizer, scaler, metrics, TensorBoard points, and the samples
and images of every step. Exit code 0: equal, 1: different, 2: a mistake, or fewer kills than requested. Heavy imports
are inside the functions.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, make_folder, run_tool, table, whole
from scripts.verification.runs import Failure, Timeline, WatchedRun, straight_run
from utils.config import arguments
from utils.config.settings import UserError

NAME = "verify_resume.py"
KILLS = 20
SAVE_EVERY_STEPS = 10
MOST_ROUNDS = 10  # killed runs, should one end before its last kills
SHOWN = 5  # differences of each file


def main(argv: list[str]) -> int:
    """The tool; returns its exit code."""
    own, flags = read_flags(argv)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a terminal that closes ends the training, too
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    with folder_of(own.keep) as folder:
        try:
            straight, timeline = run_straight(own, flags, folder)
        except Failure as error:
            raise UserError(*f"the straight run {error}".splitlines()) from error
        try:
            landed, compared = run_killed(own, flags, folder, straight, timeline)
        except Failure as error:
            log(f"The killed run, continued, {error}")
            log(f"verdict: DIFFERENT: the killed run, continued, {str(error).splitlines()[0].rstrip(':')}")
            return 1
        return report(own, landed, compared, len(timeline.steps))


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=True)
    parser.add_argument("--kills", type=whole(1), default=KILLS, metavar="N", help=f"how often to kill [{KILLS}]")
    parser.add_argument("--ranks", type=whole(1), default=1, metavar="N", help="training processes [1]")
    parser.add_argument(
        "--kill-seed",
        type=whole(0),
        metavar="N",
        help="seed that the moments are drawn from [another each time]",
    )
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
    """The tool's flags, and the checked training flags with what the comparison needs added."""
    own, flags = build_parser().parse_known_args(argv)
    args = arguments.parse(flags, own.ranks)
    unfit = {"--resume": args.run.resume, "--evaluate": args.run.evaluate, "--dry-run": args.run.dry_run}
    mistakes = [f"{flag}: the tool starts and continues the runs itself; remove it" for flag in unfit if unfit[flag]]
    if "output" in args.origins and args.origins["output"] != "default":
        mistakes.append("--output: both runs go to separate folders; remove it, or give --keep DIR")
    if mistakes:
        raise UserError(*mistakes)
    added = [] if args.run.deterministic else ["--deterministic"]
    if not args.logging.save_every_steps:
        added += ["--save-every-steps", str(SAVE_EVERY_STEPS)]
    if args.logging.progress:
        added.append("--no-progress")
    arguments.parse([*flags, *added], own.ranks)  # what --deterministic contradicts
    if own.kill_seed is None:
        own.kill_seed = random.SystemRandom().randrange(10**6)
    return own, [*flags, *added]


@contextmanager
def folder_of(keep: str | None) -> Iterator[Path]:
    """The folder of both runs: the one to keep, which must be new or empty, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="verify_resume_", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        folder = make_folder(keep)
    except UserError as error:
        raise UserError(str(error).replace("--output", "--keep", 1)) from error
    if any(folder.iterdir()):
        raise UserError(f"--keep {keep}: is not empty; give a new folder")
    yield folder


# --------------------------------------------------------------------------------------------- runs


def run_straight(own: argparse.Namespace, flags: list[str], folder: Path) -> tuple[WatchedRun, Timeline]:
    """The run to compare with."""
    log(f"training: {shlex.join(flags)}")
    straight, timeline = straight_run(folder / "straight", flags, own.ranks)
    log(
        f"straight run on {own.ranks} rank(s): {len(timeline.steps)} steps in {timeline.end:.1f} s after "
        f"{timeline.start_up:.1f} s to start; longest gap between two steps {timeline.longest_gap:.3g} s"
    )
    log(f"kills: {own.kills} at moments drawn by --kill-seed {own.kill_seed}")
    return straight, timeline


def run_killed(
    own: argparse.Namespace, flags: list[str], folder: Path, straight: WatchedRun, timeline: Timeline
) -> tuple[Counter[str], dict[str, tuple[int, list[str]]]]:
    """Killed runs until there are kills enough, each finished and compared; where the kills landed, what differs."""
    from scripts.verification.comparison import compare_runs

    chance = random.Random(own.kill_seed)
    landed = Counter()
    compared: dict[str, tuple[int, list[str]]] = {}
    for number in range(1, MOST_ROUNDS + 1):
        killed = WatchedRun(folder / f"killed_{number}", flags, own.ranks)
        for kill in [*timeline.moments(own.kills - landed.total(), chance), None]:
            cycle = own.workers_cycle
            workers = ["--workers", str(cycle[killed.starts % len(cycle)])] if cycle else []
            if not killed.train("--resume", "auto", *workers, kill=kill, stall_seconds=timeline.stall_seconds):
                break
            log(f"kill {landed.total() + len(killed.landed)} of {own.kills}: {killed.landed[-1]}")
        log("continued to the end")
        landed.update(place.kind for place in killed.landed)
        for what, (count, wrong) in compare_runs(straight, killed, ["workers"] if own.workers_cycle else []).items():
            before = compared.get(what, (0, []))
            compared[what] = before[0] + count, before[1] + wrong
        if landed.total() >= own.kills or any(wrong for _, wrong in compared.values()):
            break
        if number < MOST_ROUNDS:
            log("the run came to its end before the last kills; they go to another one")
    return landed, compared


# ------------------------------------------------------------------------------------------ results


def report(
    own: argparse.Namespace, landed: Counter[str], compared: dict[str, tuple[int, list[str]]], steps: int
) -> int:
    """Print table and verdict; returns the exit code."""
    log(f"landed: {', '.join(f'{count} {kind}' for kind, count in sorted(landed.items())) or 'none'}\n")
    rows = [[what, f"{count:,}", "no" if wrong else "yes"] for what, (count, wrong) in compared.items()]
    log(table(["compared bit for bit", "values", "equal"], rows) + "\n")
    different = {what: wrong for what, (_, wrong) in compared.items() if wrong}
    for what, wrong in different.items():
        shown = first_per_kind(wrong)
        more = f"; and {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
        log(f"- {what}: {'; '.join(shown)}{more}")
    kills = landed.total()
    after = f"after {kills} kill{'s' * (kills != 1)} on {own.ranks} rank(s)"
    if different:
        first = "; ".join(f"{what}: {wrong[0]}" for what, wrong in different.items())
        log(f"verdict: DIFFERENT: {first} ({after})")
        return 1
    if kills < own.kills:
        log(f"verdict: EQUAL {after}, fewer than the {own.kills} requested: {steps} steps end too soon; train longer")
        return 2
    log(f"verdict: EQUAL {after}")
    return 0


def first_per_kind(differences: Sequence[str]) -> list[str]:
    """The first of the model's, the first of the optimizer's ..., the first of each column."""
    kinds = {re.sub(r"\d+", "", text.partition(":")[0].partition("/")[0]): text for text in reversed(differences)}
    return list(kinds.values())[::-1][:SHOWN]


def log(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
