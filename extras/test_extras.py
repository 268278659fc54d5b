"""The tests of extras/: what VL-DAC is compared with, and what one looks at: pages, curves and films."""

import copy
import dataclasses
import doctest
import itertools
import json
import math
import random
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "extras")]

import archer  # noqa: E402
import critic  # noqa: E402
import film  # noqa: E402
import loop  # noqa: E402
import page as pages  # noqa: E402
import plot  # noqa: E402
import response_ratio  # noqa: E402
import rl4vlm  # noqa: E402
import walkthrough  # noqa: E402

import test_vldac  # noqa: E402
import vldac  # noqa: E402
from test_vldac import (  # noqa: E402
    CORRIDOR,
    LONG,
    NEARLY,
    TROUBLED,
    Troubled,
    column,
    evaluated,
    files,
    forked,
    gradients,
    killed,
    make_policy,
    mean_of_means,
    options,
    random_tokens,
    refused,
    same_runs,
    scored,
    some_minibatches,
    some_prompts,
    spy,
    start,
    surrogate,
)
from vldac import VLMPolicy, policy_loss  # noqa: E402

torch.set_num_threads(1)  # the models here are too small to share
# pytest finds fixtures by the names of a module.
model, model_folder = test_vldac.model, test_vldac.model_folder
run, toy_run = test_vldac.run, test_vldac.toy_run
PROGRAMS = [archer, critic, film, loop, pages, plot, response_ratio, rl4vlm]


@pytest.mark.parametrize("module", PROGRAMS, ids=lambda module: module.__name__)
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


# ------------------------------------------------------------------------- what VL-DAC is compared with


@pytest.mark.parametrize("thought_coef", [0.0, 0.3, 1.0])
def test_rl4vlm_equals_the_loop(thought_coef):
    """exp(lambda * thought + action) per step, clipped once; tokens under the padding may be NaN."""
    new, old, advantages, mask = random_tokens(6, 5)
    weights = mask.double()
    weights[:, :2] *= thought_coef
    logratios = ((new - old) * weights).sum(1).tolist()
    terms = []
    for logratio, advantage in zip(logratios, advantages.tolist(), strict=True):
        terms.append(surrogate(logratio, advantage))
    new = new.masked_fill(mask == 0, math.nan)
    loss = rl4vlm.rl4vlm_loss(new, old, advantages, weights, 0.1)
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-9)


def test_rl4vlm_weighs_the_thoughts_of_a_micro_batch(model):
    policy = make_policy(model)
    policy.args = rl4vlm.Args(**vars(policy.args), thought_coef=0.5)
    [[micro_batch]] = some_minibatches(policy)
    for step in micro_batch:
        step.logprobs = step.logprobs - 0.05 * torch.rand(len(step.tokens))
    new, _, _ = scored(policy, micro_batch)
    weights = vldac.pad([rl4vlm.thought_weights(policy, step.tokens) for step in micro_batch])
    assert weights.max() == 0.5  # they name no action
    old, advantages = column(micro_batch, "logprobs"), column(micro_batch, "advantage")
    expected = rl4vlm.rl4vlm_loss(new, old, advantages, weights, policy.args.clip_coef)
    _, log = rl4vlm.losses(policy, micro_batch, policy.args)
    assert log["policy_loss"] == pytest.approx(expected.item(), abs=1e-6)


def test_one_ratio_for_each_response_equals_the_loop():
    """The mean of its tokens' log ratios, clipped once."""
    new, old, advantages, mask = random_tokens(6, 5)
    logratios = ((new - old) * mask).sum(1) / mask.sum(1)
    terms = []
    for logratio, advantage in zip(logratios.tolist(), advantages.tolist(), strict=True):
        terms.append(surrogate(logratio, advantage))
    loss = response_ratio.response_loss(new, old, advantages, mask, 0.1)
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-9)


def test_loop_s_loss_equals_the_loop():
    """Clipped to 1 / 1.1 and 1.1."""

    def term(logratio, advantage):
        ratio = math.exp(logratio)
        return max(-advantage * ratio, -advantage * min(max(ratio, 1 / 1.1), 1.1))

    batch = random_tokens(6, 5)
    assert loop.loop_loss(*batch, 0.1).item() == pytest.approx(mean_of_means(term, *batch), abs=1e-9)


TALK = '{"thoughts": "it is ahead", '


@pytest.mark.parametrize("thought, action", [
    (TALK, '"action": "move"}'),
    (TALK + '"action": "stay", ', '"action" : "move"}'),  # the last key counts
    (TALK + '"act": "move"}', ""),  # no key: all is thought, the stop token too
    ("", '"action": "move"'),
    ('{"thoughts": "\u65e5\u672c", ', '"action": 1}'),  # tokens that are parts of a letter
    ('{"thoughts": "', 'hm", "action": 1}'),  # the token in which the key begins belongs to the action
])  # fmt: skip
def test_the_thought_ends_where_the_action_s_key_begins(thought, action, model):
    policy = make_policy(model)
    policy.args = rl4vlm.Args(thought_coef=0.25)
    policy.tokenizer.add_tokens(['hm", "act'])
    before, after = (policy.tokenizer(text).input_ids for text in (thought, action))
    tokens = torch.tensor(before + after + policy.stop_ids.tolist()[:1])
    split = len(before) if action else len(tokens)
    weights = rl4vlm.thought_weights(policy, tokens)
    assert weights.tolist() == [0.25] * split + [1.0] * (len(tokens) - split)


@pytest.mark.parametrize("warmup, changes", [
    (False, {"kl_ref": "old"}), (False, {"max_grad_norm": 1e-3}), (True, {"stop_grad": False}),
])  # fmt: skip
def test_rl4vlm_updates_as_vldac_but_for_its_loss(warmup, changes, model, monkeypatch):
    """With lambda 1, and where a response is one token, both do the same to the bit."""
    found = []
    for losses in (vldac.losses, rl4vlm.losses):
        monkeypatch.setattr(vldac, "losses", losses)
        policy = make_policy(model, max_new_tokens=1, **changes)
        policy.args = rl4vlm.Args(**vars(policy.args), thought_coef=1.0)
        minibatches = some_minibatches(policy, minibatch_size=3, micro_batch_size=2)
        random.seed(0)
        optimizer = vldac.make_optimizer(policy, policy.args)
        logged = vldac.update(policy, optimizer, minibatches, policy.args, warmup)
        found.append([logged, vldac.trainable_weights(policy)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_another_algorithm_replaces_a_function_for_the_length_of_its_run(run, monkeypatch, capsys):
    """And its run is not one of VL-DAC, even where only the loss differs."""
    called = []
    really = response_ratio.response_loss
    monkeypatch.setattr(response_ratio, "response_loss", lambda *batch: called.append(1) or really(*batch))
    folder, _ = run(CORRIDOR, main=response_ratio.main)
    assert called and vldac.policy_loss is policy_loss
    assert "is a run of response_ratio.py" in refused(["--resume", folder], capsys)


@pytest.mark.parametrize("minibatch_size", [128, 4])
def test_loop_takes_the_mean_over_an_episode_s_tokens_and_drops_groups_without_signal(minibatch_size):
    """Also where what is left is less than a minibatch."""
    args = loop.Args(group_size=2, gamma=0.5, minibatch_size=minibatch_size, device="cpu")

    def episode(*rewards):
        """Of responses of 1, 2, 3 ... tokens."""
        steps = []
        for number, reward in enumerate(rewards, 1):
            prompt = {"input_ids": torch.zeros(1, 9)}
            steps.append(vldac.Step(prompt, torch.ones(number), "", None, reward, False, False))
        return steps

    equal = [episode(0.0, 1.0), episode(1.0)]  # nothing is discounted
    assert loop.make_minibatches(equal, args) == []
    first, second = episode(0.0, 0.0, 2.0), episode(0.0, 1.0)
    minibatches = loop.make_minibatches([*equal, first, second], args)
    sizes = [sum(map(len, minibatch)) for minibatch in minibatches]
    assert sizes == ([5] if minibatch_size == 128 else [3, 2])  # equally large

    met = 0
    for micro_batch in itertools.chain(*minibatches):
        mask = column(micro_batch, "tokens")
        new = torch.zeros(mask.shape, requires_grad=True)
        loss = loop.loop_loss(new, torch.zeros(new.shape), column(micro_batch, "advantage"), mask, 0.1)
        [gradient] = torch.autograd.grad(loss * len(micro_batch) / 5, new)  # its part of all 5 steps
        shares = [-1 / 6 if step in first else 1 / 3 for step in micro_batch]  # its advantage over its tokens
        shares = torch.tensor(shares) / 4  # of 4 episodes: the dropped ones count
        torch.testing.assert_close(gradient, shares[:, None] * mask)
        met += len(micro_batch)
    assert met == 5


def left_or_right(_, responses):
    """Instead of VLMPolicy.decode."""
    return [json.dumps({"action": ["left", "right"][tokens.sum() % 2]}) for tokens in responses]


def killed_and_resumed(run, options, main, tmp_path, monkeypatch) -> Path:
    """The folder of a run that was killed at its step 22 and went on."""
    monkeypatch.setattr(Troubled, "happens", killed)
    monkeypatch.setattr(Troubled, "number", 22)
    assert forked(lambda: run(TROUBLED, *options, name="part", main=main)) == [-signal.SIGKILL]
    monkeypatch.setattr(Troubled, "number", 0)
    folder = tmp_path / "part"
    main(["--resume", str(folder)])
    return folder


def test_groups_of_loop_are_whole():
    with pytest.raises(loop.UserError, match="must be a multiple of --group_size"):
        loop.Args(num_envs=6, device="cpu")
    loop.Args(num_envs=6, resume="runs/NAME", device="cpu")  # typed again: its --group_size is read later


def test_a_run_of_loop_that_was_killed_goes_on(run, tmp_path, monkeypatch):
    """Whole episodes, pairs from the same start, as many as the budget allows."""
    monkeypatch.setattr(VLMPolicy, "decode", left_or_right)
    options = [*LONG, "--total_timesteps", 60, "--num_envs", 4, "--num_steps", 2, "--group_size", 2]
    options += ["--final_learning_rate", 0.002]
    rates, called = [], []

    def note(policy, optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"])

    spy(monkeypatch, vldac, "update", note)
    spy(monkeypatch, loop, "loop_loss", lambda *_: called.append(1))
    folder, (_, *rows) = run(TROUBLED, *options, name="whole", main=loop.main)
    assert called and rates == [row["charts/learning_rate"] for row in rows if "losses/policy_loss" in row]
    played, starts, flags = 0, [], []
    for row in rows:
        assert played + 8 <= 60
        assert row["charts/learning_rate"] == vldac.cosine(played // 8, 7, 0.01, 0.002)
        one, other, two, another = [episode["seed"] for episode in row["episodes"]]
        assert (one, two) == (other, another)
        starts += [one, two]
        played += sum(episode["length"] for episode in row["episodes"])
        assert row["global_step"] == played
        flags += [episode["success"] for episode in row["episodes"]]
        assert row["losses/outcomes"] == np.mean(flags[-4:])  # its only end
        assert row["charts/success_rate"] == np.mean(flags)
    assert played + 8 > 60 and len(set(starts)) == 2 * len(rows) > 8

    part = killed_and_resumed(run, options, loop.main, tmp_path, monkeypatch)
    same_runs(folder, part)


def test_the_critic_of_archer_by_hand():
    """States and responses of width 1; each head is a line: Q(s, a) = 2s + a and s, V(s) = 3s and s + 1."""
    critic = archer.Critic(1, [])
    lines = [([2.0, 1.0], 0.0), ([1.0, 0.0], 0.0), ([3.0], 0.0), ([1.0], 1.0)]
    for head, (weight, bias) in zip([*critic.q_heads, *critic.v_heads], lines, strict=True):
        head[0].weight.data = torch.tensor([weight])
        head[0].bias.data = torch.tensor([bias])
    s, a = torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [-3.0]])
    assert critic.advantages(s, a).tolist() == [1 - 2, 1 - 3]  # min(7, 1) - min(3, 2), min(1, 2) - min(6, 3)

    target = copy.deepcopy(critic)
    replayed = torch.tensor([[1.0, 5.0, 2.0, 0.5, 0.0], [2.0, -3.0, 9.0, 1.0, 1.0]])  # s, a, s', r, done
    newest = torch.tensor([[2.0, 1.0, 9.0, 9.0, 9.0]])
    of_q1 = ((7 - (0.5 + 0.5 * 6)) ** 2 + (1 - 1) ** 2) / 2
    of_q2 = ((1 - (0.5 + 0.5 * 3)) ** 2 + (2 - 1) ** 2) / 2
    of_v1, of_v2 = (6 - 5) ** 2, (3 - 2) ** 2
    q_loss, v_loss = archer.critic_loss(critic, target, replayed, newest, gamma=0.5)
    assert (q_loss.item(), v_loss.item()) == (of_q1 + of_q2, of_v1 + of_v2)
    (q_loss + v_loss).backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    critic.q_heads[0][0].bias.data.fill_(8.0)
    archer.polyak(target, critic, 0.25)
    archer.polyak(target, critic, 0.25)
    assert target.q_heads[0][0].bias.item() == 3.5  # 2, and a quarter of the 6 that are left


def test_the_critic_of_archer_learns_q_from_the_buffer_and_v_from_the_newest():
    """States 1, 2 and 3: 1 pays and ends the episode, 2 ends it, 3 goes to 1. The newest is 3."""
    torch.manual_seed(0)
    critic = archer.Critic(1, [16])
    target = copy.deepcopy(critic)
    for head, value in zip([*target.q_heads, *target.v_heads], (0.25, 0.25, 0.5, 0.5), strict=True):
        head[-1].weight.data.fill_(0.0)
        head[-1].bias.data.fill_(value)
    buffer = torch.tensor([[1.0, 0.0, 9.0, 1.0, 1.0], [2.0, 0.0, 9.0, 0.0, 1.0], [3.0, 0.0, 1.0, 0.0, 0.0]])
    args = archer.Args(critic_steps=600, tau=0.0, device="cpu")
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    archer.train_critic(critic, target, optimizer, buffer, buffer[2:], args)
    states, responses = buffer[:, :1], buffer[:, 1:2]
    q, v = critic.q(states, responses), critic.v(states)
    torch.testing.assert_close(q, torch.tensor([[1.0, 0.0, 0.95 * 0.5]] * 2), atol=0.1, rtol=0)
    torch.testing.assert_close(v[:, 2], torch.tensor([0.25, 0.25]), atol=0.05, rtol=0)
    args = dataclasses.replace(args, critic_steps=1, tau=1.0)
    archer.train_critic(critic, target, optimizer, buffer, buffer[2:], args)
    torch.testing.assert_close(target.state_dict(), critic.state_dict(), rtol=0, atol=0)


def test_the_features_of_archer_are_of_the_base_and_its_rows_of_the_next_state(model):
    policy = make_policy(model, dtype="float64", micro_batch_size=3)
    prompts = some_prompts(policy, [1, 2, 1, 2, 2, 1])
    responses = [torch.tensor([100, 101, 102][: 1 + i % 3]) for i in range(4)]
    steps = []
    for i, flags in enumerate([(False, False), (True, False), (True, True), (False, False)]):
        steps.append(vldac.Step(prompts[i], responses[i], "", None, float(i), *flags))
    rows = archer.transitions(policy, steps, prompts[4:])  # two steps of two players
    assert rows[:, -2:].tolist() == [[0, 0], [1, 1], [3, 0]]  # the third has timed out
    with policy.peft_model.disable_adapter():
        for row, b in zip(rows, (0, 1, 3), strict=True):
            inputs = policy.inputs(prompts[b : b + 1], responses[b : b + 1])
            hidden = policy.vlm.model(**inputs).last_hidden_state[0].float()
            inputs = policy.inputs(prompts[b + 2 : b + 3])
            following = policy.vlm.model(**inputs).last_hidden_state[0, -1].float()
            expected = torch.cat([hidden[-1 - len(responses[b])], hidden[-1], following])
            torch.testing.assert_close(row[:-2], expected, **NEARLY)


def test_the_actor_of_archer_answers_anew(model, monkeypatch):
    """For each minibatch of states, by the policy of then; what the critic likes becomes likelier."""
    policy = make_policy(model, max_new_tokens=2, learning_rate=0.01)
    changes = {"vf_coef": 0.0, "kl_coef": 0.0, "minibatch_size": 2, "update_epochs": 1}
    policy.args = archer.Args(**vars(policy.args) | changes)
    critic = archer.Critic(policy.value_head[0].in_features, [])
    monkeypatch.setattr(critic, "advantages", lambda states, responses: 1 + responses[:, 0] / 1000)
    minibatches = some_minibatches(policy, minibatch_size=2)
    steps = list(itertools.chain(*itertools.chain(*minibatches)))
    before = [step.tokens for step in steps]
    happened, trained = [], []
    really = VLMPolicy.sample

    def sample(policy, prompts):
        responses = really(policy, prompts)
        happened.append(("sampled", sorted(tokens.tolist() for tokens in responses)))
        return responses

    def note(policy, optimizer, minibatches, args):
        minibatch = list(itertools.chain(*minibatches[0]))
        happened.append(("trained", sorted(step.tokens.tolist() for step in minibatch)))
        trained.append(minibatch)

    monkeypatch.setattr(VLMPolicy, "sample", sample)
    spy(monkeypatch, archer.original, "update", note)
    optimizer = vldac.make_optimizer(policy, policy.args)
    log = archer.train_actor(policy, critic, optimizer, minibatches, policy.args)
    assert [what for what, _ in happened] == ["sampled", "trained"] * len(minibatches)
    assert [tokens for _, tokens in happened[::2]] == [tokens for _, tokens in happened[1::2]]
    assert all(step.tokens is tokens for step, tokens in zip(steps, before, strict=True))
    answered = list(itertools.chain(*trained))
    prompts, responses = [step.prompt for step in answered], [step.tokens for step in answered]
    _, of_responses = archer.features(policy, prompts, responses)
    liked = [step.advantage for step in answered]
    torch.testing.assert_close(torch.tensor(liked), 1 + of_responses[:, 0] / 1000, **NEARLY)
    assert log["ratio_first"] == 0 and len(set(liked)) > 1
    assert (log["advantage_mean"], log["advantage_std"]) == pytest.approx((np.mean(liked), np.std(liked)))
    new, _, _ = scored(policy, trained[0])
    assert (new - column(trained[0], "logprobs")).sum() > 0


def test_a_run_of_archer_that_was_killed_goes_on(run, tmp_path, monkeypatch, capsys):
    """Its buffer is full after two updates."""
    monkeypatch.setattr(VLMPolicy, "decode", left_or_right)
    options = [*LONG, "--buffer", 12, "--critic_steps", 3]
    rates, losses = [], []

    def note(critic, target, optimizer, buffer, newest, args):
        rates.append(optimizer.param_groups[0]["lr"])
        assert torch.equal(buffer[-len(newest) :], newest)

    spy(monkeypatch, archer, "train_critic", note)
    spy(monkeypatch, archer, "reinforce_loss", lambda *_: losses.append(1))
    folder, (_, *rows) = run(TROUBLED, *options, name="whole", main=archer.main)
    assert losses and rates == [row["charts/learning_rate"] for row in rows]
    norms = [row["losses/grad_norm_lora"] > 0 for row in rows if "losses/grad_norm_lora" in row]
    assert norms == [True] * 3  # none in the warm-up
    assert all(len({row[f"losses/{name}_loss"] for row in rows}) == 4 for name in "qv")
    assert len(torch.load(folder / "checkpoint.pt")["buffer"]) == 12
    part = killed_and_resumed(run, options, archer.main, tmp_path, monkeypatch)
    same_runs(folder, part)
    refusals = {"update_epochs": "2", "vf_coef": "0.1", "kl_ref": "old"}
    for option, value in refusals.items():
        assert f"--{option}" in refused(["--env", CORRIDOR, f"--{option}", value], capsys, archer.main)


BOOTSTRAP, END, TIME_OUT = (False, False), (True, False), (True, True)
STEP_1 = {BOOTSTRAP: [2.375, 1.5, 2.0], END: [2.125, 0.5, -2.0], TIME_OUT: [0.0, 0.0, 0.0]}
BY_HAND = [  # and the advantages of step 0
    ("token", 1 / 4, BOOTSTRAP, [1.82421875, 3.296875]),
    ("token", 1 / 4, END, [1.81640625, 3.265625]),
    ("token", 1 / 4, TIME_OUT, [1.75, 3.0]),
    ("token-per-step", 1 / 64, BOOTSTRAP, [1.3935546875, 3.1484375]),
    ("token-per-step", 1 / 64, END, [1.3916015625, 3.1328125]),
    ("token-per-step", 1 / 64, TIME_OUT, [1.375, 3.0]),
]


def made_up_step(reward, values, done=False, timed_out=False):
    """One as vldac.score completes it, in a batch of longer responses: with values after its last token."""
    tokens = torch.zeros(len(values))
    return vldac.Step({}, tokens, "", None, reward, done, timed_out, value=[*values, 99.0, 99.0])


@pytest.mark.parametrize("kind, gae_lambda, flags, step_0", BY_HAND)
def test_the_advantages_of_tokens_by_hand(kind, gae_lambda, flags, step_0):
    """Steps of two and three tokens, gamma 1/2. Of 1/64, a token of two has 1/8, and one of three 1/4."""
    args = critic.Args(critic=kind, gamma=0.5, gae_lambda=gae_lambda, device="cpu")
    steps = [made_up_step(3.0, [1.0, 2.0]), made_up_step(5.0, [4.0, 6.0, 7.0], *flags)]
    stats = critic.add_advantages(steps, torch.tensor([[8.0]]), args)
    step_1 = STEP_1[flags]
    returns = [np.add(step_0, [1, 2]).tolist(), np.add(step_1, [4, 6, 7]).tolist()]
    assert [step.return_.tolist() for step in steps] == returns
    mean = (np.mean(step_0) + np.mean(step_1)) / 2  # a step of two tokens weighs as much as one of three
    variance = np.mean((step_0 - mean) ** 2) + np.mean((step_1 - mean) ** 2)  # their sum, over 2 - 1
    assert stats["advantage_std"] == pytest.approx(math.sqrt(variance))
    normalised = ([*step_0, *step_1] - mean) / math.sqrt(variance)
    assert torch.cat([step.advantage for step in steps]).tolist() == pytest.approx(normalised, abs=1e-5)
    explained = 1 - np.var([step_0[0], step_1[0]]) / np.var([returns[0][0], returns[1][0]])
    if flags == TIME_OUT:  # which says nothing, and one step has no variance
        explained = None
    assert stats["explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert stats["outcomes"] == (flags == END)


def test_a_rollout_of_time_outs_has_no_variance_to_explain():
    args = critic.Args(gamma=0.5, device="cpu")
    steps = [made_up_step(-1.0, [1.0, 2.0], True, True), made_up_step(-1.0, [4.0], True, True)]
    assert critic.add_advantages(steps, torch.tensor([[8.0]]), args)["explained_variance"] is None


@pytest.mark.parametrize("kind", ["token", "token-per-step"])
def test_where_a_response_is_one_token_its_value_is_the_step_s_to_the_bit(kind):
    args = critic.Args(critic=kind, device="cpu")
    T, N = 9, 3
    torch.manual_seed(0)
    rewards, values, last_values = torch.randn(T, N), torch.randn(T, N), torch.randn(N)
    dones = torch.rand(T, N) < 0.4
    timed_out = dones & (torch.rand(T, N) < 0.5)
    assert timed_out.any() and not timed_out.equal(dones)
    of_tokens, of_steps = [], []
    columns = [x.flatten().tolist() for x in (rewards, values, dones, timed_out)]
    for reward, value, done, out in zip(*columns, strict=True):
        of_tokens.append(made_up_step(reward, [value], done, out))
        of_steps.append(vldac.Step({}, torch.zeros(1), "", None, reward, done, out, value=value))
    stats = critic.add_advantages(of_tokens, last_values[:, None], args)
    assert stats == pytest.approx(vldac.add_advantages(of_steps, last_values, args), abs=1e-5)
    assert [step.return_.item() for step in of_tokens] == [step.return_ for step in of_steps]
    normalised = [step.advantage.item() for step in of_tokens]
    assert normalised == pytest.approx([step.advantage for step in of_steps], abs=1e-5)


def test_a_token_s_value_is_of_the_state_before_it(model):
    """V_{t,0} is VL-DAC's V(s_t); what follows a token does not change its value."""
    policy = critic.TokenCritic(options(model, dtype="float64"))
    prompts = some_prompts(policy, [1, 2])
    responses = [torch.tensor([100, 101, 102]), torch.tensor([103])]
    logprobs, mask, values = policy(prompts, responses)
    expected = vldac.VLMPolicy.forward(policy, prompts, responses)
    for found, other in zip((logprobs, mask, values[:, 0]), expected, strict=True):
        torch.testing.assert_close(found, other, **NEARLY)
    for b, response in enumerate(responses):
        for i in range(len(response) + 1):
            _, _, shorter = policy([prompts[b]], [response[:i]])
            torch.testing.assert_close(values[b, i], shorter[0, -1], **NEARLY)
    assert torch.cat([values[0], values[1, :2]]).unique().numel() == 6
    values.sum().backward()
    assert all(parameter.grad is None for parameter in policy.lora_parameters())


def test_the_losses_of_tokens():
    """With a step's advantage on all its tokens the policy loss is VL-DAC's; padding has no part in them."""
    new, old, advantages, mask = random_tokens(4, 4)
    everywhere = advantages[:, None].expand(4, 4)
    loss = critic.token_policy_loss(new, old, everywhere, mask, 0.1)
    assert loss.equal(vldac.policy_loss(new, old, advantages, mask, 0.1))
    junk = torch.where(mask == 0, math.nan, 1.0)
    assert critic.token_policy_loss(new * junk, old, everywhere, mask, 0.1).equal(loss)
    assert critic.token_value_loss(new * junk, new - 2, mask).item() == pytest.approx(2.0)


@pytest.mark.parametrize("stop_grad, warmup, kl_ref", [
    (True, False, "base"), (False, False, "old"), (True, True, "base"),
])  # fmt: skip
def test_an_update_of_tokens_steps_along_equation_6(stop_grad, warmup, kl_ref, model, monkeypatch):
    """Six steps in micro-batches of four and two have the gradient of one batch."""
    monkeypatch.setattr(vldac, "losses", critic.losses)
    changes = {"value_hidden": [], "dtype": "float64", "stop_grad": stop_grad, "kl_ref": kl_ref}
    policy = make_policy(model, cls=critic.TokenCritic, **changes)
    minibatches = some_minibatches(policy, micro_batch_size=4)
    micro_batch = [*minibatches[0][0], *minibatches[0][1]]
    for step in micro_batch:
        step.advantage, step.return_ = torch.randn(2, len(step.tokens))
        step.logprobs = step.logprobs - 0.2 * torch.rand(len(step.tokens))
    new, mask, values = scored(policy, micro_batch)
    old, advantages = column(micro_batch, "logprobs"), column(micro_batch, "advantage")
    pg_loss = critic.token_policy_loss(new, old, advantages, mask, 0.1)
    kl = vldac.kl_base(new, column(micro_batch, "baselogprobs"), mask)
    if kl_ref == "old":
        kl = vldac.kl_old(new, old, mask)
    errors = []
    for value, step in zip(values, micro_batch, strict=True):
        errors.append(value[: len(step.return_)] - step.return_)
    v_loss = torch.stack([error.pow(2).mean() / 2 for error in errors]).mean()
    loss = 0.15 * v_loss if warmup else pg_loss + 0.05 * kl + 0.15 * v_loss  # Eq. 6
    expected = gradients(policy, loss)
    by_the_values, _ = gradients(policy, v_loss)
    assert by_the_values.any() == (not stop_grad)

    args = dataclasses.replace(policy.args, max_grad_norm=1e9)
    optimizer = torch.optim.SGD(vldac.trainable_weights(policy).values(), lr=0.0)
    logged = vldac.update(policy, optimizer, minibatches, args, warmup)
    assert logged["value_loss"] == pytest.approx(v_loss.item(), abs=1e-5)
    groups = policy.lora_parameters(), policy.value_head.parameters()
    for group, gradient in zip(groups, expected, strict=True):
        applied = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        torch.testing.assert_close(torch.cat([x.flatten() for x in applied]), gradient, **NEARLY)


def test_runs_of_other_critics(model, tmp_path):
    """Until LoRA has learned, they collect what VL-DAC collects. Without a critic nothing is predicted."""
    logs = {}
    for kind in ("VL-DAC", "token", "none"):
        main = vldac.main if kind == "VL-DAC" else critic.main
        words = ["--total_timesteps", 40] + (["--critic", kind] if main is critic.main else [])
        folder, logs[kind] = start(tmp_path, model, CORRIDOR, *words, name=kind, main=main)
        assert (vldac.load_args(folder).vf_coef == 0) == (kind == "none")  # page.py shows no critic there
    collected = {}
    for kind, rows in logs.items():
        assert [row["losses/ratio_first"] for row in rows[1:]] == [0.0] * 5
        assert [row["losses/grad_norm_lora"] > 0 for row in rows[1:]] == [False, False, True, True, True]
        collected[kind] = [[row["samples"], row["episodes"]] for row in rows[1:]]
        assert collected[kind][:3] == collected["VL-DAC"][:3]
        predicts = any(row["losses/grad_norm_value"] > 0 for row in rows[1:])
        assert predicts == (kind != "none")
    losses = {kind: rows[3]["losses/policy_loss"] for kind, rows in logs.items()}
    assert len(set(losses.values())) == 3
    assert {row["losses/explained_variance"] for row in logs["none"][1:]} <= {0.0, None}


def test_an_animation_shows_every_step_and_the_end(toy_run, tmp_path, capsys):
    folder = toy_run / "run"
    film.main(folder, "--out", str(tmp_path / "films"))
    with Image.open(tmp_path / "films" / "film-0.gif") as gif:
        assert gif.n_frames == 2 and gif.width == 860  # an episode is one step; before and after
    main = lambda words: film.main(*words)  # noqa: E731
    assert "it takes no --adapter" in refused([folder, "--adapter", folder / "adapter"], capsys, main)
    assert "--gamma is no option of an evaluation" in refused([folder, "--gamma", 1], capsys, main)


def test_a_page_shows_failures_first_and_the_critic(toy_run, tmp_path, monkeypatch, capsys):
    """At a high temperature some responses fail to parse, and some episodes fail."""
    folder, out = toy_run / "run", tmp_path / "page.html"
    sizes = []
    spy(monkeypatch, VLMPolicy, "forward", lambda _, prompts, responses: sizes.append(len(prompts)))
    words = "--episodes 40 --temperature 1.6 --micro_batch_size 8 --out".split()
    pages.main([str(folder), *words, str(out)])
    assert max(sizes) == 8 and sum(sizes) >= 40  # also where 40 players act at once
    no_critic = refused([folder, "--adapter", folder / "adapter"], capsys, pages.main)
    assert "it takes no --adapter" in no_critic
    assert "--gamma is no option of an evaluation" in refused([folder, "--gamma", 1], capsys, pages.main)
    page = out.read_text(encoding="utf-8")
    assert "http" not in page and page.count("<svg") == len(pages.CHARTS)  # it needs no other file
    assert page.count('class="bad"') == page.count("(no admissible action)") > 0
    assert "weights: checkpoint.pt, update 8" in page and "V is the critic's value" in page

    outcomes = []
    for strip in page.split("<h3>")[1:]:
        heading = re.match(r"Seed (\d+): (success|failure), return (\S+), (\d+) steps", strip)
        outcomes.append(heading[2])
        rewards = [float(x) for x in re.findall(r"reward ([-.\d]+)", strip)]
        critic = [(float(V), float(A)) for V, A in re.findall(r"V (\S+?), A (\S+?)<", strip)]
        V, A = critic[-1]
        timed_out = strip.count("(no admissible action)") == len(rewards)  # any action would have ended it
        assert A == pytest.approx(0.0 if timed_out else rewards[-1] - V, abs=0.016)
        for reward, (V, A), (next_V, next_A) in zip(rewards, critic, critic[1:], strict=False):
            expected = reward + 0.99 * next_V - V + 0.99 * 0.95 * next_A
            assert A == pytest.approx(expected, abs=0.03)  # of figures with two digits
        assert len(rewards) == strip.count("data:image/webp;base64,") == int(heading[4])
        assert sum(rewards) == pytest.approx(float(heading[3]))
    assert set(outcomes) == {"success", "failure"} and len(outcomes) <= 8
    assert outcomes == sorted(outcomes)  # failures first


def write_runs(tmp_path) -> list[str]:
    """Folders of five runs: evaluations before and after, and from step 20 on a rate every 10 steps."""
    folders = []
    for name, before, *rates in (
        ("NumberLine-tiny-0", 0.1, 0.2, 0.6, 1.0),
        ("NumberLine-tiny-1-2", 0.2, 0.4, 0.8, 0.6),  # its name was taken
        ("NumberLine-LOOP-0", 0.1, 0.1, 0.1, 0.1),
        ("OneRoom-LOOP-3", 0.5, 0.5, 0.5, 0.5),
        ("OneRoom-LOOP-4", 0.5, 0.5),  # it was stopped
    ):
        world, _, seed, *_ = name.split("-")
        rows = [{"update": 0, "global_step": 0, "eval/success_rate": before}]
        for k, rate in enumerate([None, *rates], 1):
            row = {"update": k, "global_step": 10 * k, "charts/success_rate": rate}
            row |= {"charts/invalid_action_rate": 0.25, "losses/kl_base": 0.25}
            rows.append(row | {"episodes": [{}] * k})
        rows[-1] |= {"eval/success_rate": 0.9, "eval/invalid_action_rate": 0.125}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"env": world, "seed": int(seed), "num_envs": 2, "num_steps": 5, "total_timesteps": 40}
        (folder / "args.json").write_text(json.dumps(options))
        if len(rows) == 5:
            (folder / "adapter").mkdir()
        folders.append(str(folder))
    return folders


def test_a_row_that_is_half_written_is_not_read(tmp_path):
    """Of a run that goes on, or that was killed."""
    folder = write_runs(tmp_path)[0]
    rows, options = plot.load_log(folder)
    assert len(rows) == 5 and options["env"] == "NumberLine"
    with open(f"{folder}/log.jsonl", "a") as log:
        log.write('{"update": 5, "global_st')
    assert plot.load_log(folder) == (rows, options)
    Path(folder, "log.jsonl").write_text('{"update": 0, "global_st')
    with pytest.raises(vldac.UserError, match="has logged nothing yet"):
        plot.load_log(folder)


def test_learning_curves(tmp_path, monkeypatch):
    """A panel per world, a thick line for the mean of a method's seeds, a dashed one for a result."""
    matplotlib = pytest.importorskip("matplotlib.figure", reason="plots need: pip install matplotlib")
    drawn = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    evaluated(tmp_path / "hint.json", "hint", "--env", "NumberLine", "--episodes", 2)
    plot.main([*write_runs(tmp_path)[:4], str(tmp_path / "hint.json"), "--out", "curves.png"])
    [figure] = drawn
    assert [axis.get_title() for axis in figure.axes] == ["NumberLine", "OneRoom"]
    mean, *_, dashed = figure.axes[0].lines
    assert mean.get_ydata() == pytest.approx([0.15, 0.15, 0.3, 0.7, 0.8])
    assert dashed.get_linestyle() == "--" and set(dashed.get_ydata()) == {1.0}
    evaluated(tmp_path / "none.json", "random", "--env", "test_vldac:Stairs-v0", "--episodes", 2)
    with pytest.raises(SystemExit):  # no success flag, so no rate
        plot.main([str(tmp_path / "none.json")])


def test_a_walkthrough_shows_numbers_that_fit_each_other(toy_run, capsys):
    before = files(toy_run / "run")
    walkthrough.main(str(toy_run / "run"))
    printed = capsys.readouterr().out
    assert files(toy_run / "run") == before
    assert max(map(len, printed.splitlines()[1:])) <= 100
    [rows] = re.findall(r"3\. add_advantages.*?\n\n.*?\n(.*?)\n\n", printed, re.S)
    ended = [row.endswith("end") for row in rows.splitlines()]
    rows = [re.findall(r"-?\d+\.\d+", row) for row in rows.splitlines()]
    reward, V, delta, A, G, normalised = np.array(rows, float).T
    assert len(rows) == 16 and reward.any() and any(ended)
    assert A == pytest.approx(G - V, abs=0.002)
    assert delta[ended] == pytest.approx((reward - V)[ended], abs=0.002)
    assert normalised == pytest.approx((A - A.mean()) / A.std(ddof=1), abs=0.02)
    assert re.search(r"of the sum: 0\.\d*[1-9]", printed)
    assert "of the value loss alone: 0.000000" in printed
    [shares] = re.findall(r"its share +(\S+) +(\S+) +(\S+) +(\S+)", printed)
    policy, KL, value, total = map(float, shares)
    assert total == pytest.approx(policy + KL + value, abs=0.003)
    ratios = re.findall(r"^ +'.*' +(\d\.\d{3}) ", printed.partition("5. update")[2], re.M)
    assert len(ratios) > 4 and set(ratios) != {"1.000"}
