"""Train a recipe with several seeds and values of its settings, and compare mean and spread; or search for values.

    python scripts/sweep.py digits/fc --seeds 5
    python scripts/sweep.py digits/fc --seeds 5 --set lr=0.05,0.1 --set augment=none,shift
    python scripts/sweep.py digits/conv2 --processes 2 --set epochs=5,10
    python scripts/sweep.py digits/fc --folds 5                            # cross-validation
    python scripts/sweep.py digits/fc --search 30 --set lr=0.01..1:log --set global-batch-size=32,64,128

Every combination of the values is trained with every seed, 0 to N - 1. Other flags are main.py's and hold for all runs.
Ctrl-C saves the runs under way; the same command continues, and repeats no finished run. Writes to --output: sweep.csv
and sweep.png, the tables as sweep.md and sweep.tex, differences over the same seeds as differences.csv, and the
training runs in runs/. With --folds, each seed deals the images out anew and trains on all but one fold, each fold in
turn; out_of_fold_seedN.csv then has a prediction for each image, and cross_validation.csv mean and interval.

With --search, Optuna proposes N points, which are trained on a part of the training images, judged by --best-metric on
the rest, and ended early if they are worse than others. Then the best points are trained on all training images with
new seeds, and reported on the validation images, which no trial saw. Also writes search.csv and search.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import Terminated, ToolParser, make_folder, run_tool, table, termination_raises, whole
from scripts.common.output import write_csv, write_text
from scripts.common.runs import RunResult
from scripts.sweeps.grid import Trial, trials
from scripts.sweeps.jobs import Slots, run_all
from scripts.sweeps.space import Space
from utils.config.arguments import recipe_path
from utils.config.settings import UserError, as_user_error
from utils.data.kept import claimed
from utils.runtime.console import INTERRUPTED, log, outlive_terminal
from utils.runtime.cpu import cores

NAME = "sweep.py"
STOPPED = 75  # exit code after SIGTERM, with everything saved
NOT_OF_ALL = ("differences.csv", "cross_validation.csv", "out_of_fold*_seed*.csv")  # files that not all sweeps write


def main(argv: list[str]) -> int:
    own, planned = read_flags(argv)
    folder = make_folder(own.output)
    try:
        with termination_raises(), alone_in(folder):
            if isinstance(planned, Space):
                return search(own, planned, folder)
            return sweep(own, planned, folder)
    except Terminated:
        print(f"{NAME}: stopped; the same command continues", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument("recipe", metavar="RECIPE", help="a name under configs/, or a file")
    parser.add_argument(
        "--seeds",
        type=whole(1, 1000),
        metavar="N",
        help="trainings of each combination, or of each of the --best [5; with --folds 1]",
    )
    parser.add_argument(
        "--folds",
        type=whole(2, 255),
        metavar="K",
        help="cross-validation: K trainings of each seed, each on all but a fold; with --search each trial is judged "
        "by the first [5]",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        dest="varied",
        help="a setting and its values; given several times: every combination; a+b is a list; with --search also "
        "LOW..HIGH, or LOW..HIGH:log",
    )
    parser.add_argument("--search", type=whole(1, 10**5), metavar="N", help="train N points that Optuna proposes")
    parser.add_argument(
        "--best", type=whole(1, 100), metavar="K", help="--search: how many of the best are trained anew [3]"
    )
    parser.add_argument(
        "--pruner", choices=("median", "hyperband", "none"), help="--search: what ends poor trials early [median]"
    )
    parser.add_argument(
        "--processes",
        default="1",
        metavar="{N,auto}",
        help="trainings at once; auto: one per GPU, or one for every two cores [1]",
    )
    parser.add_argument("--output", metavar="DIR", help="folder for the results [sweeps/RECIPE]")
    return parser


def read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Trial] | Space]:
    """Check the flags; return them and the training runs or search space. Raises ``UserError`` with all mistakes."""
    own, training_flags = build_parser().parse_known_args(argv)
    place = argv.index(own.recipe)
    before = argv[place - 1] if place else ""
    if before in training_flags and before.startswith("-") and recipe_path(own.recipe) is None:
        raise UserError(
            f"RECIPE: {own.recipe} of {before} was taken for it; write it first: {NAME} RECIPE {before} ..."
        )
    of_each_run = ("--seed", "--fold", "--fold-seed", "--resume", "--name", "--config")
    for flag in (*of_each_run, "--gpu-ids", "--evaluate", "-e", "--dry-run", "--max-steps"):
        if any(word == flag or word.startswith(f"{flag}=") for word in training_flags):
            raise UserError(f"{flag} is not for a sweep; remove it")
    if own.processes != "auto":
        try:
            own.processes = whole(1, 1024)(own.processes)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--processes {error}, or auto") from error
    if own.output is None:
        kind = "searches" if own.search else "sweeps"
        own.output = f"{kind}/{own.recipe.removesuffix('.yaml').replace('/', '_').lstrip('._')}"
    if own.search is None:
        if unused := [flag for flag in ("best", "pruner") if getattr(own, flag) is not None]:
            raise UserError(*(f"--{flag} needs --search N" for flag in unused))
        own.seeds = own.seeds or (5 if own.folds is None else 1)
        return own, trials(own.recipe, own.varied, own.seeds, training_flags, own.folds)
    if find_spec("optuna") is None:
        raise UserError("--search needs optuna: python -m pip install -r requirements-tools.txt")
    own.seeds = own.seeds or 5
    own.best = own.best or 3
    space = Space.of(own.recipe, training_flags, own.varied, own.folds or 5)
    own.pruner = space.pruner(own.pruner)
    return own, space


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Context in which no other sweep uses ``folder``, where both would train the same runs. Raises ``UserError``."""
    with ExitStack() as claims:
        with as_user_error(f"--output {folder}: cannot be written"):
            claims.enter_context(claimed(folder / "sweep", f"Waiting for another sweep into {folder}", log))
        yield


def sweep(own: argparse.Namespace, planned: Sequence[Trial], folder: Path) -> int:
    """Train what is not finished yet, and show all results. Returns the exit code."""
    results, failures = train(own, planned, folder)
    if own.folds is not None and not failures:
        from scripts.sweeps.cross_validation import cross_validate

        print("\n" + "\n".join(cross_validate(planned, results, folder)), flush=True)
    return 1 if failures else 0


def search(own: argparse.Namespace, space: Space, folder: Path) -> int:
    """Run the trials that are not finished yet, retrain the best ones, and show both. Returns the exit code."""
    import torch

    from scripts.sweeps.search import Search, point_of
    from scripts.sweeps.search_report import show_trials, verdict
    from utils.data.datasets import get_data
    from utils.record.epoch_scalars import best_metric

    args = space.first
    data = get_data(args.data, torch.device("cpu"))  # images of the final report; without any, fails now
    metric = best_metric((args.of_several_labels() if data.multilabel else args).run)
    study = Search(space, folder, metric, own.pruner)
    study.refuse_other(data.fingerprint)
    if told := study.told():
        log(f"{len(told)} of {own.search} trials are finished already")

    def ended(trial: Trial, outcome: RunResult | str) -> None:
        words = study.ended(trial, outcome)
        log(f"[{len(study.told())}/{own.search}] {trial.name}: {words}")

    try:
        asked = study.ask(own.search)
        run_all(asked, folder, slots(own.processes), ended, study.worthwhile, succeeded=bool(study.best(1)))
    finally:
        files = show_trials(study, f"{own.recipe}: {len(study.told())} of {own.search} trials")
        print(f"Files: {', '.join(str(folder / name) for name in files)}\n", flush=True)
    best = [point_of(trial) for trial in study.best(own.best)]
    if not best:
        raise UserError(f"--search {own.search}: no trial was trained to its end and learned something; see search.csv")
    results, failures = train(own, space.finalists(best, own.seeds), folder)
    print(verdict(study, results, len(data.validation)), flush=True)
    return 1 if failures else 0


def train(
    own: argparse.Namespace, planned: Sequence[Trial], folder: Path
) -> tuple[Mapping[Trial, RunResult], list[str]]:
    """Train what is not finished yet, show all results, and return them with a line for each failure."""
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
            text = f"{outcome.headline}{cut} {outcome.final:.2f} after {outcome.seconds:.0f} s{doubts}"
        log(f"[{len(results)}/{len(planned)}] {trial.name}: {text}")

    failures: list[str] = []
    try:
        missing = [trial for trial in planned if trial not in results]
        failures = run_all(missing, folder, slots(own.processes), ended, succeeded=bool(results))
    finally:
        show(own, planned, folder, results)
    return results, failures


def slots(processes: int | str) -> Slots:
    """Room for ``processes`` training runs at once; 'auto': one per GPU, or one per two cores."""
    import torch

    gpus = torch.accelerator.device_count()
    count = (gpus or max(1, cores() // 2)) if processes == "auto" else processes
    return Slots(count, threads=max(1, cores() // count), gpus=gpus)


def show(own: argparse.Namespace, planned: Sequence[Trial], folder: Path, found: Mapping[Trial, RunResult]) -> None:
    """Write and print the results so far, and their differences over the same seeds."""
    from scripts.sweeps import differences, outcomes, tables

    results = {trial: found[trial] for trial in planned if trial in found}
    if not results:
        return
    for file in chain.from_iterable(map(folder.glob, NOT_OF_ALL)):  # of an earlier sweep with other values
        file.unlink()
    write_csv(folder / "sweep.csv", outcomes.csv_rows(planned, results))
    outcomes.draw(folder / "sweep.png", f"{own.recipe}: {len(results)} of {len(planned)} runs", results)
    files = ["sweep.csv", "sweep.png", "sweep.md", "sweep.tex"]
    shown = [(outcomes.headers(results), outcomes.table_rows(results))]
    others = [trial.name for trial in planned if trial not in results]
    without = f"without a result: {', '.join(others)}\n" if others else ""
    print(f"\n{table(*shown[0])}\n{outcomes.doubts(results)}{without}", flush=True)
    compared = differences.differences(results)
    if compared:
        best = differences.best_first(compared, results)
        shown.append((differences.HEADERS, differences.rows(best)))
        print("\n".join([table(*shown[-1]), *differences.remarks(compared, len(best))]) + "\n")
        write_csv(folder / "differences.csv", differences.csv_rows(compared))
        files.append("differences.csv")
    write_text(folder / "sweep.md", "\n".join(tables.markdown(*each) for each in shown))
    write_text(folder / "sweep.tex", "\n".join(tables.latex(*each) for each in shown))
    print(f"Files: {', '.join(str(folder / name) for name in files)}", flush=True)


if __name__ == "__main__":
    outlive_terminal()  # as the training runs do, which would continue without the sweep
    sys.exit(run_tool(NAME, main))
