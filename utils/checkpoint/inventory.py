"""The parts of a checkpoint: a list of them, and checks that they are complete and of the right kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CONTENTS = "contents"
MOST_PARTS, DEEPEST = 1_000_000, 20  # far beyond any network's; lists that contain each other would never end
LARGEST = 10  # times the file's size: tensors may share or repeat numbers


def parts(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of nested dicts, lists and tuples, each after its path, such as ``progress/step``.

    Raises ``ValueError`` if ``state`` is nested too deeply, has too many parts, or keys other than text and numbers.
    """
    waiting: list[tuple[str, Any, int]] = [("", state, 0)]
    count = 0
    while waiting:
        path, value, depth = waiting.pop()
        count += 1
        if count > MOST_PARTS or depth > DEEPEST:
            raise ValueError("it is nested without end")
        if path:
            yield path, value
        if isinstance(value, dict):
            if not all(isinstance(key, str | int) for key in value):
                raise ValueError(f"{path or 'it'} has keys that are not names")
            items = list(value.items())
        elif isinstance(value, list | tuple):
            items = list(enumerate(value))
        else:
            continue
        waiting += [(f"{path}/{key}" if path else f"{key}", item, depth + 1) for key, item in items]


def inventory(state: dict[str, Any]) -> list[str]:
    """A line for each part of ``state`` except the inventory itself: its path and its kind, sorted.

    ``progress/step: int``, ``model/fc.weight: float32 10x64``, ``classes: list of 10``. An item of a list has a line
    only if it is a tensor or has parts itself.
    """
    listed = []
    within = {key: value for key, value in state.items() if key != CONTENTS}
    plain: set[str] = set()  # paths of lists, of whose plain items only the number is listed
    for path, value in parts(within):
        if isinstance(value, list | tuple):
            plain.add(path)
        nested = isinstance(value, dict | list | tuple | torch.Tensor)
        if nested or path.rpartition("/")[0] not in plain:
            listed.append(f"{path}: {_kind(value)}")
    return sorted(listed)


def missing(state: dict[str, Any]) -> list[str]:
    """Parts that ``state``'s own inventory lists, but ``state`` lacks or has as another kind; one phrase each."""
    listed = state.get(CONTENTS)
    if not isinstance(listed, list) or not all(isinstance(line, str) for line in listed):
        return [f"its list of {CONTENTS}"]
    held = inventory(state)
    kinds = dict(line.rpartition(": ")[::2] for line in held)
    phrases = []
    for line in sorted(set(listed) - set(held)):
        path, _, kind = line.rpartition(": ")
        phrases.append(f"{path} ({kind}; it is {kinds[path]})" if path in kinds else path)
    return phrases


def refuse_swollen(state: Any, size: int) -> None:
    """Raise ``ValueError`` if tensors claim far more numbers than a file of ``size`` bytes can hold."""
    total = 0
    for path, value in parts(state):
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                raise ValueError(f"{path} is not a plain tensor")
            total += value.numel() * value.element_size()
            if total > LARGEST * size:
                raise ValueError(f"{path} claims more than the file can hold")


def wrong_kinds(state: dict[str, Any]) -> list[str]:
    """The parts that a run needs to continue, but that are of the wrong kind; one phrase each."""
    ema = state["ema"]
    optimizers = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]
    right = {
        "model": _is_weights(state["model"]),
        "ema": ema is None or (_is_dict(ema) and _is_weights(ema.get("model"))),
        "optimizer": bool(optimizers) and all(map(_is_optimizer, optimizers)),
        "scaler": _is_dict(state["scaler"]) and all(_is_number(value) for value in state["scaler"].values()),
        "progress": _is_dict(state["progress"]),
        "classes": isinstance(state["classes"], list) and all(isinstance(name, str) for name in state["classes"]),
        "settings": _is_dict(state["settings"]),
        "fingerprint": isinstance(state["fingerprint"], str),
    }
    return [f"{name} is {_kind(state[name])}, not what a run saves there" for name, good in right.items() if not good]


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_weights(value: Any) -> bool:
    return _is_dict(value) and bool(value) and all(torch.is_tensor(item) for item in value.values())


def _is_optimizer(value: Any) -> bool:
    if not (_is_dict(value) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)):
        return False
    states = value["state"].values()
    groups = value["param_groups"]
    return all(_is_dict(item) for item in states) and all(
        _is_dict(group) and isinstance(group.get("params"), list) for group in groups
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 2**200  # nor NaN or infinite


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'scalar'}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
