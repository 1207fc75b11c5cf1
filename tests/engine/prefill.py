"""A prefill instance in a process of its own: `python -m tests.engine.prefill ASKED`.

ASKED is JSON: "speculation" and "arguments" of `Engines.start`, "prompts", and "params" of each. It prints where a
decode instance finds the K/V of each prompt, and ends when its input does.
"""

import json
import os
import sys

from tests import interpreter

if (RUNNER := os.environ.get("MODEL_RUNNER", "v1")) != "v1":
    interpreter.install(RUNNER)

from vllm import SamplingParams

from tests.engine import contract
from tests.engine.engines import Engines
from tests.engine.offloading import PREFILLED


def main(asked: str) -> None:
    given = json.loads(asked)
    contract.install()
    engines = Engines()
    llm = engines.start(given["speculation"], **given["arguments"])
    there = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    params = [SamplingParams(**one, max_tokens=1, extra_args=there) for one in given["params"]]
    outputs = llm.generate(given["prompts"], params, use_tqdm=False)
    print(PREFILLED + json.dumps([one.kv_transfer_params for one in outputs]), flush=True)
    sys.stdin.read()
    engines.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
