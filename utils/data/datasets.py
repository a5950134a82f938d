"""Reading a data set of the table: ``get_data`` to train on, ``get_test_data`` to evaluate, ``DataReader`` in a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from utils.checkpoint.fingerprint import ends_with, same_images
from utils.checkpoint.resume import ResumePoint, find, is_at
from utils.config.datasets import SPECS
from utils.config.field import CHECKPOINT
from utils.config.groups.data import DataSettings
from utils.config.settings import Settings, UserError
from utils.data.data_set import Data, in_colour_of, some_contents
from utils.data.division import (
    DIVISION,
    division_flags,
    groups_alike,
    lacking,
    on_both_sides,
    place_of,
    refuse_without_labels,
)
from utils.data.formats import class_folders
from utils.data.formats.class_folders import LISTER, find_splits, hint, training_folder, validation_folder
from utils.data.formats.class_map import read_class_map
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.held_out import hold_out, keys_of
from utils.data.formats.listing import Lister
from utils.data.formats.readers import ImageFiles, Images, Splits
from utils.data.formats.shards.index import read_contents
from utils.data.formats.shards.members import Members, holds_shards
from utils.data.formats.table import lacks_rows_of_val
from utils.data.images.arrays import Header, array_header
from utils.data.images.look import header
from utils.data.images.stored import opened
from utils.data.images.unreadable import MOST_IN_A_ROW
from utils.data.preprocessing import Preprocessing, resolve
from utils.data.progress_log import ProgressLog
from utils.data.splits import read_splits


class DataReader:
    """Reads the images of a run once, even if the search for a run to resume has already needed them.

    ``lister`` lists class folders, with its ``folder`` set for each data set; synthetic data is made on ``device``.
    """

    def __init__(self, device: torch.device, lister: Lister) -> None:
        self._device = device
        self._lister = lister
        self._read: tuple[DataSettings, Path | None, Data] | None = None

    @classmethod
    def of(cls, args: Settings, device: torch.device, progress: ProgressLog, is_main: bool) -> DataReader:
        """The reader for a run with these settings; in a dry run it writes no lists of files."""
        return cls(device, Lister(keeps=not args.run.dry_run, progress=progress, is_main=is_main))

    def find(self, args: Settings, parent: Path, warn: Callable[[str], None]) -> ResumePoint | None:
        """The checkpoint among the runs in ``parent`` that a command continues or evaluates, as ``resume.find``."""
        several = args.run.resume == "auto" and self.multilabel(args.data)
        wanted = args.of_several_labels() if several else args
        return find(wanted, parent, warn, lambda: self.fingerprint(args.data))

    def fingerprint(self, settings: DataSettings) -> str:
        """The fingerprint of the images to train on."""
        return self._data(settings).fingerprint

    def multilabel(self, settings: DataSettings) -> bool:
        """True if images have several labels, by a setting or the shards' index; for hf, this reads the data."""
        if settings.dataname == "hf":
            return self._data(settings).multilabel
        root = Path(settings.datapath or ".")
        contents = read_contents(root) if holds_shards(root) else None
        asked = settings.label_separator is not None or settings.label_columns is not None
        return asked or (contents is not None and contents.multilabel)

    def to_train_on(
        self, settings: DataSettings, point: ResumePoint | None, weights: ResumePoint | None = None
    ) -> Data:
        """The data of a training run that resumes ``point``, or begins with the checkpoint ``weights``."""
        data = self._data(settings, point)
        self._read = None  # a run needs it once, and changes copies: the original must not stay in memory
        return known_to(data, point or weights, settings, self._lister)

    def to_evaluate(self, args: Settings, trained: ResumePoint | None) -> Data:
        """The validation images alone, with the classes of ``trained``, the checkpoint to evaluate."""
        division = "val_split" if args.data.folds is None else "folds"
        explicit = args.origins[division] != CHECKPOINT
        chosen = args.data.class_map if args.origins["class_map"] != CHECKPOINT else None  # the run's may be gone
        if chosen and trained and trained.classes and {*read_class_map(Path(chosen))} != {*trained.classes}:
            raise UserError(
                f"--class-map {chosen}: names other classes than {trained.path}, whose classes count in an evaluation; "
                "leave it out"
            )
        return get_test_data(args.data, self._device, trained, division_is_explicit=explicit, lister=self._lister)

    def _data(self, settings: DataSettings, trained: ResumePoint | None = None) -> Data:
        path = trained.path if trained is not None and settings.folds is not None else None  # whose folds are kept
        if self._read is None or self._read[:2] != (settings, path):
            self._read = (settings, path, get_data(settings, self._device, self._lister, trained))
        return self._read[2]


def get_data(
    settings: DataSettings, device: torch.device, lister: Lister = LISTER, trained: ResumePoint | None = None
) -> Data:
    """Read the data set that the settings name; raises ``UserError`` with advice if data is missing.

    Only synthetic data is made on ``device``; a loader moves other data there. ``lister`` lists class folders and keeps
    its lists in this data set's folder. Images stay in the folds that the run of checkpoint ``trained`` gave them.
    """
    splits = read_splits(settings, device, lister, trained)
    folds = None
    if settings.divides_training:
        splits, folds = hold_out(splits, settings, trained)
    return dataclasses.replace(_data(settings, splits), folds=folds)


def get_test_data(
    settings: DataSettings,
    device: torch.device,
    trained: ResumePoint | None,
    division_is_explicit: bool = True,
    leave_out_unknown: bool = False,
    lister: Lister = LISTER,
    of_test: bool = False,
) -> Data:
    """Read only the validation images that the settings name; raises ``UserError`` as ``get_data`` does.

    Class folders need no train/: their classes are those of the checkpoint ``trained``, and they may also lie directly
    in ``--datapath``. Unless ``division_is_explicit``, ``--val-split`` and ``--folds`` come from the training run.
    ``leave_out_unknown``: see ``class_folders.read_test_folder``; ``lister``: as in ``get_data``. ``of_test``: read a
    table's test images instead.
    """
    notes: tuple[str, ...] = ()
    if of_test:
        if trained and not settings.divides_training and is_at(trained.state, settings) and lacks_rows_of_val(settings):
            notes = (f"{trained.path}: its run validated on these images, as none are of val; they chose best.pt",)
        settings = settings.undivided
    data = None
    if settings.divides_training and division_is_explicit:
        data = known_to(get_data(settings, device, lister, trained), trained, settings, lister)
    elif settings.divides_training:
        assert trained is not None  # whose division it is
        data, notes = _validated_in_training(settings, device, trained, lister)
        settings = settings.undivided
    if data is None:
        splits = read_splits(
            settings, device, lister, trained, evaluate=True, of_test=of_test, leave_out_unknown=leave_out_unknown
        )
        data = _data(settings, splits)
        if data.train is not None:
            data = known_to(data, trained, settings, lister)
        elif trained is not None:
            data = dataclasses.replace(data, seen=_changed_since_validated(data, settings, trained, of_test))
    return dataclasses.replace(data, train=None, warnings=(*notes, *data.warnings))


def _validated_in_training(
    settings: DataSettings, device: torch.device, trained: ResumePoint, lister: Lister
) -> tuple[Data | None, tuple[str, ...]]:
    """The images that ``trained`` held out and validated on, and notes for the user.

    Data is None if ``--datapath`` is a different tree; a tree that was moved is recognised by its fingerprint.
    """
    in_place = settings.datapath is None or is_at(trained.state, settings)
    root = None if settings.datapath is None else Path(settings.datapath)
    in_folders = settings.labels is None and settings.val_split is not None
    if in_folders and root and validation_folder(root) and not class_folders.is_tree_of(root, trained.classes or ()):
        return None, ()
    try:
        data = known_to(get_data(settings, device, lister, trained), trained, settings, lister)
    except UserError:
        if in_place:
            raise
        data = None
    if data and (same_images(data.fingerprint, trained.fingerprint) or in_place):
        return data, ()
    if settings.folds is not None and settings.labels is None and root and find_splits(root):
        return None, ()
    if data is not None:
        splits = Splits(data.train, data.validation, data.classes)
        leaves_out = f"; main.py --evaluate {division_flags(dataclasses.asdict(settings))} leaves these out"
    else:  # they cannot be divided, as with a class of one image
        splits = _undivided(settings, device, trained, lister)
        leaves_out = ""
    seen = ""
    if isinstance(getattr(splits.train, "paths", None), FilePaths | Members) and settings.val_split_by != "draw":
        count = _trained_by_name(splits, settings, trained, lister)
        if count == 0:
            return None, ()
        if count is None and data is not None and data.train is not None:  # names divide them as they did the run's
            count = len(data.train)
        if count is not None:
            total = sum(len(images) for images in splits[:2] if images is not None)
            seen = f" (perhaps {count:,} of {total:,}, by their names)"
    return None, (
        f"--datapath {settings.datapath}: is not what {trained.path} was trained on, so any images that it was trained "
        f"on are evaluated, too{seen}{leaves_out}",
    )


def _undivided(settings: DataSettings, device: torch.device, trained: ResumePoint, lister: Lister) -> Splits:
    """The images to evaluate if ``--datapath`` is not divided, as training images; none if they cannot be read."""
    try:
        found = read_splits(settings.undivided, device, lister, trained, evaluate=True, leave_out_unknown=True)
    except UserError:
        return Splits(None, None, ())
    return Splits(found.validation, None, found.classes)


def _trained_by_name(splits: Splits, settings: DataSettings, trained: ResumePoint, lister: Lister) -> int | None:
    """How many of the images have names of training images of ``trained``; None if these are not there."""
    begun = trained.settings
    own = dataclasses.replace(settings, datapath=begun.get("datapath"), labels=begun.get("labels"))
    try:
        then = get_data(own, torch.device("cpu"), lister, trained)
    except UserError:
        return None
    if then.train is None or not same_images(then.fingerprint, trained.fingerprint):
        return None
    names = set(keys_of(then.train, then.classes))
    there = (images for images in splits[:2] if images is not None)
    return sum(key in names for images in there for key in keys_of(images, splits.classes))


def _changed_since_validated(data: Data, settings: DataSettings, trained: ResumePoint, of_test: bool) -> str:
    """Warning if ``trained`` was trained on these images, or if those that it validated on have changed since.

    Otherwise ``trained.seen``; '' if it did not use images from this place, or if they do not lie in class folders.
    ``of_test``: these are a table's test images, not those that it validated on.
    """
    if trained.fingerprint is None:
        return ""
    if not is_at(trained.state, settings):
        begun = trained.settings
        here, place = settings.datapath, begun.get("datapath")
        in_table = settings.is_table or begun.get("labels") or begun.get("class_from_name")  # it may name a part alone
        if in_table or here is None or not isinstance(place, str) or "\0" in place:
            return ""
        own = training_folder(Path(place))
        is_own = own is not None and os.path.realpath(own) == os.path.realpath(here)
        return f"{trained.path} was trained on images in {here}" if is_own else ""
    images = data.validation
    line = f"the validation images have changed since {trained.path} was trained, perhaps on some of these"
    count = trained.validated_images
    if count not in (None, len(images)) and not of_test:
        return f"{line}: {len(images):,} now, {count:,} then"
    if settings.is_table or not isinstance(images, ImageFiles) or not isinstance(images.paths, FilePaths):
        return ""
    if ends_with(trained.fingerprint, some_contents(images.paths) or []):
        return trained.seen
    return line


def known_to(data: Data, trained: ResumePoint | None, settings: DataSettings, lister: Lister = LISTER) -> Data:
    """A copy with ``seen`` for ``trained``, the checkpoint whose weights are used; ``data`` itself if that is None."""
    if trained is None:
        return data
    seen = seen_in_training(data.validation, data.fingerprint, settings, trained, lister)
    return dataclasses.replace(data, seen=seen)


def seen_in_training(
    validation: Images, fingerprint: str, settings: DataSettings, trained: ResumePoint, lister: Lister = LISTER
) -> str:
    """A line about ``validation`` images that checkpoint ``trained`` may have been trained on; '' if there are none.

    ``fingerprint`` and ``settings``: of the data that the images are part of. If training and validation images come
    from one tree, the checkpoint's own split tells which images it was trained on: exactly if the tree is unchanged,
    otherwise by file names, unless one draw made the split. The weights it began with may have seen images, too.
    """
    return "; ".join(filter(None, (_seen(validation, fingerprint, settings, trained, lister), trained.seen)))


def _seen(validation: Images, fingerprint: str, settings: DataSettings, trained: ResumePoint, lister: Lister) -> str:
    """The part of ``seen_in_training`` about the run of ``trained`` itself, not the weights that it began with."""
    begun = trained.settings
    if trained.fingerprint is None or same_images(fingerprint, trained.fingerprint):
        return ""
    names = {settings.dataname, begun.get("dataname")}
    if len(names) == 2 and not any(name in SPECS and SPECS[name].of_the_user for name in names):
        return ""
    count = f"the {len(validation):,} validation images"
    unknown = f"{trained.path} was trained on other images than these, perhaps on some of {count}"
    own = {name: begun.get(name, getattr(DataSettings, name)) for name in DIVISION}
    settings_then = dataclasses.replace(settings, **own, folds_from=None)
    if not (settings.divides_training and settings_then.divides_training) or len(names) == 2:
        return unknown
    try:
        then = get_data(settings_then, torch.device("cpu"), lister, trained)
    except UserError:
        return unknown
    if not isinstance(then.train, ImageFiles):
        return unknown
    exact = same_images(then.fingerprint, trained.fingerprint)
    if not exact and own["val_split_by"] == "draw":
        return f"{unknown}: the draw of older versions takes others when images are added or removed"
    assert isinstance(validation, ImageFiles)
    shown = set(validation.paths)
    seen = sum(path in shown for path in then.train.paths)
    if exact:
        on_none = f"with {division_flags(own)} on none of them"
        return f"{trained.path} was trained on {seen:,} of {count}; {on_none}" if seen else ""
    how_many = f"perhaps on {seen:,}" if seen else "on none"
    return f"the data have changed since {trained.path} was trained: by their names, {how_many} of {count}"


def _data(settings: DataSettings, splits: Splits) -> Data:
    spec = SPECS[settings.dataname]
    train, validation, classes, warnings, origin = splits
    assert validation is not None
    if spec.classes is not None and len(classes) != spec.classes:
        raise UserError(
            f"--datapath {settings.datapath}: {len(classes)} classes where {settings.dataname} has {spec.classes}; "
            "use --dataname folder for another set"
        )
    if len(classes) < 2 and validation.labels.ndim == 1:
        advises = settings.datapath is not None and settings.dataname != "shards"
        where = hint(Path(settings.datapath or "."), settings.dataname) if advises else ""
        raise UserError(
            f"{place_of(settings)}: holds one class, {classes[0]}; a classifier needs two or more"
            + (where and f"; {where}")
        )
    if validation.labels.ndim > 1:
        refuse_without_labels(settings, train, validation)
    if settings.dataname != "synthetic":  # whose labels are random
        warnings = (
            *lacking(settings, train, validation, classes),
            *on_both_sides(train, validation),
            *groups_alike(train, validation),
            *warnings,
        )
    found = _found_in(train if train is not None else validation, settings)
    preprocessing, line = resolve(settings, None, found)
    return Data(
        spec=spec,
        preprocessing=preprocessing,
        preprocessing_line=line,
        classes=classes,
        train=None if train is None else in_colour_of(preprocessing, train),
        validation=in_colour_of(preprocessing, validation),
        warnings=warnings,
        origin=origin,
        found=found,
    )


def preprocessing_of(images: Images, settings: DataSettings) -> Preprocessing:
    """The preprocessing of a new network for such ``images``. Raises ``UserError``."""
    return resolve(settings, None, _found_in(images, settings))[0]


def _found_in(images: Images, settings: DataSettings) -> Header | None:
    """Header of the first readable file if Pillow cannot show it, or if ``--in-channels`` is given; otherwise None.

    None also for a grey or RGB .npy file, and if no file can be read, which is reported when one is needed.
    """
    if not isinstance(images, ImageFiles):
        return None
    for number in range(min(len(images), MOST_IN_A_ROW)):
        try:
            file = opened(images.paths[number])
            found = array_header(file)
            if found is None:
                facts = header(file)  # fails for a damaged file, of whatever kind the others are
                if settings.in_channels is not None:
                    found = Header(facts.size, settings.in_channels, facts.bits, facts.file_format)
            elif settings.in_channels is None and found.channels in (1, 3):
                found = None
            return found
        except UserError:
            raise
        except Exception:  # each reader fails in its own ways on a damaged file
            continue
    return None
