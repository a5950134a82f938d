"""The recomputed statistics against the mean and variance of what the layers are given, on any number of ranks."""

import copy
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.utils.test_train_validation import make
from utils.optim.batch_norm_statistics import layers_with_statistics, recompute

CPU = torch.device("cpu")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Passes:
    """A loader that hands out ``images``; ``rank`` of ``world_size`` takes every so-manieth."""

    image_shape = (3, 6, 6)

    def __init__(self, images, rank=0, world_size=1):
        self.images = images
        self.rank = rank
        self.world_size = world_size

    def shared_out(self, epoch, steps):
        mine = self.images[self.rank :: self.world_size]
        return len(self.images), (SimpleNamespace(images=images.clone()) for images in mine)


def recomputed(model, images, autocast=None):
    """A copy of ``model`` with the statistics over ``images``, a list of passes."""
    model = copy.deepcopy(model)
    rank = SimpleNamespace(device=images[0].device, world_size=1, all_gather=lambda row: [row])
    recompute(model, Passes(images), 0, 1, rank, autocast or nullcontext(), lambda: None)
    return model


def passes(*sizes, shape=(3, 6, 6)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, *shape, generator=generator) * 2 + 3 for size in sizes]


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(128, 5),
        nn.BatchNorm1d(5),
    )
    for layer in (model[2], model[7]):
        nn.init.normal_(layer.weight)
    return model


def given(model, images):
    """What each batch-norm layer is given when it normalises by the batch and dropout is off, over all passes."""
    model = copy.deepcopy(model)
    seen = {}
    model.train()
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.eval()
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0].detach().double())
            )
    for each in images:
        model(each)
    return {name: torch.cat(values).transpose(0, 1).flatten(1) for name, values in seen.items()}


def assert_are_of(model, expected):
    """The statistics of ``model``'s layers are those of ``expected``, (channels, values) for each layer's name."""
    for name, values in expected.items():
        layer = model.get_submodule(name)
        torch.testing.assert_close(layer.running_mean.double(), values.mean(1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.running_var.double(), values.var(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(64, 64), (33, 32, 2), (7,)])
def test_statistics_are_mean_and_unbiased_variance_of_all_that_a_layer_is_given(sizes):
    images = passes(*sizes)
    model = network()
    expected = given(model, images)
    assert list(expected) == ["0", "2", "7"]
    assert_are_of(recomputed(model, images), expected)


def test_nothing_but_the_statistics_is_changed_and_no_random_number_is_drawn():
    model = network()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    after = recomputed(model, passes(16, 8))
    changed = [name for name, value in after.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == [f"{layer}.{name}" for layer in (0, 2, 7) for name in ("running_mean", "running_var")]
    assert torch.equal(state, torch.get_rng_state())
    assert all(not module._forward_pre_hooks for module in after.modules())
    assert [layer.momentum for layer in layers_with_statistics(after)] == [0.1] * 3


def test_while_passes_go_on_the_network_can_be_saved_as_it_was():
    model = network()
    alone = Thread(0, [None], threading.Barrier(1))
    seen = []
    before = copy.deepcopy(model.state_dict())
    between = lambda: seen.append(copy.deepcopy(model.state_dict()))  # noqa: E731
    recompute(model, Passes(passes(16, 16, 16)), 0, 1, alone, nullcontext(), between)
    assert len(seen) == 3
    assert all(torch.equal(value, before[name]) for state in seen for name, value in state.items())


# ------------------------------------------------------------------------------------------- ranks


class Thread:
    """A rank that is a thread: what ``recompute`` asks of ``Distributed``."""

    def __init__(self, rank, rows, barrier):
        self.device = CPU
        self.rank = rank
        self.rows = rows
        self.barrier = barrier
        self.world_size = len(rows)

    def all_gather(self, row):
        self.rows[self.rank] = row
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_any_number_of_ranks_gets_the_same_bits(world_size):
    images = passes(17, 16, 16, 16, 16, 16, 16)
    model = network()
    expected = recomputed(model, images).state_dict()
    models = [copy.deepcopy(model) for _ in range(world_size)]
    for rank in range(1, world_size):
        models[rank][2].running_mean.fill_(rank)  # what ranks differ in before has no part in it
    rows = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=60)
    rounds = [0] * world_size

    def run(rank):
        def between():
            rounds[rank] += 1

        loader = Passes(images, rank, world_size)
        recompute(models[rank], loader, 0, 1, Thread(rank, rows, barrier), nullcontext(), between)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rounds == [-(-len(images) // world_size)] * world_size
    for model in models:
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


# -------------------------------------------------------------------------------- kinds of networks


def test_of_a_network_without_such_statistics_nothing_is_read():
    for model in (nn.Linear(3, 3), nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.GroupNorm(1, 3))):
        recompute(model, None, 0, 1, None, None, None)


class KeepsFirstFrozen(nn.Sequential):
    """As networks do whose first layers are not to be tuned."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


def test_a_layer_that_the_network_keeps_in_evaluation_mode_keeps_its_statistics():
    model = KeepsFirstFrozen(*network()).train()
    images = passes(16, 16)
    after = recomputed(model, images)
    assert torch.equal(after[0].running_mean, torch.zeros(3)) and torch.equal(after[0].running_var, torch.ones(3))
    second = torch.cat([model[1](model[0](each)) for each in images])
    torch.testing.assert_close(after[2].running_mean, second.mean((0, 2, 3)), rtol=1e-4, atol=1e-4)


class Twice(nn.Module):
    """One layer called twice in a pass, another never."""

    def __init__(self):
        super().__init__()
        self.shared = nn.BatchNorm2d(3)
        self.unused = nn.BatchNorm2d(3)

    def forward(self, images):
        return self.shared(self.shared(images) * 3 + 1)


def test_a_layer_called_twice_counts_both_and_one_never_called_keeps_its_statistics():
    images = passes(16, 8)
    model = recomputed(Twice(), images)
    assert_are_of(model, given(Twice(), images))
    assert torch.equal(model.unused.running_mean, torch.zeros(3))
    assert torch.equal(model.unused.running_var, torch.ones(3))


@pytest.mark.parametrize("layer", [partial(nn.BatchNorm2d, momentum=None), nn.SyncBatchNorm])
def test_layers_that_sum_up_or_synchronise_are_treated_alike(layer, monkeypatch):
    # Among several processes a SyncBatchNorm that trains would wait for the others, and on a CPU refuse.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    images = passes(16, 16)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer(4))
    plain = nn.Sequential(model[0], nn.BatchNorm2d(4))
    assert_are_of(recomputed(model, images), given(plain, images))


@pytest.mark.parametrize("value", [float("inf"), 1e30])  # of the second the mean is finite, the variance is not
def test_statistics_that_would_not_be_finite_leave_the_layers_channel_as_it_was(value):
    images = passes(16, 16)
    images[1][3, 1, 2, 2] = value
    model = network()
    after = recomputed(model, images)
    assert after[0].running_mean[1] == 0 and after[0].running_var[1] == 1
    assert (after[0].running_mean[[0, 2]] > 1).all()
    assert all(value.isfinite().all() for value in after.state_dict().values())


def test_no_variance_is_below_zero():
    images = [torch.linspace(0.1, 1.7, 64).view(1, 64, 1, 1).expand(size, -1, 3, 3).clone() for size in (33, 32, 2)]
    after = recomputed(nn.Sequential(nn.BatchNorm2d(64)), images)
    assert torch.equal(after[0].running_mean, images[0][0, :, 0, 0])
    assert after[0].running_var.min() >= 0 and after[0].running_var.max() < 1e-9


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_they_are_those_of_half_precision_activations_gathered_in_float32(dtype, device):
    images = [each.to(device) for each in passes(64, 64)]
    model = network().to(device)
    exact = recomputed(model, images)
    half = recomputed(model, images, torch.autocast(device, dtype=dtype))
    with torch.autocast(device, dtype=dtype):
        assert_are_of(half, given(model, images))
    assert all(half.get_submodule(name).running_var.dtype == torch.float32 for name in ("0", "2", "7"))
    torch.testing.assert_close(half[0].running_mean, exact[0].running_mean)  # nothing before it is rounded
    assert not torch.allclose(half[2].running_mean, exact[2].running_mean, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------- in the loop


def batch_norm_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))


@pytest.mark.parametrize(("batches", "images"), [(3, 3 * 50), (16, 16 * 50), (1000, 1437)])
def test_before_validation_the_average_has_the_statistics_of_the_epochs_first_training_batches(batches, images):
    flags = f"--ema-decay 0.9 --ema-bn-batches {batches} --batch-size 50 --augment shift --lr 0.01"
    traval = make(*flags.split(), model=batch_norm_network())
    traval.train(0)
    traval.progress.finish_epoch()
    traval.train(1)
    averaged = copy.deepcopy(traval.ema.module[1].running_mean)
    traval.validation(1, report=False)
    loader = traval.train_loader
    seen = [loader.plan.step_indices(1, step) for step in range(min(batches, loader.steps_per_epoch))]
    order = torch.cat([torch.from_numpy(indices.copy()) for indices in seen])
    assert len(order) == images
    pixels = loader.transform.training(loader.source.pixels[order], order.numpy(), 1).flatten(1)  # augmented
    torch.testing.assert_close(traval.ema.module[1].running_mean, pixels.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(traval.ema.module[1].running_var, pixels.var(0), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(averaged, pixels.mean(0), atol=1e-3)
