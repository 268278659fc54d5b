"""LOOP (Chen et al. 2025, arXiv 2502.01600) for vision-language agents, made of the parts of vldac.py.

What VL-DAC is compared with: K episodes from the same start; an episode's advantage is its return less the
mean of the others', and all its tokens share it; no critic. KL term and cosine are VL-DAC's, as in its paper.

    python assets/loop.py --env OneRoom    takes vldac.py's options and --group_size; no --resume, one process
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vldac  # noqa: E402


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, and one more."""

    algo: Literal["loop"] = "loop"
    group_size: int = 4  # K


def leave_one_out(returns):
    """A_k = R_k - the mean of the other returns of its group: (G, K) -> (G, K) (LOOP, Eq. 3).

    The VL-DAC paper's Eq. 2 sums over the others and divides by K, which is not this estimator.

    >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    K = returns.shape[1]
    return K / (K - 1) * (returns - returns.mean(1, keepdim=True))


def loop_loss(newlogprobs, logprobs, advantages, weights, clip_coef):
    """LOOP's token-level surrogate (Eq. 10), its ratio clipped to [1/(1+c), 1+c], to minimise.

    advantages  (B,)   of the step's episode
    weights     (B, R) from `choose`: the mean over steps is one over episodes of means over their tokens

    >>> lp, one = torch.zeros(1, 1), torch.ones(1, 1)
    >>> loop_loss(lp - 1.0, lp, torch.tensor([-1.0]), one, clip_coef=0.25)  # exp(-1), clipped at 1 / 1.25
    tensor(0.8000)
    """
    ratio = (newlogprobs - logprobs).masked_fill(weights == 0, 0).exp()
    advantages = advantages[:, None]
    clipped = ratio.clamp(1 / (1 + clip_coef), 1 + clip_coef)
    return (torch.max(-advantages * ratio, -advantages * clipped) * weights).sum(1).mean()


def collect(policy, players, args, update) -> list[list[vldac.Step]]:
    """An episode of every player; K players in a row begin on the same seed."""
    for player in players:
        player.reset(vldac.training_seed(args.seed, player.index // args.group_size, update))
    episodes, playing = [[] for _ in players], list(players)
    while playing:
        for player, step in zip(list(playing), vldac.act(policy, playing), strict=True):
            episodes[player.index].append(step)
            if step.done:
                playing.remove(player)
    return episodes


def choose(policy, episodes, args) -> vldac.Rollout | None:
    """The episodes of the groups whose returns differ, as a rollout; None if there are none."""
    returns = torch.tensor([sum(step.reward for step in episode) for episode in episodes])  # not discounted
    advantages = leave_one_out(returns.view(-1, args.group_size))  # not divided by their deviation
    useful = (advantages.abs() >= 0.01).any(1).repeat_interleave(args.group_size).tolist()
    kept = [k for k, episode in enumerate(episodes) if useful[k] for _ in episode]  # (B,) a step's episode
    if not kept:
        return None
    steps = [step for k, episode in enumerate(episodes) if useful[k] for step in episode]
    rollout = vldac.Rollout(steps, last_prompts=[], episodes=[])
    rollout.logprobs, values = vldac.score(policy, rollout.prompts, rollout.tokens, rollout.mask)
    with policy.peft_model.disable_adapter():
        rollout.baselogprobs, _ = vldac.score(policy, rollout.prompts, rollout.tokens, rollout.mask)
    rollout.returns = torch.zeros_like(values)  # there is no critic
    rollout.advantages = advantages.flatten()[kept].to(values)
    tokens = torch.zeros(len(episodes)).index_add(0, torch.tensor(kept), rollout.mask.sum(1).float().cpu())
    weights = len(kept) / len(episodes) / tokens[kept]  # (B,)
    rollout.weights = rollout.mask * weights.to(values)[:, None]
    return rollout


def main(argv=None):
    args = vldac.parse_args(argv, Args)
    if args.num_envs % args.group_size or args.resume:
        raise SystemExit("--num_envs must be a multiple of --group_size, and there is no --resume")
    args.vf_coef = 0.0
    vldac.check_world(args)
    folder = vldac.open_run(args)
    players = [vldac.Player(args, index) for index in range(args.num_envs)]
    vldac.set_seed(args.seed)
    policy = vldac.VLMPolicy(args)
    optimizer = vldac.make_optimizer(policy, args)
    unit = args.num_envs * args.num_steps  # environment steps of an update of VL-DAC: the schedule's unit
    num_updates = args.total_timesteps // unit
    step, update, recent, row = 0, 0, [], {}
    while True:
        done = step + unit > args.total_timesteps
        if args.eval_episodes and (update == 0 or done):
            result = vldac.summary(vldac.evaluate(policy, players, range(args.eval_episodes)))
            row |= {f"eval/{name}": x for name, x in result.items()}
        vldac.write_row(folder, {"update": update, "global_step": step} | row, args)
        if done:
            break

        rate = vldac.cosine(step // unit, num_updates, args.learning_rate, args.final_learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        vldac.set_seed(vldac.training_seed(args.seed, 0, update))
        times = [time.perf_counter()]
        episodes = collect(policy, players, args, update)
        times.append(time.perf_counter())
        rollout = choose(policy, episodes, args)
        times.append(time.perf_counter())
        losses = vldac.update(policy, optimizer, rollout, args, surrogate=loop_loss) if rollout else {}
        times.append(time.perf_counter())
        results = [player.result() for player in players]
        recent = (recent + results)[-100:]
        played = vldac.Rollout([step for episode in episodes for step in episode], [], results)
        row = {"episodes": results, "charts/learning_rate": rate}
        row |= vldac.charts(policy, played, losses, times, recent)
        step, update = step + len(played.steps), update + 1
    vldac.save_adapter(policy, folder / "adapter")


if __name__ == "__main__":
    main()
