"""The node budget of a batch: measured costs, calibrated acceptance, and one allocation for all requests."""

from vllm_adaptive_tree.budget.allocation import allocate, best
from vllm_adaptive_tree.budget.calibration import Calibration
from vllm_adaptive_tree.budget.controller import FREE, Controller
from vllm_adaptive_tree.budget.costs import Costs
from vllm_adaptive_tree.budget.curve import Curve
from vllm_adaptive_tree.budget.pauses import Pauses
from vllm_adaptive_tree.budget.sharpening import Sharpening

__all__ = ["FREE", "Calibration", "Controller", "Costs", "Curve", "Pauses", "Sharpening", "allocate", "best"]
