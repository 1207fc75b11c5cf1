from torch import Tensor

from vllm_adaptive_tree.acceptance.rejection import Children
from vllm_adaptive_tree.noise import Noise


def target_only(p: Tensor, q: Tensor, children: Children, noise: Noise) -> Tensor:
    """Draw from the target; the children do not matter (form A of NSS; OPT-Tree's verification, arXiv 2406.17276).

    Lossless for every tree, and with the same noise the same tokens as plain decoding. Accepts p(children): the best
    that any lossless rule can do for children that were not sampled.
    """
    return noise.choose(p)
