"""The network of a run: built, loaded, on its device, checked against what the settings ask of it, ready to train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.build import build_model, check_forward, locate, small_stem_replaces_convolution, stem_line
from models.layers import checkpoint_gradients
from models.starting_weights import adapted, begins_anew, load_start, preprocessing_of
from utils.checkpoint import checkpoint
from utils.checkpoint.resume import ResumePoint
from utils.config.datasets import SPECS
from utils.config.groups.model import ModelSettings
from utils.config.image_size import Size, is_size, pixels_text, size_text
from utils.config.settings import Settings, UserError, flag_of, plan_words, shaping
from utils.data.data_set import Data
from utils.data.loaders import TrainLoader
from utils.data.preprocessing import KnownPreprocessing, Preprocessing
from utils.data.resolution import build_resolution
from utils.optim.freezing import Freezing, build_freezing
from utils.optim.gradient_penalty import refuse_without_second_derivative
from utils.precision.amp import autocast, keep_in_fp32, resolve_amp
from utils.precision.buffers import make_dense
from utils.runtime.determinism import refuse_without_determinism

START_IMAGES = 5000
# weights of a linear layer, and its share of the network's parameters
MOST_WEIGHTS = 20_000_000
MOST_SHARE = 0.9
OLDER_MAX_SHIFT = 28  # for images of any size, before checkpoints stored it


class Prepared(NamedTuple):
    """A network on its device.

    ``origin``: where its weights come from, as text. ``untrained``: the parts of a pretrained network that begin anew,
    as text. ``stem``: a text about its stem, if that depends on the images' size.
    """

    model: torch.nn.Module
    origin: str
    untrained: str
    stem: str
    channels_last: bool
    freezing: Freezing

    def describe(self, settings: ModelSettings) -> dict[str, str]:
        """Rows of a run's plan about the network."""
        words = [settings.arch, *plan_words(settings)]
        anew = f"; {self.untrained} begins anew" if self.untrained else ""
        frozen = f"; {self.freezing}" if self.freezing else ""
        rows = {"Network": f"{', '.join(words)}, {self.origin}{anew}{frozen}"}
        if self.stem:
            rows["Stem"] = self.stem
        return rows | {"Parameters": f"{sum(parameter.numel() for parameter in self.model.parameters()):,}"}

    def multiply_adds(self, image_shape: tuple[int, int, int], device: torch.device) -> int:
        """Multiply-adds of one image's forward pass, counted by torch (matrix products and convolutions).

        Attention is computed as plain products: torch does not count all of its fused kernels.
        """
        counter = FlopCounterMode(display=False)
        self.model.eval()
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
                self.model(torch.zeros(1, *image_shape, device=device))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        self.model.train()
        return counter.get_total_flops() // 2


# What a checkpoint's weights replace, and what only training uses.
BEGUN: dict[str, Any] = {"pretrained": False, "weights": None, "new_head": False, "init": "default"}
ONLY_TRAINED: dict[str, Any] = {"sync_bn": False, "grad_checkpointing": False, "freeze": None, "freeze_bn": False}


def prepare_network(
    args: Settings, data: Data, device: torch.device, resume_point: ResumePoint | None, weights: ResumePoint | None
) -> Prepared:
    """Build the network that ``args`` describe, ready to train on ``data``'s classes and images on ``device``.

    Raises ``UserError`` if the weights do not fit, or if a flag asks of the network what torch cannot compute.
    """
    settings = dataclasses.replace(args.model, **(BEGUN if resume_point is not None else {}))
    trained_size = trained_image_size(settings, weights or resume_point)
    model = _built(settings, data, data.image_size)
    resolution = build_resolution(args, data.image_size)
    for size in resolution.sizes(args.optimisation.epochs) if resolution else ():
        check_forward(
            settings.arch, model, **_shape(data), image_size=size, flag="--progressive-size or --progressive-step"
        )
    stem = stem_line(model, data.image_size, trained_size)
    untrained = begins_anew(model, settings, len(data.classes), data.image_size)
    model.to(device)
    make_dense(model)
    channels_last = to_memory_format(args, model, device)
    if weights is not None:
        untrained = load_start(model, weights.state, weights.path, settings.new_head, data.classes)
    if settings.sync_bn:
        model = synchronised(model, device)
    if settings.grad_checkpointing:
        checkpoint_gradients(settings.arch, model)
    freezing = build_freezing(settings, model)
    if weights is None and settings.pretrained and small_stem_replaces_convolution(model, data.image_size):
        _refuse_frozen_stem(freezing, data.image_size, args.optimisation.epochs)
    keep_in_fp32(model, args.precision.fp32_layers or (), device)
    _refuse_without_determinism(args, model, data, channels_last, device, training=True)
    if args.optimisation.grad_penalty:
        refuse_without_second_derivative(model, data.image_shape, device)
    origin = "pretrained weights" if args.model.pretrained else f"initialisation {args.model.init}"
    origin = f"weights of {args.model.weights}" if args.model.weights else origin
    origin += f"; resumes from {resume_point.path}" if resume_point is not None else ""
    return Prepared(model, origin, untrained, stem, channels_last, freezing)


def prepare_to_evaluate(args: Settings, data: Data, device: torch.device, weights: ResumePoint | None) -> Prepared:
    """Build the network with a checkpoint's ``weights``, or else its library's, ready to validate on ``device``.

    Raises ``UserError`` if the weights do not fit, or if a flag asks of the network what torch cannot compute.
    """
    settings = dataclasses.replace(args.model, **ONLY_TRAINED, **(BEGUN if weights is not None else {}))
    trained_size = trained_image_size(settings, weights)
    stem_size = trained_size or data.image_size
    model = _built(settings, data, stem_size)
    stem = stem_line(model, stem_size, trained_size)
    if untrained := begins_anew(model, settings, len(data.classes), stem_size):
        raise UserError(f"--evaluate --pretrained: {untrained} would begin anew, untrained; train it first")
    model.to(device)
    channels_last = to_memory_format(args, model, device)
    origin = "pretrained weights"
    if weights is not None:
        stored = checkpoint.weights_of(weights.state, weights.path)
        checkpoint.load_weights(model, adapted(model, stored), weights.path)
        origin = f"weights of {weights.path}"
    freezing = build_freezing(settings, model)
    keep_in_fp32(model, args.precision.fp32_layers or (), device)
    _refuse_without_determinism(args, model, data, channels_last, device, training=False)
    return Prepared(model, origin, "", stem, channels_last, freezing)


def _refuse_frozen_stem(freezing: Freezing, image_size: Size, epochs: int) -> None:
    """Raise ``UserError`` if the first convolution begins anew and never trains: the rest would see random features."""
    always = not freezing.begin and (freezing.end is None or freezing.end >= epochs)
    if always and "conv1.weight" in freezing.names:
        raise UserError(
            f"--freeze: the 3x3 first convolution for images of {size_text(image_size)} pixels begins anew, and frozen "
            "it would stay random; give --image-size 65 or more, with which it has its pretrained weights, or do not "
            "freeze conv1"
        )


def _shape(data: Data) -> dict[str, int]:
    return {"classes": len(data.classes), "channels": data.preprocessing.channels}


def _built(settings: ModelSettings, data: Data, stem_size: Size) -> torch.nn.Module:
    """Build the network for ``data``, and check that it takes validation images if their size differs."""
    model = build_model(settings, **_shape(data), image_size=data.image_size, stem_size=stem_size)
    size = data.preprocessing.val_image_size
    if size != data.image_size:
        check_forward(settings.arch, model, **_shape(data), image_size=size, flag="--val-image-size")
    return model


def oversized_layer(arch: str, model: torch.nn.Module, image_size: Size) -> str | None:
    """A line about a linear layer on flattened pixels that is nearly all of a large network; otherwise None.

    Such a layer grows with the square of the image's side: conv2, published for 32 pixels, has 4 million weights there
    and 205 million for photographs of 224 pixels. A large last layer, for many classes, does not count. VGG's first
    linear layer has 74 % of 138 million parameters, as published, and passes.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or module.in_features < module.out_features:
            continue
        weights = module.weight.numel()
        if weights > MOST_WEIGHTS and weights > MOST_SHARE * total:
            return (
                f"--arch {arch}: of its {total:,} parameters, {weights:,} are weights of the one layer {name}, for "
                f"{module.in_features:,} numbers that {pixels_text(image_size)} images leave it; a network that "
                "pools them, such as --arch resnet18, or a smaller --image-size usually does better with less memory "
                "and time"
            )
    return None


def start_from_images(model: torch.nn.Module, loader: TrainLoader) -> None:
    """Pass training images to ``model.start_from_images``, if it has that method; the same on any number of ranks.

    The images are normalised, float32 (n, channels, h, w), on the CPU.
    """
    start: Any = getattr(model, "start_from_images", None)
    if start is not None:
        start(loader.first_images(START_IMAGES))


def synchronised(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Make ``model``'s batch norms normalise by the batches of all processes together. Raises ``UserError``."""
    if device.type != "cuda":
        raise UserError("--sync-bn needs GPUs: torch synchronises no batch norm on CPUs; remove the flag")
    if not any(module.__class__.__module__.startswith("timm.") for module in model.modules()):
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    import timm.layers

    return timm.layers.convert_sync_batchnorm(model)  # knows timm's norms with activations, too


def to_memory_format(args: Settings, model: torch.nn.Module, device: torch.device) -> bool:
    """Convert ``model`` to the memory format of ``--channels-last``; return True if that is channels-last."""
    chosen = args.model.channels_last == "on"
    if args.model.channels_last == "auto":
        chosen = channels_last_is_faster(model, device, resolve_amp(args.precision, device))
    if chosen:
        model.to(memory_format=torch.channels_last)  # in place
    return chosen


def channels_last_is_faster(model: torch.nn.Module, device: torch.device, amp: str) -> bool:
    """True if ``model`` trains faster in channels-last on ``device``; ``amp`` is 'off', 'fp16' or 'bf16'.

    On a CPU (2 cores, AVX-512, float32) it was never slower for a network with convolutions. Without channels-last, a
    step took 1.40 times as long for MobileNetV3-small (128 pixels), 1.13 for ResNet-50 (128), 1.10 for VGG-16 and
    ResNet-18 (32), 1.03 for conv2 and ConvNeXt-atto (128), 1.0 for ViT-tiny, whose only convolution is its stem. On a
    GPU, tensor cores prefer it in half precision (published: 1.26 for ResNet-18 to 1.47 for ResNet-50; not measured
    here); in float32 it is not known to help.
    """
    if not any(isinstance(module, torch.nn.Conv2d) for module in model.modules()):
        return False
    return device.type == "cpu" or amp != "off"


def _refuse_without_determinism(
    args: Settings, model: torch.nn.Module, data: Data, channels_last: bool, device: torch.device, training: bool
) -> None:
    """Raise ``UserError`` now if torch would refuse to compute the first step of a --deterministic run."""
    if args.run.deterministic:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        images = torch.zeros(2, *data.image_shape, device=device).contiguous(memory_format=layout)
        refuse_without_determinism(model, images, autocast(args.precision, device), training)


def read_weights(settings: ModelSettings) -> ResumePoint | None:
    """Read the checkpoint of ``--weights``, with its tensors; None without the flag. Raises ``UserError``."""
    if not settings.weights:
        return None
    path = Path(settings.weights)
    weights = ResumePoint(path, checkpoint.load(path), digest="")  # with the tensors in its state
    stored = checkpoint.dict_in(weights.state, "settings")
    for name in shaping("network"):
        if stored.get(name) is True and not getattr(settings, name):
            # The weights fit the network without the flag, which computes something else.
            raise UserError(f"--weights {weights.path}: was trained with {flag_of(name)}; give that flag, too")
    return weights


def trained_image_size(settings: ModelSettings, point: ResumePoint | None) -> Size | None:
    """Size of the images that the weights of a checkpoint or of --pretrained were trained on; None if nothing says."""
    if point is None and settings.pretrained:
        return preprocessing_of(settings.arch).preprocessing.image_size
    size = None if point is None else checkpoint.dict_in(point.state, "preprocessing").get("image_size")
    return (tuple(size) if isinstance(size, list) else size) if is_size(size) else None


def known_preprocessing(
    args: Settings, resume_point: ResumePoint | None, weights: ResumePoint | None, evaluates: bool = False
) -> KnownPreprocessing | None:
    """The preprocessing that the weights were trained with; None if neither the checkpoint nor the library states it.

    ``evaluates``: use the preprocessing with which a library's authors tested its weights, unless a size is given.
    """
    testing = evaluates and not (args.data.image_size or args.data.val_image_size)
    known_from = resume_point or weights
    if known_from is None:
        return preprocessing_of(args.model.arch, testing) if args.model.pretrained else None
    state, path = known_from.state, known_from.path
    values = state.get("preprocessing")
    if values is None and "format" not in state:
        return _assumed_preprocessing(args, path, testing)
    if not isinstance(values, dict) or "crop_pct" not in values:  # older than format 4
        return None
    older_shift = state.get("max_shift", OLDER_MAX_SHIFT) is not None
    known = KnownPreprocessing(Preprocessing.from_state(values, path), str(path), of_this_run=resume_point is not None)
    return known._replace(max_shift=OLDER_MAX_SHIFT) if known.of_this_run and older_shift else known


def _assumed_preprocessing(args: Settings, path: Path, testing: bool) -> KnownPreprocessing | None:
    """Preprocessing of the weights of ``--arch``'s library, assumed for weights that another program wrote to ``path``.

    None if the library has none, or none for square images; also for a data set of small images of one size, unless the
    last layer is new: weights with a last layer for its classes were trained with its own mean and deviation.
    """
    library, _ = locate(args.model.arch) or ("none", "")
    fixed_size = SPECS[args.data.dataname].fixed_size
    if library not in ("timm", "torchvision") or (fixed_size and not args.model.new_head):
        return None
    try:
        known = preprocessing_of(args.model.arch, testing)
        return known._replace(source=f"{known.source}, assumed for {path}")
    except UserError:
        return None
