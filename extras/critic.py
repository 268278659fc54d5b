"""What is VL-DAC's step value worth? The same algorithm with a value for every token, or with none.

    python extras/critic.py --env OneRoom --critic token    takes vldac.py's options and --critic

token           V_{t,i} is the value head on the state before token i (from 0) of step t, so V_{t,0} is
                VL-DAC's V(s_t). GAE goes from token to token, and decays by lambda at each of them.
token-per-step  the same with lambda^(1/R_t), R_t tokens in the response: a step decays as in VL-DAC.
none            V = 0, and there is no value loss (--vf_coef has no effect): an advantage is the sum of the
                rewards that follow in the rollout, discounted by gamma * lambda a step (0.94 by default; with
                --gae_lambda 1 by gamma), and a step that timed out adds 0.

It replaces vldac.VLMPolicy, and for values of tokens vldac.add_advantages and vldac.losses. (A page by
extras/page.py has advantages per step.)
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replaced import replaced  # noqa: E402

import vldac  # noqa: E402
from vldac import diagnostics, kl_base, kl_old, pad, step_mean  # noqa: E402


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, and one more."""

    critic: Literal["token", "token-per-step", "none"] = "token"  # values of what: see the top of the file

    def __post_init__(self):
        super().__post_init__()
        if self.critic == "none":
            self.vf_coef = 0.0


class NoCritic(vldac.VLMPolicy):
    """A policy whose values are 0."""

    def forward(self, prompts, responses):
        logprobs, mask, values = super().forward(prompts, responses)
        return logprobs, mask, 0 * values


class TokenCritic(vldac.VLMPolicy):
    """A policy with a value of the state before each token of a response, and of the state after the last."""

    def __init__(self, args):
        super().__init__(args)
        self.vlm.model.register_forward_hook(self.keep)  # also called by generate(), where it is not used

    def keep(self, model, inputs, output):
        self.hidden = output.last_hidden_state  # (B, P + R, H)

    def forward(self, prompts, responses):
        """As in vldac, but the values are (B, R + 1). So vldac.score makes a list of each `step.value`."""
        logprobs, mask, _ = super().forward(prompts, responses)
        h = self.hidden[:, -1 - mask.shape[1] :].float()  # (B, R + 1, H), from the last prompt token on
        if self.args.stop_grad:
            h = h.detach()
        return logprobs, mask, self.value_head(h)[..., 0]


def token_gae(rewards, values, last_value, dones, timed_out, gamma, decays) -> list[torch.Tensor]:
    """GAE from token to token, over T steps of one player.

    rewards           (T,)  paid at the last token of a step
    values            T of them, (R_t,), each of the state before a token
    last_value        ()    of the state after the rollout
    dones, timed_out  (T,)  as in Step: a step that timed out is done; all its advantages are 0
    gamma             counts at the end of a step only
    decays            (T,)  lambda per token
    Returns T advantages (R_t,).

    >>> values = [torch.tensor([0.0, 0.5]), torch.tensor([1.0])]
    >>> flags = torch.tensor([False, True]), torch.tensor([False, False])
    >>> token_gae(torch.tensor([0.0, 3.0]), values, torch.tensor(9.0), *flags, gamma=0.5, decays=[0.5, 0.5])
    [tensor([0.7500, 0.5000]), tensor([2.])]
    """
    advantages = [torch.zeros_like(value) for value in values]
    next_value, next_advantage = last_value, torch.zeros_like(last_value)
    for t in reversed(range(len(rewards))):
        if dones[t]:
            next_value = next_advantage = torch.zeros_like(last_value)
        if timed_out[t]:
            next_value = values[t][0]
            continue
        reward, discount = rewards[t], gamma
        for i in reversed(range(len(values[t]))):
            delta = reward + discount * next_value - values[t][i]
            next_advantage = delta + discount * decays[t] * next_advantage
            advantages[t][i] = next_advantage
            next_value = values[t][i]
            reward, discount = 0, 1  # of the tokens before
    return advantages


def add_advantages(steps, last_values, args) -> dict[str, float | None]:
    """Complete the steps: advantages and returns, (R_b,) each. last_values (N, 1); the rest as in vldac."""
    N = len(last_values)
    for n in range(N):
        of_player = steps[n::N]
        rewards = torch.tensor([step.reward for step in of_player])
        # A list for the longest response of a micro-batch: what comes after the last token is not used.
        values = [torch.tensor(step.value[: len(step.tokens)]) for step in of_player]
        dones = torch.tensor([step.done for step in of_player])
        timed_out = torch.tensor([step.timed_out for step in of_player])
        decays = [args.gae_lambda for _ in of_player]
        if args.critic == "token-per-step":
            decays = [args.gae_lambda ** (1 / len(step.tokens)) for step in of_player]
        last_value = last_values[n, 0].cpu()
        advantages = token_gae(rewards, values, last_value, dones, timed_out, args.gamma, decays)
        for step, advantage, value in zip(of_player, advantages, values, strict=True):
            step.advantage, step.return_ = advantage, advantage + value

    # Every step weighs the same, however long its response is.
    advantages = [step.advantage for step in steps]
    mean = torch.stack([advantage.mean() for advantage in advantages]).mean()
    squares = torch.stack([(advantage - mean).pow(2).mean() for advantage in advantages])
    std = (squares.sum() / (len(squares) - 1)).sqrt()
    for step in steps:
        step.advantage = (step.advantage - mean) / (std + 1e-8)
    kept = torch.tensor([not step.timed_out for step in steps])
    returns = torch.stack([step.return_[0] for step in steps])  # as VL-DAC's: of the states before a response
    values = torch.tensor([step.value[0] for step in steps])
    variance, unexplained = returns[kept].var(), (returns - values)[kept].var()
    explained = (1 - unexplained / variance).item() if variance > 0 else None
    ended = [any(step.done and not step.timed_out for step in steps[n::N]) for n in range(N)]
    outcomes = sum(ended) / N
    return {"outcomes": outcomes, "explained_variance": explained, "advantage_std": std.item()}


def token_policy_loss(newlogprobs, logprobs, advantages, mask, clip_coef):
    """vldac.policy_loss with an advantage (B, R) for every token.

    >>> new, old, one = torch.tensor([[1.5, 1.5]]).log(), torch.zeros(1, 2), torch.ones(1, 2)
    >>> token_policy_loss(new, old, torch.tensor([[2.0, -2.0]]), one, clip_coef=0.2)  # -2.4 and 3
    tensor(0.3000)
    """
    ratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0).exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return step_mean(torch.max(-advantages * ratio, -advantages * clipped), mask)


def token_value_loss(values, returns, mask):
    """Half the squared error, as a mean over the tokens of a step, then over steps; all (B, R).

    >>> token_value_loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2))
    tensor(1.)
    """
    return 0.5 * step_mean((values - returns).pow(2), mask)


def losses(policy, micro_batch, args):
    """vldac.losses with values of tokens: a copy but for the lines below which "Of tokens" is written."""
    prompts, responses = [step.prompt for step in micro_batch], [step.tokens for step in micro_batch]
    newlogprobs, mask, newvalues = policy(prompts, responses)
    logprobs = pad([step.logprobs for step in micro_batch])  # (B, R)
    baselogprobs = pad([step.baselogprobs for step in micro_batch])  # (B, R)

    # Of tokens:
    advantages = pad([step.advantage for step in micro_batch]).to(args.device)  # (B, R)
    returns = pad([step.return_ for step in micro_batch]).to(args.device)  # (B, R)
    pg_loss = token_policy_loss(newlogprobs, logprobs, advantages, mask, args.clip_coef)
    v_loss = token_value_loss(newvalues[:, :-1], returns, mask)

    if args.kl_ref == "base":
        kl = kl_base(newlogprobs, baselogprobs, mask)
    else:
        kl = kl_old(newlogprobs, logprobs, mask)
    loss = pg_loss + args.kl_coef * kl + args.vf_coef * v_loss

    log = {"policy_loss": pg_loss.item(), "kl_loss": kl.item(), "value_loss": v_loss.item()}
    return loss, log | diagnostics(newlogprobs, logprobs, baselogprobs, mask, args.clip_coef)


def train(args, folder):
    others = {"VLMPolicy": NoCritic}
    if args.critic != "none":
        others = {"VLMPolicy": TokenCritic, "add_advantages": add_advantages, "losses": losses}
    with replaced(**others):
        vldac.train(args, folder)


def main(argv=None):
    vldac.main(argv, Args, train)


if __name__ == "__main__":
    main()
