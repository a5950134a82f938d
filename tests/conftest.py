"""What holds for all tests."""

import os

# The tests' tensors are small: several threads would wait for each other for longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
