"""The program in processes forked from a server that has imported what takes seconds to import: 0.5 s a start, not 7."""

import functools
import itertools
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 300
IMPORTED = [
    "main",
    "tests.faults.faulty_main",
    "tests.faults.points",
    "utils.train_validation",
    "utils.record.writer",
    "models",
    "timm",
    "torch.utils.tensorboard",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
]


@functools.cache
def server():
    """The server; it outlives the test that asks for it first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def server_pid():
    """The server's process id, None before it is started."""
    return forkserver._forkserver._forkserver_pid


class Forked:
    """A run on the CPU, with the methods of subprocess.Popen that tests use.

    Of several ``processes`` nobody ends the others when one fails, as torchrun would; the return code is the lowest
    that is not 0. ``environment`` is added to this process's.
    """

    def __init__(self, *flags, processes=1, program="main.py", **environment):
        self._files = [tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()]  # noqa: SIM115 - go with this
        names = [file.name for file in self._files]
        line = [str(ROOT / program), "--device", "cpu", *map(str, flags)]
        self.ranks = [
            server().Process(target=_run, args=(names, os.getcwd(), {**os.environ, **rank, **environment}, line))
            for rank in _ranks(processes)
        ]
        for rank in self.ranks:
            rank.start()

    @property
    def returncode(self):
        """None while one of the processes runs; minus the signal's number for one that was killed."""
        codes = [rank.exitcode for rank in self.ranks]
        return None if None in codes else min(filter(None, codes), default=0)

    def poll(self):
        return self.returncode

    def kill(self):
        for rank in self.ranks:
            rank.kill()

    def communicate(self, timeout=SECONDS):
        """What all processes have printed on stdout and on stderr, when they have ended."""
        deadline = time.monotonic() + timeout
        for rank in self.ranks:
            rank.join(max(0, deadline - time.monotonic()))
        hangs = self.returncode is None
        self.kill()
        texts = [Path(file.name).read_text() for file in self._files]
        assert not hangs, texts
        return texts


def train_with(fault, *flags, processes=1):
    """Train with ``fault`` planted, see tests/faults/planted.py; gives the exit code."""
    process = Forked(*flags, processes=processes, program="tests/faults/faulty_main.py", HOOK_FAULT=fault)
    process.communicate()
    return process.returncode


@functools.cache
def _ports():
    """Ports below those that the system gives to clients: none of them may take one before a run listens on it.

    They begin somewhere else in each process of the tests.
    """
    return itertools.cycle(range(10000 + 37 * os.getpid() % 20000, 32000))


def free_port():
    """A port that nobody listens on, and that this process has not given before."""
    for port in _ports():
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _ranks(processes):
    """What torchrun puts into the environment of each of several processes."""
    if processes == 1:
        return [{}]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, **meeting}
    return [
        {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(processes)
    ]


def _run(files, folder, environment, line):
    for number, name in enumerate(files, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    multiprocessing.set_start_method(None, force=True)  # else its own children would come from a server too
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = line
    sys.path[0] = str(Path(line[0]).parent)
    runpy.run_path(line[0], run_name="__main__")
