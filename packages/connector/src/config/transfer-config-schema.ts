import { KV_ROLES } from "@kv/interface";
import { z } from "zod";

/**
 * vLLM's `kv_transfer_config` (config/kv_transfer.py of 0.33, and the keys that earlier versions and the Neuron guide have besides).
 * Keys that are not here are errors; `kv_connector_extra_config` is an open dictionary.
 */
export const kvTransferConfigSchema = z.strictObject({
  kv_connector: z
    .string()
    .min(1)
    .describe("Name of the connector: NixlConnector, or one that was registered under another name."),
  kv_role: z
    .enum(KV_ROLES)
    .describe("kv_producer prefills, kv_consumer decodes, kv_both does what each request asks."),
  kv_connector_module_path: z
    .string()
    .min(1)
    .nullish()
    .describe(
      "A package, a path or a file: URL that exports the connector. It wins over what is registered.",
    ),
  kv_load_failure_policy: z
    .enum(["fail", "recompute"])
    .default("fail")
    .describe("What becomes of a request whose KV did not arrive: it fails, or the engine computes it."),
  kv_buffer_device: z
    .string()
    .min(1)
    .nullish()
    .describe("Where the registered buffers live: cpu, cuda, …; the platform's first choice when absent."),
  enable_permute_local_kv: z
    .boolean()
    .default(false)
    .describe("Lets an HND decode side read from an NHD prefill side."),
  engine_id: z.string().min(1).max(512).nullish().describe("Unique for every start; made up when absent."),
  kv_connector_extra_config: z
    .record(z.string(), z.unknown())
    .nullish()
    .describe("The connector's own settings, and backends and num_threads for the transport."),
  kv_port: z.int().nullish().describe("Not used by this connector."),
  kv_ip: z.string().nullish().describe("Not used by this connector."),
  kv_rank: z.int().nullish().describe("Not used by this connector."),
  kv_parallel_size: z.int().nullish().describe("Not used by this connector."),
  kv_buffer_size: z.number().nullish().describe("Not used by this connector."),
});

/** Keys that are taken and that nothing reads, with vLLM's defaults: another value warns. */
export const UNUSED_DEFAULTS: Readonly<Record<string, unknown>> = {
  kv_port: 14_579,
  kv_ip: "127.0.0.1",
  kv_rank: undefined,
  kv_parallel_size: 1,
  kv_buffer_size: 1e9,
};

/** The JSON schema of a `kv_transfer_config`, for editors and for checking one before it is used. */
export function transferConfigJsonSchema(): Readonly<Record<string, unknown>> {
  return z.toJSONSchema(kvTransferConfigSchema, { io: "input" });
}
