"""Pictures of a validation: right against scikit-learn and TensorBoard, the same on any ranks, once a tag and step."""

import csv
import io
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from PIL import Image, ImageFont
from sklearn.metrics import confusion_matrix
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.projector import projector_plugin
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from torch import nn
from torch.utils.tensorboard import summary

import main
from tests.helpers import csv_rows, points_of, trained
from utils.checkpoint.progress import Progress
from utils.config.arguments import parse
from utils.config.groups.run import RunSettings
from utils.loop import validation
from utils.record import board
from utils.record.metrics import ClassReport
from utils.record.pictures import collector as collecting
from utils.record.pictures import drawing, projector
from utils.record.pictures.collector import Collector, Mistake, Point
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")
CLASSES = 4
COUNT = 50
BATCH = 8
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(COUNT, 1, 6, 6, generator=GENERATOR)
TARGETS = torch.randint(CLASSES, (COUNT,), generator=GENERATOR)
NAMES = [f"class {number}" for number in range(CLASSES)]
ALONE = Distributed(RankInfo(), RunSettings(device="cpu"))


class Recorded:
    """Keeps what this rank adds; with ``others``, the ranks are these."""

    def __init__(self, others=()):
        self.others = others

    def all_reduce_sum(self, counts):
        self.counts = counts.clone()
        return sum(other.counts for other in self.others) if self.others else counts

    def gather(self, mine):
        self.mine = mine
        return [other.mine for other in self.others] or [mine]


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, CLASSES)).eval()


def normalised(images):
    return images * 2 - 1


def collected(rank=0, ranks=1, model=None):
    """A collector that has seen every ``ranks``-th batch of the images above."""
    model = model or network()
    collector = Collector(model, model, CLASSES, COUNT, lambda images: (images + 1) / 2, CPU)
    for first in range(rank * BATCH, COUNT, ranks * BATCH):
        part = np.arange(first, min(first + BATCH, COUNT))
        collector.before_batch(SimpleNamespace(images=normalised(IMAGES[part]), targets=TARGETS[part], indices=part))
        with torch.no_grad():
            logits = collector(normalised(IMAGES[part]))
            assert torch.equal(logits, model(normalised(IMAGES[part]))), "it looks on and changes nothing"
    collector.close()
    return collector


@pytest.fixture(scope="module")
def gathered():
    return collected().gather(ALONE)


@pytest.fixture(scope="module")
def shares():
    """The network's probabilities of all images."""
    with torch.no_grad():
        return network()(normalised(IMAGES)).softmax(1)


# ------------------------------------------------------------------------------------ what is gathered


def test_the_matrix_is_scikit_learns(gathered, shares):
    assert (gathered.confusion == confusion_matrix(TARGETS, shares.argmax(1))).all()


def test_the_matrix_has_top1s_hits_also_where_logits_are_not_finite_or_have_equal_probabilities():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, 1, 2, 0], [0, 1, inf, 0], [0, 1e-9, 0, 0], [0, 1, 2, 3]])
    targets = torch.tensor([0, 2, 1, 0])
    fixed = nn.Module()
    fixed.forward = lambda images: logits
    collector = Collector(fixed, fixed, CLASSES, len(logits), lambda images: images, CPU)
    collector.before_batch(SimpleNamespace(targets=targets, indices=np.arange(len(logits))))
    collector(torch.zeros(len(logits), 1, 6, 6))
    found = collector.gather(ALONE)
    by_class = ClassReport.of(logits, targets)
    assert (found.confusion.diagonal() == by_class.right).all() and by_class.right.sum() == 2
    assert (found.confusion.sum(0) == by_class.predicted).all(), "NaN answers nothing"
    assert [(one.index, one.predicted) for one in found.mistakes] == [(3, 3)]


def test_the_curves_are_those_that_torch_writes_for_tensorboard(gathered, shares):
    is_target = nn.functional.one_hot(TARGETS, CLASSES).bool().numpy()
    pairs = [(is_target.ravel(), shares.numpy().ravel())]
    pairs += [(is_target[:, number], shares[:, number].numpy()) for number in range(CLASSES)]
    for counts, (labels, predictions) in zip(gathered.curves, pairs, strict=True):
        assert board.precision_recall("x", counts) == summary.pr_curve("x", labels, predictions, 127)


def test_the_worst_mistakes_are_the_most_confident_and_show_their_images(gathered, shares):
    sure, predicted = shares.max(1)
    wrong = [number for number in range(COUNT) if predicted[number] != TARGETS[number]]
    expected = sorted(wrong, key=lambda number: -sure[number])[: collecting.MOST_MISTAKES]
    assert len(expected) == collecting.MOST_MISTAKES and [one.index for one in gathered.mistakes] == expected
    for one in gathered.mistakes:
        assert (one.target, one.predicted) == (TARGETS[one.index], predicted[one.index])
        assert one.share == pytest.approx(sure[one.index].item())
        np.testing.assert_array_equal(one.pixels, IMAGES[one.index].mul(255).round().byte().numpy())


def test_the_points_are_what_the_output_layer_gets(gathered, shares):
    features = network()[:3](normalised(IMAGES)).detach().numpy()
    assert [one.index for one in gathered.points] == list(range(COUNT))
    np.testing.assert_allclose(np.stack([one.features for one in gathered.points]), features, rtol=1e-5)
    assert [one.predicted for one in gathered.points] == shares.argmax(1).tolist()
    assert gathered.points[0].pixels.shape == (1, 32, 32)


def test_of_a_large_set_a_part_is_shown_that_is_spread_over_it(monkeypatch):
    monkeypatch.setattr(collecting, "MOST_POINTS", 5)
    assert [one.index for one in collected().gather(ALONE).points] == [0, 12, 24, 37, 49]


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gathers_the_same(ranks, gathered):
    all_ranks = [Recorded() for _ in range(ranks)]
    for rank, recorded in enumerate(all_ranks):
        collected(rank, ranks).gather(recorded)
    together = collected(0, ranks).gather(Recorded(all_ranks))
    assert (together.confusion == gathered.confusion).all() and (together.curves == gathered.curves).all()
    for one, other in zip((*together.mistakes, *together.points), (*gathered.mistakes, *gathered.points), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_equally_sure_mistakes_come_in_the_order_of_the_set_on_any_number_of_ranks():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))
    nn.init.zeros_(model[1].weight)  # always the same answer, equally sure
    expected = [number for number in range(COUNT) if TARGETS[number] != model[1].bias.argmax()]
    all_ranks = [Recorded() for _ in range(2)]
    for rank, recorded in enumerate(all_ranks):
        collected(rank, 2, model).gather(recorded)
    mistakes = collected(0, 2, model).gather(Recorded(all_ranks)).mistakes
    assert [one.index for one in mistakes] == expected[: collecting.MOST_MISTAKES]


def test_many_classes_have_neither_matrix_nor_curves_of_their_own(monkeypatch):
    monkeypatch.setattr(collecting, "MOST_CLASSES", 3)
    monkeypatch.setattr(collecting, "MOST_CURVES", 3)
    few = collected().gather(ALONE)
    assert few.confusion is None and len(few.curves) == 1 and few.curves.sum() == COUNT * CLASSES


def test_views_of_an_image_have_the_mean_of_their_features():
    model = network()
    twice = nn.Module()
    twice.forward = lambda images: (model(images) + model(images.flip(-1))) / 2
    collector = Collector(twice, model, CLASSES, COUNT, lambda images: images, CPU)
    part = np.arange(3)
    collector.before_batch(SimpleNamespace(images=IMAGES[part], targets=TARGETS[part], indices=part))
    collector(IMAGES[part])
    features = (model[:3](IMAGES[part]) + model[:3](IMAGES[part].flip(-1))) / 2
    points = collector.gather(ALONE).points
    np.testing.assert_allclose(np.stack([one.features for one in points]), features.detach(), rtol=1e-5)


# ---------------------------------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("flags", "epochs_with_pictures"),
    [
        ((), [6]),
        (("--picture-epochs", "off"), []),
        (("--picture-epochs", "2"), [2, 4, 6]),
        (("--picture-epochs", "4"), [4, 6]),
        (("--early-stopping", "2"), [3, 4, 5, 6]),  # which may turn out to be the last: epoch 1 was the best
    ],
)
def test_pictures_are_gathered_after_the_epochs_that_may_want_them(flags, epochs_with_pictures):
    args = parse(["--epochs", "6", *flags])
    seen = [
        epoch
        for epoch in range(1, 7)
        if validation.pictures_may_be_due(Progress(epoch=epoch - 1, stopping_epoch=1), args)
    ]
    assert seen == epochs_with_pictures


def test_a_run_cut_by_max_steps_has_pictures_of_its_last_validation():
    args = parse(["--epochs", "6", "--max-steps", "30"])
    assert validation.pictures_may_be_due(Progress(epoch=1, step=30), args) and not validation.pictures_may_be_due(
        Progress(epoch=0, step=23), args
    )


# --------------------------------------------------------------------------------------------- drawn


def test_a_row_of_the_matrix_is_a_true_class():
    counts = np.array([[3, 1], [0, 4]])
    picture = drawing.confusion_matrix(counts, ["a", "b"])
    fine = drawing.FINE
    cell = round(ImageFont.load_default(fine * 14).getlength("10")) + 6 * fine  # room for the widest number
    margin = picture.shape[0] - 4 * fine - 2 * cell
    corners = picture[margin + fine :: cell, margin + fine :: cell][:2, :2].astype(int)  # beside the numbers
    assert corners[1, 0].tolist() == [255, 255, 255] and corners[0, 1].tolist() != [255, 255, 255]
    assert corners[1, 1].tolist() == drawing.BLUE.tolist(), "the shade is the share of the row"


@pytest.mark.parametrize("number", [2, 30, 100, 1000])
def test_a_matrix_has_a_size_that_can_be_looked_at(number):
    picture = drawing.confusion_matrix(
        np.eye(number, dtype=np.int64), [f"a name of a class {n}" for n in range(number)]
    )
    assert picture.dtype == np.uint8 and picture.shape[2] == 3 and 100 < max(picture.shape) < 1200


@pytest.mark.parametrize("channels", [1, 3])
def test_mistakes_are_drawn_in_rows(channels):
    pixels = np.zeros((channels, 8, 8), np.uint8)
    one = Mistake(7, 0, 1, 0.98, pixels)
    sizes = [drawing.worst_mistakes([one] * number, NAMES).shape[:2] for number in (1, 6, 7)]
    assert sizes[0][1] < sizes[1][1] == sizes[2][1] and sizes[0][0] == sizes[1][0] < sizes[2][0]
    levels = [20, 60, 100, 140, 180, 220, 250]
    picture = drawing.worst_mistakes([one._replace(pixels=pixels + np.uint8(level)) for level in levels], NAMES)
    side, columns = drawing.TILE, drawing.COLUMNS
    for place, level in enumerate(levels):
        left = drawing.GAP + place % columns * (side + drawing.GAP)
        top = drawing.GAP + place // columns * (side + drawing.CAPTION + drawing.GAP)
        assert (picture[top : top + side, left : left + side] == level).all()


def test_tensorboards_projector_reads_the_files(tmp_path):
    generator = np.random.default_rng(0)
    points = [
        Point(
            number, number % 3, 0, generator.normal(size=7).astype(np.float32), np.full((3, 32, 32), number, np.uint8)
        )
        for number in range(5)
    ]
    projector.write(tmp_path, points, ["a", "with\ttab", "c"])
    config = text_format.Parse((tmp_path / "projector_config.pbtxt").read_text(), ProjectorConfig())
    (embedding,) = config.embeddings
    features = projector_plugin._read_tensor_tsv_file(str(tmp_path / embedding.tensor_path))
    np.testing.assert_allclose(features, np.stack([one.features for one in points]), rtol=1e-3)
    with open(tmp_path / embedding.metadata_path, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["class"] for row in rows] == ["a", "with tab", "c", "a", "with tab"]
    with Image.open(tmp_path / embedding.sprite.image_path) as sprite:
        assert sprite.size == (96, 96) and sprite.getpixel((40, 40)) == (4, 4, 4), "the fifth is below the second"
    assert not list(tmp_path.rglob("*.tmp"))


# ----------------------------------------------------------------------------------------- a whole run

TAGS = {"Confusion_Matrix/Test", "Worst_Mistakes/Test", "Precision_Recall/of all", "Precision_Recall/9"}
FLAGS = tuple("--device cpu --no-progress --arch fc --batch-size 96 --epochs 3 --ema-decay 0.8".split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with pictures after each epoch, which a stop after the second has divided; and all that was gathered."""
    place = tmp_path_factory.mktemp("runs")
    kept = []
    patch = pytest.MonkeyPatch()
    gather = Collector.gather
    patch.setattr(Collector, "gather", lambda self, distributed: kept.append(gather(self, distributed)) or kept[-1])
    folder = trained(place, *FLAGS, "--picture-epochs", 1, "--max-steps", 32)  # two epochs and two steps
    assert main.main(["--resume", str(folder), "--no-progress"]) == 0
    patch.undo()
    return folder, kept


def test_each_tag_and_step_is_there_once_also_after_a_resume(run):
    folder, _ = run
    found = [place for place, _ in points_of(folder)]
    assert len(found) == len(set(found))
    pictured = {step for tag, step in found if tag in TAGS}
    assert {(tag, step) for tag in TAGS for step in pictured} <= set(found) and pictured >= {15, 30, 45}


def test_the_pictures_are_of_the_result_that_counts(run):
    folder, kept = run
    last = csv_rows(folder / "metrics.csv")[-1]
    matrix = kept[-1].confusion
    assert last["val_top1"] != last["raw_val_top1"], "the average's figures are not those of the raw weights"
    assert float(last["val_top1"]) == pytest.approx(100 * np.trace(matrix) / matrix.sum(), abs=1e-3)
    assert matrix.sum() == int(last["val_count"]) == len(kept[-1].points)
    assert (folder / "projector" / "features.tsv").is_file()
    width, height, png = dict(points_of(folder))["Confusion_Matrix/Test", 45].tensor.string_val
    drawn = drawing.confusion_matrix(matrix, [str(digit) for digit in range(10)])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), drawn)
    assert (int(height), int(width)) == drawn.shape[:2]


def test_the_best_so_far_is_charted(run):
    folder, _ = run
    rows = csv_rows(folder / "metrics.csv")
    best = {step: value.tensor.float_val[0] for (tag, step), value in points_of(folder) if tag == "Best/Top1"}
    assert best[45] == pytest.approx(max(float(row["val_top1"]) for row in rows), abs=1e-3)


def test_the_run_has_its_row_in_the_table_of_runs_and_no_run_inside(run):
    folder, _ = run
    (value,) = [value for (tag, _), value in points_of(folder) if tag == metadata.SESSION_START_INFO_TAG]
    row = metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content).hparams
    assert row["arch"].string_value == "fc" and row["lr"].number_value == 0.1 and row["epochs"].number_value == 3
    assert row["nesterov"].string_value == "false" and row["clip_grad_norm"].string_value == "none"
    assert {path.parent for path in folder.parent.rglob("events.out.tfevents.*")} == {folder}


def test_a_run_that_goes_on_with_other_settings_has_these_in_its_row(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    line = ["--resume", str(folder), "--resume-override", "--epochs", "4", "--lr", "0.01", "--max-steps", "46"]
    assert main.main([*line, "--no-progress"]) == 0
    found = points_of(folder)
    assert len({place for place, _ in found}) == len(found)
    (value,) = [value for (tag, _), value in found if tag == metadata.SESSION_START_INFO_TAG]
    row = metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content).hparams
    assert row["lr"].number_value == 0.01 and row["epochs"].number_value == 4
    texts = {step: value.tensor.string_val[0].decode() for (tag, step), value in found if tag.startswith("Settings")}
    assert set(texts) == {0, 45} and "lr: 0.01  # flag" in texts[45] and "lr: 0.1  # default" in texts[0]
    assert "# plan: Optimizer: sgd, momentum 0.9" in texts[0] and "# plan: Steps: 15 an epoch x 4" in texts[45]


def test_the_charts_lay_over_another_what_the_run_has(run):
    folder, _ = run
    points = points_of(folder)
    (value,) = [value for (tag, _), value in points if tag == "custom_scalars__config__"]
    (category,) = Layout.FromString(value.tensor.string_val[0]).category
    shown = {
        chart.title: {tag for (tag, _), _ in points if any(re.match(one, tag) for one in chart.multiline.tag)}
        for chart in category.chart
    }
    assert set(shown) == {"Loss", "Top1", "Top5"}
    assert shown["Loss"] == {"Loss/Training", "Loss/Test", "Loss/Test_raw"}


def test_without_pictures_nothing_looks_on(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "Collector", type("Unwanted", (), {}))
    folder = trained(tmp_path, *FLAGS, "--max-steps", 2, "--picture-epochs", "off")
    assert not {tag for (tag, _), _ in points_of(folder)} & TAGS and not (folder / "projector").exists()


def test_a_writer_without_a_folder_draws_nothing(gathered):
    Writer(None, progress=False).pictures(gathered, NAMES, 1)
