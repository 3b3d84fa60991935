import { KvError } from "@kv/interface";
import { z } from "zod";
import type { InstanceSpec } from "./instance.js";

const zmqEndpoint = z.string().regex(/^tcp:\/\/.+:[0-9]+$/);

/**
 * An instance as a configuration names it: text (`host:port`, a URL, either with `@RANK`), or an
 * object.
 */
export const instanceSpecSchema = z.union([
  z.string(),
  z.strictObject({
    url: z.string(),
    dataParallelRank: z.number().int().nonnegative().optional(),
    kvEvents: zmqEndpoint.optional(),
    kvEventsReplay: zmqEndpoint.optional(),
    kv: z
      .strictObject({
        engineId: z.string().min(1).max(512).optional(),
        host: z.string().min(1).optional(),
        port: z.number().int().min(1).max(65_535).optional(),
        tpSize: z.number().int().min(1).max(65_536).optional(),
        ppSize: z.number().int().min(1).max(65_536).optional(),
        dcpSize: z.number().int().min(1).max(65_536).optional(),
      })
      .optional(),
    label: z.string().min(1).max(256).optional(),
  }),
]);

/** What `instanceSpecSchema` accepts. */
export type InstanceSpecInput = z.infer<typeof instanceSpecSchema>;

/**
 * Reads an instance from a configuration: `host:port`, a URL, either with `@RANK` for one rank of a
 * data-parallel server, or an object.
 *
 * @throws `KV_CONFIG_INVALID` for a URL that is not valid for an instance.
 */
export function parseInstanceSpec(input: InstanceSpecInput): InstanceSpec {
  if (typeof input !== "string") return { ...input, url: parseInstanceUrl(input.url) };
  const [, base, rank] = /^(.*[^@])@([0-9]{1,5})$/.exec(input.trim()) ?? [];
  if (base === undefined) return { url: parseInstanceUrl(input) };
  return { url: parseInstanceUrl(base), dataParallelRank: Number(rank) };
}

/**
 * The base URL of an instance, without a slash at its end. `host:port` means plain HTTP. A `/v1` at
 * the end, as in an OpenAI client's base URL, is dropped.
 *
 * @throws `KV_CONFIG_INVALID`.
 */
function parseInstanceUrl(input: string): string {
  const text = input.trim();
  let url: URL;
  try {
    url = new URL(/^[a-z][a-z0-9+.-]*:\/\//i.test(text) ? text : `http://${text}`);
  } catch (cause) {
    throw invalidUrl(input, "it cannot be read as a URL", cause);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:")
    throw invalidUrl(input, `${url.protocol} is not HTTP`);
  if (url.username !== "" || url.password !== "")
    throw invalidUrl(input, "it contains a user name or a password");
  if (url.search !== "" || url.hash !== "")
    throw invalidUrl(input, "it contains a query or a fragment");
  const path = url.pathname.replace(/\/+$/, "").replace(/\/v1$/, "");
  return `${url.origin}${path}`;
}

function invalidUrl(input: string, why: string, cause?: unknown): KvError {
  return new KvError("KV_CONFIG_INVALID", `"${input}" is not the URL of an instance: ${why}`, {
    hint: "give host:port or http://host:port",
    cause,
  });
}
