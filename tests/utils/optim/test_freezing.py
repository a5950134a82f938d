"""What is frozen does not move, costs nothing, and trains in the epochs that were asked for."""

import copy
import itertools

import pytest
import timm
import torch
from torch import nn

import main
from models import build_model
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import load, rows
from tests.faults.small_run import told
from tests.helpers import QUIETLY, equal, mistakes_of
from tests.utils.test_train_validation import make, steps
from utils.config import arguments
from utils.config.arguments import parse
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.freezing import Freezing, frozen_at_random
from utils.optim.optimizers import build_optimizers

# A network of each origin: a part of it, and its last layer.
ORIGINS = {
    "conv2": ("features.0", "classifier.5"),
    "timm/test_resnet": ("layer1", "fc"),
    "timm/test_vit": ("blocks.0", "head"),
    "torchvision/squeezenet1_1": ("features.3", "classifier.1"),
}
THREE_STEPS = ("--batch-size", "32", "--train-samples", "96")  # an epoch
DIGITS = (*QUIETLY, "--arch", "timm/test_resnet", *THREE_STEPS, "--epochs", "4")


def build(arch, classes=10, size=32):
    torch.manual_seed(0)
    return build_model(ModelSettings(arch=arch), classes=classes, channels=1, image_size=size)


def below(names, *layers):
    return {name for name in names if any(name == layer or name.startswith(f"{layer}.") for layer in layers)}


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --------------------------------------------------------------------------------------------- which


@pytest.mark.parametrize("arch", ORIGINS)
def test_a_pattern_is_a_layer_a_glob_or_all_but_the_head(arch):
    part, head = ORIGINS[arch]
    names = {name for name, _ in build(arch).named_parameters()}
    for pattern, frozen in {
        part: below(names, part),
        f"{part}*": {name for name in names if name.startswith(part)},
        "*.weight": {name for name in names if name.endswith(".weight")},
        "all-but-head": names - below(names, head),
        "backbone": names - below(names, head),
    }.items():
        model = build(arch)
        freezing = Freezing(model, [pattern])
        assert frozen and trained(model) == names - frozen, pattern
        assert freezing.count == sum(p.numel() for name, p in model.named_parameters() if name in frozen)
    model = build(arch)
    Freezing(model, [part, head])
    assert trained(model) == names - below(names, part, head)


def test_a_part_called_backbone_is_what_that_name_means():
    model = nn.Sequential()
    model.add_module("backbone", nn.Linear(2, 2))
    model.add_module("neck", nn.Linear(2, 2))
    model.add_module("out", nn.Linear(2, 2))
    Freezing(model, ["backbone"])
    assert trained(model) == {"neck.weight", "neck.bias", "out.weight", "out.bias"}


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("layr1", "--freeze layr1: no parameter or layer of the network has such a name; did you mean layer1"),
        ("layer1.0.conv1.weights", "did you mean layer1.0.conv1.weight"),
        ("encoder", "its parts are conv1, bn1, layer1"),
        ("*", "--freeze *: leaves nothing to train"),
    ],
)
def test_a_pattern_for_nothing_or_everything_is_refused(pattern, words):
    (line,) = mistakes_of(Freezing, build("timm/test_resnet"), [pattern])
    assert words in line


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [
        (None, None, "frozen"),
        (3, None, "frozen from the end of epoch 3 on"),
        (3, 5, "frozen from the end of epoch 3 until the end of epoch 5"),
    ],
)
def test_the_words_say_in_which_epochs(begin, end, words):
    model = build("conv2")
    freezing = Freezing(model, ["features.0"], begin, end)
    assert str(freezing) == f"features.0 (640 parameters) {words}"
    frozen_in = []
    for epoch in range(7):
        freezing.set_epoch(epoch, model)
        frozen_in += [epoch] if "features.0.weight" not in trained(model) else []
    assert frozen_in == [*range(begin or 0, 7 if end is None else end)]


def test_what_the_network_itself_does_not_train_is_never_released():
    with pytest.raises(UserError, match="leaves nothing to train"):
        Freezing(build("airbench"), ["features", "classifier", "whitening.bias"])
    model = build("airbench")
    freezing = Freezing(model, ["whitening", "features.1"], begin=1, end=2)
    own = trained(model)
    for epoch, frozen in ((0, set()), (1, {"whitening.bias", *below(own, "features.1")}), (2, set())):
        freezing.set_epoch(epoch, model)
        assert trained(model) == own - frozen and "whitening.weight" not in own


# ------------------------------------------------------------------------------------------- what it does


def test_a_frozen_part_trains_as_one_that_timm_has_frozen():
    """timm.utils.freeze turns batch norms into layers that normalise by what they have, as ours do."""
    model = build("timm/test_resnet", size=8)
    for layer in model.modules():  # statistics that are not those of any batch here
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.fill_(0.1)
            layer.running_var.fill_(2.0)
    plain = copy.deepcopy(model)
    freezing = Freezing(model, ["conv1", "bn1", "layer1", "layer2"])
    traval = make("--arch", "timm/test_resnet", "--amp", "off", model=model, freezing=freezing)
    timm.utils.freeze(plain, ["conv1", "bn1", "layer1", "layer2"])
    plain.train()
    optimizer = torch.optim.SGD(
        [p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True
    )
    traval.network.train()
    for (batch,) in steps(traval, 3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(batch.images), batch.targets).backward()
        optimizer.step()
    theirs = plain.state_dict()
    for name, value in traval.model.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)
    assert torch.equal(model.layer1[0].bn1.running_mean, torch.full_like(model.layer1[0].bn1.running_mean, 0.1))
    assert not torch.equal(model.layer3[0].bn1.running_mean, torch.full_like(model.layer3[0].bn1.running_mean, 0.1))


def test_freeze_bn_keeps_all_statistics_and_trains_the_rest_also_after_unfreezing():
    model = build("timm/test_resnet", size=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    freezing = Freezing(model, ["layer1"], end=1, all_statistics=True)
    traval = make("--arch", "timm/test_resnet", *THREE_STEPS, model=model, freezing=freezing)
    freezing.separate(traval.optimizers)
    traval.train(0)
    assert torch.equal(model.layer1[0].conv1.weight, before["layer1.0.conv1.weight"])
    traval.progress.finish_epoch()
    traval.train(1)
    for name, value in model.state_dict().items():
        statistics = any(word in name for word in ("running", "num_batches"))
        assert torch.equal(value, before[name]) == statistics, name


@pytest.mark.parametrize(
    ("optimizer", "begin", "end"),
    [
        ("sgd", None, 1),
        ("adafactor", None, 1),
        ("adamw", 1, 2),
        *(pytest.param(name, None, 1, marks=pytest.mark.thorough) for name in ("lamb", "lion")),
    ],
)
def test_freezing_and_unfreezing_is_a_plain_loop_that_does_not_train_these_parameters(optimizer, begin, end):
    """The reference keeps requires_grad and discards the gradients instead."""
    model = build("timm/test_resnet", size=8)
    plain = copy.deepcopy(model)
    freezing = Freezing(model, ["*.weight"], begin, end)  # of convolutions and norms, whose biases train
    assert not freezing.norms
    flags = ("--optimizer", optimizer, "--lr", "0.01", *THREE_STEPS)
    traval = make(*flags, model=model, freezing=freezing)
    freezing.separate(traval.optimizers)
    (theirs,) = build_optimizers(parse([*flags]).optimisation, plain)
    if optimizer == "sgd":  # fused, it begins the momentum of all parameters at once
        theirs = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=False)
    for epoch in range(end + 1):
        batches = list(traval.train_loader.batches(epoch))
        traval.train(epoch)
        traval.progress.finish_epoch()
        for batch in batches:
            nn.functional.cross_entropy(plain(batch.images), batch.targets).backward()
            for name, parameter in plain.named_parameters():
                if epoch == end - 1 and name in freezing.names:
                    parameter.grad = None
            theirs.step()
            theirs.zero_grad()
        held = sum(len(one) > 0 for one in theirs.state.values())
        assert sum(len(one) > 0 for one in traval.optimizers[0].state.values()) == held
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


LATER = {
    "sgd": ("--optimizer", "sgd", "--lr", "0.1", "--clip-grad-norm", "1", "--swa-start-epoch", "1"),
    "muon-sgd": ("--optimizer", "muon-sgd", "--lr", "0.01", "--ema-decay", "0.9"),
    "lookahead, SAM": ("--optimizer", "adamw", "--lr", "0.01", "--lookahead", "2", "0.5", "--sam-rho", "0.05"),
    "schedule-free": ("--optimizer", "schedulefree-adamw", "--lr", "0.01"),
}


@pytest.mark.parametrize(("mixture", "begin"), [*((name, 1) for name in LATER), ("sgd", None), ("muon-sgd", None)])
def test_what_is_frozen_from_the_start_or_after_an_epoch_stays_as_it_was_then(mixture, begin):
    model = build("timm/test_resnet", size=8)
    parts = ["conv1", "bn1", "layer1", "layer2.0.conv1"]
    freezing = Freezing(model, parts, begin)
    traval = make(*LATER[mixture], "--weight-decay", "0.1", *THREE_STEPS, model=model, freezing=freezing)
    freezing.separate(traval.optimizers)
    before = copy.deepcopy(model.state_dict())
    for epoch in (0, 1):
        assert epoch == 0 or not equal(before, model.state_dict())
        then = copy.deepcopy(model.state_dict())
        states = copy.deepcopy([o.state_dict() for o in traval.optimizers])
        traval.train(epoch)
        traval.progress.finish_epoch()
        for name, value in model.state_dict().items():
            kept = epoch >= (begin or 0) and below({name}, *parts)
            assert torch.equal(value, then[name]) == bool(kept), name
    assert {traval.clip._names[p] for p in traval.clip.parameters} == trained(model)
    assert all(p.grad is None for p in model.parameters()) and below(trained(model), *parts) == set()
    frozen = {id(p) for name, p in model.named_parameters() if below({name}, *parts)}
    for optimizer, state in zip(traval.optimizers, states, strict=True):
        assert begin or not [p for group in optimizer.param_groups for p in group["params"] if id(p) in frozen]
        now = optimizer.state_dict()
        names = {id(p): name for name, p in model.named_parameters()}
        held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        for number, name in enumerate(held):
            assert equal(now["state"][number], state["state"][number]) == bool(below({name}, *parts)), name
    if mixture == "schedule-free":  # what is evaluated has the frozen weights that the others were trained beside
        assert all(
            torch.equal(traval.ema.module.state_dict()[name], then[name]) for name in below(then, "layer1.0.conv1")
        )


def test_the_averages_statistics_are_its_own_where_its_weights_are():
    """Batch norms that trained before: the average still has other weights than those that are frozen."""
    for begin, gathers in ((None, False), (1, True)):
        model = build("timm/test_resnet", size=8)
        freezing = Freezing(model, ["bn1"], begin, 3)
        traval = make("--ema-decay", "0.9", model=model, freezing=freezing)
        average = traval.ema.module
        assert freezing.set_epoch(2, model, average) is (begin == 1)
        assert model.bn1 not in layers_with_statistics(model)
        assert (average.bn1 in layers_with_statistics(average)) is gathers
        freezing.set_epoch(3, model, average)
        assert model.bn1 in layers_with_statistics(model) and average.bn1 in layers_with_statistics(average)


def test_gradients_that_only_frozen_parameters_need_are_not_computed():
    """As in airbench: the first convolution is the dearest, and its input needs no gradient without whitening.bias."""
    settings = arguments.parse(["--config", "cifar10/fast", "--datapath", "somewhere"]).model
    assert (settings.freeze, settings.freeze_epoch) == (("whitening.bias",), 3)
    model = build("airbench", size=8)
    needed = []
    freezing = Freezing(model, settings.freeze, settings.freeze_epoch, settings.unfreeze_epoch)
    model.features[1].conv1.register_forward_pre_hook(lambda _, given: needed.append(given[0].requires_grad))
    for epoch in range(5):
        freezing.set_epoch(epoch, model)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(2, 1, 8, 8)).sum().backward()
    assert needed == [True, True, True, False, False]


def test_a_whole_optimizer_without_parameters_to_train_waits():
    """Muon's matrices are all frozen at first; under the scaler it would have nothing to look for an overflow in."""
    model = build("fc", size=8)
    flags = ("--arch", "fc", *"--optimizer muon --lr 0.001 --amp fp16 --init-scale 8".split(), *THREE_STEPS)
    traval = make(*flags, model=model, freezing=Freezing(model, ["all-but-head"], end=1))
    muon, adamw = traval.optimizers
    traval.train(0)
    assert (
        [held.optimizer for held in traval.active] == [adamw]
        and not muon.state
        and traval.progress.partly_skipped_steps == 0
    )
    traval.progress.finish_epoch()
    traval.train(1)
    assert (
        [held.optimizer for held in traval.active] == [muon, adamw]
        and muon.state
        and traval.progress.skipped_steps == 0
    )


# --------------------------------------------------------------------------------- resume, ranks


def finals(run):
    state = load(run, "final.pt")
    return {key: state[key] for key in ("model", "ema", "optimizer", "scaler")}


@pytest.mark.parametrize("flag", ["--freeze-epoch", "--unfreeze-epoch"])
def test_the_change_may_come_at_another_epoch_by_override(workplace, capsys, flag):
    line = [*DIGITS, "--arch", "fc", "--freeze", "layers.1", flag, "3", "--max-steps", "4"]
    assert main.main(line) == 0
    (run,) = workplace.glob("runs/digits/fc/*")
    weights = [load(run, "last.pt")["model"]["layers.1.weight"]]
    flags = ("--device", "cpu", "--no-progress", "--resume", run, "--resume-override")
    code, (warning,) = told(capsys, (*flags, flag, 2, "--max-steps", 6))
    assert code == 0 and f"{flag} 2" in warning
    weights.append(load(run, "last.pt")["model"]["layers.1.weight"])
    assert main.main([*DIGITS[:3], "--resume", str(run), "--max-steps", "7"]) == 0
    weights.append(load(run, "last.pt")["model"]["layers.1.weight"])
    first, second = (torch.equal(before, after) for before, after in itertools.pairwise(weights))
    assert (first, second) == ((False, True) if flag == "--freeze-epoch" else (True, False))


def test_ranks_train_as_one_process_which_resumes_to_the_same_bits(workplace, capsys):
    flags = (
        "--picture-epochs off --arch timm/test_resnet --epochs 3 --deterministic --freeze all-but-head --freeze-epoch 1 "
        "--unfreeze-epoch 2 --global-batch-size 64 --train-samples 192 --freeze-bn --lr 0.01 --max-val-batches 2"
    ).split()
    ranks = Forked(*flags, "--output", "two", processes=2)
    alone = (*flags, "--device", "cpu", "--no-progress", "--output")
    assert main.main([*alone, "one"]) == main.main([*alone, "cut", "--max-steps", "4"]) == 0
    capsys.readouterr()
    assert told(capsys, (*alone, "cut", "--resume", "auto")) == (0, [])
    ranks.communicate()
    assert ranks.returncode == 0
    (one,), (two,), (cut,) = (workplace.glob(f"{name}/digits/*/*") for name in ("one", "two", "cut"))
    assert equal(finals(one), finals(cut))
    for row, other in zip(rows(one), rows(two), strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-4)
        assert float(row["val_loss"]) == pytest.approx(float(other["val_loss"]), rel=1e-3)


def test_a_network_of_random_layers_of_which_the_last_alone_trains_is_warned_of():
    frozen = ("--arch", "conv2", "--freeze", "all-but-head")
    assert frozen_at_random(parse(frozen).model).startswith("--freeze all-but-head: keeps random layers")
    for more in (("--pretrained",), ("--weights", "a.pt"), ("--unfreeze-epoch", "1")):
        assert frozen_at_random(parse([*frozen, *more]).model) is None
    assert frozen_at_random(parse(["--arch", "conv2", "--freeze", "features.0"]).model) is None
