"""Distillation's losses against timm's task, DeiT's code and torch; the teacher as it sees the student's images."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from utils.config.groups.loss import LossSettings
from utils.loop.forward import forward
from utils.optim.criterion import build_criterion
from utils.optim.distillation import Distillation, Origin, Teacher

ORIGIN = Origin("here", "tiny", "0" * 64)


def network(seed=0, classes=5, channels=3):
    torch.manual_seed(seed)
    layers = nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, classes))


def batch_of(count=6, filled=0, size=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count + filled, 3, size, size, generator=generator)
    return SimpleNamespace(images=images, targets=torch.arange(count) % 5)


def distillation(teacher=None, **settings):
    settings = LossSettings(**settings)
    return Distillation(build_criterion(settings), teacher or Teacher(network(1), ORIGIN, 8), settings)


def logits_of(seed, dtype=torch.float32):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_two_terms_and_their_weights_are_timms(temperature, alpha):
    task = pytest.importorskip("timm.task", reason="older versions of timm have none")
    student = network(0).eval()
    teacher = network(1)
    batch = batch_of()
    student.num_classes = 5
    student.in_chans = 3
    student.pretrained_cfg = teacher.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    theirs = task.LogitDistillationTask(
        student,
        copy.deepcopy(teacher),
        nn.CrossEntropyLoss(),
        distill_loss_weight=alpha,
        task_loss_weight=1 - alpha,
        temperature=temperature,
        verbose=False,
    )(batch.images, batch.targets)
    criterion = distillation(
        Teacher(teacher, ORIGIN, 8), distillation_alpha=alpha, distillation_temperature=temperature
    )
    _, loss, losses = forward(student, batch, criterion, nullcontext())
    assert loss.item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
    assert list(losses) == ["criterion", "distillation"]
    assert losses["distillation"].item() == pytest.approx(alpha * theirs["kd_loss"].item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_hard_loss_is_cross_entropy_with_the_teachers_predictions_at_any_temperature(temperature):
    logits = logits_of(2)
    answers = logits_of(3)
    expected = functional.cross_entropy(logits, answers.argmax(1))
    criterion = distillation(distillation="hard", distillation_temperature=temperature)
    assert criterion.compare(logits, answers).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_parts_of_a_batch_weighted_by_their_sizes_have_its_loss(kind):
    criterion = distillation(distillation=kind)
    logits = logits_of(2)
    answers = logits_of(3)
    parts = [n * criterion.compare(logits[part], answers[part]) for n, part in ((2, slice(2)), (4, slice(2, 6)))]
    assert sum(parts).item() / 6 == pytest.approx(criterion.compare(logits, answers).item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_logits_are_computed_in_float32(kind, dtype):
    criterion = distillation(distillation=kind)
    logits = logits_of(2, dtype)
    answers = logits_of(3, dtype)
    loss = criterion.compare(logits, answers)
    assert loss.dtype == torch.float32 and loss.item() == criterion.compare(logits.float(), answers.float()).item()


def test_the_criterion_of_the_labels_may_be_any_and_takes_mixed_targets():
    shares = functional.softmax(logits_of(4), 1)
    criterion = distillation(loss="bce", label_smoothing=0.1, distillation_alpha=0.25)
    losses = criterion(logits_of(2), shares, batch_of().images)
    expected = build_criterion(LossSettings(loss="bce", label_smoothing=0.1))(logits_of(2), shares)
    assert losses["criterion"].item() == pytest.approx(0.75 * expected.item(), rel=1e-6)


def test_the_teacher_stays_as_it_is_in_evaluation_mode_without_gradients_within_the_students_autocast():
    teacher = Teacher(network(1), ORIGIN, 8)
    kinds = []
    teacher.network[5].register_forward_hook(lambda layer, _, output: kinds.append((layer.training, output.dtype)))
    before = copy.deepcopy(teacher.state_dict())
    student = network(0)
    batch = batch_of(4, filled=2)
    _, loss, _ = forward(student, batch, distillation(teacher), torch.autocast("cpu", torch.bfloat16))
    loss.backward()
    assert kinds == [(False, torch.bfloat16)] and loss.dtype == torch.float32
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_the_teacher_sees_the_images_that_count_renormalised_and_resized_and_answers_in_the_students_order():
    """As if the pixels had been normalised with the teacher's mean and standard deviation, then resized."""
    pixels = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    mean = torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    std = torch.tensor([0.2, 0.3, 0.4])[:, None, None]
    theirs = torch.tensor([0.1, 0.2, 0.3])[:, None, None], torch.tensor([0.5, 0.6, 0.7])[:, None, None]
    order = torch.tensor([3, 0, 4, 1, 2])
    seen = []
    normalisation = (std / theirs[1]).flatten(), ((mean - theirs[0]) / theirs[1]).flatten()
    teacher = Teacher(network(1), ORIGIN, 12, normalisation, order)
    teacher.network[0].register_forward_hook(lambda _, given, __: seen.append(given[0]))
    criterion = distillation(teacher)
    images = torch.cat([(pixels - mean) / std, torch.zeros(2, 3, 8, 8)])
    logits, _, losses = forward(
        network(0).eval(), SimpleNamespace(images=images, targets=torch.arange(4)), criterion, nullcontext()
    )
    expected = functional.interpolate((pixels - theirs[0]) / theirs[1], (12, 12), mode="bilinear", antialias=True)
    torch.testing.assert_close(seen[0], expected)
    answers = teacher.network(expected)[:, [3, 0, 4, 1, 2]]
    torch.testing.assert_close(losses["distillation"], 0.5 * criterion.compare(logits, answers))


def test_a_pass_without_images_that_count_asks_no_teacher_and_has_a_loss_of_zero():
    teacher = Teacher(network(1), ORIGIN, 8)
    teacher.network.register_forward_hook(lambda *_: pytest.fail("asked"))
    _, loss, losses = forward(network(0), batch_of(0, filled=2), distillation(teacher), nullcontext())
    assert loss.item() == 0 and losses == {}
