"""Quota of tree nodes of each running request in the next step."""

MOST_TREES = 256
"""Requests of a batch above which Model Runner V2 drafts nothing: its rows alone fill a GPU, and all that a tree needs
would be there for every one of `max_num_seqs`, which is 1,024 on large GPUs."""

MOST_ROWS = 2048
"""Rows of a step up to which CUDA graphs are captured; above, a forward takes longer than launching its kernels, and no
costs let more be verified."""


def nodes_per_request(*, running: int, nodes: int, room: int) -> int:
    """The largest equal share that leaves every running request its tokens and room for one newcomer.

    A request costs its root, its nodes, and the one slot that vLLM's scheduler reserves for a draft model. The
    newcomer may need `nodes + 2` (a resumed request is padded to a full draft) or an equal share; while `room`
    (tokens of a step) is too small for both, it gets half.
    """
    newcomer = max(min(nodes + 2, room // 2), room // (running + 1))
    return max(0, min(nodes, (room - newcomer) // running - 2))


def too_small(*, nodes: int, room: int, longest: int, limit: str = "max_num_batched_tokens") -> str | None:
    """What to say where a tree never has all its nodes, not even that of one request alone; None: it has.

    Args:
        nodes: the node budget.
        room, limit: tokens of a step, and vLLM's argument that limits them.
        longest: vLLM's `max_model_len`; a tree takes a slot for its root, each node and the next token.
    """
    by_step, by_context = nodes_per_request(running=1, nodes=nodes, room=room), max(0, longest - 2)
    fits = min(by_step, by_context)
    if fits >= nodes:
        return None
    name, value = (limit, room) if by_step <= by_context else ("max_model_len", longest)
    return (
        f"{name}={value} is too small for trees of {nodes} nodes: at most {fits} fit; raise it, or lower "
        "num_speculative_tokens"
    )


def schedule(*, requests: int, nodes: int, room: int, budget: str | int | None) -> list[tuple[int, int, int]]:
    """Quotas for every batch of up to `requests`, as vLLM writes them: first batch size, last one, nodes.

    For Model Runner V2, where the scheduler reserves rows and slots before the trees are drafted, and while the draft
    rests. Prompts get only the rows that are left.

    Args:
        budget: the user's. With "auto" trees get at most half of a step, and `MOST_ROWS`, but one node each; with a
            number a tree gets at most that.
    """
    quotas: list[tuple[int, int, int]] = []
    for running in range(1, requests + 1):
        share = nodes_per_request(running=running, nodes=nodes, room=room) if running <= MOST_TREES else 0
        if isinstance(budget, int):
            share = min(share, budget)
        elif budget is not None:
            share = min(share, max(1, min((room + 1) // 2, MOST_ROWS) // running - 2))
        first = quotas.pop()[0] if quotas and quotas[-1][2] == share else running
        quotas.append((first, running, share))
    return quotas
