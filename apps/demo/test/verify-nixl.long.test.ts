// A long suite: runs kv-peer verify over NIXL; verify-memory.long.test.ts and
// packages/peer/test/verify.long.test.ts have its checks.
import { startFaultyFront } from "@kv/testing/http/faulty-front";
import { afterEach, describe, expect, it, vi } from "vitest";
import { verifyPair } from "../../../packages/peer/test/run-kv-peer.js";
import { expectShown } from "../../../tools/docs/expect-shown.js";
import { masked, type PageOutput, pageOutputs } from "../../../tools/docs/page-outputs.js";
import { readPages } from "../../../tools/site/pages.js";
import type { Cluster } from "../src/cluster/cluster.js";
import { complete } from "../src/run/completion-client.js";
import { startPair } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";

// The outputs in docs/operate/verify.md are what the command prints here; -u writes them.

const absence = await nixlAbsence();
const [good, recomputes] = pageOutputs(readPages().pages).filter(
  ({ page }) => page === "docs/operate/verify.md",
) as [PageOutput, PageOutput];

let cluster: Cluster | undefined;
afterEach(async () => {
  await cluster?.close();
  cluster = undefined;
});

/** Two demo instances in processes of their own, whose UCX may use only `tls`. */
async function start(tls: string | undefined) {
  vi.stubEnv("UCX_TLS", tls);
  try {
    cluster = await startPair({ transport: "nixl", leaseSeconds: 600 });
  } finally {
    vi.unstubAllEnvs();
  }
  const { proxy, prefills, decodes } = cluster;
  const [prefill, decode] = [prefills[0]?.url ?? "", decodes[0]?.url ?? ""];
  await complete({ url: proxy.url, requestId: "first", promptTokens: [7, 8, 9], maxTokens: 1 });
  return { proxy: proxy.url, prefill, decode };
}

const verify = (front: string, servers: { prefill: string; decode: string }) =>
  verifyPair(front, servers, "--requests 4");

describe.skipIf(absence !== undefined)(
  `kv-peer verify over NIXL${absence === undefined ? "" : ` (${absence})`}`,
  () => {
    it("a good pair passes: READ by D, within the host, blocks freed, equal tokens; the same engines fail behind a front end that makes D recompute", async () => {
      const servers = await start(undefined);
      const passed = await verify(servers.proxy, servers);
      expect(passed.stdout).toMatch(/^ok {4}KV moved .* 4 of 4 prompts: .* READ by D/m);
      expect(passed.stdout).toMatch(/^ok {4}lane .* best that both hosts have: shared memory/m);
      expect(passed.code).toBe(0);
      await expectShown(good, passed.stdout, masked);

      const front = await startFaultyFront(servers, "decode-alone");
      const failed = await verify(front.url, servers).finally(() => front.close());
      expect(failed).toMatchObject({ code: 1, verdict: "transfer.recomputed" });
      await expectShown(recomputes, failed.stdout, masked);
    }, 240_000);

    it("vllm#52607: a pair that is forced to TCP on one host fails with that name", async () => {
      const servers = await start("tcp,self");
      const tcp = await verify(servers.proxy, servers);
      expect(tcp).toMatchObject({ code: 1, verdict: "lane.tcp-on-one-host" });
    }, 240_000);
  },
);
