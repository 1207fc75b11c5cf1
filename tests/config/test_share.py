import pytest

from vllm_adaptive_tree.engine.common.node_quota import MOST_ROWS, MOST_TREES, nodes_per_request, schedule, too_small


@pytest.mark.parametrize("nodes", [1, 12, 60, 120])
@pytest.mark.parametrize("room", [128, 512, 2048, 8192])
@pytest.mark.parametrize("running", [1, 2, 7, 32, 128])
def test_everyone_fits_with_a_newcomer(nodes: int, room: int, running: int) -> None:
    share = nodes_per_request(running=running, nodes=nodes, room=room)
    assert 0 <= share <= nodes
    if share:
        left = room - running * (share + 2)
        assert left >= min(nodes + 2, room // 2)


def test_nothing_is_withheld_without_need() -> None:
    assert nodes_per_request(running=1, nodes=60, room=124) == 60
    assert nodes_per_request(running=16, nodes=60, room=2048) == 60
    assert nodes_per_request(running=32, nodes=60, room=512) == 12
    assert nodes_per_request(running=40, nodes=60, room=64) == 0


@pytest.mark.parametrize(
    ("room", "longest", "said"),
    [
        (124, 62, None),
        (122, 62, "max_num_batched_tokens=122 is too small for trees of 60 nodes: at most 59 fit"),
        (124, 61, "max_model_len=61 is too small for trees of 60 nodes: at most 59 fit"),
        (64, 50, "max_num_batched_tokens=64 is too small for trees of 60 nodes: at most 30 fit"),
    ],
)
def test_trees_that_never_have_all_their_nodes(room: int, longest: int, said: str | None) -> None:
    found = too_small(nodes=60, room=room, longest=longest)
    assert (found is None) == (said is None)
    assert found is None or found.startswith(str(said))


def test_a_schedule_for_every_batch_size() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    assert schedule(requests=4, nodes=8, room=512, budget=None) == [(1, 4, 8)]
    found = schedule(requests=64, nodes=60, room=512, budget=None)
    assert len(found) > 5
    lookup = build_dynamic_sd_schedule_lookup(found, 64, 60)
    assert lookup[1:] == [nodes_per_request(running=running, nodes=60, room=512) for running in range(1, 65)]
    crowd = build_dynamic_sd_schedule_lookup(schedule(requests=1024, nodes=24, room=8192, budget="auto"), 1024, 24)
    assert crowd[MOST_TREES] > 0
    assert not any(crowd[MOST_TREES + 1 :]), "no places are reserved where nothing is drafted"


@pytest.mark.parametrize("nodes", [1, 24, 61, 500])
@pytest.mark.parametrize("room", [64, 125, 512, 2048, 8192, 16384])
def test_half_of_a_step_is_left_for_prompts(nodes: int, room: int) -> None:
    """Where the budget is "auto"; a tree alone has all that there is room for, and no tree loses its last node."""
    for first, last, share in schedule(requests=300, nodes=nodes, room=room, budget="auto"):
        for running in (first, last):
            most = nodes_per_request(running=running, nodes=nodes, room=room) if running <= MOST_TREES else 0
            assert min(most, 1) <= share <= most
            assert share < 2 or running * (2 + share) <= min((room + 1) // 2, MOST_ROWS)
        assert first > 1 or share == nodes_per_request(running=1, nodes=nodes, room=room)


def test_a_number_is_what_a_tree_gets_at_most() -> None:
    assert schedule(requests=8, nodes=60, room=1024, budget=24) == [(1, 8, 24)]
    given = {"requests": 64, "nodes": 60, "room": 512}
    assert schedule(**given, budget=300) == schedule(**given, budget=None)
