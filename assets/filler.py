"""Why a ratio per token? The toy with longer thoughts: every thought it is taught ends in random words.

    python assets/filler.py --words 48 --max_new_tokens 88                            VL-DAC
    python assets/filler.py --words 48 --max_new_tokens 88 --ratio response           RL4VLM, lambda 0.5
    python assets/filler.py --words 48 --max_new_tokens 88 --ratio token_sum          VL-DAC with a sum

takes the options of vldac.py and rl4vlm.py too. The words are drawn anew for every response that is taught;
nothing else of the lesson changes, nor of the training. A toy is kept in runs/toys for other runs.

The log also has how far the ratios are from 1, per token and per response (see scatter);

    python assets/filler.py ratios runs/A runs/B       these figures, a row for every method

thought_agreement means nothing here, as a true thought ends before the words.
"""

import hashlib
import json
import random
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
import eval as evaluation  # noqa: E402
import vldac  # noqa: E402

WORDS = "amber basil cedar delta ember fjord grove heron".split()
FILLER = re.compile(f'( ({"|".join(WORDS)}))+(?=")')


@dataclass
class Args(rl4vlm.Args):
    """The options of rl4vlm.py, and two more."""

    program: ClassVar[str] = "assets/filler.py"
    words: int | None = None  # random words after every thought that the toy is taught; default: none
    # What is clipped: VL-DAC's ratios, RL4VLM's, or VL-DAC's with another mean over the tokens.
    ratio: Literal["token", "response", "token_sum", "token_mean"] = "token"


def toy_folder(args) -> Path:
    """The folder of the toy for these options; it is taught where there is none yet."""
    if not args.words:
        return toy.cached_folder(args)
    if args.max_new_tokens < vldac.TOY["max_new_tokens"] + args.words:
        raise envs.UserError("more --words need more --max_new_tokens")
    lesson = {name: getattr(args, name) for name in toy.OPTIONS}
    parts = [json.dumps(lesson), Path(__file__).read_text(), Path(toy.__file__).read_text()]
    key = hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
    folder = Path("runs", "toys", f"{args.env}-{args.words}-words-{args.seed}-{key}")
    if folder.exists():
        return folder
    rng_of_words = random.Random(args.seed)  # so that the lesson's own draws stay what they are
    respond, build_tokenizer, decode = toy.Example.response, toy.build_tokenizer, vldac.VLMPolicy.decode

    def longer_response(example, rng):
        response = json.loads(respond(example, rng))
        response["thoughts"] += "".join(" " + rng_of_words.choice(WORDS) for _ in range(args.words))
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
        toy.main(folder, json.dumps(lesson))
    return folder


def token_losses(newlogprobs, logprobs, advantages, mask, clip_coef):
    """PPO's clipped loss of every token (B, R), as in Eq. 3; 0 where masked."""
    ratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0).exp()
    advantages = advantages[:, None]  # (B, 1)
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef))
    return pg_loss * mask


def token_sum_loss(*batch):
    """Eq. 3 with the sum over the tokens of a step, the scale that RL4VLM's loss has beside the KL term.

    >>> batch = torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([3.0, 0.0]), torch.tensor([[1, 1], [1, 0]])
    >>> token_sum_loss(*batch, 0.2), vldac.policy_loss(*batch, 0.2)  # -(6 + 0) / 2 and -(3 + 0) / 2
    (tensor(-3.), tensor(-1.5000))
    """
    return token_losses(*batch).sum(1).mean()


def token_mean_loss(*batch):
    """Eq. 3 with the mean over all tokens of a minibatch: a step counts by its length.

    >>> batch = torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([3.0, 0.0]), torch.tensor([[1, 1], [1, 0]])
    >>> token_mean_loss(*batch, 0.2)  # -(3 + 3 + 0) / 3
    tensor(-2.)
    """
    mask = batch[3]
    return token_losses(*batch).sum() / mask.sum()


def scatter(newlogprobs, logprobs, weights, clip_coef) -> dict[str, float]:
    """Mean squares of the ratios' logarithms, per token and per response; the share of clipped responses.

    weights (B, R): those of RL4VLM, or 1; 0 where masked. Clipped is the ratio of the weighted tokens.

    >>> new = torch.tensor([[0.3, -0.1], [0.1, 0.9]])  # responses 0.2 and, without the masked token, 0.1
    >>> found = scatter(new, torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]]), clip_coef=0.2)
    >>> {name: round(x, 4) for name, x in found.items()}  # 0.11 / 3, 0.05 / 2, and exp(0.2) is above 1.2
    {'token': 0.0367, 'response': 0.025, 'clipped': 0.5}
    """
    logratio = (newlogprobs - logprobs).detach().masked_fill(weights == 0, 0)
    clipped = ((logratio * weights).sum(1).exp() - 1).abs() > clip_coef
    return {
        "token": (logratio.square().sum() / (weights > 0).sum()).item(),
        "response": logratio.sum(1).square().mean().item(),
        "clipped": clipped.float().mean().item(),
    }


def update(policy, optimizer, minibatches, args, value_only, surrogate, *, plain_update=vldac.update):
    """The same as vldac.update, with three more figures: how far the ratios are from 1."""
    found = []

    def recording_surrogate(newlogprobs, logprobs, advantages, weights, clip_coef):
        found.append(scatter(newlogprobs, logprobs, weights, clip_coef))
        return surrogate(newlogprobs, logprobs, advantages, weights, clip_coef)

    losses = plain_update(policy, optimizer, minibatches, args, value_only, recording_surrogate)
    means = {name: np.mean([x[name] for x in found]).item() for name in found[0]}
    losses["logratio_rms_token"] = means["token"] ** 0.5
    losses["logratio_rms_response"] = means["response"] ** 0.5
    losses["clipfrac_response"] = means["clipped"]
    return losses


SURROGATES = {
    "token": {},
    "response": {"surrogate": rl4vlm.rl4vlm_loss, "token_weights": rl4vlm.thought_weights},
    "token_sum": {"surrogate": token_sum_loss},
    "token_mean": {"surrogate": token_mean_loss},
}


def train(args, folder):
    if args.words and args.model != str(folder / "base"):
        raise envs.UserError("--words teaches a toy: it takes no other --model")
    if args.ratio == "token_mean" and args.micro_batch_size < args.minibatch_size:
        raise envs.UserError("the mean is over a minibatch: --micro_batch_size must be as large")
    vldac.update = update
    vldac.train(args, folder, **SURROGATES[args.ratio])


FIGURES = {
    "logratio_rms_token": "tokens: rms of log ratio",
    "clipfrac": "outside the clip range",
    "logratio_rms_response": "responses: rms of log ratio",
    "clipfrac_response": "outside the clip range",
}


def ratios(folders) -> str:
    """A row for every method: means over its seeds and over the updates that train the policy."""
    found = {}
    for folder in map(Path, folders):
        rows, args = evaluation.load_log(folder)
        curve = evaluation.load_curve(folder)
        of_run = []
        for name in FIGURES:
            values = [row[f"losses/{name}"] for row in rows if row["update"] > args["value_warmup"]]
            of_run.append(np.mean(values))
        found.setdefault((curve.world, curve.label), []).append(of_run)
    lines = []
    for (world, label), of_runs in found.items():
        means = [evaluation.rounded(x, 3) for x in np.mean(of_runs, axis=0)]
        lines.append([world, label, str(len(of_runs)), *means])
    return evaluation.lines_of_table(["world", "method", "runs", *FIGURES.values()], lines)


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["ratios"]:
        print(ratios(words[1:]))
        return
    # What vldac.py runs to get the toy of a run.
    vldac.runpy = types.SimpleNamespace(run_path=lambda script: {"cached_folder": toy_folder})
    vldac.main(words, Args, train)


if __name__ == "__main__":
    main()
