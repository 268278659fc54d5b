"""How good is it, really: success on fixed seeds with intervals, comparisons, curves, episodes to look at.

    python eval.py run runs/NAME                       what a run has learned, in its own world
    python eval.py start runs/NAME                     what it started from, on the same episodes
    python eval.py page runs/NAME                      a page to look at: curves, and episodes step by step
    python eval.py model --env OneRoom --model MODEL   any model; with an adapter: --adapter FOLDER
    python eval.py random --env OneRoom                random actions: the floor
    python eval.py hint --env OneRoom                  the world's hints: a scripted player
    python eval.py compare A.json B.json               paired difference of two results, exact McNemar test
    python eval.py plot runs/A runs/B random.json      learning curves, results as dashed lines

All but the last two play --episodes 200 on seeds 0, 1, 2, ..., which training never draws, by the code that
trains, and write to --out FILE. `page` plays as many as the run's own evaluations (20 if it had none). --mode
greedy takes the likeliest tokens. Options given here win over those of the run. For plot, --out FILE comes
last. A run may be one of another algorithm in extras/, too. study/report.py has tables of runs.
"""

import base64
import dataclasses
import html
import io
import json
import math
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

import envs
import vldac
from envs import UserError


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, and three of an evaluation."""

    split: Literal["train", "eval"] = "eval"
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
    """Exact two-sided p of the hypothesis that two players succeed equally often on the same seeds.

    won, lost  seeds on which only the second succeeds, and only the first. Only these count: under the
    hypothesis each is a fair coin (McNemar 1947).

    >>> round(mcnemar(8, 2), 4)  # 2 * (1 + 10 + 45) / 2^10
    0.1094
    """
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def result_line(result) -> str:
    """A result in a line.

    >>> episodes = [{"seed": 0, "success": True, "return": 1.0, "length": 4, "invalid": 1}] * 2
    >>> result = {"player": "start", "mode": "greedy", "task": {"env": "OneRoom"}, "episodes": episodes}
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
    player = ", ".join(filter(None, [result["player"], result["mode"]]))
    return (
        f"{result['task']['env']}, {player}, {n} episodes: {success}, "
        f"return {summary['episodic_return']:.3f}, length {summary['episodic_length']:.1f}"
    )


# --------------------------------------------------------------------------- what was seen, thought and done


@dataclass
class Moment:
    """A step of a recorded episode."""

    image: bytes  # what was seen
    step: vldac.Step  # without its prompt; its value is the critic's
    tokens: list[tuple[str, float]]  # of the response: text and probability


@dataclass
class Recording:
    """An episode."""

    moments: list[Moment]
    last_image: bytes = b""
    result: dict | None = None


# By the flag: in words, and a colour.
OUTCOMES = {True: ("success", "green"), False: ("failure", "red"), None: ("no success flag", "gray")}


def picture(frame) -> bytes:
    """A frame as a file."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "webp", lossless=True)
    return file.getvalue()


def recorded(play, recordings):
    """The same as `play`; it also adds to `recordings`, by seed, what is played."""

    def play_and_record(policy, players):
        frames = [player.observations[-1]["image"] for player in players]
        steps = play(policy, players)
        with torch.no_grad():
            logprobs, _, values = policy([step.prompt for step in steps], [step.tokens for step in steps])
        for i, (player, step) in enumerate(zip(players, steps, strict=True)):
            texts = [policy.tokenizer.decode(token) for token in step.tokens]
            probabilities = logprobs[i].exp().tolist()
            tokens = list(zip(texts, probabilities, strict=False))  # the rest is padding
            kept = dataclasses.replace(step, prompt={}, value=values[i].item())
            recording = recordings.setdefault(player.seed, Recording([]))
            recording.moments.append(Moment(picture(frames[i]), kept, tokens))
            if step.done:
                recording.last_image = picture(player.observations[-1]["image"])
                recording.result = player.result()
        return steps

    return play_and_record


# --------------------------------------------------------------------------------------------- the players


def scripted(command):
    """A step like `vldac.act`, for a player without a model: random actions, or the world's hints."""

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
TASK = ("env", "split", "max_episode_steps", "invalid_reward")


def make_result(command, args, checkpoint=None, recordings=None):
    """Play the episodes, and record them in `recordings`, if it is given. Returns the result.

    checkpoint  the folder of the run whose checkpoint.pt has the weights; None: those of --adapter, or none
    """
    vldac.check_args(args, update=False)
    if command == "model" and args.model == "tiny":
        raise UserError("a toy belongs to a run: eval.py start runs/NAME, or give a --model")
    envs.check_world(vldac.Player(args).env)
    result = {"player": command, "mode": None, "model": None, "weights": None, "seed": args.seed}
    if command in ("random", "hint"):
        play, policy = scripted(command), None
    else:
        play = vldac.act
        policy, weights = vldac.VLMPolicy(args), args.adapter
        if checkpoint:
            weights = f"checkpoint.pt, update {vldac.load_weights(checkpoint, policy)['update']}"
        print(f"weights: {weights or 'the model itself'}")
        result |= {"mode": args.mode, "model": args.model, "weights": weights}
        if args.mode == "greedy":  # the others are the defaults, at which transformers does not warn
            policy.vlm.generation_config.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)
    if recordings is not None:
        play = recorded(play, recordings)
    players = [vldac.Player(args) for _ in range(vldac.players_at_once(args, args.episodes))]
    players[0].reset(0)
    if command == "hint" and envs.call_optional(players[0].env, "hint") is None:
        raise UserError(f"{args.env} gives no hint")
    result["task"] = {name: getattr(args, name) for name in TASK}
    result["task"]["max_episode_steps"] = players[0].info["left"]  # the limit that holds
    episodes = vldac.evaluate(policy, players, range(args.episodes), play)
    return result | {"summary": vldac.summary(episodes), "episodes": episodes}


# ------------------------------------------------------------------------------------- a page about a run


def load_log(folder):
    """The rows and the options of a run; UserError if it is not the folder of one."""
    try:
        rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
        return rows, json.loads(Path(folder, "args.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not the folder of a run: {error}") from None


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }}
body {{ max-width: 1200px; margin: 0 auto; padding: 1rem }}
small {{ overflow-wrap: anywhere }}  td {{ padding: .1rem .8rem .1rem 0 }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem }}
.table, .strip {{ overflow-x: auto }}  .strip {{ display: flex; gap: .5rem; padding-bottom: .5rem }}
figure {{ margin: 0 }}  svg {{ width: 100% }}
.strip figure {{ flex: 0 0 180px; border: 1px solid #8888; padding: 6px }}
.strip img {{ width: 100%; image-rendering: pixelated }}
.bad {{ border-color: #d33 !important; background: #d332 }}  b {{ color: #37d }}  .bad b {{ color: #d33 }}
.p50 {{ background: #fc05 }}  .p10 {{ background: #f808 }}  .p0 {{ background: #f24a }}
</style><h1>{title}</h1><p><small>{options}</small></p>
<h2>Training</h2><div class="charts">{charts}</div>
<h2>Evaluations on fixed seeds</h2><div class="table"><table>{evaluations}</table></div>
<h2>Episodes</h2><p>{played}. Below: the first 5 failures and 3 successes.
{critic}Marked are tokens with a probability below <span class="p50">0.9</span>,
<span class="p10">0.5</span> and <span class="p0">0.1</span>.</p>
{strips}"""

CRITIC = """V is the critic's value before the step. A is the step's advantage, which all tokens of the
response share: GAE over this episode with &gamma; {gamma} and &lambda; {gae_lambda}, before it is normalised.
"""

CHARTS = {
    "charts/success_rate": "success, last 100 episodes",
    "charts/episodic_return": "return, last 100 episodes",
    "charts/invalid_action_rate": "responses without admissible action",
    "losses/kl_base": "KL to the model without its adapter, nats per token",
    "losses/entropy": "entropy, nats per token",
    "losses/explained_variance": "explained variance of the critic",
}


def chart(title, points, top) -> str:
    """A curve as inline SVG, whose axis ends at `top` or above; points are (environment steps, value)."""
    steps, values = np.array(points).T
    low, high = min(0.0, values.min()), max(values.max(), top)
    x, y = 300 * steps / steps.max(), 100 - 100 * (values - low) / (high - low)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<figure>{title}: <b>{values[-1]:.3g}</b><svg viewBox="-2 -12 304 126" fill="currentColor" '
        f'font-size="9"><path d="M0 0V100H300" fill="none" stroke="#888"/><text y="-3">{high:.3g}</text>'
        '<text y="112">0</text>'
        f'<text x="300" y="112" text-anchor="end">{steps.max():,.0f} environment steps</text>'
        f'<polyline points="{line}" fill="none" stroke="#37d" stroke-width="2"/>'
        f'<text x="3" y="97" stroke="Canvas" stroke-width="3" paint-order="stroke">{low:.3g}</text>'
        "</svg></figure>"
    )


def colored(tokens) -> str:
    """A response, its less likely tokens marked.

    >>> colored([("I", 0.99), (" <", 0.3), ("b>", 0.7), ("!", 0.01)])
    'I<span class="p10"> &lt;</span><span class="p50">b&gt;</span><span class="p0">!</span>'
    """
    parts = []
    for text, probability in tokens:
        part = html.escape(text)
        if probability < 0.9:
            name = "p50" if probability >= 0.5 else "p10" if probability >= 0.1 else "p0"
            part = f'<span class="{name}">{part}</span>'
        parts.append(part)
    return "".join(parts)


def strip(seed, recording) -> str:
    """An episode, step by step."""
    cards = []
    for number, moment in enumerate(recording.moments, 1):
        step = moment.step
        critic = "" if step.ret is None else f"<br>V {step.value:.2f}, A {step.ret - step.value:+.2f}"
        source = "data:image/webp;base64," + base64.b64encode(moment.image).decode()
        cards.append(
            f'<figure class="{"" if step.action else "bad"}"><img alt="" src="{source}">'
            f"<small>{colored(moment.tokens)}</small><br>"
            f"<b>{html.escape(step.action or '(no admissible action)')}</b><br>"
            f"<small>step {number}, reward {step.reward:.2f}{critic}</small></figure>"
        )
    result = recording.result
    outcome, _ = OUTCOMES[result["success"]]
    heading = f"Seed {seed}: {outcome}, return {result['return']:.2f}, {result['length']} steps"
    return f'<h3>{heading}</h3><div class="strip">{"".join(cards)}</div>'


def page(folder, args, result, recordings) -> str:
    """One self-contained page about a run: options, curves, evaluations, and episodes, failures first."""
    rows, options = load_log(folder)
    charts, evaluations = [], []
    for key, title in CHARTS.items():
        points = [(row["global_step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            charts.append(chart(title, points, top=1.0 if key == "charts/success_rate" else 1e-3))
    for row in rows:
        cells = []
        for key, x in row.items():
            if key.startswith("eval/") and x is not None:
                cells.append(f"{key[5:].replace('_', ' ')} {x:.3g}")
        if cells:
            evaluations.append(f"<tr><td>after {row['global_step']:,} steps<td>" + "<td>".join(cells))
    steps = [moment.step for recording in recordings.values() for moment in recording.moments]
    if args.vf_coef > 0:  # else there is no critic
        vldac.add_advantages(steps, torch.zeros(1), args)  # as of one player; each episode has its end
    won = [seed for seed in sorted(recordings) if recordings[seed].result["success"] is True]
    lost = [seed for seed in sorted(recordings) if seed not in won]
    return PAGE.format(
        title=html.escape(folder.resolve().name),
        options=html.escape(", ".join(f"{name} {x}" for name, x in options.items() if x is not None)),
        charts="".join(charts) or "no update is finished yet",
        evaluations="".join(evaluations) or "<tr><td>none",
        played=html.escape(f"{result_line(result)}; weights: {result['weights']}"),
        critic=CRITIC.format(**vars(args)) if args.vf_coef > 0 else "",
        strips="".join(strip(seed, recordings[seed]) for seed in lost[:5] + won[:3]),
    )


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
    pairs = []
    for x, y in zip(a["episodes"], b["episodes"], strict=True):
        pairs.append((x["success"] is True, y["success"] is True))
    won, lost = pairs.count((False, True)), pairs.count((True, False))
    return (
        f"A: {result_line(a)}\nB: {result_line(b)}\nB - A: {(won - lost) / len(pairs):+.3f} "
        f"({won} won, {lost} lost, exact McNemar p = {mcnemar(won, lost):.2g})"
    )


@dataclass
class Curve:
    """What a plot shows of a run."""

    world: str
    method: str
    steps: np.ndarray  # (updates + 1,) environment steps, from 0 on
    rates: np.ndarray  # (updates + 1,) success of the last 100 episodes


def make_curve(world, method, steps, before, rates) -> Curve:
    """A run's curve; UserError if there is none yet.

    steps   of the updates, 0 first
    before  success on fixed seeds before training, None if that was not measured
    rates   of the updates; None until every environment has ended an episode. Until then `before` counts, or
            else the first rate.
    """
    rates = [before, *rates]
    known = [rate for rate in rates if rate is not None]
    if not known:
        raise UserError(f"{world}, {method}: there is no success rate yet")
    filled = []
    for rate in rates:
        filled.append(known[0] if rate is None else rate)
    return Curve(world, method, np.array(steps), np.array(filled))


def world_name(env) -> str:
    """Of an --env, for a plot.

    >>> world_name("my_world:Doors-v0")
    'Doors'
    """
    return env.rpartition(":")[2].removesuffix("-v0")


def method_name(folder, args) -> str:
    """The name of a run's folder without world and seed.

    >>> method_name("runs/OneRoom-tiny-0", {"env": "OneRoom", "seed": 0})
    'tiny'
    """
    default = re.sub(r"[^\w.-]+", "-", args["env"])  # in the name that a run has if none is given
    name = Path(folder).name.removeprefix(f"{default}-").removeprefix(f"{world_name(args['env'])}-")
    return re.sub(rf"-{args['seed']}(-\d+)?$", "", name)  # a taken name has got -2, -3 ...


def load_curve(folder) -> Curve:
    """The curve of a run, from its log."""
    log, args = load_log(folder)
    steps = [row["global_step"] for row in log]
    before = log[0].get("eval/success_rate")
    rates = [row.get("charts/success_rate") for row in log[1:]]
    return make_curve(world_name(args["env"]), method_name(folder, args), steps, before, rates)


def group(curves) -> dict[tuple[str, str], list[Curve]]:
    """The curves of each (world, method), in the order of the first of them."""
    groups = {}
    for curve in curves:
        groups.setdefault((curve.world, curve.method), []).append(curve)
    return groups


def plot(curves, results, out, colors=None):
    """Learning curves: a panel per world; seeds as thin lines, their mean as a thick one, results dashed.

    colors  of methods and players; others get the next ones of matplotlib's cycle
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: pip install matplotlib") from None
    if any(result["summary"]["success_rate"] is None for result in results):
        raise UserError("a result without success flags has no rate to plot")
    groups = group(curves)
    worlds = [world for world, _ in groups] + [world_name(result["task"]["env"]) for result in results]
    worlds = list(dict.fromkeys(worlds))  # each once
    columns = min(2, len(worlds))
    rows = math.ceil(len(worlds) / columns)
    figure = Figure(figsize=(4.2 * columns, 0.8 + 2.3 * rows), layout="constrained")
    axes = {}
    for number, world in enumerate(worlds, 1):
        axes[world] = figure.add_subplot(rows, columns, number, title=world)
        axes[world].set(xlabel="environment steps", ylabel="success", ylim=(-0.02, 1.02))
        axes[world].xaxis.set_major_formatter("{x:,.0f}")
        axes[world].grid(alpha=0.3)
    colors = {"random actions": "0.5", "scripted player": "0"} | (colors or {})
    lines = {}
    for (world, method), runs in groups.items():
        color = colors.setdefault(method, f"C{len(colors) - 2}")
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        steps = steps[steps <= min(run.steps[-1] for run in runs)]  # those that all runs have reached
        rates = np.array([np.interp(steps, run.steps, run.rates) for run in runs])  # (runs, steps)
        (lines[method],) = axes[world].plot(steps, rates.mean(0), color=color, label=method)
        for run in runs:
            axes[world].plot(run.steps, run.rates, color=color, alpha=0.4, linewidth=0.8)
    for result in results:
        player = result["player"]
        name = {"random": "random actions", "hint": "scripted player"}.get(player, player)
        color = colors.setdefault(name, f"C{len(colors) - 2}")
        rate = result["summary"]["success_rate"]
        axis = axes[world_name(result["task"]["env"])]
        lines[name] = axis.axhline(rate, linestyle="--", color=color, label=name)
    title = "thin: a seed, thick: the mean" if any(len(runs) > 1 for runs in groups.values()) else None
    small = {"fontsize": 8, "title_fontsize": 8, "frameon": False}
    figure.legend(handles=lines.values(), loc="outside lower center", ncols=2, title=title, **small)
    figure.savefig(out, dpi=200)
    print(out)


def plot_files(paths, out):
    """The plot of runs' folders and of results."""
    results = [load_result(path) for path in paths if path.endswith(".json")]
    curves = [load_curve(path) for path in paths if not path.endswith(".json")]
    plot(curves, results, out)


# --------------------------------------------------------------------------------------------- the program


def options_of_run(command, folder, argv):
    """The options of an evaluation of a run, and its folder if its checkpoint has the weights, else None.

    What is typed wins over the options of the run.
    """
    saved = dataclasses.replace(vldac.load_args(folder, Args), split="eval")
    if command == "page":
        saved.episodes = saved.eval_episodes or 20
    args = vldac.parse_args(argv, Args, program="eval", defaults=vars(saved))
    if command == "start" or (command == "run" and args.adapter != saved.adapter):
        return args, None
    if args.adapter != saved.adapter:
        raise UserError(f"{command} shows the run's own weights and critic: it takes no --adapter")
    if not Path(folder, "checkpoint.pt").exists():
        raise UserError(f"{folder} has saved nothing yet: there is no checkpoint.pt")
    return args, folder


def report(result, args, folder, content=None):
    """Write a result, or a page about it, and print it in a line."""
    player = args.model if result["player"] == "model" else result["player"]
    adapter = args.adapter if result["weights"] == args.adapter else None  # else they are of a checkpoint
    split = args.split if args.split != "eval" else None
    name = "-".join(filter(None, [args.env, split, player, adapter, result["mode"], str(args.episodes)]))
    out = folder / (re.sub(r"[^\w.-]+", "-", name) + ".json")
    if content:
        out = folder / "page.html"
    out = Path(args.out or out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(content or json.dumps(result) + "\n", encoding="utf-8")
    print(f"{result_line(result)}, invalid {result['summary']['invalid_action_rate']:.3f} -> {out}")


def main(argv=None):
    try:
        match sys.argv[1:] if argv is None else argv:
            case ["run" | "start" as command, folder, *options]:
                args, checkpoint = options_of_run(command, Path(folder), options)
                report(make_result(command, args, checkpoint), args, Path(folder, "eval"))
            case ["model" | "random" | "hint" as command, *options]:
                args = vldac.parse_args(options, Args, program="eval")
                report(make_result(command, args), args, Path("results"))
            case ["page", folder, *options]:
                args, checkpoint = options_of_run("page", Path(folder), options)
                recordings = {}
                result = make_result("run", args, checkpoint, recordings)
                report(result, args, Path(folder), page(Path(folder), args, result, recordings))
            case ["compare", a, b]:
                print(compare(a, b))
            case ["plot", *paths, "--out", out] if paths:
                plot_files(paths, out)
            case ["plot", *paths] if paths:
                plot_files(paths, "curves.png")
            case _:
                print(__doc__)
                raise SystemExit(2)
    except UserError as error:
        vldac.exit_with(error)


if __name__ == "__main__":
    main()
