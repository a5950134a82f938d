"""Make one HTML file about runs: curves, settings, mistakes with their pictures, confusions, calibration.

    python scripts/report.py runs/digits/conv2/TIME_SETTINGS          # writes report.html into that folder
    python scripts/report.py RUN_A RUN_B RUN_C --output compared.html

Reads the run folders, validates each network once, and puts everything into a file below 13 MB that opens from the
disk, without network access. What is missing (the data set, a file of the run) is named there; the rest is shown.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, refuse, run_tool
from scripts.common.output import whole_file, wrong_name
from scripts.common.trained import add_images_of_data, add_run_arguments
from utils.config.settings import UserError

if TYPE_CHECKING:
    from scripts.reporting.sources import RunSource

__all__ = ["main"]

NAME = "report.py"


def main(argv: list[str]) -> int:
    """Write the page about the runs that the command-line arguments ``argv`` name; return the exit code."""
    own = build_parser().parse_args(argv)
    if own.heat_maps and own.no_predictions:
        raise UserError("--heat-maps explains predictions, and --no-predictions makes none; leave out one of them")
    if own.no_predictions:
        chosen = {"--split": own.split != "val", "--labels": own.labels, "--datapath": own.datapath}
        given = (flag for flag, value in chosen.items() if value)
        refuse(f"{flag} chooses images to predict, and --no-predictions reads none; leave out one" for flag in given)
    if own.features and (own.no_predictions or own.split == "train"):
        other = "--no-predictions" if own.no_predictions else "--split train"
        raise UserError(f"--features compares other images with the training images; leave out {other}")
    from scripts.reporting.sources import find

    sources = find(own.run)
    output = output_path(own.output, sources)
    from scripts.reporting.assemble import assemble
    from scripts.reporting.page import render

    report = assemble(sources, own)
    html = render(report).encode()
    with whole_file(output, f"--output {output}", "; choose another") as file:
        file.write(html)
    print(f"{output}: {len(html) / 1e6:.1f} MB, opens in any browser")
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    add_run_arguments(parser, several=True)
    parser.add_argument(
        "--output", metavar="FILE.html", help="the file to write [report.html in the run's folder; of several: here]"
    )
    add_images_of_data(parser)
    parser.add_argument(
        "--heat-maps",
        action="store_true",
        help="beside the mistakes and least certain hits, what speaks for the answer",
    )
    parser.add_argument(
        "--features",
        action="store_true",
        help="what the network's features tell: probes, doubtful labels, near duplicates, a map; reads the training "
        "images, too",
    )
    parser.add_argument(
        "--no-predictions", action="store_true", help="run no network: curves, settings and environment alone"
    )
    return parser


def output_path(given: str | None, sources: list[RunSource]) -> Path:
    """Path of the report. Raises ``UserError``, before any work, if it cannot be written."""
    folder = sources[0].folder if len(sources) == 1 else None
    path = (folder or Path()) / "report.html" if given is None else Path(given)
    if mistake := wrong_name("--output", str(path), "an .html", ".html", ".htm"):
        raise UserError(mistake)
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--output {path}: its folder cannot be written; choose another with --output")
    return path


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
