"""features.py: the features are those of the network in validation, its figures say what they are of, errors are a line."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from scripts import features as tool
from scripts import report
from scripts.common import features as module
from scripts.common.choice import settings_of
from scripts.common.features import chosen_of, embed, key_of, learned_labels, of_architecture, on_data, splits_of
from scripts.common.trained import open_run
from scripts.reporting import feature_study
from scripts.reporting.feature_study import accuracies, study
from tests.helpers import class_files, csv_rows, mistakes_of
from tests.scripts.common.test_predictions import tree_of_digits
from tests.scripts.test_report import Page
from utils.config.settings import GONE
from utils.data.formats.readers import ImageFiles, read_digits
from utils.data.images.stored import NumberedImages

QUIET = ["--device", "cpu", "--no-progress", "--workers", "0"]
SMALL = ["--image-size", "32", "--batch-size", "7", *QUIET]


def tree(root, counts=(("train", 9), ("val", 5)), size=32):
    """Class folders 'a', reddish, and 'b', bluish, of noise in squares."""
    generator = np.random.default_rng(0)
    for path, _, label, _ in class_files(root, dict(counts)):
        pixels = np.kron(generator.integers(0, 150, (8, 8, 3)), np.ones((size // 8, size // 8, 1)))
        pixels[:, :, 2 * label] += 100
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


def untrained(arch, root, *flags):
    library = [] if arch in ("fc", "conv2a") else ["--no-pretrained"]
    return of_architecture(arch, [*library, "--dataname", "folder", "--datapath", str(root), *SMALL, *flags])


def shown(loaded, files):
    """The files as validation shows them to the network."""
    return torch.stack([loaded.preprocessing(Image.open(path)) for path in files])


class OfOneSize(NumberedImages):
    """Images of a table that does not compress them, of which only the table's file tells the content."""

    identity = b"the same sizes"

    def __init__(self, file):
        super().__init__("train", 3)
        self.file = file

    def read(self, number):
        raise AssertionError("no image is read to know whether its features are known")

    def version_of(self, number):
        return f"{self.file} {number}"


def test_flags_say_how_many_processes_read_images(digits_run, tmp_path):
    run = on_data(open_run(digits_run, device="cpu"), QUIET)
    for loaded in (run, untrained("conv2a", tree(tmp_path))):
        assert settings_of(loaded, chosen_of(loaded, "val")).data.workers == 0


def test_a_table_that_was_written_anew_has_features_of_its_own(tmp_path):
    loaded = untrained("conv2a", tree(tmp_path))
    args = settings_of(loaded, chosen_of(loaded, "train"))
    labels = torch.zeros(3, dtype=torch.int64)
    keys = [key_of(loaded, args, ImageFiles(OfOneSize(file), labels), torch.device("cpu")) for file in "aab"]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("arch", ["conv2a", "timm/test_vit", "timm/test_resnet", "torchvision/shufflenet_v2_x0_5"])
def test_features_are_what_enters_the_classifier_in_evaluation_mode_image_by_image(tmp_path, arch):
    """timm's are those of its forward_head(pre_logits=True); of others the classifier makes the logits of them."""
    loaded = untrained(arch, tree(tmp_path))
    found = embed(loaded, chosen_of(loaded, "train"), None)
    network = loaded.network
    assert not network.training
    assert found.ids == sorted(found.ids) and len(found) == 18
    assert [Path(path).parent.name for path in found.ids] == ["ab"[label] for label in found.labels]
    with torch.no_grad():
        images = shown(loaded, found.ids)
        if arch.startswith("timm/"):
            expected = network.forward_head(network.forward_features(images), pre_logits=True)
        else:
            layer = module.output_layers(network)[-1]
            assert torch.allclose(layer(torch.from_numpy(found.features)), network(images), atol=1e-4)
            expected = torch.from_numpy(found.features)
    # the same sums in batches of another size: float32 rounds them in another order
    assert np.abs(found.features - expected.numpy()).max() < 1e-4 * max(1, expected.abs().max().item())
    one = embed(untrained(arch, tmp_path, "--val-batch-size", "1"), chosen_of(loaded, "train"), None)
    assert np.abs(one.features - found.features).max() < 1e-4 * max(1, expected.abs().max().item())


def test_the_images_of_a_test_folder_without_val_are_studied_once(tmp_path):
    loaded = untrained("conv2a", tree(tmp_path, counts=(("train", 2), ("test", 2))))
    assert splits_of(loaded, "val") == ["train", "val"] and splits_of(loaded, "test") == ["train", "test"]
    folds = replace(loaded, settings=loaded.settings | {"folds": 2, "fold": 0})
    assert splits_of(folds, "val") == ["train", "val", "test"]
    (tmp_path / "val").mkdir()
    assert splits_of(loaded, "val") == ["train", "val", "test"]


def test_a_librarys_network_takes_images_of_any_number_of_channels(tmp_path):
    for path, *_, number in class_files(tmp_path, {"train": 2, "val": 2}, ending="npy"):
        np.save(path, np.full((32, 32, 5), 9 * number, np.uint8))
    loaded = untrained("timm/test_resnet", tmp_path, "--in-channels", "5")
    assert len(embed(loaded, chosen_of(loaded, "val"), None)) == 4


def test_features_are_reused_until_weights_preprocessing_or_images_differ(tmp_path, monkeypatch, capsys):
    root = tree(tmp_path / "data")
    computed = []
    real = module.predict_split
    monkeypatch.setattr(module, "predict_split", lambda *args, **more: computed.append(1) or real(*args, **more))

    def features(kind="npz", change=lambda loaded: None, flags=()):
        loaded = untrained("conv2a", root, *flags)
        change(loaded)
        computed.clear()
        return embed(loaded, chosen_of(loaded, "val"), tmp_path, kind), len(computed)

    first, made = features()
    assert made and (tmp_path / "val.npz").exists()
    for kind in ("npz", "parquet", "parquet"):
        again, made = features(kind)
        assert np.array_equal(again.features, first.features) and again.ids == first.ids
        assert np.array_equal(again.thumbnails, first.thumbnails) and np.array_equal(again.labels, first.labels)
    assert not made and "reused" in capsys.readouterr().err

    def touched(loaded):
        with torch.no_grad():
            next(loaded.network.parameters()).view(-1)[0] += 1e-3

    assert features(change=touched)[1]
    assert "other weights, preprocessing or images" in capsys.readouterr().err
    for flags in (["--crop-pct", "0.5"], ["--mean", "0.1"], ["--amp", "bf16"], ["--tta", "flip"]):
        features()
        assert features(flags=flags)[1], flags
    features()
    image = root / "val/a/0.png"
    for _ in range(2):  # the second time with the size and time of the first
        Image.fromarray(255 - np.asarray(Image.open(image))).save(image, compress_level=0)
        os.utime(image, (1, 1))
        assert features()[1]
    image.rename(root / "val/b/other.png")
    assert features()[1]
    (tmp_path / "val.npz").write_bytes(b"damaged")
    assert features()[1] and "cannot be read" in capsys.readouterr().err


def test_a_run_on_its_own_images_and_on_those_of_other_classes(digits_run, tmp_path, capsys):
    loaded = open_run(digits_run, device="cpu")
    own = on_data(replace(loaded, settings={**loaded.settings, **GONE}), QUIET)  # of an earlier version
    found = embed(own, chosen_of(own, "val"), None)
    assert np.array_equal(found.labels, read_digits().validation.labels.numpy())
    names = {"nought": 0, "one": 1, "seven": 7}
    for split in ("train", "val"):
        tree_of_digits(tmp_path / split, names, count=20)
    other = on_data(loaded, [*QUIET, "--dataname", "folder", "--datapath", str(tmp_path)])
    assert other.classes == tuple(names)
    theirs = embed(other, chosen_of(other, "val"), None)
    places = np.concatenate([np.flatnonzero(found.labels == digit)[:20] for digit in names.values()])
    # the same digits, read from files: the same pixels
    assert np.abs(theirs.features - found.features[places]).max() < 1e-4
    assert theirs.labels.tolist() == np.repeat([0, 1, 2], 20).tolist()
    assert capsys.readouterr().err == "", "they are no later version of the run's own"


def test_layers_that_a_run_kept_in_float32_stay_so_on_images_of_other_classes(digits_run, tmp_path):
    loaded = open_run(digits_run, device="cpu")
    names = [name for name, layer in loaded.network.named_modules() if isinstance(layer, torch.nn.Linear)]
    loaded = replace(loaded, settings=loaded.settings | {"amp": "bf16", "fp32_layers": names})
    for split in ("train", "val"):
        tree_of_digits(tmp_path / split, {"nought": 0, "one": 1}, count=4)
    other = on_data(loaded, [*QUIET, "--dataname", "folder", "--datapath", str(tmp_path)])
    kinds = []
    layer = dict(loaded.network.named_modules())[names[-1]]
    layer.register_forward_hook(lambda _, __, logits: kinds.append(logits.dtype))
    assert len(embed(other, chosen_of(other, "val"), None)) == 8
    assert set(kinds) == {torch.float32}


def test_a_table_gives_a_runs_images_other_labels(tmp_path):
    root = tree(tmp_path / "data")
    trained = untrained("conv2a", root)
    rows = [
        f"{split}/{name}/{n}.png,{'even' if n % 2 == 0 else 'odd'},{split}"
        for split in ("train", "val")
        for name in "ab"
        for n in range(5)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,split", *rows]))
    other = on_data(trained, ["--labels", str(tmp_path / "labels.csv")])
    found = embed(other, chosen_of(other, "val"), None)
    assert other.classes == ("even", "odd")
    assert [other.classes[label] for label in found.labels] == [
        "odd" if int(Path(path).stem) % 2 else "even" for path in found.ids
    ]


def quickly(monkeypatch, strengths):
    """Draw no map, and try these strengths of the probe alone; the rest takes seconds."""
    monkeypatch.setattr(feature_study, "planar_map", lambda units: np.zeros((len(units), 2)))
    monkeypatch.setattr("scripts.common.probe.STRENGTHS", strengths)


def test_the_probe_is_fitted_on_training_images_alone_and_scored_on_the_others(digits_run, monkeypatch):
    quickly(monkeypatch, strengths=(1e-3, 1e-2))
    loaded = on_data(open_run(digits_run, device="cpu"), QUIET)
    parts = {split: embed(loaded, chosen_of(loaded, split), None) for split in ("train", "val")}
    found = study(parts, "val")
    train, other = parts["train"], parts["val"]
    reference = make_pipeline(StandardScaler(), LogisticRegression(C=found.probe.strength, max_iter=3000))
    answers = reference.fit(train.features, train.labels).predict(other.features)
    assert (answers == found.by_probe.argmax(1)).mean() > 0.99
    reached = accuracies(found)[1]["value"]
    assert reached == 100 * (found.by_probe.argmax(1) == other.labels).mean()
    other.labels[:] = np.roll(other.labels, 7)  # wrong ones change what is scored, not what is chosen
    wrong = study(parts, "val")
    assert wrong.probe.scores == found.probe.scores
    assert accuracies(wrong)[1]["value"] < 30 < 90 < reached


def test_copies_of_training_images_are_named_and_accuracy_is_given_without_them(tmp_path, capsys):
    root = tree(tmp_path / "data", counts=(("train", 12), ("val", 8), ("test", 6)))
    copy = root / "val/a/copy 9.41\u202fAM.png"  # so macOS names its pictures of the screen
    shutil.copy(root / "train/a/3.png", copy)
    shutil.copy(root / "train/b/5.png", root / "test/a/copy.png")  # with another label
    shutil.copy(root / "val/b/2.png", root / "test/b/copy.png")
    line = ["conv2a", "--dataname", "folder", "--datapath", str(root), *SMALL, "--output", str(tmp_path / "out")]
    assert tool.main([*line, "--neighbours", "3"]) == 0
    printed = capsys.readouterr()
    assert "1 train-val, 1 train-test, 1 val-test" in printed.out
    assert "Without the image that a training image nearly equals" in printed.out
    assert "images look alike" not in printed.out
    assert "its weights are random" in printed.err
    assert printed.out.splitlines()[-1].startswith("knn_top1=")
    assert f"val_count=17 output={tmp_path / 'out'}" in printed.out
    rows = csv_rows(tmp_path / "out/duplicates.csv")
    assert all(Path(row[side]).is_file() for row in rows for side in ("image", "other"))
    assert [(Path(row["image"]).name, row["split"], row["other_split"]) for row in rows] == [
        ("3.png", "train", "val"),
        ("5.png", "train", "test"),
        ("2.png", "val", "test"),
    ]
    assert [(row["label"], row["other_label"]) for row in rows] == [("a", "a"), ("b", "a"), ("b", "b")]
    page = Page((tmp_path / "out/features.html").read_text())
    (of,) = page.data["features"]
    assert len(of["duplicates"]) == 3 and len(of["map"]["x"]) == 17
    assert page.data["classes"] == [["a", "b"]]
    for word in ("Nearest neighbours", "Doubtful labels", "Near duplicates across splits", "Map of the features"):
        assert word in page.texts


def test_the_report_shows_the_same_sections(digits_run, tmp_path, monkeypatch):
    quickly(monkeypatch, strengths=(1e-2,))
    run = shutil.copytree(digits_run, tmp_path / "run")
    assert report.main([str(run), "--device", "cpu", "--features"]) == 0
    page = Page((run / "report.html").read_text())
    (of,) = page.data["features"]
    assert of["figures"][1][0] == "logistic probe" and of["scored"] == "360 validation images"
    assert of["classes"] == page.data["details"][0]["classes"]
    assert any("by heart" in note for note in of["notes"])
    assert (run / "features/val.npz").exists()
    assert report.main([str(run), "--device", "cpu"]) == 0
    assert Page((run / "report.html").read_text()).data["features"] == []


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"pretrained": True}, True),
        ({"pretrained": True, "freeze": ["all-but-head"]}, False),
        ({"pretrained": True, "freeze": ["all-but-head"], "dataname": "imagenet"}, True),
        ({"pretrained": True, "freeze": ["all-but-head"], "unfreeze_epoch": 3}, True),
        ({"weights": "of_a_run.pt", "freeze": ["all-but-head"]}, True),
    ],
)
def test_features_of_a_librarys_frozen_weights_know_no_labels_by_heart(digits_run, settings, warns):
    loaded = open_run(digits_run, device="cpu")
    assert learned_labels(replace(loaded, settings={**loaded.settings, **settings})) == warns


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--best", "--best and --raw choose among the weights of a run"),
        ("--dataname folder --datapath nowhere", "nowhere"),
    ],
)
def test_a_network_that_is_no_runs_has_mistakes_of_its_own(line, says):
    (mistake,) = mistakes_of(tool.main, ["conv2", *line.split()])
    assert says in mistake


@pytest.mark.parametrize("units", [np.zeros((40, 8), np.float32), np.full((40, 8), 0.1, np.float32)], ids=["0", "0.1"])
def test_images_whose_features_are_all_equal_lie_on_one_point(units):
    assert not feature_study.planar_map(units).any()
