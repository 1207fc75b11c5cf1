"""Prompt look-up on CPUs, in a compiled loop."""

# mypy: disable-error-code="untyped-decorator"

import numpy as np
import torch

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.drafters.base import Texts
from vllm_adaptive_tree.drafters.lookup import Continuations
from vllm_adaptive_tree.drafters.ngram import LENGTH, LONGER, MATCHES, NOTHING, NGram


class NGramCPU(NGram):
    """The same continuations, from the end of the text back to its beginning."""

    def continuations(self, texts: Texts) -> Continuations:
        tokens = np.ascontiguousarray(texts.tokens.numpy())
        matches = min(MATCHES, tokens.shape[1])
        found = np.full((len(tokens), matches, LENGTH), -1, np.int64)
        weight = np.zeros((len(tokens), matches), np.float32)
        _find(tokens, texts.length.numpy(), self.shortest, self.longest, found, weight)
        return Continuations(torch.from_numpy(found), torch.from_numpy(weight))


@njit("(int64[:, ::1], int64[:], int64, int64, int64[:, :, ::1], float32[:, ::1])")
def _find(tokens, length, shortest, longest, found, weight):  # type: ignore[no-untyped-def]
    """Fill the continuations of texts [R, L], longer matches first, then later ones."""
    most = found.shape[1]
    common, start = np.empty(most, np.int64), np.empty(most, np.int64)
    for r in range(len(tokens)):
        text, end, count = tokens[r], length[r], 0
        for at in range(end - 1, 0, -1):
            if text[at - 1] != text[end - 1]:
                continue
            same = 1
            while same < min(longest, at) and text[at - 1 - same] == text[end - 1 - same]:
                same += 1
            if same < shortest or (count == most and same <= common[most - 1]):
                continue
            place = min(count, most - 1)
            count = min(count + 1, most)
            while place > 0 and common[place - 1] < same:
                common[place], start[place] = common[place - 1], start[place - 1]
                place -= 1
            common[place], start[place] = same, at
        if count == 0:
            continue
        total = NOTHING * LONGER ** (1 - common[0])
        for i in range(count):
            total += LONGER ** (common[i] - common[0])
        for i in range(count):
            weight[r, i] = LONGER ** (common[i] - common[0]) / total
            for j in range(min(LENGTH, end - start[i])):
                found[r, i, j] = text[start[i] + j]
