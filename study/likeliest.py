"""What a model would do if it always took its likeliest action.

    python study/likeliest.py runs/NAME    200 episodes of the model that a run started from

Greedy decoding does not show that: it takes the likeliest token, and several actions may begin with one
token, so that together they beat an action that is likelier than each of them. Here a thought is sampled, and
then every admissible action is scored in the place of the sampled one.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vldac  # noqa: E402
from vldac import ACTION_KEY  # noqa: E402


def likeliest(policy, prompt, text, actions) -> str | None:
    """The likeliest admissible action after this response's thought; None if it names none at all."""
    keys = list(ACTION_KEY.finditer(text))
    if not keys:
        return None
    responses = []
    for action in actions:
        answer = text[: keys[-1].end()] + json.dumps(action) + "}"
        tokens = policy.tokenizer(answer, return_tensors="pt").input_ids[0].to(policy.stop_ids.device)
        responses.append(torch.cat([tokens, policy.stop_ids[-1:]]))
    logprobs, _, _ = policy([prompt] * len(actions), responses)
    return actions[logprobs.sum(1).argmax()]


@torch.no_grad()
def act(policy, players):
    """A step like vldac.act."""
    prompts = [policy.encode(*player.turn()) for player in players]
    texts = policy.decode(policy.sample(prompts))
    steps = []
    for player, prompt, text in zip(players, prompts, texts, strict=True):
        action = likeliest(policy, prompt, text, player.info["actions"])
        steps.append(vldac.Step(prompt, policy.no_tokens, text, action, *player.step(action)))
    return steps


def main(folder):
    args = vldac.load_args(folder)
    args.split = "eval"
    players = [vldac.Player(args) for _ in range(args.num_envs)]
    played = vldac.evaluate(vldac.VLMPolicy(args), players, range(200), act)
    print(json.dumps(vldac.summary(played)))


if __name__ == "__main__":
    main(*sys.argv[1:])
