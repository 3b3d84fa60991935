import { KvError } from "@kv/interface";
import {
  count,
  type HostAndPort,
  hostAndPort,
  listenAddress,
  listOf,
  oneOf,
  onInterrupt,
  print,
  printError,
  printJson,
  refuseValue,
  size,
} from "@kv/program";
import type { Command } from "commander";
import { connectTarget, startTarget } from "./initiator.js";
import { type BenchPlan, measure } from "./measure.js";
import { benchTable, sizeText } from "./report.js";
import { listenAsTarget } from "./target.js";

interface Options {
  listen?: HostAndPort | undefined;
  connect?: HostAndPort | undefined;
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

export function addBench(program: Command): void {
  program
    .command("bench")
    .description("measure transfers between two processes, or two hosts, part by part")
    .option("--listen <[host:]port>", "be the target of a benchmark on another host", listenAddress)
    .option("--connect <host:port>", "benchmark against a target that listens there", hostAndPort)
    .option("--operation <list>", "READ, WRITE or both", listOf(oneOf("READ", "WRITE")), [
      "READ",
      "WRITE",
    ])
    .option("--sizes <list>", "bytes per transfer", listOf(words), [64 << 20])
    .option("--blocks <list>", "bytes per descriptor", listOf(words), [4 << 10, 64 << 10, 1 << 20])
    .option(
      "--order <list>",
      "contiguous, scattered or both",
      listOf(oneOf("contiguous", "scattered")),
      ["scattered"],
    )
    .option("--rounds <count>", "measured transfers of each kind", count, 7)
    .option("--backend <name>", "backend of NIXL; selected as by nixlTransport by default")
    .option("--no-check", "do not compare the bytes of both sides")
    .option("--timeout <ms>", "the longest that one transfer may take", count, 60_000)
    .option(
      "--max-bytes <size>",
      "with --listen: the most memory that a client may allocate",
      words,
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
    connect === undefined
      ? await startTarget(longest)
      : await connectTarget(connect.host, connect.port);
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
        printError(
          `${operation} ${sizeText(sizeBytes)} in ${sizeText(blockBytes)}, ${order}: done\n`,
        ),
    });
    if (json) printJson(report);
    else print(benchTable(report));
    if (report.rows.some((row) => row.consistent === false)) process.exitCode = 1;
  } finally {
    await target.close();
  }
}

async function serve({ host, port }: HostAndPort, maxBytes: number): Promise<void> {
  const onSession = (line: string) => printError(`${line}\n`);
  const target = await listenAsTarget({ host, port, maxBytes, onSession });
  print(`listening on ${target.host}:${target.port}; end with Ctrl-C\n`);
  await new Promise((resolve) => {
    onInterrupt(() => resolve(undefined));
    process.once("SIGTERM", resolve);
  });
  await target.close();
}

/** A benchmark fills memory by words. */
function words(text: string): number {
  const bytes = size(text);
  if (bytes >= 4 && bytes % 4 === 0) return bytes;
  return refuseValue("It must be a multiple of 4 bytes, such as 65536, 64KiB or 1GiB.");
}
