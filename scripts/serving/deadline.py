"""A time limit for the headers of a request, which uvicorn does not have.

Without it a client that sends its headers byte by byte, or nothing at all, keeps a connection for as long as it likes
("slowloris"), and a few hundred of them keep all others out.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # for the headers of a request to arrive, from the connection's start or the answer before
READ_SECONDS = 60.0  # for a client to take the rest of an answer, after that


class DeadlineProtocol(H11Protocol):
    """uvicorn's protocol of a connection, which it ends when headers are late."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._expect_headers()
        super().on_response_complete()  # goes on with what has come meanwhile

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:  # there is a request to be answered
            self._expect_nothing()

    def _expect_headers(self) -> None:
        self._expect_nothing()
        self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self.transport.close()  # once the client has taken its answer
        self._late = self.loop.call_later(READ_SECONDS, self.transport.abort)
