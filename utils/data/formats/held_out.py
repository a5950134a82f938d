"""Validation images taken from the training images: a share of them (``--val-split``) or one of ``--folds``.

Both keep all images of a group, such as a patient, on one side, if the data set has groups.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.checkpoint import checkpoint
from utils.checkpoint.resume import ResumePoint
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.config.spelling import some
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.readers import Images, Splits, class_counts
from utils.data.formats.shards.members import Members

HASH_BYTES = 8


@dataclass(frozen=True)
class Folds:
    """The assignment of the training images to ``count`` folds, made with ``seed``.

    ``folds``: uint8 (n,), each image's fold, in the data set's order. ``images``: uint64 (n,), a hash of each image's
    key, by which another run recognises the image.
    """

    images: np.ndarray
    folds: np.ndarray
    count: int
    seed: int

    def state(self) -> dict[str, Any]:
        """The assignment in the form that a checkpoint stores."""
        return {
            "images": torch.from_numpy(self.images.view(np.int64)),
            "folds": torch.from_numpy(self.folds),
            "count": self.count,
            "seed": self.seed,
        }

    @classmethod
    def from_state(cls, state: Any) -> Folds | None:
        """The assignment stored in ``state``, the content of a checkpoint; None if there is none."""
        try:
            stored = state["folds"]
            images, folds = (stored[name].numpy() for name in ("images", "folds"))
            return cls(images.view(np.uint64), folds, int(stored["count"]), int(stored["seed"]))
        except (KeyError, TypeError, AttributeError, ValueError):
            return None


def hold_out(splits: Splits, settings: DataSettings, trained: ResumePoint | None) -> tuple[Splits, Folds | None]:
    """Divide the training images into training and validation images; return the new splits and the folds, if used.

    Images that have a fold in the checkpoint ``trained``, or in that of ``--folds-from``, keep it. Raises
    ``UserError``.
    """
    images = splits.train
    assert images is not None
    folds = None
    told: tuple[str, ...] = ()
    if settings.folds is not None:
        kept = stored_folds(settings, trained)
        folds = folds_of(images, splits.classes, settings, kept)
        if trained is None and kept is not None:
            told = _told_of_known(np.isin(folds.images, kept.images), settings)
        chosen = folds.folds == settings.fold
    elif images.groups is not None:
        chosen = _held_out_groups(images, splits.classes, settings)
    else:
        keys = keys_of(images, splits.classes)
        chosen, told = held_out(keys, images.labels.numpy(), splits.classes, settings)
    train, validation = (images.take(np.flatnonzero(side)) for side in (~chosen, chosen))
    return splits._replace(train=train, validation=validation, warnings=(*told, *splits.warnings)), folds


# ----------------------------------------------------------------------------------------------- keys


def keys_of(images: Images, classes: Sequence[str]) -> Iterator[bytes]:
    """The key of each training image, which stays the same when other images are added.

    For a file, it is the path below the tree (see ``key_of``); in shards, class and name; in memory and in tables
    whose rows have no names, class and number (which stay the same only if images are added at the end). Keys of
    multi-label images leave out the class.
    """
    paths = getattr(images, "paths", None)
    if isinstance(paths, FilePaths):
        return map(key_of, paths.below())
    texts: Iterable[str] = map(str, range(len(images)))
    if isinstance(paths, Members):
        texts = (name.decode(errors="surrogateescape") for name in paths.names)
    if images.labels.ndim == 1:
        texts = (f"{classes[label]}/{text}" for label, text in zip(images.labels.tolist(), texts, strict=True))
    return (text.encode(errors="surrogateescape") for text in texts)


def key_of(name: bytes) -> bytes:
    """The key that decides whether a file is for validation: ``name``, its path below the tree, without the ending.

    Upper and lower case count as equal, as do all Unicode forms of a letter, since some file systems change both. Files
    that differ only in the ending, often one picture in two formats, stay together.
    """
    text = unicodedata.normalize("NFC", os.fsdecode(name.rpartition(b".")[0]))
    return unicodedata.normalize("NFC", text.casefold()).encode("utf-8", "surrogatepass")


def _key_of_group(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _hashes(keys: Iterable[bytes], count: int, seed: int = 0) -> np.ndarray:
    """A hash of each of ``count`` keys, uint64 (count,), which depends only on the key and ``seed``."""
    salt = seed.to_bytes(8, "big")
    digests = (hashlib.blake2b(key, digest_size=HASH_BYTES, salt=salt).digest() for key in keys)
    return np.fromiter((int.from_bytes(digest, "big") for digest in digests), dtype=np.uint64, count=count)


# ---------------------------------------------------------------------------------------------- a share


def held_out(
    keys: Iterable[bytes], labels: np.ndarray, classes: Sequence[str], settings: DataSettings
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Choose the images for validation by ``keys`` and ``labels``, int64 (n,): bool (n,), and warnings.

    An image is chosen if the hash of its key, as a fraction of the largest possible hash, lies below the share. So
    adding or removing images moves no other image, with one exception: a class left without validation images lends
    validation its image with the smallest hash, and one left without training images lends training the image with the
    largest. Images added later may send a lent image back: from validation to training or, only if the whole class was
    below the share, from training to validation. Raises ``UserError`` for a class with one image.

    For multi-label images, labels int8 (n, classes), the keys alone decide. ``--val-split-by draw``: see ``_drawn``.
    """
    if labels.ndim > 1:
        return _held_out_of_several(keys, len(labels), settings), ()
    if settings.val_split_by == "draw":
        assert settings.val_split is not None
        return _drawn(labels, classes, settings.val_split), ()
    hashes = _hashes(keys, len(labels))
    chosen = hashes < _share(settings)
    counts, kept = (np.bincount(which, minlength=len(classes)) for which in (labels, labels[chosen]))
    lent = np.flatnonzero((counts > 0) & ((kept == 0) | (kept == counts))).tolist()
    for label in lent:
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            raise UserError(
                f"--val-split {settings.val_split:g}: class {classes[label]} has {len(members)} image(s); it needs one "
                "to train on and one to validate on"
            )
        none = not kept[label]
        chosen[members[np.argmin(hashes[members]) if none else np.argmax(hashes[members])]] = none
    if not lent:
        return chosen, ()
    return chosen, (
        f"--val-split {settings.val_split:g}: {len(lent)} of {len(classes)} classes are so small that the names leave "
        "one side without an image; it gets one, which may go back once there are more: "
        + some([classes[label] for label in lent]),
    )


def _held_out_of_several(keys: Iterable[bytes], count: int, settings: DataSettings) -> np.ndarray:
    if settings.val_split_by == "draw":
        raise UserError("--val-split-by draw: draws from each class, and images have several labels; leave it out")
    chosen = _hashes(keys, count) < _share(settings)
    if chosen.all() or not chosen.any():
        raise UserError(f"--val-split {settings.val_split:g}: leaves one side without an image; give another share")
    return chosen


def _share(settings: DataSettings) -> np.uint64:
    """The hash below which an image belongs to the share for validation."""
    return np.uint64(int(settings.val_split * 2 ** (8 * HASH_BYTES)))


def _held_out_groups(images: Images, classes: Sequence[str], settings: DataSettings) -> np.ndarray:
    """Choose the images for validation, bool (n,), by their groups' names, so that each group stays together.

    Raises ``UserError`` if this leaves a class without training images, or no image for validation.
    """
    if settings.val_split_by == "draw":
        raise UserError("--val-split-by draw: draws single images of a group; leave it out, or give --group-column off")
    assert images.groups is not None
    chosen = _hashes(map(_key_of_group, images.groups), len(images)) < _share(settings)
    trained = images.labels[torch.from_numpy(~chosen)]
    counts, kept = (class_counts(labels, len(classes)) for labels in (images.labels, trained))
    lacking = np.flatnonzero((counts > 0) & (kept == 0))
    if len(lacking) or not chosen.any():
        what = f"class {classes[lacking[0]]} without a training image" if len(lacking) else "no validation image"
        raise UserError(
            f"--val-split {settings.val_split:g}: leaves {what}, as all images of a group stay together; give another "
            "share, the splits in a column, or --folds, no more of them than each class has groups"
        )
    return chosen


def _drawn(labels: np.ndarray, classes: Sequence[str], share: float) -> np.ndarray:
    """Choose the images for validation, bool (n,), as older versions did: adding a file may move others.

    One random generator draws for all classes, in turn.
    """
    chosen = np.zeros(len(labels), dtype=bool)
    generator = np.random.Generator(np.random.Philox(key=[0, 0]))
    for label, name in enumerate(classes):
        members = np.flatnonzero(labels == label)
        count = round(share * len(members))
        if len(members) and not 0 < count < len(members):
            raise UserError(
                f"--val-split {share:g}: leaves class {name} ({len(members)} images) without training or validation "
                "images"
            )
        chosen[generator.permutation(members)[:count]] = True
    return chosen


# ----------------------------------------------------------------------------------------------- folds


def stored_folds(settings: DataSettings, trained: ResumePoint | None) -> Folds | None:
    """The existing folds, of the run of ``trained`` or else of ``--folds-from``; None if there are none.

    Raises ``UserError`` if the run of ``--folds-from`` has no folds, or folds of a different number or seed.
    """
    if trained is not None and trained.settings.get("folds") is not None:
        stored = Folds.from_state(checkpoint.load(trained.path, trained.digest or None, outline=True))
        if stored is not None and (stored.count, stored.seed) == (settings.folds, settings.fold_seed):
            return stored
    if settings.folds_from is None:
        return None
    path = Path(settings.folds_from)
    if path.is_dir():
        newest = checkpoint.newest(path / "checkpoints", lambda line: None)
        stored = Folds.from_state(newest[1]) if newest else None
    else:
        try:
            stored = Folds.from_state(checkpoint.load(path, outline=True))
        except UserError as error:
            raise UserError(*(f"--folds-from {line}" for line in error.mistakes)) from error
    if stored is None:
        raise UserError(f"--folds-from {path}: holds no checkpoint with folds; give a run that had --folds")
    if (stored.count, stored.seed) != (settings.folds, settings.fold_seed):
        raise UserError(
            f"--folds-from {path}: has --folds {stored.count} --fold-seed {stored.seed}, not --folds {settings.folds} "
            f"--fold-seed {settings.fold_seed}"
        )
    return stored


def _told_of_known(known: np.ndarray, settings: DataSettings) -> tuple[str, ...]:
    """A warning if only some images are ``known``, bool (n,), to ``--folds-from``. Raises ``UserError`` if none are."""
    count = np.count_nonzero(known)
    if not count:
        raise UserError(
            f"--folds-from {settings.folds_from}: its folds have none of the training images, by their names; give "
            "a run on these, read in the same way, as class folders, table and shards name them differently, or "
            "leave the flag out"
        )
    if count == len(known):
        return ()
    return (
        f"--folds-from {settings.folds_from}: its folds have {count:,} of the {len(known):,} training images, by their "
        f"names; the other {len(known) - count:,} are new to it and are put into folds now",
    )


def folds_of(images: Images, classes: Sequence[str], settings: DataSettings, kept: Folds | None) -> Folds:
    """Assign ``images`` to folds; images with a fold in ``kept`` stay in it. Raises ``UserError``.

    Images with the same group or key share a fold. scikit-learn's splitters take the images in the order of their
    hashes, so that the folds depend on the seed and the set of images, not on their order. If some images already
    have folds, each other image goes to the fold with the fewest images of its class (see ``_spread``).
    """
    count = settings.folds
    assert count is not None
    keys = [*keys_of(images, classes)]
    hashes = _hashes(keys, len(keys), settings.fold_seed)
    unit_of = np.unique(hashes, return_inverse=True)[1]  # sorted, so numbered in the order of the hashes
    if images.groups is not None:
        groups = _hashes(map(_key_of_group, images.groups), len(keys), settings.fold_seed)
        unit_of = _joined(np.unique(groups, return_inverse=True)[1], unit_of)
    units = unit_of.max() + 1
    strata = strata_of(images.labels.numpy(), count)
    fold_of_unit = _known(kept, hashes, unit_of, units, settings, images)
    if (fold_of_unit >= 0).any():
        _spread(fold_of_unit, unit_of, strata, count)
    else:
        fold_of_unit = _dealt(unit_of, units, strata, settings, images.groups is not None)
    return Folds(hashes, fold_of_unit[unit_of].astype(np.uint8), count, settings.fold_seed)


def _joined(group_of: np.ndarray, key_of: np.ndarray) -> np.ndarray:
    """Each image's unit, int (n,), from the numbers of its group and key: groups with images of one key are one unit.

    Such as one picture in two formats: a fold is kept under the key. The units are in the order of their first groups.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    keys = key_of + group_of.max() + 1  # nodes of a graph, after those of the groups
    edges = coo_array((np.ones(len(keys)), (group_of, keys)), shape=(keys.max() + 1, keys.max() + 1))
    return connected_components(edges, directed=False)[1][group_of]


def strata_of(labels: np.ndarray, folds: int) -> np.ndarray:
    """The stratum of each image, int64 (n,), to spread evenly over ``folds`` folds: its label or combination of labels.

    ``labels``: (n,), or (n, classes) of multi-label images. All combinations that fewer images have than there are
    folds form one stratum, since they cannot be spread.
    """
    if labels.ndim == 1:
        return labels
    strata = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    counts = np.bincount(strata)
    return np.where(counts[strata] < folds, len(counts), strata)


def _known(
    kept: Folds | None, hashes: np.ndarray, unit_of: np.ndarray, units: int, settings: DataSettings, images: Images
) -> np.ndarray:
    """The fold in ``kept`` of each unit (the images of one group or key), int64 (units,); -1 if ``kept`` has none.

    Raises ``UserError`` if ``kept`` has the images of one unit in several folds.
    """
    fold_of_unit = np.full(units, -1)
    if kept is None or not len(kept.images):
        return fold_of_unit
    order = np.argsort(kept.images)
    places = order[np.searchsorted(kept.images, hashes, sorter=order).clip(max=len(order) - 1)]
    known = np.flatnonzero(kept.images[places] == hashes)
    folds = kept.folds[places[known]].astype(np.int64)
    fold_of_unit[unit_of[known]] = folds
    apart = known[fold_of_unit[unit_of[known]] != folds]
    if len(apart):
        assert images.groups is not None
        # Without groups, a unit has one hash, and so one fold. Of groups that are one unit, each may have one fold.
        names = sorted(set(images.groups[np.isin(unit_of, unit_of[apart])]))
        raise UserError(
            f"--folds {settings.folds}: {len(names)} group(s) have images in several of the folds that are kept "
            f"({some(names)}): the groups have changed since; begin a new run without --folds-from"
        )
    return fold_of_unit


def _dealt(unit_of: np.ndarray, units: int, strata: np.ndarray, settings: DataSettings, grouped: bool) -> np.ndarray:
    """Deal out the units (images of one group or key) by scikit-learn's splitters; return their folds, int64 (units,).

    Raises ``UserError`` if there are too few units for the folds.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    count = settings.folds
    assert count is not None
    if units < count:
        what = "groups" if grouped else "images"
        raise UserError(f"--folds {count}: there are only {units} {what} to train on")
    order = np.argsort(unit_of, kind="stable")
    several = grouped and units < len(unit_of)
    if not several:  # of images with one key, the first stands for all
        order = order[np.unique(unit_of[order], return_index=True)[1]]
    splitter = StratifiedGroupKFold(count) if several else StratifiedKFold(count)
    folds = np.full(units, -1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes smaller than the number of folds; a run has its own warning
            parts = [*splitter.split(order, strata[order], unit_of[order])]
    except ValueError as error:
        raise UserError(f"--folds {count}: no class has so many images; give fewer") from error
    for number, (_, validated) in enumerate(parts):
        folds[unit_of[order[validated]]] = number
    if len(np.unique(folds)) < count:
        raise UserError(f"--folds {count}: the groups are too few or too large to fill so many; give fewer")
    return folds


def _spread(fold_of_unit: np.ndarray, unit_of: np.ndarray, strata: np.ndarray, count: int) -> None:
    """Fill in the missing folds (-1) in ``fold_of_unit``, largest unit first, so that classes stay evenly spread.

    A unit, the images of one group or key, gets the fold with which the sum of squares of each class's shares in the
    folds grows least: for a single image, the fold with the fewest images of its class; of equal folds, the smallest.
    """
    order = np.argsort(unit_of, kind="stable")
    ends = np.cumsum(np.bincount(unit_of, minlength=len(fold_of_unit)))
    members = np.split(order, ends[:-1])
    totals = np.bincount(strata)
    filled = np.zeros((count, len(totals)))
    folds = fold_of_unit[unit_of]
    np.add.at(filled, (folds[folds >= 0], strata[folds >= 0]), 1)
    sizes = filled.sum(1)
    for unit in sorted(np.flatnonzero(fold_of_unit < 0).tolist(), key=lambda unit: -len(members[unit])):
        own, many = np.unique(strata[members[unit]], return_counts=True)
        growth = (filled[:, own] * (many / totals[own] ** 2)).sum(1)
        fold = np.lexsort((sizes, growth))[0]
        fold_of_unit[unit] = fold
        filled[fold, own] += many
        sizes[fold] += many.sum()
