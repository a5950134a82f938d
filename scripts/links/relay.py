"""A slow link between two network namespaces, for a kernel without netem: a process that carries each packet.

    python scripts/links/relay.py SPACE SPACE MBIT DELAY_MS

Each namespace gets a device ``DEVICE`` (Linux's tun: what is sent through it, this process reads). A packet leaves when
those before it have left, at the rate of the link, and arrives after the delay. Prints a line when the devices are
there; ends with its standard input. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.links.namespaces import enter

DEVICE = "slow0"
PACKET_BYTES = 65_000  # nearly the most that a device takes: each costs this process the same, however small
TICK = 0.0002  # seconds: an arrival is as punctual as that
_SET_INTERFACE = 0x400454CA  # TUNSETIFF of linux/if_tun.h
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI


class Direction:
    """Packets on their way from the device ``source`` to the device ``target``, both file descriptors."""

    def __init__(self, source: int, target: int, mbit: float, delay_ms: float) -> None:
        self.source, self.target = source, target
        self.byte_seconds, self.delay = 8e-6 / mbit, delay_ms / 1000
        self.free_at = 0.0
        self.waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read what the source has sent."""
        for packet in iter(lambda: _read(self.source), None):
            self.free_at = max(self.free_at, time.monotonic()) + len(packet) * self.byte_seconds
            self.waiting.append((self.free_at + self.delay, packet))

    def deliver(self) -> bool:
        """Write what has arrived, to the nearest tick; gives whether more is on its way."""
        arrived = time.monotonic() + TICK / 2
        while self.waiting and self.waiting[0][0] <= arrived:
            with suppress(OSError):  # the device is not up yet: the packet is lost
                os.write(self.target, self.waiting.popleft()[1])
        return bool(self.waiting)


def main(spaces: list[str], mbit: float, delay_ms: float) -> None:
    """Carry packets until the standard input ends."""
    first, second = (_device(space) for space in spaces)
    with suppress(PermissionError):  # trainings take all cores, and a link waits for none
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    directions = [Direction(first, second, mbit, delay_ms), Direction(second, first, mbit, delay_ms)]
    standard_input = sys.stdin.fileno()
    ends = [first, second, standard_input]
    print("ready", flush=True)
    while True:
        for direction in directions:
            direction.take()
        more = [direction.deliver() for direction in directions]
        if any(more):
            time.sleep(TICK)
        elif standard_input in select.select(ends, [], [])[0]:
            return


def _device(space: str) -> int:
    """Make the device in ``space``; gives its file descriptor. It goes when that is closed."""
    enter(space)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    return device


def _read(device: int) -> bytes | None:
    try:
        return os.read(device, PACKET_BYTES)
    except BlockingIOError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]))
