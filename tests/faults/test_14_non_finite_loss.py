"""Row 14: steps whose gradient is not finite: skipped, counted and explained, or the end with a sound checkpoint."""

import re
from pathlib import Path

import pytest
import torch

from main import main
from tests.end_to_end.forked import train_with
from tests.end_to_end.processes import load, train
from tests.helpers import image_tree, points_of, trained

FLAGS = ("--arch", "fc", "--epochs", "1", "--picture-epochs", "off", "--no-progress", "--deterministic")


@pytest.fixture
def run(tmp_path, capsys):
    """Function of flags: a run's exit code, stdout, stderr and folder."""

    def run(*flags):
        code = main(["--device", "cpu", *FLAGS, *flags, "--output", str(tmp_path)])
        (folder,) = tmp_path.glob("digits/fc/*")
        return code, *capsys.readouterr(), folder

    return run


def texts(folder):
    tag = "AMP/non_finite/text_summary"
    return {step: value.tensor.string_val[0].decode() for (name, step), value in points_of(folder) if name == tag}


def is_finite(state):
    return all(torch.isfinite(tensor).all() for tensor in state.values())


def progress(folder):
    """Steps, skipped steps, and those skipped in a row up to the last."""
    found = load(folder, "last.pt")["progress"]
    return found["step"], found["skipped_steps"], found["skipped_in_row"]


def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_message_and_an_untouched_checkpoint(run):
    code, out, err, folder = run("--amp", "fp16", "--init-scale", "1e30", "--max-skipped-steps", "3")
    last = err.splitlines()[-1]
    assert code == 1 and "lower --init-scale" in err and "Traceback" not in err
    assert last.startswith("main.py: 4 steps in a row without a finite gradient, the last step 4 (epoch 1)")
    for step in range(1, 5):
        assert f"step {step} skipped, not finite: gradient of the output of layers.5; first layers: layers.5" in out
    saved = load(folder, "last.pt")
    initial = load(folder, "initial.pt")
    assert all(torch.equal(saved["model"][name], initial["model"][name]) for name in initial["model"])
    assert progress(folder) == (4, 4, 4) and saved["scaler"]["scale"] == pytest.approx(1e30 / 16)
    assert sorted(texts(folder)) == [1, 2, 3, 4] and "layers.5" in texts(folder)[1]


def test_a_gradient_whose_norm_alone_overflows_is_told_with_its_largest_value(run):
    code, _, err, folder = run("--lr", "1e12")
    assert code == 1 and is_finite(load(folder, "last.pt")["model"])
    assert "the gradient is inf at step 2 (epoch 1), not finite: the gradient's norm; its values are finite" in err
    assert re.search(r"finite, up to \d\.\de\+2\d in layers\.\d\.weight; loss scale 1", err)


def test_a_run_stopped_at_the_last_step_of_an_epoch_can_be_resumed(run):
    flags = ("--epochs", "2", "--amp", "fp16", "--init-scale", "1e30", "--max-skipped-steps", "22")  # 23 steps an epoch
    code, out, err, _ = run(*flags)
    assert code == 1 and "the last step 23 (epoch 1)" in err and "training top1" not in out
    code, out, err, folder = run(*flags, "--resume", "auto")
    assert code == 1 and "epoch 1/2  training top1" in out
    assert "the last step 24 (epoch 2)" in err and "Traceback" not in err
    assert progress(folder)[1] == 24


def test_a_network_whose_outputs_are_no_numbers_is_said_to_be_and_never_the_best(run):
    _, out, _, folder = run("--amp", "fp16", "--lr", "1e20", "--max-steps", "3")
    assert "warning: the validation loss is nan" in out
    assert "best so far" not in out and "best_top1=nan best_epoch=0" in out
    assert not (folder / "checkpoints/best.pt").exists()


def test_a_gradient_that_underflows_to_zero_is_told(run):
    out = run("--amp", "fp16", "--init-scale", "1e-7")[1]
    assert "warning: the gradient is all zero at step 23, loss scale 1e-07" in out and "raise --init-scale" in out


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_without_a_scaler_the_run_ends_before_the_update_and_saves_finite_weights(run, amp):
    code, _, err, folder = run("--amp", amp, "--lr", "1e30", "--lr-policy", "constant")
    (line,) = [line for line in err.splitlines() if line.startswith("main.py: ")]
    assert "at step 2 (epoch 1), not finite: output of layers." in line and "--lr" in line and "samples" in line
    saved = load(folder, "last.pt")
    assert code == 1 and saved["progress"]["step"] == 1 and is_finite(saved["model"])
    assert 2 in texts(folder)


def test_the_batch_of_a_bad_step_is_saved_with_all_that_repeats_it(run):
    flags = ("--amp", "fp16", "--init-scale", "1e30", "--max-skipped-steps", "11", "--accumulate", "2")
    _, out, _, folder = run(*flags, "--batch-size", "16", "--dump-bad-batch")
    assert "batch saved: " in out and "batch not saved" in out
    files = sorted(folder.glob("bad_batches/*"))
    assert [file.name for file in files] == [f"step{step:08d}_rank0.pt" for step in range(1, 11)]  # no more than ten
    dump = torch.load(files[1], weights_only=True)
    assert (dump["step"], dump["epoch"], dump["rank"], dump["amp"], dump["arch"]) == (2, 1, 0, "fp16", "fc")
    assert dump["scale"] == pytest.approx(5e29) and dump["image_shape"] == [1, 8, 8] and len(dump["classes"]) == 10
    assert [len(part["images"]) for part in dump["passes"]] == [16, 16]
    assert all(part["indices"].tolist() for part in dump["passes"])
    initial = load(folder, "initial.pt")["model"]
    assert all(torch.equal(dump["model"][name], initial[name]) for name in initial)


@pytest.mark.parametrize("loader", ["resident", "stream"])
def test_the_log_names_the_image_files_of_a_bad_step(tmp_path, loader):
    photos = image_tree(tmp_path, {"photos": 40})
    flags = ("--arch", "fc", "--dataname", "folder", "--datapath", photos / "photos", "--val-split", "0.4")
    bad = ("--amp", "fp16", "--init-scale", "1e30", "--max-steps", "1", "--global-batch-size", "18", "--dump-bad-batch")
    folder = trained(tmp_path / "runs", *flags, *bad, "--image-size", "8", "--augment", "flip", "--loader", loader)
    (dump,) = folder.glob("bad_batches/*")
    (shown,) = torch.load(dump, weights_only=True)["passes"]
    classes = dict(zip(shown["indices"].tolist(), shown["targets"].tolist(), strict=True))
    for text in ((folder / "log.txt").read_text(), texts(folder)[1]):
        named = re.findall(r"^(?:\S+ \S+)? *sample (\d+): (.+)$", text, re.MULTILINE)
        assert len(named) == 16 and all(Path(path).is_file() for _, path in named)
        assert ["ab"[classes[int(number)]] for number, _ in named] == [Path(path).parent.name for _, path in named]


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_a_nan_on_one_rank_stops_all_of_them_and_names_the_rank(tmp_path, amp):
    flags = (*FLAGS, "--amp", amp, "--max-skipped-steps", "1", "--output", tmp_path)
    assert train_with("nan forward rank=1 times=9", *flags, processes=2) == 1
    (folder,) = tmp_path.glob("digits/fc/*")
    assert "not finite: the loss on rank 1" in (folder / "log.txt").read_text()
    saved = load(folder, "last.pt")
    assert is_finite(saved["model"]) and saved["progress"]["step"] == (0 if amp == "off" else 2)


@pytest.mark.parametrize(
    ("others", "flags", "tolerance"),
    [
        ((), ("--grad-penalty", "1"), 0.6),  # the penalty is that of each process's own part of the batch
        (("--optimizer", "muon"), ("--clip-grad-agc", "0.01"), 0.05),  # Muon computes in bfloat16
        (("--arch", "conv2", "--fp32-layers", "classifier.5"), ("--clip-grad-value", "0.01"), 0.05),
    ],
)
def test_two_processes_follow_one_process_with_the_same_global_batch(tmp_path, others, flags, tolerance):
    cut = "--amp fp16 --init-scale 256 --global-batch-size 16 --max-steps 4 --max-val-batches 1 --val-batch-size 16"
    shared = (*FLAGS, *others, *cut.split())
    one = trained(tmp_path / "one", *shared, *flags)
    two = train(*shared, *flags, "--output", tmp_path / "two", processes=2)["run"]
    without = trained(tmp_path / "without", *shared)
    assert apart(one, two) < tolerance, "of how far the weights moved"
    assert apart(one, without) > 1.4 * tolerance, "otherwise two processes may do without the flag"


def apart(run, other):
    """The largest distance of a parameter's values in two runs, as a share of how far they moved in the first."""
    begun, moved, others = (
        load(*where)["model"] for where in ((run, "initial.pt"), (run, "final.pt"), (other, "final.pt"))
    )
    return max((others[name] - moved[name]).norm() / (moved[name] - begun[name]).norm() for name in moved)
