"""The study's tables, tests and figures: of study/runs.csv, or of runs of your own.

    python study/report.py table runs/A runs/B         the figures of runs, a row each
    python study/report.py methods runs/*              those of methods: means over their runs
    python study/report.py pairs runs/*                each method against the first, success over the run
    python study/report.py ends runs/*                 the same of success after training
    python study/report.py reached 0.95 runs/*         how many of a method's runs end there or above
    python study/report.py sentences FILE              of sentences.csv: what is done after which sentence
    python study/report.py swapped FILE                and whether the frame or the sentence decides
    python study/report.py plot runs/A runs/B r.json   learning curves, results as dashed lines
    python study/report.py rows runs/A runs/B          their logs as rows of runs.csv, without its header

Each takes the folders of runs, or study/runs.csv followed by what to show of it: OneRoom/vldac.py
Hallway/vldac.py, or OneRoom/vldac.py@110-119 for some of the seeds. For plot, --out FILE comes last.
"""

import csv
import itertools
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "extras")]

import plot as curves  # noqa: E402

from envs import UserError, exit_with  # noqa: E402
from eval import load_result  # noqa: E402

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

    seed: int
    episodes: int | None  # that have ended
    before: float | None  # success on the fixed seeds
    after: float | None
    parsed: float  # of the responses at the end
    kl_base: float | None  # of the last update that has one (in LOOP, not all have)
    explained: float | None  # of the returns' variance, by the values; the median over the updates

    def mean(self) -> float | None:
        """Success averaged over the run, from step 0 to its end; None if there was no update.

        >>> steps, rates = np.array([0, 10, 30]), np.array([0.2, 0.2, 0.6])
        >>> run = Run("OneRoom", "vldac.py", steps, rates, 0, 3, 0.2, 0.6, 1.0, 0.1, 0.5)
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
    """A run's log, as rows of such a table."""
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
    """A run, from its rows; UserError if there is no rate yet."""
    first, *later = rows
    steps = [int(row["step"]) for row in rows]
    rates = [row["success"] for row in later]
    curve = curves.make_curve(first["world"], first["method"], steps, first["eval_success"], rates)
    # One that was trained elsewhere has one row, of its end.
    evaluations = [row for row in rows if row["step"] > 0 and row["eval_success"] is not None]
    last = evaluations[-1] if evaluations else rows[-1]
    divergences = [row["kl_base"] for row in later if row["kl_base"] is not None]
    explained = [row["explained_variance"] for row in later if row["explained_variance"] is not None]
    unparsed = last["invalid"] if last["eval_invalid"] is None else last["eval_invalid"]
    return Run(
        **vars(curve),
        seed=int(first["seed"]),
        episodes=None if first["episodes"] is None else int(sum(row["episodes"] for row in rows)),
        before=first["eval_success"] if steps[0] == 0 else None,
        after=evaluations[-1]["eval_success"] if evaluations else None,
        parsed=1 - unparsed,
        kl_base=divergences[-1] if divergences else None,
        explained=np.median(explained).item() if explained else None,
    )


def load_table(path, names) -> list[list[dict]]:
    """The rows of each run that is of one of the names, "world/method" or "world/method@40-44", in order."""
    runs = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for number, name in enumerate(names):
                name, _, seeds = name.partition("@")
                first, _, last = seeds.partition("-")
                seed = int(row["seed"])
                chosen = not seeds or int(first) <= seed <= int(last or first)
                if chosen and name == f"{row['world']}/{row['method']}":
                    numbers = {name: float(row[name]) if row[name] else None for name in COLUMNS[2:-1]}
                    runs.setdefault((number, seed), []).append(row | numbers)
    if len({number for number, _ in runs}) < len(names) or not names:
        raise UserError(f"{path}: after it, the worlds and methods that it has, like OneRoom/vldac.py")
    return [runs[key] for key in sorted(runs)]


def load_rows(paths) -> list[list[dict]]:
    """The rows of the runs in these folders, or of those of a table that are named after it."""
    if paths[0].endswith(".csv"):
        return load_table(paths[0], paths[1:])
    return [rows_of_run(folder) for folder in paths]


def load_runs(paths) -> list[Run]:
    return [run_of(rows) for rows in load_rows(paths)]


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


def count_interval(count, n) -> tuple[float, float]:
    """The 95 % interval of the chance behind a count of n (Clopper and Pearson 1934).

    Its lower end is the chance with which so many or more have a probability of 0.025, its upper end the one
    with which so many or fewer have it.

    >>> [round(end, 4) for end in count_interval(0, 10)]  # 1 - 0.025 ** (1 / 10)
    [0.0, 0.3085]
    """

    def lower(count):
        low, high = 0.0, 1.0
        for _ in range(60):
            p = (low + high) / 2
            at_least = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(count, n + 1))
            low, high = (low, p) if at_least > 0.025 else (p, high)
        return low

    return lower(count), 1 - lower(n - count)


def from_to(ends) -> str | None:
    """An interval as text, and None where there is none.

    >>> from_to((-0.05, 0.1))
    '-0.050 to 0.100'
    """
    return None if ends is None else "{:.3f} to {:.3f}".format(*ends)


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


def table(paths) -> str:
    """A row for every run."""
    lines = [["world", "method", "seed", "before", "after", "last 100", "mean", "steps to 0.8", "parsed"]]
    for run in load_runs(paths):
        solved = run.steps[run.rates >= 0.8].tolist()
        ends = [run.before, run.after, run.rates[-1].item(), run.mean()]
        steps = solved[0] if solved else None
        lines.append([run.world, run.method, str(run.seed), *ends, steps, run.parsed])
    return markdown(lines)


def mean_of(values) -> float | None:
    """None where a run has not measured it."""
    return None if None in values else np.mean(values).item()


def spread(values) -> str | None:
    """The mean, and from what to what; None where a run has not measured it.

    >>> spread([0.5, 1.0])
    '0.750 (0.500 to 1.000)'
    """
    return None if None in values else f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def methods(paths) -> str:
    """A row for every method: means over its runs.

    before, after    success on the fixed seeds
    over the run     success averaged over the run
    parsed, kl_base  at the end
    explained        variance of the returns, by the values; the median over the updates
    A column that would be empty is left out, and so are the folders of runs that are not finished.
    """
    unfinished = []
    if not paths[0].endswith(".csv"):  # a run saves its adapter at its end
        unfinished = [folder for folder in paths if not Path(folder, "adapter").exists()]
        paths = [folder for folder in paths if folder not in unfinished]
    if not paths:
        raise UserError("no run is finished yet")
    rows = []
    for (world, method), runs in curves.group(load_runs(paths)).items():
        episodes = mean_of([run.episodes for run in runs])
        row = {
            "world": world,
            "method": method,
            "runs": len(runs),
            "updates": round(mean_of([len(run.steps) - 1 for run in runs])),
            "episodes": None if episodes is None else round(episodes),
            "before": mean_of([run.before for run in runs]),
            "over the run": spread([run.mean() for run in runs]),
            "after": spread([run.after for run in runs]),
            "parsed": mean_of([run.parsed for run in runs]),
            "kl_base": mean_of([run.kl_base for run in runs]),
            "explained": mean_of([run.explained for run in runs]),
        }
        rows.append(row)
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    lines = [columns] + [[row[name] for name in columns] for row in rows]
    left_out = f"\nnot finished, so left out: {', '.join(unfinished)}" if unfinished else ""
    return markdown(lines) + left_out


def by_method(paths) -> dict[str, dict[str, dict[int, list[dict]]]]:
    """The rows of runs: world, method, seed."""
    worlds = {}
    for rows in load_rows(paths):
        world, method, seed = rows[0]["world"], rows[0]["method"], int(rows[0]["seed"])
        runs = worlds.setdefault(world, {}).setdefault(method, {})
        if seed in runs:
            raise UserError(f"there are two runs of {world}, {method}, seed {seed}")
        runs[seed] = rows
    return worlds


def holm(ps) -> list[float]:
    """p of several tests, each corrected for all of them (Holm 1979).

    >>> holm([0.01, 0.5, 0.02])  # times three, times one, times two; none below that of a smaller p
    [0.03, 0.5, 0.04]
    """
    order = np.argsort(ps)
    corrected = np.array(ps, dtype=float)
    corrected[order] *= np.arange(len(ps), 0, -1)
    corrected[order] = np.minimum(1, np.maximum.accumulate(corrected[order]))
    return corrected.tolist()


def paired(paths, title, difference) -> str:
    """A row for every method but the world's first, whose runs are paired with it by their seeds.

    title, difference  of the column that has the mean difference: a function of the rows of a pair, the first
                       method's and the other's
    95 %               the interval of that mean
    ahead              in how many pairs it is above 0
    p, Holm            exact sign-flip test of that mean, and corrected for all of the table
    """
    lines, ps = [["world", "method", "against", "pairs", title, "95 %", "ahead", "p", "Holm"]], []
    for world, methods_of_world in by_method(paths).items():
        (first, first_runs), *others = methods_of_world.items()
        for method, runs in others:
            seeds = sorted(runs.keys() & first_runs.keys())
            if not seeds:
                raise UserError(f"{world}: {method} and {first} share no seed")
            differences = [difference(first_runs[seed], runs[seed]) for seed in seeds]
            ahead = sum(x > 0 for x in differences)
            ends = from_to(interval(differences))
            lines.append([world, method, first, len(seeds), spread(differences), ends, ahead])
            ps.append(sign_flip(differences))
    for line, p, corrected in zip(lines[1:], ps, holm(ps), strict=True):
        line += [f"{p:.2g}", f"{corrected:.2g}"]
    return markdown(lines)


def beginning(rows) -> list:
    """What is known of a run's start and first three rollouts: in the warm-up LoRA does not learn."""
    rollouts = [[row["episodes"], row["invalid"], row["success"]] for row in rows[1:4]]
    return [rows[0]["eval_success"], *rollouts]


def difference_over_the_run(first, other) -> float:
    """Of success averaged over two runs; UserError if they begin differently or are not equally long."""
    name = "{world}, {method}, seed {seed:.0f}".format(**other[0])
    if beginning(first) != beginning(other):
        raise UserError(f"{name}: its first three rollouts are others")
    if first[-1]["step"] != other[-1]["step"]:
        raise UserError(f"{name}: it is not as long as {first[0]['method']}")
    return run_of(other).mean() - run_of(first).mean()


def success_after(run) -> float:
    """Success on the fixed seeds after training; UserError if it was not evaluated."""
    if run.after is None:
        raise UserError(f"{run.world}, {run.method}, seed {run.seed}: it was not evaluated after training")
    return run.after


def difference_after(first, other) -> float:
    return success_after(run_of(other)) - success_after(run_of(first))


def reached(rate, paths) -> str:
    """A row for every method: how many of its runs end at this success or above.

    95 %  the interval of the chance behind this count
    """
    lines = [["world", "method", "runs", f"end at {rate} or above", "95 %"]]
    for (world, method), runs in curves.group(load_runs(paths)).items():
        count = sum(success_after(run) >= rate for run in runs)
        lines.append([world, method, len(runs), count, from_to(count_interval(count, len(runs)))])
    return markdown(lines)


def load_sentences(path) -> dict[tuple[str, str, str], dict[int, dict[str, float]]]:
    """Of sentences.csv: each action's probability, by (when, frame, sentence) and seed."""
    cases = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            case, seed = (row.pop("when"), row.pop("frame"), row.pop("sentence")), int(row.pop("seed"))
            cases.setdefault(case, {})[seed] = {action: float(x) for action, x in row.items()}
    return cases


def sentences(path) -> str:
    """What is done at each kind of frame after each sentence: means over the seeds."""
    lines = []
    for (when, frame, sentence), by_seed in load_sentences(path).items():
        actions = list(next(iter(by_seed.values())))
        means = [np.mean([chances[action] for chances in by_seed.values()]).item() for action in actions]
        lines.append([when, frame, sentence, len(by_seed), *means])
    return markdown([["when", "frame", "sentence", "runs", *actions], *lines])


def swapped(path) -> str:
    """Is it the frame or the sentence? A row for each seed: how likely it is to move forward after training.

    The columns say where the box is ahead: in both, in one of them, or in neither, which then has no box.
    """
    there, away = "the red box is ahead", "no red box in view"
    cases = load_sentences(path)
    lines = [["seed", "in both", "in the frame alone", "in the sentence alone", "in neither"]]
    for seed in cases["after", there, there]:
        pairs = [(there, there), (there, away), (away, there), (away, away)]
        lines.append([str(seed), *[cases["after", *pair][seed]["move forward"] for pair in pairs]])
    return markdown(lines)


def plot(paths, out):
    """The runs' learning curves, and results; if all runs are of one world, a panel for each method."""
    results = [load_result(path) for path in paths if path.endswith(".json")]
    paths = [path for path in paths if not path.endswith(".json")]
    runs = load_runs(paths) if paths else []
    if len({run.world for run in runs}) == 1 and not results:
        for run in runs:
            run.world = run.method
    curves.plot(runs, results, out)


def main(argv=None):
    try:
        match sys.argv[1:] if argv is None else argv:
            case ["table", *paths] if paths:
                print(table(paths))
            case ["methods", *paths] if paths:
                print(methods(paths))
            case ["pairs", *paths] if paths:
                print(paired(paths, "over the run", difference_over_the_run))
            case ["ends", *paths] if paths:
                print(paired(paths, "after", difference_after))
            case ["reached", rate, *paths] if paths:
                if not re.fullmatch(r"[01](\.\d+)?", rate):
                    raise UserError(f"after `reached` a rate, like 0.95, and not {rate}")
                print(reached(float(rate), paths))
            case ["sentences", path]:
                print(sentences(path))
            case ["swapped", path]:
                print(swapped(path))
            case ["plot", *paths, "--out", out] if paths:
                plot(paths, out)
            case ["plot", *paths] if paths:
                plot(paths, "curves.png")
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
