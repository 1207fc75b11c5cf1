"""Acceptance table on Model Runner V2: learnt from figures of past steps, without a device sync."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.proposers.acceptance_table import AcceptanceTable
from vllm_adaptive_tree.trees import TreeBatch


class DeviceAcceptance:
    """Feeds a table from verifications; every rank reads the same figures in the same step."""

    def __init__(self, table: AcceptanceTable):
        self.table, self.readback = table, AsyncReadback()

    def verified(self, tree: TreeBatch, cell: Tensor, nodes: Tensor) -> None:
        """Note R trees of N nodes with their cells [R, N], and the accepted `nodes` [R, L]; -1 pads."""
        self.readback.next_step()
        columns = cell.masked_fill(~tree.valid, -1), tree.parent, nodes
        self.readback.send(torch.cat(columns, 1), partial(self._learn, cell.shape[1]))

    def _learn(self, width: int, figures: Tensor) -> None:
        cell, parent, nodes = np.split(figures.numpy(), [width, 2 * width], axis=1)
        self.table.observe(cell, parent, nodes)
