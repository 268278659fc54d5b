"""VL-DAC in one file: reinforcement learning for vision-language agents.

VL-DAC (Vision-Language Decoupled Actor-Critic, Bredis et al., AAMAS 2026, arXiv 2508.04280) trains a
vision-language model (VLM) to act. At environment step t the model sees a prompt s_t (images and text) and
writes a response a_t, the tokens a_t^1 a_t^2 ...; the action parsed from it moves the environment, which pays
the reward r_t. Actor and critic are decoupled: the policy is optimised per token, the value is predicted once
per environment step, and the value head's gradient stops at the backbone. Two things are trained: LoRA
adapters (small matrices beside the language model's layers; switched off, they leave the base model) and the
value head. The rest, the vision tower too, is frozen.

    L = L_policy + beta * L_KL + alpha * L_value                                                     (Eq. 6)

    L_policy  PPO's clip on every token. All tokens of step t share its advantage A_t, by GAE over the
              environment steps, then normalised over the rollout                                    (Eq. 3)
    L_value   1/2 (V(s_t) - G_t)^2. V(s_t) = MLP(stopgrad(h_t)), where h_t is the last layer's hidden state at
              the last prompt token (Eq. 4). G_t = A_t (before normalisation) + V(s_t), both from the
              rollout, so the target is fixed
    L_KL      divergence from the policy that sampled (Eq. 5) or, the default, from the model without its LoRA
    In the first `value_warmup` updates only the value head learns. There is no entropy bonus.

By default 16 environments play 32 steps: a rollout of 512. One update is two epochs of 4 minibatches, so 8
optimizer steps. A run is 100 updates. (The toy has other defaults, in PRESETS: in OneRoom 60 updates.)

Where the code differs from the paper or from its released code (github.com/corl-team/VL-DAC), a comment
"Deviation n" says what it does and why. docs/details.md has more on each, and what differs from CleanRL's
ppo.py. The five largest:

* Responses are sampled, not decoded greedily (4).
* A response that names no action does nothing and costs its step (6).
* The reward of a step that timed out is not learned from (9).
* Every token of a response is in the loss (10).
* L_KL is to the model without its LoRA, as in the released code, and not Eq. 5 (12).

Letters: N environments, T steps per rollout, B environment steps (all of a rollout or some), P prompt length,
R response length (both padded; R_b that of response b), H hidden size. Tensors (T, N) and (B,) are per
environment step, (B, R) per token.
The file follows the data: prompt and parser, policy, rollout, minibatches and scores, advantages, losses,
update. The loop of `train` puts them together; one may begin there. Then come loading a model and what any
training program has. The environments, called worlds, are in envs.py.
Without a GPU the model is a toy, a tiny VLM that extras/toy.py first teaches by imitation to say what it sees
and to act at random, so that one can watch on a laptop what reward teaches.

    python vldac.py --env OneRoom                  Qwen2-VL-7B where there is a GPU, else a toy model
    python vldac.py --env NumberLine --model tiny  the toy on a card game, no OpenGL needed
    python vldac.py --resume runs/NAME             go on after the last finished update
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import types
import warnings
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import transformers
from jinja2 import TemplateError
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, HfArgumentParser, set_seed
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

import envs
from envs import UserError, check, exit_with

warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT uses a deprecated name


@dataclass
class Args:
    """Every option and its default. The source of each is in docs/guide.md.

    The rule: the paper's Table 6 where it speaks, else the effective value of the released code, unless that
    is a bug. The toy and some worlds have other defaults, in PRESETS below. The command line applies them and
    makes the toy; `Args(...)` in a notebook does neither, so give it a model there.

    On a command line: --env NumberLine --num_envs 8 --stop_grad false --value_hidden 64 64
    """

    env: str = "OneRoom"  # a world of envs.py, a Gymnasium id, or module:id (of your own, say)
    model: str | None = None  # hub name, folder or "tiny", the toy; default: Qwen2-VL-7B with CUDA, else tiny
    adapter: str | None = None  # folder of a trained adapter to start from, with a new value head
    split: Literal["train", "eval"] = "train"  # which games or goals, in worlds that have a fixed set of them
    seed: int = 0  # of the new weights, of the episodes, and of what is sampled
    device: str | None = None  # default: cuda where there is one, else cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the base; auto: bfloat16 on a GPU that has it
    # rollout
    total_timesteps: int = 51_200  # environment steps, rounded down to whole updates
    num_envs: int = 16  # environments that play at once
    num_steps: int = 32  # environment steps of each environment per update
    max_episode_steps: int | None = None  # default: the world's own limit
    action_repeat: int = 1  # in MiniWorld: how many of the simulator's steps an action is
    invalid_reward: float | None = None  # for a response that names no action; default: the world's own
    num_images: int = 4  # newest frames in the prompt
    max_image_tokens: int = 256  # at most, per frame; some models have their own number, or a larger minimum
    temperature: float = 1.0  # of sampling, and so of scoring
    max_new_tokens: int = 256  # of a response, at most
    # update
    minibatch_size: int = 128  # environment steps per optimizer step
    micro_batch_size: int = 8  # environment steps per forward pass that scores or trains; fewer save memory
    update_epochs: int = 2  # passes over a rollout
    value_warmup: int = 2  # updates that train only the value head
    learning_rate: float = 5e-5  # of the first update
    final_learning_rate: float = 1e-7  # of the last one; between them it falls along a cosine
    gamma: float = 0.99  # discount per environment step; in card games 1
    gae_lambda: float = 0.95  # lambda of GAE; in card games 1
    clip_coef: float = 0.1  # epsilon, of a token's ratio
    vf_coef: float = 0.15  # alpha, the weight of the value loss
    kl_coef: float = 0.05  # beta, the weight of the KL loss
    kl_ref: Literal["base", "old"] = "base"  # the model without its adapter, or the sampling policy
    max_grad_norm: float = 1.0  # of LoRA and of the value head, separately
    stop_grad: bool = True  # false: the value loss trains LoRA too
    # model
    lora_rank: int = 16  # of the adapters' matrices
    lora_alpha: int = 32  # not the alpha of Eq. 6; PEFT multiplies the adapter by lora_alpha / lora_rank
    value_hidden: list[int] = field(default_factory=lambda: [3072, 2048])  # widths in the value head
    gradient_checkpointing: bool = False  # slower, but saves most of the memory for activations
    # the run
    eval_episodes: int = 50  # sampled on fixed seeds, before training and after; 0: none
    eval_every: int = 0  # updates between further evaluations, each of which keeps an adapter-STEPS/
    run_name: str | None = None  # default: of world, model and seed
    runs_dir: str = "runs"  # folder of the runs' folders
    resume: str | None = None  # the folder of a run to continue
    track: bool = False  # send the scalars of the log to Weights & Biases too

    def __post_init__(self):
        if self.env.startswith("vldac/"):  # the full Gymnasium id of a world of envs.py
            self.env = self.env.removeprefix("vldac/").removesuffix("-v0")
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        cuda = self.device.startswith("cuda")
        self.model = self.model or ("Qwen/Qwen2-VL-7B-Instruct" if cuda else "tiny")
        if self.dtype == "auto":
            # A card without bfloat16 of its own emulates it, slowly.
            native = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
            self.dtype = "bfloat16" if native else "float32"


# ------------------------------------------------------------------------------ the prompt and the parser


def build_prompt(text, actions, task, taken, left) -> str:
    """The text of a prompt; its frames, the newest ones, come before it.

    text         of the newest observation
    actions      the admissible actions
    taken, left  how many actions were taken, and how many are left

    >>> print(build_prompt("It is dark.", ["go", "wait"], "leave", 2, 8))
    Task: leave.
    It is dark.
    Actions taken: 2. Actions left: 8.
    Admissible actions: "go", "wait".
    Think, then choose one action. Answer with {"thoughts": "...", "action": "..."}
    """
    # Deviation 1: one template for all worlds, with actions in words.
    # Deviation 2: every frame is shown once, and the model is told how many actions were taken and are left.
    names = [json.dumps(action, ensure_ascii=False) for action in actions]  # as the answer must spell them
    lines = [
        f"Task: {task.rstrip(' .')}.",
        text,
        f"Actions taken: {taken}. Actions left: {left}.",
        "Admissible actions: " + ", ".join(names) + ".",
        'Think, then choose one action. Answer with {"thoughts": "...", "action": "..."}',
    ]
    return "\n".join(line for line in lines if line)


ACTION_KEY = re.compile(r'"action"[ \t\r\n]*:[ \t\r\n]*')
# A number counts only if something ends it: a response that was cut after 1 may have meant 10.
NUMBER = re.compile(r"-?[0-9][0-9.eE+-]{0,30}(?=[ \t\r\n]*[,}])")
SEARCH = re.compile(r"search(\[(?=.*\w)[^\[\]]{1,100}\])", re.IGNORECASE)  # at least one letter, digit or _


def parse_action(text: str, actions) -> str | None:
    """The admissible action a response names, or None. Never evaluates, guesses or raises.

    The last "action" key counts. The JSON string or number after it must equal an action. Failing an exact
    match, case and outer spaces are ignored, if exactly one action then matches. "search[...]" is not an
    action itself, but stands for any short search[words].

    >>> parse_action('{"thoughts": "it is close", "action": "Move forward "}', ["turn left", "move forward"])
    'move forward'
    >>> parse_action('{"action": 10}', ["1", "10"]), parse_action("move forward", ["move forward"])
    ('10', None)
    """
    keys = list(ACTION_KEY.finditer(text))
    if not keys:
        return None
    start = keys[-1].end()
    number = NUMBER.match(text, start)
    if number:
        value = number.group()  # compared as text: the action 10 is neither 10.0 nor 1e1
    elif text.startswith('"', start):
        try:
            value, _ = json.JSONDecoder(strict=False).raw_decode(text, start)  # line breaks may be raw
        except ValueError:
            return None
    else:
        return None
    if "search[...]" in actions and value.strip().casefold().startswith("search["):
        search = SEARCH.fullmatch(value.strip())
        return "search" + search[1] if search and search[1].isprintable() else None
    if value in actions:
        return value
    wanted = value.strip().casefold()
    same = {action for action in actions if action.strip().casefold() == wanted}
    return same.pop() if len(same) == 1 else None


# --------------------------------------------------------------------------------------------- the policy


def pad(tensors, filler=0, side="right") -> torch.Tensor:
    """B tensors (R_b,) as one (B, R); the shorter ones are filled up at that side."""
    return pad_sequence(tensors, batch_first=True, padding_value=filler, padding_side=side)


# What a processor returns for every token of a prompt; every other key describes its images.
PER_TOKEN = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


class VLMPolicy(nn.Module):
    """A VLM with LoRA on its language model, and a value head on the last prompt token's hidden state.

    `forward` scores the distribution that `sample` draws from: the same temperature, the same banned tokens
    (placeholders of images, video and audio).
    """

    def __init__(self, args: Args):
        super().__init__()
        self.args = args
        self.processor = load_processor(args.model, args.max_image_tokens)
        self.tokenizer = self.processor.tokenizer
        # Three handles on one model: `vlm` generates, `vlm.model` gives hidden states, and `peft_model`
        # switches the adapter, which `add_lora` puts inside `vlm`. (These functions stand below `train`.)
        self.vlm = load_vlm(args)
        self.peft_model = add_lora(self.vlm, args)
        self.banned_ids = placeholder_ids(self.vlm.config)  # never sampled
        stop_ids = end_ids(self.vlm, self.tokenizer)  # each ends a response
        self.stop_ids = torch.tensor(stop_ids, device=args.device)
        self.no_tokens = torch.zeros(0, dtype=torch.long, device=args.device)  # an empty response
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        self.special_tokens = re.compile("|".join(map(re.escape, special)) or "(?!)")  # which matches nothing
        text_config = self.vlm.config.get_text_config()
        self.logit_cap = getattr(text_config, "final_logit_softcapping", None)  # Gemma 4's

        # Deviation 3: the value head is fp32. Half precision is too coarse for small errors.
        sizes = [text_config.hidden_size, *args.value_hidden]
        layers = []
        for size, next_size in itertools.pairwise(sizes):
            layers += [nn.Linear(size, next_size), nn.ReLU()]
        self.value_head = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self.to(args.device)
        bf16 = args.dtype == "bfloat16"
        self.autocast = torch.autocast(args.device.partition(":")[0], torch.bfloat16, enabled=bf16)

        # Deviation 4: sampled from the whole vocabulary but the banned ids. The model's own settings are not
        # used: Qwen2-VL's have top_k 1, which explores nothing, and PPO's ratio would be of another policy.
        self.vlm.generation_config = GenerationConfig(
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            max_new_tokens=args.max_new_tokens,
            suppress_tokens=self.banned_ids,
            eos_token_id=stop_ids,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def lora_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.peft_model.named_parameters() if "lora_" in name]

    def encode(self, text, frames) -> dict:
        """A prompt as the model's inputs, on the CPU: ids and mask (1, P), the pixels of its frames."""
        # The text of a world may hold special tokens: they must not become the chat format.
        text = self.special_tokens.sub(" ", text)
        content = [{"type": "image"} for _ in frames] + [{"type": "text", "text": text}]
        options = {"tokenize": False, "add_generation_prompt": True}  # it ends where the response begins
        if "enable_thinking" in str(self.processor.chat_template):
            options["enable_thinking"] = False  # such a model would think first, and be cut before it answers
        chat = self.processor.apply_chat_template([{"role": "user", "content": content}], **options)
        images = [Image.fromarray(frame) for frame in frames]
        # No special tokens are added: Gemma's template has written the one at the beginning already.
        options = {"add_special_tokens": False, "return_tensors": "pt"}
        prompt = self.processor(text=[chat], images=[images], **options)
        # Prompts are kept for a whole update, so their pixels are in the model's type, to which it would cast
        # them anyway: bfloat16 takes half of the memory. Integers stay as they are.
        return dict(prompt.to(getattr(torch, self.args.dtype)))

    def inputs(self, prompts, responses=None) -> dict:
        """B encoded prompts, each followed by its response, for the model: ids and mask (B, P + R), pixels.

            [padding prompt | response padding]

        So all responses start in column P. The padding is masked, and changes rounding only. Without
        responses R is 0.
        """
        responses = responses or [self.no_tokens] * len(prompts)
        tokens = pad(responses)  # (B, R), padded with id 0, which is masked
        response_mask = pad([torch.ones_like(response) for response in responses])  # (B, R)
        of_responses = {"input_ids": tokens, "attention_mask": response_mask}
        images_dim = 1 if "pixel_attention_mask" in prompts[0] else 0  # SmolVLM's pixels: (1, images, ...)
        inputs = {}
        for key in prompts[0]:
            if key in PER_TOKEN:
                filler = self.tokenizer.pad_token_id if key == "input_ids" else 0
                of_prompts = pad([prompt[key][0] for prompt in prompts], filler, side="left")  # (B, P)
                of_response = of_responses.get(key, torch.zeros_like(tokens))  # token type 0 is text
                inputs[key] = torch.cat([of_prompts.to(tokens.device), of_response], dim=1)  # (B, P + R)
            else:  # all images (or their patches, or their sizes), one after another
                images = torch.cat([prompt[key] for prompt in prompts], dim=images_dim)
                inputs[key] = images.to(tokens.device)
        return inputs

    @torch.no_grad()
    def sample(self, prompts) -> list[torch.Tensor]:
        """The tokens (R_b,) of B responses, each up to its first stop id or to max_new_tokens."""
        self.eval()  # in train mode with gradient checkpointing, generate() returns garbage
        inputs = self.inputs(prompts)
        P = inputs["input_ids"].shape[1]
        with self.autocast:
            output = self.vlm.generate(**inputs)  # (B, P + R)
        tokens = output[:, P:]
        stops = torch.isin(tokens, self.stop_ids).long()  # (B, R)
        # Stops and their running count are equal up to the first one only: 0 1 0 1 has the counts 0 1 1 2.
        lengths = (stops.cumsum(1) == stops).sum(1)  # (B,)
        return [response[:length] for response, length in zip(tokens, lengths, strict=True)]

    def decode(self, responses) -> list[str]:
        """The texts of responses, each a tensor (R_b,), without their stop ids."""
        return [self.tokenizer.decode(tokens[~torch.isin(tokens, self.stop_ids)]) for tokens in responses]

    def forward(self, prompts, responses):
        """Log-probabilities of responses, and values of their prompts.

        prompts    B of them, from `encode`
        responses  B tensors (R_b,) of token ids; R is the length of the longest
        Returns logprobs (B, R) in nats and mask (B, R), both 0 where a response has ended, and values (B,).
        """
        inputs = self.inputs(prompts, responses)
        R = max(len(tokens) for tokens in responses)
        P = inputs["input_ids"].shape[1] - R
        tokens, mask = inputs["input_ids"][:, P:], inputs["attention_mask"][:, P:]  # (B, R)
        with self.autocast:
            hidden = self.vlm.model(**inputs, use_cache=False).last_hidden_state  # (B, P + R, H)
            lm_head = self.vlm.get_output_embeddings()
            # Column P - 1 + r predicts response token r = 0, 1, ...
            logits = lm_head(hidden[:, P - 1 : P - 1 + R])  # (B, R, vocabulary)
        # Deviation 5: the log-softmax is in fp32. In bfloat16, log(0.01) = -4.6 has steps of 0.03, beside a
        # clip range of 0.1. (The logits are rounded to bfloat16, but alike in scoring and in training.)
        logits = logits.float()
        if self.logit_cap:
            logits = self.logit_cap * (logits / self.logit_cap).tanh()
        logits = logits / self.args.temperature
        logits[..., self.banned_ids] = -torch.inf
        logprobs = logits.log_softmax(2).gather(2, tokens[..., None])[..., 0]  # (B, R)
        h = hidden[:, P - 1].float()  # (B, H), at the last prompt token
        if self.args.stop_grad:
            h = h.detach()  # Eq. 4
        values = self.value_head(h)[:, 0]  # in fp32, outside autocast
        return logprobs.masked_fill(mask == 0, 0), mask, values

    @torch.no_grad()
    def values(self, prompts) -> torch.Tensor:
        """Values (N,) of N prompts that have no response yet."""
        values = []
        for start in range(0, len(prompts), self.args.micro_batch_size):
            some = prompts[start : start + self.args.micro_batch_size]
            _, _, values_of_some = self(some, [self.no_tokens] * len(some))
            values.append(values_of_some)
        return torch.cat(values)


# -------------------------------------------------------------------------------------------- the rollout


def training_seed(*entropy) -> int:
    """A seed for training, in [2^30, 2^31); evaluation uses 0, 1, 2, ..."""
    return 2**30 + int(np.random.SeedSequence(entropy).generate_state(1)[0]) % 2**30


class Player:
    """One environment, and what its prompts need: the newest observations, and how many actions were taken.

    An environment is Gymnasium's. It shows {"image": (height, width, 3) uint8, "text": str}; its actions are
    strings; info["task"] says what to achieve, info["actions"] what is admissible now, info["left"] how many
    actions may still be taken, and info["success"] whether the task is achieved (None: unknown).
    """

    def __init__(self, args: Args, index=0):
        self.args, self.index = args, index
        self.episode = 0  # training episodes that have begun
        options = {"max_episode_steps": args.max_episode_steps, "invalid_reward": args.invalid_reward}
        options |= {"split": args.split, "action_repeat": args.action_repeat}
        self.env = envs.make_env(args.env, **options)

    def reset(self, seed):
        """Begin the episode of this seed: an episode is a function of its seed and its actions."""
        self.seed, self.actions, self.total = seed, [], 0.0
        with envs.traced(self.seed, self.actions):  # if the world raises, seed and actions are reported
            observation, self.info = self.env.reset(seed=seed)
        self.task = self.info["task"]  # in later infos there need be none
        self.observations = deque([observation], maxlen=self.args.num_images)

    def next_episode(self):
        self.reset(training_seed(self.args.seed, self.index, self.episode))
        self.episode += 1

    def prompt(self):
        """What VLMPolicy.encode takes: the text of a prompt, and the newest frames, oldest first."""
        newest = self.observations[-1]["text"]
        text = build_prompt(newest, self.info["actions"], self.task, len(self.actions), self.info["left"])
        return text, [observation["image"] for observation in self.observations]

    def step(self, action: str | None):
        """Play a parsed action, None if there was none. Returns reward, done, and whether it timed out."""
        # Deviation 6: a response that does not parse is played as "", which does nothing and costs its step.
        # The released code plays a random action, and reinforces the response for what that brought.
        self.actions.append(str(action or ""))  # it may be a string of numpy, which no checkpoint can hold
        with envs.traced(self.seed, self.actions):
            observation, reward, terminated, truncated, self.info = self.env.step(self.actions[-1])
        self.observations.append(observation)
        self.total += float(reward)
        return float(reward), bool(terminated or truncated), bool(truncated and not terminated)

    def result(self) -> dict:
        """What is kept of an episode that has ended."""
        success = self.info["success"]
        return {
            "seed": self.seed,
            "success": None if success is None else bool(success),
            "return": self.total,
            "length": len(self.actions),
            "invalid": self.actions.count(""),
        }


@dataclass(eq=False)  # steps are never compared by their tensors
class Step:
    """One environment step of one player: made by `collect`, completed by `score` and `add_advantages`."""

    prompt: dict  # encoded
    tokens: torch.Tensor  # (R_b,) the response, as sampled
    text: str  # the response
    action: str | None  # None if the response did not parse
    reward: float
    done: bool
    timed_out: bool  # done only because of the time limit
    # `score` adds:
    logprobs: torch.Tensor | None = None  # (R_b,) under the policy that sampled
    baselogprobs: torch.Tensor | None = None  # (R_b,) under the model without its adapter
    value: float | None = None  # V(s_t), of the policy that sampled
    # `add_advantages` adds:
    advantage: float | None = None  # normalised over the rollout
    return_: float | None = None  # G_t


def act(policy, players) -> list[Step]:
    """The next step of every player: its response is sampled, parsed and played."""
    # Deviation 7: all environments share each forward pass. It costs little more than that of one.
    prompts = [policy.encode(*player.prompt()) for player in players]
    responses = policy.sample(prompts)
    texts = policy.decode(responses)
    steps = []
    for i, player in enumerate(players):
        action = parse_action(texts[i], player.info["actions"])
        reward, done, timed_out = player.step(action)
        steps.append(Step(prompts[i], responses[i], texts[i], action, reward, done, timed_out))
    return steps


def collect(policy, players, args: Args):
    """T steps of N players, and a new episode wherever one ends.

    Returns the B = T * N steps, of which step t of player n is number t * N + n; the N prompts that follow;
    and the results of the episodes that have ended.
    """
    steps, episodes = [], []
    for _ in progress("collecting", range(args.num_steps)):
        for player, step in zip(players, act(policy, players), strict=True):
            steps.append(step)
            if step.done:
                episodes.append(player.result())
                player.next_episode()
    last_prompts = [policy.encode(*player.prompt()) for player in players]
    return steps, last_prompts, episodes


# ------------------------------------------------------------------------------ minibatches and their scores


def make_minibatches(steps, args: Args) -> list:
    """The steps of a rollout in random minibatches: each is a list of micro-batches, each a list of steps.

    A minibatch is for one optimizer step, a micro-batch for one forward pass, both to score and to train it.
    """

    def length(step):
        return step.prompt["input_ids"].shape[1] + len(step.tokens)

    # Deviation 8: drawn once, before scoring, and not anew for each epoch. Rounding depends on the batch
    # and its padding. As a step is scored and trained in the same batch, its ratios are exactly 1 before the
    # first optimizer step, in bfloat16 too.
    minibatches = []
    for indices in torch.randperm(len(steps)).split(args.minibatch_size):
        # Similar lengths save padding. In a minibatch the longest, which need the most memory, come first.
        minibatch = sorted([steps[i] for i in indices.tolist()], key=length, reverse=True)
        starts = range(0, len(minibatch), args.micro_batch_size)
        minibatches.append([minibatch[start : start + args.micro_batch_size] for start in starts])
    return minibatches


@torch.no_grad()
def score(policy, minibatches):
    """Complete the steps: values, and log-probabilities under the policy that sampled and under the base.

    generate() goes token by token, and rounds differently from the forward pass that is trained, so its
    log-probabilities are not used. The pass by the base is always made: the log shows that divergence even if
    the loss has none of it.
    """
    policy.eval()
    micro_batches = list(itertools.chain(*minibatches))
    for micro_batch in progress("scoring", micro_batches):
        prompts, responses = [step.prompt for step in micro_batch], [step.tokens for step in micro_batch]
        logprobs, _, values = policy(prompts, responses)
        for step, padded, value in zip(micro_batch, logprobs, values.tolist(), strict=True):
            step.logprobs = padded[: len(step.tokens)]
            step.value = value
    with policy.peft_model.disable_adapter():  # switching is slow, so once for all
        for micro_batch in progress("scoring by the base", micro_batches):
            prompts, responses = [step.prompt for step in micro_batch], [step.tokens for step in micro_batch]
            baselogprobs, _, _ = policy(prompts, responses)
            for step, padded in zip(micro_batch, baselogprobs, strict=True):
                step.baselogprobs = padded[: len(step.tokens)]


# ------------------------------------------------------------------------------------------ the advantages


def gae(rewards, values, last_values, dones, gamma, gae_lambda):
    """Generalised advantage estimation over environment steps (Schulman et al. 2016, Eq. 16).

    rewards, values  (T, N)  of step t: r_t and V(s_t)
    last_values      (N,)    V of the state after the rollout, ignored where its last step ended the episode
    dones            (T, N)  1 if the episode ended *with* step t (CleanRL stores it one step later)
    Returns advantages and returns = advantages + values, both (T, N). They are targets: pass detached values.
    For a step that timed out the caller gives r_t = V(s_t) and dones = 1 (Deviation 9).

    >>> rewards, values = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.5], [0.5]])
    >>> gae(rewards, values, torch.tensor([9.0]), torch.tensor([[0], [1]]), gamma=1.0, gae_lambda=0.5)
    (tensor([[0.2500],
            [0.5000]]), tensor([[0.7500],
            [1.0000]]))
    """
    advantages = torch.zeros_like(values)
    last_advantage = torch.zeros_like(last_values)
    for t in reversed(range(len(rewards))):
        done = dones[t].bool()
        next_values = values[t + 1] if t + 1 < len(rewards) else last_values
        delta = rewards[t] + gamma * next_values.masked_fill(done, 0) - values[t]
        last_advantage = delta + gamma * gae_lambda * last_advantage.masked_fill(done, 0)
        advantages[t] = last_advantage
    return advantages, advantages + values


def add_advantages(steps, last_values, args: Args) -> dict[str, float | None]:
    """Complete the steps: returns, and advantages normalised over the rollout.

    steps        B = T * N, of which step t of player n is number t * N + n
    last_values  (N,) of the states after them
    Returns statistics for the log.
    """
    N = len(last_values)
    rewards = torch.tensor([step.reward for step in steps]).view(-1, N)  # (T, N)
    values = torch.tensor([step.value for step in steps]).view(-1, N)
    dones = torch.tensor([step.done for step in steps]).view(-1, N)
    timed_out = torch.tensor([step.timed_out for step in steps]).view(-1, N)
    # Deviation 9: the reward of a step that timed out is not learned from, in any world: it says little about
    # the last actions. V(s_t) takes its place. As the step is done, its advantage is V(s_t) - V(s_t) = 0, and
    # the step before it bootstraps from V(s_t). (Normalised, it is -mean / std, and trained like any other.
    # Usual would be to keep the reward and to add gamma V(s_t+1).)
    rewards = torch.where(timed_out, values, rewards)
    last_values = last_values.cpu()
    advantages, returns = gae(rewards, values, last_values, dones, args.gamma, args.gae_lambda)  # (T, N)

    std = advantages.std().item()
    normalised = (advantages - advantages.mean()) / (std + 1e-8)  # (T, N)
    for step, advantage, return_ in zip(steps, normalised.flatten(), returns.flatten(), strict=True):
        step.advantage = advantage.item()
        step.return_ = return_.item()
    variance = returns[~timed_out].var().item()  # without time-outs, whose return is V itself
    unexplained = (returns - values)[~timed_out].var().item()
    explained = 1 - unexplained / variance if variance > 0 else None
    # The share of players who met an end. Where only an end pays, a rollout without one teaches nothing.
    outcomes = (dones & ~timed_out).any(0).float().mean().item()
    return {"outcomes": outcomes, "explained_variance": explained, "advantage_std": std}


# ---------------------------------------------------------------------------------------------- the losses


def step_mean(x, mask):
    """Mean over the tokens of each step, then over steps: (B, R), (B, R) -> scalar.

    So a long response weighs no more than a short one. What x is under the mask does not matter, but its
    gradient there does: 0 times infinity is NaN. So `policy_loss` masks before `exp`, too.

    >>> step_mean(torch.tensor([[1.0, 3.0], [4.0, math.nan]]), torch.tensor([[1, 1], [1, 0]]))
    tensor(3.)
    """
    lengths = mask.sum(1)  # (B,)
    if x.shape != mask.shape or not lengths.all():
        raise ValueError(f"need (B, R) with a token in every step: {tuple(x.shape)}, {tuple(mask.shape)}")
    return (x.masked_fill(mask == 0, 0).sum(1) / lengths).mean()


def policy_loss(newlogprobs, logprobs, advantages, mask, clip_coef):
    """PPO's clipped surrogate per token (Eq. 3), to minimise.

    newlogprobs, logprobs  (B, R) nats, under the current policy and, without gradient, the sampling one
    advantages             (B,)   one per environment step, shared by all its tokens, normalised already
    mask                   (B, R) 1 on response tokens, the end-of-turn token included
    Mean over the tokens of a step, then over steps. ValueError if a step has no token.

    >>> lp, one = torch.zeros(1, 2), torch.ones(1, 2)
    >>> policy_loss(lp + math.log(1.5), lp, torch.tensor([2.0]), one, clip_coef=0.2)  # clipped at 1.2
    tensor(-2.4000)
    """
    # Deviation 10: every token is in the mean, from the first to the end of the turn: none is left out for
    # its id or for a large ratio.
    ratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0).exp()
    advantages = advantages[:, None]  # (B, 1): a bare (B,) would broadcast over the tokens when B = R
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef))
    return step_mean(pg_loss, mask)


def value_loss(values, returns):
    """Half the mean squared error per environment step (below Eq. 4), to minimise: (B,), (B,) -> scalar.

    ValueError if the shapes differ, as (B, 1) and (B,) would broadcast.

    >>> value_loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    if values.shape != returns.shape:
        raise ValueError(f"need one shape, (B,): {tuple(values.shape)}, {tuple(returns.shape)}")
    # Deviation 11: no value clipping. The 1/2 is the paper's.
    return 0.5 * (values - returns).pow(2).mean()


def kl_base(newlogprobs, baselogprobs, mask):
    """Divergence from the base model, in nats per token: exp(d) - d - 1, d = log base - log new.

    newlogprobs, baselogprobs, mask  (B, R)
    The base is the model without its adapter, also in a run that started from a trained adapter. On tokens
    sampled from `new` this number estimates D_KL(new || base). But as sampling is not differentiated, its
    gradient estimates that of D_KL(base || new), which pulls up what the base would say. After the first
    optimizer step both are biased, as the tokens are the old policy's and are not reweighted.
    Source: Schulman's estimator k3.

    >>> kl_base(torch.zeros(1, 1), torch.full((1, 1), math.log(2.0)), torch.ones(1, 1))  # 2 - log 2 - 1
    tensor(0.3069)
    """
    # Deviation 12: this is the default, and not the paper's Eq. 5. The gradient of Eq. 5 is zero in the first
    # minibatch, and it ties the policy only to the one that played this rollout.
    d = (baselogprobs - newlogprobs).masked_fill(mask == 0, 0)
    return step_mean(d.exp() - d - 1, mask)


def kl_old(newlogprobs, logprobs, mask):
    """D_KL(new || old) in nats per token, from tokens that the old policy sampled (Eq. 5).

    newlogprobs, logprobs, mask  (B, R) as in policy_loss
    With q = new / old it is q log q - (q - 1), which is never negative. In expectation over a token of the
    old policy, its value and its gradient are those of the divergence, as E_old[q f] = E_new[f] for any f.

    >>> kl_old(torch.full((1, 1), math.log(2.0)), torch.zeros(1, 1), torch.ones(1, 1))  # 2 log 2 - 1
    tensor(0.3863)
    """
    logratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0)
    q = logratio.exp()
    return step_mean(q * logratio - (q - 1), mask)


@torch.no_grad()
def diagnostics(newlogprobs, logprobs, baselogprobs, mask, clip_coef) -> dict[str, float]:
    """What the log tells of a micro-batch besides its losses.

    newlogprobs, logprobs, baselogprobs, mask  (B, R), as in `losses`
    kl_base and entropy are of `old`, the policy that sampled. kl_loss, the KL in the loss, is of the current
    one.
    """
    logratio = newlogprobs - logprobs
    ratio = logratio.exp()
    distance = (ratio - 1).abs()
    return {
        "ratio_distance": distance.max().item(),
        "approx_kl": step_mean((ratio - 1) - logratio, mask).item(),  # KL(old || current), as in CleanRL
        "clipfrac": step_mean((distance > clip_coef).float(), mask).item(),
        "kl_base": kl_base(logprobs, baselogprobs, mask).item(),  # KL(old || base)
        "entropy": -step_mean(logprobs, mask).item(),
    }


def losses(policy, micro_batch, args: Args):
    """The loss of a micro-batch, B complete steps, to minimise (Eq. 6); and floats for the log.

    Another algorithm replaces this function. Its log needs what `diagnostics` returns, too.
    """
    prompts, responses = [step.prompt for step in micro_batch], [step.tokens for step in micro_batch]
    newlogprobs, mask, newvalues = policy(prompts, responses)  # (B, R), (B, R), (B,)
    logprobs = pad([step.logprobs for step in micro_batch])  # (B, R)
    baselogprobs = pad([step.baselogprobs for step in micro_batch])  # (B, R)
    advantages = torch.tensor([step.advantage for step in micro_batch], device=args.device)  # (B,)
    returns = torch.tensor([step.return_ for step in micro_batch], device=args.device)  # (B,)

    pg_loss = policy_loss(newlogprobs, logprobs, advantages, mask, args.clip_coef)  # Eq. 3
    v_loss = value_loss(newvalues, returns)  # below Eq. 4
    if args.kl_ref == "base":
        kl = kl_base(newlogprobs, baselogprobs, mask)
    else:
        kl = kl_old(newlogprobs, logprobs, mask)  # Eq. 5
    loss = pg_loss + args.kl_coef * kl + args.vf_coef * v_loss  # Eq. 6

    log = {"policy_loss": pg_loss.item(), "kl_loss": kl.item(), "value_loss": v_loss.item()}
    return loss, log | diagnostics(newlogprobs, logprobs, baselogprobs, mask, args.clip_coef)


# ---------------------------------------------------------------------------------------------- the update


def optimizer_step(policy, optimizer, args: Args) -> list[float]:
    """Clip the gradients, and step. Returns their norms before the clipping: of LoRA, of the value head."""
    # Deviation 13: clipped separately, or a large value gradient would shrink the policy's step.
    # Deviation 14: NaN or infinity ends the run before it touches a weight.
    norms = []
    for parameters in [policy.lora_parameters(), list(policy.value_head.parameters())]:
        norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm, error_if_nonfinite=True)
        norms.append(norm.item())
    optimizer.step()
    return norms


def update(policy, optimizer, minibatches, args: Args, warmup=False) -> dict[str, float]:
    """`update_epochs` passes over a rollout. Returns means of what `losses` logs, and norms of the gradients.

    warmup  only the value head learns. LoRA is frozen: Adam skips what has no gradient, and no activations
            are kept for it
    """
    policy.train()  # only for gradient checkpointing: there is no dropout (Deviation 17)
    for parameter in policy.lora_parameters():
        parameter.requires_grad_(not warmup)
    logs, sizes, norms = [], [], []
    for epoch in range(args.update_epochs):
        # Later epochs take the same ones in a new order.
        ordered = minibatches if epoch == 0 else random.sample(minibatches, len(minibatches))
        for minibatch in progress(f"training, epoch {epoch + 1}", ordered):
            optimizer.zero_grad()
            size = sum(len(micro_batch) for micro_batch in minibatch)
            for micro_batch in minibatch:
                loss, log = losses(policy, micro_batch, args)
                (loss * len(micro_batch) / size).backward()  # these add up to the minibatch's mean
                logs.append(log)
                sizes.append(len(micro_batch))
            norms.append(optimizer_step(policy, optimizer, args))
    for parameter in policy.lora_parameters():
        # Autocast keeps the bfloat16 copy of a weight only if it requires a gradient. Else the next rollout
        # would make a copy for every token.
        parameter.requires_grad_(True)

    # In the first minibatch the policy is still the one that sampled: |ratio - 1| should be 0.
    distances = [log.pop("ratio_distance") for log in logs]
    means = {"ratio_first": max(distances[: len(minibatches[0])])}
    for name in logs[0]:
        means[name] = np.average([log[name] for log in logs], weights=sizes).item()
    means["grad_norm_lora"], means["grad_norm_value"] = np.mean(norms, axis=0).tolist()
    return means


# ------------------------------------------------------------------------------------------- the training


def cosine(index, num_updates, start, end) -> float:
    """The learning rate of update `index`, 0 to num_updates - 1: from start down to end, once.

    The updates of the warm-up count.

    >>> [round(cosine(index, 3, 1.0, 0.0), 3) for index in range(3)]
    [1.0, 0.5, 0.0]
    """
    # Deviation 15: one cosine over the planned updates. The released code's rises again.
    fraction = index / max(1, num_updates - 1)
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2


def make_optimizer(policy, args: Args):
    """Adam over LoRA and the value head (fused: one kernel for all), with the released code's eps."""
    parameters = [*policy.lora_parameters(), *policy.value_head.parameters()]
    return torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-7, fused=True)


def make_players(args: Args) -> list[Player]:
    """The players of the rollouts."""
    return [Player(args, n) for n in range(args.num_envs)]


def train(args: Args, folder: Path):
    """A whole training. Writes log.jsonl, adapter/ and checkpoint.pt into the run's folder."""
    # The worlds come first: if one cannot be made, no model is loaded.
    players = make_players(args)
    eval_players = evaluation_players(dataclasses.replace(args, split="eval"), args.eval_episodes)
    set_seed(args.seed)
    policy = VLMPolicy(args)
    optimizer = make_optimizer(policy, args)
    rollout_steps = args.num_envs * args.num_steps
    num_updates = args.total_timesteps // rollout_steps
    if (folder / "checkpoint.pt").exists():
        state = load_checkpoint(folder, policy, optimizer, players)
    else:
        for player in players:
            player.next_episode()
        show_a_response(policy, players[0])
        row = {"update": 0, "global_step": 0} | evaluate_for_log(policy, eval_players)
        write_row(folder, row, args)
        state = {"update": 0, "recent": []}
        save_checkpoint(folder, policy, optimizer, players, **state)
    recent = state["recent"]  # the last 100 episodes

    updates = range(state["update"] + 1, num_updates + 1)
    for u in tqdm(updates, initial=state["update"], total=num_updates, disable=None):  # None: not in a file
        set_seed(training_seed(args.seed, u))  # a resumed run goes on as if it had never stopped
        learning_rate = cosine(u - 1, num_updates, args.learning_rate, args.final_learning_rate)
        optimizer.param_groups[0]["lr"] = learning_rate

        start = time.perf_counter()
        steps, last_prompts, episodes = collect(policy, players, args)
        collected = time.perf_counter()
        # `minibatches` holds the same Step objects as `steps`, in random order. The next two calls complete
        # them: `score` goes through the batches that will be trained, `add_advantages` through time.
        minibatches = make_minibatches(steps, args)
        score(policy, minibatches)
        stats = add_advantages(steps, policy.values(last_prompts), args)
        scored = time.perf_counter()
        stats |= update(policy, optimizer, minibatches, args, warmup=u <= args.value_warmup)
        updated = time.perf_counter()

        row = {"update": u, "global_step": u * rollout_steps, "episodes": episodes}
        recent = (recent + episodes)[-100:]
        # Short episodes end first and are mostly successes: no mean until every player has ended one.
        all_have_ended = all(player.episode > 1 for player in players)
        times = {"collect": collected - start, "score": scored - collected, "update": updated - scored}
        row |= log_row(policy, steps, stats, times, recent if all_have_ended else [])
        row["charts/learning_rate"] = learning_rate
        del steps, minibatches, last_prompts  # their pixels are large; the next ones need the memory
        last = u == num_updates
        evaluation_due = args.eval_every and u % args.eval_every == 0
        if last or evaluation_due:
            row |= evaluate_for_log(policy, eval_players)
            save_adapter(policy, folder / ("adapter" if last else f"adapter-{row['global_step']}"))
        write_row(folder, row, args)
        # Last: a run that is killed earlier repeats this update.
        save_checkpoint(folder, policy, optimizer, players, update=u, recent=recent)


# == VL-DAC ends here, but for Deviations 16 and 17. Then come models, and what any training program has. ====

# ------------------------------------------------- loading a model, and what differs between their families


@contextlib.contextmanager
def reading(what):
    """Around what needs the user's files: what is wrong with them is a UserError, in one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, TemplateError) as error:
        reason = " ".join(str(error).split())  # some have several lines
        raise UserError(f"{what}: {reason[:500]}") from None


def load_processor(path, max_image_tokens):
    """A model's processor: chat template, tokenizer, images (as large as max_image_tokens allows).

    UserError if there is no such model, if a part of it is missing, or if it shows frames in another way.
    """
    with reading(f"--model {path}"):
        config = AutoConfig.from_pretrained(path)
        check(type(config) in PROCESSOR_MAPPING, f"--model {path}: it takes no images")
        cls = PROCESSOR_MAPPING[type(config)]
        # One backend by name: else pixels depend on whether torchvision is installed.
        images = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        settings, _ = cls.get_processor_dict(path)
    if hasattr(images, "merge_size"):  # Qwen, GLM: a token is merge_size^2 patches; "edges" count pixels
        largest = max_image_tokens * (images.patch_size * images.merge_size) ** 2
        if "temporal_factor" in inspect.signature(images.resize).parameters:  # GLM counts a frame twice
            largest *= images.temporal_patch_size
        images.size = {"shortest_edge": min(images.size["shortest_edge"], largest), "longest_edge": largest}
    if hasattr(images, "max_soft_tokens"):  # Gemma 4 knows five sizes
        fitting = [size for size in (70, 140, 280, 560, 1120) if size <= max_image_tokens]
        images.max_soft_tokens = max(fitting, default=70)
    # AutoProcessor would load video processors too, which need torchvision. Here they are None, which
    # transformers would refuse.
    cls.check_argument_for_proper_class = lambda *_: None
    parts = {"image_processor": images, "tokenizer": tokenizer}
    all_parts = [parts.get(name) for name in cls.get_attributes()]
    processor = cls.from_args_and_dict(all_parts, settings)
    # One tile per frame:
    if hasattr(images, "crop_to_patches"):  # InternVL
        processor.images_kwargs = {"crop_to_patches": False}
    if hasattr(images, "do_image_splitting"):  # SmolVLM
        images.do_image_splitting = False
        images.size = dict(images.max_image_size)
        processor.video_processor = types.SimpleNamespace(num_frames=None, fps=None)  # its template asks
    check(processor.chat_template, f"--model {path}: it has no chat template")
    with reading(f"--model {path}, its chat template"):
        check_frames(path, processor, placeholder_ids(config))
    return processor


def placeholder_ids(config) -> list[int]:
    """The ids that stand for images, video and audio. A sampled one would ask for what is not there."""
    names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
    return sorted({getattr(config, name, None) for name in names} - {None})


def check_frames(path, processor, placeholders):
    """UserError unless each frame becomes one row of placeholders, as long beside another one as alone."""
    blank = Image.new("RGB", (640, 480))
    lengths = []
    for count in (1, 2):
        chat = [{"role": "user", "content": [{"type": "image"}] * count}]
        text = processor.apply_chat_template(chat, tokenize=False)
        prompt = processor(text=[text], images=[[blank] * count], return_tensors="pt")
        ids, repeats = torch.unique_consecutive(prompt["input_ids"], return_counts=True)
        lengths += repeats[torch.isin(ids, torch.tensor(placeholders))].tolist()
    alike = len(lengths) == 3 and len(set(lengths)) == 1
    message = f"one frame and two frames are {lengths} placeholders in a row, and not three equal ones"
    check(alike, f"--model {path} is not supported: {message}")


def load_vlm(args: Args):
    """The pretrained model. UserError if it lacks weights, which would be random, or scales its logits."""
    # On H100 and H200, torch prefers cuDNN's attention, whose gradient is NaN for masked batches of some
    # lengths (github.com/pytorch/pytorch/issues/196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    options = {"dtype": getattr(torch, args.dtype), "output_loading_info": True}
    with reading(f"--model {args.model}"):
        vlm, loaded = AutoModelForImageTextToText.from_pretrained(args.model, **options)
    missing = min(loaded["missing_keys"], default=None)
    check(missing is None, f"--model {args.model} is not complete: it has no {missing}")
    # A factor on the logits, which VLMPolicy.forward does not have:
    for name in ("logits_scaling", "logit_scale", "output_multiplier"):
        factor = getattr(vlm.config.get_text_config(), name, None)
        check(factor in (None, 1), f"--model {args.model} is not supported: its {name} is {factor}")
    # PyTorch 2.13's cuDNN raises at the first convolution where another cuDNN is installed
    # (github.com/pytorch/pytorch/issues/188892), and on some GPUs it cannot compute Qwen3-VL's.
    torch.backends.cudnn.enabled = False
    patches_as_products(vlm)
    return vlm


def patches_as_products(vlm):
    """Compute the convolutions of Qwen's and GLM's patches as the matrix products that they are.

    Faster everywhere, and without cuDNN much: PyTorch would go from patch to patch.
    """

    def forward(conv, x):  # (images or patches, channels, ...)
        if x.shape[2:] != conv.kernel_size:
            return type(conv).forward(conv, x)  # of a whole image
        return nn.functional.linear(x.flatten(1), conv.weight.flatten(1), conv.bias)

    for module in vlm.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):  # the callers flatten what those of patches return
            module.forward = functools.partial(forward, module)


def add_lora(vlm, args: Args) -> PeftModel:
    """The frozen VLM with adapters (in fp32, PEFT's default): new ones, or those of --adapter.

    UserError unless --adapter fits exactly.
    """
    if args.adapter:
        lora = LoraConfig.from_pretrained(args.adapter)
        lora.inference_mode = False  # it is trained on
        lora.base_model_name_or_path = None  # PEFT would warn where the base has another folder now
    else:
        # Deviation 16: LoRA on all linear layers of the language model, but a mixture of experts' routers
        # (its experts are no linear layers). Usual lists of names also match parts of some vision towers.
        decoder = vlm.get_decoder()
        [decoder_name] = [name for name, module in vlm.named_modules() if module is decoder]
        names = set()
        for name, module in decoder.named_modules():
            router = name.endswith(("router.proj", "shared_expert_gate"))
            if isinstance(module, nn.Linear) and not router:
                names.add(name.rpartition(".")[2])
        # As a pattern: PEFT would save a long list by its last names, which fit the vision tower too.
        pattern = rf"{re.escape(decoder_name)}\.(.*\.)?({'|'.join(sorted(names))})"
        lora = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=pattern)
    problem = f"the adapter does not fit --model {args.model}"
    with reading(problem):
        model = get_peft_model(vlm, lora)
    if args.adapter:
        with reading(problem):
            loaded = model.load_adapter(args.adapter, "default", is_trainable=True, torch_device="cpu")
        check(not loaded.missing_keys, f"{problem}: it has no {loaded.missing_keys[:1]}")
        check(not loaded.unexpected_keys, f"{problem}: it also has {loaded.unexpected_keys[:1]}")
    for module in vlm.modules():
        # Deviation 17: no dropout, or the ratio would not be 1 before anything is learned.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, x in list(vars(module).items()):
            if "dropout" in name and isinstance(x, float):  # attention has its rate as a number
                setattr(module, name, 0.0)
    if args.gradient_checkpointing:
        vlm.activation_checkpointing_enable()
        # Else inputs would require gradients, and the frozen vision tower would be backpropagated.
        vlm.disable_input_require_grads()
    return model


def end_ids(vlm, tokenizer) -> list[int]:
    """The ids that end a response: those of the checkpoint (Gemma 3's is only there), and the tokenizer's."""
    ids = vlm.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({*ids, tokenizer.eos_token_id} - {None})


# -------------------------------------------------------------------------------------------- messages


def print_line(text):
    """Print a line above the progress bar."""
    tqdm.write(text)
    sys.stdout.flush()


BAR_INTERVAL = 0.1 if sys.stderr.isatty() else 10  # seconds between two states of a progress bar


def progress(what, items=None, unit="it") -> tqdm:
    """The items, with a bar that says what is done, and how far it is. Short loops show none."""
    intervals = {"mininterval": BAR_INTERVAL, "delay": BAR_INTERVAL, "miniters": 1}
    return tqdm(items, what, unit=unit, leave=False, **intervals)


# -------------------------------------------------------------------------------------------- evaluation


def evaluation_players(args: Args, episodes) -> list[Player]:
    """The players of an evaluation, at most one for each episode."""
    at_once = args.num_envs
    if args.env in [*envs.RED_BOX, *envs.CARDS]:  # light worlds: a larger batch takes little longer
        at_once = min(4 * at_once, 64)  # others, like simulators and browsers, may need much memory
    return [Player(args) for _ in range(min(episodes, at_once))]


def evaluate(policy, players, seeds, play=None) -> list[dict]:
    """An episode on each seed, played by `act` or another `play`. Returns a dict for each, sorted by seed."""
    set_seed(players[0].args.seed)
    waiting = list(seeds)
    total = len(waiting)
    bar = progress("evaluating", unit=" steps")
    playing = players[:total]
    for player in playing:
        player.reset(waiting.pop(0))
    episodes = []
    while playing:
        steps = (play or act)(policy, playing)  # act is looked up now: another program may have replaced it
        for player, step in zip(list(playing), steps, strict=True):
            if step.done:
                episodes.append(player.result())
                if waiting:
                    player.reset(waiting.pop(0))
                else:
                    playing.remove(player)
        bar.set_postfix_str(f"{len(episodes)} of {total} episodes have ended", refresh=False)
        bar.update(len(steps))
    bar.close()
    return sorted(episodes, key=lambda episode: episode["seed"])


def summary(episodes) -> dict[str, float | None]:
    """Means over episodes.

    The success rate is None if no episode has a flag. Otherwise an episode without one counts as a failure.

    >>> lost = {"success": None, "return": -1.0, "length": 3, "invalid": 1}
    >>> summary([lost, lost | {"success": True, "return": 2.0, "length": 1}])["success_rate"]
    0.5
    """
    n, length = len(episodes), sum(episode["length"] for episode in episodes)
    flags = [episode["success"] for episode in episodes]
    return {
        "success_rate": None if flags.count(None) == n else flags.count(True) / n,
        "episodic_return": sum(episode["return"] for episode in episodes) / n,
        "episodic_length": length / n,
        "invalid_action_rate": sum(episode["invalid"] for episode in episodes) / length,
    }


def evaluate_for_log(policy, players) -> dict[str, float | None]:
    """An evaluation, as part of a row of the log; empty if none is asked for."""
    if not players:
        return {}
    episodes = evaluate(policy, players, range(policy.args.eval_episodes))
    return {f"eval/{name}": x for name, x in summary(episodes).items()}


# ---------------------------------------------------------------------------- the log and the checkpoint


def log_row(policy, steps, stats, times, episodes) -> dict:
    """The log's row of an update: its stats and times, means over its steps and over `episodes`, if any."""
    of_episodes = summary(episodes) if episodes else {}
    cut = [step.tokens[-1] not in policy.stop_ids for step in steps]  # by max_new_tokens
    row = {
        "charts/success_rate": of_episodes.get("success_rate"),
        "charts/episodic_return": of_episodes.get("episodic_return"),
        "charts/episodic_length": of_episodes.get("episodic_length"),
        "charts/invalid_action_rate": np.mean([step.action is None for step in steps]).item(),
        "charts/cut_share": np.mean(cut).item(),
        "charts/response_length": np.mean([len(step.tokens) for step in steps]).item(),
        "charts/env_steps_per_second": len(steps) / sum(times.values()),
    }
    row |= {f"losses/{name}": x for name, x in stats.items()}
    row |= {f"time/{name}": seconds for name, seconds in times.items()}
    if policy.args.device.startswith("cuda"):
        row["gpu/max_memory_gb"] = torch.cuda.max_memory_allocated(policy.args.device) / 1e9
        torch.cuda.reset_peak_memory_stats(policy.args.device)

    row["samples"] = []
    for step in sorted(steps, key=lambda step: step.action is not None)[:2]:  # what did not parse comes first
        prompt = policy.tokenizer.decode(step.prompt["input_ids"][0], skip_special_tokens=True)
        sample = {"prompt": prompt, "response": step.text, "action": step.action, "reward": step.reward}
        row["samples"].append(sample)
    return row


PRINTED = {  # on the screen, of a row
    "charts/success_rate": "success",
    "charts/episodic_return": "return",
    "charts/invalid_action_rate": "invalid",
    "losses/outcomes": "outcomes",
    "losses/kl_base": "kl_base",
    "losses/explained_variance": "expl_var",
    "eval/success_rate": "eval_success",
    "eval/episodic_return": "eval_return",
}


def to_disk(file):
    """Wait until what was written is on the disk: the power may fail."""
    file.flush()
    os.fsync(file.fileno())


def write_row(folder: Path, row: dict, args: Args):
    """Write a row of the log: to log.jsonl, as a line on the screen, and to Weights & Biases if asked."""
    for key, x in row.items():
        if isinstance(x, float) and not math.isfinite(x):
            row[key] = None  # JSON has no infinity
    numbers = ""
    for key, name in PRINTED.items():
        if key in row:
            numbers += f"  {name} " + ("-" if row[key] is None else f"{row[key]:.3f}")
    if numbers:
        print_line(f"{row['global_step']:>7} steps{numbers}")
    with open(folder / "log.jsonl", "a" if row["update"] > 0 else "w") as file:
        print(json.dumps(row), file=file)
        to_disk(file)
    if args.track:
        import wandb

        if wandb.run is None:
            path = folder / "wandb_id"  # by which a resumed run goes on in its own curves
            run_id = path.read_text() if path.exists() else None
            run = wandb.init(project="vldac", name=folder.name, config=vars(args), id=run_id, resume="allow")
            path.write_text(run.id)
        scalars = {key: x for key, x in row.items() if key not in ("samples", "episodes")}
        wandb.log(scalars, step=row["global_step"])


def save_adapter(policy, folder: Path):
    """The adapter in PEFT's format, written under another name and then renamed."""
    building = folder.with_name(folder.name + ".tmp")
    # PEFT's default would ask the hub whether the vocabulary has changed.
    policy.peft_model.save_pretrained(building, save_embedding_layers=False)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)


def trainable_weights(policy) -> dict[str, torch.Tensor]:
    """LoRA and the value head, by name."""
    return {name: p for name, p in policy.named_parameters() if "lora_" in name or "value_head" in name}


def save_checkpoint(folder: Path, policy, optimizer, players, **state):
    """checkpoint.pt: all that a run needs to go on, replaced in one piece."""
    names = ("seed", "actions", "episode")
    state["players"] = [{name: getattr(player, name) for name in names} for player in players]
    state["weights"] = trainable_weights(policy)
    state["optimizer"] = optimizer.state_dict()
    state["log_bytes"] = (folder / "log.jsonl").stat().st_size
    with open(folder / "checkpoint.tmp", "wb") as file:
        torch.save(state, file)
        to_disk(file)
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")


def load_weights(folder: Path, policy) -> dict:
    """Put a checkpoint's weights into the policy. Returns the checkpoint; UserError if they do not fit."""
    path = folder / "checkpoint.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)
    saved = {name: weight.shape for name, weight in state["weights"].items()}
    fits = saved == {name: weight.shape for name, weight in trainable_weights(policy).items()}
    check(fits, f"{path} is of another model: the names or shapes of its weights differ")
    policy.load_state_dict(state["weights"], strict=False)  # they are not all: the rest is the base model
    return state


def load_checkpoint(folder: Path, policy, optimizer, players) -> dict:
    """Bring a run, and its log, to where it was when it was saved. Returns the checkpoint."""
    state = load_weights(folder, policy)
    optimizer.load_state_dict(state["optimizer"])
    log = folder / "log.jsonl"
    complete = log.stat().st_size >= state["log_bytes"]
    check(complete, f"{log} is shorter than it was at the checkpoint: rows are lost")
    os.truncate(log, state["log_bytes"])  # later rows, perhaps half a one, are written again
    for player in players:
        saved = state["players"][player.index]
        player.reset(saved["seed"])
        for action in saved["actions"]:  # play the episode again
            player.step(action)
        player.episode = saved["episode"]
    return state


def show_a_response(policy, player):
    """Print a prompt, the response and its action: does the model answer in the format?"""
    print_line(f"LoRA is on {len(policy.lora_parameters()) // 2} linear layers of the language model")
    text, frames = player.prompt()
    [response] = policy.decode(policy.sample([policy.encode(text, frames)]))
    action = parse_action(response, player.info["actions"])
    print_line(f"the first prompt, after its frames:\n{text}")
    print_line(f"a response: {response}")
    print_line(f"its action: {action}" if action else "it names no admissible action")


# -------------------------------------------------------------------------------------------- the options

# Other defaults, of the toy and of some worlds. What is typed wins over these, and a world's over the toy's;
# but the toy checkpoints no gradients.
CARD_GAME = {"num_images": 1, "gamma": 1.0, "gae_lambda": 1.0}
LONG_PROMPT = {"num_images": 1, "gradient_checkpointing": True}
PRESETS = {
    "tiny": {
        "total_timesteps": 20_480,
        "num_images": 1,
        "max_image_tokens": 16,
        "max_new_tokens": 40,
        "micro_batch_size": 64,
        "learning_rate": 1.5e-3,
        "final_learning_rate": 3e-5,
        "clip_coef": 0.2,
        "kl_coef": 0.03,
        "value_hidden": [256, 256],
    },
    **dict.fromkeys(["NumberLine", "EZPoints", "Points24", "Blackjack"], CARD_GAME),
    **dict.fromkeys(["ALFWorld", "ALFWorldThor", "WebShop"], LONG_PROMPT),
}
# And others of the toy in MiniWorld. A rollout without a success has nothing to learn from but noise. As the
# toy acts at random at first, an action is several steps there.
TOY_ROOMS = {
    **dict.fromkeys(["OneRoom", "Hallway"], {"action_repeat": 3, "total_timesteps": 30_720}),
    **dict.fromkeys(["FourRooms", "WallGap"], {"action_repeat": 3, "total_timesteps": 51_200}),
}
# Options that may differ when a run is resumed: they change how it is computed, not what.
MAY_CHANGE = {"device", "micro_batch_size", "gradient_checkpointing", "track", "resume"}
MAY_BE_ZERO = {"seed", "value_warmup", "eval_episodes", "eval_every"}  # other whole numbers may not


def read_args(folder, program=None) -> dict:
    """What a run's args.json says. UserError if it is not the folder of a run, or not of this program's."""
    with reading(f"{folder} is not the folder of a run"):
        saved = json.loads(Path(folder, "args.json").read_text())
    saved_by = saved.pop("program", program)
    check(program in (None, saved_by), f"{folder} is a run of {saved_by}.py")
    return saved


def use_copies(args: Args, folder):
    """A run has its toy and the adapter that it starts from in its own folder, so that it can be moved."""
    if args.model == "tiny":
        args.model = str(Path(folder, "base"))
    if args.adapter:
        args.adapter = str(Path(folder, "adapter-0"))
    return args


def load_args(folder, args_class=Args) -> Args:
    """The options of a run; names that `args_class` does not have are ignored."""
    names = {option.name for option in dataclasses.fields(args_class)}
    saved = {name: x for name, x in read_args(folder).items() if name in names}
    return use_copies(args_class(**saved), folder)


def parse(argv, args_class, defaults, shown=None) -> Args:
    """The options that are typed, else those of `defaults`, else those of the class.

    shown  the options that --help tells of; None: all
    """
    note = "A run, the toy and some worlds have other defaults. More on the options: docs/guide.md."
    parser = HfArgumentParser(args_class, usage="%(prog)s [options]", epilog=note, allow_abbrev=False)
    parser.set_defaults(**defaults)
    argv = sys.argv[1:] if argv is None else argv
    comments = {}
    if {"-h", "--help"} & set(argv):  # not before it is asked for: a notebook's class has no source
        for cls in reversed(args_class.__mro__[:-1]):  # the last one is object
            comments |= dict(re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(cls), re.M))
    for action in parser._actions[1:]:  # the first is --help
        hidden = shown is not None and action.dest not in shown
        action.help = argparse.SUPPRESS if hidden else comments.get(action.dest, "").replace("%", "%%")
        if action.default is None:
            action.default = argparse.SUPPRESS  # the comment tells it
    return args_class(**vars(parser.parse_args(argv)))


def parse_args(argv=None, args_class=Args, program=None) -> Args:
    """The options: typed > those of the run that is resumed, or else of the world > of the toy > Args."""
    args = parse(argv, args_class, {})  # a mistyped option ends here; world and model choose the presets
    fixed = {}  # what may be typed, but not changed
    if args.resume:
        defaults = read_args(args.resume, program)
        fixed = {name: x for name, x in defaults.items() if name not in MAY_CHANGE}
    else:
        defaults = PRESETS.get(args.env, {})
        if args.model == "tiny":
            defaults = PRESETS["tiny"] | defaults | TOY_ROOMS.get(args.env, {})
            defaults["gradient_checkpointing"] = False
        if args.adapter:  # it brings its rank
            with reading(f"--adapter {args.adapter}"):
                config = json.loads(Path(args.adapter, "adapter_config.json").read_text())
            check("r" in config, f"--adapter {args.adapter} is none of LoRA")
            fixed = {"lora_rank": config["r"], "lora_alpha": config["lora_alpha"]}
    args = parse(argv, args_class, defaults | fixed)
    if args.resume and args.model != defaults["model"]:
        args.model = os.path.abspath(args.model)  # a folder, whose name was typed again
    for name, x in fixed.items():
        unchanged = getattr(args, name) == x
        check(unchanged, f"{args.resume or args.adapter} has --{name} {x}, which cannot change")
    return use_copies(args, args.resume) if args.resume else args


def check_args(args: Args):
    """UserError for what would else be a traceback, an endless wait or silent nonsense."""
    for name, x in vars(args).items():
        least = 0 if name in MAY_BE_ZERO else 1
        check(type(x) is not int or x >= least, f"--{name} must be at least {least}")
    for name in ("learning_rate", "final_learning_rate", "temperature", "clip_coef", "max_grad_norm"):
        check(getattr(args, name) > 0, f"--{name} must be above 0")
    for name in ("kl_coef", "vf_coef"):
        check(getattr(args, name) >= 0, f"--{name} must be at least 0")
    for name in ("gamma", "gae_lambda"):
        check(0 <= getattr(args, name) <= 1, f"--{name} must be between 0 and 1")
    devices = ["cpu"]
    if torch.backends.mps.is_available():
        devices += ["mps"]
    if torch.cuda.is_available():
        devices += ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    finds = f"PyTorch {torch.__version__} finds {', '.join(devices)}"
    check(args.device in devices, f"--device {args.device}: {finds}")


def check_training(args: Args):
    """UserError as by check_args, and for what only a training needs."""
    check_args(args)
    steps = args.num_envs * args.num_steps
    rollout = f"num_envs * num_steps = {steps}"
    check(2 <= steps <= args.total_timesteps, f"{rollout} must be from 2 to --total_timesteps")
    check(steps % args.minibatch_size == 0, f"{rollout} must be a multiple of --minibatch_size")
    falls = args.final_learning_rate <= args.learning_rate
    check(falls, f"--final_learning_rate {args.final_learning_rate} is above --learning_rate")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # torchrun's name
    check(alone, "this is one process; several: torchrun --nproc_per_node=... extras/multi_gpu.py ...")
    check(not args.track or find_spec("wandb"), "--track needs Weights & Biases: pip install wandb")
    if args.model == "tiny":
        check(not args.adapter, "a toy is taught for its run: --adapter needs that run's base/ as --model")
    else:
        load_processor(args.model, args.max_image_tokens)  # so that a mistyped name is said at once


# -------------------------------------------------------------------------------------------- the program


def make_folder(parent: Path, name) -> Path:
    """A new folder of this name, or, if it is taken, with -2, -3 ... after it."""
    with reading(f"--runs_dir {parent}"):
        parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):  # perhaps of a program that has started at the same time
            folder.mkdir(parents=True)  # the name may be group/name
            return folder


def new_run(args: Args, program) -> Path:
    """A folder for the run with args.json, the toy model in base/, and the adapter it starts from."""
    variant = "" if program == "vldac" else f"-{program}"
    name = f"{args.env}-{Path(args.model).name}{variant}-{args.seed}"
    name = args.run_name or re.sub(r"[^\w.-]+", "-", name)
    if args.model == "tiny":  # before there is a folder: it is taught for minutes, and may be stopped
        script = Path(__file__).parent / "extras" / "toy.py"
        command = [sys.executable, str(script), json.dumps(vars(args))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        problem = f"there is no toy: {script} ended with status {done.returncode}"
        check(done.returncode == 0, f"{problem}; without a toy, give a --model")
        toy = done.stdout.splitlines()[-1]
    elif os.path.isdir(args.model):
        args.model = os.path.abspath(args.model)  # the run may be resumed from another folder
    folder = make_folder(Path(args.runs_dir), name)
    if args.model == "tiny":
        shutil.copytree(toy, folder / "base")
    if args.adapter:
        shutil.copytree(args.adapter, folder / "adapter-0")
    (folder / "args.tmp").write_text(json.dumps({"program": program} | vars(args), indent=1))
    os.replace(folder / "args.tmp", folder / "args.json")  # last: a folder with args.json is complete
    return folder


def main(argv=None, args_class=Args, training=None):
    """The program. Another algorithm has options of its own, and a function (args, folder) that trains."""
    training = training or train
    program = Path(inspect.getfile(training)).stem  # the name of its file
    resume = f"{sys.executable} {sys.argv[0]} --resume"
    folder = None
    try:
        args = parse_args(argv, args_class, program)
        check_training(args)
        if args.model == "tiny" and args.device == "cpu" and os.path.exists("/dev/nvidia0"):
            reason = "--device cpu" if torch.cuda.is_available() else "which PyTorch does not find"
            print_line(f"the toy on the CPU, though this machine has an NVIDIA GPU: {reason}")
        envs.check_world(Player(args).env)  # before a model is loaded
        if args.resume:
            folder = Path(args.resume)
        else:
            folder = new_run(args, program)
            args = use_copies(args, folder)
        toy = "the toy, " if args.model == str(folder / "base") else ""
        where = f"{toy}{args.model}, on {args.device} in {args.dtype}"
        print_line(f"{folder}: {where}; args.json there has all options")
        print_line(f"to go on after any stop: {resume} {folder}")
        training(args, folder)
        page = Path(__file__).parent / "extras" / "page.py"
        if page.exists():
            print_line(f"to look at it: {sys.executable} {page} {folder}")
    except UserError as error:
        if folder and not args.resume and not (folder / "log.jsonl").exists():
            shutil.rmtree(folder, ignore_errors=True)  # nothing has begun
        exit_with(error)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; to go on: {resume} {folder}" if folder else "stopped") from None


if __name__ == "__main__":
    main()
