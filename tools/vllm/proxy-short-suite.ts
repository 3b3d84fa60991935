import type { ProxyOptions } from "@kv/proxy";
import { describe, expect, test } from "vitest";
import { BOUNDARY_CASES, comparable, salted } from "./boundary-cases.js";
import { leaveWhileDecoding, leaveWhilePrefilling } from "./proxy-fault-suite.js";
import { ask, type ProxyPair } from "./proxy-pair.js";

const NAMES = ["one prompt", "several prompts", "a stream of several prompts", "a chat in several copies"];

/** A few cases that show that the proxy also drives a pair of another connector or version. The other cases use the same code. */
export function proxyShortSuite(pair: ProxyPair, mode: ProxyOptions["mode"]): void {
  describe(`--mode ${mode}`, () => {
    test.each(BOUNDARY_CASES.filter(({ name }) => NAMES.includes(name)))(
      "$name: as one server, and P holds nothing",
      async ({ path, body }) => {
        const { url, proxy } = await pair.proxied({ mode });
        const right = await comparable(await ask(pair.d.url + path, salted(body)));
        // From the first answer the proxy learns the address and the connector of P's engine. From then on it sends both legs of a push at once.
        for (const _ of ["first", "second"])
          expect(await comparable(await ask(url + path, salted(body)))).toEqual(right);
        expect(proxy.status().prefillers[0]?.failures).toBe(0);
        await pair.freed();
      },
    );

    /** A proxy that has already received an answer of P, as above. */
    async function taught() {
      const opened = await pair.proxied({ mode });
      const body = { model: "tiny", prompt: "t11 t12", max_tokens: 1 };
      expect((await ask(`${opened.url}/v1/completions`, body)).status).toBe(200);
      return opened;
    }

    test("a client that leaves while D generates: D stops, and P holds nothing", async () => {
      await leaveWhileDecoding(pair, await taught());
    });

    test("a client that leaves while P computes: P stops, and holds nothing", async () => {
      await leaveWhilePrefilling(pair, await taught(), pair.p.kind.mode === "push" ? 2 : 1);
    });
  });
}
