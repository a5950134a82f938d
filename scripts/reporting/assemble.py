"""Assemble the page: read the runs, predict with their networks one after the other, and gather what is shown."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from models.load import Loaded
from scripts.common.answers import FIGURES
from scripts.common.choice import Chosen, validated_on
from scripts.common.command_line import make_folder, say, warn
from scripts.common.features import embed, learned_labels
from scripts.common.predictions import AnyPredictions, predict_split
from scripts.common.trained import open_run
from scripts.reporting import details, label_details
from scripts.reporting.details import Predicted, add_pictures, against_record, explainer, short_ids
from scripts.reporting.feature_page import feature_part, shown_labels
from scripts.reporting.feature_study import NAMES, TRAIN, accuracies, study
from scripts.reporting.page import PageContent, as_json, grouped, page_data
from scripts.reporting.run_parts import ShownMetric
from scripts.reporting.run_record import RunRecord, from_settings, read
from scripts.reporting.sources import RunSource
from scripts.reporting.thumbnails import BUDGET_BYTES, Thumbnails
from utils.checkpoint.fingerprint import same_images
from utils.config.settings import UserError
from utils.config.spelling import counted
from utils.record.doubts import doubts_of

PLACE = ("dataname", "datapath")
FEATURE_BYTES = 1_500_000  # of BUDGET_BYTES: base64 text of the pictures about the features of all runs
FEATURE_JSON_BYTES = 1_000_000  # JSON about features, beside their pictures
DETAIL_BYTES = 2_200_000  # JSON about the predictions of all runs, beside the pictures


def assemble(sources: Sequence[RunSource], own: argparse.Namespace) -> PageContent:
    """Content of the page. Whatever cannot be read or predicted is named on it."""
    say(f"reading {counted(len(sources), 'run')}")
    records = [read(source.folder, source.name) if source.folder else None for source in sources]
    gathered = PredictionParts(own, len(sources))
    for number, source in enumerate(sources):
        try:
            loaded = open_network(source, own)
            records[number] = records[number] or from_settings(source.name, loaded.settings)
            if not own.no_predictions:
                say(f"validating {loaded.path}")
                predictions = predict_split(loaded, Chosen.of(own))
                gathered.add(number, records[number], loaded, predictions)
                if own.features:
                    gathered.add_features(number, source, loaded)
        except (UserError, ValueError) as error:
            if records[number] is None:
                raise
            reason = error.mistakes[0] if isinstance(error, UserError) else error
            gathered.without.append((source.name, str(reason)))
    if len(gathered.digests) > 1:
        words = f"The runs' figures are of {len(gathered.digests)} different sets of images, labels or classes"
        gathered.checks.append((f"{words}: a difference between them need not be one of the networks.", False))
    data = page_data(records) | gathered.data
    if data["details"]:
        data["classTable"] = None  # which only replaces missing details
    notes = gathered.notes + grouped(gathered.left_out, len(sources))
    reasons = "; ".join(grouped(gathered.without, len(sources)))
    why = f"Without predictions, pictures and confusions: {reasons}" if reasons else ""
    if why:
        warn(why)
    return PageContent(records, data, gathered.figures, notes, gathered.checks, why)


def open_network(source: RunSource, own: argparse.Namespace) -> Loaded:
    """Open the run's network. Raises ``UserError``."""
    if own.no_predictions and source.folder is not None:
        raise UserError("--no-predictions was given")
    if source.network is None:
        raise UserError("the folder holds no checkpoint")
    return open_run(str(source.network), own.raw, own.device, best=own.best)


def images_of(number: int, loaded: Loaded) -> str:
    """Key of the images of run ``number``: runs with equal keys have the same images, by their ids."""
    return " ".join(map(str, (loaded.fingerprint or number, *map(loaded.settings.get, PLACE))))


class PredictionParts:
    """Parts of the page that come from predictions, run by run; a run's logits are freed before the next run.

    ``runs``: number of runs on the page, which share the room for pictures.
    """

    def __init__(self, own: argparse.Namespace, runs: int) -> None:
        self.own = own
        self.runs = runs
        self.thumbnails = Thumbnails(budget=0)
        self.data: dict[str, Any] = {"details": [], "features": [], "classes": [], "images": self.thumbnails.uris}
        self.figures: dict[int, list[ShownMetric]] = {}
        self.notes: list[str] = []
        self.checks: list[tuple[str, bool | None]] = []
        self.without: list[tuple[str, str]] = []
        self.left_out: list[tuple[str, str]] = []
        self.digests: list[str] = []  # of the images of several runs, one of each set
        self.room = DETAIL_BYTES

    def add(self, number: int, record: RunRecord, loaded: Loaded, predictions: AnyPredictions) -> None:
        """Analyse the predictions of run ``number``, and choose what is shown of them."""
        shown_before = self.data["details"]
        if shown_before and shown_before[0].get("several", False) != predictions.reading.several:
            raise ValueError("the first run gives another number of labels an image; make a report of its own")
        if not np.isfinite(predictions.confidence).all():
            raise ValueError("some of the network's outputs are not finite numbers (NaN or infinite)")
        predicted = Predicted(
            run=number,
            answers=predictions,
            ids=short_ids(predictions.ids),
            picture=predictions.picture,
            source=images_of(number, loaded),
            heat_map=explainer(loaded) if self.own.heat_maps else None,
        )
        self.thumbnails.budget += (BUDGET_BYTES - FEATURE_BYTES * self.own.features) // self.runs
        kind = label_details if predictions.reading.several else details
        chosen = kind.choose(predicted, self.runs)
        quiet = not sys.stderr.isatty()
        with tqdm(total=len(chosen.places), desc=f"pictures of {record.name}", leave=False, disable=quiet) as bar:
            sides = add_pictures(predicted, chosen, self.thumbnails, bar.update)
        made = kind.detail(predicted, chosen, self.thumbnails, sides, self.runs)
        figures = kind.metrics_of(predictions)
        words, agrees = self._check(predictions, record, loaded)
        if self.runs > 1 and not any(same_images(predictions.digest, other) for other in self.digests):
            self.digests.append(predictions.digest)
        # nothing below fails
        self._keep("details", record.name, made, predictions.classes, "pictures, confusions and classes")
        self.figures[number] = figures
        if self._are_the_runs_own:
            step = (loaded.progress or {}).get("step")
            found = doubts_of(predictions.report, step, str(loaded.settings.get("dataname")))
            record.predicted_doubts = [doubt.sign for doubt in found]
        said = [(words, agrees)]
        if loaded.is_favoured and validated_on(self.own, loaded.settings):
            said.append((f"{loaded.path.name} was chosen by its result on these images, which favours it.", False))
        kept = loaded.confidence
        if kept is not None and kept.temperature is not None and same_images(kept.images, predictions.digest):
            said.append(
                ("The temperature was fitted on some of these images, which favours loss and calibration.", False)
            )
        whose = f"{record.name}: " if self.runs > 1 else ""
        self.checks += [(whose + words, agrees) for words, agrees in said]
        self.notes += [whose + note for note in (*predictions.notes, *predicted.notes)]

    @property
    def _are_the_runs_own(self) -> bool:
        """True if the images are those that each run validated on, as far as the flags tell."""
        return self.own.split == "val" and self.own.datapath is None and self.own.labels is None

    def add_features(self, number: int, source: RunSource, loaded: Loaded) -> None:
        """Study the features of run ``number``, and keep them in the run's folder."""
        say(f"features of {loaded.path}")
        self.thumbnails.budget += FEATURE_BYTES // self.runs
        self.room += FEATURE_JSON_BYTES // self.runs
        chosen = Chosen.of(self.own)
        folder = source.folder and source.folder / "features"
        try:
            if folder is not None:
                make_folder(str(folder))
            parts = {
                TRAIN: embed(loaded, dataclasses.replace(chosen, split=TRAIN, datapath=None, labels=None), folder),
                chosen.split: embed(loaded, chosen, None if chosen.datapath or chosen.labels else folder),
            }
            found = study(parts, chosen.split, its_own=learned_labels(loaded))
        except (UserError, ValueError) as error:
            reason = error.mistakes[0] if isinstance(error, UserError) else error
            self.left_out.append((source.name, f"Without features: {reason}"))
            return
        made = feature_part(found, accuracies(found), number, self.thumbnails, images_of(number, loaded))
        self._keep("features", source.name, made, shown_labels(found)[1], "features")

    def _check(self, predictions: AnyPredictions, record: RunRecord, loaded: Loaded) -> tuple[str, bool | None]:
        """Text about where the metrics come from, and whether they agree with the run's (None: not recorded)."""
        checkpoint = loaded.path.name
        if self._are_the_runs_own:
            headline = predictions.report.HEADLINE
            value = getattr(predictions.report, headline)
            progress = loaded.progress or {}
            epoch = progress.get("epoch")
            if progress.get("step_in_epoch"):  # cut within the next, whose row this is
                epoch += 1
            return against_record(value, headline, record, checkpoint, epoch, self.own.raw)
        place = self.own.labels or self.own.datapath
        where = f" in {place}" if place else ""
        return (
            f"Figures, pictures and confusions are {checkpoint}'s on the {NAMES[self.own.split]} images{where}, curves "
            f"and best {FIGURES[predictions.report.HEADLINE]} those of the run's own validation.",
            False,
        )

    def _keep(self, part: str, name: str, made: dict[str, Any], classes: Sequence[str], what: str) -> None:
        """Put a run's ``part`` on the page if there is room, since its size grows with the number of classes.

        Runs with the same names of ``classes`` share one list of them. ``what``: text that names the part.
        """
        shared = self.data["classes"]
        names = [*classes]
        size = len(as_json(made)) + (0 if names in shared else len(as_json(names)))
        if size > self.room:
            self.left_out.append((name, f"{what}, for which this file has no room"))
            return
        self.room -= size
        if names not in shared:
            shared.append(names)
        self.data[part].append(made | {"classes": shared.index(names)})
