"""The worlds: MiniWorld, four card games, ALFWorld, WebShop, and any Gymnasium environment. Imports no torch.

One contract, Gymnasium's. Observations are {"image": uint8 (H, W, 3), "text": str}, actions are strings, and
`info` carries

    task      what to achieve (required at reset)
    actions   the actions admissible now, as the strings the model must write (required)
    success   the world's own success flag; None: it has none (so far)
    left      actions left before the time limit

A world may have methods `caption()`, a true one-line description of the scene, by which the toy model is
taught to see and to speak, and `hint()`, a sensible admissible action, for a scripted player. No agent is
ever shown either.

After `reset(seed=s)` an episode is a function of s and the actions (in WebShop also of the seed of its site).
An action that is not admissible costs its step, changes nothing and pays `invalid_reward` (in the card games:
see their rules). What belongs to the task ends an episode as terminated, and its reward is learned from. At
the time limit `step` returns truncated=True: with terminated=False that step's reward is not learned from.

    make_env("OneRoom")                             a world of this file: "vldac/OneRoom-v0" in the registry
    make_env("FrozenLake-v1")                       any environment with Discrete actions and rendered frames
    make_env("minigrid:MiniGrid-DoorKey-5x5-v0")    the same, after importing the module that registers it
    make_env("my_world:Doors-v0")                   your own, with the contract's spaces or Discrete actions
"""

import ast
import contextlib
import copy
import ctypes
import enum
import functools
import io
import itertools
import math
import operator
import os
import random
import re
import shutil
import sys
import textwrap
from fractions import Fraction
from urllib.parse import unquote, urljoin

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text
from PIL import Image, ImageDraw, ImageFont


class UserError(Exception):
    """Something the user can mend; the message says how. Printed as one line, exit status 2."""


def check(condition, message):
    """UserError with this message, unless the condition holds."""
    if not condition:
        raise UserError(message)


def exit_with(error):
    """End the program with the error as one line."""
    message = "; ".join([str(error), *getattr(error, "__notes__", [])])
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    raise SystemExit(2) from None


class AnyText(Text):
    """Any string of at most max_length characters, "" included (gymnasium's Text refuses spaces and "")."""

    def __init__(self, max_length: int = 100_000):
        super().__init__(max_length, min_length=0)

    def contains(self, x) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class World(gym.Env):
    """What the worlds of this file share: the spaces, the time limit and the info dict.

    A subclass has `task`, `actions`, `_reset()`, `_step(action) -> (reward, terminated)`, `render()`, perhaps
    `caption()` and `hint()`, and sets `success`.

    limit           actions in an episode; None: the world's own
    invalid_reward  for an action that is not admissible; None: the world's own
    split           "train" or "eval", where there is a fixed set of games or goals
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    size = (300, 300)  # height and width of a frame
    limit = 50
    invalid_reward = 0.0
    time_out_reward = 0.0
    hint_share = 0.0  # of the actions that the toy imitates; the others are random (extras/toy.py)

    def __init__(self, limit=None, invalid_reward=None, split="train", render_mode=None):
        self.observation_space = Dict(image=Box(0, 255, (*self.size, 3), np.uint8), text=AnyText())
        self.action_space = AnyText()
        self.split, self.render_mode = split, render_mode
        if limit is not None:
            self.limit = limit
        if invalid_reward is not None:
            self.invalid_reward = invalid_reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken = 0
        self.success = False
        self._reset()
        return self._observation(), self._info()

    def step(self, action: str):
        self.taken += 1
        if self._admissible(action):
            reward, terminated = self._step(action)
        else:
            reward, terminated = self._invalid(), False
        truncated = self.taken >= self.limit
        if truncated and not terminated:
            reward += self.time_out_reward
        return self._observation(), float(reward), terminated, truncated, self._info()

    def _admissible(self, action) -> bool:
        return action in self.actions

    def _invalid(self) -> float:
        return self.invalid_reward

    def _text(self) -> str:
        return ""

    def _observation(self):
        return {"image": self.render(), "text": self._text()}

    def _info(self):
        left = self.limit - self.taken
        return {"task": self.task, "actions": list(self.actions), "success": self.success, "left": left}


# ----------------------------------------------------------------------------------------------- MiniWorld

MINIWORLD = ["Hallway", "OneRoom", "FourRooms", "WallGap"]
RED_BOX = [*MINIWORLD, "OneRoomS6", "OneRoomS6Fast", "Maze", "MazeS2", "MazeS3", "MazeS3Fast", "Sidewalk"]
RED_BOX += [f"{letter}Maze{side}" for letter in "TY" for side in ("", "Left", "Right")]

OPENGL = (
    "it needs Mesa, as root: apt-get update && apt-get install -y --no-install-recommends libegl1 "
    "libegl-mesa0 libgl1 libgl1-mesa-dri libglu1-mesa libfreetype6; and __EGL_VENDOR_LIBRARY_FILENAMES must "
    "name no other library"
)


def software_renderer() -> int:
    """The number of Mesa's software renderer in EGL's list of devices, in which GPUs come first.

    Mesa lists an NVIDIA GPU, whose render node it sees, but cannot drive it.
    """
    from pyglet.libs.egl import egl, eglext, lib

    count = egl.EGLint()
    eglext.eglQueryDevicesEXT(0, None, count)
    devices = (eglext.EGLDeviceEXT * count.value)()
    eglext.eglQueryDevicesEXT(count.value, devices, count)
    arguments = [eglext.EGLDeviceEXT, egl.EGLint]
    extensions = lib.link_EGL("eglQueryDeviceStringEXT", ctypes.c_char_p, arguments)
    for number, device in enumerate(devices):
        if b"EGL_MESA_device_software" in (extensions(device, egl.EGL_EXTENSIONS) or b""):
            return number
    return 0


def make_simulator(name, height, width):
    """MiniWorld's own environment, rendering without a display. UserError if it cannot."""
    # The window is never shown; at its default size its buffers cost 30 MB.
    sizes = {"obs_height": height, "obs_width": width, "window_height": height, "window_width": width}
    try:
        import pyglet

        if sys.platform.startswith("linux"):  # elsewhere a window system is always there
            pyglet.options["headless"] = True  # must be said before pyglet.gl is imported
            mesa = "/usr/share/glvnd/egl_vendor.d/50_mesa.json"
            if os.path.exists(mesa):  # not NVIDIA's EGL: the same frames on every machine, no GPU memory
                vendor = os.environ.setdefault("__EGL_VENDOR_LIBRARY_FILENAMES", mesa)
                if vendor == mesa:  # and not the user's choice
                    pyglet.options["headless_device"] = software_renderer()
        pyglet.options["debug_gl"] = False
        with contextlib.redirect_stdout(io.StringIO()):  # "Falling back to num_samples=4"
            return gym.make(f"miniworld:MiniWorld-{name}-v0", disable_env_checker=True, **sizes).unwrapped
    except ModuleNotFoundError as error:
        raise UserError(f"MiniWorld is not installed ({error}): pip install -r requirements.txt") from None
    except Exception as error:
        of_pyglet = type(error).__module__.startswith("pyglet.")  # one of its own five
        if not of_pyglet and not isinstance(error, ImportError):  # of a library
            raise
        message = f"MiniWorld cannot render here ({type(error).__name__}: {error}): {OPENGL}"
        raise UserError(f"{message}; or try a world without OpenGL: --env NumberLine") from None


class MiniWorld(World):
    """Go to the red box. Reward 1 - 0.2 * steps / the simulator's limit on success, -1 on failure, else 0.

    limit          in steps of the simulator, also where an action is more than one
    action_repeat  so many steps are an action, or fewer if the episode ends
    """

    task = "go to the red box"
    # MiniWorld's actions 0 to 3. The spaces of its red-box worlds lack the last one; VL-DAC has it.
    actions = ("turn left", "turn right", "move forward", "move back")
    # What the toy imitates: one of these, whatever it sees.
    lesson_actions = ("turn left", "turn right", "move forward", "move forward", "move back")
    size = (60, 80)
    time_out_reward = -1.0

    def __init__(self, name, limit=None, action_repeat=1, **options):
        self.env = make_simulator(name, *self.size)
        self.action_repeat = action_repeat  # steps of the simulator for an action
        steps = min(limit or 128, self.env.max_episode_steps)
        super().__init__(math.ceil(steps / action_repeat), **options)

    def _reset(self):
        self.image, _ = self.env.reset(seed=int(self.np_random.integers(2**31)))

    def _step(self, action):
        # All worlds compile their walls into one OpenGL list, number 1: compile this one's again.
        self.env._render_static()
        for _ in range(self.action_repeat):
            self.image, reward, terminated, *_ = self.env.step(self.actions.index(action))
            if terminated:
                break
        self.success = terminated and reward > 0
        failed = terminated and not self.success
        return (-1.0 if failed else reward), terminated

    def _invalid(self):
        self.env.step_count += self.action_repeat  # so that a later success pays for this action too
        return self.invalid_reward

    def render(self):
        return self.image.copy()

    def _where(self):
        """Where in the frame the red box is, as seen by its colour; None if it is out of view."""
        red = (self.image[..., 0] > 120) & (self.image[..., 1:].max(axis=2) < 60)  # (H, W)
        if red.sum() < 3:
            return None
        height, width = red.shape
        columns = red.any(axis=0).nonzero()[0]
        offset = columns.mean() + 0.5 - width / 2  # pixels to the right of the middle
        focal = height / 2 / math.tan(math.radians(30))  # pixels; the vertical field of view is 60 degrees
        bearing = math.degrees(math.atan(offset / focal))
        # Ahead is within half a turn of the middle, and two degrees for the pixels.
        turn = self.action_repeat * self.env.params.sample(None, "turn_step")
        if abs(bearing) <= turn / 2 + 2:
            return "ahead"
        return "on the left" if bearing < 0 else "on the right"

    def caption(self):
        where = self._where()
        return f"the red box is {where}" if where else "no red box in view"

    def hint(self):
        """Turn until the box is ahead, then walk; without a box in view, turn around and wander a little."""
        where = self._where()
        if where is None:  # 24 turns of 15 degrees are a full one
            return "turn left" if self.action_repeat * self.taken % 36 <= 24 else "move forward"
        return {"on the left": "turn left", "ahead": "move forward", "on the right": "turn right"}[where]


# ---------------------------------------------------------------------------------------------- card games
# Rules: RL4VLM's gym_cards, drawn and written anew, with a seed and an exact evaluator in place of Python's.

RANKS = " A23456789TJQK"
GREEN = "#35654d"


@functools.cache
def font(size):
    return ImageFont.load_default(size)


def draw_card(draw, x, y, width, rank, suit):
    """A card at (x, y), 7:5 high; rank is a character of RANKS, suit one of "CDHS" (None: the back)."""
    height = width * 7 // 5
    box = (x, y, x + width, y + height)
    if suit is None:
        draw.rounded_rectangle(box, width // 10, fill="#274b8f", outline="white", width=max(2, width // 20))
        return
    color = "#c8102e" if suit in "DH" else "black"
    draw.rounded_rectangle(box, width // 10, fill="white", outline="black")
    draw.text((x + width / 2, y + height * 0.32), rank, color, font(width * 3 // 5), anchor="mm")
    draw.text((x + width / 2, y + height * 0.75), suit, color, font(width // 4), anchor="mm")


class CardGame(World):
    """A card game on a 300 x 300 table. `invalid_reward` is what anything but a symbol of the game pays."""

    background = GREEN
    invalid_reward = -1.0

    def __init__(self, limit=None, **options):
        super().__init__(min(limit or self.limit, self.limit), **options)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if self.taken == type(self).limit:  # a rule of the game, so no time-out; a shorter limit is one
            terminated, truncated = True, False
        return observation, reward, terminated, truncated, info

    def render(self):
        image = Image.new("RGB", (300, 300), self.background)
        self._draw(ImageDraw.Draw(image))
        return np.array(image)


class NumberLine(CardGame):
    """Bring the current number to the target: 1 on arrival, -1 for a move that comes no nearer, else 0."""

    task = "make the current number equal to the target number; + adds one, - takes one away"
    actions = ("-", "+")
    background = "white"
    limit = 10

    def _reset(self):
        self.current, self.target = map(int, self.np_random.integers(0, 6, 2))
        if self.target == self.current:
            self.target = (self.target + 1) % 5

    def _step(self, action):
        before = abs(self.target - self.current)
        moved = self.current + (1 if action == "+" else -1)
        self.current = min(5, max(0, moved))
        after = abs(self.target - self.current)
        self.success = after == 0
        if self.success:
            return 1, True
        return (0 if after < before else -1), False

    def _draw(self, draw):
        for label, number, y in (("Target:", self.target, 80), ("Current:", self.current, 220)):
            draw.text((10, y), label, "black", font(40), anchor="lm")
            draw.text((230, y), str(number), "black", font(120), anchor="mm", stroke_width=2)

    def caption(self):
        return f"the target is {self.target} and the current number is {self.current}"

    def hint(self):
        return "+" if self.current < self.target else "-"


SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SIGN_OF = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def value_of(formula) -> Fraction | None:
    """The exact value of a list of symbols ("1" to "10", + - * / ( ), blanks ignored), None if malformed.

    No two numbers side by side, no sign before a number, no ** or //: the ways to cheat Python's evaluator.

    >>> value_of(["8", "/", "(", "3", "-", "8", "/", "3", ")"])
    Fraction(24, 1)
    >>> value_of(["2", "4"]), value_of(["2", "*", "*", "3"]), value_of(["4", "/", "(", "2", "-", "2", ")"])
    (None, None, None)
    """

    def value(node):
        if isinstance(node, ast.BinOp):
            return SIGNS[SIGN_OF[type(node.op)]](value(node.left), value(node.right))
        return Fraction(node.value)  # a sign or a call has no value

    try:
        return value(ast.parse(" ".join(formula).strip(), mode="eval").body)
    except (SyntaxError, AttributeError, ZeroDivisionError):
        return None


@functools.cache
def solutions(numbers, signs, target) -> list[list[str]]:
    """Formulas that use each number once and equal the target, with brackets wherever there may be some."""
    formulas = []

    def search(terms):
        """Join two of the terms, (value, symbols) each, in every way until one is left."""
        if len(terms) == 1 and terms[0][0] == target:
            formulas.append(terms[0][1][1:-1])  # without the outermost brackets
        for i, j in itertools.permutations(range(len(terms)), 2):
            (x, left), (y, right) = terms[i], terms[j]
            others = [term for k, term in enumerate(terms) if k not in (i, j)]
            for sign in signs:
                if sign != "/" or y != 0:
                    search([(SIGNS[sign](x, y), ["(", *left, sign, *right, ")"]), *others])

    search([(Fraction(n), [str(n)]) for n in numbers])
    return formulas


FORMULA_TASK = (
    "write a formula that equals {}, one symbol at a time, using the number of each card "
    "exactly once with {}; A counts as 1, J, Q and K as 10; finish with ="
)
NUMBERS = tuple(map(str, range(1, 11)))


class EZPoints(CardGame):
    """Write a formula over two cards that equals 12: 10 if right, -1 if wrong or for a number not there."""

    target = 12
    signs = ("+", "*")
    actions = (*NUMBERS, *signs, "=")
    task = FORMULA_TASK.format(target, " ".join(signs))
    longest = 5  # after more symbols than these the next action is the last, and pays -1
    limit = longest + 2
    hint_share = 0.5  # four right symbols in a row would hardly ever happen by chance
    card_width = 135
    formula_at = (10, 258)

    def _reset(self):
        rank = int(self.np_random.integers(2, 14))
        value = min(rank, 10)
        product = value in (2, 3, 4, 6) and self.np_random.random() < 0.5
        self.ranks = [rank, 12 // value if product else 12 - value]
        if self.np_random.random() < 0.5:
            self.ranks.reverse()
        self._deal()

    def _deal(self):
        self.suits = ["CDHS"[i] for i in self.np_random.integers(0, 4, len(self.ranks))]
        self.numbers = [min(rank, 10) for rank in self.ranks]
        self.free = [str(n) for n in self.numbers]  # not used yet
        self.formula = []

    def _step(self, action):
        if len(self.formula) > self.longest:
            return -1, False  # the last step: its limit ends the game, whatever was written
        if action == "=":
            self.success = not self.free and value_of(self.formula) == self.target
            return (10 if self.success else -1), True
        if action.isdigit():
            if action not in self.free:
                self.formula.append(" ")
                return -1, False
            self.free.remove(action)
        self.formula.append(action)
        return 0, False

    def _invalid(self):
        self.formula.append(" ")
        return self.invalid_reward

    def _written(self):
        return [symbol for symbol in self.formula if symbol != " "]

    def _text(self):
        return "Formula: " + " ".join(self._written())

    def _draw(self, draw):
        width = self.card_width
        y = (300 - width * 7 // 5) // 2
        for i, (rank, suit) in enumerate(zip(self.ranks, self.suits, strict=True)):
            draw_card(draw, 5 + int(i * width * 1.1), y, width, RANKS[rank], suit)
        draw.text(self.formula_at, "Formula: " + " ".join(self.formula), "white", font(20))

    def caption(self):
        cards = ", ".join(map(str, self.numbers))
        return f"the cards are {cards}; formula: {' '.join(self._written())}".strip()

    def hint(self):
        """The next symbol of a solution that starts with what is written, else = to end it."""
        written = self._written()
        for formula in solutions(tuple(sorted(self.numbers)), self.signs, self.target):
            if formula[: len(written)] == written and formula != written:
                return formula[len(written)]
        return "="


class Points24(EZPoints):
    """Four cards and 24, with + - * / ( ). 27 % of the deals have no solution."""

    target = 24
    signs = ("+", "-", "*", "/")
    actions = (*NUMBERS, *signs, "(", ")", "=")
    task = FORMULA_TASK.format(target, " ".join(signs))
    longest = 20
    limit = longest + 2
    card_width = 67
    formula_at = (10, 210)

    def _reset(self):
        self.ranks = [int(rank) for rank in self.np_random.integers(1, 14, 4)]
        self._deal()


class Blackjack(CardGame):
    """Hit or stand against a dealer who draws to 17, infinite deck: 1 for a win, 0 for a draw, else -1."""

    task = "win at blackjack: come closer to 21 than the dealer without going over"
    actions = ("stand", "hit")
    limit = 20  # VL-DAC's configuration

    def _card(self):
        """(value, rank, suit) from an infinite deck; a ten is shown as J, Q or K."""
        value = min(int(self.np_random.integers(1, 14)), 10)
        rank = "JQK"[self.np_random.integers(3)] if value == 10 else RANKS[value]
        return value, rank, "CDHS"[self.np_random.integers(4)]

    @staticmethod
    def score(hand):
        """Best total of a hand of (value, rank, suit): an ace is 11 where that fits, over 21 counts 0."""
        total = sum(card[0] for card in hand)
        if total <= 11 and any(card[0] == 1 for card in hand):
            total += 10
        return total if total <= 21 else 0

    def _reset(self):
        self.dealer = [self._card(), self._card()]
        self.player = [self._card(), self._card()]

    def _step(self, action):
        if action == "hit":
            self.player.append(self._card())
            bust = self.score(self.player) == 0
            return (-1 if bust else 0), bust
        while 0 < self.score(self.dealer) < 17:
            self.dealer.append(self._card())
        player, dealer = self.score(self.player), self.score(self.dealer)
        self.success = player > dealer
        return (player > dealer) - (player < dealer), True

    def _draw(self, draw):
        draw.text((5, 3), "Dealer", "white", font(18))
        draw.text((5, 128), "Player", "white", font(18))
        draw_card(draw, 5, 25, 70, *self.dealer[0][1:])
        draw_card(draw, 78, 25, 70, None, None)
        for i, (_, rank, suit) in enumerate(self.player):
            draw_card(draw, 5 + 74 * (i % 4), 150 + 48 * (i // 4), 70, rank, suit)

    def caption(self):
        ace = " with an ace" if any(card[0] == 1 for card in self.player) else ""
        return f"the dealer shows {self.dealer[0][0]} and the player has {self.score(self.player)}{ace}"

    def hint(self):
        """The basic strategy for hitting and standing, but that soft 18 always stands."""
        total = self.score(self.player)
        shown = self.dealer[0][0]
        ace_is_11 = total != sum(card[0] for card in self.player)
        if ace_is_11:
            return "hit" if total <= 17 else "stand"
        weak_dealer = 2 <= shown <= 6
        enough = 13 if shown < 4 else 12  # against a weak dealer
        return "stand" if total >= 17 or (weak_dealer and total >= enough) else "hit"


# ------------------------------------------------------------------------------------------------ ALFWorld

ALFWORLD = "pip install alfworld, then alfworld-download (more in docs/guide.md, under Worlds)"


@contextlib.contextmanager
def undisturbed():
    """Around calls of alfworld that print and overwrite sys.argv."""
    argv = sys.argv
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.argv = argv


@functools.cache
def load_alfworld(kind, split):
    """alfworld's maker of environments, once for all of them: it opens every game. UserError if it cannot."""
    try:
        from alfworld.agents.environment import get_environment

        make = get_environment(kind)
    except ImportError as error:
        raise UserError(f"ALFWorld is not installed ({error}): {ALFWORLD}") from None
    if sys.version_info >= (3, 13):
        raise UserError(f"ALFWorld's games do not run on Python {sys.version.split()[0]}: use 3.11 or 3.12")
    name = {"train": "train", "eval": "valid_unseen"}[split]
    games = os.path.join(os.environ["ALFWORLD_DATA"], "json_2.1.1", name)  # alfworld sets it if it is not set
    thor = {"screen_width": 300, "screen_height": 300, "smooth_nav": False, "save_frames_to_disk": False}
    config = {
        "dataset": {"num_train_games": -1, "num_eval_games": -1},
        "env": {
            "goal_desc_human_anns_prob": 0.0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
            "thor": thor | {"save_frames_path": "."},
        },
        "controller": {"type": "oracle", "debug": False, "load_receps": True},
        "general": {"training_method": "dqn"},  # with "dagger" an expert would play along
        "rl": {"training": {"max_nb_steps_per_episode": 10**6}},  # the time limit is ours
    }
    config["dataset"] |= {"data_path": games, "eval_ood_data_path": games}
    with undisturbed():
        maker = make(config, train_eval="train" if split == "train" else "eval_out_of_distribution")
    if not maker.num_games:  # its reset would hang for ever
        raise UserError(f"no ALFWorld games in {games}: {ALFWORLD}")
    return maker


class ALFWorld(World):
    """Household tasks in text (Shridhar et al. 2021), the text drawn on the frame too: 1 if done, else 0."""

    kind = "AlfredTWEnv"
    size = (448, 448)
    invalid_reward = -1.0

    def __init__(self, **options):
        super().__init__(**options)
        maker = load_alfworld(self.kind, self.split)
        with undisturbed():
            self.env = self._start(maker)

    def _start(self, maker):
        maker.game_files.sort()  # a seed's game must not depend on the file system's order
        return maker.init_env(batch_size=1)

    def _reset(self):
        self.env.seed(int(self.np_random.integers(2**31)))  # the order of the games, so the next one
        with undisturbed():
            observation, infos = self.env.reset()
        scene, _, task = observation[0].partition("Your task is to:")
        self.task = task.strip().rstrip(".")
        self.scene = " ".join(scene.replace("-= Welcome to TextWorld, ALFRED! =-", "").split())
        self.said = ""
        self.actions = infos["admissible_commands"][0]

    def _step(self, action):
        observation, _, _, infos = self.env.step([action])
        self.said = observation[0].strip()
        self.actions = infos["admissible_commands"][0]
        self.success = bool(infos["won"][0])
        return self._reward(infos), self.success

    def _reward(self, infos):
        return float(self.success)

    def _text(self):
        return f"{self.scene}\n{self.said}".strip()

    def render(self):
        """The text, black on white, wrapped; what does not fit is left out."""
        height, width = self.size
        lines = []
        for part in self._text().splitlines():
            lines += textwrap.wrap(part, width // 8) or [""]
        image = Image.new("RGB", (width, height), "white")
        ImageDraw.Draw(image).multiline_text((8, 8), "\n".join(lines[: height // 20]), "black", font(15))
        return np.array(image)

    def caption(self):
        return (self.said or self.scene).split(". ")[0][:60]

    def close(self):
        self.env.close()


class ALFWorldThor(ALFWorld):
    """The same as frames of THOR: at every step the share of the goal reached, plus 1 if done. Never run."""

    kind = "AlfredThorEnv"
    size = (300, 300)

    def _start(self, maker):
        # Its init_env adds a simulator to the maker and returns the maker: all worlds would share the first.
        maker = copy.copy(maker)
        maker.envs = []
        environment = maker.init_env(batch_size=1)
        self.games = sorted(environment.json_file_list)
        return environment

    def _reset(self):
        # It would draw a game by Python's random numbers, and when evaluating never the same one again.
        game = self.games[int(self.np_random.integers(len(self.games)))]
        self.env.json_file_list = [game]
        super()._reset()
        self.reached = 0.0

    def _step(self, action):
        # alfworld 0.4.2 offers "move X to Y" and understands "put X in/on Y".
        return super()._step(re.sub(r"^move (.+) to (.+)$", r"put \1 in/on \2", action))

    def _reward(self, infos):
        self.reached = float(infos["goal_condition_success_rate"][0])
        return float(self.success) + self.reached

    def _invalid(self):
        return self.invalid_reward + self.reached

    def render(self):
        return self.env.get_frames()[0][..., ::-1].copy()  # it gives blue, green, red


# ------------------------------------------------------------------------------------------------- WebShop

WEBSHOP = "start its site (docs/guide.md, under Worlds), or let WEBSHOP_URL say where it is"
BROWSER = "pip install playwright && playwright install --with-deps chromium"


@functools.cache
def browser():
    """One browser for all worlds of this process. If none is there, Playwright says how to get it."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise UserError(f"WebShop needs a browser: {BROWSER}") from None
    path = os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
    # Chromium does not start its sandbox as root.
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return sync_playwright().start().chromium.launch(executable_path=path, args=flags)


class WebShop(World):
    """Buy what the instruction asks for, in a browser on the real site (Yao et al. 2022); the site's reward.

    Of the site's WEBSHOP_GOALS goals, split eval has 0 to 499, and train those from 1,500 on; where there are
    fewer than 2,000, eval has the first quarter and train the rest.
    """

    size = (640, 640)
    longest_text = 4000  # characters

    def __init__(self, **options):
        super().__init__(**options)
        self.url = os.environ.get("WEBSHOP_URL", "http://127.0.0.1:3000").rstrip("/")
        count = int(os.environ.get("WEBSHOP_GOALS", 12_087))  # of the whole catalogue
        eval_end, train_start = (500, 1500) if count >= 2000 else (count // 4, count // 4)
        self.goals = range(eval_end) if self.split == "eval" else range(train_start, count)
        height, width = self.size
        self.page = browser().new_page(viewport={"width": width, "height": height})
        # The site's scripts come from other hosts. They follow an option's address, which is done here, and
        # show its picture, which is not.
        self.page.route("**/*", lambda r: r.abort() if r.request.resource_type == "script" else r.continue_())

    def _reset(self):
        goal = self.goals[int(self.np_random.integers(len(self.goals)))]
        self._visit(f"{self.url}/fixed_{goal}")
        instruction = self.page.inner_text("#instruction-text").partition(":")[2]
        self.task = " ".join(instruction.split())

    def _admissible(self, action):
        if action.startswith("search["):  # with a word, or the site may stumble
            search = re.fullmatch(r"search\[[^\[\]]*\w[^\[\]]*\]", action)
            return search is not None and "search[...]" in self.actions
        return super()._admissible(action)

    def _step(self, action):
        kind, _, argument = action[:-1].partition("[")
        if kind == "search":
            self.page.fill("#search_input", re.sub(r"[/<>]", " ", argument))  # of its addresses and commands
            element = self.search
        else:
            element = self.elements[argument]
        address = element.get_attribute("data-url")
        if address:  # an option
            self._visit(urljoin(self.page.url, address))
        else:
            with self.page.expect_navigation(wait_until="domcontentloaded") as navigation:
                element.click(no_wait_after=True)
            self._read(navigation.value)
        reward = self.page.query_selector("#reward pre")  # on the last page
        if reward is None:
            return 0.0, False
        reward = float(reward.inner_text())
        self.success = reward == 1.0
        return reward, True

    def _visit(self, url):
        from playwright.sync_api import Error

        try:
            response = self.page.goto(url, wait_until="domcontentloaded")
        except Error as error:
            raise UserError(f"no answer from WebShop ({str(error).splitlines()[0]}): {WEBSHOP}") from None
        self._read(response)

    def _read(self, response):
        """What is on the page: the frame, the text and what can be clicked."""
        from playwright.sync_api import TimeoutError

        if not response.ok:
            message = "are its data complete, and WEBSHOP_GOALS right? See its own output"
            raise UserError(f"WebShop answers {response.status} at {response.url}: {message}")
        with contextlib.suppress(TimeoutError):  # a picture from elsewhere may never come
            self.page.wait_for_load_state("load", timeout=5000)
        radios = self.page.query_selector_all("input[type=radio]")
        options = {radio.get_attribute("value"): radio for radio in radios}
        chosen = []
        if "/item_page/" in self.page.url:  # the page's script would mark what the address says is chosen
            chosen = list(ast.literal_eval(unquote(self.page.url.rpartition("/")[2])).values())
            for name in options.keys() & chosen:
                options[name].evaluate("radio => { radio.checked = true }")
        self.image = np.array(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))
        self.body = self.page.inner_text("body")
        if chosen:
            self.body = f"Chosen: {', '.join(chosen)}\n{self.body}"

        self.elements = {}
        for element in self.page.query_selector_all(".btn, .product-link"):
            self.elements.setdefault(element.inner_text().strip().lower(), element)
        for name, radio in options.items():
            self.elements.setdefault(name.strip().lower(), radio)
        self.search = self.elements.pop("search", None)
        self.actions = ["search[...]"] if self.search else []
        self.actions += [f"click[{name}]" for name in self.elements]

    def _text(self):
        cut = len(self.body) - self.longest_text
        return self.body[: self.longest_text] + (f" (and {cut} more characters)" if cut > 0 else "")

    def render(self):
        return self.image.copy()

    def hint(self):
        """Search with the instruction's first words, open the first product, buy it: no solution."""
        if self.search:
            return "search[" + " ".join(re.findall(r"[\w'-]+", self.task)[:8])[:100] + "]"
        product = self.page.query_selector(".product-link")
        name = "buy now" if product is None else product.inner_text().strip().lower()
        return f"click[{name}]" if name in self.elements else self.actions[0]

    def close(self):
        self.page.close()


# ------------------------------------------------------------------------------ other people's environments


def shape_of(frame) -> str:
    """Type and shape, for a message: "float64 (60, 80, 3)"."""
    return f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__


class TextActions(gym.Wrapper):
    """An environment with Discrete actions as a world of the contract: rendered frames, actions in words.

    The actions are named by `get_action_meanings()`, by an enum `actions`, or by their numbers. An action
    that is none of them does not reach the environment.
    """

    largest = 448  # pixels a side

    def __init__(self, env):
        super().__init__(env)
        space = env.action_space
        numbers = range(int(space.start), int(space.start + space.n))
        names = [str(number) for number in numbers]
        actions = getattr(env.unwrapped, "actions", None)
        if env.has_wrapper_attr("get_action_meanings"):
            names = env.get_wrapper_attr("get_action_meanings")()
        elif isinstance(actions, enum.EnumType) and space == env.unwrapped.action_space:
            names = [actions(number).name for number in numbers]
        self.number_of = dict(zip(names, numbers, strict=True))
        env.reset(seed=0)
        self.observation_space = Dict(image=Box(0, 255, self._frame().shape, np.uint8), text=AnyText())
        self.action_space = AnyText()

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        self.task = f"get the highest return in {self.env.spec.id}"
        if isinstance(observation, dict) and "mission" in observation:
            self.task = observation["mission"]
        self.info = self._info(info)
        return self._observation(), self.info

    def step(self, action):
        if action not in self.number_of:
            return self._observation(), 0.0, False, False, self.info
        _, reward, terminated, truncated, info = self.env.step(self.number_of[action])
        self.info = self._info(info)
        return self._observation(), reward, terminated, truncated, self.info

    def _info(self, info):
        """The contract's. Of the environment's own only a success flag: `task` and `left` may be anything."""
        return {"task": self.task, "actions": list(self.number_of), "success": info.get("success")}

    def hint(self):
        """The environment's own, in words; None if it gives none."""
        if not self.env.has_wrapper_attr("hint"):
            return None
        number = self.env.get_wrapper_attr("hint")()
        return next((name for name in self.number_of if self.number_of[name] == number), None)

    def _frame(self):
        frame = self.env.render()
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.shape[2:] != (3,):
            raise UserError(f"render must return a uint8 frame (height, width, 3), not {shape_of(frame)}")
        image = Image.fromarray(frame)
        image.thumbnail((self.largest, self.largest))
        return np.array(image)

    def _observation(self):
        return {"image": self._frame(), "text": ""}


class Checked(gym.Wrapper):
    """Somebody else's world with a time limit, whose answers are checked.

    max_episode_steps  None: the environment's own, which also counts if it is shorter, else 128
    invalid_reward     for a step without an action, unless it ends the episode; None: what the world pays
    """

    def __init__(self, env, max_episode_steps=None, invalid_reward=None):
        super().__init__(env)
        self.max_episode_steps, self.invalid_reward = max_episode_steps, invalid_reward
        spaces = getattr(env, "observation_space", None)
        image = spaces["image"] if isinstance(spaces, Dict) and spaces.keys() == {"image", "text"} else None
        right = isinstance(image, Box) and image.dtype == np.uint8 and image.shape[2:] == (3,)
        if not right or "" not in spaces["text"]:
            space = "Dict(image=Box(0, 255, (height, width, 3), np.uint8), text=AnyText())"
            raise UserError(f"its action_space must be Discrete, or its observation_space {space}")

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        if not isinstance(info.get("task"), str):
            raise UserError('reset must say what to achieve in info["task"], a str')
        # Minigrid's name for its limit is max_steps; some of its worlds set it in reset.
        own = getattr(self.env.unwrapped, "max_steps", None)
        own = int(own) if isinstance(own, (int, np.integer)) and own > 0 else None
        limits = [self.max_episode_steps, self.env.spec.max_episode_steps, own]
        self.limit = min([limit for limit in limits if limit], default=128)
        self.taken = 0
        return self._checked(observation, info)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.taken += 1
        truncated = truncated or self.taken >= self.limit
        ended = terminated or truncated
        if not math.isfinite(reward):
            raise UserError(f"step must pay a finite number, not {reward}")
        if action == "" and self.invalid_reward is not None and not ended:
            reward = self.invalid_reward
        observation, info = self._checked(observation, info, ended)
        return observation, reward, terminated, truncated, info

    def _checked(self, observation, info, ended=False):
        """A copy of the frame, which the world may draw over, and the info with what is left of the limit."""
        fits = observation in self.observation_space
        if not fits or getattr(observation["image"], "dtype", None) != np.uint8:
            given = type(observation).__name__
            if isinstance(observation, dict):
                given = ", ".join(f"{name}: {shape_of(value)}" for name, value in observation.items())
            wanted = f'"image" in {self.observation_space["image"]} and "text", a str'
            raise UserError(f"an observation must be a dict of {wanted}; given was {given}")
        actions = info.get("actions")
        listed = isinstance(actions, (list, tuple)) and all(isinstance(action, str) for action in actions)
        if not ended and not (listed and actions):
            raise UserError(f'info["actions"] must be a list of the actions now, each a str, not {actions}')
        self.actions = actions
        left = self.limit - self.taken
        observation = observation | {"image": observation["image"].copy()}
        left = int(min(left, info.get("left", left)))
        return observation, info | {"left": left, "success": info.get("success")}

    def hint(self):
        """The world's own, if it has one."""
        hint = call_optional(self.env, "hint")
        a_search = "search[...]" in self.actions and str(hint).startswith("search[")
        if hint is not None and hint not in self.actions and not a_search:
            raise UserError(f"hint() must return one of the actions now, {self.actions}, not {hint!r}")
        return hint


# ------------------------------------------------------------------------------------------------- by name

CARDS = ["NumberLine", "EZPoints", "Blackjack", "Points24"]
TEXT = ["ALFWorld", "ALFWorldThor", "WebShop"]

for name in RED_BOX:
    gym.register(f"vldac/{name}-v0", f"{__name__}:MiniWorld", kwargs={"name": name})
for name in CARDS + TEXT:
    gym.register(f"vldac/{name}-v0", f"{__name__}:{name}")


def make_env(
    name: str, *, max_episode_steps=None, invalid_reward=None, split="train", action_repeat=1
) -> gym.Env:
    """A world by its name here ("OneRoom"), or any environment by its Gymnasium id ("FrozenLake-v1").

    max_episode_steps  time limit in actions, in MiniWorld in steps of its simulator; None: the world's own. A
                       limit of the game, of the simulator or of the registration cannot be exceeded
    invalid_reward     for an action that is not admissible; None: the world's own
    split              "train" or "eval": of ALFWorld's games or WebShop's goals; other worlds ignore it
    action_repeat      steps of MiniWorld's simulator for an action
    UserError for an unknown name, a missing package, or spaces that are neither the contract's nor Discrete.

    >>> env = make_env("NumberLine")
    >>> observation, info = env.reset(seed=0)
    >>> env.caption(), info["actions"], observation["image"].shape
    ('the target is 3 and the current number is 5', ['-', '+'], (300, 300, 3))
    >>> env.step("-")[1:3]
    (0.0, False)
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a module of your own may be
    in_registry = ":" in name or re.search(r"-v\d+$", name)
    env_id = name if in_registry else f"vldac/{name}-v0"
    options = {"limit": max_episode_steps, "invalid_reward": invalid_reward, "split": split}
    if action_repeat != 1:
        room = env_id.removeprefix("vldac/").removesuffix("-v0") in RED_BOX
        check(room, f"--action_repeat is for MiniWorld's rooms with a red box, and not for {name}")
        options["action_repeat"] = action_repeat
    try:
        if env_id.startswith("vldac/"):
            return gym.make(env_id, disable_env_checker=True, **options).unwrapped
        env = gym.make(env_id, disable_env_checker=True)
        if isinstance(getattr(env, "action_space", None), Discrete):
            env.close()
            env = TextActions(gym.make(env_id, disable_env_checker=True, render_mode="rgb_array"))
    except (gym.error.Error, ModuleNotFoundError) as error:  # no such id, or pygame or a module is missing
        raise UserError(f"--env {name}: {error}") from None
    return Checked(env, max_episode_steps, invalid_reward)


# -------------------------------------------------------------------------------------------- playing them


def random_action(actions, task, rng) -> str:
    """One of the admissible actions; for "search[...]", which a site refuses, a search for words of the task.

    >>> random_action(["search[...]"], "a red mug", random.Random(0))
    'search[red a mug]'
    """
    action = rng.choice(actions)
    if action == "search[...]":
        words = re.findall(r"\w+", task)
        action = f"search[{' '.join(rng.sample(words, min(3, len(words))))}]"
    return action


def call_optional(env, method) -> str | None:
    """What a world's `caption` or `hint` returns, None if it has no such method."""
    return env.get_wrapper_attr(method)() if env.has_wrapper_attr(method) else None


@contextlib.contextmanager
def traced(seed, actions):
    """Around calls of an environment: if it raises, a note says how to reproduce it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"to reproduce: env.reset(seed={seed}), then env.step through {actions}")
        raise


def first_step(env, seed, action=None):
    """What an episode shows and pays in its first step, that of an admissible action or of another."""
    with traced(seed, []):
        first, info = env.reset(seed=seed)
    if action is None:
        action = random_action(info["actions"], info["task"], random.Random(seed))
    with traced(seed, [action]):
        second, reward, *_ = env.step(action)
    texts = info["task"], first["text"], second["text"]
    return texts, first["image"].tobytes(), second["image"].tobytes(), reward


def check_world(env):
    """UserError, or the world's own, if it cannot be played, or if equal seeds do not give equal episodes."""
    first_step(env, 0, action="")  # a response may name no action
    if isinstance(env, Checked):  # not one of ours
        for seed in range(8):
            if first_step(env, seed) != first_step(env, seed):
                message = "reset must call super().reset(seed=seed), and all chance come from self.np_random"
                raise UserError(f"{env.spec.id}: two episodes of seed {seed} differ: {message}")
    env.close()
