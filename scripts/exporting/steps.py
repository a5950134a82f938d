"""Steps of an export: refuse what a format cannot hold, write it, quantise it, check it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from scripts.common.answers import FIGURES
from scripts.common.choice import Chosen, settings_of
from scripts.common.predictions import Predictions, predict_split
from scripts.exporting import checking, onnx_files, writers
from scripts.exporting.card import loading
from scripts.exporting.formats import FORMATS
from scripts.exporting.images import to_calibrate_on
from scripts.exporting.reload import in_batches
from scripts.exporting.subject import Subject, figures_of
from utils.config import plugins
from utils.config.settings import UserError


def refuse_other_networks(name: str, subject: Subject) -> None:
    """Raise ``UserError`` if format ``name`` is for another library's networks, or cannot describe this one."""
    arch = subject.loaded.arch
    if arch in plugins.added("network") and not FORMATS[name].holds_code:
        advice = "use --to onnx or torch-export"
        raise UserError(f"--to {name}: {arch} is in a --plugin file, and weights alone would need it; {advice}")
    if name not in ("timm", "torchvision"):
        return
    advice = "use --to onnx, torch-export or safetensors"
    if subject.library != name:
        owner = "this repository" if subject.library == "own" else subject.library
        raise UserError(f"--to {name}: {arch} is a network of {owner}; {advice}")
    try:
        _ = subject.arguments
    except UserError as error:
        raise UserError(f"--to {name}: {error.mistakes[0]}; {advice}") from error


def write(name: str, subject: Subject, path: Path, images: torch.Tensor) -> None:
    """Write the files of format ``name``, with the weights in ``path``. ``images``: valid example inputs."""
    if name == "onnx":
        onnx_files.write_onnx(subject, path, images)
    elif name == "torch-export":
        writers.write_torch_export(subject, path, images)
    else:
        writers.OF_WEIGHTS[name](subject, path)


def quantise(how: str, subject: Subject, path: Path, count: int, chosen: Chosen) -> tuple[str, ...]:
    """Quantise the ONNX file ``path``; return lines about the loss of accuracy and the saving.

    ``count``: number of training images to calibrate on, if ``how`` is 'static'. ``chosen``: the images to score on.
    """
    if how == "static":
        calibration = to_calibrate_on(subject.loaded, chosen.datapath, count)
        origin = f"calibrated on {len(calibration):,} training images"
    else:  # dynamic: an image's answer depends on the other images in its batch
        calibration = None
        data = settings_of(subject.loaded, chosen).data
        origin = f"in batches of {data.val_batch_size or data.batch_size:,}"
    in_float = score(subject, path, chosen)
    bytes_before = path.stat().st_size
    onnx_files.quantise(path, how, subject, calibration)
    in_8_bits = score(subject, path, chosen)
    same = 100 * subject.loaded.reading.same(in_8_bits.logits, in_float.logits).double().mean().item()
    before = in_float.report
    after = in_8_bits.report
    onnx_files.replace_metadata(path, {"validation": {**figures_of(after), "same_answer_as_float": same}})
    return (
        f"{how} quantisation: the same answer for {same:.2f} %, {FIGURES[before.HEADLINE]} {before.headline:.2f} % "
        f"before and {after.headline:.2f} % after, loss {before.loss:.4f} and {after.loss:.4f}, "
        f"on {after.count:,} validation images, {origin}",
        f"{in_words(bytes_before)} before and {in_words(path.stat().st_size)} after",
    )


def score(subject: Subject, path: Path, chosen: Chosen) -> Predictions:
    """Validate an ONNX file on all ``chosen`` images, in onnxruntime, and return its predictions."""
    settings = {**subject.loaded.settings, "fp32_layers": None}  # the file has no such layers
    network = dataclasses.replace(subject.loaded, network=onnx_files.OnnxNetwork(path, subject), settings=settings)
    return predict_split(network, dataclasses.replace(chosen, device="cpu", amp="off", tta="none"))


def expected_outputs(subject: Subject, inputs: np.ndarray) -> np.ndarray:
    """Outputs of the network for ``inputs``, which an export must give."""

    def predict(part: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return subject.module(torch.from_numpy(part)).numpy()

    outputs = in_batches(predict, inputs)
    if not np.isfinite(outputs).all():
        raise UserError(f"{subject.loaded.path}: the network's own outputs are not finite; choose another checkpoint")
    return outputs


def check(name: str, subject: Subject, path: Path, images: torch.Tensor, quantised: bool = False) -> checking.Check:
    """Load the export with the weights in ``path`` in a fresh process, and compare. Raises ``ExportFailure``."""
    inputs = subject.inputs(images).numpy()
    if quantised:
        expected = in_batches(onnx_files.OnnxNetwork(path, subject).predict, inputs)
    else:
        expected = expected_outputs(subject, inputs)
    outputs = checking.reloaded(loading(name, subject, path.name), path.parent, inputs)
    source = "the 8-bit file that was scored" if quantised else "the network"
    return checking.compare(name, outputs, expected, subject, source)


def in_words(count: int) -> str:
    """``count`` bytes as text in MB or kB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
