"""Is a network safe in fp16 and bf16? Layer by layer, over a few of its training batches.

    python scripts/amp_audit.py                                             # the digits' network
    python scripts/amp_audit.py --arch resnet18 --dataname cifar10 --datapath DATA --batch-size 8
    python scripts/amp_audit.py --batch RUN/bad_batches/step00000012_rank0.pt   # saved by main.py --dump-bad-batch

Prints the worst layers, findings and a recommendation that it has tried; writes amp_audit.json to --output.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, make_folder, refuse, run_tool, whole
from scripts.common.output import write_text
from scripts.common.trained import build_trained, settings_and_point
from utils.config import arguments
from utils.config.field import FLAG, RECIPE
from utils.config.settings import Settings, UserError, flag_of
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    import torch

    from scripts.audit.findings import Audit
    from scripts.audit.record import Runner
    from utils.checkpoint.resume import ResumePoint
    from utils.runtime.distributed import Distributed

NAME = "amp_audit.py"
BATCHES = 3
TOP = 10


def main(argv: list[str]) -> int:
    own, others = build_parser().parse_known_args(argv)
    args, source = from_saved_step(own, others) if own.batch is not None else settings_and_point(others)
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), args.run) as distributed:
        from scripts.audit import report

        audit = (saved_step if own.batch is not None else first_batches)(own, args, source, distributed)
        folder = make_folder(own.output or default_folder(own, args, source))
        print("\n".join(header(args, audit, distributed)), flush=True)
        audit.run()
    print(report.text(audit, own.top))
    save(argv, args, audit, folder, distributed.describe_device())
    return 1 if own.fail_on_findings and audit.faults else 0


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument("--batches", type=whole(1), metavar="N", help=f"forward passes to audit [{BATCHES}]")
    parser.add_argument("--batch", metavar="FILE", help="repeat and audit a step that main.py --dump-bad-batch saved")
    parser.add_argument("--top", type=whole(0), default=TOP, metavar="N", help=f"layers in the table [{TOP}]")
    parser.add_argument("--output", metavar="DIR", help="folder of the files [audits/DATANAME_ARCH]")
    parser.add_argument(
        "--fail-on-findings",
        action="store_true",
        help="exit code 1 if there is a finding that ordinary loss scaling does not fix",
    )
    return parser


def from_saved_step(own: argparse.Namespace, flags: list[str]) -> tuple[Settings, dict[str, Any]]:
    """Settings of the run that saved the step, except those that belong to a machine; and the content of its file."""
    from utils.checkpoint.resume import ResumePoint

    dump = load_dump(Path(own.batch))
    args = arguments.parse(flags, checkpoint=ResumePoint(Path(), dump, digest="").settings)
    given = {flag_of(name): is_explicit(args, name) for name in ("resume", "weights", "arch", "dataname")}
    clash = [flag for flag, value in (given | {"--batches": own.batches}).items() if value]
    refuse(f"{flag}: --batch brings its own network, weights and images; remove it" for flag in clash)
    return args, dump


def is_explicit(args: Settings, name: str) -> bool:
    """True if a flag or a recipe gives the setting ``name``."""
    return args.origins[name] in (FLAG, RECIPE)


def default_folder(own: argparse.Namespace, args: Settings, source: ResumePoint | dict[str, Any] | None) -> str:
    """Name of the folder for the files: one for fresh weights, and one for each run and for each saved batch."""
    parts = [args.data.dataname, args.model.arch.replace("/", "_")]
    if own.batch is not None:
        parts.append(Path(own.batch).stem)
    elif source is not None:
        parts.append(source.folder.name if source.folder is not None else source.path.stem)
    return f"audits/{'_'.join(parts)}"


# ---------------------------------------------------------------------------------- what is audited


def first_batches(
    own: argparse.Namespace, args: Settings, point: ResumePoint | None, distributed: Distributed
) -> Audit:
    """Prepare the audit of the network and the first training batches for these settings."""
    from scripts.audit.findings import Audit
    from scripts.audit.record import Runner

    if args.data.dataname not in ("digits", "synthetic") and not is_explicit(args, "loader"):
        # decoding all files for a few batches would take long
        args = args.with_values(loader="stream", workers=0)
    components, weights = build_trained(args, distributed, point)
    scale = args.precision.init_scale
    if point is not None:
        scale = point.state["scaler"].get("scale", scale)
    passes = [*itertools.islice(components.train_loader.batches(0), own.batches or BATCHES)]
    runner = Runner(components.model, passes, components.criterion, distributed.device, args.run.seed)
    return Audit(runner, scale, args.precision.fp32_layers or (), weights)


def load_dump(path: Path) -> dict[str, Any]:
    """Content of a file of ``--dump-bad-batch``. Raises ``UserError``."""
    from utils.checkpoint import checkpoint
    from utils.loop.non_finite_step import FORMAT, KEYS

    try:
        dump = checkpoint.load(path)
    except UserError as error:
        raise UserError(*(f"--batch {line}" for line in error.mistakes)) from error
    missing = [key for key in KEYS if key not in dump]
    if missing:
        raise UserError(f"--batch {path}: was not saved by main.py --dump-bad-batch (it lacks {', '.join(missing)})")
    if dump["format"] != FORMAT:
        raise UserError(f"--batch {path}: has format {dump['format']}, this version reads {FORMAT}")
    return dump


def saved_step(own: argparse.Namespace, args: Settings, dump: dict[str, Any], distributed: Distributed) -> Audit:
    """Prepare the audit of the saved step's network and batches, after repeating that step as it was."""
    from models import build_model
    from scripts.audit.findings import Audit
    from scripts.audit.record import Runner
    from utils.checkpoint import checkpoint
    from utils.config.image_size import size_of
    from utils.data.loaders import Batch
    from utils.optim.criterion import build_criterion
    from utils.optim.freezing import build_freezing
    from utils.precision.amp import keep_in_fp32

    device = distributed.device
    channels, *size = dump["image_shape"]
    settings = dataclasses.replace(args.model, arch=dump["arch"], pretrained=False, weights=None, init="default")
    model = build_model(settings, classes=len(dump["classes"]), channels=channels, image_size=size_of(*size)).to(device)
    checkpoint.load_weights(model, dump["model"], own.batch)
    build_freezing(args.model, model).set_epoch(dump["epoch"] - 1, model)
    kept = args.precision.fp32_layers or ()
    keep_in_fp32(model, kept, device)
    passes = []
    for saved in dump["passes"]:
        weights = saved.get("image_weights")  # older versions saved none
        weights = None if weights is None else weights.to(device)
        parts = (saved["images"].to(device), saved["targets"].to(device), saved["indices"].cpu().numpy())
        passes.append(Batch(*parts, 0, saved["weight"], image_weights=weights))
    criterion = build_criterion(args.loss, known=dump.get("known")).to(device)
    scale = dump["scale"] if dump["amp"] == "fp16" else args.precision.init_scale
    weights = f"weights as they were before step {dump['step']} (epoch {dump['epoch']}, rank {dump['rank']})"
    runner = Runner(model, passes, criterion, device, dump["seed"])
    remarks = reproduce(runner, dump, args.optimisation.grad_penalty)
    if args.loss.teacher:
        remarks.append(f"without the loss of the teacher {args.loss.teacher}, which a saved batch does not hold")
    if args.loss.class_weights:
        remarks.append("without --class-weights, which a saved batch does not hold")
    return Audit(runner, scale, kept, weights, remarks)


def reproduce(step: Runner, dump: dict[str, Any], penalty: float) -> list[str]:
    """Repeat the step in its own format and scale; return lines about where values are not finite."""
    import torch

    from utils.config.groups.precision import PrecisionSettings
    from utils.loop.forward import Outputs, forward
    from utils.precision.amp import autocast, build_scaler
    from utils.precision.diagnosis import SHOWN_LAYERS, examine

    model = copy.deepcopy(step.model).train()
    settings = PrecisionSettings(amp=dump["amp"], init_scale=dump["scale"])
    context = autocast(settings, step.device)
    scaler = build_scaler(settings, step.device)
    losses: list[float] = []

    def repeat(batch: Any) -> Outputs:
        outputs = forward(model, batch, step.criterion, context, penalty=penalty, scaler=scaler)
        losses.append(float(outputs.loss.detach()))
        return outputs

    def backward(batch: Any, loss: torch.Tensor) -> None:
        (loss * (batch.weight * dump["scale"])).backward()

    torch.manual_seed(dump["seed"])
    found = examine(model, step.passes, repeat, backward, dump["rank"])
    ran = f"loss {sum(losses) / len(losses):.6g}, scale {dump['scale']:.12g}, {dump['amp']}"
    if not found.layers:
        return [f"could not be reproduced: all values are finite here ({ran}); another process or device may differ"]
    lines = [f"reproduced: {found.layers.origin}, {ran}"]
    if first := found.layers.outputs or found.layers.gradients:
        lines.append(f"first layers: {', '.join(name or 'the network itself' for name in first[:SHOWN_LAYERS])}")
    if found.samples:
        lines.append(f"samples with such logits: {' '.join(map(str, found.samples))}")
    return lines


# ------------------------------------------------------------------------------------------- output


def header(args: Settings, audit: Audit, distributed: Distributed) -> list[str]:
    """Lines about what is audited, and on which device."""
    import torch

    passes = audit.runner.passes
    sizes = sorted({len(batch.images) for batch in passes})
    lines = [
        f"{args.model.arch} on {args.data.dataname}, on {distributed.describe_device()}, torch {torch.__version__}",
        f"{len(passes)} batch(es) of {' and '.join(map(str, sizes))} images "
        f"{'x'.join(map(str, passes[0].images.shape[1:]))}; {audit.weights}",
        *audit.remarks,
    ]
    if args.optimisation.grad_penalty:
        lines.append("The gradient penalty is left out from here on: audited is the loss itself.")
    return lines


def save(argv: Sequence[str], args: Settings, audit: Audit, folder: Path, device: str) -> None:
    """Write ``amp_audit.json`` into ``folder`` and print its path."""
    from scripts.audit.report import as_json
    from utils.record.summary import versions

    about = {
        "command": [NAME, *argv],
        "network": args.model.arch,
        "data": args.data.dataname,
        "device": device,
        "versions": versions(),
        "settings": args.values(),
    }
    write_text(folder / "amp_audit.json", json.dumps(as_json(audit, about), indent=1, allow_nan=False))
    print(f"File: {folder / 'amp_audit.json'}")


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
