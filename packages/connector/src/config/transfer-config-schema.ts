import { KV_ROLES } from "@kv/interface";
import { z } from "zod";

/**
 * vLLM's `kv_transfer_config` (config/kv_transfer.py of 0.33, plus the keys of earlier versions and the Neuron guide).
 * Other keys are errors; `kv_connector_extra_config` is an open dictionary.
 */
export const kvTransferConfigSchema = z.strictObject({
  kv_connector: z
    .string()
    .min(1)
    .describe("Name of the connector: NixlConnector, or one that was registered under another name."),
  kv_role: z
    .enum(KV_ROLES)
    .describe("kv_producer prefills, kv_consumer decodes, kv_both does either, per request."),
  kv_connector_module_path: z
    .string()
    .min(1)
    .nullish()
    .describe(
      "A package, a path or a file: URL that exports the connector. It takes precedence over registered connectors.",
    ),
  kv_load_failure_policy: z
    .enum(["fail", "recompute"])
    .default("fail")
    .describe("Policy for a request whose KV did not arrive: fail it, or recompute the KV."),
  kv_buffer_device: z
    .string()
    .min(1)
    .nullish()
    .describe("Device of the registered buffers: cpu, cuda, …; the platform's first choice when absent."),
  enable_permute_local_kv: z
    .boolean()
    .default(false)
    .describe("Lets an HND decode side read from an NHD prefill side."),
  engine_id: z.string().min(1).max(512).nullish().describe("Unique per start; generated when absent."),
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

/** Keys that are accepted but have no effect, with vLLM's defaults. Another value causes a warning. */
export const UNUSED_DEFAULTS: Readonly<Record<string, unknown>> = {
  kv_port: 14_579,
  kv_ip: "127.0.0.1",
  kv_rank: undefined,
  kv_parallel_size: 1,
  kv_buffer_size: 1e9,
};

/** The JSON schema of a `kv_transfer_config`, for editors and for validation before use. */
export function transferConfigJsonSchema(): Readonly<Record<string, unknown>> {
  return z.toJSONSchema(kvTransferConfigSchema, { io: "input" });
}
