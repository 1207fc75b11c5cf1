"""Chains of heads: a tree of one child per node is the chain that vLLM drafts with the same checkpoint.

On Model Runner V1 against the chains of vLLM's own methods; a bundled head also against the module that was trained.
On V2, where vLLM has the samplers of heads that score pairs of candidates, against the path that such a sampler walks.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.copies import changed
from tests.engine.engines import PAIR, PROMPTS, TARGET, V2, Engines, generate, runner_of
from tests.engine.heads import HEADS
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head
from vllm_adaptive_tree.heads.training import Teacher

ON_V1 = pytest.mark.skipif(V2, reason="vLLM's chains of Model Runner V2 are not those of V1")
ON_V2 = pytest.mark.skipif(not V2, reason="vLLM has their samplers on Model Runner V2 alone")

TOKENS = 30
CHAINED: dict[str, dict[str, Any]] = {  # of `HEADS`, and how vLLM's method is asked for
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "eagle3 reduced": {"method": "eagle3"},
    "eagle3.1": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
WALKED = [name for name in ("dflash2", "lilicorr", "xpress", "xpress candidates") if name in HEADS]
LENGTHS = {PROMPTS[3]: 4, PROMPTS[10]: 10, PROMPTS[13]: 8, PROMPTS[15]: 7}
"""Tokens for each prompt of a walk, so that the requests end one after the other."""


def chains(engines: Engines, config: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """Text up to the root -> its draft, while the last tokens of a request are not near."""
    llm = engines.start(config, max_num_batched_tokens=64, max_num_seqs=4)
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    drafted = dict[tuple[int, ...], list[int]]()
    update = scheduler.update_draft_token_ids

    def spied(drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = scheduler.requests.get(name)
            if request is not None and 0 < request.num_output_tokens < TOKENS - 1:
                drafted[tuple(request.all_token_ids)] = list(tokens)
        update(drafts)

    scheduler.update_draft_token_ids = spied
    generate(llm, PROMPTS[:4], SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    return drafted


def said_everywhere(head: str, folder: Path) -> str:
    """A copy of a head that says what is in its `eagle_config`, and its layers, wherever vLLM's own method looks."""
    said = json.loads((Path(head) / "config.json").read_text()).get("eagle_config", {})
    if said:
        said = {**said, "eagle_aux_hidden_state_layer_ids": heads.FOUR}
    return changed(head, folder, **said, eagle_config=said)


@ON_V1
@pytest.mark.parametrize("name", CHAINED)
def test_a_tree_of_one_child_is_vllm_s_chain(engines: Engines, name: str, tmp_path: Path) -> None:
    length, kind = 4, name.partition(" ")[0].removesuffix(".1")
    make = partial(heads.peagle, architectures=["LlamaForCausalLMEagle3"]) if name == "peagle" else HEADS[name]
    common = {"model": make(tmp_path / "head"), "num_speculative_tokens": length}  # of P-EAGLE vLLM takes no other
    tree = {"draft": kind, "budget": None, "shape": [1] * length, "children": "top_k"}
    ours = chains(engines, {"method": "static_tree", **common, "tree": tree})
    same_head = said_everywhere(common["model"], tmp_path / "same")
    theirs = chains(engines, {**common, **CHAINED[name], "model": same_head})
    both = ours.keys() & theirs.keys()
    same = sum(ours[text] == theirs[text] for text in both)
    print(f"{name}: {same} of {len(both)} chains are the same")
    assert len(both) > 4 * (TOKENS - 4)
    assert same >= 0.95 * len(both), "more than near ties differ"


def predicted(teacher: Teacher, head: Head, text: list[int], chain: list[int]) -> list[torch.Tensor]:
    """Logits [V] of each token of a chain below the last token of `text`, given those before it."""
    lesson, last = teacher(torch.tensor([text + chain])), len(text) - 2
    states = head(lesson.auxiliary, lesson.embedded, len(chain))
    return [F.linear(normed[0, last + step], teacher.output(head)) for step, normed in enumerate(states)]


@ON_V1
@torch.no_grad()
def test_vllm_s_chain_is_that_of_the_trained_module(engines: Engines) -> None:
    folder, depth = PAIR / "head", 3
    config = json.loads((folder / "config.json").read_text())
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    module = Head(Dimensions.of(config), len(layers))
    module.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    teacher = Teacher(LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32), layers)
    drafted = chains(engines, {"method": "eagle3", "model": str(folder), "num_speculative_tokens": depth})
    whole = {text: chain for text, chain in drafted.items() if len(chain) == depth}
    assert len(whole) > 4 * 5
    for text, chain in whole.items():
        for logits, token in zip(predicted(teacher, module, list(text), chain), chain, strict=True):
            assert logits.max() - logits[token] < 1e-3, "a tie at most"


class Walks:
    """By the text up to the root: our chain, and vLLM's walk from the same hidden states, by the scores of its
    speculator, or what the passes of its refiner end in."""

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
        hidden = block.predicting[:requests]
        if block.whole_block:
            refiner, roots = block.model.model.xpress_head, block.tokens[:requests].long()
            logits = block.model.compute_draft_logits(hidden)
            chain = refiner.jacobi_refine_greedy(logits, hidden, roots, roots, num_passes=1 + heads.DEPTH)
            refined: list[list[int]] = chain.tolist()
            return refined
        found = block.model.compute_candidates(hidden.flatten(0, 1))
        candidates, logits = (one.unflatten(0, hidden.shape[:2]) for one in found)
        scores = block._score_candidates(candidates, logits, hidden)
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


@ON_V2
@pytest.mark.parametrize("name", WALKED)
def test_a_tree_of_one_child_is_vllm_s_walk(
    engines: Engines, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, two requests at a time: the others join one that decodes, and move to another row when it ends. And each
    chain is that of the request alone."""
    tree = {"budget": None, "shape": [1] * heads.DEPTH, "children": "top_k"}
    spec = {"method": "static_tree", "model": HEADS[name](tmp_path / "head"), "num_speculative_tokens": 1 + heads.DEPTH}
    llm = engines.start({**spec, "tree": tree}, max_num_seqs=2)

    def walks(prompts: Sequence[str]) -> Walks:
        with monkeypatch.context() as patch:
            found = Walks(runner_of(llm), patch)
            params = [SamplingParams(temperature=0, max_tokens=LENGTHS[one], ignore_eos=True) for one in prompts]
            llm.generate(prompts, params, use_tqdm=False)
        assert found.ours == found.theirs
        return found

    together = walks(list(LENGTHS))
    assert together.joined > 1
    assert any(len(rows) > 1 for rows in together.rows.values())
    assert len(together.ours) > 20
    alone = {text: chain for prompt in LENGTHS for text, chain in walks([prompt]).ours.items()}
    assert len(alone) > 20
    # after a request's last step vLLM 0.33 drafts no more, unless another goes on
    assert alone == {text: chain for text, chain in together.ours.items() if text in alone}
