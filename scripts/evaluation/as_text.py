"""Text of an evaluation, readable for ten classes and for a thousand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.common.command_line import table
from scripts.common.predictions import Predictions
from scripts.common.uncertainty import of_groups
from scripts.evaluation.comparison import Comparison
from scripts.evaluation.distance import Others
from scripts.evaluation.rejection import Rejection
from scripts.evaluation.summary import Temperature, class_rows, share_of_class, summary
from utils.config.spelling import printable, some
from utils.record.doubts import doubts_of
from utils.record.metrics import Bin, shows_top5

MOST_CLASSES = 20  # in a table; if there are more, only the worst are shown
MOST_COLUMNS = 10  # classes of a confusion matrix
COLUMN_LETTERS = 9  # of a class's name in the confusion matrix
LETTERS = 24  # of a class's name elsewhere
ROWS = 10  # of a table of the worst
IMAGES = 5  # rows of a table of images
SIGNIFICANT = 0.05


def heading(description: dict[str, Any], images: int) -> str:
    """Lines about the network, the images, and how the network was run on them."""
    of = description
    lines = [f"{of['checkpoint']}: {of['arch']}{', raw weights' if of['raw_weights'] else ''}"]
    views = "" if of["tta"] == "none" else f", test-time augmentation {of['tta']}"
    amp = "" if of["amp"] == "off" else f", in {of['amp']}"
    split = "" if of["dataname"] is None and of["split"] == "val" else f", {of['split']}"  # it may have no val/
    lines.append(f"{images:,} images: {of['dataname'] or of['datapath']}{split}{views}{amp}")
    favoured = of["chosen_by_these_images"]
    if favoured and of["compared_with"]:
        which = "them" if len(favoured) > 1 else "it"
        lines.append(f"chosen by the result on these images, which favours {which}: {' and '.join(favoured)}")
    elif favoured:
        lines.append(f"{Path(favoured[0]).name} was chosen by its result on these images, which favours it")
    if kept := of.get("kept"):
        lines.append(f"the checkpoint keeps: {kept['fitted']}")
        if kept["fitted_on_some_of_these_images"]:
            lines.append("fitted on some of these images, which favours loss, calibration and what is accepted here")
    return "\n".join(lines)


def overall(predictions: Predictions, _: dict[str, Any]) -> str:
    """Text of the metrics over all images."""
    of = summary(predictions)
    bootstrap, wilson = (_span(of[f"top1_interval_{kind}"]) for kind in ("bootstrap", "wilson"))
    rows = [
        (
            "top-1",
            f"{of['top1']:.2f} %",
            f"95 % interval {wilson} (Wilson), {bootstrap} (bootstrap){of_groups(predictions.groups)}",
        ),
        *([("top-5", f"{of['top5']:.2f} %", "")] if shows_top5(len(predictions.classes)) else []),
        ("loss", f"{of['loss']:.4f}", "cross entropy, without label smoothing"),
        ("macro precision", f"{of['macro_precision']:.2f} %", ""),
        ("macro recall", f"{of['macro_recall']:.2f} %", ""),
        ("macro F1", f"{of['macro_f1']:.2f} %", ""),
        ("balanced accuracy", f"{of['balanced_accuracy']:.2f} %", ""),
        ("calibration error", f"{of['calibration_error']:.2f} %", "expected, of 15 bins of equal width"),
    ]
    lines = metric_lines(rows)
    if of["not_a_number"]:
        lines.append(f"warning: for {of['not_a_number']:,} images the network gives NaN, which is wrong in top-1")
    if of["infinite"]:
        lines.append(
            f"warning: for {of['infinite']:,} images the network gives an infinite number, which --amp off may avoid; "
            "calibration leaves them out"
        )
    return "\n".join(lines)


def metric_lines(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """One line per metric: name, value, note."""
    return [f"{name:<18} {value:>9}  {note}".rstrip() for name, value, note in rows]


def doubts(predictions: Predictions, description: dict[str, Any]) -> list[str]:
    """Signs that the network has learned nothing, which makes its figures doubtful."""
    dataname = description["dataname"] or description["datapath"]
    return [*map(str, doubts_of(predictions.report, description["step"], dataname))]


def doubtful(predictions: Predictions, description: dict[str, Any]) -> list[str]:
    """Part of the report about ``doubts``; [] if there are none."""
    found = doubts(predictions, description)
    return ["\n".join(f"warning: doubtful: {doubt}" for doubt in found)] if found else []


def classes(predictions: Predictions, rest_is_in: str) -> str:
    """Table of all classes, or of the worst by F1. ``rest_is_in``: text saying where the others are found."""
    by_class = class_rows(predictions)
    shown = every = [n for n, row in enumerate(by_class) if row["images"] or row["predicted"]]
    title = "Classes"
    if len(every) > MOST_CLASSES:
        # Classes without images come last; that they are predicted at all shows in other rows.
        shown = sorted(every, key=lambda n: (not by_class[n]["images"], by_class[n]["f1"]))[:ROWS]
        title = f"The {ROWS} classes with the lowest F1 (not shown: {len(every) - ROWS:,} more{rest_is_in})"
    names = [short(name) for name in predictions.classes]
    most = {one.label: f"{names[one.predicted]} ({one.count})" for one in reversed(predictions.confusions)}
    rows = []
    for n in shown:
        row = by_class[n]
        percents = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("precision", "recall", "f1"))
        rows.append([names[n], f"{row['images']:,}", *percents, most.get(n, "-")])
    return f"{title}\n{table(['class', 'images', 'precision', 'recall', 'F1', 'mostly taken for'], rows)}"


def pairs(predictions: Predictions, rest_is_in: str) -> str:
    """Confusion matrix of a few classes; for many classes, the most frequent confusions."""
    names = [short(name) for name in predictions.classes]
    if len(names) <= MOST_COLUMNS:
        heads = [printable(name)[:COLUMN_LETTERS] for name in predictions.classes]
        rows = [[name, *map(str, row)] for name, row in zip(names, predictions.matrix().tolist(), strict=True)]
        return f"Confusion matrix (row: class, column: taken for)\n{table(['', *heads], rows)}"
    if not predictions.confusions:
        return "No class is taken for another"
    rows = []
    for one in predictions.confusions[:ROWS]:
        share = f"{share_of_class(predictions, one):.1f} %"
        rows.append([names[one.label], names[one.predicted], f"{one.count:,}", share])
    more = len(predictions.confusions) - len(rows)
    left_out = f" (not shown: {more:,} more pairs{rest_is_in})" if more else ""
    return f"Most frequent confusions{left_out}\n{table(['class', 'taken for', 'images', 'of the class'], rows)}"


def calibration(bins: Sequence[Bin], temperature: Temperature | None, counted: str = "images") -> str:
    """Text of the reliability table, whose bins hold what is ``counted``, and of what a temperature would change."""
    rows = []
    for one in bins:
        if one.images:
            percents = (f"{one.confidence:.2f}", f"{one.accuracy:.2f}", f"{one.confidence - one.accuracy:+.2f}")
            rows.append([f"{one.low:.2f} to {one.high:.2f}", f"{one.images:,}", *percents])
    lines = ["Calibration", table(["probability", counted, "mean %", "right %", "overconfident by"], rows)]
    if temperature is None:
        return "\n".join([*lines, "No temperature is fitted to so few images or groups"])
    fit = temperature
    lines += [
        f"Temperature {fit.temperature:.3f}, fitted on {fit.fitted_on_images:,} images drawn at random, which are not "
        f"scored. On the other {fit.scored_on_images:,}:",
        f"calibration error {fit.calibration_error_before:.2f} % without, {fit.calibration_error_after:.2f} % with it; "
        f"loss {fit.loss_before:.4f} and {fit.loss_after:.4f}",
    ]
    if temperature.at_limit:
        lines.append("warning: the fitted images determine no temperature, so this one means nothing")
    elif round(fit.loss_after - fit.loss_before, 4) > 0:  # by more than what is printed
        higher = round(fit.calibration_error_after - fit.calibration_error_before, 2) > 0
        both = " and the calibration error" if higher else ""
        lines.append(f"warning: on the others it raises the loss{both}; more images would determine it better")
    if temperature.not_fitted_on:
        lines.append(f"warning: it is fitted on no image of these classes: {some(temperature.not_fitted_on)}")
    return "\n".join(lines)


def rejection(found: Rejection) -> str:
    """Text of coverage and accuracy at a confidence threshold, and of the area under the curve."""
    of = found.figures()
    coverage, accuracy = (of[f"{name}_interval_wilson"] for name in ("coverage", "accuracy"))
    rows = [
        (
            "coverage",
            f"{of['coverage']:.2f} %",
            f"95 % interval {_span(coverage)} (Wilson){found.remarks[0]}; {found.accepted:,} of {found.images:,} "
            "images are accepted",
        ),
        (
            "top-1 of these",
            "-" if accuracy is None else f"{of['accuracy']:.2f} %",
            "none is accepted" if accuracy is None else f"95 % interval {_span(accuracy)} (Wilson){found.remarks[1]}",
        ),
        ("AURC", f"{of['aurc']:.4f}", f"perfect order {of['aurc_perfect']:.4f}, random order {of['aurc_random']:.4f}"),
    ]
    return "\n".join([f"Answers with a probability of {found.below:g} or more", *metric_lines(rows)])


def _span(interval: tuple[float, float]) -> str:
    return "{:.2f} to {:.2f}".format(*interval)


def others(found: Others) -> str:
    """Table of how well distance and confidence tell other images from the evaluated ones."""
    rows = [[name, *(f"{one:.2f}" for one in values)] for name, values in found.separations.items()]
    own, other = found.distances
    usual = found.distance.usual
    centre = "the nearest class" if len(found.distance.centres) > 1 else "the mean"
    lines = [
        f"Other images: {len(other):,} of {printable(found.folder)}, beside the {len(own):,} above",
        table(["score", "AUROC %", "others taken for own %"], rows),
        "others taken for own: at the threshold that takes 95 % of the images above for such",
        f"distance: of the features from {centre} of {found.distance.fitted_on:,} training images",
        f"95 % of the images that were evaluated when it was fitted are no further than {usual:.4g}",
    ]
    if found.own_are_fitted_on:
        lines.append(
            f"warning: the distance was fitted on {found.own_are_fitted_on:,} of the images above, which favours it"
        )
    return "\n".join(lines)


def checkpoints(description: dict[str, Any]) -> tuple[str, str]:
    """Names of the two compared checkpoints, with how each was run if that differs."""
    names = (description["checkpoint"], description["compared_with"])
    ways = [(description[f"{of}tta"], description[f"{of}amp"]) for of in ("", "compared_")]
    if ways[0] == ways[1]:
        return names
    return tuple(f"{name} (--tta {tta}, --amp {amp})" for name, (tta, amp) in zip(names, ways, strict=True))


def compared(comparison: Comparison, checkpoints: tuple[str, str]) -> str:
    """Text of the comparison of two networks, named ``checkpoints``."""
    counts = comparison.counts
    n = len(comparison.right[0])
    low, high = comparison.interval
    lines = [
        f"A  {checkpoints[0]}",
        f"B  {checkpoints[1]}",
        f"On {n:,} images: both are right on {counts.both:,}, only A on {counts.first:,}, only B on {counts.second:,}, "
        f"neither on {counts.neither:,}",
        f"top-1 of B less that of A: {comparison.difference:+.2f} points, 95 % interval {low:+.2f} to {high:+.2f} "
        f"(bootstrap{of_groups(comparison.groups)})",
        f"McNemar's test ({comparison.test}): p = {comparison.mcnemar.p:.4g}; {_verdict(comparison)}",
        *_classes_of_one(comparison),
    ]
    percents = [(name, n, 100 * first / n, 100 * second / n) for name, n, first, second in comparison.classes]
    lines += changed_classes(percents, ["class", "images", "A %", "B %"])
    for second, letter in ((False, "A"), (True, "B")):
        lines += _images(comparison, second, letter)
    return "\n".join(lines)


def _classes_of_one(comparison: Comparison) -> Iterator[str]:
    """Yield a warning for each network with classes that the other lacks: whenever it answers them, it is wrong."""
    for letter, its, other in (("A", comparison.first, comparison.second), ("B", comparison.second, comparison.first)):
        known = set(other.classes)
        if more := [name for name in its.classes if name not in known]:
            yield (
                f"warning: of these images, none shows one of {letter}'s {len(more):,} other classes ({some(more)}); "
                f"only {letter} can go wrong by answering them"
            )


def changed_classes(classes: Sequence[tuple[str, int, float, float]], heads: list[str]) -> list[str]:
    """Table of the ``classes`` that differ most, if any do: name, count, and each network's metric.

    ``heads``: headings of these four columns.
    """
    changed = [one for one in classes if one[2] != one[3]]
    if not changed:
        return []
    rows = [
        [short(name), f"{count:,}", f"{first:.2f}", f"{second:.2f}", f"{second - first:+.2f}"]
        for name, count, first, second in changed[:ROWS]
    ]
    more = f" (not shown: {len(changed) - ROWS:,} more that differ)" if len(changed) > ROWS else ""
    return ["", f"Classes that differ most{more}", table([*heads, "B - A"], rows)]


def _verdict(comparison: Comparison) -> str:
    if comparison.mcnemar.p < SIGNIFICANT:
        better = "B" if comparison.difference > 0 else "A"
        return f"{better} is better by more than chance explains"
    return "chance alone can explain the difference"


def _images(comparison: Comparison, second: bool, letter: str) -> list[str]:
    """Table of some images that only one network gets right: the first, or the ``second``, called ``letter``.

    The other network's most confident mistakes come first.
    """
    places = comparison.only(second)
    if not len(places):
        return []
    rows = []
    for place in places[:IMAGES].tolist():
        row = comparison.row(place, second)
        answers = (
            f"{short(row[f'{which}_predicted'])} {row[f'{which}_probability']:.3f}" for which in ("first", "second")
        )
        rows.append([printable(row["image"]), short(row["class"]), *answers])
    more = f" (the most confident mistakes of the other; not shown: {len(places) - IMAGES:,} more)"
    title = f"Only {letter} is right{more if len(places) > IMAGES else ''}"
    return ["", title, table(["image", "class", "A says", "B says"], rows)]


def short(name: str) -> str:
    """``name`` in printable characters; if it is long, only both ends, as long names often begin alike."""
    name = printable(name)
    if len(name) <= LETTERS:
        return name
    end = (LETTERS - 3) // 2
    return f"{name[: LETTERS - 3 - end]}...{name[-end:]}"
