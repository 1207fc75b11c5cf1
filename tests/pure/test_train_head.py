"""`vllm-adaptive-tree train-head` on a tiny random target: interrupted, resumed, and with bad input."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_adaptive_tree.cli import train_head
from vllm_adaptive_tree.cli.main import main
from vllm_adaptive_tree.heads import texts, training
from vllm_adaptive_tree.heads.eagle3 import auxiliary_layers

torch.set_num_threads(1)  # tiny models

STEPS, STOP = 40, 17


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 layers over single characters."""
    folder = tmp_path_factory.mktemp("target")
    words = {chr(code): code - 31 for code in range(32, 127)} | {"<end>": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=4, intermediate_size=48, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line; its clock says that a step takes a second."""
    draw = torch.Generator().manual_seed(0)
    for number in range(100):
        text = "".join(chr(32 + code) for code in torch.randint(95, (60,), generator=draw).tolist())
        (tmp_path / f"{number}.txt").write_text(text)
    assert any(texts.is_held_out(f"{number}.txt") for number in range(100))
    ticks = iter(range(100_000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    return [
        "train-head", "--target", str(target), "--text", f"{tmp_path}/*.txt", "--out", str(tmp_path / "head"),
        "--minutes", str(STEPS / 60), "--auxiliary-layers", "0", "2", "3", "--batch", "2", "--window", "16",
        "--dtype", "float32",
    ]  # fmt: skip


def stopping(error: type[BaseException]) -> Any:
    """An update of weights that raises in step STOP."""

    def update(self: Any, done: float, own: Any = training.Training._update) -> None:
        if self.steps == STOP:
            raise error
        own(self, done)

    return update


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "tokens to train on" in shown
    assert "min, step 31: loss" in shown
    once = load_file(tmp_path / "head" / "model.safetensors")
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["steps"] == STEPS
    assert len(record["held_out_agreement_by_depth"]) == record["unrolled"] == 4
    assert [point["steps"] for point in record["curve"]] == [8, 16, 24, 32, STEPS]
    assert record["curve"][-1]["loss"] == record["held_out_loss"] < record["curve"][0]["loss"]

    arguments[arguments.index("--out") + 1] = str(tmp_path / "again")
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "_update", stopping(KeyboardInterrupt))
        assert main(arguments) == 130
    assert (
        "again is the best head so far, and the state is kept; the same command with --resume"
        in capsys.readouterr().err
    )
    assert json.loads((tmp_path / "again" / "training.json").read_text())["steps"] == STOP
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == once.keys()
    assert main(arguments) == 2
    assert "again exists; give another --out, delete it, or train it longer with --resume" in capsys.readouterr().err
    assert main([*arguments, "--resume", "--rate", "0.5"]) == 2
    assert "the state of another run (rate: 0.01 there, 0.5 now)" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert f"continues at step {STOP}, minute 0.3" in capsys.readouterr().out
    resumed = load_file(tmp_path / "again" / "model.safetensors")
    assert resumed.keys() == once.keys()
    assert all(resumed[name].equal(once[name]) for name in once)


def test_a_training_is_asked_to_end(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def update(self: Any, done: float, own: Any = training.Training._update) -> None:
        own(self, done)
        if self.steps == STOP:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "_update", update)
        assert main(arguments) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert "head is the best head so far" in capsys.readouterr().err
    assert (tmp_path / "head" / "model.safetensors").is_file()
    assert main([*arguments, "--resume"]) == 0


def test_a_finished_training_goes_on_with_more_minutes(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert main([*arguments, "--resume"]) == 2
    assert "head was trained for 0.7 minutes; to go on, give more as --minutes" in capsys.readouterr().err
    assert main([*arguments, "--resume", "--minutes", "1"]) == 0
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert (record["steps"], record["minutes"]) == (60, 1)
    assert [point["steps"] for point in record["curve"]] == [8, 16, 24, 32, 40, 48, 60]
    shutil.rmtree(tmp_path / "head")
    assert main([*arguments, "--resume", "--minutes", "1"]) == 0, "a head that was deleted is written again"
    assert (tmp_path / "head" / "model.safetensors").is_file()
    shutil.rmtree(tmp_path / "head.training")
    assert main([*arguments, "--resume", "--minutes", "2"]) == 2
    assert "head.training does not, which --resume needs" in capsys.readouterr().err


def test_the_best_head_is_kept(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, float("nan"), 2.5, 2.1])
    own = training.Training.check

    def check(self: Any) -> training.Report:
        self.curve[-1:] = [own(self)._replace(loss=next(losses))]
        return self.curve[-1]

    monkeypatch.setattr(training.Training, "check", check)
    assert main(arguments) == 0
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert (record["steps"], record["held_out_loss"]) == (16, 2.0)


def test_minutes_are_those_of_steps(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held-out check takes an hour, and so does the first call of what is compiled, after a resume too."""
    own, checked = training.Training.check, list[int]()

    def hour() -> None:
        for _ in range(3600):
            training.time.monotonic()

    def check(self: Any) -> training.Report:
        hour()
        checked.append(len(self.held_out))
        return own(self)

    def compiled(function: Any) -> Any:
        calls = iter((hour,))

        def call(*arguments: Any) -> Any:
            next(calls, lambda: None)()
            return function(*arguments)

        return call

    monkeypatch.setattr(training.Training, "check", check)
    monkeypatch.setattr(torch, "compile", compiled)
    assert main([*arguments, "--compile"]) == 0
    assert json.loads((tmp_path / "head" / "training.json").read_text())["steps"] == STEPS + 1
    assert len(checked) == 5
    assert max(checked) <= 6 * 2, "windows, of six batches"
    assert main([*arguments, "--compile", "--resume", "--minutes", "1"]) == 0
    assert json.loads((tmp_path / "head" / "training.json").read_text())["steps"] == 60 + 2


def test_a_killed_training_goes_on_from_its_last_save(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException): ...

    monkeypatch.setattr(training, "SAVE_EVERY", 10.0)
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "_update", stopping(Killed))
        with pytest.raises(Killed):
            main(arguments)
    assert json.loads((tmp_path / "head" / "training.json").read_text())["steps"] == 16, "the best of its checks"
    assert main([*arguments, "--resume"]) == 0
    assert "continues at step 11, minute 0.2" in capsys.readouterr().out


def test_a_draft_vocabulary(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--draft-vocab", "20", "--steps-unrolled", "2"]) == 0
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert weights["lm_head.weight"].shape == (20, 32)
    assert (torch.arange(20) + weights["d2t"]).equal(weights["t2d"].nonzero()[:, 0])
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 20


@pytest.mark.parametrize("supported", [False, True])
def test_products_are_of_the_dtype_that_the_cpu_computes(
    arguments: list[str], supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    del arguments[arguments.index("--dtype") :]
    arguments[arguments.index("--minutes") + 1] = "0.1"
    assert main(arguments) == 0
    assert json.loads((tmp_path / "head" / "training.json").read_text())["bfloat16"] is supported


def test_a_one_forward_head(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments[arguments.index("--minutes") + 1] = "0.1"
    kind = ["--kind", "dspark", "--steps-unrolled", "3", "--layers", "1", "--markov-rank", "8"]
    assert main([*arguments, *kind]) == 2
    assert "give ascending numbers from 1 to 3, as in --auxiliary-layers 1 2 3" in capsys.readouterr().err
    arguments[arguments.index("--auxiliary-layers") + 1] = "1"
    assert main([*arguments, *kind]) == 0
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert weights["markov_head.markov_w1.weight"].shape == (96, 8)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["block_size"], config["num_hidden_layers"]) == (4, 1)
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 2], "vLLM counts from the first layer's output"
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert (record["kind"], record["rank"], record["unrolled"]) == ("dspark", 8, 3)
    assert len(record["held_out_agreement_by_depth"]) == 3


def of_layers(arguments: list[str], *more: str) -> list[str]:
    at = arguments.index("--auxiliary-layers")
    return [*arguments[:at], *arguments[at + 4 :], "--kind", "layers", *more]


def test_a_draft_of_layers(arguments: list[str], target: Path, tmp_path: Path) -> None:
    """It is a model of transformers; the layers are the target's first ones and its last, the embeddings are shared."""
    once = [*of_layers(arguments, "--layers", "2", "--rate", "1e-6"), "--out", str(tmp_path / "begin")]
    assert main(once) == 0
    draft, theirs = (LlamaForCausalLM.from_pretrained(folder).eval() for folder in (tmp_path / "begin", target))
    assert draft.config.num_hidden_layers == 2
    for mine, its in ((0, 0), (1, 3)):
        for name, weight in draft.model.layers[mine].state_dict().items():
            torch.testing.assert_close(
                weight.float(), theirs.model.layers[its].state_dict()[name], atol=1e-2, rtol=1e-2
            )
    torch.testing.assert_close(draft.lm_head.weight.float(), theirs.lm_head.weight, atol=1e-2, rtol=1e-2)
    record = json.loads((tmp_path / "begin" / "training.json").read_text())
    assert (record["kind"], record["layers"], record["auxiliary_layers"]) == ("layers", 2, [])

    assert main(of_layers(arguments, "--layers", "2")) == 0
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["held_out_loss"] < record["curve"][0]["loss"]
    learnt = load_file(tmp_path / "head" / "model.safetensors")
    begun = load_file(tmp_path / "begin" / "model.safetensors")
    assert learnt.keys() == begun.keys()
    assert learnt["model.embed_tokens.weight"].equal(begun["model.embed_tokens.weight"]), "the target's, frozen"
    assert not learnt["model.layers.1.mlp.up_proj.weight"].equal(begun["model.layers.1.mlp.up_proj.weight"])


def test_a_draft_has_fewer_layers_than_its_target(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(of_layers(arguments, "--layers", "4")) == 2
    assert "--layers 4: the target has only 4; give fewer" in capsys.readouterr().err


def test_the_token_of_places_that_are_predicted() -> None:
    assert train_head._mask({"pad_token_id": 3, "eos_token_id": 2}, 10) == 3
    assert train_head._mask({"pad_token_id": 0, "eos_token_id": 2}, 10) == 0
    assert train_head._mask({"pad_token_id": None, "eos_token_id": [2, 5]}, 10) == 2
    assert train_head._mask({"eos_token_id": []}, 10) == 0
    assert train_head._mask({"eos_token_id": None}, 10) == 0
    with pytest.raises(ValueError, match="10 of its config.json is not among its 10 tokens"):
        train_head._mask({"eos_token_id": 10}, 10)


@pytest.mark.parametrize(
    "options",
    [
        ["--layers", "2"],
        ["--markov-rank", "8"],
        ["--kind", "layers", "--draft-vocab", "20"],
        ["--kind", "layers", "--steps-unrolled", "2"],
    ],
)
def test_options_of_the_other_kind(
    arguments: list[str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *options]) == 2
    assert f"{options[-2]} means nothing for --kind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--target": "/no/such/folder"}, "/no/such/folder/config.json does not exist"),
        ({"--text": "/no/such/*.txt"}, "no file matches /no/such/*.txt"),
        ({"--window": "64"}, "6,400 and 64 are needed; give more files"),
        ({"--draft-vocab": "96"}, "a draft vocabulary of 96 is no smaller than the target's of 96"),
        ({"--out": "/"}, "/ exists; give another --out, delete it, or train it longer"),
    ],
)
def test_what_cannot_be_trained(
    arguments: list[str], changes: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *(part for pair in changes.items() for part in pair)]) == 2
    assert message in capsys.readouterr().err


def test_vllm_s_layers_do_not_fit_so_few(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    at = arguments.index("--auxiliary-layers")
    assert main(arguments[:at] + arguments[at + 4 :]) == 2
    assert "(2, 2, 1) are no auxiliary layers of a target with 4 layers" in capsys.readouterr().err


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("count", range(1, 8))
def test_the_layers_that_an_error_names_are_taken(count: int, first: int) -> None:
    if count <= first:
        with pytest.raises(ValueError, match="a target of 1 layers is too small for this kind of head: it needs 2"):
            auxiliary_layers(count, [0], first=first)
        return
    with pytest.raises(ValueError, match="as in --auxiliary-layers") as error:
        auxiliary_layers(count, [first - 1], first=first)
    named = [int(layer) for layer in str(error.value).split("--auxiliary-layers")[1].split()]
    assert list(auxiliary_layers(count, named, first=first)) == named


def test_a_target_that_is_no_llama(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert main([*arguments, "--target", str(tmp_path)]) == 2
    assert "the target is not Llama-like: its model_type is 'gpt2'" in capsys.readouterr().err


def test_an_unreadable_state(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training.Training, "_update", stopping(KeyboardInterrupt))
    assert main(arguments) == 130
    state = tmp_path / "head.training" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert main([*arguments, "--resume"]) == 2
    assert f"{state} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "inf", "soon"])
def test_bad_minutes(arguments: list[str], minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--minutes", minutes])
    assert f"{minutes!r} is not a positive number" in capsys.readouterr().err


def test_the_bundled_target_is_the_default() -> None:
    parser = train_head.argparse.ArgumentParser()
    train_head.add_arguments(parser)
    assert parser.parse_args(["--text", "x", "--out", "y", "--minutes", "1"]).target.endswith("demo_pair/target")


def test_texts_of_two_folders_may_have_the_same_name(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / "a.txt").write_text(folder)
    patterns = [f"{tmp_path}/one/**/*.txt", f"{tmp_path}/two/**/*.txt", f"{tmp_path}/one/sub/*.txt"]
    assert texts.read(patterns) == [("sub/a.txt", "one"), ("sub/a.txt", "two")], "one file is read once"
    with pytest.raises(ValueError, match="no file matches"):
        texts.read([f"{tmp_path}/three/*"])
