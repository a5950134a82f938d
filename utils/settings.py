"""What can be set: one frozen dataclass a group, with default, help and check beside each field.

Flags, recipe keys, ``--help`` and the saved ``config.yaml`` are all made from these fields (see
``utils/arguments.py``), so a setting is added by adding one field here. This module imports
nothing heavy: ``--help`` and every mistake on the command line answer at once.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from utils.setting import LARGEST_INT, between, not_empty, not_negative, positive, positive_int, safe_name, setting

DATASETS = ("digits", "mnist", "fashionmnist", "cifar10", "cifar100", "imagenet", "folder", "synthetic")
AUGMENTATIONS = ("shift", "flip", "alternating-flip", "resized-crop")
INITIALISATIONS = ("default", "kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform")
LR_POLICIES = ("constant", "multistep", "cosine", "gaussian")


class UserError(ValueError):
    """Something the user can mend; ``main.py`` prints each line of it and ends with exit code 2.

    ``mistakes`` is a list of lines, each saying what is wrong, where, and what to do.
    """

    def __init__(self, *mistakes: str, on_all_ranks: bool = False) -> None:
        self.mistakes = list(mistakes)
        self.on_all_ranks = on_all_ranks  # then one process is enough to print it
        super().__init__("\n".join(mistakes))


@dataclass(frozen=True)
class RunSettings:
    """Where a run goes and how it begins and ends."""

    config: str | None = setting(
        None, "recipe: a name under configs/ or a path", type=str, check=not_empty, metavar="NAME_OR_PATH",
        shapes_result=False, in_recipe=False,
    )  # fmt: skip
    output: str = setting(
        "runs", "folder that holds all runs", check=not_empty, metavar="DIR", shapes_result=False, in_recipe=False
    )
    name: str | None = setting(
        None, "text added to the run folder's name", type=str, check=safe_name, metavar="TEXT", shapes_result=False
    )
    seed: int = setting(0, "seed of initialisation, sample order and augmentation", check=between(0, LARGEST_INT))
    deterministic: bool = setting(
        False, "only algorithms that give the same bits each time (slower on a GPU)", shapes_result=False
    )
    device: str = setting("auto", "where to compute", choices=("auto", "cpu", "cuda"), shapes_result=False)
    gpu_ids: tuple[int, ...] | None = setting(
        None, "which GPUs this machine's processes use, one each", type=int, many=True,
        check=between(0, 1023), metavar="ID", shapes_result=False, in_recipe=False,
    )  # fmt: skip
    resume: str | None = setting(
        None, "continue a run: 'auto' (the newest with these settings), a checkpoint file or a run folder",
        type=str, check=not_empty, metavar="{auto,PATH}", shapes_result=False, in_recipe=False,
    )  # fmt: skip
    resume_override: bool = setting(
        False, "with --resume PATH: go on although settings or data differ from the run's",
        shapes_result=False, in_recipe=False,
    )  # fmt: skip
    evaluate: bool = setting(
        False, "validate only; needs --resume PATH, --weights or --pretrained", short="-e",
        shapes_result=False, in_recipe=False,
    )  # fmt: skip
    dry_run: bool = setting(False, "print the plan and create nothing", shapes_result=False, in_recipe=False)
    max_steps: int | None = setting(
        None, "stop after this many optimizer steps in all (the learning rate still plans for --epochs)",
        type=int, check=positive_int, shapes_result=False, in_recipe=False,
    )  # fmt: skip
    timeout: float = setting(
        600.0, "seconds without a sign of another process before all end", check=between(1, 10**6),
        shapes_result=False,
    )  # fmt: skip


@dataclass(frozen=True)
class DataSettings:
    """Which images, in which batches."""

    dataname: str = setting("digits", "data set", choices=DATASETS)
    datapath: str | None = setting(
        None, "where the data lies", type=str, check=not_empty, metavar="DIR", shapes_result=False
    )
    download: bool = setting(False, "fetch the data set through torchvision when it is missing", shapes_result=False)
    val_split: float | None = setting(
        None, "share of a folder without val/ or test/ to validate on, for example 0.1", type=float,
        check=between(0, 1, open_low=True, open_high=True), metavar="SHARE",
    )  # fmt: skip
    image_size: int | None = setting(
        None, "height and width that the network sees, in pixels [the data set's own]", type=int, check=between(1, 8192)
    )
    workers: int | str = setting(
        "auto", "processes that read images, per training process; 0 reads in place, auto measures how many pay",
        type=int, words=("auto",), short="-w", check=between(0, 1024), metavar="{N,auto}", shapes_result=False,
    )  # fmt: skip
    decode: str = setting(
        "cpu", "where JPEG files are decoded, cropped and resized when images stream; gpu needs a GPU",
        choices=("cpu", "gpu"), shapes_result=False,
    )  # fmt: skip
    cache_dir: str | None = setting(
        None, "folder for the decoded images of class folders [.decoded in --datapath]", type=str, check=not_empty,
        metavar="DIR", shapes_result=False,
    )  # fmt: skip
    skip_bad_images: bool = setting(
        False, "go on when images cannot be read: in training the next one stands in, in validation they are left out",
        shapes_result=False,  # for a run that meets none it changes nothing, and one that does cannot go on without
    )  # fmt: skip
    batch_size: int = setting(
        64, "images per process in one forward pass", short="-b", check=between(1, 2**20), shapes_result=False
    )
    global_batch_size: int | None = setting(
        None, "images per optimizer step over all processes and accumulation [batch size x processes x accumulate]",
        type=int, check=between(1, 2**24),
    )  # fmt: skip
    drop_last: bool = setting(
        False, "leave the images beyond the last full global batch out of an epoch, others in each, so that all steps "
        "have one size [the last one or two steps are smaller]",
    )  # fmt: skip
    val_batch_size: int | None = setting(
        None, "images per process in one validation pass [batch size]", type=int, check=between(1, 2**20),
        shapes_result=False,
    )  # fmt: skip
    loader: str = setting(
        "auto", "resident: all images in the device's memory; stream: worker processes read them",
        choices=("auto", "resident", "stream"), shapes_result=False,
    )  # fmt: skip
    augment: tuple[str, ...] | None = setting(
        None, "training augmentation, or none [the data set's own]", type=str, many=True,
        choices=("none", *AUGMENTATIONS), metavar="NAME",
    )  # fmt: skip
    max_shift: int | None = setting(
        None, "farthest shift in pixels of the stored image [the data set's own]", type=int, check=between(1, 8192)
    )
    shift_padding: str = setting("zero", "what a shift uncovers", choices=("zero", "reflect"))
    cutout: int = setting(0, "side in pixels of a square blanked in each image", check=between(0, 8192))
    mixup: float = setting(
        0.0, "blend pairs of images; alpha of the beta distribution, for example 0.2", check=not_negative
    )
    cutmix: float = setting(0.0, "paste a box of one image into another; alpha, for example 1", check=not_negative)


@dataclass(frozen=True)
class ModelSettings:
    """Which network, from which weights."""

    arch: str = setting(
        "conv2", "network: own, timm or torchvision name; timm/NAME or torchvision/NAME picks the library",
        short="-a", check=not_empty, metavar="NAME",
    )  # fmt: skip
    pretrained: bool = setting(False, "begin with the library's pretrained weights (fetches them)")
    weights: str | None = setting(
        None, "begin with the weights of this checkpoint", type=str, check=not_empty, metavar="PATH"
    )
    channels_last: str = setting(
        "auto", "channels-last memory format: auto takes it where it was measured to be faster",
        choices=("auto", "on", "off"), bare="on", shapes_result=False,
    )  # fmt: skip
    compile: bool = setting(False, "compile the network with torch.compile")
    compile_augment: bool = setting(False, "compile augmentation and normalisation with torch.compile")
    init: str = setting("default", "initialisation of convolution and linear weights", choices=INITIALISATIONS)


@dataclass(frozen=True)
class OptimisationSettings:
    """How the weights move."""

    epochs: int = setting(20, "passes over the training data", check=between(1, 10**6))
    optimizer: str = setting(
        "sgd", "sgd, adam, adamw, muon (with adamw for what is no matrix) or any of timm's by name", short="-o",
        check=not_empty, metavar="NAME",
    )  # fmt: skip
    lr: float | None = setting(
        None, "highest learning rate [0.1 for sgd, 0.001 for others]", type=float, check=positive
    )
    momentum: float = setting(0.9, "momentum of sgd", check=between(0, 1, open_high=True))
    nesterov: bool = setting(False, "Nesterov momentum (sgd)")
    weight_decay: float = setting(5e-4, "weight decay", check=not_negative)
    decay_norm_bias: bool = setting(True, "apply weight decay to norms and biases too")
    label_smoothing: float = setting(0.0, "label smoothing", check=between(0, 1, open_high=True))
    lr_policy: str = setting("cosine", "learning rate after the warm-up", choices=LR_POLICIES)
    lr_milestones: tuple[float, ...] | None = setting(
        None, "multistep: epochs after which the rate drops [50 %% and 75 %% of --epochs]", type=float, many=True,
        check=positive, metavar="EPOCH",
    )  # fmt: skip
    lr_gamma: float = setting(0.1, "multistep: factor of each drop", check=between(0, 1, open_low=True))
    warmup_epochs: float = setting(0.0, "epochs of linear warm-up", check=not_negative)
    accumulate: int = setting(1, "forward passes per optimizer step", check=between(1, 2**16))
    clip_grad_norm: float | None = setting(None, "clip the unscaled gradient to this norm", type=float, check=positive)
    clip_grad_value: float | None = setting(
        None, "clamp each number of the unscaled gradient to this size", type=float, check=positive
    )
    clip_grad_agc: float | None = setting(
        None, "adaptive clipping: each unit's gradient to this share of its weights' norm, for example 0.01",
        type=float, check=positive,
    )  # fmt: skip
    grad_penalty: float = setting(
        0.0, "add this times the norm of the loss's gradient to the loss of each forward pass", check=not_negative
    )
    ema_decay: float | None = setting(
        None, "keep a moving average of the weights, for example 0.999; its results are the reported ones",
        type=float, check=between(0, 1, open_low=True, open_high=True),
    )  # fmt: skip


@dataclass(frozen=True)
class PrecisionSettings:
    """In which number format."""

    amp: str | None = setting(
        None, "automatic mixed precision [fp16 on a GPU, off on a CPU]", type=str, choices=("off", "fp16", "bf16")
    )
    tf32: bool | None = setting(
        None, "TF32, float32 with 10 significant bits, for convolutions and matrix products on a GPU [as torch does]",
        type=bool,
    )  # fmt: skip
    init_scale: float = setting(65536.0, "first loss scale (fp16)", check=between(2.0**-24, 2.0**100))
    max_skipped_steps: int = setting(
        20, "stop after more than this many steps in a row without a finite gradient (fp16)",
        check=between(0, LARGEST_INT), shapes_result=False,
    )  # fmt: skip
    fp32_layers: tuple[str, ...] | None = setting(
        None, "layers to compute in float32, by their names in the network (amp_audit.py finds them)", type=str,
        many=True, metavar="NAME", check=lambda names: next(filter(None, map(not_empty, names)), None),
    )  # fmt: skip
    dump_bad_batch: bool = setting(
        False, "save the batch and weights of a step whose gradient is not finite, for scripts/amp_audit.py --batch",
        shapes_result=False,
    )  # fmt: skip


@dataclass(frozen=True)
class LoggingSettings:
    """What is shown and saved, how often."""

    print_freq: int = setting(
        50, "optimizer steps between two log lines and TensorBoard points", check=positive_int, shapes_result=False
    )
    progress: bool = setting(True, "progress bars on a terminal", shapes_result=False)
    save_every_epochs: int = setting(1, "epochs between two checkpoints", check=positive_int, shapes_result=False)
    save_every_steps: int | None = setting(
        None, "optimizer steps between two checkpoints within an epoch", type=int, check=positive_int,
        shapes_result=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """All groups, and for each setting where its value came from ('default', 'recipe', 'flag', ...).

    ``changed``: the settings whose flag says something else than recipe, checkpoint or default did.
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
        """The settings that must agree for one run to be the continuation of another."""
        values = self.values()
        return {option.name: values[option.name] for _, option in all_settings() if option.metadata["shapes_result"]}


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
