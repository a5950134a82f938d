"""The recipes for images of one's own: any network of which there is a file begins with it, but for the last layer."""

import pytest
import torch

from models import build_model
from tests.end_to_end.processes import load
from tests.faults.small_run import told
from tests.helpers import image_tree
from utils.config import arguments
from utils.config.groups.model import ModelSettings

RECIPES = ("finetune", "finetune-head")
HEADS = {
    "conv2": "classifier.5",
    "timm/test_vit": "head",
    "timm/test_convnext": "head.fc",
    "torchvision/squeezenet1_1": "classifier.1",
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two classes of ten images, which have no val/."""
    return image_tree(tmp_path_factory.mktemp("photographs"), {".": 10}, ("ant", "bee"), 48, "jpg")


def flags(recipe, photographs):
    data = ("--config", recipe, "--dataname", "folder", "--datapath", photographs)
    return (*data, *"--val-split 0.2 --device cpu --workers 0 --no-progress --picture-epochs off".split())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_opens_with_its_command(recipe):
    text = (arguments.CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8")
    assert f"\n#   python main.py --config {recipe} --dataname folder --datapath DATA\n" in text
    args = arguments.parse(["--config", recipe, "--dataname", "folder", "--datapath", "DATA"])
    assert args.model.pretrained and args.model.new_head
    assert args.optimisation.warmup_epochs and args.average.ema_decay and not args.augmentation.mixup


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [
        ("finetune", "conv2"),
        ("finetune", "timm/test_vit"),
        ("finetune", "timm/test_convnext"),
        ("finetune-head", "timm/test_vit"),
        ("finetune-head", "torchvision/squeezenet1_1"),
    ],
)
def test_a_recipe_begins_with_any_networks_file_and_trains(recipe, arch, photographs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained = build_model(ModelSettings(arch=arch), classes=7, channels=3, image_size=32)
    torch.save(trained.state_dict(), "weights.pth")
    line = (*flags(recipe, photographs), "--arch", arch, "--weights", "weights.pth", "--image-size", "32")
    code, _ = told(capsys, (*line, "--max-steps", "2", "--batch-size", "8", "--global-batch-size", "8"))
    assert code == 0
    (run,) = tmp_path.glob("runs/folder/*/*")
    words = "; the last layer (2 classes, where the weights have 7) begins anew"
    assert words in (run / "log.txt").read_text()
    initial, final = (load(run, f"{name}.pt")["model"] for name in ("initial", "final"))
    head = {f"{HEADS[arch]}.weight", f"{HEADS[arch]}.bias"}
    for name, value in trained.state_dict().items():
        assert name in head or torch.equal(initial[name], value), name
    moved = {name for name in final if not torch.equal(final[name], initial[name])}
    assert moved & head and bool(moved - head) == (recipe == "finetune")


def test_without_network_and_weights_one_line_says_what_to_fetch_and_how_to_give_it(photographs, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", no_file)
    code, lines = told(capsys, flags("finetune", photographs))
    (line,) = [line for line in lines if "warning" not in line]
    assert code == 2 and "--pretrained: the weights of timm/convnext_tiny could not be fetched" in line
    assert "fetch model.safetensors of timm/convnext_tiny.in12k_ft_in1k from the Hugging Face Hub elsewhere" in line
    assert "give it with --weights FILE --new-head" in line


def no_file(*_, **__):
    raise OSError("offline")


def test_flags_for_weights_take_the_place_of_a_recipes_and_the_saved_settings_agree(photographs):
    line = ["--config", "finetune", "--dataname", "folder", "--datapath", str(photographs)]
    for more, expected in (
        ([], (True, None)),
        (["--weights", "a"], (False, "a")),
        (["--no-pretrained"], (False, None)),
    ):
        args = arguments.parse([*line, *more])
        assert (args.model.pretrained, args.model.weights) == expected
