"""Make docs/results.md from the folders of finished runs: what each recipe reaches, on which machine, by which command.

    python scripts/lab/collect_results.py                   # from results/, where the runs that count are kept
    python scripts/lab/collect_results.py runs sweeps       # from these folders and all below
    python scripts/lab/collect_results.py sweeps --keep     # add what the table needs of their runs to results/ first

A run counts for the recipe whose settings it has, whatever its seed. A run changed by --resume-override, or whose
folder lacks some epochs, counts for none, and a line says so. results/machines.yaml names the machines and lists the
rows whose runs had a machine to themselves. Six rows also go into README.md.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, refuse, run_tool
from scripts.common.output import filled, write_text
from scripts.common.recipes import Recipe, recipes
from scripts.common.runs import (
    STOPPED_EARLY,
    WHERE,
    RunResult,
    doubtful,
    matches,
    reach,
    read_run,
    run_folders,
    spread,
)
from scripts.lab.results import estimates
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.settings import Settings, UserError

NAME = "lab/collect_results.py"
ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
TEMPLATE = Path(__file__).with_name("template") / "results.md.jinja"
KEPT_FILES = ("config.yaml", "metrics.csv", "log.txt")
LONG = 600  # seconds; the dots of longer runs have their labels on the left
OWN_SPLIT = "own-split"  # the --name of runs whose test images are not the data set's own
GPUS = {1: "one GPU", 8: "each of eight"}
CORES = re.compile(r", \d+ core\(s\)")
COMPUTES = re.compile(r"\d+ process\(es\)|\d+ thread\(s\)|\w+ by ATEN_CPU_CAPABILITY")
# The rows shown in README: recipe and number format.
IN_README = (
    ("digits/conv2", "float32"),
    ("mnist/fc", "float32"),
    ("cifar10/fast", "float32"),
    ("cifar10/airbench", "fp16"),
    ("cifar100/fast", "bf16"),
    ("imagenette/resnet10t_muon", "bf16"),
)
README = ROOT / "README.md"
PICTURE = PAGE.with_suffix(".png")
BEGIN = "<!-- made by scripts/lab/collect_results.py -->\n"
END = "<!-- end -->\n"


class Row(NamedTuple):
    """A recipe's result in one number format, from ``runs`` that differ only in seed and machine.

    ``words``: what distinguishes the row from the recipe's others.
    """

    recipe: Recipe
    words: str
    runs: list[RunResult]


class Machines(NamedTuple):
    """Content of ``results/machines.yaml``: machines by letter, and what the runs of some rows cannot tell.

    ``alone``: rows whose runs had a machine to themselves. ``ran``: commits whose files ran, where runs name another.
    """

    known: dict[str, dict[str, str]]
    alone: set[str]
    ran: dict[str, str]

    def letter(self, run: RunResult) -> str:
        """The machine's letter, such as 'A'; its full description if machines.yaml does not name it."""
        letters = [letter for letter, one in self.known.items() if one["log"] in run.machine]
        return letters[-1] if letters and "; then " not in run.machine else run.machine

    def tag(self, run: RunResult) -> str:
        """The run's machine, with the number of threads unless it is the usual two."""
        letter = self.letter(run)
        one_thread = letter in self.known and "1 thread(s)" in run.machine
        return f"{letter}, 1 thread" if one_thread else letter

    def tags(self, row: Row) -> dict[str, list[RunResult]]:
        """A row's runs by machine and threads, first those with the most runs."""
        runs: dict[str, list[RunResult]] = {}
        for run in row.runs:
            runs.setdefault(self.tag(run), []).append(run)
        return dict(sorted(runs.items(), key=lambda item: (-len(item[1]), item[0])))

    def undisturbed(self, row: Row) -> dict[str, list[RunResult]]:
        """A row's runs on machines that they had to themselves, by machine and threads, as ``tags`` gives all."""
        groups = self.tags(row).items()
        return {tag: runs for tag, runs in groups if f"{title(row)} {tag}" in self.alone and not at_once(runs)}

    def time(self, row: Row) -> str:
        """Mean time of a row's runs on each machine; if some had a machine to themselves, of these alone."""
        groups = self.tags(row)
        if len(groups) == 1:
            return duration(row.runs)
        return "; ".join(duration(runs, f" on {tag}") for tag, runs in (self.undisturbed(row) or groups).items())

    def evidence(self, row: Row) -> str:
        """Evidence for a row's figures: 'full', or 'half' with the reasons."""
        names = {f"{title(row)} {tag}" for tag in self.tags(row)}
        reasons = {
            "few seeds": len(row.runs) < 3,
            "shared machine": sum(map(len, self.undisturbed(row).values())) < min(3, len(row.runs)),
            "changed code": not names <= set(self.ran) and any(", changed" in run.commit for run in row.runs),
        }
        told = ", ".join(reason for reason, holds in reasons.items() if holds)
        return f"half: {told}" if told else "full"


def main(argv: list[str]) -> int:
    own = read_flags(argv)
    found = finished_runs(own.runs)
    machines = read_machines()
    rows, unmeasured = result_rows(found, machines)
    counted = [(row.recipe.name, run) for row in rows for run in row.runs]
    if own.keep:  # the page then also holds the runs kept before
        for recipe, run in counted:
            keep(recipe, run)
        rows, unmeasured = result_rows(finished_runs([str(KEPT)]), machines)
    path = Path(own.output)
    if path.resolve() == PAGE.resolve() and (own.keep or own.runs == [str(KEPT)]):
        before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        readme = before + BEGIN + readme_rows(rows, machines) + END + rest.partition(END)[2]
        draw(rows, machines, PICTURE)
        write_text(README, readme)
    write_text(path, page(rows, unmeasured, machines))
    names = {recipe for recipe, _ in counted}
    plural = "" if len(names) == 1 else "s"
    print(f"{len(found)} finished runs, {len(counted)} of them of {len(names)} recipe{plural}: {path}")
    return 0


def finished_runs(roots: Sequence[str]) -> list[RunResult]:
    """Finished runs in ``roots`` and below."""
    return [run for root in roots for run in map(read_run, run_folders(Path(root))) if run]


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    parser.add_argument("runs", nargs="*", default=[str(KEPT)], metavar="RUNS", help="folders of runs [results]")
    parser.add_argument(
        "--keep", action="store_true", help="add what the table needs of the runs to results/, and take all of that"
    )
    parser.add_argument("--output", default=str(PAGE), metavar="FILE", help="the page [docs/results.md]")
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read and check the flags. Raises ``UserError`` with all mistakes."""
    own = build_parser().parse_args(argv)
    refuse(f"{root}: no such folder" for root in own.runs if not Path(root).is_dir())
    return own


def read_machines() -> Machines:
    """Facts about the machines that the runs themselves do not record."""
    said = yaml.safe_load((ROOT / "results" / "machines.yaml").read_text(encoding="utf-8"))
    return Machines(said["machines"], set(said["alone"]), said["ran"])


def result_rows(found: Sequence[RunResult], machines: Machines) -> tuple[list[Row], list[Recipe]]:
    """A row for each number format in which a recipe was measured, and the recipes without a row.

    Runs share a row if they agree in recipe, format, --name, settings chosen by measurement and, for the user's own
    images, the folder. Of a seed's runs on one machine, the last counts.
    """
    rows = []
    unmeasured = []
    for recipe in recipes():
        line = ["--config", recipe.name]
        try:
            args = arguments.parse([*line, "--datapath", "DATA"])
        except UserError:  # a recipe for any data set is not specific enough for a result
            continue
        same = [run for run in found if matches(run.args, args)]
        kinds: dict[tuple[str, ...], list[RunResult]] = {}
        for run in sorted(same, key=lambda run: run.folder.name):
            kinds.setdefault((number_format(run), run.args.run.name or "", *of_its_own(run, args)), []).append(run)
        for kind in sorted(kinds):
            rivals = [other for other in kinds if other[:2] == kind[:2]]
            telling = [value for *values, value in zip(*rivals, kind, strict=True) if {value} != set(values)]
            # The threads compute, however many cores there are.
            runs = {
                (run.seed, CORES.sub("", machines.letter(run)), *COMPUTES.findall(run.machine)): run
                for run in kinds[kind]
            }
            words = " ".join(filter(None, (kind[1], *telling)))
            rows.append(Row(recipe, words, [runs[key] for key in sorted(runs)]))
        if not kinds:
            unmeasured.append(recipe)
    return rows, unmeasured


def page(rows: Sequence[Row], unmeasured: Sequence[Recipe], machines: Machines) -> str:
    """Text of the whole results page."""
    used = {machines.letter(run) for row in rows for run in row.runs}
    rates = {
        letter: float(machine["multiply_adds_per_second"])
        for letter, machine in machines.known.items()
        if "multiply_adds_per_second" in machine
    }
    return filled(
        TEMPLATE,
        rows=[measured_row(row, machines) for row in rows if row.words != OWN_SPLIT],
        own_split=[measured_row(row, machines) for row in rows if row.words == OWN_SPLIT],
        machines=[(letter, machine["what"]) for letter, machine in machines.known.items() if letter in used],
        picture=PICTURE.name,
        titles=[
            "global batch",
            *(f"time on {letter}" for letter in rates),
            *(f"memory, {count}" for count in GPUS.values()),
        ],
        unmeasured=[
            [
                recipe.name,
                literature(recipe),
                f"{estimates.global_batch(recipe.name):,}",
                *(estimates.duration(recipe.name, rate) for rate in rates.values()),
                *(estimates.memory(recipe.name, gpus) for gpus in GPUS),
            ]
            for recipe in unmeasured
        ],
    )


def draw(rows: Sequence[Row], machines: Machines, path: Path) -> None:
    """Draw the rows' error rates into the file ``path``, over the time on the machine with most of a row's runs.

    A machine that runs had to themselves takes precedence. README's rows are labelled.
    """
    from matplotlib.figure import Figure  # without pyplot there is no global state, and Agg is the backend

    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    shown = [row for row in rows if row.words != OWN_SPLIT]
    for number, data in enumerate(dict.fromkeys(row.recipe.name.partition("/")[0] for row in shown)):
        for row in shown:
            if row.recipe.name.startswith(f"{data}/"):
                most = next(iter((machines.undisturbed(row) or machines.tags(row)).values()))
                seconds = statistics.fmean(run.seconds for run in most)
                wrong = 100 - statistics.fmean(run.final for run in row.runs)
                full = machines.evidence(row) == "full"
                axes.plot(seconds, wrong, "o", color=f"C{number}", markerfacecolor=f"C{number}" if full else "white")
                if (title(row), number_format(row.runs[0])) in IN_README:
                    place = {"xytext": (5, 5)} if seconds < LONG else {"xytext": (-6, -3), "ha": "right"}
                    axes.annotate(title(row), (seconds, wrong), textcoords="offset points", fontsize=8, **place)
        axes.plot([], [], "o", color=f"C{number}", label=data)
    axes.set(xscale="log", yscale="log", xlabel="time of all epochs", ylabel="100 - top-1, percent")
    axes.set_xticks([1, 5, 10, 30, 60, 300, 1800], ["1 s", "5 s", "10 s", "30 s", "1 min", "5 min", "30 min"])
    axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="filled: full evidence", bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})


def readme_rows(rows: Sequence[Row], machines: Machines) -> str:
    """README's table: six rows, each with 'top-1 ± deviation (n), time', machine and evidence."""
    lines = ["| recipe | top-1 (n seeds), time | machine | evidence |", "|---|---|---|---|"]
    for recipe, form in IN_README:
        same = [row for row in rows if (title(row), number_format(row.runs[0])) == (recipe, form)]
        if len(same) != 1:
            raise UserError(f"README.md: {len(same)} rows of {recipe} in {form} are kept, not one; mend IN_README")
        (found,) = same
        measured = f"{accuracy(found.runs)} (n={len(found.runs)}), {machines.time(found)}"
        tags = machines.tags(found)
        used = {machines.letter(runs[0]): None for runs in tags.values()}
        threads = {one: "" if one in tags else ", 1 thread" for one in used}
        threads |= {one: ", 1 or 2 threads" for one in used if {one, f"{one}, 1 thread"} <= tags.keys()}
        machine = "; ".join(machines.known[one]["short"] + threads[one] for one in used)
        lines.append(f"| `{recipe}` | {measured} | {machine} | {machines.evidence(found)} |")
    return "\n".join(lines) + "\n"


def of_its_own(run: RunResult, wanted: Settings) -> list[str]:
    """Values of ``run`` left open by ``wanted``: measured choices, such as 'amp bf16', and the user's image folder."""
    chosen = run.args.values()
    place = [str(chosen["datapath"])] if SPECS[wanted.data.dataname].is_told_by_place else []
    return place + [
        f"{name.replace('_', '-')} {'default' if chosen[name] is None else chosen[name]}"
        for name in wanted.unmeasured()
    ]


def title(row: Row) -> str:
    """Recipe's name, followed in brackets by what distinguishes this row from the recipe's other rows, if anything."""
    return f"{row.recipe.name} ({row.words})" if row.words else row.recipe.name


def measured_row(row: Row, machines: Machines) -> list[str]:
    """Cells of the results table for ``row``."""
    runs = row.runs
    cells = [
        title(row),
        "/".join(map(str, sorted({run.epochs for run in runs}))),
        f"{accuracy(runs)} ({len(runs)}{doubtful(runs)})",
        interval([run.final for run in runs]),
        "" if row.words == OWN_SPLIT else literature(row.recipe),
        machines.time(row),
        "; ".join(machines.tags(row)),
        number_format(runs[0]),
        ", ".join(sorted({torch_version(run) for run in runs})),
        machines.evidence(row),
    ]
    return [cell.replace("|", "/") for cell in cells]


def interval(values: Sequence[float]) -> str:
    """Half-width of the t interval of a sample's mean, in percent; empty for two values or if it would pass 100 %."""
    if len(values) < 3 or statistics.fmean(values) + reach(values) > 100:
        return ""
    return f"± {reach(values):.2f}"


def literature(recipe: Recipe) -> str:
    """The figure that a recipe's header cites, with a link to that header."""
    figure = recipe.reference_figure
    return f"[{figure}](../configs/{recipe.name}.yaml)" if "%" in figure else figure


def accuracy(runs: Sequence[RunResult]) -> str:
    """Mean and standard deviation of the runs' top-1, as text."""
    return f"{spread([run.final for run in runs], '±')} %"


def duration(runs: Sequence[RunResult], where: str = "") -> str:
    """Mean time of the runs' epochs as text, and ``where`` they ran: seconds below three minutes, minutes above."""
    seconds = statistics.fmean(run.seconds for run in runs)
    time = f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} min"
    return f"{time}{where}, several at once" if at_once(runs) else time + where


def at_once(runs: Sequence[RunResult]) -> bool:
    """True if a run began before another run in the row had ended, judged by the start time in the folders' names."""
    spans = sorted((start, run.seconds) for run in runs if (start := started(run)))
    return any((later - first).total_seconds() < seconds for (first, seconds), (later, _) in pairwise(spans))


def started(run: RunResult) -> datetime | None:
    try:
        return datetime.strptime(run.folder.name[:19], "%Y-%m-%d_%H-%M-%S")
    except ValueError:
        return None


def number_format(run: RunResult) -> str:
    """Format that the run computed in; 'default' if neither its settings nor its device tell which."""
    device = re.search(r"process\(es\) on (\w+)", run.machine)
    default = {"cpu": "off", "cuda": "fp16"}.get(device[1] if device else "", "default")
    amp = run.args.precision.amp or default
    return "float32" if amp == "off" else amp


def torch_version(run: RunResult) -> str:
    """Torch's major and minor version, such as '2.14'."""
    found = re.search(r"\btorch (\d+\.\d+)", run.versions)
    return found[1] if found else "unknown"


def keep(recipe: str, run: RunResult) -> None:
    """Copy the run's files that the table needs to ``results/``, without this machine's paths."""
    folder = KEPT / recipe / run.folder.name
    folder.mkdir(parents=True, exist_ok=True)
    places = {str(run.folder.absolute()): "RUN", str(run.folder): "RUN"}
    if run.args.data.datapath:
        places[run.args.data.datapath] = "DATA"
    # The folder that the run was written to; it may be elsewhere now.
    outputs = [value for flag, value in pairwise(shlex.split(run.command)) if flag == "--output"]
    places |= {output: "RUNS" for output in outputs if Path(output).is_absolute()}
    for name in KEPT_FILES:
        text = (run.folder / name).read_text(encoding="utf-8")
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, places[place])
        if name == "log.txt":  # only results, a line about early stopping, and the machine of each later start
            lines = text.splitlines(keepends=True)
            told = (STOPPED_EARLY, WHERE)
            text = "".join(line for line in lines if " val_top1=" in line or any(one.match(line) for one in told))
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
