"""Load an export with the library that it is for, in a separate process, and predict.

``python -m scripts.exporting.reload REQUESTS`` reads a JSON list of objects: ``to``, the format; ``path``, the file or
folder; ``inputs`` and ``outputs``, names of NumPy files. No code of this repository takes part, except that it builds
the network for a safetensors file, which holds only weights. ``scripts/exporting/checking.py`` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

WHY_NOT = ".txt"  # ending, added to the name of the outputs, of a file with the reason

Predict = Callable[[np.ndarray], np.ndarray]


def main(requests: str) -> None:
    """Compute each request's outputs for its inputs, in batches of several sizes; save them, or why there are none."""
    with open(requests, encoding="utf-8") as file:
        several = json.load(file)
    for asked in several:
        inputs = np.load(asked["inputs"], allow_pickle=False)
        try:
            outputs = in_batches(LOADERS[asked["to"]](asked["path"], asked), inputs)
        except Exception as error:  # each library raises its own kinds of errors
            with open(asked["outputs"] + WHY_NOT, "w", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {' '.join(str(error).split())}")
        else:
            np.save(asked["outputs"], outputs, allow_pickle=False)


def in_batches(predict: Predict, inputs: np.ndarray) -> np.ndarray:
    """Outputs for ``inputs`` (n, ...), in batches of 1, 2, 3, 16, 16 ...: an export for a single size would fail."""
    edges = [edge for edge in (1, 3, *range(6, len(inputs), 16)) if edge < len(inputs)]
    return np.concatenate([predict(part) for part in np.split(inputs, edges)])


def with_onnxruntime(path: str, _: dict[str, Any]) -> Predict:
    """Load an ONNX file with one input and one output."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (images,) = session.get_inputs()
    return lambda inputs: session.run(None, {images.name: inputs})[0]


def with_torch_export(path: str, _: dict[str, Any]) -> Predict:
    """Load a file written by torch.export."""
    import torch

    return _of_module(torch.export.load(path).module())


def with_safetensors(path: str, _: dict[str, Any]) -> Predict:
    """Load a safetensors file into the network of this repository that its metadata describes."""
    from safetensors import safe_open

    from models import build_model
    from models.load import shape_of
    from utils.data.preprocessing import Preprocessing

    with safe_open(path, framework="pt") as file:
        metadata = {name: json.loads(value) for name, value in file.metadata().items()}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    shown = metadata["preprocessing"]
    network = build_model(
        shape_of(metadata["arch"], metadata),
        classes=len(metadata["classes"]),
        channels=shown["channels"],
        image_size=Preprocessing.from_state(shown, path).image_size,
    )
    network.load_state_dict(weights, strict=True)
    return _of_module(network.eval())


def with_timm(path: str, _: dict[str, Any]) -> Predict:
    """Load a folder in timm's format. Raises ``ValueError`` if a weight in timm's network differs from the folder's."""
    import timm
    import torch
    from safetensors.torch import load_file

    network = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    saved = load_file(f"{path}/model.safetensors")
    taken = network.state_dict()
    if saved.keys() != taken.keys() or not all(torch.equal(saved[name], taken[name]) for name in saved):
        raise ValueError("timm does not load all weights as they are")
    return _of_module(network)


def with_torchvision(path: str, asked: dict[str, Any]) -> Predict:
    """Load a state dict into the network that ``asked`` names in torchvision's terms."""
    import torch
    import torchvision

    network = torchvision.models.get_model(asked["name"], weights=None, **asked["arguments"])
    network.load_state_dict(torch.load(path, weights_only=True), strict=True)
    return _of_module(network.eval())


def _of_module(network: Any) -> Predict:
    import torch

    def predict(inputs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return network(torch.from_numpy(inputs)).numpy()

    return predict


LOADERS = {
    "onnx": with_onnxruntime,
    "torch-export": with_torch_export,
    "safetensors": with_safetensors,
    "timm": with_timm,
    "torchvision": with_torchvision,
}

if __name__ == "__main__":
    main(sys.argv[1])
