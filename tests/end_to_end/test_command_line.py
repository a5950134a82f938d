"""The program's answers to wrong command lines: exit code 2, a line a mistake, nothing created."""

import pytest

import main
from tests.end_to_end.forked import Forked
from utils.runtime.process import RankInfo, trains_by_itself


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
    # A busy machine may take five seconds to begin, and says so.
    lines = [line for line in err.splitlines() if not line.endswith(" s so far")]
    assert len(lines) == count, err
    assert all(line.startswith("main.py: ") for line in lines)
    return [line.removeprefix("main.py: ") for line in lines]


# Each: a command line that is wrong in what it names, and words of the line that it answers with.
WRONG_IN_WHAT_IT_NAMES = [
    ("--arch resnet19", ("--arch 'resnet19'", "resnet18")),
    ("--arch timm/resnet19", ("--arch 'timm/resnet19'", "resnet18")),
    ("--arch torchvision/conv2", ("--arch 'torchvision/conv2'",)),
    ("--arch hub/resnet18", ("--arch 'hub/resnet18'",)),
    ("--optimizer adamz", ("--optimizer 'adamz'", "adam")),
    ("--arch torchvision/squeezenet1_1", ("--arch torchvision/squeezenet1_1", "8-pixel", "--image-size")),
    ("--arch conv2 --pretrained", ("--pretrained", "conv2")),
    ("--dataname mnist --datapath missing", ("--datapath missing", "no such folder", "--download")),
    ("--dataname folder --datapath missing --labels a.csv", ("--datapath missing", "the paths in a.csv are below it")),
    ("--dataname cifar10 --datapath .", ("--datapath .", "cifar10", "--download")),
    ("--dataname folder --datapath .", ("--datapath .", "folder", "train/")),
    ("--dataname folder --datapath . --val-split 0.1", ("--datapath .", "class folders")),
    ("--dataname imagenet --datapath missing --download", ("imagenet", "get ")),
    ("--folds 3 --fold 0 --folds-from missing.pt", ("--folds-from missing.pt: no such checkpoint",)),
    ("--weights missing.pt", ("missing.pt", "no such checkpoint")),
    ("--resume missing.pt", ("missing.pt", "no such checkpoint")),
    ("--resume .", ("--resume .", "no checkpoint")),
    ("--evaluate --resume missing.pt", ("missing.pt", "no such checkpoint")),
    ("--evaluate --weights missing.pt", ("missing.pt", "no such checkpoint")),
    ("--gpu-ids 1023", ("--gpu-ids",)),
    ("--best-metric tpo1", ("--best-metric 'tpo1': no such figure of a validation; did you mean top1",)),
    ("--arch timm/test_resnet --freeze layr1", ("--freeze layr1", "did you mean layer1")),
    (
        "--arch timm/mobilenetv3_small_050 --image-size 32 --grad-penalty 0.1",
        ("--grad-penalty: the network has an operation without a second derivative (aten::hardsigmoid",),
    ),
    ("--drop-last -b 2000", ("--drop-last leaves no step: 1,437 ", "--global-batch-size 2,000", "--no-drop-last")),
]


@pytest.mark.parametrize(("line", "words"), WRONG_IN_WHAT_IT_NAMES)
def test_what_is_not_there_is_named_in_one_line(line, words, workplace, capsys):
    for also in ((), ("--dry-run",)):
        code = main.main(["--output", str(workplace / "runs"), *line.split(), *also])
        (answer,) = check_answer(code, *capsys.readouterr(), 1)
        assert all(word in answer for word in words), answer
    assert files_below(workplace) == []


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank", "words"),
    [
        ("first", "1", "0", "RANK"),
        ("0", "first", "0", "WORLD_SIZE"),
        ("0", "1", "first", "LOCAL_RANK"),
        ("0", "0", "0", "RANK 0 of WORLD_SIZE 0"),
        ("2", "2", "0", "RANK 2 of WORLD_SIZE 2"),
        ("-1", "2", "0", "RANK -1 of WORLD_SIZE 2"),
    ],
)
def test_an_environment_that_cannot_be_is_one_line(rank, world_size, local_rank, words, workplace, monkeypatch, capsys):
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    (answer,) = check_answer(main.main([]), *capsys.readouterr(), 1)
    assert words in answer and "torchrun" in answer


def test_a_number_of_processes_without_a_rank_is_one_line(workplace, monkeypatch, capsys):
    """As where a script for srun exports WORLD_SIZE: each process would train all by itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    (answer,) = check_answer(main.main(["--dry-run"]), *capsys.readouterr(), 1)
    assert answer.startswith("environment: WORLD_SIZE is 2 and RANK is not set; start with torchrun, or unset")
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        assert RankInfo.from_environment() == RankInfo()


def test_a_rank_of_many_on_a_machine_without_its_place_there_is_one_line(workplace, monkeypatch, capsys):
    """As where a script for srun exports RANK and WORLD_SIZE alone: all would take the first GPU."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}.items():
        monkeypatch.setenv(name, value)
    (answer,) = check_answer(main.main(["--dry-run"]), *capsys.readouterr(), 1)
    assert "RANK is set and LOCAL_RANK is not, but srun has started 8(x2) processes a machine" in answer
    for tasks in ("1", "1(x2)"):
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        assert RankInfo.from_environment() == RankInfo(0, 16)


@pytest.mark.parametrize(
    ("variable", "launcher"), [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")]
)
def test_one_of_many_processes_without_a_rank_is_warned_that_it_trains_by_itself(
    variable, launcher, workplace, monkeypatch, capsys
):
    for count, warned in (("2", True), ("1", False)):
        monkeypatch.setenv(variable, count)
        assert main.main(["--arch", "fc", "--dry-run"]) == 0
        said = f"environment: {launcher} has started 2 processes, and each trains by itself"
        assert (said in capsys.readouterr().err) is warned
    monkeypatch.setenv(variable, "2")
    monkeypatch.setenv("RANK", "0")
    assert trains_by_itself() is None, "torchrun under srun"


# ------------------------------------------------------------------------------- real processes


@pytest.mark.parametrize("processes", [1, 2])
def test_real_processes_answer_once_with_2_and_leave_nothing_behind(processes, workplace):
    process = Forked("--arch", "resnet19", "--optimizer", "adamz", "--output", "runs", processes=processes)
    printed = process.communicate()
    network, optimizer = check_answer(process.returncode, *printed, 2)
    assert "resnet18" in network and "did you mean adam" in optimizer
    assert files_below(workplace) == []
