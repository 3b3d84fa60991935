import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { vllmRequests } from "@kv/protocol";
import { checkDigest } from "../../packages/peer/src/wire/compare-wire.js";
import { readWire } from "../../packages/peer/src/wire/read-wire.js";
import { writeChecks } from "./connector-checks.js";

// Writes what clients' requests may contain into vllm-requests.json, and the checks of the
// connector into vllm-checks.json of kv-peer and fixtures/connector-checks.tsv, for each wheel or
// tree of vLLM that is given; other releases stay as they are.
//   node --import tsx tools/vllm/request-members.ts ~/.cache/kv-peer/vllm33

const file = new URL("../../packages/protocol/src/versions/vllm-requests.json", import.meta.url);
const checksFile = new URL("../../packages/peer/src/wire/vllm-checks.json", import.meta.url);
const allChecks = JSON.parse(readFileSync(checksFile, "utf8")) as Record<string, string>;
const releases = new Map(vllmRequests());
for (const path of process.argv.slice(2)) {
  const { vllm, requests, checks } = await readWire(path);
  if (vllm === null || requests === null)
    throw new Error(`${path} has no version or no API server`);
  releases.set(vllm, requests);
  allChecks[vllm] = [...new Set(checks.map(checkDigest))].sort().join(" ");
  writeChecks(vllm, checks);
}
const sorted = [...releases].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
const written = sorted.map(([release, parts]) => [
  release,
  Object.fromEntries(Object.entries(parts).map(([part, names]) => [part, names.join(" ")])),
]);
writeFileSync(fileURLToPath(file), `${JSON.stringify(Object.fromEntries(written), null, 2)}\n`);
writeFileSync(checksFile, `${JSON.stringify(allChecks, null, 2)}\n`);
