// A long suite: hundreds of requests that D refuses; packages/proxy/test/flow has the releases, and
// src/http/server.test.ts what an instance does with one.
import { expect, it } from "vitest";
import { complete } from "../src/run/completion-client.js";
import { expectAllIdle, preparedRun, startPair } from "./support/matrix.js";
import { post } from "./support/memory-pair.js";

it.each(["push", "NixlConnector"])(
  "F1: 120 of them leave the prefill instance's pool empty, and request ids of 128 characters, the longest that the proxy takes, pass, with %s",
  async (connector) => {
    // Far longer than the test waits: blocks that are freed were released.
    await using cluster = await startPair({ connector, leaseSeconds: 300 });
    const { url } = cluster.proxy;
    // The proxy learns where P is, and then sends both legs of push at once.
    await complete({ url, requestId: "first", promptTokens: [7, 8, 9], maxTokens: 1 });
    const ask = async (_: unknown, at: number) =>
      (await post(url, { prompt: [at + 1, 8, 9], max_tokens: 1e6 })).status;
    expect(new Set(await Promise.all(Array.from({ length: 120 }, ask)))).toEqual(new Set([400]));
    await expectAllIdle(cluster);

    const { prompt: promptTokens, answer } = await preparedRun();
    for (const letter of ["a", "b"]) {
      const request = { url, requestId: letter.repeat(128), promptTokens, maxTokens: 16 };
      expect((await complete(request)).tokens).toEqual(answer);
    }
  },
);
