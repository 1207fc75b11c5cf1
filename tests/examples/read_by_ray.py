"""Ray's reading of `serve.yaml` and of commands, as JSON; in a process of its own, as Ray sets up logging for all.

`python -m tests.examples.read_by_ray SERVE_YAML < COMMANDS`, a JSON list of lists of words.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from ray.scripts.scripts import start
from ray.serve.llm import LLMServingArgs
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import run


def main(file: str, commands: list[list[str]]) -> dict[str, Any]:
    data = yaml.safe_load(Path(file).read_text())
    ServeDeploySchema.model_validate(data)
    (application,) = data["applications"]
    (config,) = LLMServingArgs.model_validate(application["args"]).llm_configs
    engine = config.get_engine_config()
    programs = {("ray", "start"): start, ("serve", "run"): run}
    return {
        "arguments": engine.get_initialization_kwargs(),
        "bundles": engine.placement_bundles,
        "strategy": engine.placement_strategy,
        "commands": [programs[tuple(words[:2])].make_context(words[1], words[2:]).params for words in commands],
    }


if __name__ == "__main__":
    print("RESULT" + json.dumps(main(sys.argv[1], json.load(sys.stdin)), default=str))
