"""What ``--resume`` says: what a folder stands for, and which of two settings it goes on with."""

import pytest

from tests.end_to_end.processes import load
from tests.faults.small_run import FLAGS, begin, told
from utils.config.settings import as_flag, as_text

CPU = ("--device", "cpu", "--no-progress")


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
