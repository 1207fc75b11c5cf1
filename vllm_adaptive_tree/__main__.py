"""`python -m vllm_adaptive_tree` is the command `vllm-adaptive-tree`."""

import sys

from vllm_adaptive_tree.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
