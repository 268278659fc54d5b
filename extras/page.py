"""A page about a run, to look at: its curves and evaluations, and episodes step by step.

    python extras/page.py runs/NAME    takes the options of `eval.py run`

It writes runs/NAME/page.html, or --out FILE. It plays as many episodes as the run's own evaluations (20 if it
had none), and shows failures first, with V, the step's advantage and the less likely tokens of each response.
"""

import base64
import dataclasses
import html
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plot import load_log  # noqa: E402
from replaced import replaced  # noqa: E402

import eval as evaluation  # noqa: E402
import vldac  # noqa: E402
from envs import UserError, check, exit_with  # noqa: E402


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


@torch.no_grad()
def score(policy, steps):
    """Complete the steps: log-probabilities and values, by forward passes as large as in training."""
    for start in range(0, len(steps), policy.args.micro_batch_size):
        micro_batch = steps[start : start + policy.args.micro_batch_size]
        prompts, responses = [step.prompt for step in micro_batch], [step.tokens for step in micro_batch]
        logprobs, _, values = policy(prompts, responses)
        for step, padded, value in zip(micro_batch, logprobs, values.tolist(), strict=True):
            step.logprobs = padded[: len(step.tokens)]
            step.value = value


def record(command, args, checkpoint=None):
    """An evaluation's result, and the recordings of its episodes by seed."""
    recordings = {}
    act = vldac.act

    def act_and_record(policy, players):
        frames = [player.observations[-1]["image"] for player in players]
        steps = act(policy, players)
        score(policy, steps)
        for player, step, frame in zip(players, steps, frames, strict=True):
            texts = [policy.tokenizer.decode(token) for token in step.tokens]
            tokens = list(zip(texts, step.logprobs.exp().tolist(), strict=True))
            recording = recordings.setdefault(player.seed, Recording([]))
            kept = dataclasses.replace(step, prompt={})
            recording.moments.append(Moment(picture(frame), kept, tokens))
            if step.done:
                recording.last_image = picture(player.observations[-1]["image"])
                recording.result = player.result()
        return steps

    with replaced(act=act_and_record):
        result = evaluation.make_result(command, args, checkpoint)
    return result, recordings


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
        critic = "" if step.return_ is None else f"<br>V {step.value:.2f}, A {step.return_ - step.value:+.2f}"
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
        played=html.escape(f"{evaluation.result_line(result)}; weights: {result['weights']}"),
        critic=CRITIC.format(**vars(args)) if args.vf_coef > 0 else "",
        strips="".join(strip(seed, recordings[seed]) for seed in lost[:5] + won[:3]),
    )


def main(argv=None):
    folder, *options = sys.argv[1:] if argv is None else argv
    try:
        episodes = vldac.load_args(folder).eval_episodes or 20
        args, checkpoint = evaluation.options_of_run("run", Path(folder), options, episodes)
        check(checkpoint, "a page shows the run's own weights and critic: it takes no --adapter")
        result, recordings = record("run", args, checkpoint)
        out = Path(args.out or Path(folder, "page.html"))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(Path(folder), args, result, recordings), encoding="utf-8")
        print(f"{evaluation.result_line(result)} -> {out}")
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        raise SystemExit(__doc__)
    main()
