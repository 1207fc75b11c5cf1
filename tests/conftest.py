"""What all tests share: a cache folder for vLLM of their own, so that nothing learnt elsewhere counts.

All but what vLLM has read of its model classes, which takes it a process of ten seconds for each.
"""

import os
import tempfile
from pathlib import Path

USERS = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm")) / "modelinfos"
CACHE = tempfile.TemporaryDirectory(prefix="vllm-cache-", ignore_cleanup_errors=True)
os.environ["VLLM_CACHE_ROOT"] = CACHE.name
USERS.mkdir(parents=True, exist_ok=True)
(Path(CACHE.name) / "modelinfos").symlink_to(USERS, target_is_directory=True)
