"""The figures of the comparisons (pip install matplotlib).

    python assets/paired.py VL-DAC assets/logs/OneRoom-*-2? --out assets/methods.png

draws learning curves, and the difference of every seed from the baseline;

    python assets/paired.py words assets/logs/OneRoom-*-2? --out assets/words.png

learning curves for every number of words that filler.py adds to a thought, and the mean success of each run;

    python assets/paired.py means VL-DAC,other-noise assets/logs/OneRoom-*-2? --out assets/details.png

the mean success of each run alone, for many methods; a line is at the mean of the baselines' runs.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval as evaluation  # noqa: E402
import vldac  # noqa: E402


def draw_mean(axis, group, color, label):
    """The mean learning curve of a method's runs as a thick line, and each as a thin one."""
    steps = np.linspace(0, group[0].budget, 400)
    rates = np.array([np.interp(steps, *curve.whole()) for curve in group])  # (runs, steps)
    axis.plot(steps, rates.T, color=color, alpha=0.15, linewidth=0.7)
    axis.plot(steps, rates.mean(0), color=color, linewidth=2, label=label)


def label_curves(axis):
    axis.set(xlabel="environment steps", ylabel="success of the last 100 episodes", ylim=(-0.02, 1.02))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.legend(frameon=False, fontsize=8)


def draw_means(axis, groups, colors):
    """The mean success of each run as a dot, a row for each method."""
    for row, (method, group) in enumerate(groups.items()):
        means = [curve.mean() for curve in group]
        axis.plot(means, [-row] * len(group), "o", color=colors[method], markersize=4, alpha=0.8)
        axis.plot(np.mean(means), -row, "|", color="black", markersize=18)
    axis.set_title("mean success (a dot per seed; |: mean)", fontsize=10)
    axis.set(xlim=(0, 1), ylim=(0.6 - len(groups), 0.6))
    axis.set_yticks([-row for row in range(len(groups))], [*groups])
    axis.grid(alpha=0.3)


def draw(baseline, folders, out):
    groups, differences = evaluation.paired(baseline, folders)
    world, *more = {world for world, _ in groups}
    if more:
        raise vldac.envs.UserError("a figure is of one world")
    others = [label for _, label in groups if label != baseline]
    figure = evaluation.new_figure(9, 3.6)
    curves, pairs = figure.subplots(1, 2, width_ratios=[1.2, 1])
    for number, label in enumerate([baseline, *others]):
        group, color = groups[world, label], f"C{number}"
        draw_mean(curves, group, color, label)
        if label == baseline:
            continue
        d = differences[world, label]
        y = len(others) - number
        low, high = evaluation.interval_of_mean(d)  # without end for fewer than six seeds, and not drawn
        pairs.plot([low, high], [y, y], color=color, linewidth=6, alpha=0.25, solid_capstyle="butt")
        pairs.plot(d, np.full(len(d), y), "o", color=color, markersize=4, alpha=0.8)
        pairs.plot(np.mean(d), y, "|", color="black", markersize=18)
    seeds = len(groups[world, baseline])
    curves.set(title=f"{world}, mean of {seeds} seeds (thin: each)")
    label_curves(curves)
    pairs.axvline(0, color="gray", linewidth=0.8)
    legend = "a dot per seed; |: mean" + ("; bar: 95 % interval" if seeds >= 6 else "")
    pairs.set(title=f"mean success minus that of {baseline}", xlabel=legend)
    pairs.set_yticks(range(len(others)), [*reversed(others)])
    pairs.set_ylim(-0.6, len(others) - 0.4)
    for axis in (curves, pairs):
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=200)
    print(out)


def draw_words(folders, out):
    """For every number of words a row: learning curves, and the mean success of each run."""
    found = {}  # by number of words and method
    for group in evaluation.groups_of([evaluation.load_curve(Path(folder)) for folder in folders]):
        words = group[0].options.get("words") or 0
        found.setdefault(words, {})[group[0].label.removeprefix(f"{words}-words-")] = group
    names = dict.fromkeys(method for methods in found.values() for method in methods)
    colors = {method: f"C{i}" for i, method in enumerate(names)}
    figure = evaluation.new_figure(9, 0.3 + 3.1 * len(found))
    rows = figure.subplots(len(found), 2, width_ratios=[1.2, 1], squeeze=False)
    for (curves, dots), (words, methods) in zip(rows, sorted(found.items()), strict=True):
        for method, group in methods.items():
            draw_mean(curves, group, colors[method], method)
        label_curves(curves)
        curves.set_title(f"thoughts with {words} words more (thin: each seed)", fontsize=10)
        curves.grid(alpha=0.3)
        draw_means(dots, methods, colors)
    figure.savefig(out, dpi=150)
    print(out)


def draw_all_means(baselines, folders, out):
    curves = [evaluation.load_curve(Path(folder)) for folder in folders]
    groups = {group[0].label: group for group in evaluation.groups_of(curves)}
    figure = evaluation.new_figure(7, 0.7 + 0.26 * len(groups))
    axis = figure.subplots()
    draw_means(axis, groups, {label: "C0" if label in baselines else "C1" for label in groups})
    expected = np.mean([curve.mean() for curve in curves if curve.label in baselines])
    axis.axvline(expected, color="gray", linewidth=0.8)
    figure.savefig(out, dpi=150)
    print(out)


def main(*words):
    try:
        match words:
            case ["words", *folders, "--out", out] if folders:
                draw_words(folders, out)
            case ["means", baselines, *folders, "--out", out] if folders:
                draw_all_means(baselines.split(","), folders, out)
            case [baseline, *folders, "--out", out] if folders:
                draw(baseline, folders, out)
            case _:
                print(__doc__)
                raise SystemExit(2)
    except vldac.envs.UserError as error:
        vldac.refuse(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
