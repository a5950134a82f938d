"""Several processes: the same answers, exact validation, and a mistake told once."""

import torch

from main import main
from tests.end_to_end.processes import FINAL_LINE, start


def test_a_mistake_is_told_once_by_several_processes_with_no_traceback_of_ours(tmp_path):
    process = start("--arch", "resnt18", "--output", tmp_path / "runs", processes=2)
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0
    ours = [line for line in err.splitlines() if line.startswith("main.py: ")]
    assert len(ours) == 1 and "did you mean resnet18" in ours[0]
    assert not (tmp_path / "runs").exists()


def test_the_process_group_is_gone_after_a_run_and_after_a_mistake(tmp_path, capsys):
    assert main(["--device", "cpu", "--arch", "fc", "--epochs", "1", "--output", str(tmp_path)]) == 0
    assert FINAL_LINE.fullmatch(capsys.readouterr().out.splitlines()[-1])
    assert main(["--device", "cpu", "--arch", "none-such", "--output", str(tmp_path)]) == 2
    assert not torch.distributed.is_initialized()
