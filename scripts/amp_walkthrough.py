"""Show a mixed-precision training step, stage by stage, in fp32, fp16 and bf16, and whether the updates agree.

    python scripts/amp_walkthrough.py                             # one layer, small enough to follow by hand
    python scripts/amp_walkthrough.py --init-scale 65536          # the same with a loss scale that is too large
    python scripts/amp_walkthrough.py --arch resnet18 --dataname cifar10 --datapath DATA --batch-size 8
    python scripts/amp_walkthrough.py --resume runs/digits/conv2/TIME_SETTINGS

Exit code 0 if the updates agree, 1 if one does not, 2 after a mistake on the command line.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, table
from scripts.common.trained import build_trained, settings_and_point
from utils.config.field import FLAG, RECIPE
from utils.config.settings import Settings, all_settings
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    import torch

    from scripts.audit.walkthrough import Agreement, Step
    from utils.checkpoint.resume import ResumePoint
    from utils.runtime.distributed import Distributed

NAME = "amp_walkthrough.py"
DESCRIPTION = (
    "A mixed-precision training step of a single layer, stage by stage, in fp32, fp16 and bf16, on the --device. "
    "With --arch, --dataname, --resume or any other training flag about data, network or optimisation: a real "
    "network on its first training batch. --init-scale is fp16's loss scale: 4096 for the single layer, otherwise "
    "training's, halved as in training while steps are skipped unless the flag is given."
)
LAYER_LEGEND = """
2  autocast rounds input, weight and bias to half precision to compute; parameters stay float32
3  numbers below 3e-8 are zero in fp16, so gradients are lifted; bf16 reaches as far as float32
4  computed in half precision, then kept in the parameters' dtype
5  divided by the scale in float32: what clips, measures or uses the gradient gets the true one
6  the scaler leaves the step out when a gradient value is infinite or nan"""
NETWORK_LEGEND = """
Nudged fp32: every weight and pixel is off by up to twice the format's roundoff, all else is exact.
It shows how much rounding moves this network on this batch, and so how far off sound half precision
may be: tolerance = 2 x nudged + 2 x roundoff x sqrt(layers in half precision), at most 50 %."""


def main(argv: list[str]) -> int:
    _, flags = ToolParser(NAME, DESCRIPTION, training_flags=True).parse_known_args(argv)
    args, resume_point = settings_and_point(flags)
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), args.run) as distributed:
        if resume_point is not None or is_about_network(args):
            return of_network(args, distributed, resume_point)
        return of_layer(args, distributed)


def is_about_network(args: Settings) -> bool:
    """True if a flag or recipe sets something that the single layer does not have."""
    explicit = {name for name, origin in args.origins.items() if origin in (FLAG, RECIPE)}
    groups = {group for group, option in all_settings() if option.name in explicit}
    return bool(groups - {"run", "precision", "logging"}) or "fp32_layers" in explicit


# --------------------------------------------------------------------------------- the single layer


def of_layer(args: Settings, distributed: Distributed) -> int:
    """Show the step of the single layer, with every number; return the exit code."""
    from scripts.audit import walkthrough

    scale = args.precision.init_scale if args.origins["init_scale"] == FLAG else walkthrough.LAYER_SCALE
    images, first, steps = walkthrough.single_layer(distributed.device, scale)
    print(f"One layer, Linear(1, 1), on {distributed.device.type}. SGD with learning rate 1; the output is the loss.")
    print(f"Weight, bias and input are random, seed 47. The input is {walkthrough.number(images)} in both steps.")
    print(f"\nStep 1, in float32\n\n{table(['', first.name], layer_rows([first]))}")
    titles = [f"{step.name} (scale {step.scale:g})" if step.scale != 1 else step.name for step in steps]
    print(f"\nStep 2, from these parameters in each precision\n\n{table(['', *titles], layer_rows(steps))}")
    print(LAYER_LEGEND)
    return print_verdict([walkthrough.Agreement(step, steps[0]) for step in steps[1:]], distributed)


def layer_rows(steps: Sequence[Step]) -> list[list[str]]:
    """Table rows of the layer's step, by stage; a column for each of ``steps``, the first of which is in float32."""
    from scripts.audit.walkthrough import number, percent, relative_error

    def row(stage: str, what: str, value: Callable[[Step], str]) -> list[str]:
        return [f"{stage:22} {what}", *map(value, steps)]

    rows = [
        row("1 parameters before", "weight", lambda s: number(s.before["weight"])),
        row("", "bias", lambda s: number(s.before["bias"])),
        row("", "dtype", lambda s: dtypes(s.before.values())),
        row("2 forward, autocast", "output = loss", lambda s: number(s.output)),
        row("", "dtype", lambda s: dtypes([s.output])),
        row("3 loss times scale", "scaled loss", lambda s: number(s.scaled_loss)),
        row("4 backward", "scaled gradient of weight", lambda s: number(s.scaled["weight"])),
        row("", "scaled gradient of bias", lambda s: number(s.scaled["bias"])),
        row("", "dtype", lambda s: dtypes(s.scaled.values())),
        row("5 unscale", "gradient of weight", lambda s: number(s.unscaled["weight"])),
        row("", "gradient of bias", lambda s: number(s.unscaled["bias"])),
        row("6 optimizer step", "", lambda s: "skipped" if s.skipped else "taken"),
        row("7 parameters after", "weight", lambda s: number(s.after["weight"])),
        row("", "bias", lambda s: number(s.after["bias"])),
    ]
    if len(steps) > 1:
        rows.append(row("", "update off from fp32", lambda s: percent(relative_error(s.update, steps[0].update))))
    return rows


# ----------------------------------------------------------------------------------- a real network


def of_network(args: Settings, distributed: Distributed, resume_point: ResumePoint | None) -> int:
    """Show the step of a real network on the first batch of its training; return the exit code."""
    from scripts.audit import walkthrough
    from utils.loop.forward import forward

    components, weights = build_trained(args, distributed, resume_point)
    dropped = without_dropout(components.model)
    batch = next(components.train_loader.batches(0))

    def weighted_forward(model: torch.nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distributed.seed(args.run.seed)
        given = dataclasses.replace(batch, images=images)
        outputs = forward(model, given, components.criterion, nullcontext())  # Start.step is already within autocast
        return outputs.logits, outputs.loss * batch.weight

    start = walkthrough.Start(
        components.model, batch.images, weighted_forward, args.optimisation.lr, distributed.device
    )
    with walkthrough.true_float32():
        reference, agreements = walkthrough.network(start, args.precision, halve=args.origins["init_scale"] != FLAG)
    shape = "x".join(map(str, batch.images.shape))
    print(f"{args.model.arch} on {args.data.dataname}, on {distributed.device.type}; {weights}")
    print(f"One step on the first training batch ({shape}), from the same weights in each precision.")
    print(f"Plain SGD, learning rate {start.lr:g}, no momentum, decay or clipping: an update is -rate x gradient.")
    if dropped:
        print("Dropout is off: on a GPU a seed's masks depend on the dtype.")
    titles = ["", reference.name, *(a.step.name for a in agreements)]
    print(f"\n{table(titles, network_rows(reference, agreements))}")
    print(NETWORK_LEGEND)
    return print_verdict(agreements, distributed)


def without_dropout(model: torch.nn.Module) -> int:
    """Switch off torch's, timm's and torchvision's dropout and stochastic depth; return how many were on."""
    on = [
        (module, name)
        for module in model.modules()
        for name in ("p", "prob", "drop_prob", "drop_rate")
        if ("Drop" in type(module).__name__ or type(module).__name__ == "StochasticDepth" or name == "drop_rate")
        and getattr(module, name, 0)
    ]
    for module, name in on:
        setattr(module, name, 0.0)
    return len(on)


def network_rows(reference: Step, agreements: Sequence[Agreement]) -> list[list[str]]:
    """Table rows of a network's step, by stage; a column for ``reference`` and each of ``agreements``."""
    from scripts.audit.walkthrough import norm, number, percent, underflow

    values = sum(gradient.numel() for gradient in reference.scaled.values())

    def row(stage: str, what: str, value: Callable[[Step], str]) -> list[str]:
        return [f"{stage:20} {what}", value(reference), *(value(a.step) for a in agreements)]

    def against(what: str, value: Callable[[Agreement], str]) -> list[str]:
        return [f"{'':20} {what}", "", *map(value, agreements)]

    return [
        row("1 parameters before", "dtype", lambda s: dtypes(s.before.values())),
        row("2 forward, autocast", "layers in half precision", lambda s: str(s.half_layers)),
        row("", "dtype of the output", lambda s: dtypes([s.output])),
        row("", "loss", lambda s: number(s.loss)),
        row("", "dtype of the loss", lambda s: dtypes([s.loss])),
        row("3 loss times scale", "scale", lambda s: number(s.scale)),
        row("", "skipped, so halved", lambda s: f"{len(s.too_large)} times" if s.too_large else "-"),
        row("4 backward", "norm of the scaled gradient", lambda s: number(norm(s.scaled))),
        row("", f"not finite of {values:,} values", lambda s: f"{s.non_finite:,}"),
        row("5 unscale", "norm of the gradient", lambda s: number(norm(s.unscaled))),
        against("zero where fp32's is not", lambda a: percent(underflow(a.step, reference))),
        row("6 optimizer step", "", lambda s: "skipped" if s.skipped else "taken"),
        row("", "norm of the update", lambda s: number(norm(s.update))),
        against("update off from fp32", lambda a: percent(a.error)),
        against("update of nudged fp32 off", lambda a: percent(a.nudged)),
    ]


# ---------------------------------------------------------------------------------------- the verdict


def dtypes(tensors: Sequence[torch.Tensor]) -> str:
    """Distinct dtypes of the tensors, as text."""
    return ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))


def print_verdict(agreements: Sequence[Agreement], distributed: Distributed) -> int:
    """Print a line for each precision, then whether all agree with fp32; return the exit code."""
    from scripts.audit.walkthrough import formats

    print("", *(a.line() for a in agreements), *formats(distributed.device)[1], sep="\n")
    wrong = [a.step.name for a in agreements if not a.agrees]
    names = wrong or [a.step.name for a in agreements]
    verb = ("disagree" if wrong else "agree") + ("s" if len(names) == 1 else "")
    print(f"verdict: {' and '.join(names)} {verb} with fp32")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
