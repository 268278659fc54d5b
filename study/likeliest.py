"""What a model would do if it always took its likeliest action.

    python study/likeliest.py runs/NAME        200 episodes of the model that a run started from
    python study/likeliest.py runs/NAME 0.5    instead: an action sampled at temperature 0.5

Greedy decoding does not show that: it takes the likeliest token, and several actions may begin with one
token, so that together they beat an action that is likelier than each of them. Here a thought is sampled, and
then every admissible action is scored in the place of the sampled one.
"""

import functools
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


def likeliest(policy, prompts, texts, actions, temperature=None) -> list[str | None]:
    """For each prompt, the likeliest of its actions after its response's thought, or one at a temperature."""
    responses = [responses_of(policy, *pair) for pair in zip(texts, actions, strict=True)]
    repeated = [prompt for prompt, some in zip(prompts, responses, strict=True) for _ in some]
    if not repeated:
        return [None] * len(prompts)
    logprobs, _, _ = policy(repeated, list(itertools.chain(*responses)))
    sums = logprobs.sum(1).split([len(some) for some in responses])
    chosen = []
    for some, x in zip(actions, sums, strict=True):
        if len(x) == 0:
            chosen.append(None)
        elif temperature is None:
            chosen.append(some[x.argmax()])
        else:
            chosen.append(some[torch.multinomial((x / temperature).softmax(0), 1)])
    return chosen


@torch.no_grad()
def act(policy, players, temperature=None):
    """A step like vldac.act."""
    prompts = [policy.encode(*player.prompt()) for player in players]
    texts = policy.decode(policy.sample(prompts))
    admissible = [player.info["actions"] for player in players]
    actions = likeliest(policy, prompts, texts, admissible, temperature)
    steps = []
    for player, prompt, text, action in zip(players, prompts, texts, actions, strict=True):
        steps.append(vldac.Step(prompt, policy.no_tokens, text, action, *player.step(action)))
    return steps


def main(folder, temperature=None):
    args = vldac.load_args(folder)
    args.split = "eval"
    play = functools.partial(act, temperature=temperature and float(temperature))
    players = [vldac.Player(args) for _ in range(args.num_envs)]
    played = vldac.evaluate(vldac.VLMPolicy(args), players, range(200), play)
    print(json.dumps(vldac.summary(played)))


if __name__ == "__main__":
    main(*sys.argv[1:])
