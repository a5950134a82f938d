"""Settings of what several processes exchange while they train."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import between, needs, setting

_SEVERAL = needs("several processes", lambda v: v.processes > 1)


@dataclass(frozen=True)
class ExchangeSettings:
    """How several processes exchange gradients."""

    grad_compression: str = setting(
        "off",
        "number format in which gradients cross the network: bf16 halves the bytes, and rounds them and their "
        "sums to 8 significant bits",
        choices=("off", "bf16"),
        in_evaluation=False,
        effect=_SEVERAL,
        synonyms="gradient-compression comm-hook ddp-comm-hook",
    )
    bucket_mb: int | None = setting(
        None,
        "size of the pieces, in MiB, in which gradients are exchanged during the backward pass [25, the first 1, "
        "as torch does]",
        type=int,
        check=between(1, 2**14),
        affects_result=False,
        in_evaluation=False,
        effect=_SEVERAL,
        synonyms="bucket-cap-mb bucket-size ddp-bucket-cap-mb",
    )
