"""The figure of a comparison: learning curves, and the difference of every seed from the baseline.

python assets/paired.py VL-DAC assets/logs/OneRoom-*-2? --out assets/methods.png    (pip install matplotlib)
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval as evaluation  # noqa: E402
import vldac  # noqa: E402


def draw(baseline, folders, out):
    from matplotlib.figure import Figure

    groups, differences = evaluation.paired(baseline, folders)
    world, *more = {world for world, _ in groups}
    if more:
        raise vldac.envs.UserError("a figure is of one world")
    others = [label for _, label in groups if label != baseline]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curves, pairs = figure.subplots(1, 2, width_ratios=[1.2, 1])
    for number, label in enumerate([baseline, *others]):
        group, color = groups[world, label], f"C{number}"
        budget = group[0].budget
        steps = np.linspace(0, budget, 400)
        rates = np.array([np.interp(steps, *curve.whole()) for curve in group])  # (seeds, steps)
        for one in rates:
            curves.plot(steps, one, color=color, alpha=0.15, linewidth=0.7)
        curves.plot(steps, rates.mean(0), color=color, linewidth=2, label=label)
        if label == baseline:
            continue
        d = differences[world, label]
        y = len(others) - number
        low, high = evaluation.interval_of_mean(d)  # without end for fewer than six seeds, and not drawn
        pairs.plot([low, high], [y, y], color=color, linewidth=6, alpha=0.25, solid_capstyle="butt")
        pairs.plot(d, np.full(len(d), y), "o", color=color, markersize=4, alpha=0.8)
        pairs.plot(np.mean(d), y, "|", color="black", markersize=18)
    seeds = len(groups[world, baseline])
    curves.set(
        title=f"{world}, mean of {seeds} seeds (thin: each)", xlabel="environment steps", ylim=(-0.02, 1.02)
    )
    curves.set_ylabel("success of the last 100 episodes")
    curves.xaxis.set_major_formatter("{x:,.0f}")
    curves.legend(frameon=False, fontsize=8)
    pairs.axvline(0, color="gray", linewidth=0.8)
    legend = "a dot per seed; |: mean" + ("; bar: 95 % interval" if seeds >= 6 else "")
    pairs.set(title=f"mean success minus that of {baseline}", xlabel=legend)
    pairs.set_yticks(range(len(others)), [*reversed(others)])
    pairs.set_ylim(-0.6, len(others) - 0.4)
    for axis in (curves, pairs):
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=200)
    print(out)


def main(*words):
    match words:
        case [baseline, *folders, "--out", out] if folders:
            try:
                draw(baseline, folders, out)
            except vldac.envs.UserError as error:
                vldac.refuse(error)
        case _:
            print(__doc__)
            raise SystemExit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
