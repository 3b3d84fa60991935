import { bodyLength, changedBodyHeaders } from "@kv/fleet/front-end";
import { withoutAddresses, type YieldingQueue } from "@kv/http";
import { KvError } from "@kv/interface";
import { type RequestPart, splitRequest } from "../request/split-request.js";
import type { LegAnswer } from "../response/leg-answer.js";
import { mergeAnswers } from "../response/merge-answers.js";
import { streamResponse } from "../response/stream-response.js";
import type { ClientRequest } from "./client-request.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";
import { runParts } from "./fan-out.js";
import type { Legs } from "./legs.js";

/** From a client's request to its answer: splits it where needed, runs the legs of each part, and writes one answer of theirs. */
export class GenerationFlow {
  readonly #legs: Legs;
  readonly #strategy: DisaggregationStrategy;
  readonly #parses: YieldingQueue;

  /** `parses`: where long bodies wait to be split. */
  constructor(legs: Legs, strategy: DisaggregationStrategy, parses: YieldingQueue) {
    this.#legs = legs;
    this.#strategy = strategy;
    this.#parses = parses;
  }

  /** Name of the strategy. */
  get name(): string {
    return this.#strategy.name;
  }

  /**
   * Answers the request. Returns the failure that an instance reported in an answer which the client has received. An error before the answer's head has
   * left is the caller's to write.
   */
  async run(client: ClientRequest): Promise<KvError | undefined> {
    if (this.#legs.readsTokenIds) await this.#legs.addTokenIds(client);
    const { request } = client;
    const { settings } = this.#legs;
    if (client.prefillers?.length === 0) return this.#stream(client, await this.#legs.decodeUnnamed(client));
    if (request.disaggregationLimit !== undefined) {
      if (settings.policy.unsplittable === "fail") throw cannotDisaggregate(request.disaggregationLimit);
      return this.#stream(client, await this.#legs.decodeWhole(client, request.disaggregationLimit));
    }
    if (request.promptFields === "prompt-only")
      return this.#stream(client, await this.#legs.promptOnly(client));
    const split = splitRequest(request, settings.limits.parts);
    const begun = split.next();
    const parts = begun.done === true ? begun.value : await this.#parses.run(split);
    const [part] = parts;
    if (parts.length > 1 || part === undefined) {
      const lengthBytes = parts.reduce((sum, { request }) => sum + bodyLength(request), 0);
      client.admission?.add(parts.length - 1, lengthBytes);
      return this.#runParts(client, parts);
    }
    const answer = await this.#strategy.run(client);
    if (answer.promptAnswer === undefined) return this.#stream(client, answer);
    const { requestId, deadline } = client;
    await mergeAnswers(settings, client, [{ ...part, requestId, deadline, answer }]);
    return undefined;
  }

  /** Resolves when no leg goes on in the background. */
  settled(): Promise<void> {
    return this.#legs.settled();
  }

  async #runParts(client: ClientRequest, parts: readonly RequestPart[]): Promise<KvError | undefined> {
    client.record.parts = parts.length;
    const answered = await runParts(client, this.#strategy, parts);
    try {
      const refusal = answered.find(({ answer }) => answer.status !== 200);
      if (refusal !== undefined) return await this.#stream(client, refusal.answer);
      await mergeAnswers(this.#legs.settings, client, answered);
      return undefined;
    } finally {
      for (const { answer, deadline } of answered) {
        answer.discard();
        answer.visit.abandoned();
        deadline.close();
      }
    }
  }

  #stream(client: ClientRequest, answer: LegAnswer): Promise<KvError | undefined> {
    const { timeouts, exposeInstances } = this.#legs.settings;
    return streamResponse(client, exposeInstances ? answer : hideAddresses(answer), timeouts.stallMs);
  }
}

/** A server failure of an instance without addresses in its text. Other answers stay as they are: an error of the client may repeat its own URL. */
function hideAddresses(answer: LegAnswer): LegAnswer {
  if (answer.status < 500 || answer.rest !== undefined) return answer;
  const given = answer.held.toString();
  const held = withoutAddresses(given);
  if (held === given) return answer;
  return { ...answer, headers: changedBodyHeaders(answer.headers), held: Buffer.from(held) };
}

function cannotDisaggregate(why: string): KvError {
  const message = `prefill and decode of this request cannot run on two instances: ${why}`;
  return new KvError("KV_REQUEST_INVALID", message, {
    hint: "change the request; or run the proxy with --unsplittable decode-computes, which sends such requests to one decode instance",
  });
}
