"""Averaged checkpoints: the mean, the recipes, what is refused, and what is saved."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import main
from models import build_model, load_model
from scripts import average_checkpoints
from scripts.averaging.soup import greedy, mean, read, save
from scripts.common.uncertainty import divided
from scripts.exporting.subject import Subject
from tests.helpers import mistakes_of, trained
from tests.scripts.common.test_predictions import evaluated
from tests.utils.test_train_validation import make
from utils.checkpoint import checkpoint
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError
from utils.loop.validation import validate

NORMED = "timm/test_resnet"
FC = ("--device", "cpu", "--arch", "fc", "--no-progress", "--batch-size", "240", "--picture-epochs", "off")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders of three networks from one beginning, and one of another network."""
    place = tmp_path_factory.mktemp("runs")
    base = trained(place / "base", *FC, "--epochs", 1)
    line = [*FC, "--epochs", "1", "--weights", f"{base}/checkpoints/final.pt", "--output", str(place)]
    for name, lr in (("a", "0.1"), ("b", "0.05"), ("c", "0.2")):
        assert main.main([*line, "--name", name, "--lr", lr]) == 0
    assert main.main([*FC, "--arch", "conv2", "--max-steps", "1", "--output", str(place), "--name", "z"]) == 0
    return [str(next(place.glob(f"digits/*/*_{name}"))) for name in "abcz"]


def cooked(capsys, *line):
    """The lines that the tool prints."""
    capsys.readouterr()
    assert average_checkpoints.main([*map(str, line), "--device", "cpu", "--no-progress"]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_mean_is_that_of_torchs_averaged_model_and_counters_stay_whole():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    for model in models:
        model(torch.randn(8, 5))
    theirs = AveragedModel(models[0])
    for model in models:
        theirs.update_parameters(model)
    ours = mean([model.state_dict() for model in models])
    for name, value in theirs.module.named_parameters():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)
    assert ours["1.num_batches_tracked"].dtype == torch.int64 and ours["1.num_batches_tracked"] == 1
    assert ours["0.weight"].dtype == torch.float32


def written_out(values, score):
    """The greedy soup of Wortsman et al., recipe 1, on numbers."""
    soup = []
    for value in sorted(values, key=score, reverse=True):
        if not soup or score(sum([*soup, value]) / (len(soup) + 1)) >= score(sum(soup) / len(soup)):
            soup.append(value)
    return soup


@pytest.mark.parametrize("seed", range(5))
def test_the_greedy_soup_is_that_of_the_papers_recipe(seed):
    values = np.random.default_rng(seed).normal(size=6).tolist()

    def score(value):
        return -round(abs(value - 0.2), 1)  # with ties

    asked = []

    def of_weights(weights, mixed):
        asked.append(mixed)
        return score(weights["w"].item())

    soup = greedy([{"w": torch.tensor(value, dtype=torch.float64)} for value in values], of_weights)
    assert [values[place] for place in soup.kept] == written_out(values, score)
    assert soup.weights["w"].item() == pytest.approx(np.mean([values[place] for place in soup.kept]))
    assert asked == [False] * 6 + [True] * 5 and soup.scores == [score(value) for value in values]


def test_a_network_that_gives_nan_is_no_beginning_of_a_greedy_soup():
    """Mean average precision is then NaN."""
    scores = {0.0: math.nan, 1.0: 60.0, 2.0: 70.0}
    soup = greedy([{"w": torch.tensor(one)} for one in scores], lambda w, mixed: scores.get(w["w"].item(), math.nan))
    assert soup.kept == [2]


def test_a_uniform_soup_is_the_mean_and_evaluates_as_printed(runs, tmp_path, capsys):
    lines = cooked(capsys, "--checkpoints", *runs[:3], "--output", tmp_path / "soup.pt")
    states = [checkpoint.load(checkpoint.Path(run) / "checkpoints/final.pt") for run in runs[:3]]
    saved = checkpoint.load(tmp_path / "soup.pt")
    for name, value in saved["model"].items():
        torch.testing.assert_close(value, sum(state["model"][name] for state in states) / 3)
    tops = [f"{state['progress']['last_validation'][1]:.2f}" for state in states]
    assert [line.split() for line in lines[2:5]] == [[run, top1, "kept"] for run, top1 in zip(runs, tops, strict=False)]
    assert lines[5].startswith("uniform soup of 3")
    assert lines[-2:] == [f"Saved {tmp_path / 'soup.pt'}", evaluated(capsys, "--weights", f"{tmp_path}/soup.pt")]
    loaded = load_model(tmp_path / "soup.pt")
    assert len(loaded.classes) == 10 and Subject.of(loaded, False, False).weights == "the mean of 3 checkpoints"
    assert [path.name for path in tmp_path.iterdir()] == ["soup.pt"], "nothing else is left"


def test_a_soup_keeps_all_that_describes_network_and_data_and_nothing_that_was_fitted_to_other_weights(
    runs, tmp_path, capsys
):
    state = checkpoint.load(checkpoint.Path(runs[0]) / "checkpoints/final.pt")
    described = {"folds": {"count": 2, "seed": 0}, "hub": {"hf_hub:a/b": {"revision": "c"}}, "max_shift": None}
    for name in "ab":
        fitted = {"confidence": {"temperature": 2.0}, "thresholds": [0.1]}
        torch.save(state | described | fitted, tmp_path / f"{name}.pt")
    cooked(capsys, "--checkpoints", tmp_path / "a.pt", tmp_path / "b.pt", "--output", tmp_path / "soup.pt")
    soup = checkpoint.load(tmp_path / "soup.pt")
    assert {name: soup[name] for name in described} == described
    assert soup.keys() == (state | described).keys() - {"optimizer", "scaler", "progress"} | {"soup"}


def test_a_soup_that_flags_show_other_pixels_evaluates_as_printed(runs, tmp_path, capsys):
    flags = ("--mean", "0.9", "--tta", "flip")
    lines = cooked(capsys, "--checkpoints", *runs[:2], "--output", tmp_path / "soup.pt", *flags)
    assert lines[-1] == evaluated(capsys, "--weights", f"{tmp_path}/soup.pt")
    assert load_model(tmp_path / "soup.pt").preprocessing.mean == (0.9,)


def test_an_average_that_has_moved_since_its_statistics_were_computed_is_warned_of(runs, tmp_path, capsys):
    state = checkpoint.load(checkpoint.Path(runs[0]) / "checkpoints/final.pt")
    average = {"model": state["model"] | {"bn.running_mean": torch.zeros(1)}}
    progress = state["progress"] | {"validated_step": state["progress"]["step"] - 1}
    torch.save(state | {"ema": average, "progress": progress}, tmp_path / "moved.pt")
    read(str(tmp_path / "moved.pt"), None)
    (warned,) = capsys.readouterr().err.splitlines()
    assert "was saved between two validations" in warned


def test_a_soup_is_readable_like_any_new_file_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    weights = {"w": torch.zeros(3)}
    save(tmp_path / "soup.pt", weights, {"arch": "fc"}, {"method": "uniform"})
    (tmp_path / "other").write_text("")
    assert (tmp_path / "soup.pt").stat().st_mode == (tmp_path / "other").stat().st_mode

    def full(state, file):
        file.write(b"half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="^--output: cannot write .*second.pt"):
        save(tmp_path / "second.pt", weights, {"arch": "fc"}, {"method": "uniform"})
    assert {path.name for path in tmp_path.iterdir()} == {"soup.pt", "other"}


def test_a_greedy_soup_is_never_worse_where_it_is_chosen_and_says_so(runs, tmp_path, capsys):
    lines = cooked(capsys, "--checkpoints", *runs[:3], "--output", tmp_path / "soup.pt", "--method", "greedy")
    tops = [float(line.split()[1]) for line in lines[2:5]]
    assert float(lines[5].split()[-1]) >= max(tops)
    assert "chosen on the images that its top1 is of, which favours it" in lines[-3]
    kept = [run for run, line in zip(runs, lines[2:5], strict=False) if line.endswith("kept")]
    made_of = checkpoint.load(tmp_path / "soup.pt")["soup"]
    assert made_of["method"] == "greedy" and load_model(tmp_path / "soup.pt").is_favoured
    assert {path.partition("/checkpoints")[0] for path in made_of["ingredients"]} == set(kept)


def test_ingredients_that_the_validation_images_chose_are_named(runs, tmp_path, capsys):
    flags = ("--checkpoints", *runs[:2], "--method", "greedy", "--choose-on", "half")
    said = "Chosen by their results on the validation images, which favours the soup: "
    lines = cooked(capsys, *flags, "--best", "--output", tmp_path / "chosen.pt")
    (named,) = [line.removeprefix(said).split(" and ") for line in lines if line.startswith(said)]
    assert named and {*named} <= {f"{run}/checkpoints/best.pt" for run in runs[:2]}
    for more in (["--best", "--folds", "5", "--fold", "0"], []):  # on other images, and of the last epochs
        lines = cooked(capsys, *flags, *more, "--output", tmp_path / f"{len(more)}.pt")
        assert not any(line.startswith(said) for line in lines)


def test_halves_share_no_image_and_the_soup_is_reported_on_the_one_that_did_not_choose(runs, tmp_path, capsys):
    loader = make("--arch", "fc").validation_loader
    parts = [loader.part(numbers) for numbers in divided(360, 180, 0)]
    seen = [np.concatenate([batch.indices for batch in part.batches()]) for part in parts]
    assert sorted(np.concatenate(seen)) == list(range(360)) and [len(part) for part in seen] == [180, 180]
    flags = ("--method", "greedy", "--choose-on", "half")
    lines = cooked(capsys, "--checkpoints", *runs[:3], "--output", tmp_path / "soup.pt", *flags)
    assert "Chosen on 180 validation images, reported on the other 180" in lines and "val_count=180" in lines[-1]
    traval = make("--arch", "fc")
    more = (traval.distributed, traval.autocast, traval.writer, traval.bad_images, lambda: None)

    def tops(path):
        checkpoint.load_weights(traval.model, checkpoint.load(checkpoint.Path(path))["model"], "")
        return [validate(traval.model, part, *more).top1 for part in parts]

    assert f"val_top1={tops(tmp_path / 'soup.pt')[1]:.4f} " in lines[-1]
    reached = [[f"{top1:.2f}" for top1 in tops(f"{run}/checkpoints/last.pt")] for run in runs[:3]]
    assert [line.split()[1:3] for line in lines[2:5]] == reached, "to choose by, and to report"
    assert any(chosen_by != reported for chosen_by, reported in reached), "the halves are told apart"


@pytest.mark.parametrize(
    "of_run",
    [
        {"freeze": ["bn1"], "unfreeze_epoch": 1},
        {"freeze_bn": True},  # of the first: the second has other statistics
        {"epochs": 7, "progressive_size": 4},
    ],
    ids=["unfrozen", "frozen", "grown"],
)
def test_its_batch_norm_statistics_are_those_of_torchs_update_bn_over_the_last_epochs_images(
    runs, tmp_path, monkeypatch, capsys, of_run
):
    monkeypatch.chdir(tmp_path)
    state = checkpoint.load(checkpoint.Path(runs[0]) / "checkpoints/final.pt")
    for seed in (1, 2):
        torch.manual_seed(seed)
        weights = build_model(ModelSettings(arch=NORMED), classes=10, channels=1, image_size=8).state_dict()
        weights |= {name: value + seed for name, value in weights.items() if name.endswith("running_mean")}
        settings = state["settings"] | {"arch": NORMED, "weights": None} | of_run
        torch.save(state | {"arch": NORMED, "model": weights, "ema": None, "settings": settings}, f"{seed}.pt")
    few = ("--train-samples", "240", "--batch-size", "240")  # an epoch has one step
    flags = (*few, "--ema-bn-batches", "2", "--augment", "none", "--max-val-batches", "1", "--val-batch-size", "60")
    said = cooked(capsys, "--checkpoints", "1.pt", "2.pt", "--output", "soup.pt", *flags)
    assert "Batch-norm statistics of the soup: computed over 1 training batch" in said
    soup = checkpoint.load(checkpoint.Path("soup.pt"))["model"]
    traval = make("--arch", NORMED, *few)
    checkpoint.load_weights(traval.model, soup, "")
    images = torch.cat([batch.images for batch in traval.train_loader.shared_out(of_run.get("epochs", 1) - 1, 1)[1]])
    model = copy.deepcopy(traval.model)
    update_bn([images], model)  # only its first layer's inputs do not depend on how images are batched
    name = next(name for name in soup if "running_mean" in name).removesuffix("mean")
    for part in ("mean", "var"):
        torch.testing.assert_close(soup[name + part], model.state_dict()[name + part], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(soup[name + "var"], torch.ones(()), rtol=0.1), "that is what both began with"


def test_statistics_that_no_run_has_changed_stay_as_they_are(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    state = checkpoint.load(checkpoint.Path(runs[0]) / "checkpoints/final.pt")
    settings = state["settings"] | {"arch": NORMED, "weights": None, "freeze": ["bn1"], "freeze_bn": False}
    for seed in (1, 2):
        torch.manual_seed(seed)
        weights = build_model(ModelSettings(arch=NORMED), classes=10, channels=1, image_size=8).state_dict()
        weights["bn1.running_mean"] += 3
        weights["layer1.0.bn1.running_mean"] += seed
        torch.save(state | {"arch": NORMED, "model": weights, "ema": None, "settings": settings}, f"{seed}.pt")
    cooked(
        capsys, "--checkpoints", "1.pt", "2.pt", "--output", "soup.pt", "--batch-size", "64", "--ema-bn-batches", "1"
    )
    soup = checkpoint.load(checkpoint.Path("soup.pt"))["model"]
    assert (soup["bn1.running_mean"] == 3).all() and (soup["bn1.running_var"] == 1).all()
    assert not (soup["layer1.0.bn1.running_mean"] == 1.5).any()


def refused(*line):
    return mistakes_of(average_checkpoints.main, [*map(str, line), "--device", "cpu"])


def test_another_network_is_refused_in_a_line(runs, tmp_path):
    (line,) = refused("--checkpoints", runs[0], runs[3], runs[1], "--output", tmp_path / "soup.pt")
    assert line.startswith(f"--checkpoints {runs[3]}/checkpoints/last.pt: has another network than {runs[0]}")
    assert line.endswith("conv2 where that has fc") and not any(tmp_path.iterdir())
    for twice in (0, 1):
        again = f"{runs[twice]}/checkpoints/last.pt"
        (line,) = refused("--checkpoints", runs[0], runs[1], again, "--output", tmp_path / "s.pt")
        assert line == f"--checkpoints {again}: is given twice"
    best = tmp_path / "best.pt"  # of the last epoch: one file of two names
    best.hardlink_to(f"{runs[0]}/checkpoints/last.pt")
    (line,) = refused("--checkpoints", runs[0], runs[1], best, "--output", tmp_path / "s.pt")
    assert line == f"--checkpoints {best}: is the same file as {runs[0]}/checkpoints/last.pt"


@pytest.mark.parametrize(
    ("part", "other", "words"),
    [
        ("classes", [*"abcdefghij"], "has other classes than"),
        ("preprocessing", {"image_size": 9}, "has other preprocessing than"),
        ("model", {"w": torch.zeros(1)}, "has weights of other names or shapes than"),
        ("format", 3, "is not a checkpoint that this version of main.py saves"),
        ("settings", None, "is not a checkpoint that this version of main.py saves"),
    ],
)
def test_other_classes_preprocessing_or_shapes_are_refused_in_a_line(part, other, words, runs, tmp_path):
    first = checkpoint.Path(runs[0]) / "checkpoints/final.pt"
    state = checkpoint.load(first) | {part: other}
    torch.save(state | ({"ema": None} if part == "model" else {}), tmp_path / "other.pt")
    (line,) = refused("--checkpoints", first, tmp_path / "other.pt", "--output", tmp_path / "soup.pt")
    assert line.startswith(f"--checkpoints {tmp_path / 'other.pt'}: ") and words in line


def test_mistakes_of_the_command_line_are_reported_before_any_work(runs, tmp_path):
    (tmp_path / "there.pt").write_text("mine")
    lines = refused("--checkpoints", runs[0], "--output", tmp_path / "there.pt", "--choose-on", "half")
    assert len(lines) == 3 and "two or more" in lines[0] and "needs --method greedy" in lines[1]
    assert "exists already" in lines[2] and (tmp_path / "there.pt").read_text() == "mine"
    assert "its folder does not exist" in refused("--checkpoints", *runs[:2], "--output", tmp_path / "no/soup.pt")[0]
    assert refused("--checkpoints", *runs[:2], "--output", tmp_path / "soup.pt", "--evaluate")
    half = ("--method", "greedy", "--choose-on", "half", "--max-val-batches", "1")
    (line,) = refused("--checkpoints", *runs[:2], "--output", tmp_path / "soup.pt", *half)
    assert line.startswith("--choose-on half contradicts --max-val-batches")
    assert refused("--checkpoints", runs[0], tmp_path, "--output", tmp_path / "soup.pt")[0].endswith(
        "give a run folder or a .pt file"
    )
