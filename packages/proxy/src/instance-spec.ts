import { z } from "zod";
import type { InstanceSpec } from "./instance.js";
import { instanceUrl } from "./instance-url.js";

export const instanceSpecSchema = z.union([
  z.string(),
  z.strictObject({
    url: z.string(),
    dataParallelRank: z.number().int().nonnegative().optional(),
    kvEvents: z
      .string()
      .regex(/^tcp:\/\/.+:[0-9]+$/)
      .optional(),
    /** Where decode workers meet a prefill instance's engine, for push: vLLM's engine id, side channel, TP size. */
    kv: z
      .strictObject({
        engineId: z.string().min(1).max(512).optional(),
        host: z.string().min(1).optional(),
        port: z.number().int().min(1).max(65_535).optional(),
        tpSize: z.number().int().min(1).max(65_536).optional(),
      })
      .optional(),
  }),
]);

/** `host:port`, a URL, either with `@RANK` for one rank of a data-parallel server, or an object. Errors: `KV_CONFIG_INVALID`. */
export function instanceSpec(given: z.infer<typeof instanceSpecSchema>): InstanceSpec {
  if (typeof given !== "string") return { ...given, url: instanceUrl(given.url) };
  const [, base, rank] = /^(.*[^@])@([0-9]{1,5})$/.exec(given.trim()) ?? [];
  if (base === undefined) return { url: instanceUrl(given) };
  return { url: instanceUrl(base), dataParallelRank: Number(rank) };
}
