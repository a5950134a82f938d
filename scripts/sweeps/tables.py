"""Tables for papers, in Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def markdown(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Table in Markdown, with the first column left-aligned and the others right-aligned."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *cells]
    escaped = ([cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"


def latex(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """LaTeX tabular with the rules of the package booktabs; '+-' becomes the plus-minus sign."""

    def row(line: Sequence[str]) -> str:
        escaped = ("".join(LATEX.get(character, character) for character in cell) for cell in line)
        return " & ".join(cell.replace("+-", "$\\pm$") for cell in escaped) + r" \\"

    body = "\n".join(map(row, cells))
    columns = "l" + "r" * (len(headers) - 1)
    rules = ("\\toprule", row(headers), "\\midrule", body, "\\bottomrule", "\\end{tabular}\n")
    return f"\\begin{{tabular}}{{{columns}}}\n" + "\n".join(rules)
