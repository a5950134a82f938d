"""Reading the images of a run, once."""

from __future__ import annotations

import dataclasses

import torch

from utils.checkpoint.resume import ResumePoint
from utils.config.field import CHECKPOINT
from utils.config.groups.data import DataSettings
from utils.config.settings import Settings
from utils.data.datasets import Data, get_data, get_test_data, seen_in_training
from utils.data.formats.listing import Lister
from utils.data.progress_log import ProgressLog


class DataReader:
    """Reads a data set once, also where the search for a run to resume has looked at its images before.

    ``lister`` lists class folders (``Lister.folder`` is set for each data set); synthetic data is made on ``device``.
    """

    def __init__(self, device: torch.device, lister: Lister) -> None:
        self._device = device
        self._lister = lister
        self._read: tuple[DataSettings, Data] | None = None

    @classmethod
    def of(cls, args: Settings, device: torch.device, progress: ProgressLog, is_main: bool) -> DataReader:
        """The reader of a run with these settings; a dry run keeps nothing of what it finds."""
        return cls(device, Lister(keeps=not args.run.dry_run, progress=progress, is_main=is_main))

    def fingerprint(self, settings: DataSettings) -> str:
        """The fingerprint of the images to train on."""
        return self._data(settings).fingerprint

    def to_train_on(self, settings: DataSettings, trained: ResumePoint | None) -> Data:
        """All images; ``trained``: the checkpoint whose weights the training begins with or resumes."""
        data = self._data(settings)
        self._read = None  # a run needs them once; what it changes of them must not be kept beside them
        if trained is None:
            return data
        seen = seen_in_training(data.validation, data.fingerprint, settings, trained, self._lister)
        return dataclasses.replace(data, seen=seen)

    def to_evaluate(self, args: Settings, trained: ResumePoint | None) -> Data:
        """The validation images alone, in the classes of ``trained``, the checkpoint to evaluate."""
        explicit = args.origins["val_split"] != CHECKPOINT
        return get_test_data(args.data, self._device, trained, val_split_is_explicit=explicit, lister=self._lister)

    def _data(self, settings: DataSettings) -> Data:
        if self._read is None or self._read[0] != settings:
            self._read = (settings, get_data(settings, self._device, self._lister))
        return self._read[1]
