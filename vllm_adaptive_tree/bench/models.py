"""Models made for a measurement: a larger target with the same function, a draft with random weights.

A step of a small trained model costs almost nothing, unlike that of any model in use.
"""

import json
import shutil
from pathlib import Path
from typing import Any

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MULTIPLE = 64  # of the intermediate size, as kernels expect


def chain(target: str, draft: str, tokens: int) -> dict[str, Any]:
    """`speculative_config` of vLLM's own speculation with the same draft, `tokens` at a time."""
    from vllm_adaptive_tree.drafters import DRAFTERS
    from vllm_adaptive_tree.engine.checkpoint import Checkpoint
    from vllm_adaptive_tree.engine.drafts.registry import kind_of

    if draft in DRAFTERS and not Path(draft).is_dir():
        return {"method": draft, "num_speculative_tokens": tokens, **DRAFTERS[draft].chain_keys}
    checkpoint = Checkpoint.read(draft, None, trust_remote_code=False)
    kind = kind_of(checkpoint, said=None, target=target)
    tokens = min(tokens, kind.levels(checkpoint) or tokens)
    return {"method": kind.method, "model": draft, "num_speculative_tokens": tokens, **kind.chain_keys}


def enlarge(source: Path, target: Path, to: int) -> int:
    """Write a copy of a Llama-like checkpoint with about `to` parameters; returns their number.

    The new units' gate and up projections have the scale of the old ones, so kernels do the same work; their columns of
    the down-projection are zero, so their output is never used.

    Raises:
        ValueError: the model is no smaller than `to`, has no such MLP, or `target` is `source`.
        OSError: a file cannot be read or written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the model itself; name another folder")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    old = config.get("intermediate_size")
    names = [name for name in weights if _module(name) in PROJECTIONS]
    if not names or not isinstance(old, int) or old < 1:
        raise ValueError(f"{source} has no MLP of gate, up and down projections; enlarge a Llama-like model")
    count = sum(weight.numel() for weight in weights.values())
    width = sum(weights[name].numel() for name in names) // old  # parameters of one unit in all layers
    units = round((old + (to - count) / width) / MULTIPLE) * MULTIPLE - old
    if units <= 0:
        raise ValueError(f"{source} has {count:,} parameters; it cannot be enlarged to {to:,}")
    generator = torch.Generator().manual_seed(0)
    for name in names:
        weight = weights[name]
        down = _module(name) == "down_proj"
        shape = (weight.shape[0], units) if down else (units, weight.shape[1])
        new = torch.zeros(shape) if down else torch.randn(shape, generator=generator) * weight.float().std()
        weights[name] = torch.cat([weight, new.to(weight.dtype)], dim=1 if down else 0).contiguous()
    _copy_without_weights(source, target)
    (target / "config.json").write_text(json.dumps({**config, "intermediate_size": old + units}, indent=2) + "\n")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def _module(name: str) -> str:
    """Of a weight: `x.down_proj.weight` is one of `down_proj`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def enlarged(source: str, folder: Path, to: int) -> tuple[str, int]:
    """Folder and number of parameters of a larger model with the same function, which is written once.

    Raises:
        ValueError: the model is no folder, or cannot be enlarged.
    """
    if not Path(source).is_dir():
        raise ValueError(f"--enlarge-to needs a model in a folder, not {source!r}")
    out = folder / f"target-{to}"
    done = folder / f"target-{to}.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        done.write_text(json.dumps(enlarge(Path(source), out, to)))
    return str(out), int(json.loads(done.read_text()))


def random_draft(source: str, folder: Path) -> str:
    """Folder of a model with the same config and random weights, written once.

    Raises:
        ValueError: the model is no folder of a causal language model.
    """
    if not Path(source).is_dir():
        raise ValueError(f"--random-draft needs a draft in a folder, not {source!r}")
    out = folder / "random-draft"
    if not (out / "done").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        shutil.rmtree(out, ignore_errors=True)
        _copy_without_weights(Path(source), out)
        config: Any = AutoConfig.from_pretrained(source)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(config.dtype).save_pretrained(out)
        (out / "done").touch()
    return str(out)


def _copy_without_weights(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(file, target / file.name)
