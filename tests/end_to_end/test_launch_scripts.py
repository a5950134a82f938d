"""The scripts that a person starts: each launcher's command for real, and which python the scripts choose."""

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent import futures

import pytest
import torch
from packaging.requirements import Requirement

from main import main
from scripts.common.recipes import recipes
from scripts.torchrun import Launcher
from tests.end_to_end.forked import Forked, python_that_forks
from tests.end_to_end.processes import FINAL_LINE, ROOT
from tests.end_to_end.scripts import SBATCH, SCRIPTS, SYNTHETIC, executable, run, variables

SHELL_SCRIPTS = [*sorted(SCRIPTS.rglob("*.sh")), *sorted(SCRIPTS.glob("*.sbatch")), ROOT / ".ci" / "run"]
LAUNCHERS = ["mnist_fc.sh", "cifar10_resnet18.sh", "imagenet_resnet18.sh", "imagenet_resnet50.sh"]


@pytest.fixture
def environment():
    return variables()


@pytest.fixture
def forking():
    """The environment with a python that starts our programs as forks."""
    with python_that_forks() as python:
        yield variables(python)


# ------------------------------------------------------------------------------------- launchers


def test_scripts_are_good_bash():
    for script in SHELL_SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", [*LAUNCHERS, SBATCH, "launch.sh", "elastic.sh"])
def test_a_launcher_without_recipe_or_data_says_how_it_is_used(script, environment, tmp_path):
    if script == "elastic.sh":
        environment |= {"NNODES": "1:2", "RDZV_ENDPOINT": "localhost:0", "RDZV_ID": "test"}
    for before in ((), ("mnist/fc",)) if script in ("launch.sh", "elastic.sh", SBATCH) else ((),):
        for flags in ("", "--epochs 3", "--help", "-e"):
            done = run("bash", SCRIPTS / script, *before, *flags.split(), env=environment, cwd=tmp_path, code=2)
            assert (done.stdout, done.stderr.count("\n")) == ("", 1)
            assert done.stderr.startswith("usage: ") and script in done.stderr and "DATA" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", [SBATCH, "elastic.sh"])
def test_a_launcher_that_continues_by_itself_takes_no_other_run_to_resume(script, environment, tmp_path):
    environment |= {"NNODES": "1:2", "RDZV_ENDPOINT": "localhost:0", "RDZV_ID": "test"}
    for flags in ("--resume runs/X", "--resume=runs/X"):
        line = ["mnist/fc", "D", "--global-batch-size", "64", *flags.split()]
        done = run("bash", SCRIPTS / script, *line, env=environment, cwd=tmp_path, code=2)
        assert "leave --resume out" in done.stderr and done.stderr.count("\n") == 1


# Each: what the plan says of network, epochs, batch, learning rate and optimizer.
FIGURES = {
    "imagenet_resnet18.sh": "resnet18; x 90 epochs; 256 in total; multistep  epoch 0: 0.1; epoch 45: 0.01; "
    "epoch 67.5: 0.001; momentum 0.9, weight decay 0.0001",
    "imagenet_resnet50.sh": "resnet50; x 90 epochs; 2048 in total; cosine  epoch 0: 0.256; epoch 8: 2.048; "
    "momentum 0.875, weight decay 3.05e-05 (not on *bn*)",
    "cifar10_resnet18.sh": "resnet18; x 200 epochs; 128 in total; cosine  epoch 0: 0.1 ; epoch 100: 0.05; "
    "momentum 0.9, weight decay 0.0005",
}


@pytest.mark.parametrize("script", FIGURES)
def test_a_launcher_starts_its_recipe_whose_plan_holds_these_figures(script, place, tmp_path, monkeypatch, capsys):
    (place.bin / "has_all").touch()
    line = place.run(script, "DATA", "--seed", "3").stdout.split()
    assert line[-4:] == ["--datapath", "DATA", "--seed", "3"]
    monkeypatch.chdir(tmp_path)
    assert main([*line[line.index("--config") : -4], *SYNTHETIC, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    for figure in FIGURES[script].split("; "):
        assert figure in plan, plan


def test_a_launcher_starts_a_process_for_each_gpu(place, capsys):
    (place.bin / "has_all").touch()
    line = place.run("launch.sh", "digits/fc").stdout  # in which the fake python's answer is what it was asked
    exec(line.partition("--nproc-per-node -c ")[2].partition(f" {place.root}/main.py")[0])
    assert capsys.readouterr().out == f"{max(1, torch.cuda.device_count())}\n"


def test_a_launcher_trains_in_the_callers_folder(forking, tmp_path):
    flags = [*SYNTHETIC, "--max-steps", "2", "--global-batch-size", "8", "--output", "here", "--picture-epochs", "off"]
    done = run("bash", SCRIPTS / "mnist_fc.sh", "DATA", *flags, env=forking, cwd=tmp_path)
    final = FINAL_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert final["count"] == "1280"
    assert "Processes: 1 on " in done.stdout
    assert "_b8-sgd-lr0.1-cosine-e10" in final["run"]
    assert (tmp_path / final["run"] / "checkpoints" / "final.pt").is_file()  # in the caller's folder


def test_several_machines_without_a_meeting_point_are_told_what_to_set(environment, tmp_path):
    several = environment | {"NNODES": "2", "RDZV_ID": "one"}
    done = run("bash", SCRIPTS / "launch.sh", "digits/fc", env=several, cwd=tmp_path, code=2)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.stderr.startswith("launch.sh: NNODES is set, so RDZV_ENDPOINT")


def test_a_recipe_of_digits_needs_no_folder_of_images(place):
    (place.bin / "has_all").touch()
    for data, given in (([], ""), (["DATA"], " --datapath DATA")):
        line = place.run("launch.sh", "digits/fc", *data, "--epochs", "3").stdout
        assert line.endswith(f"/main.py --config digits/fc{given} --epochs 3\n")


def test_the_list_holds_each_recipe_with_reference_and_measured_figure(environment, tmp_path):
    lines = run("bash", SCRIPTS / "launch.sh", "--list", env=environment, cwd=tmp_path).stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if "/" in line.split(" ")[0]}
    figures = {recipe.name: recipe.measured_figure for recipe in recipes() if "/" in recipe.name}
    assert rows.keys() == figures.keys()
    assert rows["cifar10/resnet18"].endswith("  not measured") and "95.28 %" in rows["cifar10/resnet18"]
    assert re.split(r" {2,}", rows["mnist/fc"])[1:] == ["98.36 %", figures["mnist/fc"]]
    assert re.split(r" {2,}", rows["fashionmnist/conv6"])[1:] == ["of another split", figures["fashionmnist/conv6"]]
    assert re.fullmatch(r"[\d.]+ % \(own split\)", figures["fashionmnist/conv6"])
    done = run("bash", SCRIPTS / "mnist_fc.sh", "--list", env=environment, cwd=tmp_path, code=2)
    assert "--list" not in done.stderr, "a launcher of one recipe lists none"


@pytest.mark.parametrize(
    ("codes", "received", "unasked", "expected"),
    [
        ([0, 0], 0, None, 0),
        ([0, 0], signal.SIGTERM, None, 0),  # it came when all was done
        ([75, 75], signal.SIGUSR1, None, 75),
        ([75, 75], 0, None, 75),  # another machine's launcher has received the signal
        ([-signal.SIGTERM, -signal.SIGTERM], signal.SIGTERM, None, 75),  # before training began
        ([75, -signal.SIGKILL], signal.SIGTERM, None, 75),
        ([], signal.SIGTERM, None, 75),
        ([130, 130], signal.SIGINT, None, 130),
        ([2, 2], 0, None, 2),
        ([2, 2], signal.SIGTERM, None, 2),  # the state could not be saved
        ([1, 2], 0, None, 2),
        ([1, 75], signal.SIGTERM, None, 1),
        ([1, 75], 0, [75], 75),  # the signal came to one process, before training
        ([1, 75], 0, [1], 1),
        ([1, -signal.SIGKILL], 0, None, 1),
        ([-signal.SIGSEGV], 0, None, 1),
        ([], 0, None, 1),
        # what the launcher itself had to end does not say "stopped"
        ([75], 0, [], 1),  # after contact with the other machine was lost
        ([75], 0, [75], 75),
        ([75], signal.SIGTERM, [], 75),
    ],
)
def test_the_launchers_exit_code_says_what_to_do_next(codes, received, unasked, expected, monkeypatch):
    launcher = Launcher()
    launcher.received = received
    launcher.unasked = unasked
    monkeypatch.setattr(launcher, "exit_codes", lambda: codes)
    assert launcher.exit_code(succeeded=not received and not any(codes) and bool(codes)) == expected


def test_a_mistake_ends_an_elastic_run_with_exit_code_2_and_without_restarts(forking, tmp_path):
    places = {"NNODES": "1:2", "RDZV_ENDPOINT": "localhost:0", "RDZV_ID": "test", "MAX_RESTARTS": "3"}
    places["PET_RDZV_CONF"] = "last_call_timeout=1"
    flags = [*SYNTHETIC, "--epochs", "none"]
    done = run("bash", SCRIPTS / "elastic.sh", "mnist/fc", "D", *flags, env=forking | places, cwd=tmp_path, code=2)
    assert done.stderr.count("main.py: --epochs") == 1


def test_a_port_that_another_program_has_is_named_by_the_launcher(forking, tmp_path):
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        line = f"env python3 {SCRIPTS}/torchrun.py --nproc-per-node 2 --master-port {port} {ROOT}/main.py"
        done = run(*line.split(), env=forking, cwd=tmp_path, code=2)
    where = f"torchrun.py: port {port} is in use on this machine, by another training perhaps"
    assert done.stderr == f"{where}; give another --master-port, or --standalone\n"


def test_a_port_that_another_program_has_is_named_by_the_program_where_no_launcher_meets_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        process = Forked("--arch", "fc", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        assert process.communicate(60) == [
            "",
            f"main.py: environment: port {port} is in use on this machine, by another training perhaps; "
            "set another MASTER_PORT\n",
        ]
    assert process.returncode == 2
    process = Forked("--arch", "fc")
    assert "MASTER_ADDR and MASTER_PORT must be set" in process.communicate(60)[1] and process.returncode == 2


def test_an_elastic_run_needs_a_batch_that_does_not_depend_on_the_number_of_machines(environment, tmp_path):
    (tmp_path / "own.yaml").write_text("arch: fc\n")
    places = {"NNODES": "1:2", "RDZV_ENDPOINT": "localhost:0", "RDZV_ID": "test"}
    done = run("bash", SCRIPTS / "elastic.sh", "own.yaml", "D", env=environment | places, cwd=tmp_path, code=2)
    assert "--global-batch-size" in done.stderr and done.stderr.count("\n") == 1


# ---------------------------------------------------------------- quickstart.sh, test.sh and their python

# A python as the scripts see one. What it "has" is in a file beside it; it tells what it was asked to do.
FAKE_PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
case "$*" in
  *"sys.version_info < "*) [[ ! -e $here/is_old ]] ;;
  *"import ensurepip, venv"*) [[ ! -e $here/without_venv ]] ;;
  --version) echo "Python 3.12.0" ;;
  *packaging.requirements*) [[ -e $here/has_all ]] || echo torch ;;
  "-m venv --clear "*)
    echo "venv" >> "$LOG"
    mkdir -p "$4/bin" "$4/lib/python3.12/site-packages"
    cp "$here/python3" "$4/bin/python" ;;
  "-m pip --version") ;;
  "-m pip install --upgrade pip "*) [[ ! -e $FAIL ]] && echo "newer pip" >> "$LOG" ;;
  "-m pip install "*)
    echo "install ${!#}" >> "$LOG"
    [[ ! -e $FAIL ]] && touch "$here/has_all" ;;
  "-m ruff "* | "-m mypy" | "-m pytest "*) echo "$*" && [[ $FAILS != "$2" ]] ;;
  "main.py"*) mkdir -p runs && echo "$*" && echo "val_top1=99.0000" ;;
  *) echo "$*" ;;
esac
"""
TOOLS = ("bash", "cat", "dirname", "mkdir", "mktemp", "cp", "rm", "touch", "sed")


class Place:
    """A copy of the scripts with one fake python on PATH, and nothing else that could be one."""

    def __init__(self, folder):
        self.root = folder / "repo"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.fail = folder / "fail"
        shutil.copytree(SCRIPTS, self.root / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        executable(self.bin / "python3", FAKE_PYTHON)
        self.env = {"PATH": str(self.bin), "LOG": str(self.log), "FAIL": str(self.fail)}
        self.venv = self.root / ".venv"

    def run(self, script, *flags, code=0, **more):
        return run("bash", f"scripts/{script}", *flags, env={**self.env, **more}, cwd=self.root, code=code)

    def done(self):
        """What was made and installed so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.replace(f"{self.root}/", "") for line in lines]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_quickstart_uses_a_python_that_has_everything(place):
    (place.bin / "has_all").touch()
    done = place.run("quickstart.sh", "--epochs", "3")
    assert done.stdout.splitlines() == ["main.py --epochs 3", "val_top1=99.0000"]
    assert done.stderr == "", "main.py's own end says where TensorBoard is"
    assert place.done() == []
    assert not place.venv.exists()


def test_quickstart_makes_an_environment_once(place):
    first = place.run("quickstart.sh")
    assert "a few GB" in first.stdout
    assert first.stdout.splitlines()[-1] == "val_top1=99.0000"
    again = place.run("quickstart.sh")
    assert again.stdout.splitlines() == ["main.py", "val_top1=99.0000"]
    assert place.done() == ["venv", "newer pip", "install requirements.txt"]


@pytest.mark.parametrize(("fails", "code"), [("", 0), ("ruff", 1), ("mypy", 1), ("pytest", 1)])
def test_test_sh_lints_and_hands_its_flags_to_pytest(fails, code, place):
    done = place.run("test.sh", "tests/utils", "-x", FAILS=fails, code=code)
    assert place.done() == ["venv", "newer pip", "install requirements-dev.txt"]
    if fails == "ruff":
        assert done.stdout.splitlines()[-1] == "-m ruff check"
        return
    *lints, tests, types = done.stdout.splitlines()[-4:]
    assert [*lints, types] == ["-m ruff check", "-m ruff format --check", "-m mypy"]
    assert re.fullmatch(r"-m pytest -n [2-8] --dist loadfile --no-loadscope-reorder tests/utils -x", tests)


def test_the_lowest_versions_are_tested_in_an_environment_of_their_own_on_the_lowest_python(place):
    executable(place.bin / "python3.10", FAKE_PYTHON)
    for name in ("requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, place.root)
    for _ in range(2):
        done = place.run("lab/test_lowest.sh", "-x")
        last = done.stdout.splitlines()[-1]
        assert re.fullmatch(r"-m pytest -n [2-8] --dist loadfile --no-loadscope-reorder -x", last)
        assert not place.venv.exists()
    assert place.done() == ["venv", "newer pip", "install .venv-lowest/requirements.txt"]
    *pins, last = (place.root / ".venv-lowest" / "requirements.txt").read_text().splitlines()
    assert last == "-r ../requirements-dev.txt"
    for pin, line in zip(pins, (ROOT / "requirements.txt").read_text().splitlines(), strict=True):
        pin, asked = (Requirement(text.partition("#")[0]) for text in (pin, line))
        (lowest,) = (part.version for part in asked.specifier if part.operator == ">=")
        assert (pin.name, str(pin.specifier), pin.marker) == (asked.name, f"=={lowest}", asked.marker)


def test_an_installation_that_was_cut_off_is_repaired(place):
    place.fail.touch()
    failed = place.run("quickstart.sh", code=1)
    assert failed.stderr == "pip could not install everything; run the same command again\n"
    packages = place.venv / "lib" / "python3.12" / "site-packages"
    for name in ("whole", "half"):
        (packages / f"{name}.dist-info").mkdir()
    (packages / "whole.dist-info" / "INSTALLER").touch()
    (place.venv / "bin" / "has_all").touch()  # also the half package looks installed
    place.fail.unlink()
    place.run("quickstart.sh")
    assert [path.name for path in packages.iterdir()] == ["whole.dist-info"]
    assert place.done() == ["venv", "install requirements.txt", "install requirements.txt"]


def test_of_two_that_would_install_at_once_one_waits_and_uses_what_the_other_has_installed(place):
    (place.bin / "flock").symlink_to(shutil.which("flock"))
    with open(place.root / ".venv.lock", "w") as other, futures.ThreadPoolExecutor() as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = pool.submit(place.run, "quickstart.sh")
        with pytest.raises(futures.TimeoutError):
            waiting.result(1)
        (place.bin / "has_all").touch()
        fcntl.flock(other, fcntl.LOCK_UN)
        said = waiting.result(60).stdout.splitlines()
    assert said == ["Waiting for another process, which installs", "main.py", "val_top1=99.0000"]
    assert place.done() == []


def test_where_files_cannot_be_locked_nobody_waits_before_an_installation(place):
    executable(place.bin / "flock", "#!/bin/sh\necho no locks here >&2\nexit 71\n")
    assert place.run("quickstart.sh").stdout.splitlines()[-2:] == ["main.py", "val_top1=99.0000"]
    assert place.done() == ["venv", "newer pip", "install requirements.txt"]


def test_the_active_environment_gets_what_it_lacks(place, tmp_path):
    active = tmp_path / "active"
    (active / "bin").mkdir(parents=True)
    executable(active / "bin" / "python", FAKE_PYTHON)
    (place.bin / "has_all").touch()  # the python on PATH does not matter then
    place.run("quickstart.sh", VIRTUAL_ENV=str(active))
    assert place.done() == ["install requirements.txt"]
    assert not place.venv.exists()


@pytest.mark.parametrize(
    ("fault", "message"), [("is_old", "No Python 3.10 or newer"), ("without_venv", "python3-venv")]
)
def test_a_python_that_cannot_do_is_one_clear_line(fault, message, place):
    (place.bin / fault).touch()
    done = place.run("quickstart.sh", code=1)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_launcher_says_how_to_install_and_installs_nothing(place):
    done = place.run("mnist_fc.sh", "DATA", code=1)
    assert "scripts/quickstart.sh" in done.stderr
    assert place.done() == []


def missing_requirements(root, file):
    words = f"source {SCRIPTS}/environment.sh; ROOT={root}; missing_requirements {sys.executable} {file}"
    return run("bash", "-c", words, env=os.environ, cwd=root).stdout.splitlines()


def test_missing_requirements_names_what_is_absent_or_too_old(tmp_path):
    (tmp_path / "more.txt").write_text("-r base.txt\nno-such-package>=1  # a comment\nnone-such  # optional: why\n")
    (tmp_path / "base.txt").write_text("\npytest>=1\npytest>=999,<1000\nscikit-learn\nx; sys_platform == 'no'\n")
    assert missing_requirements(tmp_path, "more.txt") == ["pytest<1000,>=999", "no-such-package>=1"]
