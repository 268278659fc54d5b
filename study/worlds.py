"""OneRoom with something changed: a coin decides the reward, the lesson has no bias, or time-outs are ends.

    python vldac.py --env study.worlds:OneRoomCoin-v0 --model tiny

(Worlds of older parts of the study: commits 945b993 and c7931d9.)
"""

import gymnasium as gym

from envs import MiniWorld


class Coin(MiniWorld):
    """A coin decides whether a success pays or costs."""

    def _step(self, action):
        reward, terminated = super()._step(action)
        if terminated:
            reward *= self.np_random.choice([-1, 1])
        return reward, terminated


class Uniform(MiniWorld):
    """The toy is taught all four actions equally often."""

    lesson_actions = MiniWorld.actions


class TimeOut(MiniWorld):
    """A time-out ends an episode as a success does, so that its -1 is learned from."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, False, info


for world in (Coin, Uniform, TimeOut):
    kwargs = {"name": "OneRoom", "action_repeat": 3}  # as the toy's room has it
    gym.register(f"OneRoom{world.__name__}-v0", world, kwargs=kwargs)
