"""A data worker that dies and shared memory that is used up are told in one line; what is meant for the run spares them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import _utils, dataloader

from scripts.verification.processes import processes
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import ROOT, differences
from tests.faults.conftest import SECONDS
from tests.helpers import image_tree, wait_for
from utils.config.settings import UserError
from utils.data import decoded as cache
from utils.data import sources
from utils.data.formats.readers import ImageFiles
from utils.data.images.view import View
from utils.data.progress_log import ProgressLog
from utils.data.sample_plan import MicroBatch
from utils.data.sources import MicroBatchReader, StreamSource, measured_workers

CPU = torch.device("cpu")
COUNT = 24
NO_ROOM = "shared memory (/dev/shm) has no room for a batch of"  # and then torch's reason, which its versions word anew
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes as only Linux shows them")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Two classes of images of 64 by 64 pixels."""
    return image_tree(tmp_path_factory.mktemp("tree"), {"train": COUNT // 2, "val": 2}, size=64, ending="jpg")


@pytest.fixture(autouse=True)
def workers_look_often(monkeypatch):
    """Workers and who waits for them look every half second for each other's end, not every five."""
    for module in (_utils, _utils.worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.5)
    # whoever waits has it as the default of an argument
    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.5,))


@pytest.fixture
def files(tree):
    paths = sorted(map(str, (tree / "train").rglob("*.jpg")))
    return ImageFiles(paths, torch.zeros(COUNT, dtype=torch.int64), "RGB")


def streaming(files, workers=1, **options):
    return StreamSource(MicroBatchReader(files, View(32), crop=True, **options), CPU, workers=workers, cores=2)


def micro_batches(count=COUNT // 4):
    return [MicroBatch(0, step, np.arange(4 * step, 4 * step + 4), 4, 1.0, True) for step in range(count)]


def stream(files):
    return list(streaming(files).batches(micro_batches()))


def fill_cache(files):
    return cache.decoded(files, View(32), None, workers=1, progress=ProgressLog())


def measure(files):
    many = ImageFiles(files.paths * 100, files.labels.repeat(100), "RGB")
    return measured_workers(streaming(many).reader, 2)


READERS = [stream, fill_cache, measure]


def fail_at_the_seventh(monkeypatch, failure):
    """In a worker, decoding ends with ``failure`` when it comes to the seventh image that it reads."""
    read = []
    decode = cache.decode_crop
    parent = os.getpid()

    def decode_or_fail(*arguments):
        read.append(1)
        if len(read) == 7 and os.getpid() != parent:
            failure()
        return decode(*arguments)

    for module in (cache, sources):
        monkeypatch.setattr(module, "decode_crop", decode_or_fail)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize(
    ("read", "failure", "how"),
    [
        *(
            (read, kill_itself, r"was killed \(SIGKILL\), by hand or because memory ran out; .*--workers")
            for read in READERS
        ),
        (stream, lambda: os._exit(3), r"ended with exit code 3; .*--workers 0"),
        (stream, lambda: os._exit(0), r"ended with exit code 0; .*--workers 0"),
    ],
)
def test_the_end_of_a_worker_is_one_line_that_says_how_and_what_to_do(monkeypatch, files, read, failure, how):
    fail_at_the_seventh(monkeypatch, failure)
    with pytest.raises(UserError, match=f"process [0-9]+, which reads images, {how}") as caught:
        read(files)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("read", READERS)
def test_an_error_of_the_program_in_a_worker_keeps_its_kind_and_its_traceback(monkeypatch, files, read):
    bug = Mock(side_effect=RuntimeError("DataLoader worker (pid 1) is a bug, No space left on device"))
    fail_at_the_seventh(monkeypatch, bug)
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*decode_or_fail.*is a bug"):
        read(files)


@linux
def test_a_worker_that_dies_between_two_batches_is_told_at_the_next_not_where_training_stands(files):
    source = streaming(files, workers=2)
    batches = source.batches(micro_batches())
    next(batches)
    victim = source._pool._processes[0].pid
    os.kill(victim, signal.SIGKILL)
    os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)  # here torch alone raises RuntimeError
    with pytest.raises(UserError, match=f"process {victim}, .* was killed"):
        list(batches)


@linux
def test_a_run_whose_worker_is_killed_ends_with_one_line_and_no_process_stays(tree, tmp_path):
    process = training(tree, tmp_path, "--epochs", 10000)
    (victim, *_) = workers_of(process)
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    own = [line for line in err.splitlines() if "DataLoader" not in line and "check_worker_number" not in line]
    assert len(own) == 1 and own[0].startswith(f"main.py: process {victim}, which reads images, was killed"), err


# ------------------------------------------------------------------------------------------ shared memory


SMALL_SHARED_MEMORY = f"""
import ctypes, runpy, subprocess, sys
if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
    sys.exit("no mount namespace")
for words in "--make-rprivate /", "-t tmpfs -o size=1024k tmpfs /dev/shm":
    subprocess.run(["mount", *words.split()], check=True)
sys.argv[0] = {str(ROOT / "main.py")!r}
sys.path[0] = {str(ROOT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def small_shared_memory(tmp_path):
    """A program: main.py where /dev/shm holds a megabyte; skipped where such a file system may not be mounted."""
    may = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=1024k tmpfs /dev/shm"]
    try:
        subprocess.run(may, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small /dev/shm here: {error}")
    (tmp_path / "program.py").write_text(SMALL_SHARED_MEMORY)
    return tmp_path / "program.py"


@linux
def test_too_little_shared_memory_is_one_line_that_advises_and_without_workers_none_is_needed(
    tree, tmp_path, small_shared_memory
):
    # A network whose checkpoints are small also for images of this size.
    flags = "--arch timm/test_resnet --image-size 128 --batch-size 24 --epochs 1 --no-progress --picture-epochs off"
    flags = ["--dataname", "folder", "--datapath", tree, *flags.split()]
    runs = {
        kind: Forked(*flags, *more, "--output", tmp_path / kind, program=small_shared_memory)
        for kind, more in {
            "streaming": ["--workers", 2],
            "in place": ["--workers", 0],
            "decoding": ["--workers", 2, "--loader", "resident", "--augment", "flip"],
        }.items()
    }
    ends = {kind: (*run.communicate(timeout=200), run.returncode) for kind, run in runs.items()}
    _, err, code = ends["streaming"]
    (line,) = [line for line in err.splitlines() if line.startswith("main.py: ")]
    assert code == 2 and "Traceback" not in err
    assert f"{NO_ROOM} 1,179,648 bytes" in line and "--shm-size" in line and "--workers 0" in line
    for kind in ("in place", "decoding"):
        assert ends[kind][2] == 0, ends[kind]


# ------------------------------------------------------------------------------------------ signals


def training(tree, output, *flags):
    """A run of two kinds of images, started and gone so far that its workers read."""
    line = ["--dataname", "folder", "--datapath", tree, "--arch", "fc", "--image-size", 16, "--batch-size", 4]
    line += ["--workers", 2, "--output", output, "--deterministic", "--no-progress", "--picture-epochs", "off", *flags]
    return Forked(*line)


def workers_below(pid):
    """The data workers of a process; torch gives them their name."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                found += [int(child)] * (Path(f"/proc/{child}/comm").read_text() == "pt_data_worker\n")
    return found


def workers_of(process):
    """The two workers that train and the two that validate, once all of them have begun."""
    wait_for(lambda: len(workers_below(process.ranks[0].pid)) == 4 or process.poll() is not None)
    assert process.poll() is None, process.communicate(0)
    return workers_below(process.ranks[0].pid)


@linux
def test_signals_that_reach_the_workers_do_not_disturb_the_run(tree, tmp_path):
    undisturbed, disturbed = (training(tree, tmp_path / kind, "--epochs", 6) for kind in "ab")
    workers = workers_of(disturbed)
    sent = 0
    deadline = time.monotonic() + 100
    while disturbed.poll() is None and time.monotonic() < deadline:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, number)
                    sent += disturbed.poll() is None
        time.sleep(0.05)
    ends = [process.communicate(timeout=200) for process in (undisturbed, disturbed)]
    assert [process.returncode for process in (undisturbed, disturbed)] == [0, 0], ends
    assert sent >= 3 * len(workers)
    runs = [next((tmp_path / kind).glob("folder/fc/*")) for kind in "ab"]
    assert differences(*runs) == []


@linux
def test_a_run_that_ends_by_itself_does_not_wait_for_workers_that_had_a_signal(tree, tmp_path):
    process = training(tree, tmp_path, "--max-steps", 20, "--epochs", 1000)
    workers = workers_of(process)
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 0 and not {*workers} & processes().keys()


@linux
def test_no_worker_outlives_a_training_process_that_is_killed(tree, tmp_path):
    process = training(tree, tmp_path, "--epochs", 10000)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    assert_gone(workers)


POOL = """
import numpy as np
from torch.utils.data import Dataset
from utils.data.worker_pool import WorkerPool
class Arrays(Dataset):  # of far more bytes than a pipe holds
    def __getitem__(self, part):
        return np.zeros(3_000_000, dtype=np.uint8)
"""
PIPE_PROGRAM = f"""{POOL}
import time
from pathlib import Path
for _ in WorkerPool(Arrays(), 2).read(range(100)):
    Path("one").touch()
    time.sleep(1000)
"""


@linux
def test_no_worker_outlives_it_either_when_what_it_hands_over_is_not_taken(workplace):
    (workplace / "program.py").write_text(PIPE_PROGRAM)
    process = Forked(program=workplace / "program.py")
    wait_for((workplace / "one").exists)
    time.sleep(0.5)  # the pipe fills
    workers = workers_below(process.ranks[0].pid)
    process.kill()
    process.communicate()
    assert len(workers) == 2
    assert_gone(workers)


MERGED_PROGRAM = f"""{POOL}
import multiprocessing, os, signal, subprocess, sys
sys.walk = WorkerPool(Arrays(), 1, keep=True).read(range(100))  # there until the process ends
next(sys.walk)
(worker,) = multiprocessing.active_children()
os.kill(worker.pid, signal.SIGSTOP)
subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {{worker.pid}} 2>/dev/null"])
print(worker.pid)
"""


@linux
def test_a_run_ends_while_a_signal_of_another_process_waits_for_its_worker(workplace):
    (workplace / "program.py").write_text(MERGED_PROGRAM)
    process = Forked(program=workplace / "program.py")
    assert_gone([int(process.output(100))])


def assert_gone(workers):
    wait_for(lambda: not {*workers} & processes().keys(), SECONDS)
