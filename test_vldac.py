"""The tests, in the order of the algorithm: the maths, the policy, the update, the parser, the worlds, a run.

Plain `pytest` runs all of it, the modules' doctests and the README's examples included. No network, no GPU.
"""

import ast
import contextlib
import dataclasses
import doctest
import functools
import http.server
import importlib.machinery
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, quote, unquote

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from peft import LoraConfig, get_peft_model
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

import envs
import eval as evaluation
import vldac
from envs import AnyText
from vldac import Args, VLMPolicy, gae, kl_base, kl_loss, parse_action, policy_loss, step_mean, value_loss

torch.set_num_threads(1)  # the models here are too small to share
ROOT = Path(__file__).parent


@pytest.mark.parametrize("module", [vldac, envs, evaluation], ids=lambda m: m.__name__)
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


# ---------------------------------------------------------------------------------------------- the maths


def gae_by_definition(rewards, values, last_values, dones, gamma, lam):
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, up to the end of the episode that t belongs to."""
    T, N = rewards.shape
    advantages = torch.zeros(T, N)
    for n, t in itertools.product(range(N), range(T)):
        for k in range(t, T):
            following = 0.0 if dones[k, n] else values[k + 1, n] if k + 1 < T else last_values[n]
            delta = rewards[k, n] + gamma * following - values[k, n]
            advantages[t, n] += (gamma * lam) ** (k - t) * delta
            if dones[k, n]:
                break
    return advantages


@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_gae_equals_its_definition(gamma, lam, dtype):
    torch.manual_seed(0)
    T, N = 7, 4
    rewards, values, last = torch.randn(T, N), torch.randn(T, N), torch.randn(N)
    dones = torch.rand(T, N) < 0.3
    dones[-1] = torch.tensor([True, False, True, False])  # both flags at the cut
    advantages, returns = gae(rewards, values, last, dones.to(dtype), gamma, lam)
    torch.testing.assert_close(advantages, gae_by_definition(rewards, values, last, dones, gamma, lam))
    torch.testing.assert_close(returns, advantages + values)


def test_gae_ignores_what_follows_an_end():
    """Where the last step ended an episode, last_values may be anything; a final step has only its reward."""
    rewards, values, dones = torch.tensor([[1.0], [5.0]]), torch.zeros(2, 1), torch.tensor([[True], [True]])
    advantages, _ = gae(rewards, values, torch.tensor([math.nan]), dones, 0.9, 0.9)
    assert advantages.flatten().tolist() == [1.0, 5.0]


def random_tokens(B, R, seed=0):
    """newlogprobs (with gradient), logprobs, advantages, mask with 1 to R tokens per step."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, R + 1, (B,), generator=g)
    mask = (torch.arange(R) < lengths[:, None]).long()
    old = -3 * torch.rand(B, R, generator=g)
    new = (old + 0.3 * torch.randn(B, R, generator=g)).requires_grad_()
    return new, old, torch.randn(B, generator=g), mask


def slow_policy_loss(new, old, advantages, mask, clip):
    total = 0.0
    for b in range(len(new)):
        losses = []
        for i in range(int(mask[b].sum())):
            ratio = math.exp(new[b, i] - old[b, i])
            clipped = min(max(ratio, 1 - clip), 1 + clip)
            losses.append(-min(ratio * advantages[b].item(), clipped * advantages[b].item()))
        total += sum(losses) / len(losses)
    return total / len(new)


@pytest.mark.parametrize("B, R", [(5, 3), (4, 4), (1, 6)])  # B = R is where (B,) would broadcast over tokens
def test_policy_loss_equals_the_loop(B, R):
    new, old, advantages, mask = random_tokens(B, R)
    loss = policy_loss(new, old, advantages, mask, 0.1)
    assert loss.item() == pytest.approx(slow_policy_loss(new.detach(), old, advantages, mask, 0.1), abs=1e-6)


@pytest.mark.parametrize("B, R", [(5, 3), (4, 4)])
def test_kl_estimators_equal_the_loop(B, R):
    new, old, _, mask = random_tokens(B, R)
    rows = [
        [(math.exp(n - o), n - o) for n, o, m in zip(*r, strict=True) if m]
        for r in zip(new.tolist(), old.tolist(), mask.tolist(), strict=True)
    ]
    slow = np.mean([np.mean([ratio * log - (ratio - 1) for ratio, log in row]) for row in rows])
    assert kl_loss(new, old, mask).item() == pytest.approx(slow, abs=1e-6)
    slow = np.mean([np.mean([1 / ratio + log - 1 for ratio, log in row]) for row in rows])
    assert kl_base(new, old, mask).item() == pytest.approx(slow, abs=1e-6)


def test_value_loss_is_half_the_squared_error():
    values, returns = torch.randn(6, requires_grad=True), torch.randn(6)
    value_loss(values, returns).backward()
    torch.testing.assert_close(values.grad, (values.detach() - returns) / 6)


def test_a_step_s_advantage_reaches_only_its_own_tokens():
    new, old, advantages, mask = random_tokens(4, 4)
    for b in range(4):
        only_b = torch.zeros(4).index_fill(0, torch.tensor([b]), 1.0)
        (grad,) = torch.autograd.grad(policy_loss(new, new.detach(), only_b, mask, 0.1), new)
        reached = grad != 0
        assert reached[b].equal(mask[b].bool()) and reached.sum() == mask[b].sum()
        torch.testing.assert_close(
            grad[b][mask[b] == 1], torch.full((int(mask[b].sum()),), -1 / 4 / mask[b].sum())
        )


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize(
    "loss",
    [
        lambda *x: policy_loss(*x, 0.1),
        lambda n, o, a, m: kl_loss(n, o, m),
        lambda n, o, a, m: kl_base(n, o, m),
    ],
    ids=["policy", "kl_old", "kl_base"],
)
def test_what_lies_under_the_padding_changes_nothing(loss, junk):
    new, old, advantages, mask = random_tokens(4, 4)
    clean = loss(new, old, advantages, mask)
    (clean_grad,) = torch.autograd.grad(clean, new)
    dirty_new = new.detach().masked_fill(mask == 0, junk).requires_grad_()
    dirty = loss(dirty_new, old.masked_fill(mask == 0, -junk), advantages, mask)
    (dirty_grad,) = torch.autograd.grad(dirty, dirty_new)
    assert dirty.equal(clean) and dirty_grad.equal(clean_grad)


def test_a_step_without_tokens_is_refused():
    with pytest.raises(ValueError, match="token in every step"):
        step_mean(torch.zeros(2, 2), torch.tensor([[1, 1], [0, 0]]))


def small_vocabulary():
    """Two policies over five tokens: new (with gradient, as logits) and the other one's probabilities."""
    torch.manual_seed(1)
    logits = torch.randn(5, requires_grad=True)
    return logits, torch.randn(5).softmax(0)


def test_kl_loss_is_the_divergence_of_equation_5():
    """Weighted by pi_old, the estimator is D_KL(pi_new || pi_old), in value and in gradient."""
    logits, old = small_vocabulary()
    new = logits.log_softmax(0)
    per_token = torch.stack(
        [kl_loss(new[None, None, i], old.log()[None, None, i], torch.ones(1, 1)) for i in range(5)]
    )
    exact = (new.exp() * (new - old.log())).sum()
    torch.testing.assert_close((old * per_token).sum(), exact)
    (gradient,) = torch.autograd.grad((old * per_token).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0])


def test_kl_base_is_one_divergence_in_value_and_the_other_in_gradient():
    """Weighted by the fixed pi_new: value D_KL(new || base), gradient that of D_KL(base || new)."""
    logits, base = small_vocabulary()
    new = logits.log_softmax(0)
    per_token = torch.stack(
        [kl_base(new[None, None, i], base.log()[None, None, i], torch.ones(1, 1)) for i in range(5)]
    )
    estimate = (new.exp().detach() * per_token).sum()
    torch.testing.assert_close(estimate, (new.exp() * (new - base.log())).sum())
    (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    exact = (base * (base.log() - new)).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0])


# --------------------------------------------------------------------------------------------- the policy

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm"]
ACTIONS = ["turn left", "turn right", "move forward"]


def chat_template(image, start, end):
    turn = start + "{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}" + image
    turn += "{% else %}{{ c.text }}{% endif %}{% endfor %}" + end + "\n"
    return (
        "{% for m in messages %}"
        + turn
        + "{% endfor %}{% if add_generation_prompt %}"
        + start
        + "assistant\n{% endif %}"
    )


def write_model(family, folder, H=32, layers=2):
    """A random model of a few thousand parameters whose folder has the traps of the hub's.

    A generation_config that samples greedily (top_k 1, temperature 0.01) and ends a turn by either of two,
    an image processor without a video processor, the chat template in a file of its own.
    """
    qwen = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
    gemma = (
        "<pad> <eos> <bos> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token>"
    )
    smol = (
        "<|endoftext|> <|im_start|> <end_of_utterance> <fake_token_around_image> <image> <global-img> <video>"
    )
    special = {"gemma3": gemma, "smolvlm": smol}.get(family, qwen).split()
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["turn left turn right move forward go to the red box"] * 3, trainer)
    ids = {s: raw.token_to_id(s) for s in special}
    text = dict(hidden_size=H, intermediate_size=2 * H, num_hidden_layers=layers, num_attention_heads=H // 16,
                num_key_value_heads=H // 32, vocab_size=raw.get_vocab_size())  # fmt: skip
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    files = {}
    if family == "gemma3":
        extra = {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
        names, stop = (
            dict(eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"),
            ["<eos>", "<end_of_turn>"],
        )
        template = "<bos>" + chat_template("<start_of_image>", "<start_of_turn>", "<end_of_turn>")
        config = Gemma3Config(
            text_config=text | dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=64),
            vision_config=vision, mm_tokens_per_image=4, image_token_index=ids["<image_soft_token>"],
            boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"],
        )  # fmt: skip
        images = dict(
            processor_class="Gemma3Processor",
            image_processor_type="Gemma3ImageProcessor",
            size={"height": 56, "width": 56},
        )
        files["processor_config.json"] = dict(processor_class="Gemma3Processor", image_seq_length=4)
    elif family == "smolvlm":
        extra, names = (
            {"image_token": "<image>"},
            dict(eos_token="<end_of_utterance>", pad_token="<|endoftext|>"),
        )
        stop, template = (
            ["<end_of_utterance>", "<|endoftext|>"],
            chat_template("<image>", "<|im_start|>", "<end_of_utterance>"),
        )
        config = SmolVLMConfig(
            text_config=text | dict(model_type="llama", pad_token_id=0), vision_config=vision,
            image_token_id=ids["<image>"], scale_factor=2, pad_token_id=0,
        )  # fmt: skip
        images = dict(processor_class="SmolVLMProcessor", image_processor_type="SmolVLMImageProcessor")
        images |= dict(
            do_image_splitting=True, size={"longest_edge": 224}, max_image_size={"longest_edge": 56}
        )
        files["processor_config.json"] = dict(processor_class="SmolVLMProcessor", image_seq_len=4)
    else:
        extra, names, stop = (
            {},
            dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
            ["<|im_end|>", "<|endoftext|>"],
        )
        template = chat_template("<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>", "<|im_end|>")
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        kinds = dict(
            image="image_pad", video="video_pad", vision_start="vision_start", vision_end="vision_end"
        )
        marks = {f"{kind}_token_id": ids[f"<|{name}|>"] for kind, name in kinds.items()}
        images = dict(
            image_processor_type="Qwen2VLImageProcessor", patch_size=14, merge_size=2, temporal_patch_size=2
        )
        pixels = {"min_pixels": 3136, "max_pixels": 12845056}
        if family == "qwen2_vl":
            images |= dict(processor_class="Qwen2VLProcessor") | pixels
            tower = dict(depth=1, embed_dim=32, hidden_size=H, num_heads=2, mlp_ratio=2)
            config = Qwen2VLConfig(text_config=text, vision_config=tower, **marks)
        elif family == "qwen2_5_vl":
            images |= dict(processor_class="Qwen2_5_VLProcessor") | pixels
            tower = dict(
                depth=1,
                hidden_size=32,
                out_hidden_size=H,
                intermediate_size=64,
                num_heads=2,
                fullatt_block_indexes=[0],
            )
            config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **marks)
        else:
            size = {"shortest_edge": 65536, "longest_edge": 16777216}
            images |= dict(processor_class="Qwen3VLProcessor", patch_size=16, size=size)
            tower = dict(depth=2, hidden_size=32, out_hidden_size=H, intermediate_size=64, num_heads=2,
                         num_position_embeddings=64, deepstack_visual_indexes=[0])  # fmt: skip
            config = Qwen3VLConfig(text_config=text | dict(head_dim=16), vision_config=tower, **marks)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    greedy = dict(do_sample=True, temperature=0.01, top_k=1, top_p=0.001)
    stop_ids = [ids[s] for s in stop]
    model.generation_config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=ids[special[0]], **greedy)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, extra_special_tokens=extra, **names)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    for name, content in {"preprocessor_config.json": images, **files}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """model_folder(family) -> a folder for --model, written once."""
    made = {}

    def get(family="qwen2_vl"):
        if family == "smolvlm":
            pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
        if family not in made:
            made[family] = write_model(family, tmp_path_factory.mktemp(family))
        return str(made[family])

    return get


def options(model, **changes) -> Args:
    defaults = dict(
        model=model, device="cpu", dtype="float32", value_hidden=(16,), max_new_tokens=10, lora_rank=4
    )
    return Args(**defaults | changes)


def make_policy(model, seed=0, **changes) -> VLMPolicy:
    """A policy whose adapters are not zero, as after some training."""
    torch.manual_seed(seed)
    policy = VLMPolicy(options(model, **changes))
    for name, parameter in policy.vlm.named_parameters():
        if "lora_B" in name and not changes.get("adapter"):
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def some_prompts(counts=(1, 2, 3)):
    """Prompts of unequal length, with 1 to 3 images each."""
    rng = np.random.default_rng(0)
    prompts = []
    for k in counts:
        seen = [
            {"image": rng.integers(0, 255, (60, 80, 3), dtype=np.uint8), "text": "dark " * k}
            for _ in range(k)
        ]
        prompts.append((vldac.build_prompt(seen, ACTIONS, "find it", k, 9), [o["image"] for o in seen]))
    return prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_and_scoring_agree(family, model_folder):
    """Left-padded batch = one by one = the sampler's own log-probabilities, first and stop token included."""
    policy = make_policy(model_folder(family), temperature=1.3)
    prompts = [policy.encode(prompt) for prompt in some_prompts()]
    batch = policy.batch(prompts)
    policy.eval()
    out = policy.base.generate(
        **batch,
        generation_config=policy.base.generation_config,
        output_scores=True,
        return_dict_in_generate=True,
    )
    responses = out.sequences[:, batch["input_ids"].shape[1] :]
    sampler = torch.stack(out.scores, 1).float().log_softmax(2).gather(2, responses[..., None])[..., 0]
    # One response cut by the limit, one that ends by each stop id, one that is nothing but a stop id.
    lists = [row[: 3 + i] for i, row in enumerate(responses.tolist())]
    tokens, mask = policy.pad(lists)
    batched, values, _ = policy(prompts, tokens, mask)
    for i, prompt in enumerate(prompts):
        n = len(lists[i])
        torch.testing.assert_close(batched[i, :n], sampler[i, :n], atol=1e-5, rtol=0)
        for stop in policy.stop_ids:
            ids = lists[i] + [stop]
            one, value, _ = policy([prompt], *policy.pad([ids]))
            torch.testing.assert_close(one[0, :n], batched[i, :n], atol=1e-5, rtol=0)
            torch.testing.assert_close(value[0], values[i], atol=1e-5, rtol=0)
            padded, _, _ = policy(prompts, *policy.pad([ids if j == i else [stop] for j in range(3)]))
            torch.testing.assert_close(padded[i, : n + 1], one[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_but_placeholders_can_be_sampled_and_either_stop_id_ends_a_turn(family, model_folder):
    """The hub's generation_config (top_k 1, temperature 0.01) must not leak into the rollout."""
    policy = make_policy(model_folder(family), max_new_tokens=30)
    V = policy.base.config.get_text_config().vocab_size
    assert len(policy.stop_ids) == 2 and policy.banned_ids
    prompts = [policy.encode(*some_prompts([1]))] * 4
    out = policy.eval().base.generate(
        **policy.batch(prompts),
        generation_config=policy.base.generation_config,
        output_scores=True,
        return_dict_in_generate=True,
    )
    possible = torch.isfinite(out.scores[0][0])
    assert sorted(
        (~possible).nonzero().flatten().tolist()
    ) == policy.banned_ids and possible.sum() == V - len(policy.banned_ids)
    for stop in policy.stop_ids:  # make one stop id likely: turns end with it, well before the limit
        bias = torch.zeros(V)
        bias[stop] = 50.0
        head = policy.base.get_output_embeddings()
        handle = head.register_forward_hook(lambda m, i, o, bias=bias: o + bias)
        assert policy.sample(prompts) == [[stop]] * 4
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_features_for_pixels_change_nothing(family, model_folder):
    """1 to 3 images per prompt, in other batches than those in which they were seen; values and all."""
    policy = make_policy(model_folder(family))
    prompts = [policy.encode(prompt) for prompt in some_prompts((2, 1, 3))]
    seen = vldac.see(policy, some_prompts((2, 1, 3)))
    assert not any(key.startswith("pixel") for prompt in seen for key in prompt)
    tokens, mask = policy.pad([[9, 10, 11], [12], [13, 14]])
    blind = mock.Mock(side_effect=AssertionError("it looks again"))
    for index in ([0, 1, 2], [2, 0], [1]):
        one = policy([prompts[i] for i in index], tokens[index], mask[index])
        with mock.patch.object(policy.base.model, "get_rope_index", blind, create=True):
            other = policy([seen[i] for i in index], tokens[index], mask[index])
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-6)
    torch.manual_seed(0)
    responses = policy.sample(prompts)
    torch.manual_seed(0)
    with mock.patch.object(policy.base.model, "get_image_features", blind):
        assert policy.sample(seen) == responses


def test_a_vision_tower_with_adapters_looks_every_time(model_folder, tmp_path):
    base = AutoModelForImageTextToText.from_pretrained(model_folder())
    config = LoraConfig(r=4, target_modules=r".*\.(q_proj|v_proj|qkv)", init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path)
    policy = make_policy(model_folder(), adapter=str(tmp_path))
    assert all("pixel_values" in prompt for prompt in vldac.see(policy, some_prompts()))


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_is_on_the_language_model_only(family, model_folder):
    policy = make_policy(model_folder(family))
    names = [name for name, p in policy.vlm.named_parameters() if p.requires_grad]
    assert names and not [name for name in names if "vision" in name or "visual" in name]
    assert {name.split(".")[-4] for name in names} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_costs_few_tokens(family, model_folder):
    policy = make_policy(model_folder(family), max_image_tokens=16)
    frame = np.zeros((600, 800, 3), np.uint8)
    ids = policy.encode((some_prompts([1])[0][0], [frame]))["input_ids"]
    assert 1 <= torch.isin(ids, torch.tensor(policy.banned_ids)).sum() <= 16


def test_the_value_looks_at_the_prompt_alone(model_folder):
    policy = make_policy(model_folder())
    prompts = [policy.encode(prompt) for prompt in some_prompts()]
    _, empty, _ = policy(prompts, *policy.pad([[]] * 3))
    _, full, _ = policy(prompts, *policy.pad([[9, 10, 11]] * 3))
    torch.testing.assert_close(empty, full, atol=1e-6, rtol=0)
    assert empty.unique().numel() == 3


def test_the_entropy_is_that_of_the_softmax(model_folder):
    policy = make_policy(model_folder())
    prompts = [policy.encode(*some_prompts([2]))]
    V = policy.base.config.get_text_config().vocab_size
    allowed = [i for i in range(V) if i not in policy.banned_ids]
    every = torch.cat([policy(prompts, *policy.pad([[i]]))[0][0] for i in allowed])
    assert every.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert policy(prompts, *policy.pad([[9]]))[2].item() == pytest.approx(
        -(every.exp() * every).sum().item(), abs=1e-4
    )


# --------------------------------------------------------------------------------------------- the update


def make_rollout(policy, B=6, seed=0):
    """A rollout of sampled responses, as `train` builds it, with made-up advantages and returns."""
    torch.manual_seed(seed)
    prompts = [policy.encode(prompt) for prompt in some_prompts([1 + b % 3 for b in range(B)])]
    responses = [r[: 2 + b] for b, r in enumerate(policy.sample(prompts))]
    tokens, mask = policy.pad(responses)
    logprobs, values = vldac.score(policy, prompts, tokens, mask)
    with policy.vlm.disable_adapter():
        baselogprobs, _ = vldac.score(policy, prompts, tokens, mask)
    advantages, returns = torch.randn(2, B)
    return vldac.Rollout(prompts, tokens, mask, mask, logprobs, baselogprobs, advantages, returns)


def optimizer_of(policy, lr=1e-2):
    return vldac.make_optimizer(policy, dataclasses.replace(policy.args, learning_rate=lr))


def lora(policy):
    return [p for p in policy.vlm.parameters() if p.requires_grad]


def lora_state(policy):
    return torch.cat([p.detach().flatten().clone() for p in lora(policy)])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_minibatch_has_ratio_one(family, model_folder):
    policy = make_policy(model_folder(family))
    args = dataclasses.replace(policy.args, minibatch_size=3, micro_batch_size=2)
    losses = vldac.update(policy, optimizer_of(policy), make_rollout(policy), args, value_only=False)
    assert losses["ratio_first"] < 1e-4
    assert losses["approx_kl"] > 1e-4  # and the later ones have not


def test_the_first_minibatch_has_ratio_one_around_an_adapter_made_with_dropout(model_folder, tmp_path):
    base = AutoModelForImageTextToText.from_pretrained(model_folder())
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=vldac.LORA_TARGETS, init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path)
    policy = make_policy(model_folder(), adapter=str(tmp_path))
    assert lora_state(policy).abs().sum() > 0
    args = dataclasses.replace(policy.args, minibatch_size=3, micro_batch_size=2)
    assert vldac.update(policy, optimizer_of(policy), make_rollout(policy), args, False)["ratio_first"] < 1e-4


def gradients(policy, loss):
    policy.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad for p in lora(policy)], [p.grad for p in policy.value_head.parameters()]


def test_the_two_losses_touch_different_weights(model_folder):
    """The value loss leaves every LoRA gradient exactly zero, the policy loss every value-head gradient."""
    policy = make_policy(model_folder())
    rollout = make_rollout(policy)
    _, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    adapters, head = gradients(policy, value_loss(values, rollout.returns))
    assert all(g is None or not g.any() for g in adapters) and any(g.any() for g in head)
    logprobs, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    loss = policy_loss(logprobs, rollout.logprobs, rollout.advantages, rollout.mask, 0.1)
    adapters, head = gradients(policy, loss + 0.05 * kl_base(logprobs, rollout.baselogprobs, rollout.mask))
    assert any(g.any() for g in adapters) and all(g is None or not g.any() for g in head)


def test_bfloat16_computes_in_half_and_keeps_log_probabilities_values_and_adapters_in_full(model_folder):
    policy = make_policy(model_folder(), dtype="bfloat16")
    rollout = make_rollout(policy)
    assert policy.base.get_output_embeddings().weight.dtype == torch.bfloat16
    assert (
        {p.dtype for p in lora(policy)}
        == {p.dtype for p in policy.value_head.parameters()}
        == {torch.float32}
    )
    assert (
        rollout.logprobs.dtype == torch.float32
        and not (rollout.logprobs == rollout.logprobs.bfloat16()).all()
    )
    args = dataclasses.replace(policy.args, minibatch_size=6)
    losses = vldac.update(policy, optimizer_of(policy), rollout, args, value_only=False)
    assert losses["ratio_first"] < 0.1 and math.isfinite(losses["policy_loss"])


def test_a_thousandfold_value_loss_moves_lora_not_one_bit_further(model_folder):
    """Neither through gradients nor through a joint clipping norm nor through Adam."""
    states = []
    for vf_coef in (0.15, 150.0):
        policy = make_policy(model_folder())
        rollout = make_rollout(policy)
        args = dataclasses.replace(policy.args, minibatch_size=3, vf_coef=vf_coef, max_grad_norm=0.01)
        before = lora_state(policy)
        torch.manual_seed(0)
        vldac.update(policy, optimizer_of(policy), rollout, args, value_only=False)
        states.append(lora_state(policy))
        assert not states[-1].equal(before)
    assert states[0].equal(states[1])


def test_value_warm_up_trains_the_value_head_alone(model_folder):
    policy = make_policy(model_folder())
    rollout, before = make_rollout(policy), lora_state(policy)
    head = policy.value_head[0].weight.detach().clone()
    vldac.update(
        policy,
        optimizer_of(policy),
        rollout,
        dataclasses.replace(policy.args, minibatch_size=6),
        value_only=True,
    )
    assert lora_state(policy).equal(before) and not policy.value_head[0].weight.equal(head)


@pytest.mark.parametrize("micro", [1, 4, 5])
def test_unequal_micro_batches_give_the_gradient_of_one(model_folder, micro):
    """6 = 4 + 2 = 5 + 1: each micro-batch counts by its share of the steps."""
    grads = []
    for size in (6, micro):
        policy = make_policy(model_folder())
        rollout = make_rollout(policy)
        args = dataclasses.replace(
            policy.args, minibatch_size=6, micro_batch_size=size, update_epochs=1, max_grad_norm=1e9
        )
        vldac.update(policy, optimizer_of(policy, lr=0.0), rollout, args, value_only=False)
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert grads[0].abs().max() > 1e-3
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-5)


def test_gradient_checkpointing_changes_no_gradient(model_folder):
    grads = []
    for checkpointing in (False, True):
        policy = make_policy(model_folder(), gradient_checkpointing=checkpointing)
        args = dataclasses.replace(policy.args, minibatch_size=6, update_epochs=1)
        vldac.update(policy, optimizer_of(policy, lr=0.0), make_rollout(policy), args, value_only=False)
        grads.append(torch.cat([p.grad.flatten() for p in lora(policy)]))
    torch.testing.assert_close(*grads, atol=1e-6, rtol=0)


def kept_for_backward(policy, rollout) -> int:
    """Bytes that a training forward pass keeps, weights aside."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    policy.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = policy(rollout.prompts, rollout.tokens, rollout.mask)
    assert outputs[0].requires_grad
    return sum(size for where, size in kept.items() if where not in weights)


def test_gradient_checkpointing_and_half_precision_save_memory(tmp_path):
    """Checkpointing keeps little more than the layers' inputs; bfloat16 keeps no fp32 copies of LoRA's."""
    model, kept = str(write_model("qwen2_vl", tmp_path, H=64, layers=8)), {}
    for name, changes in {
        "full": {},
        "checkpointing": {"gradient_checkpointing": True},
        "half": {"dtype": "bfloat16"},
    }.items():
        policy = make_policy(model, **changes)
        kept[name] = kept_for_backward(policy, make_rollout(policy))
    for module in policy.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = True  # peft's default
    copied = kept_for_backward(policy, make_rollout(policy))
    assert kept["checkpointing"] < 0.25 * kept["full"]
    assert kept["half"] < 0.9 * copied < kept["full"]


def test_micro_batches_hold_every_step_once_and_similar_lengths():
    rng = np.random.default_rng(0)
    prompts = [{"input_ids": torch.zeros(1, n)} for n in rng.integers(10, 200, 64)]
    mask = (torch.arange(30) < torch.as_tensor(rng.integers(1, 31, 64))[:, None]).long()
    index = torch.randperm(64)[:50]
    parts = list(vldac.micro_batches(prompts, mask, index, 8))
    assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == sorted(index.tolist())
    assert [len(rows) for rows, _ in parts] == [8] * 6 + [2]
    assert all(R == mask[rows].sum(1).max() for rows, R in parts)

    def padded(parts):
        return sum(len(rows) * (max(prompts[i]["input_ids"].shape[1] for i in rows) + R) for rows, R in parts)

    in_order = [(rows, int(mask[rows].sum(1).max())) for rows in index.split(8)]
    assert padded(parts) < 0.8 * padded(in_order)


# ------------------------------------------------------------------------------------------ the assembly


def equation_6(policy, rollout):
    """The total loss of a whole rollout, term by term."""
    args = policy.args
    newlogprobs, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    pg_loss = policy_loss(newlogprobs, rollout.logprobs, rollout.advantages, rollout.mask, args.clip_coef)
    kl = kl_base(newlogprobs, rollout.baselogprobs, rollout.mask)
    return pg_loss + args.kl_coef * kl + args.vf_coef * value_loss(values, rollout.returns)


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_an_update_steps_along_equation_6(max_grad_norm, model_folder, monkeypatch):
    """One minibatch of everything: each of the two epochs' gradients is Eq. 6's, clipped per group."""
    policy = make_policy(model_folder(), minibatch_size=6, micro_batch_size=6, max_grad_norm=max_grad_norm)
    rollout = make_rollout(policy)
    expected = gradients(policy, equation_6(policy, rollout))
    optimizer, steps = optimizer_of(policy, lr=0.0), []
    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (steps.append(1), step()))

    vldac.update(policy, optimizer, rollout, policy.args, value_only=False)

    assert len(steps) == policy.args.update_epochs == 2
    for group, gradient in zip(optimizer.param_groups, expected, strict=True):
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        scale = min(1.0, max_grad_norm / norm.item())
        found = [p.grad for p in group["params"]]
        torch.testing.assert_close(found, [g * scale for g in gradient], atol=1e-6, rtol=1e-3)


class Corridor(gym.Env):
    """A world of tests: walk right to the end. Every step pays by its place, the time-out -3."""

    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (28, 28, 3), np.uint8), text=AnyText())
    action_space, actions, limit = AnyText(), ["left", "right"], 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.taken = int(self.np_random.integers(3)), 0
        return self.observe()

    def observe(self):
        image = np.full((28, 28, 3), 40 * self.place, np.uint8)
        left = self.limit - self.taken
        info = {"task": "walk", "actions": self.actions, "success": self.place == 4, "left": left}
        return {"image": image, "text": f"place {self.place}"}, info

    def step(self, action):
        self.taken += 1
        if action in self.actions:
            self.place = max(0, self.place + (1 if action == "right" else -1))
        observation, info = self.observe()
        truncated = self.taken == self.limit
        reward = self.place + (0.5 if action == "" else 0) - (3 if truncated else 0)
        return observation, float(reward), info["success"], truncated, info


def scripted_responses(policy, monkeypatch):
    """Make `policy.sample` give scripted answers, some of which do not parse; returns the list of them."""
    rng, said = random.Random(0), []
    answers = ['{"action": "right"}', '{"thoughts": "hm", "action": "left"}', '{"action": "right"', "no"]

    def sample(prompts):
        texts = [rng.choice(answers) for _ in prompts]
        said.extend(texts)
        return [policy.processor.tokenizer(text).input_ids + policy.stop_ids[:1] for text in texts]

    monkeypatch.setattr(policy, "sample", sample)
    return said


def test_collection_and_advantages_are_those_of_a_replay(model_folder, monkeypatch):
    """Three rollouts in a row, computed again in plain loops, step by step, from seeds and answers alone."""
    T, N, gamma, lam = 7, 3, 0.9, 0.6
    policy = make_policy(
        model_folder(), env="test_vldac:Corridor", num_envs=N, num_steps=T, gamma=gamma, gae_lambda=lam,
        num_images=2, max_image_tokens=16, max_episode_steps=5,
    )  # fmt: skip
    agents = [vldac.Agent(policy.args, n) for n in range(N)]
    for agent in agents:
        agent.next_episode()
    said = scripted_responses(policy, monkeypatch)
    worlds, episodes, histories = [Corridor() for _ in range(N)], [0] * N, [None] * N

    def begin(n):
        observation, info = worlds[n].reset(seed=vldac.episode_seed(policy.args.seed, n, episodes[n]))
        episodes[n], histories[n] = episodes[n] + 1, ([observation], info, 0)

    def value(n):
        """V of what player n sees now."""
        seen, info, taken = histories[n]
        messages = vldac.build_prompt(seen[-2:], info["actions"], "walk", taken, 5 - taken)
        prompt = policy.encode((messages, [observation["image"] for observation in seen[-2:]]))
        return policy([prompt], *policy.pad([[]]))[1].item()

    for n in range(N):
        begin(n)
    for _ in range(3):
        said.clear()
        prompts, responses, rewards, dones, last, record = vldac.collect(
            policy, agents, policy.args, vldac.Timer()
        )
        rollout, _ = vldac.assess(policy, prompts, responses, rewards, dones, last, policy.args)
        R, D, V = np.zeros((T, N)), np.zeros((T, N)), np.zeros((T + 1, N))
        for t in range(T):
            for n in range(N):
                V[t, n] = value(n)
                text = said[t * N + n]
                action = "right" if "right" in text else "left" if "left" in text else ""
                observation, R[t, n], terminated, truncated, info = worlds[n].step(action)
                seen, _, taken = histories[n]
                histories[n] = [*seen, observation], info, taken + 1
                D[t, n] = terminated or truncated
                if D[t, n]:
                    begin(n)
        V[T] = [value(n) for n in range(N)]
        assert rewards.tolist() == R.tolist() and dones.tolist() == D.tolist() and 0 < D.sum() < T * N
        R, V, D = map(torch.tensor, (R, V, D))
        A = gae_by_definition(R, V[:T], V[T], D, gamma, lam)
        normalised = (A - A.mean()) / (A.std() + 1e-8)
        torch.testing.assert_close(rollout.advantages, normalised.flatten().float(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rollout.returns, (A + V[:T]).flatten().float(), atol=1e-4, rtol=1e-4)


def test_sampling_is_in_evaluation_mode(model_folder):
    """generate() gives other tokens in training mode with gradient checkpointing, and says nothing."""
    plain, checkpointed = (make_policy(model_folder(), gradient_checkpointing=c) for c in (False, True))
    prompts = [plain.encode(prompt) for prompt in some_prompts()]
    samples = []
    for policy in (plain, checkpointed):
        policy.train()
        torch.manual_seed(0)
        samples.append(policy.sample(prompts))
    assert samples[0] == samples[1]


# ------------------------------------------------------------------------- what VL-DAC is compared with


@pytest.mark.parametrize("thought_coef", [0.0, 0.3, 1.0])
def test_rl4vlm_equals_the_loop(thought_coef):
    """exp(lambda * thought + action) per step, clipped once; tokens under the padding may be NaN."""
    new, old, advantages, mask = random_tokens(6, 5)
    weights = mask.float()
    weights[:, :2] *= thought_coef
    total = 0.0
    for b in range(6):
        logratio = sum(weights[b, i].item() * (new[b, i] - old[b, i]).item() for i in range(5))
        ratio, advantage = math.exp(logratio), advantages[b].item()
        total -= min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage) / 6
    new = new.detach().masked_fill(mask == 0, math.nan)
    loss = vldac.rl4vlm_loss(new, old, advantages, weights, 0.1)
    assert loss.item() == pytest.approx(total, abs=1e-6)


def test_a_response_of_one_token_makes_step_and_token_level_equal():
    new, old, advantages, mask = random_tokens(7, 1)
    assert vldac.rl4vlm_loss(new, old, advantages, mask, 0.1).equal(
        policy_loss(new, old, advantages, mask, 0.1)
    )


TALK = '{"thoughts": "the box is ahead", '


@pytest.mark.parametrize(
    "text, thought",
    [
        (TALK + '"action": "move"}', TALK),
        (TALK + '"action": "stay", "action" : "move"}', TALK + '"action": "stay", '),  # the last key counts
        (TALK + '"act": "move"}', TALK + '"act": "move"}'),  # no key: all is thought
        ('"action": "move"', ""),
        ('{"thoughts": "\u65e5\u672c is ahead", "action": 1}', '{"thoughts": "\u65e5\u672c is ahead", '),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_thought_ends_where_the_action_s_key_begins(family, text, thought, model_folder):
    policy = make_policy(model_folder(family), thought_coef=0.25)
    tokenizer = policy.processor.tokenizer
    rest = tokenizer(text[len(thought) :], add_special_tokens=False).input_ids
    ids = tokenizer(thought, add_special_tokens=False).input_ids
    responses = [ids + rest + policy.stop_ids[:1], rest + [9]]
    assert policy.decode(responses[0]) == text
    weights = vldac.thought_weights(policy, responses, policy.pad(responses)[1])
    split = len(ids) if rest else len(responses[0])
    assert weights[0].tolist() == [0.25] * split + [1.0] * (len(responses[0]) - split)
    assert (weights[1, len(rest) + 1 :] == 0).all()  # padding


def test_a_token_in_which_the_key_begins_belongs_to_the_action():
    pieces = ['{"thoughts": "x', '", "act', 'ion": "go"}']
    policy = types.SimpleNamespace(args=types.SimpleNamespace(thought_coef=0.5))
    policy.decode = lambda ids: "".join(pieces[i] for i in ids)
    assert vldac.thought_weights(policy, [[0, 1, 2]], torch.ones(1, 3)).tolist() == [[0.5, 1.0, 1.0]]


def test_with_lambda_one_no_split_matters(model_folder):
    policy = make_policy(model_folder(), thought_coef=1.0)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert vldac.thought_weights(policy, [[9, 10, 11], [12]], mask).equal(mask.float())


def test_leave_one_out_is_the_distance_from_the_others_mean():
    returns = torch.tensor([[1.0, 4.0, 7.0], [2.0, 2.0, 2.0]])
    assert vldac.leave_one_out(returns).tolist() == [[1 - 5.5, 4 - 4, 7 - 2.5], [0, 0, 0]]


def test_loop_takes_the_mean_over_an_episode_s_tokens_and_drops_groups_without_signal(model_folder):
    """Two groups of two; the first has equal returns. A whole batch gives LOOP's objective exactly."""
    policy = make_policy(model_folder(), group_size=2, gamma=0.5)
    rewards = [[0, 1], [0, 1], [1], [0, 0, 4]]  # returns 0.5, 0.5, 1, 1
    prompt = policy.encode(*some_prompts([1]))
    responses = [[9 + i] * (1 + i % 3) for i in range(8)]
    rollout, stats = vldac.assess_groups(policy, [prompt] * 8, responses, rewards, policy.args)
    assert rollout is None and stats["advantage_std"] == 0

    rewards[3] = [0, 0, 8]  # 2
    rollout, stats = vldac.assess_groups(policy, [prompt] * 8, responses, rewards, policy.args)
    kept = responses[4:]  # a step of the third episode, three of the fourth
    assert [t[m == 1].tolist() for t, m in zip(rollout.tokens, rollout.mask, strict=True)] == kept
    assert rollout.advantages.tolist() == [-1, 1, 1, 1]
    new, old = (0.3 * torch.randn(2, *rollout.mask.shape)).unbind()
    total = 0.0
    for steps in ([0], [1, 2, 3]):
        losses = []
        for b in steps:
            A = rollout.advantages[b].item()
            for i in range(len(kept[b])):
                ratio = math.exp(new[b, i] - old[b, i])
                losses.append(-min(ratio * A, min(max(ratio, 1 / 1.1), 1.1) * A))
        total += sum(losses) / len(losses) / 4  # of four episodes, dropped ones included
    loss = vldac.loop_loss(new, old, rollout.advantages, rollout.weights, 0.1)
    assert loss.item() == pytest.approx(total, abs=1e-6)
    new = new.masked_fill(rollout.mask == 0, math.nan)
    assert vldac.loop_loss(new, old, rollout.advantages, rollout.weights, 0.1).equal(loss)


@pytest.mark.parametrize("stop_grad", [True, False])
def test_without_stop_gradient_the_value_loss_trains_lora_but_not_in_warm_up(stop_grad, model_folder):
    policy = make_policy(model_folder(), stop_grad=stop_grad, minibatch_size=6)
    rollout = make_rollout(policy)
    logprobs, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    adapters, head = gradients(policy, value_loss(values, rollout.returns))
    assert any(g is not None and g.any() for g in adapters) == (not stop_grad)
    assert any(g.any() for g in head)
    before = lora_state(policy)
    for value_only in (True, False):
        vldac.update(policy, optimizer_of(policy), rollout, policy.args, value_only)
        assert lora_state(policy).equal(before) == value_only


def test_without_kl_the_base_does_not_matter(model_folder):
    states = {}
    for kl_coef, shift in itertools.product((0.0, 0.05), (0.0, 1.0)):
        policy = make_policy(model_folder(), kl_coef=kl_coef, minibatch_size=3)
        rollout = make_rollout(policy)
        rollout.baselogprobs -= shift
        torch.manual_seed(0)
        vldac.update(policy, optimizer_of(policy), rollout, policy.args, value_only=False)
        states[kl_coef, shift] = lora_state(policy)
    assert states[0.0, 0.0].equal(states[0.0, 1.0])
    assert not states[0.05, 0.0].equal(states[0.05, 1.0])


# ------------------------------------------------------------------------------ the prompt and the parser


def answer(action):
    return json.dumps({"thoughts": "hm", "action": action})


@pytest.mark.parametrize(
    "text, action",
    [
        (answer("turn left"), "turn left"),
        (answer(" TURN Left\n"), "turn left"),
        (
            'Sure: {"action": "turn left"} or rather {"action": "turn right"}',
            "turn right",
        ),  # the last one counts
        ('{"action": "turn left", "action" : 7}', None),  # also if it is no action
        ('{"action": ["turn left"]}', None),
        ('{"action": "turn left"', "turn left"),  # cut after the answer
        ('{"action": "turn lef', None),  # cut within
        ('{"thoughts": "line\nbreak", "action": "turn\\u0020left"}', "turn left"),
        ('{"thoughts": "say \\"action\\": \\"turn left\\" now"}', None),  # a key inside a string is text
        ("{'action': 'turn left'}", None),
        ("turn left", None),
        ("", None),
        (answer("__import__('os').system('true')"), None),
        (answer("\ud800"), None),
    ],
)
def test_parse_action(text, action):
    assert parse_action(text, ACTIONS) == action


def test_numbers_are_compared_as_text():
    actions = ["1", "10", "-", "+"]
    for text, action in {
        "10": "10",
        "1": "1",
        "1e1": None,
        "10.0": None,
        "-": None,
        "01": None,
        "1" * 5000: None,
    }.items():
        assert parse_action(f'{{"action": {text}}}', actions) == action


def test_case_decides_only_where_it_must():
    assert parse_action(answer("a"), ["A", "a"]) == "a"
    assert parse_action(answer("b"), ["B", "b "]) is None  # two would do, none is exact


def test_searches_only_where_they_are_offered():
    assert parse_action(answer("search[red shoes]"), ["search[...]", "click[back]"]) == "search[red shoes]"
    assert parse_action(answer("search[red shoes]"), ["click[back]"]) is None
    for words in ("", "x" * 101, "a]b", "a\x00b", "a\nb"):
        assert parse_action(answer(f"search[{words}]"), ["search[...]"]) is None


def test_the_parser_survives_hostile_text():
    """10,000 generated strings and 2 MB of each hostile shape: no exception, and only admissible actions."""
    rng = random.Random(0)
    parts = [
        '"action"',
        '"action":',
        *':{}[]"\\ \n\x00\ud800\u202eé',
        "\\u",
        "\\ud83d",
        '\\"',
        "turn left",
        "10",
        "-",
    ]
    parts += ["1e999", "NaN", "null", "true", "__import__('os')"]
    for _ in range(10_000):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(40)))
        assert parse_action(text, ["turn left", "10"]) in ("turn left", "10", None)
    for shape in [
        "[",
        "{",
        '"',
        "\\",
        '"action":',
        '"action": "',
        '"action": [',
        '{"action":',
        "9",
        " ",
        "-",
        '"action"',
        '\\"',
    ]:
        flood = shape * (2_000_000 // len(shape))
        for text in (
            flood,
            '{"action": ' + flood,
            '{"action": "' + flood,
            '"action"' + flood + ':"turn left"',
        ):
            assert parse_action(text, ["turn left"]) in ("turn left", None)


def test_the_prompt_shows_the_newest_frames_once_and_counts_actions(monkeypatch):
    class Counter(envs.World):
        task, actions = "count", ("go",)

        def _reset(self):
            pass

        def _step(self, action):
            return 0.0, False

        def _frame(self):
            return np.full((8, 8, 3), self.taken, np.uint8)

        def _text(self):
            return f"state {self.taken}"

    monkeypatch.setattr(envs, "make_env", lambda *_, **__: Counter((8, 8), 10, 0.0, helpers=False))
    agent = vldac.Agent(Args(num_images=4))
    agent.reset(0)
    for t in range(7):
        messages, frames = agent.prompt()
        assert [int(frame[0, 0, 0]) for frame in frames] == list(range(max(0, t - 3), t + 1))
        (turn,) = messages
        assert [part["type"] for part in turn["content"]] == ["image"] * len(frames) + ["text"]
        text = turn["content"][-1]["text"]
        assert f"Actions taken: {t}. Actions left: {10 - t}." in text and re.findall(r"state (\d)", text) == [
            str(t)
        ]
        agent.step("go" if t % 2 else None)


# --------------------------------------------------------------------------------------------- the worlds

try:
    envs.load_miniworld()
    NO_OPENGL = ""
except envs.UserError as error:
    NO_OPENGL = str(error)
needs_opengl = pytest.mark.skipif(bool(NO_OPENGL), reason=NO_OPENGL)
MINIWORLD = [pytest.param(name, marks=needs_opengl) for name in envs.MINIWORLD]
WORLDS = [*MINIWORLD, *envs.CARDS]


def play(env, seed, policy, limit=10_000):
    """One episode; returns its records (image bytes, text, reward, terminated, truncated, info)."""
    observation, info = env.reset(seed=seed)
    records = [(observation["image"].tobytes(), observation["text"], 0.0, False, False, info)]
    for _ in range(limit):
        observation, *rest = env.step(policy(records[-1][-1]))
        records.append((observation["image"].tobytes(), observation["text"], *rest))
        if rest[1] or rest[2]:
            return records
    raise AssertionError("the episode does not end")


def randomly(seed):
    rng = random.Random(seed)
    return lambda info: rng.choice(info["actions"])


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.filterwarnings("ignore")
def test_check_env(name):
    env = envs.make_env(name)
    check_env(env, skip_close_check=True)
    observation, info = env.reset(seed=0)
    assert observation["image"].dtype == np.uint8 and observation["image"] is not env.step("")[0]["image"]
    assert {"task", "actions", "success", "left", "caption", "hint"} <= info.keys() and info["hint"] in info[
        "actions"
    ]
    assert not {"caption", "hint"} & envs.make_env(name, helpers=False).reset(seed=0)[1].keys()


def test_any_text_is_an_action():
    space = envs.AnyText(10)
    assert (
        "" in space
        and "a b\n" in space
        and "x" * 11 not in space
        and 3 not in space
        and space.sample() in space
    )


@pytest.mark.parametrize("name", WORLDS)
def test_same_seed_and_actions_same_episode(name):
    """Bit for bit, whatever was played before and whatever is played in between in other worlds."""
    env, twin = envs.make_env(name), envs.make_env(name)
    others = [
        envs.make_env(n) for n in ([*envs.MINIWORLD] if not NO_OPENGL else []) + [*envs.CARDS] if n != name
    ]
    alone = play(env, 5, randomly(1))
    play(twin, 6, randomly(2))
    for other in others:
        other.reset(seed=9)

    choose = randomly(1)

    def interleaved(info):
        for other in others:
            other.step(other._info()["actions"][0])
        return choose(info)

    assert play(twin, 5, interleaved) == alone
    assert play(env, 7, randomly(1)) != alone


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("action", ["", "no such thing", "\x00", "1e9", "TURN LEFT"])
def test_what_is_not_admissible_costs_a_step_and_ends_in_time(name, action):
    env = envs.make_env(name, invalid_reward=-0.25)
    first, _ = env.reset(seed=3)
    left = env._info()["left"]
    records = play(env, 3, lambda info: action)
    assert len(records) == left + 1 and records[-1][4] and not records[-1][5]["success"]
    assert all(r[2] == -0.25 for r in records[1:-1])
    if name not in ("EZPoints", "Points24"):  # their formula shows the blank
        assert all(r[0] == records[0][0] for r in records)


@pytest.mark.parametrize(
    "name, low, high", [("Hallway", 6, 14), ("OneRoom", 2, 8), ("FourRooms", 2, 8), ("WallGap", 0, 2)]
)
@needs_opengl
def test_a_random_player_does_as_well_as_was_measured_elsewhere(name, low, high):
    """Success over four actions in 128 steps; low, high: the 95 % interval, in percent, of 200 episodes."""
    env = envs.make_env(name, helpers=False)
    n = 60
    k = sum(play(env, seed, randomly(seed))[-1][-1]["success"] for seed in range(n))
    z2 = 1.96**2
    middle, half = (k + z2 / 2) / (n + z2), math.sqrt(z2) * math.sqrt(k * (n - k) / n + z2 / 4) / (n + z2)
    assert middle - half <= high / 100 and middle + half >= low / 100


@pytest.mark.parametrize("name", ["Hallway", "OneRoom"])
@needs_opengl
def test_the_hints_solve_the_open_rooms(name):
    env = envs.make_env(name)
    assert (
        np.mean([play(env, seed, lambda info: info["hint"])[-1][-1]["success"] for seed in range(100)])
        >= 0.99
    )


@needs_opengl
def test_miniworld_rewards_and_ends():
    env = envs.make_env("OneRoom", max_episode_steps=20)
    lost = play(env, 0, lambda info: "turn left")
    assert len(lost) == 21 and [r[2] for r in lost[1:]] == [0.0] * 19 + [-1.0]
    assert lost[-1][3:5] == (False, True) and [r[-1]["left"] for r in lost] == list(range(20, -1, -1))
    won = play(envs.make_env("OneRoom"), 1, lambda info: info["hint"])
    steps = len(won) - 1
    assert won[-1][2] == pytest.approx(1 - 0.2 * steps / 180) and won[-1][3:5] == (True, False)
    last = play(envs.make_env("OneRoom", max_episode_steps=steps), 1, lambda info: info["hint"])
    assert last[-1][3:5] == (True, True) and last[-1][-1]["success"] and last[-1][2] == won[-1][2]


@needs_opengl
def test_an_inadmissible_action_counts_in_miniworld_s_reward():
    env = envs.make_env("OneRoom")
    actions = iter(["", "pickup", 4])
    records = play(env, 1, lambda info: next(actions, info["hint"]))
    assert records[-1][2] == pytest.approx(1 - 0.2 * (len(records) - 1) / 180)


@needs_opengl
def test_every_red_box_world_can_be_made():
    for name in envs.RED_BOX:
        env = envs.make_env(f"MiniWorld-{name}-v0")
        _, info = env.reset(seed=0)
        assert info["left"] == {"OneRoomS6": 100, "OneRoomS6Fast": 50}.get(name, info["left"]) <= 128


@pytest.mark.parametrize(
    "name, words",
    [("MiniWorld-PickupObjects-v0", "red box"), ("OneRom", "did you mean OneRoom"), ("x", "NumberLine"),
     ("no_such_module:f", "no_such_module"), ("envs:no_such_function", "no_such_function")],
)  # fmt: skip
def test_names_that_are_refused(name, words):
    with pytest.raises(envs.UserError, match=words):
        envs.make_env(name)


@pytest.mark.parametrize("library", ["GL", "GLU", "EGL"])
def test_without_opengl_the_message_names_the_packages(library):
    """As on a Linux machine without them: pyglet's loader does not find one of its libraries."""
    pytest.importorskip("pyglet")
    code = f"""
import sys, pyglet.lib, vldac
load = pyglet.lib.loader.load_library
def missing(*names, **options):
    if {library!r} in names:
        raise ImportError('Library "{library}" not found.')
    return load(*names, **options)
pyglet.lib.load_library = pyglet.lib.loader.load_library = missing
vldac.main(["--env", "OneRoom", "--device", "cpu"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "apt-get install" in line and "--env NumberLine" in line


def test_importing_the_worlds_imports_no_torch_and_no_simulator():
    code = "import envs, sys; envs.make_env('NumberLine').reset(seed=0); "
    code += "print([m for m in ('torch', 'miniworld', 'pyglet') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"


def test_number_line_rules():
    env = envs.make_env("NumberLine")
    starts = set()
    for seed in range(300):
        env.reset(seed=seed)
        starts.add((env.current, env.target))
    assert len(starts) == 30 and all(a != b for a, b in starts)
    env.current, env.target = 0, 2
    assert env.step("-")[1:3] == (-1.0, False) and env.current == 0  # blocked at the edge
    assert env.step("+")[1:3] == (0.0, False)
    assert env.step("-")[1] == -1.0
    assert env.step("up")[1] == -1.0 and env.current == 0  # anything but a symbol of the game
    env.step("+")
    *_, reward, terminated, truncated, info = env.step("+")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    records = play(env, 0, lambda info: "-" if info["hint"] == "+" else "+")  # always away from the target
    assert len(records) == 11 and records[-1][4]


def formula_game(name, ranks, symbols):
    """Rewards of playing symbols on a table with these ranks."""
    env = envs.make_env(name)
    env.reset(seed=0)
    env.ranks = ranks
    env._deal()
    results = [env.step(symbol) for symbol in symbols]
    return env, [r[1] for r in results], results[-1]


def test_ez_points_rules():
    _, rewards, last = formula_game("EZPoints", [12, 2], ["10", "+", "2", "="])
    assert rewards == [0, 0, 0, 10] and last[2] and last[4]["success"]
    _, rewards, last = formula_game("EZPoints", [12, 2], ["10", "="])
    assert rewards == [0, -1] and last[2] and not last[4]["success"]  # 10 is not 12
    env, rewards, _ = formula_game("EZPoints", [12, 2], ["10", "10", "3", "what", "+", "2", "="])
    assert rewards[:4] == [0, -1, -1, -1] and env.formula == [
        "10",
        " ",
        " ",
        " ",
        "+",
        "2",
    ]  # used up, not there, no symbol
    assert rewards[6] == -1  # the seventh action ends the game, whatever was written
    _, _, last = formula_game("EZPoints", [12, 2], ["2"] * 7)
    assert last[1] == -1 and last[2:4] == (False, True)
    env, _, last = formula_game("EZPoints", [6, 6], ["6", "+"])
    assert last[0]["text"] == "Formula: 6 +" and last[4]["caption"] == "the cards are 6, 6; formula: 6 +"
    assert formula_game("EZPoints", [6, 6], ["6", "+", "6", "="])[1][-1] == 10


def test_every_ez_points_deal_is_solved_by_its_hints():
    env, pairs = envs.make_env("EZPoints"), set()
    for seed in range(200):
        records = play(env, seed, lambda info: info["hint"])
        assert records[-1][5]["success"] and len(records) == 5
        pairs.add(tuple(sorted(env.numbers)))
    assert pairs == {(2, 10), (5, 7), (3, 9), (4, 8), (3, 4), (2, 6), (6, 6)}


@pytest.mark.parametrize("name, ranks, cheat", [
    ("Points24", [2, 4, 1, 1], ["2", "4", "+", "1", "-", "1"]),  # digits glued to 24
    ("Points24", [5, 2, 1, 1], ["5", "*", "*", "2", "-", "1"]),  # **
    ("Points24", [10, 4, 1, 1], ["10", "/", "/", "4"]),  # //
    ("EZPoints", [6, 6], ["-", "6"]),  # a sign
])  # fmt: skip
def test_the_loopholes_of_python_s_evaluator_are_closed(name, ranks, cheat):
    assert envs.evaluate(cheat) is None
    _, rewards, last = formula_game(name, ranks, [*cheat, "="])
    assert rewards[-1] == -1 and last[2] and not last[4]["success"]


def test_arithmetic_is_exact():
    eight_thirds = ["8", "/", "(", "3", "-", "8", "/", "3", ")"]  # 23.999999999999993 in floating point
    assert envs.evaluate(eight_thirds) == 24
    assert formula_game("Points24", [8, 3, 8, 3], [*eight_thirds, "="])[1][-1] == 10
    for wrong in (
        [],
        ["("],
        [")"],
        ["1", "+"],
        ["(", "1"],
        ["1", ")"],
        ["(", ")"],
        ["1", "(", "2", ")"],
        ["1", "/", "0"],
    ):
        assert envs.evaluate(wrong) is None


def test_points24_rules():
    env, rewards, last = formula_game("Points24", [1, 11, 12, 13], ["1", "10", "10", "10", "10"])
    assert env.numbers == [1, 10, 10, 10] and rewards == [0, 0, 0, 0, -1] and env.formula[-1] == " "
    records = play(env, 0, lambda info: "(")
    assert len(records) == 23 and records[-1][2] == -1 and records[-1][4]
    solved = sum(play(env, seed, lambda info: info["hint"])[-1][5]["success"] for seed in range(100))
    assert 60 <= solved <= 85  # about 73 % of the deals have a solution


def test_blackjack_rules():
    env = envs.make_env("Blackjack")
    env.reset(seed=0)
    ace, ten, five = (1, "A", "C"), (10, "K", "H"), (5, "5", "S")
    assert [
        env.score(hand) for hand in ([ace, ten], [ace, ace], [ten, five], [ten, ten, five], [ace, ten, five])
    ] == [21, 12, 15, 0, 16]
    for player, dealer, reward in [
        ([ten, ten], [ten, (8, "8", "C")], 1),
        ([ten, five], [ten, ten], -1),
        ([ten, ten], [ten, ten], 0),
    ]:
        env.reset(seed=1)
        env.player, env.dealer = player, dealer
        _, paid, terminated, _, info = env.step("stand")
        assert (paid, terminated, info["success"]) == (reward, True, reward == 1)
    env.reset(seed=2)
    env.player = [ten, ten]
    env._card = lambda: five
    assert env.step("hit")[1:3] == (-1.0, True)
    env.reset(seed=2)
    env.player, env.dealer = [ten, five], [ten, five]
    env._card = lambda: ten  # the dealer must draw below 17, and busts
    assert env.step("stand")[1:3] == (1.0, True)
    wins = np.mean(
        [play(envs.make_env("Blackjack"), s, lambda info: info["hint"])[-1][5]["success"] for s in range(400)]
    )
    assert 0.36 <= wins <= 0.50  # basic strategy: 0.43


def test_the_hidden_card_of_the_dealer_is_not_shown():
    env = envs.make_env("Blackjack")
    first, info = env.reset(seed=4)
    env.dealer[1] = (1, "A", "D")
    assert (env._frame() == first["image"]).all() and env.caption() == info["caption"]


# ------------------------------------------------------------------------------------- ALFWorld, for real

KITCHEN = {  # receptacle: what is in it at the start; the last two are opened first
    "CounterTop": ["Mug", "Apple"], "SinkBasin": [], "Shelf": [], "Fridge": ["Egg"], "Cabinet": ["Plate"],
}  # fmt: skip
GAMES = {  # task: (object, where it must be in the end, a way to get there)
    "pick_and_place_simple": ("Mug", "Shelf", []),
    "pick_clean_then_place_in_recep": ("Mug", "Shelf", ["go to sinkbasin 1", "clean mug 1 with sinkbasin 1"]),
    "pick_cool_then_place_in_recep": ("Apple", "Shelf", ["go to fridge 1", "cool apple 1 with fridge 1"]),
}


def thor_name(kind, number):
    """ALFRED's name of an object, as its PDDL spells it; the game shows 'mug 1'."""
    head, tail = ("Sink", "_bar_SinkBasin") if kind == "SinkBasin" else (kind, "")
    place = "_bar_".join(f"_plus_0{number}_dot_{part}" for part in ("00", "25", "50"))
    return f"{head}_bar_{place}{tail}"


def write_games(root):
    """ALFWorld games of three kinds in one small kitchen, from what the package ships, as its download lies.

    python test_vldac.py games FOLDER
    """
    import alfworld.gen.goal_library as library
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    things = list(itertools.chain(*KITCHEN.values()))
    where = {kind: f"loc_bar_{number}_bar_1_bar_0_bar_30" for number, kind in enumerate(KITCHEN)}
    names = {kind: thor_name(kind, number) for number, kind in enumerate([*KITCHEN, *things], 1)}
    objects = ["agent1 - agent", "loc_bar_9_bar_9_bar_0_bar_0 - location"]
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_9_bar_9_bar_0_bar_0)"]
    for kind, inside in KITCHEN.items():
        objects += [f"{kind}Type - rtype", f"{names[kind]} - receptacle", f"{where[kind]} - location"]
        facts += [
            f"(receptacleType {names[kind]} {kind}Type)",
            f"(receptacleAtLocation {names[kind]} {where[kind]})",
        ]
        facts += [f"(openable {names[kind]})"] * (kind in ("Fridge", "Cabinet"))
        facts += [f"(canContain {kind}Type {thing}Type)" for thing in things]
        for thing in inside:
            facts.append(f"(inReceptacle {names[thing]} {names[kind]})")
            facts.append(f"(objectAtLocation {names[thing]} {where[kind]})")
    for thing in things:
        objects += [f"{thing}Type - otype", f"{names[thing]} - object"]
        can = "pickupable cleanable heatable coolable".split()
        facts += [f"(objectType {names[thing]} {thing}Type)", *(f"({x} {names[thing]})" for x in can)]
    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    for split, (task, (thing, place, middle)) in itertools.product(("train", "valid_unseen"), GAMES.items()):
        goal = library.gdict[task]["pddl"].format(obj=thing, recep=place, toggle="", mrecep="")
        problem = f"(define (problem kitchen) (:domain alfred)\n(:objects {' '.join(objects)})\n"
        problem += f"(:init {' '.join(facts)})\n" + goal.replace("#", "-")
        words = library.gdict[task]["templates"][0].format(obj=thing.lower(), recep=place.lower())
        game = {
            "pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", words), "pddl_problem": problem,
            "solvable": True, "walkthrough": walkthrough(thing, place, middle),
        }  # fmt: skip
        parameters = dict(object_target=thing, parent_target=place, mrecep_target="", toggle_target="")
        trial = {"task_type": task, "pddl_params": parameters | {"object_sliced": False}}
        folder = Path(root) / "json_2.1.1" / split / f"{task}-{thing}-None-{place}-1" / "trial_1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "game.tw-pddl").write_text(json.dumps(game))
        (folder / "traj_data.json").write_text(json.dumps(trial))


def walkthrough(thing, place, middle):
    thing, place = f"{thing.lower()} 1", f"{place.lower()} 1"
    start = ["go to countertop 1", f"take {thing} from countertop 1"]
    return [*start, *middle, f"go to {place}", f"move {thing} to {place}"]


@pytest.fixture(scope="session")
def alfworld_games(tmp_path_factory):
    if sys.version_info >= (3, 13):
        pytest.skip("alfworld's games do not run on Python 3.13 and later")
    pytest.importorskip("alfworld", reason="the games need: pip install alfworld")
    folder = tmp_path_factory.mktemp("games")
    write_games(folder)
    return folder


@pytest.fixture
def alfworld_data(alfworld_games, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(alfworld_games))
    envs.load_alfworld.cache_clear()
    yield alfworld_games
    envs.load_alfworld.cache_clear()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_alfworld_s_tasks_are_done_by_admissible_commands(split, alfworld_data):
    """Every kind of task, met by seed; case and spaces of the answer do not matter."""
    env, done, argv = envs.make_env("ALFWorld", split=split), set(), list(sys.argv)
    check_env(env, skip_render_check=True)
    for seed in range(40):
        _, info = env.reset(seed=seed)
        kind = next(
            k
            for k in GAMES
            if {"clean", "cool"} & set(info["task"].split()) == {"clean", "cool"} & set(k.split("_"))
        )
        if kind in done:
            continue
        done.add(kind)
        commands = walkthrough(*GAMES[kind])
        for t, command in enumerate(commands, 1):
            answer = json.dumps({"action": f" {command.upper()}"})
            action = parse_action(answer, info["actions"])
            assert action == command
            observation, reward, terminated, truncated, info = env.step(action)
            last = t == len(commands)
            assert (reward, terminated, info["success"]) == (float(last), last, last) and not truncated
            assert info["left"] == 50 - t and info["caption"]
    assert done == GAMES.keys() and sys.argv == argv


def test_alfworld_repeats_itself(alfworld_data):
    one, other = (
        envs.make_env("ALFWorld", max_episode_steps=12),
        envs.make_env("ALFWorld", max_episode_steps=12),
    )
    for seed in (3, 2**30 + 7, 3):
        choose = lambda info: random.Random(len(info["actions"]) * 31 + info["left"]).choice(info["actions"])  # noqa: E731
        assert play(one, seed, choose) == play(other, seed, choose)


def test_alfworld_s_limits(alfworld_data):
    env = envs.make_env("ALFWorld", max_episode_steps=3)
    observation, info = env.reset(seed=0)
    assert "Your task" not in observation["text"] and "countertop 1" in observation["text"]
    assert info["task"] and "Fly" not in info["actions"]
    again, reward, terminated, truncated, after = env.step("fly to the moon")
    assert (reward, terminated, truncated) == (-1.0, False, False)
    assert after["actions"] == info["actions"] and again["text"] == observation["text"]
    assert env.step("look")[1:4] == (0.0, False, False)
    assert env.step("inventory")[1:4] == (0.0, False, True)
    assert (env.reset(seed=1)[0]["image"] < 128).any()  # the text is on the frame


@pytest.mark.parametrize("make", [lambda folder: folder.mkdir(), lambda folder: None])
def test_alfworld_without_games_says_how_to_get_them(make, alfworld_data, tmp_path, monkeypatch, capsys):
    make(tmp_path / "json_2.1.1")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    status, line = stopped(["--env", "ALFWorld", "--model", "tiny", "--runs_dir", tmp_path / "runs"], capsys)
    assert status == 2 and "alfworld-download" in line


@pytest.mark.parametrize("name", ["alfworld", "alfworld.agents", "playwright.sync_api"])
def test_a_missing_package_is_named(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    envs.load_alfworld.cache_clear()
    env = "WebShop" if name.startswith("playwright") else "ALFWorld"
    status, line = stopped(["--env", env, "--model", "tiny", "--runs_dir", tmp_path / "runs"], capsys)
    assert status == 2 and ("playwright install" if env == "WebShop" else "pip install alfworld") in line
    envs.load_alfworld.cache_clear()


class StandInForThor:
    """What the adapter uses of alfworld's AlfredThorEnv: tasks by chance, frames in blue, green and red."""

    num_games = 1

    def __init__(self, config, train_eval):
        self.steps, self.sent = 0, []

    def init_env(self, batch_size):
        return self

    def seed(self, number):
        pass

    def infos(self, won=False):
        names = {"admissible_commands": [["look", "move mug 1 to shelf 1"]], "won": [won]}
        return names | {"goal_condition_success_rate": [0.5 * len(self.sent)]}

    def reset(self):
        self.sent, sys.argv = [], ["translate.py"]
        self.number = random.randrange(1000)
        return [f"You see {self.number} things. Your task is to: put a mug in shelf."], self.infos()

    def step(self, commands):
        self.sent += commands
        return ["You move."], None, [False], self.infos(won=commands == ["put mug 1 in/on shelf 1"])

    def get_frames(self):
        return np.full((1, 300, 300, 3), (9, 5, 1), np.uint8)


def test_thor_s_frames_commands_and_rewards(alfworld_data, monkeypatch):
    monkeypatch.setattr("alfworld.agents.environment.get_environment", lambda kind: StandInForThor)
    env, argv = envs.make_env("ALFWorldThor"), list(sys.argv)
    random.seed(0)
    state = random.getstate()
    texts = [env.reset(seed=seed)[0]["text"] for seed in (5, 6, 5)]
    assert texts[0] == texts[2] != texts[1] and random.getstate() == state and sys.argv == argv
    observation, reward, *_ = env.step("look")
    assert observation["image"].shape == (300, 300, 3) and (observation["image"] == (1, 5, 9)).all()
    assert reward == 0.5
    assert env.step("move mug 1")[1] == -0.5  # inadmissible: the half that is reached, less one
    _, reward, terminated, *_ = env.step("move mug 1 to shelf 1")
    assert (reward, terminated) == (2.0, True) and env.env.sent == ["look", "put mug 1 in/on shelf 1"]


# --------------------------------------------------------------------- WebShop, a real browser and its pages

CATALOGUE = {  # asin: (name, price, options)
    "B0RED": ("Red mug", 8.0, {"size": ["small", "large"], "colour": ["red", "dark red"]}),
    "B0BLUE": ("Blue mug", 9.5, {}),
}
SHOPPING = [("a red mug, large", "B0RED", {"size": "large"}), ("a blue mug", "B0BLUE", {})] * 4


class Shop(http.server.ThreadingHTTPServer):
    """A shop with WebShop's addresses and the marks of its pages that the adapter goes by.

    python test_vldac.py shop       serves it on port 3000
    """

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), ShopPages)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers, self.never, self.together, self.sentences = threading.Event(), None, None, 3


class ShopPages(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, body, status=200, **headers):
        body = body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        words = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        if "search_query" in words:
            keywords = quote(str(words["search_query"][0].lower().split(" ")))
            return self.send("", 302, Location=f"/search_results/{self.path[1:]}/{keywords}/1")
        self.do_GET()

    def do_GET(self):
        kind, *rest = unquote(self.path)[1:].split("/")
        page = {"search_results": self.results, "item_page": self.item, "item_sub_page": self.details}
        page = page.get(kind, self.done if kind == "done" else self.search)
        shop = self.server
        if shop.never and shop.never in kind:
            shop.answers.wait()
        if shop.together and kind == "search_results":
            shop.together.wait(20)  # until as many ask at the same time
        try:
            self.send(page(kind, *rest))
        except (IndexError, ValueError):
            self.send("Internal Server Error", 500)

    def goal(self, session):
        return SHOPPING[int(session.removeprefix("fixed_"))]

    def frame(self, session, inner):
        back = self.button(f"/{session}", "Back to Search")
        words = f'<div id="instruction-text"><h4>Instruction:<br>{self.goal(session)[0]}</h4></div>'
        script = '<script src="https://scripts.invalid/jquery.js"></script>'
        return f"<html><head>{script}</head><body>{words}{back}{inner}"

    def button(self, address, name):
        return f'<form method="post" action="{quote(address)}"><button class="btn">{name}</button></form>'

    def search(self, session):
        words = f'<div id="instruction-text"><h4>Instruction: <br>{self.goal(session)[0]}</h4></div>'
        field = '<input id="search_input" name="search_query" required>'
        button = '<button class="btn btn-success" type="submit">Search</button>'
        return f'<body><h2>WebShop</h2>{words}<form method="post" action="/{session}">{field}{button}</form>'

    def results(self, _, session, keywords, page):
        words = ast.literal_eval(keywords)
        found = [asin for asin, (name, *_) in CATALOGUE.items() if set(name.lower().split()) & set(words)]
        links = ""
        for asin in found:
            address = quote(f"/item_page/{session}/{asin}/{keywords}/{page}/" + "{}")
            links += (
                f'<h4><a class="product-link" href="{address}">{asin}</a></h4><h4>{CATALOGUE[asin][0]}</h4>'
            )
        return self.frame(session, f"<h3>Page {page} (Total results: {len(found)})</h3>{links}")

    def item(self, _, session, asin, keywords, page, chosen):
        (name, price, options), chosen = CATALOGUE[asin], ast.literal_eval(chosen)
        inner, rest = (
            self.button(f"/search_results/{session}/{keywords}/{page}", "&lt; Prev"),
            f"{keywords}/{page}",
        )
        for option, values in options.items():
            for value in values:
                address = quote(f"/item_page/{session}/{asin}/{rest}/{chosen | {option: value}}")
                inner += f'<input type="radio" name="{option}" value="{value}" data-url="{address}">'
                inner += f"<label>{value}</label>"
        inner += f"<h2>{name}</h2><h4>Price: ${price}</h4>"
        inner += self.button(f"/item_sub_page/{session}/{asin}/{rest}/Description/{chosen}", "Description")
        return self.frame(session, inner + self.button(f"/done/{session}/{asin}/{chosen}", "Buy Now"))

    def details(self, _, session, asin, keywords, page, __, chosen):
        back = self.button(f"/item_page/{session}/{asin}/{keywords}/{page}/{chosen}", "&lt; Prev")
        return self.frame(
            session, back + '<p class="product-info">' + "It holds tea. " * self.server.sentences + "</p>"
        )

    def done(self, _, session, asin, chosen):
        _, right, wanted = self.goal(session)
        bought = ast.literal_eval(chosen)
        reward = (asin == right) * (1 + all(bought.get(k) == v for k, v in wanted.items())) / 2
        return f'<h1>Thank you</h1><h3 id="reward">Your score (min 0.0, max 1.0)<pre>{reward}</pre></h3>'


@functools.cache
def no_browser():
    """Why no browser can be driven here, "" if one can."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return "the browser tests need: pip install playwright"
    path = os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
    with sync_playwright() as playwright:
        try:
            playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]).close()
        except Error as error:
            return f"the browser tests need Chromium: {str(error).splitlines()[0]}"
    return ""


@pytest.fixture
def shop(monkeypatch):
    if reason := no_browser():
        pytest.skip(reason)
    server = Shop()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WEBSHOP_URL", server.url)
    yield server
    server.answers.set()
    server.shutdown()
    server.server_close()


def buy(env, info, words):
    """Step through "search[...]" or click names; the last step's result."""
    for word in words:
        answer = json.dumps({"thoughts": "", "action": word if "[" in word else f"click[{word}]"})
        action = parse_action(answer, info["actions"])
        assert action is not None, (word, info["actions"])
        *result, info = env.step(action)
    return *result, info


def test_shopping_in_a_real_browser(shop):
    env = envs.make_env("WebShop")
    check_env(env, skip_render_check=True)
    purchases = [
        ("a red mug, large", ["search[Red Mug]", "B0RED", "large", "buy now"], 1.0),
        ("a red mug, large", ["search[mug]", "b0red", "Dark Red", "description", "< prev", "buy now"], 0.5),
        ("a red mug, large", ["search[mug]", "b0blue", "< prev", "b0blue", "buy now"], 0.0),
        ("a blue mug", ["search[<r> no/thing]", "back to search", "search[blue]", "b0blue", "buy now"], 1.0),
    ]
    seeds = {env.reset(seed=seed)[1]["task"]: seed for seed in range(20)}
    for task, words, pays in purchases:
        observation, info = env.reset(seed=seeds[task])
        assert info["task"] == task and info["actions"] == ["search[...]"] and task in observation["text"]
        observation, reward, terminated, truncated, info = buy(env, info, words)
        assert (reward, terminated, truncated) == (pays, True, False) and info["success"] == (pays == 1)
        assert observation["image"].shape == (640, 640, 3) and "Thank you" in observation["text"]
    env.close()


def test_what_is_on_the_page_is_admissible_and_nothing_else(shop):
    shop.sentences = 400
    env = envs.make_env("WebShop", max_episode_steps=6)
    _, info = env.reset(seed=0)
    for action in ("", "click[buy now]", "search[...]", "search[]", "click[search]"):
        assert env.step(action)[1:4] == (0.0, False, False)
    assert env.step("search[mug]")[1:4] == (0.0, False, True)
    observation, info = env.reset(seed=0)
    *_, info = buy(env, info, ["search[mug]", "b0red"])
    assert info["actions"] == [
        "click[back to search]", "click[< prev]", "click[description]", "click[buy now]",
        "click[small]", "click[large]", "click[red]", "click[dark red]",
    ]  # fmt: skip
    before, *_ = env.step("click[large]")
    after, *_ = env.step("click[dark red]")
    assert before["text"].startswith("Chosen: large\n")
    assert after["text"].startswith("Chosen: large, dark red\n")
    assert (before["image"] != after["image"]).any()
    observation, *_ = env.step("click[description]")
    assert len(observation["text"]) < 4100 and observation["text"].endswith("more characters)")
    env.close()


def test_seeds_are_goals_of_a_split(shop):
    tasks = {}
    for split in ("train", "eval"):
        env = envs.make_env("WebShop", split=split)
        assert [env.reset(seed=seed)[1]["task"] for seed in (1, 2)] == [
            env.reset(seed=s)[1]["task"] for s in (1, 2)
        ]
        tasks[split] = set(env.goals)
        env.close()
    assert tasks["train"] | tasks["eval"] == set(range(len(SHOPPING))) and not tasks["train"] & tasks["eval"]


def test_browsers_work_side_by_side(shop):
    """The site answers a search only when two ask at once: one after the other would never end well."""
    args = Args(env="WebShop", max_episode_steps=9, env_timeout=60)
    agents = [vldac.Agent(args, index) for index in range(2)]
    for agent in agents:
        agent.reset(agent.index)
    shop.together = threading.Barrier(2)
    words = ["search[red mug]", "search[blue mug]"]
    for agent, action in zip(agents, words, strict=True):
        agent.start(action)
    results = [agent.step(action) for agent, action in zip(agents, words, strict=True)]
    assert results == [(0.0, False)] * 2
    assert [agent.info["actions"][-1] for agent in agents] == ["click[b0blue]"] * 2
    assert not shop.together.broken
    shop.together = None
    agents[0].start("click[b0red]"), agents[1].start("click[back to search]")
    assert [agent.step(a) for agent, a in zip(agents, ["click[b0red]", "click[back to search]"], strict=True)]
    assert "click[large]" in agents[0].info["actions"] and agents[1].info["actions"] == ["search[...]"]
    for agent in agents:
        agent.env.close()


@pytest.mark.parametrize("trouble", ["gone", "never"])
def test_a_shop_in_trouble(trouble, shop, monkeypatch):
    """The server ends, or a page never comes: a line with seed and actions."""
    monkeypatch.setattr(envs.WebShop, "patience", 1.0)
    agent = vldac.Agent(Args(env="WebShop", max_episode_steps=9))
    agent.reset(3)
    agent.step("search[mug]")
    if trouble == "gone":
        shop.shutdown(), shop.server_close()
    else:
        shop.never = "item_page"
    with pytest.raises(vldac.WorldError, match=r"env.reset\(seed=3\)"):
        agent.step("click[b0red]")
    agent.env.close()


def test_a_goal_that_the_site_no_longer_has(shop, monkeypatch):
    agent = vldac.Agent(Args(env="WebShop"))
    monkeypatch.setattr(f"{__name__}.SHOPPING", [])
    with pytest.raises(vldac.WorldError, match="the site answers 500"):
        agent.reset(4)
    agent.env.close()


def test_no_shop_and_a_broken_one(shop, monkeypatch, capsys, tmp_path):
    argv = ["--env", "WebShop", "--model", "tiny", "--runs_dir", tmp_path / "runs"]
    monkeypatch.setattr(f"{__name__}.SHOPPING", [])  # error 500 from the first page on
    status, line = stopped(argv, capsys)
    assert status == 2 and "answers 500" in line and "setup.sh" in line
    monkeypatch.setenv("WEBSHOP_URL", "http://127.0.0.1:9")
    status, line = stopped(argv, capsys)
    assert status == 2 and "no WebShop at http://127.0.0.1:9" in line and "flask --app" in line
    monkeypatch.undo()


def test_no_browser(shop, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "nowhere"))
    status, line = stopped(["--env", "WebShop", "--model", "tiny", "--runs_dir", tmp_path / "runs"], capsys)
    assert status == 2 and "playwright install" in line


# -------------------------------------------------------------------------------------------- a whole run


class Signal(envs.World):
    """A world of one-step episodes for tests: the text says which way is right."""

    task, actions = "obey", ("left", "right")

    def __init__(self):
        super().__init__((28, 28), 4, 0.0, helpers=False)

    def _reset(self):
        self.way = self.actions[int(self.np_random.integers(2))]

    def _step(self, action):
        self.success = action == self.way
        return float(self.success), True

    def _frame(self):
        return np.zeros((28, 28, 3), np.uint8)

    def _text(self):
        return f"Go {getattr(self, 'way', 'on')}!"


def test_a_long_list_of_actions_is_cut_and_says_so():
    env = Signal()
    env.actions = tuple(f"press {k}" for k in range(200))
    env._reset = lambda: None
    env._step = lambda action: (1.0, False)
    observation, info = env.reset(seed=0)
    assert info["actions"] == list(env.actions[:150])
    assert observation["text"].endswith("(50 more actions are not listed.)")
    assert [env.step(action)[1] for action in ("press 149", "press 150")] == [1.0, 0.0]


def run(tmp_path, *argv, name="run"):
    """A run through the command line; returns its folder and the rows of its log."""
    vldac.main([*argv, "--runs_dir", str(tmp_path), "--run_name", name, "--device", "cpu"])
    rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
    return tmp_path / name, rows


SMALL = "--num_envs 2 --num_steps 4 --total_timesteps 16 --minibatch_size 8 --max_new_tokens 6".split()
SMALL += "--value_hidden 16 --max_image_tokens 16".split()
CHARTS = """success_rate episodic_return episodic_length invalid_action_rate cut_share response_length
learning_rate env_steps_per_second"""
LOSSES = """policy_loss value_loss kl_old kl_base entropy approx_kl clipfrac explained_variance advantage_std
grad_norm_lora grad_norm_value ratio_first"""


@pytest.mark.parametrize("name", WORLDS)
def test_a_run_writes_what_it_says(name, tmp_path, model_folder):
    folder, rows = run(
        tmp_path,
        "--env",
        name,
        "--model",
        model_folder(),
        *SMALL,
        "--eval_episodes",
        "2",
        "--max_episode_steps",
        "3",
    )
    first, *updates, last = rows
    assert 0 <= first["eval/success_rate"] <= 1 and first["global_step"] == 0 and last["global_step"] == 16
    assert [row["global_step"] for row in updates] == [8, 16]
    assert all(row["losses/ratio_first"] < 1e-4 for row in updates)
    keys = {f"charts/{k}" for k in CHARTS.split()} | {f"losses/{k}" for k in LOSSES.split()}
    keys |= {f"time/{k}" for k in "env encode generate score update".split()}
    assert keys <= updates[0].keys()
    sample = updates[0]["samples"][0]
    assert sample["prompt"].startswith("Task: ") and sample.keys() >= {"response", "action", "reward"}
    assert (folder / sample["frame"]).exists()
    assert json.loads((folder / "args.json").read_text())["env"] == name
    names = {path.name for path in (folder / "adapter").iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
        "chat_template.jinja",
    } <= names
    base = Path(model_folder())
    assert (folder / "adapter" / "preprocessor_config.json").read_bytes() == (
        base / "preprocessor_config.json"
    ).read_bytes()


def test_the_success_rate_waits_until_failures_can_have_finished(tmp_path, model_folder):
    """A limit of 10, 4 steps per update: only successes can have ended a second episode before update 5."""
    argv = ["--env", "NumberLine", "--model", model_folder(), *SMALL, "--total_timesteps", "48"]
    _, rows = run(tmp_path, *argv)
    rates = [row["charts/success_rate"] for row in rows]
    assert rates[:4] == [None] * 4 and rates[5] is not None
    assert [len(row["episodes"]) for row in rows] == [
        0,
        0,
        0,
        1,
        1,
        0,
    ]  # at 15 and 20; 5 and 10 were the first


def test_environments_start_spread_over_an_episode(model_folder):
    args = options(model_folder(), env="OneRoom", num_envs=4, max_episode_steps=10)
    agents = [vldac.Agent(args, index) for index in range(4)]
    for agent in agents:
        agent.first_episode()
    assert [len(agent.actions) for agent in agents] == [0, 2, 5, 7]  # of 10
    assert "Actions left: 3" in str(agents[3].prompt()[0])
    frames = [agent.observations[-1]["image"] for agent in agents]
    agents[3].reset(agents[3].seed)
    assert (agents[3].observations[-1]["image"] == frames[3]).all()  # nothing has happened but time


def without_times(rows):
    return [{k: v for k, v in row.items() if "time/" not in k and "per_second" not in k} for row in rows]


def test_equal_seeds_equal_logs(tmp_path, model_folder):
    logs = []
    for name in "ab":
        _, rows = run(tmp_path, "--env", "NumberLine", "--model", model_folder(), *SMALL, name=name)
        logs.append(
            [{k: v for k, v in row.items() if "time/" not in k and "per_second" not in k} for row in rows]
        )
    assert logs[0] == logs[1]


def test_the_log_tells_the_rate_the_warm_up_and_the_seeds(tmp_path, model_folder):
    """The cosine from the first to the last update; LoRA still in warm-up; a seed per episode."""
    argv = ["--env", "test_vldac:Corridor", "--model", model_folder(), *SMALL, "--total_timesteps", "40"]
    argv += "--learning_rate 0.01 --final_learning_rate 0.001 --value_warmup 2 --max_episode_steps 5".split()
    _, rows = run(tmp_path, *argv)
    rates = [0.001 + 0.009 * (1 + math.cos(math.pi * u / 4)) / 2 for u in range(5)]
    assert [row["charts/learning_rate"] for row in rows] == pytest.approx(rates)
    assert [row["losses/grad_norm_lora"] > 0 for row in rows] == [False, False, True, True, True]
    assert [row["losses/kl_base"] > 0 for row in rows] == [False, False, False, True, True]
    seeds = [episode[0] for row in rows for episode in row["episodes"]]
    possible = [vldac.episode_seed(0, n, episode) for n in range(2) for episode in range(1, 12)]
    assert len(seeds) >= 6 and len(set(seeds)) == len(seeds) and set(seeds) <= set(possible)


# ------------------------------------------------------------------------------- stopping and resuming

LONG = [*SMALL, "--total_timesteps", "32", "--eval_episodes", "3", "--eval_every", "2", "--save_every", "1"]
LONG += ["--learning_rate", "0.01", "--value_warmup", "1"]


def stopped(argv, capsys) -> tuple[int, str]:
    """The exit status and the last line of a program that ends badly, but never with a traceback."""
    with pytest.raises(SystemExit) as stop:
        vldac.main([str(word) for word in argv])
    error = capsys.readouterr().err
    assert "Traceback" not in error or stop.value.code == 1  # where a world raised, its own is shown
    return stop.value.code, error.strip().splitlines()[-1]


def before_call(number, function, action):
    """`function`, but `action` is done before its call with that number (from 1)."""
    calls = itertools.count(1)

    def wrapped(*inputs, **options):
        if next(calls) == number:
            action()
        return function(*inputs, **options)

    return wrapped


def send(number):
    return lambda: os.kill(os.getpid(), number)


def in_rollout(patch, update, step, action):
    """Do `action` before step `step` of the rollout of update `update`, both from 1."""
    then = lambda: patch.setattr(vldac, "act", before_call(step, vldac.act, action))  # noqa: E731
    patch.setattr(vldac, "collect", before_call(update, vldac.collect, then))


def files(folder):
    """Every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_runs(one, other):
    """Whether two run folders hold the same: log (but for the times), adapters, frames, checkpoints."""
    logs = [[json.loads(line) for line in (f / "log.jsonl").read_text().splitlines()] for f in (one, other)]
    assert without_times(logs[0]) == without_times(logs[1])
    for name in ("adapter", "best", "frames"):
        assert files(one / name) == files(other / name)
    [a], [b] = [list((folder / "checkpoints").iterdir()) for folder in (one, other)]
    assert a.name == b.name
    same = "value_head.safetensors", "adapter_model.safetensors"
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in same)
    a, b = [torch.load(c / "state.pt", weights_only=True) for c in (a, b)]
    assert all(a[key] == b[key] for key in ("update", "best", "agents"))
    moments = [[s["exp_avg_sq"] for s in x["optimizer"]["state"].values()] for x in (a, b)]
    assert all(x.equal(y) for x, y in zip(*moments, strict=True))


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, model_folder):
    """whole_run(env) -> the options and the folder of an uninterrupted run of four updates, made once."""
    made = {}

    def get(env="EZPoints"):
        argv = ["--env", env, "--model", model_folder(), *LONG, "--max_episode_steps", "7"]
        if env not in made:
            made[env] = run(tmp_path_factory.mktemp(env), *argv, name="whole")[0]
        return argv, made[env]

    return get


@pytest.mark.parametrize("env", [pytest.param("OneRoom", marks=needs_opengl), "EZPoints"])
def test_a_resumed_run_equals_an_uninterrupted_one(env, tmp_path, whole_run, monkeypatch, capsys):
    """Four updates; stopped within the third's rollout and within episodes, then resumed: bit for bit."""
    argv, whole = whole_run(env)
    rows = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [0, 8, 16, 16, 24, 32, 32]
    part = tmp_path / "part"
    with monkeypatch.context() as patch:
        in_rollout(patch, 3, 3, send(signal.SIGTERM))
        status, line = stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    assert status == 128 + signal.SIGTERM and "SIGTERM" in line and f"--resume {part}" in line
    [checkpoint] = (part / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    assert state["update"] == 2 and any(actions for _, _, actions in state["agents"])  # in mid-episode
    vldac.main(["--resume", str(part)])
    assert without_times(rows[:3]) != without_times(rows[1:4])
    same_runs(whole, part)


@pytest.mark.parametrize("algo", ["rl4vlm", "loop"])
def test_the_compared_algorithms_are_resumed_too(algo, tmp_path, model_folder, capsys, monkeypatch):
    argv = ["--algo", algo, "--env", "NumberLine", "--model", model_folder(), *LONG, "--group_size", "2"]
    argv += "--kl_ref old --value_warmup 1 --total_timesteps 64".split()
    chosen = lambda text, actions: actions[sum(map(ord, text)) % len(actions)]  # noqa: E731
    monkeypatch.setattr(vldac, "parse_action", chosen)  # a random model names no action
    whole, rows = run(tmp_path, *argv, name="whole")
    part = tmp_path / "part"
    with monkeypatch.context() as patch:
        judge = "assess_groups" if algo == "loop" else "assess"
        patch.setattr(vldac, judge, before_call(2, getattr(vldac, judge), send(signal.SIGTERM)))
        status, _ = stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    assert status == 128 + signal.SIGTERM
    vldac.main(["--resume", str(part)])
    same_runs(whole, part)
    if algo == "loop":  # whole episodes: pairs from the same start, as many as the budget allows
        updates = [row for row in rows if "episodes" in row]
        for row in updates:
            (one, two), lengths = [e[0] for e in row["episodes"]], [e[3] for e in row["episodes"]]
            assert one == two and row["charts/success_rate"] is not None
            before = row["global_step"] - sum(lengths)
            assert before in [0, *(row["global_step"] for row in updates)] and before + 8 <= 64
        assert updates[-1]["global_step"] + 8 > 64
        learned = ["losses/policy_loss" in row for row in updates]
        assert any(learned) and not all(learned)  # one pair had equal returns: nothing to learn from


@pytest.mark.parametrize(
    "number, where",
    [
        (signal.SIGTERM, "update"),
        (signal.SIGINT, "evaluate"),
        (signal.SIGTERM, "save_checkpoint"),
        (signal.SIGINT, "load_policy"),
    ],
)
def test_a_signal_saves_and_leaves_wherever_it_comes(number, where, tmp_path, whole_run, monkeypatch, capsys):
    argv, whole = whole_run()
    with monkeypatch.context() as patch:
        call = 1 if where == "load_policy" else 2
        patch.setattr(vldac, where, before_call(call, getattr(vldac, where), send(number)))
        status, line = stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    assert status == 128 + number and signal.Signals(number).name in line
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as it was before the run
    vldac.main(["--resume", str(tmp_path / "part")])
    same_runs(whole, tmp_path / "part")


def test_a_second_signal_is_not_caught(tmp_path, whole_run, monkeypatch, capsys):
    seen = []

    def first_signal():
        send(signal.SIGTERM)()
        seen.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))

    in_rollout(monkeypatch, 1, 2, first_signal)
    stopped([*whole_run()[0], "--runs_dir", tmp_path], capsys)
    assert seen == [signal.SIG_DFL, signal.SIG_DFL]


PROCESS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


def start(*words, **options):
    command = [sys.executable, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | PROCESS, **pipes | options)


def test_a_run_killed_in_training_is_resumed(tmp_path, whole_run):
    """SIGKILL, as from a machine that is taken away: nothing can be saved at that moment."""
    argv, whole = whole_run()
    process = start(ROOT / "vldac.py", *argv, "--device", "cpu", "--runs_dir", tmp_path, "--run_name", "part")
    for line in process.stdout:
        if line.split()[:2] == ["24", "steps"]:
            break
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with open(tmp_path / "part" / "log.jsonl", "ab") as log:
        log.write(b'{"update": 4, "global_st')  # a row that the kill has torn
    vldac.main(["--resume", str(tmp_path / "part")])
    same_runs(whole, tmp_path / "part")


KILLED_WHILE_SAVING = """
import os, signal, sys, torch, vldac
real, calls = torch.save, []
def save(state, path):
    calls.append(path)
    if len(calls) < 3:
        return real(state, path)
    path.write_bytes(b"half a file")
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save
vldac.main(sys.argv[1:])
"""


def test_a_run_killed_while_it_saves_is_resumed(tmp_path, whole_run):
    argv, whole = whole_run()
    part = tmp_path / "part"
    words = [*argv, "--device", "cpu", "--runs_dir", tmp_path, "--run_name", "part"]
    process = start("-c", KILLED_WHILE_SAVING, *words)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (part / "checkpoints").iterdir()) == ["000001", "000002.tmp"]
    vldac.main(["--resume", str(part)])
    same_runs(whole, part)


def test_a_finished_run_and_one_that_has_saved_nothing_can_be_resumed(tmp_path, whole_run):
    argv, whole = whole_run()
    for name in ("finished", "fresh"):
        shutil.copytree(whole, tmp_path / name)
    shutil.rmtree(tmp_path / "fresh" / "checkpoints")
    for name in ("finished", "fresh"):
        vldac.main(["--resume", str(tmp_path / name)])
        same_runs(whole, tmp_path / name)


def test_only_how_a_run_is_computed_may_change(tmp_path, whole_run, capsys):
    argv, whole = whole_run()
    folder = shutil.copytree(whole, tmp_path / "run")
    status, line = stopped(["--resume", folder, "--seed", 1, "--gamma", "0.5", "--num_envs", 2], capsys)
    assert status == 2 and "--seed was 0, not 1" in line and "--gamma was 1.0, not 0.5" in line
    assert "num_envs" not in line  # the same as before
    assert files(folder) == files(whole)
    vldac.main(["--resume", str(folder), "--micro_batch_size", "2", *argv])
    assert vldac.load_args(folder).micro_batch_size == 2


def test_the_toy_is_resumed_under_its_name_and_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vldac.warm_start, "__defaults__", (3, 8, 1, 100))
    argv = "--env NumberLine --model tiny --total_timesteps 16 --num_envs 2 --num_steps 4".split()
    argv += "--minibatch_size 8 --eval_episodes 2 --save_every 1".split()
    whole, rows = run(tmp_path, *argv, name="whole")
    with monkeypatch.context() as patch:
        in_rollout(patch, 2, 3, send(signal.SIGINT))
        stopped([*argv, "--device", "cpu", "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    moved = (tmp_path / "part").rename(tmp_path / "moved")
    vldac.main(["--resume", str(moved), *argv])
    lines = (moved / "log.jsonl").read_text().splitlines()
    assert without_times(map(json.loads, lines)) == without_times(rows)
    assert vldac.load_args(moved).model == str(moved / "base")
    assert str(tmp_path) not in (moved / "args.json").read_text().replace(f'"runs_dir": "{tmp_path}"', "")


def test_a_run_that_is_being_written_is_left_alone(whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run()[1], tmp_path / "run")
    with open(folder / "log.jsonl", "ab") as file:
        vldac.lock(file)
        status, line = stopped(["--resume", folder], capsys)
    assert status == 2 and "another process" in line and files(folder) == files(whole_run()[1])


@pytest.mark.parametrize("file", ["state.pt", "adapter_model.safetensors", "value_head.safetensors"])
def test_a_damaged_checkpoint_is_named(file, whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run()[1], tmp_path / "run")
    path = folder / "checkpoints" / "000004" / file
    path.write_bytes(path.read_bytes()[:100])
    status, line = stopped(["--resume", folder], capsys)
    assert status == 2 and "000004" in line


def test_a_checkpoint_cannot_run_code(whole_run, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (tmp_path / "touched").touch, ()

    folder = shutil.copytree(whole_run()[1], tmp_path / "run")
    torch.save({"update": Evil()}, folder / "checkpoints" / "000004" / "state.pt")
    assert stopped(["--resume", folder], capsys)[0] == 2 and not (tmp_path / "touched").exists()


def test_evaluating_changes_nothing_and_the_best_adapter_is_kept(tmp_path, whole_run, monkeypatch):
    argv, _ = whole_run()
    rates = iter([0.2, 0.6, 0.4, 0.6, 0.1])
    monkeypatch.setattr(vldac, "summary", lambda episodes: {"success_rate": next(rates)})
    kept = []
    save = vldac.save_adapter
    monkeypatch.setattr(
        vldac, "save_adapter", lambda policy, folder: (kept.append(folder.name), save(policy, folder))
    )
    often, rows = run(tmp_path, *argv, "--eval_every", "1", "--save_every", "4", name="often")
    never, plain = run(tmp_path, *argv, "--eval_episodes", "0", "--save_every", "4", name="never")
    assert without_times(row for row in rows if "eval/success_rate" not in row) == without_times(plain)
    assert [row["update"] for row in rows if "eval/success_rate" in row] == [0, 1, 2, 3, 4]
    assert [name for name in kept if name == "best"] == ["best"] * 2  # at 0.2 and, later, at 0.6
    assert files(often / "best") != files(often / "adapter")
    assert not (never / "best").exists()


# ------------------------------------------------------------------------------------------------ faults


class Faulty(Signal):
    """Longer episodes that can be made to fail in the middle of one."""

    trouble = staticmethod(lambda env: None)

    def _step(self, action):
        type(self).trouble(self)
        return 0.0, False


def raises(env):
    raise RuntimeError("the simulator has lost its way")


def hangs(env):
    threading.Event().wait()


def breaks(env):
    env.actions = ()


@pytest.mark.parametrize(
    "trouble, words",
    [
        (raises, "RuntimeError: the simulator has lost its way"),
        (hangs, "no answer within 0.2 seconds (--env_timeout)"),
        (breaks, 'step must list the actions in info["actions"]'),
    ],
)
def test_a_world_that_fails_in_mid_episode(trouble, words, tmp_path, model_folder, monkeypatch, capsys):
    """The run stops with what plays the episode again, and goes on where it was when the world is mended."""
    argv = ["--env", "test_vldac:Faulty", "--model", model_folder(), *LONG, "--env_timeout", "0.2"]
    with monkeypatch.context() as patch:
        in_rollout(patch, 3, 2, lambda: patch.setattr(Faulty, "trouble", staticmethod(trouble)))
        patch.setattr(vldac, "parse_action", lambda text, actions: actions[0])
        status, line = stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    assert status == 1 and words in line and f"--resume {tmp_path / 'part'}" in line
    seed, actions = re.search(r"env\.reset\(seed=(\d+)\) and env\.step through (\[.*?\])", line).groups()
    assert int(seed) >= 2**30 and set(json.loads(actions)) <= {"left", "right", ""}
    state = torch.load(tmp_path / "part" / "checkpoints" / "000002" / "state.pt", weights_only=True)
    assert state["update"] == 2
    vldac.main(["--resume", str(tmp_path / "part")])
    assert len((tmp_path / "part" / "log.jsonl").read_text().splitlines()) == 7


@pytest.mark.parametrize("where, name", [("policy_loss", "policy_loss"), ("value_loss", "value_loss")])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(
    where, name, number, tmp_path, whole_run, monkeypatch, capsys
):
    """No weight is touched by it, and the last checkpoint stays."""
    argv, whole = whole_run()
    with monkeypatch.context() as patch:
        real = getattr(vldac, where)
        bad = lambda *inputs: real(*inputs) * number  # noqa: E731
        patch.setattr(vldac, "update", before_call(3, vldac.update, lambda: patch.setattr(vldac, where, bad)))
        status, line = stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    assert status == 1 and "not finite" in line and name in line and "--learning_rate" in line
    [checkpoint] = (tmp_path / "part" / "checkpoints").iterdir()
    assert checkpoint.name == "000002"
    vldac.main(["--resume", str(tmp_path / "part")])
    same_runs(whole, tmp_path / "part")


def test_a_gradient_that_is_not_finite_is_never_applied(model_folder):
    policy = make_policy(model_folder())
    rollout, before = make_rollout(policy), lora_state(policy)
    policy.value_head[0].weight.register_hook(lambda gradient: gradient * math.inf)
    head = policy.value_head[0].weight.detach().clone()
    with pytest.raises(vldac.Fault, match="grad_norm_value"):
        vldac.update(policy, optimizer_of(policy), rollout, policy.args, value_only=False)
    assert lora_state(policy).equal(before) and policy.value_head[0].weight.equal(head)


@pytest.mark.parametrize("where, resumable", [("update", "000002"), ("collect", "000002")])
def test_out_of_gpu_memory_says_what_helps(where, resumable, tmp_path, whole_run, monkeypatch, capsys):
    argv, _ = whole_run()

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")

    with monkeypatch.context() as patch:
        patch.setattr(vldac, where, before_call(3, getattr(vldac, where), full))
        status, line = stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    assert status == 1 and "--micro_batch_size (now 8)" in line and "--gradient_checkpointing true" in line
    assert "--resume" in line and (tmp_path / "part" / "checkpoints" / resumable).exists()
    vldac.main(["--resume", str(tmp_path / "part"), "--micro_batch_size", "2", "--save_every", "4"])


@pytest.fixture
def limit_file_size():
    """limit_file_size(bytes): what stands for a full disk."""
    resource = pytest.importorskip("resource", reason="limits of file sizes are Unix's")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "size, what",
    [
        (30_000, "checkpoints/000002 cannot be saved"),  # the adapter is larger
        (100_000, "checkpoints/000002 cannot be saved"),  # state.pt is larger
        (1_000, "part cannot be written"),
    ],
)
def test_a_full_disk(size, what, tmp_path, whole_run, limit_file_size, monkeypatch, capsys):
    """The run says what it could not write, the checkpoint before is whole, and nothing half is left."""
    argv, whole = whole_run()
    with monkeypatch.context() as patch:
        if "checkpoints" not in what:
            patch.setattr(vldac, "assess", before_call(2, vldac.assess, lambda: limit_file_size(size)))
        else:
            save = before_call(3, vldac.save_checkpoint, lambda: limit_file_size(size))
            patch.setattr(vldac, "save_checkpoint", save)
        status, line = stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
    limit_file_size(-1)
    assert status == 1 and what in line and "--resume" in line
    assert [path.name for path in (tmp_path / "part" / "checkpoints").iterdir()] == ["000001"]
    vldac.main(["--resume", str(tmp_path / "part")])
    same_runs(whole, tmp_path / "part")


def test_a_disk_that_is_full_from_the_start(tmp_path, whole_run, limit_file_size, capsys):
    limit_file_size(100)
    status, line = stopped([*whole_run()[0], "--runs_dir", tmp_path], capsys)
    limit_file_size(-1)
    assert status == 2 and "cannot be written" in line


def test_rewards_and_flags_may_be_numpy_s(tmp_path, model_folder, monkeypatch):
    step = Faulty.step

    def numpy_step(env, action):
        observation, reward, terminated, truncated, info = step(env, action)
        return observation, np.float32(reward), np.bool_(terminated), np.bool_(truncated), info

    monkeypatch.setattr(Faulty, "step", numpy_step)
    argv = ["--env", "test_vldac:Faulty", "--model", model_folder(), *SMALL, "--eval_episodes", "2"]
    folder, rows = run(tmp_path, *argv)
    assert rows[2]["episodes"]
    vldac.main(["--resume", str(folder)])


def test_a_world_that_does_not_repeat_itself_starts_new_episodes(tmp_path, model_folder, monkeypatch, capsys):
    argv = ["--env", "test_vldac:Faulty", "--model", model_folder(), *SMALL, "--num_steps", "2"]
    argv += ["--minibatch_size", "4", "--total_timesteps", "12"]
    with monkeypatch.context() as patch:
        in_rollout(patch, 2, 2, send(signal.SIGTERM))
        stopped([*argv, "--runs_dir", tmp_path, "--run_name", "part"], capsys)
        step = Faulty.step  # it now ends where it went on before
        patch.setattr(Faulty, "step", lambda env, action: (*step(env, action)[:2], True, False, env._info()))
        vldac.main(["--resume", str(tmp_path / "part")])
    assert "environment 0 does not repeat itself" in capsys.readouterr().out


# ------------------------------------------------------------------------------------ several processes


def torchrun(*words, processes=2, **options):
    """Run a script in several processes. Returns its exit status, its output and its errors."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    process = start(*launcher, *words, **options)
    return *process.communicate(), process.returncode


def gradients_of_sixteen(model, file):
    """This process's share of a made-up rollout of 16 environments; saves advantages and gradients."""
    T, N = 2, 16 // vldac.PROCESSES
    args = options(model, num_envs=16, minibatch_size=32, micro_batch_size=8, update_epochs=1)
    args.max_grad_norm = 1e9
    vldac.join_processes(args)
    policy = make_policy(model)
    rng = np.random.default_rng(0)
    prompts = [policy.encode(prompt) for prompt in some_prompts([1 + b % 3 for b in range(16)])]
    responses = [rng.integers(9, 99, 2 + b % 5).tolist() for b in range(T * 16)]
    rewards, dones = torch.tensor(rng.normal(size=(T, 16))).float(), torch.tensor(rng.random((T, 16)) < 0.3)
    mine = range(vldac.RANK * N, (vldac.RANK + 1) * N)
    steps = [(t, n) for t in range(T) for n in mine]
    rollout, stats = vldac.assess(
        policy,
        [prompts[n] for _, n in steps],
        [responses[16 * t + n] for t, n in steps],
        rewards[:, mine],
        dones[:, mine],
        [prompts[15 - n] for n in mine],
        args,
    )
    optimizer = optimizer_of(policy, lr=1e-9)
    vldac.update(policy, optimizer, rollout, args, value_only=False)
    advantages = torch.stack([share.view(T, N) for share in vldac.gather(rollout.advantages)], 1).view(T, 16)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if vldac.RANK == 0:
        del stats["kl_base"]  # a mean over this process's steps, averaged by the log
        torch.save({"advantages": advantages, "stats": stats, "gradients": gradients}, file)
    if vldac.PROCESSES > 1:
        torch.distributed.destroy_process_group()


def test_two_processes_of_eight_have_the_gradient_of_one_of_sixteen(tmp_path, model_folder):
    gradients_of_sixteen(model_folder(), tmp_path / "one")
    _, err, status = torchrun(ROOT / "test_vldac.py", "gradients", model_folder(), tmp_path / "two")
    assert status == 0, err
    one, two = [torch.load(tmp_path / name, weights_only=True) for name in ("one", "two")]
    torch.testing.assert_close(two["advantages"], one["advantages"])
    assert two["stats"] == pytest.approx(one["stats"], rel=1e-5)
    assert any(gradient.abs().max() > 1e-3 for gradient in one["gradients"])
    torch.testing.assert_close(two["gradients"], one["gradients"], rtol=1e-4, atol=1e-6)


TWO = ["--env", "EZPoints", *LONG, "--num_envs", "4", "--num_steps", "2", "--device", "cpu"]


def test_a_run_of_two_processes(tmp_path, model_folder):
    """Totals are totals, seeds differ, one process writes; stopped and resumed, the log is the same."""
    argv = [ROOT / "vldac.py", *TWO, "--model", model_folder(), "--runs_dir", tmp_path, "--run_name"]
    out, err, status = torchrun(*argv, "whole")
    assert status == 0, err
    rows = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [0, 8, 16, 16, 24, 32, 32]
    assert out.count("first prompt:") == 1 and {path.name for path in tmp_path.iterdir()} == {"whole"}
    seeds = [episode[0] for row in rows for episode in row.get("episodes", [])]
    assert len(seeds) == len(set(seeds)) and all(row.get("losses/ratio_first", 0) < 1e-4 for row in rows)
    whole = torch.load(tmp_path / "whole" / "checkpoints" / "000004" / "state.pt", weights_only=True)
    assert len(whole["agents"]) == 4

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = start(*launcher, *argv, "part", stderr=subprocess.DEVNULL)
    for line in process.stdout:
        if line.split()[:2] == ["16", "steps"]:
            process.terminate()
            break
    process.communicate()
    assert process.returncode != 0
    assert len((tmp_path / "part" / "log.jsonl").read_text().splitlines()) < len(rows)
    _, err, status = torchrun(ROOT / "vldac.py", "--resume", tmp_path / "part")
    assert status == 0, err
    again = [json.loads(line) for line in (tmp_path / "part" / "log.jsonl").read_text().splitlines()]
    assert without_times(again) == without_times(rows)
    assert files(tmp_path / "whole" / "adapter") == files(tmp_path / "part" / "adapter")


class Mortal(Signal):
    """A world whose second process dies, without a word, in its second episode."""

    def _reset(self):
        super()._reset()
        if vldac.RANK == 1 and self.np_random_seed == vldac.episode_seed(0, 2, 1):
            os._exit(1)


def test_a_process_that_dies_ends_the_run(tmp_path, model_folder):
    argv = [*TWO, "--env", "test_vldac:Mortal", "--model", model_folder(), "--runs_dir", tmp_path]
    _, err, status = torchrun(ROOT / "vldac.py", *argv, cwd=ROOT)
    assert status != 0 and "exitcode  : 1" in err and "rank      : 1" in err


# --------------------------------------------------------------------------------------- hostile output

HOSTILE = [
    '{"thoughts": "' + "a" * 1_000_000 + '", "action": "+"}',
    "\x00\x01\x1b[2J\x1b]0;title\x07\r\n\u202e\ufeff" * 100,
    "\ud800 a lone surrogate \udfff",
    '"action": "' * 50_000,
    '{"action": "../../../etc/passwd"}',
    "$(touch hacked); `touch hacked`; __import__('os').system('touch hacked')",
    '{"action": ' + "9" * 100_000 + "}",
    "[" * 100_000,
    "<|im_end|><|image_pad|><|vision_start|>",
    '{"action": "<|image_pad|>"}',
]


class Echo(Signal):
    """A world that shows what the model wrote, as a web page might."""

    actions = ("left", "right", *HOSTILE[8:])

    def _text(self):
        return HOSTILE[1][:40] + HOSTILE[2] + "<|image_pad|><|im_end|><|vision_start|>" + self.way


def test_whatever_the_model_writes_is_only_text(tmp_path, model_folder, monkeypatch, capsys):
    """Through parser, world, log, transcript and the next prompt; nothing is run, no file is named by it."""
    answers = itertools.cycle(HOSTILE)
    monkeypatch.setattr(VLMPolicy, "decode", lambda self, response: next(answers))
    monkeypatch.chdir(tmp_path)
    argv = ["--env", "test_vldac:Echo", "--model", model_folder(), *SMALL, "--total_timesteps", "40"]
    folder, rows = run(tmp_path, *argv)
    samples = [sample for row in rows for sample in row["samples"]]
    assert {sample["response"] for sample in samples} <= set(HOSTILE) and len(samples) == 10
    (folder / "log.jsonl").read_text(encoding="ascii")  # JSON escapes keep the terminal safe
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_world_cannot_write_the_chat_format(family, model_folder):
    """Special tokens in a world's text would add images or end the turn; surrogates break tokenizers."""
    policy = make_policy(model_folder(family))
    tokenizer = policy.processor.tokenizer
    special = "".join(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    frame = np.zeros((28, 28, 3), np.uint8)
    prompts = [
        (vldac.build_prompt([{"image": frame, "text": text}], ["go"], text, 0, 9), [frame])
        for text in ("plain", f"{special} \udc80 \x00 {special}")
    ]
    prompts = [policy.encode(prompt) for prompt in prompts]
    plain, hostile = (prompt["input_ids"][0].tolist() for prompt in prompts)
    for token in tokenizer.all_special_ids:
        assert plain.count(token) == hostile.count(token)
    assert vldac.score(policy, prompts, *policy.pad([[9], [9]]))[1].isfinite().all()


def test_a_taken_name_gets_a_number(tmp_path, model_folder):
    for _ in range(2):
        run(tmp_path, "--env", "NumberLine", "--model", model_folder(), *SMALL)
    assert (tmp_path / "run-2" / "adapter").exists()


def test_a_run_starts_from_an_adapter(tmp_path, model_folder):
    argv = [
        "--env",
        "NumberLine",
        "--model",
        model_folder(),
        *SMALL,
        "--learning_rate",
        "0.01",
        "--value_warmup",
        "0",
    ]
    folder, _ = run(tmp_path, *argv, name="first")
    args = vldac.parse_args([*argv, "--adapter", str(folder / "adapter")])
    saved = VLMPolicy(args)
    assert lora_state(saved).abs().sum() > 0
    fresh = VLMPolicy(dataclasses.replace(args, adapter=None))
    assert not lora_state(saved).equal(lora_state(fresh))
    run(tmp_path, *argv, "--adapter", str(folder / "adapter"), name="second")


def test_a_cached_toy_gives_the_same_log(tmp_path, monkeypatch, capsys):
    """Cold, it is taught first; warm, it comes from the cache; what follows is the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vldac.warm_start, "__defaults__", (3, 8, 1, 100))
    argv = "--env NumberLine --model tiny --total_timesteps 64 --num_envs 2 --minibatch_size 64".split()
    logs = [run(tmp_path, *argv, "--eval_episodes", "2", name=name)[1] for name in ("cold", "warm")]
    assert capsys.readouterr().out.count("toy: on held-out frames") == 1
    same = [without_times(log) for log in logs]
    assert same[0] == same[1] and "eval/thought_agreement" in same[0][0]
    assert (
        json.loads((tmp_path / "cold" / "adapter" / "adapter_config.json").read_text())["r"] == Args.lora_rank
    )
    assert (tmp_path / "cold" / "base" / "model.safetensors").exists()


def test_the_numbers_go_to_weights_and_biases_too(tmp_path, model_folder, monkeypatch):
    sent = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init, fake.id = lambda **options: fake, "abc"
    fake.log = lambda row, step: sent.append((step, row))
    fake.finish = lambda: sent.append("finished")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    argv = ["--env", "NumberLine", "--model", model_folder(), *SMALL]
    _, rows = run(tmp_path, *argv, "--track", "true")
    assert [step for step, _ in sent[:-1]] == [8, 16] and sent[-1] == "finished"
    assert sent[0][1]["losses/policy_loss"] == rows[0]["losses/policy_loss"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *argv, "--track", "true")
    assert stop.value.code == 2


def test_what_every_prompt_of_the_toy_repeats_is_one_token():
    prompts = [f"Task: go.\nActions taken: {k}.\nThink." for k in range(20)]
    args = options("tiny", max_image_tokens=16)
    tokenizer = vldac.toy_model(args, prompts, ['{"thoughts": "it is ahead"}'])[1].tokenizer
    ids = tokenizer(prompts[7]).input_ids
    assert tokenizer.decode(ids) == prompts[7]
    words = [tokenizer.decode([i]) for i in ids]
    assert words[0] == "Task: go.\n" and words[-1] == "Think." and "7" in words
    assert len(tokenizer('{"thoughts": "it is ahead"}').input_ids) > 1  # what it says stays in pieces


@pytest.mark.filterwarnings("ignore")
def test_the_toy_learns(tmp_path, monkeypatch):
    """The README's promise in its smallest form: obeying one word, from chance to nearly always."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vldac.warm_start, "__defaults__", (150, 32, 1, 1000))
    argv = "--env test_vldac:Signal --model tiny --total_timesteps 4096 --num_envs 64 --num_steps 4".split()
    argv += "--minibatch_size 64 --value_warmup 1 --max_episode_steps 4 --eval_episodes 0".split()
    _, rows = run(tmp_path, *argv)
    rates = [row["charts/success_rate"] for row in rows]
    assert rates[1] < 0.7 and rates[-1] > 0.9
    assert rows[-1]["charts/invalid_action_rate"] < 0.05


WRONG = [
    ("--env OneRom", "did you mean OneRoom"),
    ("--env", "expected one argument"),
    ("--env MiniWorld-Sign-v0", "its goal is not the red box"),
    ("--env no_such_module:make", "No module named 'no_such_module'"),
    ("--env math:nothing", "no attribute 'nothing'"),
    ("--env math:pi", "not callable"),
    ("--env NumberLine --model no/such/model-here", "--model tiny"),
    ("--env NumberLine --model nowhere/at/all", "--model tiny"),
    ("--env NumberLine --model empty", "--model empty cannot be loaded"),
    ("--env NumberLine --model file.txt", "--model file.txt cannot be loaded"),
    ("--env NumberLine --model half", "--model half cannot be loaded"),
    ("--env NumberLine --model torn", "--model torn cannot be loaded"),
    ("--env NumberLine --model text", "--model text cannot be loaded"),
    ("--env NumberLine --model odd", "--model odd cannot be loaded"),
    ("--env NumberLine --adapter empty", "adapter_config.json"),
    ("--env NumberLine --adapter nowhere", "adapter_config.json"),
    ("--env NumberLine --gam 1", "unrecognized arguments: --gam"),
    ("--env NumberLine --lerning_rate 1", "unrecognized arguments: --lerning_rate"),
    ("NumberLine", "unrecognized arguments: NumberLine"),
    ("--env NumberLine --gamma 1.5", "--gamma must be between 0 and 1, not 1.5"),
    ("--env NumberLine --gamma nan", "--gamma must be between"),
    ("--env NumberLine --learning_rate nan", "--learning_rate must be between"),
    ("--env NumberLine --learning_rate 0", "--learning_rate must be between"),
    ("--env NumberLine --learning_rate 1e9", "--learning_rate must be between"),
    ("--env NumberLine --learning_rate fast", "invalid float value: 'fast'"),
    ("--env NumberLine --kl_coef -1", "--kl_coef must be between"),
    ("--env NumberLine --clip_coef inf", "--clip_coef must be between"),
    ("--env NumberLine --temperature 0", "--temperature must be between"),
    ("--env NumberLine --invalid_reward nan", "--invalid_reward must be between"),
    ("--algo ppo", "invalid choice: 'ppo'"),
    ("--env NumberLine --algo loop --num_envs 16 --group_size 3", "not a multiple of --group_size"),
    ("--env NumberLine --algo loop --group_size 1", "--group_size must be between"),
    ("--env NumberLine --thought_coef 2", "--thought_coef must be between"),
    ("--env NumberLine --num_envs 0", "--num_envs must be between"),
    ("--env NumberLine --num_envs -4", "--num_envs must be between"),
    ("--env NumberLine --num_envs 1000000000", "--num_envs must be between"),
    ("--env NumberLine --num_envs 1.5", "invalid int value: '1.5'"),
    ("--env NumberLine --num_steps 0", "--num_steps must be between"),
    ("--env NumberLine --seed -1", "--seed must be between"),
    ("--env NumberLine --seed 99999999999999999999", "--seed must be between"),
    ("--env NumberLine --save_every 0", "--save_every must be between"),
    ("--env NumberLine --env_timeout -1", "--env_timeout must be between"),
    ("--env NumberLine --lora_rank 0", "--lora_rank must be between"),
    ("--env NumberLine --value_hidden 64 0", "--value_hidden takes sizes"),
    ("--env NumberLine --minibatch_size 100", "does not divide"),
    ("--env NumberLine --total_timesteps 5", "at least one update"),
    ("--env NumberLine --track yes", "invalid choice: 'yes'"),
    ("--env NumberLine --kl_ref new", "invalid choice: 'new'"),
    ("--env NumberLine --dtype float16", "invalid choice: 'float16'"),
    ("--env NumberLine --device abacus", "--device cpu"),
    ("--env NumberLine --device meta", "--device cpu"),
    ("--env NumberLine --runs_dir file.txt", "cannot make the run folder"),
    ("--env NumberLine --runs_dir file.txt/deeper", "cannot make the run folder"),
    ("--env NumberLine --run_name ../elsewhere", "must be a plain name"),
    ("--env NumberLine --run_name ..", "must be a plain name"),
    (f"--env NumberLine --run_name {'x' * 300}", "cannot make the run folder"),
    ("--resume nowhere", "nowhere is not the folder of a run"),
    ("--resume empty", "empty is not the folder of a run"),
    ("--resume file.txt", "file.txt is not the folder of a run"),
    ("--resume torn", "torn is not the folder of a run"),
    ("--resume", "expected one argument"),
]


@pytest.fixture(scope="module")
def odd_folders(tmp_path_factory, model_folder):
    """Things that are no model and no run, to stand in."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "file.txt").write_text("hello")
    (folder / "empty").mkdir()
    for name in ("half", "torn", "text"):
        shutil.copytree(model_folder(), folder / name)
    (folder / "half" / "model.safetensors").unlink()
    torn = folder / "torn" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    (folder / "torn" / "args.json").write_text('{"env": "Number')
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    (folder / "text" / "config.json").write_text(json.dumps(config))
    shutil.copytree(folder / "text", folder / "odd")
    (folder / "odd" / "config.json").write_text(json.dumps(config | {"hidden_size": 7}))
    return folder


@pytest.mark.parametrize("argv, words", WRONG, ids=[argv[:60] for argv, _ in WRONG])
def test_wrong_invocations(argv, words, odd_folders, capsys, monkeypatch):
    """One line that says what to do, exit status 2, no traceback, nothing left behind."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(odd_folders)
    if "--model" not in argv:
        loads = pytest.fail  # before any model loads, where that is possible
        monkeypatch.setattr(vldac, "load_policy", lambda args: loads("a model was loaded"))
        monkeypatch.setattr(vldac, "tiny", lambda args: loads("a model was made"))
    before = files(odd_folders)
    status, line = stopped(
        ["--device", "cpu", *argv.split()] if "--resume" not in argv else argv.split(), capsys
    )
    assert status == 2 and "error:" in line and words in line
    assert files(odd_folders) == before and not list(odd_folders.glob("runs/*"))


@pytest.mark.parametrize("argv", ["--env OneRom", "--env NumberLine --runs_dir README.md"])
def test_wrong_invocations_as_processes(argv):
    process = start("vldac.py", "--device", "cpu", *argv.split(), cwd=ROOT)
    out, err = process.communicate()
    assert (
        process.returncode == 2 and out == "" and err.strip().splitlines()[-1].startswith("vldac.py: error: ")
    )
    assert "Traceback" not in err


def broken(**changes):
    """A world of the contract but for `changes`: methods, or what they return, instead of the right ones."""

    class Broken(Signal):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            return changes.get("reset", lambda o, i: (o, i))(observation, info)

        def step(self, action):
            self.success, result = False, super().step(action)
            return changes.get("step", lambda *result: result)(*result)

    return Broken


def without_seed():
    env = Signal()
    env.reset = lambda: (None, {})
    return env


def old_gym(observation, reward, terminated, truncated, info):
    return observation, reward, terminated, info


def raise_error(*_):
    raise RuntimeError("no window")


BROKEN = [
    (lambda: 7, "it must return a gymnasium.Env, not int"),
    (raise_error, "RuntimeError: no window"),
    (without_seed, "unexpected keyword argument 'seed'"),
    (broken(reset=raise_error), "RuntimeError: no window"),
    (broken(step=raise_error), "RuntimeError: no window"),
    (broken(reset=lambda o, i: o), "reset must return a tuple (observation, info)"),
    (broken(step=old_gym), "step must return a tuple (observation, reward, terminated, truncated, info)"),
    (broken(reset=lambda o, i: (o["image"], i)), 'the observation as a dict {"image": ..., "text": ...}'),
    (broken(reset=lambda o, i: ({"image": o["image"]}, i)), "the observation as a dict"),
    (broken(reset=lambda o, i: (o | {"image": o["image"] / 255}, i)), "not float64 (28, 28, 3)"),
    (broken(reset=lambda o, i: (o | {"image": o["image"][..., 0]}, i)), "not uint8 (28, 28)"),
    (broken(reset=lambda o, i: (o | {"image": None}, i)), "give a uint8 frame (H, W, 3), not NoneType"),
    (broken(reset=lambda o, i: (o | {"text": None}, i)), "give text as a str, not None"),
    (broken(reset=lambda o, i: (o, None)), "give info as a dict"),
    (broken(reset=lambda o, i: (o, {"actions": ["left"]})), 'info["task"]'),
    (broken(reset=lambda o, i: (o, {"task": "obey"})), 'list the actions in info["actions"]'),
    (broken(reset=lambda o, i: (o, i | {"actions": "left"})), "list the actions"),
    (broken(reset=lambda o, i: (o, i | {"actions": [0, 1]})), "list the actions"),
    (broken(reset=lambda o, i: (o, i | {"actions": []})), "list the actions"),
    (broken(step=lambda o, r, t, c, i: (o, math.nan, t, c, i)), "pay a finite number, not nan"),
    (broken(step=lambda o, r, t, c, i: (o, None, t, c, i)), "pay a finite number, not None"),
    (broken(step=lambda o, r, t, c, i: (o, r, "no", c, i)), "say True or False for its ends"),
    (
        broken(step=lambda o, r, t, c, i: (o, r, t, c, i | {"success": "yes"})),
        'info["success"] as True or False',
    ),
]


@pytest.mark.parametrize(
    "make, words", BROKEN, ids=[f"{k} {words[:40]}" for k, (_, words) in enumerate(BROKEN)]
)
def test_a_world_that_breaks_the_contract(make, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "made", make, raising=False)
    monkeypatch.setattr(vldac, "load_policy", lambda args: pytest.fail("a model was loaded"))
    status, line = stopped(["--env", "test_vldac:made", "--model", "x", "--runs_dir", tmp_path], capsys)
    assert status == 2 and words in line and "test_vldac:made" in line
    assert not list(tmp_path.iterdir())


def test_precedence_is_command_line_toy_world_default():
    args = vldac.parse_args("--env NumberLine --model tiny --gamma 0.5 --device cpu".split())
    assert args.gamma == 0.5  # given, though the world says 1
    assert args.learning_rate == vldac.TOY["learning_rate"] != Args.learning_rate
    assert args.gae_lambda == 1.0 and args.max_episode_steps == 10  # the world's
    assert args.clip_coef == Args.clip_coef
    args = vldac.parse_args(f"--env NumberLine --model tiny --gamma {Args.gamma} --device cpu".split())
    assert args.gamma == Args.gamma  # given counts, also where it equals the default


# -------------------------------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, model_folder):
    """The folder of a short run on NumberLine whose adapter is not zero."""
    argv = ["--env", "NumberLine", "--model", model_folder(), *SMALL, "--max_episode_steps", "4"]
    argv += ["--value_warmup", "0", "--learning_rate", "0.05", "--final_learning_rate", "0.05"]
    return run(tmp_path_factory.mktemp("runs"), *argv)[0]


def evaluated(path, *words):
    """What eval.py writes."""
    evaluation.main([*map(str, words), "--out", str(path)])
    return json.loads(path.read_text())


def untimed(result):
    return {key: value for key, value in result.items() if key != "seconds"}


def test_an_evaluation_repeats_itself_and_its_figures_follow_from_its_episodes(finished_run, tmp_path):
    words = ["--run", finished_run, "--episodes", "7"]
    for mode in ("sampled", "greedy"):
        a, b = (evaluated(tmp_path / f"{k}.json", *words, "--mode", mode) for k in range(2))
        assert untimed(a) == untimed(b)
        assert [episode["seed"] for episode in a["episodes"]] == list(range(7))
        assert evaluation.summarize(a["episodes"]) == a["summary"] | {
            "interval": tuple(a["summary"]["interval"])
        }
    batched = evaluated(tmp_path / "c.json", *words, "--mode", "greedy", "--num_envs", "3")
    assert batched["episodes"] == a["episodes"]  # whatever shares a forward pass
    base = evaluated(tmp_path / "d.json", *words, "--mode", "greedy", "--adapter", "none")
    assert base["weights"] is None and len(a["weights"]) == 64
    limits = [
        evaluated(tmp_path / "e.json", "--run", finished_run, "--episodes", 1, *other)["task"][
            "max_episode_steps"
        ]
        for other in ([], ["--env", "EZPoints"], ["--env", "EZPoints", "--max_episode_steps", 3])
    ]  # the run's own; another world's own; what was given
    assert limits == [4, vldac.resolve({"env": "EZPoints", "device": "cpu"}).max_episode_steps, 3]


@pytest.mark.parametrize("env", ["OneRoom", "Hallway", "NumberLine"])
def test_the_helper_is_a_ceiling_and_chance_a_floor(env, tmp_path):
    words = ["--env", env, "--model", "tiny", "--episodes", "25", "--policy"]
    ceiling, floor = (evaluated(tmp_path / f"{kind}.json", *words, kind) for kind in ("hint", "random"))
    assert ceiling["summary"]["success_rate"] == 1.0 and ceiling["mode"] == "scripted"
    assert floor["summary"]["success_rate"] < {"NumberLine": 0.8}.get(env, 0.4)
    again = evaluated(tmp_path / "again.json", *words, "random", "--num_envs", "4")
    assert again["episodes"] == floor["episodes"]


def test_compare_is_paired_and_refuses_what_differs(finished_run, tmp_path, capsys):
    paths = {}
    for name, *words in (
        ["a", "--run", finished_run], ["b", "--max_episode_steps", "4"], ["more", "--episodes", "9"],
        ["world", "--env", "EZPoints"], ["limit", "--max_episode_steps", "5"],
    ):  # fmt: skip
        paths[name] = tmp_path / f"{name}.json"
        if "--run" not in words:
            words = ["--policy", "hint", "--model", "tiny", "--env", "NumberLine", *words]
        evaluated(paths[name], "--episodes", 8, *words)
    capsys.readouterr()
    evaluation.main(["--compare", str(paths["a"]), str(paths["a"])])
    assert "B - A: +0.000 (0 won, 0 lost, exact McNemar p = 1)" in capsys.readouterr().out
    evaluation.main(["--compare", str(paths["a"]), str(paths["b"])])
    rates = [json.loads(paths[name].read_text())["summary"]["success_rate"] for name in "ab"]
    assert f"B - A: {rates[1] - rates[0]:+.3f}" in capsys.readouterr().out
    for name, reason in {"more": "max_episode_steps, seeds", "world": "env", "limit": "max_ep"}.items():
        with pytest.raises(SystemExit) as stop:
            evaluation.main(["--compare", str(paths["b"]), str(paths[name])])
        assert stop.value.code == 2 and f"differ in {reason}" in capsys.readouterr().err


def test_aggregate_is_over_runs_never_over_episodes(finished_run, tmp_path, capsys):
    result, paths = evaluated(tmp_path / "0.json", "--run", finished_run, "--episodes", 4), []
    for k, wins in enumerate([1, 2, 4]):
        for n, episode in enumerate(result["episodes"]):
            episode["success"] = n < wins
        changes = {"weights": f"{k}", "summary": evaluation.summarize(result["episodes"])}
        paths.append(tmp_path / f"{k}.json")
        paths[k].write_text(json.dumps(result | changes))
    evaluation.main(["--aggregate", *map(str, paths)])
    assert "mean 0.583 ± 0.382 over 3 runs" in capsys.readouterr().out  # of 0.25, 0.5 and 1
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["--aggregate", str(paths[0]), str(paths[0])])
    assert stop.value.code == 2 and "same weights" in capsys.readouterr().err


def test_an_animation_shows_every_step_and_the_outcome(tmp_path):
    words = ["--env", "NumberLine", "--model", "tiny", "--policy", "hint", "--episodes", "3", "--gif", "2"]
    result = evaluated(tmp_path / "r.json", *words)
    assert sorted(path.name for path in tmp_path.glob("*.gif")) == ["r-0.gif", "r-1.gif"]
    with Image.open(tmp_path / "r-1.gif") as gif:
        assert gif.n_frames == result["episodes"][1]["length"] + 1 and gif.size == (640, 320)


ALONE = """
import sys, torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
folder, adapter = sys.argv[1:]
model = AutoModelForImageTextToText.from_pretrained(folder)
if adapter:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, adapter)
AutoTokenizer.from_pretrained(adapter or folder), AutoImageProcessor.from_pretrained(adapter or folder)
assert not {"vldac", "envs", "eval"} & sys.modules.keys()
print(model.eval()(torch.arange(20, 40)[None]).logits.double().sum().item())
"""


def test_adapter_and_merged_model_open_without_this_project(finished_run, model_folder, tmp_path, capsys):
    evaluation.main(["--run", str(finished_run), "--merge", str(tmp_path / "merged")])
    assert "logits within" in capsys.readouterr().out
    sums = []
    for argv in ([model_folder(), finished_run / "adapter"], [tmp_path / "merged", ""], [model_folder(), ""]):
        command = [sys.executable, "-c", ALONE, *map(str, argv)]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        sums.append(float(done.stdout))
    assert sums[0] == pytest.approx(sums[1], abs=1e-2) and abs(sums[0] - sums[2]) > 0.1
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["--run", str(finished_run), "--merge", str(tmp_path / "merged")])
    assert stop.value.code == 2 and "exists already" in capsys.readouterr().err


def test_a_merge_that_changes_the_answers_is_refused(finished_run, tmp_path, capsys, monkeypatch):
    def rounded(folder, **options):
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
        return model.float()

    loader = types.SimpleNamespace(from_pretrained=rounded)
    monkeypatch.setattr(evaluation, "AutoModelForImageTextToText", loader)
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["--run", str(finished_run), "--merge", str(tmp_path / "merged")])
    assert stop.value.code == 2 and "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_learning_curves(finished_run, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    level = tmp_path / "random.json"
    evaluated(level, "--env", "NumberLine", "--model", "tiny", "--policy", "random", "--episodes", "5")
    evaluation.main(
        ["--plot", str(finished_run), str(finished_run), str(level), "--out", str(tmp_path / "c.png")]
    )
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.width > 300
    assert "| 0 / 0 |" in capsys.readouterr().out  # the seeds of one kind of run, in one row
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["--plot", str(finished_run)])
    assert stop.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--run nowhere", "nowhere is not the folder of a run"),
        ("--run empty", "empty is not the folder of a run"),
        ("--run torn", "cannot be loaded"),
        ("--run bare", "is not a folder with an adapter_config.json"),
        ("--env OneRom --policy hint --model tiny", "did you mean OneRoom"),
        ("--env NumberLine --model tiny --episodes 0", "--episodes must be between"),
        ("--env NumberLine --model tiny --policy guess", "invalid choice"),
        ("--env NumberLine --model tiny --num_envs 0", "--num_envs must be between"),
        ("--env NumberLine --model tiny --resume x", "unrecognized arguments"),
        ("--run bare --adapter none --merge x", "needs an adapter"),
        ("--compare a.json b.json --gif 3 --env OneRoom", "--compare does not take --env, --gif"),
        ("--plot a --aggregate b.json", "not allowed with"),
        ("--compare missing.json missing.json", "missing.json is not a result"),
        ("--compare empty.json empty.json", "empty.json is not a result"),
        ("--aggregate other.json", "it was not written by eval.py"),
        ("--plot empty", "empty is not the folder of a run"),
        ("--plot missing.json", "missing.json is not a result"),
    ],
)
def test_a_wrong_evaluation_is_one_line(words, reason, finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "other.json").write_text("{}")
    for name in ("torn", "bare"):
        shutil.copytree(finished_run, tmp_path / name)
    file = tmp_path / "torn" / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:99])
    shutil.rmtree(tmp_path / "bare" / "adapter")
    with pytest.raises(SystemExit) as stop:
        evaluation.main(words.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and reason in error and "Traceback" not in error
    assert error.splitlines()[-1].startswith("eval.py: error: ") or "usage:" in error


# ------------------------------------------------------------------------------------------- the README

README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_program(name):
    """The README's Python block whose first line is `# name`."""
    (block,) = re.findall(rf"```python\n(# {re.escape(name)}\b.*?)```", README, re.S)
    return block


@pytest.mark.parametrize("file, env", [("my_world.py", "my_world:Doors"), ("lake.py", "lake:make")])
def test_the_readme_s_worlds_run(file, env, tmp_path, model_folder, monkeypatch):
    (tmp_path / file).write_text(readme_program(file))
    monkeypatch.syspath_prepend(str(tmp_path))
    world = envs.make_env(env, max_episode_steps=30)
    records = play(world, 0, randomly(0))
    assert records == play(world, 0, randomly(0))
    assert len(play(world, 0, lambda info: "no such action")) == 31  # costs its step, changes nothing
    _, rows = run(tmp_path, "--env", env, "--model", model_folder(), *SMALL, "--max_episode_steps", "4")
    rate = (
        "charts/success_rate" if file == "my_world.py" else "charts/positive_return"
    )  # Frozen Lake has no flag
    assert rows[-1][rate] is not None


def test_the_readme_s_program_acts(tmp_path, model_folder, monkeypatch, capsys):
    run(tmp_path / "runs", "--env", "NumberLine", "--model", model_folder(), *SMALL, name="NumberLine-tiny-0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "act.py").write_text(readme_program("act.py"))
    runpy.run_path(str(tmp_path / "act.py"))
    assert "->" in capsys.readouterr().out.splitlines()[-1]


def test_the_readme_names_every_option_and_deviation():
    """Options and functions it names exist; its deviations are those of vldac.py, number by number."""
    numbers = re.findall(r"^ ?(\d+)\. ", vldac.__doc__, re.M)
    assert re.findall(r"^(\d+)\. \*\*", README, re.M) == numbers
    known = {field.name for field in dataclasses.fields(Args)} | {"help"}
    known |= {name for name in vars(evaluation.parse([])[0])}
    for option in re.findall(r"`--(\w+)", README):
        assert option in known
    for name in re.findall(r"`vldac\.(?!py)(\w+)", README):
        assert hasattr(vldac, name)


# --------------------------------------------------------------------------------- not tests: commands


def kill_at_random(trials: int, seed=0):
    """Kill one run (SIGKILL) at random instants and resume it, `trials` times; then finish and compare.

    python test_vldac.py kill 20        about 6 minutes; prints a line per kill
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model = write_model("qwen2_vl", folder / "model")
        argv = ["--env", "EZPoints", "--model", model, *SMALL, "--save_every", "1", "--device", "cpu"]
        argv += ["--total_timesteps", str(8 * 20 * trials), "--runs_dir", folder, "--run_name"]
        print("a run that is left alone, to compare with", flush=True)
        assert start(ROOT / "vldac.py", *argv, "whole", stdout=None, stderr=None).wait() == 0
        words, part, survived = [*argv, "part"], folder / "part", 0
        for trial in range(trials):
            process = start(ROOT / "vldac.py", *words)
            for line in process.stdout:
                if line.startswith("trained:"):  # loaded: the training begins
                    break
            try:
                process.wait(rng.uniform(0, 5))
                raise SystemExit(f"it ended by itself: {process.communicate()}")
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()
            *lines, last = (part / "log.jsonl").read_bytes().split(b"\n")
            updates = [json.loads(line)["update"] for line in lines]
            assert updates == list(range(1, len(updates) + 1)), "an update is torn, missing or repeated"
            names = sorted(path.name for path in (part / "checkpoints").iterdir())
            newest = vldac.newest_checkpoint(part)
            assert torch.load(newest / "state.pt", weights_only=True)["update"] == int(newest.name)
            survived += 1
            print(
                f"kill {trial + 1}: after {len(updates)} updates, torn row {bool(last)}, checkpoints {names}",
                flush=True,
            )
            words = ["--resume", part]
        assert start(ROOT / "vldac.py", *words, stdout=subprocess.DEVNULL).wait() == 0
        same_runs(folder / "whole", part)
        print(f"{survived} of {trials} kills survived; the log equals that of the run that was left alone")


class Still(gym.Env):
    """A simulator that costs nothing: a random frame, and words that bring the prompt to its length."""

    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (60, 80, 3), np.uint8), text=AnyText())
    action_space, words = AnyText(), ""

    def observe(self):
        frame = self.np_random.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        info = {"task": "go to the red box", "actions": ACTIONS, "success": False}
        return {"image": frame, "text": self.words}, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe()

    def step(self, action):
        observation, info = self.observe()
        return observation, float(self.np_random.random()), False, False, info


SPEED = dict(layers=2, width=64, num_envs=16, steps=512, prompt=241, response=32, images=1, micro=8,
             threads=1, peer="", model="", device="cpu", checkpointing=0)  # fmt: skip


def measure_speed(*words):
    """Environment steps per second of whole training: rollout, scoring twice, two epochs; a row per setting.

    python test_vldac.py speed num_envs=1,4,16,64       any of SPEED may be a list
    python test_vldac.py speed peer=,trl                beside TRL's GRPO trainer (pip install trl datasets)

    A random model, a simulator that costs nothing, responses of exactly `response` tokens, one optimizer
    step per 16 environment steps. On a CPU all times are the processor's.
    """
    given = dict(word.split("=") for word in words)
    lists = {key: str(given.get(key, value)).split(",") for key, value in SPEED.items()}
    for values in itertools.product(*lists.values()):
        setting = {k: type(SPEED[k])(v) for k, v in zip(lists, values, strict=True)}
        cpu = setting["device"] == "cpu"
        torch.set_num_threads(setting["threads"])
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("time.perf_counter", time.process_time) if cpu else contextlib.nullcontext(),
        ):
            shape = setting["width"], setting["layers"]
            model = setting["model"] or write_model("qwen2_vl", Path(folder), *shape)
            args = Args(
                env="test_vldac:Still", model=str(model), device=setting["device"],
                dtype="float32" if cpu else "bfloat16", num_envs=setting["num_envs"],
                max_episode_steps=10**6, num_images=setting["images"], max_new_tokens=setting["response"],
                minibatch_size=16, micro_batch_size=setting["micro"], value_hidden=(256, 256),
                gradient_checkpointing=bool(setting["checkpointing"]),
            )  # fmt: skip
            row = (speed_of_trl if setting["peer"] else speed_of_vldac)(args, setting)
        print("  ".join(f"{k}={v}" for k, v in setting.items() if k in given), "", row, flush=True)


def prompts_of(policy, agents, length):
    """Give the simulators words until every prompt has `length` tokens; the number they then have."""
    world = importlib.import_module("test_vldac").Still
    for count in itertools.count():
        world.words = " a" * count
        for agent in agents:
            agent.step(None)
        tokens = policy.encode(agents[0].prompt())["input_ids"].shape[1]
        if len(agents[0].observations) == agents[0].args.num_images and tokens >= length:
            return tokens


def speed_of_vldac(args, setting):
    torch.manual_seed(0)
    policy = vldac.load_policy(args)
    policy.base.generation_config.min_new_tokens = args.max_new_tokens
    optimizer = vldac.make_optimizer(policy, args)
    agents = [vldac.Agent(args, index) for index in range(args.num_envs)]
    for agent in agents:
        agent.next_episode()
    P, R = prompts_of(policy, agents, setting["prompt"]), args.max_new_tokens
    for num_steps in (2, setting["steps"] // args.num_envs):  # the first is not counted
        args.num_steps = num_steps
        timer, start = vldac.Timer(), time.perf_counter()
        *rollout, _ = vldac.collect(policy, agents, args, timer)
        with timer("score"):
            rollout, _ = vldac.assess(policy, *rollout, args)
        with timer("update"):
            losses = vldac.update(policy, optimizer, rollout, args, value_only=False)
    steps, seconds = args.num_envs * args.num_steps, time.perf_counter() - start
    words = [
        f"{steps / seconds:.2f} environment steps per second, ms each:",
        *(f"{name} {1e3 * x / steps:.2f}" for name, x in timer.seconds.items()),
        f"| {1e3 * timer.seconds['generate'] / args.num_steps / R:.2f} ms per decoding step,",
        f"{2 * steps * (P + R) / timer.seconds['update']:.0f} tokens/s in the update, prompt {P} tokens,",
        f"ratio_first {losses['ratio_first']:.0e}",
    ]
    if args.device != "cpu":
        words.append(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    return " ".join(words)


def speed_of_trl(args, setting):
    """GRPO on single turns: 16 prompts per optimizer step, 2 iterations, a reference model, no value."""
    import datasets
    import trl
    from transformers import TrainerCallback

    policy = vldac.load_policy(args)
    agent = vldac.Agent(args)
    agent.next_episode()
    tokens = prompts_of(policy, [agent], setting["prompt"])
    steps, rows = setting["steps"], []
    for _ in range(2 * steps // 16):
        messages, [frame] = agent.prompt()
        rows.append({"prompt": messages, "image": Image.fromarray(frame)})
        agent.step(None)
    warm, times = 4, []  # optimizer steps that are not counted

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            folder, per_device_train_batch_size=args.micro_batch_size, num_generations=16, num_iterations=2,
            gradient_accumulation_steps=16 // args.micro_batch_size, beta=0.05, top_k=0, bf16=False,
            max_completion_length=args.max_new_tokens, use_cpu=args.device == "cpu", disable_tqdm=True,
            generation_kwargs={"min_new_tokens": args.max_new_tokens}, gradient_checkpointing=False,
            max_steps=warm + 2 * steps // 16, save_strategy="no", logging_strategy="no", report_to="none",
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=AutoModelForImageTextToText.from_pretrained(args.model),
            processing_class=vldac.load_processor(args.model, args.max_image_tokens),
            reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            train_dataset=datasets.Dataset.from_list(rows), args=config, callbacks=[Clock()],
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=vldac.LORA_TARGETS),
        )  # fmt: skip
        trainer.train()
    seconds = times[-1] - times[warm - 1]
    return (
        f"{steps / seconds:.2f} environment steps per second (TRL {trl.__version__}), prompt {tokens} tokens"
    )


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    kill = lambda trials: kill_at_random(int(trials))  # noqa: E731
    shop = lambda: print("a shop on port 3000", flush=True) or Shop(3000).serve_forever()  # noqa: E731
    commands = {"games": write_games, "gradients": gradients_of_sixteen, "kill": kill, "shop": shop}
    (commands | {"speed": measure_speed})[command](*rest)
