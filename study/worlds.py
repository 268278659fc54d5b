"""The worlds of the study: rooms in which no good action is taught, so that reward must teach.

    python vldac.py --env study.worlds:OneRoomS6NoHints-v0 --model tiny

The toy is taught uniformly random actions only. (Older worlds: commit c7931d9.)
"""

import gymnasium as gym

from envs import MiniWorld


class NoHints(MiniWorld):
    """A room whose hint is None."""

    def hint(self):
        return None


for room in ("OneRoomS6", "OneRoomS6Fast"):
    gym.register(f"{room}NoHints-v0", NoHints, kwargs={"name": room})
