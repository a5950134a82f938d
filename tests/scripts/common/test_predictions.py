"""RUN on a command line, and predictions of a whole split: those of main.py's validation, in the data set's order."""

import os
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import main
from models import load_model
from scripts.common.choice import Chosen, settings_of, validated_on
from scripts.common.predictions import predict_split
from scripts.common.trained import find_run, open_run
from scripts.data_check.survey import take_survey
from tests.helpers import altered, trained
from tests.utils.data.test_shards import samples, write_tar
from utils.config.arguments import parse
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.formats.readers import read_digits
from utils.data.loaders import sample_plan
from utils.record.reading import SeveralLabels
from utils.record.summary import figures

QUIET = ("--device", "cpu", "--no-progress")
CPU = Chosen(device="cpu", progress=False)


def there(folder, **more):
    """To predict the images in ``folder``."""
    return Chosen(device="cpu", datapath=str(folder), workers="0", progress=False, **more)


def tree_of_digits(root, names, count=3):
    """Class folders of the first validation digits of each class in ``names``: {folder's name: digit}."""
    validation = read_digits().validation
    for name, digit in names.items():
        (root / name).mkdir(parents=True)
        for place in np.flatnonzero(validation.labels == digit)[:count]:
            Image.fromarray(validation.pixels[place, 0].numpy()).save(root / name / f"{place:03}.png")
    return root


def test_auto_is_the_run_that_began_last_among_those_that_saved_what_they_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run with a checkpoint below"):
        find_run("auto")
    for name in ("digits/fc/2026-01-02_a", "digits/conv2/2026-01-03_b", "digits/fc/2026-01-04_without"):
        (Path("runs") / name / "checkpoints").mkdir(parents=True)
        (Path("runs") / name / "config.yaml").touch()
        if "without" not in name:
            (Path("runs") / name / "checkpoints/last.pt").touch()
    untrained = Path("runs/digits/fc/2026-01-05_failed_in_its_first_step")
    shutil.copytree("runs/digits/fc/2026-01-04_without", untrained)
    (untrained / "checkpoints/initial.pt").touch()
    assert find_run("auto") == Path("runs/digits/conv2/2026-01-03_b")
    renamed = Path("runs/digits/fc/2026-01-02_a").rename("runs/digits/fc/my_first_model")
    for day, newest in (("2026-01-02", "runs/digits/conv2/2026-01-03_b"), ("2026-01-04", renamed)):
        began = datetime.fromisoformat(day).timestamp()
        os.utime(renamed / "config.yaml", (began, began))
        assert find_run("auto") == Path(newest)


def test_the_network_is_ready_and_raw_weights_are_the_trained_ones(digits_run, capsys):
    loaded = open_run(digits_run, device="cpu")
    assert not loaded.network.training and (loaded.arch, loaded.settings["ema_decay"]) == ("fc", 0.9)
    assert loaded.path == Path(digits_run) / "checkpoints/last.pt" and capsys.readouterr().err == ""
    state = torch.load(loaded.path, weights_only=True)
    for raw, weights in ((False, state["ema"]["model"]), (True, state["model"])):
        found = open_run(digits_run, raw, "cpu").network.state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in found)


def test_a_warning_about_a_damaged_checkpoint_is_printed(digits_run, tmp_path, capsys):
    (tmp_path / "best.pt").write_bytes((Path(digits_run) / "checkpoints/best.pt").read_bytes())
    (tmp_path / "last.pt").write_text("damaged")
    assert open_run(str(tmp_path), device="cpu").path == tmp_path / "best.pt"
    damaged, instead = capsys.readouterr().err.splitlines()
    assert damaged.startswith("warning: ") and "last.pt: is not a checkpoint" in damaged
    assert instead == f"warning: {tmp_path / 'best.pt'} is taken instead"


def test_a_network_that_no_step_has_trained_is_named(digits_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/digits/fc/2026-01-01_00-00-00_begins"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    shutil.copy(Path(digits_run, "checkpoints/initial.pt"), folder / "checkpoints")
    assert open_run("auto", device="cpu").path.name == "initial.pt"
    assert capsys.readouterr().err.endswith("initial.pt: was saved before the first step of training\n")


def evaluated(capsys, *line):
    """The last line of main.py --evaluate."""
    capsys.readouterr()
    assert main.main(["--evaluate", *QUIET, *line]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def test_a_run_that_decoded_on_a_gpu_is_read_without_one_and_its_bad_images_are_skipped(
    digits_run, tmp_path, monkeypatch
):
    tree = tree_of_digits(tmp_path / "tree", {"7": 7, "2": 2})
    loaded = load_model(digits_run)
    loaded.settings["decode"] = "gpu"
    for chosen in (there(tree), there(tree, skip_bad_images=True)):
        assert predict_split(loaded, chosen).labels.tolist() == [2, 2, 2, 7, 7, 7]
    for there_is_one in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there_is_one=there_is_one: there_is_one)
        assert settings_of(loaded, Chosen()).data.decode == ("gpu" if there_is_one else "cpu")
    for chosen in (CPU, Chosen(skip_bad_images=True)):
        assert settings_of(loaded, chosen).data.decode == "cpu"


def test_a_forward_pass_has_as_many_images_as_in_a_process_of_the_run(digits_run):
    loaded = load_model(digits_run)
    loaded.settings.update({"global_batch_size": 1024, "batch_size": 128})
    assert settings_of(loaded, CPU).data.val_batch_size == 128
    assert settings_of(loaded, Chosen(device="cpu", batch_size=7)).data.val_batch_size == 7
    loaded.settings["val_batch_size"] = 250
    assert settings_of(loaded, CPU).data.val_batch_size == 250
    loaded.settings.clear()
    assert settings_of(loaded, CPU).data.val_batch_size is None


def test_layers_that_the_run_kept_in_fp32_stay_so(digits_run, capsys, tmp_path):
    reports = []
    for number, layers in enumerate((None, ["layers.1"])):
        path = altered(digits_run, tmp_path / f"{number}.pt", settings={"amp": "bf16", "fp32_layers": layers})
        theirs = evaluated(capsys, "--resume", str(path))
        for loaded in (load_model(path), open_run(str(path), device="cpu")):
            reports.append(predict_split(loaded, CPU).report)
            assert figures(reports[-1]) == theirs
    assert reports[1].loss != reports[2].loss


def test_logits_are_those_of_single_images_in_the_order_of_the_data_set(digits_run):
    loaded = load_model(digits_run)
    predictions = predict_split(loaded, CPU)
    assert predictions.ids[:2] == ["val[0]", "val[1]"] and len(predictions) == len(predictions.ids) == 360
    assert torch.equal(predictions.labels, read_digits().validation.labels)
    places = [0, 47, 48, 359]
    pictures = map(predictions.picture, places)
    with torch.no_grad():
        alone = torch.cat([loaded.network(loaded.preprocessing(picture)[None]) for picture in pictures])
    torch.testing.assert_close(predictions.logits[places], alone, rtol=1e-5, atol=1e-5)
    assert predictions.logits.dtype == torch.float32 and not loaded.network.training
    loss = functional.cross_entropy(predictions.logits.double(), predictions.labels)
    assert predictions.report.loss == pytest.approx(loss.item(), abs=1e-6)
    assert predictions.report.top1 == 100 * (predictions.logits.argmax(1) == predictions.labels).double().mean()


def test_of_training_images_those_that_were_trained_on_are_read(digits_run):
    loaded = load_model(digits_run)
    loaded.settings["train_samples"] = 100
    data = get_data(parse([]).data, "cpu")
    plan = sample_plan(data.train, parse(["--train-samples", "100"]), 0, 1)
    trained_on = {int(number) for step in range(2) for one in plan.micro_batches(0, step) for number in one.indices}
    predictions = predict_split(loaded, Chosen(split="train", device="cpu", progress=False))
    assert len(trained_on) == predictions.report.count == 100
    assert set(predictions.ids) == {f"train[{number}]" for number in trained_on}
    assert torch.equal(predictions.labels, data.train.labels[predictions.numbers])
    assert predictions.notes == (
        "--train-samples 100: 1,337 training images, on which the run did not train, are left out",
    )
    assert predict_split(loaded, CPU).report.count == 360


def test_a_table_of_labels_may_lack_columns_that_the_runs_table_has(digits_run, tmp_path):
    loaded = load_model(digits_run)
    loaded.settings.update(dataname="folder", datapath=str(tmp_path), group_column="track", weight_column="w")
    loaded.settings["split_column"] = "fold"
    table = tmp_path / "labels.csv"
    for head, group, weight in (("path,label,patient", "off", "off"), ("path,label,track,w", "track", "w")):
        table.write_text(f"{head}\n")
        data = settings_of(loaded, Chosen(labels=str(table))).data
        assert (data.group_column, data.weight_column, data.split_column) == (group, weight, None)
        loaded.settings["labels"] = str(tmp_path / "labels.csv")  # a table among the images, as in the folder below
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        (other / "labels.csv").write_text(f"{head}\n")
        assert settings_of(loaded, Chosen(datapath=str(other))).data.group_column == group


def test_a_table_of_labels_replaces_the_names_of_files_and_chose_no_checkpoint(digits_run, tmp_path):
    loaded = load_model(digits_run)
    table = str(tmp_path / "labels.csv")
    loaded.settings.update(dataname="folder", datapath=str(tmp_path), class_from_name="(.)")
    data = settings_of(loaded, Chosen(labels=table)).data
    assert (data.labels, data.class_from_name) == (table, None)
    own = SimpleNamespace(datapath=None, split="val", labels=table)
    assert not validated_on(own, loaded.settings) and not validated_on(own, {"labels": "other.csv", "datapath": "x"})
    for same in (own, SimpleNamespace(datapath=None, split="val", labels=None)):
        assert validated_on(same, {"labels": table, "datapath": str(tmp_path)})


def test_images_of_one_label_are_refused_for_a_network_of_several(digits_run, tmp_path):
    loaded = replace(load_model(digits_run), reading=SeveralLabels((0.5,) * 10))
    with pytest.raises(UserError, match=r"its images have one label each, and .*last\.pt gives several labels each"):
        predict_split(loaded, there(tree_of_digits(tmp_path, {"7": 7})))


def test_class_folders_are_read_for_a_run_on_tables(digits_run, tmp_path):
    tree = tree_of_digits(tmp_path / "tree", {"7": 7, "2": 2})
    loaded = load_model(digits_run)
    loaded.settings.update({"dataname": "hf", "datapath": str(tmp_path / "tables")})
    assert predict_split(loaded, there(tree)).labels.tolist() == [2, 2, 2, 7, 7, 7]
    with pytest.raises(UserError, match="no such folder; folder: one folder a class"):
        predict_split(loaded, there(tmp_path / "none"))
    with pytest.raises(UserError, match="no such folder; the images of .* if they have moved, give --datapath"):
        predict_split(loaded, CPU)


def test_class_folders_are_matched_by_name_and_what_is_missing_or_unknown_is_named(digits_run, tmp_path, capsys):
    tree = tree_of_digits(tmp_path / "tree", {"7": 7, "2": 2, "horse": 4})
    predictions = predict_split(load_model(digits_run), there(tree))
    whole = predict_split(load_model(digits_run), CPU)
    assert predictions.labels.tolist() == [2, 2, 2, 7, 7, 7]
    numbers = [int(Path(path).stem) for path in predictions.ids]
    torch.testing.assert_close(predictions.logits, whole.logits[numbers], rtol=1e-5, atol=1e-5)
    missing, left_out = predictions.notes
    assert "horse" in left_out and "8 of 10 classes have no validation image" in missing and "0, 1, 3, 4" in missing
    assert capsys.readouterr().err.splitlines() == [f"warning: {missing}", f"warning: {left_out}"]
    assert not any(path.name.startswith(".") for path in tree.iterdir()), "nothing is written"


def test_an_unreadable_image_is_refused_or_left_out_and_named(digits_run, tmp_path):
    tree = tree_of_digits(tmp_path / "tree", {"7": 7, "2": 2})
    (tree / "7/x.png").write_bytes(b"")
    with pytest.raises(UserError, match="7/x.png: cannot be read as an image"):
        predict_split(load_model(digits_run), there(tree))
    predictions = predict_split(load_model(digits_run), there(tree, skip_bad_images=True))
    assert predictions.labels.tolist() == [2, 2, 2, 7, 7, 7]
    assert predictions.notes[-1] == f"1 image(s) that cannot be read are left out: {tree}/7/x.png"


def test_a_batch_that_does_not_fit_is_one_line_and_another_error_stays_what_it_is(digits_run):
    loaded = load_model(digits_run)
    for error, kind, words in (
        (torch.OutOfMemoryError("CUDA out of memory"), UserError, "--batch-size 48: there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), UserError, "--batch-size 48"),
        (RuntimeError("shapes cannot be multiplied"), RuntimeError, "shapes"),
    ):
        loaded.network.forward = Mock(side_effect=error)
        with pytest.raises(kind, match=words):
            predict_split(loaded, CPU)


def test_splits_of_class_folders_are_told_apart(digits_run, tmp_path):
    for number, split in enumerate(("train", "val", "test")):
        tree_of_digits(tmp_path / split, {"1": 1, "3": 3}, count=number + 1)
    for number, split in enumerate(("train", "val", "test")):
        predictions = predict_split(load_model(digits_run), there(tmp_path, split=split))
        assert predictions.labels.tolist() == [1] * (number + 1) + [3] * (number + 1)


def test_shares_of_one_tree_are_those_of_the_training(digits_run, tmp_path):
    tree = tree_of_digits(tmp_path / "tree", {str(n): n for n in range(10)}, count=4)
    flags = ["--dataname", "folder", "--datapath", str(tree), "--val-split", "0.25", "--val-split-by", "draw"]
    data = get_data(parse(flags).data, "cpu")
    # val_split_by: as of an older run
    settings = {"dataname": "folder", "datapath": str(tree), "val_split": 0.25, "val_split_by": None}
    for fingerprint, notes in ((data.fingerprint, 0), ("of other images", 1)):
        altered(digits_run, tmp_path / "split.pt", settings=settings, fingerprint=fingerprint)
        for split, images in (("train", data.train), ("val", data.validation)):
            chosen = Chosen(split=split, device="cpu", workers="0", progress=False)
            predictions = predict_split(load_model(tmp_path / "split.pt"), chosen)
            assert predictions.ids == list(images.paths) and torch.equal(predictions.labels, images.labels)
            assert len(predictions.notes) == notes and all("other images than" in note for note in predictions.notes)


def test_a_moved_runs_training_images_are_those_that_it_trained_on(digits_run, tmp_path):
    tree = tree_of_digits(tmp_path / "old", {str(n): n for n in range(10)}, count=4)
    settings = {"dataname": "folder", "datapath": str(tree), "val_split": 0.25, "val_split_by": "name"}
    data = get_data(DataSettings(**settings), torch.device("cpu"))
    settings["train_samples"] = 8
    altered(digits_run, tmp_path / "share.pt", settings=settings, fingerprint=data.fingerprint)
    ids = []
    for place in ("old", "new"):
        tree = tree.rename(tmp_path / place)
        chosen = Chosen(split="train", device="cpu", datapath=str(tree), workers="0", progress=False)
        predictions = predict_split(load_model(tmp_path / "share.pt"), chosen)
        ids.append([Path(one).relative_to(tree) for one in predictions.ids])
        assert len(predictions) == 8 and "--train-samples 8: " in predictions.notes[-1]
    assert ids[0] == ids[1]


def test_shards_in_folders_named_after_splits_are_no_class_folders(tmp_path):
    for split, count in (("train", 20), ("val", 10)):
        write_tar(tmp_path / "data" / split / "00.tar", samples(0, count))
    flags = ["--dataname", "shards", "--datapath", tmp_path / "data", "--image-size", 8, "--arch", "fc"]
    assert take_survey(parse([*map(str, flags)]).data).trees == {}
    run = trained(tmp_path, *flags, "--max-steps", 1, "--batch-size", 10, "--workers", 0)
    for split, count in (("train", 20), ("val", 10)):
        chosen = Chosen(split=split, device="cpu", workers="0", progress=False)
        assert len(predict_split(load_model(run), chosen)) == count
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "moved/shards.json").unlink()
    chosen = Chosen(device="cpu", datapath=str(tmp_path / "moved"), workers="0", progress=False)
    assert len(predict_split(load_model(run), chosen)) == 10


def test_class_folders_without_test_images_are_told_as_such(digits_run, tmp_path):
    tree = tree_of_digits(tmp_path / "tree", {str(n): n for n in range(10)}, count=4)
    settings = {"dataname": "folder", "datapath": str(tree), "val_split": 0.25}
    altered(digits_run, tmp_path / "split.pt", settings=settings)
    with pytest.raises(UserError, match=f"--split test: {tree} holds no test/; --datapath FOLDER evaluates other"):
        predict_split(load_model(tmp_path / "split.pt"), Chosen(split="test", device="cpu", progress=False))
