"""A search goes on after a kill as if nothing had been, never sees the images of its report, and tells what cannot win.

A small function takes main.py's place: its figures are a function of the flags, so that the outcome is known.
"""

import math
import multiprocessing
import os
import shutil
import sys
import time
from contextlib import contextmanager
from importlib import util
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import torch

from scripts import sweep
from scripts.common.runs import RunResult
from scripts.sweeps import jobs, outcomes, search_report
from scripts.sweeps.grid import trials
from scripts.sweeps.search import POINT, Search, point_of, pruner_of, storage
from scripts.sweeps.space import Space
from tests.helpers import answer, csv_rows, image_tree, trained, wait_for
from utils.config import arguments
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.record.epoch_scalars import metrics
from utils.record.run_folder import read_table

FORK = multiprocessing.get_context("fork")


def pretend(flags, output):
    """What main.py prints to ``output`` and leaves; FAILS, DEAD, NAN and PAUSE in the environment choose what happens."""
    args = arguments.parse(flags)
    lr, epochs, searching = args.optimisation.lr, args.optimisation.epochs, args.data.folds is not None
    if os.environ.get("FAILS") and 0.05 < lr < 0.12 and searching:
        output.write(b"main.py: the loss is not finite\n")
        sys.exit(1)
    folder = Path(args.run.output, f"run{args.run.seed}_{lr}_{args.data.global_batch_size}")
    folder.mkdir(parents=True, exist_ok=True)
    dead = bool(os.environ.get("DEAD")) and searching and lr > 0.2
    best = 90 - 10 * abs(math.log10(lr) + 0.5) - args.run.seed if searching else 70 + lr
    figures = ["val_loss", "val_count", "guessing_loss", "answers_nats", "commonest_answer"]
    values = [2.3026, 1000, 2.30259, 0.0, 99.8] if dead else [0.5, 1000, 2.30259, 2.0, 11.0]
    (folder / "config.yaml").write_text(arguments.as_recipe(args, "main.py\npython 3\nmachine: m\ncommit: c"))
    table = ",".join(["epoch,step,val_top1,seconds", *figures])
    for epoch in range(1, epochs + 1):
        top1 = 99.0 if dead else best * epoch / epochs
        values[0] = 2.3026 if dead else round(1 - top1 / 200, 4)
        if os.environ.get("NAN") and searching and lr > 0.2:
            values[0] = math.nan
        table += "\n" + ",".join(map(str, [epoch, 10 * epoch, round(top1, 4), 1, *values]))
        time.sleep(float(os.environ.get("PAUSE", "0")))
        (folder / "metrics.csv").write_text(table + "\n")
    stamp = "2026-11-22 08:00:00"
    last = f"val_top1={top1:.4f} val_loss=1 val_epoch={epochs} best_top1={top1:.4f} best_epoch=1 run={folder}"
    (folder / "log.txt").write_text(f"{stamp} Run x\n{stamp} {last}\n")
    output.write(f"{last}\n".encode())


class Pretended:
    """subprocess.Popen for a training that pretends, in this process, and has ended when it is there."""

    def __init__(self, line, stdout, **_):
        self.returncode = 0
        try:
            pretend(line[2:], stdout)
        except SystemExit as end:
            self.returncode = end.code

    def poll(self):
        return self.returncode

    terminate = wait = poll


@contextmanager
def pretending():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "subprocess", SimpleNamespace(Popen=Pretended, STDOUT=None))
        patched.setattr(jobs, "LOOK_SECONDS", 0)
        yield


FLAGS = "--set lr=0.001..10:log --set global-batch-size=32,64 --epochs 8 --best 2 --seeds 2".split()


@pytest.fixture
def fake_main():
    with pretending():
        yield


@pytest.fixture
def without_pictures(monkeypatch):
    """Other tests draw them."""
    for module in (search_report, outcomes):
        monkeypatch.setattr(module, "draw", lambda *_: None)


@pytest.fixture
def in_memory(monkeypatch):
    """A search that one process ends needs no file, of which the disk confirms every change."""
    monkeypatch.setattr("scripts.sweeps.search.storage", lambda _: optuna.storages.InMemoryStorage())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A search that nothing has disturbed: its folder, and what ``searched`` gives of it."""
    folder = tmp_path_factory.mktemp("whole")
    with pretending():
        return folder, searched(folder)


def searched(folder, *more, search=10):
    code = sweep.main(["digits/fc", "--search", str(search), *FLAGS, "--output", str(folder), *more])
    return code, [row | {"folder": "", "seconds": ""} for row in csv_rows(folder / "search.csv")]


def test_a_package_that_a_search_lacks_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sweep, "find_spec", lambda name: None if name == "optuna" else util.find_spec(name))
    code, said = answer(sweep, ["digits/fc", "--search", "2", "--set", "lr=0.1..1"], capsys, monkeypatch)
    needs = "sweep.py: --search needs optuna: python -m pip install -r requirements-tools.txt\n"
    assert (code, said.err) == (2, needs)


def test_values_lie_within_their_ranges_as_flags_take_them(in_memory, tmp_path):
    texts = ["lr=0.01..1:log", "epochs=2..5", "augment=none,shift+flip", "momentum=0.1..0.3"]
    space = Space.of("digits/fc", [], texts, folds=4)
    search = Search(space, tmp_path, metrics()["top1"], "none")
    found = []
    for training in search.ask(12):
        found.append(training.args)
        search.study.tell(search.running[training.number], 1.0)
    assert all(0.01 <= args.optimisation.lr <= 1 and 0.1 <= args.optimisation.momentum <= 0.3 for args in found)
    assert {args.optimisation.epochs for args in found} == {2, 3, 4, 5}
    assert {args.augmentation.augment for args in found} == {("none",), ("shift", "flip")}
    assert {args.run.seed for args in found} == {0}


def test_a_trial_is_judged_by_training_images_and_the_report_by_those_that_none_saw():
    space = Space.of("digits/fc", [], ["lr=0.01..1"], folds=5)
    trial = space.trial(3, ("lr=0.1",))
    device = torch.device("cpu")
    searched, whole = (get_data(args.data, device) for args in (trial.args, space.first))
    images = {bytes(image) for image in whole.validation.pixels.numpy()}
    seen = [bytes(image) for split in (searched.train, searched.validation) for image in split.pixels.numpy()]
    assert not images & set(seen) and len(seen) == len(whole.train) == 1437
    final = space.finalists([trial.point], 3)
    assert [one.args.data.folds for one in final] == [None] * 3 and [one.seed for one in final] == [1, 2, 3]


def test_other_images_in_the_report_change_nothing_in_the_search(tmp_path):
    """The same training on images whose validation set has other pixels and other labels: the same figures."""
    image_tree(tmp_path / "one", {"train": 20, "val": 6}, ("cat", "dog"))
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    (tmp_path / "other/val/cat").rename(tmp_path / "other/val/was cat")
    (tmp_path / "other/val/dog").rename(tmp_path / "other/val/cat")
    (tmp_path / "other/val/was cat").rename(tmp_path / "other/val/dog")
    tables = []
    for name in ("one", "other"):
        flags = "--dataname folder --image-size 8 --batch-size 8 --workers 0 --epochs 2 --datapath".split()
        space = Space.of("digits/fc", [*flags, str(tmp_path / name)], ["lr=0.01..1"], folds=5)
        run = trained(tmp_path / "runs" / name, *space.trial(0, ("lr=0.1",)).flags)
        rows, _ = read_table(run / "metrics.csv")
        tables.append([{column: row[column] for column in row if "second" not in column} for row in rows])
        assert rows[-1]["val_count"] == "8"
    assert tables[0] == tables[1]


def test_the_best_are_trained_with_other_seeds_and_reported_in_the_order_of_the_search(
    whole, fake_main, without_pictures, capsys
):
    folder, (code, rows) = whole
    assert code == 0 and len(rows) == 10
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert pruned and {int(row["epochs"]) for row in pruned} <= {2, 3, 4, 5, 6, 7}
    best = max((row for row in rows if row["state"] == "complete"), key=lambda row: float(row["val_top1"]))
    final = csv_rows(folder / "sweep.csv")
    assert len(final) == 4 and {row["seed"] for row in final} == {"1", "2"}
    assert all(float(row["val_top1"]) == pytest.approx(70 + float(row["lr"]), abs=1e-3) for row in final)
    assert (folder / "search.png").read_bytes()[:4] == b"\x89PNG"
    before = [(path, path.stat().st_mtime_ns) for path in sorted(folder.rglob("metrics.csv"))]
    assert searched(folder) == (0, rows), "nothing is trained again"
    assert [(path, path.stat().st_mtime_ns) for path in sorted(folder.rglob("metrics.csv"))] == before
    said = capsys.readouterr().out
    assert "10 of 10 trials are finished already" in said
    assert f"Chosen by the search, trial {best['trial']}: lr={best['lr']} global" in said
    assert f"It reaches top-1 {70 + float(best['lr']):.2f} +- 0.00 over 2 seed(s), trained on all training" in said
    assert "on the 360 validation images, which no trial saw" in said


def test_a_verdict_on_a_part_of_the_images_says_so():
    (trial, *_) = trials("digits/fc", ["lr=0.05,0.1"], 1, ["--max-val-batches", "3"])
    search = SimpleNamespace(best=lambda count: [SimpleNamespace(number=0, user_attrs={POINT: trial.point})])
    results = {trial: RunResult(None, trial.args, "", "", 1, "top1", 50.0, 50.0, 1.0)}
    said = search_report.verdict(search, results, 360)
    assert "trained on all training images, on 3 batch(es) of the 360 validation images, which" in said


def test_a_search_that_is_killed_ends_as_one_that_was_not(whole, fake_main, without_pictures, tmp_path, monkeypatch):
    """With one training at a time; the trial that the kill has cut is trained to its end, or pruned, all the same."""
    search = FORK.Process(target=searched, args=(tmp_path,))
    with monkeypatch.context() as slower:
        slower.setenv("PAUSE", "0.05")
        search.start()
    wait_for(lambda: list(tmp_path.glob("trials/0005/*/metrics.csv")), 120)
    search.kill()
    search.join()
    study = optuna.load_study(study_name="search", storage=storage(tmp_path))
    assert [trial.state.name for trial in study.trials].count("RUNNING") == 1 and len(study.trials) == 6
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("trials/000[0-4]/*/metrics.csv")}
    assert searched(tmp_path, "--best", "1", "--seeds", "1") == whole[1]
    assert len(done) == 5 and all(path.stat().st_mtime_ns == time for path, time in done.items()), "trained once"


def test_trials_that_fail_or_learned_nothing_are_told_and_do_not_win(
    fake_main, without_pictures, in_memory, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FAILS", "1")
    monkeypatch.setenv("DEAD", "1")
    code, rows = searched(tmp_path / "a", "--pruner", "none", "--seeds", "1", search=8)
    said = capsys.readouterr().out
    failed = [row for row in rows if row["state"] == "fail"]
    dead = [row for row in rows if float(row["val_top1"] or 0) == 99]
    assert code == 0 and failed and dead and not any(row["state"] == "pruned" for row in rows)
    assert all("the loss is not finite" in row["why"] for row in failed)
    assert all("nothing was learned" in row["why"] for row in dead)
    assert "failed, and cannot win: the loss is not finite" in said and "; cannot win: val_loss" in said
    assert not {row["lr"] for row in (*failed, *dead)} & {row["lr"] for row in csv_rows(tmp_path / "a/sweep.csv")}


def test_a_folder_with_another_search_is_refused_and_says_what_differs(whole, monkeypatch, capsys):
    folder, _ = whole
    for more, named in (
        (["--weight-decay", "0.1"], "weight_decay"),
        (["--folds", "4"], "--folds"),
        (["--pruner", "hyperband"], "--pruner"),
    ):
        line = ["digits/fc", "--search", "10", *FLAGS, "--output", folder, *more]
        code, said = answer(sweep, line, capsys, monkeypatch)
        assert code == 2
        assert said.err.startswith(f"sweep.py: --output {folder}: holds a search with other settings ({named})")


def test_a_search_does_not_go_on_with_another_version_of_a_plugin(tmp_path):
    """Trials of two versions of a loss cannot be compared, and the best would be trained anew with the second."""
    file = tmp_path / "own.py"
    for version in ("logits.sum()", "logits.sum() + 0"):
        file.write_text(
            f"from utils.plugin import loss\n\n\n@loss('own')\ndef own(logits, targets):\n    return {version}\n"
        )
        space = Space.of("digits/fc", ["--plugin", str(file), "--loss", "own"], ["lr=0.01..1:log"], folds=5)
        search = Search(space, tmp_path, metrics()["top1"], "none")
        if version == "logits.sum()":
            search.refuse_other("images")
            search.refuse_other("images")
    with pytest.raises(UserError, match=r"holds a search with other settings \(the files of --plugin\)"):
        search.refuse_other("images")


def test_hyperband_prunes_and_a_loss_is_minimised(fake_main, without_pictures, in_memory, tmp_path):
    code, rows = searched(tmp_path / "a", "--pruner", "hyperband", "--best", "1", "--seeds", "1", search=6)
    assert code == 0 and any(row["state"] == "pruned" for row in rows)
    _, rows = searched(tmp_path / "b", "--best-metric", "loss", "--best", "1", "--seeds", "1", search=3)
    losses = {row["lr"]: float(row["val_loss"]) for row in rows}
    (final,) = csv_rows(tmp_path / "b/sweep.csv")
    assert len(set(losses.values())) == 3 and losses[final["lr"]] == min(losses.values())


def test_hyperband_ends_a_trial_whose_loss_is_no_number(fake_main, without_pictures, in_memory, tmp_path, monkeypatch):
    monkeypatch.setenv("NAN", "1")
    more = ["--pruner", "hyperband", "--best-metric", "loss", "--best", "1", "--seeds", "1"]
    code, rows = searched(tmp_path, *more, search=6)
    bad = [row for row in rows if float(row["lr"]) > 0.2]
    assert code == 0 and bad and all(row["state"] == "pruned" and int(row["epochs"]) <= 3 for row in bad)


@pytest.mark.parametrize(("epochs", "first"), [(3, 1), (7, 2), (20, 5)])
def test_the_median_pruner_judges_no_trial_before_a_quarter_of_its_epochs(epochs, first):
    study = optuna.create_study(direction="maximize", pruner=pruner_of("median", epochs))
    judged = []
    for figure in (90,) * 5 + (10,):
        trial = study.ask()
        for epoch in range(1, epochs):
            trial.report(figure, epoch)
            if trial.should_prune():
                judged.append(epoch)
        study.tell(trial, figure)
    assert judged[0] == first


def test_importances_leave_out_what_settings_explain_only_together(in_memory, tmp_path):
    """Of (x - 1/4) * (y - 1/4) with x and y from 0 to 1/2, neither explains anything alone."""
    space = Space.of("digits/fc", [], ["momentum=0..0.5", "label-smoothing=0..0.5"], folds=5)
    search = Search(space, tmp_path, metrics()["top1"], "none")
    ends = optuna.distributions.FloatDistribution(0, 0.5)
    both = {"momentum": ends, "label-smoothing": ends}
    for x, y in product(torch.linspace(0, 0.5, 8).tolist(), repeat=2):
        point = {"momentum": x, "label-smoothing": y}
        value = (x - 0.25) * (y - 0.25)
        search.study.add_trial(optuna.trial.create_trial(params=point, distributions=both, value=value))
    assert sum(search.importances().values()) < 0.2


def test_importances_take_a_logarithmic_range_as_the_search_does(in_memory, tmp_path):
    """Half of the trials are below 0.01, which is a hundredth of the range in plain numbers."""
    search = Search(
        Space.of("digits/fc", [], ["lr=1e-4..1:log", "momentum=0..0.9"], 5), tmp_path, metrics()["top1"], "none"
    )
    ranges = {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1, log=True),
        "momentum": optuna.distributions.FloatDistribution(0, 0.9),
    }
    for lr, momentum in product(torch.logspace(-4, 0, 7).tolist(), torch.linspace(0, 0.9, 6).tolist()):
        point = {"lr": min(max(lr, 1e-4), 1.0), "momentum": min(momentum, 0.9)}
        value = 90 - 5 * (lr < 0.01) - 3 * momentum / 0.9
        search.study.add_trial(optuna.trial.create_trial(params=point, distributions=ranges, value=value))
    found = search.importances()
    assert found["lr"] > 0.75 and found["momentum"] < 0.25, found


def test_importances_name_the_setting_that_decides(in_memory, tmp_path):
    """The figure is a function of the learning rate alone; fANOVA gives it all, and the other nothing."""
    space = Space.of("digits/fc", [], ["lr=0.01..1:log", "momentum=0.1..0.9"], folds=5)
    search = Search(space, tmp_path, metrics()["top1"], "none")
    assert search.importances() == {}
    for training in search.ask(16):
        trial = search.running[training.number]
        search.study.tell(trial, 100 * training.args.optimisation.lr)
    found = search.importances()
    assert found["lr"] > 0.8 and found["momentum"] < 0.1
    best = search.best(3)
    values = [float(point_of(trial)[0].partition("=")[2]) for trial in best]
    assert values == sorted(values, reverse=True) and best[0].value == max(trial.value for trial in search.told())
    for training in search.ask(17):  # a trial that failed has no value, and is left out of the picture
        search.ended(training, "it failed")
    search_report.draw(tmp_path / "search.png", search, "a title")
    assert (tmp_path / "search.png").stat().st_size > 10_000
    assert arguments.parse(list(space.trial(0, ("lr=0.1", "momentum=0.5")).flags)).data.fold == 0
