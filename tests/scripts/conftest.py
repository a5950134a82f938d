"""A trained run that tests of several tools share."""

import pytest

import main
from tests.helpers import QUIETLY


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """The folder of a run on the digits: two short epochs of fc, with an average of the weights. Not to be changed."""
    place = tmp_path_factory.mktemp("runs")
    line = [*QUIETLY, "--arch", "fc", "--epochs", "2", "--max-steps", "30"]
    assert main.main([*line, "--ema-decay", "0.9", "--batch-size", "48", "--output", str(place)]) == 0
    (folder,) = place.glob("digits/fc/*")
    return str(folder)
