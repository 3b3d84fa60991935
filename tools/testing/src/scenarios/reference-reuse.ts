import type { ConnectorModule, KvTransferParams } from "@kv/interface";
import { describe, expect, it } from "vitest";
import { isLongRun } from "../long-run.js";
import { createScenario, prompt, started } from "./scenario.js";

/** Freed blocks are poisoned at once, and the next prompt takes them. */
const ONE_PROMPT = { numBlocks: 3 };

/** A vLLM P that pushes compares all but the last digits. */
const idOf = (n: number) => `r1-0000000${n}`;

/**
 * `sharesReferences`: requests that D has seen together all get their KV (pull); else the first
 * alone does, and the others are refused at once (push).
 */
export function describeReferenceReuse(
  connector: ConnectorModule,
  { sharesReferences }: { readonly sharesReferences: boolean },
): void {
  const cases = [
    [1, 1],
    [2, 1],
    [1, 2],
  ].flatMap(([prefillTp = 1, decodeTp = 1], at) =>
    [true, false].flatMap((plain) =>
      // In the short form each size has both kinds of P.
      [0, 16]
        .filter((cachedTokens) => isLongRun || (cachedTokens === 0) === (plain === (at % 2 === 0)))
        .map((cachedTokens) => ({ prefillTp, decodeTp, plain, cachedTokens })),
    ),
  );
  describe.each(cases)(
    "a reference of a P with TP $prefillTp (vLLM: $plain) at a D with TP $decodeTp, hit of $cachedTokens tokens",
    (each) => {
      const { prefillTp, decodeTp, plain, cachedTokens } = each;
      async function start(decode = {}) {
        const play = createScenario({ connector });
        const { p, d } = await play.pair(
          { tpSize: prefillTp, plain, ...ONE_PROMPT },
          { tpSize: decodeTp, ...decode },
        );
        const params = await play.prefilled(p, 1);
        const use = (n: number, hit = cachedTokens) =>
          started(d.decode({ ...prompt(1), requestId: idOf(n), params, cachedTokens: hit }));
        const useBlocksAnew = async () => {
          for (const n of [2, 3]) await play.serves(p, d, n);
        };
        return { play, p, d, params, use, useBlocksAnew };
      }
      const others = sharesReferences ? "ok" : "KV_REFERENCE_USED";

      it("vllm#52234: is refused at once after it was used, also when P has given the blocks to another prompt", async () => {
        const { play, use, useBlocksAnew } = await start();
        await play.ends(use(1));
        await play.ends(use(2), "KV_REFERENCE_USED");
        await useBlocksAnew();
        const startedMs = play.clock.now();
        for (const [n, hit] of [0, 16, 40].entries())
          await play.ends(use(3 + n, hit), "KV_REFERENCE_USED");
        expect(play.clock.now() - startedMs).toBeLessThan(100);
      });

      it.each([1, 2])(
        "vllm#43509: serves requests that share it, with READ %i 300 ms slower than the others",
        async (nth) => {
          const { play, p, d, use } = await start();
          play.network.setFaults([
            { fault: "delay", operation: ["READ", "WRITE"], nth, delayMs: 300 },
          ]);
          const [first, second, third] = [use(1), use(2), use(3)];
          const next = p.prefill(prompt(2));
          await play.ends(first);
          expect([await play.outcome(second), await play.outcome(third)]).toEqual([others, others]);
          await play.ends(use(4), "KV_REFERENCE_USED");
          // P's blocks are freed with the last reader, long before the lease ends.
          const params = await play.clock.settle(next);
          expect(play.clock.now()).toBeLessThan(1500);
          await play.ends(d.decode({ ...prompt(2), params }));
        },
      );

      it("vllm#43509: is kept for a request that waits for room while another one reads it", async () => {
        const { play, p, d, use } = await start(ONE_PROMPT);
        const next = p.prefill(prompt(2));
        const [first, second] = [use(1), use(2)];
        await play.ends(first);
        await play.ends(second, others);
        await play.ends(d.decode({ ...prompt(2), params: await play.clock.settle(next) }));
      });

      it("vllm#52234: is refused after an abort, before and during the transfer, and P frees its blocks", async () => {
        for (const abortAfterMs of [0, 3, 6, 9]) {
          const { play, p, d, use, useBlocksAnew } = await start();
          const aborted = use(1);
          await play.clock.advance(abortAfterMs);
          d.abort(idOf(1));
          expect(["ok", "KV_REQUEST_ABORTED"]).toContain(await play.outcome(aborted));
          await play.clock.advance(1000);
          // A vLLM P that pushes is not told.
          if (sharesReferences || !plain) expect(p.outstanding().kept).toBe(0);
          await useBlocksAnew();
          await play.ends(use(2), "KV_REFERENCE_USED");
        }
      });

      it("vllm#52234: is refused after a full prefix hit, where nothing was read", async () => {
        const { play, use, useBlocksAnew } = await start();
        await play.ends(use(1, 40));
        await play.clock.advance(1000);
        await play.ends(use(2, 0), "KV_REFERENCE_USED");
        await useBlocksAnew();
        await play.ends(use(3, 0), "KV_REFERENCE_USED");
      });

      it("vllm#43509: is not released by an abort or a refusal while another request reads it", async () => {
        const { play, p, d, params, use } = await start();
        play.network.setFaults([{ fault: "delay", operation: ["READ", "WRITE"], delayMs: 300 }]);
        const next = p.prefill(prompt(2));
        const first = use(1);
        void use(2);
        const refused = started(d.decode({ ...prompt(1, 8), requestId: idOf(3), params }));
        await play.clock.advance(50);
        d.abort(idOf(2));
        await play.ends(first);
        await play.ends(refused, "KV_REQUEST_INVALID");
        play.network.setFaults([]);
        await play.ends(d.decode({ ...prompt(2), params: await play.clock.settle(next) }));
      });

      it("is refused where only its address or the number of P's registrations is left out or changed", async () => {
        const { play, d, params, use, useBlocksAnew } = await start();
        await play.ends(use(1));
        await useBlocksAnew();
        const changed: KvTransferParams[] = [
          { ...params, remote_registration_generation: null },
          { ...params, remote_host: "other" },
          { ...params, remote_port: 1 },
        ];
        for (const [n, given] of changed.entries()) {
          const again = d.decode({ ...prompt(1), requestId: idOf(2 + n), params: given });
          await play.ends(again, "KV_REFERENCE_USED");
        }
      });
    },
  );
}
