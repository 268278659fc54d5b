"""How good is it, really: success on fixed seeds with intervals, comparisons, curves, episodes to look at.

    python eval.py run runs/NAME                       what a run has learned, in its own world
    python eval.py start runs/NAME                     what it started from, on the same episodes
    python eval.py page runs/NAME                      a page to look at: curves, and episodes step by step
    python eval.py film runs/NAME                      an animation: an episode before and after, side by side
    python eval.py model --env OneRoom --model MODEL   any model; with an adapter: --adapter FOLDER
    python eval.py random --env OneRoom                random actions: the floor
    python eval.py hint --env OneRoom                  the world's hints: a scripted player
    python eval.py compare A.json B.json               paired difference of two results, exact McNemar test
    python eval.py table runs/A runs/B                 the figures of runs, seeds side by side
    python eval.py plot runs/A runs/B random.json      learning curves, results as dashed lines

All but the last three play --episodes 200 on seeds 0, 1, 2, ..., which training never draws, by the code that
trains, and write to --out FILE; `page` plays as many as the run's own evaluations, `film` one. --mode greedy
takes the likeliest tokens. Options of vldac.py win over those of the run. --out FILE comes last for plot.
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
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import vldac
from envs import UserError


@dataclass
class Args(vldac.Args):
    """The options of an evaluation: those of vldac.py, and"""

    episodes: int = 200
    mode: Literal["sampled", "greedy"] = "sampled"
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


# --------------------------------------------------------------------------- what was seen, thought and done


@dataclass
class Moment:
    """A step of a recorded episode."""

    frame: np.ndarray  # (height, width, 3), what was seen
    thought: str
    action: str | None
    response: str
    reward: float
    value: float  # the critic's, before the step


@dataclass
class Film:
    """A recorded episode."""

    moments: list[Moment]
    last_frame: np.ndarray | None = None
    result: dict | None = None


def thought_of(response) -> str:
    """What a response says before its action.

    >>> thought_of('{"thoughts": "it is close", "action": "move forward"}')
    'it is close'
    """
    return response.split('"thoughts"')[-1].split('", "action"')[0].strip(' :{"')


def recorded(act, films):
    """The same as `act`; it also adds to `films`, by seed, what is played."""

    def recording_act(policy, players):
        frames = [player.observations[-1]["image"] for player in players]
        steps = act(policy, players)
        no_response = torch.zeros(len(players), 0, dtype=torch.long, device=policy.args.device)
        _, values = vldac.score(policy, [step.prompt for step in steps], no_response, no_response)
        for player, frame, step, value in zip(players, frames, steps, values.tolist(), strict=True):
            film = films.setdefault(player.seed, Film([]))
            thought = thought_of(step.response)
            film.moments.append(Moment(frame, thought, step.action, step.response, step.reward, value))
            if step.done:
                film.last_frame, film.result = player.observations[-1]["image"], player.result()
        return steps

    return recording_act


# ------------------------------------------------------------------------------------------- the animation


def panel(title, film, k):
    """Step k of an episode, or how it ended: a frame, and under it what was thought and done."""
    ended = k >= len(film.moments)
    frame = film.last_frame if ended else film.moments[k].frame
    height = round(420 * frame.shape[0] / frame.shape[1])
    if not ended:
        moment = film.moments[k]
        thought = textwrap.wrap(moment.thought, 32)[:2]
        action = (moment.action, "blue") if moment.action else ("(no admissible action)", "red")
    else:
        thought = [f"return {film.result['return']:.2f}"]
        action = ("success", "green") if film.result["success"] else ("no success", "red")
        action = action if film.result["flagged"] else ("", "black")
    canvas = Image.new("RGB", (430, height + 155), "white")
    canvas.paste(Image.fromarray(frame).resize((420, height), Image.Resampling.NEAREST), (5, 40))
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=26)
    number = len(film.moments) if ended else k + 1
    lines = [(f"{title}, step {number}", "black", 5), ("\n".join(thought), "black", height + 45)]
    for text, color, y in [*lines, (*action, height + 115)]:
        text = text.encode("ascii", "replace").decode()  # the font has no other letters
        draw.text((8, y), text, color, font=font)
    return canvas


def animate(before, after, path):
    """Two episodes of a seed, side by side, until the second has ended; then how both ended."""
    steps = np.linspace(0, len(after.moments) - 1, min(24, len(after.moments))).round().astype(int)
    pictures = []
    for k in [*steps, math.inf]:
        left, right = panel("before", before, k), panel("after", after, k)
        picture = Image.new("RGB", (left.width + right.width, left.height), "white")
        picture.paste(left, (0, 0))
        picture.paste(right, (left.width, 0))
        pictures.append(picture)
    durations = [400] * len(steps) + [2400]  # milliseconds
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    print(path)


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


def evaluate(command, args, interrupted=None, films=None):
    """Play the episodes, and add them to `films` if there are any. Returns the result."""
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
    if command == "hint" and players[0].describe("hint") is None:
        raise UserError(f"{args.env} gives no hint")
    args.max_episode_steps = players[0].info["left"]  # the limit that holds, also if none was given
    if films is not None:
        act = recorded(act, films)
    episodes = vldac.evaluate(policy, players, range(args.episodes), act)
    result = {"player": command, "mode": mode, "model": model, "weights": weights, "seed": args.seed}
    result |= {"task": {name: getattr(args, name) for name in TASK}}
    return result | {"summary": summarize(episodes), "episodes": episodes}


# ------------------------------------------------------------------------------------- a page about a run


def load_log(folder):
    """A run's rows and options; UserError if it is none."""
    try:
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        return rows, json.loads((folder / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not the folder of a run: {error}") from None


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }}
body {{ max-width: 1200px; margin: 0 auto; padding: 1rem }}
code, small {{ overflow-wrap: anywhere }}  td, th {{ padding: .1rem .8rem .1rem 0; text-align: left }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem }}
.table, .strip {{ overflow-x: auto }}  .strip {{ display: flex; gap: .5rem; padding-bottom: .5rem }}
figure {{ margin: 0 }}  .strip figure {{ flex: 0 0 190px; border: 1px solid #8888; padding: .4rem }}
.strip img {{ width: 100%; image-rendering: pixelated }}  svg {{ width: 100% }}
.bad {{ border-color: #d33 !important; background: #d332 }}  b {{ color: #37d }}  .bad b {{ color: #d33 }}
</style><h1>{title}</h1><p><small>{options}</small></p>
<h2>Training</h2><div class="charts">{charts}</div>
<h2>Evaluations on {count} fixed seeds</h2><div class="table"><table>{evaluations}</table></div>
<h2>Episodes, failures first</h2><p>{played}. V is the critic's value.</p>{strips}"""

CHARTS = {
    "charts/success_rate": "success, last 100 episodes",
    "charts/positive_return": "positive return, last 100 episodes",
    "charts/episodic_return": "return, last 100 episodes",
    "charts/invalid_action_rate": "responses without admissible action",
    "losses/kl_base": "KL to the model before training, nats per token",
    "losses/entropy": "entropy, nats per token",
    "losses/explained_variance": "explained variance of the critic",
}


def chart(title, points) -> str:
    """A curve as inline SVG; points are (environment steps, value)."""
    steps, values = np.array(points).T
    low, high = min(0.0, values.min()), max(values.max(), 1e-3)
    x, y = 300 * steps / steps.max(), 100 - 100 * (values - low) / (high - low)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<figure>{title}: <b>{values[-1]:.3g}</b><svg viewBox="-2 -12 304 126" fill="currentColor" '
        f'font-size="9"><path d="M0 0V100H300" fill="none" stroke="#888"/><text y="-3">{high:.3g}</text>'
        f'<text x="3" y="97">{low:.3g}</text><text y="112">0</text>'
        f'<text x="300" y="112" text-anchor="end">{steps.max():,.0f} environment steps</text>'
        f'<polyline points="{line}" fill="none" stroke="#37d" stroke-width="2"/></svg></figure>'
    )


def strip(seed, film) -> str:
    """An episode, frame by frame."""
    cards = []
    for number, moment in enumerate(film.moments):
        png = io.BytesIO()
        Image.fromarray(moment.frame).save(png, "png")
        source = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
        kind, thought, action = "", moment.thought, moment.action
        if action is None:
            kind, thought, action = "bad", moment.response, "(no admissible action)"
        cards.append(
            f'<figure class="{kind}"><img alt="" src="{source}"><small>{html.escape(thought)}</small><br>'
            f"<b>{html.escape(action)}</b><br>"
            f"<small>step {number + 1}, reward {moment.reward:.2f}, V {moment.value:.2f}</small></figure>"
        )
    result = film.result
    outcome = ("success" if result["success"] else "failure") if result["flagged"] else "no success flag"
    heading = f"Seed {seed}: {outcome}, return {result['return']:.2f}, {result['length']} steps"
    return f'<h3>{heading}</h3><div class="strip">{"".join(cards)}</div>'


def page(folder, result, films) -> str:
    """One self-contained page about a run: options, curves, evaluations, and episodes, failures first."""
    rows, options = load_log(folder)
    charts, evaluations = [], []
    for key, title in CHARTS.items():
        points = [(row["global_step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            charts.append(chart(title, points))
    for row in rows:
        cells = [f"{key[5:].replace('_', ' ')} {x:.3g}" for key, x in row.items() if key.startswith("eval/")]
        if cells:
            evaluations.append(f"<tr><td>after {row['global_step']:,} steps<td>" + "<td>".join(cells))
    won = [seed for seed, film in sorted(films.items()) if film.result["success"]]
    lost = [seed for seed in sorted(films) if seed not in won]
    return PAGE.format(
        title=html.escape(folder.resolve().name),
        options=html.escape(", ".join(f"{name} {x}" for name, x in options.items() if x is not None)),
        charts="".join(charts),
        count=options["eval_episodes"],
        evaluations="".join(evaluations),
        played=html.escape(f"{describe(result)}; weights: {result['weights']}"),
        strips="".join(strip(seed, films[seed]) for seed in lost[:5] + won[:3]),
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
    pairs = [(x["success"], y["success"]) for x, y in zip(a["episodes"], b["episodes"], strict=True)]
    won, lost = pairs.count((False, True)), pairs.count((True, False))
    return (
        f"A: {describe(a)}\nB: {describe(b)}\nB - A: {(won - lost) / len(pairs):+.3f} "
        f"({won} won, {lost} lost, exact McNemar p = {mcnemar(won, lost):.2g})"
    )


@dataclass
class Curve:
    """What a table or a plot shows of a run."""

    world: str
    label: str  # the run's name without world and seed; runs that share it are averaged
    seed: int
    steps: np.ndarray  # (updates,)
    rates: np.ndarray  # (updates,) success, of the last 100 episodes
    before: float | None  # success on the fixed seeds
    after: float | None
    parsed: float  # of the last rollout's responses
    agreement: float | None  # true thoughts in the last evaluation


def load_curve(folder) -> Curve:
    """A run's curve; UserError if there is none yet."""
    rows, args = load_log(folder)
    last = {}
    for row in rows:
        last |= row  # the last value of each key
    name = "positive_return" if "charts/positive_return" in last else "success_rate"
    points = [
        (row["global_step"], row[f"charts/{name}"]) for row in rows if row.get(f"charts/{name}") is not None
    ]
    if not points:
        raise UserError(f"{folder} has no success rate yet")
    steps, rates = np.array(points).T
    world = re.sub(r"[^\w.-]+", "-", args["env"])  # as in the run's name
    label = folder.name.removeprefix(f"{world}-").removesuffix(f"-{args['seed']}")
    evaluations = [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row] or [None]
    return Curve(
        args["env"],
        label,
        args["seed"],
        steps,
        rates,
        before=evaluations[0],
        after=evaluations[-1],
        parsed=1 - last["charts/invalid_action_rate"],
        agreement=last.get("eval/thought_agreement"),
    )


def groups_of(curves) -> list[list[Curve]]:
    """Curves that differ in the seed only, together, in the order of the first of them."""
    groups = {}
    for curve in curves:
        groups.setdefault((curve.world, curve.label), []).append(curve)
    return list(groups.values())


def table(folders) -> str:
    """A row for every group of runs that differ in the seed, whose figures stand side by side."""
    names = [
        "world",
        "run",
        "seeds",
        "before",
        "after",
        "last 100",
        "mean",
        "steps to 0.8",
        "parsed",
        "true thoughts",
    ]
    lines = [names, ["---"] * len(names)]
    for group in groups_of([load_curve(Path(folder)) for folder in folders]):
        start, end = max(curve.steps[0] for curve in group), min(curve.steps[-1] for curve in group)
        cells = []
        for curve in group:
            mean = np.interp(np.linspace(start, end, 1000), curve.steps, curve.rates).mean()
            solved = curve.steps[curve.rates >= 0.8]
            first = f"{solved[0]:,.0f}" if len(solved) else "never"
            rates = [curve.before, curve.after, curve.rates[-1], mean]
            rates = ["-" if rate is None else f"{rate:.2f}" for rate in rates]
            agreement = "-" if curve.agreement is None else f"{curve.agreement:.2f}"
            cells.append([str(curve.seed), *rates, first, f"{curve.parsed:.3f}", agreement])
        columns = [" / ".join(column) for column in zip(*cells, strict=True)]
        lines.append([group[0].world, group[0].label, *columns])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(paths, out):
    """Learning curves: a panel per world, mean and range over seeds, results as dashed lines."""
    results = {path: load_result(path) for path in paths if path.endswith(".json")}
    groups = groups_of([load_curve(Path(path)) for path in paths if not path.endswith(".json")])
    if not groups:
        raise UserError("plot needs the folder of a run")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot needs matplotlib: pip install matplotlib") from None

    worlds = list(dict.fromkeys(group[0].world for group in groups))
    figure = Figure(figsize=(4.2 * len(worlds), 4), layout="constrained")
    axes = dict(zip(worlds, figure.subplots(1, len(worlds), squeeze=False)[0], strict=True))
    handles = {}  # one for each name, and so a colour for each
    for group in groups:
        axis, name = axes[group[0].world], f"{group[0].label} (mean and range of {len(group)})"
        start, end = max(curve.steps[0] for curve in group), min(curve.steps[-1] for curve in group)
        steps = np.unique(np.concatenate([curve.steps for curve in group]))
        steps = steps[(steps >= start) & (steps <= end)]  # those that all runs have reached
        rates = np.array([np.interp(steps, curve.steps, curve.rates) for curve in group])  # (runs, steps)
        color = handles[name].get_color() if name in handles else f"C{len(handles)}"
        (handles[name],) = axis.plot(steps, rates.mean(0), color=color, label=name)
        axis.fill_between(steps, rates.min(0), rates.max(0), color=color, alpha=0.2, linewidth=0)
    for path, result in results.items():
        name = {"random": "random actions", "hint": "scripted player"}.get(result["player"], Path(path).stem)
        axis, (_, rate) = axes[result["task"]["env"]], success_of(result)
        color = handles[name].get_color() if name in handles else f"C{len(handles)}"
        handles[name] = axis.axhline(rate, linestyle="--", color=color, label=name)
    for world, axis in axes.items():
        axis.set(title=world, xlabel="environment steps", ylabel="success", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=min(2, len(handles)))
    figure.savefig(out, dpi=200)
    print(out)


# --------------------------------------------------------------------------------------------- the program


def options_of(command, folder, words):
    """The options, and the run's folder if its policy is to be read from its checkpoint.

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
        if command == "page":  # the run's own evaluation, played again
            saved.episodes = saved.eval_episodes or 20
        args = vldac.parse_args(words, Args, saved)
        if command in ("run", "page") and args.adapter == started_from:
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
    """Play, write the result or the page, and say it in a line."""
    args, interrupted = options_of(command, folder, words)
    vldac.check_world(args)
    films = {} if command == "page" else None
    result = evaluate("run" if command == "page" else command, args, interrupted, films)
    player = command
    if command == "model":
        player = "-".join(Path(name).name for name in (args.model, args.adapter) if name)
    name = "-".join(filter(None, [args.env, player, result["mode"], str(args.episodes)]))
    results = folder / "eval" if folder else Path("results")
    out = results / (re.sub(r"[^\w.-]+", "-", name) + ".json")
    if command == "page":
        out = folder / "page.html"
    out = Path(args.out or out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(folder, result, films) if command == "page" else json.dumps(result) + "\n")
    invalid, tokens = result["summary"]["invalid_action_rate"], result["summary"]["response_tokens"]
    print(f"{describe(result)}, invalid {invalid:.3f}, {tokens:.1f} tokens per response -> {out}")


def film(folder, words):
    """An animation of each episode as it was before training and as it is after."""
    films = []
    for command in ("start", "run"):
        args, interrupted = options_of(command, folder, ["--episodes=1", *words])
        vldac.check_world(args)
        films.append({})
        evaluate(command, args, interrupted, films[-1])
    before, after = films
    for seed in sorted(before):
        animate(before[seed], after[seed], args.out or folder / f"film-{seed}.gif")


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    try:
        match words:
            case ["film", folder, *options]:
                film(Path(folder), options)
            case ["run" | "start" | "page" as command, folder, *options]:
                report(command, Path(folder), options)
            case ["model" | "random" | "hint" as command, *options]:
                report(command, None, options)
            case ["compare", a, b]:
                print(compare(a, b))
            case ["table", *folders] if folders:
                print(table(folders))
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
