"""Finding the checkpoint to go on from, and refusing one that belongs to another experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.record import checkpoint
from utils.settings import Settings, UserError, all_settings, flag_of

# What a continued run takes from its own command line: this machine's affairs, not the experiment's.
NOT_INHERITED = ("batch_size", "name", "deterministic", "device", "download", "workers", "progress")
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from; ``folder`` is its run's, None when the file lies outside of one."""

    path: Path
    state: dict[str, Any]
    folder: Path | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that stand in for the defaults; empty for weights of another program."""
        known = {option.name for _, option in all_settings() if option.metadata["in_recipe"]}
        stored = self.state.get("settings")
        stored = stored if isinstance(stored, dict) else {}
        return {name: value for name, value in stored.items() if name in known and name not in NOT_INHERITED}

    def refuse_differences(self, args: Settings) -> None:
        """Raise ``UserError`` with a line for each setting that shapes the result and was another one."""
        begun = self.state["settings"]
        lines = [
            f"{flag_of(name)} {_shown(value)}: {self.path} was made with {_shown(begun.get(name))}; a run continues "
            "with its own settings: remove the flag, or start anew without --resume"
            for name, value in args.result_values().items()
            if value != begun.get(name)
        ]
        if lines:
            raise UserError(*lines, on_all_ranks=True)

    def refuse_other_data(self, classes: tuple[str, ...], fingerprint: str | None) -> None:
        """Raise ``UserError`` when the data set is not the one that the checkpoint was trained on.

        Without ``fingerprint`` (evaluation) only the classes must agree.
        """
        if list(classes) != list(self.state.get("classes", classes)):
            raise UserError(f"--datapath: has other classes than {self.path} was trained on; give that data set")
        if fingerprint is not None and fingerprint != self.state["fingerprint"]:
            raise UserError(
                f"--datapath: holds other images or labels than {self.path} was trained on; give the same data, "
                "or train on this with --weights"
            )


def find(args: Settings, parent: Path, warn: Warn) -> Found | None:
    """The checkpoint that ``--resume``, or ``--weights`` with ``--evaluate``, means; None to begin anew.

    ``parent`` holds all runs of this data set and network. Raises ``UserError``.
    """
    if args.run.resume == "auto":
        return newest_run(parent, {"name": args.run.name, **args.result_values()}, warn)
    if args.run.resume:
        return from_path(Path(args.run.resume), warn)
    if args.run.evaluate and args.model.weights:
        return Found(Path(args.model.weights), checkpoint.load(Path(args.model.weights)))
    return None


def from_path(path: Path, warn: Warn) -> Found:
    """The checkpoint file ``path``, or the newest one of the run folder ``path``. Raises ``UserError``."""
    if path.is_dir():
        found = checkpoint.newest(path / "checkpoints", warn)
        if found is None:
            raise UserError(f"--resume {path}: holds no checkpoint that can be loaded; give a run folder or a .pt file")
        return Found(*found, path)
    state = checkpoint.load_run(path)
    folder = path.absolute().parent.parent
    return Found(path, state, folder if (folder / "config.yaml").is_file() else None)


def newest_run(parent: Path, wanted: dict[str, Any], warn: Warn) -> Found | None:
    """The newest run below ``parent`` that has the settings ``wanted`` and a checkpoint that verifies."""
    if not parent.is_dir():
        return None
    for folder in sorted((folder for folder in parent.iterdir() if folder.is_dir()), reverse=True):
        if _settings_of(folder, wanted) == wanted:
            found = checkpoint.newest(folder / "checkpoints", warn)
            if found:
                return Found(*found, folder)
    return None


def _settings_of(folder: Path, names: dict[str, Any]) -> dict[str, Any] | None:
    import yaml

    try:
        content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return {name: content[name.replace("_", "-")] for name in names}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None  # not a run of ours, or of another version


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
