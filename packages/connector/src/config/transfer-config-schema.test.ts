import { readFileSync, writeFileSync } from "node:fs";
import { expect, test } from "vitest";
import { connectorSettings } from "./connector-settings.js";
import { readTransferConfig } from "./transfer-config.js";
import { extraConfigSchema, transferConfigJsonSchema } from "./transfer-config-schema.js";

const FILE = new URL("../../kv-transfer-config.schema.json", import.meta.url);

test("kv-transfer-config.schema.json is the schema of the code (KV_WRITE=1 writes it), and the package ships it", () => {
  const text = `${JSON.stringify(transferConfigJsonSchema(), null, 2)}\n`;
  if (process.env.KV_WRITE === "1") writeFileSync(FILE, text);
  expect(JSON.parse(readFileSync(FILE, "utf8"))).toEqual(JSON.parse(text));
  const manifest = JSON.parse(
    readFileSync(new URL("../../package.json", import.meta.url), "utf8"),
  ) as {
    files: string[];
    exports: Record<string, unknown>;
  };
  expect(manifest.files).toContain("kv-transfer-config.schema.json");
  expect(manifest.exports["./kv-transfer-config.schema.json"]).toBe(
    "./kv-transfer-config.schema.json",
  );
});

test("the schema of kv_connector_extra_config has backends, and leaves room for other connectors' keys", () => {
  const { properties } = transferConfigJsonSchema() as {
    properties: {
      kv_connector_extra_config: { anyOf: [{ properties: object; additionalProperties: object }] };
    };
  };
  const [extra] = properties.kv_connector_extra_config.anyOf;
  expect(extra.properties).toMatchObject({
    backends: { anyOf: [{ type: "array", items: { type: "string" } }, { type: "null" }] },
  });
  expect(extra.additionalProperties).toEqual({});
});

test.each([
  { backends: ["LIBFABRIC"] },
  { backends: null, num_threads: 4, theirs: { any: "thing" } },
  { backends: "UCX" },
  { backends: [""] },
  { num_threads: 0 },
  { kv_lease_duration: 5.5, engine_ttl: 0 },
  { kv_lease_duration: 0 },
  { engine_ttl: -1 },
  { request_timeout: "5s" },
  { push_registration_timeout: 3e6 },
  { decoder_kv_blocks_ttl: 0 },
  { enforce_handshake_compat: "no" },
  { per_worker_ports: 1 },
  { push_layerwise: true },
  { bidirectional_kv_xfer: true, kv_recompute_threshold: 0 },
  { bidirectional_kv_xfer: 1 },
  { kv_recompute_threshold: 1.5 },
  { kv_recompute_threshold: -1 },
  { handshake_key_file: "" },
])("the schema and the connectors agree about %j", (extra) => {
  const reads = () => {
    try {
      const given = { kv_connector: "x", kv_role: "kv_both", kv_connector_extra_config: extra };
      connectorSettings(readTransferConfig(given));
      return true;
    } catch {
      return false;
    }
  };
  expect(extraConfigSchema.safeParse(extra).success).toBe(reads());
});
