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
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from scripts.links import relay
from scripts.links.namespaces import enter
from utils.config.settings import UserError

T = TypeVar("T")
DEVICE, ADDRESSES = "eth0", ("10.78.0.1", "10.78.0.2")
PROBE_PORT, PROBE_ROUND_TRIPS = 29555, 21
PROBE_BYTES, PROBE_SECONDS = 32 * 2**20, 10  # of a probe, at most: a slow link gets fewer bytes
SLOWEST_PROBE = 60  # seconds more than a probe should take
RELAY = Path(__file__).resolve().parent / "relay.py"
RELAY_SECONDS = 60  # to begin, or to end


class Measured(NamedTuple):
    """What a link does: ``mbit`` a second in one direction, ``ms`` for a byte to go and come back."""

    mbit: float
    ms: float


class Limits(NamedTuple):
    """What a link is limited to, each way."""

    mbit: float
    delay_ms: float

    def seconds(self, sent: float, messages: int = 0) -> float:
        """How long so many bytes take, and so many messages one after the other."""
        return 8e-6 * sent / self.mbit + messages * self.delay_ms / 1000


class Network:
    """As a context manager: two namespaces, ``spaces``, joined by a link. Raises ``UserError`` if there can be none."""

    def __init__(self) -> None:
        self.spaces = [f"link-{os.getpid()}-{number}" for number in (1, 2)]
        self.relay: subprocess.Popen[str] | None = None
        self.limits: Limits | None = None

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
        self.limits = Limits(mbit, delay_ms)
        return f"{mbit:g} Mbit/s and {delay_ms:g} ms each way, by {means}"

    def free(self) -> None:
        """Lift the limits."""
        self.limits = None
        if self.relay is not None:
            with suppress(subprocess.TimeoutExpired):  # packets are still on their way
                self.relay.communicate(timeout=RELAY_SECONDS)
            self.relay.kill()  # its devices go with it, and the routes through them
            self.relay.communicate()
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
        """Send some bytes from one namespace to the other, and single ones to and fro. Raises ``UserError``."""
        amount, longest = self._probe()
        try:
            server = self._inside(0, lambda: _listen(longest)).result(longest)
            answering = self._inside(0, lambda: _answer(server, amount, longest))
            measured = self._inside(1, lambda: _ask(amount, longest)).result(longest)
            answering.result(longest)
        except (OSError, futures.TimeoutError) as error:
            reason = str(error) or "that took too long"
            raise UserError(
                f"the link between the namespaces did not carry {amount:,} bytes within {longest:.0f} s: {reason}"
            ) from error
        return measured

    def _probe(self) -> tuple[int, float]:
        """How many bytes to send, and the seconds after which measuring is given up."""
        if self.limits is None:
            return PROBE_BYTES, SLOWEST_PROBE
        amount = round(min(PROBE_BYTES, PROBE_BYTES * PROBE_SECONDS / self.limits.seconds(PROBE_BYTES)))
        # Twice: packets have headers, and TCP begins slowly.
        return amount, SLOWEST_PROBE + 2 * self.limits.seconds(amount, 2 * PROBE_ROUND_TRIPS)

    def _inside(self, number: int, function: Callable[[], T]) -> futures.Future[T]:
        """Call ``function`` in a thread of its own, which stays in a namespace."""
        future: futures.Future[T] = futures.Future()

        def inside() -> None:
            try:
                enter(self.spaces[number])
                future.set_result(function())
            except OSError as error:
                future.set_exception(error)

        threading.Thread(target=inside, daemon=True).start()
        return future


def refuse_without_means() -> None:
    """Raise ``UserError`` unless this is Linux, with root's rights and the programs ip and tc."""
    if not hasattr(os, "geteuid") or not os.path.isdir("/proc/self/ns"):
        raise UserError("network namespaces need Linux")
    if os.geteuid() != 0:
        raise UserError("network namespaces need root: start it again with sudo")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise UserError(f"there is no program {' or '.join(missing)} here: apt-get install iproute2")


def _listen(longest: float) -> socket.socket:
    server = socket.create_server((ADDRESSES[0], PROBE_PORT))
    server.settimeout(longest)
    return server


def _answer(server: socket.socket, amount: int, longest: float) -> None:
    with server:
        connection, _ = server.accept()
        connection.settimeout(longest)
        with connection:
            for _ in range(PROBE_ROUND_TRIPS):
                connection.sendall(_received(connection, 1))
            while amount:
                amount -= len(_received(connection, min(amount, 2**20)))
            connection.sendall(b"!")


def _received(connection: socket.socket, most: int) -> bytes:
    """What has come, up to ``most`` bytes. Raises ``OSError`` if nothing more will."""
    if not (data := connection.recv(most)):
        raise ConnectionError("the other end has closed the connection")
    return data


def _ask(amount: int, longest: float) -> Measured:
    trips = []
    with socket.create_connection((ADDRESSES[0], PROBE_PORT), longest) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PROBE_ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b"?")
            _received(connection, 1)
            trips.append(time.perf_counter() - began)
        began = time.perf_counter()
        connection.sendall(bytes(amount))
        _received(connection, 1)
        seconds = time.perf_counter() - began
    return Measured(8e-6 * amount / seconds, 1000 * statistics.median(trips))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
