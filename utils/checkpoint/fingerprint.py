"""Fingerprints of data sets: short texts in checkpoints that tell whether two sets hold the same images.

A fingerprint is the SHA-256 of what was listed or read as a whole. For image files, ``+`` follows, and then four
hexadecimal digits per file for the content of some of them: reading a million files to begin a run would take minutes,
but names alone are often the same in a second, resized or processed version of the set. If individual files were
damaged or repaired, the set still counts as the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

SEPARATOR = "+"
DIGITS = 4  # for the content of each file
SHOWN = 12  # characters of each part, in messages


def joined(listing: str, contents: Sequence[bytes] | None) -> str:
    """Join the digest ``listing`` and digests of ``contents`` (None if ``listing`` covers them) to a fingerprint."""
    if contents is None:
        return listing
    return listing + SEPARATOR + "".join(hashlib.sha256(content).hexdigest()[:DIGITS] for content in contents)


def listing_of(fingerprint: str) -> str:
    """The part of a fingerprint that is the digest of what was listed."""
    return fingerprint.partition(SEPARATOR)[0]


def same_images(one: str | None, other: str | None) -> bool:
    """True if both are known, have the same listing, and agree on most of the file contents that both hold, if any.

    Half is not enough: a fingerprint holds as many files of a training split as of its validation split, and one of
    them may be another version. Fingerprints of older versions hold nothing about contents.
    """
    if one is None or other is None or listing_of(one) != listing_of(other):
        return False
    changed, compared = changed_files(one, other)
    return 2 * changed < max(compared, 1)


def changed_files(one: str, other: str) -> tuple[int, int]:
    """Number of changed files, and of compared files, which are those whose content both fingerprints hold."""
    equal = [a == b for a, b in zip(_contents_of(one), _contents_of(other), strict=False)]
    return equal.count(False), len(equal)


def of_all(fingerprints: Iterable[str]) -> str:
    """The fingerprint for weights trained on several data sets: the one that all share, or else one that no set has."""
    different = sorted(set(fingerprints), reverse=True)  # the first may hold contents where others do not
    if all(same_images(different[0], other) for other in different):
        return different[0]
    return hashlib.sha256("\0".join(sorted(different)).encode()).hexdigest()


def ends_with(fingerprint: str, contents: Sequence[bytes]) -> bool:
    """True if at least half of the last files of ``fingerprint``, the validation images, have these ``contents``.

    True also if ``fingerprint`` holds nothing about contents.
    """
    stored = _contents_of(fingerprint)
    now = _contents_of(joined("", contents))
    equal = [a == b for a, b in zip(stored[-len(now) :], now, strict=False)]
    return 2 * sum(equal) >= len(equal)


def _contents_of(fingerprint: str) -> list[str]:
    digits = fingerprint.partition(SEPARATOR)[2]
    return [digits[place : place + DIGITS] for place in range(0, len(digits), DIGITS)]


def short(fingerprint: str) -> str:
    """The beginning of each part of a fingerprint, for messages."""
    return SEPARATOR.join(part[:SHOWN] for part in fingerprint.split(SEPARATOR))
