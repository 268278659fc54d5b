"""The worlds: MiniWorld, four card games, ALFWorld, WebShop, and your own. Imports no torch.

One contract. `make_env(name, **options)` returns a `gymnasium.Env` whose observations are
`{"image": uint8 (H, W, 3), "text": str}` and whose actions are strings. `info` carries

    task      what to achieve (required at reset)
    actions   the actions admissible now, as the strings the model must write (required)
    success   the world's own success flag
    left      actions left before the time limit (required; --env gives it to worlds that have none)

A world may have methods `caption()`, a true one-line description of the scene, and `hint()`, a sensible
admissible action: the toy model learns to see and speak from them, and no agent is ever shown either.

After `reset(seed=s)` an episode is a function of s and the actions, bit for bit. An action that is not
admissible costs its step, changes nothing and pays `invalid_reward` (in the card games: see their rules). At
the time limit `step` returns truncated=True, and terminated=True beside it if that action ended the episode.
"""

import ast
import contextlib
import difflib
import functools
import importlib
import io
import itertools
import math
import numbers
import os
import random
import re
import shutil
import sys
import textwrap
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from urllib.parse import unquote, urljoin, urlsplit

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Text
from PIL import Image, ImageDraw, ImageFont


class UserError(Exception):
    """Something the user can mend; the message says how. Printed as one line, exit status 2."""


class AnyText(Text):
    """Any string of at most max_length characters, "" included (gymnasium's Text refuses spaces and "")."""

    def __init__(self, max_length: int = 100_000):
        super().__init__(max_length, min_length=0)

    def contains(self, x) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class World(gym.Env):
    """What the adapters share: the spaces, the time limit and the info dict.

    A subclass gives `task`, `actions`, `_reset()`, `_step(action) -> (reward, terminated)`, `_frame()`,
    `caption()` and `hint()`, and sets `success`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    time_out_reward = 0.0
    longest_text, most_actions = 4000, 150  # characters and actions in the prompt; what is cut is said there

    def __init__(self, size, max_episode_steps, invalid_reward):
        self.observation_space = Dict(image=Box(0, 255, (*size, 3), np.uint8), text=AnyText())
        self.action_space = AnyText()
        self.max_episode_steps, self.invalid_reward = max_episode_steps, invalid_reward
        self.render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken, self.success = 0, False
        self._reset()
        return self._observation(), self._info()

    def step(self, action: str):
        self.taken += 1
        reward, terminated = self._step(action) if self._admissible(action) else (self._invalid(), False)
        truncated = self.taken >= self.max_episode_steps
        if truncated and not terminated:
            reward += self.time_out_reward
        return self._observation(), float(reward), terminated, truncated, self._info()

    def render(self):
        return self._frame()

    def _admissible(self, action) -> bool:
        return isinstance(action, str) and action in self.actions[: self.most_actions]

    def _invalid(self) -> float:
        return self.invalid_reward

    def _text(self) -> str:
        return ""

    def _observation(self):
        text, hidden = self._text(), len(self.actions) - self.most_actions
        if len(text) > self.longest_text:
            text = text[: self.longest_text] + f" (and {len(text) - self.longest_text} more characters)"
        if hidden > 0:
            text += f"\n({hidden} more actions are not listed.)"
        return {"image": self._frame(), "text": text}

    def _info(self):
        info = {"task": self.task, "actions": list(self.actions[: self.most_actions])}
        return info | {"success": self.success, "left": self.max_episode_steps - self.taken}


# ----------------------------------------------------------------------------------------------- MiniWorld

MINIWORLD = ["Hallway", "OneRoom", "FourRooms", "WallGap"]
RED_BOX = [*MINIWORLD, "OneRoomS6", "OneRoomS6Fast", "Maze", "MazeS2", "MazeS3", "MazeS3Fast", "Sidewalk"]
RED_BOX += [f"{letter}Maze{side}" for letter in "TY" for side in ("", "Left", "Right")]

OPENGL = (
    "apt-get update && apt-get install -y --no-install-recommends libegl1 libgl1 libglu1-mesa libfreetype6 "
    "(as root; it renders in software, without GPU or display), or try one without OpenGL: --env NumberLine"
)


@functools.cache
def load_miniworld():
    """Import miniworld so that it renders without a display, and several kinds of world side by side.

    UserError with the install command if OpenGL is missing.
    """
    try:
        import pyglet

        if sys.platform.startswith("linux"):  # elsewhere a window system is always there
            pyglet.options["headless"] = True  # must be said before pyglet.gl is imported
            mesa = "/usr/share/glvnd/egl_vendor.d/50_mesa.json"
            if os.path.exists(mesa):  # not NVIDIA's EGL: the same frames on every machine, no GPU memory
                os.environ.setdefault("__EGL_VENDOR_LIBRARY_FILENAMES", mesa)
        pyglet.options["debug_gl"] = False
        import miniworld.miniworld as simulator

        # The first context is where a missing driver shows, freetype included.
        with contextlib.redirect_stdout(io.StringIO()):
            gym.make("MiniWorld-OneRoom-v0", disable_env_checker=True, window_width=80, window_height=60)
    except ModuleNotFoundError as error:
        raise UserError(f"MiniWorld is not installed ({error}): pip install -r requirements.txt") from None
    except Exception as error:  # an ImportError or one of five of pyglet's own, all for want of OpenGL
        raise UserError(f"MiniWorld cannot render here ({type(error).__name__}: {error}): {OPENGL}") from None

    # Every world compiles its walls into OpenGL display list 1, and contexts share lists: a Hallway drawn
    # after a OneRoom would show the OneRoom's walls. So each world gets a list number of its own.
    numbers, current = itertools.count(1), [1]
    for name in ("glDeleteLists", "glNewList", "glCallList"):
        function = getattr(simulator, name)
        setattr(simulator, name, lambda _, *rest, function=function: function(current[0], *rest))

    def with_own_list(function):
        def method(self, *args, **kwargs):
            if not hasattr(self, "display_list"):
                self.display_list = next(numbers)
            current[0] = self.display_list
            return function(self, *args, **kwargs)

        return method

    world = simulator.MiniWorldEnv
    world._render_static = with_own_list(world._render_static)
    world._render_world = with_own_list(world._render_world)


class MiniWorld(World):
    """Go to the red box. Reward 1 - 0.2 * steps / the world's own limit on success, -1 on failure, else 0."""

    task = "go to the red box"
    actions = ("turn left", "turn right", "move forward", "move back")  # MiniWorld's actions 0 to 3
    time_out_reward = -1.0

    def __init__(self, name, max_episode_steps=128, invalid_reward=0.0, size=(60, 80)):
        load_miniworld()
        height, width = size
        with contextlib.redirect_stdout(io.StringIO()):  # "Falling back to num_samples=4"
            self.env = gym.make(
                f"MiniWorld-{name}-v0",
                disable_env_checker=True,
                obs_height=height,
                obs_width=width,
                window_height=height,  # the unused window's buffers cost 30 MB each at their default size
                window_width=width,
            ).unwrapped
        self.half_turn = self.env.params.sample(None, "turn_step") / 2
        super().__init__(size, min(max_episode_steps, self.env.max_episode_steps), invalid_reward)

    def _reset(self):
        seed = int(self.np_random.integers(2**31))
        self.image = self.env.reset(seed=seed)[0]
        self.unseen = 0
        self._look()

    def _step(self, action):
        self.image, reward, terminated, *_ = self.env.step(self.actions.index(action))
        self._look()
        self.success = terminated and reward > 0
        return (reward if self.success or not terminated else -1.0), terminated

    def _invalid(self):
        self.env.step_count += 1  # so that a later success pays for this step too
        return self.invalid_reward

    def _frame(self):
        return self.image.copy()

    def _look(self):
        """Find the red box in the frame: its bearing in degrees (right is positive), None if out of view."""
        red = (self.image[..., 0] > 120) & (self.image[..., 1:].max(2) < 60)
        if red.sum() < 3:
            self.bearing, self.unseen = None, self.unseen + 1
            return
        height, width = red.shape
        focal = height / 2 / math.tan(math.radians(30))  # pixels; MiniWorld's vertical field of view is 60
        offset = red.any(0).nonzero()[0].mean() + 0.5 - width / 2
        self.bearing, self.unseen = math.degrees(math.atan(offset / focal)), 0

    def _side(self):
        """0 left, 1 ahead (within half a turn of the middle, and two degrees for the pixels), 2 right."""
        return 1 + (self.bearing > self.half_turn + 2) - (self.bearing < -self.half_turn - 2)

    def caption(self):
        if self.bearing is None:
            return "no red box in view"
        return "the red box is " + ("on the left", "ahead", "on the right")[self._side()]

    def hint(self):
        """Turn until the box is ahead, then walk; after a full turn without seeing it, wander a little."""
        if self.bearing is None:
            return "turn left" if self.unseen % 36 <= 24 else "move forward"
        return ("turn left", "move forward", "turn right")[self._side()]


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
    r, cx, cy = width / 7, x + width / 2, y + height * 0.75

    def blob(dx, dy):
        draw.ellipse((cx + (dx - 1) * r, cy + (dy - 1) * r, cx + (dx + 1) * r, cy + (dy + 1) * r), fill=color)

    def polygon(*points):
        draw.polygon([(cx + px * r, cy + py * r) for px, py in points], fill=color)

    if suit == "D":
        polygon((0, -2), (1.5, 0), (0, 2), (-1.5, 0))
    elif suit == "H":
        blob(-0.9, -0.6), blob(0.9, -0.6), polygon((-1.8, -0.2), (1.8, -0.2), (0, 2))
    else:
        polygon((0, 0), (0.7, 2), (-0.7, 2))  # the stem
        blob(-0.9, 0.4), blob(0.9, 0.4)
        blob(0, -1) if suit == "C" else polygon((-1.7, 0.1), (1.7, 0.1), (0, -2))


class CardGame(World):
    """A card game on a 300 x 300 table. `invalid_reward` is what anything but a symbol of the game pays."""

    def __init__(self, max_episode_steps, invalid_reward=-1.0):
        super().__init__((300, 300), max_episode_steps, invalid_reward)

    def _frame(self):
        image = Image.new("RGB", (300, 300), self.background)
        self._draw(ImageDraw.Draw(image))
        return np.array(image)


class NumberLine(CardGame):
    """Bring the current number to the target: 1 on arrival, -1 for a move that comes no nearer, else 0."""

    task = "make the current number equal to the target number; + adds one, - takes one away"
    actions = ("-", "+")
    background = "white"

    def __init__(self, max_episode_steps=10, **options):
        super().__init__(min(max_episode_steps, 10), **options)

    def _reset(self):
        self.current, self.target = map(int, self.np_random.integers(0, 6, 2))
        if self.target == self.current:
            self.target = (self.target + 1) % 5

    def _step(self, action):
        before = abs(self.target - self.current)
        self.current = min(5, max(0, self.current + (1 if action == "+" else -1)))
        after = abs(self.target - self.current)
        self.success = after == 0
        return (1 if after == 0 else -1 if after >= before else 0), self.success

    def _draw(self, draw):
        for label, number, y in (("Target:", self.target, 80), ("Current:", self.current, 220)):
            draw.text((10, y), label, "black", font(40), anchor="lm")
            draw.text((230, y), str(number), "black", font(120), anchor="mm", stroke_width=2)

    def caption(self):
        return f"the target is {self.target} and the current number is {self.current}"

    def hint(self):
        return "+" if self.current < self.target else "-"


def evaluate(formula) -> Fraction | None:
    """The exact value of a list of symbols ("1" to "10", + - * / ( ), blanks ignored), None if malformed.

    No two numbers side by side, no sign before a number, no ** or //: the ways to cheat Python's evaluator.

    >>> evaluate(["8", "/", "(", "3", "-", "8", "/", "3", ")"])
    Fraction(24, 1)
    >>> evaluate(["2", "4"]), evaluate(["2", "*", "*", "3"]), evaluate(["4", "/", "(", "2", "-", "2", ")"])
    (None, None, None)
    """
    symbols = [s for s in formula if s != " "][::-1]  # a stack: the next symbol is the last

    def number():
        symbol = symbols.pop()
        if symbol != "(":
            return Fraction(int(symbol))  # ValueError if it is an operator or a closing bracket
        value = total()
        if symbols.pop() != ")":
            raise ValueError
        return value

    def product():
        value = number()
        while symbols and symbols[-1] in "*/":
            value = value * number() if symbols.pop() == "*" else value / number()
        return value

    def total():
        value = product()
        while symbols and symbols[-1] in "+-":
            value = value + product() if symbols.pop() == "+" else value - product()
        return value

    try:
        value = total()
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    return None if symbols else value


@functools.cache
def solutions(numbers, operators, target) -> list[list[str]]:
    """Formulas that use each number once and equal the target, shortest first ([] if there is none)."""
    shapes = ["aob"] if len(numbers) == 2 else ["aobocod", "(aob)ocod", "(aob)o(cod)", "ao(boc)od"]
    if len(numbers) == 4:
        shapes += ["ao(bocod)", "(aoboc)od", "((aob)oc)od", "(ao(boc))od", "ao((boc)od)", "ao(bo(cod))"]
    found = []
    for shape in shapes:
        for order in dict.fromkeys(itertools.permutations(numbers)):
            for signs in itertools.product(operators, repeat=len(numbers) - 1):
                names, sign = dict(zip("abcd", map(str, order), strict=False)), iter(signs)
                formula = [next(sign) if c == "o" else names.get(c, c) for c in shape]
                if evaluate(formula) == target:
                    found.append(formula)
    return found


class EZPoints(CardGame):
    """Write a formula over two cards that equals 12: 10 if right, -1 if wrong or for a number not there."""

    target, operators, card_width, formula_at = 12, ("+", "*"), 135, (10, 258)
    background = GREEN
    longest = 5  # a formula longer than this ends the game

    def __init__(self, max_episode_steps=None, **options):
        self.actions = (*map(str, range(1, 11)), *self.operators, "=")
        signs = " ".join(self.operators)
        self.task = (
            f"write a formula that equals {self.target}, one symbol at a time, using the number of each card "
            f"exactly once with {signs}; A counts as 1, J, Q and K as 10; finish with ="
        )
        own = self.longest + 2
        super().__init__(min(max_episode_steps or own, own), **options)

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
        self.free, self.formula = [str(n) for n in self.numbers], []

    def _step(self, action):
        if len(self.formula) > self.longest:
            return -1, False  # this is step longest + 2: the time limit ends the game, whatever was written
        if action.isdigit() and action not in self.free:
            return self._blank(-1.0), False
        if action == "=":
            self.success = not self.free and evaluate(self.formula) == self.target
            return (10 if self.success else -1), True
        if action.isdigit():
            self.free.remove(action)
        self.formula.append(action)
        return 0, False

    def _blank(self, reward):
        if len(self.formula) <= self.longest:
            self.formula.append(" ")
        return reward

    def _invalid(self):
        return self._blank(self.invalid_reward)

    def _text(self):
        return "Formula: " + " ".join(s for s in self.formula if s != " ")

    def _draw(self, draw):
        width = self.card_width
        for i, (rank, suit) in enumerate(zip(self.ranks, self.suits, strict=True)):
            draw_card(draw, 5 + int(i * width * 1.1), (300 - width * 7 // 5) // 2, width, RANKS[rank], suit)
        draw.text(self.formula_at, "Formula: " + " ".join(self.formula), "white", font(20))

    def caption(self):
        return "the cards are " + ", ".join(map(str, self.numbers)) + "; f" + self._text()[1:].strip()

    def hint(self):
        """The next symbol of a solution that starts with what is written, else = to end it."""
        written = [s for s in self.formula if s != " "]
        for formula in solutions(tuple(sorted(self.numbers)), self.operators, self.target):
            if formula[: len(written)] == written:
                return formula[len(written)] if len(formula) > len(written) else "="
        return "="


class Points24(EZPoints):
    """Four cards and 24, with + - * / ( ). 27 % of the deals have no solution."""

    target, operators, card_width, formula_at, longest = 24, ("+", "-", "*", "/"), 67, (10, 210), 20

    def __init__(self, **options):
        super().__init__(**options)
        self.actions = (*self.actions[:-1], "(", ")", "=")

    def _reset(self):
        self.ranks = [int(rank) for rank in self.np_random.integers(1, 14, 4)]
        self._deal()


class Blackjack(CardGame):
    """Hit or stand against a dealer who draws to 17, infinite deck: 1 for a win, 0 for a draw, else -1."""

    task = "win at blackjack: come closer to 21 than the dealer without going over"
    actions = ("stand", "hit")
    background = GREEN

    def __init__(self, max_episode_steps=20, **options):
        super().__init__(min(max_episode_steps, 20), **options)

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
        self.dealer, self.player = [self._card(), self._card()], [self._card(), self._card()]

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
            draw_card(draw, 5 + 74 * (i % 4), 150 + 30 * (i // 4), 70, rank, suit)

    def caption(self):
        ace = " with an ace" if any(card[0] == 1 for card in self.player) else ""
        return f"the dealer shows {self.dealer[0][0]} and the player has {self.score(self.player)}{ace}"

    def hint(self):
        """The basic strategy for hitting and standing."""
        total, shown = self.score(self.player), self.dealer[0][0]
        if total != sum(card[0] for card in self.player):  # an ace counts as 11
            return "hit" if total <= 17 else "stand"
        return "stand" if total >= 17 or total >= 12 + (shown < 4) and 2 <= shown <= 6 else "hit"


# ------------------------------------------------------------------------------------------------ ALFWorld

ALFWORLD = (
    "pip install alfworld (Python 3.9 to 3.12, with a C++ compiler and make), then alfworld-download "
    "(ALFWORLD_DATA says where to, by default ~/.cache/alfworld)"
)
THOR = 'pip install "alfworld[vis]", an X server with OpenGL, and a download of the simulator at its start'


@contextlib.contextmanager
def undisturbed():
    """Around calls of alfworld, which prints, overwrites sys.argv and draws from the global generator."""
    argv, state = sys.argv, random.getstate()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.argv = argv
        random.setstate(state)


@functools.cache
def load_alfworld(kind, split):
    """alfworld's maker of environments, once for all of them: it opens every game. UserError if it cannot."""
    try:
        from alfworld.agents.environment import get_environment

        make = get_environment(kind)
    except ImportError as error:
        need = THOR if kind == "AlfredThorEnv" and error.name != "alfworld" else ALFWORLD
        raise UserError(f"ALFWorld is not installed ({error}): {need}") from None
    if sys.version_info >= (3, 13):
        raise UserError(f"ALFWorld's games do not run on Python {sys.version.split()[0]}: use 3.9 to 3.12")
    name = {"train": "train", "eval": "valid_unseen"}[split]
    games = os.path.join(os.environ["ALFWORLD_DATA"], "json_2.1.1", name)
    config = {
        "dataset": {"data_path": games, "eval_ood_data_path": games, "num_train_games": -1,
                    "num_eval_games": -1},
        "env": {
            "goal_desc_human_anns_prob": 0.0, "task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False,
            "expert_type": "handcoded",
            "thor": {"screen_width": 300, "screen_height": 300, "smooth_nav": False,
                     "save_frames_to_disk": False, "save_frames_path": "."},
        },
        "controller": {"type": "oracle", "debug": False, "load_receps": True},
        "general": {"training_method": "dqn"},  # with "dagger" an expert would play along
        "rl": {"training": {"max_nb_steps_per_episode": 10**6}},  # the time limit is ours
    }  # fmt: skip
    with undisturbed():
        found = os.path.isdir(games)  # an empty folder makes its reset hang for ever
        maker = found and make(config, train_eval="train" if split == "train" else "eval_out_of_distribution")
    if not found or not maker.num_games:
        raise UserError(f"no ALFWorld games in {games}: {ALFWORLD}")
    return maker


class ALFWorld(World):
    """Household tasks in text (Shridhar et al. 2021), the text drawn on the frame too: 1 if done, else 0."""

    kind, size = "AlfredTWEnv", (448, 448)

    def __init__(self, max_episode_steps=50, invalid_reward=-1.0, split="train"):
        maker = load_alfworld(self.kind, split)
        try:
            with undisturbed():
                self.env = maker.init_env(batch_size=1)
        except Exception as error:  # the simulator's many ways of not starting
            need = THOR if self.kind == "AlfredThorEnv" else ALFWORLD
            raise UserError(f"ALFWorld cannot start ({type(error).__name__}: {error}): {need}") from None
        super().__init__(self.size, max_episode_steps, invalid_reward)

    def _reset(self):
        seed = int(self.np_random.integers(2**31))
        self.env.seed(seed)  # the order of the games, so the next one
        with undisturbed():
            random.seed(seed)  # THOR's order
            observation, infos = self.env.reset()
        scene, _, task = observation[0].partition("Your task is to:")
        self.task = task.strip().rstrip(".")
        self.scene = " ".join(scene.replace("-= Welcome to TextWorld, ALFRED! =-", "").split())
        self.said, self.actions = "", tuple(infos["admissible_commands"][0])

    def _step(self, action):
        with undisturbed():
            observation, _, _, infos = self.env.step([action])
        self.said, self.actions = observation[0].strip(), tuple(infos["admissible_commands"][0])
        self.success = bool(infos["won"][0])
        return self._reward(infos), self.success

    def _reward(self, infos):
        return float(self.success)

    def _text(self):
        return f"{self.scene}\n{self.said}".strip()

    def _frame(self):
        return draw_text(self._text(), self.size)

    def caption(self):
        return (self.said or self.scene).split(". ")[0][:60]

    def close(self):
        self.env.close()


class ALFWorldThor(ALFWorld):
    """The same tasks as frames of the THOR simulator: 1 if done, plus the share of the goal reached."""

    kind, size = "AlfredThorEnv", (300, 300)

    def _reset(self):
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

    def _frame(self):
        return self.env.get_frames()[0][..., ::-1].copy()  # it gives blue, green, red


def draw_text(text, size):
    """The text as a uint8 frame (H, W, 3), black on white, wrapped; what does not fit is left out."""
    height, width = size
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, width // 8) or [""]]
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).multiline_text((8, 8), "\n".join(lines[: height // 20]), "black", font(15))
    return np.array(image)


# ------------------------------------------------------------------------------------------------- WebShop

WEBSHOP = (
    "git clone https://github.com/princeton-nlp/WebShop && cd WebShop && ./setup.sh -d small && "
    "python -m spacy download en_core_web_sm && "
    "flask --app web_agent_site.app run --host 127.0.0.1 --port 3000 (or let WEBSHOP_URL say where it runs)"
)
BROWSER = (
    "pip install playwright && playwright install --with-deps chromium "
    "(or let CHROMIUM name a browser that is there)"
)


def webshop_url():
    return os.environ.get("WEBSHOP_URL", "http://127.0.0.1:3000").rstrip("/")


@functools.cache
def webshop_goals(url) -> int:
    """How many goals the site has: fixed_N answers with an error from there on."""

    def exists(number):
        try:
            with urllib.request.urlopen(f"{url}/fixed_{number}", timeout=600):  # the first loads its data
                return True
        except urllib.error.HTTPError as error:
            if number == 0:
                words = f"WebShop at {url} answers {error.code}: are its data complete? See its own output"
                raise UserError(f"{words}, and {WEBSHOP}") from None
            return False
        except (OSError, ValueError) as error:
            raise UserError(f"no WebShop at {url} ({error}): {WEBSHOP}") from None

    low, high = 0, 1
    exists(0)
    while exists(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return high


class WebShop(World):
    """Buy what the instruction asks for, in a browser on the real site (Yao et al. 2022); the site's reward.

    Split eval is goals 0 to 499, train those from 1,500 on; of a site with fewer than 2,000, the first
    quarter and the rest. The browser lives in a thread of its own.
    """

    patience = 30.0  # seconds for a page

    def __init__(self, max_episode_steps=50, invalid_reward=0.0, split="train", size=(640, 640)):
        try:
            from playwright.sync_api import Error, TimeoutError
        except ImportError:
            raise UserError(f"WebShop needs a browser: {BROWSER}") from None
        self.Error, self.TimeoutError = Error, TimeoutError
        self.url = webshop_url()
        count = webshop_goals(self.url)
        few, many = (500, 1500) if count >= 2000 else (max(1, count // 4), min(count - 1, max(1, count // 4)))
        self.goals = range(few) if split == "eval" else range(many, count)
        self.thread = ThreadPoolExecutor(1)
        self.thread.submit(self._open, size).result()
        super().__init__(size, max_episode_steps, invalid_reward)

    def _open(self, size):
        from playwright.sync_api import sync_playwright

        path = (
            os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
        )
        self.playwright = sync_playwright().start()
        try:
            browser = self.playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except self.Error as error:
            self.playwright.stop()
            raise UserError(f"WebShop needs a browser ({str(error).splitlines()[0]}): {BROWSER}") from None
        self.page = browser.new_page(viewport={"width": size[1], "height": size[0]})
        self.page.set_default_timeout(1000 * self.patience)
        # The site's scripts come from other hosts and only follow an option's address, which is done here.
        self.page.route("**/*", lambda r: r.abort() if r.request.resource_type == "script" else r.continue_())

    def _reset(self):
        goal = self.goals[int(self.np_random.integers(len(self.goals)))]
        self.thread.submit(self._visit, f"{self.url}/fixed_{goal}").result()
        self.task = self.instruction

    def _admissible(self, action):
        if isinstance(action, str) and action.startswith("search["):  # with a word, or the site may stumble
            return "search[...]" in self.actions and bool(
                re.fullmatch(r"search\[[^\[\]]*\w[^\[\]]*\]", action)
            )
        return super()._admissible(action)

    def _step(self, action):
        self.thread.submit(self._play, action).result()
        self.success = self.reward == 1.0
        return self.reward or 0.0, self.reward is not None

    # From here on, in the browser's thread.

    def _visit(self, url):
        """Open a page; the answer must be a success."""
        self._read(self.page.goto(url, wait_until="domcontentloaded"))

    def _play(self, action):
        kind, _, words = action[:-1].partition("[")
        if kind == "search":
            self.page.fill("#search_input", re.sub(r"[/<>]", " ", words))  # of its addresses and commands
            element = self.page.query_selector("form button")
        else:
            element = self.elements[words]
        address = element.get_attribute("data-url")
        if address:  # an option
            return self._visit(urljoin(self.page.url, address))
        with self.page.expect_navigation(wait_until="domcontentloaded") as navigation:
            element.click(no_wait_after=True)
        self._read(navigation.value)

    def _read(self, response):
        """What is on the page: frame, text, what can be clicked, and the reward if it is the last page."""
        if not response.ok:
            raise RuntimeError(f"the site answers {response.status} at {response.url}: see its own output")
        with contextlib.suppress(self.TimeoutError):  # a picture from elsewhere may never come
            self.page.wait_for_load_state("load", timeout=5000)
        path = urlsplit(self.page.url).path
        self.place, chosen = path.split("/")[1], []
        if self.place == "item_page":  # the page's script would mark what the address says is chosen
            chosen = list(ast.literal_eval(unquote(path.rpartition("/")[2])).values())
        radios = {e.get_attribute("value"): e for e in self.page.query_selector_all("input[type=radio]")}
        for name in radios.keys() & chosen:
            radios[name].evaluate("radio => { radio.checked = true }")
        self.image = np.array(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))
        self.body = (f"Chosen: {', '.join(chosen)}\n" if chosen else "") + self.page.inner_text("body")
        instruction, reward = (self.page.query_selector(x) for x in ("#instruction-text", "#reward pre"))
        if instruction:
            self.instruction = " ".join(instruction.inner_text().partition(":")[2].split())
        self.reward = float(reward.inner_text()) if reward else None
        found = [(e.inner_text(), e) for e in self.page.query_selector_all(".btn, .product-link")]
        self.products = {
            e.inner_text().strip().lower() for e in self.page.query_selector_all(".product-link")
        }
        found += radios.items()
        self.elements = {name.strip().lower(): element for name, element in reversed(found)}
        names = list(dict.fromkeys(name.strip().lower() for name, _ in found))
        bar = "search" in names and self.page.query_selector("#search_input") is not None
        self.actions = ["search[...]"] if bar else []
        self.actions += [f"click[{name}]" for name in names if name != "search" or not bar]

    # From here on, in the caller's.

    def _text(self):
        return self.body

    def _frame(self):
        return self.image.copy()

    def caption(self):
        pages = {"search_results": "these are products", "item_page": "this is a product"}
        pages |= {"item_sub_page": "these are details of a product", "done": "it is bought"}
        return pages.get(self.place, "this is the search page")

    def hint(self):
        """Search with the instruction's first words, open the first product, buy it: no solution."""
        if "search[...]" in self.actions:
            return "search[" + " ".join(re.findall(r"[\w'-]+", self.instruction)[:8])[:100] + "]"
        buy, products = "click[buy now]", [a for a in self.actions if a[6:-1] in self.products]
        return buy if buy in self.actions else (products or self.actions or [None])[0]

    def close(self):
        if self.thread:
            self.thread.submit(self.playwright.stop).result()
            self.thread.shutdown()
            self.thread = None


# ------------------------------------------------------------------------------------------------- by name

CARDS = {"NumberLine": NumberLine, "EZPoints": EZPoints, "Blackjack": Blackjack, "Points24": Points24}
TEXT = {"ALFWorld": ALFWorld, "ALFWorldThor": ALFWorldThor, "WebShop": WebShop}


def make_env(
    name: str,
    *,
    max_episode_steps: int | None = None,
    invalid_reward: float | None = None,
    split="train",
):
    """The world of that name: of RED_BOX, CARDS or TEXT, or `package.module:callable` for your own.

    max_episode_steps  time limit in actions; None: the world's default; its own limit counts if shorter
    invalid_reward     for an action that is not admissible; None: the world's default
    split              "train" or "eval": of ALFWorld's games or WebShop's goals; elsewhere the seeds differ
    Your own callable is called without arguments and limited by gymnasium's TimeLimit.
    UserError for an unknown name (with the closest one), a world without a red box, or a missing package.

    >>> env = make_env("NumberLine")
    >>> observation, info = env.reset(seed=0)
    >>> env.caption(), info["actions"], observation["image"].shape
    ('the target is 3 and the current number is 5', ['-', '+'], (300, 300, 3))
    >>> env.step("-")[1:3]
    (0.0, False)
    """
    options = {"max_episode_steps": max_episode_steps, "invalid_reward": invalid_reward}
    options = {key: value for key, value in options.items() if value is not None}
    if ":" in name:
        return own_env(name, options.get("max_episode_steps", 128))
    short = name.removeprefix("MiniWorld-").removesuffix("-v0")
    if name in CARDS:
        return CARDS[name](**options)
    if name in TEXT:
        return TEXT[name](split=split, **options)
    if short in RED_BOX:
        return MiniWorld(short, **options)
    if name.startswith("MiniWorld-"):
        raise UserError(f"{name}: its goal is not the red box; choose one of {', '.join(RED_BOX)}")
    names = [*RED_BOX, *CARDS, *TEXT]
    close = difflib.get_close_matches(name, names, 1, 0.5)
    guess = f"did you mean {close[0]}? " if close else ""
    known = ", ".join(names)
    raise UserError(f"no world is called {name!r}; {guess}There are {known}, or package.module:callable")


def check(method: str, result):
    """What a world's `reset` or `step` returned, if it keeps the contract; else UserError says what is wrong.

    >>> check("reset", "hello")
    Traceback (most recent call last):
    envs.UserError: reset must return a tuple (observation, info)
    """
    form = {"reset": "(observation, info)", "step": "(observation, reward, terminated, truncated, info)"}[
        method
    ]

    def rules():  # in order: each may rely on those before it
        yield isinstance(result, tuple) and len(result) == form.count(",") + 1, f"return a tuple {form}"
        observation, info, ended = result[0], result[-1], False
        keys = isinstance(observation, dict) and {"image", "text"} <= observation.keys()
        yield keys, 'give the observation as a dict {"image": ..., "text": ...}'
        image = observation["image"]
        shape = f"{getattr(image, 'dtype', type(image).__name__)} {getattr(image, 'shape', '')}"
        frame = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
        yield frame and image.shape[2] == 3 and image.size > 0, f"give a uint8 frame (H, W, 3), not {shape}"
        yield isinstance(observation["text"], str), f"give text as a str, not {observation['text']!r}"
        yield isinstance(info, dict), f"give info as a dict, not {info!r}"
        if method == "step":
            _, reward, *ends, _ = result
            yield (
                isinstance(reward, numbers.Real) and math.isfinite(reward),
                f"pay a finite number, not {reward!r}",
            )
            yield (
                all(isinstance(x, (bool, np.bool_)) for x in ends),
                f"say True or False for its ends, not {ends}",
            )
            ended = any(ends)
        else:
            yield isinstance(info.get("task"), str), 'say what to achieve in info["task"], a str'
        actions = info.get("actions")
        listed = isinstance(actions, (list, tuple)) and all(isinstance(a, str) and a for a in actions)
        yield ended or (listed and len(actions) > 0), f'list the actions in info["actions"], not {actions!r}'
        success = info.get("success", False)
        yield isinstance(success, (bool, np.bool_)), f'give info["success"] as True or False, not {success!r}'

    for holds, words in rules():
        if not holds:
            raise UserError(f"{method} must {words}")
    return result


class Checked(gym.Wrapper):
    """A user's own world whose every answer is checked."""

    def reset(self, **options):
        return check("reset", self.env.reset(**options))

    def step(self, action):
        return check("step", self.env.step(action))


class Limited(gym.wrappers.TimeLimit):
    """A time limit that says how many actions are left."""

    def reset(self, **options):
        observation, info = super().reset(**options)
        return observation, {"left": self._max_episode_steps} | info

    def step(self, action):
        *result, info = super().step(action)
        return *result, {"left": self._max_episode_steps - self._elapsed_steps} | info


def own_env(name, max_episode_steps):
    """A user's own world, `package.module:callable`, looked for in the current folder too."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
        env = function()
    except UserError:
        raise
    except Exception as error:  # whatever a user's module and callable raise
        words = f"{type(error).__name__}: {error} (looked in Python's path and the current folder)"
        raise UserError(f"--env {name}: {words}") from error
    if not isinstance(env, gym.Env):
        raise UserError(f"--env {name}: it must return a gymnasium.Env, not {type(env).__name__}")
    return Limited(Checked(env), max_episode_steps)
