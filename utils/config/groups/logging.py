"""Settings of logging and saving."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import group, setting

TRACKERS = ("csv", "mlflow", "wandb")


@group(affects_result=False, in_evaluation=False)
@dataclass(frozen=True)
class LoggingSettings:
    """Logging and saving."""

    print_freq: int = setting(
        50,
        "optimizer steps between two log lines and TensorBoard points",
        synonyms="p log-interval log-every-n-steps log-freq logging-steps",
    )
    progress: bool = setting(
        True, "progress bars on a terminal", synonyms="enable-progress-bar", in_evaluation=True, inherited=False
    )
    picture_epochs: int | str = setting(
        "last",
        "epochs between two sets of validation pictures in TensorBoard: confusion matrix, worst mistakes, "
        "precision-recall curves, features of up to 1,000 images in the projector; last: after the last epoch alone, "
        "off: never",
        words=("last", "off"),
        metavar="{N,last,off}",
        example="2",
    )
    track: tuple[str, ...] | None = setting(
        None,
        "trackers that mirror the run's scalars and settings (docs/trackers.md); none ends what a run began with",
        choices=TRACKERS,
        metavar="TRACKER",
        synonyms="report-to logger loggers trackers",
        example="csv",
    )
    save_every_epochs: int = setting(
        1, "epochs between two checkpoints", synonyms="every-n-epochs save-freq save-period"
    )
    save_every_steps: int | None = setting(
        None,
        "optimizer steps between two checkpoints within an epoch",
        synonyms="recovery-interval every-n-train-steps save-steps",
        example="5",
    )
