"""Tests of the budget of a batch."""

import torch

from vllm_adaptive_tree.budget import Curve


def curve(*points: tuple[float, float]) -> Curve:
    """Curve of (rows, seconds)."""
    return Curve(*torch.tensor(points).double().t())


PLATEAUS = curve((1, 1.0), (2, 1.0), (3, 1.6), (5, 1.6), (6, 2.6), (9, 2.7))
