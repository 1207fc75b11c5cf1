"""Two tensor-parallel ranks, each in a process of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import PROMPTS, TARGET, V2, Engines, assert_identical, one_core_each, tree
from tests.engine.families import FAMILIES
from tests.engine.heads import eagle3
from tests.engine.installations import with_version
from tests.engine.known import known
from tests.engine.test_families import NODES, TOKENS, Run

ROOT = Path(__file__).parents[2]
COUNT, LENGTH = (3, 16) if V2 else (6, 40)  # requests and their tokens; the interpreter is slow
SCRIPT = """
import json, os, sys
if os.environ.get("MODEL_RUNNER", "v1") != "v1":  # in every rank
    from tests import interpreter
    interpreter.install(os.environ["MODEL_RUNNER"])
    from tests.engine.engines import let_drafts_be_cheap
    from vllm_adaptive_tree.engine.v2 import budget
    budget.EVERY = 2
    let_drafts_be_cheap()
from tests.engine.engines import V2
from tests.engine.leaning import lean, second_best
from tests.engine.test_tensor_parallel import sampling
from vllm import LLM
from vllm_adaptive_tree import register

register("known", "tests.engine.known:Known")

def agree(worker, known):
    runner = worker.model_runner
    lean(runner, second_best(known, runner.model_config.get_vocab_size()))

def watch(worker):
    step, worker.followed = worker.model_runner.step, 0
    original = step.draft

    def draft(host_draft):
        worker.followed += len(host_draft.grammars)
        original(host_draft)

    step.draft = draft

def followed(worker):
    return worker.followed

def learnt(worker):
    budget = worker.model_runner.budget
    return budget and [budget.budget.costs.to_json(), budget.greedy_temperature, len(budget.timed)]

def main():
    target, spec, ranks, prompts, params, known = json.load(sys.stdin)
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=512, disable_log_stats=False,
              speculative_config=spec, **ranks)
    if known:
        llm.collective_rpc(agree, args=(known,))
    if not V2:
        llm.generate(prompts[:1], sampling(**params[0]), use_tqdm=False)  # rank 0 loads the tokenizer beside its steps
        llm.collective_rpc(watch)
    watched = learnt if V2 else followed
    before = llm.collective_rpc(watched)
    outputs = llm.generate(prompts, [sampling(**own) for own in params], use_tqdm=False)
    names = ["spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "adaptive_tree_nodes"]
    counters = [sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}") for name in names]
    print("RESULT" + json.dumps([[list(o.outputs[0].token_ids) for o in outputs],
                                 [o.outputs[0].text for o in outputs], counters,
                                 [before, llm.collective_rpc(watched)]]))

if __name__ == "__main__":
    main()
"""


NODE = """
import os, sys
if os.environ.get("MODEL_RUNNER", "v1") != "v1":
    from tests import interpreter
    interpreter.install(os.environ["MODEL_RUNNER"])
from vllm_adaptive_tree.cli.serve import run

if __name__ == "__main__":
    run(sys.argv[1:])
"""


class Nodes:
    """`vllm serve` on two nodes, which are processes here, each with its own address, command line and packages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[tuple[subprocess.Popen[bytes], Path]]()
        (folder / "node.py").write_text(NODE)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]

    def arguments(self, rank: int) -> dict[str, Any]:
        return {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "nnodes": 2,
            "node_rank": rank,
            "master_addr": "127.0.0.1",
            "master_port": self.port,
        }

    def start(self, rank: int, spec: dict[str, Any], path: str = "") -> tuple[subprocess.Popen[bytes], Path]:
        """A node, with `path` before this package; the process, and the file to which it writes."""
        given = {"dtype": "float32", "max_model_len": 512, "speculative_config": json.dumps(spec)}
        asked = [f"--{name.replace('_', '-')}={value}" for name, value in {**self.arguments(rank), **given}.items()]
        log = self.folder / f"{rank}.log"
        with log.open("w") as written:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(self.folder / "node.py"),
                    TARGET,
                    "--enforce-eager",
                    *["--headless"][:rank],
                    *asked,
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{path}:{ROOT}",
                    "VLLM_HOST_IP": f"127.0.0.{rank + 1}",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                },
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append((process, log))
        return process, log

    def end(self) -> None:
        for process, _ in self.started:
            end_session(process)


def end_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.end()


SPECS = {
    "opt_tree": {**tree(25, threshold="auto"), "draft_tensor_parallel_size": 2},
    "dyspec": {**tree(25), "method": "dyspec", "rejection_sample_method": "rrsw", "draft_tensor_parallel_size": 2},
    "head": {**tree(25, draft="eagle3"), "draft_tensor_parallel_size": 2},
    "ngram": {**tree(25), "model": "ngram"},
}


def params(method: str, **extra: Any) -> list[dict[str, Any]]:
    """The first two have a grammar. Greedy; beside DySpec every second request is sampled, without a seed."""
    found = [{"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **extra} for _ in range(COUNT)]
    if method == "dyspec":
        for own in found[1::2]:
            own["temperature"] = 1.0
    for own in found[:2]:
        own["regex"] = r"[a-z_]{3,12}\(([a-z]{1,8}, )*[a-z]{1,8}\)"
    return found


def sampling(*, regex: str | None = None, **own: Any) -> SamplingParams:
    return SamplingParams(**own, structured_outputs=regex and StructuredOutputsParams(regex=regex))


def on_ranks(folder: Path, *given: Any) -> tuple[list[list[int]], list[str], list[float], list[Any]]:
    """Run `SCRIPT`. Its input: target, speculative_config, arguments of the engine, prompts, their parameters, and
    texts that a head agrees with. Its output: tokens, texts, counters, and, before and after, of each rank the grammars
    that its draft has followed, or, on Model Runner V2, the costs and the temperature that its budget has learnt."""
    (folder / "two_ranks.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(folder / "two_ranks.py")],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function for the workers
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if "nnodes" in given[2] else one_core_each(2),
            "VLLM_HOST_IP": "127.0.0.1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(given), timeout=900)
    finally:
        end_session(process)
    lines = [line for line in output.splitlines() if line.startswith("RESULT")]
    assert lines, output[-3000:] + errors[-3000:]  # a rank that disagreed would have raised
    tokens, texts, counters, followed = json.loads(lines[0].removeprefix("RESULT"))
    return tokens, texts, counters, followed


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    """Greedy outputs of one rank without speculation."""
    llm = engines.start()
    outputs = llm.generate(PROMPTS[:COUNT], [sampling(**own) for own in params("opt_tree", logprobs=2)], use_tqdm=False)
    engines.shutdown()
    return outputs


FAST = "opt_tree", "head"


@pytest.mark.parametrize(
    "method", [method if method in FAST else pytest.param(method, marks=pytest.mark.slow) for method in SPECS]
)
def test_two_ranks(plain: list[Any], nodes: Nodes, tmp_path: Path, method: str) -> None:
    """Of OPT-Tree each has a node of its own. The head agrees with what is known of the target."""
    asked, apart, spec, known = params(method), method == "opt_tree", SPECS[method], list[Any]()
    if method == "head":
        spec = {**spec, "model": eagle3(tmp_path / "head", reduced=True)}
        known = [(output.prompt_token_ids, list(output.outputs[0].token_ids)) for output in plain]
    if apart:
        nodes.start(1, spec)
    ranks = nodes.arguments(0) if apart else {"tensor_parallel_size": 2}
    tokens, texts, (accepted, drafted, verified), (_, followed) = on_ranks(
        tmp_path, TARGET, spec, ranks, PROMPTS[:COUNT], asked, known
    )
    assert accepted > 0
    if not V2:
        assert followed[0] > 0, "rank 0's draft follows the grammars of two requests"
        assert followed[1] == 0, "the others take its trees"
    assert verified == drafted > 0, (verified, drafted)
    ours = [
        SimpleNamespace(token_ids=own, text=text, finish_reason="length")
        for own, text in zip(tokens, texts, strict=True)
    ]
    assert [len(output.token_ids) for output in ours] == [LENGTH] * COUNT
    greedy = [i for i in range(COUNT) if asked[i]["temperature"] == 0]
    assert_identical([plain[i].outputs[0] for i in greedy], [ours[i] for i in greedy])


@pytest.mark.skipif(not V2, reason="rank 0 decides there")
def test_ranks_learn_the_same_costs(plain: list[Any], tmp_path: Path) -> None:
    """From the times of rank 0."""
    ranks, asked = {"tensor_parallel_size": 2}, params("opt_tree")[2:] * 2
    given = tree(9, budget="auto", cost_profile=None)
    tokens, _, (accepted, *_), found = on_ranks(tmp_path, TARGET, given, ranks, PROMPTS[2:3] * 2, asked, [])
    assert accepted > 0
    assert tokens == [list(plain[2].outputs[0].token_ids)] * 2
    for first, second in found:
        assert first == second
    (start, *_), (costs, _, waiting) = (first for first, _ in found)
    assert waiting < 5, "the times of most steps were learnt"
    assert costs["verify"] != start["verify"]


@pytest.mark.slow
def test_two_cache_groups(engines: Engines, tmp_path: Path) -> None:
    """Layers with and without a window, each with a block table and a commit of its own in every rank."""
    run = Run(engines, FAMILIES["gemma2"], tmp_path)
    engines.shutdown()
    own = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    tokens, _, (accepted, *_), _ = on_ranks(
        tmp_path,
        run.arguments["model"],
        known(run.texts(), tmp_path, NODES),
        {"tensor_parallel_size": 2, "skip_tokenizer_init": True, "block_size": 32},
        run.asked,
        [own] * len(run.asked),
        [],
    )
    assert accepted > TOKENS * len(run.asked) / 3
    assert_identical(run.plain, [SimpleNamespace(token_ids=one, text="", finish_reason="length") for one in tokens])


def test_nodes_with_other_options_or_packages_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    """Nothing of the configuration travels between them: the ranks compare, before a model is loaded."""
    nodes.start(0, tree(12))
    nodes.start(1, tree(25, threshold=0.5), with_version(tmp_path / "second", "9.8.7"))
    for process, log in nodes.started:
        try:
            assert process.wait(240) != 0
        except subprocess.TimeoutExpired:
            raise AssertionError(log.read_text()[-3000:]) from None
        assert re.search(
            r"RuntimeError: A tree method needs the same packages and options on every node, and on node \S+ "
            r"\(127\.0\.0\.2\) vllm-adaptive-tree is 9\.8\.7 \(source \w+\), not \S+ \(source \w+\), and "
            r"speculative_config\['num_speculative_tokens'\] is 25, not 12, and "
            r"speculative_config\['tree'\]\['threshold'\] is 0\.5, not None as for rank 0 on node \S+ "
            r"\(127\.0\.0\.1\); install, and give, the same on every node",
            log.read_text(),
        ), log.read_text()[-3000:]
