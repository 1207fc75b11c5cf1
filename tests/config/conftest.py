"""vLLM's configuration and parts, without an engine; the environment is that of `tests/engine`."""

import tests.engine.conftest  # noqa: F401
