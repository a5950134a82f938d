"""Fetching pretrained weights, and networks of the Hugging Face Hub, from other machines.

Whether a machine can be reached is found out first, and in seconds: huggingface_hub tries each of several file names
six times, with pauses in between, and warns of each attempt; urllib waits for minutes for a machine that does not
answer.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from utils.config import hub_networks
from utils.config.settings import UserError
from utils.config.spelling import reason_of

ADDRESS_SECONDS = 4.0  # for one of the host's addresses to answer: a satellite takes one
REACH_SECONDS = 10.0  # for the name server and all addresses together


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Context for fetching from ``url``: without a connection, the libraries look into their caches or fail at once.

    An ``OSError`` then says which host cannot be reached, and why. With a connection, fetching may take as long as it
    needs. ``HF_HUB_VERBOSITY``, ``HF_DEBUG`` and ``HF_ENDPOINT`` keep their effect. If a proxy connects for us, the
    connection is not checked.
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
        socket.setdefaulttimeout(1.0)  # for urllib, which sets none
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
    """The reason why the host of ``url`` cannot be reached; '' if it can, or if a proxy connects for us."""
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
            outcome[0] = reason_of(error)

    # No time-out limits the name server, so a thread waits for it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)
    return f"{host} cannot be reached: {outcome[0]}" if outcome[0] else ""


def timm_name(arch: str) -> str:
    """The name, with a tag of its own, by which timm knows the network of 'hf_hub:ORG/NAME' from now on.

    Its revision is fixed when it is first asked for, unless a checkpoint knows it. Raises ``UserError`` if a needed
    file is not in the Hub's cache and cannot be fetched, or if timm cannot read the repository.
    """
    facts = hub_networks.known(arch) or _facts(arch)
    hub_networks.remember({arch: facts})
    from timm.models import PretrainedCfg, is_model
    from timm.models._registry import _model_pretrained_cfgs  # where get_pretrained_cfg and create_model look

    architecture = facts["architecture"]
    tag = re.sub(r"\W", "_", f"{facts['repository']}@{facts['revision'][:12]}")  # a path is none of timm's names
    if not is_model(architecture):
        raise UserError(f"--arch {arch}: is a {architecture}, which this version of timm does not have; update timm")
    config = {**facts["config"], "architecture": architecture, "tag": tag}
    _model_pretrained_cfgs[f"{architecture}.{tag}"] = PretrainedCfg(**config)
    return f"{architecture}.{tag}"


def _facts(arch: str) -> dict[str, Any]:
    """Architecture, arguments and timm's config of a repository, and their revision. Raises ``UserError``."""
    from huggingface_hub import constants, hf_hub_download
    from timm.models import load_model_config_from_hf

    repository, _, revision = arch.partition(":")[2].partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UserError(f"--arch {arch}: write hf_hub:ORG/NAME, or hf_hub:ORG/NAME@REVISION")
    try:
        with reaching(constants.ENDPOINT):
            path = hf_hub_download(repository, "config.json", revision=revision or None)
            settled = Path(path).parent.name  # a copy is kept by its commit
            config, architecture, arguments = load_model_config_from_hf(f"{repository}@{settled}")
    except OSError as error:  # also what huggingface_hub raises
        advice = "check the name, or fetch it once with a connection: the hub's cache is enough then"
        reason = reason_of(error, with_file=True)
        raise UserError(f"--arch {arch}: cannot be fetched from the Hugging Face Hub ({reason}); {advice}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--arch {arch}: its config.json is none of timm's; choose a network that timm has") from error
    return {
        "repository": repository,
        "revision": settled,
        "architecture": architecture,
        "arguments": dict(arguments or {}),
        "config": config,
    }
