"""Settings of the network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from utils.config.datasets import LARGE_IMAGES_ARCH, SMALL_IMAGES_ARCH, SPECS
from utils.config.field import between, needs, not_empty, positive_int, setting

INITIALISATIONS = (
    "default",
    "kaiming_normal",
    "kaiming_uniform",
    "xavier_normal",
    "xavier_uniform",
    "kaiming_normal_conv",
    "sincos_positions",
)
_LARGE_SETS = ", ".join(name for name, spec in SPECS.items() if spec.default_arch == LARGE_IMAGES_ARCH)


def _freezes(v: Any) -> str | None:
    if not v.freeze:
        return "does nothing: it needs --freeze"
    return f"never freezes: --epochs {v.epochs} end before" if v.freeze_epoch >= v.epochs else None


def _is_file_name(path: str) -> str | None:
    if re.search(r"_Weights\.[A-Z]|^IMAGENET1K_|^DEFAULT$", path):
        return "is a name of torchvision's weights, and this a file's: write --pretrained"
    return not_empty(path)


def _unfreezes(v: Any) -> str | None:
    if not v.freeze:
        return "does nothing: it needs --freeze"
    return f"does nothing: --epochs {v.epochs} end before" if v.unfreeze_epoch >= v.epochs else None


@dataclass(frozen=True)
class ModelSettings:
    """Which network, from which weights."""

    arch: str | None = setting(
        None,
        "network: own, timm or torchvision name; timm/NAME or torchvision/NAME picks the library "
        f"[{SMALL_IMAGES_ARCH}, or {LARGE_IMAGES_ARCH} for {_LARGE_SETS}]",
        type=str,
        short="-a",
        check=not_empty,
        metavar="NAME",
        synonyms="model model-name model-name-or-path network net backbone",
    )
    pretrained: bool = setting(
        False,
        "start from the library's pretrained weights (downloads them)",
        effect=needs("no other weights to evaluate", lambda v: not (v.evaluate and (v.resume or v.weights))),
    )
    weights: str | None = setting(
        None,
        "start from the weights in this file: a checkpoint of ours, timm's or torchvision's, or safetensors",
        type=str,
        check=_is_file_name,
        metavar="PATH",
        synonyms="initial-checkpoint pretrained-path finetune",
    )
    new_head: bool = setting(
        False,
        "begin the last layer anew, for other classes than those of --weights or --pretrained",
        in_evaluation=False,
        effect=needs("--weights or --pretrained", lambda v: v.weights or v.pretrained),
    )
    drop: float | None = setting(
        None,
        "dropout before the last layer [that of the library]",
        type=float,
        check=between(0, 1, open_high=True),
        in_evaluation=False,
        synonyms="dropout",
    )
    drop_path: float | None = setting(
        None,
        "stochastic depth: probability of skipping the last block, lower for earlier blocks [that of the library]",
        type=float,
        check=between(0, 1, open_high=True),
        in_evaluation=False,
    )
    model_kwargs: tuple[str, ...] | None = setting(
        None,
        "arguments of the network's constructor in its library",
        type=str,
        many=True,
        metavar="NAME=VALUE",
        check=lambda items: next(filter(None, map(not_empty, items)), None),
    )
    blur_pool: bool = setting(
        False,
        "blur what strided convolutions read, against aliasing",
        effect=needs("a strided convolution of 16 or more input channels", lambda v: v.blurs),
        synonyms="use-blurpool blurpool",
    )
    grad_checkpointing: bool = setting(
        False,
        "compute activations again in the backward pass: less memory, more time (timm's networks)",
        affects_result=False,
        in_evaluation=False,
        synonyms="gradient-checkpointing",
    )
    sync_bn: bool = setting(
        False,
        "batch norms normalise by the batches of all processes together (GPUs)",
        in_evaluation=False,
        effect=needs("several processes, and batch norm", lambda v: v.processes > 1 and v.has_statistics),
    )
    shard_model: bool = setting(
        False,
        "spread parameters, gradients, average and optimizer state over the processes (torch's fully_shard): "
        "for networks that do not fit",
        affects_result=False,
        in_evaluation=False,
        effect=needs("several processes", lambda v: v.processes > 1),
    )
    freeze: tuple[str, ...] | None = setting(
        None,
        "do not train these parameters: names of layers or parameters, with * for any text, or all-but-head; "
        "their batch norms keep their statistics too",
        type=str,
        many=True,
        metavar="PATTERN",
        check=lambda names: next(filter(None, map(not_empty, names)), None),
        in_evaluation=False,
    )
    freeze_epoch: int | None = setting(
        None,
        "train what --freeze names, too, for this many epochs, and freeze it then [freeze it from the start]",
        type=int,
        check=positive_int,
        metavar="N",
        in_evaluation=False,
        effect=_freezes,
    )
    unfreeze_epoch: int | None = setting(
        None,
        "train what --freeze names, too, after this many epochs",
        type=int,
        check=positive_int,
        metavar="N",
        in_evaluation=False,
        effect=_unfreezes,
    )
    freeze_bn: bool = setting(
        False,
        "normalise by the statistics that the network's batch norms begin with, and keep them",
        in_evaluation=False,
        effect=needs("batch norm with running statistics that --freeze does not keep", lambda v: v.freezes_more_norms),
    )
    channels_last: str = setting(
        "auto",
        "channels-last memory format; auto: where measurements found it faster",
        choices=("auto", "on", "off"),
        bare="on",
        affects_result=False,
        effect=needs("a network with convolutions", lambda v: v.channels_last != "on" or v.has_filters),
    )
    compile: bool = setting(False, "compile the network with torch.compile", synonyms="torchcompile torch-compile")
    compile_augment: bool = setting(False, "compile augmentation and normalisation with torch.compile")
    matmul_weight_grad: tuple[str, ...] | None = setting(
        None,
        "3x3 convolutions, by name, whose weight gradients are computed as matrix products; auto: those where "
        "that is measured to be faster when the run begins, on a CPU",
        type=str,
        many=True,
        metavar="NAME",
        check=lambda names: next(filter(None, map(not_empty, names)), None),
        in_evaluation=False,
        effect=needs("one of these layers to train", lambda v: v.trains_products or "auto" in v.matmul_weight_grad),
    )
    init: str = setting(
        "default",
        "initialisation of convolution and linear weights (kaiming_normal_conv: of convolutions alone; "
        "sincos_positions: of a transformer's embedding of positions alone)",
        choices=INITIALISATIONS,
        in_evaluation=False,
    )
