"""Models made for a measurement: a larger target with the same function, a draft with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.enlarge import enlarge


def enlarged(source: str, folder: Path, to: int) -> tuple[str, int]:
    """Folder and number of parameters of a larger model with the same function, written once.

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
        out.mkdir(parents=True)
        for file in Path(source).iterdir():
            if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
                shutil.copy(file, out / file.name)
        config: Any = AutoConfig.from_pretrained(source)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(config.dtype).save_pretrained(out)
        (out / "done").touch()
    return str(out)
