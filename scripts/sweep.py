"""Train a recipe with several seeds and values of its settings, and compare mean and spread.

    python scripts/sweep.py digits/fc --seeds 5
    python scripts/sweep.py digits/fc --seeds 5 --set lr=0.05,0.1 --set augment=none,shift
    python scripts/sweep.py digits/conv2 --processes 2 --set epochs=5,10
    python scripts/sweep.py digits/fc --folds 5                            # cross-validation

Every combination of the values is trained with every seed, 0 to N - 1. Other flags are main.py's and hold for all.
Ctrl-C saves what is under way; the same command continues, and repeats no finished run. Writes sweep.csv and sweep.png
to --output, the table as sweep.md and sweep.tex, differences over the same seeds as differences.csv, and the trainings
to runs/ there. With --folds each seed deals the images out anew and trains on all but each
fold in turn; then out_of_fold_seedN.csv has a prediction for each image, and cross_validation.csv mean and interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import Terminated, ToolParser, make_folder, run_tool, termination_raises, whole
from scripts.common.runs import RunResult
from scripts.sweeps.grid import Trial, trials
from scripts.sweeps.jobs import Slots, run_all
from utils.config.settings import UserError
from utils.runtime.console import INTERRUPTED, log, outlive_terminal

NAME = "sweep.py"
STOPPED = 75  # by SIGTERM, with everything saved


def main(argv: list[str]) -> int:
    own, planned = read_flags(argv)
    folder = make_folder(own.output)
    try:
        with termination_raises():
            return sweep(own, planned, folder)
    except Terminated:
        print(f"{NAME}: stopped; the same command continues", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=True)
    parser.add_argument("recipe", metavar="RECIPE", help="a name under configs/, or a file")
    parser.add_argument(
        "--seeds", type=whole(1, 1000), metavar="N", help="trainings of each combination [5; with --folds 1]"
    )
    parser.add_argument(
        "--folds",
        type=whole(2, 255),
        metavar="K",
        help="cross-validation: K trainings of each seed, each on all but a fold",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        dest="varied",
        help="a setting and its values; given several times: every combination; a+b is a list",
    )
    parser.add_argument(
        "--processes",
        default="1",
        metavar="{N,auto}",
        help="trainings at once; auto: one per GPU, or one for every two cores [1]",
    )
    parser.add_argument("--output", metavar="DIR", help="folder for the results [sweeps/RECIPE]")
    return parser


def read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Trial]]:
    """The checked flags and the trainings. Raises ``UserError`` with all mistakes."""
    own, training_flags = build_parser().parse_known_args(argv)
    own.seeds = own.seeds or (5 if own.folds is None else 1)
    of_each_run = ("--seed", "--fold", "--fold-seed", "--resume", "--name", "--config")
    for flag in (*of_each_run, "--evaluate", "-e", "--dry-run", "--max-steps"):
        if any(word == flag or word.startswith(f"{flag}=") for word in training_flags):
            raise UserError(f"{flag} is not for a sweep; remove it")
    if own.processes != "auto":
        try:
            own.processes = whole(1, 1024)(own.processes)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--processes {error}, or auto") from error
    if own.output is None:
        own.output = f"sweeps/{own.recipe.removesuffix('.yaml').replace('/', '_').lstrip('._')}"
    return own, trials(own.recipe, own.varied, own.seeds, training_flags, own.folds)


def sweep(own: argparse.Namespace, planned: Sequence[Trial], folder: Path) -> int:
    """Train what is not finished yet, and show all results. Returns the exit code."""
    from scripts.sweeps.outcomes import finished
    from utils.record.metrics import cut_words

    results = finished(folder / "runs", planned)
    if results:
        log(f"{len(results)} of {len(planned)} runs are finished already")

    def ended(trial: Trial, outcome: RunResult | str) -> None:
        text = outcome
        if not isinstance(outcome, str):
            results[trial] = outcome
            cut = cut_words(outcome.args.data.max_val_batches)
            doubts = f"; doubtful: {'; '.join(outcome.doubts)}" if outcome.doubts else ""
            text = f"top1{cut} {outcome.top1:.2f} after {outcome.seconds:.0f} s{doubts}"
        log(f"[{len(results)}/{len(planned)}] {trial.name}: {text}")

    failures: list[str] = []
    try:
        failures = run_all([trial for trial in planned if trial not in results], folder, slots(own.processes), ended)
    finally:
        show(own, planned, folder, results)
    if own.folds is not None and not failures:
        from scripts.sweeps.cross_validation import cross_validate

        print("\n" + "\n".join(cross_validate(planned, results, folder)), flush=True)
    return 1 if failures else 0


def slots(processes: int | str) -> Slots:
    """Room for that many trainings at once."""
    import torch

    from utils.runtime.cpu import cores

    gpus = torch.cuda.device_count()
    count = (gpus or max(1, cores() // 2)) if processes == "auto" else processes
    return Slots(count, threads=max(1, cores() // count), gpus=gpus)


def show(own: argparse.Namespace, planned: Sequence[Trial], folder: Path, found: Mapping[Trial, RunResult]) -> None:
    """Write and print the results so far, and their differences over the same seeds."""
    from scripts.common.command_line import table
    from scripts.common.output import write_csv, write_text
    from scripts.sweeps import differences, outcomes, tables

    results = {trial: found[trial] for trial in planned if trial in found}
    if not results:
        return
    write_csv(folder / "sweep.csv", outcomes.csv_rows(planned, results))
    outcomes.draw(folder / "sweep.png", f"{own.recipe}: {len(results)} of {len(planned)} runs", results)
    files = ["sweep.csv", "sweep.png", "sweep.md", "sweep.tex"]
    shown = [(outcomes.HEADERS, outcomes.table_rows(results))]
    others = [trial.name for trial in planned if trial not in results]
    without = f"without a result: {', '.join(others)}\n" if others else ""
    print(f"\n{outcomes.as_table(results)}\n{outcomes.doubts(results)}{without}", flush=True)
    compared = differences.differences(results)
    if compared:
        best = differences.best_first(compared)
        shown.append((differences.HEADERS, differences.rows(best)))
        print("\n".join([table(*shown[-1]), *differences.remarks(compared, len(best))]) + "\n")
        write_csv(folder / "differences.csv", differences.csv_rows(compared))
        files.append("differences.csv")
    write_text(folder / "sweep.md", "\n".join(tables.markdown(*each) for each in shown))
    write_text(folder / "sweep.tex", "\n".join(tables.latex(*each) for each in shown))
    print(f"Files: {', '.join(str(folder / name) for name in files)}", flush=True)


if __name__ == "__main__":
    outlive_terminal()  # as its trainings do, which would go on without it
    sys.exit(run_tool(NAME, main))
