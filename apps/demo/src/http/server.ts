import {
  bodyLimits,
  connectionLimits,
  type ErrorAnswer,
  HttpServer,
  httpUrl,
  RequestsInFlight,
  send,
  sendJson,
  type Turn,
} from "@kv/http";
import {
  type Ambient,
  type AmbientOptions,
  ambient,
  KvError,
  type KvTransferParams,
} from "@kv/interface";
import { errorBody, httpError, isInternal, statusOf } from "./error-response.js";
import { type GENERATION_ROUTES, type ServedInstance, startGeneration } from "./generation.js";
import { type HttpLimits, type HttpLimitsInput, httpLimits } from "./limits.js";

const CLOSE_TIMEOUT_MS = 2000;

export interface InstanceServerOptions extends AmbientOptions {
  readonly limits?: HttpLimitsInput | undefined;
  /**
   * Send clients the messages of failures inside the deployment, which may name hosts and ports.
   * Default: false, the code only.
   */
  readonly exposeErrors?: boolean | undefined;
}

/** The API server of an instance: vLLM's routes, and those of the demo. */
export class InstanceServer {
  readonly #instance: ServedInstance;
  readonly #ambient: Ambient;
  readonly #limits: HttpLimits;
  readonly #exposeErrors: boolean;
  readonly #http: HttpServer;
  readonly #inFlight: RequestsInFlight;

  constructor(instance: ServedInstance, options: InstanceServerOptions = {}) {
    this.#instance = instance;
    this.#ambient = ambient(options);
    this.#limits = httpLimits(options.limits);
    this.#exposeErrors = options.exposeErrors ?? false;
    const { maxRequests, maxRequestsPerAddress, maxRequestsPerConnection } = this.#limits;
    this.#inFlight = new RequestsInFlight({
      requestsInFlight: maxRequests,
      requestsPerClient: maxRequestsPerAddress,
    });
    this.#http = new HttpServer({
      limits: connectionLimits(this.#limits, maxRequestsPerConnection - 1),
      bodies: bodyLimits(this.#limits),
      clock: this.#ambient.clock,
      serve: (turn) => this.#serve(turn),
      answerError: (error) => this.#answerError(error),
    });
  }

  #answerError(error: KvError): ErrorAnswer {
    const status = statusOf(error);
    // A refusal is the sender's business: a flood of refused requests does not fill the log.
    if (isInternal(error))
      this.#ambient.log.error("request-failed", { code: error.code, message: error.message });
    return {
      status,
      headers: status === 503 ? { "retry-after": "1" } : {},
      body: JSON.stringify(errorBody(error, this.#exposeErrors)),
    };
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path } = turn;
    const instance = this.#instance;
    switch (`${request.method} ${path}`) {
      case "GET /health":
        response.writeHead(instance.ready() ? 200 : 503).end();
        return;
      case "GET /version":
        return sendJson(response, 200, { version: "kv-demo" });
      case "GET /status":
        return sendJson(response, 200, instance.status());
      case "GET /metrics":
        return send(response, 200, "text/plain; version=0.0.4", instance.metrics());
      case "GET /kv/transfers":
        return sendJson(response, 200, instance.kvTransfers());
      case "GET /v1/models": {
        const { modelNames, maxModelLen: max_model_len } = instance;
        const [id] = modelNames;
        const model = { id, object: "model", created: 0, owned_by: "kv-demo", max_model_len };
        return sendJson(response, 200, { object: "list", data: [model] });
      }
      case "GET /is_sleeping":
      case "POST /sleep":
      case "POST /wake_up":
        return this.#sleepMode(turn);
      case "POST /v1/responses":
        return this.#post(turn, () => {
          throw httpError(
            404,
            "/v1/responses is not served here: this engine keeps no responses and no conversations; send the messages to /v1/chat/completions",
          );
        });
      case "POST /v1/completions":
      case "POST /v1/chat/completions":
        return this.#post(turn, (body) =>
          startGeneration(path as keyof typeof GENERATION_ROUTES, body, instance, turn, {
            uuid: this.#ambient.random.uuid,
            maxUnreadBytes: this.#limits.maxUnreadBytes,
            exposeErrors: this.#exposeErrors,
          }),
        );
      default:
        throw httpError(404, `${request.method} ${path.slice(0, 200)} is not served here`);
    }
  }

  /** vLLM has these routes in its development mode only. */
  async #sleepMode({ request, response, path, query }: Turn): Promise<void> {
    const { debug, engines } = this.#instance;
    if (!debug)
      throw httpError(404, `${request.method} ${path} needs an instance started with debug`);
    if (path === "/is_sleeping") {
      const is_sleeping = engines.some(({ sleepMode }) => sleepMode.isOn);
      return sendJson(response, 200, { is_sleeping });
    }
    // Level 2 lets go of the weights too, and this engine keeps them.
    const level = new URLSearchParams(query).get("level") ?? "1";
    if (level !== "1")
      throw httpError(400, `level ${level.slice(0, 100)} is not supported, only 1`, "level");
    const changed = engines.map(({ sleepMode }) =>
      path === "/sleep" ? sleepMode.sleep() : sleepMode.wakeUp(),
    );
    await Promise.all(changed);
    response.writeHead(200).end();
  }

  /** Only these requests are limited: probes and metrics are answered under load too. */
  async #post(turn: Turn, submit: (body: unknown) => () => Promise<void>): Promise<void> {
    const slot = this.#inFlight.admit(turn.client);
    turn.response.once("close", () => slot.end());
    const body = await this.#http.withJson(turn, (value) => value);
    let answer: () => Promise<void>;
    try {
      answer = submit(body);
    } catch (error) {
      this.#releaseRefused(body, error);
      throw error;
    }
    await answer();
  }

  /**
   * Has the blocks freed that a refused body (4xx) names: no engine has the request. The proxy uses
   * that on purpose: it sends a request that every engine refuses, with the parameters of a prompt
   * that nobody will decode. After a 5xx the proxy tries the next instance.
   */
  #releaseRefused(body: unknown, error: unknown): void {
    const status = KvError.is(error) ? statusOf(error) : 500;
    const params = (body as { kv_transfer_params?: unknown } | null)?.kv_transfer_params;
    const isRefusal = status >= 400 && status < 499;
    if (!isRefusal || typeof params !== "object" || params === null || Array.isArray(params))
      return;
    // The engine of any data-parallel rank.
    const [engine] = this.#instance.engines;
    engine?.releaseRemote(`refused-${this.#ambient.random.uuid()}`, params as KvTransferParams);
  }

  async listen(host: string, port: number): Promise<{ port: number; url: string }> {
    const bound = await this.#http.listen(host, port);
    return { port: bound, url: httpUrl(host, bound) };
  }

  /**
   * Closes idle connections at once, and the others when their response has been sent or after two
   * seconds.
   */
  close(): Promise<void> {
    return this.#http.close(CLOSE_TIMEOUT_MS);
  }
}
