"""Every option of every method does something that can be seen, on both model runners.

Both build the same proposer by `resolve`, and draft at the same temperature; V1 then grows OPT-Tree's trees on
the host. Options that an engine sets by what it measures: `tests/engine/test_options.py`.
"""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.oracles.growth import as_the_engine
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import METHODS, PROPOSERS, Request, draft_tree
from vllm_adaptive_tree.proposers.gate import Gate
from vllm_adaptive_tree.testing.drafts import keyed

REQUESTS, VOCABULARY, HIDDEN, NODES = 4, 32, 64, 14
ADAPTERS: dict[str, Callable[[Any], Any]] = {"V1": lambda proposer: proposer.for_cpu(), "V2": lambda proposer: proposer}

TREES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {  # two values of an option, and what else is set
    ("adaptive_tree", "max_depth"): ({}, {"max_depth": 2}),
    ("adaptive_tree", "max_children"): ({}, {"max_children": 2}),
    ("opt_tree", "max_depth"): ({}, {"max_depth": 2}),
    ("opt_tree", "threshold"): ({"threshold": 0.0}, {"threshold": 0.9}),
    ("dyspec", "mode"): ({"threshold": 0.3}, {"threshold": 0.3, "mode": "heap"}),
    ("dyspec", "threshold"): ({"threshold": 0.1}, {"threshold": 0.4}),
    ("dyspec", "max_children"): ({}, {"max_children": 2}),
    ("dyspec", "max_depth"): ({}, {"max_depth": 1}),
    ("c2t", "beta"): ({"gate": "c2t"}, {"gate": "c2t", "beta": 0.7}),
    ("c2t", "top_k"): ({"gate": "c2t"}, {"gate": "c2t", "top_k": 2}),
    ("c2t", "entropy_top"): ({"gate": "entropy"}, {"gate": "entropy", "entropy_top": 2}),
    ("c2t", "max_depth"): ({"gate": "c2t"}, {"gate": "c2t", "max_depth": 1}),
    ("c2t", "second_pruning"): ({"gate": "c2t", "top_k": 2}, {"gate": "c2t", "top_k": 2, "second_pruning": False}),
    ("c2t", "mode"): ({"gate": "c2t"}, {"gate": "c2t", "mode": "chain"}),
    ("c2t", "gate"): ({"gate": "c2t"}, {"gate": "entropy"}),
    ("eagle2", "top_k"): ({}, {"top_k": 2}),
    ("eagle2", "max_depth"): ({}, {"max_depth": 2}),
    ("static_tree", "shape"): ({}, {"shape": [3, 1, 1]}),
    ("static_tree", "children"): ({"shape": "binary"}, {"shape": "binary", "children": "top_k"}),
    ("sequoia", "vector"): ({}, {"vector": "vector"}),
    ("sequoia", "max_depth"): ({}, {"max_depth": 2}),
    ("sequoia", "children"): ({}, {"children": "iid"}),
    ("mcsd", "shape"): ({}, {"shape": [2, 2]}),
    ("mcsd", "children"): ({}, {"children": "top_k"}),
    ("mcsd", "stop"): ({"gate": "mcsd"}, {"gate": "mcsd", "stop": "type2"}),
    ("mcsd", "stop_threshold"): (
        {"gate": "mcsd", "stop": "type2", "stop_threshold": 0.0},
        {"gate": "mcsd", "stop": "type2", "stop_threshold": 1.0},
    ),
    ("mcsd", "gate"): ({"gate": "mcsd", "stop": "type2"}, {"gate": "closed", "stop": "type2"}),
    ("mcsd", "init_width"): ({"allow_lossy": True}, {"allow_lossy": True, "init_width": 2}),
}
TEMPERATURES = {  # with what keeps every node
    ("opt_tree", "draft_temperature"): {"threshold": 0},
    ("dyspec", "draft_temperature"): {"threshold": 0},
    ("eagle2", "draft_temperature"): {},
    ("c2t", "draft_temperature"): {"beta": 0},
}
REQUESTS_BY = {("adaptive_tree", "drawn_from")}
"""Decide how a request is drafted and verified: rows of `test_methods.py`."""
STARTING = {"allow_lossy"}
"""Of all methods: decide whether an engine starts."""
ENGINE = {"budget", "cost_profile"}
"""Of all methods: rows of `tests/engine/test_options.py`."""


def test_every_option_has_a_row():
    known = {*TREES, *TEMPERATURES, *REQUESTS_BY, *((method, name) for method in METHODS for name in STARTING | ENGINE)}
    options = {method: fields(PROPOSERS.load(path).Options) for method, path in PROPOSERS.built_in.items()}
    assert {(method, one.name) for method in METHODS for one in options[method]} == known


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates made by hand, each by one of its inputs: path probability, entropy, the draft's best probability."""
    path = tmp_path_factory.mktemp("options")
    for name, inputs, feature, slope, offset in (
        ("c2t", 3, 0, 20.0, -1.0),
        ("entropy", 3, 1, -2.0, 2.0),
        ("mcsd", 11, 1, 4.0, -2.0),
        ("closed", 11, 1, 0.0, -9.0),
    ):
        weights = {key: torch.zeros_like(weight) for key, weight in Gate(inputs, 4).state_dict().items()}
        weights["layers.0.weight"][0, feature] = 1.0
        weights["layers.2.weight"][0, 0] = slope
        weights["layers.2.bias"][0] = offset
        save_file(weights, path / f"{name}.safetensors")
    (path / "vector.json").write_text(json.dumps({"vector": [0.3, 0.28, 0.2, 0.1]}))
    return path


def options(folder: Path, method: str, tree: dict[str, Any]) -> TreeOptions:
    files = {"gate": ".safetensors", "vector": ".json"}
    tree = {key: str(folder / f"{value}{files[key]}") if key in files else value for key, value in tree.items()}
    config = {"method": method, "model": "draft", "num_speculative_tokens": NODES, "tree": {"budget": None, **tree}}
    return TreeOptions.parse(config)[0]


class Drafter:
    """Laws by token and depth: sharp ones and flat ones, the same for whoever asks."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scale = torch.linspace(0.5, 6, VOCABULARY)[:, None]
        self.law = scale * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        self.hidden = torch.randn(VOCABULARY, HIDDEN, generator=generator)

    def rows(self, tokens: Tensor) -> Rows:
        return Rows(self.law[tokens.clamp(min=0)], self.hidden[tokens.clamp(min=0)])

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        return self.rows(tokens), state


def drafted(options: TreeOptions, adapter: str) -> tuple[list[list[int]], list[list[int]]]:
    pair, drafter = resolve(options), Drafter()
    roots = torch.arange(1, 1 + REQUESTS)[:, None] * 7
    initial = roots + torch.arange(pair.init_width) if pair.init_width > 1 else None
    proposal = draft_tree(
        ADAPTERS[adapter](pair.proposer),
        drafter,
        drafter.rows(roots),
        None,
        nodes=NODES,
        request=Request(torch.ones(REQUESTS), torch.zeros(REQUESTS, dtype=torch.bool), keyed(REQUESTS), initial),
        agree=as_the_engine,
    )
    return proposal.tree.tokens.tolist(), proposal.tree.parent.tolist()


@pytest.mark.parametrize(("method", "option"), TREES)
def test_it_changes_the_trees(folder, method, option):
    trees = [[drafted(options(folder, method, tree), one) for tree in TREES[method, option]] for one in ADAPTERS]
    assert all(one != other for one, other in trees)
    assert trees[0] == trees[1], "both model runners draft the same"


@pytest.mark.parametrize("method", sorted({method for method, _ in TEMPERATURES}))
def test_it_changes_the_temperature_of_the_draft(folder, method):
    own = [options(folder, method, {"draft_temperature": one}).tree.temperature(0.0) for one in (0.3, 1.3)]
    assert own == [0.3, 1.3]


@pytest.mark.parametrize("method", sorted({method for method, _ in TEMPERATURES}))
@pytest.mark.parametrize("temperature", [0.01, 100])
def test_the_bounds_of_a_temperature_leave_numbers(folder, method, temperature):
    """Of logits up to 60, as large as those of models are."""
    own = TEMPERATURES[method, "draft_temperature"] | {"draft_temperature": temperature}
    pair, drafter = resolve(options(folder, method, own)), Drafter()
    drafter.law = drafter.law * (60 / drafter.law.abs().max())
    roots = torch.arange(1, 1 + REQUESTS)[:, None] * 7
    request = Request(torch.full((REQUESTS,), temperature), torch.zeros(REQUESTS, dtype=torch.bool), keyed(REQUESTS))
    tree = draft_tree(pair.proposer, drafter, drafter.rows(roots), None, nodes=NODES, request=request).tree
    assert not tree.log_weight.isnan().any()
    assert tree.valid.any(1).all()


@pytest.mark.parametrize("method", METHODS)
def test_it_decides_whether_an_engine_starts(folder, method):
    biased = {"rejection_sample_method": "spechub"}
    with pytest.raises(ValueError, match="allow_lossy"):
        resolve(replace(options(folder, method, {}), **biased))
    assert not resolve(replace(options(folder, method, {"allow_lossy": True}), **biased)).lossless


@pytest.mark.parametrize(
    ("method", "tree", "what"),
    [
        ("adaptive_tree", {}, {"price"}),
        ("opt_tree", {}, {"price", "temperature"}),
        ("opt_tree", {"threshold": "auto"}, {"measured", "temperature"}),
        ("opt_tree", {"threshold": 0.2, "draft_temperature": 1}, set()),
        ("opt_tree", {"budget": None}, set()),
        ("opt_tree", {"budget": 8, "threshold": "auto"}, {"measured"}),
        ("dyspec", {}, {"fill"}),
        ("dyspec", {"budget": 8}, {"fill"}),
        ("dyspec", {"mode": "heap"}, set()),
        ("dyspec", {"threshold": 0.1}, set()),
        *((method, {}, set()) for method in METHODS if method not in ("adaptive_tree", "opt_tree", "dyspec")),
    ],
)
def test_what_an_engine_sets(folder, method, tree, what):
    found = options(folder, method, {"budget": "auto", **tree}).tree.steered
    assert {name for name, on in found._asdict().items() if on} == what
