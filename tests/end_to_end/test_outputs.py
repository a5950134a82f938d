"""What a run leaves: files, TensorBoard, and the console."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from main import main
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import FINAL_LINE, load, rows

SCALARS = set(
    "Loss/Training Loss/Test Top1/Training Top1/Test Top5/Training Top5/Test Optim/lr Optim/Gradient_Norm "
    "Speed/images_per_second Speed/data_wait_percent".split()
)
FLAGS = "--device cpu --arch fc --epochs 2 --ema-decay 0.9 --print-freq 10 --no-progress".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, resumed once half-way, and its console output."""
    output = tmp_path_factory.mktemp("runs")
    for extra in (("--max-steps", "30"), None):
        if extra is None:  # continue from the first checkpoint: the steps up to 30 are logged again
            (checkpoint,) = output.glob("digits/fc/*/checkpoints/initial.pt")
            extra = ("--resume", str(checkpoint))
        process = Forked(*FLAGS, "--output", output, *extra)
        printed = process.communicate()
        assert process.returncode == 0, printed
    found = FINAL_LINE.fullmatch(printed[0].splitlines()[-1])
    return Path(found["run"]), printed, found


def test_the_folder_is_output_dataname_arch_time_and_settings_and_holds_the_named_files(run):
    folder = run[0]
    assert folder.parts[-3:-1] == ("digits", "fc")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_b64-sgd-lr0.1-cosine-e2-ema0.9", folder.name)
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "log.txt", "metrics.csv", "metrics.npz", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents.") for name in names)
    assert not [name for name in names if name.startswith(".")], "no temporary file stays"
    assert {"initial.pt", "last.pt", "best.pt", "final.pt"} <= {
        path.name for path in (folder / "checkpoints").iterdir()
    }


def test_the_final_line_is_the_last_row_of_metrics_csv(run):
    folder, _, found = run
    last = rows(folder)[-1]
    assert float(found["top1"]) == pytest.approx(float(last["val_top1"]), abs=5e-5)
    assert float(found["loss"]) == pytest.approx(float(last["val_loss"]), abs=5e-5)
    assert found["count"] == last["val_count"] == "360"
    assert found["epoch"] == last["epoch"] == "2"
    best = max(rows(folder), key=lambda row: float(row["val_top1"]))
    assert found["best_epoch"] == best["epoch"]
    assert float(found["best_top1"]) == pytest.approx(float(best["val_top1"]), abs=5e-5)


def test_the_curves_hold_each_step_once_and_add_up_to_the_epochs_rows(run):
    curves = np.load(run[0] / "metrics.npz")
    assert curves["step"].tolist() == list(range(1, 47))
    for row in rows(run[0]):
        steps = curves["epoch"] == int(row["epoch"])
        sizes = [64] * 21 + [47, 46]  # the last two share what is left of 1437
        assert np.average(curves["loss"][steps], weights=sizes) == pytest.approx(float(row["train_loss"]), rel=5e-6)
        assert np.average(curves["top1"][steps], weights=sizes) == pytest.approx(float(row["train_top1"]), rel=5e-6)


def test_the_checkpoint_has_clean_names_and_all_that_is_needed_without_the_code_that_made_it(run):
    content = load(run[0], "final.pt")
    assert list(content["model"]) == list(content["ema"]["model"])
    assert all(not name.startswith(("module.", "_orig_mod.")) for name in content["model"])
    assert not torch.equal(content["model"]["layers.1.weight"], content["ema"]["model"]["layers.1.weight"])
    assert content["classes"] == [str(n) for n in range(10)]
    assert content["preprocessing"] == {
        "channels": 1,
        "image_size": 8,
        "val_image_size": 8,
        "mean": [0.3055],
        "std": [0.3756],
        "crop_pct": 1.0,
        "crop_mode": "center",
        "interpolation": "bilinear",
        "stored_size": 8,
    }
    assert [content["progress"][name] for name in ("epoch", "step", "samples_seen")] == [2, 46, 2874]
    assert {"torch", "torchvision", "timm", "python"} <= set(content["versions"])


def test_evaluation_of_the_checkpoint_alone_prints_the_final_numbers_and_makes_no_folder(
    run, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for flag in ("--resume", "--weights"):
        assert main(["--device", "cpu", "--evaluate", flag, str(run[0] / "checkpoints/final.pt")]) == 0
        found = FINAL_LINE.fullmatch(capsys.readouterr().out.splitlines()[-1])
        assert found.group("top1", "top5", "loss", "count") == run[2].group("top1", "top5", "loss", "count")
        assert found["run"] is found["epoch"] is found["best_epoch"] is None
    assert list(tmp_path.iterdir()) == []


def test_the_console_without_a_terminal_is_plain_lines_and_the_log_holds_them_with_the_time(run):
    folder, printed, _ = run
    assert "\r" not in "".join(printed)
    log = (folder / "log.txt").read_text()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in log.splitlines())
    for line in printed[0].splitlines():
        assert line in log


def test_tensorboard_has_every_tag_each_step_once(run):
    board = EventAccumulator(str(run[0]), size_guidance={"scalars": 0})
    board.Reload()
    tags = board.Tags()
    assert SCALARS | {"Loss/Test_raw", "Top1/Test_raw"} <= set(tags["scalars"])
    assert not [tag for tag in tags["scalars"] if tag.startswith("AMP/")], "no scaler, no chart of it"
    for tag in SCALARS:
        steps = sorted(event.step for event in board.Scalars(tag))
        assert steps == sorted(set(steps)) and steps[-1] == 46
    assert "First_Training_Batch" in tags["images"] and "Settings/text_summary" in tags["tensors"]
    assert any(tag.startswith("Initial_Weights/") for tag in tags["histograms"])
