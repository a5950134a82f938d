"""The program in processes forked from a server that has imported what takes seconds to import: 0.5 s a start, not 7."""

import ctypes
import functools
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path

from execnet.gateway_io import Popen2IO, Popen2IOMaster

from scripts.verification.processes import descendants

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 300
IMPORTED = "tests.end_to_end.imported"


@functools.cache
def server():
    """The server; it outlives the test that asks for it first. Workers of pytest-xdist come from it, and use it too."""
    context = multiprocessing.get_context("forkserver")
    if IMPORTED not in sys.modules:  # which those that come from it have
        context.set_forkserver_preload([IMPORTED])
        here = os.getcwd()
        os.chdir(ROOT)  # it imports from the current folder, and says nothing if a module is not there
        first = context.Process(target=_say_whether_imported)
        first.start()
        os.chdir(here)
        first.join()
        assert first.exitcode == 0, "the server has not imported what it was told to"
    return context


def answer_of(function, *arguments):
    """What ``function``, which takes a queue after its ``arguments``, puts there in a process of the server's."""
    answer = server().SimpleQueue()
    process = server().Process(target=function, args=(*arguments, answer))
    process.start()
    process.join()
    assert process.exitcode == 0
    return answer.get()


def _say_whether_imported():
    sys.exit(IMPORTED not in sys.modules)


def running():
    """Ids of the server's processes that this process has begun and that still run, and of all that these began."""
    begun = {child.pid for child in multiprocessing.active_children() if isinstance(child, server().Process)}
    return begun.union(*map(descendants, begun))


def _start(process):
    """Start ``process``; kill it if it still runs when this one ends, which would wait for it forever."""
    process.start()
    util.Finalize(None, process.kill, exitpriority=0)


class Forked:
    """A run on the CPU, with the methods of subprocess.Popen that tests use.

    Of several ``processes`` nobody ends the others when one fails, as torchrun would; the return code is the lowest
    that is not 0. ``environment`` is added to this process's.
    """

    def __init__(self, *flags, processes=1, program="main.py", **environment):
        self._files = [tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()]  # noqa: SIM115 - go with this
        names = [file.name for file in self._files]
        line = [str(ROOT / program), "--device", "cpu", *map(str, flags)]
        self.ranks = [
            server().Process(target=_run, args=(names, os.getcwd(), {**os.environ, **rank, **environment}, line))
            for rank in _ranks(processes)
        ]
        for rank in self.ranks:
            _start(rank)

    @property
    def returncode(self):
        """None while one of the processes runs; minus the signal's number for one that was killed."""
        codes = [rank.exitcode for rank in self.ranks]
        return None if None in codes else min(filter(None, codes), default=0)

    def poll(self):
        return self.returncode

    def kill(self):
        for rank in self.ranks:
            rank.kill()

    def communicate(self, timeout=SECONDS):
        """What all processes have printed on stdout and on stderr, when they have ended."""
        deadline = time.monotonic() + timeout
        for rank in self.ranks:
            rank.join(max(0, deadline - time.monotonic()))
        hangs = self.returncode is None
        self.kill()
        texts = [Path(file.name).read_text() for file in self._files]
        assert not hangs, texts
        return texts

    def output(self, timeout=SECONDS):
        """What all processes have printed on stdout, when they have ended well."""
        out, err = self.communicate(timeout)
        assert self.returncode == 0, err
        return out


class _AsPopen:
    """A process of multiprocessing with what torchrun and tests use of subprocess.Popen."""

    def __init__(self, process):
        self._process = process
        _start(process)
        self.pid = process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()

    @property
    def returncode(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.returncode


class Worker(Popen2IOMaster):
    """A worker of pytest-xdist that is forked from the server, in the place of one that Python begins."""

    def __init__(self, _, execmodel):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.popen = _AsPopen(server().Process(target=_work, args=(theirs,)))
            Popen2IO.__init__(self, ours.makefile("wb"), ours.makefile("rb"), execmodel)


class Launched(_AsPopen):
    """subprocess.Popen for ``line``, a torchrun that is forked from the server, and its training processes from it.

    What differs: processes are not begun by Python, which spares their imports, and torchrun does not search all
    modules for the name of each method that it is in, which took it a second. ``stdout`` and ``stderr`` are
    paths in text, or open files that have one.
    """

    def __init__(self, line, stdout, stderr, env=None, **_):
        names = [file if isinstance(file, str) else file.name for file in (stdout, stderr)]
        super().__init__(
            server().Process(target=_launch, args=(names, os.getcwd(), env or {**os.environ}, [*map(str, line[1:])]))
        )


# A python for PATH. It has the server fork our own programs, passing on signals and the exit code, and runs Python for
# anything else.
PYTHON = f"""#!{sys.executable} -IS
import contextlib, os, signal, socket, sys
if not any(word.startswith("{ROOT}/") for word in sys.argv[1:2]):
    os.execv("{sys.executable}", ["{sys.executable}", *sys.argv[1:]])
signals = (signal.SIGUSR1, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(sys.argv[0]), "server"))
server.sendall(chr(0).join([str(os.getpid()), *sys.argv[1:]]).encode() + b"\\n")
answers = server.makefile()
forked = int(answers.readline())
def hand_on(number, _):
    with contextlib.suppress(ProcessLookupError):
        os.kill(forked, number)
for number in signals:
    signal.signal(number, hand_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
code = int(answers.readline())
if code < 0:
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(code)
"""


@contextmanager
def python_that_forks():
    """A folder for PATH whose ``python3`` starts our programs as forks of the server."""
    server()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "python3")
        path.write_text(PYTHON)
        path.chmod(0o755)
        with socketserver.ThreadingUnixStreamServer(f"{folder}/server", _ForThePython) as listening:
            threading.Thread(target=listening.serve_forever, daemon=True).start()
            yield folder
            listening.shutdown()


class _ForThePython(socketserver.StreamRequestHandler):
    """Answers a python of ``python_that_forks`` with the forked process's id and, when it has ended, its exit code."""

    def handle(self):
        pid, *line = self.rfile.readline().decode().rstrip("\n").split("\0")
        process = _AsPopen(server().Process(target=_in_place_of, args=(Path("/proc", pid), line)))
        with suppress(BrokenPipeError):  # that python was killed
            self.wfile.write(f"{process.pid}\n".encode())
            self.wfile.write(f"{process.wait()}\n".encode())


def train_with(fault, *flags, processes=1):
    """Train with ``fault`` planted, see tests/faults/planted.py; gives the exit code."""
    process = Forked(*flags, processes=processes, program="tests/faults/faulty_main.py", HOOK_FAULT=fault)
    process.communicate()
    return process.returncode


@functools.cache
def _ports():
    """Ports below those that the system gives to clients: none of them may take one before a run listens on it.

    They begin somewhere else in each process of the tests.
    """
    return itertools.cycle(range(10000 + 37 * os.getpid() % 20000, 32000))


def free_port():
    """A port that nobody listens on, and that this process has not given before."""
    for port in _ports():
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _ranks(processes):
    """What torchrun puts into the environment of each of several processes."""
    if processes == 1:
        return [{}]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, **meeting}
    return [
        {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(processes)
    ]


def _work(controller):
    for number in (0, 1):
        os.dup2(controller.fileno(), number)
    controller.close()
    forkserver._forkserver.ensure_running = lambda: None  # would look for a server that this process has begun
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # not pytest's, which each child would run
    exec(eval(os.fdopen(0, closefd=False).readline()), vars(main))


def _in_place_of(process, line):
    """Run ``line`` with the network, environment, folder and output of ``process``, a folder of /proc."""
    network = process / "ns/net"
    if not network.samefile("/proc/self/ns/net"):
        with network.open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0  # os.setns comes with Python 3.12
    variables = (process / "environ").read_text().split("\0")[:-1]
    environment = dict(variable.split("=", 1) for variable in variables)
    _launch([str(process / "fd/1"), str(process / "fd/2")], process / "cwd", environment, line)


def _launch(files, folder, environment, line):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    os.setsid()
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    SubprocessHandler._popen = _forked_rank
    _run(files, folder, environment, [run.__file__, *line[2:]] if line[0] == "-m" else line)


def _forked_rank(handler, line, environment):
    """In the place of torchrun's method that begins a training process."""
    _, unbuffered, *line = line
    assert unbuffered == "-u"
    return _AsPopen(multiprocessing.get_context("fork").Process(target=_rank, args=(environment, line)))


def _rank(environment, line):
    """What beginning Python would do: a session, signals and sockets of its own, and the modules of the program's folder."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the list's own
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
    if Path(line[0]).parent != ROOT:
        for name in [*sys.modules]:
            if (ROOT / name.partition(".")[0]).is_dir() or (ROOT / f"{name}.py").is_file():
                del sys.modules[name]
    _execute(environment, line)


def _run(files, folder, environment, line):
    for number, name in enumerate(files, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(folder)
    _execute(environment, line)


def _execute(environment, line):
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = line
    sys.path[0] = str(Path(line[0]).parent)
    runpy.run_path(line[0], run_name="__main__")
