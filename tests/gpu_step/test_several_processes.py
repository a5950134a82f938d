"""Two processes whose optimizers are held as on a GPU end with the bits of those that read their flags on the host."""

import pytest

from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import differences
from tests.helpers import run_in

# Six steps; the first loss scales skip some.
FLAGS = (
    "--amp fp16 --max-skipped-steps 9 --train-samples 90 --epochs 2 --global-batch-size 30 --accumulate 2 "
    "--clip-grad-norm 1 --ema-decay 0.9 --val-every-epochs 2 --max-val-batches 1 --val-batch-size 15 "
    "--picture-epochs off --deterministic --no-progress"
).split()
SHARDED = (
    "--arch timm/test_vit --model-kwargs depth=1 --image-size 32 --init-scale 400000 --optimizer adamw --shard-model"
)


def run(output, program, flags):
    """The folder of a run, and what its log says about skipped steps."""
    Forked(*FLAGS, *flags.split(), "--output", output, processes=2, program=program).output()
    folder = run_in(output)
    return folder, [line[20:] for line in (folder / "log.txt").read_text().splitlines() if " skipped, not " in line]


@pytest.mark.parametrize("flags", [SHARDED, "--arch fc --init-scale 4000000 --optimizer lamb"])
def test_flags_on_the_device_hold_all_processes_alike(flags, tmp_path):
    """A sharded network has parameters of which one process holds nothing."""
    on_host, told = run(tmp_path / "host", "main.py", flags)
    on_device, told_too = run(tmp_path / "device", "tests/gpu_step/held_main.py", flags)
    assert set(differences(on_host, on_device)) <= {"/shards/folder"}
    assert told == told_too and 1 <= len(told) <= 9
