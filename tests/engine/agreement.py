"""A table of engines and requests, and the output of this process's model runner for it.

`MODEL_RUNNER=v2 python -m tests.engine.agreement FILE ROW..` writes that to a file; `test_agreement.py` compares the
runners.
"""

if __name__ == "__main__":
    import tests.engine.conftest  # noqa: F401  it chooses the model runner, before vLLM is imported

import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, Engines, generate, metric, runner_of


class Row(NamedTuple):
    """Choices of a user: the method, the acceptance rule, the node budget and the tree options."""

    method: str
    rule: str
    nodes: int
    tree: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.method}-{self.rule}-" + "-".join(f"{key}={value}" for key, value in self.tree.items())


ROWS = [
    Row("opt_tree", "auto", 9, {"threshold": 0.2, "max_depth": 4}),
    Row("opt_tree", "traversal", 9, {"draft_temperature": 1.4, "budget": 12}),
    Row("dyspec", "rrsw", 9, {"mode": "heap", "max_depth": 3}),
    Row("dyspec", "target_only", 9, {"threshold": 0.1, "max_children": 3}),
    Row("c2t", "auto", 9, {"beta": 0.3, "second_pruning": False}),
    Row("eagle2", "auto", 9, {"top_k": 3, "max_depth": 3}),
    Row("static_tree", "rrs", 9, {"shape": "ternary"}),
    Row("static_tree", "spechub", 6, {"shape": "binary"}),
    Row("sequoia", "greedy_multi_draft", 8, {"max_depth": 3}),
    Row("mcsd", "k_seq", 9, {"shape": [3, 2, 1], "stop": "type2"}),
]
COVERED = ROWS[0], ROWS[3]
"""Rows with a method and a rule of other rows."""
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "argmax": [{}] * 4,
    "processed logits": [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"logit_bias": {262: 12.0, 300: -100.0, 201: -100.0}},
        {"min_tokens": 11, "ignore_eos": False, "stop_token_ids": list(range(260, 380))},
        {"bad_words": ["the", " self", "import"]},
    ],
}
BATCH = [PROMPTS[0] + "\n" + PROMPTS[1], PROMPTS[8], PROMPTS[2], PROMPTS[9]]  # unequal in length


class Found(NamedTuple):
    outputs: dict[str, list[Any]]  # of each entry of `REQUESTS`
    accepted: float  # draft tokens
    runner: str  # module of the model runner


def found(engines: Engines, row: Row | None) -> Found:
    """`row` None: without speculation."""
    config = row and {
        "method": row.method,
        "model": DRAFT,
        "num_speculative_tokens": row.nodes,
        "rejection_sample_method": row.rule,
        "tree": {"budget": None, **row.tree},
    }
    llm = engines.start(config)
    outputs = {}
    for name, requests in REQUESTS.items():
        params = [
            SamplingParams(**{"temperature": 0, "max_tokens": 10 + 2 * i, "ignore_eos": True, "logprobs": 2, **extra})
            for i, extra in enumerate(requests)
        ]
        outputs[name] = generate(llm, BATCH, params)
    return Found(outputs, metric(llm, "spec_decode_num_accepted_tokens"), type(runner_of(llm)).__module__)


if __name__ == "__main__":
    from tests.engine import agreement  # pickled by the name under which the test imports it

    pool = Engines()
    results = {str(row): agreement.found(pool, row) for row in ROWS if str(row) in sys.argv[2:]}
    pool.shutdown()
    Path(sys.argv[1]).write_bytes(pickle.dumps(results))
