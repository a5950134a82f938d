"""A validation that is cut for trying out says so in every line, and shows the same images on any number of ranks."""

import re
from pathlib import Path

import numpy as np
import pytest

import main
from tests.end_to_end.processes import ROOT, rows
from tests.helpers import QUIETLY, points_of, trained
from tests.utils.data.loading import make, read
from utils.checkpoint.override import carry_over
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import ResumePoint
from utils.config.arguments import parse
from utils.data.loaders import tried_out

EXAMPLE = ROOT / "examples" / "plugin.py"  # adds the metric margin
FLAGS = (*QUIETLY, "--plugin", str(EXAMPLE), "--arch", "fc", "--epochs", "2", "--print-freq", "1000")
CUT = ("--val-batch-size", "20", "--max-val-batches", "3")
SAYS_SO = re.compile(r"\(cut: --max-val-batches 3\)| max_val_batches=3 |cut to 60 \(--max-val-batches\)")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("cut"), *FLAGS, *CUT)


def numbers(*flags, rank=0, world_size=1):
    _, validation, _ = make(*FLAGS, *flags, rank=rank, world_size=world_size)
    return [batch.indices for batch in validation.batches()]


def test_every_line_about_a_validation_says_that_it_is_cut(run, capsys):
    lines = (run / "log.txt").read_text().splitlines()
    about = [line for line in lines if re.search(r" validation |val_top1=|Best top1", line)]
    assert len(about) == 5, "the images, both epochs, the best and the last line"
    assert [line for line in about if not SAYS_SO.search(f"{line} ")] == []
    assert [(row["val_count"], row["max_val_batches"]) for row in rows(run)] == [("60", "3")] * 2
    points = [value for _, value in points_of(run)]
    said = {point.tag: point.metadata.summary_description for point in points if point.metadata.summary_description}
    assert {"Loss/Test", "Top1/Test", "Top5/Test", "margin/Test"} <= said.keys()
    assert {*said.values()} == {"of some of the images (cut: --max-val-batches 3)"}
    assert main.main([*FLAGS, *CUT, "--output", str(run.parents[2]), "--resume", "auto"]) == 0  # it is finished
    out, err = capsys.readouterr()
    assert " max_val_batches=3 val_epoch=2 " in out.splitlines()[-1] and err == ""
    elsewhere = ("--datapath", str(run.parents[2]))
    assert main.main([*FLAGS, *CUT, *elsewhere, "--output", str(run.parents[2]), "--resume", str(run)]) == 0
    assert capsys.readouterr().err == (
        f"main.py: warning: --datapath {run.parents[2]}: nothing was read there, for nothing remains to be trained\n"
    )
    assert main.main([*FLAGS, *CUT, "--dry-run"]) == 0
    assert "360 validation images, cut to 60 (--max-val-batches)" in capsys.readouterr().out


def test_a_resume_with_other_validation_batches_of_a_cut_validation_is_refused(run, capsys):
    line = [*FLAGS, "--max-val-batches", "3", "--val-batch-size", "10", "--resume", str(run)]
    assert main.main(line) == 2
    assert re.search("--val-batch-size 10: .* was made with --val-batch-size 20", capsys.readouterr().err)
    whole = parse([*FLAGS, "--val-batch-size", "10"])
    assert "val_batch_size" not in whole.result_values()  # without a cut it changes nothing


@pytest.mark.parametrize(
    ("flags", "forgets"),
    [((), False), (("--max-val-batches", "3"), True), (("--max-val-batches", "3", "--val-batch-size", "64"), False)],
    ids=["whole", "cut by the batch of a step", "cut by its own batch"],
)
def test_another_batch_forgets_the_best_result_where_it_cuts_the_validation(flags, forgets):
    begun = {"settings": parse([*FLAGS, *flags]).values(), "classes": ["a"], "fingerprint": "f", "optimizer": []}
    progress = Progress(epoch=1, step=23, best_top1=96.0, best_epoch=1)
    point = ResumePoint(Path("last.pt"), {**begun, "progress": progress.state()}, "digest")
    args = parse([*FLAGS, *flags, "--global-batch-size", "16"])
    state, changes = carry_over(point, args, ("a",), "f", 90, [])
    forgotten = "the best result so far is of other validation images, and is forgotten"
    assert (forgotten in changes, state["progress"]["best_epoch"] != 1) == (forgets, forgets)


def test_an_evaluation_of_the_run_is_cut_only_when_it_is_asked_for(run, capsys):
    asked = ("--max-val-batches", "1", "--val-batch-size", "20")
    evaluate = ("--evaluate", "--resume", str(run), "--plugin", str(EXAMPLE), "--device", "cpu", "--no-progress")
    for flags, count, words in (((), 360, ""), (asked, 20, " max_val_batches=1")):
        assert main.main([*evaluate, *flags]) == 0
        *above, last = capsys.readouterr().out.splitlines()
        assert last.endswith(f" val_count={count}{words}")
        classes, metric = (line for line in above if line.startswith("validation"))
        assert all(("(cut: --max-val-batches 1)" in line) == bool(words) for line in (classes, metric))


def test_the_images_are_drawn_from_all_classes_and_are_the_same_on_any_ranks_and_seed():
    whole = numbers(*CUT)
    labels = read(*FLAGS).validation.labels.numpy()
    assert list(map(len, whole)) == [20, 20, 20]
    together = np.concatenate(whole)
    assert (np.diff(together) > 0).all() and set(labels[together]) == set(range(10))
    of_ranks = [numbers(*CUT, "--seed", "7", rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(np.concatenate([*of_ranks[0], *of_ranks[1]])) == together.tolist()
    of_step = ("--global-batch-size", "20", "--max-val-batches", "3")
    for flags in (of_step, (*of_step, "--accumulate", "2")):
        of_ranks = [numbers(*flags, rank=rank, world_size=2) for rank in (0, 1)]
        assert sorted(np.concatenate([*of_ranks[0], *of_ranks[1]])) == together.tolist()
    assert tried_out(7, 100).tolist() == [*range(7)]


def test_a_cut_beyond_the_images_is_reported_as_doing_nothing(capsys):
    assert main.main([*FLAGS, "--max-val-batches", "99", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "--max-val-batches 99 does nothing: it needs more validation images" in captured.out + captured.err
    assert "cut to" not in captured.out
