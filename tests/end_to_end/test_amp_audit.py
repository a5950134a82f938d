"""scripts/amp_audit.py from the outside: answers to mistakes, and a bad step from training to its audit."""

import json
import sys

import torch

from models import build_model
from scripts import amp_audit
from scripts.common.command_line import run_tool
from tests.end_to_end.forked import Forked
from utils.config.groups.model import ModelSettings

AUDIT = "scripts/amp_audit.py"

# Each: the arguments, and the words that the one line must hold.
MISTAKES = [
    ("--batch missing.pt", ("--batch missing.pt", "no such")),
    ("--batch weights.pt", ("--batch weights.pt", "--dump-bad-batch", "passes")),
    ("--batch text.pt", ("--batch text.pt", "safely")),
    ("--bogus", ("'--bogus' is not a flag",)),
    ("--batches none", ("--batches", "'none'", "whole number")),
    ("--arch resnet19", ("resnet19", "resnet18")),
]


def test_mistakes_are_answered_with_2_and_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(1)}, tmp_path / "weights.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    before = sorted(tmp_path.iterdir())
    for line, words in MISTAKES:
        monkeypatch.setattr(sys, "argv", [amp_audit.NAME, *line.split()])
        assert run_tool(amp_audit.NAME, amp_audit.main) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("amp_audit.py: ") and err.count("\n") == 1
        assert all(word in err for word in words), err
    assert sorted(tmp_path.iterdir()) == before


def test_a_step_that_training_saved_is_reproduced_and_the_advice_mends_training(tmp_path):
    torch.manual_seed(0)
    network = build_model(ModelSettings(arch="conv2"), classes=10, channels=1, image_size=8)
    with torch.no_grad():
        network.features[2].weight.mul_(1e6)
    torch.save(network.state_dict(), tmp_path / "planted.pt")
    flags = ["--weights", tmp_path / "planted.pt", "--output", tmp_path / "runs", "--max-steps", "3", "--lr", "1e-12"]
    flags += ["--no-progress", "--epochs", "1", "--batch-size", "8"]  # a CPU is slow at convolutions in fp16
    naive = Forked(*flags, "--amp", "fp16", "--dump-bad-batch")
    assert "step 1 skipped, not finite: output of features.2" in naive.communicate()[0]
    (saved,) = (tmp_path / "runs").rglob("bad_batches/step00000001_rank0.pt")

    audit = Forked("--batch", saved, "--output", tmp_path / "audit", "--fail-on-findings", program=AUDIT)
    out, err = audit.communicate()
    assert audit.returncode == 1, err
    assert "reproduced: output of features.2, loss nan, scale 65536, fp16" in out
    advice = json.loads((tmp_path / "audit" / "amp_audit.json").read_text())
    assert [finding["layer"] for finding in advice["findings"]] == ["features.2"]

    mended = Forked(*flags, *advice["recommendation"]["flags"].split())
    printed = mended.communicate()
    assert mended.returncode == 0 and "skipped" not in "".join(printed)
