"""EAGLE-2 (arXiv 2406.16858) against the paper: all K * K children of every level recorded, then reranked."""

import pytest
import torch

from tests.oracles.growth import Recorder, as_the_engine, grow, log_probs_of, models_of
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.testing.models import Path, ToyLM
from vllm_adaptive_tree.testing.well_formed import paths_of

Scores = dict[Path, float]


def expanded(model: ToyLM, *, top_k: int, max_depth: int, temperature: float = 1.0) -> Scores:
    """Every node that the paper records, and its joint score."""
    law = log_probs_of(model, temperature)
    beam: Scores = {(): 0.0}
    recorded: Scores = {}
    for _ in range(max_depth):
        children: Scores = {}
        for path, score in beam.items():
            best = law[model.history(path)].topk(min(top_k, model.vocabulary))
            for chance, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children[*path, token] = score + chance
        recorded |= children
        beam = dict(sorted(children.items(), key=lambda node: -node[1])[:top_k])
    return recorded


def reranked(recorded: Scores, nodes: int) -> Scores:
    return dict(sorted(recorded.items(), key=lambda node: -node[1])[:nodes])


@pytest.mark.parametrize("options", [{}, {"agree": as_the_engine}])
@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 30, 200])  # fewer than K .. more than there are
@pytest.mark.parametrize(("vocabulary", "depth", "top_k"), [(5, 4, 3), (4, 4, 2), (3, 4, 10), (6, 3, 4), (4, 4, 1)])
def test_the_tree_of_the_paper(vocabulary, depth, top_k, nodes, options):
    models = models_of(vocabulary, depth, 12)
    temperature = [0.7, 1.0, 1.5] * 4
    proposal = grow(Eagle2(max_depth=depth, top_k=top_k), models, nodes=nodes, temperature=temperature, **options)
    for r, tree in enumerate(paths_of(proposal)):
        recorded = expanded(models[r], top_k=top_k, max_depth=depth, temperature=temperature[r])
        best = reranked(recorded, nodes)
        assert len(tree) == len(best)
        assert set(tree) == set(best)
        weights = proposal.tree.log_weight[r, : len(tree)].tolist()
        assert weights == pytest.approx([best[path] for path in tree], abs=1e-12)
        assert weights == sorted(weights, reverse=True)


def test_the_budget_may_hold_everything_that_is_expanded():
    (model,) = models_of(5, 4, 1)
    (tree,) = paths_of(grow(Eagle2(max_depth=4, top_k=3), [model], nodes=200))
    assert len(tree) == 3 + 3 * 9


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_no_node_has_more_than_k_children_and_no_level_more_than_k_inner_nodes(top_k):
    models = models_of(5, 4, 12)
    proposer = Eagle2(max_depth=4, top_k=top_k)
    recorder = Recorder(models)
    _, read, drawn, *_ = proposal = grow(proposer, models, nodes=60, drafter=recorder)
    most = 0
    for paths in paths_of(proposal):
        for above in {path[:-1] for path in paths}:
            most = max(most, sum(path[:-1] == above for path in paths))
    assert most == proposer.max_children == top_k
    assert max(recorder.widths) == top_k
    assert (drawn[:, 0] == top_k).all()
    assert torch.equal(drawn[:, 1:], torch.where(read > 0, top_k, 0))


def test_a_wide_beam_is_opt_tree():
    models = models_of(4, 4, 12)
    narrow, wide, best = (
        paths_of(grow(proposer, models, nodes=9))
        for proposer in (Eagle2(max_depth=4, top_k=1), Eagle2(max_depth=4, top_k=9), OptTree(max_depth=4, threshold=-1))
    )
    assert wide == best
    assert narrow != best


def test_a_request_in_a_batch_is_grown_as_if_alone():
    models = models_of(4, 5, 6)
    proposer = Eagle2(max_depth=5, top_k=3)
    together = paths_of(grow(proposer, models, nodes=10, agree=as_the_engine))
    assert together == [paths_of(grow(proposer, [model], nodes=10, agree=as_the_engine))[0] for model in models]


def test_growth_ends_where_nothing_can_enter_the_tree():
    """The paper goes on to its depth; the tree is the same."""
    models = models_of(3, 6, 6)
    recorder = Recorder(models)
    trees = paths_of(grow(Eagle2(max_depth=6, top_k=3), models, nodes=1, drafter=recorder, agree=as_the_engine))
    assert recorder.widths == []
    assert trees == [[(model.probs[0].argmax().item(),)] for model in models]
