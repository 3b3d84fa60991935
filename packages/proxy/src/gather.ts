import { KvError } from "@kv/interface";
import type { Deadline } from "./deadline.js";
import { whyEnded } from "./deadline.js";
import type { Exchange } from "./exchange.js";
import type { LegAnswer, LegOrder, Part } from "./leg-order.js";
import type { RequestPart } from "./request-parts.js";

export interface GatheredPart extends RequestPart {
  readonly requestId: string;
  readonly deadline: Deadline;
  readonly answer: LegAnswer;
}

/**
 * Runs all parts at once and waits until each has an answer's begin: an error of one is then still the answer of all, with its status.
 * Copies wait for the first copy's prefill, which leaves their prompt in the prefill worker's prefix cache. When one fails, the
 * others are given up.
 */
export async function gatherParts(
  exchange: Exchange,
  order: LegOrder,
  parts: readonly RequestPart[],
): Promise<readonly GatheredPart[]> {
  const prefilled = new Map<number, Promise<void>>();
  const forks: Deadline[] = [];
  let failure: { readonly error: unknown } | undefined;

  async function one(part: RequestPart, at: number): Promise<GatheredPart> {
    const deadline = exchange.deadline.fork();
    forks.push(deadline);
    const requestId = `${exchange.requestId}-${at}`;
    const { headers } = exchange;
    const trail = at === 0 ? exchange.trail : {};
    const own: Part = { requestId, request: part.request, headers, deadline, trail };
    try {
      if (part.copy > 0) {
        await prefilled.get(part.prompt);
        if (failure !== undefined) throw failure.error;
        return { ...part, requestId, deadline, answer: await order.run(own) };
      }
      let done = () => {};
      prefilled.set(part.prompt, new Promise((resolve) => (done = resolve)));
      try {
        const answer = await order.run({ ...own, onPrefilled: done });
        return { ...part, requestId, deadline, answer };
      } finally {
        done();
      }
    } catch (thrown) {
      const error = whyEnded(exchange.deadline, thrown);
      if (failure === undefined) {
        failure = { error };
        const reason = new KvError("KV_REQUEST_ABORTED", "another part of the request failed");
        for (const fork of forks) if (fork !== deadline) fork.abort(reason);
      }
      throw thrown;
    }
  }

  const settled = await Promise.allSettled(parts.map(one));
  const gathered = settled.flatMap((result) => (result.status === "fulfilled" ? [result.value] : []));
  if (failure === undefined) return gathered;
  for (const { answer } of gathered) {
    answer.discard();
    answer.visit.abandoned();
  }
  for (const fork of forks) fork.close();
  throw failure.error;
}
