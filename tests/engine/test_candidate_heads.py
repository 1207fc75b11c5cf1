"""Heads that score pairs of candidates: a tree of one child per node is the path that vLLM's own sampler walks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import PROMPTS, V2, Engines, runner_of

pytestmark = pytest.mark.skipif(not V2, reason="vLLM has their samplers on Model Runner V2 alone")

HEADS = {"dflash2": heads.dflash2, "lilicorr": heads.lilicorr}
LENGTHS = {PROMPTS[3]: 4, PROMPTS[10]: 10, PROMPTS[13]: 8, PROMPTS[15]: 7}
"""Tokens for each prompt, so that the requests end one after the other."""


class Chains:
    """By the text up to the root: our chain, and vLLM's walk from the same hidden states, by the scores of its
    speculator."""

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch):
        self.ours, self.theirs = dict[tuple[int, ...], list[int]](), dict[tuple[int, ...], list[int]]()
        self.joined, self.rows = 0, dict[tuple[int, ...], set[int]]()
        """Requests with their first root in a batch that decodes; the rows of each prompt's request."""
        self.speculator, self.states = runner.speculator, runner.req_states
        self.block, self.trees = self.speculator.block, self.speculator.trees
        monkeypatch.setattr(self.speculator, "trees", self._walked)

    def _walked(self, requests: int, levels: int) -> Any:
        grown, inputs = self.trees(requests, levels), self.speculator.inputs
        walks = self._walks(requests)
        tokens = grown.proposal.tree.tokens[:, : heads.DEPTH].tolist()
        new = list[bool]()
        for row, (request, root) in enumerate(zip(inputs.request.tolist()[:requests], inputs.position, strict=False)):
            if inputs.alive[row]:
                text = tuple(self.states.all_token_ids.gpu[request, : root + 1].tolist())
                self.ours[text], self.theirs[text] = tokens[row], walks[row]
                length = self.states.prompt_len.np[request]
                self.rows.setdefault(text[:length], set()).add(row)
                new.append(int(root) == length)
        self.joined += sum(new) if not all(new) else 0
        return grown

    def _walks(self, requests: int) -> list[list[int]]:
        block = self.block
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
        walked: list[list[int]] = block.draft_tokens[:requests].tolist()
        return walked


@pytest.mark.parametrize("kind", HEADS)
def test_a_chain_is_vllm_s_walk(engines: Engines, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, two requests at a time: the others join one that decodes, and move to another row when it ends. And each
    chain is that of the request alone."""
    tree = {"budget": None, "shape": [1] * heads.DEPTH, "children": "top_k"}
    spec = {"method": "static_tree", "model": HEADS[kind](tmp_path / "head"), "num_speculative_tokens": 1 + heads.DEPTH}
    llm = engines.start({**spec, "tree": tree}, max_num_seqs=2)

    def chains(prompts: Sequence[str]) -> Chains:
        with monkeypatch.context() as patch:
            found = Chains(runner_of(llm), patch)
            params = [SamplingParams(temperature=0, max_tokens=LENGTHS[one], ignore_eos=True) for one in prompts]
            llm.generate(prompts, params, use_tqdm=False)
        assert found.ours == found.theirs
        return found

    together = chains(list(LENGTHS))
    assert together.joined > 1
    assert any(len(rows) > 1 for rows in together.rows.values())
    assert len(together.ours) > 20
    alone = [chains([prompt]).ours for prompt in LENGTHS]
    assert together.ours == {text: chain for found in alone for text, chain in found.items()}
