import {
  type Agent,
  type Clock,
  KvError,
  type Transfer,
  type TransferRequest,
  type Transport,
} from "@kv/interface";
import { type FaultInjector, NOTIFY_FAULTS, TRANSFER_FAULTS } from "./fault-injector.js";

export interface FaultyTransport extends Transport {
  /** All agents that were created, including closed ones. */
  readonly agents: readonly Agent[];
}

export interface FaultyTransportOptions {
  readonly clock: Clock;
  readonly injector: FaultInjector;
  /** The longest delay of a late operation. */
  readonly lateMs: number;
  /** Called before each transfer and notification, so that a fake NIXL can be made to fail. */
  readonly before?: () => void;
  /** Wraps each `addRemote`. */
  readonly adding?: <T>(add: () => Promise<T>) => Promise<T>;
}

/**
 * A transport that injects faults of a network and a library. Its agents still keep the contract of
 * `Agent`.
 */
export function faultyTransport(
  transport: Transport,
  options: FaultyTransportOptions,
): FaultyTransport {
  const agents: Agent[] = [];
  return {
    ...transport,
    agents,
    async createAgent(agentOptions) {
      const agent = await transport.createAgent(agentOptions);
      agents.push(agent);
      return faultyAgent(agent, options);
    },
  };
}

const KEPT_PAYLOADS = 32;

function faultyAgent(agent: Agent, options: FaultyTransportOptions): Agent {
  const { clock, injector, lateMs, before = () => {}, adding = (add) => add() } = options;
  const { random } = injector;
  const sent: [remote: string, payload: Uint8Array][] = [];

  /** Sends the notification after a delay; its failure is ignored. */
  function later(remote: string, payload: Uint8Array): void {
    const copy = payload.slice();
    clock.setTimer(() => void agent.notify(remote, copy).catch(() => {}), random.next() * lateMs);
  }

  return {
    ...agent,
    addRemote: (metadata) => adding(() => agent.addRemote(metadata)),
    async notify(remote, payload) {
      before();
      const fault = injector.draw("notify", NOTIFY_FAULTS);
      // A refused notification is not kept for `stale`: it was never sent.
      if (fault === "refused") {
        throw new KvError(
          "KV_NOTIFICATION_FAILED",
          `the notification to ${remote} was made to fail`,
        );
      }
      if (fault === "late") later(remote, payload);
      if (fault === "stale") later(...(sent[random.integer(sent.length)] ?? [remote, payload]));
      if (fault === "damaged")
        await agent.notify(remote, damaged(payload, random.integer)).catch(() => {});
      if (fault !== "lost" && fault !== "late") await agent.notify(remote, payload);
      if (fault === "twice") await agent.notify(remote, payload).catch(() => {});
      sent.push([remote, payload.slice()]);
      if (sent.length > KEPT_PAYLOADS) sent.shift();
    },
    transfer(request) {
      before();
      switch (injector.draw("transfer", TRANSFER_FAULTS)) {
        case "failed":
          return failed(agent, request);
        case "late":
          return begunLate(agent, request, clock, random.next() * lateMs);
        case "hangs":
          // Without a signal it could not be aborted.
          return request.signal === undefined
            ? agent.transfer(request)
            : begunLate(agent, request, clock);
        default:
          return agent.transfer(request);
      }
    },
  };
}

/**
 * Truncates the payload, repeats it, or replaces it by random bytes. No peer sends such payloads.
 * Changing a few bytes would sometimes give another valid message, which no receiver could detect.
 */
function damaged(payload: Uint8Array, integer: (below: number) => number): Uint8Array {
  const kind = integer(3);
  if (kind === 0) return payload.slice(0, integer(Math.max(1, payload.length)));
  if (kind === 1) return Uint8Array.from([...payload, ...payload]);
  return payload.map(() => integer(256));
}

/** Moves the bytes, sends no notification, and fails. */
function failed(agent: Agent, { notification: _, ...request }: TransferRequest): Transfer {
  const { done, released } = agent.transfer(request as TransferRequest);
  return {
    released,
    done: done.then(() => {
      throw new KvError("KV_TRANSFER_FAILED", "the transfer was made to fail");
    }),
  };
}

/**
 * Begins after `delayMs`; without `delayMs` it never begins. A transfer that is aborted before it
 * begins touches no memory.
 */
function begunLate(
  agent: Agent,
  original: TransferRequest,
  clock: Clock,
  delayMs?: number,
): Transfer {
  // The caller may reuse its tables when this returns.
  const request: TransferRequest =
    original.runs === undefined
      ? { ...original, localIds: original.localIds.slice(), remoteIds: original.remoteIds.slice() }
      : {
          ...original,
          runs: original.runs.slice(),
          ...(original.offsets === undefined ? {} : { offsets: original.offsets.slice() }),
        };
  const { signal } = request;
  const begun = new Promise<Transfer>((resolve, reject) => {
    const begin = () => {
      signal?.removeEventListener("abort", abort);
      try {
        resolve(agent.transfer(request));
      } catch (error) {
        reject(error);
      }
    };
    const timer = delayMs === undefined ? undefined : clock.setTimer(begin, delayMs);
    function abort(): void {
      timer?.cancel();
      const reason = "the transfer was aborted before it began";
      reject(new KvError("KV_TRANSFER_ABORTED", reason, { cause: signal?.reason }));
    }
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort);
  });
  return {
    done: begun.then(({ done }) => done),
    released: begun.then(
      ({ released }) => released,
      () => {},
    ),
  };
}
