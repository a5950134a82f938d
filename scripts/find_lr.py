"""Which learning rate? A range test with the settings that main.py would train with.

    python scripts/find_lr.py                                                     # the digits
    python scripts/find_lr.py --dataname folder --datapath my_data --arch resnet50 --pretrained --picture lr.png

Trains for some steps while the learning rate grows exponentially, until the loss diverges (Smith, Cyclical Learning
Rates for Training Neural Networks, 2017), and advises a value for --lr. Takes all flags of main.py. Leaves nothing
behind except the picture.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, positive_number, refuse, run_tool, whole
from scripts.common.output import wrong_name
from utils.config.settings import Settings, UserError
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    from scripts.lr_range.measure import RangePoint

NAME = "find_lr.py"
LINES = 10  # printed during the test if there is no bar


def main(argv: list[str]) -> int:
    own, args = build_parser().split(argv)
    refuse_mistakes(own)
    if args.run.max_steps is not None:
        raise UserError(f"--max-steps is not for {NAME}; --steps N ends the test")
    from components import build, build_traval
    from scripts.lr_range import measure
    from scripts.lr_range.advice import advise
    from utils.record.writer import Writer
    from utils.run import Run
    from utils.runtime.distributed import Distributed

    ramp = measure.Ramp(own.start_lr, own.end_lr, own.steps)
    with Distributed(RankInfo(), args.run, args.precision.tf32) as distributed:
        run = Run(args, distributed, writer=Writer(silent=True))
        components = build(run)._replace(lr_policy=ramp, ema=None)  # an average of weights changes no loss
        title = describe(run.args)
        print(title)
        with display(own.steps, args.logging.progress) as show:
            test = measure.run(build_traval(run, components), ramp, show)
    advice = advise(test)
    print(f"Advice: {advice.line(own.start_lr, own.end_lr)}")
    if own.picture and not test.points:
        print("Picture: none, for no step succeeded")
    elif own.picture:
        from scripts.lr_range.advice import draw

        draw(own.picture, title, test, advice)
        print(f"Picture: {own.picture}")
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument("--start-lr", type=positive_number, default=1e-6, metavar="X", help="first rate [1e-6]")
    parser.add_argument("--end-lr", type=positive_number, default=10.0, metavar="X", help="last rate [10]")
    parser.add_argument("--steps", type=whole(10), default=100, metavar="N", help="optimizer steps at most [100]")
    parser.add_argument("--picture", metavar="FILE.png", help="draw loss over learning rate [nothing is drawn]")
    return parser


def refuse_mistakes(own: argparse.Namespace) -> None:
    """Raise ``UserError`` for an empty range of rates or a wrong file name, before any work."""
    mistakes = []
    if own.start_lr >= own.end_lr:
        mistakes.append(f"--start-lr {own.start_lr:g} must be below --end-lr {own.end_lr:g}")
    if own.picture is not None and (mistake := wrong_name("--picture", own.picture, "a .png", ".png")):
        mistakes.append(mistake)
    refuse(mistakes)


def describe(args: Settings) -> str:
    """Description of network, data, optimizer and batch in one line."""
    frozen = ", frozen throughout as in the first epoch" if args.model.freezing_changes else ""
    return (
        f"{args.model.arch} on {args.data.dataname}, {args.optimisation.optimizer}, batch {args.data.global_batch_size}"
        f"{frozen}"
    )


@contextmanager
def display(steps: int, progress: bool) -> Iterator[Callable[[RangePoint], None]]:
    """Context that gives a function to show a step: on a progress bar, or some of the steps as printed lines.

    The bar needs ``progress`` and a terminal.
    """
    from tqdm import tqdm

    disabled = not (progress and sys.stderr.isatty())
    numbers = itertools.count(1)
    with tqdm(total=steps, unit="step", desc="Range test", leave=False, disable=disabled) as bar:

        def show(point: RangePoint) -> None:
            text = f"lr {point.lr:.2e}  loss {point.smoothed:.4f}"
            bar.set_postfix_str(text, refresh=False)
            bar.update()
            number = next(numbers)
            if disabled and number % max(1, steps // LINES) == 0:
                print(f"step {number}  {text}", flush=True)

        yield show


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
