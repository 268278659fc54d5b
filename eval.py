"""How good is it, really: success on fixed seeds with intervals, comparisons, curves, episodes to look at.

    python eval.py --run runs/NAME                     the run's adapter on its own world, 200 episodes
    python eval.py --run runs/NAME --adapter none      the model it started from, on the same episodes
    python eval.py --env OneRoom --model NAME          any model; --adapter FOLDER: with an adapter
    python eval.py --env OneRoom --policy hint         the scripted helper (a ceiling); random: the floor
    python eval.py --compare A.json B.json             paired difference, exact McNemar test
    python eval.py --aggregate A.json B.json ...       mean and deviation over training runs
    python eval.py --plot runs/A runs/B random.json    learning curves, results as lines; to --out FILE

Episodes are played by the code that trains, on seeds 0, 1, 2, ..., which training never draws. Options of
vldac.py that describe the world and the model are taken too; they win over the run's own.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import random
import statistics
import sys
import textwrap
import time
from pathlib import Path

import gymnasium
import numpy as np
import peft
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import vldac
from envs import UserError

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


def mcnemar(a, b):
    """Exact two-sided p of the hypothesis that two players succeed equally often on the same seeds.

    Only seeds on which they differ count: under the hypothesis each is a fair coin (McNemar 1947).

    >>> round(mcnemar([0] * 8 + [1] * 2, [1] * 8 + [0] * 2), 4)  # 8 won, 2 lost: 2 * (1 + 10 + 45) / 2^10
    0.1094
    """
    won, lost = sum(x < y for x, y in zip(a, b, strict=True)), sum(x > y for x, y in zip(a, b, strict=True))
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def standard_error(values):
    """Of the mean; None for a single value.

    >>> round(standard_error([1.0, 2.0, 3.0]), 4), standard_error([1.0])
    (0.5774, None)
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def summarize(episodes) -> dict:
    """Every figure of a table, from the episodes of a result."""
    n, result = len(episodes), vldac.summary(episodes)
    successes = sum(episode["success"] for episode in episodes)
    result["interval"] = wilson(successes, n)
    result["episodic_return_error"] = standard_error([episode["return"] for episode in episodes])
    steps = sum(episode["length"] for episode in episodes)
    result["response_tokens"] = sum(episode["tokens"] for episode in episodes) / steps
    return result


# --------------------------------------------------------------------------------------------- the episodes


def scripted(kind):
    """A step like `vldac.act`, for a player without a model: random actions, or the world's hints."""

    def step(_, players):
        steps = []
        for player in players:
            action = random.Random(f"{player.seed} {len(player.actions)}").choice(player.info["actions"])
            if kind == "hint":
                action = player.describe("hint")
                if action is None:
                    raise UserError(f"--policy hint: {player.args.env} gives no hint")
            text = json.dumps({"thoughts": f"({kind})", "action": action})
            reward, done = player.step(action)
            steps.append(vldac.Step("", {}, torch.ones(0), torch.ones(0), text, action, reward, done))
        return steps

    return step


def filmed(step, films, count, bar):
    """The same step; it also keeps what is seen on seeds 0 ... count - 1 and moves the progress bar."""

    def watched(policy, players):
        frames = [player.observations[-1]["image"] for player in players]
        steps = step(policy, players)
        for player, frame, taken in zip(players, frames, steps, strict=True):
            if player.seed < count:
                shot = (frame, taken.response, taken.action, taken.reward, player.observations[-1]["image"])
                films.setdefault(player.seed, []).append(shot)
        bar.update(sum(taken.done for taken in steps))
        return steps

    return watched


# What is recorded of the task; two results that are compared must share the first four.
TASK = (
    "env",
    "split",
    "max_episode_steps",
    "invalid_reward",
    "num_images",
    "max_image_tokens",
    "max_new_tokens",
)


def evaluate(args, given) -> tuple[dict, dict]:
    """Play the episodes. Returns the result, and what was seen on the first `given.gif` seeds."""
    start, films, policy, step = time.perf_counter(), {}, None, scripted(given.policy)
    players = [vldac.Player(args) for _ in range(min(given.episodes, args.num_envs))]
    if given.policy == "model":
        policy, step = vldac.VLMPolicy(args), vldac.act
        if given.mode == "greedy":
            policy.vlm.generation_config.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)
    with tqdm(total=given.episodes, unit="episode", disable=not sys.stderr.isatty()) as bar:
        episodes = vldac.evaluate(policy, players, range(given.episodes), filmed(step, films, given.gif, bar))
    result = {"policy": given.policy, "mode": given.mode, "run": given.run, "model": args.model}
    if given.policy != "model":
        result |= {"mode": "scripted", "model": None}
    result |= {"adapter": args.adapter, "weights": digest(args.adapter)}
    result |= {"task": {name: getattr(args, name) for name in TASK}}
    result |= {"seed": args.seed, "num_envs": args.num_envs, "dtype": args.dtype}
    result |= {"versions": {m.__name__: m.__version__ for m in (torch, transformers, peft, gymnasium)}}
    result |= {"summary": summarize(episodes), "episodes": episodes, "seconds": time.perf_counter() - start}
    return result, films


def digest(adapter):
    """SHA-256 of an adapter's weights, so that a result says what it is about."""
    file = adapter and Path(adapter) / "adapter_model.safetensors"
    return file and hashlib.sha256(file.read_bytes()).hexdigest()


def rate_of(summary):
    """(name, value) of success_rate, or of positive_return in a world that tells no success."""
    return next(iter(summary.items()))


def describe(result) -> str:
    """A line about a result.

    >>> episode = {"seed": 0, "success": True, "return": 1.0, "length": 4, "flagged": True}
    >>> episodes = [episode | {"invalid": 1, "tokens": 36, "captions": 0, "true": 0}] * 2
    >>> player = {"policy": "model", "mode": "greedy", "adapter": None, "task": {"env": "OneRoom"}}
    >>> describe(player | {"episodes": episodes, "summary": summarize(episodes)})
    'OneRoom, base model, greedy, 2 episodes: success 1.000 (0.342-1.000), return 1.000, length 4.0'
    """
    s, player = result["summary"], result["policy"]
    if player == "model":
        player = f"{result['adapter'] or 'base model'}, {result['mode']}"
    name, rate = rate_of(s)
    name = name.removesuffix("_rate").replace("_", " ")
    return (
        f"{result['task']['env']}, {player}, {len(result['episodes'])} episodes: {name} {rate:.3f} "
        f"({s['interval'][0]:.3f}-{s['interval'][1]:.3f}), return {s['episodic_return']:.3f}, "
        f"length {s['episodic_length']:.1f}"
    )


def write_gif(path, film, episode, task):
    """An episode as an animation: the frame enlarged; task, thought, action and outcome beside it."""
    pictures, total = [], 0.0
    for k, (frame, text, action, reward, _) in enumerate(film, 1):
        total += reward
        thought = text.split('"thoughts"')[-1].split('", "action"')[0].strip(' :{"')
        said = [(task, 13, "gray"), (f"step {k}", 13, "gray"), (thought[:300], 13, "black")]
        said.append((action, 16, "blue") if action else ("(no admissible action)", 16, "red"))
        pictures.append(picture(frame, said))
    outcome = ("success", 16, "green") if episode["success"] else ("no success", 16, "red")
    end = [(task, 13, "gray"), outcome, (f"{k} steps, return {total:.2f}", 13, "gray")]
    pictures.append(picture(film[-1][-1], end))
    durations = [400] * len(film) + [2500]  # milliseconds
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0)


def printable(text) -> str:
    """The text with signs that a picture cannot show replaced.

    >>> printable("a\\x00b\\ud800")
    'a?b?'
    """
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in text)


def picture(frame, said):
    """A frame enlarged to 320 pixels of height beside paragraphs: (text, font size, colour)."""
    width = round(frame.shape[1] * 320 / frame.shape[0])
    canvas = Image.new("RGB", (width + 320, 320), "white")
    canvas.paste(Image.fromarray(frame).resize((width, 320), Image.Resampling.NEAREST))
    draw, y = ImageDraw.Draw(canvas), 10
    for text, size, colour in said:
        for line in textwrap.wrap(printable(text), 600 // size):
            draw.text((width + 12, y), line, colour, font=ImageFont.load_default(size=size))
            y += size + 5
        y += 10
    return canvas


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
    x, y = ([episode["success"] for episode in result["episodes"]] for result in (a, b))
    differing = [name for name in TASK[:4] if a["task"].get(name) != b["task"].get(name)]
    if [episode["seed"] for episode in a["episodes"]] != [episode["seed"] for episode in b["episodes"]]:
        differing.append("seeds")
    if differing:
        raise UserError(f"{path_a} and {path_b} differ in {', '.join(differing)} and cannot be compared")
    won, lost = (sum(pair == which for pair in zip(x, y, strict=True)) for which in ((0, 1), (1, 0)))
    return (
        f"A: {describe(a)}\nB: {describe(b)}\nB - A: {(sum(y) - sum(x)) / len(x):+.3f} "
        f"({won} won, {lost} lost, exact McNemar p = {mcnemar(x, y):.2g})"
    )


def aggregate(paths) -> str:
    """Mean and standard deviation over training runs; episodes of different runs are never pooled."""
    results = [load_result(path) for path in paths]
    for name in ("mode", "policy", "task"):
        if len({json.dumps(result[name]) for result in results}) > 1:
            raise UserError(f"these results differ in {name}: " + ", ".join(map(str, paths)))
    if len({json.dumps([result["run"], result["weights"]]) for result in results}) < len(results):
        raise UserError("two of these results are of the same weights; --aggregate is over training runs")
    rates = [rate_of(result["summary"])[1] for result in results]
    deviation = f" ± {statistics.stdev(rates):.3f}" if len(rates) > 1 else ""
    mean = f"mean {statistics.mean(rates):.3f}{deviation} over {len(rates)} runs"
    return "\n".join([*map(describe, results), mean])


# Options that do not tell one kind of training from another.
BOOKKEEPING = {
    "seed",
    "run_name",
    "runs_dir",
    "resume",
    "adapter",
    "eval_episodes",
    "eval_every",
} | vldac.MAY_CHANGE


def load_curve(path) -> dict:
    """What --plot needs of a run, from its folder; UserError if there is nothing yet."""
    try:
        rows = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
        args = dataclasses.asdict(vldac.Args()) | json.loads((path / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not the folder of a run: {error}") from None
    rates = [row.get("charts/success_rate", row.get("charts/positive_return")) for row in rows]
    points = [(row["global_step"], rate) for row, rate in zip(rows, rates, strict=True) if rate is not None]
    if not points:
        raise UserError(f"{path} has no success rate yet")
    steps, rates = map(np.array, zip(*points, strict=True))
    last = {key: x for row in rows for key, x in row.items()}  # the last value of each
    return {
        "world": args["env"],
        "label": path.name.removeprefix(f"{args['env']}-").removesuffix(f"-{args['seed']}"),
        "kind": json.dumps({key: x for key, x in args.items() if key not in BOOKKEEPING}),
        "seed": args["seed"],
        "steps": steps,
        "rates": rates,
        "parsed": 1 - last["charts/invalid_action_rate"],
        "agreement": last.get("eval/thought_agreement"),
    }


def tabulate(runs, start, end) -> str:
    """A row of several runs of one kind, their figures side by side; means are from `start` to `end`."""
    cells = []
    for run in runs:
        grid = np.linspace(start, end, 1000)
        mean = np.interp(grid, run["steps"], run["rates"]).mean()
        solved = run["steps"][run["rates"] >= 0.8]
        steps = f"{solved[0]:,}" if len(solved) else "never"
        agreement = "-" if run["agreement"] is None else f"{run['agreement']:.2f}"
        success = f"{run['rates'][-1]:.2f}", f"{mean:.2f}", steps
        cells.append((str(run["seed"]), *success, f"{run['parsed']:.3f}", agreement))
    columns = [" / ".join(column) for column in zip(*cells, strict=True)]
    return f"| {' | '.join([runs[0]['world'], runs[0]['label'], *columns])} |"


def plot(paths, out):
    """Learning curves: a panel per world, mean and range over seeds, results as dashed lines; and a table."""
    paths = list(map(Path, paths))
    levels = [(path.stem, load_result(path)) for path in paths if path.suffix == ".json"]
    runs = [load_curve(path) for path in paths if path.suffix != ".json"]
    if not runs:
        raise UserError("--plot needs at least one folder of a run")
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    worlds = sorted({run["world"] for run in runs})
    labels = list(dict.fromkeys(run["label"] for run in runs))  # a colour each, the same in every panel
    figure, axes = plt.subplots(
        1, len(worlds), figsize=(5 * len(worlds), 3.4), squeeze=False, layout="constrained"
    )
    print("| world | run | seeds | success at the end | mean | steps to 0.8 | parsed | true thoughts |")
    print("|---|---|---|---|---|---|---|---|")
    for axis, world in zip(axes[0], worlds, strict=True):
        here = [run for run in runs if run["world"] == world]
        start, end = max(run["steps"][0] for run in here), min(run["steps"][-1] for run in here)
        steps = np.unique(np.concatenate([run["steps"] for run in here]))
        steps = steps[(steps >= start) & (steps <= end)]  # those that all runs have reached
        for kind in dict.fromkeys(run["kind"] for run in here):
            same = [run for run in here if run["kind"] == kind]
            rates = np.array([np.interp(steps, run["steps"], run["rates"]) for run in same])
            label, color = same[0]["label"], f"C{labels.index(same[0]['label'])}"
            label += f", {len(same)} run{'s' * (len(same) > 1)}"
            axis.plot(steps, rates.mean(0), label=label, color=color)
            axis.fill_between(steps, rates.min(0), rates.max(0), alpha=0.2, linewidth=0, color=color)
            print(tabulate(same, start, end))
        levels_here = [(name, result) for name, result in levels if result["task"]["env"] == world]
        for k, (name, result) in enumerate(levels_here):
            name = name if result["policy"] == "model" else result["policy"]
            rate = rate_of(result["summary"])[1]
            axis.axhline(rate, linestyle="--", color=f"C{len(labels) + k}", label=name)
        axis.set(title=world, xlabel="environment steps", ylabel="success", ylim=(-0.02, 1.02))
        axis.legend(fontsize="small")
    figure.savefig(out, dpi=120)
    print(out)


# --------------------------------------------------------------------------------------------- the program


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--run", help="folder of a run: its options, its model and its adapter")
    parser.add_argument("--policy", choices=("model", "random", "hint"), default="model")
    parser.add_argument("--mode", choices=("sampled", "greedy"), default="sampled")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--gif", type=int, default=0, metavar="K", help="animations of the first K episodes")
    parser.add_argument("--out", help="file of the result or of the plot")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--compare", nargs=2, metavar="JSON")
    instead.add_argument("--aggregate", nargs="+", metavar="JSON")
    instead.add_argument("--plot", nargs="+", metavar="RUN_OR_JSON")
    given, options = parser.parse_known_args(argv)
    changed = {name for name, x in vars(given).items() if x != parser.get_default(name)}
    for mode, taken in {"compare": set(), "aggregate": set(), "plot": {"out"}}.items():
        wrong = [f"--{name}" for name in sorted(changed - taken - {mode})] + options
        if mode in changed and wrong:
            parser.error(f"--{mode} does not take {' '.join(wrong)}")
    if not 1 <= given.episodes <= 2**30 or given.gif < 0:
        parser.error("--episodes must be between 1 and 2^30, --gif at least 0")
    return given, options


def options_of(given, options) -> vldac.Args:
    """The options of the run, or those of vldac.py, and over them what was given."""
    if given.run:
        try:
            saved = vldac.load_args(given.run)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{given.run} is not the folder of a run: {error}") from None
        saved.split, saved.adapter = "eval", str(Path(given.run) / "adapter")
        saved.num_steps = saved.minibatch_size = 1  # there is no update
        if options[-2:] == ["--adapter", "none"]:
            saved.adapter, options = None, options[:-2]
        args = vldac.parse_args(options, saved=saved)
    else:
        no_update = ["--num_steps", "1", "--minibatch_size", "1"]
        args = vldac.parse_args(["--split", "eval", *no_update, *options])
    if args.adapter == "none" or given.policy != "model":
        args.adapter = None
    if args.adapter and not Path(args.adapter, "adapter_config.json").exists():
        raise UserError(f"{args.adapter} is not a folder with an adapter_config.json")
    if given.policy == "model" and args.model == "tiny":
        args.model = str(vldac.toy_folder(args))
    return args


def main(argv=None):
    given, options = parse(argv)
    try:
        if given.compare:
            print(compare(*given.compare))
        elif given.aggregate:
            print(aggregate(given.aggregate))
        elif given.plot:
            plot(given.plot, given.out or "curves.png")
        else:
            report(options_of(given, options), given)
    except UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def report(args, given):
    """Evaluate, write the result and the animations, and say it in a line."""
    player = given.policy
    if player == "model":
        player = f"{Path(args.adapter).name if args.adapter else 'base'}-{given.mode}"
    name = f"{args.env.replace(':', '-')}-{player}-{given.episodes}.json"
    out = (
        Path(given.out) if given.out else (Path(given.run) / "eval" if given.run else Path("results")) / name
    )
    result, films = evaluate(args, given)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")
    s = result["summary"]
    more = f"invalid {s['invalid_action_rate']:.3f}, {s['response_tokens']:.1f} tokens per response"
    print(f"{describe(result)}, {more} -> {out}")
    for seed, film in sorted(films.items()):
        path = out.with_name(f"{out.stem}-{seed}.gif")
        write_gif(path, film, result["episodes"][seed], args.env)
        print(path)


if __name__ == "__main__":
    main()
