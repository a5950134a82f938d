"""Row 11: a machine of a run dies, falls silent or comes: the others go on from the checkpoint, or end in time.

The machines are network namespaces, each with an address of its own on a bridge, and ``scripts/elastic.sh`` is started
on each. The waits, by default and here, in seconds:

- a process waits for the others in one exchange: ``--timeout`` 600, here 5. It notices at once when the other machine's
  system says that the process is gone; only silence takes the whole time;
- a machine counts as lost after ``keep_alive_interval`` x ``keep_alive_max_attempt`` = 5 x 3 of silence, here 1 x 3;
- the meeting stays open for ``last_call_timeout`` 30 for more machines once there are enough, here 7;
- a launcher that hears nothing from the meeting point ends after ``read_timeout`` 60 in one call, here 10;
- a launcher waits for enough machines for ``join_timeout`` 600, here 60.

The last four are torchrun's; ``PET_RDZV_CONF`` (its ``--rdzv-conf``) sets them.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import uuid
from pathlib import Path

import numpy as np
import pytest

from scripts.torchrun import limit_silence
from tests.end_to_end.forked import python_that_forks
from tests.end_to_end.processes import FINAL_LINE, ROOT, load
from tests.end_to_end.scripts import variables
from tests.helpers import QUIETLY, run_in, wait_for
from utils.config.arguments import parse
from utils.optim.lr_policy import LRPolicy

EPOCHS = 30
IMAGES = 1437
STEPS_AN_EPOCH = 16
RECIPE = f"dataname: digits\narch: fc\nepochs: {EPOCHS}\nglobal-batch-size: 90\nsave-every-steps: 10\n"
TIMEOUT_SECONDS = 5
WAITS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=7,read_timeout=10,join_timeout=60"
PORT = 29400
SECONDS = 180  # for what should take some 20


def ip(*words):
    """Run ``ip``; gives what it printed."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Machines with the addresses 10.77.0.1 and up on one switch: ``machines[n]`` is the name of one's namespace."""

    def __init__(self):
        self.python = None  # the folder of the python that elastic.sh will find
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        self.switch = f"{self.name}-switch"
        self.machines = []
        self.spaces = []

    def build(self, machines):
        self._add(self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for number in range(1, machines + 1):
            space = f"{self.name}-{number}"
            self._add(space)
            self.machines.append(space)
            peer = ("peer", "name", f"port{number}", "netns", self.switch)
            ip("link", "add", "eth0", "netns", space, "type", "veth", *peer)
            ip("-n", self.switch, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")

    def _add(self, space):
        ip("netns", "add", space)
        self.spaces.append(space)

    def processes(self):
        """The ids of all processes on the machines."""
        return [int(pid) for space in self.machines for pid in ip("netns", "pids", space).split()]

    def remove(self):
        """Give everything back; returns the processes that were still there, killed now."""
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for space in self.spaces:
            ip("netns", "delete", space)
        return left


@pytest.fixture
def network():
    """An empty network, or a reason why there can be none here."""
    if shutil.which("ip") is None:
        pytest.skip("there is no program ip here")
    network = Network()
    try:
        network.build(machines=3)
    except OSError as error:
        network.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    with python_that_forks() as network.python:
        yield network
    left = network.remove()
    assert not left, f"left running: {left}"
    assert network.name not in ip("netns", "list")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "elastic.yaml"
    path.write_text(RECIPE)
    return path


class Machine:
    """elastic.sh on the machine with the address 10.77.0.``number``; ``host``, begun first, is that of the meeting point."""

    def __init__(self, network, number, host, nodes, recipe, output, flags=()):
        self.space = network.machines[number - 1]
        self.log = f"{output}-{number}-{uuid.uuid4().hex[:4]}"
        environment = {
            **variables(network.python),
            "NNODES": nodes,
            "RDZV_ENDPOINT": f"10.77.0.{host}:{PORT}",
            "RDZV_ID": network.name,
            "MAX_RESTARTS": "5",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PET_LOCAL_ADDR": f"10.77.0.{number}",
            "PET_RDZV_CONF": f"{WAITS},is_host={number == host}",
        }
        line = ["ip", "netns", "exec", self.space, "bash", ROOT / "scripts/elastic.sh", recipe, "."]
        line += [*QUIETLY, "--timeout", TIMEOUT_SECONDS, "--output", output, *flags]
        with open(f"{self.log}.out", "w") as out, open(f"{self.log}.err", "w") as err:
            self.launcher = subprocess.Popen([*map(str, line)], stdout=out, stderr=err, env=environment)

    def die(self):
        """The machine is gone; its system still answers for its processes.

        All stop before one dies: a process that outlived its launcher would agree with the peer's to save and end.
        """
        pids = [int(pid) for pid in ip("netns", "pids", self.space).split()]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        self.launcher.wait(10)

    def fall_silent(self):
        """Nothing reaches the machine any more, and nothing comes from it."""
        ip("-n", self.space, "link", "set", "eth0", "down")

    def ended(self):
        """The exit code and what was printed, once the launcher has ended."""
        code = self.launcher.wait(SECONDS)
        return code, *(Path(f"{self.log}.{name}").read_text() for name in ("out", "err"))


def wait(condition, *machines):
    """Return once ``condition`` is true; fails when a machine ends before."""
    found = wait_for(lambda: condition() or [one for one in machines if one.launcher.poll() is not None], SECONDS)
    assert found is True, [machine.ended() for machine in found]


def trains_on(machines, output):
    """Whether the run has a checkpoint and now trains on so many ``machines``."""
    return any(output.glob("digits/fc/*/checkpoints/last.pt")) and counted(run_in(output))[-1] == machines


def counted(run):
    """The number of machines at the start of the run and each time it continued."""
    return [*map(int, re.findall(r"Processes: (\d+) on", (run / "log.txt").read_text()))]


def finished(machine, recipe, output, counts):
    """``machine`` has ended well, with every step at its learning rate and all samples counted; gives its output.

    ``counts``: on how many machines the run was trained last. Before, it may have begun without one that came late.
    """
    code, out, err = machine.ended()
    assert code == 0, err
    run = run_in(output)
    curves = np.load(run / "metrics.npz")
    np.testing.assert_array_equal(curves["step"], np.arange(1, EPOCHS * STEPS_AN_EPOCH + 1))
    np.testing.assert_array_equal(curves["epoch"], np.repeat(np.arange(1, EPOCHS + 1), STEPS_AN_EPOCH))
    rate = LRPolicy(parse(["--config", str(recipe)]).optimisation, STEPS_AN_EPOCH)
    np.testing.assert_allclose(curves["lr"], [*map(rate, range(EPOCHS * STEPS_AN_EPOCH))], rtol=1e-6)
    assert load(run, "final.pt")["progress"]["samples_seen"] == EPOCHS * IMAGES
    log = (run / "log.txt").read_text()
    assert counted(run)[-len(counts) :] == counts, log
    assert log.count("Continuing") == len(counted(run)) - 1
    return out


@pytest.mark.thorough
def test_of_three_machines_two_go_on_when_one_dies_and_it_may_come_back(network, recipe, tmp_path):
    # The lost machine has the lowest address, hence rank 0: it wrote the checkpoints, and the others met there.
    output = tmp_path / "runs"
    slow = ("--val-batch-size", 1, "--accumulate", 15)  # time for a machine to come
    host, lost, other = (Machine(network, n, 3, "2:3", recipe, output, slow) for n in (3, 1, 2))
    peers = (host, other)
    wait(lambda: trains_on(3, output), lost, *peers)
    lost.die()
    wait(lambda: trains_on(2, output), *peers)
    back = Machine(network, 1, 3, "2:3", recipe, output, slow)
    printed = "".join(finished(machine, recipe, output, [3, 2, 3]) for machine in (*peers, back))
    assert FINAL_LINE.search(printed)


def test_a_silent_machines_peer_goes_on_and_the_silent_one_ends(network, recipe, tmp_path):
    output = tmp_path / "runs"
    peer, silent = (Machine(network, n, 2, "1:2", recipe, output) for n in (2, 1))
    wait(lambda: trains_on(2, output), silent, peer)
    silent.fall_silent()
    finished(peer, recipe, output, [2, 1])
    code, _, err = silent.ended()
    assert code == 1
    assert "torchrun.py: no contact with the other launchers at 10.77.0.2" in err.splitlines()[-1]


def test_without_the_meeting_point_all_end_and_the_same_command_goes_on(network, recipe, tmp_path):
    output = tmp_path / "runs"
    host, peer = (Machine(network, n, 1, "1:2", recipe, output) for n in (1, 2))
    wait(lambda: trains_on(2, output), host, peer)
    host.die()
    code, _, err = peer.ended()
    assert code == 1
    assert "torchrun.py: no contact with the other launchers at 10.77.0.1" in err.splitlines()[-1]
    finished(Machine(network, 2, 2, "1:2", recipe, output), recipe, output, [2, 1])


def test_limits_are_set_for_connections_and_no_file_is_left_open(tmp_path):
    with open(tmp_path / "file", "w"), socket.create_server(("127.0.0.1", 0)) as connection:
        before = sorted(os.listdir("/proc/self/fd"))
        limit_silence(60)
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
