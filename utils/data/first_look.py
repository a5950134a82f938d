"""A look at a few images of each class before training, for anything that a user should not learn too late."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.config.image_size import enlarged, sides
from utils.config.settings import Settings, UserError
from utils.config.spelling import counted, folded, printable, some
from utils.data.data_set import Data
from utils.data.formats.readers import ImageFiles, class_counts
from utils.data.images.decoding import why_unreadable
from utils.data.images.levels import channels_of, keeps_levels, range_of
from utils.data.images.look import Look, header, levels_seen, look
from utils.data.images.stored import Stored, opened
from utils.data.preprocessing import Preprocessing
from utils.data.sample_plan import evenly_spaced
from utils.runtime.files import sha256

# files that are looked at, at most
EACH_CLASS = 4
OF_FEW_CLASSES = 40  # of all together: inverted photographs do not stand out among fewer
EACH_SPLIT = 96
PIXELS = 2**25  # decoded in a split, at most
# too few of the 256 levels that a network can see: in all images, in a class
FEW_LEVELS = 64
FEWER_LEVELS = 8
# limits for the search for equal files
TRIAL_FILES = 24
COMPARED_FILES = 4000
COMPARED_BYTES = 2**26
SHOWN = 3  # classes or files in a line
ENOUGH = 3  # images that a class needs before what they have in common is reported
BRIGHTER, STANDARD_ERRORS, COMPARED_MEANS = 32, 5, 8  # levels; standard errors; images of a split
JOINED_BY = ";|,"  # separators of labels in one cell
# what pandas' read_csv takes for no label, or str() writes for none
MISSING = ("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None")
LIST_SIGNS = "brackets and quotation marks"
UNBALANCED = 10.0  # largest over smallest class
TINY = 4  # pixels a side, too few for any network
LONG = 4.0  # times the shorter side


UNREAD = Look("", 0, "", (0, 0))  # the facts of an image that cannot be read
Remark = tuple[str, str]  # its kind and its text


class Seen(NamedTuple):
    """An image's class, split, name (for messages) and facts; ``problem``: why it is unreadable."""

    label: str
    split: str
    name: str
    facts: Look
    problem: str = ""


def doubts(data: Data, args: Settings, begins: bool = False) -> list[str]:
    """Warnings to print before training, from a quick look at a few images, and from the files and class counts.

    If a new run ``begins``, also on how validation shows images by default. A dry run names an unreadable image, which
    otherwise is reported when it is read. Raises ``UserError`` if no image of a split is readable, unless bad images
    are skipped.
    """
    splits = {"train": data.train, "val": data.validation}
    files = {split: images for split, images in splits.items() if isinstance(images, ImageFiles) and len(images)}
    if not files:
        return []
    root = args.data.datapath
    looks = [one for split, images in files.items() for one in _sampled(split, images, data.classes, root)]
    where = f"--datapath {root}: " if root else ""
    colour = next(iter(files.values())).colour
    lines = [f"{text} ({len(looks)} of the images were looked at)" for _, text in remarks(looks, colour)]
    if begins and args.data.crop_pct is None:
        lines += _already_of_size(looks, data.preprocessing)
    lines += _unreadable(looks, where, args.data.skip_bad_images)
    unreadable = [one for one in looks if one.problem]
    if unreadable and args.run.dry_run:
        lines.append(f"{unreadable[0].name} cannot be read: {unreadable[0].problem}")
    lines += equal_files(files, root)
    if data.train is not None:
        counts = [class_counts(images.labels, len(data.classes)) for images in (data.train, data.validation)]
        lines += [text for _, text in of_classes(counts, data.classes, data.multilabel)]
    return [where + line for line in lines]


def _already_of_size(looks: Sequence[Seen], preprocessing: Preprocessing) -> Iterator[str]:
    """Yield a line if all images have the size that validation shows, yet are enlarged and cropped, as in timm.

    An enlargement by one pixel is not worth a line.
    """
    size = sides(preprocessing.val_image_size)
    enlarged_size = enlarged(size, preprocessing.crop_pct)
    grows = preprocessing.stored_size is None and enlarged_size[0] > size[0] + 1
    if grows and {one.facts.size[::-1] for one in looks if not one.problem} == {size}:
        shown, larger = ("{} x {}".format(*of_both) for of_both in (size, enlarged_size))
        yield (
            f"the {len(looks)} images that were looked at have {shown} pixels, and validation shows the middle of "
            f"them, enlarged to {larger}; --crop-pct 1 shows them whole"
        )


def lost_levels(images: ImageFiles, classes: Sequence[str], root: str | None) -> list[str]:
    """Warnings about what a trained network does not see of ``images``, which it reads in their ``colour``."""
    looks = list(_sampled("val", images, classes, root))
    known = [one for one in looks if not one.problem]
    pixel_range = range_of(images.colour)
    few = () if keeps_levels(images.colour) else _few_levels(known, pixel_range, trained=True)
    found = [*few, *_beyond(known, pixel_range, trained=True), *_alpha(known)]
    return [f"{text} ({len(looks)} of the images were looked at)" for _, text in found]


def _unreadable(looks: Sequence[Seen], where: str, skips_bad: bool) -> list[str]:
    """Lines about classes of which all images looked at are unreadable, if ``skips_bad``.

    Otherwise, raises ``UserError`` if no image of a split is readable."""
    lines = []
    for split, words in (("train", "train on"), ("val", "validate on")):
        seen = [one for one in looks if one.split == split]
        readable = {one.label for one in seen if not one.problem}
        lost = sorted({one.label for one in seen} - readable)
        if lost and not readable and not skips_bad:
            problem = f"{seen[0].name}: {seen[0].problem}"
            raise UserError(f"{where}no image to {words} that was looked at can be read ({problem})")
        if lost and readable and skips_bad:
            lines.append(f"no image to {words} that was looked at can be read of these classes: {some(lost)}")
    return lines


def _sampled(split: str, images: ImageFiles, classes: Sequence[str], root: str | None) -> Iterator[Seen]:
    left = PIXELS
    several = images.labels.ndim > 1  # then all count as one class without a name
    for number in sample(np.zeros(len(images), int) if several else images.labels.numpy()).tolist():
        path = images.paths[number]
        problem = ""
        try:
            file = opened(path)
            facts = header(file, images.colour)
            if facts.pixels <= left:
                left -= facts.pixels
                facts = look(file, images.colour)
        except Exception as error:  # each of Pillow's readers fails in its own ways on a damaged file
            facts = UNREAD
            problem = getattr(error, "reason", None) or why_unreadable(error)
        label = "" if several else classes[int(images.labels[number])]
        yield Seen(label, split, below(path, root), facts, problem)


def sample(labels: np.ndarray) -> np.ndarray:
    """Numbers of a few images of each class (of some classes, if there are many): int64, at most EACH_SPLIT.

    The first image of every class comes before any second one.
    """
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    begins = np.cumsum(counts) - counts
    there = np.flatnonzero(counts)
    there = there[evenly_spaced(len(there), EACH_SPLIT)]
    each = max(1, min(max(EACH_CLASS, OF_FEW_CLASSES // len(there)), EACH_SPLIT // len(there)))
    chosen = [
        begins[label] + round(place * (counts[label] - 1) / max(1, min(each, counts[label]) - 1))
        for place in range(each)
        for label in there
        if place < counts[label]
    ]
    return order[np.array(list(dict.fromkeys(chosen)), dtype=np.int64)]


def below(path: str, root: str | None) -> str:
    """The name of file ``path`` in a message: relative to ``root``, if given."""
    return printable(os.path.relpath(path, root) if root and not isinstance(path, Stored) else path)


# ------------------------------------------------------------------------------------------ what they say


def remarks(looks: Sequence[Seen], colour: str) -> Iterator[Remark]:
    """Remarks on the facts of images that are read in ``colour``."""
    known = [one for one in looks if not one.problem]
    pixel_range = range_of(colour)
    if not keeps_levels(colour):
        few = [*_few_levels(known, pixel_range)]
        yield from few
        if not few and pixel_range is None:
            yield from _cut_levels(known)
    yield from _beyond(known, pixel_range)
    if channels_of(colour) != 4:
        yield from _alpha(known)
    for kind, what, holds in (
        (
            "further channels",
            "with further channels, which are not read (--in-channels N reads them)",
            lambda facts: facts.further,
        ),
        (
            "several pictures",
            "with several pictures, of which the first is read",
            lambda facts: facts.frames > 1,
        ),
        ("only alpha", "with a single level below an alpha channel that holds what they show", _is_only_alpha),
        ("one level", "with a single level, as of one colour", lambda facts: _is_plain(facts) > _is_only_alpha(facts)),
        ("tiny", f"of at most {TINY} pixels a side", lambda facts: max(facts.size) <= TINY),
        (
            "extreme ratio",
            f"more than {LONG:g} times as long as wide; a crop shows little of them",
            lambda facts: max(facts.size) > LONG * min(facts.size),
        ),
    ):
        if some_of := [one for one in known if holds(one.facts)]:
            yield kind, f"{counted(len(some_of))} {what}: {_names(some_of)}"
    yield from _told_by("class", [one.label for one in known], known)
    yield from _told_by("split", [one.split for one in known], known)
    yield from _brighter(known)


def _is_plain(facts: Look) -> bool:
    return facts.seen is not None and facts.seen[0] == facts.seen[2] and facts.low == facts.high


def _is_only_alpha(facts: Look) -> bool:
    return _is_plain(facts) and facts.alpha is not None and facts.alpha[0] < facts.alpha[1]


def _names(looks: Sequence[Seen]) -> str:
    return some((one.name for one in looks), SHOWN)


def _of_class(label: str) -> str:
    return f"class {printable(label)} " if label else ""  # of images whose class is not known


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second items of ``pairs``, in lists by the first."""
    groups = defaultdict(list)
    for group, item in pairs:
        groups[group].append(item)
    return groups


def _by_class(looks: Sequence[Seen]) -> dict[str, list[Look]]:
    return _grouped((one.label, one.facts) for one in looks)


def _few_levels(
    looks: Sequence[Seen], pixel_range: tuple[float, float] | None, trained: bool = False
) -> Iterator[Remark]:
    """Yield a remark if images with more than 8 bits, all or those of a class, keep few levels.

    ``trained``: the network has already been trained with this range."""
    deep = [one for one in looks if one.facts.low is not None]
    extremes = {
        label: (min(one.extremes[0] for one in facts), max(one.extremes[1] for one in facts), facts[0].bits)
        for label, facts in _by_class(deep).items()
    }
    if not deep or (pixel_range is None and deep[0].facts.bits == 32):  # those are read as they are, or not at all
        return
    bits = deep[0].facts.bits
    low = min(low for low, _, _ in extremes.values())
    high = max(high for _, high, _ in extremes.values())
    seen = {label: levels_seen(*numbers, pixel_range) for label, numbers in extremes.items()}
    lost = [label for label, (first, last, _) in extremes.items() if last - first >= seen[label]]
    few = levels_seen(low, high, bits, pixel_range) < FEW_LEVELS
    named = [label for label in lost if few or seen[label] < FEWER_LEVELS]
    if not named:
        return
    parts = [
        "{}{:g} to {:g}, of which the network sees {} of 256".format(
            _of_class(label), *extremes[label][:2], seen[label]
        )
        for label in named[:SHOWN]
    ]
    more = f" and {len(named) - SHOWN:,} classes more" if len(named) > SHOWN else ""
    whole = "" if bits == 32 else f" of {2**bits - 1}"
    advice = f"; give --pixel-range {advised(low, high, bits)}" if few else ""
    if trained:
        advice = "; give it images of the levels that it was trained on"
    yield "few levels", f"{bits}-bit images use few levels{whole}: {'; '.join(parts)}{more}{advice}"


def _cut_levels(looks: Sequence[Seen]) -> Iterator[Remark]:
    """Yield a remark on images with more than 8 bits that are read as 256 levels, if any."""
    if deep := [one for one in looks if one.facts.low is not None and one.facts.extremes[1] > 255]:
        words = f"{counted(len(deep))} of more than 8 bits, seen in 256 levels unless --levels all keeps theirs"
        yield "256 levels", f"{words}: {_names(deep)}"


def advised(low: float, high: float, bits: int) -> str:
    """The ``--pixel-range`` to advise for numbers from ``low`` to ``high``, such as '0 4095' if they use 12 bits."""
    if bits == 32 and low >= 0 and high <= 1:
        return "0 1"
    if low < 0 or high <= 1:
        return f"{low:g} {high:g}"
    return f"0 {2 ** math.ceil(math.log2(high + 1)) - 1}"


def _beyond(looks: Sequence[Seen], pixel_range: tuple[float, float] | None, trained: bool = False) -> Iterator[Remark]:
    """Yield a remark if ``--pixel-range`` cuts off values or if no image needs it. ``trained``: see ``_few_levels``."""
    if pixel_range is None or not looks:
        return
    words = "--pixel-range {:g} {:g}".format(*pixel_range)
    deep = [one for one in looks if one.facts.low is not None]
    if not deep and trained:
        yield "no range", f"the images have 8 bits, and the network was trained with {words} on images of more"
    elif not deep:
        yield "no range", f"{words} does nothing: the images have 8 bits"
    lowest, highest = pixel_range
    if outside := [one for one in deep if one.facts.extremes[0] < lowest or one.facts.extremes[1] > highest]:
        low = min(one.facts.extremes[0] for one in outside)
        high = max(one.facts.extremes[1] for one in outside)
        what = f"numbers of {counted(len(outside))} lie beyond {words} ({low:g} to {high:g}) and are cut off"
        yield "cut off", f"{what}: {_names(outside)}"


def _alpha(looks: Sequence[Seen]) -> Iterator[Remark]:
    """Yield a remark on an alpha channel that varies, inside an image or between images.

    It counts and names only images that are not opaque, since an opaque one loses nothing.
    """
    held = [one for one in looks if one.facts.alpha is not None]
    if len({level for one in held for level in one.facts.alpha or ()}) < 2:
        return
    held = [one for one in held if one.facts.alpha != (255, 255)]
    parts = []
    for label, facts in _by_class(held).items():
        ranges = [one.alpha for one in facts if one.alpha is not None]
        low = min(low for low, _ in ranges)
        high = max(high for _, high in ranges)
        parts.append(_of_class(label) + str(low) + (f" to {high}" if high > low else ""))
    yield (
        "alpha",
        f"the alpha channel of {counted(len(held))} differs ({some(parts, SHOWN)}) and is not read: pixels "
        "count with the colour that lies below it",
    )


_TRAITS = {
    "colour": lambda facts: facts.kind,
    "bits": lambda facts: f"{facts.bits}-bit",
    "format": lambda facts: facts.file_format,
    "size": lambda facts: "{}x{}".format(*facts.size),
}


def _told_by(by: str, groups: Sequence[str], looks: Sequence[Seen]) -> Iterator[Remark]:
    """Yield a remark on the first trait that tells groups apart, if any. ``by``: what groups are, 'class' or 'split'.

    ``groups``: the group of each of ``looks``. A trait tells groups apart if, in at least two groups of at least ENOUGH
    images, all images have one value, and these values differ and occur in no mixed or smaller group.
    """
    for trait, value in _TRAITS.items():
        values = _grouped((group, value(one.facts)) for group, one in zip(groups, looks, strict=True))
        uniform = {group: found[0] for group, found in values.items() if len(set(found)) == 1 and len(found) >= ENOUGH}
        others = {found for group, held in values.items() if group not in uniform for found in held}
        apart = {group: found for group, found in uniform.items() if found not in others}
        if len(set(apart.values())) < 2:
            continue
        shown = [next(group for group in apart if apart[group] == found) for found in dict.fromkeys(apart.values())]
        words = ", ".join(f"{printable(group)}: {apart[group]}" for group in shown[:SHOWN])
        what = "the size of their images" if trait == "size" else "how their files store images"
        differ = f"classes differ in {what} ({words}), which a network may learn instead of the content"
        yield f"{trait} by {by}", differ if by == "class" else f"the splits differ in their images ({words})"
        return


def _brighter(looks: Sequence[Seen]) -> Iterator[Remark]:
    """Yield a remark if validation images are far brighter or darker than training images, as if inverted."""
    means = {
        split: np.array([one.facts.seen[1] for one in looks if one.split == split and one.facts.seen])
        for split in ("train", "val")
    }
    train, validation = means.values()
    if min(len(train), len(validation)) < COMPARED_MEANS:
        return
    apart = float(validation.mean() - train.mean())
    error = math.sqrt(train.var(ddof=1) / len(train) + validation.var(ddof=1) / len(validation))
    if abs(apart) < max(BRIGHTER, STANDARD_ERRORS * error):
        return
    inverted = abs(255 - train.mean() - validation.mean()) < abs(apart) / 2
    yield (
        "brightness",
        f"training images have a mean level of {train.mean():.0f} of 255, validation images {validation.mean():.0f}"
        f"{', as if one of them were inverted' if inverted else ''}",
    )


WHAT_MAY_DIFFER = "case, blanks, the zeros of a number or the characters of an accent"


def _reduced(name: str) -> str:
    """What is left of the name of a class, or group, without what may differ by mistake (``WHAT_MAY_DIFFER``)."""
    name = folded("".join(name.split()))
    number = re.fullmatch(r"0*(\d+)(?:\.0*)?", name)
    return number[1] if number else name


def alike(names: Iterable[str]) -> list[list[str]]:
    """Groups of ``names`` that may be meant as one (``WHAT_MAY_DIFFER``)."""
    same = _grouped((_reduced(name), name) for name in names)
    return [several for several in same.values() if len(several) > 1]


def of_classes(counts: Sequence[np.ndarray], classes: Sequence[str], several: bool) -> Iterator[Remark]:
    """Remarks on class names and on ``counts`` of training and validation images per class.

    ``counts``: int (classes,) each. ``several``: images have several labels.
    """
    for names in alike(classes):
        quoted = " and ".join(map(repr, names))
        differ = (
            f"classes {quoted} differ only by {WHAT_MAY_DIFFER}"
            if len({*names}) > 1
            else f"{len(names)} classes are called {names[0]!r}"
        )
        yield "class names alike", f"{differ}; make them one"
    if blanks := [name for name in classes if name != name.strip()]:
        quoted = ", ".join(map(repr, blanks[:SHOWN]))
        yield "blanks around class names", f"blanks around names belong to them: {quoted}; remove the blanks"
    if missing := [name for name in classes if name in MISSING]:
        quoted = ", ".join(map(repr, missing[:SHOWN]))
        yield "missing labels", f"{quoted}: a class like any other; if it means no label, remove its images"
    yield from _joined(classes)
    filled = counts[0][counts[0] > 0]
    if len(filled) and filled.max() >= UNBALANCED * filled.min():
        ratio = f"the largest class has {filled.max() / filled.min():.0f} times the training images of the smallest"
        what = "micro F1" if several else "top-1"
        yield "unbalanced", f"{ratio}; {what} then says little about the small ones"
    if counts[1].max() == 1 and not several:
        share = 100 / counts[1].sum()
        yield "few to validate", f"no class has two images to validate on: one is {share:.3g} % of top-1"


def _joined(classes: Sequence[str]) -> Iterator[Remark]:
    """Yield a remark on class names that seem to be lists of labels: of each, two or more parts occur in other names.

    Or on those that hold one bracket of a list, which a separator cut at its commas.
    """
    begun = [name for name in classes if name.startswith("[") and "]" not in name and name.strip("[ '\"")]
    ended = [name for name in classes if name.endswith("]") and "[" not in name and name.strip("] '\"")]
    if begun and ended:
        cut = [*begun, *ended]
        what = f"{len(cut):,} of {len(classes):,} class names hold a bracket of a list, such as {cut[0]!r}"
        yield "joined class names", f"{what}; write only the names, without {LIST_SIGNS}"
        return
    for separator in JOINED_BY:
        parts = {name: {part.strip(" []'\"") for part in name.split(separator)} for name in classes}
        times = Counter(part for found in parts.values() for part in found if part)
        lists = [name for name, found in parts.items() if sum(times[part] > 1 for part in found) > 1]
        if lists:
            what = f"{len(lists):,} of {len(classes):,} class names are joined of several, such as {lists[0]!r}"
            hint = f"if an image has several labels, give --label-separator {separator!r}"
            if lists[0].startswith("[") and lists[0].endswith("]"):
                hint += f", and write only the names, without {LIST_SIGNS}"
            yield "joined class names", f"{what}; {hint}"
            return


# ------------------------------------------------------------------------------------------- equal files


class Place(NamedTuple):
    """A file's split, label or labels, and path."""

    split: str
    label: Any
    path: str


def equal_files(files: dict[str, ImageFiles], root: str | None) -> Iterator[str]:
    """Yield lines on files of small sets that are equal: in both splits, in two classes, or repeated."""
    if sum(map(len, files.values())) <= TRIAL_FILES:
        return
    equal, whole = _equal(files, COMPARED_BYTES)
    groups = [group for group in equal if _is_image(group[0].path)]

    def named(*places: Place) -> str:
        return " = ".join(below(place.path, root) for place in places)

    lists_all = "scripts/check_data.py lists all"
    if leaked := [group for group in groups if len({place.split for place in group}) > 1]:
        held_out = [place for group in leaked for place in group if place.split != "train"]
        verb = "is" if len(held_out) == 1 else "are"
        least = "" if whole else "at least "
        what = f"{least}{counted(len(held_out))} of {len(files['val']):,} to validate on {verb} trained on, too"
        pair = named(held_out[0], next(place for place in leaked[0] if place.split == "train"))
        yield f"{what}, which makes results too good: {pair}; {lists_all}"
    if torn := [group for group in groups if len({place.label for place in group}) > 1]:
        several = isinstance(torn[0][0].label, tuple)
        words = "with other labels than the same image elsewhere" if several else "in more than one class"
        yield f"{counted(len(torn))} {words}: {named(*torn[0][:2])}; {lists_all}"
    trained = [sum(place.split == "train" for place in group) for group in groups if group not in torn]
    if twice := sum(count - 1 for count in trained if count > 1):
        what = "1 training image repeats" if twice == 1 else f"{twice:,} training images repeat"
        yield f"{what} another of the class; {lists_all}"


def copies_in(known: ImageFiles, images: ImageFiles) -> list[tuple[str, str]]:
    """For each of ``images`` with the bytes of one of ``known``, both paths; none of too many, or in shards."""
    copies = []
    for group in _equal({"known": known, "new": images})[0]:
        first = next((place.path for place in group if place.split == "known"), None)
        copies += [(place.path, first) for place in group if place.split == "new" and first is not None]
    return copies


def _equal(files: dict[str, ImageFiles], most_bytes: float = math.inf) -> tuple[list[list[Place]], bool]:
    """Groups of files with the same bytes, and whether all files that share their size were read.

    Reads at most ``most_bytes`` in all, and nothing of shards or of more than ``COMPARED_FILES`` files.
    """
    in_shards = any(isinstance(images.paths[0], Stored) for images in files.values())
    if in_shards or sum(map(len, files.values())) > COMPARED_FILES:
        return [], False
    by_size: dict[int, list[Place]] = {}
    for split, images in files.items():
        rows = images.labels.tolist()
        labels = map(tuple, rows) if images.labels.ndim > 1 else rows
        for path, label in zip(images.paths, labels, strict=True):
            with suppress(OSError):
                by_size.setdefault(os.stat(path).st_size, []).append(Place(split, label, path))
    by_content: dict[str, list[Place]] = {}
    left = most_bytes
    for size, places in by_size.items():
        if size and len(places) > 1:
            left -= size * len(places)
            if left < 0:
                break
            for place in places:
                with suppress(OSError):
                    by_content.setdefault(sha256(Path(place.path)), []).append(place)
    return [places for places in by_content.values() if len(places) > 1], left >= 0


def _is_image(path: str) -> bool:
    try:
        return header(path) is not None
    except Exception:  # each of Pillow's readers fails in its own ways on a damaged file
        return False
