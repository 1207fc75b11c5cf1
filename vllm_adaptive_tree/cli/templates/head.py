"""The head `new_method`: EAGLE-3 with a weight for each feature of the target's states."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from vllm_adaptive_tree.engine.drafts.eagle import Eagle3


class NewMethod(Eagle3):
    """Kind of draft whose config.json names the class below; all else is as of EAGLE-3."""

    title = "a new_method head"
    architecture = "^Eagle3NewMethod$"  # vLLM wants "Eagle3" at its start
    speculators, keys = None, ()
    told_by_tensors = False  # an EAGLE-3 head has the same names


class Eagle3NewMethod(Eagle3LlamaForCausalLM):
    """Model that vLLM loads, and runs on both model runners."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.scale = nn.Parameter(torch.ones(self.model.fc_input_size))  # "scale" in the checkpoint

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Input of the head [N, H] from the target's states [N, 3 H]."""
        return super().combine_hidden_states(hidden_states * self.model.scale)


ModelRegistry.register_model("Eagle3NewMethod", Eagle3NewMethod)
