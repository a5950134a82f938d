"""Test-time augmentation against airbench's formula, in training's validation and --evaluate, on any ranks."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import main
from tests.helpers import trained
from tests.utils.loop.test_validation import Loader, network, run
from utils.loop import test_time_augmentation
from utils.loop.test_time_augmentation import in_views
from utils.optim.head import SeenFeatures


def mirror(model, images):
    return 0.5 * model(images) + 0.5 * model(images.flip(-1))


def moved(images):
    height, width = images.shape[2:]
    padded = functional.pad(images, (1,) * 4, "reflect")
    return [padded[:, :, 0:height, 0:width], padded[:, :, 2 : 2 + height, 2 : 2 + width]]


def six_views(images):
    return [view for one in (images, *moved(images)) for view in (one, one.flip(-1))]


def airbench(model, images):
    """Its tta_level 2, written out for images of any size."""
    return 0.5 * mirror(model, images) + 0.5 * torch.stack([mirror(model, view) for view in moved(images)]).mean(0)


def around(model, images):
    """The plain mean over an image and all moves of it by up to two pixels."""
    height, width = images.shape[2:]
    padded = functional.pad(images, (2,) * 4, "reflect")
    moves = [(top, left) for top in range(5) for left in range(5) if (top - 2) ** 2 + (left - 2) ** 2 <= 4]
    views = [padded[:, :, top : top + height, left : left + width] for top, left in moves]
    assert len(views) == 13
    return torch.stack([mirror(model, view) for view in views]).mean(0)


def doubting(model, images):
    answers = torch.stack([mirror(model, view) for view in (images, *moved(images))]).argmax(2)
    return torch.where((answers == answers[0]).all(0)[:, None], airbench(model, images), around(model, images))


EXPECTED = {"flip": mirror, "flip-shift": airbench, "flip-shift-doubt": doubting}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("together", [False, True], ids=["a pass each", "one pass"])
def test_logits_are_the_mean_that_airbench_takes_and_views_that_fit_take_one_pass(memory_format, together, monkeypatch):
    monkeypatch.setattr(test_time_augmentation, "views_fit_together", lambda views: together)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 6, 5)).eval()
    images = torch.randn(7, 3, 6, 8).contiguous(memory_format=memory_format)
    expected = {tta: EXPECTED[tta](model, images) for tta in ("flip", "flip-shift")}
    passes = []
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0]))
    for tta, logits in expected.items():
        torch.testing.assert_close(in_views(model, tta)(images), logits)
    assert [len(one) for one in passes] == ([14, 42] if together else [7] * 8)
    assert passes[-1].is_contiguous(memory_format=memory_format) or not together
    assert in_views(model, "none") is model


@pytest.mark.parametrize(("bias", "in_doubt"), [(0, 2), (0.5, 28), (9, 0)])
def test_images_in_doubt_alone_get_26_views_at_any_temperature_and_features_are_of_the_first_six(bias, in_doubt):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(4 * 4 * 6, 5)).eval().requires_grad_(False)
    model[1].bias[0] += bias
    images = torch.randn(40, 3, 6, 8)
    expected = doubting(model, images)
    features = torch.stack([body(view) for view in six_views(images)]).mean(0)
    assert (expected != airbench(model, images)).any(1).sum() == in_doubt
    seen = SeenFeatures(model)
    torch.testing.assert_close(in_views(model, "flip-shift-doubt")(images), expected)
    torch.testing.assert_close(seen.of(40), features)
    model[1].weight /= 64
    model[1].bias /= 64
    torch.testing.assert_close(64 * in_views(model, "flip-shift-doubt")(images), expected)


def test_views_of_a_sharded_model_take_a_pass_each(monkeypatch):
    """Its ranks take part in each pass, and their batches, and images in doubt, differ in number."""
    monkeypatch.setattr(test_time_augmentation, "is_sharded", lambda model: True)
    monkeypatch.setattr(test_time_augmentation, "views_fit_together", lambda views: True)
    torch.manual_seed(0)
    passes = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0]))
    for images in (torch.zeros(7, 3, 8, 8), torch.randn(7, 3, 8, 8)):
        in_views(model, "flip-shift-doubt")(images)
    assert [len(one) for one in passes] == [7] * 6 + [1] * 26 + [7] * 6 + [7] * 26


def test_large_views_and_those_on_a_cpu_take_a_pass_each():
    def views(size, device):
        return [torch.empty(100, 3, size, size, device=device)] * 6

    assert test_time_augmentation.views_fit_together(views(32, "meta"))
    assert not test_time_augmentation.views_fit_together(views(224, "meta"))
    assert not test_time_augmentation.views_fit_together(views(32, "cpu"))


@pytest.mark.parametrize("tta", EXPECTED)
def test_validation_counts_the_views_of_an_evaluated_network_alike_on_any_ranks(tta):
    model = network()
    report, watch = run(in_views(model, tta), Loader())
    alone = copy.deepcopy(model).eval()
    batches = list(Loader().batches())
    with torch.no_grad():
        logits = torch.cat([EXPECTED[tta](alone, batch.images) for batch in batches])
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
    folder = trained(workplace, "--arch", "fc", "--max-steps", 8, "--ema-decay", 0.9, "--tta", "flip-shift")
    told = capsys.readouterr().out
    shown = {}
    for more in ((), ("--tta", "none"), ("--tta", "flip")):
        assert main.main([*flags, "--evaluate", "--resume", str(folder), *more]) == 0
        out = capsys.readouterr().out
        assert ("Test-time augmentation" in out) == (more != ("--tta", "none"))
        shown[more] = re.search(r"val_loss=\S+", out.splitlines()[-1])[0]
    assert "Test-time augmentation flip-shift: validation by the mean logits of 6 views" in told
    assert shown[()] in told.splitlines()[-1], "a checkpoint is evaluated as it was validated"
    assert len(set(shown.values())) == 3
