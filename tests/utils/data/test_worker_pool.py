"""Worker processes end when nothing needs them any more. What happens when one dies: ``test_13_dead_workers.py``."""

import gc
import multiprocessing
import os
import re
import sys
from multiprocessing import util
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from tests.end_to_end.forked import answer_of
from utils.config.settings import UserError
from utils.data.worker_pool import WorkerPool
from utils.runtime import cpu


class Keys(Dataset):
    """Gives a key back; each process that has read one leaves a file in ``folder`` unless it is ended by force."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, key):
        util.Finalize(None, (self.folder / str(os.getpid())).touch, exitpriority=1)
        return key


@pytest.mark.parametrize(
    ("keep", "to_its_end"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.thorough),
        pytest.param(True, False, marks=pytest.mark.thorough),
    ],
)
def test_workers_are_not_ended_by_force_when_their_pool_is_garbage_in_a_cycle(tmp_path, keep, to_its_end):
    pool = WorkerPool(Keys(tmp_path), 2, keep=keep)
    walk = pool.read(range(20))
    read = list(walk) if to_its_end else [next(walk) for _ in range(4)]
    assert read == [*range(len(read))]
    cycle = [pool, walk]
    cycle.append(cycle)
    del pool, walk, cycle
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 2


class OwnBytes(Dataset):
    """The memory of the process that reads, without what it shares with others."""

    def __getitem__(self, _):
        (kilobytes,) = re.findall(r"Private_Dirty: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
        return int(kilobytes) * 1024


STEP_BYTES = 400_000_000


def bytes_of_a_worker(answer):
    gc.disable()  # it writes on every object
    cpu.keep_freed_memory()

    def step():
        for tensor in [torch.empty(STEP_BYTES // 40) for _ in range(10)]:
            tensor.fill_(1)

    step()
    walk = WorkerPool(OwnBytes(), 1).read(range(10))
    next(walk)
    step()
    answer.put([*walk][-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked on Linux")
def test_a_worker_does_not_keep_the_memory_of_a_step_that_was_free_when_it_began():
    assert answer_of(bytes_of_a_worker) < STEP_BYTES / 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked on Linux")
def test_workers_are_forked_also_where_python_would_send_them_the_data_set():
    class Squares(Dataset):  # cannot be sent, like what a --plugin file holds
        def __getitem__(self, key):
            return key**2

    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # the default of Python 3.14
    try:
        assert [*WorkerPool(Squares(), 2).read(range(5))] == [0, 1, 4, 9, 16]
    finally:
        multiprocessing.set_start_method(before, force=True)


class Ending:
    """A worker that has closed its pipes, and whose exit code the system knows a moment later."""

    pid = 5
    exitcode = None

    def __init__(self):
        self.sentinel, writing = os.pipe()
        os.close(writing)

    def join(self, timeout):
        os.close(self.sentinel)
        self.exitcode = 0


def test_the_end_of_a_worker_is_told_even_if_its_exit_code_is_known_a_moment_later(tmp_path):
    pool = WorkerPool(Keys(tmp_path), 1)
    pool._processes = [Ending()]
    with pytest.raises(UserError, match="process 5, which reads images, ended with exit code 0"):
        pool._await(multiprocessing.Pipe()[0].recv)
