#!/usr/bin/env bash
# Every training run behind the pages since 2026-11-29, one on each core:  bash study/runs.sh
# What study/runs.csv has is skipped, and what was stopped goes on, so it can be started again after any stop.
#
# The rules. Those of "Worlds" were written before the first run, when nobody had looked at seeds 40 to 49; the
# others on 2026-11-25, when the results of "Worlds" were known and before the first of their own runs. The
# settings were found on VL-DAC with seeds 10 to 19 and older ones, and nothing is tuned for any method any more.
# Default options but those below, and 200 episodes in each evaluation. Every seed is reported.
# * Worlds: OneRoom, seeds 40 to 49, VL-DAC, RL4VLM-0.5 and LOOP; five other worlds, seeds 40 to 44, VL-DAC. The
#   primary figure is success averaged over the run (Run.mean in report.py); RL4VLM-0.5 and LOOP are each tested
#   against VL-DAC by the exact rank-sum test; of two tests, a p below 0.025 counts.
#   (OneRoom/README, seed 0, is the README's own command.)
# * Does lambda matter, with short thoughts (OneRoom, seeds 40 to 49: RL4VLM with 0.2, 0.35, 0.5, 1; EZPoints, 40
#   to 44: 0.2, 0.5, 1) and with long ones (LongOneRoom, 40 to 44: 0.2, 0.5, 1)? The same figure, and beside it
#   success after training. Lambda matters in a world if the spread of the means over seeds, highest less lowest
#   lambda, is larger than the spread of VL-DAC over its seeds there. The p of `methods` does not count here.
# * Is the ratio per token worth something (LongOneRoom, seeds 40 to 44, and OneRoom, 40 to 49)? response-ratio
#   is tested against VL-DAC by the rank-sum test in each; of two tests, a p below 0.025 counts.
# * Shorter rollouts of more players: OneRoom, seeds 40 to 49, VL-DAC-64x8. Success after training, beside that
#   of VL-DAC; not the average over the run, as there is no rate for its first 8,192 steps.
# * The stabilisers, each on top of the one before, OneRoom, seeds 40 to 44: RL4VLM-0.35 with none of KL, warm-up
#   and stop-gradient (bare), with the KL, with the warm-up too; with all it is RL4VLM-0.35. No test.
# * Where LOOP stops: Hallway, FourRooms and WallGap, seeds 40 to 44. Success after training; no test.
# * Who taught it: each toy behind these runs before training (method "taught"), sampled, and greedy, by its
#   likeliest tokens, 200 episodes each. If greedy fails, sharpening what was taught is not enough. And a control,
#   OneRoomNoHints, seeds 40 to 44: VL-DAC from toys that were taught random actions only, 51,200 steps. No test.
#   Written later that day, when the first ten toys of OneRoom were found to fail by their likeliest tokens (0.015),
#   and one of them to succeed always by its likeliest action: all toys by this, too (likeliest.py). And two more
#   controls, seeds 40 to 44: NumberLineNoHints, where chance succeeds often enough to learn from, and OneRoomNoise,
#   where a success pays or costs by a coin. If success rises there, it is not from reward. (The rule above, of the
#   likeliest tokens, was wrong: see likeliest.py.)
# Written after a reading of the results so far (OneRoom, and LongOneRoom to its second seed of RL4VLM-1), and before
# their own runs:
# * Is it the loss or the KL? RL4VLM's ratio adds up a step's log-probabilities, 9.2 of them in OneRoom, and its KL
#   is a mean over them, as VL-DAC's is, so beside its policy loss the KL is about 9.2 times weaker. OneRoom, seeds 40
#   to 49: VL-DAC with a KL 9.2 times weaker, and RL4VLM-0.5 with one 9.2 times stronger. Success over the run, the
#   seeds that end below 0.9 or parse less than 0.95, and kl_base at the end, beside those of the usual coefficient.
# * Does LOOP only lack updates? OneRoom, seeds 40 to 44, 61,440 steps, in which it makes about VL-DAC's 40.
# In all tables of RL4VLM: how many seeds end below 0.9, and how many parse less than 0.95.
# Written on 2026-11-26, before the first run of each of what follows. Of the first, two tuning seeds (10 and 11) were
# seen; nothing of seeds 40 to 49:
# * Does reward alone teach a room? The toys are taught uniformly random actions (and to see, by captions).
#   OneRoomS6NoHints, VL-DAC, seeds 40 to 49, 51,200 steps; the same where a coin decides whether a success pays or
#   costs, seeds 40 to 44. It is learned if at least 8 of 10 end at 0.9 or more on the 200 fixed seeds, above both the
#   sampled start and the rate of the taught model's likeliest action, and no run with the coin ends at 0.9 or more.
#   OneRoomS6FastNoHints, seeds 40 to 44, 10,240 steps: described only, as random actions succeed in 0.6 there.
#   All toys taught without hints, before training: sampled, and by their likeliest action.
# * What is the step value worth? VL-DAC again, with today's code (VL-DAC-again), and with another critic or none
#   (extras/critic.py: critic-token, critic-token-per-step, critic-none), OneRoom, seeds 40 to 49; one-step-TD,
#   VL-DAC with --gae_lambda 0, beside them. The primary figure is success averaged over the run. Three tests: each
#   critic against VL-DAC-again, ten pairs of a seed, exact two-sided sign-flip test of the mean difference; a p
#   below 0.0167 counts. The first three rollouts of a pair must agree, as LoRA has not learned before. Differences
#   below about 0.09 will not show. LongOneRoom, seeds 40 to 44, VL-DAC-again and the two critics with values of
#   tokens: described.
# * Does VL-DAC need its stabilisers? VL-DAC-bare has no KL, no warm-up and no stop-gradient: OneRoom, seeds 40 to 49,
#   beside VL-DAC-again. No test. And the rest of the runs of "Is it the loss or the KL?".
# Written on 2026-11-27, before the first run of each of what follows. Of it only VL-DAC's seeds 40 to 44 in
# OneRoomS6FastNoHints were seen; there the reward must teach. Primary is success averaged over the run, in pairs of a
# seed whose first three rollouts agree (`report.py pairs`), with the exact two-sided sign-flip test of the mean
# difference. What is seen afterwards is called so.
# * What was missing: critic-token, LongOneRoom, seed 43.
# * Methods where reward must teach: OneRoomS6FastNoHints, seeds 40 to 49, 10,240 steps. VL-DAC-again (are 40 to 44
#   VL-DAC's to the digit?), critic-none, critic-token-per-step, RL4VLM-0.5, RL4VLM-1, response-ratio: five planned
#   tests against VL-DAC-again, Holm over the five at 0.05. VL-DAC-bare (no KL, warm-up or stop-gradient) shares only
#   the toy, and two more updates train its policy: described.
# * What else changes? At the end of each of these runs of VL-DAC-again, VL-DAC-bare and RL4VLM-0.5, the share of true
#   thoughts before and after (thoughts.py, into thoughts.csv), in the room it trained in and in Hallway. Sign-flip test
#   of after minus before for VL-DAC-again in both rooms: of two tests, a p below 0.025 counts.
# * The step value where thoughts are long, as a test: LongOneRoom, seeds 45 to 54, which nobody has looked at,
#   VL-DAC and critic-token-per-step (VL-DAC-test, critic-token-per-step-test), ten pairs, one planned test (0.05).
# * How sure is the README's own command? OneRoom, seeds 60 to 79, VL-DAC (VL-DAC-more): how many of the thirty with 40 to
#   49 end below 0.95, and below 0.9. If more than three of the twenty end below 0.9, the cause is looked for on tuning seeds.
# Written later that day, before the first run of each of what follows; of the runs above only the ends of seven, of seeds
# 40 and 41 in OneRoomS6FastNoHints, had been looked at:
# * Does a skill move to another room? One toy a seed is taught captions and random actions in three rooms
#   (MixedNoHints). Then VL-DAC trains it for 10,240 steps in OneRoomS6FastNoHints only (transfer-reward), and the same
#   where a coin decides what a success pays (transfer-coin), seeds 40 to 49. Primary: success in Hallway and in FourRooms,
#   where it never trained, on the 200 fixed seeds after training, reward less coin in pairs of a seed: two sign-flip
#   tests, a p below 0.025 counts. Beside them transfer-before. The rooms share the words of their captions, so what can
#   move is that the policy acts on its own sentence. One tuning seed (10) was seen: Hallway 0.105 before and 0.655 after.
# * How fragile is each? OneRoomS6FastNoHints, seeds 40 to 44, both learning rates divided and multiplied by 3: VL-DAC,
#   RL4VLM-0.5, RL4VLM-1. Described: mean, worst seed and parsed of each, with the runs above in the middle.
# * Does sharper sampling do without reward? The toys of OneRoom and of OneRoomS6FastNoHints, seeds 40 to 49, before
#   training, at temperature 1, 0.7, 0.5 and 0.25: of tokens, and of actions (likeliest.py's sums by the temperature, after
#   a thought sampled at 1). Described.
# * Critic or bootstrap? OneRoomS6FastNoHints with 4 players and 128 steps, where most episodes (50 steps at most) end
#   inside a rollout, seeds 40 to 49: VL-DAC-4x128 and critic-none-4x128, one test (0.05). Time-outs, whose reward is not
#   learned from, stay.
# Written on 2026-11-28, when 36 of the 70 runs of "Methods where reward must teach" were made: seven of them (VL-DAC-again,
# VL-DAC-bare and RL4VLM-0.5, seeds 40 and 41; RL4VLM-1, seed 40) had been made on a processor of another kind, which rounds
# otherwise, so that they had other toys, and `pairs` refused them. They were made anew where the other runs were made. On
# that first processor VL-DAC-again's seeds 40 and 41 had been VL-DAC's to the digit.
# Written later that day, when transfer-reward was known and a reader had said that walking forward without looking has
# 0.33 of Hallway:
# * Does what moved act on what it sees, and on its sentence? transfer-reward's training again, seeds 40 to 49
#   (transfer-again; is it the same to the digit?). Then, in Hallway and FourRooms, each player acts on another one's prompt
#   (transfer-prompts), so with the same frequencies of actions but without looking, or on its own prompt after another
#   one's thought (transfer-thoughts). 16 players, and the last one of an evaluation exchanges with none. Described: what
#   success is left, beside transfer-reward's and transfer-coin's.
#   (Written afterwards: the frequencies are not the same, as players that do not look come to other places.)
# * "Does sharper sampling do without reward?" has 50 episodes a toy in OneRoom instead of 200, as most last long.
# Written later that day, when 18 of the 20 runs of VL-DAC-more were known and two of them had ended below 0.95 (seeds 60 and
# 74):
# * Would they arrive with twice the steps? VL-DAC-more-on, of the seeds of VL-DAC-more that end below 0.95: their runs are
#   resumed from their checkpoints as the second half of runs of 40,960 steps (the learning rate rises again to half of its
#   first value, and falls). Described. The folders of those runs must still be in runs/final.
# Written later that day, before the first result of transfer-again (124 of 200 episodes of its first evaluation had been
# played, and not looked at): its evaluations have 50 episodes instead of 200, which were reckoned at five hours.
# Written on 2026-11-29, before the first run of each of what follows, and when nobody had looked at any of their seeds
# (of OneRoomS6FastNoHints, 10 to 14 are for tuning). The toy's default has changed since the runs above: its KL
# coefficient is 0.01 (it was 0.05), and in OneRoom the lesson has a third of hints (a quarter) and a run 12,288 steps (20,480),
# all chosen on seeds 10 to 19. Those above have the older default, and this file no longer makes them: their options and
# programs are those of commit c7931d9, in its runs.sh. New rows say on which kind of processor they were made; both runs of
# a pair have the same.
# * How sure is the README's own command? OneRoom, seeds 80 to 109, VL-DAC-now: how many end at 0.95 or more on the 200
#   fixed seeds, with the interval of the count. Why the others do not, by their logs.
# * Is the weaker KL what makes it sure? VL-DAC-now-KL-0.05, the same with --kl_coef 0.05, seeds 80 to 89: ten pairs, one
#   sign-flip test (0.05) of success after training. Only if it is higher with 0.05, and p is below 0.05, 0.05 comes back.
# * Does reward alone teach a room? OneRoomS6NoHints, seeds 50 to 59, 51,200 steps, VL-DAC-now, and its toys (taught-now).
#   The rule is that of 2026-11-26, without the coin: learned if at least 8 of 10 end at 0.9 or more, above both the
#   sampled start and the rate of the taught model's likeliest action.
# * The README's table: OneRoom's toys, seeds 80 to 89, and seeds 80 to 84 of Hallway, FourRooms, WallGap, EZPoints and
#   NumberLine, VL-DAC-now and taught-now. Described.
# * Each method at its own rate, where reward must teach: OneRoomS6FastNoHints, 10,240 steps: VL-DAC, RL4VLM-0.5, RL4VLM-1,
#   response-ratio, critic-none. Tuning: seeds 10 to 14, learning rates 1e-3, 3e-3 and 9e-3, the final one a fiftieth; if 9e-3
#   is the best for any method, 2.7e-2 for all. A method's rate is the one with the highest success over the run; at a
#   difference below 0.005 the smaller one. Then seeds 50 to 59 at this rate: four planned tests of success over the run
#   against VL-DAC, in pairs of a seed, Holm over the four at 0.05; parsed and the worst seed beside them.
#   (Written when the tuning runs were made and before the first final one: every method is highest at 3e-3, by 0.014 to 0.200
#   over the other two, so 2.7e-2 is not run, and all have the same rate, in the runs called -tuned.)
set -euo pipefail
cd "$(dirname "$0")/.."
cores=$(env -u OMP_NUM_THREADS nproc) # nproc would obey that variable
export OMP_NUM_THREADS=1
mkdir -p runs/final
exec 9> runs/final/running
flock --nonblock 9 || { echo "another copy of this script is running" >&2; exit 1; }

row() { # WORLD METHOD SEED SAMPLED GREEDY LIKELIEST: a row of runs.csv from the files of evaluations, if there
  python - "$@" << 'END'
import json, pathlib, sys
sys.path.append("study")
import report
world, method, seed, *files = sys.argv[1:]
results = [json.loads(pathlib.Path(file).read_text()) if pathlib.Path(file).exists() else {} for file in files]
sampled, greedy, likeliest = [result.get("summary", result) for result in results]
rates = [sampled["success_rate"], round(sampled["invalid_action_rate"], 5), ""]
rates += [greedy.get("success_rate", ""), likeliest["success_rate"]]
print(world, method, seed, "", 0, "", "", "", *rates, report.processor(), sep=",")
END
}
export -f row

run() { # WORLD METHOD SEED PROGRAM OPTIONS...: into runs/final/WORLD-METHOD-SEED, its rows into study/runs.csv
  local world=$1 method=$2 seed=$3 program=$4 name=$1-$2-$3 folder=runs/final/$1-$2-$3
  shift 4
  if grep -q "^$world,$method,$seed," study/runs.csv; then return; fi
  echo "$(date +%H:%M) $name"
  local options=(--run_name "$name" --runs_dir runs/final --seed "$seed" --eval_episodes 200 --device cpu "$@")
  if [ -e "$folder/args.json" ]; then
    options=(--resume "$folder") # it was stopped
  else
    rm -rf "$folder" # it was stopped before it was complete
  fi
  if ! python "$program" "${options[@]}" >> "$folder.txt" 2>&1; then
    echo "$name failed: $(tail -n 1 "$folder.txt")" >&2
    return 1
  fi
  if [ "$method" = taught-now ]; then # of which only the start counts, so that it has one row
    for mode in sampled greedy; do
      if [[ $mode == greedy && $world == *NoHints ]]; then continue; fi # the likeliest tokens were the wrong question
      python eval.py start "$folder" --episodes 200 --mode $mode --out "$folder/$mode.json" >> "$folder.txt" 2>&1
    done
    python study/likeliest.py "$folder" > "$folder/likeliest.json" 2>> "$folder.txt"
    row "$world" "$method" "$seed" "$folder"/{sampled,greedy,likeliest}.json > "$folder.csv"
  else
    python study/report.py rows "$folder" > "$folder.csv"
  fi
  # One run at a time, and the table is replaced in one piece.
  flock runs/final/merging bash -c 'cat study/runs.csv "$1" > runs/final/table && mv runs/final/table study/runs.csv' \
    _ "$folder.csv"
}
export -f run

runs() { # a line each: WORLD METHOD SEED PROGRAM OPTIONS...; seeds side by side, so that no toy is taught twice
  local vldac=vldac.py rl4vlm=extras/rl4vlm.py response=extras/response_ratio.py critic=extras/critic.py
  each() { # WORLD METHOD SEEDS PROGRAM OPTIONS...
    for seed in $3; do echo "$1 $2 $seed ${*:4}"; done
  }
  local one_update="--total_timesteps 512 --eval_episodes 0" room=study.worlds:OneRoomS6
  each OneRoom VL-DAC-now "$(echo {80..109})" $vldac --env OneRoom
  each OneRoom taught-now "$(echo {80..89})" $vldac --env OneRoom $one_update
  each OneRoom VL-DAC-now-KL-0.05 "$(echo {80..89})" $vldac --env OneRoom --kl_coef 0.05
  each OneRoomS6NoHints VL-DAC-now "$(echo {50..59})" $vldac --env ${room}NoHints-v0 --total_timesteps 51200
  each OneRoomS6NoHints taught-now "$(echo {50..59})" $vldac --env ${room}NoHints-v0 $one_update
  described() { # WORLD...
    for world in "$@"; do each $world VL-DAC-now "$(echo {80..84})" $vldac --env $world; done
    for world in "$@"; do each $world taught-now "$(echo {80..84})" $vldac --env $world $one_update; done
  }
  described Hallway EZPoints NumberLine
  local tuning="--env ${room}FastNoHints-v0 --total_timesteps 10240 --eval_episodes 0 --learning_rate"
  for rates in "1e-3 2e-5" "3e-3 6e-5" "9e-3 1.8e-4"; do
    local at="${rates% *}" options="$tuning ${rates/ / --final_learning_rate }"
    each OneRoomS6FastNoHints VL-DAC-at-$at "$(echo {10..14})" $vldac $options
    each OneRoomS6FastNoHints RL4VLM-0.5-at-$at "$(echo {10..14})" $rl4vlm $options --thought_coef 0.5
    each OneRoomS6FastNoHints RL4VLM-1-at-$at "$(echo {10..14})" $rl4vlm $options --thought_coef 1
    each OneRoomS6FastNoHints response-ratio-at-$at "$(echo {10..14})" $response $options
    each OneRoomS6FastNoHints critic-none-at-$at "$(echo {10..14})" $critic $options --critic none
  done
  local tuned="--env ${room}FastNoHints-v0 --total_timesteps 10240 --learning_rate 3e-3 --final_learning_rate 6e-5"
  each OneRoomS6FastNoHints VL-DAC-tuned "$(echo {50..59})" $vldac $tuned
  each OneRoomS6FastNoHints RL4VLM-0.5-tuned "$(echo {50..59})" $rl4vlm $tuned --thought_coef 0.5
  each OneRoomS6FastNoHints RL4VLM-1-tuned "$(echo {50..59})" $rl4vlm $tuned --thought_coef 1
  each OneRoomS6FastNoHints response-ratio-tuned "$(echo {50..59})" $response $tuned
  each OneRoomS6FastNoHints critic-none-tuned "$(echo {50..59})" $critic $tuned --critic none
  described FourRooms WallGap # the slowest
}

# What fails is reported and tried again next time; the rest goes on, and the script ends with an error.
runs | xargs -P "$cores" -L 1 bash -euo pipefail -c 'run "$@"' run
