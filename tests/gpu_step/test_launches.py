"""What a step and a validation launch on a GPU, and how often the host waits for it: counted, and never more."""

import json

import pytest

from scripts.common.recipes import recipes
from tests.gpu_step.counting import TABLE, TORCH, counts, figures
from tests.gpu_step.fake_cuda import Unavailable

WRITTEN = json.loads(TABLE.read_text())
# An optimizer of each kind. The thorough test counts the steps of other networks, which takes minutes.
SOME = ["cifar10/airbench", "digits/fc"]
OTHERS = [name for name in WRITTEN["recipes"] if name not in SOME]


def changed(names):
    """The figures of recipes that are larger than those in the table, or not half of them, each with what it was.

    Half as many launches are no improvement until somebody has written them into the table: the count may be broken.
    """
    try:
        counted = counts(names)
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = {}
    for name in names:
        written = WRITTEN["recipes"][name]
        for key, value in figures(counted[name]).items():
            comparable = key.endswith("reads") or TORCH in WRITTEN["torch"]
            if comparable and not written[key] / 2 <= value <= written[key]:
                found[name, key] = (value, written[key], counted[name])
    return found


def test_the_table_names_every_recipe():
    assert WRITTEN["recipes"].keys() == {recipe.name for recipe in recipes()}


def test_nothing_launches_more_or_waits_more_often_than_it_did():
    assert changed(SOME) == {}


@pytest.mark.thorough
def test_no_other_recipe_launches_more_or_waits_more_often_than_it_did():
    assert changed(OTHERS) == {}
