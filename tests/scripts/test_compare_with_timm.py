"""An exported network as others run it: in onnxruntime, and in timm with timm's own loader and transforms."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from scripts.common.choice import Chosen
from scripts.common.predictions import predict_split
from scripts.common.trained import open_run
from scripts.exporting import images, onnx_files, steps
from scripts.exporting.subject import Subject
from tests.helpers import class_files, trained
from utils.data.images.decoding import decode_box, to_tensor

pytestmark = pytest.mark.thorough
SIZES = (80, 200)  # pixels of a side: enlarged and reduced to the network's 96


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small network of timm's, which has learnt a little of what is in JPEG files of many sizes."""
    place = tmp_path_factory.mktemp("place")
    random = np.random.default_rng(0)
    for path, _, label, _ in class_files(place, {"train": 8, "val": 12}, ("ape", "bee"), "jpg", digits=2):
        coarse = random.integers(0, 200, (7, 9, 3)).astype(np.uint8) + np.uint8(40 * label)
        size = tuple(int(side) for side in random.integers(*SIZES, 2))
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path)
    flags = "--dataname folder --arch timm/test_resnet --image-size 96 --epochs 1 --batch-size 8 --workers 0".split()
    return str(trained(place / "runs", *flags, "--datapath", place))


@pytest.fixture(scope="module")
def subject(run):
    return Subject.of(open_run(run, raw=False, device="cpu", for_autocast=False), raw=False, inside=False)


@pytest.fixture(scope="module")
def ours(subject):
    return predict_split(subject.loaded, Chosen(device="cpu", progress=False))


def batches_of_timm(folder, data):
    """The validation images as timm's ``validate.py`` loads them for the network exported to ``folder``."""
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    loader = timm.data.create_loader(
        timm.data.create_dataset("", root=str(data)),
        batch_size=5,
        is_training=False,
        use_prefetcher=False,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
        **timm.data.resolve_data_config(model=network),
    )
    with torch.inference_mode():
        answers = [(network(images), images, labels) for images, labels in loader]
    return map(torch.cat, zip(*answers, strict=True))


def test_timms_own_loader_gives_the_same_pixels_to_a_level_and_the_same_answers(subject, ours, tmp_path):
    steps.write("timm", subject, tmp_path / "model.safetensors", images.noise(subject.shape))
    theirs, pixels, labels = batches_of_timm(tmp_path, Path(ours.ids[0]).parents[1])
    assert labels.tolist() == ours.labels.tolist()

    shown = subject.loaded.preprocessing
    view = shown.view(shown.val_image_size)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (shown.mean, shown.std))
    levels = (255 * (pixels * std + mean)).round()
    for path, level in zip(ours.ids, levels, strict=True):
        with Image.open(path) as image:
            decoded = to_tensor(image.convert("RGB"))
        box, place = decode_box(path, view, shown.colour)
        left, top, right, bottom = view.place(*reversed(decoded.shape[1:])).box
        assert torch.equal(box, decoded[:, top:bottom, left:right]), "Pillow decodes the same bits"
        # Each resizes in two directions, and rounds to half a level after each; the second's weights sum to 1 in
        # magnitude, or a little more with bicubic lobes: 1.5 levels from the exact image, so 3 from each other.
        assert (view.show(box, place) - level).abs().max() <= 3

    apart = (theirs - ours.logits).abs().amax()
    top = ours.logits.topk(2).values
    sure = top[:, 0] - top[:, 1] > 2 * apart
    assert sure.sum() > len(ours) / 2
    assert torch.equal(theirs.argmax(1)[sure], ours.logits.argmax(1)[sure])


def test_onnxruntime_gives_the_same_logits_for_the_same_pixels(subject, ours, tmp_path):
    steps.write("onnx", subject, tmp_path / "model.onnx", images.noise(subject.shape))
    network = onnx_files.OnnxNetwork(tmp_path / "model.onnx", subject)
    loaded = dataclasses.replace(subject.loaded, network=network)
    onnx = predict_split(loaded, Chosen(device="cpu", progress=False))
    # float32 with sums in another order: a few thousand additions a unit, 2^-24 each, which add up like a random walk
    torch.testing.assert_close(onnx.logits, ours.logits, rtol=1e-4, atol=1e-5)
