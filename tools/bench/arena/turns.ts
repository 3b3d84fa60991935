// A trace of conversations, in the form of Mooncake's published traces, against P that have a
// prefix cache each.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";
import { listening } from "@kv/testing/http/listening";
import { startEventPublisher } from "../../../packages/fleet/test/support/event-publisher.js";
import { MODELS, prefillAnswer } from "../upstream-answers.js";

/** `hash_ids`: one for each 512 tokens; an id stands for all tokens up to its end. */
export interface TracedRequest {
  readonly timestamp: number;
  readonly input_length: number;
  readonly output_length: number;
  readonly hash_ids: readonly number[];
}

/** smg takes a server with other routes for a vLLM. */
const ROUTES = new Set(["/health", "/v1/models", "/kv_event_sources"]);

/** Ours: 48 conversations of 3 to 12 turns over 6 system prompts; half of them share a document. */
export const OUR_TRACE = new URL("./turns.jsonl", import.meta.url);

/** @throws A line that is not a request. */
export function readTrace(file: URL | string, most = 100_000): readonly TracedRequest[] {
  const lines = readFileSync(file, "utf8").split("\n").filter(Boolean).slice(0, most);
  return lines.map((line, at) => {
    const request = JSON.parse(line) as TracedRequest;
    const ids: unknown = request.hash_ids;
    const numbers = [request.timestamp, request.input_length, ...(Array.isArray(ids) ? ids : [-1])];
    if (!numbers.every((each) => Number.isSafeInteger(each) && each >= 0))
      throw new Error(`line ${at + 1} of the trace is not a request of Mooncake's form`);
    return request;
  });
}

/** What no fleet can exceed: blocks that were in any prompt before. */
export function blocksOfInfiniteCache(trace: readonly TracedRequest[]): number {
  const known = new Set<number>();
  let cached = 0;
  for (const { hash_ids: ids } of trace)
    for (const id of ids) {
      if (known.has(id)) cached += 1;
      known.add(id);
    }
  return cached;
}

/** A block of the trace is 16 words of a prompt, each a token. */
const BLOCK_TOKENS = 16;
/** Of a block that is not cached; a P computes one prompt at a time. */
const BLOCK_MS = 1;
const wordsOf = (id: number) =>
  Array.from({ length: BLOCK_TOKENS }, (_, at) => id * BLOCK_TOKENS + at);
export const promptOf = ({ hash_ids: ids }: TracedRequest) => ids.flatMap(wordsOf).join(" ");

export type CachingPrefill = Awaited<ReturnType<typeof startCachingPrefill>>;

/** A P that keeps the last `capacity` blocks, and tells so in KV events and in its answers. */
export async function startCachingPrefill(capacity: number, engineId: string, sideChannel: number) {
  const { endpoint, replayEndpoint, publish, close } = await startEventPublisher();
  const events = JSON.stringify({
    0: { publisher: "zmq", endpoint, replay_endpoint: replayEndpoint },
  });
  const held = new Set<number>();
  let [cached, computing] = [0, Promise.resolve()];

  const compute = async (ids: readonly number[]) => {
    const missing = ids.findIndex((id) => !held.has(id));
    const hits = missing === -1 ? ids.length : missing;
    cached += hits;
    await sleep((ids.length - hits) * BLOCK_MS);
    const stored = ids.slice(hits).map((id, at) => ({
      type: "BlockStored",
      block_hashes: [id],
      parent_block_hash: ids[hits + at - 1] ?? null,
      token_ids: wordsOf(id),
      block_size: BLOCK_TOKENS,
      lora_id: null,
      medium: "GPU",
      lora_name: null,
      group_idx: 0,
    }));
    // The last used is the last of the set.
    for (const id of [...ids].reverse()) {
      held.delete(id);
      held.add(id);
    }
    const removed = [...held].slice(0, Math.max(0, held.size - capacity));
    for (const id of removed) held.delete(id);
    const gone = { type: "BlockRemoved", block_hashes: removed, medium: "GPU", group_idx: 0 };
    const batch = [...stored, ...(removed.length > 0 ? [gone] : [])];
    if (batch.length > 0) await publish(batch);
    return hits;
  };

  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on("data", (chunk: Buffer) => chunks.push(chunk));
    request.on("end", () => {
      response.setHeader("content-type", "application/json");
      if (request.method === "GET") {
        if (!ROUTES.has(request.url ?? "")) response.statusCode = 404;
        return void response.end(request.url === "/kv_event_sources" ? events : MODELS);
      }
      const { prompt } = JSON.parse(Buffer.concat(chunks).toString()) as { prompt: string };
      const tokens = prompt.split(" ").map(Number);
      if (request.url?.endsWith("/render") === true)
        return void response.end(JSON.stringify([{ token_ids: tokens }]));
      const ids = tokens.filter((_, at) => at % BLOCK_TOKENS === 0).map((id) => id / BLOCK_TOKENS);
      computing = computing.then(async () => {
        const hits = await compute(ids);
        const usage = {
          prompt_tokens: tokens.length,
          completion_tokens: 1,
          prompt_tokens_details: { cached_tokens: hits * BLOCK_TOKENS },
        };
        response.end(
          JSON.stringify({ ...JSON.parse(prefillAnswer(engineId, sideChannel)), usage }),
        );
      });
    });
  });
  server.keepAliveTimeout = 60_000;
  const at = `127.0.0.1:${await listening(server)}`;
  return {
    at,
    cachedBlocks: () => cached,
    close() {
      close();
      server.close();
      server.closeAllConnections();
    },
  };
}
