"""Each tool opens the weights that its flags choose."""

import contextlib

import pytest
from PIL import Image

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
