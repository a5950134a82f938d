"""Pretrained weights, from local files, see what their own library shows them, and what is not theirs is told."""

import dataclasses
import logging
import math
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from huggingface_hub import constants
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.models import _registry

import main
from components import build, build_to_evaluate
from models import build_model, hub
from models.prepare import known_preprocessing
from models.starting_weights import begins_anew, preprocessing_of
from tests.faults.small_run import told
from utils.checkpoint.resume import ResumePoint, find
from utils.config import arguments
from utils.config.groups.model import ModelSettings
from utils.config.image_size import sides
from utils.config.settings import UserError
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")
COLOURS = ("china", "flower")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Photographs of several shapes in two classes, below train/ and val/."""
    root = tmp_path_factory.mktemp("photographs")
    boxes = [(0, 0, 640, 427), (100, 20, 420, 420), (300, 0, 640, 300), (10, 200, 610, 400)]
    for label, pixels in zip(COLOURS, load_sample_images().images, strict=True):
        for number, box in enumerate(boxes):
            for split in ("train", "val"):
                (root / split / label).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).crop(box).save(root / split / label / f"{number}.jpg", quality=92)
    return root


def timm_weights(monkeypatch, tmp_path, name, classes=2, **changes):
    """Let ``name``'s pretrained weights be those of a network made here, in a local file; gives that network."""
    torch.manual_seed(1)
    network = timm.create_model(name, num_classes=classes).eval()
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    config = dataclasses.replace(
        timm.get_pretrained_cfg(name),
        file=str(tmp_path / "weights.pth"),
        hf_hub_id=None,
        url=None,
        num_classes=classes,
        **changes,
    )
    for known in {name, name.partition(".")[0], f"{name.partition('.')[0]}.{config.tag}"}:
        monkeypatch.setitem(_registry._model_pretrained_cfgs, known, config)
    return network, config


def torchvision_weights(monkeypatch, tmp_path, name):
    """The same for torchvision, whose weights have ImageNet's classes; gives its network, with its own layers."""
    torch.manual_seed(1)
    extra = {"init_weights": True, "aux_logits": True, "transform_input": True} if name == "googlenet" else {}
    network = torchvision.models.get_model(name, weights=None, **extra).eval()
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url",
        lambda *_, **__: torch.load(tmp_path / "weights.pth", weights_only=True),
    )
    return network


def built(tree, *flags):
    """Parts that main.py makes of these flags, and the images and logits of its first validation batch."""
    args = arguments.parse(
        ["--device", "cpu", "--dataname", "folder", "--datapath", str(tree), "--workers", "0", *map(str, flags)]
    )
    with Distributed(RankInfo(), args.run) as distributed:
        run = Run(args, distributed, resume_point=find(args, tree, print))
        parts = (build_to_evaluate if args.run.evaluate else build)(run)
    batch = next(parts.validation_loader.batches())
    return parts, batch.images, answers(parts.model.eval(), batch.images)


def answers(network, images):
    with torch.no_grad():
        return network(images)


def shown_by(transform, parts):
    return torch.stack([transform(Image.open(path).convert("RGB")) for path in parts.data.validation.paths])


def check_pixels(images, theirs, std):
    """Assert that pixels are within two levels of ``theirs``, and few apart at all."""
    levels = (images - theirs).abs() * 255 * torch.tensor(std).view(1, -1, 1, 1)
    assert images.shape == theirs.shape and levels.max() < 2.01 and levels.mean() < 0.08


def check_logits(logits, expected, most=0.005):
    assert (logits - expected).norm() < most * expected.norm()


@pytest.fixture
def listener(monkeypatch):
    """A port that accepts connections."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_host_is_reachable_or_it_is_said_why_not_in_seconds(listener, monkeypatch):
    place = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert hub.unreachable(place) == hub.unreachable("") == ""
    listener.close()
    assert hub.unreachable(place) == "127.0.0.1 cannot be reached: Connection refused"
    monkeypatch.setattr(hub, "REACH_SECONDS", 0.1)

    def dropped(*_):
        time.sleep(1.5)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", dropped)
    began = time.monotonic()
    assert hub.unreachable(place) == "127.0.0.1 cannot be reached: no answer within 0.1 s"
    assert time.monotonic() - began < 1.4
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert hub.unreachable(place) == "", "the proxy connects for us"


def test_limits_hold_only_where_there_is_no_connection(listener):
    place = f"http://127.0.0.1:{listener.getsockname()[1]}"
    before = constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()
    with hub.reaching(place):
        assert (constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()) == before, "a slow connection keeps all its time"
    with pytest.raises(OSError, match="^as it was$"), hub.reaching(place):
        raise OSError("as it was")
    listener.close()
    with pytest.raises(OSError, match="^127.0.0.1 cannot be reached: "), hub.reaching(place):
        assert constants.HF_HUB_OFFLINE and socket.getdefaulttimeout() <= 1
        raise OSError("what the library says")
    assert (constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()) == before


def test_without_network_weights_in_the_hubs_cache_are_used_and_others_are_one_line(listener, tmp_path, monkeypatch):
    """The library's warning of each attempt, ten of them, is not shown; outside of building it is."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("huggingface_hub")
    logger.setLevel(logging.WARNING)  # the library's default
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    listener.close()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    settings = ModelSettings(arch="test_resnet", pretrained=True)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"could not be fetched \(127.0.0.1 cannot be reached: .*\); fetch model.safe"):
        build_model(settings, classes=7, channels=3, image_size=160)
    assert time.monotonic() - began < 5, "huggingface_hub alone tries for a minute"
    assert heard == []
    logger.warning("an attempt has failed")
    assert heard == ["an attempt has failed"]
    config = timm.get_pretrained_cfg("test_resnet")
    folder = tmp_path / f"models--{config.hf_hub_id.rstrip('/').replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(40 * "0")
    (folder / "snapshots" / (40 * "0")).mkdir(parents=True)
    network = timm.create_model("test_resnet")
    safetensors.torch.save_file(network.state_dict(), folder / "snapshots" / (40 * "0") / "model.safetensors")
    built = build_model(settings, classes=network.num_classes, channels=3, image_size=160)
    assert torch.equal(built.conv1[0].weight, network.conv1[0].weight)


@pytest.mark.parametrize(
    ("name", "loader"),
    [("test_vit", "resident"), ("test_resnet", "stream"), ("test_mambaout", "stream"), ("test_convnext", "resident")],
)
def test_timms_weights_are_evaluated_as_timm_evaluates_them(tree, tmp_path, monkeypatch, name, loader):
    changes = {"test_mambaout": {"test_crop_pct": 0.9}, "test_convnext": {"crop_pct": 1.15}}.get(name, {})
    network, config = timm_weights(monkeypatch, tmp_path, name, **changes)
    flags = ("--loader", loader, *(["--cache-dir", tmp_path / "cache"] if loader == "resident" else []))
    parts, images, logits = built(tree, "--evaluate", "--pretrained", "--arch", name, *flags)
    theirs = timm.data.resolve_data_config(pretrained_cfg=config.to_dict(), use_test_size=True)
    transform = timm.data.create_transform(**theirs, is_training=False)
    shown = shown_by(transform, parts)
    check_pixels(images, shown, theirs["std"])
    check_logits(logits, answers(network, shown))
    assert f"timm's {name}" in parts.data.preprocessing_line


@pytest.mark.parametrize(("name", "begin"), [("test_vit", ()), ("test_mambaout", ("--evaluate",))])
def test_timms_weights_in_a_file_are_shown_what_pretrained_shows_them(tree, tmp_path, monkeypatch, name, begin):
    timm_weights(monkeypatch, tmp_path, name)
    path = tmp_path / "weights.pth"
    flags = (*begin, "--arch", name)
    expected, images, logits = built(tree, *flags, "--pretrained")
    parts, found, answered = built(tree, *flags, "--weights", path)
    assert parts.data.preprocessing == expected.data.preprocessing
    assert torch.equal(found, images) and torch.equal(answered, logits)
    assert f"(timm's {name}" in parts.data.preprocessing_line
    assert f", assumed for {path})" in parts.data.preprocessing_line
    parts, _, _ = built(tree, *flags, "--weights", path, "--crop-pct", 0.5, "--mean", 0)
    assert (parts.data.preprocessing.crop_pct, parts.data.preprocessing.mean) == (0.5, (0.0,) * 3)


@pytest.mark.parametrize(
    "line, source, mean",
    [
        ("--dataname folder --arch torchvision/googlenet", "torchvision's GoogLeNet_Weights.IMAGENET1K_V1", 0.5),
        ("--dataname folder --arch test_vit4", None, None),
        ("--dataname folder --arch fc", None, None),
        ("--dataname cifar10 --arch test_vit --new-head", "timm's test_vit.r160_in1k", 0.5),
        ("--dataname cifar10 --arch test_vit", None, None),
    ],
)
def test_what_is_assumed_of_weights_in_a_file_of_another_program(line, source, mean):
    args = arguments.parse([*line.split(), "--datapath", "d", "--weights", "f.pth"])
    known = known_preprocessing(args, None, ResumePoint(Path("f.pth"), {"fc.weight": torch.zeros(2, 2)}, ""))
    if source is None:
        assert known is None
    else:
        assert known.source == f"{source}, assumed for f.pth" and known.preprocessing.mean[0] == mean
    ours = ResumePoint(Path("f.pt"), {"format": 3, "model": {}, "preprocessing": {"mean": [0.3]}}, "")
    assert known_preprocessing(args, None, ours) is None


@pytest.mark.parametrize(
    "name", ["mobilenet_v3_small", "googlenet", pytest.param("regnet_y_400mf", marks=pytest.mark.thorough)]
)
def test_torchvisions_weights_are_evaluated_as_torchvision_evaluates_them(tree, tmp_path, monkeypatch, name):
    network = torchvision_weights(monkeypatch, tmp_path, name)
    monkeypatch.setattr("models.starting_weights.classes_of", lambda arch: 2)  # its last layer is put in below
    flags = ("--evaluate", "--pretrained", "--arch", f"torchvision/{name}", "--val-batch-size", 4)
    parts, images, _ = built(tree, *flags)
    transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    theirs = shown_by(transform, parts)[: len(images)]
    features = []
    ours = []
    for model, seen in ((network, features), (parts.model, ours)):
        last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
        last.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
    answers(network, theirs)
    answers(parts.model, images)
    check_logits(ours[0], features[0])
    if name != "googlenet":  # its first layer is another normalisation, which ours does at once
        check_pixels(images, theirs, transform.std)


def test_a_last_layer_for_the_same_classes_keeps_torchvisions_weights(tmp_path, monkeypatch):
    network = torchvision_weights(monkeypatch, tmp_path, "mobilenet_v3_small")
    settings = ModelSettings(arch="torchvision/mobilenet_v3_small", pretrained=True)
    model = build_model(settings, classes=1000, channels=3, image_size=64)
    image = torch.rand(1, 3, 64, 64)
    assert torch.equal(model.eval()(image), network(image))
    assert begins_anew(model, settings, 1000, 64) == ""


@pytest.mark.thorough
def test_what_timm_says_of_all_its_weights_is_taken_over():
    not_square = 0
    for name in timm.list_pretrained():
        config = timm.get_pretrained_cfg(name)
        for testing in (False, True):
            theirs = timm.data.resolve_data_config(pretrained_cfg=config.to_dict(), use_test_size=testing)
            made, source, *_ = preprocessing_of(f"timm/{name}", testing)
            assert sides(made.view(made.val_image_size).size) == tuple(theirs["input_size"][1:])
            assert sides(made.image_size) == tuple(config.input_size[1:])
            not_square += not isinstance(made.image_size, int)
            for part in ("crop_pct", "crop_mode", "interpolation", "mean", "std"):
                assert getattr(made, part) == theirs[part]
            assert name in source
    assert not_square < 20  # timm 1.0.27 has none


def test_what_torchvision_says_of_all_its_weights_is_taken_over():
    for name in torchvision.models.list_models(module=torchvision.models):
        theirs = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        made = preprocessing_of(f"torchvision/{name}").preprocessing
        assert [made.image_size, made.val_image_size] == theirs.crop_size * 2
        assert math.floor(made.image_size / made.crop_pct) == theirs.resize_size[0]
        assert (made.interpolation, made.crop_mode) == (theirs.interpolation.value, "center")
        own_normalisation = name in ("googlenet", "inception_v3")
        assert list(made.mean) == ([0.5] * 3 if own_normalisation else theirs.mean)
        assert list(made.std) == ([0.5] * 3 if own_normalisation else theirs.std)


@pytest.mark.parametrize("arch", ["conv2", "test_vit4"])
def test_a_network_without_weights_is_one_line(arch):
    with pytest.raises(UserError, match="--pretrained: .*no pretrained weights of"):
        preprocessing_of(arch)


def test_a_last_layer_that_nobody_has_trained_is_not_evaluated(tree, tmp_path, monkeypatch, capsys):
    timm_weights(monkeypatch, tmp_path, "test_resnet", classes=5)
    flags = ("--device", "cpu", "--dataname", "folder", "--datapath", tree, "--arch", "test_resnet", "--pretrained")
    code, lines = told(capsys, (*flags, "--evaluate"))
    assert code == 2 and len(lines) == 1
    assert "--evaluate --pretrained: the last layer (2 classes, where the weights have 5)" in lines[0]
    assert main.main([*map(str, flags), "--dry-run"]) == 0
    assert "the last layer (2 classes, where the weights have 5) begins anew" in capsys.readouterr().out


def test_a_stem_for_small_images_that_replaces_pretrained_weights_is_told(tree, tmp_path, monkeypatch, capsys):
    timm_weights(monkeypatch, tmp_path, "resnet18")
    flags = ("--device", "cpu", "--dataname", "folder", "--datapath", tree, "--arch", "resnet18", "--pretrained")
    assert main.main([*map(str, flags), "--dry-run", "--image-size", "64"]) == 0
    assert "the 3x3 first convolution for images of 64 pixels" in capsys.readouterr().out
    assert main.main([*map(str, flags), "--dry-run", "--image-size", "65"]) == 0
    assert "anew" not in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["resnet18", "resnet10t"])
def test_pretrained_weights_are_evaluated_with_the_stem_that_they_were_trained_with(arch, tree, tmp_path, monkeypatch):
    network, _ = timm_weights(monkeypatch, tmp_path, arch)
    _, images, logits = built(tree, "--arch", arch, "--pretrained", "--evaluate", "--image-size", 64)
    check_logits(logits, answers(network, images), most=1e-5)


def test_a_run_from_pretrained_weights_keeps_their_preprocessing_whatever_the_library_says_later(
    tree, workplace, monkeypatch, capsys
):
    _, config = timm_weights(monkeypatch, workplace, "test_vit")
    place = ["--device", "cpu", "--dataname", "folder", "--datapath", str(tree), "--workers", "0"]
    flags = "--arch test_vit --epochs 2 --batch-size 4 --lr 0.001 --picture-epochs off --image-size 64 --pretrained"
    assert main.main([*place, *flags.split(), "--max-steps", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    run = last.rpartition("run=")[2]
    log = (workplace / run / "log.txt").read_text()
    assert "crop share 0.95, center, bicubic, mean 0.5 0.5 0.5, std 0.5 0.5 0.5 (timm's test_vit.r160_in1k)" in log
    assert "64 pixels (as set)" in log
    held = torch.load(workplace / run / "checkpoints/last.pt", weights_only=True)["preprocessing"]
    shown = {"crop_pct": 0.95, "crop_mode": "center", "interpolation": "bicubic", "stored_size": None}
    sizes = {"channels": 3, "image_size": 64, "val_image_size": 64}
    assert held == sizes | shown | {"mean": [0.5] * 3, "std": [0.5] * 3}

    other = dataclasses.replace(config, mean=(0.1,) * 3, crop_pct=0.5, interpolation="bilinear", file="gone")
    for known in ("test_vit", "test_vit.r160_in1k"):
        monkeypatch.setitem(_registry._model_pretrained_cfgs, known, other)
    for flag in ("--resume", "--weights"):
        assert main.main([*place, "--evaluate", flag, f"{run}/checkpoints/last.pt"]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1].split()[:3] == last.split()[:3]
        assert "64 pixels (as set); crop share 0.95, center, bicubic, mean 0.5" in out and "last.pt)" in out
    assert main.main(["--device", "cpu", "--resume", run]) == 0
    assert torch.load(workplace / run / "checkpoints/last.pt", weights_only=True)["preprocessing"] == held
    # Its weights bring it to another run, too.
    assert main.main([*place, "--arch", "test_vit", "--weights", f"{run}/checkpoints/last.pt", "--dry-run"]) == 0
    assert f"mean 0.5 0.5 0.5, std 0.5 0.5 0.5 ({run}/checkpoints/last.pt)" in capsys.readouterr().out


def test_flags_win_over_the_weights_in_evaluation(tree, tmp_path, monkeypatch):
    timm_weights(monkeypatch, tmp_path, "test_mambaout")
    arch = ("--evaluate", "--pretrained", "--arch", "test_mambaout")
    parts, images, _ = built(tree, *arch, "--image-size", 128, "--crop-pct", 0.8, "--mean", 0, "--std", 1)
    found = parts.data.preprocessing
    assert (found.image_size, found.val_image_size, found.crop_pct, found.interpolation) == (128, 128, 0.8, "bicubic")
    assert (found.mean, found.std) == ((0.0,) * 3, (1.0,) * 3)
    assert images.shape[-2:] == (128, 128) and images.min() >= 0 and images.max() <= 1
    assert built(tree, *arch, "--val-image-size", 96)[1].shape[-2:] == (96, 96)
    assert built(tree, *arch)[1].shape[-2:] == (192, 192)  # as timm tests it
    assert built(tree, "--pretrained", "--arch", "test_mambaout")[1].shape[-2:] == (160, 160)  # as it is trained


def test_training_crops_are_resized_and_normalised_as_the_weights_say(tree, tmp_path, monkeypatch):
    timm_weights(monkeypatch, tmp_path, "test_vit")
    flags = ("--pretrained", "--arch", "test_vit", "--augment", "resized-crop", "--batch-size", 8)
    parts, _, _ = built(tree, *flags)
    (batch,) = parts.train_loader.replay_step(0, 0)
    linear, _, _ = built(tree, *flags, "--interpolation", "bilinear", "--mean", 0, "--std", 1)
    (other,) = linear.train_loader.replay_step(0, 0)
    assert np.array_equal(batch.indices, other.indices)
    as_pixels = batch.images * 0.5 + 0.5
    gap = (as_pixels - other.images).abs() * 255
    assert gap.max() > 1 and gap.mean() < 8  # the same boxes, interpolated in another way
