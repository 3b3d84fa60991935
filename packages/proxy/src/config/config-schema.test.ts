import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { readConfigFile } from "@kv/fleet/front-end";
import { expect, test } from "vitest";
import { z } from "zod";
import { PROGRAM } from "./cli-options.js";
import { readSettings } from "./settings.js";
import { unusedSettings } from "./unused-settings.js";

test("the published JSON schema is that of the configuration file", async () => {
  const schema = z.toJSONSchema(PROGRAM.file, { io: "input" });
  const titled = { title: "Configuration of kv-proxy", ...schema };
  const file = fileURLToPath(new URL("../../schema/config.json", import.meta.url));
  await expect(`${JSON.stringify(titled, null, 2)}\n`).toMatchFileSnapshot(file);
});

test("the example configuration is valid, and all of its settings have an effect", () => {
  const file = fileURLToPath(new URL("../../deploy/config.json", import.meta.url));
  const {
    host: _,
    port: __,
    ...given
  } = readConfigFile(PROGRAM, file, (path) => readFileSync(path, "utf8"));
  expect(unusedSettings(given, readSettings(given))).toEqual([]);
});
