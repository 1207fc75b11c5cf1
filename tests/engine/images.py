"""The bundled target with eyes of random weights: a LLaVA, and what vLLM needs to read images with it."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.engine.engines import TARGET

IMAGE = 2000
"""Token in whose place an image is read; vLLM repeats it, here for 15 patches."""
PIXELS, PATCH = 32, 8
EYES = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "image_size": PIXELS,
    "patch_size": PATCH,
}


def saved(folder: Path, token: int = IMAGE) -> str:
    """Write the checkpoint, with a tokenizer and an image processor."""
    text = transformers.AutoModelForCausalLM.from_pretrained(TARGET)
    tied = {"tie_word_embeddings": text.config.tie_word_embeddings}
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text.config, vision_config=EYES, image_token_index=token, **tied)
    )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.float().save_pretrained(folder)
    _as_published(folder)
    words = {f"t{number}": number for number in range(text.config.vocab_size) if number != token} | {"<image>": token}
    spaced = Tokenizer(models.WordLevel(words, unk_token="t1"))
    spaced.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
        ),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=spaced, unk_token="t1", eos_token="t0", additional_special_tokens=["<image>"]
        ),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return str(folder)


def _as_published(folder: Path) -> None:
    """Rename the weights of the eyes, which transformers 5 names otherwise than published checkpoints do."""
    name, published = "vision_tower.", "vision_tower.vision_model."
    weights = load_file(folder / "model.safetensors")
    renamed = {key if published in key else key.replace(name, published): one for key, one in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def picture(seed: int) -> Image.Image:
    return Image.frombytes("RGB", (PIXELS, PIXELS), random.Random(seed).randbytes(3 * PIXELS * PIXELS))


def prompt(*parts: int | list[int]) -> dict[str, Any]:
    """Prompt of texts (tokens) and images (seeds)."""
    tokens = [token for part in parts for token in (part if isinstance(part, list) else [IMAGE])]
    pictures = [picture(part) for part in parts if isinstance(part, int)]
    return {"prompt_token_ids": tokens, **({"multi_modal_data": {"image": pictures}} if pictures else {})}
