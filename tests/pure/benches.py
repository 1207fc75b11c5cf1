"""Configurations, cells and made-up rounds for the tests of the benchmark."""

from vllm_adaptive_tree.bench.plan import BASE, Cell, Config
from vllm_adaptive_tree.bench.rounds import Measurement, Round

PLAIN = Config(BASE, "base", None)


def chain(tokens):
    return Config(f"chain {tokens}", "chain", {"method": "draft_model", "num_speculative_tokens": tokens})


def tree(name, budget="auto"):
    return Config(name, "method", {"method": "opt_tree", "num_speculative_tokens": 16, "tree": {"budget": budget}})


STRESS = Config("random draft", "stress draft", {"method": "opt_tree", "num_speculative_tokens": 16})


def measured(speed, outputs=("a",), **changes):
    values = {
        "seconds": 2.0,
        "tokens": int(speed * 2),
        "time_per_token": [0.1],
        "decode_tokens": 30,
        "decode_steps": 10,
        "steps": 12,
        "drafts": 8,
        "nodes": 40,
        "accepted": 20,
        "memory": 2**20,
        "outputs": list(outputs),
    }
    return Measurement(**{**values, **changes})


def rounds(stage, cell, **speeds):
    """Rounds with these speeds by configuration."""
    return [
        Round(
            stage,
            cell.name,
            number,
            {name.replace("_", " "): measured(one[number - 1]) for name, one in speeds.items()},
        )
        for number in range(1, 1 + len(next(iter(speeds.values()))))
    ]


CELLS = [Cell("offline", 1), Cell("offline", 8)]
CELL = CELLS[0]
CONFIGS = [PLAIN, chain(1), chain(3), tree("tree")]
