import type { ProxyOptions } from "@kv/proxy";
import { describe, expect, test } from "vitest";
import { BOUNDARY_CASES, comparable, salted } from "./boundary-cases.js";
import { abortWhileDecoding, abortWhilePrefilling } from "./proxy-fault-suite.js";
import { ask, type ProxyPair } from "./proxy-pair.js";

const NAMES = ["one prompt", "several prompts", "a stream of several prompts", "a chat with n 2"];

/**
 * A few cases that show that the proxy also works with another connector or vLLM version. The other
 * cases use the same code.
 */
export function proxyShortSuite(pair: ProxyPair, mode: ProxyOptions["mode"]): void {
  describe(`--mode ${mode}`, () => {
    test.each(BOUNDARY_CASES.filter(({ name }) => NAMES.includes(name)))(
      "$name: kv-proxy answers like a single server, and P holds no blocks",
      async ({ path, body }) => {
        const { url, proxy } = await pair.proxied({ mode });
        const right = await comparable(await ask(pair.d.url + path, salted(body)));
        // From the first answer the proxy learns the address and the connector of P's engine. Later
        // it sends both legs of a push at once.
        for (const _ of ["first", "second"])
          expect(await comparable(await ask(url + path, salted(body)))).toEqual(right);
        expect(proxy.status().prefillers[0]?.failures).toBe(0);
        await pair.freed();
      },
    );

    /**
     * Opens a proxy that has received an answer of P, so that it knows the address and the
     * connector of P's engine.
     */
    async function openWarmedUp() {
      const opened = await pair.proxied({ mode });
      const body = { model: "tiny", prompt: "t11 t12", max_tokens: 1 };
      expect((await ask(`${opened.url}/v1/completions`, body)).status).toBe(200);
      return opened;
    }

    test("client aborts while D generates: D stops, and P holds no blocks", async () => {
      await abortWhileDecoding(pair, await openWarmedUp());
    });

    test("client aborts while P computes: P stops and holds no blocks", async () => {
      await abortWhilePrefilling(pair, await openWarmedUp(), pair.p.kind.mode === "push" ? 2 : 1);
    });
  });
}
