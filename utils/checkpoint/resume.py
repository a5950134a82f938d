"""The checkpoint to continue from: found, compared with the settings, and made the last one of its run."""

from __future__ import annotations

import functools
import itertools
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from utils.checkpoint import checkpoint
from utils.checkpoint.fingerprint import changed_files, listing_of, same_images, short
from utils.checkpoint.progress import Progress
from utils.checkpoint.sharded import Places
from utils.config import hub_networks, plugins
from utils.config.arguments import load_yaml
from utils.config.datasets import SPECS
from utils.config.field import DEFAULT, FLAG, RECIPE
from utils.config.groups.data import DataSettings
from utils.config.rules import INHERITED, OPTIONS, Given, absolute_paths, derive, of_policy
from utils.config.settings import GONE, IS_GONE, Settings, UserError, as_flag, as_text, as_user_error, unused
from utils.config.spelling import some
from utils.runtime.files import sha256

SHOWN_CLASSES = SHOWN_SETTINGS = 5  # in a message
SET_ASIDE = ("best", "previous", "final")  # when a run goes back behind them
WHY_FIXED = {  # by what a setting shapes that --resume-override cannot change either
    "state": "its state fits no other, not even with --resume-override",
    "first weights": "the run has begun, and goes on with its own weights; remove the flag",
    "state at all": "only its number can change there",
}
# Values of settings that a run's checkpoint or config.yaml does not hold: the run may be older than the setting.
DEFAULTS = {name: option.metadata["earlier"] for name, option in OPTIONS.items()}
OF_OLDER_RUNS = {name: value for name, value in DEFAULTS.items() if value != OPTIONS[name].default}
BEGINS_ANEW = "--resume auto: begins a new run"
Warn = Callable[[str], None]


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to continue from; ``folder``: its run's folder, None if the file lies outside one.

    ``state``: everything, with None for the tensors, which stay in the file until ``read``, because ``state`` lives as
    long as the run and goes to all processes. ``digest``: the file's SHA-256.
    """

    path: Path
    state: dict[str, Any]
    digest: str
    folder: Path | None = None

    @classmethod
    def of(cls, path: Path, state: dict[str, Any], folder: Path | None = None) -> ResumePoint:
        """The resume point of the checkpoint ``state``, which was read from ``path``."""
        try:
            digest = sha256(path)
        except FileNotFoundError:  # another process replaces it at this moment
            digest = "no file"  # which ``read`` will refuse
        hub_networks.remember(state.get(hub_networks.KEY))
        return cls(path, tree_map_only(torch.Tensor, lambda tensor: None, state), digest, folder)

    def read(self, places: Places | None = None) -> dict[str, Any]:
        """Read the whole state, on the CPU: tensors from the file, all else as in ``state``. Each process calls this.

        ``places``: read only this process's part of each tensor, onto its device. Raises ``UserError`` if the file is
        no longer the one that was found.
        """
        try:
            return _completed(self.state, checkpoint.load(self.path, self.digest, places))
        except UserError as error:
            advice = "no other process may write the run, and each machine must see its folder"
            raise UserError(*(f"{line}; {advice}" for line in error.mistakes)) from error

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that replace the defaults; empty for weights of another program.

        Leaves out values that equal what the run's schedule chose for its number of epochs, because a checkpoint cannot
        tell them from the user's: they follow --epochs. Raises ``UserError`` for parts from a plugin not loaded.
        """
        stored = checkpoint.dict_in(self.state, "settings")
        plugins.refuse_missing(stored, self.path)
        left = _left_to_the_schedule(stored)
        if stored:
            stored = OF_OLDER_RUNS | stored
        return {name: stored[name] for name in stored if name in INHERITED and name not in left}

    @property
    def classes(self) -> tuple[str, ...] | None:
        return checkpoint.class_names(self.state)

    @property
    def fingerprint(self) -> str | None:
        """The data set's fingerprint; None if the checkpoint has none."""
        stored = self.state.get("fingerprint")
        return stored if isinstance(stored, str) else None

    @property
    def seen(self) -> str:
        """A line about validation images that the weights from before the run were trained on; '' if there are none."""
        stored = self.state.get("seen")
        return stored if isinstance(stored, str) else ""

    @property
    def validated_images(self) -> int | None:
        """How many images the run validated on; None if it did not, or left some out."""
        numbers = self.state.get("progress", {}).get("last_validation")
        is_cut = self.settings.get("max_val_batches") is not None or self.settings.get("skip_bad_images")
        return None if is_cut or not numbers or not numbers[-1] else round(numbers[-1])

    @property
    def _override(self) -> str:
        """The flags that continue this run despite differences."""
        return f"--resume {shlex.quote(str(self.folder or self.path))} --resume-override"

    def differences(self, args: Settings) -> dict[str, str]:
        """Settings that affect the result and differ from those in ``args``: by name, a line with both values."""
        begun = DEFAULTS | self.state["settings"]
        begun |= absolute_paths(begun) | unused(begun) | unused(args.values())
        return {
            name: f"{as_flag(name, value)}: {self.path} was made with {as_flag(name, begun[name])}"
            for name, value in args.result_values().items()
            if value != begun[name] and name not in args.unmeasured()  # which was measured then
        }

    @property
    def gone(self) -> list[str]:
        """A line for each setting that the run was made with and that no longer exists."""
        begun = GONE | self.state["settings"]
        return [
            f"{as_flag(name, begun[name])}: {self.path} was made with it, and it {IS_GONE}"
            for name, idle in GONE.items()
            if begun[name] != idle
        ]

    def is_recorded(self, args: Settings) -> bool:
        """True if config.yaml in the run's folder has the settings of ``args``; it may have those of other steps."""
        wanted = _compared(args)
        return self.folder is not None and _settings_of(self.folder, wanted) == wanted

    def refuse_differences(self, args: Settings) -> None:
        """Raise ``UserError`` with a line for each setting that differs or is ``gone``."""
        differences = self.differences(args)
        chosen = {name: line for name, line in differences.items() if not self._follows(name, args)}
        mistakes = [f"{line}; to go on without it, {self._override}" for line in self.gone]
        for name, difference in (chosen or differences).items():
            origin = args.origins[name]
            remove = {RECIPE: "remove --config", FLAG: "remove the flag"}.get(
                origin, f"change what it follows from ({origin})"
            )
            if self.can_never_change(name, args):
                ways = f"{remove} or start anew without --resume"
            else:
                ways = f"{remove}, start anew without --resume, or go on like this with {self._override}"
            mistakes.append(f"{difference}; {ways}")
        if mistakes:
            raise UserError(*mistakes, on_all_ranks=True)

    def can_never_change(self, name: str, args: Settings) -> bool:
        """True if --resume-override cannot change setting ``name`` to that of ``args`` either."""
        shaped = OPTIONS[name].metadata["shapes"]
        if shaped == "state at all":
            return (self.state["settings"].get(name) is None) != (args.values()[name] is None)
        return shaped in WHY_FIXED

    def _follows(self, name: str, args: Settings) -> bool:
        """True if setting ``name`` was and is left to the schedule, and so differs only as schedule or epochs do."""
        now = of_policy(args.optimisation.lr_policy, args.optimisation.epochs)
        left = (*now, *_left_to_the_schedule(self.state["settings"]))
        return name in left and args.origins[name] == DEFAULT and self.settings.get(name) is None

    @property
    def multilabel(self) -> bool:
        """True if the images of the training run had several labels."""
        return self.state.get("multilabel") is True

    def data_differences(
        self, classes: tuple[str, ...], fingerprint: str | None, multilabel: bool = False
    ) -> list[str]:
        """Differences from the checkpoint's data set: a line each for the classes, labels per image, and the images.

        Without ``fingerprint`` (evaluation) only the classes must agree.
        """
        differences = []
        begun = self.state.get("classes", classes)
        if list(classes) != (list(begun) if isinstance(begun, list | tuple) else begun):
            differences.append(f"--datapath: {_class_difference(classes, begun)} in {self.path}")
        if multilabel != self.multilabel:
            counts = ("one label", "several labels")
            differences.append(
                f"--datapath: images have {counts[multilabel]} each where {self.path} was trained with "
                f"{counts[self.multilabel]}"
            )
        if fingerprint is not None and not same_images(fingerprint, begun := self.state["fingerprint"]):
            alike = listing_of(fingerprint) == listing_of(begun)
            what = "other content in files of the same names" if alike else "other images or labels"
            differences.append(
                f"--datapath: holds {what} ({short(fingerprint)}) than {self.path} was trained on ({short(begun)})"
            )
        return differences

    def changed_files(self, fingerprint: str) -> str:
        """A line if individual files of the same data set have changed, and the run goes on with them; otherwise ''."""
        begun = self.state["fingerprint"]
        changed, compared = changed_files(fingerprint, begun)
        if not changed or not same_images(fingerprint, begun):
            return ""
        return (
            f"--datapath: {changed} of the {compared} files that were compared have other content than when "
            f"{self.path} was saved; training goes on with it"
        )

    def refuse_other_data(
        self,
        classes: tuple[str, ...],
        fingerprint: str | None,
        seen: str = "",
        named: Callable[[ResumePoint], str] = lambda point: "",
        *,
        multilabel: bool = False,
    ) -> None:
        """Raise ``UserError`` with a line for each of ``data_differences``.

        ``seen``: a line about validation images that the run was trained on, which no advice can undo. ``named``:
        returns as text what has changed in the data.
        """
        advice = "give the same data"
        if fingerprint is not None:
            fits = self.classes is not None and len(classes) == len(self.classes) and multilabel == self.multilabel
            advice += f", go on with this by {self._override}" * fits
            advice += f", begin a new run without --resume, or begin one with --weights {self.path}"
            advice += seen and f"; {seen}"
        differences = self.data_differences(classes, fingerprint, multilabel)
        if differences and (changed := named(self)):
            differences[-1] += f": {changed}"
        if mistakes := [f"{difference}; {advice}" for difference in differences]:
            raise UserError(*mistakes, on_all_ranks=True)

    @property
    def other_plugins(self) -> dict[str, str]:
        """A line for each --plugin file that is missing, new or changed, and how to have what the run had."""
        begun = self.state.get("plugins", {})
        now = plugins.digests()
        begun_with = f"{self.path} was trained with"
        missing = {f"--plugin: {begun_with} {name}": "add the flag, with its path" for name in begun if name not in now}
        changed = {
            f"--plugin {name}: has changed, {begun_with} {begun[name][:8]} and it is {now[name][:8]} now": "put it back"
            for name in begun
            if now.get(name, begun[name]) != begun[name]
        }
        new = {f"--plugin {name}: {begun_with}out it": "remove the flag" for name in now if name not in begun}
        return missing | changed | new

    def refuse_other_plugins(self, evaluate: bool = False) -> None:
        """Raise ``UserError`` with a line for each of ``other_plugins``; to ``evaluate``, nothing goes on."""
        if others := self.other_plugins:
            go_on = f"start anew without --resume, or go on like this with {self._override}"
            way_out = "or evaluate like this with scripts/evaluate.py" if evaluate else go_on
            lines = (f"{line}; {advice}, {way_out}" for line, advice in others.items())
            raise UserError(*lines, on_all_ranks=True)

    def refuse_strange_files(self) -> None:
        """Raise ``UserError`` for a link, pipe or device in the run's folder: writing there could go anywhere."""
        for folder in filter(None, (self.folder, self.folder and self.folder / "checkpoints")):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except FileNotFoundError:  # another process is writing this run, and its lock will say so
                    continue
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    kind = "a link" if stat.S_ISLNK(mode) else "a pipe or device"
                    raise UserError(f"{entry.path}: is {kind}, which a run never makes; remove it to continue the run")

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Context of loading the state: errors from what does not fit the run become a ``UserError``."""
        try:
            yield
        except UserError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"{self.path}: does not fit this run ({reason})", on_all_ranks=True) from error


def find(args: Settings, parent: Path, warn: Warn, fingerprint: Callable[[], str] = lambda: "") -> ResumePoint | None:
    """Find the checkpoint that ``--resume``, or ``--weights`` with ``--evaluate``, means; None to start a new run.

    ``parent`` holds all runs of this data set and network. ``fingerprint`` computes the fingerprint of the data to
    train on; without it, a user's own images count as a run's only in the place where that run found them. Raises
    ``UserError``.
    """
    if args.run.resume == "auto":
        wanted = {"name": args.run.name, **_compared(args)}
        is_wanted = functools.partial(_of_these_images, args, functools.cache(fingerprint))
        place = (args.data.datapath or ".") if SPECS[args.data.dataname].is_told_by_place else None
        return newest_run(parent, wanted, warn, is_wanted, place)
    if args.run.resume:
        # To evaluate, the weights are enough; to continue, nothing may be missing.
        return from_path(Path(args.run.resume), warn, checkpoint.load if args.run.evaluate else checkpoint.load_run)
    if args.run.evaluate and args.model.weights:
        return ResumePoint.of(Path(args.model.weights), checkpoint.load(Path(args.model.weights)))
    return None


def take_as_last(point: ResumePoint, warn: Warn) -> None:
    """Make ``point`` its run's last checkpoint; set those of later steps aside, with a line about each.

    Otherwise a resume after a kill could continue from a state that the run has abandoned, and best.pt would be of an
    epoch that the run no longer has. Only for the process that holds the folder's lock. Raises ``UserError`` if another
    process has written the run since ``point`` was found.
    """
    step = point.state["progress"]["step"]
    # Another process may have replaced the file between the reading of its state and that of its digest.
    if not point.path.is_file() or sha256(point.path) != point.digest or checkpoint.step_of(point.path) != step:
        raise UserError(f"{point.path}: another process has continued the run; the same command goes on from there")
    assert point.folder is not None  # whose lock is held
    checkpoints = point.folder / "checkpoints"
    if point.path.absolute() != last_of(point.folder).absolute():
        checkpoint.Checkpointer(checkpoints).take_as_last(point.path)
    for name in SET_ASIDE:
        _set_aside(checkpoints / f"{name}.pt", step, warn)


def last_of(folder: Path) -> Path:
    """The path of the last checkpoint of the run in ``folder``."""
    return folder / "checkpoints" / "last.pt"


def _set_aside(path: Path, step: int, warn: Warn) -> None:
    """Rename the checkpoint ``path``, and say so, if its step is after ``step``."""
    its_step = checkpoint.step_of(path)
    if its_step is None or its_step <= step:
        return
    kept = path.with_name(f"{checkpoint.ABANDONED}{path.name}")
    numbers = itertools.count(2)
    while kept.exists():
        kept = path.with_name(f"{checkpoint.ABANDONED}{path.stem}.{next(numbers)}.pt")
    os.replace(path, kept)
    warn(f"{path} is of step {its_step}, from which the run goes back to step {step}; it is kept as {kept.name}")


def _compared(args: Settings) -> dict[str, Any]:
    """The settings that shape the result, except those for which any value will do."""
    left_open = args.left_open()
    return {name: value for name, value in args.result_values().items() if name not in left_open}


def from_path(path: Path, warn: Warn, read: Callable[[Path], dict[str, Any]] = checkpoint.load_run) -> ResumePoint:
    """The checkpoint in file ``path`` or, if ``path`` is a run's folder or checkpoints folder, the newest one in it.

    A checkpoint that its run has set aside belongs to no run any more. Raises ``UserError``.
    """
    if os.path.isdir(path):
        folder = _run_of(path)
        newest = checkpoint.newest(folder / "checkpoints", warn, read)
        if newest is None:
            raise UserError(f"--resume {path}: {_why_nothing(folder)}")
        return ResumePoint.of(*newest, folder)
    state = read(path)
    folder = path.absolute().parent.parent
    of_run = (folder / "config.yaml").is_file() and not path.name.startswith(checkpoint.ABANDONED)
    return ResumePoint.of(path, state, folder if of_run else None)


def newest_run(
    parent: Path,
    wanted: dict[str, Any],
    warn: Warn,
    is_wanted: Callable[[dict[str, Any]], bool] = lambda state: True,
    place: str | None = None,
) -> ResumePoint | None:
    """The newest run below ``parent`` that has the settings ``wanted`` and a checkpoint that verifies.

    ``is_wanted`` judges a run by its checkpoint's state: a run that it refuses is passed over. Calls ``warn`` about
    newer runs that cannot be judged and, if no run is found, with the reason why a new one begins although there are
    others. ``place``: the --datapath of images that their place identifies; a run of another place is less near.
    """
    if not os.path.isdir(parent) or os.path.islink(parent) or os.path.islink(parent.parent):
        return None
    strange = []
    lost = []
    empty = []
    others = {}
    elsewhere = {}
    for folder in sorted(_run_folders(parent), reverse=True):
        settings = _settings_of(folder, [*wanted, "datapath"])
        if settings is None:
            if any((folder / "checkpoints").glob("*.pt")):
                lost.append(folder)
                warn(f"{folder}: passed over, as its config.yaml cannot be read; --resume {folder} continues it")
            continue
        its_place = settings.pop("datapath") or "."
        if settings != wanted:
            others[folder] = {name: value for name, value in settings.items() if value != wanted[name]}
            if place is not None and not _is_same_place(its_place, place):
                elsewhere[folder] = its_place
            continue
        newest = checkpoint.newest(folder / "checkpoints", warn)
        if newest and is_wanted(newest[1]):
            return ResumePoint.of(*newest, folder)
        if newest:
            was_in = newest[1]["settings"].get("datapath")
            where = f", those that were in {was_in}" if was_in is not None else ""
            strange.append(f"{folder} was trained on other images{where}")
        elif any((folder / "checkpoints").glob("*.pt")):
            lost.append(folder)
            warn(f"{folder}: none of its checkpoints can be loaded; it is left as it is")
        else:
            empty.append(folder)
    if lost:
        warn(f"{BEGINS_ANEW}; repair {lost[0]} or move it away to silence these lines")
    elif strange:
        warn(f"{BEGINS_ANEW}; {strange[0]}")
    elif empty:
        warn(f"{BEGINS_ANEW}; {empty[0]} {_WITHOUT_CHECKPOINT}")
    elif others:
        # of several the first, which is the newest
        nearest = min(others, key=lambda folder: len(others[folder]) + (folder in elsewhere))
        images = f"; its images were in {as_text(elsewhere[nearest])}" if nearest in elsewhere else ""
        other = [
            f"{as_flag(name, value)} where this has {as_text(wanted[name])}" for name, value in others[nearest].items()
        ]
        warn(f"{BEGINS_ANEW}; the nearest, {nearest}, has {some(other, SHOWN_SETTINGS)}{images}")
    return None


def _of_these_images(args: Settings, fingerprint: Callable[[], str], state: dict[str, Any]) -> bool:
    """True if the run with the checkpoint ``state`` was trained on the images that ``args`` name.

    A data set's name identifies its images, but only their place identifies a user's own. In another place, as after a
    move, they are the same if their ``fingerprint`` is. For a finished run the fingerprint must agree in any case: an
    unfinished run compares it when it goes on, but for a finished one nothing more would be read.
    """
    if not SPECS[args.data.dataname].is_told_by_place:
        return True
    goes_on = not Progress.from_state(state["progress"]).is_finished(args)
    return (is_at(state, args.data) and goes_on) or same_images(state["fingerprint"], fingerprint())


def is_at(state: dict[str, Any], data: DataSettings) -> bool:
    """True if the data of a checkpoint's ``state``, and their table of labels if any, lay where ``data`` says."""
    stored = checkpoint.dict_in(state, "settings")
    labels = stored.get("labels")
    if (labels is None) != (data.labels is None):
        return False
    places = (stored.get("datapath") or ".", labels), (data.datapath or ".", data.labels)
    return all(_is_same_place(place, own) for place, own in zip(*places, strict=True) if own is not None)


def _is_same_place(stored: Any, own: str) -> bool:
    """True if ``stored``, which a file says, is a path to the same place as the path ``own``."""
    return isinstance(stored, str) and "\0" not in stored and os.path.realpath(stored) == os.path.realpath(own)


_WITHOUT_CHECKPOINT = "is a run without a checkpoint: it ended before it saved its first"


def _why_nothing(folder: Path) -> str:
    """The reason why there is nothing to continue from in ``folder``, which the user named."""
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir() and not checkpoints.is_symlink() and not any(checkpoints.glob("*.pt")):
        return f"{_WITHOUT_CHECKPOINT}; begin it anew"
    return "holds no checkpoint that can be loaded; give a run folder or a .pt file"


def _run_of(folder: Path) -> Path:
    """The run's folder if ``folder`` is its checkpoints folder, otherwise ``folder``."""
    whole = folder.absolute()
    if whole.name != "checkpoints" or not (whole.parent / "config.yaml").is_file():
        return folder
    return folder.parent if folder.name else whole.parent  # '.' has no name


def _completed(plain: Any, whole: Any) -> Any:
    """Complete ``plain``, which has None for tensors and was perhaps changed since, by the tensors of ``whole``."""
    if isinstance(plain, dict) and isinstance(whole, dict):
        return plain | {key: _completed(plain.get(key, item), item) for key, item in whole.items()}
    if isinstance(plain, list | tuple) and isinstance(whole, type(plain)) and len(plain) == len(whole):
        return type(plain)(map(_completed, plain, whole))
    return whole if isinstance(whole, torch.Tensor) else plain


def _run_folders(parent: Path) -> list[Path]:
    """The folders in ``parent`` that may be runs: not links, with printable names."""
    with as_user_error(f"--output: {parent} cannot be read"):
        entries = [entry for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
    return [Path(entry) for entry in entries if entry.name.isprintable()]


def _settings_of(folder: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """The values of ``names`` in ``folder``'s config.yaml, or derived from it; None if the folder is not a run."""
    path = folder / "config.yaml"
    if not os.path.isfile(path):
        return None
    try:
        content, _ = load_yaml(path)
        given = {key.replace("-", "_"): value for key, value in content.items()}
        settings = DEFAULTS | {name: value for name, value in given.items() if name in DEFAULTS}
        values = [item for value in settings.values() for item in (value if isinstance(value, list) else [value])]
        if any(isinstance(item, dict | list) for item in values):
            return None
        derive(Given(settings, {name: RECIPE if name in given else DEFAULT for name in DEFAULTS}))
        settings |= unused(settings)
        return {name: list(value) if isinstance(value := settings[name], tuple) else value for name in names}
    except Exception:  # PyYAML and comparisons pass on whatever Python raises for a malformed value
        return None


def _left_to_the_schedule(settings: dict[str, Any]) -> list[str]:
    """The names of settings whose values equal what the schedule chooses by itself."""
    begun = DEFAULTS | settings
    try:
        by_itself = of_policy(begun["lr_policy"], begun["epochs"])
    except (TypeError, ArithmeticError):  # no settings of ours, which will be refused
        return []
    return [
        name for name, value in by_itself.items() if begun[name] == (list(value) if isinstance(value, tuple) else value)
    ]


def _class_difference(classes: tuple[str, ...], begun: Any) -> str:
    """Text on classes of the checkpoint that the data set lacks, and those that it adds."""
    begun = [str(name) for name in begun] if isinstance(begun, list | tuple) else []
    phrases = [f"has {len(classes)} classes"]
    for word, names in (("lacks", set(begun) - set(classes)), ("adds", set(classes) - set(begun))):
        if names:
            phrases.append(f"{word} {some(sorted(names), SHOWN_CLASSES)}")
    if len(phrases) == 1:
        phrases.append("in another order")
    return f"{', '.join(phrases)}, where there are {len(begun)}"
