"""Settings of where a run goes and how it begins and ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from utils.config.field import LARGEST_INT, Needs, between, group, safe_name, setting, training_setting

ACCELERATORS = ("cuda", "mps", "xpu")  # NVIDIA and AMD, Apple, Intel
DEVICES = ("auto", "cpu", *ACCELERATORS)
_NEW_FOLDER = Needs("a new run: a continued one stays in its folder", lambda v: not v.continues or v.resume == "auto")
_WATCHES = Needs("--early-stopping or --lr-policy plateau")


@group(affects_result=False)
@dataclass(frozen=True)
class RunSettings:
    """Folder, beginning and end of a run."""

    config: str | None = setting(
        "recipe to read: a name under configs/ or a path",
        metavar="NAME_OR_PATH",
        in_recipe=False,
        synonyms="c",
        example="digits/fc",
    )
    plugin: tuple[str, ...] | None = setting(
        "files of your own that add networks, losses, data sets and more (docs/plugins.md); in a recipe relative to it",
        metavar="FILE",
        verbatim=True,
        inherited=False,
        synonyms="user-dir custom-module",
        example="examples/plugin.py",
    )
    output: str = training_setting(
        "folder that holds all runs",
        default="runs",
        metavar="DIR",
        in_recipe=False,
        effect=_NEW_FOLDER,
        synonyms="output-dir out-dir save-dir work-dir log-dir logdir default-root-dir out project runs-dir",
        example="D",
    )
    name: str | None = training_setting(
        "text appended to the run folder's name; --resume auto looks for a run with the same",
        check=safe_name,
        metavar="TEXT",
        effect=_NEW_FOLDER,
        synonyms="experiment run-name exp-name",
        example="a",
    )
    seed: int = training_setting(
        "seed of initialisation, sample order and augmentation",
        default=0,
        check=between(0, LARGEST_INT),
        synonyms="manual-seed random-seed seed-everything",
        affects_result=True,
        shapes="samples",
    )
    deterministic: bool = setting(
        "use only deterministic algorithms: the same bits each time; may be slower on a GPU",
        default=False,
        synonyms="use-deterministic-algorithms",
        inherited=False,
    )
    device: str = setting(
        "device to compute on", default="auto", choices=DEVICES, synonyms="accelerator", inherited=False
    )
    gpu_ids: tuple[int, ...] | None = setting(
        "GPUs that this machine's processes use, one each",
        check=between(0, 1023),
        metavar="ID",
        in_recipe=False,
        synonyms="gpu gpus",
        example="0",
    )
    resume: str | None = setting(
        "continue a run: auto (the newest with these settings), a checkpoint file or a run folder",
        metavar="{auto,PATH}",
        in_recipe=False,
        synonyms="ckpt-path resume-from-checkpoint",
        example="auto",
    )
    resume_override: bool = setting(
        "with --resume PATH: continue even if settings or data differ from the run's",
        default=False,
        in_recipe=False,
        within="--resume R",
    )
    evaluate: bool = setting(
        "validate only; needs --resume PATH, --weights or --pretrained",
        default=False,
        short="-e",
        in_recipe=False,
        synonyms="eval test-only validate",
        within="--pretrained",
    )
    dry_run: bool = setting("print the plan and train nothing", default=False, in_recipe=False)
    max_steps: int | None = training_setting(
        "stop after this many optimizer steps in total (the learning rate still plans for --epochs)",
        in_recipe=False,
        example="3",
    )
    val_every_epochs: int = training_setting(
        "epochs between two validations; the last epoch is always validated, and each that --early-stopping may end",
        default=1,
        synonyms="val-interval check-val-every-n-epoch eval-freq eval-interval validate-every",
        affects_result=True,
    )
    best_metric: str = training_setting(
        "validation metric that chooses best.pt: top1, top5, loss or another val_ column of metrics.csv; with several "
        "labels an image map by default",
        default="top1",
        synonyms="eval-metric metric-for-best-model",
        affects_result=True,
        shapes="stopping",
        several_labels="map",
        example="loss",
    )
    early_stopping: int | None = training_setting(
        "finish the run after this many epochs without improvement",
        metavar="PATIENCE",
        synonyms="patience early-stopping-patience",
        affects_result=True,
        example="3",
    )
    early_stopping_metric: str | None = training_setting(
        "validation metric that has to improve for --early-stopping and --lr-policy plateau [that of --best-metric]",
        effect=_WATCHES,
        affects_result=True,
        shapes="stopping",
        example="loss",
        within="--early-stopping 1",
    )
    early_stopping_delta: float = training_setting(
        "an improvement of --early-stopping-metric counts if it is larger than this, in its own unit: percent for top1",
        default=0.0,
        effect=_WATCHES,
        affects_result=True,
        example="50",
    )
    timeout: float = setting(
        "seconds to wait for a silent process before all end",
        default=600.0,
        check=between(1, 10**6),
        effect=Needs("several processes", lambda v: v.processes > 1),
        inherited=False,
    )

    @staticmethod
    def contradictions(v: Any) -> Iterator[str]:
        if v.has(v.gpu_ids and v.device == "cpu"):
            yield "--gpu-ids contradicts --device cpu"
        if v.has(v.gpu_ids and len(set(v.gpu_ids)) < len(v.gpu_ids)):
            yield "--gpu-ids names a GPU twice"
        if v.has(v.evaluate and not (v.resume or v.weights or v.pretrained)):
            yield "--evaluate needs weights: --resume PATH, --weights PATH or --pretrained"
        if v.has(v.evaluate and v.resume == "auto"):
            yield "--evaluate needs a path: --resume auto continues training"
        # auto may begin a run, with these
        if v.has(v.resume not in (None, "auto") and v.weights and v.is_explicit("weights")):
            yield "--resume PATH brings its own weights; remove --weights"
        if v.has(v.resume_override and v.resume == "auto"):
            yield (
                "--resume-override contradicts --resume auto, which looks for a run with equal settings; give its path"
            )
        if v.has(v.resume_override and not v.resume):
            yield "--resume-override needs --resume PATH, the run to go on with"
        if v.has(v.resume_override and v.evaluate):
            yield "--resume-override is for training; remove it or --evaluate"
