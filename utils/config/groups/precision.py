"""Settings of the number format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.field import LARGEST_INT, MEASURED, between, needs, not_empty, setting

_SCALER = needs("--amp fp16", lambda v: v.precision == "fp16")


def _reaches_layers(v: Any) -> str | None:
    if v.precision == "off":
        return "does nothing: it needs --amp fp16 or bf16"
    names = " and ".join(v.never_called)
    return f"does nothing for {names}, which the network never calls; name the layers within" if names else None


@dataclass(frozen=True)
class PrecisionSettings:
    """The number format to compute in."""

    amp: str | None = setting(
        None,
        "automatic mixed precision; auto: fp16 on a GPU, on a CPU bf16 where that is measured to be faster "
        "[fp16 on a GPU, off on a CPU]",
        type=str,
        choices=("off", "fp16", "bf16", MEASURED),
        synonyms="amp-dtype precision mixed-precision",
    )
    tf32: bool | None = setting(
        None,
        "TF32, float32 with 10 significant bits, for convolutions and matrix products on a GPU [as torch does]",
        type=bool,
        effect=needs("a GPU", lambda v: v.on_gpu or not v.tf32),
    )
    init_scale: float = setting(
        65536.0,
        "initial loss scale (fp16)",
        check=between(2.0**-24, 2.0**100),
        in_evaluation=False,
        effect=_SCALER,
        synonyms="loss-scale",
    )
    max_skipped_steps: int = setting(
        20,
        "stop after more than this many skipped steps in a row (fp16)",
        check=between(0, LARGEST_INT),
        affects_result=False,
        in_evaluation=False,
        effect=_SCALER,
    )
    fp32_layers: tuple[str, ...] | None = setting(
        None,
        "layers to compute in float32, by name (scripts/amp_audit.py finds them)",
        type=str,
        many=True,
        metavar="NAME",
        check=lambda names: next(filter(None, map(not_empty, names)), None),
        effect=_reaches_layers,
    )
    dump_bad_batch: bool = setting(
        False,
        "save batch and weights of steps with a non-finite gradient, at most 10 files, for scripts/amp_audit.py "
        "--batch",
        affects_result=False,
        in_evaluation=False,
    )
