"""Decode faster on one GPU: the forward pass for one more token is recorded once, as a CUDA graph.

    python extras/cuda_graph.py --env OneRoom         takes the options of vldac.py
    python extras/cuda_graph.py --resume runs/NAME    goes on with a run of vldac.py, or the other way round

It replaces vldac.VLMPolicy by one that generates with a recorded pass, without PEFT's bookkeeping. An H100
with PyTorch 2.11 sampled several times as fast (docs/gpu.md); study/gpu_check.py tries whether another GPU
does, and draws the same tokens.
"""

import copy
import functools
import math
import sys
from pathlib import Path

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replaced import replaced  # noqa: E402

import vldac  # noqa: E402
from envs import check  # noqa: E402


class Generation:
    """`vlm.generate` with a CUDA graph of the forward pass for one more token.

    The pass has thousands of small kernels, and to launch them one by one takes several times as long as they
    run. A graph is launched as a whole. But it repeats what was recorded, in the same memory and without
    Python: so inputs are copied to where they were, the cache of keys and values has a fixed size, and for
    more prompts, fewer or much longer ones all is made anew.

    The first eight tokens of a graph are compared with ordinary passes over a copy of the cache. Not only the
    first, because what a recording has fixed by mistake, such as a position, is still right there.
    """

    def __init__(self, vlm):
        self.vlm, self.generate = vlm, vlm.generate
        self.recorded = True  # until a recording has failed
        # Where the cache is static, generate() calls this for all tokens but the first.
        vlm.get_compiled_call = lambda _: self.decode_token
        self.forget()

    def forget(self):
        """Drop the cache and the graph."""
        self.batch = self.length = 0
        self.cache = self.graph = self.inputs = self.output = None
        self.copied_cache, self.to_compare = None, 8

    def __call__(self, **inputs):
        """From prompts (B, P) to prompts with their responses (B, P + R)."""
        if not self.recorded:
            return self.generate(**inputs)
        B, P = inputs["input_ids"].shape
        length = P + self.vlm.generation_config.max_new_tokens
        if B != self.batch or length > self.length:
            self.forget()  # first, so that there is never memory for both
            self.batch, self.length = B, math.ceil(length / 64) * 64  # so that it seldom grows
            self.cache = StaticCache(self.vlm.config, self.length)
            for i, layer in enumerate(self.cache.layers):
                # Gemma's sliding layers count in Python. The mask hides what is outside of their window, too.
                if type(layer) is StaticSlidingWindowLayer:
                    self.cache.layers[i] = StaticLayer(self.length)
        self.cache.reset()
        self.copied_cache = None  # it is of the last call, if that had a single token
        return self.generate(**inputs, past_key_values=self.cache)

    def decode_token(self, **inputs):
        """The forward pass for one more token of every response."""
        if not self.recorded:  # any more: the graph has failed at an earlier token
            return self.vlm(**inputs)
        expected = None
        try:
            if self.to_compare > 0:  # also because libraries allocate in a first pass what they need
                if self.copied_cache is None:
                    self.copied_cache = copy.deepcopy(self.cache)
                expected = self.vlm(**inputs | {"past_key_values": self.copied_cache})
            if self.graph is None:
                self.record(inputs)
            else:
                for place, x in zip(tree_leaves(self.inputs), tree_leaves(inputs), strict=True):
                    if isinstance(x, torch.Tensor) or isinstance(place, torch.Tensor):
                        place.copy_(x.view(place.shape))  # neither may be None or of another size
            self.graph.replay()
            if self.to_compare == 0:
                return self.output
            problem = "its result is not that of the model"
            if self.agrees_with(expected):
                self.to_compare -= 1
                if self.to_compare == 0:
                    self.copied_cache = None
                return self.output
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            cause = error.__context__ or error  # the end of a recording that has failed raises, too
            problem = str(cause).partition("\n")[0]
        vldac.print_line(f"decoding goes on without a CUDA graph: {problem}")
        self.recorded = False
        self.forget()
        return expected or self.vlm(**inputs)  # generate() goes on with the cache in what is returned

    def record(self, inputs):
        """Record the pass. Nothing is computed, and the cache is as before."""
        # Autocast would keep LoRA's weights in bfloat16, and the graph go on with those of now. This holds
        # until the `with` in vldac's `sample` ends.
        torch.set_autocast_cache_enabled(False)
        self.inputs, self.graph = inputs, torch.cuda.CUDAGraph()
        # The outer stream is the current one, and will be again if the recording fails.
        with torch.cuda.device(self.vlm.device), torch.cuda.stream(torch.cuda.current_stream()):
            # thread_local: another thread may use the GPU meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.output = self.vlm(**inputs)

    def agrees_with(self, expected) -> bool:
        """Whether the graph's logits, and its place in the cache, are those of an ordinary pass."""
        difference = (self.output.logits - expected.logits).float()
        close = difference.std() < 0.01 * expected.logits.float().std()  # sums may have another order
        same_place = self.cache.get_seq_length().equal(self.copied_cache.get_seq_length())
        return close.item() and same_place


def lora_as_products(vlm):
    """Compute each LoRA layer as what it is, y + scale * B A x, without PEFT's bookkeeping.

    When responses are generated token by token, that bookkeeping costs more than the products. The result is
    the same, to the bit where the scale, lora_alpha / lora_rank, is a power of two.
    """

    def forward(layer, x):
        y = layer.base_layer(x)
        if layer.disable_adapters:
            return y
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return torch.add(y, linear(linear(x, A), B), alpha=layer.scaling["default"])

    for module in vlm.modules():  # DoRA and adapters with a bias keep PEFT's own
        if type(module) is LoraLinear and not module.lora_variant and not any(module.lora_bias.values()):
            module.forward = functools.partial(forward, module)


class Policy(vldac.VLMPolicy):
    """VL-DAC's policy, which decodes by a graph."""

    def __init__(self, args):
        super().__init__(args)
        lora_as_products(self.vlm)
        self.vlm.generate = Generation(self.vlm)

    def sample(self, prompts):
        """As in vldac, but filled up to a multiple of 8: so few batches have a size of their own."""
        filler = [prompts[-1]] * (-len(prompts) % 8) if self.vlm.generate.recorded else []
        return super().sample([*prompts, *filler])[: len(prompts)]


check_training = vldac.check_training


def check_gpu(args):
    """vldac.check_training, and UserError unless a graph can be recorded."""
    check_training(args)
    check(args.device.startswith("cuda"), "a CUDA graph needs a GPU that PyTorch finds: take vldac.py")


def main(argv=None):
    with replaced(VLMPolicy=Policy, check_training=check_gpu):
        vldac.main(argv)


if __name__ == "__main__":
    main()
