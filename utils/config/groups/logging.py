"""Settings of logging and saving."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import positive_int, setting


@dataclass(frozen=True)
class LoggingSettings:
    """What is logged and saved, and how often."""

    print_freq: int = setting(
        50,
        "optimizer steps between two log lines and TensorBoard points",
        check=positive_int,
        affects_result=False,
        in_evaluation=False,
        synonyms="p log-interval log-every-n-steps log-freq logging-steps",
    )
    progress: bool = setting(True, "progress bars on a terminal", affects_result=False, synonyms="enable-progress-bar")
    picture_epochs: int | str = setting(
        "last",
        "epochs between two sets of pictures of the validation in TensorBoard: confusion matrix, worst "
        "mistakes, precision-recall curves, and the features of up to 1,000 images in the projector; last: after the "
        "last epoch alone, off: never",
        type=int,
        words=("last", "off"),
        check=positive_int,
        metavar="{N,last,off}",
        affects_result=False,
        in_evaluation=False,
    )
    save_every_epochs: int = setting(
        1,
        "epochs between two checkpoints",
        check=positive_int,
        affects_result=False,
        in_evaluation=False,
        synonyms="every-n-epochs save-freq save-period",
    )
    save_every_steps: int | None = setting(
        None,
        "optimizer steps between two checkpoints within an epoch",
        type=int,
        check=positive_int,
        affects_result=False,
        in_evaluation=False,
        synonyms="recovery-interval every-n-train-steps save-steps",
    )
