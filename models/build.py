"""``build_model``: a network by name, from our own, then timm's, then torchvision's.

Importing timm and torchvision takes longer than a small network's first epoch, so they are imported only for their own
networks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from models.hub import reaching, timm_name
from models.initialisation import initialise
from models.layers import blur_before_strides
from models.options import OF_PLUGIN, constructor_of, options_of
from models.small import OWN
from utils.config import hub_networks, plugins
from utils.config.groups.model import ModelSettings
from utils.config.image_size import Size, pixels_text, sides, size_text
from utils.config.other_programs import other_programs
from utils.config.settings import UserError, flag_of, shaping
from utils.config.spelling import or_nearest, reason_of
from utils.optim.head import begin_head

WITH_EXTRA_HEADS = ("googlenet", "inception_v3")  # torchvision's, whose second heads are for training alone
SMALL_IMAGE = 64  # up to this many pixels, a residual network begins with a 3x3 stem and no max-pool


def build_model(
    settings: ModelSettings, *, classes: int, channels: int, image_size: Size, stem_size: Size | None = None
) -> nn.Module:
    """Build the network that ``settings`` name, for images of ``channels`` and ``image_size``.

    ``stem_size``: the size of the images that its weights were trained on, which then decides on the stem
    (``stem_line``).

    Own networks come before timm's, and those before torchvision's of the same name, unless the name begins with
    ``timm/`` or ``torchvision/``. Randomly initialised weights depend on torch's global seed. Raises ``UserError`` for
    an unknown name, or a network that does not fit the images.
    """
    mistake = unknown_arch(settings.arch)
    if mistake:
        raise UserError(mistake)
    library, name = located(settings.arch)
    try:
        if library == "own":
            if settings.pretrained:
                raise UserError(f"--pretrained: there are no pretrained weights of {name}")
            own = OWN.get(name) or plugins.added("network")[name]
            model = own(classes, channels, image_size, **_options_of_own(settings, own))
            if isinstance(own, plugins.Entry):
                _check_own(model, own)
        else:
            build = _timm if library == "timm" else _torchvision
            with reaching(published_as(settings.arch)[1]) if settings.pretrained else nullcontext():
                model = build(name, settings, classes, channels, image_size)
            if library == "timm" and _takes_small_stem(model, stem_size or image_size):
                _small_stem(model)
    except UserError:
        raise
    except Exception as error:  # the libraries raise many kinds of errors; a network we cannot build is bad input
        reason = reason_of(error, with_file=True)
        if settings.pretrained and isinstance(error, OSError):  # the hub's and urllib's errors are such, too
            raise UserError(
                f"--pretrained: the weights of {settings.arch} could not be fetched ({reason}); fetch "
                f"{published_as(settings.arch)[0]} elsewhere and give it with --weights FILE --new-head"
            ) from error
        raise UserError(
            f"--arch {settings.arch}: cannot be built for {pixels_text(image_size)} images ({reason})"
        ) from error
    begins_trained = settings.pretrained or settings.weights is not None
    if (settings.new_head and begins_trained) or (settings.pretrained and classes_of(settings.arch) != classes):
        begin_head(model)
    initialise(model, settings.init)
    if settings.blur_pool:
        blur_before_strides(model)
    check_forward(settings.arch, model, classes=classes, channels=channels, image_size=image_size)
    return model


def _options_of_own(settings: ModelSettings, own: Callable[..., nn.Module]) -> dict[str, Any]:
    if not isinstance(own, plugins.Entry):
        return options_of(settings, lambda: own)
    return options_of(settings, lambda: own, dict(zip(inspect.signature(own).parameters, OF_PLUGIN, strict=False)))


def classes_of(arch: str) -> int:
    """Number of classes of the pretrained weights' last layer; 0 if they have none."""
    library, name = located(arch)
    if library == "torchvision":
        return len(torchvision_weights(name).meta["categories"])
    import timm

    config = timm.get_pretrained_cfg(name)
    return 0 if config is None else config.num_classes


def torchvision_weights(name: str) -> Any:
    """The newest torchvision weights of the network ``name``."""
    import torchvision

    return torchvision.models.get_model_weights(name).DEFAULT


def published_as(arch: str) -> tuple[str, str]:
    """The place where ``arch``'s library publishes its weights: as text, and as the address to connect to.

    Both are empty for weights in a file.
    """
    library, name = located(arch)
    if library == "torchvision":
        return (torchvision_weights(name).url,) * 2
    import timm
    from huggingface_hub import constants

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is not None and config.hf_hub_id:
        return f"model.safetensors of {config.hf_hub_id} from the Hugging Face Hub", constants.ENDPOINT
    url = str((config and config.url) or "")
    return url, url


def unknown_arch(arch: str) -> str | None:
    """Error message, with the nearest names, if there is no network ``arch``; otherwise None."""
    if arch in plugins.added("network"):
        return _taken(arch)
    if locate(arch) is not None:
        return None
    library, _, bare = arch.rpartition("/")
    import timm

    names = {"timm": timm.list_models(), "torchvision": _torchvision_names()}
    known = names.get(library) or [*OWN, *plugins.added("network"), *names["timm"], *names["torchvision"]]
    if bare.lower().startswith("yolo"):
        return f"--arch '{arch[:60]}': {other_programs().programs['ultralytics'].instead['model']}"
    hint = or_nearest(bare.lower(), known, f"own networks: {', '.join(OWN)}")
    return f"--arch '{arch[:60]}': no own, timm or torchvision network has this name; {hint}"


def _taken(arch: str) -> str | None:
    """Error message if a network of a user's file has the name of another one; otherwise None."""
    import timm

    own = plugins.added("network")[arch]
    if arch in OWN or timm.is_model(arch) or arch in _torchvision_names():
        return f"--plugin {own.file}: there is a network {arch} already; choose another name"
    return None


def _check_own(model: Any, own: plugins.Entry) -> None:
    """Raise ``UserError`` unless the function ``own`` of a user's file has returned a network that can train."""
    if not isinstance(model, nn.Module):
        raise UserError(f"{own.where} must return a torch.nn.Module, not {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{own.where} has no parameter that trains")


def locate(arch: str) -> tuple[str, str] | None:
    """The library ('own', 'timm', 'torchvision') that has ``arch``, and the name there; None if none has it."""
    if hub_networks.is_of_hub(arch):
        return "timm", timm_name(arch)
    prefix, slash, bare = arch.partition("/")
    if slash and prefix not in ("timm", "torchvision"):
        return None
    if arch in OWN or arch in plugins.added("network"):
        return "own", arch
    import timm

    if slash:
        has = timm.is_model(bare) if prefix == "timm" else bare in _torchvision_names()
        return (prefix, bare) if has else None
    if timm.is_model(arch):
        return "timm", arch
    return ("torchvision", arch) if arch in _torchvision_names() else None


def located(arch: str) -> tuple[str, str]:
    """Library and name as ``locate`` returns them, for an ``arch`` that is known to exist."""
    place = locate(arch)
    assert place is not None, arch
    return place


def _torchvision_names() -> list[str]:
    import torchvision

    return torchvision.models.list_models(module=torchvision.models)


def _timm(name: str, settings: ModelSettings, classes: int, channels: int, image_size: Size) -> nn.Module:
    import timm

    options = options_of(settings, lambda: constructor_of(lambda: timm.create_model(name)))
    own: dict[str, Any] = {"pretrained": settings.pretrained, "num_classes": classes, "in_chans": channels}
    create = partial(timm.create_model, name, **{**_of_hub(settings.arch), **own, **options})
    if _has_fixed_size(name, image_size):
        with suppress(TypeError):  # the class takes no size
            return create(img_size=image_size)
    return create()


def _of_hub(arch: str) -> dict[str, Any]:
    """Arguments that a repository of the Hub gives its network; {} for a library's own.

    Those of timm's ``create_model`` itself are left out: they name files to load, for example.
    """
    import timm

    arguments = (hub_networks.known(arch) or {}).get("arguments", {})
    of_timm = inspect.signature(timm.create_model).parameters
    return {name: value for name, value in arguments.items() if name not in of_timm}


def _takes_small_stem(model: nn.Module, image_size: Size) -> bool:
    return is_timm_resnet(model) and max(sides(image_size)) <= SMALL_IMAGE


def is_timm_resnet(model: nn.Module) -> bool:
    """True if ``model`` is a ResNet of timm's, whose stem depends on its images (``stem_line``)."""
    timm = sys.modules.get("timm")  # without it, the network is of another library
    return timm is not None and isinstance(model, timm.models.ResNet)


def stem_line(model: nn.Module, image_size: Size, trained_size: Size | None) -> str:
    """Describe the stem of ``model`` and why ``image_size`` led to it; '' if the stem does not depend on image size.

    ``trained_size``: the size of the images that its weights were trained on, if known.
    """
    if not is_timm_resnet(model):
        return ""
    if small := max(sides(image_size)) <= SMALL_IMAGE:
        text = (
            f"3x3 without max-pool, as for all training images of at most {SMALL_IMAGE} pixels a side; larger ones get "
            "timm's own, with which the network computes about a fifteenth"
        )
    else:
        text = f"timm's own, as for all training images of more than {SMALL_IMAGE} pixels; others get a 3x3 one"
    if trained_size and (max(sides(trained_size)) <= SMALL_IMAGE) != small:
        shown = size_text(trained_size)
        text += f". The weights to begin with were trained with that other one, on images of {shown} pixels"
    return text


def constructor_arguments(
    settings: ModelSettings, model: nn.Module, *, classes: int, channels: int, image_size: Size
) -> dict[str, Any]:
    """Arguments, besides the name, with which timm's or torchvision's factory makes the same network.

    ``model`` is the one that ``build_model`` made with the same settings. Raises ``UserError`` for a network that no
    arguments of its library describe: our own, and those that were changed for small or grey images or by a setting.
    """
    library, name = located(settings.arch)
    for other in shaping("network"):
        if getattr(settings, other) is True:
            flag = flag_of(other)
            raise UserError(f"{settings.arch} was trained with {flag}, which no argument of its library describes")
    if library == "own":
        raise UserError(f"{settings.arch} is a network of this repository, which neither timm nor torchvision has")
    arguments = {**_of_hub(settings.arch), "num_classes": classes, **options_of(settings, lambda: type(model).__init__)}
    if library == "timm":
        if _takes_small_stem(model, image_size):
            raise UserError(
                f"{settings.arch} for {pixels_text(image_size)} images has a 3x3 stem without max-pool, which no "
                "argument of timm's describes"
            )
        takes_size = "img_size" in inspect.signature(type(model).__init__).parameters
        size = {"img_size": image_size} if takes_size and _has_fixed_size(name, image_size) else {}
        return {**arguments, "in_chans": channels, **size}
    if channels != 3:
        seen = "grey images" if channels == 1 else f"images of {channels} channels"
        raise UserError(f"{settings.arch} was given a first convolution for {seen}, which torchvision cannot make")
    without_extra_heads = {"aux_logits": False, "init_weights": False} if name in WITH_EXTRA_HEADS else {}
    return {**arguments, **_size_argument(name, image_size), **without_extra_heads}


def small_stem_replaces_convolution(model: nn.Module, image_size: Size) -> bool:
    """True if ``build_model`` gave ``model`` a first convolution that pretrained weights do not fit."""
    return _takes_small_stem(model, image_size) and isinstance(model.conv1, nn.Conv2d)


def _has_fixed_size(name: str, image_size: Size) -> bool:
    """True if timm's network ``name`` (a vision transformer) is built for one image size, other than ``image_size``."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return bool(config and config.fixed_input_size and tuple(config.input_size[-2:]) != sides(image_size))


def _small_stem(model: nn.Module) -> None:
    """Replace the stem by a 3x3 convolution of stride 1, no max-pool: He et al.'s CIFAR stem (2015, section 4.2)."""
    if isinstance(model.conv1, nn.Conv2d):
        old = model.conv1
        model.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, stride=1, padding=1, bias=old.bias is not None)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm initialises ResNets
    else:  # a deep stem is three 3x3 convolutions already
        first = model.get_submodule("conv1.0")
        assert isinstance(first, nn.Conv2d)
        first.stride = (1, 1)
    model.maxpool = nn.Identity()


def _torchvision(name: str, settings: ModelSettings, classes: int, channels: int, image_size: Size) -> nn.Module:
    import torchvision

    pretrained = settings.pretrained
    extra = options_of(settings, lambda: constructor_of(lambda: torchvision.models.get_model(name, weights=None)))
    extra |= _size_argument(name, image_size)
    if name in WITH_EXTRA_HEADS:
        extra |= {"aux_logits": pretrained, "init_weights": not pretrained}
    if pretrained:  # the weights come with ImageNet's classes
        model = torchvision.models.get_model(name, weights="DEFAULT", **extra)
        if name in WITH_EXTRA_HEADS:
            model.aux_logits = False
            model.aux1 = None
            model.aux2 = None
            model.AuxLogits = None
            # The network of a checkpoint is then the same without --pretrained; models/starting_weights.py compensates.
            model.transform_input = False
        _fit_last_layer(model, classes)
    else:
        model = torchvision.models.get_model(name, weights=None, num_classes=classes, **extra)
    if channels != 3:
        _fit_first_convolution(model, channels, keeps=pretrained or channels == 1)
    return model


def _size_argument(name: str, image_size: Size) -> dict[str, Size]:
    """Size argument of torchvision's vision transformers; {} for others. Raises ``UserError`` if it is not square."""
    if name.startswith("vit_") and not isinstance(image_size, int):
        raise UserError(
            f"--arch torchvision/{name} takes square images only, not {size_text(image_size)}; timm's vision "
            "transformers take others"
        )
    return {"image_size": image_size} if name.startswith("vit_") else {}


def _fit_last_layer(model: nn.Module, classes: int) -> None:
    """Begin the last layer (linear, or SqueezeNet's 1x1 convolution) anew if its number of classes differs."""
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1]
    if classes == len(last.weight):
        return
    setattr(last, "out_features" if isinstance(last, nn.Linear) else "out_channels", classes)
    last.weight = nn.Parameter(last.weight.new_empty(classes, *last.weight.shape[1:]))
    if last.bias is not None:  # MaxViT's has none
        last.bias = nn.Parameter(last.weight.new_empty(classes))
    last.reset_parameters()


@torch.no_grad()
def _fit_first_convolution(model: nn.Module, channels: int, keeps: bool) -> None:
    """Give the first convolution other ``channels`` than RGB; if it ``keeps`` its weights, adapt them as timm does.

    For grey images the weights are summed over the colours: the network answers as the library's does on grey images in
    three equal channels. Otherwise they are repeated, and scaled by 3 over the number of channels.
    """
    from timm.models import adapt_input_conv

    layer = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    of_colours = layer.weight
    bias = None if layer.bias is None else layer.bias.clone()
    layer.in_channels = channels
    layer.weight = nn.Parameter(of_colours.new_empty(layer.out_channels, channels, *layer.kernel_size))
    layer.reset_parameters()
    if keeps:
        layer.weight.copy_(adapt_input_conv(channels, of_colours))
    if layer.bias is not None and bias is not None:
        layer.bias.copy_(bias)


@torch.no_grad()
def check_forward(
    arch: str, model: nn.Module, *, classes: int, channels: int, image_size: Size, flag: str = "--image-size"
) -> None:
    """Raise ``UserError`` if one image does not pass through the network in evaluation mode.

    ``flag``: the flag that sets ``image_size``.
    """
    model.eval()
    own = plugins.added("network").get(arch)
    what = f"network {arch} at {flag} {size_text(image_size)}"
    try:
        # A library's network that fails here mostly needs another size; a user's own mostly has a mistake.
        with plugins.mistakes_of(own.file, what) if own else nullcontext():
            output = model(torch.zeros(1, channels, *sides(image_size)))
    except UserError:
        raise
    except Exception as error:  # as in build_model
        reason = plugins.mistake(error) or reason_of(error, with_file=True)
        raise UserError(
            f"--arch {arch} does not take {pixels_text(image_size)} images ({reason}); try another {flag}"
        ) from error
    finally:
        model.train()
    given = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if given != (1, classes):
        raise UserError(f"--arch {arch} gives {given} where a classifier gives (1, {classes})")
