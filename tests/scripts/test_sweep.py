"""A sweep trains each combination with each seed once, can be interrupted, and shows mean and spread of its runs."""

import argparse
import dataclasses
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import main
from scripts import sweep
from scripts.common.command_line import Terminated, table, termination_raises
from scripts.common.output import write_csv
from scripts.common.runs import identity, read_run
from scripts.sweeps import cross_validation, jobs, outcomes
from scripts.sweeps.cross_validation import corrected_interval, cross_validate, summary
from scripts.sweeps.grid import Trial, trials
from tests.end_to_end.forked import Launched
from tests.helpers import QUIETLY, answer, csv_rows, image_tree, wait_for
from utils.config import arguments, plugins
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.kept import claimed
from utils.runtime import heartbeat

MAIN_ENDS_WITH = "import sys; print('first'); print('main.py: what it said', file=sys.stderr); sys.exit({code})"
MAIN_WAITS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as where a shell's & began the sweep
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[sys.argv.index('--output') + 1]).with_name('began').touch()
time.sleep(60)
"""

EARLY = "Stopped early: no better val_top1"
DEAD = {"val_loss": 2.3026, "val_count": 1000, "guessing_loss": 2.30259, "answers_nats": 0.0, "commonest_answer": 99.8}


def keep_run(folder, flags, top1, *, epochs=None, ended=True, best=None, log="", figures=None):
    """A run's folder as main.py leaves it: settings, an epoch's row for each of ``top1``, and the log's last lines.

    An epoch has 10 steps, unless ``log`` tells otherwise. ``figures``: further ones of each epoch.
    """
    figures = figures or {}
    folder.mkdir(parents=True)
    args = arguments.parse(list(flags))
    header = f"main.py {' '.join(flags)}\npython 3\nmachine: a computer\ncommit: 0123456789"
    (folder / "config.yaml").write_text(arguments.as_recipe(args, header))
    rows = [[epoch, 10 * epoch, value, 1.5, *figures.values()] for epoch, value in enumerate(top1, 1)]
    lines = [["epoch", "step", "val_top1", "seconds", *figures], *rows]
    (folder / "metrics.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    stamp = "2026-11-22 08:00:00"
    best = max(top1) if best is None else best
    last = f"val_top1={top1[-1]:.4f} val_loss=1 val_epoch={epochs or len(top1)} best_top1={best:.4f} best_epoch=1 run=x"
    lines = ["Run x", *log.splitlines(), *[last] * ended]
    (folder / "log.txt").write_text("".join(f"{stamp} {line}\n" for line in lines))
    return folder


def table_of(results):
    return table(outcomes.headers(results), outcomes.table_rows(results))


told = partial(answer, sweep)


def test_every_combination_of_the_values_is_trained_with_every_seed():
    found = trials("digits/fc", ["lr=0.05,0.1", "nesterov=true,false"], 2, ["--epochs", "3"])
    values = [(t.args.optimisation.lr, t.args.optimisation.nesterov, t.seed, t.args.run.seed) for t in found]
    assert values == [(lr, n, seed, seed) for lr in (0.05, 0.1) for n in (True, False) for seed in (0, 1)]
    assert {t.args.optimisation.epochs for t in found} == {3}
    assert found[0].name == "lr=0.05 nesterov=true seed=0"
    assert {t.args.run.config for t in found} == {"digits/fc"}


def test_a_blank_beside_a_comma_is_no_part_of_a_value():
    assert [trial.point for trial in trials("digits/fc", ["lr=0.05, 0.1"], 1, [])] == [("lr=0.05",), ("lr=0.1",)]


def test_a_value_of_a_setting_with_several_is_joined_by_plus():
    found = trials("cifar10/conv2", ["augment=shift+flip,none"], 1, ["--datapath", "D"])
    assert [t.args.augmentation.augment for t in found] == [("shift", "flip"), ("none",)]


def test_weights_to_begin_with_are_among_what_can_be_varied():
    found = trials("digits/fc", ["weights=a/b.pt,none"], 1, [])
    assert [t.args.model.weights for t in found] == ["a/b.pt", None]
    assert [arguments.parse([*t.flags, "--resume", "auto"]).model.weights for t in found] == ["a/b.pt", None]


def test_a_run_is_its_last_validation_beside_the_best_and_the_time_of_its_epochs(tmp_path):
    run = read_run(keep_run(tmp_path / "a", ["--arch", "fc", "--epochs", "3"], [90.0, 95.0, 93.0]))
    assert (run.final, run.best, run.epochs, run.seconds) == (93.0, 95.0, 3, 4.5)
    assert (run.args.model.arch, run.machine) == ("fc", "a computer")
    assert run.command == "main.py --arch fc --epochs 3"


def test_a_run_that_was_cut_or_is_under_way_is_no_result(tmp_path):
    flags = ["--arch", "fc", "--epochs", "3"]
    assert read_run(keep_run(tmp_path / "under way", flags, [90.0, 95.0, 93.0], ended=False)) is None
    assert read_run(keep_run(tmp_path / "max steps", flags, [90.0, 95.0])) is None
    assert read_run(keep_run(tmp_path / "went on", flags, [90.0, 95.0, 93.0], epochs=2)) is None
    early = ([*flags, "--early-stopping", "1"], [90.0, 95.0])
    assert read_run(keep_run(tmp_path / "early", *early, log=EARLY)).final == 95.0
    assert read_run(keep_run(tmp_path / "before early", *early)) is None
    went_on = f"{EARLY}\nval_top1=1 val_loss=1 val_epoch=1 best_top1=1 best_epoch=1 run=x"
    assert read_run(keep_run(tmp_path / "early before", *early, log=went_on)) is None
    for steps, whole in ((10, True), (11, False)):
        log = f"fc: 9 parameters; batch 64; {steps} steps an epoch; mixed precision off"
        assert (read_run(keep_run(tmp_path / f"{steps} steps", flags, [90.0] * 3, log=log)) is not None) == whole


def test_the_best_of_a_run_is_that_of_its_best_checkpoint_if_it_has_one(tmp_path):
    flags = ["--arch", "fc", "--epochs", "2", "--best-metric", "loss"]
    assert read_run(keep_run(tmp_path / "by loss", flags, [95.0, 93.0], best=93.0)).best == 93.0
    planned = trials("digits/fc", [], 2, ["--epochs", "1"])
    for number, (trial, best) in enumerate(zip(planned, (float("nan"), 90.0), strict=True)):
        keep_run(tmp_path / "runs" / str(number), trial.flags, [90.0], best=best)
    shown = table_of(outcomes.finished(tmp_path / "runs", planned)).splitlines()[2].split()
    assert shown[-8:-2] == ["90.00", "+-", "0.00", "nan", "+-", "nan"]


@pytest.mark.parametrize(
    ("flags", "flatters"),
    [
        ("--early-stopping 1", True),
        ("--early-stopping 2", True),
        ("--early-stopping 3", False),
        ("--lr-policy plateau", True),
    ],
)
def test_early_stopping_flatters_a_fold_if_it_can_end_a_run_and_so_does_a_rate_chosen_by_it(tmp_path, flags, flatters):
    run = read_run(keep_run(tmp_path / "run", ["--arch", "fc", "--epochs", "3", *flags.split()], [90.0] * 3))
    assert any("by the fold that it is scored on" in line for line in cross_validation._doubts(run)) == flatters


@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", "log.txt"])
def test_a_damaged_run_is_named(name, tmp_path):
    folder = keep_run(tmp_path / "a", ["--arch", "fc", "--epochs", "1"], [90.0])
    (folder / name).write_bytes(b"epoch,val_top1\nx,\xff\n")
    with pytest.raises(UserError, match=str(folder)):
        read_run(folder)


def test_finished_runs_are_found_by_their_settings_and_seed(tmp_path):
    planned = trials("digits/fc", ["lr=0.05,0.1"], 2, ["--epochs", "2"])
    keep_run(tmp_path / "one", planned[3].flags, [80.0, 90.0])
    keep_run(tmp_path / "other epochs", [*planned[0].flags, "--epochs", "3"], [80.0, 90.0, 91.0])
    keep_run(tmp_path / "other device", [*planned[2].flags, "--device", "cpu", "--amp", "off"], [80.0, 90.0])
    assert set(outcomes.finished(tmp_path, planned)) == {planned[3]}  # --amp shapes the result, --device does not
    assert identity(planned[0].args) == identity(planned[1].args) != identity(planned[2].args)


def test_a_finished_run_is_found_although_a_flag_had_replaced_its_recipes_optimizer_and_schedule(tmp_path):
    (tmp_path / "steps.yaml").write_text("nesterov: true\nlr-policy: multistep\nlr-milestones: [1, 2]\n")
    flags = ["--epochs", "3", "--optimizer", "adamw", "--lr-policy", "linear"]
    planned = trials(str(tmp_path / "steps.yaml"), [], 2, flags)
    keep_run(tmp_path / "runs/one", planned[0].flags, [80.0] * 3)
    assert set(outcomes.finished(tmp_path / "runs", planned)) == {planned[0]}
    config = keep_run(tmp_path / "runs/old", planned[1].flags, [80.0] * 3) / "config.yaml"
    text = config.read_text()
    idle = ("nesterov: true", "lr-milestones: [1.0, 2.0]")
    assert all(f"# {line}  # recipe" in text for line in idle)
    for line in idle:  # as earlier versions wrote them
        text = text.replace(f"# {line}", line)
    config.write_text(text)
    assert set(outcomes.finished(tmp_path / "runs", planned)) == {*planned}


def test_a_run_on_other_images_of_the_users_own_is_no_finished_one(tmp_path):
    def planned(place, recipe="imagenette/resnet10t"):
        return trials(recipe, [], 1, ["--datapath", str(tmp_path / place), "--epochs", "9"])

    keep_run(tmp_path / "run", planned("flowers")[0].flags, [80.0] * 9)
    assert outcomes.finished(tmp_path, planned("flowers")) and not outcomes.finished(tmp_path, planned("birds"))
    keep_run(tmp_path / "other", planned("here", "cifar10/conv2")[0].flags, [80.0] * 9)
    found = outcomes.finished(tmp_path, planned("there", "cifar10/conv2"))
    assert len(found) == 1, "these are the same images anywhere"


def test_a_run_on_images_that_have_changed_since_is_no_finished_one(tmp_path, capsys):
    image_tree(tmp_path / "pets", {"train": 4, "val": 4}, ("cat", "dog"))
    where = ["--dataname", "folder", "--datapath", str(tmp_path / "pets"), "--image-size", "8", "--device", "cpu"]
    more = [*where, "--epochs", "1", "--batch-size", "4", "--workers", "0", "--picture-epochs", "off"]
    (trial,) = trials("digits/fc", [], 1, more)
    assert main.main([*trial.flags, "--no-progress", "--output", str(tmp_path / "runs")]) == 0
    assert set(outcomes.finished(tmp_path / "runs", [trial])) == {trial}
    shutil.copytree(tmp_path / "pets", tmp_path / "others")
    (other,) = trials("digits/fc", [], 1, [*more, "--datapath", str(tmp_path / "others")])
    Image.new("L", (8, 8)).save(tmp_path / "others/train/cat/e.png")
    assert set(outcomes.finished(tmp_path / "runs", [other, trial])) == {trial}, "each has images of its own"
    Image.new("L", (8, 8)).save(tmp_path / "pets/train/cat/e.png")
    capsys.readouterr()
    assert not outcomes.finished(tmp_path / "runs", [trial])
    assert "does not count: the images have changed since" in capsys.readouterr().err


def test_a_run_with_another_plug_in_of_the_same_name_is_no_finished_one(tmp_path, capsys):
    file = tmp_path / "mine.py"
    text = """
from torch.nn.functional import cross_entropy
from utils.plugin import loss

@loss("mine")
def mine(logits, targets):
    return 1.0 * cross_entropy(logits, targets)
"""
    file.write_text(text)
    more = ["--plugin", str(file), "--loss", "mine", "--epochs", "1", "--train-samples", "128", *QUIETLY]
    (trial,) = trials("digits/fc", [], 1, more)
    assert main.main([*trial.flags, "--no-progress", "--output", str(tmp_path / "runs")]) == 0
    assert set(outcomes.finished(tmp_path / "runs", [trial])) == {trial}
    file.write_text(text.replace("1.0", "2.0"))
    capsys.readouterr()
    assert not outcomes.finished(tmp_path / "runs", [trial])
    assert "does not count: the files of --plugin have changed since" in capsys.readouterr().err
    plugins.load(())


def test_a_cut_table_of_a_run_that_has_not_ended_is_no_hindrance(tmp_path):
    planned = trials("digits/fc", [], 1, ["--epochs", "2"])
    folder = keep_run(tmp_path / "one", planned[0].flags, [80.0, 90.0]) or tmp_path / "one"
    path = folder / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-3])
    (folder / "log.txt").write_text("begun\n")
    assert not outcomes.finished(tmp_path, planned)


def test_mean_and_spread_are_those_of_the_statistics_module(tmp_path):
    planned = trials("digits/fc", ["lr=0.05,0.1"], 3, ["--epochs", "2"])
    finals = [91.0, 92.5, 93.1, 88.0, 89.5]
    for number, (trial, top1) in enumerate(zip(planned, finals, strict=False)):
        keep_run(tmp_path / "runs" / str(number), trial.flags, [top1 + 1, top1])
    results = outcomes.finished(tmp_path, planned)
    lines = table_of(results).splitlines()
    spread = f"{statistics.stdev(finals[:3]):.2f}"
    assert lines[2].split() == f"lr=0.05 3 92.20 +- {spread} 93.20 +- {spread} 3 s".split()
    assert lines[3].split()[:5] == ["lr=0.1", "2", "88.75", "+-", "1.06"]
    write_csv(tmp_path / "sweep.csv", outcomes.csv_rows(planned, results))
    rows = csv_rows(tmp_path / "sweep.csv")
    assert [(row["lr"], row["seed"]) for row in rows] == [(lr, seed) for lr in ("0.05", "0.1") for seed in "012"][:5]
    assert [float(row["val_top1"]) for row in rows] == finals
    outcomes.draw(tmp_path / "sweep.png", "a title", results)
    assert (tmp_path / "sweep.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_values_of_epochs_stand_beside_the_epochs_that_were_trained(tmp_path):
    planned = trials("digits/fc", ["epochs=3,2"], 1, ["--early-stopping", "1"])
    for number, trial in enumerate(planned):
        keep_run(tmp_path / "runs" / str(number), trial.flags, [92.0, 91.0], log=EARLY)
    rows = outcomes.csv_rows(planned, outcomes.finished(tmp_path, planned))
    assert [(row["epochs"], row["trained_epochs"]) for row in rows] == [("3", 2), ("2", 2)]


def test_figures_of_a_cut_validation_are_marked(tmp_path):
    planned = trials("digits/fc", [], 1, ["--epochs", "2", "--max-val-batches", "3"])
    keep_run(tmp_path / "runs" / "0", planned[0].flags, [91.0, 92.0])
    results = outcomes.finished(tmp_path, planned)
    assert "as the recipe (cut: --max-val-batches 3)" in table_of(results)
    assert [row["max_val_batches"] for row in outcomes.csv_rows(planned, results)] == [3]


def test_the_files_of_an_earlier_sweep_do_not_stay_beside_those_of_another(tmp_path):
    def shown(rates):
        planned = trials("digits/fc", [f"lr={rates}"], 2, ["--epochs", "1"])
        for number, trial in enumerate(planned):
            keep_run(tmp_path / "runs" / rates / str(number), trial.flags, [90.0 + number**2])
        sweep.show(argparse.Namespace(recipe="digits/fc"), planned, tmp_path, outcomes.finished(tmp_path, planned))
        return sorted(path.name for path in tmp_path.glob("*.csv"))

    assert shown("0.1,0.2") == ["differences.csv", "sweep.csv"]
    (tmp_path / "out_of_fold_0_seed1.csv").touch()
    assert shown("0.3") == ["sweep.csv"]


def test_a_dead_run_is_counted_beside_the_mean_and_named_below_it(tmp_path, capsys):
    """26.53 +- 14.34 alone says nothing of two trainings of which one came to nothing."""
    planned = trials("digits/fc", [], 2, ["--epochs", "2"])
    for trial, top1, figures in zip(planned, (10.1, 40.0), (DEAD, {**DEAD, "answers_nats": 0.4}), strict=True):
        keep_run(tmp_path / "runs" / str(trial.seed), trial.flags, [top1, top1], figures=figures)
    results = outcomes.finished(tmp_path, planned)
    why = (
        "val_loss 2.3026 and val_top1 10.10 after 20 step(s) are no better than guessing by the classes' shares "
        "(loss 2.3026), and 99.80 % of the answers are one class: nothing was learned that holds for these "
        "images"
    )
    half = "99.80 % of the answers are one class, and val_top1 after 20 step(s) is 40.00"
    assert [results[trial].doubts for trial in planned] == [(why,), (half,)]
    results[planned[1]] = dataclasses.replace(results[planned[1]], doubts=())
    assert "25.05 +- 21.14, 1 doubtful  " in table_of(results)
    assert outcomes.doubts(results) == f"doubtful: seed=0: {why}\n"
    sweep.show(argparse.Namespace(recipe="digits/fc"), trials("digits/fc", [], 3, []), tmp_path, {})
    assert capsys.readouterr().out == "", "nothing to show yet"
    others = trials("digits/fc", [], 3, ["--epochs", "2"])
    sweep.show(argparse.Namespace(recipe="digits/fc"), others, tmp_path, results)
    assert "without a result: seed=2\n" in capsys.readouterr().out
    assert [row["doubts"] for row in outcomes.csv_rows(planned, results)] == [why, ""]
    outcomes.draw(tmp_path / "sweep.png", "a title", results)


def trained(folder, seeds=1, ended=lambda *_: None, at_once=1):
    """The failures of so many trainings."""
    return jobs.run_all(trials("digits/fc", [], seeds, []), folder, jobs.Slots(at_once, 1, 0), ended)


@pytest.fixture
def fake_main(tmp_path, monkeypatch):
    """Writes the program that takes main.py's place."""
    monkeypatch.setattr(jobs, "MAIN", tmp_path / "main.py")
    return (tmp_path / "main.py").write_text


class Sweep(Launched):
    """A sweep into ``out`` of the folder, forked; ``begin`` are further lines of its program."""

    def __init__(self, folder, *flags, begin=""):
        program = f"import pathlib, runpy\nfrom scripts.sweeps import jobs\n{begin}\n"
        (folder / "sweep.py").write_text(f"{program}runpy.run_path({sweep.__file__!r}, run_name='__main__')")
        self.out, self.err = (folder / name for name in ("stdout", "stderr"))
        self.out.touch()
        self.err.touch()
        line = [sys.executable, folder / "sweep.py", "digits/fc", "--output", folder / "out", *flags]
        super().__init__(line, str(self.out), str(self.err))

    def end(self, *signals):
        """Send ``signals``; gives the exit code and what it said on stderr."""
        for number in signals:
            os.kill(self.pid, number)
        return self.wait(120), self.err.read_text()


def with_fake_main(folder):
    """A sweep whose trainings are of the fake main.py in the folder."""
    return Sweep(folder, "--processes", "2", begin=f"jobs.MAIN = pathlib.Path({str(folder / 'main.py')!r})")


def test_a_signal_that_comes_while_a_training_is_started_ends_it(fake_main, tmp_path, monkeypatch):
    fake_main(MAIN_WAITS)
    started = []

    def start(*arguments, **named):
        signal.raise_signal(signal.SIGTERM)
        started.append(begin(*arguments, **named))
        return started[0]

    begin = subprocess.Popen
    monkeypatch.setattr(jobs.subprocess, "Popen", start)
    with pytest.raises(Terminated), termination_raises():
        trained(tmp_path, 3, at_once=2)
    (process,) = started
    assert process.returncode in (75, -signal.SIGTERM), "which is also how it ends before it can handle the signal"


def test_a_training_that_fails_is_named_and_the_others_go_on(fake_main, tmp_path):
    fake_main(MAIN_ENDS_WITH.format(code=1))
    ended = []
    failures = trained(tmp_path, 3, lambda trial, why: ended.append(trial.seed), at_once=2)
    assert sorted(ended) == [0, 1, 2] and len(failures) == 3
    assert "seed=0: what it said (exit code 1; see " in "".join(failures)


def test_a_sweep_is_never_silent_for_long_and_its_first_step_is_told_once(fake_main, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.2)
    works = "seed=0: epoch 1/9  step 1/4  first step after 1 s"
    program = (
        "import time; time.sleep({}); print('epoch 1/9  step 1/4  first step after 1 s', flush=True); time.sleep({})"
    )
    fake_main(program.format(0.5, 0.8))
    trained(tmp_path, seeds=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("seed=0: nothing said yet") < lines.index(works) and "seed=1: nothing said yet" in lines
    assert lines.count(works) >= 3, "as soon as it is said, and after each silence"
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 60)
    fake_main(program.format(0, 0.3))
    trained(tmp_path, seeds=2)
    assert capsys.readouterr().out.splitlines() == [works]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("epoch 1\nmain.py: warning: a doubt\nmain.py: why\nepoch 2\nmain.py: warning: more\n[W] of a library", "why"),
        ("main.py: warning: a doubt\nTraceback\nValueError: why\n\n", "ValueError: why"),
        ("\n", "it said nothing"),
    ],
)
def test_the_reason_of_a_failure_is_the_programs_own_line(said, reason, fake_main, tmp_path):
    fake_main(f"import sys; print({said!r}); sys.exit(1)")
    (failure,) = trained(tmp_path)
    assert failure.startswith(f"seed=0: {reason} (exit code 1; see ")


def test_a_training_that_was_killed_is_not_blamed_on_its_last_warning(fake_main, tmp_path):
    fake_main("import os; print('main.py: warning: a doubt', flush=True); os.kill(os.getpid(), 9)")
    (failure,) = trained(tmp_path)
    assert failure.startswith("seed=0: it was killed, perhaps because memory ran out (SIGKILL; see ")


def test_each_trainings_output_has_a_file_of_its_own_however_long_its_values(fake_main, tmp_path):
    fake_main("import sys; print(sys.argv); sys.exit(1)")
    long = "augment=" + "+".join(["resized-crop", "flip"] * 9)
    settings = [long, f"{long}+flip", "datapath=a/b", "datapath=a-b", "lr=1"]
    planned = [Trial((values,), 0, ("--name", values), None) for values in settings]
    jobs.run_all(planned, tmp_path, jobs.Slots(1, 1, 0), lambda *_: None)
    files = {path.name: path.read_text() for path in (tmp_path / "output").iterdir()}
    assert len(files) == len(settings)
    assert all(any(f"'{values}'" in text for text in files.values()) for values in settings)
    assert {"lr=1_seed0.txt", "datapath=a-b_seed0.txt"} <= files.keys()
    assert max(map(len, files)) < 120


def test_an_output_that_cannot_be_written_is_one_line(fake_main, tmp_path, capsys, monkeypatch):
    (tmp_path / "output").write_text("a file")
    code, said = told(["digits/fc", "--output", tmp_path], capsys, monkeypatch)
    assert code == 2 and said.err.startswith(f"sweep.py: --output {tmp_path}: {tmp_path / 'output'}")
    assert said.err.count("\n") == 1


@pytest.fixture
def fill_disk(monkeypatch):
    """Call it for a disk without room for another byte."""
    return lambda: monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb"))


def test_a_full_disk_is_told_before_a_training_whose_own_line_would_be_lost(
    fill_disk, fake_main, tmp_path, capsys, monkeypatch
):
    fake_main("import sys; sys.exit(1)")
    fill_disk()
    code, said = told(["digits/fc", "--output", tmp_path / "out"], capsys, monkeypatch)
    assert code == 2 and said.err.count("\n") == 1 and "cannot be written (No space left on device)" in said.err


def test_a_disk_that_runs_full_is_the_reason_and_not_the_last_line_that_found_room(
    fill_disk, fake_main, tmp_path, monkeypatch
):
    fake_main("import sys; print('epoch 1/9'); sys.exit(1)")
    original = jobs._outcome
    monkeypatch.setattr(jobs, "_outcome", lambda job: fill_disk() or original(job))
    (failure,) = trained(tmp_path)
    reason = f"nothing can be written to {tmp_path / 'output'} (No space left on device)"
    assert failure.startswith(f"seed=0: {reason}; free some space, and the same command continues (exit code 1; see ")


def test_of_two_sweeps_into_a_folder_the_second_waits_for_the_first(fake_main, tmp_path):
    fake_main(MAIN_WAITS)
    (output := tmp_path / "out").mkdir()
    with claimed(output / "sweep"):  # as a sweep under way does
        process = with_fake_main(tmp_path)
        wait_for(lambda: process.out.read_text().endswith("\n"))
        assert process.out.read_text() == f"Waiting for another sweep into {output}\n"
        assert not (output / "output").exists()
    wait_for((output / "began").exists)
    assert process.end(signal.SIGTERM)[0] == 75 and not list(output.glob("*.lock"))


def test_a_training_that_ends_without_a_result_has_failed(fake_main, tmp_path, capsys, monkeypatch):
    fake_main("print('a run is finished')")
    code, said = told(["digits/fc", "--seeds", "1", "--output", tmp_path / "out"], capsys, monkeypatch)
    assert code == 1 and said.out.splitlines()[-1].startswith("[0/1] seed=0: it ended without a result (see ")
    (folder := tmp_path / "cut").mkdir()
    fake_main(f"print('val_top1=1 val_epoch=1 best_top1=1 run={keep_run(folder / 'a', ['--epochs', '9'], [1.0])}')")
    assert told(["digits/fc", "--seeds", "1", "--output", tmp_path / "out"], capsys, monkeypatch)[0] == 1


def test_a_run_that_stands_for_no_settings_is_named_as_what_is_in_the_way(fake_main, tmp_path, capsys, monkeypatch):
    run = keep_run(tmp_path / "out/runs/a", ["--config", "digits/fc", "--epochs", "1"], [90.0])
    (run / "config.1.yaml").touch()
    fake_main(f"print('val_top1=90.0000 val_epoch=1 run={run}')")
    sweeping = ["digits/fc", "--seeds", "1", "--epochs", "1", "--output", tmp_path / "out"]
    code, said = told(sweeping, capsys, monkeypatch)
    reason = f"{run} does not count: its settings or data were changed by --resume-override"
    assert code == 1 and said.out == f"[0/1] seed=0: {reason}; move it away, and it is trained anew\n"
    assert said.err == f"{reason}\n"


def test_a_run_on_images_that_were_moved_since_is_the_trainings_result(fake_main, tmp_path, capsys, monkeypatch):
    recipe = "imagenette/resnet10t"
    more = ["--epochs", "2", "--datapath"]
    run = keep_run(tmp_path / "out/runs/a", ["--config", recipe, *more, str(tmp_path / "before")], [80.0, 90.0])
    fake_main(f"print('{run} is finished'); print('val_top1=90.0000 val_epoch=2 run={run}')")
    sweeping = [recipe, "--seeds", "1", "--output", tmp_path / "out", *more, tmp_path / "now"]
    code, said = told(sweeping, capsys, monkeypatch)
    assert code == 0 and said.out.startswith("[1/1] seed=0: top1 90.00 after 3 s\n")
    assert str(run) in (tmp_path / "out/sweep.csv").read_text()


def test_a_mistake_that_a_training_finds_ends_the_sweep(fake_main, tmp_path):
    fake_main(MAIN_ENDS_WITH.format(code=2))
    ended = []
    with pytest.raises(UserError, match="seed=0: what it said"):
        trained(tmp_path, 3, lambda trial, why: ended.append(trial))
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGHUP, signal.SIGTERM], 75)],
    ids=["Ctrl-C", "a closed terminal, which ends nothing, and then SIGTERM"],
)
def test_a_signal_reaches_the_trainings_and_is_the_sweeps_exit_code(signals, code, fake_main, tmp_path):
    fake_main(MAIN_WAITS)
    process = with_fake_main(tmp_path)
    wait_for((tmp_path / "out" / "began").exists)
    returned, err = process.end(*signals)
    assert returned == code, err
    assert err.count("\n") == 1 and err.startswith("sweep.py: ")


def test_what_an_attempt_says_stands_below_what_earlier_ones_said(fake_main, tmp_path):
    for said in ("main.py: first", "second"):
        fake_main(f"import sys; print({said!r}); sys.exit(1)")
        (failure,) = trained(tmp_path)
    assert failure.startswith("seed=0: second (exit code 1; ")
    assert (tmp_path / "output/seed0.txt").read_text() == "main.py: first\nsecond\n"


def test_gpus_and_threads_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    slots = jobs.Slots(4, 2, 2)
    found = [slots.environment(place) for place in range(4)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4", "6", "4", "6"]
    assert {each["OMP_NUM_THREADS"] for each in found} == {"2"}
    assert "OMP_NUM_THREADS" not in jobs.Slots(1, 8, 1).environment(0)


def goes_on(tmp_path, flags, capsys, monkeypatch):
    """The same command continues the only run, whose process is forked now, and repeats it no more."""
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda line, stdout, **_: Launched(line, stdout, stdout))
    sweeping = ["digits/fc", *flags, "--output", tmp_path / "out"]
    code, said = told(sweeping, capsys, monkeypatch)
    assert code == 0 and "[1/1] seed=0: top1 " in said.out
    (folder,) = tmp_path.glob("out/runs/digits/fc/*")
    assert "Continuing" in (folder / "log.txt").read_text()
    before = (folder / "log.txt").read_text()
    code, said = told(sweeping, capsys, monkeypatch)
    assert code == 0 and said.out.startswith("1 of 1 runs are finished already\n")
    assert (folder / "log.txt").read_text() == before


def test_a_sweep_continues_a_training_that_was_cut_and_repeats_no_finished_one(tmp_path, capsys, monkeypatch):
    flags = [*QUIETLY, "--epochs", "2"]
    (trial,) = trials("digits/fc", [], 1, flags)
    assert main.main([*trial.flags, "--max-steps", "30", "--output", str(tmp_path / "out/runs")]) == 0
    goes_on(tmp_path, ["--seeds", "1", *flags], capsys, monkeypatch)


@pytest.mark.thorough
def test_so_does_one_that_is_interrupted_itself(tmp_path, capsys, monkeypatch):
    """The first training is begun as a user's are."""
    flags = ["--seeds", "1", *QUIETLY, "--epochs", "25"]
    process = Sweep(tmp_path, *flags)
    wait_for(lambda: list(tmp_path.glob("out/runs/**/last.pt")), 120)
    assert process.end(signal.SIGINT) == (130, "sweep.py: interrupted; the same command continues\n")
    goes_on(tmp_path, flags, capsys, monkeypatch)


# ------------------------------------------------------------------------------------------ cross-validation


def test_with_folds_each_seed_deals_them_out_and_holds_out_each_once():
    planned = trials("digits/fc", ["lr=0.05,0.1"], 2, [], folds=3)
    found = [(t.args.optimisation.lr, t.seed, t.fold, t.args.data.fold, t.args.data.fold_seed) for t in planned]
    assert found == [(lr, seed, fold, fold, seed) for lr in (0.05, 0.1) for seed in (0, 1) for fold in range(3)]
    assert {t.args.data.folds for t in planned} == {3} and planned[1].name == "lr=0.05 seed=0 fold=1"
    assert len({jobs._file_name(t) for t in planned}) == 12
    assert sweep.read_flags(["digits/fc", "--folds", "4"])[0].seeds == 1


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """Three folds of the digits, each trained for an epoch; and their results."""
    folder = tmp_path_factory.mktemp("folds")
    planned = trials("digits/fc", [], 1, ["--epochs", "1", *QUIETLY], folds=3)
    for trial in planned:
        assert main.main([*trial.flags, "--output", str(folder / "runs")]) == 0
    return folder, planned, outcomes.finished(folder / "runs", planned)


def test_each_training_image_has_one_prediction_by_the_network_that_did_not_see_it(validated):
    folder, planned, results = validated
    lines = cross_validate(planned, results, folder)
    rows = csv_rows(folder / "out_of_fold_seed0.csv")
    labels = get_data(arguments.parse([]).data, torch.device("cpu")).train.labels.tolist()
    assert [row["image"] for row in rows] == [f"train[{number}]" for number in range(1437)]
    assert [int(row["class"]) for row in rows] == labels
    fold_of = get_data(planned[0].args.data, torch.device("cpu")).folds.folds.tolist()
    assert [int(row["fold"]) for row in rows] == fold_of
    for trial in planned:  # the logs' own figures, of the exact validation
        own = [row for row in rows if int(row["fold"]) == trial.fold]
        right = sum(row["class"] == row["predicted"] for row in own)
        assert 100 * right / len(own) == pytest.approx(results[trial].final, abs=1e-3)
    for row in rows:
        shares = [float(row[f"probability {label}"]) for label in range(10)]
        assert sum(shares) == pytest.approx(1, abs=1e-5) and max(shares) == shares[int(row["predicted"])]
    hits = sum(row["class"] == row["predicted"] for row in rows)
    assert f"seed 0: {hits:,} of 1,437 right out of fold" in lines[1]
    (about,) = csv_rows(folder / "cross_validation.csv")
    values = [results[trial].final for trial in planned]
    assert {(run.trained, run.validated) for run in results.values()} == {(958, 479)}
    low, high = corrected_interval(values, 479 / 958)
    assert (about["low"], about["high"]) == (f"{low:.2f}", f"{high:.2f}")
    assert (about["runs"], about["seeds"], about["smallest_fold"]) == ("3", "1", "479")
    assert float(about["mean_top1"]) == pytest.approx(statistics.fmean(values), abs=0.005)
    assert float(about["deviation"]) == pytest.approx(statistics.stdev(values), abs=0.005)
    assert about["mean_top1"] in lines[0] and f"interval {about['low']} to {about['high']}" in lines[0]


def test_nothing_is_cross_validated_before_all_folds_are_trained(validated, tmp_path):
    _, planned, results = validated
    assert cross_validate(planned, {trial: results[trial] for trial in planned[:2]}, tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_folds_of_different_divisions_are_no_cross_validation(validated, tmp_path):
    _, planned, results = validated
    flags = ["--folds", "3", "--fold", "2", "--fold-seed", "7", "--epochs", "1", *QUIETLY]
    assert main.main(["--config", "digits/fc", *flags, "--output", str(tmp_path / "runs")]) == 0
    (folder,) = (tmp_path / "runs/digits/fc").iterdir()
    mixed = {**results, planned[2]: read_run(folder)}
    with pytest.raises(UserError, match="seed=0 fold=2 and seed=0 fold=0 were trained on different images or folds"):
        cross_validate(planned, mixed, tmp_path)
    assert not list(tmp_path.glob("*.csv"))


def test_the_smallest_and_the_largest_fold_are_those_of_all_seeds():
    values = [80.0, 90.0, 85.0, 85.0]
    runs = [SimpleNamespace(headline="top1", final=value, trained=50, validated=50) for value in values]
    about = summary(runs, [30, 70, 48, 52], 2)
    assert (about["seeds"], about["smallest_fold"], about["largest_fold"]) == (2, 30, 70)
    low, high = corrected_interval(values, 1.0)
    assert (about["low"], about["high"]) == (f"{low:.2f}", f"{high:.2f}")


def test_the_interval_is_nadeau_and_bengios():
    """Worked out by hand: mean 90, variance 10/4 = 2.5, ratio 1/4; t with 4 degrees of freedom has 2.776445."""
    reach = 2.776445 * (2.5 * (1 / 5 + 1 / 4)) ** 0.5
    assert corrected_interval([88, 89, 90, 91, 92], 1 / 4) == pytest.approx((90 - reach, 90 + reach), abs=1e-5)
    assert corrected_interval([99, 100, 100, 100], 1 / 3)[1] == 100
    assert all(map(math.isnan, corrected_interval([99, math.nan], 1)))
