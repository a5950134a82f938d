"""ONNX files: write them, quantise them to 8 bits, and run them."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from scripts.exporting.checking import ExportFailure
from scripts.exporting.subject import Subject
from scripts.exporting.writers import cannot, exported
from utils.config.settings import UserError

INPUT = "images"
MOST_BYTES = 1_900_000_000  # protobuf's limit is 2 GiB, for graph and weights together
# In other layers 8 bits save little time and cost accuracy, most of all in the probabilities.
QUANTISED = ["Conv", "Gemm", "MatMul"]
LARGEST_INT16 = 2**15 - 1


def write_onnx(subject: Subject, path: Path, images: torch.Tensor) -> None:
    """Write one file for batches of any size, with metadata, whose entries are JSON strings.

    ``images``: valid example inputs. Raises ``UserError`` if the network is too large for one file or cannot be
    exported.
    """
    import onnx

    weights = sum(value.nbytes for value in subject.module.state_dict().values())
    if weights > MOST_BYTES:
        raise UserError(
            f"--to onnx: {subject.loaded.arch} has {weights / 1e9:.1f} GB of weights, and one ONNX file holds 2 GB; "
            "use --to torch-export"
        )
    program = exported(subject, images, "onnx")
    try:
        with quiet():
            model = torch.onnx.export(
                program, dynamo=True, input_names=[INPUT], output_names=[subject.output], verbose=False
            ).model_proto
    except Exception as error:  # torch and onnxscript raise many kinds of errors
        raise cannot("onnx", subject, error) from error
    _clean(model)
    _save(model, path, subject.metadata)
    onnx.checker.check_model(str(path), full_check=True)


def _clean(model: Any) -> None:
    """Name the batch dimension, and remove export notes: this machine's paths, and shapes that quantising changes."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
        del value.metadata_props[:]
    for part in (*model.graph.node, *model.graph.initializer, model.graph):
        part.doc_string = ""
        del part.metadata_props[:]
    del model.graph.value_info[:]


def _save(model: Any, path: Path, metadata: dict[str, Any]) -> None:
    import onnx

    texts = {name: json.dumps(value) for name, value in metadata.items()}
    onnx.helper.set_model_props(model, texts)
    onnx.save(model, path)


def quantise(path: Path, how: str, subject: Subject, calibration: torch.Tensor | None) -> None:
    """Replace the ONNX file ``path`` by one whose large layers compute in 8 bits.

    ``how``: 'dynamic' measures the range of a layer's inputs in each batch; 'static' fixes it now, with the normalised
    images ``calibration`` (n, c, h, w), from the means of the batches' lowest and highest values, since one odd image's
    extremes would make the steps coarse for all others. Raises ``ExportFailure`` if processors could answer
    differently; see ``largest_pair``.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

    target = path.with_suffix(".int8.onnx")
    batches = ({INPUT: subject.inputs(part).numpy()} for part in (() if calibration is None else calibration.split(32)))
    with quiet():
        if how == "dynamic":
            # Unsigned like the inputs: such products are exact on all processors, without one bit less for weights.
            quantize_dynamic(path, target, weight_type=QuantType.QUInt8, op_types_to_quantize=QUANTISED)
        else:
            quantize_static(
                path,
                target,
                SimpleNamespace(get_next=lambda: next(batches, None)),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=QUANTISED,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                reduce_range=True,
                extra_options={"CalibMovingAverage": True},
            )
    model = onnx.load(target)
    target.unlink()
    if not any(node.op_type.startswith(("Quantize", "DynamicQuantize")) for node in model.graph.node):
        raise UserError(f"--quantise {how}: {subject.loaded.arch} has no layer that it quantises; leave it out")
    if largest_pair(model) > LARGEST_INT16:
        raise ExportFailure(f"two products of the 8-bit {subject.loaded.arch} may exceed 16 bits: onnxruntime's fault")
    _save(model, path, {**subject.metadata, "validation": None, "quantised": how})  # its metrics are not known yet


def replace_metadata(path: Path, entries: dict[str, Any]) -> None:
    """Replace ``entries`` of the metadata in the ONNX file ``path``."""
    import onnx

    model = onnx.load(path)
    metadata = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    _save(model, path, {**metadata, **entries})


def largest_pair(model: Any) -> int:
    """Upper bound on the sum of two products of an unsigned and a signed 8-bit number in ``model``.

    Processors without VNNI add two such products in 16 bits (vpmaddubsw), which saturates above ``LARGEST_INT16``;
    others add in 32 bits. Which products meet is up to the library, so the bound assumes the two largest. Signed are
    the weights, and inputs declared as signed. Products of two unsigned numbers are exact on all processors, since not
    even one would fit 16 bits.
    """
    from onnx import TensorProto, numpy_helper

    zero_points = {name for node in model.graph.node if node.op_type == "QuantizeLinear" for name in node.input[2:]}
    signed = [one for one in model.graph.initializer if one.data_type == TensorProto.INT8]
    inputs = [128 for one in signed if one.name in zero_points]
    weights = [np.abs(numpy_helper.to_array(one).astype(int)).max(initial=0) for one in signed]
    return 2 * 255 * int(max([*inputs, *weights], default=0))


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which torch and onnxruntime do not log advice about a network that the user did not write."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class OnnxNetwork(nn.Module):
    """The ONNX file of ``subject`` as a network that turns normalised float32 images into logits, on the CPU."""

    def __init__(self, path: Path, subject: Subject) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.subject = subject

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Outputs of the file for ``inputs``, given in its own input format."""
        return self.session.run(None, {INPUT: np.ascontiguousarray(inputs)})[0]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = torch.from_numpy(self.predict(self.subject.inputs(images.float().cpu()).numpy()))
        return self.subject.loaded.reading.logits(outputs) if self.subject.inside else outputs
