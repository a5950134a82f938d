"""Settings of logging and saving."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import positive_int, setting


@dataclass(frozen=True)
class LoggingSettings:
    """What is logged and saved, and how often."""

    print_freq: int = setting(
        50, "optimizer steps between two log lines and TensorBoard points", check=positive_int, affects_result=False,
        in_evaluation=False,
    )  # fmt: skip
    progress: bool = setting(True, "progress bars on a terminal", affects_result=False)
    save_every_epochs: int = setting(
        1, "epochs between two checkpoints", check=positive_int, affects_result=False, in_evaluation=False
    )
    save_every_steps: int | None = setting(
        None, "optimizer steps between two checkpoints within an epoch", type=int, check=positive_int,
        affects_result=False, in_evaluation=False,
    )  # fmt: skip
