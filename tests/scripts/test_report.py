"""report.py: the figures on its page are those of the run, nothing from outside becomes markup, what is missing is named."""

import base64
import hashlib
import io
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import evaluate, report
from scripts.common.answers import Answers
from scripts.common.choice import Chosen
from scripts.common.predictions import predict_split
from scripts.common.trained import open_run
from scripts.reporting import assemble, details, run_parts, run_record, thumbnails
from scripts.reporting.page import PageContent, as_json, first_warnings, grouped, page_data, render
from scripts.reporting.run_record import RunRecord, Setting
from tests.helpers import altered, file_of, trained
from tests.scripts.test_sweep import DEAD
from tests.test_structure import ROOT

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"


class Page(HTMLParser):
    """A page's elements, its visible text, and its JSON."""

    def __init__(self, html):
        super().__init__()
        self.elements = []
        self.texts = []
        self._in_last = False
        self.feed(html)
        self.data = json.loads(self.texts_in("script", id="data"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        self._in_last = True

    def handle_endtag(self, tag):
        self._in_last = False

    def handle_data(self, data):
        if self._in_last:
            self.elements[-1][2].append(data)
        self.texts.append(data)

    def texts_in(self, tag, **attributes):
        return "".join(
            next(text for name, has, text in self.elements if name == tag and attributes.items() <= has.items())
        )

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def made(tmp_path, *line):
    """The page that the tool makes."""
    path = tmp_path / "report.html"
    assert report.main([*line, "--device", "cpu", "--output", str(path)]) == 0
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(digits_run, tmp_path_factory):
    return made(tmp_path_factory.mktemp("report"), digits_run)


@pytest.fixture(scope="module")
def predictions(digits_run):
    return predict_split(open_run(digits_run, device="cpu"), Chosen(device="cpu", progress=False))


def test_the_main_figures_are_those_of_the_validation(page, predictions):
    figures = [text for tag, has, text in page.elements if tag in ("dd", "dt") and has.get("class") != "sub"]
    found = dict(zip(*[iter("".join(text) for text in figures)] * 2, strict=False))
    result = predictions.report
    assert found["Top-1"] == f"{result.top1:.2f}" and found["Loss"] == f"{result.loss:.4f}"
    assert found["Macro F1"] == f"{result.by_class.macro_f1:.2f}"
    assert found["Calibration error"] == f"{result.by_class.ece:.2f}"
    assert "the top-1 that the run recorded for epoch 1" in page.text


def test_matrix_classes_and_mistakes_are_those_of_the_logits(page, predictions):
    (detail,) = page.data["details"]
    guessed = predictions.logits.argmax(1)
    matrix = np.zeros((10, 10), dtype=int)
    np.add.at(matrix, (predictions.labels.numpy(), guessed.numpy()), 1)
    for truth, predicted, count in zip(*detail["matrix"], strict=True):
        matrix[truth, predicted] -= count
    assert not matrix.any()
    wrong = (guessed != predictions.labels).nonzero()[:, 0]
    sure = predictions.logits.softmax(1).max(1).values
    worst = wrong[sure[wrong].argsort(descending=True)]
    rows = [detail["rows"][place] for place in detail["mistakes"]]
    assert len(rows) == min(details.SHOWN_SAMPLES, len(worst)) > 0
    assert [row[0] for row in rows] == [predictions.ids[number] for number in worst[: len(rows)]]
    for row, number in zip(rows, worst, strict=False):
        likely = predictions.logits[number].double().softmax(0).topk(3)
        assert [one for one, _ in row[3]] == likely.indices.tolist() and row[2] == predictions.labels[number]
        assert [share for _, share in row[3]] == pytest.approx(likely.values.tolist(), rel=1e-4)


def test_a_samples_picture_is_its_own(page, predictions):
    (detail,) = page.data["details"]
    assert detail["mistakes"] and detail["unsure"]
    for row in (detail["rows"][place] for place in detail["mistakes"][:5] + detail["unsure"][:5]):
        content = base64.b64decode(page.data["images"][row[1]].partition(",")[2])
        expected = predictions.picture(predictions.ids.index(row[0]))
        assert (np.asarray(Image.open(io.BytesIO(content))) == np.asarray(expected)).all()


def test_images_of_a_cell_belong_to_it(page, predictions):
    (detail,) = page.data["details"]
    guessed = predictions.logits.argmax(1)
    assert {(truth, predicted) for truth, predicted, _ in detail["shownCells"]} == {
        (truth, predicted) for truth, predicted, _ in zip(*detail["matrix"], strict=True)
    }
    for truth, predicted, rows in detail["shownCells"]:
        for name in (detail["rows"][row][0] for row in rows):
            number = predictions.ids.index(name)
            assert (predictions.labels[number], guessed[number]) == (truth, predicted)


def test_another_top1_than_the_run_recorded_is_said():
    answers = Answers(torch.eye(4)[[0, 1, 2, 2]], torch.arange(4))
    record = RunRecord("run", None, epochs={"epoch": np.array([1.0, 2.0]), "val_top1": np.array([50.0, 75.0])})
    assert details.against_record(answers.top1, "top1", record, "last.pt", 2) == (
        "Validated last.pt again for this report: the top-1 that the run recorded for epoch 2.",
        True,
    )
    words, agrees = details.against_record(answers.top1, "top1", record, "best.pt", 1)
    assert not agrees and "75.0000 %; the run recorded 50.0000 % for epoch 1." in words, "not another epoch's"
    equal = RunRecord("run", None, epochs={"epoch": np.array([1.0, 2.0]), "val_top1": np.array([75.0, 75.0])})
    assert "for epoch 1." in details.against_record(answers.top1, "top1", equal, "best.pt", 1)[0]
    record.epochs["val_top1"][1] = 74.9
    words, agrees = details.against_record(answers.top1, "top1", record, "last.pt", None)
    assert not agrees and "75.0000 %; no epoch of the run recorded that" in words
    record.epochs = {"epoch": np.arange(1.0, 4), "val_top1": np.array([50.0, 74.9, np.nan])}  # not validated yet
    words, _ = details.against_record(answers.top1, "top1", record, "last.pt", None)
    assert "(last 74.9000 %, best 74.9000 %)" in words
    assert details.against_record(answers.top1, "top1", record, "last.pt", 3)[1] is None


def test_raw_weights_are_compared_with_the_raw_weights_figure(digits_run, tmp_path):
    assert "the top-1 that the run recorded for epoch 1" in made(tmp_path, digits_run, "--raw").text


def test_the_file_loads_nothing_and_runs_one_script_alone(page):
    for tag, has, _ in page.elements:
        assert tag not in ("link", "iframe", "object", "base", "form"), tag
        assert not [name for name in has if name.startswith("on")]
        assert has.get("src", "data:").startswith("data:") and has.get("href", "#").startswith("#")
    scripts = [(has, text) for tag, has, text in page.elements if tag == "script"]
    (source,) = ["".join(text) for has, text in scripts if has.get("type") != "application/json"]
    policy = next(has["content"] for tag, has, _ in page.elements if has.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "http://" not in source.replace("http://www.w3.org/2000/svg", "") and "innerHTML" not in source


@pytest.mark.parametrize(("width", "shown"), [(272, None), (784, "fine")])
def test_a_first_batch_of_photographs_is_scaled_smoothly_and_small_images_keep_their_pixels(width, shown):
    runs = [RunRecord("run", None, first_batch=file_of(Image.new("RGB", (width, width)), "png"))]
    (picture,) = (has for tag, has, _ in Page(render(PageContent(runs, page_data(runs)))).elements if tag == "img")
    assert picture.get("class") == shown
    style = (ROOT / "scripts/reporting/template/style.css").read_text()
    assert ".batch img.fine { image-rendering: auto; }" in style


def test_names_of_classes_runs_and_files_stay_text():
    run = RunRecord(
        f"{HOSTILE}\udce9", Path(HOSTILE), missing=[HOSTILE], warnings=[HOSTILE], header={"command": HOSTILE}
    )
    run.classes = [{"name": HOSTILE, "number": 0, "support": 3, "accuracy": 0.5}]
    data = page_data([run]) | {"classes": [[HOSTILE]]}
    page = Page(render(PageContent([run], data, notes=[HOSTILE], without_predictions=HOSTILE)))
    assert [has for tag, has, _ in page.elements if tag == "img"] == []
    assert len([tag for tag, _, _ in page.elements if tag == "script"]) == 2
    assert page.data["classes"] == [[HOSTILE]] and page.data["classTable"][0]["name"] == HOSTILE
    assert page.text.count("alert(1)") >= 8
    assert not set("<>&") & set(as_json([HOSTILE]))


def test_of_many_warnings_the_first_are_shown_and_the_others_counted():
    lines = [str(number) for number in range(23)]
    assert first_warnings([*lines, "0"]) == [*lines[:20], "and 3 more, which log.txt has"]
    assert first_warnings(lines[:20]) == lines[:20]


def test_the_file_stays_small_with_many_classes_and_noisy_pictures():
    classes = 1000
    n = 4_000
    generator = np.random.default_rng(0)
    answers = Answers(torch.randn(n, classes), torch.randint(classes, (n,)))
    noise = Image.fromarray(generator.integers(0, 256, (150, 140, 3), dtype=np.uint8))
    names = tuple(f"a class with a rather long name, number {one}" for one in range(classes))
    ids = [f"{names[0]}/{number}.png" for number in range(n)]
    predicted = details.Predicted(0, answers, ids, lambda place: noise, "noise")
    chosen = details.choose(predicted, 1)
    store = thumbnails.Thumbnails()
    sides = details.add_pictures(predicted, chosen, store, lambda: None)
    detail = details.detail(predicted, chosen, store, sides, 1) | {"classes": 0}
    run = RunRecord("run", None)
    data = page_data([run]) | {"details": [detail], "classes": [list(names)], "images": store.uris}
    assert store.uris and len(render(PageContent([run], data))) < 10_000_000
    assert sum(map(len, store.uris)) <= thumbnails.BUDGET_BYTES


def test_runs_whose_classes_have_no_room_are_left_out_and_named(page):
    gathered = assemble.PredictionParts(None, 1)
    for name in "abc":
        made = {"hits": [0] * (assemble.DETAIL_BYTES // 5)}
        gathered._keep("details", name, made, ("ape", "bee"), "pictures")
    assert len(gathered.data["details"]) == 2 and gathered.data["classes"] == [["ape", "bee"]]
    ((name, words),) = gathered.left_out
    assert name == "c" and "no room" in words
    assert page.data["details"][0]["order"] and page.data["classTable"] is None


def test_pictures_of_features_are_those_of_the_runs_own_images(monkeypatch):
    sources = []
    monkeypatch.setattr(assemble, "embed", lambda *_: None)
    monkeypatch.setattr(assemble, "study", lambda *_, **__: None)
    monkeypatch.setattr(assemble, "accuracies", lambda _: [])
    monkeypatch.setattr(assemble, "shown_labels", lambda _: ({}, ["a"]))
    monkeypatch.setattr(assemble, "feature_part", lambda *given: sources.append(given[-1]) or {})
    gathered = assemble.PredictionParts(SimpleNamespace(), 3)
    for number, fingerprint in enumerate(("of mnist", "of digits", "of digits")):  # whose images have the same ids
        loaded = SimpleNamespace(path="last.pt", fingerprint=fingerprint, settings={})
        gathered.add_features(number, SimpleNamespace(folder=None, name="a"), loaded)
    assert sources[0] != sources[1] == sources[2]


def test_several_runs_share_pictures_and_show_what_differs(digits_run, tmp_path):
    other = Path(shutil.copytree(digits_run, tmp_path / "2026-01-01_00-00-00_other"))
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("lr: 0.1  # default", "lr: 0.2  # flag"))
    page = made(tmp_path, digits_run, str(other))
    one, two = page.data["details"]
    assert [run["name"].split()[-1] for run in page.data["runs"]][1] == "other"
    assert one["rows"] == two["rows"] and one["classes"] == two["classes"] == 0
    assert "different sets of images" not in page.text
    used = {row[1] for row in one["rows"]}
    assert used == set(range(len(page.data["images"]))), "each picture is there once"
    assert {curve["run"] for curve in page.data["charts"][0]["curves"]} == {0, 1}
    settings = page.text.partition("What differs between the runs.")[2].partition("All 1")[0]
    assert re.search(r"\blr 0\.1 0\.2\b", settings) and "momentum" not in settings


def test_runs_on_files_of_the_same_names_in_other_places_have_pictures_of_their_own(digits_run, tmp_path):
    for place, level in (("one", 50), ("two", 200)):
        for split, name in itertools.product(("train", "val"), map(str, range(10))):
            (tmp_path / place / split / name).mkdir(parents=True)
            Image.new("L", (8, 8), level).save(tmp_path / place / split / name / "a.png")
        settings = {"dataname": "folder", "datapath": str(tmp_path / place)}
        altered(digits_run, tmp_path / f"{place}.pt", settings=settings)
    page = made(tmp_path, str(tmp_path / "one.pt"), str(tmp_path / "two.pt"))
    assert "The runs' figures are of 2 different sets of images, labels or classes" in page.text
    for detail, level in zip(page.data["details"], (50, 200), strict=True):
        for row in detail["rows"]:
            content = base64.b64decode(page.data["images"][row[1]].partition(",")[2])
            assert Image.open(io.BytesIO(content)).getpixel((4, 4)) == level, row[0]


def test_a_cut_validation_is_said_beside_what_was_recorded(digits_run, tmp_path):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    text = (folder / "config.yaml").read_text()
    assert "max-val-batches: null" in text
    (folder / "config.yaml").write_text(text.replace("max-val-batches: null", "max-val-batches: 2"))
    page = made(tmp_path, str(folder), "--no-predictions")
    assert "validated on some of them only (--max-val-batches 2), so its curves" in page.text


def test_what_several_runs_lack_is_said_once():
    lines = [
        (name, line) for line, names in (("no curves", "abc"), ("no log", "ab"), ("old", "abcd")) for name in names
    ]
    assert grouped(lines, 4) == ["no curves (3 of 4 runs)", "a and b: no log", "old (all runs)"]
    assert grouped([("a", "no log")], 1) == ["no log"]


def test_legends_are_grouped_by_what_differs_and_number_repetitions():
    def run(name, **values):
        own = {key: Setting(value, "flag", "run") for key, value in values.items()}
        return RunRecord(name, None, settings=own | {"batch_size": Setting(name, "default", "data")})

    sweep = [run(f"{lr} {seed}", lr=lr, seed=seed, arch="fc") for lr in ("0.1", "0.3") for seed in ("0", "1", "2")]
    expected = [(f"lr {lr}", f"seed {seed}") for lr in ("0.1", "0.3") for seed in (0, 1, 2)]
    assert run_parts.legend(sweep) == expected
    assert run_parts.legend([*sweep, sweep[0]]) == [*expected, ("lr 0.1", "seed 0 (2)")]
    assert run_parts.legend(sweep[:3]) == [("", f"seed {seed}") for seed in (0, 1, 2)]
    assert run_parts.legend([sweep[0], sweep[4]]) == [("", "0.1 0"), ("", "0.3 1")], "each differs in all"
    assert run_parts.legend(sweep[:1]) == [("", "0.1 0")]
    data = page_data(sweep)["runs"]
    assert [(one["group"], one["label"]) for one in data] == expected


def test_a_dead_run_is_said_beside_its_figure_and_in_a_box():
    figures = {"epoch": 3.0, "step": 300.0, "val_top1": 10.1, **DEAD}
    dead = RunRecord("dead", None, epochs={name: np.array([value]) for name, value in figures.items()})
    alive = RunRecord(
        "alive", None, epochs={**dead.epochs, "answers_nats": np.array([0.5]), "val_top1": np.array([60.0])}
    )
    for runs in ([dead], [dead, alive]):
        text = Page(render(PageContent(runs, page_data(runs)))).text
        assert "doubtful; recorded, epoch 3" in text and text.count("doubtful;") == 1
        whose = "dead: " if len(runs) > 1 else ""
        assert f"Doubtful results {whose}val_loss 2.3026 and val_top1 10.10 after 300 step(s) are no better" in text
    figures = {"epoch": 3.0, "step": 300.0, "val_map": 41.2, "val_loss": np.nan, "val_count": 360.0}
    of_labels = RunRecord("labels", None, epochs={name: np.array([value]) for name, value in figures.items()})
    text = Page(render(PageContent([of_labels], page_data([of_labels])))).text
    assert "doubtful; recorded, epoch 3" in text and text.count("doubtful;") == 1
    old = RunRecord("old", None, epochs={"epoch": np.array([3.0])}, predicted_doubts=["nothing was learned"])
    assert "nothing was learned" in Page(render(PageContent([old], page_data([old])))).text
    text = Page(render(PageContent([alive], page_data([alive])))).text
    assert "Doubtful results" not in text and "doubtful;" not in text


def test_of_best_it_is_said_that_these_images_chose_it_unless_others_are_shown_which_is_said(
    page, digits_run, tmp_path
):
    best, others = (made(tmp_path, digits_run, "--best", *line) for line in ([], ["--split", "train"]))
    words = "best.pt was chosen by its result on these images, which favours it"
    assert [words in one.text for one in (page, best, others)] == [False, True, False]
    assert sum(others.data["details"][0]["support"]) == 1437
    assert "on the training images" in others.text and "that the run recorded" not in others.text


def test_of_a_calibrated_copy_it_is_said_that_its_temperature_was_fitted_on_these_images(page, digits_run, tmp_path):
    copy = tmp_path / "copy.pt"
    assert evaluate.main([str(digits_run), "--device", "cpu", "--store", str(copy)]) == 0
    words = "The temperature was fitted on some of these images, which favours loss and calibration"
    copies = [made(tmp_path, str(copy), *line) for line in ([], ["--split", "train"])]
    assert [words in one.text for one in (*copies, page)] == [True, False, False]


def test_of_settings_known_from_a_checkpoint_those_that_differ_from_the_defaults_were_chosen(digits_run):
    loaded = open_run(digits_run, device="cpu")
    alone, run = run_record.from_settings("alone", loaded.settings), run_record.read(Path(digits_run), "run")
    assert run_parts.differing([alone, run]) == [], "a checkpoint and its run have the same settings"
    given = {name for name, setting in run.settings.items() if setting.origin == "flag"} - {"output"}
    few = {row.name: row.cells[0] for row in run_parts.differing_settings([alone])["few"]}
    assert given <= few.keys() and len(few) < len(alone.settings) / 4
    alone.settings["lr"] = alone.settings["lr"]._replace(value="0.123")
    assert ("0.123", True) in (row.cells[0] for row in run_parts.differing_settings([alone])["few"])


@pytest.mark.parametrize("without", ["checkpoints", "data", "everything else"])
def test_what_is_missing_is_named_and_the_rest_is_shown(digits_run, tmp_path, without, capsys):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    line = [str(folder)]
    if without == "checkpoints":
        shutil.rmtree(folder / "checkpoints")
    elif without == "data":
        line += ["--datapath", str(tmp_path / "nowhere")]
    else:
        line = [str(shutil.move(folder / "checkpoints/best.pt", tmp_path / "alone.pt"))]
    page = made(tmp_path, *line)
    if without == "everything else":
        assert page.data["details"] and not page.data["charts"] and "does not lie in its run" in page.text
        return
    assert page.data["charts"] and not page.data["details"] and "Without predictions" in page.text
    assert len(page.data["classTable"]) == 10, "class_metrics.csv stands in"
    assert "warning: Without predictions" in capsys.readouterr().err
    last = (folder / "metrics.csv").read_text().splitlines()[-1].split(",")[7]
    assert f"{float(last):.2f}" in page.text


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("class_metrics.csv", "val_precision", "1e-"),
        ("class_metrics.csv", "val_f1", "x"),
        ("metrics.csv", "epoch", "xx1"),
        ("metrics.csv", "epoch", None),
    ],
)
def test_a_damaged_table_is_named_and_the_rest_is_shown(digits_run, tmp_path, name, column, value):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    rows = [line.split(",") for line in (folder / name).read_text().splitlines()]
    rows[0 if value is None else 1][rows[0].index(column)] = value or "epxch"
    (folder / name).write_text("".join(f"{','.join(row)}\n" for row in rows))
    page = made(tmp_path, str(folder), *(["--no-predictions"] if value is None else []))
    assert f"{name} cannot be read" in page.text and page.data["charts"]
    assert bool(page.data["details"]) == (value is not None)


def test_a_row_that_is_cut_off_within_a_number_is_left_out_and_named(digits_run, tmp_path):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    names, row = (folder / "metrics.csv").read_text().splitlines()[:2]
    figure = row.split(",")[names.split(",").index("val_top1")]
    cut = "2" + row[1 : row.index(f",{figure},") + 2]  # one digit of its top-1
    (folder / "metrics.csv").write_text(f"{names}\n{row}\n{cut}")
    page = made(tmp_path, str(folder), "--no-predictions")
    assert "its row in metrics.csv is cut off, so it is left out" in page.text
    (curves,) = [chart["curves"] for chart in page.data["charts"] if chart["title"] == "Top-1"]
    (points,) = [curve for curve in curves if curve["name"] == "validation"]
    assert points["y"] == [pytest.approx(float(figure), abs=1e-3)]
    shutil.copy(folder / "class_metrics.csv", tmp_path / "classes.csv")
    (folder / "class_metrics.csv").write_text((tmp_path / "classes.csv").read_text()[:-4])
    page = made(tmp_path, str(folder), "--no-predictions")
    assert "class_metrics.csv cannot be read (a row is cut off)" in page.text


def test_a_setting_that_holds_the_sign_of_a_comment_is_shown_whole():
    (setting,) = run_record.parse_settings("datapath: '/data/a  # b'  # flag").values()
    assert setting == Setting("'/data/a  # b'", "flag", "")


def test_machine_and_commit_of_a_resume_are_named_beside_those_of_the_beginning(digits_run, tmp_path):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    begun = run_record.read(folder, "run").header
    with open(folder / "log.txt", "a") as log:
        for line in (f"machine: {begun['machine']}", "commit: 0123456789, changed", f"commit: {begun['commit']}"):
            log.write(f"2026-11-30 12:00:00 {line}\n")
    now = run_record.read(folder, "run").header
    assert now == begun | {"commit": f"{begun['commit']}; then 0123456789, changed"}
    shutil.copy(folder / "config.yaml", folder / "config.1.yaml")  # as --resume-override does
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace(f"# commit: {begun['commit']}", "# commit: 0123456789, changed"))
    assert run_record.read(folder, "run").header == now


def test_a_run_that_has_not_ended_is_told(digits_run, tmp_path):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    words = "The end of the training: 1 of 2 epochs are there; the run was stopped, or is under way"
    assert words not in made(tmp_path, str(folder), "--no-predictions").text
    lines = (folder / "log.txt").read_text().splitlines(keepends=True)
    in_first_epoch = [*lines[:-1], "2026-11-30 12:00:00 Continuing from last.pt\n"]
    for log in (lines[:-1], in_first_epoch, [line for line in lines if "training" not in line][:-1]):
        (folder / "log.txt").write_text("".join(log))
        assert words in made(tmp_path, str(folder), "--no-predictions").text


def test_a_run_that_was_killed_before_its_log_named_an_epoch_has_not_ended(digits_run, tmp_path):
    lines = (Path(digits_run) / "log.txt").read_text().splitlines(keepends=True)
    plan = itertools.takewhile(lambda line: " epoch 1/" not in line, lines)
    (tmp_path / "log.txt").write_text("".join(plan))
    missing = run_record.read(tmp_path, "run").missing
    assert "The end of the training: 0 epochs are there; the run was stopped, or is under way" in missing


def test_an_epoch_that_max_steps_cut_is_told_beside_its_figures(tmp_path):
    flags = "--arch fc --epochs 2 --max-steps 5 --batch-size 64 --train-samples 192 --max-val-batches 2".split()
    folder = Path(trained(tmp_path / "runs", *flags))
    words = "The end of epoch 2: --max-steps cut it, so the last figures are of its part"
    assert f"{words}; the best epoch is an earlier one" in made(tmp_path, str(folder), "--no-predictions").text
    text = (folder / "metrics.csv").read_text()
    header, first, last = (line.split(",") for line in text.splitlines())
    first[header.index("val_top1")] = ""
    (folder / "metrics.csv").write_text("\n".join(map(",".join, (header, first, last))) + "\n")
    record = run_record.read(folder, "run")  # without a validation of the first epoch, the cut one is the best
    assert any(line == words for line in record.missing)
    assert ("Highest top-1", "epoch 2 of 2") in [(one.name, one.small) for one in run_parts.of_training(record)]
    log = (folder / "log.txt").read_text()
    (folder / "log.txt").write_text(log.replace("training, cut at step 2 of 3 ", "training"))
    assert words not in made(tmp_path, str(folder), "--no-predictions").text


@pytest.mark.parametrize(
    ("flags", "told"),
    [("--max-steps 3", True), ("--max-steps 5", True), ("", False), ("--early-stopping 1 --lr 1e-9", False)],
)
def test_epochs_that_max_steps_left_out_are_told_and_none_that_early_stopping_did(flags, told, tmp_path):
    common = "--arch fc --epochs 3 --batch-size 64 --train-samples 192 --max-val-batches 2"
    folder = Path(trained(tmp_path / "runs", *common.split(), *flags.split()))
    record = run_record.read(folder, "run")
    lines = [line for line in record.missing if line.startswith("The end of the training")]
    done = 2 if "5" in flags else 1
    assert lines == told * [f"The end of the training: {done} of 3 epochs are there; --max-steps ended it"]
    rows = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(rows[:-1]))  # a row that was lost is no epoch that was left out
    lost = run_record.read(folder, "run").missing
    assert any(line.startswith("The end of the training") for line in lost) is told


def test_an_image_that_has_gone_is_left_out(predictions):
    picture = Mock(side_effect=OSError("it is gone"))
    predicted = details.Predicted(0, predictions, predictions.ids, picture, "digits")
    chosen = details.choose(predicted, 1)
    store = thumbnails.Thumbnails()
    assert details.add_pictures(predicted, chosen, store, lambda: None) == {}
    detail = details.detail(predicted, chosen, store, {}, 1)
    assert detail["shownCells"] == [] and {row[1] for row in detail["rows"]} == {None}
    assert len(predicted.notes) == 1 and "it is gone" in predicted.notes[0]


def test_heat_maps_stand_beside_mistakes(digits_run, tmp_path):
    page = made(tmp_path, digits_run, "--heat-maps")
    (detail,) = page.data["details"]
    shown = {*detail["mistakes"], *detail["unsure"]}
    assert shown and all((row[6] is not None) == (place in shown) for place, row in enumerate(detail["rows"]))


def test_outputs_that_are_no_numbers_leave_a_report_without_predictions(digits_run, tmp_path):
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    path = tmp_path / "nan.pt"
    state = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    for weights in (state["model"], state["ema"]["weights"] if "weights" in (state.get("ema") or {}) else {}):
        for value in weights.values():
            value.fill_(float("nan"))
    torch.save(state, path)
    page = made(tmp_path, str(path), "--raw")
    assert "not finite numbers (NaN or infinite)" in page.text and not page.data["details"]


def test_a_matrix_without_room_keeps_the_most_frequent_confusion_of_each_class(page, digits_run, tmp_path, monkeypatch):
    whole = page.data["details"][0]
    monkeypatch.setattr(details, "MOST_CELLS", 1)
    small = made(tmp_path, str(digits_run)).data["details"][0]
    wrong, kept = ([one for one in zip(*of["matrix"], strict=True) if one[0] != one[1]] for of in (whole, small))
    assert kept == [one for place, one in enumerate(wrong) if one[0] not in {label for label, *_ in wrong[:place]}]
    assert len(wrong) > len(kept) > 1 and not whole["matrixNote"]
    assert small["matrixNote"] == f"{len(wrong) - len(kept)} further cells with the fewest images are not shown."


def test_cells_get_room_in_turn_after_those_that_are_listed(monkeypatch):
    monkeypatch.setattr(details, "LISTED_CELLS", 1)
    assert details.in_order_of_cells([(None, [1, 2]), (None, [3, 4, 5]), (None, [6])]) == [1, 2, 1, 3, 6, 2, 4, 5]
