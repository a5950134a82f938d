"""Names and paths of any kind: refused with a line, or harmless; nothing outside the output folder is written."""

import os
from pathlib import Path

import pytest

from tests.end_to_end.processes import load
from tests.faults.small_run import FLAGS, copy_of, told
from tests.helpers import image_tree, trained

SHORT = (*FLAGS, "--max-steps", "1")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The current folder, with a neighbour that must stay as it is."""
    (tmp_path / "here").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/precious.txt").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "here"
    assert sorted(os.listdir(tmp_path)) == ["here", "outside"]
    assert os.listdir(tmp_path / "outside") == ["precious.txt"]
    assert (tmp_path / "outside/precious.txt").read_text() == "mine"


@pytest.fixture
def run(small_run, workplace, monkeypatch):
    return copy_of(small_run("--max-steps", 2), workplace, monkeypatch)


def refused(capsys, line, *words):
    code, lines = told(capsys, line)
    assert code == 2 and len([line for line in lines if "warning" not in line]) == 1, lines
    assert all(word in lines[-1] for word in words), lines


# -------------------------------------------------------------------------------------- new runs

NO_TEXT = ["\udcff", "a\0b", " "]
REFUSED = {
    "--name": ["../../x", "/etc", "..", "a/b", "a\nb", "\x1b[31m", "x" * 81, "-rf", "~", "$(touch x)", *NO_TEXT],
    "--arch": ["../../outside", "/tmp/x", "a/../b", "timm/../x", "x" * 5000, "a\nb", *NO_TEXT],
    **dict.fromkeys(("--output", "--datapath", "--resume", "--weights", "--optimizer"), NO_TEXT),
}


@pytest.mark.parametrize("flag", REFUSED)
def test_a_value_that_is_no_text_or_a_path_where_a_plain_name_must_be_is_refused(workplace, capsys, flag):
    for value in REFUSED[flag]:
        refused(capsys, (*SHORT, f"{flag}={value}"), flag)
    assert os.listdir(workplace) == []


def output_of_links(where, target):
    def make():
        place = Path("out", where)
        place.parent.mkdir(parents=True)
        place.symlink_to(target)

    return make


OUTPUTS = {
    "a dangling link": lambda: os.symlink("../outside/nothing", "out"),
    "a link to itself": lambda: os.symlink("out", "out"),
    "a file": Path("out").touch,
    "a pipe": lambda: os.mkfifo("out"),
    "a device": lambda: "/dev/null",
    "a place in /proc": lambda: "/proc/self/out",
    "too long": lambda: "x" * 300,
    "far too long": lambda: "x/" * 5000,
    "data folder leads out": output_of_links("digits", "../../outside"),
    "network's folder leads out": output_of_links("digits/fc", "../../../outside"),
    "network's folder dangles": output_of_links("digits/fc", "../../../outside/nothing"),
    "network's folder loops": output_of_links("digits/fc", "fc"),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_cannot_be_or_leads_out_is_refused(workplace, capsys, output):
    place = OUTPUTS[output]() or "out"
    for more in ((), ("--resume", "auto")):
        refused(capsys, (*SHORT, "--output", place, *more), "--output")


def test_an_output_that_is_a_link_to_a_folder_is_that_folder(workplace, capsys):
    (workplace / "disk").mkdir()
    os.symlink("disk", "out")
    assert told(capsys, (*SHORT, "--output", "out")) == (0, [])
    assert len(list(Path("disk/digits/fc").iterdir())) == 1


# --------------------------------------------------------------------------- runs to continue


STRANGE = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a dangling link": lambda path: os.symlink("nothing", path),
    "a link to itself": lambda path: os.symlink(os.path.basename(path), path),
    "a link to a device": lambda path: os.symlink("/dev/zero", path),
    "a link to another folder": lambda path: os.symlink("/", path),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_is_refused_as_a_checkpoint_at_once(workplace, capsys, kind):
    STRANGE[kind]("strange.pt")
    for flags in ("--resume", "--weights", "--evaluate --resume", "--evaluate --weights"):
        refused(capsys, (*SHORT, *flags.split(), "strange.pt"), "strange.pt")
    assert os.listdir(workplace) == ["strange.pt"]


def test_a_path_that_no_checkpoint_can_have_is_refused(workplace, capsys):
    for path in ("/dev/zero", "/dev/stdin", "/proc/self/mem", "x" * 5000, "a/" * 3000, "/dev/full"):
        refused(capsys, (*SHORT, "--resume", path))


PLACES = (
    "checkpoints/last.pt",
    "checkpoints/best.pt",
    "config.yaml",
    "log.txt",
    "metrics.npz",
    "checkpoints/manifest.json",
)


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "a folder"])
def test_a_run_with_a_file_that_is_none_is_refused(run, capsys, kind):
    """Whatever is not a plain file may lead anywhere."""
    never_ends = kind in ("a pipe", "a link to a device")
    for place in PLACES if never_ends else PLACES[:1]:
        kept = (run / place).rename(run.parent / "kept")
        STRANGE[kind](run / place)
        code, lines = told(capsys, ("--device", "cpu", "--no-progress", "--resume", run))
        assert code == 2 and f"{run / place}: is a" in lines[-1] and "remove it" in lines[-1]
        if never_ends:
            told(capsys, (*SHORT, "--resume", "auto"))  # and does not hang
        (run / place).unlink()
        kept.rename(run / place)


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_in_a_files_place_harms_nobody(run, capsys, place):
    (run / place).unlink()
    (run / place).mkdir()
    code, lines = told(capsys, ("--device", "cpu", "--no-progress", "--resume", run))
    assert code in (0, 2) and len([line for line in lines if "warning" not in line]) == (code == 2), lines


@pytest.mark.parametrize("name", ["log.txt", ".metrics.csv.tmp", "checkpoints/.next.tmp", "checkpoints/.next.copy"])
def test_a_link_to_a_file_elsewhere_is_not_written_through(run, workplace, capsys, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(workplace.parent / "outside/precious.txt")
    refused(capsys, ("--device", "cpu", "--resume", run), str(run / name), "is a link")


def test_a_current_folder_whose_name_is_no_text_does_not_matter(workplace, monkeypatch, capsys):
    os.mkdir(b"caf\xe9")
    monkeypatch.chdir(os.fsdecode(b"caf\xe9"))
    assert told(capsys, SHORT) == (0, [])
    (run,) = Path("runs/digits/fc").iterdir()
    assert load(run, "final.pt")["progress"]["step"] == 1
    assert told(capsys, (*FLAGS, "--resume", "auto")) == (0, [])


# -------------------------------------------------------------------------------------------- data


@pytest.fixture
def data(workplace):
    return image_tree(workplace / "data", {"train": 4, "val": 4})


ON_DATA = (*SHORT, "--dataname", "folder", "--datapath", "data", "--image-size", "8", "--workers", "0")
LINKS = {
    "class holds its parent": ("train/a/up", "../.."),
    "class is a loop": ("train/c", "c"),
    "image dangles": ("train/a/9.png", "nothing.png"),
    "image is a device": ("train/a/9.png", "/dev/zero"),
}


@pytest.mark.parametrize("link", LINKS)
def test_links_in_the_data_that_loop_or_dangle_end_in_a_line_or_a_run(data, capsys, link):
    place, target = LINKS[link]
    os.symlink(target, data / place)
    code, lines = told(capsys, ON_DATA)
    assert code in (0, 2) and (code == 0 or (lines and all("warning" in line for line in lines[:-1]))), lines


def test_classes_whose_names_are_no_text_are_trained_and_told_apart(data, capsys):
    for split in ("train", "val"):
        for old, new in ((b"a", b"caf\xe8"), (b"b", b"caf\xe9")):
            os.rename(os.fsencode(data / split / os.fsdecode(old)), os.fsencode(data / split / os.fsdecode(new)))
    assert told(capsys, (*ON_DATA, "--picture-epochs", "last"))[0] == 0
    (events,) = Path("runs/folder").rglob("events.out.tfevents.*")
    content = events.read_bytes()
    assert all(b"Precision_Recall/caf\\udce%d" % number in content for number in (8, 9))


def test_a_pipe_named_like_an_image_is_passed_over(data, capsys):
    """Reading one waits until somebody writes to it."""
    os.mkfifo(next((data / "train").iterdir()) / "pipe.jpg")
    assert told(capsys, ON_DATA)[0] == 0


def test_a_folder_in_place_of_the_settings_is_named_with_advice(tmp_path, capsys):
    run = trained(tmp_path, "--arch", "fc", "--epochs", 1, "--max-steps", 1)
    (run / "config.yaml").unlink()
    (run / "config.yaml").mkdir()
    capsys.readouterr()
    line = ("--device", "cpu", "--resume", run, "--resume-override", "--epochs", 2, "--max-steps", 2)
    said = f"{run / 'config.yaml'}: cannot be read or written (Is a directory); move it away"
    refused(capsys, line, said)
