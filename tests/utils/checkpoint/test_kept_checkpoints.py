"""Checkpoints of earlier commits are read as docs/run_folder.md promises.

``kept/format_N_of_COMMIT.pt.gz`` is the last.pt that COMMIT wrote of ``FLAGS``, cut in its last epoch but one. What is
expected of it was printed by that commit's own ``--evaluate`` and ``--resume``.
"""

import gzip
import re
from pathlib import Path

import pytest
import torch

from main import main
from models import load_model
from tests.end_to_end.processes import FINAL_LINE
from tests.test_documentation import PAGES
from utils.checkpoint.checkpoint import FORMAT

KEPT = sorted((Path(__file__).parent / "kept").glob("*.pt.gz"))
FLAGS = (
    "--arch timm/test_vit --model-kwargs embed_dim=8 num_heads=1 depth=1 patch_size=4 --image-size 8 --epochs 8 "
    "--max-steps 150 --ema-decay 0.9 --optimizer adamw --lr 0.03 --warmup-epochs 1 --device cpu --no-progress"
)
EVALUATED = {"top1": 26.3889, "loss": 2.0201}
CONTINUED = {"top1": 25.2778, "loss": 2.0092}


@pytest.fixture(params=KEPT, ids=lambda path: path.name.split(".")[0])
def kept(request, tmp_path):
    path = tmp_path / "begun" / "checkpoints" / "last.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.decompress(request.param.read_bytes()))
    return path


def figures_of(capsys, *flags):
    capsys.readouterr()
    assert main(["--device", "cpu", "--no-progress", *map(str, flags)]) == 0
    last = FINAL_LINE.match(capsys.readouterr().out.splitlines()[-1])
    return {name: float(last[name]) for name in ("top1", "loss")}


def test_the_promised_formats_are_kept():
    (promised,) = re.findall(r"Checkpoints of format ([\d, and]+) resume", PAGES["docs/run_folder.md"])
    kept_formats = {int(path.name.split("_")[1]) for path in KEPT}
    assert kept_formats == set(map(int, re.findall(r"\d+", promised)))
    assert max(kept_formats) == FORMAT


def test_it_is_evaluated_to_the_figures_of_its_commit(kept, capsys):
    # A rounding in float32 moves a loss by 1e-6 of itself, and an image between two classes now and then.
    assert figures_of(capsys, "--evaluate", "--resume", kept) == {
        "top1": pytest.approx(EVALUATED["top1"], abs=100 / 360),
        "loss": pytest.approx(EVALUATED["loss"], abs=1e-4),
    }


def test_it_is_continued_to_the_figures_of_its_commit(kept, capsys, tmp_path):
    # 34 steps at falling rates on other processors' roundings; one that forgets the optimizer's state ends 0.009 away.
    assert figures_of(capsys, "--resume", kept, "--output", tmp_path / "runs") == {
        "top1": pytest.approx(CONTINUED["top1"], abs=3 * 100 / 360),
        "loss": pytest.approx(CONTINUED["loss"], abs=2e-3),
    }


def test_its_network_is_loaded(kept):
    loaded = load_model(kept)
    state = torch.load(kept, weights_only=True)
    assert loaded.arch == state["arch"] and loaded.classes == tuple(state["classes"])
    torch.testing.assert_close(loaded.network.state_dict(), state["ema"]["model"], rtol=0, atol=0)
