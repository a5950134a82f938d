"""``--teacher``: checkpoints and pretrained networks, their classes and images, and runs that learn from them."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch.nn import functional

import main
from models import load_model
from models.training_loss import build_teacher
from tests.end_to_end.processes import differences, load, rows
from tests.faults.small_run import told
from tests.helpers import altered, mistakes_of, trained
from tests.models.test_pretrained import timm_weights
from tests.utils.data.loading import CPU, read
from utils.config.settings import UserError


def train(output, *more):
    """A short run of the digits; gives its folder."""
    return trained(output, "--arch", "fc", "--epochs", 1, "--deterministic", *more)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A trained network's checkpoint."""
    return train(tmp_path_factory.mktemp("teacher"), "--max-steps", 20, "--seed", 5) / "checkpoints" / "final.pt"


@pytest.fixture
def digits():
    return read()


def test_a_checkpoints_network_answers_as_load_model_lets_it(teacher, digits):
    built = build_teacher(str(teacher), digits, CPU)
    images = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(built(images), load_model(teacher).network(images))
    assert (built.scale, built.order, built.origin.arch) == (None, None, "fc")
    assert build_teacher(str(teacher.parents[1]), digits, CPU).origin.digest == built.origin.digest, "a run's folder"


def test_classes_in_another_order_are_matched_by_name_and_another_mean_is_renormalised(teacher, digits, tmp_path):
    names = [str(digit) for digit in (3, 1, 2, 0, 4, 5, 6, 7, 9, 8)]
    path = altered(
        teacher.parents[1], tmp_path / "other.pt", classes=names, preprocessing={"mean": [0.5], "std": [0.25]}
    )
    built = build_teacher(str(path), digits, CPU)
    images = torch.randn(4, 1, 8, 8)
    pixels = images * digits.preprocessing.std[0] + digits.preprocessing.mean[0]
    with torch.no_grad():
        answers = load_model(path).network((pixels - 0.5) / 0.25)
        torch.testing.assert_close(built(images), answers[:, [3, 1, 2, 0, 4, 5, 6, 7, 9, 8]])
    assert built.origin.digest != build_teacher(str(teacher), digits, CPU).origin.digest


def test_a_librarys_network_has_its_pretrained_weights_images_and_classes(monkeypatch, tmp_path):
    network, config = timm_weights(monkeypatch, tmp_path, "test_resnet", classes=1000)
    names = timm.data.ImageNetInfo().label_names()
    shown = SimpleNamespace(channels=3, mean=config.mean, std=config.std)
    data = SimpleNamespace(classes=sorted(names, reverse=True), preprocessing=shown)
    built = build_teacher("timm/test_resnet", data, CPU)
    images = torch.randn(2, 3, 64, 64)
    assert built.size == config.input_size[-1]
    wide = functional.interpolate(images, (built.size,) * 2, mode="bilinear", antialias=True)
    with torch.no_grad():
        torch.testing.assert_close(built(images), network(wide)[:, [names.index(name) for name in data.classes]])


def test_what_cannot_teach_is_refused_in_one_line(teacher, digits, tmp_path, monkeypatch):
    names = [*(str(digit) for digit in range(9)), "ten"]
    timm_weights(monkeypatch, tmp_path, "test_resnet", classes=7)
    (tmp_path / "damaged.pt").write_bytes(b"damaged")
    for source, words in (
        (
            str(altered(teacher.parents[1], tmp_path / "a.pt", classes=names)),
            "knows other classes than the data: it lacks 9 and has ten",
        ),
        (
            str(altered(teacher.parents[1], tmp_path / "b.pt", preprocessing={"pixel_range": [0, 1023]})),
            "was trained with --pixel-range 0 1023, and here it is none; it would see brighter or darker images",
        ),
        (str(tmp_path / "damaged.pt"), "it is damaged"),
        ("fc", "fc: has no pretrained weights; give the path of a checkpoint"),
        ("resnet1", "is no file or folder, and no timm or torchvision network has this name"),
        ("test_resnet", "its 7 classes are not those of ImageNet-1k"),
        (str(tmp_path / "absent.pt"), "is no file or folder"),
    ):
        (line,) = mistakes_of(build_teacher, source, digits, CPU)
        assert words in line
        assert (line.startswith(f"--teacher {source}: ") and line.count(source) == 1) or source in ("fc", "resnet1")
    timm_weights(monkeypatch, tmp_path, "test_resnet", classes=1000)
    with pytest.raises(UserError, match="sees images of 3 channel.s., and the data has 1"):
        build_teacher("test_resnet", digits, CPU)


def test_a_run_cut_and_resumed_has_the_bits_of_an_uninterrupted_one_and_logs_both_losses(
    teacher, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(teacher.parent)  # the path is relative, and the resume comes from elsewhere
    flags = ("--teacher", teacher.name, "--distillation-temperature", 2, "--distillation-alpha", 0.7, "--mixup", 0.2)
    whole = train(tmp_path / "whole", *flags, "--max-steps", 8)
    cut = train(tmp_path / "cut", *flags, "--max-steps", 5)
    monkeypatch.chdir(tmp_path)
    assert main.main(["--device", "cpu", "--deterministic", "--resume", str(cut), "--max-steps", "8"]) == 0
    assert "Teacher: " in capsys.readouterr().out
    assert not differences(whole, cut) and rows(whole)[-1] == rows(cut)[-1]
    row = rows(whole)[-1]
    assert float(row["train_criterion"]) + float(row["train_distillation"]) == pytest.approx(
        float(row["train_loss"]), rel=1e-5
    )
    ours = load(whole, "final.pt")
    assert set(ours["model"]) == set(torch.load(teacher, weights_only=True)["model"]), "the teacher is not saved"
    assert ours["teacher"] == {
        "source": str(teacher),
        "arch": "fc",
        "digest": build_teacher(str(teacher), read(), CPU).origin.digest,
    }


def test_another_teacher_at_the_same_path_is_refused_or_taken_on_request_and_evaluation_needs_none(
    teacher, tmp_path, capsys
):
    path = altered(teacher.parents[1], tmp_path / "teacher.pt")
    run = train(tmp_path / "runs", "--teacher", path, "--max-steps", 2)
    altered(teacher.parents[1], path, preprocessing={"mean": [0.5]})
    resume = ("--device", "cpu", "--deterministic", "--resume", run, "--max-steps", 3)
    capsys.readouterr()
    code, (line,) = told(capsys, resume)
    assert code == 2 and line.startswith(f"main.py: --teacher {path}: is another network (")
    assert main.main([*map(str, resume), "--resume-override"]) == 0
    assert "going on with this one" in capsys.readouterr().err + (run / "log.txt").read_text()
    (tmp_path / "teacher.pt").unlink()
    code, (line,) = told(capsys, ("--device", "cpu", "--resume", run, "--deterministic", "--max-steps", 4))
    assert code == 2 and line.startswith(f"main.py: --teacher {path}: is no file or folder")
    assert main.main(["--device", "cpu", "--evaluate", "--resume", str(run)]) == 0


def test_the_plan_says_how_it_distils_and_what_memory_the_teacher_takes(teacher, workplace, capsys):

    def plan(*flags):
        assert main.main(["--device", "cpu", "--dry-run", *flags]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return dict(line.split(maxsplit=1) for line in out.splitlines() if line[:8].strip() in ("Loss", "Teacher"))

    assert set(plan()) == {"Loss"}
    given = ("--teacher", str(teacher))
    parameters = sum(value.numel() for value in load_model(teacher).network.parameters())
    row = plan(*given)["Teacher"]
    assert f"fc, {parameters:,} parameters ({4 * parameters / 1e6:,.1f} MB" in row and str(teacher) in row
    assert row.endswith("soft distillation, alpha 0.5, temperature 1")
    changed = [("--distillation", "hard"), ("--distillation-alpha", "0.1"), ("--distillation-temperature", "3")]
    assert len({row, *(plan(*given, *flags)["Teacher"] for flags in changed)}) == 4
