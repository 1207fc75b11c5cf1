"""Configurations at start-up: each on every path, and the error for each mistake."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from tests.engine.engines import DRAFT, TARGET, tree
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine import translate
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.targets import checks
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import PROPOSERS
from vllm_adaptive_tree.versions import SUPPORTED, window


def build(spec: Any, target: str = TARGET, **arguments: Any) -> Any:
    return EngineArgs(
        model=target, speculative_config=spec, **{"max_model_len": 512, **arguments}
    ).create_engine_config()


def asked(method: str, rule: str = "auto", **options: Any) -> dict[str, Any]:
    """A speculative_config for any method; options go under "tree"."""
    return {**tree(20, **options), "method": method, "rejection_sample_method": rule}


def edited(folder: str, tmp_path: Path, **changes: Any) -> str:
    """A copy of a model folder with another config.json."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(copy)


def test_asked_for_nothing_changes_nothing() -> None:
    config = build({"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3})
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.additional_config == {}


def test_trees_that_do_not_fit_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(translate.logger, "warning", lambda text, *values: said.append(text % values))
    build(tree(60))
    assert said == []
    build(tree(60), max_model_len=40)
    assert said == [
        "max_model_len=40 is too small for trees of 60 nodes: at most 38 fit; raise it, or lower num_speculative_tokens"
    ]


@pytest.mark.parametrize("arguments", [EngineArgs, AsyncEngineArgs])
def test_translation(arguments: Any) -> None:
    spec = tree(60, threshold=0, max_depth=8) | {"revision": None, "enforce_eager": True}
    args = arguments(model=TARGET, speculative_config=spec, max_model_len=512)
    config = args.create_engine_config()
    assert args.speculative_config == spec, "the user's arguments are left as they were"
    assert config.speculative_config.method == "draft_model"
    assert config.parallel_config.worker_cls.endswith("TreeWorker")
    options = tree_options(config)
    assert (options.method, options.num_speculative_tokens) == ("opt_tree", 60)
    assert (options.tree.threshold, options.tree.max_depth, options.tree.draft_temperature) == (0, 8, "auto")


@pytest.mark.parametrize("name", ["eagle3-like", "my-eagle-draft", "dflash"])
def test_a_plain_draft_is_a_plain_draft_whatever_its_path(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(DRAFT, folder)
    config = build({**tree(4), "model": str(folder)})
    assert config.speculative_config.method == "draft_model"
    assert config.speculative_config.draft_model_config.model == str(folder)
    assert config.speculative_config.draft_model_config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "at least 1"]),
        ({"num_speculative_tokens": 2.5}, ["num_speculative_tokens", "whole number"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens"]),
        ({"num_speculative_tokens": None}, ["num_speculative_tokens", "missing"]),
        ({"model": None}, ["model", "missing"]),
        ({"model": 3}, ["model", "name the draft"]),
        ({"model": "/no/such/folder"}, ["model", "/no/such/folder", "config.json"]),
        ({"rejection_sample_method": "standard"}, ["rejection_sample_method", "vLLM's rule"]),
        (
            {"rejection_sample_method": "spechub"},
            ["'spechub'", "hub_pair", "auto, target_only, traversal", "allow_lossy"],
        ),
        ({"rejection_sample_method": "best"}, ["rejection_sample_method", "'best'", "target_only", "traversal"]),
        (
            {"rejection_sample_method": "synthetic"},
            ["rejection_sample_method", "'synthetic' is vLLM's rule for chains", "remove the key or use one of auto"],
        ),
        ({"synthetic_acceptance_length": 2.0}, ["synthetic_acceptance_length", "remove the key", "'draft_model'"]),
        ({"synthetic_acceptance_rates": [0.8, 0.5]}, ["synthetic_acceptance_rates", "remove the key"]),
        ({"prompt_lookup_max": 3}, ["prompt_lookup_max", "belongs into 'tree'"]),
        ({"use_local_argmax_reduction": True}, ["use_local_argmax_reduction", "remove it", "revision"]),
        ({"attention_backend": "CPU_ATTN"}, ["attention_backend", "remove it"]),
        ({"tree": 3}, ["tree", "mapping"]),
        ({"tree": {"depth": 3}}, ["depth", "max_depth"]),
        ({"tree": {"budget": 0}}, ["budget", "'auto' or a whole number of at least 1"]),
        ({"tree": {"cost_profile": 3}}, ["cost_profile", "the path of a file"]),
        ({"tree": {"allow_lossy": "yes"}}, ["allow_lossy", "true or false"]),
        ({"tree": {"max_depth": 0}}, ["max_depth", "at least 1"]),
        ({"tree": {"threshold": -0.1}}, ["threshold", "between 0 and 1"]),
        ({"tree": {"threshold": float("nan")}}, ["threshold"]),
        ({"tree": {"threshold": "high"}}, ["threshold", "'auto'"]),
        ({"tree": {"draft_temperature": 1e-300}}, ["draft_temperature", "between 0.01 and 100 or 'auto'", "1e-300"]),
        ({"tree": {"draft": "eagle"}}, ["'draft'", "'eagle'", "an independent model", "token embedding"]),
        ({"tree": {"draft": "mtp"}}, ["model_type 'llama'", "no MTP module", "remove 'draft'"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype", "the model's own dtype"]),
        ({"draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size"]),
    ],
)
def test_bad_values(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="speculative_config|tensor") as error:
        build({**tree(25), **changes})
    assert all(word in str(error.value) for word in words)


def test_a_text_in_the_place_of_a_mapping() -> None:
    """vLLM's command line reads JSON; its Python takes no text, and says so in other words."""
    with pytest.raises(ValueError, match=r"speculative_config must be a mapping, and is a text, .*give json.loads"):
        build(json.dumps(tree(25)))
    for text in (json.dumps({"method": "ngram"}), "opt_tree"):
        with pytest.raises(AttributeError):
            build(text)


@pytest.mark.parametrize(
    ("spec", "rule", "kind"),
    [
        (asked("opt_tree"), "target_only", "one_hot"),
        (asked("opt_tree", "traversal"), "traversal", "one_hot"),
        ({"method": "dyspec", "model": DRAFT, "num_speculative_tokens": 20}, "traversal", "without_replacement"),
        (asked("dyspec", "rrsw", mode="heap", max_children=4), "rrsw", "without_replacement"),
        (asked("eagle2", top_k=4, max_depth=3), "target_only", "one_hot"),
        (asked("static_tree"), "traversal", "without_replacement"),
        (asked("static_tree", children="top_k"), "target_only", "one_hot"),
        (asked("static_tree", children="iid", shape=[2, 2]), "traversal", "iid"),
        (asked("static_tree", "rrs", shape="ternary"), "rrs", "iid"),
        (asked("static_tree", "k_seq", shape=[[0], [1], [0, 0]]), "k_seq", "iid"),
        (asked("static_tree", "spechub", shape="binary"), "spechub", "hub_pair"),
        (asked("static_tree", "greedy_multi_draft", shape=[3, 2]), "greedy_multi_draft", "top_k_plus_one"),
        (asked("mcsd", "rrsw"), "rrsw", "without_replacement"),
        (asked("mcsd", "rrs", children="iid"), "rrs", "iid"),
    ],
)
def test_every_method_brings_the_children_that_its_rule_needs(spec: Any, rule: str, kind: str) -> None:
    pair = resolve(tree_options(build(spec)))
    assert (pair.rule_name, pair.proposer.kind, pair.lossless) == (rule, kind, True)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (asked("c2t", gate="/no/such/file"), ["'gate'", "/no/such/file"]),
        (asked("c2t", gate=f"{DRAFT}/model.safetensors"), ["gate", "3 features"]),
        (asked("c2t", gate=f"{DRAFT}/config.json"), ["speculative_config['tree']['gate']", "cannot read"]),
        (asked("c2t", beta=2), ["beta", "between 0 and 1"]),
        (
            asked("opt_tree", budget="auto", cost_profile="/no/such/costs.json"),
            ["'cost_profile'", "cannot be written", "null"],
        ),
        (asked("sequoia", vector="/no/such/file"), ["'vector'", "/no/such/file"]),
        (asked("sequoia", vector=f"{DRAFT}/config.json"), ["'vector'", '{"vector": [numbers between 0 and 1]}']),
        (asked("mcsd", init_width=2), ["init_width", "changes the output", "allow_lossy"]),
        (asked("mcsd", stop="type1", gate=f"{DRAFT}/config.json"), ["['gate']", "cannot read"]),
        (asked("mcsd", shape="binary"), ["shape", "k-config"]),
        (asked("static_tree", shape="quaternary"), ["shape", "'ternary'"]),
        (asked("static_tree", shape=[]), ["shape", "k-config"]),
        (asked("static_tree", shape=[[0], [1, 0]]), ["[1, 0]", "parent [1]"]),
        (asked("static_tree", shape=[[1]]), ["[1]", "earlier sibling"]),
        (asked("static_tree", children="best"), ["children", "'top_k'"]),
        (asked("dyspec", mode="tree"), ["mode", "'heap'"]),
        (asked("dyspec", top_k=4), ["top_k", "dyspec", "max_children"]),
        (asked("eagle2", threshold=0.5), ["threshold", "eagle2", "top_k"]),
        (asked("static_tree", draft_temperature=1.0), ["draft_temperature", "static_tree", "shape"]),
    ],
)
def test_bad_options_of_a_method(spec: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"speculative_config|gate|shape") as error:
        build(spec)
    assert all(word in str(error.value) for word in words), error.value


ILLEGAL = [
    (asked("opt_tree", "rrsw"), "target_only, traversal", "without_replacement"),
    (asked("eagle2", "k_seq"), "target_only, traversal", "iid"),
    (asked("dyspec", "rrs"), "target_only, rrsw, traversal", "iid"),
    (asked("dyspec", "spechub"), "target_only, rrsw, traversal", "hub_pair"),
    (asked("static_tree", "rrsw", children="iid"), "target_only, rrs, k_seq, traversal", "without_replacement"),
    (asked("static_tree", "rrs", children="top_k"), "target_only, traversal", "iid"),
    (
        asked("static_tree", "spechub", shape="ternary"),
        "target_only, rrs, rrsw, greedy_multi_draft, k_seq, traversal",
        "at most 2 children",
    ),
]


@pytest.mark.parametrize(("spec", "legal", "why"), ILLEGAL)
def test_an_illegal_pair_is_refused_with_the_legal_rules(spec: Any, legal: str, why: str) -> None:
    with pytest.raises(ValueError, match="would change the target's distribution") as error:
        build(spec)
    rule = spec["rejection_sample_method"]
    assert all(word in str(error.value) for word in (repr(rule), f"auto, {legal};", why, "'allow_lossy': true"))
    for name in legal.split(", "):
        assert resolve(TreeOptions.parse({**spec, "rejection_sample_method": name})[0]).lossless


@pytest.mark.parametrize("spec", [spec for spec, *_ in ILLEGAL])
def test_an_illegal_pair_that_is_asked_for_runs_and_is_logged(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(translate.logger, "warning", lambda text, *values: warnings.append(text % values))
    config = build({**spec, "tree": {**spec["tree"], "allow_lossy": True}})
    assert not resolve(tree_options(config)).lossless
    assert [
        spec["rejection_sample_method"] in text and "changes the target's distribution" in text for text in warnings
    ] == [True]
    build(asked("dyspec", "rrsw", allow_lossy=True))
    assert len(warnings) == 1, "a legal pair is nothing to warn of"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_num_batched_tokens": 26, "max_num_seqs": 2}, ["max_num_batched_tokens=26", "to 24"]),
        ({"max_num_scheduled_tokens": 26}, ["max_num_scheduled_tokens=26", "to 24"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype"]),
        (
            {"logits_processors": ["tests.engine.processors:Counting"]},
            ["processors:Counting", "Adapter"],
        ),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as error:
        build(tree(25), **arguments)
    assert all(word in str(error.value) for word in words)


def test_a_checkpoint_that_asks_for_a_cache_of_8_bits(tmp_path: Path) -> None:
    stored = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
    }
    target = edited(TARGET, tmp_path, quantization_config=stored)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype='auto' .*kv_cache_scheme .*edited.*use 'bfloat16'"):
        build(tree(25), target, dtype="bfloat16")
    build(tree(25), target, dtype="bfloat16", kv_cache_dtype="bfloat16")


UNSUPPORTED: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "prefill_context_parallel_size": 2,
    "ec_transfer_config": ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both"),
    "worker_cls": "some.Worker",
    "spec_method": "ngram",
    "spec_model": DRAFT,
    "spec_tokens": 3,
    "enable_dbo": True,
    "cudagraph_metrics": True,
    "offload_backend": "prefetch",
    "offload_group_size": 8,
}


@pytest.mark.parametrize(("name", "remedy"), [(name, remedy) for name, _, remedy in checks.UNSUPPORTED_ARGUMENTS])
def test_every_unsupported_argument_is_refused(name: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* is not supported with a tree method; {remedy}$"):
        build(tree(25), **{name: UNSUPPORTED[name]})


def test_weights_in_the_memory_of_the_host() -> None:
    """Layers read them where they lie, so trees have nothing to do with it."""
    config = build(tree(25), cpu_offload_gb=2.0)
    assert config.offload_config.uva.cpu_offload_gb == 2.0
    assert config.parallel_config.worker_cls.endswith("TreeWorker")


def test_an_engine_that_pools_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be served with a tree method: runner 'pooling'"):
        build(tree(25), runner="pooling")


def connected(name: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


def test_a_connector_of_whole_blocks_is_allowed() -> None:
    config = build(tree(25), kv_offloading_size=1.0)
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
    build(tree(25), kv_transfer_config=connected("DecodeBenchConnector"))


@pytest.mark.parametrize(
    "transfer",
    [
        connected("ExampleConnector"),
        connected("MultiConnector", connectors=[{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]),
        connected("LMCacheConnectorV1"),
    ],
    ids=lambda transfer: transfer.kv_connector,
)
def test_a_connector_of_layers_is_refused_with_a_draft_that_has_some(transfer: KVTransferConfig) -> None:
    with pytest.raises(
        ValueError, match=r"^kv_transfer_config: \w+Connector\w* takes K/V layer by layer.*kv_offloading_"
    ):
        build(tree(25), kv_transfer_config=transfer)
    build({**tree(25), "model": "ngram"}, kv_transfer_config=transfer)


def test_a_connector_that_counts_the_step_in_flight_is_refused() -> None:
    """NIXL, of a request that ends, to the next turn's prefill instance."""
    both_ways = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
    }
    for transfer in (
        connected("NixlConnector", bidirectional_kv_xfer=True),
        connected("MultiConnector", connectors=[both_ways]),
    ):
        config = build(tree(25), kv_transfer_config=transfer)
        config.scheduler_config.async_scheduling = True
        with pytest.raises(ValueError, match=r"bidirectional_kv_xfer.*async_scheduling to False"):
            checks.check_config(config, tree_options(config))


def test_ranks_of_experts_are_refused() -> None:
    config = build(tree(24), data_parallel_size=2)
    config.model_config.get_num_experts = lambda: 4
    with pytest.raises(ValueError, match="data_parallel_size=2 is not supported with a tree method and experts"):
        checks.check_config(config, tree_options(config))


def test_replicas_pad_no_request_with_draft_tokens() -> None:
    """vLLM drops a schedule that it is given beside replicas."""
    config = build(tree(24), data_parallel_size=2)
    assert config.speculative_config.num_speculative_tokens_per_batch_size


def test_budget_that_just_fits() -> None:
    assert build(tree(24), max_num_batched_tokens=26, max_num_seqs=2)


def test_routed_experts_are_refused() -> None:
    config = build(tree(24))
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(ValueError, match="enable_return_routed_experts is not supported with a tree method"):
        checks.check_config(config, tree_options(config))


def test_a_draft_with_another_vocabulary(tmp_path: Path) -> None:
    draft = edited(DRAFT, tmp_path, vocab_size=2000)
    with pytest.raises(ValueError, match="vocabulary") as error:
        build({**tree(25), "model": draft})
    assert "speculative_config['model']" in str(error.value)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("opttree", ["did you mean 'opt_tree'?", "dyspec", "mcsd", "fan"]),
        ("eagle-2", ["did you mean 'eagle2'?"]),
        ("ngrm", ["did you mean 'ngram'?"]),  # one of vLLM's
        ("best", ["knows 'best'; Tree methods: adaptive_tree, opt_tree"]),
    ],
)
def test_a_method_that_nobody_knows(method: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS.registered, "fan", "some.module:Fan")
    with pytest.raises(ValueError, match=r"speculative_config\['method'\]: neither vLLM nor") as error:
        build({**tree(12), "method": method})
    assert all(word in str(error.value) for word in words)
    assert "draft_model" in str(error.value.__cause__), "vLLM's own message lists vLLM's own methods"


def test_methods_of_vllm_are_its_own_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS.registered, "ngram", "some.module:Ngram")  # takes nothing from vLLM
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert build(ngram).speculative_config.method == "ngram"
    chain = {"model": DRAFT, "num_speculative_tokens": 3}
    assert build({**chain, "method": None}).speculative_config.method == "draft_model"
    with pytest.raises(ValidationError, match="num_speculative_tokens") as error:
        build({**chain, "method": "draft_model", "num_speculative_tokens": "many"})
    assert error.value.__cause__ is None
    with pytest.raises(ValidationError, match="method"):
        build({**chain, "method": 3})
    with pytest.raises(ValueError, match="'opt_tree' is a tree method: give it as speculative_config="):
        build(None, spec_method="opt_tree", spec_model=DRAFT, spec_tokens=3)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_version_gate(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"supports vLLM {window()}, and this is vLLM {version}"):
        build(tree(25))
    assert build(None)


@pytest.mark.parametrize("minor", SUPPORTED)
def test_later_patch_releases_pass_the_gate(minor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", f"{minor}.7")
    assert build(tree(25)).parallel_config.worker_cls == "vllm_adaptive_tree.engine.cpu_worker.TreeWorker"
