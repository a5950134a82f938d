"""Comparison of two networks on the same images: whether they differ by more than chance, and where."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from models.load import Loaded
from scripts.common.command_line import WHICH_IMAGES
from scripts.common.predictions import AnyPredictions
from scripts.common.uncertainty import SignFlipTest, bootstrap_interval, of_groups, sign_flip_test
from utils.config.settings import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

DATA = (*WHICH_IMAGES, "train_samples", "seed")  # settings that determine which images are used


class Counts(NamedTuple):
    """Numbers of images that both networks, only the first, only the second, and neither get right."""

    both: int
    first: int
    second: int
    neither: int


class ClassChange(NamedTuple):
    """A class, its number of images, and how many of them the first and the second network get right."""

    name: str
    images: int
    first: int
    second: int


@dataclass(frozen=True)
class OnSameImages:
    """Results ``first`` and ``second`` of two networks on the same n images.

    ``places``: for each of the n images, its index in the first's results, and in the second's.
    """

    first: Any
    second: Any
    places: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, first: AnyPredictions, second: AnyPredictions) -> Self:
        """The comparison on the images that both results have in common. Raises ``UserError`` if there are none.

        Images are the same if their ids are; their class names then agree, too.
        """
        where = {name: place for place, name in enumerate(second.ids)}
        pairs = [(n, where[name]) for n, name in enumerate(first.ids) if name in where]
        if not pairs:
            raise UserError("--compare: the two have no image in common; give --datapath with classes that both know")
        one, two = (np.array(places) for places in zip(*pairs, strict=True))
        return cls(first, second, (one, two))

    @property
    def groups(self) -> np.ndarray | None:
        """Group of each of the n images, as the first results have it; None if they are independent."""
        return None if self.first.groups is None else self.first.groups[self.places[0]]


class Comparison(OnSameImages):
    """Comparison of two networks' ``Predictions``."""

    @cached_property
    def right(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether the first and the second network are right about each of the n images, bool (n,) each."""
        return self.first.right[self.places[0]], self.second.right[self.places[1]]

    @cached_property
    def counts(self) -> Counts:
        one, two = self.right
        return Counts(*(int(which.sum()) for which in (one & two, one & ~two, ~one & two, ~one & ~two)))

    @property
    def difference(self) -> float:
        """Percentage points by which the second network's top-1 is higher."""
        return 100 * (self.counts.second - self.counts.first) / len(self.right[0])

    @property
    def changes(self) -> np.ndarray:
        """1 where only the second network is right, -1 where only the first is, otherwise 0: int64 (n,)."""
        return self.right[1].astype(int) - self.right[0]

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Bootstrap's 95 % interval of the difference, in percentage points."""
        return bootstrap_interval(self.changes, self.groups, least=-1.0)

    @cached_property
    def mcnemar(self) -> SignFlipTest:
        """McNemar's test: the probability that networks of equal accuracy differ by at least as much."""
        return sign_flip_test(self.changes, self.groups)

    @property
    def test(self) -> str:
        """The test's form in words."""
        exact = "exact binomial" if self.groups is None else "exact"
        return f"{exact if self.mcnemar.exact else 'chi-squared, corrected'}{of_groups(self.groups)}"

    @cached_property
    def classes(self) -> list[ClassChange]:
        """Classes that have images, those in which the two networks differ most first."""
        labels = self.first.truth[self.places[0]]
        size = len(self.first.classes)
        images, first, second = (
            np.bincount(labels[which], minlength=size).tolist() for which in (slice(None), *self.right)
        )
        changes = map(ClassChange, self.first.classes, images, first, second)
        present = [change for change in changes if change.images]
        return sorted(present, key=lambda change: -abs(change.second - change.first) / change.images)

    def only(self, second: bool) -> np.ndarray:
        """Images that only the first (or only the ``second``) network gets right, int64 (m,).

        The other network's most confident mistakes come first.
        """
        mistaken, places = (self.first, self.places[0]) if second else (self.second, self.places[1])
        chosen = np.flatnonzero(self.right[second] & ~self.right[not second])
        return chosen[np.argsort(-mistaken.confidence[places[chosen]], kind="stable")]

    def rows(self) -> list[dict[str, Any]]:
        """Rows about each image that only one of the two networks gets right."""
        return [self.row(place, second) for second in (False, True) for place in self.only(second).tolist()]

    def row(self, place: int, second: bool) -> dict[str, Any]:
        """Row about the image with index ``place`` among the n images shown to both networks.

        ``second``: True if only the second network is right about it, False if only the first is.
        """
        one, two = (int(places[place]) for places in self.places)
        names = self.first.classes
        return {
            "image": self.first.ids[one],
            "class": names[self.first.truth[one]],
            "right": "second" if second else "first",
            "first_predicted": _name(names, self.first.predicted[one]),
            "first_probability": float(self.first.confidence[one]),
            "second_predicted": _name(self.second.classes, self.second.predicted[two]),
            "second_probability": float(self.second.confidence[two]),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "images": len(self.right[0]),
            **{f"{which}_right": count for which, count in self.counts._asdict().items()},
            "top1_difference": self.difference,
            "top1_difference_interval": self.interval,
            "mcnemar_test": self.test,
            "mcnemar_p": self.mcnemar.p,
        }


def _name(names: tuple[str, ...], place: int) -> str:
    return names[place] if place >= 0 else ""


def with_data_settings_of(second: Loaded, first: Loaded) -> Loaded:
    """``second`` with the settings that make it see the images of ``first``'s run."""
    others = {name: value for name, value in second.settings.items() if name not in DATA}
    same = {name: first.settings[name] for name in DATA if name in first.settings}
    return dataclasses.replace(second, settings={**others, **same}, fingerprint=first.fingerprint)
