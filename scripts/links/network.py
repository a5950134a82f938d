"""Two machines on this one: network namespaces joined by a link of chosen rate and delay (Linux, root)."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from scripts.links import relay
from scripts.links.namespaces import enter
from utils.config.settings import UserError

T = TypeVar("T")
DEVICE, ADDRESSES = "eth0", ("10.78.0.1", "10.78.0.2")
PROBE_PORT, PROBE_BYTES, PROBE_ROUND_TRIPS = 29555, 32 * 2**20, 21
PROBE_SECONDS = 60
RELAY = Path(__file__).resolve().parent / "relay.py"
RELAY_SECONDS = 60  # to begin, or to end


class Measured(NamedTuple):
    """What a link does: ``mbit`` a second in one direction, ``ms`` for a byte to go and come back."""

    mbit: float
    ms: float


class Network:
    """As a context manager: two namespaces, ``spaces``, joined by a link. Raises ``UserError`` if there can be none."""

    def __init__(self) -> None:
        self.spaces = [f"link-{os.getpid()}-{number}" for number in (1, 2)]
        self.relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        refuse_without_means()
        try:
            for space in self.spaces:
                _run("ip", "netns", "add", space)
            peer = ("peer", "name", DEVICE, "netns", self.spaces[1])
            _run("ip", "link", "add", DEVICE, "netns", self.spaces[0], "type", "veth", *peer)
            for space, address in zip(self.spaces, ADDRESSES, strict=True):
                _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _run("ip", "-n", space, "link", "set", device, "up")
        except OSError as error:
            self.__exit__()
            raise UserError(f"network namespaces cannot be made here: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
        for space in self.spaces:
            with suppress(OSError):
                _run("ip", "netns", "delete", space)

    def throttle(self, mbit: float, delay_ms: float) -> str:
        """Limit the link, in each direction, and delay each packet; gives what was done in words.

        Where the kernel has no netem, a process carries the packets (``relay.py``).
        """
        self.free()
        try:
            self._queue("add", "netem", "rate", f"{mbit:g}mbit", "delay", f"{delay_ms:g}ms", "limit", "100000")
            means = "tc netem"
        except OSError:
            self.free()
            self._carry(mbit, delay_ms)
            means = "a process that carries the packets, for this kernel has no netem"
        return f"{mbit:g} Mbit/s and {delay_ms:g} ms each way, by {means}"

    def free(self) -> None:
        """Lift the limits."""
        if self.relay is not None:
            self.relay.communicate(timeout=RELAY_SECONDS)  # its devices go with it, and the routes through them
            self.relay = None
        with suppress(OSError):  # there are none
            self._queue("delete")

    def _carry(self, mbit: float, delay_ms: float) -> None:
        line = [sys.executable, str(RELAY), *self.spaces, str(mbit), str(delay_ms)]
        process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            if process.stdout.readline() != "ready\n":
                raise OSError((process.communicate()[1].splitlines() or ["no reason given"])[-1])
            self.relay = process
            for space, peer in zip(self.spaces, reversed(ADDRESSES), strict=True):
                _run("ip", "-n", space, "link", "set", relay.DEVICE, "mtu", str(relay.PACKET_BYTES), "up")
                _run("ip", "-n", space, "route", "add", f"{peer}/32", "dev", relay.DEVICE)
        except OSError as error:
            raise UserError(
                f"the link cannot be limited: the kernel has no netem, and no tun either ({error})"
            ) from error

    def _queue(self, verb: str, *words: str) -> None:
        for space in self.spaces:
            _run("tc", "-n", space, "qdisc", verb, "dev", DEVICE, "root", *words)

    def measure(self) -> Measured:
        """Send some bytes from one namespace to the other, and single ones to and fro."""
        listening = threading.Event()
        answering = threading.Thread(target=self._inside, args=(0, lambda: _answer(listening)), daemon=True)
        answering.start()
        listening.wait(PROBE_SECONDS)
        measured = self._inside(1, _ask)
        answering.join(PROBE_SECONDS)
        return measured

    def _inside(self, number: int, function: Callable[[], T]) -> T:
        """Call ``function`` in a thread of its own, which stays in a namespace; gives its result."""
        results: list[Any] = []

        def inside() -> None:
            enter(self.spaces[number])
            results.append(function())

        thread = threading.Thread(target=inside, daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS)
        if not results:
            raise UserError("the link between the network namespaces carries nothing")
        return results[0]


def refuse_without_means() -> None:
    """Raise ``UserError`` unless this is Linux, with root's rights and the programs ip and tc."""
    if not hasattr(os, "geteuid") or not os.path.isdir("/proc/self/ns"):
        raise UserError("network namespaces need Linux")
    if os.geteuid() != 0:
        raise UserError("network namespaces need root: start it again with sudo")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise UserError(f"there is no program {' or '.join(missing)} here: apt-get install iproute2")


def _answer(listening: threading.Event) -> None:
    with socket.create_server((ADDRESSES[0], PROBE_PORT)) as server:
        server.settimeout(PROBE_SECONDS)
        listening.set()
        connection, _ = server.accept()
        with connection:
            for _ in range(PROBE_ROUND_TRIPS):
                connection.sendall(connection.recv(1))
            left = PROBE_BYTES
            while left:
                left -= len(connection.recv(min(left, 2**20)))
            connection.sendall(b"!")


def _ask() -> Measured:
    trips = []
    with socket.create_connection((ADDRESSES[0], PROBE_PORT), PROBE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PROBE_ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - began)
        began = time.perf_counter()
        connection.sendall(bytes(PROBE_BYTES))
        connection.recv(1)
        seconds = time.perf_counter() - began
    return Measured(8e-6 * PROBE_BYTES / seconds, 1000 * statistics.median(trips))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
