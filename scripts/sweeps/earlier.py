"""What earlier calls of a sweep have trained already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from scripts.common.runs import RunResult, counts_for, read_run, run_folders
from scripts.sweeps.grid import Trial
from utils.checkpoint import checkpoint
from utils.checkpoint.fingerprint import same_images
from utils.config.datasets import SPECS
from utils.data.datasets import get_data


def finished(runs: Path, trials: Sequence[Trial]) -> dict[Trial, RunResult]:
    """The results of those ``trials`` that have a finished run below ``runs``, on the images as they are now."""
    found = {}
    fingerprint = cache(lambda data: get_data(data, torch.device("cpu")).fingerprint)
    for folder in run_folders(runs):
        result = read_run(folder)
        for trial in trials if result else ():
            if trial.seed == result.seed and counts_for(result.args, trial.args):
                if _of_other_images(result, partial(fingerprint, trial.args.data)):
                    print(f"{result.folder} does not count: the images have changed since", file=sys.stderr)
                else:
                    found[trial] = result
    return found


def _of_other_images(result: RunResult, fingerprint: Callable[[], str]) -> bool:
    """Whether the user's own images have changed since this run; unknown, so no, if its checkpoints are gone."""
    if not SPECS[result.args.data.dataname].of_the_user:
        return False
    newest = checkpoint.newest(result.folder / "checkpoints", lambda _: None)
    return newest is not None and not same_images(newest[1]["fingerprint"], fingerprint())
