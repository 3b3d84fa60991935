import { KvError } from "@kv/interface";
import { refuseNobody } from "./attempts.js";
import { badStatus, isServerFailure } from "./bad-answer.js";
import { runDecodeLeg } from "./decode-leg.js";
import type { Instance, Visit } from "./instance.js";
import type { InstancePool } from "./instances.js";
import { decodeBody } from "./leg-bodies.js";
import type { LegAnswer, LegOrder, LegOrderOptions, Part } from "./leg-order.js";
import { runAlone } from "./one-leg.js";
import { type PrefillOutcome, runPrefillLeg } from "./prefill-leg.js";
import { promptFieldsOf } from "./prompt-fields.js";
import { releaseBlocks } from "./release-blocks.js";
import { failedAttempt } from "./retry.js";

/** Prefill first, decode with what it answered: the decode worker reads the KV (vLLM's NixlConnector, pull). */
export function createPullOrder(options: LegOrderOptions): LegOrder {
  const { ambient, decoders, policy, retry, timeouts } = options;
  const { log, metrics } = ambient;
  const behind = new Set<Promise<void>>();

  function release(part: Part, kvTransferParams: string): void {
    const done = releaseBlocks(options, part, kvTransferParams).finally(() => behind.delete(done));
    behind.add(done);
  }

  async function decode(part: Part, prefill: PrefillOutcome & { kind: "kv" }): Promise<LegAnswer> {
    const { kvTransferParams } = prefill;
    let sent = false;
    const leg = {
      leaseEndsAtMs: prefill.atMs + timeouts.leaseMs,
      onSent: () => {
        sent = true;
      },
    };
    try {
      const answer = await runDecodeLeg(options, part, decodeBody(part.request, kvTransferParams), leg);
      // A refusal by its HTTP layer does not reach the worker's scheduler, which would tell the prefill worker. A second word is harmless.
      if (answer.status >= 400 && answer.status < 500) release(part, kvTransferParams);
      const asked = promptFieldsOf(part.request) !== "none" && answer.status === 200;
      return asked ? { ...answer, promptAnswer: prefill.answer } : answer;
    } catch (error) {
      // One that may have it frees the blocks itself when its connection ends. Freed by another they could change while it reads.
      if (!sent) release(part, kvTransferParams);
      throw error;
    }
  }

  async function once(part: Part): Promise<LegAnswer> {
    refuseNobody(decoders);
    const prefill = await runPrefillLeg(options, part);
    switch (prefill.kind) {
      case "kv":
        // The client went away while the last bytes came: nobody will read these blocks.
        if (part.deadline.ended) {
          release(part, prefill.kvTransferParams);
          throw part.deadline.reason;
        }
        return await decode(part, prefill);
      case "no-kv":
        if (policy.missingKv === "fail") throw noKv(prefill.instance);
        return runAlone(options, part, `${prefill.instance} answered without kv_transfer_params`);
      case "error":
        return passedOn(prefill);
    }
  }

  return {
    name: "pull",
    async run(given) {
      const part: Part = { ...given, avoidDecode: given.avoidDecode ?? new Set() };
      for (let attempt = 1; ; attempt += 1) {
        let answer: LegAnswer | undefined;
        try {
          answer = await once(part);
          const failure = failureWorthAnother(decoders, answer.visit.instance, answer.status);
          if (failure === undefined) return answer;
          part.avoidDecode?.add(answer.visit.instance);
          throw failure;
        } catch (error) {
          const inDecode = part.trail.decodeStartedAtMs !== undefined;
          const again =
            inDecode &&
            !part.deadline.ended &&
            (KvError.is(error, "KV_LEASE_EXPIRED")
              ? attempt === 1
              : retry.afresh(failedAttempt("decode", error, attempt)));
          if (!again && answer !== undefined) return answer;
          if (!again) throw error;
          answer?.discard();
          answer?.visit.failed(KvError.from(error, "KV_INTERNAL", "the decode leg failed"));
          part.trail.restarts = (part.trail.restarts ?? 0) + 1;
          delete part.trail.decodeStartedAtMs;
          metrics.count("kv_proxy_restarts_total");
          log.warn("began-again", { requestId: part.requestId, decode: part.trail.decode, error });
        }
      }
    },
    async settled() {
      await Promise.all(behind);
    },
  };
}

/** An instance's failure that the client need not see, as there is another instance. */
export function failureWorthAnother(
  pool: InstancePool,
  instance: Instance,
  status: number,
): KvError | undefined {
  const { role, url } = instance;
  if (pool.role !== role || !isServerFailure(status)) return undefined;
  if (!pool.list().some((other) => other !== instance && other.available())) return undefined;
  return badStatus(role, url, status);
}

const ENDED: Visit = {
  instance: { role: "prefill", url: "", inFlight: 0 },
  succeeded() {},
  abandoned() {},
  failed() {},
};

/** An instance's own error, in its own words. Its visit has ended. */
export function passedOn({ answer, body }: PrefillOutcome & { kind: "error" }): LegAnswer {
  const { status, headers, discard } = answer;
  return { visit: ENDED, status, headers, eventStream: false, held: body, rest: undefined, discard };
}

export function noKv(instance: string): KvError {
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the prefill instance ${instance} answered 200 without kv_transfer_params for a decode worker`,
    {
      hint: "is it started with a kv_transfer_config of role kv_producer or kv_both? --missing-kv decode-computes would let the decode worker compute such prompts",
      details: { role: "prefill", instance },
    },
  );
}
