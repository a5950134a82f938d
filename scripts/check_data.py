"""Is a data set fit to train on? Damaged images, leakage between the splits, label conflicts, what would not be read.

    python scripts/check_data.py --dataname folder --datapath DIR             # train/ and val/, or with --val-split 0.2
    python scripts/check_data.py --dataname cifar10 --datapath DATA --workers 4
    python scripts/check_data.py                                              # the digits
    python scripts/check_data.py --dataname folder --datapath DIR --statistics      # --mean and --std of the images

Reads every image as training does, and images to test on as well, and changes nothing. Prints a verdict, findings and
tables; writes report.txt, images.csv (one line per image) and damaged.txt into --output, or only statistics.yaml with
--statistics. Exit code 0: no faults; 1: faults; 2: not checked.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import OF_IMAGES, ToolParser, make_folder, run_tool, say, warn, warn_of_unread
from utils.config.datasets import SPECS
from utils.config.groups.data import DataSettings
from utils.runtime.cpu import cores_per_process

if TYPE_CHECKING:
    from scripts.data_check.findings import Findings
    from scripts.data_check.survey import Inspected, Survey

NAME = "check_data.py"


def main(argv: list[str]) -> int:
    own, args = build_parser().split(argv)
    from scripts.data_check.findings import judge
    from scripts.data_check.survey import inspect, take_survey
    from scripts.data_check.tables import write_files
    from utils.data.formats.listing import Lister
    from utils.data.progress_log import ProgressLog
    from utils.data.splits import prepare

    warnings.filterwarnings("ignore", message="This DataLoader will create")  # --workers is the user's choice
    workers = cores_per_process(1) if args.data.workers == "auto" else args.data.workers
    warn_of_unread(args, (*OF_IMAGES, "image_size"), f"in {NAME}, which reads all images as they are")
    if args.data.download:
        prepare(args.data, say)
    began = time.monotonic()
    progress = ProgressLog(say, args.logging.progress)
    survey = take_survey(args.data, Lister(keeps=True, progress=progress))
    for line in survey.warnings:
        warn(line)
    if own.statistics and survey.refusal:
        warn(f"training refuses these images: {survey.refusal}")
    folder = make_folder(own.output or default_folder(args.data))
    if own.statistics:
        from scripts.data_check.statistics import measure, written

        skips_bad = args.data.skip_bad_images
        statistics = measure(survey.images[0], workers=workers, progress=progress, skips_bad=skips_bad)
        print("\n".join(written(statistics, survey, args.data, folder)))
        return 0
    inspected = inspect(survey, workers=workers, progress=progress)
    findings = judge(survey, inspected)
    seconds = time.monotonic() - began
    report = "\n".join(report_lines(args.data, survey, inspected, findings))
    write_files(folder, report, survey, inspected, findings)
    print(report)
    print(f"\nChecked in {seconds:.1f} s, {len(survey) / seconds:,.0f} images/s with {workers} worker(s)")
    print(f"Files: {', '.join(str(folder / name) for name in ('report.txt', 'images.csv', 'damaged.txt'))}")
    return 1 if findings.faults else 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument("--output", metavar="DIR", help="folder of the files [checks/DATANAME]")
    parser.add_argument(
        "--statistics",
        action="store_true",
        help="only measure mean and standard deviation of each channel of the training images, for --mean and --std",
    )
    return parser


def default_folder(settings: DataSettings) -> str:
    """Default output folder, a different one for each data set."""
    if not SPECS[settings.dataname].of_the_user:
        return f"checks/{settings.dataname}"
    return f"checks/{settings.dataname}_{Path(settings.datapath or '').resolve().name}"


def report_lines(settings: DataSettings, survey: Survey, inspected: Inspected, findings: Findings) -> list[str]:
    """Lines of the report: verdict, findings, notes, tables."""
    from scripts.data_check import tables

    where = f" at {settings.datapath}" if survey.root is not None else ""
    lines = [
        tables.verdict(survey, findings),
        f"{settings.dataname}{where}: {tables.split_counts(map(len, survey.images))} images, "
        f"{len(survey.classes):,} classes",
        *([f"labels: {survey.origin}"] if survey.origin else []),
        "",
        *tables.finding_lines(findings),
    ]
    sections = [tables.damage_lines(survey, inspected.damage), tables.class_table(survey)]
    sections += tables.label_tables(survey) if survey.several else []
    sections.append(tables.size_table(inspected.readable))
    if survey.paths is not None:
        sections.append(tables.kind_table(inspected.readable))
    for section in filter(None, sections):
        lines += ["", section]
    return lines


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
