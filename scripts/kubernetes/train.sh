#!/usr/bin/env bash
# One machine's part of a run, in a pod that may be replaced at any time:
#   train.sh NODES NODE_RANK HOST:PORT RUN_DIR [words of lockstep-gpt train]
# HOST is machine 0; RUN_DIR is a folder that all pods share.
set -euo pipefail
nodes=$1 node_rank=$2 endpoint=$3 run=$4
shift 4
read -ra command <<< "${TRAIN_COMMAND:-lockstep-gpt}"

# A pod's name can be resolved in the cluster only once the pod has an address.
for ((seconds = 0; seconds < 600; seconds++)); do
    if getent ahosts "${endpoint%:*}" > /dev/null; then break; fi
    sleep 1
done
if [ -e "$run/config.yaml" ]; then # the run's settings are frozen in it; a new pod changes none
    set -- resume=auto
fi
exec "${command[@]}" train "$@" "run_dir=$run" "trainer.num_nodes=$nodes" \
    "launch.node_rank=$node_rank" "launch.rdzv_endpoint=$endpoint"
