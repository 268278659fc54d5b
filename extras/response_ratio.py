"""How to try an idea: VL-DAC with one ratio per response, the geometric mean of its tokens' ratios.

As GSPO has it (Zheng et al. 2025, arXiv 2507.18071). Nothing else is changed. Where all ratios are 1 the
gradient is that of vldac.py, so what differs is mostly the clip: the mean leaves the clip range less often
than a token does. (GSPO's own range is 1 - 0.0003 to 1 + 0.0004.) Copy this file for a loss of your own.

    python extras/response_ratio.py --env OneRoom    takes vldac.py's options

It replaces vldac.policy_loss. The log's clipfrac has the ratios of tokens, as in vldac.py.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replaced import replaced  # noqa: E402

import vldac  # noqa: E402
from vldac import policy_loss  # noqa: E402


def response_loss(newlogprobs, logprobs, advantages, mask, clip_coef):
    """PPO's clip on one ratio per response, to minimise. The arguments are policy_loss's.

    >>> lp, one = torch.tensor([[0.8109, 0.0]]), torch.ones(1, 2)  # ratios 2.25 and 1: their mean is 1.5
    >>> response_loss(lp, torch.zeros(1, 2), torch.tensor([-2.0]), one, clip_coef=0.2)  # A < 0: not clipped
    tensor(3.0000)
    """
    logratio = (newlogprobs - logprobs).masked_fill(mask == 0, 0)
    mean = logratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)  # (B, 1)
    # A response is one token.
    return policy_loss(mean, torch.zeros_like(mean), advantages, torch.ones_like(mean), clip_coef)


def train(args, folder):
    with replaced(policy_loss=response_loss):
        vldac.train(args, folder)


def main(argv=None):
    vldac.main(argv, training=train)


if __name__ == "__main__":
    main()
