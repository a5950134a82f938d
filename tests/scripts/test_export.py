"""Exports: what the libraries they are for make of them is what the network says, and nothing else is left behind."""

import csv
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization
import pytest
import safetensors
import timm
import torch
import torchvision
from PIL import Image, ImageOps
from safetensors.torch import load_file

from models import load_model
from scripts import export
from scripts.common.choice import Chosen
from scripts.common.predictions import predict_split
from scripts.exporting import checking, images, onnx_files, steps, writers
from scripts.exporting.card import card, code, preparation
from scripts.exporting.formats import FORMATS, Place
from scripts.exporting.subject import Subject
from tests.end_to_end.forked import Launched
from tests.helpers import altered, csv_rows, mistakes_of
from tests.scripts.common.test_predictions import tree_of_digits
from tests.scripts.test_export_zoo import (
    reloads_in_this_process,  # noqa: F401 - a fixture
    save_checkpoint,
    shown_at,
)
from tests.utils.data.deep_files import png, tiff
from tests.utils.data.test_readers import write_folders
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.formats.readers import read_digits
from utils.data.images.decoding import decode_crop, open_image
from utils.data.preprocessing import Preprocessing

GREY = dataclasses.replace(shown_at(96), mean=(0.4,), std=(0.2,))
ALLOWED = {"rtol": 1e-4, "atol": 1e-4}


def exported(run, name, output, *flags):
    """Output of the command."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert export.main([str(run), "--to", name, "--output", str(output), *map(str, flags)]) == 0
    return printed.getvalue()


def refused(run, name, output, *flags):
    return mistakes_of(export.main, [str(run), "--to", name, "--output", str(output), *map(str, flags)])


def printed_by_card(folder, monkeypatch):
    """What the program in a card prints."""
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.S)
    printed = io.StringIO()
    monkeypatch.chdir(folder)
    with redirect_stdout(printed):
        exec(compile(program, "card", "exec"), {})
    return printed.getvalue()


def subject_of(loaded):
    return Subject.of(loaded, raw=False, inside=False)


def check_card(folder, monkeypatch, loaded, image, most=1e-5, seen=None):
    """The program in a card gives the network's answer to an image (as which it has ``seen``), within ``most``."""
    image.save(folder / "image.jpg", format="png")
    name, _, probability = printed_by_card(folder, monkeypatch).rpartition(" ")
    with torch.inference_mode():
        probabilities = loaded.network(loaded.preprocessing(seen or image)[None]).softmax(1)[0]
    assert name == loaded.classes[probabilities.argmax()]
    assert float(probability) == pytest.approx(probabilities.max().item(), abs=most)


def digit(number=0):
    return Image.fromarray(read_digits().validation.pixels[number, 0].numpy())


def photograph(width=150, height=110, seed=0):
    """Smooth colours with some noise, as a photograph has."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((pixels + random.integers(-8, 9, pixels.shape)).clip(0, 255).astype(np.uint8))


@pytest.fixture
def fresh_process():
    """Takes ``reloads_in_this_process`` back."""


@pytest.fixture(scope="module")
def onnx_file(digits_run, tmp_path_factory):
    """Output of exporting the digits' run to ONNX, and the file."""
    path = tmp_path_factory.mktemp("onnx") / "new" / "digits.onnx"
    return exported(digits_run, "onnx", path), path


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Checkpoints of a vision transformer of timm's, a network of torchvision's, and one of ours; and photographs."""
    place = tmp_path_factory.mktemp("networks")
    save_checkpoint("timm/test_vit", dataclasses.replace(shown_at(64), interpolation="bicubic"), place / "timm.pt")
    save_checkpoint("squeezenet1_1", shown_at(64), place / "torchvision.pt")
    save_checkpoint("conv2", shown_at(32), place / "own.pt")
    (place / "photos").mkdir()
    for seed in range(4):
        photograph(seed=seed).save(place / "photos" / f"{seed}.jpg")
    return place


def test_an_onnx_file_gives_the_networks_logits_for_any_number_of_images(
    fresh_process, onnx_file, digits_run, monkeypatch
):
    printed, path = onnx_file
    assert "Checked on validation images of digits: loaded again in a fresh process with onnxruntime" in printed
    loaded = load_model(digits_run)
    shown = torch.stack([loaded.preprocessing(digit(number)) for number in range(50)])
    session = onnxruntime.InferenceSession(path)
    for count in (1, 7, 50):
        (logits,) = session.run(None, {"images": shown[:count].numpy()})
        np.testing.assert_allclose(logits, loaded.network(shown[:count]).detach(), **ALLOWED)
    (inputs,) = session.get_inputs()
    (outputs,) = session.get_outputs()
    assert inputs.shape == ["batch", 1, 8, 8] and outputs.shape == ["batch", 10] and outputs.name == "logits"
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == list(loaded.classes)
    assert json.loads(metadata["preprocessing"]) == loaded.preprocessing.state()
    assert str(Path.cwd()).encode() not in path.read_bytes(), "no path of this machine"
    check_card(path.parent, monkeypatch, loaded, digit())


def test_a_quantised_file_that_takes_bytes_says_what_it_costs_and_is_no_other_network(
    digits_run, tmp_path, monkeypatch
):
    output = tmp_path / "small"
    static = ("--quantise", "static", "--calibration-images", "128")
    printed = exported(digits_run, "onnx", output, "--with-preprocessing", *static)
    assert re.search(
        rf"^Wrote {re.escape(str(output))}/README\.md \(.* kB\), {re.escape(str(output))}/model\.onnx \(", printed, re.M
    )
    loaded = load_model(digits_run)
    report = predict_split(loaded, Chosen(device="cpu", progress=False)).report
    same, before, after, count, calibrated = re.search(
        r"same answer for (\S+) %, top-1 (\S+) % before and (\S+) % after, .* on (\d+) validation images, calibrated on (\d+) training",
        printed,
    ).groups()
    assert (before, count, calibrated) == (f"{report.top1:.2f}", "360", "128")
    pixels = read_digits().validation.pixels
    session = onnxruntime.InferenceSession(output / "model.onnx")
    (probabilities,) = session.run(None, {"images": pixels.numpy()})
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    hits = (probabilities.argmax(1) == read_digits().validation.labels.numpy()).sum()
    assert after == f"{100 * hits / 360:.2f}"
    its_own = json.loads(session.get_modelmeta().custom_metadata_map["validation"])
    assert its_own["top1"] == pytest.approx(100 * hits / 360) and its_own["count"] == 360
    logits = loaded.network(torch.stack([loaded.preprocessing(digit(number)) for number in range(360)])).detach()
    exact = logits.softmax(1).numpy()
    agree = 100 * (probabilities.argmax(1) == exact.argmax(1)).mean()
    assert same == f"{agree:.2f}" and its_own["same_answer_as_float"] == pytest.approx(agree)
    # Each of four layers rounds its inputs and the last its outputs, by half of 255 steps of their range, which is at
    # most that of the logits. A probability p moves by p (1 - p) <= 1/4 of what two logits do.
    assert np.abs(probabilities - exact).max() < 1 / 4 * 2 * 5 / 2 * (logits.max() - logits.min()) / 255
    model = onnx.load(output / "model.onnx")
    kinds = {one.data_type for one in model.graph.initializer if len(one.dims) == 2}
    assert kinds == {onnx.TensorProto.INT8} and onnx_files.largest_pair(model) == 2 * 64 * 255
    check_card(output, monkeypatch, loaded, digit(), most=1)
    assert f"top-1 {before} % before" in (output / "README.md").read_text()


def test_dynamic_quantisation_keeps_the_answers(onnx_file, digits_run, tmp_path):
    shutil.copy(onnx_file[1], tmp_path / "model.onnx")
    subject = subject_of(load_model(digits_run))
    shown = torch.stack([subject.loaded.preprocessing(digit(number)) for number in range(50)])
    before, _ = steps.quantise("dynamic", subject, tmp_path / "model.onnx", 0, Chosen())
    assert onnx_files.largest_pair(onnx.load(tmp_path / "model.onnx")) == 0, "no signed weights"
    assert before.endswith("on 360 validation images, in batches of 48")
    outputs = onnx_files.OnnxNetwork(tmp_path / "model.onnx", subject).predict(shown.numpy())
    exact = steps.expected_outputs(subject, shown.numpy())
    assert 1e-4 < np.abs(outputs - exact).max() < 0.1 * np.abs(exact).max()
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_8_bits_do_not_saturate_though_all_weights_and_inputs_are_as_large_as_can_be(digits_run, tmp_path, monkeypatch):
    """Where a processor adds pairs in 16 bits, all sums would. Weights of one size are exact in 7 bits and in 8."""
    wide = [torch.nn.Conv2d(1, 8, 3), torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.Conv2d(8, 8, 1)]
    layers = [*wide, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10)]
    network = torch.nn.Sequential(*layers).requires_grad_(False).eval()
    for layer in (*wide, layers[-1]):
        layer.weight.fill_(1)
        layer.bias.zero_()
    layers[-1].weight.mul_(torch.linspace(0.1, 1, 10)[:, None])
    subject = subject_of(dataclasses.replace(load_model(digits_run), network=network))
    shown = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    shown[::32] = 1  # in each batch that the ranges are measured in
    exact = network(shown).numpy()
    written = tmp_path / "float.onnx"
    onnx_files.write_onnx(subject, written, shown)
    for how in ("static", "dynamic"):
        path = shutil.copy(written, tmp_path / f"{how}.onnx")
        onnx_files.quantise(path, how, subject, shown)
        outputs = onnx_files.OnnxNetwork(path, subject).predict(shown.numpy())
        # Positive weights hand on errors as they hand on values; five tensors are rounded, by half of 255 steps.
        np.testing.assert_array_less(np.abs(outputs - exact), 5 / 2 / 255 * exact.max() * 1.001, err_msg=how)
    right = onnxruntime.quantization.quantize_static
    for other in ({"reduce_range": False}, {"activation_type": onnxruntime.quantization.QuantType.QInt8}):

        def saturating(*given, other=other, **flags):
            right(*given, **{**flags, **other})

        monkeypatch.setattr(onnxruntime.quantization, "quantize_static", saturating)
        with pytest.raises(checking.ExportFailure, match="may exceed 16 bits"):
            onnx_files.quantise(shutil.copy(written, tmp_path / "wrong.onnx"), "static", subject, shown)


@pytest.mark.parametrize("name", ["torch-export", "safetensors"])
def test_torchs_formats_give_the_networks_answers(name, digits_run, tmp_path, monkeypatch):
    exported(digits_run, name, tmp_path / "out", *["--with-preprocessing"] * (name == "torch-export"))
    loaded = load_model(digits_run)
    check_card(tmp_path / "out", monkeypatch, loaded, digit(3))
    file = tmp_path / "out" / FORMATS[name].file
    if name == "safetensors":
        weights = load_file(file)
        assert all(torch.equal(weights[key], value) for key, value in loaded.network.state_dict().items())
        with safetensors.safe_open(file, framework="pt") as opened:
            assert json.loads(opened.metadata()["classes"]) == list(loaded.classes)
    else:
        with zipfile.ZipFile(file) as archive:
            assert not [name for name in archive.namelist() if str(Path.cwd()).encode() in archive.read(name)]


def test_timm_loads_its_folder_strictly_and_shows_images_as_validation_does(trees, tmp_path, monkeypatch):
    printed = exported(trees / "timm.pt", "timm", tmp_path / "vit", "--images", trees / "photos")
    assert f"Checked on images of {trees / 'photos'}: loaded again in a fresh process with timm" in printed
    loaded = load_model(trees / "timm.pt")
    network = timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True).eval()
    assert network.patch_embed.img_size == (64, 64) and network.num_classes == 7
    assert network.pretrained_cfg["label_names"] == list(loaded.classes)
    config = timm.data.resolve_data_config(model=network)
    assert tuple(config["input_size"]) == (3, 64, 64) and config["interpolation"] == "bicubic"
    theirs = timm.data.create_transform(**config)(photograph())
    ours = loaded.preprocessing(photograph())
    levels = (theirs - ours).abs() * 255 * torch.tensor(loaded.preprocessing.std).view(3, 1, 1)
    assert levels.mean() < 0.3 and levels.max() < 12, "Pillow's order of passes, see utils/data/images/view.py"
    torch.testing.assert_close(network(ours[None]), loaded.network(ours[None]))
    check_card(tmp_path / "vit", monkeypatch, loaded, photograph(), most=0.02)
    grey = photograph(seed=1).convert("L")
    deep = Image.fromarray(257 * np.asarray(grey).astype(np.uint16))
    check_card(tmp_path / "vit", monkeypatch, loaded, deep, most=0.02, seen=grey)


def test_timms_card_shows_images_of_another_size_at_that_of_the_data_set_first(trees, tmp_path, monkeypatch):
    shown = dataclasses.replace(shown_at(64), crop_pct=1.0, stored_size=16)
    save_checkpoint("timm/test_vit", shown, tmp_path / "vit.pt")
    exported(tmp_path / "vit.pt", "timm", tmp_path / "vit", "--images", trees / "photos")
    check_card(tmp_path / "vit", monkeypatch, load_model(tmp_path / "vit.pt"), photograph(), most=0.02)


def test_torchvision_loads_its_state_dict_strictly(trees, tmp_path, monkeypatch):
    exported(trees / "torchvision.pt", "torchvision", tmp_path / "net.pth", "--images", trees / "photos")
    loaded = load_model(trees / "torchvision.pt")
    network = torchvision.models.squeezenet1_1(num_classes=7).eval()
    network.load_state_dict(torch.load(tmp_path / "net.pth", weights_only=True), strict=True)
    images = torch.stack([loaded.preprocessing(photograph())])
    torch.testing.assert_close(network(images), loaded.network(images))
    assert json.loads((tmp_path / "net.json").read_text())["classes"] == list(loaded.classes)
    check_card(tmp_path, monkeypatch, loaded, photograph(), most=0.02)


@pytest.mark.parametrize(
    ("arch", "shown", "name", "words"),
    [
        ("conv2", shown_at(32), "timm", "conv2 is a network of this repository"),
        ("test_resnet", shown_at(64), "timm", "3x3 stem without max-pool, which no argument of timm's describes"),
        ("test_vit", shown_at(96), "torchvision", "test_vit is a network of timm; use"),
        ("squeezenet1_1", GREY, "torchvision", "a first convolution for grey images, which torchvision cannot make"),
    ],
)
def test_what_a_library_cannot_make_is_one_line(arch, shown, name, words, tmp_path):
    save_checkpoint(arch, shown, tmp_path / "network.pt")
    (line,) = refused(tmp_path / "network.pt", name, tmp_path / "out")
    assert line.startswith(f"--to {name}: ") and words in line
    assert line.endswith("use --to onnx, torch-export or safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["network.pt"]


BARE = f"""
import runpy, sys
from pathlib import Path
root = Path({str(checking.ROOT)!r})
for name in [*sys.modules]:
    if (root / name.partition(".")[0]).is_dir() or (root / f"{{name}}.py").is_file():
        del sys.modules[name]
sys.path.insert(0, str(root))
assert not {{"models", "scripts", "utils"}} & sys.modules.keys()
runpy.run_module("scripts.exporting.reload", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("timm.pt", "timm"),
        ("torchvision.pt", "torchvision"),
        ("own.pt", "torch-export"),
        ("torchvision.pt", "safetensors"),
    ],
)
def test_each_format_of_torchs_loads_in_a_fresh_process(file, name, trees, tmp_path, monkeypatch):
    """Fresh but for the libraries: it is forked from a server that has imported them, which takes seconds."""
    (tmp_path / "bare.py").write_text(BARE)
    (tmp_path / "said").touch()

    def run(line, cwd, env, **_):
        assert line[:-1] == [sys.executable, "-m", "scripts.exporting.reload"]
        monkeypatch.chdir(cwd)
        said = str(tmp_path / "said")
        process = Launched([sys.executable, tmp_path / "bare.py", line[-1]], said, said, env)
        return subprocess.CompletedProcess(line, process.wait(300), stderr=Path(said).read_text())

    subject = subject_of(load_model(trees / file))
    shown = images.noise(subject.shape)
    path = tmp_path / FORMATS[name].file
    steps.write(name, subject, path, shown)
    monkeypatch.setattr(checking.subprocess, "run", run)
    assert steps.check(name, subject, path, shown).largest < 1e-4


def test_timm_makes_a_network_for_grey_images(tmp_path):
    save_checkpoint("timm/test_vit", GREY, tmp_path / "grey.pt")
    loaded = load_model(tmp_path / "grey.pt")
    subject = subject_of(loaded)
    (tmp_path / "out").mkdir()
    steps.write("timm", subject, tmp_path / "out" / "model.safetensors", images.noise(subject.shape))
    network = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    grey = loaded.preprocessing(photograph())[None]
    assert grey.shape == (1, 1, 96, 96)
    torch.testing.assert_close(network(grey), loaded.network(grey))


SHOWN = {
    "the middle": shown_at(64),
    "the whole shorter side": dataclasses.replace(shown_at(64), crop_pct=1.0, interpolation="bicubic"),
    "squashed": dataclasses.replace(shown_at(64), crop_mode="squash", crop_pct=0.9),
    "with a border": dataclasses.replace(shown_at(64), crop_mode="border", crop_pct=1.0),
    "not square": dataclasses.replace(shown_at((48, 80)), crop_pct=0.9),
    "not square, squashed": dataclasses.replace(shown_at((80, 48)), crop_mode="squash", crop_pct=0.9),
    "not square, with a border": dataclasses.replace(shown_at((48, 80)), crop_mode="border", crop_pct=1.0),
    "of one size, then not square": Preprocessing(
        (48, 30), (48, 30), (0.5,), (0.3,), 0.8, "center", "bilinear", stored_size=32
    ),
    "of one size": Preprocessing(32, 32, (0.5,), (0.3,), 1.0, "center", "bilinear", stored_size=32),
    "of one size, enlarged": Preprocessing(48, 48, (0.5,) * 3, (0.3,) * 3, 0.8, "center", "bilinear", stored_size=32),
}


def prepared(shown, inside, path):
    """The network's input that the card's program makes of an image."""
    names = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(preparation(shown, inside), names)
    return names["prepare"](path)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
@pytest.mark.parametrize("size", [(91, 160), (32, 32)])
def test_the_cards_preparation_is_that_of_validation_within_pillows_rounding(shown, inside, size, tmp_path):
    photograph(*size).save(tmp_path / "image.png")
    made = prepared(shown, inside, tmp_path / "image.png")
    exact = shown(photograph(*size))[None].numpy()
    assert made.shape == exact.shape and made.dtype == (np.uint8 if inside else np.float32)
    mean, std = (np.reshape(values, (1, -1, 1, 1)) for values in (shown.mean, shown.std))
    levels = 255 * (exact * std + mean)
    difference = np.abs((made if inside else 255 * (made * std + mean)) - levels)
    assert difference.mean() < 0.6 and difference.max() < 12


RAMP = np.linspace(0, 65535, 64 * 64).reshape(64, 64)


@pytest.mark.parametrize("pixel_range", [None, (0.0, 1023.0)])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.png", png(RAMP.astype(np.uint16))),
        ("deep.tif", tiff(RAMP.astype(np.uint16))),
        ("colour.png", png(np.stack([RAMP, RAMP // 90, RAMP // 9], -1).astype(np.uint16))),
        ("colour.tif", tiff(np.stack([RAMP, RAMP // 90, RAMP // 9], -1).astype(np.uint16))),
        ("eight_of_32.tif", tiff((RAMP // 257).astype(np.int32))),
        ("all_of_32.tif", tiff(RAMP.astype(np.int32))),
        ("float.tif", tiff(RAMP.astype(np.float32))),
        ("grey.pgm", b"P5 64 64 1023\n" + (RAMP // 70).astype(">u2").tobytes()),
        ("plain.png", None),
    ],
)
def test_the_cards_preparation_of_any_numbers_is_that_of_validation(tmp_path, name, content, pixel_range):
    path = tmp_path / name
    shown = dataclasses.replace(shown_at(64), crop_pct=1.0, pixel_range=pixel_range)
    if content is None:
        photograph(64, 64).save(path)
    else:
        path.write_bytes(content)
    if pixel_range is None and name in ("all_of_32.tif", "float.tif"):
        with pytest.raises(ValueError, match="no known range"):
            prepared(shown, False, path)
        return
    exact = shown(open_image(str(path), shown.colour))[None].numpy()
    np.testing.assert_allclose(prepared(shown, False, path), exact, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "channels", "levels"),
    [
        ("deep.png", png(RAMP.astype(np.uint16)), 1, "all"),
        ("deep.png", png(RAMP.astype(np.uint16)), 3, "all"),
        ("colour.png", png(np.stack([RAMP, RAMP // 90, RAMP // 9], -1).astype(np.uint16)), 3, "all"),
        ("grey.pgm", b"P5 64 64 1023\n" + (RAMP // 70).astype(">u2").tobytes(), 1, "all"),
        ("plain.png", None, 3, "all"),
        ("alpha.png", None, 4, "256"),
    ],
)
def test_the_card_of_a_network_for_arrays_reads_what_pillow_reads(tmp_path, name, content, channels, levels):
    path = str(tmp_path / name)
    shown = Preprocessing(64, 64, (0.5,) * channels, (0.3,) * channels, 1.0, "center", "bilinear", levels=levels)
    if content is None:
        image = photograph(64, 64)
        image.putalpha(image.getchannel("R")) if channels == 4 else None
        image.save(path)
    else:
        Path(path).write_bytes(content)
    pixels = decode_crop(path, shown.view(64), shown.colour)
    exact = shown.evaluation_transform.evaluation(pixels[None]).numpy()
    np.testing.assert_allclose(prepared(shown, False, path), exact, atol=1e-5)


@pytest.mark.parametrize("pixel_range", [None, (0.0, 180.0)])
@pytest.mark.parametrize("dtype", ["u1", "i8", "u2", ">u2", "bool", "f4"])
@pytest.mark.parametrize(("channels", "levels"), [(5, "all"), (5, "256"), (3, "all")])
def test_the_card_reads_an_array_of_any_numbers_as_training_does(tmp_path, channels, levels, dtype, pixel_range):
    """Whole numbers of any size from 0 to 255 are levels, too, and not those of 16 bits."""
    path = str(tmp_path / "image.npy")
    shown = Preprocessing(8, 8, (0.5,) * channels, (0.3,) * channels, 1.0, "center", "bilinear", levels=levels)
    shown = dataclasses.replace(shown, pixel_range=pixel_range)
    numbers = np.arange(8 * 8 * channels).reshape(8, 8, channels) % 256
    np.save(path, (numbers * (257 if "u2" in dtype else 1) if dtype != "bool" else numbers > 99).astype(dtype))
    if pixel_range is None and dtype == "f4":
        with pytest.raises(ValueError, match="no known range"):
            prepared(shown, False, path)
        return
    exact = shown(path)[None].numpy()
    np.testing.assert_allclose(prepared(shown, False, path), exact, atol=1e-5)


def test_the_card_states_figures_of_exactly_these_weights(digits_run):
    row = csv_rows(Path(digits_run) / "metrics.csv")[-1]
    loaded = load_model(digits_run)
    average, raw = (Subject.of(loaded, raw, inside=False) for raw in (False, True))
    assert average.figures["count"] == 360
    for name in ("top1", "loss"):
        assert average.figures[name] == pytest.approx(float(row[f"val_{name}"]), rel=1e-5)
    assert raw.figures is None and raw.weights == "the raw weights, not the run's average of them"
    settings = {**loaded.settings, "amp": "bf16", "tta": "flip"}
    text = card_of(dataclasses.replace(loaded, settings=settings))
    assert f"top-1 {float(row['val_top1']):.2f} %" in text
    assert f"in epoch {average.figures['epoch']}, in bf16, while exports compute in float32, with test-time" in text
    first = load_model(Path(digits_run) / "checkpoints/initial.pt")
    assert subject_of(first).figures is None, "it was never validated"
    cut = {**loaded.progress, "step_in_epoch": 7}  # as --max-steps leaves it: 7 steps into the next epoch
    assert subject_of(dataclasses.replace(loaded, progress=cut)).figures["epoch"] == cut["epoch"] + 1


def card_of(loaded):
    return card("onnx", subject_of(loaded), "model.onnx", "")


def test_a_file_may_be_called_what_the_cards_program_has_gaps_for(digits_run):
    subject = subject_of(load_model(digits_run))
    for name, path in (("torch-export", "METADATA_NAME.pt2"), ("onnx", "NAME.onnx")):
        assert f'("{path}"' in code(name, subject, path)


def test_figures_of_a_cut_validation_or_in_a_gpus_default_format_say_so(digits_run):
    loaded = load_model(digits_run)
    cut = dataclasses.replace(loaded, settings={**loaded.settings, "max_val_batches": 2})
    assert "over 360 images (cut: --max-val-batches 2), in epoch" in card_of(cut)
    assert "(cut: " not in card_of(loaded) and "while exports compute" not in card_of(loaded)
    scaled = dataclasses.replace(loaded, loss_scaled=True)
    assert scaled.settings["amp"] is None and ", in fp16, while exports compute in float32" in card_of(scaled)
    for one, apart in ((cut, {"max_val_batches": 2}), (scaled, {"amp": "fp16"}), (loaded, {})):
        figures = subject_of(one).metadata["validation"]
        assert {name: figures[name] for name in set(figures) - {"top1", "top5", "loss", "count", "epoch"}} == apart


def test_a_card_says_that_the_figures_of_a_best_pt_are_of_images_that_chose_it(digits_run):
    words = "; these images chose the weights, which favours the figures |"
    assert words in card_of(load_model(digits_run, best=True)) and words not in card_of(load_model(digits_run))


def test_a_card_says_how_the_network_was_trained_in_the_words_of_the_runs_plan(digits_run, tmp_path):
    loaded = load_model(digits_run)
    plan = re.findall("# plan: (Optimizer|Learning rate): (.*)", Path(digits_run, "config.yaml").read_text())
    assert len(plan) == 2 and all(f"| {title.lower()} | {text} |" in card_of(loaded) for title, text in plan)
    alone = shutil.copy(loaded.path, tmp_path / "alone.pt")
    assert "| trained with | epochs 2, global batch size 48, optimizer sgd, lr 0.1," in card_of(load_model(alone))


def test_figures_that_are_no_result_are_called_doubtful(digits_run, tmp_path):
    shutil.copytree(digits_run, tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    assert "doubtful" not in card_of(loaded)
    seen = dataclasses.replace(loaded, seen="old.pt was trained on these")
    assert "; doubtful: old.pt was trained on these |" in card_of(seen)
    table = tmp_path / "run/metrics.csv"
    rows = csv_rows(table)
    rows[-1] |= {"val_loss": "2.302585", "guessing_loss": "2.302585", "answers_nats": "0"}
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert re.search(r"validation \| top-1 .*; doubtful: val_loss 2.3026 .* nothing was learned", card_of(loaded))


def test_figures_are_of_the_weights_that_were_loaded_though_the_run_has_gone_on(digits_run, tmp_path):
    path = tmp_path / "last.pt"
    shutil.copy(Path(digits_run, "checkpoints/last.pt"), path)
    loaded = load_model(path)
    before = subject_of(loaded)
    state = torch.load(path, weights_only=True)
    state["progress"]["last_validation"][1] = 12.5
    torch.save({**state, "ema": None}, path)
    after = subject_of(loaded)
    assert (after.figures, after.weights) == (before.figures, before.weights)


def test_names_that_are_no_text_in_any_encoding_are_exported(digits_run, tmp_path):
    names = ["caf\udce9", *map(str, range(1, 10))]  # a folder named in Latin-1
    altered(digits_run, tmp_path / "named.pt", classes=names)
    exported(tmp_path / "named.pt", "safetensors", tmp_path / "out")
    with safetensors.safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == names
    assert "0. caf?" in (tmp_path / "out/README.md").read_text(encoding="utf-8")


def test_layers_that_trained_in_float32_are_exported_and_scored_like_others(digits_run, tmp_path, monkeypatch):
    class Written(torch.nn.Module):
        """In place of an ONNX file: it has none of the network's layers."""

        def __init__(self, path, subject):
            super().__init__()
            self.forward = subject.loaded.network.__call__

    altered(digits_run, tmp_path / "mixed.pt", settings={"fp32_layers": ["layers"]})
    exported(tmp_path / "mixed.pt", "torch-export", tmp_path / "out")
    assert "autocast" not in str(torch.export.load(tmp_path / "out/model.pt2").graph)
    monkeypatch.setattr(steps.onnx_files, "OnnxNetwork", Written)
    subject = subject_of(load_model(tmp_path / "mixed.pt"))
    assert steps.score(subject, Path("written.onnx"), Chosen()).report.top1 == pytest.approx(subject.figures["top1"])


def test_without_images_the_comparison_is_said_to_be_on_noise(digits_run, tmp_path):
    loaded = load_model(digits_run)
    gone = dataclasses.replace(loaded, settings={"dataname": "folder", "datapath": str(tmp_path / "gone")})
    shown, source = images.to_compare_on(subject_of(gone), None, None)
    assert source.startswith("noise, because there are no images (--datapath") and shown.shape == (32, 1, 8, 8)
    with pytest.raises(UserError, match="--quantise needs the run's images: --datapath"):
        images.refuse_missing(gone, ("val",), None)
    with pytest.raises(UserError, match="no such folder"):
        images.to_compare_on(subject_of(gone), None, str(tmp_path / "gone"))


def test_calibration_never_sees_an_image_that_is_scored(digits_run, tmp_path):
    training = read_digits().train
    validation = read_digits().validation
    for split, digits, count in (("train", training, 40), ("val", validation, 20)):
        write_folders(tmp_path / split, digits.pixels[:count, 0].numpy(), digits.labels[:count], "0123456789")
    for path in list((tmp_path / "val").rglob("*.png"))[:10]:
        (tmp_path / "train" / path.parent.name / f"also_{path.name}").symlink_to(path)
    settings = {"dataname": "folder", "datapath": str(tmp_path)}
    loaded = dataclasses.replace(load_model(digits_run), settings=settings)
    shown = images.to_calibrate_on(loaded, None, 1000)
    assert len(shown) == 40
    assert {one.numpy().tobytes() for one in shown} == {
        loaded.preprocessing(Image.fromarray(pixels[0].numpy())).numpy().tobytes() for pixels in training.pixels[:40]
    }


@pytest.mark.parametrize("table", [None, "old/labels.csv", "labels.csv"])
def test_the_runs_own_images_are_found_where_their_data_is_now(digits_run, tmp_path, table):
    tree = tree_of_digits(tmp_path / "old", {str(digit): digit for digit in range(10)}, count=8)
    settings = {"dataname": "folder", "datapath": str(tree), "val_split": 0.25, "val_split_by": "name"}
    if table:
        rows = [f"{path.relative_to(tree)},{path.parent.name}" for path in sorted(tree.rglob("*.png"))]
        (tmp_path / table).write_text("\n".join(["path,label", *rows]) + "\n")
        settings["labels"] = str(tmp_path / table)
    data = get_data(DataSettings(**settings), torch.device("cpu"))
    loaded = dataclasses.replace(load_model(digits_run), settings=settings, fingerprint=data.fingerprint)
    tree.rename(tmp_path / "new")
    assert len(images.to_calibrate_on(loaded, str(tmp_path / "new"), 100)) == len(data.train) < 80
    if not table:
        (tmp_path / "new/3/extra.png").write_bytes(next((tmp_path / "new/3").iterdir()).read_bytes())
        with pytest.raises(UserError, match="--split train: .*new holds no train/"):
            images.to_calibrate_on(loaded, str(tmp_path / "new"), 100)


def test_an_export_that_predicts_something_else_is_not_left_behind(digits_run, tmp_path, monkeypatch, capsys):
    right = steps.write

    def wrong(name, subject, path, shown):
        with torch.no_grad():
            next(subject.loaded.network.parameters()).mul_(1.5)
            right(name, subject, path, shown)
            next(subject.loaded.network.parameters()).div_(1.5)

    monkeypatch.setattr(steps, "write", wrong)
    assert export.main([digits_run, "--to", "safetensors", "--output", str(tmp_path / "a" / "b")]) == 1
    assert re.search(r"nothing was exported: the outputs of safetensors \S+ differ by up to", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_does_not_load_is_not_left_behind(digits_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "write", lambda name, subject, path, shown: path.write_bytes(b"no network"))
    assert export.main([digits_run, "--to", "onnx", "--output", str(tmp_path / "model.onnx")]) == 1
    assert " does not load it (InvalidProtobuf: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("[PytorchStreamWriter] failed")]
)
def test_a_full_disk_is_one_line(error, tmp_path):
    with pytest.raises(UserError, match="cannot be written") as raised, Place.of(str(tmp_path / "x"), "timm").writing():
        raise error
    assert len(raised.value.mistakes) == 1 and list(tmp_path.iterdir()) == []


def test_a_card_never_replaces_another_file(tmp_path):
    assert Place.of(str(tmp_path / "a.onnx"), "onnx").card == "README.md"
    (tmp_path / "README.md").write_text("mine")
    place = Place.of(str(tmp_path / "a.onnx"), "onnx")
    with place.writing() as folder:
        for name in (place.card, place.model):
            (folder / name).write_text(name)
        shutil.copymode(tmp_path / "README.md", folder / place.card)
        (folder / place.model).chmod(0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "a.onnx", "a.onnx.README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"
    (tmp_path / "a.onnx").rename(tmp_path / "b.onnx")
    with pytest.raises(UserError, match=r"its card a\.onnx\.README\.md exists already"):
        Place.of(str(tmp_path / "a.onnx"), "onnx")
    (tmp_path / "b.onnx").rename(tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").stat().st_mode == (tmp_path / "README.md").stat().st_mode, "others may read it, too"


def test_a_full_disk_meets_no_writer_of_torchs_own_which_aborts(monkeypatch):
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    monkeypatch.setattr(writers, "exported", lambda *_: program)
    with pytest.raises(OSError, match="No space left on device"):
        writers.write_torch_export(SimpleNamespace(metadata={}), Path("/dev/full"), torch.zeros(1))
