"""The programs in examples/ run as they stand."""

import runpy
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
import torch

from main import main
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import FINAL_LINE, ROOT, curves, differences, rows
from tests.helpers import image_tree, run_in, trained
from training import open_run
from utils.loop.stop_signals import TRY_AGAIN
from utils.train_validation import TraVal

EXAMPLES = ROOT / "examples"
FLAGS = ("--device", "cpu", "--no-progress")


# --------------------------------------------------------------------------------- a loop of one's own

LOOP = EXAMPLES / "own_loop.py"
PARTS = ("--plugin", LOOP, "--dataname", "bars", "--arch", "small", "--loss", "brier")
ON_DIGITS = ("--plugin", LOOP, "--arch", "small", "--train-samples", 1000)  # which are there already
SMALL = (*FLAGS, "--epochs", 3, "--batch-size", 128, "--picture-epochs", "off")  # of eight steps


def loop(*words, processes=1):
    """The exit code, and what the loop printed on stdout and on stderr, when it has ended."""
    process = Forked(*SMALL, *words, processes=processes, program=LOOP)
    out, err = process.communicate()
    return process.returncode, out, err


# Ends the process that trains, at chosen steps; the run without a kill has it too, for a run has the same plug-ins always.
ENDING = """
import os, signal

from utils.plugin import hook


@hook("after_update")
def end(traval):
    step = str(traval.progress.step)
    if step == os.environ.get("STEP"):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
"""


def test_an_own_loop_that_is_killed_or_stopped_goes_on_to_the_bits_of_main_py_with_the_same_parts(tmp_path, capsys):
    ending = tmp_path / "ending.py"
    ending.write_text(ENDING)
    assert main([*map(str, (*PARTS, "--plugin", ending, *SMALL, "--output", tmp_path / "straight"))]) == 0
    words = ("--plugin", ending, "--resume", "auto", "--save-every-steps", 5, "--output", tmp_path / "killed")
    for step, number, code in ((12, signal.SIGKILL, -signal.SIGKILL), (19, signal.SIGTERM, TRY_AGAIN)):
        process = Forked(*SMALL, *words, program=LOOP, STEP=str(step), SIGNAL=str(int(number)))
        ended = process.communicate()
        assert process.returncode == code, ended
    assert not [*tmp_path.glob("killed/bars/small/*/checkpoints/final.pt")]
    code, out, err = loop(*words)
    assert code == 0 and "Continuing " in out, err
    with pytest.raises(SystemExit) as end, open_run([*map(str, (*PARTS, *SMALL, *words))]):
        raise AssertionError("the loop began")
    assert end.value.code == 0 and " is finished: 3 epochs, 24 steps" in capsys.readouterr().out
    runs = [run_in(tmp_path / folder) for folder in ("straight", "killed")]
    assert differences(*runs) == []
    assert rows(runs[0]) == rows(runs[1])
    assert curves(runs[0]) == curves(runs[1])
    assert len(LOOP.read_text().splitlines()) < 40


def test_an_own_loop_finds_what_it_imports_from_the_repositorys_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES)])  # as Python begins it
    exec(LOOP.read_text().partition("from training import")[0], {})
    assert ROOT in [Path(place).resolve() for place in sys.path]


def test_an_own_loop_on_two_processes_validates_each_image_once(tmp_path, capsys):
    code, out, err = loop("--max-steps", 3, "--output", tmp_path, processes=2)
    assert code == 0, err
    two = FINAL_LINE.fullmatch(out.splitlines()[-1])
    assert main([*map(str, ("--plugin", LOOP, *FLAGS, "--evaluate", "--resume", run_in(tmp_path)))]) == 0
    one = FINAL_LINE.fullmatch(capsys.readouterr().out.splitlines()[-1])
    assert one["count"] == two["count"] == "200"
    assert [one[name] for name in ("top1", "top5")] == [two[name] for name in ("top1", "top5")]


def made(run, optimizers=None):
    model, train, own, criterion, scaler, val = run.parts
    optimizers = optimizers or own
    return TraVal(model, train, optimizers, criterion, scaler, run.args, val, writer=run.writer, extras=run.extras)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epochs", "0"), "main.py: --epochs '0': must be at least 1\n"),
        (("--loss", "brie"), "did you mean brier?"),
        (("--dry-run",), "--dry-run: this program trains"),
        (("--resume", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_ends_an_own_loop_with_its_line_and_exit_code(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as end, open_run([*map(str, PARTS), "--output", str(tmp_path), *words]):
        raise AssertionError("the loop began")
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_an_own_loop_that_ends_early_is_saved_and_what_it_makes_itself_is_told(tmp_path):
    words = [*map(str, (*PARTS, *SMALL, "--lr", 0.01, "--output", tmp_path, "--resume", "auto"))]

    def begun(run):
        return made(run, torch.optim.Rprop(run.parts.model.parameters()))

    with open_run(words) as run:
        for epoch in run.epochs(traval := begun(run)):
            traval.train(epoch)
            break
    log = (run_in(tmp_path) / "log.txt").read_text()
    assert "Optimizer: Rprop, which the program made" in log and "Loss: brier\n" in log
    assert "was left after step 8; --resume auto continues" in log
    with open_run(words) as run:
        epochs = run.epochs(traval := begun(run))
        assert next(epochs) == 0 and traval.progress.step == 8


def test_a_loop_that_leaves_validation_out_gets_it_where_due_and_one_that_does_not_train_ends(tmp_path):
    words = [*map(str, (*ON_DIGITS, *SMALL, "--val-every-epochs", 2, "--output"))]
    with open_run([*words, str(tmp_path / "loop")]) as run:
        for epoch in run.epochs(traval := made(run)):
            traval.train(epoch)
    assert main([*words, str(tmp_path / "straight")]) == 0
    runs = [run_in(tmp_path / folder) for folder in ("loop", "straight")]
    assert differences(*runs) == [] and rows(runs[0]) == rows(runs[1])
    with (
        pytest.raises(RuntimeError, match=r"epoch 1 was not trained; call train\(0\)"),
        open_run([*words, str(tmp_path)]) as run,
    ):
        assert [*run.epochs(made(run))]


def test_a_network_that_no_setting_names_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end, open_run([*map(str, (*ON_DIGITS, *SMALL, "--output", tmp_path))]) as run:
        run.begin(TraVal(torch.nn.Flatten(), *run.parts[1:5], run.args, run.parts[5], extras=run.extras))
    assert end.value.code == 2 and "enter yours with @network" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.pt")]


def test_an_optimizer_of_weights_that_no_checkpoint_would_hold_is_refused(tmp_path, capsys):
    """A loss's own weights: a resume would begin them anew, and no process would learn of another's gradient."""
    loss = torch.nn.Linear(2, 2)
    with pytest.raises(SystemExit) as end, open_run([*map(str, (*ON_DIGITS, *SMALL, "--output", tmp_path))]) as run:
        optimizers = [torch.optim.SGD(own.parameters(), lr=0.1) for own in (run.parts.model, loss)]
        run.begin(made(run, optimizers))
    assert end.value.code == 2 and "an optimizer has parameters that are not the network's" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.pt")]


def test_a_loop_that_begins_at_the_first_epoch_again_after_a_resume_is_refused(tmp_path):
    words = [*map(str, (*ON_DIGITS, *SMALL, "--output", tmp_path, "--resume", "auto"))]
    with open_run(words) as run:
        for epoch in run.epochs(traval := made(run)):
            traval.train(epoch)
            traval.validation(epoch)
            break
    with pytest.raises(RuntimeError, match=r"train\(0\): 1 is the epoch to train"), open_run(words) as run:
        run.begin(traval := made(run))
        for epoch in range(run.args.optimisation.epochs):
            traval.train(epoch)
            traval.validation(epoch)
    assert len(rows(run_in(tmp_path))) == 1


def test_an_own_mistake_in_the_loop_keeps_its_traceback(tmp_path):
    words = [*map(str, (*ON_DIGITS, *SMALL, "--output", tmp_path))]
    with pytest.raises(ZeroDivisionError), open_run(words):
        1 / 0  # noqa: B018 - it raises


def test_a_notebook_goes_from_images_to_a_network_and_its_page(workplace, monkeypatch):
    image_tree(workplace / "photographs", {"train": 8, "val": 4}, size=16)
    tiny = "--arch timm/test_vit --no-pretrained --no-new-head --image-size 32 --epochs 1 --warmup-epochs 0".split()
    monkeypatch.setattr(sys, "argv", ["", "photographs", *tiny, *FLAGS])
    made = runpy.run_path(str(EXAMPLES / "finetune_in_a_notebook.py"))
    assert made["classes"] == ("a", "b") and (made["run"] / "report.html").stat().st_size > 10_000
    assert len((EXAMPLES / "finetune_in_a_notebook.py").read_text().splitlines()) <= 16


def test_a_database_is_a_data_set(tmp_path):
    image_tree(tmp_path, {"images": 6}, size=16)
    database = sqlite3.connect(tmp_path / "images.db")
    database.execute("CREATE TABLE classes (label INTEGER, name TEXT)")
    database.execute("CREATE TABLE images (split TEXT, image BLOB, label INTEGER)")
    for label, name in enumerate("ab"):
        database.execute("INSERT INTO classes VALUES (?, ?)", (label, name))
        for number, path in enumerate(sorted((tmp_path / "images" / name).iterdir())):
            row = ("train" if number % 3 else "val", path.read_bytes(), label)
            database.execute("INSERT INTO images VALUES (?, ?, ?)", row)
    database.commit()
    data = ["--dataname", "sqlite", "--datapath", tmp_path / "images.db"]
    flags = ["--plugin", EXAMPLES / "plugin.py", *data, "--arch", "fc"]
    log = trained(tmp_path / "runs", *flags, "--epochs", 1, "--batch-size", 4, "--workers", 1) / "log.txt"
    assert "sqlite: 8 training, 4 validation images" in log.read_text()
