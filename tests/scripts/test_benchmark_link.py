"""The measurement over a slow link: what it needs, the link itself, and how its table is computed."""

import os
import subprocess

import pytest

from scripts import benchmark_link
from scripts.common.command_line import run_tool
from scripts.links import network, training
from scripts.links.training import Lab, Speed
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


def test_a_slow_link_gets_a_probe_of_some_seconds_and_time_for_it():
    link = network.Network()
    assert link._probe() == (32 * 2**20, 60)
    link.limits = network.Limits(200, 1)
    assert link._probe()[0] == 32 * 2**20
    link.limits = network.Limits(0.08, 500)
    assert link._probe() == (100_000, 60 + 2 * (10 + 21))


@pytest.fixture
def here(monkeypatch):
    """Both machines of a link are this one."""
    monkeypatch.setattr(network, "enter", lambda space: None)
    monkeypatch.setattr(network, "ADDRESSES", ("127.0.0.1", "127.0.0.1"))
    return network.Network()


def test_what_the_probe_sends_arrives(here):
    measured = here.measure()
    assert measured.mbit > 0 and measured.ms > 0


@pytest.mark.parametrize("part", ["enter", "_answer", "_ask"])
def test_a_probe_that_fails_is_a_line_and_no_traceback_of_a_thread(here, monkeypatch, capsys, part):
    def fail(*_):
        raise OSError("why")

    monkeypatch.setattr(network, "SLOWEST_PROBE", 0.5)
    monkeypatch.setattr(network, part, fail)
    with pytest.raises(UserError, match="did not carry 33,554,432 bytes within 0 s: "):
        here.measure()
    assert capsys.readouterr() == ("", "")


def test_an_end_that_closes_the_connection_is_an_error():
    ours, theirs = network.socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConnectionError):
        network._received(ours, 1)


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return Lab(network.Network(), ["--arch", "fc", "--image-size", "8"], batch=2, warm_up=1, steps=9)


def test_a_training_gets_time_by_its_steps_and_by_the_bytes_that_they_send(lab):
    assert lab.longest == 1800 + 10 * 60
    lab.network.limits = network.Limits(0.01, 10)
    assert lab.gradient_bytes > 4 * 1000 * 100, "a hidden layer and 1000 classes"
    assert lab.longest == 1800 + 10 * (60 + 2 * (lab.gradient_bytes * 8 / 1e4 + 1))


def test_a_training_that_does_not_end_is_stopped_and_told_in_a_line(lab, monkeypatch):
    started = []

    def start(*_):
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    monkeypatch.setattr(lab, "_start", start)
    monkeypatch.setattr(training, "START_SECONDS", -600)
    with pytest.raises(UserError, match="a training did not end within 0 s"):
        lab.alone()
    assert started[0].poll() is not None


def test_efficiency_is_of_the_same_round_and_of_twice_one_machine():
    alone, way = benchmark_link.ALONE, "ddp"
    rounds = [{alone: Speed(one, 0), way: Speed(two, 90e6)} for one, two in ((10, 15), (20, 20), (10, 18))]
    first, second = benchmark_link.rows(rounds)
    assert first == [alone, "10.0", "-", "-", "-"]
    assert second == [way, "18.0", "0.75", "0.50 - 0.90", "90.0"]
