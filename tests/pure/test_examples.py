"""Training examples of gates: features equal those of inference, labels those of the verification."""

import pytest
import torch
from torch import Tensor

from tests.oracles.growth import Fixed, grow, log_probs_of
from vllm_adaptive_tree.engine.v1.drafts import Draft, to_drafts
from vllm_adaptive_tree.gates import examples
from vllm_adaptive_tree.gates.examples import Verified
from vllm_adaptive_tree.proposers import Proposer, StaticTree
from vllm_adaptive_tree.proposers.c2t import C2T, C2TOptions, features
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.testing.models import ToyLM
from vllm_adaptive_tree.trees import Shape

VOCABULARY, DEPTH = 6, 3
HIDDEN = torch.arange(6000.0).reshape(-1, 3)  # of slot s: row s


def drafted(proposer: Proposer, model: ToyLM, *, nodes: int, temperature: float = 1.0, greedy: bool = True) -> Draft:
    levels: list[Tensor] = []
    proposal = grow(proposer, [model], nodes=nodes, temperature=temperature, greedy=greedy, keep=levels.append)
    slots = sum(level.shape[1] for level in levels)
    return to_drafts(proposal, levels, torch.tensor([temperature]), hidden=[HIDDEN[None, :slots]])[0]


def verified(draft: Draft, accepted: list[int], target: Tensor | None = None, temperature: float = 0.0) -> Verified:
    nodes = len(draft.tree)
    hits = torch.zeros(nodes, dtype=torch.bool)
    hits[accepted] = True
    return Verified(
        torch.tensor(draft.tree.tokens),
        torch.tensor(draft.tree.parents),
        torch.tensor(draft.tree.depths),
        hits,
        torch.tensor(draft.row),
        draft.logits,
        draft.hidden,
        draft.temperature,
        torch.randn(1 + nodes, VOCABULARY) if target is None else target,
        temperature,
    )


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tree.tokens, draft.tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_top", [2, 1000])
def test_c2t_learns_from_what_its_gate_will_read(entropy_top, temperature):
    model = ToyLM.random(VOCABULARY, DEPTH, seed=3)
    gate = Fixed.always(1.0)
    options = {"beta": 0.5, "second_pruning": False, "max_depth": DEPTH}
    reader = C2T(gate, C2TOptions(top_k=2, entropy_top=entropy_top, **options))
    grow(reader, [model], nodes=100, temperature=temperature)
    read = torch.cat([features[0] for features in gate.seen])  # [candidates, 3], unused columns among them
    draft = drafted(Eagle2(top_k=2, max_depth=DEPTH), model, nodes=100, temperature=temperature)
    found = examples.c2t(verified(draft, [0]), entropy_top=entropy_top)
    inputs = features(found["path"], found["entropy"], found["depth"], "paper")
    assert inputs.shape == (2 + 4 + 4, 3)
    for row in inputs.double():
        assert (read - row).abs().sum(1).min() < 1e-6
    assert found["label"].tolist() == [1.0] + [0.0] * 9
    assert sorted(found["depth"].tolist()) == [0] * 2 + [1] * 4 + [2] * 4


def test_type_2_learns_from_the_nodes_that_the_walk_reached():
    model = ToyLM.random(VOCABULARY, DEPTH, seed=5)
    draft = drafted(Mcsd(Shape.k_config((2, 2, 1))), model, nodes=50, temperature=0.8)
    paths, laws = paths_of(draft), log_probs_of(model, 0.8)
    first = paths.index(paths[0])
    second = next(node for node, parent in enumerate(draft.tree.parents) if parent == first)
    for accepted, reached, labels in (
        ([], [()], [0.0]),
        ([first], [(), paths[first]], [1.0, 0.0]),
        ([first, second], [(), paths[first], paths[second]], [1.0, 1.0, 0.0]),
    ):
        found = examples.mcsd_type2(verified(draft, accepted))
        expected = [laws[model.history(path)].exp().sort(descending=True).values for path in reached]
        assert found["label"].tolist() == labels
        assert found["features"].shape == (len(reached), 11)
        for row, law in zip(found["features"], expected, strict=True):
            assert row[0] == pytest.approx(-(law * law.log()).sum().item(), abs=1e-5)
            assert row[1:7].tolist() == pytest.approx(law.tolist(), abs=1e-6)
    leaf = next(node for node, path in enumerate(paths) if path[:2] == paths[second] and len(path) == 3)
    assert examples.mcsd_type2(verified(draft, [first, second, leaf]))["label"].tolist() == [1.0, 1.0, 1.0]


def test_type_2_reads_the_law_that_inference_reads():
    model, gate = ToyLM.random(VOCABULARY, DEPTH, seed=7), Fixed.always(1.0)
    shape = Shape.k_config((2, 1, 1))
    grow(Mcsd(shape, gate=gate), [model], nodes=50, temperature=0.8, greedy=True)
    draft = drafted(Mcsd(shape), model, nodes=50, temperature=0.8)
    found = examples.mcsd_type2(verified(draft, [0]))["features"].double()
    assert (gate.seen[0][0, 0] - found[0]).abs().max() < 1e-6
    assert (gate.seen[1][0, 0] - found[1]).abs().max() < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_type_1_learns_the_chance_of_the_first_child(temperature):
    model = ToyLM.random(VOCABULARY, DEPTH, seed=9)
    draft = drafted(StaticTree(Shape.k_config((2, 2))), model, nodes=50, temperature=0.8, greedy=False)
    paths = paths_of(draft)
    target = torch.randn(1 + len(paths), VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    found = examples.mcsd_type1(verified(draft, [], target, temperature))
    expected = []
    for node in (-1, 0, 1):  # those with children
        child = draft.tree.parents.index(node)
        x, path = draft.tree.tokens[child], paths[node] if node >= 0 else ()
        q = log_probs_of(model, 0.8)[model.history(path), x].exp().item()
        logits = target[1 + node]
        p = (logits / temperature).softmax(0)[x].item() if temperature else float(x == logits.argmax())
        expected.append(min(1.0, p / q))
    assert found["label"].tolist() == pytest.approx(expected, abs=1e-5)
    assert found["features"].tolist() == HIDDEN[:3].tolist()  # the root's slot, then those of the first level
    assert temperature == 0 or any(0 < value < 1 for value in expected)


def test_type_1_s_labels_average_to_the_acceptance():
    """The first child is drawn from q: E[min(1, p / q)] = sum min(p, q)."""
    model = ToyLM.random(VOCABULARY, 1, seed=2, scale=1.0)
    target = torch.randn(1 + 3, VOCABULARY, generator=torch.Generator().manual_seed(3))
    seeds, labels = 4000, []
    levels: list[Tensor] = []
    proposal = grow(StaticTree(Shape.k_config((3,))), [model] * seeds, nodes=3, keep=levels.append)
    for draft in to_drafts(proposal, levels, torch.ones(seeds), hidden=[torch.zeros(seeds, 1, 2)]):
        labels.append(examples.mcsd_type1(verified(draft, [], target, 1.0))["label"].item())
    acceptance = torch.minimum(target[0].softmax(0).double(), model.probs[0]).sum().item()
    assert sum(labels) / seeds == pytest.approx(acceptance, abs=0.02)


@pytest.mark.parametrize(("accepted", "rank"), [([], -1), ([0], 0), ([2], 2), ([3, 5], 3)])
def test_sequoia_counts_the_accepted_child_of_the_root(accepted, rank):
    draft = drafted(StaticTree(Shape.of([[0], [1], [2], [3], [0, 0], [3, 0]])), ToyLM.random(6, 2, seed=1), nodes=9)
    assert examples.sequoia(verified(draft, accepted))["rank"].tolist() == [rank]
