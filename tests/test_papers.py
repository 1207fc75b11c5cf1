import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.papers import exact
from benchmarks.papers.__main__ import main
from benchmarks.papers.decoding import Cell, measure
from benchmarks.papers.models import held_out_texts, log_likelihood, models
from benchmarks.papers.optimal import rrs_acceptance, spechub_acceptance
from benchmarks.tokens_per_step import PAIR
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


def test_dymax_ends_before_a_token_of_which_the_draft_is_not_sure():
    trees = []
    cell = Cell("dymax", 8, tree={"least": 0.5}, prompts=4, tokens=12)
    measure(cell, look=lambda proposal, logits, result, prompts: trees.append(proposal.tree))
    sure = [
        weight.diff(prepend=torch.zeros(1)).exp()
        for tree in trees
        for weight, valid in zip(tree.log_weight, tree.valid, strict=True)
        for weight in [weight[valid]]
    ]
    assert all((one >= 0.5).all() for one in sure)
    assert len({len(one) for one in sure}) > 1
    assert all((tree.parent[tree.valid] == tree.depth[tree.valid] - 2).all() for tree in trees), "a chain"


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


def test_target_initialisation_as_with_whole_sequences():
    """Greedy: two initial tokens of the target above the draft's three best and its best below these."""
    cell = Cell("mcsd", 14, 0.0, "rrsw", {"shape": [3, 1], "init_width": 2, "allow_lossy": True}, 2, 14)
    steps = []
    measure(cell, look=lambda proposal, logits, result, prompts: steps.append(result.tokens.tolist()))
    target, draft = (
        AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32).eval() for name in ("target", "draft")
    )

    def best(model, sequence, count):
        return last_logits(model, sequence).topk(count).indices.tolist()

    def accepted(sequence, shape):
        """Greedy tokens of the target below a sequence for as long as the draft has them among its best."""
        said = []
        for width in shape:
            token = best(target, sequence + said, 1)[0]
            if token not in best(draft, sequence + said, width):
                break
            said.append(token)
        return said

    lossy = compared = 0
    for number, given in enumerate(models().encode(list(held_out_texts(2)))):
        sequence, initial = [*given, best(target, given, 1)[0]], None
        for rows in steps:
            if len(rows) < 2:
                break  # one prompt has ended
            if initial is None:
                path = accepted(sequence, [2, 3, 1])
            else:
                paths = [[token, *accepted([*sequence, token], [3, 1])] for token in initial]
                path = max(paths, key=len)
                lossy += path is not paths[0]
            emitted = path or best(target, sequence, 1)
            initial = best(target, [*sequence, *path], 2) if path else None
            assert [token for token in rows[number] if token >= 0] == emitted
            sequence += emitted
            compared += 1
    assert compared >= 4
    assert lossy, "no step has taken the second initial token"


def test_how_likely_the_target_finds_a_text():
    texts, first, said = held_out_texts(2), torch.tensor([5, 6]), [[7, 8, 9], [10]]
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    expected = []
    for given, start, more in zip(models().encode(list(texts)), first.tolist(), said, strict=True):
        with torch.no_grad():
            log_p = target(torch.tensor([[*given, start, *more]])).logits[0].float().log_softmax(-1)
        expected.append(sum(log_p[len(given) + place, token].item() for place, token in enumerate(more)))
    assert log_likelihood(texts, first, said) == pytest.approx(expected, abs=1e-3)


def test_quick_run(tmp_path):
    command = ["--quick", "--workers", "1", "--results", str(tmp_path), "--docs", str(tmp_path)]
    main(command)
    page, measured = (tmp_path / "tables.md").read_text(), (tmp_path / "measured.json").read_text()
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
        assert found["file"] == list(range(cell.prompts)), key
        assert 1.2 < sum(found["tokens"]) / sum(found["steps"]) < 6, key
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert {"opt_tree", "dyspec", "c2t", "mcsd", "spechub"} <= {name for name, claims in verdicts.items() if claims}
    assert "| EAGLE-2 | " in page
    for block in page.split("\n\n"):
        if block.startswith("| "):
            assert block.count("\n") >= 2, f"a table without rows:\n{block}"
    for image in (tmp_path / "figures").glob("*.png"):
        assert image.read_bytes()[:4] == b"\x89PNG"
        assert f"figures/{image.name}" in page
    assert page.count("](figures/") == 3
    facts = {claim["text"]: claim["verdict"] for claim in verdicts["hub_drafts"]}
    assert facts["toy: OTM >= RRS, OTMw >= RRSw, OTMw >= OTM"] == "holds"
    main(command)  # goes on where it ended: nothing is left
    assert (tmp_path / "measured.json").read_text() == measured
    (tmp_path / "tables.md").unlink()
    main([*command, "--render"])
    assert (tmp_path / "tables.md").read_text() == page
