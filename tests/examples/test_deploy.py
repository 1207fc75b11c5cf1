"""Files of `examples/deploy`: no container runs here, so their lines are checked, and vLLM and Prometheus read them."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.config.test_dashboard import DASHBOARD
from vllm_adaptive_tree.bench.environment import PACKAGE, PAIR
from vllm_adaptive_tree.cli.serve import with_target
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.versions import is_supported

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
VALUES = yaml.safe_load((FOLDER / "values.yaml").read_text())["servingEngineSpec"]
INSTALLED = "/usr/local/lib/python3.11/site-packages/vllm_adaptive_tree"


def instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def parsed(words: list[str]) -> Any:
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def test_the_dockerfile() -> None:
    found = instructions()
    assert {name for name, _ in found} == {
        *("ARG", "FROM", "RUN", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT")
    }
    [argument] = [text for name, text in found if name == "ARG"]
    assert is_supported(argument.removeprefix("VLLM="))
    assert [text for name, text in found if name == "FROM"] == [
        "python:3.11-slim AS cpu",
        "vllm/vllm-openai:v${VLLM} AS gpu",
    ]
    for text in (text for name, text in found if name == "COPY"):
        *sources, to = text.split()
        assert to == "/wheels/"
        assert all(source.startswith("dist/") or (ROOT / source).is_file() for source in sources)
    assert [json.loads(text) for name, text in found if name == "ENTRYPOINT"] == [
        ["vllm-adaptive-tree", "serve"],
        ["vllm", "serve"],
    ]
    install = next(text for name, text in found if name == "RUN" and text.startswith("pip"))
    documented = (ROOT / "docs" / "install.md").read_text()
    assert {"--no-deps", "--extra-index-url", "/wheels/*.whl"} <= {*shlex.split(install)}
    assert "pip install --no-deps -r requirements/cpu.txt dist/*.whl" in documented
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in install
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert ignored == ["*", "!dist", "!requirements"]


def test_the_services_of_compose() -> None:
    services = COMPOSE["services"]
    assert services["server"]["build"]["target"] in re.findall(r" AS (\w+)", DOCKERFILE)
    assert (FOLDER / services["server"]["build"]["context"]).resolve() == ROOT
    for service in services.values():
        for mount in service["volumes"]:
            source, to, *_ = mount.split(":")
            assert source in COMPOSE["volumes"] or (FOLDER / source).is_file(), mount
            assert to.startswith("/")
    caches = {text for name, text in instructions() if name == "ENV"}
    assert all("VLLM_CACHE_ROOT=/cache" in text for text in caches)
    assert "cache:/cache" in services["server"]["volumes"]
    assert services["server"]["read_only"]


def test_vllm_reads_the_servers_command_and_its_configuration(tmp_path: Path) -> None:
    """A mapping in YAML is a speculative_config. vLLM puts it after the name of the command."""
    assert str(PAIR).removeprefix(str(PACKAGE)) == "/demo_pair"
    text = (FOLDER / "config.yaml").read_text().replace(INSTALLED, str(PACKAGE))
    (tmp_path / "config.yaml").write_text(text)
    command = " ".join(COMPOSE["services"]["server"]["command"])
    words = command.replace(INSTALLED, str(PACKAGE)).replace("/etc/vllm", str(tmp_path)).split()
    assert with_target(words) == words
    whole = FlexibleArgumentParser()._pull_args_from_config(["serve", *words])
    asked = parsed(whole[1:])
    assert asked.model_tag == str(PAIR / "target")
    assert (asked.max_model_len, asked.dtype, asked.enforce_eager) == (512, "float32", True)
    options, keys = TreeOptions.parse(asked.speculative_config)
    assert (options.method, options.num_speculative_tokens) == ("adaptive_tree", 12)
    assert Path(keys["model"]).is_dir()


def test_prometheus_and_grafana_find_each_other() -> None:
    [job] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert f"{port}:{port}" in COMPOSE["services"][name]["ports"]
    [source] = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounted = [mount.split(":") for mount in COMPOSE["services"]["grafana"]["volumes"]]
    assert any(Path(to).parent == Path(provider["options"]["path"]) for _, to, _ in mounted)
    assert json.loads((FOLDER / "../grafana.json").read_text()) == DASHBOARD


def test_prometheus_takes_its_configuration() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        assert "PROMETHEUS_REQUIRED" not in os.environ
        pytest.skip("Prometheus is not installed")
    run = subprocess.run([tool, "check", "config", FOLDER / "prometheus.yml"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_values_of_the_production_stack() -> None:
    """Keys are those of the chart's own examples; the arguments are vLLM's."""
    assert VALUES.keys() == {"runtimeClassName", "startupProbe", "livenessProbe", "modelSpec"}
    [model] = VALUES["modelSpec"]
    asked = parsed([model["modelURL"], *model["vllmConfig"]["extraArgs"]])
    options, _ = TreeOptions.parse(asked.speculative_config)
    assert options.num_speculative_tokens == 25
    assert asked.max_num_seqs == 32
    assert {VALUES[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {"/health"}
    assert model["env"] == [{"name": "VLLM_CACHE_ROOT", "value": "/data/vllm"}]
