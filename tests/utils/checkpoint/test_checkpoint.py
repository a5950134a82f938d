"""A checkpoint is whole or not there, is verified when it is read, and holds nothing that can run."""

import copy
import hashlib
import itertools
import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.faults.small_run import Attack
from tests.helpers import mistakes_of
from utils.checkpoint import checkpoint
from utils.checkpoint.checkpoint import Checkpointer
from utils.checkpoint.progress import Progress
from utils.config.settings import UserError
from utils.record.summary import versions


def state(step=1, **extra):
    return {
        "format": checkpoint.FORMAT,
        "arch": "linear",
        "model": {"weight": torch.full((1000,), float(step))},
        "ema": None,
        "optimizer": {"state": {}, "param_groups": [{"params": [0]}]},
        "scaler": {},
        "progress": Progress(step=step).state(),
        "classes": ["a", "b"],
        "preprocessing": {},
        "settings": {},
        "versions": versions(),
        "fingerprint": "",
        **extra,
    }


def save(saver, *arguments):
    """Save and wait until it is on the disk."""
    saver.save(*arguments)
    saver.wait()


@pytest.fixture
def saver(tmp_path):
    return Checkpointer(tmp_path)


def steps(folder):
    return {path.name: checkpoint.load(path)["progress"]["step"] for path in folder.glob("*.pt")}


def test_the_newest_of_each_name_and_the_last_but_one_are_kept(saver, tmp_path):
    save(saver, state(0), "initial")
    for step in (1, 2, 3):
        save(saver, state(step), *(["best"] if step == 2 else []), "last")
    assert steps(tmp_path) == {"initial.pt": 0, "best.pt": 2, "previous.pt": 2, "last.pt": 3}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


def is_killed(call, saver, *saved):
    """Whether a save comes to more operations on files than ``call``, after which it is killed."""
    calls = itertools.count()

    def killing(original):
        def call_or_die(*arguments, **options):
            if next(calls) >= call:
                raise Killed
            return original(*arguments, **options)

        return call_or_die

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "link", "fsync"):
            patch.setattr(os, name, killing(getattr(os, name)))
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        try:
            save(saver, *saved)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("names", [["last"], ["final", "best", "last"]], ids=" ".join)
def test_a_kill_between_any_two_file_operations_leaves_the_newest_or_the_one_before(saver, tmp_path, names):
    """Each os.replace, os.link and os.fsync in turn is the last thing that the process does."""
    for step in (1, 2):
        save(saver, state(step), "last")
    for call in itertools.count():
        folder = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}_{call}"))
        killed = is_killed(call, Checkpointer(folder), state(3), *names)
        found = checkpoint.newest(folder, pytest.fail)[1]["progress"]["step"]
        assert found in ((2, 3) if killed else (3,)), call
        if "final" in names and found == 3:
            assert (folder / "final.pt").exists(), "of a finished run, which is not trained again"
        save(Checkpointer(folder), state(4), "last")  # and the next save works
        assert checkpoint.newest(folder, pytest.fail)[1]["progress"]["step"] == 4
        if not killed:
            break
    assert call > 10, "each was tried"


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_called_damaged(saver, tmp_path, monkeypatch):
    save(saver, state(1), "last")
    replaced = []

    def meanwhile(path):
        if (
            path.name == "last.pt" and len(replaced) < 2
        ):  # twice in a row, between the manifest's reading and the file's
            replaced.append(path)
            save(saver, state(1 + len(replaced)), "last")
        return checkpoint_sha256(path)

    checkpoint_sha256 = checkpoint.sha256
    monkeypatch.setattr(checkpoint, "sha256", meanwhile)
    warnings = []
    path, found = checkpoint.newest(tmp_path, warnings.append)
    assert (path.name, found["progress"]["step"], warnings) == ("last.pt", 3, [])


# ------------------------------------------------------------------------------------ writing


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_the_manifest_holds_the_sha256_of_each_checkpoint(saver, tmp_path):
    for step, names in enumerate((["initial"], ["last"], ["best", "last"], ["last", "final"])):
        save(saver, state(step), *names)
        assert manifest(tmp_path) == {"sha256": {path.name: [digest(path)] for path in tmp_path.glob("*.pt")}}
    assert sorted(manifest(tmp_path)["sha256"]) == ["best.pt", "final.pt", "initial.pt", "last.pt", "previous.pt"]


def test_a_temporary_file_that_cannot_be_removed_is_left(saver, tmp_path, monkeypatch):

    def unlink(path, missing_ok=False):
        if path.suffix == ".tmp" and path.exists():
            raise PermissionError(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    save(saver, state(), "last")
    assert steps(tmp_path)["last.pt"] == 1


def test_what_a_kill_left_while_names_were_given_is_not_written_into(tmp_path):
    saver = Checkpointer(tmp_path)
    save(saver, state(1), "best", "last")
    os.link(tmp_path / "best.pt", tmp_path / ".next.tmp")
    save(saver, state(2), "last")
    assert steps(tmp_path) == {"best.pt": 1, "previous.pt": 1, "last.pt": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "last.pt", "manifest.json", "previous.pt"]


def test_the_digest_of_a_large_file_is_that_of_all_its_bytes(tmp_path):
    content = bytes(range(256)) * 4096 * 3 + b"end"  # three blocks and a bit
    (tmp_path / "large").write_bytes(content)
    assert checkpoint.sha256(tmp_path / "large") == hashlib.sha256(content).hexdigest()


def test_each_file_is_on_the_disk_before_it_is_renamed_and_the_manifest_admits_what_comes_before_it_comes(
    saver, tmp_path, monkeypatch
):
    save(saver, state(1), "last")
    one = digest(tmp_path / "last.pt")
    done = []
    admitted = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "replace")}

    def fsync(descriptor):
        found = os.fstat(descriptor)
        (path,) = (path for path in (tmp_path, *tmp_path.iterdir()) if path.stat().st_ino == found.st_ino)
        whole = path.is_dir() or path.read_bytes()[-2:] in (b"\n}", b"\0\0")  # nothing waits in Python's buffer
        done.append(f"fsync {path.name}" if path != tmp_path else "fsync folder")
        assert whole
        real["fsync"](descriptor)

    def renaming(name):
        def rename(source, target):
            done.append(f"{name} {Path(source).name} {Path(target).name}")
            admitted.append(manifest(tmp_path)["sha256"])
            real[name](source, target)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", renaming("link"))
    monkeypatch.setattr(os, "replace", renaming("replace"))
    save(saver, state(2), "last")
    to_manifest = ["fsync .manifest.json.tmp", "replace .manifest.json.tmp manifest.json", "fsync folder"]
    renames = ["link .next.tmp .next.copy", "replace last.pt previous.pt", "replace .next.copy last.pt"]
    assert done == ["fsync .next.tmp", *to_manifest, *renames, "fsync folder", *to_manifest]
    two = digest(tmp_path / "last.pt")
    assert one != two
    assert admitted[0] == {"last.pt": [one]}
    assert admitted[1:] == [{"last.pt": [two, one], "previous.pt": [one]}] * 4


def test_checkpoints_of_the_same_moment_share_their_bytes_and_are_copies_where_links_cannot_be(
    saver, tmp_path, monkeypatch
):
    save(saver, state(1), "best", "last")
    assert (tmp_path / "best.pt").samefile(tmp_path / "last.pt")
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(1, "Operation not permitted")))
    save(saver, state(2), "best", "last")
    assert not (tmp_path / "best.pt").samefile(tmp_path / "last.pt")
    assert steps(tmp_path) == {"best.pt": 2, "last.pt": 2, "previous.pt": 1}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_that_was_removed_is_made_again_and_said_and_one_that_is_gone_as_a_whole_is_no_full_disk(tmp_path):
    lines = []
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    saver = Checkpointer(folder, warn=lines.append)
    save(saver, state(1), "best", "last")
    shutil.rmtree(folder)
    save(saver, state(2), "last")
    assert steps(folder) == {"last.pt": 2} and checkpoint.newest(folder, lines.append)[0] == folder / "last.pt"
    (line,) = lines
    assert line.startswith(
        f"{folder} was removed while the run was writing there, with all its checkpoints; it is made"
    )
    (tmp_path / "run").rename(tmp_path / "new place")
    assert mistakes_of(save, saver, state(3), "last") == [
        f"--output: {folder} was removed or renamed while the run was writing there; "
        "give its new place to --resume, or begin the run anew"
    ]


@pytest.mark.parametrize(
    ("name", "advice"),
    [("initial", ""), ("last", "; the checkpoints before it are whole, and --resume continues")],
)
def test_what_went_wrong_in_a_save_is_said_by_the_next_once_and_the_checkpoint_before_stays(
    saver, tmp_path, monkeypatch, name, advice
):
    save(saver, state(1), name)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", Mock(side_effect=OSError(28, "No space left on device")))
        saver.save(state(2), name)
        saver._writing.exception()  # waits
    assert saver.failed and steps(tmp_path) == {f"{name}.pt": 1}
    assert len(list(tmp_path.iterdir())) == 2, "a checkpoint and the manifest; no temporary file"
    line = f"--output: cannot write {tmp_path / name}.pt (No space left on device): free some space{advice}"
    assert mistakes_of(saver.save, state(2), name) == [line]
    assert not saver.failed
    save(saver, state(3), name)
    assert steps(tmp_path)[f"{name}.pt"] == 3


def within_torchs(number):
    """An error as torch raises it while it handles the system's."""
    error = RuntimeError("[enforce fail at inline_container.cc:664]")
    error.__context__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("error", "reason", "advice"),
    [
        (OSError(28, "No space left on device"), "No space left on device", "free some space"),
        (OSError(122, "Disk quota exceeded"), "Disk quota exceeded", "free some space"),
        (OSError(13, "Permission denied"), "Permission denied", "let this process write there"),
        (OSError("no number"), "no number", "free some space"),
        (RuntimeError("torch's\nown   words"), "torch's own words", "free some space"),
        (within_torchs(28), "No space left on device", "free some space"),
    ],
)
def test_the_reason_of_a_failed_write_is_the_systems_if_there_is_one_and_what_helps_depends_on_it(
    tmp_path, monkeypatch, error, reason, advice
):
    monkeypatch.setattr(torch, "save", Mock(side_effect=error))
    line = f"--output: cannot write {tmp_path}/initial.pt ({reason}): {advice}"
    assert mistakes_of(save, Checkpointer(tmp_path), state(1), "initial") == [line]


def test_a_copy_is_complete_before_it_is_written(saver, monkeypatch):
    done = []
    written = torch.save
    monkeypatch.setattr(saver._snapshot, "take", lambda state: (state, lambda: done.append("complete")))
    monkeypatch.setattr(torch, "save", lambda *arguments: (done.append("written"), written(*arguments)))
    save(saver, state(1), "last")
    assert done == ["complete", "written"]


def test_a_save_leaves_no_file_open(saver):
    save(saver, state(1), "last")
    before = len(os.listdir("/dev/fd"))
    for step in (2, 3):
        save(saver, state(step), "best", "last")
    assert len(os.listdir("/dev/fd")) == before


# ------------------------------------------------------------------------------------ reading


def test_what_is_no_checkpoint_is_told_as_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, words in (
        (".", "is a folder; give a file in it"),
        ("none.pt", "no such checkpoint"),
        ("pipe", "is not a file"),
        ("list.pt", r"is not a checkpoint \(it holds a list\)"),
    ):
        with pytest.raises(UserError, match=f"^{tmp_path / name}: {words}$"):
            checkpoint.load(tmp_path / name)


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(13, "Permission denied"), "Permission denied"), (OSError("odd"), "odd")]
)
def test_a_file_that_the_system_does_not_give_is_told_with_its_reason(tmp_path, monkeypatch, error, reason):
    torch.save(state(), tmp_path / "some.pt")
    for function in ("sha256", "refuse_swollen"):
        (tmp_path / "manifest.json").write_text('{"sha256": {"some.pt": ["0"]}}' if function == "sha256" else "{}")
        with monkeypatch.context() as patch, pytest.raises(UserError, match=rf"some\.pt: cannot be read \({reason}\)"):
            patch.setattr(checkpoint, function, Mock(side_effect=error))
            checkpoint.load(tmp_path / "some.pt")
    with monkeypatch.context() as patch, pytest.raises(UserError, match=rf"cannot be read \({reason}\)"):
        patch.setattr(torch, "load", Mock(side_effect=error))
        checkpoint.load(tmp_path / "some.pt")


def changed(path, **options):
    """``path`` as an archive of the same parts written with other ``options``."""
    with zipfile.ZipFile(path) as archive:
        parts = [(part.filename, archive.read(part)) for part in archive.infolist()]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in parts:
            archive.writestr(name, content)


def test_compressed_parts_are_refused_and_plain_ones_of_another_program_are_read(tmp_path):
    torch.save(state(), tmp_path / "some.pt")
    changed(tmp_path / "some.pt")
    assert checkpoint.load(tmp_path / "some.pt")["arch"] == "linear"
    changed(tmp_path / "some.pt", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="safely: it holds compressed parts, which torch.save never writes; give ano"):
        checkpoint.load(tmp_path / "some.pt")


def test_parts_that_overlap_are_refused(tmp_path):
    """As in zip bombs: many entries of the directory point to the same bytes."""
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", bytes(10_000))
        archive.filelist += [copy.copy(archive.filelist[0]) for _ in range(9)]
    with pytest.raises(UserError, match="it holds compressed parts"):
        checkpoint.load(path)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_without_a_manifest_damage_is_found_by_the_files_own_crc(tmp_path):
    torch.save(state(), tmp_path / "some.pt")
    flip(tmp_path / "some.pt", (tmp_path / "some.pt").read_bytes().index(b"\0\0\x80?\0\0\x80?"))  # of the weights
    with pytest.raises(UserError, match=r"some\.pt: is damaged \(its own CRC-32 does not match\); use another$"):
        checkpoint.load(tmp_path / "some.pt")


def test_the_manifests_digest_and_one_that_is_asked_for_decide(saver, tmp_path):
    save(saver, state(), "last")
    path = tmp_path / "last.pt"
    own = digest(path)
    other = "0" * 64
    assert checkpoint.load(path, own)["arch"] == "linear"
    (tmp_path / "manifest.json").write_text(json.dumps({"sha256": {"last.pt": [other, own]}}))
    assert checkpoint.load(path)["arch"] == "linear"
    with pytest.raises(UserError, match=r"last\.pt: is no longer the file"):
        checkpoint.load(path, other)
    (tmp_path / "manifest.json").write_text(json.dumps({"sha256": {"last.pt": [other]}}))
    assert checkpoint.load(path, own)["arch"] == "linear"
    with pytest.raises(UserError, match=r"last\.pt: is damaged \(its SHA-256 is not that in manifest\.json\)"):
        checkpoint.load(path)


def test_what_a_hostile_file_wanted_to_run_is_named_and_other_trash_is_not_ours(tmp_path):
    torch.save({"model": Attack(tmp_path)}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"safely: it holds GLOBAL _?io\.open; give another$"):
        checkpoint.load(tmp_path / "evil.pt")
    for trash in (b"", b"PK", b"PK\x03\x04 and more", b"nothing that torch knows"):
        (tmp_path / "trash.pt").write_bytes(trash)
        with pytest.raises(UserError, match=r"safely: it is damaged, or not a file of torch\.save; give another$"):
            checkpoint.load(tmp_path / "trash.pt")


def test_a_file_as_torch_wrote_them_before_1_6_is_read(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert checkpoint.load(tmp_path / "old.pt")["weight"].tolist() == [1, 1]


def test_reading_warns_of_nothing(tmp_path, recwarn, monkeypatch):
    torch.save(state(), tmp_path / "some.pt")
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *paths, **options: (warnings.warn("x", stacklevel=1), load(*paths, **options))[1]
    )
    checkpoint.load(tmp_path / "some.pt")
    assert not recwarn.list


def written(path, content):
    """A checkpoint that holds what its own inventory names."""
    torch.save({**content, "contents": checkpoint.inventory(content)}, path)
    return path


def test_what_a_run_cannot_continue_from_is_told_part_by_part(tmp_path):
    path = tmp_path / "some.pt"
    assert checkpoint.load_run(written(path, state()))["arch"] == "linear"
    told = []
    for content in (
        state(format=3),
        {key: value for key, value in state().items() if key in ("format", "arch", "model", "scaler")},
        {key: value for key, value in state().items() if key not in ("format", "arch", "ema", "model", "scaler")},
        state(model=[], ema=5, optimizer=3, scaler=[], classes={}, settings=[]),
        state(progress=Progress(step=-1).state()),
    ):
        (line,) = mistakes_of(checkpoint.load_run, written(path, content))
        told.append(line.removeprefix(f"{path}: "))
    older, many, five, kinds, progress = told
    assert older == f"has checkpoint format 3, this version continues {checkpoint.FORMAT}; use it with --weights"
    more = "use it with --weights; a run cannot continue from it"
    assert many == f"lacks ema, optimizer, progress, classes, preprocessing and 3 more; {more}"
    assert five == f"lacks format, arch, model, ema, scaler; {more}"
    assert kinds.startswith("a run cannot continue from it: model is list of 0, not what a run saves there; ema is int")
    assert kinds.count("; ") == 4 and "settings" not in kinds
    assert "progress" in progress


def test_the_newest_is_last_if_it_is_whole_and_else_that_of_the_highest_step(tmp_path):
    for name, step in (("initial", 0), ("best", 4), ("final", 9), ("previous", 8), ("last", 5)):
        written(tmp_path / f"{name}.pt", state(step))
    heard = []
    for expected in ("last", "final", "previous", "best", "initial"):
        path, found = checkpoint.newest(tmp_path, heard.append)
        assert (path, found["progress"]["step"]) == (tmp_path / f"{expected}.pt", steps(tmp_path)[path.name])
        path.unlink()
    assert checkpoint.newest(tmp_path, heard.append) is None
    assert heard == []


def test_a_damaged_manifest_is_told_once_and_the_files_own_sums_do(tmp_path):
    written(tmp_path / "last.pt", state(3))
    for content in ("[", "5", '{"sha256": 5}', '{"other": {}}', "[" * 100_000):
        (tmp_path / "manifest.json").write_text(content)
        heard = []
        assert checkpoint.newest(tmp_path, heard.append)[1]["progress"]["step"] == 3
        (line,) = heard
        assert (
            line
            == f"{tmp_path / 'manifest.json'}: cannot be read; checkpoints are verified by their own CRC-32 instead"
        )
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").symlink_to(tmp_path / "nowhere")
    heard = []
    assert checkpoint.newest(tmp_path, heard.append)[1]["progress"]["step"] == 3 and len(heard) == 1


def test_checkpoints_of_others_stand_behind_ours(tmp_path):
    written(tmp_path / "initial.pt", state(0))
    for other in ({"weight": torch.ones(1)}, {"progress": 5}, {"progress": {"step": "9"}}):
        torch.save(other, tmp_path / "best.pt")
        path, _ = checkpoint.newest(tmp_path, pytest.fail, checkpoint.load)
        assert path.name == "initial.pt"


# ------------------------------------------------------------------------------------ weights


def test_only_tensors_are_weights_and_without_any_the_file_is_named():
    weights = {"epoch": 5, "weight": torch.ones(1), 3: torch.zeros(1)}
    assert checkpoint.weights_of(weights, Path("x")).keys() == {"weight", "3"}
    assert checkpoint.weights_of({"ema": {"model": 5}, "model": weights}, Path("x")).keys() == {"weight", "3"}
    for content in ({"epoch": 5}, {"model": {}}, {"ema": None, "model": {"a": 1}}):
        with pytest.raises(UserError, match=r"^--weights some/x\.pt: holds no weights$"):
            checkpoint.weights_of(content, Path("some/x.pt"))


def test_of_many_differences_three_are_named_and_the_rest_counted():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    weights = {name: value for name, value in model.state_dict().items() if "bias" in name}
    named = "--weights x: does not fit the network: lacks 0.weight; lacks 1.weight; lacks 2.weight; is --arch right?"
    assert mistakes_of(checkpoint.load_weights, model, weights, "--weights x") == [named]
    with pytest.raises(UserError, match=r"lacks 2\.weight \(and 1 more\); is --arch right\?$"):
        checkpoint.load_weights(model, {**weights, "more": torch.ones(1)}, "--weights x")
    with pytest.raises(UserError, match=r"lacks bias; has extra.*weight is \(1, 2\) and should be \(3, 2\); is --arch"):
        checkpoint.load_weights(nn.Linear(2, 3), {"weight": torch.zeros(1, 2), "extra": torch.zeros(1)}, "x")


def test_weights_that_the_network_itself_refuses_are_one_line():
    model = nn.Linear(1, 1)
    model.register_load_state_dict_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("not\n  these")))
    with pytest.raises(UserError, match=r"^x: does not fit the network \(not these\)$"):
        checkpoint.load_weights(model, model.state_dict(), "x")


MOVED = {"progress": {"step": 7, "validated_step": 6}, "settings": {"ema_bn_batches": 16}, "ema": {}}


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({}, True),
        ({"progress": {"step": 7}}, True),
        ({"progress": {"step": 6, "validated_step": 6}}, False),
        ({"settings": {"ema_bn_batches": 0}}, False),  # its statistics are averages at any time
        ({"settings": {}}, False),
        *(({part: other}, False) for part in MOVED for other in (None, [])),
    ],
)
def test_an_average_that_moved_after_its_validation_is_recognised(changes, moved):
    assert checkpoint.average_moved_since_validation(MOVED | changes) is moved
