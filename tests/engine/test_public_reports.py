"""Reports about speculation by users of vLLM, SGLang and other engines, tried here: a row for each kind.

A new report is a new `Report`: it is served with trees and without, and judged by identity, token by token, in float32.
Rows with the same `engine` and `spec` share an engine; a row that starts its own is `slow`. Reports that other
tests hold are in reports.md.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import SamplingParams
from vllm.config import KVEventsConfig

from tests.engine import heads
from tests.engine.conversations import LENGTH, Cut, ask, in_turn
from tests.engine.copies import changed, padded
from tests.engine.crossings import GRAMMARS, crossings
from tests.engine.engines import DRAFT, PAIR, PROMPTS, TARGET, V2, Engines, generate, metric, tree
from tests.engine.heads import HEADS
from tests.engine.proofs import (
    BLOCK,
    accepted,
    accepted_alike,
    cached,
    cut,
    distinct,
    drafted_alike,
    full,
    hit,
    identical,
    preempted,
    rested,
    shaped,
    stopped,
    together,
)
from tests.engine.reports import Report, Trials, grouped
from vllm_adaptive_tree.versions import minor

TEXTS = PROMPTS[:4] if V2 else PROMPTS
COUNT = len(TEXTS)
CROWD = PROMPTS[:8] if V2 else PROMPTS
SHARED = "\n\n".join(PROMPTS[:6])
STOPS = in_turn(["e"], ["self", "\n"], ["return", " the", "="])
STOP_TOKENS = list(range(260, 380))
FORMS = in_turn(*GRAMMARS, None)

# Engines: arguments, with trees and without.
SMALL: dict[str, Any] = {
    "max_model_len": 320,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 14 if V2 else 24,
    "scheduling_policy": "priority",
}
"""Prompts in chunks, and too few blocks for all requests."""
UNUSUAL: dict[str, Any] = {
    **SMALL,
    "num_gpu_blocks_override": 30,
    "max_num_scheduled_tokens": 48,
    "max_num_active_seqs": 5,
    "long_prefill_token_threshold": 8,
    "long_prefill_token_threshold_adaptive": True,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.1,
    "prefix_caching_hash_algo": "sha256_cbor",
    "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    "kv_cache_metrics": True,
    "enable_mfu_metrics": True,
}
"""A chunk is shorter than a tree."""
WHOLE = {"max_model_len": 320}
"""SMALL without chunks: vLLM's CPU engine dies of a seed in a chunked prompt."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGER: dict[str, Any] = {
    "model": partial(changed, TARGET, max_position_embeddings=128),
    "hf_overrides": {"max_position_embeddings": 512, "rope_parameters": YARN},
}
PADDED = {"model": partial(padded, TARGET, 2100)}

# What drafts: speculative_config.
TREE = tree(12, threshold=0.2)
DYSPEC = {**tree(12), "method": "dyspec"}
NGRAM = {**tree(12), "model": "ngram"}
HEAD = {**tree(12, threshold=0.2), "model": str(PAIR / "head")}
DROPPED = int(minor(vllm.__version__) == "0.32")
"""Blocks of a prefix hit that vLLM gives up beside a head; from 0.33 on a hash covers the token after the block."""
KINDS = "eagle", "eagle3", "eagle3 reduced", "peagle", "dflash", "dflash2", "lilicorr", "dspark"


DAMAGED = {
    "half of one": '{"key": {"versions": [3, "0.4',
    "absurd costs": '{"name": "x", "costs": {"verify": {"rows": [1, 1], "seconds": [NaN, -1]}, "draft": 7}}',
}
"""Of what a cost profile may become."""


def head(make: Any, **options: Any) -> dict[str, Any]:
    return {**tree(12, threshold=0, **options), "model": make}


def marks(kind: str) -> tuple[Any, ...]:
    return (heads.ON_V1,) * (kind == "peagle")


def short_mtp(folder: Path) -> str:
    return changed(heads.mtp(folder / "whole"), folder / "short", max_position_embeddings=128)


def written(text: str, folder: Path) -> str:
    folder.mkdir()
    (folder / "costs.json").write_text(text)
    return str(folder / "costs.json")


def chat(turns: int) -> list[Any]:
    return ask([SHARED]) + [one._replace(turn=True) for one in ask(PROMPTS[6 : 5 + turns])]


def again(prompt: str, times: int) -> list[Any]:
    return ask([prompt] * times, max_tokens=2 * LENGTH)


REPORTS = [
    # -- where a request ends
    Report(
        name="a stop in a path that crosses max_tokens",
        source="sglang#31599, sglang#33758, sglang#30291",
        spec=TREE,
        requests=ask(TEXTS * 3, stop=STOPS, max_tokens=in_turn(3, 5, 7, 9, 11)),
        proofs=(stopped(COUNT), cut(COUNT // 2)),
    ),
    Report(
        name="tokens and logprobs after a stop string",
        source="vllm#47616, sglang#23802",
        spec=TREE,
        requests=ask(TEXTS * 2, stop=STOPS, logprobs=2, include_stop_str_in_output=in_turn(False, True)),
        proofs=(stopped(COUNT), cut(COUNT // 2)),
    ),
    Report(
        name="the end of the text inside a path",
        source="sglang#39826, vllm#2607",
        spec=TREE,
        requests=ask(TEXTS, logit_bias={0: 9.0}, ignore_eos=in_turn(False, True, False), temperature=in_turn(0, 0.8)),
        proofs=(stopped(COUNT // 4),),
    ),
    Report(
        name="min_tokens counts tokens, not steps",
        source="sglang#33643",
        spec=TREE,
        requests=ask(TEXTS * 2, stop_token_ids=STOP_TOKENS, min_tokens=in_turn(0, 3, 6, 9, 12), ignore_eos=False),
        proofs=(stopped(COUNT), cut(1)),
    ),
    Report(
        name="stops and grammars",
        source="sglang#21723, vllm#36138",
        spec=TREE,
        requests=ask(
            TEXTS * 2,
            structured_outputs=FORMS,
            stop=STOPS,
            max_tokens=in_turn(4, 9, LENGTH, 6, 14),
            min_tokens=in_turn(0, 3),
            temperature=in_turn(0, 0.8, 0),
        ),
        proofs=(stopped(1), accepted(COUNT)),
    ),
    Report(
        name="one or two tokens",
        source="ik_llama.cpp#2358, vllm-ascend#2658",
        spec=TREE,
        requests=ask(TEXTS, max_tokens=in_turn(1, 2, 3), min_tokens=1, temperature=in_turn(0, 1.0)),
    ),
    Report(
        name="prompts up to one token below the longest context",
        source="vllm#44185, vllm#22935",
        spec=TREE,
        requests=ask([Cut(512 - left, left) for left in (1, 2, 3, 5, 9, 17)], max_tokens=60),
        proofs=(full(512),),
    ),
    # -- what is sampled
    Report(
        name="penalties of every accepted token",
        source="sglang#33643, TensorRT-LLM#17701",
        spec=TREE,
        requests=ask(
            TEXTS,
            frequency_penalty=in_turn(0, 0.9),
            presence_penalty=in_turn(0.9, 0),
            repetition_penalty=in_turn(1.2, 1, 1.1),
            temperature=in_turn(0, 0, 0.8),
        ),
        proofs=(accepted(1),),
    ),
    Report(
        name="bad words of the last requests of a batch",
        source="vllm#31908",
        spec=TREE,
        requests=ask(TEXTS) + ask(TEXTS[: COUNT // 2], bad_words=["the", " self", "import", "return"]),
        proofs=(accepted(COUNT),),
    ),
    Report(
        name="seeds beside requests without a seed",
        source="vllm#9441, vllm#10863",
        spec=TREE,
        requests=ask(TEXTS * 2, temperature=in_turn(0.8, 0), seed=in_turn(7, None, None)),
    ),
    Report(
        name="requests without a seed, one by one",
        source="TensorRT-LLM#19487",
        spec=DYSPEC,
        requests=[ask([PROMPTS[3]] * 6, temperature=1.0, seed=None)],
        judge=distinct,
        slow=True,
    ),
    Report(
        name="logprobs of an accepted path",
        source="vllm#17876, vllm#34497",
        spec=TREE,
        requests=ask(TEXTS, logprobs=in_turn(1, 4), temperature=in_turn(0, 0, 0.8)),
        proofs=(accepted(1),),
    ),
    Report(
        name="prompt logprobs and the prefix cache",
        source="vllm#18908",
        spec=TREE,
        requests=ask([SHARED + one for one in TEXTS[:4]], prompt_logprobs=in_turn(2, None), max_tokens=8),
        times=2,
        proofs=(hit,),
    ),
    Report(
        name="several completions",
        source="vllm#9441",
        spec=TREE,
        requests=ask(TEXTS[:4], n=3, temperature=0.9),
    ),
    Report(
        name="parameters crossed at random",
        source="own",
        spec=TREE,
        requests=crossings(16 if V2 else 48),
        proofs=(accepted(16),),
    ),
    Report(
        name="more parameters crossed at random",
        source="own",
        spec=TREE,
        requests=crossings(32 if V2 else 160, seed=1),
        proofs=(accepted(32),),
        slow=True,
    ),
    Report(
        name="parameters crossed at random, drawn trees",
        source="own",
        spec=DYSPEC,
        requests=crossings(16 if V2 else 80, seed=2),
        slow=True,
    ),
    Report(
        name="parameters crossed at random, a head",
        source="own",
        spec=HEAD,
        requests=crossings(16 if V2 else 80, seed=3),
        proofs=(accepted(16),),
        slow=True,
    ),
    # -- the prefix cache
    Report(
        name="prompts that end at a block",
        source="sglang#22819",
        spec=TREE,
        requests=ask([Cut(blocks * BLOCK + more, blocks) for blocks in (1, 2, 3) for more in (-1, 0, 1)]),
        times=2,
        proofs=(hit, accepted(9)),
    ),
    Report(
        name="one prompt several times in a batch",
        source="sglang#8726",
        spec=TREE,
        requests=ask([PROMPTS[0], PROMPTS[0], PROMPTS[3], PROMPTS[0]]),
        times=2,
        proofs=(drafted_alike(0, 1, 3),),
    ),
    Report(
        name="a chat finds its prefix",
        source="sglang#32459",
        spec=TREE,
        requests=[chat(3)],
        proofs=(cached(),),
    ),
    Report(
        name="equal long prompts in one step, with a head",
        source="vllm#41838",
        spec=HEAD,
        requests=ask([SHARED, SHARED, SHARED + PROMPTS[7], SHARED]),
        times=2,
        proofs=(hit, accepted(8), drafted_alike(0, 1, 3)),
    ),
    Report(
        name="a chat with a head",
        source="vllm#53670, vllm#54360",
        spec=HEAD,
        requests=[chat(3)],
        proofs=(cached(blocks=DROPPED), accepted(4)),
    ),
    Report(
        name="a head accepts as much after a prefix hit",
        source="vllm#14649, vllm#41838",
        spec=HEAD,
        requests=[again(SHARED, 3)],
        proofs=(cached(blocks=DROPPED), accepted_alike),
    ),
    *(
        Report(
            name=f"a chat with a head: {kind}",
            source="vllm#53670, vllm#54360",
            spec=head(HEADS[kind]),
            requests=[chat(3)],
            proofs=(cached(blocks=DROPPED), accepted(1 if "reduced" in kind else LENGTH)),
            leans=True,
            slow=True,
            marks=marks(kind),
        )
        for kind in KINDS
    ),
    # -- what leaves
    Report(
        name="aborted names come again at once",
        source="vllm#23697, vllm#39012",
        spec=TREE,
        requests=[ask([one, TEXTS[i - 1], one], leaves=in_turn(3, 2, 0)) for i, one in enumerate(TEXTS)],
        proofs=(accepted(COUNT),),
        environment={"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
        marks=(pytest.mark.skipif(V2, reason="steps in flight: vLLM itself gives their tokens to the new request"),),
    ),
    Report(
        name="a storm of cancels on a shared prefix",
        source="sglang#23392, sglang#13826",
        spec=TREE,
        requests=[
            ask([SHARED + one] * 4, leaves=in_turn(1 + i % 3, 2, 1, 0)) if i % 4 < 3 else ask([SHARED + one])
            for i, one in enumerate(TEXTS)
        ],
        proofs=(accepted(COUNT // 4), hit),
    ),
    # -- small caches, chunks and priorities
    Report(
        name="preempted by priority with drafts scheduled",
        source="vllm#28558, vllm#31944",
        spec=TREE,
        engine=SMALL,
        requests=ask(CROWD, priority=in_turn(3, 2, 1, 0), max_tokens=40),
        proofs=(preempted, accepted(COUNT)),
    ),
    Report(
        name="grammars of preempted requests",
        source="vllm#30916, vllm#31876",
        spec=TREE,
        engine=SMALL,
        plain=WHOLE,
        requests=ask(TEXTS * 2, structured_outputs=FORMS, max_tokens=40, temperature=in_turn(0, 0, 0.8)),
        proofs=(preempted,),
    ),
    Report(
        name="more requests than the tokens of a step",
        source="vllm#46899, vllm#20247",
        spec=TREE,
        engine=SMALL,
        requests=ask(TEXTS * 2, frequency_penalty=in_turn(0, 0.5)),
        proofs=(accepted(COUNT),),
    ),
    Report(
        name="fewer tokens in a step than in a batch",
        source="vllm#50708, TensorRT-LLM#16101",
        spec=TREE,
        engine={"max_num_scheduled_tokens": 40},
        plain={},
        requests=ask(PROMPTS[:6]),
        proofs=(together, accepted(6)),
        slow=True,
    ),
    Report(
        name="unusual arguments of the scheduler and the cache",
        source="own",
        spec=TREE,
        engine=UNUSUAL,
        plain={},
        requests=crossings(8 if V2 else 24, seed=5),
        proofs=(accepted(8),),
        slow=True,
    ),
    Report(
        name="long prompts in chunks up to the longest context",
        source="vllm#20531, vllm#44185",
        spec=TREE,
        engine=SMALL,
        requests=ask([Cut(320 - left, left) for left in (1, 2, 17, 40)] + TEXTS[:2], max_tokens=60),
        proofs=(accepted(8),),
    ),
    Report(
        name="chunks, preemption and a head",
        source="vllm#20531",
        spec=HEAD,
        engine=SMALL,
        requests=ask([Cut(length, length) for length in (319, 200, 150, 65, 64, 63)] + TEXTS, max_tokens=40),
        proofs=(preempted, accepted(COUNT)),
        slow=True,
    ),
    Report(
        name="a full cache and n-grams",
        source="vllm#19459, vllm-ascend#734",
        spec=NGRAM,
        engine=SMALL,
        requests=ask([one * 3 for one in TEXTS], max_tokens=60),
        proofs=(preempted, accepted(COUNT)),
        slow=True,
    ),
    # -- other drafts
    Report(
        name="a seeded request in steps without a draft",
        source="vllm-ascend#13608",
        spec=NGRAM,
        requests=ask([one * 2 for one in TEXTS], temperature=in_turn(0.7, 1.0), top_p=in_turn(1, 0.9, 1)),
        proofs=(rested, accepted(1)),
    ),
    Report(
        name="one word again and again, with n-grams",
        source="vllm#41758",
        spec=NGRAM,
        requests=ask(["serving" * 48, "serving" * 12, "x = [" * 20]),
        proofs=(accepted(4),),
    ),
    Report(
        name="a tree of depth 1",
        source="TensorRT-LLM#10323",
        spec={**tree(3, shape=[3]), "method": "static_tree"},
        requests=ask(TEXTS),
        proofs=(shaped(-1, -1, -1), accepted(COUNT)),
    ),
    # -- other models
    Report(
        name="one long request beside short ones, by YaRN in hf_overrides",
        source="vllm#58080",
        spec={**TREE, "model": partial(changed, DRAFT, max_position_embeddings=128)},
        engine=LONGER,
        requests=ask([Cut(300), *PROMPTS[:5]], max_tokens=40),
        proofs=(accepted(30),),
        slow=True,
    ),
    Report(
        name="the same with a head",
        source="vllm#58080",
        spec=head(partial(heads.dflash, max_position_embeddings=128)),
        engine=LONGER,
        requests=ask([Cut(300), *PROMPTS[:5]], max_tokens=40),
        proofs=(accepted(90),),
        leans=True,
        slow=True,
    ),
    Report(
        name="the same with the target's own MTP module",
        source="vllm#58080",
        spec=head(short_mtp, draft="mtp"),
        engine={**LONGER, "model": short_mtp},
        requests=ask([Cut(300), *PROMPTS[:5]], max_tokens=40),
        proofs=(accepted(90),),
        leans=True,
        slow=True,
    ),
    Report(
        name="a vocabulary larger than the tokenizer's",
        source="vllm#5203, vllm#13849, vllm#35937",
        spec={**TREE, "model": partial(padded, DRAFT, 2100)},
        engine=PADDED,
        requests=ask(TEXTS, temperature=in_turn(0, 1.0), structured_outputs=in_turn(None, None, None, GRAMMARS[1])),
        proofs=(accepted(COUNT),),
        slow=True,
    ),
    # -- two ranks
    *(
        Report(
            name=f"two ranks close to the longest context: {what}",
            source="vllm#49027",
            spec={**tree(25), "model": model, "draft_tensor_parallel_size": 2},
            requests=ask([*(Cut(512 - left, left) for left in (2, 9, 20)), PROMPTS[0]], max_tokens=60),
            ranks=2,
            slow=True,
        )
        for what, model in {"a model": DRAFT, "a head": str(PAIR / "head")}.items()
    ),
    # -- damaged files
    *(
        Report(
            name=f"a damaged cost profile: {what}",
            source="own",
            spec=tree(12, budget="auto", cost_profile=partial(written, text)),
            requests=ask(TEXTS),
            slow=True,
        )
        for what, text in DAMAGED.items()
    ),
    # -- a server's engine
    Report(
        name="stops and grammars, in a server",
        source="sglang#31599, vllm#47616",
        spec=TREE,
        requests=ask(TEXTS * 2, stop=STOPS, structured_outputs=FORMS, max_tokens=in_turn(5, 9, LENGTH), logprobs=2),
        proofs=(stopped(1), accepted(COUNT)),
        process=True,
    ),
    Report(
        name="aborted names come again at once, in a server",
        source="vllm#23697, sglang#23392",
        spec=TREE,
        requests=[ask([SHARED + one] * 3, leaves=in_turn(2, 1, 0)) for one in TEXTS],
        proofs=(accepted(COUNT),),
        process=True,
    ),
    Report(
        name="parameters crossed at random, in a server",
        source="own",
        spec=TREE,
        requests=crossings(8 if V2 else 32, seed=4),
        process=True,
    ),
]


SHAPES = {"chain": (1, 1, 1), "pairs": (2, 2, 2), "wide": (4, 6, 8)}


@pytest.fixture(scope="module")
def trials(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Trials]:
    chosen = [one.callspec.params["report"] for one in request.session.items if one.name.startswith("test_report[")]
    found = Trials(engines, tmp_path_factory.mktemp("reports"), chosen)
    yield found
    found.shutdown()


@pytest.mark.parametrize("report", grouped(REPORTS))
def test_report(trials: Trials, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trials.run(report, monkeypatch)
    for proof in (report.judge or identical, *report.proofs):
        proof(run)


def accepted_per_step(llm: Any) -> float:
    generate(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    return metric(llm, "spec_decode_num_accepted_tokens") / metric(llm, "spec_decode_num_drafts")


@pytest.mark.slow
def test_more_nodes_are_never_accepted_less(trials: Trials, engines: Engines) -> None:
    """A wider tree accepted less, since its K/V were rewound by a wrong count (TensorRT-LLM#10343); a tree that is a
    chain accepted less than the chain (#15842)."""
    trials.shutdown()
    chain = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}
    shapes = {
        name: {**tree(sum(widths), shape=list(widths)), "method": "static_tree"} for name, widths in SHAPES.items()
    }
    found = {name: accepted_per_step(engines.start(config)) for name, config in {"vllm": chain, **shapes}.items()}
    assert found["chain"] == pytest.approx(found["vllm"], abs=0.03), (
        "but for the last steps, where vLLM's drafts nothing"
    )
    assert found["chain"] < found["pairs"] < found["wide"]
