"""Garbage is looked for as usual after the start, and as always in a process that is not the program's alone."""

import gc
import weakref

import pytest

from utils.runtime.garbage import GarbageCollection


class Node:
    """Refers to itself, so that the collector alone can free it."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_before():
    """What tests/conftest.py has frozen stays so: to look through it takes seconds, here and in every later test."""
    gc.collect()
    yield
    gc.enable()


def lost():
    """A weak reference to garbage."""
    return weakref.ref(Node())


def looked_at(objects):
    """How many of the objects the collector examines. Counts of all objects change as other tests' are freed."""
    return len({*map(id, objects)} & {*map(id, gc.get_objects())})


def test_garbage_of_the_start_and_after_it_is_freed_and_the_rest_is_never_looked_at_again():
    garbage = GarbageCollection()
    garbage.put_off()
    assert not gc.isenabled()
    garbage.freeze_imports()
    assert gc.isenabled()
    of_the_start = lost()
    assert gc.get_freeze_count() > 10_000
    kept = [Node() for _ in range(100)]
    assert looked_at(kept) == 100
    garbage.freeze_imports()
    assert of_the_start() is None
    assert looked_at(kept) == 0
    later = lost()
    gc.collect()
    assert later() is None


def test_nothing_changes_in_a_process_where_it_was_not_put_off():
    kept = [Node()]
    GarbageCollection().freeze_imports()
    assert gc.isenabled() and looked_at(kept) == 1
