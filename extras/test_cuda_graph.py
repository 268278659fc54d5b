"""The tests of the CUDA graph, on a CPU: a stand-in replays the recorded operations, as a graph would.

What they cannot show, study/gpu_check.py does: that a GPU records the pass, and that this is faster.
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForImageTextToText
from transformers.cache_utils import StaticCache
from transformers.generation import GenerationMixin

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "extras")]

import cuda_graph  # noqa: E402

import test_vldac  # noqa: E402
import vldac  # noqa: E402
from test_vldac import (  # noqa: E402
    FAMILIES,
    TEXT_LAYERS,
    make_policy,
    options,
    refused,
    some_prompts,
    without_times,
)

torch.set_num_threads(1)  # the models here are too small to share
# pytest finds fixtures by the names of a module.
model, model_folder, run = test_vldac.model, test_vldac.model_folder, test_vldac.run


# Operations that wait for the GPU, or copy to it: they cannot be recorded.
WAITING = "_local_scalar_dense item nonzero is_nonzero masked_select unique equal bincount lift_fresh".split()


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: the operations of a function, and their replay on the same tensors.

    As on a GPU no Python runs in a replay, and a recording computes nothing: what it has changed is put back.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.changed, self.replays = [], [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation.__name__.partition(".")[0] in WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        if operation._schema.is_mutable:
            self.changed.append((args[0], args[0].clone()))
        out = operation(*args, **kwargs)
        self.operations.append((operation, args, kwargs, out))
        return out

    def put_back(self):
        for x, before in reversed(self.changed):
            x.copy_(before)

    def replay(self):
        self.replays += 1
        for operation, args, kwargs, out in self.operations:
            again = operation(*args, **kwargs)
            for place, x in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != x.data_ptr():  # else it is a view
                    place.copy_(x)


@contextlib.contextmanager
def stand_in():
    """CUDA graphs on a CPU: a list of those that are made. study/gpu_check.py has its dry run with it."""
    made, streams = [], ["main"]

    def new_graph():
        made.append(Tape())
        return made[-1]

    @contextlib.contextmanager
    def record(graph, capture_error_mode):
        streams.append("side")  # and it stays there if the recording fails
        try:
            with graph:
                yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        graph.put_back()
        streams.pop()

    @contextlib.contextmanager
    def stream(name):
        before = list(streams)
        try:
            yield
        finally:
            streams[:] = before

    def takes_step(self, inputs, config):  # as on a GPU
        return isinstance(inputs.get("past_key_values"), StaticCache)

    cuda = {"CUDAGraph": new_graph, "graph": record, "stream": stream}
    cuda |= {"device": lambda device: contextlib.nullcontext(), "current_stream": lambda: streams[-1]}
    with mock.patch.multiple(torch.cuda, **cuda):
        with mock.patch.object(GenerationMixin, "_valid_auto_compile_criteria", takes_step):
            yield made
    assert streams == ["main"]


@pytest.fixture
def graphs():
    """What is made. Set `policy.vlm.generate.recorded` to use them."""
    with stand_in() as made:
        yield made


# Frames of each prompt: other lengths, fewer prompts, much longer ones, a single one, more.
BATCHES = [[1, 2, 3, 1], [2, 1], [5, 5, 5, 1], [1], [3, 1, 1, 2, 1]]


def greedy_policy(folder, dtype="float64"):
    """A policy whose responses end early or late, and batches of prompts.

    In float64: two ways to the same logits round otherwise, and the likeliest of two tokens might be another.
    """
    policy = make_policy(folder, cls=cuda_graph.Policy, max_image_tokens=16, dtype=dtype)
    policy.vlm.generation_config.do_sample = False
    stop = policy.stop_ids[0].item()

    def stop_now_and_then(*call):
        logits = call[-1].clone()
        now = logits.argmax(-1) % 7 == 0
        logits[..., stop] = torch.where(now, logits.amax(-1) + 1, logits[..., stop])
        return logits

    policy.vlm.get_output_embeddings().register_forward_hook(stop_now_and_then)
    return policy, [some_prompts(policy, counts) for counts in BATCHES]


def sampled(policy, batches, **generate):
    """The tokens of the responses to each batch."""
    vars(policy.vlm.generate).update(generate)
    return [[tokens.tolist() for tokens in policy.sample(batch)] for batch in batches]


EACH_CACHE = ["qwen2_vl", "qwen3_5", "gemma3"]  # all layers alike, some of linear attention, some sliding
RECORDED = [(family, "float64") for family in FAMILIES] + [(family, "bfloat16") for family in EACH_CACHE]


@pytest.mark.parametrize("family, dtype", RECORDED)
def test_a_graph_decodes_what_is_decoded_without_it(family, dtype, model_folder, graphs, monkeypatch):
    """By generate() as it is, or, in bfloat16, which rounds otherwise, with the same cache. Also later."""
    policy, batches = greedy_policy(model_folder(family), dtype=dtype)
    if dtype == "bfloat16":
        batches = batches[:2]
    elif family not in EACH_CACHE:
        batches = batches[:3]

    def expected():
        if dtype == "float64":
            return sampled(policy, batches, recorded=False)
        with monkeypatch.context() as without:
            without.setattr(policy.vlm.generate, "decode_token", policy.vlm)
            return sampled(policy, batches, recorded=True)

    before = expected()
    assert sampled(policy, batches, recorded=True) == before
    with torch.no_grad():
        for parameter in policy.lora_parameters():
            parameter *= 1.7
    batches = batches[:2]
    learned = sampled(policy, batches, recorded=True)
    assert policy.vlm.generate.recorded  # still: nothing waited for the GPU, and all was right
    assert learned == expected() != before[:2]
    if dtype == "float64":
        assert len({len(tokens) for batch in before + learned for tokens in batch}) > 1
    assert sum(graph.replays for graph in graphs) > 10
    names = {operation.__name__.partition(".")[0] for graph in graphs for operation, *_ in graph.operations}
    assert names >= {"embedding", "index_copy_"}


@pytest.mark.parametrize("family", EACH_CACHE)
def test_a_graph_samples_what_is_scored(family, model_folder, graphs):
    changes = {"max_image_tokens": 16, "temperature": 1.3, "dtype": "float64"}
    policy = make_policy(model_folder(family), cls=cuda_graph.Policy, **changes)
    generate, scores = policy.vlm.generate.generate, []

    def with_scores(**inputs):
        out = generate(**inputs, output_scores=True, return_dict_in_generate=True)
        scores.append(torch.stack(out.scores, dim=1).log_softmax(2))  # (rows, R, tokens)
        return out.sequences

    policy.vlm.generate.generate = with_scores
    for counts in ([3, 1, 2, 2], [1, 2]):
        prompts = some_prompts(policy, counts)
        responses = policy.sample(prompts)
        logprobs, _, _ = policy(prompts, responses)
        for i, response in enumerate(responses):
            n = len(response)
            drawn_from = scores[-1][i, torch.arange(n), response]
            torch.testing.assert_close(logprobs[i, :n], drawn_from, atol=1e-4, rtol=0)
    assert [len(batch) for batch in scores] == [8, 8]  # filled up
    assert [graph.replays > 6 for graph in graphs] == [True]


REPLAY = Tape.replay


def nothing_is_recorded(tape):
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def wrong_logits(tape):
    REPLAY(tape)
    *_, logits = tape.operations[-1]
    logits.neg_()


def no_place_is_counted(tape):
    REPLAY(tape)
    for operation, args, *_ in tape.operations:
        if operation._schema.name == "aten::add_" and args[0].ndim == 0:
            args[0].sub_(1)


def a_place_is_fixed(tape):
    """Where keys and values go was recorded as a number, which is right for the first token."""
    REPLAY(tape)
    if tape.replays == 1:
        operations = []
        for operation, args, *rest in tape.operations:
            if operation._schema.name == "aten::index_copy_":
                args = (*args[:2], args[2].clone(), *args[3:])
            operations.append((operation, args, *rest))
        tape.operations = operations


def a_position_is_fixed(tape):
    """From the sixth token on."""
    REPLAY(tape)
    if tape.replays == 5:
        inputs = tape.generation.inputs
        inputs["position_ids"] = inputs["position_ids"].clone()  # so the graph's own is not written


def a_state_is_kept(tape):
    """Linear attention's, after the first token."""
    REPLAY(tape)
    if tape.replays == 1:
        tape.operations = [step for step in tape.operations if step[0]._schema.name != "aten::copy_"]


WRONG = "its result is not that of the model"
FAILURES = [
    ("qwen2_vl", nothing_is_recorded, "operation not permitted when stream is capturing"),
    ("qwen2_vl", wrong_logits, WRONG),
    ("qwen2_vl", no_place_is_counted, WRONG),
    ("qwen2_vl", a_place_is_fixed, WRONG),
    ("qwen2_vl", a_position_is_fixed, WRONG),
    ("qwen3_5", a_state_is_kept, WRONG),
    ("gemma3", a_place_is_fixed, WRONG),
]


@pytest.mark.parametrize("family, failure, problem", FAILURES)
def test_a_graph_that_fails_is_given_up_for_good(
    family, failure, problem, model_folder, graphs, monkeypatch, capsys
):
    """With one line; then all is as without it: the usual cache, and nothing is filled up."""
    policy, batches = greedy_policy(model_folder(family), dtype="float32")
    before = sampled(policy, batches, recorded=False)
    capsys.readouterr()
    method = "__torch_dispatch__" if failure is nothing_is_recorded else "replay"
    monkeypatch.setattr(Tape, method, lambda tape, *_: failure(tape))
    monkeypatch.setattr(Tape, "generation", policy.vlm.generate, raising=False)
    generate, calls = policy.vlm.generate.generate, []
    policy.vlm.generate.generate = lambda **inputs: calls.append(inputs) or generate(**inputs)
    assert sampled(policy, batches, recorded=True) == before
    by_the_graph = ["past_key_values" in inputs for inputs in calls]
    assert by_the_graph[0] and not any(by_the_graph[2:])  # the first may have had a single token only
    sizes = [8 if used else len(counts) for used, counts in zip(by_the_graph, BATCHES, strict=True)]
    assert [len(inputs["input_ids"]) for inputs in calls] == sizes
    message = f"decoding goes on without a CUDA graph: {problem}"
    printed = capsys.readouterr().out
    assert printed.startswith(message) and printed.count("\n") == 1
    assert torch.is_autocast_cache_enabled()


UNEXPECTED = {  # what takes the place of the positions, or comes to the inputs: what is printed
    "None": ({"position_ids": None}, "'NoneType' object has no attribute 'view'"),
    "smaller": ({"position_ids": torch.zeros(1, 1)}, "shape '[4, 8, 1]' is invalid for input of size 1"),
    "more": ({"more": torch.zeros(1)}, "zip() argument 2 is longer than argument 1"),
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_inputs_that_do_not_fit_a_graph_give_it_up(name, model, graphs, capsys):
    """None may be left out in silence: the graph would go on with that of the token before."""
    unexpected, problem = UNEXPECTED[name]
    policy, [prompts, *_] = greedy_policy(model)
    policy.vlm.get_output_embeddings()._forward_hooks.clear()
    policy.vlm.generation_config.eos_token_id = [10**6]
    generation, steps = policy.vlm.generate, []
    decode_token = generation.decode_token
    generation.decode_token = lambda **inputs: steps.append(inputs) or decode_token(**inputs)
    policy.sample(prompts)
    assert generation.to_compare == 0
    generation.vlm = lambda **inputs: "an ordinary pass"
    capsys.readouterr()
    assert decode_token(**steps[-1] | unexpected) == "an ordinary pass"
    assert capsys.readouterr().out == f"decoding goes on without a CUDA graph: {problem}\n"
    assert not generation.recorded


def test_a_graph_is_kept_for_fewer_tokens_and_made_anew_for_more(model, graphs):
    policy, _ = greedy_policy(model)
    made = []
    for frames in (1, 9, 1, 9, 40):
        policy.sample(some_prompts(policy, [frames, 1]))
        made.append(len(graphs))
    assert made == [1, 2, 2, 2, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_as_products_is_peft_s_to_the_bit(family, dtype, model_folder):
    """Log-probabilities and gradients of all its weights; with the adapter switched off too."""
    policy = make_policy(model_folder(family), dtype=dtype, max_image_tokens=16, lora_rank=16)
    cuda_graph.lora_as_products(policy.vlm)
    prompts = some_prompts(policy, [1, 2])
    responses = [torch.tensor([60, 61, 62]), torch.tensor([63])]

    def computed():
        logprobs, _, values = policy(prompts, responses)
        gradients = torch.autograd.grad(logprobs.sum(), policy.lora_parameters(), materialize_grads=True)
        with policy.peft_model.disable_adapter(), torch.no_grad():
            baselogprobs, _, _ = policy(prompts, responses)
        assert (logprobs - baselogprobs).abs().max() > 0.01
        return [logprobs, values, baselogprobs, *gradients]

    plain = computed()
    layers = [module for module in policy.vlm.modules() if isinstance(module, cuda_graph.LoraLinear)]
    for layer in layers:
        del layer.forward  # PEFT's own again
    assert 2 * len(layers) == len(policy.lora_parameters())
    torch.testing.assert_close(plain, computed(), rtol=0, atol=0)


@pytest.mark.parametrize("variant, replaced", [
    ({}, True), ({"use_dora": True}, False), ({"lora_bias": True}, False),
])  # fmt: skip
def test_variants_of_lora_keep_peft_s_own_forward(variant, replaced, model, tmp_path):
    """DoRA scales the whole product, and a bias is added: they are not y + scale * B A x."""
    torch.manual_seed(0)
    base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64)
    config = LoraConfig(r=4, lora_alpha=24, target_modules=TEXT_LAYERS, init_lora_weights=False, **variant)
    plain = get_peft_model(base, config)
    plain.save_pretrained(tmp_path)
    policy = vldac.VLMPolicy(options(model, adapter=str(tmp_path), lora_alpha=24, dtype="float64"))
    cuda_graph.lora_as_products(policy.vlm)
    inputs = policy.inputs(some_prompts(policy, [1]))
    with torch.no_grad():
        torch.testing.assert_close(policy.vlm(**inputs).logits, plain(**inputs).logits)
    layers = [module for module in policy.vlm.modules() if isinstance(module, cuda_graph.LoraLinear)]
    assert layers and all(("forward" in vars(layer)) == replaced for layer in layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoding_step_needs_neither_data_nor_the_host(family, model_folder, graphs):
    """On meta tensors, which have no data, and which an operation from the host would betray."""
    policy, batches = greedy_policy(model_folder(family), dtype="bfloat16")
    generation, steps = policy.vlm.generate, []
    decode_token = generation.decode_token
    generation.decode_token = lambda **inputs: steps.append(inputs) or decode_token(**inputs)
    policy.sample(batches[0])
    inputs, cache = dict(steps[-1]), generation.cache
    del inputs["past_key_values"]

    def to_meta(x):
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), x)

    for layer in cache.layers:
        vars(layer).update(to_meta(vars(layer)) | {"device": torch.device("meta")})
    policy.vlm.to("meta")
    inputs, hosts = to_meta(inputs), []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            out = operation(*args, **kwargs or {})
            for x in tree_leaves((args, kwargs, out)):
                if isinstance(x, torch.Tensor) and x.device.type != "meta":
                    hosts.append(operation)
            return out

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Log():
        out = policy.vlm(**inputs, past_key_values=cache)
    assert out.logits.shape[:2] == (8, 1) and not hosts


def test_a_graph_needs_a_gpu(model, capsys):
    message = refused(["--env", "NumberLine", "--model", model, "--device", "cpu"], capsys, cuda_graph.main)
    assert "a CUDA graph needs a GPU" in message


def test_a_run_by_a_graph_does_not_depend_on_its_evaluations(run, graphs, monkeypatch):
    """Which have more episodes at once, or fewer when some have ended."""
    monkeypatch.setattr(vldac, "VLMPolicy", cuda_graph.Policy)
    sizes = ["--num_envs", 4, "--num_steps", 2]
    _, never = run("NumberLine", *sizes, name="never")
    number = len(graphs)
    _, often = run("NumberLine", *sizes, "--eval_episodes", 12, "--eval_every", 1, name="often")
    often = [{key: x for key, x in row.items() if not key.startswith("eval/")} for row in often]
    assert without_times(often) == without_times(never)
    assert number == 1 and len(graphs) > 4  # of 8, to which one player and four are filled up, and of 16
    assert never[1]["losses/ratio_first"] == 0.0
