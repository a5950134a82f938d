"""Row 14: steps whose gradient is not finite: skipped, counted and explained, or the end with a sound checkpoint."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.forked import ROOT, Forked
from tests.end_to_end.processes import load, train

FLAGS = ("--arch", "fc", "--epochs", "1", "--no-progress", "--deterministic")


def fail(*flags, processes=1):
    """Run to exit code 1; gives stdout, stderr and the run's folder."""
    process = Forked(*flags, processes=processes)
    out, err = process.communicate()
    assert process.returncode == 1, out + err
    return out, err, out.splitlines()[0].removeprefix("Run ")


def texts(run):
    board = EventAccumulator(str(run), size_guidance={"tensors": 0})
    board.Reload()
    tensors = board.Tensors("AMP/non_finite/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in tensors}


def is_finite(state):
    return all(torch.isfinite(tensor).all() for tensor in state.values())


def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_message_and_an_untouched_checkpoint(tmp_path):
    out, err, run = fail(
        *FLAGS, "--amp", "fp16", "--init-scale", "1e30", "--max-skipped-steps", "3", "--output", tmp_path
    )
    assert err.splitlines()[-1].startswith(
        "main.py: 4 steps in a row without a finite gradient, the last step 4 (epoch 1)"
    )
    assert "lower --init-scale" in err and "Traceback" not in err
    for step in range(1, 5):
        assert f"step {step} skipped, not finite: gradient of the output of layers.5; first layers: layers.5" in out
    saved = load(run, "last.pt")
    initial = load(run, "initial.pt")
    assert all(torch.equal(saved["model"][name], initial["model"][name]) for name in initial["model"])
    assert (saved["progress"]["step"], saved["progress"]["skipped_steps"], saved["progress"]["skipped_in_row"]) == (
        4,
        4,
        4,
    )
    assert saved["scaler"]["scale"] == pytest.approx(1e30 / 16)
    assert sorted(texts(run)) == [1, 2, 3, 4] and "layers.5" in texts(run)[1]


def test_a_gradient_whose_norm_alone_overflows_is_told_with_its_largest_value(tmp_path):
    _, err, run = fail(*FLAGS, "--lr", "1e12", "--output", tmp_path)
    assert "the gradient is inf at step 2 (epoch 1), not finite: the gradient's norm; its values are finite" in err
    assert re.search(r"finite, up to \d\.\de\+2\d in layers\.\d\.weight; loss scale 1", err)
    assert is_finite(load(run, "last.pt")["model"])


def test_a_run_stopped_at_the_last_step_of_an_epoch_can_be_resumed(tmp_path):
    flags = (*FLAGS, "--epochs", "2", "--amp", "fp16", "--init-scale", "1e30", "--output", tmp_path)
    fail(*flags, "--max-skipped-steps", "22")  # 23 steps an epoch
    out, err, run = fail(*flags, "--max-skipped-steps", "22", "--resume", "auto")
    assert "epoch 1/2  training top1" in out and "the last step 24 (epoch 2)" in err and "Traceback" not in err
    assert load(run, "last.pt")["progress"]["skipped_steps"] == 24


def test_a_network_whose_outputs_are_no_numbers_is_said_to_be_and_never_the_best(tmp_path):
    run = Forked(*FLAGS, "--amp", "fp16", "--lr", "1e20", "--max-steps", "3", "--output", tmp_path)
    out, _ = run.communicate()
    assert "warning: the validation loss is nan" in out
    assert "best so far" not in out and "best_top1=nan best_epoch=0" in out
    (folder,) = (tmp_path / "digits" / "fc").iterdir()
    assert not (folder / "checkpoints" / "best.pt").exists()


def test_a_gradient_that_underflows_to_zero_is_told(tmp_path):
    run = Forked(*FLAGS, "--amp", "fp16", "--init-scale", "1e-7", "--output", tmp_path)
    out, _ = run.communicate()
    assert "warning: the gradient is all zero at step 23, loss scale 1e-07" in out and "raise --init-scale" in out


def test_a_network_without_second_derivatives_is_refused_before_anything_is_made(tmp_path):
    flags = ("--arch", "timm/mobilenetv3_small_050", "--image-size", "32", "--grad-penalty", "0.1")
    process = Forked(*flags, "--output", tmp_path / "runs")
    _, err = process.communicate()
    assert process.returncode == 2 and "Traceback" not in err and not (tmp_path / "runs").exists()
    assert "--grad-penalty: the network has an operation without a second derivative (aten::hardsigmoid" in err


def test_a_few_skipped_steps_are_told_and_the_run_goes_on(tmp_path):
    run = train(*FLAGS, "--amp", "fp16", "--init-scale", "1e9", "--output", tmp_path)["run"]
    progress = load(run, "final.pt")["progress"]
    assert 0 < progress["skipped_steps"] < 20 and progress["skipped_in_row"] == 0
    lines = Path(run, "log.txt").read_text()
    assert lines.count(" skipped, not finite: ") == progress["skipped_steps"] == len(texts(run))
    assert f"  skipped {progress['skipped_steps']}  " in lines


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_without_a_scaler_the_run_ends_before_the_update_and_saves_finite_weights(tmp_path, amp):
    _, err, run = fail(*FLAGS, "--amp", amp, "--lr", "1e30", "--lr-policy", "constant", "--output", tmp_path)
    (line,) = [line for line in err.splitlines() if line.startswith("main.py: ")]
    assert "at step 2 (epoch 1), not finite: output of layers." in line and "--lr" in line and "samples" in line
    saved = load(run, "last.pt")
    assert saved["progress"]["step"] == 1 and is_finite(saved["model"])
    assert 2 in texts(run)


def test_the_batch_of_a_bad_step_is_saved_with_all_that_repeats_it(tmp_path):
    flags = (*FLAGS, "--amp", "fp16", "--init-scale", "1e30", "--max-skipped-steps", "11", "--accumulate", "2")
    out, _, run = fail(*flags, "--batch-size", "16", "--dump-bad-batch", "--output", tmp_path)
    assert "batch saved: " in out and "batch not saved" in out
    files = sorted(path.name for path in (tmp_path / "digits" / "fc").rglob("bad_batches/*"))
    assert files == [f"step{step:08d}_rank0.pt" for step in range(1, 11)]  # no more than ten
    dump = torch.load(f"{run}/bad_batches/{files[1]}", weights_only=True)
    assert (dump["step"], dump["epoch"], dump["rank"], dump["amp"], dump["arch"]) == (2, 1, 0, "fp16", "fc")
    assert dump["scale"] == pytest.approx(5e29) and dump["image_shape"] == [1, 8, 8] and len(dump["classes"]) == 10
    assert [len(part["images"]) for part in dump["passes"]] == [16, 16]
    assert all(part["indices"].tolist() for part in dump["passes"])
    initial = load(run, "initial.pt")["model"]
    assert all(torch.equal(dump["model"][name], initial[name]) for name in initial)


NAN_ON_ONE_RANK = """
    import sys
    import torch
    sys.path.insert(0, {root!r})
    import main, utils.optim.criterion
    from utils.runtime.distributed import RankInfo, end_process

    class Bad(torch.nn.CrossEntropyLoss):
        def forward(self, output, targets):
            if RankInfo.from_environment().rank == 1:
                output = output.clone()
                output[3] = float("nan")
            return super().forward(output, targets)

    utils.optim.criterion.build_criterion = lambda *settings: Bad()
    end_process(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_a_nan_on_one_rank_stops_all_of_them_and_names_the_rank(tmp_path, amp):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(NAN_ON_ONE_RANK.format(root=str(ROOT))))
    flags = (*FLAGS, "--amp", amp, "--max-skipped-steps", "1", "--output", tmp_path / "runs")
    ranks = Forked(*flags, processes=2, program=program)
    out, _ = ranks.communicate()
    assert ranks.returncode == 1
    run = out.splitlines()[0].removeprefix("Run ")
    log = Path(run, "log.txt").read_text()
    assert "not finite: the loss on rank 1" in log
    saved = load(run, "last.pt")
    assert is_finite(saved["model"]) and saved["progress"]["step"] == (0 if amp == "off" else 2)


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        (("--grad-penalty", "0.01"), 0.3),  # the penalty is that of each process's own part of the batch
        (("--optimizer", "muon", "--clip-grad-agc", "0.01"), 0.15),  # Muon computes in bfloat16
        (("--arch", "conv2", "--fp32-layers", "classifier.5", "--clip-grad-value", "0.01"), 0.05),
    ],
)
def test_two_processes_follow_one_process_with_the_same_global_batch(tmp_path, flags, tolerance):
    shared = (*FLAGS, *flags, "--amp", "fp16", "--init-scale", "256", "--global-batch-size", "16", "--max-steps", "4")
    one = train(*shared, "--output", tmp_path / "one")["run"]
    two = train(*shared, "--output", tmp_path / "two", processes=2)["run"]
    for name, value in load(one, "final.pt")["model"].items():
        start_value = load(one, "initial.pt")["model"][name]
        change = (load(two, "final.pt")["model"][name] - value).norm() / (value - start_value).norm()
        assert change < tolerance, (name, change)
