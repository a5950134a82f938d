"""Formats of ``scripts/export.py``, and where each is written. Imports nothing heavy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from utils.config.settings import UserError
from utils.config.spelling import reason_of

CARD = "README.md"
CANNOT_WRITE = ("PytorchStreamWriter", "I/O error")  # in write errors of torch and safetensors that are not OSError


@dataclass(frozen=True)
class ExportFormat:
    """A format. ``loader``: the package that loads the export. ``needs``: optional packages to write and check it.

    ``ending``: ending of its one file beside the card; '' for a folder of files. ``holds_code``: the file contains the
    network's computation, so that preprocessing can be included. ``beside``: ending of a second file, with the
    metadata; '' if there is none.
    """

    loader: str
    ending: str
    needs: tuple[str, ...] = ()
    holds_code: bool = False
    beside: str = ""

    @property
    def file(self) -> str:
        """Name of the file with the weights, unless the user gives another."""
        return f"model{self.ending or '.safetensors'}"


FORMATS = {
    "onnx": ExportFormat("onnxruntime", ".onnx", ("onnx", "onnxscript", "onnxruntime"), holds_code=True),
    "torch-export": ExportFormat("torch", ".pt2", holds_code=True),
    "safetensors": ExportFormat("safetensors", ".safetensors"),
    "timm": ExportFormat("timm", ""),
    "torchvision": ExportFormat("torchvision", ".pth", beside=".json"),
}


def missing_packages(name: str) -> str | None:
    """Line about the optional packages of format ``name`` that are not installed; None if all are."""
    missing = [package for package in FORMATS[name].needs if util.find_spec(package) is None]
    if not missing:
        return None
    return f"--to {name} needs {', '.join(missing)}: python -m pip install -r requirements-tools.txt"


@dataclass(frozen=True)
class Place:
    """Place of an export: ``folder`` / ``model`` and, beside it, ``card``.

    ``whole``: the folder is the export and does not exist yet; otherwise the files are added to the folder.
    """

    folder: Path
    model: str
    card: str
    whole: bool

    @classmethod
    def of(cls, output: str, name: str) -> Place:
        """The place for --output ``output`` and format ``name``. Raises ``UserError`` if it is taken already."""
        path = Path(output)
        kind = FORMATS[name]
        endings = [other.ending for other in FORMATS.values() if other.ending and other != kind]
        if path.suffix.lower() in endings:
            wanted = f"a name that ends in {kind.ending}, or " if kind.ending else ""
            raise UserError(f"--output {output}: is not the name of what --to {name} writes; give {wanted}a folder")
        if kind.ending and path.suffix.lower() == kind.ending:
            for file in (path, path.with_suffix(kind.beside)) if kind.beside else (path,):
                if os.path.lexists(file):
                    raise UserError(f"--output {file}: exists already; remove it or choose another name")
            card = CARD if not os.path.lexists(path.parent / CARD) else f"{path.name}.{CARD}"
            if os.path.lexists(path.parent / card):
                raise UserError(f"--output {output}: its card {card} exists already; remove it or choose another name")
            return cls(path.parent, path.name, card, whole=False)
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"--output {output}: exists already; remove it or choose another name")
        return cls(path, kind.file, CARD, whole=True)

    @property
    def path(self) -> Path:
        """Exported folder or file, for messages."""
        return self.folder if self.whole else self.folder / self.model

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Context that gives a temporary folder, whose files move to the place at the end; an error leaves nothing.

        Raises ``UserError`` if the place cannot be written.
        """
        beside = self.folder.absolute().parent if self.whole else self.folder.absolute()
        temporary = beside / f".{self.path.name}.{os.getpid()}.tmp"
        made = [folder for folder in (beside, *beside.parents) if not folder.exists()]
        try:
            temporary.mkdir(parents=True)
            yield temporary
            mode = (temporary / self.card).stat().st_mode  # as the umask says; some libraries let nobody else read
            for path in temporary.iterdir():
                path.chmod(mode)
            self._move(temporary)
        except Exception as error:
            if not isinstance(error, OSError) and not any(words in str(error) for words in CANNOT_WRITE):
                raise
            raise UserError(f"--output {self.path}: cannot be written ({reason_of(error)})") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            for folder in made:
                with suppress(OSError):  # the folder holds the export
                    folder.rmdir()

    def _move(self, temporary: Path) -> None:
        if self.whole:
            os.rename(temporary, self.folder)
            return
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == self.model):  # the model comes last
            os.rename(path, self.folder / path.name)
