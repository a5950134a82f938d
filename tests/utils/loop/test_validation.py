"""Validation: every image once, in evaluation mode, in as many rounds on every rank."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import nn

from tests.utils.test_train_validation import CPU, make
from utils.config import plugins
from utils.data.loaders import Batch, ValidationLoader
from utils.loop.validation import validate
from utils.record.writer import Writer

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(20, 1, 4, 4, generator=GENERATOR)
TARGETS = torch.randint(0, 6, (20,), generator=GENERATOR)


class Loader:
    """Batches of 6, 6, 6 and 2 of the images above, of which ``rank`` has its part; ``empty`` holds no readable one."""

    num_batches = 4
    world_size = 1
    is_cut = False
    groups = None
    image_shape = IMAGES.shape[1:]

    def __init__(self, rank=0, world_size=1, empty=None, targets=TARGETS):
        self.targets = targets
        self.multilabel = targets.ndim > 1
        self.numbers = range(rank, 4, world_size)
        self.rounds = -(-4 // world_size)
        self.empty = empty

    def __len__(self):
        return len(self.numbers)

    def batches(self):
        for number in self.numbers:
            part = np.arange(6 * number, min(6 * number + 6, 20))
            count = 0 if number == self.empty else len(part)
            yield Batch(
                IMAGES[part], self.targets[part][:count], part, number, unreadable=("bad",) if not count else ()
            )


class Watch:
    """Stands for ``Distributed`` and ``BadImages``, and remembers what happens in which order."""

    device = CPU

    def __init__(self):
        self.seen = []
        self.sums = None
        self.class_sums = None

    def broadcast_buffers(self, model):
        self.seen.append(("buffers", model))

    def all_reduce_sum(self, sums):
        if sums.dtype == torch.int64:
            self.class_sums = sums
        else:
            self.sums = sums
        return sums

    def all_reduce_max(self, numbers):
        assert numbers in ([0], [6]), "a rank without a batch does not know the number of classes"
        return [6.0]

    def gather(self, mine):
        return [mine]

    def run_on_rank0(self, function):
        return function()

    def note(self, batch):
        self.seen.append(("noted", batch.number))

    def between(self):
        self.seen.append(("between",))


class Bars(Writer):
    def bar(self, *arguments):
        self.arguments = arguments
        self.steps = []
        return contextlib.nullcontext(self)

    def update(self, steps):
        self.steps.append(steps)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 6))


def run(model, loader, autocast=None, writer=None):
    watch = Watch()
    context = autocast or contextlib.nullcontext()
    return validate(model, loader, watch, context, writer or Bars(), watch, watch.between), watch


def test_the_network_is_evaluated_as_it_is_with_rank_0s_buffers_and_then_trains_on():
    model = network()
    kept = []
    before = copy.deepcopy(model.state_dict())
    model.register_forward_hook(lambda module, _, output: kept.append((module.training, output.requires_grad)))
    report, watch = run(model, Loader())
    assert kept == [(False, False)] * 4
    assert watch.seen[0] == ("buffers", model), "before anything is computed"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(IMAGES)
    assert report.count == 20
    assert report.top1 == pytest.approx(100 * (logits.argmax(1) == TARGETS).double().mean().item())
    assert report.loss == pytest.approx(nn.functional.cross_entropy(logits, TARGETS).item(), rel=1e-6)


def test_of_several_labels_the_figures_are_those_of_all_answers_at_once():
    targets = (torch.rand(20, 6, generator=GENERATOR) < 0.4).float()
    report, _ = run(network(), Loader(targets=targets))
    with torch.no_grad():
        logits = network().eval()(IMAGES)
    assert report.count == 20
    assert report.map == pytest.approx(100 * average_precision_score(targets, logits))
    assert report.loss == pytest.approx(nn.functional.binary_cross_entropy_with_logits(logits, targets).item())


def test_a_users_metric_of_yes_or_no_is_its_exact_share_of_all_images(monkeypatch):
    right = {"right": lambda logits, targets: logits.argmax(1) == targets}
    monkeypatch.setattr(plugins, "added", lambda kind: right if kind == "metric" else {})
    report, _ = run(network(), Loader())
    assert report.own["right"] == pytest.approx(report.top1 / 100, rel=1e-14) and report.top1 > 0


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_take_disjoint_parts_in_as_many_rounds_and_their_sums_are_those_of_one(world_size):
    model = network()
    (whole, alone) = run(network(), Loader())
    watches = [run(model, Loader(rank, world_size))[1] for rank in range(world_size)]
    assert torch.equal(sum(watch.sums for watch in watches), alone.sums)
    assert torch.equal(sum(watch.class_sums for watch in watches), alone.class_sums)
    rounds = [watch.seen.count(("between",)) for watch in watches]
    assert rounds == [-(-4 // world_size)] * world_size
    noted = [number for watch in watches for told, number in filter(lambda seen: seen[0] == "noted", watch.seen)]
    assert sorted(noted) == [0, 1, 2, 3] and whole.count == 20


def test_a_batch_without_a_readable_image_is_told_and_not_computed():
    computed = []
    model = network()
    model.register_forward_hook(lambda *_: computed.append(1))
    report, watch = run(model, Loader(empty=1))
    assert len(computed) == 3 and report.count == 14
    assert [seen for seen in watch.seen if seen[0] == "noted"] == [("noted", number) for number in range(4)]


def test_the_bar_counts_this_ranks_batches():
    for rank, steps in ((0, [True, True]), (2, [True, False])):
        writer = Bars()
        run(network(), Loader(rank, 3), writer=writer)
        assert writer.arguments == (sum(steps), 0, "Validation", "batch") and writer.steps == steps


def test_the_forward_pass_and_no_more_is_computed_in_half_precision():
    kinds = []
    model = network()
    model[3].register_forward_hook(lambda _, __, output: kinds.append(output.dtype))
    report, watch = run(model, Loader(), autocast=torch.autocast("cpu", torch.bfloat16))
    assert kinds == [torch.bfloat16] * 4 and watch.sums.dtype == torch.float64 and report.count == 20


def test_the_loader_deals_whole_batches_in_turn():
    loader = make("--val-batch-size", "100").validation_loader
    for rank, numbers in enumerate(([0, 2], [1, 3])):
        part = ValidationLoader(loader.source, 100, loader.transform, rank, 2)
        assert (len(part), part.rounds, part.num_batches) == (2, 2, 4)
        assert [batch.number for batch in part.batches()] == numbers
