import type { ProxySettings, ProxySettingsInput } from "./settings.js";

/** A setting that is set but has no effect. */
export interface UnusedSetting {
  readonly setting: string;
  /** The setting that makes it so. */
  readonly why: string;
}

/** The settings that are set but have no effect, because of other settings. */
export function unusedSettings(
  input: ProxySettingsInput,
  { mode, pushLegs, routing, health, limits, pairing, sidecar }: ProxySettings,
): UnusedSetting[] {
  const has = (
    role: "prefillers" | "decoders",
    member: "kv" | "kvEvents" | "kvEventsReplay" | "label",
  ) => (input[role] ?? []).some((one) => typeof one !== "string" && one[member] !== undefined);
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
  // A setting, whether it is set, and why it has no effect, or false.
  const all: readonly (readonly [string, boolean, string | false])[] = [
    ["pushLegs", input.pushLegs !== undefined, mode === "pull" && "mode is pull"],
    ["disaggregateAbove", input.disaggregateAbove !== undefined, named],
    ["routing.prefill", input.routing?.prefill !== undefined, named],
    ["routing.decode", input.routing?.decode !== undefined, named],
    // As flags: --prefill-engine-id, --prefill-kv-host, --prefill-side-channel-port,
    // --prefill-tp-size.
    ["prefillers.kv", has("prefillers", "kv"), unpaired !== false && sequential],
    ["decoders.kv", has("decoders", "kv"), unpaired],
    ["prefillers.label", has("prefillers", "label"), unlabelled],
    ["decoders.label", has("decoders", "label"), unlabelled],
    ["pairing.timeoutMs", input.pairing?.timeoutMs !== undefined, unpaired],
    ["pairing.refreshMs", input.pairing?.refreshMs !== undefined, unpaired],
    ["pairing.handshakeKeyFile", input.pairing?.handshakeKeyFile !== undefined, unpaired],
    ["prefillers.kvEvents", has("prefillers", "kvEvents"), notPrefixAware("prefill")],
    ["decoders.kvEvents", has("decoders", "kvEvents"), notPrefixAware("decode")],
    ["prefillers.kvEventsReplay", has("prefillers", "kvEventsReplay"), notPrefixAware("prefill")],
    ["decoders.kvEventsReplay", has("decoders", "kvEventsReplay"), notPrefixAware("decode")],
    ["health.path", input.health?.path !== undefined, noChecks],
    ["health.timeoutMs", input.health?.timeoutMs !== undefined, noChecks],
    ["health.failures", input.health?.failures !== undefined, noChecks],
    ["timeouts.slowReturnMs", input.timeouts?.slowReturnMs !== undefined, noChecks],
    ["limits.requestsPerClient", true, above("requestsPerClient", "requestsInFlight")],
    ["limits.connectionsPerAddress", true, above("connectionsPerAddress", "connections")],
  ];
  return all.flatMap(([setting, isGiven, why]) =>
    isGiven && why !== false ? [{ setting, why }] : [],
  );
}
