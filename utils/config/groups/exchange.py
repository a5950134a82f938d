"""Settings of what several processes exchange while they train."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import Needs, between, group, setting

_SEVERAL = Needs("several processes", lambda v: v.processes > 1)


@group(in_evaluation=False)
@dataclass(frozen=True)
class ExchangeSettings:
    """Exchange of gradients between processes."""

    grad_compression: str = setting(
        "dtype in which gradients cross the network: bf16 halves the bytes, and rounds them and their sums to 8 "
        "significant bits",
        default="off",
        choices=("off", "bf16"),
        effect=_SEVERAL,
        synonyms="gradient-compression comm-hook ddp-comm-hook",
        unsharded="is for whole gradients",
        plan="gradients in {}",
    )
    bucket_mb: int | None = setting(
        "size in MiB of the buckets in which gradients are exchanged during the backward pass [25, the first 1, as "
        "torch does]",
        check=between(1, 2**14),
        affects_result=False,
        effect=_SEVERAL,
        synonyms="bucket-cap-mb bucket-size ddp-bucket-cap-mb",
        unsharded="cuts whole gradients into pieces",
        plan="gradients in pieces of {} MiB",
        example="5",
    )
