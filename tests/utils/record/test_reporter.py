"""What the console and metrics.csv report about training."""

import math
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.helpers import csv_rows
from utils.checkpoint.progress import Progress
from utils.config.arguments import parse
from utils.record import reporter as reporter_module
from utils.record import summary
from utils.record.metrics import Report
from utils.record.reporter import Reporter
from utils.record.summary import final_line
from utils.record.writer import Writer
from utils.run import Run

BAR = tqdm(disable=True)


class Kept(Writer):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__(silent=True)
        self.lines = []
        self.points = {}
        self.descriptions = {}

    def log(self, text, to_console=True):
        self.lines.append(text)

    def scalars(self, values, step):
        self.points[step] = self.points.get(step, {}) | values

    def describe(self, descriptions):
        self.descriptions = descriptions


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when they are added."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(reporter_module, "time", clock)
    return clock


def after_steps(progress, count, images=10):
    """``progress`` after ``count`` more steps."""
    progress.step += count
    progress.step_in_epoch += count
    progress.samples_seen += count * images
    sums = [2.0 * count * images, 0.5 * count * images, 0.75 * count * images, float(count * images)]
    progress.epoch_sums = [a + b for a, b in zip(progress.epoch_sums, sums, strict=True)]
    progress.window_sums = list(progress.epoch_sums)
    progress.last_step = [progress.step, progress.epoch + 1, 2.0, 50.0, 75.0, 0.1, 1.5, 1024.0]
    return progress


def told(*flags, scaled=False, classes=10):
    """A reporter and what it tells."""
    writer = Kept()
    return Reporter(writer, parse(list(flags)), scaled=scaled, classes=classes), writer


def after_window(clock, *flags, progress=None, of=5, count=5, seconds=1, **more):
    """A reporter after a window of ``count`` steps of an epoch ``of`` so many, its progress, and what it tells."""
    reporter, writer = told(*flags, **more)
    progress = progress or Progress()
    reporter.begin_epoch(progress, of)
    clock.now += seconds
    reporter.window(after_steps(progress, count), BAR)
    return reporter, progress, writer


@pytest.mark.parametrize("scaled", [True, False])
def test_scale_and_skipped_steps_are_charted_only_where_there_is_a_scaler(scaled, clock):
    progress = Progress(skipped_steps=2, partly_skipped_steps=int(scaled))
    _, _, writer = after_window(clock, progress=progress, scaled=scaled)
    amp = {tag: value for tag, value in writer.points[5].items() if tag.startswith("AMP/")}
    expected = {"AMP/scale": 1024.0, "AMP/skipped_steps": 2, "AMP/partly_skipped_steps": 1}
    assert amp == (expected if scaled else {})


# ------------------------------------------------------------------------------------ console


@pytest.mark.parametrize(("classes", "shown"), [(2, False), (5, False), (6, True), (1000, True)])
def test_lines_and_charts_leave_top5_out_below_six_classes_and_the_row_keeps_it(classes, shown, clock):
    reporter, progress, writer = after_window(clock, "--ema-decay", "0.9", classes=classes)
    reporter.end_training(progress)
    results = Report(0.5, 80.0, 100.0, 360), Report(0.6, 70.0, 100.0, 360)
    row = reporter.row(progress, *results)
    reporter.epoch(row, *results, best=True)
    assert len(writer.lines) == 2 and all("top1" in line for line in writer.lines)
    assert [line.count("top5") for line in writer.lines] == ([1, 2] if shown else [0, 0])
    charted = {tag for points in writer.points.values() for tag in points if tag.startswith("Top5")}
    assert charted == ({"Top5/Training", "Top5/Test", "Top5/Test_raw"} if shown else set())
    assert (row["train_top5"], row["val_top5"], row["raw_val_top5"]) == (75.0, 100.0, 100.0)


@pytest.mark.parametrize("flags", [("--mixup", "0.2"), ("--cutmix", "1"), ()])
def test_accuracies_of_mixed_images_are_called_so_in_log_and_tensorboard_and_those_of_validation_are_not(flags, clock):
    reporter, progress, writer = after_window(clock, *flags)
    reporter.end_training(progress)
    result = Report(0.5, 80.0, 100.0, 360)
    reporter.epoch(reporter.row(progress, result, None), result, None, best=True)
    names = ("top1 (mixed) 50.00", "top5 (mixed) 75.00") if flags else ("top1 50.00", "top5 75.00")
    assert all(name in writer.lines[0] for name in names) and "top1 80.00" in writer.lines[1]
    assert set(writer.descriptions) == ({"Top1/Training", "Top5/Training"} if flags else set())


def test_after_the_last_epoch_with_mixing_accuracies_are_called_as_without(clock):
    for off, mixed in (("1", False), ("2", True)):
        _, _, writer = after_window(
            clock, "--mixup", "0.2", "--mixup-off-epoch", off, progress=Progress(epoch=1), count=4
        )
        assert ("top1 (mixed) 50.00" in writer.lines[0]) == mixed and ("top1 50.00" in writer.lines[0]) != mixed


def test_the_seconds_of_an_epoch_that_was_cut_go_on_where_they_were(clock):
    progress = Progress(epoch=1)
    reporter, _ = told()
    reporter.keep_time(progress)
    assert progress.epoch_seconds == 0, "nothing has begun"
    for seconds in (7.0, 5.0):
        reporter, _ = told()
        reporter.begin_epoch(progress, 20)
        clock.now += seconds
        after_steps(progress, 10)
        reporter.keep_time(progress)
        clock.now += 1000  # the pause between two processes
        progress = Progress.from_state(progress.state())
    reporter.begin_epoch(progress, 20)
    clock.now += 0.5
    reporter.end_training(progress)
    assert reporter.row(progress, None, None)["seconds"] == 12.5
    progress.finish_epoch()
    reporter.keep_time(progress)
    assert progress.epoch_seconds == 0
    reporter.begin_epoch(progress, 20)
    clock.now += 3
    assert reporter.epoch_seconds() == 3


@pytest.mark.parametrize("steps_per_epoch", [4, 6])
def test_a_second_validation_of_an_epoch_whole_or_cut_adds_its_own_seconds_alone(steps_per_epoch, clock):
    reporter, _ = told()
    progress = Progress()
    reporter.begin_epoch(progress, steps_per_epoch)
    clock.now += 5
    after_steps(progress, 4)
    reporter.end_training(progress)
    assert reporter.row(progress, None, None)["seconds"] == 5
    if steps_per_epoch == 4:
        progress.finish_epoch()
    clock.now += 2
    assert reporter.row(progress, None, None)["seconds"] == 2
    reporter.keep_time(progress)
    assert progress.epoch_seconds == (0 if steps_per_epoch == 4 else 7)


def test_a_validation_before_any_training_has_no_row_and_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"validation\(epoch, report=False\)"):
        told()[0].row(Progress(), None, None)


def resumed(progress, clock, steps, seconds, reporter, start_up=60.0):
    """``reporter`` after the process's first step, in which workers start for a minute, and ``steps`` more."""
    reporter.begin_epoch(progress, 30)

    def batches():
        clock.now += start_up
        yield from (after_steps(progress, 1) for _ in range(steps + 1))

    for _ in reporter.timed(batches()):
        clock.now += seconds
        reporter.step_ended(progress, to_console=False)


@pytest.mark.parametrize("steps", [1, 8])
def test_the_speed_after_a_resume_is_that_of_the_processs_own_steps_without_its_start_up(steps, clock):
    reporter, writer = told("--print-freq", "1000")
    progress = after_steps(Progress(epoch=1), 20)
    resumed(progress, clock, steps, 0.5, reporter)
    reporter.end_training(progress)
    assert reporter.row(progress, None, None)["images_per_second"] == 20, "10 images in half a second"
    assert writer.points[progress.step]["Speed/images_per_second"] == 20
    assert writer.points[progress.step]["Speed/data_wait_percent"] == 0
    (first,) = (line for line in writer.lines if "first step" in line)
    assert first == "epoch 2/20  step 21/30  loss 2.0000  first step after 60.5 s, 60.0 s of them for data"
    assert "left 0" in writer.lines[-1], "the start-up is not to come again"


@pytest.mark.parametrize("own_steps", [0, 1])
def test_where_a_process_had_no_step_to_do_or_one_there_is_no_speed(own_steps, clock):
    reporter, writer = told("--print-freq", "1000")
    progress = after_steps(Progress(epoch=1), 20)
    if own_steps:
        resumed(progress, clock, 0, 0.5, reporter)
    else:
        reporter.begin_epoch(progress, 20)
        clock.now += 0.5
    reporter.end_training(progress)
    assert math.isnan(reporter.row(progress, None, None)["images_per_second"])
    points = writer.points[progress.step]
    assert "Loss/Training" in points and not [tag for tag in points if tag.startswith("Speed/")], "0 was charted"
    assert not [line for line in writer.lines if "images/s" in line]


def test_the_first_step_of_a_run_has_a_speed_while_there_is_no_other(clock):
    reporter, writer = told("--print-freq", "1")
    progress = Progress()
    resumed(progress, clock, 0, 0.5, reporter)
    reporter.window(progress, None)
    assert writer.points[1]["Speed/images_per_second"] == 20


def test_the_line_of_a_silence_names_the_step_that_is_under_way(clock):
    reporter, _ = told("--epochs", "2")
    progress = Progress()
    reporter.begin_epoch(progress, 10)
    clock.now += 31
    assert reporter.under_way(progress) == "epoch 1/2  step 1/10 under way for 31 s"
    for _ in range(2):
        reporter.step_ended(after_steps(progress, 1), to_console=False)
        clock.now += 31
    end = "step 3/10 under way for 31 s  left 04:08 of the epoch, 09:18 of the run"  # 8 and 18 steps of 31 s
    assert reporter.under_way(progress) == f"epoch 1/2  {end}"
    clock.now += 600
    assert reporter.under_way(progress) == f"epoch 1/2  {end.replace(' 31 s', ' 631 s')}", "a stall is not the pace"


def test_the_line_at_an_epochs_end_is_of_the_whole_epoch_and_says_so_where_it_was_cut(clock):
    """The steps since the last line, often a few, read like the epoch's."""
    flags = ("--print-freq", "4", "--epochs", "3")
    reporter, progress, writer = after_window(clock, *flags, count=4, seconds=2)
    progress.epoch_sums[0] += 400.0  # of loss, so that the last step's mean is another than the epoch's
    clock.now += 2
    after_steps(progress, 1)
    progress.window_sums = [20.0, 5.0, 7.5, 10.0]
    reporter.end_training(progress)
    middle, end = writer.lines
    assert middle.startswith("epoch 1/3  step 4/5  top1 50.00  top5 75.00  loss 2.0000")
    assert end.startswith("epoch 1/3  training top1 50.00  top5 75.00  loss 10.0000") and "  12 images/s" in end
    assert writer.points[5]["Loss/Training"] == 2.0, "in TensorBoard a point is of the steps since the last one"
    progress.finish_epoch()
    reporter.begin_epoch(progress, 5)
    clock.now += 1
    reporter.end_training(after_steps(progress, 2))
    assert writer.lines[-1].startswith("epoch 2/3  training, cut at step 2 of 5  top1 50.00")


def time_left(writer):
    return writer.lines[-1].partition("  left ")[2]


def test_the_time_left_is_that_of_the_steps_and_of_the_validations_still_to_come(clock):
    reporter, progress, writer = after_window(clock, "--epochs", "3", of=100, count=25, seconds=50)  # 2 a step
    assert time_left(writer) == "02:30 of the epoch, 09:10 of the run", "75 and 275 steps; no validation seen yet"
    clock.now += 150
    reporter.end_training(after_steps(progress, 75))
    clock.now += 40  # validation and checkpoint
    reporter.row(progress, Report(2.0, 50.0, 75.0, 40), None)
    progress.finish_epoch()
    reporter.begin_epoch(progress, 100)
    clock.now += 30
    reporter.window(after_steps(progress, 10), BAR)  # 3 seconds a step
    assert time_left(writer) == "04:30 of the epoch, 10:50 of the run", "90 steps; 190 and two validations"
    progress.finish_epoch()
    reporter.begin_epoch(progress, 100)
    clock.now += 10
    reporter.window(after_steps(progress, 10), BAR)
    assert time_left(writer).endswith("of the run") and "epoch" not in time_left(writer), "the last epoch is the run"


def test_the_time_left_counts_no_validation_for_epochs_without_one(clock):
    """With the time after the latest epoch for each to come, it leapt up after a validation, and down after others."""
    reporter, writer = told("--epochs", "7", "--val-every-epochs", "3", "--print-freq", "10")
    progress = Progress()
    left = []
    for epoch in range(1, 8):
        reporter.begin_epoch(progress, 10)
        clock.now += 10
        reporter.end_training(after_steps(progress, 10))
        left.append(time_left(writer).removesuffix(" of the run"))
        validated = epoch % 3 == 0
        clock.now += 100 if validated else 2  # else a checkpoint
        reporter.row(progress, Report(2.0, 50.0, 75.0, 40) if validated else None, None)
        progress.finish_epoch()
    assert left == ["01:00", "00:56", "00:44", "03:54", "03:42", "03:30", "01:40"], (
        "from epoch 4 on with those of 6 and 7"
    )


def test_the_time_left_counts_the_validations_that_early_stopping_asks_for():
    reporter, _ = told("--epochs", "20", "--val-every-epochs", "10", "--early-stopping", "2")
    assert reporter.val_every_epochs == 2


def test_the_time_left_of_a_run_that_goes_on_does_not_count_the_steps_before(clock):
    begun = after_steps(Progress(), 60)
    _, _, writer = after_window(clock, "--epochs", "1", progress=begun, of=100, count=20, seconds=20)
    assert time_left(writer) == "00:20 of the run"


def test_the_time_left_ends_where_max_steps_cuts_the_run(clock):
    _, _, writer = after_window(clock, "--epochs", "9", "--max-steps", "130", of=100, count=10, seconds=10)
    assert time_left(writer) == "01:30 of the epoch, 02:00 of the run"


# ---------------------------------------------------------------------------------- last lines


def line_of(**fields):
    return final_line(Progress(last_validation=[0.05123, 98.61111, 99.72222, 360], **fields), Path("runs/x"), parse([]))


def test_the_last_line_says_which_epoch_was_validated_last_and_which_was_best():
    assert line_of(epoch=20, step=460, best_top1=98.88888, best_epoch=17) == (
        "val_top1=98.6111 val_top5=99.7222 val_loss=0.0512 val_count=360 val_epoch=20 best_top1=98.8889 best_epoch=17 "
        "run=runs/x"
    )


def test_a_cut_epoch_is_named_by_its_number_and_is_the_best_only_while_there_is_no_whole_one():
    cut = line_of(epoch=0, step_in_epoch=4, step=4, best_value=98.61111)
    assert "val_epoch=1 best_top1=98.6111 best_epoch=1 run" in cut
    later = line_of(epoch=2, step_in_epoch=4, step=50, best_top1=90.0, best_epoch=2)
    assert "val_epoch=3 best_top1=90.0000 best_epoch=2 run" in later


def test_without_a_best_pt_or_a_figure_of_it_the_last_lines_say_nan(tmp_path):
    assert "best_top1=nan best_epoch=0 run" in line_of(epoch=2, step=46), "its metric was never finite, its loss was"
    assert "best_top1=nan best_epoch=2 run" in line_of(epoch=2, step=46, best_top1=-1.0, best_epoch=2)
    writer = Kept()
    run = Run(parse(["--output", str(tmp_path)]), None, folder=tmp_path, writer=writer)
    run.log_end(Progress(epoch=2, step=46, last_validation=[0.1, 99.0, 100.0, 360]), Report(0.1, 99.0, 100.0, 360))
    assert not [line for line in writer.lines if line.startswith("Best")]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_end_says_once_where_tensorboard_finds_the_run(elsewhere, tmp_path):
    folder = tmp_path / "here" / "digits" / "fc" / "run"
    args = parse(["--output", str(tmp_path / ("there" if elsewhere else "here"))])
    writer = Kept()
    progress = Progress(epoch=1, best_epoch=1, last_validation=[0.1, 99.0, 100.0, 360])
    run = Run(args, None, folder=folder, writer=writer)
    run.log_end(progress, Report(0.1, 99.0, 100.0, 360))
    (line,) = (line for line in writer.lines if "tensorboard" in line)
    assert line.endswith(f"--logdir {folder if elsewhere else tmp_path / 'here'}")
    assert writer.lines[-1].endswith(f"run={folder}")


@pytest.mark.parametrize(
    ("on_path", "shown"), [(True, "tensorboard"), (False, "env/bin/tensorboard")], ids=["active", "not active"]
)
def test_tensorboard_is_named_by_its_path_where_its_name_would_not_find_it(on_path, shown, tmp_path, monkeypatch):
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "tensorboard"):
        (programs / name).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs) if on_path else "/nonexistent")
    assert summary.tensorboard() == shown


# --------------------------------------------------------------------------------- metrics.csv


def test_metrics_csv_has_six_significant_digits_of_floats_and_whole_counts_also_after_a_resume(tmp_path):
    shown = {
        "epoch": (1, "1"),
        "step": (12_345_678, "12345678"),
        "lr": (0.1 / 3, "0.0333333"),
        "val_loss": (math.nan, "nan"),
        "val_top1": (100 * 355 / 360, "98.6111"),
        "val_count": (1_281_167, "1281167"),
        "images_per_second": (1_234_567.8, "1234570.0"),
        "tiny": (1.23456789e-9, "1.23457e-09"),
        "round": (100.0, "100.0"),
    }
    row, expected = ({name: pair[place] for name, pair in shown.items()} for place in (0, 1))
    for epoch in (1, 2):  # the second goes on with the file of the first
        writer = Writer(tmp_path, progress=False, resumed=(1, 0) if epoch == 2 else None)
        writer.epoch(row | {"epoch": epoch})
        writer.close()
    assert csv_rows(tmp_path / "metrics.csv") == [expected, expected | {"epoch": "2"}]


def test_the_rows_of_epochs_that_a_run_goes_back_behind_leave_the_file_at_once(tmp_path):
    writer = Writer(tmp_path, progress=False)
    for epoch in (1, 2, 3):
        writer.epoch({"epoch": epoch, "step": 10 * epoch})
    writer.close()
    for resumed, left in (((1, 20), ["1", "2"]), ((1, 10), ["1"])):  # the first is of a run that was cut in epoch 2
        Writer(tmp_path, progress=False, resumed=resumed).close()
        assert [row["epoch"] for row in csv_rows(tmp_path / "metrics.csv")] == left
    Writer(tmp_path, progress=False, resumed=(0, 0)).close()
    assert not (tmp_path / "metrics.csv").exists()


def test_no_column_of_an_earlier_epoch_is_lost_when_later_ones_have_others(tmp_path):
    cut = {"val_loss": 1.0, "val_top1": 90.0, "max_val_batches": 2, "seconds": 3.0}
    whole = {"val_loss": 1.0, "val_top1": 80.0, "seconds": 3.0, "train_penalty": 0.5, "train_loss": 0.25}
    for epochs, row in enumerate((cut, {"seconds": 3.0}, whole)):  # each in a process of its own
        writer = Writer(tmp_path, progress=False, resumed=(epochs, 0) if epochs else None)
        writer.epoch({"epoch": epochs + 1} | row)
        writer.close()
    rows = csv_rows(tmp_path / "metrics.csv")
    names = ["epoch", "val_loss", "val_top1", "seconds", "train_penalty", "train_loss", "max_val_batches"]
    assert [*rows[0]] == names
    assert [row["max_val_batches"] for row in rows] == ["2", "", ""]
    assert [row["train_penalty"] for row in rows] == ["", "", "0.5"]
