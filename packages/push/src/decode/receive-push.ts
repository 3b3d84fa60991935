import {
  type FailureType,
  type PeerHold,
  type ReceiveBroken,
  type RemoteLink,
  receiveBroken,
} from "@kv/connector";
import { type Clock, KvError, type Timer } from "@kv/interface";
import type { RequestPlan } from "@kv/plan";
import { PUSH_CONTROL } from "../control.js";
import { plannedReceive, type ReceivedGroups } from "./plan-receive.js";
import type { RegistrationOrder } from "../step-metadata.js";
import type { Words } from "./push-replies.js";

export interface ReceivePushOptions extends ReceivedGroups {
  readonly clock: Clock;
  /** Opens the peer if need be, and makes sure that it is the process that the order means. */
  link(order: RegistrationOrder, signal: AbortSignal): Promise<PeerHold<RemoteLink>>;
  /** Offers the blocks to one rank; false when the transport did not take it. */
  register(order: RegistrationOrder, link: RemoteLink, agent: string): Promise<boolean>;
  withdraw(order: RegistrationOrder, link: RemoteLink, agents: Iterable<string>): void;
  /** The process that answers at the producer's address now; undefined when nobody can be asked. */
  processAt(order: RegistrationOrder): Promise<string | undefined>;
  /** The worker closes, and waits for no producer any more; words wake up who is to notice. */
  abandoned(): boolean;
  /** What is left to do when the last byte has landed. */
  settle(order: RegistrationOrder, link: RemoteLink, plan: RequestPlan): Promise<void>;
  /** How often a withdrawal is repeated that nobody answers. */
  readonly repeatMs: number;
  /** How long a request that has failed waits for the answer, before it is reported with its blocks at risk. */
  readonly graceMs: number;
  /** How long blocks stay out of use that a silent producer may write to. */
  readonly blocksAtRiskMs: number;
}

/**
 * One request's KV, written by a producer: offer the blocks, wait for the word of each of its ranks, then the receive pass. Settles when
 * no WRITE can come any more, or when that has been waited for in vain, for `blocksAtRiskMs` or until `abandoned`; `atRisk` is called
 * when the outcome is known earlier than that.
 */
export async function receivePush(
  order: RegistrationOrder,
  signal: AbortSignal,
  words: Words,
  options: ReceivePushOptions,
  atRisk: (broken: ReceiveBroken) => void,
): Promise<void> {
  const hold = await options.link(order, signal).catch((error: unknown) => {
    throw receiveBroken(error, "KV_HANDSHAKE_REFUSED", "push_reg_handshake_failed", signal);
  });
  try {
    const link = hold.peer;
    const plan = plannedReceive(link, order, options);
    const agents = [...link.agents.values()];
    /** Ranks that the transport did not tell of the blocks. */
    const unoffered = new Set<string>();
    let failure = await offerAndWait(order, link, agents, signal, words, options, unoffered);
    if (failure !== undefined) {
      // A vLLM rank writes to all of our ranks when one of them has registered.
      const byOthers = !link.features.has(PUSH_CONTROL) && options.tpSize > link.address.tpSize;
      const mayWrite = byOthers ? agents : agents.filter((agent) => !unoffered.has(agent));
      await untilSafe(order, link, mayWrite, words, options, () => atRisk(failure as ReceiveBroken));
      throw failure;
    }
    await options.settle(order, link, plan).catch((error: unknown) => {
      failure = receiveBroken(error, "KV_TRANSFER_FAILED", "transfer_exception", signal);
      throw failure;
    });
  } finally {
    hold.release();
  }
}

/** Undefined when every rank has written its share. */
async function offerAndWait(
  order: RegistrationOrder,
  link: RemoteLink,
  agents: readonly string[],
  signal: AbortSignal,
  words: Words,
  options: ReceivePushOptions,
  unoffered: Set<string>,
): Promise<ReceiveBroken | undefined> {
  const aborted = new Promise<void>((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener("abort", () => resolve());
  });
  const broken = (error: unknown, type: FailureType) =>
    receiveBroken(error, "KV_TRANSFER_FAILED", type, signal);
  // Nobody has been offered anything yet.
  if (signal.aborted) throw broken(signal.reason, "push_reg_handshake_failed");
  const all = Promise.all(
    agents.map(async (agent) => {
      if (!(await options.register(order, link, agent))) unoffered.add(agent);
    }),
  );
  let offering = true;
  const offered = all.then(() => {
    offering = false;
  });
  for (;;) {
    if (agents.every((agent) => words.done.has(agent))) return undefined;
    for (const error of words.ended.values()) return broken(error, "push_refused");
    if (signal.aborted) return broken(signal.reason, "push_timed_out");
    if (!offering && unoffered.size > 0) {
      const error = new KvError(
        "KV_NOTIFICATION_FAILED",
        `engine ${order.remote.engineId} could not be told of the blocks of request ${order.requestId}`,
      );
      return broken(error, "push_reg_notif_failed");
    }
    await Promise.race([words.next(), aborted, ...(offering ? [offered] : [])]);
  }
}

/** Until each rank has said that it has written or will not, or the producer's process is gone, or there is no use in waiting. */
async function untilSafe(
  order: RegistrationOrder,
  link: RemoteLink,
  agents: readonly string[],
  words: Words,
  options: ReceivePushOptions,
  atRisk: () => void,
): Promise<void> {
  const { clock } = options;
  const silent = (agent: string) => !words.done.has(agent) && !words.ended.has(agent);
  const open = () => (options.abandoned() ? [] : agents.filter(silent));
  const controls = link.features.has(PUSH_CONTROL);
  const startedMs = clock.now();
  let told = false;
  for (let round = 0; open().length > 0; round++) {
    if (controls) options.withdraw(order, link, open());
    const roundEndsMs = Math.min(clock.now() + options.repeatMs, startedMs + options.blocksAtRiskMs);
    while (open().length > 0 && clock.now() < roundEndsMs) {
      const graceLeftMs = startedMs + options.graceMs - clock.now();
      if (!told && graceLeftMs <= 0) {
        told = true;
        atRisk();
      }
      const untilMs = told ? roundEndsMs : Math.min(roundEndsMs, startedMs + options.graceMs);
      await wordWithin(words, clock, Math.max(1, Math.ceil(untilMs - clock.now())));
    }
    if (open().length === 0 || clock.now() - startedMs >= options.blocksAtRiskMs) return;
    // Of a vLLM process nobody can tell whether it is the same.
    if (link.incarnation === undefined || round === 0) continue;
    const process = await options.processAt(order);
    if (process !== undefined && process !== link.incarnation) return;
  }
}

async function wordWithin(words: Words, clock: Clock, timeoutMs: number): Promise<void> {
  let timer: Timer | undefined;
  const late = new Promise<void>((resolve) => {
    timer = clock.setTimer(resolve, timeoutMs);
  });
  await Promise.race([words.next(), late]);
  timer?.cancel();
}
