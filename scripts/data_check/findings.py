"""Judge an inspected data set: faults, which should be fixed before training, and notes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, islice
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.common.label_answers import count_together
from scripts.data_check.survey import WORDS, Inspected, Survey, class_names
from utils.config import spelling
from utils.config.image_size import sides, size_text
from utils.config.spelling import counted, printable
from utils.data.decoded import FOLDER
from utils.data.first_look import LONG, Seen, of_classes, remarks
from utils.data.formats.class_folders import deeper, like_splits
from utils.data.formats.listing import is_image, unread_ending
from utils.data.formats.readers import class_counts

EXAMPLES = 3  # named in a line
RANDOM_SHARE = 0.2  # share of images validated in a random split, as a user might draw it
TOO_SMALL = 0.5  # ratio of shorter side to --image-size below which an image is noted
LOST = ("few levels", "cut off", "only alpha")  # kinds of remarks that spoil training
HUGE_PIXELS = 20_000_000
NO_ENDING = "no image ending"
LOOSE = "loose image"
OTHER_FORMAT = "format that is not read"


@dataclass(frozen=True)
class Remark:
    """A fault or a note: ``count`` images (or classes) of ``kind``; ``text`` says what, where and what to do.

    ``count`` is 0 for a remark about all images that was found by looking at a sample of them.
    """

    kind: str
    count: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Findings:
    """Findings about a data set. ``problems``: texts about single images, by their index in the survey."""

    faults: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    problems: dict[int, list[str]] = field(default_factory=dict)

    def fault(self, kind: str, count: int, text: str) -> None:
        self.faults.append(Remark(kind, count, text))

    def note(self, kind: str, count: int, text: str) -> None:
        self.notes.append(Remark(kind, count, text))

    def images(
        self, to: list[Remark], kind: str, count: int, what: str, names: Iterable[str], advice: str = ""
    ) -> None:
        """Add to the list ``to`` a remark about ``count`` images, if any; ``names`` yields at least the first names.

        ``what``: text that says what the images are. ``advice``: text for the end of the remark.
        """
        if count:
            named = some(islice(names, EXAMPLES), count=count)
            to.append(Remark(kind, count, f"{counted(count)} {what}: {named}{advice}"))

    def problem(self, index: int, text: str) -> None:
        self.problems.setdefault(int(index), []).append(text)


def judge(survey: Survey, inspected: Inspected) -> Findings:
    """Findings about a survey and its images: all that is wrong or remarkable."""
    findings = Findings()
    records, damage, looks = inspected
    if survey.refusal is not None:
        findings.fault("refusal of training", 1, " ".join(survey.refusal.split()))
    _classes(survey, findings)
    for line in survey.of_test:  # labels of all of them may be unknown on purpose
        (findings.fault if "test" in survey.ranges else findings.note)("rows to test on", 0, line)
    names = (f"{survey.name(index)} {reason}" for index, reason in sorted(damage.items()))
    findings.images(findings.faults, "damaged", len(damage), "cannot be decoded", names, "; replace or remove")
    for index, reason in damage.items():
        findings.problem(index, f"damaged: {reason}")
    _duplicates(survey, records, findings)
    _groups(survey, findings)
    if survey.paths is not None:
        _files(survey, records, findings)
        _sizes(survey, records, findings)
        _contents(survey, looks, findings)
    _ignored(survey, findings)
    return findings


some = partial(spelling.some, shown=EXAMPLES)


# --------------------------------------------------------------------------------------------- classes


def counts_of(survey: Survey) -> np.ndarray:
    """Number of images of each class, int (splits, classes)."""
    return np.stack([class_counts(images.labels, len(survey.classes)) for images in survey.images])


def _classes(survey: Survey, findings: Findings) -> None:
    """Add findings about classes that are empty, missing in one split, or apparently one class under two names."""
    counts = counts_of(survey)
    trees = survey.trees
    folders = {split: set(class_names(tree)) for split, tree in trees.items()}
    left_out = set().union(*(names for split, names in folders.items() if split != "test")) - set(survey.classes)
    folders = {split: names - left_out for split, names in folders.items()}  # by a class map
    for split, names in folders.items():
        its_counts = dict(zip(survey.classes, counts[list(WORDS).index(split)], strict=True))
        empty = [name for name in sorted(names) if its_counts.get(name) == 0]
        if empty:
            paths = some(survey.below(trees[split] / name) for name in empty)
            findings.fault("empty classes", len(empty), f"no images in {paths}; fill or remove")
    for other in [split for split in folders if split != "train"]:
        if (
            other != "test"
            and len(folders[other]) == 1 < len(folders["train"])
            and not folders[other] & folders["train"]
        ):
            continue  # its images are in no class folders, as training's refusal says
        for has, lacks in ((other, "train"), ("train", other)):
            if names := folders[has] - folders[lacks]:
                here = f"only in {trees[has].name}/, not in {trees[lacks].name}/: {some(sorted(names))}"
                findings.fault("classes in one split", len(names), f"{here}; add them there or remove them here")
    found = dict(zip(survey.ranges, counts > 0, strict=True))
    # rows of a table, or a share of the training images
    for other in [split for split in found if split not in (*trees, "train")]:
        if survey.several or not found[other].any():
            continue
        for has, lacks in ((other, "train"), ("train", other)):
            if names := [printable(survey.classes[one]) for one in np.flatnonzero(found[has] & ~found[lacks]).tolist()]:
                text = f"only in {WORDS[has]}, not in {WORDS[lacks]}: {some(names)}; each split needs images of them"
                (findings.note if survey.is_divided else findings.fault)("classes in one split", len(names), text)
    for line in like_splits(trees["train"], survey.classes) if list(trees) == ["train"] else ():
        findings.note("class named like a split", 1, line)
    for line in _all_deeper(survey, counts) if "train" in trees else ():
        findings.note("folders in all classes", 1, line)
    if survey.several:
        _labels(survey, findings)
    for kind, text in of_classes(counts[:2], survey.classes, survey.several):
        (findings.fault if kind == "class names alike" else findings.note)(kind, 1, text)


def _all_deeper(survey: Survey, counts: np.ndarray) -> list[str]:
    """The line that no class folder of the training tree holds images itself, unless reading it has warned of that."""
    parts = survey.images[:1] if "val" in survey.trees else survey.images[:2]  # both, of one tree
    found = [
        deeper(survey.trees["train"], images, survey.classes)
        for images, count in zip(parts, counts.sum(1), strict=False)
        if count
    ]
    warned = any("holds images itself" in line for line in survey.warnings)
    return found[0] if found and all(found) and not warned else []


def _labels(survey: Survey, findings: Findings) -> None:
    """Add findings about images without labels, labels from which nothing can be learned, and equivalent labels."""
    unknown = np.flatnonzero((survey.labels < 0).all(1))
    if len(unknown):
        named = spelling.some(map(survey.name, unknown[:EXAMPLES].tolist()), count=len(unknown))
        text = f"all labels are missing of {counted(len(unknown))}: {named}"
        findings.fault("no known label", len(unknown), text)
    empty = int((survey.labels == 0).all(1).sum())
    if empty:
        findings.note("without labels", empty, f"{counted(empty)} with no label; they count as images of none")
    for split, indices in survey.ranges.items():
        labels = survey.labels[indices]
        for kind, value in (("on no image", 1), ("on every image", 0)):
            names = [printable(survey.classes[one]) for one in np.flatnonzero(~(labels == value).any(0)).tolist()]
            if names and len(labels):
                hidden = "nothing can be learned of it" if split == "train" else "its figures do not exist"
                text = f"{WORDS[split]} shows {spelling.some(names)} {kind} of which that is known; {hidden}"
                findings.note(f"labels {kind}", len(names), text)
    together = count_together(survey.labels == 1)
    own = np.diagonal(together)
    same = np.argwhere(np.triu((together > 0) & (together == own) & (together == own[:, None]), 1)).tolist()
    if same:
        names = (" = ".join(printable(survey.classes[place]) for place in pair) for pair in same)
        text = f"always together, never alone: {spelling.some(names, count=len(same))}"
        findings.note("labels that are one", len(same), text)


# ------------------------------------------------------------------------------------------ duplicates


def equal_groups(hashes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the positions, ascending, of each hash that occurs at least twice. Empty hashes count as different."""
    order = np.argsort(hashes, kind="stable")
    order = order[np.searchsorted(hashes[order], b"", side="right") :]
    _, first, counts = np.unique(hashes[order], return_index=True, return_counts=True)
    for begin, count in zip(first[counts > 1], counts[counts > 1], strict=True):
        yield order[begin : begin + count]


def _duplicates(survey: Survey, records: np.ndarray, findings: Findings) -> None:
    """Add findings on equal pixels in two splits (leakage), with different labels (conflict), or repeated (a note)."""
    leaked: dict[tuple[str, str], list[tuple[int, int]]] = {pair: [] for pair in combinations(survey.ranges, 2)}
    conflicts: dict[str, list[np.ndarray]] = {split: [] for split in survey.ranges}
    repeats: dict[str, list[tuple[int, int]]] = {split: [] for split in survey.ranges}
    for group in sorted(equal_groups(records["pixel_hash"]), key=lambda group: group[0]):
        members = {split: group[(group >= its.start) & (group < its.stop)] for split, its in survey.ranges.items()}
        for (first, second), pairs in leaked.items():
            if len(members[first]):
                pairs += [(index, _twin(survey, records, index, members[first])) for index in members[second]]
        for split, equal in members.items():
            if not all(survey.agree(index, equal).all() for index in equal):
                conflicts[split].append(equal)
            else:
                repeats[split] += [(index, equal[0]) for index in equal[1:]]
    for splits, pairs in leaked.items():
        _add_leaks(survey, records, splits, pairs, findings)
    for split, equal_images in conflicts.items():
        _add_conflicts(survey, split, equal_images, findings)
    for split, pairs in repeats.items():
        what = f"of {split} with the pixels of another of the class"
        findings.images(findings.notes, "repeated", len(pairs), what, (_pair(survey, pair) for pair in pairs))
        for index, other in pairs:
            findings.problem(index, f"repeats {survey.name(other)}")


def share(count: int, total: int) -> str:
    """``count`` of ``total`` in percent, as text such as '97 %' or '0.12 %'."""
    percent = 100 * count / total
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _twin(survey: Survey, records: np.ndarray, index: int, others: np.ndarray) -> int:
    """Index of the image in ``others`` that best matches image ``index``, which has equal pixels.

    Preferred is one with the same file, then one with the same label.
    """
    same_file = (records["sha256"][others] == records["sha256"][index]) & (records["sha256"][index] != b"")
    return int(others[np.argmax(2 * same_file + survey.agree(index, others))])


def _add_leaks(
    survey: Survey,
    records: np.ndarray,
    splits: tuple[str, str],
    leaked: Sequence[tuple[int, int]],
    findings: Findings,
) -> None:
    """Add a finding about ``leaked`` images of the second of ``splits``, each with an equal one of the first."""
    if not leaked:
        return
    first, second = splits
    later, earlier = map(np.array, zip(*leaked, strict=True))
    files = int(np.sum((records["sha256"][later] == records["sha256"][earlier]) & (records["sha256"][earlier] != b"")))
    elsewhere = sum(not survey.agree(index, np.array([other])).all() for index, other in leaked)
    how = "" if survey.paths is None else f" ({files:,} the same file, {len(leaked) - files:,} the same pixels)"
    labels = f", {elsewhere:,} of them under another class" if elsewhere else ""
    percent = share(len(leaked), len(survey.ranges[second]))
    what = f"of {second} ({percent}) with the pixels of one of {first}{how}{labels}"
    names = (_pair(survey, pair) for pair in leaked)
    findings.images(findings.faults, "in both splits", len(leaked), what, names, "; remove one of each pair")
    for index, other in leaked:
        findings.problem(index, f"also in {first}: {survey.name(other)}")
        findings.problem(other, f"also in {second}: {survey.name(index)}")


def _add_conflicts(survey: Survey, split: str, groups: Sequence[np.ndarray], findings: Findings) -> None:
    if not groups:
        return
    pairs = []
    shown = []
    for group in groups:
        others = [(int(index), group[~survey.agree(index, group)]) for index in group]
        found = [(index, int(other[0])) for index, other in others if len(other)]  # missing labels contradict nothing
        pairs += found
        shown.append(found[0])
    named = some((_pair(survey, pair, labels=True) for pair in shown), count=len(groups))
    findings.fault(
        "label conflicts",
        len(pairs),
        f"{counted(len(pairs))} of {split} with equal pixels and different classes: {named}; keep the right ones",
    )
    for index, other in pairs:
        findings.problem(index, f"label conflict with {survey.name(other)}")


def _pair(survey: Survey, pair: tuple[int, int], labels: bool = False) -> str:
    if survey.paths is None and labels:
        return " = ".join(f"{survey.name(index)} ({survey.label_of(index)})" for index in pair)
    return " = ".join(map(survey.name, pair))


# ---------------------------------------------------------------------------------------------- groups


def _groups(survey: Survey, findings: Findings) -> None:
    """Add findings about groups in two splits (leakage), and how a random split would flatter results (a note)."""
    groups = {split: images.groups for split, images in zip(survey.ranges, survey.images, strict=True)}
    known = {split: names for split, names in groups.items() if names is not None}
    if not {"train", "val"} <= known.keys():
        return
    mixed = False
    for first, second in combinations(known, 2):
        earlier = set(known[first])
        shared = np.flatnonzero([group in earlier for group in known[second]])
        if len(shared):
            mixed = True
            names = sorted(set(known[second][shared]))
            findings.fault(
                "groups in both splits",
                len(names),
                f"{counted(len(names), 'group')} in {first} and in {second}, with "
                f"{share(len(shared), len(known[second]))} of {second}'s images ({some(names)}), so that results "
                "flatter; --folds and --val-split keep groups whole",
            )
        for index in shared:
            problem = f"group also in {first}: {printable(known[second][index])}"
            findings.problem(survey.ranges[second][index], problem)
    _, sizes = np.unique(np.concatenate([*known.values()]).astype(str), return_counts=True)
    flattered = flattered_by_random(sizes)
    if flattered > 0:
        kept = "" if mixed or not len(known["val"]) else "this split keeps them whole, but "
        findings.note(
            "groups",
            len(sizes),
            f"{counted(len(sizes), 'group')} of {sizes.mean():.1f} images; {kept}a random split of one image in five "
            f"would have trained on the group of {100 * flattered:.0f} % of its validation images, and flatter: keep "
            "groups whole, as --folds and --val-split do",
        )


def flattered_by_random(sizes: np.ndarray) -> float:
    """Share of a random split's validation images that have training images of the same group.

    ``sizes``: number of images in each group. If each image is validated with probability ``RANDOM_SHARE``, the s - 1
    other images of a group of s are all validated, too, with this probability to the power of s - 1.
    """
    return float((sizes * (1 - RANDOM_SHARE ** (sizes - 1.0))).sum() / sizes.sum())


# --------------------------------------------------------------------------------------- sizes, formats


def _sizes(survey: Survey, records: np.ndarray, findings: Findings) -> None:
    """Add findings about images of unsuitable size, after EXIF rotation."""
    width = records["width"].astype(np.int64)
    height = records["height"].astype(np.int64)
    known = records["pixel_hash"] != b""
    side = survey.spec.image_size
    short = np.minimum(width, height)
    long = np.maximum(width, height)

    def add(chosen: np.ndarray, to: list[Remark], kind: str, what: str, advice: str) -> None:
        places = np.flatnonzero(known & chosen)
        names = (f"{survey.name(i)} ({width[i]}x{height[i]})" for i in places)
        findings.images(to, kind, len(places), what, names, advice)
        for place in places:
            findings.problem(place, f"{kind}: {width[place]}x{height[place]}")

    if survey.spec.fixed_size:
        wrong = (width != side) | (height != side)
        add(wrong, findings.faults, "wrong size", f"not {side}x{side}", "; they would be resampled, replace them")
    else:
        down, across = sides(survey.image_size)
        scale = np.minimum(height / down, width / across)
        size = size_text(survey.image_size)
        add(scale < TOO_SMALL, findings.notes, "small", f"below half of the {size} pixels that the network sees", "")
        add(
            width * height > HUGE_PIXELS,
            findings.notes,
            "huge",
            f"above {HUGE_PIXELS / 1e6:.0f} million pixels",
            "; shrink them once, and each epoch is faster",
        )
        add(
            long > LONG * short,
            findings.notes,
            "extreme ratio",
            f"more than {LONG:g} times as long as wide",
            "; a crop shows little of them",
        )


def _contents(survey: Survey, looks: Sequence[Seen], findings: Findings) -> None:
    """Add findings about content that a network does not see, or that differs between classes or splits."""
    for kind, text in remarks(looks, survey.colour):
        if kind != "extreme ratio":  # see ``_sizes``
            (findings.fault if kind in LOST else findings.note)(kind, 0, text)


def _files(survey: Survey, records: np.ndarray, findings: Findings) -> None:
    """Add findings about converted modes, EXIF rotation, and endings that do not match the content."""
    known = records["pixel_hash"] != b""
    colour = survey.colour
    usual = (colour, {"2": "LA", "4": "RGBA"}.get(colour))
    odd = Counter(mode.decode() for mode in records["mode"][known] if mode.decode().partition("x")[0] not in usual)
    if odd:
        modes = ", ".join(f"{mode} {count:,}" for mode, count in odd.most_common())
        findings.note("converted", odd.total(), f"{counted(odd.total())} not in mode {colour}: {modes}")
    rotated = np.flatnonzero(known & records["rotated"])
    what = "turned upright when read"
    findings.images(findings.notes, "EXIF rotation", len(rotated), what, map(survey.name, rotated))
    for place in rotated:
        findings.problem(place, "EXIF rotation")
    formats = {**Image.registered_extensions(), ".npy": "NPY"}
    other = []
    for place in np.flatnonzero(known):
        kind = records["format"][place].decode()
        ending = os.path.splitext(survey.paths[place])[1].lower()
        if ending and formats.get(ending) != {"MPO": "JPEG"}.get(kind, kind):  # rows of a table have no ending
            other.append((place, kind))
    names = (f"{survey.name(place)} is {kind}" for place, kind in other)
    findings.images(findings.notes, "other format", len(other), "not in the format of their ending", names)
    for place, kind in other:
        findings.problem(place, f"is {kind}")


# ---------------------------------------------------------------------------------------- what is ignored


def _ignored(survey: Survey, findings: Findings) -> None:
    """Add findings about entries of the data set's folder that are not read."""
    kinds: dict[str, list[str]] = {}
    for tree in survey.trees.values():
        for kind, path in _unread(tree):
            kinds.setdefault(kind, []).append(survey.below(path))
    loose = kinds.pop(LOOSE, [])
    unread = kinds.pop(OTHER_FORMAT, [])
    if survey.trees and survey.root not in survey.trees.values():
        own = {*(tree.name for tree in survey.trees.values()), FOLDER}
        beside = [
            printable(entry.name) + "/" * entry.is_dir() for entry in os.scandir(survey.root) if entry.name not in own
        ]
        kinds |= {"beside the splits": beside} if beside else {}
    what = "in no class folder, and so not read"
    advice = "; move them into one"
    findings.images(findings.faults, "outside class folders", len(loose), what, sorted(loose), advice)
    endings = Counter(unread_ending(path)[0] for path in unread)
    counts = ", ".join(f"{ending} {count:,}" for ending, count in endings.most_common())
    advice = "; convert them to JPEG or PNG"
    findings.images(findings.faults, "formats that are not read", len(unread), f"({counts})", sorted(unread), advice)
    for kind, paths in kinds.items():
        if kind == NO_ENDING:
            endings = Counter(os.path.splitext(path)[1] or "none" for path in paths)
            kind += ": " + ", ".join(f"{ending} {count:,}" for ending, count in endings.most_common(EXAMPLES))
        findings.note("not read", len(paths), f"{some(sorted(paths))} ({kind})")


def _unread(tree: Path) -> Iterator[tuple[str, Path]]:
    """Yield entries below ``tree`` that readers skip, each with its kind."""
    try:
        entries = list(os.scandir(tree))
    except OSError:  # training refuses it too, and gives the reason
        return
    for entry in entries:
        if entry.name == FOLDER:
            continue
        if entry.name.startswith("."):
            yield "hidden", Path(entry.path)
        elif not entry.is_dir():
            yield (LOOSE if is_image(entry.name) else _other(entry.name)), Path(entry.path)
    for name in class_names(tree):
        for folder, subfolders, files in os.walk(tree / name):
            for subfolder in [*subfolders]:
                path = Path(folder, subfolder)
                if subfolder.startswith("."):
                    subfolders.remove(subfolder)
                    yield "hidden", path
                elif path.is_symlink():
                    yield "link to a folder", path
            for file in files:
                if file.startswith("."):
                    yield "hidden", Path(folder, file)
                elif not is_image(file):
                    yield _other(file), Path(folder, file)


def _other(name: str) -> str:
    return OTHER_FORMAT if unread_ending(name) else NO_ENDING
