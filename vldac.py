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
13. Environments start spread over an episode: in step, they all time out in one rollout and in others none.

    python vldac.py --env OneRoom                  Qwen2-VL-7B where there is a GPU, else a toy model
    python vldac.py --env NumberLine --model tiny  the toy on a card game, no OpenGL needed
    python vldac.py --algo rl4vlm                  what it is compared with (Appendix B); or loop
    python vldac.py --resume runs/NAME             go on where a run was stopped or killed
    torchrun --nproc_per_node=4 vldac.py ...       the same training on four GPUs
    python vldac.py --help                         every option with its default
"""

import argparse
import bisect
import contextlib
import dataclasses
import faulthandler
import fnmatch
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import types
import typing
import warnings
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig

import envs
from envs import UserError

RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of torchrun


@dataclass
class Args:
    """Every option and its default, declared once for the program, the run folder and the tests."""

    algo: Literal["vldac", "rl4vlm", "loop"] = "vldac"  # the others are what it is compared with, Appendix B
    env: str = "OneRoom"  # a world of envs.py, or package.module:callable for your own
    model: str | None = None  # hub name, local folder or "tiny", the toy; default: 7B with CUDA, else tiny
    adapter: str | None = None  # folder of a trained adapter to start from
    split: Literal["train", "eval"] = "train"  # of the games or goals, in a world that has only so many
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
    # comparisons
    stop_grad: bool = True  # false: the value loss trains LoRA too
    thought_coef: float = 0.5  # lambda of rl4vlm, the weight of a thought's log-probability
    group_size: int = 4  # K of loop, episodes from the same start
    # model
    lora_rank: int = 16
    lora_alpha: int = 32
    value_hidden: tuple[int, ...] = (3072, 2048)
    gradient_checkpointing: bool = False  # slower, for most of the activation memory
    # bookkeeping
    eval_episodes: int = 0  # episodes on fixed seeds before the first and after the last update
    eval_every: int = 0  # updates between further evaluations (0: none); the best adapter is kept in best/
    save_every: int = 5  # updates between checkpoints
    resume: str | None = None  # the folder of a run to continue from its newest checkpoint
    env_timeout: float = 600.0  # seconds one step of an environment may take; 0: no limit
    run_name: str | None = None
    runs_dir: str = "runs"
    track: bool = False  # send the numbers to Weights & Biases too


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


ACTION_KEY = re.compile(r'"action"[ \t\r\n]*:[ \t\r\n]*')


def parse_action(text: str, actions) -> str | None:
    """The admissible action a response names, or None. Never evaluates, guesses or raises.

    The last "action" key counts. Its JSON string or number must equal an action: exactly, or as the only one
    when case and outer spaces are ignored. Where "search[...]" is offered, so is any short search[words].

    >>> parse_action('{"thoughts": "it is close", "action": "Move forward "}', ["turn left", "move forward"])
    'move forward'
    >>> parse_action('{"action": 10}', ["1", "10"]), parse_action("move forward", ["move forward"])
    ('10', None)
    """
    keys = deque(ACTION_KEY.finditer(text), maxlen=1)
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
        for module in self.base.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # deviation 4
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False  # autocast does it, and keeps no fp32 copy of inputs
        if args.gradient_checkpointing:
            self.base.activation_checkpointing_enable()

        text_config = self.base.config.get_text_config()
        if getattr(text_config, "final_logit_softcapping", None):
            raise ValueError("it caps its logits, which `forward` does not")
        sizes = [text_config.hidden_size, *args.value_hidden]
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.value_head = nn.Sequential(*sum(layers, ()), nn.Linear(sizes[-1], 1))  # fp32
        self.to(args.device)
        device = torch.device(args.device).type
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16")

        self.stop_ids, self.banned_ids, self.marks = special_tokens(self.base, self.processor.tokenizer)
        pad = self.processor.tokenizer.pad_token_id
        self.pad_id = self.stop_ids[0] if pad is None else pad
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
            pad_token_id=self.pad_id,
        )

    def encode(self, *prompts) -> dict:
        """B prompts, (messages, frames) each, as the model's inputs on the CPU: ids, mask (B, P), pixels."""
        chats = [without(self.marks, messages) for messages, _ in prompts]
        template = self.processor.apply_chat_template
        text = [template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        images = [[Image.fromarray(frame) for frame in frames] for _, frames in prompts]
        inputs = self.processor(text=text, images=images, padding=True, return_tensors="pt")
        return dict(inputs.to(getattr(torch, self.args.dtype)))  # pixels; ids stay integers

    def batch(self, prompts) -> dict:
        """B encoded prompts as one batch on the device: ids and mask (B, P), padded on the left; images."""
        batch = {}
        for key in prompts[0]:
            parts = [prompt[key] for prompt in prompts]
            if all(len(part) == 1 for part in parts):
                rows, fill = [part[0] for part in parts], self.pad_id if key == "input_ids" else 0
                parts = [pad_sequence(rows, batch_first=True, padding_value=fill, padding_side="left")]
            batch[key] = torch.cat(parts).to(self.args.device)  # or all images, one after another
        return with_features(batch)

    @torch.no_grad()
    def sample(self, prompts) -> list[list[int]]:
        """B responses as lists of token ids, each up to and including its first stop id."""
        self.eval()  # in train mode with gradient checkpointing, generate() returns garbage
        batch = self.batch(prompts)
        batch.pop("positions", None)  # generate() finds its own
        with self.autocast:
            output = self.base.generate(**batch, generation_config=self.base.generation_config)
        responses = output[:, batch["input_ids"].shape[1] :]  # (B, R)
        stops = torch.isin(responses, torch.tensor(self.stop_ids, device=responses.device)).int()
        lengths = ((stops.cumsum(1) - stops) == 0).sum(1)  # no stop id before this token
        return [row[:length] for row, length in zip(responses.tolist(), lengths.tolist(), strict=True)]

    def pad(self, responses):
        """Lists of token ids -> tokens and mask, both (B, R), right-padded."""
        R = max(map(len, responses))
        tokens = [ids + [self.pad_id] * (R - len(ids)) for ids in responses]
        mask = [[1] * len(ids) + [0] * (R - len(ids)) for ids in responses]
        return tuple(torch.tensor(x, dtype=torch.long, device=self.args.device) for x in (tokens, mask))

    def decode(self, response) -> str:
        """The text of a response without its stop id."""
        return self.processor.tokenizer.decode([token for token in response if token not in self.stop_ids])

    def forward(self, prompts, tokens, mask):
        """Log-probabilities of responses and values of their prompts.

        prompts       B of them, from `see`, or each from `encode`
        tokens, mask  (B, R); R may be 0 if only values are wanted
        Returns logprobs (B, R) in nats; values (B,); entropy (B, R) in nats, no gradient; 0 where masked.
        """
        batch = self.batch(prompts)
        P = batch["input_ids"].shape[1]
        inputs = followed_by(tokens, mask, batch)  # ids and mask (B, P + R)
        with self.autocast:
            hidden = self.base.model(**inputs, use_cache=False).last_hidden_state
            hidden = hidden[:, P - 1 :]  # (B, 1 + R, H): the last prompt token, then the response
            head = self.base.get_output_embeddings()
            logits = head(hidden[:, :-1])  # (B, R, V), each from the token before
        logits = logits.float() / self.args.temperature  # deviation 3
        logits[..., self.banned_ids] = -torch.inf
        logprobs = logits.gather(2, tokens[..., None])[..., 0] - logits.logsumexp(2)  # (B, R)
        state = hidden[:, 0].float()  # (B, H)
        if self.args.stop_grad:
            state = state.detach()  # Eq. 4
        values = self.value_head(state)[:, 0]
        with torch.no_grad():
            probs = logits.softmax(2)
            entropy = logits.logsumexp(2) - (probs * logits.masked_fill(probs == 0, 0)).sum(2)
        return logprobs.masked_fill(mask == 0, 0), values, entropy.masked_fill(mask == 0, 0)


# -------------------------------------------------------------------------------------------- the rollout


def episode_seed(seed, env, episode) -> int:
    """A training seed, in [2^30, 2^31); evaluation uses 0, 1, 2, ..."""
    return 2**30 + int(np.random.SeedSequence((seed, env, episode)).generate_state(1)[0]) % 2**30


class Agent:
    """One environment and what its prompt needs: the last k observations and the number of actions taken."""

    def __init__(self, args: Args, index=0, helpers=False):
        self.args, self.index, self.episode = args, index, 0
        limits = {"max_episode_steps": args.max_episode_steps, "invalid_reward": args.invalid_reward}
        self.env = envs.make_env(args.env, helpers=helpers, split=args.split, **limits)

    def reset(self, seed):
        self.seed, self.actions, self.total = seed, [], 0.0  # the episode, if it must be played again
        with watched(self):
            observation, self.info = self.env.reset(seed=seed)
        self.task = self.info["task"]
        self.observations = deque([observation], maxlen=self.args.num_images)  # deviation 7

    def next_episode(self):
        self.reset(episode_seed(self.args.seed, self.index, self.episode))
        self.episode += 1

    def first_episode(self):
        """Begins with some actions idled away: the environments are spread over an episode (deviation 13)."""
        self.next_episode()
        for _ in range(self.index * self.args.max_episode_steps // self.args.num_envs):
            if self.step(None)[1]:
                return self.next_episode()

    def prompt(self):
        """(messages, frames) for VLMPolicy.encode."""
        taken = len(self.actions)
        left = self.info.get("left", self.args.max_episode_steps - taken)
        seen = list(self.observations)
        messages = build_prompt(seen, self.info["actions"], self.task, taken, left)
        return messages, [observation["image"] for observation in seen]

    def start(self, action: str | None):
        """Let a slow world begin the step that is about to be played, so that many work side by side."""
        if hasattr(self.env.unwrapped, "start"):
            self.env.unwrapped.start(action or "")

    def step(self, action: str | None):
        """Play a parsed action, "" if there was none (deviation 5). Returns reward, done (deviation 6)."""
        self.actions.append(action or "")
        with watched(self):
            observation, reward, terminated, truncated, self.info = self.env.step(self.actions[-1])
        self.total += float(reward)
        self.observations.append(observation)
        self.flagged = "success" in self.info  # else a positive return stands in, under a name of its own
        self.success = bool(self.info.get("success", self.total > 0))
        return float(reward), bool(terminated or truncated)


def act(policy, agents, timer):
    """One step of every agent. Returns prompts, responses, texts, actions, rewards, dones: a list each."""
    if interrupts:
        raise Interrupted
    with timer("encode"):
        prompts = see(policy, [agent.prompt() for agent in agents])
    with timer("generate"):
        responses = policy.sample(prompts)  # deviation 10
    texts = [policy.decode(response) for response in responses]
    actions = [parse_action(text, a.info["actions"]) for text, a in zip(texts, agents, strict=True)]
    with timer("env"):
        for agent, action in zip(agents, actions, strict=True):
            agent.start(action)
        results = [agent.step(action) for agent, action in zip(agents, actions, strict=True)]
    rewards, dones = map(list, zip(*results, strict=True))
    return prompts, responses, texts, actions, rewards, dones


def collect(policy, agents, args: Args, timer):
    """T steps of N agents.

    Returns prompts and responses, lists of T * N; rewards, dones (T, N); the N prompts that follow; a record.
    """
    T, N = args.num_steps, len(agents)
    prompts, responses, record = [], [], {"valid": [], "finished": [], "samples": []}
    rewards, dones = torch.zeros(T, N), torch.zeros(T, N)
    for t in range(T):
        seen = agents[0].prompt()
        prompts_t, responses_t, texts, actions, rewards_t, dones_t = act(policy, agents, timer)
        prompts, responses = prompts + prompts_t, responses + responses_t
        rewards[t], dones[t] = torch.tensor(rewards_t), torch.tensor(dones_t)
        record["valid"] += [action is not None for action in actions]
        record["samples"].append((seen, texts[0], actions[0], rewards_t[0]))
        for agent, done in zip(agents, dones_t, strict=True):
            if done:
                if agent.episode > 1:
                    record["finished"].append([agent.seed, agent.success, agent.total, len(agent.actions)])
                agent.next_episode()
    with timer("encode"):
        last_prompts = see(policy, [agent.prompt() for agent in agents])
    return prompts, responses, rewards, dones, last_prompts, record | {"responses": responses}


@torch.no_grad()
def score(policy, prompts, tokens, mask):
    """Log-probabilities (B, R) and values (B,) of B steps, in micro-batches."""
    policy.eval()
    logprobs, values = torch.zeros(mask.shape, device=mask.device), torch.zeros(len(mask), device=mask.device)
    for index, R in micro_batches(prompts, mask, torch.arange(len(mask)), policy.args.micro_batch_size):
        some = [prompts[i] for i in index]
        logprobs[index, :R], values[index], _ = policy(some, tokens[index, :R], mask[index, :R])
    return logprobs, values


def score_base(policy, prompts, tokens, mask, logprobs):
    """Log-probabilities (B, R) under the model before training, and the policy's divergence from it."""
    # The base scores what its KL needs: all steps, or for the log alone one in sixteen.
    some = torch.arange(0, len(prompts), 1 if policy.args.kl_ref == "base" else 16)
    with policy.vlm.disable_adapter():
        baselogprobs, _ = score(policy, [prompts[i] for i in some], tokens[some], mask[some])
    return baselogprobs, kl_base(logprobs[some], baselogprobs, mask[some]).item()


# --------------------------------------------------------------------------------------------- the update


@dataclass
class Rollout:
    """What an update needs of B = T * N environment steps, flattened from (T, N)."""

    prompts: list  # B, encoded
    tokens: torch.Tensor  # (B, R)
    mask: torch.Tensor  # (B, R)
    weights: torch.Tensor  # (B, R) of tokens, for the algorithms of Appendix B
    logprobs: torch.Tensor  # (B, R) under the policy that sampled
    baselogprobs: torch.Tensor  # (B, R) under the model before training; used by kl_ref base
    advantages: torch.Tensor  # (B,) normalised
    returns: torch.Tensor  # (B,)


def assess(policy, prompts, responses, rewards, dones, last_prompts, args: Args):
    """A Rollout from what `collect` returned; and statistics for the log."""
    # Old log-probabilities and values, by the same forward pass as in the update.
    tokens, mask = policy.pad(responses)  # (B, R), B = T * N
    logprobs, values = score(policy, prompts, tokens, mask)
    _, last_values = score(policy, last_prompts, *policy.pad([[]] * len(last_prompts)))
    baselogprobs, divergence = score_base(policy, prompts, tokens, mask, logprobs)

    rewards, dones = rewards.to(values), dones.to(values)
    advantages, returns = gae(
        rewards, values.view_as(rewards), last_values, dones, args.gamma, args.gae_lambda
    )
    advantages, returns = advantages.flatten(), returns.flatten()
    everyone = torch.cat(gather(advantages.cpu()))  # of all processes of torchrun
    normalised = (advantages - everyone.mean().item()) / (everyone.std().item() + 1e-8)
    predicted, realised = map(torch.cat, zip(*gather((values.cpu(), returns.cpu())), strict=True))
    stats = {
        "kl_base": divergence,
        "explained_variance": explained_variance(predicted, realised),
        "advantage_std": everyone.std().item(),
    }
    weights = mask if args.algo == "vldac" else thought_weights(policy, responses, mask)
    return Rollout(prompts, tokens, mask, weights, logprobs, baselogprobs, normalised, returns), stats


def update(policy, optimizer, rollout: Rollout, args: Args, value_only: bool) -> dict[str, float]:
    """`update_epochs` passes over a rollout (Eq. 6). Returns the means of the losses and of their health."""
    policy.train()  # for gradient checkpointing; there is no dropout
    steps, sums, ratio_first = len(rollout.prompts), {}, 0.0
    minibatches = math.ceil(steps * PROCESSES / args.minibatch_size)
    for epoch in range(args.update_epochs):
        for k, minibatch in enumerate(torch.randperm(steps).chunk(minibatches)):
            optimizer.zero_grad()
            for index, R in micro_batches(rollout.prompts, rollout.mask, minibatch, args.micro_batch_size):
                tokens, mask = rollout.tokens[index, :R], rollout.mask[index, :R]
                logprobs, advantages = rollout.logprobs[index, :R], rollout.advantages[index]
                prompts = [rollout.prompts[i] for i in index]
                newlogprobs, values, entropy = policy(prompts, tokens, mask)

                if args.algo == "vldac":
                    pg_loss = policy_loss(newlogprobs, logprobs, advantages, mask, args.clip_coef)
                else:  # Appendix B
                    other_loss, weights = OTHER_LOSSES[args.algo], rollout.weights[index, :R]
                    pg_loss = other_loss(newlogprobs, logprobs, advantages, weights, args.clip_coef)
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
            if value_only and not args.stop_grad:
                policy.vlm.zero_grad()
            average_gradients(optimizer)  # over the processes of torchrun
            for group in optimizer.param_groups:  # deviation 8
                norm = nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm).item()
                name = "grad_norm_" + group["name"]
                sums[name] = sums.get(name, 0.0) + norm * len(minibatch) / steps
            if not math.isfinite(sum(sums.values())):
                raise Fault(not_finite(sums))
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


def train(args: Args, folder: Path, log):
    """A whole training. Writes log.jsonl, frames/, checkpoints/, best/ and adapter/ into the run folder."""
    checkpoint = newest_checkpoint(folder)  # None unless the run is resumed
    seed_all(args.seed)
    policy = load_policy(dataclasses.replace(args, adapter=str(checkpoint)) if checkpoint else args)
    optimizer = make_optimizer(policy, args)
    rollout_steps = args.num_envs * args.num_steps
    num_updates = args.total_timesteps // rollout_steps
    N = args.num_envs // PROCESSES  # environments of this process
    agents = [Agent(args, index) for index in range(RANK * N, (RANK + 1) * N)]
    held_out = dataclasses.replace(args, split="eval")
    judges = [Agent(held_out, helpers=True) for _ in range(min(N, args.eval_episodes))]
    state = load_checkpoint(checkpoint, policy, optimizer, agents)
    best = state["best"]
    log.begin(state, policy, optimizer, agents[0])
    play, judge = (collect_groups, assess_groups) if args.algo == "loop" else (collect, assess)

    def save():
        save_checkpoint(folder, policy, optimizer, state)

    for u in itertools.count(state["update"]):
        step = log.step  # environment steps so far
        finished = step + rollout_steps > args.total_timesteps
        agents_now = [(agent.episode, agent.seed, list(agent.actions)) for agent in agents]
        state = {"update": u, "best": best, "log": log.state(), "agents": agents_now}
        if u % args.save_every == 0 or finished:
            save()
        if args.eval_episodes and (u == 0 or finished or args.eval_every and u % args.eval_every == 0):
            rate = log.evaluation(u, guarded(save, evaluate, policy, judges, range(args.eval_episodes)))
            if rate > best:
                best = rate
                save_adapter(policy, folder / "best")
        if finished:
            break

        timer = Timer()
        for group in optimizer.param_groups:
            rates = args.learning_rate, args.final_learning_rate
            group["lr"] = cosine(step // rollout_steps, num_updates, *rates)
        seed_all(episode_seed(args.seed, RANK, u))  # so that a resumed run goes on as if nothing had been
        *rollout, record = guarded(save, play, policy, agents, args, timer)
        with timer("score"):
            rollout, stats = judge(policy, *rollout, args)
        with timer("update"):
            warming = u < args.value_warmup
            losses = update(policy, optimizer, rollout, args, warming) if rollout else {}
        log.update(u, timer.seconds, losses | stats, record)

    save_adapter(policy, folder / "adapter")


def main(argv=None):
    args, folder = None, None
    try:
        args = parse_args(argv)
        quiet_libraries()
        check_world(args)  # a world that does not work shows before a model is loaded
        join_processes(args)
        folder = open_run(args)
        with catch_signals(), Log(args, folder) as log:
            train(args, folder, log)
        if PROCESSES > 1:
            dist.destroy_process_group()  # now and then its threads bring the exiting interpreter down
    except (UserError, Fault, Interrupted, KeyboardInterrupt, torch.OutOfMemoryError) as error:
        raise SystemExit(farewell(error, args, folder)) from None


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
    args, examples, rng = dataclasses.replace(args, split="train"), [], random.Random(seed)
    agents = [Agent(args, helpers=True) for _ in range(min(16, args.num_envs))]
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


def toy_model(args, prompts, responses):
    """A Qwen2-VL of half a million parameters, and a processor with a tokenizer for such texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    names = "endoftext im_start im_end vision_start vision_end image_pad video_pad".split()
    special = [f"<|{name}|>" for name in names]
    raw = Tokenizer(models.BPE())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytewise])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, max_token_length=12, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    raw.train_from_iterator(prompts + responses, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[2], pad_token=special[0])
    # What every prompt repeats is a token a line: half the prompt's length, so half the work.
    fixed = set.intersection(*(set(prompt.splitlines(keepends=True)) for prompt in prompts))
    tokenizer.add_tokens(["user\n", "assistant\n", *sorted(fixed)])
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
    parts.append(min(16, args.num_envs))
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


def warm_start(args: Args, folder: Path, steps=600, batch_size=48, rounds=3, count=6000):
    """Teach a fresh toy to see and speak by imitation, and save it.

    It learns to say the caption; the action beside it is uniformly random but for the hint every fourth time.
    Rounds of `steps` until, on held-out frames, 0.99 of the responses parse and 0.9 state the true caption.
    """
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    if args.env in envs.TEXT:  # slow simulators: a short lesson, enough to see it run
        steps, rounds, count = steps // 4, 1, count // 30
    examples = imitation_examples(args, count, args.seed)
    held_out = imitation_examples(args, min(512, count), args.seed + 1)

    def response(caption, hint, actions):
        action = hint if hint and rng.random() < 0.25 else rng.choice(actions)
        return json.dumps({"thoughts": caption, "action": action})

    texts = [prompt[0][0]["content"][-1]["text"] for prompt, *_ in examples[:500]]
    model, processor = toy_model(args, texts, [response(*rest) for _, *rest in examples[:2000]])
    toy = VLMPolicy(dataclasses.replace(args, device="cpu", dtype="float32", adapter=None), model, processor)
    for name, parameter in toy.base.named_parameters():
        parameter.requires_grad_("lora_" not in name)
    for some in (examples, held_out):
        for k, (prompt, *rest) in enumerate(some):
            some[k] = toy.encode(prompt), *rest  # in place, so that the frames are let go
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
            logprobs, _, _ = toy([prompt for prompt, *_ in batch], tokens, mask)
            optimizer.zero_grad()
            (-step_mean(logprobs, mask)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        parsed, agreed = [], []
        for k in range(0, len(held_out), 64):
            chunk = held_out[k : k + 64]
            responses = toy.sample([prompt for prompt, *_ in chunk])
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


# ----------------------------------------------------------- Appendix B: what VL-DAC is compared with

# --algo, beside vldac. Ablations need no code here: --stop_grad false, --kl_coef 0, --value_warmup 0.
ALGORITHMS = {"rl4vlm": {}, "loop": {"value_warmup": 0, "vf_coef": 0.0}}  # LOOP has no critic


def rl4vlm_loss(newlogprobs, logprobs, advantages, weights, clip_coef):
    """RL4VLM (Zhai et al. 2024, arXiv 2405.10292): one ratio per environment step instead of one per token.

    log pi(a_t | s_t) = lambda * sum of log p over the thought + sum of log p over the rest
    weights (B, R): lambda on the thought's tokens, 1 on the others, 0 where masked; the rest as policy_loss.

    >>> lp = torch.tensor([[math.log(1.5), math.log(1.2)]])  # ratio 1.5^0.5 * 1.2 = 1.47, clipped at 1.2
    >>> rl4vlm_loss(lp, torch.zeros(1, 2), torch.tensor([2.0]), torch.tensor([[0.5, 1.0]]), clip_coef=0.2)
    tensor(-2.4000)
    """
    new, old = ((x.masked_fill(weights == 0, 0) * weights).sum(1, True) for x in (newlogprobs, logprobs))
    return policy_loss(new, old, advantages, torch.ones_like(new), clip_coef)  # a response is one token


def thought_weights(policy, responses, mask):
    """Lambda on the tokens of the thought, 1 on the others, 0 where masked: (B, R)."""
    weights = mask.float()
    for row, response in zip(weights, responses, strict=True):
        row[: thought_length(policy, response)] *= policy.args.thought_coef
    return weights


def thought_length(policy, response) -> int:
    """Number of tokens before the one in which the last "action" key begins; without a key, of all."""
    keys = deque(ACTION_KEY.finditer(policy.decode(response)), maxlen=1)
    if not keys:
        return len(response)
    ends = range(1, len(response) + 1)  # of the texts of its first 1, 2, ... tokens
    return bisect.bisect_right(ends, keys[0].start(), key=lambda end: len(policy.decode(response[:end])))


def loop_loss(newlogprobs, logprobs, advantages, weights, clip_coef):
    """LOOP's token-level surrogate (Chen et al. 2025, arXiv 2502.01600, Eq. 10), clipped to [1/(1+c), 1+c].

    advantages  (B,)   of the step's episode
    weights     (B, R) from `assess_groups`: the mean over steps is one over episodes of means over tokens

    >>> lp, one = torch.zeros(1, 1), torch.ones(1, 1)
    >>> loop_loss(lp - 1.0, lp, torch.tensor([-1.0]), one, clip_coef=0.25)  # exp(-1), clipped at 1 / 1.25
    tensor(0.8000)
    """
    ratio = (newlogprobs - logprobs).masked_fill(weights == 0, 0).exp()
    advantages = advantages[:, None]
    clipped = ratio.clamp(1 / (1 + clip_coef), 1 + clip_coef)
    return (torch.max(-advantages * ratio, -advantages * clipped) * weights).sum(1).mean()


def leave_one_out(returns):
    """A_k = R_k - the mean of the other returns of its group: (G, K) -> (G, K) (LOOP, Eq. 3).

    >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    K = returns.shape[1]
    return K / (K - 1) * (returns - returns.mean(1, keepdim=True))


def start_groups(agents):
    """Every K agents in a row begin an episode on a seed of their own."""
    for agent in agents:
        group = agent.index // agent.args.group_size
        agent.reset(episode_seed(agent.args.seed, group, agent.episode))
        agent.episode += 1


def collect_groups(policy, agents, args: Args, timer):
    """An episode of every agent. Returns prompts and responses, lists by episode; rewards; a record."""
    playing, steps = list(agents), [[] for _ in agents]
    record = {"valid": [], "finished": [], "samples": []}
    while playing:
        seen = playing[0].prompt()
        results = act(policy, playing, timer)
        record["samples"].append((seen, *(result[0] for result in results[2:5])))
        for agent, prompt, response, _, action, reward, done in zip(list(playing), *results, strict=True):
            steps[agent.index].append((prompt, response, reward))
            record["valid"].append(action is not None)
            if done:
                record["finished"].append([agent.seed, agent.success, agent.total, len(agent.actions)])
                playing.remove(agent)
    start_groups(agents)
    prompts, responses, _ = map(list, zip(*sum(steps, []), strict=True))
    rewards = [[reward for _, _, reward in episode] for episode in steps]
    return prompts, responses, rewards, record | {"responses": responses}


def assess_groups(policy, prompts, responses, rewards, args: Args):
    """A Rollout of the groups whose returns differ, without a critic; and statistics for the log."""
    returns = torch.tensor([sum(args.gamma**t * r for t, r in enumerate(episode)) for episode in rewards])
    advantages = leave_one_out(returns.view(-1, args.group_size))  # not divided by their deviation
    useful = (advantages.abs().amax(1) >= 0.01).repeat_interleave(args.group_size)  # (episodes,)
    lengths = torch.tensor([len(episode) for episode in rewards])
    episode = torch.arange(len(rewards)).repeat_interleave(lengths)  # (B,) which one a step belongs to
    keep = useful[episode].nonzero()[:, 0].tolist()
    prompts, responses, episode = [prompts[i] for i in keep], [responses[i] for i in keep], episode[keep]
    stats = {"explained_variance": None, "advantage_std": advantages.std().item()}
    if not keep:
        return None, stats

    tokens, mask = policy.pad(responses)
    logprobs, values = score(policy, prompts, tokens, mask)
    baselogprobs, divergence = score_base(policy, prompts, tokens, mask, logprobs)
    count = torch.zeros(len(rewards)).index_add(0, episode, mask.sum(1).cpu().float())  # tokens of an episode
    weights = mask * (len(keep) / len(rewards) / count[episode]).to(mask.device)[:, None]
    advantages = advantages.flatten()[episode].to(values)
    rollout = Rollout(prompts, tokens, mask, weights, logprobs, baselogprobs, advantages, values)
    return rollout, stats | {"kl_base": divergence}


OTHER_LOSSES = {"rl4vlm": rl4vlm_loss, "loop": loop_loss}

# ------------------------------------------------------------------------------------- Appendix: plumbing


def add_options(parser, names=None):
    """The fields of Args (those in `names`); the parsed options hold what was given and nothing else."""
    notes = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Args), re.M))  # the comments above
    for field in dataclasses.fields(Args):
        if names and field.name not in names:
            continue
        kind, inner, note = field.type, typing.get_args(field.type), notes.get(field.name, "")
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


def parse_args(argv=None) -> Args:
    """The options of a run, new or resumed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser)
    given = vars(parser.parse_args(argv))
    folder = given.pop("resume", None)
    return resumed_args(folder, given) if folder else resolve(given)


def resolve(given: dict) -> Args:
    """Command line > the algorithm's options > the toy's > the world's > Args."""
    device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.startswith("cuda")
    model = given.get("model") or ("Qwen/Qwen2-VL-7B-Instruct" if cuda else "tiny")
    world, toy = envs.OPTIONS.get(given.get("env", Args.env), {}), TOY if model == "tiny" else {}
    chosen = world | toy | ALGORITHMS.get(given.get("algo"), {}) | given
    args = Args(**chosen | {"device": device, "model": model})
    args.value_hidden = tuple(args.value_hidden)
    if args.dtype == "auto":
        args.dtype = "bfloat16" if cuda else "float32"
    check_args(args)
    return args


def load_args(folder) -> Args:
    """The options of a run, from its args.json; the model `tiny` is the run's own base folder."""
    try:
        saved = json.loads((Path(folder) / "args.json").read_text())
        args = Args(**saved | {"value_hidden": tuple(saved["value_hidden"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder} is not the folder of a run: args.json: {error}") from None
    if args.model == "tiny":
        args.model = str(Path(folder) / "base")
    return args


# May change when a run is resumed: how it is computed, not what.
HOW = {"device", "micro_batch_size", "gradient_checkpointing", "save_every", "env_timeout", "track"}


def resumed_args(folder, given) -> Args:
    """The options of the run in `folder`; UserError if the given ones describe another."""
    args = load_args(folder)
    given = given | ({"value_hidden": tuple(given["value_hidden"])} if "value_hidden" in given else {})
    if given.get("model") == "tiny" and Path(args.model).parent == Path(folder):
        del given["model"]
    changed = {name: value for name, value in given.items() if value not in (getattr(args, name), "auto")}
    if others := [f"--{n} was {getattr(args, n)}, not {x}" for n, x in changed.items() if n not in HOW]:
        raise UserError(f"--resume {folder} is another run: " + ", ".join(others))
    args = dataclasses.replace(args, **changed, resume=str(folder))
    check_args(args)
    return args


BOUNDS = {
    (1, 2**31): "total_timesteps num_steps minibatch_size micro_batch_size update_epochs max_episode_steps",
    (1, 4096): "num_envs num_images lora_rank lora_alpha save_every",
    (1, 65536): "max_new_tokens max_image_tokens",
    (0, 2**30): "value_warmup eval_episodes eval_every env_timeout",  # from 2^30 on, seeds are for training
    (0, 2**32 - 1): "seed",
    (0, 1): "gamma gae_lambda final_learning_rate thought_coef",
    (2, 4096): "group_size",
    (1e-12, 1): "learning_rate",
    (1e-12, 1e9): "clip_coef max_grad_norm",
    (0.01, 100): "temperature",
    (0, 1e6): "kl_coef vf_coef",
    (-1e6, 1e6): "invalid_reward",
}


def check_args(args: Args):
    """UserError for values that cannot work, before anything is loaded."""
    for (low, high), names in BOUNDS.items():
        for name in names.split():
            if not low <= getattr(args, name) <= high:  # NaN is nowhere between
                raise UserError(f"--{name} must be between {low} and {high}, not {getattr(args, name)}")
    if not all(1 <= size <= 65536 for size in args.value_hidden):
        raise UserError(f"--value_hidden takes sizes between 1 and 65536, not {args.value_hidden}")
    if args.run_name is not None and (Path(args.run_name).name != args.run_name or args.run_name == ".."):
        raise UserError(f"--run_name {args.run_name!r} must be a plain name; --runs_dir says where it goes")
    for name in ("num_envs", "minibatch_size"):
        if getattr(args, name) % PROCESSES:
            raise UserError(f"--{name} {getattr(args, name)} cannot be divided among {PROCESSES} processes")
    steps = args.num_envs * args.num_steps
    if args.total_timesteps < steps:
        raise UserError(f"--total_timesteps must be at least one update, num_envs * num_steps = {steps}")
    if steps % args.minibatch_size:
        raise UserError(
            f"--minibatch_size {args.minibatch_size} does not divide num_envs * num_steps = {steps}"
        )
    if args.algo == "loop" and args.num_envs % args.group_size:
        raise UserError(f"--num_envs {args.num_envs} is not a multiple of --group_size {args.group_size}")
    if args.algo == "loop" and PROCESSES > 1:
        raise UserError("--algo loop trains in one process: its rollouts have no fixed length to share")
    try:
        torch.ones(1, device=args.device).item()
        if args.device.startswith("cuda") and PROCESSES > 1:
            torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"]))
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {args.device}: {str(error).splitlines()[0]}; --device cpu always works"
        ) from None
    if args.adapter and not os.path.exists(os.path.join(args.adapter, "adapter_config.json")):
        raise UserError(f"--adapter {args.adapter} is not a folder with an adapter_config.json")
    if args.track and importlib.util.find_spec("wandb") is None:
        raise UserError("--track true needs Weights & Biases: pip install wandb && wandb login")


def check_world(args: Args):
    """UserError if the environment cannot be made or breaks its contract in its first steps."""
    agent = Agent(args)
    try:
        agent.reset(0)
        for action in (None, agent.info["actions"][0]):  # None: an answer that does not parse
            if agent.step(action)[1]:
                agent.reset(0)
    except WorldError as error:
        raise UserError(str(error)) from None
    agent.env.close()


class Fault(Exception):
    """What ends a run that was under way. The message says what to look at; exit status 1."""


class WorldError(Fault):
    """An environment raised, broke its contract or gave no answer. The message holds seed and actions."""


class Interrupted(Exception):
    """A signal asked for a stop, in this process or in another one."""


interrupts: list[int] = []  # the signals that came


@contextlib.contextmanager
def catch_signals():
    """Ctrl-C and SIGTERM are noted, and `act` raises Interrupted; a second one ends the process at once."""

    def note(number, frame):
        interrupts.append(number)
        os.write(2, b"\nstopping; the state is saved first (a second signal leaves at once)\n")
        for number in before:
            signal.signal(number, signal.SIG_DFL)

    interrupts.clear()
    main_thread = threading.current_thread() is threading.main_thread()  # nowhere else are there signals
    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM) if main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def watched(agent):
    """Around a call of an environment: WorldError if it raises or does not return within env_timeout."""
    seconds = agent.args.env_timeout
    main_thread = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def ring(*_):
        raise TimeoutError(f"no answer within {seconds:g} seconds (--env_timeout)")

    if seconds and main_thread:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    if seconds:  # stuck in C code, no Python handler runs: the process ends and shows where it was
        faulthandler.dump_traceback_later(seconds + 60, exit=True, file=sys.__stderr__)
    try:
        yield
    except Exception as error:
        frame = [f for f in traceback.extract_tb(error.__traceback__) if f.name != "ring"][-1]
        what = f"{type(error).__name__}: {error} (at {frame.filename}:{frame.lineno})"
        raise WorldError(
            f"--env {agent.args.env}: {error if isinstance(error, UserError) else what}; to see it again: "
            f"env.reset(seed={agent.seed}) and env.step through {json.dumps(agent.actions)}"
        ) from error
    finally:
        if seconds:
            faulthandler.cancel_dump_traceback_later()
        if seconds and main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def guarded(save, part, *inputs):
    """part(*inputs), the work of one process. If it is stopped in any of them, all save and leave."""
    try:
        result, failure = part(*inputs), None
    except (Interrupted, WorldError, torch.OutOfMemoryError) as error:
        result, failure = None, error
    if any(gather(failure is not None)):
        save()
        raise failure or Interrupted
    return result


def not_finite(sums) -> str:
    """What to say when `sums`, the losses and gradient norms so far in an update, is not finite."""
    named = ", ".join(f"{name} {x:g}" for name, x in sums.items() if not math.isfinite(x))
    return (
        f"not finite: {named}. No weight was touched by it. Look at losses/* in the last rows of the log "
        "(advantage_std, kl_base, grad_norm_*) and at the rewards; then start from the last checkpoint, "
        "--adapter RUN/checkpoints/N, with a lower --learning_rate or --dtype float32"
    )


def farewell(error, args, folder) -> int:
    """Say in a line why the program ends and how to go on. Returns the exit status."""
    status, words = 1, f"stopped: {error}"
    if isinstance(error, UserError):
        status, words = 2, f"error: {error}"
        if RANK == 0 and folder and not args.resume and not newest_checkpoint(folder):
            shutil.rmtree(folder, ignore_errors=True)  # nothing was begun
    elif isinstance(error, (Interrupted, KeyboardInterrupt)):
        number = signal.Signals(interrupts[0] if interrupts else signal.SIGINT)
        status, words = 128 + number, f"stopped by {number.name}"
    elif isinstance(error, torch.OutOfMemoryError):
        words = (
            f"out of memory: {str(error).splitlines()[0]} What helps: a lower --micro_batch_size (now "
            f"{args.micro_batch_size}) or --gradient_checkpointing true, also when resuming; in a new run "
            "a lower --num_envs, --num_images or --max_new_tokens, or a smaller --model"
        )
    elif error.__cause__:  # what an environment raised
        traceback.print_exception(error.__cause__)
    if status != 2 and folder:
        words += f". To go on: python vldac.py --resume {folder}"
    if RANK == 0 or status == 1:  # a fault of its own
        print(f"vldac.py: {words}", file=sys.stderr)
    return int(status)


def quiet_libraries():
    """No progress bars in a file, and no warning that peft asks transformers by an old name."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def seed_all(seed):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def join_processes(args: Args):
    """Under torchrun: a process group whose members wait for each other as long as an update may take."""
    if PROCESSES == 1:
        return
    if cuda := args.device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(days=1))
    if RANK:
        sys.stdout = open(os.devnull, "w")  # one process speaks


def gather(x) -> list:
    """x of every process, by rank."""
    shares = [x]
    if PROCESSES > 1:
        shares = [None] * PROCESSES
        dist.all_gather_object(shares, x)
    return shares


@torch.no_grad()
def see(policy, prompts) -> list[dict]:
    """B prompts, (messages, frames) each, encoded: a dict each, with its images' features for pixels.

    The frozen vision tower looks once per step, not once per pass. The features are (tokens, levels, H):
    Qwen3-VL has several levels, the others one.
    """
    tuned = [name for name, module in policy.base.named_modules() if isinstance(module, BaseTunerLayer)]
    if not all(re.fullmatch(LORA_TARGETS, name) for name in tuned):  # an adapter that was made elsewhere
        return [policy.encode(prompt) for prompt in prompts]
    batch = policy.encode(*prompts)
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    text = {key: x for key, x in batch.items() if x.shape == ids.shape}  # (B, P)
    rest = {key: x for key, x in batch.items() if key not in text}
    sizes = {key: x for key, x in rest.items() if not key.startswith("pixel")}  # Qwen's, a row per image
    if hasattr(policy.base.model, "get_rope_index"):  # Qwen: three positions per token, slow to find
        text["positions"] = policy.base.model.get_rope_index(**text, **sizes)[0].permute(1, 2, 0)  # (B, P, 3)
    with policy.autocast:
        seen = policy.base.get_image_features(**{k: x.to(policy.args.device) for k, x in rest.items()})
    levels = [seen.pooler_output, *getattr(seen, "deepstack_features", ())]
    features = torch.stack([torch.cat(list(level)) for level in levels], 1)
    key = "tensor_features" if torch.is_tensor(seen.pooler_output) else "features"  # Gemma's are one tensor
    placeholders = torch.isin(ids, torch.tensor(policy.banned_ids)).sum(1).tolist()
    images = [len(frames) for _, frames in prompts]
    shares = [{key: share} for share in features.cpu().split(placeholders)]
    for name, x in sizes.items():
        shares = [a | {name: b} for a, b in zip(shares, x.split(images), strict=True)]
    return [
        {name: x[i : i + 1, mask[i]] for name, x in text.items()} | share for i, share in enumerate(shares)
    ]


def with_features(batch) -> dict:
    """A batch of prompts with their features, if they have any, in the form that the model takes."""
    for key in {"features", "tensor_features"} & batch.keys():
        features, *deepstack = ([level] for level in batch.pop(key).unbind(1))
        features = torch.stack(features) if key == "tensor_features" else features
        seen = types.SimpleNamespace(pooler_output=features, deepstack_features=deepstack)
        batch["mm_encoder_outputs"] = {"image": seen}
    return batch


def followed_by(tokens, mask, batch) -> dict:
    """The model's inputs for a batch of B prompts followed by responses, tokens and mask (B, R)."""
    ids, inputs = batch["input_ids"], dict(batch)
    for key, x in batch.items():
        if getattr(x, "shape", None) == ids.shape:  # token types, say: the response is text, type 0
            inputs[key] = torch.cat([x, torch.zeros_like(tokens, dtype=x.dtype)], 1)
    inputs["input_ids"] = torch.cat([ids, tokens], 1)  # (B, P + R)
    inputs["attention_mask"] = torch.cat([batch["attention_mask"], mask], 1)
    if "positions" in batch:
        positions = inputs.pop("positions")
        steps = torch.arange(1, tokens.shape[1] + 1, device=ids.device)
        further = positions[:, -1:] + steps[:, None]  # (B, R, 3)
        inputs["position_ids"] = torch.cat([positions, further], 1).permute(2, 0, 1)  # (3, B, P + R)
    return inputs


def micro_batches(prompts, mask, index, size):
    """The steps `index` in micro-batches of similar lengths, which saves padding: their indices and R."""
    lengths = torch.tensor([prompt["input_ids"].shape[1] for prompt in prompts]) + mask.sum(1).cpu()
    for rows in index[lengths[index].argsort(stable=True)].split(size):
        yield rows, int(mask[rows].sum(1).max())


def average_gradients(optimizer):
    """The mean over processes, whose minibatches are equally large: the gradient of the whole minibatch."""
    if PROCESSES > 1:
        params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        grads = [p.grad for p in params if p.grad is not None]  # LoRA has none while the value head warms up
        vector = parameters_to_vector(grads)  # one message instead of one per tensor
        dist.all_reduce(vector)
        vector_to_parameters(vector / PROCESSES, grads)


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


def special_tokens(base, tokenizer):
    """The ids that end a turn, the ids that must never be sampled, and a pattern of all special tokens."""
    # A turn ends at the checkpoint's stop ids or the tokenizer's: Gemma 3's own is only among the former.
    stop = base.generation_config.eos_token_id
    stop = set(stop if isinstance(stop, list) else [stop]) | {tokenizer.eos_token_id}
    # Image and video placeholders would break the next forward pass if they were sampled.
    names = ("image_token_id", "image_token_index", "video_token_id")
    banned = {getattr(base.config, name, None) for name in names}
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted(stop - {None}), sorted(banned - {None}), re.compile("|".join(special))


def without(marks, messages) -> list[dict]:
    """The same chat without `marks`, a pattern, in its texts: a world may show again what the model wrote.

    >>> without(re.compile("<end>"), [{"role": "user", "content": [{"type": "text", "text": "a<end>b"}]}])
    [{'role': 'user', 'content': [{'type': 'text', 'text': 'a b'}]}]
    """

    def clean(part):
        text = part.get("text", "").encode(errors="replace").decode()  # no lone surrogates either
        return part | ({"text": marks.sub(" ", text)} if text else {})

    return [turn | {"content": [clean(part) for part in turn["content"]]} for turn in messages]


def load_policy(args: Args) -> VLMPolicy:
    """The policy of `args.model`; UserError if it cannot be had."""
    try:
        return VLMPolicy(args)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError,
            SafetensorError, StrictDataclassError) as error:  # fmt: skip
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"--model {args.model}" + (f" with --adapter {args.adapter}" if args.adapter else "")
        advice = "try --model tiny, which needs no download, or Qwen/Qwen2-VL-2B-Instruct"
        if "gated" in reason:
            advice = "accept its licence on its page, then: hf auth login"
        raise UserError(f"{what} cannot be loaded: {reason[:300]} ({advice})") from None


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
            if not os.path.isdir(folder):  # not merely taken
                raise UserError(
                    f"cannot make the run folder {folder}: {error.strerror}; see --runs_dir"
                ) from None
        count += 1
        folder = folder.with_name(f"{name}-{count}")


def open_run(args: Args) -> Path:
    """The run folder with args.json and the toy's model in it: a new one, or that of --resume."""
    folder = None
    if RANK == 0:
        if args.resume:
            folder, checkpoint = Path(args.resume), newest_checkpoint(Path(args.resume))
            words = f"{announce(args)}; continues after update {int(checkpoint.name) if checkpoint else 0}"
        else:
            folder, words = run_folder(args), announce(args)
        print(f"{folder}: {words}", flush=True)
        toy = {"model": "tiny"} if Path(args.model) == folder / "base" else {}
        options = dataclasses.asdict(args) | toy | {"resume": None}
        try:
            if args.model == "tiny":
                shutil.copytree(tiny(args), folder / "base")
            (folder / "args.tmp").write_text(json.dumps(options, indent=1))
            (folder / "args.tmp").replace(folder / "args.json")  # there only when all before it is
        except (OSError, SafetensorError) as error:
            raise UserError(f"the run folder {folder} cannot be written: {error}") from None
        print("options:", *(f"{key}={value}" for key, value in options.items()), flush=True)
    folder = gather(folder)[0]
    if args.model == "tiny":
        args.model = str(folder / "base")
    return folder


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest number; those still being written have no number for a name."""
    return max((c for c in folder.glob("checkpoints/*") if c.name.isdigit()), default=None)


@contextlib.contextmanager
def whole(folder: Path):
    """A folder to write into that gets its name when it is complete; Fault if the disk is full, say."""
    building = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        yield building
        if hasattr(os, "sync"):  # or a power failure could leave a whole name on half a file
            os.sync()
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(folder.parent).free
        shutil.rmtree(building, ignore_errors=True)
        raise Fault(
            f"{folder} cannot be saved ({error}; {free:,} bytes are free); what was saved before is whole"
        ) from None


def save_adapter(policy, folder: Path):
    """The adapter in PEFT's format, the base's processor files beside it, copied verbatim."""
    if RANK == 0:
        with whole(folder) as building:
            write_adapter(policy, building)


def write_adapter(policy, folder: Path):
    policy.vlm.peft_config["default"].base_model_name_or_path = policy.args.model  # a run may have moved
    policy.vlm.save_pretrained(folder)
    copy_processor(policy.args.model, folder)


def copy_processor(model: str, folder: Path):
    for file in model_folder(model).iterdir():
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in PROCESSOR_FILES):
            (shutil.copytree if file.is_dir() else shutil.copyfile)(file, folder / file.name)


def save_checkpoint(folder: Path, policy, optimizer, state: dict):
    """checkpoints/UPDATE: adapter, value head, and the rest in state.pt; older ones go when it is whole."""
    state = state | {"agents": sum(gather(state["agents"]), []), "optimizer": optimizer.state_dict()}
    final = folder / "checkpoints" / f"{state['update']:06d}"
    if RANK or final.exists():
        return
    with whole(final) as building:
        write_adapter(policy, building)
        save_file(policy.value_head.state_dict(), building / "value_head.safetensors")
        torch.save(state, building / "state.pt")
    for older in set(final.parent.iterdir()) - {final}:
        shutil.rmtree(older)


def load_checkpoint(checkpoint: Path | None, policy, optimizer, agents) -> dict:
    """Bring all but the adapter to where `save_checkpoint` was called, or to the start. Returns the state."""
    if checkpoint is None:
        if policy.args.algo == "loop":
            start_groups(agents)
        else:
            for agent in agents:
                agent.first_episode()
        return {"update": 0, "best": -math.inf, "log": (0, [], None, 0)}
    try:
        policy.value_head.load_state_dict(load_file(checkpoint / "value_head.safetensors"))
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{checkpoint} is damaged ({reason}); its adapter may still do for --adapter"
        ) from None
    for agent in agents:  # an episode is a function of its seed and actions
        agent.episode, seed, actions = state["agents"][agent.index]
        agent.reset(seed)
        if any(agent.step(action)[1] for action in actions):
            print(f"environment {agent.index} does not repeat itself and starts a new episode")
            agent.next_episode()
    return state


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


def evaluate(policy, agents, seeds, step=act) -> list[dict]:
    """An episode on each seed, as in training; a dict each, by seed. `true` counts true thoughts.

    Of several processes, each plays its share.
    """
    if policy is not None:
        seed_all(policy.args.seed)
    waiting, playing, finished = list(seeds)[RANK::PROCESSES][::-1], [], []

    def start(agent):
        agent.reset(waiting.pop())
        agent.counts = {"invalid": 0, "tokens": 0, "true": 0 if "caption" in agent.info else None}

    for agent in agents[: len(waiting)]:
        start(agent)
        playing.append(agent)
    while playing:
        captions = [json.dumps(agent.info.get("caption")) for agent in playing]
        _, responses, texts, actions, _, dones = step(policy, playing, Timer())
        for agent, caption, response, text, action, done in zip(
            list(playing), captions, responses, texts, actions, dones, strict=True
        ):
            agent.counts["invalid"] += action is None
            agent.counts["tokens"] += len(response)
            if agent.counts["true"] is not None:
                agent.counts["true"] += caption in text
            if done:
                episode = {"seed": agent.seed, "success": agent.success, "return": agent.total}
                finished.append(
                    episode | {"length": len(agent.actions), "flagged": agent.flagged} | agent.counts
                )
                start(agent) if waiting else playing.remove(agent)
    return sorted(finished, key=lambda episode: episode["seed"])


def summary(episodes) -> dict[str, float]:
    """Means over the episodes of `evaluate`; the rate of success comes first."""
    success, returned, length, invalid, true, flagged = (
        [episode[key] for episode in episodes]
        for key in ("success", "return", "length", "invalid", "true", "flagged")
    )
    steps = sum(length)
    result = {
        "success_rate" if all(flagged) else "positive_return": np.mean(success),
        "episodic_return": np.mean(returned),
        "episodic_length": np.mean(length),
        "invalid_action_rate": sum(invalid) / steps,
    }
    if None not in true:  # the share of thoughts that state the true caption, as the toy was taught
        result["thought_agreement"] = sum(true) / steps
    return {key: float(x) for key, x in result.items()}


def lock(file):
    """UserError if another process writes the file, a run that is still ending, say."""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{file.name} is being written by another process; wait for its end") from None


class Log:
    """log.jsonl (a line per update), the progress bar, a printed line per update, and W&B if asked."""

    SHOWN = ("charts/success_rate", "charts/positive_return", "charts/invalid_action_rate", "losses/entropy",
             "losses/kl_base", "losses/explained_variance", "charts/env_steps_per_second")  # fmt: skip

    def __init__(self, args, folder):
        self.args, self.folder, self.bar, self.wandb = args, folder, None, None
        self.file = open(os.devnull if RANK else folder / "log.jsonl", "ab", buffering=0)
        if RANK == 0:
            lock(self.file)

    def __enter__(self):
        return self

    def begin(self, state, policy, optimizer, agent):
        """Continue from `state`, a checkpoint's; say what is trained."""
        self.policy, self.optimizer, self.agent = policy, optimizer, agent
        size, recent, wandb_id, self.step = state["log"]
        if RANK == 0:
            self.file.truncate(size)  # what came after the checkpoint will be written again
        self.recent = deque(recent, maxlen=100)  # finished episodes: [seed, success, return, length]
        self.start = time.perf_counter()
        ids = policy.encode(agent.prompt())["input_ids"]
        frame = torch.isin(ids, torch.tensor(policy.banned_ids, device=ids.device)).sum()
        lora, head = (sum(p.numel() for p in g["params"]) for g in optimizer.param_groups)
        print(f"first prompt: {ids.numel()} tokens, {frame} of them the frame's")
        print(f"trained: {lora:,} parameters of LoRA, {head:,} of the value head", flush=True)
        quiet = RANK > 0 or not sys.stderr.isatty()
        self.bar = tqdm(total=self.args.total_timesteps, initial=self.step, unit="step", disable=quiet)
        if self.args.track and RANK == 0:
            import wandb

            config = dataclasses.asdict(self.args)
            self.wandb = wandb.init(
                project="vldac", name=self.folder.name, config=config, id=wandb_id, resume="allow"
            )

    def state(self):
        """What a resumed run needs: the file's length, the recent episodes, W&B's run, the step."""
        size = 0 if RANK else os.path.getsize(self.file.name)
        return size, list(self.recent), self.wandb and self.wandb.id, self.step

    def update(self, u, seconds, losses, record):
        """The row of update u, over all processes: charts, losses, times, episodes, the first two samples."""
        args, elapsed = self.args, time.perf_counter() - self.start
        shares = gather((losses, record))
        for name, x in losses.items():
            every = [share[name] for share, _ in shares]
            mean = max if name == "ratio_first" else np.mean
            losses[name] = None if x is None else float(mean(every))
        finished, responses, valid = (
            sum((share[key] for _, share in shares), []) for key in ("finished", "responses", "valid")
        )
        self.recent.extend(finished)
        self.step += len(responses)
        # First episodes, which begin late, do not count. Before every environment could have timed out in
        # its second, only successes have finished: no rate yet. LOOP plays whole episodes.
        fair = args.algo == "loop" or (u + 1) * args.num_steps >= 2 * args.max_episode_steps
        fair = fair and len(self.recent) > 0
        success, returned, length = np.mean([e[1:] for e in self.recent], 0).tolist() if fair else (None,) * 3
        cut = [len(r) == args.max_new_tokens and r[-1] not in self.policy.stop_ids for r in responses]
        row = {
            "update": u + 1,
            "global_step": self.step,
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
        self.write(row, finished, record["samples"][:2])

    def evaluation(self, u, episodes) -> float:
        """The row of an evaluation before update u, over all processes. Returns the rate of success."""
        scores = summary(sum(gather(episodes), []))
        row = {"update": u, "global_step": self.step}
        self.write(row | {f"eval/{name}": x for name, x in scores.items()})
        return next(iter(scores.values()))

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
        try:
            if samples:
                row |= {"episodes": finished, "samples": self.transcripts(row["update"], samples)}
                self.bar.update(self.step - self.bar.n)
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            if self.file.write(line) < len(line):
                raise OSError("the disk is full")
        except OSError as error:
            raise Fault(f"{self.folder} cannot be written: {error}") from None
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

    def __exit__(self, *failure):
        if self.bar:
            self.bar.close()
        self.file.close()
        if self.wandb:
            self.wandb.finish()


if __name__ == "__main__":
    main()
