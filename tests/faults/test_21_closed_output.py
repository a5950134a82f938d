"""Row 21: whoever reads stdout or stderr goes away, or the terminal is closed: the run goes on, exit codes are kept."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.forked import ROOT, Forked, Launched, python_that_forks
from tests.end_to_end.processes import FINAL_LINE, load
from tests.helpers import image_tree, run_in, wait_for
from utils.loop.stop_signals import TRY_AGAIN
from utils.runtime.console import INTERRUPTED

FLAGS = ("--arch", "fc", "--epochs", 3, "--print-freq", 5, "--picture-epochs", "off")
SECONDS = 120

# Leaves what the environment names without a reader, or makes a terminal its own, then becomes the program.
PROGRAM = f"""
import os, runpy, sys
program = os.environ.get("PROGRAM", {str(ROOT / "main.py")!r})
for number in map(int, os.environ.get("NOBODY_READS", "").split()):
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, number)
    os.close(writing)
for number in map(int, os.environ.get("CLOSED", "").split()):  # with which Python begins without that stream
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)
if "TERMINAL" in os.environ:
    os.setsid()
    terminal = os.open(os.environ["TERMINAL"], os.O_RDWR)  # which becomes the new session's
    for number in range(3):
        os.dup2(terminal, number)
    os.close(terminal)
sys.argv[0], sys.path[0] = program, os.path.dirname(program)
if "PROGRAM" in os.environ:  # a tool takes main.py's flags, but not all of them
    sys.argv[1:3] = []
runpy.run_path(program, run_name="__main__")
"""


@pytest.fixture
def begin(tmp_path):
    """Starts the program as it is under ``PROGRAM``, its runs below ``tmp_path``."""
    (tmp_path / "program.py").write_text(PROGRAM)
    started = []

    def start(*flags, **environment):
        output = () if "PROGRAM" in environment else ("--output", tmp_path / "runs")
        started.append(Forked(*flags, *output, program=tmp_path / "program.py", **environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def check_whole(run):
    """The run is finished, and its log has what the console would have shown."""
    assert load(run, "final.pt")["progress"]["epoch"] == 3
    lines = [line[20:] for line in (run / "log.txt").read_text().splitlines()]
    assert lines[0] == f"Run {run}" and FINAL_LINE.match(lines[-1])
    assert sum("  validation " in line for line in lines) == 3


# ------------------------------------------------------------------------------------------------- pipes


@pytest.mark.parametrize("numbers", ["1", "2"], ids=["stdout", "stderr"])
def test_a_run_whose_output_nobody_reads_is_trained_to_its_end(begin, tmp_path, numbers):
    process = begin(*FLAGS, "--lr-gamma", 0.5, NOBODY_READS=numbers)  # which is a warning on stderr
    out, err = process.communicate(SECONDS)
    assert process.returncode == 0, err
    check_whole(run_in(tmp_path / "runs"))
    if numbers == "1":  # nothing of a broken pipe, also not at the interpreter's end
        assert [line.partition(": ")[0] for line in err.splitlines()] == ["main.py"] and "--lr-gamma 0.5" in err
    if numbers == "2":
        assert FINAL_LINE.fullmatch(out.splitlines()[-1])


@pytest.mark.parametrize("numbers", ["1", "0 1 2"], ids=[">&-", ">&- 2>&- <&-"])
def test_a_closed_output_ends_no_training_and_is_no_error(begin, tmp_path, numbers):
    process = begin(*FLAGS, CLOSED=numbers)
    assert process.communicate(SECONDS) == ["", ""] and process.returncode == 0
    check_whole(run_in(tmp_path / "runs"))


def test_a_pipe_whose_reader_has_read_enough_ends_no_training(tmp_path):
    line = f"{ROOT / 'main.py'} --device cpu {' '.join(map(str, FLAGS))} --output {tmp_path / 'runs'} | head -2"
    with python_that_forks() as folder:
        script = f"set -o pipefail; {folder}/python3 {line}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 2
    check_whole(run_in(tmp_path / "runs"))


def test_a_python_that_begins_without_input_and_output_keeps_the_exit_code():
    script = f"{sys.executable} {ROOT / 'main.py'} --epochs none >&- 2>&- <&-"
    assert subprocess.run(["bash", "-c", script], timeout=SECONDS, check=False).returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_stop_signal_is_answered_as_ever_when_nobody_reads(begin, tmp_path, number):
    process = begin(*FLAGS, "--epochs", 10_000, NOBODY_READS="1 2")
    wait_for(lambda: any((tmp_path / "runs").glob("*/fc/*/metrics.csv")))
    os.kill(process.ranks[0].pid, number)
    process.communicate(SECONDS)
    assert process.returncode == (TRY_AGAIN if number == signal.SIGTERM else INTERRUPTED)
    assert load(run_in(tmp_path / "runs"), "last.pt")["progress"]["step"] > 0


@pytest.mark.parametrize(("flags", "code"), [(("--epochs", "none"), 2), (("--help",), 0), (("--dry-run",), 0)])
def test_what_only_prints_keeps_its_exit_code(begin, flags, code):
    process = begin(*flags, NOBODY_READS="1")
    _, err = process.communicate(SECONDS)
    assert process.returncode == code
    assert err.count("\n") == (code == 2) and "Broken" not in err and "ignored" not in err
    silent = begin(*flags, NOBODY_READS="1 2")
    silent.communicate(SECONDS)
    assert silent.returncode == code


def test_a_tool_that_finds_faults_says_so_by_its_exit_code_whether_its_report_is_read_or_not(begin, tmp_path):
    image_tree(tmp_path / "data", {"train": 1, "val": 1})
    (tmp_path / "data/train/a/cut.png").write_bytes(b"no image")
    flags = ("--dataname", "folder", "--datapath", tmp_path / "data", "--output", tmp_path / "checks")
    process = begin(*flags, PROGRAM=str(ROOT / "scripts/check_data.py"), NOBODY_READS="1")
    out, err = process.communicate(SECONDS)
    assert (process.returncode, err) == (1, "")
    assert "1 damaged" in next((tmp_path / "checks").rglob("report.txt")).read_text()


# ---------------------------------------------------------------------------------------------- terminals


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_a_closed_terminal_ends_no_training(begin, tmp_path, workers):
    master, slave = pty.openpty()
    flags = ("--loader", "stream", "--workers", workers) if workers else ()
    process = begin(*FLAGS, *flags, TERMINAL=os.ttyname(slave))
    wait_for(lambda: any((tmp_path / "runs").glob("*/fc/*/metrics.csv")))  # in training, with bars
    os.close(slave)
    os.close(master)  # the system sends SIGHUP, and every further line fails
    process.communicate(SECONDS)
    assert process.returncode == 0
    check_whole(run_in(tmp_path / "runs"))


def test_sighup_ends_no_training_on_two_processes_under_the_launcher(tmp_path):
    line = [sys.executable, ROOT / "scripts/torchrun.py", "--standalone", "--nproc-per-node", "2", ROOT / "main.py"]
    line += ["--device", "cpu", *FLAGS, "--output", tmp_path / "runs"]
    os.mkfifo(pipe := str(tmp_path / "pipe"))
    process = Launched(line, pipe, pipe)
    with open(pipe) as reader:
        reader.readline()
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(SECONDS) == 0
    check_whole(run_in(tmp_path / "runs"))


def test_a_full_disk_under_stdout_is_not_taken_for_a_reader_who_went_away():
    code = "from utils.runtime.console import outlive_readers; outlive_readers(); print('result', flush=True)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode != 0 and b"No space left" in done.stderr
