"""The run's name and folder."""

import dataclasses
import re
from datetime import datetime as real_datetime

import pytest

from tests.helpers import mistakes_of
from utils.config.arguments import OPTIONS, parse
from utils.record import run_folder
from utils.record.run_folder import MOST_CHARACTERS, _as_name, _token, make_folder, planned_folder, specific_name


@pytest.fixture
def frozen(monkeypatch):
    """Every run starts in the same second."""

    class Frozen(real_datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 2, 29, 23, 59, 58, 999_999)

    monkeypatch.setattr(run_folder, "datetime", Frozen)
    return "2024-02-29_23-59-58"


def settings_for(folder, *argv, arch=None):
    """Settings with their output below ``folder``; ``arch`` as it is, whether such a network exists or not."""
    args = parse(["--output", str(folder / "runs"), *argv])
    return dataclasses.replace(args, model=dataclasses.replace(args.model, arch=arch)) if arch is not None else args


def named(*argv, world_size=1):
    """The specific name of a run with these flags."""
    return specific_name(parse(list(argv), world_size))


def test_the_name_of_a_plain_run_holds_batch_optimizer_rate_policy_and_epochs_alone(tmp_path, frozen):
    assert planned_folder(settings_for(tmp_path)).name == f"{frozen}_b64-sgd-lr0.1-cosine-e20"


def test_the_name_says_what_flags_changed_of_the_result_in_the_order_of_help_and_ends_with_the_users_text():
    argv = "--dataname synthetic --arch resnet18 --name mine --ema-decay 0.999 --optimizer lamb --lr 0.0125 --compile"
    argv += " --no-decay-norm-bias --lr-policy gaussian --epochs 7 --batch-size 16 --augment shift flip"
    assert named(*argv.split(), world_size=3) == (
        "b48-lamb-lr0.0125-gaussian-e7-aug_shift_flip-compile-no_decay_norm_bias-ema0.999_mine"
    )


def test_the_name_is_silent_of_what_does_not_shape_the_result_and_of_flags_that_say_what_holds_anyway():
    argv = "--workers 0 --deterministic --device cpu --print-freq 7 --output x --momentum 0.9 --mixup 0 --seed 0"
    assert named(*argv.split()) == named()


def test_beside_a_recipe_the_name_says_what_differs_from_it(recipe):
    path = recipe("arch: conv2\nmixup: 0.2\nnesterov: true\nbatch-size: 32\n", "conv2.yaml")
    assert named("--config", path, "--mixup", "0.2") == "b32-sgd-lr0.1-cosine-e20", "the recipe says it"
    assert named("--config", path, "--mixup", "0", "--no-nesterov") == "b32-sgd-lr0.1-cosine-e20-mixup0-no_nesterov"


@pytest.mark.parametrize(
    "name, shown", [("conv2_long.yaml", "-long"), ("of_mine.yaml", "-of_mine"), ("config.yaml", ""), ("conv2.yaml", "")]
)
def test_the_name_of_a_recipe_is_told_where_the_network_does_not_tell_it(recipe, name, shown):
    assert named("--config", recipe("mixup: 0.2\n", name)) == f"b64-sgd-lr0.1-cosine-e20{shown}"


def test_the_name_of_class_folders_says_which(tmp_path):
    assert named("--dataname", "folder", "--datapath", f"{tmp_path}/my_pets/").endswith("-e20-my_pets")


def test_a_long_name_leaves_out_whole_settings_says_how_many_and_keeps_the_users_text():
    argv = "--ema-decay 0.999 --mixup 0.2 --cutmix 1 --cutout 8 --label-smoothing 0.1 --warmup-epochs 5 --seed 12345"
    argv += " --weight-decay 0.00005 --clip-grad-norm 1"
    name = named(*argv.split(), "--name", "n" * 80)
    own, _, text = name.rpartition("_")
    assert text == "n" * 80 and len(own) <= MOST_CHARACTERS
    kept, _, more = own.removesuffix("more").rpartition("-")
    every = ["seed12345", "cutout8", "mixup0.2", "cutmix1", "smooth0.1", "wd5e-05", "warmup5", "clip1", "ema0.999"]
    shown = re.split(r"(?<!e)-", kept.removeprefix("b64-sgd-lr0.1-cosine-e20-"))
    assert shown == every[: len(shown)] and int(more) == len(every) - len(shown) > 0


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_setting_of_any_kind_makes_a_token_without_a_table_entry_of_its_own(name):
    meta = OPTIONS[name].metadata
    value = {bool: True, int: 3, float: 0.25}.get(meta["type"], "a/b_c")
    token = _token(name, [value, value] if meta["many"] else value)
    shown = {bool: "", int: "3", float: "0.25"}.get(meta["type"], "b_c")
    assert token == _as_name(token) and "-" not in token and token.endswith(shown)


def test_names_of_runs_sort_by_their_start(tmp_path, monkeypatch):
    names = []
    for second, flags in enumerate((["--optimizer", "adam"], [], ["--epochs", "5"])):
        now = real_datetime(2024, 2, 29, 23, 59, 57 + second)
        monkeypatch.setattr(run_folder, "datetime", type("At", (), {"now": staticmethod(lambda now=now: now)}))
        names.append(planned_folder(settings_for(tmp_path, *flags)).name)
    assert names == sorted(names)


def test_planned_folder_is_the_one_that_is_made(tmp_path, frozen):
    args = settings_for(tmp_path)
    assert planned_folder(args) == make_folder(args)


HOSTILE = ["../../escaped", "/etc/passwd", "..", ".", ".hidden", "-rf", "a/b", "a\\b", "a\nb", "a\0b", "~root", "$HOME"]
HOSTILE += ["n\u00e9t", "x" * 1000, "\u7f51\u7edc", " ", "timm/resnet18", "a" * 79 + "/" + "b" * 79, 'con*?<>|:"']


@pytest.mark.parametrize("arch", HOSTILE, ids=lambda arch: ascii(arch)[:20])
def test_folder_stays_below_the_output_whatever_the_network_is_called(arch, tmp_path, frozen):
    made = make_folder(settings_for(tmp_path, arch=arch))
    inside = made.resolve().relative_to((tmp_path / "runs").resolve())
    data, network, name = inside.parts
    assert data == "digits" and name.startswith(frozen)
    assert all(part.isascii() and part[0] not in ".-" and len(part) <= 255 for part in (network, name))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_longest_names_still_fit_a_file_system_also_of_runs_started_in_the_same_second(tmp_path, frozen):
    args = settings_for(tmp_path, "--optimizer", "o" * 300, "--name", "n" * 80, arch="a" * 300)
    folders = {make_folder(args) for _ in range(4)}
    assert len(folders) == 4 and all((folder / "checkpoints").is_dir() for folder in folders)


@pytest.mark.parametrize("place", ["runs", "runs/digits", "runs/digits/conv2"])
def test_file_where_a_folder_must_be_is_one_line_about_the_output(place, tmp_path):
    taken = tmp_path / place
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.write_text("mine")
    (line,) = mistakes_of(make_folder, settings_for(tmp_path))
    assert f"--output {tmp_path / 'runs'}" in line
    assert taken.read_text() == "mine"
