"""Check D: the whole target reads random trees, and each of their paths as a plain sequence in vLLM's attention.

Then it commits the accepted path and decodes on, which reads the committed cache. The yardstick is the difference of
vLLM's own logits of one sequence between two ways of reading it: alone or in a batch, at once or in two chunks.
"""

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.self_check import block, draft
from vllm_adaptive_tree.engine.self_check.commit import watched
from vllm_adaptive_tree.engine.self_check.distance import ROWS_OF_EXPERTS, allowed_error, distance
from vllm_adaptive_tree.engine.self_check.trees import paths, random_parents
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.engine.v2.head_speculator import HeadSpeculator
from vllm_adaptive_tree.engine.v2.trial import Trial, TrialStep
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.trees import TreeBatch

PROMPTS = (37, 64, 130)
NODES = 24
"""Most nodes of a tree; more would only cost forwards."""
PATH = 3
"""Nodes of a tree that the target accepts, if its levels allow: its own greedy tokens."""
DECODED = 2
"""Steps after the commit."""


class CheckTree(NamedTuple):
    tokens: list[int]
    parents: list[int]

    def texts(self, before: list[int]) -> dict[str, tuple[list[int], list[int]]]:
        """Nodes of every path, and the text that ends with it."""
        return {str(path[-1]): (path, before + [self.tokens[node] for node in path]) for path in paths(self.parents)}


class CheckOutcome(NamedTuple):
    """Result of the check, with the decisions that check F compares."""

    findings: list[Finding]
    decided: list[list[int]]
    """Trees, and the text of every request."""


def check(runner: Any) -> CheckOutcome:
    """Check the target: whole-model identity, and the bytes of the commit (check C)."""
    nodes = min(runner.options.num_speculative_tokens, NODES)
    if runner.pair.chains:
        nodes = min(nodes, runner.speculator.levels)
    with Trial(runner) as trial:
        prompts = _prompts(runner, nodes)
        trees = _trees(trial, prompts, nodes)
        trial.begin(prompts, more=nodes + DECODED)
        begun = {name: trial.text(name) for name in prompts}
        _store(trial, trees, begun)
        with watched(trial) as commit, draft.recorded(runner) as levels:
            step = trial.decode(list(trees), nodes=nodes)
        blocks, drafting = block.drafted(trial), None
        if levels and isinstance(runner.speculator, HeadSpeculator):
            drafting = draft.of_head(trial, levels, trial.requests)  # before its cache goes on
        tree_logits = _by_node(step, trial.requests, trees)
        requests, places = trial.requests, [trial.index(name) for name in trees]
        drafts = runner.req_states.draft_tokens[places].tolist()
        committed = {name: trial.text(name) for name in trees}
        on = [trial.decode(list(trees)).logits for _ in range(DECODED)]
        ended = {name: trial.text(name) for name in trees}
        trial.finish(list(trees))  # with them there may be no place for another request
        native, noise = _native(trial, begun, trees)
        permuted, _ = _native(trial, begun, {name: _permuted(tree) for name, tree in trees.items()})
        read = {f"{name} on": text[:-1] for name, text in ended.items()}  # the last token was sampled, and not read
        if blocks:
            drafting = block.finding(trial, blocks, begun, committed)
        elif levels and drafting is None:
            drafting = draft.of_model(trial, levels, requests, committed)
        natively_on = trial.read(read, dict.fromkeys(read, DECODED))
    peak = max(float(logits_of_tree.abs().max()) for logits_of_tree in native.values())
    allowed = allowed_error(trial.coarsest(), noise=noise, peak=peak)
    share = ROWS_OF_EXPERTS if runner.model_config.is_moe else 1.0
    error = max(distance(tree_logits[name], native[name], share=share) for name in trees)
    control = torch.inf
    if nodes > 1:
        control = min(distance(tree_logits[name], permuted[name], share=share) for name in trees)
    if runner.load_config.load_format == "dummy":
        control = torch.inf  # weights of nearly 0: the logits do not depend on the text
    decoded = torch.cat([logits[name] for logits in on for name in trees])
    decoded_natively = torch.stack([natively_on[f"{name} on"][at] for at in range(DECODED) for name in trees])
    decoding = distance(decoded, decoded_natively, share=share)
    accepted = max(len(committed[name]) - len(begun[name]) - 1 for name in trees)
    figures = {"error": error, "allowed": allowed, "vLLM's": noise, "parents permuted": control}
    findings = [
        commit.finding(),
        Finding("model", error <= allowed < control, figures),
        Finding("decoding", decoding <= allowed and accepted > 0, {"error": decoding, "allowed": allowed}),
    ]
    if drafting is not None:
        findings.append(drafting)
    decided = [*drafts, *([*tree.tokens, *tree.parents] for tree in trees.values()), *ended.values()]
    return CheckOutcome(findings, decided)


def _prompts(runner: Any, nodes: int) -> dict[str, list[int]]:
    """Prompts of random tokens, the same on every rank."""
    more = 2 + nodes + DECODED + runner.num_speculative_steps + min(nodes, runner.speculator.levels)
    longest = min(runner.max_model_len - more, runner.max_num_tokens // len(PROMPTS) - 1 - nodes)
    choose = random.Random(0)
    vocabulary = runner.model_config.get_vocab_size()
    lengths = [max(min(length, longest), 2) for length in PROMPTS[: runner.max_num_reqs]]
    return {f"check {i}": [choose.randrange(vocabulary) for _ in range(count)] for i, count in enumerate(lengths)}


def _trees(trial: Trial, prompts: dict[str, list[int]], nodes: int) -> dict[str, CheckTree]:
    """Random trees, each with a path that the target takes after the first token."""
    levels, chains = trial.runner.speculator.levels, trial.runner.pair.chains
    length = min(PATH, levels, -(-nodes // 2))
    texts = dict(prompts)
    for _ in range(1 + length):
        reading = {f"{name} greedy": text for name, text in texts.items()}
        next_logits = trial.read(reading, dict.fromkeys(reading, 1))
        texts = {name: [*text, int(next_logits[f"{name} greedy"].argmax())] for name, text in texts.items()}
    trees = {}
    for seed, (name, text) in enumerate(texts.items()):
        path = text[len(text) - length :]
        parents = list(range(-1, nodes - 1)) if chains else random_parents(nodes, seed=seed, levels=levels)
        random_tokens = random.Random(seed).sample(range(trial.runner.model_config.get_vocab_size()), nodes + length)
        tokens = [token for token in random_tokens if token not in path][:nodes]
        places = [min(1 + 2 * i, nodes - length + i) for i in range(length)]  # every second one, if there is room
        places = list(range(length)) if chains else places
        for above, place, token in zip([-1, *places], places, path, strict=False):
            tokens[place], parents[place] = token, above
        trees[name] = CheckTree(tokens, _shallow(parents, levels))
    return trees


def _shallow(parents: list[int], levels: int) -> list[int]:
    """Parents with levels limited: a node that would be too deep, because the path deepened its subtree, becomes a
    child of the root."""
    depth, shallow = {-1: 0}, []
    for node, parent in enumerate(parents):
        parent = parent if depth[parent] < levels else -1
        depth[node] = depth[parent] + 1
        shallow.append(parent)
    return shallow


def _permuted(tree: CheckTree) -> CheckTree:
    """Tree of the same tokens below other parents: every node that is not the root's child becomes one, and the others
    a chain."""
    parents, last = [], -1
    for node, parent in enumerate(tree.parents):
        parents.append(-1 if parent >= 0 else last)
        last = node if parent < 0 else last
    return tree._replace(parents=parents)


def _store(trial: Trial, trees: dict[str, CheckTree], begun: dict[str, list[int]]) -> None:
    """Store the trees as if the draft had drafted them."""
    runner, device = trial.runner, trial.runner.device
    width = runner.num_speculative_steps
    index = torch.tensor([trial.index(name) for name in trees], device=device)
    tokens = torch.full((len(trees), width), -1, device=device)
    parent, depth = tokens.clone(), torch.zeros_like(tokens)
    for row, tree in enumerate(trees.values()):
        depths: dict[int, int] = {-1: 0}
        for node, above in enumerate(tree.parents):
            depths[node] = depths[above] + 1
        count = len(tree.parents)
        tokens[row, :count] = torch.tensor(tree.tokens, device=device)
        parent[row, :count] = torch.tensor(tree.parents, device=device)
        depth[row, :count] = torch.tensor([depths[node] for node in range(count)], device=device)
    batch = TreeBatch(tokens, parent, depth, torch.zeros_like(tokens, dtype=torch.float32))
    proposal = Proposal(batch, torch.full_like(tokens, -1), tokens.new_zeros(len(trees), 1 + width))
    root = torch.tensor([len(begun[name]) - 1 for name in trees], device=device)
    runner.speculator.drafts.store(index, root, proposal, torch.ones(len(trees), device=device))
    runner.req_states.draft_tokens[index] = tokens.to(runner.req_states.draft_tokens.dtype)


def _by_node(step: TrialStep, requests: list[str], trees: dict[str, CheckTree]) -> dict[str, Tensor]:
    """Logits [1 + N, V]: the root's row, then the nodes' in generation order. `requests`: of the step, in order."""
    logits_by_request = {}
    for name, tree in trees.items():
        logits, order = step.logits[name], step.verification.order
        if order is not None:
            place = order[requests.index(name), : len(tree.tokens)]
            logits = torch.cat([logits[:1], logits[1:][place.argsort()]])
        logits_by_request[name] = logits
    return logits_by_request


def _native(trial: Trial, begun: dict[str, list[int]], trees: dict[str, CheckTree]) -> tuple[dict[str, Tensor], float]:
    """Logits of the root and of every node as vLLM computes them along plain sequences, as `_by_node` returns them, and
    the difference of those of one path of each tree if read another way."""
    texts, last = dict[str, list[int]](), dict[str, int]()
    for name, tree in trees.items():
        for leaf, (path, text) in tree.texts(begun[name]).items():
            texts[f"{name} {leaf}"], last[f"{name} {leaf}"] = text, 1 + len(path)
    rows = trial.read(texts, last)
    logits, noise = {}, 0.0
    for name, tree in trees.items():
        paths_of = tree.texts(begun[name])
        first = f"{name} {next(iter(paths_of))}"
        again = trial.read({first: texts[first]}, last, otherwise=True)[first]
        noise = max(noise, distance(rows[first], again))
        logits[name] = rows[first].new_zeros(1 + len(tree.tokens), rows[first].shape[1])
        for leaf, (path, _) in paths_of.items():
            logits[name][[0, *(1 + node for node in path)]] = rows[f"{name} {leaf}"]
    return logits, noise
