import { Generations, HeartbeatSender, Leases, TaskTracker } from "@kv/connector/building-blocks";
import { type Clock, systemClock } from "@kv/interface";
import type { Registration } from "@kv/protocol";
import { ProducedRequests } from "../../../../packages/push/src/prefill/produced-requests.js";
import {
  EndedRegistrations,
  RegistrationMatcher,
  registrationKey,
} from "../../../../packages/push/src/prefill/registrations.js";
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

/**
 * In each turn an entry comes, and the oldest goes, of `size`. `filled`: as many times as many have
 * come before.
 */
function turns(name: string, sizeOf: string, open: (size: number) => Table, filled = 1): Quantity {
  return {
    name,
    unit: "us per turn",
    sizeOf,
    sizes: SIZES,
    exponent: 0,
    async measure(size) {
      const table = open(size);
      for (let i = 0; i < filled * size; i++) table.come(i);
      let next = filled * size;
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
    come: (number) =>
      held.grant({ wireId: `r-${number}`, expiresAtMs: clock.now() + LEASE_MS }, clock.now()),
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

/**
 * What is remembered for a time; here the time passes with the turns, so that as many are
 * remembered as the table has.
 */
function remembered(
  open: (options: { clock: Clock; rememberMs: number }) => { add(id: string): void; close(): void },
): (size: number) => Table {
  return (rememberMs) => {
    let nowMs = 0;
    const held = open({ clock: { ...clock, now: () => nowMs }, rememberMs });
    const come = (number: number) => {
      nowMs += 1;
      held.add(`r-${number}`);
    };
    return { come, go() {}, close: () => held.close() };
  };
}

const generations = remembered((options) => {
  const held = new Generations(options);
  const add = (id: string) => {
    held.begin(id);
    held.end(id);
  };
  return { add, close: () => held.clear() };
});

const endedRegistrations = remembered((options) => {
  const held = new EndedRegistrations(options);
  return { add: (id) => held.add(id), close() {} };
});

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
      if (matcher.takeFor(request).length !== 1)
        throw new Error(`${requestId} has no registration`);
      requests.end(request);
    },
    close: () => void matcher.takeAll(),
  };
}

/** The tables of both sides, each alone: one entry comes and one goes. */
export const tables: readonly Quantity[] = [
  turns("leases of P's worker", "leases", leases),
  turns("heartbeats of D's worker", "requests whose leases are extended", heartbeats),
  turns("push: registrations at P's worker", "registrations that wait for a prompt", matching),
  turns("request ids of a scheduler", "ended ids that are remembered", generations, 2),
  turns("push: registrations that have ended", "keys that are remembered", endedRegistrations, 2),
];
