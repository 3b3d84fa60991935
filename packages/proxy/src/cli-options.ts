import { KvError } from "@kv/interface";
import { Command, InvalidArgumentError, Option } from "commander";
import type { ProxySettingsInput } from "./options.js";

export const LOG_LEVELS = ["debug", "info", "warn", "error", "silent"] as const;
export type LogLevel = (typeof LOG_LEVELS)[number];

export interface CliOptions {
  readonly host: string;
  readonly port: number;
  readonly logLevel: LogLevel;
  readonly settings: ProxySettingsInput;
}

interface Flags {
  host: string;
  port: number;
  prefill?: string[];
  decode?: string[];
  prefillerHosts?: string[];
  prefillerPorts?: number[];
  decoderHosts?: string[];
  decoderPorts?: number[];
  missingKv?: "fail" | "decode-computes";
  unsplittable?: "fail" | "decode-computes";
  bodyLimitBytes?: number;
  connectTimeoutMs?: number;
  prefillTimeoutMs?: number;
  firstByteTimeoutMs?: number;
  stallTimeoutMs?: number;
  requestTimeoutMs?: number;
  graceMs?: number;
  logLevel: LogLevel;
}

/** Reads the arguments after the program's name. Errors: commander's own exit with a message, `KV_CONFIG_INVALID`. */
export function parseCli(args: readonly string[], command = createCommand()): CliOptions {
  const flags = command.parse([...args], { from: "user" }).opts<Flags>();
  return {
    host: flags.host,
    port: flags.port,
    logLevel: flags.logLevel,
    settings: {
      prefillers: instances("prefill", flags.prefill, flags.prefillerHosts, flags.prefillerPorts),
      decoders: instances("decode", flags.decode, flags.decoderHosts, flags.decoderPorts),
      policy: defined({ missingKv: flags.missingKv, unsplittable: flags.unsplittable }),
      limits: defined({ bodyLengthBytes: flags.bodyLimitBytes }),
      timeouts: defined({
        connectMs: flags.connectTimeoutMs,
        prefillMs: flags.prefillTimeoutMs,
        firstByteMs: flags.firstByteTimeoutMs,
        stallMs: flags.stallTimeoutMs,
        requestMs: flags.requestTimeoutMs,
        graceMs: flags.graceMs,
      }),
    },
  };
}

export function createCommand(): Command {
  const policies = ["fail", "decode-computes"];
  const toy = "as in vLLM's toy proxy";
  return new Command("kv-proxy")
    .description(
      "Routes OpenAI-style requests through a prefill and a decode instance (KV pulled by the decoder).",
    )
    .option("--prefill <url...>", "prefill instances: host:port or http(s)://host:port")
    .option("--decode <url...>", "decode instances")
    .option("--host <host>", "address to listen on", "127.0.0.1")
    .option("--port <port>", "port to listen on; 0 takes a free one", port, 8000)
    .option("--prefiller-host, --prefiller-hosts <host...>", `${toy}; a single host serves all ports`)
    .option("--prefiller-port, --prefiller-ports <port...>", toy, eachPort)
    .option("--decoder-host, --decoder-hosts <host...>", toy)
    .option("--decoder-port, --decoder-ports <port...>", toy, eachPort)
    .addOption(
      new Option("--missing-kv <policy>", "when a prefill instance answers without KV parameters").choices(
        policies,
      ),
    )
    .addOption(
      new Option("--unsplittable <policy>", "for several prompts, n > 1, prompt_logprobs, …").choices(
        policies,
      ),
    )
    .option("--body-limit-bytes <n>", "largest body of a client", wholeNumber)
    .option("--connect-timeout-ms <ms>", "to reach an instance", wholeNumber)
    .option("--prefill-timeout-ms <ms>", "for the prefill leg", wholeNumber)
    .option("--first-byte-timeout-ms <ms>", "for the decode leg's first byte", wholeNumber)
    .option("--stall-timeout-ms <ms>", "between two pieces of an answer", wholeNumber)
    .option("--request-timeout-ms <ms>", "for a request as a whole", wholeNumber)
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
): string[] {
  if (hosts === undefined && ports === undefined) {
    if (urls.length > 0) return urls;
    throw new KvError("KV_CONFIG_INVALID", `no ${role} instance is given`, {
      hint: `give --${role} http://host:port, once or more`,
    });
  }
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

function eachPort(text: string, before: number[] | undefined): number[] {
  return [...(before ?? []), port(text)];
}
