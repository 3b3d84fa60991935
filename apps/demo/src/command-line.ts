import { Command, InvalidArgumentError, Option } from "commander";
import { demoConnectors } from "./instance/connectors.js";
import { LOG_LEVELS, type LogLevel } from "./processes/json-log.js";
import type { DemoOptions } from "./run/demo.js";

/** NIXL backends that move memory between processes; the embedded transport has one of its own. */
const BACKENDS = { nixl: ["UCX", "LIBFABRIC"], memory: ["MEMORY"] } as const;
/** With Neuron, as many as the report of vllm-neuron's issue 26. */
const MAX_TOKENS = { plain: 16, neuron: 30 } as const;
const BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256];

export interface DemoFlags extends DemoOptions {
  readonly json: boolean;
  readonly keep: boolean;
  readonly logLevel: LogLevel;
}

interface RawFlags {
  transport?: "nixl" | "memory";
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
  instance(options: { config: string; logLevel: LogLevel }): Promise<void>;
  proxy(options: { config: string; logLevel: LogLevel }): Promise<void>;
}

/** The program's commands. A value that is not valid is refused with those that are. */
export function createCommand(actions: Actions): Command {
  const logLevel = () => new Option("--log-level <level>", "lines of JSON on stderr").choices(LOG_LEVELS);
  const connectors = demoConnectors().names();
  const program = new Command("kv-demo")
    .description(
      "Prefill and decode servers and a proxy; compares what they say with one engine in one process.",
    )
    .addOption(new Option("--transport <name>", "NIXL where it is to be had").choices(["nixl", "memory"]))
    .addOption(
      new Option("--backend <name>", "of NIXL; UCX unless the environment says otherwise").argParser(
        backendName,
      ),
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
        "of push: both legs at once (default), or one after the other",
      ).choices(["at-once", "prefill-first"]),
    )
    .option("--push-layerwise", "of push: each layer is written as soon as it is computed")
    .option("--prefills <n>", "prefill instances", wholeNumber(1, 16), 1)
    .option("--decodes <n>", "decode instances", wholeNumber(1, 16), 1)
    .option("--prefill-tp <n>", "ranks of a prefill instance", wholeNumber(1, 16), 1)
    .option("--decode-tp <n>", "ranks of a decode instance", wholeNumber(1, 16), 1)
    .option("--prefill-block-size <n>", "tokens in a block", blockSize, 16)
    .option("--decode-block-size <n>", "tokens in a block; a multiple of the prefill's", blockSize, 16)
    .addOption(platform("prefill"))
    .addOption(platform("decode"))
    .option("--staging-blocks <n>", "of a Neuron instance's pool of host buffers", wholeNumber(2, 1_000_000))
    .option(
      "--requests <n>",
      "requests at once (default: 4, or one for each prompt of --prompts)",
      wholeNumber(1, 1024),
    )
    .option(
      "--max-tokens <n>",
      `tokens to make of each prompt (default: ${MAX_TOKENS.plain}, with Neuron ${MAX_TOKENS.neuron})`,
      wholeNumber(1, 4096),
    )
    .option("--prompts <file>", "a prompt in each line: text, a JSON string, or a JSON list of token ids")
    .option("--model <dir>", "a decoder exported to ONNX, or a checkpoint; a tiny model is built in")
    .option("--kv-heads <n>", "KV heads of the built-in model: 1, 2, 4 or 8", oneOf([1, 2, 4, 8]))
    .option("--port <n>", "of the proxy; 0 takes a free one", wholeNumber(0, 65_535), 0)
    .option("--keep", "stay up, and start an instance again that ends", false)
    .option("--json", "one JSON object on stdout", false)
    .addOption(logLevel().default("warn"))
    .allowExcessArguments(false)
    .enablePositionalOptions()
    .action((raw: RawFlags, command: Command) => actions.demo(checked(raw, connectors, command)));
  const role = (name: "instance" | "proxy", description: string) =>
    program
      .command(name)
      .description(description)
      .requiredOption("--config <json>", "its settings")
      .addOption(logLevel().default("info"))
      .action((options: { config: string; logLevel: LogLevel }) => actions[name](options));
  role("instance", "runs one prefill or decode server over NIXL");
  role("proxy", "runs the proxy");
  return program;
}

function checked(raw: RawFlags, connectors: readonly string[], command: Command): DemoFlags {
  const refuse = (message: string): never => command.error(`error: ${message}`);
  const { transport, backend, connector, connectorModule, decodeBlockSize, prefillBlockSize } = raw;
  if (connectorModule === undefined && !connectors.includes(connector)) {
    refuse(
      `--connector ${connector} is not one of ${connectors.join(", ")}; --connector-module would name its module`,
    );
  }
  if (backend !== undefined && transport !== undefined) {
    const valid: readonly string[] = BACKENDS[transport];
    if (!valid.includes(backend))
      refuse(`--backend ${backend} is not one of ${valid.join(", ")} (transport ${transport})`);
  }
  if (decodeBlockSize % prefillBlockSize !== 0) {
    refuse(
      `--decode-block-size ${decodeBlockSize} is no multiple of --prefill-block-size ${prefillBlockSize}`,
    );
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
    // A NIXL backend by name means NIXL, and no other transport will do.
    ...(transport === undefined && backend !== undefined
      ? { transport: backend === "MEMORY" ? "memory" : "nixl" }
      : {}),
    ...(prompts === undefined ? {} : { promptsFile: prompts }),
    ...(kvHeads === undefined ? {} : { tinyKvHeads: kvHeads }),
  };
}

function platform(side: "prefill" | "decode"): Option {
  return new Option(`--${side}-platform <name>`, "the CPU, or a simulated Neuron device with host staging")
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
  return oneOf(BLOCK_SIZES)(text);
}
