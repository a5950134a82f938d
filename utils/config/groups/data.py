"""Settings of the images and their batches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from utils.config.datasets import OF_PLUGIN, SPECS
from utils.config.field import DEFAULT, Needs, between, group, not_empty, setting, training_setting
from utils.config.image_size import LARGEST_SIDE, Size

CROP_MODES = ("center", "squash", "border")
MOST_CHANNELS = 4096
INTERPOLATIONS = ("bilinear", "bicubic")
# By choice of --tta, what the mean logits of a validation image are of.
VIEWS = {
    "none": "1 view",
    "flip": "2 views of each image",
    "flip-shift": "6 views of each image",
    "flip-shift-doubt": "6 views of each image, or 26 where these disagree",
}

view_setting = partial(setting, shapes="views of the validation images")
column_setting = partial(setting, effect=Needs("--labels"), example="a")
label_setting = partial(setting, effect=Needs("--dataname hf or --labels"), within="--dataname hf --datapath D")

_IMAGE_FILES = Needs("images in files", lambda v: not v.in_memory)
BEFORE_THE_NUMBER = r"(.*?)[\W_]*(?<!\d)\d+\.[^.]*$"  # what stands before the number that ends a file's name
TABLE_COLUMNS = ("path", "label", "split", "group", "weight")  # each has a flag
_VALIDATION_BATCH = Needs("training, or --val-batch-size left out", lambda v: not (v.evaluate and v.val_batch_size))
_PROGRESSIVE = Needs("--progressive-size")


def _first_and_last(epochs: tuple[int, ...]) -> str | None:
    fits = len(epochs) == 2 and 0 <= epochs[0] <= epochs[1]
    words = "must be two epochs, the second not below the first: where the image size begins and where it ends to grow"
    return None if fits else words


def _height_and_width(size: Size) -> str | None:
    if isinstance(size, tuple) and len(size) != 2:
        return "must be one number, the side of a square, or two: height and width"
    return between(1, LARGEST_SIDE)(size)


def _low_and_high(levels: tuple[float, ...]) -> str | None:
    fits = len(levels) == 2 and -1e30 < levels[0] < levels[1] < 1e30
    return None if fits else "must be two numbers, the lower first: what becomes black and what becomes white"


def _has_folder(v: Any) -> bool:
    spec = SPECS[v.dataname]
    return spec.needs_datapath or spec.source == OF_PLUGIN or v.local_processes > 1  # which share their images there


def _folds(v: Any) -> Iterator[str]:
    """Contradictions of ``--folds`` and ``--fold``."""
    if v.has(v.folds is None and v.fold is not None):
        yield f"--fold {v.fold} needs --folds K, into how many the training images are split"
    if v.has(v.folds is not None and v.fold is None):
        yield f"--folds {v.folds} needs --fold I, from 0 to {v.folds - 1}, which is validated"
    if v.folds is None:
        return
    if v.has(v.fold is not None and v.fold >= v.folds):
        yield f"--fold {v.fold}: --folds {v.folds} are numbered from 0 to {v.folds - 1}"
    if v.has(v.val_split is not None):
        yield "--folds and --val-split both choose the validation images; give one"
    if v.has(v.dataname == "synthetic"):
        yield "--folds: the labels of --dataname synthetic are random, so it has no folds"


def _one_group(pattern: str) -> str | None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"is no regular expression ({error})"
    return None if groups == 1 else f"must have one group, which matches the class, not {groups}"


@group()
@dataclass(frozen=True)
class DataSettings:
    """Images and their batches."""

    dataname: str = setting(
        "data set",
        default="digits",
        choices=tuple(SPECS),
        synonyms="dataset dataset-name",
        example="synthetic",
        within="--image-size 8",
    )
    datapath: str | None = setting(
        "folder that holds the data",
        metavar="DIR",
        affects_result=False,
        effect=Needs("a --dataname with files", _has_folder),
        synonyms="data data-dir data-path data-root root dataset-dir",
        example="D",
        within="--dataname folder",
    )
    download: bool = setting(
        "download the data set through torchvision if it is missing",
        default=False,
        affects_result=False,
        synonyms="dataset-download",
        inherited=False,
        within="--dataname mnist --datapath D",
    )
    val_split: float | None = setting(
        "fraction of a data set without val/ or test/ to validate on, for example 0.1",
        check=between(0, 1, open_low=True, open_high=True),
        metavar="SHARE",
        within="--dataname folder --datapath D",
    )
    val_split_by: str = setting(
        "what chooses the images of --val-split: class and name of each, or one draw over all; older runs keep theirs",
        default="name",
        choices=("name", "draw"),
        earlier="draw",
        effect=Needs("--val-split"),
        drops_out=True,
    )
    folds: int | None = setting(
        "split the training images into this many folds, each with the same share of each class, and validate on one "
        "of them (--fold); the images of a group stay together",
        check=between(2, 255),
        metavar="K",
        example="3",
        within="--folds 4 --fold 1",
    )
    fold: int | None = setting(
        "fold to validate on, from 0 to --folds - 1; the others are trained on",
        check=between(0, 254),
        metavar="I",
        effect=Needs("--folds"),
        example="1",
        within="--folds 3 --fold 0",
    )
    fold_seed: int = setting(
        "seed by which --folds deals out the images; --seed leaves the folds as they are",
        default=0,
        check=between(0, 2**32 - 1),
        effect=Needs("--folds"),
        within="--folds 3 --fold 1",
    )
    folds_from: str | None = setting(
        "run or checkpoint whose folds are kept: its images stay in them, and images added since are spread over them",
        metavar="RUN",
        affects_result=False,  # the fingerprint tells what came of it
        effect=Needs("--folds"),
        example="D",
        within="--folds 3 --fold 1",
    )
    image_column: str | None = setting(
        "column of the images in --dataname hf [the only one with images, or that of a usual name]",
        effect=Needs("--dataname hf"),
        synonyms="input-key image-column-name",
        example="a",
        within="--dataname hf --datapath D",
    )
    label_column: str | None = label_setting(
        "column of the labels in --dataname hf [the only ClassLabel, or that of a usual name] or in --labels [label, "
        "class, target, category or another usual name]",
        synonyms="target-key label-column-name",
        example="a",
    )
    labels: str | None = setting(
        "labels of --dataname folder in a table, CSV or Parquet: columns path (below --datapath) and label, and if "
        "wanted split (train, val or test), group and weight",
        metavar="FILE",
        affects_result=False,  # its content does, through the data's fingerprint
        synonyms="csv csv-file labels-csv labels-file annotations annotation-file label-file",
        example="F",
        within="--dataname folder --datapath D",
    )
    path_column: str | None = column_setting(
        "column of --labels with the images' paths; names without an ending get that of their file [path, image, "
        "filename, image_id or another usual name]",
    )
    split_column: str | None = column_setting(
        "column of --labels that says train, val or test; off for none [split, set, subset or partition, if there is "
        "one]",
    )
    group_column: str | None = column_setting(
        "column of --labels that names a patient or the like, whose images --val-split keeps together; off for "
        "none [group, patient, subject, or these with _id, if there is one]",
    )
    weight_column: str | None = column_setting(
        "column of --labels with each image's weight in the training loss, relative to the mean over the training "
        "images; off for none [weight or sample_weight, if there is one]",
        synonyms="sample-weight-column",
    )
    class_from_name: str | None = setting(
        "take the classes of --dataname folder from the files' names: what stands before the number that ends them, "
        "cat of cat.12.jpg, or what the group of a regular expression matches at the beginning, for example '([^_]+)_'",
        check=_one_group,
        bare=BEFORE_THE_NUMBER,
        metavar="PATTERN",
        example="(.)",
        within="--dataname folder --datapath D",
    )
    class_map: str | None = setting(
        "file that gives the classes of --dataname folder their order: a name on each line, or lines name,number; "
        "images of other classes are left out",
        metavar="FILE",
        affects_result=False,  # its content does, through the data's fingerprint
        example="F",
        within="--dataname folder --datapath D",
    )
    label_separator: str | None = label_setting(
        "what stands between several labels in a cell of the label column, such as ';'",
        metavar="TEXT",
        check=lambda value: None if value == " " else not_empty(value),
        example=";",
    )
    label_columns: tuple[str, ...] | None = label_setting(
        "columns of several labels, one a class, which hold 1, 0, or nothing where the label is missing",
        metavar="NAME",
        verbatim=True,
        example="a b",
    )
    image_size: int | tuple[int, ...] | None = view_setting(
        "height and width of the network's input in pixels; one number: both [that of the weights or the data set]",
        check=_height_and_width,
        metavar="PIXELS",
        synonyms="img-size imgsz img train-crop-size resolution",
        example="16",
    )
    val_image_size: int | tuple[int, ...] | None = view_setting(
        "height and width of validation's images; one number: both [that of the weights, otherwise the image size]",
        check=_height_and_width,
        metavar="PIXELS",
        synonyms="val-crop-size val-img-size eval-crop-size",
        example="24",
        within="--arch timm/test_resnet",
    )
    progressive_size: int | None = training_setting(
        "begin training with images whose shorter side has this many pixels; they grow to the image size",
        check=between(1, 8192),
        metavar="PIXELS",
        synonyms="min-res",
        example="4",
        within="--arch conv2a",
    )
    progressive_step: int = training_setting(
        "pixels by which --progressive-size grows at least",
        default=32,
        check=between(1, 8192),
        metavar="PIXELS",
        effect=_PROGRESSIVE,
        example="2",
        within="--arch conv2a --progressive-size 4 --progressive-epochs 2 9",
    )
    progressive_epochs: tuple[int, ...] | None = training_setting(
        "epochs after which --progressive-size starts and stops growing [74 %% and 86 %% of --epochs]",
        check=_first_and_last,
        metavar="EPOCH",
        effect=_PROGRESSIVE,
        example="2 9",
    )
    crop_pct: float | None = view_setting(
        "side of validation's center crop as a fraction of the resized image [1 for sets of one image size, such as "
        "cifar10; otherwise that of the weights, or 0.875]",
        check=between(0.01, 1),
        metavar="SHARE",
        example="0.5",
    )
    crop_mode: str | None = view_setting(
        "validation resizes the shorter side and crops (center), both sides (squash), or the longer side and pads "
        "(border) [that of the weights or center]",
        choices=CROP_MODES,
        effect=Needs("images of any size", lambda v: v.any_size),
    )
    interpolation: str | None = view_setting(
        "interpolation when resizing [that of the weights or bilinear]",
        choices=INTERPOLATIONS,
        effect=Needs("images that are resized", lambda v: v.resizes),
        within="--image-size 16",
    )
    mean: tuple[float, ...] | None = view_setting(
        "mean of each channel, of pixels between 0 and 1 [that of the weights or the data set]",
        check=between(-100, 100),
        example="0.4",
    )
    std: tuple[float, ...] | None = view_setting(
        "standard deviation of each channel [that of the weights or the data set]",
        check=between(0, 100, open_low=True),
        example="0.4",
    )
    in_channels: int | None = view_setting(
        "channels of an image that the network sees [those of the data set: 3, or 1 if it is grey; all bands of .npy "
        "files and of TIFF files of several bands]",
        check=between(1, MOST_CHANNELS),
        synonyms="in-chans input-channels",
        example="3",
    )
    levels: str | None = view_setting(
        "levels of images of more than 8 bits that the network sees: 256, or all of them, in four times the memory "
        "[those of the weights; 256, with other channels than 1 and 3 all]",
        choices=("256", "all"),
        effect=_IMAGE_FILES,
        within="--dataname folder --datapath D",
    )
    pixel_range: tuple[float, ...] | None = view_setting(
        "numbers of images of more than 8 bits that become black and white: 0 1023 for 10 of 16 bits [16 bits: 0 "
        "65535; 32 bits: refused; that of the weights]",
        check=_low_and_high,
        metavar="LEVEL",
        effect=_IMAGE_FILES,
        example="0 1023",
    )
    workers: int | str = setting(
        "data-loading processes per training process; 0: none, auto: as many as a measurement finds useful",
        default="auto",
        words=("auto",),
        short="-w",
        check=between(0, 1024),
        metavar="{N,auto}",
        affects_result=False,
        effect=Needs("images in files, or --loader stream", lambda v: not (v.in_memory and v.resident)),
        synonyms="j num-workers dataloader-num-workers",
        inherited=False,
        example="2",
    )
    decode: str = setting(
        "where to decode, crop and resize JPEG files when images stream; gpu needs a GPU",
        default="cpu",
        choices=("cpu", "gpu"),
        affects_result=False,
        effect=Needs(
            "image files of any size that stream", lambda v: v.any_size and not v.in_memory and not v.resident
        ),
    )
    cache_dir: str | None = setting(
        "folder for decoded images and for the list of millions of image files [.decoded in --datapath]",
        metavar="DIR",
        affects_result=False,
        effect=Needs(
            "images in files, or several processes that share them (--loader resident)",
            lambda v: not v.in_memory or (v.resident and v.local_processes > 1),
        ),
        example="D",
    )
    skip_bad_images: bool = setting(
        "skip unreadable images: training takes the next one instead, validation leaves them out",
        default=False,
        affects_result=False,  # without unreadable images it changes nothing; with one, no run goes on without it
        effect=_IMAGE_FILES,
    )
    batch_size: int = setting(
        "images per process and forward pass",
        default=64,
        short="-b",
        check=between(1, 2**20),
        affects_result=False,
        effect=_VALIDATION_BATCH,
        synonyms="train-batch-size per-device-train-batch-size per-gpu-batch-size bs batch",
        inherited=False,
    )
    global_batch_size: int = setting(  # None until the settings are resolved
        "images per optimizer step, over all processes and accumulation [batch size x processes x accumulate]",
        check=between(1, 2**24),
        effect=_VALIDATION_BATCH,
        shapes="samples",
        example="128",
    )
    drop_last: bool = training_setting(
        "drop the images beyond an epoch's last full global batch, different ones in each epoch [the last one or two "
        "steps are smaller]",
        default=False,
        effect=Needs("a last step that is smaller than the others", lambda v: v.remainder > 0),
        shapes="samples",
        within="--batch-size 16",
    )
    balanced_sampler: bool = training_setting(
        "show each class equally often in an epoch, not each image exactly once",
        default=False,
        one_label="goes by the one class of each image; --class-weights balanced evens out several",
        shapes="samples",
    )
    shard_window: int | None = training_setting(
        "for images in shards: shuffle the shards, then the images within N shards at a time, for places where "
        "random reads are slow [all images with each other]",
        shapes="samples",
        example="4",
    )
    shard_cache: str | None = training_setting(
        "local folder that shards are copied into before training needs them, where --datapath is slow",
        metavar="DIR",
        affects_result=False,
        effect=Needs("images in shards that stream (--loader stream)", lambda v: not v.resident),
        example="D",
    )
    shard_cache_gb: float = training_setting(
        "largest size of --shard-cache in GB",
        default=20.0,
        check=between(0.001, 1e6),
        metavar="GB",
        affects_result=False,
        effect=Needs("--shard-cache"),
    )
    train_samples: int | None = training_setting(
        "train on this many of the training images only, the first in the order of --seed, for a quick trial",
        synonyms="max-train-samples",
        shapes="samples",
        example="100",
    )
    val_batch_size: int | None = setting(
        "images per process and forward pass in validation [batch size]",
        check=between(1, 2**20),
        affects_result=False,
        synonyms="validation-batch-size vb eval-batch-size test-batch-size per-device-eval-batch-size",
        shapes="validation images",
        example="9",
    )
    max_val_batches: int | None = setting(
        "validate on the images of this many batches only (of --val-batch-size, or else of a step), chosen at random "
        "once, for a quick trial; each line about a validation says so",
        effect=Needs("more validation images than these batches hold", lambda v: v.cuts_validation),
        synonyms="limit-val-batches",
        shapes="validation images",
        example="1",
    )
    loader: str = setting(
        "resident: all images in device memory; stream: worker processes read them",
        default="auto",
        choices=("auto", "resident", "stream"),
        affects_result=False,
    )
    tta: str = view_setting(
        "test-time augmentation: validate by the mean logits of an image and its mirror image (flip), or also of "
        "both moved by a pixel, 6 views (flip-shift), or 26 if these disagree on the class "
        "(flip-shift-doubt)",
        default="none",
        choices=tuple(VIEWS),
        one_label={"flip-shift-doubt": "compares the likeliest classes"},
    )

    @property
    def is_table(self) -> bool:
        """True if labels come from a table or from the files' names, not from folders."""
        return self.labels is not None or self.class_from_name is not None

    @property
    def divides_training(self) -> bool:
        """True if the validation images are taken from the training images."""
        return self.val_split is not None or self.folds is not None

    @property
    def undivided(self) -> DataSettings:
        """A copy that takes no validation images from the training images."""
        return replace(self, val_split=None, folds=None, fold=None)

    @staticmethod
    def contradictions(v: Any) -> Iterator[str]:
        yield from _folds(v)
        expected = v.global_batch_size and math.ceil(v.global_batch_size / (v.processes * v.accumulate))
        if v.has(expected and v.batch_size != expected and v.same_layer("batch_size", "global_batch_size")):
            yield (
                f"--batch-size {v.batch_size} x {v.processes} processes x --accumulate {v.accumulate} is not "
                f"--global-batch-size {v.global_batch_size}; give one of the two"
            )
        names = ("shard_window", "balanced_sampler", "repeated_augmentation")
        yield from v.only_one("are two ways to fill an epoch", *names)
        if v.has(v.progressive_size and v.progressive_epochs and v.progressive_epochs[1] >= v.epochs):
            yield (
                f"--progressive-epochs {' '.join(map(str, v.progressive_epochs))}: --epochs {v.epochs} end before "
                "images have their full size; --progressive-size none trains on these from the start"
            )
        if v.has(v.decode == "gpu" and v.device == "cpu"):
            yield "--decode gpu contradicts --device cpu"
        if v.has(v.decode == "gpu" and v.skip_bad_images):
            yield "--skip-bad-images does not work with --decode gpu; remove one"
        yield from v.only_one("are two ways to give several labels", "label_separator", "label_columns")
        yield from v.only_one("name the labels twice", "label_column", "label_columns")
        for name in ("label_separator", "label_columns"):
            for of_one in ("class_map", "class_from_name"):
                yield from v.only_one("give several labels an image, and one", name, of_one)
        spec = SPECS[v.dataname]
        if v.has(v.download and (spec.of_the_user or not spec.needs_datapath)):
            yield f"--download: {v.dataname} is never fetched"
        if v.has(v.starts_here and v.origins["dataname"] == DEFAULT and v.is_explicit("datapath")):
            yield "--datapath needs --dataname: folder for class folders, mnist, cifar10, imagenet ..."
        if v.has(v.labels is not None and v.dataname != "folder"):
            yield f"--labels is for --dataname folder; {v.dataname} has labels of its own"
        for name in ("class_from_name", "class_map"):
            if v.has(getattr(v, name) is not None and v.dataname != "folder"):
                yield f"--{name.replace('_', '-')} is for --dataname folder, not {v.dataname}"
        if v.has(v.labels and v.class_from_name):
            yield "--labels and --class-from-name both say the classes; give one"
        if v.has(v.val_split is not None and v.dataname not in ("folder", "hf")):
            yield f"--val-split is for --dataname folder and hf; {v.dataname} has its own validation images"
        if v.has(spec.needs_datapath and v.datapath is None):
            yield (
                f"--dataname {v.dataname} needs --datapath DIR, the folder that holds it"
                + (" (or where --download puts it)" if spec.can_be_fetched else "")
            )
