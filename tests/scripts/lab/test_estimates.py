"""How long a training would take, and how much memory: its arithmetic against sums by hand."""

from __future__ import annotations

from scripts.lab.results import estimates


def test_the_arithmetic_of_a_training_is_that_of_its_layers():
    fc = 28 * 28 * 300 + 300 * 100 + 100 * 10
    assert estimates.training_multiply_adds("mnist/fc") == 3 * fc * 60_000 * 10  # epochs
    conv2 = 28 * 28 * 9 * 64 * (1 + 64) + 14 * 14 * 64 * 256 + 256 * 256 + 256 * 10
    assert estimates.training_multiply_adds("mnist/conv2") == 3 * conv2 * 60_000 * 5


def test_small_images_of_the_first_epochs_count_as_such():
    sizes = {160: 12, 192: 4}
    args = estimates.settings("imagenet/resnet50_ffcv16")
    images = sum(estimates._cost(args.model, "imagenet", size).multiply_adds * epochs for size, epochs in sizes.items())
    assert estimates.training_multiply_adds("imagenet/resnet50_ffcv16") == 3 * images * 1_281_167


def test_the_memory_of_a_step_is_that_of_its_weights_and_of_what_its_layers_keep():
    fc = 28 * 28 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10
    kept = 28 * 28 + 300 + 100  # what each linear layer reads
    assert estimates.training_bytes("mnist/fc", 1) == fc * (4 + 4 + 4 + 2) + 128 * 2 * kept
    assert estimates.training_bytes("mnist/fc", 8) == fc * (4 + 4 + 4 + 2) + 16 * 2 * kept
    shared = estimates.training_bytes("imagenet/resnet50", 1) - estimates.training_bytes("imagenet/resnet50", 8)
    norms = 26_560  # channels of all batch norms: a mean and a deviation for each, counted over two images
    assert shared == (2048 - 256) * 2 * (numbers_that_resnet50_keeps() + norms)


def numbers_that_resnet50_keeps():
    """Numbers that a pass of one image of 224 pixels keeps: the input of each convolution, and of each norm."""
    kept = 3 * 224**2 + 2 * 64 * 112**2 + 64 * 56**2 * (1 + 4)  # the pooled map, and 8 bytes for each maximum's place
    for width, blocks, size in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        first = size if width == 64 else 2 * size
        kept += 2 * width * (first**2 + (2 * blocks - 1) * size**2)  # the 1x1 and 3x3 convolutions
        kept += (2 * blocks + 1) * 4 * width * size**2  # the wide 1x1, each block's sum, the shortcut's convolution
    return kept + 2048  # the last layer's input
