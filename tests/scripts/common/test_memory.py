"""Lack of memory, told apart from other errors."""

import pytest
import torch

from scripts.common.memory import enough_memory, lacks_memory
from scripts.common.timing import failure_of
from utils.config.settings import UserError


def test_memory_that_a_cpu_refuses_is_a_lack_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert lacks_memory(caught.value) and failure_of(caught.value, compiled=False) == "out of memory"
    assert failure_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), compiled=True) == ""


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("full"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_lack_of_memory_is_an_error_that_the_user_can_fix(error):
    line = "^--batch-size 8: there is not enough memory for so many images; lower it$"
    with pytest.raises(UserError, match=line), enough_memory("--batch-size 8"):
        raise error


def test_another_error_stays_what_it_is():
    with pytest.raises(ValueError, match="ALLOC_FAILED"), enough_memory("--batch-size 8"):
        raise ValueError("ALLOC_FAILED")
