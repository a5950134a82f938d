"""Subject of an export: a trained network, and the facts that travel with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from models.build import constructor_arguments, locate
from models.load import Loaded, shape_of
from scripts.common.output import plain
from utils.checkpoint.progress import Progress
from utils.config import hub_networks
from utils.config.datasets import SPECS
from utils.config.groups.model import ModelSettings
from utils.config.image_size import sides
from utils.config.settings import shaping
from utils.record.doubts import doubts
from utils.record.multilabel import AnyReport, report_of
from utils.record.reading import Reading
from utils.record.run_folder import read_table


class WithPreprocessing(nn.Module):
    """Wrapper of ``network`` that turns uint8 images (n, channels, h, w) into float32 probabilities (n, classes).

    Normalises as ``BatchTransform`` does; ``mean`` and ``std`` are for pixel values between 0 and 1. ``reading`` turns
    logits into probabilities.
    """

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], reading: Reading) -> None:
        super().__init__()
        self.network = network
        self.reading = reading
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.reading.probabilities(self.network((images.float() - self.mean) / self.std))


@dataclass(frozen=True)
class Subject:
    """A trained network and how it is exported.

    ``inside``: the export includes preprocessing and probabilities. ``weights``: text naming which of the checkpoint's
    weights it has. ``figures``: see ``validated``. ``divided``: the network divides its logits by the temperature, if
    there is one.
    """

    loaded: Loaded
    inside: bool
    weights: str
    figures: dict[str, Any] | None
    divided: bool = True

    @classmethod
    def of(cls, loaded: Loaded, raw: bool, inside: bool, divided: bool = True) -> Subject:
        """Subject of a network from ``open_run``, which was called with ``raw`` and calibrated=``divided``."""
        weights = f"the mean of {loaded.averaged} checkpoints" if loaded.averaged > 1 else "the weights as trained"
        if loaded.has_average:
            weights = "the raw weights, not the run's average of them" if raw else "the run's average of the weights"
        figures = None if raw and loaded.has_average else validated(loaded)
        if figures is not None and loaded.confidence is not None and loaded.confidence.temperature is not None:
            figures["without_temperature"] = True
        return cls(loaded, inside, weights, figures, divided)

    @property
    def temperature(self) -> float | None:
        """Temperature that the checkpoint keeps; None if it has none."""
        return self.loaded.confidence and self.loaded.confidence.temperature

    @property
    def reading(self) -> Reading:
        """Reading of the exported network's logits; divides them by the temperature unless the network itself does."""
        return self.loaded.reading if self.divided else self.loaded.reading.divided(self.temperature or 1.0)

    @property
    def library(self) -> str:
        """Library of the network: 'own', 'timm' or 'torchvision'."""
        return locate(self.loaded.arch)[0]

    @property
    def name(self) -> str:
        """Network's name in its library, without timm's tag of pretrained weights."""
        name = locate(self.loaded.arch)[1]
        return name.partition(".")[0] if self.library == "timm" else name

    @property
    def data(self) -> str:
        """Name of the data set, or of the folder for the user's own images."""
        settings = self.loaded.settings
        name, path = (str(settings.get(key) or "") for key in ("dataname", "datapath"))
        of_the_user = name in SPECS and SPECS[name].of_the_user
        return " ".join((Path(path).name if of_the_user else name).split()) or "unknown data"

    @property
    def shape_settings(self) -> ModelSettings:
        """Settings that the network is built with."""
        return shape_of(self.loaded.arch, self.loaded.settings)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the network's constructor (``constructor_arguments``). Raises ``UserError``."""
        shown = self.loaded.preprocessing
        return constructor_arguments(
            self.shape_settings,
            self.loaded.network,
            classes=len(self.loaded.classes),
            channels=shown.channels,
            image_size=shown.image_size,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an input image."""
        shown = self.loaded.preprocessing
        return shown.channels, *sides(shown.val_image_size)

    @property
    def output(self) -> str:
        """Kind of output of the exported network: 'probabilities' or 'logits'."""
        return "probabilities" if self.inside else "logits"

    @cached_property
    def module(self) -> nn.Module:
        """Module to export, in evaluation mode on the CPU."""
        shown = self.loaded.preprocessing
        network = self.loaded.network.requires_grad_(False)
        if not self.inside:
            return network
        return WithPreprocessing(network, shown.mean, shown.std, self.loaded.reading).eval()

    def same_answers(self, outputs: np.ndarray, others: np.ndarray) -> int:
        """Number of images for which both ``outputs`` and ``others``, of the exported network, give the same answer."""
        reading = self.loaded.reading
        logits = [reading.logits(one) if self.inside else one for one in map(torch.from_numpy, (outputs, others))]
        return int(reading.same(*logits).sum())

    def inputs(self, images: torch.Tensor) -> torch.Tensor:
        """Convert normalised ``images`` (n, c, h, w) to inputs of the exported network.

        These are uint8 pixels if the export includes preprocessing (``inside``), otherwise ``images`` as they are.
        """
        if not self.inside:
            return images
        pixels = self.loaded.preprocessing.evaluation_transform.to_pixels(images)
        return (255 * pixels).round().to(torch.uint8)

    @property
    def metadata(self) -> dict[str, Any]:
        """Facts that programs need besides the weights, as plain values."""
        return {
            "arch": self.loaded.arch,
            **{name: getattr(self.shape_settings, name) for name in shaping("network")},
            "classes": list(self.loaded.classes),
            "preprocessing": self.loaded.preprocessing.state(),
            **hub_networks.in_checkpoint(self.loaded.arch),
            "input": "uint8 pixels" if self.inside else "float32, normalised",
            "output": self.output,
            **self.reading.facts,
            **({"temperature": self.temperature, "divided_by_temperature": self.divided} if self.temperature else {}),
            "weights": self.weights,
            "validation": self.figures,
        }


def validated(loaded: Loaded) -> dict[str, Any] | None:
    """Metrics of a checkpoint's last validation; None if there was none, or the weights have changed since.

    Also holds, by name, the run's settings that make these metrics differ from the exported network's.
    """
    progress = loaded.progress
    settings = loaded.settings
    if progress is None or Progress.problems(progress):
        return None
    report = report_of(progress["last_validation"])
    if not report.count or progress["validated_step"] != progress["step"]:
        return None
    apart = {name: settings.get(name) for name in ("tta", "amp", "max_val_batches")}
    apart["amp"] = apart["amp"] or ("fp16" if loaded.loss_scaled else None)  # a GPU's default is not in the settings
    return {
        **figures_of(report),
        "epoch": progress["epoch"] + (progress["step_in_epoch"] > 0),  # val_epoch of the run's last line
        **{name: value for name, value in apart.items() if value not in (None, "none", "off")},
        **({"doubts": found} if (found := doubts_about(loaded)) else {}),
    }


def doubts_about(loaded: Loaded) -> list[str]:
    """Doubts about a checkpoint's metrics: signs in its run's metrics.csv, and validation images seen in training."""
    try:
        rows, _ = read_table(loaded.path.absolute().parent.parent / "metrics.csv")
    except (OSError, ValueError):  # the checkpoint is not in its run's folder
        rows = []
    rows = [row for row in rows if float(row.get("step") or "nan") <= loaded.progress["step"]]
    found = [doubt.sign for doubt in doubts(rows, str(loaded.settings.get("dataname")))]
    return [*found, *filter(None, [loaded.seen])]


def figures_of(report: AnyReport) -> dict[str, Any]:
    """Metrics of a validation for JSON: None instead of NaN and infinity."""
    return plain({name: getattr(report, name) for name in (*report.FIGURES, "loss", "count")})
