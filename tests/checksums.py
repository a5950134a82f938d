"""TensorBoard's checksums in C: it computes them in a loop of Python, for longer than some tests train."""

import google_crc32c
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

pywrap_tensorflow.crc32c = google_crc32c.value
