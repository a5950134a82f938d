"""Try a trained network out: a page on this machine, and ``POST /predict`` for programs.

    python scripts/serve.py auto                                              # the newest run, at http://127.0.0.1:8000
    curl -F image=@cat.jpg http://127.0.0.1:8000/predict

A person drops, pastes or photographs an image and sees classes, probabilities and a heat map. Requests that arrive
together are run together. Only this machine can reach the server, unless --host says otherwise. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, number, run_tool, warn, whole
from scripts.common.trained import add_rejection, add_run_arguments, add_views, find_run, open_run, refuse_rejection
from utils.config.settings import UserError, as_user_error
from utils.runtime.cpu import cores_per_process

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from scripts.common.predictions import Predictor
    from scripts.serving.app import Service

NAME = "serve.py"
LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 256
MOST_MEGAPIXELS = 178  # Pillow's own limit against decompression bombs
HEADER_BYTES = 16_384  # most bytes of a request's headers


def main(argv: list[str]) -> int:
    """Serve until interrupted; return the exit code."""
    own = build_parser().parse_args(argv)
    find_run(own.run)
    if own.max_megapixels > MOST_MEGAPIXELS:
        raise UserError(f"--max-megapixels {own.max_megapixels:g}: Pillow decodes at most {MOST_MEGAPIXELS} million")
    need_packages()
    with listening(own.host, own.port) as listener:
        service = build_service(own)
        from scripts.serving.app import build_app

        address, port, *_ = listener.getsockname()
        app = build_app(service, allowed_names(own, address))
        print(announcement(service.predictor, own.host, port), flush=True)
        if not is_loopback(address):
            warn(f"--host {own.host}: whoever can reach this machine can use it; there is no password")
        try:
            build_server(app).run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn has shut down properly and passes the interrupt on
            print("Ended", flush=True)
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    add_run_arguments(parser)
    add_views(parser)
    add_rejection(parser)
    parser.add_argument(
        "--host", default=LOOPBACK, metavar="NAME", help=f"address to listen on [{LOOPBACK}: this machine]"
    )
    parser.add_argument(
        "--allow-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which it may be asked, such as a reverse proxy's; may be repeated [any address, this machine's "
        "own names, --host]",
    )
    parser.add_argument("--port", type=whole(0, 65535), default=8000, metavar="N", help="0: any free one [8000]")
    parser.add_argument("--max-megabytes", type=number(0.01, 1e6), default=20, metavar="X", help="largest file [20]")
    parser.add_argument("--max-megapixels", type=number(0.01, 1e6), default=50, metavar="X", help="largest image [50]")
    return parser


def need_packages() -> None:
    """Raise ``UserError`` with the installation command if packages are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"needs {' and '.join(missing)}: python -m pip install -r requirements-tools.txt")


def listening(host: str, port: int) -> socket.socket:
    """A socket listening on ``host`` and ``port``. Raises ``UserError`` if impossible."""
    said = f"--host {host} --port {port}: cannot listen there"
    with as_user_error(said, (OSError, UnicodeError), advice="; choose another"):
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()  # from now on requests wait, even while the network is loaded
        except OSError:
            bound.close()
            raise
        return bound


def is_loopback(address: str) -> bool:
    """True if only this machine can reach the IP address ``address``."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def allowed_names(own: argparse.Namespace, address: str) -> set[str]:
    """Host names, besides IP addresses, that requests to the server at ``address`` may use."""
    names = {"localhost", own.host, *own.allow_name}
    if not is_loopback(address):
        machine = socket.gethostname()
        names |= {machine, machine.partition(".")[0], f"{machine.partition('.')[0]}.local"}
    return {name.lower() for name in names}


def announcement(predictor: Predictor, host: str, port: int) -> str:
    """Lines about what is served, and where."""
    loaded = predictor.loaded
    shown = f"[{host}]" if ":" in host else host
    classes = f"{len(loaded.classes)} classes{predictor.temperature}"
    return (
        f"Serving {loaded.arch} ({classes}) of {loaded.path} on {predictor.device.type}, at most "
        f"{predictor.batch_size} images together\nhttp://{shown}:{port}/  (Ctrl-C ends it)"
    )


def build_service(own: argparse.Namespace) -> Service:
    """Build the service that answers requests; run its network once, so that the first request is not delayed."""
    import torch

    from scripts.common.predictions import Predictor
    from scripts.serving.app import Service
    from scripts.serving.uploads import Limits
    from utils.config.image_size import sides

    predictor = Predictor(open_run(own.run, own.raw, own.device, best=own.best), own)
    refuse_rejection(own.reject_below, predictor.loaded)
    shown = predictor.loaded.preprocessing
    predictor.logits(torch.zeros(1, shown.channels, *sides(shown.val_image_size)))
    limits = Limits(own.max_megabytes, own.max_megapixels)
    return Service(predictor, limits, cores_per_process(1), own.reject_below)


def build_server(app: ASGIApp) -> uvicorn.Server:
    """Build the server of an application, with limits on connections, headers and waiting times."""
    import uvicorn

    from scripts.serving.guard import DeadlineProtocol

    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=DeadlineProtocol,
        ws="none",
        lifespan="on",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
