"""From options to a proposer and a rule: which pair decodes, and whether it is a legal one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree import registry
from vllm_adaptive_tree.acceptance import RULES, Kind, Rule, common_kind, legal_rules
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.gates.mlp import Gate
from vllm_adaptive_tree.method_options import (
    CHILDREN,
    DySpecOptions,
    OptTreeOptions,
    ShapedOptions,
    readable,
    shipped,
)
from vllm_adaptive_tree.proposers import C2T, DySpec, Eagle2, Mcsd, OptTree, Proposer, StaticTree, sequoia_shape
from vllm_adaptive_tree.proposers.dyspec import HIGHEST
from vllm_adaptive_tree.proposers.mcsd import FEATURES
from vllm_adaptive_tree.trees import Shape

THRESHOLD = 0.5
"""Of OPT-Tree, where neither the user nor the budget says otherwise."""
GREEDY_DRAFT_TEMPERATURE = 0.6
"""Of OPT-Tree with `draft_temperature: "auto"`, where no budget fits it: raw probabilities undervalue the best token of
a greedy target."""


class Pair(NamedTuple):
    proposer: Proposer
    rule_name: str
    rule: Rule
    loss: str | None  # what the pair changes; None: it is lossless
    most: int  # children that a node may get
    init_width: int = 1  # tokens of the first layer that the target draws itself, not emitted before the next step

    @property
    def lossless(self) -> bool:
        return self.loss is None


class Steered(NamedTuple):
    """Which options the engine sets by what it measures, on every model runner; all else is as the user wrote it."""

    measured: bool = False
    """OPT-Tree's threshold: once, by what a draft level costs in target forwards."""
    price: bool = False
    """OPT-Tree's threshold and floor: in every step, by what the budget's time is worth."""
    fill: bool = False
    """DySpec's threshold: between steps, so that trees fill their share of the node budget."""
    temperature: bool = False
    """The draft temperature of greedy requests: between steps, by what the target takes."""


def steered(options: TreeOptions) -> Steered:
    tree, auto = options.tree, options.tree.budget == "auto"
    match tree:
        case OptTreeOptions():
            return Steered(
                measured=tree.threshold == "auto",
                price=tree.threshold is None and auto,
                temperature=tree.draft_temperature == "auto" and auto,
            )
        case DySpecOptions():
            return Steered(fill=tree.mode == "threshold" and tree.threshold == "auto")
        case _:
            return Steered()


def resolve(options: TreeOptions) -> Pair:
    """Build the proposer, choose the rule, and tell the proposer which kind of children the rule needs.

    Raises:
        ValueError: the pair changes the target's law and `allow_lossy` is not set, or a file cannot be used; the
            message lists the legal rules.
    """
    proposer = build_proposer(options)
    name = options.rejection_sample_method
    registered = _registered_rules(options)
    legal = [
        *legal_rules(proposer.kinds, proposer.most_children),
        *(name for name, rule in registered.items() if _serves(rule, proposer)),
    ]
    init_width = getattr(options.tree, "init_width", 1)
    if name == "auto":
        name = "rrsw" if init_width > 1 else best_rule(proposer.kinds)
    rule = (RULES | registered)[name]
    kind = common_kind(proposer.kinds, rule)
    if name not in legal and not options.tree.allow_lossy:
        too_many = kind is not None and rule.most is not None
        why = (
            f"it takes at most {rule.most} children of a node"
            if too_many
            else f"it is lossless for {', '.join(rule.kinds)} children, and {options.method!r} drafts "
            f"{', '.join(proposer.kinds)}"
        )
        raise ValueError(
            f"speculative_config['rejection_sample_method']: {name!r} would change the target's law beside method "
            f"{options.method!r}: {why}. Use one of: auto, {', '.join(legal)}; or set tree: {{'allow_lossy': true}}"
        )
    if init_width > 1 and rule.draw is None:
        raise ValueError(
            f"speculative_config['rejection_sample_method']: {name!r} accepts whole paths, and init_width={init_width} "
            "needs a rule that goes node by node: rrsw for example"
        )
    proposer.kind = kind or proposer.kinds[0]
    loss = None
    if init_width > 1:
        loss = (
            f"init_width={init_width} emits the initial token whose continuation the target likes best, so neither the "
            "sampled law nor the greedy text is the target's"
        )
    elif name not in legal:
        loss = f"{name} beside {proposer.kind} children changes the target's law"
    most = min(proposer.most_children, options.num_speculative_tokens)
    return Pair(proposer, name, rule, loss, most, init_width)


def best_rule(kinds: tuple[Kind, ...]) -> str:
    """What `auto` takes for sampled, unseeded requests: chosen children leave nothing to gain over the target's own
    draws; for drawn ones no rule accepts more than `traversal`."""
    return "target_only" if kinds[0] == "one_hot" else "traversal"


def draft_temperature(options: TreeOptions, temperature: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
    """Of the law that shapes or draws the tree of a request with this temperature; 0 is greedy, where "auto" means
    `fitted`."""
    own = getattr(options.tree, "draft_temperature", None)
    if own is None:  # deterministic trees are shaped by the law itself; sampled children come closest at the request's
        return 1.0 if temperature == 0 or options.method in ("eagle2", "c2t") else temperature
    if own != "auto":
        return float(own)
    return temperature if temperature > 0 else fitted


def fitting(options: TreeOptions, proposer: Proposer) -> TreeOptions:
    """No more nodes than the proposer's shape has, if it has one: the scheduler sets a place aside for each."""
    if not isinstance(proposer, StaticTree):
        return options
    return replace(options, num_speculative_tokens=min(options.num_speculative_tokens, len(proposer.shape)))


def build_proposer(options: TreeOptions) -> Proposer:
    """Raises ValueError where a file that the method needs is missing or holds something else."""
    tree: Any = options.tree
    nodes = options.num_speculative_tokens
    default: Any = shipped(options.tree)
    proposer: Proposer
    match options.method:
        case "opt_tree":
            found = steered(options)  # until it is set, every level pays
            threshold = THRESHOLD if tree.threshold is None else tree.threshold
            proposer = OptTree(max_depth=tree.max_depth, threshold=0 if found.measured or found.price else threshold)
        case "dyspec":
            threshold = min(1 / nodes, HIGHEST) if tree.threshold == "auto" else tree.threshold
            proposer = DySpec(
                max_depth=tree.max_depth,
                max_children=tree.max_children,
                threshold=0 if tree.mode == "heap" else threshold,
            )
        case "eagle2":
            proposer = Eagle2(max_depth=tree.max_depth, top_k=tree.top_k)
        case "c2t":
            gate = Gate.load(readable(tree.gate or default, "gate"), inputs=3)
            proposer = C2T(
                gate,
                beta=tree.beta,
                top_k=tree.top_k,
                entropy_top=tree.entropy_top,
                max_depth=tree.max_depth,
                second_pruning=tree.second_pruning,
                chain=tree.mode == "chain",
                features=gate.features,
            )
        case "static_tree":
            proposer = StaticTree(_shape(tree.shape, nodes))
        case "sequoia":
            vector = _vector(tree.vector or default)
            proposer = StaticTree(sequoia_shape(vector, nodes=nodes, max_depth=tree.max_depth))
        case "mcsd":
            model = None
            if tree.stop != "none":
                file = readable(tree.gate or default, "gate")
                model = Gate.load(file, inputs=None if tree.stop == "type1" else FEATURES)
            first = (tree.init_width,) if tree.init_width > 1 else ()
            proposer = Mcsd(
                Shape.k_config((*first, *tree.shape), nodes),
                gate=model,
                reads="hidden" if tree.stop == "type1" else "law",
                stop_threshold=tree.stop_threshold,
                init_width=tree.init_width,
            )
        case _:
            assert options.proposer is not None
            proposer = registry.load(options.proposer)(**options.tree_given)
    if isinstance(tree, ShapedOptions) and tree.children is not None:
        proposer.kinds = (CHILDREN[tree.children],)  # type: ignore[assignment]
    return proposer


def _registered_rules(options: TreeOptions) -> dict[str, Rule]:
    """Those known here by name, and the one in use, of which an engine process knows the path alone."""
    paths = {name: registry.path_of("acceptance", name) for name in registry.names("acceptance")}
    paths |= {options.rejection_sample_method: options.acceptance}
    return {name: registry.load(path) for name, path in paths.items() if path is not None}


def _serves(rule: Rule, proposer: Proposer) -> bool:
    return common_kind(proposer.kinds, rule) is not None and (rule.most is None or proposer.most_children <= rule.most)


def _shape(shape: Any, nodes: int) -> Shape:
    if isinstance(shape, str):
        return Shape.named(shape, nodes).cut(nodes)
    return Shape.k_config(shape, nodes) if isinstance(shape[0], int) else Shape.of(shape).cut(nodes)


def _vector(file: str | Path) -> list[float]:
    path = readable(file, "vector")
    try:
        vector = json.loads(path.read_text())["vector"]
        if not vector or not all(0 <= chance <= 1 for chance in vector):
            raise ValueError(vector)
        return [float(chance) for chance in vector]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"speculative_config['tree']['vector']: {str(file)!r} must hold {{\"vector\": [numbers between 0 and 1]}}"
        ) from error
