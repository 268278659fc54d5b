"""What else changes when a toy is trained for success: how many of its thoughts are true, before and after.

    python study/thoughts.py runs/NAME WORLD METHOD    prints rows for study/thoughts.csv

Of 512 frames of the room that the run trained in and of Hallway, which a player meets as in the toy's lesson,
with a seed of their own. A thought is true if it equals the caption. It is sampled, as in training.
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "extras")]

import toy  # noqa: E402

import vldac  # noqa: E402


def share_of_true_thoughts(policy, examples) -> float:
    vldac.set_seed(policy.args.seed)
    _, true = toy.quality(policy, examples)
    return true


def main(folder, world, method):
    args = vldac.load_args(folder)
    policy = vldac.VLMPolicy(args)
    examples = {}
    for room in (args.env, "Hallway"):
        # seed + 1 decided when the lesson stopped
        examples[room] = toy.play(dataclasses.replace(args, env=room), 512, args.seed + 2)[:512]
        for example in examples[room]:
            example.prompt = policy.encode(*example.text_and_frames)
    before = {room: share_of_true_thoughts(policy, some) for room, some in examples.items()}
    vldac.load_weights(Path(folder), policy)
    for room, some in examples.items():
        after = share_of_true_thoughts(policy, some)
        name = room.rpartition(":")[2].removesuffix("-v0")
        print(world, method, args.seed, name, round(before[room], 5), round(after, 5), sep=",")


if __name__ == "__main__":
    main(*sys.argv[1:])
