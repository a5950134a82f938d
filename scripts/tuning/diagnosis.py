"""The doctor's report: verdict, tables and CSV rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.common.command_line import table
from scripts.common.timing import Spread
from scripts.tuning.advice import BUSY, GAIN, LIMITS, Advice, Largest, PartSpeeds, TriedChange, final_limit, part_of
from utils.config.spelling import counted

PART_NAMES = {
    "decode": "read and decode, 1 process",
    "read": "take from memory",
    "augmentation": "augment and normalise",
    "copy": "copy to the GPU",
}


# a step that uses free parts of pages already mapped shows no growth, so smaller figures mean nothing
LEAST_BYTES = 10**6
LESS = "less than 1 MB"
BUSY_MACHINE = 1.3  # speeds of the loop that differ by this factor cast doubt on all figures
LEGEND = (
    "'to now': the part alone, interleaved with that part now. What gives more than 5 % is measured again in the\n"
    "real loop, interleaved with the settings before it and those changes that helped already ('to before'); twice\n"
    "where the other part is the limit. Advised is what gives more than 5 % and more than the loop's speed varied by."
)


@dataclass(frozen=True)
class Memory:
    """Bytes that a training step takes with the present batch, what exactly was measured, and the largest batch.

    ``failure``: why a value of None is unknown; '' if it was not asked for.
    """

    step_bytes: int | None
    meaning: str
    largest: Largest | None
    room: str
    failure: str = ""


def report(header: str, measured: PartSpeeds, advice: Advice, memory: Memory, batch_size: int, step_images: int) -> str:
    """Text of the whole report, verdict first."""
    blocks = [
        [*verdict(measured, advice), *gain(advice, measured.together)],
        [header, parts(measured, step_images)],
        [trials_table(advice.trials), LEGEND],
        memory_lines(memory, batch_size),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def verdict(measured: PartSpeeds, advice: Advice) -> list[str]:
    """One or two lines about the limit and what it means, in agreement with the advice."""
    what = final_limit(measured, advice)
    loader = measured.loader.median
    compute = measured.compute.median
    alone = f"{loader:,.0f} and {compute:,.0f} images/s"
    if what == "both":
        lines = [f"Limit: {LIMITS[what]} ({alone})"]
    elif part_of(what) is None:
        lines = [f"Limit: {LIMITS[what]} ({alone} alone, {measured.together.median:,.0f} together)"]
    elif what == "compute":
        lines = [f"Limit: {LIMITS[what]}; the loader could feed {loader / compute:.1f} times as much"]
    elif what == "launch":
        lines = [
            f"Limit: {LIMITS[what]}, which computes for {100 * measured.busy:.0f} % of a step's time only (under "
            f"{100 * BUSY:.0f} %); the loader could feed {loader / compute:.1f} times as much"
        ]
    else:
        lines = [f"Limit: data, {LIMITS[what]}; the network could take {compute / loader:.1f} times as much"]
    first = [change.label for change in advice.taken if change.part == part_of(what)]
    if first and len(first) < len(advice.taken):
        following = "loader" if part_of(what) == "compute" else "network"
        lines.append(f"With {' '.join(first)} the {following} becomes the limit")
    if measured.varied > BUSY_MACHINE:
        lines.append(
            "Speeds varied a lot meanwhile: other programs run here, or too few --seconds; better measure again"
        )
    return lines


def gain(advice: Advice, now: Spread) -> list[str]:
    """Lines about what to change and how much that gains."""
    percent = f"{100 * (GAIN - 1):.0f} %"
    if advice.gain is None:
        tried = sum(not trial.failure for trial in advice.trials)
        uncertain = [trial for trial in advice.trials if trial.gains and not trial.is_certain]
        if not uncertain:
            return [
                f"now {now.median:,.0f} images/s; none of {counted(tried, 'change')} tried gives more than {percent}"
            ]
        best = max(uncertain, key=lambda trial: trial.loops[0].ratio)
        return [
            f"now {now.median:,.0f} images/s; no advice: {best.change.label} gave {best.loops[0].ratio:.2f}x, but "
            f"speeds varied by {best.varied:.2f}x; measure again without other programs, or with more --seconds"
        ]
    labels = " ".join(change.label for change in advice.taken)
    before, after, ratio = advice.gain
    lines = [f"now {before.median:,.0f} images/s, with {labels} {after.median:,.0f} images/s ({ratio:.2f}x)"]
    return lines + [f"  {change.label}: {change.caution}" for change in advice.taken if change.caution]


def parts(measured: PartSpeeds, images_a_step: int) -> str:
    """Table of the parts of training, with the time that each takes for the images of a step."""

    def row(name: str, speed: Spread) -> list[str]:
        ms = f"{1000 * images_a_step / speed.median:,.2f}"
        return [name, f"{speed.median:,.0f}", f"{speed.low:,.0f} - {speed.high:,.0f}", ms, ""]

    kind = "resident" if measured.workers is None else f"{measured.workers} worker(s)"
    rows = [row(f"loader alone, {kind}", measured.loader)]
    for name, seconds in measured.split.items():
        rows.append([f"  {PART_NAMES[name]}", f"{1 / seconds:,.0f}", "", f"{1000 * images_a_step * seconds:,.2f}", ""])
    rows.append(row("compute alone, a step", measured.compute))
    step_ms = 1000 * images_a_step / measured.compute.median
    rows += [
        ["  " + n, "", "", f"{share * step_ms:,.2f}", f"{100 * share:.0f} %"] for n, share in measured.shares.items()
    ]
    if measured.busy is not None:
        rows.append(["  the GPU computes", "", "", f"{measured.busy * step_ms:,.2f}", f"{100 * measured.busy:.0f} %"])
    rows.append(row("both together", measured.together))
    wait_ms = measured.wait_percent / 100 * 1000 * images_a_step / measured.together.median
    rows.append(["  data wait", "", "", f"{wait_ms:,.2f}", f"{measured.wait_percent:.0f} %"])
    return table(["part", "images/s", "min - max", "ms a step", "share"], rows)


def trials_table(trials: Sequence[TriedChange]) -> str:
    """Table of the trials."""
    return table(
        ["tried", "measured", "images/s", "to now", "in the loop", "to before", "advice"], list(map(_cells, trials))
    )


def _cells(trial: TriedChange) -> list[str]:
    part = f"{trial.change.part} alone"
    if trial.failure:
        return [trial.change.label, part, "", "", "", "", trial.failure]
    cells = [trial.change.label, part, f"{trial.alone.after.median:,.0f}", f"{trial.alone.ratio:.2f}x"]
    if not trial.loops:
        return [*cells, "", "", "another is better" if trial.promises else "no gain"]
    last = trial.loops[-1]
    return [*cells, f"{last.after.median:,.0f}", f"{last.ratio:.2f}x", _outcome(trial)]


def _outcome(trial: TriedChange) -> str:
    """Whether the change helped in the whole training loop, as text."""
    if trial.helps:
        return "yes"
    return f"uncertain: speeds varied by {trial.varied:.2f}x" if trial.gains else "no gain in the loop"


def memory_lines(memory: Memory, batch_size: int) -> list[str]:
    """Lines about the memory of a step and the largest batch."""
    if memory.step_bytes is None:
        return [f"Memory: unknown: {memory.failure}"]
    takes = f"{memory.step_bytes / 1e6:,.0f} MB" if memory.step_bytes >= LEAST_BYTES else LESS
    lines = [f"Memory: a training step with --batch-size {batch_size} takes {takes} ({memory.meaning})"]
    largest = memory.largest
    if largest is None and memory.failure:
        lines.append(f"Largest batch: unknown: {memory.failure}")
    elif largest is not None and not largest.size:
        lines.append(f"Largest batch: none fits into {memory.room}" + f" ({largest.reason})" * bool(largest.reason))
    elif largest is not None:
        more = f"larger ones were not tried: {largest.reason}" if largest.reason else "about 3 % more does not"
        lines.append(f"Largest batch: {largest.size:,} images fit into {memory.room}; {more}")
    return lines


def csv_rows(measured: PartSpeeds, advice: Advice, memory: Memory) -> Iterator[dict[str, Any]]:
    """Rows of ``doctor.csv``; speeds in images per second, '' for unknown values."""
    columns = ("median", "low", "high", "seconds_an_image", "share", "ratio", "loop_ratio", "value")

    def row(kind: str, name: str, speed: Spread | None = None, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "name": name} | dict.fromkeys(columns, "") | (speed._asdict() if speed else {}) | more

    yield row("limit", final_limit(measured, advice))
    for name in ("loader", "compute", "together"):
        yield row("speed", name, getattr(measured, name))
    for name, seconds in measured.split.items():
        yield row("loader part", name, seconds_an_image=seconds)
    for name, share in measured.shares.items():
        yield row("step part", name, share=share)
    yield row("share", "data wait", share=measured.wait_percent / 100)
    if measured.busy is not None:
        yield row("share", "GPU computes", share=measured.busy)
    for trial in advice.trials:
        value = trial.failure or (_outcome(trial) if trial.loops else "no gain")
        alone = {"speed": trial.alone.after, "ratio": trial.alone.ratio} if trial.alone else {}
        loop = {"loop_ratio": trial.loops[-1].ratio} if trial.loops else {}
        yield row(f"trial, {trial.change.part}", trial.change.label, **alone, **loop, value=value)
    if advice.gain is not None:
        labels = " ".join(change.label for change in advice.taken)
        yield row("advice", labels, advice.gain.after, loop_ratio=advice.gain.ratio)
    size = memory.step_bytes
    yield row("memory", "step bytes", value=memory.failure if size is None else size if size >= LEAST_BYTES else LESS)
    if memory.largest is not None or memory.failure:
        yield row("memory", "largest batch", value=memory.largest.size if memory.largest else memory.failure)
