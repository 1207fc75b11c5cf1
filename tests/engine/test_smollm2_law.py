"""The joint law of SmolLM2's next tokens at T = 1, over all of its 49,152 tokens, is that without speculation.

Slow, and skipped where the package index is out of reach: `pytest -m slow -s tests/engine/test_smollm2_law.py`.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.engines import V2, Engines
from tests.engine.test_law import FirstTrees, chi_square
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD
from vllm_adaptive_tree.files import cache_folder
from vllm_adaptive_tree.models.fetch import fetch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(V2, reason="the interpreter takes hours for its vocabulary")]

DRAWS, TOKENS, BEST = int(os.environ.get("LAW_DRAWS", "4000")), 3, 16
QUESTION = "What is the name of the largest planet?"
REST = (-1,)
"""Continuations that are not among the best of the best."""
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "adaptive_tree": ("auto", {}),
    "dyspec": ("rrsw", {}),
    "static_tree": ("spechub", {"shape": "binary"}),
}


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return fetch("smollm2", cache_folder() / "models", say=print).folder
    except ValueError as error:
        pytest.skip(str(error))


def law(model: Path, prompt: str) -> dict[tuple[int, ...], float]:
    """Probability of the best continuations of the best, and of all others together."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(model)(prompt, add_special_tokens=False).input_ids
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        with torch.inference_mode():
            p = target(torch.tensor([[*ids, *path] for path in found])).logits[:, -1].double().softmax(-1)
        best = p.topk(BEST)
        rows = zip(found.items(), best.indices.tolist(), best.values.tolist(), strict=True)
        longer = {
            (*path, t): mass * share for (path, mass), ts, shares in rows for t, share in zip(ts, shares, strict=True)
        }
        found = dict(sorted(longer.items(), key=lambda item: -item[1])[: 4 * BEST])
    return {**found, REST: 1 - sum(found.values())}


@pytest.mark.parametrize("method", PAIRS)
def test_tokens_follow_the_law_of_a_real_model(
    engines: Engines, model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, options = PAIRS[method]
    llm = engines.start(
        {
            "method": method,
            "model": SMOLLM2_HEAD,
            "num_speculative_tokens": 6,
            "rejection_sample_method": rule,
            "tree": {"budget": None, **options},
        },
        model=str(model),
        kv_cache_memory_bytes=1 << 30,
        max_model_len=128,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
    )
    (prompt,) = chat_prompts(model, [QUESTION])
    exact = law(model, prompt)
    trees = FirstTrees(len(llm.get_tokenizer()(prompt, add_special_tokens=False).input_ids), monkeypatch)
    sampling = SamplingParams(n=100, temperature=1.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([prompt] * (DRAWS // 100), sampling, use_tqdm=False)
    drawn = Counter(tuple(one.token_ids) for output in outputs for one in output.outputs)
    assert drawn.total() == DRAWS
    known = Counter({path: count for path, count in drawn.items() if path in exact})
    known[REST] = DRAWS - known.total()
    p, cells = chi_square(known, exact)
    print(f"{method} {rule}: p = {p:.3g}, {cells} cells, rest {exact[REST]:.0%}, depth >= 2 {trees.share(2):.1%}")
    assert trees.share(1) > 0.2, "too little of what was drawn came from a tree"
    assert exact[REST] < 0.7
    assert cells > 10
    assert p > 1e-4
