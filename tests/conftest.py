"""What holds for all tests."""

import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile

import hypothesis
import pytest
from filelock import FileLock

# The tests' tensors are small: several threads would wait for each other for longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch keeps compiled kernels for all processes of a user. Those for the processor's own vectors corrupt the memory of a
# process that ATEN_CPU_CAPABILITY holds to shorter ones, and the other way round.
CAPABILITY = os.environ.get("ATEN_CPU_CAPABILITY", "own")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/compiled-by-tests-{CAPABILITY}")
# For deterministic algorithms on a GPU; torch may read it once, at the first matrix product of any test.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# A shell's & has its commands ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A property holds or not, however busy the machine is.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")
gc.disable()  # imports and collected tests are millions of objects, to be gone through again and again for no garbage


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Workers share what the server of tests/end_to_end/forked.py imports for seconds."""
    from execnet import gateway_io

    from tests.end_to_end import forked

    gateway_io.Popen2IOMaster = forked.Worker


def pytest_collection_finish():
    """Spare tests what takes longer than they do, and look for garbage only among what they make.

    Every 10,000 objects, not every 700: a test's network, parser and settings are thousands, and in use.
    """
    if "torch" in sys.modules:
        import tests.quicker  # noqa: F401 - for what it changes

    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_runtest_setup(item):
    """Tests with the mark ``gpu`` need a GPU; ``pytest -m gpu`` runs these alone."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def own_parts_are_forgotten():
    """What a test's --plugin has added would be among the names that later ones know."""
    yield
    if "utils.config.plugins" in sys.modules:
        sys.modules["utils.config.plugins"].load(())


@pytest.fixture(autouse=True)
def open_shards_are_forgotten():
    """Up to 9.1, pytest names a test's folder like an earlier one's, from which this process may have shards open."""
    yield
    if "utils.data.formats.shards.members" in sys.modules:
        sys.modules["utils.data.formats.shards.members"].open_shard.cache_clear()


@pytest.fixture
def muon_in_bf16(monkeypatch):
    """Muon orthogonalises in timm's format whatever the CPU has units for."""
    monkeypatch.setattr("utils.optim.muon.has_bf16_units", lambda: True)


@pytest.fixture(autouse=True)
def signals_are_handled_as_before():
    """A handler that a test leaves behind reaches every process that a later test forks, which then may not end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before, f"the test left other handlers: {dict(zip(numbers, after, strict=True))}"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and gives its path as text."""

    def write(content, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Function of flags: the folder of such a small run, trained once for all files and xdist workers. Only to copy."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder below the one of all
        shared = shared.parent

    def trained(*flags):
        from tests.faults.small_run import begin

        place = shared / f"run_{hashlib.sha1(repr(flags).encode()).hexdigest()[:8]}"
        with FileLock(f"{place}.lock"):
            if not (place / "trained").exists():
                shutil.rmtree(place, ignore_errors=True)  # of a training that failed
                begin(place, *flags)
                (place / "trained").touch()
        (folder,) = place.glob("*/*/*")
        return folder

    return trained
