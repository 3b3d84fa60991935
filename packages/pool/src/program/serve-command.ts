import { AdminServer, jsonLog, LOG_LEVELS, type LogLevel } from "@kv/fleet/front-end";
import { KvError, systemClock } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { hostAndPort, oneOf, print, printError, refuseValue } from "@kv/program";
import { readTcpEndpoint } from "@kv/side-channel";
import type { BlockHashAlgorithm } from "@kv/tier";
import type { Command } from "commander";
import type { Engine } from "../copier.js";
import { openPool } from "../pool.js";
import { addPoolCommand, keysOf, type NamespaceOptions, namespaceOf } from "./namespace-options.js";
import { poolOperations } from "./pool-operations.js";

interface ServeOptions extends NamespaceOptions {
  readonly port: number;
  readonly memory: number;
  readonly files?: string;
  readonly objects?: string;
  readonly objectsEndpoint?: string;
  readonly filesLimit: number;
  readonly engine?: Engine[];
  readonly hashAlgorithm: BlockHashAlgorithm;
  readonly blocksPerChunk: number;
  readonly writeThrough?: true;
  readonly copies: number;
  readonly adminHost: string;
  readonly adminPort?: number;
  readonly drain: number;
  readonly logLevel: LogLevel;
}

export function addServe(program: Command): void {
  addPoolCommand(program, "serve", { engine, logLevel: oneOf(...LOG_LEVELS) }).action(serve);
}

/** `HOST:PORT,EVENTS[,REPLAY]`. */
function engine(text: string): Engine {
  const [peerId = "", endpoint = "", replayEndpoint, ...more] = text.split(",");
  hostAndPort(peerId);
  for (const each of [endpoint, replayEndpoint ?? endpoint])
    if (readTcpEndpoint(each) === undefined || more.length > 0)
      refuseValue("It must be HOST:PORT, then one or two endpoints such as tcp://10.0.0.7:5557.");
  return { peerId, events: { endpoint, replayEndpoint } };
}

/** Parameters of NIXL's backend OBJ. */
const backend = (bucket: string, endpoint: string | undefined): Record<string, string> =>
  endpoint === undefined
    ? { bucket }
    : { bucket, endpoint_override: endpoint, scheme: new URL(endpoint).protocol.slice(0, -1) };

async function serve(options: ServeOptions): Promise<void> {
  const { files: folder, filesLimit: limitBytes, adminHost, adminPort, drain } = options;
  const { objects: bucket, objectsEndpoint: endpoint } = options;
  if (endpoint !== undefined && bucket === undefined)
    throw new KvError("KV_CONFIG_INVALID", "--objects-endpoint has no effect without --objects");
  const log = jsonLog(options.logLevel, { write: printError });
  const namespace = await namespaceOf(options, log);
  const transport = nixlTransport({ log });
  const pool = await openPool({
    ...namespace,
    transport,
    host: options.host,
    port: options.port,
    memoryBytes: options.memory,
    files: folder === undefined ? undefined : { folder, limitBytes },
    objects:
      bucket === undefined ? undefined : { parameters: backend(bucket, endpoint), limitBytes },
    engines: options.engine,
    hashAlgorithm: options.hashAlgorithm,
    blocksPerChunk: options.blocksPerChunk,
    writeThrough: options.writeThrough,
    maxCopies: options.copies,
    handshakeKeys: keysOf(options),
    log,
  });
  const admin =
    adminPort === undefined
      ? undefined
      : new AdminServer({
          settings: { host: adminHost, port: adminPort },
          clock: systemClock(),
          operations: poolOperations(pool),
        });

  const close = async () => {
    await admin?.close();
    await pool.close();
    await transport.close();
  };
  try {
    const url = await admin?.listen();
    const stopped = firstSignal();
    // A reader of this line may send a signal at once.
    print(`kv-pool ready ${pool.localId}${url === undefined ? "" : ` admin ${url}`}\n`);
    log.info("closing", { signal: await stopped, pinned: pool.status().pinned });
    await pool.drain(drain);
  } finally {
    await close();
  }
}

/** A second signal ends the process. */
function firstSignal(): Promise<NodeJS.Signals> {
  return new Promise((resolve) => {
    const signals = ["SIGTERM", "SIGINT"] as const;
    for (const signal of signals)
      process.once(signal, () => {
        for (const each of signals) process.removeAllListeners(each);
        resolve(signal);
      });
  });
}
