"""Augmentations that have flags of their own show a sample the same way in any loader, worker, rank and resumed run."""

import pytest
import torch

import main
from tests.end_to_end.processes import load
from tests.faults.small_run import FLAGS
from tests.utils.data.test_loaders import collect, make, same, tree  # noqa: F401 - the fixture

MIXTURES = {
    "RandAugment": ("--auto-augment", "ra"),
    "timm's RandAugment": ("--auto-augment", "rand-m9-mstd0.5-inc1"),
    "AugMix": ("--auto-augment", "augmix"),
    "the others": (
        "--color-jitter 0.4 --gaussian-blur-prob 0.3 --rotation 20 --random-erase 0.5 --random-erase-mode pixel "
        "--random-erase-count 2 --augment vertical-flip"
    ).split(),
}


@pytest.mark.parametrize("flags", MIXTURES.values(), ids=MIXTURES)
def test_resident_and_streamed_images_of_one_size_are_the_same_bits(flags):
    resident, streaming = (make("--loader", kind, "--workers", 1, *flags)[0] for kind in ("resident", "stream"))
    batches = collect(resident, 1)
    assert same(batches, collect(streaming, 1))
    assert not torch.equal(batches[0][0], collect(make()[0], 1)[0][0])


@pytest.mark.parametrize("flags", MIXTURES.values(), ids=MIXTURES)
def test_files_are_the_same_bits_with_any_number_of_workers_and_ranks(tree, flags):  # noqa: F811
    flags = ("--dataname", "folder", "--datapath", tree, "--image-size", 32, "--global-batch-size", 6, *flags)

    def by_sample(workers, world_size):
        images = {}
        for rank in range(world_size):
            train = make(*flags, "--workers", workers, rank=rank, world_size=world_size)[0]
            for batch in train.batches(4):
                images |= {int(index): image for index, image in zip(batch.indices, batch.images, strict=False)}
        return images

    alone = by_sample(0, 1)
    for workers, world_size in ((1, 1), (0, 2), (0, 3)):
        other = by_sample(workers, world_size)
        assert sorted(other) == list(range(21)) and all(torch.equal(alone[index], other[index]) for index in alone)


def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(tmp_path):
    flags = (*FLAGS[:-2], "--epochs", "2", "--batch-size", "256", "--deterministic")
    flags += (*MIXTURES["timm's RandAugment"], *map(str, MIXTURES["the others"]))
    weights = []
    for name, cuts in (("whole", ()), ("cut", ("8",))):
        for cut in cuts:
            assert main.main([*flags, "--output", str(tmp_path / name), "--max-steps", cut]) == 0
        assert main.main([*flags, "--output", str(tmp_path / name), "--resume", "auto"]) == 0
        (folder,) = (tmp_path / name).glob("digits/fc/*")
        weights.append(load(folder, "final.pt")["model"])
    assert all(torch.equal(left, right) for left, right in zip(*(w.values() for w in weights), strict=True))
