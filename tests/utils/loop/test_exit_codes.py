"""The line and the exit code with which the program ends."""

import signal

import pytest

from utils.loop.exit_codes import report
from utils.loop.stop_signals import StoppedAtOnce
from utils.runtime.process import RankInfo


@pytest.mark.parametrize("stop, code", [(KeyboardInterrupt(), 130), (StoppedAtOnce(signal.SIGTERM), 75)])
def test_a_stopped_evaluation_is_not_said_to_continue(stop, code, capsys):
    for trains in (True, False):
        assert report(stop, RankInfo(), 0, trains) == code
        assert ("--resume auto continues" in capsys.readouterr().err) == trains
