"""ArCHer (Zhou et al. 2024, arXiv 2402.19446) in miniature, made of the parts of vldac.py.

What VL-DAC is compared with: a critic that learns from a replay buffer, by one-step TD, and an actor that
learns by REINFORCE from responses that it samples anew, with the critic's advantages. The critic has two Q of
a state and its response and two V of a state, MLPs on hidden states of the model without its LoRA. So the
buffer holds vectors and no frames, and they stay what they are while LoRA learns.

    python extras/archer.py --env OneRoom                 takes vldac.py's options and those of Args, below
    python extras/archer.py --env OneRoom --buffer 512    as VL-DAC's paper: little but the newest rollout

Not as in its authors' code:
* their critic is a language model of its own, trained as a whole, and encodes the response alone. Here Q sees
  the hidden state at the response's last token;
* V learns from the newest rollout and its responses. Theirs learns from states of the buffer, with responses
  that are sampled anew, as their actor does;
* the actor learns once from each state of the newest rollout, in minibatches as VL-DAC's;
* the critic leaves out a step that timed out, as VL-DAC learns nothing from its reward. They treat it as an
  end;
* the KL term, the cosine and the rates are VL-DAC's, and the critic has the actor's rate. They have no KL,
  and constant rates. (The KL is a mean over the tokens, beside a sum of log-probabilities.) Advantages are
  not normalised, as in their code.
In the first --value_warmup updates only the critic learns, as one-step TD carries a reward back slowly.
gae_lambda, clip_coef and stop_grad have no effect. The buffer is on the GPU and in every checkpoint: by
arithmetic 2 GB of a 7B after 51,200 steps.
"""

import copy
import dataclasses
import itertools
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replaced import replaced  # noqa: E402

import vldac  # noqa: E402
from envs import check  # noqa: E402

original = types.SimpleNamespace(**vars(vldac))  # the functions, as they were


@dataclass
class Args(vldac.Args):
    """The options of vldac.py, and three more."""

    buffer: int = 100_000  # environment steps that Q learns from, the newest ones
    critic_steps: int = 50  # optimizer steps of the critic in an update
    tau: float = 0.1  # after each of them: target += tau * (critic - target)
    gamma: float = 0.95  # discount per environment step; in card games 1
    value_warmup: int = 10  # updates that train only the critic; its authors have 10 or 20
    update_epochs: int = 1  # responses are used once
    vf_coef: float = 0.0  # the value head of vldac.py is not used

    def __post_init__(self):
        super().__post_init__()
        check(self.update_epochs == 1, "responses are used once: no --update_epochs")
        check(self.vf_coef == 0, "there is no value head, so no --vf_coef")
        check(self.kl_ref == "base", "there is no older policy, so no --kl_ref old")


class Critic(nn.Module):
    """Q1 and Q2 of a state and its response, V1 and V2 of a state, from hidden states of width H."""

    def __init__(self, H, widths):
        super().__init__()

        def mlp(inputs):
            sizes, layers = [inputs, *widths], []
            for size, next_size in itertools.pairwise(sizes):
                layers += [nn.Linear(size, next_size), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

        self.q_heads = nn.ModuleList([mlp(2 * H), mlp(2 * H)])
        self.v_heads = nn.ModuleList([mlp(H), mlp(H)])

    def q(self, states, responses):
        """(B, H), (B, H) -> (2, B)"""
        both = torch.cat([states, responses], 1)
        return torch.stack([head(both)[:, 0] for head in self.q_heads])

    def v(self, states):
        """(B, H) -> (2, B)"""
        return torch.stack([head(states)[:, 0] for head in self.v_heads])

    @torch.no_grad()
    def advantages(self, states, responses):
        """min(Q1, Q2) - min(V1, V2): (B, H), (B, H) -> (B,)"""
        return self.q(states, responses).amin(0) - self.v(states).amin(0)


@torch.no_grad()
def features(policy, prompts, responses):
    """Hidden states without LoRA, at the last token of N prompts and of their responses: (N, H), (N, H)."""
    of_prompts, of_responses = [], []
    size = policy.args.micro_batch_size
    with policy.peft_model.disable_adapter(), policy.autocast:
        for start in range(0, len(prompts), size):
            some = responses[start : start + size]
            inputs = policy.inputs(prompts[start : start + size], some)
            hidden = policy.vlm.model(**inputs, use_cache=False).last_hidden_state  # (B, P + R, H)
            lengths = torch.tensor([len(tokens) for tokens in some])
            last = hidden.shape[1] - lengths.max() - 1  # column P - 1, the last one of each prompt
            rows = torch.arange(len(some))
            of_prompts.append(hidden[rows, last].float())  # a copy, so that `hidden` is freed
            of_responses.append(hidden[rows, last + lengths].float())
    return torch.cat(of_prompts), torch.cat(of_responses)


def transitions(policy, steps, last_prompts):
    """A rollout's steps, but for those that timed out, as rows (M, 3 H + 2) of the buffer.

    Each has state, response and next state, reward, and 1 if the step ended the episode.
    """
    states, responses = features(policy, [step.prompt for step in steps], [step.tokens for step in steps])
    N = len(last_prompts)
    last_states, _ = features(policy, last_prompts, [policy.no_tokens] * N)
    # Step i + N is the same player's next one. Where the episode has ended it is not used.
    next_states = torch.cat([states[N:], last_states])
    ends = torch.tensor([[step.reward, float(step.done)] for step in steps], device=states.device)
    kept = torch.tensor([not step.timed_out for step in steps], device=states.device)
    return torch.cat([states, responses, next_states, ends], 1)[kept]


def critic_loss(critic, target, replayed, newest, gamma):
    """Squared errors of Q on rows of the buffer, and of V on rows of the newest rollout, both networks added.

    The target of V(s) is Q of s and a response of today's policy, which only the newest rows have.
    """
    H = (replayed.shape[1] - 2) // 3
    states, responses, next_states, rewards, dones = replayed.split([H, H, H, 1, 1], 1)
    new_states, new_responses, _ = newest.split([H, H, H + 2], 1)
    with torch.no_grad():
        of_q = rewards[:, 0] + gamma * (1 - dones[:, 0]) * target.v(next_states)  # (2, B)
        of_v = target.q(new_states, new_responses)  # (2, B)
    q_errors = critic.q(states, responses) - of_q
    v_errors = critic.v(new_states) - of_v
    return q_errors.pow(2).mean(1).sum(), v_errors.pow(2).mean(1).sum()


@torch.no_grad()
def polyak(target, critic, tau):
    """Move the target critic's weights towards the critic's."""
    for old, new in zip(target.parameters(), critic.parameters(), strict=True):
        old.lerp_(new, tau)


def train_critic(critic, target, optimizer, buffer, newest, args) -> dict[str, float]:
    """`critic_steps` optimizer steps, each on 256 random rows of both, as theirs. Returns mean losses."""
    losses = []
    for _ in range(args.critic_steps):
        replayed = buffer[torch.randint(len(buffer), (256,))]
        some_of_newest = newest[torch.randint(len(newest), (256,))]
        q_loss, v_loss = critic_loss(critic, target, replayed, some_of_newest, args.gamma)
        optimizer.zero_grad()
        (q_loss + v_loss).backward()
        nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        polyak(target, critic, args.tau)
        losses.append([q_loss.item(), v_loss.item()])
    return dict(zip(["q_loss", "v_loss"], np.mean(losses, 0).tolist(), strict=True))


def reinforce_loss(newlogprobs, logprobs, advantages, mask, clip_coef):
    """-A log pi(a|s), of the whole response, to minimise. The arguments are vldac.policy_loss's.

    >>> lp, mask = torch.tensor([[-1.0, -0.5], [-2.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> reinforce_loss(lp, lp, torch.tensor([2.0, -1.0]), mask, clip_coef=0.1)  # (2 * 1.5 - 2.0) / 2
    tensor(0.5000)
    """
    return (-advantages * newlogprobs.masked_fill(mask == 0, 0).sum(1)).mean()


def train_actor(policy, critic, optimizer, minibatches, args) -> dict[str, float]:
    """An optimizer step for each minibatch of states, on responses that are sampled just before it."""
    logs, all_advantages = [], []
    for minibatch in minibatches:
        steps = list(itertools.chain(*minibatch))
        prompts, responses = [step.prompt for step in steps], []
        for start in range(0, len(prompts), args.num_envs):
            responses += policy.sample(prompts[start : start + args.num_envs])
        advantages = critic.advantages(*features(policy, prompts, responses)).tolist()
        all_advantages += advantages
        fresh = []
        for step, tokens, advantage in zip(steps, responses, advantages, strict=True):
            fresh.append(dataclasses.replace(step, tokens=tokens, advantage=advantage))
        answered = vldac.make_minibatches(fresh, args)  # a single one
        original.score(policy, answered)
        for step in fresh:
            step.return_ = step.value  # not used: the value loss has the weight 0
        logs.append(original.update(policy, optimizer, answered, args))
    means = {name: np.mean([log[name] for log in logs]).item() for name in logs[0]}
    mean, std = np.mean(all_advantages).item(), np.std(all_advantages).item()
    return means | {"advantage_mean": mean, "advantage_std": std}


# Functions that replace those of vldac of the same name; some call the one that they replace.


class Policy(vldac.VLMPolicy):
    """With the critic, its target, its optimizer and its buffer."""

    def __init__(self, args):
        super().__init__(args)
        self.critic = Critic(self.value_head[0].in_features, args.value_hidden).to(args.device)
        self.target = copy.deepcopy(self.critic)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters())
        self.buffer = torch.zeros(0, device=args.device)


def collect(policy, players, args):
    steps, last_prompts, episodes = original.collect(policy, players, args)
    policy.newest = transitions(policy, steps, last_prompts)
    return steps, last_prompts, episodes


def score(policy, minibatches):
    """Nothing: the responses that are trained are sampled later."""


def add_advantages(steps, last_values, args):
    N = len(last_values)
    ended = [any(step.done and not step.timed_out for step in steps[n::N]) for n in range(N)]
    return {"outcomes": sum(ended) / N}


def update(policy, optimizer, minibatches, args, warmup=False):
    for group in policy.critic_optimizer.param_groups:
        group["lr"] = optimizer.param_groups[0]["lr"]
    rows = torch.cat([policy.buffer, policy.newest])
    policy.buffer = rows[-args.buffer :].clone()  # without the rows that are left out
    of_critic = policy.critic, policy.target, policy.critic_optimizer
    log = train_critic(*of_critic, policy.buffer, policy.newest, args)
    if not warmup:
        log |= train_actor(policy, policy.critic, optimizer, minibatches, args)
    return log


SAVED = ["critic", "target", "critic_optimizer"]  # and the buffer


def save_checkpoint(folder, policy, optimizer, players, **state):
    state |= {name: getattr(policy, name).state_dict() for name in SAVED}
    original.save_checkpoint(folder, policy, optimizer, players, buffer=policy.buffer, **state)


def load_checkpoint(folder, policy, optimizer, players):
    state = original.load_checkpoint(folder, policy, optimizer, players)
    for name in SAVED:
        getattr(policy, name).load_state_dict(state[name])
    policy.buffer = state.pop("buffer").to(policy.args.device)
    return state


REPLACED = [collect, score, add_advantages, update, save_checkpoint, load_checkpoint]


def train(args, folder):
    others = {function.__name__: function for function in REPLACED}
    with replaced(**others, VLMPolicy=Policy, policy_loss=reinforce_loss):
        vldac.train(args, folder)


def main(argv=None):
    vldac.main(argv, Args, train)


if __name__ == "__main__":
    main()
