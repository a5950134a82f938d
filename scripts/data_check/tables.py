"""Text, tables and files about an inspected data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from scripts.common.command_line import table
from scripts.common.label_answers import count_together
from scripts.common.output import write_csv, write_text
from scripts.data_check.findings import Findings, counts_of
from scripts.data_check.survey import HASH_BYTES, WORDS, Inspected, Survey, hexadecimal
from utils.config.spelling import counted, printable

SHOWN_DAMAGED = 20
SHOWN_PAIRS = 10
SHOWN_CLASSES = 16  # if there are more classes, only the largest and smallest are shown
COLUMNS = ("path", "split", "class", "width", "height", "mode", "format", "sha256", "pixel_hash", "problem")


def verdict(survey: Survey, findings: Findings) -> str:
    """First line of the report: whether there are faults, and of which kinds."""
    if not findings.faults:
        return f"verdict: no faults in {counted(len(survey))}"
    kinds: Counter[str] = Counter()
    for fault in findings.faults:
        kinds[fault.kind] += fault.count
    counts = ", ".join(f"{count:,} {kind}" if count else kind for kind, count in kinds.items())
    return f"verdict: FAULTS among {counted(len(survey))}: {counts}"


def finding_lines(findings: Findings) -> list[str]:
    """Lines of faults and notes."""
    lines = ["Findings", *(f"- {fault}" for fault in findings.faults)] if findings.faults else ["Findings: none"]
    if findings.notes:
        lines += ["", "Notes", *(f"- {note}" for note in findings.notes)]
    return lines


def damage_lines(survey: Survey, damage: dict[int, str]) -> str:
    """First damaged images with the reason, one line each; '' if there are none."""
    if not damage:
        return ""
    lines = [f"{survey.name(index)}: {damage[index]}" for index in sorted(damage)[:SHOWN_DAMAGED]]
    more = len(damage) - len(lines)
    return "\n".join(["Damaged images", *lines, *([f"... and {more:,} more in damaged.txt"] if more else [])])


def class_table(survey: Survey) -> str:
    """Table of the images per class and split, largest class first; one line if all classes have the same counts."""
    counts = counts_of(survey)
    if all(len(set(row)) == 1 for row in counts):
        return f"Class balance: each of the {len(survey.classes):,} classes has {split_counts(counts[:, 0])} images"
    order = sorted(range(len(survey.classes)), key=lambda label: (-counts[0][label], survey.classes[label]))
    rows = [[printable(survey.classes[label]), *(f"{row[label]:,}" for row in counts)] for label in order]
    if len(rows) > SHOWN_CLASSES:
        half = SHOWN_CLASSES // 2
        rows = [*rows[:half], [f"... {len(rows) - SHOWN_CLASSES:,} more", *[""] * len(counts)], *rows[-half:]]
    rows.append(["largest / smallest", *(_ratio(row) for row in counts)])
    return table(("class", *WORDS.values())[: 1 + len(counts)], rows)


def split_counts(counts: Iterable[int]) -> str:
    """Numbers of images of the splits in words, such as '40 training and 16 validation'."""
    *most, last = (f"{count:,} {kind}" for count, kind in zip(counts, WORDS.values(), strict=False))
    return f"{', '.join(most)} and {last}"


def _ratio(counts: np.ndarray) -> str:
    return f"{counts.max() / counts.min():.2f}" if counts.min() else "-"


def size_table(known: np.ndarray) -> str:
    """Table of widths and heights of the readable images; one line if all have the same size."""
    if not len(known):
        return "Sizes: no image can be decoded"
    sizes = len(np.unique(np.stack([known["width"], known["height"]]), axis=1).T)
    if sizes == 1:
        return f"Sizes: all images are {known['width'][0]}x{known['height'][0]}"
    sides = (("width", known["width"]), ("height", known["height"]))
    rows = [[name, *(f"{value:,.0f}" for value in (side.min(), np.median(side), side.max()))] for name, side in sides]
    return table((f"{sizes:,} sizes", "min", "median", "max"), rows)


def kind_table(known: np.ndarray) -> str:
    """Table of formats and modes of the readable files, most frequent first."""
    pairs = Counter(zip(known["format"].tolist(), known["mode"].tolist(), strict=True))
    rows = [[kind.decode(), mode.decode(), f"{count:,}"] for (kind, mode), count in pairs.most_common()]
    return table(("format", "mode", "images"), rows)


def label_tables(survey: Survey) -> list[str]:
    """Tables of the number of labels per image, of missing labels, and of the most frequent label pairs."""
    lines = []
    for split, indices in survey.ranges.items():
        labels = survey.labels[indices]
        known = labels[(labels >= 0).any(1)]
        if not len(known):
            continue
        counts = (known == 1).sum(1)
        missing = f"{100 * (labels < 0).mean():.1f} % missing"
        lines.append(
            f"Labels in {WORDS[split]}: {counts.mean():.2f} an image ({counts.min()} to {counts.max()}), "
            f"{counted(int((known == 0).all(1).sum()))} with none, {missing}"
        )
    together = count_together(survey.labels[survey.ranges["train"]] == 1)
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
    pairs = [f"Labels together in training{more}\n{table(heads, rows)}"] if rows else []
    return ["\n".join(lines), *pairs]


# ---------------------------------------------------------------------------------------------- files


def write_files(folder: Path, report: str, survey: Survey, inspected: Inspected, findings: Findings) -> None:
    """Write ``report.txt``, ``images.csv`` and ``damaged.txt`` (path, tab and reason per line)."""
    damaged = sorted(inspected.damage.items())
    write_text(folder / "report.txt", report + "\n")
    write_text(folder / "damaged.txt", "".join(f"{survey.paths[one]}\t{why}\n" for one, why in damaged))
    rows = (_csv_row(survey, index, record, findings) for index, record in enumerate(inspected.records))
    write_csv(folder / "images.csv", rows, COLUMNS)


def _csv_row(survey: Survey, index: int, record: np.void, findings: Findings) -> dict[str, object]:
    sha256, pixel_hash, width, height, mode, kind, _ = record.item()
    cells = [
        survey.name(index) if survey.paths is None else survey.paths[index],
        survey.split_of(index),
        survey.label_of(index),
        width or "",
        height or "",
        mode.decode(),
        kind.decode(),
        hexadecimal(sha256, 32),
        hexadecimal(pixel_hash, HASH_BYTES),
        "; ".join(findings.problems.get(index, ())),
    ]
    return dict(zip(COLUMNS, cells, strict=True))
