"""The diff of the installed vLLM, from `patches/`, on a mirror of it, in processes that load no plugin."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TARGET, DRAFT = (str(ROOT / "vllm_adaptive_tree" / "demo_pair" / name) for name in ("target", "draft"))

TREE_CONFIG = {"method": "opt_tree", "model": DRAFT, "num_speculative_tokens": 12}
WHOLE = TREE_CONFIG | {"tree": {"budget": None}}  # a budget asks the clock, and no two runs draft the same nodes
TREE = ("--spec-method", "opt_tree", "--spec-model", DRAFT, "--spec-tokens", "12")
CHAIN = ("--spec-method", "draft_model", "--spec-model", DRAFT, "--spec-tokens", "3")


# -- in the processes


def config_of(*flags: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", TARGET, "--dtype", "float32", "--enforce-eager", *flags])
    return EngineArgs.from_cli_args(args).create_engine_config()


def built(*flags: str) -> dict[str, Any]:
    """Properties of the engine configuration that these flags build."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        config = config_of(*flags)
    except SystemExit:
        return {"refused": "by argparse"}
    spec = config.speculative_config
    try:
        SamplingParams(min_p=0.1)._validate_spec_decode(spec)
        min_p = "honoured"
    except VLLMValidationError:
        min_p = "refused"
    return {
        "worker": config.parallel_config.worker_cls,
        "draft": [spec.method, spec.model, spec.num_speculative_tokens],
        "options": config.additional_config,
        "marked": bool(getattr(spec, "_adaptive_tree", False)),
        "streams": getattr(config.model_config, "_adaptive_tree_streams", None),
        "hash": config.compute_hash(),
        "min_p": min_p,
    }


def misspelt() -> str:
    """Error for an unknown method."""
    try:
        config_of("--speculative-config", json.dumps(TREE_CONFIG | {"method": "opttree"}))
    except ValueError as error:
        return str(error)
    return "built"


def generated(speculative_config: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        TARGET,
        speculative_config=speculative_config,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=False,
    )
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)]
    params.append(SamplingParams(min_p=0.1, logit_bias={262: 3.0}, seed=5, max_tokens=8, ignore_eos=True))
    grammar = StructuredOutputsParams(regex=r"[a-z]{3,9}\(([a-z]{1,8}, )*\)")
    params.append(SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, structured_outputs=grammar))
    outputs = llm.generate(["import os\nimport sys\n"] * 3, params, use_tqdm=False)
    nodes = sum(m.value for m in llm.get_metrics() if m.name == "vllm:adaptive_tree_nodes")
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "nodes": nodes}


def stock() -> dict[str, Any]:
    json_flag = ("--speculative-config", json.dumps(TREE_CONFIG))
    return {
        "flags": built(*TREE),
        "tree": built(*json_flag),
        "chain": built(*CHAIN),
        "misspelt": misspelt(),
        "generated": generated(WHOLE),
    }


def patched() -> dict[str, Any]:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.responses import serving
    from vllm.parser.abstract_parser import Parser
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_adaptive_tree.engine.patches import install
    from vllm_adaptive_tree.engine.plugin import register

    names = [
        (EngineArgs, "create_engine_config"),
        (SamplingParams, "_validate_spec_decode"),
        (PrometheusStatLogger, "__init__"),
        (PrometheusStatLogger, "record"),
        (Scheduler, "update_from_output"),
        (StructuredOutputManager, "validate_tokens"),
        (StructuredOutputManager, "grammar_bitmask"),
        (StructuredOutputManager, "accept_tokens"),
        (Scheduler, "get_grammar_bitmask"),
        (Parser, "__init__"),
        (serving, "split_delta"),
    ]
    found = {
        "flags": built(*TREE),
        "mixed": built(*TREE[2:], "--speculative-config", '{"method": "opt_tree", "tree": {"max_depth": 4}}'),
        "unknown": built("--spec-method", "no_such_method"),
        "chain": built(*CHAIN),
        "misspelt": misspelt(),
        "generated": generated(WHOLE),
    }
    before = [vars(owner)[name] for owner, name in names]  # vLLM's own, though a tree method has run
    assert all(function.__code__.co_filename.startswith(str(Path(vllm.__file__).parent)) for function in before)
    register()
    install()
    assert [vars(owner)[name] for owner, name in names] == before
    return {**found, "vllm": vllm.__file__}


def without_the_package() -> dict[str, Any]:
    return {"flags": built(*TREE), "chain": built(*CHAIN)}


# -- here


def mirror(source: Path, folder: Path, touched: set[Path]) -> None:
    """`folder` is `source` in links, with copies of the `touched` files."""
    folder.mkdir()
    for entry in source.iterdir():
        if entry in touched:
            shutil.copy(entry, folder)
        elif any(entry in path.parents for path in touched):
            mirror(entry, folder / entry.name, touched)
        elif entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)


def run(call: str, first: str = "", **environment: str) -> dict[str, Any]:
    """`call()` of this file in a process of its own, after the statement `first`."""
    code = f"{first}\nimport json\nfrom tests import test_patches as here\nprint(json.dumps(here.{call}()))"
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the patched `vllm`."""
    import vllm

    from tests.next.diff import diff

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    changes = diff(vllm.__version__)
    folder = tmp_path_factory.mktemp("source")
    touched = {installed.parent / name for name in re.findall(r"^--- a/(\S+)$", changes.read_text(), re.MULTILINE)}
    assert touched
    mirror(installed, folder / "vllm", touched)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # else paths count from a repository above
    applied = subprocess.run(["git", "apply", str(changes)], cwd=folder, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr
    return folder


@pytest.fixture(scope="module")
def plugin_route() -> dict[str, Any]:
    return run("stock")


@pytest.fixture(scope="module")
def source_route(source: Path) -> dict[str, Any]:
    found = run("patched", PYTHONPATH=str(source), VLLM_PLUGINS="")
    assert found["vllm"] == str(source / "vllm" / "__init__.py")
    return found


def test_flags_of_a_tree_method(plugin_route: dict[str, Any], source_route: dict[str, Any]) -> None:
    assert plugin_route["flags"] == {"refused": "by argparse"}
    assert source_route["flags"] == plugin_route["tree"]
    assert source_route["flags"]["worker"] == "vllm_adaptive_tree.engine.cpu_worker.TreeWorker"
    assert source_route["flags"]["marked"]
    assert source_route["flags"]["min_p"] == "honoured"
    assert source_route["mixed"]["options"]["adaptive_tree"]["tree"]["max_depth"] == 4
    assert source_route["mixed"]["draft"] == source_route["flags"]["draft"] == ["draft_model", DRAFT, 12]


def test_generates_without_the_plugin(plugin_route: dict[str, Any], source_route: dict[str, Any]) -> None:
    assert source_route["generated"] == plugin_route["generated"]
    assert [len(tokens) for tokens in source_route["generated"]["tokens"]] == [8, 8, 8]
    assert source_route["generated"]["nodes"] > 0


def test_vllm_own_methods_stay(plugin_route: dict[str, Any], source_route: dict[str, Any]) -> None:
    assert source_route["unknown"] == {"refused": "by argparse"}
    assert source_route["misspelt"] == plugin_route["misspelt"]
    assert "did you mean 'opt_tree'?" in source_route["misspelt"]
    assert source_route["chain"] == plugin_route["chain"]
    assert source_route["chain"]["min_p"] == "refused"
    assert not source_route["chain"]["marked"]


def test_without_the_package(plugin_route: dict[str, Any], source: Path) -> None:
    found = run("without_the_package", "import sys; sys.modules['vllm_adaptive_tree'] = None", PYTHONPATH=str(source))
    assert found == {"flags": {"refused": "by argparse"}, "chain": plugin_route["chain"]}
