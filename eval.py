"""How good is it: success on fixed seeds with intervals, and comparisons of two results.

    python eval.py run runs/NAME                       what a run has learned, in its own world
    python eval.py start runs/NAME                     what it started from, on the same episodes
    python eval.py model --env OneRoom --model MODEL   any model; with an adapter: --adapter FOLDER
    python eval.py random --env OneRoom                random actions: the floor
    python eval.py hint --env OneRoom                  the world's hints: a scripted policy
    python eval.py compare A.json B.json               paired difference of two results, exact McNemar test

All but the last play --episodes 200 on seeds 0, 1, 2, ..., which training never draws, by the code that
trains, and write to a file in runs/NAME/eval/ (of a run) or results/, or to --out FILE. --mode greedy takes
the likeliest tokens. A run, which may be one of another algorithm in extras/ too, has its own options; those
of its episodes and of sampling can be changed: --help has them. To look at a run: extras/page.py; curves:
extras/plot.py.
"""

import dataclasses
import json
import math
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import envs
import vldac
from envs import UserError, check, exit_with


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, three with another meaning, and three of an evaluation."""

    adapter: str | None = None  # folder of the adapter to evaluate; of a run, instead of its checkpoint
    split: Literal["train", "eval"] = "eval"
    seed: int = 0  # of what is sampled
    episodes: int = 200  # on seeds 0, 1, 2, ...
    mode: Literal["sampled", "greedy"] = "sampled"  # greedy: the likeliest tokens
    out: str | None = None  # file of the result


# ------------------------------------------------------------------------------------------ the statistics


def wilson(successes, n, z=1.96):
    """95 % confidence interval (low, high) of a rate (Wilson 1927). It never leaves [0, 1].

    >>> [round(x, 3) for x in wilson(25, 100)], [round(x, 3) for x in wilson(100, 100)]
    ([0.175, 0.343], [0.963, 1.0])
    """
    p, d = successes / n, 1 + z * z / n
    middle = (p + z * z / (2 * n)) / d
    half = z / d * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(won, lost):
    """Exact two-sided p of the hypothesis that two policies succeed equally often on the same seeds.

    won, lost  seeds on which only the second succeeds, and only the first. Only these count: under the
    hypothesis each is a fair coin (McNemar 1947).

    >>> round(mcnemar(8, 2), 4)  # 2 * (1 + 10 + 45) / 2^10
    0.1094
    >>> mcnemar(3, 3)
    1.0
    """
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def result_line(result) -> str:
    """A result in a line.

    >>> episodes = [{"seed": 0, "success": True, "return": 1.0, "length": 4, "invalid": 1}] * 2
    >>> result = {"command": "start", "mode": "greedy", "task": {"env": "OneRoom"}, "episodes": episodes}
    >>> result_line(result | {"summary": vldac.summary(episodes)})
    'OneRoom, start, greedy, 2 episodes: success 1.000 (0.342-1.000), return 1.000, length 4.0'
    """
    summary = result["summary"]
    n = len(result["episodes"])
    rate = summary["success_rate"]
    success = "no success flag"
    if rate is not None:
        low, high = wilson(rate * n, n)
        success = f"success {rate:.3f} ({low:.3f}-{high:.3f})"
    who = ", ".join(filter(None, [result["command"], result["mode"]]))
    repeat = result["task"].get("action_repeat", 1)
    times = f" with each action {repeat} times" if repeat > 1 else ""
    return (
        f"{result['task']['env']}{times}, {who}, {n} episodes: {success}, "
        f"return {summary['episodic_return']:.3f}, length {summary['episodic_length']:.1f}"
    )


# -------------------------------------------------------------------------------------------- the episodes


def scripted(command):
    """A step like `vldac.act`, without a model: random actions, or the world's hints."""

    def play(_, players):
        steps = []
        for player in players:
            if command == "hint":
                action = envs.call_optional(player.env, "hint")
            else:
                # A function of the seed, so that it does not matter what plays beside it.
                rng = random.Random(f"{player.seed} {len(player.actions)}")
                action = envs.random_action(player.info["actions"], player.task, rng)
            steps.append(vldac.Step({}, torch.zeros(0), "", action, *player.step(action)))
        return steps

    return play


# What two results must share to be compared.
TASK = ("env", "split", "max_episode_steps", "invalid_reward", "action_repeat")
# What else decides how a model plays.
SAMPLING = ("temperature", "max_new_tokens", "num_images", "max_image_tokens", "dtype")


def make_result(command, args, checkpoint=None) -> dict:
    """Play the episodes.

    checkpoint  the folder of the run whose checkpoint.pt has the weights; None: those of --adapter, or none
    """
    vldac.check_args(args)
    check(not args.out or not Path(args.out).is_dir(), f"--out {args.out} is a folder, and not a file")
    toy_of_no_run = command == "model" and args.model == "tiny"
    check(not toy_of_no_run, "a toy belongs to a run: eval.py start runs/NAME, or give a --model")
    envs.check_world(vldac.Player(args).env)
    result = {"command": command, "mode": None, "model": None, "weights": None, "seed": args.seed}
    if command in ("random", "hint"):
        play, policy = scripted(command), None
    else:
        play = vldac.act
        policy, weights = vldac.VLMPolicy(args), args.adapter
        if checkpoint:
            weights = f"checkpoint.pt, update {vldac.load_weights(checkpoint, policy)['update']}"
        print(f"weights: {weights or 'the model itself'}")
        result |= {"mode": args.mode, "model": args.model, "weights": weights}
        result["sampling"] = {name: getattr(args, name) for name in SAMPLING}
        if args.mode == "greedy":  # the others are the defaults, at which transformers does not warn
            policy.vlm.generation_config.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)
    players = vldac.evaluation_players(args, args.episodes)
    players[0].reset(0)
    if command == "hint":
        check(envs.call_optional(players[0].env, "hint"), f"{args.env} gives no hint")
    result["task"] = {name: getattr(args, name) for name in TASK}
    result["task"]["max_episode_steps"] = players[0].info["left"]  # the limit that holds
    episodes = vldac.evaluate(policy, players, range(args.episodes), play)
    return result | {"summary": vldac.summary(episodes), "episodes": episodes}


# ------------------------------------------------------------------------------- results beside each other


def load_result(path) -> dict:
    """A result file; UserError if it is none."""
    try:
        result = json.loads(Path(path).read_text())
        if not isinstance(result, dict) or not {"task", "summary", "episodes"} <= result.keys():
            raise ValueError("it was not written by eval.py")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a result: {error}") from None
    return result


def compare(path_a, path_b) -> str:
    """The paired difference of two results on the same episodes: of successes, else of returns."""
    a, b = load_result(path_a), load_result(path_b)
    differing = [name for name in TASK if a["task"].get(name) != b["task"].get(name)]
    if [episode["seed"] for episode in a["episodes"]] != [episode["seed"] for episode in b["episodes"]]:
        differing.append("seeds")
    check(not differing, f"{path_a} and {path_b} differ in {', '.join(differing)} and cannot be compared")
    pairs = list(zip(a["episodes"], b["episodes"], strict=True))
    lines = f"A: {path_a}\n   {result_line(a)}\nB: {path_b}\n   {result_line(b)}\nB - A: "
    if a["summary"]["success_rate"] is None and b["summary"]["success_rate"] is None:
        differences = [y["return"] - x["return"] for x, y in pairs]
        higher, lower = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        mean = sum(differences) / len(pairs)
        return lines + f"return {mean:+.3f} ({higher} higher, {lower} lower; there is no success flag)"
    flags = [(x["success"] is True, y["success"] is True) for x, y in pairs]
    won, lost = flags.count((False, True)), flags.count((True, False))
    test = f"{won} won, {lost} lost, exact McNemar p = {mcnemar(won, lost):.2g}"
    return lines + f"{(won - lost) / len(pairs):+.3f} ({test})"


# --------------------------------------------------------------------------------------------- the program


# What an evaluation may change of a run: its episodes, sampling and speed, and which adapter plays.
RUN_OPTIONS = "episodes mode seed out env split max_episode_steps invalid_reward adapter temperature".split()
RUN_OPTIONS += "max_new_tokens num_envs micro_batch_size device dtype action_repeat".split()
# Of a model or a scripted policy, what else a run would say.
MODEL_OPTIONS = [*RUN_OPTIONS, "model", "num_images", "max_image_tokens"]


def typed_options(argv, allowed) -> list[str]:
    """The names of what is typed. UserError unless an evaluation has these options, of which --help tells."""
    vldac.parse(argv, Args, {}, allowed)  # it ends here if --help or a wrong value is typed
    typed = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    for name in typed:
        check(name in allowed, f"--{name} is no option of an evaluation: these are --{', --'.join(allowed)}")
    return typed


def options_of_run(command, folder, argv, episodes=200):
    """The options of an evaluation of a run, and its folder if its checkpoint has the weights, else None.

    What is typed wins over the options of the run.
    """
    typed = typed_options(argv, RUN_OPTIONS)
    saved = dataclasses.replace(vldac.load_args(folder, Args), split="eval", episodes=episodes)
    args = vldac.parse(argv, Args, vars(saved))
    if command == "start" or "adapter" in typed:
        return args, None
    has_weights = Path(folder, "checkpoint.pt").exists()
    check(has_weights, f"{folder} has saved nothing yet: there is no checkpoint.pt")
    return args, folder


def write_result(result, args, folder, argv):
    """Write a result into a file whose name tells what was typed, and print it in a line."""
    who = args.model if result["command"] == "model" else result["command"]
    adapter = args.adapter if result["weights"] == args.adapter else None  # else they are of a checkpoint
    parts = [args.env, who, adapter, result["mode"], str(args.episodes)]
    for option in typed_options(argv, MODEL_OPTIONS):
        if option in ("seed", *TASK[1:], *SAMPLING):
            parts.append(f"{option}-{getattr(args, option)}")
    name = "-".join(filter(None, parts))
    name = re.sub(r"[^\w.-]+", "-", name)[-200:]  # a path in it may be long
    out = Path(args.out or folder / f"{name}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{result_line(result)}, invalid {result['summary']['invalid_action_rate']:.3f} -> {out}")


def main(argv=None):
    try:
        match sys.argv[1:] if argv is None else argv:
            case ["run" | "start", "-h" | "--help"]:
                typed_options(["--help"], RUN_OPTIONS)
            case ["run" | "start" as command, folder, *options]:
                args, checkpoint = options_of_run(command, Path(folder), options)
                write_result(make_result(command, args, checkpoint), args, Path(folder, "eval"), options)
            case ["model" | "random" | "hint" as command, *options]:
                typed_options(options, MODEL_OPTIONS)
                args = vldac.parse_args(options, Args)
                write_result(make_result(command, args), args, Path("results"), options)
            case ["compare", a, b]:
                print(compare(a, b))
            case ["-h" | "--help"]:
                print(__doc__)
                typed_options(["--help"], MODEL_OPTIONS)
            case _:
                print(__doc__)
                raise SystemExit(2)
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
