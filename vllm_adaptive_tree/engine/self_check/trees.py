"""Random trees, the same on every rank."""

import random


def random_parents(nodes: int, *, seed: int, levels: int | None = None) -> list[int]:
    """Parent of every node, uniform among the earlier ones and the root (-1); at most `levels` deep."""
    choose = random.Random(seed)
    depth, parents = {-1: 0}, list[int]()
    for node in range(nodes):
        parent = choose.choice([candidate for candidate in depth if levels is None or depth[candidate] < levels])
        parents.append(parent)
        depth[node] = depth[parent] + 1
    return parents


def paths(parents: list[int]) -> list[list[int]]:
    """Paths from the root to each leaf: nodes, the root left out."""
    leaf_paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        leaf_paths.append(path)
    return leaf_paths
