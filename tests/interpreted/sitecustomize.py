"""For processes that a test on Model Runner V2 starts: Python imports this first, if PYTHONPATH names the folder."""

import os
import sys
from types import ModuleType

from tests import interpreter


def check_the_contract(_: ModuleType) -> None:
    if "tests.engine.contract" in sys.modules:
        return  # it imports the scheduler just now, for tests that install it themselves
    from tests.engine import contract

    contract.install()


interpreter.install(os.environ["MODEL_RUNNER"])
interpreter.after("vllm.v1.core.sched.scheduler", check_the_contract)
