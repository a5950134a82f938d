"""Fingerprints of data sets: short texts in checkpoints that tell whether two sets hold the same images.

One is the SHA-256 of what was listed or read as a whole. For files of images, ``+`` and another follow, of the content
of some of them: reading a million files to begin a run would take minutes, and their names alone are often those of a
second version of the set, with other sizes or processing.
"""

from __future__ import annotations

SEPARATOR = "+"
SHOWN = 12  # characters of each digest


def joined(listing: str, contents: str | None) -> str:
    """A fingerprint of the two digests; without ``contents`` the first is of the content, too."""
    return listing if contents is None else f"{listing}{SEPARATOR}{contents}"


def listing_of(fingerprint: str) -> str:
    """The digest of what was listed."""
    return fingerprint.partition(SEPARATOR)[0]


def same_images(one: str | None, other: str | None) -> bool:
    """Whether both are known and agree in what both tell; those of older versions tell nothing of contents."""
    if one is None or other is None:
        return False
    return all(a == b for a, b in zip(one.split(SEPARATOR), other.split(SEPARATOR), strict=False))


def short(fingerprint: str) -> str:
    """The beginning of each digest, for messages."""
    return SEPARATOR.join(digest[:SHOWN] for digest in fingerprint.split(SEPARATOR))
