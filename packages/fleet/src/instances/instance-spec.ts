import type { KvError } from "@kv/interface";
import { z } from "zod";
import { invalidConfig } from "../settings/invalid-config.js";
import type { InstanceSpec } from "./instance.js";

const zmqEndpoint = z.string().regex(/^tcp:\/\/.+:[0-9]+$/);

/** An instance in a configuration: text (`host:port`, a URL, either with `@RANK`), or an object. */
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
 * Reads an instance of a configuration. `@RANK` names a rank of a data-parallel server.
 *
 * @throws `KV_CONFIG_INVALID` for a URL that is not valid.
 */
export function parseInstanceSpec(input: InstanceSpecInput): InstanceSpec {
  if (typeof input !== "string") return { ...input, url: parseInstanceUrl(input.url) };
  const [, base, rank] = /^(.*[^@])@([0-9]{1,5})$/.exec(input.trim()) ?? [];
  if (base === undefined) return { url: parseInstanceUrl(input) };
  return { url: parseInstanceUrl(base), dataParallelRank: Number(rank) };
}

/**
 * `host:port` means plain HTTP. Drops the final `/v1` of OpenAI base URLs.
 *
 * @throws `KV_CONFIG_INVALID`.
 */
function parseInstanceUrl(input: string): string {
  const text = input.trim();
  let url: URL;
  try {
    // `host:port` starts like a scheme; so does `unix:/x.sock`.
    url = new URL(/^[a-z][a-z0-9+.-]*:(\/|$)/i.test(text) ? text : `http://${text}`);
  } catch (cause) {
    throw invalidUrl(input, "it cannot be read as a URL", cause);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:")
    throw invalidUrl(input, `${url.protocol} is not HTTP`);
  if (url.port === "0") throw invalidUrl(input, "port 0 is none of a server");
  if (url.username !== "" || url.password !== "")
    throw invalidUrl(input, "it contains a user name or a password");
  if (url.search !== "" || url.hash !== "")
    throw invalidUrl(input, "it contains a query or a fragment");
  const path = url.pathname.replace(/\/+$/, "").replace(/\/v1$/, "");
  return `${url.origin}${path}`;
}

function invalidUrl(input: string, why: string, cause?: unknown): KvError {
  return invalidConfig(
    `"${input}" is not the URL of an instance: ${why}`,
    "give host:port or http://host:port",
    cause,
  );
}
