"""A resume reads the checkpoint's tensors where they are needed and keeps none of them."""

import dataclasses
import gc
import os
import pickle
import shutil
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import main
from tests.faults.small_run import FLAGS
from tests.helpers import equal, mistakes_of
from tests.utils.config.examples import SHAPES_RESULT, context, example
from utils.checkpoint import checkpoint
from utils.checkpoint.inventory import parts
from utils.checkpoint.resume import ResumePoint, find, from_path, newest_run
from utils.config.arguments import parse
from utils.config.settings import UserError, as_flag
from utils.train_validation import TraVal

CPU = ("--device", "cpu", "--no-progress")


@pytest.fixture(scope="module")
def trained(small_run):
    """A run with an average and two optimizers, cut after three steps."""
    return small_run("--optimizer", "muon", "--amp", "fp16", "--max-steps", 3)


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "digits/fc/run")
    return tmp_path / "digits/fc/run"


@pytest.mark.parametrize("more", [(), ("--resume-override", "--lr", "0.5")])
def test_when_training_goes_on_no_tensor_of_the_checkpoint_is_left_but_what_the_optimizers_took(run, monkeypatch, more):
    loaded = []
    left = []
    unpickle = checkpoint._unpickle
    train = TraVal.train

    def remembered(path):
        state = unpickle(path)
        loaded.extend(weakref.ref(value) for _, value in parts(state) if isinstance(value, torch.Tensor))
        return state

    def looked_at(traval, epoch):
        gc.collect()
        states = [state for optimizer in traval.optimizers for state in optimizer.state.values()]
        taken = {id(value) for state in states for value in state.values()}
        left.extend(ref() for ref in loaded if ref() is not None and id(ref()) not in taken)
        return train(traval, epoch)

    monkeypatch.setattr(checkpoint, "_unpickle", remembered)
    monkeypatch.setattr(TraVal, "train", looked_at)
    assert main.main([*CPU, "--resume", str(run), *more, "--max-steps", "5"]) == 0
    assert loaded and left == []


def test_what_the_other_processes_are_told_of_a_checkpoint_holds_no_tensor(run):
    found = from_path(run, pytest.fail)
    assert [path for path, value in parts(found.state) if isinstance(value, torch.Tensor)] == []
    assert len(pickle.dumps(found)) < 0.1 * found.path.stat().st_size


def test_read_gives_what_was_changed_meanwhile_and_all_tensors_wherever_they_stand(tmp_path):
    whole = {
        "progress": {"step": 7, "sums": [1.0, 2.0, 3.0]},
        "optimizer": [
            {
                "state": {0: {"buffers": [torch.ones(1)], "pair": (torch.ones(1), torch.zeros(2))}},
                "param_groups": [{"lr": 0.1}],
            }
        ],
        "weight": torch.ones(3),
    }
    torch.save(whole, tmp_path / "file.pt")
    found = ResumePoint.of(tmp_path / "file.pt", whole)
    assert equal(found.read(), whole)
    whole["progress"] = {"step": 0, "sums": [0.0]}
    whole["optimizer"][0]["param_groups"] = [{"lr": 0.5}]
    assert equal(dataclasses.replace(found, state=ResumePoint.of(found.path, whole).state).read(), whole)


def test_a_file_that_is_not_the_one_that_was_found_is_refused(run):
    found = from_path(run, pytest.fail)
    assert found.path.name == "last.pt"
    found.path.unlink()
    with pytest.raises(
        UserError,
        match=r"last\.pt: no such checkpoint; .*no other process may write the run, and each machine must see its folder$",
    ):
        found.read()
    shutil.copyfile(run / "checkpoints/initial.pt", found.path)
    with pytest.raises(UserError, match=r"last\.pt: is no longer the file that was found"):
        found.read()


# ------------------------------------------------------------------------------------ finding a run

LR = {"lr": 0.1, "lr_milestones": None, "augment": ["shift"]}
SAME = "lr: 0.1\naugment: [shift]\nlr-milestones:\nepochs: 3\n"


@pytest.fixture
def runs(trained, tmp_path):
    """Makes runs of the given name and config.yaml, with the checkpoint of ``trained``."""

    def make(name, config=SAME, checkpoint="last.pt"):
        folder = tmp_path / "digits" / "fc" / name
        (folder / "checkpoints").mkdir(parents=True)
        if config is not None:
            (folder / "config.yaml").write_bytes(config.encode("latin-1"))
        if checkpoint:
            shutil.copyfile(trained / "checkpoints/last.pt", folder / "checkpoints" / checkpoint)
        return folder

    make.parent = tmp_path / "digits" / "fc"
    return make


def newest(runs, wanted=LR, **more):
    """The folder that is found, and what is told."""
    told = []
    found = newest_run(runs.parent, wanted, told.append, **more)
    return found and found.folder, told


def test_the_newest_run_of_the_same_settings_is_found_without_a_word(runs):
    runs("2024-01-01_a")
    same = runs("2024-01-03_b", "epochs: 9\nlr: 0.1\naugment: [shift]\n")  # what it does not name has its default
    runs("2024-01-05_c", "lr: 0.2\naugment: [shift]\n")
    assert newest(runs) == (same, [])
    assert newest_run(runs.parent, LR, pytest.fail).path == same / "checkpoints/last.pt"


def test_what_a_runs_optimizer_and_schedule_do_not_use_makes_it_no_other_one(runs, run):
    wanted = {"optimizer": "adamw", "lr_policy": "cosine", "nesterov": False, "lr_milestones": None}
    old = runs("2024-01-01", "optimizer: adamw\nnesterov: true\nlr-milestones: [1, 2]\n")
    assert newest(runs, wanted) == (old, [])
    found = from_path(run, pytest.fail)
    found.state["settings"] |= {"optimizer": "adamw", "nesterov": True, "lr_milestones": [1.0, 2.0]}
    assert found.differences(parse([], checkpoint=found.settings)) == {}


@pytest.mark.parametrize(
    "config",
    [None, "", "lr", "lr: [", "- lr", "lr: {a: 1}", "lr: [[1]]", "lr: !!python/name:os.system", "[" * 500, "\xff"],
    ids=["none", "empty", "a word", "cut off", "a list", "a mapping", "nested", "an object", "deep", "no UTF-8"],
)
def test_a_run_whose_settings_cannot_be_read_is_passed_over_with_a_word_and_a_folder_without_checkpoints_without(
    runs, config
):
    strange = runs("2024-01-02", config, checkpoint=None)
    assert newest(runs) == (None, [])
    shutil.copyfile(runs("2024-01-01") / "checkpoints/last.pt", strange / "checkpoints/last.pt")
    line = f"{strange}: passed over, as its config.yaml cannot be read; --resume {strange} continues it"
    assert newest(runs) == (runs.parent / "2024-01-01", [line])
    shutil.rmtree(runs.parent / "2024-01-01")
    begins = f"--resume auto: begins a new run; repair {strange} or move it away to silence these lines"
    assert newest(runs) == (None, [line, begins])
    assert from_path(strange, pytest.fail).folder == strange


def test_files_links_and_names_that_cannot_be_shown_are_passed_over(runs, tmp_path):
    older = runs("2024-01-01")
    runs("2024-01-02\n")
    (runs.parent / "2024-01-03").symlink_to(older)
    (runs.parent / "2024-01-04").write_text("")
    assert newest(runs) == (older, [])
    (tmp_path / "to_digits").symlink_to(tmp_path / "digits")
    (tmp_path / "to_fc").symlink_to(runs.parent)
    for linked in (tmp_path / "to_digits" / "fc", tmp_path / "to_fc"):
        assert newest_run(linked, LR, pytest.fail) is None
    assert newest_run(tmp_path / "nothing", LR, pytest.fail) is None


def test_folders_that_cannot_be_listed_are_told_with_the_reason(runs, monkeypatch):
    runs("2024-01-01")

    monkeypatch.setattr(os, "scandir", Mock(side_effect=OSError(13, "Permission denied")))
    with pytest.raises(UserError, match=f"^--output: {runs.parent} cannot be read \\(Permission denied\\)$"):
        newest(runs)


def test_runs_whose_checkpoints_cannot_be_loaded_are_told_and_the_one_before_is_taken(runs):
    lost = [runs(f"2024-01-0{day}") for day in (4, 3)]
    for folder in lost:
        (folder / "checkpoints/last.pt").write_bytes(b"damaged")
    found, told = newest(runs)
    assert found is None and [line.split(":")[0] for line in told[1::2]] == [*map(str, lost)]
    assert told[1] == f"{lost[0]}: none of its checkpoints can be loaded; it is left as it is"
    assert told[4:] == [f"--resume auto: begins a new run; repair {lost[0]} or move it away to silence these lines"]
    runs("2024-01-05", checkpoint=None)
    older = runs("2024-01-02")
    assert newest(runs) == (older, told[:4])


def test_a_run_without_a_checkpoint_is_told_before_one_of_other_settings(runs):
    runs("2024-01-01", "lr: 0.2\naugment: [shift]\n")
    runs("2024-01-02", checkpoint=None)
    empty = runs("2024-01-03", checkpoint="last.pt.tmp")
    line = "is a run without a checkpoint: it ended before it saved its first"
    assert newest(runs) == (None, [f"--resume auto: begins a new run; {empty} {line}"])


def test_of_runs_with_other_settings_the_nearest_is_told_and_of_equals_the_newest(runs):
    runs("2024-01-01", "lr: 0.3\naugment: [shift]\n")
    near = runs("2024-01-02", "lr: 0.2\naugment: [shift]\n")
    runs("2024-01-03", "lr: 0.2\naugment: [flip]\n")
    begins = f"--resume auto: begins a new run; the nearest, {near}, has"
    assert newest(runs) == (None, [f"{begins} --lr 0.2 where this has 0.1"])
    wanted = LR | {"epochs": 5, "momentum": 0.5, "nesterov": True, "seed": 9}
    shown = "--lr 0.2 where this has 0.1, --epochs 20 where this has 5, --momentum 0.9 where this has 0.5, "
    shown += "--no-nesterov where this has true, --seed 0 where this has 9"
    assert newest(runs, wanted) == (None, [f"{begins} {shown}"])
    assert newest(runs, wanted | {"arch": "fc"})[1][0].endswith("this has 9 and 1 more")
    clipped = runs("2024-01-04", f"{SAME}clip-grad-norm: 1.0\n")
    line = f"--resume auto: begins a new run; the nearest, {clipped}, has --clip-grad-norm 1 where this has none"
    assert newest(runs, LR | {"clip_grad_norm": None}) == (None, [line])


def test_a_run_of_images_in_another_place_is_told_as_such_and_is_no_nearer_than_one_of_these_images(runs, tmp_path):
    other = runs("2024-01-02", "lr: 0.2\naugment: [shift]\ndatapath: cats\n")
    told = f"--resume auto: begins a new run; the nearest, {other}, has --lr 0.2 where this has 0.1"
    dogs = str(tmp_path / "dogs")
    assert newest(runs, place=dogs) == (None, [f"{told}; its images were in cats"])
    assert newest(runs, place="cats") == (None, [told])
    own = runs("2024-01-01", f"lr: 0.3\naugment: [shift]\ndatapath: {tmp_path}/cats/../dogs\n")
    told = f"--resume auto: begins a new run; the nearest, {own}, has --lr 0.3 where this has 0.1"
    assert newest(runs, place=dogs) == (None, [told])


# ------------------------------------------------------------------------------------ finding what was named


def test_what_was_named_may_be_a_file_its_run_or_the_folder_between(run, tmp_path, monkeypatch):
    file = run / "checkpoints/last.pt"
    for path in (file, run, run / "checkpoints"):
        found = from_path(path, pytest.fail)
        assert (found.path, found.folder, found.digest) == (file, run, checkpoint.sha256(file))
        assert found.state["progress"]["step"] == 3
    monkeypatch.chdir(run / "checkpoints")
    assert from_path(Path("last.pt"), pytest.fail).folder == run
    assert from_path(Path("."), pytest.fail).folder == run
    monkeypatch.chdir(run)
    assert from_path(Path("checkpoints"), pytest.fail).folder == Path(".")
    shutil.copyfile(file, tmp_path / "alone.pt")
    assert from_path(tmp_path / "alone.pt", pytest.fail).folder is None
    (tmp_path / "checkpoints").mkdir()  # by its name alone it is none of a run's
    (run / "others").mkdir()  # nor is any folder beside a recipe
    for path in (tmp_path / "checkpoints", run / "others"):
        with pytest.raises(UserError, match=f"^--resume {path}: holds no checkpoint that can be loaded"):
            from_path(path, pytest.fail)


def test_a_folder_that_holds_nothing_to_go_on_from_says_why(run, tmp_path):
    nothing = "holds no checkpoint that can be loaded; give a run folder or a .pt file"
    with pytest.raises(UserError, match=f"^--resume {tmp_path}: {nothing}$"):
        from_path(tmp_path, pytest.fail)
    for path in (run / "checkpoints").glob("*.pt"):
        path.write_bytes(b"damaged")
    told = []
    with pytest.raises(UserError, match=f"^--resume {run}: {nothing}$"):
        from_path(run, told.append)
    assert told
    for path in (run / "checkpoints").glob("*.pt"):
        path.unlink()
    empty = "is a run without a checkpoint: it ended before it saved its first; begin it anew"
    with pytest.raises(UserError, match=f"^--resume {run}: {empty}$"):
        from_path(run, pytest.fail)
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"^--resume {run}: {nothing}$"):  # a run makes no link
        from_path(run, pytest.fail)


def test_a_run_folder_is_evaluated_with_weights_alone_and_not_continued(run, tmp_path):
    state = checkpoint.load(run / "checkpoints/last.pt")
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    del state["scaler"]
    torch.save(state, run / "checkpoints/last.pt")
    assert find(parse(["--resume", str(run), "--evaluate"]), tmp_path, pytest.fail).folder == run
    with pytest.raises(UserError):
        find(parse(["--resume", str(run)]), tmp_path, lambda line: None)


def test_to_evaluate_weights_are_enough_and_to_go_on_nothing_may_be_missing(tmp_path):
    torch.save({"model": {"weight": torch.ones(1)}}, tmp_path / "weights.pt")
    weights = ("--resume", str(tmp_path / "weights.pt"))
    assert find(parse([*weights, "--evaluate"]), tmp_path, pytest.fail).path == tmp_path / "weights.pt"
    with pytest.raises(UserError, match="lacks format"):
        find(parse([*weights]), tmp_path, pytest.fail)
    found = find(parse(["--evaluate", "--weights", str(tmp_path / "weights.pt")]), tmp_path, pytest.fail)
    assert (found.path, found.folder, found.state) == (tmp_path / "weights.pt", None, {"model": {"weight": None}})
    for begun_anew in (["--weights", str(tmp_path / "weights.pt")], ["--evaluate", "--pretrained"], []):
        assert find(parse(begun_anew), tmp_path, pytest.fail) is None


def test_auto_goes_on_with_the_newest_run_of_the_same_name_and_settings(run):
    flags = [*FLAGS, "--optimizer", "muon", "--amp", "fp16", "--resume", "auto"]
    assert find(parse(flags), run.parent, pytest.fail).folder == run
    for more, other in (
        (["--name", "x"], "no --name where this has x"),
        (["--seed", "5"], "--seed 0 where this has 5"),
    ):
        told = []
        assert find(parse([*flags, *more]), run.parent, told.append) is None
        assert told == [f"--resume auto: begins a new run; the nearest, {run}, has {other}"]


# ------------------------------------------------------------------------------------ refusing


def found_with(path="run/checkpoints/last.pt", folder=None, **state):
    return ResumePoint(Path(path), state, "digest", folder and Path(folder))


def test_a_continued_run_takes_the_experiments_settings_and_not_the_machines():
    stored = {"lr": 0.3, "epochs": 7, "device": "cuda", "workers": 4, "batch_size": 8, "resume": "x", "no_such": 1}
    older = {"val_split_by": "draw"}  # what a run without this setting did
    assert found_with(settings=stored).settings == {"lr": 0.3, "epochs": 7} | older
    assert found_with(settings={"val_split_by": "name"}).settings == {"val_split_by": "name"}
    assert found_with(settings=[1]).settings == {} == found_with().settings


def test_each_other_setting_is_a_line_with_both_values_and_what_to_do():
    found = found_with(folder="a run", settings={"arch": "conv2", "lr": 0.3, "global_batch_size": 64, "no_such": 1})
    found.refuse_differences(parse(["--lr", "0.3"]))
    with pytest.raises(UserError) as caught:
        found.refuse_differences(parse(["--lr", "0.5", "--epochs", "7", "--arch", "fc"]))
    advice = "remove the flag, start anew without --resume, or go on like this with --resume 'a run' --resume-override"
    assert caught.value.mistakes == [
        "--arch fc: run/checkpoints/last.pt was made with --arch conv2; remove the flag or start anew without --resume",
        f"--epochs 7: run/checkpoints/last.pt was made with --epochs 20; {advice}",
        f"--lr 0.5: run/checkpoints/last.pt was made with --lr 0.3; {advice}",
    ]
    assert caught.value.on_all_ranks


def test_of_a_recipes_value_no_flag_is_to_be_removed(recipe):
    with pytest.raises(
        UserError, match="--epochs 7: .* with --epochs 20; remove --config, start anew without --resume,"
    ):
        found_with(settings={}).refuse_differences(parse(["--config", recipe("epochs: 7\n")]))


def test_an_override_is_advised_of_a_number_that_a_run_without_it_could_not_take():
    begun = parse(["--ema-decay", "0.99"]).values()
    with pytest.raises(UserError, match="or go on like this with"):
        found_with(settings=begun).refuse_differences(parse(["--ema-decay", "0.9"]))


FIXED = {"arch", "optimizer", "opt_kwargs", "freeze", "init", "pretrained", "weights", "new_head"}
NOT_AT_ALL = {"ema_decay", "freeze_epoch", "unfreeze_epoch"}  # which the test's run is without


@pytest.mark.parametrize("name", SHAPES_RESULT)
def test_each_setting_that_shapes_the_result_is_refused_with_both_values(name):
    begun = parse(context(name).split()).values()
    now = parse(f"{context(name)} {example(name)}".split())
    start = f"{as_flag(name, now.values()[name])}: run/checkpoints/last.pt was made with {as_flag(name, begun[name])}; "
    mistakes = mistakes_of(found_with(settings=begun).refuse_differences, now)
    (line,) = (line for line in mistakes if line.startswith(start))
    assert ("--resume-override" in line) == (name not in FIXED | NOT_AT_ALL), "which it would refuse, too"


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("a", "b"), "has 2 classes, lacks c, where there are 3"),
        (("a", "b", "c", "x"), "has 4 classes, adds x, where there are 3"),
        (("c", "b", "a"), "has 3 classes, in another order, where there are 3"),
        (("a", "c", *"uvwxyz"), "has 8 classes, lacks b, adds u, v, w, x, y and 1 more, where there are 3"),
        (("a", "b", "c", *"vwxyz"), "has 8 classes, adds v, w, x, y, z, where there are 3"),
    ],
)
def test_other_classes_are_named_and_many_counted(classes, words):
    found = found_with(classes=["a", "b", "c"], fingerprint="f" * 64)
    assert found.data_differences(("a", "b", "c"), None) == [] == found.data_differences(("a", "b", "c"), "f" * 64)
    assert found.data_differences(classes, None) == [f"--datapath: {words} in run/checkpoints/last.pt"]


def test_other_data_is_refused_with_what_is_different_and_what_to_do():
    found = found_with(classes=["a"], fingerprint="f" * 64)
    found.refuse_other_data(("a",), "f" * 64)
    with pytest.raises(UserError) as caught:
        found.refuse_other_data(("b",), "0" * 64)
    advice = "give the same data, go on with this by "
    advice += "--resume run/checkpoints/last.pt --resume-override, begin a new run without --resume, or begin one with --weights "
    advice += "run/checkpoints/last.pt"
    assert caught.value.mistakes == [
        f"--datapath: has 1 classes, lacks a, adds b, where there are 1 in run/checkpoints/last.pt; {advice}",
        "--datapath: holds other images or labels (000000000000) than run/checkpoints/last.pt was trained on "
        f"(ffffffffffff); {advice}",
    ]
    assert caught.value.on_all_ranks
    (line,) = mistakes_of(found.refuse_other_data, ("b",), None)
    assert line.endswith("last.pt; give the same data")
    with pytest.raises(UserError, match="--weights run/checkpoints/last.pt; it was trained on them$"):
        found.refuse_other_data(("a",), "0" * 64, "it was trained on them")
    with pytest.raises(UserError, match=r"\(ffffffffffff\): b\.png was not there; give the same data, go on "):
        found.refuse_other_data(("a",), "0" * 64, named=lambda point: "b.png was not there" * (point is found))


def test_the_classes_of_a_checkpoint_are_known_where_they_are_names():
    assert found_with(classes=["b", "a"]).classes == ("b", "a")
    assert [found_with(**state).classes for state in ({}, {"classes": 5}, {"classes": ["a", 3]})] == [None] * 3


def test_weights_without_or_with_strange_class_names():
    assert found_with().data_differences(("a",), None) == []
    for strange in (5, "a", None):
        (line,) = found_with(classes=strange).data_differences(("a",), None)
        assert line == "--datapath: has 1 classes, adds a, where there are 0 in run/checkpoints/last.pt"


def test_a_file_that_another_process_replaces_meanwhile_is_not_strange(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").touch()
    point = ResumePoint.of(tmp_path / "checkpoints/last.pt", {}, tmp_path)
    scandir = os.scandir

    def then_renamed(folder):
        entries = list(scandir(folder))
        (tmp_path / "checkpoints/last.pt").rename(tmp_path / "checkpoints/previous.pt")
        return entries

    with monkeypatch.context() as patched:  # from Python 3.13 on, Path.iterdir uses scandir, too
        patched.setattr(os, "scandir", lambda folder: then_renamed(folder) if folder != tmp_path else scandir(folder))
        point.refuse_strange_files()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["previous.pt"]
    gone = ResumePoint.of(tmp_path / "checkpoints/last.pt", {}, tmp_path)
    (tmp_path / "checkpoints/previous.pt").rename(tmp_path / "checkpoints/last.pt")
    with pytest.raises(UserError, match="is no longer the file that was found"):
        gone.read()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a\n b"), ValueError("a b"), KeyError("a"), TypeError(), AttributeError("x"), IndexError("i")],
)
def test_what_does_not_fit_into_the_run_is_one_line(error):
    with pytest.raises(UserError) as caught, found_with().fitting():
        raise error
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    assert caught.value.mistakes == [f"run/checkpoints/last.pt: does not fit this run ({reason})"]
    assert caught.value.on_all_ranks


@pytest.mark.parametrize("error", [UserError("told", "already"), ZeroDivisionError(), KeyboardInterrupt()])
def test_what_is_told_already_or_is_another_matter_passes(error):
    with pytest.raises(type(error)) as caught, found_with().fitting():
        raise error
    assert caught.value is error
