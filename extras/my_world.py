"""A world of your own: python vldac.py --env extras.my_world:Doors-v0 --model tiny"""

import gymnasium as gym
import numpy as np

from envs import AnyText


class Doors(gym.Env):
    """Two doors, one of them green: open that one."""

    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (56, 56, 3), np.uint8), text=AnyText())
    action_space = AnyText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.green = ["left", "right"][self.np_random.integers(2)]
        return self.observe(success=False)

    def step(self, action):
        success = action == f"open {self.green}"
        observation, info = self.observe(success)
        # The fourth is `truncated`: the reward of a step that is only truncated is not learned from.
        return observation, float(success), action.startswith("open"), False, info

    def observe(self, success):
        image = np.full((56, 56, 3), 90, np.uint8)
        x = 4 if self.green == "left" else 32
        image[8:, x : x + 20] = (0, 200, 0)
        info = {"task": "open the green door", "actions": ["open left", "open right"], "success": success}
        return {"image": image, "text": ""}, info

    def caption(self):  # the toy is taught to say this, and to act at random
        return f"the {self.green} door is green"

    def hint(self):  # for eval.py hint, a scripted player; the toy is not taught it
        return f"open {self.green}"


gym.register("Doors-v0", Doors)
