"""Check F: all ranks have drafted, verified and accepted the same."""

import hashlib
import json
from typing import Any

from vllm_adaptive_tree.engine.common.ranks import objects_of_all
from vllm_adaptive_tree.engine.self_check.verdict import Finding


def check(decided: Any) -> Finding:
    """Compare ranks. `decided`: trees and texts of this rank, as JSON."""
    digests = objects_of_all(hashlib.sha256(json.dumps(decided).encode()).hexdigest())
    differing = sum(digest != digests[0] for digest in digests)
    return Finding("ranks", differing == 0, {"ranks": len(digests), "differing": differing})
