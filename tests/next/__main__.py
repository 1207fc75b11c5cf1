"""The tests on the newest supported vLLM release, where it is not the installed one (`overlay.py`).

python -m tests.next            all engine tests, the laws too, on both model runners
python -m tests.next --short    identity, a law, hybrids, a head, its graphs on a tape, scheduling, sessions, a server,
                                both model runners
python -m tests.next v2 SET     a set of `tests.v2`
python -m tests.next ARGUMENT.. what pytest makes of the arguments
"""

import os
import subprocess
import sys

from tests.next.overlay import ROOT, installed, interpreter
from vllm_adaptive_tree.versions import SUPPORTED, minor

RELEASE = list(SUPPORTED.values())[-1]
SHORT = [
    "tests/engine/test_release.py",
    "tests/engine/test_identity.py",
    "tests/engine/test_law.py::test_tokens_follow_the_target_s_law[dyspec, rrsw]",
    "tests/engine/test_hybrids.py",
    "tests/engine/test_images.py::test_identity[known]",
    "tests/engine/test_one_forward.py::test_greedy_and_seeded[xpress-opt_tree-auto]",
    "tests/cuda/test_start.py::test_graphs[9.0-xpress-FULL_AND_PIECEWISE]",
    "tests/config/test_draft_checks.py::test_a_target_keeps_its_context_on_model_runner_v2",
    "tests/engine/test_scheduling.py",
    "tests/engine/test_sessions.py::test_answers[head]",
    "tests/engine/test_server.py",
]
EVERY = ["-m", "slow or not slow"]
WHOLE = ["tests/engine", "tests/config", "tests/cuda", "tests/test_patches.py"]


def main(arguments: list[str]) -> int:
    try:
        name, version = installed()
        if minor(version) == minor(RELEASE):
            print(f"{name} {version} is installed; `make test` tests it")
            return 0
        python = interpreter(RELEASE)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    environment = {**os.environ, "TESTED_VLLM": RELEASE}
    pytest = ["pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--durations=10"]
    modules = [[*pytest, *arguments]]
    if arguments == ["--short"]:
        environment.setdefault("LAW_DRAWS", "4000")
        modules = [[*pytest, *SHORT], ["tests.v2", "one"]]
    elif not arguments:
        modules = [[*pytest, *EVERY, *WHOLE], ["tests.v2"]]
    elif arguments[0] == "v2":
        modules = [["tests.v2", *arguments[1:]]]
    codes = [subprocess.run([str(python), "-m", *module], cwd=ROOT, env=environment).returncode for module in modules]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
