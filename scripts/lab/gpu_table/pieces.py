"""The pieces of the GPU table: the commands that measure each, and what reads their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.lab.benchmarks.lines import Line
from scripts.lab.gpu_table import collect

AMP = "scripts/lab/benchmark_amp.py --device {device} --output {out}"
BENCHMARK = (
    "scripts/lab/benchmark.py --device {device} --output {out} --seconds 6 --cifar10={cifar10} "
    "--images={imagenette} --timm-train={timm_train}"
)
TINY_MLP = "--width 32 --layers 2 --batch-size 8 --steps 2 --rounds 1"
TINY_RUN = (
    "--seeds 1 --epochs 1 --amp off --global-batch-size 8 --train-samples 16 --max-val-batches 1 --picture-epochs off"
)


@dataclass(frozen=True)
class Piece:
    """A piece of the table. ``seconds``: about how long it takes on an H100-class GPU.

    ``commands``: arguments of Python, with ``{name}`` for a value of ``gpu_results.py``; a word whose value is not
    given is left out. ``tiny``: further flags on a CPU; None: the piece needs a GPU. ``lines(out)``: reads the lines
    from the commands' folder ``out``. ``may_fail``: exit code 1 also gives figures. ``needs``: flags without which the
    piece is left out. ``resumes``: an interrupted piece continues where it stopped, so it may begin with little time
    left.
    """

    name: str
    what: str
    seconds: int
    commands: tuple[str, ...]
    lines: Callable[[Path], list[Line]]
    tiny: str | None = ""
    needs: tuple[str, ...] = ()
    may_fail: bool = False
    resumes: bool = False


def speed(part: str, what: str, seconds: int, rounds: int = 2, needs: tuple[str, ...] = ()) -> Piece:
    """Piece that runs ``part`` of benchmark.py. ``rounds``: its --rounds; all else as in ``Piece``."""
    command = f"{BENCHMARK} --rounds {rounds} --only {part}"
    tiny = "--tiny --rounds 1 --seconds 0.01"
    return Piece(part, what, seconds, (command,), collect.benchmark, tiny, needs, may_fail=True)


def training(name: str, what: str, seconds: int, recipe: str, tiny: str = "", **aims: object) -> Piece:
    """Piece that trains a recipe with several seeds. ``recipe``: its name, number of seeds, data flag, more flags.

    ``aims``: further arguments of ``collect.recipe``; all else as in ``Piece``.
    """
    recipe, seeds, data, *more = recipe.split()
    command = f"scripts/sweep.py {recipe} --seeds {seeds} --datapath {{{data}}} --device {{device}} --output {{out}}"
    lines = partial(collect.recipe, name=recipe, **aims)
    return Piece(name, what, seconds, (" ".join([command, *more]),), lines, f"{TINY_RUN} {tiny}", (data,), resumes=True)


def rival(name: str, seconds: int, flag: str, script: str, aim: float | None = None) -> Piece:
    """Piece that runs ``script`` of cifar10-airbench, or one derived from it, in the folder given by the flag ``flag``.

    ``seconds``: its usual duration. ``aim``: the bound that the comparison of our runs with it must keep.
    """
    command = f"scripts/lab/gpu_table/airbench.py {{{flag}}}/{script} {{cifar10}} {{out}}"
    lines = partial(collect.airbench, script=script, aim=aim)
    return Piece(name, f"{script} on the same images", seconds, (command,), lines, None, ("cifar10", flag))


# In the order in which a GPU's first minutes are best spent.
PIECES = (
    Piece(
        "tests",
        "the tests that need a GPU",
        100,
        ("-m pytest -m gpu -p no:cacheprovider --junitxml={out}/tests.xml {gpu_tests}",),
        collect.tests,
        may_fail=True,
    ),
    Piece(
        # A datacenter GPU finishes the published size before the host has launched the next kernels, so those
        # ratios say more about the host; the larger size fills the GPU.
        "amp",
        "PyTorch's AMP recipe in each dtype, also as a graph",
        90,
        (
            f"{AMP}/published --rounds 4",
            f"{AMP}/larger --rounds 2 --width 8192 --batch-size 4096 --steps 10",
        ),
        collect.amp,
        TINY_MLP,
    ),
    speed("resnet50-bf16", "resnet50 at 224 pixels in bf16 against a bare loop, timm, and itself as graphs", 210),
    training("fast", "CIFAR-10 to 94 %, 25 seeds", 345, "cifar10/airbench 25 cifar10", aim=94.0, clocked=True),
    rival("airbench94-muon", 185, "airbench", "airbench94_muon.py", aim=1.0),
    training(
        "fast-graphs",
        "the same as graphs, five seeds",
        70,
        "cifar10/airbench 5 cifar10 --cuda-graph auto",
        aim=94.0,
        clocked=True,
    ),
    Piece(
        "accounting",
        "what main.py's step adds to a bare loop, and to the GPU's own work",
        65,
        (f"{AMP} --accounting --batch-size 512 --ema-decay 0.999 --rounds 8",),
        collect.accounting,
        "--arch conv2 --image-size 8 --batch-size 8 --steps 2 --rounds 1",
    ),
    rival("airbench94", 60, "airbench", "legacy/airbench94.py"),
    rival("hiverge", 300, "hiverge", "cifar10_speedrun.py"),
    speed("resnet50-fp16", "as resnet50-bf16, in fp16", 290),
    speed("resnet50-compiled", "the same in fp16, compiled", 400),
    speed("vit-small-bf16", "ViT-S/16 at 224 pixels in bf16 against the same", 250),
    speed(
        "resident", "resnet18 on resident CIFAR-10 against a bare loop and itself as graphs", 225, needs=("cifar10",)
    ),
    training(
        "resnet18-short",
        "resnet18 on CIFAR-10 to 95.28 %, three seeds",
        300,
        "cifar10/resnet18_short 3 cifar10",
        "--arch fc",
        aim=95.28,
    ),
    speed("jpeg-resnet18", "resnet18 from JPEG files, decoded by CPU and GPU", 150, 1, ("imagenette",)),
    speed("jpeg-resnet50", "resnet50 from JPEG files, decoded by CPU and GPU", 210, 1, ("imagenette",)),
    training(
        "imagenette",
        "resnet50 on Imagenette, the whole recipe",
        240,
        "imagenette/resnet50 1 imagenette",
        "--arch fc --image-size 8 --workers 0 --warmup-epochs 0",
    ),
)
