"""All settings: one frozen dataclass a group, with default, help and check beside each field.

Flags, recipe keys, ``--help`` and the saved ``config.yaml`` all come from these fields (see
``utils/config/arguments.py``): to add a setting, add a field here. This module imports nothing heavy,
so that ``--help`` and mistakes on the command line answer at once.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from utils.config.datasets import LARGE_IMAGES_ARCH, SMALL_IMAGES_ARCH, SPECS
from utils.config.field import (
    LARGEST_INT,
    between,
    needs,
    not_empty,
    not_negative,
    positive,
    positive_int,
    safe_name,
    setting,
)

AUGMENTATIONS = ("shift", "flip", "alternating-flip", "resized-crop")
CROP_MODES = ("center", "squash", "border")
INTERPOLATIONS = ("bilinear", "bicubic")
INITIALISATIONS = ("default", "kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform")
LOSSES = ("cross-entropy", "bce")
LR_POLICIES = ("constant", "multistep", "cosine", "gaussian")

_LARGE_SETS = ", ".join(name for name, spec in SPECS.items() if spec.default_arch == LARGE_IMAGES_ARCH)

# What several settings need before they have an effect.
_NEW_FOLDER = needs("a new run: a continued one stays in its folder", lambda v: not v.continues or v.resume == "auto")
_SHIFT = needs("shift in --augment", lambda v: "shift" in v.augmentation)
_SCALER = needs("--amp fp16", lambda v: v.precision == "fp16")
_IMAGE_FILES = needs("images in files", lambda v: not v.in_memory)
_VALIDATION_BATCH = needs("training, or --val-batch-size left out", lambda v: not (v.evaluate and v.val_batch_size))


def _has_folder(v: Any) -> bool:
    return SPECS[v.dataname].needs_datapath or v.local_processes > 1  # which share their images there


def _reaches_milestones(v: Any) -> str | None:
    if v.lr_policy != "multistep":
        return f"does nothing: it needs --lr-policy multistep, not {v.lr_policy}"
    late = [f"{milestone:g}" for milestone in v.lr_milestones or () if milestone >= v.epochs]
    return f"does nothing at {' and '.join(late)}: --epochs {v.epochs} end before" if late else None


def _reaches_layers(v: Any) -> str | None:
    if v.precision == "off":
        return "does nothing: it needs --amp fp16 or bf16"
    names = " and ".join(v.never_called)
    return f"does nothing for {names}, which the network never calls; name the layers within" if names else None


class UserError(ValueError):
    """An error the user can fix; ``main.py`` prints it and ends with exit code 2.

    ``mistakes``: a line each, which says what is wrong, where, and what to do.
    """

    def __init__(self, *mistakes: str, on_all_ranks: bool = False) -> None:
        self.mistakes = list(mistakes)
        self.on_all_ranks = on_all_ranks  # then one process prints it
        super().__init__("\n".join(mistakes))


@dataclass(frozen=True)
class RunSettings:
    """Where a run goes and how it begins and ends."""

    config: str | None = setting(
        None, "recipe to read: a name under configs/ or a path", type=str, check=not_empty, metavar="NAME_OR_PATH",
        affects_result=False, in_recipe=False,
    )  # fmt: skip
    output: str = setting(
        "runs", "folder that holds all runs", check=not_empty, metavar="DIR", affects_result=False, in_recipe=False,
        in_evaluation=False, effect=_NEW_FOLDER,
    )  # fmt: skip
    name: str | None = setting(
        None, "text appended to the run folder's name", type=str, check=safe_name, metavar="TEXT", affects_result=False,
        in_evaluation=False, effect=_NEW_FOLDER,
    )  # fmt: skip
    seed: int = setting(
        0, "seed of initialisation, sample order and augmentation", check=between(0, LARGEST_INT), in_evaluation=False
    )
    deterministic: bool = setting(
        False, "use only deterministic algorithms: the same bits each time, slower on a GPU", affects_result=False
    )
    device: str = setting("auto", "device to compute on", choices=("auto", "cpu", "cuda"), affects_result=False)
    gpu_ids: tuple[int, ...] | None = setting(
        None, "GPUs that this machine's processes use, one each", type=int, many=True,
        check=between(0, 1023), metavar="ID", affects_result=False, in_recipe=False,
    )  # fmt: skip
    resume: str | None = setting(
        None, "continue a run: auto (the newest with these settings), a checkpoint file or a run folder",
        type=str, check=not_empty, metavar="{auto,PATH}", affects_result=False, in_recipe=False,
    )  # fmt: skip
    resume_override: bool = setting(
        False, "with --resume PATH: continue even if settings or data differ from the run's",
        affects_result=False, in_recipe=False,
    )  # fmt: skip
    evaluate: bool = setting(
        False, "validate only; needs --resume PATH, --weights or --pretrained", short="-e",
        affects_result=False, in_recipe=False,
    )  # fmt: skip
    dry_run: bool = setting(False, "print the plan and create nothing", affects_result=False, in_recipe=False)
    max_steps: int | None = setting(
        None, "stop after this many optimizer steps in total (the learning rate still plans for --epochs)",
        type=int, check=positive_int, affects_result=False, in_recipe=False, in_evaluation=False,
    )  # fmt: skip
    timeout: float = setting(
        600.0, "seconds to wait for a silent process before all end", check=between(1, 10**6),
        affects_result=False, effect=needs("several processes", lambda v: v.processes > 1),
    )  # fmt: skip


@dataclass(frozen=True)
class DataSettings:
    """Which images, in which batches."""

    dataname: str = setting("digits", "data set", choices=tuple(SPECS))
    datapath: str | None = setting(
        None, "folder that holds the data", type=str, check=not_empty, metavar="DIR", affects_result=False,
        effect=needs("a --dataname with files", _has_folder),
    )  # fmt: skip
    download: bool = setting(False, "download the data set through torchvision if it is missing", affects_result=False)
    val_split: float | None = setting(
        None, "fraction of a folder without val/ or test/ to validate on, for example 0.1", type=float,
        check=between(0, 1, open_low=True, open_high=True), metavar="SHARE",
    )  # fmt: skip
    image_size: int | None = setting(
        None, "height and width of the network's input in pixels [that of the weights or the data set]", type=int,
        check=between(1, 8192),
    )  # fmt: skip
    val_image_size: int | None = setting(None, "the same in validation [image size]", type=int, check=between(1, 8192))
    crop_pct: float | None = setting(
        None, "side of validation's center crop as a fraction of the resized image [that of the weights, otherwise "
        "0.875, or 1 if all images have one size]", type=float, check=between(0.01, 1), metavar="SHARE",
    )  # fmt: skip
    crop_mode: str | None = setting(
        None, "validation resizes the shorter side and crops (center), both sides (squash), or the longer side and "
        "pads (border) [that of the weights or center]", type=str, choices=CROP_MODES,
        effect=needs("images of any size", lambda v: v.any_size),
    )  # fmt: skip
    interpolation: str | None = setting(
        None, "interpolation when resizing [that of the weights or bilinear]", type=str, choices=INTERPOLATIONS,
        effect=needs("images that are resized", lambda v: v.resizes),
    )  # fmt: skip
    mean: tuple[float, ...] | None = setting(
        None, "mean of each channel, of pixels between 0 and 1 [that of the weights or the data set]", type=float,
        many=True, check=between(-100, 100),
    )  # fmt: skip
    std: tuple[float, ...] | None = setting(
        None, "standard deviation of each channel [that of the weights or the data set]", type=float, many=True,
        check=between(0, 100, open_low=True),
    )  # fmt: skip
    workers: int | str = setting(
        "auto", "data-loading processes per training process; 0: none, auto: as many as a measurement finds useful",
        type=int, words=("auto",), short="-w", check=between(0, 1024), metavar="{N,auto}", affects_result=False,
        effect=needs("images in files, or --loader stream", lambda v: not (v.in_memory and v.resident)),
    )  # fmt: skip
    decode: str = setting(
        "cpu", "where to decode, crop and resize JPEG files when images stream; gpu needs a GPU",
        choices=("cpu", "gpu"), affects_result=False,
        effect=needs(
            "image files of any size that stream", lambda v: v.any_size and not v.in_memory and not v.resident
        ),
    )  # fmt: skip
    cache_dir: str | None = setting(
        None, "cache folder for decoded images of class folders [.decoded in --datapath]", type=str, check=not_empty,
        metavar="DIR", affects_result=False,
        effect=needs(
            "image files that are decoded into memory (--loader resident)",
            lambda v: v.resident and (not v.in_memory or v.local_processes > 1),  # which then share a file there
        ),
    )  # fmt: skip
    skip_bad_images: bool = setting(
        False, "skip unreadable images: training takes the next one instead, validation leaves them out",
        affects_result=False,  # without unreadable images it changes nothing; with one, no run goes on without it
        effect=_IMAGE_FILES,
    )  # fmt: skip
    batch_size: int = setting(
        64, "images per process and forward pass", short="-b", check=between(1, 2**20), affects_result=False,
        effect=_VALIDATION_BATCH,
    )  # fmt: skip
    global_batch_size: int | None = setting(
        None, "images per optimizer step, over all processes and accumulation [batch size x processes x accumulate]",
        type=int, check=between(1, 2**24), effect=_VALIDATION_BATCH,
    )  # fmt: skip
    drop_last: bool = setting(
        False, "drop the images beyond an epoch's last full global batch, others in each epoch [the last one or two "
        "steps are smaller]", in_evaluation=False,
        effect=needs("a last step that is smaller than the others", lambda v: v.remainder > 0),
    )  # fmt: skip
    val_batch_size: int | None = setting(
        None, "images per process and forward pass in validation [batch size]", type=int, check=between(1, 2**20),
        affects_result=False,
    )  # fmt: skip
    loader: str = setting(
        "auto", "resident: all images in device memory; stream: worker processes read them",
        choices=("auto", "resident", "stream"), affects_result=False,
    )  # fmt: skip
    augment: tuple[str, ...] | None = setting(
        None, "training augmentation, or none [that of the data set]", type=str, many=True,
        choices=("none", *AUGMENTATIONS), metavar="NAME", in_evaluation=False,
    )  # fmt: skip
    max_shift: int | None = setting(
        None, "largest shift in pixels of the stored image [that of the data set]", type=int, check=between(1, 8192),
        in_evaluation=False, effect=_SHIFT,
    )  # fmt: skip
    shift_padding: str = setting(
        "zero", "padding that a shift uncovers", choices=("zero", "reflect"), in_evaluation=False, effect=_SHIFT
    )
    cutout: int = setting(
        0, "side in pixels of the square that cutout blanks in each image", check=between(0, 8192), in_evaluation=False
    )
    mixup: float = setting(
        0.0, "mixup: blend pairs of images; alpha of the beta distribution, for example 0.2", check=not_negative,
        in_evaluation=False,
    )  # fmt: skip
    cutmix: float = setting(
        0.0,
        "CutMix: paste a box of one image into another; alpha of the beta distribution, for example 1",
        check=not_negative,
        in_evaluation=False,
    )


@dataclass(frozen=True)
class ModelSettings:
    """Which network, from which weights."""

    arch: str | None = setting(
        None, "network: own, timm or torchvision name; timm/NAME or torchvision/NAME picks the library "
        f"[{SMALL_IMAGES_ARCH}, or {LARGE_IMAGES_ARCH} for {_LARGE_SETS}]", type=str, short="-a",
        check=not_empty, metavar="NAME",
    )  # fmt: skip
    pretrained: bool = setting(
        False, "start from the library's pretrained weights (downloads them)",
        effect=needs("no other weights to evaluate", lambda v: not (v.evaluate and (v.resume or v.weights))),
    )  # fmt: skip
    weights: str | None = setting(
        None, "start from the weights of this checkpoint", type=str, check=not_empty, metavar="PATH"
    )
    channels_last: str = setting(
        "auto", "channels-last memory format; auto: where measurements found it faster",
        choices=("auto", "on", "off"), bare="on", affects_result=False,
        effect=needs("a network with convolutions", lambda v: v.channels_last != "on" or v.has_filters),
    )  # fmt: skip
    compile: bool = setting(False, "compile the network with torch.compile")
    compile_augment: bool = setting(False, "compile augmentation and normalisation with torch.compile")
    init: str = setting(
        "default", "initialisation of convolution and linear weights", choices=INITIALISATIONS, in_evaluation=False
    )


@dataclass(frozen=True)
class OptimisationSettings:
    """How the network is trained; ``--evaluate`` uses none of it."""

    epochs: int = setting(20, "passes over the training data", check=between(1, 10**6))
    optimizer: str = setting(
        "sgd", "sgd, adam, adamw, muon (with adamw for all but matrices) or any timm optimizer by name", short="-o",
        check=not_empty, metavar="NAME",
    )  # fmt: skip
    lr: float | None = setting(None, "peak learning rate [0.1 for sgd, 0.001 for others]", type=float, check=positive)
    momentum: float = setting(
        0.9, "momentum of sgd, and of timm's optimizers that have one", check=between(0, 1, open_high=True),
        effect=lambda v: None if v.has_momentum else f"does nothing: --optimizer {v.optimizer} has none",
    )  # fmt: skip
    nesterov: bool = setting(
        False, "Nesterov momentum (sgd)", effect=needs("--optimizer sgd", lambda v: v.optimizer == "sgd")
    )
    weight_decay: float = setting(5e-4, "weight decay", check=not_negative)
    decay_norm_bias: bool = setting(
        True, "apply weight decay to norms and biases too",
        effect=needs("a --weight-decay above 0", lambda v: v.weight_decay > 0),
    )  # fmt: skip
    loss: str = setting("cross-entropy", "training loss; bce: binary cross entropy of each class", choices=LOSSES)
    label_smoothing: float = setting(0.0, "label smoothing", check=between(0, 1, open_high=True))
    lr_policy: str = setting("cosine", "learning-rate schedule after the warm-up", choices=LR_POLICIES)
    lr_milestones: tuple[float, ...] | None = setting(
        None, "multistep: epochs after which the learning rate drops [50 %% and 75 %% of --epochs]", type=float,
        many=True, check=positive, metavar="EPOCH", effect=_reaches_milestones,
    )  # fmt: skip
    lr_gamma: float = setting(
        0.1, "multistep: factor of the learning rate at each milestone", check=between(0, 1, open_low=True),
        effect=needs("--lr-policy multistep", lambda v: v.lr_policy == "multistep"),
    )  # fmt: skip
    warmup_epochs: float = setting(
        0.0, "epochs of linear warm-up", check=not_negative,
        effect=needs("to be at least half a step", lambda v: v.warmup_steps > 0),
    )  # fmt: skip
    accumulate: int = setting(1, "forward passes per optimizer step", check=between(1, 2**16))
    clip_grad_norm: float | None = setting(None, "clip the unscaled gradient to this norm", type=float, check=positive)
    clip_grad_value: float | None = setting(
        None, "clamp each element of the unscaled gradient to this absolute value", type=float, check=positive
    )
    clip_grad_agc: float | None = setting(
        None, "adaptive clipping of each unit's gradient to this fraction of its weights' norm, for example 0.01",
        type=float, check=positive,
    )  # fmt: skip
    grad_penalty: float = setting(
        0.0,
        "gradient penalty: add this factor times the gradient's norm to the loss of each forward pass",
        check=not_negative,
    )
    ema_decay: float | None = setting(
        None, "decay of a moving average of the weights, for example 0.999; validation reports its results",
        type=float, check=between(0, 1, open_low=True, open_high=True),
    )  # fmt: skip
    ema_bn_batches: int = setting(
        16, "training batches to compute the average's batch-norm statistics over before each validation; 3 take about "
        "as long as a step",
        check=between(0, 10**6), metavar="N",
        effect=needs(
            "--ema-decay, and batch norm in the network", lambda v: v.ema_decay is not None and v.gathers_statistics
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class PrecisionSettings:
    """The number format to compute in."""

    amp: str | None = setting(
        None, "automatic mixed precision [fp16 on a GPU, off on a CPU]", type=str, choices=("off", "fp16", "bf16")
    )
    tf32: bool | None = setting(
        None, "TF32, float32 with 10 significant bits, for convolutions and matrix products on a GPU [as torch does]",
        type=bool, effect=needs("a GPU", lambda v: v.on_gpu or not v.tf32),
    )  # fmt: skip
    init_scale: float = setting(
        65536.0, "initial loss scale (fp16)", check=between(2.0**-24, 2.0**100), in_evaluation=False, effect=_SCALER
    )
    max_skipped_steps: int = setting(
        20, "stop after more than this many skipped steps in a row (fp16)",
        check=between(0, LARGEST_INT), affects_result=False, in_evaluation=False, effect=_SCALER,
    )  # fmt: skip
    fp32_layers: tuple[str, ...] | None = setting(
        None, "layers to compute in float32, by name (scripts/amp_audit.py finds them)", type=str,
        many=True, metavar="NAME", check=lambda names: next(filter(None, map(not_empty, names)), None),
        effect=_reaches_layers,
    )  # fmt: skip
    dump_bad_batch: bool = setting(
        False, "save batch and weights of each step with a non-finite gradient, for scripts/amp_audit.py --batch",
        affects_result=False, in_evaluation=False,
    )  # fmt: skip


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


@dataclass(frozen=True)
class Settings:
    """All groups, and the origin of each setting's value ('default', 'recipe', 'flag', ...).

    ``changed``: the settings whose flag differs from recipe, checkpoint or default.
    """

    run: RunSettings = RunSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    optimisation: OptimisationSettings = OptimisationSettings()
    precision: PrecisionSettings = PrecisionSettings()
    logging: LoggingSettings = LoggingSettings()
    origins: dict[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    def values(self) -> dict[str, Any]:
        """Every setting by its name, in the order of the groups; tuples become lists."""
        flat = {}
        for group in groups():
            for name, value in dataclasses.asdict(getattr(self, group)).items():
                flat[name] = list(value) if isinstance(value, tuple) else value
        return flat

    def with_absolute_paths(self) -> Settings:
        """The same settings for any working directory."""
        paths = {name: getattr(self.data, name) for name in ("datapath", "cache_dir")}
        absolute = {name: path and os.path.abspath(path) for name, path in paths.items()}
        return dataclasses.replace(self, data=dataclasses.replace(self.data, **absolute))

    def result_values(self) -> dict[str, Any]:
        """The settings that must agree for one run to continue another."""
        values = self.values()
        return {option.name: values[option.name] for _, option in all_settings() if option.metadata["affects_result"]}


def groups() -> list[str]:
    """The names of the groups, in order."""
    return [option.name for option in dataclasses.fields(Settings) if dataclasses.is_dataclass(option.default)]


def all_settings() -> list[tuple[str, dataclasses.Field]]:
    """Every setting as (group, field), in order. No two settings share a name."""
    return [
        (group.name, option)
        for group in dataclasses.fields(Settings)
        if dataclasses.is_dataclass(group.default)
        for option in dataclasses.fields(group.default)
    ]


def flag_of(name: str) -> str:
    """The flag of a setting: ``batch_size`` -> ``--batch-size``."""
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: Any) -> str:
    """A setting as a command line gives it: ``--lr 0.1``, ``--no-nesterov``, ``no --ema-decay``."""
    if value is None:
        return f"no {flag_of(name)}"
    if isinstance(value, bool):
        return flag_of(name) if value else f"--no-{name.replace('_', '-')}"
    return f"{flag_of(name)} {as_text(value)}"


def as_text(value: Any) -> str:
    """A setting's value as a person writes it."""
    if isinstance(value, tuple | list):
        return " ".join(map(as_text, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
