import type { PooledInstance } from "@kv/fleet";
import { checkDecodeBody } from "@kv/fleet/front-end";
import { type ReceivedBody, refusedRequest, shortened } from "@kv/http";
import type { KvError } from "@kv/interface";
import type { ClientRequest } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import { Attempts } from "../legs/tries.js";
import { type LegAnswer, parsedAnswer, readWhole, streamResponse } from "../response/leg-answer.js";
import { badAnswer } from "../upstream/upstream-errors.js";

/** The most servers asked for one list of models. */
const MOST_ASKED = 32;

export const MODELS_PATH = "/v1/models";

type Model = Readonly<Record<string, unknown>>;

/**
 * Any decode instance serves requests that need no KV of another instance, unchanged both ways.
 * `path` includes the query. No body means GET.
 */
export async function pass(
  legs: Legs,
  client: ClientRequest,
  path: string,
  body?: ReceivedBody,
): Promise<KvError | undefined> {
  const bytes = body?.take();
  if (bytes !== undefined) await checkDecodeBody(bytes, legs.fleet.parses);
  const answer = await legs.pass(client, path, bytes === undefined ? undefined : [bytes]);
  return streamResponse(client, answer, legs.settings);
}

/** Lists the models of all decode instances, or only `id`: vLLM has no such route. */
export async function models(
  legs: Legs,
  client: ClientRequest,
  query: string,
  id?: string,
): Promise<KvError | undefined> {
  const { decoders } = legs;
  const path = `${MODELS_PATH}${query}`;
  const servers = [...new Map(decoders.list().map((one) => [one.url, one])).values()];
  if (servers.length < 2 && id === undefined) return pass(legs, client, path);
  const all = await modelsOfAll(legs, client, path, servers);
  const body = id === undefined ? { object: "list", data: all } : modelOf(all, id);
  const { response, requestId } = client;
  response.writeHead(200, { "content-type": "application/json", "x-request-id": requestId });
  response.end(JSON.stringify(body));
  return undefined;
}

/**
 * Marks models that some servers lack.
 * @throws The first server's error, where none answered.
 */
async function modelsOfAll(
  legs: Legs,
  client: ClientRequest,
  path: string,
  servers: readonly PooledInstance[],
): Promise<Model[]> {
  const available = servers.filter((server) => server.available()).slice(0, MOST_ASKED);
  const asked = available.length === 0 ? [undefined] : available;
  const lists = await Promise.allSettled(
    asked.map((server) => modelsAt(legs, client, path, server)),
  );
  const answered = lists.flatMap((list) => (list.status === "fulfilled" ? [list.value] : []));
  const [first] = lists;
  if (answered.length === 0 && first?.status === "rejected") throw first.reason;
  const byId = new Map<unknown, Model[]>();
  for (const model of answered.flat()) byId.set(model.id, [...(byId.get(model.id) ?? []), model]);
  return [...byId.values()].flatMap(([model, ...others]): Model[] => {
    const count = others.length + 1;
    if (model === undefined) return [];
    if (count >= answered.length) return [model];
    return [{ ...model, note: `${count} of ${answered.length} decode instances have it` }];
  });
}

/** @throws `KV_PROXY_UPSTREAM_FAILED` for an answer that is no list of models. */
async function modelsAt(
  legs: Legs,
  client: ClientRequest,
  path: string,
  server?: PooledInstance,
): Promise<Model[]> {
  const { timeouts, limits } = legs.settings;
  const deadline = client.deadline.fork();
  const attempts = new Attempts();
  const own = { ...client, deadline, attempts };
  let answer: LegAnswer | undefined;
  try {
    answer = await legs.pass(own, path, undefined, server?.begin());
    const { instance } = answer.visit;
    const budget = { leftBytes: limits.heldAnswerLengthBytes, limit: "a list of models has" };
    const bytes = await readWhole(answer, deadline, timeouts.stallMs, budget);
    const { data } = (parsedAnswer(instance, bytes) ?? {}) as { readonly data?: unknown };
    if (answer.status !== 200 || !Array.isArray(data))
      throw badAnswer(instance, `answered GET ${MODELS_PATH} with status ${answer.status}`);
    answer.visit.succeeded();
    return data.filter((model): model is Model => typeof model === "object" && model !== null);
  } finally {
    answer?.discard();
    answer?.visit.abandoned();
    attempts.end();
    deadline.close();
  }
}

/** @throws `KV_REQUEST_INVALID` (404). */
function modelOf(models: readonly Model[], id: string): Model {
  const found = models.find((model) => model.id === id);
  if (found !== undefined) return found;
  const message = `there is no model ${shortened(id)}`;
  throw refusedRequest(404, message, "GET /v1/models lists the models", { param: "model" });
}
