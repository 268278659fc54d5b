"""What a model would do if it always took its likeliest action, or acted on what another player sees or says.

    python study/likeliest.py runs/NAME                     200 episodes of the model that a run started from
    python study/likeliest.py runs/NAME --temperature 0.5   instead: an action sampled at this temperature
    python study/likeliest.py runs/NAME --temperature 1 --env Hallway --exchanged prompts
                                                            what the run has learned, in Hallway, where each
                                                            player acts on the prompt of another
    ... --exchanged thoughts                                or on its own, but after another's thought

Greedy decoding does not show the first: it takes the likeliest token, and several actions may begin with one
token, so that together they beat an action that is likelier than each of them. Here a thought is sampled, and
then every admissible action is scored in the place of the sampled one.
"""

import argparse
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
def act(policy, players, temperature=None, exchanged=None):
    """A step like vldac.act.

    exchanged  "prompts" or "thoughts", which each player has from the next one; None: from itself
    """
    prompts = [policy.encode(*player.prompt()) for player in players]
    if exchanged == "prompts":
        prompts = prompts[1:] + prompts[:1]
    texts = policy.decode(policy.sample(prompts))
    if exchanged == "thoughts":
        texts = texts[1:] + texts[:1]
    admissible = [player.info["actions"] for player in players]
    actions = likeliest(policy, prompts, texts, admissible, temperature)
    steps = []
    for player, prompt, text, action in zip(players, prompts, texts, actions, strict=True):
        steps.append(vldac.Step(prompt, policy.no_tokens, text, action, *player.step(action)))
    return steps


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--env")
    parser.add_argument("--exchanged", choices=["prompts", "thoughts"])
    options = parser.parse_args(argv)
    args = vldac.load_args(options.folder)
    args.split, args.env = "eval", options.env or args.env
    policy = vldac.VLMPolicy(args)
    if options.exchanged:
        vldac.load_weights(Path(options.folder), policy)
    play = functools.partial(act, temperature=options.temperature, exchanged=options.exchanged)
    players = [vldac.Player(args) for _ in range(args.num_envs)]
    print(json.dumps(vldac.summary(vldac.evaluate(policy, players, range(options.episodes), play))))


if __name__ == "__main__":
    main()
