"""The recipes of `examples/70b`: vLLM and Ray take every command and manifest, for the models' real shapes."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from estimate import Plan, main
from gain import GPUS
from memory import Load, TreeBuffers
from model import Model, Shard
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.node_quota import too_small
from vllm_adaptive_tree.engine.startup.finish import tree_options

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "70b"
README = (FOLDER / "README.md").read_text()
SHAPES = {
    "meta-llama/Llama-3.3-70B-Instruct": FOLDER / "configs" / "target",
    "meta-llama/Llama-3.2-1B-Instruct": FOLDER / "configs" / "draft",
}


def commands(program: str) -> list[list[str]]:
    """Every command of the README's blocks that begins so, as its words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        words
        for line in lines
        if (words := shlex.split(line, comments=True))[: len(program.split())] == program.split()
    ]


def with_shapes(text: str) -> str:
    """The folders of the configurations in the place of the hub's names."""
    for name, folder in SHAPES.items():
        text = text.replace(name, str(folder))
    return text


def served(words: list[str]) -> dict[str, Any]:
    """Engine arguments of a `vllm serve` command."""
    parser = make_arg_parser(FlexibleArgumentParser())
    asked = parser.parse_args([with_shapes(word) for word in words[2:]])
    validate_parsed_serve_args(asked)
    asked.model, usual = asked.model_tag, parser.parse_args([])
    names = {one.name for one in dataclasses.fields(AsyncEngineArgs)} & vars(asked).keys()
    return {name: value for name in names if (value := getattr(asked, name)) != getattr(usual, name)}


def application(file: str) -> dict[str, Any]:
    """The one of a Serve config, or of the one in a manifest."""
    data = yaml.safe_load((FOLDER / file).read_text())
    if data.get("kind") == "RayService":
        data = yaml.safe_load(data["spec"]["serveConfigV2"])
    (found,) = data["applications"]
    return found


@pytest.fixture(scope="module")
def by_ray() -> dict[str, Any]:
    """As `read_by_ray` prints it."""
    words = json.dumps([*commands("ray start"), *commands("serve run")])
    command = [sys.executable, "-m", "tests.examples.read_by_ray", str(FOLDER / "serve.yaml")]
    result = subprocess.run(command, input=words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = re.search("^RESULT(.*)$", result.stdout, re.MULTILINE)
    assert found is not None, result.stderr
    return json.loads(found[1])


@pytest.fixture(scope="module")
def engine_arguments(by_ray: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of every recipe; those of a replica as Ray completes them."""
    on_device = [one for one in map(served, commands("vllm serve")) if "cpu_offload_gb" not in one]
    recipes = {f"TP {one['tensor_parallel_size']}": one for one in on_device}
    replica = json.loads(with_shapes(json.dumps(by_ray["arguments"])))
    return {**recipes, "TP 4": {**recipes["TP 8"], "tensor_parallel_size": 4}, "replica": replica}


def built(arguments: dict[str, Any]) -> Any:
    """vLLM's configuration of an engine."""
    return AsyncEngineArgs(**{**arguments, "skip_tokenizer_init": True}).create_engine_config()


def test_engines_of_all_recipes_are_configured(engine_arguments: dict[str, dict[str, Any]]) -> None:
    """On a CPU vLLM gets as far as here with any number of ranks: sizes are divided, and no worker is started."""
    ranks = {name: one["tensor_parallel_size"] for name, one in engine_arguments.items()}
    assert ranks == {"TP 8": 8, "TP 16": 16, "TP 4": 4, "replica": 4}
    for name, arguments in engine_arguments.items():
        config = built(arguments)
        parallel, target = config.parallel_config, config.model_config
        draft, speculation = config.speculative_config.draft_model_config, config.speculative_config
        size = ranks[name]
        assert parallel.world_size == size, name
        assert parallel.distributed_executor_backend == ("ray" if name in ("TP 16", "replica") else "mp"), name
        assert speculation.draft_parallel_config.tensor_parallel_size == size, name
        assert target.get_num_kv_heads(parallel) == draft.get_num_kv_heads(parallel) == max(1, 8 // size), name
        assert (target.get_head_size(), draft.get_head_size()) == (128, 64), name
        assert (target.max_model_len, target.get_vocab_size()) == (arguments["max_model_len"], 128_256), name
        options = tree_options(config)
        assert (options.method, options.tree.budget) == ("adaptive_tree", "auto"), name
        assert options.num_speculative_tokens == (10 if name == "replica" else 63), name


def test_weights_in_the_memory_of_the_host() -> None:
    """One request gets whole trees, and what is not offloaded leaves room for its K/V."""
    (offloaded,) = (one for one in map(served, commands("vllm serve")) if "cpu_offload_gb" in one)
    config = built(offloaded)
    nodes = tree_options(config).num_speculative_tokens
    assert nodes == 768
    assert too_small(nodes=nodes, room=offloaded["max_num_batched_tokens"], longest=offloaded["max_model_len"]) is None
    target, draft = (Model.read(folder) for folder in SHAPES.values())
    load = Load(offloaded["max_num_seqs"], offloaded["max_model_len"], nodes, tree_options(config).tree.max_depth)
    shards = Shard(target, 1), Shard(draft, 1)
    left = 80e9 * offloaded["gpu_memory_utilization"] + offloaded["cpu_offload_gb"] * 2**30
    used = sum(one.weights + load.requests * load.context * one.kv for one in shards)
    assert used + TreeBuffers.of(*shards, load).peak < left


def test_a_size_that_does_not_fit_is_refused(engine_arguments: dict[str, dict[str, Any]]) -> None:
    arguments = engine_arguments["TP 8"]
    with pytest.raises(ValueError, match="32 attention heads, which cannot be cut for tensor_parallel_size=12"):
        built({**arguments, "tensor_parallel_size": 12})
    with pytest.raises(ValueError, match="pipeline_parallel_size=2 is not supported with a tree method"):
        built({**arguments, "pipeline_parallel_size": 2})


def test_engines_keep_to_the_memory_of_their_estimate(engine_arguments: dict[str, dict[str, Any]]) -> None:
    target, draft = (Model.read(folder) for folder in SHAPES.values())
    for name, one in engine_arguments.items():
        options, _ = TreeOptions.parse(one["speculative_config"])
        load = Load(one["max_num_seqs"], one["max_model_len"], options.num_speculative_tokens, options.tree.max_depth)
        plan = Plan(target, draft, one["tensor_parallel_size"], False, load, GPUS["h100"])
        assert one["gpu_memory_utilization"] <= plan.utilization, name
        assert plan.tokens >= load.requests * load.context, name
        assert load.requests * (2 + load.nodes) <= one["max_num_batched_tokens"], name


def test_serve_takes_the_application(by_ray: dict[str, Any]) -> None:
    assert application("serve.yaml") == application("kuberay.yaml")
    assert application("serve.yaml")["import_path"] == "ray.serve.llm:build_openai_app"
    assert by_ray["strategy"] == "STRICT_PACK"
    assert [bundle["GPU"] for bundle in by_ray["bundles"]] == [1] * 4


def test_the_cluster_has_a_place_for_every_replica() -> None:
    manifest = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    cluster = manifest["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == metadata.version("ray")
    (workers,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    (head,), (worker,) = (pod["containers"] for pod in pods)
    assert head["image"] == worker["image"]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    (config,) = application("kuberay.yaml")["args"]["llm_configs"]
    ranks, gpus = config["engine_kwargs"]["tensor_parallel_size"], int(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert worker["resources"]["requests"] == worker["resources"]["limits"]
    assert gpus // ranks * workers["replicas"] == config["deployment_config"]["num_replicas"]
    assert (
        int(worker["resources"]["limits"]["cpu"]) >= gpus * config["placement_group_config"]["bundle_per_worker"]["CPU"]
    )
    assert worker["volumeMounts"][0]["name"] == pods[1]["volumes"][0]["name"]


def test_rays_own_commands_parse(by_ray: dict[str, Any]) -> None:
    first, second, serve = by_ray["commands"]
    assert (first["head"], first["port"], first["address"]) == (True, 6379, None)
    assert (second["head"], second["address"]) == (False, "FIRST_SERVER:6379")
    ((*_, manifest),) = commands("kubectl apply -f")
    assert (ROOT / serve["config_or_import_path"]) == FOLDER / "serve.yaml"
    assert (ROOT / manifest) == FOLDER / "kuberay.yaml"


def test_the_tables_are_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    tables = re.findall(r"<!-- estimate\.py(.*?) -->\n(.*?)<!-- end -->", README, re.DOTALL)
    assert len(tables) == 2
    for arguments, printed in tables:
        assert main(shlex.split(arguments)) == 0
        assert capsys.readouterr().out == printed


def test_the_shapes_are_the_published_ones() -> None:
    target, draft = (json.loads((folder / "config.json").read_text()) for folder in SHAPES.values())
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [target[size] for size in sizes] == [80, 8192, 64, 8, 28_672]
    assert [draft[size] for size in sizes] == [16, 2048, 32, 8, 8192]
    assert (target["tie_word_embeddings"], draft["tie_word_embeddings"]) == (False, True)
    assert [one["rope_scaling"]["factor"] for one in (target, draft)] == [8, 32]
    assert {one["rope_scaling"]["rope_type"] for one in (target, draft)} == {"llama3"}
