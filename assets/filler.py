"""Why a ratio per token? The toy with longer thoughts: every thought it is taught ends in random words.

    python assets/filler.py --words 48 --max_new_tokens 88                            VL-DAC
    python assets/filler.py --words 48 --max_new_tokens 88 --ratio response           RL4VLM, lambda 0.5
    python assets/filler.py --words 48 --max_new_tokens 88 --ratio token_sum --micro_batch_size 128

takes the options of vldac.py and rl4vlm.py too. The words are drawn anew for every response that is taught;
nothing else of the lesson changes, nor of the training. A toy is kept in runs/toys for other runs.

The log also has how far the logarithms of the ratios scatter, per token and per response. Its
thought_agreement means nothing here, as a true thought ends before the words.
"""

import json
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from unittest import mock

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import rl4vlm  # noqa: E402
import toy  # noqa: E402

import envs  # noqa: E402
import vldac  # noqa: E402

WORDS = "amber basil cedar delta ember fjord grove heron".split()
FILLER = re.compile(f'( ({"|".join(WORDS)}))+(?=")')


@dataclass
class Args(rl4vlm.Args):
    """The options of rl4vlm.py, and two more."""

    program: ClassVar[str] = "assets/filler.py"
    words: int | None = None  # random words after every thought that the toy is taught; default: none
    # Whose ratio is clipped: VL-DAC's, RL4VLM's, or VL-DAC's with a sum over the tokens of a step.
    ratio: Literal["token", "response", "token_sum"] = "token"


def toy_folder(args) -> Path:
    """The folder of the toy for these options; it is taught where there is none yet."""
    if not args.words:
        return toy.cached_folder(args)
    if args.max_new_tokens < vldac.TOY["max_new_tokens"] + args.words:
        raise envs.UserError("more --words need more --max_new_tokens")
    folder = Path("runs", "toys", f"{args.env}-{args.words}-words-{args.seed}")
    if folder.exists():
        return folder
    respond, build_tokenizer, decode = toy.Example.response, toy.build_tokenizer, vldac.VLMPolicy.decode

    def longer_response(example, rng):
        response = json.loads(respond(example, rng))
        response["thoughts"] += "".join(" " + rng.choice(WORDS) for _ in range(args.words))
        return json.dumps(response)

    def tokenizer_with_words(prompts, responses):
        """The toy's own tokenizer, in which every word is one token more."""
        tokenizer = build_tokenizer(prompts, [FILLER.sub("", response) for response in responses])
        tokenizer.add_tokens([f" {word}" for word in WORDS])
        return tokenizer

    def decode_without_words(policy, responses):
        """For the check of what was learned: a thought is true if the words before the filler are."""
        return [FILLER.sub("", response) for response in decode(policy, responses)]

    with (
        mock.patch.object(toy.Example, "response", longer_response),
        mock.patch.object(toy, "build_tokenizer", tokenizer_with_words),
        mock.patch.object(vldac.VLMPolicy, "decode", decode_without_words),
    ):
        toy.main(folder, json.dumps({name: getattr(args, name) for name in toy.OPTIONS}))
    return folder


def token_sum_loss(newlogprobs, logprobs, advantages, mask, clip_coef):
    """Eq. 3 with the mean over all tokens: a step counts by its length, as if its tokens were summed up.

    >>> lp, mask = torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]])
    >>> token_sum_loss(lp, lp, torch.tensor([3.0, 0.0]), mask, 0.2)  # -(3 + 3 + 0) / 3
    tensor(-2.)
    >>> vldac.policy_loss(lp, lp, torch.tensor([3.0, 0.0]), mask, 0.2)  # -(3 + 0) / 2
    tensor(-1.5000)
    """
    ratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0).exp()
    advantages = advantages[:, None]  # (B, 1)
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef))
    return (pg_loss * mask).sum() / mask.sum()


def scatter(newlogprobs, logprobs, weights, clip_coef) -> dict[str, float]:
    """How far the logarithms of the ratios scatter, and the share of responses whose ratio is clipped.

    weights (B, R): those of RL4VLM, or 1; 0 where masked. A response's ratio is that of its weighted tokens.

    >>> new = torch.tensor([[0.3, -0.1], [0.1, 0.9]])  # responses 0.2 and, without the masked token, 0.1
    >>> found = scatter(new, torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]]), clip_coef=0.2)
    >>> {name: round(x, 3) for name, x in found.items()}  # exp(0.2) is clipped
    {'logratio_std_token': 0.163, 'logratio_std_response': 0.05, 'clipfrac_response': 0.5}
    """
    logratio = (newlogprobs - logprobs).detach()
    of_responses = (logratio.masked_fill(weights == 0, 0) * weights).sum(1)
    clipped = (of_responses.exp() - 1).abs() > clip_coef
    return {
        "logratio_std_token": logratio[weights > 0].std(correction=0).item(),
        "logratio_std_response": of_responses.std(correction=0).item(),
        "clipfrac_response": clipped.float().mean().item(),
    }


def update(policy, optimizer, minibatches, args, value_only, surrogate, *, plain_update=vldac.update):
    """The same as vldac.update; its statistics have those of `scatter` too."""
    found = []

    def watched(newlogprobs, logprobs, advantages, weights, clip_coef):
        found.append(scatter(newlogprobs, logprobs, weights, clip_coef))
        return surrogate(newlogprobs, logprobs, advantages, weights, clip_coef)

    losses = plain_update(policy, optimizer, minibatches, args, value_only, watched)
    return losses | {name: np.mean([x[name] for x in found]).item() for name in found[0]}


def train(args, folder):
    vldac.update = update
    of_ratio = {
        "token": {},
        "response": {"surrogate": rl4vlm.rl4vlm_loss, "token_weights": rl4vlm.thought_weights},
        "token_sum": {"surrogate": token_sum_loss},
    }
    vldac.train(args, folder, **of_ratio[args.ratio])


def main(argv=None):
    # What vldac.py runs to get the toy of a run.
    vldac.runpy = types.SimpleNamespace(run_path=lambda script: {"cached_folder": toy_folder})
    vldac.main(argv, Args, train)


if __name__ == "__main__":
    main()
