"""Writers of each format's files, except ONNX (see ``onnx_files.py``)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from scripts.exporting.formats import FORMATS
from scripts.exporting.subject import Subject
from utils.config.settings import UserError
from utils.config.spelling import reason_of

METADATA = "metadata.json"  # name inside a torch.export file


def write_torch_export(subject: Subject, path: Path, images: torch.Tensor) -> None:
    """Write a torch.export file for batches of any size, with the metadata inside."""
    program = exported(subject, images, "torch-export")
    content = io.BytesIO()  # torch's own writer of files aborts the process on a full disk
    torch.export.save(program, content, extra_files={METADATA: json.dumps(subject.metadata)})
    path.write_bytes(content.getbuffer())


def exported(subject: Subject, images: torch.Tensor, name: str) -> torch.export.ExportedProgram:
    """The network's computation for batches of any size. Raises ``UserError`` if torch cannot trace it."""
    inputs = subject.inputs(images[:2] if len(images) > 1 else torch.cat([images, images]))
    batch = ({0: torch.export.Dim("batch", min=1)},)
    try:
        program = torch.export.export(subject.module, (inputs,), dynamic_shapes=batch)
    except Exception as error:  # torch raises many kinds of errors
        raise cannot(name, subject, error) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of this machine
    return program


def cannot(name: str, subject: Subject, error: Exception) -> UserError:
    """Error for a network that torch cannot export."""
    return UserError(
        f"--to {name}: torch cannot export {subject.loaded.arch} ({reason_of(error)}); try --to safetensors"
    )


def write_safetensors(subject: Subject, path: Path) -> None:
    """Write the weights under their names, with metadata, whose entries are JSON strings."""
    from safetensors.torch import save_file

    metadata = {name: json.dumps(value) for name, value in subject.metadata.items()}
    save_file(_weights(subject), path, metadata=metadata)


def write_timm(subject: Subject, path: Path) -> None:
    """Write the safetensors file ``path``, and beside it the ``config.json`` from which timm builds the network."""
    from safetensors.torch import save_file

    save_file(_weights(subject), path, metadata={"format": "pt"})
    text = json.dumps(timm_config(subject), indent=2)
    (path.parent / "config.json").write_text(text + "\n", encoding="utf-8")


def timm_config(subject: Subject) -> dict[str, Any]:
    """Content of timm's ``config.json``: architecture, arguments, classes, and preprocessing."""
    network = subject.loaded.network
    shown = subject.loaded.preprocessing
    facts = subject.metadata
    kept = ("weights", "validation", "temperature", "divided_by_temperature", *subject.reading.facts)
    of_network = {name: network.pretrained_cfg.get(name) for name in ("fixed_input_size", "first_conv", "classifier")}
    return {
        "architecture": subject.name,
        "num_classes": len(subject.loaded.classes),
        "num_features": network.num_features,
        "label_names": list(subject.loaded.classes),
        "model_args": subject.arguments,
        "pretrained_cfg": {
            **{name: value for name, value in of_network.items() if value is not None},
            "custom_load": False,
            "num_classes": len(subject.loaded.classes),
            "input_size": list(subject.shape),
            "mean": list(shown.mean),
            "std": list(shown.std),
            "interpolation": shown.interpolation,
            "crop_pct": shown.crop_pct,
            # images of a data set with one size are made that size, whatever their shape
            "crop_mode": "squash" if shown.stored_size else shown.crop_mode,
        },
        "training": {key: facts[key] for key in kept if key in facts},
    }


def write_torchvision(subject: Subject, path: Path) -> None:
    """Write a state dict, and the metadata, which it cannot hold, beside it."""
    torch.save(_weights(subject), path)
    text = json.dumps({**subject.metadata, "arguments": subject.arguments}, indent=2)
    metadata_beside(path).write_text(text + "\n", encoding="utf-8")


def metadata_beside(path: Path) -> Path:
    """Path of the metadata file beside the state dict ``path``."""
    return path.with_suffix(FORMATS["torchvision"].beside)


def _weights(subject: Subject) -> dict[str, torch.Tensor]:
    """State dict whose tensors each have their own memory, as safetensors requires."""
    return {name: value.detach().clone().contiguous() for name, value in subject.loaded.network.state_dict().items()}


OF_WEIGHTS = {"safetensors": write_safetensors, "timm": write_timm, "torchvision": write_torchvision}
