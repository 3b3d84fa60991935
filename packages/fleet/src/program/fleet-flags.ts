import { z } from "zod";
import type { Role } from "../instances/instance.js";
import { parseInstanceSpec } from "../instances/instance-spec.js";
import { ROUTING_NAMES } from "../routing/built-in-routings.js";
import type { FleetSettingsInput } from "../settings/fleet-settings.js";
import { invalidConfig } from "../settings/invalid-config.js";
import { group, setting } from "../settings/settings-table.js";
import { LOG_LEVELS } from "../telemetry/json-log.js";
import { merged } from "./command-line.js";

const texts = z.array(z.string()).optional();
const numbers = z.array(z.number()).optional();
const ports = z.array(z.number().max(65_535)).optional();

/** Flags of all front ends that are no settings. */
export const fleetFlags = z.object({
  config: setting(z.string().optional())`--config <file>: read settings from a JSON file (see
      schema/config.json); flags override it`,
  trace: setting(z.string().optional())`--trace <file>: append spans to a file as lines of OTLP JSON
      (OTEL_EXPORTER_OTLP_ENDPOINT sends them to a collector)`,
  logLevel: setting(
    z.enum(LOG_LEVELS).default("info"),
  )`--log-level <level>: least level of the JSON lines on
      stderr`,
  ...group("Routing", {
    routing: setting(
      z.enum(ROUTING_NAMES).optional(),
    )`--routing <strategy>: how instances of both roles are
        chosen`,
  }),
  ...group("Pairing", {
    prefillKvHost: setting(
      texts,
    )`--prefill-kv-host <host...>: side channel hosts of the prefill instances,
        for pairing and push; one for all, or one each`,
    prefillSideChannelPort: setting(
      ports,
    )`--prefill-side-channel-port <port...>: side channel ports of the
        prefill instances, for pairing and push (default: 5600)`,
    prefillTpSize: setting(
      numbers,
    )`--prefill-tp-size <n...>: TP sizes of the prefill instances (default: 1
        for push)`,
    prefillPpSize: setting(
      numbers,
    )`--prefill-pp-size <n...>: PP sizes of the prefill instances (default: 1
        for push)`,
    decodeKvHost: setting(
      texts,
    )`--decode-kv-host <host...>: side channel hosts of the decode instances`,
    decodeSideChannelPort: setting(
      ports,
    )`--decode-side-channel-port <port...>: side channel ports of the
        decode instances; one for all, or one each`,
    decodeTpSize: setting(numbers)`--decode-tp-size <n...>: TP sizes of the decode instances`,
  }),
});

/** Only some programs have `--prefill-engine-id`. */
export type FleetFlags = z.output<typeof fleetFlags> & {
  readonly prefillEngineId?: string[] | undefined;
};

/**
 * Applies `fleetFlags` to all instances of a role in `given`, and to `urls` of other flags.
 *
 * @throws `KV_CONFIG_INVALID` for lists that do not go together.
 */
export function withFleetFlags<Given extends FleetSettingsInput>(
  given: Given,
  flags: FleetFlags,
  urls: Readonly<Record<Role, Instances>> = { prefill: given.prefillers, decode: given.decoders },
): Given {
  const prefillers = withEngines("prefill", urls.prefill, {
    engineId: flags.prefillEngineId,
    host: flags.prefillKvHost,
    port: flags.prefillSideChannelPort,
    tpSize: flags.prefillTpSize,
    ppSize: flags.prefillPpSize,
  });
  const decoders = withEngines("decode", urls.decode, {
    host: flags.decodeKvHost,
    port: flags.decodeSideChannelPort,
    tpSize: flags.decodeTpSize,
  });
  const routing = { prefill: flags.routing, decode: flags.routing };
  return merged(given, { routing: merged(routing, given.routing ?? {}), prefillers, decoders });
}

type Instances = FleetSettingsInput["prefillers"];

const ENGINE_FLAGS = {
  engineId: "engine-id",
  host: "kv-host",
  port: "side-channel-port",
  tpSize: "tp-size",
  ppSize: "pp-size",
} as const;

/** A single value applies to all instances, except of `--prefill-engine-id`. */
function withEngines(
  role: Role,
  urls: Instances,
  flags: Readonly<Partial<Record<keyof typeof ENGINE_FLAGS, readonly unknown[] | undefined>>>,
): Instances {
  const lists = Object.entries(flags).filter(([, list]) => list !== undefined) as [
    keyof typeof ENGINE_FLAGS,
    readonly unknown[],
  ][];
  if (lists.length === 0) return urls;
  const count = urls?.length ?? 0;
  for (const [member, { length }] of lists) {
    if (length === count || (member !== "engineId" && length === 1 && count > 0)) continue;
    throw invalidConfig(
      `--${role}-${ENGINE_FLAGS[member]} has ${length} values, but ${count} ${role} instances are given`,
      `give one for each --${role}, in the same order; in a configuration file, set the kv of each instance`,
    );
  }
  return urls?.map((url, index) => ({
    ...parseInstanceSpec(url),
    kv: Object.fromEntries(lists.map(([member, list]) => [member, list[index] ?? list[0]])),
  }));
}
