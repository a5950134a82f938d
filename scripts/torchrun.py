"""torchrun whose exit code says what to do next: ``python scripts/torchrun.py [flag of torchrun ...] main.py ...``

torchrun itself ends with 1 whenever a process fails. This launcher's exit code is one that a scheduler can act on:

    0   done
    2   an error the user can fix: the same command fails again
    75  stopped by a signal with the state saved: run the same command with --resume auto
    130 the same after Ctrl-C
    1   anything else, such as a process that was killed or another machine that is silent

SIGTERM, SIGUSR1 and SIGQUIT reach the processes as SIGTERM, SIGINT as itself; they then have
TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds to save and end (180 by default, not torchrun's 30; newer versions of torch also
take ``--shutdown-timeout``). A second Ctrl-C is passed on too, any other further signal is not. A closed terminal
(SIGHUP) ends nothing. With several machines, each launcher reports on its own processes.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

if __name__ == "__main__":  # before the other imports, which Ctrl-C would break off with a traceback
    try:
        from utils.runtime import console

        console.begin("torchrun.py")
    except KeyboardInterrupt:
        os._exit(130)

import itertools
import logging
import re
import signal
import socket
import stat
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from utils.loop.stop_signals import INTERRUPTED, TRY_AGAIN
from utils.runtime.process import port_in_use

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

FLAGS = """Flags that most runs need; the others are torchrun's own (python -m torch.distributed.run --help):

    --nproc-per-node N     processes on this machine, one per GPU
    --standalone           one machine, any free port
    --nnodes N or MIN:MAX  machines; run the same command on each, with --rdzv-endpoint and --rdzv-id
    --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id TEXT   where the machines meet
    --max-restarts N       how often processes that failed are started again
"""
MISTAKE = 2
SHUTDOWN_SECONDS = 180
SILENCE_SECONDS = 60  # of the meeting point, unless --rdzv-conf read_timeout=N is given; 60 is torch's default
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGQUIT)
QUIET = (
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)
IGNORABLE = (signal.SIGINT, signal.SIGQUIT)  # processes started with a shell's & ignore these signals; that stays so


class Launcher:
    """Signals that this process has received, and the agent: torch's object that owns the training processes."""

    def __init__(self) -> None:
        self.received = 0
        self.agent: LocalElasticAgent | None = None
        self.unasked: list[int] | None = None  # codes of processes that ended before this launcher ended the rest
        self._ignored = [number for number in IGNORABLE if signal.getsignal(number) == signal.SIG_IGN]

    def listen(self) -> None:
        """Handle all stop signals from now on."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in self._ignored else self._receive)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.agent is None:  # nothing has begun
            os._exit(INTERRUPTED if number == signal.SIGINT else TRY_AGAIN)
        from torch.distributed.elastic.multiprocessing.api import SignalException

        first = not self.received
        self.received = self.received or number
        if first:  # torch passes the exception's signal on
            name = signal.Signals(number).name
            raise SignalException(name, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        if number == self.received == signal.SIGINT:
            for process in self.processes():
                if process.proc.poll() is None:
                    process.close(signal.SIGINT)

    def processes(self) -> list[Any]:
        """Torch's handles of the latest training processes, in the order of their local ranks."""
        context = getattr(self.agent, "_pcontext", None)
        return [] if context is None else [handle for _, handle in sorted(context.subprocess_handlers.items())]

    def exit_codes(self) -> list[int]:
        """Exit codes of those ``processes`` that have ended; minus the signal's number for one killed by a signal."""
        codes = [process.proc.poll() for process in self.processes()]
        return [code for code in codes if code is not None]

    def exit_code(self, succeeded: bool) -> int:
        """Exit code of this process."""
        codes = self.exit_codes()
        if MISTAKE in codes:
            return MISTAKE
        unasked = codes if self.unasked is None else self.unasked
        stopped = next((code for code in (TRY_AGAIN, INTERRUPTED) if code in unasked), None)
        if stopped and not self.received and {*codes} <= {0, 1, stopped}:
            return stopped  # one process was told to stop before training, and the others lost contact with it
        if any(code > 0 and code not in (TRY_AGAIN, INTERRUPTED) for code in codes):
            return 1
        if codes and not any(codes) and (succeeded or self.received):
            return 0
        if self.received:
            return INTERRUPTED if self.received == signal.SIGINT else TRY_AGAIN
        # A process that stops for another machine's signal saves in agreement with all others, however these
        # end. One that this launcher ended because the other machine is silent may have lost its peers before.
        return stopped or 1


def asks_for_help(argv: list[str]) -> bool:
    """True if ``argv`` asks for the launcher's help, not for the program's; checked before torch's slow import."""
    own = itertools.takewhile(lambda token: not token.endswith(".py"), argv)
    return bool({"-h", "--help"} & set(own))


def main(argv: list[str]) -> int:
    """Run torchrun in this process and return the exit code."""
    if asks_for_help(argv):
        print(f"{__doc__}\n{FLAGS}", end="")
        return 0
    launcher = Launcher()
    launcher.listen()

    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher import api

    for name in QUIET:  # one line below reports what these would log
        logging.getLogger(name).setLevel(logging.CRITICAL)
    args = run.parse_args(argv)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    if args.max_restarts:
        # Otherwise the training processes meet in a store of rank 0's agent. An agent that outlives it without becoming
        # rank 0 itself would send its processes to the dead agent's address forever.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    silence = re.search(r"\bread_timeout=(\d+)", args.rdzv_conf or "")
    api.LocalElasticAgent = agent_class(launcher, int(silence[1]) if silence else SILENCE_SECONDS)
    problem = None
    try:
        run.run(args)
    except (AssertionError, ValueError) as error:  # torch's answer to invalid flags of its own
        if launcher.agent is not None:
            raise
        print(f"torchrun.py: {' '.join(str(error).split()) or 'a number of nodes or processes is 0'}", file=sys.stderr)
        return MISTAKE
    except SignalException as error:
        problem = f"stopped by {error}"
    except ChildFailedError:
        problem = "failed"
    except (RendezvousError, DistError) as error:
        if port := re.search(r"port: (\d+).*EADDRINUSE", str(error)):
            print(f"torchrun.py: {port_in_use(port[1])}; give another --master-port, or --standalone", file=sys.stderr)
            return MISTAKE
        place = f" at {args.rdzv_endpoint}" if args.rdzv_endpoint else ""
        problem = f"no contact with the other launchers{place} ({type(error).__name__}: {error})"
    code = launcher.exit_code(succeeded=problem is None)
    if problem and code != MISTAKE:  # for MISTAKE, a training process has said what is wrong
        print(f"torchrun.py: {' '.join(problem.split())}{endings(launcher)}", file=sys.stderr)
    return code


def endings(launcher: Launcher) -> str:
    """Text about how the training processes ended."""
    words = [f"exit code {code}" if code >= 0 else signal.Signals(-code).name for code in launcher.exit_codes()]
    if len(set(words)) == 1:
        return f"; all processes here ended with {words[0]}"
    return "; " + ", ".join(f"process {number}: {word}" for number, word in enumerate(words)) if words else ""


def limit_silence(seconds: int) -> None:
    """Let the system end this process's connections that receive nothing for ``seconds``.

    A store's client waits for an answer in a call that no signal interrupts. If the other machine falls silent, the
    system by default gives up the connection after a quarter of an hour, or never.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # not Linux
        return
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed by now, or not TCP
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 4))


def agent_class(launcher: Launcher, silence_seconds: int) -> type[LocalElasticAgent]:
    """Subclass of torch's agent with this launcher's signals and time limits; never restarts after a user's mistake."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            launcher.agent = self
            limit_silence(silence_seconds)  # the connection to the meeting point exists by now
            self._seconds = getattr(self, "_shutdown_timeout", int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            started = super()._start_workers(worker_group)
            launcher.unasked = None
            launcher.listen()  # replaces the handlers that torch has just set
            return started

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            first = self._remaining_restarts == worker_group.spec.max_restarts
            if first and any(failure.exitcode == MISTAKE for failure in result.failures.values()):
                self._remaining_restarts = 0  # the same command would fail again
            return result

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
            if launcher.unasked is None:
                launcher.unasked = launcher.exit_codes()
            if self._pcontext:  # torch gives them 30 s if it ends them for a restart
                self._pcontext.close(death_sig, self._seconds)
            super()._shutdown(death_sig)

    return Agent


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except ModuleNotFoundError as error:
        exit_code = console.lacks_package("torchrun.py", error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # during Python's teardown, about a second, a stop signal would kill
