import { KvError, type Random, systemRandom } from "@kv/interface";
import fastify, { type FastifyInstance } from "fastify";
import { z } from "zod";
import type { HeadlessPrefill } from "./headless-prefill.js";

/** Options of `prefillServer`. */
export interface PrefillServerOptions {
  /** Computes the answers. The caller closes it. */
  readonly prefill: HeadlessPrefill;
  /** The model's name in `/v1/models` and in answers. */
  readonly model: string;
  /** The answer of `/version`. */
  readonly vllmVersion: string;
  /** The metrics of the connector in Prometheus' text format, such as `memoryMetrics().render`. Default: none. */
  readonly metrics?: (() => string) | undefined;
  /** Source of the request ids' suffixes. Default: the system's. */
  readonly random?: Random | undefined;
}

const MAX_BODY_BYTES = 32 << 20;

const completionSchema = z.looseObject({
  prompt: z.array(z.int().min(0)).min(1),
  kv_transfer_params: z.looseObject({ do_remote_decode: z.literal(true) }),
});

/**
 * An HTTP server, not yet listening, with the routes of a vLLM prefill server that a proxy, a doctor and a scraper use: `/health`, `/version`,
 * `/v1/models`, `/metrics` and `/v1/completions` for prompts of token ids with `do_remote_decode`.
 */
export function prefillServer(options: PrefillServerOptions): FastifyInstance {
  const { prefill, model, vllmVersion, metrics = () => "", random = systemRandom() } = options;
  const app = fastify({ bodyLimit: MAX_BODY_BYTES, forceCloseConnections: true });
  app.get("/health", () => ({}));
  app.get("/version", () => ({ version: vllmVersion }));
  app.get("/v1/models", () => ({ object: "list", data: [{ id: model, object: "model", root: model }] }));
  app.get("/metrics", (_, reply) => {
    const { total, used } = prefill.blocks;
    const lines = [
      `vllm:cache_config_info{block_size="${prefill.blockSize}",num_gpu_blocks="${total}"} 1.0`,
      `vllm:kv_cache_usage_perc{model_name=${JSON.stringify(model)}} ${used / (total - 1)}`,
    ];
    return reply.type("text/plain; version=0.0.4").send(`${lines.join("\n")}\n${metrics()}`);
  });
  app.post("/v1/completions", async (request, reply) => {
    const parsed = completionSchema.safeParse(request.body);
    if (!parsed.success) {
      const [issue] = parsed.error.issues;
      const path = issue?.path.join(".") ?? "";
      const message = `${path}: ${issue?.message ?? "invalid"}: this server has no model; it answers prompts of token ids with do_remote_decode`;
      return reply.code(400).send({ error: { message, type: "BadRequestError", code: 400 } });
    }
    const header = request.headers["x-request-id"];
    const clientId = typeof header === "string" ? header : random.uuid();
    // The form of vLLM's ids: a push D finds its own request by the part before the suffix.
    const id = `cmpl-${clientId}-0-${random.uuid().slice(0, 8)}`;
    try {
      const params = await prefill.prefill(id, parsed.data.prompt);
      const choice = { index: 0, text: "", logprobs: null, finish_reason: "length", token_ids: [0] };
      return {
        id,
        object: "text_completion",
        created: 0,
        model,
        choices: [choice],
        kv_transfer_params: params,
      };
    } catch (thrown) {
      const error = KvError.from(thrown, "KV_INTERNAL", "the prompt could not be served");
      const code = error.code === "KV_REQUEST_INVALID" ? 400 : 503;
      return reply.code(code).send({ error: { message: error.message, type: error.code, code } });
    }
  });
  return app;
}
