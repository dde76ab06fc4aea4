#!/usr/bin/env bash
# One node of a job: run it on every node, with the same HEAD, NODES and JOB.
#
#     HEAD=node0 NODES=4 examples/launch/torchrun.sh examples/train_gpt.py --out /shared/run
#
#     HEAD      a node that runs this script, too: it keeps the list of nodes
#     NODES     the number of nodes, "4", or a range: "2:4"
#     RANKS     processes of this node (default: one for each GPU)
#     RESTARTS  how often the workers may be started anew (default: 10)
#     PORT, JOB the rendezvous (default: 29400, train)
#     PYTHON    the interpreter (default: python)
#
# torchrun reads its other options from the environment: PET_RDZV_CONF, PET_LOCAL_ADDR, ...
# docs/clusters.md says what happens when a worker or a node dies.
set -uo pipefail

# torch 2.13 keeps one store over restarts. New workers would read the addresses of dead workers in
# it, and every restart would fail with "Connection refused".
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# USR1 is for the workers, which save and end. torchrun would die of it.
(
    trap '' USR1
    exec "${PYTHON:-python}" -m torch.distributed.run \
        --rdzv-backend c10d \
        --rdzv-endpoint "${HEAD:?expected a node name}:${PORT:-29400}" \
        --rdzv-id "${JOB:-train}" \
        --nnodes "${NODES:?expected a number of nodes}" \
        --nproc-per-node "${RANKS:-gpu}" \
        --max-restarts "${RESTARTS:-10}" \
        "$@"
) &
agent=$!
trap 'pkill -USR1 -P "$agent"' USR1
trap 'kill -TERM "$agent"' TERM INT

# A signal ends a wait.
while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
wait "$agent"
