"""The model card: what the network is, what it was trained on, how good it is, and code that loads and uses it."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from scripts.common.trained import of_each_class
from scripts.exporting.checking import Check
from scripts.exporting.subject import Subject
from scripts.exporting.writers import METADATA, metadata_beside
from utils.data.images import levels
from utils.data.preprocessing import Preprocessing
from utils.record.metrics import cut_words, shows_top5

SHOWN_CLASSES = 1000
OF_TRAINING = ("epochs", "global_batch_size", "optimizer", "lr", "lr_policy", "weight_decay", "augment", "seed")


class Exported(NamedTuple):
    """What the card tells of an export. ``model``: the name of its file. ``quantised``: its lines on 8 bits."""

    subject: Subject
    name: str
    model: str
    check: Check
    source: str
    quantised: tuple[str, ...] = ()


def card(one: Exported) -> str:
    """The card in Markdown."""
    loaded = one.subject.loaded
    parts = [
        f"# {loaded.arch}, trained on {one.subject.data}",
        f"Classifies images into {len(loaded.classes)} classes.",
        "## Facts",
        _table(one),
        "## Input",
        _input(one.subject),
        "## How to use it",
        f"In the folder of this file, with {_packages(one)}:",
        f"```python\n{code(one)}```",
        "## Classes",
        _classes(loaded.classes),
    ]
    return "\n\n".join(parts) + "\n"


def _table(one: Exported) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(one))
    return f"| | |\n|---|---|\n{rows}"


def _facts(one: Exported) -> Iterator[tuple[str, str]]:
    subject = one.subject
    settings = one.subject.loaded.settings
    parameters = sum(parameter.numel() for parameter in subject.loaded.network.parameters())
    library = "its training repository" if subject.library == "own" else subject.library
    yield "network", f"{subject.loaded.arch}, of {library}; {parameters:,} parameters"
    yield "weights", subject.weights
    if settings.get("pretrained") or settings.get("weights"):
        origin = settings.get("weights") or f"{library}'s pretrained weights of {subject.loaded.arch}"
        yield "began from", f"{origin}, whose licence applies"
    trained = [f"{name.replace('_', ' ')} {_plain(settings[name])}" for name in OF_TRAINING if _is_set(settings, name)]
    yield "trained with", ", ".join(trained) or "unknown settings"
    yield "validation", _validation(subject)
    for line in one.quantised:
        yield "8 bits", line
    yield "checked", f"on {one.source}: {one.check}"
    yield "made with", f"torch {metadata.version('torch')}, Python {sys.version.partition(' ')[0]}"


def _is_set(settings: dict[str, object], name: str) -> bool:
    return settings.get(name) not in (None, [], ())


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _validation(subject: Subject) -> str:
    figures = subject.figures
    if figures is None:
        return "none in the checkpoint for exactly these weights"
    loss = "not finite" if figures["loss"] is None else f"{figures['loss']:.4f}"
    top5 = f"top-5 {figures['top5']:.2f} %, " if shows_top5(len(subject.loaded.classes)) else ""
    amp, tta, cut = (figures.get(name) for name in ("amp", "tta", "max_val_batches"))
    in_half = f", in {amp}, while exports compute in float32" if amp else ""
    with_views = f", with test-time augmentation {tta}, which is not exported" if tta else ""
    doubts = "".join(f"; doubtful: {doubt}" for doubt in figures.get("doubts", ()))
    return (
        f"top-1 {figures['top1']:.2f} %, {top5}loss {loss} over {figures['count']:,} images"
        f"{cut_words(cut)}, after epoch {figures['epoch']}{in_half}{with_views}{doubts}"
    )


def _classes(classes: tuple[str, ...]) -> str:
    lines = [f"{number}. {' '.join(name.split())}" for number, name in enumerate(classes[:SHOWN_CLASSES])]
    if len(classes) > SHOWN_CLASSES:
        lines.append(f"\nand {len(classes) - SHOWN_CLASSES:,} more, which the file names")
    return "In the order of the outputs:\n\n" + "\n".join(lines)


# ------------------------------------------------------------------------------------------- the input


def _input(subject: Subject) -> str:
    shown = subject.loaded.preprocessing
    (channels, size, _) = subject.shape
    colour = "grey" if channels == 1 else "red, green, blue"
    mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (shown.mean, shown.std))
    steps = ["Rotate the image as its EXIF orientation says; make it " + ("grey." if channels == 1 else "RGB.")]
    if shown.pixel_range is not None:
        low, high = shown.pixel_range
        steps.append(f"Map numbers of more than 8 bits: {low:g} to 0, {high:g} to 255, all beyond cut off.")
    steps += list(_resizing(shown))
    normalise = f"Divide by 255, subtract the mean ({mean}) and divide by the standard deviation ({std})."
    if subject.inside:
        kind = f"uint8 ({channels} channel{'s' * (channels > 1)}: {colour})"
        after = "The file itself normalises and gives probabilities: pass bytes from 0 to 255. It does not resize."
    else:
        kind = f"float32 ({channels} channel{'s' * (channels > 1)}: {colour})"
        after = "The outputs are logits; their softmax gives the probabilities."
        steps.append(normalise)
    if line := of_each_class(subject.loaded):
        after += f" The network {line}."
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    return f"Images (n, {channels}, {size}, {size}), {kind}, for any n. As in validation:\n\n{numbered}\n\n{after}"


def _resizing(shown: Preprocessing) -> Iterator[str]:
    size = shown.val_image_size
    how = shown.interpolation
    target = resized_side(shown)
    if shown.stored_size:
        yield f"The images of the data set have {shown.stored_size} pixels a side; resize others to that (bilinear)."
        if target != shown.stored_size:
            yield f"Resize to {target} x {target} pixels ({how})."
    else:
        what = {
            "center": "the shorter side, keeping the shape,",
            "squash": "both sides",
            "border": "the longer side, keeping the shape,",
        }[shown.crop_mode]
        yield f"Resize {what} to {target} pixels ({how}, with antialiasing, as Pillow does)."
    if shown.crop_mode == "border" and not shown.stored_size:
        yield f"Put the middle onto {size} x {size} pixels of the mean colour."
    elif target != size or (shown.crop_mode == "center" and not shown.stored_size):
        yield f"Keep the middle {size} x {size} pixels."


def resized_side(shown: Preprocessing) -> int:
    """The side in pixels that images are resized to before the middle is cropped; see ``View``."""
    return max(1, math.floor(shown.val_image_size / shown.crop_pct))


# ------------------------------------------------------------------------------------------- the code


def _packages(one: Exported) -> str:
    names = {"onnx": "numpy, onnxruntime and pillow", "timm": "timm", "torchvision": "torchvision"}
    return names.get(one.name, "torch, numpy and pillow") + (
        " and the training repository as the first folder of PYTHONPATH" if one.name == "safetensors" else ""
    )


def code(one: Exported) -> str:
    """A program that classifies ``image.jpg``."""
    if one.name == "timm":
        shown = one.subject.loaded.preprocessing
        return _TIMM.format(opening=opening(shown), colour=shown.colour)
    imports, load, run = {
        "onnx": (_ONNX_IMPORTS, _ONNX, 'outputs = session.run(None, {"images": prepare("image.jpg")})[0][0]'),
        "torch-export": (_TORCH_IMPORTS, _TORCH_EXPORT, _RUN_TORCH),
        "safetensors": (_SAFETENSORS_IMPORTS, _SAFETENSORS, _RUN_TORCH),
        "torchvision": (_TORCHVISION_IMPORTS, _TORCHVISION, _RUN_TORCH),
    }[one.name]
    beside = metadata_beside(Path(one.model)).name
    values = {
        '"MODEL"': json.dumps(one.model),
        '"BESIDE"': json.dumps(beside),
        "METADATA": METADATA,
        "NAME": one.subject.name,
    }
    load = re.sub("|".join(values), lambda found: values[found[0]], load)  # at once: a file may be called NAME
    shown = one.subject.loaded.preprocessing
    result = _PROBABILITIES if one.subject.inside else _SOFTMAX
    return f"{imports}\n{load}\n\n{preparation(shown, one.subject.inside)}\n\n\n{run}\n{result}"


def preparation(shown: Preprocessing, inside: bool) -> str:
    """The source of ``prepare(path)``: an image file into the network's input, with Pillow and NumPy alone.

    Its pixels are Pillow's, from which those of validation differ by a level or two where an image is resized.
    """
    size = shown.val_image_size
    target = resized_side(shown)
    lines = [opening(shown), "", "", "def prepare(path):", f'    image = opened(path).convert("{shown.colour}")']
    how = f"Image.Resampling.{shown.interpolation.upper()}"
    if shown.stored_size:
        lines.append(f"    image = image.resize(({shown.stored_size}, {shown.stored_size}), Image.Resampling.BILINEAR)")
        if target != shown.stored_size:
            lines.append(f"    image = image.resize(({target}, {target}), {how})")
    elif shown.crop_mode == "squash":
        lines.append(f"    image = image.resize(({target}, {target}), {how})")
    elif shown.crop_mode == "center":
        lines.append("    shorter = min(image.size)")
        lines.append(f"    image = image.resize([int({target} * side / shorter) for side in image.size], {how})")
    else:
        lines.append(f"    ratio = max(image.size) / {target}")
        lines.append(f"    image = image.resize([max(1, round(side / ratio)) for side in image.size], {how})")
    lines += list(_middle(shown, size, target))
    lines.append(f"    pixels = np.array(image).reshape({size}, {size}, {shown.channels})")
    if inside:
        lines.append("    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])")
    else:
        mean = list(shown.mean)
        std = list(shown.std)
        lines.append(f"    pixels = (pixels / np.float32(255) - np.float32({mean})) / np.float32({std})")
        lines.append("    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])")
    return "\n".join(lines)


def _middle(shown: Preprocessing, size: int, target: int) -> Iterator[str]:
    """The lines that keep the middle ``size`` pixels square; see ``View``."""
    if shown.crop_mode == "border" and not shown.stored_size:
        level = tuple(round(255 * mean) for mean in shown.mean)
        colour = level[0] if len(level) == 1 else level
        yield f'    canvas = Image.new("{shown.colour}", ({size}, {size}), {colour})'
        yield f"    room = [{size} - side for side in image.size]"
        yield "    left, top = [space // 2 if space > 0 else -round(-space / 2) for space in room]"
        yield "    canvas.paste(image, (left, top))"
        yield "    image = canvas"
    elif target != size or (shown.crop_mode == "center" and not shown.stored_size):
        yield f"    left, top = [round((side - {size}) / 2) for side in image.size]"
        yield f"    image = image.crop((left, top, left + {size}, top + {size}))"


def opening(shown: Preprocessing) -> str:
    """The source of ``opened(path)``: an image file, upright and with 8 bits, as ``decoding.open_image`` reads it."""
    if shown.pixel_range is None:
        return _OPENED
    parts = (levels.is_deep, levels.raw_mode, levels.other_order, levels.numbers_of, levels.to_8_bits)
    sources = "\n\n".join(inspect.getsource(part) for part in parts)
    return f"{_IN_RANGE_IMPORTS}\n\n{sources}\n\n{_OPENED_IN_RANGE.format(*shown.pixel_range)}"


_OPENED = """def opened(path):
    file = Image.open(path)
    image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM")):
        # 16 bits, of which Pillow would show almost all as white.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F" or (image.mode == "I" and not 0 <= np.min(image) <= np.max(image) <= 255):
        raise ValueError(f"{path}: its levels have no known range; save it with 8 or 16 bits")
    return image"""
_IN_RANGE_IMPORTS = """import sys
from typing import BinaryIO"""
_OPENED_IN_RANGE = """def opened(path):
    file = Image.open(path)
    numbers = numbers_of(file, path)
    if numbers is not None:
        return Image.fromarray(to_8_bits(numbers, ({0!r}, {1!r})))
    image = ImageOps.exif_transpose(file)
    if image.mode == "I":  # 16 bits of a PPM file, which says their range
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image"""
_ONNX_IMPORTS = """import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
"""
_ONNX = """session = onnxruntime.InferenceSession("MODEL")
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
"""
_TORCH_IMPORTS = """import json

import numpy as np
import torch
from PIL import Image, ImageOps
"""
_TORCH_EXPORT = """extra = {"METADATA": ""}
network = torch.export.load("MODEL", extra_files=extra).module()
classes = json.loads(extra["METADATA"])["classes"]
"""
_SAFETENSORS_IMPORTS = """import json

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import load_file

from models import build_model
from models.load import shape_of
"""
_SAFETENSORS = """with safe_open("MODEL", framework="pt") as file:
    metadata = {name: json.loads(text) for name, text in file.metadata().items()}
classes, shown = metadata["classes"], metadata["preprocessing"]
settings = shape_of(metadata["arch"], metadata)
network = build_model(settings, classes=len(classes), channels=shown["channels"], image_size=shown["image_size"])
network.load_state_dict(load_file("MODEL"))
network.eval()
"""
_TORCHVISION_IMPORTS = """import json

import numpy as np
import torch
import torchvision
from PIL import Image, ImageOps
"""
_TORCHVISION = """with open("BESIDE", encoding="utf-8") as file:
    metadata = json.load(file)
classes = metadata["classes"]
network = torchvision.models.get_model("NAME", weights=None, **metadata["arguments"])
network.load_state_dict(torch.load("MODEL", weights_only=True))
network.eval()
"""
_RUN_TORCH = """with torch.inference_mode():
    outputs = network(torch.from_numpy(prepare("image.jpg")))[0].numpy()"""
_PROBABILITIES = """probabilities = outputs
best = int(probabilities.argmax())
print(classes[best], float(probabilities[best]))
"""
_SOFTMAX = """probabilities = np.exp(outputs - outputs.max())
probabilities /= probabilities.sum()
best = int(probabilities.argmax())
print(classes[best], float(probabilities[best]))
"""
_TIMM = """import numpy as np
import timm
import torch
from PIL import Image, ImageOps

network = timm.create_model("local-dir:.", pretrained=True).eval()
classes = network.pretrained_cfg["label_names"]
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=network))


{opening}


image = opened("image.jpg").convert("{colour}")
with torch.inference_mode():
    probabilities = network(transform(image)[None]).softmax(1)[0]
best = int(probabilities.argmax())
print(classes[best], float(probabilities[best]))
"""
