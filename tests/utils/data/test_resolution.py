"""Progressive image size: FFCV's sizes, the images of a run of that size, alike on any loader and from any step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import main
from tests.faults.small_run import told
from tests.helpers import class_files
from tests.utils.data import loading
from tests.utils.data.loading import same_batches
from utils.config.arguments import parse
from utils.data.resolution import Resolution, build_resolution

GROWS = ("--progressive-size", 8, "--progressive-step", 4, "--progressive-epochs", 1, 4, "--epochs", 6)
SIZES = [8, 8, 12, 12, 16, 16]  # of the epochs, up to --image-size 16


def of_ffcv(epoch, low, high, start, end):
    """FFCV's formula: the ends as they are, in between linear, in steps of 32."""
    if epoch <= start:
        return low
    if epoch >= end:
        return high
    return int(np.round(np.interp(epoch, [start, end], [low, high]) / 32)) * 32


@pytest.mark.parametrize("args", [(160, 192, 65, 76), (160, 192, 11, 13), (128, 224, 0, 30), (96, 256, 3, 5)])
def test_sizes_are_ffcvs(args):
    low, high, start, end = args
    resolution = Resolution(low, high, 32, start, end)
    assert [resolution.size(epoch) for epoch in range(100)] == [of_ffcv(epoch, *args) for epoch in range(100)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 70), st.integers(0, 90), st.integers(0, 90))
def test_sizes_never_shrink_and_are_multiples_of_the_step_but_for_the_ends(low, more, step, start, more_epochs):
    resolution = Resolution(low, low + more, step, start, start + more_epochs)
    sizes = [resolution.size(epoch) for epoch in range(start + more_epochs + 3)]
    assert sizes == sorted(sizes) and set(sizes[start + more_epochs :]) == {low + more}
    assert min(sizes[: start + (more_epochs > 0)], default=low) == low
    assert all(size % step == 0 for size in sizes if size not in (low, low + more))


def test_a_size_that_is_not_square_grows_in_its_shape():
    assert Resolution(24, (48, 80), 4, 0, 6).sizes(8) == [
        (24, 40),
        (28, 47),
        (32, 53),
        (36, 60),
        (40, 67),
        (44, 73),
        (48, 80),
    ]
    assert Resolution(24, (80, 48), 4, 0, 1).sizes(3) == [(40, 24), (80, 48)]


def test_the_growth_is_where_it_is_in_ffcvs_recipes_unless_told():
    for epochs, expected in ((88, (65, 76)), (16, (11, 13))):
        args = parse(["--progressive-size", "160", "--epochs", str(epochs)], 1)
        resolution = build_resolution(args, 192)
        assert (resolution.start, resolution.end) == expected and resolution.sizes(epochs) == [160, 192]
    assert build_resolution(parse([], 1), 192) is None


def test_the_table_counts_epochs_from_one():
    assert (
        Resolution(8, 16, 4, 1, 4).table(6) == "8 px in epochs 1 to 2, 12 px in epochs 3 to 4, 16 px in epochs 5 to 6"
    )
    assert Resolution(8, 16, 8, 0, 1).table(2) == "8 px in epoch 1, 16 px in epoch 2"


# ------------------------------------------------------------------------------- through the loader


@pytest.fixture
def files(tmp_path):
    """Class folders of photographs of several sizes."""
    numbers = np.random.default_rng(0)
    for path, *_, number in class_files(tmp_path, {"train": 6, "val": 2}):
        Image.fromarray(numbers.integers(0, 255, (30 + 5 * number, 44, 3), dtype=np.uint8)).save(path)
    return ("--dataname", "folder", "--datapath", tmp_path, "-b", 5)


def make(*flags, **place):
    return loading.make("--workers", 0, "--seed", 3, *flags, **place)[:2]


@pytest.mark.parametrize("loader", ["resident", "stream"])
@pytest.mark.parametrize(
    "more", [("--augment", "shift", "--cutout", 3, "--mixup", 0.3, "--cutmix", 1), ("--augment", "resized-crop")]
)
def test_the_images_of_an_epoch_are_those_of_a_run_of_its_size(loader, more):
    flags = ("--loader", loader, "-b", 700, *more)
    train, validation = make("--image-size", 16, *GROWS, *flags)
    assert train.image_shape == (1, 16, 16)
    for epoch in (0, 2, 5):
        plain, _ = make("--image-size", SIZES[epoch], *flags)
        batches = list(train.batches(epoch))
        assert batches[0].images.shape[2:] == (SIZES[epoch],) * 2 and same_batches(batches, plain.batches(epoch))
    assert next(validation.batches()).images.shape[2:] == (16, 16)


@pytest.mark.parametrize(("augment", "workers"), [("resized-crop", 1), ("flip", 0)])
def test_files_are_read_at_the_size_of_the_epoch(files, augment, workers):
    flags = (*files, "--loader", "stream", "--augment", augment)
    train, validation = make(*flags, "--image-size", 16, *GROWS, "--workers", workers)
    for epoch in (0, 3, 4):
        plain, _ = make(*flags, "--image-size", SIZES[epoch])
        assert same_batches(train.batches(epoch), plain.batches(epoch))
    assert next(validation.batches()).images.shape[2:] == (16, 16)


@pytest.mark.parametrize("stored", ["in memory", "in files"])
def test_crops_show_at_least_the_area_that_is_asked(files, stored):
    flags = (*(files if stored == "in files" else ()), "--image-size", 16)
    whole, _ = make(*flags, "--augment", "none")
    away = []
    for least in (0.02, 0.08, 0.5, 0.95):
        train, _ = make(*flags, "--augment", "resized-crop", "--crop-min-area", least)
        pairs = zip(train.batches(0), whole.batches(0), strict=True)
        away.append(np.mean([(one.images - other.images).square().mean().item() for one, other in pairs]))
    assert away[0] > away[1] > 1.1 * away[2] > 1.2 * away[3]
    usual, _ = make(*flags, "--augment", "resized-crop")
    explicit, _ = make(*flags, "--augment", "resized-crop", "--crop-min-area", 0.08)
    assert same_batches(usual.batches(1), explicit.batches(1))


def test_any_ranks_and_any_first_step_have_the_same_bits_and_so_have_batch_norms_statistics():
    flags = ("--image-size", 16, *GROWS, "--global-batch-size", 300, "--augment", "shift")
    alone, _ = make(*flags)
    for epoch in (1, 2):
        batches = list(alone.batches(epoch))
        assert same_batches(batches[-2:], alone.batches(epoch, first_step=len(batches) - 2))
        assert same_batches(batches[3:4], alone.replay_step(epoch, 3))
        images = torch.cat([batch.images for batch in batches])
        ranks = [list(make(*flags, rank=rank, world_size=2)[0].batches(epoch)) for rank in (0, 1)]
        assert torch.equal(images, torch.cat([part.images for parts in zip(*ranks, strict=True) for part in parts]))
        count, shared = alone.shared_out(epoch, 2)
        seen = torch.cat([batch.images for batch in shared])
        assert count > 1 and torch.equal(seen, images[: len(seen)]) and seen.shape[2] == SIZES[epoch]


# --------------------------------------------------------------------------------- through the program

RUN = ("--device", "cpu", "--no-progress", "--image-size", "16", *map(str, GROWS))


def test_mistakes_are_reported_before_the_start(capsys):
    dry = ("--dry-run", *RUN)
    for more, words in (
        (("--arch", "fc"), "does not take 8-pixel images"),
        (("--arch", "conv2a", "--progressive-size", "16"), "--progressive-size 16 is where images begin to grow"),
        (("--arch", "conv2a", "--epochs", "4"), "--progressive-epochs 1 4: --epochs 4 end before"),
        (("--arch", "conv2a", "--progressive-epochs", "4", "1"), "must be two epochs"),
    ):
        code, lines = told(capsys, (*dry, *more))
        assert code == 2 and len(lines) == 1 and words in lines[0], lines
    code, lines = told(capsys, ("--dry-run", "--device", "cpu", "--arch", "fc", "--progressive-step", "4"))
    assert code == 0 and "does nothing: it needs --progressive-size" in lines[0]


def test_plan_and_log_have_the_table_of_sizes(workplace, capsys):
    table = "8 px in epochs 1 to 2, 12 px in epochs 3 to 4, 16 px in epochs 5 to 6"
    assert main.main([*RUN, "--arch", "conv2a", "--dry-run"]) == 0
    assert f"Training size  {table}\n" in capsys.readouterr().out
    assert main.main([*RUN, "--arch", "conv2a", "--max-steps", "1"]) == 0
    assert f"Training size: {table}\n" in capsys.readouterr().out
