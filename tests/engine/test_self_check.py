"""The start-up check on a real engine, and each of its parts on an engine that is broken where that part looks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config.compilation import CUDAGraphMode

from tests.engine import heads
from tests.engine.engines import (
    DRAFT,
    ENGINE,
    PROMPTS,
    TARGET,
    V2,
    Engines,
    assert_identical,
    generate,
    runner_of,
    set_costs,
    tree,
)
from tests.engine.families import FAMILIES
from tests.engine.test_families import begin_anew

pytestmark = pytest.mark.skipif(not V2, reason="MODEL_RUNNER=v2")


@pytest.fixture(scope="module")
def llm(engines: Engines) -> Any:
    return engines.start(tree(12), max_num_seqs=6)


def verdict(llm: Any) -> Any:
    from vllm_adaptive_tree.engine.self_check import check

    return check.check(runner_of(llm))


def test_a_right_engine_passes(llm: Any) -> None:
    found = verdict(llm)
    assert found.passed, str(found)
    assert [one.check for one in found.findings] == [
        *("attention", "draws", "commit", "model", "decoding", "draft", "waits", "ranks")
    ]


def test_one_row_of_a_model_with_experts_may_differ(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rounding has chosen another expert."""
    from vllm_adaptive_tree.engine.self_check import model

    by_node = model._by_node

    def flipped(*args: Any) -> dict[str, torch.Tensor]:
        found = by_node(*args)
        next(iter(found.values()))[3] += 5
        return found

    monkeypatch.setattr(model, "_by_node", flipped)
    assert verdict(llm).failed == ["model"]
    monkeypatch.setattr(type(runner_of(llm).model_config), "is_moe", True)
    assert verdict(llm).passed


def break_a_mask_bit(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """The kernel's: one row of the batch sees a node that is not its ancestor, or misses one."""
    from vllm_adaptive_tree.attention import triton_tree

    original = triton_tree.tree_attention

    def wrong(query: Any, key: Any, value: Any, table: Any, start: Any, context: Any, bits: Any, *rest: Any) -> Any:
        bits = bits.clone()
        bits[5, 0] ^= 2
        return original(query, key, value, table, start, context, bits, *rest)

    monkeypatch.setattr(triton_tree, "tree_attention", wrong)


def break_a_draw(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """The next token."""
    from vllm_adaptive_tree.kernels import FusedRNG

    original = FusedRNG._tokens
    monkeypatch.setattr(FusedRNG, "_tokens", lambda *args, **kwargs: original(*args, **kwargs) + 1)


def break_the_commit(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """K/V of every accepted node from the slot before."""
    from vllm_adaptive_tree.engine.v2.verification import Verification

    original = Verification.commit

    def wrong(step: Any, nodes: torch.Tensor, *rest: Any) -> None:
        original(step, torch.where(nodes > 0, nodes - 1, nodes), *rest)

    monkeypatch.setattr(Verification, "commit", wrong)


def break_the_parents(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """Attention reads a tree in which one node hangs elsewhere."""
    from vllm_adaptive_tree.engine.v2 import verification

    original = verification.ancestor_mask

    def wrong(parent: torch.Tensor) -> torch.Tensor:
        parent = parent.clone()
        parent[:, 5] = torch.where(parent[:, 5] < 0, 0, -1)
        return original(parent)

    monkeypatch.setattr(verification, "ancestor_mask", wrong)


def break_the_positions(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """Nodes keep the positions of a chain."""
    from vllm_adaptive_tree.engine.v2.verification import Verification

    monkeypatch.setattr(Verification, "write_rows", lambda *_: None)


def break_the_draft(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """Every node of a level sees its siblings."""
    from vllm_adaptive_tree.engine.common.attention import DraftKeys

    original = DraftKeys.open_level

    def wrong(keys: Any, parent: torch.Tensor, *rest: Any) -> None:
        original(keys, parent, *rest)
        width = parent.shape[1]
        keys.bias[:, :, keys.seen.shape[2] - width : keys.seen.shape[2]] = 0

    monkeypatch.setattr(DraftKeys, "open_level", wrong)


def break_the_order_of_the_device(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """The accept path reads a value on the host."""
    from vllm_adaptive_tree.step import accept, step

    original = step.accept

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        wait(found.tokens)
        return found

    def wait(tokens: torch.Tensor) -> None:
        source = "def read(tokens): tokens.max().item()"
        space: dict[str, Any] = {}
        exec(compile(source, accept.__file__, "exec"), space)
        space["read"](tokens)

    monkeypatch.setattr(step, "accept", wrong)


def break_a_rank(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """The second rank has decided something else."""
    from vllm_adaptive_tree.engine.self_check import ranks

    monkeypatch.setattr(ranks, "objects_of_all", lambda mine: [mine, mine[::-1]])


def break_another_rank(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """The second rank has found something that this one has not."""
    from vllm_adaptive_tree.engine.self_check import check

    monkeypatch.setattr(check, "objects_of_all", lambda mine: [mine, ["model"]])


def break_a_compiler(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """A kernel does not compile."""
    from vllm_adaptive_tree.attention import triton_tree

    monkeypatch.setattr(triton_tree, "_attend", None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (break_a_mask_bit, "attention"),
        (break_a_compiler, "attention"),
        (break_a_draw, "draws"),
        (break_the_commit, "commit"),
        (break_the_parents, "model"),
        (break_the_positions, "model"),
        (break_the_draft, "draft"),
        (break_the_order_of_the_device, "waits"),
        (break_a_rank, "ranks"),
        (break_another_rank, "another rank"),
    ],
)
def test_a_broken_engine_fails_by_name(
    llm: Any, change: Callable[[pytest.MonkeyPatch, Any], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, runner_of(llm))
    found = verdict(llm)
    assert name in found.failed, str(found)
    follows = {"decoding"} if name in ("commit", "model") else set()  # it reads what they left in the cache
    assert set(found.failed) <= {name} | follows, str(found)


def test_a_certificate_shortens_the_next_check(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something that it depends on has changed; a check that failed leaves none."""
    from vllm_adaptive_tree.engine.self_check import certificate, check

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(check, "_steps", lambda *_: [])  # seconds
    monkeypatch.setattr(runner_of(llm), "switch_off", lambda: None)

    def parts() -> list[str]:
        return [one.check for one in check.start(runner_of(llm)).findings]

    whole = ["attention", "draws", "ranks"]
    with monkeypatch.context() as broken:
        break_a_draw(broken, runner_of(llm))
        assert parts() == whole
    assert parts() == whole
    assert parts() == ["attention", "ranks"]
    monkeypatch.setattr(certificate, "device", lambda: {"device": "another"})
    assert parts() == whole
    assert len(list((tmp_path / "vllm_adaptive_tree").iterdir())) == 2
    for file in (tmp_path / "vllm_adaptive_tree").iterdir():
        file.write_text("{")
    assert parts() == whole


def test_the_doctors_engine(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part, and what whole trees cost."""
    from vllm_adaptive_tree.cli.doctor import engine_checks

    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 1e-6]})
    engines.shutdown()
    config = {"method": "dyspec", "model": DRAFT, "num_speculative_tokens": 7, "rejection_sample_method": "rrsw"}
    found = engine_checks(TARGET, config, **ENGINE)
    assert all(one["passed"] for one in found), found
    assert found[-1] == {"check": "worth", "passed": True, "figures": {f"{n} requests": 1.0 for n in (1, 8, 32)}}


def test_one_request_at_a_time(engines: Engines) -> None:
    """The check's own requests take turns."""
    assert verdict(engines.start(tree(6), max_num_seqs=1)).passed


def test_whole_graphs_that_fail_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_adaptive_tree.engine.self_check import check
    from vllm_adaptive_tree.engine.self_check.verdict import Finding, Verdict
    from vllm_adaptive_tree.engine.v2.graphs import drop_whole_graphs

    whole, parts = SimpleNamespace(cg_mode=CUDAGraphMode.FULL), SimpleNamespace(cg_mode=CUDAGraphMode.PIECEWISE)
    manager: Any = SimpleNamespace(_candidates={(8, 0): [whole, parts], (16, 0): [parts]})
    runner = SimpleNamespace(drop_whole_graphs=lambda: drop_whole_graphs(manager))
    written = list[Any]()
    certificate = SimpleNamespace(exists=lambda: False, write=written.append)
    monkeypatch.setattr(check, "Certificate", lambda _: certificate)
    monkeypatch.setattr(check, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(
        check, "check", lambda *_, **__: Verdict([Finding("model", whole not in manager._candidates[8, 0], {})])
    )
    monkeypatch.setenv(check.SWITCH, "strict")
    with pytest.raises(RuntimeError, match="model FAILED|FAILED: model"):
        check.start(runner)
    monkeypatch.setenv(check.SWITCH, "")
    assert check.start(runner).passed  # type: ignore[union-attr]
    assert manager._candidates == {(8, 0): [parts], (16, 0): [parts]}
    assert not written, "the next start checks whole graphs again"
    check.start(runner)
    assert len(written) == 1


def test_a_failure_switches_trees_off(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_adaptive_tree.engine.self_check import check
    from vllm_adaptive_tree.engine.v2.sampler import TreeSampler

    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **kinds[i % 2]) for i in range(4)]
    plain = generate(engines.start(), PROMPTS[:4], params)
    llm = engines.start(tree(6))
    runner = runner_of(llm)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole, parts = SimpleNamespace(cg_mode=CUDAGraphMode.FULL), SimpleNamespace(cg_mode=CUDAGraphMode.PIECEWISE)
    graphs = {(8, 0): [whole, parts], (16, 0): [parts]}
    with monkeypatch.context() as broken:
        break_a_draw(broken, runner)
        broken.setenv(check.SWITCH, "strict")
        with pytest.raises(RuntimeError, match="draws FAILED.*doctor --gpu"):
            check.start(runner)
        broken.setenv(check.SWITCH, "")
        seen = list[Any]()
        manager = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            decode_query_len=7,
            graphs={"whole": object()},
            dispatch=runner.cudagraph_manager.dispatch,
            release_graphs=lambda: seen.append(dict(graphs)),
            _candidates=graphs,
            _capture_descs={"all": "known"},
            _init_candidates=lambda: seen.append((len(graphs), manager._capture_descs, manager.decode_query_len)),
        )
        broken.setattr(runner, "cudagraph_manager", manager)
        broken.setattr(runner, "capture_model", lambda: seen.append("recorded"))
        assert check.start(runner).failed == ["draws"]
    assert seen[0] == {(8, 0): [parts], (16, 0): [parts]}, "it has tried without whole graphs, which hold our attention"
    assert seen[1:] == [(0, {}, 1), "recorded"], "and leaves vLLM's, of one row a request"

    rows: list[int] = []
    prepare = runner.prepare_attn

    def counted(batch: Any) -> Any:
        rows.append(batch.num_tokens - batch.num_reqs * (not batch.has_prefill))
        return prepare(batch)

    monkeypatch.setattr(runner, "prepare_attn", counted)
    monkeypatch.setattr(runner.speculator, "_run_model", lambda *_: pytest.fail("the draft runs"))
    monkeypatch.setattr(TreeSampler, "__call__", lambda *_: pytest.fail("a tree is accepted"))
    assert_identical(plain, generate(llm, PROMPTS[:4], params))
    assert rows.count(0) >= 11, "one row a request"


def test_modes(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_adaptive_tree.engine.self_check import check

    monkeypatch.setattr(check, "check", lambda _: pytest.fail("it must not run"))
    monkeypatch.setenv(check.SWITCH, "off")
    assert check.start(runner_of(llm)) is None
    monkeypatch.setenv(check.SWITCH, "no")
    with pytest.raises(ValueError, match="'strict'"):
        check.start(runner_of(llm))


def test_a_draft_that_repeats_a_token_passes(
    engines: Engines, seeing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its paths is the same from its end. The target has M-RoPE."""
    from vllm_adaptive_tree.engine.self_check import draft as module

    paths, deepest = list[list[int]](), module._deepest

    def noted(*args: Any) -> Any:
        found = deepest(*args)
        paths.append(found.tokens)
        return found

    monkeypatch.setattr(module, "_deepest", noted)
    begin_anew(engines)
    target, draft = FAMILIES["qwen3-vl"], FAMILIES["qwen3"].saved(tmp_path / "draft")
    given = {"skip_tokenizer_init": True, "max_model_len": 256, **target.arguments}
    llm = engines.start({**tree(12), "model": draft}, model=target.saved(tmp_path / "target"), max_num_seqs=6, **given)
    found = verdict(llm)
    assert any(len(path) > 1 and path == path[::-1] for path in paths)
    assert found.passed, str(found)


@pytest.mark.parametrize(
    "make", [heads.eagle, heads.eagle3, pytest.param(partial(heads.eagle3, reduced=True), id="reduced")]
)
def test_a_head_is_compared_too(
    engines: Engines, make: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"budget": None, "shape": [2, 2, 1]}
    given = {"method": "mcsd", "model": make(tmp_path / "head"), "num_speculative_tokens": 10, "tree": shape}
    llm = engines.start(given, max_num_seqs=6)
    found = verdict(llm)
    assert found.passed, str(found)
    assert next(one.figures for one in found.findings if one.check == "draft")["paths"] > 0
    break_the_draft(monkeypatch, runner_of(llm))
    assert verdict(llm).failed == ["draft"]


BLOCK_HEADS = [heads.dflash, heads.dspark, heads.dflash2, *([heads.xpress] if heads.XPRESS else [])]


@pytest.mark.parametrize("make", BLOCK_HEADS)
def test_the_block_of_a_head_is_compared(
    engines: Engines, make: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_adaptive_tree.engine.v2.verification import Verification

    llm = engines.start({**tree(12), "model": make(tmp_path / "head")}, max_num_seqs=6)
    found = verdict(llm)
    assert found.passed, str(found)
    figures = next(one.figures for one in found.findings if one.check == "draft")
    assert figures["paths"] == 3
    assert figures["path reversed"] > figures["allowed"], figures
    write_path = Verification.write_path

    def unpicked(step: Any, batch: Any, accepted: Any) -> torch.Tensor:
        """The context is made of the rows behind the root, whichever were accepted."""
        return torch.arange(len(write_path(step, batch, accepted)))

    monkeypatch.setattr(Verification, "write_path", unpicked)
    assert verdict(llm).failed == ["draft"]


@pytest.mark.parametrize(("nodes", "requests"), [(4, 1), (8, 6)])
def test_a_block_longer_than_its_tree(engines: Engines, nodes: int, requests: int, tmp_path: Path) -> None:
    """Its rows have slots of their own, in the requests of the check too."""
    head, room = heads.dflash(tmp_path / "head", block_size=16), 85 * min(requests, 2)
    llm = engines.start({**tree(nodes), "model": head}, max_num_seqs=requests, max_num_batched_tokens=room)
    found = verdict(llm)
    assert found.passed, str(found)
    figures = next(one.figures for one in found.findings if one.check == "draft")
    assert figures["vLLM's"] < 0.01 < figures["path reversed"], figures
