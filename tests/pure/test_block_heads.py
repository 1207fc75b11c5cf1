"""One-forward heads: blocks in training are what drafting reads, and the checkpoint is what vLLM reads."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from vllm_adaptive_tree.heads import block_training, checkpoint
from vllm_adaptive_tree.heads.block_training import DEPTH_WEIGHT, MARGINAL, BlockTeacher, low_rank, pointwise
from vllm_adaptive_tree.heads.dspark import Block, BlockHead
from vllm_adaptive_tree.heads.eagle3 import Dimensions
from vllm_adaptive_tree.heads.observations import Law
from vllm_adaptive_tree.heads.training import HeadRecipe, Training

from .test_heads import VOCABULARY, config_of, target_of

LAYERS, BLOCK = (1, 2), Block(layers=2, depth=3, rank=8, mask=5)


def random_head() -> BlockHead:
    torch.manual_seed(1)
    head = BlockHead(Dimensions.of(config_of().to_dict()), len(LAYERS), BLOCK)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return head.requires_grad_(requires_grad=False)


def block_alone(head: BlockHead, auxiliary: Tensor, embedded: Tensor, root: int) -> Tensor:
    """[T, A * H], [1 + K, H] -> [K, H] as a draft runs: the context's keys first, then the block's rows alone."""
    context = head.hidden_norm(head.fc(auxiliary[:root]))
    rotary, at = LlamaRotaryEmbedding(config_of()), torch.arange(root + len(embedded))[None]
    for layer in head.layers:
        attention, x = layer.self_attn, layer.input_layernorm(embedded)
        read = torch.cat([context, x])
        query, key = attention.q_proj(x).view(1, -1, 4, 16), attention.k_proj(read).view(1, -1, 2, 16)
        query, key = (one.transpose(1, 2) for one in (attention.q_norm(query), attention.k_norm(key)))
        value = attention.v_proj(read).view(1, -1, 2, 16).transpose(1, 2)
        cos, sin = rotary(read, at)
        key = apply_rotary_pos_emb(key, key, cos, sin)[0]
        query = apply_rotary_pos_emb(query, query, cos[:, root:], sin[:, root:])[0]
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        embedded = embedded + attention.o_proj(out.transpose(1, 2).flatten(2)[0])
        embedded = embedded + layer.mlp(layer.post_attention_layernorm(embedded))
    return head.norm(embedded[1:])


def test_blocks_in_training_are_drafted_blocks() -> None:
    head, roots = random_head(), torch.tensor([1, 4, 8])
    auxiliary, embedded = torch.randn(2, 9, 64), torch.randn(2, 3, 4, 32)
    together = head(auxiliary, embedded, roots)
    assert together.shape == (2, 3, BLOCK.depth, 32)
    for text in range(2):
        for place, root in enumerate(roots.tolist()):
            alone = block_alone(head, auxiliary[text], embedded[text, place], root)
            torch.testing.assert_close(together[text, place], alone, atol=1e-4, rtol=1e-4)


def dense(law: Law) -> torch.Tensor:
    assert law.rest.max() < 1e-6
    return torch.zeros(*law.rest.shape, VOCABULARY).scatter(-1, law.ids.long(), law.probs)


def test_the_target_s_part() -> None:
    target, tokens = target_of(), torch.randint(VOCABULARY, (2, 12))
    lesson = BlockTeacher(target, LAYERS, BLOCK.depth, BLOCK.mask)(tokens, roots=torch.tensor([2, 7]))
    out = target(tokens, output_hidden_states=True)
    for place, root in enumerate((2, 7)):
        for depth in range(3):
            probs = out.logits[:, root + depth].softmax(-1)
            torch.testing.assert_close(dense(lesson.law)[:, place, depth], probs)
            assert lesson.before[:, place, depth].equal(tokens[:, root + depth])
        read = torch.cat([tokens[:, [root]], torch.full((2, 3), BLOCK.mask)], 1)
        assert lesson.embedded[:, place].equal(target.model.embed_tokens(read))
    assert lesson.auxiliary.equal(torch.cat([out.hidden_states[1], out.hidden_states[2]], -1))
    every = BlockTeacher(target, LAYERS, BLOCK.depth, BLOCK.mask)(tokens)
    assert every.roots.tolist() == [1], "K tokens are behind each"


def test_loss_and_agreement() -> None:
    teacher, head = BlockTeacher(target_of(), LAYERS, BLOCK.depth, BLOCK.mask), random_head()
    lesson = teacher(torch.randint(VOCABULARY, (2, 12)))
    loss, agreement = teacher.loss(head, lesson, BLOCK.depth)
    alone = head(lesson.auxiliary, lesson.embedded, lesson.roots) @ teacher.target.lm_head.weight.T
    biased = alone + head.markov_head(lesson.before)
    means = [-(dense(lesson.law) * q.log_softmax(-1)).sum(-1).mean((0, 1)) for q in (biased, alone)]
    weights = DEPTH_WEIGHT ** torch.arange(3.0)
    expected = ((means[0] + MARGINAL * means[1]) / (1 + MARGINAL) * weights).sum() / weights.sum()
    assert float(loss) == pytest.approx(float(expected))
    same = (biased.argmax(-1) == lesson.law.best).float().mean((0, 1))
    torch.testing.assert_close(agreement, same)


def test_it_begins_with_the_pairs_of_the_texts() -> None:
    """A text in which 7 always follows 3."""
    tokens = torch.randint(VOCABULARY, (4000,), generator=torch.Generator().manual_seed(0))
    tokens[1:][tokens[:-1] == 3] = 7
    teacher, head = BlockTeacher(target_of(), LAYERS, BLOCK.depth, BLOCK.mask), random_head()
    teacher.initialise(head, tokens)
    bias = head.markov_head(torch.arange(VOCABULARY))
    assert int(bias[3].argmax()) == 7
    assert head.layers[1].mlp.up_proj.weight.equal(teacher.target.model.layers[-1].mlp.up_proj.weight)
    assert head.layers[0].self_attn.q_proj.weight.equal(teacher.target.model.layers[-2].self_attn.q_proj.weight)


def test_a_large_vocabulary_begins_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_training, "MOST_COUNTED", VOCABULARY - 1)
    teacher, head = BlockTeacher(target_of(), LAYERS, BLOCK.depth, BLOCK.mask), random_head()
    teacher.initialise(head, torch.zeros(10, dtype=torch.int64))
    assert not head.markov_head(torch.arange(VOCABULARY)).any()
    assert head.markov_head.markov_w1.weight.any(), "or its gradient would be 0"


def test_the_nearest_factors() -> None:
    matrix = torch.randn(30, 4) @ torch.randn(4, 30)
    one, two = low_rank(matrix, 4)
    torch.testing.assert_close(one @ two.T, matrix, atol=1e-3, rtol=1e-3)


def test_pairs_weigh_what_was_seen() -> None:
    ratio = pointwise(torch.tensor([0, 1] * 500 + [2]), 3)
    assert ratio[0, 1] > 0.5 > ratio[0, 0]
    assert ratio[2].abs().max() < 1e-5, "nothing was seen behind it"


def test_the_checkpoint(tmp_path: Path) -> None:
    head, target = random_head(), {**config_of().to_dict(), "bos_token_id": 7}
    checkpoint.write_block(tmp_path / "head", head, target, LAYERS)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (64, 32),
        "self_attn.k_proj.weight": (32, 32),
        "self_attn.v_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    assert shapes == {
        "fc.weight": (32, 64),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "markov_head.markov_w1.weight": (VOCABULARY, 8),
        "markov_head.markov_w2.weight": (VOCABULARY, 8),
        **{f"layers.{at}.{name}": shape for at in range(2) for name, shape in layer.items()},
    }
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [0, 1]}
    assert (config["block_size"], config["sample_from_anchor"], config["markov_rank"]) == (4, False, 8)
    assert config["bos_token_id"] == 7
    read = checkpoint.read_block(tmp_path / "head", len(LAYERS))
    assert read.block == BLOCK
    assert all(
        one.bfloat16().equal(other.bfloat16()) for one, other in zip(read.parameters(), head.parameters(), strict=True)
    )
    config["sample_from_anchor"] = True
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no head that `train-head --kind dspark` has written"):
        checkpoint.read_block(tmp_path / "head", len(LAYERS))


def test_a_head_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    ids = torch.tensor([1, 4, 5, 9, 20])
    teacher = BlockTeacher(target_of(), LAYERS, BLOCK.depth, BLOCK.mask, ids)
    size = Dimensions.of(config_of().to_dict())
    head = BlockHead(size, len(LAYERS), BLOCK, len(ids))
    tokens = torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(2))
    teacher.initialise(head, tokens.flatten())
    assert head.lm_head is not None
    assert head.lm_head.weight.equal(teacher.target.lm_head.weight[ids])
    whole = BlockHead(size, len(LAYERS), BLOCK)
    BlockTeacher(teacher.target, LAYERS, BLOCK.depth, BLOCK.mask).initialise(whole, tokens.flatten())
    assert head.markov_head.markov_w2.weight.equal(whole.markov_head.markov_w2.weight[ids])
    lesson = teacher(tokens)
    loss, agreement = teacher.loss(head, lesson, BLOCK.depth)
    logits = F.linear(head(lesson.auxiliary, lesson.embedded, lesson.roots), head.lm_head.weight)
    biased = logits + head.markov_head(lesson.before)
    hits = (ids[biased.argmax(-1)] == lesson.law.best).float().mean((0, 1))
    torch.testing.assert_close(agreement, hits)
    assert loss.isfinite()
    checkpoint.write_block(tmp_path / "head", head, config_of().to_dict(), LAYERS, ids)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert (weights["d2t"] + torch.arange(len(ids))).equal(ids)
    assert weights["t2d"].nonzero().flatten().equal(ids)
    assert weights["lm_head.weight"].shape == (len(ids), 32)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == len(ids)
    read = checkpoint.read_block(tmp_path / "head", len(LAYERS))
    assert read.markov_head.markov_w2.weight.shape == (len(ids), BLOCK.rank)


def test_a_head_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without context: its next token depends on the last one, which the bias can know."""
    monkeypatch.setattr(block_training, "SPACING", 4)
    target = target_of()
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    teacher = BlockTeacher(target, LAYERS, 2, 0)
    head = BlockHead(Dimensions.of(config_of().to_dict()), len(LAYERS), Block(1, 2, 16))
    tokens = torch.randint(VOCABULARY, (4000,), generator=torch.Generator().manual_seed(3))
    teacher.initialise(head, tokens)
    ticks = iter(range(10_000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))  # a second a step
    recipe = HeadRecipe(minutes=1.2, unrolled=2, batch=4, window=16, rate=1e-2, bfloat16=False)
    training = Training(head, teacher, tokens[:3000], tokens[3000:], recipe)
    before = training.check()
    training.run(watch=lambda _: None)
    after = training.curve[-1]
    assert after.loss < 0.8 * before.loss
    assert all(b > 2 * a for a, b in zip(before.agreement, after.agreement, strict=True))
