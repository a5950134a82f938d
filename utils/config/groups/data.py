"""Settings of the images and their batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.datasets import SPECS
from utils.config.field import between, needs, not_empty, positive_int, setting

CROP_MODES = ("center", "squash", "border")
INTERPOLATIONS = ("bilinear", "bicubic")
VIEWS = {"none": 1, "flip": 2, "flip-shift": 6}  # of an image in validation, by the names of --tta

_IMAGE_FILES = needs("images in files", lambda v: not v.in_memory)
_TABLE = needs("--dataname hf", lambda v: v.dataname == "hf")
_VALIDATION_BATCH = needs("training, or --val-batch-size left out", lambda v: not (v.evaluate and v.val_batch_size))
_PROGRESSIVE = needs("--progressive-size", lambda v: v.progressive_size)


def _first_and_last(epochs: tuple[int, ...]) -> str | None:
    fits = len(epochs) == 2 and 0 <= epochs[0] <= epochs[1]
    return (
        None
        if fits
        else "must be two epochs, the first below the second: where the image size begins and where it ends to grow"
    )


def _low_and_high(levels: tuple[float, ...]) -> str | None:
    fits = len(levels) == 2 and -1e30 < levels[0] < levels[1] < 1e30
    return None if fits else "must be two numbers, the lower first: what becomes black and what becomes white"


def _has_folder(v: Any) -> bool:
    return SPECS[v.dataname].needs_datapath or v.local_processes > 1  # which share their images there


@dataclass(frozen=True)
class DataSettings:
    """Which images, in which batches."""

    dataname: str = setting("digits", "data set", choices=tuple(SPECS), synonyms="dataset dataset-name")
    datapath: str | None = setting(
        None,
        "folder that holds the data",
        type=str,
        check=not_empty,
        metavar="DIR",
        affects_result=False,
        effect=needs("a --dataname with files", _has_folder),
        synonyms="data data-dir data-path data-root root dataset-dir",
    )
    download: bool = setting(
        False,
        "download the data set through torchvision if it is missing",
        affects_result=False,
        synonyms="dataset-download",
    )
    val_split: float | None = setting(
        None,
        "fraction of a data set without val/ or test/ to validate on, for example 0.1",
        type=float,
        check=between(0, 1, open_low=True, open_high=True),
        metavar="SHARE",
    )
    val_split_by: str = setting(
        "name",
        "what chooses these images: each one's class and name alone, or one draw over all, as in older runs, "
        "which go on with theirs",
        choices=("name", "draw"),
        earlier="draw",
        effect=needs("--val-split", lambda v: v.val_split),
    )
    image_column: str | None = setting(
        None,
        "column of the images in --dataname hf [the only one with images, or that of a usual name]",
        type=str,
        check=not_empty,
        metavar="NAME",
        effect=_TABLE,
        synonyms="input-key image-column-name",
    )
    label_column: str | None = setting(
        None,
        "column of the labels in --dataname hf [the only ClassLabel, or that of a usual name]",
        type=str,
        check=not_empty,
        metavar="NAME",
        effect=_TABLE,
        synonyms="target-key label-column-name",
    )
    image_size: int | None = setting(
        None,
        "height and width of the network's input in pixels [that of the weights or the data set]",
        type=int,
        check=between(1, 8192),
        synonyms="img-size imgsz img train-crop-size resolution",
    )
    val_image_size: int | None = setting(
        None,
        "the same in validation [image size]",
        type=int,
        check=between(1, 8192),
        synonyms="val-crop-size val-img-size eval-crop-size",
    )
    progressive_size: int | None = setting(
        None,
        "begin training with images of this height and width, which grow to the image size",
        type=int,
        check=between(1, 8192),
        metavar="PIXELS",
        in_evaluation=False,
        synonyms="min-res",
    )
    progressive_step: int = setting(
        32,
        "pixels by which the image size grows at least",
        check=between(1, 8192),
        metavar="PIXELS",
        in_evaluation=False,
        effect=_PROGRESSIVE,
    )
    progressive_epochs: tuple[int, ...] | None = setting(
        None,
        "epochs after which the image size starts and stops growing [74 %% and 86 %% of --epochs]",
        type=int,
        many=True,
        check=_first_and_last,
        metavar="EPOCH",
        in_evaluation=False,
        effect=_PROGRESSIVE,
    )
    crop_pct: float | None = setting(
        None,
        "side of validation's center crop as a fraction of the resized image [that of the weights, otherwise "
        "0.875, or 1 if all images have one size]",
        type=float,
        check=between(0.01, 1),
        metavar="SHARE",
    )
    crop_mode: str | None = setting(
        None,
        "validation resizes the shorter side and crops (center), both sides (squash), or the longer side and "
        "pads (border) [that of the weights or center]",
        type=str,
        choices=CROP_MODES,
        effect=needs("images of any size", lambda v: v.any_size),
    )
    interpolation: str | None = setting(
        None,
        "interpolation when resizing [that of the weights or bilinear]",
        type=str,
        choices=INTERPOLATIONS,
        effect=needs("images that are resized", lambda v: v.resizes),
    )
    mean: tuple[float, ...] | None = setting(
        None,
        "mean of each channel, of pixels between 0 and 1 [that of the weights or the data set]",
        type=float,
        many=True,
        check=between(-100, 100),
    )
    std: tuple[float, ...] | None = setting(
        None,
        "standard deviation of each channel [that of the weights or the data set]",
        type=float,
        many=True,
        check=between(0, 100, open_low=True),
    )
    pixel_range: tuple[float, ...] | None = setting(
        None,
        "numbers of images of more than 8 bits that become black and white: 0 1023 for 10 of 16 bits [16 bits: 0 "
        "65535; 32 bits: refused; that of the weights]",
        type=float,
        many=True,
        check=_low_and_high,
        metavar="LEVEL",
        effect=_IMAGE_FILES,
    )
    workers: int | str = setting(
        "auto",
        "data-loading processes per training process; 0: none, auto: as many as a measurement finds useful",
        type=int,
        words=("auto",),
        short="-w",
        check=between(0, 1024),
        metavar="{N,auto}",
        affects_result=False,
        effect=needs("images in files, or --loader stream", lambda v: not (v.in_memory and v.resident)),
        synonyms="j num-workers dataloader-num-workers",
    )
    decode: str = setting(
        "cpu",
        "where to decode, crop and resize JPEG files when images stream; gpu needs a GPU",
        choices=("cpu", "gpu"),
        affects_result=False,
        effect=needs(
            "image files of any size that stream", lambda v: v.any_size and not v.in_memory and not v.resident
        ),
    )
    cache_dir: str | None = setting(
        None,
        "folder for decoded images and for the list of millions of image files [.decoded in --datapath]",
        type=str,
        check=not_empty,
        metavar="DIR",
        affects_result=False,
        effect=needs(
            "images in files, or several processes that share them (--loader resident)",
            lambda v: not v.in_memory or (v.resident and v.local_processes > 1),
        ),
    )
    skip_bad_images: bool = setting(
        False,
        "skip unreadable images: training takes the next one instead, validation leaves them out",
        affects_result=False,  # without unreadable images it changes nothing; with one, no run goes on without it
        effect=_IMAGE_FILES,
    )
    batch_size: int = setting(
        64,
        "images per process and forward pass",
        short="-b",
        check=between(1, 2**20),
        affects_result=False,
        effect=_VALIDATION_BATCH,
        synonyms="train-batch-size per-device-train-batch-size per-gpu-batch-size bs batch",
    )
    global_batch_size: int | None = setting(
        None,
        "images per optimizer step, over all processes and accumulation [batch size x processes x accumulate]",
        type=int,
        check=between(1, 2**24),
        effect=_VALIDATION_BATCH,
    )
    drop_last: bool = setting(
        False,
        "drop the images beyond an epoch's last full global batch, different ones in each epoch [the last one "
        "or two steps are smaller]",
        in_evaluation=False,
        effect=needs("a last step that is smaller than the others", lambda v: v.remainder > 0),
    )
    balanced_sampler: bool = setting(
        False, "show each class equally often in an epoch, not each image exactly once", in_evaluation=False
    )
    shard_window: int | None = setting(
        None,
        "for images in shards: shuffle the shards, then the images within N shards at a time, for places where "
        "random reads are slow [all images with each other]",
        type=int,
        check=positive_int,
        metavar="N",
        in_evaluation=False,
    )
    shard_cache: str | None = setting(
        None,
        "local folder that shards are copied into before training needs them, where --datapath is slow",
        type=str,
        check=not_empty,
        metavar="DIR",
        affects_result=False,
        in_evaluation=False,
        effect=needs("images in shards that stream (--loader stream)", lambda v: not v.resident),
    )
    shard_cache_gb: float = setting(
        20.0,
        "largest size of that folder in GB",
        check=between(0.001, 1e6),
        metavar="GB",
        affects_result=False,
        in_evaluation=False,
        effect=needs("--shard-cache", lambda v: v.shard_cache is not None),
    )
    train_samples: int | None = setting(
        None,
        "train on this many of the training images only, the first in the order of --seed, for a quick trial",
        type=int,
        check=positive_int,
        metavar="N",
        in_evaluation=False,
        synonyms="max-train-samples",
    )
    val_batch_size: int | None = setting(
        None,
        "images per process and forward pass in validation [batch size]",
        type=int,
        check=between(1, 2**20),
        affects_result=False,
        synonyms="validation-batch-size vb eval-batch-size test-batch-size per-device-eval-batch-size",
    )
    max_val_batches: int | None = setting(
        None,
        "validate on the images of this many batches only, of --val-batch-size or else of the images of a step, "
        "chosen at random and always the same, for a quick trial; each line about a validation says so",
        type=int,
        check=positive_int,
        metavar="N",
        effect=needs("more validation images than these batches hold", lambda v: v.cuts_validation),
        synonyms="limit-val-batches",
    )
    loader: str = setting(
        "auto",
        "resident: all images in device memory; stream: worker processes read them",
        choices=("auto", "resident", "stream"),
        affects_result=False,
    )
    tta: str = setting(
        "none",
        "test-time augmentation: validate by the mean logits of an image and its mirror image (flip), or also "
        "of both moved by a pixel, in 6 views (flip-shift)",
        choices=tuple(VIEWS),
    )
