"""What tests need not compute anew: each changes what the program takes longer for than some tests train.

TensorBoard's checksums are computed in C, not in a loop of Python. The repository's commit is asked for once. Matrices
of few classes are drawn with a sixteenth of their pixels. Nothing waits until the disk has it: no test cuts the power.
"""

import functools
import os

import google_crc32c
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from utils.record import provenance
from utils.record.pictures import drawing

pywrap_tensorflow.crc32c = google_crc32c.value
provenance._git = functools.cache(provenance._git)
drawing.FINE = 1
os.fsync = lambda descriptor: None
