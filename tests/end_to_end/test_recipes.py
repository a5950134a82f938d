"""Every recipe under configs/ is read, says what it is, and trains, each on small data of its format."""

import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

import main
from models.small import OWN
from scripts.common.recipes import MEASURED, NOT_MEASURED, REFERENCE, read_recipe, recipes
from tests.utils.data.test_readers import write_idx
from utils.checkpoint.checkpoint import Checkpointer
from utils.config import arguments
from utils.config.auto_augment import read_policy
from utils.config.datasets import SPECS
from utils.record.writer import Writer

FOUND = {recipe.name: recipe for recipe in recipes()}
OF_A_SET = [name for name in FOUND if "/" in name]  # the others are for any data
MANY_GPUS = [name for name in OF_A_SET if name.startswith("imagenet/")]
IDX = {"mnist", "fashionmnist"}
# Class folders, as any data set with files may come in; what no data set is called is read as --dataname folder.
IN_FOLDERS = sorted({name.split("/")[0] for name in OF_A_SET} - IDX - {"digits"})
CLASS_FOLDERS = {dataname: SPECS.get(dataname, SPECS["folder"]) for dataname in IN_FOLDERS}
OF_ANY_SIZE = {name for name, spec in CLASS_FOLDERS.items() if not spec.fixed_size}
CLASSES_OF_A_FOLDER = 10
# What has no effect on so few images, or without half precision.
IDLE_HERE = ("warmup-epochs: ", "drop-last: ", "init-scale: ", "fp32-layers: ", "--ema-bn-batches")
VGG = ("vgg11", "vgg13", "vgg16", "vgg19")
# Large networks train with fewer and narrower blocks of the same code; this one, before releases, also as it is.
WHOLE = "imagenet/resnet50"
SMALLER = dict.fromkeys(("resnet18", "resnet34", "resnet50", "timm/resnet10t"), "timm/test_resnet")
SMALLER |= {f"torchvision/resnet{depth}": "torchvision/resnet18" for depth in (34, 50, 101)}
SMALLER |= {"convnext_tiny": "timm/test_convnext", "vit_small_patch16_224": "timm/test_vit"}
SMALLER |= dict.fromkeys(VGG, "vgg11")
# Recipes that set what another of the same or a like data set sets, for another network or to other values.
LIKE_ANOTHER = {f"digits/{arch}" for arch in ("conv2", "conv4", "conv4a", "conv6", "conv6a", *VGG)}
LIKE_ANOTHER |= {f"{dataname}/{arch}" for dataname in IDX for arch in ("conv2a", "conv4a", "conv6")}
LIKE_ANOTHER |= {"mnist/conv6a", "fashionmnist/conv4", "fashionmnist/conv6a"}
LIKE_ANOTHER |= {f"cifar10/{arch}" for arch in ("airbench", "conv2", "conv4", "conv6", "resnet18", "resnet34", *VGG)}
LIKE_ANOTHER |= {f"cifar100/{arch}" for arch in ("fast", "resnet34", "vgg19")}
LIKE_ANOTHER |= {f"imagenet/resnet{rest}" for rest in ("18", "34", "101", "50_a1", "50_a3", "50_ffcv16")}
LIKE_ANOTHER |= {"imagenette/resnet10t", "imagenette/resnet50"}


def parsed(name, world_size=1):
    return arguments.parse(["--config", name, "--datapath", "somewhere"], world_size)


def header(name):
    lines = (arguments.CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]


# ------------------------------------------------------------------------------------- what there is


def test_every_own_network_has_a_recipe():
    assert {f"digits/{arch}" for arch in OWN} <= set(FOUND)


@pytest.mark.parametrize("name", OF_A_SET)
def test_a_recipe_parses_into_what_its_name_says(name):
    args = parsed(name)
    dataname, arch = name.split("/")
    assert args.data.dataname == (dataname if dataname in SPECS else "folder")
    network = args.model.arch.rpartition("/")[2].removesuffix("_224")
    arch = arch.replace("fast", "airbench")
    assert arch == network or arch.startswith(f"{network}_")


@pytest.mark.parametrize("name", OF_A_SET)
def test_a_recipe_opens_with_its_source_its_command_and_its_figures(name):
    recipe = FOUND[name]
    lines = header(name)
    data = "" if name.startswith("digits/") else " --datapath DATA"
    launcher = r"(scripts/torchrun\.py --nproc-per-node 8 )?"
    command = re.fullmatch(rf"python {launcher}main\.py --config {name}{data}", recipe.command)
    assert command, f"its header has the command python main.py --config {name}{data}"
    assert f"#   {recipe.command}" in lines
    assert len(recipe.source) > 40
    assert sum(line.startswith(f"# {REFERENCE} ") for line in lines) == 1, f"its header has a line # {REFERENCE}"
    assert recipe.reference.startswith("none known") or re.search(r"\d % top-1", recipe.reference)
    said = [line for line in lines if line.startswith((f"# {MEASURED} ", f"# {NOT_MEASURED}"))]
    assert len(said) == 1, f"its header has a line # {MEASURED} or # {NOT_MEASURED}"
    assert bool(recipe.measured) == said[0].startswith(f"# {MEASURED} ")
    assert not recipe.measured or re.search(r"\d % top-1", recipe.measured)


@pytest.mark.parametrize("name", MANY_GPUS)
def test_a_recipe_for_many_gpus_keeps_its_batch_on_any_number_of_them(name):
    assert len({parsed(name, n).data.global_batch_size for n in (1, 2, 3, 8, 64)}) == 1


def test_randaugment_of_the_vision_transformer_applies_each_drawn_operation_as_big_visions_does():
    policy = read_policy(parsed("imagenet/vit_small_patch16_bigvision").augmentation.auto_augment)
    assert {name: policy.options[name] for name in ("n", "m", "p")} == {"n": 2, "m": 10, "p": 1}


def test_a_header_is_read_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.common.recipes.CONFIGS", tmp_path)
    path = tmp_path / "mnist" / "net_b.yaml"
    path.parent.mkdir()
    path.write_text(
        "# A network on\n# MNIST (2020).\n#\n#   python main.py --config mnist/net_b --datapath DATA\n#\n"
        "# Not of the source: 7 % more.\n# Literature: 98 to 99.5 % top-1,\n#   they say.\n"
        "# Measured: 98.84 % top-1; ten\n# epochs.\n\n# Literature: 1 % top-1 below the header\nepochs: 3\n"
    )
    recipe = read_recipe(path)
    assert recipe.name == "mnist/net_b"
    assert recipe.source == "A network on MNIST (2020)."
    assert recipe.command == "python main.py --config mnist/net_b --datapath DATA"
    assert (recipe.reference, recipe.reference_figure) == ("98 to 99.5 % top-1, they say.", "98 to 99.5 %")
    assert (recipe.measured, recipe.measured_figure) == ("98.84 % top-1; ten epochs.", "98.84 %")
    path.write_text("# A network.\n# Literature: none known.\n# Not measured here; it has 3 % of the layers.\n")
    recipe = read_recipe(path)
    assert (recipe.reference_figure, recipe.measured_figure, recipe.command) == ("none known", "not measured", "")


# ----------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders by data set: idx files, or class folders with an image each, four of which have one for validation."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)

    def pixels(*shape):
        return generator.integers(0, 256, shape, dtype=np.uint8)

    labels = np.arange(16, dtype=np.uint8) % 10
    for name in IDX:
        write_idx(root / name, (pixels(16, 28, 28), labels), (pixels(4, 28, 28), labels[:4]))
    for name, spec in CLASS_FOLDERS.items():
        ending = "png" if spec.fixed_size else "jpg"
        size = (spec.image_size,) * 2 if spec.fixed_size else (40, 48)
        Image.fromarray(pixels(*size, 3)).convert(spec.colour).save(root / f"image.{ending}")
        for number in range(spec.classes or CLASSES_OF_A_FOLDER):
            for split in ("train", "val") if number < 4 else ("train",):
                folder = root / name / split / f"{number:04}"
                folder.mkdir(parents=True)
                os.link(root / f"image.{ending}", folder / f"image.{ending}")
    return root


def flags(name, data):
    dataname = name.split("/")[0]
    place = [] if dataname == "digits" else ["--datapath", str(data / dataname)]
    streams = ["--loader", "stream", "--workers", "0"] if dataname in OF_ANY_SIZE else []
    return ["--config", name, *place, *streams, "--device", "cpu"]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, False) for name in OF_A_SET if name not in LIKE_ANOTHER),
        *(pytest.param(name, False, marks=pytest.mark.thorough) for name in sorted(LIKE_ANOTHER)),
        pytest.param(WHOLE, True, marks=pytest.mark.thorough),
    ],
)
def test_a_recipe_trains_and_all_that_it_sets_has_an_effect(name, whole, data, tmp_path, monkeypatch, capsys):
    recipe = parsed(name)
    small = []
    monkeypatch.setattr(
        Writer, "weights", lambda *_: None
    )  # histograms are of no recipe, and take as long as the steps
    if not whole:  # so do pictures
        small += ["--picture-epochs", "off", "--arch", SMALLER.get(recipe.model.arch, recipe.model.arch)]
    if name.split("/")[0] in OF_ANY_SIZE:
        small += ["--image-size", "64" if recipe.data.progressive_size else "32"]
        small += ["--val-image-size", "32"] if recipe.data.val_image_size else []
        small += ["--progressive-size", "32"] if recipe.data.progressive_size else []
        small += ["--ema-bn-batches", "1"] if recipe.average.ema_decay else []
    # Checkpoints of these networks are large, and none of them is read.
    monkeypatch.setattr(Checkpointer, "save", lambda *_: None)
    monkeypatch.setattr("utils.run.Run.warn_of_little_space", lambda _: None)
    # Four digits are alike after the last max-pools, of 1x1 pixel, and this network's batch norms divide by almost 0.
    batch = "32" if name == "digits/airbench" else "4"
    small += ["--global-batch-size", batch, "--val-batch-size", "90", "--amp", "off", "--no-progress"]
    code = main.main([*flags(name, data), *small, "--max-steps", "2", "--output", str(tmp_path)])
    out, err = capsys.readouterr()
    assert code == 0, err
    idle = [line for line in err.splitlines() if "does nothing" in line]
    assert [line for line in idle if not any(name in line for name in IDLE_HERE)] == []
    assert re.search(r"^val_top1=\d.* val_count=\d+ val_epoch=1 ", out.splitlines()[-1])
    shutil.rmtree(tmp_path)
