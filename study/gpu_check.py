"""What only a GPU can show: does the CUDA graph decode the same, and faster? In five minutes on an H100.

    python study/gpu_check.py          a model in the shape of Qwen2-VL-7B with random weights, on the GPU
    python study/gpu_check.py --dry    a tiny one on the CPU, with a stand-in for the graph, to try the script

The last line is the verdict: whether all holds that must. docs/gpu.md tells of an H100's.
"""

import functools
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "extras")]
DRY = "--dry" in sys.argv
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
torch.cuda.device_count()  # asked before test_vldac hides them from what comes later

from cuda_graph import LoraLinear, Policy, lora_as_products  # noqa: E402
from replaced import replaced  # noqa: E402
from test_cuda_graph import stand_in  # noqa: E402

import vldac  # noqa: E402
from test_vldac import write_model  # noqa: E402

os.environ.pop("CUDA_VISIBLE_DEVICES")
if visible is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
DEVICE, BEGIN = "cpu" if DRY else "cuda", time.perf_counter()
failed = []  # what must hold and does not


def must(hold, text):
    print(f"[{time.perf_counter() - BEGIN:4.0f} s] {'holds' if hold else 'FAILS'}: {text}", flush=True)
    if not hold:
        failed.append(text)


def large(path, dtype, output_loading_info):
    """Stands for from_pretrained: the 7B's shape with random weights, which are on no disk."""
    config = transformers.AutoConfig.from_pretrained(path)
    text = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    text |= {"intermediate_size": 18944, "vocab_size": 152064, "pad_token_id": None}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: getattr(config, name) for name in names}
    with torch.device(DEVICE):
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        model = transformers.Qwen2VLForConditionalGeneration._from_config(config, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[1, 2], pad_token_id=0)
    return model, {"missing_keys": []}


def prompts_of(policy, N, padded=False):
    """N prompts of four small frames, of one length or of several."""
    frames = [np.full((60, 80, 3), 50 * k, np.uint8) for k in range(4)]
    return [policy.encode("word " * (1 + padded * (n % 5)), frames) for n in range(N)]


def responses(policy, prompts, tokens):
    """(N, tokens) and the seconds they took: no response ends earlier."""
    policy.vlm.generation_config.update(eos_token_id=[10**6], max_new_tokens=tokens)
    policy.stop_ids = torch.tensor([10**6], device=DEVICE)
    start = time.perf_counter()
    sampled = torch.stack(policy.sample(prompts)).tolist()  # waits for the GPU
    return sampled, time.perf_counter() - start


def decoding(policy, N):
    """Milliseconds of a decoding step: those of 40 tokens less those of 8; the better of two."""
    prompts, generation, times = prompts_of(policy, N), policy.vlm.generate, []
    for kind in ("PEFT", "products", "graph"):
        generation.recorded = kind == "graph"
        lora_as_products(policy.vlm)
        for layer in policy.vlm.modules():
            if kind == "PEFT" and isinstance(layer, LoraLinear):
                del layer.forward
        seconds = [responses(policy, prompts, tokens)[1] for tokens in (40, 8, 40, 8, 40)]
        times.append((min(seconds[2::2]) - min(seconds[1::2])) / 32 * 1000)
    text = "ms a decoding step: PEFT {:.1f}, products {:.1f}, graph {:.1f}".format(*times)
    must(generation.recorded and times[2] < 0.7 * times[1], f"N {N}, {text}")


def equality(policy, N, padded):
    """The likeliest tokens, by the graph and by the same pass with the same cache, not recorded: returned."""
    prompts, config = prompts_of(policy, N, padded), policy.vlm.generation_config
    config.do_sample = False
    recorded, _ = responses(policy, prompts, 6 if DRY else 128)
    with mock.patch.object(policy.vlm.generate, "decode_token", policy.vlm):
        eager, _ = responses(policy, prompts, 6 if DRY else 128)
    config.do_sample = True
    must(
        recorded == eager and policy.vlm.generate.graph is not None,
        f"the same tokens, N {N}, padded {padded}",
    )
    return recorded


def sampler(policy):
    """What is drawn from, beside what `forward` says: in bfloat16 they round differently."""
    generation, scores, distances = policy.vlm.generate, [], []
    generate = generation.generate

    def with_scores(**inputs):
        out = generate(**inputs, output_scores=True, return_dict_in_generate=True)
        scores.append(torch.stack(out.scores, dim=1).log_softmax(2))
        return out.sequences

    generation.generate, prompts = with_scores, prompts_of(policy, 8, padded=True)
    for generation.recorded in (False, True):
        tokens = torch.tensor(responses(policy, prompts, 24)[0], device=DEVICE)
        drawn = scores[-1].gather(2, tokens[..., None])[..., 0]
        with torch.no_grad():
            logprobs, _, _ = policy(prompts, list(tokens))
        distances.append((drawn - logprobs).abs().mean().item())
    generation.generate = generate
    text = "sampler beside forward, nats: {:.4f} without the graph, {:.4f} with it".format(*distances)
    must(distances[1] < 2 * distances[0] + 0.01, text)


def training(model, policy_class) -> float:
    """Three updates of 128 steps and two evaluations of 16 episodes. Returns the entropy of the first."""
    words = f"--env NumberLine --model {model} --device {DEVICE} --max_image_tokens 16 --max_episode_steps 8"
    words += " --num_steps 8 --total_timesteps 384 --minibatch_size 64 --value_warmup 0 --eval_episodes 16"
    args = vldac.parse_args([*words.split(), "--max_new_tokens", "4" if DRY else "24"])
    folder, reserved = Path(tempfile.mkdtemp()), []
    remember = functools.partial(remembering, vldac.write_row, reserved)
    with replaced(VLMPolicy=policy_class, write_row=remember):
        vldac.train(args, folder)
    _, *rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    times = ", ".join(f"{row['time/collect']:.1f}" for row in rows)
    name = f"{policy_class.__name__}, collected in {times} s"
    must(all(row["losses/ratio_first"] == 0 for row in rows), f"{name}: ratio 1")
    must(reserved[-1] - reserved[1] < 1, f"{name}: {reserved[1]:.1f} and {reserved[-1]:.1f} GB reserved")
    return rows[0]["losses/entropy"]


def remembering(write_row, reserved, *words):
    """vldac.write_row, and the memory that PyTorch cannot give back after it."""
    write_row(*words)
    gc.collect()
    torch.cuda.empty_cache()
    reserved.append(0 if DRY else torch.cuda.memory_reserved() / 1e9)


def failing(policy):
    """A recording that waits for the GPU fails: one line, and all goes on. Before PyTorch 2.13 it may not."""
    generation, forward = policy.vlm.generate, policy.vlm.forward

    @functools.wraps(forward)
    def waiting(*words, **inputs):
        out = forward(*words, **inputs)
        out.logits.sum().item()
        return out

    generation.recorded, policy.vlm.forward = True, waiting
    generation.forget()
    responses(policy, prompts_of(policy, 8), 8)
    policy.vlm.forward = forward
    logprobs, _, _ = policy(prompts_of(policy, 2), [torch.tensor([60, 61], device=DEVICE)] * 2)
    logprobs.mean().backward()
    finite = all(parameter.grad.isfinite().all() for parameter in policy.lora_parameters())
    must(finite and not generation.recorded, "a recording that fails is given up, and all goes on")


def vision(policy):
    """Milliseconds of the vision tower, for 64 frames."""
    inputs = policy.inputs(prompts_of(policy, 16))
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad(), policy.autocast:
            policy.vlm.model.visual(inputs["pixel_values"], inputs["image_grid_thw"])[0].sum().item()
    print(f"64 frames: {(time.perf_counter() - start) * 1000:.1f} ms")


def check(model):
    entropies = [training(model, policy_class) for policy_class in (vldac.VLMPolicy, Policy)]
    must(abs(entropies[1] / entropies[0] - 1) < 0.02, "entropy {:.3f} and {:.3f}".format(*entropies))
    gc.collect()  # a policy has cycles
    torch.cuda.empty_cache()
    policy = Policy(vldac.Args(model=model, device=DEVICE, max_image_tokens=16))
    for parameter in policy.lora_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    vision(policy)
    for N in (3, 9) if DRY else (16, 64):
        decoding(policy, N)
    for N, padded in [(16, False), (1, False), (16, True), (50, False), (50, True)]:
        before = equality(policy, N, padded)
    with torch.no_grad():
        for parameter in policy.lora_parameters():
            parameter *= 3
    must(equality(policy, N, padded) != before, "the graph of before has other tokens after LoRA has changed")
    sampler(policy)
    failing(policy)


def main():
    print(sys.version.split()[0], "PyTorch", torch.__version__, "transformers", transformers.__version__)
    if not DRY:
        print(torch.cuda.get_device_name(), "CUDA", torch.version.cuda)
    large_model = mock.patch.object(vldac.AutoModelForImageTextToText, "from_pretrained", large)
    try:
        with stand_in() if DRY else large_model:
            check(str(write_model("qwen2_vl", Path(tempfile.mkdtemp()))))
    except Exception as error:  # whatever it is, it belongs to the verdict
        traceback.print_exc()
        failed.append(repr(error))
    print(f"verdict: {'fails: ' + '; '.join(failed) if failed else 'all holds'}")
    if DRY and any("ms a decoding step" not in text for text in failed):
        raise SystemExit(1)  # the stand-in is slower, and all else must hold


if __name__ == "__main__":
    main()
