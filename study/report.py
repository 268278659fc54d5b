"""The study's tables and figures, of runs.csv.

    python study/report.py runs NAME...         a row for each method, in it each of its runs
    python study/report.py methods NAME...      a row for each method: means over its runs
    python study/report.py pairs NAME...        each method against the first, seed by seed
    python study/report.py plot NAME...         learning curves, and the players of players.jsonl
    python study/report.py ends NAME...         success after training of each run, by learning rate
    python study/report.py forest NAME...       the table `pairs` as a figure
    python study/report.py rows runs/A runs/B   logs as rows of runs.csv, without its header

A name is a world and a method, like OneRoom/vldac.py, and perhaps seeds: OneRoom/vldac.py@400-409.
After plot, ends and forest, --out FILE comes last.
"""

import csv
import itertools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "extras")]

import plot as curves  # noqa: E402

from envs import UserError, check, exit_with  # noqa: E402

RUNS = ROOT / "study" / "runs.csv"
PLAYERS = ROOT / "study" / "players.jsonl"
# The columns of runs.csv, in which a row is an update of a run, and what they are called in its log.
LOGGED = {
    "step": "global_step",
    "success": "charts/success_rate",
    "invalid": "charts/invalid_action_rate",
    "kl_base": "losses/kl_base",
    "eval_success": "eval/success_rate",
    "eval_invalid": "eval/invalid_action_rate",
    "explained_variance": "losses/explained_variance",
}
# episodes: that ended in the update. processor: on which the run was made.
COLUMNS = ["world", "method", "seed", "episodes", *LOGGED, "processor"]


@dataclass
class Run(curves.Curve):
    """What a table shows of a run."""

    before: float | None  # success on the fixed seeds
    after: float
    parsed: float  # of the responses at the end
    kl_base: float | None  # of the last update that has one (in LOOP, not all have)

    def mean(self) -> float | None:
        """Success averaged over the run, from step 0 to its end; None if there was no update.

        >>> steps, rates = np.array([0, 10, 30]), np.array([0.2, 0.2, 0.6])
        >>> run = Run("OneRoom", "vldac.py", steps, rates, 0.2, 0.6, 1.0, 0.1)
        >>> run.mean()  # (10 * 0.2 + 20 * 0.4) / 30
        0.3333333333333333
        """
        if len(self.steps) == 1:
            return None
        return np.trapezoid(self.rates, self.steps).item() / self.steps[-1].item()


def processor() -> str:
    """This machine's kind of processor: its name, as Linux gives it, and the instructions PyTorch uses."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", info.read_text(), re.M) if info.exists() else []
    return " ".join([*names[:1], torch.backends.cpu.get_cpu_capability()])


def rows_of_run(folder) -> list[dict]:
    """A run's log, as rows of runs.csv."""
    log, args = curves.load_log(folder)
    run = {"world": curves.world_name(args["env"]), "method": curves.method_name(folder, args)}
    run["seed"] = args["seed"]
    rows = []
    for row in log:
        values = [row.get(key) for key in LOGGED.values()]
        values = [round(x, 5) if isinstance(x, float) else x for x in values]
        run |= {"episodes": len(row.get("episodes", [])), "processor": processor()}
        rows.append(run | dict(zip(LOGGED, values, strict=True)))
    return rows


def run_of(rows) -> Run:
    """A finished run, from its rows. Of a model that was trained elsewhere there is one row, of its end."""
    first, *later = rows
    steps = [row["step"] for row in rows]
    rates = [row["success"] for row in later]
    curve = curves.make_curve(first["world"], first["method"], steps, first["eval_success"], rates)
    divergences = [row["kl_base"] for row in later if row["kl_base"] is not None]
    return Run(
        **vars(curve),
        before=first["eval_success"] if later else None,
        after=rows[-1]["eval_success"],
        parsed=1 - rows[-1]["eval_invalid"],
        kl_base=divergences[-1] if divergences else None,
    )


def load_runs(names) -> dict[tuple[str, str], dict[int, Run]]:
    """The runs of these names: (world, method), then seed, in order; UserError if a name has none."""
    with open(RUNS, newline="") as file:
        table = list(csv.DictReader(file))
    runs = {}
    for name in names:
        name, _, seeds = name.partition("@")
        first, _, last = seeds.partition("-")
        rows_by_seed = {}
        for row in table:
            seed = int(row["seed"])
            chosen = not seeds or int(first) <= seed <= int(last or first)
            if chosen and name == f"{row['world']}/{row['method']}":
                numbers = {column: float(row[column]) if row[column] else None for column in LOGGED}
                rows_by_seed.setdefault(seed, []).append(row | numbers)
        check(rows_by_seed, f"runs.csv has no {name}, or not these seeds")
        for seed, rows in sorted(rows_by_seed.items()):
            run = run_of(rows)
            runs.setdefault((run.world, run.method), {})[seed] = run
    return runs


def sign_flip(differences) -> float:
    """Exact two-sided p of the hypothesis that a pair's two values could be exchanged (Fisher 1935).

    Under it each difference is as likely with the other sign: p is the share of the choices of signs with
    which the mean is as far from 0 as it is, or farther.

    >>> sign_flip([0.1, 0.2, 0.3])  # of eight choices, all as they are, and all the other way round
    0.25
    """
    signs = np.array(list(itertools.product([1, -1], repeat=len(differences))))
    distances = abs(signs @ differences)
    return (distances >= distances[0] - 1e-9).mean().item()


def interval(differences) -> tuple[float, float] | None:
    """The 95 % interval of pairs' mean difference: the means that a sign-flip test does not refuse (0.05).

    The test assumes that differences are symmetric about that mean. Then the means of their 2^n - 1 subsets
    cut the line into 2^n intervals, each of which has the true mean as often as any other (Hartigan 1969). So
    the ends are the k-th smallest and the k-th largest of them, k = 0.025 * 2^n rounded down. None below six
    pairs, where k is 0.

    >>> interval([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])  # k is 1: the smallest and the largest difference
    (0.1, 0.6)
    """
    subsets = np.array(list(itertools.product([0, 1], repeat=len(differences)))[1:])
    k = int(0.025 * 2 ** len(differences))
    if k == 0:
        return None
    means = np.sort(subsets @ np.array(differences) / subsets.sum(1))
    return means[k - 1].item(), means[-k].item()


def holm(ps) -> list[float]:
    """p of several tests, each corrected for all of them (Holm 1979).

    >>> holm([0.03, 0.5, 0.04])  # times three, times one, times two; but none below that of a smaller p
    [0.09, 0.5, 0.09]
    """
    order = np.argsort(ps)
    corrected = np.array(ps, dtype=float)
    corrected[order] *= np.arange(len(ps), 0, -1)
    corrected[order] = np.minimum(1, np.maximum.accumulate(corrected[order]))
    return corrected.tolist()


def markdown(lines) -> str:
    """A table. Rates have three digits, and None is a dash.

    >>> print(markdown([["run", "steps", "rate"], ["A", 1024, 0.5], ["B", None, None]]))
    | run | steps | rate |
    | --- | --- | --- |
    | A | 1,024 | 0.500 |
    | B | - | - |
    """
    rows = []
    for line in lines:
        cells = []
        for x in line:
            if isinstance(x, float):
                x = f"{x:.3f}"
            elif isinstance(x, int):
                x = f"{x:,}"
            cells.append(x or "-")
        rows.append(f"| {' | '.join(cells)} |")
    rule = "| --- " * len(lines[0]) + "|"
    return "\n".join([rows[0], rule, *rows[1:]])


def from_to(ends) -> str | None:
    """An interval as text, and None where there is none.

    >>> from_to((-0.05, 0.1))
    '-0.050 to 0.100'
    """
    return None if ends is None else "{:.3f} to {:.3f}".format(*ends)


def mean_of(values) -> float | None:
    """None where a run has not measured it."""
    return None if None in values else np.mean(values).item()


def spread(values) -> str | None:
    """The mean, and from what to what; None where a run has not measured it.

    >>> spread([0.5, 1.0])
    '0.750 (0.500 to 1.000)'
    """
    return None if None in values else f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(names) -> str:
    """A row for each method: its seeds, and in their order what each of its runs has."""
    lines = [["world", "method", "seeds", "before", "over the run", "after", "parsed"]]
    for (world, method), runs in load_runs(names).items():
        of_runs = [[run.before, run.mean(), run.after, run.parsed] for run in runs.values()]
        cells = []
        for column in zip(*of_runs, strict=True):
            cells.append(None if None in column else " ".join(f"{x:.3f}" for x in column))
        lines.append([world, method, " ".join(map(str, runs)), *cells])
    return markdown(lines)


def methods(names) -> str:
    """A row for each method: means over its runs, and from the worst to the best.

    before, after    success on the fixed seeds
    over the run     success averaged over the run
    parsed, kl_base  at the end
    """
    lines = [["world", "method", "runs", "before", "over the run", "after", "parsed", "kl_base"]]
    for (world, method), runs in load_runs(names).items():
        runs = runs.values()
        before, after = mean_of([run.before for run in runs]), spread([run.after for run in runs])
        ends = mean_of([run.parsed for run in runs]), mean_of([run.kl_base for run in runs])
        lines.append([world, method, len(runs), before, spread([run.mean() for run in runs]), after, *ends])
    return markdown(lines)


def pairs_of(names) -> list[tuple[str, str, list[float]]]:
    """Each method but the first, and by how much its success over the run is above the first one's.

    UserError if they share no seed, or if two runs of a pair are not equally long.
    """
    (_, first), *others = load_runs(names).items()
    found = []
    for (world, method), runs in others:
        seeds = sorted(runs.keys() & first.keys())
        check(seeds, f"{world}/{method} shares no seed with {names[0]}")
        differences = []
        for seed in seeds:
            as_long = runs[seed].steps[-1] == first[seed].steps[-1]
            check(as_long, f"{world}/{method}, seed {seed}: it is not as long as {names[0]}")
            differences.append(runs[seed].mean() - first[seed].mean())
        found.append((world, method, differences))
    return found


def pairs(names) -> str:
    """A row for each method but the first, whose runs are paired with it by their seeds.

    over the run  success averaged over the run, less the first method's: mean, smallest and largest
    95 %          the interval of that mean
    ahead         in how many pairs it is above 0
    p, Holm       exact sign-flip test of that mean, and corrected for all of the table
    """
    found = pairs_of(names)
    ps = [sign_flip(differences) for _, _, differences in found]
    lines = [["world", "method", "pairs", "over the run", "95 %", "ahead", "p", "Holm"]]
    for (world, method, differences), p, corrected in zip(found, ps, holm(ps), strict=True):
        ahead = sum(x > 0 for x in differences)
        row = [world, method, len(differences), spread(differences), from_to(interval(differences)), ahead]
        lines.append([*row, f"{p:.2g}", f"{corrected:.2g}"])
    return markdown(lines)


def plot(names, out):
    """Learning curves, and the players of these worlds: a panel for each world."""
    runs = [run for runs in load_runs(names).values() for run in runs.values()]
    worlds = {run.world for run in runs}
    results = [json.loads(line) for line in PLAYERS.read_text().splitlines()]
    results = [result for result in results if result["task"]["env"] in worlds]
    curves.plot(runs, results, out)


def dots(axis, y, values):
    """Values as dots in a row of a figure, and their mean as a stroke."""
    axis.plot(values, [y] * len(values), "o", color="C0", alpha=0.5, markeredgewidth=0, markersize=5)
    axis.plot(np.mean(values), y, "|", color="0", markersize=11, markeredgewidth=1.5)


def ends(names, out):
    """Success after training: a panel for each learning rate, in it a row for each method."""
    from matplotlib.figure import Figure

    cells = {}
    for (_, name), runs in load_runs(names).items():
        rate = re.search(r":learning_rate=([^:]+)", name)
        method = re.sub(r":(final_)?learning_rate=[^:]+", "", name)
        cells[method, rate[1] if rate else "default"] = [run.after for run in runs.values()]
    methods, rates = [list(dict.fromkeys(column)) for column in zip(*cells, strict=True)]  # each once
    figure = Figure(figsize=(9, 0.9 + 0.3 * len(methods)), layout="constrained")
    axes = figure.subplots(1, len(rates), sharex=True, sharey=True, squeeze=False)[0]
    for axis, rate in zip(axes, rates, strict=True):
        axis.set(title=f"learning rate: {rate}", xlabel="success after training", xlim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    for (method, rate), successes in cells.items():
        dots(axes[rates.index(rate)], methods.index(method), successes)
    axes[0].set_yticks(range(len(methods)), methods, fontsize=8)
    axes[0].set_ylim(len(methods) - 0.5, -0.5)  # the first one on top
    figure.savefig(out, dpi=200)
    print(out)


def forest(names, out):
    """Differences over the run: pairs as dots, means as strokes, 95 % intervals of the means as lines."""
    from matplotlib.figure import Figure

    found = pairs_of(names)
    figure = Figure(figsize=(7, 0.8 + 0.3 * len(found)), layout="constrained")
    axis = figure.add_subplot()
    for y, (_, _, differences) in enumerate(found):
        dots(axis, y, differences)
        if interval(differences):
            axis.plot(interval(differences), [y, y], color="C0")
    labels = [f"{world}/{method}" for world, method, _ in found]
    axis.set_yticks(range(len(found)), labels, fontsize=8)
    axis.set_ylim(len(found) - 0.5, -0.5)  # the first one on top
    axis.axvline(0, color="0", linewidth=0.8)
    axis.set_xlabel("difference over the run")
    figure.savefig(out, dpi=200)
    print(out)


def main(argv=None):
    tables = {"runs": table, "methods": methods, "pairs": pairs}
    figures = {"plot": plot, "ends": ends, "forest": forest}
    try:
        match sys.argv[1:] if argv is None else argv:
            case [command, *names] if command in tables and names:
                print(tables[command](names))
            case [command, *names, "--out", out] if command in figures and names:
                figures[command](names, out)
            case ["rows", *folders] if folders:
                for folder in folders:
                    csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n").writerows(rows_of_run(folder))
            case _:
                print(__doc__)
                raise SystemExit(2)
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
