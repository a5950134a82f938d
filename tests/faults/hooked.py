"""Training processes with a fault planted, forked from a server that has imported torch once: 0.5 s a start, not 4."""

import multiprocessing
import os
import sys

import pytest

SECONDS = 120
IMPORTED = [
    "main", "scripts.hooked_main", "scripts.verification.hooks", "utils.record.writer", "models",
    "torch.utils.tensorboard", "torch._dynamo", "sklearn.datasets",
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    """The server. It is started before a test begins, for it outlives the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def train(server, log, fault, *flags):
    """Train on the CPU with ``fault`` planted; gives the exit code, minus the signal's number if one killed it.

    ``log`` is the file for what it prints.
    """
    process = server.Process(target=_train, args=(str(log), fault, ["--device", "cpu", *map(str, flags)]))
    process.start()
    process.join(SECONDS)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert not hangs, log.read_text()
    return process.exitcode


def _train(log, fault, flags):
    from scripts import hooked_main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["HOOK_FAULT"] = fault
    sys.exit(hooked_main.main(flags))
