"""The toy: a vision-language model of half a million parameters, to watch the algorithm on a laptop.

    python extras/toy.py OPTIONS

prints an ordinary model folder, a Qwen2-VL with processor and tokenizer, for `vldac.py --model FOLDER`. It is
made if it is not in the cache. OPTIONS are the lesson's, below, as JSON. `vldac.py --model tiny` runs this.

The toy is built from nothing and taught one world by imitation of (frame, caption, action) examples: to say
the true caption as its thought, and as its action a random one, whatever it sees: in MiniWorld's rooms
forward twice as often as each other. So it sees and speaks, and acts blindly. (In EZPoints and Points24 half
of the actions are the world's hints.) The reinforcement learning sees no caption and no hint.
"""

import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path += [str(Path(__file__).resolve().parent.parent), os.getcwd()]

import envs  # noqa: E402
import vldac  # noqa: E402

FIXED_THOUGHT = "let me see"  # in a world without captions
NAMES = "endoftext im_start im_end vision_start vision_end image_pad video_pad".split()
SPECIAL = [f"<|{name}|>" for name in NAMES]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass
class Example:
    """A state of the world, and what may be said and done in it."""

    text_and_frames: tuple  # of its prompt
    caption: str
    hint: str | None
    hint_share: float  # how often the hint is imitated
    actions: list[str]
    lesson_actions: list[str]  # otherwise one of these, at random
    task: str
    prompt: dict | None = None  # encoded

    def response(self, rng) -> str:
        action = self.hint
        if not self.hint or rng.random() >= self.hint_share:
            action = envs.random_action(self.lesson_actions, self.task, rng)
        return json.dumps({"thoughts": self.caption, "action": action})


def play(args, count, seed) -> list[Example]:
    """States that a player meets who half of the time follows the hint, if there is one."""
    rng = random.Random(seed)
    players = [vldac.Player(args) for _ in range(args.num_envs)]
    world = players[0].env.unwrapped
    hint_share = getattr(world, "hint_share", 0.0)
    for player in players:
        player.reset(rng.randrange(2**30, 2**31))
    examples = []
    description = f"collecting examples of {args.env}"
    with tqdm(desc=description, total=count, mininterval=vldac.BAR_INTERVAL, leave=False) as bar:
        while len(examples) < count:
            for player in players:
                actions, hint = player.info["actions"], envs.call_optional(player.env, "hint")
                caption = envs.call_optional(player.env, "caption") or FIXED_THOUGHT
                lesson_actions = getattr(world, "lesson_actions", actions)
                lesson = (caption, hint, hint_share, actions, lesson_actions, player.task)
                examples.append(Example(player.prompt(), *lesson))
                follows = hint and rng.random() < 0.5
                action = hint if follows else envs.random_action(actions, player.task, rng)
                # Steps without an action: what follows a response that did not parse must be known too.
                _, done, _ = player.step(None if rng.random() < 0.15 else action)
                if done:
                    player.reset(rng.randrange(2**30, 2**31))
            bar.update(len(players))
    for player in players:
        player.env.close()
    return examples


def build_tokenizer(prompts, responses):
    """A byte-level tokenizer for such texts."""
    raw = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    sizes = {"vocab_size": 512, "max_token_length": 12, "show_progress": False}
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, **sizes)
    raw.train_from_iterator(prompts + responses, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    # What every prompt repeats is a token a line: half the prompt's length, so half the work.
    fixed = set(prompts[0].splitlines(keepends=True))
    for prompt in prompts:
        fixed &= set(prompt.splitlines(keepends=True))
    tokenizer.add_tokens(["user\n", "assistant\n", *sorted(fixed)])
    tokenizer.chat_template = CHAT
    return tokenizer


def build_model(tokenizer, H=96, layers=2) -> Qwen2VLForConditionalGeneration:
    """A Qwen2-VL of width H, a multiple of 48, with random weights."""
    ids = dict(zip(NAMES, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    init = 0.1  # transformers' default initial weights, 0.02, are for forty times the width
    text = {
        "hidden_size": H,
        "intermediate_size": 3 * H,
        "num_hidden_layers": layers,
        "num_attention_heads": H // 24,
        "num_key_value_heads": H // 48,
        "vocab_size": len(tokenizer),
        "initializer_range": init,
        "bos_token_id": ids["im_start"],
        "eos_token_id": ids["im_end"],
        "pad_token_id": ids["endoftext"],
        # A small theta: with 10,000 the width of an image turns the slowest and is as good as invisible.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 4, 6]},
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": H, "num_heads": 4, "mlp_ratio": 2}
    vision |= {"patch_size": 14, "initializer_range": init}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    config.initializer_range = init
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = ids["im_end"]
    return model


def quality(policy, examples) -> tuple[float, float]:
    """The shares of sampled responses that parse, and of thoughts that equal the caption."""
    parsed, true = 0, 0
    for k in range(0, len(examples), 64):
        some = examples[k : k + 64]
        responses = policy.decode(policy.sample([example.prompt for example in some]))
        for example, response in zip(some, responses, strict=True):
            parsed += vldac.parse_action(response, example.actions) is not None
            true += json.dumps(example.caption) in response
    return parsed / len(examples), true / len(examples)


def teach(args, folder, count=6000, steps=600, rounds=3, batch_size=48):
    """Rounds until, on held-out frames, 0.98 of the responses parse and 0.93 of the thoughts are true."""
    # On the error output: what is printed on the other one is the folder.
    print(f"teaching a toy to see and to speak in {args.env}; it is kept for later runs", file=sys.stderr)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    examples = play(args, count, args.seed)
    held_out = play(args, min(512, count), args.seed + 1)
    if all(example.caption == FIXED_THOUGHT for example in examples):  # there is little to learn
        examples = examples[:1500]
        steps = min(steps, 100)
    texts = [example.text_and_frames[0] for example in examples[:500]]
    tokenizer = build_tokenizer(texts, [example.response(rng) for example in examples[:2000]])
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * args.max_image_tokens}
    for part in (build_model(tokenizer), tokenizer, Qwen2VLImageProcessorPil(size=pixels)):
        part.save_pretrained(folder)

    args = dataclasses.replace(args, model=str(folder), device="cpu", dtype="float32", value_hidden=[])
    policy = vldac.VLMPolicy(args)
    policy.peft_model.base_model.disable_adapter_layers()  # the model itself is taught
    for name, parameter in policy.vlm.named_parameters():
        parameter.requires_grad_("lora_" not in name)
    for example in examples + held_out:
        example.prompt = policy.encode(*example.text_and_frames)
        example.text_and_frames = None  # so that the frames are let go
    by_caption = {}
    for example in examples:
        by_caption.setdefault(example.caption, []).append(example)
    scenes = list(by_caption.values())  # rare ones are shown as often as common ones
    optimizer = torch.optim.AdamW([p for p in policy.vlm.parameters() if p.requires_grad], fused=True)

    for number in range(rounds):
        bar = tqdm(range(steps), desc="teaching", mininterval=vldac.BAR_INTERVAL, leave=False)
        for step in bar:
            rate = vldac.cosine(step, steps, 2e-3, 1e-5)
            optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50)
            batch = [rng.choice(rng.choice(scenes)) for _ in range(batch_size)]
            responses = []
            for example in batch:
                ids = tokenizer(example.response(rng), return_tensors="pt").input_ids[0]
                responses.append(torch.cat([ids, policy.stop_ids]))
            logprobs, mask, _ = policy([example.prompt for example in batch], responses)
            optimizer.zero_grad()
            (-vldac.step_mean(logprobs, mask)).backward()
            torch.nn.utils.clip_grad_norm_(policy.vlm.parameters(), 1.0)
            optimizer.step()
        parsed, true = quality(policy, held_out)
        reached = f"{parsed:.3f} of its responses parse, {true:.3f} of its thoughts are true"
        print(f"after {(number + 1) * steps} steps, {reached} (wanted: 0.98, 0.93)", file=sys.stderr)
        if parsed >= 0.98 and true >= 0.93:
            break
    policy.peft_model.unload().save_pretrained(folder)


# The options that the lesson depends on. Of the code these count: toy.py, envs.py, build_prompt.
OPTIONS = "env seed split num_envs num_images max_image_tokens max_new_tokens max_episode_steps".split()
OPTIONS += ["action_repeat"]


def cached_folder(args) -> Path:
    """Where the toy for these options is, or will be."""
    options = json.dumps({name: getattr(args, name) for name in OPTIONS})
    parts = [options, Path(__file__).read_text(), torch.__version__, transformers.__version__]
    parts += [inspect.getsource(vldac.build_prompt), inspect.getsource(envs)]
    if ":" in args.env:  # the user's module, which registers the world, and that of the world itself
        module = args.env.partition(":")[0]
        parts.append(inspect.getsource(importlib.import_module(module)))
        entry = vldac.Player(args).env.spec.entry_point
        entry = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
        parts.append(inspect.getsource(importlib.import_module(entry)))
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vldac"
    return cache / f"{re.sub(r'[^A-Za-z0-9]+', '-', args.env)}-{key}"


def main(options):
    options = json.loads(options)
    options["num_envs"] = min(16, options["num_envs"])  # of more the first 16 play: it is the same toy
    args = vldac.Args(**{name: options[name] for name in OPTIONS}, model="tiny", device="cpu")
    folder = cached_folder(args)
    if not folder.exists():
        building = Path(f"{folder}.{os.getpid()}")
        try:
            if args.env in envs.TEXT:  # slow worlds: a short lesson, enough to see it run
                teach(args, building, count=200, steps=150, rounds=1)
            else:
                teach(args, building)
            building.rename(folder)
        except OSError:  # another process, which taught the same toy, was first
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    print(folder)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()  # of its shards, of which it has one
    try:
        main(*sys.argv[1:])
    except envs.UserError as error:  # of a world, in a later step than those that are checked
        envs.exit_with(error)
    except KeyboardInterrupt:  # vldac.py, which it stops too, says so
        raise SystemExit(1) from None
