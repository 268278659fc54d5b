"""VL-DAC in one file: reinforcement learning for vision-language agents.

VL-DAC (Vision-Language Decoupled Actor-Critic, Bredis et al., AAMAS 2026, arXiv 2508.04280) trains a
vision-language model (VLM) to act. At environment step t the model sees a prompt s_t (images and text) and
writes a response a_t = (a_t^1 ... a_t^|a_t|); the action parsed from it moves the world, which pays R_t.
What is decoupled: the policy is optimised per token, the value is predicted once per environment step, and
the value head's gradient stops at the backbone.

    L = L_policy + beta * L_KL + alpha * L_value                                                     (Eq. 6)

    L_policy  PPO's clip on every token; all tokens of step t share the advantage A_t                (Eq. 3)
    L_value   1/2 (V(s_t) - G_t)^2, V(s_t) = MLP(stopgrad(h_t)), h_t the last layer's hidden state at the
              last prompt token, G_t = A_t + V(s_t), and A_t from GAE over environment steps         (Eq. 4)
    L_KL      divergence from the sampling policy (kl_ref old, Eq. 5) or from the model before training
              (kl_ref base)
    In the first `value_warmup` updates only the value head learns.

Letters: N environments, T steps per rollout, B environment steps in a batch, P prompt length, R response
length (both padded), V vocabulary, H hidden size. (T, N) and (B,) are per environment step, (B, R) per token.

Deviations from the paper and its released code (reasons in the README):
 1. Responses are sampled at temperature 1 from the whole vocabulary; the released code takes the argmax.
 2. Every token of a response is trained on, the first and the end-of-turn token included.
 3. Log-probabilities are fp32, and the old ones come from a forward pass like the one that is trained.
 4. No dropout: the first minibatch of every update has ratio 1 (logged as losses/ratio_first).
 5. An answer that does not parse does nothing and costs its step; no random action is played instead.
 6. A time-out is an end and is learned from: the prompt says how many actions are left.
 7. Every frame is in the prompt once, oldest first, and the prompt counts the true number of actions.
 8. LoRA and value head are clipped separately: a joint gradient norm would couple them again.
 9. The KL's reference is the model before training, as in the released code; the paper prints the other.
10. N environments share each forward pass; the released code plays one.
11. The value loss is not clipped, and no step is treated apart because one of its ratios is large.
12. The learning rate follows one cosine over the planned updates; the released one rises again.

    python vldac.py --env OneRoom                  Qwen2-VL-7B where there is a GPU, else a toy model
    python vldac.py --env NumberLine --model tiny  the toy on a card game, no OpenGL needed
    python vldac.py --help                         every option with its default
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import shutil
import sys
import time
import types
import typing
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig

import envs
from envs import UserError


@dataclass
class Args:
    """Every option and its default, declared once for the program, the run folder and the tests."""

    env: str = "OneRoom"  # a world of envs.py, or package.module:callable for your own
    model: str | None = None  # hub name, local folder or "tiny", the toy; default: 7B with CUDA, else tiny
    adapter: str | None = None  # folder of a trained adapter to start from
    seed: int = 0
    device: str | None = None  # default: cuda where there is one, else cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the base model; auto: bfloat16 on a GPU
    # rollout
    total_timesteps: int = 51_200  # environment steps
    num_envs: int = 16
    num_steps: int = 32  # environment steps of each environment per update
    max_episode_steps: int = 128
    invalid_reward: float = 0.0  # paid for an answer that names no admissible action
    num_images: int = 4  # newest frames in the prompt
    max_image_tokens: int = 256  # per frame, where the processor can be told
    temperature: float = 1.0
    max_new_tokens: int = 256
    # update
    minibatch_size: int = 128  # environment steps per optimizer step
    micro_batch_size: int = 8  # environment steps per forward pass; lower it when memory runs out
    update_epochs: int = 2
    value_warmup: int = 2  # updates that train only the value head
    learning_rate: float = 5e-5
    final_learning_rate: float = 1e-7
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.1
    vf_coef: float = 0.15  # alpha
    kl_coef: float = 0.05  # beta
    kl_ref: Literal["old", "base"] = "base"  # deviation 9
    max_grad_norm: float = 1.0  # of LoRA and of the value head, separately
    # model
    lora_rank: int = 16
    lora_alpha: int = 32
    value_hidden: tuple[int, ...] = (3072, 2048)
    gradient_checkpointing: bool = False  # slower, for most of the activation memory
    # bookkeeping
    eval_episodes: int = 0  # episodes on fixed seeds before the first and after the last update
    run_name: str | None = None
    runs_dir: str = "runs"
    track: bool = False  # send the numbers to Weights & Biases too


def parse_args(argv=None) -> Args:
    """Command line > the toy's options > the world's options > Args."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    notes = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Args), re.M))  # the comments above
    for field in dataclasses.fields(Args):
        kind, inner, note = field.type, typing.get_args(field.type), notes.get(field.name, "")
        # Suppressed defaults: `given` below holds what was given and nothing else.
        options = {"default": argparse.SUPPRESS, "help": f"{note} (default: {field.default})"}
        if typing.get_origin(kind) is Literal:
            options["choices"] = inner
        elif typing.get_origin(kind) is tuple:
            options |= {"type": inner[0], "nargs": "+"}
        elif kind is bool:
            options |= {"type": lambda text: {"true": True, "false": False}.get(text, text)}
            options |= {"choices": (True, False), "metavar": "true|false"}
        else:
            options["type"] = inner[0] if inner else kind  # str | None is a str
        parser.add_argument(f"--{field.name}", **options)
    given = vars(parser.parse_args(argv))
    device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.startswith("cuda")
    model = given.get("model") or ("Qwen/Qwen2-VL-7B-Instruct" if cuda else "tiny")
    chosen = envs.OPTIONS.get(given.get("env", Args.env), {}) | (TOY if model == "tiny" else {}) | given
    args = Args(**chosen | {"device": device, "model": model})
    args.value_hidden = tuple(args.value_hidden)
    if args.dtype == "auto":
        args.dtype = "bfloat16" if cuda else "float32"
    check_args(args)
    return args


# ------------------------------------------------------------------------------ the prompt and the parser


def build_prompt(observations, actions, task, taken, left) -> list[dict]:
    """One user turn, as chat messages: the newest frames, oldest first, then text.

    observations  the last k observation dicts ("image", "text"), oldest first; the newest text is shown
    actions       the admissible actions
    taken, left   numbers of actions

    >>> [turn] = build_prompt([{"image": None, "text": "It is dark."}], ["go", "wait"], "leave", 2, 8)
    >>> [part["type"] for part in turn["content"]]
    ['image', 'text']
    >>> print(turn["content"][1]["text"])
    Task: leave.
    It is dark.
    Actions taken: 2. Actions left: 8.
    Admissible actions: "go", "wait".
    Think, then choose one action. Answer with {"thoughts": "...", "action": "..."}
    """
    lines = [
        f"Task: {task}.",
        observations[-1]["text"],
        f"Actions taken: {taken}. Actions left: {left}.",
        "Admissible actions: " + ", ".join(f'"{action}"' for action in actions) + ".",
        'Think, then choose one action. Answer with {"thoughts": "...", "action": "..."}',
    ]
    images = [{"type": "image"} for _ in observations]
    return [{"role": "user", "content": [*images, {"type": "text", "text": "\n".join(filter(None, lines))}]}]


def parse_action(text: str, actions) -> str | None:
    """The admissible action a response names, or None. Never evaluates, guesses or raises.

    The last "action" key counts. Its JSON string or number must equal an action: exactly, or as the only one
    when case and outer spaces are ignored. Where "search[...]" is offered, so is any short search[words].

    >>> parse_action('{"thoughts": "it is close", "action": "Move forward "}', ["turn left", "move forward"])
    'move forward'
    >>> parse_action('{"action": 10}', ["1", "10"]), parse_action("move forward", ["move forward"])
    ('10', None)
    """
    keys = deque(re.finditer(r'"action"[ \t\r\n]*:[ \t\r\n]*', text), maxlen=1)
    start = keys[0].end() if keys else len(text)
    if text[start : start + 1] == '"':
        try:
            value, _ = json.JSONDecoder(strict=False).raw_decode(text, start)
        except ValueError:
            return None
    elif number := re.compile(r"-?[0-9][0-9.eE+-]{0,30}(?![0-9.eE+-])").match(text, start):
        value = number.group()  # compared as text: the action 10 is neither 10.0 nor 1e1
    else:
        return None
    if value in actions:
        return value
    if "search[...]" in actions and re.fullmatch(r"search\[[^\[\]]{1,100}\]", value) and value.isprintable():
        return value
    same = [action for action in actions if action.strip().casefold() == value.strip().casefold()]
    return same[0] if len(same) == 1 else None


# ---------------------------------------------------------------------------------------------- the maths


def gae(rewards, values, last_values, dones, gamma, gae_lambda):
    """Generalised advantage estimation over environment steps (Schulman et al. 2016, Eq. 16).

    rewards, values  (T, N)  of step t: R_t and V(s_t)
    last_values      (N,)    V of the state after the rollout, ignored where its last step ended the episode
    dones            (T, N)  1 if the episode ended *with* step t (CleanRL stores it one step later)
    Returns advantages and returns = advantages + values, both (T, N).

    >>> rewards, values = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.5], [0.5]])
    >>> gae(rewards, values, torch.tensor([9.0]), torch.tensor([[0], [1]]), gamma=1.0, gae_lambda=0.5)
    (tensor([[0.2500],
            [0.5000]]), tensor([[0.7500],
            [1.0000]]))
    """
    advantages, last_advantage = torch.zeros_like(values), torch.zeros_like(last_values)
    for t in reversed(range(len(rewards))):
        done = dones[t].bool()
        next_values = values[t + 1] if t + 1 < len(rewards) else last_values
        delta = rewards[t] + gamma * next_values.masked_fill(done, 0) - values[t]
        last_advantage = delta + gamma * gae_lambda * last_advantage.masked_fill(done, 0)
        advantages[t] = last_advantage
    return advantages, advantages + values


def step_mean(x, mask):
    """Mean over the tokens of each step, then over steps: (B, R), (B, R) -> scalar. Masked x may be NaN.

    >>> step_mean(torch.tensor([[1.0, 3.0], [4.0, math.nan]]), torch.tensor([[1, 1], [1, 0]]))
    tensor(3.)
    """
    tokens = mask.sum(1)
    if x.shape != mask.shape or not tokens.all():
        raise ValueError(f"need (B, R) with a token in every step: {tuple(x.shape)}, {tuple(mask.shape)}")
    return (x.masked_fill(mask == 0, 0).sum(1) / tokens).mean()


def policy_loss(newlogprobs, logprobs, advantages, mask, clip_coef):
    """PPO's clipped surrogate per token (Eq. 3), to minimise.

    newlogprobs, logprobs  (B, R) nats, under the current and the sampling policy
    advantages             (B,)   one per environment step, shared by all its tokens
    mask                   (B, R) 1 on response tokens, the end-of-turn token included
    Mean over the tokens of a step, then over steps. ValueError if a step has no token.

    >>> lp, one = torch.zeros(1, 2), torch.ones(1, 2)
    >>> policy_loss(lp + math.log(1.5), lp, torch.tensor([2.0]), one, clip_coef=0.2)  # clipped at 1.2
    tensor(-2.4000)
    """
    ratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0).exp()
    advantages = advantages[:, None]  # (B, 1): a bare (B,) would broadcast over the tokens when B = R
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef))
    return step_mean(pg_loss, mask)


def value_loss(values, returns):
    """Half the mean squared error per environment step (Eq. 4), to minimise: (B,), (B,) -> scalar.

    >>> value_loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    return 0.5 * (values - returns).pow(2).mean()


def kl_loss(newlogprobs, logprobs, mask):
    """D_KL(new || old) in nats per token, from tokens the old policy sampled (Eq. 5): r log r - (r - 1).

    newlogprobs, logprobs, mask  (B, R) as in policy_loss. Unbiased, never negative, and its gradient is the
    divergence's own.

    >>> kl_loss(torch.full((1, 1), math.log(2.0)), torch.zeros(1, 1), torch.ones(1, 1))  # 2 log 2 - 1
    tensor(0.3863)
    """
    logratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0)
    return step_mean(logratio.exp() * logratio - (logratio.exp() - 1), mask)


def kl_base(newlogprobs, baselogprobs, mask):
    """Divergence from the model before training, nats per token: exp(d) - d - 1, d = log base - log new.

    newlogprobs, baselogprobs, mask  (B, R). On tokens sampled from `new`, its value estimates
    D_KL(new || base) and its gradient is that of D_KL(base || new): it keeps alive what the base could say.
    Source: Schulman's estimator k3, as in the released code.

    >>> kl_base(torch.zeros(1, 1), torch.full((1, 1), math.log(2.0)), torch.ones(1, 1))  # 2 - log 2 - 1
    tensor(0.3069)
    """
    d = (baselogprobs - newlogprobs).masked_fill(mask == 0, 0)
    return step_mean(d.exp() - d - 1, mask)


# --------------------------------------------------------------------------------------------- the policy

# The linear layers of the language model in every supported family, and none of the vision tower's.
LORA_TARGETS = (
    r"(model\.)?(language_model|text_model)\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
)


class VLMPolicy(nn.Module):
    """A VLM with LoRA on its language model, and a value head on the last prompt token's hidden state.

    `sample` and `forward` share prompts, masks, temperature and banned tokens, so the two cannot diverge.
    """

    def __init__(self, args: Args, model=None, processor=None):
        super().__init__()
        self.args = args
        self.processor = processor or load_processor(args.model, args.max_image_tokens)
        self.processor.tokenizer.padding_side = "left"  # so that all responses start in the same column
        if model is None:
            model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        model.requires_grad_(False)
        if args.adapter:
            self.vlm = PeftModel.from_pretrained(model, args.adapter, is_trainable=True)
        else:
            config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=LORA_TARGETS)
            self.vlm = get_peft_model(model, config)
        self.base = self.vlm.get_base_model()  # the same model, adapters inside, without peft's wrapper
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # deviation 4
        if args.gradient_checkpointing:
            self.base.gradient_checkpointing_enable()

        text_config = self.base.config.get_text_config()
        if getattr(text_config, "final_logit_softcapping", None):
            raise ValueError("it caps its logits, which `forward` does not")
        sizes = [text_config.hidden_size, *args.value_hidden]
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.value_head = nn.Sequential(*sum(layers, ()), nn.Linear(sizes[-1], 1))  # fp32
        self.to(args.device)
        device = torch.device(args.device).type
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16")

        # A turn ends at the checkpoint's stop ids or the tokenizer's: Gemma 3's own is only among the former.
        stop = self.base.generation_config.eos_token_id
        stop = set(stop if isinstance(stop, list) else [stop]) | {self.processor.tokenizer.eos_token_id}
        self.stop_ids = sorted(stop - {None})
        # Image and video placeholders would break the next forward pass if they were sampled.
        names = ("image_token_id", "image_token_index", "video_token_id")
        self.banned_ids = sorted({getattr(self.base.config, name, None) for name in names} - {None})
        pad = self.processor.tokenizer.pad_token_id
        # Replaced as a whole: the hub's configuration says top_k 1, and fills whatever is left unset.
        self.base.generation_config = GenerationConfig(
            do_sample=True,
            temperature=args.temperature,  # deviation 1
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=args.max_new_tokens,
            suppress_tokens=self.banned_ids or None,
            eos_token_id=self.stop_ids,
            pad_token_id=self.stop_ids[0] if pad is None else pad,
        )

    def encode(self, prompts):
        """[(messages, frames)] of B steps -> a left-padded batch: ids and mask (B, P), pixels."""
        template = self.processor.apply_chat_template
        texts = [template(messages, tokenize=False, add_generation_prompt=True) for messages, _ in prompts]
        images = [[Image.fromarray(frame) for frame in frames] for _, frames in prompts]
        batch = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        return batch.to(self.args.device)

    @torch.no_grad()
    def sample(self, batch) -> list[list[int]]:
        """B responses as lists of token ids, each up to and including its first stop id."""
        self.eval()  # in train mode with gradient checkpointing, generate() returns garbage
        with self.autocast:
            output = self.base.generate(**batch, generation_config=self.base.generation_config)
        responses = output[:, batch["input_ids"].shape[1] :]  # (B, R)
        stops = torch.isin(responses, torch.tensor(self.stop_ids, device=responses.device)).int()
        lengths = ((stops.cumsum(1) - stops) == 0).sum(1)  # no stop id before this token
        return [row[:length] for row, length in zip(responses.tolist(), lengths.tolist(), strict=True)]

    def pad(self, responses):
        """Lists of token ids -> tokens and mask, both (B, R), right-padded."""
        R, pad = max(map(len, responses)), self.base.generation_config.pad_token_id
        tokens = [ids + [pad] * (R - len(ids)) for ids in responses]
        mask = [[1] * len(ids) + [0] * (R - len(ids)) for ids in responses]
        return tuple(torch.tensor(x, dtype=torch.long, device=self.args.device) for x in (tokens, mask))

    def decode(self, response) -> str:
        """The text of a response without its stop id."""
        return self.processor.tokenizer.decode([token for token in response if token not in self.stop_ids])

    def forward(self, batch, tokens, mask):
        """Log-probabilities of responses and values of their prompts.

        batch         from `encode`
        tokens, mask  (B, R); R may be 0 if only values are wanted
        Returns logprobs (B, R) in nats, 0 where masked; values (B,); entropy (B, R) in nats, no gradient.
        """
        ids = batch["input_ids"]
        P = ids.shape[1]
        inputs = {key: x for key, x in batch.items() if key not in ("input_ids", "attention_mask")}
        for key, x in inputs.items():
            if x.shape == ids.shape:  # token types, say: the response is text, type 0
                inputs[key] = torch.cat([x, torch.zeros_like(tokens, dtype=x.dtype)], 1)  # (B, P + R)
        with self.autocast:
            hidden = self.base.model(
                input_ids=torch.cat([ids, tokens], 1),  # (B, P + R)
                attention_mask=torch.cat([batch["attention_mask"], mask], 1),
                use_cache=False,
                **inputs,
            ).last_hidden_state[:, P - 1 :]  # (B, 1 + R, H): the last prompt token, then the response
            head = self.base.get_output_embeddings()
            logits = head(hidden[:, :-1])  # (B, R, V), each from the token before
        logits = logits.float() / self.args.temperature  # deviation 3
        logits[..., self.banned_ids] = -torch.inf
        logprobs = logits.gather(2, tokens[..., None])[..., 0] - logits.logsumexp(2)  # (B, R)
        state = hidden[:, 0].detach().float()  # (B, H); stop-gradient (Eq. 4)
        values = self.value_head(state)[:, 0]
        with torch.no_grad():
            probs = logits.softmax(2)
            entropy = logits.logsumexp(2) - (probs * logits.masked_fill(probs == 0, 0)).sum(2)
        return logprobs.masked_fill(mask == 0, 0), values, entropy

    def save(self, folder: Path):
        """The adapter in PEFT's format, the base's processor files beside it, copied verbatim."""
        self.vlm.save_pretrained(folder)
        for file in model_folder(self.args.model).iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in PROCESSOR_FILES):
                (shutil.copytree if file.is_dir() else shutil.copyfile)(file, folder / file.name)


# -------------------------------------------------------------------------------------------- the rollout


def episode_seed(seed, env, episode) -> int:
    """A training seed, in [2^30, 2^31); evaluation uses 0, 1, 2, ..."""
    return 2**30 + int(np.random.SeedSequence((seed, env, episode)).generate_state(1)[0]) % 2**30


class Agent:
    """One environment and what its prompt needs: the last k observations and the number of actions taken."""

    def __init__(self, args: Args, helpers=False):
        self.args = args
        limits = {"max_episode_steps": args.max_episode_steps, "invalid_reward": args.invalid_reward}
        self.env = envs.make_env(args.env, helpers=helpers, **limits)

    def reset(self, seed):
        observation, self.info = self.env.reset(seed=seed)
        self.seed, self.task, self.taken, self.total = seed, self.info["task"], 0, 0.0
        self.observations = deque([observation], maxlen=self.args.num_images)  # deviation 7

    def prompt(self):
        """(messages, frames) for VLMPolicy.encode."""
        left = self.info.get("left", self.args.max_episode_steps - self.taken)
        seen = list(self.observations)
        messages = build_prompt(seen, self.info["actions"], self.task, self.taken, left)
        return messages, [observation["image"] for observation in seen]

    def step(self, action: str | None):
        """Play a parsed action, "" if there was none (deviation 5). Returns reward, done (deviation 6)."""
        observation, reward, terminated, truncated, self.info = self.env.step(action or "")
        self.taken, self.total = self.taken + 1, self.total + reward
        self.observations.append(observation)
        self.flagged = "success" in self.info  # else a positive return stands in, under a name of its own
        self.success = bool(self.info.get("success", self.total > 0))
        return reward, terminated or truncated


def act(policy, agents, timer):
    """One step of every agent. Returns prompts, responses, texts, actions, rewards, dones: a list each."""
    prompts = [agent.prompt() for agent in agents]
    with timer("encode"):
        batch = policy.encode(prompts)
    with timer("generate"):
        responses = policy.sample(batch)  # deviation 10
    texts = [policy.decode(response) for response in responses]
    actions = [parse_action(text, a.info["actions"]) for text, a in zip(texts, agents, strict=True)]
    with timer("env"):
        results = [agent.step(action) for agent, action in zip(agents, actions, strict=True)]
    rewards, dones = map(list, zip(*results, strict=True))
    return prompts, responses, texts, actions, rewards, dones


@torch.no_grad()
def score(policy, prompts, tokens, mask):
    """Log-probabilities (B, R) and values (B,) of B steps, in micro-batches."""
    policy.eval()
    logprobs, values = torch.zeros(mask.shape, device=mask.device), []
    for index in torch.arange(len(prompts)).split(policy.args.micro_batch_size):
        R = int(mask[index].sum(1).max()) if mask.numel() else 0
        batch = policy.encode([prompts[i] for i in index])
        logprobs[index, :R], v, _ = policy(batch, tokens[index, :R], mask[index, :R])
        values.append(v)
    return logprobs, torch.cat(values)


# --------------------------------------------------------------------------------------------- the update


@dataclass
class Rollout:
    """What an update needs of B = T * N environment steps, flattened from (T, N)."""

    prompts: list  # B times (messages, frames)
    tokens: torch.Tensor  # (B, R)
    mask: torch.Tensor  # (B, R)
    logprobs: torch.Tensor  # (B, R) under the policy that sampled
    baselogprobs: torch.Tensor  # (B, R) under the model before training; used by kl_ref base
    advantages: torch.Tensor  # (B,) normalised
    returns: torch.Tensor  # (B,)


def update(policy, optimizer, rollout: Rollout, args: Args, value_only: bool) -> dict[str, float]:
    """`update_epochs` passes over a rollout (Eq. 6). Returns the means of the losses and of their health."""
    policy.train()  # for gradient checkpointing; there is no dropout
    steps, sums, ratio_first = len(rollout.prompts), {}, 0.0
    for epoch in range(args.update_epochs):
        for k, minibatch in enumerate(torch.randperm(steps).split(args.minibatch_size)):
            optimizer.zero_grad()
            for index in minibatch.split(args.micro_batch_size):
                R = int(rollout.mask[index].sum(1).max())  # without columns that are all padding
                tokens, mask = rollout.tokens[index, :R], rollout.mask[index, :R]
                logprobs = rollout.logprobs[index, :R]
                batch = policy.encode([rollout.prompts[i] for i in index])
                newlogprobs, values, entropy = policy(batch, tokens, mask)

                pg_loss = policy_loss(newlogprobs, logprobs, rollout.advantages[index], mask, args.clip_coef)
                v_loss = value_loss(values, rollout.returns[index])
                if args.kl_ref == "old":
                    kl = kl_loss(newlogprobs, logprobs, mask)
                else:
                    kl = kl_base(newlogprobs, rollout.baselogprobs[index, :R], mask)
                loss = args.vf_coef * v_loss
                if not value_only:
                    loss = pg_loss + args.kl_coef * kl + loss  # Eq. 6
                (loss * len(index) / len(minibatch)).backward()

                with torch.no_grad():
                    logratio = newlogprobs - logprobs
                    ratio = logratio.exp()
                    if epoch == k == 0:
                        ratio_first = max(ratio_first, (ratio - 1).abs().max().item())
                    stats = {
                        "policy_loss": pg_loss,
                        "value_loss": v_loss,
                        "kl_old": kl_loss(newlogprobs, logprobs, mask),
                        "approx_kl": step_mean((ratio - 1) - logratio, mask),
                        "clipfrac": step_mean(((ratio - 1).abs() > args.clip_coef).float(), mask),
                        "entropy": step_mean(entropy, mask),
                    }
                for name, x in stats.items():
                    sums[name] = sums.get(name, 0.0) + x.item() * len(index) / steps
            for group in optimizer.param_groups:  # deviation 8
                norm = nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm).item()
                name = "grad_norm_" + group["name"]
                sums[name] = sums.get(name, 0.0) + norm * len(minibatch) / steps
            optimizer.step()
    return {name: x / args.update_epochs for name, x in sums.items()} | {"ratio_first": ratio_first}


# -------------------------------------------------------------------------------------------------- a run


def cosine(update, num_updates, start, end) -> float:
    """The learning rate of an update in [0, num_updates): from start down to end, once (deviation 12).

    >>> [round(cosine(u, 3, 1.0, 0.0), 3) for u in range(3)]
    [1.0, 0.5, 0.0]
    """
    return end + (start - end) * (1 + math.cos(math.pi * update / max(1, num_updates - 1))) / 2


def make_optimizer(policy, args: Args):
    lora = [p for p in policy.vlm.parameters() if p.requires_grad]
    head = list(policy.value_head.parameters())
    groups = [{"name": "lora", "params": lora}, {"name": "value", "params": head}]
    return torch.optim.Adam(groups, lr=args.learning_rate, eps=1e-7, fused=True)


def train(args: Args, folder: Path):
    """All of VL-DAC. Writes log.jsonl, frames/ and adapter/ into the run folder."""
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    policy = load_policy(args)
    optimizer = make_optimizer(policy, args)
    N, T = args.num_envs, args.num_steps
    num_updates = args.total_timesteps // (N * T)
    agents, episodes = [Agent(args) for _ in range(N)], [0] * N
    for i, agent in enumerate(agents):
        agent.reset(episode_seed(args.seed, i, 0))
    log = Log(args, folder, num_updates, policy, optimizer, agents[0])
    if args.eval_episodes:
        log.write({"update": 0, "global_step": 0} | evaluate(policy, args))

    for u in range(num_updates):
        timer = Timer()
        for group in optimizer.param_groups:
            group["lr"] = cosine(u, num_updates, args.learning_rate, args.final_learning_rate)

        # Rollout: T steps of N environments.
        prompts, responses, valid, samples, finished = [], [], [], [], []
        rewards, dones = torch.zeros(T, N), torch.zeros(T, N)
        for t in range(T):
            prompts_t, responses_t, texts, actions, rewards_t, dones_t = act(policy, agents, timer)
            prompts, responses = prompts + prompts_t, responses + responses_t
            valid += [action is not None for action in actions]
            rewards[t], dones[t] = torch.tensor(rewards_t), torch.tensor(dones_t)
            samples.append((prompts_t[0], texts[0], actions[0], rewards_t[0]))
            for i, agent in enumerate(agents):
                if dones_t[i]:
                    finished.append([agent.seed, agent.success, agent.total, agent.taken])
                    episodes[i] += 1
                    agent.reset(episode_seed(args.seed, i, episodes[i]))

        # Old log-probabilities and values, by the same forward pass as in the update; then advantages.
        with timer("score"):
            tokens, mask = policy.pad(responses)  # (B, R), B = T * N
            logprobs, values = score(policy, prompts, tokens, mask)
            _, last_values = score(policy, [agent.prompt() for agent in agents], *policy.pad([[]] * N))
            # The base scores what its KL needs: all steps, or for the log alone one in sixteen.
            some = torch.arange(0, T * N, 1 if args.kl_ref == "base" else 16)
            with policy.vlm.disable_adapter():
                baselogprobs, _ = score(policy, [prompts[i] for i in some], tokens[some], mask[some])
        rewards, dones = rewards.to(values), dones.to(values)
        advantages, returns = gae(rewards, values.view(T, N), last_values, dones, args.gamma, args.gae_lambda)
        normalised = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        normalised, returns = normalised.flatten(), returns.flatten()
        rollout = Rollout(prompts, tokens, mask, logprobs, baselogprobs, normalised, returns)
        with timer("update"):
            losses = update(policy, optimizer, rollout, args, value_only=u < args.value_warmup)
        losses["kl_base"] = kl_base(logprobs[some], baselogprobs, mask[some]).item()
        losses["explained_variance"] = explained_variance(values, returns)
        losses["advantage_std"] = advantages.std().item()

        log.update(u, timer.seconds, losses, finished, responses, valid, samples)

    policy.save(folder / "adapter")
    if args.eval_episodes:
        log.write({"update": num_updates, "global_step": num_updates * N * T} | evaluate(policy, args))
    log.close()


def main(argv=None):
    try:
        args = parse_args(argv)
        Agent(args).env.close()  # a world that cannot be made shows before a model is loaded
        folder = run_folder(args)
        print(f"{folder}: {announce(args)}", flush=True)
        if args.model == "tiny":
            args.model = str(folder / "base")
            shutil.copytree(tiny(args), args.model)
        (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
        print("options:", *(f"{key}={value}" for key, value in dataclasses.asdict(args).items()), flush=True)
        train(args, folder)
    except UserError as error:
        print(f"vldac.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


# ------------------------------------------------------------------------------------ Appendix A: the toy

TOY = {
    "num_images": 1,
    "micro_batch_size": 64,
    "value_warmup": 4,  # 128 steps: the critic has met the time limit before the policy moves
    "max_new_tokens": 40,
    "max_image_tokens": 16,
    "learning_rate": 1e-3,
    "final_learning_rate": 2e-5,
    "value_hidden": (256, 256),
    "eval_episodes": 50,
}
FIXED_THOUGHT = "let me see"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def imitation_examples(args, count, seed):
    """(prompt, caption, hint, actions) of states met by a player who half of the time follows the hint."""
    agents, examples, rng = [Agent(args, helpers=True) for _ in range(16)], [], random.Random(seed)
    for agent in agents:
        agent.reset(rng.randrange(2**30, 2**31))
    while len(examples) < count:
        for agent in agents:
            info = agent.info
            actions, hint = info["actions"], info.get("hint")
            examples.append((agent.prompt(), info.get("caption", FIXED_THOUGHT), hint, actions))
            if agent.step(hint if hint and rng.random() < 0.5 else rng.choice(actions))[1]:
                agent.reset(rng.randrange(2**30, 2**31))
    for agent in agents:
        agent.env.close()
    return examples


def toy_model(args, texts):
    """A Qwen2-VL of half a million parameters and a processor whose tokenizer is trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    names = "endoftext im_start im_end vision_start vision_end image_pad video_pad".split()
    special = [f"<|{name}|>" for name in names]
    raw = Tokenizer(models.BPE())  # over whole sentences, so that the fixed parts of a prompt are few tokens
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytewise])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, max_token_length=12, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[2], pad_token=special[0])
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * args.max_image_tokens}
    images = Qwen2VLImageProcessorPil(size=pixels)
    processor = image_only(transformers.Qwen2VLProcessor)(images, tokenizer, chat_template=CHAT)
    pad, bos, eos, *marks = tokenizer.convert_tokens_to_ids(special)
    H, init = 96, 0.1  # transformers' default initial weights, 0.02, are for forty times the width
    config = Qwen2VLConfig(
        text_config=dict(
            hidden_size=H, intermediate_size=3 * H, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=4096,
            # A small theta: with 10,000 the width of an image turns the slowest and is as good as invisible.
            rope_parameters={"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 4, 6]},
            initializer_range=init, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad,
        ),
        vision_config=dict(
            depth=2, embed_dim=64, hidden_size=H, num_heads=4, mlp_ratio=2, patch_size=14,
            spatial_merge_size=2, temporal_patch_size=2, initializer_range=init,
        ),
        tie_word_embeddings=True, initializer_range=init,
        vision_start_token_id=marks[0], vision_end_token_id=marks[1],
        image_token_id=marks[2], video_token_id=marks[3],
    )  # fmt: skip
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = eos
    return model, processor


def tiny(args: Args) -> Path:
    """The folder of the toy for this world: warm-started on first use, then from the user's cache."""
    sources = [imitation_examples, toy_model, warm_start, build_prompt, VLMPolicy, Agent, envs]
    if ":" in args.env:
        sources.append(sys.modules[args.env.partition(":")[0]])
    parts = [inspect.getsource(source) for source in sources] + [torch.__version__, transformers.__version__]
    parts += [args.env, args.seed, args.num_images, args.max_image_tokens, args.max_episode_steps]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vldac"
    folder = cache / f"{re.sub(r'[^A-Za-z0-9]+', '-', args.env)}-{key}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = cache / f"{folder.name}.{os.getpid()}"
        warm_start(args, building)
        try:
            os.rename(building, folder)
        except OSError:  # another process was first
            shutil.rmtree(building)
    return folder


def warm_start(args: Args, folder: Path, steps=600, batch_size=48, rounds=3):
    """Teach a fresh toy to see and speak by imitation, and save it.

    It learns to say the caption; the action beside it is uniformly random but for the hint every fourth time.
    Rounds of `steps` until, on held-out frames, 0.99 of the responses parse and 0.9 state the true caption.
    """
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    examples = imitation_examples(args, 6000, args.seed)
    held_out = imitation_examples(args, 512, args.seed + 1)

    def response(caption, hint, actions):
        action = hint if hint and rng.random() < 0.25 else rng.choice(actions)
        return json.dumps({"thoughts": caption, "action": action})

    texts = [prompt[0][0]["content"][-1]["text"] for prompt, *_ in examples[:500]]
    model, processor = toy_model(args, texts + [response(*rest) for _, *rest in examples[:2000]])
    toy = VLMPolicy(dataclasses.replace(args, device="cpu", dtype="float32", adapter=None), model, processor)
    for name, parameter in toy.base.named_parameters():
        parameter.requires_grad_("lora_" not in name)
    by_caption = {}
    for example in examples:
        by_caption.setdefault(example[1], []).append(example)
    kinds = list(by_caption.values())  # rare scenes are shown as often as common ones
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    for _ in range(rounds):
        for step in tqdm(range(steps), "teaching the toy to see and speak", disable=not sys.stderr.isatty()):
            optimizer.param_groups[0]["lr"] = cosine(step, steps, 2e-3, 1e-5) * min(1, (step + 1) / 50)
            batch = [rng.choice(rng.choice(kinds)) for _ in range(batch_size)]
            ids = [processor.tokenizer(response(*rest)).input_ids + toy.stop_ids for _, *rest in batch]
            tokens, mask = toy.pad(ids)
            logprobs, _, _ = toy(toy.encode([prompt for prompt, *_ in batch]), tokens, mask)
            optimizer.zero_grad()
            (-step_mean(logprobs, mask)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        parsed, agreed = [], []
        for k in range(0, len(held_out), 64):
            chunk = held_out[k : k + 64]
            responses = toy.sample(toy.encode([prompt for prompt, *_ in chunk]))
            for text, (_, caption, _, actions) in zip(map(toy.decode, responses), chunk, strict=True):
                parsed.append(parse_action(text, actions) is not None)
                agreed.append(json.dumps(caption) in text)
        parse, true = np.mean(parsed), np.mean(agreed)
        print(
            f"toy: on held-out frames {parse:.3f} of the responses parse, {true:.3f} of the thoughts are true"
        )
        if parse >= 0.99 and true >= 0.9:
            break
    if examples[0][1] == FIXED_THOUGHT:
        print(f"toy: {args.env} has no captions; it starts with one fixed thought and random actions")
    toy.vlm.unload().save_pretrained(folder)
    processor.save_pretrained(folder)


# ------------------------------------------------------------------------------------- Appendix: plumbing


def check_args(args: Args):
    """UserError for values that cannot work, before anything is loaded."""
    counts = ["total_timesteps", "num_envs", "num_steps", "minibatch_size", "micro_batch_size", "num_images"]
    counts += ["update_epochs", "max_new_tokens", "max_episode_steps", "max_image_tokens"]
    counts += ["lora_rank", "lora_alpha"]
    positive = ("learning_rate", "temperature", "max_grad_norm", "clip_coef")
    not_negative = ("kl_coef", "vf_coef", "value_warmup", "eval_episodes", "final_learning_rate", "seed")
    rules = [(counts, lambda x: x >= 1, "at least 1"), (positive, lambda x: 0 < x < math.inf, "positive")]
    rules += [(not_negative, lambda x: 0 <= x < math.inf, "at least 0")]
    rules += [(("gamma", "gae_lambda"), lambda x: 0 <= x <= 1, "between 0 and 1")]
    for names, holds, words in rules:
        for name in names:
            if not holds(getattr(args, name)):
                raise UserError(f"--{name} must be {words}, not {getattr(args, name)}")
    steps = args.num_envs * args.num_steps
    if args.total_timesteps < steps:
        raise UserError(f"--total_timesteps must be at least one update, num_envs * num_steps = {steps}")
    if steps % args.minibatch_size:
        raise UserError(
            f"--minibatch_size {args.minibatch_size} does not divide num_envs * num_steps = {steps}"
        )
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {args.device}: {str(error).splitlines()[0]}; --device cpu always works"
        ) from None
    if args.adapter and not os.path.exists(os.path.join(args.adapter, "adapter_config.json")):
        raise UserError(f"--adapter {args.adapter} is not a folder with an adapter_config.json")
    if args.track and importlib.util.find_spec("wandb") is None:
        raise UserError("--track true needs Weights & Biases: pip install wandb && wandb login")


PROCESSOR_FILES = ["*processor_config.json", "chat_template*", "tokenizer*", "special_tokens_map.json"]
PROCESSOR_FILES += ["added_tokens.json", "vocab.json", "merges.txt", "*.model", "additional_chat_templates"]


def image_only(cls):
    """A processor class without its video part, which alone would need torchvision."""

    class ImageOnly(cls):
        video_processor = types.SimpleNamespace(num_frames=None, fps=None)  # SmolVLM's chat template reads it

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

        @classmethod
        def from_args_and_dict(cls, args, processor_dict, **kwargs):
            return super().from_args_and_dict([*args, None], processor_dict, **kwargs)

    ImageOnly.__name__ = cls.__name__
    return ImageOnly


def load_processor(path, max_image_tokens):
    """A model's processor for images and text, a frame bounded to max_image_tokens where it can be told."""
    try:
        processor = AutoProcessor.from_pretrained(path)
    except (ImportError, OSError):  # its video part is missing, or wants torchvision
        mapping = transformers.models.auto.processing_auto.PROCESSOR_MAPPING
        processor = image_only(mapping[type(AutoConfig.from_pretrained(path))]).from_pretrained(path)
    images = getattr(processor, "image_processor", None)
    if images is None:
        raise ValueError("it has no image processor, so it is no image-text-to-text model")
    if hasattr(images, "merge_size"):  # Qwen: a token is merge_size x merge_size patches
        pixels = (images.patch_size * images.merge_size) ** 2
        shortest = min(images.size["shortest_edge"], pixels * max_image_tokens)
        images.size = {"shortest_edge": shortest, "longest_edge": pixels * max_image_tokens}
    if hasattr(images, "do_image_splitting"):  # SmolVLM: one tile per frame
        images.do_image_splitting, images.size = False, dict(images.max_image_size)
    return processor


def model_folder(model: str) -> Path:
    """Where a model's processor files lie: the folder itself, or the hub's snapshot of them."""
    if os.path.isdir(model):
        return Path(model)
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(model, allow_patterns=PROCESSOR_FILES))


def load_policy(args: Args) -> VLMPolicy:
    """The policy of `args.model`; UserError if it cannot be had."""
    try:
        return VLMPolicy(args)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        advice = "try --model tiny, which needs no download, or Qwen/Qwen2-VL-2B-Instruct"
        raise UserError(f"--model {args.model} cannot be loaded: {reason} ({advice})") from None


def announce(args: Args) -> str:
    """What will be loaded, for the first line."""
    if args.model == "tiny":
        return (
            f"the toy model on {args.device}, a stand-in to watch the algorithm; --model NAME for a real one"
        )
    words = f"{args.model} on {args.device} in {args.dtype}"
    if size := re.search(r"(\d+(?:\.\d+)?)B\b", args.model):
        weights, steps = 2.2 * float(size[1]), args.micro_batch_size  # GB in bfloat16; README, Memory
        memory = weights + steps * float(size[1]) * (0.04 if args.gradient_checkpointing else 0.43)
        memory *= 2 if args.dtype == "float32" else 1
        words += f": downloads about {weights:.0f} GB unless cached, needs about {memory:.0f} GB of memory"
    return words


def run_folder(args: Args) -> Path:
    """A fresh folder under runs_dir; a taken name gets -2, -3, ..."""
    name = args.run_name or re.sub(r"[^\w.-]+", "-", f"{args.env}-{Path(args.model).name}-{args.seed}")
    folder, count = Path(args.runs_dir) / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not folder.is_dir():  # not merely taken
                raise UserError(
                    f"cannot make the run folder {folder}: {error.strerror}; see --runs_dir"
                ) from None
        count += 1
        folder = folder.with_name(f"{name}-{count}")


class Timer:
    """Seconds per phase of an update: `with timer("generate"): ...`"""

    def __init__(self):
        self.seconds = dict.fromkeys(("env", "encode", "generate", "score", "update"), 0.0)

    @contextlib.contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start


def explained_variance(values, returns) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that knows the mean only.

    >>> explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    1.0
    """
    variance = returns.var().item()
    return 1 - (returns - values).var().item() / variance if variance > 0 else None


def evaluate(policy, args: Args) -> dict[str, float]:
    """Success on the fixed seeds 0 ... eval_episodes - 1, sampled as in training, in its own environments."""
    seeds, finished, valid, true = list(range(args.eval_episodes))[::-1], [], [], []
    agents = [Agent(args, helpers=True) for _ in range(min(args.num_envs, args.eval_episodes))]
    playing = list(agents)
    for agent in agents:
        agent.reset(seeds.pop())
    while playing:
        captions = [agent.info.get("caption") for agent in playing]
        _, _, texts, actions, _, dones = act(policy, playing, Timer())
        valid += [action is not None for action in actions]
        true += [json.dumps(c) in text for c, text in zip(captions, texts, strict=True) if c is not None]
        for agent, done in zip(list(playing), dones, strict=True):
            if done:
                finished.append((agent.success, agent.total, agent.taken))
                agent.reset(seeds.pop()) if seeds else playing.remove(agent)
    for agent in agents:
        agent.env.close()
    success, returned, length = np.mean(finished, 0)
    result = {"success_rate": success, "episodic_return": returned, "episodic_length": length}
    result["invalid_action_rate"] = 1 - np.mean(valid)
    if true:  # thoughts that state the true caption, as the toy was taught
        result["thought_agreement"] = np.mean(true)
    return {f"eval/{name}": float(x) for name, x in result.items()}


class Log:
    """log.jsonl (a line per update), the progress bar, a printed line per update, and W&B if asked."""

    SHOWN = ("charts/success_rate", "charts/positive_return", "charts/invalid_action_rate", "losses/entropy",
             "losses/kl_base", "losses/explained_variance", "charts/env_steps_per_second")  # fmt: skip

    def __init__(self, args, folder, num_updates, policy, optimizer, agent):
        self.args, self.folder, self.policy, self.optimizer, self.agent = (
            args,
            folder,
            policy,
            optimizer,
            agent,
        )
        self.file, self.wandb = open(folder / "log.jsonl", "a", encoding="utf-8"), None
        self.recent = deque(maxlen=100)  # finished episodes: [seed, success, return, length]
        self.start = time.perf_counter()
        ids = policy.encode([agent.prompt()])["input_ids"]
        frame = torch.isin(ids, torch.tensor(policy.banned_ids, device=ids.device)).sum()
        lora, head = (sum(p.numel() for p in g["params"]) for g in optimizer.param_groups)
        print(f"first prompt: {ids.numel()} tokens, {frame} of them the frame's")
        print(f"trained: {lora:,} parameters of LoRA, {head:,} of the value head", flush=True)
        self.bar = tqdm(total=num_updates, unit="update", disable=not sys.stderr.isatty())
        if args.track:
            import wandb

            self.wandb = wandb.init(project="vldac", name=folder.name, config=dataclasses.asdict(args))

    def update(self, u, seconds, losses, finished, responses, valid, samples):
        """The row of update u: charts, losses, times, finished episodes, and the first two samples."""
        args, elapsed = self.args, time.perf_counter() - self.start
        self.recent.extend(finished)
        # Before every environment could have timed out once, only successes have finished: no rate yet.
        fair = (u + 1) * args.num_steps >= args.max_episode_steps and len(self.recent) > 0
        success, returned, length = np.mean([e[1:] for e in self.recent], 0).tolist() if fair else (None,) * 3
        cut = [len(r) == args.max_new_tokens and r[-1] not in self.policy.stop_ids for r in responses]
        row = {
            "update": u + 1,
            "global_step": (u + 1) * args.num_envs * args.num_steps,
            f"charts/{'success_rate' if self.agent.flagged else 'positive_return'}": success,
            "charts/episodic_return": returned,
            "charts/episodic_length": length,
            "charts/invalid_action_rate": 1 - np.mean(valid),
            "charts/cut_share": np.mean(cut),
            "charts/response_length": np.mean([len(r) for r in responses]),
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "charts/env_steps_per_second": len(responses) / elapsed,
        }
        row |= {f"losses/{name}": x for name, x in losses.items()} | {
            f"time/{k}": x for k, x in seconds.items()
        }
        self.write(row, finished, samples[:2])

    def write(self, row, finished=(), samples=()):
        """A row of numbers, finished episodes, and samples: (prompt, response, action, reward)."""
        if torch.cuda.is_available():
            row["gpu/max_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row = {key: round(float(x), 8) if isinstance(x, float) else x for key, x in row.items()}
        if self.wandb:
            self.wandb.log(row, step=row["global_step"])
        shown = [key for key in row if key in self.SHOWN or key.startswith("eval/")]
        words = [
            f"{key.split('/')[1]} {row[key] if row[key] is None else format(row[key], '.3g')}"
            for key in shown
        ]
        tqdm.write(f"{row['global_step']:>7} steps  " + "  ".join(words))
        if samples:
            row |= {"episodes": finished, "samples": self.transcripts(row["update"], samples)}
            self.bar.update()
        print(json.dumps(row, allow_nan=False), file=self.file, flush=True)
        self.start = time.perf_counter()  # of the next update

    def transcripts(self, update, samples):
        keys = ("prompt", "response", "action", "reward")
        rows = [
            dict(zip(keys, (prompt[0][0]["content"][-1]["text"], *rest), strict=True))
            for prompt, *rest in samples
        ]
        if update % 10 == 1:  # now and then, what it saw last
            rows[0]["frame"] = f"frames/{update:06d}.png"
            (self.folder / "frames").mkdir(exist_ok=True)
            Image.fromarray(samples[0][0][1][-1]).save(self.folder / rows[0]["frame"])
        return rows

    def close(self):
        self.bar.close()
        self.file.close()
        if self.wandb:
            self.wandb.finish()


if __name__ == "__main__":
    main()
