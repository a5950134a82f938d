"""Search for garbage: not while the program starts, and later not among the modules that were imported.

Imports make a million objects, which Python goes through again and again as they become more: a third of the start.
"""

from __future__ import annotations

import atexit
import gc


class GarbageCollection:
    """Python's, of this process."""

    def __init__(self) -> None:
        self._was_put_off = False  # gc.get_freeze_count() cannot tell: Python 3.12 begins with some objects left out

    def put_off(self) -> None:
        """Look for no garbage until ``freeze_imports``. For a process that is this program's alone."""
        self._was_put_off = True
        gc.disable()
        # A teardown, after a traceback, must free what was left out: extension modules report leaks on stderr.
        atexit.register(gc.unfreeze)

    def freeze_imports(self) -> None:
        """Look for garbage among what is made from now on; what exists, apart from garbage, is left out for good.

        To be called as often as much has been imported. Does nothing where ``put_off`` was not called.
        """
        if not self._was_put_off:
            return
        if gc.isenabled():
            gc.collect()
        gc.freeze()
        gc.enable()


garbage_collection = GarbageCollection()
