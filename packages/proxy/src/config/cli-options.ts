import { join } from "node:path";
import { defined, fleetSettingsOf, merged, requireInstances } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import { checkWorkers } from "../workers/limits-share.js";
import { createCommand, type Flags } from "./cli-command.js";
import { type ProxyFileInput, type ProxySettingsInput, readConfigFile } from "./settings.js";

/** The command line, parsed. */
export interface CliOptions {
  readonly host: string;
  readonly port: number;
  /** Processes that serve the port. */
  readonly workers: number;
  readonly logLevel: Flags["logLevel"];
  /** File that spans are appended to. */
  readonly trace: string | undefined;
  /** The settings of the file, with those of the flags over them. `createProxy` checks them. */
  readonly settings: ProxySettingsInput;
  /** Of a sidecar: how many ranks the decode server has; each gets a sidecar of its own, as `sidecarOfRank` says. */
  readonly dataParallelSize: number;
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
  const {
    host,
    port,
    workers: inFile,
    ...file
  } = flags.config === undefined ? NO_FILE : readConfigFile(flags.config, sources.readFile);
  const fromFlags = settingsOf(flags);
  const settings = withToken(merged(file, fromFlags) as ProxySettingsInput, flags, sources);
  if (settings.sidecar === undefined) requireInstances(settings);
  const workers = flags.workers ?? inFile ?? 1;
  checkWorkers(workers, settings);
  return {
    host: flags.host ?? host ?? "127.0.0.1",
    port: flags.port ?? port ?? 8000,
    workers,
    logLevel: flags.logLevel,
    trace: flags.trace,
    settings,
    dataParallelSize: dataParallelSizeOf(flags),
  };
}

const MAX_RANKS = 1024;

function dataParallelSizeOf({ sidecar, dataParallelSize: size = 1 }: Flags): number {
  if (size >= 1 && size <= MAX_RANKS && (sidecar === true || size === 1)) return size;
  throw new KvError("KV_CONFIG_INVALID", `--data-parallel-size ${size} is not valid here`, {
    hint:
      sidecar === true
        ? `give 1 to ${MAX_RANKS}`
        : "it is for --sidecar; name ranks with --decode host:port@RANK",
  });
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
  const admin = defined({
    host: flags.adminHost,
    port: flags.adminPort,
    allowedHosts: flags.adminAllowedHost,
  });
  const sidecar = sidecarOf(flags);
  return defined({
    sidecar,
    ...fleetSettingsOf(
      // Of a sidecar they hold for all prefill instances.
      sidecar === undefined
        ? flags
        : { ...flags, prefillSideChannelPort: undefined, prefillTpSize: undefined },
      {
        prefill: instances("prefill", flags.prefill, flags.prefillerHosts, flags.prefillerPorts),
        decode: instances("decode", localDecode(flags), flags.decoderHosts, flags.decoderPorts),
      },
    ),
    mode: modeOf(flags),
    pushLegs: flags.pushLegs,
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
    admin: Object.keys(admin).length > 0 ? admin : undefined,
    cors: flags.corsOrigin === undefined ? undefined : { origins: flags.corsOrigin },
    instanceRoutes: flags.instanceRoutes === true ? {} : undefined,
  }) as ProxySettingsInput;
}

/** llm-d's default of `--model-server-port`. */
const DEFAULT_VLLM_PORT = 8200;

/** The decode instances, of a sidecar the one on this machine. */
function localDecode({
  sidecar,
  decode,
  decoderHosts,
  decoderPorts,
  config,
  modelServerPort: vllmPort,
  enableTls,
}: Flags): string[] | undefined {
  if (vllmPort !== undefined && (sidecar !== true || decode !== undefined)) {
    throw new KvError("KV_CONFIG_INVALID", "--vllm-port is the decode instance of a --sidecar", {
      hint: sidecar === true ? "give --vllm-port or --decode" : "give --decode host:port, or --sidecar",
    });
  }
  const isNamed = decode !== undefined || decoderHosts !== undefined || decoderPorts !== undefined;
  const withTls = enableTls?.includes("decoder") === true;
  if (sidecar !== true || isNamed || (config !== undefined && vllmPort === undefined)) {
    if (sidecar !== true || !withTls) return decode;
    throw new KvError("KV_CONFIG_INVALID", "--enable-tls decoder goes with --vllm-port", {
      hint: "name the decode instance as https://host:port",
    });
  }
  const scheme = withTls ? "https://" : "";
  return [`${scheme}127.0.0.1:${vllmPort ?? DEFAULT_VLLM_PORT}`];
}

function sidecarOf(flags: Flags): ProxySettingsInput["sidecar"] {
  const { sidecar, allowPrefill, enableTls, secureProxy, certPath } = flags;
  if (sidecar !== true) {
    const given = Object.entries({
      "--allow-prefill": allowPrefill,
      "--enable-tls": enableTls,
      "--secure-proxy": secureProxy,
      "--cert-path": certPath,
    }).find(([, value]) => value !== undefined);
    if (given === undefined) return undefined;
    throw new KvError("KV_CONFIG_INVALID", `${given[0]} is given without --sidecar`, {
      hint: "give --sidecar; or name instances with --prefill, as https://host:port for TLS",
    });
  }
  if (secureProxy === "false" && certPath !== undefined)
    throw new KvError("KV_CONFIG_INVALID", "--cert-path is given with --secure-proxy=false", {
      hint: "leave out one of them",
    });
  const kv = defined({
    port: only("--prefill-side-channel-port", flags.prefillSideChannelPort),
    tpSize: only("--prefill-tp-size", flags.prefillTpSize),
  });
  return defined({
    allow: allowPrefill,
    prefillTls: enableTls?.includes("prefiller") === true ? true : undefined,
    tls:
      certPath === undefined
        ? secureProxy === undefined
          ? undefined
          : secureProxy === "true"
        : { certFile: join(certPath, "tls.crt"), keyFile: join(certPath, "tls.key") },
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

function hostAndPort(host: string, each: number): string {
  return host.includes(":") && !host.startsWith("[") ? `[${host}]:${each}` : `${host}:${each}`;
}
