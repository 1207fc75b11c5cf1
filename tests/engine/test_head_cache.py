"""A head's K/V is that of a head that reads the whole text at once, whatever has happened to the request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import PROMPTS, TARGET, V2, Engines, metric, runner_of
from tests.engine.leaning import lean, second_best
from vllm_adaptive_tree.budget import Budget, Costs, Planner
from vllm_adaptive_tree.budget.fixed import ALL, Plan
from vllm_adaptive_tree.engine.v1 import head_drafter
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, StepView
from vllm_adaptive_tree.engine.v1.unread_states import Unread, UnreadStates

pytestmark = pytest.mark.skipif(V2, reason="it reads the V1 adapter's cache")

LONG = ["\n\n".join(PROMPTS[i:] + PROMPTS[:i]) for i in (0, 9)]  # 200 tokens each, in chunks of 64
SHARED = "\n\n".join(PROMPTS[:8])  # more than three blocks
AUXILIARY = (2, 4, 5)
HITS, ACCEPTED = "prefix_cache_hits", "spec_decode_num_accepted_tokens"


class Reference:
    """The keys and values of an EAGLE-3 head, [2, tokens - 1, Hkv, D]: its layer is its first, so they need no
    attention."""

    def __init__(self, folder: str):
        self.target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        self.weights = load_file(Path(folder) / "model.safetensors")

    @torch.inference_mode()
    def keys_values(self, text: list[int]) -> Tensor:
        ids, weights = torch.tensor([text]), self.weights
        states = self.target(ids, output_hidden_states=True).hidden_states
        following = self.target.get_input_embeddings()(ids[0, 1:])
        combined = torch.cat([states[layer][0, :-1] for layer in AUXILIARY], -1) @ weights["fc.weight"].T
        read = torch.cat([_normed(following), _normed(combined)], -1)
        key, value = (
            (read @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(1, (-1, heads.CONFIG["head_dim"]))
            for name in "kv"
        )
        cos, sin = LlamaRotaryEmbedding(self.target.config)(read[None], torch.arange(len(read))[None])
        key = key.transpose(0, 1)[None]
        return torch.stack([apply_rotary_pos_emb(key, key, cos, sin)[0][0].transpose(0, 1), value])


class BlockReference(Reference):
    """Those of a DFlash head, [2, tokens - 1, layers * Hkv, D]: no layer needs attention for them, and no token."""

    @torch.inference_mode()
    def keys_values(self, text: list[int]) -> Tensor:
        ids, weights = torch.tensor([text]), self.weights
        states = self.target(ids, output_hidden_states=True).hidden_states
        read = _normed(torch.cat([states[layer][0, :-1] for layer in heads.AUXILIARY], -1) @ weights["fc.weight"].T)
        key, value = (
            torch.cat([read @ weights[f"layers.{at}.self_attn.{name}_proj.weight"].T for at in range(2)], 1)
            for name in "kv"
        )
        key, value = (one.unflatten(1, (-1, heads.CONFIG["head_dim"])) for one in (key, value))
        cos, sin = LlamaRotaryEmbedding(self.target.config)(read[None], torch.arange(len(read))[None])
        norms = torch.stack([weights[f"layers.{at}.self_attn.k_norm.weight"] for at in range(2)])  # [layers, D]
        key = _normed(key) * norms.repeat_interleave(heads.CONFIG["num_key_value_heads"], 0)
        key = key.transpose(0, 1)[None]
        return torch.stack([apply_rotary_pos_emb(key, key, cos, sin)[0][0].transpose(0, 1), value])


REFERENCES = {"eagle3": Reference, "dflash": BlockReference}


def _normed(states: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(states, states.shape[-1:], eps=heads.CONFIG["rms_norm_eps"])


class CacheSpy:
    """After every reading of the head: what the paged cache holds of each request, and what is kept of it."""

    def __init__(self, llm: Any, reference: Reference, patch: pytest.MonkeyPatch):
        self.runner, self.reference = runner_of(llm), reference
        self.seen: dict[str, list[Tensor]] = {}
        self.texts: dict[str, list[int]] = {}
        self.kept = self.rests = self.late = 0
        catch_up = self.runner.drafter.catch_up

        def caught_up(items: list[CatchUp], *args: Any) -> Any:
            result = catch_up(items, *args)
            batch, most = self.runner.input_batch, self.runner.effective_drafter_max_model_len
            assert all(
                item.root < most if item.root is not None else self.runner.drafter.unread is None for item in items
            )
            self.rests += not items and bool(batch.num_reqs)
            self.late += sum(bool(item.late) for item in items)
            for item in items:
                self.look(item)
            return result

        patch.setattr(self.runner.drafter, "catch_up", caught_up)

    def look(self, item: CatchUp) -> None:
        runner, drafter = self.runner, self.runner.drafter
        name, end = runner.input_batch.req_ids[item.row], item.start + len(item.tokens)
        layers = [runner.compilation_config.static_forward_context[one] for one in sorted(drafter.layers)]
        pages = drafter.block_table.block_table.cpu[[item.row], : -(-end // drafter.block_table.block_size)]
        gathered = [torch.cat(layer.impl.gather(layer, layer.kv_cache, pages))[:, :, :end] for layer in layers]
        self.seen.setdefault(name, []).append(torch.cat(gathered, 1).transpose(1, 2).clone())
        self.texts[name] = runner.input_batch.token_ids_cpu[item.row, : end + 1].tolist()
        contexts = drafter.contexts
        if contexts.layers and contexts.length[item.row]:
            kept = [contexts.layers[layer.layer_name][:, item.row, contexts.room :] for layer in layers]
            self.seen[name].append(torch.cat([one[:, : contexts.length[item.row]] for one in kept], 2))
            self.kept += 1

    def check(self) -> None:
        """At all positions that it has read, and nothing is remembered for the next check."""
        assert self.seen
        for name, text in self.texts.items():
            expected = self.reference.keys_values(text)
            for found in self.seen[name]:
                torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-4, atol=1e-4)
        self.seen, self.texts = {}, {}


@pytest.fixture(scope="module", params=REFERENCES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def head(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return {"eagle3": heads.eagle3, "dflash": heads.dflash}[kind](tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def reference(kind: str, head: str) -> Reference:
    return REFERENCES[kind](head)


def start(engines: Engines, head: str, room: int = 64, **config: Any) -> Any:
    tree = {"budget": None, "threshold": 0}
    return engines.start(
        {"method": "opt_tree", "model": head, "num_speculative_tokens": 12, "tree": tree, **config},
        max_model_len=320,
        max_num_batched_tokens=room,
        num_gpu_blocks_override=30,
    )


@pytest.fixture(scope="module")
def shared(engines: Engines, head: str) -> Any:
    return start(engines, head)


@pytest.fixture
def llm(shared: Any) -> Iterator[Any]:
    yield shared
    shared.reset_prefix_cache()


@pytest.fixture
def spy(llm: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> CacheSpy:
    monkeypatch.setattr(head_drafter, "FEW", 8)  # prompts of a chunk are long
    return CacheSpy(llm, reference, monkeypatch)


def texts(llm: Any, prompts: list[str], tokens: int = 24) -> list[tuple[list[int], list[int]]]:
    """Prompts and greedy outputs."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return [(output.prompt_token_ids, list(output.outputs[0].token_ids)) for output in outputs]


def test_chunked_prefill_and_prefix_hits(llm: Any, spy: CacheSpy) -> None:
    known = texts(llm, LONG)
    hits = metric(llm, HITS)
    assert texts(llm, LONG) == known
    assert metric(llm, HITS) - hits >= 2 * 5 * 32, "six full blocks each, of which vLLM drops one"
    hits = metric(llm, HITS)
    texts(llm, [SHARED + "\n\nfirst of two", SHARED + "\n\nanother ending", SHARED])
    assert metric(llm, HITS) - hits >= 2 * 2 * 32
    spy.check()
    assert spy.kept > 20


def test_accepted_branches(llm: Any, spy: CacheSpy, monkeypatch: pytest.MonkeyPatch) -> None:
    known = texts(llm, PROMPTS[:6])
    spy.check()
    accepted = metric(llm, ACCEPTED)
    lean(runner_of(llm), second_best(known, heads.VOCABULARY), monkeypatch.setattr)
    assert texts(llm, PROMPTS[:6]) == known
    assert metric(llm, ACCEPTED) - accepted > 60
    spy.check()


def test_what_is_not_read_along_the_path_is_seen(llm: Any, spy: CacheSpy, monkeypatch: pytest.MonkeyPatch) -> None:
    known = texts(llm, PROMPTS[:6])
    spy.check()
    lean(runner_of(llm), second_best(known, heads.VOCABULARY), monkeypatch.setattr)
    new_states = StepView.new_states
    monkeypatch.setattr(StepView, "new_states", lambda step, accepted: new_states(step, {}))
    assert texts(llm, PROMPTS[:6]) == known
    with pytest.raises(AssertionError, match="not close"):
        spy.check()


def test_preemption(llm: Any, spy: CacheSpy, monkeypatch: pytest.MonkeyPatch) -> None:
    known = texts(llm, PROMPTS, 40)
    lean(runner_of(llm), second_best(known, heads.VOCABULARY), monkeypatch.setattr)
    assert texts(llm, PROMPTS, 40) == known
    assert metric(llm, "num_preemptions") > 0
    spy.check()


@pytest.mark.parametrize("rows", [None, 48, 0])
def test_a_budget_that_rests(llm: Any, spy: CacheSpy, rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and outputs pass while nothing grows; trees then grow behind prefix hits on what nobody has read, or on
    what was read for want of room. No `rows`: a head that only waits shortly."""
    runner = runner_of(llm)
    drafter = runner.drafter
    assert drafter.unread is not None
    read = list[int]()
    if rows == 0:
        monkeypatch.setattr(drafter, "unread", None)
    elif rows is not None:
        width = drafter.unread.states.shape[1] * 4

        def counted(unread: Unread) -> None:
            read.append(len(unread.tokens))
            drafter.read_keys(unread)

        monkeypatch.setattr(drafter, "unread", UnreadStates(counted, tokens=64, most=rows * width))
    known = texts(llm, LONG)
    lean(runner, second_best(known, heads.VOCABULARY), monkeypatch.setattr)
    llm.reset_prefix_cache()
    rests = []
    for seconds in (10.0, 1e-9):  # of a level
        flat = {"rows": [1, 1000], "seconds": [0.5, 0.5]}
        costs = Costs.from_json({"verify": flat, "draft": {**flat, "seconds": [seconds, seconds]}, "context": 0.0})
        with monkeypatch.context() as patch:
            patch.setattr(runner, "budget", None)
            runner.begin_budget(Planner(costs, sampled=runner.cuts_sampled))
            spy.rests = 0
            assert texts(llm, LONG) == known
        rests.append(spy.rests)
    spy.check()
    assert rests[0] > 20 > rests[1]
    if rows is None:
        assert spy.late >= 2
    elif rows:
        assert len(drafter.unread.free) == rows
        assert sum(read) > 300, "both prompts, while nothing grew"


def test_a_shorter_context(
    engines: Engines, shared: Any, head: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt is longer than what the head reads, another request grows beyond it."""
    prompts = [LONG[0], PROMPTS[0], PROMPTS[3]]
    known = texts(shared, prompts, 80)
    llm = start(engines, head, max_model_len=80)
    spy = CacheSpy(llm, reference, monkeypatch)
    lean(runner_of(llm), second_best(known, heads.VOCABULARY), monkeypatch.setattr)
    assert texts(llm, prompts, 80) == known
    assert len(spy.texts) == 2, "the long prompt is never read"
    assert all(70 < len(text) <= 80 for text in spy.texts.values())
    assert metric(llm, ACCEPTED) > 30
    spy.check()


class Trial(Budget):
    """Two requests of the batch draft in a step, the others rest."""

    def begin(self, greedy: Any) -> Plan:
        self.plan = Plan(ALL, 0.0, few=2, most=40)
        return self.plan


def test_prefix_hits_on_what_waits_in_the_same_step(
    engines: Engines, head: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of one token gets no tree, and in a trial most rest; others hit their blocks while they are filled."""
    llm = start(engines, head, room=512)
    runner, spy = runner_of(llm), CacheSpy(llm, reference, monkeypatch)
    one, other = SHARED + "\n\nfirst of two", SHARED + "\n\nanother ending"
    for prompts, tokens in (([one, other], [1, 24]), ([other] * 4, [24] * 4)):
        hits = metric(llm, HITS)
        asked = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in tokens]
        llm.generate(prompts, asked, use_tqdm=False)
        assert metric(llm, HITS) - hits >= 2 * 32
        spy.check()
        llm.reset_prefix_cache()
        runner.begin_budget(Trial(sampled=runner.cuts_sampled, most=40))
        runner.budget.turns.turn = 1
