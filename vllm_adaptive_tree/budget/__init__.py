"""The node budget of a batch: measured costs, calibrated acceptance, one price, and one allocation for all requests."""

from vllm_adaptive_tree.budget.acceptance_model import Calibration, DraftTemperature
from vllm_adaptive_tree.budget.allocation import allocate, top_nodes
from vllm_adaptive_tree.budget.cost import FREE, Costs, Curve
from vllm_adaptive_tree.budget.fixed import Budget, Plan
from vllm_adaptive_tree.budget.planner import Planner
from vllm_adaptive_tree.budget.trial import Turns

__all__ = [
    "FREE",
    "Budget",
    "Calibration",
    "Costs",
    "Curve",
    "DraftTemperature",
    "Plan",
    "Planner",
    "Turns",
    "allocate",
    "top_nodes",
]
