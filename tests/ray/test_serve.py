"""Ray Serve on two nodes: `examples/ray_serve.py`, its figures, and a replica whose engine is killed."""

import re
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from openai import APIStatusError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.ray.starting import engine_cores, running, wait_for

FIGURES = {"adaptive_tree_nodes", "adaptive_tree_phase_seconds_count", "spec_decode_num_accepted_tokens"}


class Service(NamedTuple):
    pid: int
    url: str
    metrics: dict[str, str]  # node -> where
    output: str

    def figures(self) -> dict[str, dict[str, float]]:
        """Replica -> what its counters of `FIGURES` add up to."""
        found: dict[str, dict[str, float]] = {}
        for url in self.metrics.values():
            with urllib.request.urlopen(url, timeout=30) as answer:
                families = text_string_to_metric_families(answer.read().decode())
            for sample in (sample for family in families for sample in family.samples):
                name = sample.name.removeprefix("ray_vllm_").removesuffix("_total")
                if name in FIGURES:
                    replica = found.setdefault(sample.labels["ReplicaId"], dict.fromkeys(FIGURES, 0))
                    replica[name] += sample.value
        return found

    def client(self, retries: int) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=retries, timeout=120)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    log = tmp_path_factory.mktemp("service") / "log"
    with running("ray_serve.py", log, PORT=port) as process:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            return "replicas serve at" in log.read_text()

        start = time.monotonic()
        wait_for(ready, 500, "the service")
        print(f"the service is up after {time.monotonic() - start:.0f} s")
        output = log.read_text()
        metrics = dict(re.findall(r"^metrics of (\S+): (\S+)$", output, re.MULTILINE))
        yield Service(process.pid, f"http://127.0.0.1:{port}", metrics, output)


def ask(client: OpenAI, prompt: str) -> tuple[str | int, int]:
    """The text, or the status of a refusal; and how often it was asked again."""
    try:
        raw = client.completions.with_raw_response.create(model="demo", prompt=prompt, max_tokens=48, temperature=0)
    except APIStatusError as error:
        return error.status_code, 0
    return raw.parse().choices[0].text, raw.retries_taken


def test_answers(service: Service, texts: dict[str, str]) -> None:
    prompts = list(texts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        client = service.client(0)
        answers = pool.map(lambda prompt: ask(client, prompt)[0], prompts)
        assert dict(zip(prompts, answers, strict=True)) == texts
    assert len(engine_cores(service.pid)) == 2
    assert re.search(r"^import os\.path", service.output, re.MULTILINE)


def test_figures_of_every_replica(service: Service) -> None:
    """At Ray's metrics endpoints, the tree's figures and vLLM's acceptance, each with the replica's name."""
    assert {*service.metrics} == {"node-1", "node-2"}

    def complete() -> bool:
        found = service.figures()
        return len(found) == 2 and all(all(one.values()) for one in found.values())

    wait_for(complete, 30, "figures of both replicas")
    print(service.figures())
    for one in service.figures().values():
        assert one["adaptive_tree_nodes"] > one["spec_decode_num_accepted_tokens"] > 100


def test_a_killed_engine(service: Service, texts: dict[str, str]) -> None:
    """Ray Serve sends nothing again: what its clients do not repeat is lost, and nothing else is. No answer is wrong,
    and a new replica comes."""
    prompts = [*texts] * 3
    once, again = service.client(0), service.client(20)
    victim = engine_cores(service.pid)[0]
    with ThreadPoolExecutor(len(prompts)) as pool:
        clients = [(once, again, again)[number % 3] for number in range(len(prompts))]
        asked = [pool.submit(ask, client, prompt) for client, prompt in zip(clients, prompts, strict=True)]
        time.sleep(1)
        assert not all(one.done() for one in asked)
        victim.kill()
        answers = [one.result() for one in asked]
    told = zip(clients, prompts, answers, strict=True)
    outcomes = Counter(
        (client is again, "right" if text == texts[prompt] else text) for client, prompt, (text, _) in told
    )
    print(outcomes, f"asked again: {sum(count for _, count in answers)} times")
    lost = {key: count for key, count in outcomes.items() if key[1] != "right"}
    assert {*lost} == {(False, 500)}
    assert sum(lost.values()) < 64
    assert sum(count for _, count in answers) > 0

    start = time.monotonic()
    wait_for(lambda: len(engine_cores(service.pid)) == 2, 300, "a new engine")
    before = {*service.figures()}

    def newcomer_answers() -> bool:
        assert all(ask(once, prompt)[0] == texts[prompt] for prompt in prompts[:4])
        return bool({*service.figures()} - before)

    wait_for(newcomer_answers, 300, "answers of a new replica")
    print(f"a new replica after {time.monotonic() - start:.0f} s")
