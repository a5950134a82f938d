"""Pictures of a validation, uint8 (h, w, 3), drawn with Pillow: matplotlib would take longer to import than to draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from utils.config.spelling import printable
from utils.record.pictures.collector import NO_CLASS, Mistake

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

INK = (33, 33, 33)
GREY = (110, 110, 110)
WHITE = (255, 255, 255)
BLUE = np.array([21, 101, 192])
FEW = 12  # classes whose matrix can be read at TensorBoard's size
MOST_LABELLED = 40  # classes whose names are written at the matrix
MOST_COUNTED = 20  # classes whose counts are written into it
FINE = 4  # times the pixels that a person needs
SIDE = 900  # pixels of a matrix of many classes, at least
TILE, CAPTION, GAP, COLUMNS = 128, 30, 8, 6  # pixels of an image, of the two lines below it, and between; images a row


def confusion_matrix(counts: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Draw a row for each true class and a column for each answer. ``counts``: int64 (classes, classes).

    The shade is the square root of the share of the row; up to 20 classes, the counts are written as well.
    """
    number = len(classes)
    # TensorBoard shows 250 pixels to 350 of a picture, the nearest ones: digits need strokes of several.
    fine, bold = (FINE, 1) if number <= FEW else (1, 0)
    font = ImageFont.load_default(fine * 14 if number <= FEW else 12)
    widest = max(round(font.getlength(f"{count}")) for count in (counts.max(), 10))
    cell = widest + 6 * fine if number <= FEW else 30 if number <= MOST_COUNTED else 18
    cell = cell if number <= MOST_LABELLED else max(1, SIDE // number)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    colours = np.round(WHITE + np.sqrt(shares)[..., None] * (BLUE - WHITE)).astype(np.uint8)
    matrix = Image.fromarray(colours.repeat(cell, 0).repeat(cell, 1))
    names = [_printable(name, 16) for name in classes]
    labels = number <= MOST_LABELLED
    margin = 34 * fine + (max(round(font.getlength(name)) for name in names) if labels else 0)
    picture = Image.new("RGB", (margin + matrix.width + 4 * fine, margin + matrix.height + 4 * fine), WHITE)
    picture.paste(matrix, (margin, margin))
    draw = ImageDraw.Draw(picture)
    frame = (margin - fine, margin - fine, margin + matrix.width + fine - 1, margin + matrix.height + fine - 1)
    draw.rectangle(frame, outline=GREY, width=fine)
    draw.text((margin + matrix.width / 2, 4 * fine), "predicted", GREY, font, anchor="mt")
    beside = _upright("true class", font)
    picture.paste(beside, (4 * fine, margin + (matrix.height - beside.height) // 2))
    for place, name in enumerate(names) if labels else ():
        middle = margin + place * cell + cell // 2
        draw.text((margin - 8 * fine, middle), name, INK, font, anchor="rm", stroke_width=bold)
        upright = _upright(name, font, bold, INK)
        picture.paste(upright, (middle - upright.width // 2, margin - 8 * fine - upright.height))
    small = font if number <= FEW else ImageFont.load_default(10)
    for row, column in np.argwhere(counts) if number <= MOST_COUNTED else ():
        ink = WHITE if shares[row, column] > 0.3 else INK
        at = margin + column * cell + cell / 2, margin + row * cell + cell / 2
        draw.text(at, f"{counts[row, column]}", ink, small, anchor="mm", stroke_width=bold)
    return np.asarray(picture)


def worst_mistakes(mistakes: Sequence[Mistake], classes: Sequence[str]) -> np.ndarray:
    """Draw the images in order, each with the network's answer, its probability, and the true class."""
    columns = min(COLUMNS, len(mistakes))
    rows = -(-len(mistakes) // columns)
    size = columns * (TILE + GAP) + GAP, rows * (TILE + CAPTION + GAP) + GAP
    picture = Image.new("RGB", size, WHITE)
    font = ImageFont.load_default(12)
    draw = ImageDraw.Draw(picture)
    for place, one in enumerate(mistakes):
        left = GAP + place % columns * (TILE + GAP)
        top = GAP + place // columns * (TILE + CAPTION + GAP)
        picture.paste(as_image(one.pixels, TILE), (left, top))
        missed = one.target == one.predicted  # a label that the network has missed
        answer = f"not {classes[one.predicted]}" if missed else classes[one.predicted]
        truth = "is not" if one.target == NO_CLASS else f"is {classes[one.target]}"
        draw.text((left, top + TILE + 2), _fitting(answer, f" {100 * one.share:.0f} %", font), INK, font)
        draw.text((left, top + TILE + 16), _fitting(truth, "", font), GREY, font)
    return np.asarray(picture)


def as_image(pixels: np.ndarray, side: int) -> Image.Image:
    """Scale uint8 (1 or 3, h, w) to a colour image of ``side`` x ``side`` pixels, with white margins unless square.

    A small image is enlarged without blurring.
    """
    image = Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)))
    smooth = image.width > side // 3
    resampling = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    return ImageOps.pad(image, (side, side), resampling, WHITE)


def _upright(text: str, font: Font, bold: int = 0, ink: tuple[int, int, int] = GREY) -> Image.Image:
    """Draw a text that reads from bottom to top."""
    _, top, right, bottom = font.getbbox(text, anchor="lm", stroke_width=bold)
    line = Image.new("RGB", (max(1, round(right)), max(1, round(bottom - top))), WHITE)
    ImageDraw.Draw(line).text((0, -top), text, ink, font, anchor="lm", stroke_width=bold)
    return line.rotate(90, expand=True)


def _fitting(name: str, rest: str, font: Font) -> str:
    """Cut ``name`` until it fits into a tile together with ``rest``; return both as one text."""
    for length in range(40, 0, -1):
        text = _printable(name, length) + rest
        if font.getlength(text) <= TILE:
            return text
    return rest


def _printable(name: str, length: int) -> str:
    clean = printable(name)
    return clean if len(clean) <= length else f"{clean[: length - 1]}."
