"""EAGLE-3 heads: the unrolled training is what drafting does, and the checkpoint is what vLLM reads."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from vllm_adaptive_tree.heads import checkpoint, texts
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head, auxiliary_layers
from vllm_adaptive_tree.heads.observations import Law
from vllm_adaptive_tree.heads.training import DEPTH_WEIGHT, HeadRecipe, Teacher, Training

torch.set_num_threads(1)  # tiny models

VOCABULARY, LAYERS = 60, (0, 1, 2)


def config_of(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def target_of(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config_of(**{"initializer_range": 0.3, **changes}))


def random_head(draft_vocabulary: int | None = None) -> Head:
    torch.manual_seed(1)
    head = Head(Dimensions.of(config_of().to_dict()), 3, draft_vocabulary)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return head.requires_grad_(requires_grad=False)


class OneRowAtATime:
    """The head's layer as a draft runs it: a row is read once, after the rows it sees."""

    def __init__(self, head: Head):
        self.head, self.size = head, head.midlayer.self_attn.size
        self.rotary = LlamaRotaryEmbedding(config_of())
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def read(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """[H], [H] -> the state [H] that predicts, after everything read so far."""
        layer, attention, size = self.head.midlayer, self.head.midlayer.self_attn, self.size
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)])
        query, key, value = (
            projection(x).view(1, -1, 1, size.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(x, torch.tensor([[len(self.keys)]])))
        self.keys.append(key)
        self.values.append(value)
        out = F.scaled_dot_product_attention(query, torch.cat(self.keys, 2), torch.cat(self.values, 2), enable_gqa=True)
        state = state + attention.o_proj(out.flatten())
        return state + layer.mlp(layer.post_attention_layernorm(state))


def test_unrolled_steps_are_drafting_steps() -> None:
    """From every root: the context's rows with the target's states, then a chain with the head's own."""
    head, steps, rows = random_head(), 4, 9
    random = torch.Generator().manual_seed(2)
    auxiliary = torch.randn(1, rows, 96, generator=random)
    embedded = torch.randn(1, rows, 32, generator=random)
    unrolled = head(auxiliary, embedded, steps)
    for root in range(rows):
        draft = OneRowAtATime(head)
        for row in range(root + 1):
            state = draft.read(embedded[0, row], head.fc(auxiliary[0, row]))
        for step in range(min(steps, rows - root)):
            if step:
                state = draft.read(embedded[0, root + step], state)
            torch.testing.assert_close(unrolled[step][0, root + step], head.norm(state), atol=1e-4, rtol=1e-4)


def dense(law: Law, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """The probabilities of a law that leaves nothing to other tokens."""
    assert law.rest.max() < 1e-6
    return torch.zeros(*law.rest.shape, vocabulary).scatter(-1, law.ids.long(), law.probs)


def test_the_target_s_part() -> None:
    target, tokens = target_of(), torch.randint(VOCABULARY, (2, 7))
    lesson = Teacher(target, LAYERS)(tokens)
    out = target(tokens, output_hidden_states=True)
    torch.testing.assert_close(dense(lesson.law), out.logits[:, 1:].softmax(-1))
    assert lesson.law.best.equal(out.logits[:, 1:].argmax(-1).int())
    assert lesson.auxiliary[:, :, :32].equal(target.model.embed_tokens(tokens[:, :-1])), "before layer 0: embeddings"
    assert lesson.auxiliary[:, :, 64:].equal(out.hidden_states[2][:, :-1])
    assert lesson.embedded.equal(target.model.embed_tokens(tokens[:, 1:]))


def test_loss_and_agreement() -> None:
    teacher, head = Teacher(target_of(), LAYERS), random_head()
    lesson = teacher(torch.randint(VOCABULARY, (2, 8)))
    loss, agreement = teacher.loss(head, lesson, 3)
    expected = []
    for step, normed in enumerate(head(lesson.auxiliary, lesson.embedded, 3)):
        q = (normed @ teacher.output(head).T).log_softmax(-1)[:, step:]
        expected.append(-(dense(lesson.law)[:, step:] * q).sum(-1).mean())
        assert agreement[step] == pytest.approx(float((q.argmax(-1) == lesson.law.best[:, step:]).float().mean()))
    weights = [DEPTH_WEIGHT**step for step in range(3)]
    assert float(loss) == pytest.approx(
        sum(w * float(e) for w, e in zip(weights, expected, strict=True)) / sum(weights)
    )


def test_a_draft_vocabulary_s_rows_weigh_what_it_covers() -> None:
    ids = torch.tensor([3, 5, 8, 40])
    teacher = Teacher(target_of(), LAYERS, ids)
    head = random_head(len(ids))
    tokens = torch.randint(VOCABULARY, (2, 8))
    lesson = teacher(tokens)
    probs = dense(lesson.law, len(ids))
    torch.testing.assert_close(probs, dense(Teacher(teacher.target, LAYERS)(tokens).law)[..., ids])
    loss, agreement = teacher.loss(head, lesson, 1)
    logits = head(lesson.auxiliary, lesson.embedded, 1)[0] @ head.lm_head.weight.T
    assert float(loss) == pytest.approx(float(-(probs * logits.log_softmax(-1)).sum(-1).mean()))
    assert float(agreement) == pytest.approx(float((ids[logits.argmax(-1)] == lesson.law.best).float().mean()))


def test_it_begins_as_the_target_s_last_layer() -> None:
    target = target_of()
    teacher, head = Teacher(target, LAYERS, torch.arange(0, VOCABULARY, 3)), random_head(20)
    teacher.initialise(head)
    state = torch.randn(1, 5, 96)
    assert head.fc(state).equal(state[..., 64:]), "the last auxiliary state"
    last, attention = target.model.layers[-1], head.midlayer.self_attn
    both = torch.randn(5, 32)
    torch.testing.assert_close(attention.q_proj(torch.cat([both, both], 1)), math.sqrt(2) * last.self_attn.q_proj(both))
    assert head.midlayer.mlp.down_proj.weight.equal(last.mlp.down_proj.weight)
    assert head.lm_head.weight.equal(target.lm_head.weight[::3])
    assert len({weight.data_ptr() for weight in [*head.parameters(), *target.parameters()]}) == len(
        [*head.parameters(), *target.parameters()]
    ), "copies"


@pytest.mark.parametrize("draft_ids", [None, torch.tensor([1, 2, 30, 59])])
def test_the_checkpoint(tmp_path: Path, draft_ids: torch.Tensor | None) -> None:
    head = random_head(None if draft_ids is None else 4)
    target = {**config_of().to_dict(), "bos_token_id": 7}
    checkpoint.write(tmp_path / "head", head, target, LAYERS, draft_ids)
    assert {file.name for file in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors"}
    weights = load_file(tmp_path / "head" / "model.safetensors")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert shapes == {
        "fc.weight": (32, 96),
        "norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (64, 64),
        "midlayer.self_attn.k_proj.weight": (32, 64),
        "midlayer.self_attn.v_proj.weight": (32, 64),
        "midlayer.self_attn.o_proj.weight": (32, 64),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        **({} if draft_ids is None else {"lm_head.weight": (4, 32), "d2t": (4,), "t2d": (VOCABULARY,)}),
    }
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    key = "eagle_aux_hidden_state_layer_ids"
    assert config[key] == config["eagle_config"][key] == [0, 1, 2], "Model Runner V2 reads one, vLLM's class the other"
    assert config["draft_vocab_size"] == (VOCABULARY if draft_ids is None else 4)
    assert config["bos_token_id"] == 7
    assert Dimensions.of(config) == Dimensions.of(target)
    if draft_ids is not None:
        assert weights["d2t"].dtype == torch.int64
        assert (torch.arange(4) + weights["d2t"]).equal(draft_ids)
        assert weights["t2d"].nonzero()[:, 0].equal(draft_ids)


def test_the_most_frequent_tokens() -> None:
    tokens = torch.tensor([9, 9, 9, 2, 2, 5, 5, 7])
    assert checkpoint.most_frequent(tokens, VOCABULARY, 3).tolist() == [2, 5, 9]
    with pytest.raises(ValueError, match="no smaller than the target's of 60"):
        checkpoint.most_frequent(tokens, VOCABULARY, VOCABULARY)


def test_a_head_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without context: a head can know everything of it. With biases, as Qwen2's."""
    torch.manual_seed(0)
    config = Qwen2Config(**{**config_of().to_dict(), "initializer_range": 0.3, "model_type": "qwen2"})
    target = Qwen2ForCausalLM(config)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    teacher = Teacher(target, LAYERS)
    head = Head(Dimensions.of(config.to_dict()))
    teacher.initialise(head)
    recipe = HeadRecipe(minutes=4.0, unrolled=3, batch=8, window=16, rate=1e-2, bfloat16=False)
    ticks = iter(range(10_000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))  # a second a step
    tokens = torch.randint(VOCABULARY, (4000,), generator=torch.Generator().manual_seed(3))
    training = Training(head, teacher, tokens[:3000], tokens[3000:], recipe)
    before = training.check()
    training.run(watch=lambda _: None)
    after = training.curve[-1]
    assert after.steps == 240
    assert after.loss < 0.8 * before.loss
    assert all(b > 2 * a for a, b in zip(before.agreement, after.agreement, strict=True))


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    head, teacher = random_head().requires_grad_(requires_grad=True), Teacher(target_of(), LAYERS)
    head.norm.weight.data.fill_(math.inf)
    ticks = iter(range(10_000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    tokens = torch.randint(VOCABULARY, (200,))
    with pytest.raises(ValueError, match=r"the loss is nan at step \d+: give a smaller --rate"):
        Training(head, teacher, tokens, tokens, HeadRecipe(5.0, 2, 2, 8, bfloat16=False)).run(watch=lambda _: None)


@pytest.mark.parametrize(("layers", "default"), [(8, (2, 4, 5)), (32, (2, 16, 29)), (6, (2, 3)), (4, None), (2, None)])
def test_auxiliary_layers(layers: int, default: tuple[int, ...] | None) -> None:
    if default is None or len(default) < 3:
        with pytest.raises(ValueError, match="vLLM's default"):
            auxiliary_layers(layers)
    else:
        assert auxiliary_layers(layers) == default
    assert auxiliary_layers(layers, [0, 1]) == (0, 1)
    for wrong in ([1, 0], [0, 0], [-1, 0], [0, layers]):
        with pytest.raises(ValueError, match="give ascending numbers"):
            auxiliary_layers(layers, wrong)


@pytest.mark.parametrize("changes", [{"model_type": "gpt2"}, {"hidden_act": "gelu"}])
def test_other_targets_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"not Llama-like.*{next(iter(changes.values()))}"):
        Dimensions.of({**config_of().to_dict(), **changes})


def test_texts_are_named_below_the_first_wildcard(tmp_path: Path) -> None:
    for name in ("a/b/one.py", "a/two.py", "three.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert dict(texts.read([f"{tmp_path}/**/*.py"])) == {name: name for name in ("a/b/one.py", "a/two.py", "three.py")}
    pair = [f"{tmp_path}/a/*.py", f"{tmp_path}/three.py"]
    assert texts.read(pair) == [("two.py", "a/two.py"), ("three.py", "three.py")]
    with pytest.raises(ValueError, match="no file matches"):
        texts.read([f"{tmp_path}/*.txt"])
    assert sum(texts.is_held_out(str(name)) for name in range(3200)) in range(60, 140)
