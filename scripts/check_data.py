"""Is a data set fit to train on? Damaged images, leakage between the splits, label conflicts, what would not be read.

    python scripts/check_data.py --dataname folder --datapath DIR             # train/ and val/, or with --val-split 0.1
    python scripts/check_data.py --dataname cifar10 --datapath DATA --workers 4
    python scripts/check_data.py                                              # the digits

Reads every image as training does and changes nothing. Prints a verdict, findings and tables; leaves report.txt,
images.csv (a line an image) and damaged.txt in --output. Exit code 0: no faults; 1: faults; 2: it could not be checked.
Heavy imports stand inside the functions.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, make_folder, run_tool, table
from utils.config.settings import DataSettings
from utils.runtime.cpu import cores_per_process

if TYPE_CHECKING:
    import numpy as np

    from scripts.data_check.findings import Findings
    from scripts.data_check.survey import Survey

NAME = "check_data.py"


def main(argv: list[str]) -> int:
    """The tool; gives its exit code."""
    own, args = build_parser().split(argv)
    from scripts.data_check.findings import judge
    from scripts.data_check.report import write_files
    from scripts.data_check.survey import inspect, survey
    from utils.data.progress_log import ProgressLog
    from utils.data.sets.datasets import prepare

    workers = cores_per_process(1) if args.data.workers == "auto" else args.data.workers
    if args.data.download:
        prepare(args.data, log)
    began = time.monotonic()
    found = survey(args.data)
    folder = make_folder(own.output or default_folder(args.data))
    records, damage = inspect(found, workers=workers, progress=ProgressLog(log, args.logging.progress))
    findings = judge(found, records, damage)
    seconds = time.monotonic() - began
    report = "\n".join(report_lines(args.data, found, records, damage, findings))
    write_files(folder, report, found, records, damage, findings)
    print(report)
    print(f"\nChecked in {seconds:.1f} s, {len(found) / seconds:,.0f} images/s with {workers} worker(s)")
    print(f"Files: {', '.join(str(folder / name) for name in ('report.txt', 'images.csv', 'damaged.txt'))}")
    return 1 if findings.faults else 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=True)
    parser.add_argument("--output", metavar="DIR", help="folder of the files [checks/DATANAME]")
    return parser


def default_folder(settings: DataSettings) -> str:
    """A folder of its own for each data set."""
    if settings.dataname != "folder":
        return f"checks/{settings.dataname}"
    return f"checks/folder_{Path(settings.datapath or '').resolve().name}"


def log(line: str) -> None:
    """A line about the progress, where no bar is shown."""
    print(line, file=sys.stderr, flush=True)


def report_lines(
    settings: DataSettings, found: Survey, records: np.ndarray, damage: dict[int, str], findings: Findings
) -> list[str]:
    """The report: verdict, findings, notes, tables."""
    from scripts.data_check import report

    where = f" at {settings.datapath}" if found.root is not None else ""
    validation = len(found) - found.training
    lines = [
        report.verdict(found, findings),
        f"{settings.dataname}{where}: {found.training:,} training and {validation:,} validation images, "
        f"{len(found.classes):,} classes",
        "",
        *report.finding_lines(findings),
    ]
    parts = [report.damage_lines(found, damage), report.class_table(found), report.size_table(records)]
    if found.paths is not None:
        parts.append(report.kind_table(records))
    for part in filter(None, parts):
        text = table(*part) if isinstance(part, tuple) else part if isinstance(part, str) else "\n".join(part)
        lines += ["", text]
    return lines


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
