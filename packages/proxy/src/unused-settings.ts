import type { ProxySettings, ProxySettingsInput } from "./options.js";

export interface UnusedSetting {
  readonly setting: string;
  readonly why: string;
}

/** Which of the settings that were given nothing will read, as the others stand. */
export function unusedSettings(
  given: ProxySettingsInput,
  { mode, pushLegs, routing, health }: ProxySettings,
): UnusedSetting[] {
  const has = (role: "prefillers" | "decoders", member: "kv" | "kvEvents") =>
    (given[role] ?? []).some((one) => typeof one !== "string" && one[member] !== undefined);
  const oneByOne =
    mode === "pull" ? "mode is pull" : pushLegs === "prefill-first" && `pushLegs is ${pushLegs}`;
  const unchecked = health.intervalMs === 0 && "health.intervalMs is 0";
  const unread = (name: "prefill" | "decode") =>
    routing[name] !== "prefix-aware" && `routing.${name} is ${routing[name]}`;

  // A setting, whether it was given, and why nobody reads it, if nobody does.
  const all: readonly (readonly [string, boolean, string | false])[] = [
    ["pushLegs", given.pushLegs !== undefined, mode === "pull" && "mode is pull"],
    // As flags: --prefill-engine-id, --prefill-kv-host, --prefill-side-channel-port, --prefill-tp-size.
    ["prefillers.kv", has("prefillers", "kv"), oneByOne],
    ["decoders.kv", has("decoders", "kv"), "a decode instance tells the prefill engine itself where it is"],
    ["prefillers.kvEvents", has("prefillers", "kvEvents"), unread("prefill")],
    ["decoders.kvEvents", has("decoders", "kvEvents"), unread("decode")],
    ["health.path", given.health?.path !== undefined, unchecked],
    ["health.timeoutMs", given.health?.timeoutMs !== undefined, unchecked],
    ["health.failures", given.health?.failures !== undefined, unchecked],
    ["timeouts.slowReturnMs", given.timeouts?.slowReturnMs !== undefined, unchecked],
  ];
  return all.flatMap(([setting, isGiven, why]) => (isGiven && why !== false ? [{ setting, why }] : []));
}
