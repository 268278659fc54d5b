"""VL-DAC on the GPUs of one machine: each process plays its part of the environments and trains on it.

    torchrun --nproc_per_node=4 extras/multi_gpu.py --env OneRoom    takes the options of vldac.py

--num_envs and --minibatch_size stay totals: of 4 processes each has a quarter. Advantages are normalised over
the steps of all, and gradients are averaged before they are clipped, so the processes keep equal weights. The
first one writes. Other random numbers are drawn than by one process, and a minibatch has equally many steps
of each. Its runs are runs of vldac.py: --resume goes on with any number of processes that divides the totals.

It replaces functions of vldac; most call the one that they replace on their part. It was tested with
processes on a CPU.
"""

import dataclasses
import math
import os
import sys
import types
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replaced import replaced  # noqa: E402

import vldac  # noqa: E402
from envs import check  # noqa: E402

RANK = int(os.environ.get("RANK", 0))  # the number of this process, under torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are: torchrun's name
original = types.SimpleNamespace(**vars(vldac))  # the functions, as they were


def gather(items) -> list:
    """The items of all processes in one list, by rank."""
    parts = [None] * WORLD_SIZE
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def own_part(args):
    """The options with this process's part of the environments and of a minibatch."""
    sizes = {"num_envs": args.num_envs // WORLD_SIZE, "minibatch_size": args.minibatch_size // WORLD_SIZE}
    return dataclasses.replace(args, **sizes)


def set_seed(seed):
    original.set_seed(seed + RANK)  # each process draws other random numbers


def make_optimizer(policy, args):
    for weight in vldac.trainable_weights(policy).values():
        dist.broadcast(weight.data, 0)  # the new weights were drawn, too: all begin with the first process's
    return original.make_optimizer(policy, args)


def make_players(args):
    N = own_part(args).num_envs
    return [vldac.Player(args, RANK * N + n) for n in range(N)]


def collect(policy, players, args):
    steps, last_prompts, episodes = original.collect(policy, players, args)
    return steps, last_prompts, gather(episodes)


def make_minibatches(steps, args):
    return original.make_minibatches(steps, own_part(args))


def add_advantages(steps, last_values, args):
    stats = original.add_advantages(steps, last_values, args)
    advantages = torch.tensor([step.return_ - step.value for step in steps])
    of_all = torch.cat(gather([advantages]))
    std = of_all.std().item()
    normalised = (advantages - of_all.mean()) / (std + 1e-8)
    for step, advantage in zip(steps, normalised.tolist(), strict=True):
        step.advantage = advantage
    return stats | {"advantage_std": std}


def optimizer_step(policy, optimizer, args):
    for parameter in vldac.trainable_weights(policy).values():
        if parameter.grad is not None:  # in the warm-up, LoRA has none
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE  # parts are equally large: this is the whole minibatch's gradient
    return original.optimizer_step(policy, optimizer, args)


def evaluation_players(args, episodes):
    return original.evaluation_players(own_part(args), math.ceil(episodes / WORLD_SIZE))


def evaluate(policy, players, seeds, play=None):
    episodes = original.evaluate(policy, players, list(seeds)[RANK::WORLD_SIZE], play)
    return sorted(gather(episodes), key=lambda episode: episode["seed"])


def log_row(policy, steps, stats, times, episodes):
    """Means over the processes, but the sum of speeds, and the largest ratio_first and memory.

    None where one of them has none. The samples are the first one's.
    """
    rows = gather([original.log_row(policy, steps, stats, times, episodes)])
    row = dict(rows[0])
    for key in row.keys() - {"samples"}:
        numbers = [other[key] for other in rows]
        if None in numbers:
            row[key] = None
        elif key == "charts/env_steps_per_second":
            row[key] = sum(numbers)
        elif key in ("losses/ratio_first", "gpu/max_memory_gb"):
            row[key] = max(numbers)
        else:
            row[key] = sum(numbers) / WORLD_SIZE
    return row


def save_checkpoint(folder, policy, optimizer, players, **state):
    names = ("seed", "actions", "episode")
    own = [{name: getattr(player, name) for name in names} for player in players]
    players = [types.SimpleNamespace(**saved) for saved in gather(own)]
    if RANK == 0:
        original.save_checkpoint(folder, policy, optimizer, players, **state)


def new_run(args, program):
    folder = original.new_run(args, program) if RANK == 0 else None  # it may teach the toy
    return gather([folder])[0]


def check_training(args):
    original.check_training(args)
    for name in ("num_envs", "minibatch_size"):
        divides = getattr(args, name) % WORLD_SIZE == 0
        check(divides, f"--{name} must be a multiple of the {WORLD_SIZE} processes")
    check(":" not in args.device, "--device must have no number: each process has its GPU")


def nothing(*_, **__):
    """What only the first process does."""


REPLACED = [set_seed, make_optimizer, make_players, collect, make_minibatches, add_advantages, optimizer_step]
REPLACED += [evaluation_players, evaluate, log_row, save_checkpoint, new_run, check_training]


def main(argv=None, program=vldac.main):
    """vldac.main, or that of a file that replaces only the losses: multi_gpu.main(program=rl4vlm.main)."""
    if "RANK" not in os.environ:
        raise SystemExit(__doc__)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The processes wait for each other as long as the toy's teaching or an update may take.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(days=1))
    os.environ["WORLD_SIZE"] = "1"  # one of several processes is what vldac refuses to be
    others = {function.__name__: function for function in REPLACED}
    if RANK > 0:  # the others write nothing and show no bars
        others |= {"print_line": nothing, "write_row": nothing, "save_adapter": nothing}
        others["tqdm"] = lambda items=None, *_, **__: original.tqdm(items, disable=True)
    # What is printed to go on is this command.
    sys.argv[0] = f"-m torch.distributed.run --nproc_per_node={WORLD_SIZE} {sys.argv[0]}"
    with replaced(**others):
        program(argv)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
