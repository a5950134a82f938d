"""Whole runs on a GPU: they learn in each number format, resume to the same bits, compile, and read JPEG files."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.end_to_end.forked import ROOT
from tests.end_to_end.processes import FINAL_LINE, differences
from tests.helpers import class_files

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def train(*flags, code=0):
    """A run in a process of its own; the match of its final line, with code 0."""
    line = [sys.executable, ROOT / "main.py", "--device", DEVICE, "--no-progress", *map(str, flags)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    found = FINAL_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found, done.stdout
    return found


@pytest.mark.parametrize("amp", ["off", "fp16", "bf16"])
def test_the_digits_are_learned_in_each_format(amp, tmp_path):
    found = train("--amp", amp, "--epochs", 6, "--output", tmp_path)
    assert float(found["top1"]) > 95 and found["count"] == "360"
    again = ["--evaluate", "--amp", amp, "--resume", f"{found['run']}/checkpoints/final.pt"]
    assert train(*again)["top1"] == found["top1"]
    on_cpu = [*again, "--device", "cpu", "--amp", "off"]
    assert float(train(*on_cpu)["top1"]) == pytest.approx(float(found["top1"]), abs=1.2)  # 4 of 360 images


def test_a_deterministic_run_that_was_cut_ends_with_the_same_bits(tmp_path):
    flags = ("--deterministic", "--amp", "fp16", "--arch", "resnet18", "--ema-decay", 0.9, "--epochs", 2, "--seed", 3)
    whole = train(*flags, "--output", tmp_path / "whole")
    cut = train(*flags, "--output", tmp_path / "cut", "--max-steps", 31)
    resumed = train(*flags, "--output", tmp_path / "cut", "--resume", "auto")
    assert cut["run"] == resumed["run"] != whole["run"]
    assert differences(whole["run"], resumed["run"]) == []


@pytest.mark.parametrize(
    "flags",
    [
        "--amp fp16 --ema-decay 0.9",
        "--optimizer adamw --amp bf16",
        "--optimizer muon",
        "--optimizer muon-sgd --amp fp16",
        "--amp fp16 --freeze layer1.* --freeze-epoch 1",
    ],
)
def test_steps_as_graphs_end_with_the_bits_of_steps_that_are_launched_as_they_are(flags, tmp_path):
    """A rate of 2^-6 is the same number on the device and on the host."""
    same = ("--deterministic", "--arch", "resnet18", "--epochs", 2, "--lr", 2**-6, "--lr-policy", "constant")
    runs = []
    for graph in ("off", "auto"):
        found = train(*same, *flags.split(), "--cuda-graph", graph, "--output", tmp_path / graph)
        runs.append(found["run"])
        log = (Path(found["run"]) / "log.txt").read_text()
        assert "one operation at a time" not in log
    assert differences(*runs) == []


READING = """
from torch import nn
from utils.plugin import network


class Reading(nn.Sequential):
    def forward(self, images):
        assert bool(images.isfinite().all())  # the host reads this, which ends a recording
        return super().forward(images)


@network("reading")
def reading(classes, channels, image_size):
    return Reading(nn.Flatten(), nn.Linear(channels * image_size**2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes))
"""


def test_a_step_that_cannot_be_recorded_is_launched_as_it_is_and_no_bit_changes(tmp_path):
    (tmp_path / "own.py").write_text(READING)
    same = ("--plugin", tmp_path / "own.py", "--arch", "reading", "--deterministic", "--epochs", 2, "--lr", 2**-6)
    same = (*same, "--lr-policy", "constant", "--amp", "fp16")
    off, auto = (train(*same, "--cuda-graph", graph, "--output", tmp_path / graph)["run"] for graph in ("off", "auto"))
    assert "one cannot be recorded: " in (Path(auto) / "log.txt").read_text()
    assert differences(off, auto) == []
    line = [sys.executable, ROOT / "main.py", "--device", DEVICE, *same, "--cuda-graph", "on", "--output", tmp_path]
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and "--cuda-graph on: no graph can stand for a step: " in done.stderr


@pytest.mark.parametrize("arch", ["conv2", "airbench"])
def test_a_compiled_network_and_compiled_augmentation_train(arch, tmp_path):
    flags = ("--compile", "--compile-augment", "--augment", "shift", "--epochs", 4, "--lr", 0.05, "--output", tmp_path)
    assert float(train("--arch", arch, *flags)["top1"]) > 80


def test_too_large_a_loss_scale_is_explained_and_survived(tmp_path):
    found = train("--amp", "fp16", "--init-scale", 1e12, "--max-skipped-steps", 40, "--epochs", 6, "--output", tmp_path)
    assert float(found["top1"]) > 90


@pytest.mark.parametrize("decoder", ["cpu", "gpu"])
def test_jpeg_files_are_read(decoder, tmp_path):
    photographs = load_sample_images().images
    for path, _, label, number in class_files(tmp_path / "images", {"train": 24, "val": 6}, ("china", "flower"), "jpg"):
        Image.fromarray(photographs[label]).crop((5 * number, 20, 5 * number + 400, 420)).save(path)
    flags = ("--dataname", "folder", "--datapath", tmp_path / "images", "--arch", "resnet18", "--image-size", 64)
    flags = (*flags, "--loader", "stream", "--workers", 2, "--batch-size", 8, "--lr", 0.02)
    found = train(*flags, "--decode", decoder, "--epochs", 6, "--output", tmp_path / "runs")
    assert float(found["top1"]) > 80 and found["count"] == "12"


def test_channels_last_and_the_other_format_agree(tmp_path):
    flags = ("--amp", "off", "--no-tf32", "--arch", "conv4", "--epochs", 1, "--deterministic", "--augment", "none")
    losses = [
        float(train(*flags, "--channels-last", layout, "--output", tmp_path / layout)["loss"])
        for layout in ("on", "off")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
