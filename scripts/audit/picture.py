"""An audit as a picture: gradients, activations and errors, a row a layer, in the order of computation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from scripts.audit.findings import shown
from scripts.audit.measure import FP16_LIMIT
from scripts.audit.report import Audit, LayerReport, computing, fp16_error, percent, shorten, worst
from scripts.audit.runs import BF16, UNSCALED

MOST_ROWS = 60
# log2 of what rounds to zero, of the smallest normal number, of the limit
ZERO = -25.0
NORMAL = -14.0
LIMIT = 16.0
RED = "#c62828"
ORANGE = "#ef6c00"
BLUE = "#1565c0"
GREY = "#9e9e9e"
GREEN = "#2e7d32"
SMALL = 8  # points


def draw(path: Path, title: str, audit: Audit) -> None:
    """Write the picture to ``path`` (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = chosen(audit)
    figure = Figure(figsize=(17, 2.4 + 0.21 * max(len(layers), 6)), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(5, 3, 3))
    scale = audit.recommendation.scale if audit.recommendation.format == "fp16" else audit.scale
    _gradients(left, layers, scale)
    _activations(middle, layers)
    _errors(right, layers)
    _name_rows(left, layers, audit)
    for axis in (left, middle, right):
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    if (total := len(computing(audit))) > len(layers):
        title += f" (the worst {len(layers)} of {total} layers)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    entries = [axis.get_legend_handles_labels() for axis in (left, right)]
    handles, labels = (list(itertools.chain(*parts)) for parts in zip(*entries, strict=True))
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=SMALL + 1, frameon=False)
    figure.savefig(path, dpi=110)


def chosen(audit: Audit) -> list[LayerReport]:
    """At most ``MOST_ROWS`` layers, the worst ones, in the order of computation."""
    kept = {layer.name for layer in worst(audit, MOST_ROWS)}
    return [layer for layer in audit.layers if layer.name in kept]


def _name_rows(axis: Any, layers: list[LayerReport], audit: Audit) -> None:
    """The layers' names on the y axis; faults are red, findings for information orange."""
    colours: dict[str, str] = {}
    for finding in audit.findings:
        if colours.get(finding.layer) != RED:
            colours[finding.layer] = RED if finding.severity == "fault" else ORANGE
    axis.set_yticks(range(len(layers)), [shorten(shown(layer.name)) for layer in layers], fontsize=SMALL)
    axis.set_ylim(len(layers) - 0.4, -0.6)
    for row, (label, layer) in enumerate(zip(axis.get_yticklabels(), layers, strict=True)):
        if layer.name in colours:
            label.set(color=colours[layer.name], fontweight="bold")
        if colours.get(layer.name) == RED:
            for other in axis.figure.axes:
                other.axhspan(row - 0.5, row + 0.5, color=RED, alpha=0.14, lw=0, zorder=0.5)


def _above(axis: Any, x: float, text: str, colour: str) -> None:
    """A word above the axis at ``x`` in data units."""
    place = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom"}
    axis.text(x, 1.004, text, fontsize=SMALL, color=colour, **place)


def _gradients(axis: Any, layers: list[LayerReport], scale: float) -> None:
    """Panel (a): 1st to 99th percentile of the true output gradient, without and with scaling, in fp16's regions."""
    shift = math.log2(scale)
    drawn = [(row, layer) for row, layer in enumerate(layers) if layer.gradient_low is not None]
    ends = [end for _, layer in drawn for end in (layer.gradient_low, layer.gradient_high)] or [0.0]
    low = max(min(*ends, *(end + shift for end in ends), ZERO - 9) - 1, -75)
    high = min(max(*ends, *(end + shift for end in ends), LIMIT + 5) + 1, 50)
    edges = (low, ZERO, NORMAL, LIMIT, high)
    names = (("becomes zero", RED), ("subnormal", ORANGE), ("fp16's normal range", GREEN), ("overflow", RED))
    for begin, end, (text, colour) in zip(edges, edges[1:], names, strict=False):
        axis.axvspan(begin, end, color=colour, alpha=0.10, lw=0, zorder=0)
        _above(axis, (begin + end) / 2, text, colour)
    for row, layer in drawn:
        width = max(layer.gradient_high - layer.gradient_low, 0.3)
        full = "float16" not in layer.gradient_dtype  # then fp16's regions do not bind it
        axis.barh(row - 0.19, width, 0.32, layer.gradient_low, color=GREY, alpha=0.35 if full else 1.0)
        axis.barh(row + 0.19, width, 0.32, layer.gradient_low + shift, color=BLUE, alpha=0.3 if full else 1.0)
    for row, layer in enumerate(layers):
        if layer.gradient_low is None and layer.gradient_dtype:
            axis.text(0, row, "this gradient is zero", va="center", ha="center", fontsize=SMALL - 1, color=GREY)
    axis.barh(0, 0, color=GREY, label="gradient without scaling")
    axis.barh(0, 0, color=BLUE, label=f"with a loss scale of {scale:.12g} (pale: it flows in float32)")
    axis.set_xlim(low, high)
    axis.set_xlabel("log2 |gradient of the layer's output|, 1st to 99th percentile")


def _activations(axis: Any, layers: list[LayerReport]) -> None:
    """Panel (b): the largest true activation against fp16's limit."""
    values = [math.log2(layer.largest) if layer.largest else None for layer in layers]
    known = [value for value in values if value is not None] or [0.0]
    low = min(*known, -4.0) - 1
    high = max(*known, LIMIT)
    high += 0.45 * (high - low) if any(layer.non_finite.get(UNSCALED) for layer in layers) else 2  # room for words
    for row, (layer, value) in enumerate(zip(layers, values, strict=True)):
        end = low if value is None else value
        over = end > math.log2(FP16_LIMIT) and "float16" in layer.dtype.get(UNSCALED, "")
        axis.barh(row, end - low, 0.55, low, color=RED if over else BLUE, alpha=0.85)
        if bad := layer.non_finite.get(UNSCALED, 0):
            words = f" {percent(bad / layer.values)} % not finite in fp16"
            axis.text(max(end, LIMIT), row, words, va="center", fontsize=SMALL - 1, color=RED)
    axis.axvline(LIMIT, color=RED, lw=1.2)
    _above(axis, LIMIT, "fp16's limit", RED)
    axis.set_xlim(low, high)
    axis.grid(axis="x", alpha=0.25)
    axis.set_xlabel("log2 of the largest true activation")


def _errors(axis: Any, layers: list[LayerReport]) -> None:
    """Panel (c): relative error of the parameters' gradients in fp16 and bf16."""
    styles = {"fp16": ("gradient error in fp16", BLUE, "o"), "bf16": ("in bf16", ORANGE, "s")}
    errors = {
        "fp16": [(fp16_error(layer), row) for row, layer in enumerate(layers)],
        "bf16": [(layer.error.get(BF16), row) for row, layer in enumerate(layers)],
    }
    known = [error for points in errors.values() for error, _ in points if error and math.isfinite(error)] or [1e-3]
    low = min(*known, 1e-4) / 2
    high = max(*known, 1.0) * 4
    missing: set[int] = set()
    for run, (text, colour, marker) in styles.items():
        inside = [(error, row) for error, row in errors[run] if error is not None and math.isfinite(error)]
        missing |= {row for error, row in errors[run] if error is not None and not math.isfinite(error)}
        if inside:
            axis.plot(*zip(*inside, strict=True), marker, color=colour, ms=4, label=text, ls="none")
    if missing:
        rows = sorted(missing)
        axis.plot([high / 1.4] * len(rows), rows, ">", color=RED, ms=5, ls="none", label="not finite")
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.grid(axis="x", alpha=0.25)
    axis.set_xlabel("relative error of the parameters' gradient")
