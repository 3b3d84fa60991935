#!/usr/bin/env bash
# Serves the tiny model with vLLM on the CPU, in the foreground, until it is ended.
# usage: serve.sh HTTP_PORT SIDE_PORT CONNECTOR BLOCKS TP EXTRA_CONFIG_JSON [vllm arguments…]
#   PEER_VLLM=0.31|0.32|0.33 (default 0.33). UCX goes over tcp on loopback.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
peer=${KV_PEER_DIR:-$HOME/.cache/kv-peer}
http_port=$1 side_port=$2 connector=$3 blocks=$4 tp=$5 extra=$6
shift 6
tree=""
[ "${PEER_VLLM:-0.33}" = 0.33 ] && tree=:$peer/vllm33
[ "${PEER_VLLM:-0.33}" = 0.31 ] && tree=:$peer/vllm31:$peer/nixl14
# Without .pyc files every vLLM process would compile vLLM's Python files again, which takes a minute.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$here/hook$tree VLLM_TARGET_DEVICE=cpu VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1
export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$side_port
# --enforce-eager compiles no model. Without this setting every process would still compile small functions with g++.
export TORCHDYNAMO_DISABLE=1
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} OMP_NUM_THREADS=1 UCX_TLS=${UCX_TLS:-tcp,self} UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo} UCX_RCACHE_MAX_UNRELEASED=1024
# With NIXL 1.5.0 a waiting peer sometimes does not notice a read that arrived over tcp. UCX's keepalive wakes it, by default after 20 s.
export UCX_KEEPALIVE_INTERVAL=${UCX_KEEPALIVE_INTERVAL:-1s}
# The compatibility hash contains the model's path as given. Relative to the peer's folder the path is "tiny-qwen3" on every machine.
cd "$peer"
exec vv/bin/python -m vllm.entrypoints.openai.api_server --model tiny-qwen3 --served-model-name tiny --host 127.0.0.1 --port "$http_port" \
  --dtype float32 --enforce-eager --max-model-len 1024 --block-size 32 --num-gpu-blocks-override "$blocks" \
  --kv-cache-memory-bytes 134217728 --max-num-seqs 8 --tensor-parallel-size "$tp" \
  --kv-transfer-config "{\"kv_connector\":\"$connector\",\"kv_role\":\"kv_both\",\"kv_buffer_device\":\"cpu\",\"kv_connector_extra_config\":$extra}" "$@"
