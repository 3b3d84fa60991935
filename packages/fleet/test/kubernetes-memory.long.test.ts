// A long suite: measures memory over many events.
import { execFile } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { bundled } from "@kv/testing/node-programs";
import { afterEach, expect, test } from "vitest";

const PODS = 10_000;
const MAX_MIB = 100;

const folders: string[] = [];
afterEach(() => {
  for (const folder of folders.splice(0)) rmSync(folder, { recursive: true });
});

/** A pod with a specification and a status as long as those of vLLM's pods. */
function pod(at: number): object {
  const env = Array.from({ length: 40 }, (_, n) => ({
    name: `VLLM_SETTING_${n}`,
    value: `value ${n} of pod ${at}`,
  }));
  const managedFields = Array.from({ length: 4 }, (_, n) => ({
    manager: `manager-${n}`,
    fieldsV1: Object.fromEntries(Array.from({ length: 20 }, (_, m) => [`f:field-${n}-${m}`, {}])),
  }));
  const ip = `10.${at >> 16}.${(at >> 8) & 255}.${at & 255}`;
  return {
    metadata: {
      uid: `uid-${at}`,
      name: `vllm-${at}`,
      resourceVersion: String(at),
      labels: { app: "vllm", "llm-d.ai/role": at % 2 === 0 ? "prefill" : "decode", revision: "7f" },
      managedFields,
    },
    spec: { containers: [{ name: "vllm", env, ports: [{ name: "http", containerPort: 8000 }] }] },
    status: { podIP: ip, podIPs: [{ ip }], conditions: [{ type: "Ready", status: "True" }] },
  };
}

test(`${PODS} pods take less than ${MAX_MIB} MiB`, async () => {
  let sentBytes = 0;
  const server = createServer((request, response) => {
    const { searchParams: query } = new URL(request.url ?? "", "http://x");
    // The child ends its watch.
    if (query.get("watch") === "true") return;
    const from = Number(query.get("continue") ?? "0");
    const to = Math.min(from + Number(query.get("limit")), PODS);
    const items = Array.from({ length: to - from }, (_, at) => pod(from + at));
    const metadata = { resourceVersion: "1", continue: to < PODS ? String(to) : "" };
    const body = JSON.stringify({ metadata, items });
    sentBytes += body.length;
    response.end(body);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const folder = mkdtempSync(join(tmpdir(), "kv-pods-"));
  folders.push(folder);
  const { port } = server.address() as AddressInfo;
  const cluster = { server: `http://127.0.0.1:${port}`, "insecure-skip-tls-verify": true };
  const config = {
    clusters: [{ name: "c", cluster }],
    users: [{ name: "u", user: {} }],
    contexts: [{ name: "x", context: { cluster: "c", user: "u" } }],
    "current-context": "x",
  };
  const kubeconfig = join(folder, "config");
  writeFileSync(kubeconfig, JSON.stringify(config));
  const script = await bundled(join(import.meta.dirname, "follow-pods.ts"));
  // Node 24 has a larger young generation than Node 20. What counts is what the list needs, not
  // what V8 may let lie.
  const args = ["--max-semi-space-size=16", script, kubeconfig];
  const { stdout } = await promisify(execFile)(process.execPath, args);
  server.close();
  const { found, beforeMib, afterMib, durationMs } = JSON.parse(stdout) as {
    [name in "found" | "beforeMib" | "afterMib" | "durationMs"]: number;
  };
  console.log(
    `${found} pods, ${Math.round(sentBytes / 2 ** 20)} MiB of JSON: ${Math.round(durationMs)} ms, ${Math.round(afterMib - beforeMib)} MiB more than ${Math.round(beforeMib)} MiB before`,
  );
  expect(found).toBe(PODS);
  expect(afterMib - beforeMib).toBeLessThan(MAX_MIB);
}, 60_000);
