#!/usr/bin/env bash
# Every training run behind the tables and figures, two at a time, on two cores:  bash assets/compare.sh
# A run that is finished is skipped and one that was stopped goes on, so this can be started again at any time.
#
# Written before the first of these runs, and not changed after it:
# * The settings were found on seeds 0 to 14. Nobody has looked at seeds 20 to 29. All of them are reported.
# * OneRoom, ten seeds, VL-DAC and four others. The primary figure is the mean success from step 0 to the budget
#   (Curve.mean of eval.py). Each of the four is tested against VL-DAC by the exact two-sided sign-flip test over
#   the ten pairs of equal seed, with Holm's correction for four tests. The interval of the mean difference comes
#   from inverting the test. Without a test: success, parsed responses and true thoughts in the 200 episodes at
#   the end. `python eval.py methods VL-DAC assets/logs/OneRoom-*-2?` computes all of this.
# * The paper's worlds and NumberLine, five seeds, the default options. Every seed is shown; there is no test.
# * A run that NaN or infinity ends is a result: its last rate and its last weights count.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

failed() { # NAME FILE: the last line of what was printed
  echo "$1 failed: $(tail -n 1 "$2")" >&2
  return 1
}
export -f failed

run() { # NAME PROGRAM OPTIONS...: into runs/compare/NAME, and what the tables need into assets/logs/NAME
  local name=$1 program=$2
  shift 2
  local folder=runs/compare/$name log=assets/logs/$name
  if [ -e "$log/log.jsonl" ]; then return; fi
  mkdir -p runs/compare
  echo "$(date +%H:%M) $name"
  local options=(--runs_dir runs/compare --run_name "$name" "$@")
  if [ -e "$folder/args.json" ]; then options=(--resume "$folder"); fi # it was stopped
  if ! python "$program" "${options[@]}" >> "$folder.txt" 2>&1; then
    # The messages of torch and json when a gradient, a distribution or a figure of the log is not finite.
    local not_finite="is non-finite, so it cannot be clipped|probability tensor contains|not JSON compliant"
    if ! tail -n 1 "$folder.txt" | grep -qE "$not_finite"; then failed "$name" "$folder.txt" || return; fi
    echo "$name was ended by NaN or infinity"
  fi
  python eval.py run "$folder" >> "$folder.txt" 2>&1 || failed "$name" "$folder.txt" || return
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

play() { # WORLD PLAYER: 200 episodes of a player without a model, into assets/results
  local out=assets/results/$1-$2.json words=runs/compare/$1-$2.txt
  if [ -e "$out" ]; then return; fi
  mkdir -p runs/compare
  echo "$(date +%H:%M) $out"
  python eval.py "$2" --env "$1" --out "$out" > "$words" 2>&1 || failed "$out" "$words"
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

plays() { # a line each: WORLD PLAYER
  for world in OneRoom EZPoints Hallway FourRooms WallGap NumberLine; do
    for player in random hint; do echo "$world $player"; done
  done
}

# What fails is told and tried again next time; the rest goes on, and the script ends with an error.
status=0
methods | xargs -P 2 -L 1 bash -c 'run "$@"' run || status=1
worlds | xargs -P 2 -L 1 bash -c 'run "$@"' run || status=1
plays | xargs -P 2 -L 1 bash -c 'play "$@"' play || status=1
exit $status
