"""The reason of an error in a message."""

import errno
import os

import pytest

from utils.config.spelling import LONGEST, reason_of

MISSING = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "data/x.png")
REASONS = {
    "of the system": (MISSING, {}, "No such file or directory"),
    "with the file": (MISSING, {"with_file": True}, "[Errno 2] No such file or directory: 'data/x.png'"),
    "two arguments that are no texts of the system": (
        OSError("Aborted", ValueError("reset\nby peer")),
        {},
        "reset by peer",
    ),
    "several lines": (ValueError("one\n  two"), {}, "one two"),
    "long": (ValueError("x" * 999), {}, "x" * LONGEST),
    "none": (KeyError(), {}, "KeyError"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_the_reason_of_an_error_is_text_on_one_line(kind):
    error, flags, line = REASONS[kind]
    assert reason_of(error, **flags) == line
