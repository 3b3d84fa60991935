import type { ConnectorModule } from "@kv/interface";
import { expect, it } from "vitest";
import type { SimEngineOptions } from "../simulator/sim-options.js";
import { createScenario } from "./scenario.js";

/** A vLLM P's KV may enter D's prefix cache only with the setting. */
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
      for (const n of [1, 2]) await play.serves(p, d, n);
      expect(cached).toEqual([each.isCached, each.isCached]);
      expect(play.logged("d", "unverified-kv-is-cached").length > 0).toBe(each.allowed);
    },
  );
}
