"""How good is it, really: success on fixed seeds with intervals, comparisons, curves, episodes to look at.

    python eval.py run runs/NAME                       what a run has learned, in its own world
    python eval.py start runs/NAME                     what it started from, on the same episodes
    python eval.py page runs/NAME                      a page to look at: curves, and episodes step by step
    python eval.py model --env OneRoom --model MODEL   any model; with an adapter: --adapter FOLDER
    python eval.py random --env OneRoom                random actions: the floor
    python eval.py hint --env OneRoom                  the world's hints: a scripted policy
    python eval.py compare A.json B.json               paired difference of two results, exact McNemar test
    python eval.py table runs/A runs/B                 the figures of runs, a row each
    python eval.py methods VL-DAC runs/*               each method against VL-DAC, paired by seed
    python eval.py unpaired VL-DAC runs/*              the same, of any seeds
    python eval.py plot runs/A runs/B random.json      learning curves, results as dashed lines

All but the last five play --episodes 200 on seeds 0, 1, 2, ..., which training never draws, by the code that
trains, and write to --out FILE. `page` plays as many as the run's own evaluations (20 if it had none). --mode
greedy takes the likeliest tokens. Options given here win over those of the run. For plot, --out FILE comes
last. A run may be one of RL4VLM or of LOOP (assets/) too.
"""

import base64
import dataclasses
import html
import io
import itertools
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
from torch.nn.utils.rnn import pad_sequence

import envs
import vldac
from envs import UserError


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, and three of an evaluation."""

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


def sign_flip(differences) -> float:
    """Exact two-sided p of the hypothesis that paired differences are symmetric about 0 (Fisher 1935).

    Under it each difference is as likely with the opposite sign: p is the share of the 2^n choices of signs
    whose sum is as far from 0 as the one seen, or farther. So three pairs cannot give less than 1/4.

    >>> sign_flip([3, 1, 2]), sign_flip([3, -1, 2])  # the eight sums are 6, 4, 2, 0, 0, -2, -4, -6
    (0.25, 0.5)
    """
    sums = np.zeros(1)
    for x in differences:
        sums = np.concatenate([sums + x, sums - x])
    return np.mean(abs(sums) >= abs(sum(differences)) - 1e-9).item()


def interval_of_mean(differences, alpha=0.05) -> tuple[float, float]:
    """From the lowest to the highest mean which `sign_flip` does not reject at the level alpha.

    A mean is not rejected if the test of (differences - mean) gives p > alpha. The ends are the k-th smallest
    and the k-th largest of the means of all subsets, k = alpha / 2 * 2^n rounded down (Hartigan 1969). At the
    level 0.05, fewer than six differences reject nothing.

    >>> interval_of_mean([0, 2, 4, 6, 8, 10, 12])  # k = 3; the smallest are 0, (0 + 2) / 2, and 2
    (2.0, 10.0)
    """
    sums, sizes = np.zeros(1), np.zeros(1)
    for x in differences:
        sums, sizes = np.concatenate([sums, sums + x]), np.concatenate([sizes, sizes + 1])
    means = np.sort(sums[1:] / sizes[1:])  # without the empty subset
    k = int(alpha / 2 * 2 ** len(differences))
    return (means[k - 1].item(), means[-k].item()) if k else (-math.inf, math.inf)


def rank_sum(a, b) -> float:
    """Exact two-sided p of the hypothesis that two groups come from one distribution (Wilcoxon 1945).

    Under it any choice of len(a) of the values is as likely: p is the share of the choices whose sum of
    ranks is as far from its mean as that of a, or farther. Equal values share a rank.

    >>> rank_sum([1, 2], [3, 4, 5])  # 1 + 2 is 3 below the mean; of the ten sums 4 + 5 is as far
    0.2
    """
    values = np.array([*a, *b])
    ranks = (values[:, None] > values).sum(1) * 2 + (values[:, None] == values).sum(1)  # doubled: integers
    ways = np.zeros((len(a) + 1, ranks.sum() + 1))  # to choose so many values with this sum of ranks
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    mean = len(a) * ranks.sum() / len(values)
    distance = abs(np.arange(ways.shape[1]) - mean)
    far = distance >= distance[ranks[: len(a)].sum()] - 1e-9
    return (ways[-1, far].sum() / ways[-1].sum()).item()


def holm(ps) -> list[float]:
    """P-values corrected for their number (Holm 1979): the smallest times n, the next times n - 1, ...

    None is below the one before it.

    >>> holm([0.01, 0.04, 0.03])  # 3 * 0.01, then 2 * 0.03, and not 1 * 0.04
    [0.03, 0.06, 0.06]
    >>> holm([0.7, 0.8])
    [1.0, 1.0]
    """
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, k in enumerate(np.argsort(ps)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[k]))
        corrected[k] = largest
    return corrected


def summarize(episodes) -> dict:
    """Every figure of a result, from its episodes."""
    result = vldac.summary(episodes)
    successes = sum(episode["success"] for episode in episodes)
    steps = sum(episode["length"] for episode in episodes)
    tokens = sum(episode["tokens"] for episode in episodes)
    return result | {"interval": wilson(successes, len(episodes)), "response_tokens": tokens / steps}


def rate_of(result):
    """The name of a result's rate, and the rate: in a world without a flag, that of positive returns."""
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
    summary = result["summary"]
    name, rate = rate_of(result)
    low, high = summary["interval"]
    player = ", ".join(filter(None, [result["player"], result["mode"]]))
    return (
        f"{result['task']['env']}, {player}, {len(result['episodes'])} episodes: "
        f"{name} {rate:.3f} ({low:.3f}-{high:.3f}), "
        f"return {summary['episodic_return']:.3f}, length {summary['episodic_length']:.1f}"
    )


# --------------------------------------------------------------------------- what was seen, thought and done


@dataclass
class Moment:
    """A step of a recorded episode."""

    png: bytes  # what was seen
    response: str
    tokens: list[tuple[str, float]]  # of the response: text and probability
    action: str | None
    reward: float
    value: float | None  # the critic's, before the step; None if there is no critic


@dataclass
class Recording:
    """An episode."""

    moments: list[Moment]
    last_png: bytes = b""
    result: dict | None = None

    def outcome(self):
        """In words, and a colour."""
        if not self.result["flagged"]:
            return "no success flag", "gray"
        return ("success", "green") if self.result["success"] else ("failure", "red")


def png(frame) -> bytes:
    """A frame as a file."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "png")
    return file.getvalue()


def tokens_of(policy, tokens, logprobs) -> list[tuple[str, float]]:
    """A response's tokens as text, each with its probability; the end of the turn is a paragraph mark.

    Tokens that are parts of a letter count as one.
    """
    found, shown, probability = [], "", 1.0
    for r in range(len(tokens)):
        probability *= math.exp(logprobs[r])
        [text] = policy.decode([tokens[: r + 1]])
        if torch.isin(tokens[r], policy.stop_ids):
            text += "\u00b6"
        if not text.endswith("\ufffd") or r + 1 == len(tokens):  # else the letter is not complete
            found.append((text[len(shown) :], probability))
            shown, probability = text, 1.0
    return found


def recorded(act, recordings):
    """The same as `act`; it also adds to `recordings`, by seed, what is played."""

    def recording_act(policy, players):
        frames = [player.observations[-1]["image"] for player in players]
        steps = act(policy, players)
        responses = [step.tokens for step in steps]
        tokens = pad_sequence(responses, batch_first=True)  # (B, R)
        mask = pad_sequence([torch.ones_like(response) for response in responses], batch_first=True)
        with torch.no_grad():
            logprobs, values = policy([step.prompt for step in steps], tokens, mask)
        for i, (player, step) in enumerate(zip(players, steps, strict=True)):
            said = tokens_of(policy, step.tokens, logprobs[i])
            value = values[i].item() if policy.args.vf_coef > 0 else None  # LOOP has no critic
            moment = Moment(png(frames[i]), step.response, said, step.action, step.reward, value)
            recording = recordings.setdefault(player.seed, Recording([]))
            recording.moments.append(moment)
            if step.done:
                recording.last_png = png(player.observations[-1]["image"])
                recording.result = player.result()
        return steps

    return recording_act


# --------------------------------------------------------------------------------------------- the players


def scripted(command):
    """A step like `vldac.act`, for a player without a model: random actions, or the world's hints."""

    def act(_, players):
        steps = []
        for player in players:
            if command == "hint":
                action = player.describe("hint")
            else:
                # A function of the seed, so that it does not matter what plays beside it.
                action = player.random_action(random.Random(f"{player.seed} {len(player.actions)}"))
            reward, done = player.step(action)
            steps.append(vldac.Step({}, torch.zeros(0), "", action, reward, done))
        return steps

    return act


# What two results must share to be compared.
TASK = ("env", "split", "max_episode_steps", "invalid_reward")


def evaluate(command, args, checkpoint=None, recordings=None):
    """Play the episodes, and record them in `recordings`, if it is given. Returns the result.

    checkpoint  the folder of the run whose checkpoint.pt has the weights; None: those of --adapter, or none
    """
    envs.check_world(vldac.Player(args).env, args.env_timeout)
    result = {"player": command, "mode": None, "model": None, "weights": None, "seed": args.seed}
    if command in ("random", "hint"):
        act, policy = scripted(command), None
    else:
        act = vldac.act
        policy, weights = vldac.VLMPolicy(args), args.adapter
        if checkpoint:
            weights = f"checkpoint.pt, update {vldac.load_weights(checkpoint, policy)['update']}"
        print(f"weights: {weights or 'the model itself'}")
        result |= {"mode": args.mode, "model": args.model, "weights": weights}
        if args.mode == "greedy":  # the others are the defaults, at which transformers does not warn
            policy.vlm.generation_config.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)
    if recordings is not None:
        act = recorded(act, recordings)
    players = [vldac.Player(args) for _ in range(min(args.episodes, args.num_envs))]
    players[0].reset(0)
    if command == "hint" and players[0].describe("hint") is None:
        raise UserError(f"{args.env} gives no hint")
    result["task"] = {name: getattr(args, name) for name in TASK}
    result["task"]["max_episode_steps"] = players[0].info["left"]  # the limit that holds
    episodes = vldac.evaluate(policy, players, range(args.episodes), act)
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
small {{ overflow-wrap: anywhere }}  td {{ padding: .1rem .8rem .1rem 0 }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem }}
.table, .strip {{ overflow-x: auto }}  .cards {{ display: flex; width: max-content; padding-bottom: .5rem }}
figure {{ margin: 0 }}  .charts svg {{ width: 100% }}  .strip svg {{ display: block; height: 58px }}
.cards figure {{ box-sizing: border-box; width: 192px; margin: 0 4px; border: 1px solid #8888; padding: 6px }}
.cards img {{ width: 100%; image-rendering: pixelated }}
.bad {{ border-color: #d33 !important; background: #d332 }}  b {{ color: #37d }}  .bad b {{ color: #d33 }}
.p50 {{ background: #fc05 }}  .p10 {{ background: #f808 }}  .p0 {{ background: #f24a }}
</style><h1>{title}</h1><p><small>{options}</small></p>
<h2>Training</h2><div class="charts">{charts}</div>
<h2>Evaluations on fixed seeds</h2><div class="table"><table>{evaluations}</table></div>
<h2>Episodes</h2><p>{played}. Below: the first 5 failures and 3 successes.
{critic}Marked are tokens with a probability below <span class="p50">0.9</span>,
<span class="p10">0.5</span> and <span class="p0">0.1</span>; &para; ends a response.</p>
{strips}"""

CRITIC = """V is the critic's value before the step. A is the step's advantage, which all tokens of the
response share: GAE over this episode with &gamma; {gamma} and &lambda; {gae_lambda}, before it is normalised.
Above the frames: V as a line, rewards as bars.
"""

CHARTS = {
    "charts/success_rate": "success, last 100 episodes",
    "charts/positive_return": "positive return, last 100 episodes",
    "charts/episodic_return": "return, last 100 episodes",
    "charts/invalid_action_rate": "responses without admissible action",
    "losses/kl_base": "KL to the model before training, nats per token",
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


CARD = 200  # pixels from one step of a strip to the next


def picture(png) -> str:
    """A frame as the source of an image; a large one is reduced, so that the page stays small."""
    kind, image = "png", Image.open(io.BytesIO(png))
    if max(image.size) > 2 * CARD:
        image.thumbnail((2 * CARD, 2 * CARD))
        file = io.BytesIO()
        image.save(file, "webp", quality=50)
        kind, png = "webp", file.getvalue()
    return f"data:image/{kind};base64," + base64.b64encode(png).decode()


def colored(tokens) -> str:
    """A response, its less likely tokens marked; neighbours of one colour are one element.

    >>> colored([("I", 0.99), (" am", 0.95), (" <", 0.3), ("b>", 0.2), ("!", 0.01)])
    'I am<span class="p10"> &lt;b&gt;</span><span class="p0">!</span>'
    """

    def kind(token):
        _, probability = token
        if probability >= 0.9:
            return ""
        return "p50" if probability >= 0.5 else "p10" if probability >= 0.1 else "p0"

    parts = []
    for name, stretch in itertools.groupby(tokens, kind):
        text = html.escape("".join(text for text, _ in stretch))
        parts.append(f'<span class="{name}">{text}</span>' if name else text)
    return "".join(parts)


def values_and_rewards(moments) -> str:
    """The drawing above a strip: the critic's values as a line, the rewards as bars."""
    rewards = [moment.reward for moment in moments]
    values = [moment.value for moment in moments if moment.value is not None]
    high, low = max(0.0, *rewards, *values), min(0.0, *rewards, *values)
    scale = 50 / max(high - low, 1e-3)  # pixels
    zero = scale * high
    width = CARD * len(moments)
    bars, points = "", []
    for number, moment in enumerate(moments):
        x = CARD * number + CARD // 2
        if moment.reward:
            bars += f"M{x} {zero:.1f}v{-scale * moment.reward:.1f}"
        if moment.value is not None:
            points.append(f"{x} {scale * (high - moment.value):.1f}")
    line = f"M{'L'.join(points)}h0" if points else ""  # h0: else a single point is not drawn
    return (
        f'<svg viewBox="0 -4 {width} 58" style="width: {width}px"><path d="M0 {zero:.1f}h{width}" '
        f'stroke="#8888"/><path d="{bars}" stroke="#8a8" stroke-width="12"/>'
        f'<path d="{line}" fill="none" stroke="#37d" stroke-width="2" stroke-linecap="round"/>'
        f'<g fill="currentColor" font-size="10"><text y="6">{high:.3g}</text>'
        f'<text y="52">{low:.3g}</text></g></svg>'
    )


def strip(seed, recording, gamma, gae_lambda) -> str:
    """An episode, frame by frame."""
    moments = recording.moments
    advantages = [None] * len(moments)
    if moments[0].value is not None:
        column = torch.tensor([[moment.reward, moment.value] for moment in moments])  # (T, 2)
        dones = torch.zeros(len(moments), 1)
        dones[-1] = 1
        rewards, values = column[:, :1], column[:, 1:]  # (T, 1)
        advantages, _ = vldac.gae(rewards, values, torch.zeros(1), dones, gamma, gae_lambda)
        advantages = advantages[:, 0].tolist()
    cards = []
    for number, (moment, advantage) in enumerate(zip(moments, advantages, strict=True), 1):
        critic = "" if advantage is None else f"<br>V {moment.value:.2f}, A {advantage:+.2f}"
        cards.append(
            f'<figure class="{"" if moment.action else "bad"}"><img alt="" src="{picture(moment.png)}">'
            f"<small>{colored(moment.tokens)}</small><br>"
            f"<b>{html.escape(moment.action or '(no admissible action)')}</b><br>"
            f"<small>step {number}, reward {moment.reward:.2f}{critic}</small></figure>"
        )
    outcome, _ = recording.outcome()
    result = recording.result
    heading = f"Seed {seed}: {outcome}, return {result['return']:.2f}, {result['length']} steps"
    cards = f'<div class="cards">{"".join(cards)}</div>'
    return f'<h3>{heading}</h3><div class="strip">{values_and_rewards(moments)}{cards}</div>'


def page(folder, result, recordings) -> str:
    """One self-contained page about a run: options, curves, evaluations, and episodes, failures first."""
    rows, options = load_log(folder)
    charts, evaluations = [], []
    for key, title in CHARTS.items():
        points = [(row["global_step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            is_rate = key in ("charts/success_rate", "charts/positive_return")
            charts.append(chart(title, points, top=1.0 if is_rate else 1e-3))
    for row in rows:
        cells = [f"{key[5:].replace('_', ' ')} {x:.3g}" for key, x in row.items() if key.startswith("eval/")]
        if cells:
            evaluations.append(f"<tr><td>after {row['global_step']:,} steps<td>" + "<td>".join(cells))
    moments = [moment for recording in recordings.values() for moment in recording.moments]
    critic = any(moment.value is not None for moment in moments)
    discounts = {name: options[name] for name in ("gamma", "gae_lambda")}
    won = [seed for seed in sorted(recordings) if recordings[seed].result["success"]]
    lost = [seed for seed in sorted(recordings) if seed not in won]
    return PAGE.format(
        title=html.escape(folder.resolve().name),
        options=html.escape(", ".join(f"{name} {x}" for name, x in options.items() if x is not None)),
        charts="".join(charts) or "no update is finished yet",
        evaluations="".join(evaluations) or "<tr><td>none",
        played=html.escape(f"{describe(result)}; weights: {result['weights']}"),
        critic=CRITIC.format(**options) if critic else "",
        strips="".join(strip(seed, recordings[seed], **discounts) for seed in lost[:5] + won[:3]),
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
    label: str  # the run's name without world and seed
    seed: int
    budget: int  # environment steps that were planned
    ended: int | None  # where a run ended before them
    steps: np.ndarray  # (updates,)
    rates: np.ndarray  # (updates,) success, of the last 100 episodes
    before: float | None  # success on the fixed seeds
    after: float | None
    parsed: float  # of the responses at the end
    options: dict  # but for those in which the runs of a group may differ
    agreement: float | None  # true thoughts at the end

    def whole(self):
        """Steps and rates from step 0 to the budget.

        Until the first rate it is that before training (if it was not measured, the first rate). A run that
        ended before its budget keeps its last rate, as it keeps its last weights.
        """
        start = self.rates[0] if self.before is None else self.before
        end = np.interp(self.budget, self.steps, self.rates)  # LOOP's last episodes may end beyond the budget
        inside = self.steps < self.budget
        steps = [0, min(self.steps[0], self.budget), *self.steps[inside], self.budget]
        return steps, [start, start, *self.rates[inside], end]

    def mean(self) -> float:
        """Success in the mean over the budget: the area under `whole`, divided by the budget."""
        steps, rates = self.whole()
        return np.trapezoid(rates, steps).item() / self.budget


# What runs of one name may differ in, besides their seed.
MAY_DIFFER = "seed run_name runs_dir commit device env_timeout track micro_batch_size eval_every".split()


def load_curve(folder) -> Curve:
    """A run's curve; UserError if there is none yet."""
    rows, args = load_log(folder)
    last = {}
    for row in rows:
        last |= row  # the last value of each key
    name = "success_rate" if last.get("charts/success_rate") is not None else "positive_return"
    key = f"charts/{name}"
    points = [(row["global_step"], row[key]) for row in rows if row.get(key) is not None]
    if not points:
        raise UserError(f"{folder} has no success rate yet")
    steps, rates = np.array(points).T
    world = re.sub(r"[^\w.-]+", "-", args["env"])  # as in the run's name
    label = folder.name.removeprefix(f"{world}-").removesuffix(f"-{args['seed']}")
    evaluations = []
    for row in rows:
        if f"eval/{name}" in row:
            evaluations.append({key.removeprefix("eval/"): x for key, x in row.items()})
    end = evaluations[-1] if len(evaluations) > 1 else {}
    path = folder / "eval" / f"{world}-run-sampled-200.json"
    if path.exists():
        result = load_result(path)
        of_the_end = f"checkpoint.pt, update {last['update']}"
        if result.get("weights") == of_the_end and result["task"].get("split") == "eval":
            end = result["summary"]
    a_rollout = args["num_envs"] * args["num_steps"]  # what is left at the end may be less
    return Curve(
        world=args["env"],
        label=label,
        seed=args["seed"],
        budget=args["total_timesteps"],
        ended=last["global_step"] if last["global_step"] + a_rollout <= args["total_timesteps"] else None,
        steps=steps,
        rates=rates,
        before=evaluations[0][name] if evaluations else None,
        after=end.get(name),
        parsed=1 - end.get("invalid_action_rate", last["charts/invalid_action_rate"]),
        options={name: x for name, x in args.items() if name not in MAY_DIFFER},
        agreement=None if args.get("words") else end.get("thought_agreement"),  # filler.py's are longer
    )


def lines_of_table(names, lines) -> str:
    """In Markdown. None is a dash."""
    lines = [names, ["---"] * len(names), *lines]
    return "\n".join(f"| {' | '.join('-' if x is None else x for x in line)} |" for line in lines)


def rounded(x, digits=2) -> str | None:
    return None if x is None else f"{x:.{digits}f}"


def of_p(p) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def table(folders) -> str:
    """A row for every run."""
    lines = []
    for folder in folders:
        curve = load_curve(Path(folder))
        solved = curve.steps[curve.rates >= 0.8]
        lines.append(
            [
                curve.world,
                curve.label if curve.ended is None else f"{curve.label}, ended at step {curve.ended:,}",
                str(curve.seed),
                rounded(curve.before),
                rounded(curve.after, 3),
                rounded(curve.rates[-1]),
                rounded(curve.mean(), 3),
                f"{solved[0]:,.0f}" if len(solved) else "never",
                rounded(curve.parsed, 3),
                rounded(curve.agreement),
            ]
        )
    names = ["world", "run", "seed", "before", "after", "last 100", "mean", "steps to 0.8"]
    return lines_of_table([*names, "parsed", "true thoughts"], lines)


def paired(baseline, folders):
    """Runs by (world, method), each by seed, and the differences of their means from the baseline's."""
    groups, differences = {}, {}
    for group in groups_of([load_curve(Path(folder)) for folder in folders]):
        groups[group[0].world, group[0].label] = sorted(group, key=lambda curve: curve.seed)
    for (world, label), group in groups.items():
        base = groups.get((world, baseline), [])
        if [(curve.seed, curve.budget) for curve in group] != [(curve.seed, curve.budget) for curve in base]:
            raise UserError(f"the seeds or budgets of {label} in {world} are not those of {baseline}")
        pairs = zip(group, base, strict=True)
        differences[world, label] = [curve.mean() - other.mean() for curve, other in pairs]
    return groups, differences


def number_of(group) -> str:
    """How many runs, and how many of them ended early."""
    ended = sum(curve.ended is not None for curve in group)
    return f"{len(group)}, {ended} ended early" if ended else str(len(group))


def means_of(group) -> list[str | None]:
    """What a table says of several runs: before, after (worst and best run), parsed, true thoughts."""
    cells = []
    for name, digits in (("before", 2), ("after", 3), ("parsed", 3), ("agreement", 2)):
        values = [getattr(curve, name) for curve in group]
        cell = None if None in values else rounded(np.mean(values), digits)
        if cell and name == "after":
            cell += f" ({rounded(min(values), digits)}-{rounded(max(values), digits)})"
        cells.append(cell)
    return cells


def methods(baseline, folders) -> str:
    """A row for every method: its means over seeds, and its paired differences from the baseline.

    In brackets, the worst and the best seed. With six seeds or more the differences are tested; with fewer,
    which cannot give p < 0.05, each of them is shown.
    """
    groups, differences = paired(baseline, folders)
    worlds = dict.fromkeys(world for world, _ in groups)
    few = min(map(len, groups.values())) < 6
    columns = [f"minus {baseline}"] + (["seed by seed"] if few else ["95 % interval", "p", "p (Holm)"])
    if len(groups) == len(worlds):
        columns = []
    lines = []
    for world in worlds:
        others = [label for w, label in groups if w == world and label != baseline]
        ps = [sign_flip(differences[world, label]) for label in others]
        cells = {baseline: [None] * len(columns)}
        for label, p, corrected in zip(others, ps, holm(ps), strict=True):
            pairs = differences[world, label]
            low, high = interval_of_mean(pairs)
            test = [f"{low:+.3f} to {high:+.3f}", of_p(p), of_p(corrected)]
            each = [" ".join(f"{difference:+.2f}" for difference in pairs)]
            cells[label] = [f"{np.mean(pairs):+.3f}", *(each if few else test)]
        for label in [baseline, *others]:
            group = groups[world, label]
            mean = rounded(np.mean([curve.mean() for curve in group]), 3)
            lines.append([world, label, number_of(group), mean, *cells[label], *means_of(group)])
    names = ["world", "method", "runs", "mean", *columns, "before", "after", "parsed", "true thoughts"]
    if len(worlds) == 1:  # the caller knows it, and the table is wide
        names, lines = names[1:], [line[1:] for line in lines]
    return lines_of_table(names, lines)


def unpaired(baselines, folders) -> str:
    """A row for every method, whose runs are tested against all those of the baselines, of whatever seeds."""
    control, others = [], []
    for group in groups_of([load_curve(Path(folder)) for folder in folders]):
        if group[0].label in baselines:
            control += group
        else:
            others.append(group)
    found = {curve.label for curve in control}
    if found != set(baselines) or not others or len({group[0].world for group in [control, *others]}) > 1:
        raise UserError(f"this compares runs of one world with those of {' and '.join(baselines)}")
    expected = [curve.mean() for curve in control]
    ps = [rank_sum([curve.mean() for curve in group], expected) for group in others]
    lines = [[", ".join(baselines), *each_and_mean(control), None, None, None, *means_of(control)]]
    for group, p, corrected in zip(others, ps, holm(ps), strict=True):
        difference = np.mean([curve.mean() for curve in group]) - np.mean(expected)
        test = [f"{difference:+.3f}", of_p(p), of_p(corrected)]
        lines.append([group[0].label, *each_and_mean(group), *test, *means_of(group)])
    names = ["method", "runs", "each run", "mean", "difference", "p", "p (Holm)"]
    return lines_of_table([*names, "before", "after", "parsed", "true thoughts"], lines)


def each_and_mean(group) -> list[str]:
    means = [curve.mean() for curve in group]
    return [number_of(group), " ".join(f"{x:.2f}" for x in means), rounded(np.mean(means), 3)]


def groups_of(curves) -> list[list[Curve]]:
    """Curves that differ in the seed only, together, in the order of the first of them."""
    groups = {}
    for curve in curves:
        groups.setdefault((curve.world, curve.label), []).append(curve)
    for (world, label), group in groups.items():
        first = group[0].options
        for curve in group:
            different = [name for name, x in curve.options.items() if x != first.get(name)]
            if different:
                raise UserError(f"runs of {label} in {world} differ in {', '.join(different)}")
    return list(groups.values())


def new_figure(width, height):
    """An empty figure; UserError if the optional package is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def plot(paths, out):
    """Learning curves: a panel per world; seeds as thin lines, their mean as a thick one, results dashed."""
    results = {path: load_result(path) for path in paths if path.endswith(".json")}
    groups = groups_of([load_curve(Path(path)) for path in paths if not path.endswith(".json")])
    worlds = [group[0].world for group in groups] + [result["task"]["env"] for result in results.values()]
    worlds = list(dict.fromkeys(worlds))
    columns = min(2, len(worlds))
    rows = math.ceil(len(worlds) / columns)
    figure = new_figure(4.2 * columns, 0.3 + 2.3 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    axes = dict(zip(worlds, panels, strict=False))
    handles, colors = {}, {}  # by name: the same in every panel
    for group in groups:
        name = f"{group[0].label}, mean and each seed" if len(group) > 1 else group[0].label
        color = colors.setdefault(name, f"C{len(colors)}")
        start, end = max(curve.steps[0] for curve in group), min(curve.steps[-1] for curve in group)
        steps = np.unique(np.concatenate([curve.steps for curve in group]))
        steps = steps[(steps >= start) & (steps <= end)]  # those that all runs have reached
        rates = np.array([np.interp(steps, curve.steps, curve.rates) for curve in group])  # (runs, steps)
        axis = axes[group[0].world]
        (handles[name],) = axis.plot(steps, rates.mean(0), color=color, label=name)
        axis.plot(steps, rates.T, color=color, alpha=0.4, linewidth=0.8)
    for path, result in results.items():
        name = {"random": "random actions", "hint": "scripted policy"}.get(result["player"], Path(path).stem)
        color = colors.setdefault(name, f"C{len(colors)}")
        _, rate = rate_of(result)
        axis = axes[result["task"]["env"]]
        handles[name] = axis.axhline(rate, linestyle="--", color=color, label=name)
    for world, axis in axes.items():
        axis.set(
            title=world, xlabel="environment steps", ylabel="success", xlim=(0, None), ylim=(-0.02, 1.02)
        )
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
    for axis in panels[len(worlds) :]:
        axis.remove()
    figure.legend(
        handles=handles.values(), loc="outside lower center", ncols=2 * columns, fontsize=8, frameon=False
    )
    figure.savefig(out, dpi=200)
    print(out)


# --------------------------------------------------------------------------------------------- the program


NO_UPDATE = {"num_steps": 1, "minibatch_size": 1}  # no minibatches that would have to fit


def options_of_run(command, folder, words):
    """The options of an evaluation of a run, and its folder if its checkpoint has the weights, else None.

    The command line's > those of the run.
    """
    try:
        saved = vldac.load_args(folder, Args)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder} is not the folder of a run: {error}") from None
    saved = dataclasses.replace(saved, split="eval", track=False, **NO_UPDATE)
    if command == "page":
        saved.episodes = saved.eval_episodes or 20
    args = vldac.parse_args(words, Args, saved)
    if command == "start" or (command == "run" and args.adapter != saved.adapter):
        return args, None
    if args.adapter != saved.adapter:
        raise UserError(f"{command} shows the run's own weights and critic: it takes no --adapter")
    if not Path(folder, "checkpoint.pt").exists():
        raise UserError(f"{folder} has saved nothing yet: there is no checkpoint.pt")
    return args, folder


def options_of_model(command, words):
    """The options of an evaluation without a run: the command line's > those of vldac.py."""
    words = [*(f"--{name}={x}" for name, x in NO_UPDATE.items()), "--split=eval", *words]
    if command != "model":
        words = ["--model=tiny", *words]  # it is not loaded
    args = vldac.parse_args(words, Args)
    if command == "model" and args.model == "tiny":
        raise UserError("a toy belongs to a run: eval.py start runs/NAME, or give a --model")
    return args


def report(result, args, folder, content=None):
    """Write a result, or a page about it, and say it in a line."""
    player = result["player"]
    if player == "model":
        player = "-".join(filter(None, [args.model, args.adapter]))
    name = "-".join(filter(None, [args.env, player, result["mode"], str(args.episodes)]))
    out = folder / (re.sub(r"[^\w.-]+", "-", name) + ".json")
    if content:
        out = folder / "page.html"
    out = Path(args.out or out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(content or json.dumps(result) + "\n", encoding="utf-8")
    invalid, tokens = result["summary"]["invalid_action_rate"], result["summary"]["response_tokens"]
    print(f"{describe(result)}, invalid {invalid:.3f}, {tokens:.1f} tokens per response -> {out}")


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    try:
        match words:
            case ["run" | "start" as command, folder, *options]:
                args, checkpoint = options_of_run(command, Path(folder), options)
                report(evaluate(command, args, checkpoint), args, Path(folder, "eval"))
            case ["model" | "random" | "hint" as command, *options]:
                args = options_of_model(command, options)
                report(evaluate(command, args), args, Path("results"))
            case ["page", folder, *options]:
                args, checkpoint = options_of_run("page", Path(folder), options)
                recordings = {}
                result = evaluate("run", args, checkpoint, recordings)
                report(result, args, Path(folder), page(Path(folder), result, recordings))
            case ["compare", a, b]:
                print(compare(a, b))
            case ["table", *folders] if folders:
                print(table(folders))
            case ["methods", baseline, *folders] if folders:
                print(methods(baseline, folders))
            case ["unpaired", baselines, *folders] if folders:
                print(unpaired(baselines.split(","), folders))
            case ["plot", *paths, "--out", out] if paths:
                plot(paths, out)
            case ["plot", *paths] if paths:
                plot(paths, "curves.png")
            case _:
                print(__doc__)
                raise SystemExit(2)
    except UserError as error:
        vldac.refuse(error)


if __name__ == "__main__":
    main()
