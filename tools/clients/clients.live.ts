import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { startUpstream } from "@kv/testing/http/fake-upstream";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { withoutIdentity } from "../vllm/boundary-cases.js";
import { argumentsOf, proxyPair } from "../vllm/proxy-pair.js";
import { startVllm } from "../vllm/server.js";
import { askAll } from "./all-clients.js";
import { startProxyFront } from "./fronts.js";
import { type LinePeer, startClients } from "./python.js";
import { RECORDED, Recordings } from "./recorded.js";

let python: LinePeer;
beforeAll(async () => {
  python = await startClients();
});
afterAll(() => python?.close());

/** `1`, or the URL of a server that runs with `argumentsOf`. */
const record = process.env["KV_RECORD"];
const isRecording = record !== undefined;

test.runIf(isRecording)("vLLM's answers are recorded", async () => {
  const folder = mkdtempSync(join(tmpdir(), "kv-clients-"));
  const kind = { version: "0.33", mode: "pull" } as const;
  const server =
    record === "1"
      ? await startVllm({ kind, name: "recorded", blocks: 800, args: argumentsOf(folder) })
      : { url: record ?? "", stop: async () => {} };
  rmSync(RECORDED, { force: true });
  const recordings = new Recordings();
  const recorder = await startUpstream(recordings.recorder(server.url));
  const front = await startProxyFront("pull", recorder.url, recorder.url);
  try {
    await askAll(recorder.url, python);
    await askAll(front.url, python);
  } finally {
    await front.close();
    await recorder.close();
    await server.stop();
    rmSync(folder, { recursive: true });
  }
});

describe.skipIf(isRecording).each(["pull", "push"] as const)("vLLM 0.33, %s", (mode) => {
  const pair = proxyPair({ version: "0.33", mode }, { mode });

  test("what clients make of answers is what they make of those of vLLM alone", async () => {
    const { url } = await pair.proxied();
    const ours = await askAll(url, python);
    expect(withoutIdentity(ours)).toEqual(withoutIdentity(await askAll(pair.d.url, python)));
    await pair.freed();
  });
});
