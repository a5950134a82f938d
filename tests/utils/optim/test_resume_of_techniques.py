"""A run with techniques of the optimizer, interrupted and continued, ends with the bits of the uninterrupted one."""

import pytest
import torch

import main
from tests.end_to_end.processes import load
from utils.checkpoint.inventory import inventory

FLAGS = ("--device", "cpu", "--arch", "fc", "--epochs", "2", "--no-progress", "--deterministic")
MIXTURES = {
    "lookahead, layers, restarts": (
        "--lookahead 4 0.5 --layer-decay 0.7 --lr-cycle-epochs 0.4 --lr-cycle-decay 0.8 --lr-min 0.001 --warmup-epochs 0.2"
    ),
    "SAM, muon, fp16": (
        "--sam-rho 0.1 --optimizer muon --amp fp16 --init-scale 4194304 --layer-decay 0.7 --lookahead 5 0.8 --ema-decay 0.9"
    ),
    "SAM, accumulation, one cycle, arguments": (
        "--sam-rho 1 --sam-adaptive --optimizer adamw --accumulate 2 --lr-policy one-cycle --lr-base 0.002 "
        "--clip-grad-norm 1 --opt-eps 0.001 --opt-betas 0.8 0.95 --opt-kwargs amsgrad=true"
    ),
}


def equal(left, right, path=""):
    """Assert that two nested states hold the same, tensors to the bit."""
    if torch.is_tensor(left):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            equal(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for number, pair in enumerate(zip(left, right, strict=True)):
            equal(*pair, f"{path}/{number}")
    else:
        assert left == right, path


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("cut", ["10", "23"], ids=["within an epoch", "at its end"])
def test_interrupted_equals_uninterrupted(mixture, cut, tmp_path):
    states = []
    for name, stops in (("whole", ["31"]), ("cut", [cut, "31"])):
        line = [*FLAGS, *MIXTURES[mixture].split(), "--output", str(tmp_path / name)]
        for stop in stops:
            assert main.main([*line, "--resume", "auto", "--max-steps", stop]) == 0
        (folder,) = (tmp_path / name).glob("digits/fc/*")
        assert load(folder, "final.pt")["progress"]["skipped_steps"] > 0 or "fp16" not in mixture
        states.append({part: load(folder, "final.pt")[part] for part in ("model", "ema", "optimizer", "scaler")})
    equal(*states)


ADAMW = (*FLAGS, "--optimizer", "adamw")


def test_a_checkpoint_from_before_there_were_arguments_goes_on_as_it_was_and_takes_others_on_request(tmp_path, capsys):
    """Their settings were not in it: the same as a run that has none."""
    states = []
    for name in ("whole", "older"):
        line = [*ADAMW, "--output", str(tmp_path / name)]
        assert main.main([*line, "--max-steps", "10"]) == 0
        (folder,) = (tmp_path / name).glob("digits/fc/*")
        state = load(folder, "last.pt")
        loose = tmp_path / f"{name}.pt"
        for setting in ("opt_eps", "opt_betas", "opt_kwargs") if name == "older" else ():
            del state["settings"][setting]
        torch.save(state | {"contents": inventory(state)}, loose)
        resumed = ["--resume", str(loose), "--device", "cpu", "--no-progress", "--deterministic", "--max-steps", "12"]
        assert main.main([*resumed, "--output", str(tmp_path / f"{name} on")]) == 0
        (on,) = (tmp_path / f"{name} on").glob("digits/fc/*")
        states.append({part: load(on, "final.pt")[part] for part in ("model", "optimizer")})
    equal(*states)
    other = [*resumed, "--output", str(tmp_path / "other"), "--opt-eps", "0.5", "--opt-betas", "0.8", "0.9"]
    capsys.readouterr()
    assert main.main(other) == 2
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "--opt-eps 0.5",
        "--opt-betas 0.8 0.9",
    ]
    assert main.main([*other, "--resume-override"]) == 0
    (on,) = (tmp_path / "other").glob("digits/fc/*")
    group = load(on, "final.pt")["optimizer"]["param_groups"][0]
    assert (group["eps"], tuple(group["betas"])) == (0.5, (0.8, 0.9))
    assert "opt_eps0.5-opt_betas0.8_0.9" in on.name
    capsys.readouterr()
    assert main.main([*other, "--resume-override", "--opt-kwargs", "amsgrad=true"]) == 2
    assert "--opt-kwargs amsgrad=true" in capsys.readouterr().err, "whose state is another"
