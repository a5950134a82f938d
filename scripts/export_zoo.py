"""Exports networks of many families in each format, loads them again and compares their predictions (minutes).

    python scripts/export_zoo.py                    # all own networks, and families of timm and torchvision
    python scripts/export_zoo.py --only fc torchvision/resnet18 --images my_data/val

The weights are random. Exit code 1 if an export fails or predicts something else. Heavy imports are inside the
functions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, table
from scripts.common.trained import open_run
from scripts.exporting.formats import FORMATS, missing_packages
from utils.config.settings import UserError

if TYPE_CHECKING:
    import numpy as np

NAME = "export_zoo.py"
GROUP = 8  # networks whose exports are loaded again in one process, which imports for seconds
FAILED = "failed: "
LEAST_SPREAD = 0.1  # of an output over all images, a thousand times the difference that is allowed


class Export(NamedTuple):
    """A network in a format: what loads it again needs, and the outputs that it must give."""

    arch: str
    name: str
    request: dict[str, Any]
    inputs: np.ndarray
    expected: np.ndarray


class Outcomes(dict[tuple[str, str], str]):
    """By network and format: the largest difference of an output, '-' where the format cannot hold it, or a failure."""

    def fail(self, arch: str, name: str, error: Exception) -> None:
        """Note why there is no good export."""
        self[arch, name] = f"{FAILED}{error}"

    @property
    def failed(self) -> int:
        """The number of networks with a failure."""
        return len({arch for (arch, _), text in self.items() if text.startswith(FAILED)})


def main(argv: list[str]) -> int:
    """The tool; returns its exit code."""
    own = build_parser().parse_args(argv)
    from scripts.exporting.zoo import ZOO

    if unknown := [arch for arch in own.only or () if arch not in ZOO]:
        raise UserError(f"--only {' '.join(unknown)}: is not in the zoo, which has {', '.join(ZOO)}")
    if missing := [line for line in map(missing_packages, own.to) if line]:
        raise UserError(*missing)
    networks, outcomes = list(own.only or ZOO), Outcomes()
    for first in range(0, len(networks), GROUP):
        group = networks[first : first + GROUP]
        with tempfile.TemporaryDirectory() as folder:
            written = []
            for arch in group:
                written += exports(arch, ZOO[arch], own, Path(folder, arch), outcomes)
            compare(written, outcomes)
        for arch in group:
            print("  ".join([arch, *(outcomes[arch, name] for name in own.to)]), file=sys.stderr, flush=True)
    print(table(["network", *own.to], [[arch, *(outcomes[arch, name] for name in own.to)] for arch in networks]))
    good = len(networks) - outcomes.failed
    print(f"{good} of {len(networks)} networks: each export loads again and predicts the same")
    return 1 if outcomes.failed else 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    parser.add_argument("--only", nargs="+", metavar="NETWORK", help="these networks of the zoo [all]")
    parser.add_argument("--to", nargs="+", choices=tuple(FORMATS), default=list(FORMATS), help="formats [all]")
    parser.add_argument("--images", metavar="FOLDER", help="compare on images of this folder [on noise]")
    return parser


def exports(arch: str, size: int, own: argparse.Namespace, folder: Path, outcomes: Outcomes) -> Iterator[Export]:
    """A network in each format of ``own.to`` that can hold it, in folders below ``folder``."""
    import numpy as np

    from scripts.exporting import steps
    from scripts.exporting.images import Sample, noise, to_compare_on
    from scripts.exporting.subject import Subject
    from scripts.exporting.zoo import save_checkpoint, shown_at

    folder.mkdir(parents=True)
    save_checkpoint(arch, shown_at(size), folder / "checkpoint.pt")
    subject = Subject.of(open_run(str(folder / "checkpoint.pt"), device="cpu"), raw=False, inside=False)
    sample = to_compare_on(subject, own.images, None) if own.images else Sample(noise(subject.shape), "noise")
    expected = steps.expected_outputs(subject, sample.images.numpy())
    if (most := np.ptp(expected, axis=0).max()) < LEAST_SPREAD:
        raise RuntimeError(f"{arch} gives nearly the same for all images (within {most:.0e}), which compares nothing")
    for name in own.to:
        path = folder / name / FORMATS[name].file
        path.parent.mkdir()
        try:
            steps.refuse_other_networks(name, subject)
        except UserError:
            outcomes[arch, name] = "-"
            continue
        try:
            steps.write(name, subject, path, sample.images)
            yield Export(arch, name, steps.request(name, subject, path), sample.images.numpy(), expected)
        except UserError as error:
            outcomes.fail(arch, name, error)


def compare(written: list[Export], outcomes: Outcomes) -> None:
    """Load the exports again, in one fresh process, and note what they give."""
    from scripts.exporting import checking

    try:
        reloaded = checking.reloaded([one.request for one in written], [one.inputs for one in written])
    except checking.ExportFailure as error:
        reloaded = [str(error)] * len(written)
    for one, outputs in zip(written, reloaded, strict=True):
        try:
            largest = checking.compare(one.name, outputs, one.expected).largest
            outcomes[one.arch, one.name] = f"{largest:.0e}"
        except checking.ExportFailure as error:
            outcomes.fail(one.arch, one.name, error)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
