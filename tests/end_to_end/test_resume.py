"""A run that was stopped and continued equals one that was not."""

import time
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from main import main
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import FINAL_LINE, curves, differences, load, points, rows
from utils.loop.hooks import Hooks

FLAGS = ("--deterministic", "--arch", "fc", "--ema-decay", "0.9", "--no-progress")
STEPS_AN_EPOCH = 23


def in_process(capsys, *flags):
    """A run of the program in this process; gives the final line's match."""
    assert main(["--device", "cpu", *map(str, flags)]) == 0
    return FINAL_LINE.fullmatch(capsys.readouterr().out.splitlines()[-1])


def test_six_epochs_equal_two_epochs_a_stop_and_resume_auto(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 6, "--global-batch-size", 64)
    run = partial(in_process, capsys)
    whole = run(*flags, "--output", tmp_path / "whole")["run"]
    run(*flags, "--output", tmp_path / "cut", "--max-steps", 2 * STEPS_AN_EPOCH)
    resumed = run(*flags, "--output", tmp_path / "cut", "--resume", "auto")["run"]
    assert differences(whole, resumed) == []
    assert rows(whole) == rows(resumed)
    assert [row["epoch"] for row in rows(resumed)] == list("123456")


BATCH_NORM = ("--arch", "timm/test_resnet", "--batch-size", "64", "--ema-bn-batches", "3")


@pytest.mark.parametrize("extra", [(), ("--amp", "fp16", "--accumulate", "2", "--batch-size", "32"), BATCH_NORM])
def test_a_cut_within_an_epoch_and_resume_leave_the_same_bits_curves_and_points(tmp_path, capsys, extra):
    flags = (*FLAGS, *extra, "--epochs", 3, "--print-freq", 5, "--save-every-steps", 4)
    whole = in_process(capsys, *flags, "--output", tmp_path / "whole")["run"]
    in_process(capsys, *flags, "--output", tmp_path / "cut", "--max-steps", STEPS_AN_EPOCH + 11)
    resumed = in_process(capsys, *flags, "--output", tmp_path / "cut", "--resume", "auto")["run"]
    assert differences(whole, resumed) == []
    assert rows(whole) == rows(resumed)
    assert curves(whole) == curves(resumed)
    expected = points(whole)
    found = points(resumed)
    for tag, values in found.items():
        steps = [step for step, _ in values]
        assert len(steps) == len(set(steps)), f"{tag}: a step is there twice"
        assert set(expected[tag]) <= set(values)


def test_an_epoch_that_is_cut_takes_the_place_of_no_better_whole_one(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 4)
    whole = Path(in_process(capsys, *flags, "--output", tmp_path / "whole")["run"])
    in_process(capsys, *flags, "--output", tmp_path / "cut", "--max-steps", STEPS_AN_EPOCH + 15)
    (run,) = (tmp_path / "cut").glob("digits/fc/*")
    assert [row["epoch"] for row in rows(run)] == ["1", "2"]
    assert float(rows(run)[1]["val_top1"]) > float(rows(run)[0]["val_top1"])
    assert load(run, "best.pt")["progress"]["step"] == STEPS_AN_EPOCH
    in_process(capsys, *flags, "--output", tmp_path / "cut", "--resume", "auto")
    assert differences(whole, run, "best.pt") == []


def test_a_run_that_meets_a_bad_image_goes_on_with_skip_bad_images(tmp_path, capsys):
    tree = tmp_path / "tree"
    for number in range(24):
        folder = tree / ("train" if number < 16 else "val") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (28, 28), number).save(folder / f"{number}.png")
    data = ("--dataname", "folder", "--datapath", tree, "--image-size", 28, "--loader", "stream", "--workers", 0)
    flags = (*FLAGS, *data, "--epochs", 2, "--batch-size", 4, "--output", tmp_path / "runs")
    run = in_process(capsys, *flags, "--max-steps", 2)["run"]
    (tree / "train" / "a" / "0.png").write_bytes(b"")
    assert main(["--device", "cpu", *map(str, flags), "--resume", "auto"]) == 2
    assert "skip it with --skip-bad-images" in capsys.readouterr().err
    assert in_process(capsys, *flags, "--resume", "auto", "--skip-bad-images")["run"] == run
    assert Path(run, "bad_images.txt").read_text() == f"{tree / 'train' / 'a' / '0.png'}\n"


def test_the_log_says_why_a_run_ended_and_evaluation_says_what_it_evaluates(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 2, "--output", tmp_path)
    assert main(["--device", "cpu", *map(str, flags)], hooks=Hooks(before_validation_batch=[interrupted])) == 130
    (run,) = tmp_path.glob("digits/fc/*")
    assert (run / "log.txt").read_text().splitlines()[-1].endswith("Stopped: KeyboardInterrupt")
    capsys.readouterr()
    assert main(["--device", "cpu", "--evaluate", "--resume", str(run), "--no-progress"]) == 0
    assert f"Evaluating {run / 'checkpoints' / 'initial.pt'}, after epoch 0, step 0" in capsys.readouterr().out


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_finished_run_is_reported_as_finished_with_the_same_final_line(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 1, "--output", tmp_path, "--resume", "auto")
    first = in_process(capsys, *flags)
    again = in_process(capsys, *flags)
    assert first.group() == again.group()
    assert len(list((tmp_path / "digits/fc").iterdir())) == 1


def test_resume_takes_a_run_folder_and_a_file_and_goes_on_in_that_folder(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 2, "--output", tmp_path)
    run = Path(in_process(capsys, *flags, "--max-steps", 5)["run"])
    assert in_process(capsys, "--resume", run, "--max-steps", 7, "--no-progress")["run"] == str(run)
    assert in_process(capsys, "--resume", run / "checkpoints/last.pt", "--no-progress")["run"] == str(run)
    assert [row["epoch"] for row in rows(run)] == ["1", "2"]


def test_other_settings_or_a_damaged_checkpoint_refuse_and_auto_takes_the_one_before(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 2, "--output", tmp_path)
    run = Path(in_process(capsys, *flags, "--max-steps", 30)["run"])
    assert main(["--resume", str(run), "--lr", "0.3", "--epochs", "5"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["--epochs", "--lr"]

    damaged = bytearray((run / "checkpoints/last.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (run / "checkpoints/last.pt").write_bytes(damaged)
    assert main(["--resume", str(run / "checkpoints/last.pt")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main(["--device", "cpu", *map(str, flags), "--resume", "auto"]) == 0
    output = capsys.readouterr()
    assert "last.pt: is damaged" in output.err
    assert f"run={run}" in output.out


def test_a_run_of_another_name_is_another_run(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 1, "--output", tmp_path, "--max-steps", 2, "--resume", "auto")
    assert in_process(capsys, *flags, "--name", "a")["run"] != in_process(capsys, *flags, "--name", "b")["run"]


def test_a_second_process_is_kept_out_of_a_run_that_is_being_written(tmp_path, capsys):
    flags = (*FLAGS, "--epochs", 1000, "--output", tmp_path, "--resume", "auto")
    process = Forked(*flags)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("digits/fc/*/checkpoints/last.pt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert main(["--device", "cpu", *map(str, flags)]) == 2
        assert "another process is writing this run" in capsys.readouterr().err
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert len(list((tmp_path / "digits/fc").iterdir())) == 1


def test_settings_that_do_not_shape_the_result_may_differ(tmp_path, capsys):
    run = in_process(capsys, *FLAGS, "--epochs", 1, "--output", tmp_path, "--max-steps", 5)["run"]
    others = "--resume auto --workers 1 --print-freq 7 --val-batch-size 50"
    again = in_process(capsys, *FLAGS, "--epochs", 1, "--output", tmp_path, *others.split())
    assert again["run"] == run
