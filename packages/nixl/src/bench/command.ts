import { KvError } from "@kv/interface";
import { onInterrupt } from "@kv/interface/program";
import { type Command, InvalidArgumentError } from "commander";
import { connectTarget, startTarget } from "./initiator.js";
import { type BenchPlan, measure } from "./measure.js";
import { benchTable, sizeText } from "./report.js";
import { listenAsTarget } from "./target.js";

interface Options {
  listen?: HostPort | undefined;
  connect?: HostPort | undefined;
  operation: BenchPlan["operations"];
  sizes: number[];
  blocks: number[];
  order: BenchPlan["orders"];
  rounds: number;
  backend?: string | undefined;
  check: boolean;
  timeout: number;
  maxBytes: number;
  json?: true | undefined;
}

interface HostPort {
  readonly host: string;
  readonly port: number;
}

const DEFAULT_HOST = "127.0.0.1";

/** Adds the command `bench`. */
export function addBench(program: Command): void {
  program
    .command("bench")
    .description("measure transfers between two processes, or two hosts, part by part")
    .option("--listen <[host:]port>", "be the target of a benchmark on another host", readHostPort)
    .option("--connect <host:port>", "benchmark against a target that listens there", readHostPort)
    .option("--operation <list>", "READ, WRITE or both", oneOf("READ", "WRITE"), ["READ", "WRITE"])
    .option("--sizes <list>", "bytes per transfer", readSizes, [64 << 20])
    .option("--blocks <list>", "bytes per descriptor", readSizes, [4 << 10, 64 << 10, 1 << 20])
    .option("--order <list>", "contiguous, scattered or both", oneOf("contiguous", "scattered"), [
      "scattered",
    ])
    .option("--rounds <count>", "measured transfers of each kind", readCount, 7)
    .option("--backend <name>", "backend of NIXL; selected as by nixlTransport by default")
    .option("--no-check", "do not compare the bytes of both sides")
    .option("--timeout <ms>", "the longest that one transfer may take", readCount, 60_000)
    .option(
      "--max-bytes <size>",
      "with --listen: the most memory that all clients may allocate",
      readSize,
      8 * 2 ** 30,
    )
    .option("--json", "print a JSON report")
    .action(run);
}

async function run(options: Options): Promise<void> {
  const { listen, connect, json } = options;
  if (listen !== undefined && connect !== undefined) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "--listen and --connect cannot be combined: each host is one side",
    );
  }
  if (listen !== undefined) return serve(listen, options.maxBytes);
  const longest = Math.max(...options.sizes);
  const target =
    connect === undefined ? await startTarget(longest) : await connectTarget(connect.host, connect.port);
  try {
    const report = await measure(target, {
      operations: options.operation,
      sizesBytes: options.sizes,
      blocksBytes: options.blocks,
      orders: options.order,
      rounds: options.rounds,
      check: options.check,
      timeoutMs: options.timeout,
      backend: options.backend,
      onRow: ({ operation, sizeBytes, blockBytes, order }) =>
        process.stderr.write(
          `${operation} ${sizeText(sizeBytes)} in ${sizeText(blockBytes)}, ${order}: done\n`,
        ),
    });
    process.stdout.write(json ? `${JSON.stringify(report, null, 2)}\n` : benchTable(report));
    if (report.rows.some((row) => row.consistent === false)) process.exitCode = 1;
  } finally {
    await target.close();
  }
}

async function serve({ host, port }: HostPort, maxBytes: number): Promise<void> {
  const onSession = (line: string) => process.stderr.write(`${line}\n`);
  const target = await listenAsTarget({ host, port, maxBytes, onSession });
  process.stdout.write(`listening on ${target.host}:${target.port}; end with Ctrl-C\n`);
  await new Promise((resolve) => {
    onInterrupt(() => resolve(undefined));
    process.once("SIGTERM", resolve);
  });
  await target.close();
}

function readHostPort(text: string): HostPort {
  const colon = text.lastIndexOf(":");
  const [host, digits] = colon < 0 ? [DEFAULT_HOST, text] : [text.slice(0, colon), text.slice(colon + 1)];
  const port = Number(digits);
  if (!/^\d{1,5}$/.test(digits) || port > 65_535 || host === "") {
    throw new InvalidArgumentError("host:port, such as 10.0.0.7:18515");
  }
  return { host: host.replace(/^\[(.*)\]$/, "$1"), port };
}

const UNITS: Readonly<Record<string, number>> = { "": 1, k: 2 ** 10, m: 2 ** 20, g: 2 ** 30 };

function readSize(text: string): number {
  const [, digits = "", unit = ""] = /^(\d{1,12})(?:([kmg])(?:i?b)?|b)?$/i.exec(text.trim()) ?? [];
  const bytes = Number(digits) * (UNITS[unit.toLowerCase()] ?? Number.NaN);
  if (digits === "" || !Number.isSafeInteger(bytes) || bytes < 4 || bytes % 4 !== 0) {
    throw new InvalidArgumentError("bytes, a multiple of 4, such as 65536, 64KiB or 1GiB");
  }
  return bytes;
}

function readSizes(text: string): number[] {
  return text.split(",").map(readSize);
}

function readCount(text: string): number {
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < 1 || value > 2 ** 31 - 1)
    throw new InvalidArgumentError("a positive integer");
  return value;
}

function oneOf<T extends string>(...known: T[]): (text: string) => T[] {
  return (text) =>
    text.split(",").map((word) => {
      const found = known.find((name) => name.toLowerCase() === word.trim().toLowerCase());
      if (found === undefined) throw new InvalidArgumentError(`of ${known.join(", ")}`);
      return found;
    });
}
