"""The components of a run: built, described for plan and log, and checked for what is doubtful."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from models.build import unknown_arch
from models.prepare import (
    Prepared,
    known_preprocessing,
    oversized_layer,
    prepare_network,
    prepare_to_evaluate,
    read_weights,
    start_from_images,
)
from models.training_loss import build_loss
from utils.checkpoint.checkpoint import Checkpointer
from utils.checkpoint.override import refuse_other_head
from utils.config import plugins
from utils.config.settings import Settings, UserError
from utils.data import first_look
from utils.data.data_set import Data
from utils.data.loaders import TrainLoader, ValidationLoader, loaders
from utils.data.splits import prepare
from utils.loop.effects import facts_of, without_effect
from utils.loop.hooks import Hooks
from utils.loop.stop_signals import StopSignals
from utils.optim import clipping, criterion, ema, lr_policy, optimizers
from utils.optim.build import build_optimizer_parts
from utils.optim.distillation import Distillation
from utils.optim.freezing import frozen_at_random
from utils.precision import amp
from utils.precision.choice import with_chosen_amp
from utils.record.epoch_scalars import ONE, SEVERAL, strange_metrics, taken_metrics
from utils.record.provenance import machine
from utils.record.summary import checkpoint_description
from utils.record.tracking import missing_packages
from utils.run import Run
from utils.runtime.compiled import KeptCompilation
from utils.runtime.console import log
from utils.runtime.distributed import Distributed
from utils.runtime.garbage import garbage_collection
from utils.runtime.process import trains_by_itself
from utils.train_validation import Extras, TraVal


class Components(NamedTuple):
    """The parts of a training run; an evaluation lacks those that only training needs."""

    data: Data
    train_loader: TrainLoader | None
    validation_loader: ValidationLoader
    loader_choice: str
    network: Prepared
    criterion: torch.nn.Module
    scaler: torch.amp.GradScaler
    optimizers: optimizers.Optimizers = ()
    ema: ema.WeightAverage | None = None
    lr_policy: lr_policy.LRPolicy | None = None

    @property
    def model(self) -> torch.nn.Module:
        return self.network.model

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole training epoch."""
        assert self.train_loader is not None
        return self.train_loader.steps_per_epoch

    def describe(self, run: Run) -> dict[str, str]:
        """Rows of a run's plan, as each part describes itself."""
        args = run.args
        distributed = run.distributed
        rows = self.data.describe(args.data, self.validation_loader.num_images)
        if self.train_loader is None:
            rows["Batch"] = f"{args.data.val_batch_size or args.data.batch_size} a process"
        else:
            rows |= self.train_loader.describe(args, self.data)
        rows |= {"Loader": self.loader_choice, **self.network.describe(args.model)}
        rows |= distributed.describe(self.model, None if self.train_loader is None else args.exchange)
        if self.lr_policy is not None:  # of a training
            settings = args.optimisation
            rows["Loss"] = criterion.describe(args.loss, settings.grad_penalty)
            if isinstance(self.criterion, Distillation):
                rows["Teacher"] = str(self.criterion)
            rows["Optimizer"] = optimizers.describe(settings, self.optimizers)
            rows["Clipping"] = clipping.describe(settings)
            rows["Learning rate"] = lr_policy.describe(self.lr_policy, args.data.global_batch_size)
            average = ema.describe(args.average, settings.epochs, settings.optimizer, self.model)
            rows |= {"Weight average": average, **run.describe()}
        rows |= plugins.describe()
        rows["Precision"] = amp.describe(args.precision, distributed.device)
        return rows

    def warn_of_doubts(self, run: Run) -> None:
        """Warn of doubtful data, a doubtful network and settings without effect. Call it on one process."""
        data = self.data
        point = run.resume_point
        begins = point is None and self.train_loader is not None
        lines: list[str | None] = [data.seen, *data.warnings, *first_look.doubts(data, run.args, begins)]
        if self.train_loader is not None:
            lines += [trains_by_itself(), point.changed_files(data.fingerprint) if point is not None else None]
        if begins:
            own = run.args.model
            lines += [oversized_layer(own.arch, self.model, data.image_size), frozen_at_random(own)]
        if self.optimizers:
            lines.append(optimizers.left_out(run.args.optimisation, self.model, self.optimizers))
        facts = facts_of(run.args, self, run.distributed, continues=run.folder_to_resume is not None)
        for line in filter(None, (*lines, *without_effect(run.args, facts))):
            run.warn(line)


# ------------------------------------------------------------------------------------------------- build


def built(run: Run) -> Components:
    """Build the components of a training or an evaluation, and warn of what is doubtful about them."""
    garbage_collection.freeze_imports()
    components = build_to_evaluate(run) if run.args.run.evaluate else build(run)
    garbage_collection.freeze_imports()
    run.distributed.run_on_rank0(lambda: components.warn_of_doubts(run), long_work="Looking at the data")
    return components


def build(run: Run) -> Components:
    """Build the components of a training run. Mistakes in them show here, before anything is created.

    The settings of ``run`` become final once data and network are built.
    """
    args = run.args
    distributed = run.distributed
    point = run.resume_point
    _begin(args, distributed, evaluate=False)
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Reading the data"):
        weights = read_weights(args.model) if point is None else None
        known = known_preprocessing(args, point, weights)
        data = run.images.to_train_on(args.data, point, weights).shown_to(known, args.data)
        if point is not None and args.run.resume_override:
            refuse_other_head(point, data.classes, data.multilabel)
        elif point is not None:
            point.refuse_other_data(
                data.classes, data.fingerprint, data.seen, data.changed_since, multilabel=data.multilabel
            )
        args = args.of_several_labels() if data.multilabel else args
        labels = SEVERAL if data.multilabel else ONE
        if mistakes := [*taken_metrics(labels), *strange_metrics(args.run, labels)]:
            raise UserError(*mistakes)
    data.refuse_differences(distributed)
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Reading the images"):
        distributed.seed(args.run.seed)
        network = prepare_network(args, data, distributed.device, point, weights)
        begins = point is None and weights is None and not args.run.dry_run
        del weights  # a checkpoint holds several times as much as the network
        train_loader, validation_loader, loader_choice = loaders(
            data, args, distributed, channels_last=network.channels_last, progress=run.progress_log
        )
        assert train_loader is not None
        if begins:
            start_from_images(network.model, train_loader)
    # Apart from the reading: a process that has failed there would not take part in choosing and spreading.
    args = run.settle(with_chosen_amp(args, network.model, data.image_shape, distributed).with_absolute_paths())
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Preparing the training"):
        parts = build_optimizer_parts(args, network.model, network.freezing, distributed)
        return Components(
            data,
            train_loader,
            validation_loader,
            loader_choice,
            network,
            lr_policy=lr_policy.LRPolicy(args.optimisation, train_loader.steps_per_epoch, args.average),
            criterion=build_loss(args, data, distributed.device, point, run.warn),
            **parts._asdict(),
        )


def build_to_evaluate(run: Run) -> Components:
    """Build the components of a validation."""
    args = run.args
    distributed = run.distributed
    point = run.resume_point
    _begin(args, distributed, evaluate=True)
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Reading the data"):
        weights = None if point is None else dataclasses.replace(point, state=point.read())
        known = known_preprocessing(args, point, weights, evaluates=True)
        data = run.images.to_evaluate(args, point).shown_to(known, args.data)
        if point is not None:
            point.refuse_other_data(data.classes, None, data.seen, multilabel=data.multilabel)
        if data.multilabel:
            args.refuse_for_several_labels("tta")
    data.refuse_differences(distributed)
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Reading the images"):
        distributed.seed(args.run.seed)
        network = prepare_to_evaluate(args, data, distributed.device, weights)
        scaler = amp.build_scaler(args.precision, distributed.device)
        both = loaders(data, args, distributed, channels_last=network.channels_last, progress=run.progress_log)
        return Components(data, *both, network, criterion.build_criterion(args.loss), scaler)


def unknown_names(args: Settings) -> list[str]:
    """Messages about a network, an optimizer and metrics that do not exist, which settings alone do not know."""
    mistakes = [unknown_arch(args.model.arch), optimizers.unknown_optimizer(args.optimisation.optimizer)]
    return [*filter(None, mistakes), *strange_metrics(args.run)]


def _begin(args: Settings, distributed: Distributed, evaluate: bool) -> None:
    """Refuse names that do not exist, and bring the data set's files into place."""
    with distributed.raise_on_all_ranks():
        mistakes = unknown_names(args)
        mistakes += [] if evaluate else missing_packages(args.logging.track)
        if mistakes:
            raise UserError(*mistakes)
        Hooks().and_of_plugins()  # raises for a point that does not exist
    # Rank 0 first, for a folder that all machines share; then the other machines, which may have their own copies.
    for turn in (distributed.is_main, distributed.local_rank == 0 and not distributed.is_main):
        with distributed.raise_on_all_ranks(), distributed.without_timeout("Preparing the data"):
            if turn and not args.run.dry_run:
                prepare(args.data, log, evaluate)


def extras_of(
    run: Run,
    components: Components,
    checkpointer: Checkpointer | None = None,
    stop_signals: StopSignals | None = None,
    hooks: Hooks | None = None,
) -> Extras:
    """What the loop of the run uses besides its components. If no folder is open, it has no checkpoints to describe."""
    args = run.args
    folder = run.folder
    classes = {"classes": [*components.data.classes]}  # which hooks may ask for
    hooks = (hooks or Hooks()).and_of_plugins()
    if folder and (args.model.compile or args.model.compile_augment):
        data = args.data
        recipe = (args.model, args.precision.amp, data.batch_size, data.val_batch_size, data.image_size)
        kept = KeptCompilation(Path(args.run.output), repr(recipe), machine(run.distributed), run.warn)
        if run.is_main:
            hooks.after_validation.append(lambda *_: kept.write_list())
    return Extras(
        distributed=run.distributed,
        lr_policy=components.lr_policy,
        ema=components.ema,
        freezing=components.network.freezing,
        checkpointer=checkpointer,
        description=checkpoint_description(args, components.data, components.criterion) if folder else classes,
        stop_signals=stop_signals,
        hooks=hooks,
        multilabel=components.data.multilabel,
    )


def build_traval(run: Run, components: Components, extras: Extras | None = None) -> TraVal:
    """The loop around the components, with the run's extras."""
    return TraVal(
        components.model,
        components.train_loader,
        components.optimizers,
        components.criterion,
        components.scaler,
        run.args,
        components.validation_loader,
        writer=run.writer,
        curr_scen_name=run.folder.name if run.folder else "",
        extras=extras or extras_of(run, components),
    )
