"""A checkpoint that was cut or changed is noticed: a folder's one before is taken, a file by its name is refused."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end.processes import differences, load
from tests.faults.small_run import FLAGS, copy_of, told
from utils.checkpoint import resume
from utils.config.settings import UserError

STEPS, ALL = 4, 10
OFTEN = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def trained(small_run):
    """A run cut within its first epoch, with a checkpoint a step: last.pt and previous.pt differ."""
    return small_run("--save-every-steps", 1, "--max-steps", STEPS)


@pytest.fixture(scope="module")
def whole(small_run):
    """The run that was not cut before its last step."""
    return small_run("--deterministic", "--max-steps", ALL)


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    return copy_of(trained, tmp_path, monkeypatch)


def damage(path, place, mask=0, cut=False):
    """Change one byte at ``place`` (a share of the length), or cut the file there."""
    data = bytearray(path.read_bytes())
    at = min(int(place * len(data)), len(data) - 1)
    data[at] ^= mask
    path.unlink()  # not in place: the files of a run share bytes
    path.write_bytes(data[:at] if cut else data)


def restored(trained, run, name):
    path = run / "checkpoints" / name
    path.unlink(missing_ok=True)
    shutil.copyfile(trained / "checkpoints" / name, path)
    return path


def same(state, run, name):
    saved = load(run, name)
    return state["progress"] == saved["progress"] and all(
        (value == state["model"][key]).all() for key, value in saved["model"].items()
    )


@OFTEN
@given(place=st.floats(0, 1), mask=st.integers(1, 255), cut=st.booleans())
def test_a_checkpoint_that_differs_in_any_byte_is_refused_by_name_and_passed_over_in_a_folder(
    trained, run, place, mask, cut
):
    last = restored(trained, run, "last.pt")
    damage(last, place, mask, cut)
    with pytest.raises(UserError, match=r"last\.pt: is damaged"):
        resume.from_path(last, print)
    heard = []
    found = resume.from_path(run, heard.append)
    assert found.path.name == "previous.pt" and same(found.read(), trained, "previous.pt")
    assert len(heard) == 1 and "last.pt: is damaged" in heard[0]


@OFTEN
@given(place=st.floats(0, 1), mask=st.integers(1, 255), cut=st.booleans())
def test_without_a_manifest_no_damage_to_a_checkpoint_becomes_other_weights(trained, run, place, mask, cut):
    """What the file's own sums do not cover is its directory and padding: then it loads as it was, or not at all."""
    (run / "checkpoints/manifest.json").unlink(missing_ok=True)
    last = restored(trained, run, "last.pt")
    damage(last, place, mask, cut)
    found = resume.from_path(run, lambda line: None)
    assert same(found.read(), trained, found.path.name)


@OFTEN
@given(place=st.floats(0, 1), mask=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_manifest_never_keeps_a_run_from_going_on(trained, run, place, mask, cut):
    damage(restored(trained, run, "manifest.json"), place, mask, cut)
    heard = []
    found = resume.from_path(run, heard.append)
    assert found.path.name in ("last.pt", "previous.pt") and same(found.read(), trained, found.path.name)
    assert found.path.name == "last.pt" or heard


@pytest.mark.parametrize("way", ["folder", "auto"])
def test_going_on_from_the_one_before_is_told_and_ends_in_the_same_bits(run, whole, capsys, way):
    damage(run / "checkpoints/last.pt", 0.5, 1)
    line = ("--resume", run) if way == "folder" else (*FLAGS, "--resume", "auto")
    code, lines = told(capsys, (*line, "--device", "cpu", "--deterministic", "--max-steps", ALL))
    assert code == 0 and sum("last.pt: is damaged" in line for line in lines) == 1
    assert len(list(run.parent.iterdir())) == 1
    assert differences(whole, run) == []
    assert "warning: " + lines[0].removeprefix("main.py: warning: ") in (run / "log.txt").read_text()
