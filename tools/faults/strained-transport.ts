import {
  type Agent,
  type Clock,
  KvError,
  type Transfer,
  type TransferRequest,
  type Transport,
} from "@kv/interface";
import { NOTIFY_STRAINS, type Strain, TRANSFER_STRAINS } from "./strain.js";

export interface StrainedTransport extends Transport {
  /** Agents that were made, closed ones too. */
  readonly agents: readonly Agent[];
}

export interface StrainedOptions {
  readonly clock: Clock;
  readonly strain: Strain;
  /** What is late is so by this much at most. */
  readonly lateMs: number;
  /** Before each transfer and notification: the moment for a library that can be told to fail. */
  readonly before?: () => void;
  /** Around the adding of a peer. */
  readonly adding?: <T>(add: () => Promise<T>) => Promise<T>;
}

/** A transport whose agents suffer what a network and a library may do to them. What an `Agent` promises, it still keeps. */
export function strainedTransport(transport: Transport, options: StrainedOptions): StrainedTransport {
  const agents: Agent[] = [];
  return {
    ...transport,
    agents,
    async createAgent(given) {
      const agent = await transport.createAgent(given);
      agents.push(agent);
      return strainedAgent(agent, options);
    },
  };
}

const KEPT_PAYLOADS = 32;

function strainedAgent(agent: Agent, options: StrainedOptions): Agent {
  const { clock, strain, lateMs, before = () => {}, adding = (add) => add() } = options;
  const { random } = strain;
  const sent: [remote: string, payload: Uint8Array][] = [];

  /** Nobody waits for it. */
  function later(remote: string, payload: Uint8Array): void {
    const copy = payload.slice();
    clock.setTimer(() => void agent.notify(remote, copy).catch(() => {}), random.next() * lateMs);
  }

  return {
    ...agent,
    addRemote: (metadata) => adding(() => agent.addRemote(metadata)),
    async notify(remote, payload) {
      before();
      const strained = strain.draw("notify", NOTIFY_STRAINS);
      // Never again what was refused: nobody has it.
      if (strained === "refused") {
        throw new KvError("KV_NOTIFICATION_FAILED", `the notification to ${remote} was made to fail`);
      }
      if (strained === "late") later(remote, payload);
      if (strained === "stale") later(...(sent[random.integer(sent.length)] ?? [remote, payload]));
      if (strained === "damaged")
        await agent.notify(remote, damaged(payload, random.integer)).catch(() => {});
      if (strained !== "lost" && strained !== "late") await agent.notify(remote, payload);
      if (strained === "twice") await agent.notify(remote, payload).catch(() => {});
      sent.push([remote, payload.slice()]);
      if (sent.length > KEPT_PAYLOADS) sent.shift();
    },
    transfer(request) {
      before();
      switch (strain.draw("transfer", TRANSFER_STRAINS)) {
        case "failed":
          return failed(agent, request);
        case "late":
          return begunLate(agent, request, clock, random.next() * lateMs);
        case "hangs":
          // Without a signal nobody could give it up.
          return request.signal === undefined ? agent.transfer(request) : begunLate(agent, request, clock);
        default:
          return agent.transfer(request);
      }
    },
  };
}

/**
 * Cut short, twice as long, or noise: bytes that no peer sends. A few changed ones would be another valid message now and then, which
 * nothing could tell from a true one.
 */
function damaged(payload: Uint8Array, integer: (below: number) => number): Uint8Array {
  const kind = integer(3);
  if (kind === 0) return payload.slice(0, integer(Math.max(1, payload.length)));
  if (kind === 1) return Uint8Array.from([...payload, ...payload]);
  return payload.map(() => integer(256));
}

/** Its bytes land, its notification is not sent, and it has failed. */
function failed(agent: Agent, { notification: _, ...request }: TransferRequest): Transfer {
  const { done, released } = agent.transfer(request as TransferRequest);
  return {
    released,
    done: done.then(() => {
      throw new KvError("KV_TRANSFER_FAILED", "the transfer was made to fail");
    }),
  };
}

/** Begins after `delayMs`, or never; given up before that, it has touched nothing. */
function begunLate(agent: Agent, given: TransferRequest, clock: Clock, delayMs?: number): Transfer {
  // The caller's tables are his again when this returns.
  const request: TransferRequest =
    given.runs === undefined
      ? { ...given, localIds: given.localIds.slice(), remoteIds: given.remoteIds.slice() }
      : {
          ...given,
          runs: given.runs.slice(),
          ...(given.offsets === undefined ? {} : { offsets: given.offsets.slice() }),
        };
  const { signal } = request;
  const begun = new Promise<Transfer>((resolve, reject) => {
    const begin = () => {
      signal?.removeEventListener("abort", giveUp);
      try {
        resolve(agent.transfer(request));
      } catch (error) {
        reject(error);
      }
    };
    const timer = delayMs === undefined ? undefined : clock.setTimer(begin, delayMs);
    function giveUp(): void {
      timer?.cancel();
      const reason = "the transfer was given up before it had begun";
      reject(new KvError("KV_TRANSFER_ABORTED", reason, { cause: signal?.reason }));
    }
    if (signal?.aborted) giveUp();
    else signal?.addEventListener("abort", giveUp);
  });
  return {
    done: begun.then(({ done }) => done),
    released: begun.then(
      ({ released }) => released,
      () => {},
    ),
  };
}
