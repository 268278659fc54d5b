"""The tests of the study: its tables, its tests of significance, its worlds, and the tables on its pages."""

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

import controls  # noqa: E402
import report  # noqa: E402
from test_extras import write_runs  # noqa: E402

import envs  # noqa: E402
import vldac  # noqa: E402
from test_vldac import CORRIDOR, make_policy, needs_opengl, refused, script, spy, write_model  # noqa: E402
from vldac import VLMPolicy  # noqa: E402

PAGES = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "study").glob("*.md")))
TABLES = re.findall(r"`python study/report\.py (\w+) ([^`]+)` prints:\n\n((?:\|.*\n)+)", PAGES)


@pytest.fixture
def printed(capsys):
    """The lines that a command of report.py prints, below the head of its table."""

    def lines(*words):
        report.main([str(word) for word in words])
        return capsys.readouterr().out.splitlines()[2:]

    return lines


def test_doctests():
    result = doctest.testmod(report)
    assert result.attempted > 0 and result.failed == 0


def test_tables_of_runs_and_of_methods(tmp_path, capsys, printed):
    """By hand: until the first rate it is the evaluation before training that counts.

    So the mean of tiny, seed 0, is ((.1 + .1) / 2 + (.1 + .2) / 2 + (.2 + .6) / 2 + (.6 + 1) / 2) / 4.
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
            "| 0.900 (0.900 to 0.900) | 0.875 | 0.250 |",
            "| NumberLine | LOOP | 1 | 4 | 10 | 0.100 | 0.100 (0.100 to 0.100) "
            "| 0.900 (0.900 to 0.900) | 0.875 | 0.250 |",
        ],
    }

    for command, lines in tables.items():
        assert printed(command, *runs[:3]) == lines
    *_, last, left_out = printed("methods", *runs)
    assert last.startswith("| OneRoom | LOOP | 1 | 4 |")
    assert left_out == f"not finished, so left out: {runs[-1]}"

    csv = tmp_path / "runs.csv"
    report.main(["rows", *runs[:4]])
    rows = capsys.readouterr().out.splitlines()
    csv.write_text("\n".join([",".join(report.COLUMNS), *rows]))
    for command, lines in tables.items():
        assert printed(command, csv, "NumberLine/tiny", "NumberLine/LOOP") == lines
    before = "NumberLine,before,0,0,0,,,,0.25,0.5,,"  # a model before training has one row
    csv.write_text("\n".join([",".join(report.COLUMNS), before, *rows]))
    assert len(printed("methods", csv, "NumberLine/before", "NumberLine/LOOP")) == 2
    line = "| NumberLine | before | 1 | 0 | 0 | 0.250 | 0.500 |"
    assert printed("methods", csv, "NumberLine/before") == [line]
    line = "| NumberLine | before | 0 | 0.250 | - | 0.250 | - | - | 0.500 |"
    assert printed("table", csv, "NumberLine/before") == [line]
    assert printed("table", csv, "NumberLine/tiny@1-3") == tables["table"][1:2]
    for name in ("OneRoom/tiny", "NumberLine/tiny@2-3"):
        message = refused(["table", csv, name], capsys, report.main)
        assert "worlds and methods that it has" in message


def test_pairs_of_runs(tmp_path, capsys, printed):
    """By hand: until the fourth update all have 0.2. Over the run that is 0.225 or, of the others, more.

    The first p is doubled by Holm's correction, and the second is no smaller.
    """
    lines = [",".join(report.COLUMNS)]
    ends = [("A", 0, 0.4), ("A", 1, 0.4), ("B", 0, 0.8), ("B", 1, 0.6), ("B", 2, 1.0), ("C", 0, 0.4)]
    for method, seed, last in ends:
        lines.append(f"Room,{method},{seed},,0,,,,0.2,0,,")
        for update in (1, 2, 3):
            lines.append(f"Room,{method},{seed},{update},{update},,0.5,,,,,")
        lines.append(f"Room,{method},{seed},4,4,{last},0.5,,{last - 0.4},0,,")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    assert printed("pairs", path, "Room/A", "Room/B", "Room/C") == [
        "| Room | B | A | 2 | 0.037 (0.025 to 0.050) | - | 2 | 0.5 | 1 |",
        "| Room | C | A | 1 | 0.000 (0.000 to 0.000) | - | 0 | 1 | 1 |",
    ]
    assert printed("ends", path, "Room/A", "Room/B") == [  # A's end is 0
        "| Room | B | A | 2 | 0.300 (0.200 to 0.400) | - | 2 | 0.5 | 0.5 |",
    ]
    assert printed("reached", "0.4", path, "Room/A", "Room/B") == [  # 0, 0 and 0.4, 0.2, 0.6
        "| Room | A | 2 | 0 | 0.000 to 0.842 |",
        "| Room | B | 3 | 2 | 0.094 to 0.992 |",
    ]
    # Trained elsewhere, so that there is a row of the end only.
    path.write_text("\n".join([lines[0], "Room,A,0,,9,,,,0.2,0,,", "Room,B,0,,9,,,,0.5,0,,"]))
    [line] = printed("ends", path, "Room/A", "Room/B")
    assert "| 0.300 (0.300 to 0.300) | - | 1 | 1 | 1 |" in line
    [line] = printed("methods", path, "Room/A")
    assert "| Room | A | 1 | 0 | 0.200 (0.200 to 0.200) | 1.000 |" in line

    path.write_text("\n".join([lines[0], "Room,A,0,,0,,,,0.2,0,,", "Room,A,0,1,1,0.5,0,,,,,"]))
    message = "Room, A, seed 0: it was not evaluated after training"
    assert message in refused(["reached", "0.4", path, "Room/A"], capsys, report.main)

    others = "Room, B, seed 1: its first three rollouts are others"
    for right, wrong, message in [
        ("Room,B,1,3,3,,0.5", "Room,B,1,3,3,,0.25", others),
        ("Room,B,1,,0,,,,0.2", "Room,B,1,,0,,,,0.3", others),
        ("Room,B,1,4,4", "Room,B,1,4,5", "Room, B, seed 1: it is not as long as A"),
        ("Room,B,", "Room,B,9", "Room: B and A share no seed"),
    ]:
        path.write_text("\n".join(lines).replace(right, wrong))
        assert message in refused(["pairs", path, "Room/A", "Room/B"], capsys, report.main)


def test_panels_of_a_figure(tmp_path, monkeypatch):
    """Of one world a panel for each method, of several one for each world."""
    panels = []
    monkeypatch.setattr(report.curves, "plot", lambda runs, *_: panels.append({run.world for run in runs}))
    runs = write_runs(tmp_path)
    report.main(["plot", *runs[:3]])
    report.main(["plot", *runs])
    assert panels == [{"tiny", "LOOP"}, {"NumberLine", "OneRoom"}]


def test_tables_of_sentences(tmp_path, printed):
    """Of two seeds; the second one's sentence decides alone."""
    path = tmp_path / "sentences.csv"
    ahead, none = "the red box is ahead", "no red box in view"
    lines = ["seed,when,frame,sentence,turn left,move forward"]
    for seed, chances in ((3, [0.9, 0.6, 0.4, 0.1]), (4, [0.8, 0.2, 0.8, 0.2])):
        pairs = itertools.product([ahead, none], repeat=2)
        for (frame, sentence), chance in zip(pairs, chances, strict=True):
            lines.append(f"{seed},after,{frame},{sentence},{1 - chance:.1f},{chance}")
    path.write_text("\n".join(lines))
    assert printed("sentences", path) == [
        f"| after | {ahead} | {ahead} | 2 | 0.150 | 0.850 |",
        f"| after | {ahead} | {none} | 2 | 0.600 | 0.400 |",
        f"| after | {none} | {ahead} | 2 | 0.400 | 0.600 |",
        f"| after | {none} | {none} | 2 | 0.850 | 0.150 |",
    ]
    assert printed("swapped", path) == [
        "| 3 | 0.900 | 0.600 | 0.400 | 0.100 |",
        "| 4 | 0.800 | 0.200 | 0.800 | 0.200 |",
    ]


@pytest.mark.parametrize("n", [1, 4, 7])
def test_a_sign_flip_test_is_that_of_all_choices(n):
    for seed in range(20):
        differences = np.random.default_rng(seed).integers(-3, 4, n)
        means = [np.mean(differences * signs) for signs in itertools.product([-1, 1], repeat=n)]
        expected = np.mean(np.abs(means) >= abs(differences.mean()) - 1e-9)
        assert report.sign_flip(differences) == pytest.approx(expected)


@pytest.mark.parametrize("n", [6, 7, 8, 10])
def test_the_interval_has_the_means_that_a_sign_flip_test_does_not_refuse(n):
    for seed in range(5):
        differences = np.random.default_rng(seed).normal(size=n)
        low, high = report.interval(differences)
        for inside, outside in [(low + 1e-6, low - 1e-6), (high - 1e-6, high + 1e-6)]:
            assert report.sign_flip(differences - inside) > 0.05
            assert report.sign_flip(differences - outside) <= 0.05


@pytest.mark.parametrize("count, n", [(0, 10), (18, 20), (5, 5), (29, 30)])
def test_the_interval_of_a_count(count, n):
    """At its ends so many or more, and so many or fewer, have a probability of 0.025."""
    low, high = report.count_interval(count, n)

    def chance(p, counts):
        return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in counts)

    if count > 0:
        assert chance(low, range(count, n + 1)) == pytest.approx(0.025)
    if count < n:
        assert chance(high, range(count + 1)) == pytest.approx(0.025)
    assert (low == 0) == (count == 0) and (high == 1) == (count == n)


def test_the_probability_of_an_action_is_that_of_its_response(tmp_path):
    """Of three that begin alike, each with the prompt's chance; the mean over two prompts."""
    policy = make_policy(write_model("qwen2_vl", tmp_path))
    chances = {"dark": [0.35, 0.25, 0.4], "light": [0.05, 0.9, 0.05]}
    actions = ["turn left", "turn right", "move"]

    def policy_of(prompts, responses):
        logprobs = []
        for prompt, response in zip(prompts, responses, strict=True):
            [text] = policy.decode([response])
            thought, action = json.loads(text).values()
            assert response[-1] in policy.stop_ids and thought == "hm"
            logprobs.append(torch.tensor([-5.0, math.log(chances[prompt][actions.index(action)])]))
        return torch.stack(logprobs), None, None

    policy_of.tokenizer, policy_of.stop_ids = policy.tokenizer, policy.stop_ids
    probabilities = controls.action_probabilities(policy_of, ["dark", "light"], "hm", actions)
    assert probabilities == pytest.approx([0.2, 0.575, 0.225])


def test_a_player_acts_on_the_prompts_of_a_donor(tmp_path, monkeypatch):
    """Which plays its own episodes, as long as it has not ended, and begins anew when the player does."""
    policy = make_policy(write_model("qwen2_vl", tmp_path), env=CORRIDOR)
    script(monkeypatch, [json.dumps({"action": "right"})])
    prompts = []
    spy(monkeypatch, VLMPolicy, "encode", lambda policy, text, frames: prompts.append(text))
    player = vldac.Player(policy.args)
    act = controls.donors_act(policy.args, [player])
    player.reset(0)
    donor = envs.make_env(CORRIDOR)
    episode = 0
    for _ in range(2):  # episodes of the player
        place = None
        done = False
        while not done:
            if place in (None, 4):  # the donor's episode begins, or has ended
                observation, _ = donor.reset(seed=vldac.training_seed(0, 0, episode))
                episode += 1
                place = donor.unwrapped.place
            [step] = act(policy, [player])
            assert f"place {place}" in prompts[-1]
            place += 1
            done = step.done
        assert player.result()["success"]
        player.reset(1)


def test_the_best_sequence_of_actions_needs_no_look(capsys):
    """In a corridor: always to the right."""
    controls.blind(CORRIDOR, candidates=60, seeds=range(1000, 1010))
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["success_rate"] == 1.0 and found["actions"][:2] == ["right", "right"]


@needs_opengl
def test_the_worlds_of_the_controls():
    """A coin pays 1 or -1 times what the room pays; the uniform lesson has each action once."""
    coin, room = envs.make_env("study.worlds:OneRoomCoin-v0"), envs.make_env("OneRoom", action_repeat=3)
    signs = set()
    for seed in range(8):
        coin.reset(seed=seed)
        room.reset(seed=seed)
        done = False
        while not done:
            action = room.unwrapped.hint()
            paid, (_, reward, done, _, _) = coin.step(action)[1], room.step(action)
            assert abs(paid) == pytest.approx(reward)
            if reward:
                signs.add(np.sign(paid))
    assert signs == {1, -1}
    assert envs.make_env("study.worlds:OneRoomUniform-v0").unwrapped.lesson_actions == room.unwrapped.actions


@pytest.mark.parametrize("number", range(len(TABLES)))
def test_a_table_of_the_pages_is_what_the_command_above_it_prints(number, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, words, printed = TABLES[number]
    expanded = subprocess.run(["bash", "-c", f"echo {words}"], capture_output=True, text=True).stdout
    report.main([command, *expanded.split()])
    assert capsys.readouterr().out == printed


def test_no_table_of_the_pages_is_left_out():
    assert len(TABLES) == PAGES.count("prints:") > 0
