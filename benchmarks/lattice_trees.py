"""Chains, trees of marginals and trees of conditionals, cut from one forward of the same head.

    python -m benchmarks.lattice_trees --head head --out benchmarks/results/lattice_trees.json

Without an engine, in float32: the bundled target continues prompts from modules held out from the head's training,
128 tokens each, greedily and at temperature 1; the head predicts after every token of these texts; OPT-Tree grows the
trees. A step accepts the nodes that a tree shares with the continuation. That is `target_only` exactly, since the
target's tokens were drawn before. It measures acceptance, not speed.

Marginals are the backbone's own logits, which the training teaches as well; conditionals have the bias by the token
before, at the root too.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tokens_per_step import NEW_TOKENS, PAIR, prompts
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.budget.acceptance_model import Calibration
from vllm_adaptive_tree.drafters import ByDepth, ByParent
from vllm_adaptive_tree.heads import checkpoint
from vllm_adaptive_tree.heads.dspark import BlockHead
from vllm_adaptive_tree.proposers import Request, draft_tree
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import TreeBatch

NODES = (8, 16, 32, 64)
GREEDY_TEMPERATURE = 0.6  # of the draft, as the engine's for greedy requests
KINDS = ("marginal", "conditional")


class Text(NamedTuple):
    tokens: Tensor  # [T]: a prompt and the target's continuation
    first: int  # position of the first root


class Drafted(NamedTuple):
    """Drafts from one forward after each of R roots."""

    chain: Tensor  # [R, K]
    tree: TreeBatch  # [R, most nodes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True, help="as train-head --kind dspark writes it")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    layers = [
        1 + layer
        for layer in json.loads((options.head / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    ]
    head = checkpoint.read_block(options.head, len(layers)).eval()
    found: dict[str, Any] = {"tokens_per_step": [], "acceptance_by_depth": []}
    with torch.no_grad():
        for temperature in (0.0, 1.0):
            texts = [continued(target, tokenizer(prompt).input_ids, temperature) for prompt in prompts(options.prompts)]
            rows, depths = measured(target, head, layers, texts, temperature)
            found["tokens_per_step"] += rows
            found["acceptance_by_depth"] += depths
            print(*rows, *depths, sep="\n", flush=True)
    if options.out:
        save(options.out, found)


def continued(target: Any, prompt: list[int], temperature: float) -> Text:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    tokens = target.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0, **sampling
    )[0]
    return Text(tokens, len(prompt))  # the target's first token is the first root


def measured(
    target: Any, head: BlockHead, layers: list[int], texts: list[Text], temperature: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    steps: dict[tuple[str, int], list[float]] = {}  # tokens per step of each text
    judges = {kind: Judge() for kind in KINDS}
    for text in texts:
        for kind, drafted in zip(KINDS, every_draft(target, head, layers, text, temperature), strict=True):
            roots = torch.arange(text.first, len(text.tokens) - head.block.depth)
            future = text.tokens[roots[:, None] + 1 + torch.arange(head.block.depth)]  # [R, K]
            agreed = (drafted.chain == future).long().cumprod(1).sum(1)
            steps.setdefault((f"chain, {kind}", head.block.depth), []).append(tokens_per_step(agreed))
            hit = accepted(drafted.tree, future)
            for nodes in NODES:
                depth = torch.where(hit & best(drafted.tree, nodes), drafted.tree.depth, 0).amax(1)
                steps.setdefault((f"tree, {kind}", nodes), []).append(tokens_per_step(depth))
            judges[kind].see(drafted.tree, hit, best(drafted.tree, 32))
    rows = [
        {
            "temperature": temperature,
            "draft": name,
            "nodes": nodes,
            "tokens_per_step": round(statistics.mean(each), 3),
            "error": round(statistics.stdev(each) / len(each) ** 0.5, 3),
        }
        for (name, nodes), each in steps.items()
    ]
    depths = [{"temperature": temperature, "draft": kind, **row} for kind in KINDS for row in judges[kind].rows()]
    return rows, depths


def every_draft(target: Any, head: BlockHead, layers: list[int], text: Text, temperature: float) -> Iterator[Drafted]:
    """Drafts from the marginals, then from the conditionals, after every root of a text."""
    roots = torch.arange(text.first, len(text.tokens) - head.block.depth)
    states = target.model(text.tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    auxiliary = torch.cat([states[layer] for layer in layers], -1)
    read = F.pad(text.tokens[roots, None], (0, head.block.depth), value=head.block.mask)
    normed = head(auxiliary, target.model.embed_tokens(read)[None], roots)[0]
    logits = F.linear(normed, target.lm_head.weight)  # [R, K, V]
    own = temperature or GREEDY_TEMPERATURE
    request = Request(
        torch.full((len(roots),), own), torch.full((len(roots),), temperature == 0), CounterRNG(roots, roots, 0)
    )
    chain, token = [], text.tokens[roots]
    for depth in range(head.block.depth):
        token = (logits[:, depth] + head.markov_head(token)).argmax(-1)
        chain.append(token)
    kinds = (
        (ByDepth(), None, logits.argmax(-1)),
        (ByParent(head.markov_head), text.tokens[roots], torch.stack(chain, 1)),
    )
    for drafter, given, greedy in kinds:
        proposer = OptTree(max_depth=head.block.depth, threshold=0.0).for_cpu()
        rows, state = drafter.begin(logits, roots=given)
        yield Drafted(greedy, draft_tree(proposer, drafter, rows, state, nodes=max(NODES), request=request).tree)


def accepted(tree: TreeBatch, future: Tensor) -> Tensor:
    """Nodes [R, N] on the path of the tokens after the root [R, K]: True if accepted."""
    hit = torch.zeros_like(tree.valid)
    row = torch.arange(len(hit))
    for node in range(hit.shape[1]):  # parents come first
        parent, depth = tree.parent[:, node], tree.depth[:, node]
        above = (parent < 0) | hit[row, parent.clamp(min=0)]
        hit[:, node] = above & tree.valid[:, node] & (tree.tokens[:, node] == future[row, (depth - 1).clamp(min=0)])
    return hit


def best(tree: TreeBatch, nodes: int) -> Tensor:
    """Tree of fewer nodes: OPT-Tree's are the most probable paths, so it is part of a larger one."""
    order = tree.log_weight.argsort(stable=True, dim=1, descending=True)[:, :nodes]
    return torch.zeros_like(tree.valid).scatter(1, order, value=True) & tree.valid


def tokens_per_step(agreed: Tensor) -> float:
    """Tokens per step of a walk through a text whose roots would accept `agreed` [R] tokens each."""
    counts, root, steps = agreed.tolist(), 0, 0
    while root < len(counts):
        root += 1 + counts[root]
        steps += 1
    return root / steps


class Judge:
    """Predicted and observed acceptance by depth, as the engine's calibration learns it."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.seen: list[np.ndarray[Any, Any]] = []  # [4, M]: depth, predicted, calibrated, observed

    def see(self, tree: TreeBatch, hit: Tensor, kept: Tensor) -> None:
        for root in range(len(hit)):
            among = kept[root]
            value, depth = tree.log_weight[root][among].exp().numpy(), tree.depth[root][among].numpy()
            observed = hit[root][among].numpy()
            self.seen.append(np.stack([depth, value, self.calibration.chances(value, depth), observed]))
            self.calibration.observe(value.tolist(), depth.tolist(), observed.tolist())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of the second half of the roots, in sums over a tree's nodes of a depth."""
        late = self.seen[len(self.seen) // 2 :]
        depth, *columns = np.concatenate(late, 1)
        for at in range(1, int(depth.max()) + 1):
            sums = [round(float(column[depth == at].sum()) / len(late), 3) for column in columns]
            nodes = round(float((depth == at).sum()) / len(late), 2)
            yield {"depth": at, "nodes": nodes} | dict(zip(("predicted", "calibrated", "observed"), sums, strict=True))


if __name__ == "__main__":
    main()
