"""What shows that reward taught the toy: what it does after each sentence, and players who do not look.

    python study/controls.py sentences runs/NAME    each action's probability, by frame and by sentence
    python study/controls.py donor runs/NAME        the trained policy on the prompts of another room
    python study/controls.py players OneRoom        random actions, the best blind list of actions, hints
    python study/controls.py means after 400 409    of sentences.csv, these seeds: a row for each case
    python study/controls.py swapped                and for each seed: does the frame or the sentence decide?

`sentences` prints rows of sentences.csv, without its header, `donor` a row of runs.csv, `players` lines of
players.jsonl. Success is that of 200 episodes, on the fixed seeds.
"""

import csv
import dataclasses
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import report  # noqa: E402

import envs  # noqa: E402
import eval as evaluation  # noqa: E402
import vldac  # noqa: E402

TABLE = Path(__file__).parent / "sentences.csv"
BOX = "the red box is"
SENTENCES = ["no red box in view", f"{BOX} ahead", f"{BOX} on the left", f"{BOX} on the right"]


def prompts_by_caption(policy, players, count) -> dict[str, list[dict]]:
    """The prompts of `count` states with each caption, which random players meet."""
    rng = random.Random(0)
    seeds = iter(range(1000, 2000))  # neither those of training nor those of an evaluation
    prompts = {sentence: [] for sentence in SENTENCES}
    for player in players:
        player.reset(next(seeds))
    while min(map(len, prompts.values())) < count:
        for player in players:
            some = prompts[player.env.unwrapped.caption()]
            if len(some) < count:
                some.append(policy.encode(*player.prompt()))
            _, done, _ = player.step(rng.choice(player.info["actions"]))
            if done:
                player.reset(next(seeds))
    return prompts


@torch.no_grad()
def action_probabilities(policy, prompts, sentence, actions) -> list[float]:
    """Of each action, if this sentence is the thought; means over the prompts."""
    responses = []
    for action in actions:
        answer = json.dumps({"thoughts": sentence, "action": action})
        tokens = policy.tokenizer(answer, return_tensors="pt").input_ids[0]
        responses.append(torch.cat([tokens, policy.stop_ids[-1:]]))
    rows = []
    for prompt in prompts:
        logprobs, _, _ = policy([prompt] * len(actions), responses)
        rows.append(logprobs.sum(1).softmax(0))  # what the responses have in common cancels
    return torch.stack(rows).mean(0).tolist()


def sentences(folder):
    """A row for each kind of frame and each sentence, before training and after it."""
    args = vldac.load_args(folder)
    policy = vldac.VLMPolicy(args)
    players = [vldac.Player(args) for _ in range(8)]
    prompts = prompts_by_caption(policy, players, count=12)
    actions = players[0].info["actions"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for when in ("before", "after"):
        if when == "after":
            vldac.load_weights(Path(folder), policy)
        for frame in SENTENCES:
            for sentence in SENTENCES:
                probabilities = action_probabilities(policy, prompts[frame], sentence, actions)
                row = [round(probability, 4) for probability in probabilities]
                writer.writerow([args.seed, when, frame, sentence, *row])


def donors_act(args, players):
    """A function like vldac.act: each player acts on a donor's prompts, who plays too, in another room."""
    donors = {player: vldac.Player(args, index) for index, player in enumerate(players)}

    def act(policy, players):
        for player in players:
            if not player.actions:  # an episode begins, and the donor's too
                donors[player].next_episode()
        steps = vldac.act(policy, [donors[player] for player in players])
        played = []
        for player, step in zip(players, steps, strict=True):
            if step.done:
                donors[player].next_episode()
            reward, done, timed_out = player.step(step.action)
            played.append(dataclasses.replace(step, reward=reward, done=done, timed_out=timed_out))
        return played

    return act


def donor(folder):
    """A row of the trained policy's success, if each player acts on a donor's prompts."""
    args = dataclasses.replace(vldac.load_args(folder), split="eval")
    policy = vldac.VLMPolicy(args)
    vldac.load_weights(Path(folder), policy)
    players = vldac.evaluation_players(args, 200)
    summary = vldac.summary(vldac.evaluate(policy, players, range(200), donors_act(args, players)))
    row = {"world": args.env, "method": "donor", "seed": args.seed, "step": args.total_timesteps}
    row |= {"eval_success": summary["success_rate"], "eval_invalid": round(summary["invalid_action_rate"], 5)}
    csv.DictWriter(sys.stdout, report.COLUMNS, lineterminator="\n").writerow(row)


def successes(player, actions, seeds) -> int:
    """In how many of the seeds' episodes this list of actions succeeds."""
    count = 0
    for seed in seeds:
        player.reset(seed)
        done = False
        while not done:
            _, done, _ = player.step(actions[len(player.actions)])
        count += bool(player.info["success"])
    return count


def blind(env, candidates=1000, seeds=range(1000, 1200)) -> dict:
    """The best list of actions that was found for a player who does not look, as a result of eval.py.

    Hill climbing, from the best one of the lists that the world's hints make in twenty episodes: some actions
    in a row give way to one action, once or more often, and stay so if no fewer episodes succeed.
    """
    player = vldac.Player(vldac.parse_args(["--env", env, "--model", "tiny", "--device", "cpu"]))
    player.reset(0)
    world, frame = player.env.unwrapped, player.observations[0]["image"]
    world.render = lambda: frame  # nobody looks, so nothing is drawn
    if isinstance(world, envs.MiniWorld):
        world.env.render_obs = lambda *_: frame
        world.env._render_static = lambda: None
    actions, length = player.info["actions"], player.info["left"]

    def whole(some):  # as long as an episode may be
        return (some + some[-1:] * length)[:length]

    best, most = [], -1
    for seed in seeds[:20]:
        player.reset(seed)
        done = False
        while not done:
            _, done, _ = player.step(world.hint())
        hints = whole(player.actions)
        count = successes(player, hints, seeds)
        if count > most:
            best, most = hints, count
    rng = random.Random(0)
    for _ in range(candidates):
        start, size = rng.randrange(length), 2 ** rng.randrange(6)
        rest = best[start + rng.choice([0, 1, size, 2 * size]) :]
        changed = whole(best[:start] + [rng.choice(actions)] * size + rest)
        count = successes(player, changed, seeds)
        if count >= most:
            best, most = changed, count
    rate = successes(player, best, range(200)) / 200
    result = {"command": "blind list found", "task": {"env": env}, "summary": {"success_rate": rate}}
    return result | {"actions": best}


def players(env):
    """How those do who have learned nothing."""
    args = vldac.parse_args(["--env", env, "--model", "tiny", "--device", "cpu"], evaluation.Args)
    random_actions, hints = (evaluation.make_result(command, args) for command in ("random", "hint"))
    for result in (random_actions, blind(env), hints):
        print(json.dumps(result | {"episodes": []}))


def load_sentences() -> dict[tuple[str, str, str], dict[int, dict[str, float]]]:
    """Each action's probability, by (when, frame, sentence) and seed."""
    cases = {}
    with open(TABLE, newline="") as file:
        for row in csv.DictReader(file):
            case, seed = (row.pop("when"), row.pop("frame"), row.pop("sentence")), int(row.pop("seed"))
            cases.setdefault(case, {})[seed] = {action: float(x) for action, x in row.items()}
    return cases


def means(when, first, last):
    """What is done at each kind of frame after each sentence: means over the seeds from first to last.

    `when` is before or after training.
    """
    lines = []
    for (row_when, frame, sentence), by_seed in load_sentences().items():
        if row_when != when:
            continue
        rows = [row for seed, row in by_seed.items() if first <= seed <= last]
        actions = list(rows[0])
        chances = [report.mean_of([row[action] for row in rows]) for action in actions]
        lines.append([frame, sentence, len(rows), *chances])
    print(report.markdown([["frame", "sentence", "runs", *actions], *lines]))


def swapped():
    """A row for each seed: how likely it is to move forward after training.

    The columns say where the box is ahead: in both, in one of them, or in neither, which then has no box.
    """
    cases = load_sentences()
    there, away = f"{BOX} ahead", "no red box in view"
    lines = [["seed", "in both", "in the frame alone", "in the sentence alone", "in neither"]]
    for seed in cases["after", there, there]:
        combinations = [(there, there), (there, away), (away, there), (away, away)]
        lines.append([str(seed), *[cases["after", *both][seed]["move forward"] for both in combinations]])
    print(report.markdown(lines))


def main(argv=None):
    match sys.argv[1:] if argv is None else argv:
        case ["sentences", folder]:
            sentences(folder)
        case ["donor", folder]:
            donor(folder)
        case ["players", env]:
            players(env)
        case ["means", ("before" | "after") as when, first, last]:
            means(when, int(first), int(last))
        case ["swapped"]:
            swapped()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
