"""What limits a training on many GPUs: arithmetic on a few figures of a machine, a network and a data set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

DECODE = "decode"
DISK = "disk"
STEP = "step"
NETWORK = "network"


@dataclass(frozen=True)
class Machines:
    """What a machine has. ``overlap``: the share of a step during which gradients travel unnoticed."""

    gpus: int
    cores_per_gpu: float
    training_cores: float
    disk_mb_s: float
    network_gbit: float
    latency_us: float
    overlap: float
    dollars_per_gpu_hour: float


@dataclass(frozen=True)
class Images:
    """``count`` images an epoch of ``kb`` thousand bytes, of which a core decodes ``rate`` a second."""

    count: int
    kb: float
    rate: float


@dataclass(frozen=True)
class Workload:
    """A network: one GPU's ``rate`` in images a second, weights in millions, and the bytes of each gradient sent."""

    rate: float
    million_weights: float
    gradient_bytes: float
    batch_size: int
    largest_batch: int


class Estimate(NamedTuple):
    """``rate``: images a second and GPU. ``cores``: that a GPU needs in order not to wait for decoding."""

    limit: str
    rate: float
    cores: int
    batch_size: int
    epoch_seconds: float
    dollars: float


def estimate(machines: Machines, images: Images, work: Workload, gpus: int) -> Estimate:
    """What ``gpus`` GPUs reach, and what limits them: the slowest of the rates with which each part could go on alone.

    ``batch_size`` images a GPU, but no more than ``largest_batch`` over all. A step takes what one GPU takes, and what
    of the exchange of gradients does not fit beside it.
    """
    batch = max(1, min(work.batch_size, work.largest_batch // gpus))
    step_seconds = batch / work.rate
    waiting = max(0.0, exchange_seconds(machines, work, gpus) - machines.overlap * step_seconds)
    consumed = batch / (step_seconds + waiting)
    rates = {
        DECODE: max(0.0, machines.cores_per_gpu - machines.training_cores) * images.rate,
        DISK: machines.disk_mb_s * 1000 / images.kb / min(gpus, machines.gpus),
        NETWORK if waiting else STEP: consumed,
    }
    limit = min(rates, key=rates.__getitem__)
    seconds = images.count / (gpus * rates[limit]) if rates[limit] else math.inf
    return Estimate(
        limit,
        rates[limit],
        math.ceil(consumed / images.rate + machines.training_cores),
        batch,
        seconds,
        gpus * seconds / 3600 * machines.dollars_per_gpu_hour,
    )


def exchange_seconds(machines: Machines, work: Workload, gpus: int) -> float:
    """Seconds to sum gradients over all machines: each sends and receives 2 (m - 1) / m times their bytes.

    That is the least that any algorithm sends (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009); a
    tree passes 2 log2 m hops. What GPUs of one machine exchange, over links of their own, is left out.
    """
    count = math.ceil(gpus / machines.gpus)
    sent = 2 * (count - 1) / count * work.million_weights * 1e6 * work.gradient_bytes
    return 8 * sent / (machines.network_gbit * 1e9) + 2 * math.log2(count) * machines.latency_us / 1e6
