"""Summaries for TensorBoard: pictures, and precision-recall curves from counts."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

ALWAYS = 1e-7  # torch's and TensorBoard's least count, against division by zero


def precision_recall(tag: str, counts: np.ndarray) -> Summary:
    """Precision-recall curve of a class.

    ``counts``: int64 (2, thresholds), the numbers of samples by probability: of other classes (0), of this class (1).
    """
    from torch.utils.tensorboard import summary

    fp, tp = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    tn = fp[0] - fp
    fn = tp[0] - tp
    precision = tp / np.maximum(ALWAYS, tp + fp)
    recall = tp / np.maximum(ALWAYS, tp + fn)
    return summary.pr_curve_raw(tag, tp, fp, tn, fn, precision, recall, num_thresholds=counts.shape[1])


def picture(tag: str, pixels: np.ndarray) -> Summary:
    """Picture of ``pixels``, uint8 (h, w, 3).

    torch's ``summary.image`` scales them in float32 and compresses for as long again: twice the time for a matrix.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", compress_level=1)
    height, width, channels = pixels.shape
    image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=file.getvalue())
    return Summary(value=[Summary.Value(tag=tag, image=image)])
