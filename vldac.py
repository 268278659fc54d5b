"""VL-DAC in one file: reinforcement learning for vision-language agents.

VL-DAC (Vision-Language Decoupled Actor-Critic, Bredis et al., AAMAS 2026, arXiv 2508.04280) trains a
vision-language model (VLM) to act. At environment step t the model sees a prompt s_t (images and text) and
writes a response a_t, the tokens a_t^1 a_t^2 ...; the action parsed from it moves the environment, which pays
the reward R_t. The levels are decoupled: the policy is optimised per token, the value is predicted once per
environment step, and the value head's gradient stops at the backbone.

    L = L_policy + beta * L_KL + alpha * L_value                                                     (Eq. 6)

    L_policy  PPO's clip on every token; all tokens of step t share the advantage A_t                (Eq. 3)
    L_value   1/2 (V(s_t) - G_t)^2, where V(s_t) = MLP(stopgrad(h_t)), h_t is the last layer's hidden state at
              the last prompt token, A_t is GAE over environment steps, and G_t = A_t + V(s_t)       (Eq. 4)
    L_KL      divergence from the model before training, or from the sampling policy                 (Eq. 5)
    In the first `value_warmup` updates only the value head learns.

Letters: N environments, T steps per rollout, B environment steps in a batch, P prompt length, R response
length (both padded), V vocabulary, H hidden size. Tensors (T, N) and (B,) are per environment step, (B, R)
per token. "Deviation n" marks where the code deviates from the paper or its released code, and says why.

    python vldac.py --env OneRoom                  Qwen2-VL-7B where there is a GPU, else a toy model
    python vldac.py --env NumberLine --model tiny  the toy on a card game, no OpenGL needed
    python vldac.py --algo rl4vlm                  the step-level loss it is compared with (appendix)
    python vldac.py --resume runs/NAME             go on after the last finished update
    torchrun --nproc_per_node=4 vldac.py ...       the same training on four GPUs
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import hashlib
import inspect
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
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, HfArgumentParser, set_seed

import envs


@dataclass
class Args:
    """Every option and its default. Most defaults are those of the paper's Table 6."""

    algo: Literal["vldac", "rl4vlm"] = "vldac"
    env: str = "OneRoom"  # a world of envs.py, or package.module:callable for your own
    model: str | None = None  # hub name, folder or "tiny", the toy; default: Qwen2-VL-7B with CUDA, else tiny
    adapter: str | None = None  # folder of a trained adapter to start from
    split: Literal["train", "eval"] = "train"  # of the games or goals, in a world that has only so many
    seed: int = 0
    device: str | None = None  # default: cuda where there is one, else cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of the base model; auto: bfloat16 on a GPU
    # rollout
    total_timesteps: int = 51_200  # environment steps
    num_envs: int = 16
    num_steps: int = 32  # environment steps of each environment per update
    max_episode_steps: int | None = None  # default: the world's own limit
    invalid_reward: float | None = None  # for a response without an admissible action; default: the world's
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
    kl_ref: Literal["base", "old"] = "base"  # the model before training, or the sampling policy
    max_grad_norm: float = 1.0  # of LoRA and of the value head, separately
    # comparisons
    stop_grad: bool = True  # false: the value loss trains LoRA too
    thought_coef: float = 0.5  # lambda of rl4vlm, the weight of a thought's log-probability
    # model
    lora_rank: int = 16
    lora_alpha: int = 32
    value_hidden: list[int] = field(default_factory=lambda: [3072, 2048])  # layers of the value head
    gradient_checkpointing: bool = False  # slower, for most of the activation memory
    # the run
    eval_episodes: int = 0  # episodes on fixed seeds before the first and after the last update
    eval_every: int = 0  # updates between further evaluations (0: none); the best adapter is kept in best/
    env_timeout: float = 600.0  # seconds one step of an environment may take
    run_name: str | None = None
    runs_dir: str = "runs"
    resume: str | None = None  # the folder of a run to continue
    track: bool = False  # send the numbers to Weights & Biases too


# What some worlds change in Args, and what the toy model changes; the command line wins over both.
CARDS = {"num_images": 1, "gamma": 1.0, "gae_lambda": 1.0, "total_timesteps": 51_200}
WORLDS = dict.fromkeys(["EZPoints", "Points24", "Blackjack"], CARDS)
WORLDS |= {"NumberLine": CARDS | {"total_timesteps": 12_288}}
WORLDS |= dict.fromkeys(["ALFWorld", "ALFWorldThor", "WebShop"], {"num_images": 1})
TOY = {
    "total_timesteps": 25_600,
    "num_images": 1,
    "max_image_tokens": 16,
    "max_new_tokens": 40,
    "micro_batch_size": 64,
    "value_warmup": 4,  # 128 steps: the critic has met MiniWorld's time limit before the policy moves
    "learning_rate": 1e-3,
    "final_learning_rate": 2e-5,
    "value_hidden": [256, 256],
    "eval_episodes": 50,
}


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
    # Deviation 1: one template for all worlds, actions in words. The released code has one for each world.
    # Deviation 2: every frame is shown once, and the true number of actions is told. The released prompt
    # repeats frames, and takes their number for the number of actions.
    lines = [
        f"Task: {task}.",
        observations[-1]["text"],
        f"Actions taken: {taken}. Actions left: {left}.",
        "Admissible actions: " + ", ".join(f'"{action}"' for action in actions) + ".",
        'Think, then choose one action. Answer with {"thoughts": "...", "action": "..."}',
    ]
    text = "\n".join(line for line in lines if line)
    images = [{"type": "image"} for _ in observations]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


ACTION_KEY = re.compile(r'"action"[ \t\r\n]*:[ \t\r\n]*')
NUMBER = re.compile(r"-?[0-9][0-9.eE+-]{0,30}(?![0-9.eE+-])")
SEARCH = re.compile(r"search\[[^\[\]]{1,100}\]")


def parse_action(text: str, actions) -> str | None:
    """The admissible action a response names, or None. Never evaluates, guesses or raises.

    The last "action" key counts. Its JSON string or number must equal an action: exactly, or as the only one
    when case and outer spaces are ignored. Where "search[...]" is offered, so is any short search[words].

    >>> parse_action('{"thoughts": "it is close", "action": "Move forward "}', ["turn left", "move forward"])
    'move forward'
    >>> parse_action('{"action": 10}', ["1", "10"]), parse_action("move forward", ["move forward"])
    ('10', None)
    """
    start = None
    for key in ACTION_KEY.finditer(text):
        start = key.end()
    if start is None:
        return None
    number = NUMBER.match(text, start)
    if number:
        value = number.group()  # compared as text: the action 10 is neither 10.0 nor 1e1
    elif text.startswith('"', start):
        try:
            value, _ = json.JSONDecoder(strict=False).raw_decode(text, start)
        except ValueError:
            return None
    else:
        return None
    if value in actions:
        return value
    if "search[...]" in actions and SEARCH.fullmatch(value) and value.isprintable():
        return value
    same = [action for action in actions if action.strip().casefold() == value.strip().casefold()]
    return same[0] if len(same) == 1 else None


# ------------------------------------------------------------------------------------ GAE and the losses


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
    advantages = torch.zeros_like(values)
    last_advantage = torch.zeros_like(last_values)
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
    # Deviation 3: every token counts. The released code skips the first, masks by token id 0 ("!" in Qwen's
    # vocabulary), and drops the unclipped term of a step in which any ratio exceeds 10.
    ratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0).exp()
    advantages = advantages[:, None]  # (B, 1): a bare (B,) would broadcast over the tokens when B = R
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef))
    return step_mean(pg_loss, mask)


def value_loss(values, returns):
    """Half the mean squared error per environment step (Eq. 4), to minimise: (B,), (B,) -> scalar.

    >>> value_loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    # Deviation 4: with the paper's 1/2 and no value clipping; the released code has it the other way round.
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
    The base is the model without its adapter, also in a run that started from a trained adapter.
    Source: Schulman's estimator k3, as in the released code.

    >>> kl_base(torch.zeros(1, 1), torch.full((1, 1), math.log(2.0)), torch.ones(1, 1))  # 2 - log 2 - 1
    tensor(0.3069)
    """
    # Deviation 5: the default reference is the model before training, as in the released code. Eq. 5 has the
    # sampling policy, which has no gradient in the first minibatch and remembers nothing of the start.
    d = (baselogprobs - newlogprobs).masked_fill(mask == 0, 0)
    return step_mean(d.exp() - d - 1, mask)


# --------------------------------------------------------------------------------------------- the policy

# Deviation 6: LoRA on the linear layers of the language model only, in every supported family. The released
# code's names also match parts of some vision towers.
LORA_TARGETS = (
    r"(model\.)?(language_model|text_model)\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
)


def load_processor(path, max_image_tokens):
    """The processor (chat template, tokenizer, images) of a model, a frame bounded to max_image_tokens."""
    cls = transformers.models.auto.processing_auto.PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(path))]
    video = [None] * ("video_processor" in cls.get_attributes())

    class ImageProcessor(cls):
        """Without the video part, which alone would need torchvision."""

        video_processor = types.SimpleNamespace(num_frames=None, fps=None)  # SmolVLM's chat template reads it

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

        @classmethod
        def from_args_and_dict(cls, args, processor_dict, **kwargs):
            return super().from_args_and_dict([*args, *video], processor_dict, **kwargs)

    ImageProcessor.__name__ = cls.__name__
    processor = ImageProcessor.from_pretrained(path)
    images = processor.image_processor
    if hasattr(images, "merge_size"):  # Qwen: a token is merge_size x merge_size patches
        pixels = (images.patch_size * images.merge_size) ** 2
        smallest = min(images.size["shortest_edge"], pixels * max_image_tokens)
        images.size = {"shortest_edge": smallest, "longest_edge": pixels * max_image_tokens}
    if hasattr(images, "do_image_splitting"):  # SmolVLM: one tile per frame
        images.do_image_splitting = False
        images.size = dict(images.max_image_size)
    return processor


class VLMPolicy(nn.Module):
    """A VLM with LoRA on its language model, and a value head on the last prompt token's hidden state.

    `sample` and `forward` share prompts, masks, temperature and banned tokens, so the two cannot diverge.
    """

    def __init__(self, args: Args):
        super().__init__()
        self.args = args
        self.processor = load_processor(args.model, args.max_image_tokens)
        self.tokenizer = self.processor.tokenizer
        model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        if args.adapter:
            self.vlm = PeftModel.from_pretrained(model, args.adapter, is_trainable=True)
        else:
            lora = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=LORA_TARGETS)
            self.vlm = get_peft_model(model, lora)
        self.base = self.vlm.get_base_model()  # the same model, adapters inside, without PEFT's wrapper
        for module in self.base.modules():
            # Deviation 7: no dropout. With it the ratio is not 1 before anything has been learned.
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False  # autocast does it, and keeps no fp32 copy of inputs
        if args.gradient_checkpointing:
            self.base.activation_checkpointing_enable()
        text_config = self.base.config.get_text_config()
        if getattr(text_config, "final_logit_softcapping", None):
            raise ValueError(f"{args.model} caps its logits, which `forward` does not")

        # Deviation 8: the value head is fp32. The released one is fp16, too coarse for small errors.
        size, layers = text_config.hidden_size, []
        for next_size in args.value_hidden:
            layers += [nn.Linear(size, next_size), nn.ReLU()]
            size = next_size
        self.value_head = nn.Sequential(*layers, nn.Linear(size, 1))

        self.to(args.device)
        device = torch.device(args.device).type
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16")

        # A turn ends at the checkpoint's stop ids or the tokenizer's: Gemma 3's own is only among the former.
        stop = self.base.generation_config.eos_token_id
        stop = {*(stop if isinstance(stop, list) else [stop]), self.tokenizer.eos_token_id}
        self.stop_ids = torch.tensor(sorted(stop - {None}), device=args.device)
        # A sampled placeholder would ask the next forward pass for an image that is not there.
        names = ("image_token_id", "image_token_index", "video_token_id")
        self.banned_ids = sorted({getattr(self.base.config, name, None) for name in names} - {None})
        self.pad_id = self.tokenizer.pad_token_id
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        self.special_tokens = re.compile("|".join(map(re.escape, special)))

        # Deviation 9: sampled at temperature 1 from the whole vocabulary. The released code sets top_k 1,
        # which is argmax: nothing is explored, and PPO's ratio is not that of the policy that acted. The
        # hub's configuration does so too, and fills in what is left unset: it is replaced as a whole.
        self.base.generation_config = GenerationConfig(
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            max_new_tokens=args.max_new_tokens,
            suppress_tokens=self.banned_ids or None,
            eos_token_id=self.stop_ids.tolist(),
            pad_token_id=self.pad_id,
        )

    def encode(self, messages, frames) -> dict:
        """A prompt as the model's inputs, on the CPU: ids and mask (1, P), the pixels of its frames."""
        part = messages[-1]["content"][-1]
        part["text"] = self.special_tokens.sub(" ", part["text"])  # no world can write the chat format
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.fromarray(frame) for frame in frames]
        return dict(self.processor(text=[text], images=[images], return_tensors="pt"))

    def inputs(self, prompts, tokens, mask) -> dict:
        """B encoded prompts, each followed by its response, for the model: ids and mask (B, P + R), pixels.

        Prompts are padded on the left and responses on the right, so that all responses start in column P.
        """
        response = {"input_ids": tokens, "attention_mask": mask}
        inputs = {}
        for key in prompts[0]:
            parts = [prompt[key] for prompt in prompts]
            if any(len(part) > 1 for part in parts):  # an entry per image or patch: one after another
                inputs[key] = torch.cat(parts).to(self.args.device)
                continue
            rows = [part[0] for part in parts]
            pad = self.pad_id if key == "input_ids" else 0
            x = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
            x = x.to(self.args.device)
            if rows[0].shape == prompts[0]["input_ids"][0].shape:  # an entry per token; 0 is the type of text
                x = torch.cat([x, response.get(key, torch.zeros_like(tokens))], dim=1)  # (B, P + R)
            inputs[key] = x
        return inputs

    @torch.no_grad()
    def sample(self, prompts):
        """B responses: tokens and mask, both (B, max_new_tokens); the mask ends with the first stop id."""
        self.eval()  # in train mode with gradient checkpointing, generate() returns garbage
        nothing = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.args.device)
        inputs = self.inputs(prompts, nothing, nothing)
        with self.autocast:
            output = self.base.generate(**inputs)
        tokens = output[:, inputs["input_ids"].shape[1] :]
        missing = self.args.max_new_tokens - tokens.shape[1]
        tokens = nn.functional.pad(tokens, (0, missing), value=self.pad_id)  # (B, max_new_tokens)
        stops = torch.isin(tokens, self.stop_ids).long()
        mask = stops.cumsum(1) - stops == 0  # no stop id before this token
        return tokens, mask.long()

    def decode(self, tokens, mask) -> list[str]:
        """The texts of B responses, without their stop ids: (B, R), (B, R) -> B."""
        keep = mask.bool() & ~torch.isin(tokens, self.stop_ids)
        return [self.tokenizer.decode(row[kept]) for row, kept in zip(tokens, keep, strict=True)]

    def forward(self, prompts, tokens, mask):
        """Log-probabilities of responses and values of their prompts.

        prompts       B of them, from `encode`
        tokens, mask  (B, R); R may be 0 if only values are wanted
        Returns logprobs (B, R) in nats; values (B,); entropy (B, R) in nats, no gradient; 0 where masked.
        """
        R = tokens.shape[1]
        with self.autocast:
            hidden = self.base.model(**self.inputs(prompts, tokens, mask), use_cache=False).last_hidden_state
            hidden = hidden[:, -R - 1 :]  # (B, 1 + R, H): the last prompt token, then the response
            head = self.base.get_output_embeddings()
            logits = head(hidden[:, :-1])  # (B, R, V), each from the token before
        # Deviation 10: log-probabilities in fp32. In bfloat16 their rounding is a third of the clip range.
        logits = logits.float() / self.args.temperature
        logits[..., self.banned_ids] = -torch.inf
        all_logprobs = logits.log_softmax(2)
        logprobs = all_logprobs.gather(2, tokens[..., None])[..., 0]  # (B, R)
        entropy = torch.special.entr(all_logprobs.detach().exp()).sum(2)  # (B, R)
        state = hidden[:, 0].float()  # (B, H)
        if self.args.stop_grad:
            state = state.detach()  # Eq. 4
        values = self.value_head(state)[:, 0]
        return logprobs.masked_fill(mask == 0, 0), values, entropy.masked_fill(mask == 0, 0)


# ------------------------------------------------------------------------------------------- the processes

RANK = int(os.environ.get("RANK", 0))  # of this process, and their number, under torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def gather(items: list) -> list:
    """The items of all processes in one list, by rank."""
    if WORLD_SIZE == 1:
        return items
    parts = [None] * WORLD_SIZE
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def average_gradients(policy):
    """The mean over processes, whose minibatches are equally large: the gradient of the whole minibatch."""
    for parameter in policy.parameters():
        if WORLD_SIZE > 1 and parameter.grad is not None:  # LoRA has none while the value head warms up
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE


# -------------------------------------------------------------------------------------------- the rollout


def training_seed(*numbers) -> int:
    """A seed for training, in [2^30, 2^31); evaluation uses 0, 1, 2, ..."""
    return 2**30 + int(np.random.SeedSequence(numbers).generate_state(1)[0]) % 2**30


class Player:
    """One environment, and what its prompt needs: the last k observations and the actions so far."""

    def __init__(self, args: Args, index=0):
        self.args, self.index = args, index
        self.episode = 0  # number of the next training episode
        self.finished = -1  # training episodes that ended, not counting the first, which begins at random
        limits = {"max_episode_steps": args.max_episode_steps, "invalid_reward": args.invalid_reward}
        self.env = envs.make_env(args.env, split=args.split, **limits)

    def reset(self, seed):
        """Begin the episode of this seed: an episode is a function of its seed and actions."""
        self.seed, self.actions, self.total = seed, [], 0.0
        with self.replayable():
            observation, self.info = self.env.reset(seed=seed)
        self.task = self.info["task"]
        self.observations = deque([observation], maxlen=self.args.num_images)

    def next_episode(self):
        self.reset(training_seed(self.args.seed, self.index, self.episode))
        self.episode += 1

    def random_start(self):
        """Begin training within an episode, reached by random actions; it is in no statistic."""
        # Deviation 11: players start spread over an episode. In step, all would time out in one rollout and
        # none in the next three: there, the critic's noise would be all there is to normalise and to follow.
        self.next_episode()
        rng = random.Random(self.seed)
        for _ in range(self.index * self.info["left"] // self.args.num_envs):
            _, done = self.step(rng.choice(self.info["actions"]))
            if done:
                self.next_episode()

    def prompt(self):
        """(messages, frames) for VLMPolicy.encode."""
        seen = list(self.observations)
        taken, left = len(self.actions), self.info["left"]
        messages = build_prompt(seen, self.info["actions"], self.task, taken, left)
        return messages, [observation["image"] for observation in seen]

    def step(self, action: str | None):
        """Play a parsed action, None if there was none. Returns reward and done."""
        # Deviation 12: a response that does not parse does nothing and costs its step. The released code
        # plays a random action and then reinforces the unparsable tokens for what that action brought.
        self.actions.append(action or "")
        with self.replayable():
            observation, reward, terminated, truncated, self.info = self.env.step(self.actions[-1])
        self.observations.append(observation)
        self.total += float(reward)
        # Deviation 13: a time-out is an end that is learned from; the prompt says how many actions are left.
        # The released code gives it advantage 0, so that nothing is learned from the -1 for failing.
        return float(reward), bool(terminated or truncated)

    def result(self) -> dict:
        """What is kept of an episode that has ended."""
        success = bool(self.info.get("success", self.total > 0))
        return {"seed": self.seed, "success": success, "return": self.total, "length": len(self.actions)}

    def describe(self, method) -> str | None:
        """The world's "caption" or "hint", if it has such a method; no agent is shown either."""
        return self.env.get_wrapper_attr(method)() if self.env.has_wrapper_attr(method) else None

    @contextlib.contextmanager
    def replayable(self):
        """A world that raises: the note says how to see it again. A world that hangs: the run ends."""
        faulthandler.dump_traceback_later(self.args.env_timeout, exit=True, file=sys.__stderr__)
        try:
            yield
        except Exception as error:
            error.add_note(f"see it again: env.reset(seed={self.seed}), then env.step through {self.actions}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


@dataclass
class Step:
    """One environment step of one player."""

    question: str  # the prompt's text
    prompt: dict  # the same, encoded
    tokens: torch.Tensor  # (R,)
    mask: torch.Tensor  # (R,)
    response: str
    action: str | None  # None if the response did not parse
    reward: float
    done: bool


def act(policy, players) -> list[Step]:
    """The next step of every player."""
    # Deviation 14: all environments share each forward pass; the released code plays one at a time.
    asked = [player.prompt() for player in players]
    prompts = [policy.encode(messages, frames) for messages, frames in asked]
    tokens, mask = policy.sample(prompts)
    steps = []
    for i, response in enumerate(policy.decode(tokens, mask)):
        question = asked[i][0][-1]["content"][-1]["text"]
        action = parse_action(response, players[i].info["actions"])
        reward, done = players[i].step(action)
        steps.append(Step(question, prompts[i], tokens[i], mask[i], response, action, reward, done))
    return steps


@dataclass
class Rollout:
    """B = T * N environment steps in the order of time, and what the update needs of them."""

    steps: list[Step]  # B
    episodes: list[dict]  # that ended meanwhile and count
    prompts: list[dict]  # B, encoded
    last_prompts: list[dict]  # N, what the players see after the last step
    tokens: torch.Tensor  # (B, R)
    mask: torch.Tensor  # (B, R)
    rewards: torch.Tensor  # (T, N)
    dones: torch.Tensor  # (T, N)
    # What follows is computed after the collection.
    logprobs: torch.Tensor | None = None  # (B, R) under the policy that sampled
    baselogprobs: torch.Tensor | None = None  # (B, R) under the model before training
    advantages: torch.Tensor | None = None  # (B,) normalised
    returns: torch.Tensor | None = None  # (B,)
    weights: torch.Tensor | None = None  # (B, R) of tokens in the policy loss: the mask, but in a comparison


def collect(policy, players, args: Args) -> Rollout:
    """T steps of N players, and a new episode wherever one ends."""
    steps, episodes = [], []
    for _ in range(args.num_steps):
        for player, step in zip(players, act(policy, players), strict=True):
            steps.append(step)
            if step.done:
                player.finished += 1
                if player.finished > 0:
                    episodes.append(player.result())
                player.next_episode()

    T, N = args.num_steps, len(players)
    rewards = torch.tensor([step.reward for step in steps], device=args.device)
    dones = torch.tensor([float(step.done) for step in steps], device=args.device)
    return Rollout(
        steps=steps,
        episodes=episodes,
        prompts=[step.prompt for step in steps],
        last_prompts=[policy.encode(*player.prompt()) for player in players],
        tokens=torch.stack([step.tokens for step in steps]),
        mask=torch.stack([step.mask for step in steps]),
        rewards=rewards.view(T, N),
        dones=dones.view(T, N),
    )


# ----------------------------------------------------------------------------------------- the advantages


def micro_batches(rows, mask, size):
    """`rows` of a batch, `size` at a time and of similar lengths, which saves padding; and their R."""
    lengths = mask[rows].sum(1).cpu()
    for part in rows[lengths.argsort()].split(size):
        yield part, int(mask[part].sum(1).max())


@torch.no_grad()
def score(policy, prompts, tokens, mask):
    """Log-probabilities (B, R) and values (B,) under the policy as it is now."""
    policy.eval()
    logprobs = torch.zeros(mask.shape, device=mask.device)
    values = torch.zeros(len(mask), device=mask.device)
    for rows, R in micro_batches(torch.arange(len(mask)), mask, policy.args.micro_batch_size):
        some = [prompts[i] for i in rows]
        logprobs[rows, :R], values[rows], _ = policy(some, tokens[rows, :R], mask[rows, :R])
    return logprobs, values


def compute_advantages(policy, rollout: Rollout, args: Args) -> dict[str, float | None]:
    """Fill in the rollout's log-probabilities, advantages and returns. Returns statistics for the log."""
    # Old log-probabilities and values come from a forward pass like the one that is trained, before the first
    # epoch: the first minibatch has ratio 1, as losses/ratio_first in the log shows.
    rollout.logprobs, values = score(policy, rollout.prompts, rollout.tokens, rollout.mask)
    with policy.vlm.disable_adapter():
        rollout.baselogprobs, _ = score(policy, rollout.prompts, rollout.tokens, rollout.mask)
    nothing = rollout.mask[: len(rollout.last_prompts), :0]  # (N, 0): no response, only the value is wanted
    _, last_values = score(policy, rollout.last_prompts, nothing, nothing)

    rewards, dones = rollout.rewards, rollout.dones  # (T, N)
    values = values.view(rewards.shape)  # (T, N)
    advantages, returns = gae(rewards, values, last_values, dones, args.gamma, args.gae_lambda)
    rollout.returns = returns.flatten()  # (B,), from the advantages as they are

    everyone = torch.cat(gather([advantages.cpu()]))  # the advantages in all processes
    mean, std = everyone.mean().item(), everyone.std().item()
    rollout.advantages = (advantages.flatten() - mean) / (std + 1e-8)
    rollout.weights = rollout.mask

    variance = returns.var().item()
    unexplained = (returns - values).var().item()
    return {
        "kl_base": kl_base(rollout.logprobs, rollout.baselogprobs, rollout.mask).item(),
        "explained_variance": 1 - unexplained / variance if variance > 0 else None,
        "advantage_std": std,
    }


# --------------------------------------------------------------------------------------------- the update


def update(policy, optimizer, rollout: Rollout, args: Args, value_only, surrogate=policy_loss):
    """`update_epochs` passes over a rollout (Eq. 6). Returns the means of the losses and of their health.

    value_only  train the value head alone (warm-up)
    surrogate   the policy loss: Eq. 3, or in a comparison another function of the same arguments
    """
    policy.train()  # for gradient checkpointing; there is no dropout
    B = len(rollout.prompts)
    minibatches = math.ceil(B * WORLD_SIZE / args.minibatch_size)
    ratio_first = 0.0
    stats, sizes = [], []  # per micro-batch: the losses, and of how many steps
    parameters = {group["name"]: group["params"] for group in optimizer.param_groups}
    norms = {name: [] for name in parameters}  # of the gradients, per minibatch
    for _ in range(args.update_epochs):
        for minibatch in torch.randperm(B).chunk(minibatches):
            optimizer.zero_grad()
            for rows, R in micro_batches(minibatch, rollout.mask, args.micro_batch_size):
                prompts = [rollout.prompts[i] for i in rows]
                tokens, mask = rollout.tokens[rows, :R], rollout.mask[rows, :R]
                logprobs, baselogprobs = rollout.logprobs[rows, :R], rollout.baselogprobs[rows, :R]
                advantages, weights = rollout.advantages[rows], rollout.weights[rows, :R]

                newlogprobs, values, entropy = policy(prompts, tokens, mask)
                pg_loss = surrogate(newlogprobs, logprobs, advantages, weights, args.clip_coef)  # Eq. 3
                v_loss = value_loss(values, rollout.returns[rows])  # Eq. 4
                kl_old = kl_loss(newlogprobs, logprobs, mask)  # Eq. 5
                kl = kl_old if args.kl_ref == "old" else kl_base(newlogprobs, baselogprobs, mask)
                loss = pg_loss + args.kl_coef * kl + args.vf_coef * v_loss  # Eq. 6
                if value_only:
                    loss = args.vf_coef * v_loss
                (loss * len(rows) / len(minibatch)).backward()

                with torch.no_grad():
                    logratio = newlogprobs - logprobs
                    ratio = logratio.exp()
                    clipped = ((ratio - 1).abs() > args.clip_coef).float()
                    row = {
                        "policy_loss": pg_loss,
                        "value_loss": v_loss,
                        "kl_old": kl_old,
                        "approx_kl": step_mean((ratio - 1) - logratio, mask),
                        "clipfrac": step_mean(clipped, mask),
                        "entropy": step_mean(entropy, mask),
                    }
                    if not norms["lora"]:  # the first minibatch: nothing has been learned yet
                        ratio_first = max(ratio_first, (ratio - 1).abs().max().item())
                stats.append({name: x.item() for name, x in row.items()})
                sizes.append(len(rows))

            if value_only:
                policy.vlm.zero_grad()  # without stop_grad, the value loss has reached LoRA
            average_gradients(policy)
            # Deviation 15: LoRA and the value head are clipped separately. One norm over both would couple
            # them: a large value gradient would shrink the policy's step.
            # Deviation 16: NaN or infinity ends the run before it touches a weight; the released one goes on.
            for name, params in parameters.items():
                norm = nn.utils.clip_grad_norm_(params, args.max_grad_norm, error_if_nonfinite=True)
                norms[name].append(norm.item())
            optimizer.step()

    means = {name: np.average([row[name] for row in stats], weights=sizes).item() for name in stats[0]}
    means |= {f"grad_norm_{name}": np.mean(norms[name]).item() for name in norms}
    return means | {"ratio_first": ratio_first}


# ------------------------------------------------------------------------------------------- the training


def cosine(update, num_updates, start, end) -> float:
    """The learning rate of an update in [0, num_updates): from start down to end, once.

    >>> [round(cosine(u, 3, 1.0, 0.0), 3) for u in range(3)]
    [1.0, 0.5, 0.0]
    """
    # Deviation 17: one cosine over the planned updates; the released one has a fixed period and rises again.
    progress = update / max(1, num_updates - 1)
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def make_optimizer(policy, args: Args):
    """Adam over two groups, LoRA and the value head, which are clipped separately."""
    lora = [p for p in policy.vlm.parameters() if p.requires_grad]
    head = list(policy.value_head.parameters())
    groups = [{"name": "lora", "params": lora}, {"name": "value", "params": head}]
    return torch.optim.Adam(groups, lr=args.learning_rate, eps=1e-7, fused=True)


def train(args: Args, folder: Path):
    """A whole training. Writes log.jsonl, checkpoint.pt, best/ and adapter/ into the run's folder."""
    N = args.num_envs // WORLD_SIZE  # players of this process
    players = [Player(args, RANK * N + n) for n in range(N)]
    held_out = dataclasses.replace(args, split="eval")
    evaluators = [Player(held_out) for _ in range(min(N, args.eval_episodes))]
    set_seed(args.seed)
    policy = VLMPolicy(args)
    optimizer = make_optimizer(policy, args)
    rollout_steps = args.num_envs * args.num_steps
    num_updates = args.total_timesteps // rollout_steps
    state = load_checkpoint(folder, policy, optimizer, players)
    if args.track and RANK == 0:
        import wandb

        wandb.init(project="vldac", name=folder.name, config=vars(args))

    def end_update(row):
        """Evaluation, best/, log, checkpoint: in this order, a run that is killed anywhere loses nothing."""
        u = state["update"]
        row = {"update": u, "global_step": u * rollout_steps} | row
        if args.eval_episodes and (u in (0, num_updates) or args.eval_every and u % args.eval_every == 0):
            result = summary(evaluate(policy, evaluators, range(args.eval_episodes)))
            row |= {f"eval/{name}": x for name, x in result.items()}
            score = result.get("success_rate", result["episodic_return"])
            if score > state["best"]:
                state["best"] = score
                save_adapter(policy, folder / "best")
        write_row(folder, row, args)
        save_checkpoint(folder, state, policy, optimizer, players)

    if state is None:  # a new run
        state = {"update": 0, "best": -math.inf, "recent": []}
        for player in players:
            player.random_start()
        end_update({})

    tqdm.write("   steps" + "".join(f"{name:>9}" for name in COLUMNS))
    updates = range(state["update"], num_updates)
    for u in tqdm(updates, initial=state["update"], total=num_updates, unit="update", disable=None):
        times = [time.perf_counter()]
        for group in optimizer.param_groups:
            group["lr"] = cosine(u, num_updates, args.learning_rate, args.final_learning_rate)
        set_seed(training_seed(args.seed, RANK, u))  # a resumed run goes on as if it had never stopped

        rollout = collect(policy, players, args)
        times.append(time.perf_counter())
        losses = compute_advantages(policy, rollout, args)
        times.append(time.perf_counter())
        surrogate = policy_loss
        if args.algo == "rl4vlm":  # the appendix
            surrogate = rl4vlm_loss
            rollout.weights = thought_weights(policy, rollout.tokens, rollout.mask)
        losses |= update(policy, optimizer, rollout, args, u < args.value_warmup, surrogate)
        times.append(time.perf_counter())

        state["update"] = u + 1
        row = {"charts/learning_rate": optimizer.param_groups[0]["lr"]}
        end_update(row | make_row(policy, rollout, players, losses, times, state["recent"]))
    save_adapter(policy, folder / "adapter")


# -------------------------------------------------------------------------------------------- evaluation


def evaluate(policy, players, seeds, act=act) -> list[dict]:
    """An episode on each seed, played as in training: a dict each, by seed. `true` counts true thoughts."""
    set_seed(players[0].args.seed)
    waiting = list(seeds)[RANK::WORLD_SIZE]  # the processes share the seeds
    idle, playing, counts, episodes = list(players), [], {}, []
    while waiting or playing:
        while waiting and idle:
            player = idle.pop()
            player.reset(waiting.pop(0))
            counts[player] = {"invalid": 0, "tokens": 0, "captions": 0, "true": 0}
            playing.append(player)
        captions = [player.describe("caption") for player in playing]
        steps = act(policy, playing)
        for player, caption, step in zip(list(playing), captions, steps, strict=True):
            count = counts[player]
            count["invalid"] += step.action is None
            count["tokens"] += int(step.mask.sum())
            if caption is not None:
                count["captions"] += 1
                count["true"] += json.dumps(caption) in step.response  # the thought is the caption
            if step.done:
                episodes.append(player.result() | {"flagged": "success" in player.info} | count)
                playing.remove(player)
                idle.append(player)
    return sorted(gather(episodes), key=lambda episode: episode["seed"])


def summary(episodes) -> dict[str, float]:
    """Means over the episodes of `evaluate`."""
    totals = {key: sum(episode[key] for episode in episodes) for key in episodes[0]}
    n, steps = len(episodes), totals["length"]
    result = {
        "success_rate" if totals["flagged"] == n else "positive_return": totals["success"] / n,
        "episodic_return": totals["return"] / n,
        "episodic_length": steps / n,
        "invalid_action_rate": totals["invalid"] / steps,
    }
    if totals["captions"]:
        result["thought_agreement"] = totals["true"] / totals["captions"]
    return result


# ---------------------------------------------------------------------------- the log and the checkpoint

COLUMNS = {  # of the line that is printed after an update
    "success": "charts/success_rate",
    "return": "charts/episodic_return",
    "invalid": "charts/invalid_action_rate",
    "entropy": "losses/entropy",
    "kl_base": "losses/kl_base",
    "expl_var": "losses/explained_variance",
    "steps/s": "charts/env_steps_per_second",
}


def make_row(policy, rollout: Rollout, players, losses, times, recent) -> dict:
    """What the log keeps of an update: the first process's numbers, the episodes of all of them.

    The `recent` episodes are updated too.
    """
    episodes = gather(rollout.episodes)
    recent[:] = (recent + episodes)[-100:]
    # Short episodes, often successes, end first: no rate before every player has ended one from its start.
    fair = all(gather([player.finished > 0 for player in players]))
    success = "success_rate" if "success" in players[0].info else "positive_return"
    charts = {success: "success", "episodic_return": "return", "episodic_length": "length"}
    row = {}
    for chart, key in charts.items():
        row[f"charts/{chart}"] = np.mean([episode[key] for episode in recent]).item() if fair else None

    steps, cut = rollout.steps, ~torch.isin(rollout.tokens, policy.stop_ids).any(1)
    row["charts/invalid_action_rate"] = np.mean([step.action is None for step in steps]).item()
    row["charts/cut_share"] = cut.float().mean().item()
    row["charts/response_length"] = rollout.mask.sum(1).float().mean().item()
    row["charts/env_steps_per_second"] = len(steps) * WORLD_SIZE / (times[-1] - times[0])
    row |= {f"losses/{name}": x for name, x in losses.items()}
    for k, phase in enumerate(("collect", "score", "update")):
        row[f"time/{phase}"] = times[k + 1] - times[k]
    if torch.cuda.is_available():
        row["gpu/max_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9

    # Two samples: the first step, and the next whose response did not parse, if there is one.
    failed = [step for step in steps[1:] if step.action is None]
    samples = []
    for step in [steps[0], *failed, *steps[1:]][:2]:
        sample = {"prompt": step.question, "response": step.response}
        samples.append(sample | {"action": step.action, "reward": step.reward})
    return row | {"episodes": episodes, "samples": samples}


def write_row(folder: Path, row: dict, args: Args):
    """A row of log.jsonl, its line on the screen, and its numbers for Weights & Biases if asked."""
    if RANK > 0:
        return
    if row.keys() & COLUMNS.values():
        numbers = [row.get(key) for key in COLUMNS.values()]
        cells = ["-" if x is None else f"{x:.3f}" for x in numbers]
        tqdm.write(f"{row['global_step']:>8}" + "".join(f"{cell:>9}" for cell in cells))
    evaluation = [f"{key[5:]} {x:.3g}" for key, x in row.items() if key.startswith("eval/")]
    if evaluation:
        tqdm.write(f"{row['global_step']:>8}  on {args.eval_episodes} fixed seeds: {', '.join(evaluation)}")
    with open(folder / "log.jsonl", "a") as file:
        print(json.dumps(row, allow_nan=False), file=file)
    if args.track:
        import wandb

        samples = [list(sample.values()) for sample in row.pop("samples", [])]
        table = wandb.Table(columns=["prompt", "response", "action", "reward"], data=samples)
        numbers = {key: x for key, x in row.items() if key != "episodes"}
        wandb.log(numbers | {"samples": table}, step=row["global_step"])


def save_adapter(policy, folder: Path):
    """The adapter in PEFT's format, in one piece."""
    if RANK > 0:
        return
    building = folder.with_name(folder.name + ".tmp")
    policy.vlm.save_pretrained(building)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)


def save_checkpoint(folder: Path, state, policy, optimizer, players):
    """checkpoint.pt: all that a run needs to go on, replaced in one piece."""
    names = ("seed", "actions", "episode", "finished")
    every = gather([{name: getattr(player, name) for name in names} for player in players])
    if RANK > 0:
        return
    weights = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    checkpoint = state | {"players": every, "weights": weights, "optimizer": optimizer.state_dict()}
    checkpoint["log_bytes"] = (folder / "log.jsonl").stat().st_size
    torch.save(checkpoint, folder / "checkpoint.tmp")
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")


def load_checkpoint(folder: Path, policy, optimizer, players) -> dict | None:
    """Everything as it was when the checkpoint was saved; None in a new run."""
    if not (folder / "checkpoint.pt").exists():
        (folder / "log.jsonl").write_bytes(b"")
        return None
    state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    if RANK == 0:  # what was logged after the checkpoint, half a row perhaps, will be logged again
        os.truncate(folder / "log.jsonl", state["log_bytes"])
    policy.load_state_dict(state.pop("weights"), strict=False)
    optimizer.load_state_dict(state.pop("optimizer"))
    saved = state.pop("players")
    for player in players:  # an episode is played again
        player.reset(saved[player.index]["seed"])
        for action in saved[player.index]["actions"]:
            player.step(action)
        player.episode, player.finished = saved[player.index]["episode"], saved[player.index]["finished"]
    return state


# -------------------------------------------------------------------------------------------- the options


# May change when a run is resumed: how it is computed, not what.
MAY_CHANGE = {"device", "micro_batch_size", "gradient_checkpointing", "env_timeout", "track", "resume"}
COUNTS = """total_timesteps num_envs num_steps max_episode_steps num_images max_image_tokens max_new_tokens
minibatch_size micro_batch_size update_epochs lora_rank lora_alpha"""


def load_args(folder, options=Args) -> Args:
    """The options of a run, from its args.json."""
    args = options(**json.loads(Path(folder, "args.json").read_text()))
    if args.model == "base":  # the toy, which a run keeps in its own folder: it may be moved
        args.model = str(Path(folder, "base"))
    return args


def check_args(args: Args, error):
    """Call error(words) for what a person mistypes, before anything is loaded."""
    for name in COUNTS.split():
        if getattr(args, name) is not None and getattr(args, name) < 1:
            error(f"--{name} must be at least 1, not {getattr(args, name)}")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(args, name) <= 1:
            error(f"--{name} must be between 0 and 1, not {getattr(args, name)}")
    for name in ("learning_rate", "temperature", "env_timeout"):
        if not getattr(args, name) > 0:
            error(f"--{name} must be above 0, not {getattr(args, name)}")
    steps = args.num_envs * args.num_steps
    if steps > args.total_timesteps or steps % args.minibatch_size:
        words = "more than --total_timesteps" if steps > args.total_timesteps else "not minibatches"
        error(f"an update is num_envs * num_steps = {steps} environment steps: {words}")
    for name in ("num_envs", "minibatch_size"):
        if getattr(args, name) % WORLD_SIZE:
            error(f"--{name} {getattr(args, name)} cannot be divided among {WORLD_SIZE} processes")
    if args.model != "tiny":
        try:
            AutoConfig.from_pretrained(args.model)
        except (OSError, ValueError) as reason:
            error(f"--model {args.model}: {' '.join(str(reason).split())[:200]}; --model tiny always works")
    if args.adapter and not Path(args.adapter, "adapter_config.json").exists():
        error(f"--adapter {args.adapter} is not a folder with an adapter_config.json")


def make_parser(options=Args) -> HfArgumentParser:
    """A parser of the options; what it says of each is the comment beside it in Args."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = HfArgumentParser(options, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    notes = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Args), re.M))
    for action in parser._actions:
        action.help = action.help or f"{notes.get(action.dest, '')} (default: %(default)s)"
    return parser


def parse_args(argv=None, options=Args) -> Args:
    """The options of a run: command line > the run that is resumed > the world > the toy > Args."""
    parser = make_parser(options)
    given, _ = parser.parse_known_args(argv)
    if given.resume:
        try:
            saved = load_args(given.resume, options)
        except (OSError, ValueError, TypeError) as error:
            parser.error(f"--resume {given.resume} is not the folder of a run: {error}")
        parser.set_defaults(**vars(saved))
    else:
        device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = given.model or ("Qwen/Qwen2-VL-7B-Instruct" if device.startswith("cuda") else "tiny")
        changes = (TOY if model == "tiny" else {}) | WORLDS.get(given.env, {})
        parser.set_defaults(**changes, device=device, model=model)
    args = options(**vars(parser.parse_args(argv)))
    if args.dtype == "auto":
        args.dtype = "bfloat16" if args.device.startswith("cuda") else "float32"
    check_args(args, parser.error)
    for name in vars(args).keys() - MAY_CHANGE if given.resume else ():
        if getattr(args, name) != getattr(saved, name):
            parser.error(f"--resume {given.resume} is another run: its --{name} is {getattr(saved, name)}")
    return args


# ------------------------------------------------------------------------------------------------ the run


def tiny(args: Args) -> Path:
    """The folder of the toy model for these options: written by assets/toy.py on first use, then cached."""
    script = Path(__file__).parent / "assets" / "toy.py"
    if not script.exists():
        raise envs.UserError(f"the toy model needs {script}; without it, give a --model")
    sources = [script.read_text(), inspect.getsource(envs)]
    sources += [inspect.getsource(source) for source in (build_prompt, Player, VLMPolicy)]
    if ":" in args.env:
        sources.append(inspect.getsource(sys.modules[args.env.partition(":")[0]]))
    names = "env seed num_envs num_images max_image_tokens max_new_tokens max_episode_steps split".split()
    options = {name: getattr(args, name) for name in names}
    parts = [*sources, options, torch.__version__, transformers.__version__]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vldac"
    folder = cache / f"{re.sub(r'[^A-Za-z0-9]+', '-', args.env)}-{key}"
    if not folder.exists():
        own = {k: x for k, x in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        subprocess.run([sys.executable, script, folder, json.dumps(vars(args))], env=own, check=True)
    return folder


def open_run(args: Args) -> Path:
    """The run's folder with args.json, and with the toy model in base/: a new one, or that of --resume."""
    if args.resume:
        return Path(args.resume)
    name = args.run_name or re.sub(r"[^\w.-]+", "-", f"{args.env}-{Path(args.model).name}-{args.seed}")
    toy = tiny(args) if args.model == "tiny" else None
    folder, count = Path(args.runs_dir, name), 1
    while folder.exists():  # a taken name gets -2, -3 ...
        count += 1
        folder = Path(args.runs_dir, f"{name}-{count}")
    folder.mkdir(parents=True)
    options = vars(args).copy()
    if toy:
        shutil.copytree(toy, folder / "base")
        args.model, options["model"] = str(folder / "base"), "base"
    (folder / "args.tmp").write_text(json.dumps(options, indent=1))
    os.replace(folder / "args.tmp", folder / "args.json")  # it is there only if all before it is
    return folder


# --------------------------------------------------------- appendix: RL4VLM, which VL-DAC is compared with


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


def thought_weights(policy, tokens, mask):
    """Lambda on the thought's tokens, 1 on the others, 0 where masked: (B, R).

    The thought ends before the token in which the last "action" key begins; without a key all is thought.
    """
    weights = mask.float()
    for b, text in enumerate(policy.decode(tokens, mask)):
        keys = list(ACTION_KEY.finditer(text))
        for r in range(int(mask[b].sum())):
            if keys and len(policy.tokenizer.decode(tokens[b, : r + 1])) > keys[-1].start():
                break
            weights[b, r] *= policy.args.thought_coef
    return weights


def main(argv=None):
    args = parse_args(argv)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # peft asks by an old name
    folder = None
    try:
        world = Player(args)  # one that does not work shows before a model is loaded
        world.reset(0)
        world.step(None)
        world.env.close()
        if RANK == 0:
            folder = open_run(args)  # it may teach the toy, so it comes before the others are joined
        if WORLD_SIZE > 1:
            cuda = args.device.startswith("cuda")
            if cuda:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            # The processes wait for each other as long as the toy's lesson or an update may take.
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(days=1))
            folder, args = gather([(folder, args)])[0]
        if RANK == 0:
            print(f"{folder}: {args.env}, {args.model} on {args.device}; to go on after any stop:")
            print(f"python vldac.py --resume {folder}", flush=True)
        train(args, folder)
        if WORLD_SIZE > 1:
            dist.destroy_process_group()
    except envs.UserError as error:
        print("vldac.py: error:", error, *getattr(error, "__notes__", []), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(f"stopped. To go on: python vldac.py --resume {folder}") from None


if __name__ == "__main__":
    main()
