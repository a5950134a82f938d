"""Multi-label data: how many labels there are, which occur together, and which are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scripts.common.command_line import table
from utils.config.spelling import printable

if TYPE_CHECKING:
    from scripts.data_check.survey import Survey

SHOWN_PAIRS = 10


def splits_of(survey: Survey) -> dict[str, np.ndarray]:
    """Labels of each split, by its name."""
    return {"training": survey.labels[: survey.training], "validation": survey.labels[survey.training :]}


def count_together(labels: np.ndarray) -> np.ndarray:
    """Number of images that have both labels of each pair, int64 (classes, classes)."""
    has = (labels == 1).astype(np.float64)
    return (has.T @ has).astype(np.int64)


def label_tables(survey: Survey) -> list[str]:
    """Tables of the number of labels per image, of missing labels, and of the most frequent label pairs."""
    sections = []
    for split, labels in splits_of(survey).items():
        if not len(labels):
            continue
        counts = (labels == 1).sum(1)
        missing = f"{100 * (labels < 0).mean():.1f} % missing"
        sections.append(
            f"Labels in {split}: {counts.mean():.2f} an image ({counts.min()} to {counts.max()}), "
            f"{int((counts == 0).sum()):,} images without any, {missing}"
        )
    together = count_together(survey.labels[: survey.training])
    first, second = np.nonzero(np.triu(together > 0, 1))
    order = np.argsort(-together[first, second], kind="stable")[:SHOWN_PAIRS]
    rows = []
    for one, two in zip(first[order].tolist(), second[order].tolist(), strict=True):
        both = together[one, two]
        rarer = min(together[one, one], together[two, two])
        names = [printable(survey.classes[place]) for place in (one, two)]
        rows.append([*names, f"{both:,}", f"{100 * both / rarer:.1f} %"])
    more = f" (not shown: {len(first) - len(rows):,} more pairs)" if len(first) > len(rows) else ""
    heads = ("label", "with", "images", "of the rarer")
    if rows:
        sections.append(f"Labels together in training{more}\n{table(heads, rows)}")
    return ["\n".join(sections[:-1]), sections[-1]] if rows else ["\n".join(sections)]
