"""Weights of other programs and other classes: what fits is loaded, what begins anew is said, the rest is refused."""

import argparse
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn

import main
from models import build_model
from models.prepare import prepare_network
from models.starting_weights import load_start
from tests.end_to_end.processes import load
from tests.faults.small_run import told
from tests.helpers import QUIETLY, equal, mistakes_of, trained
from tests.models.test_pretrained import timm_weights
from utils.checkpoint import checkpoint
from utils.config.arguments import parse
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.optim.head import head_parameters

DIGITS = (*QUIETLY, "--max-steps", "2", "--val-batch-size", "360")
# A network of each origin with the last layer's name; torchvision's is a convolution.
ORIGINS = {
    "conv2": "classifier.5",
    "timm/test_resnet": "fc",
    "timm/test_vit": "head",
    "torchvision/squeezenet1_1": "classifier.1",
}


def build(arch, classes, size=32, **settings):
    return build_model(ModelSettings(arch=arch, **settings), classes=classes, channels=3, image_size=size)


@pytest.mark.parametrize("arch", ORIGINS)
def test_a_new_head_begins_anew_and_everything_else_is_the_checkpoints(arch):
    trained = build(arch, 10)
    model = build(arch, 3, new_head=True, weights="x.pt")
    own = {name: value.clone() for name, value in model.state_dict().items()}
    words = load_start(model, {"model": trained.state_dict()}, Path("x.pt"), new_head=True)
    assert words == "the last layer (3 classes, where the weights have 10)"
    head = {f"{ORIGINS[arch]}.weight", f"{ORIGINS[arch]}.bias"}
    assert set(head_parameters(model)) == head
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name] if name in head else trained.state_dict()[name]), name


@pytest.mark.parametrize("arch", [*ORIGINS, "timm/tf_efficientnet_lite0"])
def test_a_new_head_begins_with_small_answers_and_learns(arch):
    model = build(arch, 3, new_head=True, weights="x.pt")
    for name, parameter in head_parameters(model).items():
        assert 0.005 < parameter.std() < 0.015 if parameter.ndim > 1 else not parameter.any(), name
    logits = model.train()(torch.rand(8, 3, 32, 32))
    assert logits.abs().max() < 2
    nn.functional.cross_entropy(logits, torch.arange(8) % 3).backward()
    assert all(parameter.grad.any() for parameter in head_parameters(model).values())


@pytest.mark.parametrize("arch", ORIGINS)
def test_without_it_other_classes_are_refused_with_both_numbers_and_nothing_is_loaded(arch):
    trained = build(arch, 10)
    model = build(arch, 3)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    (line,) = mistakes_of(load_start, model, trained.state_dict(), Path("x.pt"), new_head=False)
    assert line.startswith("--weights x.pt: is for 10 classes, and the data has 3; --new-head begins the last layer ")
    assert f"({ORIGINS[arch]}.weight, {ORIGINS[arch]}.bias)" in line and "--arch" not in line
    assert equal(own, model.state_dict())


OTHER_ROWS = "xaycb", "2 of the last layer's 5 classes (x, y), whose other rows go to the classes of their names,"


@pytest.mark.parametrize(
    ("arch", "names", "words"),
    [
        ("fc", "abc", ""),
        ("fc", "cab", "no class of the last layer, whose rows go to the classes of their names,"),
        ("fc", "abx", "1 of the last layer's 3 classes (x), whose other rows go to the classes of their names,"),
        ("fc", "ca", "no class of the last layer, whose rows go to the classes of their names,"),
        *((arch, *OTHER_ROWS) for arch in ORIGINS),
    ],
)
def test_rows_of_the_last_layer_go_to_the_classes_of_their_names(arch, names, words):
    trained = build(arch, 3)
    model = build(arch, len(names))
    own = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_start(model, {"model": trained.state_dict(), "classes": [*"abc"]}, Path("x.pt"), False, names) == words
    for name, value in model.state_dict().items():
        theirs = trained.state_dict()[name]
        if name not in head_parameters(model):
            assert torch.equal(value, theirs)
            continue
        for row, label in enumerate(names):
            assert torch.equal(value[row], own[name][row] if label in "xy" else theirs["abc".index(label)])


def test_weights_of_other_classes_alone_are_refused_and_unnamed_ones_stay_in_their_order():
    trained = build("fc", 3)
    model = build("fc", 3)
    with pytest.raises(
        UserError, match=r"x\.pt: is for other classes \(a, b, c\) than the data's \(x, y, z\); --new-head"
    ):
        load_start(model, {"model": trained.state_dict(), "classes": [*"abc"]}, Path("x.pt"), False, "xyz")
    assert load_start(model, {"model": trained.state_dict()}, Path("x.pt"), False, "xyz") == ""
    assert equal(model.state_dict(), trained.state_dict())


def test_weights_without_a_last_layer_need_a_new_head():
    trained = timm.create_model("test_resnet", num_classes=0).state_dict()
    model = build("timm/test_resnet", 3, size=96)
    with pytest.raises(UserError, match=r"^--weights x\.pt: has no last layer, and the data has 3; --new-head"):
        load_start(model, trained, Path("x.pt"), new_head=False)
    words = load_start(model, trained, Path("x.pt"), new_head=True)
    assert words == "the last layer (3 classes, where the weights have none)"
    assert equal({name: model.state_dict()[name] for name in trained}, trained)


def test_another_network_is_refused_by_its_names_with_a_new_head_or_without():
    for new_head in (False, True):
        with pytest.raises(UserError, match=r"x\.pt: does not fit the network: lacks .* \(and \d+ more\); is --arch"):
            load_start(build("vgg11", 3), build("conv2", 10).state_dict(), Path("x.pt"), new_head)


def test_a_pretrained_last_layer_for_as_many_classes_begins_anew_too(tmp_path, monkeypatch):
    network, _ = timm_weights(monkeypatch, tmp_path, "test_vit")
    torch.manual_seed(5)
    kept, begun = (build("test_vit", 2, 160, pretrained=True, new_head=new).state_dict() for new in (False, True))
    assert equal(kept, network.state_dict())
    changed = {name for name in kept if not torch.equal(kept[name], begun[name])}
    assert changed == {"head.weight"} and not begun["head.bias"].any() and begun["head.weight"].std() > 0


def test_a_run_says_in_log_plan_and_refusal_what_happens_to_the_last_layer(workplace, capsys):
    three = build_model(ModelSettings(arch="fc"), classes=3, channels=1, image_size=8).state_dict()
    three["layers.1.weight"] = torch.ones(300, 64)
    torch.save({"model": three}, "three.pt")
    flags = ("--arch", "fc", "--weights", "three.pt")
    code, (line,) = told(capsys, (*DIGITS, *flags))
    assert code == 2 and "is for 3 classes, and the data has 10; --new-head" in line
    assert main.main([*DIGITS, *flags, "--new-head", "--dry-run"]) == 0
    words = "the last layer (10 classes, where the weights have 3)"
    assert f"weights of three.pt; {words} begins anew" in capsys.readouterr().out
    folder = trained(workplace / "runs", *DIGITS, *flags, "--new-head")
    assert f"; {words} begins anew" in (folder / "log.txt").read_text()
    initial = load(folder, "initial.pt")["model"]
    assert torch.equal(initial["layers.1.weight"], torch.ones(300, 64))
    assert initial["layers.5.weight"].shape == (10, 100)
    capsys.readouterr()
    # Its own classes need no new head, and a resume brings the weights along.
    assert main.main([*DIGITS, "--resume", str(folder), "--dry-run"]) == 0
    assert "anew" not in capsys.readouterr().out


def test_weights_of_another_stem_are_named_in_the_plan_and_refused_where_they_do_not_fit(workplace, capsys):
    """Trained on small images, a network has a 3x3 stem without max-pool; the weights of a deep stem fit both."""
    eight = ("--batch-size", "8", "--val-batch-size", "8", "--max-val-batches", "1", "--max-steps", "1")
    small = (*DIGITS, *eight, "--dataname", "synthetic", "--image-size", "16")
    run = trained(workplace / "runs", *small, "--arch", "timm/test_resnet")
    assert "\nStem: 3x3 without max-pool, as for all training images of at most 64 " in capsys.readouterr().out
    path = str(run / "checkpoints/final.pt")
    larger = [*small[:-1], "72"]
    assert main.main([*larger, "--arch", "timm/test_resnet", "--weights", path, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "\nStem           timm's own, as for all training images of more than 64 pixels" in plan
    assert "The weights to begin with were trained with that other one, on images of 16 pixels" in plan
    torch.save(build("timm/resnet18", 10, 16).state_dict(), "plain.pt")
    code, (line,) = told(capsys, (*larger, "--arch", "timm/resnet18", "--weights", "plain.pt"))
    assert code == 2 and "first convolution is 3x3, and that of ResNet for these images 7x7" in line
    assert line.endswith("the weights fit --image-size 64 or less")


def test_a_network_is_evaluated_with_the_stem_that_it_was_trained_with_whatever_images_it_sees(workplace, capsys):
    """Its weights fit both, so that the figures of a network that nobody has trained looked well."""
    flags = (*QUIETLY, "--max-val-batches", "1", "--val-batch-size", "8")
    run = trained(workplace / "runs", *flags, "--image-size", 16, "--arch", "timm/test_resnet", "--max-steps", 1)
    path = str(run / "checkpoints/final.pt")
    figures = []
    for size in ("--image-size", "--val-image-size"):
        capsys.readouterr()
        assert main.main([*flags, "--evaluate", "--weights", path, size, "72"]) == 0
        figures.append(capsys.readouterr().out.splitlines()[-1])
    assert figures[0] == figures[1]


def average_of(model):
    """As torchvision's reference scripts keep it."""
    return torch.optim.swa_utils.AveragedModel(model).state_dict()


WRAPPED = {
    "bare": lambda model: model.state_dict(),
    "torchvision's": lambda model: {"model": model.state_dict(), "epoch": 3, "args": argparse.Namespace(lr=0.1)},
    "torchvision's average": lambda model: {"model": {"a": torch.ones(1)}, "model_ema": average_of(model)},
    "timm's": lambda model: {"arch": "a", "state_dict": model.state_dict(), "args": argparse.Namespace(model="a")},
    "timm's average": lambda model: {"state_dict": {"a": torch.ones(1)}, "state_dict_ema": model.state_dict()},
    "DDP's": lambda model: {f"module.{name}": value for name, value in model.state_dict().items()},
    "a compiled network's": lambda model: {f"_orig_mod.{name}": value for name, value in model.state_dict().items()},
    "DDP's compiled": lambda model: {
        "state_dict": {f"_orig_mod.module.{name}": value for name, value in model.state_dict().items()}
    },
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_weights_are_found_however_a_program_has_wrapped_them(tmp_path, wrap):
    trained, model = (build("fc", 3) for _ in range(2))
    torch.save(WRAPPED[wrap](trained), tmp_path / "some.pth")
    load_start(model, checkpoint.load(tmp_path / "some.pth"), Path("some.pth"), new_head=False)
    assert equal(model.state_dict(), trained.state_dict())


def test_a_compiled_layer_within_the_network_is_found():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0] = torch.compile(model[0], backend="eager")  # the default backend is seconds of imports
    assert "0._orig_mod.weight" in model.state_dict()
    assert set(checkpoint.weights_of(model.state_dict(), Path("x"))) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_safetensors_are_read_whatever_the_files_name(tmp_path, name):
    trained, model = (build("fc", 3) for _ in range(2))
    safetensors.torch.save_file(trained.state_dict(), tmp_path / name)
    load_start(model, checkpoint.load(tmp_path / name), Path(name), new_head=False)
    assert equal(model.state_dict(), trained.state_dict())


def test_damaged_safetensors_are_one_line(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    header = b'{"a":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}'  # claims more than there is
    for damaged in (whole[:-50], len(header).to_bytes(8, "little") + header + bytes(100), whole[:20], b"", whole[:8]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors: is not a checkpoint that can be loaded safely: "):
            checkpoint.load(path)


def test_timm_resizes_a_vision_transformers_positions_as_it_does_for_its_own_weights():
    trained = build("timm/test_vit", 10, 160)
    model = build("timm/test_vit", 10, 64)
    load_start(model, trained.state_dict(), Path("x.pt"), new_head=False)
    expected = timm.layers.resample_abs_pos_embed(
        trained.pos_embed, new_size=(4, 4), num_prefix_tokens=1, interpolation="bicubic", antialias=True
    )
    assert torch.equal(model.pos_embed, expected) and torch.equal(model.head.weight, trained.head.weight)


@pytest.mark.parametrize("name", ["googlenet", pytest.param("inception_v3", marks=pytest.mark.thorough)])
def test_heads_that_torchvisions_files_have_for_training_alone_are_left_out(name):
    trained = torchvision.models.get_model(name, weights=None, num_classes=4, aux_logits=True, init_weights=False)
    model = build(f"torchvision/{name}", 4, 96)
    load_start(model, trained.state_dict(), Path("x.pt"), new_head=False)
    assert torch.equal(model.fc.weight, trained.fc.weight)


def test_a_first_convolution_that_begins_anew_is_not_frozen(monkeypatch):
    """All pretrained layers would see what random filters leave, throughout the run."""
    built = partial(build_model, ModelSettings(arch="timm/resnet18"))  # without the weights, which are far away
    monkeypatch.setattr("models.prepare.build_model", lambda settings, **shape: built(**shape))
    device = torch.device("cpu")
    for always in ((), ("--unfreeze-epoch", "6", "--epochs", "6")):
        args = parse(["--arch", "timm/resnet18", "--pretrained", "--freeze", "all-but-head", *always])
        with pytest.raises(UserError, match="^--freeze: the 3x3 first convolution for images of 8 pixels begins anew"):
            prepare_network(args, get_data(args.data, device), device, None, None)
    for in_some_epochs in (("--unfreeze-epoch", "3"), ("--freeze-epoch", "5")):
        args = parse(["--arch", "timm/resnet18", "--pretrained", "--freeze", "conv1", *in_some_epochs])
        assert prepare_network(args, get_data(args.data, device), device, None, None).freezing.names == {"conv1.weight"}
