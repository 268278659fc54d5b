"""A world for a control: OneRoom without hints, so that the toy is taught uniformly random actions only.

    python vldac.py --env extras.no_hints:OneRoomNoHints-v0 --model tiny --total_timesteps 51200

It asks whether a toy that has never been shown a good action learns from the reward alone.
"""

import gymnasium as gym

from envs import MiniWorld


class OneRoomNoHints(MiniWorld):
    """OneRoom, whose hint is None."""

    def __init__(self, **options):
        super().__init__("OneRoom", **options)

    def hint(self):
        return None


gym.register("OneRoomNoHints-v0", OneRoomNoHints)
