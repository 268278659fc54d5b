#!/usr/bin/env bash
# Every training run behind the tables and figures, one on each core:  bash assets/compare.sh
# A run that is finished is skipped and one that was stopped goes on, so this can be started again after any stop.
#
# Written before the first of these runs, and not changed after it:
# * The settings were found on seeds 0 to 14. Nobody has looked at seeds 20 to 29. All of them are reported.
# * OneRoom, ten seeds, VL-DAC and four others. The primary figure is the mean success from step 0 to the budget
#   (Curve.mean of eval.py), where success is that of the last 100 training episodes. Each of the four is tested
#   against VL-DAC by the exact two-sided sign-flip test over the ten pairs of equal seed, with Holm's correction
#   for four tests. The 95 % interval of the mean difference comes from inverting that test, without a correction.
#   Without a test: success, parsed responses and true thoughts in the 200 episodes at the end.
#   `python eval.py methods VL-DAC assets/logs/OneRoom-{VL-DAC,VL-DAC-KL-of-Eq-5,VL-DAC-no-KL,RL4VLM-0.5,LOOP}-2?`
#   computes all of this.
# * The paper's worlds and NumberLine, five seeds, the default options. Every seed is shown; there is no test.
# * A run that NaN or infinity ends is a result and is not repeated: its last rate counts until the budget.
#
# The second part, written before the first of its runs, when all runs of OneRoom above were known. Seeds 20 to 24.
# VL-DAC's mean success there goes from 0.25 to 0.71, and seed by seed the methods hardly agree (the correlation
# of RL4VLM with VL-DAC is -0.4). So groups of runs are compared, not pairs: by the exact rank-sum test of mean
# success. `python eval.py unpaired` computes it.
# * Why per token? Thoughts of n more words (filler.py), n = 0 and 48. What answers it is RL4VLM with lambda 1
#   against token_sum, VL-DAC with a sum over the tokens, five runs each: at the same rate they differ in nothing
#   but the ratio. A ratio per token is better if token_sum has the larger mean, with p < 0.05. For n = 48 the rate
#   of both is the one of 3.3e-4, 1e-3 and 3e-3 with which RL4VLM with lambda 1 has the largest mean success on
#   seeds 10 to 12 (if that is the smallest or the largest, a third of it or three times it is tried too): so the
#   choice favours RL4VLM. Beside them, with the same rate: RL4VLM with lambda 0.5 and 0.2, and for n = 48, seeds
#   20 and 21, token_mean. VL-DAC keeps its own rate.
# * n = 48 counts if the toys of seeds 10 to 12, when they have been taught, parse 0.95 of their responses in the
#   mean and have 0.9 of true thoughts (before the words); and if in the mean of these seeds RL4VLM with this rate,
#   or VL-DAC, ends 0.2 above its first rate of training. Else n = 24 takes its place, with the same rates.
# * What is a detail worth? Each undone alone (undo.py, or an option), five runs, against fifteen in which nothing
#   is undone: VL-DAC, seeds 20 to 29, and `other-noise`, which only draws other random numbers, seeds 20 to 24.
#   p < 0.05 is a hint, and p < 0.05 with Holm's correction over all details a finding. Drawn from VL-DAC's ten
#   values, a loss of 0.2 has p < 0.05 in 78 % of the cases, one of 0.1 in 42 %, a gain of 0.1 in 50 %: "not
#   found" is no "of no use". `greedy` trains on other responses than an evaluation plays, so its success in the
#   200 episodes at the end is looked at instead, without a test.
# * Not run, as the toy cannot show them: one-norm (of the norms that VL-DAC logged with seeds 20 to 29 one is 5.6
#   and all others are below 0.3; they are clipped at 1), first-token (it has a probability above 0.999),
#   random-action (about 1 % of the responses do not parse).
#
# The third part, written when the five runs of each for n = 48 were known (p = 0.69): five more, seeds 25 to 29, of
# token_sum and of RL4VLM with lambda 1. Drawn from their values (the difference taken out), five against five find
# a difference of 0.2 with p < 0.05 in 30 % of the cases. As this is a second look, ten against ten count with
# p < 0.025.
#
# The fourth part, written when the runs of time-out-ignored in OneRoom were known: each of the five is better than all
# fifteen in which nothing is undone. Is it so elsewhere? Hallway and FourRooms, seeds 20 to 24, against VL-DAC's five
# there, by the same test. It is, where p < 0.05 with Holm's correction for two.
#
# The fifth part, written before the fourth was begun. Undoing two details seemed to help in OneRoom: time-out-ignored
# and no-warm-up. But that was found among twelve, and ten of the fifteen runs beside them are of another machine. So
# both once more with seeds 25 to 29, on one machine, against five of other-noise with these seeds, by the same test.
# An effect is there again, where p < 0.05 with Holm's correction for two.
#
# The sixth part, written before its runs, when all others were known: thoughts of 24 more words, seeds 20 and 21, with
# the rates of 48 words. Two runs each, so there is no test; they are to show how the ratios scatter in between.
#
# The seventh part, written before its runs, when all others were known: the three details that the second part left
# out, as the toy cannot show them. So nothing is expected of them, and they check the comparison itself. Five runs
# each, seeds 20 to 24, against the fifteen in which nothing is undone, by the same test, with Holm's correction for
# three. A finding here would cast doubt on those of the second part.
set -euo pipefail
cd "$(dirname "$0")/.."
cores=$(nproc) # before the next line, which nproc would obey
export OMP_NUM_THREADS=1
mkdir -p runs/compare
exec 9> runs/compare/lock
flock -n 9 || { echo "it is running already" >&2 && exit 1; } # also what a killed script has left running

last_line() { # FILE: the last one with words on it, also where a progress bar has overwritten lines
  tr '\r' '\n' < "$1" | grep '[^ ]' | tail -n 1
}
failed() { # NAME FILE: say why
  echo "$1 failed: $(last_line "$2")" >&2
  return 1
}
export -f last_line failed

run() { # NAME PROGRAM [DETAIL] OPTIONS...: into runs/compare/NAME, and what the tables need into assets/logs/NAME
  local name=$1 program=("$2")
  shift 2
  if [[ $1 != --* ]]; then # of undo.py
    program+=("$1")
    shift
  fi
  local folder=runs/compare/$name log=assets/logs/$name
  if [ -e "$log/log.jsonl" ]; then return; fi
  echo "$(date +%H:%M) $name"
  local options=(--runs_dir runs/compare --run_name "$name" "$@")
  if [ -e "$folder/args.json" ]; then
    options=(--resume "$folder") # it was stopped
  else
    rm -rf "$folder" # it was stopped before it was complete
  fi
  if ! python "${program[@]}" "${options[@]}" >> "$folder.txt" 2>&1; then
    # The messages of torch and json when a gradient, a distribution or a figure of the log is not finite.
    local not_finite="is non-finite, so it cannot be clipped|probability tensor contains|not JSON compliant"
    if ! last_line "$folder.txt" | grep -qE "$not_finite"; then failed "$name" "$folder.txt"; fi
    echo "$name was ended by NaN or infinity"
  fi
  python eval.py run "$folder" >> "$folder.txt" 2>&1 || failed "$name" "$folder.txt"
  mkdir -p "$log"
  cp -r "$folder/args.json" "$folder/eval" "$log"
  python - "$folder" "$log" << 'THIN'
import json, sys
from pathlib import Path

run, log = map(Path, sys.argv[1:])
with open(log / "unfinished", "w") as file:
    for line in (run / "log.jsonl").read_text().splitlines():
        row = {key: x for key, x in json.loads(line).items() if key not in ("samples", "episodes")}
        row = {key: round(x, 5) if isinstance(x, float) else x for key, x in row.items()}
        print(json.dumps(row), file=file)
(log / "unfinished").rename(log / "log.jsonl")
THIN
}
export -f run

play() { # WORLD PLAYER: 200 untrained episodes, into assets/results; start: of what seed 20 starts from
  local name=$1-$2 whose=(--env "$1")
  if [ -e "assets/results/$name.json" ]; then return; fi
  echo "$(date +%H:%M) $name"
  if [ "$2" = start ]; then whose=("runs/compare/$1-VL-DAC-20"); fi
  local words=runs/compare/$name.txt
  python eval.py "$2" "${whose[@]}" --out "runs/compare/$name.json" > "$words" 2>&1 || failed "$name" "$words"
  mkdir -p assets/results
  mv "runs/compare/$name.json" assets/results
}
export -f play

methods() { # a line each: NAME PROGRAM OPTIONS...
  for seed in {20..29}; do echo "OneRoom-VL-DAC-$seed vldac.py --env OneRoom --seed $seed"; done
  for seed in {20..29}; do
    echo "OneRoom-RL4VLM-0.5-$seed assets/rl4vlm.py --env OneRoom --seed $seed --thought_coef 0.5"
    echo "OneRoom-VL-DAC-KL-of-Eq-5-$seed vldac.py --env OneRoom --seed $seed --kl_ref old"
    echo "OneRoom-VL-DAC-no-KL-$seed vldac.py --env OneRoom --seed $seed --kl_coef 0"
    echo "OneRoom-LOOP-$seed assets/loop.py --env OneRoom --seed $seed"
  done
}

worlds() {
  for world in EZPoints Hallway FourRooms WallGap NumberLine; do
    for seed in {20..24}; do echo "$world-VL-DAC-$seed vldac.py --env $world --seed $seed"; done
  done
}

long="assets/filler.py --env OneRoom --words 48 --max_new_tokens 88"

tuning() {
  for seed in {10..12}; do
    echo "OneRoom-48-words-VL-DAC-$seed $long --seed $seed"
    for rate in 3.3e-4 1e-3 3e-3; do
      local name="OneRoom-48-words-RL4VLM-1.0-rate-$rate-$seed"
      echo "$name $long --seed $seed --ratio response --thought_coef 1.0 --learning_rate $rate"
    done
  done
}

long_thoughts() { # with the rate that the rule above gave
  local rate=1e-3
  for seed in {20..24}; do echo "OneRoom-48-words-VL-DAC-$seed $long --seed $seed"; done
  for seed in {20..24}; do
    echo "OneRoom-48-words-token-sum-$seed $long --seed $seed --ratio token_sum --learning_rate $rate"
    for lambda in 1.0 0.5 0.2; do
      local name="OneRoom-48-words-RL4VLM-$lambda-$seed"
      echo "$name $long --seed $seed --ratio response --thought_coef $lambda --learning_rate $rate"
    done
  done
  for seed in 20 21; do
    local options="$long --seed $seed --ratio token_mean --micro_batch_size 128 --learning_rate $rate"
    echo "OneRoom-48-words-token-mean-$seed $options"
  done
}

short_thoughts() { # of filler.py, which trains like vldac.py and rl4vlm.py and logs more; seeds 20 and 21 show it
  local short="assets/filler.py --env OneRoom"
  for seed in {20..24}; do
    echo "OneRoom-token-sum-$seed $short --seed $seed --ratio token_sum"
    for lambda in 1.0 0.2; do
      echo "OneRoom-RL4VLM-$lambda-$seed $short --seed $seed --ratio response --thought_coef $lambda"
    done
  done
  for seed in 20 21; do
    echo "OneRoom-0-words-VL-DAC-$seed $short --seed $seed"
    echo "OneRoom-0-words-RL4VLM-0.5-$seed $short --seed $seed --ratio response --thought_coef 0.5"
  done
}

details() {
  for detail in other-noise greedy time-out-ignored start-together not-normalised value-clipping \
    time-out-bootstrapped; do
    for seed in {20..24}; do echo "OneRoom-$detail-$seed assets/undo.py $detail --env OneRoom --seed $seed"; done
  done
  for seed in {20..24}; do
    echo "OneRoom-no-warm-up-$seed vldac.py --env OneRoom --seed $seed --value_warmup 0"
    echo "OneRoom-no-stop-gradient-$seed vldac.py --env OneRoom --seed $seed --stop_grad false"
    echo "OneRoom-constant-rate-$seed vldac.py --env OneRoom --seed $seed --final_learning_rate 1e-3"
    # Without normalisation the KL term has several times the weight, so once more beside VL-DAC-no-KL.
    local options="--env OneRoom --seed $seed --kl_coef 0"
    echo "OneRoom-not-normalised-no-KL-$seed assets/undo.py not-normalised $options"
  done
  for detail in drawn-anew fp16-head bf16-logprobs; do
    for seed in {20..24}; do echo "OneRoom-$detail-$seed assets/undo.py $detail --env OneRoom --seed $seed"; done
  done
}

more_long_thoughts() {
  for seed in {25..29}; do
    echo "OneRoom-48-words-token-sum-$seed $long --seed $seed --ratio token_sum --learning_rate 1e-3"
    local name="OneRoom-48-words-RL4VLM-1.0-$seed"
    echo "$name $long --seed $seed --ratio response --thought_coef 1.0 --learning_rate 1e-3"
  done
}

time_outs() {
  for world in Hallway FourRooms; do
    for seed in {20..24}; do
      echo "$world-time-out-ignored-$seed assets/undo.py time-out-ignored --env $world --seed $seed"
    done
  done
}

once_more() {
  for detail in other-noise time-out-ignored; do
    for seed in {25..29}; do echo "OneRoom-$detail-$seed assets/undo.py $detail --env OneRoom --seed $seed"; done
  done
  for seed in {25..29}; do
    echo "OneRoom-no-warm-up-$seed vldac.py --env OneRoom --seed $seed --value_warmup 0"
  done
}

words_24() {
  local options="assets/filler.py --env OneRoom --words 24 --max_new_tokens 64"
  for seed in 20 21; do echo "OneRoom-24-words-VL-DAC-$seed $options --seed $seed"; done
  for seed in 20 21; do
    echo "OneRoom-24-words-token-sum-$seed $options --seed $seed --ratio token_sum --learning_rate 1e-3"
    for lambda in 1.0 0.5 0.2; do
      local name="OneRoom-24-words-RL4VLM-$lambda-$seed"
      echo "$name $options --seed $seed --ratio response --thought_coef $lambda --learning_rate 1e-3"
    done
  done
}

details_left() {
  for detail in random-action first-token one-norm; do
    for seed in {20..24}; do echo "OneRoom-$detail-$seed assets/undo.py $detail --env OneRoom --seed $seed"; done
  done
}

plays() { # a line each: WORLD PLAYER
  for world in OneRoom EZPoints Hallway FourRooms WallGap NumberLine; do
    for player in random hint start; do echo "$world $player"; done
  done
}

# What fails is reported and tried again next time; the rest goes on, and the script ends with an error.
on_every_core() { xargs -P "$cores" -L 1 bash -euo pipefail -c "$1"' "$@"' "$1"; }
status=0
methods | on_every_core run || status=1
worlds | on_every_core run || status=1
plays | on_every_core play || status=1
tuning | on_every_core run || status=1
long_thoughts | on_every_core run || status=1
short_thoughts | on_every_core run || status=1
details | on_every_core run || status=1
more_long_thoughts | on_every_core run || status=1
time_outs | on_every_core run || status=1
once_more | on_every_core run || status=1
words_24 | on_every_core run || status=1
details_left | on_every_core run || status=1
exit $status
