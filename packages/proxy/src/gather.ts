import { KvError } from "@kv/interface";
import type { Deadline } from "./deadline.js";
import { whyEnded } from "./deadline.js";
import type { Exchange, Trail } from "./exchange.js";
import type { Instance } from "./instance.js";
import type { LegAnswer, LegOrder, Part } from "./leg-order.js";
import type { RequestPart } from "./request-parts.js";

export interface GatheredPart extends RequestPart {
  readonly requestId: string;
  readonly deadline: Deadline;
  readonly answer: LegAnswer;
}

/**
 * Runs all parts at once and waits until each has an answer's begin: an error of one is then still the answer of all, with its status.
 * The first answer that is not a 200 is then the only one, and the other parts are given up; so they are when one fails. Copies wait for the first copy's prefill, which leaves their prompt in the prefill worker's prefix cache.
 */
export async function gatherParts(
  exchange: Exchange,
  order: LegOrder,
  parts: readonly RequestPart[],
): Promise<readonly GatheredPart[]> {
  const prefilled = new Map<number, Promise<void>>();
  const firstPrefill = new Map<number, Instance>();
  const forks: Deadline[] = [];
  let ending: { readonly error: unknown } | { readonly refusal: GatheredPart } | undefined;

  function endOthers(deadline: Deadline): void {
    const reason = new KvError("KV_REQUEST_ABORTED", "another part of the request failed");
    for (const fork of forks) if (fork !== deadline) fork.abort(reason);
  }

  async function run(part: RequestPart, own: Part): Promise<GatheredPart> {
    const { requestId, deadline } = own;
    const gathered = { ...part, requestId, deadline, answer: await order.run(own) };
    if (gathered.answer.status !== 200 && ending === undefined) {
      ending = { refusal: gathered };
      endOthers(deadline);
    }
    return gathered;
  }

  async function one(part: RequestPart, at: number): Promise<GatheredPart> {
    const deadline = exchange.deadline.fork();
    forks.push(deadline);
    const requestId = `${exchange.requestId}-${at}`;
    const { headers } = exchange;
    const trail: Trail = at === 0 ? exchange.trail : {};
    const own: Part = { requestId, request: part.request, headers, deadline, trail };
    try {
      if (part.copy > 0) {
        await prefilled.get(part.prompt);
        if (deadline.ended) throw deadline.reason;
        const preferredPrefill = firstPrefill.get(part.prompt);
        return await run(part, preferredPrefill === undefined ? own : { ...own, preferredPrefill });
      }
      let done = () => {};
      prefilled.set(part.prompt, new Promise((resolve) => (done = resolve)));
      const onPrefilled = (instance: Instance) => {
        firstPrefill.set(part.prompt, instance);
        done();
      };
      return await run(part, { ...own, onPrefilled }).finally(() => done());
    } catch (error) {
      if (ending === undefined) {
        ending = { error: whyEnded(exchange.deadline, error) };
        endOthers(deadline);
      }
      throw error;
    }
  }

  const settled = await Promise.allSettled(parts.map(one));
  const gathered = settled.flatMap((result) => (result.status === "fulfilled" ? [result.value] : []));
  const end = ending as typeof ending | undefined;
  if (end === undefined) return gathered;
  const refusal = "refusal" in end ? end.refusal : undefined;
  for (const one of gathered) {
    if (one === refusal) continue;
    one.answer.discard();
    one.answer.visit.abandoned();
  }
  for (const fork of forks) if (fork !== refusal?.deadline) fork.close();
  if (refusal !== undefined) return [refusal];
  throw (end as { error: unknown }).error;
}
