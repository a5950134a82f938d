"""The network of CIFAR-10's speed records: its first layer whitens, its convolutions begin as the identity."""

import copy

import pytest
import torch
from torch import nn

from models.airbench import Airbench, whitening_filters
from tests.end_to_end.processes import load
from tests.helpers import trained
from tests.utils.test_train_validation import make


def images_with_correlated_pixels(count=200, size=12):
    torch.manual_seed(0)
    blurred = nn.functional.avg_pool2d(torch.randn(count, 3, size + 2, size + 2), 3, stride=1)
    return 2 * blurred + 0.3 * blurred.roll(1, 1)


def test_responses_of_the_filters_do_not_correlate_and_have_a_mean_square_of_one():
    images = images_with_correlated_pixels()
    responses = nn.functional.conv2d(images, whitening_filters(images))
    responses = responses.permute(0, 2, 3, 1).reshape(-1, 12).double()
    variances = torch.diagonal(responses.T @ responses / len(responses))
    assert torch.corrcoef(responses.T).fill_diagonal_(0).abs().max() < 0.01
    assert variances.min() > 0.9 and variances.max() < 1.0001  # 5e-4 is added to the variances, of which some are small


def test_the_filters_do_not_depend_on_the_chunks_in_which_patches_are_summed(monkeypatch):
    images = images_with_correlated_pixels(50)
    whole = whitening_filters(images)
    monkeypatch.setattr("models.airbench.CHUNK", 7)
    torch.testing.assert_close(whitening_filters(images).abs(), whole.abs(), rtol=1e-3, atol=1e-4)


def test_the_first_layer_holds_each_filter_and_its_negative_and_does_not_train():
    model = Airbench(10, 3, 32)
    model.start_from_images(images_with_correlated_pixels())
    weight = model.whitening.weight
    assert weight.shape == (24, 3, 2, 2) and not weight.requires_grad
    assert torch.equal(weight[:12], -weight[12:]) and model.whitening.bias.requires_grad
    assert torch.equal(model.whitening.bias, torch.zeros(24))


def test_responses_are_not_rounded_in_mixed_precision():
    model = Airbench(10, 3, 32)
    images = images_with_correlated_pixels(10)
    model.start_from_images(images)
    responses = model.whitening(images)
    seen = []
    model.features[0].register_forward_pre_hook(lambda _, given: seen.extend(given))
    with torch.autocast("cpu", torch.bfloat16):
        model(images)
    assert torch.equal(seen[0], responses)


def test_a_convolution_begins_as_the_identity_on_the_channels_that_it_receives():
    first = Airbench(10, 3, 32).features[1].conv1
    images = torch.randn(2, 24, 6, 6)
    torch.testing.assert_close(first(images)[:, :24], images)


def test_the_logits_are_divided_by_the_number_of_features_and_the_head_has_unit_spread():
    model = Airbench(10, 3, 32).eval()
    assert model.classifier.weight.std().item() == pytest.approx(1)
    images = torch.randn(2, 3, 32, 32)
    features = model.features(model.whitening(images)).amax((2, 3))
    torch.testing.assert_close(model(images), features @ model.classifier.weight.T / 256)


def test_it_has_as_many_weights_as_airbench94():
    sizes = [24 * 12 + 24, 9 * (24 * 64 + 64 * 64), 9 * (64 * 256 + 256 * 256), 9 * 2 * 256 * 256, 256 * 10]
    norms = 2 * 2 * (64 + 256 + 256)
    assert sum(parameter.numel() for parameter in Airbench(10, 3, 32).parameters()) == sum(sizes) + norms


FLAGS = ("--arch", "airbench", "--max-steps", 1, "--optimizer", "muon-sgd")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("airbench"), *FLAGS)


def test_a_run_begins_with_filters_of_its_training_images(run):
    begun = load(run, "initial.pt")["model"]["whitening.weight"]
    loader = make("--arch", "airbench").train_loader
    filters = whitening_filters(loader.first_images(5000))
    torch.testing.assert_close(begun, torch.cat([filters, -filters]))
    assert torch.equal(load(run, "last.pt")["model"]["whitening.weight"], begun)


def test_weights_that_are_given_keep_their_own_filters(run, tmp_path):
    weights = load(run, "last.pt")
    weights["model"]["whitening.weight"] = torch.full_like(weights["model"]["whitening.weight"], 0.5)
    torch.save({"model": weights["model"]}, tmp_path / "weights.pt")
    begun = load(trained(tmp_path, *FLAGS, "--weights", tmp_path / "weights.pt"), "initial.pt")
    begun = begun["model"]["whitening.weight"]
    assert torch.equal(begun, torch.full_like(begun, 0.5))


def test_all_ranks_see_the_same_first_images_without_augmentation_of_an_epochs_order():
    one = make("--arch", "fc", "--augment", "shift").train_loader
    other = copy.copy(one)
    other.plan = make("--arch", "fc").train_loader.plan.__class__(
        one.plan.num_samples, one.plan.global_batch_size, 16, one.plan.seed, rank=1, world_size=2
    )
    first = one.first_images(200)
    assert 200 <= len(first) < 264 and torch.equal(first[:200], other.first_images(200)[:200])
    plain = one.transform.evaluation(
        one.source.pixels[torch.from_numpy(next(iter(one.plan.micro_batches(0, 0))).indices)]
    )
    assert torch.equal(first[: len(plain)], plain[: len(first)])
    assert len(one.first_images(10**6)) == one.plan.num_samples


def test_a_compiled_network_shares_no_gradient_among_equal_maxima():
    """Compiled code in half precision finds none of them (pytorch issue 186799), and divides the share by 0."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    model = Airbench(10, 3, 32, widths=(8, 16))
    images = images_with_correlated_pixels(3, size=32)
    compiled = torch.compile(model, backend=backend)(images)
    torch.testing.assert_close(compiled, model(images))
    assert graphs and "amax" not in "".join(graphs)
