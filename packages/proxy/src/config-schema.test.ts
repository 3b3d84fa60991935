import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { z } from "zod";
import { proxyFileSchema } from "./options.js";

test("the published JSON schema is that of the configuration file", async () => {
  const schema = z.toJSONSchema(proxyFileSchema, { io: "input" });
  const titled = { title: "Configuration of kv-proxy", ...schema };
  const file = fileURLToPath(new URL("../schema/config.json", import.meta.url));
  await expect(`${JSON.stringify(titled, null, 2)}\n`).toMatchFileSnapshot(file);
});
