"""RL4VLM (Zhai et al. 2024, arXiv 2405.10292) for vision-language agents, made of the parts of vldac.py.

What VL-DAC is compared with: one ratio per environment step instead of one per token, in which a thought's
log-probability has the weight lambda. Critic, KL term, warm-up and the rest are VL-DAC's, as in its paper.

    python extras/rl4vlm.py --env OneRoom    takes vldac.py's options and --thought_coef

Unlike RL4VLM's code, a response without an "action" key is all thought. The log's clipfrac has the ratios of
tokens, as in vldac.py, and not those that are clipped here. It replaces vldac.losses.
"""

import bisect
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replaced import replaced  # noqa: E402

import vldac  # noqa: E402
from vldac import diagnostics, kl_base, kl_old, pad, value_loss  # noqa: E402


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, and one more."""

    thought_coef: float = 0.5  # lambda, the weight of a thought's log-probability


def rl4vlm_loss(newlogprobs, logprobs, advantages, weights, clip_coef):
    """PPO's clip on one ratio per environment step, to minimise.

    log pi(a_t | s_t) = lambda * sum of log p over the thought + sum of log p over the rest
    weights (B, R): lambda on the thought's tokens, 1 on the others, 0 where masked; the rest as policy_loss.

    >>> lp = torch.tensor([[0.4055, 0.1823]])  # ratios 1.5 and 1.2: 1.5^0.5 * 1.2 = 1.47, clipped at 1.2
    >>> rl4vlm_loss(lp, torch.zeros(1, 2), torch.tensor([2.0]), torch.tensor([[0.5, 1.0]]), clip_coef=0.2)
    tensor(-2.4000)
    """
    new = (newlogprobs.masked_fill(weights == 0, 0) * weights).sum(1, keepdim=True)  # (B, 1)
    old = (logprobs.masked_fill(weights == 0, 0) * weights).sum(1, keepdim=True)  # (B, 1)
    # A response is one token.
    return vldac.policy_loss(new, old, advantages, torch.ones_like(new), clip_coef)


def thought_length(policy, tokens) -> int:
    """How many tokens of a response (R_b,) are its thought.

    It ends before the token in which the last "action" key begins; without a key all is thought.
    """
    [response] = policy.decode([tokens])
    keys = list(vldac.ACTION_KEY.finditer(response))
    if not keys:
        return len(tokens)
    ids = tokens.tolist()

    def characters(r):  # from the first token to token r
        return len(policy.tokenizer.decode(ids[: r + 1]))

    return bisect.bisect_right(range(len(ids)), keys[-1].start(), key=characters)


def thought_weights(policy, tokens) -> torch.Tensor:
    """Lambda on the thought's tokens of a response, 1 on the others: (R_b,) -> (R_b,)."""
    weights = torch.ones(len(tokens), device=tokens.device)
    weights[: thought_length(policy, tokens)] = policy.args.thought_coef
    return weights


def losses(policy, micro_batch, args):
    """vldac.losses with another policy loss: a copy but for the lines below which "RL4VLM" is written."""
    prompts, responses = [step.prompt for step in micro_batch], [step.tokens for step in micro_batch]
    newlogprobs, mask, newvalues = policy(prompts, responses)
    logprobs = pad([step.logprobs for step in micro_batch])  # (B, R)
    baselogprobs = pad([step.baselogprobs for step in micro_batch])  # (B, R)
    advantages = torch.tensor([step.advantage for step in micro_batch], device=args.device)  # (B,)
    returns = torch.tensor([step.return_ for step in micro_batch], device=args.device)  # (B,)

    # RL4VLM:
    weights = pad([thought_weights(policy, step.tokens) for step in micro_batch])  # (B, R)
    pg_loss = rl4vlm_loss(newlogprobs, logprobs, advantages, weights, args.clip_coef)

    v_loss = value_loss(newvalues, returns)
    if args.kl_ref == "base":
        kl = kl_base(newlogprobs, baselogprobs, mask)
    else:
        kl = kl_old(newlogprobs, logprobs, mask)
    loss = pg_loss + args.kl_coef * kl + args.vf_coef * v_loss

    log = {"policy_loss": pg_loss.item(), "kl_loss": kl.item(), "value_loss": v_loss.item()}
    return loss, log | diagnostics(newlogprobs, logprobs, baselogprobs, mask, args.clip_coef)


def train(args, folder):
    with replaced(losses=losses):
        vldac.train(args, folder)


def main(argv=None):
    vldac.main(argv, Args, train)


if __name__ == "__main__":
    main()
