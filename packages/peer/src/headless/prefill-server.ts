import {
  type BodiesLimits,
  bodyLimits,
  connectionLimits,
  type ErrorAnswer,
  type HttpLimits,
  HttpServer,
  httpUrl,
  RequestsInFlight,
  send,
  sendJson,
  type Turn,
} from "@kv/http";
import { type Clock, KvError, type Random, systemClock, systemRandom } from "@kv/interface";
import { z } from "zod";
import type { HeadlessPrefill } from "./headless-prefill.js";

/** Options of `PrefillServer`. */
export interface PrefillServerOptions {
  /** The caller closes it. */
  readonly prefill: HeadlessPrefill;
  readonly model: string;
  readonly vllmVersion: string;
  /**
   * Returns Prometheus text, such as `memoryMetrics().render`.
   * @default none
   */
  readonly metrics?: (() => string) | undefined;
  /** Makes the request ids' suffixes. @default systemRandom() */
  readonly random?: Random | undefined;
  /** @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Replace some of `PREFILL_LIMITS`. */
  readonly limits?: Partial<PrefillLimits> | undefined;
}

/** Bounds of a `PrefillServer`. */
export type PrefillLimits = HttpLimits & BodiesLimits;

/** The defaults of a `PrefillServer`'s limits. */
export const PREFILL_LIMITS: PrefillLimits = {
  maxConnections: 1024,
  maxConnectionsPerAddress: 512,
  maxRequests: 1024,
  maxRequestsPerAddress: 512,
  maxHeaderBytes: 16 * 1024,
  headerTimeoutMs: 10_000,
  requestTimeoutMs: 30_000,
  idleTimeoutMs: 72_000,
  maxBodyBytes: 4 << 20,
  maxBodiesBytes: 64 << 20,
  maxBodiesBytesPerAddress: 32 << 20,
  maxBodyDepth: 64,
  maxBodyMembers: 20_000,
};

const PIPELINED_REQUESTS = 15;

const completionSchema = z.looseObject({
  // One error, however many elements are wrong.
  prompt: z.custom<readonly number[]>(isTokenIds, "must be a list of token ids"),
  kv_transfer_params: z.looseObject({ do_remote_decode: z.literal(true) }),
});

function isTokenIds(prompt: unknown): boolean {
  const isTokenId = (token: unknown) => Number.isSafeInteger(token) && (token as number) >= 0;
  return Array.isArray(prompt) && prompt.length > 0 && prompt.every(isTokenId);
}

/**
 * An HTTP server with a vLLM prefill server's routes: `/health`, `/version`, `/v1/models`,
 * `/metrics`, and `/v1/completions` for token ids with `do_remote_decode`.
 */
export class PrefillServer {
  readonly #options: PrefillServerOptions;
  readonly #random: Random;
  readonly #http: HttpServer;
  readonly #inFlight: RequestsInFlight;

  constructor(options: PrefillServerOptions) {
    this.#options = options;
    this.#random = options.random ?? systemRandom();
    const limits = { ...PREFILL_LIMITS, ...options.limits };
    this.#inFlight = new RequestsInFlight({
      requestsInFlight: limits.maxRequests,
      requestsPerClient: limits.maxRequestsPerAddress,
    });
    this.#http = new HttpServer({
      limits: connectionLimits(limits, PIPELINED_REQUESTS),
      bodies: bodyLimits(limits),
      anyContentType: true,
      clock: options.clock ?? systemClock(),
      serve: (turn) => this.#serve(turn),
      answerError,
    });
  }

  /**
   * Resolves with the URL.
   *
   * @throws `KV_CONFIG_INVALID` for a port that is taken, or a host that is not of this machine.
   */
  async listen({ host, port }: { readonly host: string; readonly port: number }): Promise<string> {
    return httpUrl(host, await this.#http.listen(host, port));
  }

  close(): Promise<void> {
    return this.#http.close();
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path, client } = turn;
    const slot = this.#inFlight.admit(client);
    response.once("close", () => slot.end());
    const { model, vllmVersion } = this.#options;
    switch (`${request.method} ${path}`) {
      case "GET /health":
        return sendJson(response, 200, {});
      case "GET /version":
        return sendJson(response, 200, { version: vllmVersion });
      case "GET /v1/models":
        return sendJson(response, 200, {
          object: "list",
          data: [{ id: model, object: "model", root: model }],
        });
      case "GET /metrics":
        return send(response, 200, "text/plain; version=0.0.4", this.#metrics());
      case "POST /v1/completions":
        return this.#http.withJson(turn, (body) => this.#complete(turn, body));
      default:
        throw refused(404, `there is no route ${request.method} ${path}`);
    }
  }

  #metrics(): string {
    const { prefill, model, metrics = () => "" } = this.#options;
    const { total, used } = prefill.blocks;
    return [
      `vllm:cache_config_info{block_size="${prefill.blockSize}",num_gpu_blocks="${total}"} 1.0`,
      `vllm:kv_cache_usage_perc{model_name=${JSON.stringify(model)}} ${used / (total - 1)}`,
      metrics(),
    ].join("\n");
  }

  async #complete({ request, response }: Turn, body: unknown): Promise<void> {
    const { prefill, model } = this.#options;
    const parsed = completionSchema.safeParse(body);
    if (!parsed.success) {
      const [issue] = parsed.error.issues;
      const path = issue?.path.join(".") ?? "";
      throw refused(
        400,
        `${path}: ${issue?.message ?? "invalid"}: this server has no model; it answers prompts of token ids with do_remote_decode`,
      );
    }
    const header = request.headers["x-request-id"];
    const clientId = typeof header === "string" ? header : this.#random.uuid();
    // vLLM's form: a push D finds its request by the part before the suffix.
    const id = `cmpl-${clientId}-0-${this.#random.uuid().slice(0, 8)}`;
    const params = await prefill.prefill(id, parsed.data.prompt);
    const choice = { index: 0, text: "", logprobs: null, finish_reason: "length", token_ids: [0] };
    const completion = { id, object: "text_completion", created: 0, model, choices: [choice] };
    sendJson(response, 200, { ...completion, kv_transfer_params: params });
  }
}

const refused = (httpStatus: number, message: string) =>
  new KvError("KV_REQUEST_INVALID", message, { details: { httpStatus } });

/**
 * In vLLM's form. A client that asks for too much gets 503 too, so that a proxy tries another
 * instance.
 */
export function answerError({ code, message, details }: KvError): ErrorAnswer {
  const known = details.httpStatus ?? (code === "KV_REQUEST_INVALID" ? 400 : 503);
  const status = known === 429 ? 503 : Number(known);
  const type = code === "KV_REQUEST_INVALID" ? "BadRequestError" : code;
  return {
    status,
    headers: status === 503 ? { "retry-after": "1" } : {},
    body: JSON.stringify({ error: { message, type, code: status } }),
  };
}
