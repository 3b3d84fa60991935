import type { ConnectorModule, ConnectorRequest } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { memoryNetwork } from "@kv/transport-memory";
import { type Group, heldBytes, processorTimeOf, type Quantity } from "./measure.js";
import { BLOCK_IDS, type MemoryEngine, memoryEngine, prefilled } from "./memory-engine.js";

type Fleet = Awaited<ReturnType<typeof open>>;

async function open(connector: ConnectorModule, numPrefills: number) {
  const network = memoryNetwork();
  const prefills: MemoryEngine[] = [];
  for (let i = 0; i < numPrefills; i++)
    prefills.push(await memoryEngine(network, `p${i}`, connector));
  return { decode: await memoryEngine(network, "d", connector), prefills };
}

async function close({ decode, prefills }: Fleet) {
  for (const engine of [decode, ...prefills]) await engine.close();
}

function computed({ prefills }: Fleet, count: number): ConnectorRequest[] {
  const requests = Array.from({ length: count }, (_, i) =>
    prefilled((prefills[i % prefills.length] as MemoryEngine).scheduler, `r-${i}`),
  );
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

const pause = () => new Promise<void>((resolve) => void setTimeout(resolve, 1));

/** Ends when no P holds a lease any more. */
async function receiveAll(
  { decode, prefills }: Fleet,
  requests: readonly ConnectorRequest[],
): Promise<void> {
  for (const request of requests) {
    const { tokens } = decode.scheduler.matchedTokens(request, 0);
    decode.scheduler.afterAllocation(request, BLOCK_IDS, tokens);
  }
  for (let received = 0; received < requests.length; await pause()) received += step(decode);
  for (const request of requests) decode.scheduler.requestFinished(request, BLOCK_IDS, "length");
  const isHeld = ({ scheduler }: MemoryEngine) => scheduler.outstanding()["leases"] !== 0;
  // D notifies P's in the step after the one that received.
  for (; prefills.some(isHeld); await pause())
    for (const engine of [decode, ...prefills]) step(engine);
}

function quantities(name: string, connector: ConnectorModule): Quantity[] {
  /** From so many P's, which were open before or not. */
  const receiving = (size: number, numPrefills: number, isOpen: boolean) =>
    processorTimeOf(
      "us",
      size,
      async () => {
        const fleet = await open(connector, numPrefills);
        if (isOpen) await receiveAll(fleet, computed(fleet, 1));
        return { fleet, requests: computed(fleet, size) };
      },
      ({ fleet, requests }) => receiveAll(fleet, requests),
      ({ fleet }) => close(fleet),
    );
  return [
    {
      name: `${name}: requests that are received at once, from one P`,
      unit: "us per request",
      sizeOf: "requests",
      sizes: [10, 100, 1000, 10_000],
      measure: (size) => receiving(size, 1, true),
    },
    {
      name: `${name}: the first request from each P, with the handshake`,
      unit: "us per P",
      sizeOf: "P's",
      sizes: [4, 16, 64, 256, 1024],
      measure: (size) => receiving(size, size, false),
    },
    {
      name: `${name}: memory that a P takes at D and in itself`,
      unit: "bytes per P",
      sizeOf: "P's",
      sizes: [16, 64, 256, 1024],
      async measure(size) {
        const build = async () => {
          const fleet = await open(connector, size);
          await receiveAll(fleet, computed(fleet, size));
          return fleet;
        };
        return heldBytes(size, build, close);
      },
    },
  ];
}

export const group: Group = {
  title: "Workers of pull and push",
  quantities: [...quantities("pull", pullConnector), ...quantities("push", pushConnector)],
};
