import { join } from "node:path";
import {
  createCommand,
  fleetFlags,
  group,
  invalidConfig,
  type LogLevel,
  listenerPort,
  merged,
  readCommandLine,
  setting,
  withFleetFlags,
} from "@kv/fleet/front-end";
import { z } from "zod";
import {
  ADMIN_TOKEN,
  listenSchema,
  MAX_RANKS,
  MAX_WORKERS,
  type ProxyFileInput,
  type ProxySettingsInput,
  proxyFileSchema,
} from "./settings.js";

export interface CliOptions {
  readonly host: string;
  readonly port: number;
  readonly workers: number;
  readonly warmUpMs: number;
  readonly logLevel: LogLevel;
  /** File to which spans are appended. */
  readonly trace: string | undefined;
  /** Flags override the file. `createProxy` checks the settings. */
  readonly settings: ProxySettingsInput;
  /** Ranks of a sidecar's decode server. Each gets its own sidecar (`sidecarOfRank`). */
  readonly dataParallelSize: number;
}

export interface CliSources {
  readonly readFile: (path: string) => string;
  readonly env: Readonly<Record<string, string | undefined>>;
}

/** Defaults of vLLM's toy proxy. They apply where only one flag of the pair is given. */
const TOY = {
  prefill: { flag: "--prefiller", host: "localhost", port: 8100 },
  decode: { flag: "--decoder", host: "localhost", port: 8200 },
} as const;
/** llm-d's default of `--model-server-port`. */
const DEFAULT_VLLM_PORT = 8200;
const hosts = z.array(z.string()).optional();
const ports = z.array(listenerPort).optional();

const proxyFlags = fleetFlags.extend({
  ...group("Instances, as vLLM's toy proxy takes them", {
    prefillerHosts: setting(
      hosts,
    )`--prefiller-host, --prefiller-hosts <host...>: hosts of the prefill
        instances; a single host serves all ports (default: ${TOY.prefill.host})`,
    prefillerPorts: setting(
      ports,
    )`--prefiller-port, --prefiller-ports <port...>: their ports (default: ${TOY.prefill.port})`,
    decoderHosts: setting(
      hosts,
    )`--decoder-host, --decoder-hosts <host...>: hosts of the decode instances
        (default: ${TOY.decode.host})`,
    decoderPorts: setting(
      ports,
    )`--decoder-port, --decoder-ports <port...>: their ports (default: ${TOY.decode.port})`,
  }),
  ...group("Pairing", {
    prefillEngineId: setting(
      hosts,
    )`--prefill-engine-id <id...>: push: engine ids of the prefill instances
        (default: learned from their answers)`,
  }),
  ...group("Transfer", {
    push: setting(z.boolean().default(false))`--push: the same as --mode push`,
  }),
  ...group("Sidecar", {
    sidecar: setting(
      z.boolean().default(false),
    )`--sidecar: stand on the port of one decode instance; requests
        name their prefill instances in x-prefiller-host-port, as with llm-d`,
    modelServerPort: setting(
      listenerPort.optional(),
    )`--vllm-port, --model-server-port <port>: port of the
        decode instance on this machine (default: ${DEFAULT_VLLM_PORT})`,
    dataParallelSize: setting(
      z.number().default(1),
    )`--data-parallel-size <n>: listen on so many ports from
        --port on, each for a rank of the decode server, at the ports from --vllm-port on`,
    enableTls: setting(
      z.array(z.enum(["prefiller", "decoder"])).default([]),
    )`--enable-tls <stage...>: reach
        instances of this role by HTTPS`,
    enableP2pPull: setting(z.enum(["true", "false"]).optional())`--enable-p2p-pull [boolean]: take
        x-kv-cache-source-host-port, as with llm-d (default: false)`,
    secureProxy: setting(
      z.enum(["true", "false"]).optional(),
    )`--secure-proxy [boolean]: speak TLS on its own
        port (default: false)`,
    certPath: setting(
      z.string().optional(),
    )`--cert-path <folder>: folder of tls.crt and tls.key, read again
        when they change (default: with --secure-proxy: one is made)`,
  }),
  ...group("Admin routes", {
    adminTokenFile: setting(
      z.string().optional(),
    )`--admin-token-file <file>: file with the token of the admin
        routes (default: ${ADMIN_TOKEN})`,
  }),
});
type Flags = z.output<typeof proxyFlags>;

export const PROGRAM = {
  name: "kv-proxy",
  description:
    "Routes OpenAI-style HTTP requests through a prefill and a decode instance. The decode instance gets the KV cache from the prefill instance.",
  module: import.meta.url,
  readme: "@kv/proxy",
  file: proxyFileSchema,
  flags: proxyFlags,
};

/**
 * Flags override the file of `--config`.
 * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`; commander exits for an unknown flag.
 */
export function parseCli(
  args: readonly string[],
  sources: CliSources,
  command = createCommand(PROGRAM),
): CliOptions {
  const { flags, given, inFile } = readCommandLine(PROGRAM, args, sources.readFile, command);
  const all = merged(listenSchema.parse({}), merged(inFile, settingsOf(flags, given)));
  const { host, port, workers, warmUpMs, ...inFileAndFlags } = all;
  const settings = withToken(inFileAndFlags, flags.adminTokenFile, sources);
  checkWorkers(workers, settings);
  const { logLevel, trace } = flags;
  return {
    host,
    port,
    workers,
    warmUpMs,
    logLevel,
    trace,
    settings,
    dataParallelSize: dataParallelSizeOf(flags),
  };
}

/** @throws `KV_CONFIG_INVALID` for a number of workers that cannot work. */
function checkWorkers(workers: number, settings: ProxySettingsInput): void {
  if (!Number.isInteger(workers) || workers < 1 || workers > MAX_WORKERS)
    throw invalidConfig(
      `--workers is ${workers}, and kv-proxy takes 1 to ${MAX_WORKERS}`,
      "give one worker for each core that kv-proxy may use",
    );
  if (workers > 1 && settings.sidecar !== undefined)
    throw invalidConfig(
      `--workers is ${workers}, and a --sidecar has one process`,
      "leave --workers out: a sidecar serves one decode instance",
    );
}

function dataParallelSizeOf({ sidecar, dataParallelSize: size }: Flags): number {
  if (size >= 1 && size <= MAX_RANKS && (sidecar || size === 1)) return size;
  throw invalidConfig(
    `--data-parallel-size ${size} is not valid here`,
    sidecar
      ? `give 1 to ${MAX_RANKS}`
      : "it is for --sidecar; name ranks with --decode host:port@RANK",
  );
}

/** Not a flag: all users of a machine can read the flags of its processes. */
function withToken(
  settings: ProxySettingsInput,
  file: string | undefined,
  { readFile, env }: CliSources,
): ProxySettingsInput {
  const { admin, instanceRoutes } = settings;
  if (admin === undefined && instanceRoutes === undefined) {
    if (file === undefined) return settings;
    throw invalidConfig(
      `--admin-token-file ${file} is given, but there are no admin routes`,
      "give --admin-port",
    );
  }
  const token = file === undefined ? (admin?.token ?? env[ADMIN_TOKEN]) : readToken(file, readFile);
  return merged(settings, {
    admin: admin && { token },
    instanceRoutes: instanceRoutes && merged({ token }, instanceRoutes),
  });
}

function readToken(file: string, readFile: CliSources["readFile"]): string {
  try {
    return readFile(file).trim();
  } catch (cause) {
    throw invalidConfig(
      `--admin-token-file ${file} cannot be read: ${(cause as Error).message}`,
      "give a file that contains the token (16 characters or more) and that this user may read",
      cause,
    );
  }
}

function settingsOf(flags: Flags, given: ProxyFileInput) {
  const { prefillerHosts, prefillerPorts, decoderHosts, decoderPorts } = flags;
  const sidecar = sidecarOf(flags, given);
  // A sidecar applies these to all prefill instances.
  const ofAll = sidecar && {
    prefillSideChannelPort: undefined,
    prefillTpSize: undefined,
    prefillPpSize: undefined,
  };
  const urls = {
    prefill: instances("prefill", given.prefillers, prefillerHosts, prefillerPorts),
    decode: instances("decode", localDecode(flags, given), decoderHosts, decoderPorts),
  };
  const { bodiesLengthBytes: bodies } = given.limits ?? {};
  return merged(withFleetFlags(given, { ...flags, ...ofAll }, urls), {
    mode: modeOf(flags, given),
    limits:
      bodies === undefined ? undefined : { bodiesPerClientLengthBytes: Math.ceil(bodies / 2) },
    sidecar,
  });
}

/** The decode instances; for a sidecar, the one on this machine. */
function localDecode(flags: Flags, { decoders }: ProxyFileInput): Instances {
  const {
    sidecar,
    modelServerPort: vllmPort,
    enableTls,
    config,
    decoderHosts,
    decoderPorts,
  } = flags;
  if (vllmPort !== undefined && (!sidecar || decoders !== undefined))
    throw invalidConfig(
      "--vllm-port is the decode instance of a --sidecar",
      sidecar ? "give --vllm-port or --decode" : "give --decode host:port, or --sidecar",
    );
  const isNamed = [decoders, decoderHosts, decoderPorts].some((one) => one !== undefined);
  const withTls = sidecar && enableTls.includes("decoder");
  if (sidecar && !isNamed && (config === undefined || vllmPort !== undefined))
    return [`${withTls ? "https://" : ""}127.0.0.1:${vllmPort ?? DEFAULT_VLLM_PORT}`];
  if (!withTls) return decoders;
  throw invalidConfig(
    "--enable-tls decoder goes with --vllm-port",
    "name the decode instance as https://host:port",
  );
}

function sidecarOf(flags: Flags, given: ProxyFileInput): ProxySettingsInput["sidecar"] {
  const { sidecar, enableTls, enableP2pPull, secureProxy, certPath } = flags;
  if (!sidecar) {
    const { allow, kvConnector, ecConnector, p2pConnectorPort } = given.sidecar ?? {};
    const flag = Object.entries({
      "--allow-prefill": allow,
      "--kv-connector": kvConnector,
      "--ec-connector": ecConnector,
      "--p2p-connector-port": p2pConnectorPort,
      "--enable-p2p-pull": enableP2pPull,
      "--enable-tls": enableTls[0],
      "--secure-proxy": secureProxy,
      "--cert-path": certPath,
    }).find(([, value]) => value !== undefined);
    if (flag === undefined) return undefined;
    throw invalidConfig(
      `${flag[0]} is given without --sidecar`,
      "give --sidecar; or name instances with --prefill, as https://host:port for TLS",
    );
  }
  if (secureProxy === "false" && certPath !== undefined)
    throw invalidConfig("--cert-path is given with --secure-proxy=false", "leave out one of them");
  const port = only("--prefill-side-channel-port", flags.prefillSideChannelPort);
  const tpSize = only("--prefill-tp-size", flags.prefillTpSize);
  const ppSize = only("--prefill-pp-size", flags.prefillPpSize);
  const files = certPath !== undefined && {
    certFile: join(certPath, "tls.crt"),
    keyFile: join(certPath, "tls.key"),
  };
  return {
    prefillTls: enableTls.includes("prefiller") || undefined,
    p2pPull: enableP2pPull === undefined ? undefined : enableP2pPull === "true",
    tls: files || (secureProxy === undefined ? undefined : secureProxy === "true"),
    kv: (port ?? tpSize ?? ppSize) === undefined ? undefined : { port, tpSize, ppSize },
  };
}

/** Returns the value of a flag that a sidecar takes once. */
function only(flag: string, values: readonly number[] | undefined): number | undefined {
  if (values === undefined || values.length === 1) return values?.[0];
  throw invalidConfig(
    `${flag} has ${values.length} values, and a sidecar takes one`,
    "give one value, which holds for all prefill instances",
  );
}

function modeOf({ push }: Flags, { mode }: ProxyFileInput): ProxyFileInput["mode"] {
  if (!push || mode === undefined || mode === "push") return push ? "push" : mode;
  throw invalidConfig(`--push contradicts --mode ${mode}`, "give one of them");
}

type Instances = ProxySettingsInput["prefillers"];

function instances(
  role: keyof typeof TOY,
  urls: Instances,
  hosts: readonly string[] | undefined,
  ports: readonly number[] | undefined,
): Instances {
  if (hosts === undefined && ports === undefined) return urls;
  const toy = TOY[role];
  const names = hosts ?? [toy.host];
  const numbers = ports ?? [toy.port];
  if (names.length !== 1 && names.length !== numbers.length)
    throw invalidConfig(
      `${toy.flag}-hosts names ${names.length} and ${toy.flag}-ports ${numbers.length}; they must be pairs`,
      "give as many hosts as ports, or a single host",
    );
  return [
    ...(urls ?? []),
    ...numbers.map((each, at) => hostAndPort(names[at] ?? names[0] ?? toy.host, each)),
  ];
}

function hostAndPort(host: string, each: number): string {
  return host.includes(":") && !host.startsWith("[") ? `[${host}]:${each}` : `${host}:${each}`;
}
