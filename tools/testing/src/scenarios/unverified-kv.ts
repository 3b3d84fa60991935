import type { ConnectorModule } from "@kv/interface";
import { expect, it } from "vitest";
import type { SimEngineOptions } from "../simulator/sim-options.js";
import { createScenario } from "./scenario.js";

/** KV of a P that compares prompts may enter D's prefix cache; a vLLM P's only with the setting. */
export function itKeepsUnverifiedKvOutOfTheCache(
  connector: ConnectorModule,
  decode: Partial<SimEngineOptions> = {},
): void {
  it.each([
    { plain: false, allowed: false, isCached: true },
    { plain: true, allowed: false, isCached: false },
    { plain: true, allowed: true, isCached: true },
  ])(
    "KV of a P (vLLM: $plain) may be cached (cache_unverified_kv: $allowed): $isCached",
    async (each) => {
      const play = createScenario({ connector });
      const cached: boolean[] = [];
      const p = await play.engine("p", { plain: each.plain });
      const d = await play.engine("d", {
        tpSize: 2,
        extra: each.allowed ? { cache_unverified_kv: true } : {},
        received: (_, isVerified) => void cached.push(isVerified),
        ...decode,
      });
      for (const n of [1, 2]) expect(await play.handedOver(p, d, n)).toBe("ok");
      expect(cached).toEqual([each.isCached, each.isCached]);
      expect(play.logged("d", "unverified-kv-is-cached").length > 0).toBe(each.allowed);
      await play.end();
    },
  );
}
