"""Lack of memory is told apart from other errors, and the program says what needs less."""

import pytest
import torch

from main import main
from models.small import OWN
from scripts.common.timing import failure_of
from tests.helpers import QUIETLY
from utils.runtime.memory import lacks_memory, out_of_memory

OF_A_GPU = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which ..."


def test_memory_that_a_cpu_refuses_is_a_lack_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert lacks_memory(caught.value) and failure_of(caught.value, compiled=False) == "out of memory"
    assert out_of_memory(caught.value) == f"out of memory (tried to allocate {2**60:,} bytes)"


@pytest.mark.gpu
def test_memory_that_a_gpu_refuses_is_a_lack_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert lacks_memory(caught.value) and out_of_memory(caught.value).startswith("out of memory (tried to allocate ")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError(OF_A_GPU), "out of memory (tried to allocate 20.00 MiB)"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out of memory"),
        (MemoryError(), "out of memory"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_each_kind_of_lack_of_memory_has_words(error, words):
    assert lacks_memory(error) and out_of_memory(error) == words


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), ValueError("ALLOC_FAILED")])
def test_another_error_is_none(error):
    assert not lacks_memory(error)


class Full(torch.nn.Linear):
    """A network whose forward pass needs more memory than there is, in training or in validation."""

    where = "training"

    def __init__(self, classes, channels, image_size):
        super().__init__(channels * image_size**2, classes)

    def forward(self, images):
        if len(images) > 1 and self.training == (self.where == "training"):  # one image probes the network
            raise torch.OutOfMemoryError(OF_A_GPU)
        return super().forward(images.flatten(1))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("training", ": a smaller --batch-size needs less; with --global-batch-size and a larger --accumulate"),
        ("validation", " in validation: lower --val-batch-size\n"),
    ],
)
def test_a_training_that_does_not_fit_is_one_line_that_says_what_needs_less(
    where, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(OWN, "full", Full)
    monkeypatch.setattr(Full, "where", where)
    assert main([*QUIETLY, "--arch", "full", "--max-steps", "1", "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line.startswith(f"main.py: out of memory (tried to allocate 20.00 MiB){words}")
