"""scripts/amp_audit.py from the outside: a bad step, from training to its audit."""

import json

import torch

import main
from models import build_model
from scripts import amp_audit
from tests.helpers import QUIETLY, answer
from utils.config.groups.model import ModelSettings


def test_a_step_that_training_saved_is_reproduced_and_the_advice_mends_training(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    network = build_model(ModelSettings(arch="conv2"), classes=10, channels=1, image_size=8)
    with torch.no_grad():
        network.features[2].weight.mul_(1e6)
    torch.save(network.state_dict(), tmp_path / "planted.pt")
    flags = [*QUIETLY, "--weights", f"{tmp_path}/planted.pt", "--output", f"{tmp_path}/runs", "--max-steps", "3"]
    flags += "--lr 1e-12 --epochs 1 --batch-size 8 --max-val-batches 1".split()  # a CPU is slow at fp16
    main.main([*flags, "--amp", "fp16", "--dump-bad-batch"])
    assert "step 1 skipped, not finite: output of features.2" in capsys.readouterr().out
    (saved,) = (tmp_path / "runs").rglob("bad_batches/step00000001_rank0.pt")

    line = ("--batch", saved, "--output", tmp_path / "audit", "--fail-on-findings", "--device", "cpu")
    code, said = answer(amp_audit, line, capsys, monkeypatch)
    assert code == 1, said.err
    assert "reproduced: output of features.2, loss nan, scale 65536, fp16" in said.out
    advice = json.loads((tmp_path / "audit" / "amp_audit.json").read_text())
    assert [finding["layer"] for finding in advice["findings"]] == ["features.2"]

    assert main.main([*flags, *advice["recommendation"]["flags"].split()]) == 0
    assert "skipped" not in "".join(capsys.readouterr())
