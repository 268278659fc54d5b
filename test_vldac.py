"""The tests, in the order of the algorithm: the maths, the policy, the update, the parser, the worlds, a run.

Plain `pytest` runs all of it, the modules' doctests and the README's examples included. No network, no GPU.
"""

import ast
import dataclasses
import doctest
import enum
import http.server
import importlib.machinery
import itertools
import json
import math
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast

import envs
import eval as evaluation
import vldac
from envs import AnyText
from vldac import (
    Args,
    VLMPolicy,
    build_prompt,
    gae,
    kl_base,
    kl_loss,
    parse_action,
    policy_loss,
    step_mean,
    value_loss,
)

ROOT = Path(__file__).parent
sys.path.append(str(ROOT / "assets"))
loop, toy = importlib.import_module("loop"), importlib.import_module("toy")
torch.set_num_threads(1)  # the models here are too small to share


@pytest.mark.parametrize("module", [vldac, envs, evaluation, loop], ids=lambda m: m.__name__)
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
@pytest.mark.parametrize("loss", [
    lambda *x: policy_loss(*x, 0.1), lambda n, o, a, m: kl_loss(n, o, m), lambda n, o, a, m: kl_base(n, o, m),
], ids=["policy", "kl_old", "kl_base"])  # fmt: skip
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

PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor",
    "gemma3": "Gemma3Processor", "smolvlm": "SmolVLMProcessor",
}  # fmt: skip
FAMILIES = list(PROCESSORS)
ACTIONS = ["turn left", "turn right", "move forward"]
SPECIAL = [*toy.SPECIAL, "<eos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
SPECIAL += ["<image>", "<fake_token_around_image>", "<global-img>", "<video>"]


def write_model(family, folder):
    """A random model of a few thousand parameters whose folder has the traps of the hub's.

    A generation_config that samples greedily (top_k 1, temperature 0.01) and ends a turn by either of two
    ids, one of which the tokenizer does not know of; an image processor without a video processor.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    sizes = {"vocab_size": 300, "initial_alphabet": alphabet, "show_progress": False}
    words = ["turn left turn right move forward go to the red box"] * 3
    raw.train_from_iterator(words, trainers.BpeTrainer(special_tokens=SPECIAL, **sizes))
    ids = {token: raw.token_to_id(token) for token in SPECIAL}

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": raw.get_vocab_size(), "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 64}
    images, files, extra = {"processor_class": PROCESSORS[family]}, {}, {}
    if family.startswith("qwen"):
        marker = "<|vision_start|><|image_pad|><|vision_end|>"
        names = "image_pad video_pad vision_start vision_end".split()
        rest = {f"{name.removesuffix('_pad')}_token_id": ids[f"<|{name}|>"] for name in names}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        vision |= {"num_heads": 2, "depth": 2, "out_hidden_size": 32}
        images |= {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
        images |= {"temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
        if family == "qwen2_vl":
            vision |= {"embed_dim": 32, "mlp_ratio": 2}
        if family == "qwen2_5_vl":
            vision["fullatt_block_indexes"] = [0]
        if family == "qwen3_vl":
            text["head_dim"] = 16
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
            images |= {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    else:
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
        files["processor_config.json"] = images | {"image_seq_length": 4, "image_seq_len": 4}
    if family == "gemma3":
        marker, image = "<start_of_image>", "<image_soft_token>"
        extra = {"boi_token": marker, "eoi_token": "<end_of_image>", "image_token": image}
        rest = {"boi_token_index": ids[marker], "eoi_token_index": ids["<end_of_image>"]}
        rest |= {"image_token_index": ids[image], "mm_tokens_per_image": 4}
        text |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}
        images |= {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}
    if family == "smolvlm":
        marker = "<image>"
        extra = {"image_token": marker}
        rest = {"image_token_id": ids[marker], "scale_factor": 2, "pad_token_id": 0}
        text["model_type"] = "llama"
        images |= {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True}
        images |= {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **rest)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    greedy = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.001}
    stop_ids = [ids["<|im_end|>"], ids["<eos>"]]
    model.generation_config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=0, **greedy)
    model.save_pretrained(folder)
    tokens = {"eos_token": "<eos>", "pad_token": SPECIAL[0], "extra_special_tokens": extra}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **tokens)
    tokenizer.chat_template = toy.CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", marker)
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
    defaults = {"model": model, "device": "cpu", "dtype": "float32", "value_hidden": [16], "lora_rank": 4}
    return Args(**{"max_new_tokens": 10} | defaults | changes)


def make_policy(model, seed=0, **changes) -> VLMPolicy:
    """A policy whose adapters are not zero, as after some training."""
    torch.manual_seed(seed)
    policy = VLMPolicy(options(model, **changes))
    for name, parameter in policy.peft_model.named_parameters():
        if "lora_B" in name and not changes.get("adapter"):
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def some_prompts(policy, counts=(1, 2, 3)):
    """Encoded prompts of unequal length, with as many images each as `counts` says."""
    rng = np.random.default_rng(0)
    prompts = []
    for k in counts:
        frames = [rng.integers(0, 255, (60, 80, 3), dtype=np.uint8) for _ in range(k)]
        seen = [{"image": frame, "text": "dark " * k} for frame in frames]
        prompts.append(policy.encode(build_prompt(seen, ACTIONS, "find it", k, 9), frames))
    return prompts


def pad(responses):
    """Lists of token ids -> tokens and mask, both (B, R)."""
    tokens = [torch.tensor(ids, dtype=torch.long) for ids in responses]
    mask = [torch.ones(len(ids), dtype=torch.long) for ids in responses]
    return pad_sequence(tokens, batch_first=True), pad_sequence(mask, batch_first=True)


def generated(policy, prompts):
    """What generate() itself says: responses (B, R) and the scores it sampled them from (B, R, V)."""
    policy.eval()
    inputs = policy.inputs(prompts, *pad([[]] * len(prompts)))
    out = policy.vlm.generate(**inputs, output_scores=True, return_dict_in_generate=True)
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.scores, 1).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_and_scoring_agree(family, model_folder):
    """Left-padded batch = one by one = the sampler's own log-probabilities, first and stop token included."""
    policy = make_policy(model_folder(family), temperature=1.3)
    prompts = some_prompts(policy)
    responses, scores = generated(policy, prompts)
    sampler = scores.log_softmax(2).gather(2, responses[..., None])[..., 0]
    # One response cut by the limit, one that ends by each stop id, one that is nothing but a stop id.
    lists = [row[: 3 + i] for i, row in enumerate(responses.tolist())]
    batched, values, _ = policy(prompts, *pad(lists))
    for i, prompt in enumerate(prompts):
        n = len(lists[i])
        torch.testing.assert_close(batched[i, :n], sampler[i, :n], atol=1e-5, rtol=0)
        for stop in policy.stop_ids.tolist():
            ids = lists[i] + [stop]
            one, value, _ = policy([prompt], *pad([ids]))
            torch.testing.assert_close(one[0, :n], batched[i, :n], atol=1e-5, rtol=0)
            torch.testing.assert_close(value[0], values[i], atol=1e-5, rtol=0)
            padded, _, _ = policy(prompts, *pad([ids if j == i else [stop] for j in range(3)]))
            torch.testing.assert_close(padded[i, : n + 1], one[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_but_placeholders_can_be_sampled_and_either_stop_id_ends_a_turn(family, model_folder):
    """The hub's generation_config (top_k 1, temperature 0.01) must not leak into the rollout."""
    policy = make_policy(model_folder(family), max_new_tokens=30)
    assert len(policy.stop_ids) == 2 and policy.banned_ids
    prompts = some_prompts(policy, [1]) * 4
    _, scores = generated(policy, prompts)
    assert (~scores[0, 0].isfinite()).nonzero()[:, 0].tolist() == policy.banned_ids
    for stop in policy.stop_ids.tolist():  # make one stop id likely: turns end with it, well before the limit
        bias = torch.zeros(scores.shape[2])
        bias[stop] = 50.0
        head = policy.vlm.get_output_embeddings()
        handle = head.register_forward_hook(lambda m, i, o, bias=bias: o + bias)
        tokens, mask = policy.sample(prompts)
        assert tokens[:, 0].tolist() == [stop] * 4 and mask.sum(1).tolist() == [1] * 4
        assert tokens.shape == mask.shape == (4, 30) and policy.decode(tokens, mask) == [""] * 4
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_is_on_the_language_model_only(family, model_folder):
    policy = make_policy(model_folder(family))
    names = [name for name, p in policy.peft_model.named_parameters() if p.requires_grad]
    assert names and not [name for name in names if "vision" in name or "visual" in name]
    layers = {name.split(".")[-4] for name in names}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_costs_few_tokens(family, model_folder):
    policy = make_policy(model_folder(family), max_image_tokens=16)
    frame = np.zeros((600, 800, 3), np.uint8)
    messages = build_prompt([{"image": frame, "text": ""}], ["go"], "go", 0, 9)
    ids = policy.encode(messages, [frame])["input_ids"]
    assert 1 <= torch.isin(ids, torch.tensor(policy.banned_ids)).sum() <= 16


@pytest.mark.parametrize("family", FAMILIES)
def test_a_world_cannot_write_the_chat_format(family, model_folder):
    """Special tokens in a world's text would add images or end the turn."""
    policy = make_policy(model_folder(family))
    tokenizer, frame = policy.tokenizer, np.zeros((28, 28, 3), np.uint8)
    special = "".join(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    ids = []
    for text in ("plain", f"{special} \x00 {special}"):
        messages = build_prompt([{"image": frame, "text": text}], ["go"], text, 0, 9)
        ids.append(policy.encode(messages, [frame])["input_ids"][0].tolist())
    assert [ids[0].count(i) for i in tokenizer.all_special_ids] == [
        ids[1].count(i) for i in tokenizer.all_special_ids
    ]


def test_the_value_looks_at_the_prompt_alone(model_folder):
    policy = make_policy(model_folder())
    prompts = some_prompts(policy)
    _, empty, _ = policy(prompts, *pad([[]] * 3))
    _, full, _ = policy(prompts, *pad([[9, 10, 11]] * 3))
    torch.testing.assert_close(empty, full, atol=1e-6, rtol=0)
    assert empty.unique().numel() == 3


def test_sampling_is_in_evaluation_mode(model_folder):
    """generate() gives other tokens in training mode with gradient checkpointing, and says nothing."""
    samples = []
    for checkpointing in (False, True):
        policy = make_policy(model_folder(), gradient_checkpointing=checkpointing).train()
        torch.manual_seed(0)
        samples.append(policy.sample(some_prompts(policy))[0])
    assert samples[0].equal(samples[1])


# --------------------------------------------------------------------------------------------- the update


def rollout_of(prompts, tokens, mask, rewards=None, dones=None, last_prompts=()) -> vldac.Rollout:
    """A rollout of made-up steps."""
    B = len(prompts)
    rewards, dones = [0.0] * B if rewards is None else rewards, [False] * B if dones is None else dones
    rows = zip(prompts, tokens, mask, rewards, dones, strict=True)
    steps = [vldac.Step("", p, t, m, "", None, reward, done) for p, t, m, reward, done in rows]
    return vldac.Rollout(steps, list(last_prompts), [])


def make_rollout(policy, B=6, seed=0) -> vldac.Rollout:
    """A rollout of sampled responses of unequal lengths, with made-up advantages and returns."""
    torch.manual_seed(seed)
    prompts = some_prompts(policy, [1 + b % 3 for b in range(B)])
    tokens, mask = policy.sample(prompts)
    mask = mask * (torch.arange(tokens.shape[1]) < torch.arange(2, 2 + B)[:, None])
    rollout = rollout_of(prompts, tokens, mask)
    rollout.logprobs, _ = vldac.score(policy, prompts, tokens, mask)
    with policy.peft_model.disable_adapter():
        rollout.baselogprobs, _ = vldac.score(policy, prompts, tokens, mask)
    rollout.advantages, rollout.returns = torch.randn(2, B)
    return rollout


def optimizer_of(policy, lr=1e-2):
    return vldac.make_optimizer(policy, dataclasses.replace(policy.args, learning_rate=lr))


def updated(policy, rollout, lr=1e-2, value_only=False, **changes):
    """The optimizer after an update, and what the update returned."""
    args = dataclasses.replace(policy.args, **{"minibatch_size": 6} | changes)
    optimizer = optimizer_of(policy, lr)
    return optimizer, vldac.update(policy, optimizer, rollout, args, value_only)


def lora(policy):
    return [p for p in policy.peft_model.parameters() if p.requires_grad]


def lora_state(policy):
    return torch.cat([p.detach().flatten().clone() for p in lora(policy)])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_minibatch_has_ratio_one(family, model_folder):
    policy = make_policy(model_folder(family))
    _, losses = updated(policy, make_rollout(policy), minibatch_size=3, micro_batch_size=2)
    assert losses["ratio_first"] < 1e-4
    assert losses["approx_kl"] > 1e-4  # and the later ones have not


def test_the_first_minibatch_has_ratio_one_around_an_adapter_made_with_dropout(model_folder, tmp_path):
    base = AutoModelForImageTextToText.from_pretrained(model_folder())
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=vldac.LORA_TARGETS, init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path)
    policy = make_policy(model_folder(), adapter=str(tmp_path))
    assert lora_state(policy).abs().sum() > 0
    assert updated(policy, make_rollout(policy), minibatch_size=3)[1]["ratio_first"] < 1e-4


def gradients(policy, loss):
    """Of LoRA and of the value head."""
    policy.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad for p in lora(policy)], [p.grad for p in policy.value_head.parameters()]


def equation_6(policy, rollout):
    """The total loss of a whole rollout, term by term."""
    args = policy.args
    newlogprobs, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    pg_loss = policy_loss(newlogprobs, rollout.logprobs, rollout.advantages, rollout.mask, args.clip_coef)
    if args.kl_ref == "base":
        kl = kl_base(newlogprobs, rollout.baselogprobs, rollout.mask)
    else:
        kl = kl_loss(newlogprobs, rollout.logprobs, rollout.mask)
    return pg_loss + args.kl_coef * kl + args.vf_coef * value_loss(values, rollout.returns)


@pytest.mark.parametrize("kl_ref, max_grad_norm", [("base", 1e9), ("old", 1e9), ("base", 1e-3)])
def test_an_update_steps_along_equation_6(kl_ref, max_grad_norm, model_folder, monkeypatch):
    """One minibatch of everything: each of the two epochs' gradients is Eq. 6's, clipped per group."""
    policy = make_policy(model_folder(), kl_ref=kl_ref, max_grad_norm=max_grad_norm)
    rollout = make_rollout(policy)
    rollout.logprobs = rollout.logprobs - 0.05 * torch.rand(rollout.mask.shape)  # or Eq. 5 has no gradient
    expected = gradients(policy, equation_6(policy, rollout))
    steps, step = [], torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *args: (steps.append(1), step(*args)))

    optimizer, _ = updated(policy, rollout, lr=0.0)

    assert len(steps) == policy.args.update_epochs == 2
    for group, gradient in zip(optimizer.param_groups, expected, strict=True):
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        scale = min(1.0, max_grad_norm / norm.item())
        found = [p.grad for p in group["params"]]
        torch.testing.assert_close(found, [g * scale for g in gradient], atol=1e-6, rtol=1e-3)


def test_the_two_losses_touch_different_weights(model_folder):
    """The value loss leaves every LoRA gradient exactly zero, the policy loss every value-head gradient."""
    policy = make_policy(model_folder())
    rollout = make_rollout(policy)
    logprobs, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    adapters, head = gradients(policy, value_loss(values, rollout.returns))
    assert all(g is None or not g.any() for g in adapters) and any(g.any() for g in head)
    logprobs, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    loss = policy_loss(logprobs, rollout.logprobs, rollout.advantages, rollout.mask, 0.1)
    adapters, head = gradients(policy, loss + 0.05 * kl_base(logprobs, rollout.baselogprobs, rollout.mask))
    assert any(g.any() for g in adapters) and all(g is None or not g.any() for g in head)


def test_a_thousandfold_value_loss_moves_lora_not_one_bit_further(model_folder):
    """Neither through gradients nor through a joint clipping norm nor through Adam."""
    states = []
    for vf_coef in (0.15, 150.0):
        policy = make_policy(model_folder())
        rollout, before = make_rollout(policy), lora_state(policy)
        torch.manual_seed(0)
        updated(policy, rollout, minibatch_size=3, vf_coef=vf_coef, max_grad_norm=0.01)
        states.append(lora_state(policy))
        assert not states[-1].equal(before)
    assert states[0].equal(states[1])


@pytest.mark.parametrize("stop_grad", [True, False])
def test_in_the_warm_up_only_the_value_head_learns(stop_grad, model_folder):
    """Also where the value loss may train LoRA: then it does so afterwards."""
    policy = make_policy(model_folder(), stop_grad=stop_grad)
    rollout, before = make_rollout(policy), lora_state(policy)
    _, values, _ = policy(rollout.prompts, rollout.tokens, rollout.mask)
    adapters, head = gradients(policy, value_loss(values, rollout.returns))
    assert any(g is not None and g.any() for g in adapters) == (not stop_grad)
    weight = policy.value_head[0].weight.detach().clone()
    for value_only in (True, False):
        updated(policy, rollout, value_only=value_only)
        assert lora_state(policy).equal(before) == value_only
        assert not policy.value_head[0].weight.equal(weight)


@pytest.mark.parametrize("micro", [1, 4, 5])
def test_unequal_micro_batches_give_the_gradient_of_one(model_folder, micro):
    """6 = 4 + 2 = 5 + 1: each micro-batch counts by its share of the steps, in gradients and in the log."""
    grads, logged = [], []
    for size in (6, micro):
        policy = make_policy(model_folder())
        _, losses = updated(policy, make_rollout(policy), lr=0.0, micro_batch_size=size, max_grad_norm=1e9)
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
        logged.append(losses | {"ratio_first": 0, "approx_kl": 0, "kl_old": 0})  # rounding
    assert grads[0].abs().max() > 1e-3
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-5)
    assert logged[0] == pytest.approx(logged[1], rel=1e-4, abs=1e-5)


def test_gradient_checkpointing_changes_no_gradient(model_folder):
    grads = []
    for checkpointing in (False, True):
        policy = make_policy(model_folder(), gradient_checkpointing=checkpointing)
        updated(policy, make_rollout(policy), lr=0.0)
        grads.append(torch.cat([p.grad.flatten() for p in lora(policy)]))
    torch.testing.assert_close(*grads, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_computes_in_half_and_keeps_log_probabilities_values_and_adapters_in_full(
    family, model_folder
):
    policy = make_policy(model_folder(family), dtype="bfloat16")
    rollout = make_rollout(policy)
    assert policy.vlm.get_output_embeddings().weight.dtype == torch.bfloat16
    assert {p.dtype for p in [*lora(policy), *policy.value_head.parameters()]} == {torch.float32}
    assert not (rollout.logprobs == rollout.logprobs.bfloat16()).all()
    _, losses = updated(policy, rollout)
    assert losses["ratio_first"] < 0.1 and math.isfinite(losses["policy_loss"])


def test_a_gradient_that_is_not_finite_is_never_applied(model_folder):
    policy = make_policy(model_folder())
    rollout, before = make_rollout(policy), lora_state(policy)
    policy.value_head[0].weight.register_hook(lambda gradient: gradient * math.inf)
    head = policy.value_head[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        updated(policy, rollout)
    assert lora_state(policy).equal(before) and policy.value_head[0].weight.equal(head)


# ------------------------------------------------------------------------ from the collection to the loss


def registered(world):
    """The world, which Gymnasium now knows by its name."""
    gym.register(f"{world.__name__}-v0", world, max_episode_steps=getattr(world, "time_limit", None))
    return world


@registered
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
        tokens, mask = pad(
            [policy.tokenizer(text).input_ids + policy.stop_ids[:1].tolist() for text in texts]
        )
        missing = (0, 60 - tokens.shape[1])
        return torch.nn.functional.pad(tokens, missing), torch.nn.functional.pad(mask, missing)

    monkeypatch.setattr(policy, "sample", sample)
    return said


def test_collection_and_advantages_are_those_of_a_replay(model_folder, monkeypatch):
    """Three rollouts in a row, computed again in plain loops, step by step, from seeds and answers alone."""
    T, N, gamma, lam = 7, 3, 0.9, 0.6
    policy = make_policy(
        model_folder(), env="test_vldac:Corridor-v0", num_envs=N, num_steps=T, gamma=gamma, gae_lambda=lam,
        num_images=2, max_image_tokens=16,
    )  # fmt: skip
    players = [vldac.Player(policy.args, n) for n in range(N)]
    for player in players:
        player.next_episode()
    said = scripted_responses(policy, monkeypatch)
    worlds, episodes, histories = [Corridor() for _ in range(N)], [0] * N, [None] * N

    def begin(n):
        observation, info = worlds[n].reset(seed=vldac.training_seed(policy.args.seed, n, episodes[n]))
        episodes[n], histories[n] = episodes[n] + 1, ([observation], info, 0)

    def value(n):
        """V of what player n sees now."""
        seen, info, taken = histories[n]
        messages = build_prompt(seen[-2:], info["actions"], "walk", taken, 5 - taken)
        prompt = policy.encode(messages, [observation["image"] for observation in seen[-2:]])
        return policy([prompt], *pad([[]]))[1].item()

    for n in range(N):
        begin(n)
    for _ in range(3):
        said.clear()
        rollout = vldac.collect(policy, players, policy.args)
        vldac.compute_advantages(policy, rollout, policy.args)
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
        R, V, D = map(torch.tensor, (R, V, D))
        assert [step.reward for step in rollout.steps] == R.flatten().tolist()
        assert [step.done for step in rollout.steps] == D.flatten().tolist() and 0 < D.sum() < T * N
        A = gae_by_definition(R, V[:T], V[T], D, gamma, lam)
        normalised = (A - A.mean()) / (A.std() + 1e-8)
        torch.testing.assert_close(rollout.advantages, normalised.flatten().float(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rollout.returns, (A + V[:T]).flatten().float(), atol=1e-4, rtol=1e-4)


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
    step_level = vldac.rl4vlm_loss(new, old, advantages, mask, 0.1)
    assert step_level.equal(policy_loss(new, old, advantages, mask, 0.1))


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
def test_the_thought_ends_where_the_action_s_key_begins(text, thought, model_folder):
    policy = make_policy(model_folder(), thought_coef=0.25)
    rest = policy.tokenizer(text[len(thought) :], add_special_tokens=False).input_ids
    ids = policy.tokenizer(thought, add_special_tokens=False).input_ids
    tokens, mask = pad([ids + rest + policy.stop_ids[:1].tolist(), rest + [9]])
    assert policy.decode(tokens, mask)[0] == text
    weights = vldac.thought_weights(policy, tokens, mask)
    split, length = (len(ids) if rest else int(mask[0].sum())), int(mask[0].sum())
    assert weights[0, :length].tolist() == [0.25] * split + [1.0] * (length - split)
    assert (weights[1, len(rest) + 1 :] == 0).all()  # padding


def test_a_token_in_which_the_key_begins_belongs_to_the_action():
    pieces = ['{"thoughts": "x', '", "act', 'ion": "go"}']

    def decode(ids):
        return "".join(pieces[i] for i in ids)

    policy = types.SimpleNamespace(args=types.SimpleNamespace(thought_coef=0.5))
    policy.tokenizer = types.SimpleNamespace(decode=decode)
    policy.decode = lambda tokens, mask: [decode(row) for row in tokens]
    weights = vldac.thought_weights(policy, torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    assert weights.tolist() == [[0.5, 1.0, 1.0]]


def test_leave_one_out_is_the_distance_from_the_others_mean():
    returns = torch.tensor([[1.0, 4.0, 7.0], [2.0, 2.0, 2.0]])
    assert loop.leave_one_out(returns).tolist() == [[1 - 5.5, 4 - 4, 7 - 2.5], [0, 0, 0]]


def test_loop_takes_the_mean_over_an_episode_s_tokens_and_drops_groups_without_signal(model_folder):
    """Two groups of two; the first has equal returns. A whole batch gives LOOP's objective exactly."""
    policy = make_policy(model_folder(), gamma=0.5)
    args = loop.Args(group_size=2)
    prompt = some_prompts(policy, [1])[0]
    tokens, mask = pad([[9 + i] * (1 + i % 3) for i in range(8)])

    def episodes_of(rewards):
        rows = zip(tokens, mask, sum(rewards, []), strict=True)
        steps = [vldac.Step("", prompt, t, m, "", None, float(reward), False) for t, m, reward in rows]
        return [[steps.pop(0) for _ in episode] for episode in rewards]

    assert loop.choose(policy, episodes_of([[0, 1], [0, 1], [1], [0, 0, 1]]), args) is None  # no discount
    rollout = loop.choose(policy, episodes_of([[0, 1], [0, 1], [1], [0, 0, 2]]), args)
    assert rollout.tokens.equal(tokens[4:])  # a step of the third episode, three of the fourth
    assert rollout.advantages.tolist() == [-1, 1, 1, 1]
    new, old = (0.3 * torch.randn(2, *rollout.mask.shape)).unbind()
    total = 0.0
    for steps in ([0], [1, 2, 3]):
        losses = []
        for b in steps:
            A = rollout.advantages[b].item()
            for i in range(int(rollout.mask[b].sum())):
                ratio = math.exp(new[b, i] - old[b, i])
                losses.append(-min(ratio * A, min(max(ratio, 1 / 1.1), 1.1) * A))
        total += sum(losses) / len(losses) / 4  # of four episodes, dropped ones included
    loss = loop.loop_loss(new, old, rollout.advantages, rollout.weights, 0.1)
    assert loss.item() == pytest.approx(total, abs=1e-6)
    new = new.masked_fill(rollout.mask == 0, math.nan)
    assert loop.loop_loss(new, old, rollout.advantages, rollout.weights, 0.1).equal(loss)


def test_a_run_of_loop(tmp_path, model_folder, monkeypatch):
    """Whole episodes, pairs from the same start, as many as the budget allows."""
    answers = itertools.cycle(['{"action": "right"}', '{"action": "right"}', '{"action": "left"}'])
    monkeypatch.setattr(VLMPolicy, "decode", lambda self, tokens, mask: [next(answers) for _ in tokens])
    argv = ["--env", "test_vldac:Corridor-v0", "--model", model_folder(), *SMALL, "--total_timesteps", 64]
    argv += ["--group_size", 2, "--eval_episodes", 2, "--runs_dir", tmp_path, "--run_name", "loop"]
    loop.main([*map(str, argv), "--device", "cpu"])
    first, *rows = rows_of(tmp_path / "loop")
    assert "eval/success_rate" in first and "eval/success_rate" in rows[-1]
    before = 0
    for row in rows:
        (one, two), lengths = row["episodes"], [episode["length"] for episode in row["episodes"]]
        assert one["seed"] == two["seed"] and row["charts/success_rate"] is not None
        assert row["global_step"] == before + sum(lengths) and before + 8 <= 64
        before = row["global_step"]
    assert before + 8 > 64 and any("losses/policy_loss" in row for row in rows)
    assert (tmp_path / "loop" / "adapter" / "adapter_config.json").exists()


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
    for text in ("1e1", "10.0", "-", "01", "1" * 5000):
        assert parse_action(f'{{"action": {text}}}', ["1", "10", "-", "+"]) is None
    assert [parse_action(f'{{"action": {text}}}', ["1", "10"]) for text in ("10", "1")] == ["10", "1"]


def test_case_decides_only_where_it_must():
    assert parse_action(answer("a"), ["A", "a"]) == "a"
    assert parse_action(answer("b"), ["B", "b "]) is None  # two would do, none is exact


def test_searches_only_where_they_are_offered():
    assert parse_action(answer("search[red shoes]"), ["search[...]", "click[back]"]) == "search[red shoes]"
    assert parse_action(answer("search[red shoes]"), ["click[back]"]) is None
    for words in ("", "x" * 101, "a]b", "a\x00b", "a\nb"):
        assert parse_action(answer(f"search[{words}]"), ["search[...]"]) is None


def test_the_parser_survives_hostile_text():
    """10,000 generated strings, and 2 MB of each hostile part: only admissible actions come out."""
    rng = random.Random(0)
    parts = [*':{}[]"\\ \n\x00\ud800\u202eé-9', '"action"', '"action":', '"action": "', '{"action":', '\\"']
    parts += ["\\u", "\\ud83d", "turn left", "10", "1e999", "NaN", "null", "true", "__import__('os')"]
    for _ in range(10_000):
        text = "".join(rng.choices(parts, k=rng.randrange(40)))
        assert parse_action(text, ["turn left", "10"]) in ("turn left", "10", None)
    for part in parts:
        flood = part * (2_000_000 // len(part))
        for text in (flood, f'{{"action": {flood}', f'{{"action": "{flood}', f'"action"{flood}:"turn left"'):
            assert parse_action(text, ["turn left"]) in ("turn left", None)


@registered
class Counter(envs.World):
    """A world of tests that shows how many actions were taken."""

    task, actions, size, limit = "count", ("go",), (8, 8), 10

    def _reset(self):
        pass

    def _step(self, action):
        return 0.0, False

    def _frame(self):
        return np.full((8, 8, 3), self.taken, np.uint8)

    def _text(self):
        return f"state {self.taken}"


def test_the_prompt_shows_the_newest_frames_once_and_counts_actions():
    player = vldac.Player(Args(env="test_vldac:Counter-v0", num_images=4))
    player.reset(0)
    for t in range(7):
        (turn,), frames = player.prompt()
        assert [int(frame[0, 0, 0]) for frame in frames] == list(range(max(0, t - 3), t + 1))
        assert [part["type"] for part in turn["content"]] == ["image"] * len(frames) + ["text"]
        text = turn["content"][-1]["text"]
        assert f"Actions taken: {t}. Actions left: {10 - t}." in text
        assert re.findall(r"state (\d)", text) == [str(t)]
        player.step("go" if t % 2 else None)


# --------------------------------------------------------------------------------------------- the worlds

try:
    envs.make_env("OneRoom")
    NO_OPENGL = ""
except envs.UserError as error:
    NO_OPENGL = str(error)
needs_opengl = pytest.mark.skipif(bool(NO_OPENGL), reason=NO_OPENGL)
WORLDS = [*(pytest.param(name, marks=needs_opengl) for name in envs.MINIWORLD), *envs.CARDS]


def play(env, seed, choose):
    """The records of an episode: image, text, reward, terminated, truncated, info. choose(info) -> action"""
    observation, info = env.reset(seed=seed)
    records = [(observation["image"].tobytes(), observation["text"], 0.0, False, False, info)]
    while not (records[-1][3] or records[-1][4]):
        observation, *rest = env.step(choose(records[-1][5]))
        records.append((observation["image"].tobytes(), observation["text"], *rest))
    return records


def randomly(seed):
    rng = random.Random(seed)
    return lambda info: rng.choice(info["actions"])


def hinted(env, seed):
    return play(env, seed, lambda info: env.hint())


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.filterwarnings("ignore")
def test_a_world_from_the_registry_keeps_gymnasium_s_rules(name):
    env = gym.make(f"vldac/{name}-v0").unwrapped
    check_env(env, skip_close_check=True)
    observation, info = env.reset(seed=0)
    again, *_ = env.step("")
    assert observation["image"] is not again["image"] and (observation["image"] == env.render()).all()
    assert info.keys() == {"task", "actions", "success", "left"} and info["success"] is False
    assert env.caption() and env.hint() in info["actions"]


@pytest.mark.parametrize("name", WORLDS)
def test_same_seed_and_actions_same_episode(name):
    """Bit for bit, whatever was played before and whatever is played in between in other worlds."""
    env, twin = envs.make_env(name), envs.make_env(name)
    names = [other for other in [*envs.MINIWORLD * (not NO_OPENGL), *envs.CARDS] if other != name]
    others = [envs.make_env(other) for other in names]
    alone = play(env, 5, randomly(1))
    play(twin, 6, randomly(2))
    choose = randomly(1)

    def interleaved(info):
        other = others[info["left"] % len(others)]
        other.reset(seed=9)
        other.step(other.actions[0])
        return choose(info)

    assert play(twin, 5, interleaved) == alone != play(env, 7, randomly(1))


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("action", ["", "no such thing", "TURN LEFT"])
def test_what_is_not_admissible_costs_a_step_and_ends_in_time(name, action):
    env = envs.make_env(name, invalid_reward=-0.25)
    records = play(env, 3, lambda info: action)
    assert len(records) == records[0][5]["left"] + 1 and records[-1][4] and not records[-1][5]["success"]
    assert all(record[2] == -0.25 for record in records[1:-1])
    if name not in ("EZPoints", "Points24"):  # their formula shows the blank
        assert all(record[0] == records[0][0] for record in records)


@pytest.mark.parametrize("name", ["Hallway", "OneRoom"])
@needs_opengl
def test_the_hints_solve_the_open_rooms(name):
    env = envs.make_env(name)
    assert sum(hinted(env, seed)[-1][5]["success"] for seed in range(40)) == 40


@needs_opengl
def test_miniworld_rewards_and_ends():
    env = envs.make_env("OneRoom", max_episode_steps=20)
    lost = play(env, 0, lambda info: "turn left")
    assert [record[2] for record in lost[1:]] == [0.0] * 19 + [-1.0] and lost[-1][3:5] == (False, True)
    assert [record[5]["left"] for record in lost] == list(range(20, -1, -1))
    env = envs.make_env("OneRoom")
    won = hinted(env, 1)
    steps = len(won) - 1
    assert won[-1][2] == pytest.approx(1 - 0.2 * steps / 180) and won[-1][3:5] == (True, False)
    last = hinted(envs.make_env("OneRoom", max_episode_steps=steps), 1)
    assert last[-1][3:5] == (True, True) and last[-1][5]["success"] and last[-1][2] == won[-1][2]
    actions = iter(["", "pickup", "done"])  # inadmissible ones are paid for too
    late = play(env, 1, lambda info: next(actions, env.hint()))
    assert late[-1][2] == pytest.approx(1 - 0.2 * (len(late) - 1) / 180) and late[-1][2] < won[-1][2]


@needs_opengl
def test_captions_of_miniworld_are_true():
    """Compared with where the simulator says the box is, in a room without walls between."""
    env, seen = envs.make_env("OneRoom"), []
    for seed in range(20):
        env.reset(seed=seed)
        choose = randomly(seed)
        for _ in range(10):
            box, agent = env.env.box.pos - env.env.agent.pos, env.env.agent.dir
            bearing = -math.degrees(math.atan2(-box[2], box[0]) - agent)  # to the right
            bearing = (bearing + 180) % 360 - 180
            words = "ahead" if abs(bearing) < 5 else "on the right" if 15 < bearing < 25 else ""
            words = (
                "on the left" if -25 < bearing < -15 else words or ("no red box" if abs(bearing) > 60 else "")
            )
            assert words in env.caption()
            seen.append(words)
            env.step(choose({"actions": env.actions[:3]}))
    assert set(seen) == {"ahead", "on the left", "on the right", "no red box", ""}


@needs_opengl
def test_every_red_box_world_can_be_made():
    for name in envs.RED_BOX:
        _, info = envs.make_env(name).reset(seed=0)
        assert info["left"] == {"OneRoomS6": 100, "OneRoomS6Fast": 50, "MazeS2": 96}.get(name, 128)


def test_without_opengl_the_message_names_the_packages():
    """As on a Linux machine without it: pyglet's loader does not find the library."""
    pytest.importorskip("pyglet")
    code = """
import pyglet.lib, envs
load = pyglet.lib.loader.load_library
def missing(*names, **options):
    if "GL" in names:
        raise ImportError('Library "GL" not found.')
    return load(*names, **options)
pyglet.lib.load_library = pyglet.lib.loader.load_library = missing
envs.make_env("OneRoom")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("envs.UserError") and "apt-get install" in line and "--env NumberLine" in line


def test_importing_the_worlds_imports_no_torch_and_no_simulator():
    code = "import envs, sys; envs.make_env('NumberLine').reset(seed=0); "
    code += "print([m for m in ('torch', 'miniworld', 'pyglet') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"


def test_number_line_rules():
    env = envs.make_env("NumberLine", max_episode_steps=50)
    starts = set()
    for seed in range(300):
        _, info = env.reset(seed=seed)
        starts.add((env.current, env.target))
    assert info["left"] == 10  # the game's own limit
    assert len(starts) == 30 and all(current != target for current, target in starts)
    env.current, env.target = 0, 2
    played = []
    for action in ("-", "+", "-", "up", "+", "+"):  # blocked at the edge, nearer, away, no symbol of the game
        *_, reward, terminated, truncated, info = env.step(action)
        played.append((env.current, reward, terminated, info["success"]))
    assert played[:4] == [
        (0, -1, False, False),
        (1, 0, False, False),
        (0, -1, False, False),
        (0, -1, False, False),
    ]
    assert played[4:] == [(1, 0, False, False), (2, 1, True, True)] and not truncated


def test_number_line_shows_the_target_above_the_current_number():
    env = envs.make_env("NumberLine")
    env.reset(seed=0)
    frames = []
    for env.current, env.target in [(1, 4), (2, 4), (1, 3)]:
        frames.append(env.render())
    same = [
        [(frame[half] == frames[0][half]).all() for half in (slice(150), slice(150, 300))] for frame in frames
    ]
    assert same == [[True, True], [True, False], [False, True]]


def formula_game(name, ranks, symbols):
    """Rewards of playing symbols on a table with these ranks, the last step's result, and the world."""
    env = envs.make_env(name)
    env.reset(seed=0)
    env.ranks = ranks
    env._deal()
    results = [env.step(symbol) for symbol in symbols]
    return [result[1] for result in results], results[-1], env


def test_ez_points_rules():
    rewards, last, _ = formula_game("EZPoints", [12, 2], ["10", "+", "2", "="])
    assert rewards == [0, 0, 0, 10] and last[2] and last[4]["success"]
    rewards, last, _ = formula_game("EZPoints", [12, 2], ["10", "="])
    assert rewards == [0, -1] and last[2] and not last[4]["success"]  # 10 is not 12
    rewards, _, env = formula_game("EZPoints", [12, 2], ["10", "10", "3", "what", "+", "2", "="])
    assert rewards[:4] == [0, -1, -1, -1]  # used up, not there, no symbol
    assert env.formula == ["10", " ", " ", " ", "+", "2"]
    assert rewards[6] == -1  # the seventh action ends the game, whatever was written
    _, last, _ = formula_game("EZPoints", [12, 2], ["2"] * 7)
    assert last[1] == -1 and last[2:4] == (False, True)
    _, last, env = formula_game("EZPoints", [6, 6], ["6", "+"])
    assert last[0]["text"] == "Formula: 6 +" and env.caption() == "the cards are 6, 6; formula: 6 +"


def test_every_ez_points_deal_is_solved_by_its_hints():
    env, pairs = envs.make_env("EZPoints"), set()
    for seed in range(200):
        records = hinted(env, seed)
        assert records[-1][5]["success"] and len(records) == 5
        pairs.add(tuple(sorted(env.numbers)))
    assert pairs == {(2, 10), (5, 7), (3, 9), (4, 8), (3, 4), (2, 6), (6, 6)}


@pytest.mark.parametrize("name, ranks, cheat", [
    ("Points24", [2, 4, 1, 1], "2 4 + 1 - 1"),  # digits glued to 24
    ("Points24", [5, 2, 1, 1], "5 * * 2 - 1"),  # **
    ("Points24", [10, 4, 1, 1], "10 / / 4"),  # //
    ("EZPoints", [6, 6], "- 6"),  # a sign
])  # fmt: skip
def test_the_loopholes_of_python_s_evaluator_are_closed(name, ranks, cheat):
    rewards, last, _ = formula_game(name, ranks, [*cheat.split(), "="])
    assert envs.evaluate(cheat.split()) is None
    assert rewards[-1] == -1 and last[2] and not last[4]["success"]


def test_arithmetic_is_exact():
    eight_thirds = "8 / ( 3 - 8 / 3 )".split()  # 23.999999999999993 in floating point
    assert formula_game("Points24", [8, 3, 8, 3], [*eight_thirds, "="])[0][-1] == 10
    for wrong in ("", "(", ")", "1 +", "( 1", "1 )", "( )", "1 ( 2 )", "1 / 0", "( 1 ) ( 2 )", "+"):
        assert envs.evaluate(wrong.split()) is None


def test_points24_rules():
    rewards, _, env = formula_game("Points24", [1, 11, 12, 13], ["1", "10", "10", "10", "10"])
    assert env.numbers == [1, 10, 10, 10] and rewards == [0, 0, 0, 0, -1] and env.formula[-1] == " "
    records = play(env, 0, lambda info: "(")
    assert len(records) == 23 and records[-1][2] == -1 and records[-1][4]
    solved = sum(hinted(env, seed)[-1][5]["success"] for seed in range(100))
    assert 60 <= solved <= 85  # about 73 % of the deals have a solution


ACE, FIVE, SIX, SEVEN, EIGHT = (1, "A", "C"), (5, "5", "S"), (6, "6", "D"), (7, "7", "H"), (8, "8", "C")
TEN = (10, "K", "H")


def test_blackjack_rules():
    env = envs.make_env("Blackjack")
    hands = {(ACE, TEN): 21, (ACE, ACE): 12, (TEN, FIVE): 15, (TEN, TEN, FIVE): 0, (ACE, TEN, FIVE): 16}
    assert {hand: env.score(hand) for hand in hands} == hands
    for player, dealer, action, drawn, reward in [
        ([TEN, TEN], [TEN, EIGHT], "stand", None, 1),
        ([TEN, FIVE], [TEN, TEN], "stand", None, -1),
        ([TEN, TEN], [TEN, TEN], "stand", None, 0),
        ([TEN, TEN], [TEN, TEN], "hit", FIVE, -1),  # over 21
        ([TEN, FIVE], [TEN, SIX], "stand", TEN, 1),  # the dealer must draw below 17, and busts
        ([TEN, FIVE], [TEN, SEVEN], "stand", TEN, -1),  # and not from 17 on
    ]:
        env = envs.make_env("Blackjack")
        env.reset(seed=1)
        env.player, env.dealer, env._card = player.copy(), dealer.copy(), lambda drawn=drawn: drawn
        _, paid, terminated, _, info = env.step(action)
        assert (paid, terminated, info["success"]) == (reward, True, reward == 1)
    wins = np.mean([hinted(envs.make_env("Blackjack"), seed)[-1][5]["success"] for seed in range(400)])
    assert 0.36 <= wins <= 0.50  # basic strategy: 0.43


def test_the_hidden_card_of_the_dealer_is_not_shown():
    env = envs.make_env("Blackjack")
    first, _ = env.reset(seed=4)
    caption = env.caption()
    env.dealer[1] = ACE
    assert (env.render() == first["image"]).all() and env.caption() == caption
    env.dealer[0] = ACE
    assert (env.render() != first["image"]).any() and env.caption() != caption


# ------------------------------------------------------------------------------ other people's environments


@registered
class Stairs(gym.Env):
    """With numbered actions from 5 on, a large frame, and a hint of its own."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = gym.spaces.Discrete(5), gym.spaces.Discrete(2, start=5)
    time_limit = 6

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observe(self):
        return self.place

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(1, 3))
        return self.observe(), {}

    def step(self, action):
        self.place += {5: -1, 6: 1}[action]
        info = {"height": self.place, "success": self.place == 4}
        return self.observe(), float(self.place), self.place == 4, False, info

    def hint(self):
        return 6

    def render(self):
        return np.full((600, 900, 3), 40 * self.place, np.uint8)


@registered
class Gamble(Stairs):
    """A coin, and no success flag."""

    def step(self, action):
        return 0, self.np_random.choice([-1.0, 1.0]), True, False, {}


@registered
class NamedStairs(Stairs):
    """The same with an enum of actions and a mission, as Minigrid has them."""

    actions = enum.IntEnum("Moves", {"down": 5, "up": 6})

    def observe(self):
        return {"place": self.place, "mission": "climb"}


@registered
class ToldStairs(Stairs):
    def get_action_meanings(self):  # as Atari has it
        return ["DOWN", "UP"]


@pytest.mark.parametrize("name, task, actions", [
    ("Stairs", "get the highest return in Stairs-v0", ["5", "6"]),
    ("NamedStairs", "climb", ["down", "up"]),
    ("ToldStairs", "get the highest return in ToldStairs-v0", ["DOWN", "UP"]),
])  # fmt: skip
def test_an_environment_with_discrete_actions(name, task, actions):
    env = envs.make_env(f"test_vldac:{name}-v0")
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space and observation["image"].shape == (299, 448, 3)
    assert (info["task"], info["actions"], info["left"]) == (task, actions, 6) and "success" not in info
    assert env.get_wrapper_attr("hint")() == actions[1]
    start = env.unwrapped.place
    again, reward, *ends, info = env.step("")
    assert (reward, ends, info["left"], env.unwrapped.place) == (0.0, [False, False], 5, start)
    assert (again["image"] == observation["image"]).all()
    *_, info = env.step(actions[0])
    assert env.unwrapped.place == start - 1 == info["height"] and info["success"] is False
    assert env.step("")[4]["success"] is False  # a step without an action forgets no flag
    up = play(env, 0, lambda info: actions[1])
    assert up[-1][2:5] == (4.0, True, False) and len(up) == 5 - start and up[-1][5]["success"] is True
    idle = play(env, 0, lambda info: "")
    assert len(idle) == 7 and idle[-1][3:5] == (False, True)
    short = envs.make_env(f"test_vldac:{name}-v0", max_episode_steps=3, invalid_reward=-2.0)
    assert [record[2] for record in play(short, 0, lambda info: "")] == [0.0, -2.0, -2.0, 0.0]
    assert envs.make_env(f"test_vldac:{name}-v0", max_episode_steps=9).reset(seed=0)[1]["left"] == 6


FOREIGN = {
    "CartPole-v1": (["0", "1"], 500),
    "FrozenLake-v1": (["0", "1", "2", "3"], 100),
    "CliffWalking-v1": (["0", "1", "2", "3"], 128),
    "minigrid:MiniGrid-Empty-5x5-v0": ("left right forward pickup drop toggle done".split(), 100),
    "minigrid:MiniGrid-DoorKey-5x5-v0": ("left right forward pickup drop toggle done".split(), 250),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_environments_that_others_wrote(name, tmp_path, model_folder):
    pytest.importorskip("pygame", reason="other people's worlds need: pip install pygame-ce")
    if name.startswith("minigrid"):
        pytest.importorskip("minigrid", reason="Minigrid needs: pip install minigrid")
    env = envs.make_env(name)
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space and observation["image"].std() > 10
    assert (info["actions"], info["left"]) == FOREIGN[name]
    assert ("goal" in info["task"]) == name.startswith("minigrid") != (name in info["task"])
    assert play(env, 0, randomly(0)) == play(env, 0, randomly(0))
    _, rows = run(tmp_path, "--env", name, "--model", model_folder(), *SMALL, "--max_episode_steps", 3)
    assert rows[-1]["charts/episodic_return"] is not None and "charts/positive_return" in rows[-1]


def broken(**changes):
    """A corridor but for `changes`: functions of what reset (o, i) or step (o, r, t, c, i) returns."""

    class Broken(Corridor):
        def reset(self, *, seed=None, options=None):
            return changes.get("reset", lambda *result: result)(*super().reset(seed=seed))

        def step(self, action):
            return changes.get("step", lambda *result: result)(*super().step(action))

    return Broken


def lose_the_way(*_):
    raise RuntimeError("lost its way")


def image(function):
    return lambda o, i: (o | {"image": function(o["image"])}, i)


def without(name):
    return lambda o, i: (o, {key: x for key, x in i.items() if key != name})


class NoSeed(Corridor):
    def reset(self, options=None):
        return super().reset()


class OwnChance(Corridor):
    def reset(self, *, seed=None, options=None):
        return super().reset()


class ChannelsFirst(Corridor):
    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (3, 28, 28), np.uint8), text=AnyText())


class Unseen(Stairs):
    metadata = {"render_modes": []}


class Blank(Stairs):
    def render(self):
        return None


BROKEN = {
    "no task": (broken(reset=without("task")), 'reset must say what to achieve in info["task"]'),
    "no actions": (broken(reset=without("actions")), "actions\"] must be a list of the actions now"),
    "numbers as actions": (broken(reset=lambda o, i: (o, i | {"actions": [0]})), "each a str, not [0]"),
    "old reset": (broken(reset=lambda o, i: o), "reset must return (observation, info), not dict"),
    "old step": (broken(step=lambda o, r, t, c, i: (o, r, t, i)), "not enough values to unpack"),
    "wrong shape": (broken(reset=image(lambda x: x[:9])), "the image given is uint8 (9, 28, 3)"),
    "float frame": (broken(reset=image(lambda x: x / 255)), "the image given is float64 (28, 28, 3)"),
    "channels first": (broken(reset=image(lambda x: x.T)), "the image given is uint8 (3, 28, 28)"),
    "such a space": (ChannelsFirst, "must be Discrete, or its observation_space Dict(image="),
    "no text": (broken(reset=lambda o, i: (o | {"text": None}, i)), 'and "text", a str'),
    "raises in reset": (broken(reset=lose_the_way), "lost its way"),
    "raises in step": (broken(step=lose_the_way), "lost its way"),
    "no seed keyword": (NoSeed, "unexpected keyword argument 'seed'"),
    "ignores its seed": (OwnChance, "differ: reset must call super().reset(seed=seed)"),
    "reward NaN": (broken(step=lambda o, r, t, c, i: (o, math.nan, t, c, i)), "a finite number, not nan"),
    "no frames": (Unseen, 'no render mode "rgb_array"'),
    "blank frames": (Blank, "render must return a uint8 frame (height, width, 3), not NoneType"),
    "no environment": (lambda: 7, "must inherit from the gymnasium.Env class"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_world_that_breaks_the_contract(name, tmp_path, model_folder, capsys, monkeypatch):
    """One line that says what to change, or the world's own traceback, with a note that replays it."""
    world, words = BROKEN[name]
    monkeypatch.setitem(gym.registry, "Broken-v0", gym.envs.registration.EnvSpec("Broken-v0", world))
    monkeypatch.setattr(vldac, "VLMPolicy", lambda args: pytest.fail("a model was loaded"))
    argv = ["--env", "Broken-v0", "--model", model_folder(), "--runs_dir", tmp_path / "runs"]
    if name in ("raises in reset", "raises in step", "no seed keyword", "old step", "no environment"):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            vldac.main([str(word) for word in argv])
        assert words in str(caught.value)
        note = "to reproduce: env.reset(seed=0), then env.step through ["
        assert name == "no environment" or note in caught.value.__notes__[0]
    else:
        assert words in refused(argv, capsys)
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------- ALFWorld, for real

KITCHEN = {  # receptacle: what is in it at the start; the last two are opened first
    "CounterTop": ["Mug", "Apple"], "SinkBasin": [], "Shelf": [], "Fridge": ["Egg"], "Cabinet": ["Plate"],
}  # fmt: skip
GAMES = {  # task: (object, where it must be in the end, a way to get there)
    "pick_and_place_simple": ("Mug", "Shelf", []),
    "pick_clean_then_place_in_recep": ("Mug", "Shelf", ["go to sinkbasin 1", "clean mug 1 with sinkbasin 1"]),
    "pick_cool_then_place_in_recep": ("Apple", "Shelf", ["go to fridge 1", "cool apple 1 with fridge 1"]),
}


UNSEEN = "pick_cool_then_place_in_recep"  # the only task of split eval


def thor_name(kind, number):
    """ALFRED's name of an object, as its PDDL spells it; the game shows 'mug 1'."""
    head, tail = ("Sink", "_bar_SinkBasin") if kind == "SinkBasin" else (kind, "")
    place = "_bar_".join(f"_plus_0{number}_dot_{part}" for part in ("00", "25", "50"))
    return f"{head}_bar_{place}{tail}"


def write_games(root):
    """ALFWorld games of three kinds in one small kitchen, from what the package ships."""
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
    for split, task in [*(("train", task) for task in GAMES), ("valid_unseen", UNSEEN)]:
        thing, place, middle = GAMES[task]
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


def words_of(text):
    return {"clean", "cool"} & set(re.split("[_ ]", text))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_alfworld_s_tasks_are_done_by_admissible_commands(split, alfworld_data):
    """Every kind of task, met by seed; case and spaces of the answer do not matter."""
    env, done, argv = gym.make("vldac/ALFWorld-v0", split=split).unwrapped, set(), list(sys.argv)
    check_env(env, skip_close_check=True)
    for seed in range(40):
        _, info = env.reset(seed=seed)
        [kind] = [kind for kind in GAMES if words_of(kind) == words_of(info["task"])]
        done.add(kind)
        commands = walkthrough(*GAMES[kind])
        for t, command in enumerate(commands, 1):
            action = parse_action(json.dumps({"action": f" {command.upper()}"}), info["actions"])
            assert action == command
            _, reward, terminated, truncated, info = env.step(action)
            last = t == len(commands)
            assert (reward, terminated, info["success"]) == (float(last), last, last) and not truncated
            assert info["left"] == 50 - t and env.caption()
        if len(done) == len(GAMES):
            break
    assert done == (set(GAMES) if split == "train" else {UNSEEN}) and sys.argv == argv


def test_alfworld_repeats_itself(alfworld_data):
    one, other = (envs.make_env("ALFWorld", max_episode_steps=12) for _ in range(2))
    for seed in (3, 2**30 + 7, 3):
        assert play(one, seed, randomly(seed)) == play(other, seed, randomly(seed))


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


def test_alfworld_without_games_says_how_to_get_them(alfworld_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    line = refused(["--env", "ALFWorld", "--model", "tiny", "--runs_dir", tmp_path / "runs"], capsys)
    assert "alfworld-download" in line


@pytest.mark.parametrize("name", ["alfworld", "alfworld.agents", "playwright.sync_api"])
def test_a_missing_package_is_named(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    envs.load_alfworld.cache_clear()
    env = "WebShop" if name.startswith("playwright") else "ALFWorld"
    line = refused(["--env", env, "--model", "tiny", "--runs_dir", tmp_path / "runs"], capsys)
    assert ("playwright install" if env == "WebShop" else "pip install alfworld") in line
    envs.load_alfworld.cache_clear()


# --------------------------------------------------------------------- WebShop, a real browser and its pages

CATALOGUE = {  # asin: (name, options)
    "B0RED": ("Red mug", {"size": ["small", "large"], "colour": ["red", "dark red"]}),
    "B0BLUE": ("Blue mug", {}),
}
SHOPPING = [("a blue mug for tea", "B0BLUE", {})] * 2  # of split eval
SHOPPING += [("a red mug, large", "B0RED", {"size": "large"}), ("a blue mug", "B0BLUE", {})] * 3


def button(address, name, field=""):
    button = f'<button class="btn">{name}</button>'
    return f'<form method="post" action="{quote(address)}">{field}{button}</form>'


def page_of(path, sentences):
    """A page with WebShop's addresses and the marks that the adapter goes by."""
    kind, *rest = path[1:].split("/")
    session = rest[0] if rest else kind
    task, right, wanted = SHOPPING[int(session.removeprefix("fixed_"))]
    body = '<html><head><script src="https://scripts.invalid/jquery.js"></script></head><body>'
    body += f'<div id="instruction-text"><h4>Instruction:<br>{task}</h4></div>'
    if kind == session:
        return body + button(f"/{session}", "Search", '<input id="search_input" name="search_query">')
    if kind == "done":
        _, asin, chosen = rest
        chosen = ast.literal_eval(chosen)
        reward = (asin == right) * (1 + all(chosen.get(k) == v for k, v in wanted.items())) / 2
        return f'<h1>Thank you</h1><h3 id="reward">Your score<pre>{reward}</pre></h3>'
    body += button(f"/{session}", "Back to Search")
    if kind == "search_results":
        _, keywords, page = rest
        for asin, (name, _) in CATALOGUE.items():
            if set(name.lower().split()) & set(ast.literal_eval(keywords)):
                address = quote(f"/item_page/{session}/{asin}/{keywords}/{page}/" + "{}")
                body += f'<h4><a class="product-link" href="{address}">{asin}</a> {name}</h4>'
        return body
    _, asin, keywords, page, chosen = rest
    body += button(f"/search_results/{session}/{keywords}/{page}", "&lt; Prev")
    for option, values in CATALOGUE[asin][1].items():
        for value in values:
            then = ast.literal_eval(chosen) | {option: value}
            address = quote(f"/item_page/{session}/{asin}/{keywords}/{page}/{then}")
            body += f'<input type="radio" name="{option}" value="{value}" data-url="{address}">{value}'
    return body + button(f"/done/{session}/{asin}/{chosen}", "Buy Now") + "It holds tea. " * sentences


class Shop(http.server.BaseHTTPRequestHandler):
    silent = "no address"  # what is never answered
    closed = threading.Event()
    sentences = 3

    def log_message(self, *_):
        pass

    def do_POST(self):
        words = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        if "search_query" not in words:
            return self.do_GET()
        keywords = quote(str(words["search_query"][0].lower().split()))
        self.send_response(302)
        self.send_header("Location", f"/search_results{self.path}/{keywords}/1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        if self.silent in self.path:
            self.closed.wait()
        try:
            status, body = 200, page_of(unquote(self.path), self.sentences).encode()
        except (IndexError, ValueError):
            status, body = 500, b"Internal Server Error"
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def shop(monkeypatch):
    playwright = pytest.importorskip("playwright.sync_api", reason="a browser needs: pip install playwright")
    try:
        envs.browser()
    except playwright.Error as error:
        pytest.skip(f"there is no browser: {str(error).splitlines()[0]}")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Shop)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WEBSHOP_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WEBSHOP_GOALS", str(len(SHOPPING)))
    monkeypatch.setattr(Shop, "closed", threading.Event())
    yield server
    Shop.closed.set()
    server.shutdown()
    server.server_close()


def buy(env, info, words):
    """Search, or click names; the last step's result."""
    for word in words:
        answer = json.dumps({"thoughts": "", "action": word if "[" in word else f"click[{word}]"})
        action = parse_action(answer, info["actions"])
        assert action is not None, (word, info["actions"])
        *result, info = env.step(action)
    return *result, info


@pytest.mark.filterwarnings("ignore")
def test_shopping_in_a_real_browser(shop):
    env = gym.make("vldac/WebShop-v0").unwrapped
    check_env(env)
    purchases = [
        ("a red mug, large", ["search[Red Mug]", "B0RED", "large", "buy now"], 1.0),
        ("a red mug, large", ["search[mug]", "b0red", "Dark Red", "buy now"], 0.5),
        ("a red mug, large", ["search[mug]", "b0blue", "< prev", "b0blue", "buy now"], 0.0),
        ("a blue mug", ["search[<r> no/thing]", "back to search", "search[blue]", "b0blue", "buy now"], 1.0),
    ]
    seeds = {env.reset(seed=seed)[1]["task"]: seed for seed in range(20)}
    for task, words, pays in purchases:
        observation, info = env.reset(seed=seeds[task])
        assert info["task"] == task and info["actions"] == ["search[...]"] and task in observation["text"]
        assert env.hint().startswith("search[a ")
        observation, reward, terminated, truncated, info = buy(env, info, words)
        assert (reward, terminated, truncated) == (pays, True, False) and info["success"] == (pays == 1)
        assert observation["image"].shape == (640, 640, 3) and "Thank you" in observation["text"]
    env.close()


def test_what_is_on_the_page_is_admissible_and_nothing_else(shop, monkeypatch):
    monkeypatch.setattr(Shop, "sentences", 400)
    env = envs.make_env("WebShop", max_episode_steps=6)
    env.reset(seed=0)
    for action in ("", "click[buy now]", "search[...]", "search[]", "click[search]"):
        assert env.step(action)[1:4] == (0.0, False, False)
    assert env.step("search[mug]")[1:4] == (0.0, False, True)
    _, info = env.reset(seed=0)
    observation, *_, info = buy(env, info, ["search[mug]", "b0red"])
    assert info["actions"] == [
        "click[back to search]", "click[< prev]", "click[buy now]",
        "click[small]", "click[large]", "click[red]", "click[dark red]",
    ]  # fmt: skip
    assert len(observation["text"]) < 4100 and observation["text"].endswith("more characters)")
    before, *_ = env.step("click[large]")
    after, *_ = env.step("click[dark red]")
    assert before["text"].startswith("Chosen: large\n")
    assert after["text"].startswith("Chosen: large, dark red\n")
    assert (before["image"] != after["image"]).any()
    env.close()


def test_seeds_are_goals_of_a_shop_s_split(shop, monkeypatch):
    tasks = {"train": {"a red mug, large", "a blue mug"}, "eval": {"a blue mug for tea"}}
    for split in tasks:
        env = envs.make_env("WebShop", split=split)
        found = [env.reset(seed=seed)[1]["task"] for seed in range(15)]
        assert set(found) == tasks[split] and env.reset(seed=0)[1]["task"] == found[0]
        env.close()
    monkeypatch.setenv("WEBSHOP_GOALS", "3000")
    goals = [envs.make_env("WebShop", split=split).goals for split in ("train", "eval")]
    assert goals == [range(1500, 3000), range(500)]


def test_a_shop_in_trouble(shop, monkeypatch, capsys, tmp_path):
    """A page never comes, a goal is not there, the server ends: the note has seed and actions."""
    player = vldac.Player(Args(env="WebShop"))
    player.env.page.set_default_timeout(1000)
    player.reset(3)
    player.step("search[mug]")
    monkeypatch.setattr(Shop, "silent", "item_page")
    with pytest.raises(Exception, match="Timeout") as caught:
        player.step("click[b0red]")
    assert (
        "env.reset(seed=3), then env.step through ['search[mug]', 'click[b0red]']"
        in caught.value.__notes__[0]
    )
    monkeypatch.setattr(f"{__name__}.SHOPPING", [])
    with pytest.raises(envs.UserError, match="WebShop answers 500 at http://.*: .* WEBSHOP_GOALS right"):
        player.reset(4)
    player.env.close()
    monkeypatch.setenv("WEBSHOP_URL", "http://127.0.0.1:9")
    line = refused(["--env", "WebShop", "--model", "tiny", "--runs_dir", tmp_path / "runs"], capsys)
    assert "no answer from WebShop" in line and "flask --app" in line


# -------------------------------------------------------------------------------------------- a whole run


@registered
class Signal(envs.World):
    """A world of one-step episodes for tests: the text says which way is right."""

    task, actions, size, limit = "obey", ("left", "right"), (28, 28), 4

    def _reset(self):
        self.way = self.actions[int(self.np_random.integers(2))]

    def _step(self, action):
        self.success = action == self.way
        return float(self.success), True

    def _frame(self):
        return np.zeros((28, 28, 3), np.uint8)

    def _text(self):
        return f"Go {getattr(self, 'way', 'on')}!"


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def run(tmp_path, *argv, name="run"):
    """A run through the command line; returns its folder and the rows of its log."""
    argv = [*argv, "--runs_dir", tmp_path, "--run_name", name, "--device", "cpu"]
    vldac.main([str(word) for word in argv])
    return tmp_path / name, rows_of(tmp_path / name)


SMALL = "--num_envs 2 --num_steps 4 --total_timesteps 16 --minibatch_size 8 --max_new_tokens 6".split()
SMALL += "--value_hidden 16 --max_image_tokens 16 --lora_rank 4".split()
CHARTS = """success_rate episodic_return episodic_length invalid_action_rate cut_share response_length
learning_rate env_steps_per_second"""
LOSSES = """policy_loss value_loss kl_old kl_base entropy approx_kl clipfrac explained_variance advantage_std
grad_norm_lora grad_norm_value ratio_first"""


@pytest.mark.parametrize("name", WORLDS)
def test_a_run_writes_what_it_says(name, tmp_path, model_folder, capsys):
    argv = ["--env", name, "--model", model_folder(), *SMALL, "--eval_episodes", 2, "--max_episode_steps", 3]
    folder, (first, *updates) = run(tmp_path, *argv)
    assert [row["update"] for row in (first, *updates)] == [0, 1, 2]
    assert [row["global_step"] for row in (first, *updates)] == [0, 8, 16]
    assert 0 <= first["eval/success_rate"] <= 1 and "eval/success_rate" in updates[1]
    assert "eval/success_rate" not in updates[0]
    assert all(row["losses/ratio_first"] < 1e-4 for row in updates)
    keys = {f"charts/{k}" for k in CHARTS.split()} | {f"losses/{k}" for k in LOSSES.split()}
    keys |= {f"time/{k}" for k in ("collect", "score", "update")}
    assert keys <= updates[0].keys()
    sample = updates[0]["samples"][0]
    assert sample["prompt"].startswith("Task: ") and sample.keys() >= {"response", "action", "reward"}
    assert json.loads((folder / "args.json").read_text())["env"] == name
    names = {path.name for path in folder.iterdir()}
    assert names == {"args.json", "log.jsonl", "checkpoint.pt", "adapter", "best"}
    printed = capsys.readouterr().out
    assert f"python vldac.py --resume {folder}" in printed and "on 2 fixed seeds: success_rate" in printed


def test_a_sample_that_did_not_parse_is_always_shown(tmp_path, model_folder, monkeypatch):
    """Of eight responses of each update, the fourth fails."""
    answers = itertools.cycle(['{"action": "left"}'] * 3 + ["what?"] + ['{"action": "right"}'] * 4)
    monkeypatch.setattr(VLMPolicy, "decode", lambda self, tokens, mask: [next(answers) for _ in tokens])
    _, rows = run(tmp_path, "--env", "test_vldac:Corridor-v0", "--model", model_folder(), *SMALL)
    for row in rows[1:]:
        assert [sample["response"] for sample in row["samples"]] == ['{"action": "left"}', "what?"]
        assert row["charts/invalid_action_rate"] == 1 / 8


def test_the_log_tells_the_rate_the_warm_up_and_the_seeds(tmp_path, model_folder):
    """The cosine from the first to the last update; LoRA still in warm-up; a seed per episode."""
    argv = ["--env", "test_vldac:Corridor-v0", "--model", model_folder(), *SMALL, "--total_timesteps", 40]
    argv += "--learning_rate 0.01 --final_learning_rate 0.001 --value_warmup 2".split()
    _, (_, *rows) = run(tmp_path, *argv)
    rates = [0.001 + 0.009 * (1 + math.cos(math.pi * u / 4)) / 2 for u in range(5)]
    assert [row["charts/learning_rate"] for row in rows] == pytest.approx(rates)
    assert [row["losses/grad_norm_lora"] > 0 for row in rows] == [False, False, True, True, True]
    assert [row["losses/kl_base"] > 0 for row in rows] == [False, False, False, True, True]
    seeds = [episode["seed"] for row in rows for episode in row["episodes"]]
    possible = [vldac.training_seed(0, n, episode) for n in range(2) for episode in range(12)]
    assert len(seeds) >= 4 and len(set(seeds)) == len(seeds) and set(seeds) <= set(possible)


def test_there_is_no_success_rate_before_every_player_has_ended_an_episode(tmp_path, model_folder):
    """A limit of 10 and 4 steps per update: the second player's first that counts ends in update 4."""
    argv = ["--env", "NumberLine", "--model", model_folder(), *SMALL, "--total_timesteps", 48]
    _, (_, *rows) = run(tmp_path, *argv)
    ended, rates = [len(row["episodes"]) for row in rows], [row["charts/success_rate"] for row in rows]
    assert ended == [0, 0, 1, 1, 1, 0]  # at steps 10, 15 and 20; the one at 5 had begun at random
    assert rates[:3] == [None] * 3 and rates[3] == 0.0


def test_players_start_within_an_episode_reached_by_random_actions(model_folder):
    args = options(model_folder(), env="test_vldac:Corridor-v0", num_envs=5)
    players = [vldac.Player(args, index) for index in range(5)]
    for player in players:
        player.random_start()
    assert [len(player.actions) for player in players][:2] == [0, 1]
    assert all(0 <= len(player.actions) < 5 and player.counts == (not player.actions) for player in players)
    assert {action for player in players for action in player.actions} == {"left", "right"}


def without_times(rows):
    return [{k: v for k, v in row.items() if "time/" not in k and "per_second" not in k} for row in rows]


def test_a_taken_name_gets_a_number_and_equal_seeds_give_equal_logs(tmp_path, model_folder):
    for _ in range(2):
        run(tmp_path, "--env", "NumberLine", "--model", model_folder(), *SMALL)
    logs = [without_times(rows_of(tmp_path / name)) for name in ("run", "run-2")]
    assert logs[0] == logs[1] and (tmp_path / "run-2" / "adapter").exists()


def test_a_run_starts_from_an_adapter_that_opens_with_plain_peft(tmp_path, model_folder):
    argv = ["--env", "NumberLine", "--model", model_folder(), *SMALL, "--value_warmup", 0]
    folder, _ = run(tmp_path, *argv, "--learning_rate", 0.01, name="first")
    adapter = str(folder / "adapter")
    plain = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model_folder()), adapter)
    learned = [p for name, p in plain.named_parameters() if "lora_" in name]
    found = lora(VLMPolicy(options(model_folder(), adapter=adapter)))
    assert all(a.equal(b) for a, b in zip(learned, found, strict=True)) and any(p.any() for p in found[1::2])
    _, rows = run(tmp_path, *argv, "--adapter", adapter, name="second")
    assert rows[1]["losses/kl_base"] > 0  # the base is the model without its adapter


def test_the_numbers_go_to_weights_and_biases_too(tmp_path, model_folder, monkeypatch):
    sent = []
    fake = types.ModuleType("wandb")
    fake.run = None
    fake.init = lambda **options: sent.append(options) or setattr(fake, "run", 1)
    fake.Table = lambda columns, data: data
    fake.log = lambda row, step: sent.append((step, row))
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    argv = ["--env", "NumberLine", "--model", model_folder(), *SMALL]
    _, rows = run(tmp_path, *argv, "--track", "true")
    assert sent[0]["name"] == "run" and [step for step, _ in sent[1:]] == [0, 8, 16]
    assert sent[2][1]["losses/policy_loss"] == rows[1]["losses/policy_loss"]
    assert sent[2][1]["samples"][0][0] == rows[1]["samples"][0]["prompt"]


# ------------------------------------------------------------------------------- stopping and resuming

# Four updates; evaluation is half of the time, so of one short episode.
LONG = [*SMALL, "--total_timesteps", 32, "--eval_episodes", 1, "--eval_every", 2]
LONG += ["--learning_rate", 0.01, "--value_warmup", 1]


def files(folder):
    """Every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_runs(one, other):
    """Whether two run folders hold the same: log (but for the times), adapters, checkpoint."""
    assert without_times(rows_of(one)) == without_times(rows_of(other))
    for name in ("adapter", "best"):
        a, b = (load_file(folder / name / "adapter_model.safetensors") for folder in (one, other))
        assert a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)
    a, b = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, other))
    assert all(a[key] == b[key] for key in ("update", "best", "recent", "players"))
    assert all(a["weights"][name].equal(b["weights"][name]) for name in a["weights"])
    moments = [[s["exp_avg_sq"] for s in x["optimizer"]["state"].values()] for x in (a, b)]
    assert all(x.equal(y) for x, y in zip(*moments, strict=True))


@registered
class Troubled(Corridor):
    """A corridor where something happens: what the file TROUBLE names says, while it is there.

    It holds a trouble's name and the number of its step in a training episode, counted over all players.
    """

    limit, steps = 4, 0

    def step(self, action):
        file = Path(os.environ.get("TROUBLE", "nowhere"))
        trouble, number = file.read_text().split() if file.exists() else ("none", 0)
        observation, reward, terminated, truncated, info = super().step(action)
        if self.np_random_seed >= 2**30:
            Troubled.steps += 1
            if Troubled.steps == int(number):
                reward = TROUBLES[trouble]() or reward
        return observation, reward, terminated, truncated, info


def raises():
    raise RuntimeError("the simulator has lost its way")


def limit_file_size():
    resource = pytest.importorskip("resource", reason="limits of file sizes are Unix's")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # a checkpoint is larger


TROUBLES = {
    "raises": raises,
    "hangs": lambda: time.sleep(600),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "disk_full": limit_file_size,
    "endless_reward": lambda: 1e30,
    "no_number": lambda: math.nan,
}


def forked(function, ranks=1):
    """function() in processes forked from this one, which share all that is imported; their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                Troubled.steps = 0
                signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
                vldac.RANK, vldac.WORLD_SIZE = rank, ranks
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                values = (str(rank), str(rank), str(ranks), "127.0.0.1", port)
                os.environ |= dict(zip(names, values, strict=True))
                function()
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 1
                print(stop.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, model_folder):
    """whole_run(algo) -> the options and the folder of an uninterrupted run of four updates, made once."""
    made = {}

    def get(algo="vldac"):
        argv = ["--env", "test_vldac:Troubled-v0", "--model", model_folder(), "--algo", algo, *LONG]
        if algo not in made:
            made[algo] = run(tmp_path_factory.mktemp(algo), *argv, name="whole")[0]
        return argv, made[algo]

    return get


# With a check of the world first, a step in training, then 8 steps per update: 20 is within the third.
@pytest.mark.parametrize(
    "trouble, status, words",
    [
        ("raises", 1, r"lost its way\nto reproduce: env.reset\(seed=\d+\), then env.step through \["),
        ("hangs", 1, r"Timeout \(0:00:01\)!"),
        ("killed", -signal.SIGKILL, ""),
        ("interrupted", 1, "stopped; to go on: python vldac.py --resume"),
        ("disk_full", 1, "File too large|unexpected pos|write"),
        ("no_number", 2, "step must pay a finite number, not nan"),
        ("endless_reward", 1, "non-finite"),
    ],
)
def test_whatever_stops_a_run_it_goes_on_as_if_it_had_not_been(
    trouble, status, words, tmp_path, whole_run, monkeypatch, capfd
):
    """Caused by a world in the third update: stopped, mended, resumed, equal to a run that was left alone."""
    argv, whole = whole_run()
    monkeypatch.setenv("TROUBLE", str(tmp_path / "trouble"))
    (tmp_path / "trouble").write_text(f"{trouble} {20 if trouble != 'disk_full' else 10}")
    timeout = ["--env_timeout", 1] if trouble == "hangs" else []
    assert forked(lambda: run(tmp_path, *argv, *timeout, name="part")) == [status]
    assert re.search(words, capfd.readouterr().err)
    (tmp_path / "trouble").unlink()
    part = (tmp_path / "part").rename(tmp_path / "moved")
    checkpoint = torch.load(part / "checkpoint.pt", weights_only=True)
    assert checkpoint["update"] == (0 if trouble == "disk_full" else 2)
    with open(part / "log.jsonl", "a") as log:
        log.write('{"update": 3, "global_st')  # a row that the kill has torn
    vldac.main(["--resume", str(part)])
    same_runs(whole, part)


def test_rl4vlm_is_resumed_too(tmp_path, whole_run, monkeypatch):
    argv, whole = whole_run("rl4vlm")
    monkeypatch.setenv("TROUBLE", str(tmp_path / "trouble"))
    (tmp_path / "trouble").write_text("killed 20")
    assert forked(lambda: run(tmp_path, *argv, name="part")) == [-signal.SIGKILL]
    (tmp_path / "trouble").unlink()
    vldac.main(["--resume", str(tmp_path / "part")])
    same_runs(whole, tmp_path / "part")
    assert without_times(rows_of(whole)) != without_times(rows_of(whole_run("vldac")[1]))


def test_a_finished_run_and_one_that_has_saved_nothing_can_be_resumed(tmp_path, whole_run):
    for name in ("finished", "fresh"):
        folder = shutil.copytree(whole_run()[1], tmp_path / name)
        if name == "fresh":
            (folder / "checkpoint.pt").unlink()
        vldac.main(["--resume", str(folder)])
        same_runs(whole_run()[1], folder)


def refused(argv, capsys) -> str:
    """The last line of a program that refuses its options: exit status 2 and no traceback."""
    with pytest.raises(SystemExit) as stop:
        vldac.main([str(word) for word in argv])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_only_how_a_run_is_computed_may_change(tmp_path, whole_run, capsys):
    folder = shutil.copytree(whole_run()[1], tmp_path / "run")
    for name, value in {"seed": 1, "gamma": 0.5, "num_envs": 4, "model": "tiny"}.items():
        assert f"its --{name} is" in refused(["--resume", folder, f"--{name}", value], capsys)
    assert files(folder) == files(whole_run()[1])
    vldac.main(["--resume", str(folder), "--micro_batch_size", "2", "--num_envs", "2"])


def test_a_checkpoint_cannot_run_code(whole_run, tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path / "touched").touch, ()

    folder = shutil.copytree(whole_run()[1], tmp_path / "run")
    torch.save({"update": Evil()}, folder / "checkpoint.pt")
    with pytest.raises(pickle.UnpicklingError):
        vldac.main(["--resume", str(folder)])
    assert not (tmp_path / "touched").exists()


def test_evaluating_changes_nothing_and_the_best_adapter_is_kept(tmp_path, whole_run, monkeypatch):
    argv, _ = whole_run()
    rates = iter([0.2, 0.6, 0.4, 0.6, 0.1])
    kept, save = [], vldac.save_adapter
    monkeypatch.setattr(
        vldac, "summary", lambda episodes: {"success_rate": next(rates), "episodic_return": 0}
    )
    monkeypatch.setattr(vldac, "save_adapter", lambda p, folder: (kept.append(folder.name), save(p, folder)))
    often, rows = run(tmp_path, *argv, "--eval_every", 1, name="often")
    never, plain = run(tmp_path, *argv, "--eval_episodes", 0, name="never")
    assert [row.pop("eval/success_rate") for row in rows] == [0.2, 0.6, 0.4, 0.6, 0.1]
    assert all(row.pop("eval/episodic_return") == 0 for row in rows)
    assert without_times(rows) == without_times(plain)
    assert kept == ["best", "best", "adapter", "adapter"]  # best at 0.2 and at the first 0.6
    assert not (never / "best").exists()


# ------------------------------------------------------------------------------------ several processes


def gradients_of_sixteen(model, file):
    """This process's part of a made-up rollout of 16 environments; saves advantages and gradients."""
    T, N, ranks = 2, 16 // vldac.WORLD_SIZE, vldac.WORLD_SIZE
    args = options(model, num_envs=16, minibatch_size=32, update_epochs=1, max_grad_norm=1e9)
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    policy = make_policy(model)
    rng = np.random.default_rng(0)
    prompts = some_prompts(policy, [1 + b % 3 for b in range(16)])
    tokens, mask = pad([rng.integers(9, 99, 2 + b % 5).tolist() for b in range(T * 16)])
    rewards, dones = torch.tensor(rng.normal(size=(T, 16))).float(), torch.tensor(rng.random((T, 16)) < 0.3)
    mine = list(range(vldac.RANK * N, (vldac.RANK + 1) * N))
    rows = [16 * t + n for t in range(T) for n in mine]
    prompts_of_rows = [prompts[row % 16] for row in rows]
    last_prompts = [prompts[15 - n] for n in mine]
    paid, ended = rewards[:, mine].flatten().tolist(), dones[:, mine].flatten().tolist()
    rollout = rollout_of(prompts_of_rows, tokens[rows], mask[rows], paid, ended, last_prompts)
    stats = vldac.compute_advantages(policy, rollout, args)
    optimizer = optimizer_of(policy, lr=1e-9)
    vldac.update(policy, optimizer, rollout, args, value_only=False)
    parts = vldac.gather([rollout.advantages.view(T, N)])
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if vldac.RANK == 0:
        saved = {"advantages": torch.cat(parts, 1), "std": stats["advantage_std"], "gradients": gradients}
        torch.save(saved, file)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def test_two_processes_of_eight_have_the_gradient_of_one_of_sixteen(tmp_path, model_folder):
    gradients_of_sixteen(model_folder(), tmp_path / "one")
    assert forked(lambda: gradients_of_sixteen(model_folder(), tmp_path / "two"), ranks=2) == [0, 0]
    one, two = [torch.load(tmp_path / name, weights_only=True) for name in ("one", "two")]
    torch.testing.assert_close(two["advantages"], one["advantages"])
    assert two["std"] == pytest.approx(one["std"])
    assert any(gradient.abs().max() > 1e-3 for gradient in one["gradients"])
    torch.testing.assert_close(two["gradients"], one["gradients"], rtol=1e-4, atol=1e-6)


def test_a_run_of_two_processes(tmp_path, model_folder, monkeypatch, capfd):
    """Totals are totals, seeds differ, one process writes; killed and resumed, the log is the same."""
    argv = ["--env", "test_vldac:Troubled-v0", "--model", model_folder()]
    argv += [*LONG, "--num_envs", 4, "--num_steps", 2]
    assert forked(lambda: run(tmp_path, *argv, name="whole"), ranks=2) == [0, 0]
    rows = rows_of(tmp_path / "whole")
    assert [row["global_step"] for row in rows] == [0, 8, 16, 24, 32]
    assert capfd.readouterr().out.count("to go on after any stop") == 1
    seeds = [episode["seed"] for row in rows[1:] for episode in row["episodes"]]
    assert len(seeds) == len(set(seeds)) and all(row["losses/ratio_first"] < 1e-4 for row in rows[1:])
    assert len(torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)["players"]) == 4

    monkeypatch.setenv("TROUBLE", str(tmp_path / "trouble"))
    (tmp_path / "trouble").write_text("killed 11")  # of each process's 16
    statuses = forked(lambda: run(tmp_path, *argv, name="part"), ranks=2)
    assert -signal.SIGKILL in statuses and 0 not in statuses
    (tmp_path / "trouble").unlink()
    assert forked(lambda: vldac.main(["--resume", str(tmp_path / "part")]), ranks=2) == [0, 0]
    same_runs(tmp_path / "whole", tmp_path / "part")


# --------------------------------------------------------------------------------------- hostile output

HOSTILE = [
    '{"thoughts": "' + "a" * 1_000_000 + '", "action": "+"}',
    "\x00\x01\x1b[2J\x1b]0;title\x07\r\n\u202e\ufeff" * 100,
    '"action": "' * 50_000,
    '{"action": "../../../etc/passwd"}',
    "$(touch hacked); `touch hacked`; __import__('os').system('touch hacked')",
    '{"action": ' + "9" * 100_000 + "}",
    "[" * 100_000,
    "<|im_end|><|image_pad|><|vision_start|>",
    '{"action": "<|image_pad|>"}',
]


@registered
class Echo(Signal):
    """A world that shows what the model wrote, as a web page might."""

    actions = ("left", "right", *HOSTILE[7:])

    def _text(self):
        return HOSTILE[1][:40] + "<|image_pad|><|im_end|><|vision_start|>" + self.way


def test_whatever_the_model_writes_is_only_text(tmp_path, model_folder, monkeypatch, capsys):
    """Through parser, world, log, transcript and the next prompt; nothing is run, no file is named by it."""
    answers = itertools.cycle(HOSTILE)
    monkeypatch.setattr(VLMPolicy, "decode", lambda self, tokens, mask: [next(answers) for _ in tokens])
    monkeypatch.chdir(tmp_path)
    argv = ["--env", "test_vldac:Echo-v0", "--model", model_folder(), *SMALL, "--total_timesteps", 40]
    folder, rows = run(tmp_path, *argv)
    samples = [sample for row in rows[1:] for sample in row["samples"]]
    assert {sample["response"] for sample in samples} <= set(HOSTILE) and len(samples) == 10
    (folder / "log.jsonl").read_text(encoding="ascii")  # JSON escapes keep the terminal safe
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert "\x1b" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- the options

WRONG = [
    ("--env OneRom", "Did you mean: `OneRoom`?"),
    ("--env", "expected one argument"),
    ("--env Nothing-v0", "Environment `Nothing` doesn't exist. The worlds of envs.py: Hallway, OneRoom"),
    ("--env no_such_module:World-v0", "No module named 'no_such_module'"),
    ("--env math:World-v0", "Environment `World` doesn't exist"),
    ("--env Pendulum-v1", "its action_space must be Discrete"),
    ("--model no/such/model-here", "--model no/such/model-here"),
    ("--model nowhere/at/all", "--model nowhere/at/all"),
    ("--model empty", "--model empty"),
    ("--adapter empty", "adapter_config.json"),
    ("--adapter nowhere", "adapter_config.json"),
    ("--gam 1", "--gam"),
    ("--lerning_rate 1", "--lerning_rate"),
    ("NumberLine", "NumberLine"),
    ("--gamma 1.5", "--gamma must be between 0 and 1"),
    ("--gamma nan", "--gamma must be between"),
    ("--learning_rate nan", "--learning_rate must be above 0"),
    ("--learning_rate 0", "--learning_rate must be above 0"),
    ("--learning_rate fast", "invalid float value: 'fast'"),
    ("--temperature 0", "--temperature must be above 0"),
    ("--algo ppo", "invalid choice: 'ppo'"),
    ("--num_envs 0", "--num_envs must be at least 1"),
    ("--num_envs 1.5", "invalid int value: '1.5'"),
    ("--max_episode_steps 0", "--max_episode_steps must be at least 1"),
    ("--minibatch_size 100", "512 must be a multiple of --minibatch_size"),
    ("--total_timesteps 5", "at most --total_timesteps"),
    ("--track perhaps", "--track"),
    ("--seed -1", "--seed must be at least 0"),
    ("--minibatch_size 0", "--minibatch_size must be at least 1"),
    ("--kl_ref new", "invalid choice: 'new'"),
    ("--dtype float16", "invalid choice: 'float16'"),
    ("--resume nowhere", "nowhere is not the folder of a run"),
    ("--resume empty", "empty is not the folder of a run"),
    ("--resume torn", "torn is not the folder of a run"),
]


@pytest.mark.parametrize("argv, words", WRONG, ids=[argv for argv, _ in WRONG])
def test_wrong_invocations(argv, words, tmp_path, capsys, monkeypatch):
    """One line that says what to do, exit status 2, no traceback, nothing left behind, no model loaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir(), (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "args.json").write_text('{"env": "Number')
    monkeypatch.setattr(vldac, "VLMPolicy", lambda args: pytest.fail("a model was loaded"))
    before = files(tmp_path)
    given = ["--env", "NumberLine"] * ("--env" not in argv)
    assert words in refused(["--device", "cpu", *given, *argv.split()], capsys)
    assert files(tmp_path) == before and not (tmp_path / "runs").exists()


def test_precedence_is_command_line_world_toy_default():
    args = vldac.parse_args("--env NumberLine --model tiny --gamma 0.5 --device cpu".split())
    assert args.gamma == 0.5  # given, though the world says 1
    assert args.learning_rate == vldac.TOY["learning_rate"] != Args.learning_rate
    assert args.gae_lambda == 1.0 and args.total_timesteps == 12_288  # the world's
    assert args.clip_coef == Args.clip_coef
    assert vldac.parse_args(["--env", "EZPoints", "--device", "cpu"]).total_timesteps == 51_200
    assert vldac.parse_args(["--device", "cpu"]).total_timesteps == 25_600  # the toy's
    args = vldac.parse_args(f"--env NumberLine --gamma {Args.gamma} --device cpu --stop_grad false".split())
    assert args.gamma == Args.gamma  # given counts, also where it equals the default
    assert args.stop_grad is False and args.value_hidden == [256, 256]


def test_every_option_has_a_line_of_help(capsys):
    with pytest.raises(SystemExit):
        vldac.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "newest frames in the prompt (default: 4)" in text and "alpha (default: 0.15)" in text


def test_without_assets_the_toy_says_so(tmp_path):
    for name in ("vldac.py", "envs.py"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "vldac.py", "--env", "NumberLine", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.strip().endswith("without it, give a --model")


# ------------------------------------------------------------------------------- the toy, and LOOP


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """A run of the toy in a world of one word, by two real processes of torchrun, on a fresh cache."""
    folder = tmp_path_factory.mktemp("toy")
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node=2 vldac.py".split()]
    command += "--env test_vldac:Signal-v0 --model tiny --device cpu --total_timesteps 3072".split()
    command += "--num_envs 64 --num_steps 4 --minibatch_size 64 --value_warmup 1 --eval_episodes 100".split()
    command += ["--run_name", "run"]
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command += ["--runs_dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_toy_learns(toy_run):
    """The README's promise in its smallest form: obeying one word, from chance to nearly always."""
    first, *rows = rows_of(toy_run[0] / "run")
    last = rows[-1]
    assert first["eval/success_rate"] < 0.7 and last["eval/success_rate"] > 0.9
    assert np.mean([row["charts/invalid_action_rate"] for row in rows]) < 0.05


def test_one_process_teaches_the_toy_and_the_run_keeps_it(toy_run, tmp_path, monkeypatch, capfd):
    folder, printed = toy_run
    assert printed.count("round 1") == 1 and len(list((folder / "cache" / "vldac").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    argv = ["--env", "test_vldac:Signal-v0", "--num_envs", 64, "--num_steps", 2, "--minibatch_size", 64]
    one, rows = run(tmp_path, *argv, "--total_timesteps", 256, "--eval_episodes", 2, name="one")
    assert "round 1" not in capfd.readouterr().out  # from the cache, and no lesson
    assert files(one / "base") == files(folder / "run" / "base")
    assert json.loads((one / "args.json").read_text())["model"] == "base"
    moved = one.rename(tmp_path / "moved")
    (moved / "checkpoint.pt").unlink()
    vldac.main(["--resume", str(moved)])
    assert without_times(rows_of(moved)) == without_times(rows)


def test_what_every_prompt_of_the_toy_repeats_is_one_token():
    prompts = [f"Task: go.\nActions taken: {k}.\nThink." for k in range(20)]
    tokenizer = toy.build_tokenizer(prompts, ['{"thoughts": "it is ahead"}'])
    ids = tokenizer(prompts[7]).input_ids
    assert tokenizer.decode(ids) == prompts[7]
    words = [tokenizer.decode([i]) for i in ids]
    assert words[0] == "Task: go.\n" and words[-1] == "Think." and "7" in words
    assert len(tokenizer('{"thoughts": "it is ahead"}').input_ids) > 1  # what it says stays in pieces


def test_the_toy_s_lesson_has_random_actions_hints_and_idle_steps():
    args = Args(env="NumberLine", num_envs=4, num_images=1)
    examples, rng = toy.play(args, 400, seed=0), random.Random(0)
    hinted = np.mean([e.hint in json.loads(e.response(rng))["action"] for e in examples])
    assert 0.55 < hinted < 0.70  # 1/4 + 3/4 * 1/2
    assert all(json.loads(e.response(rng))["thoughts"] == e.caption for e in examples)
    assert len({e.caption for e in examples}) > 20


# -------------------------------------------------------------------------------------------- evaluation


def evaluated(path, *words):
    """What eval.py writes."""
    evaluation.main([*map(str, words), "--out", str(path)])
    return json.loads(path.read_text())


def test_an_evaluation_of_a_run_and_of_its_start(toy_run, tmp_path):
    """The trained toy obeys, the one it started from guesses; each evaluation repeats itself."""
    folder, results = toy_run[0] / "run", {}
    for command, mode in itertools.product(("run", "start"), ("sampled", "greedy")):
        words = [command, folder, "--episodes", 60, "--mode", mode]
        result, again = (evaluated(tmp_path / f"{k}.json", *words) for k in range(2))
        assert result == again and [episode["seed"] for episode in result["episodes"]] == list(range(60))
        results[command, mode] = result
        wins = sum(episode["success"] for episode in result["episodes"])
        assert result["summary"]["success_rate"] == wins / 60 and (wins > 50) == (command == "run")
        other = evaluated(tmp_path / "2.json", *words, "--seed", 1, "--num_envs", 7)["episodes"]
        if mode == "greedy":
            assert other == result["episodes"]  # no chance, whatever shares a forward pass
        elif command == "start":
            assert other != result["episodes"]
    adapter = evaluated(
        tmp_path / "3.json", "start", folder, "--adapter", folder / "adapter", "--episodes", 60
    )
    assert adapter["episodes"] == results["run", "sampled"]["episodes"]


def test_a_run_that_was_interrupted_is_evaluated_from_its_checkpoint(toy_run, tmp_path, capsys):
    whole = evaluated(tmp_path / "whole.json", "run", toy_run[0] / "run", "--episodes", 60)
    part = shutil.copytree(toy_run[0] / "run", tmp_path / "part")
    shutil.rmtree(part / "adapter")
    found = evaluated(tmp_path / "part.json", "run", part, "--episodes", 60)
    assert found["episodes"] == whole["episodes"]
    assert found["weights"] == "checkpoint.pt, update 12" and found["weights"] in capsys.readouterr().out
    (part / "checkpoint.pt").unlink()
    with pytest.raises(SystemExit):
        evaluation.main(["run", str(part)])
    assert "part has saved nothing yet" in capsys.readouterr().err


def test_the_hints_are_a_ceiling_and_chance_is_a_floor(tmp_path):
    """In NumberLine a random player arrives in time in 0.611 of the games (exactly, over all starts)."""
    words = ["--env", "NumberLine", "--episodes", 60]
    ceiling = evaluated(tmp_path / "hint.json", "hint", *words)
    floor = evaluated(tmp_path / "random.json", "random", *words)
    assert ceiling["summary"]["success_rate"] == 1.0 and ceiling["mode"] is None
    assert 0.45 < floor["summary"]["success_rate"] < 0.75
    again = evaluated(tmp_path / "again.json", "random", *words, "--num_envs", 4)
    assert again["episodes"] == floor["episodes"]


def test_compare_is_paired_and_refuses_what_differs(tmp_path, capsys):
    paths = {}
    for name, player, *words in (
        ["hint", "hint"], ["random", "random"], ["more", "hint", "--episodes", 9],
        ["world", "hint", "--env", "EZPoints"], ["limit", "hint", "--max_episode_steps", 5],
    ):  # fmt: skip
        paths[name] = tmp_path / f"{name}.json"
        result = evaluated(paths[name], player, "--env", "NumberLine", "--episodes", 12, *words)
        if name == "random":
            lost = [episode["success"] for episode in result["episodes"]].count(False)
    capsys.readouterr()
    evaluation.main(["compare", str(paths["random"]), str(paths["hint"])])
    p = 2 / 2**lost if lost else 1
    assert (
        f"B - A: {lost / 12:+.3f} ({lost} won, 0 lost, exact McNemar p = {p:.2g})" in capsys.readouterr().out
    )
    assert lost > 0
    for name, reason in {"more": "seeds", "world": "env", "limit": "max_episode_steps"}.items():
        with pytest.raises(SystemExit) as stop:
            evaluation.main(["compare", str(paths["hint"]), str(paths[name])])
        assert stop.value.code == 2 and f"differ in {reason}" in capsys.readouterr().err


def test_an_animation_shows_every_step_and_the_outcome(tmp_path):
    """The last picture says success in green or no success in red."""
    words = ["hint", "--env", "NumberLine", "--episodes", 8, "--gif", 8, "--max_episode_steps", 2]
    result = evaluated(tmp_path / "r.json", *words)
    for episode in result["episodes"]:
        with Image.open(tmp_path / f"r-{episode['seed']}.gif") as gif:
            assert gif.n_frames == episode["length"] + 1 and gif.size == (640, 320)
            gif.seek(gif.n_frames - 1)
            red, green, _ = np.asarray(gif.convert("RGB"), int).transpose(2, 0, 1)
        assert ((green > red + 60).any(), (red > green + 60).any()) == (
            episode["success"],
            not episode["success"],
        )
    assert 0 < result["summary"]["success_rate"] < 1


def test_a_world_without_a_flag_has_positive_returns(tmp_path):
    result = evaluated(tmp_path / "r.json", "random", "--env", "test_vldac:Gamble-v0", "--episodes", 40)
    returns = [episode["return"] for episode in result["episodes"]]
    assert set(returns) == {-1.0, 1.0} and "success_rate" not in result["summary"]
    assert result["summary"]["positive_return"] == returns.count(1.0) / 40
    assert ": positive return 0." in evaluation.describe(result)


def test_learning_curves(tmp_path, capsys, monkeypatch):
    """Two seeds in a row of the table, by hand: 0.8 is reached at step 40 and 30; a world without a flag."""
    pytest.importorskip("matplotlib", reason="plots need: pip install matplotlib")
    for seed, rates in enumerate([[None, 0.2, 0.6, 1.0], [None, 0.4, 0.8, 0.6]]):
        folder = tmp_path / f"NumberLine-tiny-{seed}"
        folder.mkdir()
        (folder / "args.json").write_text(json.dumps({"env": "NumberLine", "seed": seed}))
        rows = [
            {"global_step": 10 * k, "charts/success_rate": rate, "charts/invalid_action_rate": 0.25}
            for k, rate in enumerate(rates, 1)
        ]
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flagless = shutil.copytree(folder, tmp_path / "lake-Lake-v0-tiny-1")
    (flagless / "args.json").write_text(json.dumps({"env": "lake:Lake-v0", "seed": 1}))
    log = (flagless / "log.jsonl").read_text().splitlines()
    log[1:] = [line.replace("success_rate", "positive_return") for line in log[1:]]
    (flagless / "log.jsonl").write_text("\n".join(log))
    folders = sorted(map(str, tmp_path.iterdir()))
    level = tmp_path / "hint.json"
    evaluated(level, "hint", "--env", "NumberLine", "--episodes", 2)
    evaluation.main(["plot", *folders, str(level), "--out", str(tmp_path / "c.png")])
    rows = capsys.readouterr().out.splitlines()
    assert (
        "| NumberLine | tiny | 0 / 1 | 1.00 / 0.60 | 0.60 / 0.65 | 40 / 30 | 0.750 / 0.750 | - / - |" in rows
    )
    assert "| lake:Lake-v0 | tiny | 1 | 0.60 | 0.65 | 30 | 0.750 | - |" in rows
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.width > 300
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["plot", *folders])
    assert stop.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, reason",
    [
        ("run nowhere", "nowhere is not the folder of a run"),
        ("model --env NumberLine", "a toy belongs to a run"),
        ("hint --env OneRom", "Did you mean: `OneRoom`?"),
        ("hint --env test_vldac:Counter-v0", "test_vldac:Counter-v0 gives no hint"),
        ("random --env NumberLine --episodes 0", "--episodes must be at least 1"),
        ("random --env NumberLine --num_envs 0", "--num_envs must be at least 1"),
        ("model --env NumberLine --mode best", "invalid choice: 'best'"),
        ("compare missing.json missing.json", "missing.json is not a result"),
        ("compare other.json other.json", "it was not written by eval.py"),
        ("plot empty", "empty is not the folder of a run"),
        ("plot", "plot needs the folder of a run"),
    ],
)
def test_a_wrong_evaluation_is_one_line(words, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        evaluation.main(words.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and reason in error.splitlines()[-1] and "Traceback" not in error


@pytest.mark.parametrize("words", ["", "compare a.json", "evaluate runs/NAME"])
def test_without_a_command_it_prints_its_usage(words, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluation.main(words.split())
    assert stop.value.code == 2 and "python eval.py run runs/NAME" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- the README

README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_program(name):
    """The README's Python block whose first line is `# name`."""
    (block,) = re.findall(rf"```python\n(# {re.escape(name)}\b.*?)```", README, re.S)
    return block


def test_the_readme_s_world_runs(tmp_path, model_folder, monkeypatch):
    (tmp_path / "my_world.py").write_text(readme_program("my_world.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    world = envs.make_env("my_world:Doors-v0", max_episode_steps=30)
    assert play(world, 0, randomly(0)) == play(world, 0, randomly(0))
    assert len(play(world, 0, lambda info: "no such action")) == 31  # costs its step, changes nothing
    assert play(world, 0, lambda info: world.get_wrapper_attr("hint")())[-1][5]["success"]
    argv = ["--env", "my_world:Doors-v0", "--model", model_folder(), *SMALL, "--max_episode_steps", 4]
    assert run(tmp_path, *argv)[1][-1]["charts/success_rate"] is not None


def test_the_readme_s_program_acts(tmp_path, model_folder, monkeypatch, capsys):
    run(tmp_path / "runs", "--env", "NumberLine", "--model", model_folder(), *SMALL, name="NumberLine-tiny-0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "act.py").write_text(readme_program("act.py"))
    runpy.run_path(str(tmp_path / "act.py"))
    assert "->" in capsys.readouterr().out.splitlines()[-1]


def test_the_readme_names_every_option_and_deviation():
    """Options and functions it names exist; its deviations are those of vldac.py, number by number."""
    numbers = re.findall(r"# Deviation (\d+):", (ROOT / "vldac.py").read_text())
    assert numbers == [str(k) for k in range(1, len(numbers) + 1)]
    assert re.findall(r"^(\d+)\. \*\*", README, re.M) == numbers
    known = {field.name for field in dataclasses.fields(loop.Args)} | {"help"}
    known |= {field.name for field in dataclasses.fields(evaluation.Args)}
    for option in re.findall(r"`--(\w+)", README):
        assert option in known
    for name in re.findall(r"`vldac\.(?!py)(\w+)", README):
        assert hasattr(vldac, name)
