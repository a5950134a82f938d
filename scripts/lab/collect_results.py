"""Make docs/results.md from the folders of finished runs: what each recipe reaches, on which machine, by which command.

    python scripts/lab/collect_results.py                   # from results/, where the runs that count are kept
    python scripts/lab/collect_results.py runs sweeps       # from these folders and all below
    python scripts/lab/collect_results.py sweeps --keep     # copy what the table needs of their runs to results/ first

A run counts for the recipe whose settings it has, but for the seed. One that --resume-override has changed on its way,
or whose epochs are not all in its folder, counts for none, and a line says so. Top-1 is that of the last validation,
beside the best one; mean and standard deviation are over the seeds. A recipe without a finished run is "not measured".
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, run_tool
from scripts.common.recipes import Recipe, recipes
from scripts.common.runs import STOPPED_EARLY, WHERE, RunResult, deviation, doubtful, matches, read_run, run_folders
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.settings import Settings, UserError

NAME = "collect_results.py"
ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
KEPT_FILES = ("config.yaml", "metrics.csv", "log.txt")
# Flags that say nothing of the result: where a run is made and shown, and where its first command was to cut it.
OF_THE_PLACE = {
    "--output",
    "--resume",
    "--resume-override",
    "--seed",
    "--name",
    "--gpu-ids",
    "--max-steps",
    "--progress",
    "--no-progress",
}
HEAD = """# Results

Made by `python scripts/lab/collect_results.py` from the runs in `results/`, never by hand. Top-1 is that of the
validation at the end of training, as mean and standard deviation over n seeds; beside it the best validation's, which
is chosen on the images that it is measured on. "Doubtful" counts runs whose last validation shows a network that has
learned nothing, and of which the mean is no result. Time is that of a run's epochs with their validations, without the
start. The literature's figures, and how they were reached, are in the headers of the recipes; so are figures of runs
whose folders were not kept, for which the table says "not measured". Brackets after a recipe hold the runs' `--name`. A
command is that of its commit, when the recipe may have had another name. `own-split` means FashionMNIST's images on a
split of our own (`scripts/lab/split_fashionmnist.py`), whose test images are not the data set's own, since the place of
its files could not be reached.

| recipe | network | epochs | top-1 (n) | best | literature | time | machine | commit | command |
|---|---|---|---|---|---|---|---|---|---|
"""


def main(argv: list[str]) -> int:
    """Run the tool. Returns its exit code."""
    own = read_flags(argv)
    found = [run for root in own.runs for run in map(read_run, run_folders(Path(root))) if run]
    rows, counted = page_rows(recipes(), found)
    if own.keep:
        for recipe, run in counted:
            keep(recipe, run)
    path = Path(own.output)
    try:
        path.write_text(HEAD + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error
    names = {recipe for recipe, _ in counted}
    plural = "" if len(names) == 1 else "s"
    print(f"{len(found)} finished runs, {len(counted)} of them of {len(names)} recipe{plural}: {path}")
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    parser.add_argument("runs", nargs="*", default=[str(KEPT)], metavar="RUNS", help="folders of runs [results]")
    parser.add_argument("--keep", action="store_true", help="copy what the table needs of the runs to results/")
    parser.add_argument("--output", default=str(PAGE), metavar="FILE", help="the page [docs/results.md]")
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The checked flags. Raises ``UserError`` with all mistakes."""
    own = build_parser().parse_args(argv)
    missing = [root for root in own.runs if not Path(root).is_dir()]
    if missing:
        raise UserError(*(f"{root}: no such folder" for root in missing))
    return own


def page_rows(known: Sequence[Recipe], found: Sequence[RunResult]) -> tuple[list[str], list[tuple[str, RunResult]]]:
    """The table's rows, and the runs that count, each with its recipe's name.

    Runs share a row if they agree in recipe, machine, --name, what they chose by measurement (``--amp auto``) and,
    where the images are the user's own, their folder.
    """
    rows = []
    counted = []
    for recipe in known:
        line = ["--config", recipe.name]
        try:
            args = arguments.parse([*line, "--datapath", "DATA"])
        except UserError:  # a recipe for any data says too little for a result
            continue
        same = [run for run in found if matches(run.args, args)]
        kinds: dict[tuple[str, ...], list[RunResult]] = {}
        for run in sorted(same, key=lambda run: run.folder.name):
            kinds.setdefault((run.machine, run.name, *of_its_own(run, args)), []).append(run)
        for kind in sorted(kinds):
            rivals = [other for other in kinds if other[:2] == kind[:2]]
            telling = [value for *values, value in zip(*rivals, kind, strict=True) if {value} != set(values)]
            runs = {run.seed: run for run in kinds[kind]}
            words = " ".join(filter(None, (kind[1], *telling)))
            rows.append(measured_row(recipe, words, [runs[seed] for seed in sorted(runs)]))
            counted += [(recipe.name, run) for run in runs.values()]
        if not kinds:
            cells = [
                recipe.name,
                args.model.arch,
                args.optimisation.epochs,
                "not measured",
                "",
                recipe.reference_figure,
            ]
            rows.append(row([*cells, "", "", "", f"`{recipe.command}`"]))
    return rows, counted


def of_its_own(run: RunResult, wanted: Settings) -> list[str]:
    """What ``wanted`` leaves open: what the run chose by measurement, such as 'amp bf16', and the user's own images."""
    chosen = run.args.values()
    place = [str(chosen["datapath"])] if SPECS[wanted.data.dataname].of_the_user else []
    return place + [
        f"{name.replace('_', '-')} {'default' if chosen[name] is None else chosen[name]}"
        for name in wanted.unmeasured()
    ]


def measured_row(recipe: Recipe, words: str, runs: Sequence[RunResult]) -> str:
    """The row of a recipe from a run of each seed; ``words`` tell it from its other rows."""
    top1, best = ([getattr(run, name) for run in runs] for name in ("top1", "best_top1"))
    seeds = " ".join(str(run.seed) for run in runs)
    return row(
        [
            f"{recipe.name} ({words})" if words else recipe.name,
            runs[0].network,
            "/".join(map(str, sorted({run.epochs for run in runs}))),
            f"{spread(top1)} ({len(runs)}{doubtful(runs)})",
            spread(best),
            recipe.reference_figure,
            f"{statistics.fmean(run.seconds for run in runs):.0f} s",
            runs[0].machine,
            ", ".join(sorted({run.commit for run in runs})),
            f"`{command(runs[0])}`, seeds {seeds}",
        ]
    )


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of a sample, in percent."""
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {deviation(values):.2f} %" if len(values) > 1 else f"{mean} %"


def command(run: RunResult) -> str:
    """The run's command without the flags of its place, and with DATA for the folder of the images."""
    words = shlex.split(run.command)
    kept = []
    while words:
        word = words.pop(0)
        flag, equals, _ = word.partition("=")
        if flag in OF_THE_PLACE:
            while words and not words[0].startswith("-"):  # its values
                words.pop(0)
        elif flag == "--datapath":
            kept += ["--datapath", "DATA"]
            words = words if equals else words[1:]
        else:
            kept.append(word)
    return shlex.join(["python", *kept])


def row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def keep(recipe: str, run: RunResult) -> None:
    """Copy the run's files that the table is made from to ``results/``, without the places of this machine."""
    folder = KEPT / recipe / run.folder.name
    folder.mkdir(parents=True, exist_ok=True)
    places = {str(run.folder.absolute()): "RUN", str(run.folder): "RUN"}
    if run.args.data.datapath:
        places[run.args.data.datapath] = "DATA"
    # The folder where the run was made; it may lie elsewhere now.
    outputs = [value for flag, value in pairwise(shlex.split(run.command)) if flag == "--output"]
    places |= {output: "RUNS" for output in outputs if Path(output).is_absolute()}
    for name in KEPT_FILES:
        text = (run.folder / name).read_text(encoding="utf-8")
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, places[place])
        if name == "log.txt":  # the result alone, whether early stopping was its end, and where it went on
            lines = text.splitlines(keepends=True)
            told = (STOPPED_EARLY, WHERE)
            text = "".join(line for line in lines if " val_top1=" in line or any(one.match(line) for one in told))
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
