"""Nothing is silent for long: work that says nothing is spoken for."""

import time

import pytest

from tests.helpers import wait_for
from utils.record.writer import Writer
from utils.runtime import console, heartbeat
from utils.runtime.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.1)
    console.note_line()


def test_a_silence_is_broken_again_and_again_until_the_work_ends():
    lines = []
    with Heartbeat(lambda: f"line {len(lines) + 1}", lines.append):
        wait_for(lambda: len(lines) == 2)
    after = len(lines)
    time.sleep(0.15)
    assert lines[:2] == ["line 1", "line 2"] and len(lines) == after


def test_work_that_speaks_itself_is_not_spoken_for(monkeypatch):
    lines = []
    monkeypatch.setattr(console, "silence", lambda: 0.05)
    with Heartbeat(lambda: "line", lines.append):
        time.sleep(0.3)
    assert lines == []


def test_short_work_after_a_slow_start_is_not_named(monkeypatch):
    lines = []
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 30)
    monkeypatch.setattr(console, "silence", lambda: 60)
    with Heartbeat(lambda: "Finding the run: 0 s so far", lines.append):
        time.sleep(0.1)
    assert lines == []
    monkeypatch.setattr(heartbeat, "SHORT_SECONDS", 0.05)
    with Heartbeat(lambda: "Finding the run: 1 s so far", lines.append):
        wait_for(lambda: lines)


def test_a_full_disk_ends_nothing_and_is_met_by_the_work_itself():
    tries = []

    def full(line):
        tries.append(line)
        raise OSError("no space left")

    with Heartbeat(lambda: "line", full):
        wait_for(lambda: len(tries) == 2)


def test_a_bar_that_is_not_shown_counts_and_tells_how_far_it_is_and_how_long_the_rest_takes(capsys):
    with Writer(None, progress=False).bar(4, 1, "Validation", "batch") as bar:
        wait_for(lambda: "Validation  batch 1/4\n" in capsys.readouterr().out)
        bar.update()
        bar.update(False)  # a round in which this process had no batch
        wait_for(lambda: "Validation  batch 2/4  left 00:0" in capsys.readouterr().out)


def test_the_words_of_the_one_who_asks_for_a_bar_take_the_place_of_its_own(capsys):
    with Writer(None, progress=False).bar(4, 0, "Epoch", "step", lambda: "own words"):
        wait_for(lambda: "own words\n" in capsys.readouterr().out)
