"""Settings of the dtype to compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.field import LARGEST_INT, MEASURED, Needs, between, group, setting, training_setting

_SCALER = Needs("--amp fp16", lambda v: v.precision == "fp16")


def _reaches_layers(v: Any) -> str | None:
    names = " and ".join(v.never_called)
    return f"does nothing for {names}, which the network never calls; name the layers within" if names else None


@group()
@dataclass(frozen=True)
class PrecisionSettings:
    """The dtype to compute in."""

    amp: str | None = setting(
        "automatic mixed precision; auto: fp16 on a GPU, on a CPU bf16 where that is measured to be faster [fp16 on "
        "a GPU, off on a CPU]",
        choices=("off", "fp16", "bf16", MEASURED),
        synonyms="amp-dtype precision mixed-precision",
        shapes="validation",
        example="bf16",
    )
    tf32: bool | None = setting(
        "TF32, float32 with 11 significant bits, for convolutions and matrix products on a GPU [as torch does]",
        effect=Needs("a GPU", lambda v: v.on_gpu or not v.tf32),
        shapes="validation",
    )
    init_scale: float = training_setting(
        "initial loss scale (fp16)",
        default=65536.0,
        check=between(2.0**-24, 2.0**100),
        effect=_SCALER,
        synonyms="loss-scale",
        example="2",
        within="--amp fp16",
    )
    max_skipped_steps: int = training_setting(
        "stop after more than this many skipped steps in a row (fp16)",
        default=20,
        check=between(0, LARGEST_INT),
        affects_result=False,
        effect=_SCALER,
        within="--amp fp16",
    )
    fp32_layers: tuple[str, ...] | None = setting(
        "layers to compute in float32, by name (scripts/amp_audit.py finds them)",
        effect=(Needs("--amp fp16 or bf16", lambda v: v.precision != "off"), _reaches_layers),
        unsharded="mixes formats within a block, whose weights arrive in one",
        shapes="validation",
        example="features",
        within="--amp bf16",
    )
    dump_bad_batch: bool = training_setting(
        "save batch and weights of steps with a non-finite gradient, at most 10 files, for scripts/amp_audit.py "
        "--batch",
        default=False,
        affects_result=False,
        unsharded="saves whole weights from each process",
    )
