"""The tests of the study: its tables, its tests of significance, its worlds, and the tables on its pages."""

import dataclasses
import doctest
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "study"), str(ROOT / "extras")]

import critic  # noqa: E402
import report  # noqa: E402
from likeliest import likeliest  # noqa: E402

import envs  # noqa: E402
import vldac  # noqa: E402
from envs import MiniWorld  # noqa: E402
from test_vldac import (  # noqa: E402
    CORRIDOR,
    column,
    gradients,
    make_policy,
    needs_opengl,
    options,
    play,
    random_tokens,
    refused,
    rewards_of,
    scored,
    some_minibatches,
    some_prompts,
    start,
    write_model,
    write_runs,
)

PAGES = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "study").glob("*.md")))
TABLES = re.findall(r"`python study/report\.py (\w+) ([^`]+)` prints:\n\n((?:\|.*\n)+)", PAGES)


@pytest.mark.parametrize("module", [report, critic])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("n, m", [(1, 1), (2, 5), (4, 4)])
def test_a_rank_sum_test_is_that_of_all_choices(n, m):
    """Also with equal values."""
    for seed in range(20):
        values = np.random.default_rng(seed).integers(0, 6, n + m)
        ranks = [np.mean([y < x for y in values]) + np.mean([y <= x for y in values]) for x in values]
        sums = np.array([sum(choice) for choice in itertools.combinations(ranks, n)])
        distance = abs(sums - sums.mean())
        expected = np.mean(distance >= distance[0] - 1e-9)  # the first choice is that of the first n
        assert report.rank_sum(values[:n], values[n:]) == pytest.approx(expected)


def test_tables_of_runs_and_of_methods(tmp_path, capsys):
    """By hand: until the first rate it is the evaluation before training that counts.

    So the mean of tiny, seed 0, is ((.1 + .1) / 2 + (.1 + .2) / 2 + (.2 + .6) / 2 + (.6 + 1) / 2) / 4.
    One run is below two others in one of three ways, or above them: p is 2 / 3.
    """
    runs = write_runs(tmp_path)
    tables = {
        "table": [
            "| NumberLine | tiny | 0 | 0.100 | 0.900 | 1.000 | 0.362 | 40 | 0.875 |",
            "| NumberLine | tiny | 1 | 0.200 | 0.900 | 0.600 | 0.450 | 30 | 0.875 |",
            "| NumberLine | LOOP | 0 | 0.100 | 0.900 | 0.100 | 0.100 | - | 0.875 |",
        ],
        "methods": [
            "| NumberLine | tiny | 2 | 4 | 10 | 0.150 | 0.406 (0.362 to 0.450) "
            "| 0.900 (0.900 to 0.900) | 0.875 | 0.250 | - |",
            "| NumberLine | LOOP | 1 | 4 | 10 | 0.100 | 0.100 (0.100 to 0.100) "
            "| 0.900 (0.900 to 0.900) | 0.875 | 0.250 | 0.67 |",
        ],
    }

    def printed(*words):
        report.main(list(words))
        return capsys.readouterr().out.splitlines()

    for command, lines in tables.items():
        assert printed(command, *runs[:3])[2:] == lines
    *_, last, left_out = printed("methods", *runs)
    assert last.startswith("| OneRoom | LOOP | 1 | 4 |")
    assert left_out == f"not finished, so left out: {runs[-1]}"

    csv = tmp_path / "runs.csv"
    rows = printed("rows", *runs[:4])
    csv.write_text("\n".join([",".join(report.COLUMNS), *rows]))
    for command, lines in tables.items():
        assert printed(command, str(csv), "NumberLine/tiny", "NumberLine/LOOP")[2:] == lines
    taught = "NumberLine,taught,0,0,0,,,,0.25,0.5,,0.125,0.75"  # a model before training has one row
    csv.write_text("\n".join([",".join(report.COLUMNS), taught, *rows]))
    assert len(printed("methods", str(csv), "NumberLine/taught", "NumberLine/LOOP")) == 4
    line = "| NumberLine | taught | 1 | 0 | 0 | 0.250 | 0.125 | 0.750 | 0.500 |"
    assert printed("methods", str(csv), "NumberLine/taught")[2:] == [line]
    assert printed("table", str(csv), "NumberLine/taught")[2:] == [
        "| NumberLine | taught | 0 | 0.250 | - | 0.250 | - | - | 0.500 |"
    ]
    message = refused(["table", csv, "OneRoom/tiny"], capsys, report.main)
    assert "worlds and methods that it has" in message


def test_pairs_of_runs(tmp_path, capsys):
    """By hand: until the fourth update all have 0.2. Over the run that is 0.225 or, of the others, more."""
    lines = [",".join(report.COLUMNS)]
    for method, seed, last in [("A", 0, 0.4), ("A", 1, 0.4), ("B", 0, 0.8), ("B", 1, 0.6), ("B", 2, 1.0)]:
        lines.append(f"Room,{method},{seed},,0,,,,0.2,,,,")
        for update in (1, 2, 3):
            lines.append(f"Room,{method},{seed},{update},{update},,0.5,,,,,,")
        lines.append(f"Room,{method},{seed},4,4,{last},0.5,,,,,,")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    report.main(["pairs", str(path), "Room/A", "Room/B"])
    *_, row = capsys.readouterr().out.splitlines()
    assert row == "| Room | B | A | 2 | 0.037 (0.025 to 0.050) | 2 | 0.5 |"

    others = "Room, B, seed 1: its first three rollouts are others"
    for right, wrong, message in [
        ("Room,B,1,3,3,,0.5", "Room,B,1,3,3,,0.25", others),
        ("Room,B,1,,0,,,,0.2", "Room,B,1,,0,,,,0.3", others),
        ("Room,B,1,4,4", "Room,B,1,4,5", "Room, B, seed 1: it is not as long as A"),
        ("Room,B,", "Room,B,9", "Room: B and A share no seed"),
    ]:
        path.write_text("\n".join(lines).replace(right, wrong))
        assert message in refused(["pairs", path, "Room/A", "Room/B"], capsys, report.main)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_a_sign_flip_test_is_that_of_all_choices(n):
    for seed in range(20):
        differences = np.random.default_rng(seed).integers(-3, 4, n)
        means = [np.mean(differences * signs) for signs in itertools.product([-1, 1], repeat=n)]
        expected = np.mean(np.abs(means) >= abs(differences.mean()) - 1e-9)
        assert report.sign_flip(differences) == pytest.approx(expected)


def test_the_likeliest_action_is_scored_after_the_sampled_thought(tmp_path):
    """Where two actions begin with one token that is likelier than the third, but the third is likeliest."""
    policy = make_policy(write_model("qwen2_vl", tmp_path))
    chances = {"turn left": 0.35, "turn right": 0.25, "move": 0.4}

    def policy_of(prompts, responses):
        logprobs = []
        for prompt, response in zip(prompts, responses, strict=True):
            [text] = policy.decode([response])
            thought, action = json.loads(text).values()
            assert response[-1] in policy.stop_ids and thought == prompt
            logprobs.append(torch.tensor([math.log(chances[action]), 0.0]))
        return torch.stack(logprobs), None, None

    policy_of.tokenizer, policy_of.stop_ids = policy.tokenizer, policy.stop_ids
    dark, light = [json.dumps({"thoughts": words, "action": "turn right"}) for words in ("dark", "light")]
    actions = [list(chances), list(chances), ["turn right", "turn left"]]
    chosen = likeliest(policy_of, ["dark", "none", "light"], [dark, "move", light], actions)
    assert chosen == ["move", None, "turn left"]
    assert likeliest(policy_of, ["none"], ["move"], [list(chances)]) == [None]


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
    assert [step.ret.tolist() for step in steps] == returns
    mean = (np.mean(step_0) + np.mean(step_1)) / 2  # a step of two tokens weighs as much as one of three
    variance = np.mean((step_0 - mean) ** 2) + np.mean((step_1 - mean) ** 2)  # their sum, over 2 - 1
    assert stats["advantage_std"] == pytest.approx(math.sqrt(variance))
    normalised = ([*step_0, *step_1] - mean) / math.sqrt(variance)
    assert torch.cat([step.advantage for step in steps]).tolist() == pytest.approx(normalised, abs=1e-6)
    explained = 1 - np.var([step_0[0], step_1[0]]) / np.var([returns[0][0], returns[1][0]])
    assert stats["explained_variance"] == pytest.approx(explained, abs=1e-6)


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
    assert stats == pytest.approx(vldac.add_advantages(of_steps, last_values, args), abs=1e-6)
    assert [step.ret.item() for step in of_tokens] == [step.ret for step in of_steps]
    normalised = [step.advantage.item() for step in of_tokens]
    assert normalised == pytest.approx([step.advantage for step in of_steps], abs=1e-6)


def test_a_token_s_value_is_of_the_state_before_it(tmp_path):
    """V_{t,0} is VL-DAC's V(s_t); what follows a token does not change its value."""
    policy = critic.TokenCritic(options(write_model("qwen2_vl", tmp_path)))
    prompts = some_prompts(policy, [1, 2])
    responses = [torch.tensor([100, 101, 102]), torch.tensor([103])]
    logprobs, mask, values = policy(prompts, responses)
    expected = vldac.VLMPolicy.forward(policy, prompts, responses)
    for found, other in zip((logprobs, mask, values[:, 0]), expected, strict=True):
        torch.testing.assert_close(found, other)
    for b, response in enumerate(responses):
        for i in range(len(response) + 1):
            _, _, shorter = policy([prompts[b]], [response[:i]])
            torch.testing.assert_close(values[b, i], shorter[0, -1], atol=1e-5, rtol=0)
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


@pytest.mark.parametrize("stop_grad, value_only", [(True, False), (False, False), (True, True)])
def test_an_update_of_tokens_steps_along_equation_6(stop_grad, value_only, tmp_path, monkeypatch):
    """Six steps in micro-batches of four and two have the gradient of one batch."""
    monkeypatch.setattr("test_vldac.VLMPolicy", critic.TokenCritic)
    policy = make_policy(str(write_model("qwen2_vl", tmp_path)), stop_grad=stop_grad, value_hidden=[])
    minibatches = some_minibatches(policy, micro_batch_size=4)
    micro = [*minibatches[0][0], *minibatches[0][1]]
    for step in micro:
        step.advantage, step.ret = torch.randn(2, len(step.tokens))
    new, mask, values = scored(policy, micro)
    pg_loss = critic.token_policy_loss(new, column(micro, "logprobs"), column(micro, "advantage"), mask, 0.1)
    kl = vldac.kl_base(new, column(micro, "baselogprobs"), mask)
    errors = [value[: len(step.ret)] - step.ret for value, step in zip(values, micro, strict=True)]
    v_loss = torch.stack([error.pow(2).mean() / 2 for error in errors]).mean()
    loss = 0.15 * v_loss if value_only else pg_loss + 0.05 * kl + 0.15 * v_loss  # Eq. 6
    expected = gradients(policy, loss)
    by_the_values, _ = gradients(policy, v_loss)
    assert by_the_values.any() == (not stop_grad)

    args = dataclasses.replace(policy.args, max_grad_norm=1e9)
    optimizer = torch.optim.SGD(vldac.trainable_weights(policy).values(), lr=0.0)
    losses = critic.update(policy, optimizer, minibatches, args, value_only)
    assert losses["value_loss"] == pytest.approx(v_loss.item(), abs=1e-5)
    groups = policy.lora_parameters(), policy.value_head.parameters()
    for group, gradient in zip(groups, expected, strict=True):
        applied = [torch.zeros(p.shape) if p.grad is None else p.grad for p in group]
        torch.testing.assert_close(torch.cat([x.flatten() for x in applied]), gradient, atol=1e-5, rtol=1e-3)


def test_runs_of_other_critics(tmp_path):
    """Until LoRA has learned, they collect what VL-DAC collects. Without a critic nothing is predicted."""
    model = str(write_model("qwen2_vl", tmp_path / "model"))
    logs = {}
    for kind in ("VL-DAC", "token", "none"):
        main = vldac.main if kind == "VL-DAC" else critic.main
        words = ["--total_timesteps", 40] + (["--critic", kind] if main is critic.main else [])
        folder, logs[kind] = start(tmp_path, model, CORRIDOR, *words, name=kind, main=main)
        assert (vldac.load_args(folder).vf_coef == 0) == (kind == "none")  # eval.py shows no critic there
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


@needs_opengl
def test_the_controls_have_no_hints_or_pay_by_a_coin():
    """With the same seeds and actions the noisy room is the room, but for the sign of what a success pays."""
    rooms = ("OneRoomNoHints", "OneRoomS6NoHints", "OneRoomS6FastNoHints", "OneRoomS6NoHintsNoise")
    for name in (*rooms, "NumberLineNoHints"):
        world = envs.make_env(f"study.worlds:{name}-v0")
        world.reset(seed=0)
        assert envs.call_optional(world, "hint") is None and envs.call_optional(world, "caption")

    def episode(env, seed):
        return play(env, seed, lambda info: MiniWorld.hint(env.unwrapped))

    for name, noisy_name in [("OneRoom", "OneRoomNoise"), ("OneRoomS6", "OneRoomS6NoHintsNoise")]:
        world, noise = envs.make_env(name), envs.make_env(f"study.worlds:{noisy_name}-v0")
        signs = set()
        for seed in range(8):
            records, noisy_records = episode(world, seed), episode(noise, seed)
            assert [record[0] for record in records] == [record[0] for record in noisy_records]
            rewards, noisy_rewards = rewards_of(records), rewards_of(noisy_records)
            assert rewards == [abs(reward) for reward in noisy_rewards] and rewards[-1] > 0
            signs.add(noisy_rewards[-1] > 0)
        assert signs == {True, False}


@pytest.mark.parametrize("number", range(len(TABLES)))
def test_a_table_of_the_pages_is_what_the_command_above_it_prints(number, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, words, printed = TABLES[number]
    expanded = subprocess.run(["bash", "-c", f"echo {words}"], capture_output=True, text=True).stdout
    report.main([command, *expanded.split()])
    assert capsys.readouterr().out == printed


def test_no_table_of_the_pages_is_left_out():
    assert len(TABLES) == PAGES.count("prints:") > 0
