"""Resident and streaming loader give the same batches, on any number of workers and ranks."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.utils.data.loading import CPU, make, read_folder, same_batches, same_steps, steps_of
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data import sources
from utils.data.augment.base import Samples
from utils.data.datasets import get_data
from utils.data.formats.readers import ImageFiles
from utils.data.images.view import View
from utils.data.loaders import choose
from utils.data.sample_plan import MicroBatch
from utils.data.sources import MicroBatchReader, StreamSource


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A class-folder tree of crops of scikit-learn's two photographs, in several sizes."""
    root = tmp_path_factory.mktemp("tree")
    photographs = load_sample_images().images
    generator = np.random.default_rng(0)
    for split, count in (("train", 21), ("val", 9)):
        for number in range(count):
            label = number % 2
            height, width = generator.integers(40, 90, 2)
            top, left = generator.integers(0, 300, 2)
            folder = root / split / ("china", "flower")[label]
            folder.mkdir(parents=True, exist_ok=True)
            crop = photographs[label][top : top + height, left : left + width]
            Image.fromarray(crop).save(folder / f"{number}.jpg", quality=95)
    return root


def same_of_both(one, other):
    """Whether the training and validation loaders of two calls of ``make`` give the same batches."""
    return same_batches(one[0].batches(1), other[0].batches(1)) and same_batches(one[1].batches(), other[1].batches())


@pytest.mark.parametrize("flags", [("--loader", "stream", "--workers", 1), ("--mixup", 0.2, "--augment", "shift")])
def test_passes_that_are_shared_out_are_those_of_the_first_steps_and_the_same_on_any_number_of_ranks(flags):
    def shared_out(world_size, *more):
        """All ranks' passes in turn."""
        found = []
        for rank in range(world_size):
            train, _, _ = make("--global-batch-size", 150, *flags, *more, rank=rank, world_size=world_size)
            for _ in train.batches(2):  # an epoch that is left early, as --max-steps does
                break
            total, batches = train.shared_out(2, 4)
            mine = [(b.images, b.targets, b.indices.tolist()) for b in batches]
            found += [(rank + world_size * number, *item) for number, item in enumerate(mine)]
        assert sorted(place for place, *_ in found) == list(range(total))
        return sorted(found, key=lambda item: item[0])

    alone = shared_out(1)
    assert [len(item[3]) for item in alone] == [50] * 12
    plan = make("--global-batch-size", 150)[0].plan
    assert [index for item in alone for index in item[3]] == [
        n for step in range(4) for n in plan.step_indices(2, step)
    ]
    for other in (shared_out(3, "--workers", 0), shared_out(1, "--accumulate", 5, "--workers", 0)):
        for one, another in zip(alone, other, strict=True):
            assert torch.equal(one[1], another[1]) and torch.equal(one[2], another[2]) and one[3] == another[3]


def test_of_an_epoch_of_fewer_steps_all_are_shared_out():
    train, _, _ = make("--global-batch-size", 1000)
    total, batches = train.shared_out(0, 16)
    passes = [batch.indices for batch in batches]
    assert len(passes) == total and sorted(np.concatenate(passes)) == list(range(1437))


@pytest.mark.parametrize("name, expected", [("digits", "resident"), ("folder", "stream"), ("synthetic", "resident")])
def test_auto_keeps_small_images_of_one_size_resident_and_says_why(tree, name, expected):
    args = parse(["--dataname", name, "--datapath", str(tree), "--image-size", "32"])
    data = get_data(args.data, CPU)
    resident, why = choose(data, args.data, CPU)
    assert resident == (expected == "resident")
    assert why


def test_a_folder_made_resident_trains_on_the_bits_of_the_streamed_one(tree):
    flags = ("--dataname", "folder", "--datapath", tree, "--image-size", 24, "--augment", "shift", "flip", "-b", 21)
    assert same_of_both(*(make(*flags, "--workers", 0, "--loader", kind) for kind in ("resident", "stream")))


@pytest.mark.parametrize("more", [(), ("--augment", "flip", "--progressive-size", 8)])
def test_a_folder_is_not_made_resident_where_training_would_see_other_pixels(tree, more):
    """Resident images are validation's middles; crops, and views at a smaller size, are made from whole images."""
    flags = ("--dataname", "folder", "--datapath", tree, "--image-size", 24, "--workers", 0, *more)
    with pytest.raises(UserError, match="--loader resident keeps images .* from the whole image; give --loader stream"):
        make(*flags, "--loader", "resident")
    assert make(*flags)[2].startswith("stream")


@pytest.mark.parametrize("size, reach", [(64, 8), (4, 1)])
def test_a_shift_reaches_an_eighth_of_a_stored_image_that_has_no_size_of_its_own(tree, size, reach):
    for name in ("folder", "synthetic"):
        flags = ("--dataname", name, "--datapath", tree, "--image-size", size, "--augment", "shift", "--workers", 0)
        for more, expected in (((), reach), (("--max-shift", 5), 5)):
            (shift,) = make(*flags, *more, "--train-samples", 4, "-b", 4)[0].transform.augmentations
            (drawn,) = shift.draw(Samples(0, 0, np.arange(20000)), size, size)
            assert [drawn.min(), drawn.max()] == [0, 2 * expected], "so many pixels each way"
    assert make("--image-size", size, "--augment", "shift")[0].transform.augmentations[0].reach == 1, "the digits' own"


def test_files_decoded_on_the_device_show_the_same_boxes(tree):
    images = read_folder(tree, "--image-size", 32).train
    shares = [MicroBatch(3, 0, np.arange(21), 21, 1.0, True)]
    readers = [MicroBatchReader(images, View(32), crop=True, as_files=on) for on in (False, True)]
    by_workers, by_device = (next(StreamSource(reader, CPU, workers=1, cores=1).batches(shares)) for reader in readers)
    assert torch.equal(by_workers[2], by_device[2])
    # Resized in float32 on the device and in fixed point by the workers.
    assert (by_workers[1].int() - by_device[1].int()).abs().max() <= 2


def test_batches_that_are_made_together_are_those_made_one_by_one():
    train, validation, _ = make("--augment", "shift", "flip", "--cutout", 3, "--mixup", "0.2", "--accumulate", 2)
    alone = [batch for step in range(train.steps_per_epoch) for batch in train.replay_step(1, step)]
    assert same_batches(train.batches(1), alone)
    plan = [share for step in range(train.steps_per_epoch) for share in train.plan.micro_batches(1, step)]
    groups = [len(shares) for shares, _, _ in train.source.batches(plan)]
    assert groups == [len(plan)]  # these are small
    seen = [batch.indices for batch in validation.batches()]
    assert [*map(len, seen)] == [64] * 5 + [40] and np.concatenate(seen).tolist() == list(range(360))


@pytest.mark.parametrize(("speeds", "number"), [((100, 105), 1), ((100, 150), 2)])
def test_the_number_of_workers_is_measured_or_given(tree, speeds, number, monkeypatch):
    monkeypatch.setattr(sources, "reading_speed", lambda reader, batches, workers: speeds[workers - 1])
    images = read_folder(tree).train
    many = ImageFiles([*images.paths] * 40, images.labels.repeat(40), "RGB")

    def workers(wanted, files, cores):
        return StreamSource(MicroBatchReader(files, View(8), crop=True), CPU, workers=wanted, cores=cores).workers

    assert workers(3, images, 1) == 3
    assert workers("auto", images, 8) == 2  # too few to measure
    assert workers("auto", images, 1) == 1
    assert workers("auto", many, 2) == number


# ------------------------------------------------------------- augmentations that have flags of their own

MIXTURES = {  # one policy for all, as test_policies.py shows of each that it draws from the samples' numbers alone
    "the data set's own": (),
    "a policy": ("--auto-augment", "rand-m9-mstd0.5-inc1"),
    "the others": (
        "--color-jitter 0.4 --gaussian-blur-prob 0.3 --rotation 20 --random-erase 0.5 --random-erase-mode pixel "
        "--random-erase-count 2 --augment vertical-flip"
    ).split(),
}


@pytest.mark.parametrize("flags", MIXTURES.values(), ids=MIXTURES)
def test_resident_and_streamed_images_of_one_size_are_the_same_bits(flags):
    some = ("--train-samples", 320)
    resident, streaming = (make("--loader", kind, "--workers", 1, *some, *flags) for kind in ("resident", "stream"))
    assert same_of_both(resident, streaming)
    first, plain = (next(train.batches(1)) for train in (resident[0], make(*some)[0]))
    assert torch.equal(first.images, plain.images) == (not flags)


@pytest.mark.parametrize("flags", MIXTURES.values(), ids=MIXTURES)
def test_files_are_the_same_bits_with_any_number_of_workers_and_ranks(tree, flags):
    flags = ("--dataname", "folder", "--datapath", tree, "--image-size", 32, "--global-batch-size", 6, *flags)
    alone = steps_of(*flags, "--workers", 0, epoch=4)
    assert sorted(torch.cat([numbers for numbers, *_ in alone.values()]).tolist()) == list(range(21))
    for workers, world_size in ((1, 1), (0, 3)):
        assert same_steps(steps_of(*flags, "--workers", workers, world_size=world_size, epoch=4), alone)
