"""The page's colours can be told apart and read, in its light and in its dark form (WCAG 2.2)."""

import re

import pytest

from scripts.reporting.page import TEMPLATE

CSS = (TEMPLATE / "style.css").read_text(encoding="utf-8")
THEMES = dict(zip(("light", "dark", "print"), re.findall(r":root \{(.*?)\}", CSS, re.DOTALL), strict=True))


def colours(theme):
    """Each colour's name and its channels, 0 to 255; dark and print replace some of the light form's."""
    found = re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{3,6}|\d+ \d+ \d+);", THEMES["light"] + THEMES[theme])
    return {name: channels(text) for name, text in found}


def channels(text):
    if not text.startswith("#"):
        return [*map(int, text.split())]
    digits = text[1:] if len(text) == 7 else "".join(2 * digit for digit in text[1:])
    return [int(digits[place : place + 2], 16) for place in (0, 2, 4)]


def luminance(colour):
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_lines_stand_out_from_their_background(theme):
    colour = colours(theme)
    for background in ("paper", "card", "faint"):
        for text in ("ink", "soft", "accent", "hit-ink", "miss-ink"):
            assert contrast(colour[text], colour[background]) >= 4.5, (text, background)
    for line in ("hit", "miss", *(f"run-{number}" for number in range(8))):
        assert contrast(colour[line], colour["card"]) >= 3, line


def test_black_or_white_reads_on_every_strength_of_a_cell():
    limit = float(re.search(r"blue > ([\d.]+) \?", (TEMPLATE / "matrix.js").read_text())[1])
    for theme in ("light", "dark"):
        colour = colours(theme)
        for name in ("hit", "miss"):
            for alpha in (place / 50 for place in range(51)):
                cell = [alpha * a + (1 - alpha) * b for a, b in zip(colour[name], colour["card"], strict=True)]
                ink = (0, 0, 0) if luminance(cell) > limit else (255, 255, 255)
                assert contrast(ink, cell) >= 4.5
