// A long suite: runs kv-peer verify against the demo.
import { EngineServer, verify } from "@kv/peer";
import { sendJson, startUpstream } from "@kv/testing/http/fake-upstream";
import { type FrontFault, startFaultyFront } from "@kv/testing/http/faulty-front";
import { isLongRun } from "@kv/testing/long-run";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type { Cluster } from "../src/cluster/cluster.js";
import { complete } from "../src/run/completion-client.js";
import { startPair } from "./support/matrix.js";
import { post } from "./support/memory-pair.js";

// kv-peer verify against the demo's engines: /metrics with vLLM's names, kv-proxy or a faulty front
// end in front. test/verify-nixl.long.test.ts has the command.

describe.each(["NixlConnector", "push"] as const)("verify with %s", (connector) => {
  // The faults are the front end's, whatever the connector.
  const fault = test.runIf(isLongRun || connector === "NixlConnector");
  let cluster: Cluster;
  const servers = () => {
    const [prefill, decode] = [cluster.prefills[0]?.url, cluster.decodes[0]?.url];
    if (prefill === undefined || decode === undefined) throw new Error("no instances were started");
    return { prefill, decode };
  };
  beforeAll(async () => {
    // The lease is far longer than a test waits: blocks that are freed were released.
    cluster = await startPair({ connector, leaseSeconds: 600 });
    await complete({
      url: cluster.proxy.url,
      requestId: "first",
      promptTokens: [7, 8, 9],
      maxTokens: 1,
    });
  });
  afterAll(() => cluster.close());

  async function verified(front: string, more: { reference?: string; promptTokens?: number } = {}) {
    const { prefill, decode } = servers();
    const { verdict, checks } = await verify({
      front: new EngineServer(front),
      prefill: [new EngineServer(prefill)],
      decode: [new EngineServer(decode)],
      reference: new EngineServer(more.reference ?? prefill),
      requests: 2,
      countedWithinMs: 300,
      promptTokens: more.promptTokens ?? 100,
      freeWithinMs: 600,
      // What the bytes crossed is for test/verify-nixl.long.test.ts.
      lane: undefined,
    });
    const check = (id: string) => checks.find((each) => each.id === id);
    const failed = checks.filter(({ status }) => status === "fail").map(({ id }) => id);
    return { verdict, check, failed };
  }
  async function through(what: FrontFault, more?: Parameters<typeof verified>[1]) {
    const front = await startFaultyFront(servers(), what);
    try {
      return await verified(front.url, more);
    } finally {
      await front.close();
    }
  }

  test("a pair that moves KV: for how many prompts, how many bytes, READ or WRITE, blocks freed, the tokens of one engine", async () => {
    const { verdict, check, failed } = await verified(cluster.proxy.url);
    expect({ verdict, failed }).toEqual({ verdict: "ok", failed: [] });
    const how = connector === "push" ? "WRITTEN by P" : "READ by D";
    // 7 blocks of 16 tokens, 64 KiB each.
    expect(check("transfer.moved")?.found).toMatch(
      new RegExp(
        `^2 of 2 prompts: 917,504 bytes in \\d+ transfers, ${how}; D computed \\d+ of 200 prompt tokens$`,
      ),
    );
    expect(check("tokens.equal")?.found).toMatch(
      /^2 of 2 prompts have the answer of http\S+ alone$/,
    );
    for (const side of ["prefill", "decode"])
      expect(check(`blocks.${side}-freed`)?.status).toBe("ok");
  });

  fault("tokens that are not those of the reference fail, with the first difference", async () => {
    const models = { data: [{ id: "other" }] };
    const answer = { choices: [{ token_ids: [1, 2], text: "" }] };
    const other = await startUpstream(({ path, response }) =>
      sendJson(response, path === "/v1/models" ? models : answer),
    );
    const { failed, check } = await verified(cluster.proxy.url, { reference: other.url });
    await other.close();
    expect(failed).toEqual(["tokens.differ"]);
    expect(check("tokens.differ")?.found).toMatch(
      /^2 of 2 prompts have another answer than http\S+ alone: token 0 is \d+ and not 1$/,
    );
  });

  fault(
    "a front end that asks D alone: D recomputes, though every answer is right and 200",
    async () => {
      const { failed, check } = await through("decode-alone");
      expect(failed).toEqual(["transfer.recomputed"]);
      expect(check("requests.answered")?.status).toBe("ok");
      expect(check("tokens.equal")?.status).toBe("ok");
      expect(check("transfer.recomputed")).toMatchObject({
        found:
          "2 of 2 prompts: no KV moved; D computed 200 of 200 prompt tokens itself (kserve/kserve#5987)",
        fix: expect.stringContaining("no prefill server that was given counted a prompt"),
      });
    },
  );

  fault("kserve#5987: P computes, D computes again, and the reason is named", async () => {
    const { failed, check } = await through("drops-params");
    expect(failed).toEqual(["transfer.recomputed", "blocks.prefill-leaked"]);
    expect(check("transfer.recomputed")?.fix).toMatch(/does not hand them to D$/);
  });

  test.runIf(connector === "NixlConnector")(
    "a front end that repeats the prefill leg: KV moves, and P leaks",
    async () => {
      const { failed, check } = await through("prefill-twice");
      expect(failed).toEqual(["blocks.prefill-leaked"]);
      expect(check("transfer.moved")?.status).toBe("ok");
      expect(check("blocks.prefill-leaked")?.found).toMatch(
        /holds 14 blocks that it did not hold before, though no request runs$/,
      );
    },
  );

  fault("requests that fail are counted, and the first one's error is shown", async () => {
    const { failed, check } = await verified(cluster.proxy.url, { promptTokens: 5000 });
    expect(failed).toContain("requests.failed");
    expect(check("requests.failed")?.found).toMatch(
      /^2 of 2 prompts; the first: .* answered 4\d\d/,
    );
  });

  fault("beside other requests, what moved is not known, and that is said", async () => {
    const { decode } = servers();
    let isRunning = true;
    const others = (async () => {
      while (isRunning) await post(decode, { prompt: [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens: 1 });
    })();
    const { check } = await verified(cluster.proxy.url);
    isRunning = false;
    await others;
    expect(check("transfer.unclear")?.found).toMatch(
      /^[12] of 2 prompts: D counted other requests at the same time/,
    );
  });
});
