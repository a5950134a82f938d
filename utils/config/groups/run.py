"""Settings of where a run goes and how it begins and ends."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import (
    LARGEST_INT,
    between,
    needs,
    not_empty,
    not_negative,
    positive_int,
    safe_name,
    setting,
)

_NEW_FOLDER = needs("a new run: a continued one stays in its folder", lambda v: not v.continues or v.resume == "auto")
_STOPS = needs("--early-stopping", lambda v: v.early_stopping is not None)


@dataclass(frozen=True)
class RunSettings:
    """Where a run goes and how it begins and ends."""

    config: str | None = setting(
        None,
        "recipe to read: a name under configs/ or a path",
        type=str,
        check=not_empty,
        metavar="NAME_OR_PATH",
        affects_result=False,
        in_recipe=False,
        synonyms="c",
    )
    output: str = setting(
        "runs",
        "folder that holds all runs",
        check=not_empty,
        metavar="DIR",
        affects_result=False,
        in_recipe=False,
        in_evaluation=False,
        effect=_NEW_FOLDER,
        synonyms="output-dir out-dir save-dir work-dir log-dir logdir default-root-dir out project",
    )
    name: str | None = setting(
        None,
        "text appended to the run folder's name",
        type=str,
        check=safe_name,
        metavar="TEXT",
        affects_result=False,
        in_evaluation=False,
        effect=_NEW_FOLDER,
        synonyms="experiment run-name exp-name",
    )
    seed: int = setting(
        0,
        "seed of initialisation, sample order and augmentation",
        check=between(0, LARGEST_INT),
        in_evaluation=False,
        synonyms="manual-seed random-seed seed-everything",
    )
    deterministic: bool = setting(
        False,
        "use only deterministic algorithms: the same bits each time, slower on a GPU",
        affects_result=False,
        synonyms="use-deterministic-algorithms",
    )
    device: str = setting(
        "auto", "device to compute on", choices=("auto", "cpu", "cuda"), affects_result=False, synonyms="accelerator"
    )
    gpu_ids: tuple[int, ...] | None = setting(
        None,
        "GPUs that this machine's processes use, one each",
        type=int,
        many=True,
        check=between(0, 1023),
        metavar="ID",
        affects_result=False,
        in_recipe=False,
        synonyms="gpu gpus",
    )
    resume: str | None = setting(
        None,
        "continue a run: auto (the newest with these settings), a checkpoint file or a run folder",
        type=str,
        check=not_empty,
        metavar="{auto,PATH}",
        affects_result=False,
        in_recipe=False,
        synonyms="ckpt-path resume-from-checkpoint",
    )
    resume_override: bool = setting(
        False,
        "with --resume PATH: continue even if settings or data differ from the run's",
        affects_result=False,
        in_recipe=False,
    )
    evaluate: bool = setting(
        False,
        "validate only; needs --resume PATH, --weights or --pretrained",
        short="-e",
        affects_result=False,
        in_recipe=False,
        synonyms="eval test-only validate",
    )
    dry_run: bool = setting(False, "print the plan and create nothing", affects_result=False, in_recipe=False)
    max_steps: int | None = setting(
        None,
        "stop after this many optimizer steps in total (the learning rate still plans for --epochs)",
        type=int,
        check=positive_int,
        affects_result=False,
        in_recipe=False,
        in_evaluation=False,
    )
    val_every_epochs: int = setting(
        1,
        "epochs between two validations; the last epoch is always validated",
        check=positive_int,
        in_evaluation=False,
        synonyms="val-interval check-val-every-n-epoch eval-freq eval-interval validate-every",
    )
    best_metric: str = setting(
        "top1",
        "validation figure that chooses best.pt: top1, top5, loss or another val_ column of metrics.csv",
        check=not_empty,
        metavar="NAME",
        in_evaluation=False,
        synonyms="eval-metric metric-for-best-model",
    )
    early_stopping: int | None = setting(
        None,
        "finish the run after this many epochs without improvement",
        type=int,
        check=positive_int,
        metavar="PATIENCE",
        in_evaluation=False,
        synonyms="patience early-stopping-patience",
    )
    early_stopping_metric: str | None = setting(
        None,
        "validation figure that has to improve [that of --best-metric]",
        type=str,
        check=not_empty,
        metavar="NAME",
        in_evaluation=False,
        effect=_STOPS,
    )
    early_stopping_delta: float = setting(
        0.0,
        "smallest change in it that counts as an improvement, in its own unit: percent for top1",
        check=not_negative,
        in_evaluation=False,
        effect=_STOPS,
    )
    timeout: float = setting(
        600.0,
        "seconds to wait for a silent process before all end",
        check=between(1, 10**6),
        affects_result=False,
        effect=needs("several processes", lambda v: v.processes > 1),
    )
