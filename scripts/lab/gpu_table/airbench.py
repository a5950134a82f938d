"""Run a script of cifar10-airbench, or one derived from it, on main.py's CIFAR-10, a few times instead of hundreds.

python scripts/lab/gpu_table/airbench.py SCRIPT DATA FOLDER # works in FOLDER, prints what the script prints
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

RUNS = 5
MANY_RUNS = re.compile(r"for run in range\(\d+\)")


def main(argv: list[str]) -> None:
    script, datapath, folder = argv
    text, replaced = MANY_RUNS.subn(f"for run in range({RUNS})", Path(script).read_text(encoding="utf-8"))
    if replaced != 1:
        sys.exit(f"{script}: has no 'for run in range(N)', so its runs cannot be limited")
    place = Path(folder)
    write_images(datapath, place / "cifar10")
    limited = place / Path(script).name
    limited.write_text(text, encoding="utf-8")
    os.chdir(place)
    runpy.run_path(str(limited.absolute()), run_name="__main__")


def write_images(datapath: str, folder: Path) -> None:
    """Write CIFAR-10 in airbench's form: train.pt and test.pt with uint8 images (n, 32, 32, 3), labels and classes."""
    import torch

    from utils.config import arguments
    from utils.data.datasets import get_data
    from utils.data.loaders import loaders
    from utils.runtime.distributed import Distributed, RankInfo

    flags = ["--dataname", "cifar10", "--datapath", datapath, "--loader", "resident", "--device", "cpu"]
    args = arguments.parse(flags)
    data = get_data(args.data, torch.device("cpu"))
    train, validation, _ = loaders(data, args, Distributed(RankInfo(), args.run), channels_last=False)
    folder.mkdir(parents=True)
    for name, source in (("train", train.source), ("test", validation.source)):
        images = source.pixels.permute(0, 2, 3, 1).contiguous()
        torch.save({"images": images, "labels": source.labels, "classes": list(data.classes)}, folder / f"{name}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
