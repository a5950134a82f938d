"""What holds for all tests."""

import os
import signal

# The tests' tensors are small: several threads would wait for each other for longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's & has its commands ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
