"""What tests of several rooms share: small class folders, command lines, mistakes, waiting, the comparison of states."""

import csv
import io
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scripts.common.command_line import run_tool
from utils.config.settings import UserError

QUIETLY = ("--device", "cpu", "--no-progress", "--picture-epochs", "off")  # pictures take as long as forty steps


def class_files(root, counts, classes="ab", ending="png", digits=1):
    """Make class folders below ``root`` and walk through their files to be: path, split, label and number in the class.

    ``counts``: files of each class by split. ``digits``: of a file's name, at least.
    """
    for split, count in counts.items():
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                yield root / split / name / f"{number:0{digits}}.{ending}", split, label, number


def image_tree(root, counts, classes="ab", size=8, ending="png"):
    """Class folders of noise below ``root``, the same each time: for each split so many images of each class."""
    generator = np.random.default_rng(0)
    for path, *_ in class_files(root, counts, classes, ending):
        Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(path)
    return root


def computes_in(traval):
    """The format that a forward pass on the CPU computes in where it may, as torch says within it."""
    with traval.autocast:
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32


def run_in(output):
    """The folder of the only run below ``output``."""
    (config,) = Path(output).rglob("config.yaml")
    return config.parent


def trained(output, *flags):
    """Train on a CPU into ``output``, without pictures unless ``flags`` ask for them; gives the run's folder."""
    from main import main

    assert main([*QUIETLY, "--output", str(output), *map(str, flags)]) == 0
    return run_in(output)


def altered(run, path, **changes):
    """Save the last checkpoint of ``run`` at ``path``, with parts replaced and what is None left out, also in dicts."""

    def changed(state, changes):
        for name, value in changes.items():
            state[name] = changed(state.get(name, {}), value) if isinstance(value, dict) else value
        return {name: value for name, value in state.items() if value is not None or name not in changes}

    torch.save(changed(torch.load(Path(run, "checkpoints/last.pt"), weights_only=True), changes), path)
    return path


def mistakes_of(function, *arguments, **named):
    """The lines of the UserError that a call raises."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **named)
    assert all(line.strip() and "\n" not in line for line in caught.value.mistakes)
    return caught.value.mistakes


def file_of(image, kind, **options):
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif_that_turns(orientation=6):
    """EXIF data for an image's file; with orientation 6, viewers turn the image by 90 degrees clockwise."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png_that_says(width, height):
    """An RGB PNG file that declares such a size, with few pixels."""
    return png_file(width, height, 8, 2, bytes(10_000))


def png_file(width, height, depth, kind, pixels):
    """A PNG file of pixels of ``depth`` bits; ``kind``: PNG's colour type."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def difference(found, expected):
    """Largest and mean absolute difference in levels of 255."""
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.uint8
    gap = (found.int() - expected.int()).abs().float()
    return gap.max().item(), gap.mean().item()


def answer(tool, line, capsys, monkeypatch):
    """The exit code of a tool's command line, and what it printed."""
    monkeypatch.setattr("sys.argv", [tool.NAME, *map(str, line)])
    return run_tool(tool.NAME, tool.main), capsys.readouterr()


def wait_for(condition, seconds=60):
    """Wait until ``condition`` gives something true, and give it; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (given := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return given


def csv_rows(path):
    """The rows of a table with a header, each a dict of texts."""
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def points_of(folder):
    """Each (tag, step) of a run's event files, as often as it is there, with its value."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [
        ((value.tag, event.step), value)
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


def equal(left, right):
    """Whether nested states hold the same, tensors to the bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and (left == right or left != left)
