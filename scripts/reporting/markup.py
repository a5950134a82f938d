"""HTML elements whose text is escaped: only what ``element`` and ``join`` have made is markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = ("img", "br")  # elements without an end


class Html(str):
    """Text that is markup already."""


def element(tag: str, *children: str | None, **attributes: object) -> Html:
    """``<tag attributes>children</tag>``. Text becomes text, whatever it holds; ``class_`` is ``class``.

    An attribute that is None or False is left out. In names, ``_`` stands for ``-``.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{tag}{given}>" if tag in VOID else f"<{tag}{given}>{join(children)}</{tag}>")


def join(parts: Iterable[str | None]) -> Html:
    """The parts one after the other; text among them is escaped, None is nothing."""
    return Html("".join(part if isinstance(part, Html) else escaped(part) for part in parts if part is not None))


def escaped(value: object) -> str:
    """Text for HTML; bytes of a path that are no text become replacement marks."""
    return escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)


def named(value: object, class_: str = "name") -> Html:
    """A name from outside, kept apart from its surroundings also where it is written from right to left."""
    return element("span", str(value), class_=class_)
