"""Drafted trees between two steps on Model Runner V2."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pure.test_accept import batch
from tests.pure.test_no_host_sync import NoHostSync
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.v2.drafting import KEPT, DraftedTrees, TreeDrafting, level_width
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.graphs import ladder
from vllm_adaptive_tree.engine.v2.kernel_dispatch import acceptance_bytes
from vllm_adaptive_tree.engine.v2.node_selection import NodeSelection
from vllm_adaptive_tree.kernels.reading import CHOSEN, READY
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.dyspec import DySpec


def test_trees_wait_for_their_request() -> None:
    """By vLLM's index; of a request that was not in the last batch, or whose root is another one, nothing is left."""
    tree = batch()[0].tree
    drafts = Drafts(4, 4, 3, 8, torch.device("cpu"))
    everyone = torch.arange(4)
    with NoHostSync():
        empty, _ = drafts.of(everyone, everyone, torch.full((4,), 3))
    assert not empty.valid.any()

    read, drawn = torch.tensor([[1, -1, -1], [2, -1, -1]]), torch.tensor([[2, 1, 0, 0]] * 2)
    levels = [torch.arange(4.0).reshape(2, 1, 2), torch.arange(8.0).reshape(2, 2, 2)]
    with NoHostSync():
        drafts.open(2, sum(level.shape[1] for level in levels))
        for first, level in enumerate(levels):
            drafts.keep(level, first)
        drafts.store(torch.tensor([2, 0]), torch.tensor([7, 8]), Proposal(tree, read, drawn), torch.ones(2))
        found, probs = drafts.of(everyone, torch.tensor([8, 8, 6, 7]), torch.tensor([2, 3, 3, 3]))
    assert found.tokens.tolist() == [[1, 2, -1], [-1] * 3, [-1] * 3, [-1] * 3]
    found, probs = drafts.of(torch.tensor([0, 2]), torch.tensor([8, 7]), torch.tensor([3, 3]))
    assert found.tokens.tolist() == [[1, 2, 0]] * 2
    q, count = probs.after(torch.tensor([-1, 0]))
    assert count.tolist() == [2, 1]
    assert torch.equal(q, torch.stack([levels[0][1, 0].softmax(0), levels[1][0, 0].softmax(0)]))
    q, count = probs.after(torch.tensor([0, 1]))
    assert torch.equal(q[0], levels[1][1, 1].softmax(0))
    assert (q[1].tolist(), count.tolist()) == ([0.0, 0.0], [1, 0])


def test_trees_without_cells_have_none_of_those_before_them() -> None:
    """Those of a look-up that proposes while the draft rests, in the places of trees that the draft has grown."""
    drafts, tree, read = Drafts(4, 4, 3, 8, torch.device("cpu")), batch()[0].tree, torch.full((2, 3), -1)
    drafts.cell = torch.full_like(drafts.read, -1)
    cells, index, drawn = torch.arange(6).view(2, 3), torch.tensor([2, 0]), torch.zeros(2, 4, dtype=torch.int64)
    drafts.store(index, index, Proposal(tree, read, drawn, cells), torch.ones(2))
    assert drafts.cell[:2].tolist() == cells.tolist()
    drafts.store(index, index, Proposal(tree, read, drawn), torch.ones(2))
    assert (drafts.cell == -1).all()


def test_grown_trees_keep_their_cells() -> None:
    """Continuations are merged into them; a cell has to move with its node."""
    tree, read = batch()[0].tree, torch.full((2, 3), -1)
    cells = torch.arange(6).view(2, 3)
    proposal = Proposal(tree, read, torch.zeros(2, 4, dtype=torch.int64), cells)
    grown = DraftedTrees(proposal, torch.zeros(2), torch.zeros(()), 1)
    speculator = SimpleNamespace(
        padded=lambda requests: 2,
        drafted_levels=3,
        _open=lambda padded: None,
        trees=lambda requests, levels: grown,
        graphs=SimpleNamespace(run=lambda piece, trees: trees()),
        steering=SimpleNamespace(steered=SimpleNamespace(fill=False)),
    )
    found = TreeDrafting.grown_trees(speculator, 1, 3)  # type: ignore[arg-type]
    assert found.cell is not None
    assert (found.cell.tolist(), found.tree.tokens.tolist()) == (cells[:1].tolist(), tree.tokens[:1].tolist())


class Choosing(DySpec):
    """A third party's, with requests of both kinds and no table."""

    either = True

    def chooses(self, temperature: float) -> bool:
        return temperature < 0.5


@pytest.mark.parametrize(("proposer", "told"), [(DySpec, False), (Choosing, True), (AdaptiveTree, True)])
def test_a_proposer_that_chooses_by_request_is_told_which(proposer: Any, told: bool) -> None:
    flags = SimpleNamespace(from_target=np.array([True, False, True]))
    everyone = torch.ones(4, dtype=torch.int8)
    made = proposer.build(proposer.Options(), nodes=4)
    speculator: Any = SimpleNamespace(
        pair=SimpleNamespace(proposer=made), flags=flags, everyone=everyone, device=torch.device("cpu")
    )
    speculator.tells_chosen = TreeDrafting.tells_chosen.fget(speculator)  # type: ignore[attr-defined]
    batch = SimpleNamespace(idx_mapping_np=np.array([2, 1]))
    found = TreeDrafting._request_flags(speculator, batch, None)
    assert found.tolist() == ([READY + CHOSEN, READY] if told else everyone.tolist())
    ready = TreeDrafting._request_flags(speculator, batch, np.array([False, True]))
    assert ready.tolist() == [CHOSEN, READY]


@pytest.mark.parametrize(("most_rows", "verified"), [(1000, 90), (100, 90), (60, 50), (5, 0)])
def test_a_budget_verifies_what_is_sampled_at_once(most_rows: int, verified: int) -> None:
    """More rows of logits than vLLM processes at once would leave the kernels of the rules."""
    budget: Any = SimpleNamespace(nodes=90)
    drafts, start = Drafts(10, 10, 24, 8, torch.device("cpu")), torch.zeros(11, dtype=torch.int32)
    selection = NodeSelection(drafts, start, budget, most_rows=most_rows, by_place=False)
    names = list("abcdefghij")
    tokens = selection.get_num_tokens(dict.fromkeys(names, 25), {name: [-1] * 24 for name in names})
    assert (selection.nodes, tokens) == (verified, 10 + verified)
    selection.budget = None  # all of them, or as many as there is room for
    tokens = selection.get_num_tokens(dict.fromkeys(names, 25), {name: [-1] * 24 for name in names})
    assert selection.nodes == min(240, max(0, most_rows - 10))
    assert tokens == 10 + selection.nodes


def test_the_host_divides_nodes_among_rows_with_adapters() -> None:
    """Evenly, of what each request has; then both views of a step are one."""
    budget: Any = SimpleNamespace(nodes=5)
    drafts, start = Drafts(3, 3, 4, 2, torch.device("cpu")), torch.zeros(4, dtype=torch.int32)
    selection = NodeSelection(drafts, start, budget, most_rows=1000, by_place=False, on_host=True)
    assert selection.get_num_tokens({"a": 5, "b": 2, "c": 5}, {"a": [-1] * 4, "b": [-1], "c": [-1] * 4}) == 8
    counts = np.array([4, 1, 4], dtype=np.int32)
    tokens, logits = selection.compact_batch(counts, counts + 1, np.array([0, 5, 7, 12], dtype=np.int32))
    assert (tokens.tolist(), logits.tolist()) == ([3, 2, 3], [0, 3, 5, 8])
    of_device, rows, *_ = selection.reallocate_drafts(["a", "b", "c"], torch.arange(3))
    assert of_device.tolist() == logits.tolist()
    assert rows.tolist() == [0, 3, 5, 8]


def test_placeholders_amid_a_prompt_are_all_kept() -> None:
    """Then every row is where the host expects it."""
    budget: Any = SimpleNamespace(nodes=3)
    drafts, start = Drafts(2, 2, 4, 2, torch.device("cpu")), torch.zeros(3, dtype=torch.int32)
    selection = NodeSelection(drafts, start, budget, most_rows=1000, by_place=False)
    placeholders = {"a": [-1] * 4, "b": [-1] * 4}
    assert selection.get_num_tokens({"a": 5, "b": 5}, placeholders) == 5
    assert selection.get_num_tokens({"a": 5, "b": 30}, placeholders) == 35
    assert selection.get_num_tokens({"a": 5, "b": 30}, {"a": [-1] * 4, "b": []}) == 34


def test_memory_of_the_largest_acceptance() -> None:
    """Of a head of one forward and a draft with drawn children, at a vocabulary of 152k."""
    sizes = {"requests": 256, "rows": 1766, "levels": 16, "vocabulary": 151_936, "size": 2}
    logits = 1766 * (151_936 * 6 + 4 * 4748) + (1 << 27)
    spec = {"method": "dyspec", "model": "x", "num_speculative_tokens": 24}
    pairs = {
        rule: resolve(TreeOptions.parse({**spec, "rejection_sample_method": rule})[0]) for rule in ("rrsw", "traversal")
    }
    found = {rule: acceptance_bytes(pair, **sizes) - logits for rule, pair in pairs.items()}
    row = 4 * 151_936
    assert found == {"rrsw": 512 * row, "traversal": (256 + 2 * 16 * 52) * row}
    assert 2 * 16 * 52 * row < 1 << 30 < 2 * 16 * 56 * row
    greedy = resolve(TreeOptions.parse({**spec, "method": "opt_tree"})[0])
    assert acceptance_bytes(greedy, **sizes) == logits


@pytest.mark.parametrize("nodes", [8, 24, 64])
@pytest.mark.parametrize("levels", [2, 8, 16])
def test_kept_logits_are_bounded(levels: int, nodes: int) -> None:
    """In bytes, whatever the vocabulary; one column a level is always read."""
    for requests in ladder(256):
        free = level_width(requests, nodes, 8192)
        for vocabulary in (2048, 152_064, 262_144):
            kept = KEPT // (2 * vocabulary)
            width = level_width(requests, nodes, 8192, levels=levels, kept=kept)
            rows = requests * (1 + (levels - 1) * width)
            assert 1 <= width <= free
            assert width == 1 or rows <= kept
            assert width == free or requests * (1 + (levels - 1) * (width + 1)) > kept, "as wide as they may be"
    assert level_width(256, 64, 8192, levels=16, kept=KEPT // (2 * 152_064)) == 1, "of 4: 1.2 GB in place of 4.7"


def test_the_buffer_of_kept_logits_never_moves() -> None:
    """A smaller batch may have more rows than a larger one; graphs hold the buffer of either."""
    drafts = Drafts(4, 4, 3, 8, torch.device("cpu"))
    drafts.most_kept = 6
    drafts.open(2, 1)
    drafts.keep(torch.zeros(2, 1, 8), 0)
    kept = drafts.kept
    assert kept is not None
    drafts.open(1, 6)
    drafts.keep(torch.ones(1, 6, 8), 0)
    assert drafts.kept is kept
    assert len(kept) == 6


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_of_more_requests_than_have_trees(whole: bool) -> None:
    """As in vLLM's memory profile, of 1,024 requests where 256 have trees."""
    from vllm_adaptive_tree.engine.v2.block_speculator import BlockForward

    block: Any = object.__new__(BlockForward)
    block.whole_block, block.rows_kept, block.predicting = whole, 3, torch.zeros(2, 3, 4)
    block.sample_indices, hidden = torch.arange(15).flip(0), torch.arange(60.0).view(15, 4)
    block._run_model = lambda *_: hidden
    block._generate_draft(5)
    assert torch.equal(block.predicting.flatten(0, 1), hidden[:6] if whole else hidden.flip(0)[:6])
