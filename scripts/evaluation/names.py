"""Names of classes, as a table or picture shows them."""

from utils.data.formats.class_folders import printable

LETTERS = 24


def short(name: str) -> str:
    """``name`` in printable characters; of a long one both ends, as long names often begin alike."""
    name = printable(name)
    if len(name) <= LETTERS:
        return name
    end = (LETTERS - 3) // 2
    return f"{name[: LETTERS - 3 - end]}...{name[-end:]}"
