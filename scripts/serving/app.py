"""Web application: a page for people, ``POST /predict`` for programs.

Nothing in a request reaches the disk: the page's files are read once, an image stays in memory, and no name in a
request is used as a path.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from scripts.common.heat_map import heat_map, overlay
from scripts.common.output import data_url
from scripts.common.predictions import Predictor
from scripts.common.trained import accepted
from scripts.serving.batching import Batcher
from scripts.serving.guard import Guard
from scripts.serving.uploads import FORM_BYTES, Limits, Refused, decode, file_in, is_form
from utils.config.settings import UserError

PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
SHOWN = 5  # classes in an answer without ?top=
MOST_AT_ONCE = 64  # requests being answered; each may hold an image
BODY_SECONDS = 30.0  # within which a request's body must arrive
SMALLEST_PICTURE = 224  # pixels per side of the heat map's pictures


class Json(JSONResponse):
    """JSON in ASCII, since a class is named after its folder, whose name may not be valid text in any encoding."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class Service:
    """Service that answers requests with ``predictor``'s network. ``below``: see --reject-below."""

    def __init__(self, predictor: Predictor, limits: Limits, decoders: int, below: float | None = None) -> None:
        self.predictor = predictor
        self.below = below
        self.loaded = predictor.loaded
        self.limits = limits
        self.batcher = Batcher(predictor.logits, predictor.batch_size)
        self._decoders = ThreadPoolExecutor(decoders, "decoder")
        self._in_hand = 0

    async def model(self, _: Request) -> Response:
        """Answer with facts about the network."""
        about = {
            "arch": self.loaded.arch,
            "checkpoint": str(self.loaded.path.name),
            "classes": self.loaded.classes,
            "image_size": self.loaded.preprocessing.val_image_size,
            "tta": self.predictor.tta,
            "reject_below": self.below,
            **self.loaded.reading.facts,
            **asdict(self.limits),
        }
        return Json(about)

    async def predict(self, request: Request) -> Response:
        """Answer with the likeliest classes of the request's image, and the labels if the network is multi-label."""
        top = _number(request, "top", SHOWN, len(self.loaded.classes))
        async with self._image_of(request) as ((width, height), tensor):
            logits, together = await self.batcher(tensor)
        if not logits.isfinite().all():
            raise Refused(500, "the network's output is not finite; start with --amp off")
        reading = self.loaded.reading
        rows = self._named(reading.likeliest(logits[None], top)[0])
        given = reading.labels(logits[None])
        best = {name: rows[0][name] for name in ("class", "probability")}
        if self.below is not None:
            sure = accepted(best["probability"], self.below)
            best |= {"class": best["class"] if sure else None, "rejected": None if sure else best["class"]}
        answer = best if given is None else {"labels": self._named(given[0])}
        return Json({**answer, "top": rows, "width": width, "height": height, "batch": together})

    def _named(self, classes: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        return [{"class": self.loaded.classes[one], "index": one, "probability": share} for one, share in classes]

    async def heat_map(self, request: Request) -> Response:
        """Answer with two PNG files: the image as the network sees it, and the heat map of class number ``class``."""
        index = _number(request, "class", 0, len(self.loaded.classes) - 1, least=0)
        async with self._image_of(request) as (_, tensor):
            try:
                seen, looked = await self.batcher.alone(self._pictures, tensor, index)
            except UserError as error:  # an output is not finite
                raise Refused(501, str(error)) from error
        return Json({"class": self.loaded.classes[index], "seen": _as_url(seen), "heat": _as_url(looked)})

    def _pictures(self, tensor: torch.Tensor, index: int) -> tuple[Image.Image, Image.Image]:
        images = tensor[None].to(self.predictor.device)
        heat = heat_map(self.loaded, images, [index])[0]
        pixels = self.loaded.preprocessing.evaluation_transform.to_pixels(images)[0]
        return overlay(pixels, 0 * heat), overlay(pixels, heat)

    @asynccontextmanager
    async def _image_of(self, request: Request) -> AsyncIterator[tuple[tuple[int, int], torch.Tensor]]:
        """Context that gives width and height of the image in the request's body, and the network's input.

        The file and its pixels, at most 170 MB by default, are released while the network is busy. Raises ``Refused``.
        """
        if self._in_hand >= MOST_AT_ONCE:
            raise Refused(503, "too many requests at once; try again")
        self._in_hand += 1
        try:
            kind = request.headers.get("content-type", "")
            yield await asyncio.get_running_loop().run_in_executor(
                self._decoders, self._decoded, await asyncio.wait_for(self._body(request), BODY_SECONDS), kind
            )
        except asyncio.TimeoutError as error:
            raise Refused(408, f"the request's body has not arrived within {BODY_SECONDS:g} seconds") from error
        finally:
            self._in_hand -= 1

    async def _body(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        around = FORM_BYTES if is_form(request.headers.get("content-type", "")) else 0
        self.limits.refuse_bytes(int(announced) - around if announced.isdecimal() else 0)
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            self.limits.refuse_bytes(len(data) - around)
        return bytes(data)

    def _decoded(self, data: bytes, content_type: str) -> tuple[tuple[int, int], torch.Tensor]:
        preprocessing = self.loaded.preprocessing
        data = file_in(data, content_type) if is_form(content_type) else data
        image = decode(data, preprocessing.colour, self.limits)
        return image.size, preprocessing(image)


def _number(request: Request, name: str, default: int, most: int, least: int = 1) -> int:
    """Whole number that the request's query gives for ``name``, or the ``default``. Raises ``Refused``."""
    text = request.query_params.get(name)
    if text is None:
        return min(default, most)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise Refused(400, f"{name}: must be a whole number from {least} to {most}")
    return int(text)


def _as_url(picture: Image.Image) -> str:
    """``data:`` URL of a picture, enlarged by whole pixels if it is small."""
    scale = max(1, math.ceil(SMALLEST_PICTURE / picture.width))
    size = (scale * picture.width, scale * picture.height)
    return data_url(picture.resize(size, Image.Resampling.NEAREST), "png")


def build_app(service: Service, names: set[str]) -> ASGIApp:
    """Build the application. ``names``: host names, besides addresses, that requests may use; see ``Guard``."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batches = asyncio.create_task(service.batcher.run())
        yield
        batches.cancel()
        with suppress(asyncio.CancelledError):
            await batches

    app = Starlette(
        routes=[
            *(Route(path, _file(*file)) for path, file in PAGE.items()),
            Route("/model", service.model),
            Route("/predict", service.predict, methods=["POST"]),
            Route("/heat_map", service.heat_map, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: _refusal,
            ClientDisconnect: _gone,
            Exception: _failure,
        },
        lifespan=lifespan,
    )
    return Guard(app, names)  # around everything, so that answers to failures also get its headers


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (Path(__file__).parent / "page" / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


async def _refusal(_: Request, error: Any) -> Response:
    return Json({"error": error.detail}, error.status_code, error.headers)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=400)  # nobody reads the answer


async def _failure(request: Request, error: Exception) -> Response:
    line = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"serve.py: {request.method} {request.url.path}: {line}", file=sys.stderr, flush=True)
    return Json({"error": "the server has failed; its terminal says more"}, 500)
