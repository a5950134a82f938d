"""The loop: training and validation in mixed precision."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from utils.data.loaders import Batch, TrainLoader, ValidationLoader
from utils.data.sample_plan import step_seed
from utils.distributed import Distributed
from utils.optim.ema import ema_state, load_ema_state
from utils.optim.lr_policy import LRPolicy
from utils.precision.amp import autocast
from utils.record.checkpoint import Checkpointer
from utils.record.metrics import COUNT, ClassificationMeter, Report
from utils.record.progress import NOTHING, Progress
from utils.record.writer import NullWriter
from utils.settings import Settings


class TrainingFailure(RuntimeError):
    """Training cannot go on; the message says at which step, why, and what to do."""


class TraVal:
    """Trains and validates ``model``.

    ``train_loader`` and ``validation_loader`` yield ``Batch``es (see ``utils/data/loaders.py``);
    ``criterion`` takes logits (n, classes) and int64 targets (n,) and gives their mean loss; ``scaler`` is
    a ``torch.amp.GradScaler``, disabled where the precision needs none. ``description`` holds the parts of
    a checkpoint that do not change. Without ``writer`` or ``checkpointer`` nothing is written.
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: TrainLoader | None,
        optimizer: torch.optim.Optimizer | None,
        criterion: nn.Module,
        scaler: torch.amp.GradScaler,
        args: Settings,
        validation_loader: ValidationLoader | None,
        *,
        distributed: Distributed,
        lr_policy: LRPolicy | None = None,
        ema: AveragedModel | None = None,
        writer: NullWriter | None = None,
        checkpointer: Checkpointer | None = None,
        description: dict[str, Any] | None = None,
        curr_scen_name: str = "",
    ) -> None:
        self.model, self.ema = model, ema  # bare: its names are the checkpoint's
        self.train_loader, self.validation_loader = train_loader, validation_loader
        self.optimizer, self.criterion, self.scaler = optimizer, criterion, scaler
        self.args, self.distributed, self.device = args, distributed, distributed.device
        self.lr_policy = lr_policy
        self.writer, self.checkpointer, self.description = writer or NullWriter(), checkpointer, description
        self.name = curr_scen_name
        self.progress = Progress()
        self._show_first_batch = True
        self.autocast = autocast(args.precision, self.device)

        if args.model.compile:
            model.compile()  # in place, so that names stay as they are
        if optimizer is not None:
            self.network = distributed.wrap(model, train_loader.image_shape)
            # The scaler leaves the optimizer out when a gradient is not finite; the hook tells, without synchronising.
            optimizer.register_step_post_hook(self._on_optimizer_step)
            self.meter = ClassificationMeter(args.logging.print_freq, self.device)
            self._one = torch.ones((), device=self.device)
            self._pending: list[tuple[float, torch.Tensor, torch.Tensor]] = []  # lr, gradient norm, scale a step

    # ---------------------------------------------------------------------------------- verbs

    def fit(self) -> Report:
        """Train from where ``progress`` stands to the end; gives the last validation's report."""
        while not self.progress.is_finished(self.args):
            epoch = self.progress.epoch
            self._training_report = self.train(epoch)
            self.validation(epoch, report=True)
        return Report(*self.progress.last_validation)

    def train(self, epoch: int) -> Report:
        """Train the (rest of the) epoch; gives its report over all ranks."""
        steps = self.train_loader.steps_per_epoch
        self.network.train()
        self._began = self._window_began = time.perf_counter()
        self._data_seconds, self._count_before = 0.0, self.progress.epoch_sums[COUNT]
        title = f"Epoch {epoch + 1}/{self.args.optimisation.epochs}"
        with self.writer.bar(steps, self.progress.step_in_epoch, title, "step") as bar:
            batches = self._timed(self.train_loader.batches(epoch, self.progress.step_in_epoch))
            if self._show_first_batch:
                self._show_first_batch = False
                first = next(batches)
                self.writer.images("First_Training_Batch", self.train_loader.transform.to_pixels(first.images))
                batches = itertools.chain([first], batches)
            for _, passes in itertools.groupby(batches, key=lambda batch: batch.number):
                self.training_step(passes)
                bar.update()
                self._after_step(epoch, bar)
                if self.progress.is_finished(self.args):
                    break
        self._collect(epoch)
        window = self.progress.window_sums
        if window[COUNT]:
            self._report_window(epoch, None)
            if self.progress.step_in_epoch < steps:  # cut: a run that goes on reports the whole window in its turn
                self.progress.window_sums = window
        self._train_seconds = time.perf_counter() - self._began
        return Report.from_sums(self.progress.epoch_sums)

    def training_step(self, batches: Iterable[Batch]) -> None:
        """One optimizer step over one or more forward passes, whose gradients add up."""
        lr = self._begin_step()
        for batch in batches:
            with self.distributed.accumulating(self.network, more_to_come=not batch.ends_step):
                with self.autocast:
                    output = self.network(batch.images)[: len(batch.targets)]
                    loss = self.criterion(output, batch.targets) if len(batch.targets) else output.sum()
                self.scaler.scale(loss * batch.weight).backward()
            self.meter.update(len(self._pending), loss.detach(), output.detach(), batch.targets)

        scale = self.scaler.scale(self._one)
        self.scaler.unscale_(self.optimizer)  # clipping and the logged norm are of the true gradient
        norm = self._clip_gradient()
        self._stepped = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self._stepped and self.ema is not None:
            self.ema.update_parameters(self.model)
        self._pending.append((lr, norm, scale))
        self.progress.skipped_steps += not self._stepped
        self.progress.step += 1
        self.progress.step_in_epoch += 1

    def validation(self, epoch: int, report: bool = True) -> Report:
        """Validate, exactly, on all ranks; with ``report`` also log, enter the epoch's row and save.

        With a moving average of the weights its result is the one that counts; the raw weights' stands
        beside it.
        """
        raw = self._validate(self.model)
        result = self._validate(self.ema.module) if self.ema is not None else raw
        if report:
            self._report_epoch(epoch, result, raw)
        return result

    # ---------------------------------------------------------------------------- parts of a step

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, while the time spent waiting for them adds up."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self._data_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _begin_step(self) -> float:
        """Set learning rate and random seed, both functions of the position alone; gives the rate."""
        seed = step_seed(self.args.run.seed, self.progress.step, self.distributed.rank)
        self.distributed.seed(seed)
        lr = self.lr_policy(self.progress.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def _clip_gradient(self) -> torch.Tensor:
        """The norm of the whole unscaled gradient before clipping, a tensor () on the device."""
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self.args.optimisation.clip_grad_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grads_with_norm_(parameters, self.args.optimisation.clip_grad_norm, norm)
        return norm

    def _on_optimizer_step(self, *_: Any) -> None:
        self._stepped = True

    def _after_step(self, epoch: int, bar: tqdm) -> None:
        """What is due between two steps: a log line, a checkpoint."""
        logging, step = self.args.logging, self.progress.step
        if step % logging.print_freq == 0 or len(self._pending) == logging.print_freq:
            self._collect(epoch)
        if step % logging.print_freq == 0:
            self._report_window(epoch, bar)
        within = self.progress.step_in_epoch < self.train_loader.steps_per_epoch
        if within and logging.save_every_steps and step % logging.save_every_steps == 0:
            self._collect(epoch)
            self.save("last")

    # ------------------------------------------------------------------- synchronisation points

    def _collect(self, epoch: int) -> None:
        """Bring the pending steps' sums to the host, over all ranks. A synchronisation point."""
        steps = len(self._pending)
        if not steps:
            return
        lrs, norms, scales = zip(*self._pending, strict=True)
        sums = self.distributed.all_reduce_sum(self.meter.sums[:steps].clone())
        rows = torch.cat([sums, torch.stack([torch.stack(norms), torch.stack(scales)], dim=1).double()], dim=1).tolist()
        first = self.progress.step - steps + 1
        curves = []
        for number, (lr, (loss, top1, top5, count, norm, scale)) in enumerate(zip(lrs, rows, strict=True), first):
            self.progress.add([loss, top1, top5, count])
            self.progress.samples_seen += round(count)
            curves.append((number, epoch + 1, loss / count, 100 * top1 / count, 100 * top5 / count, lr, norm, scale))
        self.writer.curves(curves)
        self._last = curves[-1]
        self._pending.clear()
        self.meter.reset()
        bad = next((row for row in curves if not math.isfinite(row[2])), None)
        if bad and not self.scaler.is_enabled():
            raise TrainingFailure(
                f"the loss is {bad[2]} at step {bad[0]} (epoch {epoch + 1}); lower --lr, add --warmup-epochs or "
                "--clip-grad-norm; checkpoints before this step are sound"
            )

    def _report_window(self, epoch: int, bar: tqdm | None) -> None:
        """A log line and TensorBoard points of the steps since the last ones."""
        progress = self.progress
        report = Report.from_sums(progress.window_sums)
        seconds = time.perf_counter() - self._window_began
        speed, wait = report.count / seconds, 100 * self._data_seconds / seconds
        progress.window_sums = list(NOTHING)
        self._window_began, self._data_seconds = time.perf_counter(), 0.0
        *_, lr, norm, scale = self._last
        self.writer.scalars(
            {
                "Loss/Training": report.loss,
                "Top1/Training": report.top1,
                "Top5/Training": report.top5,
                "Optim/lr": lr,
                "Optim/Gradient_Norm": norm,
                "AMP/scale": scale,
                "AMP/skipped_steps": progress.skipped_steps,
                "Speed/images_per_second": speed,
                "Speed/data_wait_percent": wait,
            },
            progress.step,
        )
        skipped = f"  skipped {progress.skipped_steps}" if progress.skipped_steps else ""
        self.writer.log(
            f"epoch {epoch + 1}/{self.args.optimisation.epochs}  step {progress.step_in_epoch}/"
            f"{self.train_loader.steps_per_epoch}  {report}  lr {lr:.4g}  gradient {norm:.3g}{skipped}  "
            f"{speed:,.0f} images/s  data wait {wait:.0f} %",
            to_console=bar is None or bar.disable,
        )
        if bar is not None:
            bar.set_postfix_str(f"{report}  lr {lr:.4g}", refresh=False)

    # ------------------------------------------------------------------------------- validation

    @torch.no_grad()
    def _validate(self, model: nn.Module) -> Report:
        """The bare module over this rank's batches, with rank 0's buffers; sums over all ranks."""
        self.distributed.equalise_buffers(model)
        model.eval()
        loader = self.validation_loader
        meter = ClassificationMeter(loader.num_batches, self.device)
        with self.writer.bar(len(loader), 0, "Validation", "batch") as bar:
            for batch in loader.batches():
                with self.autocast:
                    output = model(batch.images)
                    loss = functional.cross_entropy(output, batch.targets)
                meter.update(batch.number, loss, output, batch.targets)
                bar.update()
        model.train()
        return Report.from_sums(self.distributed.all_reduce_sum(meter.sums).sum(0).tolist())

    def _report_epoch(self, epoch: int, result: Report, raw: Report) -> None:
        """The epoch's row, points, line and checkpoints."""
        progress, training = self.progress, self._training_report
        seconds = time.perf_counter() - self._began
        images_per_second = (training.count - self._count_before) / self._train_seconds
        points = {"Loss/Test": result.loss, "Top1/Test": result.top1, "Top5/Test": result.top5}
        row = {
            "epoch": epoch + 1, "step": progress.step, "lr": self._last[5],
            "train_loss": training.loss, "train_top1": training.top1, "train_top5": training.top5,
            "val_loss": result.loss, "val_top1": result.top1, "val_top5": result.top5, "val_count": result.count,
            "images_per_second": round(images_per_second, 1), "seconds": round(seconds, 3),
            "skipped_steps": progress.skipped_steps,
        }  # fmt: skip
        line = f"epoch {epoch + 1}/{self.args.optimisation.epochs}  validation {result}"
        if self.ema is not None:
            points |= {"Loss/Test_raw": raw.loss, "Top1/Test_raw": raw.top1, "Top5/Test_raw": raw.top5}
            row |= {"raw_val_loss": raw.loss, "raw_val_top1": raw.top1, "raw_val_top5": raw.top5}
            line += f"  (raw weights {raw})"
        self.writer.scalars(points, progress.step)
        best = result.top1 > progress.best_top1
        whole = progress.step_in_epoch == self.train_loader.steps_per_epoch
        if best and whole:  # an epoch cut by --max-steps must leave no trace in a run that goes on
            progress.best_top1, progress.best_epoch = result.top1, epoch + 1
        self.writer.log(f"{line}  {seconds:.1f} s{'  best so far' if best else ''}")
        progress.last_validation = [result.loss, result.top1, result.top5, result.count]
        if whole:
            progress.finish_epoch()
        self.writer.epoch(row)
        finished = progress.is_finished(self.args)
        due = finished or progress.epoch % self.args.logging.save_every_epochs == 0
        # 'last' comes last: when it says that the run is finished, the others are there.
        names = {"best": best, "final": finished, "last": due}
        self.save(*(name for name, wanted in names.items() if wanted))

    # ------------------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """What changes during training, at an optimizer-step boundary."""
        return {
            "model": self.model.state_dict(),
            "ema": ema_state(self.ema) if self.ema is not None else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": self.progress.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, as ``state()`` gave it."""
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            load_ema_state(self.ema, state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # a disabled scaler has no state
            self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress.from_state(state["progress"])
        self._show_first_batch = False  # the run's TensorBoard has it

    def save(self, *names: str) -> None:
        """Save under ``names``; a failure on the main process ends all of them."""
        if not names or self.checkpointer is None:
            return
        self.distributed.equalise_buffers(self.model)
        self.writer.flush()
        self.distributed.on_main(lambda: self.checkpointer.save({**self.description, **self.state()}, *names))
