"""Reports on training, made from sums: log lines, TensorBoard points and the epoch's row."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from utils.checkpoint.progress import NOTHING, Progress
from utils.config import plugins
from utils.config.settings import Settings
from utils.data.sample_plan import evenly_spaced
from utils.optim.groups import lr_scales
from utils.record.curves import StepRecord
from utils.record.doubts import doubts
from utils.record.epoch_scalars import (
    PREFIX,
    best_metric,
    points_of,
    row_of,
    stopping_metric,
    validation_tags,
    without_improvement,
)
from utils.record.metrics import COUNT, Report, cut_words, shows_top5
from utils.record.multilabel import AnyReport, MultilabelReport
from utils.record.writer import Writer

T = TypeVar("T")
MOST_RATES = 12  # charts of learning rates besides Optim/lr
MIXED = "of mixed images (mixup, CutMix): the class with the largest share counts as right"
SEVERAL_MIXED = "of mixed images (mixup, CutMix): a label of more than half of an image counts"


class Mark(NamedTuple):
    """A moment of training: the time, the steps taken and samples seen so far, and the seconds waited for data."""

    seconds: float
    step: int
    images: int
    data_seconds: float


class Reporter:
    """Turns ``Progress`` and reports into text and points, and keeps the clocks for the speeds.

    ``scaled``: True if the loss is scaled; otherwise neither scale nor skipped steps are charted. ``classes``: their
    number, on which it depends whether top-5 is shown. If parameter groups of ``optimizers`` have learning rates of
    their own, at most ``MOST_RATES`` of these are charted, evenly spread. ``multilabel``: True for multi-label data.
    """

    def __init__(
        self,
        writer: Writer,
        args: Settings,
        *,
        scaled: bool,
        classes: int,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        multilabel: bool = False,
    ) -> None:
        self.scaled = scaled
        self.kind = MultilabelReport if multilabel else Report
        self.multilabel = multilabel
        self.with_top5 = shows_top5(classes)
        self.lr_scales = _spread(lr_scales(optimizers), MOST_RATES)
        self.mixes = args.augmentation.mixes
        if self.mixes(epoch=0) and multilabel:
            writer.describe({"Micro_F1/Training": SEVERAL_MIXED})
        elif self.mixes(epoch=0):
            writer.describe({"Top1/Training": MIXED, "Top5/Training": MIXED})
        self.writer = writer
        self.epochs = args.optimisation.epochs
        self.print_freq = args.logging.print_freq
        self.max_steps = args.run.max_steps or math.inf
        self.skips_bad_images = args.data.skip_bad_images
        self.max_val_batches = args.data.max_val_batches
        self.cut = cut_words(self.max_val_batches)
        self.best_metric = best_metric(args.run)
        if self.cut:
            best = map(_best_tag, (self.kind.HEADLINE, self.best_metric.name))
            writer.describe(dict.fromkeys((*validation_tags(multilabel), *best), f"of some of the images{self.cut}"))
        deciding = {self.best_metric.column, stopping_metric(args.run).column}
        deciding |= {f"{PREFIX}{name}" for name in plugins.added("metric")}
        self.deciding = sorted(deciding - {"val_loss", *(PREFIX + name for name in self.kind.FIGURES)})
        # Doubts come once within a run as well: at the first validation after a tenth of it and after the warm-up.
        begins = max(3, math.ceil(self.epochs / 10), math.ceil(args.optimisation.warmup_epochs) + 1)
        self.doubted = range(begins, min(begins + args.run.val_every_epochs, self.epochs))
        self.dataname = args.data.dataname
        self.steps_per_epoch = 0
        self._trained: float | None = None  # when the previous epoch's training part ended
        self._validated = False  # that epoch
        self._after_seconds = {True: 0.0, False: 0.0}  # from there to the next epoch, if validated and if not
        every = args.run.val_every_epochs
        self.val_every_epochs = min(every, args.run.early_stopping or every)  # it validates what it may end
        self._began: float | None = None
        self._data_seconds = 0.0
        self._after_first_step: Mark | None = None

    def begin_epoch(self, progress: Progress, steps_per_epoch: int) -> None:
        """Start the clocks of an epoch, or of the rest of a resumed one."""
        self.steps_per_epoch = steps_per_epoch
        self._began = self._step_began = now = time.perf_counter()
        if self._trained:
            self._after_seconds[self._validated] = now - self._trained
        self._seconds_before = progress.epoch_seconds
        self._seconds_told = 0.0  # in the epoch's row, to which a further validation adds its own alone
        self._epoch_mark = self._window_mark = Mark(now, progress.step, progress.samples_seen, self._data_seconds)

    @property
    def awaits_first_step(self) -> bool:
        """True if this process has not reported its first step."""
        return self._after_first_step is None

    def step_ended(self, progress: Progress, to_console: bool) -> None:
        """Note when a step has ended; log a line about this process's first step, whose sums have been collected."""
        self._step_began = now = time.perf_counter()
        if not self.awaits_first_step:
            return
        assert self._began is not None  # by ``begin_epoch``
        self._after_first_step = Mark(now, progress.step, progress.samples_seen, self._data_seconds)
        last = StepRecord.of(progress.last_step)
        self.writer.log(
            f"epoch {last.epoch}/{self.epochs}  step {progress.step_in_epoch}/{self.steps_per_epoch}  "
            f"loss {last.loss:.4f}  first step after {now - self._began:.1f} s, {self._data_seconds:.1f} s of them for "
            "data",
            to_console=to_console,
        )

    def under_way(self, progress: Progress) -> str:
        """The line that breaks a long silence: which step is under way, for how long, and the time left."""
        return (
            f"epoch {progress.epoch + 1}/{self.epochs}  step {progress.step_in_epoch + 1}/{self.steps_per_epoch} "
            f"under way for {time.perf_counter() - self._step_began:.0f} s{self._time_left(progress, self._step_began)}"
        )

    def epoch_seconds(self) -> float:
        """Seconds that the epoch has taken so far, without the pause before a resume."""
        assert self._began is not None  # by ``begin_epoch``
        return self._seconds_before + time.perf_counter() - self._began

    def keep_time(self, progress: Progress) -> None:
        """Note in ``progress``, for a checkpoint within an epoch, how long the epoch has taken."""
        if progress.step_in_epoch and self._began is not None:
            progress.epoch_seconds = self.epoch_seconds()

    def end_training(self, progress: Progress) -> None:
        """Report the steps since the last points, and the epoch's training part; stop the clock of that part."""
        window = progress.window_sums
        if progress.step % self.print_freq and window[COUNT]:  # otherwise they have been reported
            self.window(progress, None)
            if progress.step_in_epoch < self.steps_per_epoch:  # cut: a resumed run reports the whole window later
                progress.window_sums = window
        self._trained = time.perf_counter()
        if progress.step > self._epoch_mark.step or window[COUNT]:  # otherwise another process has said so
            cut = progress.step_in_epoch < self.steps_per_epoch
            what = f"training, cut at step {progress.step_in_epoch} of {self.steps_per_epoch} " if cut else "training"
            self.writer.log(self._line(progress, what, progress.epoch_sums, self._epoch_mark))

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """Pass on ``batches``, and add up the time spent waiting for them."""
        starting = self.awaits_first_step
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            ended = time.perf_counter()
            self._data_seconds += ended - began
            if batch is None:
                return
            if starting:  # speeds do not count the start of the workers
                mark = self._epoch_mark._replace(seconds=ended, data_seconds=self._data_seconds)
                self._epoch_mark = self._window_mark = mark
                starting = False
            yield batch

    def window(self, progress: Progress, bar: tqdm | None) -> None:
        """Write points and a log line for the steps since the last points.

        There is no line if the epoch's line follows at once, or without a ``bar``, whose text is renewed as well.
        """
        report = self.kind.from_sums(progress.window_sums)
        last = StepRecord.of(progress.last_step)
        speed, wait = self._pace(self._window_mark, progress, time.perf_counter())
        points = {
            "Loss/Training": report.loss,
            **{f"Loss/Training_{name}": loss for name, loss in progress.named_losses(progress.window_sums).items()},
            **self._training_points(report),
            "Optim/lr": last.lr,
            "Optim/Gradient_Norm": last.gradient_norm,
        }
        if not math.isnan(speed):  # otherwise other processes did all of these steps, or all but this one's first
            points |= {"Speed/images_per_second": speed, "Speed/data_wait_percent": wait}
        points |= {f"Optim/lr_group_{name}": last.lr * scale for name, scale in self.lr_scales.items()}
        if self.scaled:
            points |= {"AMP/scale": last.loss_scale, "AMP/skipped_steps": progress.skipped_steps}
        if progress.partly_skipped_steps:
            points["AMP/partly_skipped_steps"] = progress.partly_skipped_steps
        self.writer.scalars(points, progress.step)
        if last.gradient_norm == 0:
            self.writer.log(
                f"warning: the gradient is all zero at step {last.step}, loss scale {last.loss_scale:g}: nothing is "
                "learned; if it underflows, raise --init-scale (scripts/amp_audit.py tells)"
            )
        if bar is not None:
            text = report.text(self.with_top5, self.mixes(last.epoch - 1))
            bar.set_postfix_str(f"{text}  lr {last.lr:.4g}{_skipped(progress)}", refresh=False)
            if progress.step_in_epoch < self.steps_per_epoch:
                where = f"step {progress.step_in_epoch}/{self.steps_per_epoch} "
                line = self._line(progress, where, progress.window_sums, self._window_mark)
                self.writer.log(line, to_console=bar.disable)
        self._window_mark = Mark(time.perf_counter(), progress.step, progress.samples_seen, self._data_seconds)
        progress.window_sums = list(NOTHING)

    def _line(self, progress: Progress, what: str, sums: list[float], mark: Mark) -> str:
        """A log line about the steps since ``mark``, which have these ``sums``."""
        last = StepRecord.of(progress.last_step)
        text = self.kind.from_sums(sums).text(self.with_top5, self.mixes(last.epoch - 1))
        losses = "".join(f"  {name} {loss:.4f}" for name, loss in progress.named_losses(sums).items())
        now = time.perf_counter()
        speed, wait = self._pace(mark, progress, now)
        pace = "" if math.isnan(speed) else f"  {speed:,.0f} images/s  data wait {wait:.0f} %"
        return (
            f"epoch {last.epoch}/{self.epochs}  {what} {text}{losses}  lr {last.lr:.4g}  "
            f"gradient {last.gradient_norm:.3g}{_skipped(progress)}{pace}{self._time_left(progress, now)}"
        )

    def row(self, progress: Progress, result: AnyReport | None, raw: AnyReport | None) -> dict[str, float]:
        """A finished epoch's row of metrics.csv, with all figures of its validation, if it had one.

        An epoch that was counted before and is validated only now has a row already; this one completes it and holds no
        training figures. ``raw``: the result of the raw weights if ``result`` is that of their average. The epoch's
        sums must still be in ``progress``. The speed is that of this process's steps; NaN if it did none. Raises
        ``RuntimeError`` if a user's loop validates before it has trained.
        """
        if self._trained is None:  # by ``end_training``
            raise RuntimeError(
                "validation: its row belongs to an epoch, and train(epoch) was not called yet; call it first, or "
                "validation(epoch, report=False), which returns the figures and writes nothing"
            )
        self._validated = result is not None
        trained = progress.step_in_epoch > 0
        speed, _ = self._pace(self._epoch_mark, progress, self._trained)
        last = StepRecord.of(progress.last_step)
        seconds = self.epoch_seconds() - self._seconds_told
        facts = {
            "epoch": last.epoch,
            "step": progress.step,
            "lr": last.lr,
            "max_val_batches": self.max_val_batches if result else None,
            "images_per_second": round(speed, 1) if trained else None,
            "seconds": round(seconds, 3),
            "skipped_steps": progress.skipped_steps,
            "partly_skipped_steps": progress.partly_skipped_steps,
            "unreadable_images": progress.replaced_images if self.skips_bad_images else None,
        }
        self._seconds_told += seconds
        training = self.kind.from_sums(progress.epoch_sums) if trained else None
        return row_of(facts, training, result, raw, progress.named_losses(progress.epoch_sums))

    def epoch(self, row: dict[str, float], result: AnyReport | None, raw: AnyReport | None, best: bool) -> None:
        """Write points and log line of an epoch from its ``row`` and results. ``best``: True if it is the best so far.

        The line also shows ``raw``, unless that is ``result`` itself, as it is before an average has begun.
        """
        if result is None:
            self.writer.log(f"epoch {row['epoch']}/{self.epochs}  not validated  epoch {row['seconds']:.1f} s")
            return
        points = {tag: value for tag, value in points_of(row).items() if self.with_top5 or "Top5" not in tag}
        self.writer.scalars(points, int(row["step"]))
        # the figures that decide on best.pt and on early stopping, unless the line shows them anyway
        deciding = "".join(f"  {name.removeprefix(PREFIX)} {row.get(name, math.nan):.4f}" for name in self.deciding)
        what = "epoch" if "train_loss" in row else "took"  # the late validation of an epoch, alone
        raw_text = f"  (raw weights {raw.text(self.with_top5)})" if raw is not None and raw is not result else ""
        self.writer.log(
            f"epoch {row['epoch']}/{self.epochs}  validation{self.cut} {result.text(self.with_top5)}{raw_text}"
            f"{deciding}  {what} {row['seconds']:.1f} s{'  best so far' if best else ''}"
        )
        if not math.isfinite(result.loss):
            self.writer.log(
                f"warning: the validation loss{self.cut} is {result.loss}: the network's outputs are not finite any "
                "more; resume from an earlier checkpoint with --resume-override and a lower --lr, or see "
                "scripts/amp_audit.py"
            )
        elif row["epoch"] in self.doubted:
            for doubt in doubts([row], self.dataname):
                self.writer.log(f"warning: {doubt}")

    def best(self, progress: Progress) -> None:
        """Write points of the best whole epoch so far, which compare runs in the HPARAMS table."""
        if progress.best_epoch:
            figures = {self.kind.HEADLINE: progress.best_headline, self.best_metric.name: progress.best_value}
            points = {_best_tag(name): value for name, value in figures.items() if value is not None}
            self.writer.scalars(points, progress.step)

    def lr_drop(self, args: Settings, before: float, now: float) -> None:
        """Log that --lr-policy plateau has lowered the learning rate, unless another limit holds it where it was."""
        if now < before:
            rule = without_improvement(args.run, args.optimisation.lr_patience)
            self.writer.log(f"Learning rate {now:.4g} instead of {before:.4g} from here on, {rule}")

    def charts(self) -> dict[str, dict[str, Any]]:
        """Charts that show training and validation together, by category and title."""
        names = ("Loss", "Top1", "Top5") if self.with_top5 else ("Loss", "Top1")
        names = ("Loss", "Micro_F1") if self.multilabel else names
        return {
            "Training and validation": {name: ["Multiline", [f"{name}/(Training|Test|Test_raw)$"]] for name in names}
        }

    def _training_points(self, report: AnyReport) -> dict[str, float]:
        if isinstance(report, MultilabelReport):
            return {} if math.isnan(report.micro_f1) else {"Micro_F1/Training": report.micro_f1}
        return {"Top1/Training": report.top1, **({"Top5/Training": report.top5} if self.with_top5 else {})}

    def _pace(self, mark: Mark, progress: Progress, now: float) -> tuple[float, float]:
        """Images per second and percentage of time spent waiting for data since ``mark``; NaN without a step."""
        mark = self._counted_from(mark, progress)
        if progress.step == mark.step:
            return math.nan, math.nan
        seconds = now - mark.seconds
        return (progress.samples_seen - mark.images) / seconds, 100 * (self._data_seconds - mark.data_seconds) / seconds

    def _counted_from(self, mark: Mark, progress: Progress) -> Mark:
        """``mark``, or the end of the process's first step if that is later.

        The first step starts workers, chooses kernels and compiles, so a speed counts it only while there is no other
        step.
        """
        first = self._after_first_step
        if first is None or first.step <= mark.step or (first.step == progress.step and mark.step == 0):
            return mark
        return first

    def _time_left(self, progress: Progress, now: float) -> str:
        """Text on the time left of the epoch's training and of the run, at the average speed of this epoch's steps.

        For each epoch left, the run's time includes that of validation and checkpoints after the latest epoch which,
        like it, was validated, or was not; nothing before there was such an epoch.
        """
        mark = self._counted_from(self._epoch_mark, progress)
        done = progress.step - mark.step
        if not done:
            return ""
        in_epoch: float = self.steps_per_epoch - progress.step_in_epoch
        planned = in_epoch + (self.epochs - progress.epoch - 1) * self.steps_per_epoch
        in_run = min(planned, self.max_steps - progress.step)
        in_epoch = min(in_epoch, in_run)
        seconds = (now - mark.seconds) / done
        last = progress.epoch + 1 + math.ceil((in_run - in_epoch) / self.steps_per_epoch)
        validations = 1 + (last - 1) // self.val_every_epochs - progress.epoch // self.val_every_epochs
        others = last - progress.epoch - validations
        after = validations * self._after_seconds[True] + others * self._after_seconds[False]
        whole = tqdm.format_interval(round(in_run * seconds + after))
        epoch = f"{tqdm.format_interval(round(in_epoch * seconds))} of the epoch, " if 0 < in_epoch < in_run else ""
        return f"  left {epoch}{whole} of the run"


def _skipped(progress: Progress) -> str:
    skipped = f"  skipped {progress.skipped_steps}" if progress.skipped_steps else ""
    return skipped + (f"  partly skipped {progress.partly_skipped_steps}" if progress.partly_skipped_steps else "")


def _best_tag(metric: str) -> str:
    return f"Best/{metric.capitalize()}"


def _spread(values: Mapping[str, float], most: int) -> dict[str, float]:
    """At most ``most`` of the items, evenly spread, the first and the last among them."""
    items = list(values.items())
    return dict(items[n] for n in evenly_spaced(len(items), most))
