"""Learning curves of runs, and the rates of results as dashed lines.

    python extras/plot.py runs/A runs/B random.json    --out FILE (curves.png) comes last

A panel per world. The mean of a method's seeds is a thick line. The seeds are thin lines, or, where a panel
has more than two methods, a band from the worst to the best. It needs matplotlib.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval as evaluation  # noqa: E402
from envs import UserError, check, exit_with  # noqa: E402


def load_log(folder):
    """The rows and the options of a run; UserError if it is not the folder of one."""
    try:
        lines = Path(folder, "log.jsonl").read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # else it is half written
        options = json.loads(Path(folder, "args.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not the folder of a run: {error}") from None
    check(rows, f"{folder} has logged nothing yet")
    return rows, options


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
    check(known, f"{world}, {method}: there is no success rate yet")
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


def plot(curves, results, out):
    """Learning curves: a panel per world; the mean of the seeds as a thick line, results dashed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: pip install matplotlib") from None
    for result in results:
        check(result["summary"]["success_rate"] is not None, "a result without success flags has no rate")
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
    colors = {"random actions": "0.5", "scripted player": "0"}  # others: the next ones of matplotlib's cycle
    lines, marks = {}, ["thick: the mean"]
    for (world, method), runs in groups.items():
        color = colors.setdefault(method, f"C{len(colors) - 2}")
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        steps = steps[steps <= min(run.steps[-1] for run in runs)]  # those that all runs have reached
        rates = np.array([np.interp(steps, run.steps, run.rates) for run in runs])  # (runs, steps)
        (lines[method],) = axes[world].plot(steps, rates.mean(0), color=color, label=method)
        if sum(other == world for other, _ in groups) > 2:
            axes[world].fill_between(steps, rates.min(0), rates.max(0), color=color, alpha=0.12, linewidth=0)
            marks.append("band: worst to best")
        else:
            marks.append("thin: a seed")
            for run in runs:
                axes[world].plot(run.steps, run.rates, color=color, alpha=0.4, linewidth=0.8)
    for result in results:
        command = result["command"]
        name = {"random": "random actions", "hint": "scripted player"}.get(command, command)
        color = colors.setdefault(name, f"C{len(colors) - 2}")
        rate = result["summary"]["success_rate"]
        axis = axes[world_name(result["task"]["env"])]
        lines[name] = axis.axhline(rate, linestyle="--", color=color, label=name)
    several = any(len(runs) > 1 for runs in groups.values())
    title = "; ".join(dict.fromkeys(marks)) if several else None
    small = {"fontsize": 8, "title_fontsize": 8, "frameon": False}
    figure.legend(handles=lines.values(), loc="outside lower center", ncols=2, title=title, **small)
    figure.savefig(out, dpi=200)
    print(out)


def plot_files(paths, out):
    """The plot of runs' folders and of results."""
    results = [evaluation.load_result(path) for path in paths if path.endswith(".json")]
    curves = [load_curve(path) for path in paths if not path.endswith(".json")]
    plot(curves, results, out)


def main(argv=None):
    try:
        match sys.argv[1:] if argv is None else argv:
            case [*paths, "--out", out] if paths:
                plot_files(paths, out)
            case [*paths] if paths and not paths[0].startswith("-"):
                plot_files(paths, "curves.png")
            case _:
                print(__doc__)
                raise SystemExit(2)
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
