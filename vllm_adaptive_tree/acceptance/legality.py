"""Acceptance rules by name, and those that are lossless for a proposer."""

from vllm_adaptive_tree.acceptance.rule import Kind, Rule
from vllm_adaptive_tree.registry import Registry

VLLM_RULES = ("standard", "synthetic", "block", "fly")
"""vLLM's rules for chains; a tree method refuses them by name."""

RULES: Registry[type[Rule]] = Registry(
    "acceptance rule",
    Rule,
    {
        "target_only": "vllm_adaptive_tree.acceptance.target_only:TargetOnly",
        "rrs": "vllm_adaptive_tree.acceptance.rrs:RRS",
        "rrsw": "vllm_adaptive_tree.acceptance.rrs:RRSw",
        "spechub": "vllm_adaptive_tree.acceptance.hub:SpecHub",
        "greedy_multi_draft": "vllm_adaptive_tree.acceptance.hub:GreedyMultiDraft",
        "k_seq": "vllm_adaptive_tree.acceptance.k_seq:KSeq",
        "traversal": "vllm_adaptive_tree.acceptance.traversal:Traversal",
    },
    group="vllm_adaptive_tree.acceptance",
    reserved=("auto", *VLLM_RULES),
)
"""Rules by the name that users write into `rejection_sample_method`."""


def legal_rules(kinds: tuple[Kind, ...], max_children: int) -> list[str]:
    """Rules that are lossless for children of one of these kinds, up to `max_children` of a node."""
    return [name for name, rule in RULES.items() if rule.serves(kinds, max_children)]
