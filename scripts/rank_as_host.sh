#!/usr/bin/env bash
# Runs a command as one rank of several that share one GPU over NCCL, each as if it were alone on its host:
#
#   torchrun --standalone --nproc-per-node 2 --no-python bash scripts/rank_as_host.sh python pretrain_gpt.py FLAGS...
#
# NCCL refuses two ranks of one host on the same GPU ("Duplicate GPU detected"). NCCL compares host hashes, which it
# takes from NCCL_HOSTID if that is set. This script gives each rank its own NCCL_HOSTID, so that messages use sockets
# on the loopback interface. That is slow, but the library, its streams, its launch order and its errors are the same as
# on a cluster.
set -euo pipefail
: "${RANK:?is unset: start this by torchrun}"
export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK="$RANK"
export NCCL_HOSTID="rank-$RANK" NCCL_SOCKET_IFNAME=lo NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1
export NCCL_MAX_NCHANNELS="${NCCL_MAX_NCHANNELS:-1}" # kernels of all ranks wait for each other on one GPU
exec "$@"
