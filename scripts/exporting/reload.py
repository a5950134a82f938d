"""Load an export as its model card does, in a separate process, and predict.

``python -m scripts.exporting.reload FOLDER``, in the export's folder, runs FOLDER/load.py, the beginning of the card's
program, on FOLDER/inputs.npy, and writes FOLDER/outputs.npy. No code of this repository takes part, except that it
builds the network for a safetensors file, which holds only weights. ``scripts/exporting/checking.py`` starts it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: str) -> None:
    """Save the outputs for the inputs. If there are none, exits with the reason in one line."""
    try:
        loaded = runpy.run_path(f"{folder}/load.py")
        outputs = in_batches(predict_of(loaded), np.load(f"{folder}/inputs.npy", allow_pickle=False))
    except Exception as error:  # each library raises its own kinds of errors
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    np.save(f"{folder}/outputs.npy", outputs, allow_pickle=False)


def predict_of(names: dict[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    """A function that gives the outputs of what the program has loaded, by the ``names`` of its variables.

    Raises ``ValueError`` if a weight of the network differs from that in a safetensors file, which timm converts.
    """
    if "session" in names:
        return lambda inputs: names["session"].run(None, {"images": inputs})[0]
    import torch
    from safetensors.torch import load_file

    network = names["network"]
    for file in Path().glob("*.safetensors"):
        saved = load_file(file)
        taken = network.state_dict()
        if saved.keys() != taken.keys() or not all(torch.equal(saved[name], taken[name]) for name in saved):
            raise ValueError("not all weights are loaded as they are")

    def predict(inputs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return network(torch.from_numpy(inputs)).numpy()

    return predict


def in_batches(predict: Callable[[np.ndarray], np.ndarray], inputs: np.ndarray) -> np.ndarray:
    """Outputs for ``inputs`` (n, ...), in batches of 1, 2, 3, 16, 16 ...: an export for a single size would fail."""
    edges = [edge for edge in (1, 3, *range(6, len(inputs), 16)) if edge < len(inputs)]
    return np.concatenate([predict(part) for part in np.split(inputs, edges)])


if __name__ == "__main__":
    main(sys.argv[1])
