"""Row 3: the number of data workers may change at a resume; no bit does."""

from functools import partial

import pytest

from tests.end_to_end.processes import curves, differences, points, rows
from tests.helpers import image_tree, trained

STEPS_AN_EPOCH = 5  # 150 images


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """150 images to train on, 60 to validate."""
    return image_tree(tmp_path_factory.mktemp("tree"), {"train": 15, "val": 6}, "0123456789", 24, "jpg")


@pytest.mark.parametrize("numbers", [(0, 2, 1), pytest.param((2, 1, 0), marks=pytest.mark.thorough)])
def test_a_run_resumed_twice_with_other_numbers_of_workers_equals_the_whole(numbers, tree, tmp_path):
    line = (
        f"--deterministic --dataname folder --datapath {tree} --image-size 16 --arch fc --augment resized-crop flip "
        "--mixup 0.2 --loader stream --batch-size 32 --epochs 2 --ema-decay 0.9 --print-freq 2 --picture-epochs off"
    )
    whole = trained(tmp_path / "whole", *line.split(), "--workers", 1)
    cut = partial(trained, tmp_path / "cut", *line.split(), "--resume", "auto", "--workers")
    first, second, third = numbers
    begun = cut(first, "--max-steps", 3)
    assert cut(second, "--max-steps", STEPS_AN_EPOCH + 2) == begun, "it goes on, and not anew"
    resumed = cut(third)
    assert resumed == begun
    assert differences(whole, resumed) == []
    assert rows(whole) == rows(resumed) and curves(whole) == curves(resumed)
    assert all(set(values) <= set(points(resumed)[tag]) for tag, values in points(whole).items())
