import { Generations, HeartbeatSender, Leases, TaskTracker } from "@kv/connector/building-blocks";
import { systemClock } from "@kv/interface";
import type { Registration } from "@kv/protocol";
import { ProducedRequests } from "../../../packages/push/src/prefill/produced-requests.js";
import {
  EndedRegistrations,
  RegistrationMatcher,
  registrationKey,
} from "../../../packages/push/src/prefill/registrations.js";
import { processorTime } from "../costs.js";
import type { Quantity } from "../quantity.js";

const SIZES = [100, 1000, 10_000, 100_000] as const;
const LEASE_MS = 30_000;
const ENGINES = 8;
const clock = systemClock();

/** A table with entries that come and go. */
interface Table {
  come(number: number): void;
  go(number: number): void;
  close(): void;
}

/** The table has `size` entries; in each turn one comes, and the oldest goes. */
function turns(name: string, sizeOf: string, open: () => Table, sizes: readonly number[] = SIZES): Quantity {
  return {
    name,
    unit: "us per turn",
    ...{ sizeOf, sizes, exponent: 0 },
    async measure(size) {
      const table = open();
      for (let i = 0; i < size; i++) table.come(i);
      let next = size;
      const cost = await processorTime("us", 1, () => {
        table.come(next);
        table.go(next - size);
        next += 1;
      });
      table.close();
      return cost;
    },
  };
}

function leases(): Table {
  const held = new Leases({ clock, extensionMs: (LEASE_MS * 2) / 3, onExpired() {} });
  return {
    come: (number) => held.grant(`r-${number}`, { expiresAtMs: clock.now() + LEASE_MS }),
    go: (number) => void held.release(`r-${number}`),
    close: () => held.close(),
  };
}

function heartbeats(): Table {
  const sender = new HeartbeatSender({
    clock,
    intervalMs: LEASE_MS / 6,
    engines: { peek: () => undefined, open: () => Promise.reject(new Error("no engine")) },
    notifications: { sendHeartbeat: () => Promise.resolve({ takenIds: [], isDelivered: true }) },
    tasks: new TaskTracker(),
  });
  const change = (number: number, begins: boolean) => {
    const requests = [{ requestId: `r-${number}` }];
    const [begin, end] = begins ? [requests, []] : [[], requests];
    sender.change([{ ...engine(number % ENGINES), begin, end }]);
  };
  return {
    come: (number) => change(number, true),
    go: (number) => change(number, false),
    close: () => sender.close(),
  };
}

function engine(number: number) {
  return { engineId: `p-${number}`, host: "p", port: 5600, tpSize: 1, dcpSize: 1, ppSize: 1 };
}

/** Ended request ids are remembered for 10 minutes; here the time passes with the turns, so that as many are remembered as the table has. */
function generations(size: number): Table {
  let nowMs = 0;
  const held = new Generations({ clock: { ...clock, now: () => nowMs }, rememberMs: size });
  return {
    come(number) {
      nowMs += 1;
      held.begin(`r-${number}`);
      held.end(`r-${number}`);
    },
    go() {},
    close: () => held.clear(),
  };
}

function endedRegistrations(size: number): Table {
  let nowMs = 0;
  const held = new EndedRegistrations({ clock: { ...clock, now: () => nowMs }, rememberMs: size });
  return {
    come(number) {
      nowMs += 1;
      held.add(`r-${number}`);
    },
    go() {},
    close() {},
  };
}

function registration(number: number): Registration {
  return {
    ...engine(number % ENGINES),
    wireId: `cmpl-${number}-0`,
    matchId: `cmpl-${number}-0`,
    blockIds: [[1, 2, 3]],
  } as Partial<Registration> as Registration;
}

/** Registrations that wait for their prompt: one comes, and the prompt of the oldest is done. */
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
      const next = registration(number);
      if (matcher.find(next, "i").kind === "wait") matcher.wait(registrationKey(next), next);
    },
    go(number) {
      const requestId = `cmpl-${number}-0`;
      const order = { requestId, wireId: requestId, generation: number, blockIds: [[1, 2, 3]] };
      const request = requests.finish({
        ...order,
        numTokens: 40,
        promptBlockIds: [[1, 2, 3]],
        expiresAtMs: 0,
      });
      if (matcher.takeFor(request).length !== 1) throw new Error(`${requestId} has no registration`);
      requests.end(request);
    },
    close: () => void matcher.takeAll(),
  };
}

/** Turns of a table whose own time decides how many entries it has. */
function remembered(name: string, sizeOf: string, open: (size: number) => Table): Quantity {
  return {
    name,
    unit: "us per turn",
    ...{ sizeOf, sizes: SIZES, exponent: 0 },
    async measure(size) {
      const table = open(size);
      for (let i = 0; i < 2 * size; i++) table.come(i);
      let next = 2 * size;
      const cost = await processorTime("us", 1, () => table.come(next++));
      table.close();
      return cost;
    },
  };
}

/** The tables of both sides, each alone: one entry comes and one goes. */
export const tables: readonly Quantity[] = [
  turns("leases of P's worker", "leases", leases),
  turns("heartbeats of D's worker", "requests whose leases are extended", heartbeats),
  turns("push: registrations at P's worker", "registrations that wait for a prompt", matching),
  remembered("request ids of a scheduler", "ended ids that are remembered", generations),
  remembered("push: registrations that have ended", "keys that are remembered", endedRegistrations),
];
