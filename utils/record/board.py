"""Precision-recall curves for TensorBoard, from counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
