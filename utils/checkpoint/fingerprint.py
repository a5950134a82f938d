"""Fingerprints of data sets: short texts in checkpoints that tell whether two sets hold the same images.

One is the SHA-256 of what was listed or read as a whole. For files of images follow, behind ``+``, four hexadecimal
digits of the content of each of some files: reading a million files to begin a run would take minutes, and their names
alone are often those of a second version of the set, in other sizes or processed. Where single files were damaged or
repaired, the set is still the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

SEPARATOR = "+"
DIGITS = 4  # of each content
SHOWN = 12  # characters of each part, in messages


def joined(listing: str, contents: Sequence[bytes] | None) -> str:
    """A fingerprint: the digest of the listing, and those of ``contents``; None if the listing tells them already."""
    if contents is None:
        return listing
    return listing + SEPARATOR + "".join(hashlib.sha256(content).hexdigest()[:DIGITS] for content in contents)


def listing_of(fingerprint: str) -> str:
    """The digest of what was listed."""
    return fingerprint.partition(SEPARATOR)[0]


def same_images(one: str | None, other: str | None) -> bool:
    """True if both are known, of one listing, and of equal content in half of the files that both looked into.

    Those of older versions tell nothing of contents.
    """
    if one is None or other is None or listing_of(one) != listing_of(other):
        return False
    changed, compared = changed_files(one, other)
    return 2 * changed <= compared


def changed_files(one: str, other: str) -> tuple[int, int]:
    """How many of the files that both looked into have other content, and how many both looked into."""
    equal = [a == b for a, b in zip(_contents_of(one), _contents_of(other), strict=False)]
    return equal.count(False), len(equal)


def of_all(fingerprints: Iterable[str]) -> str:
    """The fingerprint of weights that were trained on several data sets: the common one, or one that no set has."""
    different = sorted(set(fingerprints))
    return different[0] if len(different) == 1 else hashlib.sha256("\0".join(different).encode()).hexdigest()


def ends_with(fingerprint: str, contents: Sequence[bytes]) -> bool:
    """True if the last files, those to validate on, have equal ``contents``, half of them at least.

    True also where ``fingerprint`` tells nothing of contents.
    """
    stored = _contents_of(fingerprint)
    now = _contents_of(joined("", contents))
    equal = [a == b for a, b in zip(stored[-len(now) :], now, strict=False)]
    return 2 * sum(equal) >= len(equal)


def _contents_of(fingerprint: str) -> list[str]:
    digits = fingerprint.partition(SEPARATOR)[2]
    return [digits[place : place + DIGITS] for place in range(0, len(digits), DIGITS)]


def short(fingerprint: str) -> str:
    """The beginning of each part, for messages."""
    return SEPARATOR.join(part[:SHOWN] for part in fingerprint.split(SEPARATOR))
