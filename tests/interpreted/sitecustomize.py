"""For processes that a test on Model Runner V2 starts: Python imports this first, if PYTHONPATH names the folder."""

import os

from tests import interpreter

interpreter.install(os.environ["MODEL_RUNNER"])
