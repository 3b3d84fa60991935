import type {
  ConnectorModule,
  KvTransferParams,
  SchedulerConnector,
  WorkerOutput,
} from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { memoryNetwork } from "@kv/transport-memory";
import { heldBytes, processorTime } from "../costs.js";
import type { Group, Quantity } from "../quantity.js";
import { BLOCK_IDS, memoryEngine, request } from "./memory-engine.js";
import { tables } from "./tables.js";

const CONNECTORS: Readonly<Record<string, ConnectorModule>> = {
  pull: pullConnector,
  push: pushConnector,
};
const SIZES = [100, 1000, 10_000, 100_000] as const;
/** Fewer requests need less than the heap grows and shrinks for other reasons. */
const MEMORY_SIZES = [1000, 4000, 16_000, 64_000] as const;
/** The requests are spread over as many P's. */
const ENGINES = 8;

/** One side of a connector under requests. */
interface Side {
  readonly scheduler: SchedulerConnector;
  /** A new request comes, as in an engine step. */
  come(): void;
  /** The oldest request gets its blocks and ends. */
  endOldest(): void;
  close(): Promise<void>;
}

function quantities(name: string, connector: ConnectorModule): Quantity[] {
  const open = { D: () => decodeSide(connector), P: () => prefillSide(connector) };
  const sizeOf = { D: "requests that wait", P: "requests with a lease" };
  return (["D", "P"] as const).flatMap((side): Quantity[] => [
    {
      name: `${name}, ${side}: step in which one request comes and one ends`,
      unit: "us per step",
      sizeOf: sizeOf[side],
      sizes: SIZES,
      exponent: 0,
      measure: (size) =>
        withRequests(open[side], size, (held) =>
          processorTime("us", 1, () => {
            held.come();
            held.endOldest();
            step(held.scheduler);
          }),
        ),
    },
    {
      name: `${name}, ${side}: step in which nothing changes`,
      unit: "us per step",
      sizeOf: sizeOf[side],
      sizes: SIZES,
      exponent: 0,
      measure: (size) =>
        withRequests(open[side], size, (held) =>
          processorTime("us", 1, () => step(held.scheduler)),
        ),
    },
    {
      name: `${name}, ${side}: memory`,
      unit: "bytes per request",
      sizeOf: sizeOf[side],
      sizes: MEMORY_SIZES,
      exponent: 0,
      async measure(size) {
        const held = await open[side]();
        const bytes = await heldBytes(size, () => fill(held, size));
        await held.close();
        return bytes;
      },
    },
  ]);
}

async function withRequests(
  open: () => Promise<Side>,
  size: number,
  measure: (side: Side) => Promise<number>,
): Promise<number> {
  const side = await open();
  fill(side, size);
  const cost = await measure(side);
  await side.close();
  return cost;
}

function fill(side: Side, size: number): Side {
  for (let i = 0; i < size; i++) side.come();
  step(side.scheduler);
  return side;
}

function step(scheduler: SchedulerConnector): void {
  scheduler.hasPendingWork();
  scheduler.buildStepMetadata();
}

async function decodeSide(connector: ConnectorModule): Promise<Side> {
  const network = memoryNetwork();
  const prefill = await memoryEngine(network, "p", connector);
  const { scheduler, ...engine } = await memoryEngine(network, "d", connector);
  const params = prefill.scheduler.requestFinished(
    request("p", { do_remote_decode: true }),
    BLOCK_IDS,
    "length",
  ).kvTransferParams as KvTransferParams;
  await prefill.close();
  let [come, ended] = [0, 0];
  return {
    scheduler,
    come() {
      come += 1;
      scheduler.requestQueued?.(request(`d-${come}`, { ...params, ...named(come) }));
    },
    endOldest() {
      ended += 1;
      const oldest = request(`d-${ended}`, { ...params, ...named(ended) });
      const { tokens } = scheduler.matchedTokens(oldest, 0);
      scheduler.afterAllocation(oldest, BLOCK_IDS, tokens);
      scheduler.applyWorkerOutput(output({ finishedReceiving: [oldest.requestId] }));
      scheduler.requestFinished(oldest, BLOCK_IDS, "length");
    },
    close: () => engine.close(),
  };
}

function named(number: number): KvTransferParams {
  return { remote_engine_id: `p-${number % ENGINES}`, remote_request_id: `cmpl-${number}` };
}

async function prefillSide(connector: ConnectorModule): Promise<Side> {
  const { scheduler, ...engine } = await memoryEngine(memoryNetwork(), "p", connector);
  let [come, ended] = [0, 0];
  return {
    scheduler,
    come() {
      come += 1;
      const next = request(`p-${come}`, { do_remote_decode: true });
      scheduler.afterAllocation(next, BLOCK_IDS, 0);
      scheduler.requestFinished(next, BLOCK_IDS, "length");
    },
    endOldest() {
      ended += 1;
      scheduler.applyWorkerOutput(output({ finishedSending: [`p-${ended}`] }));
    },
    close: () => engine.close(),
  };
}

function output(given: Partial<WorkerOutput>): WorkerOutput {
  return {
    finishedSending: [],
    finishedReceiving: [],
    failedReceiving: [],
    failedBlockIds: [],
    ...given,
  };
}

export const scheduler: Group = {
  name: "scheduler",
  title: "Schedulers and tables of pull and push",
  quantities: [
    ...Object.entries(CONNECTORS).flatMap(([name, connector]) => quantities(name, connector)),
    ...tables,
  ],
};
