"""The tests, in the order in which one learns VL-DAC. Plain `pytest` runs all; no network, no GPU.

    the maths                        GAE and each loss against a slow loop; what the KL terms estimate
    the policy                       nine families of models: sampling = scoring, LoRA, placeholders, padding
    what only a GPU needs            a convolution as a product
    the update                       ratio 1 to the bit, Eq. 6, warm-up, micro-batches
    from the collection to the loss  three rollouts computed again from seeds and answers; time-outs
    the prompt and the parser        what can be copied is parsed, and hostile text does no harm
    a whole run                      its folder, its log, its evaluations
    stopping and resuming            killed, full disk, NaN: bit for bit as if it had not been
    the options, the toy, evaluation
    the worlds                       MiniWorld and the cards; other people's; ALFWorld and WebShop for real
    the pages                        their programs, commands, links and tables

`Corridor` is a world, `start` a whole run, and `write_model`, at the end, makes a model of any family. The
programs in extras/ have their tests there.
"""

import ast
import collections
import contextlib
import dataclasses
import doctest
import functools
import http.server
import importlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, quote, unquote

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # PyTorch that uses a GPU cannot train in forked processes
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("WORLD_SIZE", None)  # some clusters set it

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast

import envs
import eval as evaluation
import vldac
from vldac import Args, VLMPolicy, build_prompt, gae, kl_base, kl_old, parse_action, policy_loss, value_loss

ROOT = Path(__file__).parent
sys.path.append(str(ROOT / "extras"))
import loop  # noqa: E402
import rl4vlm  # noqa: E402
import toy  # noqa: E402

torch.set_num_threads(1)  # the models here are too small to share
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # as in vldac.py


@pytest.mark.parametrize("module", [vldac, envs, evaluation], ids=lambda module: module.__name__)
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


try:
    envs.make_env("OneRoom")
    NO_OPENGL = ""
except envs.UserError as error:
    NO_OPENGL = str(error)
needs_opengl = pytest.mark.skipif(bool(NO_OPENGL), reason=NO_OPENGL)


# ---------------------------------------------------------------------------------------------- the maths


def gae_by_definition(rewards, values, dones, gamma, lam):
    """A_t = sum of (gamma lam)^(k-t) delta_k, from t to the end of its episode. The values are (T + 1, N)."""
    advantages = torch.zeros_like(rewards)
    T, N = rewards.shape
    for n, t in itertools.product(range(N), range(T)):
        for k in range(t, T):
            following = 0.0 if dones[k, n] else values[k + 1, n]
            delta = rewards[k, n] + gamma * following - values[k, n]
            advantages[t, n] += (gamma * lam) ** (k - t) * delta
            if dones[k, n]:
                break
    return advantages


@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_its_definition(gamma, lam):
    torch.manual_seed(0)
    rewards = torch.randn(7, 4, dtype=torch.float64)
    values = torch.randn(8, 4, dtype=torch.float64)
    dones = torch.rand(7, 4) < 0.3
    dones[-1] = torch.tensor([True, False, True, False])
    values[-1, dones[-1]] = math.nan  # of no account where the last step ended an episode
    advantages, returns = gae(rewards, values[:-1], values[-1], dones, gamma, lam)
    expected = gae_by_definition(rewards, values, dones, gamma, lam)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, advantages + values[:-1])


def random_tokens(B, R):
    """newlogprobs (with gradient), logprobs, advantages, mask with 1 to R tokens per step. In float64."""
    torch.manual_seed(0)
    lengths = torch.randint(1, R + 1, (B, 1))
    mask = (torch.arange(R) < lengths).long()
    old = -3 * torch.rand(B, R, dtype=torch.float64)
    new = (old + 0.3 * torch.randn(B, R, dtype=torch.float64)).requires_grad_()
    return new, old, torch.randn(B, dtype=torch.float64), mask


def mean_of_means(term, new, old, advantages, mask):
    """The mean over steps of the mean over a step's tokens of term(log ratio, advantage)."""
    steps = []
    for b, length in enumerate(mask.sum(1).tolist()):
        logratios = (new[b] - old[b]).tolist()[:length]
        terms = [term(logratio, advantages[b].item()) for logratio in logratios]
        steps.append(sum(terms) / length)
    return sum(steps) / len(steps)


def surrogate(logratio, advantage):
    """PPO's clipped loss of one token."""
    ratio = math.exp(logratio)
    clipped = min(max(ratio, 0.9), 1.1)
    return -min(ratio * advantage, clipped * advantage)


def kl_old_term(logratio, _):
    """Eq. 5 for one token."""
    ratio = math.exp(logratio)
    return ratio * logratio - (ratio - 1)


def kl_base_term(logratio, _):
    """k3 for one token; the difference it is of has the other sign."""
    return math.exp(-logratio) + logratio - 1


PER_TOKEN = {  # of (new, old, advantages, mask); and the same for one token
    "policy": (lambda *batch: policy_loss(*batch, clip_coef=0.1), surrogate),
    "kl_old": (lambda new, old, _, mask: kl_old(new, old, mask), kl_old_term),
    "kl_base": (lambda new, old, _, mask: kl_base(new, old, mask), kl_base_term),
}


@pytest.mark.parametrize("B, R", [(5, 3), (4, 4), (1, 6)])  # B = R is where (B,) would broadcast over tokens
@pytest.mark.parametrize("name", PER_TOKEN)
def test_losses_equal_the_loop(name, B, R):
    loss, term = PER_TOKEN[name]
    batch = random_tokens(B, R)
    expected = mean_of_means(term, *batch)
    assert loss(*batch).item() == pytest.approx(expected, abs=1e-9)
    new, *others = batch
    assert torch.autograd.gradcheck(lambda new: loss(new, *others), new)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_what_lies_under_the_padding_changes_nothing(name, junk):
    loss, _ = PER_TOKEN[name]
    new, old, advantages, mask = random_tokens(4, 4)
    clean = loss(new, old, advantages, mask)
    dirty_new = new.detach().masked_fill(mask == 0, junk).requires_grad_()
    dirty_old = old.masked_fill(mask == 0, -junk)
    dirty = loss(dirty_new, dirty_old, advantages, mask)
    assert dirty.equal(clean)
    [gradient] = torch.autograd.grad(clean, new)
    [dirty_gradient] = torch.autograd.grad(dirty, dirty_new)
    assert dirty_gradient.equal(gradient)


def test_shapes_that_would_mislead_are_refused():
    with pytest.raises(ValueError, match="token in every step"):
        vldac.step_mean(torch.zeros(2, 2), torch.tensor([[1, 1], [0, 0]]))
    with pytest.raises(ValueError, match=r"\(2, 1\), \(2,\)"):
        value_loss(torch.zeros(2, 1), torch.zeros(2))


def mean_estimate(estimator, new, other, probabilities):
    """The mean of an estimate over tokens that are drawn with these probabilities; all are (vocabulary,)."""
    one = torch.ones(1, 1, dtype=torch.float64)
    total = 0.0
    for k in range(len(new)):
        estimate = estimator(new[k].view(1, 1), other[k].view(1, 1), one)
        total = total + probabilities[k] * estimate
    return total


def test_what_the_kl_terms_estimate():
    """Eq. 5: D(new || old) in value and gradient. To the base: D(new || base), gradient of D(base || new)."""
    torch.manual_seed(1)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(0)
    other = torch.randn(5, dtype=torch.float64).log_softmax(0)
    to_other = (new.exp() * (new - other)).sum()
    from_other = (other.exp() * (other - new)).sum()
    old_term = mean_estimate(kl_old, new, other, other.exp())
    base_term = mean_estimate(kl_base, new, other, new.exp().detach())

    def slope(x):
        [gradient] = torch.autograd.grad(x, logits, retain_graph=True)
        return gradient

    torch.testing.assert_close(old_term, to_other)
    torch.testing.assert_close(slope(old_term), slope(to_other))
    torch.testing.assert_close(base_term, to_other)
    torch.testing.assert_close(slope(base_term), slope(from_other))


# --------------------------------------------------------------------------------------------- the policy

FAMILIES = "qwen2_vl qwen2_5_vl qwen3_vl qwen3_5 glm4v internvl gemma3 gemma4 smolvlm".split()
EACH_FAMILY = [("qwen2_vl", "float32"), *((family, "bfloat16") for family in FAMILIES)]
TEXT_LAYERS = r".*language_model.*_proj"  # of a Qwen2-VL
ACTIONS = ["turn left", "turn right", "move forward"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """model_folder(family) -> a folder for --model, written once."""

    @functools.cache
    def get(family="qwen2_vl"):
        if family == "smolvlm":
            pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
        return str(write_model(family, tmp_path_factory.mktemp(family)))

    return get


@pytest.fixture(scope="session")
def model(model_folder):
    return model_folder()


def options(model, **changes) -> Args:
    defaults = {"model": model, "device": "cpu", "dtype": "float32", "value_hidden": [16], "lora_rank": 4}
    return Args(**{"max_new_tokens": 10} | defaults | changes)


# Two ways to one number round otherwise, and how much depends on the processor. So the model that computes it
# twice is in float64. Log-probabilities and the value head stay in float32, whose steps are 5e-7 at 4 to 8.
NEARLY = {"atol": 1e-5, "rtol": 0}


def make_policy(model, cls=VLMPolicy, **changes) -> VLMPolicy:
    """A policy whose adapters are not zero, as after some training."""
    torch.manual_seed(0)
    policy = cls(options(model, **changes))
    for name, parameter in policy.peft_model.named_parameters():
        if "lora_B" in name and not changes.get("adapter"):
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def some_prompts(policy, counts):
    """Encoded prompts of unequal length, with as many images each as `counts` says."""
    rng = np.random.default_rng(0)
    prompts = []
    for k in counts:
        frames = [rng.integers(0, 255, (60, 80, 3), dtype=np.uint8) for _ in range(k)]
        prompts.append(policy.encode(build_prompt("dark " * k, ACTIONS, "find it", k, 9), frames))
    return prompts


def spy(monkeypatch, owner, name, note):
    """Let note(...) see what a function is called with."""
    really = getattr(owner, name)

    def noted(*words, **options):
        note(*words, **options)
        return really(*words, **options)

    monkeypatch.setattr(owner, name, noted)


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request, model_folder):
    """One of each family, for the tests that do not change it."""
    changes = {"temperature": 1.3, "max_image_tokens": 16, "dtype": "float64", "lora_alpha": 24}
    return make_policy(model_folder(request.param), **changes)


def generated(policy, prompts):
    """What generate() itself says: responses (B, R), and the scores they are drawn from (B, R, tokens)."""
    policy.eval()
    inputs = policy.inputs(prompts)
    out = policy.vlm.generate(**inputs, output_scores=True, return_dict_in_generate=True)
    P = inputs["input_ids"].shape[1]
    return out.sequences[:, P:], torch.stack(out.scores, dim=1).float()


def test_sampling_and_scoring_agree(policy):
    """Left-padded batch = one by one = the sampler's own log-probabilities, first and stop token included."""
    prompts = some_prompts(policy, [1, 2, 3, 1])
    tokens, scores = generated(policy, prompts)
    sampler = scores.log_softmax(2)
    stops = policy.stop_ids.split(1)
    cut_by_the_limit = tokens[0]
    ended = torch.cat([tokens[1, :4], stops[0]])
    ended_by_the_other = torch.cat([tokens[2, :2], stops[1]])
    responses = [cut_by_the_limit, ended, ended_by_the_other, stops[0]]
    batched, mask, values = policy(prompts, responses)
    before = policy.values(prompts)  # without a response yet
    # Some families compute parts in float32, and Gemma 4's log-probabilities are large.
    nearly = {"atol": 1e-4 if policy.vlm.config.model_type == "gemma4" else 2e-5, "rtol": 0}
    for i, response in enumerate(responses):
        n = len(response)
        alone, _, value = policy([prompts[i]], [response])
        assert mask[i].tolist() == [1] * n + [0] * (mask.shape[1] - n)
        torch.testing.assert_close(batched[i, :n], alone[0], **nearly)
        sampled = sampler[i, torch.arange(n), response]
        torch.testing.assert_close(batched[i, :n], sampled, **nearly)
        torch.testing.assert_close(values[i], value[0], **nearly)
        torch.testing.assert_close(before[i], value[0], **nearly)


def test_values_of_many_prompts_take_no_more_memory_than_a_micro_batch(model, monkeypatch):
    policy = make_policy(model, micro_batch_size=2, dtype="float64")
    prompts = some_prompts(policy, [1, 2, 3, 1, 2])
    sizes = []
    spy(monkeypatch, VLMPolicy, "forward", lambda _, prompts, responses: sizes.append(len(prompts)))
    values = policy.values(prompts)
    assert sizes == [2, 2, 1]
    one_by_one = torch.cat([policy.values([prompt]) for prompt in prompts])
    torch.testing.assert_close(values, one_by_one, **NEARLY)


def test_all_but_placeholders_can_be_sampled_and_either_stop_id_ends_a_turn(policy):
    """The hub's generation_config (top_k 1, temperature 0.01) must not leak into the rollout."""
    prompts = some_prompts(policy, [1, 1])
    _, scores = generated(policy, prompts)
    forbidden = (~scores[0, 0].isfinite()).nonzero().flatten().tolist()
    settings = vars(policy.vlm.config).items()
    placeholders = {x for name, x in settings if re.fullmatch("(image|video|audio)_token_(id|index)", name)}
    assert forbidden == policy.banned_ids == sorted(placeholders - {None}) != []
    assert len(policy.stop_ids) == 2
    head = policy.vlm.get_output_embeddings()
    for stop in policy.stop_ids.tolist():  # the second token of one and the fourth of the other
        bias, calls = torch.zeros(2, 1, scores.shape[2]), []
        bias[..., policy.stop_ids] = -50.0

        def second_and_fourth(*call, bias=bias, calls=calls, stop=stop):
            calls.append(1)
            if len(calls) in (2, 4):
                bias[len(calls) // 4, :, stop] = 50.0
            return call[-1] + bias

        hook = head.register_forward_hook(second_and_fourth)
        responses = policy.sample(prompts)
        hook.remove()
        assert len(calls) == 4  # turns end with it, generation too
        assert [len(tokens) for tokens in responses] == [2, 4]
        assert [tokens[-1].item() for tokens in responses] == [stop, stop]
        assert policy.decode(responses) == [policy.tokenizer.decode(tokens[:-1]) for tokens in responses]


def test_lora_is_on_the_language_model_only(policy):
    """On all its linear layers, saved as a short pattern that plain PEFT understands."""
    trained = [name for name, p in policy.peft_model.named_parameters() if p.requires_grad]
    layers = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in trained}
    base = AutoModelForImageTextToText.from_pretrained(policy.args.model)
    expected = set()
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and re.search("language_model|text_model", name):
            expected.add(name)
    assert layers == expected and len(layers) >= 12
    config = policy.peft_model.peft_config["default"]
    assert len(config.target_modules) < 170 and (config.r, config.lora_alpha) == (4, 24)
    plain = get_peft_model(base, LoraConfig(r=4, target_modules=config.target_modules))
    assert set(plain.targeted_module_names) == expected


def test_lora_is_not_on_the_routers_of_a_mixture_of_experts(model):
    args = options(model)
    vlm = vldac.load_vlm(args)
    layer = vlm.get_decoder().layers[0]
    layer.mlp.shared_expert_gate = torch.nn.Linear(64, 1)  # Qwen's name for one
    layer.router = torch.nn.Sequential(collections.OrderedDict(proj=torch.nn.Linear(64, 4)))  # Gemma's
    trained = {name for name, _ in vldac.add_lora(vlm, args).named_parameters() if "lora_" in name}
    assert trained and not {name for name in trained if "router" in name or "expert" in name}


def test_a_model_that_cuts_a_frame_into_tiles_is_refused(model, monkeypatch):
    """Here only a frame that is alone is cut, into 13. It is known before there are any weights."""
    processor = vldac.load_processor(model, 16)
    [image, *_] = vldac.placeholder_ids(AutoConfig.from_pretrained(model))

    def tiled(self, text, images, **options):
        ids = [1, *[image] * 52, 1] if len(images[0]) == 1 else [1, *[image] * 4, 1, *[image] * 4]
        return {"input_ids": torch.tensor([ids])}

    monkeypatch.setattr(type(processor), "__call__", tiled)
    with pytest.raises(envs.UserError, match=r"are \[52, 4, 4\] placeholders in a row"):
        vldac.load_processor(model, 16)


def test_a_frame_costs_few_tokens(policy):
    ids = policy.encode("", [np.zeros((600, 800, 3), np.uint8)])["input_ids"]
    image_tokens = torch.isin(ids, torch.tensor(policy.banned_ids)).sum()
    family = policy.vlm.config.model_type
    largest = 70 if family == "gemma4" else 16  # 70 is its smallest size
    smallest = 4 if family in ("internvl", "gemma3", "smolvlm") else largest // 2 + 1  # 4: of one tile
    assert smallest <= image_tokens <= largest


def test_a_world_cannot_write_the_chat_format(policy):
    """Special tokens in a world's text would add images or end the turn."""
    frame = np.zeros((28, 28, 3), np.uint8)
    special_ids = policy.tokenizer.convert_tokens_to_ids(SPECIAL)
    nested = [token[:3] + token + token[3:] for token in SPECIAL]  # without the inner one, another
    counts = []
    for text in ("plain", " \x00 ".join(SPECIAL), " ".join(nested)):
        ids = policy.encode(build_prompt(text, [text], text, 0, 9), [frame])["input_ids"][0].tolist()
        counts.append([ids.count(i) for i in special_ids])
    assert counts[0] == counts[1] == counts[2]


def test_a_prompt_begins_and_ends_as_its_template_does(policy):
    """Gemma's writes <bos>, and its tokenizer would add another. At the end the model's turn begins."""
    [prompt] = some_prompts(policy, [1])
    ids = prompt["input_ids"][0].tolist()
    gemma = policy.vlm.config.model_type.startswith("gemma")
    assert ids.count(policy.tokenizer.bos_token_id) == gemma
    chat = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    closed = policy.processor.apply_chat_template(chat, add_generation_prompt=False)
    opened = policy.processor.apply_chat_template(chat, add_generation_prompt=True)
    beginning = opened.removeprefix(closed)
    assert beginning and policy.tokenizer.decode(ids).endswith(beginning)


@pytest.mark.parametrize("family, dtype", EACH_FAMILY)
def test_pixels_are_kept_in_the_model_s_type(family, dtype, model_folder):
    """A rollout of a 7B keeps gigabytes of them. Most models cast them so themselves: to the bit the same.

    Gemma 4 first subtracts 0.5, so that it rounds otherwise.
    """
    policy = make_policy(model_folder(family), dtype=dtype, max_image_tokens=16)
    prompts = some_prompts(policy, [1, 2])
    policy.args = dataclasses.replace(policy.args, dtype="float32")
    in_float32 = some_prompts(policy, [1, 2])
    for prompt, exact in zip(prompts, in_float32, strict=True):
        assert prompt["pixel_values"].dtype == getattr(torch, dtype)
        assert prompt["pixel_values"].equal(exact["pixel_values"].to(prompt["pixel_values"].dtype))
    if family != "gemma4":
        responses = [torch.tensor([60, 61, 62]), torch.tensor([63])]
        with torch.no_grad():
            assert policy(prompts, responses)[0].equal(policy(in_float32, responses)[0])


def test_where_there_are_no_special_tokens_a_text_stays_as_it_is(model, monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "added_tokens_decoder", {})
    assert make_policy(model).special_tokens.sub(" ", "it is dark") == "it is dark"


def test_frames_come_in_their_order_and_before_the_text(model):
    policy = make_policy(model, max_image_tokens=16)
    black = np.zeros((56, 56, 3), np.uint8)
    prompt = policy.encode("what now", [black, black + 255])
    first, second = prompt["pixel_values"].chunk(2)
    assert first.max() < second.min()
    is_frame = torch.isin(prompt["input_ids"][0], torch.tensor(policy.banned_ids))
    last_of_frames = is_frame.nonzero().max()
    assert "what now" in policy.tokenizer.decode(prompt["input_ids"][0, last_of_frames:])


def test_a_model_that_thinks_by_default_is_told_not_to(model, monkeypatch):
    """Where its template knows the switch; another one is not asked, or transformers would warn each time."""
    policy, asked = make_policy(model), []
    note = lambda chat, **options: asked.append(options.get("enable_thinking"))  # noqa: E731
    spy(monkeypatch, policy.processor, "apply_chat_template", note)
    [plain] = some_prompts(policy, [1])
    thinks = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    policy.processor.chat_template += thinks
    [prompt] = some_prompts(policy, [1])
    assert prompt["input_ids"].equal(plain["input_ids"])
    assert asked == [None, False]


def half(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def change_a_weight(folder, change):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    change(weights, name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_one(folder):
    """Which would be random."""
    change_a_weight(folder, lambda weights, name: weights.pop(name))


def wider(folder):
    change_a_weight(folder, lambda weights, name: weights.update({name: weights[name].repeat(2, 1)}))


def with_a_factor(folder):
    """On its logits: `generate` has it, `forward` has not, and the ratios would be 1 all the same."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["logit_scale"] = 0.25
    (folder / "config.json").write_text(json.dumps(config))


def refuses_a_chat(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no images, please') }}")


def without(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize("damage, message", [
    (without("preprocessor_config.json"), "Can't load image processor"),
    (without("tokenizer.json"), "Couldn't instantiate the backend tokenizer"),
    (without("chat_template.jinja"), "it has no chat template"),
    (without("model.safetensors"), "no file named model.safetensors"),
    (half, "incomplete"),
    (without_one, "is not complete: it has no "),
    (wider, "mismatch"),
    (with_a_factor, "is not supported: its logit_scale is 0.25"),
    (refuses_a_chat, "its chat template: no images, please"),
])  # fmt: skip
def test_a_run_with_a_damaged_model_leaves_nothing(damage, message, model, tmp_path, capsys):
    folder = shutil.copytree(model, tmp_path / "model")
    damage(folder)
    argv = ["--env", "NumberLine", "--model", folder, "--runs_dir", tmp_path / "runs", *SMALL]
    said = refused(argv, capsys)
    assert f"--model {folder}" in said and message in said
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    "size", [{"layers": 3}, {"layers": 1}, {"H": 64}], ids="deeper shallower wider".split()
)
def test_a_run_with_an_adapter_of_another_model_leaves_nothing(size, model, tmp_path, capsys):
    """PEFT would only warn, and the run would begin with what fits, or with an untrained adapter."""
    other = write_model("qwen2_vl", tmp_path / "other", **size)
    adapter = tmp_path / "adapter"
    make_policy(other).peft_model.save_pretrained(adapter)
    argv = ["--env", "NumberLine", "--model", model, "--adapter", adapter, "--runs_dir", tmp_path / "runs"]
    assert f"the adapter does not fit --model {model}: " in refused([*argv, *SMALL], capsys)
    assert not list(tmp_path.glob("runs/*"))


# ----------------------------------------------------------------------- what is computed without cuDNN


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_embedded_by_products(family, model_folder, monkeypatch):
    """Equal to rounding; a convolution of whole images is left as it is, to the bit."""
    policy = make_policy(model_folder(family), max_image_tokens=16, dtype="float64")
    for module in policy.vlm.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            del module.forward  # first without
            if module.bias is not None:
                torch.nn.init.normal_(module.bias)
    prompts = some_prompts(policy, [1, 2])
    responses = [torch.tensor([60, 61, 62]), torch.tensor([63])]

    def scored_with_gradients():
        logprobs, _, values = policy(prompts, responses)
        gradients = torch.autograd.grad(logprobs.sum(), policy.lora_parameters(), allow_unused=True)
        return [logprobs, values, *(gradient for gradient in gradients if gradient is not None)]

    calls = []
    for cls in (torch.nn.Conv2d, torch.nn.Conv3d):  # Conv1d is in Qwen3.5's language model
        really = cls._conv_forward
        count = lambda *words, really=really: calls.append(1) or really(*words)  # noqa: E731
        monkeypatch.setattr(cls, "_conv_forward", count)

    def convolutions():
        calls.clear()
        policy(prompts, responses)
        return len(calls)

    before, number = scored_with_gradients(), convolutions()
    vldac.patches_as_products(policy.vlm)
    of_patches = family.startswith("qwen") or family == "glm4v"
    assert (number, convolutions()) == {
        "glm4v": (2, 0),
        "gemma4": (0, 0),  # it has a linear layer already
    }.get(family, (1, 0) if of_patches else (1, 1))
    nearly = NEARLY if of_patches else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(scored_with_gradients(), before, **nearly)


def test_what_fails_in_cudnn_is_not_computed_by_it(model, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    vlm = vldac.load_vlm(options(model))
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # its gradients on an H100 may be NaN
    assert not torch.backends.cudnn.enabled and "forward" in vars(vlm.model.visual.patch_embed.proj)


# --------------------------------------------------------------------------------------------- the update


def some_steps(policy, B) -> list[vldac.Step]:
    """Sampled responses of unequal lengths; rewards and ends of episodes are made up."""
    torch.manual_seed(0)
    prompts = some_prompts(policy, [1 + b % 3 for b in range(B)])
    rewards = torch.randn(B).tolist()
    dones = (torch.rand(B) < 0.3).tolist()
    responses = policy.sample(prompts)
    steps = []
    for b in range(B):
        tokens = responses[b][: 2 + b]
        steps.append(vldac.Step(prompts[b], tokens, "", None, rewards[b], dones[b], False))
    return steps


def some_minibatches(policy, B=6, **changes) -> list:
    """Minibatches of such steps, scored; advantages and returns are made up, the same for a step anywhere."""
    args = dataclasses.replace(policy.args, **{"minibatch_size": B} | changes)
    steps = some_steps(policy, B)
    advantages, returns = torch.randn(2, B).tolist()
    for step, advantage, ret in zip(steps, advantages, returns, strict=True):
        step.advantage, step.return_ = advantage, ret
    minibatches = vldac.make_minibatches(steps, args)
    vldac.score(policy, minibatches)
    return minibatches


def scored(policy, micro_batch):
    """What the policy says of a micro-batch now: log-probabilities and mask (B, R), values (B,)."""
    return policy([step.prompt for step in micro_batch], [step.tokens for step in micro_batch])


def column(micro_batch, name):
    """What the steps of a micro-batch have under a name: (B,), or padded to (B, R)."""
    parts = [getattr(step, name) for step in micro_batch]
    return vldac.pad(parts) if isinstance(parts[0], torch.Tensor) else torch.tensor(parts)


def updated(policy, minibatches, lr=1e-2, warmup=False, **changes):
    """The optimizer after an update, and what the update returned."""
    args = dataclasses.replace(policy.args, learning_rate=lr, **changes)
    optimizer = vldac.make_optimizer(policy, args)
    return optimizer, vldac.update(policy, optimizer, minibatches, args, warmup)


def lora_state(policy):
    return torch.cat([p.detach().flatten().clone() for p in policy.lora_parameters()])


def test_minibatches_hold_every_step_once():
    """In random minibatches, the longest first."""
    args = Args(minibatch_size=8, micro_batch_size=3)
    steps = []
    for row in torch.randperm(24).tolist():
        prompt = {"input_ids": torch.zeros(1, 1 + row // 4)}
        steps.append(vldac.Step(prompt, torch.arange(1 + row % 7), "", None, 0.0, False, False))
    minibatches = vldac.make_minibatches(steps, args)
    assert len(minibatches) == 3
    met = []
    for minibatch in minibatches:
        assert [len(micro_batch) for micro_batch in minibatch] == [3, 3, 2]
        together = list(itertools.chain(*minibatch))
        lengths = [step.prompt["input_ids"].shape[1] + len(step.tokens) for step in together]
        assert lengths == sorted(lengths, reverse=True)
        met += together
    assert len(met) == 24 and set(met) == set(steps)
    torch.manual_seed(0)
    alike = [dataclasses.replace(steps[0]) for _ in range(24)]
    [[first, *_], *_] = vldac.make_minibatches(alike, args)
    assert first != alike[:3]


@pytest.mark.parametrize("family, dtype", EACH_FAMILY)
def test_the_first_minibatch_has_ratio_one_to_the_bit(family, dtype, model_folder):
    """And the later ones have not. Log-probabilities and all that is trained are in fp32."""
    policy = make_policy(model_folder(family), dtype=dtype, minibatch_size=3, micro_batch_size=2)
    minibatches = some_minibatches(policy, minibatch_size=3)
    _, losses = updated(policy, minibatches)
    assert losses["ratio_first"] == 0.0
    assert losses["approx_kl"] > 1e-4
    assert policy.vlm.get_output_embeddings().weight.dtype == getattr(torch, dtype)
    trained = [*policy.lora_parameters(), *policy.value_head.parameters()]
    assert {p.dtype for p in trained} == {torch.float32}
    logprobs, _, values = scored(policy, minibatches[0][0])
    for exact in (logprobs, values):
        assert not exact.equal(exact.bfloat16().float())


def test_the_first_minibatch_has_ratio_one_whatever_dropout_was_trained_with(model, tmp_path):
    """An adapter's, and the attention's, which a model's config has."""
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=TEXT_LAYERS, init_lora_weights=False)
    base = AutoModelForImageTextToText.from_pretrained(model)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.1
    (folder / "config.json").write_text(json.dumps(config))
    policy = make_policy(folder, adapter=str(tmp_path / "adapter"))
    _, losses = updated(policy, some_minibatches(policy, minibatch_size=3))
    assert losses["ratio_first"] == 0.0


def test_the_second_epoch_has_the_same_minibatches_in_another_order(model, monkeypatch):
    policy = make_policy(model)
    minibatches = some_minibatches(policy, minibatch_size=2)
    trained = []
    spy(monkeypatch, vldac, "policy_loss", lambda *words: trained.append(words[2].tolist()))  # advantages
    random.seed(1)
    updated(policy, minibatches)
    first, second = trained[:3], trained[3:]
    assert first == [column(micro_batch, "advantage").tolist() for [micro_batch] in minibatches]
    assert sorted(second) == sorted(first) and second != first


def test_the_base_is_scored_without_its_adapter(model, monkeypatch):
    """The model before training is the one whose adapters are zero."""
    trained, untrained = make_policy(model), make_policy(model)
    for name, parameter in untrained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
    disable, calls = trained.peft_model.disable_adapter, []
    monkeypatch.setattr(trained.peft_model, "disable_adapter", lambda: calls.append(1) or disable())
    [micro_batch, _], _ = some_minibatches(trained, minibatch_size=3, micro_batch_size=2)
    assert len(calls) == 1  # it walks through the whole model
    base, _, _ = scored(untrained, micro_batch)
    assert column(micro_batch, "baselogprobs").equal(base)
    assert (column(micro_batch, "logprobs") - base).abs().max() > 0.1


def gradients(policy, loss):
    """Of LoRA and of the value head, each as one vector."""
    groups = policy.lora_parameters(), list(policy.value_head.parameters())
    found = []
    for group in groups:
        of_group = torch.autograd.grad(loss, group, retain_graph=True, materialize_grads=True)
        found.append(torch.cat([gradient.flatten() for gradient in of_group]))
    return found


def equation_6(policy, micro_batch):
    """The total loss of a minibatch of one micro-batch, and its KL term."""
    args = policy.args
    new, mask, values = scored(policy, micro_batch)
    old, advantages = column(micro_batch, "logprobs"), column(micro_batch, "advantage")
    pg_loss = policy_loss(new, old, advantages, mask, args.clip_coef)
    v_loss = value_loss(values, column(micro_batch, "return_"))
    if args.kl_ref == "base":
        kl = kl_base(new, column(micro_batch, "baselogprobs"), mask)
    else:
        kl = kl_old(new, old, mask)
    return pg_loss + args.kl_coef * kl + args.vf_coef * v_loss, kl.item()


@pytest.mark.parametrize("kl_ref, max_grad_norm", [("base", 1e9), ("old", 1e9), ("base", 1e-3)])
def test_an_update_steps_along_equation_6(kl_ref, max_grad_norm, model):
    """One minibatch of everything: the last of three epochs' gradients is Eq. 6's, clipped per group."""
    weights = {"clip_coef": 0.02, "kl_coef": 0.3, "vf_coef": 0.7, "update_epochs": 3}
    policy = make_policy(model, kl_ref=kl_ref, max_grad_norm=max_grad_norm, **weights)
    [[micro_batch]] = some_minibatches(policy)
    for step in micro_batch:
        step.logprobs = step.logprobs - 0.05 * torch.rand(len(step.tokens))  # or Eq. 5 has no gradient
    loss, kl = equation_6(policy, micro_batch)
    expected = gradients(policy, loss)

    optimizer, losses = updated(policy, [[micro_batch]], lr=0.0)

    assert losses["kl_loss"] == pytest.approx(kl, abs=1e-6)  # that which is optimised
    steps = {state["step"].item() for state in optimizer.state.values()}
    assert steps == {3}
    groups = policy.lora_parameters(), policy.value_head.parameters()
    for name, group, gradient in zip(("lora", "value"), groups, expected, strict=True):
        norm = gradient.norm().item()
        assert losses[f"grad_norm_{name}"] == pytest.approx(norm, rel=1e-3)  # before it is clipped
        scale = min(1.0, max_grad_norm / norm)
        applied = torch.cat([parameter.grad.flatten() for parameter in group])
        torch.testing.assert_close(applied, scale * gradient, atol=1e-6, rtol=1e-3)


def test_each_minibatch_has_a_gradient_of_its_own(model):
    """The log has the mean of their norms."""
    policy = make_policy(model, update_epochs=1, max_grad_norm=1e9)
    minibatches = some_minibatches(policy, minibatch_size=3)
    expected = [gradients(policy, equation_6(policy, *minibatch)[0]) for minibatch in minibatches]
    _, losses = updated(policy, minibatches, lr=0.0)
    last = torch.cat([parameter.grad.flatten() for parameter in policy.lora_parameters()])
    torch.testing.assert_close(last, expected[1][0], atol=1e-6, rtol=1e-3)
    norms = [lora.norm().item() for lora, _ in expected]
    assert losses["grad_norm_lora"] == pytest.approx(np.mean(norms), rel=1e-3) != norms[1]


@pytest.mark.parametrize("stop_grad", [True, False])
def test_in_the_warm_up_only_the_value_head_learns(stop_grad, model, monkeypatch):
    """And no activations are kept for LoRA; where the value loss may train it, it does so afterwards."""
    policy = make_policy(model, stop_grad=stop_grad)
    [[micro_batch]] = some_minibatches(policy)
    _, _, values = scored(policy, micro_batch)
    adapters, _ = gradients(policy, value_loss(values, column(micro_batch, "return_")))
    assert adapters.any() == (not stop_grad)

    kept = []
    spy(monkeypatch, vldac, "diagnostics", lambda newlogprobs, *_: kept.append(newlogprobs.requires_grad))
    before = lora_state(policy)
    weight = policy.value_head[0].weight.detach().clone()
    for warmup in (True, False):
        kept.clear()
        updated(policy, [[micro_batch]], warmup=warmup)
        assert kept == [not warmup] * policy.args.update_epochs
        assert lora_state(policy).equal(before) == warmup
        assert not policy.value_head[0].weight.equal(weight)
        # Or autocast would cast them anew for every token that is sampled.
        assert all(parameter.requires_grad for parameter in policy.lora_parameters())


def test_the_optimizer_is_adam_with_the_released_code_s_epsilon(model):
    """Over LoRA and the value head, an MLP, without weight decay."""
    policy = make_policy(model, value_hidden=[3, 5])
    layers = [type(layer).__name__ for layer in policy.value_head]
    assert layers == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [layer.out_features for layer in policy.value_head[::2]] == [3, 5, 1]
    optimizer = vldac.make_optimizer(policy, policy.args)
    [group] = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam and group["betas"] == (0.9, 0.999)
    assert (group["eps"], group["weight_decay"], group["lr"]) == (1e-7, 0, 5e-5)
    trained = [p for name, p in policy.named_parameters() if "lora_" in name or "value_head" in name]
    assert {id(p) for p in group["params"]} == {id(p) for p in trained}


def test_unequal_micro_batches_give_the_gradient_of_one(model):
    """6 = 4 + 2: each micro-batch counts by its share of the steps, in gradients and in the log.

    The largest ratio is that of all micro-batches: here of a step in the second one.
    The value head has no hidden layer: batches of another size round otherwise, and at a ReLU's kink that
    would decide whether a unit has a gradient.
    """
    found = []
    for size in (6, 4):
        policy = make_policy(model, value_hidden=[], dtype="float64")
        minibatches = some_minibatches(policy, micro_batch_size=size)
        assert len(minibatches[0]) == math.ceil(6 / size)
        shortest = minibatches[0][-1][-1]
        shortest.logprobs = shortest.logprobs - 0.1
        _, losses = updated(policy, minibatches, lr=0.0, max_grad_norm=1e9)
        assert losses["ratio_first"] == pytest.approx(math.exp(0.1) - 1, abs=1e-4)
        assert "ratio_distance" not in losses
        names = "policy_loss value_loss kl_base entropy grad_norm_value".split()
        logged = [losses[name] for name in names]
        found.append([logged, [p.grad for p in policy.lora_parameters()]])
    torch.testing.assert_close(*found, atol=5e-6, rtol=0)


def test_the_diagnostics_of_an_update_by_hand():
    """A step of two tokens, whose ratios are 1.5 and 0.95, and one of one token, whose ratio is 1.

    In the base all are half as likely. The mean is over the tokens of a step, then over the steps.
    """
    ratios, mask = torch.tensor([[1.5, 0.95], [1.0, 1.0]]), torch.tensor([[1, 1], [1, 0]])
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    baselogprobs = (logprobs - math.log(2)) * mask
    found = vldac.diagnostics(logprobs + ratios.log(), logprobs, baselogprobs, mask, 0.1)
    expected = {"ratio_distance": 0.5, "clipfrac": 0.25, "entropy": 2.25, "kl_base": math.log(2) - 0.5}
    expected |= {"approx_kl": (0.5 - math.log(1.5) - 0.05 - math.log(0.95)) / 4}
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_gradient_of_nan_ends_the_run_before_it_touches_a_weight(model):
    policy = make_policy(model)
    [[micro_batch]] = some_minibatches(policy)
    before = lora_state(policy)
    micro_batch[0].advantage = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        updated(policy, [[micro_batch]])
    assert lora_state(policy).equal(before)


@pytest.mark.parametrize("around_an_adapter", [False, True])
def test_gradient_checkpointing_changes_neither_samples_nor_gradients(around_an_adapter, model, tmp_path):
    """In training mode with it, generate() gives other tokens, and says nothing. And layers run twice."""
    found, runs = [], []
    for checkpointing in (False, True):
        changes = {"gradient_checkpointing": checkpointing}
        if around_an_adapter:
            make_policy(model).peft_model.save_pretrained(tmp_path)
            changes["adapter"] = str(tmp_path)
        policy = make_policy(model, **changes).train()
        [[micro_batch]] = some_minibatches(policy)
        seen, calls = [], []
        policy.vlm.model.visual.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
        layer = policy.vlm.model.language_model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *call, calls=calls: calls.append(call))
        updated(policy, [[micro_batch]], lr=0.0)
        runs.append(len(calls))
        # What the frozen vision tower gives is not backpropagated.
        outputs = [x for output in seen for x in output.values() if isinstance(x, torch.Tensor)]
        assert outputs and not any(x.requires_grad for x in outputs)
        found.append([column(micro_batch, "tokens"), *(p.grad for p in policy.lora_parameters())])
    torch.testing.assert_close(*found, atol=0, rtol=0)
    assert runs == [2, 4]  # in two epochs


# ------------------------------------------------------------------------ from the collection to the loss


def registered(world):
    """The world, which Gymnasium now knows by its name."""
    gym.register(f"{world.__name__}-v0", world, max_episode_steps=getattr(world, "time_limit", None))
    return world


@registered
class Corridor(envs.World):
    """A world of tests: walk right to the end. Every step pays by its place, the time-out 3 less."""

    task, actions, size, limit = "walk", ("left", "right"), (28, 28), 5
    invalid_reward, time_out_reward = 0.5, -3.0

    def _reset(self):
        self.place = int(self.np_random.integers(3))

    def _step(self, action):
        self.place = max(0, self.place + (1 if action == "right" else -1))
        self.success = self.place == 4
        return self.place, self.success

    def render(self):
        return np.full((28, 28, 3), 40 * self.place, np.uint8)

    def _text(self):
        return f"place {self.place}"


CORRIDOR = "test_vldac:Corridor-v0"


def script(monkeypatch, answers):
    """Let responses read as these, one after the other, whatever the model has written."""
    answers = itertools.cycle(answers)
    decode = lambda self, responses: [next(answers) for _ in responses]  # noqa: E731
    monkeypatch.setattr(VLMPolicy, "decode", decode)


@torch.no_grad()
def replay(policy, said, N, T):
    """T steps of N players, from seeds and answers: rewards, dones, time-outs (T, N), values (T + 1, N)."""
    rewards, values = torch.zeros(T, N), torch.zeros(T + 1, N)
    dones, timed_out = torch.zeros(2, T, N, dtype=bool)
    for n in range(N):
        world, episode, done = Corridor(), 0, True
        for t in range(T + 1):
            if done:
                observation, _ = world.reset(seed=vldac.training_seed(policy.args.seed, n, episode))
                seen = [observation]
                episode += 1
            taken = len(seen) - 1
            text = build_prompt(seen[-1]["text"], world.actions, "walk", taken, 5 - taken)
            prompt = policy.encode(text, [observation["image"] for observation in seen[-2:]])
            values[t, n] = policy.values([prompt])
            if t < T:
                action = parse_action(said[t * N + n], world.actions) or ""
                observation, rewards[t, n], terminated, truncated, _ = world.step(action)
                seen.append(observation)
                dones[t, n] = done = terminated or truncated
                timed_out[t, n] = truncated and not terminated
    return rewards, dones, timed_out, values


def test_collection_and_advantages_are_those_of_a_replay(model, monkeypatch):
    """Three rollouts in a row, computed again step by step from seeds and answers alone."""
    T, N = 7, 3
    changes = {"env": CORRIDOR, "num_envs": N, "num_steps": T, "num_images": 2, "max_image_tokens": 16}
    changes |= {"minibatch_size": 7, "micro_batch_size": 3, "gamma": 0.9, "gae_lambda": 0.6, "seed": 5}
    policy = make_policy(model, **changes)
    args = policy.args
    answers = ['{"action": "right"}', '{"thoughts": "hm", "action": "left"}', '{"action": "right"', "no"]
    said = random.Random(0).choices(answers, k=3 * T * N)
    script(monkeypatch, said)
    players = [vldac.Player(args, n) for n in range(N)]
    for player in players:
        player.next_episode()

    all_rewards, all_dones, all_timed_out, all_values = replay(policy, said, N, 3 * T)
    assert 0 < all_timed_out.sum() < all_dones.sum()
    for start in (0, T, 2 * T):
        steps, last_prompts, _ = vldac.collect(policy, players, args)
        minibatches = vldac.make_minibatches(steps, args)
        vldac.score(policy, minibatches)
        stats = vldac.add_advantages(steps, policy.values(last_prompts), args)

        rewards = all_rewards[start : start + T]
        dones = all_dones[start : start + T]
        timed_out = all_timed_out[start : start + T]
        values = all_values[start : start + T + 1]
        assert [step.reward for step in steps] == rewards.flatten().tolist()
        assert [step.done for step in steps] == dones.flatten().tolist()
        assert [step.timed_out for step in steps] == timed_out.flatten().tolist()
        assert 0 < dones.sum() < T * N
        rewards = torch.where(timed_out, values[:T], rewards)
        advantages = gae_by_definition(rewards, values, dones, args.gamma, args.gae_lambda)
        assert stats["advantage_std"] == pytest.approx(advantages.std().item(), rel=1e-4)
        normalised = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        nearly = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(column(steps, "value"), values[:T].flatten(), **nearly)
        torch.testing.assert_close(column(steps, "advantage"), normalised.flatten(), **nearly)
        torch.testing.assert_close(column(steps, "return_"), (advantages + values[:T]).flatten(), **nearly)
        logprobs, _, _ = scored(policy, steps)
        torch.testing.assert_close(column(steps, "logprobs"), logprobs, **nearly)


def test_a_time_out_by_hand():
    """Four steps of two players, gamma 1/2, lambda 1. The first times out in step 1, the second ends there.

    A time-out: advantage 0, its return is its value, and the steps before it bootstrap from that. An end that
    belongs to the task pays what it pays.
    """
    args = Args(gamma=0.5, gae_lambda=1.0)
    steps = []
    for reward, done, timed_out, value in (
        (1.0, False, False, 2.0), (1.0, False, False, 2.0),
        (-8.0, True, True, 6.0), (-8.0, True, False, 6.0),
    ):  # fmt: skip
        steps.append(vldac.Step({}, torch.zeros(1), "", None, reward, done, timed_out, value=value))
    stats = vldac.add_advantages(steps, torch.full((2,), math.nan), args)
    returns = torch.tensor([1 + 6 / 2, 1 - 8 / 2, 6.0, -8.0])
    advantages = returns - column(steps, "value")
    assert advantages.tolist() == [2.0, -5.0, 0.0, -14.0]
    normalised = (advantages - advantages.mean()) / advantages.std()
    torch.testing.assert_close(column(steps, "return_"), returns)
    torch.testing.assert_close(column(steps, "advantage"), normalised)
    assert stats["advantage_std"] == pytest.approx(advantages.std().item())
    kept = [0, 1, 3]  # the return of a time-out is its value, which explains nothing
    explained = 1 - advantages[kept].var() / returns[kept].var()
    assert stats["explained_variance"] == pytest.approx(explained.item(), rel=1e-5)
    assert stats["outcomes"] == 0.5  # one of two players met an end

    for step in steps:  # equal advantages say nothing, and are no NaN
        step.reward, step.done, step.timed_out, step.value = 0.0, True, False, 0.0
    stats = vldac.add_advantages(steps, torch.zeros(2), args)
    assert column(steps, "advantage").tolist() == [0.0] * 4 and stats["explained_variance"] is None
    for step in steps:
        step.reward, step.timed_out = -1.0, True
    stats = vldac.add_advantages(steps, torch.zeros(2), args)
    assert column(steps, "advantage").tolist() == [0.0] * 4 and stats["explained_variance"] is None


def test_a_success_in_the_last_step_is_no_time_out():
    player = vldac.Player(Args(env=CORRIDOR, max_episode_steps=1))
    player.reset(0)
    player.env.unwrapped.place = 3
    _, done, timed_out = player.step("right")
    assert done and not timed_out


# ------------------------------------------------------------------------------ the prompt and the parser


def answer(action):
    return json.dumps({"thoughts": "hm", "action": action})


OFFERED = [*ACTIONS, "1", "10", "-1", "-", "A", "a", "B", "b ", "search[...]"]
PARSED = [
    (answer("turn left"), "turn left"),
    (answer(" TURN Left\n"), "turn left"),
    ('{\n  "thoughts": "hm",\n  "action":\n    "turn left\n"\n}', "turn left"),
    ('{\n  "action": -1\n}', "-1"),
    ('{"action": 1, "why": "hm"}', "1"),
    ('Sure: {"action": "turn left"} or rather {"action": "turn right"}', "turn right"),  # the last one counts
    ('{"action": "turn left", "action" : 7}', None),  # also if it is no action
    ('{"action": ["turn left"]}', None),
    ('{"action": "turn left"', "turn left"),  # cut after the answer
    ('{"action": "turn lef', None),  # cut within
    ('{"thoughts": "line\nbreak", "action": "turn\\u0020left"}', "turn left"),
    ('{"thoughts": "say \\"action\\": \\"turn left\\" now"}', None),  # a key inside a string is text
    ("{'action': 'turn left'}", None),
    (answer("\ud800"), None),
    *(
        (text, None) for text in ('{"action": 1', '{"action": 1/2}', '{"action": 1 or 10}')
    ),  # cut, or no number
    *((f'{{"action": {number}}}', None) for number in ("1e1", "10.0", "-", "01", "1" * 5000)),
    (answer("a"), "a"),  # case decides only where it must
    (answer("b"), None),  # two would do, none is exact
    (answer("search[red shoes]"), "search[red shoes]"),
    (answer(" Search[Red shoes]"), "search[Red shoes]"),
    (answer("Search[...]"), None),
    *((answer(f"search[{words}]"), None) for words in ("", "...", "x" * 101, "a]b", "a\x00b", "a\nb")),
]


def test_parse_action():
    for text, action in PARSED:
        assert parse_action(text, OFFERED) == action, text
    assert parse_action(answer("search[red shoes]"), ["click[back]"]) is None


def test_an_action_of_any_characters_can_be_copied_from_the_prompt():
    actions = ['click[12" x 18"]', "back\\slash", "two\nlines", "h\u00e4user", "plain"]
    text = build_prompt("", actions, "shop. ", 0, 9)
    assert text.startswith("Task: shop.\nActions taken")
    [line] = re.findall(r"^Admissible actions: (.*)\.$", text, re.M)
    spelled = line.split(", ")
    assert spelled[3:] == ['"h\u00e4user"', '"plain"']
    for words, action in zip(spelled, actions, strict=True):
        response = '{"thoughts": "hm", "action": ' + words + "}"
        assert parse_action(response, actions) == action


def test_the_parser_survives_hostile_text():
    """10,000 generated strings, and half a megabyte of each part: only admissible actions come out."""
    rng = random.Random(0)
    parts = [*':{}[]"\\ \n\x00\ud800\u202eé-9', '"action"', '"action":', '"action": "', '{"action":', '\\"']
    parts += ["\\u", "\\ud83d", "turn left", "10", "1e999", "NaN", "null", "true", "__import__('os')"]
    for _ in range(10_000):
        text = "".join(rng.choices(parts, k=rng.randrange(40)))
        assert parse_action(text, ["turn left", "10"]) in ("turn left", "10", None)
    for part in parts:
        flood = part * (500_000 // len(part))
        for text in (flood, f'{{"action": {flood}', f'{{"action": "{flood}', f'"action"{flood}:"turn left"'):
            assert parse_action(text, ["turn left"]) in ("turn left", None)


def test_the_prompt_shows_the_newest_frames_once_and_counts_actions():
    """Also of a world that draws over its frame and has numpy's strings, which no checkpoint could hold."""
    player = vldac.Player(Args(env="test_vldac:Canvas-v0", num_images=3, invalid_reward=-7.0))
    player.reset(0)
    places = []
    for t, action in enumerate([np.str_("right"), None, np.str_("left"), np.str_("right")]):
        places.append(player.env.unwrapped.place)
        text, frames = player.prompt()
        assert [frame.max() // 40 for frame in frames] == places[-3:]
        assert f"Actions taken: {t}. Actions left: {5 - t}." in text
        assert re.findall(r"place (\d)", text) == [str(places[-1])]
        reward, _, _ = player.step(action)
        assert (reward == -7.0) == (action is None)
    assert {type(action) for action in player.actions} == {str}


# -------------------------------------------------------------------------------------------- a whole run

SMALL = "--num_envs 2 --num_steps 4 --total_timesteps 16 --minibatch_size 8 --max_new_tokens 4".split()
SMALL += "--value_hidden 16 --max_image_tokens 16 --lora_rank 4 --device cpu --eval_episodes 0".split()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def start(tmp_path, model, env, *options, name="run", main=vldac.main):
    """A small run through the command line; returns its folder and the rows of its log."""
    folder = tmp_path / name
    assert not folder.exists()  # or the rows would be those of an earlier run
    argv = ["--env", env, "--model", model, "--runs_dir", tmp_path, "--run_name", name]
    argv += [*SMALL, *options]
    main([str(word) for word in argv])
    return folder, rows_of(folder)


@pytest.fixture
def run(tmp_path, model):
    """run(env, *options) -> the folder of a small run and the rows of its log"""
    return functools.partial(start, tmp_path, model)


def without_times(rows):
    return [{k: v for k, v in row.items() if "time/" not in k and "per_second" not in k} for row in rows]


def pretend_gpu(monkeypatch, bfloat16=True):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)


@pytest.mark.parametrize("name", ["NumberLine", pytest.param("OneRoom", marks=needs_opengl)])
def test_a_run_writes_what_it_says(run, name, monkeypatch, capsys):
    evaluated_on = []
    spy(monkeypatch, vldac, "evaluate", lambda policy, players, seeds: evaluated_on.append(list(seeds)))
    options = ["--max_episode_steps", 3, "--total_timesteps", 23, "--seed", 5]
    folder, rows = run(name, "--eval_episodes", 2, *options)
    assert evaluated_on == [[0, 1], [0, 1]]  # whatever the run's seed is
    assert [row["global_step"] for row in rows] == [0, 8, 16]  # whole updates
    assert ["eval/success_rate" in row for row in rows] == [True, False, True]
    for row in rows[1:]:
        assert row["losses/ratio_first"] == 0.0
    sample = rows[1]["samples"][0]  # before it nothing was played
    assert "Actions taken: 0. " in sample["prompt"]
    assert sample.keys() == {"prompt", "response", "action", "reward"}
    names = {path.name for path in folder.iterdir()}
    assert names == {"args.json", "log.jsonl", "checkpoint.pt", "adapter"}
    printed = capsys.readouterr().out
    assert f"{sys.executable} {sys.argv[0]} --resume {folder}" in printed
    assert f"{sys.executable} {ROOT / 'extras' / 'page.py'} {folder}" in printed
    lines = re.findall(r"^ *(\d+) steps  (.*)$", printed, re.M)
    assert [int(steps) for steps, _ in lines] == [0, 8, 16]
    assert ["eval_success " in line for _, line in lines] == [True, False, True]
    assert ["kl_base 0.000" in line for _, line in lines] == [False, True, True]
    assert ["outcomes " in line for _, line in lines] == [False, True, True]
    first = "LoRA is on 14 linear layers of the language model\nthe first prompt, after its frames:\nTask: "
    assert first in printed
    assert "\nit names no admissible action\n" in printed


def test_a_row_of_the_log_by_hand(model):
    """Of three steps, one of which was cut and names no action, and two episodes that have ended."""
    policy = make_policy(model)
    [prompt] = some_prompts(policy, [1])
    stopped = torch.cat([torch.tensor([100, 101]), policy.stop_ids[:1]])
    steps = [vldac.Step(prompt, stopped, "answered", "right", 1.0, True, False) for _ in range(2)]
    steps += [vldac.Step(prompt, torch.full((6,), 100), "cut", None, 0.0, False, False)]
    player = vldac.Player(options(model, env=CORRIDOR))
    player.reset(seed=7)
    for action in ("right", None, "left", None):
        player.step(action)
    played = player.result()
    assert (played["seed"], played["success"], played["length"], played["invalid"]) == (7, False, 4, 2)
    won = {"seed": 8, "success": True, "return": 2.0 - played["return"], "length": 2, "invalid": 1}
    times = {"collect": 1.0, "score": 2.0, "update": 1.0}
    row = vldac.log_row(policy, steps, {"outcomes": 0.25}, times, [played, won])
    assert [sample["response"] for sample in row.pop("samples")] == ["cut", "answered"]
    charts = {"success_rate": 0.5, "episodic_return": 1.0, "episodic_length": 3.0, "response_length": 4.0}
    charts |= {"invalid_action_rate": 1 / 3, "cut_share": 1 / 3, "env_steps_per_second": 0.75}
    expected = {f"charts/{name}": x for name, x in charts.items()}
    expected |= {"losses/outcomes": 0.25, "time/collect": 1.0, "time/score": 2.0, "time/update": 1.0}
    assert row == expected
    assert vldac.summary([played, won])["invalid_action_rate"] == 0.5  # 3 of 6


def test_an_evaluation_shows_its_progress_at_every_step(model, monkeypatch, capsys):
    """Five episodes of three steps, all at once or two at a time."""
    monkeypatch.setattr(vldac, "BAR_INTERVAL", 0)
    args = options(model, env="NumberLine", max_episode_steps=3)

    def nothing(policy, players):
        return [vldac.Step({}, torch.zeros(0), "", None, *player.step("")) for player in players]

    for at_once, expected in {5: [0, 5, 10, 15], 2: [0, 2, 4, 6, 8, 10, 12, 13, 14, 15]}.items():
        vldac.evaluate(None, [vldac.Player(args) for _ in range(at_once)], range(5), nothing)
        shown = re.findall(r"evaluating: (\d+) steps(?: [^\r]*?, (\d) of 5)?", capsys.readouterr().err)
        assert [int(n) for n, _ in shown] == expected
        assert shown[0] == ("0", "") and shown[-1] == ("15", "5")


def test_an_update_shows_what_it_does(run, monkeypatch, capsys):
    """Of a 7B it takes minutes. Four steps of the world, then minibatches of one micro-batch each."""
    monkeypatch.setattr(vldac, "BAR_INTERVAL", 0)
    run(CORRIDOR, "--num_envs", 4, "--total_timesteps", 16, "--micro_batch_size", 8)
    shown = re.findall(r"(\w[\w ,]*): +\d+%\|[^|]*\| (\d+)/(\d+)", capsys.readouterr().err)
    for what, total in [("collecting", 4), ("scoring", 2), ("scoring by the base", 2)]:
        assert [(int(n), int(of)) for name, n, of in shown if name == what] == [
            (n, total) for n in range(total + 1)
        ]
    for epoch in (1, 2):
        assert ("training, epoch " + str(epoch), "2", "2") in shown


def test_the_log_tells_the_rate_and_the_warm_up(run, monkeypatch):
    """The cosine from the first to the last update; LoRA still in warm-up; the seconds of the phases."""
    changes = "--learning_rate 0.01 --final_learning_rate 0.002 --total_timesteps 40 --value_warmup 2"
    used = []

    def note(policy, optimizer, minibatches, args, warmup):
        used.append(optimizer.param_groups[0]["lr"])

    spy(monkeypatch, vldac, "update", note)
    ticks = itertools.accumulate([0, 1, 2, 4] * 5)  # of an update: start, collected, scored, updated
    monkeypatch.setattr(vldac, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    folder, (_, *rows) = run(CORRIDOR, *changes.split())
    assert used == [row["charts/learning_rate"] for row in rows]
    for row in rows:
        assert [row[f"time/{phase}"] for phase in ("collect", "score", "update")] == [1, 2, 4]
        assert row["charts/env_steps_per_second"] == 8 / 7
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == [pytest.approx(0.002)]
    rates = [row["charts/learning_rate"] for row in rows]
    eighth = 0.004 * math.sqrt(0.5)  # of the cosine's two turns
    assert rates == pytest.approx([0.01, 0.006 + eighth, 0.006, 0.006 - eighth, 0.002])
    moved = [row["losses/grad_norm_lora"] > 0 for row in rows]
    assert moved == [False, False, True, True, True]
    away = [row["losses/kl_base"] > 0 for row in rows]
    assert away == [False, False, False, True, True]


class Still(Corridor):
    """One in which every prompt is the same, and which pays only where split is "eval"."""

    limit = 1

    def _reset(self):
        self.place = 0

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(self.split == "eval"), *rest


gym.register("vldac/Still-v0", Still)


@pytest.mark.parametrize("main, options", [(vldac.main, []), (loop.main, ["--group_size", 2])])
def test_evaluations_are_of_the_other_split(main, options, run, tmp_path):
    """Those of a training, and those of eval.py."""
    folder, rows = run("Still", "--eval_episodes", 1, *options, main=main)
    assert {episode["return"] for row in rows[1:] for episode in row["episodes"]} == {0.0}
    assert rows[0]["eval/episodic_return"] == rows[-1]["eval/episodic_return"] == 1.0
    for words in (["run", folder], ["random", "--env", "Still"]):
        result = evaluated(tmp_path / "result.json", *words, "--episodes", 1)
        assert result["summary"]["episodic_return"] == 1.0


def test_a_replaced_act_plays_in_training_and_in_evaluations(run, monkeypatch):
    """As whoever tries an idea would expect of any function of the module, `train` too."""
    act = vldac.act

    def always_right(policy, players):
        with monkeypatch.context() as scripted:
            script(scripted, [answer("right")])
            return act(policy, players)

    monkeypatch.setattr(vldac, "act", always_right)
    _, rows = run(CORRIDOR, "--eval_episodes", 2)
    rates = [row["charts/invalid_action_rate"] for row in rows[1:]]
    assert rates == [0.0, 0.0] and rows[0]["eval/success_rate"] == rows[2]["eval/success_rate"] == 1.0
    monkeypatch.setattr(vldac, "train", lambda args, folder: sys.exit("another training"))
    with pytest.raises(SystemExit, match="another training"):
        run(CORRIDOR, name="other")


def test_there_is_no_success_rate_before_every_player_has_ended_an_episode(run, monkeypatch, capsys):
    """One player begins two steps before the end of the corridor, the other four, so one ends alone."""
    script(monkeypatch, [answer("right")])
    sizes = ["--num_steps", 2, "--minibatch_size", 4, "--total_timesteps", 8]
    _, (_, *rows) = run(CORRIDOR, "--seed", 5, *sizes)
    assert [row["charts/success_rate"] for row in rows] == [None, 1.0]
    assert len(rows[0]["episodes"]) == 1 and rows[1]["episodes"]
    assert f"a response: {answer('right')}\nits action: right\n" in capsys.readouterr().out


def test_every_update_and_every_seed_has_random_numbers_of_its_own(run, monkeypatch):
    """Before anything is learned, and of one prompt only. The new weights, too."""
    weights, texts = [], set()

    def note(policy, args):
        weights.append(policy.value_head[0].weight[0, 0].item())

    spy(monkeypatch, vldac, "make_optimizer", note)
    for seed in (5, 6):
        _, (_, *rows) = run("Still", "--seed", seed, name=f"seed {seed}")
        texts |= {tuple(sample["response"] for sample in row["samples"]) for row in rows}
    assert len(texts) == 4  # of two updates each
    assert len(set(weights)) == 2


def test_a_rollout_bootstraps_from_the_values_after_it(run, monkeypatch):
    """The values of the prompts with which the next rollout begins: gamma times each is the last return."""
    rollouts, asked = [], []

    def values(self, prompts):
        asked.append([prompt["input_ids"].tolist() for prompt in prompts])
        return torch.full((len(prompts),), 7.0)

    spy(monkeypatch, vldac, "add_advantages", lambda steps, *_: rollouts.append(steps))
    monkeypatch.setattr(VLMPolicy, "values", values)
    run(CORRIDOR, "--gamma", 0.5, "--max_episode_steps", 5)
    returns = [step.return_ - step.reward for step in rollouts[0][-2:] if not step.done]
    assert returns == pytest.approx([3.5, 3.5])
    assert asked[0] == [step.prompt["input_ids"].tolist() for step in rollouts[1][:2]]


def test_a_taken_name_gets_a_number_and_equal_seeds_give_equal_logs(run, tmp_path, model, monkeypatch):
    """The second run's model is in the current folder; the run goes on from another one."""
    _, rows = run("NumberLine")
    monkeypatch.chdir(Path(model).parent)
    argv = ["--env", "NumberLine", "--model", Path(model).name, "--runs_dir", str(tmp_path)]
    vldac.main([*argv, "--run_name", "run", *SMALL])
    second = tmp_path / "run-2"
    assert without_times(rows_of(second)) == without_times(rows)
    (second / "checkpoint.pt").unlink()
    monkeypatch.chdir(tmp_path)
    vldac.main(["--resume", str(second)])
    assert without_times(rows_of(second)) == without_times(rows)


def test_two_programs_that_start_at_once_have_two_folders(tmp_path, monkeypatch):
    """The other one takes the name just before this one does."""
    others, mkdir = tmp_path / "run", Path.mkdir

    def too_late(path, **options):
        mkdir(others, exist_ok=True)
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", too_late)
    assert vldac.make_folder(tmp_path, "run") == tmp_path / "run-2"


def test_a_rollout_is_let_go_before_the_next_one_is_collected(run, monkeypatch):
    """Of a 7B the pixels of one are gigabytes."""
    collect, alive, rollouts = vldac.collect, [], []

    def record(*words):
        alive.append([step() is not None for step in rollouts])
        result = collect(*words)
        rollouts.extend(map(weakref.ref, result[0]))
        return result

    monkeypatch.setattr(vldac, "collect", record)
    run(CORRIDOR)
    assert alive == [[], [False] * 8]


def test_a_run_starts_from_an_adapter_that_opens_with_plain_peft(run, model):
    learn = ["--value_warmup", 0, "--learning_rate", 0.01]
    folder, _ = run("NumberLine", *learn, name="first")
    adapter = str(folder / "adapter")
    base = AutoModelForImageTextToText.from_pretrained(model)
    plain = PeftModel.from_pretrained(base, adapter)
    learned = [p for name, p in plain.named_parameters() if "lora_" in name]
    found = VLMPolicy(options(model, adapter=adapter)).lora_parameters()
    for one, other in zip(learned, found, strict=True):
        assert one.equal(other) and one.any()
    second, rows = run("NumberLine", "--adapter", adapter, name="second")
    assert rows[1]["losses/kl_base"] > 0  # the base is the model without its adapter

    # The run keeps it, as it keeps its toy: the original may go.
    shutil.rmtree(adapter)
    result = evaluated(second / "result.json", "start", second, "--episodes", 2)
    assert result["weights"] == str(second / "adapter-0")
    result = evaluated(second / "result.json", "run", second, "--episodes", 2, "--temperature", 0.5)
    assert result["weights"].startswith("checkpoint.pt") and result["sampling"]["temperature"] == 0.5
    words = ["run", second, "--episodes", 2, "--adapter", second / "adapter-0"]
    assert evaluated(second / "result.json", *words)["weights"] == str(second / "adapter-0")
    (second / "checkpoint.pt").unlink()
    vldac.main(["--resume", str(second)])
    assert without_times(rows_of(second)) == without_times(rows)


def test_saving_an_adapter_asks_no_hub(model, tmp_path, monkeypatch):
    """PEFT would, for a model that came from it."""
    policy = make_policy(model)
    policy.peft_model.peft_config["default"].base_model_name_or_path = "someone/model"
    asks = "peft.utils.save_and_load.check_file_exists_on_hf_hub"
    monkeypatch.setattr(asks, lambda *_: pytest.fail("the hub was asked"))
    vldac.save_adapter(policy, tmp_path / "adapter")


def test_the_numbers_go_to_weights_and_biases_too(run, monkeypatch):
    """A run that is resumed goes on in its own curves: there is one id."""
    sent, begun = [], []
    wandb = types.SimpleNamespace(__spec__=True, run=None)

    def init(**options):
        begun.append(options)
        wandb.run = types.SimpleNamespace(id=options["id"] or f"id {len(begun)}")
        return wandb.run

    wandb.init = init
    wandb.log = lambda row, step: sent.append(row | {"step": step})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder, rows = run("NumberLine", "--track", "true")
    assert [row["step"] for row in sent] == [row["global_step"] for row in sent] == [0, 8, 16]
    assert sent[1]["losses/policy_loss"] == rows[1]["losses/policy_loss"]
    assert not {"samples", "episodes"} & sent[1].keys()
    (folder / "checkpoint.pt").unlink()
    wandb.run = None  # another process
    vldac.main(["--resume", str(folder)])
    assert [options["id"] for options in begun] == [None, "id 1"]
    assert {options["resume"] for options in begun} == {"allow"}
    run("NumberLine", "--track", "true", name="other")
    assert len(sent) == 9


# ------------------------------------------------------------------------------- stopping and resuming

# Four updates; evaluation is half of the time, so of one short episode.
LONG = ["--total_timesteps", 32, "--eval_episodes", 1, "--eval_every", 2]
LONG += ["--learning_rate", 0.01, "--value_warmup", 1]


def same_runs(one, other):
    """Whether two run folders hold the same: log (but for the times), adapters, checkpoint."""
    assert without_times(rows_of(one)) == without_times(rows_of(other))
    adapters = sorted(path.name for path in one.glob("adapter*"))
    assert adapters == sorted(path.name for path in other.glob("adapter*")) and len(adapters) > 1
    for name in adapters:
        weights = f"{name}/adapter_model.safetensors"
        assert (one / weights).read_bytes() == (other / weights).read_bytes()
    a, b = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, other))
    for name in [name for name, x in a.items() if isinstance(x, dict | torch.Tensor)]:  # weights, optimizer
        torch.testing.assert_close(a.pop(name), b.pop(name), rtol=0, atol=0)
    assert a | {"log_bytes": 0} == b | {"log_bytes": 0}  # the log has times in it


@registered
class Troubled(Corridor):
    """Where something happens at a certain step of the training episodes of a process's players."""

    limit, steps = 3, 0  # with four steps an update, a checkpoint is within an episode
    number, happens = 0, None

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.np_random_seed >= 2**30:
            Troubled.steps += 1
            if Troubled.steps == Troubled.number:
                reward = Troubled.happens() or reward
        return observation, reward, *rest


TROUBLED = "test_vldac:Troubled-v0"


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def limit_file_size():
    resource = pytest.importorskip("resource", reason="limits of file sizes are Unix's")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # a checkpoint is larger


TROUBLES = [  # what happens, at which step (there are 8 per update), the exit status, and what is printed
    (killed, 20, -signal.SIGKILL, ""),
    (
        lambda: os.kill(os.getpid(), signal.SIGINT),
        20,
        1,
        r"stopped; to go on: \S*python\S* \S+ --resume \S+part",
    ),
    (limit_file_size, 4, 1, r"(?s)in save_checkpoint\n.*(File too large|unexpected pos \d+)"),
]


def forked(*functions):
    """The exit statuses of functions, each in a process forked from this one, with all that is imported."""

    def child(function):
        Troubled.steps = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
        function()

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, args=(function,)) for function in functions]
    for process in children:
        process.start()
    for process in children:
        process.join()
    return [process.exitcode for process in children]


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, model):
    """The folder of an uninterrupted run of four updates."""
    return start(tmp_path_factory.mktemp("whole"), model, TROUBLED, *LONG)[0]


@pytest.mark.parametrize("happens, number, status, words", TROUBLES, ids="killed stopped disk".split())
def test_whatever_stops_a_run_it_goes_on_as_if_it_had_not_been(
    happens, number, status, words, run, tmp_path, whole_run, monkeypatch, capfd
):
    """Stopped, mended, moved, resumed, equal to a run that was left alone."""
    with monkeypatch.context() as trouble:
        trouble.setattr(Troubled, "number", number)
        trouble.setattr(Troubled, "happens", happens)
        assert forked(lambda: run(TROUBLED, *LONG, name="part")) == [status]
    printed = capfd.readouterr()
    assert re.search(words, printed.err) and printed.out.count("a response: ") == 1
    part = (tmp_path / "part").rename(tmp_path / "moved")
    assert torch.load(part / "checkpoint.pt", weights_only=True)["update"] == (number - 1) // 8
    with open(part / "log.jsonl", "a") as log:
        log.write('{"update": 3, "global_st')  # a row that the kill has torn
    vldac.main(["--resume", str(part)])
    same_runs(whole_run, part)
    assert "a response: " not in capfd.readouterr().out


def files(folder):
    """Every file below a folder with its bytes."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def refused(argv, capsys, main=vldac.main) -> str:
    """The last line of a program that refuses its options: exit status 2 and no traceback."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in argv])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_only_how_a_run_is_computed_may_change(tmp_path, whole_run, model, monkeypatch, capsys):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    changes = {"model": "tiny", "stop_grad": "false", "kl_ref": "old"}
    for name, value in vldac.read_args(folder).items():
        if type(value) in (int, float) and name != "micro_batch_size":
            changes[name] = value + 1
    assert len(changes) > 25
    for name, value in changes.items():
        message = refused(["--resume", folder, f"--{name}", value], capsys)
        assert f"run has --{name} " in message and "which cannot change" in message
    assert files(folder) == files(whole_run)
    monkeypatch.chdir(Path(model).parent)
    the_same = ["--num_envs", "2", "--model", Path(model).name]  # also if it is typed in another way
    vldac.main(["--resume", str(folder), "--micro_batch_size", "2", *the_same])


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, whole_run, capsys):
    """By --resume and by eval.py; nothing is overwritten."""
    folder = shutil.copytree(whole_run, tmp_path / "run")
    for name, weight in {"renamed": torch.zeros(16, 32), "value_head.0.weight": torch.zeros(1, 32)}.items():
        state = torch.load(whole_run / "checkpoint.pt", weights_only=True)
        assert state["weights"].pop("value_head.0.weight").shape == (16, 32)
        state["weights"][name] = weight
        torch.save(state, folder / "checkpoint.pt")
        before = files(folder)
        for word, main in {"--resume": vldac.main, "run": evaluation.main}.items():
            assert "checkpoint.pt is of another model" in refused([word, folder], capsys, main)
        assert files(folder) == before


def test_a_checkpoint_and_the_log_are_on_the_disk_before_it_is_replaced(run, monkeypatch):
    """Or a run could not go on after the power has failed."""
    on_disk = {}  # file: bytes
    replaced = []

    def note_replaced(source, target):
        if target.name == "checkpoint.pt":
            files = [path.stat() for path in (source, target.with_name("log.jsonl"))]
            replaced.append([on_disk[file.st_ino] == file.st_size for file in files])

    spy(monkeypatch, os, "fsync", lambda fd: on_disk.update({os.fstat(fd).st_ino: os.fstat(fd).st_size}))
    spy(monkeypatch, os, "replace", note_replaced)
    run("NumberLine")
    assert replaced == [[True, True]] * 3


def test_a_log_that_has_lost_rows_is_not_filled_up(tmp_path, whole_run, capsys):
    """With zeros, as os.truncate would."""
    folder = shutil.copytree(whole_run, tmp_path / "run")
    with open(folder / "log.jsonl", "r+") as log:
        log.truncate(100)
    before = files(folder)
    assert "log.jsonl is shorter than it was at the checkpoint" in refused(["--resume", folder], capsys)
    assert files(folder) == before


def test_evaluating_changes_nothing_and_keeps_the_adapter_of_its_moment(run):
    """Not of the start, which has none."""
    often_folder, often = run(TROUBLED, *LONG, "--eval_every", 1, name="often")
    assert all("eval/success_rate" in row for row in often)
    never_folder, never = run(TROUBLED, *LONG, "--eval_every", 0, "--eval_episodes", 0, name="never")
    often = [{key: x for key, x in row.items() if not key.startswith("eval/")} for row in often]
    assert without_times(often) == without_times(never)
    adapters = [f"adapter-{steps}" for steps in (8, 16, 24)] + ["adapter"]
    kept = {
        path.name: load_file(path / "adapter_model.safetensors") for path in often_folder.glob("adapter*")
    }
    assert kept.keys() == set(adapters) and [path.name for path in never_folder.glob("adapter*")] == [
        "adapter"
    ]
    norms = [sum(x.norm() for name, x in kept[name].items() if "lora_B" in name) for name in adapters]
    assert norms[0] == 0 and len(set(norms)) == 4  # the first update is the warm-up


def test_an_infinite_number_becomes_null_and_the_run_goes_on(run, monkeypatch):
    """Else it would end after the update, before its checkpoint, and do so again when it is resumed."""
    diagnostics = vldac.diagnostics

    def overflowing(*words):
        return diagnostics(*words) | {"approx_kl": math.inf, "entropy": math.nan}

    monkeypatch.setattr(vldac, "diagnostics", overflowing)
    folder, (_, *rows) = run("NumberLine")
    assert (
        [row["losses/approx_kl"] for row in rows] == [row["losses/entropy"] for row in rows] == [None, None]
    )
    assert all(row["losses/kl_base"] is not None for row in rows)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["update"] == 2


# ------------------------------------------------------------------------------------------- the options

WRONG = {
    "--env OneRom": "Did you mean: `OneRoom`?",
    "--env test_vldac:Nothing-v0": "Environment `Nothing` doesn't exist",
    "--env no_such_module:World-v0": "No module named 'no_such_module'",
    "--env Pendulum-v1": "its action_space must be Discrete",
    "--model no/such/model-here": "--model no/such/model-here",
    "--model text": "--model text: it takes no images",
    "--model text --gamma 2": "error: --gamma must be between 0 and 1",  # the first mistake ends
    "--adapter nowhere": "adapter_config.json",
    "--adapter trained": "--adapter needs that run's base/ as --model",
    "--gam 1": "--gam",
    "--learning_rate nan": "--learning_rate must be above 0",
    "--temperature 0": "--temperature must be above 0",
    "--clip_coef -0.1": "--clip_coef must be above 0",
    "--learning_rate 1e-8": "--final_learning_rate 3e-05 is above --learning_rate",
    "--num_envs 0": "--num_envs must be at least 1",
    "--eval_every -1": "--eval_every must be at least 0",
    "--kl_coef -0.1": "--kl_coef must be at least 0",
    "--vf_coef -0.1": "--vf_coef must be at least 0",
    "--minibatch_size 100": "512 must be a multiple of --minibatch_size",
    "--total_timesteps 5": "512 must be from 2 to --total_timesteps",
    "--num_envs 1 --num_steps 1 --minibatch_size 1": "1 must be from 2 to --total_timesteps",
    "--resume torn": "torn is not the folder of a run",
    "--device cuda:7": "finds cpu",
    "--action_repeat 2": "--action_repeat is for MiniWorld's rooms with a red box, and not for NumberLine",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_invocations(words, tmp_path, capsys, monkeypatch):
    """One line that says what to do, exit status 2, no traceback, nothing left behind, no model loaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path / "text")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "args.json").write_text('{"env": "Number')
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32}')
    monkeypatch.setattr(vldac, "VLMPolicy", lambda args: pytest.fail("a model was loaded"))
    before = files(tmp_path)
    assert WRONG[words] in refused(["--device", "cpu", "--env", "NumberLine", *words.split()], capsys)
    assert files(tmp_path) == before and not (tmp_path / "runs").exists()


def test_the_defaults_are_the_paper_s_else_the_released_code_s():
    paper = {"total_timesteps": 51_200, "learning_rate": 5e-5, "final_learning_rate": 1e-7, "num_images": 4}
    paper |= {"gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 0.15, "kl_coef": 0.05, "value_warmup": 2}
    paper |= {"update_epochs": 2, "minibatch_size": 128, "stop_grad": True}
    released = {"kl_ref": "base", "clip_coef": 0.1, "lora_rank": 16, "lora_alpha": 32, "max_grad_norm": 1.0}
    released |= {"value_hidden": [3072, 2048]}
    ours = {"num_envs": 16, "num_steps": 32, "temperature": 1.0, "max_new_tokens": 256}
    assert vars(Args()).items() >= (paper | released | ours).items()


def test_precedence_is_command_line_world_toy_default(model, capsys):
    args = vldac.parse_args("--env vldac/NumberLine-v0 --gamma 0.99 --device cpu --stop_grad false".split())
    assert args.env == "NumberLine"  # by which toy.py knows its lesson
    assert args.gamma == Args.gamma == 0.99  # given counts, also where it equals the default
    assert args.gae_lambda == 1.0  # the world's
    assert args.learning_rate == vldac.PRESETS["tiny"]["learning_rate"] != Args.learning_rate
    assert args.vf_coef == Args.vf_coef and args.stop_grad is False and args.value_hidden == [256, 256]
    with pytest.raises(SystemExit):
        vldac.parse_args("--env NumberLine --model tiny --help".split())
    shown = " ".join(capsys.readouterr().out.split())
    assert "environment steps, rounded down to whole updates (default: 51200)" in shown
    assert "have other defaults" in shown

    of_worlds = {"OneRoom": (30_720, 3, 0.99), "FourRooms": (51_200, 3, 0.99), "EZPoints": (20_480, 1, 1.0)}
    for world, (steps, repeat, gamma) in of_worlds.items():
        words = ["--env", world, "--device", "cpu", "--model"]
        for model_of_it, expected in (("tiny", (steps, repeat)), (model, (Args.total_timesteps, 1))):
            args = vldac.parse_args([*words, model_of_it])
            assert (args.total_timesteps, args.action_repeat, args.gamma) == (*expected, gamma)
    words = ["--env", "WebShop", "--device", "cpu", "--model"]  # long prompts, but a toy is small
    assert vldac.parse_args([*words, model]).gradient_checkpointing
    assert not vldac.parse_args([*words, "tiny"]).gradient_checkpointing


@pytest.mark.parametrize("bfloat16, dtype", [(True, "bfloat16"), (False, "float32")])
def test_the_defaults_of_a_gpu(bfloat16, dtype, monkeypatch):
    """A card that would only emulate bfloat16 gets float32."""
    pretend_gpu(monkeypatch, bfloat16)
    assert Args().dtype == dtype and Args(device="cpu").dtype == "float32"
    assert (Args().device, Args().model) == ("cuda", "Qwen/Qwen2-VL-7B-Instruct")


def test_a_gpu_that_is_not_used_is_mentioned(monkeypatch, capsys):
    """The first line says why it is the toy."""
    exists = os.path.exists
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidia0" or exists(path))
    monkeypatch.setattr(envs, "check_world", lambda env: sys.exit("enough"))
    with pytest.raises(SystemExit, match="enough"):
        vldac.main(["--env", "NumberLine"])
    printed = capsys.readouterr().out
    assert "toy on the CPU, though this machine has an NVIDIA GPU: which PyTorch does not find" in printed


# ------------------------------------------------------------------------------------------------ the toy


@registered
class Signal(envs.World):
    """A world of one-step episodes for tests: the text says which way is right."""

    task, actions, size, limit = "obey", ("left", "right"), (28, 28), 4

    def _reset(self):
        self.way = self.actions[int(self.np_random.integers(2))]

    def _step(self, action):
        self.success = action == self.way
        return float(self.success), True

    def render(self):
        return np.zeros((28, 28, 3), np.uint8)

    def _text(self):
        return f"Go {getattr(self, 'way', 'on')}!"


SIGNAL = "test_vldac:Signal-v0"


def run_here(command, stdout, text):
    """Like subprocess.run, of a Python program, but within this process, in which all is imported."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", command[1:]), contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(command[1], run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code
    return types.SimpleNamespace(returncode=status, stdout=printed.getvalue())


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """A run of the toy in a world of one word, on a fresh cache."""
    folder = tmp_path_factory.getbasetemp() / "toy"
    if not folder.exists():  # the tests of extras/ take this fixture too
        argv = f"--env {SIGNAL} --model tiny --device cpu --total_timesteps 2048 --num_envs 64".split()
        argv += "--num_steps 4 --minibatch_size 64 --value_warmup 1 --eval_episodes 100".split()
        argv += ["--run_name", "run", "--runs_dir", str(folder)]
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            monkeypatch.setattr(subprocess, "run", run_here)
            vldac.main(argv)
    return folder


def test_the_toy_learns(toy_run):
    """The README's promise in its smallest form: obeying one word, from chance to nearly always."""
    first, *rows = rows_of(toy_run / "run")
    assert first["eval/success_rate"] < 0.7 and rows[-1]["eval/success_rate"] > 0.9
    assert np.mean([row["charts/invalid_action_rate"] for row in rows]) < 0.05
    flags = [episode["success"] for row in rows for episode in row["episodes"]]
    assert len(flags) > 100 and rows[-1]["charts/success_rate"] == np.mean(flags[-100:])


def test_the_toy_is_taught_once_and_the_run_keeps_it(toy_run, tmp_path, monkeypatch, capsys):
    """So that a run can be moved and resumed."""
    folder = toy_run
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(subprocess, "run", run_here)
    sizes = ["--num_envs", 64, "--num_steps", 2, "--minibatch_size", 64, "--total_timesteps", 256]
    sizes += ["--max_new_tokens", 40, "--eval_episodes", 2]
    one, rows = start(tmp_path, "tiny", SIGNAL, *sizes)
    printed = capsys.readouterr()
    assert "teaching a toy" not in printed.err  # it is in the cache
    assert f"{one}: the toy, {one / 'base'}, on cpu in float32" in printed.out.splitlines()[0]
    assert files(one / "base") == files(folder / "run" / "base")
    moved = one.rename(tmp_path / "moved")
    (moved / "checkpoint.pt").unlink()
    vldac.main(["--resume", str(moved), "--model", "tiny"])
    assert without_times(rows_of(moved)) == without_times(rows)
    assert f"{moved}: the toy, " in capsys.readouterr().out


IN_A_ROOM = dict.fromkeys(envs.MiniWorld.actions, 1 / 5) | {"move forward": 2 / 5}


@pytest.mark.parametrize("env, captions, hint_share, chances", [
    ("NumberLine", 20, 0, {"-": 1 / 2, "+": 1 / 2}),
    ("EZPoints", 20, 1 / 2, dict.fromkeys(envs.EZPoints.actions, 1 / 13)),
    pytest.param("OneRoom", 4, 0, IN_A_ROOM, marks=needs_opengl),
])  # fmt: skip
def test_the_toy_is_taught_to_say_what_it_sees_and_to_act_at_random(env, captions, hint_share, chances):
    """In a room forward twice as often as each other; in EZPoints half of the actions are hints."""
    examples = toy.play(Args(env=env, num_envs=4, num_images=1), 400, seed=0)
    rng = random.Random(0)
    hinted, by_chance, random_actions = [], [], []
    for example in examples * 5:
        response = json.loads(example.response(rng))
        assert response["thoughts"] == example.caption
        hinted.append(response["action"] == example.hint)
        by_chance.append(chances[example.hint])
        if response["action"] != example.hint:
            random_actions.append(response["action"])
    assert len({example.caption for example in examples}) >= captions
    assert np.mean(hinted) == pytest.approx(hint_share + (1 - hint_share) * np.mean(by_chance), abs=0.03)
    assert set(random_actions) == set(chances)


def test_the_toy_is_taught_again_for_what_its_lesson_depends_on_only(tmp_path, monkeypatch):
    """Not for an edit of the policy or the update."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = inspect.getsource

    def folder(edited=None, **changes):
        """Of the toy for these options, after an edit of a module or function."""
        with monkeypatch.context() as context:
            context.setattr(inspect, "getsource", lambda x: source(x) + (" edited" if x is edited else ""))
            return toy.cached_folder(Args(**{"env": "extras.my_world:Doors-v0"} | changes))

    my_world = importlib.import_module("extras.my_world")
    first = folder()
    assert folder(learning_rate=1.0, lora_rank=3) == folder(edited=vldac) == first
    newest = folder(env="extras.my_world:Doors")  # without a version, as Gymnasium allows
    assert newest.name.startswith("extras-my-world-Doors-") and newest != first
    others = {folder(seed=7), folder(edited=build_prompt), folder(edited=envs), folder(edited=my_world)}
    assert len(others - {first}) == 4 and first.parent == tmp_path / "vldac"
    changes = {"split": "eval", "num_envs": 4, "num_images": 2, "max_image_tokens": 32, "max_new_tokens": 9}
    changes |= {"max_episode_steps": 7, "action_repeat": 2}
    rooms = {folder(env="OneRoom", **{name: value}) for name, value in changes.items()}
    assert len(rooms - {folder(env="OneRoom")}) == len(changes)


def test_a_toy_is_taught_until_both_goals_are_reached_on_frames_that_it_has_not_met(tmp_path, monkeypatch):
    """Rare captions are shown as often as common ones."""
    reached = iter([(1.0, 0.5), (0.5, 1.0), (1.0, 1.0), (1.0, 1.0)])
    play, played, asked, shown = toy.play, [], [], []

    def captioned(args, count, seed):
        examples = play(args, 40, seed)
        for i, example in enumerate(examples):
            example.caption = "rare" if i % 10 == 0 else "common"
        played.append((seed, examples))
        return examples

    monkeypatch.setattr(toy, "play", captioned)
    monkeypatch.setattr(toy, "quality", lambda policy, examples: asked.append(examples) or next(reached))
    spy(monkeypatch, toy.Example, "response", lambda example, rng: shown.append(example.caption))
    args = Args(env=SIGNAL, model="tiny", device="cpu", num_envs=4, num_images=1, max_image_tokens=16)
    toy.teach(args, tmp_path / "toy", steps=2, rounds=4)
    (seed, _), (other_seed, held_out) = played
    assert seed != other_seed and len(asked) == 3 and all(examples is held_out for examples in asked)
    taught = shown[40:]  # after those of the tokenizer
    assert len(taught) == 3 * 2 * 48 and 0.4 < taught.count("rare") / len(taught) < 0.6


@registered
class Misleading(Corridor):
    def hint(self):
        return "dance"


def test_a_toy_that_cannot_be_taught_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    """And leaves nothing behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", run_here)
    argv = ["--env", "test_vldac:Misleading-v0", "--device", "cpu", "--runs_dir", str(tmp_path / "runs")]
    with pytest.raises(SystemExit) as stop:
        vldac.main(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    [of_the_toy, of_the_run] = re.findall(r".*error: (.*)", printed)
    assert of_the_toy.startswith("hint() must return one of the actions now") and "'dance'" in of_the_toy
    assert of_the_run.startswith("there is no toy: ") and "Traceback" not in printed
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache" / "vldac").exists()


def test_two_runs_that_teach_one_toy_at_once_share_it(tmp_path, monkeypatch, capsys):
    """The slower one finds the other's folder in its place. More than 16 environments change nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def teach(args, folder):
        assert args.num_envs == 16
        folder.mkdir(parents=True)
        (folder / "weights").write_text("this one's")
        shutil.copytree(folder, toy.cached_folder(args))

    monkeypatch.setattr(toy, "teach", teach)
    for num_envs in (16, 64):
        toy.main(json.dumps(vars(options("tiny", env="NumberLine", num_envs=num_envs))))
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and list((tmp_path / "vldac").iterdir()) == [Path(first)]


# -------------------------------------------------------------------------------------------- evaluation


def evaluated(path, *words):
    """What eval.py writes."""
    evaluation.main([*map(str, words), "--out", str(path)])
    return json.loads(path.read_text())


def test_an_evaluation_of_a_run_and_of_its_start(toy_run, tmp_path, capsys):
    """The trained toy obeys, the one it started from guesses; each evaluation repeats itself."""
    folder, out = toy_run / "run", tmp_path / "result.json"

    def episodes(command, *words):
        return evaluated(out, command, folder, "--episodes", 60, *words)["episodes"]

    run, start = episodes("run"), episodes("start")
    assert run == episodes("run") and [episode["seed"] for episode in run] == list(range(60))
    wins, guesses = (sum(episode["success"] for episode in played) for played in (run, start))
    assert wins > 50 > guesses
    chance, greedy = ["--seed", 1], ["--mode", "greedy"]
    assert episodes("start", *chance) != start
    assert episodes("start", *greedy, *chance) == episodes("start", *greedy)
    assert episodes("start", "--adapter", folder / "adapter") == run
    assert "weights: checkpoint.pt, update 8" in capsys.readouterr().out


def test_a_ceiling_a_floor_and_their_paired_difference(tmp_path, capsys):
    """In NumberLine a random player arrives in time in 0.611 of the games (exactly, over all starts)."""
    words = ["--env", "NumberLine", "--episodes", 60]
    floor = evaluated(tmp_path / "random.json", "random", *words)
    ceiling = evaluated(tmp_path / "hint.json", "hint", *words)
    assert 0.45 < floor["summary"]["success_rate"] < 0.75 and ceiling["summary"]["success_rate"] == 1.0
    other = evaluated(tmp_path / "other.json", "random", *words, "--num_envs", 4)
    assert other["episodes"] == floor["episodes"]  # whatever plays beside it
    player = vldac.Player(Args(env="NumberLine"))
    player.reset(seed=0)
    steps = [evaluation.scripted("random")(None, [player])[0] for _ in range(9)]
    assert {step.action for step in steps} == {"-", "+"}  # not one for a whole episode

    lost = [episode["success"] for episode in floor["episodes"]].count(False)
    printed = evaluation.compare(tmp_path / "random.json", tmp_path / "hint.json")
    p = f"exact McNemar p = {2 / 2**lost:.2g}"
    assert printed.splitlines()[-1] == f"B - A: {lost / 60:+.3f} ({lost} won, 0 lost, {p})"
    assert printed.splitlines()[0] == f"A: {tmp_path / 'random.json'}"
    reversed_ = evaluation.compare(tmp_path / "hint.json", tmp_path / "random.json")
    assert reversed_.splitlines()[-1] == f"B - A: {-lost / 60:+.3f} (0 won, {lost} lost, {p})"
    for change in (["--max_episode_steps", 5], ["--invalid_reward", 0], ["--split", "train"]):
        evaluated(tmp_path / "other.json", "hint", *words, *change)
        with pytest.raises(envs.UserError, match=f"differ in {change[0].removeprefix('--')} and"):
            evaluation.compare(tmp_path / "hint.json", tmp_path / "other.json")
    longer = ceiling | {"task": ceiling["task"] | {"action_repeat": 3}}  # in a world of MiniWorld
    (tmp_path / "other.json").write_text(json.dumps(longer))
    with pytest.raises(envs.UserError, match="differ in action_repeat and"):
        evaluation.compare(tmp_path / "hint.json", tmp_path / "other.json")
    evaluated(tmp_path / "other.json", "hint", *words[:-1], 30)
    with pytest.raises(envs.UserError, match="differ in seeds and"):
        evaluation.compare(tmp_path / "hint.json", tmp_path / "other.json")
    evaluation.main(["compare", str(tmp_path / "random.json"), str(tmp_path / "hint.json")])
    assert capsys.readouterr().out.endswith(printed + "\n")
    assert "is a folder, and not a file" in refused(
        ["hint", *words, "--out", tmp_path], capsys, evaluation.main
    )


def test_results_without_a_success_flag_are_compared_by_their_returns(tmp_path):
    """Of one player, some of whose returns are then made others."""
    words = ["random", "--env", "test_vldac:Stairs-v0", "--episodes", 5]
    a = evaluated(tmp_path / "a.json", *words)
    b = evaluated(tmp_path / "b.json", *words)
    for episode, more in zip(b["episodes"], (2.0, -1.0, 0.0, 0.0, 1.5), strict=True):
        episode["return"] += more
    (tmp_path / "b.json").write_text(json.dumps(b))
    printed = evaluation.compare(tmp_path / "a.json", tmp_path / "b.json")
    last = "B - A: return +0.500 (2 higher, 1 lower; there is no success flag)"
    assert printed.splitlines()[-1] == last and "p =" not in printed
    a["episodes"][0]["success"], a["summary"]["success_rate"] = True, 0.2  # a flag that only a success sets
    (tmp_path / "a.json").write_text(json.dumps(a))
    assert "(0 won, 1 lost, " in evaluation.compare(tmp_path / "a.json", tmp_path / "b.json")


def test_what_an_evaluation_may_change_is_told(capsys):
    for words, allowed in [
        (["run", "--help"], evaluation.RUN_OPTIONS),
        (["run", "somewhere", "--help"], evaluation.RUN_OPTIONS),
        (["--help"], evaluation.MODEL_OPTIONS),
    ]:
        with pytest.raises(SystemExit):
            evaluation.main(words)
        told = capsys.readouterr().out
        assert sorted(re.findall(r"^  --(\w+)", told, re.M)) == sorted(allowed)
        assert "on seeds 0, 1, 2, ... (default: 200)" in " ".join(told.split()) and "None" not in told


def test_the_name_of_a_result_tells_what_was_typed(model, toy_run, tmp_path, monkeypatch):
    """So a second evaluation does not replace the first, and the two can be compared."""
    folder = shutil.copytree(toy_run / "run", tmp_path / "run")
    shutil.copytree(model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    of_model = ["--model", "model", "--max_new_tokens", "4", "--max_episode_steps", "2"]
    for command in (["run", "run"], ["start", "run"], ["random"], ["model", *of_model]):
        env = [] if "run" in command else ["--env", "NumberLine"]
        for words in ([], ["--mode", "greedy"], ["--temperature", "0.5", "--device", "cpu"]):
            evaluation.main([*command, *env, "--episodes", "2", *words])
    names = {file.stem.removeprefix("test_vldac-Signal-v0-") for file in (folder / "eval").iterdir()}
    changed = ["sampled-2", "greedy-2", "sampled-2-temperature-0.5"]
    assert names == {f"{command}-{name}" for command in ("run", "start") for name in changed}
    typed = "-max_new_tokens-4-max_episode_steps-2"
    expected = {"random-2", "random-2-temperature-0.5"} | {f"model-{name}{typed}" for name in changed[:2]}
    expected |= {f"model-sampled-2{typed}-temperature-0.5"}
    assert {file.stem.removeprefix("NumberLine-") for file in Path("results").iterdir()} == expected


WRONG_EVALUATIONS = {
    "run nowhere": "nowhere is not the folder of a run",
    "hint --env test_vldac:Corridor-v0": "test_vldac:Corridor-v0 gives no hint",
    "random --env NumberLine --episodes 0": "--episodes must be at least 1",
    "model --env NumberLine --device cpu": "a toy belongs to a run",
    "compare other.json other.json": "it was not written by eval.py",
    "compare nothing.json other.json": "nothing.json is not a result",
    "run run": "run has saved nothing yet",
    "random --resume run --episodes 2": "--resume is no option of an evaluation",
    "run run --lora_alpha 64": "--lora_alpha is no option of an evaluation",
    "start run --eval_episodes 1000": "--eval_episodes is no option of an evaluation",
    "model --env NumberLine --learning_rate 1": "--learning_rate is no option of an evaluation",
}


@pytest.mark.parametrize("words", WRONG_EVALUATIONS)
def test_wrong_evaluations(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    Path("run").mkdir()
    Path("run/args.json").write_text(json.dumps({"program": "vldac"} | vars(Args())))
    assert WRONG_EVALUATIONS[words] in refused(words.split(), capsys, evaluation.main)


# --------------------------------------------------------------------------------------------- the worlds


def play(env, seed, choose):
    """The records of an episode: image, text, reward, terminated, truncated, info. choose(info) -> action"""
    observation, info = env.reset(seed=seed)
    records = [(observation["image"].tobytes(), observation["text"], 0.0, False, False, info)]
    while not any(records[-1][3:5]):
        observation, *rest = env.step(choose(records[-1][5]))
        records.append((observation["image"].tobytes(), observation["text"], *rest))
    return records


def rewards_of(records):
    return [record[2] for record in records[1:]]


def randomly(seed):
    rng = random.Random(seed)
    return lambda info: rng.choice(info["actions"])


WORLDS = [*(pytest.param(name, marks=needs_opengl) for name in envs.MINIWORLD), *envs.CARDS]


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


@functools.cache
def made_once(name):
    """A world for several tests."""
    return envs.make_env(name)


@pytest.mark.parametrize("name", WORLDS)
def test_same_seed_and_actions_same_episode(name):
    """Bit for bit, whatever was played before and whatever is played in between in other worlds."""
    env, twin = (envs.make_env(name, max_episode_steps=50) for _ in range(2))
    names = {*envs.MINIWORLD * (not NO_OPENGL), *envs.CARDS} - {name}
    others = [made_once(other) for other in sorted(names)]
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
@pytest.mark.parametrize("action", ["", "TURN LEFT"])
def test_what_is_not_admissible_costs_a_step_and_ends_in_time(name, action):
    env = envs.make_env(name, invalid_reward=-0.25)
    records = play(env, 3, lambda info: action)
    *_, terminated, truncated, info = records[-1]
    assert len(records) == records[0][5]["left"] + 1 and not info["success"]
    # A card game's own limit is one of its rules.
    assert (terminated, truncated) == ((True, False) if name in envs.CARDS else (False, True))
    assert set(rewards_of(records)[:-1]) == {-0.25}
    if name not in ("EZPoints", "Points24"):  # their formula shows the blank
        assert {record[0] for record in records} == {records[0][0]}


@pytest.mark.parametrize("name", ["NumberLine", CORRIDOR])  # which pay -1 and 0.5
def test_what_is_not_admissible_may_pay_nothing(name):
    env = envs.make_env(name, invalid_reward=0.0, max_episode_steps=3)
    _, info = env.reset(seed=0)
    _, reward, *_, after = env.step("")
    assert (reward, info["left"], after["left"]) == (0.0, 3, 2)


@pytest.mark.parametrize("name, seeds, lowest, highest", [
    pytest.param("Hallway", 40, 1, 1, marks=needs_opengl),
    pytest.param("OneRoom", 40, 1, 1, marks=needs_opengl),
    ("EZPoints", 200, 1, 1),
    ("Points24", 50, 0.6, 0.9),  # about 73 % of the deals have a solution
    ("Blackjack", 400, 0.36, 0.5),  # basic strategy: 0.43
])  # fmt: skip
def test_the_hints_win_what_can_be_won(name, seeds, lowest, highest):
    env, won = made_once(name), []
    for seed in range(seeds):
        records = play(env, seed, lambda info: env.hint())
        won.append(records[-1][5]["success"])
    assert lowest <= np.mean(won) <= highest


@needs_opengl
def test_miniworld_rewards_and_ends():
    lost = play(envs.make_env("OneRoom", max_episode_steps=20), 0, lambda info: "turn left")
    assert rewards_of(lost) == [0.0] * 19 + [-1.0]
    assert lost[-1][3:5] == (False, True)
    lefts = [info["left"] for *_, info in lost]
    assert lefts == list(range(20, -1, -1))

    def won(**options):
        env = envs.make_env("OneRoom", **options)
        inadmissible = iter(["", "pickup"])
        return play(env, 1, lambda info: next(inadmissible, env.hint()))

    records = won()
    steps = len(records) - 1  # the inadmissible ones are paid for too
    reward, terminated, truncated = records[-1][2:5]
    assert reward == pytest.approx(1 - 0.2 * steps / 180)
    assert (terminated, truncated) == (True, False)
    last = won(max_episode_steps=steps)
    assert last[-1][2:5] == (reward, True, True)
    assert last[-1][5]["success"]

    env = envs.make_env("OneRoomS6Fast", max_episode_steps=128)
    _, info = env.reset(seed=0)
    assert info["left"] == 50  # the simulator's own limit
    # As in Sidewalk's street: an end that is no success.
    env.unwrapped.env.step = lambda action: (env.unwrapped.image, 0, True, False, {})
    _, reward, *flags, info = env.step("move forward")
    assert (reward, flags, info["success"]) == (-1.0, [True, False], False)


@needs_opengl
def test_an_action_may_be_several_steps_of_miniworld():
    """Or fewer, if the episode ends. Limit and reward count the simulator's steps."""
    frames = []
    for repeat in (1, 3):
        env = envs.make_env("OneRoom", max_episode_steps=50, action_repeat=repeat)
        frames.append([record[0] for record in play(env, 1, lambda info: "turn left")])
    assert len(frames[1]) == 1 + 17 and frames[1][:17] == frames[0][::3]
    env = envs.make_env("OneRoom", action_repeat=3)
    inadmissible = iter(["", "pickup"])
    records = play(env, 1, lambda info: next(inadmissible, env.hint()))
    actions, reward, info = len(records) - 1, records[-1][2], records[-1][5]
    assert info["success"] and info["left"] == 43 - actions
    steps = (1 - reward) / 0.2 * 180
    assert 3 * actions - 2 <= round(steps, 3) <= 3 * actions


@needs_opengl
@pytest.mark.parametrize("repeat, ahead", [(1, 5), (2, 12)])
def test_captions_of_miniworld_are_true(repeat, ahead):
    """Compared with where the simulator says the box is, in a room without walls between."""
    env, seen = envs.make_env("OneRoom", action_repeat=repeat), set()
    for seed in range(60):
        env.reset(seed=seed)
        box = env.env.box.pos - env.env.agent.pos
        bearing = math.degrees(env.env.agent.dir - math.atan2(-box[2], box[0]))  # to the right
        bearing = (bearing + 180) % 360 - 180
        words = ""  # near a boundary both words are right
        if abs(bearing) < ahead:
            words = "ahead"
        elif ahead + 10 < abs(bearing) < 25:
            words = "on the right" if bearing > 0 else "on the left"
        elif abs(bearing) > 60:
            words = "no red box"
        assert words in env.caption()
        seen.add(words)
    assert seen == {"ahead", "on the left", "on the right", "no red box", ""}


class NoSuchConfigException(Exception):
    """One of pyglet's, by its module."""

    __module__ = "pyglet.window"


@pytest.mark.parametrize("raised, kind, words", [
    (ImportError('Library "GL" not found.'), envs.UserError, "apt-get install.* --env NumberLine"),
    (NoSuchConfigException(""), envs.UserError, "apt-get install.* --env NumberLine"),
    (ValueError("a fault of the simulator"), ValueError, "^a fault of the simulator$"),
])  # fmt: skip
def test_a_simulator_that_cannot_render_tells_what_helps(raised, kind, words, monkeypatch):
    """Other errors are its own."""

    def make(*_, **__):
        raise raised

    monkeypatch.setattr(gym, "make", make)
    with pytest.raises(kind, match=words):
        envs.MiniWorld("OneRoom")


@needs_opengl
@pytest.mark.parametrize("devices, taken", [
    (["EGL_NV_device", "EGL_EXT EGL_MESA_device_software"], 1), (["EGL_MESA_device_software"], 0), ([], 0),
])  # fmt: skip
def test_of_egl_s_devices_the_software_renderer_is_taken(devices, taken, monkeypatch):
    """Mesa lists an NVIDIA GPU first, and cannot drive it.

    This list is made up. That Mesa renders with the one and not with the other needs a GPU's render node.
    """
    from pyglet.libs.egl import eglext, lib

    def query(size, handles, count):
        count.value = len(devices)
        for k in range(size):
            handles[k] = k + 1

    monkeypatch.setattr(eglext, "eglQueryDevicesEXT", query)
    monkeypatch.setattr(lib, "link_EGL", lambda *_: lambda handle, what: devices[handle - 1].encode())
    assert envs.software_renderer() == taken


@needs_opengl
@pytest.mark.parametrize("vendor, device", [(None, 7), ("/etc/another.json", 0)])
def test_the_user_s_own_choice_of_egl_is_left_alone(vendor, device, monkeypatch):
    pyglet = sys.modules["pyglet"]
    monkeypatch.setattr(envs, "software_renderer", lambda: 7)
    monkeypatch.setattr(gym, "make", lambda *_, **__: types.SimpleNamespace(unwrapped=None))
    variable = "__EGL_VENDOR_LIBRARY_FILENAMES"
    monkeypatch.setenv(variable, vendor) if vendor else monkeypatch.delenv(variable, raising=False)
    for _ in range(2):  # the second time as in a process that this one has started
        monkeypatch.setitem(pyglet.options, "headless_device", 0)
        envs.make_simulator("OneRoom", 60, 80)
        assert pyglet.options["headless_device"] == device


def test_deals_of_the_small_games():
    line = envs.make_env("NumberLine")
    points = envs.make_env("EZPoints")
    starts, pairs = set(), set()
    for seed in range(300):
        line.reset(seed=seed)
        starts.add((line.current, line.target))
        points.reset(seed=seed)
        pairs.add(tuple(sorted(points.numbers)))
    assert len(starts) == 30
    assert all(current != target for current, target in starts)
    assert pairs == {(2, 10), (5, 7), (3, 9), (4, 8), (3, 4), (2, 6), (6, 6)}


def test_number_line_rules():
    env = envs.make_env("NumberLine", max_episode_steps=50)
    _, info = env.reset(seed=0)
    assert info["left"] == 10  # the game's own limit
    env.current, env.target = 0, 2
    moves = [  # action, the number it leads to, what it pays
        ("-", 0, -1),  # blocked at the edge
        ("+", 1, 0),  # nearer
        ("-", 0, -1),  # away
        ("up", 0, -1),  # no symbol of the game
        ("+", 1, 0),
        ("+", 2, 1),  # there
    ]
    for action, current, reward in moves:
        _, paid, terminated, truncated, info = env.step(action)
        assert (env.current, paid, truncated) == (current, reward, False)
        assert terminated == info["success"] == (current == 2)
    env.current, env.target = 5, 2
    assert (env.step("+")[1], env.current) == (-1, 5)  # the other edge

    env = envs.make_env("NumberLine", max_episode_steps=3)  # a shorter limit is a time-out
    *_, terminated, truncated, _ = play(env, 0, lambda info: "")[-1]
    assert (terminated, truncated) == (False, True)


@pytest.mark.parametrize("name, ranks, symbols, rewards", [
    ("EZPoints", [12, 2], "10 + 2 =", [0, 0, 0, 10]),
    ("EZPoints", [12, 2], "10 =", [0, -1]),  # 10 is not 12
    ("EZPoints", [12, 2], "10 10 3 what + 2 =", [0, -1, -1, -1, 0, 0, -1]),  # used up, not there, no symbol
    ("EZPoints", [12, 2], "2 2 2 2 2 2 2", [0, -1, -1, -1, -1, -1, -1]),  # the seventh ends the game
    ("Points24", [4, 6, 1, 1], "4 * 6 =", [0, 0, 0, -1]),  # two cards are left
    ("Points24", [2, 4, 1, 1], "2 4 + 1 - 1 =", [0] * 6 + [-1]),  # digits side by side are no 24
    ("Points24", [8, 3, 8, 3], "8 / ( 3 - 8 / 3 ) =", [0] * 9 + [10]),  # 23.999999999999993 in floating point
    ("Points24", [1, 11, 12, 13], "1 10 10 10 10", [0, 0, 0, 0, -1]),
    ("Points24", [1, 2, 3, 4], "( " * 22, [0] * 21 + [-1]),
])  # fmt: skip
def test_formulas_are_paid_by_the_rules(name, ranks, symbols, rewards):
    env = envs.make_env(name)
    env.reset(seed=0)
    env.ranks = ranks
    env._deal()
    paid = []
    for symbol in symbols.split():
        _, reward, terminated, truncated, info = env.step(symbol)
        paid.append(reward)
    assert paid == rewards
    assert info["success"] == (rewards[-1] == 10)
    assert terminated == (symbols[-1] == "=" or len(paid) == env.limit)  # the game's own limit is no time-out
    assert not truncated


def test_what_is_no_formula_has_no_value():
    """Among them what Python would take: a sign, ** and //."""
    for wrong in ("", "(", ")", "1 +", "( 1", "1 )", "( )", "1 ( 2 )", "1 / 0", "( 1 ) ( 2 )", "+"):
        assert envs.value_of(wrong.split()) is None
    for cheat in ("- 6", "+ 6", "5 * * 2 - 1", "10 / / 4", "2 4"):
        assert envs.value_of(cheat.split()) is None


@pytest.mark.parametrize("player, dealer, action, reward", [
    ([10, 10], [10, 8], "stand", 1),
    ([10, 5], [10, 10], "stand", -1),
    ([10, 10], [10, 10], "stand", 0),
    ([10, 10], [10, 10], "hit", -1),  # over 21
    ([10, 5], [10, 6], "stand", 1),  # the dealer must draw below 17, and busts
    ([10, 5], [10, 7], "stand", -1),  # and not from 17 on
    ([1, 10], [10, 9], "stand", 1),  # an ace counts 11 where it fits
    ([1, 10, 8], [10, 7], "stand", 1),  # and else 1
    ([1, 1, 10], [10, 6], "stand", 1),  # 12, which has not lost
    ([10, 10, 2], [10, 7], "stand", -1),  # 22
])  # fmt: skip
def test_blackjack_is_paid_by_the_rules(player, dealer, action, reward):
    env = envs.make_env("Blackjack")
    env.reset(seed=1)
    env.player = [(value, "K", "H") for value in player]
    env.dealer = [(value, "K", "H") for value in dealer]
    env._card = lambda: (10, "K", "H")
    _, paid, terminated, _, info = env.step(action)
    assert (paid, terminated, info["success"]) == (reward, True, reward == 1)


def test_what_the_frames_of_the_card_games_show(monkeypatch):
    """What is drawn: numbers, or ranks and suits; of a hand also the cards that came later."""
    drawn = []
    monkeypatch.setattr(envs.ImageDraw.ImageDraw, "text", lambda self, xy, text, *_, **__: drawn.append(text))

    def shown(name, **state):
        env = made_once(name)
        env.reset(seed=0)
        vars(env.unwrapped).update(state)
        drawn.clear()
        env.render()
        return " ".join(drawn)

    assert shown("NumberLine", target=4, current=1) == "Target: 4 Current: 1"
    cards = {"ranks": [1, 13], "suits": "HS", "formula": ["1", " "]}
    assert shown("EZPoints", **cards) == "A H K S Formula: 1  "
    player, dealer = [(1, "A", "S"), (10, "Q", "H"), (7, "7", "C")], [(5, "5", "D"), (6, "6", "D")]
    assert shown("Blackjack", player=player, dealer=dealer) == "Dealer Player 5 D A S Q H 7 C"
    env = made_once("Blackjack")
    assert env.caption() == "the dealer shows 5 and the player has 18 with an ace"
    dealt = {env.unwrapped._card()[:2] for _ in range(500)}
    tens = {(10, rank) for rank in "JQK"}
    assert dealt == {(1, "A"), *((value, str(value)) for value in range(2, 10)), *tens}


# ------------------------------------------------------------------------------ other people's environments


@registered
class Stairs(gym.Env):
    """With numbered actions from 5 on, a large frame, and a hint of its own; no success flag."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = gym.spaces.Discrete(5), gym.spaces.Discrete(2, start=5)
    time_limit = 6

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(1, 3))
        return 0, {"task": 3, "left": "two doors", "actions": [5, 6]}  # not what the contract means

    def step(self, action):
        self.place = max(0, self.place + {5: -1, 6: 1}[action])
        return 0, float(self.place), self.place == 4, False, {"task": 4, "left": 0, "actions": None}

    def hint(self):
        return 6

    def render(self):
        return np.full((600, 900, 3), 40 + 40 * self.place, np.uint8)


MOVES = "left right forward pickup drop toggle done".split()
FOREIGN = {  # id: its actions, its limit, what its task names
    "test_vldac:Stairs-v0": (["5", "6"], 6, "Stairs-v0"),
    "CartPole-v1": (["0", "1"], 500, "CartPole-v1"),
    "FrozenLake-v1": (["0", "1", "2", "3"], 100, "FrozenLake-v1"),
    "minigrid:MiniGrid-DoorKey-5x5-v0": (MOVES, 250, "goal"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_environments_that_others_wrote(run, name):
    if not name.startswith("test_vldac"):
        pytest.importorskip("pygame", reason="other people's worlds need: pip install pygame-ce")
    if name.startswith("minigrid"):
        pytest.importorskip("minigrid", reason="Minigrid needs: pip install minigrid")
    actions, limit, task = FOREIGN[name]
    env = envs.make_env(name)
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space and observation["image"].any()
    assert (info["actions"], info["left"]) == (actions, limit) and task in info["task"]
    assert play(env, 0, randomly(0)) == play(env, 0, randomly(0))
    _, rows = run(name, "--max_episode_steps", 3)
    assert rows[-1]["charts/episodic_return"] is not None
    assert rows[-1]["charts/success_rate"] is None  # no flag was told


def test_an_environment_with_discrete_actions():
    env = envs.make_env("test_vldac:Stairs-v0", invalid_reward=-2.0)
    observation, info = env.reset(seed=0)
    told = {"task": "get the highest return in Stairs-v0", "actions": ["5", "6"], "success": None}
    assert info == told | {"left": 6}
    start = env.unwrapped.place
    assert observation["image"].shape == (299, 448, 3)
    assert env.get_wrapper_attr("hint")() == "6"
    up = play(env, 0, lambda info: "6")
    assert rewards_of(up) == list(range(start + 1, 5))
    assert up[-1][3:5] == (True, False)

    env.reset(seed=0)
    *_, info = env.step("5")
    assert info == told | {"left": 5}
    env.step("")
    assert env.unwrapped.place == start - 1
    idle = play(env, 0, lambda info: "")
    assert rewards_of(idle) == [-2.0] * 5 + [0.0]
    assert idle[-1][0] == idle[0][0] and idle[-1][3:5] == (False, True)


@registered
class Canvas(Corridor):
    """A world that draws over its frame, and has numpy's strings."""

    actions, image = tuple(np.array(["left", "right"])), np.zeros((28, 28, 3), np.uint8)

    def render(self):
        self.image[:] = 40 * self.place
        return self.image


def lost(*_):
    raise RuntimeError("lost its way")


def corridor(method, change):
    """A corridor whose `method` returns what `change` makes of its result."""
    right = getattr(Corridor, method)
    return type("Broken", (Corridor,), {method: lambda *words, **options: change(*right(*words, **options))})


BROKEN = {  # a world and what is said
    "no task": (
        corridor("reset", lambda seen, info: (seen, info | {"task": None})),
        'reset must say what to achieve in info["task"]',
    ),
    "wrong shape": (
        corridor("reset", lambda seen, info: (seen | {"image": seen["image"][:9]}, info)),
        "given was image: uint8 (9, 28, 3), text: str",
    ),
    "ignores its seed": (
        type("Broken", (Corridor,), {"reset": lambda self, seed, options=None: Corridor.reset(self)}),
        "differ: reset must call super().reset(seed=seed)",
    ),
    "raises": (corridor("step", lost), "lost its way"),
    "blank frames": (
        type("Blank", (Stairs,), {"render": lambda self: None}),
        "render must return a uint8 frame (height, width, 3), not NoneType",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_world_that_breaks_the_contract(name, tmp_path, model, capsys, monkeypatch):
    """One line that says what to change, or the world's own traceback, with a note that replays it."""
    world, words = BROKEN[name]
    monkeypatch.setitem(gym.registry, "Broken-v0", gym.envs.registration.EnvSpec("Broken-v0", world))
    monkeypatch.setattr(vldac, "VLMPolicy", lambda args: pytest.fail("a model was loaded"))
    argv = ["--env", "Broken-v0", "--model", model, "--runs_dir", str(tmp_path / "runs")]
    if name == "raises":
        with pytest.raises(RuntimeError, match=words) as caught:
            vldac.main(argv)
        assert "to reproduce: env.reset(seed=0), then env.step through [" in caught.value.__notes__[0]
    else:
        assert words in refused(argv, capsys)
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------- ALFWorld, for real

KITCHEN = ["CounterTop", "SinkBasin", "Shelf"]
START = ["go to countertop 1", "take mug 1 from countertop 1"]
END = ["go to shelf 1", "move mug 1 to shelf 1"]
GAMES = {  # task: a way to do it
    "pick_and_place_simple": [*START, *END],
    "pick_clean_then_place_in_recep": [*START, "go to sinkbasin 1", "clean mug 1 with sinkbasin 1", *END],
}


UNSEEN = "pick_clean_then_place_in_recep"  # the only task of split eval


def thor_name(kind, number):
    """ALFRED's name of an object, as its PDDL spells it; the game shows 'mug 1'."""
    head, tail = ("Sink", "_bar_SinkBasin") if kind == "SinkBasin" else (kind, "")
    place = "_bar_".join(f"_plus_0{number}_dot_{part}" for part in ("00", "25", "50"))
    return f"{head}_bar_{place}{tail}"


def write_games(root):
    """ALFWorld games of two kinds in one small kitchen, from what the package ships."""
    import alfworld.gen.goal_library as library
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    mug, start = thor_name("Mug", 9), "loc_bar_9_bar_9_bar_0_bar_0"
    objects = ["agent1 - agent", f"{start} - location", f"{mug} - object", "MugType - otype"]
    facts = ["(= (total-cost) 0)", f"(atLocation agent1 {start})", f"(objectType {mug} MugType)"]
    facts += [f"(pickupable {mug})", f"(cleanable {mug})"]
    for number, kind in enumerate(KITCHEN):
        place, where = thor_name(kind, number), f"loc_bar_{number}_bar_1_bar_0_bar_30"
        objects += [f"{kind}Type - rtype", f"{place} - receptacle", f"{where} - location"]
        facts += [f"(receptacleType {place} {kind}Type)", f"(receptacleAtLocation {place} {where})"]
        facts.append(f"(canContain {kind}Type MugType)")
        if kind == "CounterTop":
            facts += [f"(inReceptacle {mug} {place})", f"(objectAtLocation {mug} {where})"]
    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    parameters = {"object_target": "Mug", "parent_target": "Shelf", "object_sliced": False}
    parameters |= {"mrecep_target": "", "toggle_target": ""}
    for split, task in [*(("train", task) for task in GAMES), ("valid_unseen", UNSEEN)]:
        goal = library.gdict[task]["pddl"].format(obj="Mug", recep="Shelf", toggle="", mrecep="")
        words = library.gdict[task]["templates"][0].format(obj="mug", recep="shelf")
        problem = f"(define (problem kitchen) (:domain alfred)\n(:objects {' '.join(objects)})\n"
        problem += f"(:init {' '.join(facts)})\n" + goal.replace("#", "-")
        game = {"pddl_domain": domain, "pddl_problem": problem, "solvable": True, "walkthrough": GAMES[task]}
        game["grammar"] = grammar.replace("UNKNOWN GOAL", words)
        folder = Path(root, "json_2.1.1", split, f"{task}-Mug-None-Shelf-1", "trial_1")
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps(game))
        trial = {"task_type": task, "pddl_params": parameters}
        (folder / "traj_data.json").write_text(json.dumps(trial))


@pytest.fixture
def alfworld_data(tmp_path, monkeypatch):
    if sys.version_info >= (3, 13):
        pytest.skip("alfworld's games do not run on Python 3.13 and later")
    pytest.importorskip("alfworld", reason="the games need: pip install alfworld")
    write_games(tmp_path / "games")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "games"))
    envs.load_alfworld.cache_clear()
    yield
    envs.load_alfworld.cache_clear()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_alfworld_s_tasks_are_done_by_admissible_commands(split, alfworld_data):
    """Both kinds of task, met by seed; case and spaces of the answer do not matter."""
    env, done = gym.make("vldac/ALFWorld-v0", split=split).unwrapped, set()
    check_env(env, skip_close_check=True)
    for seed in range(10):
        _, info = env.reset(seed=seed)
        place_it, clean_it = GAMES.values()
        commands = clean_it if "clean" in info["task"] else place_it
        for command in commands:
            action = parse_action(answer(f" {command.upper()}"), info["actions"])
            assert action == command
            _, reward, terminated, truncated, info = env.step(action)
            last = command == commands[-1]
            assert (reward, terminated, info["success"], truncated) == (float(last), last, last, False)
        assert info["left"] == 50 - len(commands) and env.caption()
        done.add(len(commands))
    assert done == ({4, 6} if split == "train" else {6})


def test_alfworld_repeats_itself_and_ends(alfworld_data):
    one = envs.make_env("ALFWorld", max_episode_steps=12)
    maker = envs.load_alfworld("AlfredTWEnv", "train")
    maker.game_files = maker.game_files[::-1]  # as another file system may list them
    other = envs.make_env("ALFWorld", max_episode_steps=12)
    for seed in (3, 2**30 + 7, 3):
        assert play(one, seed, randomly(seed)) == play(other, seed, randomly(seed))
    records = play(one, 0, lambda info: "fly to the moon")
    assert rewards_of(records) == [-1.0] * 12 and records[-1][3:5] == (False, True)
    assert len({text for _, text, *_ in records}) == 1  # nothing has happened
    assert "Your task" not in records[0][1] and "countertop 1" in records[0][1]
    assert (one.render() < 128).any()  # the text is on the frame


class ThorMaker:
    """Like alfworld 0.4.2's AlfredThorEnv: it is the maker and the environment, and draws the games."""

    def __init__(self):
        self.json_file_list, self.envs = ["sink", "fridge", "bed"], []

    def init_env(self, batch_size):
        self.envs.append({"steps": 0})
        return self

    def seed(self, seed):
        pass

    def reset(self):
        self.game = self.json_file_list.pop()
        return self.play(0, f"You are here. Your task is to: clean the {self.game}.")

    def step(self, actions):
        (said,), infos = self.play(self.envs[0]["steps"] + 1, "You move.")
        return [said], None, [False], infos

    def play(self, steps, said):
        self.envs[0]["steps"] = steps
        infos = {"won": [steps == 2], "goal_condition_success_rate": [steps / 2]}
        return [said], infos | {"admissible_commands": [["go on"]]}

    def get_frames(self):
        frames = np.full((1, 300, 300, 3), self.envs[0]["steps"], np.uint8)
        frames[..., 0] = 200  # blue comes first
        return frames

    def close(self):
        self.envs.clear()


def test_worlds_of_thor_have_simulators_and_games_of_their_own(monkeypatch):
    """On a stand-in, as THOR has never run here."""
    maker = ThorMaker()
    monkeypatch.setattr(envs, "load_alfworld", lambda kind, split: maker)
    first, second = (envs.make_env("ALFWorldThor") for _ in range(2))
    first.reset(seed=0)
    games = {seed: second.reset(seed=seed)[1]["task"] for seed in range(20)}
    assert len(set(games.values())) == 3 and second.reset(seed=0)[1]["task"] == games[0]
    assert first.reset(seed=1)[1]["task"] == games[1]  # whatever was played before
    steps = [second.step("go on") for _ in range(2)]
    assert [reward for _, reward, *_ in steps] == [0.5, 2.0] and steps[1][2]
    assert (first.step("go on")[0]["image"] == [1, 1, 200]).all()
    assert (steps[1][0]["image"] == [2, 2, 200]).all()
    first.close()
    assert second.unwrapped.env.envs


@pytest.mark.parametrize("package, env, words", [
    ("alfworld", "ALFWorld", "pip install alfworld"),
    ("playwright.sync_api", "WebShop", "playwright install"),
])  # fmt: skip
def test_a_missing_package_is_named(package, env, words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    envs.load_alfworld.cache_clear()
    assert words in refused(["--env", env, "--model", "tiny"], capsys)


# --------------------------------------------------------------------- WebShop, a real browser and its pages

GOALS = 8  # 0 and 1 are of split eval


def button(address, name, field=""):
    return f'<form action="{quote(address)}">{field}<button class="btn">{name}</button></form>'


def page_of(path):
    """A page of a shop of one mug, with WebShop's addresses and the marks that the adapter goes by."""
    kind, *rest = path[1:].split("/")
    session = rest[0] if rest else kind
    goal = int(session.removeprefix("fixed_"))
    body = '<html><head><script src="https://scripts.invalid/jquery.js"></script></head><body>'
    body += f'<div id="instruction-text"><h4>Instruction:<br>a large mug, number {goal}</h4></div>'
    if kind == session:
        field = '<input id="search_input" name="search_query">'
        return body + button(f"/search_results/{session}", "Search", field)
    body += button(f"/{session}", "Back to Search")
    if kind == "search_results":
        address = quote(f"/item_page/{session}/B0MUG/{{}}")
        return body + f'<h4><a class="product-link" href="{address}">B0MUG</a></h4>'
    chosen = ast.literal_eval(rest[-1])
    if kind == "done":
        reward = 1.0 if chosen.get("size") == "large" else 0.5
        return f'<h1>Thank you</h1><h3 id="reward">Your score<pre>{reward}</pre></h3>'
    body += button(f"/search_results/{session}", "&lt; Prev")
    for option, value in (("size", "small"), ("size", "large"), ("colour", "dark red")):
        address = quote(f"/item_page/{session}/B0MUG/{chosen | {option: value}}")
        body += f'<input type="radio" name="{option}" value="{value}" data-url="{address}">{value}'
    return body + button(f"/done/{session}/{chosen}", "Buy Now") + "It holds tea. " * 400


class Shop(http.server.BaseHTTPRequestHandler):
    searched = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        path, _, query = self.path.partition("?")
        Shop.searched += parse_qs(query).get("search_query", [])
        body = page_of(unquote(path)).encode()
        self.send_response(200)
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
    monkeypatch.setenv("WEBSHOP_GOALS", str(GOALS))
    yield server
    server.shutdown()
    server.server_close()


def buy(env, info, words):
    """Search, or click names; the last step's result."""
    for word in words:
        action = parse_action(answer(word if "[" in word else f"click[{word}]"), info["actions"])
        assert action is not None, (word, info["actions"])
        *result, info = env.step(action)
    return *result, info


@pytest.mark.filterwarnings("ignore")
def test_shopping_in_a_real_browser(shop):
    env = gym.make("vldac/WebShop-v0").unwrapped
    check_env(env)
    purchases = [
        (["search[Red Mug]", "B0MUG", "large", "buy now"], 1.0),
        (["search[mug]", "b0mug", "small", "Dark Red", "buy now"], 0.5),
        (
            ["search[<r> no/thing]", "back to search", "search[mug]", "b0mug", "< prev", "b0mug", "buy now"],
            0.5,
        ),
    ]
    for words, pays in purchases:
        observation, info = env.reset(seed=0)
        assert info["actions"] == ["search[...]"] and info["task"] in observation["text"]
        assert env.hint() == f"search[{info['task'].replace(',', '')}]"
        observation, reward, terminated, truncated, info = buy(env, info, words)
        assert (reward, terminated, truncated) == (pays, True, False) and info["success"] == (pays == 1)
        assert observation["image"].shape == (640, 640, 3) and "Thank you" in observation["text"]
    assert {"Red Mug", " r  no thing"} <= set(Shop.searched)  # < and / are of addresses and commands
    env.close()


def test_what_is_on_the_page_is_admissible_and_nothing_else(shop):
    env = envs.make_env("WebShop", max_episode_steps=6)
    env.reset(seed=0)
    for action in ("", "click[buy now]", "search[...]", "search[]", "click[search]"):
        assert env.step(action)[1:4] == (0.0, False, False)
    assert env.step("search[mug]")[1:4] == (0.0, False, True)
    _, info = env.reset(seed=0)
    observation, *_, info = buy(env, info, ["search[mug]", "b0mug"])
    assert info["actions"] == [
        "click[back to search]", "click[< prev]", "click[buy now]",
        "click[small]", "click[large]", "click[dark red]",
    ]  # fmt: skip
    assert len(observation["text"]) < 4100 and observation["text"].endswith("more characters)")
    before, *_ = env.step("click[large]")
    after, *_ = env.step("click[dark red]")
    assert before["text"].startswith("Chosen: large\n")
    assert after["text"].startswith("Chosen: large, dark red\n")
    assert (before["image"] != after["image"]).any()
    env.close()


def test_seeds_are_goals_of_a_shop_s_split(shop, monkeypatch):
    for split, goals in (("eval", range(2)), ("train", range(2, 8))):
        env = envs.make_env("WebShop", split=split)
        tasks = {env.reset(seed=seed)[1]["task"] for seed in range(30)}
        assert tasks == {f"a large mug, number {goal}" for goal in goals}
    monkeypatch.setenv("WEBSHOP_GOALS", "3000")
    assert envs.make_env("WebShop", split="train").goals == range(1500, 3000)
    assert envs.make_env("WebShop", split="eval").goals == range(500)


# ---------------------------------------------------------------------------------------------- the pages

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def test_the_pages_world_runs(run):
    world = envs.make_env("extras.my_world:Doors-v0", max_episode_steps=30)
    hint = world.get_wrapper_attr("hint")
    *_, info = play(world, 0, lambda info: hint())[-1]
    assert info["success"]
    _, rows = run("extras.my_world:Doors-v0", "--max_episode_steps", 4)
    assert rows[-1]["charts/success_rate"] is not None


def test_the_notebook_s_program_acts(tmp_path, model, monkeypatch, capsys):
    """And it saves the adapter of a run that was stopped."""
    start(tmp_path / "runs", model, "NumberLine", name="NumberLine-tiny-0")
    shutil.copytree(tmp_path / "runs" / "NumberLine-tiny-0", tmp_path / "runs" / "NAME")
    shutil.rmtree(tmp_path / "runs" / "NAME" / "adapter")
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(import vldac.*?)```", GUIDE, re.S)
    exec(program.replace("OneRoom", "NumberLine"), {})
    assert "->" in capsys.readouterr().out.splitlines()[-1]
    folders = [Path("runs", name, "adapter") for name in ("NumberLine-tiny-0", "NAME")]
    whole, stopped = ((folder / "adapter_model.safetensors").read_bytes() for folder in folders)
    assert whole == stopped


def test_the_readme_s_loss_can_be_copied():
    """With torch alone, and called as there: two episodes of one step, rewards 1 and 0."""
    [names] = re.findall(r"^(.*) need only torch", README, re.M)
    [lines] = re.findall(r"```python\n(# From a rollout.*?)```", README, re.S)
    there = {"torch": torch}
    for name in re.findall(r"`(\w+)`", names):
        exec(inspect.getsource(getattr(vldac, name)), there)

    there |= {"rewards": torch.tensor([[1.0, 0.0]]), "dones": torch.ones(1, 2)}
    there |= {"values": torch.full((1, 2), 0.5), "last_values": torch.zeros(2), "newvalues": torch.ones(2)}
    there |= {"logprobs": torch.zeros(2, 2), "baselogprobs": torch.zeros(2, 2), "mask": torch.ones(2, 2)}
    there["newlogprobs"] = torch.full((2, 2), math.log(1.5), dtype=torch.float64)
    there = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in there.items()}
    there |= {"B": 2, "rows_of_minibatch": 4, "i": [0, 1]}
    exec(lines, there)
    half = 2**-0.5  # 0.5 and -0.5 over their standard deviation
    assert there["advantages"].tolist() == pytest.approx([half, -half])

    surrogate = half * (1.1 - 1.5) / 2  # the first ratio is clipped, the second is not
    kl = 1 / 1.5 + math.log(1.5) - 1
    error = (0 + 1) / 2  # of the values, squared
    loss = -surrogate + 0.05 * kl + 0.15 * error / 2
    assert there["loss"].item() == pytest.approx(loss * 2 / 4)


def test_the_details_advantages_of_episodes_that_are_one_sequence():
    """The first one was cut, with the value 1 after it; the second one's time-out has its own value, 0.5."""
    page = (ROOT / "docs" / "details.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"```python\n(rewards.*?)```", page, re.S)
    there = {"torch": torch, "gae": vldac.gae, "value_of_next_prompt": 1.0}
    there |= {"rewards": torch.tensor([0.0, 0, 0, 0, -1]), "values": torch.tensor([0, 0, 0, 0, 0.5])}
    exec(lines, there)
    decay = 0.99 * 0.95
    first, second = [decay**2 * 0.99, decay * 0.99, 0.99], [0.99 * 0.5, 0.0]
    assert there["advantages"].flatten().tolist() == pytest.approx(first + second)


def test_the_deviations_on_the_page_have_the_numbers_of_those_in_the_code():
    """And name the function or class that has them."""
    code = (ROOT / "vldac.py").read_text()
    in_code = re.findall(r"# Deviation (\d+):", code)
    page = (ROOT / "docs" / "details.md").read_text(encoding="utf-8")
    on_page = re.findall(r"^(\d+)\. \*\*[^*]*\*\* \(`(?:\w+\.)?(\w+)`", page, re.M)[: len(in_code)]
    assert [number for number, _ in on_page] == in_code == [str(k) for k in range(1, len(in_code) + 1)]
    for number, name in on_page:
        before = code.split(f"# Deviation {number}:")[0]
        assert name in re.findall(r"^(?: {4})?(?:def|class) (\w+)", before, re.M)[-2:]


def test_the_pages_commands_and_options_are_there():
    """And each option of VL-DAC is on a page, but for names, places and the like."""
    named = set(re.findall(r"`--(\w+)", README))
    for program, words in re.findall(r"python (\S+\.py) ([^`#\n]+)", README):
        assert (ROOT / program).exists()
        assert program != "eval.py" or f"python eval.py {words.split()[0]} " in evaluation.__doc__
        named |= set(re.findall(r"--(\w+)", words))
    known = {"help"}
    for options in (loop.Args, rl4vlm.Args, evaluation.Args):
        known |= {option.name for option in dataclasses.fields(options)}
    assert named <= known
    named |= set(re.findall(r"--(\w+)", README + GUIDE)) | {"split", "seed", "run_name", "runs_dir", "track"}
    assert {option.name for option in dataclasses.fields(Args)} <= named


# ------------------------------------------------------------------ a model of any family, for the tests

SPECIAL = [*toy.SPECIAL, "<bos>", "<eos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
SPECIAL += ["<image>", "<fake_token_around_image>", "<global-img>", "<video>", "<audio>"]
SPECIAL += ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"]


def write_model(family, folder, H=32, layers=2):
    """A random model of a few thousand parameters whose folder has the traps of the hub's.

    A generation_config that samples greedily (top_k 1, temperature 0.01) and ends a turn by either of two
    ids, one of which the tokenizer does not know of; an image processor without a video processor. Gemma's
    template begins with <bos>, and its tokenizer adds one; Qwen3-VL's frames have a smallest size; SmolVLM
    and InternVL would cut tiles, and Gemma 4 caps its logits.
    """
    raw = toy.build_tokenizer(ACTIONS, []).backend_tokenizer
    raw.add_special_tokens(SPECIAL)
    ids = {token: raw.token_to_id(token) for token in SPECIAL}

    text = {"hidden_size": H, "intermediate_size": 2 * H, "num_hidden_layers": layers, "pad_token_id": 0}
    text |= {"num_attention_heads": H // 16, "num_key_value_heads": H // 32}
    text["vocab_size"] = raw.get_vocab_size()
    mrope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"hidden_size": 32, "intermediate_size": 64}
    images, files, extra = {}, {}, {}
    if family.startswith("qwen") or family == "glm4v":
        marker = "<|vision_start|><|image_pad|><|vision_end|>"
        names = "image_pad video_pad vision_start vision_end".split()
        rest = {f"{name.removesuffix('_pad')}_token_id": ids[f"<|{name}|>"] for name in names}
        text["rope_parameters"] = mrope
        vision |= {"num_heads": 2, "depth": 2, "out_hidden_size": H}
        images |= {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
        images |= {"temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    else:
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
        files["processor_config.json"] = images | {"image_seq_length": 4, "image_seq_len": 4}
    match family:
        case "qwen2_vl":
            vision |= {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": H}
        case "qwen2_5_vl":
            vision["fullatt_block_indexes"] = [0]
        case "qwen3_vl" | "qwen3_5":
            text["head_dim"] = 16
            vision["num_position_embeddings"] = 64
            images |= {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
            del images["min_pixels"], images["max_pixels"]
            if family == "qwen3_vl":
                vision["deepstack_visual_indexes"] = [0]
            else:
                text |= {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
                text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
                text["rope_parameters"] = mrope | {"partial_rotary_factor": 1.0}
        case "glm4v":
            marker = "<|begin_of_image|><|image|><|end_of_image|>"
            rest = {"image_token_id": ids["<|image|>"], "video_token_id": ids["<|video|>"]}
            rest |= {"image_start_token_id": ids["<|begin_of_image|>"]}
            rest |= {"image_end_token_id": ids["<|end_of_image|>"]}
            text["rope_parameters"] = mrope | {"partial_rotary_factor": 1.0}
            vision["image_size"] = 56
            images["image_processor_type"] = "Glm4vImageProcessor"
            del images["min_pixels"], images["max_pixels"]
        case "internvl":
            marker, video = "<image_soft_token>", "<video>"
            extra = {"context_image_token": marker, "video_token": video}
            extra |= {"start_image_token": "<start_of_image>", "end_image_token": "<end_of_image>"}
            rest = {"image_token_id": ids[marker], "image_seq_length": 4}
            text["model_type"] = "qwen2"
            images |= {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}}
        case "gemma3":
            marker, image = "<start_of_image>", "<image_soft_token>"
            extra = {"boi_token": marker, "eoi_token": "<end_of_image>", "image_token": image}
            rest = {"boi_token_index": ids[marker], "eoi_token_index": ids["<end_of_image>"]}
            rest |= {"image_token_index": ids[image], "mm_tokens_per_image": 4}
            text |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}
            images |= {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}
        case "gemma4":
            marker = "<image_soft_token>"
            extra = {"image_token": marker, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
            extra |= {"audio_token": "<audio>", "boa_token": "<bos>", "eoa_token": "<eos>"}
            rest = {"boi_token_id": ids["<start_of_image>"], "eoi_token_id": ids["<end_of_image>"]}
            rest |= {"image_token_id": ids[marker], "video_token_id": ids["<|video|>"]}
            rest |= {"audio_token_id": ids["<audio>"]}
            text |= {"head_dim": 16, "global_head_dim": 16, "sliding_window": 64}
            text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": text["vocab_size"]}
            text |= {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"}
            vision |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 16, "pooling_kernel_size": 3}
            del vision["image_size"]
            images["image_processor_type"] = "Gemma4ImageProcessor"
        case "smolvlm":
            marker = "<image>"
            extra = {"image_token": marker}
            rest = {"image_token_id": ids[marker], "scale_factor": 2, "pad_token_id": 0}
            text["model_type"] = "llama"
            images |= {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True}
            images |= {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
    gemma = family.startswith("gemma")
    if gemma:
        adds_bos = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
        raw.post_processor = adds_bos

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **rest)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    greedy = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.001}
    # The tokenizer has another one, <eos>: both end a turn.
    model.generation_config = GenerationConfig(eos_token_id=ids["<|im_end|>"], pad_token_id=0, **greedy)
    model.save_pretrained(folder)
    tokens = {"eos_token": "<eos>", "pad_token": SPECIAL[0], "extra_special_tokens": extra}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", **tokens)
    template = toy.CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", marker)
    tokenizer.chat_template = ("{{ bos_token }}" if gemma else "") + template
    tokenizer.save_pretrained(folder)
    for name, content in {"preprocessor_config.json": images, **files}.items():
        (folder / name).write_text(json.dumps(content))
    return folder
