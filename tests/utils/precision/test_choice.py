"""--amp auto: chosen by measurement, told, recorded, and not chosen again by a resume."""

import pytest
import torch
from torch import nn

import main
from tests.end_to_end.processes import load
from tests.helpers import QUIETLY, trained
from utils.config.arguments import parse
from utils.precision import choice
from utils.precision.choice import choose, seconds_of_passes, with_chosen_amp
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")
SHAPE = (4, 1, 8, 8)


@pytest.fixture
def units(monkeypatch):
    monkeypatch.setattr(choice, "has_bf16_units", lambda: True)


@pytest.mark.parametrize(("ratio", "amp"), [(0.5, "bf16"), (0.89, "bf16"), (0.91, "off"), (30, "off")])
def test_bf16_is_taken_where_it_saves_a_tenth(units, monkeypatch, ratio, amp):
    monkeypatch.setattr(choice, "seconds_of_passes", lambda *_: [2.0, 2.0 * ratio])
    chosen, why = choose(nn.Linear(1, 1), SHAPE, CPU)
    assert chosen == amp and f"{ratio:.2f} times as long as in float32" in why


def test_without_units_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(choice, "has_bf16_units", lambda: False)
    monkeypatch.setattr(choice, "seconds_of_passes", lambda *_: pytest.fail("measured"))
    assert choose(nn.Linear(1, 1), SHAPE, CPU)[0] == "off"


def test_measuring_changes_neither_network_nor_random_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(144, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    times = seconds_of_passes(model, SHAPE, ("off", "bf16"), CPU)
    assert len(times) == 2 and min(times) > 0
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


FLAGS = [*QUIETLY, "--arch", "fc", "--amp", "auto", "--epochs", "2", "--resume", "auto"]


def test_a_run_says_and_records_the_choice_and_a_resume_keeps_it(units, monkeypatch, workplace, capsys):
    monkeypatch.setattr(choice, "seconds_of_passes", lambda *_: [1.0, 0.5])
    run = trained(workplace / "runs", *FLAGS, "--max-steps", 5)
    assert "--amp auto: bf16, in bfloat16 forward and backward pass take 0.50" in capsys.readouterr().out
    assert load(run, "last.pt")["settings"]["amp"] == "bf16" and "\namp: bf16" in (run / "config.yaml").read_text()
    monkeypatch.setattr(choice, "seconds_of_passes", lambda *_: [0.5, 1.0])
    assert main.main(FLAGS) == 0
    assert "--amp auto" not in capsys.readouterr().out
    assert len([*workplace.glob("runs/digits/fc/*")]) == 1 and load(run, "final.pt")["settings"]["amp"] == "bf16"


def test_a_batch_norm_that_sees_one_value_per_image_is_measured_with_one_image_a_pass(units, monkeypatch):
    shapes = []
    monkeypatch.setattr(choice, "choose", lambda model, shape, device: shapes.append(shape) or ("off", "measured"))
    args = parse(["--amp", "auto", "--batch-size", "1"])
    with_chosen_amp(args, nn.Linear(1, 1), SHAPE[1:], Distributed(RankInfo(), args.run))
    assert shapes == [(2, *SHAPE[1:])]


def test_a_plan_says_that_the_format_will_be_measured(capsys):
    assert main.main(["--device", "cpu", "--amp", "auto", "--dry-run"]) == 0
    assert "bf16 or float32, by measurement when the run begins" in capsys.readouterr().out
