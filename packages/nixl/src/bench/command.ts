import { KvError } from "@kv/interface";
import { type HostAndPort, onInterrupt, print, printError, printJson } from "@kv/program";
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

export async function benchCommand(options: Options): Promise<void> {
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
