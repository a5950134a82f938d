"""Decorators for a user's own file: ``python main.py --plugin mine.py --arch mine --loss mine``.

    from utils.plugin import loss, network

    @network("mine")
    def mine(classes, channels, image_size):
        return torch.nn.Sequential(...)

    @loss("mine")
    def mine_too(logits, targets):
        return torch.nn.functional.cross_entropy(logits, targets)

A function must take random numbers only from its arguments, so that a run resumes exactly. docs/plugins.md has an
example of each decorator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from utils.config.datasets import OF_PLUGIN, DatasetSpec
from utils.config.plugins import Function, add

__all__ = ["augmentation", "dataset", "hook", "loss", "lr_policy", "metric", "network", "optimizer"]

Decorator = Callable[[Function], Function]
IMAGE_SIZE = 224
MEAN_AND_STD = (0.5, 0.25)


def network(name: str) -> Decorator:
    """Decorator for ``--arch NAME``: a function of (classes, channels, image_size) that returns a ``torch.nn.Module``.

    The module turns float32 images (n, channels, height, width), normalised, into logits (n, classes). ``image_size``:
    pixels a side, or (height, width) if they differ. Further arguments of the function are ``--model-kwargs``.
    """
    return add("network", name, ("classes", "channels", "image_size"), more=True)


def loss(name: str) -> Decorator:
    """Decorator for ``--loss NAME``: a function of (logits, targets) that returns a tensor (), the mean over n images.

    ``logits``: float32 (n, classes); ``targets``: int64 (n,), or float32 (n, classes) of mixed images, or of several
    labels, with NaN where a label is missing.
    """
    return add("loss", name, ("logits", "targets"))


def optimizer(name: str) -> Decorator:
    """Decorator for ``--optimizer NAME``: a function of (groups, lr) that returns a ``torch.optim.Optimizer``.

    ``groups``: dicts of parameters with their weight decay, as torch's optimizers take them. Further arguments of the
    function are ``--opt-kwargs``, ``--opt-eps`` and ``--opt-betas``.
    """
    return add("optimizer", name, ("groups", "lr"), more=True)


def lr_policy(name: str) -> Decorator:
    """Decorator for ``--lr-policy NAME``: a function of (step, steps) that returns a factor of ``--lr``.

    ``step``: an int from 0, counted from the end of the warm-up; ``steps``: the number of steps after the warm-up.
    """
    return add("lr_policy", name, ("step", "steps"))


def augmentation(name: str, *, numbers: int = 1, normalised: bool = False) -> Decorator:
    """Decorator for ``--augment NAME``: a function of (images, numbers) that returns the images, augmented.

    ``images``: (n, channels, height, width), uint8 or float32 of 0 to 255; with ``normalised`` float32 as the network
    sees them, 0 at the mean. ``numbers``: random, float32 (n, ``numbers``) in [0, 1), which depend for each image on
    (seed, epoch, image) alone, so that the same image comes out on any number of processes, and after a resume.
    """
    if not isinstance(numbers, int) or numbers < 0:
        raise ValueError(f"augmentation {name}: numbers must be a whole number of 0 or more, not {numbers!r}")
    return add("augmentation", name, ("images", "numbers"), numbers=numbers, normalised=normalised)


def metric(name: str, *, lower_is_better: bool = False) -> Decorator:
    """Decorator for column ``val_NAME`` and ``--best-metric NAME``: a function of (logits, targets), a value per image.

    ``logits``: float32 (n, classes); ``targets``: int64 (n,), or float32 (n, classes) of several labels, with NaN where
    one is missing; the function returns a tensor (n,), and the metric is its mean over the validation images, each
    counted once on any number of processes.
    """
    return add("metric", name, ("logits", "targets"), lower_is_better=lower_is_better)


def hook(point: str) -> Decorator:
    """Decorator for a function that training calls at ``point``: ``before_forward``, ``after_update`` and others.

    ``utils/loop/hooks.py`` lists the points and what each is given.
    """
    return add("hook", point)


def dataset(
    name: str,
    *,
    channels: int = 3,
    image_size: int = IMAGE_SIZE,
    fixed_size: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    augment: Sequence[str] = ("resized-crop", "flip"),
) -> Decorator:
    """Decorator for ``--dataname NAME``: a function of (path,) that returns (training, validation, classes).

    ``path``: ``--datapath``, or None without it. Training and validation are like a ``torch.utils.data.Dataset``, with
    ``len`` and items (image, label): the image as a Pillow image, as uint8 of shape (height, width), (height, width, 3)
    or (3, height, width), or as the bytes of an image file, for other numbers of channels of a .npy or TIFF file; the
    label as a number below ``len(classes)``. ``mean`` and ``std``: of pixel values between 0 and 1, a number per
    channel, 0.5 and 0.25 by default. ``fixed_size``: every image has ``image_size`` pixels a side; then all are read
    once and stay in memory. ``augment``: training's default augmentations.
    """
    centre, spread = MEAN_AND_STD
    spec = DatasetSpec(
        classes=None,
        image_size=image_size,
        fixed_size=fixed_size,
        mean=tuple(mean or [centre] * channels),
        std=tuple(std or [spread] * channels),
        augment=tuple(augment),
        max_shift=None,
        source=OF_PLUGIN,
        needs_datapath=False,
    )
    for what, values in (("mean", spec.mean), ("std", spec.std)):
        if len(values) != channels:
            raise ValueError(
                f"data set {name}: {what} must be {channels} number(s), one per channel, not {len(values)}"
            )
    return add("dataset", name, ("path",), spec=spec)
