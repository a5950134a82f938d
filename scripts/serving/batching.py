"""Batching of requests: those that arrive while the network is busy are run together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class _Waiting(NamedTuple):
    image: torch.Tensor
    answer: asyncio.Future


class Batcher:
    """Runs ``forward``, float32 images (n, c, h, w) to a tensor (n, ...), for up to ``batch_size`` requests together.

    Nothing waits for a batch to fill: once the network is free, it takes all requests that have arrived meanwhile. So a
    single request is answered as fast as without batching, and batches grow with the load. All work with the network is
    done in one thread.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], batch_size: int) -> None:
        self._forward = lambda images: forward(torch.stack(images))
        self._batch_size = batch_size
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "network")

    async def run(self) -> None:
        """Serve the requests until cancelled."""
        while True:
            together = [await self._waiting.get()]
            while len(together) < self._batch_size and not self._waiting.empty():
                together.append(self._waiting.get_nowait())
            try:
                rows = await self.alone(self._forward, [one.image for one in together])
            except Exception as error:  # each request reports it
                for one in together:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one, row in zip(together, rows, strict=True):
                if not one.answer.done():  # the client may have gone
                    one.answer.set_result((row, len(together)))

    async def __call__(self, image: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Row of ``forward``'s result for an image (c, h, w), and the number of images run together."""
        one = _Waiting(image, asyncio.get_running_loop().create_future())
        await self._waiting.put(one)
        return await one.answer

    async def alone(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function(*args)`` in the network's thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
