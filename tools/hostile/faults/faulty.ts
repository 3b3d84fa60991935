import {
  type Agent,
  type Clock,
  KvError,
  type SideChannel,
  type Transfer,
  type TransferRequest,
  type Transport,
} from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";

// How often each fault occurs, per hundred operations. `stale`: an old notification is sent again;
// `damaged`: one is sent first. `failed`: the bytes have moved. `hangs`: until it is aborted.
// `noise`: the answer is random bytes; `junk`: the listener gets some first.
const NOTIFY_FAULTS = { lost: 2, refused: 1, twice: 3, late: 2, stale: 2, damaged: 3 };
const TRANSFER_FAULTS = { failed: 1.5, late: 3, hangs: 0.5 };
const REQUEST_FAULTS = { unanswered: 1, unreachable: 2, noise: 2, junk: 3 };

export class FaultInjector {
  readonly counts: Record<string, number> = {};
  readonly random: SeededRandom;
  hasEnded = false;

  constructor(random: SeededRandom) {
    this.random = random;
  }

  draw<Kind extends string>(
    operation: string,
    chances: Readonly<Record<Kind, number>>,
  ): Kind | undefined {
    let left = this.random.next() * 100;
    if (this.hasEnded) return undefined;
    const found = Object.entries<number>(chances).find(([, chance]) => {
      left -= chance;
      return left < 0;
    });
    if (found === undefined) return undefined;
    const name = `${operation} ${found[0]}`;
    this.counts[name] = (this.counts[name] ?? 0) + 1;
    return found[0] as Kind;
  }
}

/** Long enough for a listener to drop frames that it cannot decode. */
const JUNK_TIMEOUT_MS = 50;

export function faultySideChannel(sideChannel: SideChannel, injector: FaultInjector): SideChannel {
  const noiseFor = (frames: readonly Uint8Array[]) =>
    frames.map((frame) => frame.map(() => injector.random.integer(256)));
  const { withEncryption } = sideChannel;
  return {
    ...sideChannel,
    ...(withEncryption && {
      withEncryption: (keys) => faultySideChannel(withEncryption(keys), injector),
    }),
    async request(request) {
      const fault = injector.draw("request", REQUEST_FAULTS);
      const where = `${request.host}:${request.port}`;
      if (fault === "unanswered")
        throw new KvError("KV_SIDE_CHANNEL_TIMEOUT", `${where} was made silent`);
      if (fault === "unreachable")
        throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${where} was cut off`);
      if (fault === "junk") {
        const frames = noiseFor(request.frames);
        const junk = { ...request, frames, timeoutMs: JUNK_TIMEOUT_MS };
        await sideChannel.request(junk).catch(() => {});
      }
      const reply = await sideChannel.request(request);
      return fault === "noise" ? { ...reply, frames: noiseFor(reply.frames) } : reply;
    },
  };
}

interface FaultyTransportOptions {
  readonly clock: Clock;
  readonly injector: FaultInjector;
  readonly lateMs: number;
  /** Before each transfer and notification: a fake NIXL can be made to fail. */
  readonly before?: () => void;
  readonly adding?: <T>(add: () => Promise<T>) => Promise<T>;
}

/** `agents`: all that were created. */
export function faultyTransport(transport: Transport, options: FaultyTransportOptions) {
  const agents: Agent[] = [];
  const createAgent: Transport["createAgent"] = async (agentOptions) => {
    const agent = await transport.createAgent(agentOptions);
    agents.push(agent);
    return faultyAgent(agent, options);
  };
  return { ...transport, createAgent, agents };
}

const KEPT_PAYLOADS = 32;

function faultyAgent(agent: Agent, options: FaultyTransportOptions): Agent {
  const { clock, injector, lateMs, before = () => {}, adding = (add) => add() } = options;
  const { random } = injector;
  const sent: [remote: string, payload: Uint8Array][] = [];

  function later(remote: string, payload: Uint8Array) {
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
      if (fault === "refused")
        throw new KvError("KV_NOTIFICATION_FAILED", `that to ${remote} was made to fail`);
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
      const fault = injector.draw("transfer", TRANSFER_FAULTS);
      if (fault === "failed") return failed(agent, request);
      if (fault === "late") return begunLate(agent, request, clock, random.next() * lateMs);
      // Without a signal it could not be aborted.
      if (fault === "hangs" && request.signal !== undefined)
        return begunLate(agent, request, clock);
      return agent.transfer(request);
    },
  };
}

/** A few changed bytes could give another valid message. */
function damaged(payload: Uint8Array, integer: (below: number) => number): Uint8Array {
  const kind = integer(3);
  if (kind === 0) return payload.slice(0, integer(Math.max(1, payload.length)));
  return kind === 1 ? Buffer.concat([payload, payload]) : payload.map(() => integer(256));
}

/** Moves the bytes, sends no notification, and fails. */
function failed(agent: Agent, { notification: _, ...request }: TransferRequest): Transfer {
  const { done, released } = agent.transfer(request as TransferRequest);
  const fail = () => {
    throw new KvError("KV_TRANSFER_FAILED", "the transfer was made to fail");
  };
  return { released, done: done.then(fail) };
}

/** Without `delayMs` it never begins. */
function begunLate(
  agent: Agent,
  original: TransferRequest,
  clock: Clock,
  delayMs?: number,
): Transfer {
  // The caller may reuse its tables when this returns.
  const { signal } = original;
  const copies = Object.entries(original).map(([name, value]) => [
    name,
    ArrayBuffer.isView(value) ? (value as Uint8Array).slice() : value,
  ]);
  const request = Object.fromEntries(copies) as TransferRequest;
  const begun = new Promise<void>((resolve, reject) => {
    const timer = delayMs === undefined ? undefined : clock.setTimer(resolve, delayMs);
    const abort = () => {
      timer?.cancel();
      const reason = "the transfer was aborted before it began";
      reject(new KvError("KV_TRANSFER_ABORTED", reason, { cause: signal?.reason }));
    };
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort, { once: true });
  }).then(() => agent.transfer(request));
  return {
    done: begun.then(({ done }) => done),
    released: begun.then(
      ({ released }) => released,
      () => {},
    ),
  };
}
