#!/usr/bin/env bash
# Every training run behind the tables and figures, two at a time, on two cores:  bash assets/compare.sh
# A run that is finished is skipped and one that was stopped goes on, so this can be started again at any time.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

run() { # NAME PROGRAM OPTIONS...: into runs/compare/NAME, and its log without samples into assets/logs/NAME
  local name=$1 program=$2
  shift 2
  local folder=runs/compare/$name
  if [ -e "assets/logs/$name/log.jsonl" ]; then return; fi
  mkdir -p runs/compare
  echo "$(date +%H:%M) $name"
  local options=(--runs_dir runs/compare --run_name "$name" "$@")
  if [ -e "$folder/args.json" ]; then options=(--resume "$folder"); fi # it was stopped
  if ! python "$program" "${options[@]}" >> "$folder.txt" 2>&1; then
    echo "$name failed: $(tail -n 1 "$folder.txt")" >&2
    return 1
  fi
  python - "$folder" "assets/logs/$name" << 'THIN'
import json, sys
from pathlib import Path

run, log = Path(sys.argv[1]), Path(sys.argv[2])
log.mkdir(parents=True, exist_ok=True)
(log / "args.json").write_text((run / "args.json").read_text())
with open(log / "log.jsonl", "w") as file:
    for line in (run / "log.jsonl").read_text().splitlines():
        row = {key: x for key, x in json.loads(line).items() if key not in ("samples", "episodes")}
        row = {key: round(x, 5) if isinstance(x, float) else x for key, x in row.items()}
        print(json.dumps(row), file=file)
THIN
}
export -f run

play() { # WORLD PLAYER WORDS...: 200 episodes of an evaluation, into assets/results
  local out="assets/results/$1-$2.json"
  if [ -e "$out" ]; then return; fi
  echo "$(date +%H:%M) $out"
  local words
  if ! words=$(python eval.py "$2" "${@:3}" --out "$out" 2>&1); then
    echo "$out failed: $(tail -n 1 <<< "$words")" >&2
    return 1
  fi
}
export -f play

plays() { # a line each: WORLD PLAYER WORDS...
  for world in OneRoom Hallway NumberLine EZPoints FourRooms WallGap; do
    for player in random hint; do echo "$world $player --env $world"; done
  done
  for world in OneRoom Hallway NumberLine EZPoints; do
    for player in start run; do echo "$world $player runs/compare/$world-VL-DAC-0"; done
  done
}

results() { # a line each: NAME PROGRAM OPTIONS..., VL-DAC as it comes
  for world in OneRoom Hallway NumberLine EZPoints; do
    for seed in 0 1 2; do echo "$world-VL-DAC-$seed vldac.py --env $world --seed $seed"; done
  done
}

comparisons() {
  # Which KL, and LOOP.
  for seed in 0 1 2; do
    echo "OneRoom-VL-DAC-KL-to-sampling-policy-$seed vldac.py --env OneRoom --seed $seed --kl_ref old"
    echo "OneRoom-VL-DAC-no-KL-$seed vldac.py --env OneRoom --seed $seed --kl_coef 0"
  done
  for seed in 0 1 2; do echo "OneRoom-LOOP-$seed assets/loop.py --env OneRoom --seed $seed"; done
  # The two harder rooms of the paper's Figure 3.
  for world in FourRooms WallGap; do
    for seed in 0 1 2; do echo "$world-VL-DAC-$seed vldac.py --env $world --seed $seed"; done
  done
  # RL4VLM.
  for world in OneRoom Hallway EZPoints; do
    for seed in 0 1 2; do
      echo "$world-RL4VLM-0.5-$seed assets/rl4vlm.py --env $world --seed $seed --thought_coef 0.5"
    done
  done
  for seed in 0 1 2; do
    echo "OneRoom-RL4VLM-0.2-$seed assets/rl4vlm.py --seed $seed --thought_coef 0.2"
    echo "OneRoom-RL4VLM-1.0-$seed assets/rl4vlm.py --seed $seed --thought_coef 1.0"
  done
  # The paper's Figure 4: RL4VLM with VL-DAC's ingredients, one more each.
  for seed in 0 1 2; do
    local rl4vlm="assets/rl4vlm.py --seed $seed --thought_coef 0.3"
    echo "OneRoom-RL4VLM-0.3-bare-$seed $rl4vlm --stop_grad false --value_warmup 0 --kl_coef 0"
    echo "OneRoom-RL4VLM-0.3-KL-$seed $rl4vlm --stop_grad false --value_warmup 0"
    echo "OneRoom-RL4VLM-0.3-KL-warmup-$seed $rl4vlm --stop_grad false"
    echo "OneRoom-RL4VLM-0.3-KL-warmup-stopgrad-$seed $rl4vlm"
  done
}

# What fails is told and tried again next time; the rest goes on, and the script ends with an error.
failed=0
results | xargs -P 2 -L 1 bash -c 'run "$@"' run || failed=1
plays | xargs -P 2 -L 1 bash -c 'play "$@"' play || failed=1
comparisons | xargs -P 2 -L 1 bash -c 'run "$@"' run || failed=1
exit $failed
