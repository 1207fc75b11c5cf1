"""The target's states that a resting head has not read yet: they wait on the device, and then cost one forward."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.kernels.waiting import wait

LONGEST = 64
"""Most positions of a request that wait."""
MOST_BYTES = 1 << 28
"""Most that the states of all requests take, or one position of each."""


class Late(NamedTuple):
    """Rows that wait, of K requests one after the other; those after the last are padding."""

    request: Tensor  # [K] int64: vLLM's index
    row_start: Tensor  # [K + 1] int32
    end: Tensor  # [K] int32: position after the last row
    place: Tensor  # [rows] int64: position
    tokens: Tensor  # [rows] int32: the token after it
    states: Tensor  # [rows, H]: the target's there
    sizes: np.ndarray  # [K]: rows, at most; on the host


class UnreadStates:
    """A ring of positions for each request, by vLLM's index. The device has the exact bounds of what waits, the host
    how much it is at most.
    """

    def __init__(self, requests: int, states: Tensor, *, rows: int):
        """`states` [.., H]: of the target; `rows`: most that can be read at once."""
        most = min(rows, MOST_BYTES // (states.shape[-1] * states.itemsize)) // requests
        self.positions = max(1, min(LONGEST, most))
        """Of a request that can wait."""
        self.count = np.zeros(requests, dtype=np.int64)
        """Most rows that wait, of each request."""
        self.start = torch.zeros(requests, dtype=torch.int64, device=states.device)
        """First position that waits, of each request that has any."""
        self.states = states.new_zeros(requests * self.positions, states.shape[-1])

    def fits(self, requests: np.ndarray, rows: int) -> bool:
        """Return whether at most so many rows more of each of these requests [R] can wait."""
        return bool((self.count[requests] + rows <= self.positions).all())

    def keep(
        self,
        requests: np.ndarray,
        request: Tensor,
        end: Tensor,
        num_sampled: Tensor,
        row: Tensor,
        states: Tensor,
    ) -> None:
        """Let rows of R requests wait.

        Args:
            requests, request: [R], on the host and the device.
            end: [R], position after the last row.
            num_sampled: [R], rows.
            row: [R, L], their rows of `states`; those after the first `num_sampled` are not kept.
        """
        fresh = self.count[requests] == 0
        self.count[requests] += row.shape[1]
        if compiles(states.device):
            kept, begins = self.states.unflatten(0, (-1, self.positions)), async_tensor_h2d(fresh, device=states.device)
            wait(kept, self.start, states, request, end, num_sampled, row, begins)
            return
        first = end.long() - num_sampled
        if fresh.all():
            self.start[request] = first
        elif fresh.any():
            new = async_tensor_h2d(fresh, device=request.device)
            self.start[request] = torch.where(new, first, self.start[request])
        column = torch.arange(row.shape[1], device=row.device)
        # a column too many repeats the last row: two writes of the same
        column = torch.minimum(column, num_sampled[:, None].long() - 1).clamp(min=0)
        place = request[:, None] * self.positions + (first[:, None] + column) % self.positions
        self.states[place.flatten()] = states[row.gather(1, column).flatten()]

    def take(self, requests: np.ndarray, end: Tensor, text: Tensor) -> Late:
        """What waits of these requests, which then no longer does. `end`: position after the last row of each request,
        `text` [.., length] its tokens, both by vLLM's index."""
        waiting = requests[self.count[requests] > 0]
        sizes = self.count[waiting]
        self.count[waiting] = 0
        rows = int(sizes.sum())
        request, most = (async_tensor_h2d(numbers, device=end.device) for numbers in (waiting, sizes))
        end = end[request].long()
        start = torch.maximum(self.start[request], end - most)  # no kernel leaves its rows, whatever was kept
        row_start = torch.zeros(1 + len(waiting), dtype=torch.int32, device=end.device)
        torch.cumsum(end - start, 0, out=row_start[1:])
        row = torch.arange(rows, device=end.device)
        of = torch.searchsorted(row_start[1:], row.int(), right=True).clamp(max=len(waiting) - 1)
        place = torch.minimum(start[of] + row - row_start[of], end[of] - 1)
        owner = request[of]
        states = self.states[owner * self.positions + place % self.positions]
        return Late(request, row_start, end.int(), place, text[owner, place + 1].int(), states, sizes)
