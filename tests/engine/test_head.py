"""A trained head in vLLM's own EAGLE-3 chain: it drafts what the module that was trained predicts."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from vllm import SamplingParams

from tests.engine.engines import PAIR, PROMPTS, TARGET, V2, Engines, generate
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head
from vllm_adaptive_tree.heads.training import Teacher

HEAD = PAIR / "head"
DEPTH, TOKENS = 3, 40

pytestmark = pytest.mark.skipif(V2, reason="vLLM's own chain: one model runner is enough")


def chains(llm: Any, prompt: str) -> dict[tuple[int, ...], list[int]]:
    """Text up to a root -> the tokens that vLLM drafts below it."""
    core = llm.llm_engine.engine_core.engine_core
    original, found = core.model_executor.take_draft_token_ids, {}
    running = core.scheduler.requests

    def take() -> Any:
        drafts = original()
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if name in running and len(tokens) == DEPTH:
                found[tuple(running[name].all_token_ids)] = list(tokens)
        return drafts

    core.model_executor.take_draft_token_ids = take
    try:
        generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    finally:
        core.model_executor.take_draft_token_ids = original
    return found


def predicted(teacher: Teacher, head: Head, text: list[int], chain: list[int]) -> list[torch.Tensor]:
    """Logits [V] of each token of a chain below the last token of `text`, given those before it."""
    lesson, last = teacher(torch.tensor([text + chain])), len(text) - 2
    states = head(lesson.auxiliary, lesson.embedded, len(chain))
    return [F.linear(normed[0, last + step], teacher.output(head)) for step, normed in enumerate(states)]


@torch.no_grad()
def test_vllm_s_chain_is_the_module_s(engines: Engines) -> None:
    config = json.loads((HEAD / "config.json").read_text())
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    module = Head(Dimensions.of(config), len(layers))
    module.load_state_dict({name: tensor.float() for name, tensor in load_file(HEAD / "model.safetensors").items()})
    teacher = Teacher(LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32), layers)
    llm = engines.start({"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": DEPTH})
    seen, same = 0, 0
    for prompt in PROMPTS[:4]:
        found = chains(llm, prompt)
        assert len(found) > 5
        for text, chain in found.items():
            for logits, token in zip(predicted(teacher, module, list(text), chain), chain, strict=True):
                seen, same = seen + 1, same + int(logits.argmax() == token)
                assert logits.max() - logits[token] < 1e-3, "a tie at most"
    print(f"{same} of {seen} drafted tokens are the module's first")
