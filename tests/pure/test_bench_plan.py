"""Engines that are alive together, and the cells that they run."""

import pytest

from tests.pure.benches import PLAIN, STRESS, chain, tree
from vllm_adaptive_tree.bench import plan
from vllm_adaptive_tree.bench.plan import BASE, Cell


@pytest.mark.parametrize("chains", [[], [3], [1, 3, 5], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("methods", range(4))
def test_never_more_than_three_engines_and_always_one_to_compare_with(chains, methods):
    configs = [PLAIN, *map(chain, chains), *(tree(f"tree {n}") for n in range(methods)), STRESS]
    groups = plan.groups(configs)
    for group in groups:
        only_chains = all(config.role == "chain" for config in group[1:])
        assert len(group) <= 3
        assert group[0].name == ("tree 0" if only_chains and methods and len(group) > 1 else BASE)
    others = [config.name for group in groups for config in group[1:]]
    assert sorted(others) == sorted(config.name for config in configs[1:]), "each of them once"
    if methods and 3 in chains:
        assert {config.name for config in groups[0][1:]} == {"tree 0", "chain 3"}


def test_stages_run_what_their_cells_ask_for():
    configs = [PLAIN, chain(3), tree("tree"), STRESS]
    wanted = [Cell("offline", 1), Cell("offline", 8, sampled=True), Cell("bursty", 32), Cell("server", 1)]
    found = {stage.name: [cell.name for cell in stage.cells] for stage in plan.stages(configs, wanted)}
    assert found == {
        "offline: no speculation, tree, chain 3": ["offline 1 T=0", "offline 8 sampled", "bursty 1-32 T=0"],
        "server: no speculation, tree, chain 3": ["server 1 T=0"],
        "offline: no speculation, random draft": ["offline 1 T=0"],
    }
    assert [stage.name for stage in plan.stages([PLAIN], wanted[:1])] == ["offline: no speculation"]


def test_which_configurations_are_fixed():
    assert PLAIN.fixed
    assert chain(3).fixed
    assert tree("tree", budget=8).fixed
    assert not tree("tree").fixed
