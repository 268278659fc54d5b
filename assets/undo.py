"""VL-DAC with one detail undone: what is the detail worth?

    python assets/undo.py                          the details
    python assets/undo.py NAME                     a detail's diff: the lines of vldac.py that it changes
    python assets/undo.py NAME --env OneRoom ...   a training without it; takes vldac.py's options

A run keeps its changed vldac.py. A detail is undone in training only: every evaluation is the unchanged one.
"""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DETAILS = '''## other-noise
The control: nothing is undone, but training draws other random numbers; so far apart are two equal runs.
@@
-            set_seed(training_seed(args.seed, RANK, u))  # a resumed run goes on as if it had never stopped
+            set_seed(training_seed(args.seed, RANK, u, 1))
## greedy
Deviation 9: training takes the likeliest token, as the released code does.
@@
     steps, episodes = [], []
+    policy.vlm.generation_config.top_k = 1
     for _ in range(args.num_steps):
@@
+    policy.vlm.generation_config.top_k = 0
     last_prompts = [policy.encode(*player.turn()) for player in players]
     return steps, last_prompts, episodes
## start-together
Deviation 11: all players begin an episode when the training begins, so all time out together.
@@
-        steps = self.index * self.info["left"] // self.args.num_envs
+        steps = 0
## random-action
Deviation 12: for a response that does not parse a random action is played, and credited to the response.
@@
-def act(policy, players) -> list[Step]:
+def act(policy, players, training=False) -> list[Step]:
@@
+        played = action
+        if training and action is None:
+            played = player.random_action(random.Random(f"{player.seed} {len(player.actions)}"))
-        reward, done = player.step(action)
+        reward, done = player.step(played)
@@
-        for player, step in zip(players, act(policy, players), strict=True):
+        for player, step in zip(players, act(policy, players, training=True), strict=True):
             steps.append(step)
## time-out-ignored
Deviation 13: a step that times out has the advantage 0 (before the normalisation); its penalty is not seen.
@@
+        self.timed_out = bool(truncated and not terminated)
         return float(reward), bool(terminated or truncated)
@@
     done: bool
+    timed_out: bool


 def act(policy, players) -> list[Step]:
@@
-        steps.append(Step(prompts[i], tokens[i], responses[i], action, reward, done))
+        steps.append(Step(prompts[i], tokens[i], responses[i], action, reward, done, player.timed_out))
@@
-def gae(rewards, values, last_values, dones, gamma, gae_lambda):
+def gae(rewards, values, last_values, dones, gamma, gae_lambda, timed_out):
@@
+        last_advantage = last_advantage.masked_fill(timed_out[t], 0)
         advantages[t] = last_advantage
@@
-    advantages, returns = gae(rewards, values, last_values, dones, args.gamma, args.gae_lambda)  # (T, N)
+    timed_out = torch.tensor([step.timed_out for step in steps]).to(args.device).view_as(values)
+    advantages, returns = gae(
+        rewards, values, last_values, dones, args.gamma, args.gae_lambda, timed_out
+    )  # (T, N)
## time-out-bootstrapped
Deviation 13: gamma times the value of the state after a time-out is added to the last reward.
@@
+        self.timed_out = bool(truncated and not terminated)
         return float(reward), bool(terminated or truncated)
@@
     done: bool
+    timed_out: bool


 def act(policy, players) -> list[Step]:
@@
-        steps.append(Step(prompts[i], tokens[i], responses[i], action, reward, done))
+        steps.append(Step(prompts[i], tokens[i], responses[i], action, reward, done, player.timed_out))
@@
             if step.done:
+                if step.timed_out:
+                    step.prompt_after = policy.encode(*player.turn())
                 if player.episode >= player.first_full:
@@
+    for row, step in enumerate(steps):
+        if step.timed_out:
+            _, value_after = policy([step.prompt_after], nothing[:1], nothing[:1])
+            rewards.view(-1)[row] += args.gamma * value_after.item()
     dones = torch.tensor([step.done for step in steps]).to(args.device).view_as(values)
## first-token
Deviation 3: the first token of a response has no policy loss (unless it is the only one).
@@
+            weights = mask.clone()
+            weights[mask.sum(1) > 1, 0] = 0
-            minibatch.append(MicroBatch(rows, [steps[row].prompt for row in rows], tokens, mask, mask))
+            minibatch.append(MicroBatch(rows, [steps[row].prompt for row in rows], tokens, mask, weights))
## value-clipping
Deviation 4: the value is clipped around that of the rollout, as in PPO's first code.
@@
         micro.returns = returns.flatten()[micro.rows]
+        micro.values = values.flatten()[micro.rows]
@@
-                v_loss = value_loss(values, micro.returns)  # Eq. 4
+                near = micro.values + (values - micro.values).clamp(-args.clip_coef, args.clip_coef)
+                errors = torch.max((values - micro.returns) ** 2, (near - micro.returns) ** 2)
+                v_loss = 0.5 * errors.mean()
## not-normalised
Eq. 3: the advantages are neither centred nor divided by their standard deviation.
@@
-    normalised = (advantages.flatten() - mean) / (std + 1e-8)  # (B,)
+    normalised = advantages.flatten()  # (B,)
## drawn-anew
Deviation 18: the second epoch has new minibatches of the same steps.
@@
+def drawn_anew(minibatches, args):
+    """The same steps in new minibatches."""
+    steps, scores = {}, {}
+    for micro in itertools.chain(*minibatches):
+        lengths = micro.mask.sum(1).tolist()
+        for i, row in enumerate(micro.rows):
+            tokens = micro.tokens[i, : lengths[i]]
+            steps[row] = Step(micro.prompts[i], tokens, "", None, 0.0, False)
+            logprobs = [x[i, : lengths[i]] for x in (micro.logprobs, micro.baselogprobs)]
+            scores[row] = (*logprobs, micro.advantages[i], micro.returns[i])
+    minibatches = make_minibatches([steps[row] for row in range(len(steps))], args)
+    for micro in itertools.chain(*minibatches):
+        logprobs, baselogprobs, advantages, returns = zip(*[scores[row] for row in micro.rows], strict=True)
+        micro.logprobs = pad_sequence(logprobs, batch_first=True)
+        micro.baselogprobs = pad_sequence(baselogprobs, batch_first=True)
+        micro.advantages, micro.returns = torch.stack(advantages), torch.stack(returns)
+    return minibatches
+
+
 def update(policy, optimizer, minibatches, args: Args, value_only=False, surrogate=policy_loss):
@@
-            minibatches = random.sample(minibatches, len(minibatches))  # the same ones in a new order
+            minibatches = drawn_anew(minibatches, args)
## one-norm
Deviation 15: the norm of all gradients together is clipped.
@@
+            both = [*lora, *value_head]
-            norm_lora = nn.utils.clip_grad_norm_(lora, args.max_grad_norm, error_if_nonfinite=True)
+            norm = nn.utils.clip_grad_norm_(both, args.max_grad_norm, error_if_nonfinite=True)
-            norm_value = nn.utils.clip_grad_norm_(value_head, args.max_grad_norm, error_if_nonfinite=True)
-            norms.append([norm_lora.item(), norm_value.item()])
+            norms.append([norm.item(), norm.item()])
## fp16-head
Deviation 8: the value head computes in fp16; its weights and Adam's moments stay in fp32.
@@
-        values = self.value_head(state)[:, 0]  # in fp32, outside autocast
+        halves = {name: weight.half() for name, weight in self.value_head.named_parameters()}
+        values = torch.func.functional_call(self.value_head, halves, state.half())[:, 0].float()
## bf16-logprobs
Deviation 10: log-probabilities are rounded to bfloat16.
@@
+        logprobs = logprobs.bfloat16().float()
         return logprobs.masked_fill(mask == 0, 0), values
'''


def read(details) -> dict[str, str]:
    """The diffs by name: what is undone, and after each @@ a place in vldac.py, with whole lines."""
    diffs = {}
    for part in details.split("## ")[1:]:
        name, _, diff = part.partition("\n")
        diffs[name] = diff
    return diffs


UNDONE = read(DETAILS)


def source_without(detail) -> str:
    """vldac.py with a detail undone. ValueError unless each place to change is there exactly once."""
    source = (ROOT / "vldac.py").read_text(encoding="utf-8")
    for hunk in UNDONE[detail].split("@@\n")[1:]:
        lines = hunk.splitlines()
        old = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        if source.count(old) != 1:
            raise ValueError(f"{detail}: these lines are {source.count(old)} times in vldac.py:{old}")
        source = source.replace(old, new)
    return source


def load(detail):
    """The module vldac with a detail undone, as if vldac.py were changed."""
    path = str(ROOT / "vldac.py")
    module = sys.modules["vldac"] = types.ModuleType("vldac")  # for those who import it from now on
    module.__file__ = path
    exec(compile(source_without(detail), path, "exec"), vars(module))
    module.Args.program = f"assets/undo.py {detail}"
    return module


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in UNDONE:
        print(__doc__, "\nThe details are: ", ", ".join(UNDONE), sep="")
        raise SystemExit(2 if words else 0)
    detail, *options = words
    if not options:
        print(UNDONE[detail])
        return
    vldac = load(detail)

    def train(args, folder):
        path, source = Path(folder, "vldac.py"), source_without(detail)
        if path.exists() and path.read_text(encoding="utf-8") != source:
            raise vldac.envs.UserError(f"vldac.py is not that of {path} any more")
        path.write_text(source, encoding="utf-8")
        vldac.train(args, folder)

    vldac.main(options, vldac.Args, train)


if __name__ == "__main__":
    main()
