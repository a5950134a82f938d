"""``--arch hf_hub:ORG/NAME`` is timm's network of that repository, also offline, and later whatever happens there."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants

import main
from models import build_model, load_model
from models.load import read_checkpoint
from scripts import export
from tests.helpers import trained
from tests.models.test_pretrained import tree  # noqa: F401 - a fixture
from tests.scripts.test_export_zoo import reloads_in_this_process  # noqa: F401 - a fixture
from utils.config import hub_networks
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError

ARCH = "hf_hub:someone/small_vit"
FIRST, SECOND = 40 * "a", 40 * "b"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache with a network of two classes, and no connection; gives what makes a revision the newest."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port that discards: nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_networks, "_known", {})
    folder = tmp_path / "cache/models--someone--small_vit"

    def publish(revision, **arguments):
        torch.manual_seed(1)
        network = timm.create_model("test_vit", num_classes=2, img_size=64, **arguments).eval()
        place = folder / "snapshots" / revision
        config = {"mean": [0.4] * 3, "std": [0.2] * 3, "input_size": [3, 64, 64], "crop_pct": 1.0}
        timm.models.save_for_hf(
            network,
            place,
            model_config={"label_names": ["china", "flower"], "pretrained_cfg": config},
            model_args={"img_size": 64, **arguments},
            safe_serialization=True,
        )
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs/main").write_text(revision)
        return network

    return publish


def build(arch=ARCH, classes=2, size=64, **more):
    return build_model(ModelSettings(arch=arch, **more), classes=classes, channels=3, image_size=size).eval()


def test_a_network_of_the_hub_has_timms_outputs_with_its_arguments_and_weights(cache):
    published = cache(FIRST, qk_norm=True)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        for arch in (ARCH, ARCH.replace("_", "-", 1), f"{ARCH}@{FIRST}"):
            assert torch.equal(build(arch, pretrained=True)(images), published(images))
    theirs = timm.create_model(ARCH, pretrained=True)
    assert theirs.state_dict().keys() == build(pretrained=True).state_dict().keys()
    assert not torch.equal(build().head.weight, published.head.weight), "without --pretrained as timm: random weights"


def test_a_repository_names_no_file_to_load(cache, tmp_path):
    cache(FIRST)
    file = tmp_path / "cache/models--someone--small_vit/snapshots" / FIRST / "config.json"
    config = json.loads(file.read_text())
    config["model_args"]["checkpoint_path"] = str(tmp_path / "missing.pt")
    file.write_text(json.dumps(config))
    assert build().patch_embed.img_size == (64, 64)


def test_without_connection_and_cache_and_for_other_repositories_there_is_one_line(cache, tmp_path):
    said = r"--arch hf_hub:a/b: cannot be fetched from the Hugging Face Hub \(127.0.0.1 cannot be reached: .*\); check"
    with pytest.raises(UserError, match=said):
        build("hf_hub:a/b")
    for arch in ("hf_hub:a", "hf_hub:/b", "hf_hub:a/b/c"):
        with pytest.raises(UserError, match="write hf_hub:ORG/NAME"):
            build(arch)
    cache(FIRST)
    file = tmp_path / "cache/models--someone--small_vit/snapshots" / FIRST / "config.json"
    file.write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="its config.json is none of timm's"):
        build()
    file.write_text('{"architecture": "of_the_future", "pretrained_cfg": {}}')
    with pytest.raises(UserError, match="is a of_the_future, which this version of timm does not have"):
        build()


def test_a_run_keeps_its_revision_and_needs_neither_hub_nor_cache_later(cache, tree, tmp_path, monkeypatch, capsys):  # noqa: F811
    cache(FIRST, qk_norm=True)
    flags = ["--arch", ARCH, "--pretrained", "--dataname", "folder", "--datapath", str(tree), "--batch-size", "4"]
    flags += ["--workers", "0", "--epochs", "2", "--resume", "auto"]
    run = trained(tmp_path / "runs", *flags, "--max-steps", 1)
    state = read_checkpoint(run, None, print)[1]
    assert state["hub"][ARCH]["revision"] == FIRST and state["hub"][ARCH]["architecture"] == "test_vit"
    assert state["preprocessing"]["mean"] == pytest.approx([0.4] * 3), "as its config.json says"

    cache(SECOND)  # somebody else's change: without qk_norm, other weights would be missing
    monkeypatch.setattr(hub_networks, "_known", {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    trained(tmp_path / "runs", *flags)
    assert "Continuing" in (run / "log.txt").read_text()
    monkeypatch.setattr(hub_networks, "_known", {})
    assert main.main(["--evaluate", "--resume", str(run), "--device", "cpu"]) == 0
    monkeypatch.setattr(hub_networks, "_known", {})
    loaded = load_model(run)
    assert hasattr(loaded.network.blocks[0].attn.q_norm, "weight") and loaded.classes == ("china", "flower")

    argv = [str(run), "--to", "timm", "--output", str(tmp_path / "exported")]
    assert export.main(argv) == 0, capsys.readouterr()
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["architecture"] == "test_vit" and config["model_args"]["qk_norm"] is True
    assert export.main([*argv[:2], "safetensors", "--output", str(tmp_path / "safe")]) == 0, capsys.readouterr()
    monkeypatch.setattr(hub_networks, "_known", {})
    monkeypatch.chdir(tmp_path / "safe")
    (code,) = re.findall(r"```python\n(.*?network\.eval\(\)\n)", Path("README.md").read_text(), flags=re.S)
    names = {}
    exec(code, names)
    assert names["network"].state_dict().keys() == loaded.network.state_dict().keys()
