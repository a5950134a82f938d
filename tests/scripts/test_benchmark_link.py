"""The measurement over a slow link: what it needs, the link itself, and how its table is computed."""

import os
import subprocess

import pytest

from scripts import benchmark_link
from scripts.common.command_line import run_tool
from scripts.links import network
from scripts.links.training import Speed
from utils.config.settings import UserError


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (("geteuid", lambda: 1000), "network namespaces need root: start it again with sudo"),
        (("which", lambda program: None), "there is no program ip or tc here: apt-get install iproute2"),
    ],
)
def test_without_root_or_programs_it_says_so_in_one_line_and_ends_with_2(monkeypatch, capsys, patch, words):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil if patch[0] == "which" else os, *patch)
    monkeypatch.setattr("sys.argv", ["benchmark_link.py"])
    assert run_tool(benchmark_link.NAME, benchmark_link.main) == 2
    assert capsys.readouterr() == ("", f"benchmark_link.py: {words}\n")


def test_the_link_has_the_rate_that_was_asked_for_and_leaves_nothing():
    try:
        with network.Network() as link:
            free = link.measure()
            words = link.throttle(200, 1)
            limited = link.measure()
    except UserError as error:
        pytest.skip(str(error))
    assert words.startswith("200 Mbit/s")
    assert limited.mbit < 240 < free.mbit  # a burst passes at once
    assert limited.ms > 1.7  # a packet may arrive a tenth of a millisecond early
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert link.spaces[0] not in spaces


def test_efficiency_is_of_the_same_round_and_of_twice_one_machine():
    alone, way = benchmark_link.ALONE, "ddp"
    rounds = [{alone: Speed(one, 0), way: Speed(two, 90e6)} for one, two in ((10, 15), (20, 20), (10, 18))]
    first, second = benchmark_link.rows(rounds)
    assert first == [alone, "10.0", "-", "-", "-"]
    assert second == [way, "18.0", "0.75", "0.50 - 0.90", "90.0"]
