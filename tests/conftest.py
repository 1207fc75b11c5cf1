"""What all tests share: a cache folder for vLLM of their own, so that nothing learnt elsewhere counts."""

import os
import tempfile

CACHE = tempfile.TemporaryDirectory(prefix="vllm-cache-", ignore_cleanup_errors=True)
os.environ["VLLM_CACHE_ROOT"] = CACHE.name
