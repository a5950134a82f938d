"""What holds for all tests."""

import os
import signal

import pytest

# The tests' tensors are small: several threads would wait for each other for longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For deterministic algorithms on a GPU; torch may read it once, at the first matrix product of any test.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# A shell's & has its commands ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    """Tests with the mark ``gpu`` need a GPU; ``pytest -m gpu`` runs these alone."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
