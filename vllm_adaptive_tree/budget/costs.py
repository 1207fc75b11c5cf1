"""Measured costs in a file, so that an engine need not measure again."""

import json
from pathlib import Path

from vllm_adaptive_tree.budget.curve import Curve
from vllm_adaptive_tree.files import write_whole


def read_profile(file: Path) -> Curve:
    """Raises ValueError where the file does not hold what `write_profile` writes."""
    try:
        return Curve.from_json(json.loads(file.read_text())["verify"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"speculative_config['tree']['cost_profile']: {str(file)!r} is no cost profile ({error}); remove it, and "
            "costs are measured anew"
        ) from error


def write_profile(file: Path, verify: Curve) -> None:
    write_whole(file, (json.dumps({"verify": verify.to_json()}) + "\n").encode())
