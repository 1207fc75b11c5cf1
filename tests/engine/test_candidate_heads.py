"""Heads that score pairs of candidates: a tree of one child per node is the path that vLLM's own sampler walks."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import PROMPTS, V2, Engines, generate, runner_of

pytestmark = pytest.mark.skipif(not V2, reason="vLLM has their samplers on Model Runner V2 alone")

HEADS = {"dflash2": heads.dflash2, "lilicorr": heads.lilicorr}


@pytest.mark.parametrize("kind", HEADS)
def test_a_chain_is_vllm_s_walk(engines: Engines, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, from the same hidden states: by the scores of vLLM's speculator, and the sampler that it has them walked
    by."""
    tree = {"budget": None, "shape": [1] * heads.DEPTH, "children": "top_k"}
    spec = {"method": "static_tree", "model": HEADS[kind](tmp_path / "head"), "num_speculative_tokens": 1 + heads.DEPTH}
    llm = engines.start({**spec, "tree": tree}, max_num_seqs=4)
    speculator = runner_of(llm).speculator
    block, trees, chains = speculator.block, speculator.trees, list[tuple[Tensor, Tensor]]()

    def walked(requests: int, levels: int) -> Any:
        grown = trees(requests, levels)
        hidden = block.predicting[: requests * heads.DEPTH]
        found = (one.unflatten(0, (requests, heads.DEPTH)) for one in block.model.compute_candidates(hidden))
        candidates, logits = found
        scores = block._score_candidates(candidates, logits, hidden.unflatten(0, (requests, heads.DEPTH)))
        block.candidate_sampler.sample(
            candidates,
            scores,
            requests,
            block.sample_pos,
            block.sample_idx_mapping,
            block.temperature,
            block.seeds,
            block.draft_tokens,
            None,
            block.use_fp64_gumbel,
        )
        ours = grown.proposal.tree.tokens[:, : heads.DEPTH]
        chains.extend(zip(ours.clone(), block.draft_tokens[:requests].clone(), strict=True))
        return grown

    monkeypatch.setattr(speculator, "trees", walked)
    generate(llm, PROMPTS[:3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    drafted = [(ours, theirs) for ours, theirs in chains if (ours >= 0).any()]
    assert len(drafted) > 20
    for ours, theirs in drafted:
        assert ours.tolist() == theirs.tolist()
