"""Reading a data set of the table: ``get_data`` to train on, ``get_test_data`` to evaluate, ``DataReader`` in a run."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from utils.checkpoint.fingerprint import ends_with, joined, same_images, short
from utils.checkpoint.resume import ResumePoint, find, is_at
from utils.config import plugins
from utils.config.datasets import SPECS, DatasetSpec
from utils.config.field import CHECKPOINT
from utils.config.groups.data import VIEWS, DataSettings
from utils.config.image_size import Size, enlarged, sides
from utils.config.settings import Settings, UserError, as_flag
from utils.config.spelling import counted, some
from utils.data import first_look
from utils.data.decoded import folder_for
from utils.data.formats import archives, class_folders
from utils.data.formats.class_folders import LISTER, find_splits, hint, training_folder, validation_folder
from utils.data.formats.class_map import in_order_of
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.held_out import Folds, hold_out, keys_of
from utils.data.formats.hugging_face import SAVED, read_tables
from utils.data.formats.listing import Lister
from utils.data.formats.own import LOOKED_AT, Items, read_own
from utils.data.formats.readers import IN_MEMORY, OWN_FILES, ImageFiles, Images, Splits, class_counts
from utils.data.formats.shards.foreign import compressed_shard, ensure_index
from utils.data.formats.shards.index import read_contents
from utils.data.formats.shards.members import Members, holds_shards, read_shards
from utils.data.formats.table import class_names, lacks_rows_of_val, read_labels
from utils.data.images.arrays import Header, array_header
from utils.data.images.levels import grey_of
from utils.data.images.look import header
from utils.data.images.stored import ImagePaths, Stored, opened
from utils.data.preprocessing import KnownPreprocessing, Preprocessing, resolve
from utils.data.progress_log import Log, ProgressLog, silent
from utils.data.sample_plan import evenly_spaced
from utils.runtime.distributed import Distributed

SHOWN_CLASSES = 5  # in a plan
FIRST_BYTES = 1 << 16  # of a file whose content is part of the fingerprint
# the settings that choose training images for validation
DIVISION = ("val_split", "val_split_by", "folds", "fold", "fold_seed")


@dataclass(frozen=True)
class Data:
    """A data set as read: both splits, the class names in label order, and what was resolved.

    ``train`` is None for a set to evaluate. ``preprocessing_line`` describes how images are shown, with the origin of
    each value. ``warnings``: what else a user should know about the set, one line each. ``seen``: a further warning,
    about validation images on which the checkpoint in use was trained; '' if there are none. ``begun_max_shift``: what
    ``spec.max_shift`` was when the run to resume began, if it is None now. ``origin``: the table that the
    labels come from, as text; '' without one. ``folds``: the folds of all training images, one of which is validated.
    ``found``: header of the first file, if images are read as arrays.
    """

    spec: DatasetSpec
    preprocessing: Preprocessing
    preprocessing_line: str
    classes: tuple[str, ...]
    train: Images | None
    validation: Images
    warnings: tuple[str, ...] = ()
    seen: str = ""
    begun_max_shift: int | None = None
    origin: str = ""
    folds: Folds | None = None
    found: Header | None = None

    @property
    def max_shift(self) -> int | None:
        """Default reach of a shift, in pixels; None for an eighth of the image."""
        return self.begun_max_shift or self.spec.max_shift

    @property
    def multilabel(self) -> bool:
        """True if images have several labels."""
        return self.validation.labels.ndim > 1

    @property
    def image_size(self) -> Size:
        """The size of a training image."""
        return self.preprocessing.image_size

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image that the network sees: (channels, height, width)."""
        return self.preprocessing.channels, *sides(self.image_size)

    def describe(self, settings: DataSettings, validated: int) -> dict[str, str]:
        """The rows of a run's plan about the images; ``validated``: how many images are validated."""
        training = f"{len(self.train):,} training, " if self.train is not None else ""
        cut = f", cut to {validated:,} (--max-val-batches)" if validated < len(self.validation) else ""
        images = f"{training}{len(self.validation):,} validation images{cut}{self._split_words(settings)}"
        more = ", ..." if len(self.classes) > SHOWN_CLASSES else ""
        rows = {
            "Data": f"{settings.dataname}: {images}",
            **({"Labels": self.origin} if self.origin else {}),
            "Classes": f"{len(self.classes)}: {', '.join(self.classes[:SHOWN_CLASSES])}{more}",
            "Images": " x ".join(map(str, self.image_shape)),
            "Preprocessing": self.preprocessing_line,
        }
        if settings.tta != "none":
            views = VIEWS[settings.tta]
            rows["Validation"] = f"Test-time augmentation {settings.tta}: validation by the mean logits of {views}"
        return rows

    def _split_words(self, settings: DataSettings) -> str:
        """How the validation images were split off and what shares resulted, as text; '' if there was no split."""
        if not settings.divides_training or self.train is None:
            return ""
        count, others = len(self.validation), len(self.train)
        size = len(self.classes)
        kept, trained = (class_counts(images.labels, size) for images in (self.validation, self.train))
        there = kept + trained > 0  # a class map may name others
        shares = 100 * kept[there] / (kept + trained)[there]
        if settings.folds is not None:
            how = f"fold {settings.fold} of --folds {settings.folds}"
        else:
            by = {"name": "by their names", "draw": "by one draw over all"}[settings.val_split_by]
            how = f"--val-split {settings.val_split:g}, {by}"
        grouped = " in whole groups" if self.train.groups is not None else ""
        return (
            f" ({how}: {100 * count / (count + others):.1f} % of all{grouped}, {shares.min():.1f} to "
            f"{shares.max():.1f} % of a class)"
        )

    def doubts(self, args: Settings, begins: bool = False) -> list[str]:
        """Warnings from a look at some images, a line each; if a new run ``begins``, also on how images are shown."""
        shown = self.preprocessing
        enlarges = begins and shown.stored_size is None and shown.crop_pct < 1 and args.data.crop_pct is None
        return first_look.doubts(
            self.train,
            self.validation,
            self.classes,
            args.data.datapath,
            names_damaged=args.run.dry_run,
            skips_bad=args.data.skip_bad_images,
            enlarged=(sides(shown.val_image_size), enlarged(shown.val_image_size, shown.crop_pct))
            if enlarges
            else None,
        )

    def shown_to(self, known: KnownPreprocessing | None, settings: DataSettings) -> Data:
        """A copy whose images are shown as the weights of ``known`` expect, unless ``settings`` say otherwise."""
        preprocessing, line = resolve(settings, known, self.found)
        begun = known.max_shift if known is not None and self.spec.max_shift is None else None
        return dataclasses.replace(
            self,
            preprocessing=preprocessing,
            preprocessing_line=line,
            begun_max_shift=begun,
            train=None if self.train is None else in_colour_of(preprocessing, self.train),
            validation=in_colour_of(preprocessing, self.validation),
        )

    def refuse_differences(self, distributed: Distributed) -> None:
        """Raise ``UserError`` if the processes have read different images, as from disks of several machines.

        Each process takes its part of one sample plan, which presumes equal data. All processes must call this.
        """
        if distributed.world_size == 1 or self.spec == SPECS["synthetic"]:
            return
        read = distributed.gather(self.fingerprint)
        for rank, digest in enumerate(read):
            if not same_images(digest, read[0]):
                raise UserError(
                    f"--datapath: process {rank} reads other images or labels ({short(digest)}) than process 0 "
                    f"({short(read[0])}); give every machine the same data",
                    on_all_ranks=True,
                )

    def known_to(self, trained: ResumePoint | None, settings: DataSettings, lister: Lister = LISTER) -> Data:
        """A copy with ``seen`` for ``trained``, the checkpoint whose weights are used; this object if that is None."""
        if trained is None:
            return self
        seen = seen_in_training(self.validation, self.fingerprint, settings, trained, lister)
        return dataclasses.replace(self, seen=seen)

    def _rows(self) -> Iterator[tuple[bytes, str, Any]]:
        """Yield path (below ``--datapath``), split and label of each image of a table."""
        for split, images in (("train", self.train), ("val", self.validation)):
            if images is not None:
                assert isinstance(images, ImageFiles) and isinstance(images.paths, FilePaths)  # of a table
                yield from zip(images.paths.below(), repeat(split), images.labels.numpy(), strict=False)

    @cached_property
    def rows(self) -> torch.Tensor | None:
        """CRC-32 of each image's path, and CRC-32 of its split and label: int32 (n, 2); None without a table.

        A resumed run compares them with its checkpoint's to tell which images have changed.
        """
        if not self.origin:
            return None
        rows = [(crc32(path), crc32(split.encode() + label.tobytes())) for path, split, label in self._rows()]
        return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))

    def changed_since(self, trained: ResumePoint) -> str:
        """Text on a table's images that are new, gone, relabelled or in another split since ``trained`` was saved.

        '' if there are none, or without a table."""
        rows = self.rows
        known = None if rows is None else trained.read().get("rows")
        if rows is None or known is None:
            return ""
        then = dict(known.tolist())
        now = rows.tolist()
        changed = {place for place, (path, label) in enumerate(now) if then.get(path, label) != label}
        added = {place for place, (path, _) in enumerate(now) if path not in then}
        lost = len(then.keys() - {path for path, _ in now})
        gone = f"{lost:,} image(s) are gone" if lost else ""
        named = changed or added
        if not named:
            return gone
        path, split, label = next(row for place, row in enumerate(self._rows()) if place == min(named))
        name = f" as {self.classes[label]}" if label.ndim == 0 else ""
        more = f" and {len(named) - 1:,} more" if len(named) > 1 else ""
        what = "had another label or split" if changed else "was not there"
        return f"{os.fsdecode(path)}, now in {split}{name},{more} {what}" + (f"; {gone}" if gone else "")

    @cached_property
    def fingerprint(self) -> str:
        """Digest of classes, labels and images (see ``utils.checkpoint.fingerprint``).

        It covers the pixels of images in memory, the content of shards, or the names of files and the content of some.
        """
        digest = hashlib.sha256("\0".join(self.classes).encode(errors="surrogatepass"))  # folders' names
        contents: list[bytes] | None = None
        splits: tuple[Images | None, ...] = (self.train, self.validation)
        for images in [images for images in splits if images]:
            digest.update(images.labels.cpu().numpy().tobytes())
            if images.weights is not None:
                digest.update(images.weights.numpy().tobytes())
            if isinstance(images, ImageFiles):
                assert isinstance(images.paths, ImagePaths)
                digest.update(images.paths.identity)
                if (found := some_contents(images.paths)) is not None:
                    contents = (contents or []) + found
            else:
                digest.update(images.pixels.cpu().numpy().tobytes())
        return joined(digest.hexdigest(), contents)


def in_colour_of(preprocessing: Preprocessing, images: Images) -> Images:
    """``images``, if files, to be read in the colour of ``preprocessing``; if in memory, converted to its channels.

    Raises ``UserError`` if images in memory would need any conversion except between grey and RGB.
    """
    if isinstance(images, ImageFiles):
        return dataclasses.replace(images, colour=preprocessing.colour)
    if images.pixels.shape[1] == preprocessing.channels:
        return images
    held = images.pixels.shape[1]
    if {held, preprocessing.channels} != {1, 3}:
        raise UserError(
            f"--in-channels {preprocessing.channels}: the images have {held}; grey becomes RGB and back only"
        )
    pixels = images.pixels.expand(-1, 3, -1, -1) if held == 1 else grey_of(images.pixels)
    return dataclasses.replace(images, pixels=pixels.contiguous())


def some_contents(paths: Sequence[str], numbers: np.ndarray | None = None) -> list[bytes] | None:
    """Size and first bytes of some of the files ``numbers``, or of all, evenly spaced from the first to the last.

    None for images whose identity covers their content, as of shards, or that no file holds.
    """
    if isinstance(paths, Members | Items):
        return None
    numbers = np.arange(len(paths)) if numbers is None else numbers
    parts = []
    for number in numbers[evenly_spaced(len(numbers), LOOKED_AT)].tolist():
        path = paths[number]
        try:
            if isinstance(path, Stored):
                content = path.content()
                parts.append(b"%d %b" % (len(content), content[:FIRST_BYTES]))
                continue
            with open(path, "rb", opener=_without_waiting) as file:
                parts.append(b"%d %b" % (os.fstat(file.fileno()).st_size, file.read(FIRST_BYTES)))
        except OSError:  # decoding the file reports the error
            parts.append(b"unreadable")
    return parts


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in place of an image would wait for its writer


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
        return data.known_to(point or weights, settings, self._lister)

    def to_evaluate(self, args: Settings, trained: ResumePoint | None) -> Data:
        """The validation images alone, with the classes of ``trained``, the checkpoint to evaluate."""
        division = "val_split" if args.data.folds is None else "folds"
        explicit = args.origins[division] != CHECKPOINT
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
    splits = _splits(settings, device, lister, begun=trained)
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
        is_whole = not settings.divides_training
        if trained and is_whole and is_at(trained.state, settings) and lacks_rows_of_val(settings):
            notes = (f"{trained.path}: its run validated on these images, as none are of val; they chose best.pt",)
        settings = dataclasses.replace(settings, val_split=None, folds=None, fold=None)
    if settings.divides_training and not division_is_explicit:
        assert trained is not None  # whose division it is
        data, notes = _validated_in_training(settings, device, trained, lister)
        if data is not None:
            return dataclasses.replace(data, train=None)
        settings = dataclasses.replace(settings, val_split=None, folds=None, fold=None)
    if settings.divides_training:
        data = get_data(settings, device, lister, trained).known_to(trained, settings, lister)
        return dataclasses.replace(data, train=None)
    splits = _splits(
        settings,
        device,
        lister,
        evaluate=True,
        known=trained,
        of_test=of_test,
        leave_out_unknown=leave_out_unknown,
    )
    data = _data(settings, splits)
    if data.train is not None:
        data = data.known_to(trained, settings, lister)
    elif trained is not None:
        data = dataclasses.replace(data, seen=_changed_since_validated(data, settings, trained))
    return dataclasses.replace(data, train=None, warnings=(*notes, *data.warnings))


def _test_folder(settings: DataSettings, root: Path, trained: ResumePoint | None) -> Path | None:
    """The folder of class folders in ``root`` to evaluate; None if ``_read_files`` finds what to read."""
    classes = trained.classes if trained is not None and trained.classes is not None else ()
    if class_folders.is_tree_of(root, classes):
        return root
    if folder := validation_folder(root):
        return folder
    if training_folder(root) or _own_files(settings, root):
        return None
    folders = (path for path in class_folders.visible(root) if path.is_dir())
    return root if any(path.name in classes or class_folders.holds_images(path) for path in folders) else None


def _read_test_folder(
    settings: DataSettings, folder: Path, trained: ResumePoint | None, lister: Lister, leave_out_unknown: bool
) -> Splits:
    if settings.dataname == "imagenet":
        archives.refuse_half_unpacked(folder)
    if trained is not None and trained.classes is not None:
        classes = trained.classes if settings.class_map is None else sorted(trained.classes)
        whose = trained.path
    else:
        whose = training_folder(folder.parent) or folder
        classes = class_folders.class_names(whose)
    return class_folders.read_test_folder(
        folder, classes, str(whose), leave_out_unknown=leave_out_unknown, lister=lister
    )


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
        data = get_data(settings, device, lister, trained).known_to(trained, settings, lister)
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
        leaves_out = f"; main.py --evaluate {_flags_of(dataclasses.asdict(settings))} leaves these out"
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
    whole = dataclasses.replace(settings, val_split=None, folds=None, fold=None)
    try:
        found = _splits(whole, device, lister, evaluate=True, known=trained, leave_out_unknown=True)
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


def _flags_of(division: Mapping[str, Any]) -> str:
    """The flags that hold out validation images by the settings ``division``, without those at their defaults."""
    given = {name: division[name] for name in DIVISION if division[name] != getattr(DataSettings, name)}
    return " ".join(as_flag(name, value) for name, value in given.items())


def _changed_since_validated(data: Data, settings: DataSettings, trained: ResumePoint) -> str:
    """Warning if ``trained`` was trained on these images, or if those that it validated on have changed since.

    Otherwise ``trained.seen``; '' if it did not use images from this place, or if they do not lie in class folders.
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
    if settings.is_table or not isinstance(images, ImageFiles) or not isinstance(images.paths, FilePaths):
        return ""
    if ends_with(trained.fingerprint, some_contents(images.paths) or []):
        return trained.seen
    return f"the validation images have changed since {trained.path} was trained, perhaps on some of these"


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
        return (
            f"{trained.path} was trained on {seen:,} of {count}; with {_flags_of(own)} on none of them" if seen else ""
        )
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
            f"{_place(settings)}: holds one class, {classes[0]}; a classifier needs two or more"
            + (where and f"; {where}")
        )
    if validation.labels.ndim > 1:
        _refuse_without_labels(settings, train, validation)
    if settings.dataname != "synthetic":  # whose labels are random
        warnings = (
            *_lacking(settings, train, validation, classes),
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
    """Header of the first file if Pillow cannot show it, or if ``--in-channels`` is given; otherwise None.

    None also for a grey or RGB .npy file, and for an unreadable file, which is reported when it is needed.
    """
    if not isinstance(images, ImageFiles) or not len(images):
        return None
    try:
        file = opened(images.paths[0])
        found = array_header(file)
        if settings.in_channels is None:
            return None if found is not None and found.channels in (1, 3) else found
        if found is None:
            facts = header(file)
            found = Header(facts.size, settings.in_channels, facts.bits, facts.file_format)
        return found
    except UserError:
        raise
    except Exception:  # each reader fails in its own ways on a damaged file
        return None


def _place(settings: DataSettings) -> str:
    return f"--datapath {settings.datapath}" if settings.datapath else f"--dataname {settings.dataname}"


def _lacking(
    settings: DataSettings, train: Images | None, validation: Images, classes: tuple[str, ...]
) -> Iterator[str]:
    """Warnings about classes without a validation or a training image."""
    where = _flags_of(dataclasses.asdict(settings)) if settings.folds else _place(settings)
    trained = None if train is None else class_counts(train.labels, len(classes))
    validated = class_counts(validation.labels, len(classes))
    if len(none := np.flatnonzero(validated == 0)):
        in_groups = settings.val_split is not None and isinstance(train, ImageFiles) and train.groups is not None
        spread = "; --folds spreads each class's groups as evenly as it can, if there are enough" if in_groups else ""
        yield (
            f"{where}: {len(none)} of {len(classes)} classes have no validation image, and the results say nothing "
            f"about them: {some(classes[label] for label in none)}{spread}"
        )
    if trained is None:
        return
    held_out = (trained == 0) & (validated > 0) & settings.divides_training
    if len(none := np.flatnonzero(held_out)):
        yield (
            f"{where}: all images of {len(none)} of {len(classes)} classes are held out, so that none is trained on "
            f"and each counts as a mistake: {some(classes[label] for label in none)}"
        )
    if len(none := np.flatnonzero((trained == 0) & ~held_out)):
        yield (
            f"{where}: {len(none)} of {len(classes)} classes have no training image and cannot be learned: "
            f"{some(classes[label] for label in none)}"
        )


def on_both_sides(train: Images | None, held_out: Images, kind: str = "validation") -> Iterator[str]:
    """Yield a warning if some groups have images in training and among those ``held_out``, of this ``kind``."""
    if train is None or train.groups is None or held_out.groups is None:
        return
    trained = set(train.groups)
    shared = [group for group in held_out.groups if group in trained]
    if shared:
        yield (
            f"--group-column: {counted(len(set(shared)), 'group')} with images in training and in {kind}, "
            f"{100 * len(shared) / len(held_out):.1f} % of the {kind} images, so that the results flatter: "
            f"{some(sorted(set(shared)))}; --folds and --val-split keep each group on one side"
        )


def groups_alike(*splits: Images | None) -> Iterator[str]:
    """Yield a warning if the names of some groups seem to be one name that is written in several ways."""
    names = {group for images in splits if images is not None and images.groups is not None for group in images.groups}
    if several := first_look.alike(sorted(names)):
        yield (
            f"--group-column: {counted(sum(map(len, several)), 'group')} with names that differ only by "
            f"{first_look.WHAT_MAY_DIFFER}: "
            f"{some([' and '.join(map(repr, same)) for same in several], 3)}; write one name, or one of them may be "
            "trained on while the other is validated"
        )


def _refuse_without_labels(settings: DataSettings, *splits: Images | None) -> None:
    """Raise ``UserError`` if no image of a split has a label: there would be nothing to learn or to score."""
    for images, words in zip(splits, ("to train on", "to validate on"), strict=True):
        if images is not None and not (images.labels == 1).any():
            raise UserError(f"--datapath {settings.datapath}: no image {words} has a label")


def prepare(settings: DataSettings, log: Log, evaluate: bool = False) -> None:
    """Download (``--download``), unpack or index the data set on one rank. ``evaluate``: only what evaluation needs."""
    elsewhere = settings.dataname in ("hf", *plugins.added("dataset"))
    if settings.datapath is None or elsewhere or settings.is_table:
        return
    root = Path(settings.datapath)
    if settings.dataname == "shards" or holds_shards(root):
        ensure_index(root, log)
    if holds_shards(root):
        return
    if validation_folder(root) if evaluate else find_splits(root):
        return
    if settings.download:
        archives.fetch(settings.dataname, root, log)
    if settings.dataname == "imagenet" and root.is_dir():
        archives.unpack_imagenet(root, ("val",) if evaluate else ("train", "val"), log)


def in_class_folders(settings: DataSettings) -> bool:
    """True if images lie in class folders below ``--datapath``, or in a set's own files there, and in no table."""
    if settings.datapath is None or settings.is_table:
        return False
    read_otherwise = settings.dataname in (*IN_MEMORY, "hf", *plugins.added("dataset"))
    return not read_otherwise and not holds_shards(Path(settings.datapath))


def _splits(
    settings: DataSettings,
    device: torch.device,
    lister: Lister,
    *,
    evaluate: bool = False,
    known: ResumePoint | None = None,
    begun: ResumePoint | None = None,
    of_test: bool = False,
    leave_out_unknown: bool = False,
) -> Splits:
    """Read the images that the settings name. See also ``get_test_data``.

    ``known``: the checkpoint to evaluate; ``begun``: one whose training images are read.
    """
    name = settings.dataname
    if name in IN_MEMORY:
        return IN_MEMORY[name](settings, device)
    if name in plugins.added("dataset"):
        return read_own(plugins.added("dataset")[name], settings)
    root = Path(settings.datapath or ".")
    if not root.is_dir():
        what = f"the paths in {settings.labels} are below it" if settings.labels else f"{name}: {SPECS[name].source}"
        owner = known or begun
        if owner is not None and owner.settings.get("datapath") == settings.datapath:
            what = f"the images of {owner.path} were there; if they have moved, give --datapath and their new folder"
        raise UserError(f"--datapath {root}: no such folder; {what}")
    lister = dataclasses.replace(lister, folder=folder_for(settings))
    if name == "hf":
        return read_tables(settings, lister, evaluate)
    splits: Splits | None
    classes = listed = known.classes if known else None
    if classes and settings.class_map is not None:  # list and leave out images as in training, which numbers them later
        listed = class_names(classes)
        leave_out_unknown = True
    if settings.is_table:
        splits = read_labels(
            settings,
            classes=listed,
            whose=str(known.path) if known else "",
            evaluate=evaluate,
            of_test=of_test,
            leave_out_unknown=leave_out_unknown,
        )
    elif evaluate and not _holds_shards(settings, root) and (folder := _test_folder(settings, root, known)):
        splits = _read_test_folder(settings, folder, known, lister, leave_out_unknown)
    else:
        splits = _read_files(settings, root, lister)
        if splits is None:
            raise UserError(f"--datapath {root}: {_what_is_missing(root, name, evaluate)}")
    return splits if settings.class_map is None else in_order_of(Path(settings.class_map), splits, classes)


def _holds_shards(settings: DataSettings, root: Path) -> bool:
    """True if ``root`` holds shards; their index is brought up to date, for tools: main.py has called ``prepare``."""
    if settings.dataname == "shards" or holds_shards(root):
        ensure_index(root, silent)
    return holds_shards(root)


def _what_is_missing(root: Path, name: str, evaluate: bool) -> str:
    if name == "shards":
        return compressed_shard(root) or (
            "holds neither shards.json nor .tar files whose names hold train and val; scripts/pack.py makes shards of "
            "a data set"
        )
    if training := training_folder(root):
        holds_folders = any(path.is_dir() for path in class_folders.visible(training))
        if class_folders.holds_images(training) and not holds_folders:
            return (
                f"holds {training.name}/ with images, where the class folders of the training images belong; if "
                f"{training.name} is a class, rename it"
            )
        split = " or give --val-split 0.2" if name == "folder" else ""
        return f"holds no val/ or test/ beside {training.name}/; add one{split}"
    advice = hint(root, name, evaluate) or f"{name}: {SPECS[name].source}"
    if name == "imagenet" and archives.has_imagenet(root):
        advice = "a run without --dry-run makes them from the archives that lie there"
    files = {"folder": "", "imagenet": "imagenet, neither its archives nor "}
    own = files.get(name, f"{name}, neither torchvision's files nor ")
    return f"holds no {own}class folders below train/ and val/ or test/; {advice}"


def _refuse_two_sets(root: Path) -> None:
    """Raise ``UserError`` if class folders lie beside the shards."""
    for split in filter(None, (training_folder(root), validation_folder(root))):
        if any(path.is_dir() for path in class_folders.visible(split)):
            raise UserError(
                f"--datapath {root}: holds shards and class folders below {split.name}/; use --dataname shards for the "
                "shards, or move them to a folder of their own"
            )


def _read_files(settings: DataSettings, root: Path, lister: Lister) -> Splits | None:
    """Read the shards, class folders or own files of a data set in ``root``; None if they are missing."""
    name = settings.dataname
    if _holds_shards(settings, root):
        if name != "shards":
            _refuse_two_sets(root)
        if settings.val_split is not None:
            raise UserError(f"--val-split: the shards in {root} already have validation images; remove the flag")
        return read_shards(root, settings.pixel_range, settings.skip_bad_images)
    if name == "shards":
        return None
    splits = find_splits(root)
    if splits and settings.val_split is not None:
        apart = f", or give --datapath {splits[0]}" if splits[1].name.lower() == "test" else ""
        raise UserError(f"--val-split: {root} already has {splits[1].name}/; remove the flag{apart}")
    if splits and (splits[0] / SAVED).is_file():
        raise UserError(f"--datapath {root}: holds tables of Hugging Face's library datasets; use --dataname hf")
    if splits and name == "imagenet":
        for folder in splits:
            archives.refuse_half_unpacked(folder)
    if splits and settings.folds is None:
        return class_folders.read_class_folders(*splits, lister, tells_of_test=name == "folder")
    if splits or (name == "folder" and settings.divides_training):
        tree = training_folder(root) or root
        holds_folders = any(path.is_dir() for path in class_folders.visible(tree))
        return class_folders.read_tree(tree, lister) if holds_folders else None
    place = _own_files(settings, root)
    return None if place is None else OWN_FILES[name].read(place)


def _own_files(settings: DataSettings, root: Path) -> Path | None:
    """The place of the data set's own files in ``root``; None if they are missing."""
    own = OWN_FILES.get(settings.dataname)
    return own.find(root) if own else None
