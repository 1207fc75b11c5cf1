"""Resolution of options to a pair of proposer and acceptance rule, and to a verdict if that pair is lossless."""

from dataclasses import fields, replace
from typing import Any, NamedTuple

from vllm_adaptive_tree.acceptance import RULES, Kind, Rule, TargetOnly
from vllm_adaptive_tree.acceptance.traversal import Traversal
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Lookup
from vllm_adaptive_tree.proposers import PROPOSERS, Proposer


class Pair(NamedTuple):
    proposer: Proposer
    rule_name: str
    rule: type[Rule]
    loss: str | None  # how the pair changes the output; None: it is lossless
    most: int  # the most children of a node
    init_width: int = 1  # first-layer tokens that the target samples itself; they are emitted in the next step
    looks_up: bool = False  # the draft is a look-up, and the best of its continuations are the tree: nothing grows

    @property
    def chains(self) -> bool:
        """True if no tree branches."""
        return self.most == 1 and self.init_width == 1

    @property
    def lossless(self) -> bool:
        return self.loss is None

    @property
    def mixes(self) -> bool:
        """True if the continuations of a look-up may stand among drawn children."""
        return self.proposer.either and self.rule is Traversal


def resolve(options: TreeOptions) -> Pair:
    """Build the proposer, choose the rule, and set the kind of children that the rule needs.

    Raises:
        ValueError: the pair would change the target's distribution and `allow_lossy` is not set (the message lists the
            legal rules), or a file cannot be used.
    """
    proposer = PROPOSERS.load(options.proposer).build(options.tree, nodes=options.num_speculative_tokens)
    if options.levels is not None:
        proposer.max_depth = min(proposer.max_depth, options.levels)
    name = options.rejection_sample_method
    looks_up = proposer.by_value and options.text is not None and issubclass(options.text.drafter, Lookup)
    rules = dict(RULES)
    if options.acceptance is not None:  # a registered name is unknown in an engine process
        rules[name] = RULES.load(options.acceptance)
    legal = [name for name, rule in rules.items() if rule.serves(proposer.kinds, proposer.max_children)]
    init_width = getattr(options.tree, "init_width", 1)
    if name == "auto":
        name = "rrsw" if init_width > 1 else best_rule(proposer.kinds)
        merges = options.lookup is not None and not proposer.either
        if (merges or looks_up) and "target_only" in legal and init_width == 1:
            name = "target_only"  # no other rule takes merged continuations
    rule = rules[name]
    kind = rule.kind_of(proposer.kinds)
    if name not in legal and not options.tree.allow_lossy:
        too_many = kind is not None and rule.most is not None
        why = (
            f"it takes at most {rule.most} children of a node"
            if too_many
            else f"it is lossless for {', '.join(rule.kinds)} children, and {options.method!r} drafts "
            f"{', '.join(proposer.kinds)}"
        )
        raise ValueError(
            f"speculative_config['rejection_sample_method']: {name!r} would change the target's distribution with "
            f"method {options.method!r}: {why}. Use one of: auto, {', '.join(legal)}; "
            "or set tree: {'allow_lossy': true}"
        )
    if init_width > 1 and rule.draw is None:
        raise ValueError(
            f"speculative_config['rejection_sample_method']: {name!r} accepts whole paths, but init_width={init_width} "
            "needs a rule that walks node by node, for example rrsw"
        )
    if options.lookup is not None and name != "target_only" and not proposer.either:
        raise ValueError(
            f"speculative_config['tree']['lookup']: {name!r} has to know how every node was sampled, and merged "
            "continuations were not; set 'rejection_sample_method' to 'target_only', or remove 'lookup'"
        )
    proposer.kind = kind or proposer.kinds[0]
    loss = None
    if init_width > 1:
        loss = (
            f"init_width={init_width} emits the initial token with the longest accepted continuation, so neither "
            "sampled nor greedy output is the target's own"
        )
    elif name not in legal:
        loss = f"{name} with {proposer.kind} children changes the target's distribution"
    most = min(proposer.max_children, options.num_speculative_tokens)
    return Pair(proposer, name, rule, loss, most, init_width, looks_up and rule is TargetOnly)


def as_chains(options: TreeOptions) -> TreeOptions:
    """Return options with which no tree branches.

    Raises:
        ValueError: the method cannot be told to.
    """
    narrow: Any = {field.name: 1 for field in fields(options.tree) if field.name == "max_children"}
    options = replace(options, tree=replace(options.tree, **narrow))
    if not resolve(options).chains:
        raise ValueError(
            f"speculative_config['method']: {options.method!r} drafts branches, and the target keeps a recurrent state "
            "of one sequence a request; use 'adaptive_tree', which then drafts chains, or a 'shape' such as [1, 1, 1]"
        )
    return options


def verifiable_lookup(draft: Any, pair: Pair) -> Lookup | None:
    """Return the draft, if it is a look-up whose continuations can be verified as they are."""
    return draft if isinstance(draft, Lookup) and pair.rule is TargetOnly else None


def best_rule(kinds: tuple[Kind, ...]) -> str:
    """Rule of `auto` for sampled requests without a seed: for deterministic children nothing beats sampling from the
    target; for sampled ones no rule accepts more than `traversal`."""
    return "target_only" if kinds[0] == "one_hot" else "traversal"


def clamp_budget(options: TreeOptions, proposer: Proposer) -> TreeOptions:
    """Cap the node budget at what the proposer can draft: the scheduler reserves a slot for each node."""
    most = options.num_speculative_tokens
    return replace(options, num_speculative_tokens=min(most, proposer.max_nodes or most))
