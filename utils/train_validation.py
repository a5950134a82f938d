"""The loop: training and validation in mixed precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from utils.checkpoint.progress import Progress
from utils.config.settings import Settings
from utils.data.loaders import Batch, TrainLoader, ValidationLoader
from utils.loop.attachments import attachments_of
from utils.loop.bad_images import BadImages
from utils.loop.extras import Extras
from utils.loop.forward import Outputs, forward
from utils.loop.hooks import call
from utils.loop.non_finite_step import NonFiniteStepHandler
from utils.loop.step_graph import launcher
from utils.loop.step_sums import StepSums
from utils.loop.stop_signals import StopConsensus, Stopped, TrainingFailure
from utils.loop.validation import pictures_may_be_due, update_best, validate_in_views, write_pictures
from utils.loop.verdict import Gradient, Verdict, Verdicts
from utils.optim.batch_norm_statistics import recompute
from utils.optim.clipping import GradientClipper
from utils.optim.optimizers import load_states
from utils.precision.amp import autocast
from utils.precision.diagnosis import too_many_skips
from utils.record.multilabel import AnyReport, report_of
from utils.record.reporter import Reporter
from utils.record.writer import Writer
from utils.runtime.compiled import compile_in_place
from utils.runtime.devices import runs_ahead, timing_algorithms
from utils.runtime.distributed import Distributed
from utils.runtime.process import RankInfo

__all__ = ["Extras", "TraVal"]


class TraVal:
    """Trains and validates ``model``.

    ``train_loader`` and ``validation_loader`` yield ``Batch``es (see ``utils/data/loaders.py``). ``optimizer`` may be
    several, each for its own parameters: under one ``scaler`` each skips steps independently. ``criterion`` takes
    logits (n, classes) and a batch's targets and returns their mean loss, or a dict of named losses, with the same
    names in each step, whose sum is minimised and each of which is logged. ``scaler`` is a ``torch.amp.GradScaler``,
    disabled if the precision needs none. ``curr_scen_name`` names the run, for hooks and subclasses. Without ``writer``
    nothing is logged. ``extras``: optional parts of a run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_loader: TrainLoader | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        criterion: torch.nn.Module,
        scaler: torch.amp.GradScaler,
        args: Settings,
        validation_loader: ValidationLoader | None,
        *,
        writer: Writer | None = None,
        curr_scen_name: str = "",
        extras: Extras | None = None,
    ) -> None:
        extras = extras or Extras()
        # bare: its parameters' names are the checkpoint's
        self.model = model
        self.ema = extras.ema
        if train_loader is not None:
            self.train_loader = train_loader  # without one it only validates
        self.validation_loader = validation_loader
        self.optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
        self.criterion = criterion
        self.scaler = scaler
        self.args = args
        self.distributed = extras.distributed or Distributed(RankInfo(), args.run, args.precision.tf32)
        self.device = self.distributed.device
        self.lr_policy = extras.lr_policy
        self.run_name = curr_scen_name
        self.hooks = extras.hooks
        self.writer = writer or Writer(silent=True)
        self.checkpointer = extras.checkpointer
        self.description = extras.description or {}
        self.class_names = self.description.get("classes", ())
        self.multilabel = extras.multilabel
        self.reporter = Reporter(
            self.writer,
            args,
            scaled=scaler.is_enabled(),
            classes=len(self.class_names),
            optimizers=self.optimizers,
            multilabel=self.multilabel,
        )
        self.attachments = attachments_of(model, args, extras.freezing)
        self.consensus = StopConsensus(self.distributed, extras.stop_signals)
        self.bad_images = BadImages(args.data.skip_bad_images, self.distributed, self.writer)
        self.progress = Progress()
        self.verdicts = Verdicts((), scaler, self.device)
        self._has_begun_step = False
        self._show_first_batch = True
        self.autocast = autocast(args.precision, self.device)
        if args.model.compile:
            compile_in_place(model, args.model.compile_mode)
        if self.optimizers:
            self._prepare_training()

    def _prepare_training(self) -> None:
        self._begin_epoch(0)
        self._prepare_trainable()
        folder = self.checkpointer.folder.parent if self.checkpointer is not None else None
        self.watch = NonFiniteStepHandler(
            self.model, self.train_loader, self.args, self.distributed, self.writer, folder, self.description
        )
        waiting = [type(own.optimizer).__name__ for own in self.active if own.reads_flag]
        if waiting and runs_ahead(self.device):
            self.writer.log(f"{', '.join(waiting)}: no flag on the device can hold it, so each step waits for the host")
        self.sums = StepSums(self.args.logging.print_freq, self.distributed, self.multilabel)
        self._one = torch.ones((), device=self.device)

    def _begin_epoch(self, epoch: int) -> bool:
        """Prepare the optional parts for ``epoch``; return True if the set of parameters that train has changed."""
        changes = [part.begin_epoch(self, epoch) for part in self.attachments]
        return any(changes)

    def _prepare_trainable(self) -> None:
        """Prepare what depends on which parameters train: optimizers, gradient exchange, clipping, SAM."""
        self.verdicts = Verdicts(self.optimizers, self.scaler, self.device)
        self.active = self.verdicts.optimizers
        static = self.args.optimisation.accumulate == 1 and not self.args.optimisation.grad_penalty
        self.network = self.distributed.wrap(self.model, self.train_loader.image_shape, static, self.args.exchange)
        self.clip = GradientClipper(
            self.args.optimisation,
            self.model,
            self.active,
            each_skips=self.scaler.is_enabled(),
            over_ranks=self.distributed.norm_over_ranks,
        )
        for part in self.attachments:
            part.prepare(self)
        self.launcher = launcher(self)

    # ---------------------------------------------------------------------------------- verbs

    def epochs(self) -> Iterator[int]:
        """Yield the epochs that are left, to be trained by the caller; validate each afterwards if that is due."""
        while not self.progress.is_finished(self.args):
            step = self.progress.step
            is_trained = self.progress.is_trained(self.args)
            # The last epoch may have been trained when more were to follow, and lack only its validation now.
            epoch = self.progress.epoch - (is_trained and self.progress.step_in_epoch == 0)
            yield epoch
            in_epoch = self.progress.step_in_epoch < self.train_loader.steps_per_epoch
            if self.progress.step == step and in_epoch and not is_trained:
                raise RuntimeError(f"epoch {epoch + 1} was not trained; call train({epoch})")
            if self.progress.validated_step == self.progress.step:
                continue
            if self.progress.validation_is_due(self.args):
                self.validation(epoch)
            else:
                self._end_epoch(None, None)

    def fit(self) -> AnyReport:
        """Train from ``progress`` to the end; return the last validation's report."""
        for epoch in self.epochs():
            self.train(epoch)
        self.wait_for_checkpoint()
        return report_of(self.progress.last_validation)

    def train(self, epoch: int) -> AnyReport:
        """Train the rest of the epoch; return the report on its training, over all ranks.

        Raises ``RuntimeError`` for an epoch other than that of ``progress``, as in a loop that begins at 0 again after
        a resume: it would train on the samples of one epoch and count them for another.
        """
        if epoch != self.progress.epoch and not self.progress.is_trained(self.args):
            raise RuntimeError(
                f"train({epoch}): {self.progress.epoch} is the epoch to train; loop over run.epochs(traval), which "
                "yields those that are left"
            )
        steps = self.train_loader.steps_per_epoch
        title = f"Epoch {epoch + 1}/{self.args.optimisation.epochs}"
        if self._begin_epoch(epoch):
            self.distributed.unwrap(self.network)
            self._prepare_trainable()
        self.network.train()
        self.consensus.begin()
        self.reporter.begin_epoch(self.progress, steps)
        with self.writer.bar(
            steps, self.progress.step_in_epoch, title, "step", lambda: self.reporter.under_way(self.progress)
        ) as bar:
            for _, passes in itertools.groupby(self._batches(epoch), key=lambda batch: batch.number):
                self.training_step(passes)
                bar.update()
                self._after_step(bar)
                if self.progress.is_trained(self.args):
                    break
        self.collect()
        self.reporter.end_training(self.progress)
        if self.ema is not None and self.progress.step_in_epoch == steps:
            self.ema.end_epoch(self.progress)
        return self.reporter.kind.from_sums(self.progress.epoch_sums)

    def training_step(self, batches: Iterable[Batch]) -> None:
        """Take an optimizer step over one or more forward passes, whose gradients add up.

        The host launches the step and reads nothing: a flag on the device says whether the gradient was finite, and
        holds weights, optimizer and buffers still if it was not. The host learns the outcome in ``settle``, in the
        middle of the next step, when the device has work to go on with.
        """
        self._has_begun_step = True
        self.seed_step()
        gradient = self.launcher.launch_passes(batches, self._add_pass)
        self.settle()  # the step before: the learning rate depends on whether it moved
        lr = self._set_learning_rate()
        call(self.hooks.before_update, self, gradient.norm)
        self.watch.seed_update(self.progress)
        flags = self.launcher.launch_update(gradient)
        self.verdicts.send(flags, gradient)
        for parameter in self.clip.parameters:  # zero_grad(set_to_none=True), without walking through all modules
            parameter.grad = None
        self.sums.end_step(lr, gradient.norm, gradient.scale)
        self.progress.advance()
        self._has_begun_step = False
        if self.hooks.after_update:  # they look at the state after the step
            self.settle()

    def launch_passes(self, batches: Iterable[Batch], passed: Callable[[Batch, Outputs], None]) -> Gradient:
        """Run the forward and backward passes, calling ``passed`` after each; return the summed gradient's norms."""
        self.watch.buffers.remember()
        for part in self.attachments:
            batches = part.passes(self, batches)
        for batch in batches:
            with (
                timing_algorithms(not self.distributed.deterministic),
                self.distributed.no_sync(self.network, more_to_come=not batch.ends_step),
            ):
                outputs = self.forward(self.network, batch)  # autocast covers this and no more
                call(self.hooks.before_backward, self, batch, outputs)
                # The second term is 0, or NaN where the loss is not finite: then no rank's gradient is, either.
                self.scaler.scale(outputs.loss).backward(batch.weight + 0 * outputs.loss.detach())
                call(self.hooks.after_backward, self, batch, outputs)
            passed(batch, outputs)
        scale = self.loss_scale()
        for optimizer in self.active:
            self.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # Held is what it needs of an optimizer
        norm = self.clip()  # clipping and the logged norm are of the true gradient
        return Gradient(norm, scale, self.clip.measured)

    def launch_update(self, gradient: Gradient) -> torch.Tensor | None:
        """Move the weights, unless the gradient is not finite: then only the loss scale changes.

        Returns a flag for each optimizer, (optimizers,), not 0 where its gradient is not finite; None if the host has
        read them all.
        """
        self.verdicts.hold_unless_finite(gradient.norm)
        for optimizer in reversed(self.active):  # the shortest first, for optimizers that read their flag on the host
            self.scaler.step(optimizer)  # type: ignore[arg-type]  # as above
        flags = self.verdicts.put_back(self.watch.buffers)
        self.scaler.update()
        return flags

    def settle(self) -> None:
        """Learn whether the latest step moved the weights: count it, explain a skip, update the average.

        The host waits for that step, not for what it has launched since.
        """
        if not self.verdicts.is_pending:
            return
        verdict = self.verdicts.read()
        self.progress.advance(-1)
        if any(verdict.held):
            self._explain(verdict)
        if verdict.moved and self.ema is not None:
            after_step = self.watch.buffers.copy_of if self._has_begun_step else None
            self.ema.update(self.progress.moved_steps, self.progress.epoch, after_step)
        self.progress.advance()
        self.progress.count_moved(verdict.moved, len(verdict.held))
        call(self.hooks.after_update, self)
        if self._has_begun_step:
            self._end_after_too_many_skips()

    def forward(self, network: torch.nn.Module, batch: Batch) -> Outputs:
        """Logits and loss of a training batch. ``network``: the model itself, or wrapped to sum gradients."""
        call(self.hooks.before_forward, self, batch)
        penalty = self.args.optimisation.grad_penalty
        outputs = forward(network, batch, self.criterion, self.autocast, penalty=penalty, scaler=self.scaler)
        call(self.hooks.after_forward, self, batch, outputs)
        return outputs

    def collect(self) -> None:
        """Bring the sums of pending steps to the host, over all ranks, and record them. A synchronisation point."""
        self.settle()
        records = self.sums.collect(self.progress)
        if records:
            self.writer.curves(records)
        self.bad_images.collect(self.progress)

    def validation(self, epoch: int, report: bool = True) -> AnyReport:
        """Validate exactly, on all ranks; with ``report`` also log, write the epoch's row and save.

        With an average of the weights, the average's result counts, and the raw weights' result is logged beside it.
        The average's batch-norm statistics are recomputed first, over samples of ``epoch``.
        """
        self.settle()
        call(self.hooks.before_validation, self)
        average = self.ema.module if self.ema is not None and self.ema.has_begun else None
        with_pictures = report and bool(self.class_names) and pictures_may_be_due(self.progress, self.args)
        self.consensus.begin()
        result, gathered = validate_in_views(self, self.model, with_pictures and average is None)
        raw = result
        if average is not None:
            batches = self.args.average.ema_bn_batches
            stop = self.stop_if_requested
            recompute(average, self.train_loader, epoch, batches, self.distributed, self.autocast, stop)
            result, gathered = validate_in_views(self, average, with_pictures)
        self.bad_images.collect(self.progress)
        call(self.hooks.after_validation, self, result)
        if report:
            self._end_epoch(result, raw if self.ema is not None else None, gathered)
        return result

    # ---------------------------------------------------------------------------- parts of a step

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """Batches of the rest of the epoch; none if its last step is done and only the validation is missing."""
        if self.progress.is_trained(self.args):
            return
        for batch in self.reporter.timed(self.train_loader.batches(epoch, self.progress.step_in_epoch)):
            if self._show_first_batch:
                self.writer.images("First_Training_Batch", self.train_loader.transform.to_pixels(batch.images))
                self._show_first_batch = False
            yield batch

    def _set_learning_rate(self) -> float:
        """Set the learning rate, a function of the progress alone, and return it."""
        if self.lr_policy is None:
            return self.optimizers[0].param_groups[0]["lr"]
        progress = self.progress
        lr = self.lr_policy.at(progress.epoch, progress.updates, progress.lr_drops)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def _add_pass(self, batch: Batch, outputs: Outputs) -> None:
        self.sums.add_pass(batch, outputs)
        self.bad_images.note(batch, self.progress.step + 1)

    def loss_scale(self) -> torch.Tensor:
        """The factor of the loss in this step, a tensor (); 1 without a scaler."""
        return self.scaler.scale(self._one)

    def seed_step(self) -> None:
        """Reset the random numbers to those at the start of the step; its position seeds them."""
        self.watch.seed(self.progress)

    def _after_step(self, bar: tqdm) -> None:
        """Do what is due between two steps: a log line, a checkpoint, or the end after too many skipped steps."""
        logging = self.args.logging
        progress = self.progress
        first = self.reporter.awaits_first_step
        if first or progress.step % logging.print_freq == 0 or self.sums.full:
            self.collect()
        if first and (replaced := self.watch.buffers.replaced()):
            self.writer.log(
                f"warning: the network puts a new tensor in the place of its buffer {replaced[0]}: an average of the "
                "weights keeps the old one, and a skipped step does not restore it; write into it: buffer.copy_(...)"
            )
        self.reporter.step_ended(progress, to_console=bar.disable)
        if progress.step % logging.print_freq == 0:
            self.reporter.window(progress, bar)
        within = progress.step_in_epoch < self.train_loader.steps_per_epoch
        if not within or progress.is_trained(self.args):
            self.settle()  # no further step will
        self._end_after_too_many_skips()
        if within and logging.save_every_steps and progress.step % logging.save_every_steps == 0:
            self.collect()
            self.save("last")
        self.stop_if_requested()

    def _explain(self, verdict: Verdict) -> None:
        """Log what was not finite in a step that some or all optimizers skipped; without a scaler, end the run."""
        gradient = verdict.gradient
        if verdict.moved:
            names = dict.fromkeys(itertools.chain(*self.distributed.gather(self.clip.overflowed(gradient.measured))))
            bad = self.watch.explain_part(self.progress, gradient.scale, list(names))
        else:
            with self.watch.set_aside(self._has_begun_step):
                bad = self.watch.explain(self.progress, gradient.scale, self.forward)
        if not self.scaler.is_enabled():
            self.sums.take_back_step()
            self._stop(
                f"the gradient is {gradient.norm.item()} at step {bad.step} (epoch {bad.epoch}), {bad.summary()}; lower"
                " --lr, add --warmup-epochs, or see scripts/amp_audit.py; last.pt holds the state before this step"
            )
        by = f" by {', '.join(verdict.held_names(self.active))}" if verdict.moved else ""
        self.writer.log(f"step {bad.step} skipped{by}, {bad.summary()}")

    def _end_after_too_many_skips(self) -> None:
        progress = self.progress
        if progress.skipped_in_row > self.args.precision.max_skipped_steps:
            epoch = progress.epoch + 1
            self._stop(too_many_skips(progress.skipped_in_row, progress.step, epoch, self.scaler.get_scale()))

    def _stop(self, message: str) -> None:
        """Save the state, which is sound, and end the run with ``message``; undo a further step if one has begun."""
        if self._has_begun_step:
            self.watch.undo()
        self.bad_images.forget_after(self.progress.step)
        self.save_now("last")
        raise TrainingFailure(message)

    def stop_if_requested(self) -> None:
        """Save the state and end the run if any rank received a stop signal; end it if a checkpoint cannot be written.

        All ranks call it between two steps or rounds of validation; it synchronises now and then (``StopConsensus``).
        """
        signal, failed = self.consensus.poll(self.checkpointer is not None and self.checkpointer.failed)
        if failed:
            self.wait_for_checkpoint()  # raises
        if signal:
            self.writer.log(f"{signal.name}: saving")
            self.save_now("last")
            raise Stopped(signal, f"after step {self.progress.step} (epoch {self.progress.epoch + 1})")

    # ------------------------------------------------------------------------------- end of an epoch

    def _end_epoch(self, result: AnyReport | None, raw: AnyReport | None, gathered: Any = None) -> None:
        """Write the epoch's row, points, line and checkpoints. ``result``: None for an epoch that is not validated."""
        progress = self.progress
        row = self.reporter.row(progress, result, raw)
        counted = progress.epoch == row["epoch"]  # when it ended; its validation comes only now
        whole = counted or progress.step_in_epoch == self.train_loader.steps_per_epoch
        best = result is not None and update_best(progress, row, self.args, whole)
        dropped = result is not None and whole and progress.drop_lr(int(row["epoch"]), self.args)
        self.reporter.epoch(row, result, raw, best)
        if result is not None:
            self.reporter.best(progress)
            progress.last_validation = result.numbers
            progress.validated_step = progress.step
        if whole and not counted:
            progress.finish_epoch()
        if result is not None and result.by_class is not None:
            self.writer.classes([*result.by_class.rows(self.class_names)], progress.step)
        self.writer.epoch(row)
        finished = progress.is_finished(self.args)
        if dropped and progress.epoch < self.args.optimisation.epochs and self.lr_policy is not None:
            drops = (progress.lr_drops - 1, progress.lr_drops)
            before, now = (self.lr_policy.at(progress.epoch, progress.updates, number) for number in drops)
            self.reporter.lr_drop(self.args, before, now)
        write_pictures(self, gathered, finished)
        saved = finished or progress.epoch % self.args.logging.save_every_epochs == 0
        # A run continues from 'last', or 'best' if that is newer: once these say that it is finished, 'final' exists.
        names = {"final": finished, "best": best, "last": saved}
        self.save(*(name for name, wanted in names.items() if wanted))

    # ------------------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """State that changes during training, between two optimizer steps. Several optimizers' states are a list."""
        assert not self.verdicts.is_pending, "a step whose verdict the host has not read"
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.state() if self.ema is not None else None,
            "optimizer": optimizers if len(optimizers) > 1 else optimizers[0],
            "scaler": self.scaler.state_dict(),
            "progress": self.progress.state(),
        }

    def places(self) -> Any:
        """The part of each tensor of ``state()`` that this process holds; None if it holds all of them whole."""
        return next(filter(None, (part.places(self) for part in self.attachments)), None)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, as ``save`` wrote it."""
        load_states(self.model, self.optimizers, state)
        if self.ema is not None:
            self.ema.load_state(state["ema"])
        if state["scaler"]:  # a disabled scaler has no state
            self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress.from_state(state["progress"])
        if self.progress.bad_images:
            self.writer.bad_images(self.progress.bad_images)

    def save(self, *names: str) -> None:
        """Save under ``names``: copy the state now and write it in the background.

        If the previous write failed, all ranks end.
        """
        checkpointer = self.checkpointer
        if not names or checkpointer is None:
            return
        self.reporter.keep_time(self.progress)

        def save() -> None:
            self.writer.flush()
            call(self.hooks.before_save, self, names)
            checkpointer.save(left or {**self.description, **self.state()}, *names)
            call(self.hooks.after_save, self, names)

        self.distributed.broadcast_buffers(self.model)
        left = next(filter(None, [part.write(self) for part in self.attachments]), None)
        self.distributed.run_on_rank0(save)

    def save_now(self, name: str) -> None:
        """Save under ``name``; return once it is on the disk."""
        self.collect()
        self.save(name)
        self.wait_for_checkpoint()

    def keep_best(self) -> None:
        """If the run's folder lacks best.pt, save this state there if it is the best so far, or else log a warning.

        Does nothing if best.pt is there, or if no state has been the best yet.
        """
        assert self.checkpointer is not None  # a run that goes on has a folder
        progress = self.progress
        path = self.checkpointer.folder / "best.pt"
        if not progress.best_epoch or self.distributed.run_on_rank0(path.is_file):
            return
        if progress.best_epoch == progress.epoch and progress.validated_step == progress.step:
            self.save_now("best")
            return
        self.writer.log(
            f"warning: the checkpoint of epoch {progress.best_epoch}, the best so far, is not in {path.parent}; best.pt"
            " will be that of the first better one"
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until the state that was saved last is on the disk; if that fails, all ranks end."""
        if self.checkpointer is not None:
            self.distributed.run_on_rank0(self.checkpointer.wait)
