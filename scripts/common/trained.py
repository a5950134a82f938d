"""Find and open the trained network that a tool's RUN argument names."""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import refuse, run_flags, say, share, warn, whole
from utils.config import arguments
from utils.config.groups.data import VIEWS
from utils.config.groups.run import DEVICES
from utils.config.settings import Settings, UserError
from utils.record.run_folder import folder_of_runs

if TYPE_CHECKING:
    import torch

    from components import Components
    from models.load import Loaded
    from utils.checkpoint.resume import ResumePoint
    from utils.runtime.distributed import Distributed

# folder whose newest run is meant by RUN auto
AUTO = "auto"
RUNS = Path("runs")
BEGINNING = re.compile(r"\d{4}-\d\d-\d\d_")
FORMATS = ("off", "fp16", "bf16")
NOT_FINITE = "the network's output is not finite; try --amp off"  # e.g. if numbers overflow for an image


def add_run(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the argument RUN (one or more if ``several``), and flags that choose among a run's weights."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="+" if several else None,
        help=f"a checkpoint file, a run folder (its newest checkpoint; after early stopping its best), or auto: the "
        f"newest run below {RUNS}/",
    )
    add_best(parser)
    parser.add_argument("--raw", action="store_true", help="the trained weights, even if the run kept an average")
    text = "files of your own that the run was trained with"
    parser.add_argument("--plugin", nargs="+", action="extend", metavar="FILE", help=text)


def add_best(parser: argparse.ArgumentParser) -> None:
    """Add --best, which chooses among the checkpoints of a run folder; ``None`` without the flag."""
    parser.add_argument("--best", action="store_true", default=None, help="best.pt of a run folder, not its newest")


def add_run_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the arguments of ``add_run``, and flags for running the network."""
    add_run(parser, several)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="[auto: a GPU if there is one]")
    parser.add_argument(
        "--amp", choices=FORMATS, help="mixed precision [as the run, otherwise off on a CPU, fp16 on a GPU]"
    )
    parser.add_argument(
        "--batch-size", type=whole(1, 2**20), metavar="N", help="images per forward pass [as a process of the run]"
    )


def add_images_of_data(parser: argparse.ArgumentParser) -> None:
    """Add flags that choose images of a data set, as ``Chosen`` takes them."""
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        default="val",
        help="val: what main.py validates on; train: without augmentation; test: a test/ beside val/ [val]",
    )
    parser.add_argument(
        "--labels", metavar="FILE", help="table of the labels of the images in --datapath, instead of class folders"
    )
    parser.add_argument(
        "--datapath",
        metavar="FOLDER",
        help="other images: class folders, or train/, val/, test/ of them; classes are matched by name",
    )
    parser.add_argument("--skip-bad-images", action="store_true", help="leave out unreadable images, and name them")


def add_views(parser: argparse.ArgumentParser) -> None:
    """Add the flag --tta."""
    text = "test-time augmentation: the mean logits of several views, as main.py's --tta [as the run]"
    parser.add_argument("--tta", choices=tuple(VIEWS), help=text)


def settings_and_point(flags: Sequence[str], required: bool = True) -> tuple[Settings, ResumePoint | None]:
    """Training settings from ``flags``, and the checkpoint they come from if --resume is given.

    Raises ``UserError`` if --resume auto finds no checkpoint and one is ``required``.
    """
    args = arguments.parse(flags)
    others = (flag for flag in run_flags(args) if flag != "--resume")
    refuse(f"{flag} is for main.py; this tool measures anyway: remove it" for flag in others)
    if not args.run.resume:
        return args, None
    import torch

    from utils.data.datasets import DataReader
    from utils.data.formats.class_folders import LISTER

    point = DataReader(torch.device("cpu"), LISTER).find(args, folder_of_runs(args), warn)
    if point is not None:
        return arguments.parse(flags, checkpoint=point.settings), point
    if required:
        raise UserError("--resume auto: there is no run with these settings; give a path, or leave --resume out")
    return args, None


def build_trained(args: Settings, distributed: Distributed, point: ResumePoint | None) -> tuple[Components, str]:
    """Build the parts of a training run with the weights of ``point``, if any; return also their source, as text.

    Frozen is what the run's next epoch freezes.
    """
    from components import build
    from utils.checkpoint import checkpoint
    from utils.run import Run

    args = args.with_values(evaluate=False)  # a training's, in any case
    components = build(Run(args, distributed, resume_point=point))
    if point is not None:
        state = point.read()
        checkpoint.load_weights(components.model, state["model"], str(point.path))
        components.network.freezing.set_epoch(state["progress"]["epoch"], components.model)
        return components, f"weights of {point.path}"
    if args.model.weights:
        return components, f"weights of {args.model.weights}"
    return components, "pretrained weights" if args.model.pretrained else f"weights from --seed {args.run.seed}"


def add_images(parser: argparse.ArgumentParser, remark: str = "") -> None:
    """Add the argument IMAGES, as ``image_names`` reads it."""
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="files, folders with all below them, patterns, @FILE for a list with a name on each line, - for standard "
        f"input{remark}",
    )


def add_rejection(parser: argparse.ArgumentParser) -> None:
    """Add the flag --reject-below, for answers that are not confident enough."""
    parser.add_argument(
        "--reject-below", type=share, metavar="P", help="answers with a probability below P are none of the classes"
    )


def refuse_rejection(below: float | None, loaded: Loaded) -> None:
    """Raise ``UserError`` if --reject-below is given for a multi-label network."""
    if below is not None and loaded.reading.several:
        raise UserError(f"--reject-below {below:g}: {loaded.path} gives several labels or none, each by its threshold")


def accepted(confidence: Any, below: float) -> Any:
    """True for each confidence (a number or an array of them) of at least ``below``; False for NaN.

    Compares in float32, in which the probability of one of two equal logits is 0.5; in float64 it may be a little less.
    """
    import numpy as np

    return np.asarray(confidence, np.float32) >= np.float32(below)


def find_run(text: str) -> Path:
    """Checkpoint file or run folder that ``text`` names. Raises ``UserError`` if there is none."""
    if text == AUTO:
        return _newest_run()
    if not text.strip() or "\0" in text:
        raise UserError("RUN must not be empty or hold a NUL character")
    path = Path(text)
    if os.path.isdir(path) and not _checkpoints_in(path):  # unlike Path's, False for a name that is too long
        raise UserError(f"{path}: holds no checkpoint; give a run folder or a .pt file")
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such run or checkpoint")
    return path


def _newest_run() -> Path:
    """Folder of the run that began last among those below ``RUNS`` that have saved what they trained.

    If none has, of those with a checkpoint of their first weights. Raises ``UserError`` if there are none either.
    """
    saved = {path.parent: _checkpoints_in(path.parent) for path in RUNS.rglob("config.yaml")}
    trained = [folder for folder in saved if saved[folder] - {"initial.pt"}]
    folders = trained or [folder for folder in saved if saved[folder]]
    if not folders:
        raise UserError(f"RUN auto: there is no run with a checkpoint below {RUNS.absolute()}; give its folder")

    def beginning(folder: Path) -> str:
        if BEGINNING.match(folder.name):
            return folder.name
        # a renamed folder counts from when its settings were written
        return datetime.fromtimestamp((folder / "config.yaml").stat().st_mtime).strftime("%Y-%m-%d_%H-%M-%S")

    return max(folders, key=lambda folder: (beginning(folder), str(folder)))


def _checkpoints_in(folder: Path) -> set[str]:
    """The names of its checkpoint files."""
    return {file.name for place in (folder, folder / "checkpoints") for file in place.glob("*.pt")}


def open_run(
    text: str,
    raw: bool = False,
    device: str = "auto",
    *,
    best: bool | None = None,
    for_autocast: bool = True,
    calibrated: bool = True,
) -> Loaded:
    """Load the network of RUN ``text`` on ``device``, in evaluation mode.

    Warnings, and the file chosen in a folder, go to stderr. ``best``, ``calibrated``: as in ``load_model``. ``raw``:
    the trained weights, even if the run kept an average. ``for_autocast``: layers of the run's --fp32-layers compute in
    float32 under autocast, as in training. Raises ``UserError``.
    """
    from models import load_model
    from utils.precision.amp import keep_in_fp32

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        loaded = load_model(find_run(text), raw=raw, best=best, calibrated=calibrated)
    for warning in caught:
        warn(str(warning.message))
    if loaded.chosen or text == AUTO:
        say(f"{loaded.path} is taken: {loaded.chosen or 'the newest run, and its newest checkpoint'}")
    if loaded.progress is not None and loaded.progress.get("step") == 0:
        warn(f"{loaded.path}: was saved before the first step of training")
    if line := of_each_class(loaded):
        say(f"{loaded.path}: {line}")
    place = chosen_device(device)
    loaded.network.to(place)
    if for_autocast:
        keep_in_fp32(loaded.network, loaded.fp32_layers, place)
    return loaded


def of_each_class(loaded: Loaded) -> str:
    """Remark on the probabilities of a network whose training loss judged each class alone; '' for others."""
    if loaded.reading.several or loaded.settings.get("loss") != "bce":
        return ""
    return (
        "was trained with --loss bce, which judges each class alone; probabilities are a softmax over all classes, so "
        "an image of none of them still gets a likely class"
    )


def chosen_device(name: str) -> torch.device:
    """Device that --device ``name`` means on this machine. Raises ``UserError`` if there is none."""
    from utils.config.groups.run import RunSettings
    from utils.runtime.distributed import Distributed, RankInfo

    return Distributed(RankInfo(), RunSettings(device=name)).device
