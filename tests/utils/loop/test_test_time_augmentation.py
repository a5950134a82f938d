"""Test-time augmentation against airbench's formula, in training's validation and --evaluate, on any ranks."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import main
from tests.utils.loop.test_validation import Loader, network, run
from utils.loop import test_time_augmentation
from utils.loop.test_time_augmentation import in_views


def mirror(model, images):
    return 0.5 * model(images) + 0.5 * model(images.flip(-1))


def airbench(model, images):
    """Its tta_level 2, written out for images of any size."""
    height, width = images.shape[2:]
    padded = functional.pad(images, (1,) * 4, "reflect")
    moved = [padded[:, :, 0:height, 0:width], padded[:, :, 2 : 2 + height, 2 : 2 + width]]
    return 0.5 * mirror(model, images) + 0.5 * torch.stack([mirror(model, view) for view in moved]).mean(0)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("together", [False, True], ids=["a pass each", "one pass"])
def test_logits_are_the_mean_that_airbench_takes_and_views_that_fit_take_one_pass(memory_format, together, monkeypatch):
    monkeypatch.setattr(test_time_augmentation, "views_fit_together", lambda views: together)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 6, 5)).eval()
    images = torch.randn(7, 3, 6, 8).contiguous(memory_format=memory_format)
    expected = [mirror(model, images), airbench(model, images)]
    passes = []
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0]))
    for tta, logits in zip(("flip", "flip-shift"), expected, strict=True):
        torch.testing.assert_close(in_views(model, tta)(images), logits)
    assert [len(one) for one in passes] == ([14, 42] if together else [7] * 8)
    assert passes[-1].is_contiguous(memory_format=memory_format) or not together
    assert in_views(model, "none") is model


def test_large_views_and_those_on_a_cpu_take_a_pass_each():
    def views(size, device):
        return [torch.empty(100, 3, size, size, device=device)] * 6

    assert test_time_augmentation.views_fit_together(views(32, "meta"))
    assert not test_time_augmentation.views_fit_together(views(224, "meta"))
    assert not test_time_augmentation.views_fit_together(views(32, "cpu"))


@pytest.mark.parametrize("tta", ["flip", "flip-shift"])
def test_validation_counts_the_views_of_an_evaluated_network_alike_on_any_ranks(tta):
    model = network()
    report, watch = run(in_views(model, tta), Loader())
    alone = copy.deepcopy(model).eval()
    batches = list(Loader().batches())
    with torch.no_grad():
        logits = torch.cat([(mirror if tta == "flip" else airbench)(alone, batch.images) for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert report.count == 20 and model.training
    assert report.loss == pytest.approx(functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert report.top1 == pytest.approx(100 * (logits.argmax(1) == targets).double().mean().item())
    sums = [run(in_views(model, tta), Loader(rank, 3))[1].sums for rank in range(3)]
    torch.testing.assert_close(sum(sums), watch.sums, rtol=0, atol=0)


def test_an_image_of_one_pixel_looks_the_same_from_everywhere():
    images = torch.randn(5, 3, 1, 1)
    torch.testing.assert_close(in_views(nn.Flatten(), "flip-shift")(images), images.flatten(1))


def test_half_precision_logits_are_averaged_in_float32():
    model = nn.Flatten()
    images = torch.tensor([1024.0, 1025.0]).half().view(1, 1, 1, 2)
    assert in_views(model, "flip")(images).tolist() == [[1024.5, 1024.5]]


def test_training_and_evaluation_use_it_and_say_so(workplace, capsys):
    flags = ("--device", "cpu", "--no-progress")
    begun = (*flags, "--arch", "fc", "--max-steps", "8", "--ema-decay", "0.9", "--tta", "flip-shift")
    assert main.main([*begun]) == 0
    trained = capsys.readouterr().out
    (folder,) = (workplace / "runs/digits/fc").iterdir()
    shown = {}
    for more in ((), ("--tta", "none"), ("--tta", "flip")):
        assert main.main([*flags, "--evaluate", "--resume", str(folder), *more]) == 0
        out = capsys.readouterr().out
        assert ("Test-time augmentation" in out) == (more != ("--tta", "none"))
        shown[more] = re.search(r"val_loss=\S+", out.splitlines()[-1])[0]
    assert "Test-time augmentation flip-shift: validation by the mean logits of 6 views" in trained
    assert shown[()] in trained.splitlines()[-1], "a checkpoint is evaluated as it was validated"
    assert len(set(shown.values())) == 3
