import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { z } from "zod";
import { PROGRAM, parseCli } from "./cli-options.js";
import { readSettings } from "./settings.js";

const INSTANCES = ["--prefill", "p:1", "--decode", "10.0.0.1:2"];

test("the published JSON schema is that of the configuration file", async () => {
  const schema = z.toJSONSchema(PROGRAM.file, { io: "input" });
  const titled = { title: "Configuration of kv-epp", ...schema };
  const file = fileURLToPath(new URL("../../schema/config.json", import.meta.url));
  await expect(`${JSON.stringify(titled, null, 2)}\n`).toMatchFileSnapshot(file);
});

test("flags override the file", () => {
  const file = JSON.stringify({
    host: "0.0.0.0",
    port: 1,
    decoders: ["10.0.0.9:1"],
    fallbacks: 3,
    limits: { bodyLengthBytes: 5, requestsInFlight: 6 },
  });
  const flags = [
    "--config",
    "f",
    "--port",
    "2",
    "--fallbacks",
    "0",
    "--body-limit-bytes",
    "7",
    ...INSTANCES,
  ];
  expect(parseCli(flags, () => file)).toEqual({
    host: "0.0.0.0",
    port: 2,
    logLevel: "info",
    trace: undefined,
    settings: {
      prefillers: ["p:1"],
      decoders: ["10.0.0.1:2"],
      fallbacks: 0,
      limits: { bodyLengthBytes: 7, requestsInFlight: 6 },
      routing: {},
    },
  });
});

test.each([
  [[], undefined],
  [["--no-tls"], false],
  [["--tls-cert", "c", "--tls-key", "k"], { certFile: "c", keyFile: "k" }],
])("%j is TLS %j", (flags, tls) => {
  expect(parseCli([...INSTANCES, ...flags], () => "").settings.tls).toEqual(tls);
});

test.each([[["--tls-cert", "c"]], [["--no-tls", "--tls-key", "k"]]])("%j is refused", (flags) => {
  expect(() => parseCli([...INSTANCES, ...flags], () => "")).toThrow("do not go together alone");
});

test("a limit of one address above that of all is refused, and half of all is the default", () => {
  expect(() => readSettings({ limits: { connections: 10, connectionsPerAddress: 11 } })).toThrow(
    "limits.connectionsPerAddress is 11, above limits.connections, which is 10",
  );
  expect(readSettings({ limits: { connections: 9 } }).limits.connectionsPerAddress).toBe(5);
});

test.each([
  ['{"prot":1}', "port"],
  ['{"limits":{"conections":1}}', "connections"],
])("first-contact.md 3: %s is refused, and the nearest known key is named", (text, nearest) => {
  const parse = () => parseCli(["--config", "f.json", ...INSTANCES], () => text);
  expect(parse).toThrow(new RegExp(`^f\\.json is not valid: .*, did you mean ${nearest}\\?`));
});
