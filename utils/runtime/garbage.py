"""Search for garbage: not while the program starts, and later not among the modules that were imported.

Imports make a million objects, which Python examines again and again as they grow in number: a third of start-up time.
"""

from __future__ import annotations

import atexit
import gc


class GarbageCollection:
    """Control of Python's garbage collector in this process."""

    def __init__(self) -> None:
        self._was_put_off = False  # gc.get_freeze_count() cannot tell: Python 3.12 begins with some objects left out

    def put_off(self) -> None:
        """Search for no garbage until ``freeze_imports``. Only for a process that runs nothing but this program."""
        self._was_put_off = True
        gc.disable()
        # A teardown, after a traceback, must free what was left out: extension modules report leaks on stderr.
        atexit.register(gc.unfreeze)

    def freeze_imports(self) -> None:
        """Search for garbage only among objects made from now on; existing ones that are in use are left out for good.

        Call this again whenever much has been imported. Does nothing unless ``put_off`` was called.
        """
        if not self._was_put_off:
            return
        if gc.isenabled():
            gc.collect()
        gc.freeze()
        gc.enable()


garbage_collection = GarbageCollection()
