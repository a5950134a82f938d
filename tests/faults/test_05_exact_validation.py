"""Row 5: validation counts each image once and gives the same numbers on any number of ranks."""

import re

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch.nn import functional

from models import build_model
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import FINAL_LINE
from utils.config.groups.model import ModelSettings


@pytest.fixture
def tree(tmp_path):
    """Class folders of the digits: 30 to train on, 101 to validate."""
    digits = load_digits()
    for number in range(131):
        folder = tmp_path / "tree" / ("train" if number < 30 else "val") / str(digits.target[number])
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((digits.images[number] * 15).astype("uint8")).resize((32, 32))
        image.convert("RGB").save(folder / f"{number}.png")
    return tmp_path / "tree"


def test_101_images_in_batches_of_7_are_101_images_on_one_two_and_three_ranks_with_one_result(tree, tmp_path):
    torch.manual_seed(0)
    model = build_model(ModelSettings(arch="conv2"), classes=10, channels=3, image_size=32)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    flags = ("--evaluate", "--weights", tmp_path / "weights.pt", "--dataname", "folder", "--datapath", tree, "--arch")
    flags += ("conv2", "--image-size", 32, "--val-batch-size", 7, "--loader", "stream", "--workers", 1, "--no-progress")
    started = {n: Forked(*flags, processes=n) for n in (1, 2, 3)}
    lines = {n: tuple(process.output().splitlines()[-2:]) for n, process in started.items()}
    assert len(set(lines.values())) == 1, lines

    images = []
    labels = []
    for path in sorted((tree / "val").glob("*/*.png")):
        with Image.open(path) as image:  # the evaluation's crop: 224 of 256 pixels in the middle, here 28 of 32
            small = torch.frombuffer(bytearray(image.crop((2, 2, 30, 30)).tobytes()), dtype=torch.uint8)
        images.append(small.view(28, 28, 3).permute(2, 0, 1))
        labels.append(int(path.parent.name))
    pixels = functional.interpolate(torch.stack(images), (32, 32), mode="bilinear", antialias=True) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    model.eval()
    with torch.no_grad():
        output = model((pixels - mean) / std)
    by_class, last = lines[1]
    found = FINAL_LINE.fullmatch(last)
    labels = torch.tensor(labels)
    assert found["count"] == "101"
    assert float(found["top1"]) == pytest.approx(100 * (output.argmax(1) == labels).double().mean().item(), abs=1e-3)
    assert float(found["loss"]) == pytest.approx(functional.cross_entropy(output, labels).item(), abs=2e-4)
    f1 = 100 * f1_score(labels.numpy(), output.argmax(1).numpy(), average="macro", zero_division=0)
    assert float(re.search(r"macro F1 ([\d.]+)", by_class)[1]) == pytest.approx(f1, abs=5e-3)
