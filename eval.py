"""How good is it, really: success on fixed seeds with intervals, comparisons, curves, episodes to look at.

    python eval.py run runs/NAME                       what a run has learned, in its own world
    python eval.py start runs/NAME                     what it started from, on the same episodes
    python eval.py model --env OneRoom --model MODEL   any model; with an adapter: --adapter FOLDER
    python eval.py random --env OneRoom                random actions: the floor
    python eval.py hint --env OneRoom                  the world's hints: a scripted player
    python eval.py compare A.json B.json               paired difference of two results, exact McNemar test
    python eval.py plot runs/A runs/B random.json      learning curves, results as lines; a table

The first five play --episodes 200 on seeds 0, 1, 2, ..., which training never draws, by the code that trains,
and write a result to --out FILE; --mode greedy takes the likeliest tokens, --gif 3 makes animations of three
episodes. They take vldac.py's options too, which win over those of the run. --out FILE comes last for plot.
"""

import dataclasses
import json
import math
import random
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import vldac
from envs import UserError


@dataclass
class Args(vldac.Args):
    """The options of an evaluation: those of vldac.py, and"""

    episodes: int = 200
    mode: Literal["sampled", "greedy"] = "sampled"
    gif: int = 0  # animations of the first so many episodes
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
    """Exact two-sided p of the hypothesis that two players succeed equally often on the same seeds.

    won, lost  seeds on which only the second succeeds, and only the first. Only these count: under the
    hypothesis each is a fair coin (McNemar 1947).

    >>> round(mcnemar(8, 2), 4)  # 2 * (1 + 10 + 45) / 2^10
    0.1094
    """
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def summarize(episodes) -> dict:
    """Every figure of a result, from its episodes."""
    result = vldac.summary(episodes)
    successes = sum(episode["success"] for episode in episodes)
    steps = sum(episode["length"] for episode in episodes)
    tokens = sum(episode["tokens"] for episode in episodes)
    return result | {"interval": wilson(successes, len(episodes)), "response_tokens": tokens / steps}


def success_of(result):
    """The name of a result's rate and its value: a world without a success flag has positive returns only."""
    summary = result["summary"]
    name = "success_rate" if "success_rate" in summary else "positive_return"
    return name.removesuffix("_rate").replace("_", " "), summary[name]


def describe(result) -> str:
    """A line about a result.

    >>> episode = {"seed": 0, "success": True, "return": 1.0, "length": 4, "flagged": True}
    >>> episodes = [episode | {"invalid": 1, "tokens": 36, "captions": 0, "true": 0}] * 2
    >>> result = {"player": "start", "mode": "greedy", "task": {"env": "OneRoom"}, "episodes": episodes}
    >>> describe(result | {"summary": summarize(episodes)})
    'OneRoom, start, greedy, 2 episodes: success 1.000 (0.342-1.000), return 1.000, length 4.0'
    """
    summary, mode = result["summary"], result["mode"]
    name, rate = success_of(result)
    low, high = summary["interval"]
    player = ", ".join(filter(None, [result["player"], mode]))
    return (
        f"{result['task']['env']}, {player}, {len(result['episodes'])} episodes: "
        f"{name} {rate:.3f} ({low:.3f}-{high:.3f}), "
        f"return {summary['episodic_return']:.3f}, length {summary['episodic_length']:.1f}"
    )


# ------------------------------------------------------------------------------------------ the animations


def picture(frame, paragraphs):
    """A frame scaled to 320 pixels of height beside paragraphs: (text, font size, colour)."""
    width = round(frame.shape[1] * 320 / frame.shape[0])
    canvas = Image.new("RGB", (width + 320, 320), "white")
    canvas.paste(Image.fromarray(frame).resize((width, 320), Image.Resampling.NEAREST))
    draw, y = ImageDraw.Draw(canvas), 10
    for text, size, colour in paragraphs:
        text = text.encode("ascii", "replace").decode()  # the font has no other letters
        for line in textwrap.wrap(text, 600 // size):
            draw.text((width + 12, y), line, colour, font=ImageFont.load_default(size=size))
            y += size + 5
        y += 10
    return canvas


def picture_of_step(number, frame, step):
    """What was seen, thought and done."""
    thought = step.response.split('"thoughts"')[-1].split('", "action"')[0].strip(' :{"')
    action = (step.action, 16, "blue") if step.action else ("(no admissible action)", 16, "red")
    return picture(frame, [(f"step {number}", 13, "gray"), (thought[:300], 13, "black"), action])


def picture_of_end(player):
    """What an episode has come to."""
    result = player.result()
    paragraphs = [(f"{result['length']} steps, return {result['return']:.2f}", 13, "gray")]
    if result["flagged"]:
        paragraphs.append(("success", 16, "green") if result["success"] else ("no success", 16, "red"))
    return picture(player.observations[-1]["image"], paragraphs)


def filmed(act, films, args, bar):
    """The same as `act`; it also makes pictures of the first `args.gif` seeds, and moves the progress bar."""

    def filming_act(policy, players):
        frames = [player.observations[-1]["image"] for player in players]
        steps = act(policy, players)
        for player, frame, step in zip(players, frames, steps, strict=True):
            if player.seed < args.gif:
                film = films.setdefault(player.seed, [])
                film.append(picture_of_step(len(film) + 1, frame, step))
                if step.done:
                    film.append(picture_of_end(player))
        bar.update(sum(step.done for step in steps))
        return steps

    return filming_act


# --------------------------------------------------------------------------------------------- the players


def scripted(command, args):
    """A step like `vldac.act`, for a player without a model: random actions, or the world's hints."""

    def act(_, players):
        steps = []
        for player in players:
            if command == "hint":
                action = player.describe("hint")
            else:
                # A function of the seed, so that it does not matter what plays beside it.
                rng = random.Random(f"{player.seed} {len(player.actions)}")
                action = rng.choice(player.info["actions"])
            if action is None:
                raise UserError(f"{args.env} gives no hint")
            response = json.dumps({"thoughts": f"({command})", "action": action})
            reward, done = player.step(action)
            empty = torch.zeros(0)
            steps.append(vldac.Step("", {}, empty, empty, response, action, reward, done))
        return steps

    return act


def load_policy(args, interrupted):
    """The policy, and where its weights are from; `interrupted` is a run's folder or None."""
    policy = vldac.VLMPolicy(args)
    if not interrupted:
        return policy, args.adapter
    state = torch.load(interrupted / "checkpoint.pt", map_location="cpu", weights_only=True)
    policy.load_state_dict(state["weights"], strict=False)  # they are not all: the rest is the base model
    return policy, f"checkpoint.pt, update {state['update']}"


# What two results must share to be compared.
TASK = ("env", "split", "max_episode_steps", "invalid_reward")


def evaluate(command, args, interrupted=None):
    """Play the episodes. Returns the result, and the pictures of the first `args.gif` seeds, by seed."""
    if command in ("random", "hint"):
        act = scripted(command, args)
        policy = weights = mode = model = None
    else:
        act, mode, model = vldac.act, args.mode, args.model
        policy, weights = load_policy(args, interrupted)
        if mode == "greedy":  # the others are the defaults, at which transformers does not warn
            policy.vlm.generation_config.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)
        print(f"weights: {weights or 'the model itself'}")
    players = [vldac.Player(args) for _ in range(min(args.episodes, args.num_envs))]
    players[0].reset(0)
    args.max_episode_steps = players[0].info["left"]  # the limit that holds, also if none was given
    films = {}
    with tqdm(total=args.episodes, unit="episode", disable=None) as bar:
        act = filmed(act, films, args, bar)
        episodes = vldac.evaluate(policy, players, range(args.episodes), act)
    result = {"player": command, "mode": mode, "model": model, "weights": weights, "seed": args.seed}
    result |= {"task": {name: getattr(args, name) for name in TASK}}
    return result | {"summary": summarize(episodes), "episodes": episodes}, films


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
    """The paired difference of two results on the same episodes."""
    a, b = load_result(path_a), load_result(path_b)
    differing = [name for name in TASK if a["task"].get(name) != b["task"].get(name)]
    if [episode["seed"] for episode in a["episodes"]] != [episode["seed"] for episode in b["episodes"]]:
        differing.append("seeds")
    if differing:
        raise UserError(f"{path_a} and {path_b} differ in {', '.join(differing)} and cannot be compared")
    pairs = [(x["success"], y["success"]) for x, y in zip(a["episodes"], b["episodes"], strict=True)]
    won, lost = pairs.count((False, True)), pairs.count((True, False))
    return (
        f"A: {describe(a)}\nB: {describe(b)}\nB - A: {(won - lost) / len(pairs):+.3f} "
        f"({won} won, {lost} lost, exact McNemar p = {mcnemar(won, lost):.2g})"
    )


@dataclass
class Curve:
    """What a plot shows of a run."""

    world: str
    label: str  # the run's name without world and seed; runs that share it are averaged
    seed: int
    steps: np.ndarray  # (updates,)
    rates: np.ndarray  # (updates,) success
    parsed: float  # of the last rollout's responses
    agreement: float | None  # true thoughts in the last evaluation


def load_curve(folder) -> Curve:
    """A run's curve; UserError if there is none yet."""
    try:
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        args = json.loads((folder / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not the folder of a run: {error}") from None
    last = {}
    for row in rows:
        last |= row  # the last value of each key
    key = "charts/positive_return" if "charts/positive_return" in last else "charts/success_rate"
    points = [(row["global_step"], row[key]) for row in rows if row.get(key) is not None]
    if not points:
        raise UserError(f"{folder} has no success rate yet")
    steps, rates = np.array(points).T
    world = re.sub(r"[^\w.-]+", "-", args["env"])  # as in the run's name
    label = folder.name.removeprefix(f"{world}-").removesuffix(f"-{args['seed']}")
    parsed, agreement = 1 - last["charts/invalid_action_rate"], last.get("eval/thought_agreement")
    return Curve(args["env"], label, args["seed"], steps, rates, parsed, agreement)


HEADER = """| world | run | seeds | success at the end | mean | steps to 0.8 | parsed | true thoughts |
|---|---|---|---|---|---|---|---|"""


def table_row(curves, start, end) -> str:
    """Runs that differ in the seed, their figures side by side; the mean is that from `start` to `end`."""
    grid = np.linspace(start, end, 1000)
    cells = []
    for curve in curves:
        mean = np.interp(grid, curve.steps, curve.rates).mean()
        solved = curve.steps[curve.rates >= 0.8]
        first = f"{solved[0]:,.0f}" if len(solved) else "never"
        agreement = "-" if curve.agreement is None else f"{curve.agreement:.2f}"
        rates = f"{curve.rates[-1]:.2f}", f"{mean:.2f}"
        cells.append([str(curve.seed), *rates, first, f"{curve.parsed:.3f}", agreement])
    columns = [" / ".join(column) for column in zip(*cells, strict=True)]
    return f"| {' | '.join([curves[0].world, curves[0].label, *columns])} |"


def plot(paths, out):
    """Learning curves: a panel per world, mean and range over seeds, results as dashed lines; and a table."""
    results = {path: load_result(path) for path in paths if path.endswith(".json")}
    curves = [load_curve(Path(path)) for path in paths if not path.endswith(".json")]
    if not curves:
        raise UserError("plot needs the folder of a run")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot needs matplotlib: pip install matplotlib") from None

    worlds = sorted({curve.world for curve in curves})
    figure = Figure(figsize=(5 * len(worlds), 3.4), layout="constrained")
    axes = figure.subplots(1, len(worlds), squeeze=False)
    names = [*dict.fromkeys(curve.label for curve in curves), *results]
    color = {name: f"C{number}" for number, name in enumerate(names)}  # the same in every panel
    print(HEADER)
    for axis, world in zip(axes[0], worlds, strict=True):
        here = [curve for curve in curves if curve.world == world]
        start, end = max(curve.steps[0] for curve in here), min(curve.steps[-1] for curve in here)
        steps = np.unique(np.concatenate([curve.steps for curve in here]))
        steps = steps[(steps >= start) & (steps <= end)]  # those that all runs have reached
        for label in dict.fromkeys(curve.label for curve in here):
            same = [curve for curve in here if curve.label == label]
            rates = np.array([np.interp(steps, curve.steps, curve.rates) for curve in same])  # (runs, steps)
            axis.plot(steps, rates.mean(0), color=color[label], label=f"{label}, runs: {len(same)}")
            axis.fill_between(steps, rates.min(0), rates.max(0), color=color[label], alpha=0.2, linewidth=0)
            print(table_row(same, start, end))
        for path, result in results.items():
            if result["task"]["env"] == world:
                _, rate = success_of(result)
                axis.axhline(rate, linestyle="--", color=color[path], label=Path(path).stem)
        axis.set(title=world, xlabel="environment steps", ylabel="success", ylim=(-0.02, 1.02))
        axis.legend(fontsize="small")
    figure.savefig(out, dpi=120)
    print(out)


# --------------------------------------------------------------------------------------------- the program


def options_of(command, folder, words):
    """The options, and the run's folder if its policy is only in its checkpoint.

    The command line's > those of the run, if there is one > vldac.py's.
    """
    interrupted = None
    no_update = {"num_steps": 1, "minibatch_size": 1}  # no minibatches that would have to fit
    if folder:
        try:
            saved = vldac.load_args(folder, Args)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder} is not the folder of a run: {error}") from None
        saved = dataclasses.replace(saved, split="eval", track=False, **no_update)
        started_from = saved.adapter
        if command == "run" and (folder / "adapter").exists():
            saved.adapter = str(folder / "adapter")
        args = vldac.parse_args(words, Args, saved)
        if command == "run" and args.adapter == started_from:
            if not (folder / "checkpoint.pt").exists():
                raise UserError(f"{folder} has saved nothing yet: neither adapter/ nor checkpoint.pt")
            interrupted = folder
    else:
        words = [*(f"--{name}={x}" for name, x in no_update.items()), "--split=eval", *words]
        if command != "model":
            words = ["--model=tiny", *words]  # it is not loaded
        args = vldac.parse_args(words, Args)
        if command == "model" and args.model == "tiny":
            raise UserError("a toy belongs to a run: eval.py start runs/NAME, or give a --model")
    if args.episodes < 1:
        raise UserError("--episodes must be at least 1")
    return args, interrupted


def report(command, folder, words):
    """Play, write the result and the animations, and say it in a line."""
    args, interrupted = options_of(command, folder, words)
    vldac.check_world(args)
    result, films = evaluate(command, args, interrupted)
    player = command
    if command == "model":
        player = "-".join(Path(name).name for name in (args.model, args.adapter) if name)
    name = "-".join(filter(None, [args.env, player, result["mode"], str(args.episodes)]))
    results = folder / "eval" if folder else Path("results")
    out = Path(args.out) if args.out else results / (re.sub(r"[^\w.-]+", "-", name) + ".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")
    invalid, tokens = result["summary"]["invalid_action_rate"], result["summary"]["response_tokens"]
    print(f"{describe(result)}, invalid {invalid:.3f}, {tokens:.1f} tokens per response -> {out}")
    for seed, film in sorted(films.items()):
        path = out.with_name(f"{out.stem}-{seed}.gif")
        durations = [400] * (len(film) - 1) + [2500]  # milliseconds
        film[0].save(path, save_all=True, append_images=film[1:], duration=durations, loop=0)
        print(path)


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    try:
        match words:
            case ["run" | "start" as command, folder, *options]:
                report(command, Path(folder), options)
            case ["model" | "random" | "hint" as command, *options]:
                report(command, None, options)
            case ["compare", a, b]:
                print(compare(a, b))
            case ["plot", *paths, "--out", out]:
                plot(paths, out)
            case ["plot", *paths]:
                plot(paths, "curves.png")
            case _:
                print(__doc__)
                raise SystemExit(2)
    except UserError as error:
        vldac.refuse(error)


if __name__ == "__main__":
    main()
