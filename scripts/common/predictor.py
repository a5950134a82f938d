"""A trained network as validation runs it, for images from anywhere."""

from __future__ import annotations

import argparse

import torch

from models.load import Loaded
from models.prepare import to_memory_format
from scripts.common.predictions import Chosen, settings_of
from utils.loop.test_time_augmentation import in_views
from utils.precision.amp import autocast
from utils.runtime.distributed import Distributed, RankInfo


class Predictor:
    """``loaded``'s network as ``main.py --evaluate`` runs it: its precision, views and memory format.

    ``own``: a tool's command line, whose --amp, --tta, --batch-size and --workers replace the run's. ``batch_size``,
    ``workers`` (a number or 'auto') and ``tta``: what they come to. ``device`` is where the network is.
    """

    def __init__(self, loaded: Loaded, own: argparse.Namespace) -> None:
        args = settings_of(loaded, Chosen.of(own))
        with Distributed(RankInfo(), args.run, args.precision.tf32) as here:  # sets threads, TF32 and memory up
            self.loaded = loaded
            self.device = here.device
        self.batch_size = args.data.val_batch_size or args.data.batch_size
        self.workers = args.data.workers
        self.tta = args.data.tta
        self.channels_last = to_memory_format(args, loaded.network, self.device)
        self._autocast = autocast(args.precision, self.device)
        self._network = in_views(loaded.network, self.tta)

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """float32 (n, classes) on the CPU, of normalised images (n, channels, h, w)."""
        with self._autocast:
            return self._network(images.to(self.device)).float().cpu()
