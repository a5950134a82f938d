"""Model soups: the uniform one, and the greedy one, which keeps what does not harm it.

Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
inference time, 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from scripts.averaging.ingredients import Weights, mean

Score = Callable[[Weights, bool], float]  # of weights, and whether their batch-norm statistics must be computed


class Soup(NamedTuple):
    """``scores``: of each ingredient alone. ``kept``: the places of those in the soup, in the order of entering."""

    weights: Weights
    scores: list[float]
    kept: list[int]


def uniform(ingredients: Sequence[Weights], score: Score) -> Soup:
    """The mean of all."""
    scores = [score(weights, False) for weights in ingredients]
    return Soup(mean(ingredients), scores, list(range(len(ingredients))))


def greedy(ingredients: Sequence[Weights], score: Score) -> Soup:
    """From the best ingredient on, each joins if the mean with it scores at least as high (their recipe 1)."""
    scores = [score(weights, False) for weights in ingredients]
    first, *others = sorted(range(len(scores)), key=lambda place: -scores[place])  # of equals, the first given
    kept = [first]
    best = scores[first]
    for place in others:
        mixed = score(mean([ingredients[one] for one in (*kept, place)]), True)
        if mixed >= best:
            kept = [*kept, place]
            best = mixed
    return Soup(mean([ingredients[place] for place in kept]), scores, kept)
