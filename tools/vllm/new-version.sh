#!/usr/bin/env bash
# What does the newest vLLM (or the one whose version is given) change? Fails when its wire, the checks of its connector, or the caches that its code gives to the
# models of tools/conformance/fixtures differ from what is described here. The nightly workflow runs it.
# Needs Linux x86_64, Python 3.11 or newer with venv, gcc and 15 GB; neither a GPU nor weights. Takes about half an hour.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${KV_PEER_DIR:-$HOME/.cache/kv-peer}/new-${1:-version}
mkdir -p "$folder/configs"
cd "$folder"
[ -x venv/bin/python ] || python3 -m venv venv
venv/bin/pip install -q --upgrade "vllm${1:+==$1}"
site=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
code=0
(cd "$root" && npm run -s kv-peer -- wire "$site") || code=1

node --input-type=module - "$root/tools/conformance/fixtures/models.jsonl.gz" <<'J'
import { readFileSync, writeFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
const [first] = gunzipSync(readFileSync(process.argv[2])).toString().split("\n", 1);
for (const [name, config] of Object.entries(JSON.parse(first).configs)) writeFileSync(`configs/${name}`, JSON.stringify(config));
J
venv/bin/python "$root/tools/vllm/cache_specs.py" --tp 2 --kv-cache-dtype auto,fp8 configs/*.json >models.jsonl
(cd "$root" && npm run -s conformance -- "$folder/models.jsonl") || code=1
exit $code
