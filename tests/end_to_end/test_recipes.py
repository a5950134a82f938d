"""Every recipe under configs/ can be read, and says at its top how to run it."""

import re

import pytest

from utils.config import arguments

RECIPES = sorted(str(path.relative_to(arguments.CONFIGS).with_suffix("")) for path in arguments.CONFIGS.rglob("*.yaml"))


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_parses_into_what_its_name_says(name):
    args = arguments.parse(["--config", name, "--datapath", "somewhere"])
    dataname, arch = name.split("/")
    assert args.data.dataname == dataname
    assert arch == args.model.arch or arch.startswith(f"{args.model.arch}_")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_opens_with_its_command_and_its_accuracy(name):
    lines = (arguments.CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    header = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    assert any(
        re.fullmatch(rf"# +python (scripts/torchrun\.py .*)?main\.py --config {name} --datapath DATA", line)
        for line in header
    )
    assert re.search(r"\d % top-1", " ".join(header))


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("imagenet/")])
def test_a_recipe_for_many_gpus_keeps_its_batch_on_any_number_of_them(name):
    totals = {
        arguments.parse(["--config", name, "--datapath", "somewhere"], world_size=n).data.global_batch_size
        for n in (1, 2, 3, 8, 64)
    }
    assert len(totals) == 1
