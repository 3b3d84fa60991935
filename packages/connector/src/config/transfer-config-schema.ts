import { KV_ROLES, KvError } from "@kv/interface";
import { z } from "zod";

/** Node's timers end at about 24 days. */
const MAX_SECONDS = 2_000_000;

export const seconds = (least: number, what: string) =>
  z.number().min(least).max(MAX_SECONDS).nullish().describe(`Seconds. ${what}`);
const flag = (what: string) => z.boolean().nullish().describe(what);
const text = (what: string) => z.string().min(1).nullish().describe(what);
const int = (least: number, what: string) => z.int().min(least).nullish().describe(what);
const UNUSED = "Not used by this connector.";

/**
 * vLLM's `kv_transfer_config` (config/kv_transfer.py of 0.33), with keys of earlier versions and of
 * the Neuron guide. Other keys are errors.
 */
export const kvTransferConfigSchema = z.strictObject({
  kv_connector: z
    .string()
    .min(1)
    .describe(
      "Name of the connector: NixlConnector, or one that was registered under another name.",
    ),
  kv_role: z
    .enum(KV_ROLES)
    .describe(
      "kv_producer prefills, kv_consumer decodes, kv_both does either, per request: deprecated as in vLLM 0.33.",
    ),
  kv_connector_module_path: text(
    "A package, a path or a file: URL that exports the connector. It takes precedence over registered connectors.",
  ),
  kv_load_failure_policy: z
    .enum(["fail", "recompute"])
    .default("fail")
    .describe("Policy for a request whose KV did not arrive: fail it, or recompute the KV."),
  kv_buffer_device: text(
    "Device of the registered buffers, such as `cpu` or `cuda`; the platform's first choice when absent.",
  ),
  enable_permute_local_kv: z
    .boolean()
    .default(false)
    .describe("Lets an HND decode side read from an NHD prefill side."),
  engine_id: z
    .string()
    .min(1)
    .max(512)
    .nullish()
    .describe("Unique per start; generated when absent."),
  kv_connector_extra_config: z
    .record(z.string(), z.unknown())
    .nullish()
    .describe("The connector's own settings, and backends and num_threads for the transport."),
  kv_port: z.int().nullish().describe(UNUSED),
  kv_ip: z.string().nullish().describe(UNUSED),
  kv_rank: z.int().nullish().describe(UNUSED),
  kv_parallel_size: z.int().nullish().describe(UNUSED),
  kv_buffer_size: z.number().nullish().describe(UNUSED),
});

/** Keys without effect, with vLLM's defaults. Another value causes a warning. */
export const UNUSED_DEFAULTS: Readonly<Record<string, unknown>> = {
  kv_port: 14_579,
  kv_ip: "127.0.0.1",
  kv_rank: undefined,
  kv_parallel_size: 1,
  kv_buffer_size: 1e9,
};

/** Each reader takes its own keys: a third-party connector may give the others other types. */
export const extraConfigSchema = z.looseObject({
  backends: z
    .array(z.string().min(1))
    .refine((names) => new Set(names).size === names.length, "the names must be different")
    .nullish()
    .meta({ uniqueItems: true })
    .describe(
      'NIXL backends in order of preference, such as ["UCX"], or ["LIBFABRIC"] for AWS EFA. Before NIXL_BACKEND and VLLM_NIXL_BACKEND; UCX by default.',
    ),
  num_threads: int(1, "Threads of the UCX backend; no other backend reads it."),
  kv_lease_duration: seconds(
    0.001,
    "Lease of the blocks that a prefill worker keeps; 30 by default.",
  ),
  engine_ttl: seconds(
    0,
    "An unused remote engine is closed after this time; 0: never. 3600 by default.",
  ),
  request_timeout: seconds(0.001, "From the order until the KV is in place; 60 by default."),
  push_registration_timeout: seconds(
    0.001,
    "Push: from the registration until the KV is in place; by default decoder_kv_blocks_ttl, and request_timeout where the prefill worker is of @kv or has answered.",
  ),
  decoder_kv_blocks_ttl: seconds(
    0.001,
    "Pull: how long a decode worker keeps the blocks of a finished request for bidirectional_kv_xfer. Push: how long blocks are not reused that a lost prefill worker may write to. 480 by default.",
  ),
  bidirectional_kv_xfer: flag(
    "Pull: a decode worker keeps the blocks of a finished request, and a prefill worker reads them for the next turn; false by default.",
  ),
  kv_recompute_threshold: int(
    0,
    "Pull: a prefill worker computes fewer tokens than this itself instead of reading them from a decode worker; 0: it reads all. 64 by default.",
  ),
  enforce_handshake_compat: flag("Refuse peers with another compatibility hash; true by default."),
  per_worker_ports: flag(
    "A side-channel port for each rank, as in vLLM's older guide; false by default.",
  ),
  push_announced_block_size: int(
    1,
    "Push: tokens in a block that a prefill worker announces, for vLLM decode workers whose blocks have another size than its own.",
  ),
  cache_unverified_kv: flag(
    "Let the engine's prefix cache share KV of a vLLM prefill worker, which cannot compare prompts: whoever reaches both workers can put wrong KV there; false by default.",
  ),
  push_layerwise: flag("Push: write each layer as soon as it is computed; false by default."),
  seed_first_token: flag(
    "A prefill worker passes the token that it has sampled on (first_token_ids), and a decode worker emits it instead of computing it again; false by default. No release of vLLM has it.",
  ),
  handshake_key_file: text(
    "File with the key of the side channel, which then is encrypted and refuses peers without the key, vLLM too; a second line is a second valid key.",
  ),
  connectors: z
    .array(z.record(z.string(), z.unknown()))
    .nullish()
    .describe(
      "MultiConnector: a kv_transfer_config for each of its connectors, in order of preference.",
    ),
  require_kv_peer: flag(
    "Refuse messages of plain vLLM peers, which prove nothing; true with handshake_key_file by default.",
  ),
});

/**
 * The JSON schema of a `kv_transfer_config`, which the package ships as
 * `kv-transfer-config.schema.json`.
 */
export function transferConfigJsonSchema(): Readonly<Record<string, unknown>> {
  const whole = kvTransferConfigSchema.extend({
    kv_connector_extra_config: extraConfigSchema
      .nullish()
      .describe("The connector's own settings, and backends and num_threads for the transport."),
  });
  return z.toJSONSchema(whole, { io: "input" });
}

/**
 * Reads a value by its schema; an error says `within` before the key.
 * @throws `KV_CONFIG_INVALID` naming the key and its value.
 */
export function readBy<Schema extends z.ZodType>(
  schema: Schema,
  given: unknown,
  within: string,
): z.output<Schema> {
  const read = schema.safeParse(given);
  if (read.success) return read.data;
  const { path = [], message = "invalid" } = read.error.issues[0] ?? {};
  const key = path.join(".");
  const value = path.reduce<unknown>(
    (at, name) => (at as Record<PropertyKey, unknown> | undefined)?.[name],
    given,
  );
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${within}${key || "the value"} is ${JSON.stringify(value)?.slice(0, 200) ?? "missing"}: ${message}`,
    { details: { key } },
  );
}
