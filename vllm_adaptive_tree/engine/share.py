"""How many tree nodes each running request may bring into the next step."""


def nodes_per_request(*, running: int, nodes: int, room: int) -> int:
    """The largest equal share that leaves every running request its tokens and room for one newcomer.

    A request costs its root, its nodes, and the one slot that vLLM's scheduler reserves beside a draft model. The
    newcomer may need `nodes + 2` (a resumed request is padded to a full draft) or an equal share; while `room`
    (max_num_batched_tokens) is too small for both, it gets half.
    """
    newcomer = max(min(nodes + 2, room // 2), room // (running + 1))
    return max(0, min(nodes, (room - newcomer) // running - 2))
