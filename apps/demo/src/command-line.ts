import { addOptions, commanderOutput, type OptionRow, packageVersion } from "@kv/program";
import { Command, Option } from "commander";
import type { AccuracyOptions } from "./accuracy/accuracy.js";
import type { TransportName } from "./cluster/choose-transport.js";
import { demoConnectors } from "./instance/connectors.js";
import table from "./options.json" with { type: "json" };
import { type InstanceFlags, type ProxyFlags, parseJson } from "./processes/roles.js";
import type { DemoOptions } from "./run/demo.js";

const BACKENDS: Readonly<Record<TransportName, readonly string[]>> = {
  nixl: ["UCX", "LIBFABRIC"],
  memory: ["MEMORY"],
};
/** Default of --max-tokens. With Neuron it is that of the report in vllm-neuron's issue 26. */
const MAX_TOKENS = { plain: 16, neuron: 30 } as const;

export interface DemoFlags extends DemoOptions {
  readonly json: boolean;
  readonly turns?: number | undefined;
}

interface RawFlags
  extends Omit<DemoFlags, "maxTokens" | "promptsFile" | "tinyKvHeads" | "extraConfig"> {
  readonly maxTokens?: number;
  readonly prompts?: string;
  readonly kvHeads?: string;
  readonly extraConfig?: string;
}

export interface AccuracyFlags extends Omit<AccuracyOptions, "say" | "log"> {
  readonly json: boolean;
}

export interface Actions {
  demo(flags: DemoFlags): Promise<void>;
  accuracy(flags: AccuracyFlags): Promise<void>;
  instance(role: "prefill" | "decode" | undefined, flags: InstanceFlags): Promise<void>;
  proxy(flags: ProxyFlags): Promise<void>;
}

/** `tools/setup/demo-arguments.mjs` checks arguments by the same table before the set-up. */
const COMMANDS: Readonly<Record<string, { description: string; options: readonly OptionRow[] }>> =
  table;

export function createCommand(actions: Actions): Command {
  const program = fromTable(new Command("kv-demo"), "demo")
    .version(packageVersion(import.meta.url))
    .helpCommand(true)
    .exitOverride()
    .configureOutput(commanderOutput("kv-demo"))
    .allowExcessArguments(false)
    .enablePositionalOptions()
    .action((raw: RawFlags, command: Command) => actions.demo(checkFlags(raw, command)));
  fromTable(program.command("accuracy"), "accuracy").action((flags: AccuracyFlags) =>
    actions.accuracy(flags),
  );
  const server = (name: string) =>
    // The demo starts servers with --child: they report to it over IPC.
    fromTable(program.command(name), name).addOption(new Option("--child").hideHelp());
  for (const role of ["prefill", "decode"] as const)
    server(role).action((flags: InstanceFlags) => actions.instance(role, flags));
  server("instance").action((flags: InstanceFlags) => actions.instance(undefined, flags));
  server("proxy").action((flags: ProxyFlags) => actions.proxy(flags));
  return program;
}

function fromTable(command: Command, name: string): Command {
  const { description = "", options = [] } = COMMANDS[name] ?? {};
  return addOptions(command.description(description), options);
}

function checkFlags(raw: RawFlags, command: Command): DemoFlags {
  const { prompts, kvHeads, maxTokens, extraConfig, ...flags } = raw;
  const { transport = transportOf(raw.backend), backend, connector } = raw;
  const platforms = [raw.prefillPlatform, raw.decodePlatform];
  const connectors = demoConnectors().names();
  const backends = transport && BACKENDS[transport];
  const refusals: readonly (readonly [boolean, string])[] = [
    [
      raw.connectorModule === undefined && !connectors.includes(connector),
      `--connector ${connector} is not one of ${connectors.join(", ")}; use --connector-module for any other`,
    ],
    [
      raw.transportModule !== undefined && transport !== undefined,
      "--transport-module takes the place of --transport and --backend; give one of them",
    ],
    [
      raw.platformModule !== undefined && platforms.some((name) => name !== "cpu"),
      "--platform-module takes the place of --prefill-platform and --decode-platform; give one of them",
    ],
    [
      backend !== undefined && backends?.includes(backend) === false,
      `--backend ${backend} is not one of ${backends?.join(", ")} (transport ${transport})`,
    ],
    [
      raw.turns !== undefined && (raw.keep || (prompts ?? raw.requests) !== undefined),
      "--turns is one conversation, and ends: leave out --keep, --prompts and --requests",
    ],
  ];
  for (const [isRefused, message] of refusals) if (isRefused) command.error(`error: ${message}`);
  return {
    ...flags,
    maxTokens: maxTokens ?? (platforms.includes("neuron") ? MAX_TOKENS.neuron : MAX_TOKENS.plain),
    transport,
    promptsFile: prompts,
    tinyKvHeads: kvHeads === undefined ? undefined : Number(kvHeads),
    extraConfig: parseJson("--extra-config", extraConfig),
  };
}

function transportOf(backend: string | undefined): RawFlags["transport"] {
  if (backend === undefined) return undefined;
  return backend === "MEMORY" ? "memory" : "nixl";
}
