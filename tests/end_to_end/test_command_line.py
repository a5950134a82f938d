"""The program's answers to wrong command lines: exit code 2, a line a mistake, nothing created."""

import os
import subprocess
import sys

import pytest
import torch

import main
from tests.end_to_end.processes import ROOT, start

HELP_AND_WHAT_IT_IMPORTED = """
import sys
sys.path.insert(0, sys.argv[1])
import main
try:
    main.main(sys.argv[2:])
except SystemExit as end:
    print("exit", end.code)
print("heavy", sorted({"torch", "torchvision", "timm", "numpy", "sklearn", "yaml"} & set(sys.modules)))
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty current folder; afterwards it must hold what the test put there and nothing else."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def check_answer(code, out, err, count):
    """What holds for every mistake of the user's; gives the lines without the program's name."""
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) == count, err
    assert all(line.startswith("main.py: ") for line in lines)
    return [line.removeprefix("main.py: ") for line in lines]


# Each: a command line that is wrong before anything heavy is imported, and how many lines it answers with.
WRONG_AT_ONCE = [
    ("--no-such-flag", 1),
    ("--epochz 3", 1),
    ("--epochs", 1),
    ("--epochs three", 1),
    ("--epochs 0", 1),
    ("--epochs -1", 1),
    ("--epochs 2.5", 1),
    ("--lr 0", 1),
    ("--lr nan", 1),
    ("--lr one", 1),
    ("--momentum 1.5", 1),
    ("--batch-size 0", 1),
    ("--batch-size 10 --global-batch-size 11", 1),
    ("--workers -1", 1),
    ("--seed -1", 1),
    ("--dataname svhn", 1),
    ("--dataname mnist", 1),
    ("--dataname folder", 1),
    ("--amp fp64", 1),
    ("--device tpu", 1),
    ("--gpu-ids 0 --device cpu", 1),
    ("--loader magic", 1),
    ("--augment mixdown", 1),
    ("--init magic", 1),
    ("--lr-policy magic", 1),
    ("--lr-milestones 5", 1),
    ("--warmup-epochs 50", 1),
    ("--nesterov --optimizer adam", 1),
    ("--evaluate", 1),
    ("--evaluate --resume auto", 1),
    ("--pretrained --weights some.pt", 1),
    ("--name a/b", 1),
    ("--config none/such", 1),
    ("--val-split 0.5", 1),
    ("--max-steps 0 --dry-run", 1),
    ("surplus", 1),
    ("--resume", 1),
    ("--epochs x --lr y --amp z --bogus", 4),
]


@pytest.mark.parametrize(("line", "count"), WRONG_AT_ONCE)
def test_wrong_command_line_ends_with_2_and_creates_nothing(line, count, workplace, capsys):
    code = main.main(["--output", str(workplace / "runs"), *line.split()])
    check_answer(code, *capsys.readouterr(), count)
    assert files_below(workplace) == []


# Each: a command line that is wrong in what it names, and words of the line that it answers with.
WRONG_IN_WHAT_IT_NAMES = [
    ("--arch resnet19", ("--arch 'resnet19'", "resnet18")),
    ("--arch timm/resnet19", ("--arch 'timm/resnet19'", "resnet18")),
    ("--arch torchvision/conv2", ("--arch 'torchvision/conv2'",)),
    ("--arch hub/resnet18", ("--arch 'hub/resnet18'",)),
    ("--optimizer adamz", ("--optimizer 'adamz'", "adam")),
    ("--arch torchvision/alexnet", ("--arch torchvision/alexnet", "8-pixel", "--image-size")),
    ("--arch conv2 --pretrained", ("--pretrained", "conv2")),
    ("--dataname mnist --datapath missing", ("--datapath missing", "no such folder", "--download")),
    ("--dataname cifar10 --datapath .", ("--datapath .", "cifar10", "--download")),
    ("--dataname folder --datapath .", ("--datapath .", "folder", "train/")),
    ("--dataname folder --datapath . --val-split 0.1", ("--datapath .", "class folders")),
    ("--dataname imagenet --datapath missing --download", ("imagenet", "get ")),
    ("--weights missing.pt", ("missing.pt", "no such checkpoint")),
    ("--resume missing.pt", ("missing.pt", "no such checkpoint")),
    ("--resume .", ("--resume .", "no checkpoint")),
    ("--evaluate --resume missing.pt", ("missing.pt", "no such checkpoint")),
    ("--evaluate --weights missing.pt", ("missing.pt", "no such checkpoint")),
    ("--gpu-ids 1023", ("--gpu-ids",)),
    ("--drop-last -b 2000", ("--drop-last leaves no step: 1,437 ", "--global-batch-size 2,000", "--no-drop-last")),
]


@pytest.mark.parametrize(("line", "words"), WRONG_IN_WHAT_IT_NAMES)
@pytest.mark.parametrize("also", ["", "--dry-run"], ids=["run", "dry run"])
def test_what_is_not_there_is_named_in_one_line(line, words, also, workplace, capsys):
    code = main.main(["--output", str(workplace / "runs"), *line.split(), *also.split()])
    (answer,) = check_answer(code, *capsys.readouterr(), 1)
    assert all(word in answer for word in words), answer
    assert files_below(workplace) == []


@pytest.mark.parametrize(
    ("flags", "words", "steps"),
    [
        ("-b 359", "359 in total, 180 and 180 in the last two steps of an epoch", "5 an epoch"),
        ("-b 359 --drop-last", "359 in total, 1 image(s) of each epoch left out", "4 an epoch"),
    ],
)
def test_the_plan_says_what_becomes_of_the_remainder_of_an_epoch(flags, words, steps, workplace, capsys):
    assert main.main(["--output", "runs", "--dry-run", "--arch", "fc", *flags.split()]) == 0
    rows = {line[:15].strip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    assert rows["Batch"].endswith(words) and rows["Steps"].startswith(steps)


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 100, b"PK\x03\x04 half a zip file"], ids=["empty", "garbage", "half a file"]
)
@pytest.mark.parametrize("flags", [("--resume",), ("--weights",), ("--evaluate", "--resume")], ids=" ".join)
def test_file_that_is_no_checkpoint_is_named_in_one_line(flags, content, workplace, capsys):
    (workplace / "bad.pt").write_bytes(content)
    code = main.main(["--output", "runs", *flags, "bad.pt"])
    (answer,) = check_answer(code, *capsys.readouterr(), 1)
    assert "bad.pt" in answer and "checkpoint" in answer
    assert files_below(workplace) == ["bad.pt"]


@pytest.mark.parametrize("flags", [("--resume",), ("--weights",)], ids=" ".join)
def test_checkpoint_that_runs_code_is_refused_and_not_run(flags, workplace, capsys):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(workplace / "attacked"),)

    torch.save({"model": Attack()}, workplace / "bad.pt")
    code = main.main(["--output", "runs", *flags, "bad.pt"])
    (answer,) = check_answer(code, *capsys.readouterr(), 1)
    assert "bad.pt" in answer and "safely" in answer
    assert files_below(workplace) == ["bad.pt"]


def test_weights_of_another_network_are_refused(workplace, capsys):
    torch.save({"layers.1.weight": torch.zeros(300, 64)}, workplace / "other.pt")
    code = main.main(["--arch", "fc", "--weights", "other.pt"])
    (answer,) = check_answer(code, *capsys.readouterr(), 1)
    assert "other.pt" in answer and "layers.1.bias" in answer and "--arch" in answer


def test_output_that_is_a_file_is_one_line_and_stays_as_it_was(workplace, capsys):
    (workplace / "taken").write_text("mine")
    code = main.main(["--output", "taken", "--arch", "fc", "--max-steps", "1"])
    (answer,) = check_answer(code, *capsys.readouterr(), 1)
    assert "--output taken" in answer
    assert files_below(workplace) == ["taken"] and (workplace / "taken").read_text() == "mine"


def test_line_break_in_a_path_does_not_break_the_line(workplace, capsys):
    code = main.main(["--dataname", "mnist", "--datapath", "no\nsuch"])
    check_answer(code, *capsys.readouterr(), 1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_environment_that_is_no_number_is_one_line(name, workplace, monkeypatch, capsys):
    for known, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(known, value)
    monkeypatch.setenv(name, "first")
    (answer,) = check_answer(main.main([]), *capsys.readouterr(), 1)
    assert name in answer and "torchrun" in answer


@pytest.mark.parametrize(("rank", "world_size"), [("0", "0"), ("2", "2"), ("-1", "2")])
def test_a_rank_that_cannot_be_is_one_line(rank, world_size, workplace, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    (answer,) = check_answer(main.main([]), *capsys.readouterr(), 1)
    assert f"RANK {rank} of WORLD_SIZE {world_size}" in answer


# ------------------------------------------------------------------------------- real processes


@pytest.mark.parametrize(("argv", "answer"), [(["--help"], ["exit 0"]), (["--epochs", "0"], [])], ids=["help", "wrong"])
def test_help_and_mistakes_import_nothing_heavy(argv, answer, workplace):
    command = [sys.executable, "-c", HELP_AND_WHAT_IT_IMPORTED, str(ROOT), *argv]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("exit")] == answer
    assert lines[-1] == "heavy []"


# Each: the arguments, and one tuple a line, of words that the answer must hold.
REAL_COMMAND_LINES = [
    ("--bogus --lr x", ("--bogus",), ("--lr", "'x'")),
    ("--arch resnet19 --optimizer adamz", ("resnet19", "resnet18"), ("adamz", "adam")),
    ("--dataname cifar10 --datapath .", ("cifar10", "--download")),
    ("--resume bad.pt", ("bad.pt", "safely")),
]


def test_real_processes_answer_with_2_and_leave_nothing_behind(workplace):
    (workplace / "bad.pt").write_bytes(b"no checkpoint")
    started = [
        start(*line.split()) for line, *_ in REAL_COMMAND_LINES
    ]  # side by side, because each imports for seconds
    for process, (_, *expected) in zip(started, REAL_COMMAND_LINES, strict=True):
        out, err = process.communicate(timeout=300)
        answers = check_answer(process.returncode, out, err, len(expected))
        for words, answer in zip(expected, answers, strict=True):
            assert all(word in answer for word in words), answer
    assert files_below(workplace) == ["bad.pt"]


def test_help_of_a_real_process_is_on_stdout_and_exits_with_0(workplace):
    process = start("--help")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "--dataname" in out and "--resume" in out
    assert files_below(workplace) == []
