import { KvError } from "@kv/interface";
import { Command, InvalidArgumentError, Option } from "commander";
import { instanceSpec } from "./instance-spec.js";
import {
  MODES,
  type ProxyFileInput,
  type ProxySettingsInput,
  PUSH_LEGS,
  ROUTING_NAMES,
  type RoutingName,
  readConfigFile,
} from "./options.js";

const LOG_LEVELS = ["debug", "info", "warn", "error", "silent"] as const;
export type LogLevel = (typeof LOG_LEVELS)[number];

export interface CliOptions {
  readonly host: string;
  readonly port: number;
  readonly logLevel: LogLevel;
  /** What the flags say over what the file says; `createProxy` checks it. */
  readonly settings: ProxySettingsInput;
}

/** What the command line needs of the machine. */
export interface CliSources {
  readonly readFile: (path: string) => string;
  readonly env: Readonly<Record<string, string | undefined>>;
}

interface Flags {
  config?: string;
  host?: string;
  port?: number;
  prefill?: string[];
  decode?: string[];
  prefillerHosts?: string[];
  prefillerPorts?: number[];
  decoderHosts?: string[];
  decoderPorts?: number[];
  push?: boolean;
  mode?: (typeof MODES)[number];
  pushLegs?: (typeof PUSH_LEGS)[number];
  prefillEngineId?: string[];
  prefillKvHost?: string[];
  prefillSideChannelPort?: number[];
  prefillTpSize?: number[];
  missingKv?: "fail" | "decode-computes";
  unsplittable?: "fail" | "decode-computes";
  bodyLimitBytes?: number;
  connectTimeoutMs?: number;
  prefillTimeoutMs?: number;
  firstByteTimeoutMs?: number;
  stallTimeoutMs?: number;
  requestTimeoutMs?: number;
  graceMs?: number;
  leaseMs?: number;
  healthIntervalMs?: number;
  routing?: RoutingName;
  prefillRouting?: RoutingName;
  decodeRouting?: RoutingName;
  discoveryFile?: string;
  dnsPrefill?: string;
  dnsDecode?: string;
  adminHost?: string;
  adminPort?: number;
  adminTokenFile?: string;
  logLevel: LogLevel;
}

/**
 * Reads the arguments after the program's name, and the file that `--config` names; flags win. Errors: commander's own exit with a
 * message, `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`.
 */
export function parseCli(
  args: readonly string[],
  sources: CliSources,
  command = createCommand(),
): CliOptions {
  const flags = command.parse([...args], { from: "user" }).opts<Flags>();
  const { host, port, ...file } =
    flags.config === undefined ? NO_FILE : readConfigFile(flags.config, sources.readFile);
  const given = settingsOf(flags);
  const settings = withToken(merged(file, given) as ProxySettingsInput, flags, sources);
  for (const [role, list] of [
    ["prefill", settings.prefillers],
    ["decode", settings.decoders],
  ] as const) {
    if (settings.discovery === undefined && (list === undefined || list.length === 0)) refuseNone(role);
  }
  return {
    host: flags.host ?? host ?? "127.0.0.1",
    port: flags.port ?? port ?? 8000,
    logLevel: flags.logLevel,
    settings,
  };
}

/** The token is never a flag: those are seen by everybody on the machine. */
function withToken(
  settings: ProxySettingsInput,
  flags: Flags,
  { readFile, env }: CliSources,
): ProxySettingsInput {
  const file = flags.adminTokenFile;
  if (settings.admin === undefined) {
    if (file === undefined) return settings;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--admin-token-file ${file} is given, and there are no admin routes`,
      {
        hint: "give --admin-port",
      },
    );
  }
  const token =
    file === undefined ? (settings.admin.token ?? env.KV_PROXY_ADMIN_TOKEN) : readToken(file, readFile);
  return token === undefined ? settings : { ...settings, admin: { ...settings.admin, token } };
}

function readToken(file: string, readFile: CliSources["readFile"]): string {
  try {
    return readFile(file).trim();
  } catch (cause) {
    const message = `--admin-token-file ${file} cannot be read: ${(cause as Error).message}`;
    throw new KvError("KV_CONFIG_INVALID", message, {
      hint: "give a file that holds the token, 16 characters or more, and that this user may read",
      cause,
    });
  }
}

const NO_FILE: ProxyFileInput = {};

function settingsOf(flags: Flags): ProxySettingsInput {
  const { discoveryFile, dnsPrefill, dnsDecode } = flags;
  const dns = defined({ prefill: dnsPrefill, decode: dnsDecode });
  const discovery = defined({ file: discoveryFile, dns: Object.keys(dns).length === 0 ? undefined : dns });
  const admin = defined({ host: flags.adminHost, port: flags.adminPort });
  return defined({
    prefillers: withCoordinates(
      instances("prefill", flags.prefill, flags.prefillerHosts, flags.prefillerPorts),
      flags,
    ),
    mode: modeOf(flags),
    pushLegs: flags.pushLegs,
    decoders: instances("decode", flags.decode, flags.decoderHosts, flags.decoderPorts),
    routing: defined({
      prefill: flags.prefillRouting ?? flags.routing,
      decode: flags.decodeRouting ?? flags.routing,
    }),
    policy: defined({ missingKv: flags.missingKv, unsplittable: flags.unsplittable }),
    limits: defined({ bodyLengthBytes: flags.bodyLimitBytes }),
    timeouts: defined({
      connectMs: flags.connectTimeoutMs,
      prefillMs: flags.prefillTimeoutMs,
      firstByteMs: flags.firstByteTimeoutMs,
      stallMs: flags.stallTimeoutMs,
      requestMs: flags.requestTimeoutMs,
      graceMs: flags.graceMs,
      leaseMs: flags.leaseMs,
    }),
    health: defined({ intervalMs: flags.healthIntervalMs }),
    discovery: Object.keys(discovery).length === 0 ? undefined : discovery,
    admin: Object.keys(admin).length > 0 ? admin : undefined,
  }) as ProxySettingsInput;
}

function modeOf({ push, mode }: Flags): Flags["mode"] {
  if (push !== true || mode === undefined || mode === "push") return push === true ? "push" : mode;
  throw new KvError("KV_CONFIG_INVALID", `--push is given, and --mode ${mode}`, { hint: "give one of them" });
}

export function createCommand(): Command {
  const policies = ["fail", "decode-computes"];
  const toy = "as in vLLM's toy proxy";
  return new Command("kv-proxy")
    .description(
      "Routes OpenAI-style requests through a prefill and a decode instance, whose KV goes from one to the other.",
    )
    .option("--config <file>", "settings as JSON (schema/config.json); flags win")
    .option("--prefill <url...>", "prefill instances: host:port or http(s)://host:port")
    .option("--decode <url...>", "decode instances")
    .option("--host <host>", "address to listen on (default: 127.0.0.1)")
    .option("--port <port>", "port to listen on; 0 takes a free one (default: 8000)", port)
    .option("--prefiller-host, --prefiller-hosts <host...>", `${toy}; a single host serves all ports`)
    .option("--prefiller-port, --prefiller-ports <port...>", toy, eachPort)
    .option("--decoder-host, --decoder-hosts <host...>", toy)
    .option("--decoder-port, --decoder-ports <port...>", toy, eachPort)
    .addOption(
      new Option(
        "--mode <mode>",
        "pull (default: NixlConnector), push (NixlPushConnector), or auto: as each prefill instance says",
      ).choices(MODES),
    )
    .option("--push", "the same as --mode push")
    .addOption(
      new Option(
        "--push-legs <order>",
        "of push: both legs at once (default), or one after the other",
      ).choices(PUSH_LEGS),
    )
    .option(
      "--prefill-engine-id <id...>",
      "of push: the prefill engines' ids; else learned from their answers",
    )
    .option("--prefill-kv-host <host...>", "of push: their side channels' hosts; one for all, or one each")
    .option(
      "--prefill-side-channel-port <port...>",
      "of push: their side channels' ports (default: 5600)",
      eachPort,
    )
    .option("--prefill-tp-size <n...>", "of push: their TP sizes (default: 1)", eachNumber)
    .addOption(new Option("--routing <strategy>", "how instances are chosen").choices(ROUTING_NAMES))
    .addOption(new Option("--prefill-routing <strategy>", "for prefill alone").choices(ROUTING_NAMES))
    .addOption(new Option("--decode-routing <strategy>", "for decode alone").choices(ROUTING_NAMES))
    .option("--discovery-file <file>", "instances from a JSON file, read again when it changes")
    .option("--dns-prefill <name>", "prefill instances by DNS: host:port, or the name of SRV records")
    .option("--dns-decode <name>", "decode instances by DNS")
    .option("--admin-host <host>", "address of the admin routes")
    .option("--admin-port <port>", "port of the admin routes and the page; without it there are none", port)
    .option("--admin-token-file <file>", "holds their token; else KV_PROXY_ADMIN_TOKEN does")
    .addOption(
      new Option("--missing-kv <policy>", "when a prefill instance answers without KV parameters").choices(
        policies,
      ),
    )
    .addOption(
      new Option("--unsplittable <policy>", "for what cannot be parted, such as beam search").choices(
        policies,
      ),
    )
    .option("--body-limit-bytes <n>", "largest body of a client", wholeNumber)
    .option("--connect-timeout-ms <ms>", "to reach an instance", wholeNumber)
    .option("--prefill-timeout-ms <ms>", "for the prefill leg", wholeNumber)
    .option("--first-byte-timeout-ms <ms>", "for the decode leg's first byte", wholeNumber)
    .option("--stall-timeout-ms <ms>", "between two pieces of an answer", wholeNumber)
    .option("--request-timeout-ms <ms>", "for a request as a whole", wholeNumber)
    .option("--lease-ms <ms>", "how long a prefill instance surely holds blocks", wholeNumber)
    .option("--health-interval-ms <ms>", "between two health checks; 0: none", wholeNumber)
    .option("--grace-ms <ms>", "left to requests in flight at SIGTERM", wholeNumber)
    .addOption(
      new Option("--log-level <level>", "lines of JSON on stderr").choices(LOG_LEVELS).default("info"),
    )
    .allowExcessArguments(false);
}

/** Defaults of vLLM's toy proxy: an instance on this machine. They hold as soon as one flag of the pair is given. */
const TOY = {
  prefill: { flag: "--prefiller", host: "localhost", port: 8100 },
  decode: { flag: "--decoder", host: "localhost", port: 8200 },
} as const;

function instances(
  role: keyof typeof TOY,
  urls: string[] = [],
  hosts?: string[],
  ports?: number[],
): string[] | undefined {
  if (hosts === undefined && ports === undefined) return urls.length > 0 ? urls : undefined;
  const toy = TOY[role];
  const names = hosts ?? [toy.host];
  const numbers = ports ?? [toy.port];
  if (names.length !== 1 && names.length !== numbers.length) {
    const message = `${toy.flag}-hosts names ${names.length} and ${toy.flag}-ports ${numbers.length}; they go in pairs`;
    throw new KvError("KV_CONFIG_INVALID", message, {
      hint: "give as many of one as of the other, or a single host",
    });
  }
  return [...urls, ...numbers.map((each, at) => hostAndPort(names[at] ?? names[0] ?? toy.host, each))];
}

/** Coordinates in the order of the prefill instances; of a flag that is given once, its value goes for all but the engine ids. */
function withCoordinates(urls: string[] | undefined, flags: Flags): ProxySettingsInput["prefillers"] {
  const { prefillEngineId, prefillKvHost, prefillSideChannelPort, prefillTpSize } = flags;
  const given = { prefillEngineId, prefillKvHost, prefillSideChannelPort, prefillTpSize };
  if (Object.values(given).every((list) => list === undefined)) return urls;
  const count = urls?.length ?? 0;
  for (const [flag, list] of Object.entries(given)) {
    const one = flag !== "prefillEngineId" && list?.length === 1 && count > 0;
    if (list === undefined || one || list.length === count) continue;
    const name = flag.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--${name} has ${list.length} values, and ${count} prefill instances are given`,
      {
        hint: "give one for each --prefill, in the same order; in a configuration file they are each instance's kv",
      },
    );
  }
  const at = <T>(list: readonly T[] | undefined, index: number) => list?.[index] ?? list?.[0];
  return urls?.map((url, index) => ({
    ...instanceSpec(url),
    kv: defined({
      engineId: prefillEngineId?.[index],
      host: at(prefillKvHost, index),
      port: at(prefillSideChannelPort, index),
      tpSize: at(prefillTpSize, index),
    }),
  })) as ProxySettingsInput["prefillers"];
}

function refuseNone(role: keyof typeof TOY): never {
  throw new KvError("KV_CONFIG_INVALID", `no ${role} instance is given`, {
    hint: `give --${role} http://host:port, once or more`,
  });
}

/** `over` on top of `under`, member by member; lists are replaced. */
function merged(under: object, over: object): object {
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

function hostAndPort(host: string, each: number): string {
  return host.includes(":") && !host.startsWith("[") ? `[${host}]:${each}` : `${host}:${each}`;
}

function defined<T extends object>(given: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined)) as never;
}

function wholeNumber(text: string): number {
  if (!/^[0-9]{1,12}$/.test(text)) throw new InvalidArgumentError("It must be a whole number.");
  return Number(text);
}

function port(text: string): number {
  const value = wholeNumber(text);
  if (value > 65_535) throw new InvalidArgumentError("It must be a port, 65535 at most.");
  return value;
}

function eachNumber(text: string, before: number[] | undefined): number[] {
  return [...(before ?? []), wholeNumber(text)];
}

function eachPort(text: string, before: number[] | undefined): number[] {
  return [...(before ?? []), port(text)];
}
