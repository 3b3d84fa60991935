// The peer of one cell: a process with an agent, in a worker thread where that is to be terminated. It ends as it is told.
import { isMainThread, parentPort, Worker, workerData } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";

/** What the process reports once its agent can be read. */
export interface PeerReport {
  readonly name: string;
  readonly address: number;
  readonly metadata: string;
}

interface PeerOptions {
  readonly backends: string[];
  readonly env: Record<string, string>;
  readonly lengthBytes: number;
  readonly inWorker: boolean;
}
const options = (isMainThread ? JSON.parse(process.argv[2] ?? "{}") : workerData) as PeerOptions;

async function start() {
  const transport = nixlTransport(options);
  const agent = await transport.createAgent();
  const memory = transport.allocate(options.lengthBytes);
  memory.bytes.fill(7);
  await agent.register(memory);
  const metadata = Buffer.from(await agent.localMetadata()).toString("base64");
  return { report: { name: agent.name, address: memory.address, metadata }, close: () => agent.close() };
}

if (!isMainThread) {
  parentPort?.postMessage((await start()).report);
  setInterval(() => {}, 1000);
} else {
  let end: () => Promise<unknown>;
  if (options.inWorker) {
    const worker = new Worker(new URL(import.meta.url), { workerData: options });
    worker.once("message", (report: PeerReport) => process.send?.(report));
    end = () => worker.terminate();
  } else {
    const started = await start();
    process.send?.(started.report);
    end = started.close;
  }
  process.on("message", (message) => {
    if (message === "exit") process.exit(0);
    void end().then(() => process.send?.("ended"));
  });
}
