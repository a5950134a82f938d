"""A trained run, and a browser, that tests of several tools share."""

import pytest

from tests.helpers import trained
from tests.scripts.reporting.browser import Browser


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """The folder of a run on the digits: two short epochs of fc, with an average of the weights. Not to be changed."""
    flags = "--arch fc --epochs 2 --max-steps 30 --ema-decay 0.9 --batch-size 48".split()
    return str(trained(tmp_path_factory.mktemp("runs"), *flags))


@pytest.fixture(scope="session")
def browser():
    """For tests that are skipped where it is ``MISSING``."""
    with Browser() as one:
        yield one
