import { Generations, HeartbeatSender, Leases, TaskTracker } from "@kv/connector/building-blocks";
import {
  type Clock,
  type ConnectorModule,
  type SchedulerConnector,
  systemClock,
  type WorkerOutput,
} from "@kv/interface";
import type { Registration } from "@kv/protocol";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { memoryNetwork } from "@kv/transport-memory";
import {
  EndedRegistrations,
  ProducedRequests,
  RegistrationMatcher,
  registrationKey,
} from "../../../packages/push/src/prefill/registrations.js";
import { type Group, heldBytes, processorTime, type Quantity } from "./measure.js";
import { BLOCK_IDS, memoryEngine, prefilled, request } from "./memory-engine.js";

const SIZES = [100, 1000, 10_000, 100_000] as const;
/** Fewer requests need less than the heap grows and shrinks for other reasons. */
const MEMORY_SIZES = [1000, 4000, 16_000, 64_000] as const;
const ENGINES = 8;
const LEASE_MS = 30_000;
const clock = systemClock();

interface Table {
  come(number: number): void;
  go(number: number): void;
  close(): unknown;
}

interface Side extends Table {
  step(): void;
}

/**
 * In each turn an entry comes, and the oldest of `size` goes. `filled`: as many times as many have
 * come before.
 */
async function turn(size: number, table: Table | Side, filled = 1): Promise<number> {
  const step = "step" in table ? () => table.step() : () => {};
  let next = 0;
  for (; next < filled * size; next++) table.come(next);
  step();
  const cost = await processorTime("us", 1, () => {
    table.come(next);
    table.go(next - size);
    step();
    next += 1;
  });
  await table.close();
  return cost;
}

function sides(name: string, connector: ConnectorModule): Quantity[] {
  const roles = [
    ["D", "requests that wait", decodeSide],
    ["P", "requests with a lease", prefillSide],
  ] as const;
  return roles.flatMap(([role, sizeOf, open]): Quantity[] => [
    {
      name: `${name}, ${role}: step in which one request comes and one ends`,
      unit: "us per step",
      sizeOf,
      sizes: SIZES,
      measure: async (size) => turn(size, await open(connector)),
    },
    {
      name: `${name}, ${role}: step in which nothing changes`,
      unit: "us per step",
      sizeOf,
      sizes: SIZES,
      async measure(size) {
        const side = filled(await open(connector), size);
        const cost = await processorTime("us", 1, () => side.step());
        await side.close();
        return cost;
      },
    },
    {
      name: `${name}, ${role}: memory`,
      unit: "bytes per request",
      sizeOf,
      sizes: MEMORY_SIZES,
      async measure(size) {
        const side = await open(connector);
        const bytes = await heldBytes(size, () => filled(side, size));
        await side.close();
        return bytes;
      },
    },
  ]);
}

function filled(side: Side, size: number): Side {
  for (let i = 0; i < size; i++) side.come(i);
  side.step();
  return side;
}

function step(scheduler: SchedulerConnector) {
  scheduler.hasPendingWork();
  scheduler.buildStepMetadata();
}

const output = (given: Partial<WorkerOutput>): WorkerOutput => ({
  finishedSending: [],
  finishedReceiving: [],
  failedReceiving: [],
  failedBlockIds: [],
  ...given,
});

async function decodeSide(connector: ConnectorModule): Promise<Side> {
  const network = memoryNetwork();
  const prefill = await memoryEngine(network, "p", connector);
  const { kvTransferParams } = prefilled(prefill.scheduler, "p");
  await prefill.close();
  const { scheduler, close } = await memoryEngine(network, "d", connector);
  const requestOf = (number: number) =>
    request(`d-${number}`, {
      ...kvTransferParams,
      remote_engine_id: `p-${number % ENGINES}`,
      remote_request_id: `cmpl-${number}`,
    });
  return {
    come: (number) => scheduler.requestQueued?.(requestOf(number)),
    go(number) {
      const oldest = requestOf(number);
      const { tokens } = scheduler.matchedTokens(oldest, 0);
      scheduler.afterAllocation(oldest, BLOCK_IDS, tokens);
      scheduler.applyWorkerOutput(output({ finishedReceiving: [oldest.requestId] }));
      scheduler.requestFinished(oldest, BLOCK_IDS, "length");
    },
    step: () => step(scheduler),
    close,
  };
}

async function prefillSide(connector: ConnectorModule): Promise<Side> {
  const { scheduler, close } = await memoryEngine(memoryNetwork(), "p", connector);
  return {
    come: (number) => void prefilled(scheduler, `p-${number}`),
    go: (number) => scheduler.applyWorkerOutput(output({ finishedSending: [`p-${number}`] })),
    step: () => step(scheduler),
    close,
  };
}

function leases(): Table {
  const held = new Leases({ clock, extensionMs: (LEASE_MS * 2) / 3, onExpired() {} });
  return {
    come: (number) =>
      held.grant({ wireId: `r-${number}`, expiresAtMs: clock.now() + LEASE_MS }, clock.now()),
    go: (number) => void held.release(`r-${number}`),
    close: () => held.close(),
  };
}

const engine = (number: number) => ({
  engineId: `p-${number % ENGINES}`,
  host: "p",
  port: 5600,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
});

function heartbeats(): Table {
  const sender = new HeartbeatSender({
    clock,
    intervalMs: LEASE_MS / 6,
    engines: { peek: () => undefined, open: () => Promise.reject(new Error("no engine")) },
    notifications: { sendHeartbeat: () => Promise.resolve({ takenIds: [], isDelivered: true }) },
    tasks: new TaskTracker(),
  });
  return {
    come: (number) =>
      sender.change([{ ...engine(number), begin: [{ requestId: `r-${number}` }], end: [] }]),
    go: (number) =>
      sender.change([{ ...engine(number), begin: [], end: [{ requestId: `r-${number}` }] }]),
    close: () => sender.close(),
  };
}

/** One comes, and the prompt of the oldest is done. */
function matching(): Table {
  const requests = new ProducedRequests({ clock, rememberMs: LEASE_MS });
  const matcher = new RegistrationMatcher({
    clock,
    requests,
    waitMs: { plain: LEASE_MS, own: LEASE_MS },
    onExpired() {},
  });
  return {
    come(number) {
      const wireId = `cmpl-${number}-0`;
      const own = { ...engine(number), wireId, matchId: wireId, blockIds: BLOCK_IDS };
      const next = own as Partial<Registration> as Registration;
      if (matcher.find(next, "i") === undefined) matcher.wait(registrationKey(next), next);
    },
    go(number) {
      const requestId = `cmpl-${number}-0`;
      const done = requests.finish({
        requestId,
        wireId: requestId,
        generation: number,
        blockIds: BLOCK_IDS,
        numTokens: 40,
        promptBlockIds: BLOCK_IDS,
        expiresAtMs: 0,
      });
      if (matcher.takeFor(done).length !== 1) throw new Error(`${requestId} has no registration`);
      requests.end(done);
    },
    close: () => matcher.takeAll(),
  };
}

/** The time passes with the turns, so that as many are remembered as the table has. */
const remembered =
  (open: (options: { clock: Clock; rememberMs: number }) => (id: string) => void) =>
  (rememberMs: number): Table => {
    let nowMs = 0;
    const add = open({ clock: { ...clock, now: () => nowMs }, rememberMs });
    return {
      come(number) {
        nowMs += 1;
        add(`r-${number}`);
      },
      go() {},
      close() {},
    };
  };

const generations = remembered((options) => {
  const held = new Generations(options);
  return (id) => {
    held.begin(id);
    held.end(id);
  };
});

const ended = remembered((options) => {
  const held = new EndedRegistrations(options);
  return (id) => held.add(id);
});

const TABLES: readonly (readonly [string, string, (size: number) => Table, number])[] = [
  ["leases of P's worker", "leases", leases, 1],
  ["heartbeats of D's worker", "requests whose leases are extended", heartbeats, 1],
  ["push: registrations at P's worker", "registrations that wait for a prompt", matching, 1],
  ["request ids of a scheduler", "ended ids that are remembered", generations, 2],
  ["push: registrations that have ended", "keys that are remembered", ended, 2],
];

export const group: Group = {
  title: "Schedulers and tables of pull and push",
  quantities: [
    ...sides("pull", pullConnector),
    ...sides("push", pushConnector),
    ...TABLES.map(([name, sizeOf, open, filled]) => ({
      name,
      unit: "us per turn",
      sizeOf,
      sizes: SIZES,
      measure: (size: number) => turn(size, open(size), filled),
    })),
  ],
};
