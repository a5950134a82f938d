"""Pretrained weights come from other machines: whether these can be reached is found out first, and in seconds.

huggingface_hub tries each of several file names six times, with pauses in between, and warns of each attempt; urllib
waits for minutes for a machine that does not answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

ADDRESS_SECONDS = 4.0  # for one of the host's addresses to answer: a satellite takes one
REACH_SECONDS = 10.0  # for the name server and all addresses together


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Around what fetches from ``url``: without a connection, the libraries look into their caches or fail at once.

    ``OSError`` then says which host cannot be reached, and why. A connection that stands is given all the time that it
    needs. ``HF_HUB_VERBOSITY``, ``HF_DEBUG`` and ``HF_ENDPOINT`` keep their effect. Where a proxy connects for us,
    nothing is found out.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import logging

    why_not = unreachable(url)
    level = logging.get_verbosity()
    offline = constants.HF_HUB_OFFLINE
    limit = socket.getdefaulttimeout()
    if level == logging.WARNING:  # ``build_model`` reports the outcome once
        logging.set_verbosity_error()
    if why_not:
        constants.HF_HUB_OFFLINE = True
        socket.setdefaulttimeout(1.0)  # of urllib, which has none
    try:
        yield
    except OSError as error:
        if not why_not:
            raise
        raise OSError(why_not) from error
    finally:
        socket.setdefaulttimeout(limit)
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(level)


def unreachable(url: str) -> str:
    """Reason for which the host of ``url`` cannot be connected to; '' if it can, or if a proxy does so for us."""
    parts = urlsplit(url)
    host = parts.hostname
    port = parts.port or {"http": 80}.get(parts.scheme, 443)
    if not host or (getproxies().keys() & {parts.scheme, "all"} and not proxy_bypass(host)):
        return ""
    outcome = [f"no answer within {REACH_SECONDS:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), ADDRESS_SECONDS).close()
            outcome[0] = ""
        except OSError as error:
            outcome[0] = error.strerror or str(error)

    # No time-out limits the name server, so a thread waits for it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)
    return f"{host} cannot be reached: {outcome[0]}" if outcome[0] else ""
