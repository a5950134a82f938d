"""Pack a data set into shards: tar files that WebDataset reads too, with an index for reading each image by number.

    python scripts/pack.py --dataname folder --datapath DIR --output SHARDS              # the bytes as they are
    python scripts/pack.py --dataname imagenet --datapath DIR --output SHARDS --resize 256 --quality 90
    python scripts/pack.py --dataname cifar10 --datapath DATA --output SHARDS --format raw   # pixels, for small images
    python scripts/pack.py --verify SHARDS                                               # reads all again
    python main.py --dataname shards --datapath SHARDS

After an interruption repeat the command: finished shards stay. The same images and flags give the same bytes. Prints
the folder and its size at the end; exit code 2 for mistakes the user can fix.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import (
    OF_IMAGES,
    ToolParser,
    make_folder,
    refuse,
    run_tool,
    say,
    warn,
    warn_of_unread,
    whole,
)
from utils.config.datasets import SPECS
from utils.config.settings import Settings, UserError, as_user_error, flag_of
from utils.runtime.cpu import cores_per_process

if TYPE_CHECKING:
    from scripts.packing.encoding import Encoding
    from scripts.packing.plan import Part, Plan
    from utils.config.groups.data import DataSettings
    from utils.data.data_set import Data
    from utils.data.formats.shards.index import Contents
    from utils.data.progress_log import ProgressLog

NAME = "pack.py"
QUALITY = 90
SHARD_SAMPLES = 2000


def main(argv: list[str]) -> int:
    own, args = build_parser().split(argv)
    from utils.data.progress_log import ProgressLog

    workers = cores_per_process(1) if args.data.workers == "auto" else args.data.workers
    progress = ProgressLog(say, args.logging.progress)
    if own.verify is not None:
        refuse_to_verify(own)
        warn_of_unread(args, ("workers",), "with --verify, which reads the shards alone")
        return verify(Path(own.verify), workers, progress)
    if own.output is None:
        raise UserError("--output DIR is missing: the folder that the shards are written into")
    encodings = encodings_of(own, args)
    from scripts.packing.plan import Plan
    from utils.data.datasets import get_data
    from utils.data.formats.shards.index import PARTS
    from utils.data.splits import prepare

    refuse_place(own.output, args.data)
    made = ("image_size",) if args.data.dataname == "synthetic" else ()  # in this size
    warn_of_unread(args, (*OF_IMAGES, *made), f"in {NAME}, which packs all images, in the size that they have")
    prepare(args.data, say)
    import torch

    data = get_data(args.data, torch.device("cpu"))
    for line in (*data.warnings, *lost(data, args.data)):
        warn(line)
    refuse_formats(encodings, data)
    folder = make_folder(own.output)
    plan = Plan.of(folder, data, encodings, own.shard_samples or SHARD_SAMPLES, args.data.skip_bad_images)
    contents = completed(plan, workers, progress)
    if contents.made != plan.about:
        raise UserError(f"--output {folder}: already holds shards of other images or flags; choose another folder")
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    shards = [shard for split in contents.splits.values() for shard in split.shards]
    count = sum(shard.samples for shard in shards)
    size = sum(shard.bytes for shard in shards)
    print(f"{folder}: {count:,} images in {len(shards):,} shards, {size / 1e6:,.1f} MB, verified")
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument("--output", metavar="DIR", help="folder of the shards")
    parser.add_argument(
        "--format",
        choices=("keep", "jpeg", "png", "raw"),
        help="keep the files' bytes, or store JPEG, PNG or plain uint8 pixels [keep; jpeg with --resize; raw for "
        "images in memory]",
    )
    parser.add_argument(
        "--resize",
        type=whole(8, 8192),
        metavar="PIXELS",
        help="make the shorter side of training images this long where it is longer",
    )
    parser.add_argument(
        "--resize-validation",
        action="store_true",
        help="shrink validation images as well: a network's accuracy on them differs from that on the files",
    )
    parser.add_argument("--quality", type=whole(1, 100), help=f"quality of JPEG files that are made anew [{QUALITY}]")
    parser.add_argument(
        "--shard-samples", type=whole(1), metavar="N", help=f"images of a shard at most [{SHARD_SAMPLES}]"
    )
    parser.add_argument(
        "--verify",
        metavar="DIR",
        help="only read the shards in DIR again and compare every byte; of tar files without checksums, headers and "
        "sizes",
    )
    return parser


def refuse_to_verify(own: Namespace) -> None:
    """Raise ``UserError`` for flags about shards to be made, of which --verify makes none."""
    names = ("output", "format", "resize", "resize_validation", "quality", "shard_samples")
    given = (flag_of(name) for name in names if getattr(own, name))
    refuse(f"{flag} contradicts --verify, which packs nothing; remove one" for flag in given)


def encodings_of(own: Namespace, args: Settings) -> dict[str, Encoding]:
    """Encodings that the flags ask for, by split. Raises ``UserError`` if the flags contradict each other.

    Validation files keep their bytes even if training images are shrunk: an image resized and compressed twice is not
    quite what a network gets in use. Images that are no files shrink in both splits, for augmentation relies on their
    one size.
    """
    from scripts.packing.encoding import Encoding
    from utils.data.formats.readers import IN_MEMORY, OWN_FILES
    from utils.data.images.levels import Colour

    in_memory = args.data.dataname in {**IN_MEMORY, **OWN_FILES} or SPECS[args.data.dataname].fixed_size
    chosen = own.format or ("jpeg" if own.resize or own.quality else "raw" if in_memory else "keep")
    if chosen == "keep" and own.resize:
        raise UserError("--format keep contradicts --resize, which makes images anew; remove one")
    if own.quality and chosen != "jpeg":
        raise UserError(f"--quality is for --format jpeg, not {chosen}; remove one")
    if own.resize_validation and not own.resize:
        raise UserError("--resize-validation needs --resize PIXELS; give both, or neither")
    colour = Colour(SPECS[args.data.dataname].colour, args.data.pixel_range)
    check = args.data.skip_bad_images
    training = validation = Encoding(chosen, own.resize, own.quality or QUALITY, colour, check)
    if own.resize and not own.resize_validation and not in_memory:
        validation = dataclasses.replace(training, format="keep", resize=None)
    return {"train": training, "val": validation}


def refuse_place(output: str, data: DataSettings) -> None:
    """Raise ``UserError`` if the shards, or their folder, would be mistaken for the data."""
    from utils.data.formats.class_folders import training_folder, validation_folder

    if data.datapath is None:
        return
    root = Path(data.datapath).resolve()
    place = Path(output).resolve()
    if place == root:
        raise UserError(f"--output {output}: is the folder of the images; choose another")
    trees = [*filter(None, (training_folder(root), validation_folder(root)))]
    if data.dataname == "shards" or (data.dataname == "folder" and not trees):
        trees.append(root)  # tar files, or classes to split, are looked for in it
    for tree in trees:
        if tree.resolve() in (place, *place.parents):
            raise UserError(f"--output {output}: lies in {tree}, where images are read from; choose another")


def lost(data: Data, settings: DataSettings) -> list[str]:
    """Warnings about what shards do not hold: a table's weights and groups, and images to test on."""
    from utils.data.formats.class_folders import test_folder, training_folder, validation_folder, visible
    from utils.data.formats.table import rows_of_test
    from utils.data.splits import in_class_folders

    known = [name for name in ("weights", "groups") if getattr(data.train, name) is not None]
    lines = [f"--labels: shards do not keep the images' {' and '.join(known)}, only their labels"] if known else []
    has_test = False
    if settings.is_table:
        test, left_out = rows_of_test(settings, data.classes)
        has_test = test is not None or bool(left_out)  # all may be of classes that the rows to train on lack
    elif settings.datapath is not None and in_class_folders(settings):
        root = Path(settings.datapath)
        folder = test_folder(root)
        validates_there = not settings.divides_training and validation_folder(root) == folder
        is_class = training_folder(root) is None
        has_test = folder is not None and not validates_there and not is_class and any(visible(folder))
    if has_test:
        lines.append("--datapath: shards hold images to train and validate on; those of test are not packed: keep them")
    return lines


def refuse_formats(encodings: dict[str, Encoding], data: Data) -> None:
    """Raise ``UserError`` if images in memory are to be kept as files, or files made anew lose channels or bits."""
    from utils.data.formats.readers import MemoryImages
    from utils.data.images.levels import is_array

    for split, images in (("train", data.train), ("val", data.validation)):
        form = encodings[split].format
        if isinstance(images, MemoryImages):
            if form == "keep":
                raise UserError("--format keep is for files, and these images are in memory; use raw, png or jpeg")
            if images.pixels.shape[1] not in (1, 3):
                raise UserError(f"--format {form}: holds grey or RGB, and these have {images.pixels.shape[1]} channels")
        elif form != "keep" and is_array(images.colour):
            raise UserError(
                f"--format {form}: holds grey or RGB of 8 bits, and these images have other channels or all levels "
                "(--in-channels, --levels); use --format keep, without --resize"
            )


def completed(plan: Plan, workers: int, progress: ProgressLog) -> Contents:
    """Index of the shards, made by this process or by another that is packing them now. Raises ``UserError``."""
    from utils.data.formats.shards.index import read_contents
    from utils.data.kept import claimed

    folder = plan.folder
    if (contents := read_contents(folder)) is not None:
        return contents
    waiting = f"Waiting for another process that packs into {folder}"
    with as_user_error(f"--output {folder}: cannot be written"), claimed(folder / "packing", waiting, say):
        if read_contents(folder) is None:
            pack(plan, workers, progress)
    return read_contents(folder)


def pack(plan: Plan, workers: int, progress: ProgressLog) -> None:
    """Make the missing shards, compare all with what was packed, and write the index. Raises ``UserError``."""
    from scripts.packing.checking import faults_of, refuse_faults
    from scripts.packing.plan import merged
    from utils.data.formats.listing import THREADS
    from utils.data.formats.shards.index import write_contents
    from utils.data.kept import PARTIAL

    plan.begin()
    for path in (path for split in plan.splits for path in plan.folder.glob(f"{split}-*{PARTIAL}")):
        path.unlink(missing_ok=True)  # left by a packing that was killed
    keys = plan.shards()
    with ThreadPoolExecutor(THREADS) as pool:  # on a network drive, looking at files is mostly waiting
        parts = dict(zip(keys, pool.map(lambda key: plan.done(*key), keys), strict=True))
    finished = sum(part.shard.bytes for part in parts.values() if part is not None)
    if finished:
        say(f"{sum(part is not None for part in parts.values()):,} of {len(parts):,} shards are finished already")
    plan.refuse_full_disk(finished)
    make(plan, parts, workers, progress)
    splits = {}
    for name in plan.splits:
        splits[name] = merged([part for (split, _), part in parts.items() if split == name])
        if not len(splits[name].records):
            raise UserError(f"--datapath: none of the {name} images can be read")
    faults = faults_of(plan.folder, splits, workers, progress)
    for key, part in parts.items():
        if any(str(plan.folder / part.shard.file) in fault for fault in faults):
            plan.forget(*key)
    refuse_faults(faults, "repeat the command, which makes these shards anew")
    left_out = [line for part in parts.values() for line in part.left_out]
    if left_out:
        (plan.folder / "left_out.txt").write_text("\n".join(left_out) + "\n", encoding="utf-8", errors="replace")
        say(f"{len(left_out):,} image(s) that cannot be read are left out: {plan.folder / 'left_out.txt'}")
    write_contents(plan.folder, plan.classes, splits, plan.about)


def make(plan: Plan, parts: dict[tuple[str, int], Part | None], workers: int, progress: ProgressLog) -> None:
    """Make the shards that ``parts`` lacks, and add them to ``parts``."""
    from scripts.packing.writing import ShardMaker
    from utils.data.worker_pool import WorkerPool

    missing = [key for key, part in parts.items() if part is None]
    began = time.monotonic()
    count = 0
    with progress.counting("Packing", plan.images, "images") as advance:
        advance(sum(part.shard.samples for part in parts.values() if part is not None))
        for split, number, part in WorkerPool(ShardMaker(plan), min(workers, len(missing))).read(missing):
            plan.keep(split, number, part)
            parts[split, number] = part
            count += part.shard.samples
            advance(part.shard.samples)
    if missing:
        seconds = time.monotonic() - began
        say(f"Packed {count:,} images in {seconds:.1f} s, {count / seconds:,.0f} images/s, {workers} worker(s)")


def verify(folder: Path, workers: int, progress: ProgressLog) -> int:
    """Verify the shards in ``folder``, as --verify asks; return the exit code. Raises ``UserError``."""
    from scripts.packing.checking import faults_of, refuse_faults
    from utils.data.formats.shards.index import read_contents

    contents = read_contents(folder)
    if contents is None:
        raise UserError(f"--verify {folder}: holds no shards.json; a packing that was cut is finished by repeating it")
    refuse_faults(faults_of(folder, contents.splits, workers, progress))
    count = sum(len(split.records) for split in contents.splits.values())
    if all(split.checked for split in contents.splits.values()):
        print(f"{folder}: {count:,} images are as they were packed")
    else:
        print(f"{folder}: headers and sizes of {count:,} images are as indexed; these files have no checksums")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
