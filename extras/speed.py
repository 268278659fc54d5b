"""How fast is whole training: rollout, scoring, two epochs.

    python extras/speed.py num_envs=1,4,16,64 steps=128   every name in SETTING may be a list

A random Qwen2-VL (its `width` a multiple of 48), a simulator that costs nothing, prompts of `prompt` tokens,
responses of exactly `response` tokens, one optimizer step per 16 environment steps. On a CPU all times are
the processor's.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import toy  # noqa: E402

import vldac  # noqa: E402
from envs import AnyText  # noqa: E402

SETTING = {
    "layers": 2,
    "width": 96,
    "num_envs": 16,
    "steps": 512,
    "prompt": 241,
    "response": 32,
    "images": 1,
    "micro": 8,
    "threads": 1,
    "model": "",
    "device": "cpu",
    "checkpointing": 0,
}


def write_model(folder, width, layers):
    """A random model."""
    tokenizer = toy.build_tokenizer(["go to the red box"], [])
    images = toy.Qwen2VLImageProcessorPil()
    for part in (toy.build_model(tokenizer, width, layers), tokenizer, images):
        part.save_pretrained(folder)


class Still(gym.Env):
    """A simulator that costs nothing: a random frame, and words that bring the prompt to its length."""

    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (60, 80, 3), np.uint8), text=AnyText())
    action_space, words = AnyText(), ""

    def observe(self):
        frame = self.np_random.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        info = {"task": "go to the red box", "actions": ["turn left", "turn right", "go"], "success": False}
        return {"image": frame, "text": self.words}, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe()

    def step(self, action):
        observation, info = self.observe()
        return observation, float(self.np_random.random()), False, False, info


gym.register("Still-v0", Still)


def clock(device):
    """Seconds of the processor where that does the work, as others may share it; else of the wall clock."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def lengthen(policy, players, length) -> int:
    """Give the simulators words until every prompt has `length` tokens; the number it then has."""
    for count in itertools.count():
        for player in players:
            player.env.unwrapped.words = " a" * count
            player.step(None)
        tokens = policy.encode(*players[0].turn())["input_ids"].shape[1]
        if len(players[0].observations) == players[0].args.num_images and tokens >= length:
            return tokens


def speed_of_vldac(args, setting) -> str:
    policy = vldac.VLMPolicy(args)
    policy.vlm.generation_config.min_new_tokens = args.max_new_tokens
    optimizer = vldac.make_optimizer(policy, args)
    players = [vldac.Player(args, index) for index in range(args.num_envs)]
    for player in players:
        player.next_episode()
    tokens = lengthen(policy, players, setting["prompt"])
    for num_steps in (2, setting["steps"] // args.num_envs):  # the first is not counted
        args.num_steps = num_steps
        if args.device != "cpu":
            torch.cuda.reset_peak_memory_stats(args.device)
        times = [clock(args.device)]
        steps, last_prompts, _ = vldac.collect(policy, players, args)
        times.append(clock(args.device))
        minibatches = vldac.make_minibatches(steps, args)
        values, last_values = vldac.score(policy, minibatches, last_prompts)
        vldac.add_advantages(steps, minibatches, values, last_values, args)
        times.append(clock(args.device))
        losses = vldac.update(policy, optimizer, minibatches, args)
        times.append(clock(args.device))
    ms = 1e3 * np.diff(times) / len(steps)
    collect, score, update = ms.tolist()
    words = f"{1e3 / ms.sum():.2f} environment steps per second; ms each: collect {collect:.1f}, "
    words += f"score {score:.1f}, update {update:.1f}; prompt {tokens} tokens"
    words += f", ratio_first {losses['ratio_first']:.0e}"
    if args.device != "cpu":
        words += f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    return words


def main(*words):
    given = dict(word.split("=") for word in words)
    if unknown := given.keys() - SETTING:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(SETTING)}")
    lists = {key: str(given.get(key, value)).split(",") for key, value in SETTING.items()}
    for values in itertools.product(*lists.values()):
        setting = {key: type(SETTING[key])(x) for key, x in zip(lists, values, strict=True)}
        cpu = setting["device"] == "cpu"
        torch.set_num_threads(setting["threads"])
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            model = setting["model"]
            if not model:
                model = folder
                write_model(folder, setting["width"], setting["layers"])
            args = vldac.Args(
                env="Still-v0",
                model=str(model),
                device=setting["device"],
                dtype="float32" if cpu else "bfloat16",
                num_envs=setting["num_envs"],
                max_episode_steps=10**6,
                num_images=setting["images"],
                max_new_tokens=setting["response"],
                minibatch_size=16,
                micro_batch_size=setting["micro"],
                value_hidden=[256, 256],
                gradient_checkpointing=bool(setting["checkpointing"]),
            )
            row = speed_of_vldac(args, setting)
        print("  ".join(f"{k}={v}" for k, v in setting.items() if k in given), "", row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
