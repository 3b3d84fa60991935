import { type Ambient, KvError } from "@kv/interface";
import { runDecodeLeg } from "./decode-leg.js";
import type { Exchange, Flow } from "./exchange.js";
import { answerHeaders } from "./headers.js";
import type { InstancePool } from "./instances.js";
import { aloneBody, decodeBody } from "./leg-bodies.js";
import type { ProxyLimits, ProxyPolicy, ProxyTimeouts } from "./options.js";
import { runPrefillLeg } from "./prefill-leg.js";
import { relay } from "./relay.js";
import type { RetryPolicy } from "./retry.js";
import type { Upstream } from "./upstream.js";

export interface PullFlowOptions {
  readonly ambient: Ambient;
  readonly prefillers: InstancePool;
  readonly decoders: InstancePool;
  readonly upstream: Upstream;
  readonly retry: RetryPolicy;
  readonly limits: ProxyLimits;
  readonly timeouts: ProxyTimeouts;
  readonly policy: ProxyPolicy;
}

/** Prefill first, decode with what it answered: the decode worker reads the KV (vLLM's NixlConnector, pull). */
export function createPullFlow(options: PullFlowOptions): Flow {
  const { ambient, prefillers, decoders, policy, timeouts } = options;
  const { clock, log, metrics } = ambient;
  const parts = { ...options, clock, log };

  async function decode(exchange: Exchange, body: string): Promise<void> {
    const answer = await runDecodeLeg({ ...parts, pool: decoders }, exchange, body);
    await relay(exchange, answer, timeouts.stallMs);
  }

  function decodeAlone(exchange: Exchange, reason: string): Promise<void> {
    log.warn("decode-computes", { requestId: exchange.requestId, reason });
    metrics.count("kv_proxy_decode_alone_total");
    return decode(exchange, aloneBody(exchange.request));
  }

  return {
    name: "pull",
    async run(exchange) {
      const { request, requestId, response, trail } = exchange;
      if (request.unsplittable !== undefined) {
        if (policy.unsplittable === "fail") throw unsplittable(request.unsplittable);
        return decodeAlone(exchange, request.unsplittable);
      }
      const prefill = await runPrefillLeg({ ...parts, pool: prefillers }, exchange);
      switch (prefill.kind) {
        case "kv":
          return decode(exchange, decodeBody(request, prefill.kvTransferParams));
        case "no-kv":
          if (policy.missingKv === "fail") throw noKv(prefill.instance);
          return decodeAlone(exchange, `${prefill.instance} answered without kv_transfer_params`);
        case "error": {
          const { status, headers } = prefill.answer;
          trail.status = status;
          trail.answerLengthBytes = prefill.body.length;
          response.writeHead(status, answerHeaders(headers, requestId));
          response.end(prefill.body);
        }
      }
    },
  };
}

function unsplittable(why: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `this request cannot be parted into prefill and decode: ${why}`, {
    hint: "send a request for each prompt and each copy, without log probabilities of the prompt; or run the proxy with --unsplittable decode-computes",
  });
}

function noKv(instance: string): KvError {
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the prefill instance ${instance} answered 200 without kv_transfer_params for a decode worker`,
    {
      hint: "is it started with a kv_transfer_config of role kv_producer or kv_both? --missing-kv decode-computes would let the decode worker compute such prompts",
      details: { role: "prefill", instance },
    },
  );
}
