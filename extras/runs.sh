#!/usr/bin/env bash
# Every training run behind the pages, one on each core:  bash extras/runs.sh
# What is finished is skipped and what was stopped goes on, so it can be started again after any stop.
#
# The rules, written before the first of these runs:
# * The settings were found on seeds 10 to 19 and older ones. Nobody has looked at seeds 40 to 49.
# * OneRoom, seeds 40 to 49: VL-DAC, RL4VLM (lambda 0.5) and LOOP. The other worlds, seeds 40 to 44: VL-DAC.
#   The default options, but 200 episodes in each evaluation.
# * The primary figure is success averaged over the run (Curve.mean in eval.py). RL4VLM and LOOP are each tested
#   against VL-DAC by the exact rank-sum test; of two tests, a p below 0.025 counts.
#   `python eval.py methods docs/logs/OneRoom-{VL-DAC,RL4VLM,LOOP}-*` computes it.
# * Every seed is reported. After a failure of one of them nothing is changed.
set -euo pipefail
cd "$(dirname "$0")/.."
cores=$(env -u OMP_NUM_THREADS nproc) # nproc would obey that variable
export OMP_NUM_THREADS=1
mkdir -p runs/final docs/logs

run() { # NAME PROGRAM OPTIONS...: into runs/final/NAME, and what the pages need into docs/logs/NAME.jsonl
  local name=$1 program=$2 folder=runs/final/$1 log=docs/logs/$1.jsonl
  shift 2
  if [ -e "$log" ]; then return; fi
  echo "$(date +%H:%M) $name"
  local options=(--run_name "$name" --runs_dir runs/final --eval_episodes 200 --device cpu "$@")
  if [ -e "$folder/args.json" ]; then
    options=(--resume "$folder") # it was stopped
  else
    rm -rf "$folder" # it was stopped before it was complete
  fi
  if ! python "$program" "${options[@]}" >> "$folder.txt" 2>&1; then
    echo "$name failed: $(tail -n 1 "$folder.txt")" >&2
    return 1
  fi
  python - "$folder" "$log" << 'THIN'
import json, sys
from pathlib import Path

run, log = map(Path, sys.argv[1:])
options = json.loads((run / "args.json").read_text()) | {"runs_dir": "runs"}
kept = ["update", "global_step", "charts/success_rate", "charts/invalid_action_rate", "losses/kl_base"]
lines = [json.dumps(options)]
for line in (run / "log.jsonl").read_text().splitlines():
    row = json.loads(line)
    thin = {key: x for key, x in row.items() if key in kept or key.startswith("eval/")}
    lines.append(json.dumps({key: round(x, 5) if isinstance(x, float) else x for key, x in thin.items()}))
unfinished = log.with_suffix(".tmp")
unfinished.write_text("\n".join(lines) + "\n")
unfinished.rename(log)
THIN
}
export -f run

runs() { # a line each: NAME PROGRAM OPTIONS...
  for seed in {40..49}; do
    echo "OneRoom-VL-DAC-$seed vldac.py --env OneRoom --seed $seed"
    echo "OneRoom-RL4VLM-$seed extras/rl4vlm.py --env OneRoom --seed $seed --thought_coef 0.5"
    echo "OneRoom-LOOP-$seed extras/loop.py --env OneRoom --seed $seed"
  done
  for world in Hallway FourRooms WallGap EZPoints NumberLine; do
    for seed in {40..44}; do echo "$world-VL-DAC-$seed vldac.py --env $world --seed $seed"; done
  done
}

# What fails is reported and tried again next time; the rest goes on, and the script ends with an error.
runs | xargs -P "$cores" -L 1 bash -euo pipefail -c 'run "$@"' run
