"""What an optimizer's first step needs, against what it makes."""

import pytest
import torch

from main import main
from models.build import build_model
from utils.config.arguments import parse
from utils.config.groups.model import ModelSettings
from utils.optim import build
from utils.optim.build import step_bytes
from utils.optim.optimizers import build_optimizers


@pytest.mark.parametrize("name", ["lamb", "adafactor", "adamp", "novograd", "madgrad"])  # some look at numbers
def test_the_need_is_the_state_of_a_true_step_and_what_one_operation_holds_besides(name):
    model = build_model(ModelSettings(arch="conv2"), classes=10, channels=1, image_size=8)
    settings = parse(["--optimizer", name]).optimisation
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    needed = step_bytes(settings, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(one.grad is None for one in model.parameters())
    (optimizer,) = build_optimizers(settings, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert state < needed <= state + 3 * largest + 100, "two that it reads and one; counters of 4 or 8 bytes"


def test_an_optimizer_that_cannot_fit_is_one_line_before_anything_begins(tmp_path, monkeypatch, capsys):
    """timm's kron multiplies conv2's four preconditioners of a filter first: 64**4 * 3**4 or 64**4 * 64**2 numbers.

    An operation that makes them anew, in another order, holds both.
    """
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)
    monkeypatch.setattr(build, "memory_bytes", lambda device: 24 * 10**9)
    assert main(["--device", "cpu", "--arch", "conv2", "--optimizer", "kron", "--output", str(tmp_path)]) == 2
    # On a busy machine, another line may say that the process is alive.
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("main.py: ")]
    assert line == (
        "main.py: --optimizer kron: its first step on this network needs 550 GB, and the cpu has 24 GB; choose another, "
        "or save memory (timm's kron: python -m pip install opt_einsum, or --opt-kwargs memory_save_mode=all_diag)"
    )
    assert not any(tmp_path.iterdir())
    diagonal = parse(["--optimizer", "kron", "--opt-kwargs", "memory_save_mode=all_diag"]).optimisation
    model = build_model(ModelSettings(arch="conv2"), classes=10, channels=1, image_size=8)
    assert 0 < step_bytes(diagonal, model) < 10**7
