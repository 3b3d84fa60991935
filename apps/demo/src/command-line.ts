import { Command, InvalidArgumentError, Option } from "commander";
import { demoConnectors } from "./instance/connectors.js";
import { LOG_LEVELS, type LogLevel } from "./processes/json-log.js";
import type { RoleOptions } from "./processes/roles.js";
import type { DemoOptions } from "./run/demo.js";

/** The backends of each transport. */
const BACKENDS = { nixl: ["UCX", "LIBFABRIC"], memory: ["MEMORY"] } as const;
/** Default of --max-tokens. With Neuron it is that of the report in vllm-neuron's issue 26. */
const MAX_TOKENS = { plain: 16, neuron: 30 } as const;

export interface DemoFlags extends DemoOptions {
  readonly json: boolean;
  readonly keep: boolean;
  readonly logLevel: LogLevel;
}

interface RawFlags {
  transport?: "nixl" | "memory" | undefined;
  backend?: string;
  connector: string;
  connectorModule?: string;
  pushLegs?: "at-once" | "prefill-first";
  pushLayerwise?: boolean;
  prefills: number;
  decodes: number;
  prefillTp: number;
  decodeTp: number;
  prefillBlockSize: number;
  decodeBlockSize: number;
  prefillPlatform: "cpu" | "neuron";
  decodePlatform: "cpu" | "neuron";
  stagingBlocks?: number;
  requests?: number;
  maxTokens?: number;
  prompts?: string;
  model?: string;
  kvHeads?: number;
  port: number;
  keep: boolean;
  json: boolean;
  logLevel: LogLevel;
}

export interface Actions {
  demo(flags: DemoFlags): Promise<void>;
  instance(options: RoleOptions): Promise<void>;
  proxy(options: RoleOptions): Promise<void>;
}

/** Builds the program's commands. An invalid value is refused with the list of valid ones. */
export function createCommand(actions: Actions): Command {
  const logLevel = () =>
    new Option("--log-level <level>", "least level of the log lines, JSON on stderr").choices(LOG_LEVELS);
  const connectors = demoConnectors().names();
  const program = new Command("kv-demo")
    .description(
      "Run prefill and decode servers and a proxy, and compare their tokens with those of one engine in one process.",
    )
    .addOption(
      new Option("--transport <name>", "default: NIXL when it is installed, otherwise memory").choices([
        "nixl",
        "memory",
      ]),
    )
    .addOption(
      new Option(
        "--backend <name>",
        "NIXL backend; default: UCX, or the one that the environment names",
      ).argParser(backendName),
    )
    .option(
      "--connector <name>",
      `one of ${connectors.join(", ")}, or any name with --connector-module`,
      "NixlConnector",
    )
    .option("--connector-module <specifier>", "module of a connector that is not built in")
    .addOption(
      new Option(
        "--push-legs <order>",
        "push: send both requests at once (default), or prefill first",
      ).choices(["at-once", "prefill-first"]),
    )
    .option("--push-layerwise", "push: write each layer as soon as it is computed")
    .option("--prefills <n>", "prefill instances", wholeNumber(1, 16), 1)
    .option("--decodes <n>", "decode instances", wholeNumber(1, 16), 1)
    .option("--prefill-tp <n>", "tensor-parallel ranks of a prefill instance", wholeNumber(1, 16), 1)
    .option("--decode-tp <n>", "tensor-parallel ranks of a decode instance", wholeNumber(1, 16), 1)
    .option("--prefill-block-size <n>", "tokens in a block of prefill", blockSize, 16)
    .option("--decode-block-size <n>", "tokens in a block of decode", blockSize, 16)
    .addOption(platform("prefill"))
    .addOption(platform("decode"))
    .option(
      "--staging-blocks <n>",
      "blocks of a Neuron instance's pool of host buffers",
      wholeNumber(2, 1_000_000),
    )
    .option(
      "--requests <n>",
      "requests at the same time (default: 4, or one per prompt of --prompts)",
      wholeNumber(1, 1024),
    )
    .option(
      "--max-tokens <n>",
      `tokens to generate from each prompt (default: ${MAX_TOKENS.plain}, with Neuron ${MAX_TOKENS.neuron})`,
      wholeNumber(1, 4096),
    )
    .option(
      "--prompts <file>",
      "file with one prompt per line: text, a JSON string, or a JSON list of token ids",
    )
    .option(
      "--model <dir>",
      "directory of a decoder exported to ONNX, or of a checkpoint; default: a built-in tiny model",
    )
    .option("--kv-heads <n>", "KV heads of the built-in model: 1, 2, 4 or 8", oneOf([1, 2, 4, 8]))
    .option("--port <n>", "port of the proxy; 0 takes a free one", wholeNumber(0, 65_535), 0)
    .option("--keep", "keep running after the comparison, and restart an instance that ends", false)
    .option("--json", "print one JSON object", false)
    .addOption(logLevel().default("warn"))
    .allowExcessArguments(false)
    .enablePositionalOptions()
    .action((raw: RawFlags, command: Command) => actions.demo(checkFlags(raw, connectors, command)));
  const role = (name: "instance" | "proxy", description: string) =>
    program
      .command(name)
      .description(description)
      .requiredOption("--config <json>", "settings")
      .addOption(logLevel().default("info"))
      .action((options: RoleOptions) => actions[name](options));
  role("instance", "run one prefill or decode server over NIXL");
  role("proxy", "run the proxy");
  return program;
}

function checkFlags(raw: RawFlags, connectors: readonly string[], command: Command): DemoFlags {
  const refuse = (message: string): never => command.error(`error: ${message}`);
  const { transport, backend, connector, connectorModule } = raw;
  if (connectorModule === undefined && !connectors.includes(connector)) {
    refuse(
      `--connector ${connector} is not one of ${connectors.join(", ")}; use --connector-module for any other`,
    );
  }
  if (backend !== undefined && transport !== undefined) {
    const valid: readonly string[] = BACKENDS[transport];
    if (!valid.includes(backend))
      refuse(`--backend ${backend} is not one of ${valid.join(", ")} (transport ${transport})`);
  }
  const { prompts, kvHeads, port, keep, json, logLevel, maxTokens, ...rest } = raw;
  const neuron = raw.prefillPlatform === "neuron" || raw.decodePlatform === "neuron";
  return {
    ...rest,
    maxTokens: maxTokens ?? (neuron ? MAX_TOKENS.neuron : MAX_TOKENS.plain),
    restart: keep,
    keep,
    json,
    logLevel,
    port,
    transport: transport ?? transportOf(backend),
    promptsFile: prompts,
    tinyKvHeads: kvHeads,
  };
}

/** The transport of a backend. A NIXL backend requires NIXL. */
function transportOf(backend: string | undefined): RawFlags["transport"] {
  if (backend === undefined) return undefined;
  return backend === "MEMORY" ? "memory" : "nixl";
}

function platform(side: "prefill" | "decode"): Option {
  return new Option(
    `--${side}-platform <name>`,
    `platform of ${side}: the CPU, or a simulated Neuron device with host staging`,
  )
    .choices(["cpu", "neuron"])
    .default("cpu");
}

function backendName(text: string): string {
  const name = text.toUpperCase();
  const all: readonly string[] = Object.values(BACKENDS).flat();
  if (!all.includes(name)) throw new InvalidArgumentError(`Allowed choices are ${all.join(", ")}.`);
  return name;
}

function wholeNumber(least: number, most: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (/^[0-9]+$/.test(text) && value >= least && value <= most) return value;
    throw new InvalidArgumentError(`It must be a whole number from ${least} to ${most}.`);
  };
}

function oneOf(values: readonly number[]): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (values.includes(value)) return value;
    throw new InvalidArgumentError(`Allowed choices are ${values.join(", ")}.`);
  };
}

function blockSize(text: string): number {
  return wholeNumber(1, 256)(text);
}
