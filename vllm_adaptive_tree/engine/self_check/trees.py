"""Random trees, the same on every rank."""

import random


def random_parents(nodes: int, *, seed: int, levels: int | None = None) -> list[int]:
    """The parent of every node, uniform among the earlier ones and the root (-1); at most `levels` deep."""
    choose = random.Random(seed)
    depth, parents = {-1: 0}, list[int]()
    for node in range(nodes):
        parent = choose.choice([one for one in depth if levels is None or depth[one] < levels])
        parents.append(parent)
        depth[node] = depth[parent] + 1
    return parents


def paths(parents: list[int]) -> list[list[int]]:
    """Every path from the root to a leaf: nodes, the root left out."""
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        found.append(path)
    return found
