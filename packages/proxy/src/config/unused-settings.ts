import type { ProxySettings, ProxySettingsInput } from "./settings.js";

export interface UnusedSetting {
  readonly setting: string;
  /** The setting that makes this one ineffective. */
  readonly why: string;
}

export function unusedSettings(
  input: ProxySettingsInput,
  { mode, pushLegs, routing, health, limits, pairing, sidecar }: ProxySettings,
): UnusedSetting[] {
  const above = (
    limit: "requestsPerClient" | "connectionsPerAddress",
    all: "requestsInFlight" | "connections",
  ) =>
    (limits[limit] ?? 0) > (limits[all] ?? Number.POSITIVE_INFINITY) &&
    `limits.${all} is ${limits[all]}`;
  const notPrefixAware = (name: "prefill" | "decode") =>
    routing[name] !== "prefix-aware" && `routing.${name} is ${routing[name]}`;
  const pulls = mode === "pull" && "mode is pull";
  const unpaired = pairing.mode === "off" && "pairing.mode is off";
  /** Why settings have no effect; false: they have one. */
  const reasons: readonly (readonly [why: string | false, ...settings: string[]])[] = [
    [pulls, "pushLegs"],
    [
      sidecar !== undefined && "requests name their prefill instances to a sidecar",
      "disaggregateAbove",
      "routing.prefill",
      "routing.decode",
    ],
    // Their flags: --prefill-engine-id, --prefill-kv-host, --prefill-side-channel-port,
    // --prefill-tp-size.
    [
      unpaired && (pulls || (pushLegs === "prefill-first" && "pushLegs is prefill-first")),
      "prefillers.kv",
    ],
    [unpaired, "decoders.kv", "pairing.timeoutMs", "pairing.refreshMs", "pairing.handshakeKeyFile"],
    [
      unpaired || (pairing.mode === "strict" && "pairing.mode is strict"),
      "prefillers.label",
      "decoders.label",
    ],
    [notPrefixAware("prefill"), "prefillers.kvEvents", "prefillers.kvEventsReplay"],
    [notPrefixAware("decode"), "decoders.kvEvents", "decoders.kvEventsReplay"],
    [notPrefixAware("prefill") && notPrefixAware("decode"), "kvSources.tierPort"],
    [
      health.intervalMs === 0 && "health.intervalMs is 0",
      "health.path",
      "health.timeoutMs",
      "health.failures",
    ],
    [mode !== "pull" && `mode is ${mode}`, "sidecar.kvConnector"],
    ["prefill instances encode images themselves", "sidecar.ecConnector"],
    [
      sidecar?.p2pPull === false && "sidecar.p2pPull is not set (--enable-p2p-pull)",
      "sidecar.p2pConnectorPort",
      "sidecar.kvPools",
    ],
    [above("requestsPerClient", "requestsInFlight"), "limits.requestsPerClient"],
    [above("connectionsPerAddress", "connections"), "limits.connectionsPerAddress"],
  ];
  return reasons.flatMap(([why, ...settings]) =>
    settings.flatMap((setting) =>
      why !== false && isGiven(input, setting) ? [{ setting, why }] : [],
    ),
  );
}

/** Whether a setting, or that of one of several instances, is set. */
function isGiven(input: ProxySettingsInput, setting: string): boolean {
  let values: readonly unknown[] = [input];
  for (const name of setting.split("."))
    values = values.flatMap((value) => (value as Record<string, unknown> | undefined)?.[name]);
  return values.some((value) => value !== undefined);
}
