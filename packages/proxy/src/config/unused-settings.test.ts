import { expect, test } from "vitest";
import { type ProxySettingsInput, readSettings } from "./settings.js";
import { unusedSettings } from "./unused-settings.js";

const kv = { engineId: "e" };
const pairing = { mode: "off" } as const;
const kvEvents = "tcp://p:5557";

test.each<[ProxySettingsInput, readonly string[]]>([
  [{ prefillers: ["p:1"], decoders: ["d:1"] }, []],
  [{ pushLegs: "prefill-first" }, ["pushLegs: mode is pull"]],
  [{ pushLegs: "prefill-first", mode: "auto" }, []],
  [{ prefillers: [{ url: "p:1", kv }] }, []],
  [{ prefillers: [{ url: "p:1", kv }], pairing }, ["prefillers.kv: mode is pull"]],
  [{ prefillers: [{ url: "p:1", kv }], mode: "push" }, []],
  [
    { prefillers: [{ url: "p:1", kv }], mode: "push", pushLegs: "prefill-first", pairing },
    ["prefillers.kv: pushLegs is prefill-first"],
  ],
  [{ decoders: [{ url: "d:1", kv, label: "a" }] }, []],
  [{ decoders: [{ url: "d:1", kv }], mode: "push", pairing }, ["decoders.kv: pairing.mode is off"]],
  [
    { decoders: [{ url: "d:1", label: "a" }], pairing: { mode: "strict" } },
    ["decoders.label: pairing.mode is strict"],
  ],
  [
    { prefillers: [{ url: "p:1", kvEvents }] },
    ["prefillers.kvEvents: routing.prefill is round-robin"],
  ],
  [
    {
      decoders: [{ url: "d:1", kvEvents }],
      routing: { prefill: "prefix-aware", decode: "least-load" },
    },
    ["decoders.kvEvents: routing.decode is least-load"],
  ],
  [{ prefillers: [{ url: "p:1", kvEvents }], routing: { prefill: "prefix-aware" } }, []],
  [{ kvSources: { tierPort: 1 } }, ["kvSources.tierPort: routing.decode is round-robin"]],
  [{ kvSources: { tierPort: 1 }, routing: { prefill: "prefix-aware" } }, []],
  [
    { sidecar: { allow: ["*"], kvPools: ["pool:5710"] }, decoders: ["d:1"] },
    ["sidecar.kvPools: sidecar.p2pPull is not set (--enable-p2p-pull)"],
  ],
  [
    {
      sidecar: { allow: ["*"] },
      decoders: ["d:1"],
      disaggregateAbove: 100,
      routing: { prefill: "least-load" },
    },
    ["disaggregateAbove", "routing.prefill"].map(
      (setting) => `${setting}: requests name their prefill instances to a sidecar`,
    ),
  ],
  [
    {
      sidecar: { allow: ["*"], kvConnector: "nixlv2", ecConnector: "e", p2pConnectorPort: 1 },
      decoders: ["d:1"],
      mode: "push",
    },
    [
      "sidecar.kvConnector: mode is push",
      "sidecar.ecConnector: prefill instances encode images themselves",
      "sidecar.p2pConnectorPort: sidecar.p2pPull is not set (--enable-p2p-pull)",
    ],
  ],
  [{ health: { path: "/x", timeoutMs: 1, failures: 1 }, timeouts: { slowReturnMs: 1 } }, []],
  [
    {
      health: { intervalMs: 0, path: "/x", timeoutMs: 1, failures: 1 },
    },
    ["health.path", "health.timeoutMs", "health.failures"].map(
      (setting) => `${setting}: health.intervalMs is 0`,
    ),
  ],
])("of %j these have no effect: %j", (given, expected) => {
  const unused = unusedSettings(given, readSettings(given));
  expect(unused.map(({ setting, why }) => `${setting}: ${why}`)).toEqual(expected);
});
