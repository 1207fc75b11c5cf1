"""A tree of one child per node proposes what vLLM's own chain of the same head proposes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import PROMPTS, V2, Engines, generate

pytestmark = pytest.mark.skipif(V2, reason="vLLM's chains of Model Runner V2 are not those of V1")

LENGTH = 4
TOKENS = 30
HEADS: dict[str, Callable[[Path], str]] = {
    "eagle": heads.eagle,
    "eagle3": heads.eagle3,
    "eagle3, reduced vocabulary": partial(heads.eagle3, reduced=True),
    "peagle": partial(heads.peagle, architectures=["LlamaForCausalLMEagle3"]),  # vLLM takes no other
    "medusa": partial(heads.medusa, heads=LENGTH),
}
OF_VLLM: dict[str, dict[str, Any]] = {"peagle": {"method": "eagle3", "parallel_drafting": True}}
"""What vLLM is asked for, if it is not the kind."""


def chains(engines: Engines, config: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """Text up to the root -> its draft, while the last tokens of a request are not near."""
    llm = engines.start(config, max_num_batched_tokens=64, max_num_seqs=4)
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    found = dict[tuple[int, ...], list[int]]()
    update = scheduler.update_draft_token_ids

    def spied(drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = scheduler.requests.get(name)
            if request is not None and 0 < request.num_output_tokens < TOKENS - 1:
                found[tuple(request.all_token_ids)] = list(tokens)
        update(drafts)

    scheduler.update_draft_token_ids = spied
    generate(llm, PROMPTS[:4], SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    return found


@pytest.mark.parametrize("name", [pytest.param(one, marks=[heads.WITH_MEDUSA] * (one == "medusa")) for one in HEADS])
def test_the_same_chain(engines: Engines, name: str, tmp_path: Path) -> None:
    head = HEADS[name](tmp_path / "head")
    common = {"model": head, "num_speculative_tokens": LENGTH}
    kind = name.partition(",")[0]
    tree = {"draft": kind, "budget": None, "shape": [1] * LENGTH, "children": "top_k"}
    ours = chains(engines, {"method": "static_tree", **common, "tree": tree})
    theirs = chains(engines, {**common, **OF_VLLM.get(kind, {"method": kind})})
    both = ours.keys() & theirs.keys()
    same = sum(ours[text] == theirs[text] for text in both)
    print(f"{name}: {same} of {len(both)} chains are the same")
    assert len(both) > 4 * (TOKENS - 4)
    assert same >= 0.95 * len(both), "more than near ties differ"
