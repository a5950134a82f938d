"""Row 20: one process works longer than --timeout before training: the others wait, and still notice when it is lost.

What is cut half-way is taken up again and never taken for whole.
"""

import hashlib
import os
import re
import shutil
import signal
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torchvision
from torchvision.datasets import imagenet

from tests.end_to_end import forked
from tests.end_to_end.forked import ROOT, Forked
from tests.end_to_end.processes import FINAL_LINE
from tests.faults import imagenet_archives as made_up
from tests.helpers import image_tree, wait_for
from tests.utils.data.test_readers import some, write_idx
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.formats import archives, class_folders
from utils.data.splits import prepare
from utils.loop.stop_signals import TRY_AGAIN

CPU = torch.device("cpu")

TIMEOUT_SECONDS = 2
SECONDS = 2 * TIMEOUT_SECONDS  # of the long work
FLAGS = ("--arch", "fc", "--max-steps", 2, "--no-progress", "--picture-epochs", "off", "--timeout", TIMEOUT_SECONDS)
LOST = r"main\.py: rank \d has lost the other processes \(.+\); .*--resume auto continues"
PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import components, main
from utils.runtime import heartbeat, long_work
from utils.data import decoded as cache

def work(real):
    def called(*arguments, **options):
        if not os.path.exists("at_work"):  # of the training or the validation images one is enough
            with open("at_work", "w") as file:
                print(os.getpid(), file=file)
            time.sleep(float(os.environ["WORK_SECONDS"]))
        return real(*arguments, **options)
    return called

heartbeat.SILENCE_SECONDS = 1
long_work.LONGEST_SECONDS = float(os.environ.get("LONGEST_SECONDS", "600"))
if os.environ["WORK"] == "prepare":
    components.prepare = work(components.prepare)
else:
    cache.decode = work(cache.decode)
main.end_process(main.main(sys.argv[1:], ends_process=True))
"""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Starts a run whose data takes long: gives it and the process that is at work on it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(*flags, processes=2, work="prepare", seconds=600, **environment):
        environment |= {"WORK": work, "WORK_SECONDS": str(seconds)}
        run = Forked(*FLAGS, *flags, processes=processes, program=tmp_path / "program.py", **environment)
        at_work = tmp_path / "at_work"
        wait_for(lambda: (at_work.exists() and at_work.read_text().endswith("\n")) or run.poll() is not None)
        assert run.poll() is None, run.communicate(1)
        return run, int(at_work.read_text())

    return start


def ended(run, started):
    """Exit codes by rank, stdout, the lines on stderr, and how long it took since ``started``."""
    out, err = run.communicate(120)
    return [rank.exitcode for rank in run.ranks], out, err.splitlines(), time.monotonic() - started


@pytest.fixture
def tree(tmp_path):
    """Flags for class folders of small images."""
    data = image_tree(tmp_path / "tree", {"train": 4, "val": 4})
    return f"--dataname folder --datapath {data} --image-size 8 --loader resident --augment flip".split()


def test_the_others_wait_longer_than_the_timeout_and_it_is_said_for_whom(begin):
    run, _ = begin(seconds=SECONDS)
    codes, out, err, _ = ended(run, time.monotonic())
    assert codes == [0, 0], err
    assert FINAL_LINE.fullmatch(out.splitlines()[-1])
    preparing = [line for line in err if line.startswith("Preparing the data: ")]
    assert preparing
    assert all(re.fullmatch(r".*: \d+ s so far, waiting for rank 0(, 1)?", line) for line in preparing), err


@pytest.mark.parametrize(("work", "fault"), [("prepare", signal.SIGSTOP), ("decode", signal.SIGKILL)])
def test_a_process_that_is_lost_at_its_work_is_noticed_within_the_timeout(begin, tree, work, fault):
    run, worker = begin(*tree, work=work)
    time.sleep(1)  # for the other one to wait
    started = time.monotonic()
    os.kill(worker, fault)
    (other,) = (rank for rank in run.ranks if rank.pid != worker)
    other.join(60)
    seconds = time.monotonic() - started
    run.kill()
    _, _, err, _ = ended(run, started)
    assert other.exitcode == 1
    assert seconds < (TIMEOUT_SECONDS if fault == signal.SIGSTOP else 0) + 10
    assert [line for line in err if re.fullmatch(LOST, line)] == [line for line in err if line.startswith("main.py: ")]
    assert sum(line.startswith("main.py: ") for line in err) == 1
    assert not any("Traceback" in line for line in err)


@pytest.mark.parametrize("work", ["prepare", "decode"])
def test_a_stop_signal_ends_who_works_and_who_waits_at_once(begin, tree, work):
    run, _ = begin(*tree, work=work)
    time.sleep(1)
    started = time.monotonic()
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    codes, _, err, seconds = ended(run, started)
    assert codes == [TRY_AGAIN, TRY_AGAIN]
    assert seconds < 10
    assert [line for line in err if line.startswith("main.py: ")] == [
        "main.py: stopped by SIGTERM before or after training; --resume auto continues"
    ]


def test_work_without_an_end_is_one_line_on_all(begin):
    run, _ = begin(LONGEST_SECONDS="3")
    codes, _, err, _ = ended(run, time.monotonic())
    assert codes == [2, 2]
    (line,) = (line for line in err if line.startswith("main.py: "))
    assert re.search(r"Preparing the data: rank 0 is not done after .* hours; find out what it waits for", line)


# ------------------------------------------------------------------------- what is cut half-way


def contents(root):
    """All files of the splits below ``root``."""
    paths = (path for split in ("train", "val") for path in (root / split).rglob("*"))
    return {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Made-up archives in a folder, their sums, and what torchvision makes of them; some classes lack validation."""
    folder = tmp_path_factory.mktemp("archives")
    sums = made_up.write(folder)
    theirs = shutil.copytree(folder, tmp_path_factory.mktemp("theirs") / "unpacked")
    with pytest.MonkeyPatch.context() as patch:
        for key, entry in sums.items():
            patch.setitem(imagenet.ARCHIVE_META, key, entry)
        for split in ("train", "val"):
            imagenet.ImageNet(theirs, split, loader=None)
    return folder, sums, contents(theirs)


@pytest.fixture
def imagenet_archives(made, tmp_path, monkeypatch):
    """A copy of the archives, which torchvision takes for its own, and what it makes of them."""
    folder, sums, expected = made
    for key, entry in sums.items():
        monkeypatch.setitem(imagenet.ARCHIVE_META, key, entry)
    return shutil.copytree(folder, tmp_path / "ours"), expected


def unpack(root, log=lambda line: None):
    prepare(parse(["--dataname", "imagenet", "--datapath", str(root)]).data, log)


def unpack_and_die(root, meta, function, call):
    """In a process of its own, which is killed before the ``call``-th call of ``function`` from here on."""
    imagenet.ARCHIVE_META.update(meta)
    module, _, name = function.rpartition(".")
    module = {"archives": archives, "os": os}[module]
    calls = iter(range(1, 10**6))
    real = getattr(module, name)

    def called(*arguments):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(module, name, called)
    unpack(root)


LAST_IMAGE = made_up.CLASSES * made_up.TRAINING + made_up.VALIDATION
RENAMES = made_up.CLASSES + 2  # each class of train/, then train/ and val/ themselves


@pytest.mark.parametrize(
    "function, call",
    [
        *(("archives._write", call) for call in (made_up.TRAINING + 2, LAST_IMAGE)),
        *(("os.rename", call) for call in (RENAMES - 1, RENAMES)),
        pytest.param("archives._write", 1, marks=pytest.mark.thorough),
        pytest.param("os.rename", 2, marks=pytest.mark.thorough),
    ],
)
def test_unpacking_that_was_cut_is_taken_up_again_and_never_taken_for_whole(imagenet_archives, function, call):
    root, expected = imagenet_archives
    process = forked.server().Process(target=unpack_and_die, args=(root, dict(imagenet.ARCHIVE_META), function, call))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    for split in ("train", "val"):  # what bears the name is whole
        if (root / split).exists():
            whole = {name for name in expected if name.startswith(split)}
            assert {name for name in contents(root) if name.startswith(split)} == whole
    assert class_folders.find_splits(root) is None
    unpack(root)
    assert contents(root) == expected
    assert sorted(path.name for path in root.iterdir() if not path.is_file()) == ["train", "val"]
    assert not list(root.glob(".*"))


def test_whole_classes_are_not_unpacked_again(imagenet_archives, monkeypatch):
    root, expected = imagenet_archives
    real = archives._write
    names = []

    def write(opened, member, folder):
        if len(names) == 2 * made_up.TRAINING:
            raise KeyboardInterrupt
        names.append(member.name)
        real(opened, member, folder)

    monkeypatch.setattr(archives, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        unpack(root)
    monkeypatch.setattr(archives, "_write", lambda *all: (names.append(all[1].name), real(*all)))
    unpack(root)
    assert contents(root) == expected
    assert len(names) == len(set(names)) == LAST_IMAGE


def test_who_comes_second_waits_and_unpacks_nothing(imagenet_archives, monkeypatch):
    root, expected = imagenet_archives
    real = archives.claimed
    waited = []
    lines = []

    def after_another(*given):
        waited.append(given[1])
        monkeypatch.setattr(archives, "claimed", real)
        unpack(root, lines.append)  # by the other process, which has the claim
        return real(*given)

    monkeypatch.setattr(archives, "claimed", after_another)
    unpack(root, pytest.fail)
    assert waited == [f"Waiting for another process that unpacks ImageNet in {root}"] and contents(root) == expected
    assert lines[:2] == [
        f"Checking {root}/ILSVRC2012_img_train.tar (0.0 GB)",
        f"Unpacking {root}/ILSVRC2012_img_train.tar",
    ]


@pytest.mark.parametrize("left", ["val/ILSVRC2012_val_00000009.JPEG", "train/n01440764.tar"])
def test_what_torchvisions_own_unpacking_leaves_when_it_is_cut_is_not_taken_for_whole(tmp_path, left):
    image_tree(tmp_path, {"train": 1, "val": 1}, ending="jpeg")
    settings = parse(["--dataname", "imagenet", "--datapath", str(tmp_path)]).data
    (tmp_path / left).write_bytes(b"")
    with pytest.raises(UserError, match=rf"holds files beside its class folders, such as {Path(left).name}; "):
        get_data(settings, CPU)
    (tmp_path / left).unlink()
    with pytest.raises(UserError, match="2 classes where imagenet has 1000"):
        get_data(settings, CPU)


@pytest.mark.parametrize(
    "damage, message",
    [
        ("cut", r"ILSVRC2012_img_train\.tar: is damaged or not whole \(not its MD5 sum"),
        ("img_val", r"lacks ILSVRC2012_img_val\.tar, without which"),
        ("devkit", r"lacks ILSVRC2012_devkit_t12\.tar\.gz, without which"),
    ],
)
def test_an_archive_that_is_cut_or_missing_is_one_line_before_the_work(imagenet_archives, damage, message):
    root, _ = imagenet_archives
    if damage == "cut":
        path = root / "ILSVRC2012_img_train.tar"
        path.write_bytes(path.read_bytes()[:-20000])
    else:
        next(root.glob(f"*{damage}*")).unlink()
    with pytest.raises(UserError, match=message):
        unpack(root)
    assert not (root / "train").exists()


@pytest.fixture
def asked():
    """The names of the files that were asked for, in order."""
    return []


@pytest.fixture
def mnist(tmp_path, monkeypatch, asked):
    """A place from which torchvision fetches a made-up MNIST, its own MD5 sums included: gives the folder to fill."""
    shelf = tmp_path / "shelf"
    write_idx(shelf, some(30), some(20), compressed=True)
    names = [name for name, _ in torchvision.datasets.MNIST.resources]
    resources = [(name, hashlib.md5((shelf / name).read_bytes()).hexdigest()) for name in names]
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)

    class Shelf(SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path.removeprefix("/"))
            super().do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Shelf, directory=shelf)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        yield tmp_path / "data"
        server.shutdown()


@pytest.mark.parametrize("fetched", [0, 3])
@pytest.mark.parametrize("cut", ["archive", "file"])
def test_a_download_that_was_cut_is_fetched_again_and_what_is_whole_is_not(mnist, asked, fetched, cut, monkeypatch):
    settings = parse(["--dataname", "mnist", "--datapath", str(mnist), "--download"]).data
    prepare(settings, print)
    whole = get_data(settings, CPU)
    raw = mnist / "MNIST" / "raw"
    order = [name for name, _ in torchvision.datasets.MNIST.resources]
    for name in order[fetched:]:
        archive = raw / name
        file = raw / name.removesuffix(".gz")
        if name != order[fetched]:
            archive.unlink()
            file.unlink()
        elif cut == "archive":
            archive.write_bytes(archive.read_bytes()[:20])
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError):
        get_data(settings, CPU)
    asked.clear()
    prepare(settings, print)
    assert get_data(settings, CPU).fingerprint == whole.fingerprint
    missing = order[fetched:]  # an archive that is whole is unpacked again
    assert [*dict.fromkeys(asked)] == (missing if cut == "archive" else missing[1:])  # torchvision asks twice for each
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", None)
    prepare(settings, print)
