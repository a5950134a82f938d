"""Features of a data set by a trained network: probes, doubtful labels, near duplicates, nearest neighbours, a map.

    python scripts/features.py auto                                            # the newest run, its own images
    python scripts/features.py RUN --dataname folder --datapath DIR            # other images, even of other classes
    python scripts/features.py timm/resnet18 --dataname folder --datapath DIR  # a library's network with its weights

Writes features.html, tables and the features themselves into a folder, and reuses the features later.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, make_folder, refuse, run_tool, table, whole
from scripts.common.output import whole_file, write_csv
from scripts.common.trained import AUTO, add_best, chosen_device, find_run, open_run
from utils.config import arguments
from utils.config.settings import UserError, flag_of
from utils.config.spelling import printable

if TYPE_CHECKING:
    from models.load import Loaded
    from scripts.reporting.feature_study import Study

NAME = "features.py"
FEATURES = "features"
LISTED = 10  # doubtful images printed
LONGEST = 48  # characters of a printed path


def main(argv: list[str]) -> int:
    own, flags = build_parser().parse_known_args(argv)
    is_run = own.network == AUTO or os.path.lexists(own.network)
    if is_run:
        find_run(own.network)  # before any slow import
    elif own.best or own.raw:
        raise UserError(f"{own.network}: no such run; --best and --raw choose among the weights of a run")
    loaded = open_network(own, flags, is_run)
    from scripts.common.features import chosen_of, embed, knows_classes, learned_labels, splits_of
    from scripts.reporting.feature_study import TRAIN, accuracies, study

    began = time.perf_counter()
    folder = make_folder(own.output or default_folder(loaded, is_run))
    splits = splits_of(loaded, own.split)
    parts = {split: embed(loaded, chosen_of(loaded, split), folder, own.format) for split in splits}
    seconds = time.perf_counter() - began
    its_own = is_run and knows_classes(loaded) and learned_labels(loaded)
    of = study(parts, own.split, own.neighbours, its_own=its_own)
    rows = accuracies(of)
    present(of, rows, loaded, folder)
    print(f"Features in {seconds:.1f} s, the rest in {of.seconds:.1f} s; {len(parts[TRAIN].features[0])} numbers each")
    knn, probe = (f"_{of.headline}={row['value']:.4f}" for row in rows)
    print(f"knn{knn} probe{probe} {own.split}_count={len(of.of_scored)} output={folder}")
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.usage = f"python scripts/{NAME} RUN_OR_ARCH [flag ...] [training flag ...]"
    parser.add_argument(
        "network",
        metavar="RUN_OR_ARCH",
        help="a run folder, a checkpoint, auto for the newest run; or the name of a network as --arch takes it",
    )
    add_best(parser)
    parser.add_argument("--raw", action="store_true", help="the trained weights, even if the run kept an average")
    parser.add_argument("--split", choices=("val", "test"), default="val", help="images to classify [val]")
    parser.add_argument(
        "--neighbours", type=whole(1, 1000), metavar="K", default=20, help="nearest training images that vote [20]"
    )
    parser.add_argument("--output", metavar="DIR", help="folder of the files [features in the run's folder, or here]")
    parser.add_argument("--format", choices=("npz", "parquet"), default="npz", help="of the features' files [npz]")
    return parser


def open_network(own: argparse.Namespace, flags: list[str], is_run: bool) -> Loaded:
    """The network, on its device, with the data that ``flags`` choose."""
    from models.build import unknown_arch
    from scripts.common.features import of_architecture, on_data

    given = arguments.read(flags)  # loads the files of --plugin, one of which may hold the run's network
    names = {name for _, _, layer in given.layers for name in layer}
    asked = (flag_of(name) for name in ("resume", "evaluate", "dry_run") if name in names)
    refuse(f"{flag} is for main.py; remove it, and name the run as RUN_OR_ARCH" for flag in asked)
    if not is_run and (mistake := unknown_arch(own.network)):
        raise UserError(f"{own.network}: no such run or checkpoint; {mistake}")
    if is_run:
        loaded = on_data(open_run(own.network, own.raw, "cpu", best=own.best), flags)
    else:
        loaded = of_architecture(own.network, flags)
    loaded.network.to(chosen_device(str(loaded.settings.get("device") or "auto")))
    return loaded


def default_folder(loaded: Loaded, is_run: bool) -> str:
    """Default output folder: inside the run's folder if there is one."""
    if not is_run:
        return f"{FEATURES}/{loaded.arch.replace('/', '_')}"
    run = loaded.path.absolute().parent.parent
    return os.path.relpath(run / FEATURES) if (run / "config.yaml").is_file() else FEATURES


def short(text: str) -> str:
    """Text in printable characters, cut at its beginning if it is long: a path's end distinguishes it from others."""
    text = printable(text)
    return text if len(text) <= LONGEST else f"...{text[3 - LONGEST :]}"


def present(of: Study, rows: list[dict[str, Any]], loaded: Loaded, folder: Path) -> None:
    """Print the findings, with the classifiers' ``rows``, and write tables and page."""
    from scripts.reporting.feature_page import alike_words, doubt_rows, duplicate_rows, render_features
    from scripts.reporting.feature_study import NAMES, heads

    counts = ", ".join(f"{len(part):,} {NAMES[split]}" for split, part in of.parts.items())
    print(f"{loaded.path}: {loaded.arch}\n{counts} images, {len(of.train.classes):,} classes\n")
    shown = [[row["classifier"], f"{row['value']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}"] for row in rows]
    figure, interval = heads(of)
    print(table([f"{figure} on the {NAMES[of.scored]} images", "%", interval], shown))
    for row in rows:
        print(f"{row['classifier']}: {row['method']}")
    if copied := int(of.copied.sum()):
        without = " and ".join("-" if row["without_copies"] is None else f"{row['without_copies']:.2f}" for row in rows)
        images = f"{copied:,} images" if copied > 1 else "the image"
        print(f"Without {images} that a training image nearly equals: {without} %")
    doubts = doubt_rows(of)
    copies = duplicate_rows(of)
    print(
        "\nDoubtful labels: " + ", ".join(f"{len(of.doubts_of(s)):,} of {n:,} {s}" for s, n in of.known_labels.items())
    )
    if doubts:
        columns = [name for name in doubts[0] if name != "confident"]
        print(table(columns, [[short(str(row[name])) for name in columns] for row in doubts[:LISTED]]))
    pairs = ", ".join(f"{len(found):,} {one}-{two}" for (one, two), found in of.duplicates.items())
    print(f"\nNear duplicates across splits: {pairs}")
    if words := alike_words(of):
        print(words)
    for note in of.notes:
        print(note)
    for name, found in (("doubtful", doubts), ("duplicates", copies)):
        if found:
            write_csv(folder / f"{name}.csv", found)
        else:
            (folder / f"{name}.csv").unlink(missing_ok=True)  # left by an earlier call
    page = render_features(of, loaded, rows).encode()
    with whole_file(folder / "features.html", f"--output {folder}", "; choose another") as file:
        file.write(page)
    print(f"\n{folder / 'features.html'}: {len(page) / 1e6:.1f} MB, opens in any browser")


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
