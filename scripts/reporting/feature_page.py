"""Page part and table rows about features, made from a ``Study``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from models.load import Loaded
from scripts.common.neighbours import ALIKE, NEAREST, likeness_of_copies
from scripts.common.output import number, numbers
from scripts.reporting.details import short_ids
from scripts.reporting.feature_study import NAMES, Doubt, Study, answers_of, heads
from scripts.reporting.page import FEATURE_PARTS, fill, page_data
from scripts.reporting.run_record import RunRecord
from scripts.reporting.thumbnails import Thumbnails

SHOWN_QUERIES = 12
SHOWN_NEIGHBOURS = 6  # of each query
SHOWN_DOUBTS = 48
SHOWN_COPIES = 24  # pairs of splits' images


class _Rows:
    """Rows of the images that the page shows, each once: id, picture, label, longer side in pixels."""

    def __init__(self, of: Study, thumbnails: Thumbnails, source: str) -> None:
        self.rows: list[list[Any]] = []
        self.unread: list[str] = []
        self._of = of
        self.ids = {split: short_ids(part.ids) for split, part in of.parts.items()}
        self.labels, _ = shown_labels(of)
        self._thumbnails = thumbnails
        self._source = source
        self._places: dict[tuple[str, int], int] = {}

    def add(self, split: str, place: int) -> int:
        """Index of the row of image ``place`` of a split, added if missing; an unreadable image has no picture."""
        if (split, place) not in self._places:
            part = self._of.parts[split]
            name = part.ids[place]
            picture, side = None, 0
            try:
                image = part.picture(place)
                picture, side = self._thumbnails.add((self._source, name), image), max(image.size)
            except (OSError, ValueError):
                self.unread.append(name)
            self._places[split, place] = len(self.rows)
            self.rows.append([self.ids[split][place], picture, int(self.labels[split][place]), side])
        return self._places[split, place]


def shown_labels(of: Study) -> tuple[dict[str, np.ndarray], list[str]]:
    """Labels of each split's images, int64 (n,), and the labels' names, which begin with ``answers_of``.

    In multi-label data, each combination of labels known to be shown counts as one label.
    """
    names = [*answers_of(of.train)]
    if not of.several:
        return {split: part.labels for split, part in of.parts.items()}, names
    cells = np.concatenate([part.labels == 1 for part in of.parts.values()])
    kinds, label = np.unique(cells, axis=0, return_inverse=True)
    ends = np.cumsum([len(part) for part in of.parts.values()])[:-1]
    labels = dict(zip(of.parts, np.split(len(names) + label.reshape(-1), ends), strict=True))
    return labels, [*names, *("; ".join(compress(of.train.classes, kind)) or "(none)" for kind in kinds)]


def feature_part(
    of: Study, figures: Sequence[dict[str, Any]], run: int, thumbnails: Thumbnails, source: str
) -> dict[str, Any]:
    """Part of the page's JSON about the features of the run with index ``run``.

    ``figures``: from ``accuracies``; ``source``: see ``Predicted``. The caller adds the index, among the page's lists
    of classes, of the labels' names (``shown_labels``).
    """
    rows = _Rows(of, thumbnails, source)
    queries = _spread(rows.labels[of.scored], SHOWN_QUERIES)
    near = zip(of.places[queries].tolist(), of.cosines[queries].tolist(), strict=True)
    neighbours = [
        [
            rows.add(of.scored, query),
            [
                [rows.add("train", place), number(cosine, 4)]
                for place, cosine in list(zip(*one, strict=True))[:SHOWN_NEIGHBOURS]
            ],
        ]
        for query, one in zip(queries.tolist(), near, strict=True)
    ]
    doubts = [
        [
            rows.add(one.split, one.place),
            one.label,
            one.likely,
            number(one.own_share, 4),
            number(one.likely_share, 4),
            one.neighbours,
            NAMES[one.split],
            int(one.confident),
        ]
        for one in most_doubtful(of)[:SHOWN_DOUBTS]
    ]
    copies = _copies(of, rows)
    unread = rows.unread
    notes = [f"{len(unread):,} pictures cannot be read, the first of them {unread[0]}"] if unread else []
    return {
        "run": run,
        "scored": f"{len(of.of_scored):,} {NAMES[of.scored]} images",
        "neighbourCount": of.places.shape[1],
        "rows": rows.rows,
        "heads": heads(of),
        "figures": [_figure(row) for row in figures],
        "notes": [*of.notes, *notes],
        "neighbours": neighbours,
        "doubtful": doubts,
        "doubtfulWords": doubtful_words(of),
        "duplicates": copies,
        "duplicatesWords": duplicates_words(of),
        "map": _map(of, rows),
        "mapWords": map_words(of),
    }


def _copies(of: Study, rows: _Rows) -> list[list[Any]]:
    return [
        [
            rows.add(pair[0], one.first),
            rows.add(pair[1], one.second),
            number(one.likeness, 4),
            number(one.cosine, 4),
            [NAMES[split] for split in pair],
        ]
        for pair, found in of.duplicates.items()
        for one in found[:SHOWN_COPIES]
    ]


def _figure(row: dict[str, Any]) -> list[str]:
    apart = row["without_copies"]
    return [
        row["classifier"],
        f"{row['value']:.2f} %",
        f"{row['low']:.1f} to {row['high']:.1f}",
        "-" if apart is None else f"{apart:.2f} %",
        row["method"],
    ]


def _map(of: Study, rows: _Rows) -> dict[str, Any]:
    doubted = {one.place for one in of.doubts_of(of.scored) if one.confident}
    places = of.mapped.tolist()
    return {
        "x": numbers(of.spots[:, 0], 4),
        "y": numbers(of.spots[:, 1], 4),
        "label": rows.labels[of.scored][of.mapped].tolist(),
        "id": [rows.ids[of.scored][place] for place in places],
        "doubted": [int(place in doubted) for place in places],
    }


def _spread(labels: np.ndarray, count: int) -> np.ndarray:
    """Indices of ``count`` images, or all, evenly spread over the images sorted by class."""
    order = np.argsort(labels, kind="stable")
    return order[((np.arange(min(count, len(order))) + 0.5) * len(order) / min(count, len(order))).astype(np.int64)]


def most_doubtful(of: Study) -> list[Doubt]:
    """Doubts of all splits, sorted by the label's probability minus the likeliest one's, lowest first."""
    return sorted(of.doubts, key=lambda one: one.own_share - one.likely_share)


def doubtful_words(of: Study) -> str:
    """Text about how many labels are doubted, and by what method."""
    counts = ", ".join(
        f"{len(of.doubts_of(split)):,} of {labels:,} {NAMES[split]} {'labels' if of.several else 'images'}"
        for split, labels in of.known_labels.items()
    )
    confident = sum(one.confident for one in of.doubts)
    what = "says otherwise of a label, shown or not shown" if of.several else "takes it for another class"
    return (
        f"{counts}: a logistic probe that has not seen the image {what}; {confident:,} are in the "
        "confident joint as well (confident learning, Northcutt et al., 2021). Where the probe is often wrong, so is "
        "this list: the first are the likeliest."
    )


def duplicates_words(of: Study) -> str:
    """Text about the number of pairs, and what counts as one."""
    counts = ", ".join(
        f"{len(found):,} between {NAMES[one]} and {NAMES[two]} ({likeness_of_copies(of.parts[one]):.3f})"
        for (one, two), found in of.duplicates.items()
    )
    return (
        f"{counts}. The grey 16 x 16 thumbnails of a pair correlate by the number in brackets or more, perhaps "
        f"mirrored, and in features fewer than {NEAREST} images that look otherwise lie nearer to either. A copy that "
        f"was cropped or shifted may be missed, and an image of one colour is never listed. {alike_words(of)}"
    ).strip()


def alike_words(of: Study) -> str:
    """Text about splits whose images look so alike that only nearly identical ones count as copies, or nothing."""
    splits = {one: likeness_of_copies(of.parts[one]) for one, _ in of.duplicates}
    return " ".join(
        f"The {NAMES[split]} images look alike, as digits or frames of bursts do: a copy must correlate by "
        f"{least:.4f}, not {ALIKE}, so frames of one burst in two splits may be missed."
        for split, least in splits.items()
        if least > ALIKE
    )


def map_words(of: Study) -> str:
    """Text about what the map shows and does not show."""
    return (
        f"Each dot is one of {len(of.mapped):,} {NAMES[of.scored]} images, in the colour of its class, ringed if its "
        "label is doubted and in the confident joint. Made by t-SNE: near dots are near in features; how far apart "
        "groups are means nothing."
    )


def doubt_rows(of: Study) -> list[dict[str, Any]]:
    """Rows of doubtful.csv, the most doubtful first."""
    names = answers_of(of.train)
    return [
        {
            "image": of.parts[one.split].ids[one.place],
            "split": one.split,
            "label": names[one.label],
            "likely": names[one.likely],
            "label_probability": f"{one.own_share:.4f}",
            "likely_probability": f"{one.likely_share:.4f}",
            "neighbours_of_label": f"{one.neighbours}/{of.places.shape[1]}",
            "confident": int(one.confident),
        }
        for one in most_doubtful(of)
    ]


def duplicate_rows(of: Study) -> list[dict[str, Any]]:
    """Rows of duplicates.csv, one pair of splits after the other, the most similar first."""
    labels, names = shown_labels(of)
    return [
        {
            "image": of.parts[first].ids[one.first],
            "other": of.parts[second].ids[one.second],
            "split": first,
            "other_split": second,
            "label": names[labels[first][one.first]],
            "other_label": names[labels[second][one.second]],
            "likeness": f"{one.likeness:.4f}",
            "cosine": f"{one.cosine:.4f}",
        }
        for (first, second), found in of.duplicates.items()
        for one in found
    ]


def render_features(of: Study, loaded: Loaded, figures: Sequence[dict[str, Any]]) -> str:
    """HTML of a separate page about the features of one network."""
    thumbnails = Thumbnails()
    part = feature_part(of, figures, 0, thumbnails, "") | {"classes": 0}
    own = {"features": [part], "classes": [shown_labels(of)[1]], "images": thumbnails.uris}
    data = page_data([RunRecord(str(loaded.path), None)]) | own
    name = f"{loaded.settings.get('dataname')} \u00b7 {loaded.arch}"
    return fill(data, FEATURE_PARTS, name, str(loaded.path), ("Features", "scripts/features.py"))
