"""The algorithm with its numbers: one rollout of two players and one optimizer step, taken apart.

    python extras/walkthrough.py runs/NAME

plays a few steps with the model of a run, as it is now, and prints what each call of `train` adds to them.
The optimizer step is that of a new Adam, at the learning rate of a first update. The run is not changed.
Every number is computed by the functions of vldac.py.
"""

import dataclasses
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl4vlm  # noqa: E402

import vldac  # noqa: E402
from envs import UserError, check, exit_with  # noqa: E402

T, N = 8, 2  # environment steps of each player, and players


def show(title, columns, rows):
    """A table in plain text, each column as wide as it needs."""
    cells = [columns]
    for row in rows:
        cells.append([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}\n")
    for row in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_prompt(policy, step):
    """The prompt's last columns. At the last one, P - 1, V(s_t) is read and the first token predicted."""
    ids = step.prompt["input_ids"][0]
    P = len(ids)
    rows = [[c, repr(policy.tokenizer.decode(ids[c])), ""] for c in range(P - 4, P)]
    rows[-1][2] = "<- P - 1: V(s_t), and the first token's probabilities"
    rows.append([P, repr(policy.tokenizer.decode(step.tokens[0])), "<- the first token of the response"])
    show(f"1. collect: the end of a prompt of P = {P} tokens", ["column", "token", ""], rows)
    print(f"\n  the response: {step.text}\n  its action: {step.action}")


def least_likely(policy, step) -> float:
    """The lowest log-probability of a token of the thought; a response without one is not chosen."""
    thought = step.logprobs[: rl4vlm.thought_length(policy, step.tokens)]
    return min(thought.tolist(), default=-math.inf)


def show_scores(policy, step):
    """Log-probabilities of a response, token by token."""
    thought_length = rl4vlm.thought_length(policy, step.tokens)
    rows = []
    for r, token in enumerate(step.tokens):
        word = repr(policy.tokenizer.decode(token))
        note = "thought" if r < thought_length else ""
        rows.append([word, step.logprobs[r].item(), step.baselogprobs[r].item(), note])
    show("2. score: log-probabilities of its tokens, in nats", ["token", "policy", "base", ""], rows)
    print(f"\n  and one value of the whole step: V(s_t) = {step.value:.3f}")


def show_advantages(steps, deltas):
    """delta, A, G and the normalised A of each environment step."""
    rows = []
    for n in range(N):
        for t in range(T):
            step = steps[t * N + n]
            advantage = step.return_ - step.value  # before it is normalised
            end = "time-out" if step.timed_out else "end" if step.done else ""
            numbers = [step.reward, step.value, deltas[t, n].item(), advantage, step.return_, step.advantage]
            rows.append([n, t, str(step.action), *numbers, end])
    columns = ["player", "t", "action", "reward", "V", "delta", "A", "G", "normalised A", ""]
    show("3. add_advantages: GAE over the environment steps", columns, rows)


def show_losses(policy, steps, args):
    """The three losses and their sum before the optimizer step, and whom the value loss teaches."""

    def largest_gradient(scalar):  # on a LoRA weight; the graph is freed
        gradients = torch.autograd.grad(scalar, policy.lora_parameters(), materialize_grads=True)
        return max(gradient.abs().max().item() for gradient in gradients)

    policy.train()  # for gradient checkpointing
    loss, log = vldac.losses(policy, steps, args)
    of_sum = largest_gradient(loss)
    parts = [log["policy_loss"], log["kl_loss"], log["value_loss"]]
    weighted = [parts[0], args.kl_coef * parts[1], args.vf_coef * parts[2]]
    rows = [["loss", *parts, ""], ["its share", *weighted, loss.item()]]
    show("4. losses: Eq. 6, over all steps", ["", "policy", "KL", "value", "sum"], rows)
    print("\n  (Before the optimizer step all ratios are 1, and the normalised A sum to 0.)\n")
    _, _, values = policy([step.prompt for step in steps], [step.tokens for step in steps])
    v_loss = vldac.value_loss(values, torch.tensor([step.return_ for step in steps], device=args.device))
    print(f"  largest gradient on a LoRA weight, of the sum: {of_sum:.6f}")
    print(f"  largest gradient on a LoRA weight, of the value loss alone: {largest_gradient(v_loss):.6f}")


def show_ratios(policy, step, batch, args):
    """After an optimizer step: each token's ratio, its loss, and what that would be without the clip.

    batch  the steps that `step` was scored with: in another batch rounding would be another
    """
    with torch.no_grad():
        logprobs, _, _ = policy([step.prompt for step in batch], [step.tokens for step in batch])
    new = logprobs[batch.index(step)][None]
    advantage, one = torch.tensor([step.advantage], device=args.device), torch.ones_like(new[:, :1])
    rows = []
    for r, token in enumerate(step.tokens):
        pair = new[:, r : r + 1], step.logprobs[None, r : r + 1]
        loss = vldac.policy_loss(*pair, advantage, one, args.clip_coef).item()
        unclipped = vldac.policy_loss(*pair, advantage, one, clip_coef=1e9).item()
        ratio = (pair[0] - pair[1]).exp().item()
        word = repr(policy.tokenizer.decode(token))
        note = "clipped: no policy gradient" if loss != unclipped else ""
        rows.append([word, ratio, loss, unclipped, note])
    title = "5. update: the response after one optimizer step; normalised A is "
    title += f"{step.advantage:.3f} for all its tokens"
    show(title, ["token", "ratio", "loss", "without clip", ""], rows)


def main(folder):
    args = vldac.load_args(folder)
    vldac.check_args(args)
    check(args.vf_coef > 0, "this run has no critic, so no V to show")
    one_step = {"minibatch_size": T * N, "micro_batch_size": T * N, "update_epochs": 1}
    args = dataclasses.replace(args, num_envs=N, num_steps=T, **one_step)
    vldac.set_seed(args.seed)
    players = [vldac.Player(args, n) for n in range(N)]
    policy = vldac.VLMPolicy(args)
    update = vldac.load_weights(Path(folder), policy)["update"]
    print(f"{folder} after {update} updates; {N} players, {T} steps each")
    for player in players:
        player.next_episode()

    steps, last_prompts, _ = vldac.collect(policy, players, args)
    minibatches = vldac.make_minibatches(steps, args)
    vldac.score(policy, minibatches)
    last_values = policy.values(last_prompts)
    vldac.add_advantages(steps, last_values, args)
    # Of the half that teaches most, the response whose thought is the likeliest: it is a sensible one.
    steps_by_size = sorted(steps, key=lambda step: abs(step.advantage))
    half = steps_by_size[len(steps) // 2 :]
    step = max(half, key=lambda step: least_likely(policy, step))
    show_prompt(policy, step)
    show_scores(policy, step)

    rewards = torch.tensor([s.value if s.timed_out else s.reward for s in steps]).view(T, N)
    values = torch.tensor([s.value for s in steps]).view(T, N)
    dones = torch.tensor([s.done for s in steps]).view(T, N)
    deltas, _ = vldac.gae(rewards, values, last_values.cpu(), dones, args.gamma, gae_lambda=0.0)
    show_advantages(steps, deltas)
    [[batch]] = minibatches
    show_losses(policy, batch, args)
    optimizer = vldac.make_optimizer(policy, args)
    vldac.update(policy, optimizer, minibatches, args)
    show_ratios(policy, step, batch, args)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    try:
        main(sys.argv[1])
    except UserError as error:
        exit_with(error)
