"""Each tool opens the weights that its flags choose."""

import contextlib

import pytest
from PIL import Image

from models import load_model
from scripts import join_shards
from tests.scripts.test_bad_input_of_tools import REST, TOOLS
from utils.config.settings import UserError


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("flags", "raw", "best"), [((), False, False), (("--raw",), True, False), (("--best",), False, True)]
)
def test_raw_and_best_reach_what_opens_the_run(tool, flags, raw, best, digits_run, workplace, monkeypatch):
    asked = []

    def opened(run, raw=False, device="auto", *, best=None, **_):
        asked.append((run, raw, bool(best)))
        raise UserError("opened")

    monkeypatch.setattr(f"scripts.{'reporting.assemble' if tool == 'report' else tool}.open_run", opened)
    Image.new("L", (8, 8)).save("good.png")
    with contextlib.suppress(UserError):  # a report goes on without predictions
        TOOLS[tool].main([digits_run, *REST.get(tool, "").split(), *flags])
    assert asked == [(digits_run, raw, best)]


@pytest.mark.parametrize(("name", "chosen"), [("best", True), ("last", False)])
def test_one_file_made_of_a_best_pt_still_says_that_validation_images_chose_it(name, chosen, digits_run, tmp_path):
    assert join_shards.main([f"{digits_run}/checkpoints/{name}.pt", "--output", str(tmp_path / "whole.pt")]) == 0
    assert load_model(tmp_path / "whole.pt").is_favoured is chosen
