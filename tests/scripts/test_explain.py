"""The picture of heat maps: what it shows and says, which class it explains, and mistakes."""

import dataclasses
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from models import load_model
from scripts import explain
from scripts.common.heat_map import heat_map
from scripts.common.predictions import Predictor
from scripts.common.trained import NOT_FINITE
from tests.helpers import altered
from utils.config.settings import UserError


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Five digits as files, and one that is none."""
    folder = tmp_path_factory.mktemp("images")
    for number, pixels in enumerate(load_digits().images[1500:1505]):
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(folder / f"{number}.png")
    (folder / "bad.png").write_text("no image")
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """Arguments of ``draw`` that the picture is made of."""
    kept = []
    draw = explain.draw
    monkeypatch.setattr(
        explain, "draw", lambda path, title, explained: (kept.append(explained), draw(path, title, explained))
    )
    return kept


def test_each_image_has_its_prediction_and_the_map_of_it(digits_run, images, tmp_path, drawn, capsys):
    output = tmp_path / "maps.png"
    assert explain.main([digits_run, str(images), "--output", str(output), "--amp", "off"]) == 1, "one is no image"
    said, warned = capsys.readouterr()
    assert "bad.png: is not an image" in warned and said.splitlines()[-1] == f"Picture: {output}"
    title = "fc: gradient with respect to the pixels, for or against the class (the network has no feature map)"
    assert said.splitlines()[-2] == title
    load = load_model(digits_run)
    network = load.network
    classes = load.classes
    preprocessing = load.preprocessing
    (explained,) = drawn
    assert [one.name for one in explained] == [f"{number}.png" for number in range(5)]
    for one, line in zip(explained, said.splitlines(), strict=False):
        file = Image.open(images / one.name)
        pixels = preprocessing(file)[None]
        shares = network(pixels).softmax(1)[0]
        label = shares.argmax().item()
        assert one.prediction == f"{classes[label]} ({100 * shares[label]:.1f} %)"
        assert line == f"{images / one.name}  {one.prediction}"
        np.testing.assert_allclose(one.heat, heat_map(load, pixels, [label])[0], atol=1e-5)
        torch.testing.assert_close(one.pixels[0], torch.from_numpy(np.asarray(file) / 255).float(), atol=1e-6, rtol=0)
    with Image.open(output) as file:
        assert file.format == "PNG" and min(file.size) > 300
    assert list(tmp_path.iterdir()) == [output], "no temporary file is left"


def test_files_of_other_formats_are_left_out_and_counted(digits_run, images, tmp_path, drawn, capsys):
    folder = shutil.copytree(images, tmp_path / "photographs")
    (folder / "telephone.heic").touch()
    explain.main([digits_run, str(folder), "--output", str(tmp_path / "a.png")])
    assert "files are left out: 1 .heic; convert them" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["a.png", "*.png", ".", "@list"])
def test_no_image_is_replaced_by_its_own_picture(digits_run, images, tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    image = shutil.copy(images / "0.png", "a.png")
    (tmp_path / "list").write_text("a.png\n")
    with pytest.raises(UserError, match=r"^--output \./a\.png: is one of the images to explain; choose another name$"):
        explain.main([digits_run, named, "--output", "./a.png"])
    assert (tmp_path / image).read_bytes() == (images / "0.png").read_bytes()


def test_names_that_are_no_text_in_any_encoding_are_shown_as_far_as_they_are(digits_run, images, tmp_path, capsys):
    run = tmp_path / "named.pt"
    image = tmp_path / os.fsdecode(b"caf\xe9.png")
    altered(digits_run, run, classes=[f"caf\udce9 {number}" for number in range(10)])
    shutil.copy(images / "0.png", image)
    assert explain.main([str(run), str(image), "--output", str(tmp_path / "maps.png"), "--amp", "off"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/caf?.png  caf? ")


def test_a_class_in_letters_that_the_font_lacks_raises_no_warning(digits_run, images, tmp_path, recwarn):
    altered(digits_run, tmp_path / "cat.pt", classes=[f"\u732b {number}" for number in range(10)])
    line = [str(tmp_path / "cat.pt"), str(images / "0.png"), "--output", str(tmp_path / "maps.png"), "--amp", "off"]
    assert explain.main(line) == 0
    assert [str(one.message) for one in recwarn if "Glyph" in str(one.message)] == []


def test_an_output_that_overflows_is_said_and_has_no_map(digits_run, images, tmp_path, drawn, capsys, monkeypatch):
    plain = Predictor.logits

    def overflowing(predictor, pixels):
        logits = plain(predictor, pixels).clone()  # outside of inference mode
        logits[0, 3] = float("inf")
        return logits

    monkeypatch.setattr(Predictor, "logits", overflowing)
    line = [digits_run, "--output", str(tmp_path / "x.png"), "--amp", "off"]
    assert explain.main([*line, *(str(images / f"{number}.png") for number in range(3))]) == 1
    said, warned = capsys.readouterr()
    assert f"warning: {images}/0.png: {NOT_FINITE}" in warned and "nan" not in said and "0.png" not in said
    ((one, two),) = drawn
    load = load_model(digits_run)
    pixels = load.preprocessing(Image.open(images / "1.png"))[None]
    shares = load.network(pixels).softmax(1)[0]
    assert one.prediction == f"{load.classes[shares.argmax()]} ({100 * shares.max():.1f} %)"
    np.testing.assert_allclose(one.heat, heat_map(load, pixels, [shares.argmax()])[0], atol=1e-5)
    assert [one.name, two.name] == ["1.png", "2.png"]
    (tmp_path / "x.png").unlink()
    with pytest.raises(UserError, match="none of them can be read and explained"):
        explain.main([*line, str(images / "0.png")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["3", "class 3"])
def test_a_target_is_explained_whatever_is_predicted(target, digits_run, images, tmp_path, drawn, capsys, monkeypatch):
    if target == "class 3":  # a name, which goes before a number
        opened = explain.open_run
        names = tuple(f"class {number}" for number in range(10))
        monkeypatch.setattr(
            explain, "open_run", lambda *args, **of: dataclasses.replace(opened(*args, **of), classes=names)
        )
    line = [digits_run, str(images / "0.png"), "--target", target, "--output", str(tmp_path / "x.png")]
    assert explain.main(line) == 0
    load = load_model(digits_run)
    pixels = load.preprocessing(Image.open(images / "0.png"))[None]
    share = 100 * load.network(pixels).softmax(1)[0, 3]
    ((one,),) = drawn
    assert one.target == f"map of {target} ({share:.1f} %)" and f", {one.target}\n" in capsys.readouterr().out
    np.testing.assert_allclose(one.heat, heat_map(load, pixels, [3])[0], atol=1e-5)


def test_only_the_first_images_fit_into_a_picture(digits_run, images, tmp_path, drawn, capsys, monkeypatch):
    monkeypatch.setattr(explain, "MOST_IMAGES", 2)
    files = [str(images / f"{number}.png") for number in range(3)]
    assert explain.main([digits_run, *files, "--output", str(tmp_path / "x.png")]) == 0
    assert [one.name for one in drawn[0]] == ["0.png", "1.png"] and "the first 2 images" in capsys.readouterr().err
