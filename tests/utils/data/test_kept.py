"""One process makes a file, the others wait; one that is killed at it is in nobody's way, and no file is half made."""

import errno
import os
import signal
import time
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from utils.data.kept import WITHOUT_LOCKS, claimed, remove_abandoned, whole_file, write_whole

SECONDS = 20  # of patience, on busy cores


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def forked(work):
    """A process that does ``work(tell)``; gives its number, and what it tells."""
    ears, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ears)
            work(lambda word: os.write(mouth, f"{word}\n".encode()))
        finally:
            os._exit(0)
    os.close(mouth)
    with os.fdopen(ears) as told:
        try:
            yield child, told
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def make_slowly(path, tell, seconds=SECONDS):
    with claimed(path), whole_file(path) as file:
        file.write(b"half")
        file.flush()
        tell("at work")
        time.sleep(seconds)
        file.write(b" and half")


def test_who_comes_second_waits_says_so_and_finds_what_the_first_has_made(tmp_path):
    path = tmp_path / "thing.npy"
    said = []
    with forked(lambda tell: make_slowly(path, tell, 0.5)) as (_, told):
        told.readline()
        assert not path.exists()
        with claimed(path, "waiting", said.append):
            assert path.read_bytes() == b"half and half"
    assert said == ["waiting"] and names(tmp_path) == ["thing.npy"]


def test_who_waits_for_one_that_fails_comes_next(tmp_path):
    def fail(tell):
        with claimed(tmp_path / "thing"):
            tell("at work")
            time.sleep(0.3)
            raise ValueError

    with forked(fail) as (_, told):
        told.readline()
        with claimed(tmp_path / "thing"):
            assert names(tmp_path) == ["thing.lock"]
    assert names(tmp_path) == []


def test_the_claim_of_a_killed_process_ends_although_its_workers_live_a_little_longer(tmp_path):
    path = tmp_path / "files.ab.list"

    def work_with_a_worker(tell):
        with claimed(path), whole_file(path):
            if os.fork() == 0:
                time.sleep(1)
                os._exit(0)
            tell("at work")
            time.sleep(SECONDS)

    with forked(work_with_a_worker) as (child, told):
        told.readline()
        os.kill(child, signal.SIGKILL)
        began = time.monotonic()
        with claimed(path):
            assert time.monotonic() - began < SECONDS / 2 and not path.exists()
    remove_abandoned(tmp_path)
    assert names(tmp_path) == []


def test_only_what_nobody_writes_any_more_is_removed(tmp_path):
    strange = [f".hidden.{'0a' * 16}.partial", "another_programs.partial", "kept.npy"]
    for name in (f"left.{'0a' * 16}.partial", *strange):
        (tmp_path / name).write_bytes(b"x")
    with forked(lambda tell: make_slowly(tmp_path / "living.npy", tell)) as (_, told):
        told.readline()
        remove_abandoned(tmp_path)
        left = names(tmp_path)
    assert left[:3] == strange and left[3].startswith("living.") and len(left) == 5


@pytest.mark.parametrize("place", ["posix_fallocate", "fsync", "replace"])
def test_on_a_full_disk_the_older_file_stays_and_nothing_else(tmp_path, monkeypatch, place):
    write_whole(tmp_path / "thing", b"older")

    monkeypatch.setattr(os, place, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), raising=False)
    with pytest.raises(OSError, match="No space left"), whole_file(tmp_path / "thing", reserved=9) as file:
        file.write(b"newer")
    assert names(tmp_path) == ["thing"] and (tmp_path / "thing").read_bytes() == b"older"


@pytest.mark.parametrize("reserves", [True, False])
def test_a_file_is_as_long_as_what_was_written_whatever_was_reserved(tmp_path, monkeypatch, reserves):
    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.EOPNOTSUPP, "not supported")))
    with whole_file(tmp_path / "thing", reserved=1000) as file:
        file.write(b"short")
    assert (tmp_path / "thing").read_bytes() == b"short"


@pytest.mark.parametrize("code", WITHOUT_LOCKS)  # of ENOSYS, as on Lustre, filelock makes markers that stay
def test_where_a_file_system_has_no_locks_nobody_waits_and_nothing_is_removed(tmp_path, monkeypatch, code, recwarn):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(code, os.strerror(code))))
    left = f"left.{'0a' * 16}.partial"
    (tmp_path / left).write_bytes(b"x")
    remove_abandoned(tmp_path)
    (tmp_path / "thing.lock").write_text("1\nanother-host\n")  # of a process that was killed
    with claimed(tmp_path / "thing"), claimed(tmp_path / "thing"):
        write_whole(tmp_path / "thing", b"made")
    assert not recwarn.list and names(tmp_path) == [left, "thing", "thing.lock"]


def test_what_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError), claimed(tmp_path / "file" / "thing"):
        pytest.fail("claimed a place that is none")
