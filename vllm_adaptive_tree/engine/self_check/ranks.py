"""Check F: every rank has drafted, verified and accepted the same."""

import hashlib
import json
from typing import Any

from vllm_adaptive_tree.engine.common.ranks import objects_of_all
from vllm_adaptive_tree.engine.self_check.verdict import Finding


def check(decided: Any) -> Finding:
    """`decided`: trees and texts of this rank, as JSON."""
    found = objects_of_all(hashlib.sha256(json.dumps(decided).encode()).hexdigest())
    differing = sum(one != found[0] for one in found)
    return Finding("ranks", differing == 0, {"ranks": len(found), "differing": differing})
