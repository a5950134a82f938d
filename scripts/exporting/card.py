"""Model card: what the network is, what it was trained on, how good it is, and code that loads and uses it."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from scripts.common.answers import FIGURES
from scripts.common.output import filled
from scripts.common.runs import plan_of
from scripts.common.trained import of_each_class
from scripts.exporting.subject import Subject
from scripts.exporting.writers import METADATA, metadata_beside
from utils.config import hub_networks
from utils.config.image_size import Size, enlarged, sides, size_of
from utils.config.settings import as_text
from utils.data.images import levels
from utils.data.preprocessing import Preprocessing
from utils.record.metrics import cut_words, shows_top5

TEMPLATE = Path(__file__).with_name("template")
SHOWN_CLASSES = 1000
RESIZED_SIDE = {
    "center": "the shorter side, keeping the shape,",
    "squash": "both sides",
    "border": "the longer side, keeping the shape,",
}
RESIZED_BOX = {
    "center": "the image, keeping its shape, until it just covers",
    "squash": "to",
    "border": "the image, keeping its shape, until it just fits into",
}
PACKAGES = {
    "onnx": "numpy, onnxruntime and pillow",
    "timm": "timm",
    "torchvision": "torchvision",
    "safetensors": "torch, numpy and pillow and the training repository as the first folder of PYTHONPATH",
}
# rows of the run's plan about how the network was trained
OF_PLAN = (
    *("Augmentation", "Mixing", "Sampling", "Training size", "Batch", "Steps", "Loss", "Teacher", "Optimizer"),
    *("Clipping", "Learning rate", "Weight average", "Precision", "Seed", "Selection"),
)
OF_TRAINING = ("epochs", "global_batch_size", "optimizer", "lr", "lr_policy", "weight_decay", "augment", "seed")


def card(name: str, subject: Subject, model: str, check: str, quantised: Sequence[str] = ()) -> str:
    """Text, in Markdown, of the card of the file ``model``, which has the format ``name``.

    ``check``: text about the check of the export. ``quantised``: lines about 8-bit quantisation.
    """
    return filled(
        TEMPLATE / "card.jinja",
        subject=subject,
        facts=list(_facts(subject, check, quantised)),
        steps=list(_steps(subject)),
        of_each_class=of_each_class(subject.loaded),
        packages=PACKAGES.get(name, "torch, numpy and pillow"),
        code=code(name, subject, model),
        shown_classes=SHOWN_CLASSES,
    )


def _facts(subject: Subject, check: str, quantised: Sequence[str]) -> Iterator[tuple[str, str]]:
    settings = subject.loaded.settings
    parameters = sum(parameter.numel() for parameter in subject.loaded.network.parameters())
    library = "its training repository" if subject.library == "own" else subject.library
    yield "network", f"{subject.loaded.arch}, of {library}; {parameters:,} parameters"
    yield "weights", subject.weights
    if settings.get("pretrained") or settings.get("weights"):
        origin = settings.get("weights") or f"{library}'s pretrained weights of {subject.loaded.arch}"
        yield "began from", f"{origin}, whose licence applies"
    plan = plan_of(subject.loaded.path)
    if not plan:  # a checkpoint outside a run's folder, or a run that did not keep its plan
        given = {name: settings.get(name) for name in OF_TRAINING}
        known = [(name.replace("_", " "), as_text(value)) for name, value in given.items() if value not in (None, [])]
        yield "trained with", ", ".join(map(" ".join, known)) or "unknown settings"
    for title in (title for title in OF_PLAN if title in plan):
        yield title.lower(), plan[title]
    yield "validation", _validation(subject)
    if subject.temperature is not None:
        who = "the file divides" if subject.divided else "the file holds weights alone, and the code below divides"
        fitted = f"{subject.loaded.confidence.fitted}{_with_views(subject.loaded.confidence.tta)}"
        yield "calibration", f"{fitted}; {who} the logits by it"
    for line in quantised:
        yield "8 bits", line
    yield "checked", check
    yield "made with", f"torch {metadata.version('torch')}, Python {sys.version.partition(' ')[0]}"


def _with_views(tta: str) -> str:
    return "" if tta == "none" else f", with test-time augmentation {tta}, which is not exported"


def _validation(subject: Subject) -> str:
    figures = subject.figures
    if figures is None:
        return "none in the checkpoint for exactly these weights"
    loss = "not finite" if figures["loss"] is None else f"{figures['loss']:.4f}"
    hidden = () if shows_top5(len(subject.loaded.classes)) else ("top5",)
    found = [
        (words, figures[name])
        for name, words in FIGURES.items()
        if figures.get(name) is not None and name not in hidden
    ]
    shares = "".join(f"{words} {value:.2f} %, " for words, value in found)
    amp, tta, cut = (figures.get(name) for name in ("amp", "tta", "max_val_batches"))
    in_half = f", in {amp}, while exports compute in float32" if amp else ""
    divided = ", without the temperature" if figures.get("without_temperature") else ""
    favoured = "; these images chose the weights, which favours the figures" if subject.loaded.is_favoured else ""
    doubts = "".join(f"; doubtful: {doubt}" for doubt in figures.get("doubts", ()))
    return (
        f"{shares}loss {loss} over {figures['count']:,} images"
        f"{cut_words(cut)}, in epoch {figures['epoch']}{in_half}{_with_views(tta or 'none')}{divided}{favoured}{doubts}"
    )


def _steps(subject: Subject) -> Iterator[str]:
    """Sentences on the steps from an image to the network's input."""
    shown = subject.loaded.preprocessing
    made = {1: "grey", 3: "RGB"}.get(shown.channels, f"an array of {shown.channels} channels")
    yield f"Rotate the image as its EXIF orientation says; make it {made}."
    if shown.levels == "all":
        yield "Keep numbers of more than 8 bits as floats from 0 to 255 (those of 16 bits divided by 257)."
    if shown.pixel_range is not None:
        low, high = shown.pixel_range
        yield f"Map numbers of more than 8 bits: {low:g} to 0, {high:g} to 255, all beyond cut off."
    yield from _resizing(shown)
    if not subject.inside:
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (shown.mean, shown.std))
        yield f"Divide by 255, subtract the mean ({mean}) and divide by the standard deviation ({std})."


def _resizing(shown: Preprocessing) -> Iterator[str]:
    size = by(shown.val_image_size)
    how = shown.interpolation
    target = by(resized_size(shown))
    if shown.stored_size:
        stored = f"{shown.stored_size} pixels a side" if isinstance(shown.stored_size, int) else by(shown.stored_size)
        yield f"The images of the data set have {stored}; resize others to that (bilinear)."
        if resized_size(shown) != shown.stored_size:
            yield f"Resize to {target} pixels ({how})."
    elif isinstance(shown.val_image_size, int):
        side = resized_size(shown)
        yield f"Resize {RESIZED_SIDE[shown.crop_mode]} to {side} pixels ({how}, with antialiasing, as Pillow does)."
    else:
        yield f"Resize {RESIZED_BOX[shown.crop_mode]} {target} pixels ({how}, with antialiasing, as Pillow does)."
    if goes_onto_canvas(shown):
        yield f"Put the middle onto {size} pixels of the mean colour."
    elif is_cropped(shown):
        yield f"Keep the middle {size} pixels."


def by(size: Size) -> str:
    """A size as text: height x width."""
    return " x ".join(map(str, sides(size)))


def resized_size(shown: Preprocessing) -> Size:
    """Size that images are resized to before the middle is cropped; see ``View``."""
    return size_of(*enlarged(shown.val_image_size, shown.crop_pct))


def code(name: str, subject: Subject, model: str) -> str:
    """Source of a program that classifies ``image.jpg`` with the export of format ``name`` in the file ``model``."""
    shown = subject.loaded.preprocessing
    return filled(
        TEMPLATE / "code.jinja",
        loading=loading(name, subject, model),
        format=name,
        shown=shown,
        stored=stored_sides(shown),
        reading=subject.reading,
        inside=subject.inside,
        temperature=None if subject.divided else subject.temperature,
        opened=opening(shown),
        preparation=preparation(shown, subject.inside),
        is_array=levels.is_array(shown.colour),
        image="image.npy" if levels.is_array(shown.colour) else "image.jpg",
    )


def loading(name: str, subject: Subject, model: str) -> str:
    """Beginning of ``code``: source that loads the export of format ``name`` from its folder and file ``model``."""
    return filled(
        TEMPLATE / "load.jinja",
        format=name,
        model=json.dumps(model),
        beside=json.dumps(metadata_beside(Path(model)).name),
        metadata=METADATA,
        name=subject.name,
        of_hub=hub_networks.is_of_hub(subject.loaded.arch),
        is_array=levels.is_array(subject.loaded.preprocessing.colour),
    ).rstrip("\n")


def preparation(shown: Preprocessing, inside: bool) -> str:
    """Source of ``prepare(path)``, which turns an image file into the network's input with only Pillow and NumPy.

    ``inside``: the export includes preprocessing. Pillow's pixels may differ from those of validation by a level or two
    if an image is resized.
    """
    level = shown.border
    return filled(
        TEMPLATE / "prepare.jinja",
        shown=shown,
        inside=inside,
        height=sides(shown.val_image_size)[0],
        width=sides(shown.val_image_size)[1],
        stored=stored_sides(shown),
        target=sides(resized_size(shown))[::-1],
        resampling=f"Image.Resampling.{shown.interpolation.upper()}",
        onto_canvas=goes_onto_canvas(shown),
        cropped=is_cropped(shown),
        level=level[0] if len(level) == 1 and not levels.is_array(shown.colour) else level,
        is_array=levels.is_array(shown.colour),
        opened=opening(shown),
    ).rstrip("\n")


def stored_sides(shown: Preprocessing) -> tuple[int, int] | None:
    """Width and height of the data set's images, to which others are resized first; None if these differ in size."""
    return None if shown.stored_size is None else sides(shown.stored_size)[::-1]


def goes_onto_canvas(shown: Preprocessing) -> bool:
    """True if the middle of an image is put onto a canvas of the mean colour; see ``View``."""
    return shown.crop_mode == "border" and not shown.stored_size


def is_cropped(shown: Preprocessing) -> bool:
    """True if, without a canvas, only the middle of a resized image is kept; see ``View``."""
    return resized_size(shown) != shown.val_image_size or (shown.crop_mode == "center" and not shown.stored_size)


def opening(shown: Preprocessing) -> str:
    """Source of ``opened(path)``, which reads an image file upright and in 8 bits, as ``decoding.open_image`` does."""
    parts = (levels.is_deep, levels.raw_mode, levels.other_order, levels.numbers_of, levels.scaled, levels.to_8_bits)
    is_array = levels.is_array(shown.colour)
    return filled(
        TEMPLATE / "opened.jinja", shown=shown, is_array=is_array, sources="\n\n".join(map(inspect.getsource, parts))
    ).rstrip("\n")
