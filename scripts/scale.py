"""What limits a training on 1, 8, 64, 1,024 GPUs: decoding, disk, network or the step? And what does an epoch cost?

    python scripts/scale.py                                        # ImageNet on rented A100s
    python scripts/scale.py --measure                              # with this machine's decoding
    python scripts/scale.py --measure photo1.jpg photo2.jpg --cores-per-gpu 16 --resnet50-rate 3000 --gpus 1 8 32
    python scripts/scale.py --network-gbit 10 --gradient-bytes 2   # a slow network, gradients in bf16

Arithmetic on the figures that it prints first, each with its source; each is a flag. docs/scale.md explains them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, positive_number, run_tool, table, whole
from scripts.scaling.estimate import Estimate, Images, Machines, Workload, estimate
from utils.config.settings import UserError

NAME = "scale.py"
MEASURED = "measured now on one core here"


class Figure(NamedTuple):
    """An input: its default, what it is, where the default comes from.

    ``of``, ``times``: the figure that this one follows unless it is given, and by which factor.
    """

    default: float
    what: str
    source: str
    of: str | None = None
    times: float = 1.0


_AWS = "AWS, p4d.24xlarge (8 A100)"
FIGURES = {
    "images": Figure(1_281_167, "images of an epoch", "ImageNet (ILSVRC 2012), training images"),
    "image-kb": Figure(115.4, "kB an image", "ILSVRC2012_img_train.tar, 147,897,477,120 bytes"),
    "decode-rate": Figure(594, "images/s that a core decodes", "docs/speed.md: 640 x 427 to a training crop of 224"),
    "packed-kb": Figure(27.2, "kB an image, packed", "scale.py --measure: shorter side 256, quality 90"),
    "packed-rate": Figure(
        1550, "packed images/s that a core decodes", "decode-rate x 2.61, by scale.py --measure", "decode-rate", 2.61
    ),
    "resnet50-rate": Figure(2470, "images/s of ResNet-50 on a GPU", "NVIDIA, DeepLearningExamples: 1 A100, mixed"),
    "vit-rate": Figure(
        2145,
        "images/s of ViT-S/16 on a GPU",
        "resnet50-rate x 1,057.92 / 1,218.01, timm's results",
        "resnet50-rate",
        1057.92 / 1218.01,
    ),
    "resnet50-weights": Figure(25.56, "million weights of ResNet-50", "timm's results"),
    "vit-weights": Figure(22.05, "million weights of ViT-S/16", "timm's results"),
    "cores-per-gpu": Figure(6, "cores a GPU", f"{_AWS}: 96 vCPU, two a core"),
    "training-cores": Figure(1, "of these, for the training process", "a choice"),
    "disk-mb-s": Figure(16000, "MB/s that a machine reads", f"{_AWS}: local NVMe, up to 16 GB/s"),
    "network-gbit": Figure(400, "Gbit/s of a machine, each way", _AWS),
    "latency-us": Figure(0, "microseconds of a hop between machines", "left out unless given"),
    "overlap": Figure(0.667, "share of a step beside which gradients travel", "backward is two thirds, by operations"),
    "gradient-bytes": Figure(4, "bytes of a gradient that is sent", "float32; 2 with --grad-compression bf16"),
    "batch-size": Figure(256, "images a GPU and step", "a choice"),
    "largest-batch": Figure(32768, "images a step, at most", "You et al., ImageNet training in minutes, 2018"),
    "dollars": Figure(1.844, "dollars a GPU and hour", f"{_AWS}: EC2 capacity blocks, Ohio and Oregon, 2024"),
}
WHOLE = {"images", "batch-size", "largest-batch"}
MAY_BE_ZERO = {"training-cores", "latency-us", "overlap", "dollars"}


def main(argv: list[str]) -> int:
    """Run the tool. Returns its exit code."""
    own = read_flags(argv)
    values = {name: getattr(own, name.replace("-", "_")) for name in FIGURES}
    sources = {name: FIGURES[name].source if value is None else "as given" for name, value in values.items()}
    if own.measure is not None:
        measured = measure(own.measure)
        for name, value in measured.items():
            if values[name] is None:
                values[name] = value
                sources[name] = MEASURED
    numbers = completed(values)
    print(left([[FIGURES[name].what, plain(numbers[name]), f"  {sources[name]}"] for name in FIGURES]))
    headers = ["", "GPUs", "packed", "limit", "images/s a GPU", "cores a GPU", "epoch", "dollars"]
    print(f"\n{table(headers, rows(numbers, own))}")
    print(
        "\nlimit: the part that is slowest. cores a GPU: so many, with the training process's, would keep up with it.\n"
        "epoch: of training; without validation, start and checkpoints."
    )
    return 0


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    parser.add_argument(
        "--gpus", type=whole(1), nargs="+", default=[1, 8, 64, 1024], metavar="N", help="numbers of GPUs [1 8 64 1024]"
    )
    parser.add_argument("--gpus-per-machine", type=whole(1, 1024), default=8, metavar="N", help="GPUs per machine [8]")
    parser.add_argument(
        "--measure",
        nargs="*",
        metavar="JPEG",
        help="measure decoding and sizes here, on these files, as they are and packed [scikit-learn's photographs]",
    )
    for name, figure in FIGURES.items():
        kind = whole(1, 10**12) if name in WHOLE else zero_or_more if name in MAY_BE_ZERO else positive_number
        text = f"{figure.what} [{figure.default:,g}: {figure.source}]".replace("%", "%%")
        parser.add_argument(f"--{name}", type=kind, metavar="N" if name in WHOLE else "X", help=text)
    return parser


def zero_or_more(text: str) -> float:
    """What argparse takes for ``type``: text into a number between 0 and 1e6."""
    try:
        is_zero = float(text) == 0
    except ValueError:
        is_zero = False
    return 0.0 if is_zero else positive_number(text)


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The checked flags. Raises ``UserError`` with all mistakes."""
    own = build_parser().parse_args(argv)
    mistakes = [f"--measure {path}: no such file" for path in own.measure or () if not os.path.isfile(path)]
    if own.overlap is not None and own.overlap > 1:
        mistakes.append(f"--overlap {own.overlap:g}: must be at most 1, the whole step")
    if mistakes:
        raise UserError(*mistakes)
    return own


# ----------------------------------------------------------------------------------------- estimate


def measure(paths: Sequence[str]) -> dict[str, float]:
    """The figures of decoding that are measured here, by their names; prints how."""
    from scripts.scaling import measure as decoding
    from utils.data.images.decoding import decoder

    found = decoding.measure(paths or decoding.photographs())
    print(
        f"Measured on {len(paths) or 2} file(s), {decoder()}: {found.rate:,.0f} images/s of a core's time as they are, "
        f"{found.packed_rate:,.0f} packed: x {found.ratio:.2f}\n"
    )
    return {
        "decode-rate": found.rate,
        "packed-rate": found.packed_rate,
        "image-kb": found.kb,
        "packed-kb": found.packed_kb,
    }


def completed(values: dict[str, float | None]) -> dict[str, float]:
    """The figures by name: as given, or what follows from one that is given, or the default."""
    numbers = {}
    for name, figure in FIGURES.items():
        follows = figure.of is not None and values[figure.of] is not None
        default = figure.times * values[figure.of] if follows else figure.default
        numbers[name] = default if values[name] is None else values[name]
    return numbers


def rows(numbers: dict[str, float], own: argparse.Namespace) -> list[list[str]]:
    """The table of results: each network on each number of GPUs, on files as they are and packed."""
    machines = Machines(
        own.gpus_per_machine,
        numbers["cores-per-gpu"],
        numbers["training-cores"],
        numbers["disk-mb-s"],
        numbers["network-gbit"],
        numbers["latency-us"],
        numbers["overlap"],
        numbers["dollars"],
    )
    count = int(numbers["images"])
    kinds = {
        "no": Images(count, numbers["image-kb"], numbers["decode-rate"]),
        "yes": Images(count, numbers["packed-kb"], numbers["packed-rate"]),
    }
    cells = []
    for title, key in (("ResNet-50", "resnet50"), ("ViT-S/16", "vit")):
        work = Workload(
            numbers[f"{key}-rate"],
            numbers[f"{key}-weights"],
            numbers["gradient-bytes"],
            int(numbers["batch-size"]),
            int(numbers["largest-batch"]),
        )
        for gpus in own.gpus:
            for packed, images in kinds.items():
                cells.append([title, f"{gpus:,}", packed, *shown(estimate(machines, images, work, gpus))])
    return cells


def shown(found: Estimate) -> list[str]:
    """The cells of an estimate."""
    if found.rate == 0:
        return [found.limit, "0", f"{found.cores}", "never", "-"]
    seconds = found.epoch_seconds
    time = f"{seconds / 60:,.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    return [found.limit, f"{found.rate:,.0f}", f"{found.cores}", time, f"{found.dollars:,.2f}"]


def plain(value: float) -> str:
    """A figure with all its digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def left(cells: Sequence[Sequence[str]]) -> str:
    """The table of inputs, whose last column is aligned left."""
    width = max(len(line[-1]) for line in cells)
    return table(["", "", "  from".ljust(width)], [[*line[:-1], line[-1].ljust(width)] for line in cells])


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
