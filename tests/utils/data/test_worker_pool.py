"""Worker processes end when nothing needs them any more. What happens when one dies: ``test_13_dead_workers.py``."""

import gc
import os
from multiprocessing import util

import pytest
from torch.utils.data import Dataset

from utils.data.worker_pool import WorkerPool


class Keys(Dataset):
    """Gives a key back; each process that has read one leaves a file in ``folder`` unless it is ended by force."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, key):
        util.Finalize(None, (self.folder / str(os.getpid())).touch, exitpriority=1)
        return key


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("to_its_end", [False, True])
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
