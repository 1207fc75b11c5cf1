"""The kernels around a verification: trees to rows, the accepted path to its slots, and what a draft reads then.

Without a GPU in Triton's interpreter; `test_kernels.py` starts it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree import budget
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.masks import WORD, ancestor_bits

from .test_kernels import DEVICE, INTERPRETED, kernels
from .test_no_host_sync import NoHostSync
from .test_orders import recursive_tree


class Batch:
    """Drafted trees of 6 nodes or more, in a batch that verifies some of their nodes."""

    def __init__(self, nodes: int, rows: list[int], others: list[int], *, seed: int = 0):
        """`rows`: of each request's root and nodes; `others`: its rows before them."""
        generator = torch.Generator().manual_seed(seed)
        self.nodes, count = nodes, len(rows)
        parents = torch.tensor([recursive_tree(nodes, seed + i).parents for i in range(count)])
        depth = torch.zeros_like(parents)
        for node in range(nodes):
            above = parents[:, node]
            depth[:, node] = 1 + torch.where(above < 0, 0, depth.gather(1, above.clamp(min=0)[:, None])[:, 0])
        tokens = torch.randint(100, (count, nodes), generator=generator)
        tree = TreeBatch(tokens, parents, depth, torch.rand(count, nodes, generator=generator))
        self.tree = tree.cut(torch.tensor([nodes - 2 * (i % 2) for i in range(count)]))  # some are smaller
        self.read = torch.randint(9, (count, nodes), generator=generator)
        self.planned = torch.randint(9, (count, 1 + nodes), generator=generator)
        self.place = torch.full((count + 3,), -1)
        self.request = torch.randperm(count + 3, generator=generator)[:count]
        self.place[self.request] = torch.randperm(count, generator=generator)
        self.rows, self.logits = rows, torch.tensor([0, *rows]).cumsum(0).int()
        self.starts = torch.tensor([0, *(a + b for a, b in zip(rows, others, strict=True))]).cumsum(0).int()
        first = (self.starts[1:] - torch.tensor(rows)).long()
        total = int(self.starts[-1])
        self.positions, self.ids = torch.zeros(total, dtype=torch.int64), torch.full((total,), -1, dtype=torch.int32)
        self.roots = torch.randint(50, (count,), generator=generator)
        for start, end, at, root in zip(self.starts[:-1], self.starts[1:], first, self.roots, strict=True):
            self.positions[start:end] = torch.arange(start, end) - at + root
        self.drafted_root = torch.full((count + 3,), -1)
        self.drafted_root[self.request] = self.roots
        self.first = first

    def laid_out(self, *, plain: bool = False) -> tuple[Any, Tensor, Tensor]:
        tree = TreeBatch(*(part.to(DEVICE) for part in self.tree))
        rest = (self.read, self.planned, self.place, self.drafted_root)
        drafted = kernels().Drafted(tree, *(part.to(DEVICE) for part in rest))
        layout = kernels().Layout.empty(len(self.rows) + 1, len(self.positions) + 2, self.nodes, torch.device(DEVICE))
        for buffer in (*layout.tree, *layout[1:]):
            buffer.fill_(77)
        positions, ids = self.positions.to(DEVICE), self.ids.to(DEVICE)
        batch = (part.to(DEVICE) for part in (self.request, self.logits, self.starts))
        layout.update(drafted, *batch, positions, ids, plain=plain)
        return layout, positions.cpu(), ids.cpu()


class TestStepKernels:
    __test__ = INTERPRETED or DEVICE == "cuda"

    @pytest.mark.parametrize("size", [5, 1500])
    def test_states_that_wait(self, size):
        """Rings that wrap, fresh ones and others, rows that were rejected."""
        from vllm_adaptive_tree.kernels.waiting import wait

        generator, positions = torch.Generator().manual_seed(size), 8
        states = torch.randn(12, size, generator=generator)
        kept, start = torch.zeros(5, positions, size), torch.tensor([7, 7, 7, 7, 7])
        request, end = torch.tensor([3, 0, 4]), torch.tensor([17, 3, 30], dtype=torch.int32)
        count, fresh = torch.tensor([2, 3, 1], dtype=torch.int32), torch.tensor([True, False, True])
        row = torch.randperm(12, generator=generator)[:9].view(3, 3)
        expected, begins = kept.clone(), start.clone()
        for number, index in enumerate(request.tolist()):
            first = int(end[number] - count[number])
            for column in range(int(count[number])):
                expected[index, (first + column) % positions] = states[row[number, column]]
            begins[index] = first if fresh[number] else 7
        kept, start = kept.to(DEVICE), start.to(DEVICE)
        wait(kept, start, *(part.to(DEVICE) for part in (states, request, end, count, row, fresh)))
        assert torch.equal(kept.cpu(), expected)
        assert start.tolist() == begins.tolist()

    @pytest.mark.parametrize("by_place", [False, True])
    @pytest.mark.parametrize(("requests", "nodes"), [(1, 3), (5, 12), (9, 70)])
    def test_selection(self, requests, nodes, by_place):
        """Ties, empty places, requests without a tree, lists that the scheduler has cut; all of one number."""
        from vllm_adaptive_tree.kernels import selection

        generator = torch.Generator().manual_seed(requests)
        weight = torch.randint(-6, 0, (requests + 2, nodes), generator=generator).float()
        weight[1, nodes // 2 :] = float("-inf")
        place = torch.cat([torch.randperm(requests + 2, generator=generator), torch.tensor([-1])])
        request = torch.randperm(requests + 3, generator=generator)[:requests]
        room = torch.randint(nodes + 1, (requests,), generator=generator).int()
        values = 1 / (1.0 + torch.arange(nodes)).expand(requests, -1) if by_place else weight[place[request]]
        values = values.masked_fill((place[request] < 0)[:, None], float("-inf"))
        others = torch.randint(1, 4, (requests,), generator=generator).int()
        for count in sorted({0, 1, int(room.sum()) // 2, int(room.sum())}):
            expected = budget.top_nodes(values, room, count)
            parts = (part.to(DEVICE) for part in (weight, place, request, room))
            kept = selection.top_nodes(*parts, count, by_place=by_place)
            assert kept.tolist() == expected.tolist()
            starts = torch.full((requests + 4,), 77, dtype=torch.int32, device=DEVICE)
            rows = int((kept.cpu() + others).sum())
            logits = selection.row_starts(kept, others.to(DEVICE), starts, rows)
            assert logits.tolist() == [0, *(expected + 1).cumsum(0).tolist()]
            assert starts.tolist() == [0, *(expected + others).cumsum(0).tolist(), *[rows] * 3]

    @pytest.mark.parametrize("plain", [False, True])
    @pytest.mark.parametrize("nodes", [6, 63, 64, 130])
    def test_layout(self, nodes, plain):
        """Whole trees, cut trees, a decode, a padded request, a root that is not the drafted one, rows of a prompt."""
        rows = [1 + nodes, nodes // 2, 1, 0, 1 + nodes, 4, 1 + nodes]
        batch = Batch(nodes, rows, [0, 0, 0, 0, 0, 3, 0])
        batch.drafted_root[batch.request[4]] += 1
        batch.place[batch.request[6]] = -1
        layout, positions, ids = batch.laid_out(plain=plain)
        limit = torch.tensor(rows) - 1
        limit[[3, 4, 6]] = 0
        place = batch.place[batch.request].clamp(min=0)
        expected = TreeBatch(*(part[place] for part in batch.tree)).cut(torch.zeros_like(limit) if plain else limit)
        count = len(rows)
        for found, part in zip(layout.tree, expected, strict=True):
            assert torch.equal(found[:count].cpu(), part)
            assert (found[count:] == 77).all()
        valid = expected.valid
        assert not valid[[2, 3, 4, 6]].any()
        assert valid[[0, 1, 5]].any(1).all() != plain
        slots = torch.cat([valid.any(1, keepdim=True).long() - 1, batch.read[place].masked_fill(~valid, -1)], 1)
        assert torch.equal(layout.slot[:count].cpu(), slots)
        real = [0, 1, 2, 4, 5, 6]
        assert torch.equal(layout.planned[real].cpu(), batch.planned[place[real]])
        assert torch.equal(layout.place[real].cpu(), place[real])
        bits = ancestor_bits(expected.parent)
        assert layout.bits.shape[1] == -(-(1 + nodes) // WORD)
        where, tokens, seen = batch.positions.clone(), batch.ids.clone(), torch.full_like(layout.bits.cpu(), 77)
        for i in real:
            first, root = int(batch.first[i]), int(batch.roots[i])
            assert (layout.first[i], layout.root[i], layout.context[i]) == (first, root, root)
            seen[first : first + rows[i]] = bits[i, : rows[i]]
            for node in range(rows[i] - 1):
                if valid[i, node]:
                    where[first + 1 + node] = root + expected.depth[i, node]
                tokens[first + 1 + node] = expected.tokens[i, node].clamp(min=0)
        assert torch.equal(positions, where)
        assert torch.equal(ids, tokens)
        assert torch.equal(layout.bits.cpu(), seen)

    @pytest.mark.parametrize(("nodes", "levels"), [(6, 4), (1, 1), (130, 9), (3, 9)])
    def test_accepted_paths(self, nodes, levels):
        """Rows of a prompt before a root, a root alone, a cut tree, nothing accepted, padding."""
        count = [nodes, 0, (1 + nodes) // 2, nodes]
        before = [3, 0, 0, 5]
        first = torch.tensor([sum(before[: i + 1]) + sum(count[:i]) + i for i in range(4)])
        rows, root = int(first[-1]) + 1 + nodes + 2, torch.tensor([50, 7, 400, 20])
        drafted, tokens, accepted = torch.full((4, nodes), -1), *torch.full((2, 4, levels), -1)
        positions, ids = torch.randint(900, (rows,)), torch.randint(900, (rows,)).int()
        wanted = torch.arange(rows), positions.clone(), ids.clone()
        for i, kept in enumerate(count):
            drafted[i, :kept] = torch.arange(100, 100 + kept)
            after = int(first[i]) + 1
            wanted[1][after : after + kept] = int(root[i]) + 1 + torch.arange(kept)
            path = range(0, kept if i < 3 else 0, 2)[:levels]
            for level, node in enumerate(path):
                accepted[i, level], tokens[i, level] = node, 300 + node
                wanted[0][after + level], wanted[2][after + level] = after + node, 300 + node
        given = [part.to(DEVICE) for part in (positions, ids, first, root, drafted, tokens, accepted)]
        found = kernels().write_accepted(*given)
        for part, expected in zip((found, *given[:2]), wanted, strict=True):
            assert torch.equal(part.cpu(), expected)
        assert (wanted[0] != torch.arange(rows)).any() == (nodes > 1)

    def test_a_chain_sees_all_before_it(self):
        batch = Batch(130, [131], [0])
        chain = torch.arange(-1, 129)[None]
        batch.tree = batch.tree._replace(parent=chain, depth=chain + 2)
        layout, positions, _ = batch.laid_out()
        assert torch.equal(layout.bits[:131].cpu(), ancestor_bits(chain)[0])
        assert torch.equal(positions, batch.positions)

    @pytest.mark.parametrize("nodes", [1, 7, 40])
    @pytest.mark.parametrize("chosen", [False, True])
    def test_windows_of_paths(self, nodes, chosen):
        """A path of every row, or of the row of one node of each request; some trees have fewer rows than nodes."""
        rows = [1 + nodes, 1, 1 + nodes // 2]
        parents = torch.tensor([recursive_tree(nodes, seed).parents for seed in range(3)])
        start = torch.tensor([0, *rows]).cumsum(0).int()
        tokens = torch.arange(100, 100 + int(start[-1])).int()
        index, node = torch.tensor([4, 0, 2]), torch.tensor([nodes - 1, -1, rows[2] - 2])
        given = (part.to(DEVICE) for part in (parents, tokens, start, index, node))
        *batch, node_there = given
        levels = nodes
        found = kernels().path_windows(*batch, node_there if chosen else None, levels=levels, nobody=9)
        at = 0
        for request in range(3):
            first = int(start[request])
            for row in [int(node[request]) + 1] if chosen else range(rows[request]):
                path, above = [], row
                while above > 0:
                    path.insert(0, first + above)
                    above = int(parents[request, above - 1]) + 1
                window = slice(at * (levels + 1), (at + 1) * (levels + 1))
                before = levels - len(path)
                wanted = [first] * (before + 1) + path
                assert (found.tokens[window].cpu() - 100).tolist() == wanted
                assert found.place[window].tolist() == [0] * before + list(range(len(path) + 1))
                assert found.request[window].tolist() == [9] * levels + [int(index[request])]
                at += 1
        assert len(found.tokens) == at * (levels + 1)
        assert found.request.dtype == index.dtype, "vLLM's kernels multiply it"

    @pytest.mark.parametrize(("shortest", "longest"), [(1, 4), (2, 3), (3, 12)])
    def test_look_up(self, shortest, longest, monkeypatch):
        """Texts of several blocks and of less than a continuation, with many occurrences and none; padding."""
        from vllm_adaptive_tree.drafters import Texts
        from vllm_adaptive_tree.drafters.ngram import NGram
        from vllm_adaptive_tree.kernels import ngram

        monkeypatch.setattr(ngram, "BLOCK", 64)
        generator = torch.Generator().manual_seed(shortest)
        lengths = torch.tensor([1, 2, 5, 40, 64, 65, 300, 400, 399]).int()
        text = torch.randint(4, (len(lengths), 400), generator=generator).int()
        text[6, 100:] = torch.arange(300) + 9  # nothing is repeated
        text[7] = torch.arange(400) % 7
        index = torch.tensor([3, 0, 8, 1, 7, 5, 2, 6, 4])
        generic = NGram(500, shortest, longest)
        tokens = text[index].long()
        expected = generic.continuations(Texts(["a"] * 9, tokens, lengths[index].long(), lengths[index].long()))
        padded = torch.cat([index, torch.tensor([9, 9])]).to(DEVICE)
        found = ngram.FusedNGram.of(generic).search(text.to(DEVICE), lengths.to(DEVICE), padded)
        assert torch.equal(found.tokens[:9].cpu(), expected.tokens)
        assert torch.allclose(found.weight[:9].cpu(), expected.weight, rtol=1e-6, atol=0)
        assert not found.weight[9:].any()
        assert (found.tokens[9:] == -1).all()
        assert {0, 8} <= set((expected.weight > 0).sum(1).tolist())

    @pytest.mark.parametrize("most", [1, 2, 99])
    @pytest.mark.parametrize(("chains", "length", "nodes"), [(1, 1, 6), (3, 5, 12), (8, 16, 40)])
    def test_merging(self, chains, length, nodes, most):
        """Trees with values in any order, trees without nodes, and none; with a table of acceptance, and draws of
        their own, or without."""
        from vllm_adaptive_tree.drafters import Continuations
        from vllm_adaptive_tree.kernels.merging import merge
        from vllm_adaptive_tree.proposers import Proposal
        from vllm_adaptive_tree.proposers.merging import merged

        generator, requests, size = torch.Generator().manual_seed(most + nodes), 4, nodes // 2
        batch = Batch(size, [1 + size] * requests, [0] * requests, seed=nodes)
        depth = batch.tree.depth.clone()
        depth[2] = 0
        tokens = torch.zeros_like(depth)
        for node in range(size):  # siblings have different tokens
            siblings = batch.tree.parent == batch.tree.parent[:, node : node + 1]
            tokens[:, node] = siblings[:, :node].sum(1)
        value = torch.randint(-20, 0, depth.shape, generator=generator) / 8
        tree = TreeBatch(tokens, batch.tree.parent, batch.tree.depth, value).cut((depth > 0).sum(1))
        read = torch.where(tree.valid, 5, -1)
        planned = torch.cat([torch.ones(requests, 1, dtype=torch.int64), 7 * tree.valid], 1)
        given = Proposal(tree, read, planned, torch.where(tree.valid, batch.read, -1))
        text = torch.randint(-1, 3, (requests, chains, length), generator=generator)
        found = Continuations(text, torch.randint(0, 3, (requests, chains), generator=generator) / (3 * chains))
        assert (found.weight > 0).any()
        own = torch.tensor([True, False, False, True])
        limits = {"nodes": nodes, "most": most, "max_depth": size}
        nothing = Proposal.nothing(requests, size, torch.device("cpu"))
        for proposal in (given, given._replace(cell=None), None):
            for draws in (None, own):
                expected = merged(nothing if proposal is None else proposal, found, **limits, own_draws=draws)
                on_device = None
                if proposal is not None:
                    rest = (None if part is None else part.to(DEVICE) for part in proposal[1:])
                    on_device = Proposal(TreeBatch(*(part.to(DEVICE) for part in proposal.tree)), *rest)
                text_and_weight = Continuations(*(part.to(DEVICE) for part in found))
                draws_there = None if draws is None else draws.to(DEVICE)
                got = merge(on_device, text_and_weight, **limits, own_draws=draws_there)
                got, wide = got.padded(expected.level.shape[1]), expected.proposal
                for one, other in zip((*got.proposal.tree, got.level), (*wide.tree, expected.level), strict=True):
                    torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-6)
                for one, other in zip(got.proposal[1:], wide[1:], strict=True):
                    assert (one is None) == (other is None)
                    assert one is None or torch.equal(one.cpu(), other)

    def test_layout_reads_no_value_on_the_host(self, monkeypatch):
        class Launch:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: None

        batch = Batch(6, [7, 7], [0, 0])
        module = __import__("vllm_adaptive_tree.kernels.layout", fromlist=["_bits"])
        monkeypatch.setattr(module, "_bits", Launch())
        tree = TreeBatch(*(part.to("meta") for part in batch.tree))
        rest = [part.to("meta") for part in (batch.read, batch.planned, batch.place, batch.drafted_root)]
        given = [part.to("meta") for part in (batch.request, batch.logits, batch.starts, batch.positions, batch.ids)]
        layout = kernels().Layout.empty(2, 14, 6, torch.device("meta"))
        with NoHostSync():
            layout.update(kernels().Drafted(tree, *rest), *given)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
    @pytest.mark.parametrize(("block_size", "head_size"), [(16, 8), (8, 20), (32, 64)])
    def test_commit(self, dtype, block_size, head_size):
        """Random paths, paths of which some nodes stand right, chains, none; all layers, bytes as they were."""
        generator = torch.Generator().manual_seed(head_size)
        requests, levels, nodes, heads, layers = 6, 5, 20, 2, 3
        blocks = 1 + requests * (200 // block_size)
        shape = (blocks, heads, block_size, 2 * head_size * dtype.itemsize)
        caches = [torch.randint(256, shape, generator=generator, dtype=torch.uint8) for _ in range(layers)]
        caches = [cache.to(DEVICE).view(dtype) for cache in caches]
        table = 1 + torch.randperm(blocks - 1, generator=generator)[: requests * (100 // block_size)]
        table = table.view(requests, -1).int()
        root = torch.randint(60, (requests,), generator=generator)
        path = torch.full((requests, levels), -1)
        for i, length in enumerate((5, 4, 5, 3, 0, 1)):
            path[i, :length] = torch.randperm(nodes, generator=generator)[:length].sort().values
        path[2] = torch.arange(levels)  # stands as it should
        path[3, :3] = torch.tensor([0, 1, 4])
        expected = [cache.view(torch.uint8).cpu() for cache in caches]
        old = [cache.clone() for cache in expected]
        for new, before in zip(expected, old, strict=True):
            for i in range(requests):
                for level, node in enumerate(path[i].tolist()):
                    if node >= 0:
                        source, target = int(root[i]) + 1 + node, int(root[i]) + 1 + level
                        there, here = table[i, target // block_size], table[i, source // block_size]
                        new[there, :, target % block_size] = before[here, :, source % block_size]
        addresses = kernels().layer_addresses(caches)
        assert addresses.shape == (layers,)
        kernels().move_accepted(addresses, caches[1], table.to(DEVICE), root.to(DEVICE), path.to(DEVICE))
        for cache, new, before in zip(caches, expected, old, strict=True):
            assert torch.equal(cache.view(torch.uint8).cpu(), new)
            assert not torch.equal(new, before)

    def test_no_commit_of_nobody(self):
        cache = torch.zeros(2, 1, 4, 8, device=DEVICE)
        nothing = torch.empty(0, 3, dtype=torch.int64, device=DEVICE)
        table = nothing.int()
        kernels().move_accepted(kernels().layer_addresses([cache]), cache, table, nothing[:, 0], nothing)
        assert not cache.any()

    def test_without_a_tree_a_draft_reads_inside_its_buffers(self, monkeypatch):
        """A draft model reads two rows of a request after a step without a tree: the second one's node is anything."""
        from vllm_adaptive_tree.kernels import reading

        launched = []
        monkeypatch.setattr(reading, "_read", {(4,): lambda *args, **_: launched.append(args)})
        inputs = reading.DraftInputs.empty(4, 10, torch.device("cpu"))
        requests, text = torch.arange(3), torch.zeros(4, 64, dtype=torch.int32)
        step = reading.StepTensors(requests, requests, torch.arange(4), None, requests, requests, requests, text)
        cache = reading.Cache(torch.zeros(3, 4, dtype=torch.int32), 16)
        shaping = reading.Shaping(0.6, 9.0, follows=True, threshold=0.25, floor=-3.0)
        inputs.update(step, shaping, requests, cache, padded=4, padding=4, limit=64, shift=0)
        at = len(inputs) + 8
        nodes, stride = launched[0][at], launched[0][at + 3]
        assert stride == nodes.stride(0)
        assert (len(requests) - 1) * stride + 10 <= nodes.untyped_storage().nbytes() // nodes.element_size()

    @pytest.mark.parametrize("shift", [0, 1])
    @pytest.mark.parametrize("width", [6, 70])
    def test_what_a_draft_reads(self, shift, width):
        """Paths of several lengths, a request in the middle of its prompt, one that waits, one at the draft's limit,
        and padding; a path over a block's border, and one longer than a word."""
        from vllm_adaptive_tree.kernels import reading

        most, padded, limit, block = 9, 8, 120, 8
        long = width - 2
        sampled, computed = [3, 0, 1, 2, 2, long], [20, 12, 33, 40, limit - 1, 100]
        ready = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.int8, device=DEVICE)
        index = torch.tensor([4, 2, 7, 0, 5, 1])
        text = torch.arange(most * 128).view(most, 128).int()
        table = torch.arange(6 * 16).view(6, 16).flip(0).int()
        nodes = torch.arange(6 * long).view(6, long) % 11
        starts = torch.tensor([0, 9, 18, 27, 36, 45, 45 + long])
        temperature, seed = torch.linspace(0.5, 1, most), torch.arange(most) * 11
        temperature[7] = 0
        everywhere = torch.zeros(most, dtype=torch.int32)
        everywhere[index] = torch.tensor(computed, dtype=torch.int32)
        inputs = reading.DraftInputs.empty(most, width, torch.device(DEVICE))
        step = reading.StepTensors(
            *(one.to(DEVICE) for one in (index, torch.tensor(sampled).int(), starts.int(), nodes)),
            *(one.to(DEVICE) for one in (everywhere, temperature, seed, text)),
        )
        shaping = reading.Shaping(0.6, 9.0, follows=True, threshold=0.25, floor=-3.0)
        cache = reading.Cache(table.to(DEVICE), block)
        with NoHostSync():
            where = {"padded": padded, "padding": 2 * most, "limit": limit, "shift": shift}
            inputs.update(step, shaping, ready, cache, **where)
        inputs = type(inputs)(*(part.cpu() for part in inputs))
        alive = [0, 2, 5]
        assert inputs.alive.tolist()[:padded] == [1, 0, 1, 0, 0, 1, 0, 0]
        assert inputs.request.tolist()[:padded] == [*index.tolist(), 2 * most, 2 * most]
        assert inputs.position.tolist()[:6] == computed
        shaped = torch.where(temperature == 0, 0.6, temperature)[index]
        assert torch.equal(inputs.temperature[:6], shaped)
        assert inputs.greedy.tolist()[:6] == [0, 0, 1, 0, 0, 0]
        assert torch.equal(inputs.seed[:6], seed[index])
        assert inputs.limits.tolist() == [0.25, -3.0]
        end = 0
        for r in range(padded):
            assert inputs.row_start[r] == end
            for row in range(sampled[r] + 1 - shift if r in alive else 0):
                place = computed[r] - sampled[r] + row
                assert inputs.positions[end] == place
                assert inputs.tokens[end] == text[index[r], place + shift]
                assert inputs.slots[end] == table[r, place // block] * block + place % block
                assert inputs.source[end] == starts[r] + (1 + nodes[r, row - 1] if row else 0)
                seen = [inputs.bits[end, i // WORD].item() >> i % WORD & 1 for i in range(width)]
                assert seen == [1] * (row + 1) + [0] * (width - row - 1)
                end += 1
            assert inputs.context[r] == (computed[r] - sampled[r] if r in alive else 0)
            assert inputs.last[r] == (end - 1 if r in alive else 0)
        assert inputs.row_start[padded] == end
        assert (inputs.slots[end:] == reading.PAD_SLOT).all()
        assert not inputs.positions[end:].any()
