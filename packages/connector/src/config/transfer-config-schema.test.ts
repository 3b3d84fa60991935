import { readFileSync, writeFileSync } from "node:fs";
import { expect, test } from "vitest";
import { transferConfigJsonSchema } from "./transfer-config-schema.js";

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
