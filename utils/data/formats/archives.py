"""Data sets that must first be downloaded or unpacked: ImageNet's archives, and torchvision's downloads.

If the work is interrupted, a later start continues it, and no start mistakes a part for the whole: ImageNet is unpacked
into a hidden folder, one class at a time, which is renamed when complete; torchvision's archives have MD5 sums, and
their unpacked files are read as a check. Only one process per machine works at a time.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import uuid
from collections.abc import Iterable
from pathlib import Path

from utils.config.settings import UserError, as_user_error
from utils.data.formats import readers
from utils.data.kept import claimed
from utils.data.progress_log import Log, ProgressLog

UNPACKING = ".unpacking"  # in --datapath; readers pass over hidden folders


# ------------------------------------------------------------------------------------------ ImageNet


def unpack_imagenet(root: Path, splits: tuple[str, ...], log: Log) -> None:
    """Unpack ImageNet's archives in ``root`` for those of ``splits`` ('train', 'val') that have no folder yet.

    Does nothing if none of their archives is there. Needs no disk space beyond the images. Raises ``UserError`` if only
    some of the archives needed are there, or if one is damaged or cannot be unpacked.
    """
    from torchvision.datasets.imagenet import ARCHIVE_META

    def missing() -> list[str]:
        return [split for split in splits if not (root / split).is_dir()]

    if not has_imagenet(root, missing()):
        return
    doing = f"Waiting for another process that unpacks ImageNet in {root}"
    try:
        with claimed(root / UNPACKING, doing, log):
            archives = [*missing(), *(["devkit"] if "val" in missing() else [])]
            _refuse_missing(root, [ARCHIVE_META[archive][0] for archive in archives])
            for left in [*(root / UNPACKING).glob("class.*"), *(root / UNPACKING).glob("val.*")]:
                shutil.rmtree(left, ignore_errors=True)  # left by a process that was killed
            for split in missing():
                _unpack_split(root, split, log)
            shutil.rmtree(root / UNPACKING, ignore_errors=True)
    except (RuntimeError, OSError, tarfile.TarError) as error:  # whose whole text names the file
        reason = " ".join(str(error).split())
        raise UserError(f"--datapath {root}: ImageNet's archives cannot be unpacked ({reason})") from error


def has_imagenet(root: Path, splits: Iterable[str] = ("train", "val")) -> bool:
    """True if ``root`` holds an archive of ImageNet's images for one of ``splits``."""
    from torchvision.datasets.imagenet import ARCHIVE_META

    return any((root / ARCHIVE_META[split][0]).is_file() for split in splits)


def _refuse_missing(root: Path, names: list[str]) -> None:
    """Raise ``UserError`` if an archive is missing, before an hour of work on the others."""
    lacking = [name for name in names if not (root / name).is_file()]
    if lacking:
        raise UserError(
            f"--datapath {root}: lacks {' and '.join(lacking)}, without which ImageNet's other archives are of no use; "
            "put it there"
        )


def _unpack_split(root: Path, split: str, log: Log) -> None:
    """Unpack a split's archive into ``root``/``split``, which appears only when complete. Raises ``UserError``."""
    from torchvision.datasets.imagenet import ARCHIVE_META
    from torchvision.datasets.utils import check_integrity

    work = root / UNPACKING
    work.mkdir(exist_ok=True)
    name, md5 = ARCHIVE_META[split]
    archive = root / name
    log(f"Checking {archive} ({archive.stat().st_size / 1e9:,.1f} GB)")
    if not check_integrity(archive, md5):
        raise UserError(f"{archive}: is damaged or not whole (not its MD5 sum {md5}); get it again")
    log(f"Unpacking {archive}")
    with tarfile.open(archive) as opened:
        whole = _unpack_train(opened, work, log) if split == "train" else _unpack_validation(opened, root, work, log)
    os.sync()  # the new name must not reach the disk before the images
    os.rename(whole, root / split)


def _unpack_train(archive: tarfile.TarFile, work: Path, log: Log) -> Path:
    """Unpack an archive of archives, one per class, leaving out complete classes; return the class folders' parent."""
    folder = work / "train"
    folder.mkdir(exist_ok=True)
    classes = [member for member in archive if member.isfile()]
    with ProgressLog(log).counting("Unpacking train/", len(classes), "classes") as advance:
        for member in classes:
            target = folder / Path(member.name).stem
            if not target.is_dir():
                part = work / f"class.{uuid.uuid4().hex}"
                part.mkdir()
                with tarfile.open(fileobj=archive.extractfile(member)) as images:
                    for image in images:
                        if image.isfile():
                            _write(images, image, part)
                os.rename(part, target)
            advance(1)
    return folder


def _unpack_validation(archive: tarfile.TarFile, root: Path, work: Path, log: Log) -> Path:
    """Unpack an archive of images into class folders by the development kit's list; return the folders' parent."""
    from torchvision.datasets import imagenet

    imagenet.parse_devkit_archive(work, str((root / imagenet.ARCHIVE_META["devkit"][0]).absolute()))
    classes = imagenet.load_meta_file(work)[1]
    images = sorted((member for member in archive if member.isfile()), key=lambda member: Path(member.name).name)
    if len(images) != len(classes):
        raise RuntimeError(f"{len(images):,} validation images, and classes for {len(classes):,} in the devkit")
    part = work / f"val.{uuid.uuid4().hex}"
    for name in set(classes):
        (part / name).mkdir(parents=True)
    with ProgressLog(log).counting("Unpacking val/", len(images), "images") as advance:
        for image, name in zip(images, classes, strict=True):
            _write(archive, image, part / name)
            advance(1)
    return part


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a member into ``folder`` under its file name alone, whatever folders precede it in the archive."""
    content = archive.extractfile(member)
    assert content is not None  # the member is a file
    with open(folder / Path(member.name).name, "xb") as file:
        shutil.copyfileobj(content, file)


def refuse_half_unpacked(folder: Path) -> None:
    """Raise ``UserError`` if files lie beside class folders, as after an unpacking of ImageNet that was interrupted."""
    with os.scandir(folder) as entries:
        loose = sorted(entry.name for entry in entries if entry.name.endswith((".JPEG", ".tar")))
    if loose:
        cure = "put each into the folder of its class"
        if has_imagenet(folder.parent):
            cure = f"if an unpacking was cut, remove {folder}, and it is unpacked anew from the archives"
        raise UserError(f"--datapath: {folder} holds files beside its class folders, such as {loose[0]}; {cure}")


# -------------------------------------------------------------------------------- torchvision's downloads


def fetch(name: str, root: Path, log: Log) -> None:
    """Download data set ``name`` with torchvision into ``root``, unless it is complete there. Raises ``UserError``."""
    own = readers.OWN_FILES.get(name)
    if own is None or own.download is None:
        raise UserError(f"--download: {name} cannot be fetched; get it from its owners and give --datapath")
    doing = f"Waiting for another process that fetches {name} into {root}"
    with as_user_error(f"--download: {name} could not be fetched into {root}", (RuntimeError, OSError, EOFError)):
        root.mkdir(parents=True, exist_ok=True)
        if _is_whole(own, root):
            return
        with claimed(root / UNPACKING, doing, log):
            if not _is_whole(own, root):
                own.download(root)


def _is_whole(own: readers.OwnFiles, root: Path) -> bool:
    """True if the data set's files are in ``root`` and can be read."""
    try:
        place = own.find(root)
        return place is not None and own.read(place) is not None
    except UserError:
        return False
