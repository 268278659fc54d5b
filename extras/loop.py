"""LOOP (Chen et al. 2025, arXiv 2502.01600) for vision-language agents, made of the parts of vldac.py.

What VL-DAC is compared with: K episodes from the same start; an episode's advantage is its return less the
mean of the others', and all its tokens share it; no critic, so the critic's options have no effect (gamma,
gae_lambda, value_warmup, value_hidden, stop_grad). KL term and cosine are VL-DAC's, as in its paper. Each
player plays a whole episode in an update, so num_envs * num_steps is only the cosine's unit, and a run may
exceed --total_timesteps by a part of its last update. The log's clipfrac has VL-DAC's lower bound.

    python extras/loop.py --env OneRoom    takes vldac.py's options and --group_size

It has `collect`, `make_minibatches` and `train` of its own, and replaces vldac.policy_loss.
"""

import dataclasses
import itertools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replaced import replaced  # noqa: E402

import vldac  # noqa: E402
from envs import UserError  # noqa: E402


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, and one more."""

    group_size: int = 4  # K, the episodes from one start
    vf_coef: float = 0.0  # there is no critic

    def __post_init__(self):
        super().__post_init__()
        if self.resume:  # its options were checked when it began
            return
        if self.group_size < 2 or self.num_envs % self.group_size:
            raise UserError("--num_envs must be a multiple of --group_size, and that at least 2")
        if self.vf_coef != 0:
            raise UserError("there is no critic, so no --vf_coef")


def leave_one_out(returns):
    """A_k = R_k - the mean of the other returns of its group: (G, K) -> (G, K) (LOOP, Eq. 3).

    The VL-DAC paper's Eq. 2 sums over the others and divides by K, which is not this estimator.

    >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    K = returns.shape[1]
    means = returns.mean(1, keepdim=True)  # (G, 1)
    return K / (K - 1) * (returns - means)


def loop_loss(newlogprobs, logprobs, advantages, mask, clip_coef):
    """LOOP's token-level surrogate (Eq. 10): vldac.policy_loss with the ratio clipped to [1/(1+c), 1+c].

    >>> lp, one = torch.zeros(1, 1), torch.ones(1, 1)
    >>> loop_loss(lp - 1.0, lp, torch.tensor([-1.0]), one, clip_coef=0.25)  # exp(-1), clipped at 1 / 1.25
    tensor(0.8000)
    """
    ratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0).exp()
    advantages = advantages[:, None]
    clipped = ratio.clamp(1 / (1 + clip_coef), 1 + clip_coef)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped)  # (B, R)
    return vldac.step_mean(pg_loss, mask)


def collect(policy, players, args, update) -> list[list[vldac.Step]]:
    """An episode of every player; K players in a row begin on the same seed."""
    for player in players:
        group = player.index // args.group_size
        player.reset(vldac.training_seed(args.seed, group, update))
    episodes = [[] for _ in players]
    playing = list(players)
    while playing:
        for player, step in zip(list(playing), vldac.act(policy, playing), strict=True):
            episodes[player.index].append(step)
            if step.done:
                playing.remove(player)
    return episodes


def make_minibatches(episodes, args) -> list:
    """The steps of groups whose returns differ by 0.01 or so, with their advantages; perhaps none."""
    returns = [sum(step.reward for step in episode) for episode in episodes]  # not discounted
    returns = torch.tensor(returns).view(-1, args.group_size)  # (G, K)
    advantages = leave_one_out(returns)  # (G, K), not divided by their deviation
    useful = (advantages.abs() >= 0.01).any(1)  # (G,)
    useful = useful.repeat_interleave(args.group_size)  # (G * K,)
    steps = []
    for episode, advantage, kept in zip(episodes, advantages.flatten(), useful, strict=True):
        if kept:
            steps += episode
            tokens = sum(len(step.tokens) for step in episode)
            for step in episode:
                step.advantage = advantage.item() * len(step.tokens) / tokens
    # The loss is a mean over a step's tokens, then over steps, and proportional to the advantage. With these
    # two factors it is LOOP's: a mean over an episode's tokens, then over all episodes. There those that were
    # left out count as episodes without a loss; the KL loss (LOOP has none) is a mean over what is left.
    for step in steps:
        step.advantage *= len(steps) / len(episodes)
    if not steps:
        return []
    # What is left need not be a multiple of a minibatch: equally large ones.
    number = math.ceil(len(steps) / args.minibatch_size)
    size = math.ceil(len(steps) / number)
    return vldac.make_minibatches(steps, dataclasses.replace(args, minibatch_size=size))


def train(args, folder):
    """A whole training, as long as num_envs * num_steps steps are left."""
    players = vldac.make_players(args)
    eval_args = dataclasses.replace(args, split="eval")
    eval_players = vldac.evaluation_players(eval_args, args.eval_episodes)
    vldac.set_seed(args.seed)
    policy = vldac.VLMPolicy(args)
    optimizer = vldac.make_optimizer(policy, args)
    unit = args.num_envs * args.num_steps  # environment steps of an update of VL-DAC: the schedule's unit
    num_updates = args.total_timesteps // unit
    if (folder / "checkpoint.pt").exists():
        state = vldac.load_checkpoint(folder, policy, optimizer, [])  # no episode is half played
    else:
        players[0].reset(vldac.training_seed(args.seed, 0, 1))
        vldac.show_a_response(policy, players[0])
        row = {"update": 0, "global_step": 0} | vldac.evaluate_for_log(policy, eval_players)
        vldac.write_row(folder, row, args)
        state = {"update": 0, "played": 0, "recent": []}
        vldac.save_checkpoint(folder, policy, optimizer, [], **state)
    u, played, recent = state["update"], state["played"], state["recent"]  # played: environment steps

    while played + unit <= args.total_timesteps:
        u += 1
        index = played // unit
        learning_rate = vldac.cosine(index, num_updates, args.learning_rate, args.final_learning_rate)
        optimizer.param_groups[0]["lr"] = learning_rate
        vldac.set_seed(vldac.training_seed(args.seed, u))
        start = time.perf_counter()
        episodes = collect(policy, players, args, u)
        collected = time.perf_counter()
        minibatches = make_minibatches(episodes, args)
        vldac.score(policy, minibatches)
        steps = list(itertools.chain(*episodes))
        for step in steps:
            step.return_ = step.value  # not used: the value loss has the weight 0
        scored = time.perf_counter()
        outcomes = sum(not episode[-1].timed_out for episode in episodes) / len(episodes)
        stats = {"outcomes": outcomes}
        if minibatches:
            with replaced(policy_loss=loop_loss):
                stats |= vldac.update(policy, optimizer, minibatches, args)
        updated = time.perf_counter()

        results = [player.result() for player in players]
        recent = (recent + results)[-100:]
        played += len(steps)
        row = {"update": u, "global_step": played, "episodes": results}
        times = {"collect": collected - start, "score": scored - collected, "update": updated - scored}
        row |= vldac.log_row(policy, steps, stats, times, recent)
        row["charts/learning_rate"] = learning_rate
        del episodes, steps, minibatches  # their pixels are large; the next ones need the memory
        last = played + unit > args.total_timesteps
        evaluation_due = args.eval_every and u % args.eval_every == 0
        if last or evaluation_due:
            row |= vldac.evaluate_for_log(policy, eval_players)
            vldac.save_adapter(policy, folder / ("adapter" if last else f"adapter-{played}"))
        vldac.write_row(folder, row, args)
        vldac.save_checkpoint(folder, policy, optimizer, [], update=u, played=played, recent=recent)


def main(argv=None):
    vldac.main(argv, Args, train)


if __name__ == "__main__":
    main()
