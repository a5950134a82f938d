"""Tools on a trained run of several labels an image: soups, temperature, distances, features, sweeps' results."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from torch.nn import functional

from main import main
from models import load_model
from scripts import average_checkpoints, evaluate, features, predict
from scripts.common.choice import Chosen
from scripts.common.features import chosen_of, embed, on_data
from scripts.common.label_answers import LabelAnswers
from scripts.common.neighbours import TEMPERATURE, votes
from scripts.common.predictions import predict_split
from scripts.common.probe import fit_probe, score_of
from scripts.common.trained import open_run
from scripts.evaluation.distance import fit_distance
from scripts.evaluation.summary import fit_temperature
from scripts.sweeps import outcomes
from scripts.sweeps.cross_validation import cross_validate
from scripts.sweeps.grid import trials
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import curves, differences, rows
from tests.helpers import csv_rows, run_in, trained
from tests.scripts.test_export import exported, printed_by_card, reloads_in_this_process  # noqa: F401 - a fixture
from tests.scripts.test_serve import Running
from utils.checkpoint import checkpoint
from utils.config.settings import UserError
from utils.record.multilabel import MultilabelClasses
from utils.record.reading import OneLabel, SeveralLabels

NAMES = ("red", "green", "blue")
QUIET = ("--device", "cpu", "--no-progress", "--workers", "0")
COUNTS = {"train": 90, "val": 60}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Noise whose channels are brighter where a label says so; some labels missing, three images a group."""
    folder = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    rows = []
    for split, count in COUNTS.items():
        for number in range(count):
            shown = random.random(3) < (0.6, 0.4, 0.2)
            pixels = random.integers(0, 180, (8, 8, 3)) + 60 * shown
            name = f"{split}{number}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
            cells = ["" if random.random() < 0.1 else str(int(one)) for one in shown]
            rows.append([name, split, f"{split}{number // 3}", *cells])
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "split", "group", *NAMES], *rows])
    return folder


@pytest.fixture(scope="module")
def flags(table):
    own = ["--dataname", "folder", "--datapath", str(table), "--labels", str(table / "labels.csv")]
    return [*own, "--label-columns", *NAMES, "--image-size", "8", "--arch", "fc", "--picture-epochs", "off", *QUIET]


@pytest.fixture(scope="module")
def runs(flags, tmp_path_factory):
    """Two runs that differ in their seed. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    line = [*flags, *"--epochs 3 --batch-size 30 --lr 0.05 --init default --seed".split()]
    return [str(trained(folder / seed, *line, seed)) for seed in ("0", "1")]


@pytest.fixture(scope="module")
def kept(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "kept.pt"
    assert evaluate.main([runs[0], "--store", str(path), "--distance", *QUIET]) == 0
    return path


def test_a_validation_and_the_tools_choose_each_groups_thresholds_on_other_groups(runs):
    predictions = predict_split(load_model(runs[0], best=False), Chosen(device="cpu", progress=False))
    recorded = float(rows(Path(runs[0]))[-1]["val_tuned_macro_f1"])
    grouped, apart = (
        MultilabelClasses.of(predictions.scores, predictions.targets, groups).tuned_macro_f1
        for groups in (predictions.groups, None)
    )
    assert recorded == pytest.approx(grouped) == pytest.approx(predictions.by_class.tuned_macro_f1)
    assert recorded != pytest.approx(apart)


def test_two_processes_have_the_figures_of_one_and_a_cut_run_goes_on_to_the_same_bits(flags, tmp_path):
    line = "--epochs 2 --global-batch-size 30 --val-batch-size 7 --mixup 0.2 --ema-decay 0.9 --deterministic".split()
    line = [*flags, *line, "--print-freq", "1", "--resume", "auto"]
    one = trained(tmp_path / "one", *line)
    for more in (("--max-steps", "4"), ()):
        cut = trained(tmp_path / "cut", *line, *more)
    assert differences(one, cut) == [] and rows(one) == rows(cut) and curves(one) == curves(cut)
    Forked(*line, "--output", tmp_path / "two", processes=2).output()
    two = run_in(tmp_path / "two")
    for name in ("val_map", "raw_val_map", "val_macro_f1", "val_count", "val_loss", "train_loss", "train_micro_f1"):
        (first, second) = ([float(row[name]) for row in rows(run)] for run in (one, two))
        assert first == pytest.approx(second, rel=1e-5), name  # of gradients that are added up in another order


@pytest.mark.parametrize(
    ("name", "more"),
    [("safetensors", []), pytest.param("onnx", ["--with-preprocessing"], marks=pytest.mark.thorough)],
)
def test_server_and_the_program_of_an_exports_card_give_the_labels_of_the_network(
    kept, table, tmp_path, monkeypatch, name, more
):
    assert "the same labels for 32 of 32 images" in exported(kept, name, tmp_path / "out", *more)
    loaded = load_model(kept)
    numbers = set()
    with Running(str(kept)) as server:
        for place in range(12):
            file = table / f"val{place}.png"
            logits = loaded.network(loaded.preprocessing(Image.open(file))[None])
            expected = {loaded.classes[one]: share for one, share in loaded.reading.labels(logits)[0]}
            status, answer = server.predict(file.read_bytes())
            served = {one["class"]: one["probability"] for one in answer["labels"]}
            assert status == 200 and served == pytest.approx(expected, abs=1e-6)
            (tmp_path / "out/image.jpg").write_bytes(file.read_bytes())
            lines = printed_by_card(tmp_path / "out", monkeypatch).splitlines()
            printed = {one: float(share) for one, _, share in (line.rpartition(" ") for line in lines)}
            shares = loaded.reading.probabilities(logits)[0].tolist()
            for one, share, least in zip(NAMES, shares, loaded.reading.thresholds, strict=True):
                if abs(share - least) > 0.02:  # Pillow rounds the pixels that it resizes
                    assert printed.get(one) == (pytest.approx(share, abs=0.02) if share > least else None)
            numbers.add(len(expected))
    assert numbers >= {0, 1, 2}, "of labels that an image has"


def test_a_run_of_a_single_label_is_read_by_the_tools(flags, tmp_path, capsys):
    line = [word for word in flags if word not in ("red", "blue")]
    run = trained(tmp_path, *line, "--max-steps", 1)
    reached = last_line(capsys)
    assert evaluate.main([str(run), *QUIET]) == 0
    assert last_line(capsys).items() <= reached.items()


def last_line(capsys):
    return dict(word.split("=") for word in capsys.readouterr().out.splitlines()[-1].split())


def answers(seed, n=4000, temperature=1.0, missing=0.2):
    """Answers whose labels are drawn from the probabilities of logits divided by ``temperature``."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 3, generator=random)
    labels = (torch.rand(n, 3, generator=random) < (logits / temperature).sigmoid()).float()
    labels[torch.rand(n, 3, generator=random) < missing] = float("nan")

    class Made(LabelAnswers):
        classes = NAMES

        def __len__(self):
            return len(self.logits)

    return Made(logits, labels, SeveralLabels((0.5, 0.5, 0.5)))


def test_the_temperature_of_several_labels_minimises_their_binary_cross_entropy_on_the_fitted_half():
    made = answers(0, temperature=1.7)
    fit = fit_temperature(made)
    assert fit.temperature == pytest.approx(1.7, rel=0.1)
    assert 3 * fit.calibration_error_after < fit.calibration_error_before
    judged = np.flatnonzero((made.targets >= 0).any(1))
    order = judged[np.random.default_rng(0).permutation(len(judged))]
    fitted, scored = order[: len(order) // 2], order[len(order) // 2 :]
    assert (fit.fitted_on_images, fit.scored_on_images) == (len(fitted), len(scored))

    def loss(which, temperature):
        known = ~made.labels[which].isnan()
        logits = made.logits[which][known].double() / temperature
        return functional.binary_cross_entropy_with_logits(logits, made.labels[which][known].double()).item()

    best = minimize_scalar(lambda log: loss(fitted, math.exp(log)), bounds=(-4, 4), method="bounded")
    assert fit.temperature == pytest.approx(math.exp(best.x), rel=1e-4)
    expected = (loss(scored, 1), loss(scored, fit.temperature))
    assert (fit.loss_before, fit.loss_after) == pytest.approx(expected, rel=1e-6)


def test_dividing_logits_changes_thresholds_and_no_answer():
    logits = 4 * torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    reading = SeveralLabels((0.5, 0.013, 0.9))
    divided = reading.divided(2.5)
    assert divided.thresholds[0] == 0.5 and divided.thresholds[1] > 0.013 and divided.thresholds[2] < 0.9
    assert torch.equal(reading.given(logits), divided.given(logits.double() / 2.5))
    assert OneLabel().divided(2.5) == OneLabel()


def test_a_copy_keeps_temperature_thresholds_and_distance_and_gives_the_answers_of_its_thresholds(
    runs, kept, table, tmp_path
):
    plain, divided = (load_model(kept, calibrated=one) for one in (False, True))
    stored = checkpoint.load(kept)
    assert plain.reading.thresholds == tuple(stored["thresholds"]) != divided.reading.thresholds
    temperature = divided.confidence.temperature
    images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    logits = plain.network(images)
    assert torch.allclose(divided.network(images), logits / temperature, rtol=1e-6)
    assert torch.equal(plain.reading.given(logits), divided.reading.given(divided.network(images)))
    assert len(divided.confidence.distance.centres) == 1  # of all images
    file = tmp_path / "predictions.csv"
    assert predict.main([str(kept), str(table / "val0.png"), "--output", str(file), "--device", "cpu"]) == 0
    (row,) = csv_rows(file)
    image = divided.preprocessing(Image.open(table / "val0.png"))[None]
    shares = divided.reading.probabilities(divided.network(image))[0]
    given = [
        name for name, share, least in zip(NAMES, shares, divided.reading.thresholds, strict=True) if share >= least
    ]
    assert sorted(filter(None, row["labels"].split(";"))) == sorted(given)
    assert float(row["distance"]) > 0


def test_the_distance_of_images_with_several_labels_is_mahalanobis_around_one_mean():
    random = np.random.default_rng(0)
    found = random.normal(size=(300, 4)) @ random.normal(size=(4, 4)) + 5
    distance = fit_distance(torch.from_numpy(found).float(), torch.zeros(300, 3))
    other = random.normal(size=(20, 4)) * 3
    inverse = np.linalg.inv(np.cov(found, rowvar=False, bias=True))
    around = other - found.mean(0)
    expected = np.sqrt(np.einsum("ni,ij,nj->n", around, inverse, around))
    np.testing.assert_allclose(distance(torch.from_numpy(other).float()).numpy(), expected, rtol=1e-4)


def test_calibrated_evaluation_has_the_same_map_and_files_hold_the_reliability(kept, runs, tmp_path, capsys):
    lines = []
    for which in (runs[0], str(kept)):
        assert evaluate.main([which, "--output", str(tmp_path / "out"), *QUIET]) == 0
        lines.append(last_line(capsys))
    assert {name for name in lines[0] if lines[0][name] != lines[1][name]} == {"val_loss"}
    content = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert content["kept"]["temperature"] and content["kept"]["fitted_on_some_of_these_images"]
    assert sum(one["images"] for one in content["reliability"]) == content["figures"]["known_labels"]


def test_own_thresholds_are_said_to_favour_the_images_that_chose_them_and_no_others(runs, table, tmp_path, capsys):
    text = (table / "labels.csv").read_text().replace("val,val", "test,val").replace("train,", "val,")
    (tmp_path / "others.csv").write_text(text)  # val has the images that the run was trained on
    others = ["--datapath", str(table), "--labels", str(tmp_path / "others.csv")]
    copy = str(tmp_path / "copy.pt")
    assert evaluate.main([runs[0], *others, "--store", copy, *QUIET]) == 0
    said = []
    for images in ([], others):
        capsys.readouterr()
        assert evaluate.main([copy, *images, *QUIET]) == 0
        said += [line for line in capsys.readouterr().out.splitlines() if line.startswith("macro F1, own")]
    assert ["chosen on these images" in line for line in said] == [False, True]


def test_thresholds_of_other_weights_are_left_out(kept, tmp_path):
    stored = checkpoint.load(kept)
    torch.save(stored | {"ema": {"model": stored["model"]}}, tmp_path / "averaged.pt")
    with pytest.warns(UserWarning, match="were fitted for other weights, and are not used"):
        average = load_model(tmp_path / "averaged.pt")
    assert average.reading.thresholds == (0.5, 0.5, 0.5) != tuple(stored["thresholds"])
    raw = load_model(tmp_path / "averaged.pt", raw=True, calibrated=False)
    assert raw.reading.thresholds == tuple(stored["thresholds"])


def test_a_comparison_matches_labels_by_name_where_two_runs_order_their_columns_differently(runs, tmp_path):
    state = checkpoint.load(Path(runs[1]) / "checkpoints/last.pt")
    last = {name: value.flip(0) for name, value in state["model"].items() if len(value) == len(NAMES)}
    settings = state["settings"] | {"label_columns": [*NAMES[::-1]]}
    state |= {"model": state["model"] | last, "classes": [*NAMES[::-1]], "settings": settings}
    torch.save(state, tmp_path / "reversed.pt")
    tables = []
    for second in (runs[1], str(tmp_path / "reversed.pt")):
        assert evaluate.main([runs[0], "--compare", second, "--output", str(tmp_path / "out"), *QUIET]) == 0
        tables.append((tmp_path / "out/comparison.csv").read_text())
    assert tables[0] == tables[1]


def test_a_soup_is_chosen_and_reported_by_mean_average_precision_and_evaluates_to_it(runs, flags, tmp_path, capsys):
    path = tmp_path / "soup.pt"
    line = ["--method", "greedy", "--checkpoints", *runs, "--output", str(path), *QUIET]
    assert average_checkpoints.main(line) == 0
    out = capsys.readouterr().out
    soup = dict(word.split("=") for word in out.splitlines()[-1].split())
    finals = (checkpoint.load(Path(run) / "checkpoints/final.pt") for run in runs)
    scores = [state["progress"]["last_validation"][1] for state in finals]
    assert float(soup["val_map"]) >= max(scores) - 1e-4 and "its map is of" in out
    assert main(["--evaluate", "--resume", str(path), *QUIET]) == 0
    assert last_line(capsys)["val_map"] == soup["val_map"]


def test_features_of_several_labels_are_measured_by_average_precision_and_stored(runs, tmp_path, capsys):
    line = [runs[0], "--output", str(tmp_path), "--neighbours", "5", "--format", "parquet", *QUIET]
    assert features.main(line) == 0
    said = capsys.readouterr().out
    own = on_data(open_run(runs[0], device="cpu"), [*QUIET])
    stored, made = (embed(own, chosen_of(own, "val"), place, "parquet") for place in (tmp_path, None))
    assert "are reused" in capsys.readouterr().err
    assert np.array_equal(stored.features, made.features) and np.array_equal(stored.labels, made.labels)
    found = dict(word.split("=") for word in said.splitlines()[-1].split())
    assert 100 > float(found["probe_map"]) > 50 and found["val_count"] == "60" and "no group in two of them" in said
    rows = csv_rows(tmp_path / "doubtful.csv")
    assert rows and all(row["likely"].removeprefix("not ") == row["label"].removeprefix("not ") for row in rows)


def targets(n=400, missing=0.0, seed=0):
    """Features and int8 targets that they tell, mostly."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(n, 6)).astype(np.float32)
    labels = (values[:, :3] + 0.7 * random.normal(size=(n, 3)) > 0.4).astype(np.int8)
    labels[random.random(labels.shape) < missing] = -1
    return values, labels


def test_the_probe_of_several_labels_is_scikit_learns_of_each_class_and_its_score_mean_average_precision():
    values, labels = targets(missing=0.3)
    probe = fit_probe(values, labels, 3)
    wide = (values - values.mean(0, dtype=np.float64)) / values.std(0, dtype=np.float64)
    for label, column in enumerate(labels.T):
        known = column >= 0
        reference = LogisticRegression(C=probe.strength, max_iter=3000, tol=1e-8).fit(wide[known], column[known])
        np.testing.assert_allclose(
            probe.probabilities(values)[:, label], reference.predict_proba(wide)[:, 1], atol=2e-3
        )
        own = column[known], probe.out_of_fold[known, label]
        assert average_precision_score(*own) > 1.5 * own[0].mean()
    assert score_of(probe.out_of_fold, labels) == pytest.approx(probe.scores[probe.strength], abs=3)


def test_a_label_of_which_one_value_is_known_is_that_value():
    values, labels = targets()
    labels[:, 0] = 1
    labels[:, 1] = np.where(labels[:, 1] > 0, -1, 0)
    shares = fit_probe(values, labels, 3).probabilities(values)
    assert (shares[:, 0] == 1).all() and (shares[:, 1] == 0).all() and 0 < shares[0, 2] < 1


def test_a_neighbour_whose_label_is_missing_has_no_vote():
    places = np.array([[0, 1, 2]])
    cosines = np.array([[1.0, 0.9, 0.8]], dtype=np.float32)
    cells = np.array([[1, -1, -1], [0, 1, -1], [1, 0, -1]], dtype=np.int8)
    weights = np.exp(np.array([0, -0.1, -0.2]) / TEMPERATURE)
    expected = [(weights[0] + weights[2]) / weights.sum(), weights[1] / weights[1:].sum(), 0]
    np.testing.assert_allclose(votes(places, cosines, cells, 3)[0], expected, rtol=1e-5)


def test_a_fold_without_a_label_chooses_no_strength():
    random = np.random.default_rng(0)
    features = random.normal(size=(60, 4)).astype(np.float32)
    labels = np.zeros((60, 1), np.int8)
    labels[:9] = 1
    features[:9, 0] += 3
    in_folds = fit_probe(features, labels, 1, np.arange(60) // 3)  # three groups of fifteen have a label
    assert np.isfinite([*in_folds.scores.values()]).all() and in_folds.scores[in_folds.strength] > 90
    with pytest.raises(UserError, match="none that a fold leaves out has a label"):
        fit_probe(features, 0 * labels, 1)


def test_a_validation_without_any_label_is_a_row_without_a_mean(table, flags, tmp_path):
    rows_of_table = csv_rows(table / "labels.csv")
    for row in rows_of_table:
        if row["split"] == "val":
            row |= dict.fromkeys(NAMES, str(int(row["path"] == f"val{COUNTS['val'] - 1}.png")))
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows_of_table[0]))
        writer.writeheader()
        writer.writerows(rows_of_table)
    line = ["--epochs", "1", "--batch-size", "30", "--val-batch-size", "9", "--max-val-batches", "1"]
    run = trained(tmp_path / "runs", *flags, "--labels", tmp_path / "labels.csv", *line)
    (row,) = rows(run)
    assert row["val_map"] == "nan" and int(row["val_count"]) == 9
    assert (run / "checkpoints/final.pt").is_file() and not (run / "checkpoints/best.pt").exists()


def test_no_group_is_on_both_sides_of_the_probes_folds():
    """Features that tell the group alone say nothing of a label that each group has drawn: half are right."""
    random = np.random.default_rng(0)
    groups = np.repeat([f"p{number}" for number in range(60)], 5)
    labels = np.repeat(random.integers(0, 2, 60), 5)
    values = np.repeat(random.normal(size=(60, 80)), 5, axis=0).astype(np.float32)
    apart, mixed = (fit_probe(values, labels, 2, one) for one in (groups, None))
    assert mixed.scores[mixed.strength] > 95 and apart.scores[apart.strength] < 70


def test_folds_of_several_labels_are_cross_validated_by_mean_average_precision(flags, table, tmp_path):
    own = ["--split-column", "off", "--epochs", "2", "--batch-size", "30"]
    planned = trials("digits/fc", [], 1, [*flags, *own], folds=2)
    for trial in planned:
        assert main([*trial.flags, "--output", str(tmp_path / "runs")]) == 0
    results = outcomes.finished(tmp_path / "runs", planned)
    lines = cross_validate(planned, results, tmp_path)
    rows = csv_rows(tmp_path / "out_of_fold_seed0.csv")
    assert len(rows) == sum(COUNTS.values())
    cells = {row["path"]: {name: row[name] for name in NAMES} for row in csv_rows(table / "labels.csv")}
    for row in rows:
        labels = cells[Path(row["image"]).name]
        assert row["class"] == ";".join(name for name, cell in labels.items() if cell == "1")
        assert row["unknown"] == ";".join(name for name, cell in labels.items() if cell not in ("0", "1"))
    assert any(row["unknown"] for row in rows)
    by_hand = []
    for trial in planned:
        made = predict_split(load_model(results[trial].folder, best=False), Chosen(device="cpu", progress=False))
        cells = zip(made.scores.T, made.targets.T, strict=True)
        by_hand.append(100 * np.mean([average_precision_score(t[t >= 0], s[t >= 0]) for s, t in cells]))
        assert results[trial].headline == "map" and results[trial].final == pytest.approx(by_hand[-1], abs=1e-3)
    (about,) = csv_rows(tmp_path / "cross_validation.csv")
    assert float(about["mean_map"]) == pytest.approx(np.mean(by_hand), abs=0.006)
    assert f"mAP {about['mean_map']} % over 2 runs" in lines[0]
    assert "final mAP" in outcomes.headers(results)
    assert all({"val_map", "best_map"} < row.keys() for row in outcomes.csv_rows(planned, results))
