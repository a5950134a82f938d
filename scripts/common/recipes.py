"""Headers of the recipes under ``configs/``: source, command, expected and measured accuracy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from utils.config.arguments import CONFIGS

REFERENCE = "Literature:"
MEASURED = "Measured:"
NOT_MEASURED = "Not measured here"
UNKNOWN = "none known"
OWN_SPLIT = "a split of our own"  # its test images differ from the literature's
FIGURE = re.compile(r"\d[\d.]*(?: to \d[\d.]*)? %")


@dataclass(frozen=True)
class Recipe:
    """A recipe: ``name``, its path under ``configs/``, and the parts of its header, each as one line of text.

    ``source``: the first paragraph. ``reference`` and ``measured``: '' if the header lacks them. ``command``: the
    training command, with DATA for the folder of the images.
    """

    name: str
    source: str
    command: str
    reference: str
    measured: str

    @property
    def reference_figure(self) -> str:
        """Expected top-1 accuracy, such as '95.4 %'; 'none known' if there is none."""
        found = FIGURE.search(self.reference)
        return found[0] if found else UNKNOWN

    @property
    def measured_figure(self) -> str:
        """Top-1 accuracy measured with the command; 'not measured' if there is none."""
        found = FIGURE.search(self.measured)
        if not found:
            return "not measured"
        return f"{found[0]} (own split)" if self.on_own_split else found[0]

    @property
    def on_own_split(self) -> bool:
        """Whether the accuracy was measured on other test images than the literature's."""
        return OWN_SPLIT in self.measured


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    return sorted(map(read_recipe, CONFIGS.rglob("*.yaml")), key=lambda recipe: recipe.name)


def read_recipe(path: Path) -> Recipe:
    """Recipe read from the comments at the top of ``path``, a file below ``configs/``."""
    parts: dict[str, list[str]] = {}
    part = "source"
    for line in takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()):
        text = line[1:].strip()
        keyword = next((word for word in (REFERENCE, MEASURED, NOT_MEASURED) if text.startswith(word)), None)
        if not text:
            part = "more"
        elif re.match(r"python (\S+\.py .*)?main\.py ", text) and line.startswith("#   "):
            parts["command"] = [text]
        else:
            part = keyword or part
            parts.setdefault(part, []).append(text)
    said = {part: " ".join(texts) for part, texts in parts.items()}
    return Recipe(
        name=path.relative_to(CONFIGS).with_suffix("").as_posix(),
        source=said.get("source", ""),
        command=said.get("command", ""),
        reference=said.get(REFERENCE, "").removeprefix(REFERENCE).strip(),
        measured=said.get(MEASURED, "").removeprefix(MEASURED).strip(),
    )
