"""Predictions of files: the figures of validation, a line for each file whatever it holds, and nothing half-written."""

import json
import os
import signal
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import predict
from scripts.common.choice import Chosen
from scripts.common.image_stream import ImageBatch
from scripts.common.predictions import predict_split
from scripts.common.trained import NOT_FINITE, of_each_class, open_run
from scripts.exporting.card import card
from scripts.exporting.subject import Subject
from scripts.predict import rows_of
from tests.helpers import altered, answer, class_files, csv_rows, trained
from utils.config.settings import UserError
from utils.data.images import decoding
from utils.record.reading import OneLabel

CLASSES = ("ape, great", "bee")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Class folders of JPEG and PNG files of many sizes."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for path, _, label, number in class_files(root, {"train": 8, "val": 12}, CLASSES, digits=2):
        pixels = random.integers(0, 200, (*random.integers(24, 90, 2), 3)).astype(np.uint8) + 55 * label
        Image.fromarray(pixels.astype(np.uint8)).save(path.with_suffix((".jpg", ".png")[number % 2]))
    return root


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run on ``data`` whose weights have moved, so that its answers differ."""
    flags = (
        "--dataname folder --arch conv2 --image-size 16 --workers 0 --epochs 1 --batch-size 8 --ema-decay 0.5".split()
    )
    return str(trained(tmp_path_factory.mktemp("runs"), *flags, "--datapath", data))


def predicted(*line, code=0):
    assert predict.main(["--device", "cpu", "--workers", "0", *map(str, line)]) == code


@pytest.mark.parametrize("flags", [(), ("--tta", "flip-shift"), ("--batch-size", "5", "--workers", "2")])
def test_probabilities_are_those_of_validation(run, data, tmp_path, flags):
    predicted(run, data / "val", "--output", tmp_path / "all.csv", "--top-k", "2", *flags)
    rows = {row["path"]: row for row in csv_rows(tmp_path / "all.csv")}
    chosen = Chosen(device="cpu", workers="0", progress=False, tta=flags[1] if flags[:1] == ("--tta",) else None)
    theirs = predict_split(open_run(run, device="cpu"), chosen)
    assert len(rows) == len(theirs) == 24
    order = theirs.logits.sort(1, descending=True).indices
    for path, logits, places in zip(theirs.ids, theirs.logits, order, strict=True):
        row = rows[path]
        assert [row["class"], row["class_2"]] == [CLASSES[place] for place in places]
        shares = torch.tensor([float(row["probability"]), float(row["probability_2"])])
        torch.testing.assert_close(shares, logits.softmax(0)[places], rtol=0, atol=1e-6)
    assert len({row["probability"] for row in rows.values()}) > 12, "the network tells the images apart"


def test_of_a_network_whose_loss_judged_each_class_alone_it_is_said_that_probabilities_are_shared(data, run, tmp_path):
    altered(run, tmp_path / "bce.pt", settings={"loss": "bce"})
    said = []
    with mock.patch("scripts.common.trained.say", said.append):
        of_bce, other = (open_run(path, device="cpu") for path in (str(tmp_path / "bce.pt"), run))
    assert [line for line in said if "probabilities are a softmax over all classes" in line] == said[:1]
    cards = [card("onnx", Subject.of(loaded, False, False), "a.onnx", "") for loaded in (of_bce, other)]
    assert f"The network {of_each_class(of_bce)}." in cards[0] and "bce" not in cards[1]


def test_json_lines_say_what_the_csv_says_and_stdout_what_the_file_says(run, data, tmp_path, capsys):
    line = (run, data / "val" / "bee", "--top-k", "2")
    predicted(*line, "--output", tmp_path / "a.csv")
    predicted(*line, "--output", tmp_path / "a.jsonl")
    capsys.readouterr()
    predicted(*line)
    assert capsys.readouterr().out == (tmp_path / "a.csv").read_text()
    for row, text in zip(csv_rows(tmp_path / "a.csv"), (tmp_path / "a.jsonl").read_text().splitlines(), strict=True):
        one = json.loads(text)
        assert (one["path"], one["class"], one["error"]) == (row["path"], row["class"], None)
        assert one["probability"] == float(row["probability"]) and one["top"][1]["class"] == row["class_2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.jsonl"]


def test_images_that_cannot_be_read_are_rows_and_make_the_exit_code_1(digits_run, tmp_path, capsys):
    images = tmp_path / "images"
    images.mkdir()
    Image.new("L", (8, 8), 90).save(images / "good.png")
    (images / "bad.png").write_bytes(b"text")
    (images / 'z\udcff, "odd"\n.png').write_bytes(b"")
    (images / "\r.png").write_bytes(b"")
    np.save(images / "empty.npy", np.zeros((0, 5), np.uint8))
    os.mkfifo(images / "pipe.png")
    (images / "nameless").write_bytes(b"")
    for ending in ("csv", "jsonl"):
        predicted(digits_run, images, tmp_path / "images" / "good.png", "--output", tmp_path / f"a.{ending}", code=1)
    rows = csv_rows(tmp_path / "a.csv")
    names = ["\r.png", "bad.png", "empty.npy", "good.png", "pipe.png", 'z\udcff, "odd"\n.png', "good.png"]
    assert [os.path.basename(row["path"]) for row in rows] == names
    assert [bool(row["class"]) for row in rows] == [name == "good.png" for name in names]
    assert [bool(row["error"]) for row in rows] == [name != "good.png" for name in names]
    assert "shape (0, 5)" in rows[2]["error"] and rows[4]["error"] == "is no file"
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [os.path.basename(line["path"]) for line in lines] == names and lines[0]["probability"] is None
    err = capsys.readouterr().err
    assert "7 images" in err and "files are left out: 1 without an ending" in err


def giving(logits, classes):
    """A predictor whose network gives these logits (n, classes), whatever it sees."""
    loaded = SimpleNamespace(classes=classes, reading=OneLabel())
    return SimpleNamespace(loaded=loaded, logits=lambda images: logits, distances=lambda images: None)


@pytest.mark.parametrize("image", ["own.csv", "@own.csv"])
def test_an_image_or_list_to_read_is_not_replaced_by_the_predictions(image, digits_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text("kept")
    with pytest.raises(UserError, match=r"--output \./own\.csv: is one of the images, or lists of them, to read"):
        predicted(digits_run, image, "--output", "./own.csv")
    assert (tmp_path / "own.csv").read_text() == "kept"


def test_a_name_that_no_file_can_have_is_refused_beside_an_output_that_exists(digits_run, tmp_path):
    (tmp_path / "old.csv").write_text("kept")
    with pytest.raises(UserError, match="NUL"):
        predicted(digits_run, "a\0b", "--output", tmp_path / "old.csv")


def test_an_output_that_is_not_finite_is_an_error_and_no_probability():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    batch = ImageBatch(("a", "b", "c"), torch.zeros(3, 1, 1, 1), (None, None, None))
    good, *bad = rows_of(batch, giving(logits, CLASSES), 2, None)
    assert [name for name, _ in good.top] == ["bee", "ape, great"] and good.error is None
    assert [(row.top, row.error) for row in bad] == [([], NOT_FINITE)] * 2


@pytest.mark.parametrize("count", [1, 5])
def test_of_equal_outputs_the_first_class_is_the_prediction_as_in_validation(count):
    logits = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    names = [str(number) for number in range(1000)]
    batch = ImageBatch(("a",) * 300, torch.zeros(300, 1, 1, 1), (None,) * 300)
    largest = [row.index(max(row)) for row in logits.tolist()]
    found = [row.top[0][0] for row in rows_of(batch, giving(logits, names), count, None)]
    assert found == [names[place] for place in largest]


def test_sigterm_leaves_what_was_there_and_is_no_damaged_image(digits_run, tmp_path, monkeypatch, capsys):
    Image.new("L", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "old.csv").write_text("old")
    line = [digits_run, f"{tmp_path}/good.png", "--output", f"{tmp_path}/old.csv", "--device", "cpu", "--workers", "0"]
    # It comes while an image is decoded, where any Exception stands for damage.
    monkeypatch.setattr(decoding, "in_colour", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    code, said = answer(predict, line, capsys, monkeypatch)
    assert code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    assert said.err.splitlines()[-1] == "predict.py: ended by SIGTERM"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.png", "old.csv"]
    assert (tmp_path / "old.csv").read_text() == "old"
