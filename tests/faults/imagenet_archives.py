"""Made-up archives of the shape of ImageNet's, for torchvision and for us."""

import hashlib
import io
import tarfile

import numpy as np
from scipy import io as matlab
from torchvision.datasets import imagenet

# images of each class, images in all
CLASSES = 4
TRAINING = 3
VALIDATION = 10


def classes():
    return [f"n{10 * number:08}" for number in range(1, CLASSES + 1)]


def write(root):
    """The three archives in ``root``; gives their entries for ``imagenet.ARCHIVE_META``."""
    root.mkdir(parents=True, exist_ok=True)
    made = {"train": _train(), "val": _validation(), "devkit": _devkit()}
    meta = {}
    for key, content in made.items():
        name = imagenet.ARCHIVE_META[key][0]
        (root / name).write_bytes(content)
        meta[key] = name, hashlib.md5(content).hexdigest()
    return meta


def _tar(files, mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _train():
    images = {name: {f"{name}_{n}.JPEG": f"{name} {n} ".encode() * 99 for n in range(TRAINING)} for name in classes()}
    return _tar({f"{name}.tar": _tar(files) for name, files in images.items()})


def _validation():
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, VALIDATION + 1)]
    return _tar({name: name.encode() * 99 for name in names})


def _devkit():
    """The classes' numbers are in another order than their names, and some are no leaves."""
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    leaves = [(number, name, f"{name}, word", "", 0) for number, name in enumerate(reversed(classes()), 1)]
    synsets = np.array([*leaves, (CLASSES + 1, "n99999999", "thing", "", 3)], dtype=fields)
    file = io.BytesIO()
    matlab.savemat(file, {"synsets": synsets})
    truth = "".join(f"{1 + number % CLASSES}\n" for number in range(VALIDATION))
    folder = "ILSVRC2012_devkit_t12/data"
    content = {"meta.mat": file.getvalue(), "ILSVRC2012_validation_ground_truth.txt": truth.encode()}
    return _tar({f"{folder}/{name}": data for name, data in content.items()}, "w:gz")
