"""The network that ``load_model`` gives predicts what the run reported, for networks of every origin, and nothing else loads."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional

from models import load_model
from tests.end_to_end.processes import FINAL_LINE
from tests.helpers import altered, mistakes_of, trained
from tests.models.test_pretrained import tree  # noqa: F401 - a fixture
from tests.utils.data.loading import CPU, read
from utils.checkpoint.checkpoint import FORMAT
from utils.config.settings import UserError
from utils.data.loaders import tried_out

ROOT = Path(__file__).resolve().parents[2]


def reported(capsys, output, *flags):
    """Train; gives the run's folder, the figures of its last line, and its validation images as files or pixels."""
    folder = trained(output, *flags)
    line = FINAL_LINE.match(capsys.readouterr().out.splitlines()[-1])
    return folder, line, read(*flags).validation


def images_of(validation):
    """As Pillow images, whatever they come as."""
    if hasattr(validation, "paths"):
        return [Image.open(path) for path in validation.paths]
    return [Image.fromarray(pixels[0].numpy()) for pixels in validation.pixels]


def check_figures(path, line, validation):
    """The loaded network's loss and top-1 over single images are those of the run's last line."""
    network, classes, preprocessing = load_model(path)
    assert not network.training and next(network.parameters()).device == CPU
    images = images_of(validation)
    numbers = tried_out(len(images), int(line["count"]))
    labels = validation.labels[numbers]
    with torch.no_grad():
        logits = torch.cat([network(preprocessing(images[number])[None]) for number in numbers])
    assert logits.shape == (len(labels), len(classes))
    loss = functional.cross_entropy(logits, labels).item()
    top1 = 100 * (logits.argmax(1) == labels).float().mean().item()
    assert loss == pytest.approx(float(line["loss"]), abs=2e-4) and top1 == pytest.approx(float(line["top1"]), abs=1e-3)


SHORT = ("--epochs", 1, "--max-steps", 3, "--batch-size", 8, "--max-val-batches", 4)


@pytest.mark.parametrize(
    "flags",
    [
        ("--arch", "fc", "--epochs", 2, "--ema-decay", 0.9),
        ("--arch", "torchvision/squeezenet1_1", "--image-size", 32, *SHORT),
    ],
    ids=lambda flags: flags[1],
)
def test_it_predicts_what_the_run_reported_on_the_digits(tmp_path, capsys, flags):
    folder, line, validation = reported(capsys, tmp_path, *flags)
    check_figures(folder / "checkpoints/final.pt", line, validation)


@pytest.mark.parametrize(
    "flags",
    [
        "--arch test_vit --image-size 64 --crop-mode squash --interpolation bicubic --mean 0.5".split(),
        "--arch test_resnet --image-size 72 --val-image-size 96 --crop-pct 0.95".split(),
    ],
    ids=lambda flags: flags[1],
)
def test_it_predicts_what_the_run_reported_on_photographs(tree, tmp_path, capsys, flags):  # noqa: F811
    data = ("--dataname", "folder", "--datapath", tree, "--workers", 0)
    folder, line, validation = reported(capsys, tmp_path, *data, *flags, "--lr", 0.001, *SHORT)
    check_figures(folder, line, validation)
    assert load_model(str(folder)).classes == ("china", "flower")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs"), "--arch", "fc", "--epochs", 3)


def test_the_readmes_example_names_the_digit(run, capsys, tmp_path):
    (code,) = re.findall(r"```python\n(.*?load_model.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    digits = load_digits()
    Image.fromarray((digits.images[-1] * 255 / 16).astype("uint8")).save(tmp_path / "image.png")
    code = re.sub(r'load_model\(".*?"\)', f'load_model("{run}/checkpoints/best.pt")', code)
    exec(re.sub(r'Image\.open\(".*?"\)', f'Image.open("{tmp_path}/image.png")', code), {})
    assert capsys.readouterr().out.split()[0] == str(digits.target[-1])


NEWEST = "the newest, of epoch 8; --best takes the best one, of epoch 5"
EARLY = "the best epoch, 5: the run stopped early, after epoch 8 (last.pt)"


@pytest.mark.parametrize(
    ("best", "settings", "its_best", "taken", "why"),
    [
        (None, {}, 5, "last", NEWEST),
        (True, {}, 5, "best", "as --best asks"),
        (False, {}, 5, "last", ""),
        (None, {"early_stopping": 3}, 5, "best", EARLY),
        (False, {"early_stopping": 3}, 5, "last", ""),
        (None, {"early_stopping": 4}, 5, "last", NEWEST),  # it is still waiting
        (None, {"early_stopping": 3, "epochs": 8}, 5, "last", NEWEST),  # it had come to its end
        (None, {"early_stopping": 3}, 8, "last", ""),
        (None, {}, 0, "last", ""),
    ],
)
def test_after_early_stopping_and_with_best_a_folder_means_best_pt_and_says_why(
    run, tmp_path, best, settings, its_best, taken, why
):
    for name, epoch in (("last", 8), ("best", 5)):
        progress = {"epoch": epoch, "step": epoch, "best_epoch": its_best, "stopping_epoch": 5}
        altered(run, tmp_path / f"{name}.pt", progress=progress, settings={"epochs": 30} | settings)
    loaded = load_model(tmp_path, best=best)
    assert (loaded.path, loaded.chosen) == (tmp_path / f"{taken}.pt", why)
    assert load_model(tmp_path / "last.pt").chosen == ""


def test_a_checkpoint_within_the_epoch_after_the_best_is_another_one_and_says_so(run, tmp_path):
    for name, steps in (("last", 2), ("best", 0)):
        progress = {"epoch": 5, "step": 5 + steps, "step_in_epoch": steps, "best_epoch": 5}
        altered(run, tmp_path / f"{name}.pt", progress=progress)
    assert load_model(tmp_path).chosen == "the newest, within epoch 6; --best takes the best one, of epoch 5"


def test_what_best_cannot_choose_is_one_line_and_a_damaged_best_of_an_early_stop_is_said(run, tmp_path):
    with pytest.raises(UserError, match="--best: .*last.pt is one file"):
        load_model(run / "checkpoints/last.pt", best=True)
    progress = {"epoch": 8, "best_epoch": 5, "stopping_epoch": 5}
    settings = {"epochs": 30, "early_stopping": 3}
    altered(run, tmp_path / "last.pt", progress=progress, settings=settings)
    with pytest.raises(UserError, match="--best: .* holds no best.pt"):
        load_model(tmp_path, best=True)
    assert load_model(tmp_path).path.name == "last.pt"
    (tmp_path / "best.pt").write_bytes(b"garbage" * 50)
    with pytest.warns(UserWarning, match=r"best\.pt.*last\.pt is taken instead"):
        assert load_model(tmp_path).path.name == "last.pt"


def test_the_random_numbers_stay_as_they_were(run):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_model(run)
    assert torch.equal(torch.rand(4), expected)


def test_an_average_predicts_what_was_reported_and_one_whose_statistics_are_not_computed_is_warned_of(tmp_path, capsys):
    # timm's, its stem for small images, one channel
    flags = "--arch test_resnet --ema-decay 0.9 --ema-bn-batches 2 --image-size 10 --crop-pct 0.8".split()
    folder, *result = reported(capsys, tmp_path, *flags, *SHORT)
    check_figures(folder / "checkpoints/final.pt", *result)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(folder)
    (folder / "checkpoints/manifest.json").unlink()
    state = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    state["progress"]["validated_step"] -= 1
    torch.save(state, folder / "between.pt")
    with pytest.warns(UserWarning, match="between two validations"):
        load_model(folder / "between.pt")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": None}, "does not name its network and classes"),
        ({"arch": 3}, "does not name its network and classes"),
        ({"classes": None}, "does not name its network and classes"),
        ({"classes": ["0", 1]}, "does not name its network and classes"),
        ({"format": FORMAT - 1}, f"has checkpoint format {FORMAT - 1}, this version loads {FORMAT}"),
        ({"preprocessing": None}, "says no usable image size of its preprocessing"),
        ({"preprocessing": {"image_size": 8}}, "says no usable"),
        ({"arch": "conv2"}, "does not fit the network: lacks features"),
        ({"arch": "no_such_network"}, "--arch 'no_such_network': no own, timm or torchvision network"),
        ({"classes": ["0", "1"]}, "should be \\(2, 100\\)"),
        ({"model": {"layers.1.weight": torch.zeros(2)}}, "does not fit the network"),
        ({"model": {}}, "holds no weights"),
    ],
    ids=str,
)
def test_a_checkpoint_that_lacks_what_is_needed_is_one_line(run, tmp_path, changes, words):
    path = tmp_path / "other.pt"
    state = torch.load(run / "checkpoints/last.pt", weights_only=True) | changes
    torch.save({name: value for name, value in state.items() if value is not None}, path)
    (line,) = mistakes_of(load_model, path)
    assert re.search(words, line)
