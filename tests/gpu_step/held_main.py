"""main.py, whose optimizers are held as on a GPU: python tests/gpu_step/held_main.py FLAGS."""

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import main as program
from utils.loop import verdict
from utils.optim.held import held
from utils.runtime.process import end_process

if __name__ == "__main__":
    with mock.patch.object(verdict, "held", lambda optimizer, _: held(optimizer, torch.device("cuda"))):
        end_process(program.main(sys.argv[1:], ends_process=True))
