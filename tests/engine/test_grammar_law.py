"""Sampled requests with a grammar, without a seed: their law is the target's under the grammar's mask, by the rule of
the pair."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import DRAFT, PROMPTS, TARGET, V2, Engines, metric
from tests.engine.test_law import chi_square
from vllm_adaptive_tree.engine.grammar.walk import TreeTokens
from vllm_adaptive_tree.engine.v1 import runner as runner_v1

if V2:
    from vllm_adaptive_tree.engine.v2 import draft_tokens

PROMPT = PROMPTS[1]
# Of what the draft says behind " objects" more than half is refused, and of the rest the target likes another part.
PARTS = ([" objects"], [".", " to", " and", " for", " from"], [" the", " a", " it"])
TEXTS = ["".join(parts) for parts in product(*PARTS)]
REGEX = "".join("(" + "|".join(part.replace(".", r"\.") for part in parts) + ")" for parts in PARTS)
TOKENS = 3
DRAWS, AT_ONCE = (256, 64) if V2 else (2048, 256)  # the interpreter is slow
NODES = 6
SURE = 1e-6  # a right law has a p value below it once in a million runs

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one_hot": ("eagle2", "target_only", {}),
    "without_replacement": ("dyspec", "rrsw", {}),
    "iid": ("static_tree", "k_seq", {"shape": [3, 2, 1]}),
    "hub_pair": ("static_tree", "spechub", {"shape": "binary"}),
    "top_k_plus_one": ("static_tree", "greedy_multi_draft", {"shape": [3, 2, 2]}),
    "without_replacement, whole paths": ("static_tree", "traversal", {"shape": [2, 2, 1]}),
}
if V2:
    METHODS = {name: METHODS[name] for name in ("without_replacement", "without_replacement, whole paths")}


@pytest.fixture(scope="module")
def exact() -> dict[tuple[int, ...], float]:
    """Every continuation that target and grammar allow, with its probability."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    pieces, end = [tokenizer.decode([token]) for token in range(len(tokenizer))], tokenizer.eos_token_id
    prompt = tokenizer(PROMPT).input_ids

    def allowed(text: str) -> list[int]:
        more = [i for i, piece in enumerate(pieces) if piece and any(one.startswith(text + piece) for one in TEXTS)]
        return [*more, end] if text in TEXTS else more

    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        ended = {path: mass for path, mass in found.items() if path[-1:] == (end,)}
        open_ = [path for path in found if path not in ended]
        with torch.inference_mode():
            logits = target(torch.tensor([[*prompt, *path] for path in open_])).logits[:, -1].double()
        for path, row in zip(open_, logits, strict=True):
            tokens = allowed("".join(pieces[token] for token in path))
            for token, share in zip(tokens, row[tokens].softmax(-1).tolist(), strict=True):
                ended[*path, token] = found[path] * share
        found = ended
    return found


def p_value(engines: Engines, exact: dict[tuple[int, ...], float], config: dict[str, Any] | None) -> float:
    llm = engines.start(config, max_num_seqs=AT_ONCE, max_num_batched_tokens=8192, max_model_len=64)
    grammar = StructuredOutputsParams(regex=REGEX)
    sampling = SamplingParams(n=AT_ONCE, temperature=1.0, max_tokens=TOKENS, structured_outputs=grammar)
    outputs = llm.generate([PROMPT] * (DRAWS // AT_ONCE), sampling, use_tqdm=False)
    drawn = Counter(tuple(one.token_ids) for output in outputs for one in output.outputs)
    assert drawn.total() == DRAWS
    if not drawn.keys() <= exact.keys():
        return 0.0
    if config is not None:
        assert metric(llm, "spec_decode_num_accepted_tokens") > DRAWS / 64, "too little of what was drawn was drafted"
    p, cells = chi_square(drawn, exact)
    print(f"{config and config['method']}: p = {p:.3g}, {cells} cells of {len(exact)}")
    assert cells > (4 if V2 else 20)
    return p


def config(name: str) -> dict[str, Any]:
    method, rule, options = METHODS[name]
    return {
        "method": method,
        "model": DRAFT,
        "num_speculative_tokens": 21 if rule == "greedy_multi_draft" else NODES,
        "rejection_sample_method": rule,
        "tree": {"budget": None, **options},
    }


def test_without_speculation(engines: Engines, exact: dict[tuple[int, ...], float]) -> None:
    assert p_value(engines, exact, None) > SURE


@pytest.mark.parametrize("name", METHODS)
def test_every_kind_of_children(engines: Engines, exact: dict[tuple[int, ...], float], name: str) -> None:
    assert p_value(engines, exact, config(name)) > SURE


def test_masks_of_a_chain_are_caught(
    engines: Engines, exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_tokens if V2 else runner_v1, "TreeTokens", lambda tokens, parents: TreeTokens.of(tokens))
    assert p_value(engines, exact, config("without_replacement")) < SURE
