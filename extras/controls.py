"""Worlds for controls: what is learned where the toy is taught no good action, or where success pays nothing.

    python vldac.py --env extras.controls:NumberLineNoHints-v0 --model tiny

Without hints the toy is taught uniformly random actions only.
"""

import gymnasium as gym

from envs import MiniWorld, NumberLine


class OneRoomNoHints(MiniWorld):
    """OneRoom, whose hint is None."""

    def __init__(self, **options):
        super().__init__("OneRoom", **options)

    def hint(self):
        return None


class NumberLineNoHints(NumberLine):
    """NumberLine, whose hint is None."""

    def hint(self):
        return None


class OneRoomNoise(MiniWorld):
    """OneRoom, in which a coin decides whether a success pays or costs."""

    def __init__(self, **options):
        super().__init__("OneRoom", **options)

    def _step(self, action):
        reward, terminated = super()._step(action)
        if terminated:
            reward *= self.np_random.choice([-1, 1])
        return reward, terminated


gym.register("OneRoomNoHints-v0", OneRoomNoHints)
gym.register("NumberLineNoHints-v0", NumberLineNoHints)
gym.register("OneRoomNoise-v0", OneRoomNoise)
