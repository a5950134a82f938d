"""Initialisation: measured spreads against the papers' formulas."""

import math

import pytest
import torch
from torch import nn

from models.build import build_model
from models.initialisation import SCHEMES, initialise, shapes_alone
from utils.config.groups.model import INITIALISATIONS, ModelSettings
from utils.config.settings import UserError


def layers():
    """A convolution of 32 x 9 inputs and 64 x 9 outputs, one along a line, a linear layer of 500 to 300, and norms."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "conv": nn.Conv2d(32, 64, 3),
            "conv1d": nn.Conv1d(40, 80, 5),
            "linear": nn.Linear(500, 300),
            "norm": nn.BatchNorm2d(64),
            "layer_norm": nn.LayerNorm(64),
            "embedding": nn.Embedding(10, 4),
        }
    )


FANS = {"conv": (32 * 9, 64 * 9), "conv1d": (40 * 5, 80 * 5), "linear": (500, 300)}  # in, out
VARIANCES = {
    "kaiming_normal": lambda fan_in, fan_out: 2 / fan_in,
    "kaiming_uniform": lambda fan_in, fan_out: 2 / fan_in,
    "xavier_normal": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "xavier_uniform": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
}


@pytest.mark.parametrize("scheme", VARIANCES)
@pytest.mark.parametrize("name", FANS)
def test_weights_have_the_mean_and_spread_of_the_formula(scheme, name):
    model = layers()
    initialise(model, scheme)
    weight = model[name].weight.detach()
    std = math.sqrt(VARIANCES[scheme](*FANS[name]))
    assert weight.std().item() == pytest.approx(std, rel=0.03)  # at least 16,000 weights: about 5 sigma
    assert abs(weight.mean().item()) < 5 * std / math.sqrt(weight.numel())


@pytest.mark.parametrize("scheme", VARIANCES)
def test_biases_are_zero_and_norms_and_embeddings_are_left_alone(scheme):
    model = layers()
    untouched = layers()
    initialise(model, scheme)
    assert all(not model[name].bias.any() for name in FANS)
    for name in ("norm", "layer_norm", "embedding"):
        for key, value in untouched[name].state_dict().items():
            assert torch.equal(model[name].state_dict()[key], value)


@pytest.mark.parametrize("arch", ["conv2", "timm/test_resnet"])
def test_default_leaves_the_weights_as_the_library_made_them(arch):
    def build(scheme):
        torch.manual_seed(0)
        settings = ModelSettings(arch=arch, init=scheme)
        return build_model(settings, classes=10, channels=3, image_size=32)

    model = build("default")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    initialise(model, "default")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    changed = build("xavier_uniform").state_dict()
    weights = [name for name, value in before.items() if value.ndim > 1]
    assert len(weights) > 3 and not any(torch.equal(changed[name], before[name]) for name in weights)


def test_a_scheme_for_convolutions_is_the_other_and_leaves_linear_layers_alone():
    ours = layers()
    others = layers()
    untouched = layers()
    initialise(ours, "kaiming_normal_conv")
    initialise(others, "kaiming_normal")
    for name in ("conv", "conv1d"):
        torch.testing.assert_close(ours[name].weight.std(), others[name].weight.std(), rtol=0.03, atol=0)
        assert not ours[name].bias.any()
    for key, value in untouched["linear"].state_dict().items():
        assert torch.equal(ours["linear"].state_dict()[key], value)


@pytest.mark.parametrize("arch", ["timm/test_vit", "timm/deit_tiny_distilled_patch16_224"])
def test_positions_are_embedded_by_sines_and_cosines_of_column_and_row_and_nothing_else_changes(arch):
    def build(init):
        torch.manual_seed(0)
        return build_model(ModelSettings(arch=arch, init=init), classes=5, channels=3, image_size=48)

    model = build("sincos_positions")
    untouched = build("default").state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, untouched[name])}
    assert changed == {"pos_embed"} and model.pos_embed.requires_grad
    tokens = model.pos_embed.shape[1] - 9
    width = model.pos_embed.shape[2]
    assert tokens in (1, 2) and not model.pos_embed[0, :tokens].any()
    quarter = width // 4
    for place, found in enumerate(model.pos_embed[0, tokens:]):
        row, column = divmod(place, 3)
        angles = [10_000 ** (-k / (quarter - 1)) for k in range(quarter)]
        expected = [wave(at * angle) for at in (column, row) for wave in (math.sin, math.cos) for angle in angles]
        torch.testing.assert_close(found.detach(), torch.tensor(expected))


@pytest.mark.parametrize("settings", [{"arch": "conv2"}, {"arch": "timm/resnet18"}, {"arch": "torchvision/vit_b_16"}])
def test_a_network_that_learns_no_positions_in_a_grid_is_refused(settings):
    needs = "--init sincos_positions: needs a network that learns an embedding of each"
    with shapes_alone(), pytest.raises(UserError, match=needs):
        build_model(ModelSettings(init="sincos_positions", **settings), classes=5, channels=3, image_size=32)


def test_there_is_a_formula_for_each_scheme_that_can_be_chosen():
    others = {"default", "kaiming_normal_conv", "sincos_positions"}
    assert {"default", "sincos_positions", *SCHEMES} == set(INITIALISATIONS) == {*others, *VARIANCES}
