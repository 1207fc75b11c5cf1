"""The joint law of the next tokens, drawn many times in the engine, is that of the target alone.

Slow: `pytest -m slow -s tests/engine/test_law.py` prints the figures; LAW_DRAWS=4000 draws less often.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import DRAFT, PROMPTS, TARGET, V2, Engines, runner_of
from tests.engine.heads import VOCABULARY
from tests.engine.leaning import Bonus, lean
from vllm_adaptive_tree.step import step

pytestmark = pytest.mark.slow

DRAWS, TOKENS, TOP_K = (2_000, 3, 4) if V2 else (20_000, 4, 4)  # the interpreter is slow, and pays for every row
DRAWS = int(os.environ.get("LAW_DRAWS", DRAWS))
PROMPT = PROMPTS[9]  # the draft agrees with the target here, but not too much
COPIED = ["\ndef _is\n", "\nclass Sub\n", "\n#\n#\n"]
"""Texts after the prompt's earlier occurrences."""
FEW = 10  # draws expected of a cell that stands alone

PLAIN = {"temperature": 1.0, "top_k": TOP_K}
CUT = {"temperature": 0.8, "top_k": TOP_K, "top_p": 0.9}

SMALL = [2, 2] if V2 else None

PAIRS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "top_k children, auto": ("static_tree", "auto", {"shape": [2, 2, 1], "children": "top_k"}, PLAIN),
    "adaptive_tree, traversal": ("adaptive_tree", "auto", {}, PLAIN),
    "adaptive_tree, chosen children": ("adaptive_tree", "auto", {"drawn_from": 2}, PLAIN),
    "dyspec, rrsw": ("dyspec", "rrsw", {}, PLAIN),
    "dyspec, rrsw, top_p": ("dyspec", "rrsw", {}, CUT),
    "without replacement, traversal": ("static_tree", "traversal", {"shape": [2, 2, 1]}, PLAIN),
    "iid, rrs": ("static_tree", "rrs", {"shape": [3, 2, 1]}, PLAIN),
    "iid, k_seq": ("static_tree", "k_seq", {"shape": [3, 2, 1]}, PLAIN),
    "iid, traversal": ("static_tree", "traversal", {"shape": [3, 2, 1], "children": "iid"}, PLAIN),
    "hub pairs, spechub": ("static_tree", "spechub", {"shape": "binary"}, PLAIN),
    "top k and one, greedy_multi_draft": ("static_tree", "greedy_multi_draft", {"shape": SMALL or [3, 2, 2]}, PLAIN),
}
THREE_OF_FOUR = torch.arange(VOCABULARY)[torch.arange(VOCABULARY) % 4 != 3]
HEADS: dict[str, Callable[[Path], str]] = {
    "eagle3": partial(heads.eagle3, vocabulary=THREE_OF_FOUR),
    "peagle": heads.peagle,
    "dspark": heads.dspark,
    "dflash": heads.dflash,
    "dflash2": partial(heads.dflash2, scale=0.5),
}
DRAFTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "head with a reduced vocabulary, rrsw": ("dyspec", "rrsw", {"draft": "eagle3"}, PLAIN),
    "head with a reduced vocabulary, spechub": (
        "static_tree",
        "spechub",
        {"draft": "eagle3", "shape": "binary"},
        PLAIN,
    ),
    "head with a reduced vocabulary, traversal": (
        "static_tree",
        "traversal",
        {"draft": "eagle3", "shape": [2, 2, 1]},
        PLAIN,
    ),
    "adaptive_tree with a head": ("adaptive_tree", "auto", {"draft": "eagle3"}, PLAIN),
    "adaptive_tree with a conditional head": ("adaptive_tree", "auto", {"draft": "dspark"}, PLAIN),
    "a conditional head, rrsw": ("dyspec", "rrsw", {"draft": "dspark"}, PLAIN),
    "a conditional head, traversal": ("static_tree", "traversal", {"draft": "dspark", "shape": [2, 2, 1]}, PLAIN),
    "marginals, rrsw": ("dyspec", "rrsw", {"draft": "dflash"}, PLAIN),
    "pairs of candidates, rrsw": ("dyspec", "rrsw", {"draft": "dflash2"}, PLAIN),
    "mask tokens, rrsw": ("dyspec", "rrsw", {"draft": "peagle"}, PLAIN),
    "ngram, rrsw": ("dyspec", "rrsw", {}, PLAIN),
    "ngram, traversal": ("static_tree", "traversal", {"shape": [2, 2, 1]}, PLAIN),
    "a model and ngram, target_only": ("opt_tree", "target_only", {"lookup": "ngram", "threshold": 0}, PLAIN),
    "a model and ngram among drawn children": ("adaptive_tree", "auto", {"lookup": "ngram"}, PLAIN),
}
if heads.XPRESS:
    HEADS["xpress"] = partial(heads.xpress, most=512)
    DRAFTS["paths of candidates, rrsw"] = "dyspec", "rrsw", {"draft": "xpress"}, PLAIN
WRONG: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "top_k children, rrsw": ("static_tree", "rrsw", {"shape": [2, 2, 1], "children": "top_k"}, PLAIN),
    "without replacement, k_seq": (
        "static_tree",
        "k_seq",
        {"shape": [3, 2, 1], "children": "without_replacement"},
        PLAIN,
    ),
}

if V2:
    del WRONG["without replacement, k_seq"]  # too few draws to see it
    del DRAFTS["a model and ngram, target_only"]  # the interpreter takes long for so many contexts
    DRAFTS = {name: pair for name, pair in DRAFTS.items() if pair[2].get("draft") != "peagle"}  # V1 alone has it
    # flat pairs fill small trees, and DySpec raises an "auto" threshold from step to step until depth 2 is rare
    DRAFTS["pairs of candidates, rrsw"] = ("dyspec", "rrsw", {"draft": "dflash2", "mode": "heap"}, PLAIN)
    PAIRS["dyspec, rrsw, depth first"] = PAIRS["dyspec, rrsw"]  # as the rows of large trees stand
NODES = 6 if V2 else 14
# `auto`: the target's own draw at every row; `rrsw`: DySpec's, which grow wide where a draft is flat
OF_A_RULE = {"auto": 3, "rrsw": 12} if V2 else {"greedy_multi_draft": 21}


def law(params: dict[str, Any], text: str = PROMPT) -> dict[tuple[int, ...], float]:
    """Every continuation that the target can give, with its probability."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(TARGET)(text).input_ids
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = target(torch.tensor([[*prompt, *path] for path in found])).logits[:, -1]
        best = (logits / params["temperature"]).topk(TOP_K)
        p = best.values.double().softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p >= params.get("top_p", 1.0), 0.0)  # the tokens before it are enough
        p = p / p.sum(-1, keepdim=True)
        rows = zip(found.items(), best.indices.tolist(), p.tolist(), strict=True)
        found = {
            (*path, token): mass * share
            for (path, mass), tokens, shares in rows
            for token, share in zip(tokens, shares, strict=True)
            if share > 0
        }
    return found


def chi_square(drawn: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """p value and cells; the rarest cells count as one."""
    expected = {path: mass * drawn.total() for path, mass in exact.items()}
    cells = [(drawn[path], count) for path, count in expected.items() if count >= FEW]
    rest = [(drawn[path], count) for path, count in expected.items() if count < FEW]
    if rest:
        cells.append((sum(seen for seen, _ in rest), sum(count for _, count in rest)))
    statistic = sum((seen - count) ** 2 / count for seen, count in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item(), len(cells)


def by_depth(exact: dict[tuple[int, ...], float], first: int) -> Bonus:
    """For random heads: what the target says of each depth, whatever the path; `first`: position of depth 1."""
    shares = torch.full((TOKENS, VOCABULARY), 1e-4)
    for path, mass in exact.items():
        for depth, token in enumerate(path):
            shares[depth, token] += mass
    return lambda _, position: shares[min(position - first, TOKENS - 1)].log()


class FirstTrees:
    """Depth of acceptance in the first tree of every request."""

    def __init__(self, root: int, monkeypatch: pytest.MonkeyPatch):
        self.depths: Counter[int] = Counter()
        original = step.accept

        def accept(pair: Any, target: Any, verification: Any, requests: Any) -> Any:
            accepted = original(pair, target, verification, requests)
            position = requests.root if V2 else torch.tensor(requests.positions)
            self.depths.update((accepted.nodes[position == root] >= 0).sum(1).tolist())
            return accepted

        monkeypatch.setattr(step, "accept", accept)

    def share(self, depth: int) -> float:
        return sum(count for reached, count in self.depths.items() if reached >= depth) / self.depths.total()


def drawn_by(
    engines: Engines,
    pair: tuple[str, str, dict[str, Any], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    draft: str = DRAFT,
    text: str = PROMPT,
) -> tuple[float, float]:
    """p value, and the share of draws with an accepted node of depth 2 or more in their first tree."""
    method, rule, options, params = pair
    fewest = NODES if options.get("draft") == "dspark" else 0  # V2 wants a node for each token of its block
    nodes = max(fewest, OF_A_RULE.get(rule, NODES))
    llm = engines.start(
        {
            "method": method,
            "model": draft,
            "num_speculative_tokens": nodes,
            "rejection_sample_method": rule,
            "tree": {"budget": None, **options},
        },
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=64 if text == PROMPT else 128,
    )
    exact, prompt = law(params, text), llm.get_tokenizer()(text).input_ids
    if "draft" in options:
        lean(runner_of(llm), by_depth(exact, len(prompt)), monkeypatch.setattr)
    started = time.monotonic()
    sampling = SamplingParams(n=100, max_tokens=TOKENS, ignore_eos=True, detokenize=False, **params)
    trees = FirstTrees(len(prompt), monkeypatch)
    outputs = llm.generate([text] * (DRAWS // 100), sampling, use_tqdm=False)
    drawn = Counter(tuple(one.token_ids) for output in outputs for one in output.outputs)
    assert drawn.total() == trees.depths.total() == DRAWS
    assert drawn.keys() <= exact.keys()
    p, cells = chi_square(drawn, exact)
    print(
        f"{method} {rule} {options} {params}: p = {p:.3g}, {cells} cells of {len(exact)}, depth >= 2 "
        f"{trees.share(2):.1%}, {time.monotonic() - started:.0f} s"
    )
    return p, trees.share(2)


@pytest.mark.parametrize("name", PAIRS)
def test_tokens_follow_the_target_s_law(engines: Engines, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("depth first"):
        from vllm_adaptive_tree.engine.v2 import verification

        monkeypatch.setattr(verification, "IN_GENERATION_ORDER", 0)
    p, deep = drawn_by(engines, PAIRS[name], monkeypatch)
    assert deep >= (0.1 if V2 else 0.2), "too little of what was drawn came from a tree"
    assert p > 1e-4


@pytest.mark.parametrize("name", DRAFTS)
def test_other_drafts(engines: Engines, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DRAFTS[name][2].get("draft")
    draft = DRAFT if name.startswith("a model") else "ngram"
    text = "".join(PROMPT + more for more in COPIED) + PROMPT
    if kind is not None:
        draft, text = HEADS[kind](tmp_path / "head"), PROMPT
    p, deep = drawn_by(engines, DRAFTS[name], monkeypatch, draft=draft, text=text)
    assert deep >= (0.15 if kind in (None, "eagle3") else 0.1), "too little of what was drawn came from a tree"
    assert p > 1e-4


@pytest.mark.parametrize("name", WRONG)
def test_an_illegal_pair_is_caught(engines: Engines, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, rule, options, params = WRONG[name]
    p, _ = drawn_by(engines, (method, rule, {**options, "allow_lossy": True}, params), monkeypatch)
    assert p < 1e-6
