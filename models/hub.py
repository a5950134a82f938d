"""Pretrained weights come from hubs, whose libraries warn of each failed attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines_of_retries() -> Iterator[None]:
    """Inside, huggingface_hub does not warn of each attempt: ``build_model`` reports the outcome once.

    ``HF_HUB_VERBOSITY`` and ``HF_DEBUG`` keep their effect.
    """
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    if level == logging.WARNING:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
