import { KvError } from "@kv/interface";
import { each, port, wholeNumber } from "@kv/program";
import { type Command, Option } from "commander";
import type { Role } from "../instances/instance.js";
import { parseInstanceSpec } from "../instances/instance-spec.js";
import { PAIRING_MODES, type PairingMode } from "../pairing/pairing-settings.js";
import { ROUTING_NAMES, type RoutingName } from "../routing/built-in-routings.js";
import type { FleetSettingsInput } from "../settings/fleet-settings.js";
import { LOG_LEVELS, type LogLevel } from "../telemetry/json-log.js";

/** The flags of `addFleetOptions` as commander parses them. */
export interface FleetFlags {
  /** `--config`. */
  config?: string;
  /** `--prefill`. */
  prefill?: string[];
  /** `--decode`. */
  decode?: string[];
  /** `--disaggregate-above`. */
  disaggregateAbove?: number;
  /** `--prefill-engine-id`, where the program has it. */
  prefillEngineId?: string[];
  /** `--prefill-kv-host`. */
  prefillKvHost?: string[];
  /** `--prefill-side-channel-port`. */
  prefillSideChannelPort?: number[] | undefined;
  /** `--prefill-tp-size`. */
  prefillTpSize?: number[] | undefined;
  /** `--decode-kv-host`. */
  decodeKvHost?: string[];
  /** `--decode-side-channel-port`. */
  decodeSideChannelPort?: number[];
  /** `--decode-tp-size`. */
  decodeTpSize?: number[];
  /** `--pairing`. */
  pairing?: PairingMode;
  /** `--handshake-key-file`. */
  handshakeKeyFile?: string;
  /** `--routing`. */
  routing?: RoutingName;
  /** `--prefill-routing`. */
  prefillRouting?: RoutingName;
  /** `--decode-routing`. */
  decodeRouting?: RoutingName;
  /** `--discovery-file`. */
  discoveryFile?: string;
  /** `--dns-prefill`. */
  dnsPrefill?: string;
  /** `--dns-decode`. */
  dnsDecode?: string;
  /** `--kubernetes-pods`. */
  kubernetesPods?: string;
  /** `--kubernetes-namespace`. */
  kubernetesNamespace?: string;
  /** `--health-interval-ms`. */
  healthIntervalMs?: number;
  /** `--trace`. */
  trace?: string;
  /** `--log-level`. */
  logLevel: LogLevel;
}

/** Adds the flags that all programs in front of P and D have: the instances, how they are chosen and checked, trace and log. */
export function addFleetOptions(command: Command): Command {
  return command
    .option("--config <file>", "read settings from a JSON file (see schema/config.json); flags override it")
    .option("--prefill <url...>", "prefill instances: host:port or http(s)://host:port")
    .option("--decode <url...>", "decode instances")
    .option(
      "--disaggregate-above <tokens>",
      "a decode instance alone serves prompts with at most so many tokens that it does not have cached (default: two legs for all)",
      wholeNumber,
    )
    .option(
      "--prefill-kv-host <host...>",
      "side channel hosts of the prefill instances, for pairing and push; one for all, or one each",
    )
    .option(
      "--prefill-side-channel-port <port...>",
      "side channel ports of the prefill instances, for pairing and push (default: 5600)",
      each(port),
    )
    .option(
      "--prefill-tp-size <n...>",
      "TP sizes of the prefill instances (push: default 1)",
      each(wholeNumber),
    )
    .option("--decode-kv-host <host...>", "side channel hosts of the decode instances, for pairing")
    .option(
      "--decode-side-channel-port <port...>",
      "side channel ports of the decode instances, for pairing; one for all, or one each",
      each(port),
    )
    .option("--decode-tp-size <n...>", "TP sizes of the decode instances, for pairing", each(wholeNumber))
    .addOption(
      new Option(
        "--pairing <mode>",
        "what pairs with an instance whose side channel cannot be read: every instance (lenient, default), those of its label, none (strict); off reads no side channel",
      ).choices(PAIRING_MODES),
    )
    .option(
      "--handshake-key-file <file>",
      "file with the key of the engines' side channels, where they have one; for pairing",
    )
    .addOption(
      new Option("--routing <strategy>", "how instances are chosen (default: round-robin)").choices(
        ROUTING_NAMES,
      ),
    )
    .addOption(
      new Option("--prefill-routing <strategy>", "for prefill instances only").choices(ROUTING_NAMES),
    )
    .addOption(new Option("--decode-routing <strategy>", "for decode instances only").choices(ROUTING_NAMES))
    .option("--discovery-file <file>", "follow a JSON file that lists the instances")
    .option("--dns-prefill <name>", "follow the DNS name of the prefill instances: host:port, or SRV records")
    .option("--dns-decode <name>", "follow the DNS name of the decode instances")
    .option(
      "--kubernetes-pods <selector>",
      "follow the pods with these labels, such as app=vllm; their roles are by the label llm-d.ai/role (needs @kubernetes/client-node)",
    )
    .option(
      "--kubernetes-namespace <name>",
      "namespace of the pods (default: that of the kubeconfig or the pod)",
    )
    .option("--health-interval-ms <ms>", "time between two health checks; 0 disables them", wholeNumber)
    .option(
      "--trace <file>",
      "append spans to a file as lines of OTLP JSON (OTEL_EXPORTER_OTLP_ENDPOINT sends them to a collector)",
    )
    .addOption(
      new Option("--log-level <level>", "least level of the JSON lines on stderr")
        .choices(LOG_LEVELS)
        .default("info"),
    );
}

/**
 * The settings that the flags of `addFleetOptions` give. `urls`: the instances, where other flags name some too. Errors: `KV_CONFIG_INVALID` for
 * lists that do not go together.
 */
export function fleetSettingsOf(
  flags: FleetFlags,
  urls: Readonly<Record<Role, string[] | undefined>> = { prefill: flags.prefill, decode: flags.decode },
) {
  const { discoveryFile, dnsPrefill, dnsDecode, kubernetesPods, kubernetesNamespace } = flags;
  const kubernetes = defined({ podSelector: kubernetesPods, namespace: kubernetesNamespace });
  const dns = defined({ prefill: dnsPrefill, decode: dnsDecode });
  const discovery = defined({
    file: discoveryFile,
    dns: Object.keys(dns).length === 0 ? undefined : dns,
    kubernetes: Object.keys(kubernetes).length === 0 ? undefined : kubernetes,
  });
  return {
    prefillers: withEngines("prefill", urls.prefill, {
      engineId: flags.prefillEngineId,
      host: flags.prefillKvHost,
      port: flags.prefillSideChannelPort,
      tpSize: flags.prefillTpSize,
    }),
    decoders: withEngines("decode", urls.decode, {
      host: flags.decodeKvHost,
      port: flags.decodeSideChannelPort,
      tpSize: flags.decodeTpSize,
    }),
    disaggregateAbove: flags.disaggregateAbove,
    routing: defined({
      prefill: flags.prefillRouting ?? flags.routing,
      decode: flags.decodeRouting ?? flags.routing,
    }),
    pairing: defined({ mode: flags.pairing, handshakeKeyFile: flags.handshakeKeyFile }),
    health: defined({ intervalMs: flags.healthIntervalMs }),
    discovery: Object.keys(discovery).length === 0 ? undefined : discovery,
  };
}

/** Errors: `KV_CONFIG_INVALID` where a role has no instance, and no discovery could find one. */
export function requireInstances({ prefillers, decoders, discovery }: FleetSettingsInput): void {
  for (const [role, list] of [
    ["prefill", prefillers],
    ["decode", decoders],
  ] as const) {
    if (discovery !== undefined || (list !== undefined && list.length > 0)) continue;
    throw new KvError("KV_CONFIG_INVALID", `no ${role} instance is given`, {
      hint: `give --${role} http://host:port, one or more`,
    });
  }
}

/** What the flags say of the engines of one role, each a list in the order of the instances. */
interface EngineFlags {
  readonly engineId?: readonly string[] | undefined;
  readonly host?: readonly string[] | undefined;
  readonly port?: readonly number[] | undefined;
  readonly tpSize?: readonly number[] | undefined;
}

const ENGINE_FLAGS = {
  engineId: "engine-id",
  host: "kv-host",
  port: "side-channel-port",
  tpSize: "tp-size",
} as const satisfies Record<keyof EngineFlags, string>;

/** Adds each instance's engine, in their order. A flag with one value applies to all instances, except `--prefill-engine-id`. */
function withEngines(
  role: Role,
  urls: string[] | undefined,
  flags: EngineFlags,
): FleetSettingsInput["prefillers"] {
  if (Object.values(flags).every((list) => list === undefined)) return urls;
  const count = urls?.length ?? 0;
  for (const [member, list] of Object.entries(flags) as [
    keyof EngineFlags,
    readonly unknown[] | undefined,
  ][]) {
    const one = member !== "engineId" && list?.length === 1 && count > 0;
    if (list === undefined || one || list.length === count) continue;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--${role}-${ENGINE_FLAGS[member]} has ${list.length} values, but ${count} ${role} instances are given`,
      {
        hint: `give one for each --${role}, in the same order; in a configuration file, set the kv of each instance`,
      },
    );
  }
  const at = <T>(list: readonly T[] | undefined, index: number) => list?.[index] ?? list?.[0];
  return urls?.map((url, index) => ({
    ...parseInstanceSpec(url),
    kv: defined({
      engineId: flags.engineId?.[index],
      host: at(flags.host, index),
      port: at(flags.port, index),
      tpSize: at(flags.tpSize, index),
    }),
  })) as FleetSettingsInput["prefillers"];
}

/** The members that are not undefined. */
export function defined<T extends object>(given: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined)) as never;
}

/** The members of `over` in place of those of `under`, recursively; lists are replaced. */
export function merged(under: object, over: object): object {
  const all: Record<string, unknown> = { ...under };
  for (const [key, value] of Object.entries(over)) {
    const before = all[key];
    all[key] = isPlain(before) && isPlain(value) ? merged(before, value) : value;
  }
  return all;
}

function isPlain(value: unknown): value is object {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
