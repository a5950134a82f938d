"""What packing gains: crops a second from shards and from the files, and how well the windowed order shuffles.

    python scripts/benchmark_shards.py --shards my_shards                          # only the shuffling
    python scripts/benchmark_shards.py --shards my_shards --folder my_data         # and the speed of one core
    python scripts/benchmark_shards.py --shards my_shards --windows 1 4 16 --batch-size 256

Speed: random-resized-crops of --size pixels into uint8 batches, in this process with one thread; the sides take turns,
a round at a time, and the median of the rounds counts. It is per second of processor time, which neither the disk nor
other programs on the machine take part in.
Bytes read are those of the images of an epoch. Heavy imports are inside the functions.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, table, whole
from utils.config.settings import UserError

if TYPE_CHECKING:
    import numpy as np

    from utils.data.sets.readers import ImageFiles

NAME = "benchmark_shards.py"
EPOCHS = 4  # whose orders are compared
SEED = 0


def main(argv: list[str]) -> int:
    """The tool; returns its exit code."""
    own = build_parser().parse_args(argv)
    shards = images_of("shards", own.shards)
    print(table(["order of training", "labels of batches", "batch mates again"], shuffling_rows(own, shards)))
    print(f"1.00 is an ordinary shuffle. {len(shards):,} images, batches of {own.batch_size}")
    if own.folder is not None:
        print()
        print(table(["one core", "crops/s", "against the first", "MB an epoch"], speed_rows(own, shards)))
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    parser.add_argument("--shards", required=True, metavar="DIR", help="a folder of shards")
    parser.add_argument("--folder", metavar="DIR", help="the class folders that they were made of")
    parser.add_argument("--windows", type=whole(1), nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="of shards")
    parser.add_argument("--batch-size", type=whole(2), default=256, help="images of a step [256]")
    parser.add_argument("--size", type=whole(1, 8192), default=224, help="pixels of a crop [224]")
    parser.add_argument("--images", type=whole(1), default=256, help="images of a round [256]")
    parser.add_argument("--rounds", type=whole(1), default=9, help="rounds of each side [9]")
    return parser


def images_of(name: str, folder: str) -> ImageFiles:
    """The training images."""
    import torch

    from utils.config import arguments
    from utils.data.sets.datasets import get_data
    from utils.data.sets.readers import ImageFiles

    images = get_data(arguments.parse(["--dataname", name, f"--datapath={folder}"]).data, torch.device("cpu")).train
    if not isinstance(images, ImageFiles):
        raise UserError(f"{folder}: holds no image files")
    return images


# ------------------------------------------------------------------------------------------- shuffling


def shuffling_rows(own: Namespace, shards: ImageFiles) -> list[list[str]]:
    """A row for an ordinary shuffle, for each window, and for the order in which the shards lie."""
    import numpy as np

    from scripts.packing.shuffling import shuffling_of
    from utils.data.sample_plan import SamplePlan
    from utils.data.shards.window import WindowedOrder

    labels, of_shard = shards.labels.numpy(), shards.paths.shards.astype(np.int64)
    count, everything = int(of_shard.max()) + 1, np.arange(len(labels))
    orders = {"full": SamplePlan(len(labels), own.batch_size, own.batch_size, SEED).order}
    for window in own.windows:
        order = WindowedOrder(SEED, of_shard, window, everything)
        name = f"--shard-window {window} of {count}"
        orders[name] = lambda epoch, order=order: order.epoch(epoch)[0]
    records = shards.paths.split.records
    stored = np.lexsort((records["offset"], records["shard"]))
    orders["as they lie, no shuffle"] = lambda _: stored
    rows = []
    for name, order in orders.items():
        figures = shuffling_of([order(epoch) for epoch in range(EPOCHS)], labels, own.batch_size)
        rows.append([name, f"{figures.labels:.2f}", f"{figures.mates:.2f}"])
    return rows


# ----------------------------------------------------------------------------------------------- speed


def speed_rows(own: Namespace, shards: ImageFiles) -> list[list[str]]:
    """Crops a second of one core, from the files by torchvision and by ours, and from the shards."""
    import torch

    files = images_of("folder", own.folder)
    torch.set_num_threads(1)
    sides: dict[str, tuple[ImageFiles, Callable]] = {
        "files, ImageFolder with Pillow": (files, torchvision_crops(own.size)),
        "files, this loader": (files, our_crops(own.size)),
        "shards, this loader": (shards, our_crops(own.size)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(own.rounds + 1):
        chosen = numbers_of_round(number, own.images, min(len(files), len(shards)))
        for name, (images, crops) in sides.items():
            began = time.process_time()
            crops(images, chosen)
            if number:  # the first one loads libraries
                speeds[name].append(len(chosen) / (time.process_time() - began))
            else:
                crops(images, numbers_of_round(number + 1, own.images, min(len(files), len(shards))))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    first = next(iter(medians.values()))
    return [
        [name, f"{speed:,.0f}", f"{speed / first:.2f}", f"{bytes_of(sides[name][0]) / 1e6:,.0f}"]
        for name, speed in medians.items()
    ]


def numbers_of_round(number: int, count: int, available: int) -> np.ndarray:
    """The images of a round, the same for all sides."""
    from utils.data.sample_plan import permutation

    return permutation(available, SEED, number)[:count]


def our_crops(size: int) -> Callable[[ImageFiles, np.ndarray], object]:
    """What a worker of ours does."""
    from utils.data.images.view import View
    from utils.data.sample_plan import MicroBatch
    from utils.data.sources import MicroBatchReader

    def crops(images: ImageFiles, chosen: np.ndarray) -> object:
        return MicroBatchReader(images, View(size), crop=True)[MicroBatch(0, 0, chosen, len(chosen), 1.0, True)]

    return crops


def torchvision_crops(size: int) -> Callable[[ImageFiles, np.ndarray], object]:
    """What a worker of ``ImageFolder`` does, up to the same uint8 crops."""
    import numpy as np
    import torch
    from PIL import Image
    from torchvision import transforms

    crop = transforms.RandomResizedCrop(size)

    def crops(images: ImageFiles, chosen: np.ndarray) -> object:
        shown = []
        for number in chosen:
            with open(images.paths[number], "rb") as file:
                shown.append(torch.from_numpy(np.array(crop(Image.open(file).convert("RGB")))))
        return torch.stack(shown)

    return crops


def bytes_of(images: ImageFiles) -> int:
    """Bytes of all images."""
    import os

    from utils.data.shards.members import Members

    if isinstance(images.paths, Members):
        return int(images.paths.split.records["size"].sum())
    return sum(os.path.getsize(path) for path in images.paths)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
