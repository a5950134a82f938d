"""Average the weights of several checkpoints of one network into one: a uniform or a greedy soup.

    python scripts/average_checkpoints.py --checkpoints RUN_A RUN_B RUN_C --output soup.pt
    python scripts/average_checkpoints.py --method greedy --choose-on half --checkpoints RUN_* --output soup.pt

Computes the batch-norm statistics of the soup over training batches (--ema-bn-batches of them), validates it and each
ingredient, and saves it for main.py's --weights and --evaluate. Settings are those of the first checkpoint; all flags
of main.py replace them, such as --datapath and --device.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, refuse, run_flags, run_tool, table, warn
from scripts.common.trained import add_best
from utils.config import arguments
from utils.config.settings import Settings, UserError
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    from scripts.averaging.soup import Ingredient, Soup, StateDict
    from utils.data.loaders import ValidationLoader
    from utils.record.multilabel import AnyReport
    from utils.runtime.distributed import Distributed

NAME = "average_checkpoints.py"


def main(argv: list[str]) -> int:
    own, flags = build_parser().parse_known_args(argv)
    refuse_mistakes(own)
    from models.load import FAVOURED
    from scripts.averaging.soup import read, refuse_differences, save
    from utils.checkpoint.fingerprint import of_all
    from utils.record.summary import figures

    ingredients = [read(path, own.best) for path in own.checkpoints]
    refuse_differences(ingredients)
    args = settings(flags, ingredients[0])
    if own.choose_on == "half" and args.data.max_val_batches:
        raise UserError("--choose-on half contradicts --max-val-batches: it takes half of all images; give one")
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), args.run, args.precision.tf32) as distributed:
        kitchen = Kitchen(args, ingredients, distributed, own.choose_on)
        for line in kitchen.seen_in_training(ingredients):
            warn(line)
        soup, reached, report = kitchen.cook(own.method, [ingredient.weights for ingredient in ingredients])
        print(show(own, soup, kitchen, reached, report))
        kept = [ingredients[place] for place in soup.kept]
        if chosen := kitchen.chosen_here(kept):
            print(f"Chosen by their results on the validation images, which favours the soup: {' and '.join(chosen)}")
        made_of = {"method": own.method, "ingredients": [str(one.path) for one in kept]}
        description = as_validated(ingredients[0].description, args, kitchen.components.data.preprocessing.state())
        description["fingerprint"] = of_all(ingredient.description["fingerprint"] for ingredient in ingredients)
        if seen := dict.fromkeys(filter(None, (ingredient.description.get("seen") for ingredient in ingredients))):
            description["seen"] = "; ".join(seen)
        if own.method == "greedy" or any(one.is_favoured for one in kept):
            description[FAVOURED] = True
        save(Path(own.output), kitchen.model.state_dict(), description, made_of)
    print(f"Saved {own.output}")
    print(figures(report, args.data.max_val_batches))
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        required=True,
        metavar="PATH",
        help="checkpoint files, or run folders, which stand for their newest one, after early stopping their best",
    )
    add_best(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="the checkpoint to write")
    parser.add_argument(
        "--method",
        choices=("uniform", "greedy"),
        default="uniform",
        help="uniform: the mean of all; greedy: from the best on, each that does not harm the soup [uniform]",
    )
    parser.add_argument(
        "--choose-on",
        choices=("validation", "half"),
        default="validation",
        help="greedy: choose on all validation images, or on half of them and report on the other half [validation]",
    )
    return parser


def refuse_mistakes(own: argparse.Namespace) -> None:
    """Raise ``UserError``, before any work, if flags contradict each other or --output cannot be written."""
    mistakes = []
    output = Path(own.output)
    if len(own.checkpoints) < 2:
        mistakes.append("--checkpoints: give two or more to average")
    if own.choose_on == "half" and own.method != "greedy":
        mistakes.append("--choose-on half needs --method greedy: a uniform soup chooses nothing")
    if output.exists():
        mistakes.append(f"--output {output}: exists already; remove it or choose another name")
    elif not output.absolute().parent.is_dir():
        mistakes.append(f"--output {output}: its folder does not exist")
    refuse(mistakes)


def settings(flags: Sequence[str], first: Ingredient) -> Settings:
    """Settings of the first checkpoint, replaced by ``flags``, without those that only training needs."""
    arguments.read(list(flags))  # loads the files of --plugin, of which the checkpoint's settings may need one
    begun = {name: value for name, value in first.point.settings.items() if name not in arguments.FOR_TRYING_OUT}
    args = arguments.parse(list(flags), checkpoint=begun)
    refuse(f"{flag} is not for averaging" for flag in run_flags(args))
    return dataclasses.replace(
        args.with_values(resume_override=True, ema_decay=None, swa_start_epoch=None),  # other images may be given
        loss=type(args.loss)(**({"loss": "bce"} if first.description.get("multilabel") else {})),
        optimisation=type(args.optimisation)(lr=1.0, epochs=args.optimisation.epochs),
    )


def as_validated(description: dict[str, Any], args: Settings, preprocessing: dict[str, Any]) -> dict[str, Any]:
    """The first checkpoint's ``description``, with the settings that the flags changed and this ``preprocessing``.

    With these, evaluating the soup later gives the printed metrics.
    """
    values = args.with_absolute_paths().values()
    flags = {name: values[name] for name in args.changed if name not in arguments.FOR_TRYING_OUT}
    return {**description, "preprocessing": preprocessing, "settings": {**description["settings"], **flags}}


class Kitchen:
    """Network and images with which weights are scored. ``choose_on``: see --choose-on."""

    def __init__(
        self, args: Settings, ingredients: Sequence[Ingredient], distributed: Distributed, choose_on: str
    ) -> None:
        from components import build
        from scripts.averaging.soup import statistics_differ
        from scripts.common.uncertainty import divided
        from utils.optim.freezing import let_gather_statistics
        from utils.record.writer import Writer
        from utils.run import Run
        from utils.train_validation import Extras, TraVal

        point = ingredients[0].point
        self.components = build(Run(args, distributed, resume_point=point))
        data = self.components.data
        point.refuse_other_data(data.classes, None, multilabel=data.multilabel)
        self.model = self.components.model
        # What the first run froze, others may have trained.
        let_gather_statistics(self.model, lambda layer: statistics_differ(ingredients, layer))
        self.args = args
        self.distributed = distributed
        self.choosing = self.reporting = loader = self.components.validation_loader
        if choose_on == "half":
            count = len(loader.source)
            parts = divided(count, count // 2, args.run.seed, data.validation.groups)
            if not all(map(len, parts)):
                raise UserError("--choose-on half: all validation images belong to one group, which stays whole")
            self.choosing, self.reporting = map(loader.part, parts)
        self.traval = TraVal(
            self.model,
            None,
            None,
            self.components.criterion,
            self.components.scaler,
            args,
            self.choosing,
            writer=Writer(None, progress=args.logging.progress),
            extras=Extras(distributed=distributed, multilabel=data.multilabel),
        )

    def seen_in_training(self, ingredients: Sequence[Ingredient]) -> list[str]:
        """A line for each ingredient that may have been trained on images used to score it."""
        from utils.data.datasets import seen_in_training

        data = self.components.data
        lines = (seen_in_training(data.validation, data.fingerprint, self.args.data, one.point) for one in ingredients)
        return [line for line in lines if line]

    def chosen_here(self, ingredients: Sequence[Ingredient]) -> list[str]:
        """Paths of the ingredients that their runs chose by the validation images, such as best.pt."""
        from utils.checkpoint.fingerprint import same_images

        images = self.components.data.fingerprint
        its = (one for one in ingredients if one.is_favoured and same_images(images, one.description["fingerprint"]))
        return [str(one.path) for one in its]

    def cook(self, method: str, ingredients: Sequence[StateDict]) -> tuple[Soup, list[float], AnyReport]:
        """Make the soup and load it into ``model``; also return the ingredients' metrics and the soup's validation.

        The metrics and the validation are of the images to report on. The metric is top-1, or mean average precision
        for multi-label data.
        """
        from scripts.averaging import soup as recipes

        soup = getattr(recipes, method)(
            ingredients, lambda weights, mixed: self.validate(weights, mixed, self.choosing).headline
        )
        reached = soup.scores
        if self.reporting is not self.choosing:
            reached = [self.validate(weights, False, self.reporting).headline for weights in ingredients]
        return soup, reached, self.validate(soup.weights, len(soup.kept) > 1, self.reporting)

    def validate(self, weights: StateDict, mixed: bool, images: ValidationLoader) -> AnyReport:
        """Validate ``weights`` on ``images``.

        ``mixed``: whether the weights are a mean, for which batch-norm statistics are computed first: over samples of
        the last epoch, whose images have their final size and, with --mixup-off-epoch, are not mixed.
        """
        from utils.checkpoint.checkpoint import load_weights
        from utils.optim.batch_norm_statistics import recompute

        load_weights(self.model, weights, "--checkpoints")
        if mixed:
            recompute(
                self.model,
                self.components.train_loader,
                self.args.optimisation.epochs - 1,
                self.args.average.ema_bn_batches,
                self.distributed,
                self.traval.autocast,
                lambda: None,
            )
        self.traval.validation_loader = images
        report = self.traval.validation(0, report=False)
        what = "a mean" if mixed else "an ingredient"
        print(f"validated {what}: {report.HEADLINE} {report.headline:.2f}", file=sys.stderr, flush=True)
        return report


def show(own: argparse.Namespace, soup: Soup, kitchen: Kitchen, reached: list[float], report: AnyReport) -> str:
    """Table of the results as text, with notes on the images that were used.

    ``reached`` and ``report``: the ingredients' metrics and the soup's validation, from ``Kitchen.cook``.
    """
    half = own.choose_on == "half"
    name = report.HEADLINE
    rows = [["ingredient", f"{name} to choose by", name, ""]]
    for place, (path, score, value) in enumerate(zip(own.checkpoints, soup.scores, reached, strict=True)):
        rows.append([path, f"{score:.2f}", f"{value:.2f}", "kept" if place in soup.kept else "-"])
    rows.append([f"{own.method} soup of {len(soup.kept)}", "", f"{report.headline:.2f}", ""])
    if not half:  # both columns are about the same images
        rows = [[name, *rest] for name, _, *rest in rows]
    lines = [table(rows[0], rows[1:]), *statistics(soup, kitchen)]
    if half:
        lines.append(
            f"Chosen on {kitchen.choosing.num_images:,} validation images, reported on the other {report.count:,}"
        )
    elif own.method == "greedy":
        lines.append(
            f"The soup is chosen on the images that its {name} is of, which favours it; --choose-on half does not"
        )
    return "\n".join(lines)


def statistics(soup: Soup, kitchen: Kitchen) -> list[str]:
    """Line about the origin of the soup's batch-norm statistics, if it has any."""
    from utils.optim.batch_norm_statistics import layers_with_statistics

    batches = kitchen.args.average.ema_bn_batches
    if len(soup.kept) < 2 or not layers_with_statistics(kitchen.model):
        return []
    if not batches:
        return ["warning: --ema-bn-batches 0: the mean of batch-norm statistics does not fit the mean of the weights"]
    count = min(batches, kitchen.components.steps_per_epoch)
    return [f"Batch-norm statistics of the soup: computed over {count} training batch{'es' * (count > 1)}"]


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
