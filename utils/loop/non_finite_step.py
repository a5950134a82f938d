"""Steps whose gradient is not finite: undone, explained, logged and, on request, saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils.checkpoint.progress import Progress
from utils.config.settings import Settings
from utils.data.loaders import Batch, TrainLoader
from utils.data.sample_plan import step_seed
from utils.data.sampling import first_samples
from utils.loop.forward import Outputs
from utils.optim.criterion import mean_known
from utils.precision.amp import resolve_amp
from utils.precision.buffers import BufferCopy
from utils.precision.diagnosis import UNSEEN, BadStep, examine
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed
from utils.runtime.files import whole_file

FORMAT = 1  # of a bad batch's file
# Its keys, besides ``known``, the mean number of known labels per image of multi-label data.
KEYS = (
    *("format", "arch", "settings", "classes", "image_shape", "model", "passes"),
    *("step", "epoch", "rank", "seed", "scale", "amp"),
)
OF_ALL_RANKS = -1  # in place of a rank, for random numbers that are the same on any number of ranks
MOST_BAD_BATCHES = 10  # in a run; each holds the network's weights
COMPILED = "nothing when the step was repeated uncompiled: perhaps it comes from --compile; train without it"
UPHILL = "nothing at the weights themselves: perhaps SAM's second gradient; try a lower --sam-rho"


@dataclass(eq=False)
class NonFiniteStepHandler:
    """Goes back to the beginning of a step and repeats it with every layer watched.

    As long as gradients are finite, it only copies the buffers. ``folder``: the run's; None if nothing is written.
    """

    model: nn.Module
    train_loader: TrainLoader
    args: Settings
    distributed: Distributed
    writer: Writer
    folder: Path | None
    description: dict[str, Any]

    def __post_init__(self) -> None:
        self.buffers = BufferCopy(self.model)

    def undo(self) -> None:
        """Undo the passes of a step that has begun: drop its gradients and restore the buffers."""
        self.model.zero_grad(set_to_none=True)
        self.buffers.restore()

    @contextmanager
    def set_aside(self, has_begun: bool) -> Iterator[None]:
        """Context for explaining an earlier step; if a later one ``has_begun``, restores its gradients and buffers."""
        if not has_begun:
            yield
            return
        now = BufferCopy(self.model)
        gradients = [(p, p.grad, p.grad.clone()) for p in self.model.parameters() if p.grad is not None]
        yield
        now.restore()
        for parameter, gradient, value in gradients:  # in the same memory, which a CUDA graph may use
            parameter.grad = gradient.copy_(value)

    def seed(self, progress: Progress) -> None:
        """Seed the random numbers of the step after ``progress`` by its position."""
        self.distributed.seed(self._seed(progress))

    def seed_update(self, progress: Progress) -> None:
        """Seed what an optimizer draws in that step, as timm's Kron does: alike on all ranks, so the weights agree."""
        self.distributed.seed(step_seed(self.args.run.seed, progress.step, OF_ALL_RANKS))

    def explain(
        self, progress: Progress, scale: torch.Tensor, forward: Callable[[nn.Module, Batch], Outputs]
    ) -> BadStep:
        """Find out what was not finite in the step after ``progress``; log and return it. All ranks must call it.

        The weights and the copy of the buffers must be those from before that step; gradients are lost. ``scale`` is
        the loss scale, a tensor (). The samples are read again, so no step has to keep them.
        """
        self.undo()
        batches = self.train_loader.replay_step(progress.epoch, progress.step_in_epoch)
        if self.args.precision.dump_bad_batch and self.folder is not None:
            self._dump(self.folder, batches, progress, scale)
        self.seed(progress)
        finding = examine(
            self.model,
            batches,
            forward=partial(forward, self.model),
            backward=lambda batch, loss: (loss * scale * batch.weight).backward(),
            rank=self.distributed.rank,
            scaled=resolve_amp(self.args.precision, self.distributed.device) == "fp16",
        )
        self.undo()
        findings = self.distributed.gather(finding)
        position = progress.step + 1, progress.epoch + 1, float(scale)
        bad = BadStep.from_findings(*position, findings, self._samples(progress))
        if bad.origin == UNSEEN and (self.args.optimisation.sam_rho or self.args.model.compile):
            bad = replace(bad, origin=UPHILL if self.args.optimisation.sam_rho else COMPILED)
        return self._write_down(bad)

    def explain_part(self, progress: Progress, scale: torch.Tensor, names: list[str]) -> BadStep:
        """Log the step after ``progress``, which only some optimizers skipped, because of the parameters ``names``.

        Returns the record of it. ``scale``: the loss scale, a tensor ().
        """
        position = progress.step + 1, progress.epoch + 1, float(scale)
        origin = f"gradient of {', '.join(names)}"
        samples = self._samples(progress)
        return self._write_down(BadStep(*position, origin, rank=None, parameters=names, samples=samples))

    def _write_down(self, bad: BadStep) -> BadStep:
        details = bad.details(self.train_loader.paths)
        self.writer.log(details, to_console=False)
        self.writer.text("AMP/non_finite", details, bad.step)
        return bad

    def _samples(self, progress: Progress) -> list[int]:
        return self.train_loader.plan.step_indices(progress.epoch, progress.step_in_epoch).tolist()

    def _seed(self, progress: Progress) -> int:
        return step_seed(self.args.run.seed, progress.step, self.distributed.rank)

    def _dump(self, folder: Path, batches: list[Batch], progress: Progress, scale: torch.Tensor) -> None:
        """Save all that ``scripts/amp_audit.py --batch`` needs to repeat this rank's part of the step."""
        labels = self.train_loader.source.labels.cpu()
        content = {
            "format": FORMAT,
            **{name: self.description[name] for name in ("arch", "settings", "classes")},
            "known": mean_known(labels[first_samples(len(labels), self.args)]),
            "image_shape": list(self.train_loader.image_shape),
            "model": self.model.state_dict(),
            "passes": [
                {
                    "images": batch.images,
                    "targets": batch.targets,
                    "indices": torch.as_tensor(batch.indices),
                    "weight": batch.weight,
                    "image_weights": batch.image_weights,
                }
                for batch in batches
            ],
            "step": progress.step + 1,
            "epoch": progress.epoch + 1,
            "rank": self.distributed.rank,
            "seed": self._seed(progress),
            "scale": float(scale),
            "amp": resolve_amp(self.args.precision, self.distributed.device),
        }
        saved = "batch not saved: there are enough, or the disk refused"
        path = folder / "bad_batches" / f"step{content['step']:08d}_rank{content['rank']}.pt"
        with suppress(OSError, RuntimeError):  # must not end a run; torch reports a full disk as RuntimeError
            path.parent.mkdir(exist_ok=True)
            if len(list(path.parent.glob("*.pt"))) < MOST_BAD_BATCHES:
                with whole_file(path) as file:
                    torch.save(content, file)
                saved = f"batch saved: {path}"
        self.writer.log(saved)
