"""Command line and recipe into checked, read-only settings."""

import dataclasses
import re

import pytest
import yaml

from utils.config import arguments
from utils.config.settings import GONE, Settings, UserError, all_settings, flag_of

# ------------------------------------------------------------------------------------ precedence


def test_flag_wins_over_recipe_over_checkpoint_over_default(recipe):
    path = recipe("lr: 0.2\nepochs: 12\n")
    stored = {"lr": 0.3, "epochs": 13, "weight_decay": 0.03}
    args = arguments.parse(["--config", path, "--lr", "0.1"], 1, stored)
    settings = args.optimisation
    assert (settings.lr, settings.epochs, settings.weight_decay, settings.momentum) == (0.1, 12, 0.03, 0.9)
    origins = [args.origins[name] for name in ("lr", "epochs", "weight_decay", "momentum")]
    assert origins == ["flag", "recipe", "checkpoint", "default"]


def test_no_flag_switches_off_what_the_recipe_switched_on(recipe):
    path = recipe("nesterov: true\nchannels-last: true")
    args = arguments.parse(["--config", path, "--no-nesterov"])
    assert (args.optimisation.nesterov, args.model.channels_last) == (False, "on")


def test_none_takes_back_what_a_recipe_or_a_checkpoint_sets(recipe):
    path = recipe("ema-decay: 0.9\nfreeze: [features]\nclip-grad-norm: 1\nglobal-batch-size: 96\n")
    flags = ["--ema-decay", "none", "--freeze", "none", "--drop", "none", "--global-batch-size=none"]
    args = arguments.parse(["--config", path, *flags], 2, {"drop": 0.1, "optimizer": "adamw"})
    assert (args.average.ema_decay, args.model.freeze, args.model.drop) == (None, None, None)
    assert (args.data.batch_size, args.data.global_batch_size) == (64, 128)
    assert (args.optimisation.clip_grad_norm, args.optimisation.optimizer) == (1, "adamw")
    assert [args.origins[name] for name in ("ema_decay", "freeze", "drop")] == ["default"] * 3
    assert args.changed == {"config", "ema_decay", "freeze", "drop", "global_batch_size"}


def test_none_is_no_value_of_an_optional_setting_but_of_those_that_list_it():
    whole = arguments.parse([])
    optional = [option for _, option in all_settings() if option.default is None and option.metadata["in_recipe"]]
    for option in (option for option in optional if option.metadata["type"] is not bool and option.name != "amp"):
        args = arguments.parse([flag_of(option.name), "none"])
        listed = "none" in (option.metadata["choices"] or ())
        assert args.values()[option.name] == (["none"] if listed else whole.values()[option.name]), option.name
        assert args.origins[option.name] == ("flag" if listed else whole.origins[option.name])


def test_without_arguments_every_setting_has_its_default_or_follows_from_one():
    args = arguments.parse([])
    derived = {"lr": 0.1, "global_batch_size": 64, "arch": "conv2"}
    expected = {option.name: derived.get(option.name, option.default) for _, option in all_settings()}
    assert args.values() == expected


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adam", 0.001), ("adamw", 0.001), ("lamb", 0.001)])
def test_learning_rate_left_out_depends_on_the_optimizer(optimizer, lr):
    assert arguments.parse(["--optimizer", optimizer]).optimisation.lr == lr


# -------------------------------------------------------------------------------------- recipes


def test_recipe_is_found_by_its_name_under_configs(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "CONFIGS", tmp_path)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "fc.yaml").write_text("arch: fc\n")
    assert arguments.parse(["--config", "mnist/fc"]).model.arch == "fc"


def test_recipe_keys_may_be_written_with_underscores(recipe):
    args = arguments.parse(["--config", recipe("weight_decay: 0.25\nlabel-smoothing: 0.125\n")])
    assert (args.optimisation.weight_decay, args.loss.label_smoothing) == (0.25, 0.125)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("amp: off", "amp", "off"),
        ("amp: 'off'", "amp", "off"),
        ("amp: bf16", "amp", "bf16"),
        ("lr: 1e-3", "lr", 0.001),
        ("lr: 1.0e-3", "lr", 0.001),
        ("lr: 1", "lr", 1.0),
        ("epochs: 7.0", "epochs", 7),
        ("name: 123", "name", "123"),
        ("augment: flip", "augment", ["flip"]),
        ("augment: [shift, flip]", "augment", ["shift", "flip"]),
        ("augment: none", "augment", ["none"]),
        ("progress: false", "progress", False),
        ("image-size: null", "image_size", None),
        ("opt-betas: [0.9, 0.95]", "opt_betas", [0.9, 0.95]),
        (
            "opt-kwargs: {amsgrad: true, eps_root: 1.0e-8, b: null}",
            "opt_kwargs",
            ["amsgrad=true", "eps_root=1e-08", "b=null"],
        ),
        ("opt-kwargs: [amsgrad=true]", "opt_kwargs", ["amsgrad=true"]),
        ("lr-scale: {'*.bias': 2}", "lr_scale", ["*.bias=2"]),
    ],
)
def test_yaml_value_is_read_as_its_setting_means_it(recipe, line, name, value):
    found = arguments.parse(["--config", recipe(line)]).values()[name]
    assert (type(found), found) == (type(value), value)


# ----------------------------------------------------------------------------------- batch sizes


def test_empty_recipe_changes_nothing(recipe):
    values = arguments.parse(["--config", recipe("# nothing\n")]).values()
    assert values | {"config": None} == arguments.parse([]).values()


@pytest.mark.parametrize(
    ("argv", "world_size", "batch_size", "global_batch_size"),
    [
        ([], 1, 64, 64),
        ([], 4, 64, 256),
        (["-b", "10", "--accumulate", "3"], 2, 10, 60),
        (["--global-batch-size", "256"], 1, 256, 256),
        (["--global-batch-size", "256"], 4, 64, 256),
        (["--global-batch-size", "256", "--accumulate", "2"], 4, 32, 256),
        (["--global-batch-size", "100"], 3, 34, 100),  # a part of 100 / 3 rounded up fits into one pass
        (["--global-batch-size", "2"], 4, 1, 2),
        (["--global-batch-size", "60", "-b", "10", "--accumulate", "3"], 2, 10, 60),
    ],
)
def test_batch_sizes_follow_from_each_other(argv, world_size, batch_size, global_batch_size):
    data = arguments.parse(argv, world_size).data
    assert (data.batch_size, data.global_batch_size) == (batch_size, global_batch_size)


def test_batch_size_flag_wins_over_global_batch_size_of_the_recipe(recipe):
    data = arguments.parse(["--config", recipe("global-batch-size: 256"), "-b", "16"], 2).data
    assert (data.batch_size, data.global_batch_size) == (16, 32)


def test_global_batch_size_of_a_checkpoint_is_kept_on_another_number_of_processes():
    data = arguments.parse([], 4, {"global_batch_size": 64}).data
    assert (data.batch_size, data.global_batch_size) == (16, 64)


# ------------------------------------------------------------------------- read-only, saved, help


def test_settings_are_read_only():
    args = arguments.parse([])
    for group, option in all_settings():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(getattr(args, group), option.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.data = None


def test_parsing_leaves_the_defaults_of_the_next_parse_alone():
    before = Settings().values()
    arguments.parse(["--lr", "3", "--augment", "flip", "--lr-policy", "multistep"])
    assert Settings().values() == before


def test_saved_configuration_keeps_the_global_batch_on_another_number_of_processes(recipe):
    saved = arguments.as_recipe(arguments.parse(["-b", "24", "--accumulate", "2"], 2), "main.py")
    data = arguments.parse(["--config", recipe(saved)], 3).data
    assert (data.global_batch_size, data.batch_size) == (96, 16)


def test_saved_configuration_says_where_each_value_came_from(recipe):
    args = arguments.parse(["--config", recipe("epochs: 9"), "--lr", "0.5"])
    lines = arguments.as_recipe(args, "main.py").splitlines()
    assert {"epochs: 9  # recipe", "lr: 0.5  # flag", "momentum: 0.9  # default"} <= set(lines)


@pytest.mark.parametrize("header", ["main.py \x1b[1m", "main.py a\nlr: 7", "main.py \x85lr: 7", "main.py \u2028lr: 7"])
def test_saved_configuration_is_readable_whatever_the_command_line_held(header):
    saved = arguments.as_recipe(arguments.parse(["--lr", "0.3"]), header)
    assert yaml.safe_load(saved)["lr"] == 0.3


def test_what_followed_from_optimizer_and_data_set_follows_others_when_it_is_read_back(recipe):
    saved = arguments.as_recipe(arguments.parse(["--lr-base", "0.1"]), "main.py")
    assert {"# arch: conv2  # default", "# lr-base-scale: linear  # default"} <= set(saved.splitlines())
    plain = recipe(arguments.as_recipe(arguments.parse([]), "main.py"))
    args = arguments.parse(["--config", plain, "--optimizer", "adamw", "--dataname", "imagenet", "--datapath", "D"])
    begun = arguments.parse(["--optimizer", "adamw", "--dataname", "imagenet", "--datapath", "D"])
    assert args.optimisation.lr == begun.optimisation.lr == 0.001
    assert args.model.arch == begun.model.arch != "conv2"


def test_a_setting_that_kept_runs_were_made_with_is_still_one_or_said_to_be_gone():
    texts = [path.read_text() for path in (arguments.CONFIGS.parent / "results").rglob("config.yaml")]
    names = {name for text in texts for name in re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE)}
    known = {option.name.replace("_", "-") for _, option in all_settings()}
    assert len(names) > 100 and names <= known | {name.replace("_", "-") for name in GONE}


def test_only_these_settings_are_for_one_command_and_in_no_recipe():
    words = "config output gpu_ids resume resume_override evaluate dry_run max_steps"
    assert {option.name for _, option in all_settings() if not option.metadata["in_recipe"]} == set(words.split())


def test_help_shows_every_help_text_and_default():
    text = " ".join(arguments.build_parser().format_help().split())
    for _, option in all_settings():
        assert option.metadata["help"].replace("%%", "%")[:20] in text
    assert "[digits]" in text and "[conv2, or resnet18 for" in text and "[20]" in text


def test_values_that_resemble_a_flag_are_values():
    assert arguments.parse(["--output", "compile=1"]).run.output == "compile=1"
    assert arguments.parse(["--output=--lr"]).run.output == "--lr"


def test_user_error_is_a_value_error_that_holds_every_line():
    with pytest.raises(ValueError) as caught:
        arguments.parse(["--epochs", "0", "--lr", "0"])
    assert isinstance(caught.value, UserError)
    assert str(caught.value) == "\n".join(caught.value.mistakes)


@pytest.mark.parametrize(
    ("dataname", "arch"),
    [
        ("digits", "conv2"),
        ("cifar10", "conv2"),
        ("folder", "resnet18"),
        ("imagenet", "resnet18"),
        ("synthetic", "resnet18"),
    ],
)
def test_the_default_network_fits_the_data_sets_images_and_stands_in_the_settings(dataname, arch):
    args = arguments.parse(["--dataname", dataname, "--datapath", "."])
    assert args.model.arch == arch and args.origins["arch"] == "default"
    assert f"arch: {arch}  # default" in arguments.as_recipe(args, "")
    assert arguments.parse(["--dataname", dataname, "--datapath", ".", "--arch", "fc"]).model.arch == "fc"
