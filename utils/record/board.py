"""TensorBoard's summaries besides points: a row in the table of runs, charts of several tags, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

ALWAYS = 1e-7  # torch's and TensorBoard's least count, against division by zero


def hyperparameters(settings: Mapping[str, Any]) -> Summary:
    """The run's row in the HPARAMS table. ``settings``: text, numbers, booleans.

    The row is part of the run itself; ``SummaryWriter.add_hparams`` would add a second run inside it. TensorBoard takes
    columns and metrics from the runs that it shows, and puts settings in which these differ first.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo()
    for name, value in settings.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = value
    content = plugin_data_pb2.HParamsPluginData(session_start_info=start, version=metadata.PLUGIN_DATA_VERSION)
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString())
    value = Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=SummaryMetadata(plugin_data=plugin))
    return Summary(value=[value])


def layout(charts: Mapping[str, Mapping[str, Sequence[str]]]) -> Summary:
    """Layout of the CUSTOM SCALARS page. ``charts``: each chart's tags (regular expressions), by category and title."""
    from torch.utils.tensorboard import summary

    return summary.custom_scalars(
        {
            category: {title: ["Multiline", list(tags)] for title, tags in its_charts.items()}
            for category, its_charts in charts.items()
        }
    )


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
