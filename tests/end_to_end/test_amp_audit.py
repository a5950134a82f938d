"""scripts/amp_audit.py from the outside: a bad step, from training to its audit."""

import json

import torch

from models import build_model
from tests.end_to_end.forked import Forked
from utils.config.groups.model import ModelSettings

AUDIT = "scripts/amp_audit.py"


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
