import { parseInstanceSpec, type Role } from "@kv/fleet";
import { KvError } from "@kv/interface";
import { createCommand, type Flags, type LogLevel } from "./cli-command.js";
import { type ProxyFileInput, type ProxySettingsInput, readConfigFile } from "./settings.js";

/** The command line, parsed. */
export interface CliOptions {
  readonly host: string;
  readonly port: number;
  readonly logLevel: LogLevel;
  /** File that spans are appended to. */
  readonly trace: string | undefined;
  /** The settings of the file, with those of the flags over them. `createProxy` checks them. */
  readonly settings: ProxySettingsInput;
}

/** Access to files and the environment. */
export interface CliSources {
  readonly readFile: (path: string) => string;
  readonly env: Readonly<Record<string, string | undefined>>;
}

/**
 * Parses the arguments after the program's name, and the file of `--config`; flags override the file. Errors: `KV_CONFIG_INVALID`,
 * `KV_CONFIG_UNKNOWN_KEY`; commander exits with a message for an unknown flag.
 */
export function parseCli(
  args: readonly string[],
  sources: CliSources,
  command = createCommand(),
): CliOptions {
  const flags = command.parse([...args], { from: "user" }).opts<Flags>();
  const { host, port, ...file } =
    flags.config === undefined ? NO_FILE : readConfigFile(flags.config, sources.readFile);
  const fromFlags = settingsOf(flags);
  const settings = withToken(merged(file, fromFlags) as ProxySettingsInput, flags, sources);
  for (const [role, list] of [
    ["prefill", settings.prefillers],
    ["decode", settings.decoders],
  ] as const) {
    if (settings.sidecar !== undefined) break;
    if (settings.discovery === undefined && (list === undefined || list.length === 0)) throw noInstance(role);
  }
  return {
    host: flags.host ?? host ?? "127.0.0.1",
    port: flags.port ?? port ?? 8000,
    logLevel: flags.logLevel,
    trace: flags.trace,
    settings,
  };
}

/** The token is never a flag, because all users of a machine can read the flags of its processes. */
function withToken(
  settings: ProxySettingsInput,
  flags: Flags,
  { readFile, env }: CliSources,
): ProxySettingsInput {
  const file = flags.adminTokenFile;
  const { admin, instanceRoutes } = settings;
  if (admin === undefined && instanceRoutes === undefined) {
    if (file === undefined) return settings;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--admin-token-file ${file} is given, but there are no admin routes`,
      {
        hint: "give --admin-port",
      },
    );
  }
  const token = file === undefined ? (admin?.token ?? env.KV_PROXY_ADMIN_TOKEN) : readToken(file, readFile);
  if (token === undefined) return settings;
  return {
    ...settings,
    ...(admin === undefined ? {} : { admin: { ...admin, token } }),
    ...(instanceRoutes === undefined ? {} : { instanceRoutes: { token, ...instanceRoutes } }),
  };
}

function readToken(file: string, readFile: CliSources["readFile"]): string {
  try {
    return readFile(file).trim();
  } catch (cause) {
    const message = `--admin-token-file ${file} cannot be read: ${(cause as Error).message}`;
    throw new KvError("KV_CONFIG_INVALID", message, {
      hint: "give a file that contains the token (16 characters or more) and that this user may read",
      cause,
    });
  }
}

const NO_FILE: ProxyFileInput = {};

function settingsOf(flags: Flags): ProxySettingsInput {
  const { discoveryFile, dnsPrefill, dnsDecode, kubernetesPods, kubernetesNamespace } = flags;
  const kubernetes = defined({ podSelector: kubernetesPods, namespace: kubernetesNamespace });
  const dns = defined({ prefill: dnsPrefill, decode: dnsDecode });
  const discovery = defined({
    file: discoveryFile,
    dns: Object.keys(dns).length === 0 ? undefined : dns,
    kubernetes: Object.keys(kubernetes).length === 0 ? undefined : kubernetes,
  });
  const admin = defined({
    host: flags.adminHost,
    port: flags.adminPort,
    allowedHosts: flags.adminAllowedHost,
  });
  const sidecar = sidecarOf(flags);
  return defined({
    sidecar,
    prefillers: withEngines(
      "prefill",
      instances("prefill", flags.prefill, flags.prefillerHosts, flags.prefillerPorts),
      {
        engineId: flags.prefillEngineId,
        host: flags.prefillKvHost,
        // Of a sidecar they hold for all prefill instances.
        port: sidecar === undefined ? flags.prefillSideChannelPort : undefined,
        tpSize: sidecar === undefined ? flags.prefillTpSize : undefined,
      },
    ),
    mode: modeOf(flags),
    pushLegs: flags.pushLegs,
    disaggregateAbove: flags.disaggregateAbove,
    decoders: withEngines(
      "decode",
      instances("decode", localDecode(flags), flags.decoderHosts, flags.decoderPorts),
      { host: flags.decodeKvHost, port: flags.decodeSideChannelPort, tpSize: flags.decodeTpSize },
    ),
    routing: defined({
      prefill: flags.prefillRouting ?? flags.routing,
      decode: flags.decodeRouting ?? flags.routing,
    }),
    policy: defined({ missingKv: flags.missingKv, unsplittable: flags.unsplittable }),
    limits: defined({
      bodyLengthBytes: flags.bodyLimitBytes,
      bodiesLengthBytes: flags.bodiesLimitBytes,
      bodiesPerClientLengthBytes:
        flags.bodiesLimitBytes === undefined ? undefined : Math.ceil(flags.bodiesLimitBytes / 2),
      connections: flags.maxConnections,
      connectionsPerAddress: flags.maxConnectionsPerAddress,
      requestsInFlight: flags.maxRequests,
      requestsPerClient: flags.maxRequestsPerClient,
      clientHeader: flags.clientHeader,
    }),
    forwardHeaders: flags.forwardHeader,
    exposeInstances: flags.exposeInstances,
    timeouts: defined({
      connectMs: flags.connectTimeoutMs,
      prefillMs: flags.prefillTimeoutMs,
      firstByteMs: flags.firstByteTimeoutMs,
      stallMs: flags.stallTimeoutMs,
      requestMs: flags.requestTimeoutMs,
      graceMs: flags.graceMs,
      leaseMs: flags.leaseMs,
    }),
    pairing: defined({ mode: flags.pairing }),
    health: defined({ intervalMs: flags.healthIntervalMs }),
    discovery: Object.keys(discovery).length === 0 ? undefined : discovery,
    admin: Object.keys(admin).length > 0 ? admin : undefined,
    cors: flags.corsOrigin === undefined ? undefined : { origins: flags.corsOrigin },
    instanceRoutes: flags.instanceRoutes === true ? {} : undefined,
  }) as ProxySettingsInput;
}

/** llm-d's default of `--vllm-port`. */
const DEFAULT_VLLM_PORT = 8001;

/** The decode instances, of a sidecar the one on this machine. */
function localDecode({
  sidecar,
  decode,
  decoderHosts,
  decoderPorts,
  config,
  vllmPort,
}: Flags): string[] | undefined {
  if (vllmPort !== undefined && (sidecar !== true || decode !== undefined)) {
    throw new KvError("KV_CONFIG_INVALID", "--vllm-port is the decode instance of a --sidecar", {
      hint: sidecar === true ? "give --vllm-port or --decode" : "give --decode host:port, or --sidecar",
    });
  }
  const isNamed = decode !== undefined || decoderHosts !== undefined || decoderPorts !== undefined;
  if (sidecar !== true || isNamed || (config !== undefined && vllmPort === undefined)) return decode;
  return [`127.0.0.1:${vllmPort ?? DEFAULT_VLLM_PORT}`];
}

function sidecarOf(flags: Flags): ProxySettingsInput["sidecar"] {
  const { sidecar, allowPrefill, enableTls } = flags;
  if (sidecar !== true) {
    if (allowPrefill === undefined && enableTls === undefined) return undefined;
    const flag = allowPrefill === undefined ? "--enable-tls" : "--allow-prefill";
    throw new KvError("KV_CONFIG_INVALID", `${flag} is given without --sidecar`, {
      hint: "give --sidecar; or name instances with --prefill, as https://host:port for TLS",
    });
  }
  const kv = defined({
    port: only("--prefill-side-channel-port", flags.prefillSideChannelPort),
    tpSize: only("--prefill-tp-size", flags.prefillTpSize),
  });
  return defined({
    allow: allowPrefill,
    prefillTls: enableTls === undefined ? undefined : true,
    kv: Object.keys(kv).length === 0 ? undefined : kv,
  });
}

/** The value of a flag that a sidecar takes once. */
function only(flag: string, values: readonly number[] | undefined): number | undefined {
  if (values === undefined || values.length === 1) return values?.[0];
  throw new KvError("KV_CONFIG_INVALID", `${flag} has ${values.length} values, and a sidecar takes one`, {
    hint: "give one value, which holds for all prefill instances",
  });
}

function modeOf({ push, mode }: Flags): Flags["mode"] {
  if (push !== true || mode === undefined || mode === "push") return push === true ? "push" : mode;
  throw new KvError("KV_CONFIG_INVALID", `--push contradicts --mode ${mode}`, { hint: "give one of them" });
}

/** Defaults of vLLM's toy proxy: an instance on this machine. They apply when one flag of the pair is given. */
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
    const message = `${toy.flag}-hosts names ${names.length} and ${toy.flag}-ports ${numbers.length}; they must be pairs`;
    throw new KvError("KV_CONFIG_INVALID", message, {
      hint: "give as many hosts as ports, or a single host",
    });
  }
  return [...urls, ...numbers.map((each, at) => hostAndPort(names[at] ?? names[0] ?? toy.host, each))];
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
): ProxySettingsInput["prefillers"] {
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
  })) as ProxySettingsInput["prefillers"];
}

function noInstance(role: keyof typeof TOY): KvError {
  return new KvError("KV_CONFIG_INVALID", `no ${role} instance is given`, {
    hint: `give --${role} http://host:port, one or more`,
  });
}

/** The members of `over` in place of those of `under`, recursively; lists are replaced. */
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
