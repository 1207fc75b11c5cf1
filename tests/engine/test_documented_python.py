"""The Python that README and docs show, and what they say that it prints, in one engine."""

import ast
import contextlib
import functools
import io
import re
from typing import Any

import pytest
import vllm

from tests.documents import PAGES, ROOT, blocks
from tests.engine.engines import DRAFT, TARGET, Engines
from vllm_adaptive_tree.engine.startup.finish import tree_options


def test_python_that_is_shown_runs(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks behind `<!-- run -->`, README's first, in one process and one engine; eager and in float32, for time."""
    started: list[Any] = []

    @functools.wraps(vllm.LLM)
    def llm(*args: Any, **kwargs: Any) -> Any:
        engines.llm = vllm_llm(*args, dtype="float32", enforce_eager=True, max_model_len=512, **kwargs)
        started.append(engines.llm)
        return engines.llm

    vllm_llm = vllm.LLM
    monkeypatch.setattr(vllm, "LLM", llm)
    names: dict[str, Any] = {"__name__": "__main__", "TARGET": TARGET, "DRAFT": DRAFT}
    run = 0
    for page in sorted(PAGES, key=lambda page: page.name != "README.md" or page.parent != ROOT):
        of_page = blocks(page)
        for block, after in zip(of_page, [*of_page[1:], None], strict=False):
            if not block.runs:
                continue
            with contextlib.redirect_stdout(said := io.StringIO()):
                exec(compile(block.text, str(block), "exec"), names)
            assert said.getvalue().strip(), block
            if after is not None and after.language == "":
                assert said.getvalue().rstrip() == after.text, block
            run += 1
    assert run >= 2
    assert len(started) == 1
    assert tree_options(started[0].llm_engine.vllm_config).method == "adaptive_tree"
    check_the_offline_example(started[0])


def check_the_offline_example(llm: Any) -> None:
    """Check the output of `examples/offline.py` in docs/index.md; the engine is the same."""
    source = (ROOT / "examples" / "offline.py").read_text()
    prompt = ast.literal_eval(re.findall(r"llm\.generate\((\".+?\"),", source)[0])
    params = vllm.SamplingParams(temperature=0, max_tokens=80)
    assert "SamplingParams(temperature=0, max_tokens=80)" in source
    [output] = llm.generate(prompt, params, use_tqdm=False)
    start = ROOT / "docs" / "index.md"
    [shown] = [block for block in blocks(start) if block.text.startswith(prompt.rstrip())]
    *lines, rest = shown.text.splitlines()
    assert rest == "..."
    assert (prompt + output.outputs[0].text).splitlines()[: len(lines)] == lines
