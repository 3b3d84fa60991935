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
  const sequential =
    mode === "pull" ? "mode is pull" : pushLegs === "prefill-first" && `pushLegs is ${pushLegs}`;
  const unpaired = pairing.mode === "off" && "pairing.mode is off";
  const unlabelled =
    (pairing.mode === "off" || pairing.mode === "strict") && `pairing.mode is ${pairing.mode}`;
  const noChecks = health.intervalMs === 0 && "health.intervalMs is 0";
  const above = (
    limit: "requestsPerClient" | "connectionsPerAddress",
    all: "requestsInFlight" | "connections",
  ) =>
    (limits[limit] ?? 0) > (limits[all] ?? Number.POSITIVE_INFINITY) &&
    `limits.${all} is ${limits[all]}`;
  const notPrefixAware = (name: "prefill" | "decode") =>
    routing[name] !== "prefix-aware" && `routing.${name} is ${routing[name]}`;

  const named = sidecar !== undefined && "requests name their prefill instances to a sidecar";
  const noPulls = sidecar?.p2pPull === false && "sidecar.p2pPull is not set (--enable-p2p-pull)";
  /** Why a setting has no effect; false: it has one. */
  const reasons: Readonly<Record<string, string | false>> = {
    pushLegs: mode === "pull" && "mode is pull",
    disaggregateAbove: named,
    "routing.prefill": named,
    "routing.decode": named,
    // Their flags: --prefill-engine-id, --prefill-kv-host, --prefill-side-channel-port,
    // --prefill-tp-size.
    "prefillers.kv": unpaired !== false && sequential,
    "decoders.kv": unpaired,
    "prefillers.label": unlabelled,
    "decoders.label": unlabelled,
    "pairing.timeoutMs": unpaired,
    "pairing.refreshMs": unpaired,
    "pairing.handshakeKeyFile": unpaired,
    "prefillers.kvEvents": notPrefixAware("prefill"),
    "decoders.kvEvents": notPrefixAware("decode"),
    "prefillers.kvEventsReplay": notPrefixAware("prefill"),
    "decoders.kvEventsReplay": notPrefixAware("decode"),
    "health.path": noChecks,
    "health.timeoutMs": noChecks,
    "health.failures": noChecks,
    "sidecar.kvConnector": mode !== "pull" && `mode is ${mode}`,
    "sidecar.ecConnector": "prefill instances encode images themselves",
    "sidecar.p2pConnectorPort": noPulls,
    "sidecar.kvPools": noPulls,
    "kvSources.tierPort": notPrefixAware("prefill") && notPrefixAware("decode"),
    "limits.requestsPerClient": above("requestsPerClient", "requestsInFlight"),
    "limits.connectionsPerAddress": above("connectionsPerAddress", "connections"),
  };
  return Object.entries(reasons).flatMap(([setting, why]) =>
    why !== false && isGiven(input, setting) ? [{ setting, why }] : [],
  );
}

/** Whether a setting, or that of one of several instances, is set. */
function isGiven(input: ProxySettingsInput, setting: string): boolean {
  let values: readonly unknown[] = [input];
  for (const name of setting.split("."))
    values = values.flatMap((value) => (value as Record<string, unknown> | undefined)?.[name]);
  return values.some((value) => value !== undefined);
}
