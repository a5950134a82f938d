"""Each tool opens the weights that its flags choose."""

import contextlib
import importlib
import socket

import pytest
from PIL import Image

from utils.config.settings import UserError

TOOLS = {
    "evaluate": (),
    "explain": ("IMAGE", "--output", "OUT.png"),
    "export": ("--to", "safetensors", "--output", "OUT"),
    "features": (),
    "predict": ("IMAGE",),
    "reporting.assemble": ("--output", "OUT.html"),
    "serve": ("--port", "PORT"),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("flags", "raw", "best"), [((), False, False), (("--raw",), True, False), (("--best",), False, True)]
)
def test_raw_and_best_reach_what_opens_the_run(tool, flags, raw, best, digits_run, tmp_path, monkeypatch):
    asked = []

    def opened(run, raw=False, device="auto", *, best=None, **_):
        asked.append((run, raw, bool(best)))
        raise UserError("opened")

    monkeypatch.setattr(importlib.import_module(f"scripts.{tool}"), "open_run", opened)
    command = importlib.import_module("scripts.report" if tool == "reporting.assemble" else f"scripts.{tool}")
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        places = {"PORT": free.getsockname()[1]}
    places |= {
        "IMAGE": tmp_path / "image.png",
        "OUT": tmp_path / "out",
        **{f"OUT.{kind}": tmp_path / f"out.{kind}" for kind in ("png", "html")},
    }
    more = [str(places.get(word, word)) for word in TOOLS[tool]]
    with contextlib.suppress(UserError):  # a report goes on without predictions
        command.main([digits_run, *more, *flags])
    assert asked == [(digits_run, raw, best)]
