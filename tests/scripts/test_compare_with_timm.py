"""Exports scored by others: timm's figures are those of its own loader, and what differs is named."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import main as program
from scripts import compare_with_timm
from tests.scripts.export_zoo import shown_at
from utils.config.settings import UserError
from utils.data.images import jpeg


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small network of timm's, which has learnt a little of what is in JPEG files of many sizes."""
    place = tmp_path_factory.mktemp("place")
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 12)):
        for label, name in enumerate(("ape", "bee")):
            (place / split / name).mkdir(parents=True)
            for number in range(count):
                coarse = random.integers(0, 200, (7, 9, 3)).astype(np.uint8) + np.uint8(40 * label)
                size = tuple(int(side) for side in random.integers(80, 200, 2))
                Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(
                    place / split / name / f"{number:02d}.jpg"
                )
    line = ["--dataname", "folder", "--datapath", str(place), "--arch", "timm/test_resnet", "--image-size", "96"]
    line += ["--epochs", "1", "--batch-size", "8", "--workers", "0", "--device", "cpu", "--no-progress"]
    assert program.main([*line, "--output", str(place / "runs")]) == 0
    return str(next((place / "runs").glob("folder/*/*")))


def test_timms_figures_are_those_of_its_own_loader(run, monkeypatch, capsys):
    kept = []
    in_timm = compare_with_timm.in_timm

    def watched(folder, subject, ours):
        network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        data = timm.data.create_dataset("", root=str(subject.loaded.settings["datapath"]) + "/val")
        config = timm.data.resolve_data_config(model=network)
        loader = timm.data.create_loader(
            data,
            batch_size=5,
            is_training=False,
            use_prefetcher=False,
            num_workers=0,
            persistent_workers=False,
            device=torch.device("cpu"),
            **config,
        )
        with torch.inference_mode():
            answers = [(network(images), labels) for images, labels in loader]
        kept.extend(map(torch.cat, zip(*answers, strict=True)))
        logits, pixels = in_timm(folder, subject, ours)
        kept.append(logits)
        return logits, pixels

    monkeypatch.setattr(compare_with_timm, "in_timm", watched)
    assert compare_with_timm.main([run, "--no-progress"]) == 0
    exact, labels, logits = kept
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-5)
    said = capsys.readouterr().out
    right = {name: int(count) for name, count in re.findall(r"^(\w+).*?  +(\d+) ", said, flags=re.M)}
    assert right["timm"] == int((exact.argmax(1) == labels).sum()) and right["this"] == right["onnxruntime"]
    assert re.search(r"^onnxruntime, the same pixels +\d+ +\S+ +0 +\S+e-0[5-9] ", said, flags=re.M)
    assert "24 of 24 files give the same pixels" in said
    ours, theirs = map(float, re.search(r"lie at most (\S+) levels, timm's \S+ at most (\S+)", said).groups())
    assert 0.4 < ours < 3 and 0.4 < theirs < 3, "each is rounded"


def test_another_decoding_is_told_apart_from_the_resizing(run, monkeypatch, tmp_path):
    """Pixels that are 40 levels brighter in one decoder make neither's arithmetic wrong."""
    subject = SimpleNamespace(loaded=SimpleNamespace(preprocessing=shown_at(64)))
    path = tmp_path / "a.jpg"
    Image.fromarray(np.random.default_rng(0).integers(60, 140, (9, 12, 3)).astype(np.uint8)).resize((120, 90)).save(
        path
    )
    transform = timm.data.create_transform((3, 64, 64), mean=shown_at(64).mean, std=shown_at(64).std, crop_pct=0.875)
    theirs = transform(Image.open(path).convert("RGB"))
    before = compare_with_timm.compared(str(path), theirs, subject)
    plain = jpeg.decode_region
    monkeypatch.setattr(jpeg, "decode_region", lambda data, box: plain(data, box) + 40)
    after = compare_with_timm.compared(str(path), theirs, subject)
    assert before.decoded == 0 and after.decoded == 40
    assert max(before.ours, before.theirs, after.ours, after.theirs) < 3
    said = compare_with_timm.pixel_report([before, after])
    assert "1 of 2 files give the same pixels here and in Pillow; those of 1 differ by up to 40 levels" in said


def test_a_run_that_timm_cannot_repeat_is_one_line(digits_run):
    with pytest.raises(UserError, match="fc is a network of this repository"):
        compare_with_timm.main([digits_run])
