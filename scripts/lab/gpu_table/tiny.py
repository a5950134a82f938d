"""Images made up for trying out the pieces on a CPU."""

from __future__ import annotations

from pathlib import Path

# a class
CLASSES = 10
IMAGES = {"train": 4, "val": 2}


def made_up(folder: Path, ending: str, size: int) -> str:
    """Class folders of random images of ``size`` pixels, below ``folder``/train and ``folder``/val."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in IMAGES.items():
        for label in range(CLASSES):
            place = folder / split / str(label)
            place.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.{ending}")
    return str(folder)
