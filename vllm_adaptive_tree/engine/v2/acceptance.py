"""Acceptance table on Model Runner V2: learnt from figures of past steps, without a device sync."""

import torch
from torch import Tensor
from torch.nn.functional import pad

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
        width = max(column.shape[1] for column in columns)
        padded = [pad(column, (0, width - column.shape[1]), value=-1) for column in columns]
        self.readback.send(torch.stack(padded), self._learn)

    def _learn(self, figures: Tensor) -> None:
        self.table.observe(*figures.numpy())
