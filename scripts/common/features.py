"""Features of a data set: the inputs of a network's output layer for each image, kept in a file and reused.

The network may come from a run or a library, and its classes may differ from the data set's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from models.build import build_model, locate
from models.load import Loaded, shape_of
from models.prepare import BEGUN, known_preprocessing, read_weights, trained_image_size
from models.starting_weights import load_start
from scripts.common.choice import Chosen, ids_of, point_of, read_images, settings_of
from scripts.common.command_line import say, warn
from scripts.common.output import whole_file
from scripts.common.predictions import FromDataSet, predict_split
from utils.config import arguments
from utils.config.groups.data import DataSettings
from utils.config.groups.model import ModelSettings
from utils.config.settings import Settings, UserError, flag_of
from utils.data.data_set import Data
from utils.data.datasets import get_data
from utils.data.formats.class_folders import test_folder, validation_folder
from utils.data.formats.readers import Images, MemoryImages
from utils.data.images.stored import NumberedImages, version_of
from utils.data.preprocessing import Preprocessing
from utils.data.splits import in_class_folders
from utils.optim.freezing import BACKBONE
from utils.optim.head import output_layers
from utils.precision.amp import resolve_amp
from utils.record.multilabel import THRESHOLD
from utils.record.reading import OneLabel, Reading, SeveralLabels

OF_ANY_DATA = ("batch_size", "val_batch_size", "workers", "tta", "skip_bad_images")  # data settings, kept for any data
OF_THE_RUN = {one.name for kind in (ModelSettings, Preprocessing) for one in dataclasses.fields(kind)}
COLUMNS = ("features", "thumbnails", "labels", "numbers")


@dataclass(frozen=True)
class Features(FromDataSet):
    """Features of n images of a split, in the data set's order, with validation preprocessing.

    ``features``: float32 (n, d). ``thumbnails``: float32 (n, 256), as in ``PredictedImages``. ``labels``: int64 (n,),
    indices into ``classes``; multi-label: int8 (n, classes), 1 shown, 0 not shown, -1 missing. ``ids``: paths, or
    numbers such as 'val[17]'.
    """

    split: str
    features: np.ndarray
    thumbnails: np.ndarray
    labels: np.ndarray
    numbers: np.ndarray
    ids: list[str]
    classes: tuple[str, ...]
    images: Images

    def __len__(self) -> int:
        return len(self.labels)


class _OnOtherClasses(nn.Module):
    """Wrapper of ``network`` for ``validate`` on data with a different number of ``classes``: all logits are zero."""

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__()
        self.network = network
        self.classes = classes

    def get_classifier(self) -> list[nn.Module]:
        """Output layers of the wrapped network, by the method name that timm uses."""
        return output_layers(self.network)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.network(images)
        return logits.new_zeros(len(images), self.classes)


# ------------------------------------------------------------------------------------- the network


def on_data(loaded: Loaded, flags: Sequence[str]) -> Loaded:
    """The network of a run, ``loaded``, with the data that the training ``flags`` choose, perhaps with other classes.

    The preprocessing stays the run's. Raises ``UserError``, also if the flags change network or preprocessing.
    """
    given = arguments.read(flags)
    names = {name for _, _, layer in given.layers for name in layer}
    if fixed := sorted(names & OF_THE_RUN):
        raise UserError(f"{flag_of(fixed[0])}: network and preprocessing are those of {loaded.path}; leave it out")
    if "datapath" in names and "dataname" not in names:  # the default data set would take its place
        raise UserError("--datapath needs --dataname, of the images that it holds: folder for class folders")
    begun = point_of(loaded).settings
    elsewhere = not names.isdisjoint(("dataname", "datapath", "config"))
    others = elsewhere or "labels" in names
    if others:
        kept = OF_ANY_DATA if elsewhere else (*OF_ANY_DATA, "dataname", "datapath")  # the run's images with new labels
        data = {option.name for option in dataclasses.fields(DataSettings)} - {*kept}
        begun = {name: value for name, value in begun.items() if name not in data}
    args = arguments.parse(["--evaluate", f"--resume={loaded.path}", *flags], checkpoint=begun)
    loaded = dataclasses.replace(loaded, settings=args.values())
    if not others:
        return loaded
    data = get_data(args.data, torch.device("cpu"))
    network = _OnOtherClasses(loaded.network, len(data.classes))
    about = {"classes": data.classes, "fingerprint": data.fingerprint, "reading": _reading(data), "progress": None}
    layers = [f"network.{name}" for name in args.precision.fp32_layers or ()]  # their names inside the wrapper
    settings = loaded.settings | {"fp32_layers": layers or None}
    return dataclasses.replace(loaded, network=network, settings=settings, **about, confidence=None)


def _reading(data: Data) -> Reading:
    return SeveralLabels((THRESHOLD,) * len(data.classes)) if data.multilabel else OneLabel()


def of_architecture(arch: str, flags: Sequence[str]) -> Loaded:
    """Build a network from its name and training ``flags``; a library's is pretrained by default.

    Raises ``UserError``.
    """
    library = (locate(arch) or ("own",))[0]
    chooses = any(flag.startswith(("--weights", "--no-pretrained", "--pretrained")) for flag in flags)
    pretrained = library != "own" and not chooses
    args = arguments.parse([f"--arch={arch}", *flags], checkpoint={"pretrained": pretrained})
    weights = read_weights(args.model)
    data = get_data(args.data, torch.device("cpu"))
    data = data.shown_to(known_preprocessing(args, None, weights, evaluates=True), args.data)
    shape = {"channels": data.preprocessing.channels, "image_size": data.image_size}
    shape["stem_size"] = trained_image_size(args.model, weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.run.seed)
        network = build_model(args.model, classes=len(data.classes), **shape)
    if weights is not None:
        load_start(network, weights.state, weights.path, True, data.classes)
    elif not args.model.pretrained:
        warn(f"{arch}: its weights are random, those of --seed {args.run.seed}; --weights FILE gives it others")
    return Loaded(
        network.eval(),
        data.classes,
        data.preprocessing,
        args.model.arch,
        Path(args.model.arch),
        args.values() | BEGUN,
        data.fingerprint,
        seen="",
        has_average=False,
        loss_scaled=False,
        progress=None,
        chosen="",
        reading=_reading(data),
    )


def knows_classes(loaded: Loaded) -> bool:
    """True if the network's classes are those of the images, as when its run was trained on them."""
    return not isinstance(loaded.network, _OnOtherClasses)


def learned_labels(loaded: Loaded) -> bool:
    """True if the layers that give the features may have seen these labels in training.

    A library's weights, frozen, have not, except for those of ImageNet.
    """
    settings = loaded.settings
    frozen = any(name in BACKBONE for name in settings.get("freeze") or ())
    stays = frozen and not settings.get("freeze_epoch") and not settings.get("unfreeze_epoch")
    return not (stays and settings.get("pretrained")) or settings.get("dataname") == "imagenet"


def chosen_of(loaded: Loaded, split: str) -> Chosen:
    """Choice of all images of a split, following the settings of ``loaded``."""
    values = loaded.settings
    return Chosen(
        split=split,
        device=str(values.get("device") or "auto"),
        skip_bad_images=bool(values.get("skip_bad_images")),
        progress=values.get("progress") is not False,
        workers=str(values.get("workers", "auto")),
    )


def splits_of(loaded: Loaded, scored: str) -> list[str]:
    """Splits to study, among them ``scored``: training and validation images, and those of a folder test/.

    If a run validates on test/, as there is no val/, its images are not taken twice. Of a table of labels, or a data
    set with a reader of its own, test images are studied only if they are to be scored.
    """
    settings = settings_of(loaded, Chosen()).data
    root = Path(settings.datapath or ".")
    test = test_folder(root) if in_class_folders(settings) else None
    is_val = test is not None and not settings.divides_training and validation_folder(root) == test
    wanted = {"train": True, "val": scored == "val" or not is_val, "test": scored == "test" or (test and not is_val)}
    return [split for split, is_wanted in wanted.items() if is_wanted]


# ------------------------------------------------------------------------------------ the features


def embed(loaded: Loaded, chosen: Chosen, folder: Path | None, kind: str = "npz") -> Features:
    """Features of the ``chosen`` images; reused from ``folder`` if weights, preprocessing and images are the same.

    Otherwise computes them and, if a folder is given, writes them there as ``SPLIT.npz``, or in another format
    ``kind``. Raises ``UserError``.
    """
    args = settings_of(loaded, chosen)
    device = next(loaded.network.parameters()).device
    images, _ = read_images(loaded, args, chosen, torch.device("cpu"))
    key = key_of(loaded, args, images, device)
    file = folder and folder / f"{chosen.split}.{kind}"
    found = file and _read(file, key)
    if found is not None:
        say(f"{file}: these features are reused: same weights, preprocessing and images")
        return _features(chosen.split, found, loaded, images)
    said = predict_split(loaded, chosen, features=True)
    if not said.features.isfinite().all():
        raise UserError(f"--split {chosen.split}: some features are not finite numbers; try --amp off")
    values = (said.features, said.thumbnails, said.targets if said.reading.several else said.labels, said.numbers)
    made = dict(zip(COLUMNS, (np.asarray(value) for value in values), strict=True))
    features = _features(chosen.split, made, loaded, said.images)
    if file is not None:
        _write(file, key, features)
    return features


def _features(split: str, columns: dict[str, np.ndarray], loaded: Loaded, images: Images) -> Features:
    ids = ids_of(images, split, columns["numbers"])
    return Features(split, **columns, ids=ids, classes=loaded.classes, images=images)


def key_of(loaded: Loaded, args: Settings, images: Images, device: torch.device) -> str:
    """Digest of all that affects features beyond rounding: weights, network, preprocessing, precision and images.

    Images are identified by their pixels (in memory), their shards' content, or their files' paths, sizes and times.
    """
    digest = hashlib.sha256()
    for name, tensor in loaded.network.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    how = (args.data.tta, resolve_amp(args.precision, device), args.precision.fp32_layers, args.data.train_samples)
    digest.update(repr((loaded.arch, shape_of(loaded.arch, loaded.settings), *how)).encode())
    digest.update(repr((sorted(loaded.preprocessing.state().items()), loaded.classes, args.run.seed)).encode())
    digest.update(images.labels.cpu().numpy().tobytes())
    if isinstance(images, MemoryImages):
        digest.update(images.pixels.cpu().numpy().tobytes())
    elif isinstance(images.paths, NumberedImages):
        digest.update(images.paths.identity)
        digest.update(images.paths[0].version.encode("utf-8", "surrogateescape"))
    else:
        for path in images.paths:
            digest.update(os.fsencode(path) + b"\0" + version_of(path).encode() + b"\0")
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- the files


def _read(file: Path, key: str) -> dict[str, np.ndarray] | None:
    """Columns of the features ``file``; None if it is missing.

    Also None, after saying why, if it cannot be read or was made with a different ``key``.
    """
    if not file.exists():
        return None
    try:
        stored, columns = (_read_npz if file.suffix == ".npz" else _read_parquet)(file)
    except Exception as error:  # libraries raise various errors for a damaged file
        warn(f"{file}: cannot be read ({' '.join(str(error).split())[:100]}); computed anew")
        return None
    if stored != key:
        say(f"{file}: is of other weights, preprocessing or images; computed anew")
        return None
    return columns


def _write(file: Path, key: str, features: Features) -> None:
    columns = {name: getattr(features, name) for name in COLUMNS}
    with whole_file(file, f"--output {file.parent}", "; choose another") as out:
        if file.suffix == ".npz":
            texts = {"ids": np.array(features.ids), "classes": np.array(features.classes), "key": np.array(key)}
            np.savez(out, **columns, **texts)
        else:
            _write_parquet(out, key, features)


def _read_npz(file: Path) -> tuple[str, dict[str, np.ndarray]]:
    with np.load(file, allow_pickle=False) as stored:
        return str(stored["key"]), {name: stored[name] for name in COLUMNS}


def _write_parquet(out: Any, key: str, features: Features) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    def rows(values: np.ndarray) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])

    def texts(values: Sequence[str]) -> list[str]:  # a path may be any bytes
        return [value.encode("utf-8", "replace").decode() for value in values]

    table = pa.table(
        {
            "image": texts(features.ids),
            "class": texts([features.classes[label] for label in features.labels])
            if features.labels.ndim == 1
            else texts([";".join(compress(features.classes, row == 1)) for row in features.labels]),
            "features": rows(features.features),
            "thumbnails": rows(features.thumbnails),
            "labels": features.labels if features.labels.ndim == 1 else rows(features.labels),
            "numbers": features.numbers,
        }
    )
    parquet.write_table(table.replace_schema_metadata({"key": key}), out)


def _read_parquet(file: Path) -> tuple[str, dict[str, np.ndarray]]:
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(file, columns=list(COLUMNS))
    columns = {name: table[name].combine_chunks() for name in COLUMNS}

    def values(column: pa.Array) -> np.ndarray:
        if not pa.types.is_fixed_size_list(column.type):
            return column.to_numpy()
        return column.flatten().to_numpy().reshape(len(table), -1).copy()

    return table.schema.metadata[b"key"].decode(), {name: values(column) for name, column in columns.items()}
