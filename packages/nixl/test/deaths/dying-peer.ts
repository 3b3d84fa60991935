// The peer of one cell: a process with an agent, in a worker thread where that is to be terminated.
// It ends as it is told.
import { setTimeout as sleep } from "node:timers/promises";
import { isMainThread, parentPort, Worker, workerData } from "node:worker_threads";
import { type NixlAgent, nixlTransport } from "@kv/nixl";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import type { PEER_PHASES } from "./cells.js";

/**
 * What the process reports once its agent can be read, and what it is told of the agent that is
 * observed.
 */
export interface PeerReport {
  readonly name: string;
  readonly address: number;
  readonly metadata: string;
}

/** What a peer is told: to act on an agent until its end, or to read from it once. */
export interface PeerTask {
  readonly phase: (typeof PEER_PHASES)[number] | "check";
  readonly of: PeerReport;
}

interface PeerOptions {
  readonly backends: string[];
  readonly env: Record<string, string>;
  readonly lengthBytes: number;
  readonly inWorker: boolean;
}
const options = (isMainThread ? JSON.parse(process.argv[2] ?? "{}") : workerData) as PeerOptions;

const [BLOCK, SMALL_BLOCK, MAX_BLOCKS] = [65_536, 64, 16_384];
/** Agents that act at once, so that the one they act on has work waiting, and transfers of each. */
const [AGENTS, TRANSFERS] = [3, 2];

async function start() {
  const { backends, env } = options;
  const transport = nixlTransport({ backends, env });
  const memory = transport.allocate(options.lengthBytes);
  memory.bytes.fill(7);
  const newAgent = async () => {
    const agent = await transport.createAgent();
    await agent.register(memory);
    return agent;
  };
  const agents = [await newAgent()];
  const [first] = agents as [NixlAgent];

  const prepare = async (agent: NixlAgent, { of, phase }: PeerTask) => {
    await agent.addRemote(Buffer.from(of.metadata, "base64"));
    const block = phase.startsWith("small") ? SMALL_BLOCK : BLOCK;
    const count = phase === "check" ? 4 : Math.min(MAX_BLOCKS, options.lengthBytes / block);
    const { move } = await listsOf(agent, memory, of.name, of, block, count);
    const operation = phase.includes("write") ? "WRITE" : "READ";
    // Not side by side, or they would be read as one.
    return () => move(operation, scattered(count, 7)).done;
  };
  /** Whether the agent's bytes are those that all have. */
  const check = async (task: PeerTask): Promise<string> => {
    const move = await prepare(first, task);
    memory.bytes.fill(0, 0, 4 * BLOCK);
    await move();
    return memory.bytes.subarray(0, 4 * BLOCK).every((byte) => byte === 7) ? "right" : "wrong";
  };
  /** Calls `onBegun` when the first call is done, or is about to be made. */
  const act = async (agent: NixlAgent, task: PeerTask, onBegun: () => void): Promise<void> => {
    const move = await prepare(agent, task);
    const notify = () => agent.notify(task.of.name, new Uint8Array(1024)).then(() => sleep(1));
    const call = task.phase === "notify-by" ? notify : move;
    if (task.phase === "handshake-by") onBegun();
    const repeat = async () => {
      for (;;) await call().then(onBegun);
    };
    await Promise.all(Array.from({ length: TRANSFERS }, repeat));
  };
  return {
    report: {
      name: first.name,
      address: memory.address,
      metadata: Buffer.from(await first.localMetadata()).toString("base64"),
    },
    /** Says "begun", or "right" or "wrong" for the bytes of a check, or an error, once. */
    async act(task: PeerTask, say: (word: string) => void) {
      const word = new Promise<string>((resolve, reject) => {
        if (task.phase === "check") return check(task).then(resolve, reject);
        void Promise.all(Array.from({ length: AGENTS - 1 }, newAgent)).then((more) => {
          agents.push(...more);
          for (const agent of agents) act(agent, task, () => resolve("begun")).catch(reject);
        }, reject);
      });
      say(await word.catch(String));
    },
    close: () => Promise.all(agents.map((agent) => agent.close())),
  };
}

if (!isMainThread) {
  const started = await start();
  parentPort?.postMessage(started.report);
  const say = (word: string) => parentPort?.postMessage(word);
  parentPort?.on("message", (task: PeerTask) => started.act(task, say));
} else {
  let end: () => Promise<unknown>;
  let act: (task: PeerTask) => unknown;
  const say = (word: unknown) => process.send?.(word);
  if (options.inWorker) {
    const worker = new Worker(new URL(import.meta.url), { workerData: options });
    worker.on("message", say);
    act = (task) => worker.postMessage(task);
    end = () => worker.terminate();
  } else {
    const started = await start();
    say(started.report);
    act = (task) => started.act(task, say);
    end = started.close;
  }
  process.on("message", (message: PeerTask | string) => {
    if (typeof message === "object") return void act(message);
    if (message === "exit") process.exit(0);
    void end().then(() => say("ended"));
  });
}
