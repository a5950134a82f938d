"""Pretrained weights come from hubs, whose libraries have lines of their own for each attempt that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines_of_retries() -> Iterator[None]:
    """Within it, huggingface_hub does not warn of each attempt: ``build_model`` says once what came of them.

    Who has asked it for more by ``HF_HUB_VERBOSITY`` or ``HF_DEBUG`` gets that.
    """
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    if level == logging.WARNING:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
