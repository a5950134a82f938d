"""What ``--resume`` says: why it begins anew, what a folder lacks, and which of two settings it goes on with."""

import shutil

import pytest

import main
from tests.end_to_end.processes import load
from tests.faults.small_run import FLAGS, begin, copy_of, told
from utils.config.settings import as_flag, as_text

CPU = ("--device", "cpu", "--no-progress")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 3 epochs cut in its first one."""
    return begin(tmp_path_factory.mktemp("trained"), "--max-steps", 2)


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    return copy_of(trained, tmp_path, monkeypatch)


def another(run, time, **settings):
    """A copy of ``run`` begun at ``time``, with other settings in its config.yaml."""
    other = run.with_name(f"{time}_other")
    shutil.copytree(run, other)
    lines = (other / "config.yaml").read_text().splitlines(keepends=True)
    for name, value in settings.items():
        (place,) = [n for n, line in enumerate(lines) if line.startswith(f"{name.replace('_', '-')}: ")]
        lines[place] = f"{name.replace('_', '-')}: {value}  # flag\n"
    (other / "config.yaml").write_text("".join(lines))
    return other


# ------------------------------------------------------------------------------------------ --resume auto

AUTO = (*FLAGS, "--max-steps", 1, "--resume", "auto")


def test_auto_that_begins_anew_says_which_settings_of_the_nearest_run_differ(run, capsys):
    another(run, "2001-01-01_00-00-00", lr=0.5, seed=3, epochs=7)
    code, (line,) = told(capsys, (*AUTO, "--lr", 0.2, "--ema-decay", 0.99))
    begins = f"main.py: warning: --resume auto: begins a new run; the nearest, {run}, has "
    assert code == 0 and line == f"{begins}--lr 0.1 where this has 0.2, --ema-decay 0.9 where this has 0.99"
    made = {folder for folder in run.parent.iterdir() if "lr0.2" in folder.name}
    assert len(made) == 1 and line.removeprefix("main.py: ") in (made.pop() / "log.txt").read_text()


def test_of_runs_that_are_equally_near_the_newest_is_named(run, capsys):
    newest = another(run, "2999-01-01_00-00-00", seed=3)
    _, (line,) = told(capsys, (*AUTO, "--epochs", 9, "--seed", 3))
    assert f"the nearest, {newest}, has --epochs 3 where this has 9" in line


def test_a_setting_that_one_of_both_lacks_is_named(run, capsys):
    other = another(run, "2999-01-01_00-00-00", ema_decay="null", clip_grad_norm=1.0)
    shutil.rmtree(run)
    _, (line,) = told(capsys, AUTO)
    assert f"{other}, has --clip-grad-norm 1 where this has none, no --ema-decay where this has 0.9" in line


def test_many_differences_are_told_short(run, capsys):
    flags = "--lr 0.3 --seed 4 --epochs 8 --momentum 0.8 --weight-decay 0 --cutout 2 --mixup 1"
    _, (line,) = told(capsys, (*AUTO, *flags.split()))
    assert line.endswith(" and 2 more") and line.count(" where this has ") == 5


def test_auto_says_nothing_where_it_goes_on_or_where_there_is_no_run(run, tmp_path, capsys):
    another(run, "2999-01-01_00-00-00", seed=3)
    assert told(capsys, (*FLAGS, "--max-steps", 3, "--resume", "auto")) == (0, [])
    assert load(run, "last.pt")["progress"]["step"] == 3
    assert told(capsys, (*AUTO, "--output", tmp_path / "elsewhere")) == (0, [])


def test_auto_says_that_the_run_with_these_settings_has_no_checkpoint(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    another(run, "2001-01-01_00-00-00", seed=3)
    code, (line,) = told(capsys, AUTO)
    assert code == 0 and f"begins a new run; {run} is a run without a checkpoint: it ended before" in line


# ------------------------------------------------------------------------------------------ --resume PATH


def test_a_run_folder_without_a_checkpoint_is_called_that(run, capsys):
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    for given in (run, run / "checkpoints"):
        code, (line,) = told(capsys, (*CPU, "--resume", given))
        assert code == 2 and line.startswith(f"main.py: --resume {given}: is a run without a checkpoint: it ended")


def test_a_folder_that_is_no_run_is_not_called_one(run, capsys):
    code, (line,) = told(capsys, (*CPU, "--resume", run.parent))
    assert code == 2 and "holds no checkpoint that can be loaded; give a run folder or a .pt file" in line


@pytest.mark.parametrize("given", ["{run}/checkpoints", "{run}/checkpoints/", "checkpoints", "."])
def test_the_folder_of_a_runs_checkpoints_is_as_good_as_the_run(run, given, capsys, monkeypatch):
    before = sorted(path.name for path in run.parent.iterdir())
    whole = run.absolute()
    if not given.startswith("{run}"):
        monkeypatch.chdir(whole if given == "checkpoints" else whole / "checkpoints")
    assert told(capsys, (*CPU, "--max-steps", 3, "--resume", given.format(run=run))) == (0, [])
    assert load(whole, "last.pt")["progress"]["step"] == 3
    assert sorted(path.name for path in whole.parent.iterdir()) == before
    assert sorted(path.name for path in whole.iterdir() if path.is_dir()) == ["checkpoints", "projector"]


def test_evaluation_takes_the_folder_of_the_checkpoints_too(run, capsys):
    assert main.main([*CPU, "--evaluate", "--resume", str(run / "checkpoints")]) == 0
    assert f"Evaluating {run}/checkpoints/last.pt" in capsys.readouterr().out


def test_override_names_each_setting_with_both_values(run, capsys):
    line = (*CPU, "--resume", run, "--resume-override", "--max-steps", 3, "--epochs", 40, "--nesterov", "--mixup", 0.2)
    made = f"{run}/checkpoints/last.pt was made with"
    assert told(capsys, line)[1] == [
        f"main.py: warning: --mixup 0.2: {made} --mixup 0; going on with --mixup 0.2",
        f"main.py: warning: --epochs 40: {made} --epochs 3; going on with --epochs 40",
        f"main.py: warning: --nesterov: {made} --no-nesterov; going on with --nesterov",
    ]


def test_what_was_left_to_the_schedule_follows_other_epochs_with_a_line_for_each(tmp_path, capsys):
    run = begin(tmp_path, "--lr-policy", "multistep", "--epochs", 4, "--max-steps", 2)
    assert told(capsys, (*CPU, "--resume", run, "--max-steps", 3)) == (0, [])
    code, (line,) = told(capsys, (*CPU, "--resume", run, "--epochs", 40))
    assert code == 2 and line.startswith("main.py: --epochs 40: ")
    for policy in ("step", "triangular", "linear"):
        code, (line,) = told(capsys, (*CPU, "--resume", run, "--lr-policy", policy))
        assert code == 2 and line.startswith(f"main.py: --lr-policy {policy}: ")
    again = (*CPU, "--resume", run, "--resume-override", "--epochs", 40, "--max-steps", 4)
    made = f"{run}/checkpoints/last.pt was made with"
    assert told(capsys, again)[1] == [
        f"main.py: warning: --epochs 40: {made} --epochs 4; going on with --epochs 40",
        f"main.py: warning: --lr-milestones 20 30: {made} --lr-milestones 2 3; going on with --lr-milestones 20 30",
    ]
    assert load(run, "last.pt")["settings"]["lr_milestones"] == [20.0, 30.0]
    auto = (*FLAGS, "--lr-policy", "multistep", "--epochs", 40, "--max-steps", 5, "--resume", "auto")
    assert told(capsys, (*auto, "--output", tmp_path)) == (0, []) and load(run, "last.pt")["progress"]["step"] == 5
    chosen = ("--lr-policy", "multistep", "--lr-milestones", 5, 9, "--epochs", 80)
    code, (_, line) = told(capsys, (*CPU, "--resume", run, *chosen))
    assert code == 2 and line.startswith("main.py: --lr-milestones 5 9: "), "which was chosen"


@pytest.mark.parametrize(
    ("name", "value", "flag", "text"),
    [
        ("lr", 0.1, "--lr 0.1", "0.1"),
        ("lr", 0.30000000000000004, "--lr 0.30000000000000004", "0.30000000000000004"),
        ("init_scale", 8388609.0, "--init-scale 8388609.0", "8388609.0"),
        ("init_scale", 65536.0, "--init-scale 65536", "65536"),
        ("augment", ("shift", "flip"), "--augment shift flip", "shift flip"),
        ("lr_milestones", [3.0, 4.5], "--lr-milestones 3 4.5", "3 4.5"),
        ("nesterov", True, "--nesterov", "true"),
        ("decay_norm_bias", False, "--no-decay-norm-bias", "false"),
        ("ema_decay", None, "no --ema-decay", "none"),
        ("seed", 0, "--seed 0", "0"),
    ],
)
def test_a_setting_is_shown_as_a_person_gives_it(name, value, flag, text):
    assert (as_flag(name, value), as_text(value)) == (flag, text)
