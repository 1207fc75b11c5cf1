"""`python -m tests.ray.engine ARGUMENTS`: an `LLM` that runs the commands of stdin by line, and answers on stdout."""

import json
import sys
from typing import Any

from tests.ray.local_nodes import ANSWER


def main(arguments: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        if "method" in command:
            say(llm.collective_rpc(command["method"], args=tuple(command.get("args", ()))))
            continue
        params = [SamplingParams(**own) for own in command["params"]]
        if command.get("steps"):  # one by one, and a word after the first
            for index, prompt in enumerate(command["prompts"]):
                llm.llm_engine.add_request(str(index), prompt, params[index])
            while llm.llm_engine.has_unfinished_requests():
                if llm.llm_engine.step() and command.pop("steps", False):
                    say("begun")
            continue
        outputs = [output.outputs[0] for output in llm.generate(command["prompts"], params, use_tqdm=False)]
        metrics: dict[str, float] = {}
        for one in llm.get_metrics():
            metrics[one.name] = metrics.get(one.name, 0) + getattr(one, "value", 0)
        best = [
            [sorted((entry.logprob for entry in position.values()), reverse=True)[:2] for position in output.logprobs]
            if output.logprobs
            else None
            for output in outputs
        ]
        said = {"tokens": [list(output.token_ids) for output in outputs], "text": [output.text for output in outputs]}
        say({**said, "best": best, "metrics": metrics})
    llm.llm_engine.engine_core.shutdown()


def say(answer: Any) -> None:
    print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)  # other processes write here too, and end no line


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
