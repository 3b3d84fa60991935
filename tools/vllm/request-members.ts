import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { vllmRequests } from "@kv/protocol";
import { readWire } from "../../packages/peer/src/wire/read-wire.js";

// Writes what clients' requests may contain into vllm-requests.json, for each wheel or tree of vLLM that is given; other releases stay as they are.
//   node --import tsx tools/vllm/request-members.ts ~/.cache/kv-peer/vllm33

const file = new URL("../../packages/protocol/src/versions/vllm-requests.json", import.meta.url);
const releases = new Map(vllmRequests());
for (const path of process.argv.slice(2)) {
  const { vllm, requests } = await readWire(path);
  if (vllm === null || requests === null) throw new Error(`${path} has no version or no API server`);
  releases.set(vllm, requests);
}
const sorted = [...releases].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
const written = sorted.map(([release, parts]) => [
  release,
  Object.fromEntries(Object.entries(parts).map(([part, names]) => [part, names.join(" ")])),
]);
writeFileSync(fileURLToPath(file), `${JSON.stringify(Object.fromEntries(written), null, 2)}\n`);
