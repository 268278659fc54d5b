"""How a model fares that always takes its likeliest action: 200 episodes of the one that a run started from.

    python study/likeliest.py runs/NAME

Greedy decoding does not show it: it takes the likeliest token, and several actions may begin with one token,
so that together they beat an action that is likelier than each of them. Here a thought is sampled, and then
every admissible action is scored in the place of the sampled one.
"""

import itertools
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vldac  # noqa: E402
from vldac import ACTION_KEY  # noqa: E402


def responses_of(policy, text, actions) -> list[torch.Tensor]:
    """The tokens of this response with each of the actions in the place of its own; none if it has none."""
    keys = list(ACTION_KEY.finditer(text))
    responses = []
    for action in actions if keys else []:
        answer = text[: keys[-1].end()] + json.dumps(action) + "}"
        tokens = policy.tokenizer(answer, return_tensors="pt").input_ids[0].to(policy.stop_ids.device)
        responses.append(torch.cat([tokens, policy.stop_ids[-1:]]))
    return responses


def likeliest(policy, prompts, texts, actions) -> list[str | None]:
    """For each prompt, the likeliest of its actions after its response's thought; None without a thought."""
    responses = [responses_of(policy, *pair) for pair in zip(texts, actions, strict=True)]
    repeated = [prompt for prompt, some in zip(prompts, responses, strict=True) for _ in some]
    if not repeated:
        return [None] * len(prompts)
    logprobs, _, _ = policy(repeated, list(itertools.chain(*responses)))
    sums = logprobs.sum(1).split([len(some) for some in responses])
    return [some[x.argmax()] if len(x) else None for some, x in zip(actions, sums, strict=True)]


@torch.no_grad()
def act(policy, players):
    """A step like vldac.act."""
    prompts = [policy.encode(*player.prompt()) for player in players]
    texts = policy.decode(policy.sample(prompts))
    actions = likeliest(policy, prompts, texts, [player.info["actions"] for player in players])
    steps = []
    for player, prompt, text, action in zip(players, prompts, texts, actions, strict=True):
        steps.append(vldac.Step(prompt, policy.no_tokens, text, action, *player.step(action)))
    return steps


def main(folder):
    args = vldac.load_args(folder)
    args.split = "eval"
    policy = vldac.VLMPolicy(args)
    players = [vldac.Player(args) for _ in range(args.num_envs)]
    print(json.dumps(vldac.summary(vldac.evaluate(policy, players, range(200), act))))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
