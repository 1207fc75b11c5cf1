"""Sampling parameters crossed at random, the same for each seed."""

import random
from typing import Any

from tests.engine.conversations import LENGTH, Request, ask
from tests.engine.engines import PROMPTS

GRAMMARS: list[dict[str, Any]] = [
    {"choice": ["None", "NotImplemented", "not implemented yet"]},
    {"regex": r"[a-z_]{3,12}\(([a-z]{1,8}, )*[a-z]{1,8}\)"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]
COMMON: dict[str, list[Any]] = {
    "top_k": [1, 5, 40],
    "top_p": [0.5, 0.95],
    "min_p": [0.05, 0.2],
    "repetition_penalty": [1.2, 0.9],
    "presence_penalty": [0.8, -0.5],
    "frequency_penalty": [0.8, -0.5],
    "stop": [["e"], ["self", "\n"], ["return", " the"]],
    "stop_token_ids": [list(range(260, 320))],
    "include_stop_str_in_output": [True],
    "logprobs": [1, 4],
    "prompt_logprobs": [0, 2],
    "skip_special_tokens": [False],
}
FREE: dict[str, list[Any]] = {
    "bad_words": [["the", " self", "import"]],
    "logit_bias": [{0: 7.0}, {262: 4.0, 300: -100.0}],
    "allowed_token_ids": [list(range(900))],
    "n": [2, 3],
}
"""Parameters that beside a grammar may leave no token."""


def crossings(count: int, seed: int = 0) -> list[Request]:
    found = []
    for i in range(count):
        choose = random.Random(f"{seed} {i}")
        own: dict[str, Any] = {"temperature": choose.choice([0, 0, 0.7, 1.0]), "seed": choose.randrange(1000)}
        own["max_tokens"] = choose.choice([1, 2, 3, 7, LENGTH - 1, LENGTH])
        own["min_tokens"] = choose.choice([0, 0, 0, min(5, own["max_tokens"]), own["max_tokens"]])
        own["ignore_eos"] = choose.random() < 0.5
        structured = choose.random() < 0.25
        table = COMMON if structured else {**COMMON, **FREE}
        for name in choose.sample(sorted(table), choose.randrange(4)):
            own[name] = choose.choice(table[name])
        if structured:
            own["structured_outputs"] = choose.choice(GRAMMARS)
            own["min_tokens"] = 0
        if own["temperature"] == 0:
            own.pop("n", None)
        found += ask([choose.choice(PROMPTS)], **own)
    return found
