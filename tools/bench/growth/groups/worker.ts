import type { ConnectorModule, ConnectorRequest, KvTransferParams } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { memoryNetwork } from "@kv/transport-memory";
import { heldBytes, processorTimeOf } from "../costs.js";
import type { Group, Quantity } from "../quantity.js";
import { BLOCK_IDS, type MemoryEngine, memoryEngine, request } from "./memory-engine.js";

/** A D and the P's that its requests come from. */
interface Fleet {
  readonly decode: MemoryEngine;
  readonly prefills: readonly MemoryEngine[];
  close(): Promise<void>;
}

async function fleet(connector: ConnectorModule, numPrefills: number): Promise<Fleet> {
  const network = memoryNetwork();
  const prefills: MemoryEngine[] = [];
  for (let i = 0; i < numPrefills; i++)
    prefills.push(await memoryEngine(network, `p${i}`, connector));
  const decode = await memoryEngine(network, "d", connector);
  return {
    decode,
    prefills,
    async close() {
      await decode.close();
      for (const prefill of prefills) await prefill.close();
    },
  };
}

/** P has computed the prompts of `count` requests, spread over the P's: their requests at D. */
function computed(prefills: readonly MemoryEngine[], count: number): ConnectorRequest[] {
  const requests = Array.from({ length: count }, (_, i) => {
    const { scheduler } = prefills[i % prefills.length] as MemoryEngine;
    const requestId = `r-${i}`;
    const given = request(requestId, { do_remote_decode: true });
    scheduler.afterAllocation(given, BLOCK_IDS, 0);
    const { kvTransferParams } = scheduler.requestFinished(given, BLOCK_IDS, "length");
    return request(requestId, kvTransferParams as KvTransferParams);
  });
  for (const prefill of prefills) step(prefill);
  return requests;
}

function step({ scheduler, worker }: MemoryEngine): number {
  worker.startLoad(scheduler.buildStepMetadata());
  const output = worker.collectFinished();
  scheduler.applyWorkerOutput(output);
  const [failure] = output.failedReceiving;
  if (failure !== undefined) throw new Error(`${failure.requestId}: ${failure.message}`);
  return output.finishedReceiving.length;
}

/** D receives all requests at once. Ends when each is received and no P holds a lease any more. */
async function receiveAll(
  { decode, prefills }: Fleet,
  requests: readonly ConnectorRequest[],
): Promise<void> {
  for (const request of requests) {
    const { tokens } = decode.scheduler.matchedTokens(request, 0);
    decode.scheduler.afterAllocation(request, BLOCK_IDS, tokens);
  }
  for (let received = 0; received < requests.length; ) {
    received += step(decode);
    await new Promise<void>((resolve) => void setTimeout(resolve, 1));
  }
  for (const request of requests) decode.scheduler.requestFinished(request, BLOCK_IDS, "length");
  const isHeld = ({ scheduler }: MemoryEngine) => scheduler.outstanding()["leases"] !== 0;
  while (prefills.some(isHeld)) {
    // D notifies P's in the step after the one that received.
    for (const engine of [decode, ...prefills]) step(engine);
    await new Promise<void>((resolve) => void setTimeout(resolve, 1));
  }
}

const received = {
  run: ({ made, requests }: { made: Fleet; requests: ConnectorRequest[] }) =>
    receiveAll(made, requests),
  finish: ({ made }: { made: Fleet }) => made.close(),
};

function quantities(name: string, connector: ConnectorModule): Quantity[] {
  return [
    {
      name: `${name}: requests that are received at once, from one P`,
      unit: "us per request",
      sizeOf: "requests",
      sizes: [10, 100, 1000, 10_000],
      exponent: 0,
      measure: (size) =>
        processorTimeOf("us", size, {
          async prepare() {
            const made = await fleet(connector, 1);
            await receiveAll(made, computed(made.prefills, 1));
            return { made, requests: computed(made.prefills, size) };
          },
          ...received,
        }),
    },
    {
      name: `${name}: the first request from each P, with the handshake`,
      unit: "us per P",
      sizeOf: "P's",
      sizes: [4, 16, 64, 256, 1024],
      exponent: 0,
      measure: (size) =>
        processorTimeOf("us", size, {
          async prepare() {
            const made = await fleet(connector, size);
            return { made, requests: computed(made.prefills, size) };
          },
          ...received,
        }),
    },
    {
      name: `${name}: memory that a P takes at D and in itself`,
      unit: "bytes per P",
      sizeOf: "P's",
      sizes: [16, 64, 256, 1024],
      exponent: 0,
      measure: (size) =>
        heldBytes(
          size,
          async () => {
            const made = await fleet(connector, size);
            await receiveAll(made, computed(made.prefills, size));
            return made;
          },
          (made) => made.close(),
        ),
    },
  ];
}

export const worker: Group = {
  name: "worker",
  title: "Workers of pull and push",
  quantities: [...quantities("pull", pullConnector), ...quantities("push", pushConnector)],
};
