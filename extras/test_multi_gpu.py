"""The tests of several processes: two of four players have the gradient of one of eight, and run as one."""

import functools
import importlib
import math
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "extras")]

import multi_gpu  # noqa: E402
import rl4vlm  # noqa: E402

import test_vldac  # noqa: E402
import vldac  # noqa: E402
from test_vldac import (  # noqa: E402
    CORRIDOR,
    LONG,
    SMALL,
    TROUBLED,
    Troubled,
    column,
    forked,
    killed,
    make_policy,
    options,
    pretend_gpu,
    refused,
    rows_of,
    same_runs,
    some_steps,
    updated,
)

torch.set_num_threads(1)  # the models here are too small to share
# pytest finds fixtures by the names of a module.
model, model_folder = test_vldac.model, test_vldac.model_folder


def two(program, argv=None):
    """program(argv) in two processes, as under torchrun; their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        multi_gpu.RANK, multi_gpu.WORLD_SIZE = rank, 2
        multi_gpu.main(argv, program)

    return forked(functools.partial(child, 0), functools.partial(child, 1))


def of_eight_players(model, file):
    """This process's part of a made-up rollout; saves advantages, gradients and a row."""
    rank, ranks = multi_gpu.RANK, multi_gpu.WORLD_SIZE
    N = 8 // ranks
    # No hidden layer: what rounding does at a ReLU's kink is another test's (unequal micro-batches).
    changes = {"minibatch_size": 16, "value_hidden": [], "dtype": "float64"}
    policy = make_policy(model, update_epochs=1, max_grad_norm=1e9, **changes)
    whole = some_steps(policy, B=16)  # two steps of each player, the same in every process
    mine = torch.arange(16).view(2, ranks, N)[:, rank].flatten()
    steps = [whole[b] for b in mine]
    minibatches = vldac.make_minibatches(steps, policy.args)
    vldac.score(policy, minibatches)
    last_values = policy.values([step.prompt for step in steps[:N]])
    stats = vldac.add_advantages(steps, last_values, policy.args)
    updated(policy, minibatches, lr=0.0)
    trained = [*policy.lora_parameters(), *policy.value_head.parameters()]
    gradients = [p.grad.clone() for p in trained]
    if rank == ranks - 1:  # one process has other log-probabilities: the row tells of it
        for step in steps:
            step.logprobs = step.logprobs - 0.1
    _, losses = updated(policy, minibatches, lr=0.0)
    stats |= {"ratio_first": losses["ratio_first"], "rank": float(rank), "sometimes": float(rank) or None}
    row = vldac.log_row(policy, steps, stats, {"collect": 1.0}, [])
    torch.save([column(steps, "advantage").view(2, N), gradients, row], f"{file} {rank}")


def test_two_processes_of_four_have_the_gradient_of_one_of_eight(tmp_path, model):
    of_eight_players(model, tmp_path / "one")
    assert two(lambda _: of_eight_players(model, tmp_path / "two")) == [0, 0]
    advantages, gradients, row = torch.load(tmp_path / "one 0", weights_only=True)
    parts = [torch.load(tmp_path / f"two {rank}", weights_only=True) for rank in (0, 1)]
    (first, *of_first), (second, *of_second) = parts
    torch.testing.assert_close(torch.cat([first, second], dim=1), advantages, atol=1e-6, rtol=0)
    torch.testing.assert_close(of_first[0], gradients, atol=1e-6, rtol=0)
    torch.testing.assert_close(of_second[0], gradients, atol=1e-6, rtol=0)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients)
    # A row is that of all: means, but the sum of the speeds and the largest ratio.
    assert of_first[1] == of_second[1] and len(of_first[1]["samples"]) == 2
    assert of_first[1]["losses/rank"] == 0.5 and of_first[1]["losses/sometimes"] is None
    keys = ["losses/ratio_first", "losses/advantage_std", "losses/outcomes", "charts/env_steps_per_second"]
    for key in keys:
        assert of_first[1][key] == pytest.approx(row[key], abs=1e-6)
    assert row["losses/ratio_first"] == pytest.approx(math.exp(0.1) - 1, abs=1e-4)
    assert row["charts/env_steps_per_second"] == 16


def test_a_run_of_two_processes(tmp_path, model, monkeypatch, capfd):
    """Totals are totals, seeds differ, weights do not, one writes; killed and resumed: the same log.

    By rl4vlm.py, which is vldac.py with another loss.
    """
    sizes = ["--num_envs", 4, "--num_steps", 2, "--minibatch_size", 4, "--eval_episodes", 4]
    argv = ["--env", TROUBLED, "--model", model, "--runs_dir", tmp_path, *SMALL, *LONG, *sizes, "--run_name"]
    argv = [str(word) for word in argv]
    set_seed, make_optimizer, evaluate = vldac.set_seed, vldac.make_optimizer, vldac.evaluate
    summary = vldac.summary
    policies = []

    def record(seed):
        with open(tmp_path / f"seeds of {multi_gpu.RANK}", "a") as file:
            print(seed, file=file)
        set_seed(seed)

    def record_evaluation(policy, players, seeds, play):
        (tmp_path / f"evaluated by {multi_gpu.RANK}").write_text(str(seeds))
        return evaluate(policy, players, seeds, play)

    def record_summary(episodes):
        seeds = [episode["seed"] for episode in episodes]
        (tmp_path / f"summarised by {multi_gpu.RANK}").write_text(str(seeds))
        return summary(episodes)

    def remember(policy, args):
        policies.append(policy)
        return make_optimizer(policy, args)

    def train(argv):
        rl4vlm.main(argv)
        torch.save(vldac.trainable_weights(policies[-1]), tmp_path / f"weights of {multi_gpu.RANK}")

    recorded = {"set_seed": record, "make_optimizer": remember, "evaluate": record_evaluation}
    monkeypatch.setattr(vldac, "summary", record_summary)
    with mock.patch.multiple(multi_gpu.original, **recorded):
        assert two(train, [*argv, "whole"]) == [0, 0]
    printed = capfd.readouterr().out
    command = r"to go on after any stop: \S+ -m torch.distributed.run --nproc_per_node=2 \S+ --resume"
    assert len(re.findall(command, printed)) == printed.count("a response: ") == 1
    assert not (tmp_path / "whole-2").exists()  # one process makes the folder, and would teach the toy
    first, second = [torch.load(tmp_path / f"weights of {rank}", weights_only=True) for rank in (0, 1)]
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert any(weight.any() for name, weight in first.items() if "lora_B" in name)
    start, *rows = rows_of(tmp_path / "whole")
    assert [row["global_step"] for row in rows] == [8, 16, 24, 32]
    assert [row["losses/ratio_first"] for row in rows] == [0.0] * 4
    assert "eval/success_rate" in start
    assert [(tmp_path / f"evaluated by {rank}").read_text() for rank in (0, 1)] == ["[0, 2]", "[1, 3]"]
    assert (tmp_path / "summarised by 0").read_text() == "[0, 1, 2, 3]"  # the last evaluation
    optimizer = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)["optimizer"]
    assert optimizer["state"][len(optimizer["state"]) - 1]["step"] == 16  # four minibatches an update
    seeds = [episode["seed"] for row in rows for episode in row["episodes"]]
    assert len(seeds) == len(set(seeds)) >= 8  # 32 steps in episodes of three; four have not ended
    first, second = [set((tmp_path / f"seeds of {rank}").read_text().split()) for rank in (0, 1)]
    assert {str(int(seed) + 1) for seed in first} == second  # of rollouts and of evaluations

    monkeypatch.setattr(Troubled, "happens", killed)
    monkeypatch.setattr(Troubled, "number", 11)  # of the 16 of each process
    assert -signal.SIGKILL in two(rl4vlm.main, [*argv, "part"])
    monkeypatch.setattr(Troubled, "number", 0)
    assert 0 < torch.load(tmp_path / "part" / "checkpoint.pt", weights_only=True)["update"] < 4
    shutil.copytree(tmp_path / "part", tmp_path / "alone")
    assert two(rl4vlm.main, ["--resume", str(tmp_path / "part")]) == [0, 0]
    same_runs(tmp_path / "whole", tmp_path / "part")
    rl4vlm.main(["--resume", str(tmp_path / "alone")])  # in one process
    assert [row["global_step"] for row in rows_of(tmp_path / "alone")] == [0, 8, 16, 24, 32]


@pytest.mark.parametrize("env, episodes, processes, players", [
    ("OneRoom", 200, 4, 16),
    ("OneRoom", 50, 4, 13),
    (CORRIDOR, 200, 2, 8),
])  # fmt: skip
def test_the_processes_share_an_evaluation(env, episodes, processes, players, monkeypatch):
    monkeypatch.setattr(multi_gpu, "WORLD_SIZE", processes)
    monkeypatch.setattr(vldac, "Player", lambda args: args)
    assert len(multi_gpu.evaluation_players(options("any", env=env), episodes)) == players


def test_each_process_takes_a_gpu_of_its_own(model, monkeypatch, capsys):
    """That of its number on this machine, and none that a person gives to all; its part is whole."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # main changes it, and WORLD_SIZE
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(multi_gpu, "WORLD_SIZE", 2)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    argv = ["--env", "NumberLine", "--model", model]
    with pytest.raises(SystemExit, match="torchrun --nproc_per_node=4 extras/multi_gpu.py"):
        multi_gpu.main(argv)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    message = refused([*argv, "--device", "cuda:0"], capsys, multi_gpu.main)
    assert taken == [1] and "--device must have no number" in message
    message = refused([*argv, "--num_envs", 3, "--minibatch_size", 96], capsys, multi_gpu.main)
    assert "--num_envs must be a multiple of the 2 processes" in message


@pytest.mark.parametrize("program", ["vldac", "loop", "critic"])
def test_torchrun_of_another_program_is_refused(program, model, monkeypatch, capsys):
    """Each process would make a run of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["--env", "NumberLine", "--model", model]
    message = refused(argv, capsys, importlib.import_module(program).main)
    assert "extras/multi_gpu.py" in message
