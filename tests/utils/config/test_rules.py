"""Rules between settings: which settings a rule concerns."""

import ast
import inspect
import re

import pytest

from tests.utils.config.examples import OPTIONS, context, example
from tests.utils.config.test_argument_mistakes import mistakes_of
from utils.config import arguments, rules
from utils.config.field import FLAG
from utils.config.rules import Given, contradictions
from utils.config.settings import GROUPS, UserError, all_settings, flag_of

MODULES = (rules, *map(inspect.getmodule, GROUPS.values()))
DEFAULTS = {option.name: option.default for _, option in all_settings()}


def test_a_contradiction_depends_on_what_it_looks_at_and_on_every_setting_that_its_line_names():
    given = Given(DEFAULTS | {"lr": 0.1, "lr_min": 0.2}, dict.fromkeys(DEFAULTS, FLAG))
    (line,) = contradictions(given)
    assert line.startswith("--lr-min 0.2 is not below the peak") and contradictions(given, {"lr"}) == []
    given = Given(DEFAULTS | {"resume_override": True}, dict.fromkeys(DEFAULTS, FLAG))
    assert contradictions(given, {"epochs"}) != [] == contradictions(given, {"resume"})


def test_a_line_names_settings_that_exist():
    text = "".join(map(inspect.getsource, MODULES))
    flags = set(re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", text))
    assert flags - {flag_of(name) for name in DEFAULTS} == {"--batch"}, "which is scripts/amp_audit.py's"


def test_a_rule_asks_has_so_that_what_it_has_read_is_known():
    nodes = [node for module in MODULES for node in ast.walk(ast.parse(inspect.getsource(module)))]
    asked = [ast.unparse(node.test) for node in nodes if isinstance(node, ast.If) and _yields(node.body)]
    assert len(asked) > 40 and all(re.match(r"(v|self)\.has\(", question) for question in asked)
    assert len(asked) == sum(isinstance(node, ast.Yield) for node in nodes), "each line has an if of its own"


def _yields(body):
    return any(isinstance(one, ast.Expr) and isinstance(one.value, ast.Yield) for one in body)


def test_rare_classes_are_made_up_for_once():
    flags = ("--balanced-sampler", "--class-weights", "balanced")
    (line,) = mistakes_of(flags)
    assert line == "--balanced-sampler and --class-weights both make up for rare classes, together twice; give one"
    older = {"balanced_sampler": True, "class_weights": "balanced"}
    assert arguments.parse(["--resume", "R"], 1, older).data.balanced_sampler, "a run of a version without the rule"


@pytest.mark.parametrize(
    ("flags", "of_run"),
    [
        ("--lr-milestones 4 8", {"lr_policy": "multistep"}),
        ("--warmup-epochs 30", {"epochs": 100}),
        ("--swa-start-epoch 75", {"epochs": 100}),
        ("--fold 1", {"folds": 3}),
        ("--download", {"dataname": "cifar10", "datapath": "D"}),
    ],
)
def test_a_flag_is_compared_with_the_settings_of_the_checkpoint_alone(flags, of_run):
    words = ["--resume", "RUN", *flags.split()]
    assert arguments.parse(words).run.resume == "RUN"
    with pytest.raises(UserError):
        arguments.read(words).resolve(checkpoint={})
    assert arguments.read(words).resolve(checkpoint=of_run)


def test_weights_of_a_flag_replace_a_recipes_initialisation():
    recipe = ["--config", "fashionmnist/conv4", "--datapath", "D"]
    assert arguments.parse(recipe).model.init != "default" == arguments.parse([*recipe, "--weights", "x.pt"]).model.init
    with pytest.raises(UserError, match="^--init kaiming_uniform would be overwritten by the --weights weights"):
        arguments.parse([*recipe, "--weights", "x.pt", "--init", "kaiming_uniform"])


def test_a_setting_that_cannot_be_read_contradicts_nothing():
    assert mistakes_of(["--epochs", "many", "--warmup-epochs", "30"]) == ["--epochs 'many': must be a whole number"]
    assert len(mistakes_of(["--epochs", "many", "--warmup-epochs", "30", "--nesterov", "--momentum", "0"])) == 2


def test_a_data_set_that_is_not_known_is_not_taken_for_the_default_one():
    (line,) = mistakes_of(["--dataname", "cifar11", "--datapath", "data", "--download", "--val-split", "0.1"])
    assert line.startswith("--dataname 'cifar11'")


def test_what_needs_whole_weights_contradicts_a_sharded_model_and_nothing_else_does():
    contradicted = set()
    for name in OPTIONS:
        try:
            arguments.parse(f"{context(name)} {example(name)} --shard-model".split(), world_size=2)
        except UserError as error:
            contradicted |= {name for line in error.mistakes if line.startswith("--shard-model contradicts")}
            assert all(line.startswith("--shard-model") for line in error.mistakes)
    declared = {flag_of(name) for name, option in OPTIONS.items() if option.metadata["unsharded"]}
    assert contradicted == {name for name in OPTIONS if declared & {flag_of(name), *context(name).split()}}
    (line,) = mistakes_of(["--shard-model", "--grad-compression", "bf16"], world_size=2)
    assert line == "--shard-model contradicts --grad-compression bf16, which is for whole gradients; remove one"
    (line,) = mistakes_of(["--shard-model", "--optimizer", "lamb"], world_size=2)
    assert line == "--shard-model needs --optimizer sgd, adam or adamw, which treat each number by itself, not lamb"
    arguments.parse(["--shard-model", "--compile", "--optimizer", "lamb"]), "which one process does not shard"


RECIPES = sorted(arguments.CONFIGS.rglob("*.yaml"))
# One of those that give the same settings, whatever the values.
RECIPES = {(*re.findall("^[a-z0-9-]+:", path.read_text(), re.M),): path for path in RECIPES}.values()
OVERRIDES = [
    pytest.param(["--optimizer", "adamw"], marks=pytest.mark.thorough),
    ["--optimizer", "schedulefree-sgd"],
    ["--optimizer", "muon", "--lr-policy", "constant"],
    pytest.param(["--lr-policy", "cosine"], marks=pytest.mark.thorough),
    ["--lr-policy", "one-cycle", "--warmup-epochs", "0"],
    ["--lr-policy", "multistep"],
    ["--lr", "0.3"],
    ["--global-batch-size", "96", "--epochs", "7"],
]


@pytest.mark.parametrize("flags", OVERRIDES, ids=" ".join)
def test_what_a_run_of_any_recipe_saves_can_be_read_back_whatever_a_flag_has_replaced(flags, recipe):
    read = 0
    for path in RECIPES:
        try:
            args = arguments.parse(["--config", str(path), "--datapath", "DATA", *flags])
        except UserError:  # what contradicts the recipe, or a recipe for any data
            continue
        again = arguments.parse(["--config", recipe(arguments.as_recipe(args, "main.py"))])
        assert again.result_values() == args.result_values(), path
        read += 1
    assert read > 5
