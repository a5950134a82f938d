"""Several labels an image: how many there are, which are together, and which are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scripts.common.command_line import table
from utils.data.first_look import counted
from utils.data.formats.class_folders import printable, some

if TYPE_CHECKING:
    from scripts.data_check.findings import Findings
    from scripts.data_check.survey import Survey

SHOWN_PAIRS = 10
EXAMPLES = 3  # named in a line


def judge_labels(survey: Survey, findings: Findings) -> None:
    """Findings about images without a label, labels of which nothing can be learned, and labels that are one."""
    unknown = np.flatnonzero((survey.labels < 0).all(1))
    if len(unknown):
        named = some(map(survey.name, unknown[:EXAMPLES].tolist()), count=len(unknown))
        text = f"all labels are missing of {counted(len(unknown))}: {named}"
        findings.fault("no known label", len(unknown), text)
    empty = int(((survey.labels != 1).all(1) & (survey.labels == 0).any(1)).sum())
    if empty:
        findings.note("without labels", empty, f"{counted(empty)} with no label; they count as images of none")
    for split, labels in parts(survey).items():
        for kind, value in (("on no image", 1), ("on every image", 0)):
            names = [printable(survey.classes[one]) for one in np.flatnonzero(~(labels == value).any(0)).tolist()]
            if names and len(labels):
                hidden = "its figures do not exist" if split == "validation" else "nothing can be learned of it"
                text = f"{split} shows {some(names)} {kind} of which that is known; {hidden}"
                findings.note(f"labels {kind}", len(names), text)
    together = count_together(survey.labels)
    own = np.diagonal(together)
    same = [
        (one, two)
        for one, two in zip(*np.nonzero(np.triu(together > 0, 1)), strict=True)
        if together[one, two] == own[one] == own[two]
    ]
    if same:
        names = (" = ".join(printable(survey.classes[place]) for place in pair) for pair in same)
        text = f"always together, never alone: {some(names, count=len(same))}"
        findings.note("labels that are one", len(same), text)


def parts(survey: Survey) -> dict[str, np.ndarray]:
    """The labels of each split."""
    return {"training": survey.labels[: survey.training], "validation": survey.labels[survey.training :]}


def count_together(labels: np.ndarray) -> np.ndarray:
    """int64 (classes, classes): images that have both labels."""
    has = (labels == 1).astype(np.float64)
    return (has.T @ has).astype(np.int64)


def label_tables(survey: Survey) -> list[str]:
    """Tables of the number of labels an image, of missing ones, and of those most often together."""
    sections = []
    for split, labels in parts(survey).items():
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
