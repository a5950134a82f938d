"""Mistakes on the tools' command lines: a line each on stderr, exit code 2, no code run, nothing left behind."""

import os
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from scripts import evaluate, explain, export, predict, report, serve
from scripts.common.command_line import run_tool

LONG = "x" * 300  # longer than a file system lets a name be
TOOLS = {tool.NAME.removesuffix(".py"): tool for tool in (evaluate, explain, export, predict, report, serve)}
# What each tool is told beside RUN.
REST = {
    "evaluate": "--device cpu --no-progress --output evaluation",
    "explain": "good.png --device cpu --output heat.png",
    "export": "--to safetensors --output exported",
    "predict": "good.png --device cpu --output rows.csv",
    "report": "--device cpu --output report.html",
    "serve": "--device cpu --port 0",
}
# What RUN is, and what the line says of it.
NO_RUNS = {
    "missing": "no such run",
    "empty": "holds no checkpoint",
    "auto": "there is no run",
    "dangling.pt": "no such checkpoint",
    LONG: "no such run",
    "a\nb": "a b: no such run",
    "text.pt": "is not a checkpoint",
    "truncated.pt": "is not a checkpoint",
    "code.pt": "it holds GLOBAL posix.system",
    "foreign.pt": "does not name its network",
}
# A tool's line after RUN, and what the line on stderr says.
LINES = (
    ("predict", "none.png", "no such file"),
    ("predict", "@none.txt", "the list cannot be read"),
    ("predict", "empty", "holds no images"),
    ("predict", "good.png --top-k 0", "--top-k"),
    ("predict", "good.png --top-k 999", "knows only 10 classes"),
    ("predict", "good.png --batch-size 0", "--batch-size"),
    ("predict", "good.png --amp wrong", "--amp"),
    ("predict", "good.png --output empty --format csv", "is no file"),
    ("predict", "good.png --output /proc/x.csv", "cannot be written"),
    ("predict", "good.png --output good.png/a.csv", "--output good.png/a.csv: cannot be written"),
    ("predict", f"good.png --output {LONG}.csv", "cannot be written (File name too long)"),
    ("explain", "none.png", "no such file"),
    ("explain", "bomb.png", "none of them can be read"),
    ("explain", "good.png --target nine", "knows no such class"),
    ("explain", f"good.png --target {'9' * 5000}", "knows no such class"),
    ("explain", "good.png --output /proc/x.png", "cannot be written"),
    ("explain", f"good.png --output {LONG}.png", "cannot be written (File name too long)"),
    ("evaluate", "--output good.png", "cannot be made"),
    ("evaluate", f"--output {LONG}", f"--output {LONG}: cannot be made"),
    ("evaluate", "--datapath animals --output evaluation", "folders that are no classes"),
    ("report", "--output empty", "must be the name of an .html file"),
    ("report", f"--output {LONG}.html", "cannot be written (File name too long)"),
    ("report", "--output report.html --heat-maps --no-predictions", "leave out one of them"),
    ("export", "--to exe --output exported", "invalid choice: 'exe'"),
    ("export", "--to safetensors --output empty/../good.png", "exists already"),
    ("export", f"--to safetensors --output {LONG}", "cannot be written"),
    ("export", "--to safetensors --output exported --quantise static", "needs --to onnx"),
    ("serve", "--port 70000", "--port"),
    ("serve", "--host a..b", "cannot listen there"),
)
# Where each tool that writes is interrupted.
BUSY = {
    "evaluate": "scripts.evaluation.files._write_all",
    "explain": "scripts.common.heat_map.heat_map",
    "export": "scripts.exporting.steps.check",
    "predict": "scripts.predict.rows_of",
    "report": "scripts.reporting.page.render",
}


class RunsCode:
    """What a pickle would run as it is loaded."""

    def __reduce__(self):
        return os.system, ("touch code_has_run",)


def png(width, height):
    """A PNG that declares such a size, with few pixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9)))]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture(scope="module")
def place(digits_run, tmp_path_factory):
    """A folder with what the command lines name."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty").mkdir()
    (folder / "dangling.pt").symlink_to("nowhere.pt")
    (folder / "text.pt").write_text("text")
    whole = Path(digits_run, "checkpoints", "last.pt").read_bytes()
    (folder / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"model": RunsCode()}, folder / "code.pt")
    torch.save({"conv.weight": torch.zeros(3, 3)}, folder / "foreign.pt")
    Image.new("L", (8, 8), 90).save(folder / "good.png")
    (folder / "bomb.png").write_bytes(png(60_000, 60_000))
    for name in ("cat", "dog"):
        (folder / "animals" / "val" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(folder / "animals" / "val" / name / "a.png")
    return folder


@pytest.fixture(autouse=True)
def nothing_left_behind(place, monkeypatch):
    """Each test begins in the folder, and leaves it as it was."""
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    yield
    assert sorted(place.rglob("*")) == before


def told(tool, run, line, monkeypatch, capsys):
    """The exit code, and the lines on stderr but for those about the progress."""
    monkeypatch.setattr("sys.argv", [tool, str(run), *line.split()])
    code = run_tool(f"{tool}.py", TOOLS[tool].main)
    lines = capsys.readouterr().err.splitlines()
    return code, [line for line in lines if not line.startswith(("reading ", "validating ", "warning: "))]


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_no_run_is_told_in_a_line(tool, monkeypatch, capsys):
    for run, text in NO_RUNS.items():
        code, lines = told(tool, run, REST[tool], monkeypatch, capsys)
        assert (code, len(lines)) == (2, 1), (run, lines)
        assert lines[0].startswith(f"{tool}.py: ") and text in lines[0], (run, lines)


@pytest.mark.parametrize("tool", TOOLS)
def test_what_cannot_be_done_is_told_in_a_line(tool, digits_run, monkeypatch, capsys):
    for line, text in [(line, text) for name, line, text in LINES if name == tool]:
        code, lines = told(tool, digits_run, f"{line} --device cpu" if tool != "export" else line, monkeypatch, capsys)
        assert (code, len(lines)) == (2, 1), (line, lines)
        assert lines[0].startswith(f"{tool}.py: ") and text in lines[0], (line, lines)


@pytest.mark.parametrize("tool", BUSY)
def test_an_interruption_leaves_nothing(tool, digits_run, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(BUSY[tool], interrupted)
    assert told(tool, digits_run, REST[tool], monkeypatch, capsys)[0] == 130


def test_links_that_lead_to_themselves_and_names_of_two_lines(digits_run, tmp_path, monkeypatch, capsys):
    for name in ("loop.png", "loop.txt"):
        (tmp_path / name).symlink_to(name)
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    (tmp_path / "two\nlines.png").write_text("text")
    monkeypatch.setattr("sys.argv", ["predict.py", digits_run, str(tmp_path), "--device", "cpu"])
    assert run_tool("predict.py", predict.main) == 1
    assert "3 images" in capsys.readouterr().err
    line = ["explain.py", digits_run, str(tmp_path), "--device", "cpu", "--output", str(tmp_path / "heat.png")]
    monkeypatch.setattr("sys.argv", line)
    assert run_tool("explain.py", explain.main) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2, "a line for each file that cannot be read"
