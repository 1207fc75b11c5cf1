import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.papers import exact
from benchmarks.papers.__main__ import main
from benchmarks.papers.decoding import PAIR, Cell, held_out_texts, measure, models
from benchmarks.papers.judging import difference, judge, nodes_saved, ratio
from vllm_adaptive_tree.acceptance.optimal import rrs_acceptance, spechub_acceptance
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.reference import decode_step, last_logits
from vllm_adaptive_tree.rng import CounterRNG

CELLS = [
    Cell("opt_tree", 9, 0.0, tree={"threshold": 0.2}),
    Cell("dyspec", 9, 0.8, "rrsw", {"mode": "heap"}),
    Cell("static_tree", 6, 1.0, "spechub", {"shape": "binary"}),
    Cell("static_tree", 6, 0.6, "traversal", {"shape": "binary"}),
    Cell("mcsd", 9, 0.7, "rrs", {"shape": [3, 2], "children": "iid"}),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.method}-{cell.rule}")
def test_decodes_as_the_reference(cell):
    """The same trees and the same tokens as the plain-PyTorch reference, for each of two prompts in one batch."""
    cell = Cell(**{**vars(cell), "prompts": 2, "tokens": 12})
    steps = []
    measure(cell, look=lambda proposal, logits, result, prompts: steps.append((proposal.tree, result.tokens)))
    pair = [
        AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32).eval() for name in ("target", "draft")
    ]
    options = cell.options(Path())
    proposer = resolve(options).proposer
    others = compared = 0
    for number, sequence in enumerate(models().encode(list(held_out_texts(2)))):
        logits = last_logits(pair[0], sequence)[None]
        if cell.temperature:
            rng = CounterRNG(torch.tensor([number + 1]), torch.tensor([len(sequence) - 1]), 1).fold_in(
                torch.tensor([0])
            )
            first = int(rng.sample(softmax_at(logits, torch.tensor([cell.temperature]))))
        else:
            first = int(logits.argmax())
        sequence = [*sequence, first]
        for tree, tokens in steps:
            if len(tree.tokens) < 2:
                break  # one prompt has ended; the rows are no longer those of the prompts
            step = decode_step(
                *pair,
                sequence,
                proposer=proposer,
                rule=cell.rule,
                nodes=cell.nodes,
                temperature=cell.temperature,
                draft_temperature=options.tree.temperature(cell.temperature),
                seed=number + 1,
            )
            emitted = [token for token in tokens[number].tolist() if token >= 0]
            size = int(tree.valid[number].sum())
            found = tree.tokens[number, :size].tolist(), tree.parent[number, :size].tolist(), emitted
            others += found != (step.tokens, step.parents, step.emitted)
            compared += 1
            sequence += emitted
    assert compared >= 4
    assert others <= (1 if cell.temperature else 0), "a draw may fall on the border of two tokens"


def test_acceptance_of_a_pair_in_closed_form():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.rand(2, 30, 6, generator=generator, dtype=torch.float64) ** 4).unbind()
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    rrs, rrsw, hub = (sum(rule(p, q)) for rule in exact.RULES.values())
    for i, (own_p, own_q) in enumerate(zip(p, q, strict=True)):
        assert rrs[i].item() == pytest.approx(rrs_acceptance(own_p, own_q, 2))
        assert hub[i].item() == pytest.approx(spechub_acceptance(own_p, own_q))
        assert rrsw[i].item() == pytest.approx(two_without_replacement(own_p, own_q))


def two_without_replacement(p, q):
    rest, accepted = (p - q).clamp(min=0), torch.minimum(p, q).sum()
    for x, rejected in enumerate((q - p).clamp(min=0)):
        second = q.index_fill(0, torch.tensor([x]), 0.0)
        accepted += rejected * torch.minimum(rest / rest.sum(), second / second.sum()).sum()
    return accepted.item()


def record(tokens, nodes=None):
    return {"steps": [10] * len(tokens), "tokens": tokens, "nodes": nodes or [100] * len(tokens)}


def test_a_line_is_judged_by_paired_prompts():
    lower = [20 + 3 * (i % 7) for i in range(40)]  # prompts differ by more than the two cells do
    higher = [tokens + 1 + i % 2 for i, tokens in enumerate(lower)]
    gain = difference(record(higher), record(lower))
    assert gain.mean == pytest.approx(0.15)
    assert judge("", gain).verdict == "holds"
    assert judge("", difference(record(lower), record(higher))).verdict == "does not hold"
    assert judge("", difference(record(lower), record(lower))).verdict == "within noise"
    assert ratio(record(lower)).high - ratio(record(lower)).low > 4 * (gain.high - gain.low)


def test_nodes_at_equal_acceptance():
    theirs = [record([20 + i % 3 for i in range(20)], [100] * 20), record([30 + i % 3 for i in range(20)], [400] * 20)]
    ours = [record([18 + i % 3 for i in range(20)], [50] * 20), record([32 + i % 3 for i in range(20)], [240] * 20)]
    saved = nodes_saved(ours, theirs, at=theirs[1])
    expected = 50 * (240 / 50) ** (12 / 14)
    assert saved.mean == pytest.approx(1 - expected / 400, abs=1e-6)


def test_quick_run(tmp_path):
    command = ["--quick", "--workers", "1", "--results", str(tmp_path), "--docs", str(tmp_path)]
    main(command)
    page, measured = (tmp_path / "papers.md").read_text(), (tmp_path / "measured.json").read_text()
    for key, found in json.loads(measured).items():
        function, _, arguments = key.partition(" ")
        if function != "jobs:measured":
            continue
        cell = Cell(**json.loads(arguments))
        assert len(found["steps"]) == cell.prompts
        for steps, tokens, nodes, first in zip(*(found[x] for x in ("steps", "tokens", "nodes", "first")), strict=True):
            assert steps + 1 <= tokens + 1 <= steps * (cell.nodes + 1) + 1, key
            assert 0 <= nodes <= steps * cell.nodes, key
            assert 0 <= first <= steps, key
        assert cell.tokens - 2 <= min(found["tokens"]), key
        assert 1.2 < sum(found["tokens"]) / sum(found["steps"]) < 6, key
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert all(verdicts[name] for name in ("opt_tree", "dyspec", "c2t", "mcsd", "spechub"))
    assert "| EAGLE-2 | " in page
    for block in page.split("\n\n"):
        if block.startswith("| "):
            assert block.count("\n") >= 2, f"a table without rows:\n{block}"
    for image in (tmp_path / "figures").glob("*.png"):
        assert image.read_bytes()[:4] == b"\x89PNG"
        assert f"figures/{image.name}" in page
    assert page.count("](figures/") == 3
    facts = {claim["text"]: claim["verdict"] for claim in verdicts["spechub"]}
    assert facts["toy: OTM >= RRS, OTMw >= RRSw, OTMw >= OTM"] == "holds"
    main(command)  # goes on where it ended: nothing is left
    assert (tmp_path / "measured.json").read_text() == measured
    (tmp_path / "papers.md").unlink()
    main([*command, "--render"])
    assert (tmp_path / "papers.md").read_text() == page
