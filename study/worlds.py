"""The worlds of the study: no good action is taught, a coin decides the reward, rooms mix, thoughts are long.

    python vldac.py --env study.worlds:NumberLineNoHints-v0 --model tiny
    python vldac.py --env study.worlds:LongOneRoom-v0 --model tiny --max_new_tokens 100

Without hints the toy is taught uniformly random actions only.
"""

import gymnasium as gym

from envs import MiniWorld, NumberLine, World, make_simulator


class NoHints(MiniWorld):
    """A room whose hint is None."""

    def hint(self):
        return None


class Noise(MiniWorld):
    """A room in which a coin decides whether a success pays or costs."""

    def _step(self, action):
        reward, terminated = super()._step(action)
        if terminated:
            reward *= self.np_random.choice([-1, 1])
        return reward, terminated


class NoHintsNoise(NoHints, Noise):
    """Both."""


class MixedNoHints(NoHints):
    """At each reset one of three rooms, with its own limit; the hint is None."""

    rooms = ("OneRoomS6Fast", "Hallway", "FourRooms")

    def __init__(self, **options):
        self.simulators = [make_simulator(name, *self.size) for name in self.rooms]
        World.__init__(self, **options)

    def _reset(self):
        self.env = self.simulators[self.np_random.integers(len(self.rooms))]
        self.limit = min(128, self.env.max_episode_steps)
        super()._reset()


class NumberLineNoHints(NumberLine):
    """NumberLine, whose hint is None."""

    def hint(self):
        return None


WORDS = "amber basil cedar delta ember fjord grove heron".split()


class LongOneRoom(MiniWorld):
    """OneRoom, whose caption, and so a thought of the toy, has 48 words more.

    They are random and mean nothing: they are for what depends on the length of a thought, RL4VLM's lambda
    and the ratio of a whole response. As they are drawn anew each time, the toy's lesson counts no thought as
    true, and always takes its three rounds.
    """

    def __init__(self, **options):
        super().__init__("OneRoom", **options)

    def caption(self):
        words = self.np_random.choice(WORDS, 48)
        return f"{super().caption()} {' '.join(words)}"


ROOMS = [("OneRoom", NoHints), ("OneRoom", Noise)]
ROOMS += [("OneRoomS6", NoHints), ("OneRoomS6", NoHintsNoise)]
ROOMS += [("OneRoomS6Fast", NoHints), ("OneRoomS6Fast", NoHintsNoise)]
for room, world in ROOMS:
    gym.register(f"{room}{world.__name__}-v0", world, kwargs={"name": room})
for world in (MixedNoHints, NumberLineNoHints, LongOneRoom):
    gym.register(f"{world.__name__}-v0", world)
