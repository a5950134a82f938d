"""Confidence one can use: the temperature that a copy keeps, in every tool; what is rejected; distances of features."""

import dataclasses
import functools
import json
import shutil
from itertools import pairwise, permutations
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
import sklearn.metrics
import torch
from PIL import Image
from scipy.stats import binomtest
from sklearn.covariance import EmpiricalCovariance

from models import load_model
from models.confidence import KEY, Distance, divide_logits
from models.training_loss import build_teacher
from scripts import evaluate, predict
from scripts.common.answers import Answers
from scripts.common.choice import Chosen
from scripts.common.predictions import predict_split
from scripts.evaluation import distance as distances
from scripts.evaluation.distance import Separation, fit_distance
from scripts.evaluation.rejection import Curve, Rejection
from scripts.evaluation.summary import fit_temperature
from scripts.exporting import steps
from tests.helpers import altered, csv_rows, equal, image_tree
from tests.scripts.common.test_predictions import CPU, tree_of_digits
from tests.scripts.test_evaluate import answers, guesses
from tests.scripts.test_export import (
    check_card,
    digit,
    exported,
    reloads_in_this_process,  # noqa: F401
    subject_of,
)
from tests.scripts.test_serve import Running
from utils.checkpoint import checkpoint
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data.datasets import get_data

QUIET = ("--device", "cpu", "--no-progress", "--workers", "0")


@pytest.fixture(scope="module")
def kept(digits_run, tmp_path_factory):
    """A copy of the run's checkpoint with a temperature and a distance. Not to be changed."""
    path = tmp_path_factory.mktemp("kept") / "kept.pt"
    assert evaluate.main([digits_run, "--store", str(path), "--distance", *QUIET]) == 0
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of eight images that are no digits, in folders below."""
    return image_tree(tmp_path_factory.mktemp("photos"), {"below": 4}, size=20)


def evaluated(capsys, *line):
    capsys.readouterr()
    assert evaluate.main([*map(str, line), *QUIET]) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------- the copy


def test_the_copy_has_what_the_checkpoint_has_and_the_original_is_as_it_was(digits_run, kept):
    original = Path(digits_run, "checkpoints/last.pt")
    state = torch.load(original, weights_only=True)
    copy = torch.load(kept, weights_only=True)
    assert copy.keys() - state.keys() == {KEY} and KEY not in state
    for key in state.keys() - {"contents"}:
        assert equal(copy[key], state[key]), key
    checkpoint._verify(original, None)  # the digest that the run's manifest has
    assert checkpoint.load_run(kept).keys() == copy.keys(), "a run can go on from it"


def test_logits_are_divided_by_the_temperature_and_no_answer_changes(digits_run, kept):
    before = load_model(digits_run)
    after = load_model(kept)
    temperature = after.confidence.temperature
    assert before.confidence is None and not before.network._forward_hooks and temperature != 1
    images = torch.randn(500, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = before.network(images)
    assert torch.equal(after.network(images), logits / temperature)
    assert torch.equal(after.network(images).argmax(1), logits.argmax(1))
    assert torch.equal(load_model(kept, calibrated=False).network(images), logits)


@pytest.mark.parametrize("temperature", [0.02, 0.7, 1.0, 1.3, 7.77, 50.0])
def test_a_temperature_changes_no_answer_of_any_logits_in_half_precision(temperature):
    logits = 8 * torch.randn(20_000, 10, generator=torch.Generator().manual_seed(1))
    network = torch.nn.Identity().eval()
    divide_logits(network, temperature)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(network(logits.to(dtype)).argmax(1), logits.to(dtype).argmax(1))


def test_it_is_fitted_on_one_half_and_what_is_printed_is_of_the_other(digits_run, kept, capsys):
    plain = predict_split(load_model(digits_run), CPU)
    order = np.random.default_rng(0).permutation(360)
    fitted, scored = order[:180], order[180:]
    temperature = load_model(kept).confidence.temperature

    def loss(places, divisor):
        return torch.nn.functional.cross_entropy(plain.logits[places].double() / divisor, plain.labels[places]).item()

    nearby = [loss(fitted, temperature * factor) for factor in (0.99, 1, 1.01)]
    assert min(nearby) == nearby[1], "the minimum on the first half"
    lines = evaluated(capsys, kept).splitlines()
    words = f"loss {loss(scored, 1):.4f} and {loss(scored, temperature):.4f}"
    assert words in lines[2] and f"temperature {temperature:.4g}, fitted on 180 images (digits, val)" in lines[2]
    assert lines[3].startswith("fitted on some of these images, which favours")
    assert any(line.startswith("Temperature 1.000, ") for line in lines), "nothing is left to correct"
    now = loss(np.arange(360), temperature)
    assert lines[-1].endswith(f"val_loss={now:.4f} val_count=360")
    words = evaluated(capsys, digits_run)
    assert "keeps" not in words and words.splitlines()[-1].split()[0] == lines[-1].split()[0]


def test_images_that_it_was_not_fitted_on_are_not_said_to_be(kept, tmp_path, capsys):
    tree = tree_of_digits(tmp_path / "tree", {"7": 7, "2": 2}, count=5)
    assert "fitted on some of these" not in evaluated(capsys, kept, "--datapath", tree)


def test_other_weights_and_other_views_have_a_warning_and_other_weights_no_temperature(digits_run, kept, capsys):
    with pytest.warns(UserWarning, match="were fitted for other weights, and are not used"):
        raw = load_model(kept, raw=True)
    assert raw.confidence is None and not raw.network._forward_hooks
    predict_split(load_model(kept), dataclasses.replace(CPU, tta="flip"))
    assert "were fitted with --tta none, not flip" in capsys.readouterr().err
    path = kept.parent / "raw.pt"
    assert evaluate.main([digits_run, "--raw", "--store", str(path), *QUIET]) == 0
    assert load_model(path, raw=True).confidence.temperature and load_model(path, raw=True).confidence.distance is None


@pytest.mark.parametrize(
    "damage",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"weights": None, "more": 1},
        {"distance": {"mean": torch.zeros(3)}},
    ],
    ids=str,
)
def test_a_damaged_entry_is_one_line(kept, tmp_path, damage):
    state = torch.load(kept, weights_only=True)
    torch.save({**state, KEY: {**state[KEY], **damage}}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="its confidence is not what evaluate.py --store writes"):
        load_model(tmp_path / "bad.pt")


def test_a_teachers_layers_of_fp32_layers_compute_in_float32_under_the_students_autocast(digits_run, tmp_path):
    path = altered(digits_run, tmp_path / "teacher.pt", settings={"fp32_layers": ["layers.3"]})
    teacher = build_teacher(str(path), get_data(parse([]).data, torch.device("cpu")), torch.device("cpu"))
    seen = []
    for layer in (teacher.network.layers[1], teacher.network.layers[3]):
        layer.register_forward_hook(lambda *found: seen.append(found[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        teacher(torch.zeros(2, 1, 8, 8))
    assert seen == [torch.bfloat16, torch.float32]


def test_a_teacher_keeps_its_own_logits(digits_run, kept):
    data = get_data(parse([]).data, torch.device("cpu"))
    teachers = [build_teacher(str(path), data, torch.device("cpu")) for path in (digits_run, kept)]
    images = torch.randn(5, 1, 8, 8)
    assert torch.equal(*(teacher(images) for teacher in teachers))
    assert teachers[0].origin.digest == teachers[1].origin.digest


def test_classes_that_the_fitted_half_lacks_are_named():
    logits, labels = guesses(1)
    rare = int(np.random.default_rng(0).permutation(400)[200])  # which is scored
    labels[:] = labels % 6
    labels[rare] = 6
    assert fit_temperature(answers(logits, labels)).not_fitted_on == ["6"]
    assert fit_temperature(answers(*guesses(1))).not_fitted_on == []


def test_a_distance_that_is_too_large_is_left_out(digits_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.evaluation.result.LARGEST", 100)
    assert evaluate.main([digits_run, "--store", str(tmp_path / "a.pt"), "--distance", *QUIET]) == 0
    confidence = load_model(tmp_path / "a.pt").confidence
    assert confidence.distance is None and confidence.temperature is not None
    assert "is left out" in capsys.readouterr().err


def test_nothing_is_stored_where_nothing_is_determined(digits_run, tmp_path, capsys):
    tree = tree_of_digits(tmp_path / "tree", {"7": 7, "2": 2}, count=5)
    line = [digits_run, "--datapath", str(tree), *QUIET]
    with pytest.raises(UserError, match="determine no temperature, and nothing is stored"):
        evaluate.main([*line, "--store", str(tmp_path / "copy.pt")])
    assert not (tmp_path / "copy.pt").exists() and "val_count=10" in capsys.readouterr().out
    assert evaluate.main([*line, "--store", str(tmp_path / "copy.pt"), "--distance"]) == 0
    confidence = load_model(tmp_path / "copy.pt").confidence
    assert confidence.temperature is None and confidence.distance.fitted_on == 1437


# --------------------------------------------------------------------------------- the tools


def test_predict_and_serve_give_the_calibrated_probabilities_and_reject_below(kept, tmp_path, capsys):
    for number in range(40):
        digit(number).save(tmp_path / f"{number:02}.png")
    plain = load_model(kept, calibrated=False)
    temperature = plain.confidence.temperature
    images = torch.stack([plain.preprocessing(digit(number)) for number in range(40)])
    shares = (plain.network(images) / temperature).softmax(1)
    best = shares.max(1)
    line = [str(kept), str(tmp_path), "--reject-below", "0.8", "--top-k", "2", "--workers", "0", "--device", "cpu"]
    for ending in ("csv", "jsonl"):
        assert predict.main([*line, "--output", str(tmp_path / f"rows.{ending}")]) == 0
    rows = csv_rows(tmp_path / "rows.csv")
    lines = [json.loads(text) for text in (tmp_path / "rows.jsonl").read_text().splitlines()]
    sure = best.values >= 0.8
    assert 5 < sure.sum() < 35
    assert list(rows[0]) == "path class probability class_2 probability_2 rejected distance error".split()
    for row, one, share, place, is_sure in zip(rows, lines, *map(torch.Tensor.tolist, (*best, sure)), strict=True):
        name = plain.classes[place]
        assert (row["class"], row["rejected"]) == ((name, "") if is_sure else ("", name))
        assert (one["class"], one["rejected"]) == ((name, None) if is_sure else (None, name))
        assert float(row["probability"]) == pytest.approx(share, abs=1e-6) == one["probability"]
        assert one["top"][0]["class"] == name and float(row["distance"]) == one["distance"]
    with Running(str(kept), "--reject-below", "0.8") as server:
        for number in (0, int(sure.int().argmin()), int(sure.int().argmax())):
            status, answer = server.predict((tmp_path / f"{number:02}.png").read_bytes())
            assert status == 200 and answer["probability"] == pytest.approx(best.values[number].item(), abs=1e-6)
            name = plain.classes[best.indices[number]]
            assert (answer["class"], answer["rejected"]) == ((name, None) if sure[number] else (None, name))


def test_the_distance_that_predict_prints_is_that_of_the_features(digits_run, kept, tmp_path):
    digit(3).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    line = [str(kept), str(tmp_path / "a.png"), str(tmp_path / "b.png"), "--device", "cpu", "--workers", "0"]
    assert predict.main([*line, "--output", str(tmp_path / "rows.csv")]) == 1
    good, bad = csv_rows(tmp_path / "rows.csv")
    training, validation = (
        predict_split(load_model(digits_run), dataclasses.replace(CPU, split=split), features=True)
        for split in ("train", "val")
    )
    fitted = fit_distance(training.features, training.labels)
    found = fitted(validation.features)
    # seven digits are written, and float32 features of another batch differ in their last bits
    assert float(good["distance"]) == pytest.approx(found[3].item(), rel=1e-4) and bad["distance"] == ""
    assert list(good) == ["path", "class", "probability", "distance", "error"]
    assert load_model(kept).confidence.distance.usual == pytest.approx(np.quantile(found, 0.95), rel=1e-4)


@pytest.fixture(scope="module")
def export_of(kept, tmp_path_factory):
    """Function of a format and flags: what exporting so prints, and the folder. Each is exported once."""

    @functools.cache
    def export(name, *flags):
        output = tmp_path_factory.mktemp("exports") / "out"
        return exported(kept, name, output, *flags), output

    return export


@pytest.mark.parametrize(
    ("name", "flags"),
    [("onnx", []), ("torch-export", []), pytest.param("onnx", ["--with-preprocessing"], marks=pytest.mark.thorough)],
)
def test_an_export_gives_the_probabilities_of_the_tools(kept, export_of, name, flags):
    words, folder = export_of(name, *flags)
    assert "the same class for 32 of 32" in words
    loaded = load_model(kept)
    images = torch.stack([loaded.preprocessing(digit(number)) for number in range(30)])
    expected = loaded.network(images)
    if name == "onnx":
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        facts = session.get_modelmeta().custom_metadata_map
        assert json.loads(facts["temperature"]) == loaded.confidence.temperature
        assert json.loads(facts["divided_by_temperature"]) is True
        pixels = np.stack([np.asarray(digit(number))[None] for number in range(30)])
        (outputs,) = session.run(None, {"images": pixels if flags else images.numpy()})
    else:
        outputs = torch.export.load(folder / "model.pt2").module()(images).detach().numpy()
    torch.testing.assert_close(torch.from_numpy(outputs), expected.softmax(1) if flags else expected, rtol=0, atol=1e-5)
    card = (folder / "README.md").read_text()
    assert f"temperature {loaded.confidence.temperature:.4g}, fitted on 180 images (digits, val)" in card
    assert "the file divides the logits by it" in card and ", without the temperature" in card


def test_a_card_says_that_the_temperature_was_fitted_with_views_that_are_not_exported(kept, tmp_path, capsys):
    state = torch.load(kept, weights_only=True)
    torch.save({**state, KEY: {**state[KEY], "tta": "flip"}}, tmp_path / "flip.pt")
    exported(tmp_path / "flip.pt", "safetensors", tmp_path / "out")
    assert "were fitted with --tta flip, not none" in capsys.readouterr().err
    card = (tmp_path / "out/README.md").read_text()
    assert ", with test-time augmentation flip, which is not exported; the file holds weights alone" in card


@pytest.mark.parametrize("name", ["safetensors", "onnx"])
def test_the_program_of_a_card_gives_calibrated_probabilities(kept, export_of, monkeypatch, name):
    _, folder = export_of(name)
    check_card(folder, monkeypatch, load_model(kept), digit(5))


def test_an_8_bit_file_is_scored_with_the_temperature_inside(digits_run, kept, export_of, tmp_path):
    path = Path(shutil.copy(export_of("onnx")[1] / "model.onnx", tmp_path))
    words, _ = steps.quantise("static", subject_of(load_model(kept)), path, 256, CPU)
    in_float, in_8_bits = (float(number) for number in words.split("loss ")[1].split(",")[0].split(" and "))
    plain, calibrated = (predict_split(load_model(run), CPU).report.loss for run in (digits_run, kept))
    assert in_float == pytest.approx(calibrated, abs=1e-4)
    assert in_8_bits < plain and abs(in_8_bits - in_float) < 0.02


# --------------------------------------------------------------------------------- rejection


def brute_aurc(confidence, right):
    """Mean over all orders that sort by confidence."""
    areas = []
    for order in permutations(range(len(right))):
        if all(confidence[a] >= confidence[b] for a, b in pairwise(order)):
            wrong = [not right[place] for place in order]
            areas.append(np.mean([sum(wrong[:n]) / n for n in range(1, len(wrong) + 1)]))
    return np.mean(areas)


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_the_mean_over_the_orders_of_equal_confidences(seed):
    random = np.random.default_rng(seed)
    confidence = random.integers(1, 5, 7) / 4
    right = random.random(7) < 0.6
    curve = Curve.of(confidence, right)
    assert curve.aurc == pytest.approx(brute_aurc(confidence, right), abs=1e-12)
    assert curve.random == pytest.approx(brute_aurc(np.ones(7), right), abs=1e-12)
    assert curve.perfect == pytest.approx(brute_aurc(right.astype(float), right), abs=1e-12)
    for coverage, accuracy, threshold in zip(curve.coverage, curve.accuracy, np.unique(confidence)[::-1], strict=True):
        taken = confidence >= threshold
        assert (coverage, accuracy) == pytest.approx((taken.mean(), right[taken].mean()))


def test_what_is_accepted_has_its_intervals_and_nothing_accepted_has_none():
    found = answers(*guesses(3))
    threshold = float(np.quantile(found.confidence, 0.4))
    one = Rejection.of(found, threshold)
    taken = found.confidence >= threshold
    figures = one.figures()
    assert (one.accepted, one.right) == (taken.sum(), found.right[taken].sum()) and 0 < one.accepted < 400
    for name, hits, count in (("coverage", one.accepted, 400), ("accuracy", one.right, one.accepted)):
        interval = binomtest(int(hits), int(count)).proportion_ci(method="wilson")
        assert figures[f"{name}_interval_wilson"] == pytest.approx((100 * interval.low, 100 * interval.high))
        assert figures[name] == pytest.approx(100 * hits / count)
    assert Rejection.of(found, 0).accepted == 400
    none = Rejection.of(found, 1).figures()
    assert (none["accepted"], none["accuracy"], none["accuracy_interval_wilson"]) == (0, None, None)


def test_a_confidence_at_the_threshold_is_accepted_and_no_number_is_not():
    logits = torch.tensor([[0.3, 0.3], [float("nan"), 1.0], [1.0, 1.0], [40.0, 0.0]])
    found = Answers(logits, torch.tensor([0, 0, 1, 0]))
    assert Rejection.of(found, 0.5)[2:4] == (3, 2)
    share = torch.tensor([[0.9, 0.1]]).log().softmax(1).max().item()
    assert predict.accepted(share, 0.9) and not predict.accepted(share, 0.9001)


# ---------------------------------------------------------------------------------- distance


def blobs(seed=0):
    """600 features of three overlapping classes with one covariance, and labels."""
    random = np.random.default_rng(seed)
    labels = np.arange(600) % 3
    mixed = random.normal(size=(5, 5))
    features = random.normal(size=(600, 5)) @ mixed + 3 * random.normal(size=(3, 5))[labels]
    return features.astype(np.float32), labels


def test_distances_are_scikit_learns_mahalanobis_to_the_nearest_class():
    features, labels = blobs()
    others, _ = blobs(seed=1)
    means = np.stack([features[labels == one].mean(0, dtype=np.float64) for one in range(3)])
    covariance = EmpiricalCovariance(assume_centered=True).fit(features - means[labels])
    squares = np.stack([covariance.mahalanobis(others - mean) for mean in means])
    found = fit_distance(torch.from_numpy(features), torch.from_numpy(labels))(torch.from_numpy(others))
    # whitening is kept in float32: 2^-24 of each number, of products of five, some tenfold by their condition
    np.testing.assert_allclose(found, np.sqrt(squares.min(0)), rtol=1e-5)


def test_a_feature_that_never_varies_and_a_class_without_images_count_for_nothing():
    features, labels = map(torch.from_numpy, blobs())
    constant = torch.cat([features, torch.full((600, 1), 7.0)], 1)
    plain = fit_distance(features, labels)
    more = fit_distance(constant, torch.where(labels == 2, 9, labels))
    seen = torch.cat([features[:9], torch.full((9, 1), 7.0)], 1)
    torch.testing.assert_close(more(seen), plain(features[:9]), rtol=1e-5, atol=1e-5)
    broken = features.clone()
    broken[0, 0] = float("inf")
    assert fit_distance(broken, labels).fitted_on == 599 and plain(broken)[:2].isnan().tolist() == [True, False]
    with pytest.raises(UserError, match="are all the same"):
        fit_distance(torch.ones(10, 3), torch.zeros(10, dtype=torch.int64))


def test_separations_are_scikit_learns_and_ties_are_on_one_side():
    random = np.random.default_rng(0)
    own, others = random.integers(3, 12, 200) / 4, random.integers(0, 9, 150) / 4
    found = Separation.of(own, others)
    area = sklearn.metrics.roc_auc_score([1] * 200 + [0] * 150, [*own, *others])
    assert found.auroc == pytest.approx(100 * area)
    threshold = max(one for one in own if (own >= one).mean() >= 0.95)
    assert found.false_positives == pytest.approx(100 * (others >= threshold).mean())
    assert Separation.of(np.array([2.0, 3.0]), np.array([-np.inf, np.nan, 1.0])) == (100, 0)
    assert Separation.of(np.ones(4), np.ones(3)) == (50, 100)
    equal = np.arange(100.0)  # a straight line, none of whose points may be left out
    assert Separation.of(equal, equal) == pytest.approx((50, 95))


def test_other_images_are_told_apart_and_pictured(digits_run, photos, tmp_path, capsys):
    line = (digits_run, "--other-images", photos, "--reject-below", 0.8)
    words = evaluated(capsys, *line, "--output", tmp_path / "out")
    assert f"Other images: 8 of {photos}, beside the 360 above" in words and "warning" not in words
    content = json.loads((tmp_path / "out/evaluation.json").read_text(), parse_constant=pytest.fail)
    found = content["other_images"]
    assert found["distance_fitted_on"] == 1437 and found["images"] == 8
    loaded = load_model(digits_run)
    features = {
        split: predict_split(loaded, dataclasses.replace(CPU, split=split), features=True) for split in ("train", "val")
    }
    fitted = fit_distance(features["train"].features, features["train"].labels)
    names = tuple(str(path) for path in sorted(photos.rglob("*.png")))
    others = predict_split(loaded, dataclasses.replace(CPU, files=names, workers="0"), features=True)
    scores = [-fitted(one.features).numpy() for one in (features["val"], others)]
    area = sklearn.metrics.roc_auc_score([1] * 360 + [0] * 8, np.concatenate(scores))
    assert found["distance"]["auroc"] == pytest.approx(100 * area, abs=0.01) and area > 0.9
    rejection = content["rejection"]
    rows = csv_rows(tmp_path / "out/predictions.csv")
    taken = [row["right"] == "1" for row in rows if float(row["probability"]) >= 0.8]
    assert (rejection["accepted"], rejection["right"]) == (len(taken), sum(taken))
    for name in ("coverage.png", "other_images.png"):
        assert Image.open(tmp_path / "out" / name).size[0] >= 700
    evaluated(capsys, digits_run, "--output", tmp_path / "out")
    assert not (tmp_path / "out/coverage.png").exists(), "an earlier evaluation's"


def test_the_distance_is_of_the_runs_own_training_images_though_another_table_is_evaluated(digits_run, monkeypatch):
    asked = []

    def predict(_, chosen, *__, **___):
        asked.append((chosen.split, chosen.datapath, chosen.labels))
        raise UserError("that is enough")

    monkeypatch.setattr("scripts.common.predictions.predict_split", predict)
    own = evaluate.build_parser().parse_args([digits_run, "--labels", "other.csv", "--store", "a.pt", "--distance"])
    with pytest.raises(UserError, match="enough"):
        evaluate.measure_distance(own, load_model(digits_run), Chosen.of(own), None, None)
    assert asked == [("train", None, None)]


def test_a_kept_distance_is_used_without_the_training_images(kept, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(distances, "fit_distance", Mock(side_effect=AssertionError("fitted again")))
    assert "of 1,437 training images" in evaluated(capsys, kept, "--other-images", photos)
    words = evaluated(capsys, kept, "--other-images", photos, "--split", "train")
    assert "the distance was fitted on 1,437 of the images above, which favours it" in words


def test_only_some_training_images_are_fitted_on_and_all_classes_are_among_them(digits_run, monkeypatch, tmp_path):
    monkeypatch.setattr(distances, "MOST_FITTED", 300)
    assert evaluate.main([digits_run, "--store", str(tmp_path / "a.pt"), "--distance", *QUIET]) == 0
    distance = load_model(tmp_path / "a.pt").confidence.distance
    assert isinstance(distance, Distance) and distance.fitted_on == 300 and len(distance.centres) == 10
    chosen = predict_split(load_model(digits_run), Chosen(split="train", most=300, device="cpu", progress=False))
    assert len(chosen) == 300 and len(set(chosen.numbers.tolist())) == 300 and np.ptp(chosen.numbers) > 1200


def test_weights_that_the_run_has_replaced_meanwhile_get_no_temperature_of_the_ones_before(
    digits_run, tmp_path, monkeypatch
):
    path = altered(digits_run, tmp_path / "last.pt")

    def meanwhile(*given, evaluate=evaluate.evaluate):
        found = evaluate(*given)
        altered(digits_run, path, progress={"step": 31})
        return found

    monkeypatch.setattr(evaluate, "evaluate", meanwhile)
    with pytest.raises(UserError, match=r"--store: .*last\.pt has other weights now than were evaluated"):
        evaluate.main([str(path), "--store", str(tmp_path / "kept.pt"), *QUIET])
    assert not (tmp_path / "kept.pt").exists()


def test_a_copy_is_not_stored_again(kept, tmp_path):
    with pytest.raises(UserError, match="is such a copy already"):
        evaluate.main([str(kept), "--store", str(tmp_path / "twice.pt"), *QUIET])
