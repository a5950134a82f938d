"""Rules for every connection, request and answer of the server, whatever its content.

uvicorn has no time limit for the headers of a request. Without one, a client that sends its headers byte by byte, or
nothing at all, keeps a connection as long as it likes ("slowloris"), and a few hundred such clients keep all others
out.
"""

from __future__ import annotations

import asyncio
import ipaddress
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# The page loads nothing from elsewhere and runs only its own script; only it may use the camera.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
HEADER_SECONDS = 10.0  # for a request's headers to arrive, from the connection's start or the previous answer
READ_SECONDS = 60.0  # after that, for a client to take the rest of an answer


class Guard:
    """ASGI middleware that refuses requests from other web pages, and adds ``HEADERS`` to each answer.

    A browser lets any page send requests here. A page whose name merely points here (DNS rebinding) asks neither for
    one of ``names`` nor for an address; a request from another page names that page in its Origin header.
    """

    def __init__(self, app: ASGIApp, names: set[str]) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        problem = self._problem(Headers(scope=scope))
        app = JSONResponse({"error": problem}, 403) if problem else self.app
        await app(scope, receive, send_with_headers)

    def _problem(self, headers: Headers) -> str | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        name = _split(f"//{host}").hostname or ""
        if name not in self.names and not is_address(name):
            return "ask for this machine by its address, not by another name; serve.py's --allow-name allows one"
        if origin is not None and (_split(origin).netloc or None) != host:
            return "requests from other web pages are refused"
        return None


def is_address(name: str) -> bool:
    """True if ``name`` is an IP address, which no DNS server can redirect."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _split(url: str) -> SplitResult:
    """Parts of a URL from a request; all empty if it is not a URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class DeadlineProtocol(H11Protocol):
    """uvicorn's protocol for a connection, which ends the connection if headers are late."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._expect_headers()
        super().on_response_complete()  # continues with what has arrived meanwhile

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:  # there is a request to answer
            self._expect_nothing()

    def _expect_headers(self) -> None:
        self._expect_nothing()
        self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self.transport.close()  # once the client has received its answer
        self._late = self.loop.call_later(READ_SECONDS, self.transport.abort)
