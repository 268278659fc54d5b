"""A world for long thoughts: OneRoom, whose caption, and so a thought of the toy, has 48 words more.

    python vldac.py --env extras.long_thoughts:LongOneRoom-v0 --model tiny --max_new_tokens 100

The words are random and mean nothing. They are for what depends on the length of a thought: RL4VLM's lambda,
and the ratio of a whole response. They are drawn anew each time, so the toy's lesson counts no thought as
true, and always takes its three rounds.
"""

import gymnasium as gym

from envs import MiniWorld

WORDS = "amber basil cedar delta ember fjord grove heron".split()


class LongOneRoom(MiniWorld):
    """OneRoom with the words."""

    def __init__(self, **options):
        super().__init__("OneRoom", **options)

    def caption(self):
        words = self.np_random.choice(WORDS, 48)
        return f"{super().caption()} {' '.join(words)}"


gym.register("LongOneRoom-v0", LongOneRoom)
