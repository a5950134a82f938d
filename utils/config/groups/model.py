"""Settings of the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from utils.config.datasets import LARGE_IMAGES_ARCH, SMALL_IMAGES_ARCH, SPECS
from utils.config.field import Needs, between, ends_before, group, not_empty, setting, training_setting

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


def _is_file_name(path: str) -> str | None:
    if re.search(r"_Weights\.[A-Z]|^IMAGENET1K_|^DEFAULT$", path):
        return "is a name of torchvision's weights, and this a file's: write --pretrained, which loads the DEFAULT"
    return not_empty(path)


def _has_statistics(v: Any) -> bool:
    return any(getattr(layer, "running_mean", None) is not None for layer in v.layers)


@group()
@dataclass(frozen=True)
class ModelSettings:
    """The network and the weights that it begins with."""

    arch: str = setting(  # None until the settings are resolved
        "network: own, timm or torchvision name; timm/NAME or torchvision/NAME picks the library, "
        "hf_hub:ORG/NAME a network of timm's on the Hugging Face Hub "
        f"[{SMALL_IMAGES_ARCH}, or {LARGE_IMAGES_ARCH} for {_LARGE_SETS}]",
        short="-a",
        synonyms="model model-name model-name-or-path network net backbone",
        shapes="state",
        example="conv4",
    )
    pretrained: bool = setting(
        "start from the library's pretrained weights (downloads them)",
        default=False,
        shapes="first weights",
        effect=Needs("no other weights to evaluate", lambda v: not (v.evaluate and (v.resume or v.weights))),
    )
    weights: str | None = setting(
        "start from the weights in this file: a checkpoint of ours, timm's or torchvision's, or safetensors",
        check=_is_file_name,
        metavar="PATH",
        synonyms="initial-checkpoint finetune",
        shapes="first weights",
        example="weights.pt",
    )
    new_head: bool = training_setting(
        "begin the last layer anew, for other classes than those of --weights or --pretrained",
        default=False,
        shapes="first weights",
        effect=Needs("--weights or --pretrained"),
    )
    drop: float | None = training_setting(
        "dropout before the last layer; in torchvision's DenseNet, ViT and Swin within their blocks [that of the "
        "library]",
        check=between(0, 1, open_high=True),
        synonyms="dropout",
        plan="dropout {}",
        example="0.1",
        within="--arch timm/test_vit --image-size 32",
    )
    drop_path: float | None = training_setting(
        "stochastic depth: probability of skipping the last block, lower for earlier blocks [that of the library]",
        check=between(0, 1, open_high=True),
        plan="stochastic depth {}",
        example="0.1",
        within="--arch timm/test_vit --image-size 32",
    )
    model_kwargs: tuple[str, ...] | None = setting(
        "arguments of the network's constructor in its library",
        metavar="NAME=VALUE",
        plan="{}",
        shapes="network",
        example="qk_norm=true",
        within="--arch timm/test_vit --image-size 32",
    )
    blur_pool: bool = setting(
        "blur what strided convolutions read, against aliasing",
        default=False,
        effect=Needs(
            "a strided convolution of 16 or more input channels",
            lambda v: any(hasattr(layer, "blur") for layer in v.layers),
        ),
        synonyms="use-blurpool blurpool",
        plan="blurred before strides",
        shapes="network",
        within="--arch timm/resnet18",
    )
    grad_checkpointing: bool = training_setting(
        "compute activations again in the backward pass: less memory, more time (timm's networks)",
        default=False,
        affects_result=False,
        synonyms="gradient-checkpointing",
        plan="activations computed again",
    )
    sync_bn: bool = training_setting(
        "batch norms normalise by the batches of all processes together (GPUs)",
        default=False,
        effect=Needs("several processes, and batch norm", lambda v: v.processes > 1 and _has_statistics(v)),
        plan="synchronised batch norm",
    )
    shard_model: bool = training_setting(
        "spread parameters, gradients, average and optimizer state over the processes (torch's fully_shard): for "
        "networks that do not fit",
        default=False,
        affects_result=False,
        effect=Needs("several processes", lambda v: v.processes > 1),
    )
    freeze: tuple[str, ...] | None = training_setting(
        "do not train these parameters: names of layers or parameters, with * for any text, or all-but-head; their "
        "batch norms keep their statistics too",
        metavar="PATTERN",
        shapes="state",
        example="features.0",
        within="--arch vgg11",
    )
    freeze_epoch: int | None = training_setting(
        "train what --freeze names, too, for this many epochs, and freeze it then [freeze it from the start]",
        effect=(Needs("--freeze"), ends_before("freeze_epoch", "never freezes")),
        unsharded="changes in training which parameters have a gradient; --freeze works",
        shapes="state at all",
        example="5",
        within="--arch vgg11 --freeze features",
    )
    unfreeze_epoch: int | None = training_setting(
        "train what --freeze names, too, after this many epochs",
        effect=(Needs("--freeze"), ends_before("unfreeze_epoch")),
        unsharded="changes in training which parameters have a gradient; --freeze works",
        shapes="state at all",
        example="5",
        within="--arch vgg11 --freeze features",
    )
    freeze_bn: bool = training_setting(
        "normalise by the statistics that the network's batch norms begin with, and keep them",
        default=False,
        effect=Needs("batch norm with running statistics that --freeze does not keep", lambda v: v.freezes_more_norms),
        within="--arch vgg11",
    )
    channels_last: str = setting(
        "channels-last memory format; auto: where measurements found it faster",
        default="auto",
        choices=("auto", "on", "off"),
        bare="on",
        affects_result=False,
        effect=Needs("a network with convolutions", lambda v: v.channels_last != "on" or v.has_filters),
        example="on",
    )
    compile: bool = setting(
        "compile the network with torch.compile",
        default=False,
        synonyms="torchcompile torch-compile",
        unsharded="compiles a network with whole weights",
        plan="compiled",
    )
    cuda_graph: str = training_setting(
        "launch whole steps as CUDA graphs, with learning rates in float32; auto: where a graph can stand for a step; "
        "on: with several processes, too, and end the run where none can",
        default="off",
        choices=("auto", "on", "off"),
        effect=Needs("a GPU", lambda v: v.on_gpu),
        synonyms="cudagraph cuda-graphs cudagraphs",
        example="auto",
    )
    compile_mode: str = setting(
        "mode of torch.compile for the network: reduce-overhead launches CUDA graphs, max-autotune tries kernels first "
        "and launches CUDA graphs, too",
        default="default",
        choices=("default", "reduce-overhead", "max-autotune"),
        synonyms="torchcompile-mode",
        effect=Needs("--compile"),
        plan="compile mode {}",
    )
    compile_augment: bool = setting("compile augmentation and normalisation with torch.compile", default=False)
    init: str = training_setting(
        "initialisation of convolution and linear weights (kaiming_normal_conv: of convolutions alone; "
        "sincos_positions: of a transformer's embedding of positions alone)",
        default="default",
        choices=INITIALISATIONS,
        shapes="first weights",
        example="xavier_normal",
    )

    @property
    def freezing_changes(self) -> bool:
        """True if the layers that --freeze names train in some epochs."""
        return bool(self.freeze_epoch or self.unfreeze_epoch)

    @staticmethod
    def contradictions(v: Any) -> Iterator[str]:
        if v.has(v.grad_checkpointing and v.compile):
            yield "--compile decides itself what to compute again; remove --grad-checkpointing"
        overwrites = v.compile and v.compile_mode != "default" and v.device != "cpu"
        is_asked_for = any(map(v.is_explicit, ("compile", "compile_mode", "accumulate")))
        if v.has(overwrites and v.accumulate > 1 and not v.evaluate and is_asked_for):
            yield (
                f"--compile-mode {v.compile_mode} overwrites the gradients of the pass before; with --accumulate "
                f"{v.accumulate}, take --cuda-graph auto instead"
            )
        begin, end = v.freeze_epoch, v.unfreeze_epoch
        if v.has(begin and end and begin >= end):
            yield f"--freeze-epoch {begin} is not below --unfreeze-epoch {end}, so nothing would be frozen"
        given = v.pretrained and v.weights and v.is_explicit("pretrained", against="weights")
        if v.has(given and v.is_explicit("weights", against="pretrained")):
            yield "--pretrained and --weights both say where to begin; give one"
        begins = (name for name in ("pretrained", "weights") if getattr(v, name))
        if v.has(v.init != "default" and any(v.is_explicit("init", against=name) for name in begins)):
            weights = "pretrained" if v.pretrained else "--weights"
            yield f"--init {v.init} would be overwritten by the {weights} weights"
