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
        "optimizer steps between two log lines and TensorBoard points; an epoch's end has a point, too",
        default=50,
        synonyms="p log-interval log-every-n-steps log-freq logging-steps",
    )
    progress: bool = setting(
        "progress bars on a terminal", default=True, synonyms="enable-progress-bar", in_evaluation=True, inherited=False
    )
    picture_epochs: int | str = setting(
        "epochs between two sets of validation pictures in TensorBoard: confusion matrix, worst mistakes, "
        "precision-recall curves, features of up to 1,000 images in the projector; last: after the last epoch alone, "
        "off: never",
        default="last",
        words=("last", "off"),
        metavar="{N,last,off}",
        example="2",
    )
    track: tuple[str, ...] | None = setting(
        "trackers that mirror the run's scalars and settings (docs/trackers.md); none ends what a run began with",
        choices=TRACKERS,
        metavar="TRACKER",
        synonyms="report-to logger loggers trackers",
        example="csv",
    )
    save_every_epochs: int = setting(
        "epochs between two checkpoints", default=1, synonyms="every-n-epochs save-freq save-period"
    )
    save_every_steps: int | None = setting(
        "optimizer steps between two checkpoints within an epoch",
        synonyms="recovery-interval every-n-train-steps save-steps",
        example="5",
    )
